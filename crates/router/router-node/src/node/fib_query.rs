//! Answers queries from the forwarding tables.

use ipnet::IpNet;
use router::routes::FibEntry;
use router::{Hop, PortId};

use super::route_table::RouteTable;
use crate::cluster::Cluster;
use crate::control::message::RouteKind;
use crate::management::{FibQuery, Route, RouteHop};

/// Returns the prefixes that a query selects.
pub fn prefixes(table: &RouteTable, query: FibQuery) -> Vec<IpNet> {
    match query.address {
        Some(address) => table.prefixes_of(address),
        None => table.prefixes(query.within),
    }
}

/// Returns a route with names.
pub fn route(table: &RouteTable, cluster: &Cluster, prefix: IpNet) -> Option<Route> {
    let FibEntry { metric, hops } = table.fib_entry(prefix)?;
    let is_left_out = hops.is_none();
    let hops = hops.unwrap_or_default();
    let kind = kind_of(&hops);
    let groups = hops.chunk_by(|one, other| one == other).filter(|_| kind == RouteKind::Unicast);
    let hops = groups.filter_map(|equal| {
        let hop = equal[0];
        let node = cluster.node_of(hop.node)?;
        let port = match hop.port {
            PortId::KERNEL => "kernel".to_owned(),
            PortId(port) => node.ports.get(usize::from(port))?.device.clone(),
        };
        Some(RouteHop { node: node.name.clone(), port, adjacency: hop.adjacency.0, weight: equal.len() as u16 })
    });
    Some(Route { to: prefix, metric, kind, hops: hops.collect(), is_left_out })
}

