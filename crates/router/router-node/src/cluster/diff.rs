//! Differences between two versions of a cluster file, and whether a running node can apply them.

use std::fmt::{Debug, Display};

use config::{CheckResult, InvalidKey};
use router::batch::Policy;
use sim::Span;

use super::model::{Cluster, Interconnect, Node, PortOfNode};
use super::schema::Batch;

/// The differences between two versions of a cluster file, for one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfigDiff {
    /// One line per difference.
    pub lines: Vec<String>,
    /// By port index in the new file: the former index of a port that stays open, or `None` for a port to be opened.
    pub kept_ports: Vec<Option<usize>>,
}

/// Returns the batching policy that the file configures.
pub fn batching_policy(interconnect: &Interconnect) -> Policy {
    match interconnect.batch {
        Batch::Adaptive => Policy::Adaptive { target: Span::from_ns(interconnect.latency_target_ns) },
        Batch::Fixed(packets) => Policy::fixed(packets),
    }
}

/// Compares two versions of a cluster file for the node with index `node`.
///
/// # Errors
/// Returns the first key whose change needs a restart.
pub fn diff(old: &Cluster, new: &Cluster, node: usize) -> Result<ConfigDiff, InvalidKey> {
    check_cluster(old, new)?;
    for (index, (old, new)) in old.nodes.iter().zip(&new.nodes).enumerate() {
        check_node(&format!("nodes[{index}]"), old, new)?;
    }
    let mut changes = ConfigDiff::default();
    let (of_old, of_new) = (&old.interconnect, &new.interconnect);
    changes.compare("interconnect.batch", &of_old.batch, &of_new.batch);
    let ns = |interconnect: &Interconnect| format!("{} ns", interconnect.latency_target_ns);
    changes.compare("interconnect.latency_target_ns", &ns(of_old), &ns(of_new));
    let ns = |cluster: &Cluster| format!("{} ns", cluster.timeouts.stale_routes_ns);
    changes.compare("timeouts.stale_routes_ns", &ns(old), &ns(new));
    changes.node(&old.nodes[node], &new.nodes[node]);
    Ok(changes)
}

/// Checks that a value which is fixed at start has not changed.
fn check_unchanged<T: PartialEq + Debug>(key: &str, old: &T, new: &T) -> CheckResult {
    if old == new {
        return Ok(());
    }
    let what = format!(
        "{} instead of {} needs a restart; restore it, or run 'crosslane router down' and 'up'",
        display_value(new),
        display_value(old)
    );
    Err(InvalidKey::new(key, what))
}

/// Formats a value as in the file.
fn display_value(value: &impl Debug) -> String {
    let text = format!("{value:?}");
    match text.strip_prefix("Some(").and_then(|text| text.strip_suffix(')')) {
        Some(inner) => inner.to_owned(),
        None if text == "None" => "nothing".to_owned(),
        None => text,
    }
}

fn check_cluster(old: &Cluster, new: &Cluster) -> CheckResult {
    check_unchanged("name", &old.name, &new.name)?;
    check_unchanged("key", &old.key, &new.key)?;
    let (of_old, of_new) = (&old.interconnect, &new.interconnect);
    check_unchanged("interconnect.kind", &of_old.kind.as_str(), &of_new.kind.as_str())?;
    check_unchanged("interconnect.balance", &of_old.balance.as_str(), &of_new.balance.as_str())?;
    let timing = |interconnect: &Interconnect| interconnect.timing.map(rack::Timing::as_str);
    check_unchanged("interconnect.timing", &timing(of_old), &timing(of_new))?;
    let names = |cluster: &Cluster| cluster.nodes.iter().map(|node| node.name.clone()).collect::<Vec<_>>();
    check_unchanged("nodes", &names(old), &names(new))?;
    check_unchanged("timeouts.beat_ns", &old.keepalive_ns(), &new.keepalive_ns())?;
    check_unchanged("timeouts.silence_ns", &old.hold_ns(), &new.hold_ns())
}

fn check_node(key: &str, old: &Node, new: &Node) -> CheckResult {
    check_unchanged(&format!("{key}.namespace"), &old.namespace, &new.namespace)?;
    check_unchanged(&format!("{key}.control"), &old.control, &new.control)?;
    check_unchanged(&format!("{key}.metrics"), &old.metrics, &new.metrics)?;
    check_unchanged(&format!("{key}.fabric"), &old.fabric, &new.fabric)
}

impl ConfigDiff {
    fn compare<T: PartialEq + Display>(&mut self, what: &str, old: &T, new: &T) {
        if old != new {
            self.lines.push(format!("{what}: {new} instead of {old}"));
        }
    }

