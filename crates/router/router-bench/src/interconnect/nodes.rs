//! Two nodes, a core each, for as long as a trial lasts.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, OnceLock};
use std::time::Instant;

use router::batch::Parcel;
use router::{AdjacencyId, Hop, NodeId, Pool, PortId};
use router_node::interconnect::{Interconnect, InterconnectSettings, PeerCounters, TransportKind, open};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use sim::{Random, Span, Time};

use super::buffers::KEPT;
use super::samples::Samples;
use super::stalls::{Stall, Stalls, Watch};
use super::{Batching, BenchError, ETHERNET_BYTES};
use crate::statistics::Quantiles;

/// Buffers of a node: what waits for the other one and what is on its way fit.
pub(super) const BUFFERS: u32 = 16_384;
/// A flood keeps so many packets in the making: whatever batch there is finds enough.
const BUFFERS_FLOOD: u32 = 512;
pub(super) const BUFFER_BYTES: u16 = 2048;
pub(super) const HEADROOM_BYTES: u16 = 64;
/// Packets that wait for the other node, at most.
const QUEUE_PACKETS: usize = 8192;
/// As a port's vector.
pub(super) const VECTOR_PACKETS: usize = 256;
/// Packets that come together, on average: ports bring vectors, not single packets.
const BURST_PACKETS_MEAN: f64 = 4.0;
/// After the last packet was sent, how long the receiver waits for what may be lost.
const QUIET_NS_MAX: u64 = 20_000_000;
/// No flood has brought more, in million packets a second.
const FLOOD_MPPS_MAX: f64 = 100.0;
/// How long the sender tries to send what waits.
const PATIENCE_NS: u64 = 1_000_000_000;

/// The cores of the sender and of the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cores {
    /// Of node 0.
    pub sender: usize,
    /// Of node 1.
    pub receiver: usize,
}

impl Cores {
    /// The first two that this process may use.
    ///
    /// # Errors
    /// When there is one only.
    pub fn find() -> Result<Cores, BenchError> {
        let failed = |errno: rustix::io::Errno| BenchError::System { call: "sched_getaffinity", error: errno.into() };
        let allowed = sched_getaffinity(None).map_err(failed)?;
        let mut cores = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
        match (cores.next(), cores.next()) {
            (Some(sender), Some(receiver)) => Ok(Cores { sender, receiver }),
            (first, _) => Err(BenchError::Cores { found: usize::from(first.is_some()) }),
        }
    }
}

/// Keeps the calling thread on one core.
pub(super) fn pin(core: usize) -> Result<(), BenchError> {
    let mut only = CpuSet::new();
    only.set(core);
    let failed = |errno: rustix::io::Errno| BenchError::System { call: "sched_setaffinity", error: errno.into() };
    sched_setaffinity(None, &only).map_err(failed)
}

/// What load there is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Offered {
    /// So many million packets a second, in bursts at random moments.
    Mpps(f64),
    /// As many as the sender can make while the interconnect takes them.
    Flood,
}

/// What is tried.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrialSetup {
    /// Over which interconnect.
    pub kind: TransportKind,
    /// How packets are put together.
    pub batching: Batching,
    /// Bytes of a frame, 64 to 1518.
    pub frame_bytes: usize,
    /// What load.
    pub offered: Offered,
    /// How long.
    pub trial: Span,
    /// What of that is left out at the beginning.
    pub warm_up: Span,
    /// Of the moments at which packets come.
    pub seed: u64,
}

impl TrialSetup {
    /// Packets of the trial, about: of a flood, as many as none has had.
    fn packets_expected(&self) -> u64 {
        let mpps = match self.offered {
            Offered::Mpps(mpps) => mpps,
            Offered::Flood => FLOOD_MPPS_MAX,
        };
        (mpps * self.trial.ns() / 1000.0) as u64
    }
}

/// What came of it. *Measured.*
#[derive(Clone, Debug)]
pub struct Trial {
    /// Million packets a second that arrived.
    pub delivered_mpps: f64,
    /// Packets that were offered, the warm-up included.
    pub offered_packets: u64,
    /// Of those, how many did not arrive.
    pub lost_packets: u64,
    /// Packets a message, on average.
    pub packets_per_message: f64,
    /// From the moment when a packet came to the moment when the other node had it.
    pub latency: Quantiles,
    /// The same of the packets that no stall of the machine had anything to do with.
    pub undisturbed: Quantiles,
}

/// One of two nodes.
pub(super) struct Node {
    pub interconnect: Box<dyn Interconnect>,
    pub pool: Pool,
    pub parcels: Vec<Parcel>,
    pub arrived: Vec<Parcel>,
    peer: NodeId,
    /// There was something to do in this round.
    is_busy: bool,
    /// Packets that found no buffer, and are lost.
    without_buffer: u64,
}

