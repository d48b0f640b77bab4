//! The report of `bench sockets`: rows with their ratios, as JSON and as text.

use anyhow::Result;
use clap::ValueEnum;
use machine::Machine;
use serde::Serialize;
use stats::{Latencies, Quantiles, Ratio, Table, median, median_ratio, ratios};
use units::NONE;

use super::{Cell, Clients, Experiment, Failure, Measured, Options, Plan, Point, comparison};
use crate::floors::{Beside, FloorSummary};
use crate::launch::{Libraries, Transport};

pub const SCHEMA: &str = "crosslane.bench.sockets/1";

/// Everything a run found.
#[derive(Serialize)]
pub struct Report {
    pub schema: &'static str,
    /// What every number here is.
    pub kind: &'static str,
    pub command: String,
    /// What was loaded: with a baseline, two builds were compared with each other.
    pub libraries: Libraries,
    pub machine: Machine,
    pub rounds: u32,
    pub sample_ms: u64,
    /// Of connections at once.
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
    /// The cache line's round trip beside these samples.
    pub cache_line_rtt_ns_p50: Option<f64>,
    /// p50 over that floor, round by round.
    pub p50_over_cache_line: Option<f64>,
    pub copy_pipeline_bytes_per_s: Option<f64>,
    /// The rate as a share of that floor, round by round.
    pub rate_over_copy_pipeline: Option<f64>,
    /// How many times lower the p50 is than over blocking kernel TCP, round by round.
    pub p50_times_below_kernel_tcp: Option<f64>,
    /// How many times higher the rate is than over blocking kernel TCP, round by round.
    pub rate_times_kernel_tcp: Option<f64>,
    /// The rate as a share of that over AF_UNIX, round by round.
    pub rate_over_af_unix: Option<f64>,
    /// The time of an operation over the baseline's: of the p50s, else of one over the rates. Above 1 is slower.
    pub time_over_baseline: Option<Ratio>,
}

impl Cell {
    fn p50s(&self) -> Vec<f64> {
        self.rounds.iter().filter_map(|sample| Some(sample.latencies.as_ref()?.quantile_ns(0.5))).collect()
    }

    fn rates(&self) -> Vec<f64> {
        self.rounds.iter().filter_map(|sample| sample.rate_per_s).collect()
    }

    fn cache_lines(&self) -> Vec<f64> {
        self.rounds.iter().filter_map(|sample| Some(sample.beside.cache_line?.rtt_ns_p50)).collect()
    }

    fn copy_pipelines(&self) -> Vec<f64> {
        self.rounds.iter().filter_map(|sample| Some(sample.beside.copy_pipeline?.bytes_per_s)).collect()
    }

    /// All rounds as one distribution.
    pub(super) fn merged(&self) -> Result<Option<Latencies>> {
        let mut all: Option<Latencies> = None;
        for latencies in self.rounds.iter().filter_map(|sample| sample.latencies.as_ref()) {
            match &mut all {
                Some(all) => all.merge(latencies),
                None => all = Some(latencies.clone()),
            }
        }
        Ok(all)
    }

