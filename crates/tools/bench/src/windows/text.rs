//! The report of `bench windows` as text.

use stats::{Quantiles, Table};
use units::NONE;

use super::published::Assumption;
use super::report::{IsolationRow, PROCESSES, Report, Row};
use super::{DataPath, Experiment};

/// Target for 8 bytes through proxies with enough cores, and for programs that write windows themselves, in multiples
/// of the floor.
const TARGET_FLOORS_PROXY: f64 = 12.0;
const TARGET_FLOORS_DIRECT: f64 = 3.0;

impl Report {
    /// Returns the report as text.
    pub fn text(&self) -> String {
        let cores = if self.cores_suffice {
            "Programs and proxies have a core each.".to_owned()
        } else {
            let cores = self.machine.cores;
            format!("{cores} cores for {PROCESSES} processes: with proxies, they wait for each other's time slices.")
        };
        let mut text = format!(
            "Two nodes of this machine, joined by emulated windows; the same C programs over each path, {}\n\
             alternating rounds, medians over the rounds (max: of all). \"x floor\" is against one cache line that\n\
             the same two cores bounced next to each sample. --json has every quantile of every path.\n{}\n{cores}\n",
            self.rounds,
            self.machine.sentence()
        );
        text += "\nRound trip, blocking, us (measured)\n\n";
        text += &self.round_trips().render();
        text += "\nRound trip over a modelled link, and published figures\n\n";
        text += &self.timed_table().render();
        for Assumption { kind, what } in &self.timed.assumptions {
            text += &format!("{kind}: {what}\n");
        }
        let rounds = self.isolation.iter().map(IsolationRow::rounds_begun).max().unwrap_or_default();
        text += &format!(
            "\nPing-pong of 8 B under background load (with proxies: in its partition), us, {rounds} rounds\n\n"
        );
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
            let row = |path| self.row(Experiment::RoundTrip, size_bytes, path);
            let cell = |path, of: fn(&Quantiles) -> f64| {
                let latency = row(path).and_then(|row| row.latency.as_ref());
                units::micros(latency.map(of))
            };
            let two = |path| [cell(path, |all| all.p50_ns), cell(path, |all| all.p99_ns)];
            let four = |path| {
                let [p50, p99] = two(path);
                [p50, p99, cell(path, |all| all.p999_ns), cell(path, |all| all.max_ns)]
            };
            let floors = |path| units::times(row(path).and_then(|row| row.p50_over_cache_line));
            let p99_is = |path| {
                let side = row(path).and_then(|row| row.p99_against_kernel_tcp);
                side.unwrap_or(NONE).to_owned()
            };
            let mut line = vec![units::size(size_bytes)];
            line.extend(four(DataPath::KernelTcp));
            line.extend(two(DataPath::DirectLane).into_iter().chain([floors(DataPath::DirectLane)]));
            line.extend(
                two(DataPath::WindowDirect)
                    .into_iter()
                    .chain([floors(DataPath::WindowDirect), p99_is(DataPath::WindowDirect)]),
            );
            line.extend(four(DataPath::WindowProxy).into_iter().chain([floors(DataPath::WindowProxy)]));
            line.push(units::times(row(DataPath::WindowProxy).and_then(|row| row.p50_times_below_kernel_tcp)));
            line.push(p99_is(DataPath::WindowProxy));
            line.extend(two(DataPath::AfUnix));
            table.row(line);
        }
        self.short_rows().into_iter().for_each(|line| table.section(line));
        table.section(format!(
            "\"p99 is\": below or above kernel TCP. Target at 8 B: direct at most {TARGET_FLOORS_DIRECT} x floor."
        ));
        table
    }

    /// Returns a line for each path that has no figures in an experiment, or not those of all rounds.
    fn short_rows(&self) -> Vec<String> {
        let is_short = |row: &&Row| row.rounds < self.rounds as usize;
        let mut seen = Vec::new();
        let mut is_first = |row: &&Row| {
            let of = (row.experiment, row.path);
            let is_first = !seen.contains(&of);
            seen.push(of);
            is_first
        };
        let line = |row: &Row| {
            let (path, experiment) = (row.path.title(), row.experiment.title());
            let why = row.missing.as_deref().unwrap_or("no rack for it");
            format!(
                "{path}, {experiment}: {} of {} rounds of {}: {why}",
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
        let mut table = Table::numeric([
            "path: background load",
            "trips/s",
            "p50",
            "p99",
            "max",
            "p99 x quiet",
            "streams GB/s",
            "is",
        ]);
        for row in &self.isolation {
            let cell = |of: fn(&Quantiles) -> f64| units::micros(row.latency.as_ref().map(of));
            let failed = match row.rounds_failed {
                0 => String::new(),
                failed => format!(" ({failed} of {} rounds failed)", row.rounds_begun()),
            };
            table.row(vec![
                format!("{}: {}{failed}", row.path, row.case),
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
                format!("{}: {}", DataPath::WindowProxy.title(), case.case),
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
        let paths = Experiment::Bulk.paths();
        let mut header = vec!["size"];
        header.extend(paths.iter().map(|path| path.title()));
        header.extend(["memcpy into a mapping", "proxies / memcpy", "proxies / TCP"]);
        let mut table = Table::numeric(header);
        for size_bytes in self.sizes(Experiment::Bulk) {
            let row = |path| self.row(Experiment::Bulk, size_bytes, path);
            let mut line = vec![units::size(size_bytes)];
            line.extend(paths.iter().map(|path| units::gigabytes(row(*path).and_then(|row| row.bytes_per_s))));
            let proxy = row(DataPath::WindowProxy);
            let kernel = row(DataPath::KernelTcp);
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
            "\nCopies of each byte that proxies forwarded (measured, including those of the programs)\n\n".to_owned();
        for copies in &self.copies {
            text += &format!(
                "node {}: {} sent, {} received; frames sent per KiB {}, per publish {}, per doorbell {}; stalls {}\n",
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
            format!("\nWith enough cores (8 B through proxies; target: at most {TARGET_FLOORS_PROXY} x floor)\n\n");
        text += &format!(
            "modelled: {} ns in addition to the wire, {}; {}\n",
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
