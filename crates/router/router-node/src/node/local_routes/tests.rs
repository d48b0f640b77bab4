use super::*;
use crate::cluster::Node;
use packet::ethernet::MacAddress;
use router_ports::netlink::{Neighbour as KernelNeighbour, RouteHop};

const ETH0: InterfaceIndex = InterfaceIndex(10);
const ETH1: InterfaceIndex = InterfaceIndex(11);
const MANAGEMENT: InterfaceIndex = InterfaceIndex(12);
const LO: InterfaceIndex = InterfaceIndex(1);
const SLOW: InterfaceIndex = InterfaceIndex(20);
const KERNEL_HOP: AnnouncedHop = AnnouncedHop { port: u8::MAX, adjacency: 0 };

fn link(index: InterfaceIndex, name: &str, is_up: bool) -> Change {
    let mac = Some(MacAddress([2, 0, 0, 0, 0, index.0 as u8]));
    Change::Link(Link {
        index,
        name: name.to_owned(),
        mac,
        mtu_bytes: 1500,
        is_up,
        has_carrier: is_up,
        controller: None,
    })
}

fn port_of_file(device: &str) -> PortOfNode {
    let text = format!("version = 1\n[[nodes]]\nname = \"a\"\n[[nodes.ports]]\ndevice = \"{device}\"\n");
    let text = text + "[[nodes]]\nname = \"b\"\n[[nodes.ports]]\ndevice = \"x\"\n";
    crate::cluster::ClusterFile::parse("c", text.as_bytes()).unwrap().cluster.nodes[0].ports[0].clone()
}

