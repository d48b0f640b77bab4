//! `crosslane bench windows`: two nodes of this machine that are joined by emulated windows, compared with the direct
//! lane, kernel TCP, AF_UNIX and the floor; over a modelled link, compared with published figures; and a ping-pong
//! under background load from streams or CPU-bound programs.

mod plots;
mod published;
mod rack;
mod report;
mod text;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::floors::{self, CacheLine};
use crate::launch::{Endpoints, Launcher, PairCounts, Transport};
use crate::probe::Probe;
use crate::process::ChildGuard;
use crate::progress::Progress;
use machine::Machine;
use rack::{ProxyCounters, RackKind, RunningRack};
use report::Report;
use stats::Latencies;

/// Delay of the modelled link, one way.
const ONE_WAY_NS: f64 = 500.0;
/// Number of streams of the background load, as an argument.
const STREAMS: &str = "8";
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
    let report = Report::of(options, &plan, machine, measured, modelled)?;
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

/// A ping-pong under background load.
#[derive(Clone, Copy, Debug)]
struct IsolationCase {
    path: DataPath,
    /// The rack that the path needs.
    kind: Option<RackKind>,
    title: &'static str,
    load: BackgroundLoad,
}

/// The background load of a ping-pong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BackgroundLoad {
    None,
    /// Streams over the same path.
    Streams,
    /// CPU-bound programs: how many for each core, with which nice value.
    CpuBound {
        per_core: usize,
        nice: i32,
    },
}

impl IsolationCase {
    const fn quiet(path: DataPath, kind: Option<RackKind>) -> Self {
        Self { path, kind, title: "quiet", load: BackgroundLoad::None }
    }

    const fn streams(path: DataPath, kind: Option<RackKind>, title: &'static str) -> Self {
        Self { path, kind, title, load: BackgroundLoad::Streams }
    }

    const fn cpu_bound(path: DataPath, kind: Option<RackKind>) -> Self {
        let load = BackgroundLoad::CpuBound { per_core: 1, nice: 0 };
        Self { path, kind, title: "a busy loop for each core", load }
    }

    const fn cpu_bound_nice(path: DataPath, kind: Option<RackKind>) -> Self {
        let load = BackgroundLoad::CpuBound { per_core: 2, nice: 10 };
        Self { path, kind, title: "two busy loops for each core, nice 10", load }
    }
}

const ISOLATION_CASES: [IsolationCase; 14] = [
    IsolationCase::quiet(DataPath::WindowProxy, Some(RackKind::Proxy)),
    IsolationCase::streams(DataPath::WindowProxy, Some(RackKind::Unsliced), "8 streams and 1 unread, slicing off"),
    IsolationCase::streams(DataPath::WindowProxy, Some(RackKind::Sliced), "8 streams and 1 unread, slicing on"),
    IsolationCase::streams(
        DataPath::WindowProxy,
        Some(RackKind::Proxy),
        "8 streams and 1 unread, slicing and classes on",
    ),
    IsolationCase::cpu_bound(DataPath::WindowProxy, Some(RackKind::Proxy)),
    IsolationCase::cpu_bound_nice(DataPath::WindowProxy, Some(RackKind::Proxy)),
    IsolationCase::quiet(DataPath::WindowDirect, Some(RackKind::Direct)),
    IsolationCase::streams(DataPath::WindowDirect, Some(RackKind::Direct), "8 streams and 1 unread"),
    IsolationCase::cpu_bound(DataPath::WindowDirect, Some(RackKind::Direct)),
    IsolationCase::cpu_bound_nice(DataPath::WindowDirect, Some(RackKind::Direct)),
    IsolationCase::quiet(DataPath::KernelTcp, None),
    IsolationCase::streams(DataPath::KernelTcp, None, "8 streams and 1 unread"),
    IsolationCase::cpu_bound(DataPath::KernelTcp, None),
    IsolationCase::cpu_bound_nice(DataPath::KernelTcp, None),
];

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

/// All rounds of one case of background load.
struct IsolationCell {
    case: IsolationCase,
    rounds: Vec<Latencies>,
    /// Rates of the streams in bytes a second.
    streams: Vec<f64>,
    /// Number of rounds that failed.
    failed: usize,
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
        isolation: ISOLATION_CASES
            .map(|case| IsolationCell { case, rounds: Vec::new(), streams: Vec::new(), failed: 0 })
            .into(),
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
    {
        let kinds = [RackKind::Proxy, RackKind::Direct, RackKind::TimedProxy, RackKind::TimedDirect];
        let racks = bring_up(launcher, &kinds, &mut measured, &progress);
        for round in 1..=plan.rounds {
            measured.syscalls_ns.push(floors::syscall_ns_p50(launcher, plan.floor_ms)?);
            take_round(launcher, plan, &racks, round, &mut measured, &mut progress)?;
        }
        for (kind, rack) in &racks {
            let counts = rack.counts()?;
            match kind {
                RackKind::Proxy => measured.counts = counts,
                RackKind::Direct | RackKind::TimedDirect => measured.check_direct(*kind, &counts),
                _ => {}
            }
        }
    }
    {
        let racks = bring_up(
            launcher,
            &[RackKind::Proxy, RackKind::Unsliced, RackKind::Sliced, RackKind::Direct],
            &mut measured,
            &progress,
        );
        for round in 1..=plan.isolation_rounds {
            measure_isolation(launcher, plan, &racks, round, &mut measured, &mut progress);
        }
    }
    if plan.counts_instructions {
        progress.step("instructions", "of a frame");
        measured.instructions = instructions(modelled).map_err(|error| format!("{error:#}"));
    }
    measured.pairs = launcher.pair_counts();
    Ok(measured)
}

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
        let Some(endpoints) = endpoints(launcher, racks, experiment, path) else { continue };
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

