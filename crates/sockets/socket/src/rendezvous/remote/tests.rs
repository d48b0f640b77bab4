//! Tests of connections to listeners of other nodes.

use super::*;
use crate::rendezvous::address::Opener;
use crate::rendezvous::directory::tests::Scratch;
use crate::rendezvous::window_segment::tests::segment_in;
use crate::rendezvous::{
    Accepted, accept, connect_in, listen_in, receive_handshake, send_reply, span_lease, unix_stream,
};
use fabric::shm;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType};
use std::os::fd::AsRawFd;
use std::thread::JoinHandle;

const SERVER: &str = "127.77.0.2:6379";

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn request() -> ConnectRequest {
    let node = Some(IpAddr::from([127, 77, 0, 1]));
    ConnectRequest { destination: address(SERVER), source: None, node, opener: Opener::Program }
}

fn node(scratch: &Scratch) -> Arc<Rack> {
    Arc::new(scratch.rack())
}

fn connect_to(rack: &Arc<Rack>) -> Result<Connected, FallbackReason> {
    connect_as(rack, &request())
}

fn connect_as(rack: &Arc<Rack>, request: &ConnectRequest) -> Result<Connected, FallbackReason> {
    let mut progress = connect(Arc::clone(rack), request, unix_stream().unwrap()).map_err(|none| none.reason)?;
    loop {
        progress = match progress {
            ConnectProgress::Connected(connected) => return Ok(*connected),
            ConnectProgress::Pending(pending) => pending.advance()?,
            ConnectProgress::LifelineConnected { .. } | ConnectProgress::TupleInUse => panic!("no proxy"),
        };
        std::thread::yield_now();
    }
}

fn begin(rack: &Arc<Rack>) -> RemoteConnect {
    match connect(Arc::clone(rack), &request(), unix_stream().unwrap()).unwrap() {
        ConnectProgress::Pending(pending) => pending,
        other => panic!("{other:?}"),
    }
}

/// A monitor that never answers.
fn silent_monitor(rack: &Rack, backlog: i32) -> OwnedFd {
    let path = rack.path().join("../..").join(monitor::SOCKET_NAME);
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&socket, backlog).unwrap();
    socket
}

/// A monitor that answers one query, after `before`.
fn monitor(rack: &Rack, answer: ListenerResponse, before: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    let socket = silent_monitor(rack, 1);
    std::thread::spawn(move || {
        let asker = rustix::net::accept(&socket).unwrap();
        let mut packet = [0; monitor::PACKET_BYTES_MAX];
        let (length, _) = rustix::net::recv(&asker, &mut packet, RecvFlags::empty()).unwrap();
        assert_eq!(monitor::decode_query(&packet[..length]), Some(address(SERVER)));
        before();
        rustix::net::send(&asker, answer.encode().as_bytes(), SendFlags::NOSIGNAL).unwrap();
    })
}

/// A proxy that accepts one connection and replies.
fn proxy(listener: LaneListener, reply: ProxyReply, memory: Option<OwnedFd>) -> JoinHandle<(OwnedFd, Segment)> {
    std::thread::spawn(move || {
        let (accepted, segment) = take(&listener, reply, memory);
        (accepted.lifeline, segment)
    })
}

fn take(listener: &LaneListener, reply: ProxyReply, memory: Option<OwnedFd>) -> (Accepted, Segment) {
    let accepted = loop {
        match accept(listener.fd(), &listener.key(), libc::SOCK_CLOEXEC) {
            Err(Errno::AGAIN) => std::thread::yield_now(),
            accepted => break accepted.unwrap(),
        }
    };
    let from = accepted.tuple.peer.ip().to_string();
    assert_eq!((from.as_str(), accepted.opener), ("127.77.0.1", Opener::Program));
    let segment = loop {
        if let Some((segment, _memfd)) = receive_handshake(accepted.lifeline.as_fd()).unwrap() {
            break segment;
        }
    };
    send_reply(accepted.lifeline.as_fd(), reply, memory.as_ref().map(OwnedFd::as_fd)).unwrap();
    (accepted, segment)
}

