//! `crosslane bench router`: measures the forwarding core, the tables, and two nodes over each interconnect.

mod plots;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use crosslane_bench::Progress;
use machine::Machine;
use router_bench::core::{self, Case, Churn, ZeroLoss};
use router_bench::fib::{Family, Updates};
use router_bench::interconnect::{AdaptiveRate, AdaptiveRow, Batching, LoadRow, ModelledRow, RateRow, Ratio};
use router_bench::mlrsearch::GoalResult;
use router_bench::published::{Cell, Transport};
use router_bench::report::{self, Part, Parts, ProgressObserver, Report, UserTableReport};
use router_bench::search::Verdict;
use router_bench::table::{self, Format};
use router_bench::{ethernet, streams};
use router_node::interconnect::TransportKind;
use serde::Serialize;

use crate::output;
use crate::wrong_use::WrongUse;
use plots::Plots;
use stats::{Align, Table};

/// Options of `crosslane bench router`.
#[derive(clap::Args)]
pub struct Options {
    /// Shorter trials and fewer points: a minute or two
    #[arg(long)]
    pub quick: bool,
    /// Print JSON instead of tables
    #[arg(long)]
    pub json: bool,
    /// Measure only these parts: fib, core, churn, ethernet, streams, interconnect, latency, adaptive
    #[arg(long, value_name = "PART,...", value_delimiter = ',')]
    pub only: Vec<Part>,
    /// Between nodes, measure only this interconnect: lanes, windows, rnic_lanes or rnic_udp
    #[arg(long, value_name = "NAME", value_parser = report::kind)]
    pub interconnect: Option<TransportKind>,
    /// Between nodes, measure rates and latencies only for these frame sizes, 64 to 1500
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u16).range(64..=1500))]
    pub size: Vec<u16>,
    /// Measure latency only at these loads, in percent of the best rate of a fixed batch, 1 to 100
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u8).range(1..=100))]
    pub load: Vec<u8>,
    /// Write the plots as SVG files into this directory, each as soon as it is measured
    #[arg(long, value_name = "DIR")]
    pub plot: Option<PathBuf>,
    /// Seed of all random choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Also measure tables and core with the routes of this MRT dump (TABLE_DUMP_V2, uncompressed)
    #[arg(long, value_name = "FILE", conflicts_with = "prefixes")]
    pub mrt: Option<PathBuf>,
    /// Also measure tables and core with the routes of this list: one prefix a line, optionally followed by a next hop
    #[arg(long, value_name = "FILE")]
    pub prefixes: Option<PathBuf>,
}

impl Options {
    /// Returns what to measure, or an error if options contradict each other.
    fn measured(&self) -> Result<report::Options> {
        let parts = Parts::only(&self.only);
        let chosen = || self.only.iter().map(|part| part.name()).collect::<Vec<_>>().join(",");
        let is_by_load = |part| matches!(part, Part::Latency | Part::Adaptive);
        let choices = [
            ("--interconnect", self.interconnect.is_some(), parts.any(Part::is_between_nodes), "interconnect, "),
            ("--size", !self.size.is_empty(), parts.any(Part::is_between_nodes), "interconnect, "),
            ("--load", !self.load.is_empty(), parts.any(is_by_load), ""),
        ];
        for (option, is_given, is_used, more) in choices {
            if is_given && !is_used {
                bail!(WrongUse::of(format!(
                    "{option} applies to no part of --only {}; add {more}latency or adaptive",
                    chosen()
                )));
            }
        }
        let has_file = self.mrt.is_some() || self.prefixes.is_some();
        if has_file && !parts.any(|part| matches!(part, Part::Fib | Part::Core)) {
            bail!(WrongUse::of(format!("a file of routes applies to no part of --only {}; add fib or core", chosen())));
        }
        Ok(report::Options {
            parts,
            kind: self.interconnect,
            frame_bytes: self.size.iter().copied().map(usize::from).collect(),
            load_shares: self.load.iter().map(|percent| f64::from(*percent) / 100.0).collect(),
            ..report::Options::new(self.quick, self.seed)
        })
    }

