//! `crosslane bench sockets`: an ordinary C program over kernel TCP, AF_UNIX and Crosslane, with the floors next to
//! each sample; or over two builds of the library.

mod comparison;
mod plots;
mod report;
mod text;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use machine::Machine;
use serde::Serialize;
use stats::{Latencies, Ratio};

use crate::floors::{self, FloorSample, FloorTimes};
use crate::launch::{Launcher, Libraries, Transport};
use crate::probe::Probe;
use crate::progress::Progress;
use report::Report;

/// The command-line options.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Options {
    /// Print one JSON document instead of tables
    #[arg(long)]
    pub json: bool,
    /// Fewer rounds and shorter samples: under a minute, but less precise
    #[arg(long)]
    pub quick: bool,
    /// Write the plots as SVG files into this directory
    #[arg(long, value_name = "DIR")]
    pub plot: Option<PathBuf>,
    /// Number of alternating rounds (default: 5, or 2 with --quick; with --baseline 15, or 6 with --quick)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: Option<u32>,
    /// Run only these experiments
    #[arg(long, value_name = "EXPERIMENT,...", value_delimiter = ',')]
    pub only: Vec<Experiment>,
    /// Number of client processes of connects-at-once (default: 1000)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub clients: Option<u32>,
    /// Number of connections that each of these makes, one after the other (default: 10)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub connections: Option<u32>,
    /// The library to load [default: libcrosslane.so next to this command or under /usr/lib/crosslane]
    #[arg(long, value_name = "PATH")]
    pub library: Option<PathBuf>,
    /// Compare --library only with this build of it
    #[arg(long, value_name = "PATH", requires = "library", conflicts_with = "plot")]
    pub baseline: Option<PathBuf>,
}

/// Largest number of connections in a sample: below the ephemeral port range (28 k), because kernel TCP keeps each
/// closed connection in TIME_WAIT.
const CONNECTIONS_MAX: u32 = 25_000;

impl Options {
    /// Checks that the options are consistent.
    ///
    /// # Errors
    /// Names the options, their values and the alternative in one line.
    pub fn check(&self) -> Result<()> {
        let given = [("--clients", self.clients), ("--connections", self.connections)];
        let unused = given.iter().find(|(_, value)| value.is_some() && !self.chooses(Experiment::ConnectsAtOnce));
        if let Some((option, Some(value))) = unused {
            bail!("{option} {value} has no effect with this --only; add connects-at-once to it");
        }
        let clients = Clients::of(self);
        let Clients { processes, connections_each } = clients;
        ensure!(
            clients.connections() <= CONNECTIONS_MAX,
            "--clients {processes} --connections {connections_each}: more than {CONNECTIONS_MAX} connections in all, \
             for which kernel TCP has no ports; give --connections {} or fewer clients",
            CONNECTIONS_MAX / processes
        );
        Ok(())
    }

    fn libraries(&self) -> Libraries {
        Libraries { library: self.library.clone(), baseline: self.baseline.clone() }
    }

    fn chooses(&self, experiment: Experiment) -> bool {
        self.only.is_empty() || self.only.contains(&experiment)
    }
}

/// Client processes that connect at once.
#[derive(Clone, Copy, Debug, Serialize)]
struct Clients {
    /// Number of processes.
    processes: u32,
    /// Connections that each makes, one after the other.
    connections_each: u32,
}

impl Clients {
    fn of(options: &Options) -> Self {
        Self { processes: options.clients.unwrap_or(1000), connections_each: options.connections.unwrap_or(10) }
    }

    fn connections(self) -> u32 {
        self.processes * self.connections_each
    }
}

/// Runs the benchmark and prints the report. If a transport failed, the report names it, and this returns an error.
pub fn main(options: &Options) -> Result<()> {
    if let Some(directory) = &options.plot {
        // Create it before the measurement, so that an error costs no minutes.
        std::fs::create_dir_all(directory)
            .with_context(|| format!("cannot make the plot directory {}", directory.display()))?;
    }
    run(options, &Launcher::with_libraries(options.libraries())?, &Plan::of(options))
}

