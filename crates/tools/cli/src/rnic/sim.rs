//! `crosslane rnic sim`: one question to the packet simulator.

use std::fs::File;
use std::io::BufWriter;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use clap::{Args, Subcommand, ValueEnum};
use netsim::experiments::{
    ExperimentError, FctExperiment, FctResult, LatencyExperiment, LatencyResult, QpOrder, StreamExperiment,
    StreamResult,
};
use netsim::network::PacketTap;
use netsim::pcap::PcapTap;
use netsim::scenario::Scenario;
use netsim::topology::{HostId, TopologyPreset};
use netsim::transport::{CongestionAlgorithm, TransportConfig};
use netsim::workload::SizeDistribution;
use rnic::nic::TransportPolicy;
use rnic::wire::Header;
use serde::Serialize;
use sim::Span;
use stats::{Align, Table};

use super::policy_argument;
use crate::output;
use crate::wrong_use::WrongUse;

/// What is asked.
#[derive(Subcommand)]
pub enum Command {
    /// Goodput of many queue pairs that take turns packet by packet
    Qps(Qps),
    /// Goodput over a line that loses packets
    Loss(Loss),
    /// Half of a round trip of one message
    Latency(Latency),
    /// How much longer flows take in a network full of others than alone
    Fct(Fct),
    /// A simulation from a file: docs/netsim.md
    Run(Run),
}

/// What all questions have.
#[derive(Args)]
pub struct Common {
    /// Decides everything that is random
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Which queue pairs.
#[derive(Args)]
pub struct Qps {
    /// Which kind of NIC
    #[arg(long, value_parser = policy_argument::parser(), default_value = "srnic")]
    nic: TransportPolicy,
    /// How many queue pairs
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    qps: u32,
    /// The line's rate
    #[arg(long, value_name = "GBPS", default_value_t = 100.0)]
    gbps: f64,
    /// Bytes of each message
    #[arg(long, value_name = "BYTES", default_value_t = 4096)]
    size: u32,
    /// Which queue pair sends next
    #[arg(long, value_enum, default_value = "turn")]
    turns: TurnsKind,
    #[command(flatten)]
    common: Common,
}

/// Orders of queue pairs by their names on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TurnsKind {
    /// One after the other, each with a message under way at any time
    Turn,
    /// Drawn by chance for each message
    Chance,
}

/// Which loss.
#[derive(Args)]
pub struct Loss {
    /// Detection and recovery of losses
    #[arg(long, value_parser = policy_argument::parser(), default_value = "srnic")]
    transport: TransportPolicy,
    /// The share of packets lost, each way
    #[arg(long, value_name = "SHARE", default_value_t = 0.01)]
    loss: f64,
    /// The line's rate
    #[arg(long, value_name = "GBPS", default_value_t = 100.0)]
    gbps: f64,
    /// Queue pairs that send
    #[arg(long, value_name = "N", default_value_t = 1)]
    qps: u32,
    #[command(flatten)]
    common: Common,
}

/// Which messages.
#[derive(Args)]
pub struct Latency {
    /// Which kind of NIC
    #[arg(long, value_parser = policy_argument::parser(), default_value = "srnic")]
    nic: TransportPolicy,
    /// Bytes of a message
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    size: u32,
    /// The line's rate
    #[arg(long, value_name = "GBPS", default_value_t = 100.0)]
    gbps: f64,
    #[command(flatten)]
    common: Common,
}

/// Which flows, where.
#[derive(Args)]
pub struct Fct {
    /// leaf-spine-256, three-tier-1024 or three-tier-4096
    #[arg(long, value_name = "NAME", default_value = "leaf-spine-256")]
    topology: TopologyPreset,
    /// Sizes of flows: cache-follower, web-search, hadoop, storage-2019, storage-2022, or a file
    #[arg(long, value_name = "NAME", default_value = "cache-follower")]
    workload: String,
    /// The share of hosts' rate that flows need; three-tier-4096 carries a quarter of it between leaves
    #[arg(long, value_name = "SHARE", default_value_t = 0.5)]
    load: f64,
    /// Detection and recovery of losses
    #[arg(long, value_parser = policy_argument::parser(), default_value = "srnic")]
    transport: TransportPolicy,
    /// How long flows begin, in milliseconds of virtual time
    #[arg(long, value_name = "MS", default_value_t = 1.0)]
    duration_ms: f64,
    #[command(flatten)]
    capture: Capture,
    #[command(flatten)]
    common: Common,
}

/// Packets for Wireshark.
#[derive(Args)]
pub struct Capture {
    /// Write the packets that hosts send to this file, as RoCEv2
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// Only what this host sends and gets
    #[arg(long, value_name = "N", requires = "pcap")]
    pcap_host: Option<u32>,
}

impl Capture {
    /// Runs a plan, with a tap where one is asked for.
    fn run(&self, plan: &FctExperiment) -> Result<FctResult> {
        let Some(path) = &self.pcap else { return plan.run(None).map_err(judged) };
        let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        let (tap, fault) = PcapTap::new(BufWriter::new(file), self.pcap_host.map(HostId));
        let result = plan.run(tap.map(|tap| Box::new(tap) as Box<dyn PacketTap<Header>>)).map_err(judged)?;
        match fault.get() {
            Some(fault) => Err(anyhow!("writing {}: {fault}", path.display())),
            None => Ok(result),
        }
    }
}

