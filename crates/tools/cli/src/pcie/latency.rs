//! `crosslane pcie latency`: computes the minimum latency of transfers.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use pcie::model::latency::{LatencyBreakdown, LatencyPart, PciePath, PcieSwitch};
use pcie::model::{Mode, Model, ModelError};
use serde::Serialize;
use stats::{Align, Table};

use super::sizes::{Size, Sizes};
use super::{link, report};
use crate::output;
use crate::wrong_use::WrongUse;

/// Maximum number of switches on a path.
const SWITCHES_MAX: i64 = 16;

/// Options of `crosslane pcie latency`.
#[derive(Args)]
pub struct Options {
    /// Transfer sizes: one (with its parts), a list or a range
    #[arg(long, value_name = "BYTES", default_value = "64")]
    size: Sizes,
    /// Offset of a transfer in its 4 KB page
    #[arg(long, value_name = "BYTES", default_value = "0")]
    offset: Size,
    /// Print JSON: an object for one size, an object with rows for several
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    path: PathOptions,
    #[command(flatten)]
    link: link::Options,
}

/// The path from the device to memory; by default a slot of the root complex and DDR4.
#[derive(Args)]
#[command(next_help_heading = "Path")]
#[group(skip)]
struct PathOptions {
    /// A file that describes the path (docs/pcie-model.md)
    #[arg(long, value_name = "PATH")]
    path: Option<PathBuf>,
    /// Add this number of switches to the path, each with a link
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(0..=SWITCHES_MAX))]
    switches: Option<u8>,
    /// Forwarding latency of each of these switches [default: 105, that of a PEX88000]
    #[arg(long, value_name = "NS", value_parser = parse_ns, requires = "switches")]
    switch_ns: Option<f64>,
    /// These switches use store-and-forward instead of cut-through
    #[arg(long, requires = "switches")]
    store_and_forward: bool,
    /// Latency of the device before its first packet
    #[arg(long, value_name = "NS", value_parser = parse_ns)]
    device_ns: Option<f64>,
    /// Latency of the root complex for a request
    #[arg(long, value_name = "NS", value_parser = parse_ns)]
    root_complex_ns: Option<f64>,
    /// Latency of memory or a cache for a read
    #[arg(long, value_name = "NS", value_parser = parse_ns)]
    memory_ns: Option<f64>,
}

fn parse_ns(text: &str) -> Result<f64, String> {
    let ns: Option<f64> = text.parse().ok();
    ns.filter(|ns| (0.0..=pcie::NS_MAX).contains(ns))
        .ok_or_else(|| format!("'{text}' is not a time of up to a second; write nanoseconds as in 105 or 7.5"))
}

impl PathOptions {
    fn path(&self) -> Result<PciePath> {
        let path = match &self.path {
            Some(file) => PciePath::read(Path::new(file)).map_err(WrongUse::of)?,
            None => PciePath::direct(),
        };
        let switch = PcieSwitch {
            forward_ns: self.switch_ns.unwrap_or(PcieSwitch::PEX88000.forward_ns),
            cut_through: !self.store_and_forward,
        };
        let path = path.with_switches(usize::from(self.switches.unwrap_or(0)), &switch);
        Ok(PciePath {
            device_ns: self.device_ns.unwrap_or(path.device_ns),
            root_complex_ns: self.root_complex_ns.unwrap_or(path.root_complex_ns),
            memory_read_ns: self.memory_ns.unwrap_or(path.memory_read_ns),
            ..path
        })
    }
}

/// Parameters that all rows share.
#[derive(Serialize)]
struct Parameters<'a> {
    path: &'a str,
    offset_bytes: u64,
}

#[derive(Serialize)]
struct Row {
    size_bytes: u64,
    read_ns: f64,
    write_ns: f64,
    write_read_ns: f64,
    read_parts: Vec<LatencyPart>,
    write_parts: Vec<LatencyPart>,
}

impl Row {
    fn of(path: &PciePath, model: &Model, size_bytes: u64, offset_bytes: u64) -> Result<Self, ModelError> {
        let LatencyBreakdown { latency_ns: read_ns, parts: read_parts } =
            path.read_latency(model, size_bytes, offset_bytes)?;
        let LatencyBreakdown { latency_ns: write_ns, parts: write_parts } =
            path.write_latency(model, size_bytes, offset_bytes)?;
        let write_read_ns = path.write_read_latency(model, size_bytes, offset_bytes)?.latency_ns;
        Ok(Self { size_bytes, read_ns, write_ns, write_read_ns, read_parts, write_parts })
    }
}

/// Prints the minimum latencies of every size, and their parts if there is one size.
pub fn main(options: &Options) -> Result<()> {
    let model = options.link.model().map_err(WrongUse::of)?;
    if model.mode() == Mode::Published {
        return Err(WrongUse::of("the published model has no latencies; leave --mode published out").into());
    }
    let path = options.path.path()?;
    let rows = options.size.0.iter().map(|size_bytes| Row::of(&path, &model, *size_bytes, options.offset.0));
    let rows: Vec<Row> = rows.collect::<Result<_, _>>().map_err(WrongUse::of)?;
    if options.json {
        return report::print_json(&model, Parameters { path: &path.name, offset_bytes: options.offset.0 }, &rows);
    }
    let source = format!("Path '{}': {}\n", path.name, path.source);
    let parts = if let [only] = rows.as_slice() { parts_text(only) } else { String::new() };
    output::print(&format!("{}{source}Minimum latencies:\n\n{}{parts}", report::describe(&model), sizes_text(&rows)))
}

fn sizes_text(rows: &[Row]) -> String {
    let heads = ["SIZE B", "READ ns", "WRITE ns", "WRITE, THEN READ ns"];
    let mut table = Table::new(&heads.map(|head| (head, Align::Right)));
    for row in rows {
        let ns = [row.read_ns, row.write_ns, row.write_read_ns].map(nanoseconds);
        table.row([row.size_bytes.to_string()].into_iter().chain(ns).collect());
    }
    table.render()
}

fn parts_text(row: &Row) -> String {
    let mut table =
        Table::new(&[("ACCESS", Align::Left), ("WHERE", Align::Left), ("WHAT", Align::Left), ("ns", Align::Right)]);
    for (access, parts) in [("read", &row.read_parts), ("write", &row.write_parts)] {
        for part in parts {
            table.row(vec![access.to_owned(), part.hop.clone(), part.what.to_owned(), nanoseconds(part.ns)]);
        }
    }
    format!("\n{}", table.render())
}

fn nanoseconds(ns: f64) -> String {
    format!("{ns:.2}")
}
