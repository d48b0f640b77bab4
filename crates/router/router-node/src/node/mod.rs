//! A node's process: a thread that forwards, and this one, which talks: to other nodes, to the kernel, to commands.

mod clients;
mod fib;
mod forwarding;
mod freezer;
mod local;
mod peers;
mod plugs;
mod rearranged;
mod reload;
mod status;
mod table;
mod untaken;
mod watch;

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::process;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use packet::ethernet::MacAddress;
use router::routes::Rib;
use router::{Config, Event, Filter, Forwarder, NODES_MAX, NodeId, Output, PORTS_MAX, Pool, Port, PortId, TracedStep};
use router_ports::netlink::{Change, Monitor, NetlinkError, Requests};
use router_ports::{InterfaceIndex, LocalAddresses, Sysctls};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FlockOperation;
use thiserror::Error;
use tracing::{error, info, warn};

use crate::cluster::{Cluster, ClusterPaths, Node as NodeOfFile, NodePaths, PortKind, PortOfNode};
use crate::control::message::{Hello, VERSION};
use crate::control::transport::{ControlAddress, Listener, TcpAddress};
use crate::control::{Key, KeyError, SessionTimers};
use crate::interconnect::InterconnectError;
use crate::management::{
    CHANGES_SHOWN_MAX, ROUTES_MAX, Request, Response, RoutesStatus, STEPS_MAX, Status, TraceQuery,
};

use clients::Clients;
use forwarding::{Bell, COMMANDS_MAX, Command, Forwarding, Parts, REPORTS_MAX, Report, Snapshot, WireClock};
use local::{Effect, Local, Opened};
use peers::{News, Peers};
use rearranged::Rearranged;
use table::Table;
use untaken::{Untaken, Why};
use watch::{HangNews, HangWatch, Pulse};

/// Buffers of a node, for all packets that are in it at a time.
const BUFFERS: u32 = 16_384;
/// Bytes of a buffer: the longest packet, its frame's header and room before it.
const BUFFER_BYTES: u16 = 10_240;
/// Room before a frame, for headers that grow.
const HEADROOM_BYTES: u16 = 128;
/// Packets that wait for one port, node or kernel.
const QUEUE_PACKETS_MAX: usize = 4096;
/// This thread goes before others that want to run: it has little to do, and other nodes count on its beats.
const NICENESS: i32 = -10;
/// How often everything is looked at that tells nobody when it changes.
const LOOK_NS: u64 = 1_000_000_000;
/// The first descriptor that is of other nodes, of those that are polled.
const PEERS_AT: usize = 4;
/// The one that asks for the cluster file to be read again.
const RELOAD_AT: usize = 3;
/// How long a port whose device is gone waits for one of the same name.
const REPLUG_NS: u64 = 500_000_000;

/// How long the forwarding thread may hang before the node ends: it will not come back.
const HANG_NS_MAX: u64 = 10_000_000_000;

/// How often, and how far apart, the node's lock is asked for.
const TAKES_MAX: u32 = 200;
const TAKE_PAUSE: Duration = Duration::from_millis(10);

/// Why a node cannot start, or has to end.
#[derive(Debug, Error)]
pub enum NodeError {
    /// The node runs already.
    #[error("node '{node}' is up already (process {pid}); end it with 'crosslane router down'")]
    Taken {
        /// The node.
        node: String,
        /// Its process, as far as known.
        pid: String,
    },
    /// The kernel refused.
    #[error("{what}: {error}")]
    System {
        /// What was attempted.
        what: String,
        /// What the kernel said.
        error: io::Error,
    },
    /// No such namespace.
    #[error("'{shown}' cannot be entered: {error}; make it with 'ip netns add', and run as root")]
    Namespace {
        /// Its path.
        shown: String,
        /// What the kernel said.
        error: io::Error,
    },
    /// A port cannot be opened.
    #[error("{error}")]
    Port {
        /// Its place among the node's.
        place: usize,
        /// Why.
        error: String,
    },
    /// A file of a port cannot be opened.
    #[error("{error}")]
    PortFile {
        /// The port's place among the node's.
        place: usize,
        /// Which of its files.
        key: &'static str,
        /// Why.
        error: String,
    },
    /// The interface to the node's own kernel.
    #[error("interface crosslane0: {0}; it takes root, and each node a network namespace of its own")]
    SlowPath(String),
    /// What joins nodes.
    #[error(transparent)]
    Interconnect(#[from] InterconnectError),
    /// A modelled link that is none.
    #[error("interconnect.timing: {0}")]
    Timing(String),
    /// A key that this kind of interconnect needs.
    #[error("{0} is missing for this node; add it to the cluster file")]
    Missing(&'static str),
    /// The key of the cluster.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The kernel's routes.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// The thread that forwards has ended by itself.
    #[error("the thread that forwards has ended by itself; its last words are in the log")]
    ForwardingEnded,
    /// The thread that forwards hangs.
    #[error("the thread that forwards has hung for {0} s; start the node again, and report what stands in its log")]
    ForwardingHung(u64),
}

impl NodeError {
    /// The key of the cluster file that it is about, for the node of that place.
    pub fn key(&self, node: usize) -> Option<String> {
        match self {
            Self::Namespace { .. } => Some(format!("nodes[{node}].namespace")),
            Self::Key(_) => Some("key".to_owned()),
            Self::Port { place, .. } => Some(format!("nodes[{node}].ports[{place}].device")),
            Self::PortFile { place, key, .. } => Some(format!("nodes[{node}].ports[{place}].{key}")),
            _ => None,
        }
    }
}

fn whose(mac: Option<MacAddress>) -> String {
    mac.map_or("somebody else".to_owned(), |mac| mac.to_string())
}

fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> NodeError {
    move |error| NodeError::System { what: what.into(), error }
}

/// What a node is of.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The cluster.
    pub cluster: Cluster,
    /// The node's place in it.
    pub node: usize,
    /// Where the cluster's files lie.
    pub paths: ClusterPaths,
    /// The cluster file, by an absolute path: it is read again when the node is told to.
    pub file: PathBuf,
}

impl Settings {
    fn id(&self) -> NodeId {
        NodeId(self.node as u8)
    }

