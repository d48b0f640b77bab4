//! The report of `crosslane bench router`: everything, or the requested parts.

mod interconnects;
mod parts;

use std::io;
use std::path::{Path, PathBuf};

use router_node::interconnect::TransportKind;
use serde::Serialize;
use thiserror::Error;

use crate::interconnect::{
    AdaptiveRate, AdaptiveRow, BatchGain, BenchError, Hop, LoadRow, ModelledRow, RateRow, adaptive_rates,
    adaptive_rows, name, uncarried,
};
use crate::published::{Cell, Cluster, ModelledError, batch_table, latency_table};
use crate::table::Table;
use crate::{core, ethernet, fib, streams};
use interconnects::Scale;
pub use parts::{Part, Parts, UnknownKind, UnknownPart, kind};

/// The interconnect that corresponds to the published one, without a network card; batching policies are compared over
/// it.
pub const PUBLISHED_KIND: &str = "rnic_lanes";

/// The options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether trials are shorter and fewer: a minute or two.
    pub is_quick: bool,
    /// The seed of tables, destinations and arrival times.
    pub seed: u64,
    /// The parts that are measured.
    pub parts: Parts,
    /// The only interconnect that is measured; `None` means all.
    pub kind: Option<TransportKind>,
    /// The frame sizes whose rates and latencies are measured, 64 to 1500; the default ones if empty.
    pub frame_bytes: Vec<usize>,
    /// The loads at which latency is measured, as shares of a fixed batch's best rate; the default ones if empty.
    pub load_shares: Vec<f64>,
}

impl Options {
    /// Returns the options to measure everything.
    pub fn new(is_quick: bool, seed: u64) -> Options {
        let (frame_bytes, load_shares) = (Vec::new(), Vec::new());
        Options { is_quick, seed, parts: Parts::ALL, kind: None, frame_bytes, load_shares }
    }

    /// Returns the interconnect over which the adaptive policy is compared with fixed batches.
    fn adaptive_kind(&self) -> &'static str {
        self.kind.map_or(PUBLISHED_KIND, name)
    }

    fn core_parts(&self) -> core::Parts {
        core::Parts { forwards: self.parts.has(Part::Core), churns: self.parts.has(Part::Churn) }
    }

    fn has_core(&self) -> bool {
        self.parts.has(Part::Core) || self.parts.has(Part::Churn)
    }

    fn fib(&self) -> fib::Options {
        let options = if self.is_quick { fib::Options::quick() } else { fib::Options::full() };
        fib::Options { seed: self.seed, ..options }
    }

    fn core(&self) -> core::Options {
        let options = if self.is_quick { core::Options::quick() } else { core::Options::full() };
        core::Options { seed: self.seed, ..options }
    }

    fn ethernet(&self) -> ethernet::Options {
        let options = if self.is_quick { ethernet::Options::quick() } else { ethernet::Options::full() };
        ethernet::Options { seed: self.seed, ..options }
    }
}

impl Options {
    fn streams(&self) -> streams::Options {
        if self.is_quick { streams::Options::quick() } else { streams::Options::full() }
    }
}

/// Receives the progress of a run.
pub trait ProgressObserver {
    /// Called when a step of a section begins.
    fn step_begins(&mut self, section: &str, what: &str);
    /// Called when the report has new results.
    fn report_grew(&mut self, report: &Report);
}