impl Node {
    /// Node 0 or 1.
    pub fn new(own: u8, interconnect: Box<dyn Interconnect>, buffers: u32) -> Node {
        Node {
            interconnect,
            pool: Pool::new(buffers, BUFFER_BYTES, HEADROOM_BYTES),
            parcels: Vec::with_capacity(VECTOR_PACKETS),
            arrived: Vec::with_capacity(2 * VECTOR_PACKETS),
            peer: NodeId(1 - own),
            is_busy: false,
            without_buffer: 0,
        }
    }

    /// A round of the node's loop.
    pub fn begin_round(&mut self, now_ns: u64) {
        self.interconnect.begin_round(time(now_ns), std::mem::take(&mut self.is_busy));
    }

    /// Hands over what was made ready.
    pub fn send(&mut self, now_ns: u64) {
        self.is_busy = true;
        self.interconnect.send(time(now_ns), &mut self.pool, self.peer, &mut self.parcels);
    }

    pub fn turn(&mut self, now_ns: u64) -> bool {
        let is_busy = self.interconnect.poll(time(now_ns), &mut self.pool, &mut self.arrived, VECTOR_PACKETS);
        self.is_busy |= is_busy;
        is_busy
    }

    /// Makes a packet ready that says when it came; false without a buffer.
    pub fn make(&mut self, bytes: usize, came_ns: u64) -> bool {
        let Some(mut packet) = self.pool.alloc() else { return false };
        self.pool.resize(&mut packet, bytes);
        self.pool.bytes_mut(&packet)[..8].copy_from_slice(&came_ns.to_le_bytes());
        self.parcels.push((Hop { node: self.peer, port: PortId(0), adjacency: AdjacencyId(1) }, packet));
        true
    }

