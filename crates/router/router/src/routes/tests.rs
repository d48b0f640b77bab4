//! Announced routes, and what forwarders look up.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::{AdjacencyId, NodeId};

fn hop(node: u8, port: u8) -> Hop {
    Hop { node: NodeId(node), port: PortId(port), adjacency: AdjacencyId(7) }
}

fn net(text: &str) -> IpNet {
    text.parse().expect("a prefix")
}

/// Returns what a forwarder looks up.
fn found(tables: &mut Tables, address: &str) -> Option<Vec<Hop>> {
    tables.lookup(address.parse().expect("an address"))
}

#[test]
fn the_best_announcement_wins_and_equal_ones_share() {
    let (mut rib, mut tables) = Rib::new().expect("memory");
    let prefix = net("192.0.2.0/24");
    rib.announce(NodeId(1), prefix, 20, &[hop(1, 0)]).expect("room");
    rib.announce(NodeId(2), prefix, 10, &[hop(2, 0), hop(2, 1)]).expect("room");
    assert_eq!(found(&mut tables, "192.0.2.9"), Some(vec![hop(2, 0), hop(2, 1)]));
    rib.announce(NodeId(0), prefix, 10, &[hop(0, 3)]).expect("room");
    assert_eq!(found(&mut tables, "192.0.2.9"), Some(vec![hop(0, 3), hop(2, 0), hop(2, 1)]));
    assert_eq!(rib.sources(prefix).len(), 3);
    rib.announce(NodeId(2), prefix, 30, &[hop(2, 0)]).expect("room");
    assert_eq!(found(&mut tables, "192.0.2.9"), Some(vec![hop(0, 3)]), "a later announcement replaces the former one");
    assert_eq!(rib.withdraw(NodeId(0), prefix), Ok(true));
    assert_eq!(found(&mut tables, "192.0.2.9"), Some(vec![hop(1, 0)]));
    assert_eq!(rib.withdraw(NodeId(0), prefix), Ok(false));
    rib.announce(NodeId(0), prefix, 20, &[Hop::UNREACHABLE]).expect("room");
    assert_eq!(found(&mut tables, "192.0.2.9"), Some(vec![Hop::UNREACHABLE]), "dropping takes precedence");
    assert_eq!(rib.fib_entry(prefix), Some(FibEntry { metric: 20, hops: found(&mut tables, "192.0.2.9") }));
    for node in 0..3 {
        rib.withdraw(NodeId(node), prefix).expect("room");
    }
    assert_eq!((found(&mut tables, "192.0.2.9"), rib.routes()), (None, (0, 0)));
    assert!(rib.groups.is_empty() && rib.hop_sets.iter().next().is_none(), "everything is freed");
}

#[test]
fn hops_of_several_nodes_that_exceed_a_group_are_reduced_in_proportion() {
    let (mut rib, mut tables) = Rib::new().expect("memory");
    let prefix = net("192.0.2.0/24");
    rib.announce(NodeId(1), prefix, 10, &[[hop(1, 0); 12], [hop(1, 1); 12]].concat()[4..20]).expect("room");
    rib.announce(NodeId(2), prefix, 10, &[hop(2, 0); 16]).expect("room");
    rib.announce(NodeId(3), prefix, 10, &[hop(3, 0)]).expect("room");
    let hops = found(&mut tables, "192.0.2.9").expect("a route");
    let count = |of: Hop| hops.iter().filter(|hop| **hop == of).count();
    assert_eq!(hops.len(), HOPS_MAX);
    assert_eq!([hop(1, 0), hop(1, 1), hop(2, 0), hop(3, 0)].map(count), [4, 4, 7, 1]);
}