#[test]
fn the_monitor_is_queried_for_an_unknown_listener_and_not_for_a_known_one() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = node(&scratch);
    let proxy_rack = Arc::clone(&rack);
    let ready = ListenerResponse::Ready { node: "127.77.0.1".parse().unwrap() };
    let (made, listener) = std::sync::mpsc::channel();
    let listen = move || made.send(listen_for_remote(&proxy_rack, address(SERVER), 1).unwrap()).unwrap();
    let monitor = monitor(&rack, ready, listen);
    let taking = std::thread::spawn(move || proxy(listener.recv().unwrap(), ProxyReply::Accepted(None), None).join());
    let connected = connect_to(&rack).unwrap();
    assert!(connected.is_remote && connected.memory.is_some() && is_connected_to_proxy(connected.lifeline.as_fd()));
    monitor.join().unwrap();
    let (_lifeline, segment) = taking.join().unwrap().unwrap();
    assert_eq!(segment.secrets(), connected.segment.secrets());

    let listener = listen_for_remote(&rack, address(SERVER), 1).unwrap();
    assert_eq!(listen_for_remote(&rack, address(SERVER), 1).unwrap_err(), Errno::ADDRINUSE);
    let taking = proxy(listener, ProxyReply::Accepted(None), None);
    connect_to(&rack).unwrap();
    taking.join().unwrap();
}

#[test]
fn the_monitor_is_queried_for_a_name_whose_socket_does_not_listen_yet() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = node(&scratch);
    let name = ListenerName::remote(address(SERVER));
    let early = unix_stream().unwrap();
    rack.lock(name.address).unwrap().bind(early.as_fd(), &name).unwrap();
    assert_eq!(rack.is_live(&name), Ok(true));
    let proxy_rack = Arc::clone(&rack);
    let (made, listener) = std::sync::mpsc::channel();
    let listen = move || {
        drop(early);
        made.send(listen_for_remote(&proxy_rack, address(SERVER), 1).unwrap()).unwrap();
    };
    let monitor = monitor(&rack, ListenerResponse::Ready { node: "127.77.0.1".parse().unwrap() }, listen);
    let taking = std::thread::spawn(move || proxy(listener.recv().unwrap(), ProxyReply::Accepted(None), None).join());
    assert!(connect_to(&rack).unwrap().is_remote);
    monitor.join().unwrap();
    taking.join().unwrap().unwrap();
}

#[test]
fn the_reason_for_a_missing_lane_is_reported() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = node(&scratch);
    let monitor = monitor(&rack, ListenerResponse::Unavailable(FallbackReason::AccessDenied), || ());
    assert_eq!(connect_to(&rack).unwrap_err(), FallbackReason::AccessDenied);
    monitor.join().unwrap();
    for (errno, reason) in [
        (Errno::CONNREFUSED, FallbackReason::NoListener),
        (Errno::AGAIN, FallbackReason::HandshakeFailed),
        (Errno::NETUNREACH, FallbackReason::LinkDown),
        (Errno::IO, FallbackReason::HandshakeFailed),
    ] {
        let taking = proxy(listen_for_remote(&rack, address(SERVER), 1).unwrap(), ProxyReply::Refused(errno), None);
        assert_eq!(connect_to(&rack).unwrap_err(), reason);
        taking.join().unwrap();
    }
}

#[test]
fn another_port_is_tried_while_the_other_node_has_a_connection_of_the_first() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = node(&scratch);
    let listener = listen_for_remote(&rack, address(SERVER), 1).unwrap();
    let in_use = ProxyReply::Refused(Errno::ADDRINUSE);
    let taking = std::thread::spawn(move || {
        let first = take(&listener, in_use, None).0.tuple;
        let second = take(&listener, ProxyReply::Accepted(None), None).0.tuple;
        (0..=PORT_TRIES_MAX).for_each(|_| drop(take(&listener, in_use, None)));
        take(&listener, in_use, None);
        [first, second]
    });
    let connected = connect_to(&rack).unwrap();
    assert_eq!(connect_to(&rack).unwrap_err(), FallbackReason::PortInUse);
    // A program that has chosen its port has no other.
    let source = Some(SocketAddr::from(([127, 77, 0, 1], crate::rendezvous::tests::own_port())));
    let named = ConnectRequest { source, ..request() };
    assert_eq!(connect_as(&rack, &named).unwrap_err(), FallbackReason::PortInUse);
    let [first, second] = taking.join().unwrap().map(|tuple| tuple.reversed());
    assert_ne!(first, second);
    assert_eq!(connected.tuple, second);
}

