//! Bells of a device: a number in the control block says who rang, an eventfd or an interrupt behind it wakes who
//! sleeps.
//!
//! All peers of a node ring the same eventfd of a vector, so the numbers are what counts: a ring is a new number first
//! and a kick second, and whoever waits remembers the numbers it has seen. Where there is nothing to kick with, or the
//! peer has nothing to be kicked with, the number is all, and a waiter naps between looks.

use super::layout::{Slot, VECTORS_MAX};
use super::{Device, Inner};
use crate::{Doorbell, WaitOutcome, eventfd};
use rustix::event::PollFlags;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};
use volmem::Registers;

/// Which of the bells of a direction: 0 is the monitor's, 1 and up are the proxy's partitions'.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Vector(pub u8);

impl Vector {
    /// The monitor's.
    pub const MONITOR: Self = Self(0);

    pub(super) fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// What a server calls its clients.
pub(super) type Identity = u16;

/// Clients of a server that are kept, at most. A rack has fewer.
pub(super) const IDENTITIES_MAX: usize = 128;

/// The doorbell register of an ivshmem device: the peer's number above the vector's.
const DOORBELL_REGISTER: usize = 12;

/// What wakes sleepers: at this node, and at the others.
#[derive(Debug, Default)]
pub(super) struct Kicks {
    /// This node's number at the server.
    pub identity: Option<Identity>,
    /// This node's eventfds, by vector.
    pub own: Vec<OwnedFd>,
    /// The other clients' eventfds, by vector.
    pub peers: RwLock<BTreeMap<Identity, Vec<OwnedFd>>>,
    /// The registers of a device that kicks by itself.
    pub registers: Option<Registers>,
}

impl Kicks {
    /// Whether there was a way to kick that client.
    pub(super) fn kick(&self, identity: Identity, vector: usize) -> bool {
        if let Some(registers) = &self.registers {
            registers.store(DOORBELL_REGISTER, u32::from(identity) << 16 | vector as u32);
            return true;
        }
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        let bell = peers.get(&identity).and_then(|bells| bells.get(vector));
        bell.inspect(|bell| eventfd::ring(bell)).is_some()
    }

    /// Another bell of a client.
    pub(super) fn add(&self, identity: Identity, bell: OwnedFd) {
        let mut peers = self.peers.write().unwrap_or_else(PoisonError::into_inner);
        if peers.len() >= IDENTITIES_MAX && !peers.contains_key(&identity) {
            return;
        }
        let bells = peers.entry(identity).or_default();
        if bells.len() < VECTORS_MAX {
            bells.push(bell);
        }
    }

    pub(super) fn remove(&self, identity: Identity) {
        self.peers.write().unwrap_or_else(PoisonError::into_inner).remove(&identity);
    }

    /// Takes over what another process knows of the clients.
    pub(super) fn replace(&self, peers: BTreeMap<Identity, Vec<OwnedFd>>) {
        *self.peers.write().unwrap_or_else(PoisonError::into_inner) = peers;
    }
}

/// A pause that grows while nothing happens: first the processor for others, then sleep.
struct Nap {
    pause: Duration,
    yields_left: u32,
}

const YIELDS: u32 = 32;
const PAUSE_FIRST: Duration = Duration::from_micros(20);
const PAUSE_LAST: Duration = Duration::from_millis(2);

impl Nap {
    fn new() -> Self {
        Self { pause: PAUSE_FIRST, yields_left: YIELDS }
    }

    /// Pauses, no longer than what is `left`.
    fn pause(&mut self, left: Option<Duration>) {
        if self.yields_left > 0 {
            self.yields_left -= 1;
            return thread::yield_now();
        }
        thread::sleep(left.map_or(self.pause, |left| left.min(self.pause)));
        self.pause = (2 * self.pause).min(PAUSE_LAST);
    }
}

/// When a wait ends; a timeout beyond what the clock can count is none.
#[derive(Clone, Copy)]
struct Deadline(Option<Instant>);

impl Deadline {
    fn after(timeout: Option<Duration>) -> Self {
        Self(timeout.and_then(|timeout| Instant::now().checked_add(timeout)))
    }

    fn left(self) -> Option<Duration> {
        self.0.map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }
}

/// The bell of one vector at this node, whichever peer rings it: for a thread that serves all of them.
#[derive(Debug, Clone)]
pub struct VectorBell {
    device: Device,
    vector: Vector,
}

impl VectorBell {
    pub(super) fn new(device: Device, vector: Vector) -> Self {
        Self { device, vector }
    }

