//! Two nodes on separate cores, and the trials between them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, OnceLock};
use std::time::Instant;

use router::batch::Parcel;
use router::{AdjacencyId, Hop, NodeId, Pool, PortId};
use router_node::interconnect::{Interconnect, InterconnectSettings, PeerCounters, TransportKind, open};
use sim::{Random, Span, Time};

use super::buffers::{BUFFER_BYTES, HEADROOM_BYTES, RETAINED};
use super::samples::Samples;
use super::stalls::{Stall, StallDetector, Stalls};
use super::{Batching, BenchError, ETHERNET_BYTES};
use crate::processor;
use crate::statistics::Quantiles;

/// The buffers of a node: enough for the packets that are queued and in flight.
pub(super) const BUFFERS: u32 = 16_384;
/// The buffers of a flood: every batch finds enough packets.
const BUFFERS_FLOOD: u32 = 512;
/// The largest number of packets queued for the other node.
const QUEUE_PACKETS: usize = 8192;
/// The size of a port's vector.
pub(super) const VECTOR_PACKETS: usize = 256;
/// The mean number of packets in a burst: ports receive vectors, not single packets.
const BURST_PACKETS_MEAN: f64 = 4.0;
/// The time for which the receiver waits for missing packets after the last one was sent.
const QUIET_NS_MAX: u64 = 20_000_000;
/// An upper bound of the rate of a flood, in million packets a second.
const FLOOD_MPPS_MAX: f64 = 100.0;
/// The time for which the sender tries to send queued packets.
const DRAIN_NS_MAX: u64 = 1_000_000_000;

/// The cores of the sender and of the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cores {
    /// The core of node 0, the sender.
    pub sender: usize,
    /// The core of node 1, the receiver.
    pub receiver: usize,
}

impl Cores {
    /// Returns the first two cores that this process may use.
    ///
    /// # Errors
    /// Fails if there is only one.
    pub fn find() -> Result<Cores, BenchError> {
        let failed = |error| BenchError::System { call: "sched_getaffinity", error };
        match processor::usable().map_err(failed)?[..] {
            [sender, receiver, ..] => Ok(Cores { sender, receiver }),
            ref fewer => Err(BenchError::Cores { found: fewer.len() }),
        }
    }
}

/// Pins the calling thread to one core.
pub(super) fn pin(core: usize) -> Result<(), BenchError> {
    processor::pin(core).map_err(|error| BenchError::System { call: "sched_setaffinity", error })
}

/// The offered load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Offered {
    /// A rate in million packets a second, in bursts at random times.
    Mpps(f64),
    /// As many packets as the sender can make while the interconnect accepts them.
    Flood,
}

/// The parameters of a trial.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrialSetup {
    /// The interconnect.
    pub kind: TransportKind,
    /// The batching policy.
    pub batching: Batching,
    /// The frame size in bytes, 64 to 1518.
    pub frame_bytes: usize,
    /// The offered load.
    pub offered: Offered,
    /// The length of the trial.
    pub trial: Span,
    /// The time at the beginning that is not measured.
    pub warm_up: Span,
    /// The seed of the arrival times of packets.
    pub seed: u64,
}

impl TrialSetup {
    /// Returns an estimate of the packets of the trial; for a flood, an upper bound.
    fn packets_expected(&self) -> u64 {
        let mpps = match self.offered {
            Offered::Mpps(mpps) => mpps,
            Offered::Flood => FLOOD_MPPS_MAX,
        };
        (mpps * self.trial.ns() / 1000.0) as u64
    }
}

/// The result of a trial. *Measured.*
#[derive(Clone, Debug)]
pub struct Trial {
    /// Million packets a second that arrived.
    pub delivered_mpps: f64,
    /// The number of offered packets, the warm-up included.
    pub offered_packets: u64,
    /// The number of those that did not arrive.
    pub lost_packets: u64,
    /// The mean number of packets in a message.
    pub packets_per_message: f64,
    /// The latency from the arrival of a packet at the sender to its arrival at the other node.
    pub latency: Quantiles,
    /// The latency of undisturbed packets, those that no stall of the machine affected.
    pub undisturbed: Quantiles,
}

