//! Common test code: a pair of NICs with connected queue pairs, and the wire between them.

use sim::{EventQueue, Random, Span, Time};

use crate::nic::{ByteMemory, CqNumber, Nic, NicProfile, QpInit};
use crate::verbs::{
    AccessFlags, Completion, LKey, Mtu, NicAddress, ProtectionDomain, QpAttributes, QpState, ReceiveRequest,
    Registration, RemoteBuffer, SGES_MAX, SendKind, SendRequest, Sge,
};
use crate::wire::{Header, Psn, QpNumber, RKey, Service};

/// Bytes of each host's memory.
pub const MEMORY_BYTES: usize = 1 << 20;
/// Maximum number of steps of a run, after which it counts as hung.
const STEPS_MAX: u64 = 3_000_000;
const COMPLETIONS_MAX: usize = 4096;

/// What the wire does to packets: probabilities of each impairment.
#[derive(Clone, Copy, Debug)]
pub struct Impairments {
    pub loss: f64,
    pub duplicate: f64,
    /// The probability that a packet is delayed, and its maximum delay.
    pub delayed: f64,
    pub delay_ns_max: f64,
    pub mark: f64,
    /// The probability that a packet's payload is removed (packet trimming).
    pub trim: f64,
}

impl Impairments {
    pub const NONE: Self = Self { loss: 0.0, duplicate: 0.0, delayed: 0.0, delay_ns_max: 0.0, mark: 0.0, trim: 0.0 };
}

struct InFlight {
    to: usize,
    header: Header,
    is_marked: bool,
    is_trimmed: bool,
    payload: Vec<u8>,
}

enum WireEvent {
    Arrival(Box<InFlight>),
    WireFree,
}

/// A packet that was given to the wire.
#[derive(Clone, Debug)]
pub struct LoggedPacket {
    pub from: usize,
    pub header: Header,
}

/// Selects packets by side, number of the packet on that side from 0, and header.
pub type Drops = dyn FnMut(usize, u64, &Header) -> bool;

pub struct Pair {
    pub nics: [Nic<ByteMemory>; 2],
    pub cqs: [CqNumber; 2],
    pub domains: [ProtectionDomain; 2],
    /// The keys of each host's whole memory.
    pub keys: [(LKey, RKey); 2],
    pub now: Time,
    pub log: Vec<LoggedPacket>,
    pub logs: bool,
    /// Prints every packet.
    pub traces: bool,
    pub impairments: Impairments,
    /// Selects the packets to drop.
    pub drops: Box<Drops>,
    /// Selects the packets to trim.
    pub trims: Box<Drops>,
    pub delay: Span,
    pub packet_time: Span,
    random: Random,
    queue: EventQueue<WireEvent>,
    wire_free: [Time; 2],
    sent: [u64; 2],
    pub completions: [Vec<Completion>; 2],
}

impl Pair {
    pub fn new(profile: NicProfile, seed: u64) -> Self {
        Self::with_memory(profile, seed, MEMORY_BYTES)
    }

    pub fn with_memory(profile: NicProfile, seed: u64, memory_bytes: usize) -> Self {
        let mut nics = [0, 1].map(|side| Nic::new(profile, ByteMemory::new(memory_bytes), seed ^ side).unwrap());
        let cqs = [0, 1].map(|side: usize| nics[side].create_cq(COMPLETIONS_MAX).unwrap());
        let domains = [0, 1].map(|side: usize| nics[side].allocate_domain().unwrap());
        let access = AccessFlags::LOCAL_WRITE
            | AccessFlags::REMOTE_READ
            | AccessFlags::REMOTE_WRITE
            | AccessFlags::REMOTE_ATOMIC
            | AccessFlags::WINDOW_BIND;
        let keys = [0, 1].map(|side: usize| {
            let bytes = memory_bytes as u64;
            let registration = Registration { domain: domains[side], host_address: 0, address: 0, bytes, access };
            let keys = nics[side].register(&registration).unwrap();
            (keys.local, keys.remote)
        });
        Self {
            nics,
            cqs,
            domains,
            keys,
            now: Time::ZERO,
            log: Vec::new(),
            logs: false,
            traces: false,
            impairments: Impairments::NONE,
            drops: Box::new(|_, _, _| false),
            trims: Box::new(|_, _, _| false),
            delay: Span::from_ns(1000.0),
            packet_time: Span::from_ns(80.0),
            random: Random::new(seed, "wire"),
            queue: EventQueue::new(),
            wire_free: [Time::ZERO; 2],
            sent: [0; 2],
            completions: [Vec::new(), Vec::new()],
        }
    }