#[test]
fn a_pending_connect_does_not_block_is_hidden_and_ends_at_its_deadline() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = node(&scratch);
    let _silent_monitor = silent_monitor(&rack, 8);
    let ends_with = |reason| {
        let (pending, deadline_ns) = (begin(&rack), now_ns() + REPLY_WAIT_NS);
        assert!(crate::descriptor::hidden::is_hidden(pending.wait_target().0.unwrap().as_raw_fd()));
        assert!(pending.wait_target().1 <= deadline_ns);
        let ConnectProgress::Pending(mut pending) = pending.advance().unwrap() else { panic!("nothing has answered") };
        pending.deadline_ns = now_ns();
        assert_eq!(pending.advance().unwrap_err(), reason);
    };
    ends_with(FallbackReason::LinkDown);
    let _silent_proxy = listen_for_remote(&rack, address(SERVER), 8).unwrap();
    ends_with(FallbackReason::HandshakeFailed);
}

#[test]
fn a_busy_monitor_is_queried_once_it_has_room() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = node(&scratch);
    let monitor = silent_monitor(&rack, 0);
    let mut asking = Vec::new();
    while let Some(query) = monitor::send_query(&rack, address(SERVER)).unwrap() {
        asking.push(query);
    }
    let pending = begin(&rack);
    assert!(pending.wait_target().0.is_none());
    asking.iter().for_each(|_| drop(rustix::net::accept(&monitor).unwrap()));
    let ConnectProgress::Pending(pending) = pending.advance().unwrap() else { panic!("nothing has answered") };
    assert!(pending.wait_target().0.is_some());
}

#[test]
fn a_proxy_that_closes_without_a_reply_makes_no_connection() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = node(&scratch);
    let listener = listen_for_remote(&rack, address(SERVER), 1).unwrap();
    let going = std::thread::spawn(move || {
        while let Err(Errno::AGAIN) = accept(listener.fd(), &listener.key(), libc::SOCK_CLOEXEC) {
            std::thread::yield_now();
        }
    });
    assert_eq!(connect_to(&rack).unwrap_err(), FallbackReason::HandshakeFailed);
    going.join().unwrap();
}

#[test]
fn a_connection_moves_to_the_windows_that_the_reply_names() {
    let scratch = Scratch::new();
    let rack = node(&scratch);
    let span_bytes = Segment::WINDOW_BYTES as u64;
    let (memory, mapping) = shm::create(3 * Segment::WINDOW_BYTES).unwrap();
    let spans = WindowSpans::new(span_bytes, 2 * span_bytes);
    let listener = listen_for_remote(&rack, address(SERVER), 1).unwrap();
    let taking = proxy(listener, ProxyReply::Accepted(Some(spans)), Some(memory.try_clone().unwrap()));
    let connected = connect_to(&rack).unwrap();
    assert!(connected.memory.is_some() && connected.segment.is_in_windows());
    let secrets = taking.join().unwrap().1.secrets();
    let back = WindowSpans::new(spans.outbound_offset, spans.inbound_offset);
    let other = segment_in(memory.as_fd(), back, Side::Acceptor, secrets).unwrap();
    assert_eq!(connected.segment.sender().write(b"through the window"), Ok(18));
    let mut bytes = [0; 18];
    assert_eq!(other.receiver().read(&mut bytes), Ok(18));
    assert_eq!(&bytes, b"through the window");
    let first = volmem::Region::of_mapping(Arc::new(mapping)).sub(0, Segment::WINDOW_BYTES);
    assert!((0..Segment::WINDOW_BYTES).step_by(8).all(|at| first.load_u64(at, volmem::sync::Ordering::Relaxed) == 0));
}

