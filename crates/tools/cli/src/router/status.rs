//! `crosslane router status`: shows the state of the nodes of a cluster on this machine.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Result, bail};
use router_node::management::{PeerStatus, PortStatus, RoutesStatus, StaleRoutesStatus, Status};
use serde::Serialize;
use stats::{Align, Table};

use super::loaded::LoadedCluster;
use super::request::status;
use crate::output;

/// Options of `crosslane router status`.
#[derive(clap::Args)]
pub struct Options {
    /// The cluster file
    #[arg(long, value_name = "FILE")]
    cluster: PathBuf,
    /// This node only
    #[arg(long, value_name = "NODE")]
    node: Option<String>,
    /// Print JSON (schema crosslane-router-status/1)
    #[arg(long)]
    json: bool,
}

/// The output of `crosslane router status --json`.
#[derive(Serialize)]
struct Report {
    schema: &'static str,
    file: String,
    name: String,
    directory: PathBuf,
    nodes: Vec<NodeReport>,
}

#[derive(Serialize)]
struct NodeReport {
    node: String,
    log: PathBuf,
    is_up: bool,
    /// Why a node that runs does not report its state.
    error: Option<String>,
    status: Option<Status>,
}

/// Prints the state of the nodes. Fails if a node that should run on this machine is not up.
pub fn main(options: &Options) -> Result<()> {
    let cluster = LoadedCluster::read(&options.cluster)?;
    let nodes = cluster.select(options.node.as_deref())?;
    let report = Report {
        schema: "crosslane-router-status/1",
        file: cluster.file.shown().to_owned(),
        name: cluster.file.cluster.name.clone(),
        directory: cluster.paths.directory.clone(),
        nodes: nodes.iter().map(|index| node_report(&cluster, *index)).collect(),
    };
    if options.json {
        output::print_json(&report)?
    } else {
        output::print(&describe(&report))?
    }
    // Nodes of other machines need not be up here, except the one named with --node.
    let wanted = if options.node.is_some() { nodes } else { cluster.local() };
    match not_up(&report, &wanted.iter().map(|index| cluster.name(*index)).collect::<Vec<_>>()) {
        None => Ok(()),
        Some(fault) => bail!(fault),
    }
}

/// Returns the error for wanted nodes that are not up: scripts rely on the exit code.
fn not_up(report: &Report, wanted: &[&str]) -> Option<String> {
    let is_missing = |node: &&NodeReport| !node.is_up && wanted.contains(&node.node.as_str());
    let missing: Vec<String> = report.nodes.iter().filter(is_missing).map(|node| format!("'{}'", node.node)).collect();
    let (which, are) = match missing.len() {
        0 => return None,
        1 => ("node", "is"),
        _ => ("nodes", "are"),
    };
    let (names, file) = (missing.join(", "), &report.file);
    Some(format!(
        "{which} {names} of {file} {are} not up; start what is down with 'crosslane router up --cluster {file}'"
    ))
}

fn node_report(cluster: &LoadedCluster, index: usize) -> NodeReport {
    let node = cluster.name(index).to_owned();
    let paths = cluster.paths.node(&node);
    let (status, error) = match status(&paths) {
        Ok(status) => (status, None),
        Err(error) => (None, Some(format!("{error:#}"))),
    };
    NodeReport { node, log: paths.log(), is_up: status.is_some(), error, status }
}

fn describe(report: &Report) -> String {
    let mut text = nodes_table(report);
    for status in report.nodes.iter().filter_map(|node| node.status.as_ref()) {
        text += &format!("\nnode {}\n", status.node);
        text += &ports_table(&status.ports);
        text += "\n";
        text += &peers_table(&status.peers);
        let fallbacks = status.ports.iter().filter_map(|port| Some((port, port.fallback.as_ref()?)));
        for (port, reason) in fallbacks {
            text += &format!("port {} by {}: {reason}\n", port.device, port.kind);
        }
        mtu_cuts(status).for_each(|line| text += &format!("{line}\n"));
        status.filters.line().into_iter().for_each(|line| text += &format!("{line}\n"));
        text += &unused_addresses(&status.ports);
        text += &stale_routes(&status.stale_routes);
        text += &routes_not_used(&status.routes);
        text += &routes_unknown_to_kernel(&status.routes, &status.filters.path);
        text += &drops(status);
    }
    text
}

