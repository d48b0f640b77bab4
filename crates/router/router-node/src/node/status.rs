//! Builds the status of a node.

use std::collections::BTreeMap;
use std::process;

use router::{ClaimState, Drops, Neighbour, NodeId, PortConfig, PortId, Step, Traffic as Counted};

use super::messages::Snapshot;
use super::peers::Peer;
use super::stale_routes::StaleOfProtocol;
use super::start::BUFFERS;
use super::state::Node;
use crate::cluster::PortOfNode;
use crate::interconnect::PeerCounters;
use crate::management::{
    NeighbourStatus, PeerStatus, PeerTraffic, PortStatus, RoutesStatus, StaleRoutesStatus, Status, TracedStep, Traffic,
};

impl Node {
    pub(super) fn status(&self, snapshot: &Snapshot) -> Status {
        let (node, cluster) = (self.settings.node(), &self.settings.cluster);
        let port = |(index, port_config): (usize, &PortOfNode)| {
            let state = &self.ports[index];
            let config = self.local.port(PortId(index as u8));
            port_status(port_config, state.kind, state.fallback.as_deref(), config, index, snapshot)
        };
        let (v4, v6) = self.table.routes();
        let rejected = self.local.rejected();
        let counters = &snapshot.counters;
        Status {
            node: node.name.clone(),
            pid: process::id(),
            started_at_ns: self.started_at_ns,
            interconnect: cluster.interconnect.kind.as_str().to_owned(),
            batch: cluster.interconnect.batch.to_string(),
            ports: node.ports.iter().enumerate().map(port).collect(),
            peers: self
                .peers
                .iter()
                .map(|(id, peer)| peer_status(peer, self.table.routes_of(id), &snapshot.peers[usize::from(id.0)]))
                .collect(),
            filters: self.filters.status(node.filters),
            routes: RoutesStatus {
                v4: v4 as u64,
                v6: v6 as u64,
                announced: self.local.announcements().len() as u64,
                installed: self.table.installed() as u64,
                left_out: self.table.left_out() as u64,
                unknown_to_kernel: self.table.waiting() as u64,
                by_no_port: rejected.no_port,
                encapsulated: rejected.encapsulated,
                mtu_unheeded: rejected.mtu,
                stale: self.local.stale_routes().map(|of_protocol| of_protocol.routes as u64).sum(),
            },
            stale_routes: self.local.stale_routes().map(|of_protocol| self.stale_status(of_protocol)).collect(),
            neighbours: snapshot
                .neighbours
                .iter()
                .map(|neighbour| neighbour_status(self.device(neighbour.port), neighbour))
                .collect(),
            drops: drops_of_node(&counters.drops, self.stale_packets),
            kernel: traffic(counters.from_kernel, counters.to_kernel),
            icmp_errors_sent: counters.icmp_errors_sent,
            icmp_errors_suppressed: counters.icmp_errors_suppressed,
            redirects_sent: counters.redirects_sent,
            neighbours_refused: counters.neighbours_refused,
            address_conflicts: counters.address_conflicts,
            buffers_free: snapshot.buffers_free as u64,
            buffers: u64::from(BUFFERS),
            netlink_resyncs: self.netlink_resyncs,
        }
    }
}

impl Node {
    fn stale_status(&self, StaleOfProtocol { protocol, routes, until_ns }: StaleOfProtocol) -> StaleRoutesStatus {
        let left_ms = until_ns.saturating_sub(self.now_ns()).div_ceil(1_000_000);
        StaleRoutesStatus { protocol, routes: routes as u64, left_ms }
    }
}

/// Returns why a port has a smaller MTU than the cluster file sets, with the remedy; `None` if it does not.
pub fn mtu_cut(port_config: &PortOfNode, mtu_bytes: u16) -> Option<String> {
    let configured = port_config.mtu_bytes.filter(|configured| *configured > mtu_bytes)?;
    let device = &port_config.device;
    Some(match &port_config.parent {
        Some(parent) => format!(
            "mtu_bytes = {configured} is cut to {mtu_bytes}, the MTU of port '{parent}'; raise the MTU of that port, \
             or lower this one in the file"
        ),
        None => format!(
            "mtu_bytes = {configured} is cut to {mtu_bytes}, the MTU of the interface; run 'ip link set {device} mtu \
             {configured}', or lower it in the file"
        ),
    })
}

