//! `crosslane bench windows`: two nodes of this machine that are joined by emulated windows, beside the direct lane,
//! kernel TCP, AF_UNIX and the floor; behind a modelled link, beside what was published; beside streams; and beside
//! programs that compute.

mod plots;
mod published;
mod rack;
mod report;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::floors::{self, CacheLine};
use crate::launch::{Ends, Launcher, Tally, Transport};
use crate::probe::Probe;
use crate::process::Guard;
use crate::progress::Progress;
use machine::Machine;
use rack::{Counts, Kind, UpRack};
use report::Report;
use stats::Latencies;

/// The delay of the modelled link one way.
const ONE_WAY_NS: f64 = 500.0;
/// Streams beside the ping-pong, and as many words for them.
const STREAMS: &str = "8";
/// The longest that a sample may take beyond what it measures.
const SLACK: Duration = Duration::from_secs(15);

/// What the user may choose.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// One JSON document instead of tables.
    pub json: bool,
    /// Fewer rounds and shorter samples.
    pub quick: bool,
    /// Where plots go.
    pub plot: Option<PathBuf>,
}

/// What the proxy's engine does in virtual time and by the instruction: told by whoever has it.
#[derive(Clone, Debug, Serialize)]
pub struct Modelled {
    /// What the simulation rests on.
    pub assumptions: String,
    /// A ping-pong of 8 bytes, alone and beside streams.
    pub isolation: Vec<ModelledCase>,
    /// Arguments of this program that let two engines exchange so many short frames: the number follows.
    #[serde(skip)]
    pub work_arguments: Vec<String>,
}

/// One case in virtual time.
#[derive(Clone, Debug, Serialize)]
pub struct ModelledCase {
    /// What is beside the ping-pong.
    pub case: &'static str,
    /// Median, ns.
    pub rtt_ns_p50: u64,
    /// 99 in 100 are shorter, ns.
    pub rtt_ns_p99: u64,
    /// The 99th percentile against that of the first case.
    pub p99_of_quiet: f64,
}

/// Runs the benchmark and prints the report. What failed is named in it and makes this an error.
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

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Experiment {
    RoundTrip,
    TimedRoundTrip,
    Bulk,
}

/// By which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Way {
    DirectLane,
    WindowDirect,
    WindowProxy,
    KernelTcp,
    AfUnix,
}

impl Way {
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

    fn ways(self) -> &'static [Way] {
        match self {
            Self::TimedRoundTrip => &[Way::WindowDirect, Way::WindowProxy],
            _ => &[Way::DirectLane, Way::WindowDirect, Way::WindowProxy, Way::KernelTcp, Way::AfUnix],
        }
    }

    /// The rack that a way needs in it.
    fn kind(self, way: Way) -> Option<Kind> {
        match (self, way) {
            (Self::TimedRoundTrip, Way::WindowDirect) => Some(Kind::TimedDirect),
            (Self::TimedRoundTrip, Way::WindowProxy) => Some(Kind::TimedProxy),
            (_, Way::WindowDirect) => Some(Kind::Direct),
            (_, Way::WindowProxy) => Some(Kind::Proxy),
            _ => None,
        }
    }
}

/// A ping-pong beside others.
#[derive(Clone, Copy, Debug)]
struct Beside {
    way: Way,
    /// The rack that the way needs.
    kind: Option<Kind>,
    case: &'static str,
    company: Company,
}

/// Who is beside a ping-pong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Company {
    Nobody,
    /// Streams by the same way.
    Streams,
    /// Programs that want all of a core and know nothing of anybody: so many for each core, with that nice value.
    Computing {
        per_core: usize,
        nice: i32,
    },
}

impl Beside {
    const fn quiet(way: Way, kind: Option<Kind>) -> Self {
        Self { way, kind, case: "quiet", company: Company::Nobody }
    }

    const fn streams(way: Way, kind: Option<Kind>, case: &'static str) -> Self {
        Self { way, kind, case, company: Company::Streams }
    }

    const fn computing(way: Way, kind: Option<Kind>) -> Self {
        let company = Company::Computing { per_core: 1, nice: 0 };
        Self { way, kind, case: "a busy loop for each core", company }
    }