    fn node(&self) -> &NodeOfFile {
        &self.cluster.nodes[self.node]
    }

    fn forwarding(&self, seed: u64) -> Config {
        Config { seed, redirects: self.node().redirects, ..Config::new(self.id()) }
    }

    /// Makes the hardware address of a port that has none: the same whenever the node is started.
    fn seed(&self, device: &str) -> u64 {
        crate::cluster::fnv1a(format!("{}/{}/{device}", self.cluster.name, self.node().name).as_bytes())
    }

    fn node_paths(&self) -> NodePaths {
        self.paths.node(&self.node().name)
    }

    /// Where a node is reached by this one.
    fn place(&self, node: &NodeOfFile, key: Option<&Key>) -> Result<ControlAddress, NodeError> {
        let Some(address) = node.control else {
            return Ok(ControlAddress::Unix(self.paths.node(&node.name).peers_socket()));
        };
        let local_ip = self.node().control.ok_or(NodeError::Missing("control"))?.ip();
        let key = key.cloned().ok_or(NodeError::Missing("key"))?;
        Ok(ControlAddress::Tcp(TcpAddress { address, local_ip, key }))
    }
}

/// What is remembered of a port.
#[derive(Default)]
struct PortMemory {
    kind: &'static str,
    fallback: Option<String>,
    /// What its interface was when it was opened; nothing while it is being opened again.
    fit: Option<plugs::Fit>,
    /// Why it could not be opened again, as the log was told.
    replug_fault: Option<String>,
    /// When to look for its device again, once that is gone.
    replug_at_ns: Option<u64>,
    /// Files of packets begin when all nodes have met, or at this moment.
    waiting: Option<(BoxedPort, u64)>,
    /// What the log was told of an MTU that the port does not carry.
    mtu_cut: Option<String>,
}

type BoxedPort = Box<dyn Port + Send>;

/// A node of a cluster.
pub struct Node {
    settings: Settings,
    begun: Instant,
    started_at_ns: u64,
    peers: Peers,
    clients: Clients,
    kernel: Monitor,
    local: Local,
    table: Table,
    ports: Vec<PortMemory>,
    rearranged: Rearranged,
    slow_path: InterfaceIndex,
    local_addresses: LocalAddresses,
    commands: SyncSender<Command>,
    commands_bell: Arc<Bell>,
    reports: Receiver<Report>,
    reports_bell: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
    hang: HangWatch,
    /// When the interconnect is to begin anew.
    renew_at_ns: u64,
    /// Why this node has to end.
    fault: Option<NodeError>,
    /// Packets that were dropped because the process had been stopped.
    stale_packets: u64,
    netlink_resyncs: u64,
    /// Messages of the kernel's that could not be read.
    unreadable: u64,
    has_kernel_news: bool,
    looked_at_ns: u64,
    is_tracing: bool,
    is_stopping: bool,
    /// Put back when the node ends.
    sysctls: Sysctls,
    /// Locked as long as this node lives.
    _pid: File,
}

impl Node {
    /// Takes the node: its lock, its sockets, its namespace, its ports.
    ///
    /// # Errors
    /// What keeps it from that.
    pub fn new(settings: Settings) -> Result<Self, NodeError> {
        let begun = Instant::now();
        let started_at_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        let (id, node, paths) = (settings.id(), settings.node().clone(), settings.node_paths());
        let pid = take_pid(&paths, &node.name)?;
        // Sockets to other nodes are of the namespace that all nodes of a machine are started in.
        let peers = meet(&settings, started_at_ns)?;
        let interconnect = plugs::open_interconnect(&settings.cluster, id)?;
        let socket = paths.socket();
        let clients = Clients::listen(&socket).map_err(|error| system(socket.display().to_string())(error.into()))?;
        plugs::enter_namespace(&node)?;
        let mut sysctls = Sysctls::new();
        let mut requests = Requests::open()?;
        let tun = plugs::open_slow_path(&node, &mut sysctls, &mut requests)?;
        let slow_path = tun.interface();
        let (rib, tables) = Rib::new().map_err(system("memory for the tables"))?;
        let (commands, to_obey) = sync_channel(COMMANDS_MAX);
        let (to_report, reports) = sync_channel(REPORTS_MAX);
        let (commands_bell, reports_bell) = (bell()?, bell()?);
        let pulse = Arc::new(Pulse::default());
        let parts = Parts {
            forwarder: Forwarder::new(settings.forwarding(started_at_ns), tables),
            pool: Pool::new(BUFFERS, BUFFER_BYTES, HEADROOM_BYTES),
            output: Output::new(QUEUE_PACKETS_MAX),
            kernel: Box::new(tun),
            interconnect,
            nodes: settings.cluster.nodes.len(),
            commands: to_obey,
            commands_bell: Arc::clone(&commands_bell),
            reports: to_report,
            reports_bell: Arc::clone(&reports_bell),
            pulse: Arc::clone(&pulse),
            begun,
        };
        let nodes = settings.cluster.nodes.len();
        let mut taken = Self {
            settings,
            begun,
            started_at_ns,
            peers,
            clients,
            kernel: Monitor::open()?,
            local: Local::new(Some(slow_path)),
            table: Table::new(rib, id, nodes, slow_path, requests),
            ports: Vec::new(),
            rearranged: Rearranged::default(),
            slow_path,
            local_addresses: LocalAddresses::new(),
            commands,
            commands_bell,
            reports,
            reports_bell,
            thread: None,
            hang: HangWatch::new(pulse),
            renew_at_ns: WireClock::NS_MAX,
            fault: None,
            stale_packets: 0,
            netlink_resyncs: 0,
            unreadable: 0,
            has_kernel_news: true,
            looked_at_ns: 0,
            is_tracing: false,
            is_stopping: false,
            sysctls,
            _pid: pid,
        };
        taken.thread = Some(start(parts)?);
        taken.plug_all()?;
        Ok(taken)
    }

