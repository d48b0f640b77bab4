//! The metrics of a monitor in the Prometheus text format.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use control::monitor::Status;
use stats_page::DataPath;
use stats_page::reader::{Process, Totals};

type LinkValue = fn(&control::monitor::Link) -> u64;

/// Metrics of each link: name, type, help and value.
const LINK_METRICS: [(&str, &str, &str, LinkValue); 26] = [
    ("crosslane_link_up", "gauge", "Whether the link carries connections.", |link| u64::from(link.state == "up")),
    ("crosslane_link_ups_total", "counter", "Number of times that the link came up.", |link| link.ups),
    ("crosslane_link_round_trip_ns", "gauge", "Last round trip of the monitors.", |link| {
        link.round_trip_ns.unwrap_or(0)
    }),
    ("crosslane_connections", "gauge", "Connections over windows.", |link| link.carried.connections_open),
    ("crosslane_connections_total", "counter", "Connections since the start.", |link| link.carried.connections_total),
    ("crosslane_direct_connections", "gauge", "Open direct connections.", |link| link.carried.direct_open),
    ("crosslane_direct_connections_total", "counter", "Direct connections since the start.", |link| {
        link.carried.direct_total
    }),
    ("crosslane_direct_held", "gauge", "Direct connections without a link.", |link| link.carried.direct_held),
    ("crosslane_direct_missed_total", "counter", "Connections that found no span, or could not map it.", |link| {
        link.carried.direct_missed
    }),
    ("crosslane_sent_bytes_total", "counter", "Payload bytes sent.", |link| link.carried.bytes_sent),
    ("crosslane_received_bytes_total", "counter", "Payload bytes received.", |link| link.carried.bytes_received),
    ("crosslane_failover_connections", "gauge", "Connections of lost links, over kernel TCP.", |link| {
        link.carried.failover_open
    }),
    ("crosslane_failover_connections_total", "counter", "Connections that have lost their link.", |link| {
        link.carried.failover_total
    }),
    ("crosslane_failover_resets_total", "counter", "Of those, connections that were reset.", |link| {
        link.carried.failover_resets
    }),
    ("crosslane_failover_sent_bytes_total", "counter", "Payload bytes sent over kernel TCP.", |link| {
        link.carried.failover_bytes_sent
    }),
    ("crosslane_failover_received_bytes_total", "counter", "Payload bytes received over kernel TCP.", |link| {
        link.carried.failover_bytes_received
    }),
    ("crosslane_copied_bytes_total", "counter", "Bytes copied by the proxy.", |link| link.carried.bytes_copied),
    ("crosslane_frames_sent_total", "counter", "Frames sent in windows.", |link| link.carried.frames_sent),
    ("crosslane_publishes_total", "counter", "Publishes of frames.", |link| link.carried.publishes),
    ("crosslane_flushes_total", "counter", "Waits until stores had arrived, before blocking.", |link| {
        link.carried.flushes
    }),
    ("crosslane_frames_received_total", "counter", "Frames received in windows.", |link| link.carried.frames_received),
    ("crosslane_stalls_total", "counter", "Times that a connection's receiver had no room.", |link| {
        link.carried.stalls
    }),
    ("crosslane_partitions_full_total", "counter", "Times that a partition was full.", |link| {
        link.carried.partitions_full
    }),
    ("crosslane_rings_peer_total", "counter", "Doorbells rung for blocked peers.", |link| link.carried.rings_peer),
    ("crosslane_rings_local_total", "counter", "Wake-ups of blocked programs.", |link| link.carried.rings_local),
    ("crosslane_wakes_total", "counter", "Wake-ups by programs.", |link| link.carried.wakes),
];

type ProgramValue = fn(&Totals) -> u64;

/// Sums of the programs' counters, by data path. They are gauges, because they fall when programs end.
const PROGRAM_GAUGES: [(&str, &str, ProgramValue); 3] = [
    ("crosslane_programs_connections", "Open connections of programs.", |totals| totals.connections_open),
    ("crosslane_programs_sent_bytes", "Bytes sent by running programs.", |totals| totals.bytes_sent),
    ("crosslane_programs_received_bytes", "Bytes received by running programs.", |totals| totals.bytes_received),
];

/// Formats the node's status and, unless they cannot be read, the statistics pages of its programs.
pub fn render(status: &Status, programs: Option<&[Process]>) -> String {
    let mut text = String::new();
    let node = &status.node;
    for (name, kind, help, value) in node_metrics(status) {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name}{{node=\"{node}\"}} {value}");
    }
    for (name, kind, help, value) in LINK_METRICS {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for link in &status.links {
            let _ = writeln!(text, "{name}{{node=\"{node}\",peer=\"{}\"}} {}", link.peer, value(link));
        }
    }
    if let Some(programs) = programs {
        render_programs(&mut text, &status.node, programs);
    }
    text
}

