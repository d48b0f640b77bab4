//! An endpoint that is an RDMA NIC, with the engine that also carries the verbs of real programs. Every flow is a WRITE
//! (or a READ, or a SEND that is echoed). Memory has no contents; only lengths matter.
//!
//! A flow without a connection number takes an idle queue pair between its hosts, or a new one, like a program that
//! keeps its connections. A flow finishes with its completion.

mod path;
mod profile;

use std::collections::HashMap;
use std::sync::Arc;

use rnic::nic::{CostModel, CqNumber, Nic, NicProfile, NoMemory, ProfileError, QpInit, SendLimit};
use rnic::verbs::{
    AccessFlags, Completion, CompletionKind, CompletionStatus, LKey, Mtu, NicAddress, ProtectionDomain, RcConnection,
    ReceiveRequest, Registration, RemoteBuffer, SGES_MAX, SendKind, SendRequest, Sge,
};
use rnic::wire::{Header, Operation, PackedHeader, Psn, QpNumber, RKey, Service};
use sim::Time;

use crate::endpoint::{
    ETHERNET_BYTES, ETHERNET_BYTES_MIN, Endpoint, EndpointCounters, Flow, FlowId, Framing, HostLatency, IP_UDP_BYTES,
    InboundPacket, OutboundPacket,
};
use crate::network::{NetworkConfig, PacketTap, TappedPacket};
use crate::packet::TrafficClass;
use crate::rate::LinkRate;
use crate::topology::HostId;
use crate::transport::TransportConfig;

pub use path::PathProperties;
pub use profile::{pcie_model, pcie_read_gbps, profile};

/// Bytes of the memory region that a host registers, which is all of its memory.
const MEMORY_BYTES: u64 = 1 << 46;
/// Capacity of a completion queue.
const COMPLETIONS_MAX: usize = 1 << 16;
/// Most completions taken by one poll.
const COMPLETIONS_PER_POLL: usize = 16;
/// Capacity of a queue pair's send queue.
pub(crate) const REQUESTS_MAX: u32 = rnic::nic::QUEUE_REQUESTS_MAX;
/// Receive requests posted to a queue pair whose messages are echoed.
const RECEIVES: u32 = 32;
/// The identifier of requests whose completion is ignored.
const UNTRACKED: u64 = u64::MAX;
/// Largest size of a trimmed packet on the wire: all headers.
const HEADERS_BYTES_MAX: u32 = ETHERNET_BYTES + IP_UDP_BYTES + rnic::wire::HEADER_BYTES_MAX as u32;

/// The verb that carries a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// WRITE into the receiver's memory.
    Write,
    /// READ from the sender's memory, requested by the receiver.
    Read,
    /// SEND; the receiver's program sends as many bytes back, and the flow finishes when they have arrived.
    Echo,
}

/// Settings of all hosts of a network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RdmaConfig {
    /// The NICs' profile.
    pub profile: NicProfile,
    /// The verb that carries flows.
    pub verb: Verb,
    /// The ACK timeout, 4.096 us x 2^code, or none with code 0, of policies without a timeout of their own.
    pub ack_timer_code: u8,
    /// Whether each flow without a connection number begins on a new queue pair.
    pub new_queue_pairs: bool,
    /// Whether congestion notifications pass data in switches.
    pub cnp_priority: bool,
    /// Seed of the NICs' random decisions.
    pub seed: u64,
}

impl RdmaConfig {
    /// Returns settings for WRITEs by NICs with this profile, and an ACK timeout of 262 us, which is above every round
    /// trip of networks without long queues.
    pub fn new(profile: NicProfile) -> Self {
        Self { profile, verb: Verb::Write, ack_timer_code: 6, new_queue_pairs: false, cnp_priority: true, seed: 1 }
    }

    /// Returns settings for WRITEs in this network.
    pub fn for_network(transport: &TransportConfig, path: &PathProperties, network: &NetworkConfig) -> Self {
        let ack_timer_code = transport.ack_timeout.code(network, path.round_trip);
        let new_queue_pairs = transport.new_queue_pairs;
        let cnp_priority = transport.dcqcn.cnp_priority.unwrap_or(true);
        Self {
            ack_timer_code,
            new_queue_pairs,
            cnp_priority,
            seed: network.seed,
            ..Self::new(profile(transport, path))
        }
    }

