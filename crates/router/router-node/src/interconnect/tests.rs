//! Tests of all kinds of interconnect, with nodes in one thread and in several.

mod large;

use std::time::{Duration, Instant};

use fabric::timed::LinkTiming;
use packet::{Protocol, ipv4};
use router::batch::{Parcel, Policy};
use router::{AdjacencyId, Hop, Pool, PortId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sim::{Span, Time};

use super::*;

const BUFFERS: u32 = 4096;
const LARGE_BUFFERS: u32 = 64;
/// Iterations after which a test has failed.
const ITERATIONS_MAX: usize = 1_000_000;
const WAKE_UP_TIMEOUT: Duration = Duration::from_secs(60);
const TIMING: LinkTiming =
    LinkTiming { one_way_ns: 500, bytes_per_us: 7_800, header_bytes: 24, payload_bytes_max: 256 };

fn kinds() -> [TransportKind; 4] {
    [
        TransportKind::Lanes,
        TransportKind::Windows(TIMING),
        TransportKind::RnicLanes,
        TransportKind::RnicUdp("127.0.0.1:0".parse().unwrap()),
    ]
}

struct Node {
    interconnect: Box<dyn Interconnect>,
    pool: Pool,
    arrived: Vec<Parcel>,
    began: Instant,
    /// Offset of the node's clock in picoseconds.
    passed_ps: u64,
}

impl Node {
    fn new(number: u8, kind: TransportKind, settings: &InterconnectSettings) -> Node {
        let interconnect = open(NodeId(number), kind, settings).unwrap();
        Node {
            interconnect,
            pool: Pool::with_large(BUFFERS, 2048, 64, LARGE_BUFFERS),
            arrived: Vec::new(),
            began: Instant::now(),
            passed_ps: 0,
        }
    }

    fn now(&self) -> Time {
        Time::from_ps((self.began.elapsed().as_nanos() as u64 * 1000).saturating_add(self.passed_ps))
    }

    fn parcel(&mut self, to: u8, bytes: &[u8]) -> Parcel {
        let mut packet = self.pool.alloc().expect("a buffer");
        self.pool.resize(&mut packet, bytes.len());
        self.pool.bytes_mut(&packet).copy_from_slice(bytes);
        (Hop { node: NodeId(to), port: PortId(3), adjacency: AdjacencyId(0x1234) }, packet)
    }

    fn send(&mut self, to: u8, packets: &[Vec<u8>]) {
        let mut parcels: Vec<Parcel> = packets.iter().map(|bytes| self.parcel(to, bytes)).collect();
        let now = self.now();
        self.interconnect.send(now, &mut self.pool, NodeId(to), &mut parcels);
        assert!(parcels.is_empty(), "all are queued");
    }

    fn poll(&mut self) -> bool {
        let now = self.now();
        self.interconnect.poll(now, &mut self.pool, &mut self.arrived, 256)
    }

    /// Returns the packets that arrived, and frees their buffers.
    fn take_arrived(&mut self) -> Vec<Vec<u8>> {
        let pool = &mut self.pool;
        let take_arrived = |(hop, packet): Parcel| {
            assert_eq!((hop.port, hop.adjacency), (PortId(3), AdjacencyId(0x1234)));
            let bytes = pool.bytes(&packet).to_vec();
            pool.free(packet);
            bytes
        };
        self.arrived.drain(..).map(take_arrived).collect()
    }

    fn remove_peer(&mut self, node: u8) {
        self.interconnect.remove_peer(&mut self.pool, NodeId(node));
    }

    fn counters(&self, node: u8) -> PeerCounters {
        self.interconnect.counters(NodeId(node))
    }

    /// Blocks until there is work.
    fn sleep(&mut self) {
        if self.interconnect.prepare_wait() {
            let wait_fds = self.interconnect.wait_fds();
            let mut polled: Vec<PollFd<'_>> =
                wait_fds.into_iter().map(|wake| PollFd::from_borrowed_fd(wake, PollFlags::IN)).collect();
            let limit = Timespec::try_from(WAKE_UP_TIMEOUT).unwrap();
            assert_ne!(poll(&mut polled, Some(&limit)), Ok(0), "nothing wakes the sleeper");
        }
        self.interconnect.finish_wait();
    }
}

fn join(a: &mut Node, b: &mut Node, numbers: (u8, u8)) {
    let offer = a.interconnect.offer(NodeId(numbers.1)).unwrap();
    assert!(offer.descriptors.len() <= DESCRIPTORS_MAX);
    assert_eq!(a.interconnect.state(NodeId(numbers.1)), PeerState::Offered);
    let params = b.interconnect.accept(NodeId(numbers.0), offer).unwrap();
    a.interconnect.finish(NodeId(numbers.1), &params).unwrap();
    assert_eq!(a.interconnect.state(NodeId(numbers.1)), PeerState::Up);
    assert_eq!(b.interconnect.state(NodeId(numbers.0)), PeerState::Up);
}

fn pair(kind: TransportKind, settings: &InterconnectSettings) -> [Node; 2] {
    let mut nodes = [0, 1].map(|number| Node::new(number, kind, settings));
    let [a, b] = &mut nodes;
    join(a, b, (0, 1));
    nodes
}

fn three(kind: TransportKind, settings: &InterconnectSettings) -> [Node; 3] {
    let mut nodes = [0, 1, 2].map(|number| Node::new(number, kind, settings));
    let [a, b, c] = &mut nodes;
    join(a, b, (0, 1));
    join(a, c, (0, 2));
    join(c, b, (2, 1));
    nodes
}

/// Adds a millisecond to the nodes' clocks, and polls them.
fn pass_ms(nodes: &mut [&mut Node]) {
    for node in nodes {
        node.passed_ps += 1_000_000_000;
        node.poll();
    }
}

#[test]
fn a_peer_that_leaves_messages_unanswered_is_dead_once_this_node_has_waited_long_enough() {
    const WAIT_MS: u64 = 50;
    let unanswered_max = Some(Span::from_ps(WAIT_MS * 1_000_000_000));
    for kind in [TransportKind::RnicLanes, TransportKind::RnicUdp("127.0.0.1:0".parse().unwrap())] {
        let [mut a, mut b] = pair(kind, &InterconnectSettings { unanswered_max, ..fixed(1) });
        a.send(1, &[packet(0)]);
        // A long pause of this node is no silence of the peer.
        a.passed_ps += 10 * WAIT_MS * 1_000_000_000;
        a.poll();
        let polls = (0..10 * WAIT_MS).position(|_| {
            pass_ms(&mut [&mut a]);
            a.interconnect.state(NodeId(1)) == PeerState::Unanswered
        });
        assert!(polls.is_some_and(|polls| polls as u64 + 2 >= WAIT_MS), "{kind:?}: {polls:?}");
        a.send(1, &[packet(1)]);
        assert_eq!(a.counters(1).drop_absent, 1);
        // It can be connected again, and answers.
        a.remove_peer(1);
        b.remove_peer(0);
        join(&mut a, &mut b, (0, 1));
        a.send(1, &[packet(2)]);
        (0..5 * WAIT_MS).for_each(|_| pass_ms(&mut [&mut a, &mut b]));
        assert!(a.interconnect.state(NodeId(1)) == PeerState::Up && !b.take_arrived().is_empty(), "{kind:?}");
    }
}

#[test]
fn a_path_counts_as_working_once_the_peer_has_answered_over_it() {
    for kind in kinds() {
        let in_memory = matches!(kind, TransportKind::Lanes | TransportKind::Windows(_));
        let [mut a, mut b] = pair(kind, &fixed(1));
        (0..100).for_each(|_| pass_ms(&mut [&mut a]));
        assert_eq!(a.interconnect.has_answered(NodeId(1)), in_memory, "{kind:?}");
        let answers = (0..ITERATIONS_MAX).any(|_| {
            pass_ms(&mut [&mut a, &mut b]);
            a.interconnect.has_answered(NodeId(1)) && b.interconnect.has_answered(NodeId(0))
        });
        assert!(answers, "{kind:?}");
        a.remove_peer(1);
        assert!(!a.interconnect.has_answered(NodeId(1)));
        b.take_arrived();
    }
}

/// Polls all nodes until the receiver has this many packets.
fn collect(nodes: &mut [Node], receiver: usize, wanted: usize) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    for _ in 0..ITERATIONS_MAX {
        for node in nodes.iter_mut() {
            node.poll();
        }
        found.extend(nodes[receiver].take_arrived());
        if found.len() >= wanted {
            return found;
        }
    }
    panic!("{} of {wanted} packets arrived", found.len());
}