/// Two ports, both up.
fn local() -> LocalRoutes {
    let mut local = LocalRoutes::new(Some(SLOW));
    for (interface, device) in [(ETH0, "eth0"), (ETH1, "eth1")] {
        let mut config = PortConfig::new(MacAddress([2, 0, 0, 0, 0, interface.0 as u8]), 1500);
        config.has_kernel = true;
        local.add_port(OpenedPort { interface: Some(interface), config }, &port_of_file(device));
        local.apply_kernel_change(link(interface, device, true));
    }
    for (interface, name) in [(LO, "lo"), (MANAGEMENT, "mgmt0"), (SLOW, "crosslane0")] {
        local.apply_kernel_change(link(interface, name, true));
    }
    local.update_routes(usize::MAX);
    local.take_effects();
    local
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn address(interface: InterfaceIndex, network: &str) -> Change {
    Change::Address(Address { interface, network: net(network), peer: None, is_usable: true })
}

fn route(prefix: &str, metric: u32, protocol: u8, hops: &[(InterfaceIndex, Option<&str>)]) -> Change {
    let hop = |(interface, gateway): &(InterfaceIndex, Option<&str>)| RouteHop {
        interface: *interface,
        gateway: gateway.map(|gateway| gateway.parse().unwrap()),
        weight: 1,
        is_encapsulated: false,
    };
    let hops = hops.iter().map(hop).collect();
    let key = RouteKey { prefix: net(prefix), metric };
    Change::Route(Route { key, protocol, kind: KernelKind::Unicast, hops, mtu_bytes: None })
}

/// The route to a prefix in this node's table, and the announced one.
fn routes_to(local: &mut LocalRoutes, prefix: &str) -> (Option<AnnouncedRoute>, Option<AnnouncedRoute>) {
    let own = local
        .update_routes(usize::MAX)
        .into_iter()
        .rfind(|change| change.prefix == net(prefix))
        .and_then(|change| change.announced);
    let (all, _) = local.announcements().changes_after(0, usize::MAX);
    (own, all.into_iter().find(|change| change.prefix == net(prefix)).and_then(|change| change.announced))
}

fn hops(announced: Option<AnnouncedRoute>) -> Vec<(u8, u16)> {
    announced.map_or_else(Vec::new, |found| found.hops.iter().map(|hop| (hop.port, hop.adjacency)).collect())
}

#[test]
fn a_network_of_a_port_is_announced_and_its_address_is_the_node_itself() {
    let mut local = local();
    local.apply_kernel_change(address(ETH0, "10.1.0.1/24"));
    local.apply_kernel_change(route("10.1.0.0/24", 0, PROTOCOL_KERNEL, &[(ETH0, None)]));
    let (own, announced) = routes_to(&mut local, "10.1.0.0/24");
    assert_eq!(own, announced);
    assert_eq!(announced.as_ref().map(|found| found.origin), Some(Origin::Connected));
    assert_eq!(hops(announced), [(0, 0)]);
    local.apply_kernel_change(address(ETH0, "10.1.0.1/24"));
    local.dirty.insert(net("10.1.0.1/32"));
    assert_eq!(routes_to(&mut local, "10.1.0.1/32").0.unwrap().hops, [KERNEL_HOP]);
    let effects = local.take_effects();
    assert!(effects.contains(&Effect::AddLocalAddress("10.1.0.1".parse().unwrap())));
    assert!(
        matches!(&effects[1], Effect::ConfigurePort(PortId(0), config) if config.addresses == [net("10.1.0.1/24")])
    );
    local.apply_kernel_change(Change::AddressGone { interface: ETH0, network: net("10.1.0.1/24") });
    assert_eq!(routes_to(&mut local, "10.1.0.1/32"), (None, None));
}

#[test]
fn a_gateway_is_pinned_before_its_routes_are_announced_and_unpinned_after() {
    let mut local = local();
    local.apply_kernel_change(route("192.0.2.0/24", 20, 186, &[(ETH0, Some("10.1.0.2"))]));
    local.apply_kernel_change(route("198.51.100.0/24", 20, 186, &[(ETH0, Some("10.1.0.2"))]));
    let gateway: IpAddr = "10.1.0.2".parse().unwrap();
    assert_eq!(local.take_effects(), [Effect::PinAdjacency(PortId(0), gateway)]);
    assert_eq!(routes_to(&mut local, "192.0.2.0/24").1, None);
    local.adjacency_pinned(PortId(0), gateway, Some(AdjacencyId(5)));
    assert_eq!(hops(routes_to(&mut local, "192.0.2.0/24").1), [(0, 5)]);
    local.apply_kernel_change(Change::RouteGone(RouteKey { prefix: net("192.0.2.0/24"), metric: 20 }));
    assert_eq!(routes_to(&mut local, "192.0.2.0/24"), (None, None));
    assert_eq!(local.take_effects(), []);
    local.apply_kernel_change(Change::RouteGone(RouteKey { prefix: net("198.51.100.0/24"), metric: 20 }));
    assert_eq!(local.take_effects(), [Effect::UnpinAdjacency(AdjacencyId(5))]);
    assert!(local.gateways.len() == 0 && local.routes.iter().next().is_none());
}

#[test]
fn a_gateway_without_routes_is_unpinned_when_its_adjacency_arrives() {
    let mut local = local();
    let gateway: IpAddr = "10.1.0.2".parse().unwrap();
    local.apply_kernel_change(route("192.0.2.0/24", 20, 186, &[(ETH0, Some("10.1.0.2"))]));
    local.apply_kernel_change(Change::RouteGone(RouteKey { prefix: net("192.0.2.0/24"), metric: 20 }));
    local.take_effects();
    local.adjacency_pinned(PortId(0), gateway, Some(AdjacencyId(5)));
    assert_eq!(local.take_effects(), [Effect::UnpinAdjacency(AdjacencyId(5))]);
    assert!(local.gateways.len() == 0);
}

#[test]
fn a_gateway_that_found_no_room_is_requested_again_when_there_is_some() {
    let mut local = local();
    let [one, two, three] = ["10.1.0.2", "10.1.0.3", "10.1.0.4"].map(|address| address.parse::<IpAddr>().unwrap());
    let gone = |prefix: &str| Change::RouteGone(RouteKey { prefix: net(prefix), metric: 20 });
    for (prefix, gateway) in
        [("192.0.2.0/24", "10.1.0.2"), ("198.51.100.0/24", "10.1.0.3"), ("203.0.113.0/24", "10.1.0.4")]
    {
        local.apply_kernel_change(route(prefix, 20, 186, &[(ETH0, Some(gateway))]));
    }
    local.adjacency_pinned(PortId(0), one, Some(AdjacencyId(5)));
    local.adjacency_pinned(PortId(0), two, None);
    local.adjacency_pinned(PortId(0), three, None);
    local.take_effects();
    assert_eq!(routes_to(&mut local, "198.51.100.0/24").1, None);
    // A gateway that no route uses is not requested; when a route uses it again, it is.
    local.apply_kernel_change(gone("203.0.113.0/24"));
    assert_eq!((local.take_effects(), local.gateways.len()), (Vec::new(), 2));
    local.apply_kernel_change(gone("192.0.2.0/24"));
    assert_eq!(local.take_effects(), [Effect::UnpinAdjacency(AdjacencyId(5)), Effect::PinAdjacency(PortId(0), two)]);
    local.adjacency_pinned(PortId(0), two, Some(AdjacencyId(5)));
    assert_eq!(hops(routes_to(&mut local, "198.51.100.0/24").1), [(0, 5)]);
    local.apply_kernel_change(route("203.0.113.0/24", 20, 186, &[(ETH0, Some("10.1.0.4"))]));
    assert_eq!(local.take_effects(), [Effect::PinAdjacency(PortId(0), three)]);
}

#[test]
fn an_mtu_below_the_ipv4_minimum_takes_the_port_down_but_not_the_node() {
    let mut local = local();
    let with_mtu = |mtu_bytes| match link(ETH0, "eth0", true) {
        Change::Link(link) => Change::Link(Link { mtu_bytes, ..link }),
        other => other,
    };
    for (mtu_bytes, is_up) in [(67, false), (68, true), (0, false), (1500, true)] {
        local.apply_kernel_change(with_mtu(mtu_bytes));
        let effects = local.take_effects();
        let [Effect::ConfigurePort(PortId(0), config)] = &effects[..] else { panic!("{effects:?}") };
        assert_eq!((config.is_up, config.mtu_bytes), (is_up, mtu_bytes.max(68) as u16));
    }
}

#[test]
fn equal_next_hops_are_all_announced_unless_their_port_is_down() {
    let mut local = local();
    local.apply_kernel_change(route("192.0.2.0/24", 20, 186, &[(ETH0, Some("10.1.0.2")), (ETH1, Some("10.2.0.2"))]));
    local.adjacency_pinned(PortId(0), "10.1.0.2".parse().unwrap(), Some(AdjacencyId(5)));
    local.adjacency_pinned(PortId(1), "10.2.0.2".parse().unwrap(), Some(AdjacencyId(6)));
    assert_eq!(hops(routes_to(&mut local, "192.0.2.0/24").1), [(0, 5), (1, 6)]);
    local.apply_kernel_change(link(ETH0, "eth0", false));
    assert_eq!(hops(routes_to(&mut local, "192.0.2.0/24").1), [(1, 6)]);
    assert_eq!(local.announcements().mtus_bytes().0, [0, 1500]);
    local.apply_kernel_change(Change::LinkGone(ETH1));
    assert_eq!(routes_to(&mut local, "192.0.2.0/24"), (None, None));
    local.apply_kernel_change(link(ETH0, "eth0", true));
    assert_eq!(hops(routes_to(&mut local, "192.0.2.0/24").1), [(0, 5)]);
}

#[test]
fn weights_are_announced_as_shares_of_the_next_hops_that_are_up() {
    let mut local = local();
    let weighted = |weights: [u16; 2]| {
        let mut change = route("192.0.2.0/24", 20, 4, &[(ETH0, Some("10.1.0.2")), (ETH1, None)]);
        if let Change::Route(route) = &mut change {
            route.hops.iter_mut().zip(weights).for_each(|(hop, weight)| hop.weight = weight);
        }
        change
    };
    local.apply_kernel_change(weighted([30, 10]));
    local.adjacency_pinned(PortId(0), "10.1.0.2".parse().unwrap(), Some(AdjacencyId(5)));
    assert_eq!(hops(routes_to(&mut local, "192.0.2.0/24").1), [(0, 5), (0, 5), (0, 5), (1, 0)]);
    local.apply_kernel_change(weighted([256, 1]));
    let announced = hops(routes_to(&mut local, "192.0.2.0/24").1);
    assert_eq!(announced, [&[(0, 5); 15][..], &[(1, 0)]].concat());
    local.apply_kernel_change(link(ETH1, "eth1", false));
    assert_eq!(hops(routes_to(&mut local, "192.0.2.0/24").1), [(0, 5)]);
}

#[test]
fn the_lowest_metric_is_announced_and_the_next_after_its_removal() {
    let mut local = local();
    local.apply_kernel_change(route("192.0.2.0/24", 100, 4, &[(ETH1, None)]));
    local.apply_kernel_change(route("192.0.2.0/24", 20, 4, &[(ETH0, None)]));
    let (_, announced) = routes_to(&mut local, "192.0.2.0/24");
    assert_eq!((announced.clone().unwrap().metric, hops(announced)), (20, vec![(0, 0)]));
    local.apply_kernel_change(Change::RouteGone(RouteKey { prefix: net("192.0.2.0/24"), metric: 20 }));
    let (_, announced) = routes_to(&mut local, "192.0.2.0/24");
    assert_eq!((announced.clone().unwrap().metric, hops(announced)), (100, vec![(1, 0)]));
}

#[test]
fn neighbours_are_host_routes_and_lost_events_are_recovered() {
    let mut local = local();
    let (one, other): (IpAddr, IpAddr) = ("10.1.0.9".parse().unwrap(), "fd00::9".parse().unwrap());
    local.neighbour_up(PortId(0), one, AdjacencyId(3));
    local.neighbour_up(PortId(1), other, AdjacencyId(4));
    local.neighbour_up(PortId(1), "fe80::9".parse().unwrap(), AdjacencyId(7));
    assert_eq!(hops(routes_to(&mut local, "10.1.0.9/32").1), [(0, 3)]);
    local.dirty.insert(net("fd00::9/128"));
    assert_eq!(hops(routes_to(&mut local, "fd00::9/128").1), [(1, 4)]);
    assert_eq!(local.candidates.len(), 2, "link-local neighbours have no routes");
    local.replace_neighbours([(PortId(0), one, AdjacencyId(8))]);
    assert_eq!(routes_to(&mut local, "fd00::9/128"), (None, None));
    local.neighbour_down(PortId(0), one);
    assert_eq!(routes_to(&mut local, "10.1.0.9/32"), (None, None));
    assert!(local.candidates.is_empty());
}

#[test]
fn a_host_route_is_preferred_to_a_neighbour_whatever_its_metric_and_node() {
    let mut local = local();
    for (address, prefix) in [("10.1.0.9", "10.1.0.9/32"), ("fd00::9", "fd00::9/128")] {
        local.neighbour_up(PortId(0), address.parse().unwrap(), AdjacencyId(3));
        let neighbour = routes_to(&mut local, prefix).1.unwrap();
        assert_eq!((neighbour.origin, neighbour.hops[0].adjacency), (Origin::Neighbour, 3));
        for metric in [0, 20, 1024, u32::MAX] {
            let key = RouteKey { prefix: net(prefix), metric };
            for (kind, expected) in
                [(KernelKind::Blackhole, RouteKind::Blackhole), (KernelKind::Prohibit, RouteKind::Prohibited)]
            {
                local.apply_kernel_change(Change::Route(Route {
                    key,
                    protocol: 4,
                    kind,
                    hops: Vec::new(),
                    mtu_bytes: None,
                }));
                let (own, announced) = routes_to(&mut local, prefix);
                assert_eq!(own.as_ref().map(|own| own.kind), Some(expected), "{prefix} metric {metric}");
                assert!(
                    own == announced && own.is_some_and(|own| own.metric < neighbour.metric),
                    "other nodes prefer it too"
                );
            }
            local.apply_kernel_change(route(prefix, metric, 4, &[(ETH1, None)]));
            assert_eq!(hops(routes_to(&mut local, prefix).1), [(1, 0)]);
            local.apply_kernel_change(Change::RouteGone(key));
            assert_eq!(
                routes_to(&mut local, prefix).1.as_ref(),
                Some(&neighbour),
                "the neighbour is announced again after the removal"
            );
        }
    }
}

#[test]
fn a_local_address_is_preferred_to_a_neighbour() {
    let (mut one, mut other) = (local(), local());
    one.neighbour_up(PortId(0), "10.1.0.9".parse().unwrap(), AdjacencyId(3));
    other.apply_kernel_change(address(ETH0, "10.1.0.9/24"));
    let metric = |local: &mut LocalRoutes| routes_to(local, "10.1.0.9/32").1.unwrap().metric;
    assert!(metric(&mut other) < metric(&mut one), "packets are not shared between both");
}

#[test]
fn routes_and_addresses_of_other_interfaces_are_not_announced() {
    let mut local = local();
    local.apply_kernel_change(address(MANAGEMENT, "192.168.0.7/24"));
    local.apply_kernel_change(route("192.168.0.0/24", 0, PROTOCOL_KERNEL, &[(MANAGEMENT, None)]));
    local.apply_kernel_change(route("0.0.0.0/0", 0, 4, &[(MANAGEMENT, Some("192.168.0.1"))]));
    local.apply_kernel_change(address(LO, "10.255.0.1/32"));
    local.apply_kernel_change(address(LO, "127.0.0.1/8"));
    local.apply_kernel_change(address(SLOW, "10.255.0.2/32"));
    let own: Vec<IpNet> = local.update_routes(usize::MAX).iter().map(|change| change.prefix).collect();
    assert_eq!(own, [net("10.255.0.1/32"), net("10.255.0.2/32"), net("192.168.0.7/32")]);
    let (announced, _) = local.announcements().changes_after(0, usize::MAX);
    assert_eq!(announced.iter().map(|change| change.prefix).collect::<Vec<_>>(), own[..2]);
}

/// The rejected routes that are to be logged.
fn rejected(local: &mut LocalRoutes) -> Vec<(String, RejectedRoute)> {
    let routes_to = |effect| match effect {
        Effect::RouteRejected(prefix, rejected) => Some((prefix.to_string(), rejected)),
        _ => None,
    };
    local.take_effects().into_iter().filter_map(routes_to).collect()
}

#[test]
fn a_route_by_another_interface_is_logged_once_and_counted_while_it_exists() {
    let mut local = local();
    let no_port = |is_entire_route| RejectedRoute { reason: RejectReason::NoPort(MANAGEMENT), is_entire_route };
    let management = route("0.0.0.0/0", 0, 4, &[(MANAGEMENT, Some("192.168.0.1"))]);
    let partial = route("192.0.2.0/24", 0, 4, &[(ETH0, None), (MANAGEMENT, Some("192.168.0.1"))]);
    local.apply_kernel_change(management.clone());
    local.apply_kernel_change(partial.clone());
    local.apply_kernel_change(route("192.168.0.0/24", 0, PROTOCOL_KERNEL, &[(MANAGEMENT, None)]));
    local.apply_kernel_change(route("0.0.0.0/0", 7, 4, &[(SLOW, None)]));
    local.apply_kernel_change(route("fe80::/64", 256, PROTOCOL_KERNEL, &[(MANAGEMENT, None)]));
    let expected = [("0.0.0.0/0", no_port(true)), ("192.0.2.0/24", no_port(false)), ("192.168.0.0/24", no_port(true))];
    assert_eq!(rejected(&mut local), expected.map(|(prefix, reason)| (prefix.to_owned(), reason)));
    assert_eq!(hops(routes_to(&mut local, "192.0.2.0/24").1), [(0, 0)], "the other next hop is announced");
    assert_eq!(local.rejected().no_port, 3);
    local.apply_kernel_change(management);
    local.apply_kernel_change(partial);
    assert_eq!((rejected(&mut local), local.rejected().no_port), (Vec::new(), 3));
    local.apply_kernel_change(route("0.0.0.0/0", 0, 4, &[(ETH0, None)]));
    local.apply_kernel_change(Change::RouteGone(RouteKey { prefix: net("192.168.0.0/24"), metric: 0 }));
    assert_eq!((rejected(&mut local), local.rejected().no_port), (Vec::new(), 1));
}

#[test]
fn routes_with_encapsulation_are_rejected() {
    let mut local = local();
    let encapsulated = |prefix: &str, hops: &[(InterfaceIndex, Option<&str>)], instance: usize| {
        let Change::Route(mut route) = route(prefix, 0, 4, hops) else { unreachable!() };
        route.hops[instance].is_encapsulated = true;
        Change::Route(route)
    };
    local.apply_kernel_change(encapsulated("192.0.2.0/24", &[(ETH0, None)], 0));
    local.apply_kernel_change(encapsulated("198.51.100.0/24", &[(ETH0, None), (ETH1, None)], 0));
    let reason = |is_entire_route| RejectedRoute { reason: RejectReason::Encapsulated, is_entire_route };
    assert_eq!(
        rejected(&mut local).into_iter().map(|(_, routes_to)| routes_to).collect::<Vec<_>>(),
        [reason(true), reason(false)]
    );
    assert_eq!((local.rejected().encapsulated, routes_to(&mut local, "192.0.2.0/24")), (2, (None, None)));
    local.apply_kernel_change(encapsulated("198.51.100.0/24", &[(ETH0, None), (ETH1, None)], 1));
    assert_eq!(hops(routes_to(&mut local, "198.51.100.0/24").1), [(0, 0)]);
}

#[test]
fn a_routes_own_mtu_is_reported_where_the_route_is_accepted() {
    let mut local = local();
    for (interface, logged) in [(ETH0, 1), (MANAGEMENT, 0)] {
        let Change::Route(mut route) = route("192.0.2.0/24", 0, 4, &[(interface, None)]) else { unreachable!() };
        route.mtu_bytes = Some(1300);
        local.apply_kernel_change(Change::Route(route));
        assert_eq!((local.rejected().mtu, local.rejected().no_port), (logged, 1 - logged));
    }
}

#[test]
fn local_prefixes_of_the_kernel_are_announced() {
    let mut local = local();
    for (interface, prefix, is_accepted) in [(LO, "192.0.2.0/24", true), (MANAGEMENT, "198.51.100.0/24", false)] {
        let Change::Route(mut route) = route(prefix, 0, 4, &[(interface, None)]) else { unreachable!() };
        route.kind = KernelKind::Local;
        local.apply_kernel_change(Change::Route(route));
        let (own, announced) = routes_to(&mut local, prefix);
        assert_eq!(own, announced);
        let hops: Vec<AnnouncedHop> = announced.map_or_else(Vec::new, |announced| announced.hops);
        assert_eq!(hops, if is_accepted { vec![KERNEL_HOP] } else { Vec::new() });
    }
    assert_eq!(rejected(&mut local).len(), 1);
}

#[test]
fn unreachable_routes_are_announced_unless_they_are_the_kernels_own() {
    let mut local = local();
    let reject = |prefix: &str, protocol| {
        let key = RouteKey { prefix: net(prefix), metric: 5 };
        Change::Route(Route { key, protocol, kind: KernelKind::Blackhole, hops: Vec::new(), mtu_bytes: None })
    };
    local.apply_kernel_change(reject("198.51.100.0/24", 4));
    local.apply_kernel_change(reject("::/0", PROTOCOL_KERNEL));
    assert_eq!(local.update_routes(usize::MAX).len(), 1);
    let (announced, _) = local.announcements().changes_after(0, usize::MAX);
    assert_eq!(announced[0].announced.as_ref().unwrap().kind, RouteKind::Blackhole);
}

#[test]
fn a_throw_route_hides_less_specific_routes() {
    let mut local = local();
    local.apply_kernel_change(route("198.51.100.0/24", 5, 4, &[(ETH0, Some("10.1.0.2"))]));
    let key = RouteKey { prefix: net("198.51.100.0/28"), metric: 5 };
    local.apply_kernel_change(Change::Route(Route {
        key,
        protocol: 4,
        kind: KernelKind::Throw,
        hops: Vec::new(),
        mtu_bytes: None,
    }));
    let changes = local.update_routes(usize::MAX);
    let thrown = changes.iter().find(|change| change.prefix == key.prefix).unwrap().announced.clone().unwrap();
    assert_eq!((thrown.kind, thrown.metric, thrown.hops), (RouteKind::Throw, 5, Vec::new()));
}

#[test]
fn a_permanent_neighbour_of_the_kernel_is_passed_to_the_forwarder() {
    let mut local = local();
    let neighbour = |interface, state| {
        let address = "10.1.0.9".parse().unwrap();
        Change::Neighbour(KernelNeighbour { interface, address, mac: Some(MacAddress([2; 6])), state })
    };
    local.apply_kernel_change(neighbour(ETH0, NeighbourState::Known));
    local.apply_kernel_change(neighbour(MANAGEMENT, NeighbourState::Permanent));
    assert_eq!(local.take_effects(), []);
    local.apply_kernel_change(neighbour(ETH0, NeighbourState::Permanent));
    assert!(matches!(local.take_effects()[..], [Effect::LearnNeighbour(PortId(0), _, MacAddress([2, 2, 2, 2, 2, 2]))]));
}

/// A node with the given part of a cluster file.
fn node_of_file(rest: &str) -> Node {
    let text = format!("version = 1\n[[nodes]]\nname = \"a\"\n{rest}\n[[nodes]]\nname = \"b\"\n");
    let text = text + "[[nodes.ports]]\ndevice = \"x\"\n";
    crate::cluster::ClusterFile::parse("c", text.as_bytes()).unwrap().cluster.nodes[0].clone()
}

const TAP: &str =
    "[[nodes.ports]]\ndevice = \"tap0\"\nkind = \"tap\"\nmtu_bytes = 1400\naddresses = [\"10.9.0.1/24\"]\n";
const VLAN: &str = "[[nodes.ports]]\ndevice = \"tap0.7\"\nkind = \"vlan\"\nparent = \"tap0\"\nvlan = 7\naddresses = \
                    [\"10.7.0.1/24\"]\n";
const STATIC: &str = "[[nodes.routes]]\nto = \"10.8.0.0/16\"\nvia = \"10.9.0.2\"\nport = \"tap0\"\n";
const ROUTER_HOP: AnnouncedHop = AnnouncedHop { port: u8::MAX, adjacency: AdjacencyId::ROUTER.0 };

fn opened(mac: u8) -> OpenedPort {
    OpenedPort { interface: None, config: PortConfig::new(MacAddress([mac; 6]), 1400) }
}

/// The state of that node at its start.
fn local_of(node: &Node) -> LocalRoutes {
    let mut local = LocalRoutes::new(None);
    for (index, port) in node.ports.iter().enumerate() {
        let mut opened = opened(2 + 2 * index as u8);
        opened.config.vlan = node.vlan(port);
        local.add_port(opened, port);
    }
    local.set_static(node);
    local
}

/// The announced routes with their hops.
fn all(local: &mut LocalRoutes) -> Vec<(String, Vec<(u8, u16)>)> {
    local.update_routes(usize::MAX);
    let (all, _) = local.announcements().changes_after(0, usize::MAX);
    let announced = all.into_iter().filter(|change| change.announced.is_some());
    let mut announced: Vec<_> = announced.map(|change| (change.prefix.to_string(), hops(change.announced))).collect();
    announced.sort();
    announced
}

#[test]
fn a_port_without_a_kernel_and_its_vlan_are_configured_by_the_cluster_file() {
    let mut local = local_of(&node_of_file(&[TAP, VLAN, STATIC].concat()));
    local.adjacency_pinned(PortId(0), "10.9.0.2".parse().unwrap(), Some(AdjacencyId(3)));
    let router = (ROUTER_HOP.port, ROUTER_HOP.adjacency);
    let expected = [
        ("10.7.0.0/24", vec![(1, 0)]),
        ("10.7.0.1/32", vec![router]),
        ("10.8.0.0/16", vec![(0, 3)]),
        ("10.9.0.0/24", vec![(0, 0)]),
        ("10.9.0.1/32", vec![router]),
    ];
    assert_eq!(all(&mut local), expected.map(|(prefix, hops)| (prefix.to_owned(), hops)));
    assert_eq!(local.announcements().mtus_bytes().0, [1400, 1400]);
    let vlan = local.port(PortId(1));
    assert_eq!(
        (vlan.mac, vlan.vlan.map(|vlan| vlan.id)),
        (MacAddress([2; 6]), Some(7)),
        "a VLAN has the hardware address of its parent"
    );
    let effects = local.take_effects();
    let is_own = |effect: &Effect| matches!(effect, Effect::AddLocalAddress(_));
    assert!(!effects.iter().any(is_own), "addresses of the router are not local to a kernel: {effects:?}");
}

#[test]
fn a_vlan_follows_its_parent() {
    let node =
        node_of_file(&("[[nodes.ports]]\ndevice = \"eth0\"\n".to_owned() + &VLAN.replace("\"tap0\"", "\"eth0\"")));
    let mut local = LocalRoutes::new(None);
    let mut eth0 = OpenedPort { interface: Some(ETH0), ..opened(4) };
    eth0.config.has_kernel = true;
    local.add_port(eth0, &node.ports[0]);
    let mut vlan = opened(6);
    vlan.config.vlan = node.vlan(&node.ports[1]);
    local.add_port(vlan, &node.ports[1]);
    local.apply_kernel_change(link(ETH0, "eth0", false));
    assert_eq!(all(&mut local), [("10.7.0.1/32".to_owned(), vec![(ROUTER_HOP.port, ROUTER_HOP.adjacency)])]);
    local.apply_kernel_change(link(ETH0, "eth0", true));
    assert_eq!(all(&mut local).len(), 2);
    let vlan = local.port(PortId(1));
    assert_eq!((vlan.is_up, vlan.mtu_bytes, vlan.mac), (true, 1500, local.port(PortId(0)).mac));
}

/// Any sequence of reloads gives the same state as a start with the last file.
#[test]
fn renumbering_ports_gives_the_state_of_a_fresh_start() {
    let other = "[[nodes.ports]]\ndevice = \"tap1\"\nkind = \"tap\"\naddresses = [\"10.6.0.1/24\", \"10.6.0.2/24\"]\n";
    let other_address = TAP.replace("10.9.0.1", "10.9.0.7");
    let files = [
        [TAP, VLAN, STATIC].concat(),
        [TAP, STATIC].concat(),
        [other, TAP, VLAN, STATIC].concat(),
        [other_address.as_str(), VLAN].concat(),
        [other.replace("\"10.6.0.1/24\", ", "").as_str(), TAP].concat(),
        other.to_owned(),
    ]
    .map(|text| node_of_file(&text));
    let gateway: IpAddr = "10.9.0.2".parse().unwrap();
    let settled = |local: &mut LocalRoutes| {
        // The forwarding thread assigns every requested adjacency.
        for effect in local.take_effects() {
            if let Effect::PinAdjacency(port, address) = effect {
                assert_eq!(address, gateway);
                local.adjacency_pinned(port, address, Some(AdjacencyId(3)));
            }
        }
        let found = all(local);
        (found, local.announcements().mtus_bytes().0.to_vec(), local.gateways.len())
    };
    for (from, to) in files.iter().flat_map(|from| files.iter().map(move |to| (from, to))) {
        let mut local = local_of(from);
        settled(&mut local);
        local.neighbour_up(PortId(0), "10.9.0.9".parse().unwrap(), AdjacencyId(9));
        let opened = to.ports.iter().enumerate().map(|(index, port)| {
            let former = from.ports.iter().position(|former| former.device == port.device);
            former.map(|index| PortId(index as u8)).ok_or_else(|| opened(20 + index as u8 * 2))
        });
        let opened: Vec<_> = opened.collect();
        let first_stays = opened[0] == Ok(PortId(0));
        let gone = local.renumber_ports(to, opened);
        assert_eq!(gone.contains(&PortId(0)), !first_stays);
        local.set_static(to);
        let (mut found, mtus, gateways) = settled(&mut local);
        assert_eq!(
            found.iter().any(|(prefix, _)| prefix == "10.9.0.9/32"),
            first_stays,
            "unchanged routes are not disturbed"
        );
        found.retain(|(prefix, _)| prefix != "10.9.0.9/32");
        assert_eq!((found, mtus, gateways), settled(&mut local_of(to)), "from {from:?} to {to:?}");
        let used: HashSet<InternedId> =
            local.candidates.values().flat_map(Candidates::iter).map(|(_, id)| id).collect();
        assert!(local.routes.iter().all(|(id, _)| used.contains(&id)), "{:?}", local.routes);
    }
}

mod stale;
