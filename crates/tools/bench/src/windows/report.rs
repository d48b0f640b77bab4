//! The report of `bench windows`, as JSON.

use machine::Machine;
use serde::Serialize;
use stats::{Latencies, Quantiles, median, median_ratio};

use super::isolation::{BackgroundLoad, IsolationCell};
use super::published::{self, Assumption};
use super::rack::ProxyCounters;
use super::{Cell, DataPath, Experiment, Measured, Modelled, ONE_WAY_NS, Options, Plan};
use crate::floors::{FloorSample, FloorSummary};
use crate::launch::PairCounts;

pub const SCHEMA: &str = "crosslane.bench.windows/1";

/// Processes of a round trip through proxies that need a processor: two programs and two proxies.
pub(super) const PROCESSES: usize = 4;
/// Share of the modelled wire in a round trip, and the factor that allows for additional time.
const WIRE_NS: f64 = 2.0 * ONE_WAY_NS;
const OVER_WIRE: f64 = 1.1;

/// The results of a run.
#[derive(Serialize)]
pub struct Report {
    pub schema: &'static str,
    pub command: String,
    pub machine: Machine,
    pub rounds: u32,
    pub sample_ms: u64,
    pub floors: FloorSummary,
    /// Whether the four processes of a round trip through proxies can run at once.
    pub cores_suffice: bool,
    pub rows: Vec<Row>,
    pub timed: Timed,
    pub isolation: Vec<IsolationRow>,
    pub copies: Vec<Copies>,
    pub where_cores_suffice: WithEnoughCores,
    /// Counts of the pairs of programs of all measurements by how they ended.
    pub pairs: PairCounts,
    pub failures: Vec<String>,
}

/// One path at one point: medians over the rounds.
#[derive(Serialize)]
pub struct Row {
    pub kind: &'static str,
    pub experiment: Experiment,
    pub size_bytes: u64,
    #[serde(rename = "way")]
    pub path: DataPath,
    pub rounds: usize,
    /// Why there are no figures, or not those of all rounds.
    pub missing: Option<String>,
    pub latency: Option<Quantiles>,
    pub p50_ns_by_round: Vec<f64>,
    pub p99_ns_by_round: Vec<f64>,
    pub bytes_per_s: Option<f64>,
    pub bytes_per_s_by_round: Vec<f64>,
    pub cache_line_rtt_ns_p50: Option<f64>,
    pub p50_over_cache_line: Option<f64>,
    pub p50_times_below_kernel_tcp: Option<f64>,
    /// Whether the p99 is `below` or `above` that of kernel TCP.
    pub p99_against_kernel_tcp: Option<&'static str>,
    pub mapping_bytes_per_s: Option<f64>,
    pub rate_over_mapping: Option<f64>,
    pub rate_times_kernel_tcp: Option<f64>,
}

/// Figures over the modelled link, and published ones.
#[derive(Serialize)]
pub struct Timed {
    pub assumptions: Vec<Assumption>,
    pub figures: Vec<Figure>,
}

/// A round trip by size, or a ratio.
#[derive(Serialize)]
pub struct Figure {
    /// `measured`, `modelled`, `published`, or several of them joined by ` + `.
    pub kind: &'static str,
    pub what: String,
    pub unit: &'static str,
    /// For 8 B, 48 B, 1 KiB and 4 KiB.
    pub values: [Option<f64>; 4],
}

/// A ping-pong under background load.
#[derive(Serialize)]
pub struct IsolationRow {
    pub kind: &'static str,
    #[serde(rename = "way")]
    pub path: &'static str,
    pub case: String,
    pub rounds: usize,
    pub rounds_failed: usize,
    /// Round trips a second, which shows a few long ones that quantiles may not.
    pub trips_per_s: Option<f64>,
    pub latency: Option<Quantiles>,
    pub p99_of_quiet: Option<f64>,
    pub streams_bytes_per_s: Option<f64>,
}

/// Copies and frames of a proxy.
#[derive(Serialize)]
pub struct Copies {
    pub kind: &'static str,
    pub node: String,
    pub copies_per_byte_sent: Option<f64>,
    pub copies_per_byte_received: Option<f64>,
    pub frames_per_kib: Option<f64>,
    pub frames_per_publish: Option<f64>,
    pub frames_per_ring: Option<f64>,
    pub stalls: u64,
}

