//! What is at the ends of a network: whatever turns flows into packets and back.

use serde::Serialize;
use sim::Time;

use crate::packet::TrafficClass;
use crate::topology::HostId;

/// Bytes of an Ethernet frame on the line besides its payload: preamble and start 8, header 14, checksum 4, gap 12.
pub const ETHERNET_BYTES: u32 = 38;
/// Bytes of IPv4 and UDP.
pub const IP_UDP_BYTES: u32 = 28;
/// The smallest Ethernet frame, with preamble and gap.
pub const ETHERNET_BYTES_MIN: u32 = 84;

/// Bytes of message to be moved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Flow {
    /// When it is handed to its endpoint.
    pub start: Time,
    /// Who sends it.
    pub from: HostId,
    /// Who gets it.
    pub to: HostId,
    /// How much.
    pub bytes: u64,
    /// Flows of the same two hosts with the same number share a connection; each other one has its own.
    pub connection: Option<u32>,
    /// Whether it begins again when it has ended.
    pub repeats: bool,
}

/// A flow, by its place in the list of flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowId(pub u32);

/// A packet that an endpoint sends.
#[derive(Clone, Copy, Debug)]
pub struct OutgoingPacket<Header> {
    /// To whom.
    pub to: HostId,
    /// On the wire, with everything: headers, checksums, preamble and gap.
    pub bytes: u32,
    /// What is left of it when a switch trimming it; the same as `bytes` for what cannot be trimmed.
    pub trimmed_bytes: u16,
    /// What path selection by flow looks at; a UDP source port, say.
    pub label: u32,
    /// Its queue in the network.
    pub class: TrafficClass,
    /// What it says.
    pub header: Header,
}

/// A packet that an endpoint gets; its checksum was right.
#[derive(Clone, Copy, Debug)]
pub struct IncomingPacket<'a, Header> {
    /// From whom.
    pub from: HostId,
    /// What it says.
    pub header: &'a Header,
    /// A switch met congestion.
    pub is_marked: bool,
    /// A switch cut its payload off.
    pub is_trimmed: bool,
}

/// What endpoints count. All of them add up over hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EndpointCounters {
    /// Bytes of message that arrived, each once.
    pub delivered_bytes: u64,
    /// Packets sent, data and all else.
    pub sent_packets: u64,
    /// Data packets sent again.
    pub retransmitted_packets: u64,
    /// Data packets that had arrived before: retransmissions that were not needed, or copies that the network made.
    pub spurious_packets: u64,
    /// Times that nothing was heard for so long that something was sent again.
    pub timeouts: u64,
    /// Headers that went to software.
    pub slow_path_headers: u64,
    /// Data packets that arrived, copies too.
    pub received_packets: u64,
    /// Picoseconds that software was busy.
    pub software_ps: u64,
}

impl EndpointCounters {
    /// What was counted since.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            delivered_bytes: self.delivered_bytes - earlier.delivered_bytes,
            sent_packets: self.sent_packets - earlier.sent_packets,
            retransmitted_packets: self.retransmitted_packets - earlier.retransmitted_packets,
            spurious_packets: self.spurious_packets - earlier.spurious_packets,
            timeouts: self.timeouts - earlier.timeouts,
            slow_path_headers: self.slow_path_headers - earlier.slow_path_headers,
            received_packets: self.received_packets - earlier.received_packets,
            software_ps: self.software_ps - earlier.software_ps,
        }
    }

    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            delivered_bytes: self.delivered_bytes + other.delivered_bytes,
            sent_packets: self.sent_packets + other.sent_packets,
            retransmitted_packets: self.retransmitted_packets + other.retransmitted_packets,
            spurious_packets: self.spurious_packets + other.spurious_packets,
            timeouts: self.timeouts + other.timeouts,
            slow_path_headers: self.slow_path_headers + other.slow_path_headers,
            received_packets: self.received_packets + other.received_packets,
            software_ps: self.software_ps + other.software_ps,
        }
    }
}

/// How a flow becomes packets: what the time of a flow in an empty network depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Framing {
    /// Bytes of message in a packet.
    pub payload_bytes: u32,
    /// Bytes on the wire of a packet besides its payload.
    pub overhead_bytes: u32,
    /// Bytes on the wire of an acknowledgement.
    pub ack_bytes: u32,
}

/// A host's end of the transport: verbs and timers on one side, packets on the other.
pub trait Endpoint: Sized {
    /// What packets say to each other's endpoints.
    type Header: Copy;

    /// Begins a flow; `fleet` are the endpoints of all hosts, because connections have two ends.
    fn start(endpoints: &mut [Self], now: Time, id: FlowId, flow: &Flow);

    /// Takes a packet in.
    fn receive(&mut self, now: Time, packet: &IncomingPacket<'_, Self::Header>);

    /// The next packet, when the wire is free; it is asked again after that one, and whenever anything happened.
    fn transmit(&mut self, now: Time) -> Option<OutgoingPacket<Self::Header>>;

    /// When something happens without a packet.
    fn deadline(&self) -> Option<Time>;

    /// Lets it happen.
    fn advance(&mut self, now: Time);

    /// Adds the flows that have ended since the last call: everything arrived, and the sender knows.
    fn finished(&mut self, now: Time, done: &mut Vec<FlowId>);

    /// What it has counted.
    fn counters(&self) -> EndpointCounters;

    /// Bytes of memory that it holds, as far as it can tell.
    fn memory_bytes(&self) -> usize;
}