fn packet(number: usize) -> Vec<u8> {
    let length = 20 + number * 97 % 1480;
    (0..length).map(|at| (at ^ number) as u8).collect()
}

fn fixed(packets: u8) -> InterconnectSettings {
    InterconnectSettings { policy: Policy::fixed(packets), ..InterconnectSettings::default() }
}

/// Three packets of a batch of 32 are sent after a timeout, which never expires at the end of time.
#[test]
fn the_clock_stops_at_its_end_and_restarts() {
    for kind in kinds() {
        let mut nodes = pair(kind, &fixed(32));
        let sent: Vec<Vec<u8>> = (0..3).map(packet).collect();
        nodes.iter_mut().for_each(|node| node.passed_ps = u64::MAX - 60_000_000_000_000);
        nodes[0].send(1, &sent);
        assert_eq!(collect(&mut nodes, 1, 3), sent, "{kind:?}: a minute before the end of the clock");
        nodes.iter_mut().for_each(|node| node.passed_ps = u64::MAX - 20_000_000);
        std::thread::sleep(Duration::from_millis(1));
        nodes[0].send(1, &sent);
        (0..1000).for_each(|_| nodes.iter_mut().for_each(|node| _ = node.poll()));
        assert!(nodes[1].take_arrived().is_empty(), "{kind:?}: the clock has stopped");
        for node in &mut nodes {
            node.interconnect.restart(&mut node.pool).unwrap();
            (node.began, node.passed_ps) = (Instant::now(), 0);
            assert_eq!(node.pool.available(), BUFFERS as usize, "queued packets are dropped");
        }
        let [a, b] = &mut nodes;
        join(a, b, (0, 1));
        nodes[0].send(1, &sent);
        assert_eq!(collect(&mut nodes, 1, 3), sent, "{kind:?}: after a restart");
        nodes[1].send(0, &sent);
        assert_eq!(collect(&mut nodes, 0, 3), sent, "{kind:?}: after a restart, in the other direction");
    }
}