/// Results that do not need a core for each process.
#[derive(Serialize)]
pub struct WithEnoughCores {
    pub modelled: Modelled,
    /// The quiet case without the wire: the time that programs, proxies and cache lines add.
    pub modelled_without_wire_ns: Option<f64>,
    pub modelled_over_cache_line: Option<f64>,
    /// Instructions of the engine for a frame of 8 bytes, sent and received.
    pub instructions_per_frame: Option<f64>,
    pub instructions_missing: Option<String>,
}

impl Cell {
    fn of<T>(&self, value: impl Fn(&super::Sample) -> Option<T>) -> Vec<T> {
        self.rounds.iter().filter_map(value).collect()
    }

    fn latencies(&self) -> impl Iterator<Item = &Latencies> {
        self.rounds.iter().filter_map(|sample| sample.latencies.as_ref())
    }

    fn p50s(&self) -> Vec<f64> {
        self.latencies().map(|round| round.quantile_ns(0.5)).collect()
    }

    fn rates(&self) -> Vec<f64> {
        self.of(|sample| sample.bytes_per_s)
    }

    fn row(&self, kernel: Option<&Self>, missing: Option<String>) -> Row {
        let lines = self.of(|sample| Some(sample.line?.rtt_ns_p50));
        let mappings = self.of(|sample| sample.mapping);
        let (p50s, rates) = (self.p50s(), self.rates());
        let kernel_p50s = kernel.map_or_else(Vec::new, Self::p50s);
        let kernel_rates = kernel.map_or_else(Vec::new, Self::rates);
        let latency = Quantiles::over_rounds(self.latencies());
        let kernel_latency = kernel.and_then(|cell| Quantiles::over_rounds(cell.latencies()));
        let is_below = latency.as_ref().zip(kernel_latency.as_ref()).map(|(own, kernel)| own.p99_ns < kernel.p99_ns);
        Row {
            kind: "measured",
            experiment: self.experiment,
            size_bytes: self.size_bytes,
            path: self.path,
            rounds: self.rounds.len(),
            missing,
            latency,
            p99_ns_by_round: self.latencies().map(|round| round.quantile_ns(0.99)).collect(),
            bytes_per_s: median(rates.iter().copied()),
            cache_line_rtt_ns_p50: median(lines.iter().copied()),
            p50_over_cache_line: median_ratio(&p50s, &lines),
            p50_times_below_kernel_tcp: median_ratio(&kernel_p50s, &p50s),
            p99_against_kernel_tcp: is_below.map(|is_below| if is_below { "below" } else { "above" }),
            mapping_bytes_per_s: median(mappings.iter().copied()),
            rate_over_mapping: median_ratio(&rates, &mappings),
            rate_times_kernel_tcp: median_ratio(&rates, &kernel_rates),
            p50_ns_by_round: p50s,
            bytes_per_s_by_round: rates,
        }
    }
}

impl IsolationRow {
    pub(super) fn rounds_begun(&self) -> usize {
        self.rounds + self.rounds_failed
    }
}

impl IsolationCell {
    fn row(&self, quiet: Option<&Self>, sample_ms: u64) -> IsolationRow {
        let p99s = |cell: &Self| cell.rounds.iter().map(|round| round.quantile_ns(0.99)).collect::<Vec<_>>();
        IsolationRow {
            kind: "measured",
            path: self.case.path.title(),
            case: self.case.title.to_owned(),
            rounds: self.rounds.len(),
            rounds_failed: self.failed,
            trips_per_s: median(self.rounds.iter().map(|round| round.samples() as f64 * 1e3 / sample_ms as f64)),
            latency: Quantiles::over_rounds(&self.rounds),
            p99_of_quiet: quiet.and_then(|quiet| median_ratio(&p99s(self), &p99s(quiet))),
            streams_bytes_per_s: median(self.streams.iter().copied()),
        }
    }
}

