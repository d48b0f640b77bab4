//! Two nodes on this machine whose programs reach each other through emulated windows only, by way of two proxies. The
//! monitors are the test's: they train the link, and answer programs that ask for another node's listener.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use control::proxy::{
    Access, Class, Configuration, FromProxy, Node as NodeEntry, Partition, Timing, ToProxy, VERSION, send_device,
};
use control::{Channel, Received};
use fabric::device::{Device, DeviceLink, Seat, Slot};
use fabric::{Link, train_both};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType};
use rustix::process::{Pid, Signal, kill_process};
use socket::monitor::{Answer, PACKET_BYTES_MAX, SOCKET_NAME, asked_for};
use system_tests::{PATIENCE, Process, Rack, place, port};
use tempfile::TempDir;

const NODES: [&str; 2] = ["a", "b"];
const VECTORS: u32 = 2;

fn address(slot: usize) -> [u8; 4] {
    [127, 77, 0, slot as u8 + 1]
}

/// What has come from a proxy, and what has been asked of it.
#[derive(Default)]
struct Said {
    messages: Vec<FromProxy>,
}

/// The monitor's end of a proxy.
struct Monitor {
    channel: Arc<Channel>,
    said: Arc<Mutex<Said>>,
}

impl Monitor {
    /// Listens to a proxy, and to programs at the socket in `rack`.
    fn start(channel: Channel, own: usize, rack: &Path) -> Self {
        let channel = Arc::new(channel);
        let said = Arc::<Mutex<Said>>::default();
        let (heard, from) = (Arc::clone(&said), Arc::clone(&channel));
        // It ends with the proxy.
        std::thread::spawn(move || listen_to_proxy(&from, &heard));
        let monitor = Self { channel, said };
        monitor.answer_programs(own, rack);
        monitor
    }

    fn answer_programs(&self, own: usize, rack: &Path) {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
        rustix::net::bind(&socket, &SocketAddrUnix::new(rack.join(SOCKET_NAME)).expect("a path")).expect("a name");
        rustix::net::listen(&socket, 64).expect("a listener");
        let (channel, said) = (Arc::clone(&self.channel), Arc::clone(&self.said));
        // It ends with the test's process: nothing is left to tidy up after it.
        std::thread::spawn(move || {
            while let Ok(asker) = rustix::net::accept(&socket) {
                answer(&asker, own, &channel, &said);
            }
        });
    }

    fn send(&self, message: &ToProxy) {
        self.channel.send(message, &[]).expect("a proxy that listens");
    }

    #[track_caller]
    fn wait_for(&self, what: &str, is_it: impl Fn(&FromProxy) -> bool) {
        wait_for(&self.said, what, is_it);
    }
}

