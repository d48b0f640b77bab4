//! Links: two windows with their doorbells, scratchpads and state.

use crate::{Inbound, Outbound, Slice};
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// One of the two endpoints of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// The first endpoint. Where windows lie side by side, its window comes first.
    A,
    /// The second endpoint.
    B,
}

impl Endpoint {
    /// Both endpoints.
    pub const ALL: [Self; 2] = [Self::A, Self::B];

    /// The other endpoint.
    pub fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

/// Whether a link carries anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinkState {
    /// At least one endpoint has not begun training since the link was made, lost or taken down.
    Down,
    /// This endpoint is training, and the peer has not finished.
    Training,
    /// Both endpoints have finished the same training.
    Up,
}

/// Number of a training. It grows with each training, so data that is tagged with an epoch is never taken for newer
/// data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Epoch(pub u32);

impl Epoch {
    /// No training yet.
    pub const NONE: Self = Self(0);
    /// The last epoch, after which the first one follows. Honest peers take years to reach it.
    pub const MAX: Self = Self(u32::MAX >> 2);
}

impl std::fmt::Display for Epoch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Why [`Doorbell::wait`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WaitOutcome {
    /// The peer rang. The waiter polls the window to find out why.
    Rung,
    /// No ring arrived before the timeout.
    TimedOut,
}

/// Wakes a waiter at the other endpoint of a link.
///
/// Rings are not counted: several rings before a wait end that one wait. A ring before a wait is not lost.
pub trait Doorbell: Send {
    /// Wakes the peer's waiter, now or when it next waits. Stores that were fenced before are visible to the waiter
    /// that it wakes.
    fn ring(&self);
    /// Blocks until the peer rings, for at most `timeout`, and takes the ring. A timeout of zero only takes it.
    fn wait(&self, timeout: Option<Duration>) -> WaitOutcome;
    /// A descriptor that polls readable while there is a ring to take, if the mechanism has one.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
}

/// A few words of each node that the peer can write, for an agreement before windows can be used.
///
/// Words survive training. A word that the peer wrote is hostile.
pub trait Scratchpad: Send {
    /// Number of words in each direction.
    fn words(&self) -> usize;
    /// Stores a word for the peer.
    ///
    /// # Panics
    /// If there is no word `index`.
    fn write(&self, index: usize, value: u32);
    /// Returns the word that the peer stored last, or 0. On memory backends this is a load of this node's own memory.
    ///
    /// # Panics
    /// If there is no word `index`.
    fn read(&self, index: usize) -> u32;
}

/// One endpoint of a link: a window in each direction, and the parts that belong to it.
///
/// The parts are handles: a clone refers to the same part. They are associated types, so that a lane is compiled for
/// its backend.
///
/// **Training.** A link starts down. Both endpoints call [`Link::train`] until it returns [`LinkState::Up`]. Before an
/// endpoint trains a link that was up, it must have stopped storing in the outbound window for the old epoch: the call
/// tells the peer so. In return, the inbound window is zero except for what the peer has stored since the link came up,
/// so that lanes can be laid out again.
pub trait Link: Send {
    /// This node's window.
    type Inbound: Inbound + Slice + Clone;
    /// The peer's window.
    type Outbound: Outbound + Slice + Clone;
    /// Wakes the peer, and waits for its rings.
    type Doorbell: Doorbell + Clone;
    /// The scratchpad of both nodes.
    type Scratchpad: Scratchpad + Clone;

    /// Returns this node's window.
    fn inbound(&self) -> Self::Inbound;
    /// Returns the peer's window.
    fn outbound(&self) -> Self::Outbound;
    /// Returns the doorbell.
    fn doorbell(&self) -> Self::Doorbell;
    /// Returns the scratchpad.
    fn scratchpad(&self) -> Self::Scratchpad;
    /// Returns the state, as far as this endpoint knows without a load across the link.
    fn state(&self) -> LinkState;
    /// Returns the epoch that this endpoint is training for, or has trained for last.
    fn epoch(&self) -> Epoch;
    /// Makes one step towards [`LinkState::Up`]. Never blocks. Call it again until it returns `Up`, with pauses.
    fn train(&mut self) -> LinkState;
    /// Takes the link down at both endpoints, until both train again.
    fn take_down(&mut self);
}

/// Number of steps that bring up any link whose two endpoints are trained alternately.
const TRAINING_STEPS_MAX: usize = 8;

/// Trains both endpoints of a link in one process. Returns whether the link is up.
pub fn train_both(a: &mut impl Link, b: &mut impl Link) -> bool {
    (0..TRAINING_STEPS_MAX).any(|_| {
        let states = [a.train(), b.train()];
        states == [LinkState::Up; 2] && a.state() == LinkState::Up
    })
}
