//! Against the kernel, in namespaces of the tests' own.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::RouteNetlinkMessage as Message;
use netlink_packet_route::route::{RouteAttribute, RouteNextHop, RouteProtocol, RouteScope, RouteType};
use packet::ethernet::MacAddress;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::*;
use crate::InterfaceIndex;
use crate::namespace::{self, Namespace};

/// What changes add up to.
#[derive(Clone, Default, Debug, PartialEq)]
struct World {
    links: BTreeMap<InterfaceIndex, Link>,
    addresses: BTreeMap<(InterfaceIndex, IpNet), Address>,
    routes: BTreeMap<RouteKey, Route>,
    neighbours: BTreeMap<(InterfaceIndex, IpAddr), Neighbour>,
}

impl World {
    fn apply(&mut self, changes: Vec<Change>) {
        for change in changes {
            match change {
                Change::Link(link) => drop(self.links.insert(link.index, link)),
                Change::LinkGone(index) => assert!(self.links.remove(&index).is_some(), "{index} was never told"),
                Change::Address(it) => drop(self.addresses.insert((it.interface, it.network), it)),
                Change::AddressGone { interface, network } => drop(self.addresses.remove(&(interface, network))),
                Change::Route(route) => drop(self.routes.insert(route.key, route)),
                Change::RouteGone(key) => assert!(self.routes.remove(&key).is_some(), "{key:?} was never told"),
                Change::Neighbour(it) => drop(self.neighbours.insert((it.interface, it.address), it)),
                Change::NeighbourGone { interface, address } => {
                    self.neighbours.remove(&(interface, address));
                }
            }
        }
    }

    /// As somebody sees it who looks for the first time.
    fn afresh() -> World {
        let mut world = World::default();
        world.apply(Monitor::open().unwrap().changes().unwrap());
        world
    }

    /// Without what the kernel does of itself in the meantime: IPv6 addresses of links come, and are looked for.
    fn of_v4(mut self) -> World {
        self.links.clear();
        self.addresses.retain(|(_, network), _| network.addr().is_ipv4());
        self.routes.retain(|key, _| key.prefix.addr().is_ipv4());
        self.neighbours.retain(|(_, address), _| address.is_ipv4());
        self
    }

    /// Routes of the metrics that deeds have.
    fn of_the_test(mut self) -> BTreeMap<RouteKey, Route> {
        self.routes.retain(|key, _| [10, 11].contains(&key.metric));
        self.routes
    }

    fn named(&self, name: &str) -> InterfaceIndex {
        self.links.values().find(|link| link.name == name).unwrap_or_else(|| panic!("no {name}")).index
    }
}

/// The kernel takes it away when the interface goes down.
const V6: &str = "fd00:1::1/64";

/// A veth pair `a` and `b`, up, with 10.1.0.1/24 and fd00:1::1/64 on `a`.
fn pair(requests: &mut Requests) -> World {
    let end = |name| VethEnd { name, namespace: None, mac: None };
    requests.add_veth(end("a"), end("b")).unwrap();
    let world = World::afresh();
    for name in ["a", "b"] {
        requests.set_up(world.named(name)).unwrap();
    }
    requests.add_address(world.named("a"), "10.1.0.1/24".parse().unwrap()).unwrap();
    requests.add_address(world.named("a"), V6.parse().unwrap()).unwrap();
    World::afresh()
}

fn within(namespace: &Namespace, run: impl FnOnce() + Send) {
    namespace.within(run).unwrap();
}

#[test]
fn what_is_there_is_told_first_and_what_changes_after() {
    let Some(namespace) = namespace::for_test("what_is_there_is_told_first") else { return };
    within(&namespace, || {
        let mut requests = Requests::open().unwrap();
        let a = pair(&mut requests).named("a");
        let (mut monitor, mut world) = (Monitor::open().unwrap(), World::default());
        world.apply(monitor.changes().unwrap());
        let network = "10.1.0.0/24".parse().unwrap();
        let connected = &world.routes[&RouteKey { prefix: network, metric: 0 }];
        assert_eq!(connected.hops, [RouteHop { interface: a, gateway: None, weight: 1, is_encapsulated: false }]);
        assert!(world.links[&a].is_up && world.links[&a].has_carrier && world.links[&a].mac.is_some());
        assert!(world.addresses[&(a, "10.1.0.1/24".parse().unwrap())].is_usable);

        requests.add_neighbour(a, "10.1.0.9".parse().unwrap(), MacAddress([2, 0, 0, 0, 0, 9])).unwrap();
        requests.set_mtu(a, 1400).unwrap();
        world.apply(monitor.changes().unwrap());
        let neighbour = &world.neighbours[&(a, "10.1.0.9".parse().unwrap())];
        assert_eq!((neighbour.mac, neighbour.state), (Some(MacAddress([2, 0, 0, 0, 0, 9])), NeighbourState::Permanent));
        assert_eq!(world.links[&a].mtu_bytes, 1400);
        requests.set_down(a).unwrap();
        world.apply(monitor.changes().unwrap());
        assert!(!world.routes.keys().any(|key| key.prefix == network), "the kernel takes them out in silence");
        requests.remove_link(a).unwrap();
        world.apply(monitor.changes().unwrap());
        assert_eq!(world.links.len(), 1, "loopback is left of {:?}", world.links);
        assert_eq!(world, World::afresh());
    });
}

