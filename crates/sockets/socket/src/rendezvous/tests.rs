//! Tests of rendezvous on one machine.
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::OFlags;
use rustix::io::{Errno, FdFlags};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use segment::{Segment, Side};
use stats_page::FallbackReason;

use super::accept::*;
use super::address::{Opener, Tuple, ephemeral_ports};
use super::directory::{ListenerName, Rack};
use super::handshake::{HANDSHAKE_BYTES, Handshake};
use super::*;
use crate::descriptor::hidden::close;
use crate::rendezvous::directory::tests::Scratch;
use crate::rendezvous::name_key::tests::OTHER_KEY;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

/// A rack for one test, and the two endpoints of a rendezvous in it.
struct Fixture {
    _scratch: Scratch,
    rack: Arc<Rack>,
}

impl Fixture {
    fn new() -> Self {
        let scratch = Scratch::new();
        let rack = Arc::new(scratch.rack());
        Self { _scratch: scratch, rack }
    }

    fn listen(&self, bound: &str) -> LaneListener {
        listen_in(&self.rack, address(bound), false, false, 1024).unwrap()
    }

    fn connect(&self, to: &str) -> Result<Connected, NoLane> {
        self.connect_from(to, None)
    }

    fn connect_from(&self, to: &str, source: Option<&str>) -> Result<Connected, NoLane> {
        let source = source.map(address);
        connect_in(
            &self.rack,
            &ConnectRequest { destination: address(to), source, node: None, opener: Opener::Program },
        )
    }

    fn names(&self) -> HashSet<String> {
        self.rack.names().unwrap().iter().map(ToString::to_string).collect()
    }