    const fn computing_nicely(way: Way, kind: Option<Kind>) -> Self {
        let company = Company::Computing { per_core: 2, nice: 10 };
        Self { way, kind, case: "two busy loops for each core, nice 10", company }
    }
}

const BESIDE: [Beside; 14] = [
    Beside::quiet(Way::WindowProxy, Some(Kind::Proxy)),
    Beside::streams(Way::WindowProxy, Some(Kind::Unsliced), "8 streams and 1 unread, slicing off"),
    Beside::streams(Way::WindowProxy, Some(Kind::Sliced), "8 streams and 1 unread, slicing on"),
    Beside::streams(Way::WindowProxy, Some(Kind::Proxy), "8 streams and 1 unread, slicing and classes on"),
    Beside::computing(Way::WindowProxy, Some(Kind::Proxy)),
    Beside::computing_nicely(Way::WindowProxy, Some(Kind::Proxy)),
    Beside::quiet(Way::WindowDirect, Some(Kind::Direct)),
    Beside::streams(Way::WindowDirect, Some(Kind::Direct), "8 streams and 1 unread"),
    Beside::computing(Way::WindowDirect, Some(Kind::Direct)),
    Beside::computing_nicely(Way::WindowDirect, Some(Kind::Direct)),
    Beside::quiet(Way::KernelTcp, None),
    Beside::streams(Way::KernelTcp, None, "8 streams and 1 unread"),
    Beside::computing(Way::KernelTcp, None),
    Beside::computing_nicely(Way::KernelTcp, None),
];

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const ROUND_TRIP_SIZES: [u64; 9] = [8, 48, 256, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB];
const TIMED_SIZES: [u64; 4] = [8, 48, KIB, 4 * KIB];
const BULK_SIZES: [u64; 6] = [KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB];

/// What is measured, how long and how often.
struct Plan {
    points: Vec<(Experiment, u64)>,
    rounds: u32,
    sample_ms: u64,
    floor_ms: u64,
    /// Beside others: one round trip in a hundred is one that the machine interrupts, so p99 differs most by round.
    beside_rounds: u32,
    beside_ms: u64,
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
        let (beside_rounds, beside_ms) = if options.quick { (2, 200) } else { (15, 500) };
        let (points, floor_ms, counts_instructions) = (points.concat(), 4, true);
        Self { points, rounds, sample_ms, floor_ms, beside_rounds, beside_ms, counts_instructions }
    }

    fn steps(&self) -> u64 {
        let samples: usize = self.points.iter().map(|(experiment, _)| experiment.ways().len()).sum();
        samples as u64 * u64::from(self.rounds) + BESIDE.len() as u64 * u64::from(self.beside_rounds)
    }
}

/// One way at one point in one round.
struct Sample {
    latencies: Option<Latencies>,
    bytes_per_s: Option<f64>,
    line: Option<CacheLine>,
    /// Bytes a second that one core copies into a mapping, in pieces of the point's size.
    mapping: Option<f64>,
}

/// All rounds of one way at one point.
struct Cell {
    experiment: Experiment,
    size_bytes: u64,
    way: Way,
    rounds: Vec<Sample>,
}

/// All rounds of one case beside others.
struct BesideCell {
    beside: Beside,
    rounds: Vec<Latencies>,
    /// Bytes a second of the streams.
    streams: Vec<f64>,
    /// Rounds that failed.
    failed: usize,
}

/// A sample that failed. Its way is not tried again in that experiment.
struct Failure {
    what: String,
    experiment: Experiment,
    way: Way,
}

/// Everything that was found.
struct Measured {
    cells: Vec<Cell>,
    beside: Vec<BesideCell>,
    counts: Vec<Counts>,
    /// Instructions for a short frame, sent and received: `Err` says why there are none.
    instructions: Result<f64, String>,
    syscalls_ns: Vec<f64>,
    /// Ways that are not there, and why.
    missing: Vec<(Kind, String)>,
    failures: Vec<Failure>,
    said: Vec<String>,
    /// How all pairs of programs have ended.
    pairs: Tally,
}

impl Measured {
    /// What keeps a way from being tried again.
    fn failure(&self, experiment: Experiment, way: Way) -> Option<&Failure> {
        self.failures.iter().find(|failure| (failure.experiment, failure.way) == (experiment, way))
    }

