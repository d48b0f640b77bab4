//! What a run reports: finished flows and counters.

use serde::Serialize;
use sim::Time;

use super::Network;
use crate::endpoint::{Endpoint, FlowId};
use crate::topology::NetworkNode;

/// A flow that has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FinishedFlow {
    /// The flow.
    pub id: FlowId,
    /// When its sender knew that everything had arrived.
    pub at: Time,
}

/// Counters of a network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NetworkCounters {
    /// Events: arrivals, ends of transmissions, deadlines, starts of flows, pauses.
    pub events: u64,
    /// Flows that finished; repeated ones count each time.
    pub flows_ended: u64,
    /// Bytes of repeated flows that finished.
    pub repeated_bytes: u64,
    /// Packets sent on a link, counted once per link.
    pub sent_packets: u64,
    /// Packets that reached their host intact.
    pub delivered_packets: u64,
    /// Packets lost on links.
    pub lost_packets: u64,
    /// Packets dropped because of a wrong checksum.
    pub corrupt_packets: u64,
    /// Packets duplicated by links.
    pub doubled_packets: u64,
    /// Packets delayed by links.
    pub late_packets: u64,
    /// Packets dropped because a buffer was full.
    pub dropped_packets: u64,
    /// Packets trimmed because a buffer was full.
    pub trimmed_packets: u64,
    /// Packets that a switch marked with ECN.
    pub marked_packets: u64,
    /// Pause frames sent.
    pub pauses: u64,
    /// Largest length of a queue.
    pub queue_max_bytes: u64,
    /// Largest occupancy of a switch's shared buffer.
    pub buffer_max_bytes: u64,
}

/// One direction of a link, as observed from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkDirection {
    /// The link's index in the topology.
    pub link: usize,
    /// The sending node.
    pub from: NetworkNode,
    /// The receiving node.
    pub to: NetworkNode,
    /// Bytes queued by the sending switch. Hosts queue nothing: packets wait in their NICs.
    pub queued_bytes: u64,
    /// Number of times that the receiver has paused the sender.
    pub pauses: u64,
}

impl<E: Endpoint> Network<E> {
    /// Returns both directions of every link, in the order of the topology.
    pub fn link_directions(&self) -> impl ExactSizeIterator<Item = LinkDirection> {
        self.ports.iter().enumerate().map(|(number, port)| LinkDirection {
            link: number / 2,
            from: self.owners[number],
            to: self.owners[number ^ 1],
            queued_bytes: port.data.bytes + port.control.bytes,
            pauses: self.extras[number ^ 1].pauses,
        })
    }
}
