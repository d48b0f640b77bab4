//! Benchmark of the forwarding core: how many packets one core receives, parses, checks, looks up in a full table,
//! rewrites and queues for transmission, with ports in memory; the cost of each stage; and the highest rate without a
//! loss.
//!
//! All times are *measured* in the calling process, on one thread. They include the work of the ports: allocating
//! buffers and writing headers into them on reception, and freeing them after transmission. A figure is the median over
//! its rounds; the best round is reported next to it. Sizes are those of Ethernet frames with the frame check sequence
//! of 4 B, which is not stored in memory.

mod churn;
mod instructions;
mod router;
mod zero_loss;

use std::time::Instant;

use ::router::port::memory::Destinations;
use ::router::{Stage, StageProbe};
use serde::Serialize;

use crate::statistics::Rounds;
use crate::table::Table;
pub use churn::{Churn, churn};
pub use instructions::{StageInstructions, WORK_STAGES, instructions, work};
pub use router::{Error, Router};
pub use zero_loss::{Trials, ZeroLoss, zero_loss};

/// Bytes of a frame check sequence.
const FCS_BYTES: usize = 4;

/// Bytes of preamble, start delimiter and interframe gap, which a frame occupies on a wire in addition to itself.
const WIRE_BYTES: usize = 20;

/// The frame sizes of RFC 2544, section 9.1.
pub const SIZES: [usize; 7] = [64, 128, 256, 512, 1024, 1280, 1518];

/// IMIX, a simple mix of Internet packet sizes: seven small packets, four of 576 B and one of 1500 B of IP, as frame
/// sizes.
pub const IMIX: [usize; 12] = [64, 64, 594, 64, 64, 594, 64, 1518, 64, 594, 64, 594];

/// What a run measures.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The seed of tables and destinations.
    pub seed: u64,
    /// The number of IPv4 routes.
    pub routes_v4: usize,
    /// The number of IPv6 routes.
    pub routes_v6: usize,
    /// The rounds of each figure.
    pub rounds: usize,
    /// The packets of a round.
    pub packets: usize,
    /// The lengths of the trials of the zero-loss search.
    pub trials: Trials,
}

impl Options {
    /// The options of the committed results: about two minutes.
    pub fn full() -> Options {
        let (routes_v4, routes_v6) = (900_000, 200_000);
        let trials = Trials { short_ms: 100, long_ms: 2_000 };
        Options { seed: 1, routes_v4, routes_v6, rounds: 31, packets: 1 << 20, trials }
    }

    /// The same tables with fewer rounds: a few seconds.
    pub fn quick() -> Options {
        Options { rounds: 11, packets: 1 << 18, trials: Trials { short_ms: 30, long_ms: 100 }, ..Options::full() }
    }
}

/// The parts that a run measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Each kind of traffic, and the highest rates without a loss.
    pub forwards: bool,
    /// Forwarding while routes change.
    pub churns: bool,
}

impl Parts {
    /// Both parts.
    pub const ALL: Parts = Parts { forwards: true, churns: true };
}

/// The results of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Results {
    /// The number of IPv4 routes in the tables.
    pub routes_v4: usize,
    /// The number of IPv6 routes in the tables.
    pub routes_v6: usize,
    /// The time to build the tables through announcements, in ms.
    pub build_ms: f64,
    /// Each kind of traffic.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cases: Vec<Case>,
    /// The highest rate without a loss, for each size.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub zero_loss: Vec<ZeroLoss>,
    /// Forwarding while routes change.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub churn: Vec<Churn>,
}

impl Results {
    /// Returns the rate of one core in millions of packets a second: IPv4, 64 B, full table, 4,000 destinations.
    pub fn core_mpps_64b(&self) -> Option<f64> {
        let is_it = |case: &&Case| case.version == 4 && case.size == "64" && case.destinations == DESTINATIONS_FEW;
        self.cases.iter().find(is_it).map(|case| case.mpps.median)
    }
}

/// One kind of traffic.
#[derive(Clone, Debug, Serialize)]
pub struct Case {
    /// 4 or 6.
    pub version: u8,
    /// The size of a frame in bytes, or `IMIX`.
    pub size: String,
    /// The number of different random destinations, used round robin.
    pub destinations: usize,
    /// Millions of packets a second.
    pub mpps: Rounds,
    /// The rate on an Ethernet wire, with preambles and gaps, at the median.
    pub wire_gbit_per_s: f64,
    /// The cost of each stage, the median over separate rounds. Reading the clock once a vector makes their sum
    /// slightly larger than the cost of a packet.
    pub stages: Vec<StageCost>,
}

