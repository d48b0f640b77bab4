//! The report of `bench windows`, as JSON and as text.

use anyhow::Result;
use machine::Machine;
use serde::Serialize;
use stats::{Latencies, Quantiles, Table, median, median_ratio};
use units::NONE;

use super::published::{self, Assumption};
use super::rack::Counts;
use super::{BesideCell, Cell, Company, Experiment, Measured, Modelled, ONE_WAY_NS, Options, Plan, Way};
use crate::floors::{Beside, FloorSummary};
use crate::launch::Tally;

pub const SCHEMA: &str = "crosslane.bench.windows/1";

/// Parties of a round trip by proxies that want a processor: two programs and two proxies.
const PARTIES: usize = 4;
/// What the issue asks of 8 bytes by proxies where cores suffice, and of programs that write windows: times the floor.
const FLOORS_BY_PROXY: f64 = 12.0;
const FLOORS_DIRECT: f64 = 3.0;
/// The modelled wire's share of a round trip, and what may come on top of it.
const WIRE_NS: f64 = 2.0 * ONE_WAY_NS;
const OVER_WIRE: f64 = 1.1;

/// Everything a run found.
#[derive(Serialize)]
pub struct Report {
    pub schema: &'static str,
    pub command: String,
    pub machine: Machine,
    pub rounds: u32,
    pub sample_ms: u64,
    pub floors: FloorSummary,
    /// Whether the four parties of a round trip by proxies can run at once.
    pub cores_suffice: bool,
    pub rows: Vec<Row>,
    pub timed: Timed,
    pub isolation: Vec<IsolationRow>,
    pub copies: Vec<Copies>,
    pub where_cores_suffice: WhereCoresSuffice,
    /// How the pairs of programs have ended that all this was measured by.
    pub pairs: Tally,
    pub failures: Vec<String>,
}

/// One way at one point: medians over the rounds.
#[derive(Serialize)]
pub struct Row {
    pub kind: &'static str,
    pub experiment: Experiment,
    pub size_bytes: u64,
    pub way: Way,
    pub rounds: usize,
    /// Why there are no figures, or not of all rounds.
    pub missing: Option<String>,
    pub latency: Option<Quantiles>,
    pub bytes_per_s: Option<f64>,
    pub cache_line_rtt_ns_p50: Option<f64>,
    pub p50_over_cache_line: Option<f64>,
    pub p50_times_below_kernel_tcp: Option<f64>,
    /// `below` or `above` kernel TCP's.
    pub p99_against_kernel_tcp: Option<&'static str>,
    pub mapping_bytes_per_s: Option<f64>,
    pub rate_over_mapping: Option<f64>,
    pub rate_times_kernel_tcp: Option<f64>,
}

/// The modelled link, beside what was published.
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

/// A ping-pong beside others.
#[derive(Serialize)]
pub struct IsolationRow {
    pub kind: &'static str,
    pub way: &'static str,
    pub case: String,
    pub rounds: usize,
    pub rounds_failed: usize,
    /// Most trips may be short, and most of the time pass in the others.
    pub trips_per_s: Option<f64>,
    pub latency: Option<Quantiles>,
    pub p99_of_quiet: Option<f64>,
    pub streams_bytes_per_s: Option<f64>,
}

/// What a proxy has done.
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

/// What can be said without as many cores as parties.
#[derive(Serialize)]
pub struct WhereCoresSuffice {
    pub modelled: Modelled,
    /// The quiet case without the wire: what programs, proxies and cache lines add.
    pub modelled_without_wire_ns: Option<f64>,
    pub modelled_over_cache_line: Option<f64>,
    /// Of a frame of 8 bytes, sent and received by the engine.
    pub instructions_per_frame: Option<f64>,
    pub instructions_missing: Option<String>,
}

