//! A node's process: a thread that forwards, and this one, which talks: to other nodes, to the kernel, to commands.

mod cgroup_freezer;
mod clients;
mod fib_query;
mod forwarding;
mod liveness;
mod local_routes;
mod open_ports;
mod peers;
mod rejected_routes;
mod reload;
mod renumbering;
mod route_table;
mod status;

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

use crate::cluster::{Cluster, ClusterPaths, Node as NodeConfig, NodePaths, PortKind, PortOfNode};
use crate::control::message::{Hello, VERSION};
use crate::control::transport::{ControlAddress, Listener, TcpAddress};
use crate::control::{Key, KeyError, SessionTimers};
use crate::interconnect::InterconnectError;
use crate::management::{
    CHANGES_SHOWN_MAX, ROUTES_MAX, Request, Response, RoutesStatus, STEPS_MAX, Status, TraceQuery,
};

use clients::Clients;
use forwarding::{
    COMMANDS_MAX, Command, ForwardingParts, ForwardingThread, InterconnectClock, Notifier, REPORTS_MAX, Report,
    Snapshot,
};
use liveness::{HangEvent, HangWatch, Heartbeat};
use local_routes::{Effect, LocalRoutes, OpenedPort};
use peers::{PeerUpdate, Peers};
use rejected_routes::{RejectReason, RejectedRoute};
use renumbering::PortRenumbering;
use route_table::RouteTable;

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
const KERNEL_POLL_NS: u64 = 1_000_000_000;
/// The first descriptor that is of other nodes, of those that are polled.
const PEERS_AT: usize = 4;
/// The one that asks for the cluster file to be read again.
const RELOAD_AT: usize = 3;
/// How long a port whose device is gone waits for one of the same name.
const REOPEN_NS: u64 = 500_000_000;

/// How long the forwarding thread may hang before the node ends: it will not come back.
const HANG_NS_MAX: u64 = 10_000_000_000;

/// How often, and how far apart, the node's lock is asked for.
const LOCK_ATTEMPTS_MAX: u32 = 200;
const LOCK_RETRY: Duration = Duration::from_millis(10);

/// RejectReason a node cannot start, or has to end.
#[derive(Debug, Error)]
pub enum NodeError {
    /// The node runs already.
    #[error("node '{node}' is up already (process {pid}); end it with 'crosslane router down'")]
    AlreadyRunning {
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
        /// RejectReason.
        error: String,
    },
    /// A file of a port cannot be opened.
    #[error("{error}")]
    PortFile {
        /// The port's place among the node's.
        place: usize,
        /// Which of its files.
        key: &'static str,
        /// RejectReason.
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

fn holder(mac: Option<MacAddress>) -> String {
    mac.map_or("somebody else".to_owned(), |mac| mac.to_string())
}

fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> NodeError {
    move |error| NodeError::System { what: what.into(), error }
}

/// What a node is of.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// The cluster.
    pub cluster: Cluster,
    /// The node's place in it.
    pub node: usize,
    /// Where the cluster's files lie.
    pub paths: ClusterPaths,
    /// The cluster file, by an absolute path: it is read again when the node is told to.
    pub file: PathBuf,
}

impl NodeSettings {
    fn id(&self) -> NodeId {
        NodeId(self.node as u8)
    }

