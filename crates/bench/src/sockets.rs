//! `crosslane bench sockets`: an ordinary C program over kernel TCP, AF_UNIX and Crosslane, with the floors beside
//! each sample.

mod plots;
mod report;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::floors::{self, Beside, FloorTimes};
use crate::histogram::Latencies;
use crate::launch::{Launcher, Transport};
use crate::machine::Machine;
use crate::probe::Probe;
use crate::progress::Progress;
use crate::table;
use report::Report;

/// What the user may choose.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Options {
    /// Print one JSON document instead of tables
    #[arg(long)]
    pub json: bool,
    /// Fewer rounds and shorter samples: under a minute, and rougher
    #[arg(long)]
    pub quick: bool,
    /// Write the plots as SVG files into this directory
    #[arg(long, value_name = "DIR")]
    pub plot: Option<PathBuf>,
    /// How many alternating rounds (default: 5, with --quick 2)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: Option<u32>,
}

/// Runs the benchmark and prints the report. A transport that failed is named in the report and makes this an error.
pub fn main(options: &Options) -> Result<()> {
    if let Some(directory) = &options.plot {
        // Before minutes of measuring, not after.
        std::fs::create_dir_all(directory)
            .with_context(|| format!("cannot make the plot directory {}", directory.display()))?;
    }
    run(options, &Launcher::new()?, &Plan::of(options))
}

fn run(options: &Options, launcher: &Launcher, plan: &Plan) -> Result<()> {
    let machine = Machine::describe(launcher.cores);
    let measured = measure(launcher, plan, &machine)?;
    let report = Report::of(options, plan, machine, &measured)?;
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

/// What is measured about a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Experiment {
    RoundTripBlocking,
    RoundTripEpoll,
    MessageRate,
    Bulk,
    Connects,
}

impl Experiment {
    const fn title(self) -> &'static str {
        match self {
            Self::RoundTripBlocking => "round trip, blocking",
            Self::RoundTripEpoll => "round trip, epoll",
            Self::MessageRate => "one-way messages",
            Self::Bulk => "bulk by write size",
            Self::Connects => "connections",
        }
    }

    /// The transports it makes sense for: a connection is not set up any faster by spinning.
    fn transports(self) -> &'static [Transport] {
        use Transport::{AfUnix, Crosslane, KernelTcp, KernelTcpSpinning};
        match self {
            Self::Connects => &[KernelTcp, AfUnix, Crosslane],
            _ => &[KernelTcp, KernelTcpSpinning, AfUnix, Crosslane],
        }
    }

    /// How the probe waits: its own word for it.
    fn waiting(self, transport: Transport) -> &'static str {
        match (self, transport) {
            (Self::RoundTripEpoll, Transport::KernelTcpSpinning) => "epoll-spin",
            (Self::RoundTripEpoll, _) => "epoll",
            (_, Transport::KernelTcpSpinning) => "spin",
            _ => "blocking",
        }
    }
}

/// One row of the plan: an experiment at a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Point {
    experiment: Experiment,
    size_bytes: u64,
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const ROUND_TRIP_SIZES: [u64; 11] = [1, 8, 48, 64, 256, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB];
const MESSAGE_SIZES: [u64; 3] = [8, 64, KIB];
const BULK_SIZES: [u64; 10] = [1, 64, 128, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB];

/// What is measured, how long and how often.
struct Plan {
    points: Vec<Point>,
    rounds: u32,
    sample_ms: u64,
    floors: FloorTimes,
}

impl Plan {
    fn of(options: &Options) -> Self {
        let at = |experiment, sizes: &[u64]| {
            sizes.iter().map(|size| Point { experiment, size_bytes: *size }).collect::<Vec<_>>()
        };
        let points = [
            at(Experiment::RoundTripBlocking, &ROUND_TRIP_SIZES),
            at(Experiment::RoundTripEpoll, &ROUND_TRIP_SIZES),
            at(Experiment::MessageRate, &MESSAGE_SIZES),
            at(Experiment::Bulk, &BULK_SIZES),
            at(Experiment::Connects, &[1]),
        ];
        let (rounds, sample_ms, floors) = match options.quick {
            true => (2, 40, FloorTimes { line_ms: 3, copy_ms: 10 }),
            false => (5, 250, FloorTimes { line_ms: 6, copy_ms: 25 }),
        };
        Self { points: points.concat(), rounds: options.rounds.unwrap_or(rounds), sample_ms, floors }
    }

    fn steps(&self) -> u64 {
        let samples: usize = self.points.iter().map(|point| point.experiment.transports().len()).sum();
        samples as u64 * u64::from(self.rounds)
    }
}

/// One transport at one point in one round.
struct Sample {
    latencies: Option<Latencies>,
    /// Messages, bytes or connections a second.
    rate_per_s: Option<f64>,
    beside: Beside,
}

/// All rounds of one transport at one point. Round N of one cell was taken beside round N of its neighbours.
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
        format!("{} at {} over {}", self.experiment.title(), table::size(self.size_bytes), self.transport.title())
    }
}

struct Measured {
    cells: Vec<Cell>,
    syscalls_ns: Vec<f64>,
    failures: Vec<Failure>,
}

impl Measured {
    fn cell(&self, point: Point, transport: Transport) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.point == point && cell.transport == transport)
    }

    /// A transport that failed once in an experiment is not tried again there: each attempt may cost a timeout.
    fn has_failed(&self, experiment: Experiment, transport: Transport) -> bool {
        self.failures.iter().any(|failure| failure.experiment == experiment && failure.transport == transport)
    }
}