    fn plug_all(&mut self) -> Result<(), NodeError> {
        let node = self.settings.node().clone();
        let mut plugged = Vec::new();
        for (place, of_file) in node.ports.iter().enumerate() {
            let plugs::Plug { port, config, interface, kind, fallback, fit } = self.open(place)?;
            self.local.add_port(Opened { interface, config }, of_file);
            if let Some(reason) = &fallback {
                warn!(port = of_file.device, "by {kind}: {reason}");
            }
            info!(port = of_file.device, "plugged in by {kind}");
            let (port, waiting) = self.port_and_waiting(of_file, port);
            self.ports.push(PortMemory { kind, fallback, fit, waiting, ..PortMemory::default() });
            plugged.extend(port.map(|port| (place, port)));
        }
        self.local.set_static(&node);
        self.table.set_ports_without_kernel(node.ports_without_kernel());
        // What comes in finds its port and the node's routes there.
        self.settle();
        self.plug(plugged);
        Ok(())
    }

    /// Packets come and go by these ports from now on.
    fn plug(&self, ports: Vec<(usize, BoxedPort)>) {
        for (place, port) in ports {
            self.tell(Command::Plug(PortId(place as u8), port));
        }
    }

    fn open(&mut self, place: usize) -> Result<plugs::Plug, NodeError> {
        let settings = &self.settings;
        let node = settings.node();
        let opening = plugs::Opening {
            node,
            place,
            seed: settings.seed(&node.ports[place].device),
            folder: settings.folder(),
            local: &self.local_addresses,
        };
        plugs::open_port(&opening, &mut self.sysctls)
    }

    /// A file of packets waits until packets from it can go anywhere; other ports do not.
    fn port_and_waiting(
        &self,
        of_file: &PortOfNode,
        port: Option<BoxedPort>,
    ) -> (Option<BoxedPort>, Option<(BoxedPort, u64)>) {
        let until_ns = self.now_ns() + self.settings.cluster.timeouts.up_ns as u64;
        match port {
            Some(port) if of_file.kind == PortKind::Pcap => (None, Some((port, until_ns))),
            port => (port, None),
        }
    }

    /// Begins to receive from files of packets, once all nodes have met or it is time.
    fn begin_files(&mut self, now_ns: u64) {
        let have_met = self.peers.iter().all(|(_, peer)| peer.is_joined);
        for place in 0..self.ports.len() {
            let is_due = |waiting: &mut (BoxedPort, u64)| have_met || waiting.1 <= now_ns;
            if let Some((port, _)) = self.ports[place].waiting.take_if(is_due) {
                self.tell(Command::Plug(PortId(place as u8), port));
            }
        }
    }