    /// Creates a listener of this name without the library, with a small backlog.
    fn listen_by_hand(&self, name: &str, backlog: i32) -> OwnedFd {
        let socket = unix_stream().unwrap();
        let name = ListenerName::parse(name).unwrap();
        self.rack.lock(name.address).unwrap().bind(socket.as_fd(), &name).unwrap();
        rustix::net::listen(&socket, backlog).unwrap();
        socket
    }
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn accept_now(listener: &LaneListener) -> Accepted {
    accept(listener.fd(), &listener.key(), libc::SOCK_CLOEXEC).unwrap()
}

/// Returns a port that the kernel has given to this process. Names without a secret key belong to the whole network
/// namespace, where other runs of these tests may be active.
pub(crate) fn own_port() -> u16 {
    static PORT: OnceLock<std::net::TcpListener> = OnceLock::new();
    let listener = PORT.get_or_init(|| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    listener.local_addr().unwrap().port()
}

fn reason<T: std::fmt::Debug>(outcome: Result<T, NoLane>) -> FallbackReason {
    outcome.unwrap_err().reason
}

#[test]
fn a_server_that_closes_before_the_handshake_comes_has_connected() {
    let fixture = Fixture::new();
    let listener = fixture.listen("127.0.0.1:7001");
    let request =
        ConnectRequest { destination: address("127.0.0.1:7001"), source: None, node: None, opener: Opener::Program };
    let lifeline = unix_stream().unwrap();
    bind_tuple(lifeline.as_fd(), &request.route().unwrap(), 1, Opener::Program, &fixture.rack.key()).unwrap();
    connect_to_first(&fixture.rack, lifeline.as_fd(), &[listener.name()], || Ok(())).unwrap();
    close(accept(listener.fd(), &listener.key(), 0).unwrap().lifeline);
    let (segment, memfd) = Segment::create(Side::Connector).unwrap();
    assert_eq!(send_handshake(lifeline.as_fd(), &segment, memfd.as_fd()), Ok(()));
}

#[test]
fn both_endpoints_get_one_memory_and_each_others_address() {
    let fixture = Fixture::new();
    let listener = fixture.listen("127.0.0.1:6379");
    let connected = fixture.connect("127.0.0.1:6379").unwrap();
    let accepted = accept_now(&listener);
    assert_eq!(accepted.tuple, connected.tuple.reversed());
    assert_eq!(accepted.tuple.local, address("127.0.0.1:6379"));
    assert_eq!(accepted.tuple.peer.ip(), address("127.0.0.1:1").ip());
    assert!(ephemeral_ports().contains(&accepted.tuple.peer.port()));
    let (segment, memfd) = receive_handshake(accepted.lifeline.as_fd()).unwrap().unwrap();
    assert_eq!(segment.secrets(), connected.segment.secrets());
    let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
    assert_eq!(inode(&memfd.unwrap().memfd), inode(&connected.memory.unwrap().memfd));
    assert!(receive_handshake(accepted.lifeline.as_fd()).unwrap().is_none(), "the handshake comes once");
    assert!(matches!(accept(listener.fd(), &listener.key(), 0), Err(Errno::AGAIN)));
}

#[test]
fn sources_and_destinations_are_those_of_tcp() {
    let _no_child = test_support::spawn::forbid();
    let fixture = Fixture::new();
    let _v4 = fixture.listen("0.0.0.0:80");
    let _v6 = fixture.listen("[::1]:80");
    let bound = ["0.0.0.0", "[::]", "[::ffff:127.0.0.5]"].map(|ip| format!("{ip}:{}", own_port()));
    for (to, source, local, peer) in [
        ("127.77.0.2:80", None, "127.0.0.1", "127.77.0.2:80"),
        ("0.0.0.0:80", None, "127.0.0.1", "127.0.0.1:80"),
        ("[::]:80", None, "::1", "[::1]:80"),
        ("[::ffff:127.0.0.1]:80", None, "127.0.0.1", "127.0.0.1:80"),
        ("127.0.0.1:80", Some("127.77.0.9:0"), "127.77.0.9", "127.0.0.1:80"),
        ("127.0.0.1:80", Some(bound[0].as_str()), "127.0.0.1", "127.0.0.1:80"),
        ("127.0.0.1:80", Some(bound[1].as_str()), "127.0.0.1", "127.0.0.1:80"),
        ("127.0.0.1:80", Some(bound[2].as_str()), "127.0.0.5", "127.0.0.1:80"),
    ] {
        let tuple = fixture.connect_from(to, source).unwrap().tuple;
        assert_eq!((tuple.local.ip().to_string(), tuple.peer), (local.to_owned(), address(peer)), "{to} {source:?}");
        let port = source.map_or(0, |source| address(source).port());
        assert!(port == 0 || tuple.local.port() == port);
    }
    assert_eq!(reason(fixture.connect_from("127.0.0.1:80", Some("[::1]:9"))), FallbackReason::SocketOption);
    for bound in ["127.0.0.1:80", "0.0.0.0:80"] {
        assert_eq!(reason(fixture.connect_from("127.0.0.1:80", Some(bound))), FallbackReason::ToItself);
    }
}

#[test]
fn a_source_port_of_an_existing_connection_is_in_use() {
    let fixture = Fixture::new();
    let _listener = fixture.listen("127.0.0.1:80");
    let _first = fixture.connect_from("127.0.0.1:80", Some("127.0.0.1:9")).unwrap();
    assert_eq!(reason(fixture.connect_from("127.0.0.1:80", Some("127.0.0.1:9"))), FallbackReason::PortInUse);
    assert_eq!(NoLane::of_bind_error(Errno::ADDRNOTAVAIL).reason, FallbackReason::ResourceLimit);
}

#[test]
fn a_node_is_the_source_towards_other_nodes_only() {
    let fixture = Fixture::new();
    let _listener = fixture.listen("0.0.0.0:80");
    let node = Some(IpAddr::from([127, 77, 0, 2]));
    let local = |to: &str, source: Option<&str>| {
        let request =
            ConnectRequest { destination: address(to), source: source.map(address), node, opener: Opener::Program };
        connect_in(&fixture.rack, &request).unwrap().tuple.local.ip().to_string()
    };
    assert_eq!(local("127.77.0.1:80", None), "127.77.0.2");
    assert_eq!(local("127.77.0.1:80", Some("0.0.0.0:0")), "127.77.0.2");
    assert_eq!(local("127.77.0.1:80", Some("127.0.0.9:0")), "127.0.0.9");
    assert_eq!(local("127.0.0.1:80", None), "127.0.0.1");
}

#[test]
fn without_a_listener_or_to_another_machine_there_is_no_lane() {
    let fixture = Fixture::new();
    let _listener = fixture.listen("0.0.0.0:80");
    assert_eq!(reason(fixture.connect("127.0.0.1:81")), FallbackReason::NoListener);
    assert_eq!(reason(fixture.connect("[::1]:80")), FallbackReason::NoListener);
    assert_eq!(reason(fixture.connect("127.0.0.1:0")), FallbackReason::NoListener);
    assert_eq!(reason(fixture.connect("198.51.100.7:80")), FallbackReason::RemoteAddress);
    assert_eq!(reason(fixture.connect("[2001:db8::7]:80")), FallbackReason::RemoteAddress);
}

#[test]
fn the_exact_listener_is_found_before_the_unspecified_ones() {
    let fixture = Fixture::new();
    let any6 = fixture.listen("[::]:80");
    assert!(fixture.connect("127.0.0.1:80").is_ok());
    accept_now(&any6);
    let any4 = fixture.listen("0.0.0.0:80");
    assert!(fixture.connect("127.0.0.1:80").is_ok());
    accept_now(&any4);
    let exact = fixture.listen("127.0.0.1:80");
    assert!(fixture.connect("127.0.0.1:80").is_ok());
    accept_now(&exact);
    assert!(fixture.connect("[::1]:80").is_ok());
    accept_now(&any6);
}

#[test]
fn listeners_that_share_an_address_all_get_connections() {
    let fixture = Fixture::new();
    let share = || listen_in(&fixture.rack, address("127.0.0.1:80"), false, true, 1).unwrap();
    let listeners = [share(), share(), share()];
    assert_eq!(fixture.names().len(), 3);
    let mut reached = HashSet::new();
    // Each of three names is chosen with a probability of a third, so each is almost surely chosen in this many
    // connections.
    for _ in 0..200 {
        let _connected = fixture.connect("127.0.0.1:80").unwrap();
        let taker = listeners.iter().position(|listener| accept(listener.fd(), &listener.key(), 0).is_ok());
        reached.insert(taker.expect("one of them has the connection"));
    }
    assert_eq!(reached.len(), 3);
}

#[test]
fn an_address_is_shared_only_among_listeners_that_all_share() {
    let _no_child = test_support::spawn::forbid();
    let fixture = Fixture::new();
    let listen = |shared| listen_in(&fixture.rack, address("127.0.0.1:80"), false, shared, 1);
    let first = listen(false).unwrap();
    assert_eq!(listen(false).unwrap_err(), Errno::ADDRINUSE);
    assert_eq!(listen(true).unwrap_err(), Errno::ADDRINUSE);
    drop(first);
    assert!(fixture.names().is_empty());
    let _shared = listen(true).unwrap();
    assert_eq!(listen(false).unwrap_err(), Errno::ADDRINUSE);
    assert!(listen(true).is_ok());
}

#[test]
fn a_name_stays_while_another_process_listens_on_the_same_socket() {
    let _no_child = test_support::spawn::forbid();
    let fixture = Fixture::new();
    let listener = fixture.listen("127.0.0.1:80");
    // A forked child has it like this.
    // SAFETY: the descriptor is that of a live listener, which this test owns.
    let childs = rustix::io::dup(unsafe { BorrowedFd::borrow_raw(listener.fd()) }).unwrap();
    drop(listener);
    assert!(fixture.names().contains("127.0.0.1:80"));
    let _connected = fixture.connect("127.0.0.1:80").unwrap();
    assert!(accept(childs.as_raw_fd(), &fixture.rack.key(), 0).is_ok());
    drop(childs);
    assert_eq!(reason(fixture.connect("127.0.0.1:80")), FallbackReason::NoListener);
    assert!(fixture.names().is_empty(), "a process that finds a stale name removes it");
}

#[test]
fn an_inherited_listener_of_another_rack_or_version_is_closed_so_that_clients_take_tcp() {
    let _no_child = test_support::spawn::forbid();
    let fixture = Fixture::new();
    let folder = fixture.rack.path().parent().unwrap().join("other/v1/net-1");
    std::fs::create_dir_all(&folder).unwrap();
    let first_version = folder.join("127.0.0.1:80");
    let other_rack = fixture.rack.path_of(&ListenerName::parse("127.0.0.1:80").unwrap());
    std::fs::create_dir(other_rack.parent().unwrap()).unwrap();
    let listen_at = |path: &std::path::Path| {
        let listener = unix_stream().unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        listener.into_raw_fd()
    };
    let connect_to = |path| rustix::net::connect(unix_stream().unwrap(), &SocketAddrUnix::new(path).unwrap());
    for path in [&first_version, &other_rack] {
        let fd = listen_at(path);
        assert_eq!(connect_to(path), Ok(()));
        assert!(adopt_listener(fd).is_none());
        assert_eq!(connect_to(path), Err(Errno::CONNREFUSED));
    }
    let programs_own = folder.parent().unwrap().join("127.0.0.1:80");
    let fd = listen_at(&programs_own);
    assert!(adopt_listener(fd).is_none());
    assert_eq!(connect_to(&programs_own), Ok(()));
    // SAFETY: the descriptor was created above and is closed once.
    unsafe { rustix::io::close(fd) };
}

#[test]
fn a_tuple_is_unique_until_its_connecting_endpoint_is_closed() {
    let _no_child = test_support::spawn::forbid();
    let fixture = Fixture::new();
    let listener = fixture.listen("127.0.0.1:80");
    let source = format!("127.0.0.9:{}", own_port());
    let connect = || fixture.connect_from("127.0.0.1:80", Some(&source));
    let first = connect().unwrap();
    let accepted = accept_now(&listener);
    let second = connect();
    assert_eq!(second.unwrap_err().errno, Some(Errno::ADDRINUSE));
    drop(first);
    assert!(connect().is_ok());
    drop(accepted);
}

/// Any process can bind abstract names. A name that others can compute would block the port of the connecting endpoint.
#[test]
fn names_that_are_bound_without_the_key_take_no_port() {
    let _no_child = test_support::spawn::forbid();
    let fixture = Fixture::new();
    let listener = fixture.listen("127.0.0.1:80");
    let tuple = Tuple { local: SocketAddr::from(([127, 0, 0, 8], own_port())), peer: address("127.0.0.1:80") };
    let first_version = format!("crosslane/1/{}>{}", tuple.local, tuple.peer).into_bytes();
    let bind = |name: &[u8]| {
        let socket = unix_stream().unwrap();
        let bound = rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name).unwrap());
        bound.map(|()| socket)
    };
    let squatters = [first_version, tuple.name(Opener::Program, &OTHER_KEY).unwrap()].map(|name| bind(&name).unwrap());
    let source = tuple.local.to_string();
    let connected = fixture.connect_from("127.0.0.1:80", Some(&source)).unwrap();
    assert_eq!((connected.tuple, accept_now(&listener).tuple.reversed()), (tuple, tuple));
    let keyed = tuple.name(Opener::Program, &fixture.rack.key()).unwrap();
    assert_eq!(bind(&keyed).unwrap_err(), Errno::ADDRINUSE, "the library has bound it");
    drop(squatters);
}