/// The cost of one stage.
#[derive(Clone, Debug, Serialize)]
pub struct StageCost {
    /// The name of the stage.
    pub stage: &'static str,
    /// Nanoseconds for each packet.
    pub ns_per_packet: f64,
}

/// Few enough destinations that the table entries they use stay in the second-level cache; the minimum that the
/// successors of RFC 2544 ask for.
pub const DESTINATIONS_FEW: usize = 4_000;

/// More destinations than any cache holds table entries for.
pub const DESTINATIONS_MANY: usize = 1_000_000;

/// The results for a table that a user provides.
#[derive(Clone, Debug, Serialize)]
pub struct CoreTableResults {
    /// The time to build the tables through announcements, in ms.
    pub build_ms: f64,
    /// Rates for packets of 64 B, by family and number of destinations.
    pub cases: Vec<Case>,
    /// The highest rates without a loss, by family.
    pub zero_loss: Vec<ZeroLoss>,
}

/// Returns the number of steps that [`run`] reports.
pub fn steps(parts: Parts) -> u64 {
    let forwarding = if parts.forwards { cases().len() + SEARCHES } else { 0 };
    let churn = if parts.churns { churn::RATES_PER_S.len() } else { 0 };
    (1 + forwarding + churn) as u64
}

/// Returns each kind of traffic: IP version, sizes, number of destinations.
fn cases() -> Vec<(u8, Vec<usize>, usize)> {
    let few = |version: u8, sizes: Vec<usize>| (version, sizes, DESTINATIONS_FEW);
    let of_v4 = SIZES.iter().map(|size| few(4, vec![*size]));
    let others = [few(4, IMIX.to_vec()), few(6, vec![64]), few(6, vec![1518])];
    let many = [4, 6].map(|version| (version, vec![64], DESTINATIONS_MANY));
    of_v4.chain(others).chain(many).collect()
}

/// Returns the traffic for which the highest rate without a loss is searched: IP version and sizes. Adjacent entries
/// have about the same rate.
fn searched() -> [(u8, Vec<usize>); SEARCHES] {
    let [a, b, c, d, e, f, g] = SIZES.map(|size| (4, vec![size]));
    [a, b, c, d, e, f, g, (4, IMIX.to_vec()), (6, vec![64]), (6, IMIX.to_vec())]
}

const SEARCHES: usize = SIZES.len() + 3;

/// Measures with generated tables; `step` is called with the name of each step that begins.
///
/// # Errors
/// Fails if there is no memory for the tables, or if a packet that should have been forwarded was not.
pub fn run(options: &Options, parts: Parts, step: &mut dyn FnMut(&str)) -> Result<Results, Error> {
    step("tables");
    let begin = Instant::now();
    let mut router = Router::new(options.seed, options.routes_v4, options.routes_v6)?;
    let build_ms = begin.elapsed().as_secs_f64() * 1e3;
    let (routes_v4, routes_v6) = router.routes();
    let mut found = Results { routes_v4, routes_v6, build_ms, cases: vec![], zero_loss: vec![], churn: vec![] };
    let few_v4 = router.destinations_v4(options.seed, DESTINATIONS_FEW);
    if parts.forwards {
        for (version, sizes, count) in cases() {
            step(&format!("IPv{version}, {} B, {count} destinations", name_of(&sizes)));
            let destinations = destinations(&router, options.seed, version, count)?;
            found.cases.push(case(&mut router, options, &sizes, &destinations)?);
        }
        let mut first_share = zero_loss::FIRST_SHARE;
        for (version, sizes) in searched() {
            step(&format!("the highest rate without a loss, IPv{version}, {} B", name_of(&sizes)));
            let few = destinations(&router, options.seed, version, DESTINATIONS_FEW)?;
            let (row, share) = zero_loss(&mut router, &sizes, &few, options.trials, first_share)?;
            found.zero_loss.push(row);
            first_share = share;
        }
    }
    if parts.churns {
        for changes_per_s in churn::RATES_PER_S {
            step(&match changes_per_s {
                Some(rate) => format!("{rate} route changes a second"),
                None => "route changes at full speed".to_owned(),
            });
            found.churn.push(churn(&mut router, options, &few_v4, changes_per_s)?);
        }
    }
    Ok(found)
}

/// Returns the number of steps that [`run_table`] reports.
pub fn steps_of_table(table: &Table) -> u64 {
    1 + 3 * u64::from(!table.v4.is_empty()) + 3 * u64::from(!table.v6.is_empty())
}