#[test]
fn routes_of_our_own_are_installed_unseen_and_removed() {
    let Some(namespace) = namespace::for_test("routes_of_our_own") else { return };
    within(&namespace, || {
        let mut requests = Requests::open().unwrap();
        let before = pair(&mut requests);
        let interface = before.named("b");
        let routes: Vec<RouteRequest> = (0..600u32)
            .map(|n| RouteRequest {
                prefix: match n % 2 {
                    0 => format!("172.16.{}.{}/30", n / 64, n % 64 * 4).parse().unwrap(),
                    _ => format!("fd00:99:{n:x}::/64").parse().unwrap(),
                },
                metric: 77,
                interface,
                gateway: None,
            })
            .collect();
        requests.install_routes(&routes).unwrap();
        requests.install_routes(&routes[..3]).expect("what is there already is fine");
        let own = World::afresh().routes.into_keys().filter(|key| key.metric == 77).count();
        assert_eq!(own, 0, "own routes are told");
        requests.remove_routes(&routes[..100]).unwrap();
        requests.remove_routes(&routes[..1]).expect("what is gone already is fine");
        assert_eq!(requests.remove_own_routes().unwrap(), 500);
        assert_eq!(requests.remove_own_routes().unwrap(), 0);
        let nowhere = RouteRequest { interface: InterfaceIndex(4711), ..routes[0] };
        let error = requests.install_routes(&[&[nowhere][..], &routes[1..]].concat()).unwrap_err().to_string();
        assert!(error.contains("4711") && error.contains("No such device"), "{error}");
        assert_eq!(requests.remove_own_routes().unwrap(), 599, "others were not asked for");
    });
}

#[test]
fn a_flood_that_loses_events_is_made_up_for() {
    let Some(namespace) = namespace::for_test("a_flood_that_loses_events") else { return };
    within(&namespace, || {
        let mut requests = Requests::open().unwrap();
        let a = pair(&mut requests).named("a");
        let (mut monitor, mut world) = (Monitor::open().unwrap(), World::default());
        world.apply(monitor.changes().unwrap());
        monitor.set_queue(4096);
        for n in 1..200u8 {
            requests.add_neighbour(a, format!("10.1.0.{n}").parse().unwrap(), MacAddress([2, 0, 0, 0, 0, n])).unwrap();
            requests.add_address(a, format!("10.2.{n}.1/24").parse().unwrap()).unwrap();
        }
        world.apply(monitor.changes().unwrap());
        assert!(monitor.resyncs() > 1, "nothing was lost");
        assert_eq!(world.clone().of_v4(), World::afresh().of_v4());
        assert!(world.addresses.contains_key(&(a, "10.2.199.1/24".parse().unwrap())));
    });
}

#[test]
fn what_the_kernel_drops_until_its_queue_was_empty_is_made_up_for() {
    let Some(namespace) = namespace::for_test("what_the_kernel_drops") else { return };
    within(&namespace, || {
        let mut requests = Requests::open().unwrap();
        let a = pair(&mut requests).named("a");
        let (mut monitor, mut world) = (Monitor::open().unwrap(), World::default());
        world.apply(monitor.changes().unwrap());
        // More than are heard at a time: the kernel says once that it drops some, and drops all until none is left.
        monitor.hear_at_most(100);
        let neighbour = |n: u32| format!("10.1.{}.{}", n / 256, n % 256).parse().unwrap();
        for round in 0..2 {
            monitor.set_queue(100 << 10);
            for n in 300..900 {
                requests.add_neighbour(a, neighbour(n), MacAddress([2, 0, 0, round, 0, 0])).unwrap();
            }
            world.apply(monitor.changes().unwrap());
            requests.add_neighbour(a, neighbour(7), MacAddress([2, 0, 0, round, 7, 7])).unwrap();
            world.apply(monitor.changes().unwrap());
            assert_eq!(world.clone().of_v4(), World::afresh().of_v4());
        }
    });
}