    /// Reads the file with routes, if one is given, and returns its path and its routes.
    fn table(&self) -> Result<Option<(&Path, table::Table)>> {
        let (file, format) = match (&self.mrt, &self.prefixes) {
            (Some(file), _) => (file, Format::Mrt),
            (_, Some(file)) => (file, Format::Prefixes),
            (None, None) => return Ok(None),
        };
        let table = table::Table::read(file, format).map_err(WrongUse::of)?;
        Ok(Some((file, table)))
    }
}

/// The report, and the machine on which it was measured.
#[derive(Serialize)]
struct MachineReport {
    #[serde(flatten)]
    report: Report,
    machine: Machine,
}

/// Shows the progress of a run, and writes plots as soon as their data is complete.
struct RunFollower<'a> {
    progress: Progress,
    plots: Option<Plots<'a>>,
}

impl ProgressObserver for RunFollower<'_> {
    fn step_begins(&mut self, section: &str, what: &str) {
        self.progress.step(section, what);
    }

    fn report_grew(&mut self, report: &Report) {
        for path in self.plots.iter_mut().flat_map(|plots| plots.write(report)) {
            self.progress.say(&path.display().to_string());
        }
    }
}

/// Measures, prints the report and writes the plots.
pub fn main(options: &Options) -> Result<()> {
    let measured = options.measured()?;
    // Read before anything is measured, so that an invalid file is reported at once.
    let table = options.table()?;
    let table = table.as_ref().map(|(file, table)| (*file, table));
    let plots = options.plot.as_deref().map(Plots::into_directory).transpose()?;
    let progress = Progress::new(report::steps(&measured, table.map(|(_, table)| table)));
    let mut follower = RunFollower { progress, plots };
    let report = report::run(&measured, table, &mut follower);
    let RunFollower { progress, plots } = follower;
    drop(progress);
    let measurement = MachineReport { report: report?, machine: Machine::describe(None) };
    if let ([Part::Ethernet | Part::Streams], [missing]) = (&options.only[..], &measurement.report.missing[..]) {
        bail!("{missing}");
    }
    if options.json {
        output::print_json(&measurement)?
    } else {
        output::print(&render(&measurement))?
    }
    plots.map_or(Ok(()), Plots::finish)
}

const RIGHT: Align = Align::Right;
const LEFT: Align = Align::Left;

fn render(measurement: &MachineReport) -> String {
    let MachineReport { report, machine } = measurement;
    let mut text = format!("measured, seed {}; {}\n", report.seed, machine.description());
    text += &summary(report);
    if let Some(fib) = &report.fib {
        text += "\nTables: lookups of random covered addresses; loads at random offsets of as much memory; one core\n";
        text += &tables([Some(&fib.v4), Some(&fib.v6)], &fib.updates);
    }
    text += &report.core.as_ref().map(core).unwrap_or_default();
    text += &report.brought.iter().flatten().map(user_table).collect::<String>();
    text += &report.ethernet.iter().flatten().map(ethernet).collect::<String>();
    text += &report.streams.iter().flatten().map(streams).collect::<String>();
    report.missing.iter().for_each(|missing| text += &format!("missing: {missing}\n"));
    text += &between_nodes(report);
    report.remarks.iter().for_each(|remark| text += &format!("remark: {remark}\n"));
    if !report.published_latency.is_empty() {
        text += "\nPublished (KAIST, HiPINEB 2016), modelled (its 40 Gb/s cards) and measured here: one hop, us\n";
        text += &published(&report.published_latency);
        text += "\nThe same for Ethernet batches of 1500 B and for RoCE messages by length\n";
        text += &published(&report.published_batches);
    }
    text
}

