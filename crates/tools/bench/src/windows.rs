//! `crosslane bench windows`: two nodes of this machine that are joined by emulated windows, compared with the direct
//! lane, kernel TCP, AF_UNIX and the floor; over a modelled link, compared with published figures; and a ping-pong
//! under background load from streams or CPU-bound programs.

mod instructions;
mod isolation;
mod plots;
mod published;
mod rack;
mod report;
mod text;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use machine::Machine;
use rack::{ProxyCounters, RackKind, RunningRack};
use serde::Serialize;
use stats::Latencies;

use crate::floors::{self, CacheLine};
use crate::launch::{Endpoints, Launcher, PairCounts, Transport};
use crate::probe::Probe;
use crate::progress::Progress;
use isolation::{ISOLATION_CASES, IsolationCell};
use report::Report;

/// Delay of the modelled link, one way.
const ONE_WAY_NS: f64 = 500.0;
/// Longest time that a sample may take in addition to the measurement.
const SLACK: Duration = Duration::from_secs(15);

/// The options of the benchmark.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Print one JSON document instead of tables.
    pub json: bool,
    /// Use fewer rounds and shorter samples.
    pub quick: bool,
    /// Folder for plots.
    pub plot: Option<PathBuf>,
}

/// Results of the proxy's engine in virtual time, and the command that counts its instructions; the caller provides
/// them.
#[derive(Clone, Debug, Serialize)]
pub struct Modelled {
    /// Assumptions of the simulation.
    pub assumptions: String,
    /// A ping-pong of 8 bytes, alone and with background streams.
    pub isolation: Vec<ModelledCase>,
    /// Arguments of this program with which two engines exchange short frames; their number follows.
    #[serde(skip)]
    pub work_arguments: Vec<String>,
}

/// One case in virtual time.
#[derive(Clone, Debug, Serialize)]
pub struct ModelledCase {
    /// The background load.
    pub case: &'static str,
    /// Median in nanoseconds.
    pub rtt_ns_p50: u64,
    /// 99th percentile in nanoseconds.
    pub rtt_ns_p99: u64,
    /// Ratio of the 99th percentile to that of the first case.
    pub p99_of_quiet: f64,
}

/// Runs the benchmark and prints the report. If a measurement failed, the report names it, and this returns an error.
pub fn main(options: &Options, modelled: Modelled) -> Result<()> {
    if let Some(directory) = &options.plot {
        std::fs::create_dir_all(directory)
            .with_context(|| format!("cannot make the plot directory {}", directory.display()))?;
    }
    let launcher = Launcher::new()?;
    let plan = Plan::of(options);
    let machine = Machine::describe(launcher.cores);
    let measured = measure(&launcher, &plan, &machine, &modelled)?;
    let report = Report::of(options, &plan, machine, measured, modelled);
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report).context("writing JSON")?);
    } else {
        print!("{}", report.text());
    }
    if let Some(directory) = &options.plot {
        for path in plots::write(directory, &report)? {
            eprintln!("crosslane: wrote {}", path.display());
        }
    }
    match report.failures.first() {
        None => Ok(()),
        Some(first) => bail!("{} of the measurements failed, first {first}", report.failures.len()),
    }
}

/// An experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Experiment {
    RoundTrip,
    TimedRoundTrip,
    Bulk,
}

/// The path of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum DataPath {
    DirectLane,
    WindowDirect,
    WindowProxy,
    KernelTcp,
    AfUnix,
}

impl DataPath {
    const fn title(self) -> &'static str {
        match self {
            Self::DirectLane => "direct lane",
            Self::WindowDirect => "window, direct",
            Self::WindowProxy => "window, proxies",
            Self::KernelTcp => "kernel TCP",
            Self::AfUnix => "AF_UNIX",
        }
    }
}

