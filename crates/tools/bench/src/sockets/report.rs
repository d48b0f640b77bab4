//! The report of `bench sockets`: rows with their ratios, as JSON.

use clap::ValueEnum;
use machine::Machine;
use serde::Serialize;
use stats::{Latencies, Quantiles, Ratio, median, median_ratio, ratios};
use units::NONE;

use super::{Cell, Clients, Experiment, Failure, Measured, Options, Plan, Point};
use crate::floors::{FloorSample, FloorSummary};
use crate::launch::{Libraries, Transport};

pub const SCHEMA: &str = "crosslane.bench.sockets/1";

/// The results of a run.
#[derive(Serialize)]
pub struct Report {
    pub schema: &'static str,
    /// Provenance of every number.
    pub kind: &'static str,
    pub command: String,
    /// The libraries loaded; with a baseline, two builds were compared.
    pub libraries: Libraries,
    pub machine: Machine,
    pub rounds: u32,
    pub sample_ms: u64,
    /// Clients of the experiment with simultaneous connections.
    pub clients: Clients,
    pub floors: FloorSummary,
    pub rows: Vec<Row>,
    pub failures: Vec<Failure>,
}

/// One transport at one point: medians over the rounds.
#[derive(Serialize)]
pub struct Row {
    pub kind: &'static str,
    pub experiment: Experiment,
    pub size_bytes: u64,
    pub transport: Transport,
    pub rounds: usize,
    pub latency: Option<Quantiles>,
    pub p50_ns_by_round: Vec<f64>,
    pub rate_per_s: Option<f64>,
    pub rate_unit: Option<&'static str>,
    pub rate_per_s_by_round: Vec<f64>,
    /// Median of the cache line round trips next to these samples.
    pub cache_line_rtt_ns_p50: Option<f64>,
    /// Ratio of the p50 to that floor, round by round.
    pub p50_over_cache_line: Option<f64>,
    pub copy_pipeline_bytes_per_s: Option<f64>,
    /// Ratio of the rate to that floor, round by round.
    pub rate_over_copy_pipeline: Option<f64>,
    /// Ratio of the p50 of blocking kernel TCP to this p50, round by round.
    pub p50_times_below_kernel_tcp: Option<f64>,
    /// The same for kernel TCP whose ends spin, as lanes do.
    pub p50_times_below_tcp_spinning: Option<f64>,
    /// The same for AF_UNIX, whose ends block.
    pub p50_times_below_af_unix: Option<f64>,
    /// Ratio of this rate to that of blocking kernel TCP, round by round.
    pub rate_times_kernel_tcp: Option<f64>,
    /// The same for kernel TCP whose ends spin.
    pub rate_over_tcp_spinning: Option<f64>,
    /// Ratio of this rate to that over AF_UNIX, round by round.
    pub rate_over_af_unix: Option<f64>,
    /// Ratio of the time of an operation to that with the baseline: of the p50s, otherwise of the inverse rates. Above
    /// 1 is slower.
    pub time_over_baseline: Option<Ratio>,
}

impl Cell {
    fn p50s(&self) -> Vec<f64> {
        self.latencies().map(|round| round.quantile_ns(0.5)).collect()
    }

    fn rates(&self) -> Vec<f64> {
        self.rounds.iter().filter_map(|sample| sample.rate_per_s).collect()
    }

    fn cache_lines(&self) -> Vec<f64> {
        self.rounds.iter().filter_map(|sample| Some(sample.floors.cache_line?.rtt_ns_p50)).collect()
    }

    fn copy_pipelines(&self) -> Vec<f64> {
        self.rounds.iter().filter_map(|sample| Some(sample.floors.copy_pipeline?.bytes_per_s)).collect()
    }

    fn latencies(&self) -> impl Iterator<Item = &Latencies> {
        self.rounds.iter().filter_map(|sample| sample.latencies.as_ref())
    }

    /// Returns all rounds as one distribution; `None` without rounds.
    pub(super) fn merged(&self) -> Option<Latencies> {
        self.latencies().cloned().reduce(|mut all, round| {
            all.merge(&round);
            all
        })
    }