    /// Returns how a flow is divided into packets with the headers of standard RoCEv2 alone, so that all policies are
    /// compared with the same ideal.
    pub fn framing(&self) -> Framing {
        let headers = ETHERNET_BYTES + IP_UDP_BYTES + (rnic::wire::BTH_BYTES + rnic::wire::ICRC_BYTES) as u32;
        let ack_bytes = headers + rnic::wire::AETH_BYTES as u32;
        Framing { payload_bytes: self.profile.mtu_bytes, overhead_bytes: headers, ack_bytes }
    }

    /// Returns what a NIC of any policy adds to a flow alone. Work requests that a policy fetches are its own cost,
    /// like headers beyond those of standard RoCEv2, and not part of it.
    pub fn latency(&self) -> HostLatency {
        let CostModel { doorbell, dma_read, dma_byte_ps, dma_write, .. } = self.profile.costs;
        HostLatency { before: doorbell + dma_read, first_byte_ps: dma_byte_ps, after: dma_write }
    }
}

/// The queue pair of a flow.
#[derive(Clone, Copy, Debug)]
struct Connection {
    qp: QpNumber,
    /// Whether it belongs to a numbered connection, which other flows may use.
    is_shared: bool,
    /// What the queue pair had retransmitted when the flow began.
    retransmitted_before: u64,
}

/// The endpoint of a host with an RDMA NIC.
#[derive(Debug)]
pub struct RdmaEndpoint {
    config: Arc<RdmaConfig>,
    host: HostId,
    nic: Nic<NoMemory>,
    cq: CqNumber,
    domain: ProtectionDomain,
    keys: (LKey, RKey),
    /// By peer: queue pairs that no flow uses.
    idle: HashMap<HostId, Vec<QpNumber>>,
    /// By peer and connection number: the connection's queue pair.
    numbered: HashMap<(HostId, u32), QpNumber>,
    /// By active flow: its queue pair and its peer.
    active: HashMap<FlowId, (Connection, HostId)>,
    /// Buffer for polled completions.
    completions: Vec<Completion>,
    counters: EndpointCounters,
    failed: u64,
    failed_flows: Vec<FlowId>,
    /// Finished flows of which packets were retransmitted, with their number.
    retransmitted: Vec<(FlowId, u64)>,
}

/// The queue pair of an active flow, as observed from outside.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActiveSend {
    /// The number of the sender's queue pair.
    pub qp: QpNumber,
    /// The receiving host.
    pub to: HostId,
    /// What congestion control allows it to send.
    pub limit: SendLimit,
}

impl RdmaEndpoint {
    /// Creates one endpoint per host.
    ///
    /// # Errors
    /// When the profile is invalid.
    ///
    /// # Panics
    /// If the engine refuses a first completion queue, protection domain or memory region.
    pub fn for_hosts(config: RdmaConfig, hosts: u32) -> Result<Vec<Self>, ProfileError> {
        let (config, profile) = (Arc::new(config), Arc::new(config.profile));
        (0..hosts).map(|host| Self::new(&config, &profile, HostId(host))).collect()
    }

    /// Creates one endpoint per host of a network, each with the rate of its own link.
    ///
    /// # Errors
    /// When a profile is invalid.
    pub fn for_network(transport: &TransportConfig, network: &NetworkConfig) -> Result<Vec<Self>, ProfileError> {
        let path = PathProperties::of_network(network);
        let mut by_rate: Vec<(LinkRate, Arc<RdmaConfig>, Arc<NicProfile>)> = Vec::new();
        let mut endpoint = |host| {
            let rate = network.topology.host_link(host).rate;
            let known = by_rate.iter().position(|(of, ..)| *of == rate);
            let index = known.unwrap_or_else(|| {
                let config = RdmaConfig::for_network(transport, &PathProperties { rate, ..path }, network);
                by_rate.push((rate, Arc::new(config), Arc::new(config.profile)));
                by_rate.len() - 1
            });
            let (_, config, profile) = &by_rate[index];
            Self::new(config, profile, host)
        };
        (0..network.topology.hosts()).map(|host| endpoint(HostId(host))).collect()
    }