impl Report {
    pub fn of(options: &Options, plan: &Plan, machine: Machine, measured: Measured, modelled: Modelled) -> Self {
        let floor_sample =
            |cell: &Cell| cell.of(|sample| Some(FloorSample { cache_line: sample.line, copy_pipeline: None }));
        let floor_samples: Vec<FloorSample> = measured.cells.iter().flat_map(floor_sample).collect();
        let floors = FloorSummary::of(&floor_samples, &measured.syscalls_ns);
        let kernel_of = |cell: &Cell| {
            // Round trips over the modelled link are compared with those of kernel TCP in the same round.
            let experiment = if cell.experiment == Experiment::Bulk { Experiment::Bulk } else { Experiment::RoundTrip };
            let is_it = |other: &&Cell| {
                (other.experiment, other.size_bytes, other.path) == (experiment, cell.size_bytes, DataPath::KernelTcp)
            };
            measured.cells.iter().find(is_it)
        };
        let row = |cell: &Cell| cell.row(kernel_of(cell), measured.why_missing(cell.experiment, cell.path));
        let rows: Vec<Row> = measured.cells.iter().map(row).collect();
        let failures = measured.failures.iter().map(|failure| &failure.what).chain(&measured.other_failures);
        let failures = failures.cloned().collect();
        let quiet = |of: &IsolationCell| {
            measured
                .isolation
                .iter()
                .find(|cell| cell.case.path == of.case.path && cell.case.load == BackgroundLoad::None)
        };
        Self {
            schema: SCHEMA,
            command: command(options),
            rounds: plan.rounds,
            sample_ms: plan.sample_ms,
            cores_suffice: machine.cores >= PROCESSES,
            machine,
            timed: Timed { assumptions: published::assumptions(), figures: figures(&rows) },
            isolation: measured.isolation.iter().map(|cell| cell.row(quiet(cell), plan.isolation_ms)).collect(),
            copies: measured.counts.iter().map(Copies::of).collect(),
            where_cores_suffice: WithEnoughCores::of(modelled, &floors, measured.instructions),
            rows,
            floors,
            pairs: measured.pairs,
            failures,
        }
    }

    pub fn row(&self, experiment: Experiment, size_bytes: u64, path: DataPath) -> Option<&Row> {
        find(&self.rows, experiment, size_bytes, path)
    }

    pub fn sizes(&self, experiment: Experiment) -> Vec<u64> {
        let mut sizes: Vec<u64> =
            self.rows.iter().filter(|row| row.experiment == experiment).map(|row| row.size_bytes).collect();
        sizes.dedup();
        sizes
    }
}

fn find(rows: &[Row], experiment: Experiment, size_bytes: u64, path: DataPath) -> Option<&Row> {
    rows.iter().find(|row| (row.experiment, row.size_bytes, row.path) == (experiment, size_bytes, path))
}

/// Returns the table with the published figures.
fn figures(rows: &[Row]) -> Vec<Figure> {
    let p50 = |experiment, path| {
        super::TIMED_SIZES
            .map(|size| find(rows, experiment, size, path)?.latency.as_ref().map(|latency| latency.p50_ns / 1e3))
    };
    let direct_lane = p50(Experiment::RoundTrip, DataPath::DirectLane);
    let kernel = p50(Experiment::RoundTrip, DataPath::KernelTcp);
    let ours = [DataPath::WindowDirect, DataPath::WindowProxy].map(|path| p50(Experiment::TimedRoundTrip, path));
    let figure = |kind, what: &str, unit, values| Figure { kind, what: what.to_owned(), unit, values };
    let over = |over: [Option<f64>; 4], under: [Option<f64>; 4]| {
        std::array::from_fn(|index| Some(over[index]? / under[index]?))
    };
    let rdma = [Some(published::RDMA_SOCKETS_NS / 1e3), None, None, None];
    let ntsocks = [Some(published::RTT_8_NS / 1e3), None, None, Some(published::RTT_4K_NS / 1e3)];
    vec![
        figure("modelled", "the wire alone, both ways", "us", [Some(WIRE_NS / 1e3); 4]),
        figure("measured", "direct lane (no wire)", "us", direct_lane),
        figure(
            "modelled + measured",
            "budget: wire + 10% + direct lane",
            "us",
            direct_lane.map(|lane| Some(OVER_WIRE * WIRE_NS / 1e3 + lane?)),
        ),
        figure("measured over modelled", "windows, trust = \"direct\"", "us", ours[0]),
        figure("measured over modelled", "windows, by proxies", "us", ours[1]),
        figure("measured", "kernel TCP, this machine", "us", kernel),
        figure("measured over modelled", "kernel TCP / windows, direct", "x", over(kernel, ours[0])),
        figure("measured over modelled", "kernel TCP / windows, by proxies", "x", over(kernel, ours[1])),
        figure("published", "NTSocks, round trip", "us", ntsocks),
        figure("published", "Linux TCP / NTSocks", "x", [Some(published::TIMES_BELOW_TCP), None, None, None]),
        figure("published", "RDMA sockets / NTSocks", "x", [Some(published::TIMES_BELOW_RDMA), None, None, None]),
        figure("modelled", "RDMA sockets, round trip", "us", rdma),
        figure("modelled / measured", "RDMA sockets / windows, direct", "x", over(rdma, ours[0])),
        figure("modelled / measured", "RDMA sockets / windows, by proxies", "x", over(rdma, ours[1])),
    ]
}

