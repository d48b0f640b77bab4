//! Everything of `crosslane bench router`, in one report.

use std::io;
use std::path::{Path, PathBuf};

use router_node::interconnect::Kind;
use serde::Serialize;
use thiserror::Error;

use crate::interconnect::{
    AdaptiveRow, BatchGain, Batching, BenchError, Cores, Effort, Hop, LoadRow, RateRow, adaptive_rows, batch_gain,
    hops, kinds, loads, name, rates, uncarried,
};
use crate::published::{Cell, Cluster, ModelledError, batch_table, latency_table};
use crate::table::Table;
use crate::{core, ethernet, fib};

/// Frames whose latency by load is measured, in bytes.
const LOAD_FRAME_BYTES: [usize; 2] = [64, 1500];
/// Loads, as shares of the best rate that a fixed batch carries without a loss.
const LOADS: [f64; 6] = [0.05, 0.2, 0.4, 0.6, 0.8, 0.9];
const LOADS_QUICK: [f64; 3] = [0.1, 0.5, 0.8];
/// Latency by size is measured at this share of what the longest frames' best fixed batch carries: at as many packets a
/// second for each size, which all sizes carry.
const SIZE_LOAD: f64 = 0.5;
const SIZES_QUICK: [usize; 3] = [64, 512, 1500];
/// The interconnect of the paper, without a network card: what the comparison of batches is about.
pub const PUBLISHED_KIND: &str = "rnic_lanes";

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Shorter trials, fewer points: a minute or two.
    pub is_quick: bool,
    /// Of tables, destinations and moments.
    pub seed: u64,
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

/// All figures are *measured* on this machine. The first four are what scripts read.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Of this report's shape.
    pub schema: &'static str,
    /// Of all figures but those that say another.
    pub provenance: &'static str,
    /// Of tables, destinations and moments.
    pub seed: u64,
    /// Million packets a second of one core: 64 B, full table, 4,000 random destinations.
    pub core_mpps_64b: f64,
    /// Million lookups a second of one core, overlapped, random covered addresses.
    pub fib_v4_mlookups_per_s: f64,
    /// How many times the packets of 64 B go over the RDMA transport in lanes with the best batch, to one a message.
    pub rnic_batch_gain_64b: f64,
    /// The adaptive policy beside the best fixed batch, by size and load, over the RDMA transport in lanes.
    pub adaptive: Vec<AdaptiveRow>,
    /// Tables.
    pub fib: fib::Results,
    /// The forwarding core.
    pub core: core::Results,
    /// What batches gain, by interconnect, at 64 B.
    pub gains: Vec<BatchGain>,
    /// One hop, by interconnect, size and batch.
    pub hops: Vec<Hop>,
    /// Rates by interconnect, size and policy.
    pub rates: Vec<RateRow>,
    /// Latency by interconnect, size, load and policy.
    pub loads: Vec<LoadRow>,
    /// Latency by interconnect, size and policy, at one load for all sizes.
    pub loads_by_size: Vec<LoadRow>,
    /// Tables and forwarding core with the routes of a file, if one was brought.
    pub brought: Option<Brought>,
    /// Forwarding between virtual Ethernet beside the kernel's own; nothing without the right to make namespaces.
    pub ethernet: Option<ethernet::Results>,
    /// Why parts are missing.
    pub missing: Vec<String>,
    /// What a busy machine let come out otherwise than it should.
    pub remarks: Vec<String>,
    /// One-hop latency by size and batch: published, modelled and measured.
    pub published_latency: Vec<Cell>,
    /// One-hop latency of Ethernet's batches, and of long messages: published, modelled and measured.
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
    pub fib: fib::OfTable,
    /// The forwarding core.
    pub core: core::OfTable,
}

/// How often [`run`] says that something begins.
pub fn steps(is_quick: bool, has_table: bool) -> u64 {
    let (kinds, measured) = (kinds().len(), if is_quick { 1 } else { kinds().len() });
    (3 + usize::from(has_table) + kinds + (2 * LOAD_FRAME_BYTES.len() + 1) * measured) as u64
}

