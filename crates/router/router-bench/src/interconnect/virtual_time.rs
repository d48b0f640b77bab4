//! Latency by load, in virtual time.
//!
//! The nodes, policies and arrival times are the same as in [`super::load()`], but time advances only by the assumed
//! cost of the work. The machine cannot stall or change its speed, so the difference between two policies is their own,
//! and reproducible for a seed.

use router_node::interconnect::virtual_time::{
    MessageCost, ModelledTransport, NodeCosts, VirtualClocks, fixed_packets_max, pair,
};
use serde::Serialize;
use sim::{Random, Span, Time};

use super::comparison::{Better, ByRound, compare_with_best};
use super::load::CARRIED_SHARE;
use super::nodes::{Arrivals, BUFFERS, Node, VECTOR_PACKETS, packet_bytes, settings};
use super::{AdaptiveRow, BATCHES, Batching, BenchError, kinds, name};
use crate::statistics::{Quantiles, median};

/// The parameters of a trial.
#[derive(Clone, Copy, Debug, PartialEq)]
struct VirtualSetup {
    /// The interconnect that is modelled.
    transport: ModelledTransport,
    /// The cost of the nodes' work.
    costs: NodeCosts,
    /// The pauses of the nodes, if any.
    pauses: Option<Pauses>,
    /// The batching policy.
    batching: Batching,
    /// The frame size in bytes, 64 to 1518.
    frame_bytes: usize,
    /// The load in million packets a second, in bursts at random times.
    load_mpps: f64,
    /// The length of the trial.
    trial: Span,
    /// The time at the beginning that is not measured.
    warm_up: Span,
    /// The seed of the arrival times of packets.
    seed: u64,
}

/// The result of a trial. *Modelled.*
#[derive(Clone, Debug, PartialEq)]
struct VirtualTrial {
    /// The packets that arrived after the warm-up, as a share of those offered in that time.
    delivered_share: f64,
    /// The mean number of packets in a message.
    packets_per_message: f64,
    /// The latency from the arrival of a packet at the sender to its arrival at the other node.
    latency: Quantiles,
    /// The minimum of the latency.
    least_us: f64,
}

/// Pauses of a node: interrupts, or cache lines that other programs evicted.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Pauses {
    each: Span,
    /// The mean interval, at random times.
    apart: Span,
}

/// The pauses of one node.
struct Pausing {
    pauses: Pauses,
    random: Random,
    next_ns: f64,
}

impl Pausing {
    fn new(pauses: Pauses, seed: u64, component: &str) -> Pausing {
        let mut pausing = Pausing { pauses, random: Random::new(seed, component), next_ns: 0.0 };
        pausing.step();
        pausing
    }

    fn step(&mut self) {
        self.next_ns += self.random.exponential(self.pauses.apart.ns());
    }

    /// Adds the pauses that are due at the end of an iteration.
    fn pause(&mut self, clocks: &VirtualClocks, node: usize) {
        while self.next_ns <= now_ns(clocks, node) as f64 {
            clocks.spend(node, self.pauses.each);
            self.step();
        }
    }
}

fn now_ns(clocks: &VirtualClocks, node: usize) -> u64 {
    clocks.now(node).since(Time::ZERO).ns() as u64
}

struct Sender {
    node: Node,
    arrivals: Arrivals,
    packet_bytes: usize,
    /// The end of the warm-up; packets that arrive later are counted.
    from_ns: u64,
    offered: usize,
}

impl Sender {
    fn step(&mut self) {
        self.offered += usize::from(self.arrivals.next_ns() >= self.from_ns);
        self.arrivals.step();
    }

    fn poll(&mut self, clocks: &VirtualClocks) {
        let now_ns = now_ns(clocks, 0);
        self.node.begin_iteration(now_ns);
        for _ in 0..VECTOR_PACKETS {
            let arrival_ns = self.arrivals.next_ns();
            if arrival_ns > now_ns {
                break;
            }
            self.node.make_packet(self.packet_bytes, arrival_ns);
            self.step();
        }
        if !self.node.parcels.is_empty() {
            self.node.send(now_ns);
        }
        self.node.poll(now_ns);
        self.node.arrived.clear();
    }
}