#[test]
fn a_failed_node_gets_no_packet_at_once_and_others_take_over() {
    let (mut rib, mut tables) = Rib::new().expect("memory");
    let shared = net("192.0.2.0/24");
    let better = net("198.51.100.0/24");
    let dropped = net("203.0.113.0/24");
    rib.announce(NodeId(0), shared, 10, &[hop(0, 0)]).expect("room");
    rib.announce(NodeId(1), shared, 10, &[hop(1, 0)]).expect("room");
    rib.announce(NodeId(0), better, 10, &[hop(0, 0)]).expect("room");
    rib.announce(NodeId(1), better, 20, &[hop(1, 0)]).expect("room");
    rib.announce(NodeId(1), dropped, 20, &[Hop::BLACKHOLE]).expect("room");
    for number in 0..50 {
        rib.announce(NodeId(0), net(&format!("10.0.{number}.0/24")), 1, &[hop(0, 0)]).expect("room");
    }
    rib.suspend_node(NodeId(0)).expect("room");
    assert_eq!(found(&mut tables, "192.0.2.1"), Some(vec![hop(1, 0)]), "at once");
    assert_eq!(found(&mut tables, "198.51.100.1"), Some(vec![]), "at once, without a hop");
    assert_eq!(found(&mut tables, "203.0.113.1"), Some(vec![Hop::BLACKHOLE]), "a blackhole belongs to no node");
    let mut slices = 0;
    while rib.process_pending(10, |_| {}).expect("room") {
        slices += 1;
    }
    assert_eq!(slices, 5);
    assert_eq!(found(&mut tables, "198.51.100.1"), Some(vec![hop(1, 0)]), "then the next best");
    assert_eq!((rib.routes_of(NodeId(0)), rib.routes()), (0, (3, 0)));
    rib.announce(NodeId(0), shared, 10, &[hop(0, 5)]).expect("room");
    assert_eq!(found(&mut tables, "192.0.2.1"), Some(vec![hop(0, 5), hop(1, 0)]), "the node is back");
}

#[test]
fn a_node_that_fails_and_returns_often_has_its_routes_merged_once() {
    let (mut rib, mut tables) = Rib::new().expect("memory");
    for number in 0..50 {
        rib.announce(NodeId(0), net(&format!("10.0.{number}.0/24")), 1, &[hop(0, 0)]).expect("room");
    }
    for _ in 0..20 {
        rib.suspend_node(NodeId(0)).expect("room");
        assert!(rib.resume_node(NodeId(0)).expect("room"));
    }
    assert_eq!(rib.pending.len(), 50);
    while rib.process_pending(10, |_| {}).expect("room") {}
    assert_eq!(found(&mut tables, "10.0.7.1"), Some(vec![hop(0, 0)]));
}

#[test]
fn routes_of_a_node_that_packets_do_not_reach_are_stored_and_not_used() {
    let (mut rib, mut tables) = Rib::new().expect("memory");
    let (shared, own) = (net("192.0.2.0/24"), net("198.51.100.0/24"));
    let settle = |rib: &mut Rib| while rib.process_pending(10, |_| {}).expect("room") {};
    rib.announce(NodeId(1), shared, 20, &[hop(1, 0)]).expect("room");
    rib.set_reachable(NodeId(0), false).expect("room");
    for prefix in [shared, own] {
        rib.announce(NodeId(0), prefix, 10, &[hop(0, 0)]).expect("room");
    }
    assert_eq!(found(&mut tables, "192.0.2.1"), Some(vec![hop(1, 0)]), "the way that works");
    assert_eq!((found(&mut tables, "198.51.100.1"), rib.routes_of(NodeId(0))), (None, 0));
    rib.set_reachable(NodeId(0), true).expect("room");
    settle(&mut rib);
    let [both, alone] = ["192.0.2.1", "198.51.100.1"].map(|address| found(&mut tables, address));
    assert_eq!((both, alone), (Some(vec![hop(0, 0)]), Some(vec![hop(0, 0)])));
    // Lost, with its announcements kept for its return, which is not reachable at first.
    rib.set_reachable(NodeId(0), false).expect("room");
    assert_eq!(found(&mut tables, "198.51.100.1"), Some(vec![]), "at once");
    rib.suspend_node(NodeId(0)).expect("room");
    settle(&mut rib);
    assert!(rib.resume_node(NodeId(0)).expect("room"));
    settle(&mut rib);
    assert_eq!(found(&mut tables, "192.0.2.1"), Some(vec![hop(1, 0)]));
    assert_eq!(rib.withdraw(NodeId(0), own), Ok(true));
    rib.set_reachable(NodeId(0), true).expect("room");
    settle(&mut rib);
    assert_eq!((found(&mut tables, "192.0.2.1"), found(&mut tables, "198.51.100.1")), (Some(vec![hop(0, 0)]), None));
}

#[test]
fn a_node_that_returns_before_its_routes_are_withdrawn_has_only_its_new_ones() {
    let (mut rib, mut tables) = Rib::new().expect("memory");
    let (kept, lost) = (net("192.0.2.0/24"), net("198.51.100.0/24"));
    for prefix in [kept, lost] {
        rib.announce(NodeId(0), prefix, 10, &[hop(0, 0)]).expect("room");
    }
    rib.suspend_node(NodeId(0)).expect("room");
    rib.announce(NodeId(0), kept, 10, &[hop(0, 0)]).expect("room");
    assert_eq!(found(&mut tables, "192.0.2.1"), Some(vec![hop(0, 0)]));
    assert_eq!(found(&mut tables, "198.51.100.1"), None);
}

