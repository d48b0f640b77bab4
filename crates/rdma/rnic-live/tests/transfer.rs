//! The engine over UDP and over lanes: every operation, injected faults, hostile datagrams, blocking.

mod pair;

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pair::{MEMORY_BYTES, Pair, TestHost, lanes, udp};
use rnic::nic::{NicCounters, NicProfile, TransportPolicy};
use rnic::verbs::{
    Completion, CompletionKind, CompletionStatus, DatagramDestination, Mtu, NicAddress, RemoteBuffer, SendKind,
};
use rnic::wire::{Encapsulation, Header, Immediate, IpAddresses, Operation, Packet, Psn, QpNumber, Service};
use rnic_live::{FaultRates, FaultyIo, PacketIo, PacketIoError, ReceiveDrops, ReceivedPacket, UdpIo};

const POLICIES: [TransportPolicy; 3] = [TransportPolicy::Srnic, TransportPolicy::Irn, TransportPolicy::GoBackN];

/// Injects faults at both ends.
fn faulty<W: PacketIo>(ios: [W; 2], faults: FaultRates, seed: u64) -> [FaultyIo<W>; 2] {
    let [a, b] = ios;
    [FaultyIo::new(a, faults, seed).unwrap(), FaultyIo::new(b, faults, seed + 1000).unwrap()]
}

/// Performs one of each operation, the largest of several packets.
fn every_operation(mut pair: Pair<impl PacketIo>) {
    let bytes = 10_000;
    let sent: Vec<u8> = (0..bytes).map(|at| (at * 7 % 251) as u8).collect();
    pair.a.memory()[..bytes].copy_from_slice(&sent);

    pair.b.post_receive(1, 20_000, 12_000);
    pair.a.post_send(2, SendKind::Send(Some(0xfeed)), 0, bytes as u32);
    let (done, received) = pair.poll_until_completed(1, 1);
    assert_eq!((done[0].id, received[0].id, received[0].bytes), (2, 1, bytes as u32));
    assert_eq!(received[0].immediate, Some(Immediate::Data(0xfeed)));
    assert_eq!(pair.b.memory()[20_000..20_000 + bytes], sent);

    let key = pair.b.keys.remote;
    pair.a.post_send(3, SendKind::Write(RemoteBuffer { address: 40_000, key }, None), 0, bytes as u32);
    assert_eq!(pair.poll_until_completed(1, 0).0[0].kind, CompletionKind::Write);
    assert_eq!(pair.b.memory()[40_000..40_000 + bytes], sent);

    pair.a.post_send(4, SendKind::Read(RemoteBuffer { address: 40_100, key }), 50_000, 5000);
    assert_eq!(pair.poll_until_completed(1, 0).0[0].kind, CompletionKind::Read);
    assert_eq!(pair.a.memory()[50_000..55_000], sent[100..5100]);

    pair.b.memory()[64..72].copy_from_slice(&41_u64.to_ne_bytes());
    let remote = RemoteBuffer { address: 64, key };
    pair.a.post_send(5, SendKind::FetchAdd { remote, add: 1 }, 60_000, 8);
    pair.a.post_send(6, SendKind::CompareSwap { remote, compare: 42, swap: 7 }, 60_008, 8);
    let ids: Vec<u64> = pair.poll_until_completed(2, 0).0.iter().map(|done| done.id).collect();
    assert_eq!(ids, [5, 6]);
    assert_eq!(pair.a.memory()[60_000..60_016], [41_u64.to_ne_bytes(), 42_u64.to_ne_bytes()].concat());
    assert_eq!(pair.b.memory()[64..72], 7_u64.to_ne_bytes());

    pair.b.post_receive(7, 0, 0);
    pair.a.post_send(8, SendKind::Write(remote, Some(9)), 0, 0);
    let received = pair.poll_until_completed(1, 1).1[0];
    assert_eq!((received.kind, received.immediate), (CompletionKind::ReceiveWriteImmediate, Some(Immediate::Data(9))));
}

#[test]
fn every_operation_completes_over_udp() {
    for policy in POLICIES {
        every_operation(Pair::new(policy, udp()));
    }
}