/// Returns the endpoints of a path; `None` if its rack is not available.
fn endpoints(
    launcher: &Launcher,
    racks: &[(RackKind, RunningRack)],
    experiment: Experiment,
    path: DataPath,
) -> Option<Endpoints> {
    endpoints_for(launcher, racks, path, experiment.kind(path))
}

/// Returns the endpoints of a path in the rack that it needs.
fn endpoints_for(
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

fn measure_isolation(
    launcher: &Launcher,
    plan: &Plan,
    racks: &[(RackKind, RunningRack)],
    round: u32,
    measured: &mut Measured,
    progress: &mut Progress,
) {
    for cell in &mut measured.isolation {
        let IsolationCase { path, kind, title, load } = cell.case;
        let stage = format!("round {round} of {}: background load", plan.isolation_rounds);
        progress.step(&stage, &format!("{title}, {}", path.title()));
        let Some(endpoints) = endpoints_for(launcher, racks, path, kind) else { continue };
        match ping_pong_under_load(launcher, plan, &endpoints, load) {
            Ok((latencies, streams)) => {
                cell.rounds.push(latencies);
                cell.streams.extend(streams);
            }
            Err(error) => {
                let what = format!("ping-pong by {}, {title}, round {round}: {error:#}", path.title());
                progress.warn(&format!("failed: {what}"));
                measured.other_failures.push(what);
                cell.failed += 1;
            }
        }
    }
}

/// Runs a ping-pong of 8 bytes under background load, and returns its latencies and the rate of the streams.
fn ping_pong_under_load(
    launcher: &Launcher,
    plan: &Plan,
    endpoints: &Endpoints,
    background: BackgroundLoad,
) -> Result<(Latencies, Option<f64>)> {
    // The streams must last longer than the ping-pong with its start, warm-up and measurement.
    let limit = Duration::from_millis(4 * plan.isolation_ms) + SLACK;
    let load_ms = (2 * plan.isolation_ms + 1000).to_string();
    let mut load = match background {
        BackgroundLoad::Streams => Some(launcher.start(endpoints, Probe::Load, &[STREAMS], &[STREAMS, &load_ms])?),
        _ => None,
    };
    if let Some(load) = &mut load {
        load.client_line("loading", SLACK)?;
    }
    let _busy_loops = match background {
        BackgroundLoad::CpuBound { per_core, nice } => busy_loops(per_core, nice)?,
        _ => Vec::new(),
    };
    let milliseconds = plan.isolation_ms.to_string();
    let args = ["blocking", "8", &milliseconds];
    let pair = launcher.start(endpoints, Probe::RoundTrip, &args[..2], &args)?.finish(limit)?;
    let streams = match load {
        Some(load) => Some(load.finish(limit)?.server.per_second("bytes")?),
        None => None,
    };
    Ok((pair.client.latencies()?, streams))
}

/// Starts CPU-bound programs on any core, which run until they are dropped.
fn busy_loops(per_core: usize, nice: i32) -> Result<Vec<ChildGuard>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let start = |_| {
        let mut command = Command::new("nice");
        command.arg("-n").arg(nice.to_string()).args(["sh", "-c", "while :; do :; done"]);
        ChildGuard::spawn(command, None)
    };
    (0..per_core * cores).map(start).collect()
}

/// Returns the instructions of two engines for a frame of 8 bytes, one sending and one receiving: the difference of two
/// runs under callgrind.
fn instructions(modelled: &Modelled) -> Result<f64> {
    const FRAMES: u64 = 20_000;
    const LIMIT: Duration = Duration::from_secs(60);
    let program = std::env::current_exe().context("finding this program")?;
    let run = |frames: u64| {
        let mut command = Command::new("valgrind");
        command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(&program);
        command.args(&modelled.work_arguments).arg(frames.to_string());
        let mut guard = ChildGuard::spawn(command, None).context("valgrind counts instructions; install it")?;
        guard.complete(LIMIT)?;
        collected(&guard.stderr_text()).context("callgrind printed no number of instructions")
    };
    Ok((run(2 * FRAMES)? - run(FRAMES)?) / FRAMES as f64)
}

/// Parses the number in callgrind's `Collected : N`.
fn collected(stderr: &str) -> Option<f64> {
    let line = stderr.lines().find_map(|line| line.split_once("Collected :"))?;
    line.1.trim().parse().ok()
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
    fn the_number_of_instructions_is_found_in_callgrinds_output() {
        assert_eq!(collected("==7== Events    : Ir\n==7== Collected : 123456\n==7==\n"), Some(123_456.0));
        assert_eq!(collected("valgrind: no such program"), None);
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
        let report = Report::of(&Options::default(), &plan, machine, measured, modelled).unwrap();
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
