//! The server as its clients see it.

use std::fs::Permissions;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use device_server::{CLIENTS_MAX, Error, Event, Options, Server, ServerThread};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use tempfile::TempDir;

/// Only a hang waits this long.
const HANG_TIMEOUT: Duration = Duration::from_secs(30);
const SIZE_BYTES: u64 = 1 << 20;
const VECTORS: u32 = 2;

struct SocketFolder {
    folder: TempDir,
}

impl SocketFolder {
    fn new() -> Self {
        let owner_only = Permissions::from_mode(0o700);
        Self { folder: tempfile::Builder::new().permissions(owner_only).tempdir().unwrap() }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("device.sock")
    }

    fn bind(&self) -> Result<Server, Error> {
        Server::bind(&Options::new(&self.socket(), SIZE_BYTES, VECTORS).unwrap())
    }

    fn start(&self) -> (ServerThread, Receiver<Event>) {
        let (events, log) = channel();
        let running = self.bind().unwrap().start(move |event| events.send(event.clone()).unwrap_or_default());
        (running.unwrap(), log)
    }

    fn connect(&self) -> UnixStream {
        let socket = UnixStream::connect(self.socket()).unwrap();
        socket.set_read_timeout(Some(HANG_TIMEOUT)).unwrap();
        socket
    }
}

/// Receives a message and its descriptor; `None` if the server has closed the socket.
fn receive(socket: &UnixStream) -> Option<(i64, Option<OwnedFd>)> {
    let mut word = [0; 8];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut word)], &mut control, RecvFlags::CMSG_CLOEXEC);
    let bytes = match received {
        Ok(received) => received.bytes,
        Err(Errno::CONNRESET) => 0,
        Err(errno) => panic!("{errno}"),
    };
    if bytes == 0 {
        return None;
    }
    assert_eq!(bytes, 8);
    let mut descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let descriptor = descriptors.next().and_then(|mut descriptors| descriptors.next());
    Some((i64::from_le_bytes(word), descriptor))
}

#[track_caller]
fn expect(socket: &UnixStream, word: i64) {
    let (found, descriptor) = receive(socket).expect("the server closed the socket");
    assert_eq!((found, descriptor.is_some()), (word, false));
}

#[track_caller]
fn expect_descriptor(socket: &UnixStream, word: i64) -> OwnedFd {
    let (found, descriptor) = receive(socket).expect("the server closed the socket");
    assert_eq!(found, word);
    descriptor.expect("a descriptor")
}

#[track_caller]
fn expect_doorbells(socket: &UnixStream, id: i64) -> Vec<OwnedFd> {
    (0..VECTORS).map(|_| expect_descriptor(socket, id)).collect()
}

/// Reads the setup of a client, up to its own doorbells, which are last.
#[track_caller]
fn setup(socket: &UnixStream, id: i64, others: &[i64]) -> (OwnedFd, Vec<Vec<OwnedFd>>, Vec<OwnedFd>) {
    expect(socket, 0);
    expect(socket, id);
    let memory = expect_descriptor(socket, -1);
    let doorbells_of_others = others.iter().map(|other| expect_doorbells(socket, *other)).collect();
    (memory, doorbells_of_others, expect_doorbells(socket, id))
}

fn ring(doorbell: &OwnedFd) {
    rustix::io::write(doorbell, &1_u64.to_ne_bytes()).unwrap();
}

/// Number of rings since the last call.
fn rings(doorbell: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    match rustix::io::read(doorbell, &mut count) {
        Ok(_) => u64::from_ne_bytes(count),
        Err(Errno::AGAIN) => 0,
        Err(errno) => panic!("{errno}"),
    }
}

#[test]
fn two_clients_share_memory_and_ring_each_other() {
    let folder = SocketFolder::new();
    let (_running, _log) = folder.start();
    let a = folder.connect();
    let (memory_a, _, own_a) = setup(&a, 0, &[]);
    let b = folder.connect();
    let (memory_b, others_b, own_b) = setup(&b, 1, &[0]);
    let from_a = expect_doorbells(&a, 1);

    assert_eq!(rustix::fs::fstat(&memory_a).unwrap().st_size as u64, SIZE_BYTES);
    rustix::io::pwrite(&memory_a, b"word", SIZE_BYTES - 4).unwrap();
    let mut word = [0; 4];
    rustix::io::pread(&memory_b, &mut word, SIZE_BYTES - 4).unwrap();
    assert_eq!(&word, b"word");
    assert_eq!(rustix::fs::ftruncate(&memory_b, 0), Err(Errno::PERM));

    ring(&from_a[1]);
    ring(&others_b[0][0]);
    ring(&others_b[0][0]);
    let counts = [&own_a[0], &own_a[1], &own_b[0], &own_b[1]].map(rings);
    assert_eq!(counts, [2, 0, 0, 1]);
}

