//! Two nodes on this machine whose programs reach each other only through emulated windows, by way of two proxies. The
//! test acts as both monitors: it trains the link and answers programs that request another node's listener.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use control::proxy::{
    Access, Class, Configuration, FromProxy, LinkLossPolicy, Node as NodeEntry, Partition, PeerReport, Report, Spans,
    Timing, ToProxy, VERSION, send_device,
};
use control::{Channel, Received};
use fabric::device::{Device, DeviceConfig, DeviceLink, NodeSlot};
use fabric::{Coherence, Link, train_both};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType};
use rustix::process::{Pid, Signal, kill_process};
use segment::Segment;
use socket::rendezvous::monitor::{ListenerResponse, PACKET_BYTES_MAX, SOCKET_NAME, decode_query};
use system_tests::script::{COMMON, ECHO};
use system_tests::{Process, Rack, WAIT_MAX, paths, port};
use tempfile::TempDir;

#[path = "windows/connects.rs"]
mod connects;
#[path = "windows/passed_on.rs"]
mod passed_on;

const NODES: [&str; 2] = ["a", "b"];
const VECTORS: u32 = 2;
const CONTROL_BYTES: u64 = 64 << 10;
const DATA_BYTES: u64 = 4 << 20;
const PAGE_BYTES: u64 = 4096;

/// Connections through the proxies, and connections whose programs store into windows themselves: over links as fast as
/// their memory, over a modelled link, and over memory that is not ordinary memory, for both nodes or for one of them.
const ALL_SETTINGS: [Settings; 6] = [BY_PROXIES, DIRECT, MODELLED, WRITE_COMBINED, HALF_COMBINED, NON_COHERENT];
/// The configurations in which programs store into windows.
const DIRECT_SETTINGS: [Settings; 5] = [DIRECT, MODELLED, WRITE_COMBINED, HALF_COMBINED, NON_COHERENT];
const BY_PROXIES: Settings = Settings {
    timing: None,
    is_failover: false,
    failover_port: None,
    denies: false,
    spans: 0,
    trains_partitions: false,
    core: None,
    coherence: [Coherence::Coherent; 2],
};
const DIRECT: Settings = Settings { spans: 8, ..BY_PROXIES };
const MODELLED: Settings = Settings { timing: Some("ntb"), ..DIRECT };
const WRITE_COMBINED: Settings = Settings { coherence: [Coherence::WriteCombined; 2], ..DIRECT };
/// A host and a guest that has the memory on a BAR.
const HALF_COMBINED: Settings = Settings { coherence: [Coherence::Coherent, Coherence::WriteCombined], ..DIRECT };
const NON_COHERENT: Settings = Settings { coherence: [Coherence::NonCoherent; 2], trains_partitions: true, ..DIRECT };
/// The round-trip time of the modelled link: 500 ns in each direction.
const MODELLED_RTT_NS: u64 = 1_000;

fn address(slot: usize) -> [u8; 4] {
    [127, 77, 0, slot as u8 + 1]
}

/// The monitor's channel to a proxy.
struct Monitor {
    channel: Arc<Channel>,
    /// The messages from the proxy.
    received: Arc<Mutex<Vec<FromProxy>>>,
    /// Locked while programs get no answer.
    silence: Arc<Mutex<()>>,
}

impl Monitor {
    /// Starts threads for the messages of a proxy and for requests of programs at the socket in `rack`.
    fn start(channel: Channel, own: usize, rack: &Path) -> Self {
        let channel = Arc::new(channel);
        let received = Arc::<Mutex<Vec<FromProxy>>>::default();
        let (messages, from) = (Arc::clone(&received), Arc::clone(&channel));
        // The thread ends with the proxy.
        std::thread::spawn(move || listen_to_proxy(&from, &messages));
        let monitor = Self { channel, received, silence: Arc::default() };
        monitor.answer_programs(own, rack);
        monitor
    }

    fn answer_programs(&self, own: usize, rack: &Path) {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
        rustix::net::bind(&socket, &SocketAddrUnix::new(rack.join(SOCKET_NAME)).expect("a path")).expect("a name");
        rustix::net::listen(&socket, 64).expect("a listener");
        let (channel, received) = (Arc::clone(&self.channel), Arc::clone(&self.received));
        let silence = Arc::clone(&self.silence);
        // The thread ends with the test's process.
        std::thread::spawn(move || {
            while let Ok(program) = rustix::net::accept(&socket) {
                drop(silence.lock());
                answer(&program, own, &channel, &received);
            }
        });
    }