    fn row(&self, measured: &Measured) -> Row {
        let (p50s, rates, lines, copies) = (self.p50s(), self.rates(), self.cache_lines(), self.copy_pipelines());
        let of = |transport, values: fn(&Self) -> Vec<f64>| {
            measured.cell(self.point, transport).map_or_else(Vec::new, values)
        };
        Row {
            kind: "measured",
            experiment: self.point.experiment,
            size_bytes: self.point.size_bytes,
            transport: self.transport,
            rounds: self.rounds.len(),
            latency: Quantiles::over_rounds(self.latencies()),
            rate_per_s: median(rates.iter().copied()),
            rate_unit: match self.point.experiment {
                Experiment::RoundTripBlocking | Experiment::RoundTripEpoll => None,
                Experiment::MessageRate => Some("messages/s"),
                Experiment::Bulk => Some("bytes/s"),
                Experiment::Connects | Experiment::ConnectsEpoll | Experiment::ConnectsAtOnce => Some("connections/s"),
            },
            cache_line_rtt_ns_p50: median(lines.iter().copied()),
            p50_over_cache_line: median_ratio(&p50s, &lines),
            copy_pipeline_bytes_per_s: median(copies.iter().copied()),
            rate_over_copy_pipeline: if copies.is_empty() { None } else { median_ratio(&rates, &copies) },
            p50_times_below_kernel_tcp: median_ratio(&of(Transport::KernelTcp, Self::p50s), &p50s),
            p50_times_below_tcp_spinning: median_ratio(&of(Transport::KernelTcpSpinning, Self::p50s), &p50s),
            p50_times_below_af_unix: median_ratio(&of(Transport::AfUnix, Self::p50s), &p50s),
            rate_times_kernel_tcp: median_ratio(&rates, &of(Transport::KernelTcp, Self::rates)),
            rate_over_tcp_spinning: median_ratio(&rates, &of(Transport::KernelTcpSpinning, Self::rates)),
            rate_over_af_unix: median_ratio(&rates, &of(Transport::AfUnix, Self::rates)),
            time_over_baseline: match (self.transport, rates.is_empty()) {
                (Transport::Crosslane, true) => ratio(&p50s, &of(Transport::Baseline, Self::p50s)),
                (Transport::Crosslane, false) => ratio(&of(Transport::Baseline, Self::rates), &rates),
                _ => None,
            },
            p50_ns_by_round: p50s,
            rate_per_s_by_round: rates,
        }
    }
}

fn ratio(over: &[f64], under: &[f64]) -> Option<Ratio> {
    Some(Ratio::of(&ratios(over, under))).filter(|ratio| ratio.rounds > 0)
}

impl Report {
    pub fn of(options: &Options, plan: &Plan, machine: Machine, measured: &Measured) -> Self {
        let samples: Vec<FloorSample> =
            measured.cells.iter().flat_map(|cell| cell.rounds.iter().map(|sample| sample.floors)).collect();
        Self {
            schema: SCHEMA,
            kind: "measured",
            command: command(options),
            libraries: options.libraries(),
            machine,
            rounds: plan.rounds,
            sample_ms: plan.sample_ms,
            clients: plan.clients,
            floors: FloorSummary::of(&samples, &measured.syscalls_ns),
            rows: measured.cells.iter().map(|cell| cell.row(measured)).collect(),
            failures: measured.failures.clone(),
        }
    }

    pub(super) fn row(&self, point: Point, transport: Transport) -> Option<&Row> {
        let wanted = |row: &&Row| {
            row.experiment == point.experiment && row.size_bytes == point.size_bytes && row.transport == transport
        };
        self.rows.iter().find(wanted)
    }

    /// Returns the sizes of an experiment in the order of measurement.
    pub(super) fn sizes(&self, experiment: Experiment) -> Vec<u64> {
        let mut sizes: Vec<u64> =
            self.rows.iter().filter(|row| row.experiment == experiment).map(|row| row.size_bytes).collect();
        sizes.dedup();
        sizes
    }

    /// Returns the operation of an experiment and the unit of its figures.
    pub(super) fn heading(&self, experiment: Experiment) -> String {
        format!("{}: {}", capital(experiment.title()), self.explained(experiment))
    }

    fn explained(&self, experiment: Experiment) -> String {
        let Clients { processes, connections_each } = self.clients;
        let connection = "connect, two bytes there and two back, close";
        match experiment {
            Experiment::RoundTripBlocking | Experiment::RoundTripEpoll => "send and wait for the echo, µs".to_owned(),
            Experiment::MessageRate => "one send and one recv each, messages/s".to_owned(),
            Experiment::Bulk => "GB/s".to_owned(),
            Experiment::Connects | Experiment::ConnectsEpoll => {
                format!("{connection}, one after the other; connections/s")
            }
            Experiment::ConnectsAtOnce => {
                format!("{connection}, {connections_each} times by each of {processes} processes; connections/s")
            }
        }
    }

    /// Returns a number, or the reason for its absence: a failure must differ from an experiment that was not selected.
    pub(super) fn cell(
        &self,
        point: Point,
        transport: Transport,
        value: Option<f64>,
        write: fn(Option<f64>) -> String,
    ) -> String {
        let failed = |failure: &Failure| failure.experiment == point.experiment && failure.transport == transport;
        match value {
            Some(_) => write(value),
            None if self.failures.iter().any(failed) => "failed".to_owned(),
            None => NONE.to_owned(),
        }
    }
}

fn capital(title: &str) -> String {
    let mut letters = title.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// Returns the command that produces this report.
fn command(options: &Options) -> String {
    let mut command = "crosslane bench sockets".to_owned();
    if options.json {
        command += " --json";
    }
    if options.quick {
        command += " --quick";
    }
    if !options.only.is_empty() {
        let names = options.only.iter().filter_map(ValueEnum::to_possible_value);
        let names: Vec<String> = names.map(|value| value.get_name().to_owned()).collect();
        command += &format!(" --only {}", names.join(","));
    }
    for (option, path) in [("--library", &options.library), ("--baseline", &options.baseline)] {
        if let Some(path) = path {
            command += &format!(" {option} {}", path.display());
        }
    }
    let numbers =
        [("--rounds", options.rounds), ("--clients", options.clients), ("--connections", options.connections)];
    for (option, number) in numbers {
        if let Some(number) = number {
            command += &format!(" {option} {number}");
        }
    }
    command
}
