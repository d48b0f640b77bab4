//! `crosslane status`: shows the state of the nodes of a rack on this machine.

use std::path::PathBuf;

use anyhow::{Result, bail};
use control::monitor::{Link, Status};
use etcd::{LeaseRecord, LeaseValue, LinkState};
use serde::Serialize;
use stats::{Align, Table};

use crate::rack_choice::LoadedRack;
use crate::{output, rack_control, stat};

/// Options of `crosslane status`.
#[derive(clap::Args)]
pub struct Options {
    /// The rack file, or its address in etcd: etcd://HOST:PORT/PREFIX
    #[arg(long, value_name = "FILE|ETCD")]
    rack: PathBuf,
    /// Print JSON (schema crosslane-status/1)
    #[arg(long)]
    json: bool,
}

/// Prints the state of all nodes. Fails if none of them runs.
pub fn main(options: &Options) -> Result<()> {
    let rack = LoadedRack::read_running(&options.rack)?;
    let report = Report::new(&rack)?;
    if options.json { output::print_json(&report) } else { output::print(&describe(&report)) }?;
    let is_elsewhere = |node: &NodeReport| node.lease.is_some();
    if !report.nodes.iter().any(|node| node.is_up || node.error.is_some() || is_elsewhere(node)) {
        let file = rack.shown();
        bail!("no node of {file} runs here; start it with: crosslane up --rack {file}");
    }
    Ok(())
}

/// The output of `crosslane status --json`.
#[derive(Serialize)]
struct Report {
    schema: &'static str,
    file: String,
    name: String,
    directory: PathBuf,
    backend: &'static str,
    trust: &'static str,
    device_socket: PathBuf,
    /// Whether etcd answers; `None` for a rack from a file.
    is_etcd_reached: Option<bool>,
    nodes: Vec<NodeReport>,
}

#[derive(Serialize)]
struct NodeReport {
    node: String,
    address: std::net::IpAddr,
    directory: PathBuf,
    is_up: bool,
    /// Why a monitor that runs does not report its state.
    error: Option<String>,
    monitor: Option<Status>,
    connections: Connections,
    /// The lease of the node in etcd, which names the machine and process that run it.
    lease: Option<LeaseReport>,
}

/// A lease in etcd.
#[derive(Serialize)]
struct LeaseReport {
    host: String,
    pid: u32,
    started_at_ns: u64,
    links: Vec<LinkState>,
    /// Why the holder is unknown.
    error: Option<String>,
}

impl LeaseReport {
    fn new(lease: &LeaseValue) -> Self {
        match lease.clone() {
            LeaseValue::Valid(held) => {
                let LeaseRecord { host, pid, started_at_ns, links, .. } = held;
                Self { host, pid, started_at_ns, links, error: None }
            }
            LeaseValue::Malformed(error) => {
                Self { host: String::new(), pid: 0, started_at_ns: 0, links: Vec::new(), error: Some(error) }
            }
        }
    }

    fn shown(&self) -> String {
        match &self.error {
            None => format!("{}:{}", self.host, self.pid),
            Some(error) => format!("unreadable: {error}"),
        }
    }
}

/// Open connections by path.
#[derive(Serialize, Default)]
struct Connections {
    lane: u64,
    window: u64,
    kernel: u64,
}

impl Report {
    fn new(rack: &LoadedRack) -> Result<Self> {
        let description = &rack.file.rack;
        Ok(Self {
            schema: "crosslane-status/1",
            file: rack.shown().to_string(),
            name: description.name.clone(),
            directory: rack.run_dir.directory.clone(),
            backend: description.device.backend.as_str(),
            trust: description.trust.as_str(),
            device_socket: rack.run_dir.device_socket(),
            is_etcd_reached: rack.etcd.as_ref().map(|etcd| etcd.found.is_some()),
            nodes: description.nodes.iter().map(|node| NodeReport::new(rack, node)).collect::<Result<_>>()?,
        })
    }
}

