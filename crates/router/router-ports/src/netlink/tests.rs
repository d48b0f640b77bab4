//! Tests with the kernel, in network namespaces of their own.

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

/// The state that results from applying changes.
#[derive(Clone, Default, Debug, PartialEq)]
struct Snapshot {
    links: BTreeMap<InterfaceIndex, Link>,
    addresses: BTreeMap<(InterfaceIndex, IpNet), Address>,
    routes: BTreeMap<RouteKey, Route>,
    neighbours: BTreeMap<(InterfaceIndex, IpAddr), Neighbour>,
}

impl Snapshot {
    fn apply(&mut self, changes: Vec<Change>) {
        for change in changes {
            match change {
                Change::Link(link) => drop(self.links.insert(link.index, link)),
                Change::LinkGone(index) => assert!(self.links.remove(&index).is_some(), "{index} was never reported"),
                Change::Address(it) => drop(self.addresses.insert((it.interface, it.network), it)),
                Change::AddressGone { interface, network } => drop(self.addresses.remove(&(interface, network))),
                Change::Route(route) => drop(self.routes.insert(route.key, route)),
                Change::RouteGone(key) => assert!(self.routes.remove(&key).is_some(), "{key:?} was never reported"),
                Change::Neighbour(it) => drop(self.neighbours.insert((it.interface, it.address), it)),
                Change::NeighbourGone { interface, address } => {
                    self.neighbours.remove(&(interface, address));
                }
            }
        }
    }

    /// Returns the current state, as a new monitor reports it.
    fn current() -> Snapshot {
        let mut snapshot = Snapshot::default();
        snapshot.apply(Monitor::open().unwrap().changes().unwrap());
        snapshot
    }

    /// Returns the IPv4 part: the kernel adds and checks IPv6 addresses of links in the meantime.
    fn of_v4(mut self) -> Snapshot {
        self.links.clear();
        self.addresses.retain(|(_, network), _| network.addr().is_ipv4());
        self.routes.retain(|key, _| key.prefix.addr().is_ipv4());
        self.neighbours.retain(|(_, address), _| address.is_ipv4());
        self
    }

    /// Returns the routes with the metrics of operations.
    fn of_the_test(mut self) -> BTreeMap<RouteKey, Route> {
        self.routes.retain(|key, _| [10, 11].contains(&key.metric));
        self.routes
    }

    fn named(&self, name: &str) -> InterfaceIndex {
        self.links.values().find(|link| link.name == name).unwrap_or_else(|| panic!("no {name}")).index
    }
}

/// The kernel removes it when the interface goes down.
const V6: &str = "fd00:1::1/64";

/// Creates a veth pair `a` and `b`, up, with 10.1.0.1/24 and fd00:1::1/64 on `a`.
fn pair(requests: &mut Requests) -> Snapshot {
    let endpoint = |name| VethEndpoint { name, namespace: None, mac: None };
    requests.add_veth(endpoint("a"), endpoint("b")).unwrap();
    let snapshot = Snapshot::current();
    for name in ["a", "b"] {
        requests.set_up(snapshot.named(name)).unwrap();
    }
    requests.add_address(snapshot.named("a"), "10.1.0.1/24".parse().unwrap()).unwrap();
    requests.add_address(snapshot.named("a"), V6.parse().unwrap()).unwrap();
    Snapshot::current()
}

fn within(namespace: &Namespace, run: impl FnOnce() + Send) {
    namespace.within(run).unwrap();
}