#[track_caller]
fn wait_for(said: &Mutex<Said>, what: &str, is_it: impl Fn(&FromProxy) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let said = said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.messages.iter().any(&is_it) {
            return;
        }
        assert!(Instant::now() < deadline, "no {what} among {:?}", said.messages);
        drop(said);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

fn listen_to_proxy(channel: &Channel, said: &Mutex<Said>) {
    loop {
        match channel.receive::<FromProxy>() {
            Ok(Received::Message(message, _)) => {
                said.lock().unwrap_or_else(PoisonError::into_inner).messages.push(message);
            }
            Ok(Received::Nothing) => {
                let limit = Timespec { tv_sec: 1, tv_nsec: 0 };
                _ = poll(&mut [PollFd::new(channel, PollFlags::IN)], Some(&limit));
            }
            Ok(Received::Ended) | Err(_) => return,
        }
    }
}

/// A program asks for a listener of the other node: the proxy is to stand in for it, whether it is there or not.
fn answer(asker: &OwnedFd, own: usize, channel: &Channel, said: &Mutex<Said>) {
    let mut packet = [0; PACKET_BYTES_MAX];
    let Ok((length, _)) = rustix::net::recv(asker, &mut packet, RecvFlags::empty()) else { return };
    let Some(address_asked) = asked_for(&packet[..length]) else { return };
    let peer = 1 - own as u8;
    channel.send(&ToProxy::Mirror { peer, address: address_asked }, &[]).expect("a proxy that listens");
    wait_for(said, "mirror", |message| *message == FromProxy::Mirrored { address: address_asked });
    let ready = Answer::Ready { node: address(own).into() };
    let _ = rustix::net::send(asker, ready.encode().as_bytes(), SendFlags::NOSIGNAL);
}

/// A node: its rack directory, its device, its monitor and its proxy.
struct Node {
    rack: Rack,
    device: Device,
    link: DeviceLink,
    monitor: Monitor,
    proxy: Process,
}

/// Two nodes joined by a link that is up.
struct Nodes {
    nodes: Vec<Node>,
    _server: Process,
    _folder: TempDir,
}

impl Nodes {
    fn start() -> Self {
        Self::start_with(None, true)
    }

    /// As [`Nodes::start`], with a link that is as slow as a modelled one, or with nodes that admit nobody.
    fn start_with(timing: Option<&str>, allows: bool) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("device.sock");
        let mut command = Command::new(place::crosslane());
        command.args(["device-server", "--size", "16M", "--vectors"]).arg(VECTORS.to_string());
        let server = Process::start(command.arg("--socket").arg(&socket));
        let device = |own| {
            let seat = Seat { vectors: VECTORS as usize, ..Seat::new(Slot(own), 2) };
            // The server's name is there a moment before it listens.
            server.wait_until("the device", PATIENCE, |_| Device::connect_server(&socket, &seat).is_ok());
            Device::connect_server(&socket, &seat).expect("a device")
        };
        let devices = [device(0), device(1)];
        let mut nodes: Vec<Node> =
            devices.into_iter().enumerate().map(|(own, device)| Node::start(own, device, timing, allows)).collect();
        let [a, b] = &mut nodes[..] else { unreachable!() };
        assert!(train_both(&mut a.link, &mut b.link));
        let nodes = Self { nodes, _server: server, _folder: folder };
        // Each has learned of the other's bells by now.
        for node in &nodes.nodes {
            node.device.look().expect("a device");
            node.hand_over();
        }
        nodes.link_up();
        nodes
    }

    fn link_up(&self) {
        for (own, node) in self.nodes.iter().enumerate() {
            node.monitor.send(&ToProxy::LinkUp { peer: 1 - own as u8, epoch: node.link.epoch().0 });
        }
    }

    /// A program on a node, in Python.
    fn python(&self, node: usize, script: &str, port: u16) -> Command {
        let mut command = self.nodes[node].rack.run(&["--node", NODES[node], "--require-lane"], place::tool("python3"));
        command.args(["-c", script]).arg(SocketAddr::from((address(1), port)).ip().to_string()).arg(port.to_string());
        command
    }

    /// A server on node b, once it listens.
    fn serve(&self, script: &str) -> (Process, u16) {
        let port = port::free_port();
        let script = format!("{COMMON}\n{script}");
        let server = Process::start(&mut self.python(1, &script, port));
        server.wait_until("listening", PATIENCE, |server| server.stdout().contains("listening"));
        (server, port)
    }

    /// Runs a client on node a to its end.
    #[track_caller]
    fn client(&self, script: &str, port: u16) -> String {
        let script = format!("{COMMON}\n{script}");
        Process::start(&mut self.python(0, &script, port)).wait(PATIENCE).must_succeed().stdout
    }

    /// Starts a client on node a, and waits until it has said something.
    fn start_client(&self, script: &str, port: u16, said: &str) -> Process {
        let script = format!("{COMMON}\n{script}");
        let client = Process::start(&mut self.python(0, &script, port));
        client.wait_until(said, PATIENCE, |client| client.stdout().contains(said));
        client
    }
}

impl Node {
    fn start(own: usize, device: Device, timing: Option<&str>, allows: bool) -> Self {
        let rack = Rack::new();
        let (channel, theirs) = Channel::pair().expect("a channel");
        let mut command = Command::new(place::crosslane());
        command.args(["proxy", "--channel", "0"]);
        let proxy = Process::start_on(&mut command, theirs.as_fd().try_clone_to_owned().expect("a descriptor"));
        drop(theirs);
        let monitor = Monitor::start(channel, own, rack.path());
        let entry = |slot: usize| NodeEntry { name: NODES[slot].to_owned(), address: address(slot).into() };
        let partition = |class| Partition { class, core: None };
        monitor.send(&ToProxy::Configure(Configuration {
            version: VERSION,
            own: own as u8,
            nodes: vec![entry(0), entry(1)],
            rack_directory: rack.path().to_owned(),
            control_partition_bytes: 64 << 10,
            partitions: vec![partition(Class::Latency), partition(Class::Bulk)],
            is_direct: false,
            is_failover: false,
            timing: timing.map(|name| Timing { name: name.to_owned(), one_way_ns: None }),
            access: Access { rules: Vec::new(), allows_others: allows },
        }));
        let link = device.link(Slot(1 - own as u8));
        let node = Self { rack, device, link, monitor, proxy };
        node.hand_over();
        node.monitor.wait_for("ready", |message| *message == FromProxy::Ready { version: VERSION });
        node
    }

