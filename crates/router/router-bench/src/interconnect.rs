//! Benchmark of interconnects between two nodes: the latency of a hop, the rate that is carried without loss, and the
//! latency by load, by frame size and by batching policy.
//!
//! Two nodes are two threads on separate cores with an interconnect between them; no other part of a router is
//! involved. A frame of 64 bytes is an IP packet of 46: nodes forward packets without the Ethernet header and checksum.
//!
//! Packets arrive at predetermined times (bursts of packets, at random), whether the sender is ready or not, and the
//! latency of a packet counts from its arrival time. A delay of the sender therefore shows as latency and does not
//! reduce the load (open-loop load). Policies alternate within a round, and medians over the rounds are reported.

mod buffers;
mod comparison;
mod hop;
mod load;
mod nodes;
mod rate;
mod samples;
mod stalls;
mod virtual_time;

use router::batch::Policy;
use router_node::interconnect::{InterconnectError, TransportKind};
use serde::Serialize;
use sim::Span;
use thiserror::Error;

pub use comparison::Rounds;
pub use hop::{Hop, hops};
pub use load::{AdaptiveRow, LoadRow, adaptive_rows, load, uncarried};
pub use nodes::{Cores, Offered, Trial, TrialSetup, run};
pub use rate::{AdaptiveRate, BatchGain, RateRow, adaptive_rates, batch_gain, rates};
pub use stats::Ratio;
pub use virtual_time::{ModelledRow, modelled};

/// The fixed batch sizes of the published measurements.
pub const BATCHES: [u8; 6] = [1, 2, 4, 8, 16, 32];
/// The published frame sizes, in bytes.
pub const FRAME_BYTES: [usize; 6] = [64, 128, 256, 512, 1024, 1500];
/// The frame sizes whose latency is measured by load: the shortest and the longest.
pub const LOAD_FRAME_BYTES: [usize; 2] = [64, 1500];
/// Bytes of the Ethernet header and checksum, which nodes do not forward to each other.
pub const ETHERNET_BYTES: usize = 18;

/// The reason why an interconnect could not be measured.
#[derive(Debug, Error)]
pub enum BenchError {
    /// There are fewer than two cores.
    #[error("cores available: {found}; two nodes need one each: run on a machine, or in a CPU set, with two")]
    Cores {
        /// The number of cores that this process may use.
        found: usize,
    },
    /// The interconnect could not be created.
    #[error(transparent)]
    Interconnect(#[from] InterconnectError),
    /// A system call failed.
    #[error("{call}: {error}")]
    System {
        /// The system call.
        call: &'static str,
        /// The error of the kernel.
        error: std::io::Error,
    },
    /// Expected packets did not arrive.
    #[error("{kind}: {found} of {wanted} packets arrived within {limit_s} s; repeat on a machine with less load")]
    Silent {
        /// The name of the interconnect.
        kind: &'static str,
        /// The number of packets that arrived.
        found: usize,
        /// The number of expected packets.
        wanted: usize,
        /// The time limit.
        limit_s: u64,
    },
}

/// A batching policy, as a report names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Batching {
    /// Fixed batches of this many packets, with a timeout of 10 us.
    Fixed(u8),
    /// Adaptive batches.
    Adaptive,
}

impl Batching {
    /// Returns all policies that are compared: the published batches, then the adaptive one.
    pub fn all() -> impl Iterator<Item = Batching> {
        BATCHES.into_iter().map(Batching::Fixed).chain([Batching::Adaptive])
    }

    /// Returns the policy for the interconnect.
    pub fn policy(self) -> Policy {
        match self {
            Batching::Fixed(packets) => Policy::fixed(packets),
            Batching::Adaptive => Policy::adaptive(),
        }
    }
}

/// The lengths and the numbers of trials.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effort {
    /// The length of a trial.
    pub trial: Span,
    /// The time at the beginning of a trial that is not measured.
    pub warm_up: Span,
    /// The rounds of the gain of batches.
    pub rounds: usize,
    /// The rounds of rates without a loss.
    pub rate_rounds: Rounds,
    /// The round trips of a hop.
    pub round_trips: usize,
    /// The length of a trial of latency under load: short, so that a round ends before the speed of the machine
    /// changes.
    pub load_trial: Span,
    /// The time at the beginning of such a trial that is not measured: longer than the adaptive policy takes to learn
    /// the cost of a message of each length, which needs some thousand long messages. A node learns this once.
    pub load_warm_up: Span,
    /// The rounds of latency under load: a few pauses of the machine determine the 99th percentile of a single trial.
    pub load_rounds: Rounds,
    /// The rounds of latency by size, at one load.
    pub size_rounds: Rounds,
    /// The relative precision of the search for the rate that is carried without loss.
    pub search_precision: f64,
}

impl Effort {
    /// Returns the effort of `--quick`: some seconds for each interconnect.
    pub fn quick() -> Effort {
        Effort {
            trial: Span::from_ns(15e6),
            warm_up: Span::from_ns(3e6),
            rounds: 3,
            rate_rounds: Rounds { all: 3, most: 9 },
            round_trips: 500,
            load_trial: Span::from_ns(32e6),
            load_warm_up: Span::from_ns(20e6),
            load_rounds: Rounds { all: 11, most: 33 },
            size_rounds: Rounds::with_all(11),
            search_precision: 0.02,
        }
    }