#[test]
fn every_connection_has_its_own_tuple() {
    let fixture = Fixture::new();
    let _listener = fixture.listen("127.0.0.1:80");
    let connections: Vec<_> = (0..300).map(|_| fixture.connect("127.0.0.1:80").unwrap()).collect();
    let tuples: HashSet<_> = connections.iter().map(|connected| connected.tuple).collect();
    assert_eq!(tuples.len(), connections.len());
}

#[test]
fn a_full_backlog_is_not_waited_for() {
    let fixture = Fixture::new();
    let _full = fixture.listen_by_hand("127.0.0.1:80", 1);
    let mut waiting = Vec::new();
    let refusal = loop {
        match fixture.connect("127.0.0.1:80") {
            Ok(connected) => waiting.push(connected),
            Err(refusal) => break refusal,
        }
        assert!(waiting.len() < 10);
    };
    assert_eq!(refusal.reason, FallbackReason::HandshakeFailed);
}

/// Connects to a listener as a program without the library does; `name` is bound before.
fn foreign_client(fixture: &Fixture, listener: &LaneListener, name: Option<&[u8]>) -> OwnedFd {
    let socket = unix_stream().unwrap();
    if let Some(name) = name {
        rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name).unwrap()).unwrap();
    }
    rustix::net::connect(&socket, &fixture.rack.address_of(&listener.name()).unwrap()).unwrap();
    socket
}