    /// Why there are no figures of a way, or not of all rounds.
    fn why_missing(&self, experiment: Experiment, way: Way) -> Option<String> {
        let wanted = experiment.kind(way);
        let is_not_there = self.missing.iter().find(|(kind, _)| Some(*kind) == wanted).map(|(_, why)| why.clone());
        is_not_there.or_else(|| self.failure(experiment, way).map(|failure| failure.what.clone()))
    }

    /// Figures of programs that were to write windows themselves are none if proxies have carried their bytes.
    fn check_direct(&mut self, kind: Kind, counts: &[Counts]) {
        if counts.iter().all(|proxy| proxy.bytes_sent == 0) {
            return;
        }
        self.missing.push((kind, "the programs' bytes went by their nodes' proxies".to_owned()));
        let is_of_kind = |cell: &&mut Cell| cell.experiment.kind(cell.way) == Some(kind);
        self.cells.iter_mut().filter(is_of_kind).for_each(|cell| cell.rounds.clear());
    }
}

fn measure(launcher: &Launcher, plan: &Plan, machine: &Machine, modelled: &Modelled) -> Result<Measured> {
    let cell = |&(experiment, size_bytes): &(Experiment, u64)| {
        experiment.ways().iter().map(move |&way| Cell { experiment, size_bytes, way, rounds: Vec::new() })
    };
    let mut measured = Measured {
        cells: plan.points.iter().flat_map(cell).collect(),
        beside: BESIDE.map(|beside| BesideCell { beside, rounds: Vec::new(), streams: Vec::new(), failed: 0 }).into(),
        counts: Vec::new(),
        instructions: Err("not asked for".to_owned()),
        syscalls_ns: Vec::new(),
        missing: Vec::new(),
        failures: Vec::new(),
        said: Vec::new(),
        pairs: Tally::default(),
    };
    let mut progress = Progress::new(plan.steps());
    if let Some(warning) = machine.busy_warning() {
        progress.warn(&warning);
    }
    {
        let kinds = [Kind::Proxy, Kind::Direct, Kind::TimedProxy, Kind::TimedDirect];
        let racks = bring_up(launcher, &kinds, &mut measured, &progress);
        for round in 1..=plan.rounds {
            measured.syscalls_ns.push(floors::syscall_ns_p50(launcher, plan.floor_ms)?);
            take_round(launcher, plan, &racks, round, &mut measured, &mut progress)?;
        }
        for (kind, rack) in &racks {
            let counts = rack.counts()?;
            match kind {
                Kind::Proxy => measured.counts = counts,
                Kind::Direct | Kind::TimedDirect => measured.check_direct(*kind, &counts),
                _ => {}
            }
        }
    }
    {
        let racks =
            bring_up(launcher, &[Kind::Proxy, Kind::Unsliced, Kind::Sliced, Kind::Direct], &mut measured, &progress);
        for round in 1..=plan.beside_rounds {
            take_beside(launcher, plan, &racks, round, &mut measured, &mut progress);
        }
    }
    if plan.counts_instructions {
        progress.step("instructions", "of a frame");
        measured.instructions = instructions(modelled).map_err(|error| format!("{error:#}"));
    }
    measured.pairs = launcher.tally();
    Ok(measured)
}

fn bring_up(launcher: &Launcher, kinds: &[Kind], measured: &mut Measured, progress: &Progress) -> Vec<(Kind, UpRack)> {
    let mut racks = Vec::new();
    for &kind in kinds {
        match UpRack::up(launcher, kind) {
            Ok(rack) => match rack.missing.clone() {
                Some(why) => measured.missing.push((kind, why)),
                None => racks.push((kind, rack)),
            },
            Err(error) => {
                progress.warn(&format!("{error:#}"));
                measured.said.push(format!("{error:#}"));
            }
        }
    }
    racks
}