/// Routes of IPv6 that come and go while the kernel tells its own: what it tells then lacks some that stay.
#[test]
fn no_route_is_missing_after_others_went_while_all_were_read() {
    let Some(namespace) = namespace::for_test("no_route_is_missing") else { return };
    within(&namespace, || {
        let mut requests = Requests::open().unwrap();
        pair(&mut requests);
        let route = |kind: &str, n: u32| format!("route {kind} blackhole 2001:db8:{n:x}::/48 metric 10\n");
        let batch = |lines: String| {
            let mut child = Command::new("ip").args(["-6", "-batch", "-"]).stdin(Stdio::piped()).spawn().unwrap();
            child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
            assert!(child.wait().unwrap().success());
        };
        let all = |kind: &str, numbers: std::ops::Range<u32>| numbers.map(|n| route(kind, n)).collect::<String>();
        batch(all("add", 0..8000));
        let is_over = AtomicBool::new(false);
        let mut watched = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let new = |n: u32| if n.is_multiple_of(50) { route("add", 10_000 + n) } else { String::new() };
                batch((0..6000).map(|n| route("del", n) + &new(n)).collect());
                is_over.store(true, Ordering::Release);
            });
            while !is_over.load(Ordering::Acquire) {
                let (mut monitor, mut world) = (Monitor::open().unwrap(), World::default());
                world.apply(monitor.changes().unwrap());
                watched.push((monitor, world));
            }
        });
        let there = World::afresh().of_the_test();
        for (monitor, world) in &mut watched {
            // It may be some time until all is read once more.
            let is_whole = (0..50).any(|_| {
                world.apply(monitor.changes().unwrap());
                let is_whole = world.clone().of_the_test() == there;
                std::thread::sleep(Duration::from_millis(if is_whole { 0 } else { 100 }));
                is_whole
            });
            assert!(is_whole, "{} of {}", world.clone().of_the_test().len(), there.len());
        }
    });
}

/// What an administrator or a routing daemon may do to the routes of one of few prefixes.
#[derive(Clone, Debug)]
enum Deed {
    Add { flags: u16, route: Shape },
    Delete(Shape),
    Down,
    Up,
    Look,
}

/// A route, of few possible ones.
#[derive(Clone, Debug)]
struct Shape {
    is_v6: bool,
    prefix: u8,
    metric: u8,
    protocol: u8,
    /// A bit each for the gateways 2, 3 and 4; none is a blackhole.
    gateways: u8,
}

impl Shape {
    fn message(&self, interface: InterfaceIndex) -> netlink_packet_route::route::RouteMessage {
        let text =
            if self.is_v6 { format!("fd00:{}::/48", 50 + self.prefix) } else { format!("10.5{}.0.0/16", self.prefix) };
        let request = RouteRequest {
            prefix: text.parse().unwrap(),
            metric: 10 + u32::from(self.metric),
            interface,
            gateway: None,
        };
        let mut message = requests::own_route(&request);
        message.header.protocol = RouteProtocol::from(self.protocol);
        message.header.scope = RouteScope::Universe;
        let stem = if self.is_v6 { "fd00:1::" } else { "10.1.0." };
        let gateways: Vec<IpAddr> = (0..3)
            .filter(|bit| self.gateways & 1 << bit != 0)
            .map(|bit| format!("{stem}{}", bit + 2).parse().unwrap())
            .collect();
        match gateways[..] {
            [] => {
                message.header.kind = RouteType::BlackHole;
                message.attributes.retain(|attribute| !matches!(attribute, RouteAttribute::Oif(_)));
            }
            [one] => message.attributes.push(RouteAttribute::Gateway(one.into())),
            _ => {
                message.attributes.retain(|attribute| !matches!(attribute, RouteAttribute::Oif(_)));
                message
                    .attributes
                    .push(RouteAttribute::MultiPath(gateways.iter().map(|gateway| hop(interface, *gateway)).collect()));
            }
        }
        message
    }
}

