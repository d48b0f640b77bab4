//! The two nodes: a device server or a memory file, a proxy for each node, and the test as both monitors.

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
use segment::SPAN_BYTES;
use socket::rack::monitor::{ListenerResponse, PACKET_BYTES_MAX, SOCKET_NAME, decode_query};
use system_tests::script::{COMMON, client_that};
use system_tests::{Process, Rack, WAIT_MAX, paths, port, wait_for};
use tempfile::TempDir;

pub const NODES: [&str; 2] = ["a", "b"];
const VECTORS: u32 = 2;
const CONTROL_BYTES: u64 = 64 << 10;
const DATA_BYTES: u64 = 4 << 20;

/// Connections through the proxies, and connections whose programs store into windows themselves: over links as fast as
/// their memory, over a modelled link, and over memory that is not ordinary memory, for both nodes or for one of them.
pub const ALL_SETTINGS: [Settings; 6] = [BY_PROXIES, DIRECT, MODELLED, WRITE_COMBINED, HALF_COMBINED, NON_COHERENT];
/// The configurations in which programs store into windows.
pub const DIRECT_SETTINGS: [Settings; 5] = [DIRECT, MODELLED, WRITE_COMBINED, HALF_COMBINED, NON_COHERENT];
pub const BY_PROXIES: Settings = Settings {
    timing: None,
    is_failover: false,
    failover_port: None,
    denies: false,
    spans: 0,
    trains_partitions: false,
    core: None,
    coherence: [Coherence::Coherent; 2],
};
pub const DIRECT: Settings = Settings { spans: 8, ..BY_PROXIES };
pub const MODELLED: Settings = Settings { timing: Some("ntb"), ..DIRECT };
pub const WRITE_COMBINED: Settings = Settings { coherence: [Coherence::WriteCombined; 2], ..DIRECT };
/// A host and a guest that has the memory on a BAR.
pub const HALF_COMBINED: Settings = Settings { coherence: [Coherence::Coherent, Coherence::WriteCombined], ..DIRECT };
pub const NON_COHERENT: Settings =
    Settings { coherence: [Coherence::NonCoherent; 2], trains_partitions: true, ..DIRECT };

pub fn address(slot: usize) -> [u8; 4] {
    [127, 77, 0, slot as u8 + 1]
}

/// The monitor's channel to a proxy.
pub struct Monitor {
    channel: Arc<Channel>,
    /// The messages from the proxy.
    received: Arc<Mutex<Vec<FromProxy>>>,
    /// Locked while programs get no answer.
    silence: Arc<Mutex<()>>,
}