/// The reason why there is no report.
#[derive(Debug, Error)]
pub enum ReportError {
    /// The tables could not be measured.
    #[error("tables: {0}")]
    Fib(#[from] io::Error),
    /// The forwarding core could not be measured.
    #[error(transparent)]
    Core(#[from] core::Error),
    /// The table of the user could not be measured.
    #[error("{}: {error}", file.display())]
    UserTable {
        /// The file of the table.
        file: PathBuf,
        /// The error of the measurement.
        error: Box<ReportError>,
    },
    /// The interconnects could not be measured.
    #[error(transparent)]
    Interconnect(#[from] BenchError),
    /// The model of the published hardware failed.
    #[error(transparent)]
    Modelled(#[from] ModelledError),
}

/// The report. All figures are *measured* on this machine unless they say otherwise. It contains the parts that were
/// measured and no others.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The version of the report's schema.
    pub schema: &'static str,
    /// The provenance of all figures that do not state their own.
    pub provenance: &'static str,
    /// The seed of tables, destinations and arrival times.
    pub seed: u64,
    /// The rate of one core in million packets a second: 64 B, full table, 4,000 random destinations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub core_mpps_64b: Option<f64>,
    /// Million lookups a second of one core, in batches, of random covered addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fib_v4_mlookups_per_s: Option<f64>,
    /// The rate of 64 B packets over the RDMA transport in lanes with the best batch, as a multiple of the rate with
    /// one packet a message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rnic_batch_gain_64b: Option<f64>,
    /// The adaptive policy compared with the best fixed batch, by size and load: over the RDMA transport in lanes, or
    /// over the only interconnect.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub adaptive: Vec<AdaptiveRow>,
    /// The adaptive policy's rate without a loss compared with that of the best fixed batch, by interconnect and size.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub adaptive_rates: Vec<AdaptiveRate>,
    /// The rows of `adaptive` in virtual time, without disturbances: *modelled*, under several assumptions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub adaptive_modelled: Vec<ModelledRow>,
    /// Forwarding tables.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fib: Option<fib::Results>,
    /// The forwarding core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub core: Option<core::Results>,
    /// The gain of batches by interconnect, at 64 B.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gains: Vec<BatchGain>,
    /// The latency of one hop by interconnect, size and batch.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hops: Vec<Hop>,
    /// Rates by interconnect, size and policy.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rates: Vec<RateRow>,
    /// Latency by interconnect, size, load and policy.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub loads: Vec<LoadRow>,
    /// Latency by interconnect, size and policy, at one load for all sizes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub loads_by_size: Vec<LoadRow>,
    /// Tables and forwarding core with the routes of a file; `null` in a full report without such a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub brought: Option<Option<UserTableReport>>,
    /// Forwarding between virtual Ethernet interfaces compared with the kernel's; `null` in a full report if it could
    /// not be measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ethernet: Option<Option<ethernet::Results>>,
    /// TCP streams and echo requests through the router compared with the kernel; `null` in a full report if they could
    /// not be measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub streams: Option<Option<streams::Results>>,
    /// The reasons why parts are missing.
    pub missing: Vec<String>,
    /// Remarks on results that a busy machine affected.
    pub remarks: Vec<String>,
    /// One-hop latency by size and batch: published, modelled and measured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub published_latency: Vec<Cell>,
    /// One-hop latency of Ethernet's batches, and of long messages: published, modelled and measured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub published_batches: Vec<Cell>,
}

/// The results with the routes of a file.
#[derive(Clone, Debug, Serialize)]
pub struct UserTableReport {
    /// The path of the file.
    pub file: PathBuf,
    /// The number of IPv4 routes, each prefix once.
    pub routes_v4: usize,
    /// The number of IPv6 routes, each prefix once.
    pub routes_v6: usize,
    /// The number of different next hops in the file.
    pub next_hops: usize,
    /// Forwarding tables.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fib: Option<fib::FibTableResults>,
    /// The forwarding core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub core: Option<core::CoreTableResults>,
}

/// Returns the number of steps that [`run`] reports.
pub fn steps(options: &Options, table: Option<&Table>) -> u64 {
    let parts = &options.parts;
    let count = |is_included: bool, steps: u64| if is_included { steps } else { 0 };
    let user_table = table.map_or(0, |table| {
        let fib = count(parts.has(Part::Fib), fib::steps_of_table(table));
        fib + count(parts.has(Part::Core), core::steps_of_table(table))
    });
    let ethernet = count(parts.has(Part::Ethernet), ethernet::steps(&options.ethernet()));
    let alone = count(parts.has(Part::Fib), fib::STEPS) + count(options.has_core(), core::steps(options.core_parts()));
    let interconnects = count(has_nodes(parts), interconnects::steps(options, &Scale::of(options)) as u64);
    let ethernet = ethernet + count(parts.has(Part::Streams), streams::steps(&options.streams()));
    user_table + alone + ethernet + count(parts.has(Part::Adaptive), 1) + interconnects
}

fn has_nodes(parts: &Parts) -> bool {
    parts.any(Part::is_between_nodes)
}

/// Measures the requested parts, and also tables and forwarding core with the routes of a file if there is one.
///
/// # Errors
/// Fails if a part cannot be measured at all: too few cores, no memory, or no room for routes.
pub fn run(
    options: &Options,
    table: Option<(&Path, &Table)>,
    observer: &mut dyn ProgressObserver,
) -> Result<Report, ReportError> {
    let parts = &options.parts;
    let mut report = Report::new(options);
    // The file is measured first, because it may be invalid.
    if let Some((file, table)) = table {
        let mut step = |what: &str| observer.step_begins("the table of the file", what);
        let measured = measure_user_table(file, table, options, &mut step);
        let error = |error| ReportError::UserTable { file: file.to_owned(), error: Box::new(error) };
        report.brought = Some(Some(measured.map_err(error)?));
    }
    if parts.has(Part::Fib) {
        let fib = fib::run(&options.fib(), &mut |what| observer.step_begins("forwarding tables", what))?;
        report.fib_v4_mlookups_per_s = Some(fib.v4.mlookups_per_s.median);
        report.fib = Some(fib);
    }
    if options.has_core() {
        let mut step = |what: &str| observer.step_begins("forwarding core", what);
        let core = core::run(&options.core(), options.core_parts(), &mut step)?;
        report.core_mpps_64b = core.core_mpps_64b();
        report.core = Some(core);
    }
    if parts.has(Part::Ethernet) {
        let mut step = |what: &str| observer.step_begins("virtual Ethernet", what);
        report.set_ethernet(ethernet::measure(&options.ethernet(), &mut step), parts.is_all());
    }
    if parts.has(Part::Streams) {
        let mut step = |what: &str| observer.step_begins("TCP streams", what);
        report.set_streams(streams::measure(&options.streams(), &mut step), parts.is_all());
    }
    if parts.has(Part::Adaptive) {
        observer.step_begins("adaptive batches", "in virtual time");
        report.adaptive_modelled = Scale::of(options).model()?;
    }
    observer.report_grew(&report);
    if has_nodes(parts) {
        interconnects::measure(options, &Scale::of(options), &mut report, observer)?;
        report.compare(options)?;
    }
    Ok(report)
}

impl Report {
    /// Creates an empty report.
    fn new(options: &Options) -> Report {
        Report {
            schema: "crosslane.bench.router/2",
            provenance: "measured",
            seed: options.seed,
            core_mpps_64b: None,
            fib_v4_mlookups_per_s: None,
            rnic_batch_gain_64b: None,
            adaptive: Vec::new(),
            adaptive_rates: Vec::new(),
            adaptive_modelled: Vec::new(),
            fib: None,
            core: None,
            gains: Vec::new(),
            hops: Vec::new(),
            rates: Vec::new(),
            loads: Vec::new(),
            loads_by_size: Vec::new(),
            brought: options.parts.is_all().then_some(None),
            ethernet: None,
            streams: None,
            missing: Vec::new(),
            remarks: Vec::new(),
            published_latency: Vec::new(),
            published_batches: Vec::new(),
        }
    }

    fn set_ethernet(&mut self, measured: Result<ethernet::Results, ethernet::Error>, is_whole: bool) {
        match measured {
            Ok(results) => self.ethernet = Some(Some(results)),
            Err(error) => {
                self.missing.push(format!("virtual Ethernet: {error}"));
                self.ethernet = is_whole.then_some(None);
            }
        }
    }

    fn set_streams(&mut self, measured: Result<streams::Results, ethernet::Error>, is_whole: bool) {
        match measured {
            Ok(results) => self.streams = Some(Some(results)),
            Err(error) => {
                self.missing.push(format!("TCP streams: {error}"));
                self.streams = is_whole.then_some(None);
            }
        }
    }

    /// Adds the comparisons of policies and the comparison with published results.
    fn compare(&mut self, options: &Options) -> Result<(), ModelledError> {
        self.remarks.extend(uncarried(&self.loads));
        if options.parts.has(Part::Adaptive) {
            let is_it = |row: &&LoadRow| row.interconnect == options.adaptive_kind();
            let rows: Vec<LoadRow> = self.loads.iter().filter(is_it).cloned().collect();
            self.adaptive = adaptive_rows(&rows);
        }
        self.adaptive_rates = adaptive_rates(&self.rates);
        if !self.hops.is_empty() {
            let cluster = Cluster::new()?;
            self.published_latency = latency_table(&cluster, &self.hops)?;
            self.published_batches = batch_table(&cluster, &self.hops)?;
        }
        Ok(())
    }
}

/// Measures tables and forwarding core with the routes of a file.
fn measure_user_table(
    file: &Path,
    table: &Table,
    options: &Options,
    step: &mut dyn FnMut(&str),
) -> Result<UserTableReport, ReportError> {
    let has = |part| options.parts.has(part);
    Ok(UserTableReport {
        file: file.to_owned(),
        routes_v4: table.v4.len(),
        routes_v6: table.v6.len(),
        next_hops: table.next_hops(),
        fib: has(Part::Fib).then(|| fib::run_table(&options.fib(), table, step)).transpose()?,
        core: has(Part::Core).then(|| core::run_table(&options.core(), table, step)).transpose()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records the progress of a run.
    #[derive(Default)]
    pub struct ProgressRecorder {
        pub begun: Vec<String>,
        pub grown: usize,
    }

    impl ProgressObserver for ProgressRecorder {
        fn step_begins(&mut self, section: &str, what: &str) {
            self.begun.push(format!("{section}: {what}"));
        }

        fn report_grew(&mut self, _: &Report) {
            self.grown += 1;
        }
    }

    fn keys(report: &Report) -> Vec<String> {
        let json = serde_json::to_value(report).expect("JSON");
        json.as_object().expect("an object").keys().cloned().collect()
    }

    #[test]
    fn parts_that_were_not_requested_are_absent_and_missing_parts_are_explained() {
        let always = ["missing", "provenance", "remarks", "schema", "seed"];
        let only = Options { parts: Parts::only(&[Part::Ethernet]), ..Options::new(true, 1) };
        let mut report = Report::new(&only);
        assert_eq!(keys(&report), always);
        let refused = || Err(ethernet::Error::Namespace(io::ErrorKind::PermissionDenied.into()));
        report.set_ethernet(refused(), false);
        assert_eq!(keys(&report), always);
        assert!(
            report.missing[0].starts_with("virtual Ethernet: cannot create network namespaces"),
            "{:?}",
            report.missing
        );
        // A full report has the same keys on every machine.
        let mut report = Report::new(&Options::new(true, 1));
        report.set_ethernet(refused(), true);
        report.set_streams(Err(ethernet::Error::Namespace(io::ErrorKind::PermissionDenied.into())), true);
        let all = ["brought", "ethernet", "missing", "provenance", "remarks", "schema", "seed", "streams"];
        assert_eq!(keys(&report), all);
    }
}