fn run(options: &Options, launcher: &Launcher, plan: &Plan) -> Result<()> {
    let machine = Machine::describe(launcher.cores);
    let measured = measure(launcher, plan, &machine)?;
    let report = Report::of(options, plan, machine, &measured);
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report).context("writing JSON")?);
    } else {
        print!("{}", report.text());
    }
    if let Some(directory) = &options.plot {
        for path in plots::write(directory, &report, &measured)? {
            eprintln!("crosslane: wrote {}", path.display());
        }
    }
    match report.failures.first() {
        None => Ok(()),
        Some(first) => {
            bail!("{} of the measurements failed, first {}: {}", report.failures.len(), first.title(), first.error)
        }
    }
}

/// An experiment with a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Experiment {
    /// Round trips by size, blocking send and recv
    RoundTripBlocking,
    /// Round trips by size, through epoll_wait
    RoundTripEpoll,
    /// One-way messages a second
    MessageRate,
    /// Bytes a second by write size
    Bulk,
    /// Connections of one client, one after the other; the server accepts in a blocking loop
    Connects,
    /// The same; the server uses epoll
    ConnectsEpoll,
    /// Connections of many client processes at once; the server uses epoll
    ConnectsAtOnce,
}

impl Experiment {
    const fn title(self) -> &'static str {
        match self {
            Self::RoundTripBlocking => "round trip, blocking",
            Self::RoundTripEpoll => "round trip, epoll",
            Self::MessageRate => "one-way messages",
            Self::Bulk => "bulk by write size",
            Self::Connects => "connections, blocking server",
            Self::ConnectsEpoll => "connections, epoll server",
            Self::ConnectsAtOnce => "connections at once, epoll server",
        }
    }

    /// Returns the sizes at which it is measured.
    fn sizes(self) -> &'static [u64] {
        match self {
            Self::RoundTripBlocking | Self::RoundTripEpoll => &ROUND_TRIP_SIZES,
            Self::MessageRate => &MESSAGE_SIZES,
            Self::Bulk => &BULK_SIZES,
            Self::Connects | Self::ConnectsEpoll | Self::ConnectsAtOnce => &CONNECTS_SIZES,
        }
    }

    /// Returns the transports that it compares: spinning does not speed up the establishment of connections.
    fn transports(self) -> &'static [Transport] {
        use Transport::{AfUnix, Crosslane, KernelTcp, KernelTcpSpinning};
        match self {
            Self::Connects | Self::ConnectsEpoll | Self::ConnectsAtOnce => &[KernelTcp, AfUnix, Crosslane],
            _ => &[KernelTcp, KernelTcpSpinning, AfUnix, Crosslane],
        }
    }

    /// Returns how the probe waits, as its argument.
    fn wait_mode(self, transport: Transport) -> &'static str {
        match (self, transport) {
            (Self::RoundTripEpoll, Transport::KernelTcpSpinning) => "epoll-spin",
            (Self::RoundTripEpoll | Self::ConnectsEpoll | Self::ConnectsAtOnce, _) => "epoll",
            (_, Transport::KernelTcpSpinning) => "spin",
            _ => "blocking",
        }
    }
}

/// One row of the plan: an experiment at one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Point {
    experiment: Experiment,
    size_bytes: u64,
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const ROUND_TRIP_SIZES: [u64; 11] = [1, 8, 48, 64, 256, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB];
const MESSAGE_SIZES: [u64; 3] = [8, 64, KIB];
/// Bytes that a connection carries in each direction.
const CONNECTS_SIZES: [u64; 1] = [2];
const BULK_SIZES: [u64; 10] = [1, 64, 128, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB];

/// What to measure, how long and how often.
struct Plan {
    points: Vec<Point>,
    rounds: u32,
    sample_ms: u64,
    floors: FloorTimes,
    clients: Clients,
    /// Whether two builds of the library are compared rather than transports.
    compares_builds: bool,
}