/// Returns the medians of each quantile over the rounds; the maximum and the count are of all rounds.
fn quantiles<'a>(rounds: impl Iterator<Item = &'a Latencies>) -> Option<Quantiles> {
    let rounds: Vec<Quantiles> = rounds.map(Latencies::quantiles).collect();
    Some(Quantiles {
        p50_ns: median(rounds.iter().map(|round| round.p50_ns))?,
        p99_ns: median(rounds.iter().map(|round| round.p99_ns))?,
        p999_ns: median(rounds.iter().map(|round| round.p999_ns))?,
        max_ns: rounds.iter().map(|round| round.max_ns).fold(0.0, f64::max),
        samples: rounds.iter().map(|round| round.samples).sum(),
    })
}

impl Cell {
    fn of<T>(&self, value: impl Fn(&super::Sample) -> Option<T>) -> Vec<T> {
        self.rounds.iter().filter_map(value).collect()
    }

    fn p50s(&self) -> Vec<f64> {
        self.of(|sample| Some(sample.latencies.as_ref()?.quantile_ns(0.5)))
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
        let latency = quantiles(self.rounds.iter().filter_map(|sample| sample.latencies.as_ref()));
        let kernels =
            kernel.and_then(|cell| quantiles(cell.rounds.iter().filter_map(|sample| sample.latencies.as_ref())));
        let is_below = latency.as_ref().zip(kernels.as_ref()).map(|(own, kernel)| own.p99_ns < kernel.p99_ns);
        Row {
            kind: "measured",
            experiment: self.experiment,
            size_bytes: self.size_bytes,
            way: self.way,
            rounds: self.rounds.len(),
            missing,
            latency,
            bytes_per_s: median(rates.iter().copied()),
            cache_line_rtt_ns_p50: median(lines.iter().copied()),
            p50_over_cache_line: median_ratio(&p50s, &lines),
            p50_times_below_kernel_tcp: median_ratio(&kernel_p50s, &p50s),
            p99_against_kernel_tcp: is_below.map(|is_below| if is_below { "below" } else { "above" }),
            mapping_bytes_per_s: median(mappings.iter().copied()),
            rate_over_mapping: median_ratio(&rates, &mappings),
            rate_times_kernel_tcp: median_ratio(&rates, &kernel_rates),
        }
    }
}

impl IsolationRow {
    fn rounds_begun(&self) -> usize {
        self.rounds + self.rounds_failed
    }
}

impl BesideCell {
    fn row(&self, quiet: Option<&Self>, sample_ms: u64) -> IsolationRow {
        let p99s = |cell: &Self| cell.rounds.iter().map(|round| round.quantile_ns(0.99)).collect::<Vec<_>>();
        IsolationRow {
            kind: "measured",
            way: self.beside.way.title(),
            case: self.beside.case.to_owned(),
            rounds: self.rounds.len(),
            rounds_failed: self.failed,
            trips_per_s: median(self.rounds.iter().map(|round| round.samples() as f64 * 1e3 / sample_ms as f64)),
            latency: quantiles(self.rounds.iter()),
            p99_of_quiet: quiet.and_then(|quiet| median_ratio(&p99s(self), &p99s(quiet))),
            streams_bytes_per_s: median(self.streams.iter().copied()),
        }
    }
}

impl Report {
    pub fn of(
        options: &Options,
        plan: &Plan,
        machine: Machine,
        measured: Measured,
        modelled: Modelled,
    ) -> Result<Self> {
        let beside = |cell: &Cell| cell.of(|sample| Some(Beside { cache_line: sample.line, copy_pipeline: None }));
        let besides: Vec<Beside> = measured.cells.iter().flat_map(beside).collect();
        let floors = FloorSummary::of(&besides, &measured.syscalls_ns);
        let kernel_of = |cell: &Cell| {
            // The modelled link's round trips are compared with those of kernel TCP in the same round.
            let experiment = if cell.experiment == Experiment::Bulk { Experiment::Bulk } else { Experiment::RoundTrip };
            let is_it = |other: &&Cell| {
                (other.experiment, other.size_bytes, other.way) == (experiment, cell.size_bytes, Way::KernelTcp)
            };
            measured.cells.iter().find(is_it)
        };
        let row = |cell: &Cell| cell.row(kernel_of(cell), measured.why_missing(cell.experiment, cell.way));
        let rows: Vec<Row> = measured.cells.iter().map(row).collect();
        let failures = measured.failures.iter().map(|failure| &failure.what).chain(&measured.said);
        let failures = failures.cloned().collect();
        let quiet = |of: &BesideCell| {
            measured
                .beside
                .iter()
                .find(|cell| cell.beside.way == of.beside.way && cell.beside.company == Company::Nobody)
        };
        Ok(Self {
            schema: SCHEMA,
            command: command(options),
            rounds: plan.rounds,
            sample_ms: plan.sample_ms,
            cores_suffice: machine.cores >= PARTIES,
            machine,
            timed: Timed { assumptions: published::assumptions(), figures: figures(&rows) },
            isolation: measured.beside.iter().map(|cell| cell.row(quiet(cell), plan.beside_ms)).collect(),
            copies: measured.counts.iter().map(Copies::of).collect(),
            where_cores_suffice: WhereCoresSuffice::of(modelled, &floors, measured.instructions),
            rows,
            floors,
            pairs: measured.pairs,
            failures,
        })
    }