#[test]
fn a_route_without_room_is_not_installed_until_there_is_room() {
    let (mut rib, mut tables) = Rib::new().expect("memory");
    let by = |neighbour: u16| [Hop { adjacency: AdjacencyId(neighbour), ..hop(1, 0) }];
    let host = |number: u16| net(&format!("10.0.{}.{}/32", number / 256, number % 256));
    let address = |number: u16| host(number).addr().to_string();
    for number in 1..=GROUPS_MAX {
        rib.announce(NodeId(1), host(number), 0, &by(number)).expect("room");
    }
    // This route shares its group with another one, so that replacing it frees no group.
    rib.announce(NodeId(1), host(2), 0, &by(1)).expect("room");
    rib.announce(NodeId(1), host(40_000), 0, &by(40_000)).expect("room for one more");
    let full = |done: Result<(), RouteError>| {
        assert!(matches!(done, Err(RouteError::Table(fib::Error::GroupsFull { .. }))), "{done:?}");
    };
    full(rib.announce(NodeId(1), host(2), 0, &by(50_000)));
    assert_eq!(found(&mut tables, &address(2)), None, "the outdated route is removed");
    full(rib.announce(NodeId(1), host(40_001), 0, &by(40_001)));
    assert_eq!((found(&mut tables, &address(40_001)), rib.not_installed()), (None, 2));
    assert_eq!(rib.fib_entry(host(40_001)), Some(FibEntry { metric: 0, hops: None }), "reported as not installed");
    assert!(rib.prefixes_not_installed().eq([host(2), host(40_001)]));
    // If the former route frees its group, there is room.
    rib.announce(NodeId(1), host(3), 0, &by(50_003)).expect("room");
    assert_eq!(found(&mut tables, &address(3)), Some(by(50_003).to_vec()));
    rib.withdraw(NodeId(1), host(4)).expect("room");
    assert_eq!((found(&mut tables, &address(2)), rib.not_installed()), (Some(by(50_000).to_vec()), 1));
    rib.withdraw(NodeId(1), host(40_001)).expect("room");
    assert_eq!(
        (rib.not_installed(), rib.groups.len()),
        (0, usize::from(GROUPS_MAX)),
        "withdrawn routes are not retried"
    );
    rib.suspend_node(NodeId(1)).expect("room");
    while rib.process_pending(10_000, |_| {}).expect("room") {}
    assert_eq!((rib.routes(), rib.groups.len(), rib.writer.groups()), ((0, 0), 0, 0));
}

#[test]
fn invalid_announcements_are_rejected_in_one_line() {
    let (mut rib, _tables) = Rib::new().expect("memory");
    let prefix = net("192.0.2.0/24");
    let mut refused =
        |node: u8, hops: &[Hop]| rib.announce(NodeId(node), prefix, 0, hops).expect_err("refused").to_string();
    assert_eq!(refused(8, &[hop(8, 0)]), "node 8: a cluster has nodes 0 to 7");
    assert_eq!(refused(1, &[]), "192.0.2.0/24: a route with 0 hops; announce 1 to 16");
    assert_eq!(refused(1, &[hop(1, 0); 17]), "192.0.2.0/24: a route with 17 hops; announce 1 to 16");
    let foreign = "192.0.2.0/24: node 1 announces a hop by port 0 of node 2; a node announces its own ports only";
    assert_eq!(refused(1, &[hop(1, 0), hop(2, 0)]), foreign);
    assert!(refused(1, &[hop(1, 64)]).contains("port 64"));
    let odd_end = Hop { adjacency: AdjacencyId(9), ..Hop::BLACKHOLE };
    assert!(refused(1, &[odd_end]).contains("port 254"));
    assert_eq!(rib.routes(), (0, 0));
}

#[test]
fn a_hop_round_trips_through_its_encoding() {
    for hop in [hop(7, 63), Hop::kernel(NodeId(3)), Hop::router(NodeId(0)), Hop::PROHIBITED, Hop::BLACKHOLE] {
        assert_eq!(Hop::from(u32::from(hop)), hop);
    }
}

