//! `crosslane bench router` in one report: everything, or the parts that were asked for.

mod between;
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
use crate::{core, ethernet, fib};
use between::Scale;
pub use parts::{NoKind, NoPart, Part, Parts, kind};

/// The interconnect of the paper, without a network card: what the comparison of batches is about.
pub const PUBLISHED_KIND: &str = "rnic_lanes";

/// What is measured.
#[derive(Clone, Debug)]
pub struct Options {
    /// Shorter trials, fewer points: a minute or two.
    pub is_quick: bool,
    /// Of tables, destinations and moments.
    pub seed: u64,
    /// What is left out otherwise.
    pub parts: Parts,
    /// The only interconnect; all without one.
    pub kind: Option<TransportKind>,
    /// The only sizes of frames whose rates and latencies are taken, 64 to 1500; the usual ones without any.
    pub frame_bytes: Vec<usize>,
    /// The only loads by which latency is taken, as shares of a fixed batch's best rate; the usual ones without any.
    pub load_shares: Vec<f64>,
}

impl Options {
    /// Everything.
    pub fn new(is_quick: bool, seed: u64) -> Options {
        let (frame_bytes, load_shares) = (Vec::new(), Vec::new());
        Options { is_quick, seed, parts: Parts::ALL, kind: None, frame_bytes, load_shares }
    }

