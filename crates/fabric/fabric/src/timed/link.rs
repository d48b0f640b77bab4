//! A timed link: any link, wrapped.

use super::clock::{Clock, Monotonic};
use super::error::TimedError;
use super::windows::{TimedConfig, TimedDoorbell, TimedInbound, TimedOutbound, TimedWindows};
use crate::{Epoch, Link, LinkState};
use std::fmt;

/// One endpoint of a timed link.
pub struct TimedLink<L: Link, C: Clock = Monotonic> {
    link: L,
    windows: TimedWindows<L, C>,
}

impl<L: Link> TimedLink<L> {
    /// Wraps an endpoint of a link that has not been trained.
    ///
    /// # Errors
    /// [`TimedError`].
    pub fn new(link: L, config: TimedConfig) -> Result<Self, TimedError> {
        Self::with_clock(link, config, Monotonic)
    }
}

impl<L: Link, C: Clock> TimedLink<L, C> {
    /// Wraps an endpoint like [`TimedLink::new`], with another clock.
    ///
    /// # Errors
    /// [`TimedError`].
    pub fn with_clock(link: L, config: TimedConfig, clock: C) -> Result<Self, TimedError> {
        let windows = TimedWindows::idle(link.inbound(), link.outbound(), link.doorbell(), config, clock)?;
        Ok(Self { link, windows })
    }

    /// Whether the peer violated the protocol, or did not load for [`STALL_NS_MAX`](super::STALL_NS_MAX).
    pub fn is_lost(&self) -> bool {
        self.windows.is_lost()
    }
}

impl<L: Link, C: Clock> fmt::Debug for TimedLink<L, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TimedLink({:?}, {:?})", self.state(), self.windows)
    }
}

impl<L: Link, C: Clock> Link for TimedLink<L, C> {
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

    /// Stops storing before the wrapped link tells the peer that it has.
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

#[cfg(test)]
mod tests;
