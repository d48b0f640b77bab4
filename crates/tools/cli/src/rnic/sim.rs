//! `crosslane rnic sim`: runs one experiment in the packet simulator.

mod plots;
mod rate;
mod spray;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, Subcommand, ValueEnum};
use netsim::experiments::{
    ExperimentError, FctExperiment, FctResult, LatencyExperiment, LatencyResult, Observers, QpOrder, StreamExperiment,
    StreamResult,
};
use netsim::network::PacketTap;
use netsim::pcap::PcapTap;
use netsim::scenario::Scenario;
use netsim::series::parse_interval;
use netsim::topology::{HostId, TopologyPreset};
use netsim::transport::{AckTimeout, TransportConfig};
use netsim::workload::SizeDistribution;
use rnic::nic::TransportPolicy;
use rnic::wire::Header;
use serde::Serialize;
use sim::Span;
use stats::{Align, Table};

use super::policy_argument;
use crate::output;
use crate::wrong_use::WrongUse;

/// Subcommands of `crosslane rnic sim`.
#[derive(Subcommand)]
pub enum Command {
    /// Goodput of many queue pairs that share a NIC
    Qps(Qps),
    /// Goodput over a lossy link
    Loss(Loss),
    /// Goodput of packets that are sprayed over several paths, compared with one path in order
    Spray(spray::Spray),
    /// Latency of one message, half of a round trip
    Latency(Latency),
    /// Messages a second by size, and what limits them
    Rate(rate::Rate),
    /// Flow completion times in a loaded network, as slowdown compared with an idle network
    Fct(Fct),
    /// Run a scenario file (docs/netsim.md)
    Run(Run),
}

/// Options of all experiments.
#[derive(Args)]
pub struct Common {
    /// Seed of all random choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Options of `crosslane rnic sim qps`.
#[derive(Args)]
pub struct Qps {
    /// Kind of the NIC
    #[arg(long, value_parser = policy_argument::parser(), default_value = "srnic")]
    nic: TransportPolicy,
    /// Number of queue pairs
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    qps: u32,
    /// Link rate in Gb/s
    #[arg(long, value_name = "GBPS", default_value_t = 100.0)]
    gbps: f64,
    /// Message size
    #[arg(long, value_name = "BYTES", default_value_t = 4096)]
    size: u32,
    /// Order in which queue pairs send
    #[arg(long, value_enum, default_value = "turn")]
    turns: OrderArgument,
    #[command(flatten)]
    common: Common,
}

/// Orders of queue pairs, with their names on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OrderArgument {
    /// Round-robin, each queue pair with one message in flight
    Turn,
    /// Chosen at random for each message
    Chance,
}

/// Options of `crosslane rnic sim loss`.
#[derive(Args)]
pub struct Loss {
    /// Transport policy: detection and recovery of losses
    #[arg(long, value_parser = policy_argument::parser(), default_value = "srnic")]
    transport: TransportPolicy,
    /// Share of packets lost in each direction
    #[arg(long, value_name = "SHARE", default_value_t = 0.01)]
    loss: f64,
    /// Link rate in Gb/s
    #[arg(long, value_name = "GBPS", default_value_t = 100.0)]
    gbps: f64,
    /// Number of sending queue pairs
    #[arg(long, value_name = "N", default_value_t = 1)]
    qps: u32,
    /// ACK timeout: auto (262 us; irn and srnic have timeouts of their own), off, or a time
    #[arg(long, value_name = "TIME", default_value = "auto")]
    ack_timeout: AckTimeout,
    #[command(flatten)]
    common: Common,
}

/// Options of `crosslane rnic sim latency`.
#[derive(Args)]
pub struct Latency {
    /// Kind of the NIC
    #[arg(long, value_parser = policy_argument::parser(), default_value = "srnic")]
    nic: TransportPolicy,
    /// Message size
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    size: u32,
    /// Link rate in Gb/s
    #[arg(long, value_name = "GBPS", default_value_t = 100.0)]
    gbps: f64,
    #[command(flatten)]
    common: Common,
}

/// Options of `crosslane rnic sim fct`.
#[derive(Args)]
pub struct Fct {
    /// Network: leaf-spine-256, three-tier-1024 or three-tier-4096
    #[arg(long, value_name = "NAME", default_value = "leaf-spine-256")]
    topology: TopologyPreset,
    /// Flow sizes: cache-follower, web-search, hadoop, storage-2019, storage-2022, or a file
    #[arg(long, value_name = "NAME", default_value = "cache-follower")]
    workload: String,
    /// Offered load as a share of the hosts' link rate; three-tier-4096 carries a quarter of it between leaves
    #[arg(long, value_name = "SHARE", default_value_t = 0.5)]
    load: f64,
    /// Transport policy: detection and recovery of losses
    #[arg(long, value_parser = policy_argument::parser(), default_value = "srnic")]
    transport: TransportPolicy,
    /// Time during which new flows start, in milliseconds of virtual time
    #[arg(long, value_name = "MS", default_value_t = 1.0)]
    duration_ms: f64,
    /// ACK timeout: auto (fits the network's longest queue; irn and srnic have timeouts of their own), off, or a time
    #[arg(long, value_name = "TIME", default_value = "auto")]
    ack_timeout: AckTimeout,
    #[command(flatten)]
    outputs: Outputs,
    #[command(flatten)]
    common: Common,
}

