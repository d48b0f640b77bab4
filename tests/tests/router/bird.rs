//! BIRD on a node: OSPF and BGP with an external router.

use std::fs;
use std::path::Path;
use std::process::Command;

use system_tests::{Process, paths, wait_until};

use crate::cluster::{Cluster, Lab, joined_by};

/// Configuration of the node, which announces the cluster's routes. For BIRD they are *alien*, because another program
/// added them to the kernel.
const OF_NODE: &str = "router id 10.77.1.1;
protocol device { scan time 1; }
protocol kernel { learn; scan time 1; ipv4 { import all; export all; }; }
protocol kernel { learn; scan time 1; ipv6 { import all; export all; }; }
protocol ospf v2 {
    tick 1;
    ipv4 { import all; export where source = RTS_INHERIT; };
    area 0 { interface \"eth0\" { type ptp; hello 1; dead count 4; retransmit 2; }; };
}
protocol bgp {
    local fd77:1::1 as 65000;
    neighbor fd77:1::2 as 65001;
    connect delay time 1; connect retry time 1; hold time 3;
    ipv6 { import all; export where source = RTS_INHERIT; next hop self; };
}
";

/// Configuration of the external router, which has its own networks.
const OF_HOST: &str = "router id 10.77.1.2;
protocol device { scan time 1; }
protocol direct { ipv4; ipv6; interface \"lo\"; }
protocol kernel { ipv4 { import none; export all; }; }
protocol kernel { ipv6 { import none; export all; }; }
protocol ospf v2 {
    tick 1;
    ipv4 { import all; export where source = RTS_DEVICE; };
    area 0 { interface \"eth0\" { type ptp; hello 1; dead count 4; retransmit 2; }; };
}
protocol bgp {
    local fd77:1::2 as 65001;
    neighbor fd77:1::1 as 65000;
    connect delay time 1; connect retry time 1; hold time 3;
    ipv6 { import all; export where source = RTS_DEVICE; next hop self; };
}
";

fn start(cluster: &Cluster, folder: &Path, at: &str, configuration: &str) -> Process {
    let file = |ending: &str| folder.join(format!("{at}.{ending}"));
    fs::write(file("conf"), configuration).expect("a file");
    let mut command: Command = cluster.at(at, paths::tool("bird"));
    command.arg("-f").arg("-c").arg(file("conf")).arg("-s").arg(file("ctl"));
    Process::start(&mut command)
}

/// Host `h1` is a router that announces its networks to node a by OSPF (IPv4) and BGP (IPv6); host `h2`, behind node b,
/// reaches them as long as they are announced.
#[test]
fn routes_of_bird_are_learnt_by_all_nodes_and_withdrawn() {
    let namespaces = ["a", "b", "h1", "h2"];
    let Some(lab) = Lab::new("routes_of_bird_are_learnt_by_all_nodes_and_withdrawn", &namespaces) else { return };
    lab.join(("a", "eth0"), ("h1", "eth0"), 1);
    lab.join(("b", "eth0"), ("h2", "eth0"), 2);
    // It knows the cluster's networks only from BIRD.
    lab.ip("h1", &["route", "del", "default"]);
    lab.ip("h1", &["-6", "route", "del", "default"]);
    lab.ip("h1", &["address", "add", "203.0.113.1/24", "dev", "lo"]);
    lab.ip("h1", &["address", "add", "2001:db8:5::1/64", "dev", "lo", "nodad"]);
    lab.write(&joined_by("rnic-lane"));
    lab.up();
    let folder = tempfile::tempdir().expect("a folder");
    let _of_node = start(&lab, folder.path(), "a", OF_NODE);
    let of_host = start(&lab, folder.path(), "h1", OF_HOST);

    lab.wait_for_route("b", "2001:db8:5::1", Some("a"));
    let has_route = |version: &str, prefix: &str| {
        let routes = lab.ip("h1", &[version, "route", "show", "proto", "bird"]);
        routes.lines().any(|line| line.starts_with(prefix))
    };
    wait_until("the cluster's IPv6 network at h1", || has_route("-6", "fd77:2::/64"));
    lab.ping("h2", "2001:db8:5::1").must_succeed();
    lab.wait_for_route("b", "203.0.113.1", Some("a"));
    wait_until("the cluster's IPv4 network at h1", || has_route("-4", "10.77.2.0/24"));
    lab.ping("h2", "203.0.113.1").must_succeed();

    // OSPF withdraws the network; BGP's routes end with its connection.
    lab.ip("h1", &["address", "del", "203.0.113.1/24", "dev", "lo"]);
    lab.wait_for_route("b", "203.0.113.1", None);
    drop(of_host);
    lab.wait_for_route("b", "2001:db8:5::1", None);
    let finished = lab.ping("h2", "2001:db8:5::1");
    assert!(!finished.status.success() && finished.stdout.contains("unreachable"), "{finished}");
}