/// Measures packets of 64 B with this table; `step` is called with the name of each step that begins.
///
/// # Errors
/// Fails if the tables have no room, or if a packet that should have been forwarded was not.
pub fn run_table(options: &Options, table: &Table, step: &mut dyn FnMut(&str)) -> Result<CoreTableResults, Error> {
    step("core: tables");
    let begin = Instant::now();
    let mut router = Router::with_table(options.seed, table.clone())?;
    let mut found =
        CoreTableResults { build_ms: begin.elapsed().as_secs_f64() * 1e3, cases: Vec::new(), zero_loss: Vec::new() };
    let versions: Vec<u8> =
        [4, 6].into_iter().zip(router.has_routes()).filter_map(|(version, has)| has.then_some(version)).collect();
    for version in versions {
        for count in [DESTINATIONS_FEW, DESTINATIONS_MANY] {
            step(&format!("core: IPv{version}, {count} destinations"));
            let destinations = destinations(&router, options.seed, version, count)?;
            found.cases.push(case(&mut router, options, &[64], &destinations)?);
        }
        step(&format!("core: the highest rate without a loss, IPv{version}"));
        let few = destinations(&router, options.seed, version, DESTINATIONS_FEW)?;
        found.zero_loss.push(zero_loss(&mut router, &[64], &few, options.trials, zero_loss::FIRST_SHARE)?.0);
    }
    Ok(found)
}

/// Returns random addresses to which a router forwards packets.
fn destinations(router: &Router, seed: u64, version: u8, count: usize) -> Result<Destinations, Error> {
    let found = if version == 4 { router.destinations_v4(seed, count) } else { router.destinations_v6(seed, count) };
    let is_empty = match &found {
        Destinations::V4(addresses) => addresses.is_empty(),
        Destinations::V6(addresses) => addresses.is_empty(),
    };
    if is_empty { Err(Error::Nowhere(version)) } else { Ok(found) }
}

/// Measures one kind of traffic.
///
/// # Errors
/// Fails if a packet was not forwarded.
pub fn case(
    router: &mut Router,
    options: &Options,
    sizes: &[usize],
    destinations: &Destinations,
) -> Result<Case, Error> {
    let mut traffic = router.traffic(sizes, destinations.clone());
    traffic.forward(options.packets, &mut ())?;
    let mut rates = Vec::with_capacity(options.rounds);
    for _ in 0..options.rounds {
        let begin = Instant::now();
        traffic.forward(options.packets, &mut ())?;
        rates.push(options.packets as f64 / begin.elapsed().as_secs_f64() / 1e6);
    }
    let mut clock = Clock::default();
    let mut costs: Vec<[f64; STAGES]> = Vec::with_capacity(options.rounds);
    for _ in 0..options.rounds {
        clock.start();
        traffic.forward(options.packets, &mut clock)?;
        costs.push(clock.spent_ns.map(|ns| ns / options.packets as f64));
    }
    let mpps = Rounds::of_rates(rates);
    let mean_bytes = sizes.iter().sum::<usize>() as f64 / sizes.len() as f64;
    let count = match destinations {
        Destinations::V4(addresses) => addresses.len(),
        Destinations::V6(addresses) => addresses.len(),
    };
    let median_of = |stage: usize| Rounds::of_times(costs.iter().map(|costs| costs[stage]).collect()).median;
    Ok(Case {
        version: version_of(destinations),
        size: name_of(sizes),
        destinations: count,
        mpps,
        wire_gbit_per_s: mpps.median * (mean_bytes + WIRE_BYTES as f64) * 8.0 / 1e3,
        stages: (0..STAGES).map(|at| StageCost { stage: STAGE_NAMES[at], ns_per_packet: median_of(at) }).collect(),
    })
}

fn version_of(destinations: &Destinations) -> u8 {
    if matches!(destinations, Destinations::V4(_)) { 4 } else { 6 }
}

pub(crate) fn name_of(sizes: &[usize]) -> String {
    match sizes {
        [size] => size.to_string(),
        _ => "IMIX".to_owned(),
    }
}

const STAGES: usize = 6;

/// The stages in the order in which a packet passes them: reception by the port, four stages of the forwarder,
/// transmission by the port.
const STAGE_NAMES: [&str; STAGES] = ["receive", "parse and check", "look up", "rewrite", "hand over", "transmit"];

/// Measures the time spent in each stage.
#[derive(Default)]
struct Clock {
    last: Option<Instant>,
    spent_ns: [f64; STAGES],
}

impl Clock {
    fn start(&mut self) {
        *self = Clock { last: Some(Instant::now()), spent_ns: [0.0; STAGES] };
    }

    fn lap(&mut self, stage: usize) {
        let now = Instant::now();
        if let Some(last) = self.last.replace(now) {
            self.spent_ns[stage] += now.duration_since(last).as_nanos() as f64;
        }
    }
}