impl Copies {
    fn of(counts: &ProxyCounters) -> Self {
        let per = |over: u64, under: f64| (under > 0.0).then(|| over as f64 / under);
        Self {
            kind: "measured",
            node: counts.node.clone(),
            copies_per_byte_sent: counts.copies_per_byte_sent,
            copies_per_byte_received: counts.copies_per_byte_received,
            frames_per_kib: per(counts.frames_sent, counts.bytes_sent as f64 / 1024.0),
            frames_per_publish: counts.frames_per_publish,
            frames_per_ring: per(counts.frames_sent, counts.rings_peer as f64),
            stalls: counts.stalls,
        }
    }
}

impl WithEnoughCores {
    fn of(modelled: Modelled, floors: &FloorSummary, instructions: Result<f64, String>) -> Self {
        let quiet_ns = modelled.isolation.first().map(|case| case.rtt_ns_p50 as f64 - WIRE_NS);
        let line_ns = floors.cache_line_rtt_ns_p50;
        Self {
            modelled,
            modelled_without_wire_ns: quiet_ns,
            modelled_over_cache_line: quiet_ns.zip(line_ns).map(|(quiet_ns, line_ns)| quiet_ns / line_ns),
            instructions_per_frame: instructions.as_ref().ok().copied(),
            instructions_missing: instructions.err(),
        }
    }
}

/// Returns the command that produces this report.
fn command(options: &Options) -> String {
    let mut command = "crosslane bench windows".to_owned();
    for (is_given, word) in [(options.json, " --json"), (options.quick, " --quick")] {
        command += if is_given { word } else { "" };
    }
    command
}

#[cfg(test)]
mod tests {
    use super::super::isolation::ISOLATION_CASES;
    use super::super::rack::RackKind;
    use super::super::{Failure, ModelledCase, Sample};
    use super::*;
    use crate::floors::CacheLine;

    fn latencies(ns: f64) -> Latencies {
        let mut latencies = Latencies::new();
        latencies.add(ns, 1000);
        latencies.set_max(ns);
        latencies
    }

    fn cell(experiment: Experiment, path: DataPath, ns: &[f64]) -> Cell {
        let line = Some(CacheLine { rtt_ns_p50: 100.0, rtt_ns_p99: 120.0, rtt_ns_untimed: 90.0 });
        let sample = |ns: &f64| {
            let is_bulk = experiment == Experiment::Bulk;
            let latencies = (!is_bulk).then(|| latencies(*ns));
            Sample { latencies, bytes_per_s: is_bulk.then_some(*ns * 1e6), line, mapping: is_bulk.then_some(1e10) }
        };
        Cell {
            experiment,
            size_bytes: if experiment == Experiment::Bulk { 1024 } else { 8 },
            path,
            rounds: ns.iter().map(sample).collect(),
        }
    }

    fn report() -> Report {
        let measured = Measured {
            cells: vec![
                cell(Experiment::RoundTrip, DataPath::DirectLane, &[200.0, 220.0]),
                cell(Experiment::RoundTrip, DataPath::WindowDirect, &[]),
                cell(Experiment::RoundTrip, DataPath::WindowProxy, &[10_000.0, 10_000.0]),
                cell(Experiment::RoundTrip, DataPath::KernelTcp, &[60_000.0, 50_000.0]),
                cell(Experiment::TimedRoundTrip, DataPath::WindowProxy, &[12_000.0, 12_000.0]),
                cell(Experiment::Bulk, DataPath::WindowProxy, &[2000.0, 2000.0]),
                cell(Experiment::Bulk, DataPath::KernelTcp, &[1000.0, 1000.0]),
            ],
            isolation: ISOLATION_CASES
                .map(|case| {
                    let has_streams = case.load == BackgroundLoad::Streams;
                    let ns = if has_streams { 3000.0 } else { 1000.0 };
                    let streams = if has_streams { vec![1e9] } else { Vec::new() };
                    IsolationCell { case, rounds: vec![latencies(ns)], streams, failed: usize::from(has_streams) }
                })
                .into(),
            counts: vec![ProxyCounters {
                node: "a".to_owned(),
                copies_per_byte_sent: Some(2.0),
                ..ProxyCounters::default()
            }],
            instructions: Ok(800.0),
            syscalls_ns: vec![100.0],
            missing: vec![(RackKind::Direct, "trust = \"direct\" has no effect".to_owned())],
            failures: vec![Failure {
                what: "round trip of 8 B by window, proxies, round 3: `rtt` failed".to_owned(),
                experiment: Experiment::RoundTrip,
                path: DataPath::WindowProxy,
            }],
            other_failures: Vec::new(),
            pairs: PairCounts { pairs: 9, clients_failed: 1, ..PairCounts::default() },
        };
        let case = ModelledCase { case: "quiet", rtt_ns_p50: 2000, rtt_ns_p99: 2100, p99_of_quiet: 1.0 };
        let modelled = Modelled { assumptions: "few".to_owned(), isolation: vec![case], work_arguments: Vec::new() };
        let options = Options::default();
        Report::of(&options, &Plan::of(&options), Machine::describe(None), measured, modelled)
    }