/// Runs one trial.
fn run_virtual(setup: &VirtualSetup) -> Result<VirtualTrial, BenchError> {
    let ([first, second], clocks) = pair(setup.transport, setup.costs, &settings(setup.batching))?;
    let (from_ns, until_ns) = (setup.warm_up.ns() as u64, setup.trial.ns() as u64);
    let mut sender = Sender {
        node: Node::new(0, first, BUFFERS),
        arrivals: Arrivals::new(setup.load_mpps, setup.seed),
        packet_bytes: packet_bytes(setup.frame_bytes),
        from_ns,
        offered: 0,
    };
    let mut receiver = Node::new(1, second, BUFFERS);
    let mut pausing = ["sender", "receiver"].map(|node| Some(Pausing::new(setup.pauses?, setup.seed, node)));
    let mut samples_ns = Vec::new();
    let mut in_time = 0;
    loop {
        let [sent_ns, received_ns] = [0, 1].map(|node| now_ns(&clocks, node));
        if sent_ns.min(received_ns) >= until_ns {
            break;
        }
        if sent_ns <= received_ns {
            sender.poll(&clocks);
            if let Some(pausing) = &mut pausing[0] {
                pausing.pause(&clocks, 0);
            }
            continue;
        }
        receiver.begin_iteration(received_ns);
        receiver.poll(received_ns);
        if let Some(pausing) = &mut pausing[1] {
            pausing.pause(&clocks, 1);
        }
        let now_ns = now_ns(&clocks, 1);
        if (from_ns..until_ns).contains(&now_ns) {
            in_time += receiver.arrived.len();
        }
        receiver.take_arrived(|arrival_ns| {
            if arrival_ns >= from_ns {
                samples_ns.push(now_ns - arrival_ns);
            }
        });
    }
    // Packets for which the sender had no time count as offered.
    while sender.arrivals.next_ns() < until_ns {
        sender.step();
    }
    let counters = sender.node.counters();
    Ok(VirtualTrial {
        delivered_share: in_time as f64 / sender.offered.max(1) as f64,
        packets_per_message: counters.sent_packets as f64 / counters.sent_messages.max(1) as f64,
        least_us: samples_ns.iter().min().map_or(0.0, |ns| *ns as f64 / 1000.0),
        latency: Quantiles::of(&mut samples_ns),
    })
}

/// The time at the beginning of a trial that is not measured: as in live trials, until the costs of messages are
/// learned.
const WARM_UP: Span = Span::from_ps(4_000_000_000);

/// An assumption about the nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Assumption {
    /// The name in reports.
    name: &'static str,
    costs: NodeCosts,
    pauses: Option<Pauses>,
    /// The interconnects that are modelled.
    transports: &'static [ModelledTransport],
}

/// Two cores of one server: a message costs as much as 13 packets of 64 bytes, or 1.3 of 1500.
const EVEN: MessageCost = MessageCost { message_ns: 280.0, packet_ns: 15.0, byte_ns: 0.13, uncached_byte_ns: 0.0 };
/// 1.5 times the cost of `EVEN`.
const SLOW: MessageCost = MessageCost { message_ns: 420.0, packet_ns: 22.5, byte_ns: 0.195, uncached_byte_ns: 0.0 };
/// The cost with a network card: more for each message, less for each byte.
const NIC: MessageCost = MessageCost { message_ns: 800.0, packet_ns: 25.0, byte_ns: 0.11, uncached_byte_ns: 0.0 };

/// The cost where messages of more than eight packets of 1500 bytes are not cheaper: an Intel Xeon, the RNIC in lanes.
const UNCACHED: MessageCost = MessageCost { uncached_byte_ns: 0.025, ..EVEN };

/// The cost of a system call for each message: UDP on one machine.
const KERNEL: MessageCost = MessageCost { message_ns: 2000.0, packet_ns: 15.0, byte_ns: 0.6, uncached_byte_ns: 0.0 };