#[test]
fn every_operation_completes_over_lanes() {
    for policy in POLICIES {
        every_operation(Pair::new(policy, lanes()));
    }
}

/// Sends a datagram with the right queue key and one with a wrong one.
/// An acknowledgement that waits for the program's next call arrives behind the answer that this call sends.
fn an_acknowledgement_follows_the_answer(ios: [impl PacketIo; 2]) {
    let Pair { mut a, mut b } = Pair::for_two_threads(TransportPolicy::GoBackN, ios);
    b.live.set_delayed_acks(true);
    a.post_receive(1, 1000, 8);
    b.post_receive(2, 2000, 8);
    a.post_send(3, SendKind::Send(None), 0, 8);
    assert!(a.poll().is_empty());
    assert_eq!(b.wait_completions(1)[0].id, 2);
    assert!((0..10).all(|_| a.poll().is_empty()), "the acknowledgement has left");
    b.post_send(4, SendKind::Send(None), 0, 8);
    assert!(b.live.transmit().unwrap());
    let ids: Vec<u64> = a.wait_completions(2).iter().map(|done| done.id).collect();
    assert_eq!(ids, [1, 3]);
    assert_eq!(b.wait_completions(1)[0].id, 4);
    // Without an answer, the next call sends it alone.
    b.post_receive(5, 2000, 8);
    a.post_send(6, SendKind::Send(None), 0, 8);
    assert!(a.poll().is_empty());
    assert_eq!(b.wait_completions(1)[0].id, 5);
    assert!(b.poll().is_empty());
    assert_eq!(a.wait_completions(1)[0].id, 6);
}

#[test]
fn an_acknowledgement_follows_the_answer_over_udp_and_lanes() {
    an_acknowledgement_follows_the_answer(udp());
    an_acknowledgement_follows_the_answer(lanes());
}

fn datagrams_are_accepted_by_their_key(mut pair: Pair<impl PacketIo>) {
    const QUEUE_KEY: u32 = 0x1234_5678;
    pair.a.use_ud(QUEUE_KEY, 0);
    pair.b.use_ud(QUEUE_KEY, 0);
    pair.a.memory()[..300].fill(9);
    pair.b.post_receive(1, 1000, 2000);
    let to = DatagramDestination { to: NicAddress(0), qp: pair.b.qp, queue_key: QUEUE_KEY };
    pair.a.post_send_to(
        Some(DatagramDestination { queue_key: QUEUE_KEY + 1, ..to }),
        2,
        SendKind::Send(None),
        500,
        300,
    );
    pair.a.post_send_to(Some(to), 3, SendKind::Send(Some(4)), 0, 300);
    let (done, received) = pair.poll_until_completed(2, 1);
    assert_eq!([done[0].id, done[1].id], [2, 3], "a datagram completes once it is sent");
    let source = Some((NicAddress(0), pair.a.qp));
    assert_eq!((received[0].id, received[0].immediate, received[0].source), (1, Some(Immediate::Data(4)), source));
    // The verbs API leaves 40 bytes for a global routing header before a datagram.
    assert_eq!(pair.b.memory()[1040..1340], [9; 300]);
    assert_eq!(pair.b.live.nic().counters().drop_queue_key, 1);
}

#[test]
fn datagrams_are_accepted_by_their_key_over_udp_and_lanes() {
    datagrams_are_accepted_by_their_key(Pair::new(TransportPolicy::Srnic, lanes()));
    datagrams_are_accepted_by_their_key(Pair::new(TransportPolicy::GoBackN, udp()));
}

/// Sends messages of one packet and of many by UC; nothing is acknowledged.
fn unreliable_messages_arrive(mut pair: Pair<impl PacketIo>) {
    let (a_before, b_before) = (0x00ff_fffe, 9);
    pair.a.use_uc();
    pair.b.use_uc();
    pair.a.connect_uc(pair.b.qp, (a_before, b_before), Mtu::B1024);
    pair.b.connect_uc(pair.a.qp, (b_before, a_before), Mtu::B1024);
    for (id, bytes) in [(1, 1), (2, 1024), (3, 5000)] {
        pair.a.memory()[..bytes].fill(id as u8);
        pair.b.post_receive(id, 20_000, 6000);
        pair.a.post_send(id, SendKind::Send(None), 0, bytes as u32);
        let (sent, received) = pair.poll_until_completed(1, 1);
        assert_eq!((sent[0].id, received[0].id, received[0].bytes), (id, id, bytes as u32));
        assert_eq!(pair.b.memory()[20_000..20_000 + bytes], vec![id as u8; bytes]);
    }
    assert_eq!(pair.b.live.nic().counters().sent_packets, 0);
}

