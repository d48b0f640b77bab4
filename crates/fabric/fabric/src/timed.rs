//! A link that takes its time: any link with the delay, the rate and the write granularity of a modelled one, in real
//! time, between two processes of one machine.
//!
//! Stores do not go to their place. They are appended to a journal in the wrapped link's window, each with the time
//! when it is due: once the link is free, after its packets' own time and the way. The receiver's loads put what is
//! due into the window, which is private memory of its process. Nothing overtakes: stores arrive in their order, and
//! rings after the stores before them. Both ends read the kernel's monotonic clock, and the way takes longer than a
//! cache line between two cores, so what the emulation itself costs is hidden in the delay, but for a look at the
//! clock.
//!
//! * **Rate.** All who write over one link share a [`Pace`], also from several processes.
//! * **Credits.** A journal is bounded. When it is full a store stalls, as for want of posted credits; who stalls
//!   serves its own journal and wakes the peer. A peer that does not look for [`STALL_NS_MAX`] has lost the link. With
//!   [`memory_bytes`] of memory, a journal holds all that an obedient sender leaves unread.
//! * **Slices.** A slice of a window shares its journal. Parts that different processes own are made of slices of the
//!   *wrapped* windows, each wrapped by itself: [`Windows`].
//! * **One process.** Window, positions and locks are memory of the process that made them: of a process and its fork
//!   one goes on with them, and no signal handler uses them.
//! * **Not timed**: training, scratchpads, and the way back of the journal's own credits.
//!
//! Programs that hold a part of a link's windows themselves fork, exec, hand it on and stop to look whenever they like:
//! their windows are [`InPlace`], which has all its state in the shared memory and needs nobody to look.

mod clock;
mod in_place;
mod journal;
mod timing;
mod windows;

use crate::{Doorbell, Epoch, Inbound, Link, LinkState, Outbound, Slice, WaitOutcome};
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

pub use clock::{Clock, Monotonic};
pub use in_place::{InPlace, InPlaceInbound, InPlaceOutbound, InPlaceSetup, Shape};
pub use timing::{LinkTiming, Pace};
pub use windows::{STALL_NS_MAX, TimedInbound, TimedOutbound, Windows};

/// What timed windows are made of: every link has it. Whoever holds windows without a link, such as a program that owns
/// a part of one, names the types of its own.
pub trait Parts {
    /// This node's window.
    type Inbound: Inbound + Slice + Clone;
    /// The peer's window.
    type Outbound: Outbound + Slice + Clone;
    /// Wakes the peer.
    type Doorbell: Doorbell + Clone;
}

impl<L: Link> Parts for L {
    type Inbound = <L as Link>::Inbound;
    type Outbound = <L as Link>::Outbound;
    type Doorbell = <L as Link>::Doorbell;
}

/// What makes a timed window.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Bytes of the window: both ends say the same.
    pub window_bytes: usize,
    /// How long stores take.
    pub timing: LinkTiming,
    /// Whose link it is.
    pub pace: Pace,
}

/// Why a link cannot be timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimedError {
    /// The wrapped window has too little memory for the journal.
    Memory {
        /// Bytes of the wrapped window.
        found_bytes: usize,
        /// Bytes that [`memory_bytes`] advises.
        advised_bytes: usize,
    },
    /// The size of a window is not a positive multiple of the cache line, or no window is so large.
    WindowSize {
        /// Bytes asked for.
        window_bytes: usize,
    },
    /// A figure of the timing is none that a link can have.
    Timing {
        /// Which.
        what: &'static str,
        /// What it is.
        value: u64,
        /// The least that it may be.
        min: u64,
        /// The most.
        max: u64,
    },
}

impl fmt::Display for TimedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory { found_bytes, advised_bytes } => {
                write!(f, "timed link: a journal in {found_bytes} bytes is too small; give it {advised_bytes} bytes")
            }
            Self::WindowSize { window_bytes } => write!(
                f,
                "timed link: window of {window_bytes} bytes; use a positive multiple of {} below 2^48",
                volmem::CACHE_LINE_BYTES
            ),
            Self::Timing { what, value, min, max } => {
                write!(f, "timed link: {what} = {value}; use {min} to {max}")
            }
        }
    }
}

