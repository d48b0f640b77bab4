//! Packet filters in the namespaces of nodes: nftables, legacy iptables and tc; honoured, refused and ignored.

use std::process::Output;

use serde_json::Value;
use system_tests::{netns, paths, wait_until};

use crate::cluster::{Lab, PLAIN};

/// Two nodes with a host each. `mode` is a line for node a in the cluster file.
fn lab(test: &str, mode: &str) -> Option<Lab> {
    let lab = Lab::new(test, &["a", "b", "host-a", "host-b"])?;
    lab.join(("a", "eth0"), ("host-a", "eth0"), 1);
    lab.join(("b", "eth0"), ("host-b", "eth0"), 2);
    lab.write(&PLAIN.replacen("name = \"a\"\n", &format!("name = \"a\"\n{mode}\n"), 1));
    Some(lab)
}

/// Runs a program in a node's namespace.
fn try_run(lab: &Lab, at: &str, command: &str) -> Output {
    let mut words = command.split(' ');
    let program = paths::tool(words.next().expect("a program"));
    lab.at(at, program).args(words).output().expect("it runs")
}

#[track_caller]
pub fn run(lab: &Lab, at: &str, command: &str) {
    let output = try_run(lab, at, command);
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Adds a base chain of nftables with one rule.
pub fn nft(lab: &Lab, at: &str, hook: &str, rule: &str) {
    run(lab, at, "nft add table inet t");
    run(lab, at, &format!("nft add chain inet t c {{ type filter hook {hook} priority 0 ; policy accept ; }}"));
    run(lab, at, &format!("nft add rule inet t c {rule}"));
}

fn filters(lab: &Lab, node: usize) -> Value {
    lab.node(node)["filters"].clone()
}

/// Waits until a node leaves packets to this path.
#[track_caller]
pub fn wait_for_path(lab: &Lab, node: usize, path: &str) {
    wait_until(&format!("path {path} at node {node}"), || filters(lab, node)["path"] == path);
}

fn pings(lab: &Lab, to: &str, options: &str) -> bool {
    let ping = format!("ping -n -c 2 -i 0.2 -W 1 {options}{to}");
    try_run(lab, "host-a", &ping).status.success()
}

/// Waits until packets from one host to the other get through, or do not.
#[track_caller]
fn wait_for_ping(lab: &Lab, to: &str, passes: bool) {
    wait_until(&format!("ping to {to}: {passes}"), || pings(lab, to, "") == passes);
}

const HOST_B: &str = "10.77.2.2";
const HOST_B_V6: &str = "fd77:2::2";

fn forwarding(lab: &Lab, at: &str) -> String {
    let settings = "net.ipv4.conf.eth0.forwarding net.ipv4.conf.crosslane0.forwarding net.ipv6.conf.all.forwarding";
    let output = try_run(lab, at, &format!("sysctl -n {settings}"));
    String::from_utf8_lossy(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn filters_are_honoured_at_ingress_and_egress_nodes() {
    let Some(lab) = lab("filters_are_honoured_at_ingress_and_egress_nodes", "") else { return };
    // Before the start.
    nft(&lab, "a", "prerouting", &format!("ip daddr {HOST_B} drop"));
    let up = lab.finish("up", &[]).must_succeed().stdout;
    let line = "filters = \"honour\": the kernel forwards because of packet filters: nftables inet table t, chain c, \
                hook prerouting";
    assert!(up.contains(&format!("node a: {line}")) && !up.contains("node b:"), "{up}");
    assert!(lab.finish("status", &[]).must_succeed().stdout.contains(line));
    assert_eq!(filters(&lab, 0)["path"], "kernel");
    assert_eq!(
        (filters(&lab, 1)["path"].as_str(), filters(&lab, 1)["found"].as_array().map(Vec::len)),
        (Some("router"), Some(0))
    );
    wait_for_ping(&lab, HOST_B_V6, true);
    wait_for_ping(&lab, HOST_B, false);
    assert_eq!(forwarding(&lab, "a"), "1 1 1");
    // A rule that packets only pass: kernel and router are one hop, in both directions.
    run(&lab, "a", "nft flush chain inet t c");
    wait_for_path(&lab, 0, "router");
    assert_eq!(forwarding(&lab, "a"), "0 0 0");
    wait_for_ping(&lab, HOST_B, true);
    run(&lab, "a", "nft add rule inet t c tcp dport 9 drop");
    nft(&lab, "b", "forward", "tcp dport 9 drop");
    wait_for_path(&lab, 0, "kernel");
    wait_for_path(&lab, 1, "kernel");
    for (to, exceeded) in [(HOST_B, "Time to live exceeded"), (HOST_B_V6, "Time exceeded")] {
        wait_for_ping(&lab, to, true);
        assert!(pings(&lab, to, "-t 2 "), "the cluster is one hop to {to}");
        let output = try_run(&lab, "host-a", &format!("ping -n -c 1 -W 2 -t 1 {to}"));
        assert!(String::from_utf8_lossy(&output.stdout).contains(exceeded), "{output:?}");
        // Replies have lost one hop of 64, too.
        let output = try_run(&lab, "host-a", &format!("ping -n -c 1 -W 2 {to}"));
        assert!(String::from_utf8_lossy(&output.stdout).contains("ttl=63"), "{output:?}");
    }
    let port = &lab.node(0)["ports"][0];
    assert!(port["left_to_kernel"]["forwarded by the kernel"].as_u64() > Some(0), "{port}");
    assert!(port["drops"]["forwarded by the kernel"].is_null(), "{port}");
    // At the egress node, while it runs.
    run(&lab, "b", &format!("nft add rule inet t c oifname eth0 ip daddr {HOST_B} drop"));
    wait_for_ping(&lab, HOST_B, false);
    assert!(pings(&lab, HOST_B_V6, ""));
    run(&lab, "b", "nft delete table inet t");
    run(&lab, "a", "nft delete table inet t");
    wait_for_path(&lab, 1, "router");
    wait_for_path(&lab, 0, "router");
    wait_for_ping(&lab, HOST_B, true);
    lab.finish("down", &[]).must_succeed();
}

#[test]
fn address_translation_of_a_node_applies_to_packets_of_its_hosts() {
    let test = "address_translation_of_a_node_applies_to_packets_of_its_hosts";
    let Some(lab) = lab(test, "addresses = [\"10.255.9.1\"]") else { return };
    lab.up();
    wait_for_ping(&lab, HOST_B, true);
    run(&lab, "a", "nft add table ip nat");
    run(&lab, "a", "nft add chain ip nat c { type nat hook postrouting priority 100 ; }");
    run(&lab, "a", "nft add rule ip nat c oifname crosslane0 masquerade");
    wait_for_path(&lab, 0, "kernel");
    run(&lab, "host-b", "nft add table ip t");
    run(&lab, "host-b", "nft add chain ip t c { type filter hook input priority 0 ; }");
    run(&lab, "host-b", "nft add rule ip t c ip saddr 10.255.9.1 icmp type echo-request counter");
    wait_until("echo requests with the translated source, and replies to the host", || {
        let is_answered = pings(&lab, HOST_B, "");
        let counted = String::from_utf8_lossy(&try_run(&lab, "host-b", "nft list table ip t").stdout).into_owned();
        is_answered && !counted.contains("packets 0 ")
    });
}

/// A network with ports of both nodes: the kernel that forwards reaches the other node's hosts through the router.
#[test]
fn a_network_of_two_nodes_is_reached_while_the_kernel_forwards() {
    let test = "a_network_of_two_nodes_is_reached_while_the_kernel_forwards";
    let Some(lab) = lab(test, "") else { return };
    // A second port of node b, on the network of node a's.
    netns::add(&lab.namespace("host-c"));
    let there = lab.namespace("host-c");
    lab.ip("b", &["link", "add", "eth1", "type", "veth", "peer", "name", "eth0", "netns", &there]);
    for (at, device, address) in [("b", "eth1", "10.77.1.3/24"), ("host-c", "eth0", "10.77.1.4/24")] {
        lab.ip(at, &["address", "add", address, "dev", device]);
        lab.ip(at, &["link", "set", device, "up"]);
    }
    lab.ip("host-c", &["route", "add", "default", "via", "10.77.1.3"]);
    // A second port of node a, with the host that sends.
    netns::add(&lab.namespace("host-d"));
    lab.join(("a", "eth1"), ("host-d", "eth0"), 4);
    lab.write(&PLAIN.replace("device = \"eth0\"\n", "device = \"eth0\"\n\n[[nodes.ports]]\ndevice = \"eth1\"\n"));
    lab.up();
    // Node b learns its host, and announces it.
    let is_answered = |at: &str, to: &str| try_run(&lab, at, &format!("ping -n -c 1 -W 1 {to}")).status.success();
    wait_until("an answer of node b", || is_answered("host-c", "10.77.2.2"));
    wait_until("the host behind node b", || is_answered("host-d", "10.77.1.4"));
    nft(&lab, "a", "forward", "tcp dport 9 drop");
    wait_for_path(&lab, 0, "kernel");
    wait_until("the host behind node b", || is_answered("host-d", "10.77.1.4"));
    let route = lab.ip("a", &["route", "get", "10.77.1.4"]);
    assert!(route.contains("dev crosslane0"), "{route}");
    assert!(is_answered("host-d", "10.77.1.2"), "a host of node a itself");
    run(&lab, "a", "nft delete table inet t");
    wait_for_path(&lab, 0, "router");
    wait_until("the removal of the route", || lab.ip("a", &["route", "get", "10.77.1.4"]).contains("dev eth0"));
    assert!(is_answered("host-d", "10.77.1.4"));
}

#[test]
fn legacy_iptables_and_tc_are_honoured() {
    let Some(lab) = lab("legacy_iptables_and_tc_are_honoured", "") else { return };
    lab.up();
    wait_for_ping(&lab, HOST_B, true);
    let drops = [
        (0, "a", format!("iptables-legacy -A FORWARD -d {HOST_B} -j DROP"), "iptables-legacy -F FORWARD"),
        (1, "b", "iptables-legacy -P FORWARD DROP".to_owned(), "iptables-legacy -P FORWARD ACCEPT"),
    ];
    for (index, node, add, remove) in drops {
        let output = try_run(&lab, node, &add);
        if !output.status.success() {
            println!("'{add}' is skipped: {}", String::from_utf8_lossy(&output.stderr));
            continue;
        }
        wait_for_ping(&lab, HOST_B, false);
        assert_eq!(filters(&lab, index)["path"], "kernel");
        assert!(pings(&lab, HOST_B_V6, ""), "the tables of IPv6 are empty");
        run(&lab, node, remove);
        wait_for_path(&lab, index, "router");
        wait_for_ping(&lab, HOST_B, true);
    }
    for (index, node, qdisc, direction) in [(0, "a", "ingress", "parent ffff:"), (1, "b", "clsact", "egress")] {
        let output = try_run(&lab, node, &format!("tc qdisc add dev eth0 {qdisc}"));
        if !output.status.success() {
            println!("qdisc {qdisc} is skipped: {}", String::from_utf8_lossy(&output.stderr));
            continue;
        }
        assert_eq!(filters(&lab, index)["path"], "router", "a qdisc without filters");
        let rule = format!("protocol ip u32 match ip dst {HOST_B}/32 action mirred egress redirect dev lo");
        let output = try_run(&lab, node, &format!("tc filter add dev eth0 {direction} {rule}"));
        if !output.status.success() {
            println!("tc u32 is skipped: {}", String::from_utf8_lossy(&output.stderr));
            continue;
        }
        wait_for_path(&lab, index, "kernel");
        wait_for_ping(&lab, HOST_B, false);
        run(&lab, node, &format!("tc qdisc del dev eth0 {qdisc}"));
        wait_for_path(&lab, index, "router");
        wait_for_ping(&lab, HOST_B, true);
    }
}

/// What the kernel does to forwarded packets without a filter in the narrow sense.
#[test]
fn arp_filters_shapers_ipsec_policies_and_policy_routing_are_honoured() {
    let test = "arp_filters_shapers_ipsec_policies_and_policy_routing_are_honoured";
    let Some(lab) = lab(test, "") else { return };
    lab.up();
    wait_for_ping(&lab, HOST_B, true);
    let policy = format!("dir fwd src 0.0.0.0/0 dst {HOST_B}/32");
    let arp = "nft add table arp t ; add chain arp t c { type filter hook input priority 0 ; policy drop ; }";
    let cases = [
        (arp.to_owned(), "nft delete table arp t".to_owned(), "nftables arp table t"),
        // Less than a packet.
        (
            "tc qdisc add dev eth0 root tbf rate 8kbit burst 64 latency 1ms".to_owned(),
            "tc qdisc del dev eth0 root".to_owned(),
            "tc qdisc tbf",
        ),
        (format!("ip xfrm policy add {policy} action block"), format!("ip xfrm policy del {policy}"), "IPsec policy"),
        (format!("ip rule add to {HOST_B} blackhole"), format!("ip rule del to {HOST_B} blackhole"), "policy routing"),
    ];
    for (add, remove, found) in cases {
        let output = try_run(&lab, "b", &add);
        if !output.status.success() {
            println!("'{add}' is skipped: {}", String::from_utf8_lossy(&output.stderr));
            continue;
        }
        wait_for_path(&lab, 1, "kernel");
        assert!(filters(&lab, 1)["found"][0].as_str().is_some_and(|text| text.contains(found)), "{found}");
        // The kernel's neighbours are asked again, and ARP filters keep the answers from it.
        run(&lab, "b", "ip neighbour flush dev eth0");
        wait_for_ping(&lab, HOST_B, false);
        run(&lab, "b", &remove);
        wait_for_path(&lab, 1, "router");
        wait_for_ping(&lab, HOST_B, true);
    }
}

#[test]
fn an_af_xdp_port_is_reopened_while_the_kernel_forwards() {
    let Some(lab) = lab("an_af_xdp_port_is_reopened_while_the_kernel_forwards", "") else { return };
    lab.write(&PLAIN.replacen("device = \"eth0\"\n", "device = \"eth0\"\nkind = \"af-xdp\"\n", 1));
    let up = lab.finish("up", &[]);
    if !up.status.success() {
        println!("an_af_xdp_port_is_reopened_while_the_kernel_forwards is skipped: no AF_XDP: {}", up.stderr);
        return;
    }
    let kind = || lab.node(0)["ports"][0]["kind"].clone();
    wait_for_ping(&lab, HOST_B, true);
    assert_eq!(kind(), "af-xdp");
    nft(&lab, "a", "forward", &format!("ip daddr {HOST_B} drop"));
    wait_until("a packet socket", || kind() == "af-packet");
    wait_for_ping(&lab, HOST_B, false);
    wait_for_ping(&lab, HOST_B_V6, true);
    run(&lab, "a", "nft delete table inet t");
    wait_until("AF_XDP", || kind() == "af-xdp");
    wait_for_ping(&lab, HOST_B, true);
}

#[test]
fn a_node_that_refuses_filters_does_not_start_and_stops_forwarding() {
    let test = "a_node_that_refuses_filters_does_not_start_and_stops_forwarding";
    let Some(lab) = lab(test, "filters = \"refuse\"") else { return };
    nft(&lab, "a", "postrouting", "tcp dport 9 drop");
    let refused = lab.finish("up", &[]);
    let words = "nodes[0].filters: packet filters would apply to forwarded packets: nftables inet table t, chain c, \
                 hook postrouting; remove them, or set filters = \"honour\" or \"ignore\"";
    assert!(!refused.status.success() && refused.stderr.contains(words), "{}", refused.stderr);
    run(&lab, "a", "nft delete table inet t");
    assert!(!lab.finish("up", &[]).must_succeed().stdout.contains("filters"));
    wait_for_ping(&lab, HOST_B, true);
    nft(&lab, "a", "ingress device eth0", "tcp dport 9 drop");
    wait_for_path(&lab, 0, "closed");
    wait_for_ping(&lab, HOST_B, false);
    let text = lab.finish("status", &[]).stdout;
    assert!(
        text.contains("nothing is forwarded because of packet filters: nftables inet table t, chain c, hook ingress"),
        "{text}"
    );
    // Other nodes do not send to it.
    wait_until("the loss of node a", || lab.node(1)["peers"][0]["state"] != "up");
    assert!(lab.log("a").contains("nothing is forwarded"));
    run(&lab, "a", "nft delete table inet t");
    wait_for_path(&lab, 0, "router");
    wait_for_ping(&lab, HOST_B, true);
    // The key is applied by a reload.
    nft(&lab, "a", "forward", &format!("ip daddr {HOST_B} drop"));
    wait_for_path(&lab, 0, "closed");
    let text = std::fs::read_to_string(lab.file()).expect("a file");
    std::fs::write(lab.file(), text.replace("\"refuse\"", "\"honour\"")).expect("a file");
    let changes = lab.finish("reload", &[]).must_succeed().stdout;
    assert!(changes.contains("filters: honour instead of refuse"), "{changes}");
    wait_for_path(&lab, 0, "kernel");
    wait_for_ping(&lab, HOST_B_V6, true);
    wait_for_ping(&lab, HOST_B, false);
}

#[test]
fn ignored_filters_are_named() {
    let Some(lab) = lab("ignored_filters_are_named", "filters = \"ignore\"") else { return };
    nft(&lab, "a", "prerouting", &format!("ip daddr {HOST_B} drop"));
    let up = lab.finish("up", &[]).must_succeed().stdout;
    let line = "filters = \"ignore\": packet filters do not apply to forwarded packets: nftables inet table t, \
                chain c, hook prerouting";
    assert!(up.contains(&format!("node a: {line}")), "{up}");
    assert!(lab.finish("status", &[]).must_succeed().stdout.contains(line));
    wait_for_ping(&lab, HOST_B, true);
    assert_eq!(forwarding(&lab, "a"), "0 0 0");
}