/// Options for files that a run writes.
#[derive(Args)]
pub struct Outputs {
    /// Write the packets that hosts send to this pcap file, as RoCEv2
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// Capture only packets from and to this host
    #[arg(long, value_name = "N", requires = "pcap")]
    pcap_host: Option<u32>,
    /// Write the result of each flow to this CSV file (docs/netsim.md)
    #[arg(long, value_name = "FILE")]
    flows: Option<PathBuf>,
    /// Write time series of queues, pauses, windows and rates to this CSV file (docs/netsim.md)
    #[arg(long, value_name = "FILE")]
    series: Option<PathBuf>,
    /// Time between samples of --series, at least 100 ns
    #[arg(long, value_name = "TIME", default_value = "10 us", value_parser = parse_interval, requires = "series")]
    series_interval: Span,
    /// Plot the slowdowns by flow size into this SVG file, and the completion times into FILE-fct.svg
    #[arg(long, value_name = "FILE.svg", value_parser = plots::parse_path)]
    plot: Option<PathBuf>,
}

fn create(path: &Path) -> Result<BufWriter<File>> {
    let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(BufWriter::new(file))
}

impl Outputs {
    /// Runs an experiment, and writes the files requested.
    fn run(&self, experiment: &FctExperiment) -> Result<FctResult> {
        let hosts = experiment.network.topology.hosts();
        if let Some(host) = self.pcap_host.filter(|host| *host >= hosts) {
            return Err(WrongUse::of(format!("--pcap-host {host}: take 0 to {}", hosts - 1)).into());
        }
        let mut flows = self.flows.as_deref().map(create).transpose()?;
        let mut series = self.series.as_deref().map(create).transpose()?;
        let mut observers = Observers {
            tap: None,
            flows: flows.as_mut().map(|flows| flows as &mut dyn Write),
            series: series.as_mut().map(|series| (self.series_interval, series as &mut dyn Write)),
        };
        let Some(path) = &self.pcap else { return experiment.run(observers).map_err(classified) };
        let (tap, fault) = PcapTap::new(create(path)?, self.pcap_host.map(HostId));
        observers.tap = tap.map(|tap| Box::new(tap) as Box<dyn PacketTap<Header>>);
        let result = experiment.run(observers).map_err(classified)?;
        match fault.get() {
            Some(fault) => Err(anyhow!("writing {}: {fault}", path.display())),
            None => Ok(result),
        }
    }
}

