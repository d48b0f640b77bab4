//! What holds two windows together.

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
    /// One end has not asked for training since the link was made, lost or taken down.
    Down,
    /// This end is training; the peer has not finished.
    Training,
    /// Both ends have finished the same training.
    Up,
}

/// The number of a training. It grows with each, so whatever is tagged with an epoch cannot pass for something newer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Epoch(pub u32);

impl Epoch {
    /// Before the first training.
    pub const NONE: Self = Self(0);
    /// The last one: what follows is the first. Peers that train honestly need years to get here.
    pub const MAX: Self = Self(u32::MAX >> 2);
}

impl std::fmt::Display for Epoch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Why [`Doorbell::wait`] came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WaitOutcome {
    /// The peer rang. It says "look", nothing more.
    Rung,
    /// Nobody rang in time.
    TimedOut,
}

/// Wakes a sleeper at the other end of a link.
///
/// Rings are not counted: several before a wait end that one wait. A ring before a wait is not lost.
pub trait Doorbell: Send {
    /// Wakes the peer, or whoever waits there next. What was stored and fenced before is visible to whom it wakes.
    fn ring(&self);
    /// Sleeps until the peer rings, or for `timeout`, and takes the ring. Zero only takes it.
    fn wait(&self, timeout: Option<Duration>) -> WaitOutcome;
    /// A descriptor that polls readable while a ring waits to be taken, where the mechanism has one.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
}

/// A few words of each node that the peer can write: for agreeing on something before windows can be used.
///
/// Words survive training. What the peer wrote is hostile.
pub trait Scratchpad: Send {
    /// Words each way.
    fn words(&self) -> usize;
    /// Stores a word for the peer.
    ///
    /// # Panics
    /// If there is no word `index`.
    fn write(&self, index: usize, value: u32);
    /// The word that the peer stored last, or 0. On memory backends a load of this node's own memory.
    ///
    /// # Panics
    /// If there is no word `index`.
    fn read(&self, index: usize) -> u32;
}

/// One end of a link: a window each way and what goes with them.
///
/// The parts are handles: cloning one, or asking for it again, gives the same window. They are associated types, so a
/// lane on a backend is compiled for that backend.
///
/// **Training.** A link starts down. Both ends call [`Link::train`] until it answers [`LinkState::Up`]. Before an end
/// calls it on a link that was up before, it must have stopped storing in the outbound window on behalf of the old
/// epoch: calling it says so to the peer. In exchange the inbound window is zero where the peer has stored nothing
/// since the link is up, so that lanes can be laid out afresh.
pub trait Link: Send {
    /// This node's window.
    type Inbound: Inbound + Slice + Clone;
    /// The peer's window.
    type Outbound: Outbound + Slice + Clone;
    /// Wakes the peer, and waits for it.
    type Doorbell: Doorbell + Clone;
    /// Words to agree by.
    type Scratchpad: Scratchpad + Clone;

    /// This node's window.
    fn inbound(&self) -> Self::Inbound;
    /// The peer's window.
    fn outbound(&self) -> Self::Outbound;
    /// Wakes the peer, and waits for it.
    fn doorbell(&self) -> Self::Doorbell;
    /// Words to agree by.
    fn scratchpad(&self) -> Self::Scratchpad;
    /// What the link is now, as far as this end can see without asking across it.
    fn state(&self) -> LinkState;
    /// The epoch that this end is training for, or was trained for last.
    fn epoch(&self) -> Epoch;
    /// One step towards [`LinkState::Up`]; never blocks. Call it again while it answers otherwise, and not in a hot
    /// loop.
    fn train(&mut self) -> LinkState;
    /// Takes the link down at both ends, until both train again.
    fn take_down(&mut self);
}

/// Steps that bring up any link whose two ends are trained in turn.
const TRAINING_STEPS_MAX: usize = 8;

/// Trains both ends of a link that live in one process; says whether it is up.
pub fn train_both(a: &mut impl Link, b: &mut impl Link) -> bool {
    (0..TRAINING_STEPS_MAX).any(|_| {
        let states = [a.train(), b.train()];
        states == [LinkState::Up; 2] && a.state() == LinkState::Up
    })
}