#[test]
fn the_existing_state_is_reported_first_and_then_its_changes() {
    let Some(namespace) = namespace::for_test("the_existing_state_is_reported_first") else { return };
    within(&namespace, || {
        let mut requests = Requests::open().unwrap();
        let a = pair(&mut requests).named("a");
        let (mut monitor, mut snapshot) = (Monitor::open().unwrap(), Snapshot::default());
        snapshot.apply(monitor.changes().unwrap());
        let network = "10.1.0.0/24".parse().unwrap();
        let connected = &snapshot.routes[&RouteKey { prefix: network, metric: 0 }];
        assert_eq!(connected.hops, [RouteHop { interface: a, gateway: None, weight: 1, is_encapsulated: false }]);
        assert!(snapshot.links[&a].is_up && snapshot.links[&a].has_carrier && snapshot.links[&a].mac.is_some());
        assert!(snapshot.addresses[&(a, "10.1.0.1/24".parse().unwrap())].is_usable);

        requests.add_neighbour(a, "10.1.0.9".parse().unwrap(), MacAddress([2, 0, 0, 0, 0, 9])).unwrap();
        requests.set_mtu(a, 1400).unwrap();
        snapshot.apply(monitor.changes().unwrap());
        let neighbour = &snapshot.neighbours[&(a, "10.1.0.9".parse().unwrap())];
        assert_eq!((neighbour.mac, neighbour.state), (Some(MacAddress([2, 0, 0, 0, 0, 9])), NeighbourState::Permanent));
        assert_eq!(snapshot.links[&a].mtu_bytes, 1400);
        requests.set_down(a).unwrap();
        snapshot.apply(monitor.changes().unwrap());
        assert!(!snapshot.routes.keys().any(|key| key.prefix == network), "the kernel removes them silently");
        requests.remove_link(a).unwrap();
        snapshot.apply(monitor.changes().unwrap());
        assert_eq!(snapshot.links.len(), 1, "only loopback remains of {:?}", snapshot.links);
        assert_eq!(snapshot, Snapshot::current());
    });
}

#[test]
fn crosslane_routes_are_installed_unreported_and_removed() {
    let Some(namespace) = namespace::for_test("crosslane_routes") else { return };
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
        requests.install_routes(&routes[..3]).expect("existing routes are ignored");
        let own = Snapshot::current().routes.into_keys().filter(|key| key.metric == 77).count();
        assert_eq!(own, 0, "routes of the router are reported");
        requests.remove_routes(&routes[..100]).unwrap();
        requests.remove_routes(&routes[..1]).expect("absent routes are ignored");
        assert_eq!(requests.remove_own_routes().unwrap(), 500);
        assert_eq!(requests.remove_own_routes().unwrap(), 0);
        let nowhere = RouteRequest { interface: InterfaceIndex(4711), ..routes[0] };
        let error = requests.install_routes(&[&[nowhere][..], &routes[1..]].concat()).unwrap_err().to_string();
        assert!(error.contains("4711") && error.contains("No such device"), "{error}");
        assert_eq!(requests.remove_own_routes().unwrap(), 599, "the other routes were not installed");
    });
}

#[test]
fn a_flood_that_loses_events_is_followed_by_a_dump() {
    let Some(namespace) = namespace::for_test("a_flood_that_loses_events") else { return };
    within(&namespace, || {
        let mut requests = Requests::open().unwrap();
        let a = pair(&mut requests).named("a");
        let (mut monitor, mut snapshot) = (Monitor::open().unwrap(), Snapshot::default());
        snapshot.apply(monitor.changes().unwrap());
        monitor.set_queue(4096);
        for n in 1..200u8 {
            requests.add_neighbour(a, format!("10.1.0.{n}").parse().unwrap(), MacAddress([2, 0, 0, 0, 0, n])).unwrap();
            requests.add_address(a, format!("10.2.{n}.1/24").parse().unwrap()).unwrap();
        }
        snapshot.apply(monitor.changes().unwrap());
        assert!(monitor.resyncs() > 1, "no event was lost");
        assert_eq!(snapshot.clone().of_v4(), Snapshot::current().of_v4());
        assert!(snapshot.addresses.contains_key(&(a, "10.2.199.1/24".parse().unwrap())));
    });
}

