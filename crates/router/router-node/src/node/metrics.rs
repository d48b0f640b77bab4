//! The metrics of a node in the Prometheus text format.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::management::{PeerStatus, PortStatus, Status};

/// Name, type and help of a metric.
type Head = (&'static str, &'static str, &'static str);

type PortValue = fn(&PortStatus) -> u64;
const PORT_METRICS: [(Head, PortValue); 8] = [
    (("crosslane_router_port_up", "gauge", "Whether the port can receive and send."), |port| u64::from(port.is_up)),
    (("crosslane_router_port_received_packets_total", "counter", "Packets received."), |port| {
        port.traffic.received_packets
    }),
    (("crosslane_router_port_received_bytes_total", "counter", "Bytes received."), |port| port.traffic.received_bytes),
    (("crosslane_router_port_sent_packets_total", "counter", "Packets sent."), |port| port.traffic.sent_packets),
    (("crosslane_router_port_sent_bytes_total", "counter", "Bytes sent."), |port| port.traffic.sent_bytes),
    (
        ("crosslane_router_port_receive_overflows_total", "counter", "Frames lost before the router received them."),
        |port| port.receive_overflows,
    ),
    (("crosslane_router_port_receive_unusable_total", "counter", "Frames that the port could not parse."), |port| {
        port.receive_unusable
    }),
    (("crosslane_router_port_transmit_refused_total", "counter", "Frames that the device did not accept."), |port| {
        port.transmit_refused
    }),
];

type PeerValue = fn(&PeerStatus) -> u64;
const PEER_METRICS: [(Head, PeerValue); 11] = [
    (("crosslane_router_peer_up", "gauge", "Whether packets can be sent to the node."), |peer| {
        u64::from(peer.state == "up")
    }),
    (("crosslane_router_peer_losses_total", "counter", "Times that the session was lost."), |peer| peer.losses),
    (("crosslane_router_peer_routes", "gauge", "Destinations that the node announces."), |peer| peer.routes),
    (("crosslane_router_peer_sent_packets_total", "counter", "Packets sent to the node."), |peer| {
        peer.traffic.sent_packets
    }),
    (("crosslane_router_peer_sent_messages_total", "counter", "Messages with these packets."), |peer| {
        peer.traffic.sent_messages
    }),
    (("crosslane_router_peer_received_packets_total", "counter", "Packets received from the node."), |peer| {
        peer.traffic.received_packets
    }),
    (("crosslane_router_peer_received_messages_total", "counter", "Messages with these packets."), |peer| {
        peer.traffic.received_messages
    }),
    (("crosslane_router_peer_detoured_packets_total", "counter", "Packets sent over a third node."), |peer| {
        peer.traffic.detoured_packets
    }),
    (
        ("crosslane_router_peer_relayed_packets_total", "counter", "Packets of the node relayed to a third one."),
        |peer| peer.traffic.relayed_packets,
    ),
    (("crosslane_router_peer_dropped_packets_total", "counter", "Packets dropped."), |peer| {
        peer.traffic.dropped_packets
    }),
    (("crosslane_router_peer_forged_messages_total", "counter", "Messages that failed authentication."), |peer| {
        peer.traffic.forged_messages
    }),
];

type NodeValue = fn(&Status) -> u64;
const NODE_METRICS: [(Head, NodeValue); 17] = [
    (("crosslane_router_routes_announced", "gauge", "Destinations that the node announces."), |status| {
        status.routes.announced
    }),
    (("crosslane_router_routes_installed", "gauge", "Routes of other nodes in the kernel."), |status| {
        status.routes.installed
    }),
    (("crosslane_router_routes_unknown_to_kernel", "gauge", "Routes of other nodes without room there."), |status| {
        status.routes.unknown_to_kernel
    }),
    (("crosslane_router_routes_left_out", "gauge", "Destinations without room in the tables."), |status| {
        status.routes.left_out
    }),
    (("crosslane_router_routes_stale", "gauge", "Routes kept while a routing daemon may be restarting."), |status| {
        status.routes.stale
    }),
    (("crosslane_router_kernel_received_packets_total", "counter", "Packets from the kernel."), |status| {
        status.kernel.received_packets
    }),
    (("crosslane_router_kernel_sent_packets_total", "counter", "Packets to the kernel."), |status| {
        status.kernel.sent_packets
    }),
    (("crosslane_router_icmp_errors_sent_total", "counter", "ICMP errors sent."), |status| status.icmp_errors_sent),
    (("crosslane_router_icmp_errors_suppressed_total", "counter", "ICMP errors above the rate limit."), |status| {
        status.icmp_errors_suppressed
    }),
    (("crosslane_router_redirects_sent_total", "counter", "ICMP redirects sent."), |status| status.redirects_sent),
    (
        ("crosslane_router_neighbours_refused_total", "counter", "Neighbours above the limits of their port."),
        |status| status.neighbours_refused,
    ),
    (("crosslane_router_address_conflicts_total", "counter", "Hosts that claimed an address of the node."), |status| {
        status.address_conflicts
    }),
    (("crosslane_router_buffers", "gauge", "Packet buffers."), |status| status.buffers),
    (("crosslane_router_buffers_free", "gauge", "Free packet buffers."), |status| status.buffers_free),
    (("crosslane_router_netlink_resyncs_total", "counter", "Times that all kernel state was read again."), |status| {
        status.netlink_resyncs
    }),
    (("crosslane_router_filters", "gauge", "Packet filters that apply to forwarded packets."), |status| {
        status.filters.found.len() as u64
    }),
    (("crosslane_router_forwards", "gauge", "Whether the router forwards, and not the kernel or nobody."), |status| {
        u64::from(status.filters.path == "router")
    }),
];

/// Formats the status of a node.
pub fn render(status: &Status) -> String {
    let mut text = String::new();
    let node = escaped(&status.node);
    let name = begin(&mut text, ("crosslane_router_start_time_seconds", "gauge", "Start of the node, since 1970."));
    let (seconds, milliseconds) = (status.started_at_ns / 1_000_000_000, status.started_at_ns / 1_000_000 % 1000);
    let _ = writeln!(text, "{name}{{node=\"{node}\"}} {seconds}.{milliseconds:03}");
    for (head, value) in NODE_METRICS {
        let name = begin(&mut text, head);
        let _ = writeln!(text, "{name}{{node=\"{node}\"}} {}", value(status));
    }
    let name = begin(&mut text, ("crosslane_router_routes", "gauge", "Destinations in the forwarding tables."));
    for (version, routes) in [(4, status.routes.v4), (6, status.routes.v6)] {
        let _ = writeln!(text, "{name}{{node=\"{node}\",version=\"{version}\"}} {routes}");
    }
    let name = begin(&mut text, ("crosslane_router_drops_total", "counter", "Packets dropped, by reason."));
    drops(&mut text, name, &format!("node=\"{node}\""), &status.drops);
    for (head, value) in PORT_METRICS {
        let name = begin(&mut text, head);
        for port in &status.ports {
            let _ = writeln!(text, "{name}{{node=\"{node}\",port=\"{}\"}} {}", escaped(&port.device), value(port));
        }
    }
    let of_port = |port: &PortStatus| format!("node=\"{node}\",port=\"{}\"", escaped(&port.device));
    let help = "Packets received at the port, or to be sent there, that the router dropped.";
    let name = begin(&mut text, ("crosslane_router_port_drops_total", "counter", help));
    status.ports.iter().for_each(|port| drops(&mut text, name, &of_port(port), &port.drops));
    let help = "Packets received at the port that the kernel handles, by what it does with them.";
    let name = begin(&mut text, ("crosslane_router_port_left_to_kernel_total", "counter", help));
    status.ports.iter().for_each(|port| drops(&mut text, name, &of_port(port), &port.left_to_kernel));
    for (head, value) in PEER_METRICS {
        let name = begin(&mut text, head);
        for peer in &status.peers {
            let _ = writeln!(text, "{name}{{node=\"{node}\",peer=\"{}\"}} {}", escaped(&peer.node), value(peer));
        }
    }
    text
}

/// Writes the lines before the values of a metric, and returns its name.
fn begin(text: &mut String, (name, kind, help): Head) -> &'static str {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    name
}

fn drops(text: &mut String, name: &str, labels: &str, drops: &BTreeMap<String, u64>) {
    for (reason, count) in drops {
        let _ = writeln!(text, "{name}{{{labels},reason=\"{}\"}} {count}", escaped(reason));
    }
}

/// Escapes the value of a label.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_values_are_escaped() {
        assert_eq!(escaped("a\"b\\c\nd"), r#"a\"b\\c\nd"#);
    }
}