/// One step of a history.
#[derive(Clone, Debug)]
enum Change {
    Announce { node: u8, prefix: u8, metric: u32, ports: Vec<u8> },
    Withdraw { node: u8, prefix: u8 },
    Gone { node: u8 },
    Returned { node: u8 },
    Forgotten { node: u8 },
    Work { routes: usize },
}

fn change() -> impl Strategy<Value = Change> {
    let node = 0..3_u8;
    let prefix = 0..6_u8;
    prop_oneof![
        6 => (node.clone(), prefix.clone(), 1..3_u32, prop::collection::vec(0..4_u8, 1..4))
            .prop_map(|(node, prefix, metric, ports)| Change::Announce { node, prefix, metric, ports }),
        3 => (node.clone(), prefix).prop_map(|(node, prefix)| Change::Withdraw { node, prefix }),
        2 => node.clone().prop_map(|node| Change::Gone { node }),
        1 => node.clone().prop_map(|node| Change::Returned { node }),
        1 => node.prop_map(|node| Change::Forgotten { node }),
        1 => (0..4_usize).prop_map(|routes| Change::Work { routes }),
    ]
}

/// By node and prefix: the metric, and the ports of the hops.
type Announced = HashMap<(u8, u8), (u32, Vec<u8>)>;

/// Returns the expected hops, by a naive computation.
fn expected(announced: &Announced, prefix: u8) -> Option<Vec<Hop>> {
    let of = |node: u8| announced.get(&(node, prefix));
    let best = (0..3).filter_map(of).map(|(metric, _)| *metric).min()?;
    let mut hops: Vec<Hop> = (0..3)
        .flat_map(|node| of(node).filter(|(metric, _)| *metric == best).map(|(_, ports)| (node, ports)))
        .flat_map(|(node, ports)| ports.iter().map(move |port| hop(node, *port)))
        .collect();
    hops.sort_unstable();
    Some(hops)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn the_fib_matches_the_announcements_after_any_history(changes in prop::collection::vec(change(), 1..60)) {
        let (mut rib, mut tables) = Rib::new().expect("memory");
        let mut announced = Announced::new();
        // What failed nodes had announced.
        let mut kept: [Option<Announced>; 3] = [const { None }; 3];
        let prefix_of = |prefix: u8| net(&format!("10.{prefix}.0.0/16"));
        for change in changes {
            match change {
                Change::Announce { node, prefix, metric, ports } => {
                    let hops: Vec<Hop> = ports.iter().map(|port| hop(node, *port)).collect();
                    rib.announce(NodeId(node), prefix_of(prefix), metric, &hops).expect("room");
                    announced.insert((node, prefix), (metric, ports));
                    kept[usize::from(node)] = None;
                }
                Change::Withdraw { node, prefix } => {
                    rib.withdraw(NodeId(node), prefix_of(prefix)).expect("room");
                    announced.remove(&(node, prefix));
                    kept[usize::from(node)].iter_mut().for_each(|kept| _ = kept.remove(&(node, prefix)));
                }
                Change::Gone { node } => {
                    rib.suspend_node(NodeId(node)).expect("room");
                    let of_node: Announced = announced.extract_if(|(of, _), _| *of == node).collect();
                    if !of_node.is_empty() {
                        kept[usize::from(node)] = Some(of_node);
                    }
                }
                Change::Returned { node } => {
                    let is_kept = rib.resume_node(NodeId(node)).expect("room");
                    let of_node = kept[usize::from(node)].take();
                    prop_assert_eq!(is_kept, of_node.is_some());
                    announced.extend(of_node.into_iter().flatten());
                }
                Change::Forgotten { node } => {
                    rib.forget_node(NodeId(node));
                    kept[usize::from(node)].iter_mut().for_each(HashMap::clear);
                }
                Change::Work { routes } => {
                    rib.process_pending(routes, |_| {}).expect("room");
                }
            }
            let is_settled = rib.pending.is_empty();
            for prefix in 0..6 {
                let found = found(&mut tables, &format!("10.{prefix}.1.1"));
                let expected = expected(&announced, prefix);
                if is_settled {
                    prop_assert_eq!(&found, &expected, "prefix {}", prefix);
                }
                let is_dead = |hop: &Hop| rib.is_gone[usize::from(hop.node.0)];
                prop_assert!(!found.unwrap_or_default().iter().any(is_dead), "a hop at a failed node");
            }
        }
        while rib.process_pending(usize::MAX, |_| {}).expect("room") {}
        prop_assert_eq!(rib.groups.len(), rib.writer.groups());
    }
}