impl Experiment {
    const fn title(self) -> &'static str {
        match self {
            Self::RoundTrip => "round trip",
            Self::TimedRoundTrip => "round trip over gen3x16, 500 ns",
            Self::Bulk => "bulk",
        }
    }

    fn paths(self) -> &'static [DataPath] {
        match self {
            Self::TimedRoundTrip => &[DataPath::WindowDirect, DataPath::WindowProxy],
            _ => &[
                DataPath::DirectLane,
                DataPath::WindowDirect,
                DataPath::WindowProxy,
                DataPath::KernelTcp,
                DataPath::AfUnix,
            ],
        }
    }

    /// Returns the rack that a path needs in this experiment.
    fn kind(self, path: DataPath) -> Option<RackKind> {
        match (self, path) {
            (Self::TimedRoundTrip, DataPath::WindowDirect) => Some(RackKind::TimedDirect),
            (Self::TimedRoundTrip, DataPath::WindowProxy) => Some(RackKind::TimedProxy),
            (_, DataPath::WindowDirect) => Some(RackKind::Direct),
            (_, DataPath::WindowProxy) => Some(RackKind::Proxy),
            _ => None,
        }
    }
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const ROUND_TRIP_SIZES: [u64; 9] = [8, 48, 256, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB];
const TIMED_SIZES: [u64; 4] = [8, 48, KIB, 4 * KIB];
const BULK_SIZES: [u64; 6] = [KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB];

/// What to measure, how long and how often.
struct Plan {
    points: Vec<(Experiment, u64)>,
    rounds: u32,
    sample_ms: u64,
    floor_ms: u64,
    /// More rounds under background load, because p99 differs most between rounds: the machine interrupts one round
    /// trip in a hundred.
    isolation_rounds: u32,
    isolation_ms: u64,
    counts_instructions: bool,
}

impl Plan {
    fn of(options: &Options) -> Self {
        let at = |experiment, sizes: &[u64]| sizes.iter().map(|size| (experiment, *size)).collect::<Vec<_>>();
        let points = [
            at(Experiment::RoundTrip, &ROUND_TRIP_SIZES),
            at(Experiment::TimedRoundTrip, &TIMED_SIZES),
            at(Experiment::Bulk, &BULK_SIZES),
        ];
        let (rounds, sample_ms) = if options.quick { (2, 60) } else { (5, 150) };
        let (isolation_rounds, isolation_ms) = if options.quick { (2, 200) } else { (15, 500) };
        let (points, floor_ms, counts_instructions) = (points.concat(), 4, true);
        Self { points, rounds, sample_ms, floor_ms, isolation_rounds, isolation_ms, counts_instructions }
    }

    fn steps(&self) -> u64 {
        let samples: usize = self.points.iter().map(|(experiment, _)| experiment.paths().len()).sum();
        samples as u64 * u64::from(self.rounds) + ISOLATION_CASES.len() as u64 * u64::from(self.isolation_rounds)
    }
}

/// A sample of one path at one point in one round.
struct Sample {
    latencies: Option<Latencies>,
    bytes_per_s: Option<f64>,
    line: Option<CacheLine>,
    /// Rate at which one core copies into a mapping in pieces of this size, in bytes a second.
    mapping: Option<f64>,
}

/// All rounds of one path at one point.
struct Cell {
    experiment: Experiment,
    size_bytes: u64,
    path: DataPath,
    rounds: Vec<Sample>,
}

/// A sample that failed. Its path is not tried again in that experiment.
struct Failure {
    what: String,
    experiment: Experiment,
    path: DataPath,
}

/// All measurements.
struct Measured {
    cells: Vec<Cell>,
    isolation: Vec<IsolationCell>,
    counts: Vec<ProxyCounters>,
    /// Instructions for a short frame, sent and received, or the reason why they were not counted.
    instructions: Result<f64, String>,
    syscalls_ns: Vec<f64>,
    /// Racks that are not available, and why.
    missing: Vec<(RackKind, String)>,
    failures: Vec<Failure>,
    other_failures: Vec<String>,
    /// Counts of all pairs of programs by how they ended.
    pairs: PairCounts,
}

impl Measured {
    /// Returns the failure because of which a path is not tried again.
    fn failure(&self, experiment: Experiment, path: DataPath) -> Option<&Failure> {
        self.failures.iter().find(|failure| (failure.experiment, failure.path) == (experiment, path))
    }

    /// Returns why a path has no figures, or not those of all rounds.
    fn why_missing(&self, experiment: Experiment, path: DataPath) -> Option<String> {
        let wanted = experiment.kind(path);
        let is_not_there = self.missing.iter().find(|(kind, _)| Some(*kind) == wanted).map(|(_, why)| why.clone());
        is_not_there.or_else(|| self.failure(experiment, path).map(|failure| failure.what.clone()))
    }