impl Monitor {
    /// Starts threads for the messages of a proxy and for requests of programs at the socket in `rack`.
    pub fn start(channel: Channel, own: usize, rack: &Path) -> Self {
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
    pub fn keep_silent(&self) -> MutexGuard<'_, ()> {
        self.silence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn send(&self, message: &ToProxy) {
        self.channel.send(message, &[]).expect("a proxy that listens");
    }

    #[track_caller]
    pub fn wait_for(&self, what: &str, matches: impl Fn(&FromProxy) -> bool) {
        wait_for_message(&self.received, what, matches);
    }

    /// The reports of the proxy.
    fn reports(&self) -> Vec<Report> {
        let reports = messages(&self.received).into_iter().filter_map(|message| match message {
            FromProxy::Report(report) => Some(report),
            _ => None,
        });
        reports.collect()
    }
}

fn messages(received: &Mutex<Vec<FromProxy>>) -> Vec<FromProxy> {
    received.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

#[track_caller]
fn wait_for_message(received: &Mutex<Vec<FromProxy>>, what: &str, matches: impl Fn(&FromProxy) -> bool) {
    wait_for(what, || messages(received), |messages| messages.iter().any(&matches));
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
    wait_for_message(received, "remote listener", |message| *message == FromProxy::Listening { address: requested });
    let ready = ListenerResponse::Ready { node: address(own).into() };
    let _ = rustix::net::send(program, ready.encode().as_bytes(), SendFlags::NOSIGNAL);
}

/// A node: its rack directory, its device, its monitor and its proxy.
pub struct Node {
    pub rack: Rack,
    pub device: Device,
    pub link: DeviceLink,
    pub monitor: Monitor,
    pub proxy: Process,
}

/// The configuration of a test.
#[derive(Clone, Copy)]
pub struct Settings {
    /// Name of the model whose delay and rate the link has.
    pub timing: Option<&'static str>,
    /// Connections survive the loss of the link.
    pub is_failover: bool,
    /// The proxies listen for failover connections at this port.
    pub failover_port: Option<u16>,
    /// The nodes deny all connections.
    pub denies: bool,
    /// Number of spans of each window for programs that store into it themselves.
    pub spans: u64,
    /// Training clears the data partitions, as for non-coherent memory.
    pub trains_partitions: bool,
    /// The core on which the threads of both proxies run.
    pub core: Option<u16>,
    /// The coherence that each node assumes. Unless both assume coherent memory, there are no doorbells.
    pub coherence: [Coherence; 2],
}

impl Settings {
    /// Returns whether programs of a node cannot store into windows themselves.
    fn is_forwarded_at(&self, own: usize) -> bool {
        self.timing.is_some() || self.coherence[own] != Coherence::Coherent
    }
}

/// Two nodes connected by a link that is up.
pub struct Nodes {
    pub nodes: Vec<Node>,
    /// The proxies forward connections, although there are spans.
    pub is_forwarded: bool,
    _server: Process,
    /// The memory of the device, if it has no server.
    pub memory: OwnedFd,
    _folder: TempDir,
}

impl Nodes {
    pub fn start() -> Self {
        Self::start_as(BY_PROXIES)
    }

    /// As [`Nodes::start`], with other settings.
    pub fn start_as(settings: Settings) -> Self {
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
        let is_forwarded = (0..2).any(|own| settings.is_forwarded_at(own));
        let nodes = Self { nodes, is_forwarded, _server: server, memory, _folder: folder };
        // Each node has learned of the other's doorbells by now.
        for node in &nodes.nodes {
            node.device.poll().expect("a device");
            node.hand_over();
        }
        nodes.link_up();
        nodes
    }

    pub fn link_up(&self) {
        for (own, node) in self.nodes.iter().enumerate() {
            node.monitor.send(&ToProxy::LinkUp { peer: 1 - own as u8, epoch: node.link.epoch().0 });
        }
    }

    /// Both monitors take the link down; the proxies stop using it.
    pub fn link_down(&mut self) {
        for (own, node) in self.nodes.iter_mut().enumerate() {
            let (peer, epoch) = (1 - own as u8, node.link.epoch().0);
            node.monitor.send(&ToProxy::LinkDown { peer, epoch, policy: LinkLossPolicy::Reset });
            node.monitor.wait_for("stop", |message| *message == FromProxy::Stopped { peer, epoch });
            node.link.take_down();
        }
    }

    /// Trains the link and informs the proxies.
    pub fn link_up_again(&mut self) {
        let [a, b] = &mut self.nodes[..] else { unreachable!() };
        assert!(train_both(&mut a.link, &mut b.link));
        self.link_up();
    }

    /// A proxy's report about the link.
    #[track_caller]
    pub fn report(&self, node: usize) -> PeerReport {
        let monitor = &self.nodes[node].monitor;
        let known = monitor.reports().len();
        monitor.send(&ToProxy::Report);
        let reports = wait_for("report", || monitor.reports(), |reports| reports.len() > known);
        reports[reports.len() - 1].peers[1 - node]
    }

    /// Waits until a proxy's report about the link meets a condition, and returns it.
    #[track_caller]
    pub fn wait_for_report(&self, node: usize, what: &str, holds: impl Fn(&PeerReport) -> bool) -> PeerReport {
        wait_for(what, || self.report(node), holds)
    }

    /// A proxy's report once this number of direct connections has been made and none of them is open. With the library
    /// whose connections are the kernel's, the proxies forward those over some kinds of memory.
    #[track_caller]
    pub fn wait_for_free_spans(&self, node: usize, direct_total: u64) -> PeerReport {
        let counts = |report: &PeerReport| match self.is_forwarded {
            true => (report.connections_total, report.direct_total, report.connections_open),
            false => (report.direct_total, report.direct_open, report.connections_open),
        };
        self.wait_for_report(node, "free spans", |report| counts(report) == (direct_total, 0, 0))
    }

    /// Panics unless the programs have written the windows themselves, if they can.
    #[track_caller]
    pub fn assert_direct(&self, report: &PeerReport) {
        let by_proxies = report.bytes_sent.max(report.bytes_received);
        let is_direct = report.direct_missed == 0 && by_proxies <= BYTES_BY_PROXIES_MAX;
        assert!(self.is_forwarded || is_direct, "{report:?}");
    }

    /// A command that runs a program on a node, and requires lanes.
    pub fn run(&self, node: usize, tool: &str) -> Command {
        let options = ["--node", NODES[node], "--require-lane"];
        self.nodes[node].rack.run(&options, paths::tool(tool))
    }

    /// A command that runs a Python program, which begins with [`COMMON`], on a node.
    pub fn python(&self, node: usize, script: &str, port: u16) -> Command {
        let script = format!("{COMMON}\n{script}");
        let mut command = self.run(node, "python3");
        command.args(["-c", &script]).arg(SocketAddr::from((address(1), port)).ip().to_string()).arg(port.to_string());
        command
    }

    /// Starts a server on node b and waits until it listens.
    pub fn serve(&self, script: &str) -> (Process, u16) {
        let port = port::free_port();
        let server = Process::start(&mut self.python(1, script, port));
        server.wait_until("listening", WAIT_MAX, |server| server.stdout().contains("listening"));
        (server, port)
    }

    /// Runs a client on node a to its end.
    #[track_caller]
    pub fn client(&self, script: &str, port: u16) -> String {
        Process::start(&mut self.python(0, script, port)).wait(WAIT_MAX).must_succeed().stdout
    }

    /// Makes one short connection from node a.
    #[track_caller]
    pub fn connect_once(&self, port: u16) {
        assert_eq!(self.client(&client_that("pass"), port), "connected\n");
    }

    /// Starts a client on node a and waits until it has printed `output`.
    pub fn start_client(&self, script: &str, port: u16, output: &str) -> Process {
        let client = Process::start(&mut self.python(0, script, port));
        client.wait_until(output, WAIT_MAX, |client| client.stdout().contains(output));
        client
    }
}

/// Bytes that the proxies carry at most of a connection whose programs write the windows themselves, as they read their
/// memory: those before the streams have moved, and those of streams that have gone back for a fork or an end.
const BYTES_BY_PROXIES_MAX: u64 = 1 << 20;

/// Memory like that of a device, which cannot be truncated.
fn memory_of_a_file() -> OwnedFd {
    let (memory, _mapping) = fabric::shm::create(32 << 20).expect("memory");
    rustix::fs::fchmod(&memory, Mode::RUSR | Mode::WUSR).expect("a file of our own");
    memory
}

/// The path by which this process and its children open the memory.
pub fn path_of(memory: &OwnedFd) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd()).into()
}

