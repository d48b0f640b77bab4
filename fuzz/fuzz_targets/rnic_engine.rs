//! Feeds a connected queue pair arbitrary packets of its peer between arbitrary work requests of its program: the NIC
//! must not panic, must finish its work in bounded time, and must not write memory without a key.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rnic::nic::{ByteMemory, CqNumber, HostMemory, Nic, NicProfile, QpInit, TransportPolicy};
use rnic::verbs::{
    AccessFlags, Completion, LKey, Mtu, NicAddress, QpAttributes, QpState, ReceiveRequest, RegionKeys, Registration,
    RemoteBuffer, SGES_MAX, SendKind, SendRequest, Sge,
};
use rnic::wire::{
    Aeth, AtomicEth, Header, Immediate, Operation, PlacementHeader, Psn, QpNumber, RKey, Reth, SelectiveAck, Service,
    Syndrome,
};
use sim::{Span, Time};

const MEMORY_BYTES: u64 = 64 << 10;
/// The registered memory; all other memory must stay unchanged.
const KEYED: std::ops::Range<u64> = 16_384..32_768;
const PEER: NicAddress = NicAddress(7);
const FIRST_PSN: u32 = 0x00ff_fff0;
const STEPS_MAX: usize = 200;
const DEADLINES_MAX: usize = 2000;
/// More packets than all requests together need.
const PACKETS_MAX: usize = 100_000;

#[derive(Debug, arbitrary::Arbitrary)]
struct Input {
    policy: u8,
    is_slow: bool,
    steps: Vec<Step>,
}

#[derive(Debug, arbitrary::Arbitrary)]
enum Step {
    Packet(FuzzedPacket),
    Wait { ns: u16 },
    Post { kind: u8, address: u16, bytes: u16 },
    ReceiveRequest { address: u16, bytes: u16 },
    Transmit { packets: u8 },
    Poll,
}

/// A packet whose numbers are valid or nearly valid.
#[derive(Debug, arbitrary::Arbitrary)]
struct FuzzedPacket {
    operation: u8,
    psn: i8,
    flags: u8,
    payload_bytes: u16,
    address: u16,
    bytes: u16,
    syndrome: u8,
    immediate: u8,
    placement: Option<(i8, i8, u16)>,
    sack: Option<(i8, i8, u64)>,
}

const OPERATIONS: [Operation; 18] = [
    Operation::SendFirst,
    Operation::SendMiddle,
    Operation::SendLast,
    Operation::SendOnly,
    Operation::WriteFirst,
    Operation::WriteMiddle,
    Operation::WriteLast,
    Operation::WriteOnly,
    Operation::ReadRequest,
    Operation::ReadResponseFirst,
    Operation::ReadResponseMiddle,
    Operation::ReadResponseLast,
    Operation::ReadResponseOnly,
    Operation::Acknowledge,
    Operation::AtomicAcknowledge,
    Operation::CompareSwap,
    Operation::FetchAdd,
    Operation::CongestionNotification,
];
const SYNDROMES: [Syndrome; 6] = [
    Syndrome::Ack { credit_code: 31 },
    Syndrome::ReceiverNotReady { timer_code: 1 },
    Syndrome::SequenceError,
    Syndrome::InvalidRequest,
    Syndrome::RemoteAccess,
    Syndrome::RemoteOperation,
];

impl FuzzedPacket {
    fn header(&self, qp: QpNumber, key: RKey) -> Header {
        let near = |offset: i8| Psn::new(FIRST_PSN.wrapping_add_signed(offset.into()));
        let number = |offset: i8| u32::from(offset.unsigned_abs());
        let address = KEYED.start.wrapping_sub(1024) + u64::from(self.address);
        let has = |bit: u8| self.flags & 1 << bit != 0;
        Header {
            service: Service::Rc,
            operation: OPERATIONS[usize::from(self.operation) % OPERATIONS.len()],
            destination: qp,
            psn: near(self.psn),
            ack_request: has(0),
            solicited: has(1),
            congestion_echo: has(2),
            payload_bytes: u32::from(self.payload_bytes) % 1200,
            reth: has(3).then_some(Reth { address, key, bytes: self.bytes.into() }),
            atomic: has(4).then_some(AtomicEth { address: address & !7, key, swap_or_add: 1, compare: 0 }),
            immediate: match self.immediate % 4 {
                0 => Some(Immediate::Data(1)),
                1 => Some(Immediate::Invalidate(key)),
                _ => None,
            },
            aeth: has(5).then_some(Aeth { syndrome: SYNDROMES[usize::from(self.syndrome) % SYNDROMES.len()], msn: 0 }),
            datagram: None,
            placement: self.placement.map(|(message, packet, sent)| PlacementHeader {
                message: number(message),
                packet: number(packet),
                sent,
            }),
            sack: self.sack.map(|(expected, newest, arrived)| SelectiveAck {
                expected: near(expected),
                newest: near(newest),
                arrived: arrived.into(),
                marked: 1,
                echo: 0,
            }),
        }
    }
}

struct Victim {
    nic: Nic<ByteMemory>,
    qp: QpNumber,
    cq: CqNumber,
    keys: RegionKeys,
    now: Time,
}

fn local(address: u16, bytes: u16, key: LKey) -> [Sge; SGES_MAX] {
    let mut local = [Sge::default(); SGES_MAX];
    local[0] = Sge { address: KEYED.start + u64::from(address), bytes: bytes.into(), key };
    local
}

