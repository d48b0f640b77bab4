//! The RDMA NIC as an endpoint: every flow is a WRITE (or a READ, or a SEND that is echoed) of the engine that carries
//! real programs' verbs, with memory in which only lengths matter.
//!
//! Two hosts' flows without a connection of their own take an idle queue pair of the two, or a new one: as programs do
//! that keep their connections. A flow ends with its completion.

mod profile;

use std::collections::HashMap;
use std::sync::Arc;

use rnic::nic::{CqNumber, Nic, NoMemory, Profile, ProfileError, QpInit};
use rnic::verbs::{
    Access, Address, Completion, CompletionKind, CompletionStatus, LKey, Mtu, ProtectionDomain, QpAttributes, QpState,
    Receive, Registration, Remote, SGES_MAX, Send, SendKind, Sge,
};
use rnic::wire::{Header, Operation, Packed, Psn, QpNumber, RKey, Service};
use sim::Time;

use crate::endpoint::{
    ETHERNET_BYTES, ETHERNET_BYTES_MIN, Endpoint, EndpointCounters, Flow, FlowId, Framing, IP_UDP_BYTES,
    IncomingPacket, OutgoingPacket,
};
use crate::network::{PacketTap, TappedPacket};
use crate::packet::TrafficClass;
use crate::topology::HostId;

pub use profile::{PathProperties, profile};

/// Bytes of the memory that hosts register: all of it.
const MEMORY_BYTES: u64 = 1 << 46;
/// Completions that a queue holds, and that are taken at a time.
const COMPLETIONS_MAX: usize = 1 << 16;
const COMPLETIONS_AT_A_TIME: usize = 16;
/// Requests of a queue pair at a time.
pub(crate) const REQUESTS_MAX: u32 = rnic::nic::QUEUE_REQUESTS_MAX;
/// Receive requests of a queue pair whose messages are echoed.
const RECEIVES: u32 = 32;
/// The number of requests that nobody waits for.
const NOBODY: u64 = u64::MAX;
/// What a switch leaves of a packet is its headers, at most so many bytes with everything.
const HEADERS_BYTES_MAX: u32 = ETHERNET_BYTES + IP_UDP_BYTES + rnic::wire::HEADER_BYTES_MAX as u32;

/// What endpoints do with flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// WRITE into the other host's memory.
    Write,
    /// READ out of the other host's memory, by the host that gets the flow.
    Read,
    /// SEND; the other host's program sends as much back, and the flow ends when that has come.
    Echo,
}

/// How all hosts of a network work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdmaConfig {
    /// Their NIC.
    pub profile: Profile,
    /// What they do.
    pub verb: Verb,
    /// Their time-out: 4.096 us times 2 to the power of this, of policies without one of their own.
    pub ack_timer_code: u8,
    /// Of their NICs' chances.
    pub seed: u64,
}

impl RdmaConfig {
    /// WRITEs by this NIC.
    pub fn new(profile: Profile) -> Self {
        // 262 us: above every round trip of these networks, and below what commercial NICs take.
        Self { profile, verb: Verb::Write, ack_timer_code: 6, seed: 1 }
    }

    /// How a flow becomes packets: RoCEv2's headers and no others, so that all policies are held against the same.
    pub fn framing(&self) -> Framing {
        let headers = ETHERNET_BYTES + IP_UDP_BYTES + (rnic::wire::BTH_BYTES + rnic::wire::ICRC_BYTES) as u32;
        let ack_bytes = headers + rnic::wire::ACK_BYTES as u32;
        Framing { payload_bytes: self.profile.mtu_bytes, overhead_bytes: headers, ack_bytes }
    }
}

/// A queue pair, as its program knows it.
#[derive(Clone, Copy, Debug)]
struct Connection {
    qp: QpNumber,
    /// Whether other flows use it too.
    is_shared: bool,
}