impl Plan {
    fn of(options: &Options) -> Self {
        let experiments = Experiment::value_variants().iter().filter(|experiment| options.chooses(**experiment));
        let points = experiments.flat_map(|experiment| {
            experiment.sizes().iter().map(|size| Point { experiment: *experiment, size_bytes: *size })
        });
        let (sample_ms, floors) = match options.quick {
            true => (40, FloorTimes { line_ms: 3, copy_ms: 10 }),
            false => (250, FloorTimes { line_ms: 6, copy_ms: 25 }),
        };
        let compares_builds = options.baseline.is_some();
        let rounds = match (compares_builds, options.quick) {
            (true, true) => Ratio::ROUNDS_MIN as u32,
            (true, false) => 15,
            (false, true) => 2,
            (false, false) => 5,
        };
        let (rounds, clients) = (options.rounds.unwrap_or(rounds), Clients::of(options));
        Self { points: points.collect(), rounds, sample_ms, floors, clients, compares_builds }
    }

    /// Returns the transports that an experiment compares.
    fn transports(&self, experiment: Experiment) -> &'static [Transport] {
        if self.compares_builds { &[Transport::Baseline, Transport::Crosslane] } else { experiment.transports() }
    }

    fn steps(&self) -> u64 {
        let samples: usize = self.points.iter().map(|point| self.transports(point.experiment).len()).sum();
        samples as u64 * u64::from(self.rounds)
    }
}

/// A sample of one transport at one point in one round.
struct Sample {
    latencies: Option<Latencies>,
    /// Messages, bytes or connections a second.
    rate_per_s: Option<f64>,
    floors: FloorSample,
}

/// All rounds of one transport at one point. Samples of the same round of different cells are adjacent in time.
struct Cell {
    point: Point,
    transport: Transport,
    rounds: Vec<Sample>,
}

/// Why a transport has no figures for an experiment.
#[derive(Clone, Debug, Serialize)]
struct Failure {
    experiment: Experiment,
    size_bytes: u64,
    transport: Transport,
    error: String,
}

impl Failure {
    fn title(&self) -> String {
        format!("{} at {} over {}", self.experiment.title(), units::size(self.size_bytes), self.transport.title())
    }
}

#[derive(Default)]
struct Measured {
    cells: Vec<Cell>,
    syscalls_ns: Vec<f64>,
    failures: Vec<Failure>,
}

impl Measured {
    fn cell(&self, point: Point, transport: Transport) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.point == point && cell.transport == transport)
    }

    /// Returns whether a transport has failed in an experiment. It is not tried again there, because each attempt may
    /// cost a timeout.
    fn has_failed(&self, experiment: Experiment, transport: Transport) -> bool {
        self.failures.iter().any(|failure| failure.experiment == experiment && failure.transport == transport)
    }
}

fn measure(launcher: &Launcher, plan: &Plan, machine: &Machine) -> Result<Measured> {
    let cells = plan.points.iter().flat_map(|point| {
        plan.transports(point.experiment).iter().map(|transport| Cell {
            point: *point,
            transport: *transport,
            rounds: Vec::new(),
        })
    });
    let mut measured = Measured { cells: cells.collect(), ..Measured::default() };
    let mut progress = Progress::new(plan.steps());
    if let Some(warning) = machine.busy_warning() {
        progress.warn(&warning);
    }
    for round in 1..=plan.rounds {
        measured.syscalls_ns.push(floors::syscall_ns_p50(launcher, plan.floors.line_ms)?);
        // Every second round is in reverse order, so that the first cell is not always the same.
        let mut order: Vec<usize> = (0..measured.cells.len()).collect();
        if round % 2 == 0 {
            order.reverse();
        }
        for index in order {
            let Cell { point, transport, .. } = measured.cells[index];
            let stage = format!("round {round} of {}: {}", plan.rounds, point.experiment.title());
            progress.step(&stage, &format!("{} over {}", units::size(point.size_bytes), transport.title()));
            if measured.has_failed(point.experiment, transport)
                || (transport == Transport::KernelTcpSpinning && launcher.cores.is_none())
            {
                continue;
            }
            let floors = floor_sample(launcher, plan, point)?;
            match take_sample(launcher, plan, point, transport, floors) {
                Ok(sample) => measured.cells[index].rounds.push(sample),
                Err(error) => {
                    let failure = Failure {
                        experiment: point.experiment,
                        size_bytes: point.size_bytes,
                        transport,
                        error: format!("{error:#}"),
                    };
                    progress.warn(&format!("{} failed: {}", failure.title(), failure.error));
                    measured.failures.push(failure);
                }
            }
        }
    }
    Ok(measured)
}