#[test]
fn unreliable_messages_arrive_over_udp_and_lanes() {
    unreliable_messages_arrive(Pair::new(TransportPolicy::Srnic, lanes()));
    unreliable_messages_arrive(Pair::new(TransportPolicy::GoBackN, udp()));
}

#[test]
fn a_write_out_of_bounds_completes_with_a_remote_access_error() {
    let mut pair = Pair::new(TransportPolicy::Srnic, lanes());
    let remote = RemoteBuffer { address: MEMORY_BYTES as u64 - 10, key: pair.b.keys.remote };
    pair.a.post_send(1, SendKind::Write(remote, None), 0, 11);
    assert_eq!(pair.poll_until_completed(1, 0).0[0].status, CompletionStatus::RemoteAccess);
}

/// Sends messages of many sizes and asserts that each is received once, in order and intact.
fn messages_arrive(pair: &mut Pair<impl PacketIo>, messages: usize) {
    const SLOTS: usize = 8;
    const SLOT_BYTES: usize = 16_384;
    let range = |message: usize| {
        let at = message % SLOTS * SLOT_BYTES;
        at..at + 1 + message * 2741 % 12_000
    };
    let byte = |message: usize, at: usize| (message * 31 + at * 7) as u8;
    let (mut posted, mut sent, mut received) = (0, 0, 0);
    while received < messages || sent < messages {
        // A slot is reused when its message has arrived and is acknowledged.
        while posted < messages && posted < received.min(sent) + SLOTS {
            let range = range(posted);
            pair.b.post_receive(posted as u64, range.start as u64, SLOT_BYTES as u32);
            pair.a.memory()[range.clone()].iter_mut().enumerate().for_each(|(at, to)| *to = byte(posted, at));
            pair.a.post_send(posted as u64, SendKind::Send(None), range.start as u64, range.len() as u32);
            posted += 1;
        }
        let (is_sent, is_received) = (usize::from(sent < received), usize::from(received <= sent));
        let (done_a, done_b) = pair.poll_until_completed(is_sent, is_received);
        for completion in done_b {
            assert_eq!((completion.id, completion.status), (received as u64, CompletionStatus::Success));
            let range = range(received);
            assert_eq!(completion.bytes as usize, range.len());
            let is_whole = pair.b.memory()[range].iter().enumerate().all(|(at, found)| *found == byte(received, at));
            assert!(is_whole, "message {received} differs from what was sent");
            received += 1;
        }
        for completion in done_a {
            assert_eq!((completion.id, completion.status), (sent as u64, CompletionStatus::Success));
            sent += 1;
        }
    }
}

const FAULTS: FaultRates =
    FaultRates { loss: 0.03, loss_sent: 0.0, duplication: 0.02, reordering: 0.05, corruption: 0.02 };

#[test]
fn messages_arrive_once_in_order_and_intact_over_faulty_udp() {
    for policy in POLICIES {
        for seed in 0..2 {
            messages_arrive(&mut Pair::new(policy, faulty(udp(), FAULTS, seed)), 60);
        }
    }
}

#[test]
fn messages_arrive_once_in_order_and_intact_over_faulty_lanes() {
    for policy in POLICIES {
        for seed in 0..2 {
            messages_arrive(&mut Pair::new(policy, faulty(lanes(), FAULTS, seed)), 60);
        }
    }
}

#[test]
#[ignore = "a minute of faults; in ./x exam"]
fn messages_arrive_once_in_order_and_intact_for_a_minute_of_faults() {
    for seed in 0..60 {
        for policy in POLICIES {
            messages_arrive(&mut Pair::new(policy, faulty(udp(), FAULTS, seed)), 300);
            messages_arrive(&mut Pair::new(policy, faulty(lanes(), FAULTS, seed)), 300);
        }
    }
}