#[test]
fn foreign_clients_are_rejected_and_the_next_client_is_accepted() {
    let fixture = Fixture::new();
    let listener = fixture.listen("127.0.0.1:80");
    let unique = format!("nonsense {}", fixture.rack.path().display());
    // One client of the first version, whose names had no code, and one of another rack.
    let tuple = Tuple { local: SocketAddr::from(([127, 0, 0, 7], own_port())), peer: address("127.0.0.1:80") };
    let clients = [
        foreign_client(&fixture, &listener, None),
        foreign_client(&fixture, &listener, Some(&unique.as_bytes()[..unique.len().min(100)])),
        foreign_client(&fixture, &listener, Some(&[0xff; 107])),
        foreign_client(&fixture, &listener, Some(format!("crosslane/1/{}>{}", tuple.local, tuple.peer).as_bytes())),
        foreign_client(&fixture, &listener, Some(&tuple.name(Opener::Program, &OTHER_KEY).unwrap())),
    ];
    let connected = fixture.connect("127.0.0.1:80").unwrap();
    assert_eq!(accept_now(&listener).tuple.reversed(), connected.tuple);
    for client in clients {
        assert_eq!(rustix::io::read(&client, &mut [0; 1]), Ok(0), "closed");
    }
}

#[test]
fn a_process_of_another_user_is_rejected() {
    let _no_child = test_support::spawn::forbid();
    if !rustix::process::geteuid().is_root() {
        return; // Only root can change its user.
    }
    let listener = unix_stream().unwrap();
    let name = format!("crosslane-test-{}", own_port());
    let listener_address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    rustix::net::bind(&listener, &listener_address).unwrap();
    rustix::net::listen(&listener, 8).unwrap();
    let connect_as = |uid: u32| {
        let listener_address = listener_address.clone();
        std::thread::spawn(move || {
            // SAFETY: the raw call changes the credentials of this thread only, and the thread ends below.
            assert_eq!(unsafe { crate::process::system::call!(libc::SYS_setresuid, uid, uid, uid) }, 0);
            let socket = unix_stream().unwrap();
            let tuple = Tuple { local: SocketAddr::from(([127, 0, 0, 3], own_port())), peer: address("127.0.0.3:2") };
            let own = SocketAddrUnix::new_abstract_name(&tuple.name(Opener::Program, &OTHER_KEY).unwrap()).unwrap();
            rustix::net::bind(&socket, &own).unwrap();
            rustix::net::connect(&socket, &listener_address).unwrap();
            socket
        })
        .join()
        .unwrap()
    };
    drop(connect_as(65_534));
    assert_eq!(accept(listener.as_raw_fd(), &OTHER_KEY, 0).unwrap_err(), Errno::CONNABORTED);
    drop(connect_as(0));
    assert_eq!(accept(listener.as_raw_fd(), &OTHER_KEY, 0).unwrap().tuple.peer.port(), own_port());
}