    /// Discards the figures of programs that should have written windows themselves, if proxies have carried their
    /// bytes.
    fn check_direct(&mut self, kind: RackKind, counts: &[ProxyCounters]) {
        if counts.iter().all(|proxy| proxy.bytes_sent == 0) {
            return;
        }
        self.missing.push((kind, "the proxies of the nodes forwarded the programs' bytes".to_owned()));
        let is_of_kind = |cell: &&mut Cell| cell.experiment.kind(cell.path) == Some(kind);
        self.cells.iter_mut().filter(is_of_kind).for_each(|cell| cell.rounds.clear());
    }
}

fn measure(launcher: &Launcher, plan: &Plan, machine: &Machine, modelled: &Modelled) -> Result<Measured> {
    let cell = |&(experiment, size_bytes): &(Experiment, u64)| {
        experiment.paths().iter().map(move |&path| Cell { experiment, size_bytes, path, rounds: Vec::new() })
    };
    let mut measured = Measured {
        cells: plan.points.iter().flat_map(cell).collect(),
        isolation: ISOLATION_CASES.map(IsolationCell::new).into(),
        counts: Vec::new(),
        instructions: Err("not requested".to_owned()),
        syscalls_ns: Vec::new(),
        missing: Vec::new(),
        failures: Vec::new(),
        other_failures: Vec::new(),
        pairs: PairCounts::default(),
    };
    let mut progress = Progress::new(plan.steps());
    if let Some(warning) = machine.busy_warning() {
        progress.warn(&warning);
    }
    measure_paths(launcher, plan, &mut measured, &mut progress)?;
    isolation::measure(launcher, plan, &mut measured, &mut progress);
    if plan.counts_instructions {
        progress.step("instructions", "of a frame");
        measured.instructions = instructions::per_frame(modelled).map_err(|error| format!("{error:#}"));
    }
    measured.pairs = launcher.pair_counts();
    Ok(measured)
}

/// Brings up racks, and notes which are not available.
fn bring_up(
    launcher: &Launcher,
    kinds: &[RackKind],
    measured: &mut Measured,
    progress: &Progress,
) -> Vec<(RackKind, RunningRack)> {
    let mut racks = Vec::new();
    for &kind in kinds {
        match RunningRack::up(launcher, kind) {
            Ok(rack) => match rack.missing.clone() {
                Some(why) => measured.missing.push((kind, why)),
                None => racks.push((kind, rack)),
            },
            Err(error) => {
                progress.warn(&format!("{error:#}"));
                measured.other_failures.push(format!("{error:#}"));
            }
        }
    }
    racks
}

/// Measures every path alone, at every size.
fn measure_paths(launcher: &Launcher, plan: &Plan, measured: &mut Measured, progress: &mut Progress) -> Result<()> {
    let kinds = [RackKind::Proxy, RackKind::Direct, RackKind::TimedProxy, RackKind::TimedDirect];
    let racks = bring_up(launcher, &kinds, measured, progress);
    for round in 1..=plan.rounds {
        measured.syscalls_ns.push(floors::syscall_ns_p50(launcher, plan.floor_ms)?);
        take_round(launcher, plan, &racks, round, measured, progress)?;
    }
    for (kind, rack) in &racks {
        let counts = rack.counts()?;
        match kind {
            RackKind::Proxy => measured.counts = counts,
            RackKind::Direct | RackKind::TimedDirect => measured.check_direct(*kind, &counts),
            _ => {}
        }
    }
    Ok(())
}

fn take_round(
    launcher: &Launcher,
    plan: &Plan,
    racks: &[(RackKind, RunningRack)],
    round: u32,
    measured: &mut Measured,
    progress: &mut Progress,
) -> Result<()> {
    let mapping = floors::mapping(launcher, 6 * plan.floor_ms)?;
    for index in 0..measured.cells.len() {
        let Cell { experiment, size_bytes, path, .. } = measured.cells[index];
        let stage = format!("round {round} of {}: {}", plan.rounds, experiment.title());
        progress.step(&stage, &format!("{} by {}", units::size(size_bytes), path.title()));
        if measured.failure(experiment, path).is_some() {
            continue;
        }
        let Some(endpoints) = endpoints(launcher, racks, path, experiment.kind(path)) else { continue };
        let line = floors::cache_line(launcher, plan.floor_ms)?;
        match take_sample(launcher, plan, &endpoints, experiment, size_bytes) {
            Ok((latencies, bytes_per_s)) => {
                let mapping = mapping.iter().find(|(bytes, _)| *bytes == size_bytes).map(|(_, rate)| *rate);
                measured.cells[index].rounds.push(Sample { latencies, bytes_per_s, line, mapping });
            }
            Err(error) => {
                let size = units::size(size_bytes);
                let what = format!("{} of {size} by {}, round {round}: {error:#}", experiment.title(), path.title());
                progress.warn(&format!("failed: {what}"));
                measured.failures.push(Failure { what, experiment, path });
            }
        }
    }
    Ok(())
}