/// Returns the status of a port.
fn port_status(
    port_config: &PortOfNode,
    kind: &str,
    fallback: Option<&str>,
    config: &PortConfig,
    index: usize,
    snapshot: &Snapshot,
) -> PortStatus {
    let counters = &snapshot.counters.ports[index];
    let unused = |wanted: ClaimState| {
        let of_port = snapshot.unused.iter().filter(move |(port, ..)| usize::from(port.0) == index);
        of_port.filter(move |(.., state)| *state == wanted).map(|(_, address, _)| *address).collect()
    };
    let losses = snapshot.losses.get(index).copied().unwrap_or_default();
    PortStatus {
        device: port_config.device.clone(),
        kind: kind.to_owned(),
        fallback: fallback.map(str::to_owned),
        is_up: config.is_up,
        mac: config.mac.to_string(),
        mtu_bytes: config.mtu_bytes,
        mtu_cut: mtu_cut(port_config, config.mtu_bytes),
        addresses: config.addresses.clone(),
        addresses_tentative: unused(ClaimState::Tentative),
        addresses_duplicate: unused(ClaimState::Duplicate),
        traffic: traffic(counters.received, counters.sent),
        drops: drops(&counters.drops, true),
        left_to_kernel: drops(&counters.drops, false),
        receive_overflows: losses.receive_overflows,
        receive_unusable: losses.receive_unusable,
        transmit_refused: losses.transmit_refused,
    }
}

/// Returns the counts of both directions.
fn traffic(received: Counted, sent: Counted) -> Traffic {
    Traffic {
        received_packets: received.packets,
        received_bytes: received.bytes,
        sent_packets: sent.packets,
        sent_bytes: sent.bytes,
    }
}

/// Returns the drops by name: those that are losses, or those that are not.
fn drops(drops: &Drops, are_losses: bool) -> BTreeMap<String, u64> {
    let wanted = drops.iter().filter(|(reason, _)| reason.is_loss() == are_losses);
    wanted.map(|(reason, count)| (reason.name().to_owned(), count)).collect()
}

/// Returns the drops of the node, with those after a suspension.
fn drops_of_node(counted: &Drops, stale_packets: u64) -> BTreeMap<String, u64> {
    let mut counted = drops(counted, true);
    if stale_packets > 0 {
        counted.insert("stale".to_owned(), stale_packets);
    }
    counted
}

/// Returns the status of another node, which announces this number of routes.
fn peer_status(peer: &Peer, routes: usize, counters: &PeerCounters) -> PeerStatus {
    let PeerCounters { drop_full, drop_absent, drop_long, drop_no_buffer, lost_packets, .. } = *counters;
    PeerStatus {
        node: peer.name.clone(),
        state: peer.state().to_owned(),
        reason: peer.reason.clone(),
        routes: routes as u64,
        traffic: PeerTraffic {
            sent_packets: counters.sent_packets,
            sent_messages: counters.sent_messages,
            received_packets: counters.received_packets,
            received_messages: counters.received_messages,
            detoured_packets: counters.detoured_packets,
            relayed_packets: counters.relayed_packets,
            dropped_packets: drop_full + drop_absent + drop_long + drop_no_buffer + lost_packets,
            forged_messages: counters.forged_messages,
        },
        losses: peer.losses,
        withdrawn_us: peer.withdrawn_ns.map(|ns| ns.div_ceil(1000)),
    }
}

/// Returns the status of a neighbour.
fn neighbour_status(device: &str, neighbour: &Neighbour) -> NeighbourStatus {
    NeighbourStatus {
        port: device.to_owned(),
        address: neighbour.address,
        mac: neighbour.mac.map(|mac| mac.to_string()),
        state: neighbour.state.name().to_owned(),
    }
}

/// Returns a traced step with the names of nodes and ports.
pub fn traced_step(step: &router::TracedStep, names: &[&str], device: impl Fn(PortId) -> String) -> TracedStep {
    let flow = step.flow;
    TracedStep {
        time_ns: step.time.ns(),
        source: flow.source,
        destination: flow.destination,
        protocol: flow.protocol.0,
        source_port: flow.source_port,
        destination_port: flow.destination_port,
        step: step_text(&step.step, names, device),
    }
}

/// Returns the text of a step with the names of nodes and of this node's ports.
fn step_text(step: &Step, names: &[&str], device: impl Fn(PortId) -> String) -> String {
    let name = |node: NodeId| names.get(usize::from(node.0)).copied().unwrap_or("?");
    match step {
        Step::Received(port) => format!("received at {}", device(*port)),
        Step::LookedUp { hop, hops } => {
            let (node, adjacency) = (name(hop.node), hop.adjacency.0);
            let port = if hop.port == PortId::KERNEL { "kernel".to_owned() } else { format!("port {}", hop.port.0) };
            format!("looked up: node {node}, {port}, adjacency {adjacency}, one of {hops} equal next hops")
        }
        Step::ToNode(node) => format!("to node {}", name(*node)),
        Step::Sent(port) => format!("sent by {}", device(*port)),
        Step::AwaitsNeighbour(port, _) => format!("waits for a neighbour's hardware address at {}", device(*port)),
        other => other.to_string(),
    }
}