/// Returns a line with the headline figures, or nothing if none of them was measured.
fn summary(report: &Report) -> String {
    let figures = [
        report.core_mpps_64b.map(|mpps| format!("forwarding core {mpps:.1} Mpps at 64 B")),
        report.fib_v4_mlookups_per_s.map(|rate| format!("{rate:.0} M lookups/s of IPv4")),
        report.rnic_batch_gain_64b.map(|gain| format!("batches carry {gain:.1} x single packets (rnic)")),
    ];
    let figures: Vec<String> = figures.into_iter().flatten().collect();
    if figures.is_empty() { String::new() } else { figures.join("; ") + "\n" }
}

fn core(core: &core::Results) -> String {
    let mut text = String::new();
    if !core.cases.is_empty() {
        text += "\nForwarding core, ports in memory: one core, full table; ns a packet by stage\n";
        text += &cases(&core.cases);
        text += "\nThroughput, the highest rate without loss (RFC 2544): raw, and without the time of machine stalls\n";
        text += &zero_loss(&core.zero_loss);
    }
    if !core.churn.is_empty() {
        text += "\nForwarding 64 B while another core changes routes\n";
        text += &churn(&core.churn);
    }
    text
}

fn churn(rows: &[Churn]) -> String {
    let mut table = Table::new(&[("CHANGES/S", RIGHT), ("MPPS", RIGHT), ("BEST", RIGHT)]);
    for row in rows {
        let Churn { changes_per_s, mpps } = row;
        table.row(vec![format!("{changes_per_s:.0}"), format!("{:.2}", mpps.median), format!("{:.2}", mpps.best)]);
    }
    table.render()
}

fn ethernet(results: &ethernet::Results) -> String {
    let mut text = String::new();
    text += "\nForwarding between virtual Ethernet ports, in alternating rounds: Mpps received, latency in us\n";
    text += &ethernet_cases(results);
    text += "\nThroughput between virtual Ethernet ports (RFC 2544): Mpps, raw and undisturbed\n";
    text += &ethernet_zero_loss(results);
    text += "\nNDR and PDR (loss of at most 0.5 %) by MLRsearch (RFC 9971), and the peak rate under overload: Mpps;\n\
             the rate that was forwarded at the lower bound, with the bounds in brackets\n";
    text += &ethernet_loss_ratios(results);
    text
}

fn streams(results: &streams::Results) -> String {
    let mut table = Table::new(&[
        ("", LEFT),
        ("1 stream", RIGHT),
        ("of kernel", RIGHT),
        ("4 streams", RIGHT),
        ("of kernel", RIGHT),
        ("echo us", RIGHT),
        ("of blocking", RIGHT),
    ]);
    for row in &results.rows {
        table.row(vec![
            row.subject.name().to_owned(),
            format!("{:.1}", row.one_stream_gbps),
            format!("{:.2}", row.one_stream_of_kernel),
            format!("{:.1}", row.four_streams_gbps),
            format!("{:.2}", row.four_streams_of_kernel),
            format!("{:.1}", row.echo_p50_us),
            format!("{:.2}", row.echo_of_blocking),
        ]);
    }
    let shared = results.processors;
    let title = "TCP through virtual Ethernet, in alternating rounds: Gb/s of payload, and echo requests";
    format!("\n{title}; {shared} processors for all\n{}", table.render())
}

fn between_nodes(report: &Report) -> String {
    let mut text = String::new();
    if !report.hops.is_empty() {
        text += "\nOne hop between two nodes, ((T4-T1)-(T3-T2))/2, us\n";
        text += &hops(report);
    }
    if !report.rates.is_empty() {
        text += "\nRates between two nodes, Mpps\n";
        text += &rates(&report.rates);
    }
    if !report.loads.is_empty() {
        text += "\nLatency by load, us; p99 of packets that no machine stall delayed, and of all packets\n";
        text += &loads(&report.loads);
    }
    if !report.adaptive.is_empty() {
        text += "\nAdaptive batches and the best fixed batch, us; ratio of p99 (95% interval in brackets);\n\
                 control: a fixed batch against itself, which shows the noise of the machine\n";
        text += &adaptive(&report.adaptive);
    }
    if !report.adaptive_rates.is_empty() {
        text += "\nTheir throughput, Mpps, and its ratio to the best fixed batch's (95% interval in brackets)\n";
        text += &adaptive_rates(&report.adaptive_rates);
    }
    if !report.adaptive_modelled.is_empty() {
        text += "\nThe same in virtual time (modelled): ratio of p99 to the best fixed batch's,\n\
                 by load as a share of the rate of full messages\n";
        text += &adaptive_modelled(&report.adaptive_modelled);
    }
    if !report.loads_by_size.is_empty() {
        text += "\nLatency by size at one load, us\n";
        text += &loads(&report.loads_by_size);
    }
    text
}