    fn list_added_and_removed<T: PartialEq>(&mut self, old: &[T], new: &[T], name: impl Fn(&T) -> String) {
        let removed = old.iter().filter(|one| !new.contains(one)).map(|one| format!("{} is gone", name(one)));
        let added = new.iter().filter(|one| !old.contains(one)).map(|one| format!("{} is new", name(one)));
        self.lines.extend(removed.chain(added));
    }

    fn node(&mut self, old: &Node, new: &Node) {
        self.list_added_and_removed(&old.addresses, &new.addresses, |address| format!("address {address}"));
        self.compare("redirects", &old.redirects, &new.redirects);
        self.compare("filters", &old.filters.as_str(), &new.filters.as_str());
        for former in old.ports.iter().filter(|former| new.port(&former.device).is_none()) {
            self.lines.push(format!("port '{}' is gone", former.device));
        }
        for port in &new.ports {
            let former = old.ports.iter().position(|former| former.device == port.device);
            self.kept_ports.push(former.filter(|index| opens_same_device(&old.ports[*index], port)));
            match former {
                Some(index) => self.port(&old.ports[index], port),
                None => self.lines.push(format!("port '{}' is new, by {}", port.device, port.kind.as_str())),
            }
        }
        let devices: Vec<&str> = new.ports.iter().map(|port| port.device.as_str()).collect();
        let former = |device: &&str| old.ports.iter().position(|former| former.device == *device);
        if !devices.iter().filter_map(former).is_sorted() {
            self.lines.push(format!("ports: their order is now {}", devices.join(", ")));
        }
        self.list_added_and_removed(&old.routes, &new.routes, |route| {
            let via = route.via.map_or_else(String::new, |via| format!(" via {via}"));
            format!("route to {}{via} by '{}' with metric {}", route.to, route.port, route.metric)
        });
    }

    fn port(&mut self, old: &PortOfNode, new: &PortOfNode) {
        let name = format!("port '{}'", new.device);
        let mtu = |port: &PortOfNode| port.mtu_bytes.map_or_else(|| "its own".to_owned(), |bytes| bytes.to_string());
        self.compare(&format!("{name}: kind"), &old.kind.as_str(), &new.kind.as_str());
        self.compare(&format!("{name}: mtu_bytes"), &mtu(old), &mtu(new));
        let file = |file: &Option<std::path::PathBuf>| display_value(file);
        self.compare(&format!("{name}: input"), &file(&old.input), &file(&new.input));
        self.compare(&format!("{name}: output"), &file(&old.output), &file(&new.output));
        self.compare(&format!("{name}: parent"), &display_value(&old.parent), &display_value(&new.parent));
        self.compare(&format!("{name}: vlan"), &display_value(&old.vlan), &display_value(&new.vlan));
        self.list_added_and_removed(&old.addresses, &new.addresses, |address| format!("{name}: address {address}"));
    }
}