/// Returns an accepted lifeline and that of the connecting endpoint, which has not sent anything yet.
fn silent_pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
}

fn send(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
}

fn valid_handshake() -> ([u8; HANDSHAKE_BYTES], OwnedFd) {
    let (segment, memfd) = Segment::create(Side::Connector).unwrap();
    (Handshake { secrets: segment.secrets(), spans: None }.encode(), memfd)
}

#[test]
fn a_missing_handshake_is_not_waited_for_and_a_closed_lifeline_is_an_end() {
    let _no_child = test_support::spawn::forbid();
    let (ours, theirs) = silent_pair();
    assert!(receive_handshake(ours.as_fd()).unwrap().is_none());
    drop(theirs);
    assert!(matches!(receive_handshake(ours.as_fd()), Err(HandshakeRejection::Closed)));
}

#[test]
fn handshakes_without_exactly_one_memory_are_refused() {
    let (handshake, memfd) = valid_handshake();
    for count in [0, 2, 3, 4, 5, 16] {
        let (ours, theirs) = silent_pair();
        send(&theirs, &handshake, &vec![memfd.as_fd(); count]);
        let refused = receive_handshake(ours.as_fd()).unwrap_err();
        let HandshakeRejection::Descriptors(found) = refused else { panic!("{count}: {refused:?}") };
        assert_eq!(found, count);
    }
}

