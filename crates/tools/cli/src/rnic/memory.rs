//! `crosslane rnic memory`: prints the memory budget of a NIC.

use anyhow::Result;
use clap::Args;
use rnic::memory_budget::{
    BudgetEntry, MemoryBudget, MemoryLocation, PUBLISHED, PUBLISHED_QPS, PUBLISHED_TOTAL_BYTES, StructureKind,
};
use rnic::nic::TransportPolicy;
use serde::Serialize;
use stats::{Align, Table};

use super::policy_argument;
use crate::output;

/// Maximum number of queue pairs of a NIC: their numbers have 24 bits (InfiniBand Architecture Specification).
const QPS_MAX: i64 = 1 << 24;
/// Maximum number of work requests of a queue.
const DEPTH_MAX: i64 = 1 << 16;

/// Options of `crosslane rnic memory`.
#[derive(Args)]
pub struct Options {
    /// Kind of the NIC
    #[arg(long, value_parser = policy_argument::parser(), default_value = "srnic")]
    nic: TransportPolicy,
    /// Number of queue pairs
    #[arg(long, value_name = "N", default_value = "10000", value_parser = clap::value_parser!(u32).range(1..=QPS_MAX))]
    qps: u32,
    /// Number of work requests that each queue of a queue pair holds in host memory
    #[arg(long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(u32).range(1..=DEPTH_MAX))]
    depth: u32,
    /// Print JSON; total_bytes is the memory on chip
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    nic: String,
    qps: u64,
    depth: u64,
    qpc_bytes: u64,
    sq_scheduler_bytes: u64,
    directory_bytes: u64,
    mtt_bytes: u64,
    rx_buffer_bytes: u64,
    tx_buffer_bytes: u64,
    cq_context_bytes: u64,
    wqe_cache_bytes: u64,
    bitmap_bytes: u64,
    total_bytes: u64,
    host_bytes: u64,
    structures: Vec<Row>,
    #[serde(skip_serializing_if = "Option::is_none")]
    published: Option<Published>,
}

/// A structure, and the provenance of its size.
#[derive(Serialize)]
struct Row {
    structure: &'static str,
    place: &'static str,
    provenance: String,
    unit_bytes: u64,
    units: u64,
    bytes: u64,
}

/// The values that the authors of SRNIC publish.
#[derive(Serialize)]
struct Published {
    qps: u32,
    qpc_bytes: u64,
    sq_scheduler_bytes: u64,
    mtt_bytes: u64,
    rx_buffer_bytes: u64,
    total_bytes: u64,
}

impl Row {
    fn of(structure: &BudgetEntry) -> Self {
        Self {
            structure: structure.kind.name(),
            place: match structure.location {
                MemoryLocation::OnChip => "chip",
                MemoryLocation::Host => "host",
            },
            provenance: structure.origin.to_string(),
            unit_bytes: structure.unit_bytes,
            units: structure.units,
            bytes: structure.bytes(),
        }
    }
}

fn published() -> Published {
    let of = |role| PUBLISHED.iter().find(|(known, _)| *known == role).map_or(0, |(_, bytes)| *bytes);
    Published {
        qps: PUBLISHED_QPS,
        qpc_bytes: of(StructureKind::QpContext),
        sq_scheduler_bytes: of(StructureKind::SqScheduler),
        mtt_bytes: of(StructureKind::Mtt),
        rx_buffer_bytes: of(StructureKind::RxBuffer),
        total_bytes: PUBLISHED_TOTAL_BYTES,
    }
}

impl Report {
    fn of(policy: TransportPolicy, budget: &MemoryBudget) -> Self {
        let chip = |role| budget.bytes(MemoryLocation::OnChip, role);
        Self {
            nic: policy.name().to_owned(),
            qps: budget.qps,
            depth: budget.depth,
            qpc_bytes: chip(StructureKind::QpContext),
            sq_scheduler_bytes: chip(StructureKind::SqScheduler),
            directory_bytes: chip(StructureKind::Directory),
            mtt_bytes: chip(StructureKind::Mtt),
            rx_buffer_bytes: chip(StructureKind::RxBuffer),
            tx_buffer_bytes: chip(StructureKind::TxBuffer),
            cq_context_bytes: chip(StructureKind::CqContext),
            wqe_cache_bytes: chip(StructureKind::WqeCache),
            bitmap_bytes: chip(StructureKind::Bitmaps),
            total_bytes: budget.total(MemoryLocation::OnChip),
            host_bytes: budget.total(MemoryLocation::Host),
            structures: budget.entries.iter().map(Row::of).collect(),
            published: matches!(policy, TransportPolicy::Srnic | TransportPolicy::SrnicPaged).then(published),
        }
    }
}

/// Prints the memory budget of one kind of NIC.
pub fn main(options: &Options) -> Result<()> {
    let budget = MemoryBudget::new(options.nic, options.qps, options.depth);
    let report = Report::of(options.nic, &budget);
    if options.json { output::print_json(&report) } else { print_table(&report) }
}

fn print_table(report: &Report) -> Result<()> {
    let mut table = Table::new(&[
        ("STRUCTURE", Align::Left),
        ("PLACE", Align::Left),
        ("B EACH", Align::Right),
        ("COUNT", Align::Right),
        ("BYTES", Align::Right),
        ("ORIGIN", Align::Left),
    ]);
    for row in &report.structures {
        let numbers = [row.unit_bytes, row.units, row.bytes].map(|number| number.to_string());
        let words = [row.structure.to_owned(), row.place.to_owned()];
        table.row(words.into_iter().chain(numbers).chain([row.provenance.clone()]).collect());
    }
    for (place, bytes) in [("chip", report.total_bytes), ("host", report.host_bytes)] {
        let blank = String::new;
        table.row(vec!["all".to_owned(), place.to_owned(), blank(), blank(), bytes.to_string(), blank()]);
    }
    let published = report.published.as_ref().map(|published| {
        format!("\nPublished for SRNIC with {} queue pairs: {} bytes on chip.\n", published.qps, published.total_bytes)
    });
    output::print(&format!(
        "{} with {} queue pairs, {} work requests in each queue.\n\
         Measured: structures of the engine. Modelled: assumed structures. Published: values of such NICs.\n\n\
         {}{}",
        report.nic,
        report.qps,
        report.depth,
        table.render(),
        published.unwrap_or_default()
    ))
}
