//! A node's endpoint of a link over a device.

use super::doorbell::{DeviceDoorbell, Vector};
use super::format::NodeSlot;
use super::memory::{DeviceInbound, DeviceMemory, DeviceOutbound, DeviceScratchpad};
use super::state::Device;
use crate::memory_link::InitialContents;
use crate::{Epoch, Link, LinkState, MemoryLink};

/// This node's endpoint of its link with one peer. Only the node's monitor trains it.
#[derive(Debug)]
pub struct DeviceLink {
    device: Device,
    peer: NodeSlot,
    memory: MemoryLink<DeviceDoorbell, DeviceMemory>,
}

impl Device {
    /// This node's endpoint of its link with `peer`; it is down. There is one at a time: a further call takes the link
    /// from the holder of the first.
    ///
    /// # Panics
    /// If `peer` is this node, or not a node of the rack.
    pub fn link(&self, peer: NodeSlot) -> DeviceLink {
        let [own, theirs] = self.state().sides_of(peer);
        let doorbell = self.doorbell(peer, Vector::MONITOR);
        let memory = MemoryLink::attach(own, theirs, doorbell, InitialContents::Unknown);
        DeviceLink { device: self.clone(), peer, memory }
    }
}

impl DeviceLink {
    /// Slot of the peer.
    pub fn peer(&self) -> NodeSlot {
        self.peer
    }

    /// The doorbells of a vector.
    ///
    /// # Panics
    /// If there is no such vector.
    pub fn doorbell_of(&self, vector: Vector) -> DeviceDoorbell {
        self.device.doorbell(self.peer, vector)
    }
}

impl Link for DeviceLink {
    type Inbound = DeviceInbound;
    type Outbound = DeviceOutbound;
    type Doorbell = DeviceDoorbell;
    type Scratchpad = DeviceScratchpad;

    fn inbound(&self) -> DeviceInbound {
        self.memory.inbound()
    }

    fn outbound(&self) -> DeviceOutbound {
        self.memory.outbound()
    }

    /// The doorbell of [`Vector::MONITOR`].
    fn doorbell(&self) -> DeviceDoorbell {
        self.memory.doorbell()
    }

    fn scratchpad(&self) -> DeviceScratchpad {
        self.memory.scratchpad()
    }

    fn state(&self) -> LinkState {
        self.memory.state()
    }

    fn epoch(&self) -> Epoch {
        self.memory.epoch()
    }

    fn train(&mut self) -> LinkState {
        self.memory.train()
    }

    fn take_down(&mut self) {
        self.memory.take_down();
    }
}
