//! The monitor of a node: an event loop over the device, clients, the proxy, etcd and the links.
//!
//! An iteration checks everything, in this order:
//!
//! 1. the device, because memory that was truncated must not be accessed;
//! 2. clients, whose queries and commands later steps may answer;
//! 3. the proxy: it is started if there is none, and its messages are handled;
//! 4. changes of the rack in etcd;
//! 5. the links, each one step further;
//! 6. what is due: a proxy that has to stop using a link, queries, status, metrics, heartbeats.
//!
//! Then the monitor blocks until a descriptor is readable or a deadline has passed. It blocks in one `poll`, because
//! nothing here is on a data path.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use control::MetricsServer;
use fabric::device::{Vector, VectorDoorbell};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{info, warn};

use crate::clients::Clients;
use crate::device;
use crate::error::{MonitorError, system_error};
use crate::host::{lock_pid_file, raise_descriptor_limit, remove_sockets};
use crate::listener_queries::ListenerQueries;
use crate::neighbours::Neighbours;
use crate::node_state::NodeState;
use crate::proxy_child::ProxyChild;
use crate::rack_subscription::RackSubscription;
use crate::registry::Registry;
use crate::retained_connections::RetainedConnections;
use crate::settings::MonitorSettings;
use socket::rack::key::RackKey;

/// Interval at which state is polled that has no descriptor to wait for.
const POLL_INTERVAL_NS: u64 = 1_000_000_000;
/// Poll interval of the device if it has no doorbell interrupts.
const DOORBELL_POLL_NS: u64 = 5_000_000;

/// The monitor of a node.
pub struct Monitor {
    state: NodeState,
    started: Instant,
    doorbell: VectorDoorbell,
    polled_at_ns: u64,
    heartbeat_sent_at_ns: u64,
    /// Whether inotify has reported the end of a listener of this node.
    /// The node's lock, held while this monitor lives.
    _pid: File,
}

impl Monitor {
    /// Acquires the node's lock, lease, device and sockets.
    ///
    /// # Errors
    /// If one of them cannot be acquired.
    pub fn new(settings: MonitorSettings) -> Result<Self, MonitorError> {
        raise_descriptor_limit();
        let run_dir = settings.node_run_dir();
        let node = settings.node().clone();
        let directory = run_dir.directory.display().to_string();
        // Creates the directory too.
        RackKey::of_rack(&run_dir.directory).map_err(system_error(&directory))?;
        let registry = Registry::new(settings.rack.nodes.len(), settings.serves_all_users());
        let pid = lock_pid_file(&run_dir, &node.name)?;
        let started_at_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        let subscription = RackSubscription::acquire(&settings, started_at_ns)?;
        let device = device::open(&settings.rack, settings.slot, &settings.run_dir)?;
        let direct_obstacle = device::direct_obstacle(&settings.rack, &device);
        let configuration = settings.configuration(direct_obstacle.as_deref());
        // Before any link is trained: until then, a proxy that is to be replaced may access windows.
        let wanted = Some(&configuration).filter(|_| !settings.replaces_proxy);
        let inherited = RetainedConnections::inherit(&run_dir.successor_socket(), wanted);
        let socket = run_dir.monitor_socket();
        let clients = Clients::listen(&socket).map_err(system_error(socket.display().to_string()))?;
        let metrics = MetricsServer::listen(&run_dir.metrics_socket(), node.metrics).map_err(MonitorError::Metrics)?;
        let neighbours = Neighbours::new(&settings, &device);
        let proxy = ProxyChild::new(settings.command.clone(), run_dir.proxy_log(), configuration, inherited);
        if let Some(obstacle) = &direct_obstacle {
            warn!("connections are forwarded by the proxies: {obstacle}");
        }
        info!(node = node.name, address = %node.address, "monitor started, {}", device.describe());
        let doorbell = device.vector_doorbell(Vector::MONITOR);
        let state = NodeState {
            listener_queries: ListenerQueries::new(settings.rack.timeouts.query_ns as u64),
            settings,
            started_at_ns,
            device,
            is_server_gone: false,
            neighbours,
            clients,
            registry,
            proxy,
            metrics,
            subscription,
            status_waiters: Vec::new(),
            direct_obstacle,
            is_stopping: false,
        };
        Ok(Self { state, started: Instant::now(), doorbell, polled_at_ns: 0, heartbeat_sent_at_ns: 0, _pid: pid })
    }