    fn new(config: &Arc<RdmaConfig>, profile: &Arc<NicProfile>, host: HostId) -> Result<Self, ProfileError> {
        let mut nic = Nic::new(Arc::clone(profile), NoMemory, config.seed ^ u64::from(host.0) << 32)?;
        let access = AccessFlags::LOCAL_WRITE
            | AccessFlags::REMOTE_READ
            | AccessFlags::REMOTE_WRITE
            | AccessFlags::REMOTE_ATOMIC;
        let cq = nic.create_cq(COMPLETIONS_MAX).expect("a new NIC has room for a completion queue");
        let domain = nic.allocate_domain().expect("a new NIC has room for a protection domain");
        let registration = Registration { domain, host_address: 0, address: 0, bytes: MEMORY_BYTES, access };
        let keys = nic.register(&registration).expect("a new NIC has room for a memory region");
        Ok(Self {
            config: Arc::clone(config),
            host,
            nic,
            cq,
            domain,
            keys: (keys.local, keys.remote),
            idle: HashMap::new(),
            numbered: HashMap::new(),
            active: HashMap::new(),
            completions: vec![Completion::default(); COMPLETIONS_PER_POLL],
            counters: EndpointCounters::default(),
            failed: 0,
            failed_flows: Vec::new(),
            retransmitted: Vec::new(),
        })
    }

    /// Returns the NIC.
    pub fn nic(&self) -> &Nic<NoMemory> {
        &self.nic
    }

    /// Returns the number of requests completed with an error.
    pub fn failed(&self) -> u64 {
        self.failed
    }

    /// Returns the flows of which a request was completed with an error.
    pub fn failed_flows(&self) -> &[FlowId] {
        &self.failed_flows
    }

    /// Returns the flows of which this host retransmitted packets, with their number, in no particular order. Flows
    /// that share a connection at the same time count each other's packets.
    pub fn retransmitted(&self) -> impl Iterator<Item = (FlowId, u64)> {
        let active = self.active.iter().map(|(id, (connection, _))| (*id, self.retransmitted_on(connection)));
        self.retransmitted.iter().copied().chain(active.filter(|(_, packets)| *packets > 0))
    }

    /// Returns the queue pairs of active flows that this host sends, by number.
    pub fn active_sends(&self, now: Time) -> Vec<ActiveSend> {
        let send = |(connection, to): &(Connection, HostId)| {
            let limit = self.nic.send_limit(now, connection.qp)?;
            Some(ActiveSend { qp: connection.qp, to: *to, limit })
        };
        let mut sends: Vec<ActiveSend> = self.active.values().filter_map(send).collect();
        sends.sort_unstable_by_key(|send| send.qp.0);
        sends
    }

    fn retransmitted_on(&self, connection: &Connection) -> u64 {
        self.nic.retransmitted_packets(connection.qp) - connection.retransmitted_before
    }

    fn create_qp(&mut self) -> QpNumber {
        let init = QpInit {
            service: Service::Rc,
            domain: self.domain,
            send_cq: self.cq,
            receive_cq: self.cq,
            srq: None,
            sends_max: REQUESTS_MAX,
            receives_max: RECEIVES,
            signals_all: false,
        };
        self.nic.create_qp(&init).expect("the profile allows enough queue pairs")
    }

    /// Brings a queue pair to ready-to-send, connected to `peer`. `first_psns` are those of this side and of the peer.
    fn connect_qp(&mut self, now: Time, qp: QpNumber, peer: (HostId, QpNumber), first_psns: (Psn, Psn)) {
        let connection = RcConnection {
            peer: NicAddress(peer.0.0),
            destination: peer.1,
            receive_psn: first_psns.1,
            send_psn: first_psns.0,
            mtu: Mtu::B4096,
            access: AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC,
            ack_timer_code: self.config.ack_timer_code,
            rnr_timer_code: 1,
        };
        for (state, attributes) in connection.transitions() {
            self.nic.modify_qp(now, qp, state, &attributes).expect("a new queue pair goes through these states");
        }
        if self.config.verb == Verb::Echo {
            (0..RECEIVES).for_each(|_| self.post_receive(now, qp));
        }
    }

    fn local_buffer(&self, bytes: u32) -> [Sge; SGES_MAX] {
        let mut local = [Sge::default(); SGES_MAX];
        local[0] = Sge { address: 0, bytes, key: self.keys.0 };
        local
    }

