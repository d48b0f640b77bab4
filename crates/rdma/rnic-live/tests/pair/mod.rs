//! Two live NICs with a reliable connection between them, in one thread or in two threads.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use fabric::shm;
use rnic::nic::{ByteMemory, CqNumber, NicProfile, QpInit, TransportPolicy};
use rnic::verbs::{
    AccessFlags, Completion, DatagramDestination, Mtu, NicAddress, ProtectionDomain, QpAttributes, QpState,
    RcConnection, ReceiveRequest, RegionKeys, Registration, SGES_MAX, SendKind, SendRequest, Sge,
};
use rnic::wire::{Psn, QpNumber, Service};
use rnic_live::{LaneIo, LiveNic, PacketIo, RNR_TIMER_CODE, UdpIo, WINDOW_BYTES};

/// Bytes of memory of each host.
pub const MEMORY_BYTES: usize = 256 << 10;
/// Time after which a test fails.
const TIMEOUT: Duration = Duration::from_secs(60);
/// 4.096 us x 2^8, about 1 ms: for one thread that polls both hosts, with many losses.
const ACK_TIMER_CODE_SHORT: u8 = 8;
/// 4.096 us x 2^17, about 0.5 s: for two threads, one of which may wait long for a processor.
const ACK_TIMER_CODE_LONG: u8 = 17;

/// A NIC with its memory and one queue pair.
pub struct TestHost<W> {
    pub live: LiveNic<W, ByteMemory>,
    pub keys: RegionKeys,
    pub cq: CqNumber,
    domain: ProtectionDomain,
    pub qp: QpNumber,
}

pub struct Pair<W> {
    pub a: TestHost<W>,
    pub b: TestHost<W>,
}

impl<W: PacketIo> TestHost<W> {
    pub fn new(profile: NicProfile, io: W, seed: u64) -> Self {
        let mut live = LiveNic::new(profile, ByteMemory::new(MEMORY_BYTES), io, seed).unwrap();
        let nic = live.nic_mut();
        let domain = nic.allocate_domain().unwrap();
        let (access, bytes) = (AccessFlags::all(), MEMORY_BYTES as u64);
        let keys = nic.register(&Registration { domain, host_address: 0, address: 0, bytes, access }).unwrap();
        let cq = nic.create_cq(256).unwrap();
        let mut host = Self { live, keys, cq, domain, qp: QpNumber(0) };
        host.qp = host.create_qp(Service::Rc);
        host
    }

    fn create_qp(&mut self, service: Service) -> QpNumber {
        let init = QpInit {
            service,
            domain: self.domain,
            send_cq: self.cq,
            receive_cq: self.cq,
            srq: None,
            sends_max: 64,
            receives_max: 64,
            signals_all: true,
        };
        self.live.nic_mut().create_qp(&init).unwrap()
    }

    /// Replaces the queue pair by one of the service UD, and brings it to ready-to-send.
    pub fn use_ud(&mut self, queue_key: u32, send_psn: u32) {
        self.qp = self.create_qp(Service::Ud);
        let now = self.live.now();
        let init = QpAttributes {
            partition_index: Some(0),
            port: Some(1),
            queue_key: Some(queue_key),
            ..QpAttributes::default()
        };
        let send = QpAttributes { send_psn: Some(Psn::new(send_psn)), ..QpAttributes::default() };
        let receive = QpAttributes::default();
        let steps = [(QpState::Init, init), (QpState::ReadyToReceive, receive), (QpState::ReadyToSend, send)];
        for (state, attributes) in steps {
            self.live.nic_mut().modify_qp(now, self.qp, state, &attributes).unwrap();
        }
    }

    /// Connects the queue pair. `psns` are those of its own first packet and of its peer's.
    pub fn connect(&mut self, destination: QpNumber, psns: (u32, u32), mtu: Mtu, ack_timer_code: u8) {
        let connection = RcConnection {
            peer: NicAddress(0),
            destination,
            receive_psn: Psn::new(psns.1),
            send_psn: Psn::new(psns.0),
            mtu,
            access: AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC,
            ack_timer_code,
            rnr_timer_code: RNR_TIMER_CODE,
        };
        self.live.connect(self.qp, &connection).unwrap();
    }

    /// Replaces the queue pair by one of the service UC.
    pub fn use_uc(&mut self) {
        self.qp = self.create_qp(Service::Uc);
    }

    /// Connects a UC queue pair, like [`TestHost::connect`].
    pub fn connect_uc(&mut self, destination: QpNumber, psns: (u32, u32), mtu: Mtu) {
        let now = self.live.now();
        let init = QpAttributes {
            partition_index: Some(0),
            port: Some(1),
            access: Some(AccessFlags::REMOTE_WRITE),
            ..QpAttributes::default()
        };
        let receive = QpAttributes {
            path: Some(NicAddress(0)),
            mtu: Some(mtu),
            destination: Some(destination),
            receive_psn: Some(Psn::new(psns.1)),
            ..QpAttributes::default()
        };
        let send = QpAttributes { send_psn: Some(Psn::new(psns.0)), ..QpAttributes::default() };
        for (state, attributes) in
            [(QpState::Init, init), (QpState::ReadyToReceive, receive), (QpState::ReadyToSend, send)]
        {
            self.live.nic_mut().modify_qp(now, self.qp, state, &attributes).unwrap();
        }
    }