#[test]
fn a_server_gets_its_spans_of_the_windows_with_the_handshake() {
    let _no_child = test_support::spawn::forbid();
    let scratch = Scratch::new();
    let rack = node(&scratch);
    let (memory, _mapping) = shm::create(2 * Segment::WINDOW_BYTES).unwrap();
    let (own, other) = (0, Segment::WINDOW_BYTES as u64);
    let spans = WindowSpans::new(own, other);
    let secrets = Secrets { to_acceptor: 5, to_connector: 6 };
    // Other runs of this test may be active on the machine.
    let source = SocketAddr::from(([127, 77, 0, 1], crate::rendezvous::tests::own_port()));
    let request = ConnectRequest { source: Some(source), node: None, opener: Opener::Proxy, ..request() };
    let connect = || {
        let lease = span_lease::lease(memory.as_fd(), spans).unwrap();
        connect_in_windows(&rack, &request, (spans, secrets), lease.as_fd())
    };
    assert_eq!(connect().unwrap_err().reason, FallbackReason::NoListener);
    assert!(!span_lease::is_leased(memory.as_fd(), spans).unwrap());
    let server = listen_in(&rack, address(SERVER), false, false, 1).unwrap();
    let _lifeline = connect().unwrap();
    let accepted = accept(server.fd(), &server.key(), libc::SOCK_CLOEXEC).unwrap();
    assert_eq!(accepted.tuple.peer, source);
    let (segment, memfd) = receive_handshake(accepted.lifeline.as_fd()).unwrap().unwrap();
    drop(memfd);
    assert_eq!((segment.is_in_windows(), segment.secrets()), (true, secrets));
    assert!(span_lease::is_leased(memory.as_fd(), spans).unwrap(), "as long as the server has it mapped");
    drop(segment);
    assert!(!span_lease::is_leased(memory.as_fd(), spans).unwrap());
}

#[test]
fn a_program_that_cannot_map_its_span_reports_it() {
    let scratch = Scratch::new();
    let rack = node(&scratch);
    let span_bytes = Segment::WINDOW_BYTES as u64;
    let (memory, _mapping) = shm::create(2 * Segment::WINDOW_BYTES).unwrap();
    let beyond = ProxyReply::Accepted(Some(WindowSpans::new(0, 2 * span_bytes)));
    let taking = proxy(listen_for_remote(&rack, address(SERVER), 1).unwrap(), beyond, Some(memory));
    assert_eq!(connect_to(&rack).unwrap_err(), FallbackReason::WindowUnmapped);
    taking.join().unwrap();
}

#[test]
fn a_proxy_connects_with_the_addresses_of_a_remote_program_even_on_the_same_machine() {
    let (here, there) = (Scratch::new(), Scratch::new());
    let (rack, remote_rack) = (node(&here), node(&there));
    let taking = proxy(listen_for_remote(&rack, address(SERVER), 1).unwrap(), ProxyReply::Accepted(None), None);
    let program = connect_to(&rack).unwrap();
    taking.join().unwrap();
    let server = listen_in(&remote_rack, address(SERVER), false, false, 1).unwrap();
    let source = Some(program.tuple.local);
    let onward =
        connect_in(&remote_rack, &ConnectRequest { source, node: None, opener: Opener::Proxy, ..request() }).unwrap();
    let accepted = accept(server.fd(), &server.key(), libc::SOCK_CLOEXEC).unwrap();
    assert_eq!((accepted.tuple.peer, accepted.opener), (program.tuple.local, Opener::Proxy));
    assert_eq!(onward.tuple, program.tuple);
}

#[test]
fn only_addresses_of_other_nodes_and_machines_may_be_remote() {
    let may_be = |destination: &str, node| {
        let request = ConnectRequest { destination: address(destination), node, ..request() };
        request.may_be_remote(&request.route())
    };
    let node = request().node;
    for (destination, expected) in
        [("127.77.0.2:1", true), ("127.77.0.1:1", false), ("127.0.0.1:1", false), ("198.51.100.7:1", true)]
    {
        assert_eq!(may_be(destination, node), expected, "{destination}");
        assert!(!may_be(destination, None), "{destination}");
    }
}
