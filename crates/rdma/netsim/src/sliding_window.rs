//! The simplest endpoint that delivers: a fixed window of packets, an acknowledgement for each, and what is missing is
//! sent again. The network is verified with it, so that a fault is the network's or the transport's and never a riddle.

use std::collections::VecDeque;

use sim::{Span, Time};

use crate::endpoint::{
    ETHERNET_BYTES, ETHERNET_BYTES_MIN, Endpoint, EndpointCounters, Flow, FlowId, Framing, IP_UDP_BYTES,
    IncomingPacket, OutgoingPacket,
};
use crate::packet::TrafficClass;
use crate::topology::HostId;

/// Bytes of this transport's header.
const HEADER_BYTES: u32 = 16;
/// A packet is lost when so many later ones of its flow have arrived.
const REORDER_PACKETS: u32 = 3;

/// How it works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingWindowConfig {
    /// Bytes of message in a packet.
    pub payload_bytes: u32,
    /// Packets of a flow under way at most.
    pub window: u32,
    /// What is under way longer than this is lost.
    pub timeout: Span,
}

impl SlidingWindowConfig {
    /// How a flow becomes packets.
    pub fn framing(&self) -> Framing {
        Framing {
            payload_bytes: self.payload_bytes,
            overhead_bytes: ETHERNET_BYTES + IP_UDP_BYTES + HEADER_BYTES,
            ack_bytes: ETHERNET_BYTES_MIN,
        }
    }
}

/// What a packet says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingWindowHeader {
    /// Of which flow.
    pub flow: FlowId,
    /// Which packet, or which packet arrived.
    pub number: u32,
    /// Whether it says that one arrived.
    pub is_ack: bool,
}

/// A packet of a flow, as its sender knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    New,
    Sent(Time),
    Lost,
    Arrived,
}

#[derive(Debug)]
struct Sending {
    id: FlowId,
    flow: Flow,
    packets: Vec<State>,
    /// All before have been sent.
    next: u32,
    under_way: u32,
    arrived: u32,
    lost: VecDeque<u32>,
    /// All before have arrived or are known to be lost.
    judged: u32,
    /// What was sent and when, the first one first; of those sent again, the last time counts.
    sent: VecDeque<(u32, Time)>,
}

#[derive(Debug)]
struct Receiving {
    id: FlowId,
    packets: Vec<bool>,
    bytes: u64,
}

/// A host of this transport.
#[derive(Debug)]
pub struct SlidingWindow {
    config: SlidingWindowConfig,
    host: HostId,
    sending: Vec<Sending>,
    receiving: Vec<Receiving>,
    /// The flow whose turn it is to send.
    turn: usize,
    acks: VecDeque<(HostId, SlidingWindowHeader)>,
    finished: Vec<FlowId>,
    counters: EndpointCounters,
}

impl SlidingWindow {
    /// One endpoint a host.
    pub fn for_hosts(config: SlidingWindowConfig, hosts: u32) -> Vec<Self> {
        let of = |host| Self {
            config,
            host: HostId(host),
            sending: Vec::new(),
            receiving: Vec::new(),
            turn: 0,
            acks: VecDeque::new(),
            finished: Vec::new(),
            counters: EndpointCounters::default(),
        };
        (0..hosts).map(of).collect()
    }

    fn bytes_of(&self, flow: &Flow, number: u32) -> u32 {
        let before = u64::from(number) * u64::from(self.config.payload_bytes);
        flow.bytes.saturating_sub(before).min(self.config.payload_bytes.into()) as u32
    }