/// All assumptions that are modelled.
const ASSUMPTIONS: [Assumption; 8] = [
    assumed("two cores", costs(EVEN, EVEN, 100.0)),
    assumed("a slower sender", costs(SLOW, EVEN, 100.0)),
    assumed("a slower receiver", costs(EVEN, SLOW, 100.0)),
    assumed("costly messages, 400 ns away", costs(NIC, NIC, 400.0)),
    assumed("costly iterations, 500 ns away", COSTLY_ITERATIONS),
    Assumption { pauses: Some(PAUSES), ..assumed("costly iterations and pauses, 500 ns away", COSTLY_ITERATIONS) },
    assumed("long messages are no cheaper", costs(UNCACHED, UNCACHED, 100.0)),
    Assumption { transports: &[ModelledTransport::RnicUdp], ..assumed("messages are system calls", KERNEL_ITERATIONS) },
];

const COSTLY_ITERATIONS: NodeCosts = NodeCosts { poll_ns: 200.0, ..costs(EVEN, EVEN, 500.0) };
/// A poll that finds nothing is a system call, too.
const KERNEL_ITERATIONS: NodeCosts = NodeCosts { poll_ns: 500.0, ..costs(KERNEL, KERNEL, 1000.0) };
/// The pauses of a virtual machine.
const PAUSES: Pauses = Pauses { each: Span::from_ps(1_500_000), apart: Span::from_ps(50_000_000) };

const fn assumed(name: &'static str, costs: NodeCosts) -> Assumption {
    Assumption { name, costs, pauses: None, transports: &[ModelledTransport::Lanes, ModelledTransport::RnicLanes] }
}

const fn costs(send: MessageCost, receive: MessageCost, one_way_ns: f64) -> NodeCosts {
    NodeCosts { poll_ns: 30.0, send, receive, ack_poll_ns: 80.0, one_way_ns }
}

/// The adaptive policy compared with the best fixed batch, in virtual time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ModelledRow {
    /// Always *modelled*.
    pub kind: &'static str,
    /// The assumption about the nodes.
    pub assumed: &'static str,
    /// The name of the interconnect that is modelled.
    pub interconnect: &'static str,
    /// The load, as a share of what the slower node carries with the longest fixed batches.
    pub load_share: f64,
    /// The share of the load that the adaptive policy delivered.
    pub delivered_share: f64,
    /// The figures: medians over the trials, in each of which all policies handled the same packets.
    #[serde(flatten)]
    pub row: AdaptiveRow,
}

/// The parameters of a comparison.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Comparison {
    /// The assumption about the nodes.
    assumption: Assumption,
    /// The interconnect that is modelled.
    transport: ModelledTransport,
    /// The frame size in bytes.
    frame_bytes: usize,
    /// The load, as a share of what the slower node carries with the longest fixed batches.
    load_share: f64,
    /// The length of a trial, of which the first 4 ms are not measured.
    trial: Span,
    /// The number of trials, each with different arrival times.
    trials: u64,
}

impl Comparison {
    fn load_mpps(&self) -> f64 {
        let NodeCosts { send, receive, .. } = self.assumption.costs;
        let bytes = packet_bytes(self.frame_bytes);
        let packets = fixed_packets_max(self.transport, bytes);
        let full_ns = [send, receive].map(|work| work.ns(packets, packets * bytes)).into_iter().fold(0.0, f64::max);
        self.load_share * 1000.0 * packets as f64 / full_ns
    }

    fn trials(&self, batching: Batching) -> Result<Vec<VirtualTrial>, BenchError> {
        let trial = |seed| {
            run_virtual(&VirtualSetup {
                transport: self.transport,
                costs: self.assumption.costs,
                pauses: self.assumption.pauses,
                batching,
                frame_bytes: self.frame_bytes,
                load_mpps: self.load_mpps(),
                trial: self.trial,
                warm_up: WARM_UP,
                seed,
            })
        };
        (0..self.trials).map(trial).collect()
    }