fn hop(interface: InterfaceIndex, gateway: IpAddr) -> RouteNextHop {
    let mut hop = RouteNextHop::default();
    hop.interface_index = interface.0;
    hop.attributes.push(RouteAttribute::Gateway(gateway.into()));
    hop
}

fn deeds() -> impl Strategy<Value = Vec<Deed>> {
    let shape = (any::<bool>(), 0..2u8, 0..2u8, prop_oneof![Just(4u8), Just(186)], 0..8u8)
        .prop_map(|(is_v6, prefix, metric, protocol, gateways)| Shape { is_v6, prefix, metric, protocol, gateways });
    let flags = prop_oneof![
        Just(NLM_F_CREATE | NLM_F_EXCL),
        Just(NLM_F_CREATE | NLM_F_APPEND),
        Just(NLM_F_CREATE | NLM_F_REPLACE),
        Just(NLM_F_CREATE),
    ];
    let deed = prop_oneof![
        8 => (flags, shape.clone()).prop_map(|(flags, route)| Deed::Add { flags, route }),
        4 => shape.prop_map(Deed::Delete),
        1 => Just(Deed::Down),
        1 => Just(Deed::Up),
        3 => Just(Deed::Look),
    ];
    proptest::collection::vec(deed, 1..60)
}

/// The interface is up and has its addresses, and nothing but the kernel made routes.
fn begin_again(requests: &mut Requests, interface: InterfaceIndex) {
    requests.set_up(interface).unwrap();
    let _ = requests.add_address(interface, V6.parse().unwrap());
    for key in World::afresh().routes.into_keys().filter(|key| [10, 11].contains(&key.metric)) {
        let gone = RouteRequest { prefix: key.prefix, metric: key.metric, interface, gateway: None };
        let mut message = requests::own_route(&gone);
        message.header.protocol = RouteProtocol::Unspec;
        message.header.scope = RouteScope::NoWhere;
        message.header.kind = RouteType::Unspec;
        message.attributes.retain(|attribute| !matches!(attribute, RouteAttribute::Oif(_)));
        while requests.ask(String::new(), Message::DelRoute(message.clone()), 0).is_ok() {}
    }
}

#[test]
fn whatever_is_done_to_routes_the_changes_add_up_to_what_is_there() {
    add_up(60);
}

#[test]
#[ignore = "a minute or two; in ./x exam"]
fn whatever_is_done_to_routes_for_long_the_changes_add_up_to_what_is_there() {
    add_up(30_000);
}

fn add_up(histories: u32) {
    let Some(namespace) = namespace::for_test("whatever_is_done_to_routes") else { return };
    within(&namespace, || {
        let mut requests = Requests::open().unwrap();
        let a = pair(&mut requests).named("a");
        let (requests, done) = (RefCell::new(requests), Cell::new(0));
        let mut runner = TestRunner::new(Config { cases: histories, failure_persistence: None, ..Config::default() });
        let result = runner.run(&deeds(), |deeds| {
            let mut requests = requests.borrow_mut();
            begin_again(&mut requests, a);
            let (mut monitor, mut world) = (Monitor::open().unwrap(), World::default());
            for deed in deeds {
                // Many are refused: there already, not there, a gateway out of reach.
                let accepted = match deed {
                    Deed::Add { flags, route } => {
                        requests.ask(String::new(), Message::NewRoute(route.message(a)), flags)
                    }
                    Deed::Delete(route) => requests.ask(String::new(), Message::DelRoute(route.message(a)), 0),
                    Deed::Down => requests.set_down(a),
                    Deed::Up => requests.set_up(a).and_then(|()| requests.add_address(a, V6.parse().unwrap())),
                    Deed::Look => {
                        world.apply(monitor.changes().unwrap());
                        continue;
                    }
                };
                done.set(done.get() + u32::from(accepted.is_ok()));
            }
            world.apply(monitor.changes().unwrap());
            prop_assert_eq!(world.of_the_test(), World::afresh().of_the_test());
            Ok(())
        });
        result.unwrap_or_else(|failure| panic!("{failure}"));
        assert!(done.get() > 200, "only {} deeds were accepted", done.get());
    });
}