    /// Medians of each round's quantiles; the maximum and the count are of all rounds.
    fn quantiles(&self) -> Option<Quantiles> {
        let rounds: Vec<Quantiles> =
            self.rounds.iter().filter_map(|sample| Some(sample.latencies.as_ref()?.quantiles())).collect();
        Some(Quantiles {
            p50_ns: median(rounds.iter().map(|round| round.p50_ns))?,
            p99_ns: median(rounds.iter().map(|round| round.p99_ns))?,
            p999_ns: median(rounds.iter().map(|round| round.p999_ns))?,
            max_ns: rounds.iter().map(|round| round.max_ns).fold(0.0, f64::max),
            samples: rounds.iter().map(|round| round.samples).sum(),
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
            latency: self.quantiles(),
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
            rate_times_kernel_tcp: median_ratio(&rates, &of(Transport::KernelTcp, Self::rates)),
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
    pub fn of(options: &Options, plan: &Plan, machine: Machine, measured: &Measured) -> Result<Self> {
        let beside: Vec<Beside> =
            measured.cells.iter().flat_map(|cell| cell.rounds.iter().map(|sample| sample.beside)).collect();
        Ok(Self {
            schema: SCHEMA,
            kind: "measured",
            command: command(options),
            libraries: options.libraries(),
            machine,
            rounds: plan.rounds,
            sample_ms: plan.sample_ms,
            clients: plan.clients,
            floors: FloorSummary::of(&beside, &measured.syscalls_ns),
            rows: measured.cells.iter().map(|cell| cell.row(measured)).collect(),
            failures: measured.failures.clone(),
        })
    }

    pub(super) fn row(&self, point: Point, transport: Transport) -> Option<&Row> {
        let wanted = |row: &&Row| {
            row.experiment == point.experiment && row.size_bytes == point.size_bytes && row.transport == transport
        };
        self.rows.iter().find(wanted)
    }

    /// The sizes of an experiment, in the order they were measured.
    pub(super) fn sizes(&self, experiment: Experiment) -> Vec<u64> {
        let mut sizes: Vec<u64> =
            self.rows.iter().filter(|row| row.experiment == experiment).map(|row| row.size_bytes).collect();
        sizes.dedup();
        sizes
    }

    /// The report for a person.
    pub fn text(&self) -> String {
        let mut text = if self.libraries.baseline.is_some() { comparison::text(self) } else { self.transports_text() };
        text += &format!("\n{}\n", self.floors.sentence());
        for failure in &self.failures {
            text += &format!("failed: {}: {}\n", failure.title(), failure.error);
        }
        text
    }

    fn transports_text(&self) -> String {
        let mut text = format!(
            "Each figure is measured: the same C programs over each transport, {} alternating rounds, medians over\n\
             the rounds (max: of all). \"x floor\" is against one cache line bounced between the same two cores\n\
             beside each sample. --json has every quantile of every transport.\n{}\n",
            self.rounds,
            self.machine.sentence()
        );
        for experiment in Experiment::value_variants() {
            let table = match experiment {
                Experiment::RoundTripBlocking | Experiment::RoundTripEpoll => self.round_trips(*experiment),
                Experiment::MessageRate => self.rates(*experiment, units::rate),
                Experiment::Bulk => self.rates(*experiment, units::gigabytes),
                Experiment::Connects | Experiment::ConnectsEpoll | Experiment::ConnectsAtOnce => {
                    self.connects(*experiment)
                }
            };
            if !self.sizes(*experiment).is_empty() {
                text += &format!("\n{}\n\n{}", self.heading(*experiment), table.render());
            }
        }
        text
    }

    /// What an experiment does, and the unit of its figures.
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

    fn round_trips(&self, experiment: Experiment) -> Table {
        let header = [
            "size",
            "p50",
            "p99",
            "p99.9",
            "max",
            "p50",
            "p99",
            "p50",
            "p99",
            "p50",
            "p99",
            "p99.9",
            "max",
            "x floor",
            "TCP / this",
        ];
        let groups = [("", 1), ("kernel TCP", 4), ("TCP spinning", 2), ("AF_UNIX", 2), ("Crosslane", 6)];
        let mut table = Table::numeric(header).groups(groups);
        for size_bytes in self.sizes(experiment) {
            let point = Point { experiment, size_bytes };
            let row = |transport| self.row(point, transport);
            let cells = |transport: Transport, whole: bool| {
                let latency = row(transport).and_then(|row| row.latency.as_ref());
                let field = |of: fn(&Quantiles) -> f64| self.cell(point, transport, latency.map(of), units::micros);
                let mut cells = vec![field(|latency| latency.p50_ns), field(|latency| latency.p99_ns)];
                if whole {
                    cells.extend([field(|latency| latency.p999_ns), field(|latency| latency.max_ns)]);
                }
                cells
            };
            let crosslane = row(Transport::Crosslane);
            let mut line = vec![units::size(size_bytes)];
            line.extend(cells(Transport::KernelTcp, true));
            line.extend(cells(Transport::KernelTcpSpinning, false));
            line.extend(cells(Transport::AfUnix, false));
            line.extend(cells(Transport::Crosslane, true));
            line.push(units::times(crosslane.and_then(|row| row.p50_over_cache_line)));
            line.push(units::times(crosslane.and_then(|row| row.p50_times_below_kernel_tcp)));
            table.row(line);
        }
        table
    }

    fn rates(&self, experiment: Experiment, write: fn(Option<f64>) -> String) -> Table {
        let floor = experiment == Experiment::Bulk;
        let mut header = vec!["size", "kernel TCP", "TCP spinning", "AF_UNIX", "Crosslane", "this / TCP"];
        if floor {
            header.extend(["copy floor", "of floor"]);
        }
        let mut table = Table::numeric(header);
        for size_bytes in self.sizes(experiment) {
            let point = Point { experiment, size_bytes };
            let mut line = vec![units::size(size_bytes)];
            for transport in experiment.transports() {
                let rate = self.row(point, *transport).and_then(|row| row.rate_per_s);
                line.push(self.cell(point, *transport, rate, write));
            }
            let crosslane = self.row(point, Transport::Crosslane);
            line.push(units::times(crosslane.and_then(|row| row.rate_times_kernel_tcp)));
            if floor {
                let beside = |transport| self.row(point, transport).and_then(|row| row.copy_pipeline_bytes_per_s);
                line.push(units::gigabytes(beside(Transport::Crosslane).or_else(|| beside(Transport::KernelTcp))));
                line.push(units::percent(crosslane.and_then(|row| row.rate_over_copy_pipeline)));
            }
            table.row(line);
        }
        table
    }

    fn connects(&self, experiment: Experiment) -> Table {
        let header = ["", "rate", "p50 µs", "p99", "p99.9", "max", "this / TCP", "this / AF_UNIX"];
        let mut table = Table::numeric(header);
        for size_bytes in self.sizes(experiment) {
            for transport in experiment.transports() {
                let point = Point { experiment, size_bytes };
                let row = self.row(point, *transport);
                let latency = row.and_then(|row| row.latency.as_ref());
                table.row(vec![
                    transport.title().to_owned(),
                    self.cell(point, *transport, row.and_then(|row| row.rate_per_s), units::rate),
                    units::micros(latency.map(|latency| latency.p50_ns)),
                    units::micros(latency.map(|latency| latency.p99_ns)),
                    units::micros(latency.map(|latency| latency.p999_ns)),
                    units::micros(latency.map(|latency| latency.max_ns)),
                    units::times(row.and_then(|row| row.rate_times_kernel_tcp)),
                    units::times(row.and_then(|row| row.rate_over_af_unix)),
                ]);
            }
        }
        table
    }

    /// A number, or what stands for its absence: a failure must not look like something that was not asked for.
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

/// The command that would make this report again.
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
