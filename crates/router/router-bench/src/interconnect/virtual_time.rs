//! What latency at what load, in virtual time.
//!
//! The same nodes, policies and moments at which packets come as in [`super::load()`], but time goes on by what work is
//! assumed to cost, and by nothing else: no machine that is taken away, or is faster now than a moment ago. So a
//! difference between two policies is theirs, the same for the same seed.

use router_node::interconnect::virtual_time::{
    MessageCost, ModelledTransport, NodeCosts, VirtualClocks, fixed_packets_max, pair,
};
use serde::Serialize;
use sim::{Random, Span, Time};

use super::beside::{Better, ByRound, beside_best};
use super::load::CARRIED_SHARE;
use super::nodes::{Arrivals, BUFFERS, Node, VECTOR_PACKETS, packet_bytes, settings};
use super::{AdaptiveRow, BATCHES, Batching, BenchError, kinds, name};
use crate::statistics::{Quantiles, median};

/// What is tried.
#[derive(Clone, Copy, Debug, PartialEq)]
struct VirtualSetup {
    /// As which interconnect.
    transport: ModelledTransport,
    /// What work costs.
    costs: NodeCosts,
    /// What else the nodes do.
    pauses: Option<Pauses>,
    /// How packets are put together.
    batching: Batching,
    /// Bytes of a frame, 64 to 1518.
    frame_bytes: usize,
    /// Million packets a second, in bursts at random moments.
    load_mpps: f64,
    /// How long.
    trial: Span,
    /// What of that is left out at the beginning.
    warm_up: Span,
    /// Of the moments at which packets come.
    seed: u64,
}

/// What came of it. *Modelled.*
#[derive(Clone, Debug, PartialEq)]
struct VirtualTrial {
    /// What arrived after the warm-up, as a share of what came in that time.
    delivered_share: f64,
    /// Packets a message, on average.
    packets_per_message: f64,
    /// From the moment when a packet came to the moment when the other node had it.
    latency: Quantiles,
    /// The least of that.
    least_us: f64,
}

/// What a node spends on something else now and then: interrupts, lines of its cache that others took.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Pauses {
    each: Span,
    /// On average, at random moments.
    apart: Span,
}

/// When a node pauses.
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

    /// A turn of the node is over.
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
    /// Packets that came after the warm-up.
    from_ns: u64,
    offered: usize,
}

impl Sender {
    fn step(&mut self) {
        self.offered += usize::from(self.arrivals.next_ns() >= self.from_ns);
        self.arrivals.step();
    }

    fn turn(&mut self, clocks: &VirtualClocks) {
        let now_ns = now_ns(clocks, 0);
        self.node.begin_round(now_ns);
        for _ in 0..VECTOR_PACKETS {
            let came_ns = self.arrivals.next_ns();
            if came_ns > now_ns {
                break;
            }
            self.node.make(self.packet_bytes, came_ns);
            self.step();
        }
        if !self.node.parcels.is_empty() {
            self.node.send(now_ns);
        }
        self.node.turn(now_ns);
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
            sender.turn(&clocks);
            if let Some(pausing) = &mut pausing[0] {
                pausing.pause(&clocks, 0);
            }
            continue;
        }
        receiver.begin_round(received_ns);
        receiver.turn(received_ns);
        if let Some(pausing) = &mut pausing[1] {
            pausing.pause(&clocks, 1);
        }
        let now_ns = now_ns(&clocks, 1);
        if (from_ns..until_ns).contains(&now_ns) {
            in_time += receiver.arrived.len();
        }
        receiver.take(|came_ns| {
            if came_ns >= from_ns {
                samples_ns.push(now_ns - came_ns);
            }
        });
    }
    // Those for which the sender had no time came all the same.
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

/// What of a trial is left out at its beginning: as live, until it is learnt what messages cost.
const WARM_UP: Span = Span::from_ps(4_000_000_000);

/// Nodes as they are assumed to be.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Assumption {
    /// What they are like.
    name: &'static str,
    costs: NodeCosts,
    pauses: Option<Pauses>,
    /// As which interconnects they are modelled.
    transports: &'static [ModelledTransport],
}

/// Two cores of one server: a message costs as much as 13 packets of 64 bytes, or as 1.3 of 1500.
const EVEN: MessageCost = MessageCost { message_ns: 280.0, packet_ns: 15.0, byte_ns: 0.13, uncached_byte_ns: 0.0 };
/// Half as much again.
const SLOW: MessageCost = MessageCost { message_ns: 420.0, packet_ns: 22.5, byte_ns: 0.195, uncached_byte_ns: 0.0 };
/// As of a network card: more a message, less a byte.
const CARD: MessageCost = MessageCost { message_ns: 800.0, packet_ns: 25.0, byte_ns: 0.11, uncached_byte_ns: 0.0 };

/// As where no longer message than of eight packets of 1500 bytes costs less: an Intel Xeon, the RNIC in lanes.
const NEAR: MessageCost = MessageCost { uncached_byte_ns: 0.025, ..EVEN };

/// As where the kernel is called for each message: UDP on one machine.
const KERNEL: MessageCost = MessageCost { message_ns: 2000.0, packet_ns: 15.0, byte_ns: 0.6, uncached_byte_ns: 0.0 };

