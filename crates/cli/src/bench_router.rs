//! `crosslane bench router`: the forwarding core, the tables, and two nodes over each interconnect.

use std::path::PathBuf;

use anyhow::Result;
use crosslane_bench::{Machine, Progress};
use plot::{Axis, Figure, Series, Style};
use router_bench::core::{Case, ZeroLoss};
use router_bench::ethernet;
use router_bench::fib::Family;
use router_bench::interconnect::{Batching, LoadRow, RateRow};
use router_bench::published::{Cell, Transport};
use router_bench::report::{self, Report};
use serde::Serialize;

use crate::output;
use crate::table::{Align, Table};

/// What to measure.
#[derive(clap::Args)]
pub struct Options {
    /// Shorter trials and fewer points: a minute or two
    #[arg(long)]
    pub quick: bool,
    /// JSON instead of tables
    #[arg(long)]
    pub json: bool,
    /// Write the plots as SVG files into this directory
    #[arg(long, value_name = "DIR")]
    pub plot: Option<PathBuf>,
    /// Decides everything that is random
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

/// The report, and what it was measured on.
#[derive(Serialize)]
struct Printed {
    #[serde(flatten)]
    report: Report,
    machine: Machine,
}

/// Measures and prints.
pub fn main(options: &Options) -> Result<()> {
    let mut progress = Progress::new(report::steps(options.quick));
    let measured = report::run(&report::Options { is_quick: options.quick, seed: options.seed }, |what| {
        progress.step("router", what);
    });
    drop(progress);
    let printed = Printed { report: measured?, machine: Machine::describe(None) };
    if let Some(directory) = &options.plot {
        std::fs::create_dir_all(directory)?;
        for path in plot::write_svgs(directory, &plots(&printed.report))? {
            eprintln!("{}", path.display());
        }
    }
    if options.json { output::print_json(&printed) } else { output::print(&render(&printed)) }
}

const RIGHT: Align = Align::Right;
const LEFT: Align = Align::Left;

fn render(printed: &Printed) -> String {
    let Printed { report, machine } = printed;
    let mut text = format!("measured, seed {}; {}\n", report.seed, machine.words());
    text += &format!(
        "forwarding core {:.1} Mpps at 64 B; {:.0} M lookups/s of IPv4; batches carry {:.1} x single packets (rnic)\n",
        report.core_mpps_64b, report.fib_v4_mlookups_per_s, report.rnic_batch_gain_64b
    );
    text += "\nTables: lookups of random covered addresses beside loads at random places of as much memory, one core\n";
    text += &tables(report);
    text += "\nForwarding core, ports in memory: one core, full table; ns a packet by stage\n";
    text += &cases(&report.core.cases);
    text += "\nThe highest rate without a loss (RFC 2544)\n";
    text += &zero_loss(&report.core.zero_loss);
    text += "\nForwarding between virtual Ethernet, in turns: Mpps that arrive, latency in us\n";
    text += &report.ethernet.as_ref().map(ethernet_cases).unwrap_or_default();
    report.missing.iter().for_each(|missing| text += &format!("missing: {missing}\n"));
    text += "\nOne hop between two nodes, ((T4-T1)-(T3-T2))/2, us\n";
    text += &hops(report);
    text += "\nRates between two nodes, Mpps\n";
    text += &rates(&report.rates);
    text += "\nLatency by load, us; p99 of packets that no stall of this machine touched, and of all\n";
    text += &loads(&report.loads);
    text += "\nPublished (KAIST, HiPINEB 2016), modelled (its 40 Gb/s cards) and measured here: one hop, us\n";
    text += &published(&report.published_latency);
    text += "\nThe same: Ethernet's batches of 1500 B, and messages of RoCE by their length\n";
    text += &published(&report.published_batches);
    text
}

fn tables(report: &Report) -> String {
    let head =
        [("", LEFT), ("ROUTES", RIGHT), ("MIB", RIGHT), ("BUILD MS", RIGHT), ("M/S", RIGHT), ("LOADS M/S", RIGHT)];
    let mut table = Table::new(&[&head[..], &[("DEPENDENT NS", RIGHT), ("A LOAD NS", RIGHT)]].concat());
    for (name, family) in [("IPv4", &report.fib.v4), ("IPv6", &report.fib.v6)] {
        let Family { routes, bytes, build_ms, mlookups_per_s, floor_mloads_per_s, .. } = family;
        table.row(vec![
            name.to_owned(),
            routes.to_string(),
            format!("{:.1}", *bytes as f64 / f64::from(1 << 20)),
            format!("{build_ms:.0}"),
            format!("{:.1}", mlookups_per_s.median),
            format!("{:.1}", floor_mloads_per_s.median),
            format!("{:.1}", family.dependent_ns.median),
            format!("{:.1}", family.floor_dependent_ns.median),
        ]);
    }
    let mut text = table.render();
    for updates in &report.fib.updates {
        text += &format!(
            "IPv{}: {:.2} M updates/s alone, {:.2} M/s beside a reader of {:.1} M lookups/s ({:.1} without updates)\n",
            updates.version,
            updates.alone_per_s / 1e6,
            updates.per_s / 1e6,
            updates.mlookups_per_s,
            updates.mlookups_per_s_before
        );
    }
    text
}

fn cases(cases: &[Case]) -> String {
    let stages: Vec<&'static str> =
        cases.first().map(|case| case.stages.iter().map(|cost| cost.stage).collect()).unwrap_or_default();
    let head = [("IP", RIGHT), ("BYTES", RIGHT), ("DESTINATIONS", RIGHT), ("MPPS", RIGHT), ("GB/S", RIGHT)];
    let columns: Vec<_> = head.into_iter().chain(stages.iter().map(|stage| (*stage, RIGHT))).collect();
    let mut table = Table::new(&columns);
    for case in cases {
        let mut cells = vec![
            case.version.to_string(),
            case.size.clone(),
            case.destinations.to_string(),
            format!("{:.2}", case.mpps.median),
            format!("{:.1}", case.wire_gbit_per_s),
        ];
        cells.extend(case.stages.iter().map(|cost| format!("{:.1}", cost.ns_per_packet)));
        table.row(cells);
    }
    table.render()
}

fn zero_loss(rows: &[ZeroLoss]) -> String {
    let mut table = Table::new(&[("BYTES", RIGHT), ("MPPS", RIGHT), ("GB/S", RIGHT), ("TRIAL MS", RIGHT)]);
    for row in rows {
        let rate = format!("{:.2}", row.mpps);
        table.row(vec![row.size.clone(), rate, format!("{:.1}", row.wire_gbit_per_s), row.trial_ms.to_string()]);
    }
    table.render()
}

fn ethernet_cases(results: &ethernet::Results) -> String {
    let columns = [("BY", LEFT), ("BYTES", RIGHT), ("MPPS", RIGHT), ("OFFERED", RIGHT), ("P50", RIGHT), ("P99", RIGHT)];
    let mut table = Table::new(&columns);
    for case in &results.cases {
        let by = match case.subject {
            ethernet::Subject::Kernel => "kernel",
            ethernet::Subject::KernelSteered => "kernel, steered",
            ethernet::Subject::Xdp => "AF_XDP",
            ethernet::Subject::PacketSocket => "AF_PACKET",
        };
        table.row(vec![
            by.to_owned(),
            case.size_bytes.to_string(),
            format!("{:.3}", case.mpps.median),
            format!("{:.3}", case.offered_mpps),
            format!("{:.1}", case.latency.p50_us),
            format!("{:.1}", case.latency.p99_us),
        ]);
    }
    table.render()
}

fn hops(report: &Report) -> String {
    let columns = [("BY", LEFT), ("BATCH", RIGHT), ("BYTES", RIGHT), ("P50", RIGHT), ("P99", RIGHT), ("P99.9", RIGHT)];
    let mut table = Table::new(&columns);
    for hop in &report.hops {
        table.row(vec![
            hop.interconnect.to_owned(),
            hop.batch.to_string(),
            hop.frame_bytes.to_string(),
            format!("{:.2}", hop.latency.p50_us),
            format!("{:.2}", hop.latency.p99_us),
            format!("{:.2}", hop.latency.p999_us),
        ]);
    }
    let mut text = table.render();
    for gain in &report.gains {
        text += &format!(
            "{}, {} B: {:.2} Mpps one a message, {:.2} in batches of {}: {:.1} x; adaptive {:.1} x\n",
            gain.interconnect,
            gain.frame_bytes,
            gain.single_mpps,
            gain.best_mpps,
            gain.best_batch,
            gain.gain,
            gain.gain_adaptive
        );
    }
    text
}

fn word(batching: Batching) -> String {
    match batching {
        Batching::Fixed(packets) => format!("fixed {packets}"),
        Batching::Adaptive => "adaptive".to_owned(),
    }
}

fn rates(rows: &[RateRow]) -> String {
    let columns =
        [("BY", LEFT), ("BYTES", RIGHT), ("BATCH", LEFT), ("NO LOSS", RIGHT), ("FLOOD", RIGHT), ("A MESSAGE", RIGHT)];
    let mut table = Table::new(&columns);
    for row in rows {
        table.row(vec![
            row.interconnect.to_owned(),
            row.frame_bytes.to_string(),
            word(row.batching),
            format!("{:.3}", row.zero_loss_mpps),
            format!("{:.3}", row.flood_mpps),
            format!("{:.1}", row.packets_per_message),
        ]);
    }
    table.render()
}

fn loads(rows: &[LoadRow]) -> String {
    let columns = [
        ("BY", LEFT),
        ("BYTES", RIGHT),
        ("MPPS", RIGHT),
        ("BATCH", LEFT),
        ("P50", RIGHT),
        ("P99", RIGHT),
        ("P99 ALL", RIGHT),
        ("ARRIVED", RIGHT),
        ("A MESSAGE", RIGHT),
    ];
    let mut table = Table::new(&columns);
    for row in rows {
        table.row(vec![
            row.interconnect.to_owned(),
            row.frame_bytes.to_string(),
            format!("{:.3}", row.load_mpps),
            word(row.batching),
            format!("{:.2}", row.p50_us),
            format!("{:.2}", row.p99_us),
            format!("{:.2}", row.p99_all_us),
            format!("{:.3}", row.delivered_mpps),
            format!("{:.1}", row.packets_per_message),
        ]);
    }
    table.render()
}

fn plots(report: &Report) -> Vec<(&'static str, Figure)> {
    let by_load = |frame_bytes: usize, title: &str| Figure {
        title: title.to_owned(),
        x: Axis::Linear("load (Mpps)"),
        y: Axis::Decades("p99 (µs)"),
        series: lines_by_load(report, frame_bytes),
    };
    let by_size = Figure {
        title: "One hop over the RDMA transport in lanes: p50".to_owned(),
        x: Axis::Bytes("frame"),
        y: Axis::Decades("one hop (µs)"),
        series: lines_by_size(report),
    };
    vec![
        ("router-p99-by-load-64.svg", by_load(64, "Latency by load, 64 B: p99 of each batch")),
        ("router-p99-by-load-1500.svg", by_load(1500, "Latency by load, 1500 B: p99 of each batch")),
        ("router-hop-by-size.svg", by_size),
    ]
}

/// A line for each policy, as far as it carries the load.
fn lines_by_load(report: &Report, frame_bytes: usize) -> Vec<Series> {
    let line = |(index, batching): (usize, Batching)| {
        let is_it = |row: &&LoadRow| row.frame_bytes == frame_bytes && row.batching == batching && row.is_carried();
        let points = report.loads.iter().filter(is_it).map(|row| (row.load_mpps, row.p99_us)).collect();
        Series { title: word(batching), style: Style::of_index(index), points }
    };
    Batching::all().enumerate().map(line).collect()
}

/// A line for each batch.
fn lines_by_size(report: &Report) -> Vec<Series> {
    let of_rnic = || report.hops.iter().filter(|hop| hop.interconnect == report::PUBLISHED_KIND);
    let mut batches: Vec<u8> = of_rnic().map(|hop| hop.batch).collect();
    batches.dedup();
    let line = |(index, batch): (usize, &u8)| {
        let points = of_rnic().filter(|hop| hop.batch == *batch);
        let points = points.map(|hop| (hop.frame_bytes as f64, hop.latency.p50_us)).collect();
        Series { title: format!("{batch} a message"), style: Style::of_index(index), points }
    };
    batches.iter().enumerate().map(line).collect()
}

fn published(cells: &[Cell]) -> String {
    let measured: Vec<&'static str> = cells
        .iter()
        .map(|cell| cell.measured.iter().map(|beside| beside.interconnect).collect::<Vec<_>>())
        .max_by_key(Vec::len)
        .unwrap_or_default();
    let head = [("BY", LEFT), ("BATCH", RIGHT), ("BYTES", RIGHT), ("PUBLISHED", RIGHT), ("MODELLED", RIGHT)];
    let columns: Vec<_> = head.into_iter().chain(measured.iter().map(|name| (*name, RIGHT))).collect();
    let mut table = Table::new(&columns);
    for cell in cells {
        let by = if cell.transport == Transport::Roce { "RoCE" } else { "Ethernet" };
        let mut row = vec![by.to_owned(), cell.batch.to_string(), cell.bytes.to_string()];
        row.push(format!("{:.1}", cell.published_us));
        row.push(format!("{:.2}", cell.modelled_us));
        row.extend(measured.iter().map(|name| {
            let found = cell.measured.iter().find(|beside| beside.interconnect == *name);
            found.map_or_else(|| "-".to_owned(), |beside| format!("{:.2}", beside.p50_us))
        }));
        table.row(row);
    }
    table.render()
}