#[test]
fn events_that_the_kernel_drops_until_its_queue_is_empty_are_recovered() {
    let Some(namespace) = namespace::for_test("events_that_the_kernel_drops") else { return };
    within(&namespace, || {
        let mut requests = Requests::open().unwrap();
        let a = pair(&mut requests).named("a");
        let (mut monitor, mut snapshot) = (Monitor::open().unwrap(), Snapshot::default());
        snapshot.apply(monitor.changes().unwrap());
        // More events than a batch: the kernel reports the loss once, and drops all events until the queue is empty.
        monitor.set_receives_max(100);
        let neighbour = |n: u32| format!("10.1.{}.{}", n / 256, n % 256).parse().unwrap();
        for round in 0..2 {
            monitor.set_queue(100 << 10);
            for n in 300..900 {
                requests.add_neighbour(a, neighbour(n), MacAddress([2, 0, 0, round, 0, 0])).unwrap();
            }
            snapshot.apply(monitor.changes().unwrap());
            requests.add_neighbour(a, neighbour(7), MacAddress([2, 0, 0, round, 7, 7])).unwrap();
            snapshot.apply(monitor.changes().unwrap());
            assert_eq!(snapshot.clone().of_v4(), Snapshot::current().of_v4());
        }
    });
}

/// IPv6 routes are added and removed during a dump, which then lacks some of the routes that stay.
#[test]
fn no_route_is_missing_if_others_were_removed_during_a_dump() {
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
                let (mut monitor, mut snapshot) = (Monitor::open().unwrap(), Snapshot::default());
                snapshot.apply(monitor.changes().unwrap());
                watched.push((monitor, snapshot));
            }
        });
        let existing = Snapshot::current().of_the_test();
        for (monitor, snapshot) in &mut watched {
            // The next dump may take some time.
            let is_whole = (0..50).any(|_| {
                snapshot.apply(monitor.changes().unwrap());
                let is_whole = snapshot.clone().of_the_test() == existing;
                std::thread::sleep(Duration::from_millis(if is_whole { 0 } else { 100 }));
                is_whole
            });
            assert!(is_whole, "{} of {}", snapshot.clone().of_the_test().len(), existing.len());
        }
    });
}

/// An operation of an administrator or a routing daemon on the routes of a few prefixes.
#[derive(Clone, Debug)]
enum Operation {
    Add { flags: u16, route: Shape },
    Delete(Shape),
    Down,
    Up,
    Poll,
}

/// One of a few possible routes.
#[derive(Clone, Debug)]
struct Shape {
    is_v6: bool,
    prefix: u8,
    metric: u8,
    protocol: u8,
    /// A bit for each of the gateways 2, 3 and 4; 0 means a blackhole route.
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

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let shape = (any::<bool>(), 0..2u8, 0..2u8, prop_oneof![Just(4u8), Just(186)], 0..8u8)
        .prop_map(|(is_v6, prefix, metric, protocol, gateways)| Shape { is_v6, prefix, metric, protocol, gateways });
    let flags = prop_oneof![
        Just(NLM_F_CREATE | NLM_F_EXCL),
        Just(NLM_F_CREATE | NLM_F_APPEND),
        Just(NLM_F_CREATE | NLM_F_REPLACE),
        Just(NLM_F_CREATE),
    ];
    let operation = prop_oneof![
        8 => (flags, shape.clone()).prop_map(|(flags, route)| Operation::Add { flags, route }),
        4 => shape.prop_map(Operation::Delete),
        1 => Just(Operation::Down),
        1 => Just(Operation::Up),
        3 => Just(Operation::Poll),
    ];
    proptest::collection::vec(operation, 1..60)
}

/// Restores the initial state: the interface is up and has its addresses, and all routes are the kernel's.
fn reset(requests: &mut Requests, interface: InterfaceIndex) {
    requests.set_up(interface).unwrap();
    let _ = requests.add_address(interface, V6.parse().unwrap());
    for key in Snapshot::current().routes.into_keys().filter(|key| [10, 11].contains(&key.metric)) {
        let absent = RouteRequest { prefix: key.prefix, metric: key.metric, interface, gateway: None };
        let mut message = requests::own_route(&absent);
        message.header.protocol = RouteProtocol::Unspec;
        message.header.scope = RouteScope::NoWhere;
        message.header.kind = RouteType::Unspec;
        message.attributes.retain(|attribute| !matches!(attribute, RouteAttribute::Oif(_)));
        while requests.request(String::new(), Message::DelRoute(message.clone()), 0).is_ok() {}
    }
}