    /// Works until it is told to stop, or `stop` is readable. Reads the cluster file again whenever `reload` is.
    ///
    /// # Errors
    /// When it cannot go on.
    pub fn run(mut self, stop: BorrowedFd<'_>, reload: BorrowedFd<'_>) -> Result<(), NodeError> {
        // Where that is not allowed, beats may be late on a busy machine.
        let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICENESS);
        let name = &self.settings.node().name;
        info!(node = name, cluster = self.settings.cluster.name, "node started");
        let mut done = Ok(());
        while !self.is_stopping && done.is_ok() {
            let has_more = self.turn();
            done = self.check_thread();
            if !self.is_stopping && done.is_ok() {
                self.sleep([stop, reload], has_more);
            }
        }
        self.end();
        done
    }

    fn now_ns(&self) -> u64 {
        self.begun.elapsed().as_nanos() as u64
    }

    /// Tells the forwarding thread. There is room: it never waits for this one.
    fn tell(&self, command: Command) {
        // Whether it has ended is looked at in each turn.
        let _ = self.commands.send(command);
        self.commands_bell.ring();
    }

    fn check_thread(&mut self) -> Result<(), NodeError> {
        if let Some(fault) = self.fault.take() {
            return Err(fault);
        }
        if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
            return Err(NodeError::ForwardingEnded);
        }
        let hung_ns = self.hang.hung_ns(self.now_ns()).unwrap_or(0);
        if hung_ns < HANG_NS_MAX { Ok(()) } else { Err(NodeError::ForwardingHung(hung_ns / 1_000_000_000)) }
    }

    /// A node that does not forward keeps away from the others, which would send to it, until it does.
    fn watch(&mut self, now_ns: u64) {
        match self.hang.look(now_ns) {
            Some(HangNews::Hangs) => {
                error!("the thread that forwards hangs: this node takes leave of the others until it goes on");
                self.peers.hold("its forwarding thread hangs", now_ns);
            }
            Some(HangNews::GoesOn(hung_ns)) => {
                let hung_ms = hung_ns / 1_000_000;
                warn!("the thread that forwards goes on, after {hung_ms} ms: this node meets the others again");
                self.peers.release();
            }
            None => {}
        }
    }

    /// The interconnect's time is up: it begins anew, and the others are met again. That takes some milliseconds, each
    /// 106 days.
    fn renew(&mut self, now_ns: u64) {
        if now_ns < self.renew_at_ns || self.hang.hung_ns(now_ns).is_some() {
            return;
        }
        self.renew_at_ns = now_ns + WireClock::NS_MAX;
        self.peers.hold("its interconnect begins anew", now_ns);
        self.handle_news();
        self.tell(Command::Renew);
        self.peers.release();
    }

    /// Whether there is more to do at once.
    fn turn(&mut self) -> bool {
        let now_ns = self.now_ns();
        self.watch(now_ns);
        self.renew(now_ns);
        self.peers.turn(now_ns, self.local.announcements());
        self.handle_news();
        self.hear_reports(now_ns);
        self.hear_kernel();
        self.replug(now_ns);
        self.begin_files(now_ns);
        self.settle();
        let has_more = self.table.turn() | self.peers.has_more();
        self.peers.speak(now_ns, self.local.announcements());
        self.handle_news();
        if let Some(told) = self.peers.told_to_all() {
            self.local.announcements_mut().prune_withdrawn(told);
        }
        self.serve_requests();
        has_more
    }

    fn handle_news(&mut self) {
        for news in self.peers.take_news() {
            match news {
                // Of two nodes the one with the lower number makes the offer.
                News::Met(node) if node > self.settings.id() => self.tell(Command::Offer(node)),
                News::Met(_) => {}
                News::Lost(node) => {
                    self.tell(Command::Leave(node));
                    self.table.withdraw_node(node);
                }
                News::Ports(node, mtus_bytes) => self.tell(Command::RemotePorts(node, mtus_bytes)),
                News::Routes(node, changes) => self.table.change(node, changes),
                News::Offer(node, offer) => self.tell(Command::Accept(node, offer)),
                News::ConnectionParams(node, params) => self.tell(Command::Finish(node, params)),
            }
        }
    }

    fn hear_reports(&mut self, now_ns: u64) {
        self.reports_bell.clear();
        for _ in 0..REPORTS_MAX {
            let Ok(report) = self.reports.try_recv() else { return };
            match report {
                Report::Pinned(port, address, adjacency) => {
                    if adjacency.is_none() {
                        warn!(port = self.device(port), %address, "no room for this router among the neighbours");
                    }
                    self.local.pinned(port, address, adjacency);
                }
                Report::Neighbours(events) => events.into_iter().for_each(|event| self.neighbour(event)),
                Report::AllNeighbours(all) => {
                    let known = all.iter().filter(|neighbour| neighbour.mac.is_some());
                    self.local.neighbours(known.map(|known| (known.port, known.address, known.adjacency)));
                }
                Report::Traced(steps) => self.send_trace_steps(&steps),
                Report::Snapshot(snapshot) => {
                    let status = self.status(&snapshot);
                    self.clients.respond_status(&Response::Status(Box::new(status)));
                }
                Report::Left(node) => self.peers.left(node, now_ns),
                Report::Broken(node) => self.peers.lose(node, "it broke the interconnect's protocol", now_ns),
                Report::Unplugged(port, error, closed) => {
                    drop(closed);
                    if let Some(port) = self.rearranged.now(port) {
                        self.unplugged(port, &error, now_ns);
                    }
                }
                Report::Closed(ports) => {
                    drop(ports);
                    self.rearranged.heard();
                }
                Report::ClosedOne(port, closed) => {
                    drop(closed);
                    if let Some(port) = self.rearranged.now(port) {
                        self.ports[usize::from(port.0)].replug_at_ns = Some(now_ns);
                    }
                }
                Report::Renewed(Ok(())) => info!("the interconnect has begun anew"),
                Report::Renewed(Err(error)) => self.fault = Some(error.into()),
                Report::Away(away_ns, packets) => {
                    let away_ms = away_ns / 1_000_000;
                    warn!("was stopped for {away_ms} ms: {packets} packets that came meanwhile are dropped");
                    self.stale_packets += packets as u64;
                }
                Report::Offered(..) | Report::Accepted(..) | Report::Finished(..) => self.joined(report, now_ns),
            }
        }
    }

    fn send_trace_steps(&mut self, steps: &[TracedStep]) {
        let names: Vec<&str> = self.settings.cluster.nodes.iter().map(|node| node.name.as_str()).collect();
        for some in steps.chunks(STEPS_MAX) {
            let step = |step| status::step(step, &names, |port| self.device(port).to_owned());
            let response = Response::Traced(some.iter().map(step).collect());
            self.clients.send_trace_steps(&response);
        }
    }

    /// How far the interconnect has come with another node.
    fn joined(&mut self, report: Report, now_ns: u64) {
        let (Report::Offered(node, _) | Report::Accepted(node, _) | Report::Finished(node, _)) = &report else {
            return;
        };
        let node = *node;
        // What is said of a connection that is gone is nobody's business any more.
        if !self.peers.peer(node).is_some_and(|peer| peer.is_current()) {
            return;
        }
        let done = match report {
            Report::Offered(_, Ok(offer)) => {
                self.peers.offer(node, offer, now_ns);
                return;
            }
            Report::Accepted(_, Ok(params)) => {
                self.peers.accept_offer(node, params, now_ns);
                Ok(())
            }
            Report::Finished(_, done) => done,
            Report::Offered(_, Err(error)) | Report::Accepted(_, Err(error)) => Err(error),
            _ => return,
        };
        match done {
            Ok(()) => {
                if let Some(peer) = self.peers.peer(node) {
                    info!(node = peer.name, "joined");
                    peer.is_joined = true;
                }
                self.tell(Command::NodeUp(node, true));
            }
            Err(error) => self.peers.lose(node, &format!("not joined: {error}"), now_ns),
        }
    }

    fn neighbour(&mut self, event: Event) {
        match event {
            Event::NeighbourUp { port, address, adjacency } => self.local.neighbour_up(port, address, adjacency),
            Event::NeighbourDown { port, address, .. } => self.local.neighbour_down(port, address),
            Event::Duplicate { port, address, mac } => {
                let (port, who) = (self.device(port), whose(mac));
                warn!(port, "address {address} is not used: {who} has it too; give one of them another address");
            }
            Event::Conflict { port, address, mac } => {
                let (port, who) = (self.device(port), whose(mac));
                warn!(port, "address {address} is used by {who} too; give one of them another address");
            }
        }
    }

    fn device(&self, port: PortId) -> &str {
        self.settings.node().ports.get(usize::from(port.0)).map_or("kernel", |port| &port.device)
    }

    fn unplugged(&mut self, port: PortId, error: &io::Error, now_ns: u64) {
        if self.settings.node().ports[usize::from(port.0)].kind == PortKind::Pcap {
            // Opened again, it would be read from its beginning.
            warn!(port = self.device(port), "no more of its files: {error}");
            return;
        }
        warn!(port = self.device(port), "its device is gone: {error}");
        self.local.set_interface(port, None);
        self.ports[usize::from(port.0)].replug_at_ns = Some(now_ns + REPLUG_NS);
    }

    /// A device may be there again, by another number. What the kernel said of that number before the port was plugged
    /// in is looked at once more: addresses and routes come with a device, and often at once.
    fn replug(&mut self, now_ns: u64) {
        let mut is_back = false;
        for place in 0..self.ports.len() {
            if self.ports[place].replug_at_ns.is_none_or(|at_ns| now_ns < at_ns) {
                continue;
            }
            match self.open(place) {
                Ok(plugs::Plug { port, interface, kind, fallback, fit, .. }) => {
                    info!(port = self.device(PortId(place as u8)), "plugged in again by {kind}");
                    let mtu_cut = self.ports[place].mtu_cut.take();
                    self.ports[place] = PortMemory { kind, fallback, fit, mtu_cut, ..PortMemory::default() };
                    if let Some(port) = port {
                        self.tell(Command::Plug(PortId(place as u8), port));
                    }
                    self.local.set_interface(PortId(place as u8), interface);
                    is_back = true;
                }
                Err(error) => self.try_again_later(place, &error, now_ns),
            }
        }
        if is_back {
            self.kernel.all().into_iter().for_each(|change| self.local.kernel(change));
        }
    }

    /// The log is told once why. A device that is gone was told of already.
    fn try_again_later(&mut self, place: usize, error: &NodeError, now_ns: u64) {
        let has_device = self.local.link(PortId(place as u8)).is_some();
        let memory = &mut self.ports[place];
        memory.replug_at_ns = Some(now_ns + REPLUG_NS);
        let fault = Some(error.to_string()).filter(|_| has_device);
        if memory.replug_fault != fault {
            if let Some(fault) = &fault {
                warn!("a port stays unplugged, and is tried again: {fault}");
            }
            memory.replug_fault = fault;
        }
    }

    /// Ports whose interface has become what they cannot follow are closed, and opened again then: both at a time
    /// there cannot be.
    fn close_unfit(&mut self) {
        for place in 0..self.ports.len() {
            let port = PortId(place as u8);
            let Some(link) = self.local.link(port) else { continue };
            if self.ports[place].fit.take_if(|fit| !fit.is_of(link)).is_some() {
                let mac = link.mac.map_or_else(String::new, |mac| format!(" and address {mac}"));
                info!(port = self.device(port), "is opened again, for MTU {}{mac}", link.mtu_bytes);
                // At once when it is closed; by then in any case, whatever number it has.
                self.ports[place].replug_at_ns = Some(self.now_ns() + REPLUG_NS);
                self.tell(Command::Close(port));
            }
        }
    }

    fn hear_kernel(&mut self) {
        if !std::mem::take(&mut self.has_kernel_news) {
            return;
        }
        match self.kernel.changes() {
            Ok(changes) => changes.into_iter().for_each(|change: Change| self.local.kernel(change)),
            Err(error) => error!("the kernel's news: {error}"),
        }
        self.close_unfit();
        self.netlink_resyncs = self.kernel.resyncs();
        let unreadable = self.kernel.unreadable();
        if unreadable > std::mem::replace(&mut self.unreadable, unreadable) && unreadable.is_power_of_two() {
            warn!(unreadable, "the kernel's news: a message cannot be read, and is passed over; is the kernel newer?");
        }
    }

    /// Does what follows from the news.
    fn settle(&mut self) {
        for effect in self.local.take_effects() {
            match effect {
                Effect::Port(port, config) => self.tell(Command::Port(port, config)),
                Effect::Pin(port, address) => self.tell(Command::Pin(port, address)),
                Effect::Unpin(adjacency) => self.tell(Command::Unpin(adjacency)),
                Effect::Hear(port, address, mac) => self.tell(Command::Hear(port, address, mac)),
                Effect::Own(address) => {
                    if let Err(error) = self.local_addresses.insert(address) {
                        warn!(%address, "the ports are not told of this address: {error}");
                    }
                }
                Effect::Disowned(address) => {
                    if let Err(error) = self.local_addresses.remove(address) {
                        warn!(%address, "the ports are not told that this address is gone: {error}");
                    }
                }
                Effect::Untaken(prefix, untaken) => self.say_untaken(prefix, untaken),
            }
        }
        let changes = self.local.settle();
        self.table.change(self.settings.id(), changes);
        self.say_mtu_cuts();
    }

    /// The log is told of a route that is not taken as the kernel has it. One by a port that is only being opened again
    /// is taken soon.
    fn say_untaken(&self, prefix: ipnet::IpNet, untaken: Untaken) {
        let Why::NoPort(interface) = untaken.why else { return warn!("{}", untaken.line(prefix, "")) };
        let name = self.local.name_of(interface).unwrap_or("?");
        let mut ports = self.settings.node().ports.iter().zip(&self.ports);
        if !ports.any(|(of_file, memory)| of_file.device == name && memory.replug_at_ns.is_some()) {
            // So it is at each start where a node shares the machine's network.
            info!("{}", untaken.line(prefix, name));
        }
    }

    /// A line for each MTU of the file that a port does not carry.
    fn mtu_cuts(&self) -> Vec<String> {
        let ports = self.settings.node().ports.iter().zip(&self.ports);
        ports
            .filter_map(|(of_file, memory)| Some(format!("port '{}': {}", of_file.device, memory.mtu_cut.as_ref()?)))
            .collect()
    }

    /// The log is told of each MTU of the file that a port does not carry, once.
    fn say_mtu_cuts(&mut self) {
        for (place, (of_file, memory)) in self.settings.node().ports.iter().zip(&mut self.ports).enumerate() {
            let cut = status::mtu_cut(of_file, self.local.port(PortId(place as u8)).mtu_bytes);
            if memory.mtu_cut != cut {
                if let Some(cut) = &cut {
                    warn!(port = of_file.device, "{cut}");
                }
                memory.mtu_cut = cut;
            }
        }
    }

    fn serve_requests(&mut self) {
        for (number, request) in self.clients.requests() {
            match request {
                Request::Status => {
                    if !self.clients.is_status_requested() {
                        self.tell(Command::Snapshot);
                    }
                    self.clients.request_status(number);
                }
                Request::Fib(query) => self.clients.stream_routes(number, fib::prefixes(&self.table, query)),
                Request::Trace(query) => self.trace(number, query),
                Request::Reload { is_trial } => {
                    let response = match self.reload(is_trial) {
                        Ok(changes) => Response::Reloaded { changes: shortened(changes) },
                        Err(fault) => Response::InvalidConfig { fault },
                    };
                    self.clients.respond(number, &response);
                }
                Request::Stop => {
                    self.clients.respond(number, &Response::Stopping);
                    self.is_stopping = true;
                }
            }
        }
        let (table, cluster) = (&self.table, &self.settings.cluster);
        self.clients.continue_route_streams(ROUTES_MAX, |prefixes, is_last| {
            let routes = prefixes.iter().filter_map(|prefix| fib::route(table, cluster, *prefix)).collect();
            Response::Fib { routes, is_last }
        });
        if self.is_tracing && !self.clients.is_tracing() {
            self.is_tracing = false;
            self.tell(Command::Trace(None));
        }
    }

    fn trace(&mut self, number: u64, query: TraceQuery) {
        if !self.clients.trace(number) {
            let reason = "another command follows packets here; end it, or wait for its end".to_owned();
            return self.clients.respond(number, &Response::Refused { reason });
        }
        let TraceQuery { source, destination, protocol, port, packets_max } = query;
        let protocol = protocol.map(packet::Protocol);
        let filter = Filter { source, destination, protocol, transport_port: port, packets_max };
        self.tell(Command::Trace(Some(filter)));
        self.is_tracing = true;
        self.clients.respond(number, &Response::Traced(Vec::new()));
    }

    fn status(&self, snapshot: &Snapshot) -> Status {
        let (node, cluster) = (self.settings.node(), &self.settings.cluster);
        let port = |(place, of_file): (usize, &crate::cluster::PortOfNode)| {
            let memory = &self.ports[place];
            let config = self.local.port(PortId(place as u8));
            status::port(of_file, memory.kind, memory.fallback.as_deref(), config, place, snapshot)
        };
        let (v4, v6) = self.table.routes();
        let untaken = self.local.untaken();
        let counters = &snapshot.counters;
        Status {
            node: node.name.clone(),
            pid: process::id(),
            started_at_ns: self.started_at_ns,
            interconnect: cluster.interconnect.kind.as_str().to_owned(),
            batch: cluster.interconnect.batch.to_string(),
            ports: node.ports.iter().enumerate().map(port).collect(),
            peers: self.peers.iter().map(|(id, peer)| status::peer(peer, &snapshot.peers[usize::from(id.0)])).collect(),
            routes: RoutesStatus {
                v4: v4 as u64,
                v6: v6 as u64,
                announced: self.local.announcements().len() as u64,
                installed: self.table.installed() as u64,
                left_out: self.table.left_out() as u64,
                by_no_port: untaken.no_port,
                encapsulated: untaken.encapsulated,
                mtu_unheeded: untaken.mtu,
            },
            neighbours: snapshot
                .neighbours
                .iter()
                .map(|neighbour| status::neighbour(self.device(neighbour.port), neighbour))
                .collect(),
            drops: status::drops_of_node(&counters.drops, self.stale_packets),
            kernel: status::traffic(counters.from_kernel, counters.to_kernel),
            icmp_errors_sent: counters.icmp_errors_sent,
            icmp_errors_suppressed: counters.icmp_errors_suppressed,
            redirects_sent: counters.redirects_sent,
            address_conflicts: counters.address_conflicts,
            buffers_free: snapshot.buffers_free as u64,
            buffers: u64::from(BUFFERS),
            netlink_resyncs: self.netlink_resyncs,
        }
    }

    /// Until something happens or is due.
    fn sleep(&mut self, [stop, reload]: [BorrowedFd<'_>; 2], has_more: bool) {
        let now_ns = self.now_ns();
        let replug = self.ports.iter().filter_map(|port| port.replug_at_ns).min().unwrap_or(u64::MAX);
        let files = self.ports.iter().filter_map(|port| port.waiting.as_ref()).map(|(_, at_ns)| *at_ns).min();
        let due_ns = self.peers.due_ns().min(replug).min(files.unwrap_or(u64::MAX)).min(now_ns + LOOK_NS);
        let due_ns = due_ns.min(self.hang.due_ns()).min(self.renew_at_ns);
        let left_ns = if has_more { 0 } else { due_ns.saturating_sub(now_ns) };
        let mut descriptors = vec![(stop, PollFlags::IN), (self.reports_bell.as_fd(), PollFlags::IN)];
        descriptors.push((self.kernel.wakes(), PollFlags::IN));
        descriptors.push((reload, PollFlags::IN));
        descriptors.extend(self.peers.descriptors());
        let clients_at = descriptors.len();
        descriptors.extend(self.clients.descriptors());
        let mut polled: Vec<PollFd<'_>> =
            descriptors.into_iter().map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)).collect();
        let limit = Timespec { tv_sec: (left_ns / 1_000_000_000) as i64, tv_nsec: (left_ns % 1_000_000_000) as i64 };
        // Interrupted: as if time were over.
        let _ = poll(&mut polled, Some(&limit));
        let readable: Vec<bool> = polled.iter().map(|fd| !fd.revents().difference(PollFlags::OUT).is_empty()).collect();
        self.is_stopping |= readable[0];
        // An event that was lost is missed at the next one at the latest; where there is none, now and then.
        self.has_kernel_news = readable[2] || self.looked_at_ns + LOOK_NS <= now_ns;
        if self.has_kernel_news {
            self.looked_at_ns = now_ns;
        }
        self.peers.note_readable(&readable[PEERS_AT..clients_at]);
        if readable[clients_at..].contains(&true) {
            self.clients.note_readable();
        }
        if readable[RELOAD_AT] && !self.is_stopping {
            // Signals that came together ask for one look.
            let _ = rustix::io::read(reload, &mut [0; 64]);
            self.reload_by_signal();
        }
    }

    /// Leaves nothing behind.
    fn end(&mut self) {
        self.peers.bye("told to end");
        let is_hung = self.hang.hung_ns(self.now_ns()).is_some();
        if !is_hung {
            self.tell(Command::Stop);
        }
        // One that hangs ends with the process.
        if let Some(thread) = self.thread.take_if(|_| !is_hung) {
            // A thread that has panicked has said so.
            let _ = thread.join();
        }
        self.table.clean_up();
        let paths = self.settings.node_paths();
        for path in [paths.socket(), paths.peers_socket()] {
            let _ = std::fs::remove_file(path);
        }
        info!("node ended");
    }
}