/// A route that drops packets has a single hop: it is never combined with other next hops.
fn kind_of(hops: &[Hop]) -> RouteKind {
    match *hops {
        [Hop::BLACKHOLE] => RouteKind::Blackhole,
        [Hop::UNREACHABLE] => RouteKind::Unreachable,
        [Hop::PROHIBITED] => RouteKind::Prohibited,
        [Hop::NO_ROUTE] => RouteKind::Throw,
        _ => RouteKind::Unicast,
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use proptest::prelude::*;
    use router::NodeId;
    use router::routes::{Rib, Tables};
    use router_ports::InterfaceIndex;
    use router_ports::netlink::Requests;

    use super::*;
    use crate::cluster::ClusterFile;
    use crate::control::message::{AnnouncedHop, AnnouncedRoute, Origin, RouteChange};

    const NODES: u8 = 3;
    const PORTS: u8 = 3;
    const KINDS: [RouteKind; 5] =
        [RouteKind::Unicast, RouteKind::Blackhole, RouteKind::Unreachable, RouteKind::Prohibited, RouteKind::Throw];

    fn cluster() -> Cluster {
        let mut text = "version = 1\n".to_owned();
        for node in 0..NODES {
            text += &format!("[[nodes]]\nname = \"{}\"\n", char::from(b'a' + node));
            (0..PORTS).for_each(|port| text += &format!("[[nodes.ports]]\ndevice = \"eth{port}\"\n"));
        }
        ClusterFile::parse("c", text.as_bytes()).unwrap().cluster
    }

    fn empty() -> (RouteTable, Tables) {
        let (rib, tables) = Rib::new().unwrap();
        // Nothing is installed in a kernel before the table is processed.
        let requests = Requests::open().unwrap();
        (RouteTable::new(rib, NodeId(0), usize::from(NODES), InterfaceIndex(1), requests), tables)
    }

    /// Nested prefixes of both families.
    fn prefix(number: u8) -> IpNet {
        let v6 = ["fd00::/16", "fd00::/48", "fd00::1/128"];
        let v4 = ["10.0.0.0/8", "10.0.0.0/16", "10.0.0.1/32"];
        [v4, v6].concat()[usize::from(number)].parse().unwrap()
    }

    fn announced(metric: u32, kind: RouteKind, ports: &[u8]) -> AnnouncedRoute {
        let is_unicast = kind == RouteKind::Unicast;
        let hops = ports.iter().filter(|_| is_unicast).map(|port| AnnouncedHop { port: *port, adjacency: 7 }).collect();
        AnnouncedRoute { metric, origin: Origin::Kernel, kind, hops }
    }

    /// Returns what the forwarder does with packets, in the form of a response.
    fn forwarding_of(found: Option<Vec<Hop>>) -> Option<(RouteKind, Vec<(String, String)>)> {
        let name = |hop: &Hop| (char::from(b'a' + hop.node.0).to_string(), format!("eth{}", hop.port.0));
        // It selects one of the hops by the flow hash.
        let kinds: Vec<RouteKind> = found.as_ref()?.iter().map(|hop| kind_of(&[*hop])).collect();
        match kinds[..] {
            [kind] if kind != RouteKind::Unicast => Some((kind, Vec::new())),
            _ => {
                assert!(
                    kinds.iter().all(|kind| *kind == RouteKind::Unicast),
                    "some flows would be dropped and others forwarded"
                );
                Some((RouteKind::Unicast, found?.iter().map(name).collect()))
            }
        }
    }

    fn reported(table: &RouteTable, cluster: &Cluster, address: IpAddr) -> Option<(RouteKind, Vec<(String, String)>)> {
        let query = FibQuery { address: Some(address), within: None };
        let routes: Vec<Route> =
            prefixes(table, query).into_iter().filter_map(|prefix| route(table, cluster, prefix)).collect();
        let [route] = &routes[..] else { return None };
        let of_hop = |hop: &RouteHop| vec![(hop.node.clone(), hop.port.clone()); usize::from(hop.weight)];
        Some((route.kind, route.hops.iter().flat_map(of_hop).collect()))
    }

    /// An announcement or withdrawal of a node.
    fn update() -> impl Strategy<Value = (u8, u8, Option<AnnouncedRoute>)> {
        let kind = prop_oneof![2 => Just(RouteKind::Unicast), 1 => prop::sample::select(&KINDS[1..])];
        let route = (1..3u32, kind, prop::collection::vec(0..PORTS, 1..4))
            .prop_map(|(metric, kind, ports)| announced(metric, kind, &ports));
        (0..NODES, 0..6u8, prop::option::weighted(0.8, route))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

        #[test]
        fn a_fib_query_returns_the_routes_that_packets_take(updates in prop::collection::vec(update(), 1..40)) {
            let (cluster, (mut table, mut tables)) = (cluster(), empty());
            for (node, number, announced) in updates {
                table.change(NodeId(node), vec![RouteChange { prefix: prefix(number), announced }]);
                for address in ["10.0.0.1", "10.0.0.2", "10.9.0.1", "fd00::1", "fd00::2", "fd00:9::1", "192.0.2.1"] {
                    let address: IpAddr = address.parse().unwrap();
                    let forwarding = forwarding_of(tables.lookup(address));
                    prop_assert_eq!(reported(&table, &cluster, address), forwarding, "{}", address);
                }
            }
        }
    }

    #[test]
    fn a_blackhole_among_equal_routes_is_reported_whichever_node_has_it() {
        for (kind, rejecting_node) in KINDS[1..].iter().flat_map(|kind| [(*kind, 0), (*kind, 1)]) {
            let (cluster, (mut table, _tables)) = (cluster(), empty());
            let change = |announced| vec![RouteChange { prefix: prefix(0), announced: Some(announced) }];
            table.change(NodeId(rejecting_node), change(announced(0, kind, &[])));
            table.change(NodeId(1 - rejecting_node), change(announced(0, RouteKind::Unicast, &[0])));
            let reported = route(&table, &cluster, prefix(0)).unwrap();
            assert_eq!((reported.kind, reported.hops, reported.is_left_out), (kind, Vec::new(), false));
        }
    }

    #[test]
    fn routes_without_room_are_listed_before_the_route_that_packets_take() {
        let (cluster, (mut table, mut tables)) = (cluster(), empty());
        let host = |number: u32| IpNet::from(IpAddr::V4(std::net::Ipv4Addr::from_bits(0x0a00_0000 + number)));
        let by = |adjacency: u32| {
            let hops = vec![AnnouncedHop { port: (adjacency >> 16) as u8, adjacency: adjacency as u16 }];
            Some(AnnouncedRoute { hops, ..announced(5, RouteKind::Unicast, &[]) })
        };
        let wider = RouteChange { prefix: prefix(0), announced: by(1) };
        let hosts = (1..=70_000).map(|number| RouteChange { prefix: host(number), announced: by(number + 1) });
        table.change(NodeId(1), std::iter::once(wider).chain(hosts).collect());
        assert!(table.left_out() > 0, "more groups than there is room for");
        let last = host(70_000);
        let address = Some(last.addr());
        let routes: Vec<Route> = prefixes(&table, FibQuery { address, within: None })
            .into_iter()
            .filter_map(|prefix| route(&table, &cluster, prefix))
            .collect();
        let shown = |route: &Route| (route.to, route.is_left_out, route.hops.len());
        assert_eq!(routes.iter().map(shown).collect::<Vec<_>>(), [(last, true, 0), (prefix(0), false, 1)]);
        assert_eq!(
            tables.lookup(last.addr()),
            Some(vec![Hop { node: NodeId(1), port: PortId(0), adjacency: router::AdjacencyId(1) }])
        );
        let all = prefixes(&table, FibQuery::default());
        assert!(all.len() == 70_001 && all.is_sorted(), "all are listed, in their order");
    }
}
