//! Doorbells of a device: a ring number in the control block, and an interrupt (an eventfd) that wakes the waiter.
//!
//! All peers of a node signal the same eventfd of a vector, so only the numbers tell who has rung: a ring first
//! publishes a new number and then interrupts the peer, and a waiter remembers the last number that it has taken.
//! Without an eventfd at either node there is only the number, and the waiter polls it with increasing pauses.

use super::format::{NodeSlot, VECTORS_MAX};
use super::state::{Device, DeviceState};
use crate::wait::{Backoff, wait_for_ring};
use crate::{Doorbell, WaitOutcome, eventfd};
use rustix::event::PollFlags;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::Duration;

/// Number of a doorbell of one direction: 0 is the monitor's, 1 and up belong to the proxy's partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Vector(pub u8);

impl Vector {
    /// The monitor's vector.
    pub const MONITOR: Self = Self(0);

    fn index(self) -> usize {
        usize::from(self.0)
    }

    fn checked(self) -> Self {
        assert!(self.index() < VECTORS_MAX, "doorbell {} of {VECTORS_MAX}", self.0);
        self
    }
}

impl Device {
    /// The doorbells of one vector between this node and `peer`.
    ///
    /// # Panics
    /// If `peer` is this node or not a node of the rack, or if there is no such vector.
    pub fn doorbell(&self, peer: NodeSlot, vector: Vector) -> DeviceDoorbell {
        self.state().blocks_of(peer);
        DeviceDoorbell { device: self.clone(), peer, vector: vector.checked() }
    }

    /// This node's doorbell of one vector, whichever peer rings it.
    ///
    /// # Panics
    /// If there is no such vector.
    pub fn vector_doorbell(&self, vector: Vector) -> VectorDoorbell {
        VectorDoorbell { device: self.clone(), vector: vector.checked() }
    }
}

impl DeviceState {
    fn own_eventfd(&self, vector: Vector) -> Option<&OwnedFd> {
        self.interrupts.own_eventfds.get(vector.index())
    }
}

/// This node's doorbell of one vector, whichever peer rings it: for a thread that serves all peers.
#[derive(Debug, Clone)]
pub struct VectorDoorbell {
    device: Device,
    vector: Vector,
}

impl VectorDoorbell {
    /// Takes the rings of all peers, and returns which peers have rung. Never blocks.
    pub fn take(&self) -> BTreeSet<NodeSlot> {
        let state = self.device.state();
        if let Some(eventfd) = state.own_eventfd(self.vector) {
            eventfd::take(eventfd);
        }
        let index = self.vector.index();
        state.peers().filter(|peer| state.take_rings(*peer, index)).collect()
    }

    /// Blocks until a peer rings, for at most `timeout`, and takes the rings of all peers. The set is empty after a
    /// timeout.
    pub fn wait(&self, timeout: Option<Duration>) -> BTreeSet<NodeSlot> {
        let (mut peers, mut backoff) = (BTreeSet::new(), Backoff::default());
        let take = || {
            peers = self.take();
            !peers.is_empty()
        };
        wait_for_ring(timeout, take, |remaining| match self.device.state().own_eventfd(self.vector) {
            // Readable, timed out or interrupted by a signal: the next poll finds out.
            Some(eventfd) => _ = eventfd::poll_for(eventfd, PollFlags::IN, remaining),
            None => backoff.pause(remaining),
        });
        peers
    }

    /// A descriptor that polls readable while there is a ring to take. `None` without interrupts: poll instead.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.device.state().own_eventfd(self.vector).map(AsFd::as_fd)
    }
}

/// The doorbells of one vector between this node and one peer.
///
/// All peers share the eventfd of the vector: a ring of another peer wakes this waiter too, which leaves it for the
/// waiter it is meant for. One thread that waits for several peers uses a [`VectorDoorbell`].
#[derive(Debug, Clone)]
pub struct DeviceDoorbell {
    device: Device,
    peer: NodeSlot,
    vector: Vector,
}

/// Sleep of a waiter while a ring of another peer keeps the eventfd readable.
const OTHER_PEERS_RING_PAUSE: Duration = Duration::from_millis(1);

impl DeviceDoorbell {
    /// Takes a ring of this peer, and leaves those of other peers.
    fn take(&self) -> bool {
        let state = self.device.state();
        let is_rung = state.take_rings(self.peer, self.vector.index());
        self.drain(state);
        is_rung
    }

    /// Resets the eventfd unless another peer's ring has not been taken. Returns whether there is one.
    fn drain(&self, state: &DeviceState) -> bool {
        let Some(eventfd) = state.own_eventfd(self.vector) else { return false };
        eventfd::take(eventfd);
        let others_ring = state.peers().any(|peer| state.is_rung(peer, self.vector.index()));
        if others_ring {
            eventfd::ring(eventfd);
        }
        others_ring
    }

    fn pause(&self, remaining: Option<Duration>, backoff: &mut Backoff) {
        let state = self.device.state();
        let Some(eventfd) = state.own_eventfd(self.vector) else { return backoff.pause(remaining) };
        let is_readable = eventfd::poll_for(eventfd, PollFlags::IN, remaining) == Ok(true);
        if is_readable && !state.is_rung(self.peer, self.vector.index()) && self.drain(state) {
            let pause = OTHER_PEERS_RING_PAUSE;
            thread::sleep(remaining.map_or(pause, |remaining| remaining.min(pause)));
        }
    }
}

impl Doorbell for DeviceDoorbell {
    fn ring(&self) {
        self.device.state().ring(self.peer, self.vector.index());
    }

    fn wait(&self, timeout: Option<Duration>) -> WaitOutcome {
        let mut backoff = Backoff::default();
        wait_for_ring(timeout, || self.take(), |remaining| self.pause(remaining, &mut backoff))
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.device.state().own_eventfd(self.vector).map(AsFd::as_fd)
    }
}
