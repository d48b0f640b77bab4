//! What a run leaves behind.

use serde::Serialize;
use sim::Time;

use crate::endpoint::FlowId;

/// A flow has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FinishedFlow {
    /// Which.
    pub id: FlowId,
    /// When its sender knew that all of it had arrived.
    pub at: Time,
}

/// What a network counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NetworkCounters {
    /// Things that happened: arrivals, departures, deadlines, starts of flows, pauses.
    pub events: u64,
    /// Flows that ended, repeated ones each time.
    pub flows_ended: u64,
    /// Bytes of repeated flows that ended.
    pub repeated_bytes: u64,
    /// Packets that began to cross a line.
    pub sent_packets: u64,
    /// Packets that reached their host, whole.
    pub delivered_packets: u64,
    /// Packets lost on lines.
    pub lost_packets: u64,
    /// Packets that arrived with a wrong checksum, and were dropped for it.
    pub corrupt_packets: u64,
    /// Packets that lines made two of.
    pub doubled_packets: u64,
    /// Packets that were late on a line.
    pub late_packets: u64,
    /// Packets dropped for want of buffer.
    pub dropped_packets: u64,
    /// Packets cut for want of buffer.
    pub trimmed_packets: u64,
    /// Packets marked by congestion.
    pub marked_packets: u64,
    /// Times that a port asked its neighbour to pause.
    pub pauses: u64,
    /// The fullest that a queue was.
    pub queue_max_bytes: u64,
    /// The fullest that a switch's shared buffer was.
    pub buffer_max_bytes: u64,
}
