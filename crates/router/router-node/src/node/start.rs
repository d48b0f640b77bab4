//! Starts a node: lock, sockets, namespace, forwarding thread, ports.

use std::fs::File;
use std::io::{self, Write as _};
use std::process;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ::control::MetricsServer;
use router::routes::Rib;
use router::{Forwarder, NODES_MAX, Output, PORTS_MAX, Pool};
use router_ports::LocalAddresses;
use router_ports::netlink::{Monitor, Requests};
use rustix::fs::FlockOperation;

use super::clients::Clients;
use super::error::{NodeError, system};
use super::filters::Filters;
use super::forwarding::{ForwardingParts, ForwardingThread};
use super::interconnect_clock::InterconnectClock;
use super::kernel_settings;
use super::kernel_watch::KernelWatch;
use super::liveness::{HangWatch, Heartbeat};
use super::local_routes::LocalRoutes;
use super::messages::{COMMANDS_MAX, Notifier, REPORTS_MAX};
use super::open_ports;
use super::peers::Peers;
use super::renumbering::PortRenumbering;
use super::route_table::RouteTable;
use super::settings::NodeSettings;
use super::state::Node;
use crate::cluster::{Node as NodeConfig, NodePaths};
use crate::control::message::{Hello, VERSION};
use crate::control::transport::{ControlAddress, Listener, TcpAddress};
use crate::control::{Key, SessionTimers};

/// Number of packet buffers of a node.
pub const BUFFERS: u32 = 16_384;
/// Number of buffers of 64 KiB for large packets. Their memory is used once they are.
const LARGE_BUFFERS: u32 = 1024;
/// Size of a buffer: headroom, the frame header, and the longest packet.
const BUFFER_BYTES: u16 = 10_240;
/// Room before a frame, for headers that are added.
const HEADROOM_BYTES: u16 = 128;
/// Maximum number of packets that wait for one port, node or kernel.
const QUEUE_PACKETS_MAX: usize = 4096;
/// Attempts to lock the PID file, and the interval between them.
const LOCK_ATTEMPTS_MAX: u32 = 200;
const LOCK_RETRY: Duration = Duration::from_millis(10);

impl Node {
    /// Acquires the node's lock, opens its sockets, namespace and ports, and starts the forwarding thread.
    ///
    /// # Errors
    /// Returns the first failure.
    pub fn new(settings: NodeSettings) -> Result<Self, NodeError> {
        let (begun, started_at_ns) = (Instant::now(), wall_clock_ns());
        let (id, node, paths) = (settings.id(), settings.node().clone(), settings.node_paths());
        let nodes = settings.cluster.nodes.len();
        let pid = lock_pid_file(&paths, &node.name)?;
        // Control sockets belong to the namespace that all nodes of a machine are started in.
        let peers = bind_peers(&settings, started_at_ns)?;
        let interconnect = open_ports::open_interconnect(&settings.cluster, id)?;
        let (clients, metrics) = listen(&paths, &node)?;
        open_ports::enter_namespace(&node)?;
        let mut sysctls = kernel_settings::remembered(&settings);
        let mut requests = Requests::open()?;
        let tun = open_ports::open_slow_path(&node, &mut sysctls, &mut requests)?;
        let slow_path = tun.interface();
        // The interface can be opened only once in a network namespace: no other node runs there.
        kernel_settings::take_over_others(&mut sysctls, &settings).map_err(system("sysctls of a killed node"))?;
        let (rib, tables) = Rib::new().map_err(system("memory for the forwarding tables"))?;
        let (commands, command_receiver) = sync_channel(COMMANDS_MAX);
        let (report_sender, reports) = sync_channel(REPORTS_MAX);
        let (commands_notifier, reports_notifier, heartbeat) =
            (notifier()?, notifier()?, Arc::new(Heartbeat::default()));
        let parts = ForwardingParts {
            forwarder: Forwarder::new(settings.forwarding(started_at_ns), tables),
            pool: Pool::with_large(BUFFERS, BUFFER_BYTES, HEADROOM_BYTES, LARGE_BUFFERS),
            output: Output::new(QUEUE_PACKETS_MAX),
            kernel: Box::new(tun),
            interconnect,
            nodes,
            commands: command_receiver,
            commands_notifier: Arc::clone(&commands_notifier),
            reports: report_sender,
            reports_notifier: Arc::clone(&reports_notifier),
            heartbeat: Arc::clone(&heartbeat),
            begun,
        };
        let mut this = Self {
            settings,
            begun,
            started_at_ns,
            peers,
            clients,
            metrics,
            awaits_metrics: false,
            kernel: KernelWatch::start(Monitor::open()?).map_err(system("a thread"))?,
            filters: Filters::open()?,
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
            filters_polled_at_ns: 0,
            routes_max: 0,
            is_tracing: false,
            is_stopping: false,
            sysctls,
            _pid: pid,
        };
        this.check_filters_at_start()?;
        this.thread = Some(start(parts)?);
        this.open_all_ports()?;
        Ok(this)
    }
}