    /// Runs the comparison. Returns `None` if no fixed batch carries the load.
    fn run(&self) -> Result<Option<ModelledRow>, BenchError> {
        let mut carried: Vec<(u8, ByRound)> = Vec::new();
        for batch in BATCHES {
            let trials = self.trials(Batching::Fixed(batch))?;
            if of(&trials, |trial| trial.delivered_share) >= CARRIED_SHARE {
                carried.push((batch, p99s_us(&trials)));
            }
        }
        let adaptive = self.trials(Batching::Adaptive)?;
        let others: Vec<&ByRound> = carried.iter().map(|(_, rounds)| rounds).collect();
        let Some(comparison) = compare_with_best(&p99s_us(&adaptive), &others, Better::Less) else { return Ok(None) };
        let row = AdaptiveRow {
            size_bytes: self.frame_bytes,
            load_mpps: self.load_mpps(),
            p50_us: of(&adaptive, |trial| trial.latency.p50_us),
            p99_us: of(&adaptive, p99_us),
            best_fixed_batch: carried[comparison.best].0,
            best_fixed_p99_us: comparison.best_value,
            p99_ratio: comparison.ratio,
            control: None,
        };
        let [lanes, _, rnic_lanes, rnic_udp] = kinds();
        let interconnect = name(match self.transport {
            ModelledTransport::Lanes => lanes,
            ModelledTransport::RnicLanes => rnic_lanes,
            ModelledTransport::RnicUdp => rnic_udp,
        });
        Ok(Some(ModelledRow {
            kind: "modelled",
            assumed: self.assumption.name,
            interconnect,
            load_share: self.load_share,
            delivered_share: of(&adaptive, |trial| trial.delivered_share),
            row,
        }))
    }
}

fn p99_us(trial: &VirtualTrial) -> f64 {
    trial.latency.p99_us
}

fn p99s_us(trials: &[VirtualTrial]) -> ByRound {
    trials.iter().map(|trial| Some(p99_us(trial))).collect()
}

/// Returns the median of a value over trials.
fn of(trials: &[VirtualTrial], value: fn(&VirtualTrial) -> f64) -> f64 {
    median(trials.iter().map(value)).unwrap_or(0.0)
}