    /// Returns the effort of committed results.
    pub fn full() -> Effort {
        Effort {
            trial: Span::from_ns(56e6),
            warm_up: Span::from_ns(24e6),
            rounds: 7,
            rate_rounds: Rounds { all: 7, most: 31 },
            round_trips: 5000,
            load_trial: Span::from_ns(56e6),
            load_warm_up: Span::from_ns(40e6),
            load_rounds: Rounds { all: 21, most: 121 },
            size_rounds: Rounds::with_all(11),
            search_precision: 0.005,
        }
    }
}

/// Returns the name of an interconnect in reports.
pub fn name(kind: TransportKind) -> &'static str {
    match kind {
        TransportKind::Lanes => "lanes",
        TransportKind::Windows(_) => "windows",
        TransportKind::RnicLanes => "rnic_lanes",
        TransportKind::RnicUdp(_) => "rnic_udp",
    }
}

/// The timing of a modelled link between two machines: PCIe generation 3 with 8 lanes through two bridges, as in
/// `crosslane bench windows`.
pub const WINDOW_TIMING: fabric::timed::LinkTiming =
    fabric::timed::LinkTiming { one_way_ns: 500, bytes_per_us: 7_800, header_bytes: 24, payload_bytes_max: 256 };

/// Returns all four kinds of interconnect, within this machine.
pub fn kinds() -> [TransportKind; 4] {
    let loopback = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    [
        TransportKind::Lanes,
        TransportKind::Windows(WINDOW_TIMING),
        TransportKind::RnicLanes,
        TransportKind::RnicUdp(loopback),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns two cores, or prints that there is only one.
    fn cores() -> Option<Cores> {
        Cores::find().inspect_err(|error| println!("skipped: {error}")).ok()
    }

    #[test]
    fn offered_packets_arrive_over_every_kind_and_policy() {
        let Some(cores) = cores() else { return };
        for (kind, batching) in kinds().into_iter().zip([Batching::Adaptive, Batching::Fixed(8)].into_iter().cycle()) {
            let setup = TrialSetup {
                kind,
                batching,
                frame_bytes: 64,
                offered: Offered::Mpps(0.05),
                trial: Span::from_ns(6e6),
                warm_up: Span::ZERO,
                seed: 1,
            };
            let trial = run(&setup, cores).unwrap();
            assert!(trial.offered_packets > 20, "{kind:?}: {trial:?}");
            // Fewer packets than a queue holds: nothing is lost however long a node waits for its processor.
            assert_eq!(trial.lost_packets, 0, "{kind:?}: {trial:?}");
            assert!(trial.latency.samples > 20 && trial.latency.p50_us > 0.0);
            assert!(trial.undisturbed.samples <= trial.latency.samples);
        }
    }

    #[test]
    fn hops_are_measured_by_size_and_batch() {
        let Some(cores) = cores() else { return };
        let effort = Effort { round_trips: 20, ..Effort::quick() };
        for kind in kinds() {
            let mut begun = Vec::new();
            let mut step = |what: &str| begun.push(what.to_owned());
            let found = hops(kind, &[64, 1500], &[1, 32], &effort, cores, &mut step).unwrap();
            assert_eq!(begun, ["one hop, 1 a message", "one hop, 32 a message"]);
            let shape: Vec<(usize, u8)> = found.iter().map(|hop| (hop.frame_bytes, hop.batch)).collect();
            assert_eq!(shape, [(64, 1), (1500, 1), (64, 32), (1500, 32)], "{kind:?}");
            assert!(found.iter().all(|hop| hop.latency.samples == 20 && hop.latency.p50_us > 0.0));
        }
    }

    #[test]
    fn a_flood_fills_batches_and_loses_nothing() {
        let Some(cores) = cores() else { return };
        let setup = TrialSetup {
            kind: TransportKind::Lanes,
            batching: Batching::Fixed(32),
            frame_bytes: 64,
            offered: Offered::Flood,
            trial: Span::from_ns(4e6),
            warm_up: Span::ZERO,
            seed: 1,
        };
        let trial = run(&setup, cores).unwrap();
        assert!(trial.packets_per_message > 16.0, "{trial:?}");
        assert_eq!(trial.lost_packets, 0, "{trial:?}");
    }

    #[test]
    fn a_flood_that_begins_after_its_end_time_terminates() {
        let Some(cores) = cores() else { return };
        let setup = TrialSetup {
            kind: TransportKind::Lanes,
            batching: Batching::Adaptive,
            frame_bytes: 64,
            offered: Offered::Flood,
            trial: Span::from_ns(1.0),
            warm_up: Span::ZERO,
            seed: 1,
        };
        let trial = run(&setup, cores).unwrap();
        assert!(trial.offered_packets > 0 && trial.lost_packets == 0, "{trial:?}");
    }
}