/// Returns a line for each port whose MTU is below that of the cluster file.
pub fn mtu_cuts(status: &Status) -> impl Iterator<Item = String> {
    status.ports.iter().filter_map(|port| Some(format!("port {}: {}", port.device, port.mtu_cut.as_ref()?)))
}

fn nodes_table(report: &Report) -> String {
    let (left, right) = (Align::Left, Align::Right);
    let columns = [
        ("NODE", left),
        ("STATE", left),
        ("PID", right),
        ("PORTS UP", right),
        ("NODES UP", right),
        ("ROUTES V4", right),
        ("ROUTES V6", right),
        ("BUFFERS FREE", right),
    ];
    let mut table = Table::new(&columns);
    for node in &report.nodes {
        let Some(status) = &node.status else {
            let state = node.error.clone().unwrap_or_else(|| "down".to_owned());
            let mut cells = vec![node.node.clone(), state];
            cells.resize(columns.len(), "-".to_owned());
            table.row(cells);
            continue;
        };
        let ports_up = status.ports.iter().filter(|port| port.is_up).count();
        let peers_up = status.peers.iter().filter(|peer| peer.state == "up").count();
        table.row(vec![
            node.node.clone(),
            "up".to_owned(),
            status.pid.to_string(),
            format!("{ports_up}/{}", status.ports.len()),
            format!("{peers_up}/{}", status.peers.len()),
            status.routes.v4.to_string(),
            status.routes.v6.to_string(),
            format!("{}/{}", status.buffers_free, status.buffers),
        ]);
    }
    table.render()
}

fn ports_table(ports: &[PortStatus]) -> String {
    let (left, right) = (Align::Left, Align::Right);
    let mut table = Table::new(&[
        ("PORT", left),
        ("BY", left),
        ("STATE", left),
        ("MTU", right),
        ("IN PACKETS", right),
        ("OUT PACKETS", right),
        ("DROPPED", right),
        ("ADDRESSES", left),
    ]);
    for port in ports {
        let addresses: Vec<String> = port.addresses.iter().map(ToString::to_string).collect();
        table.row(vec![
            port.device.clone(),
            port.kind.clone(),
            if port.is_up { "up" } else { "down" }.to_owned(),
            port.mtu_bytes.to_string(),
            port.traffic.received_packets.to_string(),
            port.traffic.sent_packets.to_string(),
            port.drops.values().sum::<u64>().to_string(),
            addresses.join(" "),
        ]);
    }
    table.render()
}

fn peers_table(peers: &[PeerStatus]) -> String {
    let (left, right) = (Align::Left, Align::Right);
    let mut table = Table::new(&[
        ("TO NODE", left),
        ("STATE", left),
        ("ROUTES", right),
        ("OUT PACKETS", right),
        ("OUT MESSAGES", right),
        ("IN PACKETS", right),
        ("DROPPED", right),
        ("REASON", left),
    ]);
    for peer in peers {
        table.row(vec![
            peer.node.clone(),
            peer.state.clone(),
            peer.routes.to_string(),
            peer.traffic.sent_packets.to_string(),
            peer.traffic.sent_messages.to_string(),
            peer.traffic.received_packets.to_string(),
            peer.traffic.dropped_packets.to_string(),
            peer.reason.clone().unwrap_or_default(),
        ]);
    }
    table.render()
}

/// Returns a line for each address of a port that is not used, with the reason.
fn unused_addresses(ports: &[PortStatus]) -> String {
    let mut text = String::new();
    for port in ports {
        let tentative = port.addresses_tentative.iter().map(|address| (address, "is not used yet: it is tentative"));
        let duplicate = port.addresses_duplicate.iter().map(|address| (address, "is not used: another host has it"));
        for (address, why) in tentative.chain(duplicate) {
            text += &format!("port {}: address {address} {why}\n", port.device);
        }
    }
    text
}

/// Returns a line for each routing daemon whose routes are kept as stale.
fn stale_routes(stale: &[StaleRoutesStatus]) -> String {
    let line = |StaleRoutesStatus { protocol, routes, left_ms }: &StaleRoutesStatus| {
        let left_s = left_ms.div_ceil(1000);
        format!(
            "{routes} stale routes of protocol {protocol}, which the kernel does not have any more, are kept for \
             {left_s} s\n"
        )
    };
    stale.iter().map(line).collect()
}