    /// Programs get no answer while the guard lives.
    fn keep_silent(&self) -> MutexGuard<'_, ()> {
        self.silence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, message: &ToProxy) {
        self.channel.send(message, &[]).expect("a proxy that listens");
    }

    #[track_caller]
    fn wait_for(&self, what: &str, matches: impl Fn(&FromProxy) -> bool) {
        wait_for(&self.received, what, matches);
    }

    /// The reports of the proxy.
    fn reports(&self) -> Vec<Report> {
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        let report = |message: &FromProxy| match message {
            FromProxy::Report(report) => Some(report.clone()),
            _ => None,
        };
        received.iter().filter_map(report).collect()
    }

    #[track_caller]
    fn wait_for_more_reports_than(&self, seen: usize) {
        let deadline = Instant::now() + WAIT_MAX;
        while self.reports().len() <= seen {
            assert!(Instant::now() < deadline, "no report");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

#[track_caller]
fn wait_for(received: &Mutex<Vec<FromProxy>>, what: &str, matches: impl Fn(&FromProxy) -> bool) {
    let deadline = Instant::now() + WAIT_MAX;
    loop {
        let received = received.lock().unwrap_or_else(PoisonError::into_inner);
        if received.iter().any(&matches) {
            return;
        }
        assert!(Instant::now() < deadline, "no {what} among {:?}", received);
        drop(received);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

fn listen_to_proxy(channel: &Channel, received: &Mutex<Vec<FromProxy>>) {
    loop {
        match channel.receive::<FromProxy>() {
            Ok(Received::Message(message, _)) => {
                received.lock().unwrap_or_else(PoisonError::into_inner).push(message);
            }
            Ok(Received::Nothing) => {
                let limit = Timespec { tv_sec: 1, tv_nsec: 0 };
                _ = poll(&mut [PollFd::new(channel, PollFlags::IN)], Some(&limit));
            }
            Ok(Received::Ended) | Err(_) => return,
        }
    }
}

/// Answers a program that requests a listener of the other node: the proxy creates a remote listener, whether the
/// listener exists or not.
fn answer(program: &OwnedFd, own: usize, channel: &Channel, received: &Mutex<Vec<FromProxy>>) {
    let mut packet = [0; PACKET_BYTES_MAX];
    let Ok((length, _)) = rustix::net::recv(program, &mut packet, RecvFlags::empty()) else { return };
    let Some(requested) = decode_query(&packet[..length]) else { return };
    let peer = 1 - own as u8;
    channel.send(&ToProxy::Listen { peer, address: requested }, &[]).expect("a proxy that listens");
    wait_for(received, "remote listener", |message| *message == FromProxy::Listening { address: requested });
    let ready = ListenerResponse::Ready { node: address(own).into() };
    let _ = rustix::net::send(program, ready.encode().as_bytes(), SendFlags::NOSIGNAL);
}

/// A node: its rack directory, its device, its monitor and its proxy.
struct Node {
    rack: Rack,
    device: Device,
    link: DeviceLink,
    monitor: Monitor,
    proxy: Process,
}

/// The configuration of a test.
#[derive(Clone, Copy)]
struct Settings {
    /// Name of the model whose delay and rate the link has.
    timing: Option<&'static str>,
    /// Connections survive the loss of the link.
    is_failover: bool,
    /// The proxies listen for failover connections at this port.
    failover_port: Option<u16>,
    /// The nodes deny all connections.
    denies: bool,
    /// Number of spans of each window for programs that store into it themselves.
    spans: u64,
    /// Training clears the data partitions, as for non-coherent memory.
    trains_partitions: bool,
    /// The core on which the threads of both proxies run.
    core: Option<u16>,
    /// The coherence that each node assumes. Unless both assume coherent memory, there are no doorbells.
    coherence: [Coherence; 2],
}

impl Default for Settings {
    fn default() -> Self {
        BY_PROXIES
    }
}

/// Two nodes connected by a link that is up.
struct Nodes {
    nodes: Vec<Node>,
    _server: Process,
    /// The memory of the device, if it has no server.
    memory: OwnedFd,
    _folder: TempDir,
}

impl Nodes {
    fn start() -> Self {
        Self::start_as(Settings::default())
    }

    /// As [`Nodes::start`], with other settings.
    fn start_as(settings: Settings) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("device.sock");
        let mut command = Command::new(paths::crosslane());
        command.args(["device-server", "--size", "32M", "--vectors"]).arg(VECTORS.to_string());
        let server = Process::start(command.arg("--socket").arg(&socket));
        let memory = memory_of_a_file();
        let path = path_of(&memory);
        let device = |own| {
            let data_bytes = if settings.trains_partitions { DATA_BYTES } else { 0 };
            let link_bytes = Some((CONTROL_BYTES + data_bytes) as usize);
            let config = DeviceConfig { vectors: VECTORS as usize, link_bytes, ..DeviceConfig::new(NodeSlot(own), 2) };
            if settings.coherence != [Coherence::Coherent; 2] {
                return Device::open_dax(&path, settings.coherence[usize::from(own)], &config).expect("a device");
            }
            // The server's socket file exists a moment before it listens.
            server.wait_until("the device", WAIT_MAX, |_| Device::connect_server(&socket, &config).is_ok());
            Device::connect_server(&socket, &config).expect("a device")
        };
        let devices = [device(0), device(1)];
        let mut nodes: Vec<Node> =
            devices.into_iter().enumerate().map(|(own, device)| Node::start(own, device, settings)).collect();
        let [a, b] = &mut nodes[..] else { unreachable!() };
        assert!(train_both(&mut a.link, &mut b.link));
        let nodes = Self { nodes, _server: server, memory, _folder: folder };
        // Each node has learned of the other's doorbells by now.
        for node in &nodes.nodes {
            node.device.poll().expect("a device");
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

    /// Both monitors take the link down; the proxies stop using it.
    fn link_down(&mut self) {
        for (own, node) in self.nodes.iter_mut().enumerate() {
            let (peer, epoch) = (1 - own as u8, node.link.epoch().0);
            node.monitor.send(&ToProxy::LinkDown { peer, epoch, policy: LinkLossPolicy::Reset });
            node.monitor.wait_for("stop", |message| *message == FromProxy::Stopped { peer, epoch });
            node.link.take_down();
        }
    }

    /// Trains the link and informs the proxies.
    fn link_up_again(&mut self) {
        let [a, b] = &mut self.nodes[..] else { unreachable!() };
        assert!(train_both(&mut a.link, &mut b.link));
        self.link_up();
    }

    /// Waits until a proxy's report about the link meets a condition, and returns it.
    #[track_caller]
    fn report(&self, node: usize, what: &str, holds: impl Fn(&PeerReport) -> bool) -> PeerReport {
        let monitor = &self.nodes[node].monitor;
        let deadline = Instant::now() + WAIT_MAX;
        loop {
            let seen = monitor.reports().len();
            monitor.send(&ToProxy::Report);
            monitor.wait_for_more_reports_than(seen);
            let last = monitor.reports().pop().expect("a report");
            let report = last.peers[1 - node];
            if holds(&report) {
                return report;
            }
            assert!(Instant::now() < deadline, "{what}: {report:?}");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    /// A proxy's report once this number of direct connections has been made and none of them is open.
    #[track_caller]
    fn wait_for_free_spans(&self, node: usize, direct_total: u64) -> PeerReport {
        let open = |report: &PeerReport| (report.direct_total, report.direct_open, report.connections_open);
        self.report(node, "free spans", |report| open(report) == (direct_total, 0, 0))
    }

    /// A command that runs a Python program on a node.
    fn python(&self, node: usize, script: &str, port: u16) -> Command {
        let mut command = self.nodes[node].rack.run(&["--node", NODES[node], "--require-lane"], paths::tool("python3"));
        command.args(["-c", script]).arg(SocketAddr::from((address(1), port)).ip().to_string()).arg(port.to_string());
        command
    }

    /// Starts a server on node b and waits until it listens.
    fn serve(&self, script: &str) -> (Process, u16) {
        let port = port::free_port();
        let script = format!("{COMMON}\n{script}");
        let server = Process::start(&mut self.python(1, &script, port));
        server.wait_until("listening", WAIT_MAX, |server| server.stdout().contains("listening"));
        (server, port)
    }

    /// Runs a client on node a to its end.
    #[track_caller]
    fn client(&self, script: &str, port: u16) -> String {
        let script = format!("{COMMON}\n{script}");
        Process::start(&mut self.python(0, &script, port)).wait(WAIT_MAX).must_succeed().stdout
    }

    /// Makes one short connection, after which both proxies have started.
    fn serve_once(&self) {
        let (_server, port) = self.serve(ECHO);
        assert_eq!(self.client(&READER.replace("say(outcome(server))", "pass"), port), "connected\n");
    }

    /// Starts a client on node a and waits until it has printed `output`.
    fn start_client(&self, script: &str, port: u16, output: &str) -> Process {
        let script = format!("{COMMON}\n{script}");
        let client = Process::start(&mut self.python(0, &script, port));
        client.wait_until(output, WAIT_MAX, |client| client.stdout().contains(output));
        client
    }
}

/// Memory like that of a device, which cannot be truncated.
fn memory_of_a_file() -> OwnedFd {
    let (memory, _mapping) = fabric::shm::create(32 << 20).expect("memory");
    rustix::fs::fchmod(&memory, Mode::RUSR | Mode::WUSR).expect("a file of our own");
    memory
}

/// The path by which this process and its children open the memory.
fn path_of(memory: &OwnedFd) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd()).into()
}

impl Node {
    fn start(own: usize, device: Device, settings: Settings) -> Self {
        let rack = Rack::new();
        let (channel, theirs) = Channel::pair().expect("a channel");
        let mut command = Command::new(paths::crosslane());
        command.args(["proxy", "--channel", "0"]);
        let proxy = Process::start_on(&mut command, theirs.as_fd().try_clone_to_owned().expect("a descriptor"));
        drop(theirs);
        let monitor = Monitor::start(channel, own, rack.path());
        let entry = |slot: usize| NodeEntry { name: NODES[slot].to_owned(), address: address(slot).into() };
        let partition = |class| Partition { class, core: settings.core };
        let end_bytes = CONTROL_BYTES + DATA_BYTES;
        let is_modelled = settings.timing.is_some();
        let spans = Spans {
            offset_bytes: if is_modelled { end_bytes + PAGE_BYTES } else { end_bytes },
            span_bytes: Segment::window_bytes(is_modelled) as u64,
            count: settings.spans,
        };
        monitor.send(&ToProxy::Configure(Configuration {
            version: VERSION,
            own_slot: own as u8,
            slots: 2,
            nodes: vec![entry(0), entry(1)],
            rack_directory: rack.path().to_owned(),
            control_partition_bytes: CONTROL_BYTES,
            partitions: vec![partition(Class::Latency), partition(Class::Bulk)],
            slice_bytes: None,
            data_bytes: DATA_BYTES,
            spans: (settings.spans > 0).then_some(spans),
            return_ns: 0,
            successor_socket: None,
            keeps_partitions: !settings.trains_partitions,
            is_failover: settings.is_failover,
            failover_port: settings.failover_port,
            timing: settings.timing.map(|name| Timing { name: name.to_owned(), one_way_ns: None }),
            access: Access { rules: Vec::new(), allows_others: !settings.denies },
        }));
        let link = device.link(NodeSlot(1 - own as u8));
        let node = Self { rack, device, link, monitor, proxy };
        node.hand_over();
        node.monitor.wait_for("ready", |message| *message == FromProxy::Ready { version: VERSION });
        node
    }

    /// The message that the other node has ended.
    fn link_down_for_good(&self) -> ToProxy {
        ToProxy::LinkDown { peer: 1, epoch: self.link.epoch().0, policy: LinkLossPolicy::Reset }
    }

    fn hand_over(&self) {
        let (bytes, descriptors) = self.device.hand_over().expect("descriptors");
        send_device(&self.monitor.channel, bytes, &descriptors).expect("a proxy that listens");
    }
}

#[test]
fn programs_of_two_nodes_communicate_through_windows() {
    talk(&Nodes::start());
}

#[test]
fn programs_communicate_through_windows_of_a_modelled_link() {
    talk(&Nodes::start_as(Settings { timing: Some("ntb"), ..Settings::default() }));
}

#[test]
fn programs_store_into_windows_themselves_and_the_proxies_see_no_byte() {
    [DIRECT, WRITE_COMBINED, NON_COHERENT].map(Nodes::start_as).iter().for_each(talk_directly);
}

/// Checks only a lower bound; benchmarks measure the time.
#[test]
fn direct_connections_are_never_faster_than_their_modelled_link() {
    let nodes = Nodes::start_as(MODELLED);
    talk_directly(&nodes);
    let (_server, port) = nodes.serve(ECHO);
    let output = nodes.client(
        r#"
with socket.create_connection(address, timeout=20) as server:
    server.settimeout(None)
    least = 1 << 62
    for turn in range(2000):
        begun = time.monotonic_ns()
        server.sendall(b"8 bytes.")
        got = server.recv(8)
        least = min(least, time.monotonic_ns() - begun)
        assert got == b"8 bytes.", got
say(least)
"#,
        port,
    );
    let least_ns: u64 = output.trim().parse().expect("nanoseconds");
    assert!(least_ns >= MODELLED_RTT_NS, "{least_ns} ns");
}

fn talk_directly(nodes: &Nodes) {
    talk(nodes);
    for own in 0..2 {
        let report = nodes.wait_for_free_spans(own, 1);
        assert_eq!((report.direct_missed, report.connections_total), (0, 1));
        assert_eq!((report.bytes_sent, report.bytes_received), (0, 0));
    }
}

#[track_caller]
fn talk(nodes: &Nodes) {
    let (_server, port) = nodes.serve(ECHO);
    let output = nodes.client(
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
    assert_eq!(output, "127.77.0.2 127.77.0.1\nechoed\n");
}

#[test]
fn streams_arrive_intact_in_both_directions_and_a_half_close_ends_one() {
    ALL_SETTINGS.map(Nodes::start_as).iter().for_each(stream_both_ways);
}

fn stream_both_ways(nodes: &Nodes) {
    let (_server, port) = nodes.serve(ECHO);
    let output = nodes.client(
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
    assert_eq!(output, format!("{} True\n", 40 << 20));
}

#[test]
fn many_connections_at_once_get_their_own_bytes() {
    many_connections(&Nodes::start());
}

#[test]
fn connections_without_a_free_span_use_the_proxies() {
    let nodes = Nodes::start_as(Settings { spans: 3, ..DIRECT });
    many_connections(&nodes);
    for own in 0..2 {
        let report = nodes.report(own, "report", |_| true);
        assert!(report.direct_total >= 3 && report.direct_total < 50, "{report:?}");
        assert!(report.bytes_sent > 0, "{report:?}");
        nodes.wait_for_free_spans(own, report.direct_total);
    }
    let report = nodes.report(0, "report", |_| true);
    assert_eq!(report.direct_missed, 50 - report.direct_total);
}

fn many_connections(nodes: &Nodes) {
    let (_server, port) = nodes.serve(ECHO);
    let output = nodes.client(
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
    assert_eq!(output, "50\n");
    assert_eq!(nodes.report(0, "report", |_| true).connections_total, 50);
}

#[test]
fn a_span_is_used_again_by_the_next_connection() {
    DIRECT_SETTINGS.map(|way| Nodes::start_as(Settings { spans: 1, ..way })).iter().for_each(use_again);
}

fn use_again(nodes: &Nodes) {
    let (_server, port) = nodes.serve(ECHO);
    for turn in 1..=4 {
        nodes.client(&READER.replace("say(outcome(server))", "pass"), port);
        nodes.wait_for_free_spans(0, turn);
    }
}

/// Threads that block in every kind of wait are woken across the windows.
#[test]
fn waiters_on_another_node_are_woken_for_bytes_for_room_and_for_the_end() {
    DIRECT_SETTINGS.map(Nodes::start_as).iter().for_each(wake_sleepers);
}

fn wake_sleepers(nodes: &Nodes) {
    let (_server, port) = nodes.serve(
        r#"
listener = listen()
connection, peer = listener.accept()
for turn in range(4):
    assert connection.recv(1) == b"?"
    time.sleep(0.05)
    connection.sendall(b"!")
time.sleep(0.3)
got = 0
while got < 4_000_000:
    got += len(connection.recv(1 << 20))
connection.sendall(b"all")
time.sleep(0.2)
connection.close()
time.sleep(60)
"#,
    );
    let output = nodes.client(
        r#"
import select
server = socket.create_connection(address, timeout=20)
def ask(wait):
    server.sendall(b"?")
    wait()
    assert server.recv(1) == b"!"
poll, epoll = select.poll(), select.epoll()
poll.register(server, select.POLLIN)
epoll.register(server, select.EPOLLIN | select.EPOLLET)
server.settimeout(None)
ask(lambda: None)
ask(lambda: poll.poll(20_000))
ask(lambda: epoll.poll(20))
ask(lambda: select.select([server], [], [], 20))
server.sendall(b"x" * 4_000_000)
assert server.recv(3) == b"all"
say(epoll.poll(20) != [], server.recv(1))
"#,
        port,
    );
    assert_eq!(output, "True b''\n");
    assert_eq!(nodes.report(0, "report", |_| true).direct_total, 1);
}

#[test]
fn a_connection_in_the_windows_is_shared_by_fork_and_ends_with_its_last_holder() {
    DIRECT_SETTINGS.map(Nodes::start_as).iter().for_each(share_by_fork);
}

fn share_by_fork(nodes: &Nodes) {
    let (_server, port) = nodes.serve(ECHO);
    let output = nodes.client(
        r#"
server = socket.create_connection(address, timeout=20)
server.sendall(b"parent")
assert server.recv(100) == b"parent"
child = os.fork()
if child == 0:
    time.sleep(0.1)
    server.sendall(b"child")
    os._exit(0 if server.recv(100) == b"child" else 1)
server.close()
say(os.waitpid(child, 0)[1])
"#,
        port,
    );
    assert_eq!(output, "0\n");
    assert_eq!(nodes.wait_for_free_spans(0, 1).bytes_sent, 0);
}

/// A program that has not noticed the loss of its link may still store into the other node's window.
#[test]
fn a_span_that_an_old_program_can_write_is_used_again_only_after_its_end() {
    for way in [DIRECT, WRITE_COMBINED, HALF_COMBINED] {
        leave_span_to_old_program(Nodes::start_as(Settings { spans: 1, ..way }));
    }
}

fn leave_span_to_old_program(mut nodes: Nodes) {
    let (server, port) = nodes.serve(ECHO);
    let sleeper = READER.replace("say(outcome(server))", "time.sleep(60)");
    let old = nodes.start_client(&sleeper, port, "connected");
    nodes.link_down();
    nodes.link_up_again();
    let client = READER.replace("say(outcome(server))", "pass");
    nodes.client(&client, port);
    let report = nodes.report(0, "report", |_| true);
    assert_eq!((report.direct_total, report.direct_missed), (1, 1));
    drop(old);
    // The server's endpoint of the old connection was reset; the span is free once the server has closed it.
    let deadline = Instant::now() + WAIT_MAX;
    while nodes.report(0, "report", |_| true).direct_total < 2 {
        assert!(Instant::now() < deadline, "the free span is not used again");
        nodes.client(&client, port);
    }
    drop(server);
}

#[test]
fn connect_to_a_port_without_a_listener_is_refused() {
    let nodes = Nodes::start();
    let output = nodes.client(
        r#"
try:
    socket.create_connection(address, timeout=20)
except ConnectionRefusedError:
    say("refused")
"#,
        port::free_port(),
    );
    assert_eq!(output, "refused\n");
    nodes.nodes[0].monitor.wait_for("word of the refusal", |message| matches!(message, FromProxy::Refused { .. }));
}

/// A client that reads until the connection ends and prints how it ended.
const READER: &str = r#"
with socket.create_connection(address) as server:
    server.sendall(b"hello")
    assert server.recv(5) == b"hello"
    say("connected")
    say(outcome(server))
"#;

#[test]
fn a_server_that_is_killed_ends_its_connections_as_the_kernel_would() {
    ALL_SETTINGS.map(Nodes::start_as).iter().for_each(kill_server);
}

fn kill_server(nodes: &Nodes) {
    let (server, port) = nodes.serve(ECHO);
    let client = nodes.start_client(READER, port, "connected");
    drop(server);
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nend\n");
    // With unread bytes, TCP resets. The server answers once they have arrived: bytes in flight are not unread.
    let (server, port) = nodes.serve(
        r#"
listener = listen()
connection, peer = listener.accept()
connection.sendall(connection.recv(5))
connection.recv(6, socket.MSG_PEEK | socket.MSG_WAITALL)
connection.sendall(b"!")
time.sleep(60)
"#,
    );
    let unread = r#"server.sendall(b"unread"); assert server.recv(1) == b"!"; say("connected")"#;
    let script = READER.replace(r#"say("connected")"#, unread);
    let client = nodes.start_client(&script, port, "connected");
    drop(server);
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
}

#[test]
fn a_proxy_that_is_killed_resets_connections_at_both_nodes() {
    ALL_SETTINGS.map(Nodes::start_as).iter().for_each(kill_proxy);
}

fn kill_proxy(nodes: &Nodes) {
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
    assert_eq!(server.wait(WAIT_MAX).must_succeed().stdout, "listening\nreset\n");
    // The monitor notices and takes the link down.
    nodes.nodes[0].monitor.send(&nodes.nodes[0].link_down_for_good());
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
    nodes.nodes[0].monitor.wait_for("stop", |message| matches!(message, FromProxy::Stopped { peer: 1, .. }));
}

#[test]
fn a_link_that_goes_down_resets_and_carries_new_connections_once_it_is_up_again() {
    let trained = Settings { trains_partitions: true, ..BY_PROXIES };
    ALL_SETTINGS.into_iter().chain([trained]).map(Nodes::start_as).for_each(|mut nodes| lose_link(&mut nodes));
}

fn lose_link(nodes: &mut Nodes) {
    let (_server, port) = nodes.serve(ECHO);
    let client = nodes.start_client(READER, port, "connected");
    nodes.link_down();
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
    nodes.link_up_again();
    let mut counts = HashMap::new();
    for _ in 0..3 {
        let output = nodes.client(&READER.replace("say(outcome(server))", "pass"), port);
        *counts.entry(output).or_insert(0) += 1;
    }
    assert_eq!(counts, HashMap::from([("connected\n".to_owned(), 3)]));
}

/// The other proxy is informed of the link only when a program already waits.
#[test]
fn programs_that_connect_before_the_other_proxy_has_started_wait_for_it() {
    let mut nodes = Nodes::start();
    let (_server, port) = nodes.serve(ECHO);
    // From here on the proxy has a remote listener for the server.
    nodes.client(&READER.replace("say(outcome(server))", "pass"), port);
    let connect = READER.replace("say(outcome(server))", "pass");
    let connects_early = |nodes: &mut Nodes| {
        nodes.link_down();
        let [a, b] = &mut nodes.nodes[..] else { unreachable!() };
        assert!(train_both(&mut a.link, &mut b.link));
        a.monitor.send(&ToProxy::LinkUp { peer: 1, epoch: a.link.epoch().0 });
        let proxy = a.proxy.pid();
        let descriptors = || std::fs::read_dir(format!("/proc/{proxy}/fd")).expect("it runs").count();
        let before = descriptors();
        let client = Process::start(&mut nodes.python(0, &format!("{COMMON}\n{connect}"), port));
        client.wait_until("a program at the proxy", WAIT_MAX, |_| descriptors() > before);
        let b = &nodes.nodes[1];
        b.monitor.send(&ToProxy::LinkUp { peer: 0, epoch: b.link.epoch().0 });
        client.wait(WAIT_MAX).stdout == "connected\n"
    };
    // A program's wait is bounded, and on a busy machine the test may be delayed for longer.
    assert!((0..5).any(|_| connects_early(&mut nodes)), "refused each time");
}

/// The monitors of this test do not request permission, like those of a hostile node.
#[test]
fn access_rules_apply_to_connections_opened_without_a_request() {
    let nodes = Nodes::start_as(Settings { denies: true, ..Settings::default() });
    let (server, port) = nodes.serve(ECHO);
    let output = nodes.client(
        r#"
try:
    socket.create_connection(address, timeout=20)
except ConnectionRefusedError:
    say("refused")
"#,
        port,
    );
    assert_eq!((output.as_str(), server.stdout().as_str()), ("refused\n", "listening\n"));
    let proxy = &nodes.nodes[1].proxy;
    proxy.wait_until("the offence", WAIT_MAX, |proxy| proxy.stderr().contains("node 0: opened without asking"));
}

#[test]
fn a_broken_link_is_reported_to_the_monitor() {
    for trains_partitions in [true, false] {
        let mut nodes = Nodes::start_as(Settings { trains_partitions, ..BY_PROXIES });
        nodes.serve_once();
        let epoch = nodes.nodes[1].link.epoch().0;
        nodes.nodes[1].link.take_down();
        let is_reported = |message: &FromProxy| match message {
            FromProxy::Broken { peer: 1, epoch: of, .. } => trains_partitions && *of == epoch,
            FromProxy::PeerLeft { peer: 1, epoch: of } => !trains_partitions && *of == epoch,
            _ => false,
        };
        nodes.nodes[0].monitor.wait_for("loss", is_reported);
    }
}

/// A client with streams in both directions that continue until shortly after a file exists; prints whether all bytes
/// came back.
const STREAMS: &str = r#"
go_on = sys.argv[3]
block = os.urandom(1 << 20)
def talk(number):
    sent, received = hashlib.sha256(), []
    with socket.create_connection(address, timeout=60) as server:
        reader = threading.Thread(target=lambda: received.append(read_all(server)))
        reader.start()
        total, left = 0, 20
        while left:
            piece = block[total % 1000:][:100_000 + number]
            server.sendall(piece)
            sent.update(piece)
            total += len(piece)
            if total < 3_000_000:
                continue
            started.add(number)
            if os.path.exists(go_on):
                left -= 1
            else:
                time.sleep(0.001)
        server.shutdown(socket.SHUT_WR)
        reader.join()
    right.append(received == [(total, sent.hexdigest())])
right, started = [], set()
threads = [threading.Thread(target=talk, args=(number,)) for number in range(3)]
[thread.start() for thread in threads]
while len(started) < 3:
    time.sleep(0.01)
say("streaming")
[thread.join() for thread in threads]
say(right)
"#;

/// Starts the streams of [`STREAMS`] to an echo server on node b and waits until bytes flow.
fn start_streams(nodes: &Nodes, port: u16, go_on: &Path) -> Process {
    let script = format!("{COMMON}\n{STREAMS}");
    let client = Process::start(nodes.python(0, &script, port).arg(go_on));
    client.wait_until("streaming", WAIT_MAX, |client| client.stdout().contains("streaming"));
    client
}

#[test]
fn connections_survive_their_link_over_kernel_tcp_and_new_ones_use_the_link_again() {
    let mut nodes = Nodes::start_as(Settings { is_failover: true, ..Settings::default() });
    let (_server, port) = nodes.serve(ECHO);
    let idle = nodes.start_client(&READER.replace("say(outcome(server))", EXCHANGE_LATER), port, "connected");
    let folder = tempfile::tempdir().expect("a folder");
    let go_on = folder.path().join("go on");
    let client = start_streams(&nodes, port, &go_on);
    // Bytes that a program has sent may still be in its lane.
    nodes.report(0, "bytes through the windows", |report| report.bytes_sent > 3_000_000);
    nodes.link_down();
    let both_ways = |report: &PeerReport| report.failover_bytes_sent.min(report.failover_bytes_received) > 1_000_000;
    let moved = nodes.report(0, "bytes over TCP", both_ways);
    assert_eq!((moved.failover_open, moved.failover_total, moved.failover_resets), (4, 4, 0));
    assert!(moved.bytes_sent > 3_000_000, "bytes through windows are counted separately: {moved:?}");
    nodes.link_up_again();
    for _ in 0..3 {
        assert_eq!(nodes.client(&READER.replace("say(outcome(server))", "pass"), port), "connected\n");
    }
    let report = nodes.report(0, "new connections", |report| report.connections_total >= 7);
    assert_eq!(report.failover_total, 4, "new ones use the link");
    // Again: connections over TCP stay there, and the others move there too.
    nodes.link_down();
    nodes.link_up_again();
    std::fs::write(&go_on, "").expect("a file");
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "streaming\n[True, True, True]\n");
    assert_eq!(idle.wait(WAIT_MAX).must_succeed().stdout, "connected\nback\n");
    let end = nodes.report(0, "all over", |report| report.failover_open == 0);
    assert_eq!((end.failover_total, end.failover_resets), (4, 0));
}

/// An exchange over a connection long after it moved.
const EXCHANGE_LATER: &str = r#"
    time.sleep(2)
    server.sendall(b"again")
    got = b""
    while len(got) < 5:
        got += server.recv(5)
    assert got == b"again"
    say("back")"#;

#[test]
fn connections_are_reset_when_the_other_proxy_is_dead_or_tcp_breaks_too() {
    let rescue_port = port::free_port();
    let settings = Settings { is_failover: true, failover_port: Some(rescue_port), ..Settings::default() };
    let mut nodes = Nodes::start_as(settings);
    let (_server, port) = nodes.serve(ECHO);
    let client = nodes.start_client(READER, port, "connected");
    must_drop_unauthenticated(rescue_port);
    nodes.link_down();
    nodes.report(0, "a connection over TCP", |report| report.failover_open == 1);
    must_drop_unauthenticated(rescue_port);
    nodes.link_up_again();
    let later = nodes.start_client(READER, port, "connected");
    let victim = Pid::from_raw(nodes.nodes[1].proxy.pid() as i32).expect("a pid");
    kill_process(victim, Signal::KILL).expect("a proxy");
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
    nodes.nodes[0].monitor.send(&nodes.nodes[0].link_down_for_good());
    assert_eq!(later.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
    nodes.report(0, "resets", |report| report.failover_resets == 2 && report.failover_open == 0);
    // The other proxy is dead, so this one did not wait for it.
    let output = nodes.nodes[0].proxy.stderr();
    let why = "1 connections of a lost link are reset: no TCP connection to 127.77.0.2:";
    assert!(output.contains(why) && !output.contains("did not come within"), "{output}");
}

/// No proxy can connect to it, so neither waits.
#[test]
fn connections_are_reset_at_once_when_a_proxy_listens_nowhere() {
    // The port belongs to another program.
    let taken = TcpListener::bind((Ipv4Addr::from(address(0)), 0)).expect("a port");
    let failover_port = Some(taken.local_addr().expect("an address").port());
    let mut nodes = Nodes::start_as(Settings { is_failover: true, failover_port, ..Settings::default() });
    let (_server, port) = nodes.serve(ECHO);
    let client = nodes.start_client(READER, port, "connected");
    nodes.link_down();
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
    for (node, who) in nodes.nodes.iter().zip(["this node's proxy", "its proxy"]) {
        let why = format!("1 connections of a lost link are reset: {who} listens nowhere");
        node.proxy.wait_until(&why, WAIT_MAX, |proxy| proxy.stderr().contains(&why));
    }
}

/// Panics unless node a's proxy closes connections without the token of a link, and sends them nothing.
fn must_drop_unauthenticated(port: u16) {
    let right_but_for_the_token = |peer: u8| {
        let words = [u64::from_le_bytes(*b"clresum1"), 1, u64::from(peer), 3, 4];
        words.map(u64::to_le_bytes).concat()
    };
    for hello in [vec![0; 40], right_but_for_the_token(1), b"GET / HTTP/1.1\r\n\r\n and so on, for long".to_vec()] {
        let mut client = TcpStream::connect((Ipv4Addr::from(address(0)), port)).expect("a proxy that listens");
        client.set_read_timeout(Some(WAIT_MAX)).expect("a limit");
        client.write_all(&hello).expect("a proxy that receives");
        // An end or a reset, and no byte.
        assert!(!matches!(client.read(&mut [0; 1]), Ok(1)));
    }
}

/// Measures the time from the message that the link is lost until a program sees the reset, without failover. Asserts
/// nothing about the time.
#[test]
#[ignore = "reports times: run it on an idle machine"]
fn resets_after_a_lost_link_are_measured() {
    let mut times_us = Vec::new();
    for _ in 0..20 {
        let nodes = Nodes::start();
        let (_server, port) = nodes.serve(ECHO);
        let script = READER.replace("say(outcome(server))", "say(outcome(server), time.monotonic_ns())");
        let client = nodes.start_client(&script, port, "connected");
        // Long enough for all threads to block.
        std::thread::sleep(std::time::Duration::from_millis(20));
        let lost = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        nodes.nodes[0].monitor.send(&nodes.nodes[0].link_down_for_good());
        let output = client.wait(WAIT_MAX).must_succeed().stdout;
        let seen_ns: i64 = output.trim().rsplit_once("reset ").expect("a reset").1.parse().expect("a time");
        times_us.push((seen_ns - lost.tv_sec * 1_000_000_000 - lost.tv_nsec) / 1000);
    }
    times_us.sort_unstable();
    let (half, most) = (times_us[times_us.len() / 2], times_us[times_us.len() - 1]);
    println!("from LinkDown to ECONNRESET: p50 {half} us, max {most} us, of {} losses", times_us.len());
}

#[test]
fn programs_with_ipv6_sockets_reach_another_node_by_its_mapped_address() {
    let nodes = Nodes::start();
    let (_server, port) = nodes.serve(
        r#"
listener = socket.create_server(("::", address[1]), family=socket.AF_INET6, dualstack_ipv6=True)
say("listening")
connection, peer = listener.accept()
connection.sendall(peer[0].encode())
"#,
    );
    let output = nodes.client(
        r#"
with socket.socket(socket.AF_INET6) as server:
    server.connect(("::ffff:" + address[0], address[1]))
    say(server.getpeername()[0], server.getsockname()[0], server.recv(64).decode())
"#,
        port,
    );
    assert_eq!(output, "::ffff:127.77.0.2 ::ffff:127.77.0.1 ::ffff:127.77.0.1\n");
}

#[test]
fn redis_serves_another_node_through_windows_without_proxies() {
    const REQUESTS: u64 = 10_000;
    let nodes = Nodes::start_as(Settings { spans: 24, ..DIRECT });
    let folder = tempfile::tempdir().expect("a folder");
    let (host, port) = (SocketAddr::from((address(1), 0)).ip().to_string(), port::free_port().to_string());
    let mut server = nodes.nodes[1].rack.run(&["--node", NODES[1], "--require-lane"], paths::tool("redis-server"));
    server
        .args(["--bind", &host, "--port", &port, "--protected-mode", "no", "--save", "", "--appendonly", "no", "--dir"])
        .arg(folder.path());
    let server = Process::start(&mut server);
    server.wait_until("redis", WAIT_MAX, |server| server.stdout().contains("Ready to accept"));
    let mut client = nodes.nodes[0].rack.run(&["--node", NODES[0], "--require-lane"], paths::tool("redis-benchmark"));
    client.args([
        "-h",
        &host,
        "-p",
        &port,
        "-t",
        "set,get",
        "-d",
        "64",
        "-c",
        "10",
        "-n",
        &REQUESTS.to_string(),
        "--csv",
    ]);
    let finished = Process::start(&mut client).wait(WAIT_MAX).must_succeed();
    assert!(finished.stdout.contains("\"GET\"") && !finished.stderr.contains("rror"), "{finished}");
    let report = nodes.report(0, "report", |_| true);
    assert!(report.direct_total >= 10 && report.direct_missed == 0, "{report:?}");
    assert_eq!((report.bytes_sent, report.bytes_received), (0, 0));
    let stat = nodes.nodes[1].rack.stat();
    let sent =
        stat.named("redis-server").filter_map(|process| process["totals"]["window_bytes_sent"].as_u64()).sum::<u64>();
    assert!(sent > REQUESTS * 64, "{sent} bytes through windows: {stat:?}");
}

/// A server whose connections wait in different ways until the client has ended, and which prints those that still
/// wait.
const WATCHED: &str = r#"
import select
listener = listen()
outcomes, lock = {}, threading.Lock()
def wait_blocking(connection):
    return connection.recv(65536)
def wait_by_poll(connection):
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.poll()
    return connection.recv(65536)
def wait_by_epoll(connection):
    with select.epoll() as epoll:
        epoll.register(connection.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
        epoll.poll()
        return connection.recv(65536)
def serve(number, connection, wait):
    end = "end"
    try:
        with connection:
            while data := wait(connection):
                connection.sendall(data)
    except (ConnectionResetError, BrokenPipeError):
        end = "reset"
    with lock:
        outcomes[number] = end
def accept():
    for number in range(1 << 30):
        connection = listener.accept()[0]
        with lock:
            outcomes[number] = "waits by " + ["recv", "poll", "epoll"][number % 3]
        way = [wait_blocking, wait_by_poll, wait_by_epoll][number % 3]
        threading.Thread(target=serve, args=(number, connection, way), daemon=True).start()
        time.sleep([0, 0, 0.001, 0.005][number % 4])
threading.Thread(target=accept, daemon=True).start()
for line in sys.stdin:
    deadline = time.monotonic() + 20
    while True:
        with lock:
            waiting = {number: outcome for number, outcome in outcomes.items() if outcome.startswith("waits")}
        if not waiting or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    say("waiting", waiting)
"#;

/// Concurrent clients, each of which ends somewhere between its socket() and its last byte.
const ENDING: &str = r#"
import random, select, signal
# Each has its own seed, so that a failing one can be run alone.
CLIENTS, AT_ONCE = 120, 8
def leave(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)
def leave_soon(chance, how):
    delay = chance.random() * chance.choice([0.0005, 0.003, 0.02])
    def wait():
        time.sleep(delay)
        leave(how)
    threading.Thread(target=wait, daemon=True).start()
def client(seed):
    chance = random.Random(seed)
    how = chance.choice(["exit", "kill"])
    stage = chance.choice(["connect", "connected", "request", "unread", "half", "stream", "talk", "close"])
    if stage in ("connect", "stream"):
        leave_soon(chance, how)
    try:
        server = socket.create_connection(address)
        if stage == "request":
            server.sendall(b"x" * chance.choice([1, 48, 5000]))
        elif stage == "unread":
            server.sendall(b"x" * chance.choice([1, 48, 5000]))
            select.select([server], [], [])
        elif stage == "half":
            server.sendall(b"x" * chance.choice([1, 5000]))
            server.shutdown(socket.SHUT_WR)
        elif stage == "stream":
            block = b"x" * 65536
            threading.Thread(target=lambda: [None for _ in iter(lambda: server.recv(65536), b"")], daemon=True).start()
            while True:
                server.sendall(block)
        elif stage in ("talk", "close"):
            for _ in range(chance.randrange(20)):
                server.sendall(b"12345678")
                read(server, 8)
            if stage == "close":
                server.close()
    except OSError as error:
        print(seed, stage, how, error, file=sys.stderr)
        os._exit(1)
    leave(how)
running, failed = set(), 0
for number in range(CLIENTS):
    pid = os.fork()
    if pid == 0:
        client(SEED * 1_000_003 + number)
    running.add(pid)
    while len(running) >= AT_ONCE or (number == CLIENTS - 1 and running):
        pid, status = os.wait()
        running.discard(pid)
        failed += status == 256
say("failed", failed)
"#;

/// The server closes no connection, and the clients close theirs: some clients choose a port that is still in use by a
/// connection of the server, and must then choose another one.
#[test]
fn a_port_still_used_by_a_connection_of_the_server_is_not_chosen_again() {
    let nodes = Nodes::start_as(DIRECT);
    let (_server, port) = nodes.serve("listener, held = listen(), []\nwhile True: held.append(listener.accept())");
    // With about 14,000 ports, the probability that no port is chosen twice is below one in a billion.
    let output = nodes.client("for _ in range(800): socket.create_connection(address).close()\nsay('done')", port);
    assert_eq!(output, "done\n");
}

/// In every configuration, and with proxies that share a core, where each handover waits for the other thread.
#[test]
fn no_server_waits_for_a_client_that_has_ended() {
    let few_spans = |settings: Settings| Settings { spans: settings.spans.min(4), ..settings };
    let failover = Settings { is_failover: true, ..BY_PROXIES };
    let crowded = Settings { core: Some(0), ..BY_PROXIES };
    for (settings, seed) in ALL_SETTINGS.map(few_spans).into_iter().chain([failover, crowded]).zip(1..) {
        end_clients_anywhere(&Nodes::start_as(settings), seed);
    }
}

#[track_caller]
fn end_clients_anywhere(nodes: &Nodes, seed: u32) {
    let port = port::free_port();
    let watched = format!("{COMMON}\n{WATCHED}");
    let (server, mut input) = Process::start_with_input(&mut nodes.python(1, &watched, port));
    server.wait_until("listening", WAIT_MAX, |server| server.stdout().contains("listening"));
    let script = format!("{COMMON}\nSEED = {seed}\n{ENDING}");
    let clients = Process::start(&mut nodes.python(0, &script, port)).wait(WAIT_MAX).must_succeed();
    assert_eq!(clients.stdout, "failed 0\n", "seed {seed}: {}", clients.stderr);
    writeln!(input, "print the outcomes").expect("a server that reads");
    server.wait_until("outcomes", WAIT_MAX, |server| server.stdout().contains("waiting"));
    assert!(server.stdout().contains("waiting {}"), "seed {seed}: {}", server.stdout());
    for own in 0..2 {
        nodes.report(own, "no connection", |report| report.connections_open == 0);
    }
}