    pub fn qp_init(&self, side: usize, service: Service) -> QpInit {
        QpInit {
            service,
            domain: self.domains[side],
            send_cq: self.cqs[side],
            receive_cq: self.cqs[side],
            srq: None,
            sends_max: 1024,
            receives_max: 1024,
            signals_all: false,
        }
    }

    /// Returns connected queue pairs in the ready-to-send state.
    pub fn connect(&mut self, service: Service) -> [QpNumber; 2] {
        let inits = [0, 1].map(|side| self.qp_init(side, service));
        self.connect_as(&inits)
    }

    pub fn connect_as(&mut self, inits: &[QpInit; 2]) -> [QpNumber; 2] {
        let qps = [0, 1].map(|side: usize| self.nics[side].create_qp(&inits[side]).unwrap());
        for side in 0..2 {
            self.bring_up(side, qps[side], qps[1 - side], inits[side].service);
        }
        qps
    }

    pub fn bring_up(&mut self, side: usize, qp: QpNumber, peer: QpNumber, service: Service) {
        self.bring_up_with(side, [qp, peer], service, |_| {});
    }

    pub fn bring_up_with(
        &mut self,
        side: usize,
        [qp, peer]: [QpNumber; 2],
        service: Service,
        change: impl FnOnce(&mut [QpAttributes; 3]),
    ) {
        let mut steps = attributes(service);
        change(&mut steps);
        steps[1].destination = steps[1].destination.map(|_| peer);
        steps[1].path = steps[1].path.map(|_| NicAddress(1 - side as u32));
        // Close to the wraparound, so that every test crosses it.
        let first = |side: usize| Psn::new(u32::MAX - 20 - side as u32);
        steps[1].receive_psn = steps[1].receive_psn.map(|_| first(1 - side));
        steps[2].send_psn = Some(first(side));
        for (state, step) in [QpState::Init, QpState::ReadyToReceive, QpState::ReadyToSend].into_iter().zip(&steps) {
            self.nics[side].modify_qp(self.now, qp, state, step).unwrap();
        }
    }

    pub fn piece(&self, side: usize, address: u64, bytes: u32) -> [Sge; SGES_MAX] {
        let mut local = [Sge::default(); SGES_MAX];
        local[0] = Sge { address, bytes, key: self.keys[side].0 };
        local
    }

    pub fn send(&mut self, side: usize, qp: QpNumber, id: u64, kind: SendKind, address: u64, bytes: u32) {
        let request = self.request(side, id, kind, address, bytes);
        self.nics[side].post_send(self.now, qp, &request).unwrap();
    }

    pub fn request(&self, side: usize, id: u64, kind: SendKind, address: u64, bytes: u32) -> SendRequest {
        let local = self.piece(side, address, bytes);
        SendRequest { id, kind, local, signalled: true, fence: false, solicited: false, datagram: None }
    }

    pub fn receive(&mut self, side: usize, qp: QpNumber, id: u64, address: u64, bytes: u32) {
        let request = ReceiveRequest { id, local: self.piece(side, address, bytes) };
        self.nics[side].post_recv(self.now, qp, &request).unwrap();
    }

    /// Returns an address in the other side's memory.
    pub fn remote(&self, side: usize, address: u64) -> RemoteBuffer {
        RemoteBuffer { address, key: self.keys[1 - side].1 }
    }

    /// Runs until no event remains.
    pub fn run(&mut self) {
        self.run_until(Time::MAX);
    }

    pub fn run_until(&mut self, end: Time) {
        for _ in 0..STEPS_MAX {
            if !self.step(end) {
                self.poll();
                return;
            }
        }
        panic!("still busy after {STEPS_MAX} steps, at {:?}", self.now);
    }

