use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;

use super::*;
use crate::control::message::VERSION;
use crate::control::transport::TcpAddress;
use crate::control::{AnnouncedRoute, Key, Origin, RouteKind};

const LIMITS: SessionTimers = SessionTimers { keepalive_ns: 20_000_000, hold_ns: 10_000_000_000 };
const ITERATION_NS: u64 = 1_000_000;
/// Iterations after which a test has failed.
const ITERATIONS_MAX: u64 = 20_000;

/// Node 0 or 1 of a cluster of two, in one directory.
fn peers(folder: &Path, node: u8) -> Peers {
    let address = |node: u8| ControlAddress::Unix(folder.join(node.to_string()));
    let own = Hello { version: VERSION, digest: 7, node, incarnation: 100 + u64::from(node), kept: None };
    let paths = (0..2).map(|node| (node.to_string(), address(node), 1)).collect();
    Peers::new(own, LIMITS, Listener::bind(&address(node), Vec::new()).unwrap(), paths)
}

fn poll(peers: &mut Peers, now_ns: u64) {
    poll_with(peers, now_ns, &Announcements::default());
}

fn poll_with(peers: &mut Peers, now_ns: u64, own: &Announcements) {
    peers.note_readable(&vec![true; peers.descriptors().len()]);
    peers.poll(now_ns, own);
    peers.send(now_ns, own);
}

/// Polls both nodes until the condition holds.
#[track_caller]
fn poll_until(nodes: &mut [Peers; 2], now_ns: &mut u64, is_reached: impl Fn(&[Peers; 2]) -> bool) {
    for _ in 0..ITERATIONS_MAX {
        *now_ns += ITERATION_NS;
        nodes.iter_mut().for_each(|node| poll(node, *now_ns));
        if is_reached(nodes) {
            return;
        }
    }
    panic!("{nodes:#?}");
}

/// The state of each node at the other.
fn states(nodes: &[Peers; 2]) -> [&'static str; 2] {
    nodes.each_ref().map(|node| node.iter().next().unwrap().1.state())
}

fn other(peers: &Peers) -> &Peer {
    peers.iter().next().unwrap().1
}

#[test]
fn a_held_node_ends_its_sessions_with_the_reason_and_opens_them_when_released() {
    let _no_child = test_support::spawn::forbid();
    let folder = tempfile::tempdir().unwrap();
    for held in [0, 1] {
        let mut nodes = [0, 1].map(|node| peers(folder.path(), node));
        let mut now_ns = 0;
        let are_connected = |nodes: &[Peers; 2]| states(nodes) == ["joining"; 2];
        poll_until(&mut nodes, &mut now_ns, are_connected);
        nodes[held].hold("its thread hangs", now_ns);
        poll(&mut nodes[1 - held], now_ns);
        assert_eq!(states(&nodes), ["down"; 2]);
        let reason = other(&nodes[1 - held]).reason.clone().unwrap();
        assert!(reason.contains("its thread hangs"), "{reason}");
        for _ in 0..3000 {
            now_ns += ITERATION_NS;
            nodes.iter_mut().for_each(|node| poll(node, now_ns));
            assert_eq!(states(&nodes), ["down"; 2]);
        }
        nodes[held].release();
        poll_until(&mut nodes, &mut now_ns, are_connected);
        // Earlier attempts do not result in sessions.
        assert_eq!(nodes.each_ref().map(|node| other(node).losses), [1, 1]);
    }
}

#[test]
fn a_suspended_node_opens_a_session_with_the_current_peer_only() {
    let _no_child = test_support::spawn::forbid();
    let folder = tempfile::tempdir().unwrap();
    let suspended = peers(folder.path(), 0);
    for _ in 0..5 {
        poll(&mut peers(folder.path(), 1), ITERATION_NS);
    }
    let mut nodes = [suspended, peers(folder.path(), 1)];
    let mut now_ns = 0;
    poll_until(&mut nodes, &mut now_ns, |nodes| states(nodes) == ["joining"; 2]);
    let is_up = |update: &PeerUpdate| matches!(update, PeerUpdate::Up(_));
    assert_eq!(nodes.each_mut().map(|node| node.take_updates().iter().filter(|update| is_up(update)).count()), [1, 1]);
    assert_eq!(nodes.each_ref().map(|node| other(node).losses), [0, 0]);
}