/// As many as an answer has room for.
fn shortened(mut changes: Vec<String>) -> Vec<String> {
    let count = changes.len();
    if count > CHANGES_SHOWN_MAX {
        changes.truncate(CHANGES_SHOWN_MAX);
        changes.push(format!("and {} more, which the log has", count - CHANGES_SHOWN_MAX));
    }
    changes
}

/// The connections to other nodes, none of which is there yet.
fn meet(settings: &Settings, started_at_ns: u64) -> Result<Peers, NodeError> {
    let cluster = &settings.cluster;
    let own = Hello { version: VERSION, digest: cluster.digest(), node: settings.id().0, incarnation: started_at_ns };
    let limits = SessionTimers { keepalive_ns: cluster.keepalive_ns() as u64, hold_ns: cluster.hold_ns() as u64 };
    let key = cluster.key.as_deref().map(Key::read).transpose()?;
    let place = settings.place(settings.node(), key.as_ref())?;
    let known = cluster.nodes.iter().filter_map(|node| Some(node.control?.ip())).collect();
    let listener = Listener::bind(&place, known).map_err(|error| match &place {
        ControlAddress::Unix(path) => system(path.display().to_string())(error),
        ControlAddress::Tcp(TcpAddress { address, .. }) => system(format!("control address {address}"))(error),
    })?;
    assert!(cluster.nodes.len() <= usize::from(NODES_MAX));
    // How many ports each has may change while it is up.
    let place = |node: &NodeOfFile| {
        settings.place(node, key.as_ref()).map(|place| (node.name.clone(), place, usize::from(PORTS_MAX)))
    };
    let paths = cluster.nodes.iter().map(place).collect::<Result<_, _>>()?;
    Ok(Peers::new(own, limits, listener, paths))
}