#[test]
fn junk_and_other_versions_are_refused() {
    let (handshake, memfd) = valid_handshake();
    let mut newer = handshake;
    newer[8] ^= 0x80;
    for (bytes, expected) in [
        (&b"GET / HTTP/1.0\r\n\r\n"[..], FallbackReason::HandshakeFailed),
        (&handshake[..39], FallbackReason::HandshakeFailed),
        (&[0x55; 4000], FallbackReason::HandshakeFailed),
        (&newer, FallbackReason::VersionMismatch),
    ] {
        let (ours, theirs) = silent_pair();
        send(&theirs, bytes, &[memfd.as_fd()]);
        assert_eq!(receive_handshake(ours.as_fd()).unwrap_err().reason(), expected);
    }
}

#[test]
fn memory_that_could_be_truncated_is_refused() {
    let (handshake, _memfd) = valid_handshake();
    let memory = |bytes: usize, seals: SealFlags| {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memfd = rustix::fs::memfd_create("crosslane-test", flags).unwrap();
        rustix::fs::ftruncate(&memfd, bytes as u64).unwrap();
        rustix::fs::fcntl_add_seals(&memfd, seals).unwrap();
        memfd
    };
    let both = SealFlags::SHRINK | SealFlags::GROW;
    for memfd in [
        memory(Segment::SEGMENT_BYTES, SealFlags::empty()),
        memory(Segment::SEGMENT_BYTES, SealFlags::GROW),
        memory(Segment::SEGMENT_BYTES - 4096, both),
        memory(0, both),
        std::fs::File::open("/dev/zero").unwrap().into(),
        unix_stream().unwrap(),
    ] {
        let (ours, theirs) = silent_pair();
        send(&theirs, &handshake, &[memfd.as_fd()]);
        assert!(matches!(receive_handshake(ours.as_fd()), Err(HandshakeRejection::Memory(_))));
    }
}

#[test]
fn descriptors_of_an_invalid_handshake_are_closed() {
    let _no_child = test_support::spawn::forbid();
    let (handshake, _memfd) = valid_handshake();
    for (bytes, count) in [(&b"nonsense"[..], 1), (&handshake, 1), (&handshake, 3), (&handshake, 16)] {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        let (ours, theirs) = silent_pair();
        send(&theirs, bytes, &vec![writer.as_fd(); count]);
        assert!(receive_handshake(ours.as_fd()).is_err());
        drop(writer);
        assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0), "the end of the pipe: no writer is left");
    }
}

#[test]
fn modes_follow_the_programs_descriptor() {
    let (lifeline, _other) = silent_pair();
    for (cloexec, nonblocking) in [(true, false), (false, true), (true, true), (false, false)] {
        set_modes(lifeline.as_fd(), cloexec, nonblocking).unwrap();
        let modes = rustix::fs::fcntl_getfl(&lifeline).unwrap();
        let flags = rustix::io::fcntl_getfd(&lifeline).unwrap();
        assert_eq!((flags.contains(FdFlags::CLOEXEC), modes.contains(OFlags::NONBLOCK)), (cloexec, nonblocking));
    }
}