#[test]
fn lost_and_corrupted_packets_are_retransmitted() {
    let faults = FaultRates { loss: 0.1, corruption: 0.1, ..FaultRates::default() };
    let mut pair = Pair::new(TransportPolicy::Srnic, faulty(udp(), faults, 7));
    messages_arrive(&mut pair, 60);
    for side in [&pair.a, &pair.b] {
        let faults = side.live.io().fault_counters();
        let ReceiveDrops { drop_malformed, drop_checksum } = side.live.receive_drops();
        let dropped = drop_malformed + drop_checksum;
        assert!(faults.lost > 0 && faults.corrupted > 0, "{faults:?}");
        // A flipped bit makes a packet malformed or its checksum wrong, unless switches may change the bit.
        assert!(dropped > 0 && dropped <= faults.corrupted, "{faults:?} {dropped}");
    }
    let NicCounters { retransmitted_packets, .. } = pair.a.live.nic().counters();
    assert!(*retransmitted_packets > 0);
}

/// Returns an empty SEND to this queue pair with a checksum for this datagram.
fn forged(destination: QpNumber, datagram: Option<&Encapsulation>) -> Vec<u8> {
    let bare = Header::bare(Service::Rc, Operation::SendOnly, destination, Psn::new(0));
    let header = Header { ack_request: true, ..bare };
    let mut packet = vec![0; header.packet_bytes()];
    header.emit(&mut packet).unwrap();
    header.seal(&mut packet, datagram);
    packet
}

#[test]
fn hostile_datagrams_are_dropped_and_counted_and_the_connection_continues() {
    let mut pair = Pair::new(TransportPolicy::Srnic, udp());
    let attacker = UdpSocket::bind("127.0.0.1:0").unwrap();
    let target = pair.b.live.io().local();
    for bytes in 0..40 {
        attacker.send_to(&vec![bytes as u8; bytes], target).unwrap();
    }
    let io = pair.a.live.io_mut();
    let datagram = io.encapsulation(NicAddress(0)).unwrap();
    let unknown = QpNumber(0x00ff_ffff);
    for packet in [vec![0x99; 40], forged(unknown, datagram.as_ref()), forged(unknown, None)] {
        assert!(io.send(NicAddress(0), &packet).unwrap());
        io.flush().unwrap();
    }
    messages_arrive(&mut pair, 20);
    let counters = pair.b.live.receive_drops();
    assert_eq!((counters.drop_malformed, counters.drop_checksum), (1, 1));
    assert_eq!(pair.b.live.nic().counters().drop_unknown_qp, 1);
    // A kernel that coalesces datagrams may swallow an empty one.
    assert!((39..=40).contains(&pair.b.live.io().rejected()), "{}", pair.b.live.io().rejected());
}

fn is_success(completion: &Completion) -> bool {
    completion.status == CompletionStatus::Success
}

/// Emulates a NIC on the same network: its packets come from any port with an incremented IPv4 identification, and
/// those that it receives must have a checksum for the identification that was sent, 0.
#[test]
fn standard_rocev2_packets_are_exchanged_with_a_nic() {
    let nic = UdpSocket::bind("127.0.0.1:0").unwrap();
    nic.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let other_port = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut io = UdpIo::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    io.expect_nics();
    io.add_peer(nic.local_addr().unwrap()).unwrap();
    let back = io.encapsulation(NicAddress(0)).unwrap().unwrap();
    let (own, theirs) = (io.local(), other_port.local_addr().unwrap());
    let mut side = TestHost::new(NicProfile::new(TransportPolicy::GoBackN), io, 1);
    side.connect(QpNumber(99), (5, 0), Mtu::B1024, 17);
    side.post_receive(1, 0, 64);
    let here = Ipv4Addr::LOCALHOST;
    let addresses = IpAddresses::V4 { source: here, destination: here, identification: 0x4242, dont_fragment: true };
    let there = Encapsulation { addresses, source_port: theirs.port(), destination_port: own.port() };
    other_port.send_to(&forged(side.qp, Some(&there)), own).unwrap();
    let done = side.wait_completions(1);
    assert_eq!((done[0].id, done[0].status, done[0].bytes), (1, CompletionStatus::Success, 0));
    let mut answer = [0; 100];
    let (bytes, _) = nic.recv_from(&mut answer).unwrap();
    let answer = Packet::new_checked(&answer[..bytes]).unwrap();
    assert!(answer.is_intact(&back));
    let header = answer.header();
    assert_eq!((header.operation, header.destination, header.psn), (Operation::Acknowledge, QpNumber(99), Psn::new(0)));
    assert_eq!((header.placement, header.sack), (None, None), "standard RoCEv2 has no extension");
    assert_eq!(side.live.receive_drops(), ReceiveDrops::default());
}