#[test]
fn packets_arrive_complete_and_in_order_for_every_kind_and_policy() {
    for kind in kinds() {
        for settings in [InterconnectSettings::default(), fixed(1), fixed(7), fixed(32)] {
            let mut nodes = pair(kind, &settings);
            for round in 0..40 {
                let packets: Vec<Vec<u8>> = (round * 50..round * 50 + 50).map(packet).collect();
                nodes[0].send(1, &packets);
                assert_eq!(collect(&mut nodes, 1, 50), packets, "{kind:?} {settings:?}");
            }
            let (sent, received) = (nodes[0].counters(1), nodes[1].counters(0));
            assert_eq!((sent.sent_packets, received.received_packets, received.lost_packets), (2000, 2000, 0));
            assert_eq!(sent.sent_messages, received.received_messages);
            let per_message = sent.sent_packets as f64 / sent.sent_messages as f64;
            match settings.policy {
                Policy::Fixed { packets: 1, .. } => assert_eq!(sent.sent_messages, 2000),
                _ => assert!(per_message > 3.0, "{kind:?} {settings:?}: {per_message} packets a message"),
            }
            assert_eq!(nodes[0].pool.available(), BUFFERS as usize, "a buffer leaked");
        }
    }
}

#[test]
fn both_directions_work_at_once_without_buffer_leaks() {
    for kind in kinds() {
        let mut nodes = pair(kind, &InterconnectSettings::default());
        let mut received = [0, 0];
        for round in 0..200 {
            let packets: Vec<Vec<u8>> = (0..round % 40).map(|number| packet(number + round)).collect();
            nodes[0].send(1, &packets);
            nodes[1].send(0, &packets);
            for at in [0, 1] {
                nodes[at].poll();
                received[at] += nodes[at].take_arrived().len();
            }
        }
        let all = (0..200).map(|round| round % 40).sum::<usize>();
        for at in [0, 1] {
            received[at] += collect(&mut nodes, at, all - received[at]).len();
        }
        assert_eq!(received, [all; 2], "{kind:?}");
        assert!(nodes.iter().all(|node| node.pool.available() == BUFFERS as usize));
    }
}