    /// Over which interconnect the adaptive policy stands beside the fixed ones.
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

/// Hears how a run goes.
pub trait Follower {
    /// Something begins: in which section, and what.
    fn begins(&mut self, section: &str, what: &str);
    /// The report has more than before.
    fn grew(&mut self, report: &Report);
}

/// Why there is no report.
#[derive(Debug, Error)]
pub enum ReportError {
    /// No tables.
    #[error("tables: {0}")]
    Fib(#[from] io::Error),
    /// No forwarding core.
    #[error(transparent)]
    Core(#[from] core::Error),
    /// Not with the table that was brought.
    #[error("{}: {error}", file.display())]
    Brought {
        /// Which.
        file: PathBuf,
        /// Why not.
        error: Box<ReportError>,
    },
    /// No interconnect.
    #[error(transparent)]
    Interconnect(#[from] BenchError),
    /// No model of what was published.
    #[error(transparent)]
    Modelled(#[from] ModelledError),
}

/// All figures are *measured* on this machine. It has the parts that were measured, and nothing of others.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Of this report's shape.
    pub schema: &'static str,
    /// Of all figures but those that say another.
    pub provenance: &'static str,
    /// Of tables, destinations and moments.
    pub seed: u64,
    /// Million packets a second of one core: 64 B, full table, 4,000 random destinations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub core_mpps_64b: Option<f64>,
    /// Million lookups a second of one core, overlapped, random covered addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fib_v4_mlookups_per_s: Option<f64>,
    /// How many times the packets of 64 B go over the RDMA transport in lanes with the best batch, to one a message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rnic_batch_gain_64b: Option<f64>,
    /// The adaptive policy beside the best fixed batch, by size and load: over the RDMA transport in lanes, or over the
    /// only interconnect.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub adaptive: Vec<AdaptiveRow>,
    /// Its rate without a loss beside the best fixed batch's, by interconnect and size.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub adaptive_rates: Vec<AdaptiveRate>,
    /// The rows of `adaptive` in virtual time, where nothing else disturbs: *modelled*, under several assumptions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub adaptive_modelled: Vec<ModelledRow>,
    /// Tables.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fib: Option<fib::Results>,
    /// The forwarding core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub core: Option<core::Results>,
    /// What batches gain, by interconnect, at 64 B.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gains: Vec<BatchGain>,
    /// One hop, by interconnect, size and batch.
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
    /// Tables and forwarding core with the routes of a file; a whole report says that there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub brought: Option<Option<Brought>>,
    /// Forwarding between virtual Ethernet beside the kernel's own; a whole report says that it is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ethernet: Option<Option<ethernet::Results>>,
    /// Why parts are missing.
    pub missing: Vec<String>,
    /// What a busy machine let come out otherwise than it should.
    pub remarks: Vec<String>,
    /// One-hop latency by size and batch: published, modelled and measured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub published_latency: Vec<Cell>,
    /// One-hop latency of Ethernet's batches, and of long messages: published, modelled and measured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub published_batches: Vec<Cell>,
}

/// What was measured with the routes of a file.
#[derive(Clone, Debug, Serialize)]
pub struct Brought {
    /// Its name.
    pub file: PathBuf,
    /// Routes of IPv4, each prefix once.
    pub routes_v4: usize,
    /// Routes of IPv6, each prefix once.
    pub routes_v6: usize,
    /// Different next hops in it.
    pub next_hops: usize,
    /// Tables.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fib: Option<fib::OfTable>,
    /// The forwarding core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub core: Option<core::OfTable>,
}

/// How often [`run`] says that something begins.
pub fn steps(options: &Options, table: Option<&Table>) -> u64 {
    let parts = &options.parts;
    let count = |is_so: bool, steps: u64| if is_so { steps } else { 0 };
    let brought = table.map_or(0, |table| {
        let fib = count(parts.has(Part::Fib), fib::steps_of_table(table));
        fib + count(parts.has(Part::Core), core::steps_of_table(table))
    });
    let ethernet = count(parts.has(Part::Ethernet), ethernet::steps(&options.ethernet()));
    let alone = count(parts.has(Part::Fib), fib::STEPS) + count(options.has_core(), core::steps(options.core_parts()));
    let between = count(has_nodes(parts), between::steps(options, &Scale::of(options)) as u64);
    brought + alone + ethernet + count(parts.has(Part::Adaptive), 1) + between
}

fn has_nodes(parts: &Parts) -> bool {
    parts.any(Part::is_between_nodes)
}

/// Measures what was asked for, tables and forwarding core with the routes of a file too if there is one.
///
/// # Errors
/// When something cannot be measured at all: too few cores, no memory, routes that find no room.
pub fn run(
    options: &Options,
    table: Option<(&Path, &Table)>,
    follower: &mut dyn Follower,
) -> Result<Report, ReportError> {
    let parts = &options.parts;
    let mut report = Report::new(options);
    // First, for a file may be no good.
    if let Some((file, table)) = table {
        let measured = brought(file, table, options, &mut |what| follower.begins("the table that was brought", what));
        let error = |error| ReportError::Brought { file: file.to_owned(), error: Box::new(error) };
        report.brought = Some(Some(measured.map_err(error)?));
    }
    if parts.has(Part::Fib) {
        let fib = fib::run(&options.fib(), &mut |what| follower.begins("forwarding tables", what))?;
        report.fib_v4_mlookups_per_s = Some(fib.v4.mlookups_per_s.median);
        report.fib = Some(fib);
    }
    if options.has_core() {
        let mut step = |what: &str| follower.begins("forwarding core", what);
        let core = core::run(&options.core(), options.core_parts(), &mut step)?;
        report.core_mpps_64b = core.core_mpps_64b();
        report.core = Some(core);
    }
    if parts.has(Part::Ethernet) {
        let mut step = |what: &str| follower.begins("virtual Ethernet", what);
        report.set_ethernet(ethernet::measure(&options.ethernet(), &mut step), parts.is_all());
    }
    if parts.has(Part::Adaptive) {
        follower.begins("adaptive batches", "in virtual time");
        report.adaptive_modelled = Scale::of(options).model()?;
    }
    follower.grew(&report);
    if has_nodes(parts) {
        between::measure(options, &Scale::of(options), &mut report, follower)?;
        report.compare(options)?;
    }
    Ok(report)
}

impl Report {
    /// With nothing in it yet.
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

    /// What was measured between nodes beside each other, and beside what was published.
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

fn brought(file: &Path, table: &Table, options: &Options, step: &mut dyn FnMut(&str)) -> Result<Brought, ReportError> {
    let has = |part| options.parts.has(part);
    Ok(Brought {
        file: file.to_owned(),
        routes_v4: table.v4.len(),
        routes_v6: table.v6.len(),
        next_hops: table.next_hops(),
        fib: has(Part::Fib).then(|| fib::of_table(&options.fib(), table, step)).transpose()?,
        core: has(Part::Core).then(|| core::of_table(&options.core(), table, step)).transpose()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a follower was told.
    #[derive(Default)]
    pub struct Heard {
        pub begun: Vec<String>,
        pub grown: usize,
    }

    impl Follower for Heard {
        fn begins(&mut self, section: &str, what: &str) {
            self.begun.push(format!("{section}: {what}"));
        }

        fn grew(&mut self, _: &Report) {
            self.grown += 1;
        }
    }

    fn keys(report: &Report) -> Vec<String> {
        let json = serde_json::to_value(report).expect("JSON");
        json.as_object().expect("an object").keys().cloned().collect()
    }

    #[test]
    fn what_was_not_asked_for_is_absent_and_what_is_missing_is_said() {
        let always = ["missing", "provenance", "remarks", "schema", "seed"];
        let only = Options { parts: Parts::only(&[Part::Ethernet]), ..Options::new(true, 1) };
        let mut report = Report::new(&only);
        assert_eq!(keys(&report), always);
        let refused = || Err(ethernet::Error::Namespace(io::ErrorKind::PermissionDenied.into()));
        report.set_ethernet(refused(), false);
        assert_eq!(keys(&report), always);
        assert!(report.missing[0].starts_with("virtual Ethernet: no network namespaces"), "{:?}", report.missing);
        // A whole report has the same keys on every machine.
        let mut report = Report::new(&Options::new(true, 1));
        report.set_ethernet(refused(), true);
        assert_eq!(keys(&report), ["brought", "ethernet", "missing", "provenance", "remarks", "schema", "seed"]);
    }
}
