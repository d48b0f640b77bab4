//! Routes of routing daemons that restart.

use super::super::super::stale_routes::{BURST_GAP_NS, StaleEvent};
use super::*;

const BGP: u8 = 186;
const KEEP_NS: u64 = 60_000_000_000;
const PREFIXES: [&str; 2] = ["192.0.2.0/24", "198.51.100.0/24"];
const ONE: &str = "10.1.0.2";
const OTHER: &str = "10.2.0.2";

fn gone(prefix: &str) -> Change {
    Change::RouteGone(RouteKey { prefix: net(prefix), metric: 20 })
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A node with a route of BGP to each prefix, by these gateways of `eth0` and `eth1`.
fn local_with(gateways: &[(InterfaceIndex, Option<&str>)]) -> LocalRoutes {
    let mut local = local();
    local.set_stale_routes_ns(KEEP_NS);
    local.apply_kernel_change(address(ETH0, "10.1.0.1/24"));
    local.apply_kernel_change(address(ETH1, "10.2.0.1/24"));
    for prefix in PREFIXES {
        local.apply_kernel_change(route(prefix, 20, BGP, gateways));
    }
    local.adjacency_pinned(PortId(0), ip(ONE), Some(AdjacencyId(5)));
    local.adjacency_pinned(PortId(1), ip(OTHER), Some(AdjacencyId(6)));
    assert_eq!(announced(&mut local), 2);
    local.take_effects();
    local
}

/// The number of announced routes among the prefixes.
fn announced(local: &mut LocalRoutes) -> usize {
    let all = all(local);
    all.iter().filter(|(prefix, hops)| PREFIXES.contains(&prefix.as_str()) && !hops.is_empty()).count()
}

fn stale(local: &LocalRoutes) -> Vec<usize> {
    local.stale_routes().map(|of_protocol| of_protocol.routes).collect()
}

/// The daemon's routes vanish.
fn restart(local: &mut LocalRoutes) {
    PREFIXES.iter().for_each(|prefix| local.apply_kernel_change(gone(prefix)));
    local.poll_stale_routes(0);
}

#[test]
fn routes_of_a_restarting_daemon_stay_announced_until_they_come_back_or_time_out() {
    let mut local = local_with(&[(ETH0, Some(ONE))]);
    restart(&mut local);
    assert!(matches!(local.take_effects()[..], [Effect::StaleRoutes(StaleEvent::Kept(_))]));
    assert_eq!((announced(&mut local), stale(&local), local.stale_routes_due_ns()), (2, vec![2], Some(KEEP_NS)));
    local.apply_kernel_change(route(PREFIXES[0], 20, BGP, &[(ETH0, Some(ONE))]));
    assert_eq!((announced(&mut local), stale(&local)), (2, vec![1]));
    local.poll_stale_routes(KEEP_NS);
    let (_, other) = (routes_to(&mut local, PREFIXES[0]), routes_to(&mut local, PREFIXES[1]));
    assert_eq!((announced(&mut local), other, stale(&local)), (1, (None, None), vec![]));
    let expired = Effect::StaleRoutes(StaleEvent::Expired { protocol: BGP, routes: 1 });
    assert_eq!(local.take_effects(), [expired]);
    local.apply_kernel_change(gone(PREFIXES[0]));
    local.poll_stale_routes(KEEP_NS);
    local.set_stale_routes_ns(0);
    local.poll_stale_routes(KEEP_NS);
    assert_eq!((announced(&mut local), local.gateways.len()), (0, 0));
}

#[test]
fn a_withdrawn_route_of_several_is_followed() {
    let mut local = local_with(&[(ETH0, Some(ONE))]);
    local.apply_kernel_change(gone(PREFIXES[0]));
    local.poll_stale_routes(0);
    local.poll_stale_routes(BURST_GAP_NS);
    assert_eq!((announced(&mut local), stale(&local), local.take_effects()), (1, vec![], vec![]));
    // By default, at once.
    local.set_stale_routes_ns(0);
    local.apply_kernel_change(gone(PREFIXES[1]));
    assert_eq!(announced(&mut local), 0);
}

#[test]
fn routes_by_a_port_that_goes_are_not_kept() {
    let both = [(ETH0, Some(ONE)), (ETH1, Some(OTHER))];
    for down in [link(ETH0, "eth0", false), Change::LinkGone(ETH0)] {
        // Before, with and after the removal of the routes.
        for order in 0..3 {
            let mut local = local_with(&both[..1]);
            if order == 0 {
                local.apply_kernel_change(down.clone());
                local.poll_stale_routes(0);
            }
            PREFIXES.iter().for_each(|prefix| local.apply_kernel_change(gone(prefix)));
            if order == 2 {
                local.poll_stale_routes(0);
                assert_eq!(stale(&local), [2]);
            }
            local.apply_kernel_change(down.clone());
            local.poll_stale_routes(0);
            local.apply_kernel_change(link(ETH0, "eth0", true));
            assert_eq!((announced(&mut local), stale(&local)), (0, vec![]), "order {order}");
        }
    }
    let mut local = local_with(&both);
    restart(&mut local);
    local.apply_kernel_change(link(ETH0, "eth0", false));
    local.poll_stale_routes(0);
    local.apply_kernel_change(link(ETH0, "eth0", true));
    assert_eq!(hops(routes_to(&mut local, PREFIXES[0]).1), [(1, 6)], "another next hop is still used");
}

#[test]
fn routes_by_a_gateway_that_does_not_answer_are_not_kept() {
    let mut local = local_with(&[(ETH0, Some(ONE))]);
    restart(&mut local);
    local.neighbour_down(PortId(0), ip("10.1.0.77"));
    local.poll_stale_routes(0);
    assert_eq!(announced(&mut local), 2, "another neighbour");
    local.neighbour_down(PortId(0), ip(ONE));
    local.poll_stale_routes(0);
    assert_eq!((announced(&mut local), stale(&local)), (0, vec![]));
    // One that has gone before its routes: BGP notices later.
    let mut local = local_with(&[(ETH0, Some(ONE))]);
    local.neighbour_down(PortId(0), ip(ONE));
    assert_eq!(announced(&mut local), 2);
    restart(&mut local);
    assert_eq!((announced(&mut local), stale(&local)), (0, vec![]));
    // One that has come back.
    let mut local = local_with(&[(ETH0, Some(ONE))]);
    local.neighbour_down(PortId(0), ip(ONE));
    local.neighbour_up(PortId(0), ip(ONE), AdjacencyId(5));
    restart(&mut local);
    assert_eq!((announced(&mut local), stale(&local)), (2, vec![2]));
}

#[test]
fn routes_of_a_network_whose_address_was_removed_are_not_kept() {
    let mut local = local_with(&[(ETH0, Some(ONE))]);
    local.apply_kernel_change(Change::AddressGone { interface: ETH0, network: net("10.1.0.1/24") });
    restart(&mut local);
    assert_eq!((announced(&mut local), stale(&local)), (0, vec![]));
}

#[test]
fn a_stale_route_gives_way_to_one_with_another_metric_or_of_another_protocol() {
    let mut local = local_with(&[(ETH0, Some(ONE))]);
    restart(&mut local);
    local.apply_kernel_change(route(PREFIXES[0], 30, BGP, &[(ETH1, Some(OTHER))]));
    local.apply_kernel_change(route(PREFIXES[1], 20, 4, &[(ETH1, Some(OTHER))]));
    local.adjacency_pinned(PortId(1), ip(OTHER), Some(AdjacencyId(6)));
    assert_eq!(stale(&local), Vec::<usize>::new());
    local.update_routes(usize::MAX);
    local.dirty.extend(PREFIXES.map(net));
    let changes = local.update_routes(usize::MAX);
    let found: Vec<_> = changes.into_iter().map(|change| hops(change.announced)).collect();
    assert_eq!(found, [[(1, 6)], [(1, 6)]]);
}
