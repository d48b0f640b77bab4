//! One end of a link over a device.

use super::bell::{DeviceDoorbell, Vector};
use super::layout::Slot;
use super::memory::{DeviceInbound, DeviceOutbound, DeviceScratchpad};
use super::{Device, Inner};
use crate::{Epoch, Link, LinkState, Training};

/// This node's end of its link with one peer: trained by the monitor, and by nobody else.
#[derive(Debug)]
pub struct DeviceLink {
    device: Device,
    peer: Slot,
    training: Training,
}

impl DeviceLink {
    /// Whatever an earlier holder of this end had published is withdrawn.
    pub(super) fn attach(device: Device, peer: Slot) -> Self {
        let training = Training::attach(device.inner().block_in(peer).training());
        let link = Self { device, peer, training };
        link.publish();
        link
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

    fn inner(&self) -> &Inner {
        self.device.inner()
    }

    fn theirs(&self) -> u32 {
        self.inner().block_in(self.peer).training()
    }

    fn publish(&self) {
        self.inner().block_out(self.peer).publish_training(self.training.word());
    }
}

impl Link for DeviceLink {
    type Inbound = DeviceInbound;
    type Outbound = DeviceOutbound;
    type Doorbell = DeviceDoorbell;
    type Scratchpad = DeviceScratchpad;

    fn inbound(&self) -> DeviceInbound {
        self.device.inbound(self.peer)
    }

    fn outbound(&self) -> DeviceOutbound {
        self.device.outbound(self.peer)
    }

    /// The monitor's.
    fn doorbell(&self) -> DeviceDoorbell {
        self.doorbell_of(Vector::MONITOR)
    }

    fn scratchpad(&self) -> DeviceScratchpad {
        let [own, peer] = self.inner().blocks_of(self.peer).clone();
        DeviceScratchpad { own, peer }
    }

    fn state(&self) -> LinkState {
        self.training.state(self.theirs())
    }

    fn epoch(&self) -> Epoch {
        self.training.epoch()
    }

    fn train(&mut self) -> LinkState {
        let inbound = self.inbound();
        // The memory may hold anything, also before the first epoch.
        self.training.step(self.theirs(), |_epoch| inbound.clean());
        self.publish();
        self.state()
    }

    fn take_down(&mut self) {
        self.training.take_down();
        self.publish();
    }
}