/// Measures everything, tables and forwarding core with the routes of a file too if there is one; `step` hears what
/// begins.
///
/// # Errors
/// When something cannot be measured at all: too few cores, no memory, routes that find no room.
pub fn run(
    options: &Options,
    table: Option<(&Path, &Table)>,
    mut step: impl FnMut(&str),
) -> Result<Report, ReportError> {
    let Options { is_quick, seed } = *options;
    let fib_options = if is_quick { fib::Options::quick() } else { fib::Options::full() };
    let core_options = if is_quick { core::Options::quick() } else { core::Options::full() };
    let (fib_options, core_options) = (fib::Options { seed, ..fib_options }, core::Options { seed, ..core_options });
    // First, for a file may be no good.
    let brought = table.map(|(file, table)| {
        step("the table that was brought");
        let measured = brought(file, table, &fib_options, &core_options);
        measured.map_err(|error| ReportError::Brought { file: file.to_owned(), error: Box::new(error) })
    });
    let brought = brought.transpose()?;
    step("forwarding tables");
    let fib = fib::run(&fib_options)?;
    step("forwarding core");
    let core = core::run(&core_options)?;
    step("virtual Ethernet beside the kernel");
    let ethernet_options = if is_quick { ethernet::Options::quick() } else { ethernet::Options::full() };
    let ethernet = ethernet::measure(&ethernet::Options { seed, ..ethernet_options });
    let between = between_nodes(&kinds(), is_quick, &mut step)?;
    let published = between.gains.iter().find(|gain| gain.interconnect == PUBLISHED_KIND);
    let cluster = Cluster::new()?;
    let published_latency = latency_table(&cluster, &between.hops)?;
    let published_batches = batch_table(&cluster, &between.hops)?;
    let mut remarks = between.remarks.clone();
    remarks.extend(uncarried(&between.loads));
    Ok(Report {
        schema: "crosslane.bench.router/1",
        provenance: "measured",
        seed,
        core_mpps_64b: core.core_mpps_64b().unwrap_or_default(),
        fib_v4_mlookups_per_s: fib.v4.mlookups_per_s.median,
        rnic_batch_gain_64b: published.map(|gain| gain.gain).unwrap_or_default(),
        adaptive: adaptive_rows(&between.of_published()),
        fib,
        core,
        gains: between.gains,
        hops: between.hops,
        rates: between.rates,
        loads: between.loads,
        loads_by_size: between.loads_by_size,
        brought,
        missing: ethernet.as_ref().err().map(|error| format!("virtual Ethernet: {error}")).into_iter().collect(),
        remarks,
        ethernet: ethernet.ok(),
        published_latency,
        published_batches,
    })
}

fn brought(
    file: &Path,
    table: &Table,
    fib_options: &fib::Options,
    core_options: &core::Options,
) -> Result<Brought, ReportError> {
    Ok(Brought {
        file: file.to_owned(),
        routes_v4: table.v4.len(),
        routes_v6: table.v6.len(),
        next_hops: table.next_hops(),
        fib: fib::of_table(fib_options, table)?,
        core: core::of_table(core_options, table)?,
    })
}

/// What was measured between two nodes: as in a [`Report`].
#[derive(Debug, Default, Serialize)]
pub struct BetweenNodes {
    /// What batches gain, at 64 B.
    pub gains: Vec<BatchGain>,
    /// One hop, by size and batch.
    pub hops: Vec<Hop>,
    /// Rates by size and policy.
    pub rates: Vec<RateRow>,
    /// Latency by size, load and policy.
    pub loads: Vec<LoadRow>,
    /// Latency by size and policy, at one load for all sizes.
    pub loads_by_size: Vec<LoadRow>,
    /// What is to be known of them.
    pub remarks: Vec<String>,
}

impl BetweenNodes {
    /// Latency by load over the interconnect of the paper.
    fn of_published(&self) -> Vec<LoadRow> {
        self.loads.iter().filter(|row| row.interconnect == PUBLISHED_KIND).copied().collect()
    }
}

