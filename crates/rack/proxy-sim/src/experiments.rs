//! The experiments: scaling of the message rate, and isolation of a ping-pong from streams.

use crate::program::{Program, Role};
use crate::{Costs, LINK, Plan, World};
use proxy::frame::INLINE_BYTES;
use serde::Serialize;
use sim::{Random, Span, Time};

/// Connections of each core in the scaling experiment.
const STREAMS: usize = 4;
/// With fewer cores, one span of time has too few messages to measure the rate.
const CORES_OF_A_SPAN: usize = 8;
/// Slots of a ring when the number of partitions is varied.
const SCALING_SLOTS: u64 = 512;
/// Slots of a ring when one partition is examined.
const ISOLATION_SLOTS: u64 = 512;

/// The message rate with a number of nodes and cores.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Scaling {
    /// Nodes, each linked with every other one.
    pub nodes: usize,
    /// Cores of a node, each with one partition of every link.
    pub cores: usize,
    /// Bytes of a message.
    pub message_bytes: usize,
    /// Messages that arrive at a node per microsecond.
    pub messages_per_us: f64,
    /// The same for each core.
    pub messages_per_us_core: f64,
    /// Ratio to the rate of one core times the number of cores.
    pub of_linear: f64,
    /// Fraction of the node's link rate that the packets of the messages take.
    pub link_load: f64,
}

/// The latency of a ping-pong alongside others in its partition.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Isolation {
    /// The load alongside it, and the proxy's settings.
    pub case: &'static str,
    /// Number of round trips.
    pub round_trips: usize,
    /// Median, ns.
    pub rtt_ns_p50: u64,
    /// 99th percentile, ns.
    pub rtt_ns_p99: u64,
    /// Maximum, ns.
    pub rtt_ns_max: u64,
    /// Ratio of the 99th percentile to that of the first case.
    pub p99_of_quiet: f64,
    /// The rate of the streams meanwhile, GB/s.
    pub bulk_gbytes_per_s: f64,
}

/// Measures the message rate of each node while all cores send to all peers, over one span of virtual time, or over
/// several spans if there are few cores.
pub fn scaling(points: &[(usize, usize)], message_bytes: usize, span: Span, costs: Costs, seed: u64) -> Vec<Scaling> {
    let mut rows: Vec<Scaling> = Vec::new();
    for &(nodes, cores) in points {
        let spans = (CORES_OF_A_SPAN / cores).max(1) as u64;
        let rate = rate(nodes, cores, message_bytes, Span::from_ps(spans * span.ps()), costs, seed);
        let messages_per_us_core = rate / cores as f64;
        let one = rows.iter().find(|row| row.nodes == nodes && row.cores == 1);
        let of_linear = one.map_or(1.0, |one| messages_per_us_core / one.messages_per_us_core);
        rows.push(Scaling {
            nodes,
            cores,
            message_bytes,
            messages_per_us: rate,
            messages_per_us_core,
            of_linear,
            link_load: rate * packet_bytes(message_bytes) / LINK.bytes_per_us as f64,
        });
    }
    rows
}

/// Returns the bytes of the packets that carry one message: a cache line with two words of the record, two of the frame
/// and the payload. If that does not fit into a line, each of the three has a packet of its own.
fn packet_bytes(message_bytes: usize) -> f64 {
    let payload = message_bytes as u64;
    let packet = |bytes: u64| bytes.next_multiple_of(4) + bytes.div_ceil(LINK.payload_bytes_max) * LINK.header_bytes;
    let is_line = message_bytes <= INLINE_BYTES;
    let bytes = if is_line { packet(32 + payload.next_multiple_of(8)) } else { 2 * packet(16) + packet(payload) };
    bytes as f64
}

fn rate(nodes: usize, cores: usize, message_bytes: usize, span: Span, costs: Costs, seed: u64) -> f64 {
    let plan = Plan { slots: SCALING_SLOTS, has_classes: false, slice_bytes: 4096, backlog_bytes: usize::MAX };
    let mut world = World::new(nodes, cores, plan, costs);
    let mut random = Random::new(seed, "scaling");
    for core in 0..world.cores.len() {
        let (node, rank) = (core / cores, core % cores);
        // The seats of a node are its peers in order, without itself.
        for seat in 0..nodes - 1 {
            let peer = if seat < node { seat } else { seat + 1 };
            let remote = (peer * cores + rank, if node < peer { node } else { node - 1 });
            for _ in 0..STREAMS.div_ceil(nodes - 1) {
                let begin_ns = random.below(1000);
                let source = Program::new(Role::Source(message_bytes), 0, begin_ns);
                world.open(core, seat, source, remote, Program::new(Role::Sink, 0, 0));
            }
        }
    }
    // Queues for a full link take a while to build up.
    let warm = Time::ZERO + span;
    world.run(warm);
    // The average of all nodes: a full link may serve one node before others that want as much.
    let all = 0..nodes * cores;
    let before = world.counters(all.clone()).bytes_received;
    world.run(warm + span);
    let messages = (world.counters(all).bytes_received - before) as f64 / message_bytes as f64;
    messages / nodes as f64 / (span.ns() / 1000.0)
}