fn take_round(
    launcher: &Launcher,
    plan: &Plan,
    racks: &[(Kind, UpRack)],
    round: u32,
    measured: &mut Measured,
    progress: &mut Progress,
) -> Result<()> {
    let mapping = floors::mapping(launcher, 6 * plan.floor_ms)?;
    for index in 0..measured.cells.len() {
        let Cell { experiment, size_bytes, way, .. } = measured.cells[index];
        let stage = format!("round {round} of {}: {}", plan.rounds, experiment.title());
        progress.step(&stage, &format!("{} by {}", units::size(size_bytes), way.title()));
        if measured.failure(experiment, way).is_some() {
            continue;
        }
        let Some(ends) = ends(launcher, racks, experiment, way) else { continue };
        let line = floors::cache_line(launcher, plan.floor_ms)?;
        match take_sample(launcher, plan, &ends, experiment, size_bytes) {
            Ok((latencies, bytes_per_s)) => {
                let mapping = mapping.iter().find(|(bytes, _)| *bytes == size_bytes).map(|(_, rate)| *rate);
                measured.cells[index].rounds.push(Sample { latencies, bytes_per_s, line, mapping });
            }
            Err(error) => {
                let size = units::size(size_bytes);
                let what = format!("{} of {size} by {}, round {round}: {error:#}", experiment.title(), way.title());
                progress.warn(&format!("failed: {what}"));
                measured.failures.push(Failure { what, experiment, way });
            }
        }
    }
    Ok(())
}

/// `None` where the way is not there.
fn ends(launcher: &Launcher, racks: &[(Kind, UpRack)], experiment: Experiment, way: Way) -> Option<Ends> {
    ends_by(launcher, racks, way, experiment.kind(way))
}

/// As [`ends`], by the rack that the way needs there.
fn ends_by(launcher: &Launcher, racks: &[(Kind, UpRack)], way: Way, kind: Option<Kind>) -> Option<Ends> {
    if let Some(wanted) = kind {
        return racks.iter().find(|(kind, _)| *kind == wanted).map(|(_, rack)| rack.ends());
    }
    let transport = match way {
        Way::KernelTcp => Transport::KernelTcp,
        Way::AfUnix => Transport::AfUnix,
        _ => Transport::Crosslane,
    };
    Some(launcher.ends(transport))
}

type Found = (Option<Latencies>, Option<f64>);

fn take_sample(launcher: &Launcher, plan: &Plan, ends: &Ends, experiment: Experiment, size: u64) -> Result<Found> {
    let (size, milliseconds) = (size.to_string(), plan.sample_ms.to_string());
    let limit = Duration::from_millis(2 * plan.sample_ms) + SLACK;
    if experiment == Experiment::Bulk {
        let args = ["blocking", "bulk", &size, &milliseconds];
        let pair = launcher.start(ends, Probe::Stream, &args, &args)?.finish(limit)?;
        return Ok((None, Some(pair.server.per_second("bytes")?)));
    }
    let args = ["blocking", &size, &milliseconds];
    let pair = launcher.start(ends, Probe::RoundTrip, &args[..2], &args)?.finish(limit)?;
    Ok((Some(pair.client.latencies()?), None))
}

fn take_beside(
    launcher: &Launcher,
    plan: &Plan,
    racks: &[(Kind, UpRack)],
    round: u32,
    measured: &mut Measured,
    progress: &mut Progress,
) {
    for cell in &mut measured.beside {
        let Beside { way, kind, case, company } = cell.beside;
        let stage = format!("round {round} of {}: beside others", plan.beside_rounds);
        progress.step(&stage, &format!("{case}, {}", way.title()));
        let Some(ends) = ends_by(launcher, racks, way, kind) else { continue };
        match ping_beside(launcher, plan, &ends, company) {
            Ok((latencies, streams)) => {
                cell.rounds.push(latencies);
                cell.streams.extend(streams);
            }
            Err(error) => {
                let what = format!("ping-pong by {}, {case}, round {round}: {error:#}", way.title());
                progress.warn(&format!("failed: {what}"));
                measured.said.push(what);
                cell.failed += 1;
            }
        }
    }
}