/// The updates about routes.
fn route_updates(peers: &mut Peers) -> Vec<String> {
    let of = |update: PeerUpdate| match update {
        PeerUpdate::RoutesBegin(_, is_continued) => Some(format!("begin {is_continued}")),
        PeerUpdate::Routes(_, changes) => Some(format!("{} changes", changes.len())),
        PeerUpdate::Forget(_) => Some("forget".to_owned()),
        PeerUpdate::Down(_) => Some("down".to_owned()),
        _ => None,
    };
    peers.take_updates().into_iter().filter_map(of).collect()
}

#[test]
fn a_lost_node_that_returns_is_sent_only_what_has_changed() {
    let _no_child = test_support::spawn::forbid();
    let folder = tempfile::tempdir().unwrap();
    let mut nodes = [0, 1].map(|node| peers(folder.path(), node));
    let mut own = Announcements::default();
    let route = AnnouncedRoute { metric: 0, origin: Origin::Kernel, kind: RouteKind::Blackhole, hops: Vec::new() };
    let prefix = |number: u8| format!("10.{number}.0.0/16").parse().unwrap();
    (0..3).for_each(|number| _ = own.announce(prefix(number), &route));
    let mut now_ns = 0;
    let mut settle = |nodes: &mut [Peers; 2], own: &Announcements| {
        for _ in 0..ITERATIONS_MAX {
            now_ns += ITERATION_NS;
            nodes.iter_mut().for_each(|node| poll_with(node, now_ns, own));
            if states(nodes) == ["joining"; 2] && nodes[0].advertised_to_all(now_ns) == Some(own.latest()) {
                nodes.iter_mut().for_each(|node| poll_with(node, now_ns, own));
                return now_ns;
            }
        }
        panic!("{nodes:#?}");
    };
    settle(&mut nodes, &own);
    assert_eq!(route_updates(&mut nodes[1]), ["begin false", "3 changes"]);
    // The hold timer of one node expires.
    nodes[1].peer_down(NodeId(0), "silent", 0);
    own.withdraw(&prefix(1));
    settle(&mut nodes, &own);
    assert_eq!(route_updates(&mut nodes[1]), ["down", "begin true", "1 changes"]);
    assert_eq!(route_updates(&mut nodes[0]), ["begin false", "3 changes", "down", "begin true", "1 changes"]);
    nodes[1].peer_down(NodeId(0), "silent", 0);
    let now_ns = settle(&mut nodes, &own);
    assert_eq!(route_updates(&mut nodes[1]), ["down", "begin true"]);
    // Node 0 is gone for good.
    nodes[0].hold("stopped", now_ns);
    poll_with(&mut nodes[1], now_ns + 1, &own);
    assert_eq!(nodes[1].advertised_to_all(now_ns + 1), None, "it may return");
    poll_with(&mut nodes[1], now_ns + 1 + KEPT_NS, &own);
    assert_eq!(route_updates(&mut nodes[1]), ["down", "forget"]);
}

#[test]
fn a_refusal_is_logged_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut node = peers(folder.path(), 0);
    node.log_refusal("a reason".to_owned(), 1);
    node.log_refusal("a reason".to_owned(), REFUSAL_REPEAT_NS);
    assert_eq!(node.refusals["a reason"], 1);
    node.log_refusal("another".to_owned(), REFUSAL_REPEAT_NS);
    node.log_refusal("a reason".to_owned(), REFUSAL_REPEAT_NS + 1);
    assert_eq!(node.refusals["a reason"], REFUSAL_REPEAT_NS + 1, "two alternating reasons are not logged each time");
    assert_eq!(node.refusals["another"], REFUSAL_REPEAT_NS);
    for reason in 0..1000 {
        node.log_refusal(reason.to_string(), REFUSAL_REPEAT_NS + 2);
    }
    assert_eq!(node.refusals.len(), REFUSALS_MAX, "connections from ever new addresses do not fill the log");
}

/// Returns node 0 or 1 of two machines: node 0 listens on 127.0.0.1, and node 1 is 127.0.0.2.
fn tcp_peers(key: &Key, listener: Listener, address: SocketAddr, node: u8) -> Peers {
    let address = |of: u8| {
        let address = if of == 0 { address } else { "127.0.0.2:9".parse().unwrap() };
        ControlAddress::Tcp(TcpAddress {
            address,
            local_ip: format!("127.0.0.{}", node + 1).parse().unwrap(),
            key: key.clone(),
        })
    };
    let own = Hello { version: VERSION, digest: 7, node, incarnation: 100 + u64::from(node), kept: None };
    Peers::new(own, LIMITS, listener, (0..2).map(|node| (node.to_string(), address(node), 1)).collect())
}