impl NodeReport {
    fn new(rack: &LoadedRack, node: &::rack::Node) -> Result<Self> {
        let node_dir = rack.run_dir.node(&node.name);
        let (monitor, error) = match rack_control::status(&node_dir) {
            Ok(status) => (status, None),
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        let mut connections = Connections::default();
        for process in &stat::read(std::slice::from_ref(&node_dir.directory))?.processes {
            connections.lane += process.lane.connections_open;
            connections.window += process.window.connections_open;
            connections.kernel += process.kernel.connections_open;
        }
        let found = rack.etcd.as_ref().and_then(|etcd| etcd.found.as_ref());
        let lease = found.and_then(|found| found.leases.get(&node.name)).map(LeaseReport::new);
        Ok(Self {
            node: node.name.clone(),
            address: node.address,
            directory: node_dir.directory,
            is_up: monitor.is_some(),
            error,
            monitor,
            connections,
            lease,
        })
    }
}

fn describe(report: &Report) -> String {
    let mut text = nodes(report).render();
    let links = links(report);
    if !links.is_empty() {
        text += &format!("\n{}", links.render());
    }
    let errors = report.nodes.iter().filter_map(|node| node.error.as_ref());
    errors.for_each(|error| text += &format!("\n{error}\n"));
    for status in report.nodes.iter().filter_map(|node| node.monitor.as_ref()) {
        let Some(etcd) = &status.etcd else { continue };
        if let Some(problem) = &etcd.problem {
            text += &format!("\nNode {}: {problem}\n", status.node);
        }
        if !etcd.restart_needed.is_empty() {
            let keys = etcd.restart_needed.join(", ");
            let node = &status.node;
            text += &format!("\nNode {node}: {keys}: changed in etcd; bring all nodes down and up to apply it.\n");
        }
    }
    let partitions = report.nodes.iter().filter_map(|node| node.monitor.as_ref()).map(partitions).next();
    text + &partitions.map_or_else(String::new, |line| format!("\n{line}\n"))
}

fn nodes(report: &Report) -> Table {
    let mut table = Table::new(&[
        ("NODE", Align::Left),
        ("ADDRESS", Align::Left),
        ("MONITOR", Align::Left),
        ("PROXY", Align::Left),
        ("RESTARTS", Align::Right),
        ("LISTENERS", Align::Right),
        ("REMOTE", Align::Right),
        ("WINDOWS", Align::Right),
        ("LANES", Align::Right),
        ("KERNEL", Align::Right),
        ("UP", Align::Right),
        ("LEASE", Align::Left),
    ]);
    for node in &report.nodes {
        let of = |value: fn(&Status) -> String| node.monitor.as_ref().map_or_else(|| "-".to_owned(), value);
        table.row(vec![
            node.node.clone(),
            node.address.to_string(),
            node.monitor.as_ref().map_or_else(|| "down".to_owned(), |status| status.pid.to_string()),
            of(proxy),
            of(|status| status.proxy_restarts.to_string()),
            of(|status| status.listeners.len().to_string()),
            of(|status| status.remote_listeners.len().to_string()),
            node.connections.window.to_string(),
            node.connections.lane.to_string(),
            node.connections.kernel.to_string(),
            of(|status| stat::age_since(status.started_at_ns)),
            lease(report, node),
        ]);
    }
    table
}

fn lease(report: &Report, node: &NodeReport) -> String {
    match (report.is_etcd_reached, &node.lease) {
        (None, _) => String::new(),
        (Some(false), _) => "?".to_owned(),
        (Some(true), None) => "-".to_owned(),
        (Some(true), Some(lease)) => lease.shown(),
    }
}

fn proxy(status: &Status) -> String {
    match status.proxy {
        Some(proxy) if proxy.is_ready => proxy.pid.to_string(),
        Some(proxy) => format!("{} (starting)", proxy.pid),
        None => "down".to_owned(),
    }
}

fn links(report: &Report) -> Table {
    let mut table = Table::new(&[
        ("NODE", Align::Left),
        ("PEER", Align::Left),
        ("LINK", Align::Left),
        ("EPOCH", Align::Right),
        ("UPS", Align::Right),
        ("ROUND TRIP", Align::Right),
        ("TIMING", Align::Left),
        ("CONNECTIONS", Align::Right),
        ("BY TCP", Align::Right),
        ("REASON", Align::Left),
    ]);
    for status in report.nodes.iter().filter_map(|node| node.monitor.as_ref()) {
        for link in &status.links {
            table.row(vec![
                status.node.clone(),
                link.peer.clone(),
                link.state.clone(),
                link.epoch.to_string(),
                link.ups.to_string(),
                round_trip(link),
                status.timing.clone().unwrap_or_else(|| "-".to_owned()),
                connections(link),
                link.carried.failover_open.to_string(),
                link.reason.clone().unwrap_or_default(),
            ]);
        }
    }
    table
}

fn connections(link: &Link) -> String {
    let (open, direct, held) = (link.carried.connections_open, link.carried.direct_open, link.carried.direct_held);
    match (direct, held) {
        (0, _) => open.to_string(),
        (_, 0) => format!("{open} ({direct} direct)"),
        _ => format!("{open} ({direct} direct, {held} waiting for the link)"),
    }
}

fn round_trip(link: &Link) -> String {
    link.round_trip_ns.map_or_else(|| "-".to_owned(), |ns| format!("{} us", ns / 1000))
}

fn partitions(status: &Status) -> String {
    let each = status.partitions.iter().enumerate().map(|(index, partition)| {
        let core = partition.core.map_or_else(String::new, |core| format!(" on core {core}"));
        format!("{} {}{core}", index + 1, partition.class)
    });
    format!("Partitions: 0 control, {}.", each.collect::<Vec<_>>().join(", "))
}