#[test]
fn a_disconnection_is_announced_to_the_others_and_the_id_is_not_reused() {
    let folder = SocketFolder::new();
    let (_running, log) = folder.start();
    let a = folder.connect();
    setup(&a, 0, &[]);
    let b = folder.connect();
    setup(&b, 1, &[0]);
    expect_doorbells(&a, 1);
    drop(b);
    expect(&a, 1);
    let c = folder.connect();
    setup(&c, 2, &[0]);
    expect_doorbells(&a, 2);
    let events: Vec<Event> = (0..4).map(|_| log.recv_timeout(HANG_TIMEOUT).unwrap()).collect();
    let connected = |id| Event::Connected { id };
    assert_eq!(events, [connected(0), connected(1), Event::Disconnected { id: 1 }, connected(2)]);
}

#[test]
fn a_client_killed_by_sigkill_is_noticed() {
    let folder = SocketFolder::new();
    let (_running, _log) = folder.start();
    let a = folder.connect();
    setup(&a, 0, &[]);
    let b = OwnedFd::from(folder.connect());
    let mut process = Command::new("sleep").arg("1000").stdin(Stdio::from(b)).spawn().unwrap();
    expect_doorbells(&a, 1);
    process.kill().unwrap();
    expect(&a, 1);
    process.wait().unwrap();
}

#[test]
fn a_client_that_does_not_read_delays_no_other_and_is_dropped() {
    let folder = SocketFolder::new();
    let (_running, log) = folder.start();
    let stalled = folder.connect();
    let a = folder.connect();
    setup(&a, 1, &[0]);
    let mut gone = None;
    for _ in 0..10_000 {
        let passing = folder.connect();
        expect(&passing, 0);
        drop(passing);
        // Client `a` gets its messages immediately, however far the other is behind.
        let mut next = receive(&a).unwrap();
        while next.1.is_some() {
            next = receive(&a).unwrap();
        }
        if next.0 == 0 {
            gone = Some(next.0);
            break;
        }
    }
    assert_eq!(gone, Some(0), "the stalled client was not dropped");
    let why = log.iter().find_map(|event| match event {
        Event::Dropped { id: 0, why } => Some(why),
        _ => None,
    });
    assert!(why.unwrap().contains("does not read"));
    while receive(&stalled).is_some() {}
}

#[test]
fn a_client_that_sends_is_dropped() {
    let folder = SocketFolder::new();
    let (_running, log) = folder.start();
    let a = folder.connect();
    setup(&a, 0, &[]);
    rustix::io::write(&a, b"hello").unwrap();
    assert!(receive(&a).is_none());
    assert_eq!(log.recv_timeout(HANG_TIMEOUT).unwrap(), Event::Connected { id: 0 });
    assert!(matches!(log.recv_timeout(HANG_TIMEOUT).unwrap(), Event::Dropped { id: 0, .. }));
}

#[test]
fn a_client_beyond_the_maximum_is_refused_until_another_disconnects() {
    let folder = SocketFolder::new();
    let (_running, log) = folder.start();
    let clients: Vec<UnixStream> = (0..CLIENTS_MAX).map(|_| folder.connect()).collect();
    let refused = folder.connect();
    assert!(receive(&refused).is_none());
    let refusal = log.iter().find(|event| matches!(event, Event::Refused { .. })).unwrap();
    assert!(refusal.to_string().contains("64 clients are connected"), "{refusal}");
    drop(clients);
    let next = loop {
        let next = folder.connect();
        if let Some((version, _)) = receive(&next) {
            assert_eq!(version, 0);
            break next;
        }
    };
    assert!(receive(&next).is_some());
}

#[test]
fn a_running_server_keeps_its_socket_and_an_ended_one_removes_it() {
    let folder = SocketFolder::new();
    let (running, log) = folder.start();
    let a = folder.connect();
    setup(&a, 0, &[]);
    assert_eq!(folder.bind().unwrap_err(), Error::InUse { path: folder.socket() });
    drop(running);
    assert!(!folder.socket().exists());
    assert!(receive(&a).is_none());
    // The other server's check of the path did not count as a client.
    assert_eq!(log.iter().collect::<Vec<_>>(), [Event::Connected { id: 0 }]);
    assert!(folder.bind().is_ok());
}

#[test]
fn a_server_without_memory_leaves_no_socket_behind() {
    let folder = SocketFolder::new();
    let options = Options::new(&folder.socket(), 1 << 46, VECTORS).unwrap();
    assert!(matches!(Server::bind(&options), Err(Error::MemoryTooLarge { .. })));
    assert!(!folder.socket().exists());
}

#[test]
fn another_user_who_reaches_the_socket_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can be another user");
    }
    let folder = SocketFolder::new();
    let (_running, log) = folder.start();
    std::fs::set_permissions(folder.folder.path(), Permissions::from_mode(0o711)).unwrap();
    std::fs::set_permissions(folder.socket(), Permissions::from_mode(0o666)).unwrap();
    let script = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(len(s.recv(8)))";
    let mut foreign_user = Command::new("python3");
    let output = foreign_user.args(["-c", script]).arg(folder.socket()).uid(65534).current_dir("/").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0\n", "{output:?}");
    let why = "user 65534 is neither root nor the server's user".to_owned();
    assert_eq!(log.recv_timeout(HANG_TIMEOUT), Ok(Event::Refused { why }));
}