/// Returns the nanoseconds since 1970.
fn wall_clock_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// Listens for commands and for requests for metrics.
fn listen(paths: &NodePaths, node: &NodeConfig) -> Result<(Clients, MetricsServer), NodeError> {
    let socket = paths.socket();
    let clients = Clients::listen(&socket).map_err(|error| system(socket.display().to_string())(error.into()))?;
    let metrics = MetricsServer::listen(&paths.metrics_socket(), node.metrics).map_err(NodeError::Metrics)?;
    Ok((clients, metrics))
}

/// Listens for the other nodes. No session is up yet.
fn bind_peers(settings: &NodeSettings, started_at_ns: u64) -> Result<Peers, NodeError> {
    let cluster = &settings.cluster;
    let (digest, node) = (cluster.digest(), settings.id().0);
    let own = Hello { version: VERSION, digest, node, incarnation: started_at_ns, kept: None };
    let timers = SessionTimers { keepalive_ns: cluster.keepalive_ns() as u64, hold_ns: cluster.hold_ns() as u64 };
    let key = cluster.key.as_deref().map(Key::read).transpose()?;
    let address = settings.control_address(settings.node(), key.as_ref())?;
    let known = cluster.nodes.iter().filter_map(|node| Some(node.control?.ip())).collect();
    let listener = Listener::bind(&address, known).map_err(|error| match &address {
        ControlAddress::Unix(path) => system(path.display().to_string())(error),
        ControlAddress::Tcp(TcpAddress { address, .. }) => system(format!("control address {address}"))(error),
    })?;
    assert!(cluster.nodes.len() <= usize::from(NODES_MAX));
    // The number of ports may change while a node is up.
    let describe = |node: &NodeConfig| {
        settings.control_address(node, key.as_ref()).map(|address| (node.name.clone(), address, usize::from(PORTS_MAX)))
    };
    let nodes = cluster.nodes.iter().map(describe).collect::<Result<_, _>>()?;
    Ok(Peers::new(own, timers, listener, nodes))
}

fn notifier() -> Result<Arc<Notifier>, NodeError> {
    Notifier::new().map(Arc::new).map_err(system("eventfd"))
}

fn start(parts: ForwardingParts) -> Result<JoinHandle<()>, NodeError> {
    let notifier = Arc::clone(&parts.reports_notifier);
    let run = move || {
        // Wakes the control thread however the forwarding thread ends.
        let _notify = NotifyOnDrop(notifier);
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

/// Locks the node's PID file, and writes the process ID.
fn lock_pid_file(paths: &NodePaths, node: &str) -> Result<File, NodeError> {
    let path = paths.pid();
    let refused = |error: io::Error| system(path.display().to_string())(error);
    let mut file = File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(refused)?;
    // A command that tests the lock holds it for a moment; a killed node holds it until its process is gone.
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