fn adaptive(rows: &[AdaptiveRow]) -> String {
    let columns = [("BYTES", RIGHT), ("MPPS", RIGHT), ("P50", RIGHT), ("P99", RIGHT), ("BEST FIXED", RIGHT)];
    let mut table = Table::new(&[&columns[..], &[("FIXED P99", RIGHT), ("RATIO", RIGHT), ("CONTROL", RIGHT)]].concat());
    for row in rows {
        table.row(vec![
            row.size_bytes.to_string(),
            format!("{:.3}", row.load_mpps),
            format!("{:.2}", row.p50_us),
            format!("{:.2}", row.p99_us),
            row.best_fixed_batch.to_string(),
            format!("{:.2}", row.best_fixed_p99_us),
            ratio(row.p99_ratio),
            row.control.map_or(String::new(), |control| ratio(control.p99_ratio)),
        ]);
    }
    table.render()
}

fn adaptive_rates(rows: &[AdaptiveRate]) -> String {
    let columns = [("BY", LEFT), ("BYTES", RIGHT), ("MPPS", RIGHT), ("BEST FIXED", RIGHT), ("FIXED MPPS", RIGHT)];
    let mut table = Table::new(&[&columns[..], &[("RATIO", RIGHT)]].concat());
    for row in rows {
        table.row(vec![
            row.interconnect.to_owned(),
            row.size_bytes.to_string(),
            format!("{:.3}", row.zero_loss_mpps),
            row.best_fixed_batch.to_string(),
            format!("{:.3}", row.best_fixed_zero_loss_mpps),
            ratio(row.ratio),
        ]);
    }
    table.render()
}

/// Returns a table with a row for each assumption, interconnect and size, and a column for each load.
fn adaptive_modelled(rows: &[ModelledRow]) -> String {
    let mut shares: Vec<f64> = rows.iter().map(|row| row.load_share).collect();
    shares.sort_by(f64::total_cmp);
    shares.dedup();
    let names = [("ASSUMED", LEFT), ("AS", LEFT), ("BYTES", RIGHT)].map(|(head, align)| (head.to_owned(), align));
    let loads = shares.iter().map(|share| (format!("{:.0}%", 100.0 * share), RIGHT));
    let mut table = Table::new(&names.into_iter().chain(loads).collect::<Vec<_>>());
    for of_line in rows.chunk_by(|one, other| line_of(one) == line_of(other)) {
        let (assumed, interconnect, bytes) = line_of(&of_line[0]);
        let at = |share: &f64| of_line.iter().find(|row| row.load_share == *share);
        let ratios =
            shares.iter().map(|share| at(share).map_or(String::new(), |row| multiple(row.row.p99_ratio.median)));
        let names = [assumed.to_owned(), interconnect.to_owned(), bytes.to_string()];
        table.row(names.into_iter().chain(ratios).collect());
    }
    table.render()
}

fn line_of(row: &ModelledRow) -> (&'static str, &'static str, usize) {
    (row.assumed, row.interconnect, row.row.size_bytes)
}