    pub fn memory(&mut self) -> &mut [u8] {
        &mut self.live.nic_mut().memory_mut().0
    }

    fn local(&self, address: u64, bytes: u32) -> [Sge; SGES_MAX] {
        let mut local = [Sge::default(); SGES_MAX];
        local[0] = Sge { address, bytes, key: self.keys.local };
        local
    }

    pub fn post_send(&mut self, id: u64, kind: SendKind, address: u64, bytes: u32) {
        self.post_send_to(None, id, kind, address, bytes);
    }

    pub fn post_send_to(
        &mut self,
        datagram: Option<DatagramDestination>,
        id: u64,
        kind: SendKind,
        address: u64,
        bytes: u32,
    ) {
        let local = self.local(address, bytes);
        let request = SendRequest { id, kind, local, signalled: true, fence: false, solicited: false, datagram };
        let now = self.live.now();
        self.live.nic_mut().post_send(now, self.qp, &request).unwrap();
    }

    pub fn post_receive(&mut self, id: u64, address: u64, bytes: u32) {
        let (now, local) = (self.live.now(), self.local(address, bytes));
        self.live.nic_mut().post_recv(now, self.qp, &ReceiveRequest { id, local }).unwrap();
    }

    /// Polls the NIC once, and returns the completions.
    pub fn poll(&mut self) -> Vec<Completion> {
        self.live.poll().unwrap();
        let mut done = [Completion::default(); 16];
        let count = self.live.nic_mut().poll_cq(self.cq, &mut done).unwrap();
        done[..count].to_vec()
    }

    /// Waits for at least this many completions.
    pub fn wait_completions(&mut self, wanted: usize) -> Vec<Completion> {
        let mut done = Vec::new();
        while done.len() < wanted {
            let mut some = [Completion::default(); 4];
            let count = self.live.wait_completions(self.cq, &mut some, Some(TIMEOUT)).unwrap();
            assert!(count > 0, "no completion for {TIMEOUT:?}");
            done.extend_from_slice(&some[..count]);
        }
        done
    }

    /// Serves the peer's requests for this long.
    pub fn serve_for(&mut self, time: Duration) {
        let nothing: Option<()> = self.live.run_until(Some(time), |_| Ok(None)).unwrap();
        assert_eq!(nothing, None);
    }
}

impl<W: PacketIo> Pair<W> {
    /// Creates a pair for one thread.
    pub fn new(policy: TransportPolicy, ios: [W; 2]) -> Self {
        Self::connected(NicProfile::new(policy), ios, Mtu::B1024, ACK_TIMER_CODE_SHORT)
    }

    /// Creates a pair for two threads.
    pub fn for_two_threads(policy: TransportPolicy, ios: [W; 2]) -> Self {
        Self::connected(NicProfile::new(policy), ios, Mtu::B1024, ACK_TIMER_CODE_LONG)
    }

    /// Creates a pair with these settings.
    pub fn connected(profile: NicProfile, [a, b]: [W; 2], mtu: Mtu, ack_timer_code: u8) -> Self {
        let (mut a, mut b) = (TestHost::new(profile, a, 1), TestHost::new(profile, b, 2));
        // One host's packet sequence numbers wrap soon.
        let (psn_a, psn_b) = (0x00ff_fff0, 77);
        a.connect(b.qp, (psn_a, psn_b), mtu, ack_timer_code);
        b.connect(a.qp, (psn_b, psn_a), mtu, ack_timer_code);
        Self { a, b }
    }

    /// Polls both hosts until each has at least this many completions. Returns those of a and those of b.
    pub fn poll_until_completed(&mut self, wanted_a: usize, wanted_b: usize) -> (Vec<Completion>, Vec<Completion>) {
        let (mut done_a, mut done_b) = (Vec::new(), Vec::new());
        let started = Instant::now();
        while done_a.len() < wanted_a || done_b.len() < wanted_b {
            done_a.extend(self.a.poll());
            done_b.extend(self.b.poll());
            assert!(started.elapsed() < TIMEOUT, "no more completions after {done_a:?} and {done_b:?}");
        }
        (done_a, done_b)
    }
}

/// Returns packet I/O over two connected sockets of this machine.
pub fn udp() -> [UdpIo; 2] {
    let here: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let [mut a, mut b] = [UdpIo::bind(here).unwrap(), UdpIo::bind(here).unwrap()];
    a.add_peer(b.local()).unwrap();
    b.add_peer(a.local()).unwrap();
    [a, b]
}

/// Returns packet I/O over a pair of lanes.
pub fn lanes() -> [LaneIo; 2] {
    let (link_a, parts) = shm::create_link(WINDOW_BYTES).unwrap();
    let link_b = shm::open_link(parts, WINDOW_BYTES).unwrap();
    [link_a, link_b].map(|link| {
        let mut io = LaneIo::new();
        io.add_peer(&link, 0x5ec2_e700_1234_5678).unwrap();
        io
    })
}