    fn hand_over(&self) {
        let (bytes, descriptors) = self.device.hand_over().expect("descriptors");
        send_device(&self.monitor.channel, bytes, &descriptors).expect("a proxy that listens");
    }
}

const COMMON: &str = r#"
import hashlib, os, socket, struct, sys, threading, time
address = (sys.argv[1], int(sys.argv[2]))
def say(*words):
    print(*words, flush=True)
def listen():
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen(64)
    say("listening")
    return listener
def read_all(connection):
    digest, size = hashlib.sha256(), 0
    while data := connection.recv(65536):
        digest.update(data)
        size += len(data)
    return size, digest.hexdigest()
def outcome(connection):
    try:
        while connection.recv(65536):
            pass
        return "end"
    except ConnectionResetError:
        return "reset"
"#;

const ECHO: &str = r#"
listener = listen()
def echo(connection):
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)
while True:
    connection, peer = listener.accept()
    threading.Thread(target=echo, args=(connection,)).start()
"#;

#[test]
fn programs_of_two_nodes_talk_by_windows() {
    talk(&Nodes::start());
}

#[test]
fn programs_talk_by_windows_that_are_as_late_as_a_modelled_links() {
    talk(&Nodes::start_with(Some("ntb"), true));
}

#[track_caller]
fn talk(nodes: &Nodes) {
    let (_server, port) = nodes.serve(ECHO);
    let said = nodes.client(
        r#"
with socket.create_connection(address, timeout=20) as server:
    say(server.getpeername()[0], server.getsockname()[0])
    for size in [1, 8, 48, 49, 1000, 16384, 16385, 100_000]:
        data = os.urandom(size)
        server.sendall(data)
        got = b""
        while len(got) < size:
            more = server.recv(65536)
            assert more, "end of stream"
            got += more
        assert got == data, size
say("echoed")
"#,
        port,
    );
    assert_eq!(said, "127.77.0.2 127.77.0.1\nechoed\n");
}

#[test]
fn streams_arrive_whole_both_ways_and_a_half_close_ends_one_of_them() {
    let nodes = Nodes::start();
    let (_server, port) = nodes.serve(ECHO);
    let said = nodes.client(
        r#"
block = os.urandom(1 << 20)
with socket.create_connection(address, timeout=20) as server:
    sent = hashlib.sha256()
    def send():
        for turn in range(40):
            piece = block[turn:] + block[:turn]
            sent.update(piece)
            server.sendall(piece)
        server.shutdown(socket.SHUT_WR)
    sender = threading.Thread(target=send)
    sender.start()
    size, digest = read_all(server)
    sender.join()
say(size, digest == sent.hexdigest())
"#,
        port,
    );
    assert_eq!(said, format!("{} True\n", 40 << 20));
}