fn measure(launcher: &Launcher, plan: &Plan, machine: &Machine) -> Result<Measured> {
    let cells = plan.points.iter().flat_map(|point| {
        point.experiment.transports().iter().map(|transport| Cell {
            point: *point,
            transport: *transport,
            rounds: Vec::new(),
        })
    });
    let mut measured = Measured { cells: cells.collect(), syscalls_ns: Vec::new(), failures: Vec::new() };
    let mut progress = Progress::new(plan.steps());
    if let Some(warning) = machine.busy_warning() {
        progress.warn(&warning);
    }
    for round in 1..=plan.rounds {
        measured.syscalls_ns.push(floors::syscall_ns_p50(launcher, plan.floors.line_ms)?);
        for index in 0..measured.cells.len() {
            let Cell { point, transport, .. } = measured.cells[index];
            let stage = format!("round {round} of {}: {}", plan.rounds, point.experiment.title());
            progress.step(&stage, &format!("{} over {}", table::size(point.size_bytes), transport.title()));
            if measured.has_failed(point.experiment, transport)
                || (transport == Transport::KernelTcpSpinning && launcher.cores.is_none())
            {
                continue;
            }
            let beside = floors_beside(launcher, plan, point)?;
            match take_sample(launcher, plan, point, transport, beside) {
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

fn floors_beside(launcher: &Launcher, plan: &Plan, point: Point) -> Result<Beside> {
    let copies = point.experiment == Experiment::Bulk;
    Ok(Beside {
        cache_line: floors::cache_line(launcher, plan.floors.line_ms)?,
        copy_pipeline: if copies { floors::copy_pipeline(launcher, plan.floors.copy_ms)? } else { None },
    })
}

fn take_sample(launcher: &Launcher, plan: &Plan, point: Point, transport: Transport, beside: Beside) -> Result<Sample> {
    let (size, milliseconds) = (point.size_bytes.to_string(), plan.sample_ms.to_string());
    let waiting = point.experiment.waiting(transport);
    let timeout = Duration::from_millis(plan.sample_ms * 2) + Duration::from_secs(15);
    let stream = |what: &str| {
        let args = [waiting, what, &size, &milliseconds];
        launcher.pair(transport, Probe::Stream, &args, &args, timeout)?.server.per_second("bytes")
    };
    let (latencies, rate_per_s) = match point.experiment {
        Experiment::RoundTripBlocking | Experiment::RoundTripEpoll => {
            let client = [waiting, &size, &milliseconds];
            let pair = launcher.pair(transport, Probe::RoundTrip, &client[..2], &client, timeout)?;
            (Some(pair.client.latencies()?), None)
        }
        Experiment::MessageRate => (None, Some(stream("messages")? / point.size_bytes as f64)),
        Experiment::Bulk => (None, Some(stream("bulk")?)),
        Experiment::Connects => {
            let found = launcher.pair(transport, Probe::Connects, &[], &[&milliseconds], timeout)?.client;
            (Some(found.latencies()?), Some(found.per_second("operations")?))
        }
    };
    Ok(Sample { latencies, rate_per_s, beside })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plan of one point of each experiment: all of the path from probe to report, in a second.
    fn small_plan() -> Plan {
        let point = |experiment, size_bytes| Point { experiment, size_bytes };
        Plan {
            points: vec![
                point(Experiment::RoundTripBlocking, 8),
                point(Experiment::RoundTripEpoll, 64 * KIB),
                point(Experiment::MessageRate, 64),
                point(Experiment::Bulk, 64 * KIB),
                point(Experiment::Connects, 1),
            ],
            rounds: 2,
            sample_ms: 10,
            floors: FloorTimes { line_ms: 2, copy_ms: 5 },
        }
    }

    fn small_run(crosslane: &str) -> (Measured, Report) {
        let launcher = Launcher::with_stand_in(crosslane).unwrap();
        let machine = Machine::describe(launcher.cores);
        let measured = measure(&launcher, &small_plan(), &machine).unwrap();
        let report = Report::of(&Options::default(), &small_plan(), machine, &measured).unwrap();
        (measured, report)
    }

    #[test]
    fn every_transport_has_figures_in_every_experiment() {
        // `env PROGRAM ...` starts a program as `crosslane run` would, so this column is kernel TCP once more.
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
        assert!(text.contains("Crosslane") && text.contains("64 KiB") && text.contains("Floors:"), "{text}");

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
        assert_eq!(report.failures.len(), 5, "once in each experiment, not once a round");
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
    fn the_plan_covers_the_sizes_that_were_asked_for() {
        let plan = Plan::of(&Options { rounds: Some(3), ..Options::default() });
        assert_eq!(plan.rounds, 3);
        let sizes = |experiment| {
            plan.points.iter().filter(move |point| point.experiment == experiment).map(|point| point.size_bytes)
        };
        assert_eq!(sizes(Experiment::RoundTripBlocking).max(), Some(MIB));
        assert_eq!(sizes(Experiment::Bulk).max(), Some(4 * MIB));
        assert!(sizes(Experiment::RoundTripEpoll).eq(ROUND_TRIP_SIZES));
        assert_eq!(Plan::of(&Options { quick: true, ..Options::default() }).rounds, 2);
    }
}