#[test]
fn accepted_descriptors_have_the_requested_modes() {
    let fixture = Fixture::new();
    let listener = fixture.listen("127.0.0.1:80");
    for flags in [0, libc::SOCK_CLOEXEC, libc::SOCK_NONBLOCK, libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK] {
        let _connected = fixture.connect("127.0.0.1:80").unwrap();
        let accepted = accept(listener.fd(), &listener.key(), flags).unwrap();
        let cloexec = rustix::io::fcntl_getfd(&accepted.lifeline).unwrap().contains(FdFlags::CLOEXEC);
        let nonblocking = rustix::fs::fcntl_getfl(&accepted.lifeline).unwrap().contains(OFlags::NONBLOCK);
        assert_eq!((cloexec, nonblocking), (flags & libc::SOCK_CLOEXEC != 0, flags & libc::SOCK_NONBLOCK != 0));
    }
    assert_eq!(accept(-1, &fixture.rack.key(), 0).unwrap_err(), Errno::BADF);
}

/// Runs in a process of its own for the tests below: listens, reports it, and runs until it is killed.
#[test]
fn child_of_other_tests() {
    let Some(rack) = std::env::var_os("CROSSLANE_TEST_RACK") else { return };
    let rack = Arc::new(Rack::open(rack.as_ref()).unwrap());
    let _listeners = [("127.0.0.1:80", false), ("127.0.0.1:81", true)]
        .map(|(bound, shared)| listen_in(&rack, address(bound), false, shared, 1).unwrap());
    println!("\nlistening");
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
}

struct Server(Child);

impl Server {
    fn start(fixture: &Fixture) -> Self {
        let rack = fixture.rack.path().parent().and_then(|version| version.parent()).unwrap();
        let _child = test_support::spawn::lock();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rendezvous::tests::child_of_other_tests", "--nocapture"])
            .env("CROSSLANE_TEST_RACK", rack)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let listening = lines.map_while(Result::ok).any(|line| line == "listening");
        let server = Self(child);
        assert!(listening, "the server did not get to listen");
        server
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_name_of_a_killed_server_does_not_block_others() {
    let fixture = Fixture::new();
    let server = Server::start(&fixture);
    let held = listen_in(&fixture.rack, address("127.0.0.1:80"), false, false, 1);
    assert_eq!(held.unwrap_err(), Errno::ADDRINUSE);
    assert!(fixture.connect("127.0.0.1:80").is_ok());
    server.kill();
    assert!(fixture.names().contains("127.0.0.1:80"), "the name is not removed yet");
    let next = Server::start(&fixture);
    assert!(fixture.connect("127.0.0.1:80").is_ok());
    next.kill();
    let listener = fixture.listen("127.0.0.1:80");
    assert!(fixture.connect("127.0.0.1:80").is_ok());
    accept_now(&listener);
}

#[test]
fn listeners_remove_what_killed_ones_left_at_other_addresses() {
    let fixture = Fixture::new();
    Server::start(&fixture).kill();
    assert_eq!(fixture.names().len(), 2);
    let _listeners: Vec<_> = (90..94).map(|port| fixture.listen(&format!("127.0.0.1:{port}"))).collect();
    assert_eq!(fixture.names(), (90..94).map(|port| format!("127.0.0.1:{port}")).collect());
}

#[test]
fn a_connecting_endpoint_finds_the_live_listener_among_stale_names() {
    let fixture = Fixture::new();
    let server = Server::start(&fixture);
    let alive = listen_in(&fixture.rack, address("127.0.0.1:81"), false, true, 1).unwrap();
    server.kill();
    for _ in 0..20 {
        let _connected = fixture.connect("127.0.0.1:81").unwrap();
        accept_now(&alive);
    }
    assert_eq!(reason(fixture.connect("127.0.0.1:80")), FallbackReason::NoListener);
}

#[test]
fn of_concurrent_listeners_one_gets_the_name_and_keeps_it() {
    let fixture = Fixture::new();
    Server::start(&fixture).kill();
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let start = || listen_in(&fixture.rack, address("127.0.0.1:80"), false, false, 1);
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(start)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let started: Vec<_> = outcomes.iter().filter(|outcome| outcome.is_ok()).collect();
    assert_eq!(started.len(), 1);
    // A thread that does not get the lock in time, on a busy machine, does not start either.
    let is_late = |errno: &Errno| matches!(*errno, Errno::ADDRINUSE | Errno::BUSY);
    assert!(outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).all(is_late), "{outcomes:?}");
    assert!(fixture.connect("127.0.0.1:80").is_ok(), "the one that started accepts connections");
}