/// One of two nodes.
pub(super) struct Node {
    pub interconnect: Box<dyn Interconnect>,
    pub pool: Pool,
    pub parcels: Vec<Parcel>,
    pub arrived: Vec<Parcel>,
    peer: NodeId,
    /// Whether there was work in this iteration.
    is_busy: bool,
    /// Packets that were lost for lack of a buffer.
    without_buffer: u64,
}

impl Node {
    /// Creates node 0 or 1.
    pub fn new(index: u8, interconnect: Box<dyn Interconnect>, buffers: u32) -> Node {
        Node {
            interconnect,
            pool: Pool::new(buffers, BUFFER_BYTES, HEADROOM_BYTES),
            parcels: Vec::with_capacity(VECTOR_PACKETS),
            arrived: Vec::with_capacity(2 * VECTOR_PACKETS),
            peer: NodeId(1 - index),
            is_busy: false,
            without_buffer: 0,
        }
    }

    /// Begins an iteration of the node's loop.
    pub fn begin_iteration(&mut self, now_ns: u64) {
        self.interconnect.begin_iteration(time(now_ns), std::mem::take(&mut self.is_busy));
    }

    /// Passes the prepared packets to the interconnect.
    pub fn send(&mut self, now_ns: u64) {
        self.is_busy = true;
        self.interconnect.send(time(now_ns), &mut self.pool, self.peer, &mut self.parcels);
    }

    pub fn poll(&mut self, now_ns: u64) -> bool {
        let is_busy = self.interconnect.poll(time(now_ns), &mut self.pool, &mut self.arrived, VECTOR_PACKETS);
        self.is_busy |= is_busy;
        is_busy
    }

    /// Prepares a packet that carries its arrival time; returns false if there is no buffer.
    pub fn make_packet(&mut self, bytes: usize, arrival_ns: u64) -> bool {
        let Some(mut packet) = self.pool.alloc() else { return false };
        self.pool.resize(&mut packet, bytes);
        self.pool.bytes_mut(&packet)[..8].copy_from_slice(&arrival_ns.to_le_bytes());
        self.parcels.push((Hop { node: self.peer, port: PortId(0), adjacency: AdjacencyId(1) }, packet));
        true
    }

    /// Calls `each` with the arrival time in each received packet, and frees the packets.
    pub fn take_arrived(&mut self, mut each: impl FnMut(u64)) {
        for (_, packet) in self.arrived.drain(..) {
            let (stamp, _) = self.pool.bytes(&packet).split_first_chunk().expect("a packet of at least 46 bytes");
            each(u64::from_le_bytes(*stamp));
            self.pool.free(packet);
        }
    }

    pub fn counters(&self) -> PeerCounters {
        self.interconnect.counters(self.peer)
    }
}

fn time(ns: u64) -> Time {
    Time::from_ps(ns * 1000)
}

/// Returns the size of the IP packet in a frame.
pub(super) fn packet_bytes(frame_bytes: usize) -> usize {
    frame_bytes - ETHERNET_BYTES
}

pub(super) fn settings(batching: Batching) -> InterconnectSettings {
    InterconnectSettings {
        policy: batching.policy(),
        queue_packets: QUEUE_PACKETS,
        balances: false,
        ..InterconnectSettings::default()
    }
}

/// Returns two connected nodes.
pub(super) fn pair(kind: TransportKind, batching: Batching, buffers: u32) -> Result<[Node; 2], BenchError> {
    let settings = settings(batching);
    let node = |index: u8| Ok::<_, BenchError>(Node::new(index, open(NodeId(index), kind, &settings)?, buffers));
    let [mut first, mut second] = [node(0)?, node(1)?];
    let offer = first.interconnect.offer(NodeId(1))?;
    let terms = second.interconnect.accept(NodeId(0), offer)?;
    first.interconnect.finish(NodeId(1), &terms)?;
    Ok([first, second])
}

/// The arrival times of packets.
pub(super) struct Arrivals {
    random: Random,
    /// The mean gap between bursts.
    gap_ns: f64,
    next_ns: f64,
    left_in_burst: u64,
}

