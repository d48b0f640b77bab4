//! `crosslane bench windows`: measures two nodes on this machine, or simulates the proxy engine in virtual time, with
//! default costs or with costs measured on this machine.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use crosslane_bench::windows as live;
use proxy_sim::{Costs, Isolation, Scaling};
use serde::Serialize;
use sim::Span;
use stats::{Align, Table};

use crate::output;
use crate::wrong_use::WrongUse;

/// Options of `crosslane bench windows`.
#[derive(clap::Args)]
pub struct Options {
    /// Simulate in virtual time: modelled figures, the same for the same seed
    #[arg(long, conflicts_with_all = ["plot"])]
    pub sim: bool,
    /// Measure the cost of a frame and of a byte in the engine on this machine, and simulate with these costs
    #[arg(long, requires = "sim")]
    pub measure: bool,
    /// Write the plots as SVG files into this directory
    #[arg(long, value_name = "DIR")]
    pub plot: Option<PathBuf>,
    /// Exchange this number of 8-byte frames between two engines and print nothing: a workload for instruction counters
    #[arg(long, value_name = "FRAMES", hide = true)]
    pub work: Option<u64>,
    /// Seed of all random choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Message sizes of the scaling experiment: messages of 256 bytes fill the link, messages of 8 bytes do not
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_values_t = [8, 256])]
    pub message_bytes: Vec<usize>,
    /// Fewer points and shorter runs
    #[arg(long)]
    pub quick: bool,
    /// Print JSON instead of tables
    #[arg(long)]
    pub json: bool,
}

/// The report of the simulation.
#[derive(Serialize)]
struct Report {
    schema: &'static str,
    /// How the figures were obtained.
    provenance: &'static str,
    seed: u64,
    /// Whether `costs` were measured in this run or are the defaults.
    costs_provenance: &'static str,
    costs: Costs,
    link: LinkModel,
    scaling: Vec<Scaling>,
    isolation: Vec<Isolation>,
}

/// The simulated link.
#[derive(Serialize)]
struct LinkModel {
    name: &'static str,
    one_way_ns: u64,
    bytes_per_us: u64,
    packet_header_bytes: u64,
    packet_payload_bytes_max: u64,
}

const LINK_NAME: &str = "gen3x16 NTB";
const CORES: [usize; 6] = [1, 2, 4, 8, 16, 32];
const NODES: [usize; 5] = [2, 4, 8, 16, 32];
/// Maximum number of lanes of a simulated rack: each core has one to each other node, each in its own memory.
const LANES_MAX: usize = 8192;
const MESSAGE_BYTES_MAX: usize = 16 << 10;
/// Virtual time of the simulation that is reported next to live figures.
const MODELLED_NS: f64 = 1_000_000.0;
/// Size of the frames of `--work`.
const WORK_BYTES: usize = 8;

/// Measures or simulates, and prints the report.
pub fn main(options: &Options) -> Result<()> {
    if let Some(frames) = options.work {
        proxy_sim::work(WORK_BYTES, frames);
        return Ok(());
    }
    if let Some(bytes) = options.message_bytes.iter().find(|bytes| !(1..=MESSAGE_BYTES_MAX).contains(*bytes)) {
        return Err(WrongUse::of(format!("{bytes} bytes a message; try 1 to {MESSAGE_BYTES_MAX}")).into());
    }
    if !options.sim {
        let live = live::Options { json: options.json, quick: options.quick, plot: options.plot.clone() };
        return live::main(&live, modelled(options.seed));
    }
    let report = simulate(options);
    if options.json { output::print_json(&report) } else { output::print(&render(&report)) }
}

/// Returns the modelled figures that are reported next to the live ones.
fn modelled(seed: u64) -> live::Modelled {
    let costs = Costs::default();
    let Costs { turn_ns, send_ns, receive_ns, byte_ns, program_ns } = costs;
    let case = |row: Isolation| live::ModelledCase {
        case: row.case,
        rtt_ns_p50: row.rtt_ns_p50,
        rtt_ns_p99: row.rtt_ns_p99,
        p99_of_quiet: row.p99_of_quiet,
    };
    live::Modelled {
        assumptions: format!(
            "the engine in virtual time, seed {seed}, over {LINK_NAME}; poll iteration {turn_ns} ns, frame sent \
             {send_ns} ns, received {receive_ns} ns, byte {byte_ns} ns, from proxy to program and back {program_ns} ns"
        ),
        isolation: proxy_sim::isolation(Span::from_ns(MODELLED_NS), costs, seed).into_iter().map(case).collect(),
        work_arguments: ["bench", "windows", "--work"].map(str::to_owned).to_vec(),
    }
}