/// Sets a flag when dropped.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs a ping-pong between two threads that block whenever they have nothing to do.
fn blocked_threads_are_woken(pair: Pair<impl PacketIo + Send>) {
    const ROUNDS: u64 = 200;
    let Pair { a: mut ping, b: mut pong } = pair;
    ping.live.set_spins(false);
    pong.live.set_spins(false);
    pong.post_receive(0, 0, 64);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let is_done = &is_done;
        scope.spawn(move || {
            let mut received = 0;
            while received < ROUNDS {
                let done = pong.wait_completions(1);
                assert!(done.iter().all(is_success));
                for completion in done.iter().filter(|completion| completion.kind == CompletionKind::Receive) {
                    assert_eq!(completion.id, received);
                    received += 1;
                    pong.post_receive(received, 0, 64);
                    pong.post_send(received, SendKind::Send(None), 0, 64);
                }
            }
            // The last response may have to be retransmitted.
            while !is_done.load(Ordering::Relaxed) {
                pong.serve_for(Duration::from_millis(20));
            }
        });
        // Ends the other thread even if a round panics.
        let _guard = SetOnDrop(is_done);
        for round in 0..ROUNDS {
            ping.post_receive(round, 64, 64);
            ping.memory()[..8].copy_from_slice(&round.to_le_bytes());
            ping.post_send(round, SendKind::Send(None), 0, 64);
            assert!(ping.wait_completions(2).iter().all(|completion| is_success(completion) && completion.id == round));
            assert_eq!(ping.memory()[64..72], round.to_le_bytes());
        }
    });
}

#[test]
fn packets_wake_blocked_threads_over_udp() {
    blocked_threads_are_woken(Pair::for_two_threads(TransportPolicy::Srnic, udp()));
}

#[test]
fn packets_wake_blocked_threads_over_lanes() {
    blocked_threads_are_woken(Pair::for_two_threads(TransportPolicy::GoBackN, lanes()));
}

/// Packet I/O that counts its calls of `receive`.
struct CountingIo<W> {
    io: W,
    receive_calls: u64,
}

impl<W: PacketIo> PacketIo for CountingIo<W> {
    fn encapsulation(&self, to: NicAddress) -> Result<Option<Encapsulation>, PacketIoError> {
        self.io.encapsulation(to)
    }

    fn send(&mut self, to: NicAddress, packet: &[u8]) -> Result<bool, PacketIoError> {
        self.io.send(to, packet)
    }

    fn flush(&mut self) -> Result<(), PacketIoError> {
        self.io.flush()
    }

    fn receive(&mut self) -> Result<Option<ReceivedPacket<'_>>, PacketIoError> {
        self.receive_calls += 1;
        self.io.receive()
    }

    fn wait(&mut self, limit: Option<Duration>) -> Result<(), PacketIoError> {
        self.io.wait(limit)
    }

    fn rejected(&self) -> u64 {
        self.io.rejected()
    }
}

#[test]
fn an_idle_nic_blocks() {
    for policy in POLICIES {
        let ios = udp().map(|io| CountingIo { io, receive_calls: 0 });
        let mut pair = Pair::new(policy, ios);
        pair.a.live.set_spins(false);
        messages_arrive(&mut pair, 2);
        let mut calls_while_idle = || {
            let before = pair.a.live.io().receive_calls;
            pair.a.serve_for(Duration::from_millis(200));
            pair.a.live.io().receive_calls - before
        };
        // Retransmission timers of the messages may still expire at first.
        assert!((0..20).any(|_| calls_while_idle() <= 4), "{policy:?}: an idle NIC keeps polling");
    }
}
