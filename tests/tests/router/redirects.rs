//! ICMP redirects.

use system_tests::{Process, WAIT_MAX, paths, wait_until};

use super::cluster::{Lab, PLAIN};

/// Host h1 and an external router h2 are on the network of node a, which has a route by way of h2: h1, whose only route
/// is by way of node a, is redirected to h2, and its packets meanwhile are not lost.
#[test]
fn a_host_is_redirected_to_the_nearer_router_and_loses_nothing() {
    let namespaces = ["a", "b", "net", "h1", "h2", "h3"];
    let Some(lab) = Lab::new("a_host_is_redirected_to_the_nearer_router_and_loses_nothing", &namespaces) else {
        return;
    };
    lab.ip("net", &["link", "add", "bridge", "type", "bridge"]);
    lab.ip("net", &["link", "set", "bridge", "up"]);
    for (at, last) in [("a", 1), ("h1", 2), ("h2", 3)] {
        let there = lab.namespace("net");
        lab.ip(at, &["link", "add", "eth0", "type", "veth", "peer", "name", at, "netns", &there]);
        lab.ip("net", &["link", "set", "dev", at, "master", "bridge", "up"]);
        lab.ip(at, &["address", "add", &format!("10.77.1.{last}/24"), "dev", "eth0"]);
        lab.ip(at, &["link", "set", "eth0", "up"]);
    }
    lab.join(("b", "eth0"), ("h3", "eth0"), 2);
    lab.ip("h2", &["address", "add", "203.0.113.1/24", "dev", "lo"]);
    for host in ["h1", "h2"] {
        lab.ip(host, &["route", "add", "default", "via", "10.77.1.1"]);
    }
    // A new namespace has the machine's settings, which container engines change.
    let settings = ["all.forwarding=0", "all.accept_redirects=1", "eth0.accept_redirects=1"];
    let settings = settings.map(|setting| format!("net.ipv4.conf.{setting}"));
    let mut sysctl = lab.at("h1", paths::tool("sysctl"));
    assert!(sysctl.arg("-qw").args(settings).status().expect("sysctl runs").success());
    lab.ip("a", &["route", "add", "203.0.113.0/24", "via", "10.77.1.3"]);
    lab.write(PLAIN);
    lab.up();
    lab.wait_for_route("b", "203.0.113.1", Some("a"));
    let redirects = || lab.node(0)["redirects_sent"].as_u64().expect("a number");
    // A host on another network gets no redirect.
    lab.ping("h3", "203.0.113.1").must_succeed();
    assert_eq!(redirects(), 0);
    let mut ping = lab.at("h1", paths::tool("ping"));
    Process::start(ping.args(["-n", "-c", "3", "-i", "0.2", "-w", "20", "203.0.113.1"])).wait(WAIT_MAX).must_succeed();
    let route = || lab.ip("h1", &["route", "get", "203.0.113.1"]);
    wait_until("a route by the nearer router", || route().contains("via 10.77.1.3"));
    assert!(redirects() > 0);
    assert!(lab.ip("h1", &["route", "get", "203.0.113.2"]).contains("via 10.77.1.1"), "only for this host");
}