/// A host with an RDMA NIC.
#[derive(Debug)]
pub struct RdmaEndpoint {
    config: Arc<RdmaConfig>,
    host: HostId,
    nic: Nic<NoMemory>,
    cq: CqNumber,
    domain: ProtectionDomain,
    keys: (LKey, RKey),
    /// Queue pairs to a host that no flow has.
    idle: HashMap<HostId, Vec<QpNumber>>,
    /// Queue pairs of connections with a number.
    numbered: HashMap<(HostId, u32), QpNumber>,
    /// By flow that is under way: its queue pair and its peer.
    under_way: HashMap<FlowId, (Connection, HostId)>,
    /// Where completions are taken to.
    completions: Vec<Completion>,
    counters: EndpointCounters,
    failed: u64,
}

impl RdmaEndpoint {
    /// One endpoint a host.
    ///
    /// # Errors
    /// When there can be no such NIC.
    ///
    /// # Panics
    /// If the engine refuses what every NIC has: a queue, a domain, a region.
    pub fn for_hosts(config: RdmaConfig, hosts: u32) -> Result<Vec<Self>, ProfileError> {
        let (config, profile) = (Arc::new(config), Arc::new(config.profile));
        (0..hosts).map(|host| Self::new(&config, &profile, HostId(host))).collect()
    }

    fn new(config: &Arc<RdmaConfig>, profile: &Arc<Profile>, host: HostId) -> Result<Self, ProfileError> {
        let mut nic = Nic::new(Arc::clone(profile), NoMemory, config.seed ^ u64::from(host.0) << 32)?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let cq = nic.create_cq(COMPLETIONS_MAX).expect("a NIC has completion queues");
        let domain = nic.allocate_domain().expect("a NIC has protection domains");
        let registration = Registration { domain, host_address: 0, address: 0, bytes: MEMORY_BYTES, access };
        let keys = nic.register(&registration).expect("a NIC has memory regions");
        let empty = Completion::new(NOBODY, QpNumber(0), CompletionStatus::Success, CompletionKind::Send);
        Ok(Self {
            config: Arc::clone(config),
            host,
            nic,
            cq,
            domain,
            keys: (keys.local, keys.remote),
            idle: HashMap::new(),
            numbered: HashMap::new(),
            under_way: HashMap::new(),
            completions: vec![empty; COMPLETIONS_AT_A_TIME],
            counters: EndpointCounters::default(),
            failed: 0,
        })
    }

    /// The NIC.
    pub fn nic(&self) -> &Nic<NoMemory> {
        &self.nic
    }

    /// Requests that were completed with an error.
    pub fn failed(&self) -> u64 {
        self.failed
    }

    fn create(&mut self) -> QpNumber {
        let init = QpInit {
            service: Service::Rc,
            domain: self.domain,
            send_cq: self.cq,
            receive_cq: self.cq,
            shared_receive: None,
            sends_max: REQUESTS_MAX,
            receives_max: RECEIVES,
            signals_all: false,
        };
        self.nic.create_qp(&init).expect("a NIC has as many queue pairs as its profile says")
    }

    /// Brings a queue pair up, connected to that of another host.
    fn bring_up(&mut self, now: Time, qp: QpNumber, peer: (HostId, QpNumber), first: (Psn, Psn)) {
        let none = QpAttributes::default();
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let init = QpAttributes { partition_index: Some(0), port: Some(1), access: Some(access), ..none };
        let receive = QpAttributes {
            path: Some(Address(peer.0.0)),
            mtu: Some(Mtu::B4096),
            destination: Some(peer.1),
            receive_psn: Some(first.1),
            responder_reads_max: Some(16),
            rnr_timer_code: Some(1),
            ..none
        };
        let send = QpAttributes {
            send_psn: Some(first.0),
            ack_timer_code: Some(self.config.ack_timer_code),
            retries: Some(7),
            rnr_retries: Some(7),
            initiator_reads_max: Some(16),
            ..none
        };
        for (state, attributes) in
            [(QpState::Init, init), (QpState::ReadyToReceive, receive), (QpState::ReadyToSend, send)]
        {
            self.nic.modify_qp(now, qp, state, &attributes).expect("a way that every queue pair goes");
        }
        if self.config.verb == Verb::Echo {
            (0..RECEIVES).for_each(|_| self.post_receive(now, qp));
        }
    }