#[test]
fn changes_add_up_to_the_kernels_routes() {
    check_histories(60);
}

#[test]
#[ignore = "a minute or two; in ./x exam"]
fn changes_add_up_to_the_kernels_routes_over_long_histories() {
    check_histories(30_000);
}

fn check_histories(histories: u32) {
    let Some(namespace) = namespace::for_test("changes_add_up_to_the_kernels_routes") else { return };
    within(&namespace, || {
        let mut requests = Requests::open().unwrap();
        let a = pair(&mut requests).named("a");
        let (requests, done) = (RefCell::new(requests), Cell::new(0));
        let mut runner = TestRunner::new(Config { cases: histories, failure_persistence: None, ..Config::default() });
        let result = runner.run(&operations(), |operations| {
            let mut requests = requests.borrow_mut();
            reset(&mut requests, a);
            let (mut monitor, mut snapshot) = (Monitor::open().unwrap(), Snapshot::default());
            for operation in operations {
                // Many operations are refused: the route exists, does not exist, or its gateway is unreachable.
                let accepted = match operation {
                    Operation::Add { flags, route } => {
                        requests.request(String::new(), Message::NewRoute(route.message(a)), flags)
                    }
                    Operation::Delete(route) => requests.request(String::new(), Message::DelRoute(route.message(a)), 0),
                    Operation::Down => requests.set_down(a),
                    Operation::Up => requests.set_up(a).and_then(|()| requests.add_address(a, V6.parse().unwrap())),
                    Operation::Poll => {
                        snapshot.apply(monitor.changes().unwrap());
                        continue;
                    }
                };
                done.set(done.get() + u32::from(accepted.is_ok()));
            }
            snapshot.apply(monitor.changes().unwrap());
            prop_assert_eq!(snapshot.of_the_test(), Snapshot::current().of_the_test());
            Ok(())
        });
        result.unwrap_or_else(|failure| panic!("{failure}"));
        assert!(done.get() > 200, "only {} operations were accepted", done.get());
    });
}

/// The kernel does not report an IPv6 route among the next hops of another one, until these are removed.
#[test]
fn a_route_that_a_multipath_route_hid_is_reported_after_its_removal() {
    let Some(namespace) = namespace::for_test("a_route_that_a_multipath_route_hid") else { return };
    within(&namespace, || {
        let mut requests = Requests::open().unwrap();
        pair(&mut requests);
        let route = |words: &str, next_hops: &str| {
            ip(&format!("-6 route {words} fd00:50::/48 metric 10 proto static{next_hops}"))
        };
        for (words, next_hops) in [("del blackhole", ""), ("replace", " via fd00:1::4")] {
            route("add", " via fd00:1::2");
            route("prepend blackhole", "");
            route("replace", " nexthop via fd00:1::2 dev a nexthop via fd00:1::3 dev a");
            let (mut monitor, mut snapshot) = (Monitor::open().unwrap(), Snapshot::default());
            snapshot.apply(monitor.changes().unwrap());
            route(words, next_hops);
            snapshot.apply(monitor.changes().unwrap());
            assert_eq!(snapshot.of_the_test(), Snapshot::current().of_the_test(), "{words}");
            ip("-6 route flush proto static");
        }
    });
}

