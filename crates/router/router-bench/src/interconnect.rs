//! Interconnects between two nodes: what a hop takes, what rate is carried without loss, and what latency at what load,
//! by size and by how packets are put together.
//!
//! Two nodes are two threads, each with a core of its own, and an interconnect between them; nothing else of a router
//! is in the way. A frame of 64 bytes is an IP packet of 46: without Ethernet's header and checksum, as nodes hand
//! packets on.
//!
//! Packets come at moments that were drawn beforehand (bursts of packets, at random), whether the sender is ready or
//! not, and a packet's latency counts from that moment: what a sender is late with is latency, not less load. Policies
//! take turns, and medians over the rounds are reported.

mod beside;
mod buffers;
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

pub use beside::Rounds;
pub use hop::{Hop, hops};
pub use load::{AdaptiveRow, LoadRow, adaptive_rows, load, uncarried};
pub use nodes::{Cores, Offered, Trial, TrialSetup, run};
pub use rate::{AdaptiveRate, BatchGain, RateRow, adaptive_rates, batch_gain, rates};
pub use stats::Ratio;
pub use virtual_time::{ModelledRow, modelled};

/// The fixed batches that were published.
pub const BATCHES: [u8; 6] = [1, 2, 4, 8, 16, 32];
/// The published sizes, in bytes of a frame.
pub const FRAME_BYTES: [usize; 6] = [64, 128, 256, 512, 1024, 1500];
/// Those of them whose latency is taken by load: the shortest and the longest.
pub const LOAD_FRAME_BYTES: [usize; 2] = [64, 1500];
/// Ethernet's header and checksum: not handed on between nodes.
pub const ETHERNET_BYTES: usize = 18;

/// Why an interconnect could not be measured.
#[derive(Debug, Error)]
pub enum BenchError {
    /// The two nodes need a core each.
    #[error("{found} core to run on; two nodes need one each: run on a machine, or in a CPU set, with two")]
    Cores {
        /// Cores that this process may use.
        found: usize,
    },
    /// The interconnect could not be made.
    #[error(transparent)]
    Interconnect(#[from] InterconnectError),
    /// The kernel refused.
    #[error("{call}: {error}")]
    System {
        /// What was attempted.
        call: &'static str,
        /// What the kernel said.
        error: std::io::Error,
    },
    /// Packets that were to come did not.
    #[error("{kind}: {found} of {wanted} packets came within {limit_s} s; the machine is too busy to measure on")]
    Silent {
        /// Over which interconnect.
        kind: &'static str,
        /// How many came.
        found: usize,
        /// How many were to come.
        wanted: usize,
        /// How long was waited.
        limit_s: u64,
    },
}

/// How packets are put together, as a report names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Batching {
    /// Fixed, of so many packets, with a wait of 10 us.
    Fixed(u8),
    /// Adaptive.
    Adaptive,
}

impl Batching {
    /// All that are compared: the published batches, then the adaptive one.
    pub fn all() -> impl Iterator<Item = Batching> {
        BATCHES.into_iter().map(Batching::Fixed).chain([Batching::Adaptive])
    }

    /// As the interconnect knows it.
    pub fn policy(self) -> Policy {
        match self {
            Batching::Fixed(packets) => Policy::fixed(packets),
            Batching::Adaptive => Policy::adaptive(),
        }
    }
}

/// How long things are measured, and how often.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effort {
    /// One trial.
    pub trial: Span,
    /// What of it is left out at its beginning.
    pub warm_up: Span,
    /// Rounds of the gain of batches.
    pub rounds: usize,
    /// Rounds of rates without a loss.
    pub rate_rounds: Rounds,
    /// Round trips of a hop.
    pub round_trips: usize,
    /// One trial of latency under a load: short, so that a round is over before the machine's mood changes.
    pub load_trial: Span,
    /// What of that is left out: longer than the adaptive policy takes to learn what each length of a message costs, in
    /// some thousand messages that are long. A node learns that once.
    pub load_warm_up: Span,
    /// Rounds of latency under a load: 99% of one trial's packets are at the mercy of a few pauses of the machine.
    pub load_rounds: Rounds,
    /// Rounds of latency by size, at one load.
    pub size_rounds: Rounds,
    /// The part to which a search knows the rate that is carried without loss.
    pub search_precision: f64,
}

impl Effort {
    /// For `--quick`: some seconds an interconnect.
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

    /// For results that are committed.
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

/// What a report calls an interconnect.
pub fn name(kind: TransportKind) -> &'static str {
    match kind {
        TransportKind::Lanes => "lanes",
        TransportKind::Windows(_) => "windows",
        TransportKind::RnicLanes => "rnic_lanes",
        TransportKind::RnicUdp(_) => "rnic_udp",
    }
}

/// A modelled link between two machines: PCIe generation 3 with 8 lanes through two bridges, as `crosslane bench
/// windows` has it.
pub const WINDOW_TIMING: fabric::timed::LinkTiming =
    fabric::timed::LinkTiming { one_way_ns: 500, bytes_per_us: 7_800, header_bytes: 24, payload_bytes_max: 256 };

/// All four kinds, in this machine.
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

    /// Two cores, or a line that says that there is one only.
    fn cores() -> Option<Cores> {
        Cores::find().inspect_err(|error| println!("skipped: {error}")).ok()
    }

    #[test]
    fn what_is_offered_arrives_by_every_kind_and_policy() {
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
            // Less than a queue holds: nothing is lost however long a node has to wait for its processor.
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
    fn a_flood_that_begins_when_it_was_to_be_over_ends() {
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