fn tables(families: [Option<&Family>; 2], updates: &[Updates]) -> String {
    let head =
        [("", LEFT), ("ROUTES", RIGHT), ("MIB", RIGHT), ("BUILD MS", RIGHT), ("M/S", RIGHT), ("LOADS M/S", RIGHT)];
    let mut table = Table::new(&[&head[..], &[("DEPENDENT NS", RIGHT), ("LOAD NS", RIGHT)]].concat());
    for (name, family) in ["IPv4", "IPv6"].into_iter().zip(families) {
        let Some(family) = family else { continue };
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
    for updates in updates {
        text += &format!(
            "IPv{}: {:.2} M updates/s alone, {:.2} M/s with a reader of {:.1} M lookups/s ({:.1} without updates)\n",
            updates.version,
            updates.alone_per_s / 1e6,
            updates.per_s / 1e6,
            updates.mlookups_per_s,
            updates.mlookups_per_s_before
        );
    }
    text
}

/// Returns the same tables for the routes of the file that the user gave.
fn user_table(report: &UserTableReport) -> String {
    let UserTableReport { file, next_hops, fib, core, .. } = report;
    let mut text = format!("\nThe same with the routes of {} ({next_hops} next hops)\n", file.display());
    if let Some(fib) = fib {
        text += &tables([fib.v4.as_ref(), fib.v6.as_ref()], &fib.updates);
    }
    if let Some(core) = core {
        text += &cases(&core.cases);
        text += &zero_loss(&core.zero_loss);
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
    let columns = [("IP", RIGHT), ("BYTES", RIGHT), ("RAW MPPS", RIGHT), ("GB/S", RIGHT), ("UNDISTURBED", RIGHT)];
    let stalls = [("STALLED", RIGHT), ("STALL US MAX", RIGHT), ("TRIAL MS", RIGHT)];
    let mut table = Table::new(&[&columns[..], &stalls].concat());
    for row in rows {
        table.row(vec![
            row.version.to_string(),
            row.size.clone(),
            format!("{:.2}", row.mpps),
            format!("{:.1}", row.wire_gbit_per_s),
            format!("{:.2}", row.mpps_undisturbed),
            format!("{:.1}%", 100.0 * row.stalled_share),
            format!("{:.0}", row.stall_us_max),
            row.trial_ms.to_string(),
        ]);
    }
    table.render()
}

fn ethernet_cases(results: &ethernet::Results) -> String {
    let columns = [("BY", LEFT), ("IP", RIGHT), ("BYTES", RIGHT), ("MPPS", RIGHT), ("OFFERED", RIGHT), ("P50", RIGHT)];
    let mut table = Table::new(&[&columns[..], &[("P99", RIGHT)]].concat());
    for case in &results.cases {
        table.row(vec![
            case.subject.name().to_owned(),
            case.version.to_string(),
            case.size_bytes.to_string(),
            format!("{:.3}", case.mpps.median),
            format!("{:.3}", case.offered_mpps),
            format!("{:.1}", case.latency.p50_us),
            format!("{:.1}", case.latency.p99_us),
        ]);
    }
    table.render()
}

fn ethernet_zero_loss(results: &ethernet::Results) -> String {
    let columns = [("BY", LEFT), ("IP", RIGHT), ("BYTES", RIGHT), ("RAW", RIGHT), ("UNDISTURBED", RIGHT)];
    let search = [("HIGHER RATE", LEFT), ("TRIALS", RIGHT), ("DISTURBED", RIGHT), ("TRIAL MS", RIGHT)];
    let mut table = Table::new(&[&columns[..], &search].concat());
    for row in &results.zero_loss {
        let more = match row.ended_by {
            Verdict::Behind => "cannot be sent",
            Verdict::Disturbed => "was always disturbed",
            Verdict::Lost | Verdict::Carried => "is lost",
        };
        table.row(vec![
            row.subject.name().to_owned(),
            row.version.to_string(),
            row.size.clone(),
            format!("{:.3}", row.mpps),
            format!("{:.3}", row.mpps_undisturbed),
            more.to_owned(),
            row.trials.to_string(),
            row.trials_disturbed.to_string(),
            row.trial_ms.to_string(),
        ]);
    }
    table.render()
}

fn ethernet_loss_ratios(results: &ethernet::Results) -> String {
    let columns = [("BY", LEFT), ("IP", RIGHT), ("BYTES", RIGHT), ("PEAK", RIGHT), ("NDR", RIGHT), ("PDR", RIGHT)];
    let mut table = Table::new(&[&columns[..], &[("TRIALS", RIGHT), ("TRIAL MS", RIGHT)]].concat());
    for row in &results.loss_ratios {
        table.row(vec![
            row.subject.name().to_owned(),
            row.version.to_string(),
            row.size.clone(),
            format!("{:.3}", row.peak_mpps),
            goal_result(&row.ndr),
            goal_result(&row.pdr),
            row.trials.to_string(),
            row.trial_ms.to_string(),
        ]);
    }
    table.render()
}

/// Returns the conditional throughput of a goal with its bounds in Mpps; a bound that was not found is `-`.
fn goal_result(result: &GoalResult) -> String {
    let mpps = |rate: Option<f64>| rate.map_or_else(|| "-".to_owned(), |rate| format!("{:.3}", rate / 1e6));
    let GoalResult { lower, upper, conditional_throughput, .. } = *result;
    format!("{} [{}, {}]", mpps(conditional_throughput), mpps(lower), mpps(upper))
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
            "{}, {} B: {:.2} Mpps with one packet a message, {:.2} in batches of {}: {:.1} x; adaptive {:.1} x\n",
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

/// Returns the name of a batching policy.
fn batching_name(batching: Batching) -> String {
    match batching {
        Batching::Fixed(packets) => format!("fixed {packets}"),
        Batching::Adaptive => "adaptive".to_owned(),
    }
}

/// Returns a ratio as text, or "-" if no round measured it.
fn multiple(ratio: f64) -> String {
    if ratio > 0.0 { format!("{ratio:.3} x") } else { "-".to_owned() }
}

/// Returns a ratio as text, with its 95% interval if there are enough rounds for one.
fn ratio(ratio: Ratio) -> String {
    let Ratio { median, interval: [low, high], rounds } = ratio;
    match rounds {
        0 => "-".to_owned(),
        1..Ratio::ROUNDS_MIN => format!("{median:.3} x"),
        _ => format!("{median:.3} x ({low:.2}-{high:.2})"),
    }
}

fn rates(rows: &[RateRow]) -> String {
    let columns =
        [("BY", LEFT), ("BYTES", RIGHT), ("BATCH", LEFT), ("NO LOSS", RIGHT), ("FLOOD", RIGHT), ("PER MESSAGE", RIGHT)];
    let mut table = Table::new(&columns);
    for row in rows {
        table.row(vec![
            row.interconnect.to_owned(),
            row.frame_bytes.to_string(),
            batching_name(row.batching),
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
        ("PER MESSAGE", RIGHT),
    ];
    let mut table = Table::new(&columns);
    for row in rows {
        table.row(vec![
            row.interconnect.to_owned(),
            row.frame_bytes.to_string(),
            format!("{:.3}", row.load_mpps),
            batching_name(row.batching),
            format!("{:.2}", row.p50_us),
            format!("{:.2}", row.p99_us),
            format!("{:.2}", row.p99_all_us),
            format!("{:.3}", row.delivered_mpps),
            format!("{:.1}", row.packets_per_message),
        ]);
    }
    table.render()
}

fn published(cells: &[Cell]) -> String {
    let measured: Vec<&'static str> = cells
        .iter()
        .map(|cell| cell.measured.iter().map(|result| result.interconnect).collect::<Vec<_>>())
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
            let found = cell.measured.iter().find(|result| result.interconnect == *name);
            found.map_or_else(|| "-".to_owned(), |result| format!("{:.2}", result.p50_us))
        }));
        table.row(row);
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_that_was_not_found_is_shown_as_missing() {
        let result = |upper, conditional_throughput| GoalResult {
            lower: conditional_throughput,
            upper,
            conditional_throughput,
            is_regular: false,
        };
        assert_eq!(goal_result(&result(Some(1.5e6), Some(1.25e6))), "1.250 [1.250, 1.500]");
        assert_eq!(goal_result(&result(None, Some(2e6))), "2.000 [2.000, -]");
        assert_eq!(goal_result(&result(Some(1e3), None)), "- [-, 0.001]");
    }
}
