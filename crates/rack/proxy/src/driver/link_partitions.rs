//! The partitions of an engine in the windows of a link, and the lanes in them.

use super::engine_plan::EnginePlan;
use crate::engine::PartitionLanes;
use crate::placement::Class;
use control::proxy::Configuration;
use fabric::device::{Device, DeviceDoorbell, DeviceInbound, DeviceLink, DeviceOutbound, NodeSlot};
use fabric::timed::{self, LinkTiming, Pacer, TimedConfig, TimedInbound, TimedOutbound};
use fabric::{Inbound, Outbound, Slice};
use lane::{Consumer, Layout, Producer};
use volmem::CACHE_LINE_BYTES;
use volmem::sync::Ordering;

/// Bytes before the lanes of a partition: the greeting line.
pub(super) const GREETING_BYTES: usize = CACHE_LINE_BYTES;
/// Minimum number of slots of a ring: enough for the longest frame.
const SLOTS_MIN: u64 = 512;
/// Maximum number of slots of a latency partition's ring: unread frames delay a short message.
const LATENCY_SLOTS_MAX: u64 = 2048;
/// Maximum number of slots of a bulk partition's ring: larger rings do not fit into the second-level cache.
const BULK_SLOTS_MAX: u64 = 8192;

/// Windows that are slowed down to the model of a link.
pub(super) type TimedWindows = timed::TimedWindows<DeviceLink>;
type TimedLanes = PartitionLanes<TimedInbound<DeviceLink>, TimedOutbound<DeviceLink>>;

/// The secrets of the lanes of a link.
#[derive(Debug, Clone, Copy)]
pub(super) struct LaneSecrets {
    /// Of the lanes to this node.
    pub(super) inbound: u64,
    /// Of the lanes to the peer.
    pub(super) outbound: u64,
}

/// The partitions of an engine.
pub(super) struct LinkPartitions {
    slots: u64,
    pub(super) latency: (DeviceInbound, DeviceOutbound),
    bulk: Option<(DeviceInbound, DeviceOutbound)>,
}

impl LinkPartitions {
    /// Finds the partitions of a plan. The device has room for them ([`super::shared::Shared::check_room`]).
    pub(super) fn new(setup: &Configuration, device: &Device, plan: EnginePlan, peer: NodeSlot) -> Self {
        let window_bytes = device.layout().window_bytes();
        let slots = ring_slots(window_bytes, setup).expect("`check_room` was called");
        let bytes = partition_bytes(window_bytes, setup);
        let partition = |index: usize| {
            let offset = setup.control_partition_bytes as usize + index * bytes;
            (device.inbound(peer).slice(offset, bytes), device.outbound(peer).slice(offset, bytes))
        };
        Self { slots, latency: partition(plan.latency), bulk: plan.bulk.map(partition) }
    }

    /// Zeroes the partitions that the peer writes, except for its greeting. The peer stores nothing else until it is
    /// told that they are clean.
    pub(super) fn clean(&self) {
        for (inbound, _) in self.all() {
            for offset in (GREETING_BYTES..inbound.len_bytes()).step_by(size_of::<u64>()) {
                inbound.store_u64(offset, 0, Ordering::Relaxed);
            }
        }
    }

    /// Returns the lanes of the partitions: latency, then bulk.
    pub(super) fn lanes(&self, secrets: LaneSecrets) -> Vec<PartitionLanes<DeviceInbound, DeviceOutbound>> {
        let lanes = |(class, partition): (usize, &(DeviceInbound, DeviceOutbound))| {
            let slots_max = if class == Class::Bulk as usize { BULK_SLOTS_MAX } else { LATENCY_SLOTS_MAX };
            let (inbound, outbound) = after_greeting(partition);
            lanes_over(inbound, outbound, Layout::packed(self.slots.min(slots_max), 0), secrets, class)
        };
        self.all().enumerate().map(lanes).collect()
    }

