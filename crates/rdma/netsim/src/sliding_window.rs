//! A minimal reliable endpoint: a fixed window of packets per flow, an acknowledgement for each packet, and
//! retransmission of what is missing.
//!
//! The network is verified with this endpoint, so that a failure can be attributed either to the network or to the RDMA
//! engine.

use std::collections::VecDeque;

use sim::{Span, Time};

use crate::endpoint::{
    ETHERNET_BYTES, ETHERNET_BYTES_MIN, Endpoint, EndpointCounters, Flow, FlowId, Framing, IP_UDP_BYTES, InboundPacket,
    OutboundPacket,
};
use crate::packet::TrafficClass;
use crate::topology::HostId;

/// Bytes of this transport's header.
const HEADER_BYTES: u32 = 16;
/// A packet counts as lost once a packet sent this many positions later has been acknowledged.
const REORDER_PACKETS: u32 = 3;

/// Settings of the endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingWindowConfig {
    /// Message bytes in a full packet.
    pub payload_bytes: u32,
    /// Most packets of a flow in flight.
    pub window: u32,
    /// A packet not acknowledged for this long counts as lost.
    pub timeout: Span,
}

impl SlidingWindowConfig {
    /// Returns how a flow is divided into packets.
    pub fn framing(&self) -> Framing {
        Framing {
            payload_bytes: self.payload_bytes,
            overhead_bytes: ETHERNET_BYTES + IP_UDP_BYTES + HEADER_BYTES,
            ack_bytes: ETHERNET_BYTES_MIN,
        }
    }
}

/// The transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingWindowHeader {
    /// The flow.
    pub flow: FlowId,
    /// The packet's number in the flow, or the number acknowledged.
    pub number: u32,
    /// Whether this is an acknowledgement.
    pub is_ack: bool,
}

/// The state of a packet at its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PacketState {
    New,
    Sent(Time),
    Lost,
    Arrived,
}

#[derive(Debug)]
struct OutgoingFlow {
    id: FlowId,
    flow: Flow,
    packets: Vec<PacketState>,
    /// The first packet that was never sent.
    next: u32,
    in_flight: u32,
    arrived: u32,
    lost: VecDeque<u32>,
    /// All packets before this one have been checked for loss by reordering.
    loss_checked: u32,
    /// Packets sent and when, the oldest first. An entry is stale if its packet was retransmitted later.
    sent: VecDeque<(u32, Time)>,
}

#[derive(Debug)]
struct IncomingFlow {
    id: FlowId,
    packets: Vec<bool>,
    bytes: u64,
}

/// The endpoint of a host.
#[derive(Debug)]
pub struct SlidingWindow {
    config: SlidingWindowConfig,
    host: HostId,
    sending: Vec<OutgoingFlow>,
    receiving: Vec<IncomingFlow>,
    /// The flow that sent last; flows send round-robin.
    last_flow: usize,
    acks: VecDeque<(HostId, SlidingWindowHeader)>,
    finished: Vec<FlowId>,
    counters: EndpointCounters,
}

impl SlidingWindow {
    /// Creates one endpoint per host.
    pub fn for_hosts(config: SlidingWindowConfig, hosts: u32) -> Vec<Self> {
        let of = |host| Self {
            config,
            host: HostId(host),
            sending: Vec::new(),
            receiving: Vec::new(),
            last_flow: 0,
            acks: VecDeque::new(),
            finished: Vec::new(),
            counters: EndpointCounters::default(),
        };
        (0..hosts).map(of).collect()
    }

    /// Returns the payload size of packet `number` of a flow of `flow_bytes` bytes.
    fn payload_bytes(&self, flow_bytes: u64, number: u32) -> u32 {
        let before = u64::from(number) * u64::from(self.config.payload_bytes);
        flow_bytes.saturating_sub(before).min(self.config.payload_bytes.into()) as u32
    }

    fn acknowledged(&mut self, id: FlowId, number: u32) {
        let Some(index) = self.sending.iter().position(|sending| sending.id == id) else { return };
        let sending = &mut self.sending[index];
        let state = std::mem::replace(&mut sending.packets[number as usize], PacketState::Arrived);
        if let PacketState::Sent(_) = state {
            sending.in_flight -= 1;
        }
        sending.arrived += u32::from(state != PacketState::Arrived);
        if sending.arrived as usize == sending.packets.len() {
            self.finished.push(id);
            self.sending.swap_remove(index);
            return;
        }
        while let Some((number, at)) = sending.sent.front()
            && sending.packets[*number as usize] != PacketState::Sent(*at)
        {
            sending.sent.pop_front();
        }
        // A packet is checked once; after a retransmission only its time-out declares it lost.
        while sending.loss_checked + REORDER_PACKETS <= number {
            let state = &mut sending.packets[sending.loss_checked as usize];
            if let PacketState::Sent(_) = state {
                *state = PacketState::Lost;
                sending.in_flight -= 1;
                sending.lost.push_back(sending.loss_checked);
            }
            sending.loss_checked += 1;
        }
    }