    fn post_receive(&mut self, now: Time, qp: QpNumber) {
        let request =
            ReceiveRequest { id: UNTRACKED, local: self.local_buffer(self.config.profile.mtu_bytes.max(1 << 20)) };
        self.nic.post_recv(now, qp, &request).expect("the receive queue has room for this many requests");
    }

    fn post(&mut self, now: Time, qp: QpNumber, id: u64, bytes: u32, kind: SendKind) {
        let signalled = id != UNTRACKED;
        let local = self.local_buffer(bytes);
        let request = SendRequest { id, kind, local, signalled, fence: false, solicited: false, datagram: None };
        self.nic.post_send(now, qp, &request).expect("the send queue has room for all flows of its queue pair");
    }

    /// Returns a connection for a flow: that of its number, an idle one, or a new one.
    fn connect(endpoints: &mut [Self], now: Time, id: FlowId, flow: &Flow) -> Connection {
        let (from, to) = (flow.from, flow.to);
        let sender = &mut endpoints[from.0 as usize];
        let known = match flow.connection {
            Some(number) => sender.numbered.get(&(to, number)).copied(),
            None => sender.idle.get_mut(&to).and_then(Vec::pop),
        };
        let is_shared = flow.connection.is_some();
        if let Some(qp) = known {
            let retransmitted_before = sender.nic.retransmitted_packets(qp);
            return Connection { qp, is_shared, retransmitted_before };
        }
        let (qp, peer_qp) = (endpoints[from.0 as usize].create_qp(), endpoints[to.0 as usize].create_qp());
        let first_psns = (Psn::new(id.0.wrapping_mul(7919)), Psn::new(id.0.wrapping_mul(104_729)));
        endpoints[from.0 as usize].connect_qp(now, qp, (to, peer_qp), first_psns);
        endpoints[to.0 as usize].connect_qp(now, peer_qp, (from, qp), (first_psns.1, first_psns.0));
        if let Some(number) = flow.connection {
            endpoints[from.0 as usize].numbered.insert((to, number), qp);
        }
        Connection { qp, is_shared, retransmitted_before: 0 }
    }

    fn handle_completion(&mut self, now: Time, completion: &Completion, done: &mut Vec<FlowId>) {
        if completion.status != CompletionStatus::Success {
            self.failed += 1;
            if completion.kind != CompletionKind::Receive && completion.id != UNTRACKED {
                self.failed_flows.push(FlowId(completion.id as u32));
            }
            return;
        }
        let is_received = completion.kind == CompletionKind::Receive;
        if is_received {
            self.post_receive(now, completion.qp);
            let echoed = self.echoed_flow(completion.qp);
            match echoed {
                Some(id) => self.finish(id, done),
                None => self.post(now, completion.qp, UNTRACKED, completion.bytes, SendKind::Send(None)),
            }
        } else if self.config.verb != Verb::Echo && completion.id != UNTRACKED {
            self.finish(FlowId(completion.id as u32), done);
        }
    }

    /// Returns the flow that an echo received on this queue pair finishes: the oldest one.
    fn echoed_flow(&self, qp: QpNumber) -> Option<FlowId> {
        self.active.iter().filter(|(_, (connection, _))| connection.qp == qp).map(|(id, _)| *id).min()
    }

    fn finish(&mut self, id: FlowId, done: &mut Vec<FlowId>) {
        let Some((connection, to)) = self.active.remove(&id) else { return };
        let retransmitted = self.retransmitted_on(&connection);
        if retransmitted > 0 {
            self.retransmitted.push((id, retransmitted));
        }
        if !connection.is_shared && !self.config.new_queue_pairs {
            self.idle.entry(to).or_default().push(connection.qp);
        }
        done.push(id);
    }
}

/// Unpacks headers for a tap.
struct UnpackingTap(Box<dyn PacketTap<Header>>);

impl PacketTap<PackedHeader> for UnpackingTap {
    fn observe(&mut self, packet: &TappedPacket<'_, PackedHeader>) {
        let TappedPacket { at, direction, from, to, label, is_marked, header } = *packet;
        let header = &header.header();
        self.0.observe(&TappedPacket { at, direction, from, to, label, is_marked, header });
    }
}