impl Arrivals {
    pub fn new(mpps: f64, seed: u64) -> Arrivals {
        let gap_ns = BURST_PACKETS_MEAN * 1000.0 / mpps;
        Arrivals { random: Random::new(seed, "arrivals"), gap_ns, next_ns: 0.0, left_in_burst: 0 }
    }

    /// Returns the arrival time of the next packet.
    pub fn next_ns(&self) -> u64 {
        self.next_ns as u64
    }

    pub fn step(&mut self) {
        if self.left_in_burst > 0 {
            self.left_in_burst -= 1;
            return;
        }
        // Bursts of 1 to 2 x mean - 1 packets, with exponentially distributed gaps.
        self.left_in_burst = self.random.below(2 * BURST_PACKETS_MEAN as u64 - 1);
        self.next_ns += self.random.exponential(self.gap_ns);
    }
}

struct Shared {
    ready: Barrier,
    began: OnceLock<Instant>,
    /// Whether the sender has sent everything that it will send.
    has_sent: AtomicBool,
    has_received: AtomicBool,
    offered: AtomicU64,
    sent: AtomicU64,
}

impl Shared {
    fn new() -> Shared {
        Shared {
            ready: Barrier::new(2),
            began: OnceLock::new(),
            has_sent: AtomicBool::new(false),
            has_received: AtomicBool::new(false),
            offered: AtomicU64::new(0),
            sent: AtomicU64::new(0),
        }
    }

    /// Waits until both nodes run, and then starts the clock.
    fn begin(&self) {
        self.ready.wait();
        self.began.get_or_init(Instant::now);
    }

    fn now_ns(&self) -> u64 {
        self.began.get().map_or(0, |began| began.elapsed().as_nanos() as u64)
    }
}

/// Runs one trial.
///
/// # Errors
/// Fails if the nodes could not be created or pinned.
pub fn run(setup: &TrialSetup, cores: Cores) -> Result<Trial, BenchError> {
    let count = if setup.offered == Offered::Flood { BUFFERS_FLOOD } else { BUFFERS };
    let [mut sender, mut receiver] = pair(setup.kind, setup.batching, count)?;
    sender.pool = RETAINED.written(count);
    let shared = Shared::new();
    let (sent, received) = std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            let pinned = pin(cores.sender);
            shared.begin();
            let sent = pinned.map(|()| send(setup, &mut sender, &shared));
            drain(&mut sender, &shared);
            sent
        });
        let receiving = scope.spawn(|| {
            let pinned = pin(cores.receiver);
            let received = Received::none(setup);
            shared.begin();
            let received = pinned.map(|()| receive(setup, &mut receiver, &shared, received));
            shared.has_received.store(true, Ordering::Release);
            received
        });
        (sending.join().expect("the sender"), receiving.join().expect("the receiver"))
    });
    let received = received?;
    let stalls = Stalls::merged(sent?, &received.stalls);
    let (counters, offered_packets) = (sender.counters(), shared.offered.load(Ordering::Acquire));
    // Packets that are still queued are freed.
    sender.interconnect.remove_peer(&mut sender.pool, sender.peer);
    RETAINED.retain(count, sender.pool);
    let measured_us = (setup.trial.ns() - setup.warm_up.ns()) / 1000.0;
    Ok(Trial {
        delivered_mpps: received.in_time as f64 / measured_us,
        offered_packets,
        lost_packets: offered_packets.saturating_sub(received.all),
        packets_per_message: counters.sent_packets as f64 / counters.sent_messages.max(1) as f64,
        latency: Quantiles::of(&mut received.samples.latencies_ns(|_| true)),
        undisturbed: Quantiles::of(&mut received.samples.latencies_ns(|arrival_ns| !stalls.has_disturbed(arrival_ns))),
    })
}