    #[test]
    fn every_number_has_its_provenance_and_every_gap_its_reason() {
        let report = report();
        let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(json["schema"], SCHEMA);
        assert_eq!(json["rows"][2]["p99_against_kernel_tcp"], "below");
        assert_eq!(json["rows"][2]["p50_over_cache_line"].as_f64().map(f64::round), Some(100.0));
        assert!(json["rows"][1]["missing"].as_str().unwrap().contains("has no effect"));
        for figure in json["timed"]["figures"].as_array().unwrap() {
            let kind = figure["kind"].as_str().unwrap();
            assert!(["measured", "modelled", "published"].iter().any(|word| kind.contains(word)), "{figure}");
        }
        for (at, path, of_quiet) in [(1, "window, proxies", 3.0), (7, "window, direct", 3.0), (10, "kernel TCP", 1.0)] {
            let row = &json["isolation"][at];
            assert_eq!(
                (row["way"].as_str(), row["p99_of_quiet"].as_f64().map(f64::round)),
                (Some(path), Some(of_quiet))
            );
        }
        assert!(json["isolation"][12]["case"].as_str().unwrap().contains("busy loop"));
        let trips = report.isolation[12].latency.as_ref().unwrap().samples as f64;
        let sample_s = Plan::of(&Options::default()).isolation_ms as f64 / 1e3;
        assert_eq!(json["isolation"][12]["trips_per_s"].as_f64(), Some(trips / sample_s));
        assert_eq!(json["where_cores_suffice"]["modelled_over_cache_line"], 10.0);
        let text = report.text();
        assert_eq!(
            (json["pairs"]["clients_failed"].as_u64(), json["isolation"][1]["rounds_failed"].as_u64()),
            (Some(1), Some(1))
        );
        assert!(json["rows"][2]["missing"].as_str().unwrap().contains("round 3"));
        let short =
            ["window, direct, round trip: 0 of 5 rounds", "window, proxies, round trip: 2 of 5 rounds of 8 B: round"];
        for words in short.into_iter().chain(["1 clients", "(1 of 2 rounds failed)"]) {
            assert!(text.contains(words), "{words} in\n{text}");
        }
        for words in ["below", "has no effect", "20.40", "modelled", "800 instructions", "2.00 sent"] {
            assert!(text.contains(words), "{words} in\n{text}");
        }
    }

    #[test]
    fn the_budget_of_the_modelled_link_is_the_wire_plus_a_tenth_plus_the_direct_lane() {
        let report = report();
        let figure = |begin: &str| report.timed.figures.iter().find(|figure| figure.what.starts_with(begin)).unwrap();
        let lane = figure("direct lane").values[0].unwrap();
        assert!((figure("budget").values[0].unwrap() - (1.1 + lane)).abs() < 1e-9);
        assert_eq!(figure("windows, trust").values[0], None);
        let ratio = figure("kernel TCP / windows, by").values[0].unwrap();
        assert!((4.0..5.0).contains(&ratio), "{ratio}");
    }

    #[test]
    fn all_plots_are_drawn() {
        let directory = tempfile::tempdir().unwrap();
        let written = super::super::plots::write(directory.path(), &report()).unwrap();
        assert_eq!(written.len(), 4);
        for path in written {
            assert!(std::fs::read_to_string(&path).unwrap().contains("window, proxies"), "{}", path.display());
        }
    }
}