/// Which file.
#[derive(Args)]
pub struct Run {
    /// What to simulate
    file: PathBuf,
    #[command(flatten)]
    capture: Capture,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Asks and prints.
pub fn main(command: &Command) -> Result<()> {
    match command {
        Command::Qps(options) => qps(options),
        Command::Loss(options) => loss(options),
        Command::Latency(options) => latency(options),
        Command::Fct(options) => fct(options),
        Command::Run(options) => run(options),
    }
}

/// Questions without sense are the command line's fault; requests that fail are not.
pub fn judged(error: ExperimentError) -> anyhow::Error {
    match error {
        ExperimentError::Failed { .. } => error.into(),
        _ => WrongUse::of(error).into(),
    }
}

/// A question and its answer, as JSON.
#[derive(Serialize)]
struct Answer<Question: Serialize, Result: Serialize> {
    #[serde(flatten)]
    question: Question,
    #[serde(flatten)]
    result: Result,
}

#[derive(Serialize)]
struct StreamQuestion {
    transport: TransportPolicy,
    qps: u32,
    loss: f64,
    gbps: f64,
    mtu_bytes: u32,
    message_bytes: u32,
    turns: &'static str,
    seed: u64,
}

fn stream(plan: StreamExperiment, json: bool) -> Result<()> {
    let result = plan.run().map_err(judged)?;
    if json {
        let StreamExperiment { transport, qps, loss, gbps, message_bytes, seed, .. } = plan;
        let (transport, mtu_bytes) = (transport.policy, transport.mtu_bytes);
        let turns = if plan.qp_order == QpOrder::RoundRobin { "turn" } else { "chance" };
        let question = StreamQuestion { transport, qps, loss, gbps, mtu_bytes, message_bytes, turns, seed };
        return output::print_json(&Answer { question, result });
    }
    output::print(&stream_table(&result))
}

fn stream_table(result: &StreamResult) -> String {
    let mut table = Table::new(&[("WHAT", Align::Left), ("MODELLED", Align::Right)]);
    let percent = |share: f64| format!("{:.2} %", share * 100.0);
    for (what, value) in [
        ("goodput", format!("{:.2} Gb/s", result.goodput_gbps)),
        ("data packets sent again", percent(result.retransmitted_share)),
        ("data packets that came twice", percent(result.spurious_share)),
        ("headers that went to software", percent(result.slow_path_share)),
        ("a core's time in the slow path", percent(result.slow_path_core_share)),
        ("contexts that were not on chip", percent(result.context_miss_share)),
        ("packets that waited for a context", percent(result.parked_share)),
        ("packets dropped, for too many waited", result.parking_drops.to_string()),
        ("PCIe for contexts that came", format!("{:.2} Gb/s", result.context_read_gbps)),
        ("PCIe for contexts written back", format!("{:.2} Gb/s", result.context_write_gbps)),
        ("time-outs", result.timeouts.to_string()),
    ] {
        table.row(vec![what.to_owned(), value]);
    }
    table.render()
}

fn qps(options: &Qps) -> Result<()> {
    let Common { seed, json } = options.common;
    let plan = StreamExperiment::by_qps(options.nic, options.qps, options.gbps, seed);
    let qp_order = match options.turns {
        TurnsKind::Turn => QpOrder::RoundRobin,
        TurnsKind::Chance => QpOrder::Random,
    };
    stream(StreamExperiment { message_bytes: options.size, qp_order, ..plan }, json)
}

fn loss(options: &Loss) -> Result<()> {
    let Common { seed, json } = options.common;
    let plan = StreamExperiment::by_loss(options.transport, options.loss, options.gbps, seed);
    stream(StreamExperiment { qps: options.qps, ..plan }, json)
}

#[derive(Serialize)]
struct LatencyQuestion {
    nic: TransportPolicy,
    size_bytes: u32,
    gbps: f64,
    seed: u64,
}

fn latency(options: &Latency) -> Result<()> {
    let Common { seed, json } = options.common;
    let plan = LatencyExperiment { gbps: options.gbps, ..LatencyExperiment::new(options.nic, options.size, seed) };
    let result = plan.run().map_err(judged)?;
    if json {
        let question = LatencyQuestion { nic: plan.policy, size_bytes: plan.size_bytes, gbps: plan.gbps, seed };
        return output::print_json(&Answer { question, result });
    }
    let LatencyResult { p50_us, p99_us, p999_us, max_us, .. } = result;
    let mut table = Table::new(&[("HALF OF A ROUND TRIP", Align::Left), ("MODELLED us", Align::Right)]);
    for (what, us) in [("p50", p50_us), ("p99", p99_us), ("p99.9", p999_us), ("maximum", max_us)] {
        table.row(vec![what.to_owned(), format!("{us:.3}")]);
    }
    output::print(&table.render())
}

#[derive(Serialize)]
struct FctQuestion {
    /// Of a simulation from a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    topology: String,
    workload: String,
    load: Option<f64>,
    /// What the busiest lines between switches are to carry of what they can, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    busiest_load: Option<f64>,
    transport: TransportConfig,
    seed: u64,
}

/// What the run took on this machine.
#[derive(Serialize)]
struct Pace<'a> {
    #[serde(flatten)]
    result: &'a FctResult,
    /// Of the next three.
    pace_provenance: &'static str,
    wall_s: f64,
    events_per_s: f64,
    /// Of the whole process, as the system counts it.
    memory_peak_bytes: Option<u64>,
}