/// A ping-pong of 8 bytes, and the rate of the streams beside it.
fn ping_beside(launcher: &Launcher, plan: &Plan, ends: &Ends, company: Company) -> Result<(Latencies, Option<f64>)> {
    // Streams go on until after the ping-pong, which is started, warms up and takes its time.
    let limit = Duration::from_millis(4 * plan.beside_ms) + SLACK;
    let load_ms = (2 * plan.beside_ms + 1000).to_string();
    let mut load = match company {
        Company::Streams => Some(launcher.start(ends, Probe::Load, &[STREAMS], &[STREAMS, &load_ms])?),
        _ => None,
    };
    if let Some(load) = &mut load {
        load.client_line("loading", SLACK)?;
    }
    let _computing = match company {
        Company::Computing { per_core, nice } => busy_loops(per_core, nice)?,
        _ => Vec::new(),
    };
    let milliseconds = plan.beside_ms.to_string();
    let args = ["blocking", "8", &milliseconds];
    let pair = launcher.start(ends, Probe::RoundTrip, &args[..2], &args)?.finish(limit)?;
    let streams = match load {
        Some(load) => Some(load.finish(limit)?.server.per_second("bytes")?),
        None => None,
    };
    Ok((pair.client.latencies()?, streams))
}

/// Programs that compute, on any core, until they are dropped.
fn busy_loops(per_core: usize, nice: i32) -> Result<Vec<Guard>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let start = |_| {
        let mut command = Command::new("nice");
        command.arg("-n").arg(nice.to_string()).args(["sh", "-c", "while :; do :; done"]);
        Guard::spawn(command, None)
    };
    (0..per_core * cores).map(start).collect()
}

/// Instructions that two engines need for a frame of 8 bytes, one sending and one receiving, by the difference of two
/// runs under callgrind.
fn instructions(modelled: &Modelled) -> Result<f64> {
    const FRAMES: u64 = 20_000;
    const LIMIT: Duration = Duration::from_secs(60);
    let program = std::env::current_exe().context("finding this program")?;
    let run = |frames: u64| {
        let mut command = Command::new("valgrind");
        command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(&program);
        command.args(&modelled.work_arguments).arg(frames.to_string());
        let mut guard = Guard::spawn(command, None).context("valgrind counts them; install it")?;
        guard.complete(LIMIT)?;
        collected(&guard.all_said()).context("callgrind said no number of instructions")
    };
    Ok((run(2 * FRAMES)? - run(FRAMES)?) / FRAMES as f64)
}

/// The number in callgrind's `Collected : N`.
fn collected(said: &str) -> Option<f64> {
    let line = said.lines().find_map(|line| line.split_once("Collected :"))?;
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
    fn callgrinds_number_is_found_among_what_it_says() {
        assert_eq!(collected("==7== Events    : Ir\n==7== Collected : 123456\n==7==\n"), Some(123_456.0));
        assert_eq!(collected("valgrind: no such program"), None);
    }

    #[test]
    fn a_way_that_failed_says_so_in_every_row_and_the_others_have_figures() {
        let launcher = Launcher::with_stand_in("false").unwrap();
        let points = vec![(Experiment::RoundTrip, 8), (Experiment::RoundTrip, 48)];
        let (rounds, beside_rounds) = (2, 2);
        let (sample_ms, floor_ms, beside_ms, counts_instructions) = (5, 1, 5, false);
        let plan = Plan { points, rounds, sample_ms, floor_ms, beside_rounds, beside_ms, counts_instructions };
        let modelled = Modelled { assumptions: String::new(), isolation: Vec::new(), work_arguments: Vec::new() };
        let machine = Machine::describe(launcher.cores);
        let measured = measure(&launcher, &plan, &machine, &modelled).unwrap();
        assert_eq!(measured.pairs.servers_failed, 1, "tried once: {:?}", measured.pairs);
        let report = Report::of(&Options::default(), &plan, machine, measured, modelled).unwrap();
        for row in &report.rows {
            match row.way {
                Way::DirectLane => assert!(row.missing.as_deref().is_some_and(|why| why.contains("`false "))),
                Way::KernelTcp | Way::AfUnix => assert_eq!((row.rounds, &row.missing), (2, &None)),
                _ => assert_eq!(row.rounds, 0),
            }
        }
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["pairs"]["servers_failed"], 1);
        let text = report.text();
        assert!(text.contains("1 servers failed") && text.contains("direct lane, round trip: 0 of 2 rounds"), "{text}");
    }
}