/// Measures interconnects alone; `step` hears what begins.
///
/// # Errors
/// When the two nodes cannot be made, or have no core each.
pub fn between_nodes(kinds: &[Kind], is_quick: bool, step: &mut impl FnMut(&str)) -> Result<BetweenNodes, BenchError> {
    let effort = if is_quick { Effort::quick() } else { Effort::full() };
    let (sizes, batches): (&[usize], &[u8]) = if is_quick {
        (&LOAD_FRAME_BYTES, &[1, 16])
    } else {
        (&crate::interconnect::FRAME_BYTES, &crate::interconnect::BATCHES)
    };
    let cores = Cores::find()?;
    let mut found = BetweenNodes::default();
    for &kind in kinds {
        step(&format!("{}: one hop, gain of batches", name(kind)));
        found.hops.extend(hops(kind, sizes, batches, &effort, cores)?);
        found.gains.push(batch_gain(kind, LOAD_FRAME_BYTES[0], &effort, cores)?);
        // Quick: latency over the paper's interconnect alone.
        if is_quick && name(kind) != PUBLISHED_KIND {
            continue;
        }
        let (shares, sizes): (&[f64], &[usize]) =
            if is_quick { (&LOADS_QUICK, &SIZES_QUICK) } else { (&LOADS, &crate::interconnect::FRAME_BYTES) };
        let mut carried_mpps = 0.0;
        for frame_bytes in LOAD_FRAME_BYTES {
            step(&format!("{}: rates without a loss, {frame_bytes} B", name(kind)));
            let rows = rates(kind, frame_bytes, &effort, cores)?;
            let (mpps, remark) = full_load(&rows);
            carried_mpps = mpps;
            found.remarks.extend(remark);
            found.rates.extend(rows);
            step(&format!("{}: latency by load, {frame_bytes} B", name(kind)));
            let mpps: Vec<f64> = shares.iter().map(|share| share * carried_mpps).collect();
            found.loads.extend(loads(kind, frame_bytes, &mpps, &effort, cores)?);
        }
        step(&format!("{}: latency by size", name(kind)));
        for frame_bytes in sizes {
            found.loads_by_size.extend(loads(kind, *frame_bytes, &[SIZE_LOAD * carried_mpps], &effort, cores)?);
        }
    }
    Ok(found)
}

/// What loads are shares of: [`best_fixed_mpps`]. Where the machine was so busy that each search ended at nothing, it
/// is half of what arrives at best in a flood, and a remark says so: shares of nothing would be no loads.
fn full_load(rows: &[RateRow]) -> (f64, Option<String>) {
    let carried_mpps = best_fixed_mpps(rows);
    if carried_mpps > 0.0 {
        return (carried_mpps, None);
    }
    let fixed = rows.iter().filter(|row| row.batching != Batching::Adaptive);
    let best = fixed.max_by(|one, other| one.flood_mpps.total_cmp(&other.flood_mpps));
    let Some(row) = best else { return (carried_mpps, None) };
    let mpps = row.flood_mpps / 2.0;
    let remark = format!(
        "{}: no fixed batch was seen to carry {} B without a loss; loads are shares of half of the best flood, \
         {mpps:.3} Mpps",
        row.interconnect, row.frame_bytes
    );
    (mpps, Some(remark))
}

/// The best rate that a fixed batch carries without a loss.
pub fn best_fixed_mpps(rows: &[RateRow]) -> f64 {
    let fixed = rows.iter().filter(|row| row.batching != Batching::Adaptive);
    fixed.map(|row| row.zero_loss_mpps).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_shares_of_what_is_carried_and_of_half_a_flood_where_nothing_was_seen_to_be() {
        let row = |batching, zero_loss_mpps, flood_mpps| RateRow {
            interconnect: "lanes",
            frame_bytes: 64,
            batching,
            zero_loss_mpps,
            flood_mpps,
            packets_per_message: 1.0,
            adaptive_ratio: 1.0,
        };
        let of = |zero_loss: [f64; 2]| {
            [
                row(Batching::Fixed(1), zero_loss[0], 2.0),
                row(Batching::Fixed(8), zero_loss[1], 6.0),
                row(Batching::Adaptive, 9.0, 9.0),
            ]
        };
        assert_eq!(full_load(&of([1.5, 5.0])), (5.0, None));
        let (mpps, remark) = full_load(&of([0.0, 0.0]));
        let said = "lanes: no fixed batch was seen to carry 64 B without a loss; loads are shares of half of the best \
                    flood, 3.000 Mpps";
        assert_eq!((mpps, remark.as_deref()), (3.0, Some(said)));
    }
}