/// Measures a ping-pong of 8 bytes alone, and alongside eight streams and one that is never read: without slices, with
/// slices, and with slices and classes.
pub fn isolation(span: Span, costs: Costs, seed: u64) -> Vec<Isolation> {
    let on = Plan { slots: ISOLATION_SLOTS, has_classes: false, slice_bytes: 2048, backlog_bytes: 8192 };
    let off = Plan { slice_bytes: usize::MAX, backlog_bytes: usize::MAX, ..on };
    let cases = [
        ("quiet", on, false),
        ("8 streams and 1 unread, slicing off", off, true),
        ("8 streams and 1 unread, slicing on", on, true),
        ("8 streams and 1 unread, slicing and classes on", Plan { has_classes: true, ..on }, true),
    ];
    let mut rows: Vec<Isolation> = Vec::new();
    for (case, plan, has_streams) in cases {
        let mut row = ping_pong(case, plan, has_streams, span, costs, seed);
        row.p99_of_quiet = row.rtt_ns_p99 as f64 / rows.first().map_or(row.rtt_ns_p99, |quiet| quiet.rtt_ns_p99) as f64;
        rows.push(row);
    }
    rows
}

fn ping_pong(case: &'static str, plan: Plan, has_streams: bool, span: Span, costs: Costs, seed: u64) -> Isolation {
    let mut world = World::new(2, 1, plan, costs);
    let mut random = Random::new(seed, "isolation");
    let answer_ns = costs.program_ns as u64;
    let ping = Program::new(Role::Ping(8), answer_ns, 100);
    world.open(0, 0, ping.clone(), (1, 0), Program::new(Role::Pong, answer_ns, 0));
    if has_streams {
        for _ in 0..8 {
            let source = Program::new(Role::Source(16 << 10), 0, random.below(2000));
            world.open(0, 0, source, (1, 0), Program::new(Role::Sink, 0, 0));
        }
        let source = Program::new(Role::Source(16 << 10), 0, random.below(2000));
        world.open(0, 0, source, (1, 0), Program::new(Role::Unread(256 << 10), 0, 0));
    }
    // Streams settle first: credits are used up, and connections move to their classes.
    let warm = Time::ZERO + Span::from_ps(span.ps() / 4);
    world.run(warm);
    let (trips_before, bytes_before) = (ping.round_trips_ns().len(), world.counters(1..2).bytes_received);
    world.run(warm + span);
    let bytes = world.counters(1..2).bytes_received - bytes_before;
    let mut trips = ping.round_trips_ns().split_off(trips_before);
    trips.sort_unstable();
    let quantile = |part: f64| trips.get(((trips.len() as f64 * part) as usize).min(trips.len().saturating_sub(1)));
    Isolation {
        case,
        round_trips: trips.len(),
        rtt_ns_p50: quantile(0.5).copied().unwrap_or(0),
        rtt_ns_p99: quantile(0.99).copied().unwrap_or(0),
        rtt_ns_max: trips.last().copied().unwrap_or(0),
        p99_of_quiet: 1.0,
        bulk_gbytes_per_s: bytes as f64 / span.ns(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_rate_grows_with_cores_until_the_link_is_full() {
        let scale = |cores, bytes| scaling(&[(2, 1), (2, cores)], bytes, Span::from_ns(200_000.0), Costs::default(), 1);
        let short = scale(32, 8);
        assert!(short[1].link_load < 0.9 && short[1].of_linear > 0.9, "{short:?}");
        let long = scale(16, 256);
        assert!((0.9..1.01).contains(&long[1].link_load) && long[1].of_linear < 0.9, "{long:?}");
    }

    #[test]
    fn message_rate_is_the_same_by_core_however_many_nodes_there_are() {
        let points = [2, 4, 8].map(|nodes| [(nodes, 1), (nodes, 4)]).concat();
        let rows = scaling(&points, 256, Span::from_ns(100_000.0), Costs::default(), 1);
        let by_core: Vec<f64> =
            rows.iter().map(|row| row.messages_per_us_core / rows[0].messages_per_us_core).collect();
        assert!(by_core.iter().all(|of_first| (0.9..1.1).contains(of_first)), "{rows:#?}");
    }

    #[test]
    fn slices_keep_a_ping_pong_alive_beside_streams() {
        let rows = isolation(Span::from_ns(400_000.0), Costs::default(), 1);
        let p99_of_quiet: Vec<f64> = rows.iter().map(|row| row.p99_of_quiet).collect();
        assert!(p99_of_quiet[1] > p99_of_quiet[2] && p99_of_quiet[2] >= p99_of_quiet[3] * 0.9, "{rows:#?}");
        assert!(rows[1..].iter().all(|row| row.bulk_gbytes_per_s > 1.0), "{rows:#?}");
    }

    #[test]
    fn a_seed_gives_the_same_figures() {
        let run = || isolation(Span::from_ns(100_000.0), Costs::default(), 7);
        assert_eq!(run(), run());
    }
}
