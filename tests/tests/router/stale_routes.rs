//! Routing daemons that restart: their routes vanish from the kernel and come back.

use serde_json::Value;
use system_tests::process::Process;
use system_tests::{WAIT_MAX, paths, wait_for, wait_until};

use super::cluster::{Lab, PLAIN};
use super::{Daemons, bgp, folder_of_daemons};

/// The protocol number of BGP's routes in the kernel (`rtm_protocol`).
const BGP: &str = "186";
/// Networks behind host h1. The kernel removes them in this order: the last one, which is pinged, goes when no route of
/// the protocol is left.
const NETWORKS: [&str; 3] = ["192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"];
const PINGED: &str = "203.0.113.1";

fn write(lab: &Lab, stale_routes: &str) {
    let timeouts = format!("\n[timeouts]\nstale_routes_ns = \"{stale_routes}\"\n\n[[nodes]]");
    lab.write(&PLAIN.replacen("\n[[nodes]]", &timeouts, 1));
}

fn add_routes(lab: &Lab) {
    for network in NETWORKS {
        lab.ip("a", &["route", "replace", network, "via", "10.77.1.2", "proto", BGP, "metric", "20"]);
    }
}

fn remove_routes(lab: &Lab) {
    lab.ip("a", &["route", "flush", "proto", BGP]);
}

/// The number of stale routes at node a.
fn stale(lab: &Lab) -> u64 {
    lab.node(0)["routes"]["stale"].as_u64().expect("a number")
}

/// Host h1, behind node a, has the networks of BGP; host h2 is behind node b.
#[test]
fn no_packet_is_lost_while_a_routing_daemon_restarts() {
    let Some(lab) = Lab::new("no_packet_is_lost_while_a_routing_daemon_restarts", &["a", "b", "h1", "h2"]) else {
        return;
    };
    lab.join(("a", "eth0"), ("h1", "eth0"), 1);
    lab.join(("b", "eth0"), ("h2", "eth0"), 2);
    lab.ip("h1", &["address", "add", "203.0.113.1/24", "dev", "lo"]);
    write(&lab, "3600 s");
    lab.up();
    add_routes(&lab);
    lab.wait_for_route("b", PINGED, Some("a"));
    lab.ping("h2", PINGED).must_succeed();
    a_restart_loses_nothing(&lab);
    a_withdrawn_route_is_followed(&lab);
    routes_by_an_interface_that_is_down_are_not_kept(&lab);
    stale_routes_are_removed_when_the_timer_ends(&lab);
}

fn a_restart_loses_nothing(lab: &Lab) {
    // From before the routes vanish until after they have come back.
    let mut ping = lab.at("h2", paths::tool("ping"));
    let pings = Process::start(ping.args(["-n", "-c", "300", "-i", "0.01", "-W", "10", PINGED]));
    pings.wait_until("the first responses", WAIT_MAX, |pings| pings.stdout().contains("icmp_seq=5 "));
    remove_routes(lab);
    wait_for("stale routes", || stale(lab), |stale| *stale >= 1);
    assert_eq!(lab.ip("a", &["route", "show", "proto", BGP]), "", "the kernel has none");
    let status = lab.finish("status", &["--node", "a"]).must_succeed().stdout;
    assert!(status.contains(&format!("stale routes of protocol {BGP}")), "{status}");
    let of_bgp = &lab.node(0)["stale_routes"][0];
    assert!(of_bgp["protocol"] == 186 && of_bgp["left_ms"].as_u64().is_some_and(|left| left > 0), "{of_bgp}");
    lab.ping("h2", PINGED).must_succeed();
    lab.wait_for_route("b", PINGED, Some("a"));
    std::thread::sleep(std::time::Duration::from_secs(1));
    add_routes(lab);
    wait_until("the end of the restart", || stale(lab) == 0);
    let finished = pings.wait(WAIT_MAX).must_succeed();
    assert!(finished.stdout.contains("300 packets transmitted, 300 received"), "{finished}");
}

fn a_withdrawn_route_is_followed(lab: &Lab) {
    lab.ip("a", &["route", "del", NETWORKS[0], "proto", BGP]);
    lab.wait_for_route("b", "192.0.2.1", None);
    lab.wait_for_route("b", PINGED, Some("a"));
    assert_eq!(stale(lab), 0);
}

fn routes_by_an_interface_that_is_down_are_not_kept(lab: &Lab) {
    lab.ip("a", &["link", "set", "eth0", "down"]);
    lab.wait_for_route("b", PINGED, None);
    lab.ip("a", &["link", "set", "eth0", "up"]);
    let is_up = |status: &Value| status["ports"][0]["is_up"] == true;
    wait_for("the port", || lab.node(0), is_up);
    assert_eq!((stale(lab), lab.routes("b", PINGED)), (0, vec![]));
}

fn stale_routes_are_removed_when_the_timer_ends(lab: &Lab) {
    write(lab, "1 s");
    let reloaded = lab.finish("reload", &[]).must_succeed().stdout;
    assert!(reloaded.contains("timeouts.stale_routes_ns"), "{reloaded}");
    add_routes(lab);
    lab.wait_for_route("b", PINGED, Some("a"));
    let kept = |lab: &Lab| lab.log("a").matches("have all vanished").count();
    let before = kept(lab);
    remove_routes(lab);
    lab.wait_for_route("b", PINGED, None);
    assert_eq!((kept(lab), stale(lab)), (before + 1, 0));
    assert!(lab.log("a").contains("did not come back in time"), "{}", lab.log("a"));
}

/// The same with FRR: `bgpd` of node a is killed and started again, and learns the network of host h1 anew.
#[test]
fn no_packet_is_lost_while_bgpd_restarts() {
    let Some(lab) = Lab::new("no_packet_is_lost_while_bgpd_restarts", &["a", "b", "h1", "h2"]) else { return };
    lab.join(("a", "eth0"), ("h1", "eth0"), 1);
    lab.join(("b", "eth0"), ("h2", "eth0"), 2);
    lab.ip("h1", &["address", "add", "203.0.113.1/24", "dev", "lo"]);
    write(&lab, "3600 s");
    lab.up();
    let folder = folder_of_daemons();
    let (node, host) = (("10.77.1.1", 65000), ("10.77.1.2", 65001));
    let mut of_node = Daemons::start(&lab, folder.path(), "a", &bgp(node, host, "redistribute kernel"));
    let _of_host = Daemons::start(&lab, folder.path(), "h1", &bgp(host, node, "network 203.0.113.0/24"));
    lab.wait_for_route("b", PINGED, Some("a"));
    lab.ping("h2", PINGED).must_succeed();
    let mut ping = lab.at("h2", paths::tool("ping"));
    let pings = Process::start(ping.args(["-n", "-c", "300", "-i", "0.02", "-W", "10", PINGED]));
    pings.wait_until("the first responses", WAIT_MAX, |pings| pings.stdout().contains("icmp_seq=5 "));
    of_node.restart_bgpd(&lab, folder.path(), "a");
    wait_until("stale routes", || lab.log("a").contains("have all vanished"));
    wait_until("the end of the restart", || stale(&lab) == 0);
    let finished = pings.wait(WAIT_MAX).must_succeed();
    assert!(finished.stdout.contains("300 packets transmitted, 300 received"), "{finished}");
}