/// Models all assumptions with their interconnects, for these frame sizes and shares of the load.
///
/// # Errors
/// Fails if the nodes cannot be created.
pub fn modelled(
    sizes: &[usize],
    load_shares: &[f64],
    trial: Span,
    trials: u64,
) -> Result<Vec<ModelledRow>, BenchError> {
    let mut rows = Vec::new();
    for assumption in ASSUMPTIONS {
        for transport in assumption.transports.iter().copied() {
            for frame_bytes in sizes.iter().copied() {
                for load_share in load_shares.iter().copied() {
                    rows.extend(Comparison { assumption, transport, frame_bytes, load_share, trial, trials }.run()?);
                }
            }
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::super::LOAD_FRAME_BYTES;
    use super::*;

    /// The bound of each cell, as a multiple of the best fixed batch's p99.
    const RATIO_BELOW: f64 = 1.06;

    /// Asserts that the adaptive policy is not worse than the best fixed batch in any cell.
    fn assert_matches_the_best_fixed_batch(assumption: Assumption) {
        let mut ratios = Vec::new();
        for transport in assumption.transports.iter().copied() {
            for frame_bytes in LOAD_FRAME_BYTES {
                for load_share in [0.2, 0.4, 0.5, 0.8] {
                    let trial = Span::from_ns(12e6);
                    let comparison =
                        |trials| Comparison { assumption, transport, frame_bytes, load_share, trial, trials };
                    let by = |trials| comparison(trials).run().expect("nodes").expect("a batch that carries it");
                    let is_fine = |row: &ModelledRow| {
                        row.delivered_share >= CARRIED_SHARE && row.row.p99_ratio.median < RATIO_BELOW
                    };
                    // Three trials are more precise than one, and take three times as long.
                    let row = Some(by(1)).filter(is_fine).unwrap_or_else(|| by(3));
                    println!("{row:?}");
                    assert!(is_fine(&row), "{row:?}");
                    ratios.push(row.row.p99_ratio.median);
                }
            }
        }
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        assert!(mean < 0.9, "{mean}");
    }

    #[test]
    fn adaptive_batches_match_the_best_fixed_one_between_equal_nodes() {
        assert_matches_the_best_fixed_batch(ASSUMPTIONS[0]);
    }

    #[test]
    fn adaptive_batches_match_the_best_fixed_one_if_the_receiver_is_slower() {
        assert_matches_the_best_fixed_batch(ASSUMPTIONS[2]);
    }

    #[test]
    fn adaptive_batches_match_the_best_fixed_one_if_iterations_are_costly() {
        assert_matches_the_best_fixed_batch(ASSUMPTIONS[4]);
    }

    #[test]
    fn adaptive_batches_match_the_best_fixed_one_if_nodes_pause() {
        assert_matches_the_best_fixed_batch(ASSUMPTIONS[5]);
    }

    #[test]
    fn adaptive_batches_match_the_best_fixed_one_if_long_messages_are_not_cheaper() {
        assert_matches_the_best_fixed_batch(ASSUMPTIONS[6]);
    }

    #[test]
    fn adaptive_batches_match_the_best_fixed_one_if_messages_are_system_calls() {
        assert_matches_the_best_fixed_batch(ASSUMPTIONS[7]);
    }

    #[test]
    fn adaptive_batches_match_the_best_fixed_one_near_saturation_with_long_packets() {
        // If a message holds 8 packets and 17 are queued, the last one must not be sent alone; and if it holds all 32,
        // full batches may take longer than the latency target.
        let cases =
            [(ASSUMPTIONS[2], ModelledTransport::Lanes, 0.9), (ASSUMPTIONS[3], ModelledTransport::RnicLanes, 0.8)];
        for (assumption, transport, load_share) in cases {
            let trial = Span::from_ns(12e6);
            let comparison = Comparison { assumption, transport, frame_bytes: 1500, load_share, trial, trials: 3 };
            let row = comparison.run().expect("nodes").expect("a batch that carries it");
            assert!(row.row.p99_ratio.median < 1.03, "{row:?}");
        }
    }

    #[test]
    fn messages_that_are_system_calls_are_long_from_the_start() {
        let packets_per_message = |transport| {
            let assumption = ASSUMPTIONS[7];
            let trial = Span::from_ns(2e6);
            let comparison = Comparison { assumption, transport, frame_bytes: 1500, load_share: 0.9, trial, trials: 1 };
            let setup = VirtualSetup {
                transport,
                costs: assumption.costs,
                pauses: None,
                batching: Batching::Adaptive,
                frame_bytes: comparison.frame_bytes,
                load_mpps: comparison.load_mpps(),
                trial,
                warm_up: Span::ZERO,
                seed: 1,
            };
            run_virtual(&setup).expect("nodes").packets_per_message
        };
        let [known, tried] = [ModelledTransport::RnicUdp, ModelledTransport::RnicLanes].map(packets_per_message);
        assert!(known > 1.25 * tried, "{known} and {tried} packets a message");
    }

    #[test]
    fn the_latency_of_an_undelayed_message_is_the_sum_of_its_parts() {
        let costs = costs(EVEN, SLOW, 250.0);
        let setup = VirtualSetup {
            transport: ModelledTransport::Lanes,
            costs,
            pauses: None,
            batching: Batching::Fixed(1),
            frame_bytes: 1018,
            load_mpps: 0.01,
            trial: Span::from_ns(5e6),
            warm_up: Span::ZERO,
            seed: 1,
        };
        let parts_us = (EVEN.ns(1, 1000) + SLOW.ns(1, 1000) + 250.0) / 1000.0;
        let trial = run_virtual(&setup).expect("nodes");
        let iterations_us = 3.0 * costs.poll_ns / 1000.0;
        assert_eq!(trial.packets_per_message, 1.0);
        // The first packet of a burst does not wait for another.
        assert!((parts_us..parts_us + iterations_us).contains(&trial.least_us), "{parts_us} and iterations: {trial:?}");
        assert_eq!(trial, run_virtual(&setup).expect("nodes"), "the same for the same seed");
    }
}