#[test]
fn a_packet_for_another_node_is_relayed() {
    for kind in kinds() {
        let mut nodes = three(kind, &fixed(1));
        let mut parcels: Vec<Parcel> = (0..10).map(|number| nodes[0].parcel(1, &packet(number))).collect();
        let (now, sender) = (nodes[0].now(), &mut nodes[0]);
        // To node 2 with hops of node 1, as on a detour.
        sender.interconnect.send(now, &mut sender.pool, NodeId(2), &mut parcels);
        let found = collect(&mut nodes, 1, 10);
        assert_eq!(found, (0..10).map(packet).collect::<Vec<_>>());
        assert_eq!((nodes[2].counters(0).relayed_packets, nodes[2].counters(1).sent_packets), (10, 10));
        assert!(nodes[2].arrived.is_empty());
    }
}

/// Returns a datagram of a flow, so long that a few fill a link. Its number follows the header.
fn datagram(flow: u16, number: u32) -> Vec<u8> {
    let ports = [flow.to_be_bytes(), 9_u16.to_be_bytes()].concat();
    let payload = [&ports[..], &[0; 4], &number.to_be_bytes(), &[0; 1380]].concat();
    let mut header = vec![0; ipv4::HEADER_BYTES];
    ipv4::Repr {
        source: [10, 0, 0, 1].into(),
        destination: [10, 0, 1, 1].into(),
        protocol: Protocol::UDP,
        ttl: 9,
        traffic_class: 0,
        identification: 0,
        do_not_fragment: true,
        payload_bytes: payload.len(),
    }
    .emit(&mut header);
    [header, payload].concat()
}

/// Returns the flow and the number of a [`datagram`].
fn of_datagram(bytes: &[u8]) -> (usize, u32) {
    let payload = &bytes[ipv4::HEADER_BYTES..];
    (usize::from(payload[0]) << 8 | usize::from(payload[1]), u32::from_be_bytes(payload[8..12].try_into().unwrap()))
}

/// Node 0 sends flows to node 1; node 2 is available for detours. Flow 0 keeps the direct link congested. The other
/// flows are idle for longer than the queue of that link takes, so that they may change their path.
struct HotLink {
    nodes: [Node; 3],
    /// By flow: datagrams sent by node 0, and received by node 1.
    sent: [u32; 1 + HotLink::QUIET],
    received: [u32; 1 + HotLink::QUIET],
}

impl HotLink {
    const QUIET: usize = 64;
    /// One of this many datagrams belongs to a quiet flow.
    const QUIET_EVERY: usize = 8;
    const QUEUE_PACKETS: usize = 256;
    /// More than the congestion threshold, and few enough that none is dropped.
    const WAITING: u64 = 128;
    /// Longer than the test takes on any machine: only explicit changes of the clock let it pass.
    const GAP: Span = Span::from_ps(600_000_000_000_000);

    fn new(kind: TransportKind) -> HotLink {
        let settings = InterconnectSettings {
            queue_packets: Self::QUEUE_PACKETS,
            flowlet_gap: Self::GAP,
            ..InterconnectSettings::default()
        };
        HotLink { nodes: three(kind, &settings), sent: [0; _], received: [0; _] }
    }

    fn total(&self) -> u64 {
        self.sent.iter().map(|sent| u64::from(*sent)).sum()
    }

    fn send(&mut self, flow: usize) {
        self.nodes[0].send(1, &[datagram(flow as u16, self.sent[flow])]);
        self.sent[flow] += 1;
    }

    /// Sends until the direct link is congested.
    fn fill(&mut self) {
        for _ in 0..Self::QUEUE_PACKETS {
            if self.waiting() >= Self::WAITING {
                return;
            }
            let number = self.total() as usize;
            let is_quiet = number.is_multiple_of(Self::QUIET_EVERY);
            self.send(if is_quiet { 1 + number / Self::QUIET_EVERY % Self::QUIET } else { 0 });
        }
    }

    fn send_of_each_quiet_flow(&mut self) {
        (1..=Self::QUIET).for_each(|flow| self.send(flow));
    }

    /// Returns the number of packets at node 0 that wait for the direct link.
    fn waiting(&self) -> u64 {
        let counters = self.nodes[0].counters(1);
        self.total() - counters.detoured_packets - counters.sent_packets
    }