fn simulate(options: &Options) -> Report {
    let costs = if options.measure { measure() } else { Costs::default() };
    let span = Span::from_ns(if options.quick { 100_000.0 } else { 1_000_000.0 });
    let (cores, nodes) = if options.quick { (&CORES[..4], &NODES[..3]) } else { (&CORES[..], &NODES[..]) };
    let all = nodes.iter().flat_map(|&nodes| cores.iter().map(move |&cores| (nodes, cores)));
    let points: Vec<(usize, usize)> = all.filter(|(nodes, cores)| nodes * (nodes - 1) * cores <= LANES_MAX).collect();
    let scale = |bytes: &usize| proxy_sim::scaling(&points, *bytes, Span::from_ps(span.ps() / 2), costs, options.seed);
    let link = proxy_sim::LINK;
    Report {
        schema: "crosslane-bench-windows-1",
        provenance: "modelled",
        seed: options.seed,
        costs_provenance: if options.measure { "measured" } else { "default" },
        costs,
        link: LinkModel {
            name: LINK_NAME,
            one_way_ns: link.one_way_ns,
            bytes_per_us: link.bytes_per_us,
            packet_header_bytes: link.header_bytes,
            packet_payload_bytes_max: link.payload_bytes_max,
        },
        scaling: options.message_bytes.iter().flat_map(scale).collect(),
        isolation: proxy_sim::isolation(span, costs, options.seed),
    }
}

/// Measures the time of a short frame, and the additional time of a long frame for each byte. Sending and receiving
/// count alike, because both engines alternate on one thread.
fn measure() -> Costs {
    const FRAMES: u64 = 2_000_000;
    const LONG_BYTES: usize = 4096;
    let frame_ns = |message_bytes: usize, frames: u64| {
        proxy_sim::work(message_bytes, frames / 10);
        let begun = Instant::now();
        let done = proxy_sim::work(message_bytes, frames);
        begun.elapsed().as_nanos() as f64 / (done.frames_sent + done.frames_received) as f64
    };
    let (short_ns, long_ns) = (frame_ns(8, FRAMES), frame_ns(LONG_BYTES, FRAMES / 20));
    let byte_ns = ((long_ns - short_ns) / LONG_BYTES as f64).max(0.0);
    Costs { send_ns: short_ns, receive_ns: short_ns, byte_ns, ..Costs::default() }
}

fn render(report: &Report) -> String {
    let Costs { turn_ns, send_ns, receive_ns, byte_ns, program_ns } = report.costs;
    let LinkModel { name, one_way_ns, bytes_per_us, .. } = report.link;
    let gbytes_per_s = bytes_per_us as f64 / 1000.0;
    let mut text = format!(
        "modelled, seed {}: {name}, {one_way_ns} ns one way, {gbytes_per_s:.2} GB/s of packets\n\
         costs ({}): poll iteration {turn_ns:.0} ns, frame sent {send_ns:.0} ns, received {receive_ns:.0} ns, \
         byte {byte_ns:.3} ns, program {program_ns:.0} ns\n\n",
        report.seed, report.costs_provenance,
    );
    text.push_str(&scaling_table(&report.scaling));
    text.push_str("\nOF LINEAR falls where LINK is near 1: there the packets of the messages fill the link.\n\n");
    text.push_str(&isolation_table(&report.isolation));
    text
}

fn scaling_table(rows: &[Scaling]) -> String {
    let right = Align::Right;
    let columns = [
        ("NODES", right),
        ("CORES", right),
        ("BYTES", right),
        ("MSG/US", right),
        ("OF LINEAR", right),
        ("LINK", right),
    ];
    let mut table = Table::new(&columns);
    for row in rows {
        table.row(vec![
            row.nodes.to_string(),
            row.cores.to_string(),
            row.message_bytes.to_string(),
            format!("{:.2}", row.messages_per_us),
            format!("{:.2}", row.of_linear),
            format!("{:.2}", row.link_load),
        ]);
    }
    table.render()
}

fn isolation_table(rows: &[Isolation]) -> String {
    let right = Align::Right;
    let columns = [
        ("PING-PONG OF 8 B WITH", Align::Left),
        ("P50 NS", right),
        ("P99 NS", right),
        ("MAX NS", right),
        ("P99 X QUIET", right),
        ("BULK GB/S", right),
    ];
    let mut table = Table::new(&columns);
    for row in rows {
        table.row(vec![
            row.case.to_owned(),
            row.rtt_ns_p50.to_string(),
            row.rtt_ns_p99.to_string(),
            row.rtt_ns_max.to_string(),
            format!("{:.2}", row.p99_of_quiet),
            format!("{:.2}", row.bulk_gbytes_per_s),
        ]);
    }
    table.render()
}