/// Returns the endpoints of a path in the rack that it needs; `None` if that is not available.
fn endpoints(
    launcher: &Launcher,
    racks: &[(RackKind, RunningRack)],
    path: DataPath,
    kind: Option<RackKind>,
) -> Option<Endpoints> {
    if let Some(wanted) = kind {
        return racks.iter().find(|(kind, _)| *kind == wanted).map(|(_, rack)| rack.endpoints());
    }
    let transport = match path {
        DataPath::KernelTcp => Transport::KernelTcp,
        DataPath::AfUnix => Transport::AfUnix,
        _ => Transport::Crosslane,
    };
    Some(launcher.endpoints(transport))
}

type Found = (Option<Latencies>, Option<f64>);

fn take_sample(
    launcher: &Launcher,
    plan: &Plan,
    endpoints: &Endpoints,
    experiment: Experiment,
    size: u64,
) -> Result<Found> {
    let (size, milliseconds) = (size.to_string(), plan.sample_ms.to_string());
    let limit = Duration::from_millis(2 * plan.sample_ms) + SLACK;
    if experiment == Experiment::Bulk {
        let args = ["blocking", "bulk", &size, &milliseconds];
        let pair = launcher.start(endpoints, Probe::Stream, &args, &args)?.finish(limit)?;
        return Ok((None, Some(pair.server.per_second("bytes")?)));
    }
    let args = ["blocking", &size, &milliseconds];
    let pair = launcher.start(endpoints, Probe::RoundTrip, &args[..2], &args)?.finish(limit)?;
    Ok((Some(pair.client.latencies()?), None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plan_covers_the_sizes_from_a_word_to_a_megabyte() {
        let plan = Plan::of(&Options::default());
        let sizes = |wanted| plan.points.iter().filter(move |(found, _)| *found == wanted).map(|(_, size)| *size);
        assert_eq!((sizes(Experiment::RoundTrip).min(), sizes(Experiment::RoundTrip).max()), (Some(8), Some(MIB)));
        assert!(sizes(Experiment::TimedRoundTrip).eq(TIMED_SIZES) && sizes(Experiment::Bulk).eq(BULK_SIZES));
        assert!(plan.rounds > Plan::of(&Options { quick: true, ..Options::default() }).rounds);
    }

    #[test]
    fn a_failed_path_has_its_reason_in_every_row_and_the_others_have_figures() {
        let launcher = Launcher::with_wrapper("false").unwrap();
        let points = vec![(Experiment::RoundTrip, 8), (Experiment::RoundTrip, 48)];
        let (rounds, isolation_rounds) = (2, 2);
        let (sample_ms, floor_ms, isolation_ms, counts_instructions) = (5, 1, 5, false);
        let plan = Plan { points, rounds, sample_ms, floor_ms, isolation_rounds, isolation_ms, counts_instructions };
        let modelled = Modelled { assumptions: String::new(), isolation: Vec::new(), work_arguments: Vec::new() };
        let machine = Machine::describe(launcher.cores);
        let measured = measure(&launcher, &plan, &machine, &modelled).unwrap();
        assert_eq!(measured.pairs.servers_failed, 1, "tried once: {:?}", measured.pairs);
        let report = Report::of(&Options::default(), &plan, machine, measured, modelled);
        for row in &report.rows {
            match row.path {
                DataPath::DirectLane => assert!(row.missing.as_deref().is_some_and(|why| why.contains("`false "))),
                DataPath::KernelTcp | DataPath::AfUnix => assert_eq!((row.rounds, &row.missing), (2, &None)),
                _ => assert_eq!(row.rounds, 0),
            }
        }
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["pairs"]["servers_failed"], 1);
        let text = report.text();
        assert!(text.contains("1 servers failed") && text.contains("direct lane, round trip: 0 of 2 rounds"), "{text}");
    }
}