/// A stage probe that is also called for the stages of the ports.
pub trait PortProbe: StageProbe {
    /// Called when a vector has been received.
    fn received(&mut self) {}
    /// Called when all output queues are empty.
    fn transmitted(&mut self) {}
}

impl PortProbe for () {}

impl PortProbe for Clock {
    fn received(&mut self) {
        self.lap(0);
    }

    fn transmitted(&mut self) {
        self.lap(5);
    }
}

impl StageProbe for Clock {
    fn mark(&mut self, stage: Stage, _packets: usize) {
        match stage {
            Stage::Parse => self.lap(1),
            Stage::Lookup => self.lap(2),
            Stage::Rewrite => self.lap(3),
            // No packet of a benchmark takes the slow path.
            Stage::Enqueue | Stage::Slow => self.lap(4),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Trials = Trials { short_ms: 1, long_ms: 2 };

    /// Small tables and few packets: a test checks correctness, which does not depend on size, and measures nothing.
    fn small() -> Options {
        Options { seed: 3, routes_v4: 2_000, routes_v6: 500, rounds: 3, packets: 2_000, trials: SHORT }
    }

    #[test]
    fn every_packet_of_every_case_is_forwarded() {
        let options = small();
        let mut router = Router::new(options.seed, options.routes_v4, options.routes_v6).expect("tables");
        let cases = [(router.destinations_v4(1, 500), 64), (router.destinations_v6(1, 500), 64)];
        for (destinations, size) in cases {
            let case = case(&mut router, &options, &[size], &destinations).expect("all are forwarded");
            assert_eq!((case.destinations, case.stages.len()), (500, STAGES));
            assert!(case.mpps.best >= case.mpps.median && case.mpps.median > 0.0, "{case:?}");
            let sum: f64 = case.stages.iter().map(|stage| stage.ns_per_packet).sum();
            assert!(sum > 0.0 && case.stages[2].ns_per_packet > 0.0, "{case:?}");
        }
        let destinations = router.destinations_v4(1, 500);
        let imix = case(&mut router, &options, &IMIX, &destinations).expect("all are forwarded");
        assert_eq!(imix.size, "IMIX");
    }

    #[test]
    fn a_user_table_is_measured_for_the_families_that_it_has() {
        let options = Options { routes_v4: 0, routes_v6: 300, packets: 500, ..small() };
        let (table, mut steps) = (Table::generated(3, 0, 300), 0);
        let found = run_table(&options, &table, &mut |_| steps += 1).expect("all are forwarded");
        assert_eq!(steps, steps_of_table(&table));
        assert!(found.cases.iter().all(|case| case.version == 6 && case.mpps.median > 0.0), "{found:?}");
        assert_eq!((found.cases.len(), found.zero_loss.len()), (2, 1));
        let mut nowhere = Table::default();
        for prefix in ["224.0.0.0/4", "169.254.0.0/16"] {
            nowhere.v4.push(prefix.parse().expect("a prefix"));
        }
        let error = run_table(&options, &nowhere, &mut |_| ()).expect_err("nowhere to go").to_string();
        assert_eq!(error, "no IPv4 route covers an address that a router forwards to; use other routes");
    }

    #[test]
    fn parts_are_measured_alone_and_report_their_steps() {
        let options = Options { rounds: 1, packets: 500, ..small() };
        let both = [(true, true), (true, false), (false, true)];
        for parts in both.map(|(forwards, churns)| Parts { forwards, churns }) {
            let mut begun = Vec::new();
            let found = run(&options, parts, &mut |what| begun.push(what.to_owned())).expect("all are forwarded");
            assert_eq!(begun.len() as u64, steps(parts), "{begun:?}");
            assert_eq!((found.cases.len(), found.zero_loss.len()), if parts.forwards { (12, 10) } else { (0, 0) });
            assert_eq!(found.churn.len(), if parts.churns { 4 } else { 0 });
            let json = serde_json::to_value(&found).expect("JSON");
            assert_eq!((json.get("cases").is_some(), json.get("churn").is_some()), (parts.forwards, parts.churns));
        }
    }

    #[test]
    fn a_packet_that_is_not_forwarded_is_an_error_and_not_a_figure() {
        let options = small();
        let mut router = Router::new(options.seed, options.routes_v4, options.routes_v6).expect("tables");
        let nowhere = Destinations::V4(vec![0x7f00_0001]);
        let error = case(&mut router, &options, &[64], &nowhere).expect_err("a martian goes nowhere");
        assert_eq!(error.to_string(), "2000 packets went in and 0 came out: martian destination 2000");
    }
}
