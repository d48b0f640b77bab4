//! Interrupts of a device: the eventfds that wake this node, and the ways to wake the others.

use super::format::VECTORS_MAX;
use crate::eventfd;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{PoisonError, RwLock};
use volmem::Registers;

/// ID of a client of an ivshmem server.
pub(super) type PeerId = u16;

/// Maximum number of server clients whose eventfds are kept. A rack has fewer nodes.
pub(super) const PEERS_MAX: usize = 128;

/// Offset of the doorbell register of an ivshmem device. It takes the peer's ID in the upper 16 bits and the vector in
/// the lower 16 bits (QEMU, docs/specs/ivshmem-spec).
const DOORBELL_REGISTER: usize = 12;

/// The interrupts of a device, by vector.
#[derive(Debug, Default)]
pub(super) struct Interrupts {
    /// This node's ID at the server.
    pub own_id: Option<PeerId>,
    /// Eventfds that wake this node, by vector.
    pub own_eventfds: Vec<OwnedFd>,
    /// Eventfds that wake the other clients, by vector.
    pub peer_eventfds: RwLock<BTreeMap<PeerId, Vec<OwnedFd>>>,
    /// Registers of a device that interrupts its peers itself.
    pub registers: Option<Registers>,
}

impl Interrupts {
    /// Interrupts a peer. Returns whether there was a way to do so.
    pub(super) fn interrupt(&self, peer_id: PeerId, vector: usize) -> bool {
        if let Some(registers) = &self.registers {
            registers.store(DOORBELL_REGISTER, u32::from(peer_id) << 16 | vector as u32);
            return true;
        }
        let peers = self.peer_eventfds.read().unwrap_or_else(PoisonError::into_inner);
        let eventfd = peers.get(&peer_id).and_then(|eventfds| eventfds.get(vector));
        eventfd.inspect(|eventfd| eventfd::ring(eventfd)).is_some()
    }

    /// Adds the eventfd of a peer's next vector. Ignores it beyond [`PEERS_MAX`] peers or [`VECTORS_MAX`] vectors.
    pub(super) fn add_peer_eventfd(&self, peer_id: PeerId, eventfd: OwnedFd) {
        let mut peers = self.peer_eventfds.write().unwrap_or_else(PoisonError::into_inner);
        if peers.len() >= PEERS_MAX && !peers.contains_key(&peer_id) {
            return;
        }
        let eventfds = peers.entry(peer_id).or_default();
        if eventfds.len() < VECTORS_MAX {
            eventfds.push(eventfd);
        }
    }

    pub(super) fn remove_peer(&self, peer_id: PeerId) {
        self.peer_eventfds.write().unwrap_or_else(PoisonError::into_inner).remove(&peer_id);
    }

    /// Replaces all peers' eventfds by those that another process of this node knows.
    pub(super) fn replace_peers(&self, peers: BTreeMap<PeerId, Vec<OwnedFd>>) {
        *self.peer_eventfds.write().unwrap_or_else(PoisonError::into_inner) = peers;
    }
}