fn floor_sample(launcher: &Launcher, plan: &Plan, point: Point) -> Result<FloorSample> {
    let copies = point.experiment == Experiment::Bulk;
    Ok(FloorSample {
        cache_line: floors::cache_line(launcher, plan.floors.line_ms)?,
        copy_pipeline: if copies { floors::copy_pipeline(launcher, plan.floors.copy_ms)? } else { None },
    })
}

/// Longest time of a connection that waits for those of other clients.
const CONNECTION_LIMIT: Duration = Duration::from_millis(10);

fn take_sample(
    launcher: &Launcher,
    plan: &Plan,
    point: Point,
    transport: Transport,
    floors: FloorSample,
) -> Result<Sample> {
    let (size, milliseconds) = (point.size_bytes.to_string(), plan.sample_ms.to_string());
    let wait_mode = point.experiment.wait_mode(transport);
    let timeout = Duration::from_millis(plan.sample_ms * 2) + Duration::from_secs(15);
    let connects = |client: &[&str], timeout| -> Result<_> {
        let found = launcher.pair(transport, Probe::Connects, &[wait_mode], client, timeout)?.client;
        Ok((Some(found.latencies()?), Some(found.per_second("operations")?)))
    };
    let stream = |what: &str| {
        let args = [wait_mode, what, &size, &milliseconds];
        launcher.pair(transport, Probe::Stream, &args, &args, timeout)?.server.per_second("bytes")
    };
    let (latencies, rate_per_s) = match point.experiment {
        Experiment::RoundTripBlocking | Experiment::RoundTripEpoll => {
            let client = [wait_mode, &size, &milliseconds];
            let pair = launcher.pair(transport, Probe::RoundTrip, &client[..2], &client, timeout)?;
            (Some(pair.client.latencies()?), None)
        }
        Experiment::MessageRate => (None, Some(stream("messages")? / point.size_bytes as f64)),
        Experiment::Bulk => (None, Some(stream("bulk")?)),
        Experiment::Connects | Experiment::ConnectsEpoll => connects(&[&milliseconds], timeout)?,
        Experiment::ConnectsAtOnce => {
            let clients = plan.clients;
            let client = [clients.processes.to_string(), clients.connections_each.to_string()];
            connects(&[&client[0], &client[1]], timeout + CONNECTION_LIMIT * clients.connections())?
        }
    };
    Ok(Sample { latencies, rate_per_s, floors })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plan with one point of each experiment, which covers the path from probe to report in a second.
    fn small_plan() -> Plan {
        let point = |experiment, size_bytes| Point { experiment, size_bytes };
        Plan {
            points: vec![
                point(Experiment::RoundTripBlocking, 8),
                point(Experiment::RoundTripEpoll, 64 * KIB),
                point(Experiment::MessageRate, 64),
                point(Experiment::Bulk, 64 * KIB),
                point(Experiment::Connects, 2),
                point(Experiment::ConnectsEpoll, 2),
                point(Experiment::ConnectsAtOnce, 2),
            ],
            rounds: 2,
            sample_ms: 10,
            floors: FloorTimes { line_ms: 2, copy_ms: 5 },
            clients: Clients { processes: 3, connections_each: 2 },
            compares_builds: false,
        }
    }

    fn small_run(crosslane: &str) -> (Measured, Report) {
        let launcher = Launcher::with_wrapper(crosslane).unwrap();
        let machine = Machine::describe(launcher.cores);
        let measured = measure(&launcher, &small_plan(), &machine).unwrap();
        let report = Report::of(&Options::default(), &small_plan(), machine, &measured);
        (measured, report)
    }

    #[test]
    fn every_transport_has_figures_in_every_experiment() {
        // `env PROGRAM ...` starts a program as `crosslane run` does, so this column is kernel TCP too.
        let (measured, report) = small_run("env");
        assert!(report.failures.is_empty(), "{:?}", report.failures);
        for cell in &measured.cells {
            let spins = cell.transport == Transport::KernelTcpSpinning;
            let expected = if spins && report.machine.cores_used.is_none() { 0 } else { 2 };
            assert_eq!(cell.rounds.len(), expected, "{:?} over {:?}", cell.point, cell.transport);
        }
        let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(json["schema"], report::SCHEMA);
        for row in json["rows"].as_array().unwrap() {
            assert_eq!(row["kind"], "measured");
            let has_figures = row["latency"]["p50_ns"].is_number() || row["rate_per_s"].is_number();
            assert!(has_figures || row["rounds"] == 0, "{row}");
        }
        let text = report.text();
        assert!(text.contains("Crosslane") && text.contains("64 KiB") && text.contains("Floors, "), "{text}");

        let directory = tempfile::tempdir().unwrap();
        let written = plots::write(directory.path(), &report, &measured).unwrap();
        assert_eq!(written.len(), 4);
        for path in written {
            let svg = std::fs::read_to_string(&path).unwrap();
            assert!(
                svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>") && svg.contains("Crosslane"),
                "{}",
                path.display()
            );
        }
    }

    #[test]
    fn a_transport_that_fails_is_named_with_its_command_and_not_tried_again() {
        let (measured, report) = small_run("/nonexistent/crosslane");
        assert_eq!(report.failures.len(), 7, "once in each experiment, not in each round");
        assert!(report.failures.iter().all(|failure| failure.transport == Transport::Crosslane));
        assert!(report.failures[0].error.contains("`/nonexistent/crosslane "), "{}", report.failures[0].error);
        assert!(report.text().contains("failed"));
        assert!(
            measured
                .cells
                .iter()
                .filter(|cell| cell.transport == Transport::KernelTcp)
                .all(|cell| cell.rounds.len() == 2)
        );
    }

    #[test]
    fn the_plan_covers_all_sizes() {
        let plan = Plan::of(&Options { rounds: Some(3), ..Options::default() });
        assert_eq!(plan.rounds, 3);
        let sizes = |experiment| {
            plan.points.iter().filter(move |point| point.experiment == experiment).map(|point| point.size_bytes)
        };
        assert_eq!(sizes(Experiment::RoundTripBlocking).max(), Some(MIB));
        assert_eq!(sizes(Experiment::Bulk).max(), Some(4 * MIB));
        assert!(sizes(Experiment::RoundTripEpoll).eq(ROUND_TRIP_SIZES));
        assert_eq!(Plan::of(&Options { quick: true, ..Options::default() }).rounds, 2);
        let compares = Options { baseline: Some("old.so".into()), ..Options::default() };
        assert_eq!(Plan::of(&compares).rounds, 15);
        assert_eq!(Plan::of(&Options { quick: true, ..compares }).rounds, 6);
    }

    #[test]
    fn the_plan_and_the_report_have_only_the_selected_experiments() {
        let options = Options { only: vec![Experiment::ConnectsAtOnce, Experiment::Connects], ..Options::default() };
        let plan = Plan::of(&options);
        let experiments: Vec<Experiment> = plan.points.iter().map(|point| point.experiment).collect();
        assert_eq!(experiments, [Experiment::Connects, Experiment::ConnectsAtOnce]);
        let measured = Measured::default();
        let report = Report::of(&options, &plan, Machine::describe(None), &measured);
        assert_eq!(report.command, "crosslane bench sockets --only connects-at-once,connects");
        assert!(!report.text().contains("Bulk"), "{}", report.text());
    }

    #[test]
    fn only_the_two_builds_are_compared_in_every_experiment() {
        let launcher = Launcher::with_wrapper("env").unwrap();
        let plan = Plan { compares_builds: true, rounds: 6, sample_ms: 2, ..small_plan() };
        let machine = Machine::describe(launcher.cores);
        let measured = measure(&launcher, &plan, &machine).unwrap();
        let baseline = Some(PathBuf::from("old.so"));
        let options = Options { library: Some("new.so".into()), baseline, ..Options::default() };
        let report = Report::of(&options, &plan, machine, &measured);
        assert!(report.failures.is_empty(), "{:?}", report.failures);
        let of = |transport| report.rows.iter().filter(move |row| row.transport == transport);
        assert_eq!((of(Transport::Baseline).count(), of(Transport::Crosslane).count()), (7, 7));
        assert_eq!(report.rows.len(), 14, "nothing else");
        for row in of(Transport::Crosslane) {
            let Ratio { median, interval: [low, high], rounds } = row.time_over_baseline.unwrap();
            assert!(rounds == 6 && 0.0 < low && low <= median && median <= high, "{:?}", row.time_over_baseline);
        }
        assert!(of(Transport::Baseline).all(|row| row.time_over_baseline.is_none()));
        let text = report.text();
        assert!(text.contains("95% interval") && text.contains("old.so") && text.contains(" to "), "{text}");
        assert_eq!(report.command, "crosslane bench sockets --library new.so --baseline old.so");
    }

    #[test]
    fn a_slower_library_has_a_ratio_above_one_for_latencies_and_rates() {
        // Three rounds; the machine is ten times slower in the last.
        let cell = |experiment, transport, time_ns: f64| {
            let sample = |slowness: f64| {
                let mut latencies = Latencies::new();
                latencies.add(time_ns * slowness, 1);
                let is_rate = experiment == Experiment::Bulk;
                let (latencies, rate_per_s) =
                    if is_rate { (None, Some(1e9 / (time_ns * slowness))) } else { (Some(latencies), None) };
                Sample { latencies, rate_per_s, floors: FloorSample::default() }
            };
            let point = Point { experiment, size_bytes: 8 };
            Cell { point, transport, rounds: [1.0, 1.0, 10.0].map(sample).into() }
        };
        let cells = [Experiment::RoundTripBlocking, Experiment::Bulk].map(|experiment| {
            [cell(experiment, Transport::Baseline, 1000.0), cell(experiment, Transport::Crosslane, 1500.0)]
        });
        let measured = Measured { cells: cells.into_iter().flatten().collect(), ..Measured::default() };
        let machine = Machine::describe(None);
        let report = Report::of(&Options::default(), &small_plan(), machine, &measured);
        for row in report.rows.iter().filter(|row| row.transport == Transport::Crosslane) {
            let ratio = row.time_over_baseline.unwrap();
            assert!(ratio.rounds == 3 && (ratio.median - 1.5).abs() < 0.01, "{:?}: {ratio:?}", row.experiment);
        }
    }

    #[test]
    fn a_build_that_fails_is_named_in_the_comparison() {
        let launcher = Launcher::with_wrapper("/nonexistent/crosslane").unwrap();
        let plan = Plan { compares_builds: true, rounds: 1, ..small_plan() };
        let machine = Machine::describe(launcher.cores);
        let measured = measure(&launcher, &plan, &machine).unwrap();
        let options = Options { baseline: Some("old.so".into()), ..Options::default() };
        let report = Report::of(&options, &plan, machine, &measured);
        assert_eq!(report.failures.len(), 14, "each build in each experiment");
        assert!(report.text().contains("failed: bulk by write size at 64 KiB over the baseline"), "{}", report.text());
    }

    #[test]
    fn more_connections_than_kernel_tcp_has_ports_are_refused() {
        let options = |clients, connections| Options { clients, connections, ..Options::default() };
        assert!(options(None, None).check().is_ok() && options(Some(2500), Some(10)).check().is_ok());
        let error = options(Some(5000), Some(6)).check().unwrap_err().to_string();
        assert!(error.contains("--clients 5000 --connections 6") && error.contains("--connections 5"), "{error}");
    }

    #[test]
    fn client_options_are_refused_without_connects_at_once() {
        let options = Options { only: vec![Experiment::Bulk], clients: Some(3), ..Options::default() };
        let error = options.check().unwrap_err().to_string();
        assert!(error.contains("--clients 3") && error.contains("add connects-at-once"), "{error}");
    }
}