/// Offers load until the trial is over.
fn send(setup: &TrialSetup, node: &mut Node, shared: &Shared) -> Vec<Stall> {
    let bytes = packet_bytes(setup.frame_bytes);
    let until_ns = setup.trial.ns() as u64;
    let mut arrivals = match setup.offered {
        Offered::Mpps(mpps) => Some(Arrivals::new(mpps, setup.seed)),
        Offered::Flood => None,
    };
    let mut offered = 0;
    let (mut detector, mut stalls) = (StallDetector::new(setup.kind, bytes, shared.now_ns()), Vec::new());
    loop {
        let now_ns = shared.now_ns();
        // All packets with an arrival time within the trial are offered, even if late.
        if now_ns >= until_ns && arrivals.as_ref().map_or(offered > 0, |arrivals| arrivals.next_ns() >= until_ns) {
            break;
        }
        node.begin_iteration(now_ns);
        let counters = node.counters();
        stalls.extend(detector.check(now_ns, counters.sent_messages, counters.sent_packets));
        for _ in 0..VECTOR_PACKETS {
            // A flood that starts late, because the machine ran something else, starts nevertheless.
            let arrival_ns = arrivals.as_ref().map_or(now_ns.min(until_ns - 1), Arrivals::next_ns);
            if arrival_ns > now_ns.min(until_ns - 1) || arrivals.is_none() && node.pool.available() == 0 {
                break;
            }
            node.without_buffer += u64::from(!node.make_packet(bytes, arrival_ns));
            offered += 1;
            arrivals.iter_mut().for_each(Arrivals::step);
        }
        if !node.parcels.is_empty() {
            node.send(now_ns);
        }
        node.poll(now_ns);
        node.arrived.clear();
    }
    shared.offered.store(offered, Ordering::Release);
    stalls
}

/// Sends queued packets, and polls until the receiver has all, because the protocol may need replies.
fn drain(node: &mut Node, shared: &Shared) {
    let (offered, until_ns) = (shared.offered.load(Ordering::Acquire), shared.now_ns() + DRAIN_NS_MAX);
    while !shared.has_received.load(Ordering::Acquire) {
        let now_ns = shared.now_ns();
        node.begin_iteration(now_ns);
        node.poll(now_ns);
        node.arrived.clear();
        let PeerCounters { sent_packets, drop_full, .. } = node.counters();
        let has_sent = sent_packets + drop_full + node.without_buffer >= offered || now_ns > until_ns;
        shared.sent.store(sent_packets, Ordering::Release);
        shared.has_sent.store(has_sent, Ordering::Release);
    }
}

struct Received {
    all: u64,
    /// Packets that arrived after the warm-up and before the end.
    in_time: u64,
    samples: Samples,
    stalls: Vec<Stall>,
}

impl Received {
    fn none(setup: &TrialSetup) -> Received {
        Received { all: 0, in_time: 0, samples: Samples::new(setup.packets_expected()), stalls: Vec::new() }
    }
}

fn receive(setup: &TrialSetup, node: &mut Node, shared: &Shared, mut received: Received) -> Received {
    let (from_ns, until_ns) = (setup.warm_up.ns() as u64, setup.trial.ns() as u64);
    let mut detector = StallDetector::new(setup.kind, packet_bytes(setup.frame_bytes), shared.now_ns());
    let mut quiet_since_ns = None;
    loop {
        let has_sent = shared.has_sent.load(Ordering::Acquire);
        let began_ns = shared.now_ns();
        node.begin_iteration(began_ns);
        node.poll(began_ns);
        let now_ns = shared.now_ns();
        let counters = node.counters();
        received.stalls.extend(detector.check(now_ns, counters.received_messages, counters.received_packets));
        if node.arrived.is_empty() {
            let has_all = received.all >= shared.sent.load(Ordering::Acquire);
            let quiet_ns = now_ns - *quiet_since_ns.get_or_insert(now_ns);
            if has_sent && (has_all || quiet_ns > QUIET_NS_MAX) {
                return received;
            }
            continue;
        }
        quiet_since_ns = None;
        received.all += node.arrived.len() as u64;
        if (from_ns..until_ns).contains(&now_ns) {
            received.in_time += node.arrived.len() as u64;
        }
        node.take_arrived(|stamp_ns| {
            if (from_ns..until_ns).contains(&stamp_ns) {
                received.samples.add(stamp_ns, now_ns.saturating_sub(stamp_ns));
            }
        });
    }
}
