//! The report of `bench sockets` as text.

use clap::ValueEnum;
use stats::{Quantiles, Table};

use super::comparison;
use super::report::Report;
use super::{Experiment, Point};
use crate::launch::Transport;

impl Report {
    /// Returns the report as text.
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
             the rounds (max: of all). Kernel TCP and AF_UNIX block; \"TCP spinning\" polls without a pause, as\n\
             lanes do at first; \"TCP / this\" and the like are how many times longer each takes. \"x floor\" is\n\
             against one cache line bounced between the same two cores next to each sample. --json has every\n\
             quantile of every transport.\n{}\n",
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
            "spinning / this",
            "AF_UNIX / this",
        ];
        let groups = [("", 1), ("kernel TCP", 4), ("TCP spinning", 2), ("AF_UNIX", 2), ("Crosslane", 8)];
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
            line.push(units::times(crosslane.and_then(|row| row.p50_times_below_tcp_spinning)));
            line.push(units::times(crosslane.and_then(|row| row.p50_times_below_af_unix)));
            table.row(line);
        }
        table
    }

    fn rates(&self, experiment: Experiment, write: fn(Option<f64>) -> String) -> Table {
        let floor = experiment == Experiment::Bulk;
        let ratios = ["this / TCP", "this / spinning", "this / AF_UNIX"];
        let mut header: Vec<&str> =
            ["size", "kernel TCP", "TCP spinning", "AF_UNIX", "Crosslane"].into_iter().chain(ratios).collect();
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
            line.push(units::times(crosslane.and_then(|row| row.rate_over_tcp_spinning)));
            line.push(units::times(crosslane.and_then(|row| row.rate_over_af_unix)));
            if floor {
                let copy_rate = |transport| self.row(point, transport).and_then(|row| row.copy_pipeline_bytes_per_s);
                line.push(units::gigabytes(
                    copy_rate(Transport::Crosslane).or_else(|| copy_rate(Transport::KernelTcp)),
                ));
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
}