    /// Runs the event loop until a client requests to stop, or `stop` is readable.
    ///
    /// # Errors
    /// If the device's memory shrinks.
    pub fn run(mut self, stop: BorrowedFd<'_>) -> Result<(), MonitorError> {
        while !self.state.is_stopping {
            let now_ns = self.now_ns();
            if let Err(error) = self.state.check_device(now_ns) {
                self.abandon_device();
                return Err(error);
            }
            self.run_once(now_ns);
            if !self.state.is_stopping {
                self.block(stop);
            }
        }
        self.end();
        Ok(())
    }

    fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    fn run_once(&mut self, now_ns: u64) {
        self.doorbell.take();
        let state = &mut self.state;
        state.serve_clients(now_ns);
        state.proxy.start(&state.device, now_ns);
        state.receive_from_proxy(now_ns);
        state.apply_updates(now_ns);
        state.step_links(now_ns);
        state.check_stop_deadlines(now_ns);
        let actions = state.listener_queries.tick(now_ns);
        state.execute(actions);
        state.send_status(now_ns);
        state.serve_metrics(now_ns);
        self.run_periodic(now_ns);
    }

    /// Blocks until a descriptor is readable or a deadline has passed.
    fn block(&mut self, stop: BorrowedFd<'_>) {
        let now_ns = self.now_ns();
        let remaining_ns = self.due_ns(now_ns).saturating_sub(now_ns);
        let state = &self.state;
        let mut descriptors = vec![stop];
        let (listener, clients) = state.clients.descriptors();
        descriptors.push(listener);
        descriptors.extend(clients.map(|(_, descriptor)| descriptor));
        // The socket of a device server that has ended stays readable.
        descriptors.extend(state.device.descriptor().filter(|_| !state.is_server_gone));
        descriptors.extend(self.doorbell.descriptor());
        descriptors.extend(state.proxy.channel().map(AsFd::as_fd));
        descriptors.extend(state.subscription.as_ref().map(RackSubscription::descriptor));
        let mut polled: Vec<PollFd<'_>> =
            descriptors.iter().map(|descriptor| PollFd::from_borrowed_fd(*descriptor, PollFlags::IN)).collect();
        polled.extend(state.metrics.descriptors().map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)));
        let timeout =
            Timespec { tv_sec: (remaining_ns / 1_000_000_000) as i64, tv_nsec: (remaining_ns % 1_000_000_000) as i64 };
        // The result is not needed: the next iteration checks everything.
        let _ = poll(&mut polled, Some(&timeout));
        self.state.is_stopping = !polled[0].revents().is_empty();
    }

    /// Returns the earliest deadline.
    fn due_ns(&self, now_ns: u64) -> u64 {
        let state = &self.state;
        let doorbell = self.doorbell.descriptor().is_none().then_some(now_ns + DOORBELL_POLL_NS);
        let status = state.status_waiters.iter().map(|(_, deadline_ns)| *deadline_ns).min();
        let all = [
            state.neighbours.due_ns(now_ns),
            doorbell,
            status,
            state.listener_queries.due_ns(),
            state.proxy.due_ns(),
            state.metrics.due_ns(),
        ];
        all.into_iter().flatten().min().unwrap_or(u64::MAX).min(self.polled_at_ns + POLL_INTERVAL_NS)
    }

    /// Sends heartbeats, and polls state that has no descriptor.
    fn run_periodic(&mut self, now_ns: u64) {
        let state = &mut self.state;
        let heartbeat_ns = state.settings.rack.timeouts.silence_ns as u64 / 4;
        if now_ns >= self.heartbeat_sent_at_ns + heartbeat_ns.min(POLL_INTERVAL_NS) {
            self.heartbeat_sent_at_ns = now_ns;
            state.device.heartbeat();
        }
        if now_ns < self.polled_at_ns + POLL_INTERVAL_NS {
            return;
        }
        self.polled_at_ns = now_ns;
        if !state.proxy.check_alive(now_ns) {
            state.end_proxy("killed because it hangs", now_ns);
        }
        if state.registry.has_subscriptions() {
            let vanished = state.registry.vanished();
            state.neighbours.withdraw(vanished);
        }
        state.announce_listeners();
    }

    /// Ends the proxy first, so that it accesses no window whose link the peers see going down.
    fn end(self) {
        let now_ns = self.now_ns();
        let NodeState { proxy, subscription, mut neighbours, settings, .. } = self.state;
        drop(proxy);
        drop(subscription);
        for neighbour in neighbours.iter_mut() {
            neighbour.peer.shut_down("its monitor was stopped", now_ns);
        }
        remove_sockets(&settings);
        info!("monitor ended");
    }

    /// Ends without accessing the device's memory.
    fn abandon_device(self) {
        drop(self.state.proxy);
        remove_sockets(&self.state.settings);
    }
}