/// Runs one command of `ip`, in the network namespace of the calling thread.
fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_throw_route_is_reported_like_other_rejecting_routes() {
    let Some(namespace) = namespace::for_test("a_throw_route_is_reported") else { return };
    within(&namespace, || {
        let (mut monitor, mut snapshot) = (Monitor::open().unwrap(), Snapshot::default());
        snapshot.apply(monitor.changes().unwrap());
        let kinds = [RouteKind::Throw, RouteKind::Blackhole, RouteKind::Unreachable, RouteKind::Prohibit];
        for (name, n) in ["throw", "blackhole", "unreachable", "prohibit"].into_iter().zip(1..) {
            ip(&format!("route add {name} 198.51.{n}.0/24"));
            ip(&format!("route add {name} 2001:db8:{n}::/48"));
        }
        snapshot.apply(monitor.changes().unwrap());
        // By events, and by a dump.
        for snapshot in [&snapshot, &Snapshot::current()] {
            let reported: Vec<RouteKind> = snapshot.routes.values().map(|route| route.kind).collect();
            assert_eq!(reported, [kinds, kinds].concat());
        }
    });
}

#[test]
fn mtu_encapsulation_and_local_routes_are_reported() {
    let Some(namespace) = namespace::for_test("mtu_encapsulation_and_local_routes") else { return };
    within(&namespace, || {
        let a = pair(&mut Requests::open().unwrap()).named("a");
        let (mut monitor, mut snapshot) = (Monitor::open().unwrap(), Snapshot::default());
        snapshot.apply(monitor.changes().unwrap());
        ip("route add 10.5.0.0/16 via 10.1.0.2 mtu 1300");
        ip("route add 10.6.0.0/16 encap ip id 5 dst 10.1.0.9 via 10.1.0.2 dev a");
        ip("route add 10.7.0.0/16 nexthop via 10.1.0.2 nexthop encap ip id 5 dst 10.1.0.9 via 10.1.0.3 dev a");
        ip("route add fd00:6::/48 encap ip6 id 5 dst fd00:1::9 dev a");
        ip("nexthop add id 1 encap ip6 id 5 dst fd00:1::9 via fd00:1::2 dev a");
        ip("route add fd00:7::/48 nhid 1");
        ip("link set dev lo up");
        ip("route add local 10.8.0.0/16 dev lo");
        ip("route add local fd00:8::/48 dev lo");
        snapshot.apply(monitor.changes().unwrap());
        for snapshot in [&snapshot, &Snapshot::current()] {
            let route = |prefix: &str| snapshot.routes.values().find(|route| route.key.prefix.to_string() == prefix);
            let encapsulated = |prefix: &str| -> Vec<bool> {
                route(prefix).unwrap().hops.iter().map(|hop| hop.is_encapsulated).collect()
            };
            assert_eq!(
                (route("10.5.0.0/16").unwrap().mtu_bytes, encapsulated("10.5.0.0/16")),
                (Some(1300), vec![false])
            );
            assert_eq!((route("10.6.0.0/16").unwrap().mtu_bytes, encapsulated("10.6.0.0/16")), (None, vec![true]));
            assert_eq!(encapsulated("10.7.0.0/16"), [false, true]);
            assert_eq!((encapsulated("fd00:6::/48"), encapsulated("fd00:7::/48")), (vec![true], vec![true]));
            let local = snapshot.routes.values().filter(|route| route.kind == RouteKind::Local);
            let local: Vec<String> = local.map(|route| route.key.prefix.to_string()).collect();
            assert_eq!(local, ["10.8.0.0/16", "fd00:8::/48"], "no local routes of the kernel");
        }
        ip("route change 10.5.0.0/16 via 10.1.0.2 mtu 1200");
        ip("route add 10.8.0.0/16 via 10.1.0.2");
        snapshot.apply(monitor.changes().unwrap());
        let key = |prefix: &str| RouteKey { prefix: prefix.parse().unwrap(), metric: 0 };
        assert_eq!(snapshot.routes[&key("10.5.0.0/16")].mtu_bytes, Some(1200));
        assert_eq!(snapshot.routes[&key("10.8.0.0/16")].kind, RouteKind::Local, "table local is searched first");
        ip("route del local 10.8.0.0/16 dev lo table local");
        snapshot.apply(monitor.changes().unwrap());
        assert_eq!(snapshot.routes[&key("10.8.0.0/16")].kind, RouteKind::Unicast);
        assert!(snapshot.routes[&key("10.8.0.0/16")].hops.iter().all(|hop| hop.interface == a));
        assert_eq!(snapshot.routes, Snapshot::current().routes);
    });
}