    fn piece(&self, bytes: u32) -> [Sge; SGES_MAX] {
        let mut local = [Sge::default(); SGES_MAX];
        local[0] = Sge { address: 0, bytes, key: self.keys.0 };
        local
    }

    fn post_receive(&mut self, now: Time, qp: QpNumber) {
        let request = Receive { id: NOBODY, local: self.piece(self.config.profile.mtu_bytes.max(1 << 20)) };
        self.nic.post_recv(now, qp, &request).expect("there is room for the request that was just taken");
    }

    fn post(&mut self, now: Time, qp: QpNumber, id: u64, bytes: u32, kind: SendKind) {
        let signalled = id != NOBODY;
        let local = self.piece(bytes);
        let request = Send { id, kind, local, signalled, fence: false, solicited: false, datagram: None };
        self.nic.post_send(now, qp, &request).expect("a queue pair has room for its flows");
    }

    /// A connection for a flow: its own, an idle one, or a new one.
    fn connect(endpoints: &mut [Self], now: Time, id: FlowId, flow: &Flow) -> Connection {
        let (from, to) = (flow.from, flow.to);
        let sender = &mut endpoints[from.0 as usize];
        let known = match flow.connection {
            Some(number) => sender.numbered.get(&(to, number)).copied(),
            None => sender.idle.get_mut(&to).and_then(Vec::pop),
        };
        let is_shared = flow.connection.is_some();
        if let Some(qp) = known {
            return Connection { qp, is_shared };
        }
        let (qp, peer_qp) = (endpoints[from.0 as usize].create(), endpoints[to.0 as usize].create());
        let first = (Psn::new(id.0.wrapping_mul(7919)), Psn::new(id.0.wrapping_mul(104_729)));
        endpoints[from.0 as usize].bring_up(now, qp, (to, peer_qp), first);
        endpoints[to.0 as usize].bring_up(now, peer_qp, (from, qp), (first.1, first.0));
        if let Some(number) = flow.connection {
            endpoints[from.0 as usize].numbered.insert((to, number), qp);
        }
        Connection { qp, is_shared }
    }

    fn completed(&mut self, now: Time, completion: &Completion, done: &mut Vec<FlowId>) {
        if completion.status != CompletionStatus::Success {
            self.failed += 1;
            return;
        }
        let is_received = completion.kind == CompletionKind::Receive;
        if is_received {
            self.post_receive(now, completion.qp);
            let echoed = self.echoed(completion.qp);
            match echoed {
                Some(id) => self.end(id, done),
                None => self.post(now, completion.qp, NOBODY, completion.bytes, SendKind::Send(None)),
            }
        } else if self.config.verb != Verb::Echo && completion.id != NOBODY {
            self.end(FlowId(completion.id as u32), done);
        }
    }

    /// The flow that an echo on this queue pair ends.
    fn echoed(&self, qp: QpNumber) -> Option<FlowId> {
        self.under_way.iter().filter(|(_, (connection, _))| connection.qp == qp).map(|(id, _)| *id).min()
    }

    fn end(&mut self, id: FlowId, done: &mut Vec<FlowId>) {
        let Some((connection, to)) = self.under_way.remove(&id) else { return };
        if !connection.is_shared {
            self.idle.entry(to).or_default().push(connection.qp);
        }
        done.push(id);
    }
}

/// Shows a tap what packets say.
struct UnpackingTap(Box<dyn PacketTap<Header>>);

impl PacketTap<Packed> for UnpackingTap {
    fn observe(&mut self, packet: &TappedPacket<'_, Packed>) {
        let TappedPacket { at, direction, from, to, label, is_marked, header } = *packet;
        let header = &header.header();
        self.0.observe(&TappedPacket { at, direction, from, to, label, is_marked, header });
    }
}