/// Returns a tap for a network of these endpoints that hands unpacked headers to `tap`.
pub fn header_tap(tap: Box<dyn PacketTap<Header>>) -> Box<dyn PacketTap<PackedHeader>> {
    Box::new(UnpackingTap(tap))
}

/// Returns the ECMP label of a connection.
fn label(host: HostId, header: &Header) -> u32 {
    (host.0 << 20 ^ header.destination.0).wrapping_mul(0x9e37_79b9)
}

impl Endpoint for RdmaEndpoint {
    type Header = PackedHeader;

    fn start(endpoints: &mut [Self], now: Time, id: FlowId, flow: &Flow) {
        let is_read = endpoints[flow.from.0 as usize].config.verb == Verb::Read;
        let requested_by_receiver = Flow { from: flow.to, to: flow.from, ..*flow };
        let flow = if is_read { &requested_by_receiver } else { flow };
        let connection = Self::connect(endpoints, now, id, flow);
        let key = endpoints[flow.to.0 as usize].keys.1;
        let sender = &mut endpoints[flow.from.0 as usize];
        sender.active.insert(id, (connection, flow.to));
        let bytes = u32::try_from(flow.bytes).expect("workloads bound the size of a flow by that of a message");
        let kind = match sender.config.verb {
            Verb::Write => SendKind::Write(RemoteBuffer { address: 0, key }, None),
            Verb::Read => SendKind::Read(RemoteBuffer { address: 0, key }),
            Verb::Echo => SendKind::Send(None),
        };
        sender.post(now, connection.qp, u64::from(id.0), bytes, kind);
    }

    fn receive(&mut self, now: Time, packet: &InboundPacket<'_, PackedHeader>) {
        let header = packet.header.header();
        if packet.is_trimmed {
            self.nic.receive_trimmed(now, NicAddress(packet.from.0), &header);
            return;
        }
        self.counters.received_packets += u64::from(header.payload_bytes > 0);
        self.nic.receive(now, NicAddress(packet.from.0), &header, packet.is_marked, &());
    }

    fn transmit(&mut self, now: Time) -> Option<OutboundPacket<PackedHeader>> {
        let rnic::nic::OutgoingPacket { to, header } = self.nic.transmit(now, &mut ())?;
        let packet_bytes = header.packet_bytes() as u32;
        let bytes = (ETHERNET_BYTES + IP_UDP_BYTES + packet_bytes).max(ETHERNET_BYTES_MIN);
        let trimmed = if header.payload_bytes > 0 { bytes.min(HEADERS_BYTES_MAX) } else { bytes };
        let passes_data = header.operation == Operation::CongestionNotification && self.config.cnp_priority;
        let class = if passes_data { TrafficClass::Control } else { TrafficClass::Data };
        let (label, header) = (label(self.host, &header), PackedHeader::new(&header));
        Some(OutboundPacket { to: HostId(to.0), bytes, trimmed_bytes: trimmed as u16, label, class, header })
    }

    fn deadline(&self) -> Option<Time> {
        self.nic.deadline()
    }

    fn advance(&mut self, now: Time) {
        self.nic.advance(now);
    }

    fn finished(&mut self, now: Time, done: &mut Vec<FlowId>) {
        if self.nic.cq_is_empty(self.cq) {
            return; // the common case
        }
        let mut completions = std::mem::take(&mut self.completions);
        loop {
            let found = self.nic.poll_cq(self.cq, &mut completions).expect("the completion queue exists");
            completions[..found].iter().for_each(|completion| self.handle_completion(now, completion, done));
            if found < completions.len() {
                break;
            }
        }
        self.completions = completions;
    }

    fn counters(&self) -> EndpointCounters {
        let nic = self.nic.counters();
        EndpointCounters {
            delivered_bytes: nic.received_bytes,
            sent_packets: nic.sent_packets,
            retransmitted_packets: nic.retransmitted_packets,
            spurious_packets: nic.duplicate_packets,
            timeouts: nic.timeouts,
            slow_path_headers: nic.slow_headers,
            software_ps: nic.software_busy.ps(),
            ..self.counters
        }
    }

    fn memory_bytes(&self) -> usize {
        size_of::<Self>() + self.active.capacity() * size_of::<(FlowId, (Connection, HostId))>()
    }
}