    /// Polls nodes 0 and 1; node 1, the slow one, receives one message.
    fn poll_two(&mut self) {
        self.nodes[0].poll();
        let slow = &mut self.nodes[1];
        let now = slow.now();
        slow.interconnect.poll(now, &mut slow.pool, &mut slow.arrived, 1);
        for bytes in slow.take_arrived() {
            let (flow, number) = of_datagram(&bytes);
            assert_eq!(number, self.received[flow], "flow {flow} is out of order");
            self.received[flow] += 1;
        }
    }

    fn poll(&mut self) {
        self.nodes[2].poll();
        self.poll_two();
    }

    #[track_caller]
    fn poll_until(&mut self, poll: fn(&mut Self), is_reached: fn(&Self) -> bool) {
        let received = (0..ITERATIONS_MAX).any(|_| {
            poll(self);
            is_reached(self)
        });
        assert!(received, "{:?} arrived of {:?}", self.received, self.sent);
    }

    fn wait_for_all(&mut self) {
        self.poll_until(Self::poll, |link| link.received == link.sent);
    }

    fn detours(&self) -> u64 {
        self.nodes[0].counters(1).detoured_packets
    }
}

#[test]
fn flows_take_detours_around_a_congested_link_in_order_and_return() {
    const DETOURS: u64 = 200;
    for kind in kinds() {
        let mut link = HotLink::new(kind);
        for _ in 0..ITERATIONS_MAX {
            if link.detours() >= DETOURS {
                break;
            }
            link.fill();
            link.poll();
        }
        // Now node 2 does nothing: the packets that wait there are not overtaken although the direct link is free.
        link.fill();
        link.send_of_each_quiet_flow();
        link.poll_until(HotLink::poll_two, |link| link.waiting() == 0);
        let before = link.detours();
        link.send_of_each_quiet_flow();
        link.wait_for_all();
        let round = link.detours();
        assert!(round > before, "{kind:?}: no flow takes a detour");
        assert!((DETOURS..link.total()).contains(&round), "{kind:?}: {round} of {} took a detour", link.total());
        let third = &link.nodes[2];
        assert_eq!((third.counters(0).relayed_packets, third.counters(1).sent_packets), (round, round), "{kind:?}");
        assert_eq!(
            link.nodes[0].counters(1).sent_packets,
            link.total() - round,
            "{kind:?}: the others took the direct link"
        );

        link.nodes.iter_mut().for_each(|node| node.passed_ps += HotLink::GAP.ps());
        link.send_of_each_quiet_flow();
        link.wait_for_all();
        assert_eq!(link.detours(), round, "{kind:?}: the link is not congested any more");
    }
}

#[test]
fn a_sleeper_is_woken_by_a_packet_and_by_nothing_else() {
    for kind in kinds() {
        let [mut a, mut b] = pair(kind, &InterconnectSettings::default());
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(move || {
                let mut found = Vec::new();
                for _ in 0..ITERATIONS_MAX {
                    while b.poll() {}
                    found.extend(b.take_arrived());
                    if found.len() == 20 {
                        break;
                    }
                    b.sleep();
                }
                found
            });
            for number in 0..20 {
                // The sleeper may be asleep or about to sleep; it must wake up in both cases.
                std::thread::sleep(Duration::from_micros(number as u64 * 37 % 400));
                a.send(1, &[packet(number)]);
                a.poll();
            }
            while !sleeper.is_finished() {
                a.poll();
                std::thread::yield_now();
            }
            assert_eq!(sleeper.join().unwrap(), (0..20).map(packet).collect::<Vec<_>>(), "{kind:?}");
        });
    }
}

#[test]
fn a_dead_node_blocks_no_other_and_its_packets_are_counted() {
    for kind in kinds() {
        let settings = InterconnectSettings { queue_packets: 200, balances: false, ..InterconnectSettings::default() };
        let [a, b, c] = three(kind, &settings);
        drop(b);
        let mut nodes = [a, c];
        let packets: Vec<Vec<u8>> = (0..100).map(packet).collect();
        for _ in 0..30 {
            nodes[0].send(1, &packets);
            nodes[0].send(2, &packets);
            assert_eq!(collect(&mut nodes, 1, 100), packets, "{kind:?}");
        }
        let dead = nodes[0].counters(1);
        assert!(dead.drop_full > 0 && dead.drop_full + dead.sent_packets <= 3000, "{kind:?}: {dead:?}");
        let [a, _] = &mut nodes;
        a.remove_peer(1);
        let dead = a.counters(1);
        assert_eq!(dead.sent_packets + dead.drop_full + dead.drop_absent, 3000, "every packet is counted");
        assert_eq!(a.pool.available(), BUFFERS as usize, "{kind:?}: a buffer leaked");
    }
}