    /// What the packets that arrived say, their buffers given back.
    pub fn take(&mut self, mut each: impl FnMut(u64)) {
        for (_, packet) in self.arrived.drain(..) {
            let (stamp, _) = self.pool.bytes(&packet).split_first_chunk().expect("a packet of 46 bytes at least");
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

/// Bytes of the IP packet in a frame.
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

/// Two nodes that are joined.
pub(super) fn pair(kind: TransportKind, batching: Batching, buffers: u32) -> Result<[Node; 2], BenchError> {
    let settings = settings(batching);
    let node = |own: u8| Ok::<_, BenchError>(Node::new(own, open(NodeId(own), kind, &settings)?, buffers));
    let [mut first, mut second] = [node(0)?, node(1)?];
    let offer = first.interconnect.offer(NodeId(1))?;
    let terms = second.interconnect.accept(NodeId(0), offer)?;
    first.interconnect.finish(NodeId(1), &terms)?;
    Ok([first, second])
}

/// When packets come.
pub(super) struct Arrivals {
    random: Random,
    /// Between bursts, on average.
    gap_ns: f64,
    next_ns: f64,
    left_in_burst: u64,
}

impl Arrivals {
    pub fn new(mpps: f64, seed: u64) -> Arrivals {
        let gap_ns = BURST_PACKETS_MEAN * 1000.0 / mpps;
        Arrivals { random: Random::new(seed, "arrivals"), gap_ns, next_ns: 0.0, left_in_burst: 0 }
    }

    /// When the next packet comes.
    pub fn next_ns(&self) -> u64 {
        self.next_ns as u64
    }

    pub fn step(&mut self) {
        if self.left_in_burst > 0 {
            self.left_in_burst -= 1;
            return;
        }
        // Bursts of 1 to 2 x mean - 1 packets, exponential pauses.
        self.left_in_burst = self.random.below(2 * BURST_PACKETS_MEAN as u64 - 1);
        self.next_ns += self.random.exponential(self.gap_ns);
    }
}

struct Shared {
    ready: Barrier,
    began: OnceLock<Instant>,
    /// All that will ever leave has left.
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

    /// Waits until both nodes run: then time begins.
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
/// When the nodes could not be made or pinned.
pub fn run(setup: &TrialSetup, cores: Cores) -> Result<Trial, BenchError> {
    let count = if setup.offered == Offered::Flood { BUFFERS_FLOOD } else { BUFFERS };
    let [mut sender, mut receiver] = pair(setup.kind, setup.batching, count)?;
    sender.pool = KEPT.written(count);
    let shared = Shared::new();
    let (sent, came) = std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            let pinned = pin(cores.sender);
            shared.begin();
            let sent = pinned.map(|()| send(setup, &mut sender, &shared));
            drain(&mut sender, &shared);
            sent
        });
        let receiving = scope.spawn(|| {
            let pinned = pin(cores.receiver);
            let came = Came::none(setup);
            shared.begin();
            let came = pinned.map(|()| receive(setup, &mut receiver, &shared, came));
            shared.has_received.store(true, Ordering::Release);
            came
        });
        (sending.join().expect("the sender"), receiving.join().expect("the receiver"))
    });
    let came = came?;
    let stalls = Stalls::merged(sent?, &came.stalls);
    let (counters, offered_packets) = (sender.counters(), shared.offered.load(Ordering::Acquire));
    // What still waits is given back.
    sender.interconnect.remove_peer(&mut sender.pool, sender.peer);
    KEPT.keep(count, sender.pool);
    let measured_us = (setup.trial.ns() - setup.warm_up.ns()) / 1000.0;
    Ok(Trial {
        delivered_mpps: came.in_time as f64 / measured_us,
        offered_packets,
        lost_packets: offered_packets.saturating_sub(came.all),
        packets_per_message: counters.sent_packets as f64 / counters.sent_messages.max(1) as f64,
        latency: Quantiles::of(&mut came.samples.took_ns(|_| true)),
        undisturbed: Quantiles::of(&mut came.samples.took_ns(|came_ns| !stalls.has_disturbed(came_ns))),
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
    let (mut watch, mut stalls) = (Watch::new(setup.kind, bytes, shared.now_ns()), Vec::new());
    loop {
        let now_ns = shared.now_ns();
        // Late or not: what was to come in the trial comes.
        if now_ns >= until_ns && arrivals.as_ref().map_or(offered > 0, |arrivals| arrivals.next_ns() >= until_ns) {
            break;
        }
        node.begin_round(now_ns);
        let counters = node.counters();
        stalls.extend(watch.look(now_ns, counters.sent_messages, counters.sent_packets));
        for _ in 0..VECTOR_PACKETS {
            // A flood that is late, for the machine did something else, begins all the same.
            let came_ns = arrivals.as_ref().map_or(now_ns.min(until_ns - 1), Arrivals::next_ns);
            if came_ns > now_ns.min(until_ns - 1) || arrivals.is_none() && node.pool.available() == 0 {
                break;
            }
            node.without_buffer += u64::from(!node.make(bytes, came_ns));
            offered += 1;
            arrivals.iter_mut().for_each(Arrivals::step);
        }
        if !node.parcels.is_empty() {
            node.send(now_ns);
        }
        node.turn(now_ns);
        node.arrived.clear();
    }
    shared.offered.store(offered, Ordering::Release);
    stalls
}

/// Sends what waits, and goes on until the receiver has all: that may need answers.
fn drain(node: &mut Node, shared: &Shared) {
    let (offered, until_ns) = (shared.offered.load(Ordering::Acquire), shared.now_ns() + PATIENCE_NS);
    while !shared.has_received.load(Ordering::Acquire) {
        let now_ns = shared.now_ns();
        node.begin_round(now_ns);
        node.turn(now_ns);
        node.arrived.clear();
        let PeerCounters { sent_packets, drop_full, .. } = node.counters();
        let has_sent = sent_packets + drop_full + node.without_buffer >= offered || now_ns > until_ns;
        shared.sent.store(sent_packets, Ordering::Release);
        shared.has_sent.store(has_sent, Ordering::Release);
    }
}

struct Came {
    all: u64,
    /// After the warm-up, and before the end.
    in_time: u64,
    samples: Samples,
    stalls: Vec<Stall>,
}

impl Came {
    fn none(setup: &TrialSetup) -> Came {
        Came { all: 0, in_time: 0, samples: Samples::new(setup.packets_expected()), stalls: Vec::new() }
    }
}

fn receive(setup: &TrialSetup, node: &mut Node, shared: &Shared, mut came: Came) -> Came {
    let (from_ns, until_ns) = (setup.warm_up.ns() as u64, setup.trial.ns() as u64);
    let mut watch = Watch::new(setup.kind, packet_bytes(setup.frame_bytes), shared.now_ns());
    let mut quiet_since_ns = None;
    loop {
        let has_sent = shared.has_sent.load(Ordering::Acquire);
        let began_ns = shared.now_ns();
        node.begin_round(began_ns);
        node.turn(began_ns);
        let now_ns = shared.now_ns();
        let counters = node.counters();
        came.stalls.extend(watch.look(now_ns, counters.received_messages, counters.received_packets));
        if node.arrived.is_empty() {
            let has_all = came.all >= shared.sent.load(Ordering::Acquire);
            let quiet_ns = now_ns - *quiet_since_ns.get_or_insert(now_ns);
            if has_sent && (has_all || quiet_ns > QUIET_NS_MAX) {
                return came;
            }
            continue;
        }
        quiet_since_ns = None;
        came.all += node.arrived.len() as u64;
        if (from_ns..until_ns).contains(&now_ns) {
            came.in_time += node.arrived.len() as u64;
        }
        node.take(|stamp_ns| {
            if (from_ns..until_ns).contains(&stamp_ns) {
                came.samples.note(stamp_ns, now_ns.saturating_sub(stamp_ns));
            }
        });
    }
}