impl Node {
    pub fn start(own: usize, device: Device, settings: Settings) -> Self {
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
        let spans = Spans { offset_bytes: end_bytes, span_bytes: SPAN_BYTES as u64, count: settings.spans };
        monitor.send(&ToProxy::Configure(Box::new(Configuration {
            version: VERSION,
            own_slot: own as u8,
            slots: 2,
            nodes: vec![entry(0), entry(1)],
            rack_directory: rack.path().to_owned(),
            control_partition_bytes: CONTROL_BYTES,
            partitions: vec![partition(Class::Latency), partition(Class::Bulk)],
            slice_bytes: None,
            data_bytes: DATA_BYTES,
            // As a monitor decides: programs read back what they have written.
            spans: (settings.spans > 0 && !settings.is_forwarded_at(own)).then_some(spans),
            return_ns: 0,
            successor_socket: None,
            keeps_partitions: !settings.trains_partitions,
            is_failover: settings.is_failover,
            failover_port: settings.failover_port,
            timing: settings.timing.map(|name| Timing { name: name.to_owned(), one_way_ns: None }),
            access: Access { rules: Vec::new(), allows_others: !settings.denies },
            publish: None,
        })));
        let link = device.link(NodeSlot(1 - own as u8));
        let node = Self { rack, device, link, monitor, proxy };
        node.hand_over();
        node.monitor.wait_for("ready", |message| *message == FromProxy::Ready { version: VERSION });
        node
    }

    /// The message that the other node has ended.
    pub fn link_down_for_good(&self) -> ToProxy {
        ToProxy::LinkDown { peer: 1, epoch: self.link.epoch().0, policy: LinkLossPolicy::Reset }
    }

    fn hand_over(&self) {
        let (bytes, descriptors) = self.device.hand_over().expect("descriptors");
        send_device(&self.monitor.channel, bytes, &descriptors).expect("a proxy that listens");
    }
}