    /// Processes the next event up to `end`; returns false if there is none.
    pub fn step(&mut self, end: Time) -> bool {
        self.send_all();
        let deadlines = self.nics.iter().filter_map(Nic::deadline).min();
        let next = [self.queue.next_time(), deadlines].into_iter().flatten().min();
        let Some(next) = next.filter(|next| *next <= end) else {
            if end < Time::MAX {
                self.now = self.now.max(end);
            }
            return false;
        };
        self.now = self.now.max(next);
        while self.queue.next_time().is_some_and(|at| at <= self.now) {
            if let Some((_, WireEvent::Arrival(packet))) = self.queue.next_event() {
                self.arrive(&packet);
            }
        }
        for nic in &mut self.nics {
            nic.advance(self.now);
        }
        self.poll();
        true
    }

    fn arrive(&mut self, packet: &InFlight) {
        let (source, nic) = (NicAddress(1 - packet.to as u32), &mut self.nics[packet.to]);
        if packet.is_trimmed {
            nic.receive_trimmed(self.now, source, &packet.header);
        } else {
            nic.receive(self.now, source, &packet.header, packet.is_marked, &packet.payload);
        }
    }

    pub fn poll(&mut self) {
        let mut room = [Completion::default(); 64];
        for side in 0..2 {
            while let Ok(count @ 1..) = self.nics[side].poll_cq(self.cqs[side], &mut room) {
                self.completions[side].extend(&room[..count]);
            }
        }
    }

    fn send_all(&mut self) {
        for side in 0..2 {
            while self.wire_free[side] <= self.now && self.send_one(side) {}
        }
    }

    fn send_one(&mut self, side: usize) -> bool {
        let mut payload = vec![0; 4096];
        let Some(outgoing) = self.nics[side].transmit(self.now, &mut payload) else { return false };
        assert_eq!(outgoing.to, NicAddress(1 - side as u32));
        self.wire_free[side] = self.now + self.packet_time;
        self.queue.schedule(self.wire_free[side], WireEvent::WireFree);
        payload.truncate(outgoing.header.payload_bytes as usize);
        let number = self.sent[side];
        self.sent[side] += 1;
        let is_dropped = (self.drops)(side, number, &outgoing.header) || self.random.chance(self.impairments.loss);
        if self.traces {
            let fate = if is_dropped { "LOST" } else { "" };
            println!("{} us: {side} sends {:?} {fate}", self.now.ps() / 1_000_000, outgoing.header);
        }
        if self.logs {
            self.log.push(LoggedPacket { from: side, header: outgoing.header });
        }
        let copies = 1 + usize::from(self.random.chance(self.impairments.duplicate));
        for _ in 0..copies {
            let mut delay = self.delay;
            if self.random.chance(self.impairments.delayed) {
                delay += Span::from_ns(self.random.unit() * self.impairments.delay_ns_max);
            }
            let is_marked = self.random.chance(self.impairments.mark);
            let is_listed = (self.trims)(side, number, &outgoing.header);
            let is_trimmed = !payload.is_empty() && (self.random.chance(self.impairments.trim) || is_listed);
            let (header, payload) = (outgoing.header, payload.clone());
            let packet = InFlight { to: 1 - side, header, is_marked, is_trimmed, payload };
            if !is_dropped {
                self.queue.schedule(self.now + self.packet_time + delay, WireEvent::Arrival(Box::new(packet)));
            }
        }
        true
    }
}

/// Returns the attributes of each transition up to ready-to-send; the peer's must be filled in.
pub fn attributes(service: Service) -> [QpAttributes; 3] {
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    let none = QpAttributes::default();
    let init = QpAttributes { partition_index: Some(0), port: Some(1), ..none };
    if service == Service::Ud {
        let send = QpAttributes { send_psn: Some(Psn::new(0)), ..none };
        return [QpAttributes { queue_key: Some(7), ..init }, none, send];
    }
    let receive = QpAttributes {
        path: Some(NicAddress(0)),
        mtu: Some(Mtu::B4096),
        destination: Some(QpNumber(0)),
        receive_psn: Some(Psn::new(0)),
        ..none
    };
    let send = QpAttributes { send_psn: Some(Psn::new(0)), ..none };
    let init = QpAttributes { access: Some(access), ..init };
    if service == Service::Uc {
        return [init, receive, send];
    }
    let receive = QpAttributes { responder_reads_max: Some(16), rnr_timer_code: Some(1), ..receive };
    let send = QpAttributes {
        ack_timer_code: Some(8),
        retries: Some(7),
        rnr_retries: Some(7),
        initiator_reads_max: Some(16),
        ..send
    };
    [init, receive, send]
}