fn bell() -> Result<Arc<Bell>, NodeError> {
    Bell::new().map(Arc::new).map_err(system("eventfd"))
}

fn start(parts: Parts) -> Result<JoinHandle<()>, NodeError> {
    let bell = Arc::clone(&parts.reports_bell);
    let run = move || {
        // However it ends, the other thread is woken to see that.
        let _ring = RingAtEnd(bell);
        Forwarding::new(parts).run();
    };
    std::thread::Builder::new().name("forward".to_owned()).spawn(run).map_err(system("a thread"))
}

struct RingAtEnd(Arc<Bell>);

impl Drop for RingAtEnd {
    fn drop(&mut self) {
        self.0.ring();
    }
}

/// Takes the node's lock, and says in it who has it.
fn take_pid(paths: &NodePaths, node: &str) -> Result<File, NodeError> {
    let path = paths.pid();
    let refused = |error: io::Error| system(path.display().to_string())(error);
    let mut file = File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(refused)?;
    // A command that looks who holds the lock takes it for a moment; a node that was killed has it until it is gone.
    for _ in 0..TAKES_MAX {
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            file.set_len(0).map_err(refused)?;
            file.write_all(process::id().to_string().as_bytes()).map_err(refused)?;
            return Ok(file);
        }
        std::thread::sleep(TAKE_PAUSE);
    }
    let pid = io::read_to_string(&file).map(|text| text.trim().to_owned()).unwrap_or_default();
    Err(NodeError::Taken { node: node.to_owned(), pid })
}