/// What a network of these endpoints shows to somebody who sees headers.
pub fn tap(of_headers: Box<dyn PacketTap<Header>>) -> Box<dyn PacketTap<Packed>> {
    Box::new(UnpackingTap(of_headers))
}

/// A number that tells connections apart for the choice of paths.
fn label(host: HostId, header: &Header) -> u32 {
    (host.0 << 20 ^ header.destination.0).wrapping_mul(0x9e37_79b9)
}

impl Endpoint for RdmaEndpoint {
    type Header = Packed;

    fn start(endpoints: &mut [Self], now: Time, id: FlowId, flow: &Flow) {
        let is_read = endpoints[flow.from.0 as usize].config.verb == Verb::Read;
        let asked_by_receiver = Flow { from: flow.to, to: flow.from, ..*flow };
        let flow = if is_read { &asked_by_receiver } else { flow };
        let connection = Self::connect(endpoints, now, id, flow);
        let key = endpoints[flow.to.0 as usize].keys.1;
        let sender = &mut endpoints[flow.from.0 as usize];
        sender.under_way.insert(id, (connection, flow.to));
        let bytes = u32::try_from(flow.bytes).expect("workloads have flows of one message at most");
        let kind = match sender.config.verb {
            Verb::Write => SendKind::Write(Remote { address: 0, key }, None),
            Verb::Read => SendKind::Read(Remote { address: 0, key }),
            Verb::Echo => SendKind::Send(None),
        };
        sender.post(now, connection.qp, u64::from(id.0), bytes, kind);
    }

    fn receive(&mut self, now: Time, packet: &IncomingPacket<'_, Packed>) {
        let header = packet.header.header();
        if packet.is_trimmed {
            self.nic.receive_head(now, Address(packet.from.0), &header);
            return;
        }
        self.counters.received_packets += u64::from(header.payload_bytes > 0);
        self.nic.receive(now, Address(packet.from.0), &header, packet.is_marked, &());
    }

    fn transmit(&mut self, now: Time) -> Option<OutgoingPacket<Packed>> {
        let rnic::nic::Outgoing { to, header } = self.nic.transmit(now, &mut ())?;
        let packet_bytes = header.packet_bytes() as u32;
        let bytes = (ETHERNET_BYTES + IP_UDP_BYTES + packet_bytes).max(ETHERNET_BYTES_MIN);
        let trimmed = if header.payload_bytes > 0 { bytes.min(HEADERS_BYTES_MAX) } else { bytes };
        let class = if header.operation == Operation::CongestionNotification {
            TrafficClass::Control
        } else {
            TrafficClass::Data
        };
        let (label, header) = (label(self.host, &header), Packed::new(&header));
        Some(OutgoingPacket { to: HostId(to.0), bytes, trimmed_bytes: trimmed as u16, label, class, header })
    }

    fn deadline(&self) -> Option<Time> {
        self.nic.deadline()
    }

    fn advance(&mut self, now: Time) {
        self.nic.advance(now);
    }

    fn finished(&mut self, now: Time, done: &mut Vec<FlowId>) {
        if self.nic.cq_is_empty(self.cq) {
            return; // as almost always
        }
        let mut completions = std::mem::take(&mut self.completions);
        loop {
            let found = self.nic.poll_cq(self.cq, &mut completions).expect("the queue that was created");
            completions[..found].iter().for_each(|completion| self.completed(now, completion, done));
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
            retransmitted_packets: nic.sent_again_packets,
            spurious_packets: nic.duplicate_packets,
            timeouts: nic.timeouts,
            slow_path_headers: nic.slow_headers,
            software_ps: nic.software_busy.ps(),
            ..self.counters
        }
    }

    fn memory_bytes(&self) -> usize {
        size_of::<Self>() + self.under_way.capacity() * size_of::<(FlowId, (Connection, HostId))>()
    }
}