/// The kernel does not tell of an IPv6 route that lies among the ways of another one, until those go.
#[test]
fn a_route_that_several_ways_hid_is_told_when_they_go() {
    let Some(namespace) = namespace::for_test("a_route_that_several_ways_hid") else { return };
    within(&namespace, || {
        let mut requests = Requests::open().unwrap();
        pair(&mut requests);
        let route =
            |words: &str, ways: &str| ip(&format!("-6 route {words} fd00:50::/48 metric 10 proto static{ways}"));
        for (words, ways) in [("del blackhole", ""), ("replace", " via fd00:1::4")] {
            route("add", " via fd00:1::2");
            route("prepend blackhole", "");
            route("replace", " nexthop via fd00:1::2 dev a nexthop via fd00:1::3 dev a");
            let (mut monitor, mut world) = (Monitor::open().unwrap(), World::default());
            world.apply(monitor.changes().unwrap());
            route(words, ways);
            world.apply(monitor.changes().unwrap());
            assert_eq!(world.of_the_test(), World::afresh().of_the_test(), "{words}");
            ip("-6 route flush proto static");
        }
    });
}

/// One command of `ip`, in the network namespace of the calling thread.
fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_route_that_leaves_the_table_is_told_like_others_that_reject() {
    let Some(namespace) = namespace::for_test("a_route_that_leaves_the_table") else { return };
    within(&namespace, || {
        let (mut monitor, mut world) = (Monitor::open().unwrap(), World::default());
        world.apply(monitor.changes().unwrap());
        let kinds = [RouteKind::Throw, RouteKind::Blackhole, RouteKind::Unreachable, RouteKind::Prohibit];
        for (name, n) in ["throw", "blackhole", "unreachable", "prohibit"].into_iter().zip(1..) {
            ip(&format!("route add {name} 198.51.{n}.0/24"));
            ip(&format!("route add {name} 2001:db8:{n}::/48"));
        }
        world.apply(monitor.changes().unwrap());
        // By events, and as it is found.
        for world in [&world, &World::afresh()] {
            let told: Vec<RouteKind> = world.routes.values().map(|route| route.kind).collect();
            assert_eq!(told, [kinds, kinds].concat());
        }
    });
}

#[test]
fn what_is_special_about_a_route_is_told() {
    let Some(namespace) = namespace::for_test("what_is_special_about_a_route") else { return };
    within(&namespace, || {
        let a = pair(&mut Requests::open().unwrap()).named("a");
        let (mut monitor, mut world) = (Monitor::open().unwrap(), World::default());
        world.apply(monitor.changes().unwrap());
        ip("route add 10.5.0.0/16 via 10.1.0.2 mtu 1300");
        ip("route add 10.6.0.0/16 encap ip id 5 dst 10.1.0.9 via 10.1.0.2 dev a");
        ip("route add 10.7.0.0/16 nexthop via 10.1.0.2 nexthop encap ip id 5 dst 10.1.0.9 via 10.1.0.3 dev a");
        ip("route add fd00:6::/48 encap ip6 id 5 dst fd00:1::9 dev a");
        ip("nexthop add id 1 encap ip6 id 5 dst fd00:1::9 via fd00:1::2 dev a");
        ip("route add fd00:7::/48 nhid 1");
        ip("link set dev lo up");
        ip("route add local 10.8.0.0/16 dev lo");
        ip("route add local fd00:8::/48 dev lo");
        world.apply(monitor.changes().unwrap());
        for world in [&world, &World::afresh()] {
            let route = |prefix: &str| world.routes.values().find(|route| route.key.prefix.to_string() == prefix);
            let wrapped = |prefix: &str| -> Vec<bool> {
                route(prefix).unwrap().hops.iter().map(|hop| hop.is_encapsulated).collect()
            };
            assert_eq!((route("10.5.0.0/16").unwrap().mtu_bytes, wrapped("10.5.0.0/16")), (Some(1300), vec![false]));
            assert_eq!((route("10.6.0.0/16").unwrap().mtu_bytes, wrapped("10.6.0.0/16")), (None, vec![true]));
            assert_eq!(wrapped("10.7.0.0/16"), [false, true]);
            assert_eq!((wrapped("fd00:6::/48"), wrapped("fd00:7::/48")), (vec![true], vec![true]));
            let local = world.routes.values().filter(|route| route.kind == RouteKind::Local);
            let local: Vec<String> = local.map(|route| route.key.prefix.to_string()).collect();
            assert_eq!(local, ["10.8.0.0/16", "fd00:8::/48"], "and none of the kernel's own");
        }
        ip("route change 10.5.0.0/16 via 10.1.0.2 mtu 1200");
        ip("route add 10.8.0.0/16 via 10.1.0.2");
        world.apply(monitor.changes().unwrap());
        let key = |prefix: &str| RouteKey { prefix: prefix.parse().unwrap(), metric: 0 };
        assert_eq!(world.routes[&key("10.5.0.0/16")].mtu_bytes, Some(1200));
        assert_eq!(world.routes[&key("10.8.0.0/16")].kind, RouteKind::Local, "table local is looked in first");
        ip("route del local 10.8.0.0/16 dev lo table local");
        world.apply(monitor.changes().unwrap());
        assert_eq!(world.routes[&key("10.8.0.0/16")].kind, RouteKind::Unicast);
        assert!(world.routes[&key("10.8.0.0/16")].hops.iter().all(|hop| hop.interface == a));
        assert_eq!(world.routes, World::afresh().routes);
    });
}