/// Returns a line for each kind of route that is not applied as configured, with the number of such routes.
fn routes_not_used(routes: &RoutesStatus) -> String {
    let lines = [
        (routes.left_out, "announced destinations without room in the tables; less specific routes apply to them"),
        (routes.by_no_port, "kernel routes through interfaces that are not ports, ignored; see the log"),
        (routes.encapsulated, "kernel routes with encapsulation, ignored; see the log"),
        (routes.mtu_unheeded, "kernel routes with their own MTU, which is ignored; see the log"),
    ];
    lines.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}\n")).collect()
}

/// Returns a line if the node's kernel lacks routes of other nodes.
fn routes_unknown_to_kernel(routes: &RoutesStatus, path: &str) -> String {
    let count = routes.unknown_to_kernel;
    let who = match path {
        _ if count == 0 => return String::new(),
        "kernel" => "the kernel forwards, and packets to these destinations are lost",
        _ => "packets of the node's programs to these destinations are lost",
    };
    format!("{count} routes of other nodes have no room in the kernel: {who}; add a default route dev crosslane0\n")
}

/// Returns lines with the numbers of packets that were dropped, at all ports and in the node itself, and of those that
/// the kernel handles, by reason.
fn drops(status: &Status) -> String {
    let by_reason = |of_node: &BTreeMap<String, u64>, of_port: fn(&PortStatus) -> &BTreeMap<String, u64>| {
        let mut all = of_node.clone();
        for (reason, count) in status.ports.iter().flat_map(of_port) {
            *all.entry(reason.clone()).or_default() += count;
        }
        all.iter().map(|(reason, count)| format!("{reason} {count}")).collect::<Vec<String>>().join(", ")
    };
    let dropped = by_reason(&status.drops, |port| &port.drops);
    let left = by_reason(&BTreeMap::new(), |port| &port.left_to_kernel);
    let lines = [("dropped", dropped), ("left to the kernel, not lost", left)];
    lines.iter().filter(|(_, all)| !all.is_empty()).map(|(what, all)| format!("{what}: {all}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_missing_nodes_of_this_machine_are_a_failure() {
        let node = |name: &str, is_up| NodeReport {
            node: name.to_owned(),
            log: PathBuf::new(),
            is_up,
            error: None,
            status: None,
        };
        let report = Report {
            schema: "",
            file: "c.toml".to_owned(),
            name: String::new(),
            directory: PathBuf::new(),
            nodes: vec![node("a", true), node("b", false), node("c", false)],
        };
        let start = "start what is down with 'crosslane router up --cluster c.toml'";
        assert_eq!(not_up(&report, &["a"]), None);
        assert_eq!(not_up(&report, &["a", "c"]), Some(format!("node 'c' of c.toml is not up; {start}")));
        assert_eq!(not_up(&report, &["b", "c"]), Some(format!("nodes 'b', 'c' of c.toml are not up; {start}")));
    }

    #[test]
    fn a_kernel_that_lacks_routes_is_reported_with_what_it_loses() {
        let text = |unknown_to_kernel, path| {
            routes_unknown_to_kernel(&RoutesStatus { unknown_to_kernel, ..RoutesStatus::default() }, path)
        };
        assert_eq!((text(0, "kernel"), text(0, "router")), (String::new(), String::new()));
        assert!(text(9, "kernel").contains("9 routes") && text(9, "kernel").contains("the kernel forwards"));
        assert!(text(9, "router").contains("packets of the node's programs"));
        assert!(text(9, "kernel").ends_with("add a default route dev crosslane0\n"));
    }

    #[test]
    fn stale_routes_are_shown_by_protocol_with_the_time_left() {
        assert_eq!(stale_routes(&[]), "");
        let text = stale_routes(&[StaleRoutesStatus { protocol: 186, routes: 7, left_ms: 2001 }]);
        assert!(text.starts_with("7 stale routes of protocol 186") && text.ends_with("for 3 s\n"), "{text}");
    }

    #[test]
    fn routes_that_are_not_applied_are_counted_by_reason() {
        assert_eq!(routes_not_used(&RoutesStatus::default()), "");
        let text = routes_not_used(&RoutesStatus { by_no_port: 2, encapsulated: 1, ..RoutesStatus::default() });
        let starts: Vec<&str> = text.lines().map(|line| line.split(',').next().unwrap_or_default()).collect();
        let no_port = "2 kernel routes through interfaces that are not ports";
        assert_eq!(starts, [no_port, "1 kernel routes with encapsulation"]);
    }
}