    fn node(&self) -> &NodeConfig {
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
    fn place(&self, node: &NodeConfig, key: Option<&Key>) -> Result<ControlAddress, NodeError> {
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
struct PortState {
    kind: &'static str,
    fallback: Option<String>,
    /// What its interface was when it was opened; nothing while it is being opened again.
    opened_interface: Option<open_ports::OpenedInterface>,
    /// RejectReason it could not be opened again, as the log was told.
    reopen_error: Option<String>,
    /// When to look for its device again, once that is gone.
    reopen_at_ns: Option<u64>,
    /// Files of packets begin when all nodes have met, or at this moment.
    waiting: Option<(BoxedPort, u64)>,
    /// What the log was told of an MTU that the port does not carry.
    mtu_cut: Option<String>,
}

type BoxedPort = Box<dyn Port + Send>;

/// A node of a cluster.
pub struct Node {
    settings: NodeSettings,
    begun: Instant,
    started_at_ns: u64,
    peers: Peers,
    clients: Clients,
    kernel: Monitor,
    local: LocalRoutes,
    table: RouteTable,
    ports: Vec<PortState>,
    renumbering: PortRenumbering,
    slow_path: InterfaceIndex,
    local_addresses: LocalAddresses,
    commands: SyncSender<Command>,
    commands_notifier: Arc<Notifier>,
    reports: Receiver<Report>,
    reports_notifier: Arc<Notifier>,
    thread: Option<JoinHandle<()>>,
    hang: HangWatch,
    /// When the interconnect is to begin anew.
    interconnect_restart_at_ns: u64,
    /// RejectReason this node has to end.
    fault: Option<NodeError>,
    /// Packets that were dropped because the process had been stopped.
    stale_packets: u64,
    netlink_resyncs: u64,
    /// Messages of the kernel's that could not be read.
    unreadable: u64,
    is_kernel_readable: bool,
    kernel_polled_at_ns: u64,
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
    pub fn new(settings: NodeSettings) -> Result<Self, NodeError> {
        let begun = Instant::now();
        let started_at_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        let (id, node, paths) = (settings.id(), settings.node().clone(), settings.node_paths());
        let pid = lock_pid_file(&paths, &node.name)?;
        // Sockets to other nodes are of the namespace that all nodes of a machine are started in.
        let peers = bind_peers(&settings, started_at_ns)?;
        let interconnect = open_ports::open_interconnect(&settings.cluster, id)?;
        let socket = paths.socket();
        let clients = Clients::listen(&socket).map_err(|error| system(socket.display().to_string())(error.into()))?;
        open_ports::enter_namespace(&node)?;
        let mut sysctls = Sysctls::new();
        let mut requests = Requests::open()?;
        let tun = open_ports::open_slow_path(&node, &mut sysctls, &mut requests)?;
        let slow_path = tun.interface();
        let (rib, tables) = Rib::new().map_err(system("memory for the forwarding tables"))?;
        let (commands, command_receiver) = sync_channel(COMMANDS_MAX);
        let (report_sender, reports) = sync_channel(REPORTS_MAX);
        let (commands_notifier, reports_notifier) = (notifier()?, notifier()?);
        let heartbeat = Arc::new(Heartbeat::default());
        let parts = ForwardingParts {
            forwarder: Forwarder::new(settings.forwarding(started_at_ns), tables),
            pool: Pool::new(BUFFERS, BUFFER_BYTES, HEADROOM_BYTES),
            output: Output::new(QUEUE_PACKETS_MAX),
            kernel: Box::new(tun),
            interconnect,
            nodes: settings.cluster.nodes.len(),
            commands: command_receiver,
            commands_notifier: Arc::clone(&commands_notifier),
            reports: report_sender,
            reports_notifier: Arc::clone(&reports_notifier),
            heartbeat: Arc::clone(&heartbeat),
            begun,
        };
        let nodes = settings.cluster.nodes.len();
        let mut this = Self {
            settings,
            begun,
            started_at_ns,
            peers,
            clients,
            kernel: Monitor::open()?,
            local: LocalRoutes::new(Some(slow_path)),
            table: RouteTable::new(rib, id, nodes, slow_path, requests),
            ports: Vec::new(),
            renumbering: PortRenumbering::default(),
            slow_path,
            local_addresses: LocalAddresses::new(),
            commands,
            commands_notifier,
            reports,
            reports_notifier,
            thread: None,
            hang: HangWatch::new(heartbeat),
            interconnect_restart_at_ns: InterconnectClock::NS_MAX,
            fault: None,
            stale_packets: 0,
            netlink_resyncs: 0,
            unreadable: 0,
            is_kernel_readable: true,
            kernel_polled_at_ns: 0,
            is_tracing: false,
            is_stopping: false,
            sysctls,
            _pid: pid,
        };
        this.thread = Some(start(parts)?);
        this.open_all_ports()?;
        Ok(this)
    }

    fn open_all_ports(&mut self) -> Result<(), NodeError> {
        let node = self.settings.node().clone();
        let mut attached = Vec::new();
        for (place, of_file) in node.ports.iter().enumerate() {
            let open_ports::OpenPort { port, config, interface, kind, fallback, opened_interface } =
                self.open(place)?;
            self.local.add_port(OpenedPort { interface, config }, of_file);
            if let Some(reason) = &fallback {
                warn!(port = of_file.device, "by {kind}: {reason}");
            }
            info!(port = of_file.device, "opened by {kind}");
            let (port, waiting) = self.defer_capture_file(of_file, port);
            self.ports.push(PortState { kind, fallback, opened_interface, waiting, ..PortState::default() });
            attached.extend(port.map(|port| (place, port)));
        }
        self.local.set_static(&node);
        self.table.set_ports_without_kernel(node.ports_without_kernel());
        // What comes in finds its port and the node's routes there.
        self.apply_effects();
        self.attach_ports(attached);
        Ok(())
    }

    /// Packets come and go by these ports from now on.
    fn attach_ports(&self, ports: Vec<(usize, BoxedPort)>) {
        for (place, port) in ports {
            self.command(Command::AttachPort(PortId(place as u8), port));
        }
    }

    fn open(&mut self, place: usize) -> Result<open_ports::OpenPort, NodeError> {
        let settings = &self.settings;
        let node = settings.node();
        let params = open_ports::OpenPortParams {
            node,
            place,
            seed: settings.seed(&node.ports[place].device),
            folder: settings.folder(),
            local: &self.local_addresses,
        };
        open_ports::open_port(&params, &mut self.sysctls)
    }

    /// A file of packets waits until packets from it can go anywhere; other ports do not.
    fn defer_capture_file(
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
    fn attach_deferred(&mut self, now_ns: u64) {
        let have_met = self.peers.iter().all(|(_, peer)| peer.is_joined);
        for place in 0..self.ports.len() {
            let is_due = |waiting: &mut (BoxedPort, u64)| have_met || waiting.1 <= now_ns;
            if let Some((port, _)) = self.ports[place].waiting.take_if(is_due) {
                self.command(Command::AttachPort(PortId(place as u8), port));
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
            let has_more = self.poll_once();
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
    fn command(&self, command: Command) {
        // Whether it has ended is looked at in each turn.
        let _ = self.commands.send(command);
        self.commands_notifier.notify();
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
    fn check_forwarding_hang(&mut self, now_ns: u64) {
        match self.hang.poll(now_ns) {
            Some(HangEvent::Hung) => {
                error!("the thread that forwards hangs: this node takes leave of the others until it goes on");
                self.peers.hold("its forwarding thread hangs", now_ns);
            }
            Some(HangEvent::Resumed(hung_ns)) => {
                let hung_ms = hung_ns / 1_000_000;
                warn!("the thread that forwards goes on, after {hung_ms} ms: this node meets the others again");
                self.peers.release();
            }
            None => {}
        }
    }

    /// The interconnect's time is up: it begins anew, and the others are met again. That takes some milliseconds, each
    /// 106 days.
    fn restart_interconnect(&mut self, now_ns: u64) {
        if now_ns < self.interconnect_restart_at_ns || self.hang.hung_ns(now_ns).is_some() {
            return;
        }
        self.interconnect_restart_at_ns = now_ns + InterconnectClock::NS_MAX;
        self.peers.hold("its interconnect begins anew", now_ns);
        self.handle_peer_updates();
        self.command(Command::RestartInterconnect);
        self.peers.release();
    }

    /// Whether there is more to do at once.
    fn poll_once(&mut self) -> bool {
        let now_ns = self.now_ns();
        self.check_forwarding_hang(now_ns);
        self.restart_interconnect(now_ns);
        self.peers.poll(now_ns, self.local.announcements());
        self.handle_peer_updates();
        self.handle_reports(now_ns);
        self.handle_kernel_changes();
        self.reopen_ports(now_ns);
        self.attach_deferred(now_ns);
        self.apply_effects();
        let has_more = self.table.process() | self.peers.has_more();
        self.peers.send(now_ns, self.local.announcements());
        self.handle_peer_updates();
        if let Some(told) = self.peers.advertised_to_all() {
            self.local.announcements_mut().prune_withdrawn(told);
        }
        self.serve_requests();
        has_more
    }

    fn handle_peer_updates(&mut self) {
        for update in self.peers.take_updates() {
            match update {
                // Of two nodes the one with the lower number makes the offer.
                PeerUpdate::Up(node) if node > self.settings.id() => self.command(Command::OfferInterconnect(node)),
                PeerUpdate::Up(_) => {}
                PeerUpdate::Down(node) => {
                    self.command(Command::RemovePeer(node));
                    self.table.withdraw_node(node);
                }
                PeerUpdate::PortMtus(node, mtus_bytes) => self.command(Command::SetRemoteMtus(node, mtus_bytes)),
                PeerUpdate::Routes(node, changes) => self.table.change(node, changes),
                PeerUpdate::Offer(node, offer) => self.command(Command::AcceptOffer(node, offer)),
                PeerUpdate::Params(node, params) => self.command(Command::FinishOffer(node, params)),
            }
        }
    }

    fn handle_reports(&mut self, now_ns: u64) {
        self.reports_notifier.drain();
        for _ in 0..REPORTS_MAX {
            let Ok(report) = self.reports.try_recv() else { return };
            match report {
                Report::AdjacencyPinned(port, address, adjacency) => {
                    if adjacency.is_none() {
                        warn!(port = self.device(port), %address, "no room for this router among the neighbours");
                    }
                    self.local.adjacency_pinned(port, address, adjacency);
                }
                Report::NeighbourEvents(events) => events.into_iter().for_each(|event| self.neighbour(event)),
                Report::AllNeighbours(all) => {
                    let known = all.iter().filter(|neighbour| neighbour.mac.is_some());
                    self.local.neighbours(known.map(|known| (known.port, known.address, known.adjacency)));
                }
                Report::Traced(steps) => self.send_trace_steps(&steps),
                Report::Snapshot(snapshot) => {
                    let status = self.status(&snapshot);
                    self.clients.respond_status(&Response::Status(Box::new(status)));
                }
                Report::PeerRemoved(node) => self.peers.removed(node, now_ns),
                Report::PeerFailed(node) => self.peers.peer_down(node, "it broke the interconnect's protocol", now_ns),
                Report::PortFailed(port, error, closed) => {
                    drop(closed);
                    if let Some(port) = self.renumbering.current(port) {
                        self.port_failed(port, &error, now_ns);
                    }
                }
                Report::PortsRenumbered(ports) => {
                    drop(ports);
                    self.renumbering.acknowledge();
                }
                Report::PortDetached(port, closed) => {
                    drop(closed);
                    if let Some(port) = self.renumbering.current(port) {
                        self.ports[usize::from(port.0)].reopen_at_ns = Some(now_ns);
                    }
                }
                Report::InterconnectRestarted(Ok(())) => info!("the interconnect has begun anew"),
                Report::InterconnectRestarted(Err(error)) => self.fault = Some(error.into()),
                Report::Suspended(suspended_ns, packets) => {
                    let suspended_ms = suspended_ns / 1_000_000;
                    warn!(
                        "the process was stopped for {suspended_ms} ms: {packets} packets received meanwhile are dropped"
                    );
                    self.stale_packets += packets as u64;
                }
                Report::Offered(..) | Report::Accepted(..) | Report::Finished(..) => {
                    self.handle_join_report(report, now_ns)
                }
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
    fn handle_join_report(&mut self, report: Report, now_ns: u64) {
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
                self.command(Command::SetNodeUp(node, true));
            }
            Err(error) => self.peers.peer_down(node, &format!("not joined: {error}"), now_ns),
        }
    }

    fn neighbour(&mut self, event: Event) {
        match event {
            Event::NeighbourUp { port, address, adjacency } => self.local.neighbour_up(port, address, adjacency),
            Event::NeighbourDown { port, address, .. } => self.local.neighbour_down(port, address),
            Event::Duplicate { port, address, mac } => {
                let (port, who) = (self.device(port), holder(mac));
                warn!(port, "address {address} is not used: {who} has it too; give one of them another address");
            }
            Event::Conflict { port, address, mac } => {
                let (port, who) = (self.device(port), holder(mac));
                warn!(port, "address {address} is used by {who} too; give one of them another address");
            }
        }
    }

    fn device(&self, port: PortId) -> &str {
        self.settings.node().ports.get(usize::from(port.0)).map_or("kernel", |port| &port.device)
    }

    fn port_failed(&mut self, port: PortId, error: &io::Error, now_ns: u64) {
        if self.settings.node().ports[usize::from(port.0)].kind == PortKind::Pcap {
            // OpenedPort again, it would be read from its beginning.
            warn!(port = self.device(port), "no more of its files: {error}");
            return;
        }
        warn!(port = self.device(port), "its device is gone: {error}");
        self.local.set_interface(port, None);
        self.ports[usize::from(port.0)].reopen_at_ns = Some(now_ns + REOPEN_NS);
    }

    /// A device may be there again, by another number. What the kernel said of that number before the port was attached
    /// in is looked at once more: addresses and routes come with a device, and often at once.
    fn reopen_ports(&mut self, now_ns: u64) {
        let mut is_back = false;
        for place in 0..self.ports.len() {
            if self.ports[place].reopen_at_ns.is_none_or(|at_ns| now_ns < at_ns) {
                continue;
            }
            match self.open(place) {
                Ok(open_ports::OpenPort { port, interface, kind, fallback, opened_interface, .. }) => {
                    info!(port = self.device(PortId(place as u8)), "reopened by {kind}");
                    let mtu_cut = self.ports[place].mtu_cut.take();
                    self.ports[place] = PortState { kind, fallback, opened_interface, mtu_cut, ..PortState::default() };
                    if let Some(port) = port {
                        self.command(Command::AttachPort(PortId(place as u8), port));
                    }
                    self.local.set_interface(PortId(place as u8), interface);
                    is_back = true;
                }
                Err(error) => self.reopen_later(place, &error, now_ns),
            }
        }
        if is_back {
            self.kernel.all().into_iter().for_each(|change| self.local.apply_kernel_change(change));
        }
    }

    /// The log is told once reason. A device that is gone was told of already.
    fn reopen_later(&mut self, place: usize, error: &NodeError, now_ns: u64) {
        let has_device = self.local.link(PortId(place as u8)).is_some();
        let state = &mut self.ports[place];
        state.reopen_at_ns = Some(now_ns + REOPEN_NS);
        let fault = Some(error.to_string()).filter(|_| has_device);
        if state.reopen_error != fault {
            if let Some(fault) = &fault {
                warn!("a port stays closed and is retried: {fault}");
            }
            state.reopen_error = fault;
        }
    }

    /// Ports whose interface has become what they cannot follow are closed, and opened again then: both at a time
    /// there cannot be.
    fn close_changed_ports(&mut self) {
        for place in 0..self.ports.len() {
            let port = PortId(place as u8);
            let Some(link) = self.local.link(port) else { continue };
            if self.ports[place]
                .opened_interface
                .take_if(|opened_interface| !opened_interface.still_matches(link))
                .is_some()
            {
                let mac = link.mac.map_or_else(String::new, |mac| format!(" and address {mac}"));
                info!(port = self.device(port), "is opened again, for MTU {}{mac}", link.mtu_bytes);
                // At once when it is closed; by then in any case, whatever number it has.
                self.ports[place].reopen_at_ns = Some(self.now_ns() + REOPEN_NS);
                self.command(Command::DetachPort(port));
            }
        }
    }

    fn handle_kernel_changes(&mut self) {
        if !std::mem::take(&mut self.is_kernel_readable) {
            return;
        }
        match self.kernel.changes() {
            Ok(changes) => changes.into_iter().for_each(|change: Change| self.local.apply_kernel_change(change)),
            Err(error) => error!("the kernel's news: {error}"),
        }
        self.close_changed_ports();
        self.netlink_resyncs = self.kernel.resyncs();
        let unreadable = self.kernel.unreadable();
        if unreadable > std::mem::replace(&mut self.unreadable, unreadable) && unreadable.is_power_of_two() {
            warn!(unreadable, "the kernel's news: a message cannot be read, and is passed over; is the kernel newer?");
        }
    }

    /// Does what follows from the news.
    fn apply_effects(&mut self) {
        for effect in self.local.take_effects() {
            match effect {
                Effect::ConfigurePort(port, config) => self.command(Command::ConfigurePort(port, config)),
                Effect::PinAdjacency(port, address) => self.command(Command::PinAdjacency(port, address)),
                Effect::UnpinAdjacency(adjacency) => self.command(Command::UnpinAdjacency(adjacency)),
                Effect::LearnNeighbour(port, address, mac) => self.command(Command::LearnNeighbour(port, address, mac)),
                Effect::AddLocalAddress(address) => {
                    if let Err(error) = self.local_addresses.insert(address) {
                        warn!(%address, "the ports are not told of this address: {error}");
                    }
                }
                Effect::RemoveLocalAddress(address) => {
                    if let Err(error) = self.local_addresses.remove(address) {
                        warn!(%address, "the ports are not told that this address is gone: {error}");
                    }
                }
                Effect::RouteRejected(prefix, rejected) => self.log_rejected_route(prefix, rejected),
            }
        }
        let changes = self.local.update_routes();
        self.table.change(self.settings.id(), changes);
        self.log_mtu_cuts();
    }

    /// The log is told of a route that is not taken as the kernel has it. One by a port that is only being opened again
    /// is taken soon.
    fn log_rejected_route(&self, prefix: ipnet::IpNet, rejected: RejectedRoute) {
        let RejectReason::NoPort(interface) = rejected.reason else { return warn!("{}", rejected.line(prefix, "")) };
        let name = self.local.name_of(interface).unwrap_or("?");
        let mut ports = self.settings.node().ports.iter().zip(&self.ports);
        if !ports.any(|(of_file, state)| of_file.device == name && state.reopen_at_ns.is_some()) {
            // So it is at each start where a node shares the machine's network.
            info!("{}", rejected.line(prefix, name));
        }
    }

    /// A line for each MTU of the file that a port does not carry.
    fn mtu_cuts(&self) -> Vec<String> {
        let ports = self.settings.node().ports.iter().zip(&self.ports);
        ports
            .filter_map(|(of_file, state)| Some(format!("port '{}': {}", of_file.device, state.mtu_cut.as_ref()?)))
            .collect()
    }

    /// The log is told of each MTU of the file that a port does not carry, once.
    fn log_mtu_cuts(&mut self) {
        for (place, (of_file, state)) in self.settings.node().ports.iter().zip(&mut self.ports).enumerate() {
            let cut = status::mtu_cut(of_file, self.local.port(PortId(place as u8)).mtu_bytes);
            if state.mtu_cut != cut {
                if let Some(cut) = &cut {
                    warn!(port = of_file.device, "{cut}");
                }
                state.mtu_cut = cut;
            }
        }
    }

    fn serve_requests(&mut self) {
        for (number, request) in self.clients.requests() {
            match request {
                Request::Status => {
                    if !self.clients.is_status_requested() {
                        self.command(Command::Snapshot);
                    }
                    self.clients.request_status(number);
                }
                Request::Fib(query) => self.clients.stream_routes(number, fib_query::prefixes(&self.table, query)),
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
            let routes = prefixes.iter().filter_map(|prefix| fib_query::route(table, cluster, *prefix)).collect();
            Response::Fib { routes, is_last }
        });
        if self.is_tracing && !self.clients.is_tracing() {
            self.is_tracing = false;
            self.command(Command::Trace(None));
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
        self.command(Command::Trace(Some(filter)));
        self.is_tracing = true;
        self.clients.respond(number, &Response::Traced(Vec::new()));
    }

    fn status(&self, snapshot: &Snapshot) -> Status {
        let (node, cluster) = (self.settings.node(), &self.settings.cluster);
        let port = |(place, of_file): (usize, &crate::cluster::PortOfNode)| {
            let state = &self.ports[place];
            let config = self.local.port(PortId(place as u8));
            status::port(of_file, state.kind, state.fallback.as_deref(), config, place, snapshot)
        };
        let (v4, v6) = self.table.routes();
        let rejected = self.local.rejected();
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
                by_no_port: rejected.no_port,
                encapsulated: rejected.encapsulated,
                mtu_unheeded: rejected.mtu,
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
        let reopen_ports = self.ports.iter().filter_map(|port| port.reopen_at_ns).min().unwrap_or(u64::MAX);
        let files = self.ports.iter().filter_map(|port| port.waiting.as_ref()).map(|(_, at_ns)| *at_ns).min();
        let due_ns = self.peers.due_ns().min(reopen_ports).min(files.unwrap_or(u64::MAX)).min(now_ns + KERNEL_POLL_NS);
        let due_ns = due_ns.min(self.hang.due_ns()).min(self.interconnect_restart_at_ns);
        let left_ns = if has_more { 0 } else { due_ns.saturating_sub(now_ns) };
        let mut descriptors = vec![(stop, PollFlags::IN), (self.reports_notifier.as_fd(), PollFlags::IN)];
        descriptors.push((self.kernel.wakes(), PollFlags::IN));
        descriptors.push((reload, PollFlags::IN));
        descriptors.extend(self.peers.descriptors());
        let clients_at = descriptors.len();
        descriptors.extend(self.clients.descriptors());
        let mut polled: Vec<PollFd<'_>> =
            descriptors.into_iter().map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)).collect();
        let timeout = Timespec { tv_sec: (left_ns / 1_000_000_000) as i64, tv_nsec: (left_ns % 1_000_000_000) as i64 };
        // Interrupted: as if time were over.
        let _ = poll(&mut polled, Some(&timeout));
        let readable: Vec<bool> = polled.iter().map(|fd| !fd.revents().difference(PollFlags::OUT).is_empty()).collect();
        self.is_stopping |= readable[0];
        // An event that was lost is missed at the next one at the latest; where there is none, now and then.
        self.is_kernel_readable = readable[2] || self.kernel_polled_at_ns + KERNEL_POLL_NS <= now_ns;
        if self.is_kernel_readable {
            self.kernel_polled_at_ns = now_ns;
        }
        self.peers.note_readable(&readable[PEERS_AT..clients_at]);
        if readable[clients_at..].contains(&true) {
            self.clients.note_readable();
        }
        if readable[RELOAD_AT] && !self.is_stopping {
            // Signals that received_parcels together ask for one look.
            let _ = rustix::io::read(reload, &mut [0; 64]);
            self.reload_by_signal();
        }
    }

    /// Leaves nothing behind.
    fn end(&mut self) {
        self.peers.send_cease("told to end");
        let is_hung = self.hang.hung_ns(self.now_ns()).is_some();
        if !is_hung {
            self.command(Command::Stop);
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
fn bind_peers(settings: &NodeSettings, started_at_ns: u64) -> Result<Peers, NodeError> {
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
    let place = |node: &NodeConfig| {
        settings.place(node, key.as_ref()).map(|place| (node.name.clone(), place, usize::from(PORTS_MAX)))
    };
    let paths = cluster.nodes.iter().map(place).collect::<Result<_, _>>()?;
    Ok(Peers::new(own, limits, listener, paths))
}

fn notifier() -> Result<Arc<Notifier>, NodeError> {
    Notifier::new().map(Arc::new).map_err(system("eventfd"))
}

fn start(parts: ForwardingParts) -> Result<JoinHandle<()>, NodeError> {
    let notifier = Arc::clone(&parts.reports_notifier);
    let run = move || {
        // However it ends, the other thread is woken to see that.
        let _ring = NotifyOnDrop(notifier);
        ForwardingThread::new(parts).run();
    };
    std::thread::Builder::new().name("forward".to_owned()).spawn(run).map_err(system("a thread"))
}

struct NotifyOnDrop(Arc<Notifier>);

impl Drop for NotifyOnDrop {
    fn drop(&mut self) {
        self.0.notify();
    }
}

/// Takes the node's lock, and says in it who has it.
fn lock_pid_file(paths: &NodePaths, node: &str) -> Result<File, NodeError> {
    let path = paths.pid();
    let refused = |error: io::Error| system(path.display().to_string())(error);
    let mut file =
        File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(refused)?;
    // A command that looks who holds the lock takes it for a moment; a node that was killed has it until it is gone.
    for _ in 0..LOCK_ATTEMPTS_MAX {
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            file.set_len(0).map_err(refused)?;
            file.write_all(process::id().to_string().as_bytes()).map_err(refused)?;
            return Ok(file);
        }
        std::thread::sleep(LOCK_RETRY);
    }
    let pid = io::read_to_string(&file).map(|text| text.trim().to_owned()).unwrap_or_default();
    Err(NodeError::AlreadyRunning { node: node.to_owned(), pid })
}