#[test]
fn routes_with_next_hop_objects_disappear_with_the_carrier() {
    let name = "routes_with_next_hop_objects";
    let (Some(namespace), Some(elsewhere)) = (namespace::for_test(name), namespace::for_test(name)) else { return };
    within(&namespace, || {
        let endpoint = |name, namespace| VethEndpoint { name, namespace, mac: None };
        Requests::open().unwrap().add_veth(endpoint("here", None), endpoint("there", Some(elsewhere.as_fd()))).unwrap();
        let set_peer = |state: &str| elsewhere.within(|| ip(&format!("link set dev there {state}"))).unwrap();
        set_peer("up");
        for command in
            ["link set dev here up", "address add 10.1.0.1/24 dev here", "nexthop add id 1 via 10.1.0.2 dev here"]
        {
            ip(command);
        }
        ip("route add 10.5.0.0/16 nhid 1");
        let (mut monitor, mut snapshot) = (Monitor::open().unwrap(), Snapshot::default());
        snapshot.apply(monitor.changes().unwrap());
        let key = RouteKey { prefix: "10.5.0.0/16".parse().unwrap(), metric: 0 };
        assert!(snapshot.routes.contains_key(&key));
        // The peer goes down: the interface here stays up, but has no carrier.
        set_peer("down");
        for _ in 0..1000 {
            snapshot.apply(monitor.changes().unwrap());
            if snapshot == Snapshot::current() && !snapshot.links[&snapshot.named("here")].has_carrier {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(snapshot.routes, Snapshot::current().routes);
        assert!(!snapshot.routes.contains_key(&key), "the kernel removes it silently");
    });
}

#[test]
fn an_event_that_cannot_be_parsed_hides_no_other_event() {
    let Some(namespace) = namespace::for_test("an_event_that_cannot_be_parsed") else { return };
    within(&namespace, || {
        let mut requests = Requests::open().unwrap();
        let a = pair(&mut requests).named("a");
        let (mut monitor, mut snapshot) = (Monitor::open().unwrap(), Snapshot::default());
        snapshot.apply(monitor.changes().unwrap());
        let gateway = "10.1.0.7".parse().unwrap();
        let request =
            RouteRequest { prefix: "10.9.0.0/16".parse().unwrap(), metric: 9, interface: a, gateway: Some(gateway) };
        // A valid event; a link event whose address attribute is truncated; invalid bytes after it.
        let mut route = requests::own_route(&request);
        route.header.protocol = RouteProtocol::Static;
        let malformed = {
            let header = [&[0u8, 0, 1, 0][..], &a.0.to_ne_bytes(), &[0; 8]].concat();
            let attribute = [&64u16.to_ne_bytes()[..], &4u16.to_ne_bytes(), &[5, 0, 0, 0]].concat();
            let length = (16 + header.len() + attribute.len()) as u32;
            [&length.to_ne_bytes()[..], &16u16.to_ne_bytes(), &[0; 10], &header, &attribute].concat()
        };
        let kernel = monitor.replace_events();
        for garbage in [&[][..], &[3; 9]] {
            let before = monitor.resyncs();
            let mut bytes = Vec::new();
            route.header.protocol = RouteProtocol::from(200 + garbage.len() as u8);
            socket::Socket::open(0).unwrap().write(Message::NewRoute(route.clone()), 0, &mut bytes);
            kernel.send(&[&bytes, &malformed[..], garbage].concat()).unwrap();
            let failed = monitor.changes();
            assert_eq!(failed.is_err(), !garbage.is_empty(), "{failed:?}");
            snapshot.apply(failed.unwrap_or_default());
            snapshot.apply(monitor.changes().unwrap());
            // The kernel has no such route, so its removal was reported, too.
            assert_eq!(snapshot, Snapshot::current());
            assert!(monitor.resyncs() > before, "the state was not dumped again");
        }
        assert_eq!(monitor.unreadable(), 2);
    });
}