#[test]
fn a_node_that_is_refused_is_told_why() {
    let _no_child = test_support::spawn::forbid();
    let folder = tempfile::tempdir().unwrap();
    let keys = ["one", "two"].map(|name| {
        Key::create(&folder.path().join(name)).unwrap();
        Key::read(&folder.path().join(name)).unwrap()
    });
    let known: Vec<IpAddr> = ["127.0.0.1", "127.0.0.2"].map(|address| address.parse().unwrap()).to_vec();
    let listener = |key: &Key, ip: IpAddr| {
        let tcp = TcpAddress { address: SocketAddr::new(ip, 0), local_ip: ip, key: key.clone() };
        let listener = Listener::bind(&ControlAddress::Tcp(tcp), known.clone()).unwrap();
        let Listener::Tcp(socket, ..) = &listener else { panic!("no TCP") };
        (socket.local_addr().unwrap(), listener)
    };
    for (key, digest, told) in [(1, 7, "another key"), (0, 8, "different cluster file")] {
        let (address, of_0) = listener(&keys[0], known[0]);
        let of_1 = listener(&keys[key], known[1]).1;
        let mut nodes = [tcp_peers(&keys[0], of_0, address, 0), tcp_peers(&keys[key], of_1, address, 1)];
        nodes[1].set_digest(digest);
        let mut now_ns = 0;
        poll_until(&mut nodes, &mut now_ns, |nodes| {
            other(&nodes[1]).reason.as_ref().is_some_and(|reason| reason.contains(told))
        });
        assert!(nodes[0].refusals.keys().any(|reason| reason.contains(told)), "{:?}", nodes[0].refusals);
    }
}

#[test]
fn connections_from_one_address_do_not_keep_other_nodes_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    Key::create(&path).unwrap();
    let key = Key::read(&path).unwrap();
    let known: Vec<IpAddr> = ["127.0.0.1", "127.0.0.2"].map(|address| address.parse().unwrap()).to_vec();
    let listener = |address: &str| {
        let address = TcpAddress { address: address.parse().unwrap(), local_ip: known[0], key: key.clone() };
        let listener = Listener::bind(&ControlAddress::Tcp(address), known.clone()).unwrap();
        let Listener::Tcp(socket, ..) = &listener else { panic!("no TCP") };
        (socket.local_addr().unwrap(), listener)
    };
    let (address, first) = listener("127.0.0.1:0");
    let mut node = tcp_peers(&key, first, address, 0);
    // These connections send nothing and stay open.
    let connections: Vec<TcpStream> = (0..2 * PENDING_MAX).map(|_| TcpStream::connect(address).unwrap()).collect();
    let now_ns = ITERATION_NS;
    for _ in 0..10 {
        poll(&mut node, now_ns);
    }
    assert_eq!(node.pending.len(), PENDING_PER_ADDRESS_MAX);
    let mut nodes = [node, tcp_peers(&key, listener("127.0.0.2:0").1, address, 1)];
    // Time does not advance, so their hello timers do not expire.
    for _ in 0..ITERATIONS_MAX {
        nodes.iter_mut().for_each(|node| poll(node, now_ns));
        if states(&nodes) == ["joining"; 2] {
            break;
        }
        std::thread::yield_now();
    }
    assert_eq!(states(&nodes), ["joining"; 2]);
    drop(connections);
}

#[test]
fn connections_that_cannot_be_accepted_cause_no_wakeup() {
    let folder = tempfile::tempdir().unwrap();
    let mut node = peers(folder.path(), 0);
    let address = ControlAddress::Unix(folder.path().join("0"));
    let waiting: Vec<Transport> = (0..=PENDING_MAX).map(|_| Transport::connect(&address).unwrap()).collect();
    for _ in 0..3 {
        poll(&mut node, ITERATION_NS);
    }
    assert_eq!((node.pending.len(), node.descriptors()[0].1), (PENDING_MAX, PollFlags::empty()));
    drop(waiting);
    poll(&mut node, 2 * ITERATION_NS);
    assert_eq!(node.descriptors()[0].1, PollFlags::IN);
}