/// The most memory that this process had, as the system counts it.
fn memory_peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

fn flows(question: &FctQuestion, plan: &FctExperiment, capture: &Capture, json: bool) -> Result<()> {
    let begun = Instant::now();
    let result = capture.run(plan)?;
    let wall_s = begun.elapsed().as_secs_f64();
    let events_per_s = result.events as f64 / wall_s;
    if json {
        let memory_peak_bytes = memory_peak_bytes();
        let pace = Pace { result: &result, pace_provenance: "measured", wall_s, events_per_s, memory_peak_bytes };
        return output::print_json(&Answer { question, result: pace });
    }
    output::print(&format!("{}\n{}", fct_summary(&result, wall_s), fct_table(&result)))
}

fn fct_summary(result: &FctResult, wall_s: f64) -> String {
    let FctResult { flows, flows_ended, hosts, simulated_us, network, endpoints, .. } = result;
    format!(
        "{flows_ended} of {flows} flows of {hosts} hosts in {simulated_us:.0} us, modelled; {} events in \
         {wall_s:.1} s, measured: {:.2} M a second\n{} packets dropped, {} marked, {} sent again, {} of them in vain; \
         fullest queue {} B; {:.1} Gb/s a host\n",
        result.events,
        result.events as f64 / wall_s / 1e6,
        network.dropped_packets + network.lost_packets,
        network.marked_packets,
        endpoints.retransmitted_packets,
        endpoints.spurious_packets,
        network.queue_max_bytes,
        result.goodput_gbps_per_host,
    )
}

fn fct_table(result: &FctResult) -> String {
    let numbers = ["FLOWS", "MEAN", "p50", "p95", "p99", "MAX"];
    let mut heads = vec![("UP TO BYTES", Align::Right)];
    heads.extend(numbers.map(|head| (head, Align::Right)));
    let mut table = Table::new(&heads);
    let mut row = |size: String, flows: usize, slowdown: &netsim::results::SummaryStats| {
        let mut cells = vec![size, flows.to_string()];
        let values = [slowdown.mean, slowdown.p50, slowdown.p95, slowdown.p99, slowdown.max];
        cells.extend(values.iter().map(|value| format!("{value:.2}")));
        table.row(cells);
    };
    result.bins.iter().for_each(|bin| row(bin.bytes_max.to_string(), bin.flows, &bin.slowdown));
    row("all".to_owned(), result.flows_ended, &result.slowdown);
    table.render()
}

fn fct(options: &Fct) -> Result<()> {
    let Common { seed, json } = options.common;
    let ms = options.duration_ms;
    if !(ms > 0.0 && ms <= 10_000.0) {
        return Err(WrongUse::of(format!("a duration of {ms} ms; take more than 0 and at most 10000")).into());
    }
    let sizes = SizeDistribution::find(&options.workload).map_err(WrongUse::of)?;
    let transport =
        TransportConfig { policy: options.transport, mtu_bytes: 1000, congestion: CongestionAlgorithm::Dctcp };
    let busiest_load = options.topology.tiers().busiest_link_load(options.load);
    let question = FctQuestion {
        file: None,
        topology: options.topology.name().to_owned(),
        workload: sizes.name.clone(),
        load: Some(options.load),
        busiest_load: Some(busiest_load),
        transport,
        seed,
    };
    let during = Span::from_ns(ms * 1e6);
    let plan =
        FctExperiment::published(options.topology, sizes, options.load, transport, during, seed).map_err(judged)?;
    if busiest_load > 1.0 {
        let (load, sustained) = (options.load, options.load / busiest_load);
        eprintln!(
            "crosslane: --load {load} is {busiest_load:.2} times what {} carries between its switches, so queues grow \
             for as long as flows begin; take less than {sustained:.2} for a network that keeps up",
            options.topology.name()
        );
    }
    flows(&question, &plan, &options.capture, json)
}

fn run(options: &Run) -> Result<()> {
    let scenario = Scenario::read(&options.file).map_err(WrongUse::of)?;
    let question = FctQuestion {
        file: Some(options.file.display().to_string()),
        topology: scenario.topology_name.clone(),
        workload: scenario.workload.name().to_owned(),
        load: scenario.workload.load(),
        busiest_load: None,
        transport: scenario.transport,
        seed: scenario.seed,
    };
    flows(&question, &FctExperiment::from_scenario(&scenario), &options.capture, options.json)
}
