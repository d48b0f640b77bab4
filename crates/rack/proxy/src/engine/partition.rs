//! The lanes of a partition, the queues of connections that send in it, and the order of publishing.

use crate::counters::EngineCounters;
use crate::table::ConnectionKey;
use fabric::{Inbound, Outbound};
use lane::{Consumer, Producer};
use std::collections::VecDeque;

/// A partition, as a lane in each direction, and the connections that wait to send in it.
#[derive(Debug)]
pub struct PartitionLanes<I, O> {
    pub(super) to: Producer<O, I>,
    pub(super) from: Consumer<I, O>,
    /// Connections that became active again with few bytes to send (RFC 8290, new flows).
    pub(super) new_flows: VecDeque<ConnectionKey>,
    /// Connections that were served and have more to send (RFC 8290, old flows).
    pub(super) old_flows: VecDeque<ConnectionKey>,
    /// Connections that have control frames to send.
    pub(super) control: VecDeque<ConnectionKey>,
    /// Connections of `new_flows` served since `old_flows` was last served.
    pub(super) new_flow_run: u32,
    /// The last frame found no room.
    pub(super) is_full: bool,
    /// Something was published for which the peer was not woken yet.
    pub(super) has_sent: bool,
}

impl<I: Inbound, O: Outbound> PartitionLanes<I, O> {
    /// Takes the lane to the peer and the lane from it, both unused.
    pub fn new(to: Producer<O, I>, from: Consumer<I, O>) -> Self {
        let [new_flows, old_flows, control] = [const { VecDeque::new() }; 3];
        Self { to, from, new_flows, old_flows, control, new_flow_run: 0, is_full: false, has_sent: false }
    }

    /// Returns whether nothing has arrived, and nothing waits to be sent.
    #[inline]
    pub(super) fn is_quiet(&self) -> bool {
        !self.has_sent && !self.has_queued() && !self.from.may_have_data()
    }

    #[inline]
    pub(super) fn has_queued(&self) -> bool {
        !(self.new_flows.is_empty() && self.old_flows.is_empty() && self.control.is_empty())
    }
}

/// The partition in which frames were last published.
///
/// A frame may depend on one in the other partition: bytes in the bulk partition follow the `Open` in the first one,
/// and a `Move` in the partition that their connection has left. The first partition is published before the others,
/// and a `Move` immediately. A partition that follows another one is published behind it, so no frame overtakes an
/// earlier one.
#[derive(Debug, Default)]
pub(super) struct PublishOrder {
    partition_last: usize,
}

impl PublishOrder {
    pub(super) fn publish<I: Inbound, O: Outbound>(
        &mut self,
        partitions: &mut [PartitionLanes<I, O>],
        counters: &mut EngineCounters,
    ) {
        for (index, partition) in partitions.iter_mut().enumerate() {
            let follows_itself = index == self.partition_last;
            let is_published =
                if follows_itself { partition.to.publish_staged() } else { partition.to.publish_staged_behind() };
            if is_published {
                self.partition_last = index;
                partition.has_sent = true;
                counters.publishes += 1;
            }
        }
    }
}