#[test]
fn many_connections_at_once_get_their_own_bytes() {
    let nodes = Nodes::start();
    let (_server, port) = nodes.serve(ECHO);
    let said = nodes.client(
        r#"
def talk(number):
    with socket.create_connection(address, timeout=20) as server:
        for turn in range(20):
            data = struct.pack("!II", number, turn) * (1 + number * turn)
            server.sendall(data)
            got = b""
            while len(got) < len(data):
                got += server.recv(65536)
            assert got == data
        right.append(number)
right = []
def watched(number):
    try:
        talk(number)
    except Exception as error:
        say(number, repr(error))
threads = [threading.Thread(target=watched, args=(number,)) for number in range(50)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
say(len(right))
"#,
        port,
    );
    assert_eq!(said, "50\n");
    nodes.nodes[0].monitor.send(&ToProxy::Report);
    nodes.nodes[0].monitor.wait_for("report", |message| match message {
        FromProxy::Report(report) => report.peers[1].connections_total == 50,
        _ => false,
    });
}

#[test]
fn a_port_that_nobody_listens_at_refuses() {
    let nodes = Nodes::start();
    let said = nodes.client(
        r#"
try:
    socket.create_connection(address, timeout=20)
except ConnectionRefusedError:
    say("refused")
"#,
        port::free_port(),
    );
    assert_eq!(said, "refused\n");
    nodes.nodes[0].monitor.wait_for("word of the refusal", |message| matches!(message, FromProxy::Refused { .. }));
}

/// A client that reads until something happens, and what that was.
const READER: &str = r#"
with socket.create_connection(address) as server:
    server.sendall(b"hello")
    assert server.recv(5) == b"hello"
    say("connected")
    say(outcome(server))
"#;

#[test]
fn a_server_that_is_killed_ends_its_connections_as_the_kernel_would() {
    let nodes = Nodes::start();
    let (server, port) = nodes.serve(ECHO);
    let client = nodes.start_client(READER, port, "connected");
    drop(server);
    assert_eq!(client.wait(PATIENCE).must_succeed().stdout, "connected\nend\n");
    // With bytes unread, TCP resets.
    let (server, port) = nodes.serve(
        r#"
listener = listen()
connection, peer = listener.accept()
connection.sendall(connection.recv(5))
time.sleep(60)
"#,
    );
    let script = READER.replace(r#"say("connected")"#, r#"server.sendall(b"unread"); say("connected")"#);
    let client = nodes.start_client(&script, port, "connected");
    drop(server);
    assert_eq!(client.wait(PATIENCE).must_succeed().stdout, "connected\nreset\n");
}

#[test]
fn a_proxy_that_is_killed_resets_connections_at_both_nodes() {
    let nodes = Nodes::start();
    let (server, port) = nodes.serve(
        r#"
listener = listen()
connection, peer = listener.accept()
connection.sendall(connection.recv(5))
say(outcome(connection))
"#,
    );
    let client = nodes.start_client(READER, port, "connected");
    let victim = Pid::from_raw(nodes.nodes[1].proxy.pid() as i32).expect("a pid");
    kill_process(victim, Signal::KILL).expect("a proxy");
    assert_eq!(server.wait(PATIENCE).must_succeed().stdout, "listening\nreset\n");
    // The monitor notices, and takes the link down.
    nodes.nodes[0].monitor.send(&ToProxy::LinkDown { peer: 1, epoch: nodes.nodes[0].link.epoch().0 });
    assert_eq!(client.wait(PATIENCE).must_succeed().stdout, "connected\nreset\n");
    nodes.nodes[0].monitor.wait_for("stop", |message| matches!(message, FromProxy::Stopped { peer: 1, .. }));
}

#[test]
fn a_link_that_goes_down_resets_and_carries_new_connections_once_it_is_up_again() {
    let mut nodes = Nodes::start();
    let (_server, port) = nodes.serve(ECHO);
    let client = nodes.start_client(READER, port, "connected");
    for (own, node) in nodes.nodes.iter_mut().enumerate() {
        let peer = 1 - own as u8;
        node.monitor.send(&ToProxy::LinkDown { peer, epoch: node.link.epoch().0 });
        node.monitor.wait_for("stop", |message| matches!(message, FromProxy::Stopped { .. }));
        node.link.take_down();
    }
    assert_eq!(client.wait(PATIENCE).must_succeed().stdout, "connected\nreset\n");
    let [a, b] = &mut nodes.nodes[..] else { unreachable!() };
    assert!(train_both(&mut a.link, &mut b.link));
    nodes.link_up();
    let mut counts = HashMap::new();
    for _ in 0..3 {
        let said = nodes.client(&READER.replace("say(outcome(server))", "pass"), port);
        *counts.entry(said).or_insert(0) += 1;
    }
    assert_eq!(counts, HashMap::from([("connected\n".to_owned(), 3)]));
}

/// The monitors of this test ask nobody, as a hostile node's would not.
#[test]
fn what_is_opened_without_asking_is_held_to_the_rules_of_the_node_that_is_connected_to() {
    let nodes = Nodes::start_with(None, false);
    let (server, port) = nodes.serve(ECHO);
    let said = nodes.client(
        r#"
try:
    socket.create_connection(address, timeout=20)
except ConnectionRefusedError:
    say("refused")
"#,
        port,
    );
    assert_eq!((said.as_str(), server.stdout().as_str()), ("refused\n", "listening\n"));
    let proxy = &nodes.nodes[1].proxy;
    proxy.wait_until("the offence", PATIENCE, |proxy| proxy.stderr().contains("node 0: opened without asking"));
}

#[test]
fn a_link_that_nothing_goes_over_any_more_is_told_to_the_monitor() {
    let mut nodes = Nodes::start();
    let epoch = nodes.nodes[1].link.epoch().0;
    nodes.nodes[1].link.take_down();
    let is_told = |message: &FromProxy| matches!(message, FromProxy::Broken { peer: 1, epoch: of, .. } if *of == epoch);
    nodes.nodes[0].monitor.wait_for("loss", is_told);
}