/// All that are modelled.
const ASSUMPTIONS: [Assumption; 8] = [
    assumed("two cores", costs(EVEN, EVEN, 100.0)),
    assumed("a slower sender", costs(SLOW, EVEN, 100.0)),
    assumed("a slower receiver", costs(EVEN, SLOW, 100.0)),
    assumed("dear messages, 400 ns away", costs(CARD, CARD, 400.0)),
    assumed("dear rounds, 500 ns away", DEAR_ROUNDS),
    Assumption { pauses: Some(PAUSES), ..assumed("dear rounds and pauses, 500 ns away", DEAR_ROUNDS) },
    assumed("long messages are no cheaper", costs(NEAR, NEAR, 100.0)),
    Assumption { transports: &[ModelledTransport::RnicUdp], ..assumed("messages are system calls", KERNEL_ROUNDS) },
];

const DEAR_ROUNDS: NodeCosts = NodeCosts { poll_ns: 200.0, ..costs(EVEN, EVEN, 500.0) };
/// Who finds nothing has called the kernel, too.
const KERNEL_ROUNDS: NodeCosts = NodeCosts { poll_ns: 500.0, ..costs(KERNEL, KERNEL, 1000.0) };
/// As virtual machines have them.
const PAUSES: Pauses = Pauses { each: Span::from_ps(1_500_000), apart: Span::from_ps(50_000_000) };

const fn assumed(name: &'static str, costs: NodeCosts) -> Assumption {
    Assumption { name, costs, pauses: None, transports: &[ModelledTransport::Lanes, ModelledTransport::RnicLanes] }
}

const fn costs(send: MessageCost, receive: MessageCost, one_way_ns: f64) -> NodeCosts {
    NodeCosts { poll_ns: 30.0, send, receive, ack_poll_ns: 80.0, one_way_ns }
}

/// The adaptive policy beside the best fixed batch, in virtual time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ModelledRow {
    /// *Modelled*, always.
    pub kind: &'static str,
    /// What of its nodes.
    pub assumed: &'static str,
    /// As which interconnect.
    pub interconnect: &'static str,
    /// The load, as a share of what the slower node carries in the longest fixed batches.
    pub load_share: f64,
    /// What the adaptive policy delivered of it.
    pub delivered_share: f64,
    /// The figures: medians over the trials, in each of which all policies saw the same packets.
    #[serde(flatten)]
    pub row: AdaptiveRow,
}

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Comparison {
    /// Of which nodes.
    assumption: Assumption,
    /// As which interconnect.
    transport: ModelledTransport,
    /// Bytes of a frame.
    frame_bytes: usize,
    /// The load, as a share of what the slower node carries in the longest fixed batches.
    load_share: f64,
    /// One trial, of which the first 4 ms are left out.
    trial: Span,
    /// So many trials, each with other moments at which packets come.
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

    /// Nothing where no fixed batch carries the load.
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
        let Some(beside) = beside_best(&p99s_us(&adaptive), &others, Better::Less) else { return Ok(None) };
        let row = AdaptiveRow {
            size_bytes: self.frame_bytes,
            load_mpps: self.load_mpps(),
            p50_us: of(&adaptive, |trial| trial.latency.p50_us),
            p99_us: of(&adaptive, p99_us),
            best_fixed_batch: carried[beside.best].0,
            best_fixed_p99_us: beside.best_value,
            p99_ratio: beside.ratio,
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

/// The median of some value over trials.
fn of(trials: &[VirtualTrial], value: fn(&VirtualTrial) -> f64) -> f64 {
    median(trials.iter().map(value)).unwrap_or(0.0)
}

/// All assumptions, both ways in which an interconnect works, these sizes of frames, at these shares of the load.
///
/// # Errors
/// When nodes cannot be made.
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

    /// No cell is to be above, as a multiple of the best fixed batch's p99.
    const RATIO_BELOW: f64 = 1.06;

    /// Of a policy that is at the best fixed batch or below wherever it counts.
    fn assert_at_the_best_or_below(assumption: Assumption) {
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
                    // Three say more than one, and take three times as long.
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
    fn adaptive_batches_are_at_the_best_fixed_one_or_below_between_equal_nodes() {
        assert_at_the_best_or_below(ASSUMPTIONS[0]);
    }

    #[test]
    fn and_where_the_receiver_is_slower() {
        assert_at_the_best_or_below(ASSUMPTIONS[2]);
    }

    #[test]
    fn and_where_rounds_of_a_loop_are_dear() {
        assert_at_the_best_or_below(ASSUMPTIONS[4]);
    }

    #[test]
    fn and_where_nodes_pause() {
        assert_at_the_best_or_below(ASSUMPTIONS[5]);
    }

    #[test]
    fn and_where_long_messages_are_no_cheaper() {
        assert_at_the_best_or_below(ASSUMPTIONS[6]);
    }

    #[test]
    fn and_where_messages_are_system_calls() {
        assert_at_the_best_or_below(ASSUMPTIONS[7]);
    }

    #[test]
    fn and_where_a_node_has_time_for_full_messages_of_long_packets_alone() {
        // Where a message holds 8 packets, of 17 that wait one must not go by itself; and where it holds all 32, those
        // that are worth it may take longer than the target.
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
    fn messages_that_are_system_calls_are_long_from_the_first() {
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
    fn a_message_that_nothing_delays_takes_what_its_parts_cost() {
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
        let turns_us = 3.0 * costs.poll_ns / 1000.0;
        assert_eq!(trial.packets_per_message, 1.0);
        // The first of a burst waits for no other.
        assert!((parts_us..parts_us + turns_us).contains(&trial.least_us), "{parts_us} and turns: {trial:?}");
        assert_eq!(trial, run_virtual(&setup).expect("nodes"), "the same for the same seed");
    }
}