impl std::error::Error for TimedError {}

/// Bytes that the wrapped window should have for a timed one of `window_bytes`.
pub fn memory_bytes(window_bytes: usize, timing: LinkTiming) -> Result<usize, TimedError> {
    Ok(journal::Plan::memory_bytes(window_bytes, timing::Costs::new(timing)?.piece_bytes))
}

/// One end of a link that takes its time.
pub struct Timed<L: Link, C: Clock = Monotonic> {
    link: L,
    windows: Windows<L, C>,
}

impl<L: Link> Timed<L> {
    /// Wraps an end of a link that is not trained yet.
    ///
    /// # Errors
    /// [`TimedError`].
    pub fn new(link: L, setup: Setup) -> Result<Self, TimedError> {
        Self::with_clock(link, setup, Monotonic)
    }
}

impl<L: Link, C: Clock> Timed<L, C> {
    /// As [`Timed::new`], by another clock.
    ///
    /// # Errors
    /// [`TimedError`].
    pub fn with_clock(link: L, setup: Setup, clock: C) -> Result<Self, TimedError> {
        let windows = Windows::idle(link.inbound(), link.outbound(), link.doorbell(), setup, clock)?;
        Ok(Self { link, windows })
    }

    /// Whether the peer wrote nonsense, or did not look for too long.
    pub fn is_lost(&self) -> bool {
        self.windows.is_lost()
    }
}

impl<L: Link, C: Clock> fmt::Debug for Timed<L, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Timed({:?}, {:?})", self.state(), self.windows)
    }
}

impl<L: Link, C: Clock> Link for Timed<L, C> {
    type Inbound = TimedInbound<L, C>;
    type Outbound = TimedOutbound<L, C>;
    type Doorbell = TimedDoorbell<L, C>;
    type Scratchpad = L::Scratchpad;

    fn inbound(&self) -> TimedInbound<L, C> {
        self.windows.inbound()
    }

    fn outbound(&self) -> TimedOutbound<L, C> {
        self.windows.outbound()
    }

    fn doorbell(&self) -> TimedDoorbell<L, C> {
        self.windows.doorbell(self.link.doorbell())
    }

    fn scratchpad(&self) -> L::Scratchpad {
        self.link.scratchpad()
    }

    fn state(&self) -> LinkState {
        let state = self.link.state();
        if state != LinkState::Up {
            return state;
        }
        self.windows.begin(self.link.epoch());
        if self.windows.is_lost() { LinkState::Down } else { state }
    }

    fn epoch(&self) -> Epoch {
        self.link.epoch()
    }

    /// Stores end before the peer is told that they have.
    fn train(&mut self) -> LinkState {
        if self.windows.is_lost() {
            self.take_down();
        }
        if self.link.state() != LinkState::Up {
            self.windows.end();
        }
        self.link.train();
        self.state()
    }

    fn take_down(&mut self) {
        self.windows.end();
        self.link.take_down();
    }
}

/// A doorbell whose rings are as late as the stores before them.
pub struct TimedDoorbell<L: Parts, C: Clock = Monotonic> {
    shared: Arc<windows::Shared<L, C>>,
    inner: L::Doorbell,
}

impl<L: Parts, C: Clock> Clone for TimedDoorbell<L, C> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), inner: self.inner.clone() }
    }
}

impl<L: Parts, C: Clock> Doorbell for TimedDoorbell<L, C> {
    /// The wrapped bell rings at once, and whoever it wakes waits until the ring is due.
    fn ring(&self) {
        self.shared.announce_ring();
        self.inner.ring();
    }

    /// Taking a ring lasts until the stores before it have arrived.
    fn wait(&self, timeout: Option<Duration>) -> WaitOutcome {
        let wake = self.inner.wait(timeout);
        if wake == WaitOutcome::Rung {
            self.shared.settle();
        }
        wake
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor()
    }
}

#[cfg(test)]
#[path = "timed/tests.rs"]
mod tests;