#[test]
fn routes_by_next_hop_objects_go_with_the_line_of_their_interface() {
    let name = "routes_by_next_hop_objects_go_with_the_line";
    let (Some(namespace), Some(elsewhere)) = (namespace::for_test(name), namespace::for_test(name)) else { return };
    within(&namespace, || {
        let end = |name, namespace| VethEnd { name, namespace, mac: None };
        Requests::open().unwrap().add_veth(end("here", None), end("there", Some(elsewhere.as_fd()))).unwrap();
        let of_there = |state: &str| elsewhere.within(|| ip(&format!("link set dev there {state}"))).unwrap();
        of_there("up");
        for command in
            ["link set dev here up", "address add 10.1.0.1/24 dev here", "nexthop add id 1 via 10.1.0.2 dev here"]
        {
            ip(command);
        }
        ip("route add 10.5.0.0/16 nhid 1");
        let (mut monitor, mut world) = (Monitor::open().unwrap(), World::default());
        world.apply(monitor.changes().unwrap());
        let key = RouteKey { prefix: "10.5.0.0/16".parse().unwrap(), metric: 0 };
        assert!(world.routes.contains_key(&key));
        // The other end goes down: the interface here stays up, but has no carrier.
        of_there("down");
        for _ in 0..1000 {
            world.apply(monitor.changes().unwrap());
            if world == World::afresh() && !world.links[&world.named("here")].has_carrier {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(world.routes, World::afresh().routes);
        assert!(!world.routes.contains_key(&key), "the kernel takes it out in silence");
    });
}

#[test]
fn an_event_that_cannot_be_read_hides_nothing_else() {
    let Some(namespace) = namespace::for_test("an_event_that_cannot_be_read") else { return };
    within(&namespace, || {
        let mut requests = Requests::open().unwrap();
        let a = pair(&mut requests).named("a");
        let (mut monitor, mut world) = (Monitor::open().unwrap(), World::default());
        world.apply(monitor.changes().unwrap());
        let gateway = "10.1.0.7".parse().unwrap();
        let request =
            RouteRequest { prefix: "10.9.0.0/16".parse().unwrap(), metric: 9, interface: a, gateway: Some(gateway) };
        // An event as the kernel tells it; a link whose address attribute is cut off; rubbish behind it.
        let mut route = requests::own_route(&request);
        route.header.protocol = RouteProtocol::Static;
        let garbled = {
            let header = [&[0u8, 0, 1, 0][..], &a.0.to_ne_bytes(), &[0; 8]].concat();
            let attribute = [&64u16.to_ne_bytes()[..], &4u16.to_ne_bytes(), &[5, 0, 0, 0]].concat();
            let length = (16 + header.len() + attribute.len()) as u32;
            [&length.to_ne_bytes()[..], &16u16.to_ne_bytes(), &[0; 10], &header, &attribute].concat()
        };
        let of_kernel = monitor.hear_instead();
        for rubbish in [&[][..], &[3; 9]] {
            let before = monitor.resyncs();
            let mut bytes = Vec::new();
            route.header.protocol = RouteProtocol::from(200 + rubbish.len() as u8);
            socket::Socket::open(0).unwrap().write(Message::NewRoute(route.clone()), 0, &mut bytes);
            of_kernel.send(&[&bytes, &garbled[..], rubbish].concat()).unwrap();
            let failed = monitor.changes();
            assert_eq!(failed.is_err(), !rubbish.is_empty(), "{failed:?}");
            world.apply(failed.unwrap_or_default());
            world.apply(monitor.changes().unwrap());
            // The kernel has no such route: whoever was told of it was told that it is gone, too.
            assert_eq!(world, World::afresh());
            assert!(monitor.resyncs() > before, "a doubt was left");
        }
        assert_eq!(monitor.unreadable(), 2);
    });
}