/// Returns the metrics of the node: name, type, help and value.
fn node_metrics(status: &Status) -> Vec<(&'static str, &'static str, &'static str, u64)> {
    let (remote, local) = (status.remote_listeners.len() as u64, status.listeners.len() as u64);
    let mut metrics = vec![
        ("crosslane_proxy_up", "gauge", "Whether the proxy has the device.", is_proxy_ready(status)),
        ("crosslane_proxy_restarts_total", "counter", "Restarts of the proxy.", status.proxy_restarts),
        ("crosslane_mirrors", "gauge", "Remote listeners at which the proxy listens.", remote),
        ("crosslane_listeners", "gauge", "Listeners of this node.", local),
    ];
    if let Some(etcd) = &status.etcd {
        let (up, lease) = (u64::from(etcd.is_reached), u64::from(etcd.holds_lease));
        let restart_needed = etcd.restart_needed.len() as u64;
        metrics.extend([
            ("crosslane_etcd_up", "gauge", "Whether etcd answers.", up),
            ("crosslane_etcd_lease", "gauge", "Whether this monitor holds the node's lease.", lease),
            ("crosslane_etcd_outages_total", "counter", "Times that etcd became unreachable.", etcd.outages),
            ("crosslane_etcd_changes_total", "counter", "Changes of the rack that were applied.", etcd.changes_applied),
            (
                "crosslane_etcd_restart_needed",
                "gauge",
                "Changed keys that need a restart of the nodes.",
                restart_needed,
            ),
        ]);
    }
    metrics
}

fn render_programs(text: &mut String, node: &str, programs: &[Process]) {
    let head = |text: &mut String, name: &str, help: &str| {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge");
    };
    let (name, running) = ("crosslane_programs", programs.len());
    head(text, name, "Running programs of this node.");
    let _ = writeln!(text, "{name}{{node=\"{node}\"}} {running}");
    for (name, help, value) in PROGRAM_GAUGES {
        head(text, name, help);
        for path in [DataPath::Lane, DataPath::Window, DataPath::Kernel] {
            let sum = programs.iter().map(|program| value(program.totals(path))).fold(0, u64::wrapping_add);
            let _ = writeln!(text, "{name}{{node=\"{node}\",path=\"{}\"}} {sum}", path.name());
        }
    }
    let mut fallbacks = BTreeMap::new();
    for (reason, count) in programs.iter().flat_map(|program| &program.fallbacks) {
        let sum: &mut u64 = fallbacks.entry(reason).or_default();
        *sum = sum.wrapping_add(*count);
    }
    let name = "crosslane_programs_fallbacks";
    head(text, name, "Connections of running programs that fell back to kernel TCP, by reason.");
    for (reason, sum) in fallbacks {
        let _ = writeln!(text, "{name}{{node=\"{node}\",reason=\"{reason}\"}} {sum}");
    }
}

fn is_proxy_ready(status: &Status) -> u64 {
    u64::from(status.proxy.is_some_and(|proxy| proxy.is_ready))
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::monitor::{Link, Proxy};

    fn status() -> Status {
        Status {
            node: "a".to_owned(),
            address: "127.77.0.1".parse().unwrap(),
            pid: 1,
            started_at_ns: 0,
            device: String::new(),
            rack_digest: String::new(),
            timing: None,
            partitions: Vec::new(),
            direct: None,
            proxy: Some(Proxy { pid: 2, is_ready: true }),
            proxy_restarts: 3,
            links: vec![Link {
                peer: "b".to_owned(),
                address: "127.77.0.2".parse().unwrap(),
                state: "up".to_owned(),
                reason: None,
                epoch: 4,
                ups: 2,
                round_trip_ns: Some(1500),
                carried: control::proxy::PeerReport { bytes_copied: 300, ..Default::default() },
            }],
            listeners: Vec::new(),
            remote_listeners: vec!["127.77.0.2:80".parse().unwrap()],
            etcd: Some(Default::default()),
        }
    }

    /// Returns two programs that have sent over windows, one of which has also used the kernel path.
    fn programs() -> [Process; 2] {
        let sent = |bytes_sent| Totals { bytes_sent, ..Totals::default() };
        [([("no_listener", 2)].into(), 5), (Default::default(), 7)].map(|(fallbacks, bytes)| Process {
            pid: 1,
            program: "redis-server".to_owned(),
            node: None,
            started_at_ns: 0,
            connections: Vec::new(),
            closed: Vec::new(),
            lane: sent(0),
            kernel: sent(1),
            window: sent(bytes),
            connections_unlisted: 0,
            lane_memory_bytes: 0,
            lane_memory_bytes_max: 0,
            fallbacks,
        })
    }

    #[test]
    fn all_metrics_of_a_node_are_rendered() {
        let text = render(&status(), Some(&programs()));
        for line in [
            "crosslane_link_up{node=\"a\",peer=\"b\"} 1",
            "crosslane_proxy_restarts_total{node=\"a\"} 3",
            "# TYPE crosslane_link_ups_total counter",
            "crosslane_etcd_up{node=\"a\"} 0",
            "crosslane_copied_bytes_total{node=\"a\",peer=\"b\"} 300",
            "crosslane_programs{node=\"a\"} 2",
            "crosslane_programs_sent_bytes{node=\"a\",path=\"window\"} 12",
            "crosslane_programs_fallbacks{node=\"a\",reason=\"no_listener\"} 2",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
    }
}