    pub fn row(&self, experiment: Experiment, size_bytes: u64, way: Way) -> Option<&Row> {
        find(&self.rows, experiment, size_bytes, way)
    }

    pub fn sizes(&self, experiment: Experiment) -> Vec<u64> {
        let mut sizes: Vec<u64> =
            self.rows.iter().filter(|row| row.experiment == experiment).map(|row| row.size_bytes).collect();
        sizes.dedup();
        sizes
    }
}

fn find(rows: &[Row], experiment: Experiment, size_bytes: u64, way: Way) -> Option<&Row> {
    rows.iter().find(|row| (row.experiment, row.size_bytes, row.way) == (experiment, size_bytes, way))
}

/// The table beside what was published.
fn figures(rows: &[Row]) -> Vec<Figure> {
    let p50 = |experiment, way| {
        super::TIMED_SIZES
            .map(|size| find(rows, experiment, size, way)?.latency.as_ref().map(|latency| latency.p50_ns / 1e3))
    };
    let direct_lane = p50(Experiment::RoundTrip, Way::DirectLane);
    let kernel = p50(Experiment::RoundTrip, Way::KernelTcp);
    let ours = [Way::WindowDirect, Way::WindowProxy].map(|way| p50(Experiment::TimedRoundTrip, way));
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
    fn of(counts: &Counts) -> Self {
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

impl WhereCoresSuffice {
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

/// For a person.
impl Report {
    pub fn text(&self) -> String {
        let cores = if self.cores_suffice {
            "Programs and proxies have a core each.".to_owned()
        } else {
            let cores = self.machine.cores;
            format!("{cores} cores for {PARTIES} parties: by proxies, parties wait for each other's time slices.")
        };
        let mut text = format!(
            "Two nodes of this machine, joined by emulated windows; the same C programs by each way, {} alternating\n\
             rounds, medians over the rounds (max: of all). \"x floor\" is against one cache line bounced between the\n\
             same two cores beside each sample. --json has every quantile of every way.\n{}\n{cores}\n",
            self.rounds,
            self.machine.sentence()
        );
        text += "\nRound trip, blocking, us (measured)\n\n";
        text += &self.round_trips().render();
        text += "\nRound trip over a modelled link, and what was published\n\n";
        text += &self.timed_table().render();
        for Assumption { kind, what } in &self.timed.assumptions {
            text += &format!("{kind}: {what}\n");
        }
        let rounds = self.isolation.iter().map(IsolationRow::rounds_begun).max().unwrap_or_default();
        text += &format!("\nPing-pong of 8 B beside others (by proxies: in its partition), us, {rounds} rounds\n\n");
        text += &self.isolation_table().render();
        text += "\nBulk by write size, GB/s (measured)\n\n";
        text += &self.bulk().render();
        text += &self.copies_text();
        text += &self.cores_text();
        text += &format!("\n{}\n{}\n", self.floors.sentence(), self.pairs.sentence());
        for failure in &self.failures {
            text += &format!("failed: {failure}\n");
        }
        text
    }

    fn round_trips(&self) -> Table {
        let header = ["size", "p50", "p99", "p99.9", "max", "p50", "p99", "x floor", "p50", "p99", "x floor", "p99 is"];
        let more = ["p50", "p99", "p99.9", "max", "x floor", "TCP / this", "p99 is", "p50", "p99"];
        let groups = [("", 1), ("kernel TCP", 4), ("direct lane", 3), ("window, direct", 4), ("window, by proxies", 7)];
        let mut table =
            Table::numeric(header.into_iter().chain(more)).groups(groups.into_iter().chain([("AF_UNIX", 2)]));
        for size_bytes in self.sizes(Experiment::RoundTrip) {
            let row = |way| self.row(Experiment::RoundTrip, size_bytes, way);
            let cell = |way, of: fn(&Quantiles) -> f64| {
                let latency = row(way).and_then(|row| row.latency.as_ref());
                units::micros(latency.map(of))
            };
            let two = |way| [cell(way, |all| all.p50_ns), cell(way, |all| all.p99_ns)];
            let four = |way| {
                let [p50, p99] = two(way);
                [p50, p99, cell(way, |all| all.p999_ns), cell(way, |all| all.max_ns)]
            };
            let floors = |way| units::times(row(way).and_then(|row| row.p50_over_cache_line));
            let p99_is = |way| {
                let said = row(way).and_then(|row| row.p99_against_kernel_tcp);
                said.unwrap_or(NONE).to_owned()
            };
            let mut line = vec![units::size(size_bytes)];
            line.extend(four(Way::KernelTcp));
            line.extend(two(Way::DirectLane).into_iter().chain([floors(Way::DirectLane)]));
            line.extend(
                two(Way::WindowDirect).into_iter().chain([floors(Way::WindowDirect), p99_is(Way::WindowDirect)]),
            );
            line.extend(four(Way::WindowProxy).into_iter().chain([floors(Way::WindowProxy)]));
            line.push(units::times(row(Way::WindowProxy).and_then(|row| row.p50_times_below_kernel_tcp)));
            line.push(p99_is(Way::WindowProxy));
            line.extend(two(Way::AfUnix));
            table.row(line);
        }
        self.short_rows().into_iter().for_each(|line| table.section(line));
        table.section(format!(
            "\"p99 is\": below or above kernel TCP's. Asked for at 8 B: direct at most {FLOORS_DIRECT} x floor."
        ));
        table
    }

    /// Why a way has no figures in an experiment, or not of all rounds: a line for each.
    fn short_rows(&self) -> Vec<String> {
        let is_short = |row: &&Row| row.rounds < self.rounds as usize;
        let mut seen = Vec::new();
        let mut is_first = |row: &&Row| {
            let of = (row.experiment, row.way);
            let is_first = !seen.contains(&of);
            seen.push(of);
            is_first
        };
        let line = |row: &Row| {
            let (way, experiment) = (row.way.title(), row.experiment.title());
            let why = row.missing.as_deref().unwrap_or("no rack for it");
            format!(
                "{way}, {experiment}: {} of {} rounds of {}: {why}",
                row.rounds,
                self.rounds,
                units::size(row.size_bytes)
            )
        };
        self.rows.iter().filter(is_short).filter(|row| is_first(row)).map(line).collect()
    }

    fn timed_table(&self) -> Table {
        let mut table = Table::numeric(["", "8 B", "48 B", "1 KiB", "4 KiB", "unit", "is"]);
        for figure in &self.timed.figures {
            let mut line = vec![figure.what.clone()];
            line.extend(
                figure.values.map(|value| value.map_or_else(|| NONE.to_owned(), |value| format!("{value:.2}"))),
            );
            line.extend([figure.unit.to_owned(), figure.kind.to_owned()]);
            table.row(line);
        }
        table
    }

    fn isolation_table(&self) -> Table {
        let mut table =
            Table::numeric(["by, beside", "trips/s", "p50", "p99", "max", "p99 x quiet", "streams GB/s", "is"]);
        for row in &self.isolation {
            let cell = |of: fn(&Quantiles) -> f64| units::micros(row.latency.as_ref().map(of));
            let failed = match row.rounds_failed {
                0 => String::new(),
                failed => format!(" ({failed} of {} rounds failed)", row.rounds_begun()),
            };
            table.row(vec![
                format!("{}: {}{failed}", row.way, row.case),
                units::rate(row.trips_per_s),
                cell(|all| all.p50_ns),
                cell(|all| all.p99_ns),
                cell(|all| all.max_ns),
                units::times(row.p99_of_quiet),
                units::gigabytes(row.streams_bytes_per_s),
                row.kind.to_owned(),
            ]);
        }
        for case in &self.where_cores_suffice.modelled.isolation {
            let micros = |ns: u64| units::micros(Some(ns as f64));
            let nothing = || NONE.to_owned();
            table.row(vec![
                format!("{}: {}", Way::WindowProxy.title(), case.case),
                nothing(),
                micros(case.rtt_ns_p50),
                micros(case.rtt_ns_p99),
                nothing(),
                units::times(Some(case.p99_of_quiet)),
                nothing(),
                "modelled".to_owned(),
            ]);
        }
        table
    }

    fn bulk(&self) -> Table {
        let ways = Experiment::Bulk.ways();
        let mut header = vec!["size"];
        header.extend(ways.iter().map(|way| way.title()));
        header.extend(["memcpy into a mapping", "proxies / memcpy", "proxies / TCP"]);
        let mut table = Table::numeric(header);
        for size_bytes in self.sizes(Experiment::Bulk) {
            let row = |way| self.row(Experiment::Bulk, size_bytes, way);
            let mut line = vec![units::size(size_bytes)];
            line.extend(ways.iter().map(|way| units::gigabytes(row(*way).and_then(|row| row.bytes_per_s))));
            let proxy = row(Way::WindowProxy);
            let kernel = row(Way::KernelTcp);
            line.push(units::gigabytes(kernel.and_then(|row| row.mapping_bytes_per_s)));
            line.push(units::percent(proxy.and_then(|row| row.rate_over_mapping)));
            line.push(units::times(proxy.and_then(|row| row.rate_times_kernel_tcp)));
            table.row(line);
        }
        table
    }

    fn copies_text(&self) -> String {
        let number = |value: Option<f64>| value.map_or_else(|| NONE.to_owned(), |value| format!("{value:.2}"));
        let mut text =
            "\nCopies of each byte that crossed by proxies (measured; a program's own among them)\n\n".to_owned();
        for copies in &self.copies {
            text += &format!(
                "node {}: {} sent, {} received; frames sent a KiB {}, a publish {}, a ring of the peer {}; stalls {}\n",
                copies.node,
                number(copies.copies_per_byte_sent),
                number(copies.copies_per_byte_received),
                number(copies.frames_per_kib),
                number(copies.frames_per_publish),
                number(copies.frames_per_ring),
                copies.stalls
            );
        }
        text
    }

    fn cores_text(&self) -> String {
        let cores = &self.where_cores_suffice;
        let mut text =
            format!("\nWhere cores suffice (8 B by proxies; asked for: at most {FLOORS_BY_PROXY} x floor)\n\n");
        text += &format!(
            "modelled: {} ns beside the wire, {}; {}\n",
            cores.modelled_without_wire_ns.map_or_else(|| NONE.to_owned(), |ns| format!("{ns:.0}")),
            cores.modelled_over_cache_line.map_or_else(|| NONE.to_owned(), |times| format!("{times:.1} x floor")),
            cores.modelled.assumptions,
        );
        match (&cores.instructions_per_frame, &cores.instructions_missing) {
            (Some(count), _) => {
                text +=
                    &format!("measured: {count:.0} instructions for a frame of 8 B, sent and received (callgrind)\n");
            }
            (None, why) => {
                text += &format!("instructions of a frame: not measured: {}\n", why.as_deref().unwrap_or(NONE));
            }
        }
        text
    }
}

/// The command that would make this report again.
fn command(options: &Options) -> String {
    let mut command = "crosslane bench windows".to_owned();
    for (is_given, word) in [(options.json, " --json"), (options.quick, " --quick")] {
        command += if is_given { word } else { "" };
    }
    command
}

#[cfg(test)]
mod tests {
    use super::super::rack::Kind;
    use super::super::{BESIDE, Failure, ModelledCase, Sample};
    use super::*;
    use crate::floors::CacheLine;
    use stats::Latencies;

    fn latencies(ns: f64) -> Latencies {
        let mut latencies = Latencies::new();
        latencies.add(ns, 1000);
        latencies.set_max(ns);
        latencies
    }

    fn cell(experiment: Experiment, way: Way, ns: &[f64]) -> Cell {
        let line = Some(CacheLine { rtt_ns_p50: 100.0, rtt_ns_p99: 120.0, rtt_ns_untimed: 90.0 });
        let sample = |ns: &f64| {
            let is_bulk = experiment == Experiment::Bulk;
            let latencies = (!is_bulk).then(|| latencies(*ns));
            Sample { latencies, bytes_per_s: is_bulk.then_some(*ns * 1e6), line, mapping: is_bulk.then_some(1e10) }
        };
        Cell {
            experiment,
            size_bytes: if experiment == Experiment::Bulk { 1024 } else { 8 },
            way,
            rounds: ns.iter().map(sample).collect(),
        }
    }

    fn report() -> Report {
        let measured = Measured {
            cells: vec![
                cell(Experiment::RoundTrip, Way::DirectLane, &[200.0, 220.0]),
                cell(Experiment::RoundTrip, Way::WindowDirect, &[]),
                cell(Experiment::RoundTrip, Way::WindowProxy, &[10_000.0, 10_000.0]),
                cell(Experiment::RoundTrip, Way::KernelTcp, &[60_000.0, 50_000.0]),
                cell(Experiment::TimedRoundTrip, Way::WindowProxy, &[12_000.0, 12_000.0]),
                cell(Experiment::Bulk, Way::WindowProxy, &[2000.0, 2000.0]),
                cell(Experiment::Bulk, Way::KernelTcp, &[1000.0, 1000.0]),
            ],
            beside: BESIDE
                .map(|beside| {
                    let has_streams = beside.company == Company::Streams;
                    let ns = if has_streams { 3000.0 } else { 1000.0 };
                    let streams = if has_streams { vec![1e9] } else { Vec::new() };
                    BesideCell { beside, rounds: vec![latencies(ns)], streams, failed: usize::from(has_streams) }
                })
                .into(),
            counts: vec![Counts { node: "a".to_owned(), copies_per_byte_sent: Some(2.0), ..Counts::default() }],
            instructions: Ok(800.0),
            syscalls_ns: vec![100.0],
            missing: vec![(Kind::Direct, "trust = \"direct\" has no effect".to_owned())],
            failures: vec![Failure {
                what: "round trip of 8 B by window, proxies, round 3: `rtt` failed".to_owned(),
                experiment: Experiment::RoundTrip,
                way: Way::WindowProxy,
            }],
            said: Vec::new(),
            pairs: Tally { pairs: 9, clients_failed: 1, ..Tally::default() },
        };
        let case = ModelledCase { case: "quiet", rtt_ns_p50: 2000, rtt_ns_p99: 2100, p99_of_quiet: 1.0 };
        let modelled = Modelled { assumptions: "few".to_owned(), isolation: vec![case], work_arguments: Vec::new() };
        let options = Options::default();
        Report::of(&options, &Plan::of(&options), Machine::describe(None), measured, modelled).unwrap()
    }

    #[test]
    fn every_number_says_what_it_is_and_what_is_missing_says_why() {
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
        for (at, way, of_quiet) in [(1, "window, proxies", 3.0), (7, "window, direct", 3.0), (10, "kernel TCP", 1.0)] {
            let row = &json["isolation"][at];
            assert_eq!(
                (row["way"].as_str(), row["p99_of_quiet"].as_f64().map(f64::round)),
                (Some(way), Some(of_quiet))
            );
        }
        assert!(json["isolation"][12]["case"].as_str().unwrap().contains("busy loop"));
        let trips = report.isolation[12].latency.as_ref().unwrap().samples as f64;
        let sample_s = Plan::of(&Options::default()).beside_ms as f64 / 1e3;
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
    fn the_budget_of_the_modelled_link_is_the_wire_and_a_tenth_and_the_direct_lane() {
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