/// Returns whether the port that is open for `old` also serves `new`.
fn opens_same_device(old: &PortOfNode, new: &PortOfNode) -> bool {
    let device = |port: &PortOfNode| {
        (port.device.clone(), port.kind, port.input.clone(), port.output.clone(), port.parent.clone(), port.vlan)
    };
    device(old) == device(new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::ClusterFile;

    const FILE: &str = r#"version = 1

[interconnect]
batch = 8

[[nodes]]
name = "a"
namespace = "a"
addresses = ["10.255.0.1"]

[[nodes.ports]]
device = "eth0"

[[nodes.ports]]
device = "tap0"
kind = "tap"
addresses = ["10.9.0.1/24"]

[[nodes.routes]]
to = "10.8.0.0/16"
via = "10.9.0.2"
port = "tap0"

[[nodes]]
name = "b"
namespace = "b"

[[nodes.ports]]
device = "eth0"
"#;

    const PORT_TAP0: &str = "[[nodes.ports]]\ndevice = \"tap0\"\nkind = \"tap\"\naddresses = [\"10.9.0.1/24\"]\n";

    /// A replaced text, its replacement, the expected lines, and the ports that stay open.
    type Case<'a> = (&'a str, &'a str, &'a [&'a str], &'a [Option<usize>]);

    fn cluster(text: &str) -> Cluster {
        ClusterFile::parse("c.toml", text.as_bytes()).unwrap().cluster
    }

    fn after(found: &str, replaced: &str, node: usize) -> Result<ConfigDiff, InvalidKey> {
        assert!(FILE.contains(found), "{found}");
        diff(&cluster(FILE), &cluster(&FILE.replacen(found, replaced, 1)), node)
    }

    #[test]
    fn differences_are_listed_and_unchanged_ports_stay_open() {
        let none = after("", "", 0).unwrap();
        assert_eq!(none, ConfigDiff { lines: vec![], kept_ports: vec![Some(0), Some(1)] });
        let cases: &[Case<'_>] = &[
            ("batch = 8", "batch = 16", &["interconnect.batch: 16 instead of 8"], &[Some(0), Some(1)]),
            (
                "batch = 8",
                "latency_target_ns = \"5 us\"",
                &[
                    "interconnect.batch: adaptive instead of 8",
                    "interconnect.latency_target_ns: 5000 ns instead of 10000 ns",
                ],
                &[Some(0), Some(1)],
            ),
            (
                "device = \"eth0\"\n",
                "device = \"eth1\"\n",
                &["port 'eth0' is gone", "port 'eth1' is new, by auto"],
                &[None, Some(1)],
            ),
            ("[[nodes.ports]]\ndevice = \"eth0\"\n", "", &["port 'eth0' is gone"], &[Some(1)]),
            (
                "device = \"eth0\"\n",
                "device = \"eth0\"\nkind = \"af-packet\"\nmtu_bytes = 9000\n",
                &["port 'eth0': kind: af-packet instead of auto", "port 'eth0': mtu_bytes: 9000 instead of its own"],
                &[None, Some(1)],
            ),
            (
                "10.9.0.1/24\"",
                "10.9.0.3/24\"",
                &["port 'tap0': address 10.9.0.1/24 is gone", "port 'tap0': address 10.9.0.3/24 is new"],
                &[Some(0), Some(1)],
            ),
            (
                "via = \"10.9.0.2\"\n",
                "metric = 7\n",
                &[
                    "route to 10.8.0.0/16 via 10.9.0.2 by 'tap0' with metric 0 is gone",
                    "route to 10.8.0.0/16 by 'tap0' with metric 7 is new",
                ],
                &[Some(0), Some(1)],
            ),
            (
                "name = \"a\"",
                "name = \"a\"\nredirects = false\nfilters = \"refuse\"",
                &["redirects: false instead of true", "filters: refuse instead of honour"],
                &[Some(0), Some(1)],
            ),
            (
                "10.255.0.1",
                "10.255.0.2",
                &["address 10.255.0.1 is gone", "address 10.255.0.2 is new"],
                &[Some(0), Some(1)],
            ),
        ];
        for (found, replaced, lines, kept_ports) in cases {
            let changes = after(found, replaced, 0).unwrap();
            assert_eq!(
                (changes.lines.iter().map(String::as_str).collect::<Vec<_>>(), &changes.kept_ports[..]),
                (lines.to_vec(), *kept_ports)
            );
        }
        // Changes to another node's ports are not reported for this node.
        assert_eq!(
            after("10.9.0.1/24\"", "10.9.0.3/24\"", 1).unwrap(),
            ConfigDiff { lines: vec![], kept_ports: vec![Some(0)] }
        );
    }

    #[test]
    fn another_time_for_stale_routes_is_listed() {
        let changes = after("version = 1", "version = 1\n[timeouts]\nstale_routes_ns = \"120 s\"", 0).unwrap();
        assert_eq!(changes.lines, ["timeouts.stale_routes_ns: 120000000000 ns instead of 0 ns"]);
    }

    #[test]
    fn another_order_of_the_ports_is_listed() {
        let [first, second] = ["[[nodes.ports]]\ndevice = \"eth0\"\n\n", PORT_TAP0];
        let changes = after(&format!("{first}{second}"), &format!("{second}\n{first}"), 0).unwrap();
        assert_eq!(changes.lines, ["ports: their order is now tap0, eth0"]);
        assert_eq!(changes.kept_ports, [Some(1), Some(0)]);
    }

    #[test]
    fn changes_that_need_a_restart_are_refused_with_key_and_values() {
        for (found, replaced, key, values) in [
            ("batch = 8", "kind = \"window\"", "interconnect.kind", ["\"window\"", "\"lane\""]),
            ("batch = 8", "balance = \"valiant\"", "interconnect.balance", ["\"valiant\"", "\"direct\""]),
            ("version = 1", "version = 1\nname = \"x\"", "name", ["\"x\"", "\"cluster\""]),
            (
                "version = 1",
                "version = 1\n[timeouts]\nbeat_ns = \"1 s\"",
                "timeouts.beat_ns",
                ["1000000000", "500000000"],
            ),
            ("name = \"b\"", "name = \"c\"", "nodes", ["\"c\"", "\"b\""]),
            ("namespace = \"b\"\n", "", "nodes[1].namespace", ["nothing", "\"b\""]),
        ] {
            let fault = after(found, replaced, 0).unwrap_err();
            assert_eq!(fault.key, key);
            assert!(fault.what.contains("restart") && fault.what.contains("down"), "{fault:?}");
            assert!(values.iter().all(|value| fault.what.contains(value)), "{fault:?}");
        }
    }
}