/// Options of `crosslane rnic sim run`.
#[derive(Args)]
pub struct Run {
    /// Scenario file
    file: PathBuf,
    #[command(flatten)]
    outputs: Outputs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the experiment and prints the result.
pub fn main(command: &Command) -> Result<()> {
    match command {
        Command::Qps(options) => qps(options),
        Command::Loss(options) => loss(options),
        Command::Spray(options) => spray::main(options),
        Command::Latency(options) => latency(options),
        Command::Rate(options) => rate::main(options),
        Command::Fct(options) => fct(options),
        Command::Run(options) => run(options),
    }
}

/// Classifies an error: invalid parameters are wrong use, a failed simulation is a failure.
pub fn classified(error: ExperimentError) -> anyhow::Error {
    match error {
        ExperimentError::Failed { .. } | ExperimentError::Output { .. } => error.into(),
        _ => WrongUse::of(error).into(),
    }
}

/// The parameters of an experiment and its result, as JSON.
#[derive(Serialize)]
struct Report<Parameters: Serialize, Result: Serialize> {
    #[serde(flatten)]
    parameters: Parameters,
    #[serde(flatten)]
    result: Result,
}

#[derive(Serialize)]
struct StreamParameters {
    transport: TransportPolicy,
    qps: u32,
    loss: f64,
    gbps: f64,
    mtu_bytes: u32,
    message_bytes: u32,
    turns: &'static str,
    seed: u64,
}

fn stream(experiment: StreamExperiment, json: bool) -> Result<()> {
    let result = experiment.run().map_err(classified)?;
    if json {
        let StreamExperiment { transport, qps, loss, gbps, message_bytes, seed, .. } = experiment;
        let (transport, mtu_bytes) = (transport.policy, transport.mtu_bytes);
        let turns = if experiment.qp_order == QpOrder::RoundRobin { "turn" } else { "chance" };
        let parameters = StreamParameters { transport, qps, loss, gbps, mtu_bytes, message_bytes, turns, seed };
        return output::print_json(&Report { parameters, result });
    }
    output::print(&stream_table(&result))
}

fn stream_table(result: &StreamResult) -> String {
    let mut table = Table::new(&[("WHAT", Align::Left), ("MODELLED", Align::Right)]);
    let percent = |share: f64| format!("{:.2} %", share * 100.0);
    for (what, value) in [
        ("goodput", format!("{:.2} Gb/s", result.goodput_gbps)),
        ("data packets retransmitted", percent(result.retransmitted_share)),
        ("data packets received twice", percent(result.spurious_share)),
        ("headers processed in software", percent(result.slow_path_share)),
        ("core utilisation of the slow path", percent(result.slow_path_core_share)),
        ("context cache misses", percent(result.context_miss_share)),
        ("packets parked for a context", percent(result.parked_share)),
        ("packets dropped, parking buffer full", result.parking_drops.to_string()),
        ("PCIe bandwidth of context reads", format!("{:.2} Gb/s", result.context_read_gbps)),
        ("PCIe bandwidth of context writes", format!("{:.2} Gb/s", result.context_write_gbps)),
        ("time-outs", result.timeouts.to_string()),
    ] {
        table.row(vec![what.to_owned(), value]);
    }
    table.render()
}

fn qps(options: &Qps) -> Result<()> {
    let Common { seed, json } = options.common;
    let experiment = StreamExperiment::by_qps(options.nic, options.qps, options.gbps, seed);
    let qp_order = match options.turns {
        OrderArgument::Turn => QpOrder::RoundRobin,
        OrderArgument::Chance => QpOrder::Random,
    };
    stream(StreamExperiment { message_bytes: options.size, qp_order, ..experiment }, json)
}

fn loss(options: &Loss) -> Result<()> {
    let Common { seed, json } = options.common;
    let experiment = StreamExperiment::by_loss(options.transport, options.loss, options.gbps, seed);
    let transport = TransportConfig { ack_timeout: options.ack_timeout, ..experiment.transport };
    stream(StreamExperiment { qps: options.qps, transport, ..experiment }, json)
}

#[derive(Serialize)]
struct LatencyParameters {
    nic: TransportPolicy,
    size_bytes: u32,
    gbps: f64,
    seed: u64,
}

fn latency(options: &Latency) -> Result<()> {
    let Common { seed, json } = options.common;
    let experiment = LatencyExperiment::new(options.nic, options.size, seed);
    let experiment = LatencyExperiment { gbps: options.gbps, ..experiment };
    let result = experiment.run().map_err(classified)?;
    if json {
        let LatencyExperiment { policy: nic, size_bytes, gbps, .. } = experiment;
        let parameters = LatencyParameters { nic, size_bytes, gbps, seed };
        return output::print_json(&Report { parameters, result });
    }
    let LatencyResult { p50_us, p99_us, p999_us, max_us, .. } = result;
    let mut table = Table::new(&[("HALF OF A ROUND TRIP", Align::Left), ("MODELLED us", Align::Right)]);
    for (what, us) in [("p50", p50_us), ("p99", p99_us), ("p99.9", p999_us), ("maximum", max_us)] {
        table.row(vec![what.to_owned(), format!("{us:.3}")]);
    }
    output::print(&table.render())
}

#[derive(Serialize)]
struct FctParameters {
    /// The scenario file, if the experiment comes from one.
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    topology: String,
    workload: String,
    load: Option<f64>,
    /// The offered load of the busiest links between switches as a share of their rate, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    busiest_load: Option<f64>,
    transport: TransportConfig,
    seed: u64,
}

/// A result, and the time and memory of the run on this machine.
#[derive(Serialize)]
struct TimedResult<'a> {
    #[serde(flatten)]
    result: &'a FctResult,
    /// How the next three figures were obtained.
    pace_provenance: &'static str,
    wall_s: f64,
    events_per_s: f64,
    /// Peak resident memory of the whole process.
    memory_peak_bytes: Option<u64>,
}

/// Returns the peak resident memory of this process (VmHWM, proc_pid_status(5)).
fn memory_peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