    /// Which peers have rung since they were last taken. Never blocks.
    pub fn take(&self) -> BTreeSet<Slot> {
        let inner = self.inner();
        if let Some(bell) = inner.own_bell(self.vector) {
            eventfd::take(bell);
        }
        let index = self.vector.index();
        inner.peers().filter(|peer| inner.silence(*peer, index)).collect()
    }

    /// Sleeps until a peer rings, or for `timeout`, and takes all rings; none when nobody rang in time.
    pub fn wait(&self, timeout: Option<Duration>) -> BTreeSet<Slot> {
        let (deadline, mut nap) = (Deadline::after(timeout), Nap::new());
        loop {
            let peers = self.take();
            let left = deadline.left();
            if !peers.is_empty() || left == Some(Duration::ZERO) {
                return peers;
            }
            match self.inner().own_bell(self.vector) {
                // Ready, late or interrupted by a signal: the next turn sees which.
                Some(bell) => _ = eventfd::poll_for(bell, PollFlags::IN, left),
                None => nap.pause(left),
            }
        }
    }

    /// A descriptor that polls readable while a ring waits to be taken. None where nothing wakes: look now and then.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner().own_bell(self.vector).map(AsFd::as_fd)
    }

    fn inner(&self) -> &Inner {
        self.device.inner()
    }
}

/// One vector of the bells between this node and one peer.
///
/// The vector's eventfd is every peer's: a ring from another one wakes this waiter too, and is left for its own. Where
/// one thread waits for several peers, [`VectorBell`] is the better way.
#[derive(Debug, Clone)]
pub struct DeviceDoorbell {
    device: Device,
    peer: Slot,
    vector: Vector,
}

/// How long a waiter sleeps while a ring for somebody else keeps the eventfd readable.
const FOREIGN_RING_PAUSE: Duration = Duration::from_millis(1);

impl DeviceDoorbell {
    pub(super) fn new(device: Device, peer: Slot, vector: Vector) -> Self {
        Self { device, peer, vector }
    }

    /// Takes a ring of this peer, and leaves those of others as they were.
    fn take(&self) -> bool {
        let inner = self.device.inner();
        let is_rung = inner.silence(self.peer, self.vector.index());
        self.drain(inner);
        is_rung
    }

    /// Makes the eventfd silent unless a peer's number still says otherwise; whether one does.
    fn drain(&self, inner: &Inner) -> bool {
        let Some(bell) = inner.own_bell(self.vector) else { return false };
        eventfd::take(bell);
        let others_ring = inner.peers().any(|peer| inner.is_rung(peer, self.vector.index()));
        if others_ring {
            eventfd::ring(bell);
        }
        others_ring
    }

    fn pause(&self, left: Option<Duration>, nap: &mut Nap) {
        let inner = self.device.inner();
        let Some(bell) = inner.own_bell(self.vector) else { return nap.pause(left) };
        let is_readable = eventfd::poll_for(bell, PollFlags::IN, left) == Ok(true);
        if is_readable && !inner.is_rung(self.peer, self.vector.index()) && self.drain(inner) {
            thread::sleep(left.map_or(FOREIGN_RING_PAUSE, |left| left.min(FOREIGN_RING_PAUSE)));
        }
    }
}

impl Doorbell for DeviceDoorbell {
    fn ring(&self) {
        self.device.inner().ring(self.peer, self.vector.index());
    }

    fn wait(&self, timeout: Option<Duration>) -> WaitOutcome {
        let (deadline, mut nap) = (Deadline::after(timeout), Nap::new());
        loop {
            if self.take() {
                return WaitOutcome::Rung;
            }
            let left = deadline.left();
            if left == Some(Duration::ZERO) {
                return WaitOutcome::TimedOut;
            }
            self.pause(left, &mut nap);
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.device.inner().own_bell(self.vector).map(AsFd::as_fd)
    }
}

/// Copies of descriptors, to be handed to another process.
pub(super) fn duplicates<'a>(descriptors: impl IntoIterator<Item = &'a OwnedFd>) -> Result<Vec<OwnedFd>, Errno> {
    descriptors.into_iter().map(|descriptor| rustix::io::fcntl_dupfd_cloexec(descriptor, 0)).collect()
}