    fn data(&mut self, now: Time) -> Option<OutboundPacket<SlidingWindowHeader>> {
        for _ in 0..self.sending.len() {
            self.last_flow = (self.last_flow + 1) % self.sending.len();
            let window = self.config.window;
            let sending = &mut self.sending[self.last_flow];
            // A packet declared lost may have arrived in the meantime.
            while sending.lost.front().is_some_and(|lost| sending.packets[*lost as usize] == PacketState::Arrived) {
                sending.lost.pop_front();
            }
            if sending.in_flight >= window {
                continue;
            }
            let number = match sending.lost.pop_front() {
                Some(lost) => {
                    self.counters.retransmitted_packets += 1;
                    lost
                }
                None if (sending.next as usize) < sending.packets.len() => {
                    sending.next += 1;
                    sending.next - 1
                }
                None => continue,
            };
            sending.packets[number as usize] = PacketState::Sent(now);
            sending.sent.push_back((number, now));
            sending.in_flight += 1;
            let (id, flow) = (sending.id, sending.flow);
            return Some(self.packet(id, &flow, number));
        }
        None
    }

    fn packet(&self, id: FlowId, flow: &Flow, number: u32) -> OutboundPacket<SlidingWindowHeader> {
        let overhead = self.config.framing().overhead_bytes;
        OutboundPacket {
            to: flow.to,
            bytes: (overhead + self.payload_bytes(flow.bytes, number)).max(ETHERNET_BYTES_MIN),
            trimmed_bytes: overhead as u16,
            label: id.0,
            class: TrafficClass::Data,
            header: SlidingWindowHeader { flow: id, number, is_ack: false },
        }
    }
}

impl Endpoint for SlidingWindow {
    type Header = SlidingWindowHeader;

    fn start(endpoints: &mut [Self], _now: Time, id: FlowId, flow: &Flow) {
        let sender = &mut endpoints[flow.from.0 as usize];
        let packets = flow.bytes.div_ceil(sender.config.payload_bytes.into()).max(1) as usize;
        sender.sending.push(OutgoingFlow {
            id,
            flow: *flow,
            packets: vec![PacketState::New; packets],
            next: 0,
            in_flight: 0,
            arrived: 0,
            lost: VecDeque::new(),
            loss_checked: 0,
            sent: VecDeque::new(),
        });
        let receiving = IncomingFlow { id, packets: vec![false; packets], bytes: flow.bytes };
        endpoints[flow.to.0 as usize].receiving.push(receiving);
    }

    fn receive(&mut self, _now: Time, packet: &InboundPacket<'_, SlidingWindowHeader>) {
        let SlidingWindowHeader { flow, number, is_ack } = *packet.header;
        if is_ack {
            return self.acknowledged(flow, number);
        }
        if packet.is_trimmed {
            return; // the sender detects the loss by later acknowledgements
        }
        self.counters.received_packets += 1;
        // A flow is kept after it has finished, so that late copies are counted as spurious.
        if let Some(index) = self.receiving.iter().position(|receiving| receiving.id == flow) {
            let receiving = &mut self.receiving[index];
            let is_copy = std::mem::replace(&mut receiving.packets[number as usize], true);
            self.counters.spurious_packets += u64::from(is_copy);
            if !is_copy {
                let flow_bytes = receiving.bytes;
                self.counters.delivered_bytes += u64::from(self.payload_bytes(flow_bytes, number));
            }
        }
        self.acks.push_back((packet.from, SlidingWindowHeader { flow, number, is_ack: true }));
    }

    fn transmit(&mut self, now: Time) -> Option<OutboundPacket<SlidingWindowHeader>> {
        let outgoing = match self.acks.pop_front() {
            Some((to, header)) => Some(OutboundPacket {
                to,
                bytes: ETHERNET_BYTES_MIN,
                trimmed_bytes: ETHERNET_BYTES_MIN as u16,
                label: header.flow.0 ^ self.host.0 << 16,
                class: TrafficClass::Data,
                header,
            }),
            None => self.data(now),
        };
        self.counters.sent_packets += u64::from(outgoing.is_some());
        outgoing
    }

    fn deadline(&self) -> Option<Time> {
        let first = self.sending.iter().filter_map(|sending| sending.sent.front()).map(|(_, at)| *at).min();
        first.map(|at| at + self.config.timeout)
    }

    fn advance(&mut self, now: Time) {
        for sending in &mut self.sending {
            while let Some((number, at)) =
                sending.sent.front().copied().filter(|(_, at)| *at + self.config.timeout <= now)
            {
                sending.sent.pop_front();
                if sending.packets[number as usize] == PacketState::Sent(at) {
                    sending.packets[number as usize] = PacketState::Lost;
                    sending.in_flight -= 1;
                    sending.lost.push_back(number);
                    self.counters.timeouts += 1;
                }
            }
        }
    }

    fn finished(&mut self, _now: Time, done: &mut Vec<FlowId>) {
        done.append(&mut self.finished);
    }

    fn counters(&self) -> EndpointCounters {
        self.counters
    }

    fn memory_bytes(&self) -> usize {
        let sending: usize =
            self.sending.iter().map(|sending| sending.packets.capacity() * size_of::<PacketState>()).sum();
        let receiving: usize = self.receiving.iter().map(|receiving| receiving.packets.capacity()).sum();
        sending + receiving
    }
}