#[test]
fn a_restarted_node_is_connected_again() {
    for kind in kinds() {
        let mut nodes = pair(kind, &InterconnectSettings::default());
        for round in 0..5 {
            nodes[0].send(1, &[packet(round)]);
            assert_eq!(collect(&mut nodes, 1, 1), [packet(round)]);
            nodes[0].send(1, &[packet(99)]);
            nodes[0].remove_peer(1);
            nodes[1] = Node::new(1, kind, &InterconnectSettings::default());
            let [a, b] = &mut nodes;
            assert_eq!(a.interconnect.state(NodeId(1)), PeerState::Absent);
            join(b, a, (1, 0));
        }
        nodes[0].send(1, &[packet(7)]);
        assert_eq!(collect(&mut nodes, 1, 1), [packet(7)], "{kind:?}");
    }
}

#[test]
fn a_full_queue_drops_packets_and_counts_them() {
    for kind in kinds() {
        let settings = InterconnectSettings { queue_packets: 64, ..InterconnectSettings::default() };
        let mut nodes = pair(kind, &settings);
        let packets: Vec<Vec<u8>> = (0..3000).map(|_| vec![5; 1400]).collect();
        nodes[0].send(1, &packets);
        let sent = nodes[0].counters(1);
        assert!(sent.drop_full > 0, "{kind:?}: {sent:?}");
        let wanted = 3000 - sent.drop_full as usize;
        assert_eq!(collect(&mut nodes, 1, wanted).len(), wanted);
        nodes[0].send(1, &[packet(1)]);
        assert_eq!(collect(&mut nodes, 1, 1), [packet(1)], "{kind:?}: the queue accepts packets again");
    }
}

#[test]
fn a_node_is_connected_once_and_not_to_itself() {
    let mut nodes = pair(TransportKind::Lanes, &InterconnectSettings::default());
    let text = |result: Result<Offer, InterconnectError>| result.unwrap_err().to_string();
    assert_eq!(text(nodes[0].interconnect.offer(NodeId(1))), "node 1 is connected already; remove it first");
    assert_eq!(text(nodes[0].interconnect.offer(NodeId(0))), "node 0 is this node itself; connect to other nodes");
    assert_eq!(text(nodes[0].interconnect.offer(NodeId(8))), "node 8 exceeds the maximum number of nodes; use 0 to 7");
    let params = ConnectionParams { secret: 1, queue_pair: 0, packet_sequence: 0, address: None };
    let error = nodes[0].interconnect.finish(NodeId(2), &params).unwrap_err().to_string();
    assert_eq!(error, "node 2 accepts an offer that was not made; make an offer first");
    let mut unconnected = vec![nodes[0].parcel(5, &[1; 50]), nodes[0].parcel(200, &[1; 50])];
    let node = &mut nodes[0];
    node.interconnect.send(Time::ZERO, &mut node.pool, NodeId(5), &mut unconnected);
    assert_eq!((node.counters(5).drop_absent, node.pool.available()), (2, BUFFERS as usize));
}

#[test]
fn invalid_offers_are_refused() {
    for kind in kinds() {
        let mut nodes = pair(kind, &InterconnectSettings::default());
        let good = |node: &mut Node| {
            node.remove_peer(3);
            node.interconnect.offer(NodeId(3)).unwrap()
        };
        let mut offer = good(&mut nodes[0]);
        offer.params.queue_pair = 1 << 24;
        let is_rnic = matches!(kind, TransportKind::RnicLanes | TransportKind::RnicUdp(_));
        assert_eq!(nodes[1].interconnect.accept(NodeId(4), offer).is_err(), is_rnic);
        nodes[1].remove_peer(4);
        let mut offer = good(&mut nodes[0]);
        if offer.descriptors.is_empty() {
            offer.params.address = None;
        } else {
            offer.descriptors.pop();
        }
        assert!(nodes[1].interconnect.accept(NodeId(4), offer).is_err(), "{kind:?}");
        assert_eq!(nodes[1].interconnect.state(NodeId(4)), PeerState::Absent);
        let offer = good(&mut nodes[0]);
        nodes[1].interconnect.accept(NodeId(4), offer).unwrap();
    }
}