impl Victim {
    fn new(input: &Input) -> Self {
        let policy = TransportPolicy::ALL[usize::from(input.policy) % TransportPolicy::ALL.len()];
        let profile = if input.is_slow { NicProfile::modelled(policy) } else { NicProfile::new(policy) };
        let mut nic = Nic::new(profile, ByteMemory::new(MEMORY_BYTES as usize), 1).expect("a valid profile");
        let domain = nic.allocate_domain().expect("a new NIC has room");
        let (address, bytes) = (KEYED.start, KEYED.end - KEYED.start);
        let access = AccessFlags::all();
        let keys = nic.register(&Registration { domain, host_address: address, address, bytes, access });
        let cq = nic.create_cq(4096).expect("a new NIC has room");
        let init = QpInit {
            service: Service::Rc,
            domain,
            send_cq: cq,
            receive_cq: cq,
            srq: None,
            sends_max: 64,
            receives_max: 64,
            signals_all: true,
        };
        let qp = nic.create_qp(&init).expect("a new NIC has room");
        let mut victim = Self { nic, qp, cq, keys: keys.expect("a new NIC has room"), now: Time::ZERO };
        victim.connect();
        victim
    }

    fn connect(&mut self) {
        let access = Some(AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC);
        let init = QpAttributes { partition_index: Some(0), port: Some(1), access, ..QpAttributes::default() };
        let receive = QpAttributes {
            path: Some(PEER),
            mtu: Some(Mtu::B1024),
            destination: Some(QpNumber(3)),
            receive_psn: Some(Psn::new(FIRST_PSN)),
            responder_reads_max: Some(4),
            rnr_timer_code: Some(1),
            ..QpAttributes::default()
        };
        let send = QpAttributes {
            send_psn: Some(Psn::new(FIRST_PSN)),
            initiator_reads_max: Some(4),
            ack_timer_code: Some(4),
            retries: Some(2),
            rnr_retries: Some(2),
            ..QpAttributes::default()
        };
        let steps = [(QpState::Init, init), (QpState::ReadyToReceive, receive), (QpState::ReadyToSend, send)];
        for (state, attributes) in steps {
            self.nic.modify_qp(self.now, self.qp, state, &attributes).expect("an allowed transition");
        }
    }

    fn step(&mut self, step: &Step) {
        let now = self.now;
        match *step {
            Step::Packet(ref packet) => {
                let header = packet.header(self.qp, self.keys.remote);
                let payload = vec![0xAA; header.payload_bytes as usize];
                self.nic.receive(now, PEER, &header, false, &payload);
            }
            Step::Wait { ns } => {
                self.now = now + Span::from_ns(ns.into());
                if self.nic.deadline().is_some_and(|due| due <= self.now) {
                    self.nic.advance(self.now);
                }
            }
            Step::Post { kind, address, bytes } => {
                let request = SendRequest {
                    id: 1,
                    kind: self.kind(kind),
                    local: local(address, bytes, self.keys.local),
                    signalled: true,
                    fence: kind & 0x40 != 0,
                    solicited: false,
                    datagram: None,
                };
                let _ = self.nic.post_send(now, self.qp, &request);
            }
            Step::Receive { address, bytes } => {
                let request = ReceiveRequest { id: 2, local: local(address, bytes, self.keys.local) };
                let _ = self.nic.post_recv(now, self.qp, &request);
            }
            Step::Transmit { packets } => self.transmit(packets.into()),
            Step::Poll => {
                let _ = self.nic.poll_cq(self.cq, &mut [Completion::default(); 8]);
            }
        }
    }

    fn kind(&self, kind: u8) -> SendKind {
        let remote = RemoteBuffer { address: 64, key: self.keys.remote };
        match kind % 6 {
            0 => SendKind::Send(None),
            1 => SendKind::Write(remote, None),
            2 => SendKind::Write(remote, Some(5)),
            3 => SendKind::Read(remote),
            4 => SendKind::CompareSwap { remote, compare: 0, swap: 1 },
            _ => SendKind::FetchAdd { remote, add: 1 },
        }
    }

    fn transmit(&mut self, packets: usize) {
        let mut payload = [0; 4096];
        for _ in 0..packets {
            if self.nic.transmit(self.now, &mut payload).is_none() {
                return;
            }
        }
        assert!(packets < PACKETS_MAX, "unbounded packets");
    }

    /// The peer sends nothing more: outstanding work must end by itself.
    fn end(&mut self) {
        for _ in 0..DEADLINES_MAX {
            self.transmit(PACKETS_MAX);
            let Some(due) = self.nic.deadline() else { break };
            self.now = due.max(self.now);
            self.nic.advance(self.now);
        }
        assert_eq!(self.nic.deadline(), None, "unbounded work");
        for address in (0..KEYED.start).chain(KEYED.end..MEMORY_BYTES).step_by(8) {
            let before = self.nic.memory_mut().fetch_add(address, 0);
            assert_eq!(before, Ok(0), "{address:#x} was written without a key");
        }
    }
}

fuzz_target!(|input: Input| {
    let mut victim = Victim::new(&input);
    for step in input.steps.iter().take(STEPS_MAX) {
        victim.step(step);
    }
    victim.end();
});