    /// Returns the partitions behind the model of a link: latency, then bulk.
    pub(super) fn timed(&self, timing: LinkTiming, pacer: &Pacer, doorbell: &DeviceDoorbell) -> Vec<TimedWindows> {
        let timed = |partition: &(DeviceInbound, DeviceOutbound)| {
            let slots = self.timed_slots(timing);
            let window_bytes = Layout::packed(slots, 0).window_bytes();
            let setup = TimedConfig { window_bytes, timing, pacer: pacer.clone() };
            let (inbound, outbound) = after_greeting(partition);
            TimedWindows::new(inbound, outbound, doorbell.clone(), setup).expect("`check_room` was called")
        };
        self.all().map(timed).collect()
    }

    /// Returns the lanes of partitions behind the model of a link.
    pub(super) fn timed_lanes(
        &self,
        timed: &[TimedWindows],
        timing: LinkTiming,
        secrets: LaneSecrets,
    ) -> Vec<TimedLanes> {
        let layout = Layout::packed(self.timed_slots(timing), 0);
        let lanes = |(class, windows): (usize, &TimedWindows)| {
            lanes_over(windows.inbound(), windows.outbound(), layout, secrets, class)
        };
        timed.iter().enumerate().map(lanes).collect()
    }

    fn timed_slots(&self, timing: LinkTiming) -> u64 {
        timed_slots(self.latency.0.len_bytes(), timing).expect("`check_room` was called")
    }

    fn all(&self) -> impl Iterator<Item = &(DeviceInbound, DeviceOutbound)> {
        std::iter::once(&self.latency).chain(&self.bulk)
    }
}

/// Returns the part of a partition that the lanes use.
fn after_greeting((inbound, outbound): &(DeviceInbound, DeviceOutbound)) -> (DeviceInbound, DeviceOutbound) {
    let bytes = inbound.len_bytes() - GREETING_BYTES;
    (inbound.slice(GREETING_BYTES, bytes), outbound.slice(GREETING_BYTES, bytes))
}

/// Creates the lanes of a partition of a class.
fn lanes_over<I: Inbound + Clone, O: Outbound + Clone>(
    inbound: I,
    outbound: O,
    layout: Layout,
    secrets: LaneSecrets,
    class: usize,
) -> PartitionLanes<I, O> {
    // The secrets differ by partition, so that a record of one partition is invalid in another.
    let of_class = |secret: u64| secret ^ (class as u64 + 1).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    let to = Producer::new(outbound.clone(), inbound.clone(), layout, of_class(secrets.outbound));
    PartitionLanes::new(to, Consumer::new(inbound, outbound, layout, of_class(secrets.inbound)))
}

/// Returns the slots of a ring behind the model of a link, in a partition of this size; `None` if it is too small. A
/// short message is several stores, and the model's journal holds each of them while it is in flight.
pub(super) fn timed_slots(partition_bytes: usize, timing: LinkTiming) -> Option<u64> {
    const STORES_PER_LINE: usize = 8;
    let fits = |slots: &u64| {
        let window_bytes = Layout::packed(*slots, 0).window_bytes();
        timed::memory_bytes(STORES_PER_LINE * window_bytes, timing)
            .is_ok_and(|bytes| bytes <= partition_bytes.saturating_sub(GREETING_BYTES))
    };
    [LATENCY_SLOTS_MAX, LATENCY_SLOTS_MAX / 2, SLOTS_MIN].into_iter().find(fits)
}

/// Returns the slots that fit into a partition of a window of this size; `None` if it is too small.
pub(super) fn ring_slots(window_bytes: usize, setup: &Configuration) -> Option<u64> {
    let bytes = partition_bytes(window_bytes, setup);
    let room = bytes.checked_sub(GREETING_BYTES + Layout::packed(0, 0).window_bytes())? / lane::SLOT_BYTES;
    let slots = 1_u64 << room.checked_ilog2()?;
    (slots >= SLOTS_MIN).then_some(slots)
}

/// Returns the bytes of a partition of a window of this size.
pub(super) fn partition_bytes(window_bytes: usize, setup: &Configuration) -> usize {
    let room_bytes = window_bytes.saturating_sub(setup.control_partition_bytes as usize);
    let bytes = room_bytes.min(setup.data_bytes as usize) / setup.partitions.len().max(1);
    bytes - bytes % CACHE_LINE_BYTES
}