    fn acknowledged(&mut self, id: FlowId, number: u32) {
        let Some(index) = self.sending.iter().position(|sending| sending.id == id) else { return };
        let sending = &mut self.sending[index];
        let state = std::mem::replace(&mut sending.packets[number as usize], State::Arrived);
        if let State::Sent(_) = state {
            sending.under_way -= 1;
        }
        sending.arrived += u32::from(state != State::Arrived);
        if sending.arrived as usize == sending.packets.len() {
            self.finished.push(id);
            self.sending.swap_remove(index);
            return;
        }
        while let Some((number, at)) = sending.sent.front()
            && sending.packets[*number as usize] != State::Sent(*at)
        {
            sending.sent.pop_front();
        }
        // Once a packet was judged, only the clock judges it again.
        while sending.judged + REORDER_PACKETS <= number {
            let state = &mut sending.packets[sending.judged as usize];
            if let State::Sent(_) = state {
                *state = State::Lost;
                sending.under_way -= 1;
                sending.lost.push_back(sending.judged);
            }
            sending.judged += 1;
        }
    }

    fn data(&mut self, now: Time) -> Option<OutgoingPacket<SlidingWindowHeader>> {
        for _ in 0..self.sending.len() {
            self.turn = (self.turn + 1) % self.sending.len();
            let window = self.config.window;
            let sending = &mut self.sending[self.turn];
            // What was believed to be lost may have arrived meanwhile.
            while sending.lost.front().is_some_and(|lost| sending.packets[*lost as usize] == State::Arrived) {
                sending.lost.pop_front();
            }
            if sending.under_way >= window {
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
            sending.packets[number as usize] = State::Sent(now);
            sending.sent.push_back((number, now));
            sending.under_way += 1;
            let (id, flow) = (sending.id, sending.flow);
            return Some(self.packet(id, &flow, number));
        }
        None
    }

    fn packet(&self, id: FlowId, flow: &Flow, number: u32) -> OutgoingPacket<SlidingWindowHeader> {
        let overhead = self.config.framing().overhead_bytes;
        OutgoingPacket {
            to: flow.to,
            bytes: (overhead + self.bytes_of(flow, number)).max(ETHERNET_BYTES_MIN),
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
        sender.sending.push(Sending {
            id,
            flow: *flow,
            packets: vec![State::New; packets],
            next: 0,
            under_way: 0,
            arrived: 0,
            lost: VecDeque::new(),
            judged: 0,
            sent: VecDeque::new(),
        });
        let receiving = Receiving { id, packets: vec![false; packets], bytes: flow.bytes };
        endpoints[flow.to.0 as usize].receiving.push(receiving);
    }

    fn receive(&mut self, _now: Time, packet: &IncomingPacket<'_, SlidingWindowHeader>) {
        let SlidingWindowHeader { flow, number, is_ack } = *packet.header;
        if is_ack {
            return self.acknowledged(flow, number);
        }
        if packet.is_trimmed {
            return; // what is missing shows by what arrives later
        }
        self.counters.received_packets += 1;
        // A flow is kept after its end: copies that come late are counted as such.
        if let Some(receiving) = self.receiving.iter_mut().find(|receiving| receiving.id == flow) {
            let was_here = std::mem::replace(&mut receiving.packets[number as usize], true);
            self.counters.spurious_packets += u64::from(was_here);
            if !was_here {
                let before = u64::from(number) * u64::from(self.config.payload_bytes);
                let bytes = receiving.bytes.saturating_sub(before).min(self.config.payload_bytes.into());
                self.counters.delivered_bytes += bytes;
            }
        }
        self.acks.push_back((packet.from, SlidingWindowHeader { flow, number, is_ack: true }));
    }

    fn transmit(&mut self, now: Time) -> Option<OutgoingPacket<SlidingWindowHeader>> {
        let outgoing = match self.acks.pop_front() {
            Some((to, header)) => Some(OutgoingPacket {
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
                if sending.packets[number as usize] == State::Sent(at) {
                    sending.packets[number as usize] = State::Lost;
                    sending.under_way -= 1;
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
        let sending: usize = self.sending.iter().map(|sending| sending.packets.capacity() * size_of::<State>()).sum();
        let receiving: usize = self.receiving.iter().map(|receiving| receiving.packets.capacity()).sum();
        sending + receiving
    }
}
