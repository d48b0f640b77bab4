//! The interface between the network and a transport: an endpoint on each host turns flows into packets and back.

use serde::Serialize;
use sim::{Span, Time};

use crate::packet::TrafficClass;
use crate::topology::HostId;

/// Bytes of an Ethernet frame on the wire besides its payload: preamble and start delimiter 8, header 14, checksum 4,
/// inter-frame gap 12.
pub const ETHERNET_BYTES: u32 = 38;
/// Bytes of the IPv4 and UDP headers.
pub const IP_UDP_BYTES: u32 = 28;
/// Bytes of the smallest Ethernet frame on the wire, with preamble and gap.
pub const ETHERNET_BYTES_MIN: u32 = 84;

/// A message to be transferred between two hosts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Flow {
    /// When it is handed to the sender's endpoint.
    pub start: Time,
    /// The sending host.
    pub from: HostId,
    /// The receiving host.
    pub to: HostId,
    /// Size of the message.
    pub bytes: u64,
    /// Flows between the same two hosts with the same number share a connection; a flow without a number has one of its
    /// own.
    pub connection: Option<u32>,
    /// Whether it starts again when it has finished.
    pub repeats: bool,
}

impl Flow {
    /// Returns a flow that has a connection of its own and does not start again.
    pub fn new(start: Time, from: HostId, to: HostId, bytes: u64) -> Self {
        Self { start, from, to, bytes, connection: None, repeats: false }
    }
}

/// The index of a flow in the list of flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowId(pub u32);

/// A packet that an endpoint sends.
#[derive(Clone, Copy, Debug)]
pub struct OutboundPacket<Header> {
    /// The receiving host.
    pub to: HostId,
    /// Size on the wire, with headers, checksums, preamble and gap.
    pub bytes: u32,
    /// Size once a switch has trimmed it; equal to `bytes` for a packet that cannot be trimmed.
    pub trimmed_bytes: u16,
    /// The value that ECMP hashes, for example a UDP source port.
    pub label: u32,
    /// Its queue at the ports.
    pub class: TrafficClass,
    /// The transport header.
    pub header: Header,
}

/// A packet that an endpoint receives, with a correct checksum.
#[derive(Clone, Copy, Debug)]
pub struct InboundPacket<'a, Header> {
    /// The sending host.
    pub from: HostId,
    /// The transport header.
    pub header: &'a Header,
    /// Whether a switch set the ECN congestion mark.
    pub is_marked: bool,
    /// Whether a switch cut off the payload.
    pub is_trimmed: bool,
}

/// Counters of an endpoint. They can be summed over hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EndpointCounters {
    /// Message bytes received, each counted once.
    pub delivered_bytes: u64,
    /// Packets sent, of data and of control.
    pub sent_packets: u64,
    /// Data packets retransmitted.
    pub retransmitted_packets: u64,
    /// Data packets received that had arrived before: unneeded retransmissions, or copies made by the network.
    pub spurious_packets: u64,
    /// Retransmission time-outs.
    pub timeouts: u64,
    /// Headers handled by software, on the slow path.
    pub slow_path_headers: u64,
    /// Data packets received, including copies.
    pub received_packets: u64,
    /// Picoseconds for which software was busy.
    pub software_ps: u64,
}

impl EndpointCounters {
    /// Returns what was counted after `earlier`.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        self.combine(earlier, |late, early| late - early)
    }

    /// Returns the sum of both.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        self.combine(other, |one, other| one + other)
    }

    fn combine(self, other: Self, operation: fn(u64, u64) -> u64) -> Self {
        Self {
            delivered_bytes: operation(self.delivered_bytes, other.delivered_bytes),
            sent_packets: operation(self.sent_packets, other.sent_packets),
            retransmitted_packets: operation(self.retransmitted_packets, other.retransmitted_packets),
            spurious_packets: operation(self.spurious_packets, other.spurious_packets),
            timeouts: operation(self.timeouts, other.timeouts),
            slow_path_headers: operation(self.slow_path_headers, other.slow_path_headers),
            received_packets: operation(self.received_packets, other.received_packets),
            software_ps: operation(self.software_ps, other.software_ps),
        }
    }
}

/// How a transport divides a flow into packets, which decides the flow's completion time in an empty network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Framing {
    /// Message bytes in a full packet.
    pub payload_bytes: u32,
    /// Size of a packet on the wire besides its payload.
    pub overhead_bytes: u32,
    /// Size of an acknowledgement on the wire.
    pub ack_bytes: u32,
}

/// The time that NICs and hosts add to a flow alone in the network. Zero where operations take no time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostLatency {
    /// From the flow's start until its first byte could leave the sender's NIC: the doorbell, and a read of memory.
    pub before: Span,
    /// Time for each byte of the first packet on the way from the sender's memory, in picoseconds.
    pub first_byte_ps: u64,
    /// From the acknowledgement's arrival until the sender's program sees the completion.
    pub after: Span,
}

/// A host's transport endpoint. It does no I/O: time and packets are passed in, and packets are returned.
pub trait Endpoint: Sized {
    /// The transport header of packets.
    type Header: Copy;

    /// Starts a flow. `endpoints` are those of all hosts, because a connection is set up at both ends.
    fn start(endpoints: &mut [Self], now: Time, id: FlowId, flow: &Flow);

    /// Handles a received packet.
    fn receive(&mut self, now: Time, packet: &InboundPacket<'_, Self::Header>);

    /// Returns the next packet to send. Called when the host's link is idle: after each packet and after each event.
    fn transmit(&mut self, now: Time) -> Option<OutboundPacket<Self::Header>>;

    /// Returns the time of the next timer.
    fn deadline(&self) -> Option<Time>;

    /// Handles the timers that are due.
    fn advance(&mut self, now: Time);

    /// Appends the flows finished since the last call: everything has arrived, and the sender knows.
    fn finished(&mut self, now: Time, done: &mut Vec<FlowId>);

    /// Returns the counters.
    fn counters(&self) -> EndpointCounters;

    /// Returns an estimate of the memory held, in bytes.
    fn memory_bytes(&self) -> usize;
}
