//! One end of a link over a device.

use super::Device;
use super::bell::{DeviceDoorbell, Vector};
use super::layout::Slot;
use super::memory::{DeviceInbound, DeviceMemory, DeviceOutbound, DeviceScratchpad};
use crate::memory_link::InitialContents;
use crate::{Epoch, Link, LinkState, MemoryLink};

/// This node's end of its link with one peer: trained by the monitor, and by nobody else.
#[derive(Debug)]
pub struct DeviceLink {
    device: Device,
    peer: Slot,
    memory: MemoryLink<DeviceDoorbell, DeviceMemory>,
}

impl DeviceLink {
    /// Whatever an earlier holder of this end had published is withdrawn.
    pub(super) fn attach(device: Device, peer: Slot) -> Self {
        let [own, theirs] = device.inner().sides_of(peer);
        let bell = device.doorbell(peer, Vector::MONITOR);
        let memory = MemoryLink::attach(own, theirs, bell, InitialContents::Unknown);
        Self { device, peer, memory }
    }

    /// The peer.
    pub fn peer(&self) -> Slot {
        self.peer
    }

    /// The bells of a vector.
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

    /// The monitor's.
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