fn flows(parameters: &FctParameters, experiment: &FctExperiment, outputs: &Outputs, json: bool) -> Result<()> {
    // What cannot be written is refused before the run.
    outputs.plot.as_deref().map(create).transpose()?;
    let begun = Instant::now();
    let result = outputs.run(experiment)?;
    let wall_s = begun.elapsed().as_secs_f64();
    let events_per_s = result.events as f64 / wall_s;
    if json {
        let memory_peak_bytes = memory_peak_bytes();
        let pace_provenance = "measured";
        let timed = TimedResult { result: &result, pace_provenance, wall_s, events_per_s, memory_peak_bytes };
        output::print_json(&Report { parameters, result: timed })?;
    } else {
        output::print(&format!("{}\n{}", fct_summary(&result, wall_s), fct_table(&result)))?;
    }
    if let Some(path) = &outputs.plot {
        plots::write(path, &format!("{}, {}", parameters.topology, parameters.workload), &result)?;
    }
    all_finished(&result)
}

/// Returns an error if flows failed or did not finish, over which the slowdowns say nothing.
fn all_finished(result: &FctResult) -> Result<()> {
    let FctResult { flows, flows_ended, flows_failed, flows_unfinished, .. } = result;
    if flows_ended == flows {
        return Ok(());
    }
    // Without a timeout, what is lost at the end of a message is never sent again.
    let are_losses_final =
        result.ack_timeout_us.is_none() && result.network.dropped_packets + result.network.lost_packets > 0;
    let remedy = match (*flows_failed > 0, *flows_unfinished > 0) {
        (true, false) => "give a longer ack_timeout, or lose fewer packets",
        (true, true) => "give a longer ack_timeout and a later until",
        (false, true) if are_losses_final => "packets were lost, and nothing sends them again: give an ack_timeout",
        _ => "give a later until",
    };
    bail!(
        "{flows_failed} of {flows} flows failed and {flows_unfinished} did not finish, and slowdowns are those of the \
         {flows_ended} others; {remedy}"
    )
}

fn fct_summary(result: &FctResult, wall_s: f64) -> String {
    let FctResult { flows, flows_ended, flows_failed, flows_unfinished, hosts, simulated_us, .. } = result;
    let FctResult { network, endpoints, .. } = result;
    let ack_timeout = match (result.irn_timeouts_us, result.ack_timeout_us) {
        (Some([low, high]), _) => format!("{low:.0} and {high:.0} us"),
        (None, Some(us)) => format!("{us:.0} us"),
        (None, None) => "off".to_owned(),
    };
    format!(
        "{flows_ended} of {flows} flows of {hosts} hosts completed in {simulated_us:.0} us, {flows_failed} failed, \
         {flows_unfinished} did not finish, modelled; {} events in {wall_s:.2} s, measured: {:.2} M a second\n\
         ACK timeout {ack_timeout}; {} packets dropped, {} marked, {} retransmitted, {} of them \
         spuriously; longest queue {} B; {:.3} Gb/s a host\n",
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
        let (mean, p50, max) = (Some(slowdown.mean), Some(slowdown.p50), Some(slowdown.max));
        let cell = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"));
        cells.extend([mean, p50, slowdown.p95, slowdown.p99, max].map(cell));
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
        return Err(WrongUse::of(format!("--duration-ms {ms}: choose more than 0 and at most 10000")).into());
    }
    let sizes = SizeDistribution::find(&options.workload).map_err(WrongUse::of)?;
    let (policy, ack_timeout) = (options.transport, options.ack_timeout);
    let transport = TransportConfig { policy, ack_timeout, ..TransportConfig::default() };
    let busiest_load = options.topology.tiers().busiest_link_load(options.load);
    let parameters = FctParameters {
        file: None,
        topology: options.topology.name().to_owned(),
        workload: sizes.name.clone(),
        load: Some(options.load),
        busiest_load: Some(busiest_load),
        transport,
        seed,
    };
    let during = Span::from_ns(ms * 1e6);
    let experiment =
        FctExperiment::published(options.topology, sizes, options.load, transport, during, seed).map_err(classified)?;
    if busiest_load > 1.0 {
        let (load, sustained) = (options.load, options.load / busiest_load);
        eprintln!(
            "crosslane: --load {load} is {busiest_load:.2} times what {} carries between its switches, so queues grow \
             as long as new flows start; choose less than {sustained:.2} for stable queues",
            options.topology.name()
        );
    }
    flows(&parameters, &experiment, &options.outputs, json)
}

fn run(options: &Run) -> Result<()> {
    let scenario = Scenario::read(&options.file).map_err(WrongUse::of)?;
    let parameters = FctParameters {
        file: Some(options.file.display().to_string()),
        topology: scenario.topology_name.clone(),
        workload: scenario.workload.name().to_owned(),
        load: scenario.workload.load(),
        busiest_load: None,
        transport: scenario.transport,
        seed: scenario.seed,
    };
    flows(&parameters, &FctExperiment::from_scenario(&scenario), &options.outputs, options.json)
}
