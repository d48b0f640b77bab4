//! The monitor of a node: an event loop over the links, the proxy, clients and etcd.

use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use control::monitor::{Request, Response, Status};
use control::proxy::{FromProxy, ToProxy};
use fabric::Epoch;
use fabric::device::{Device, DeviceEvent, Vector, VectorDoorbell};
use rack::Rack;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket::rendezvous::monitor::ListenerResponse;
use stats_page::FallbackReason;
use tracing::{error, info, warn};

use crate::clients::{ClientRequest, Clients};
use crate::device;
use crate::error::{MonitorError, system_error};
use crate::host::{lock_pid_file, raise_descriptor_limit, remove_sockets};
use crate::listener_queries::{Action, ListenerQueries};
use crate::metrics::Metrics;
use crate::neighbours::Neighbours;
use crate::peer::Event;
use crate::proxy_child::ProxyChild;
use crate::rack_subscription::{ConfigUpdate, RackSubscription};
use crate::registry::Registry;
use crate::retained_connections::RetainedConnections;
use crate::session::{ListenerState, PeerMessage};
use crate::settings::MonitorSettings;
use crate::status::StatusSources;

/// Interval at which state is polled that has no descriptor to wait for.
const POLL_INTERVAL_NS: u64 = 1_000_000_000;
/// Limit for a proxy to stop using a lost link, after which it is killed.
const STOP_TIMEOUT_NS: u64 = 1_000_000_000;
/// Poll interval of the device if it has no doorbell interrupts.
const DOORBELL_POLL_NS: u64 = 5_000_000;
/// Limit for a status request to wait for the proxy's report.
const REPORT_TIMEOUT_NS: u64 = 100_000_000;

/// The monitor of a node.
pub struct Monitor {
    settings: MonitorSettings,
    started: Instant,
    started_at_ns: u64,
    device: Device,
    bell: VectorDoorbell,
    neighbours: Neighbours,
    clients: Clients,
    registry: Registry,
    listener_queries: ListenerQueries,
    proxy: ProxyChild,
    metrics: Metrics,
    /// The subscription to the rack in etcd, unless the rack is described by a file.
    subscription: Option<RackSubscription>,
    /// Clients that wait for the status, with the deadlines of their answers.
    status_waiters: Vec<(u64, u64)>,
    polled_at_ns: u64,
    heartbeat_sent_at_ns: u64,
    is_stopping: bool,
    is_server_gone: bool,
    /// Why connections are forwarded by the proxies although the rack trusts programs with windows.
    direct_obstacle: Option<String>,
    /// Whether inotify has reported the end of a listener of this node.
    listener_may_be_gone: bool,
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
        let registry =
            Registry::open(&run_dir.directory, settings.rack.nodes.len()).map_err(system_error(&directory))?;
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
        let metrics = Metrics::listen(&run_dir.metrics_socket(), node.metrics).map_err(MonitorError::Metrics)?;
        let neighbours = Neighbours::new(&settings, &device);
        let proxy = ProxyChild::new(settings.command.clone(), run_dir.proxy_log(), configuration, inherited);
        if let Some(obstacle) = &direct_obstacle {
            warn!("connections are forwarded by the proxies: {obstacle}");
        }
        info!(node = node.name, address = %node.address, "monitor started, {}", device.describe());
        Ok(Self {
            listener_queries: ListenerQueries::new(settings.rack.timeouts.query_ns as u64),
            settings,
            started: Instant::now(),
            started_at_ns,
            bell: device.vector_doorbell(Vector::MONITOR),
            device,
            neighbours,
            clients,
            registry,
            proxy,
            metrics,
            subscription,
            status_waiters: Vec::new(),
            polled_at_ns: 0,
            heartbeat_sent_at_ns: 0,
            is_stopping: false,
            is_server_gone: false,
            direct_obstacle,
            listener_may_be_gone: false,
            _pid: pid,
        })
    }

    /// Runs the event loop until a client requests to stop, or `stop` is readable.
    ///
    /// # Errors
    /// If the device's memory shrinks.
    pub fn run(mut self, stop: BorrowedFd<'_>) -> Result<(), MonitorError> {
        while !self.is_stopping {
            let now_ns = self.now_ns();
            if let Err(error) = self.check_device(now_ns) {
                self.abandon_device();
                return Err(error);
            }
            self.run_once(now_ns);
            if !self.is_stopping {
                self.sleep(stop);
            }
        }
        self.end();
        Ok(())
    }

    fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    fn run_once(&mut self, now_ns: u64) {
        self.bell.take();
        self.serve_clients(now_ns);
        self.proxy.start(&self.device, now_ns);
        self.receive_from_proxy(now_ns);
        self.apply_updates(now_ns);
        let silence_ns = self.settings.rack.timeouts.silence_ns as u64;
        for index in 0..self.neighbours.len() {
            if self.settings.rack.is_coherent() {
                self.neighbours[index].check_heartbeat(&self.device, silence_ns, now_ns);
            }
            self.neighbours[index].peer.step(now_ns);
            self.handle_events(index, now_ns);
        }
        self.neighbours.announce(&self.proxy);
        self.check_stop_deadlines(now_ns);
        let actions = self.listener_queries.tick(now_ns);
        self.execute(actions);
        self.send_status(now_ns);
        self.serve_metrics(now_ns);
        self.run_periodic(now_ns);
    }

    /// Waits until a descriptor is readable or a deadline has passed.
    fn sleep(&mut self, stop: BorrowedFd<'_>) {
        let now_ns = self.now_ns();
        let remaining_ns = self.due_ns(now_ns).saturating_sub(now_ns);
        let mut descriptors = vec![stop, self.registry.descriptor()];
        let (listener, clients) = self.clients.descriptors();
        descriptors.push(listener);
        descriptors.extend(clients.map(|(_, descriptor)| descriptor));
        // The socket of a device server that has ended stays readable.
        descriptors.extend(self.device.descriptor().filter(|_| !self.is_server_gone));
        descriptors.extend(self.bell.descriptor());
        descriptors.extend(self.proxy.channel().map(AsFd::as_fd));
        descriptors.extend(self.metrics.descriptors());
        descriptors.extend(self.subscription.as_ref().map(RackSubscription::descriptor));
        let mut polled: Vec<PollFd<'_>> =
            descriptors.iter().map(|descriptor| PollFd::from_borrowed_fd(*descriptor, PollFlags::IN)).collect();
        let timeout =
            Timespec { tv_sec: (remaining_ns / 1_000_000_000) as i64, tv_nsec: (remaining_ns % 1_000_000_000) as i64 };
        // The result is not needed: the next iteration checks everything.
        let _ = poll(&mut polled, Some(&timeout));
        let [stopped, listener_gone] = [0, 1].map(|index: usize| !polled[index].revents().is_empty());
        (self.is_stopping, self.listener_may_be_gone) = (stopped, listener_gone);
    }

    fn due_ns(&self, now_ns: u64) -> u64 {
        let links = self.neighbours.due_ns(now_ns);
        let bell = self.bell.descriptor().is_none().then_some(now_ns + DOORBELL_POLL_NS);
        let status_waiters = self.status_waiters.iter().map(|(_, deadline_ns)| *deadline_ns).min();
        let all =
            [links, bell, status_waiters, self.listener_queries.due_ns(), self.proxy.due_ns(), self.metrics.due_ns()];
        all.into_iter().flatten().min().unwrap_or(u64::MAX).min(self.polled_at_ns + POLL_INTERVAL_NS)
    }

    /// Handles changes of the device. Called first in each iteration, because memory that was truncated must not be
    /// accessed.
    fn check_device(&mut self, now_ns: u64) -> Result<(), MonitorError> {
        for change in self.device.poll()? {
            match change {
                DeviceEvent::PeerDoorbells => {
                    // Without the new doorbells, the proxy could not wake the peer.
                    if !self.proxy.renew(&self.device) {
                        self.end_proxy("killed because it did not accept new doorbells", now_ns);
                    }
                }
                DeviceEvent::HeaderRepaired => warn!("a node overwrote the header of the device; it was restored"),
                DeviceEvent::ServerGone => {
                    self.is_server_gone = true;
                    error!(
                        "the device server is gone: links remain, but no node can join; 'crosslane down', then 'up'"
                    );
                }
                DeviceEvent::NodesGone(slots) => {
                    for slot in slots {
                        self.proxy.send(&ToProxy::Gone { peer: slot.0 });
                        self.take_down(slot.0.into(), "its monitor and its proxy have ended", now_ns);
                    }
                }
            }
        }
        Ok(())
    }

    fn take_down(&mut self, slot: usize, reason: &str, now_ns: u64) {
        let Some(index) = self.neighbours.index_of(slot) else { return };
        // A peer that shut down in order has sent its reason.
        self.neighbours[index].peer.step(now_ns);
        self.handle_events(index, now_ns);
        if self.neighbours[index].peer.state() != "down" {
            self.neighbours[index].peer.take_down(reason, now_ns);
        }
    }

    fn name(&self, slot: usize) -> &str {
        &self.settings.rack.nodes[slot].name
    }

    fn handle_events(&mut self, index: usize, now_ns: u64) {
        while let Some(event) = self.neighbours[index].peer.next_event() {
            let slot = self.neighbours[index].slot;
            match event {
                Event::Up(epoch) => info!(peer = self.name(slot), %epoch, "link up"),
                Event::Down(epoch) => self.link_is_down(index, epoch, now_ns),
                Event::Message(message) => self.handle_message(index, message),
            }
        }
    }

    fn link_is_down(&mut self, index: usize, epoch: Epoch, now_ns: u64) {
        let neighbour = &mut self.neighbours[index];
        let slot = neighbour.slot;
        let reason = neighbour.peer.reason().unwrap_or_default().to_owned();
        if neighbour.begin_stop(epoch, now_ns + STOP_TIMEOUT_NS) {
            let policy = neighbour.peer.loss_policy();
            if !self.proxy.send(&ToProxy::LinkDown { peer: slot as u8, epoch: epoch.0, policy }) {
                self.end_proxy("killed because it did not accept a message", now_ns);
            }
        }
        warn!(peer = self.name(slot), %epoch, "link down: {reason}");
        self.registry.forget(slot);
        let actions = self.listener_queries.link_down(slot);
        self.execute(actions);
    }

    fn handle_message(&mut self, index: usize, message: PeerMessage) {
        let slot = self.neighbours[index].slot;
        match message {
            PeerMessage::Handshake => {}
            PeerMessage::Query(address) => {
                let listener_state = self.listener_state(slot, address);
                if let Some(session) = self.neighbours[index].peer.session() {
                    session.answer(address, listener_state);
                }
            }
            PeerMessage::Response(address, listener_state) => {
                let actions = self.listener_queries.answered(slot, address, listener_state);
                self.execute(actions);
            }
            PeerMessage::Withdraw(address) => {
                let actions = self.listener_queries.listener_withdrawn(slot, address);
                self.execute(actions);
            }
        }
    }

    /// Returns the state of a listener for a peer. Only addresses of this node are answered.
    fn listener_state(&mut self, from: usize, address: SocketAddr) -> ListenerState {
        let own = self.settings.slot;
        if self.settings.rack.slot_of(address.ip()) != Some(own) {
            return ListenerState::NotListening;
        }
        if !self.settings.rack.allows(from, own, address.port()) {
            return ListenerState::Denied;
        }
        if self.registry.is_listening(from, address) { ListenerState::Listening } else { ListenerState::NotListening }
    }

    fn check_stop_deadlines(&mut self, now_ns: u64) {
        if self.neighbours.is_stop_overdue(now_ns) {
            self.end_proxy("killed because it did not stop using a lost link", now_ns);
        }
    }

    /// Kills the proxy. Afterwards nothing accesses the windows, and links can be trained again.
    fn end_proxy(&mut self, reason: &str, now_ns: u64) {
        self.proxy.end(reason, now_ns);
        for index in 0..self.neighbours.len() {
            let neighbour = &mut self.neighbours[index];
            // The windows contain data of the dead proxy, which only a new epoch clears.
            if neighbour.proxy_ended() && neighbour.peer.is_open() {
                neighbour.peer.take_down("this node's proxy has ended", now_ns);
                self.handle_events(index, now_ns);
            }
        }
        let actions = self.listener_queries.proxy_gone();
        self.execute(actions);
    }

    fn receive_from_proxy(&mut self, now_ns: u64) {
        loop {
            match self.proxy.receive() {
                Ok(Some(message)) => self.handle_proxy_message(message, now_ns),
                Ok(None) => return,
                Err(reason) => return self.end_proxy(&reason, now_ns),
            }
        }
    }

    fn handle_proxy_message(&mut self, message: FromProxy, now_ns: u64) {
        let actions = match message {
            FromProxy::Ready { .. } => {
                info!("the proxy is ready");
                Vec::new()
            }
            FromProxy::Report(_) => {
                self.status_waiters.iter_mut().for_each(|(_, deadline_ns)| *deadline_ns = now_ns);
                Vec::new()
            }
            FromProxy::Stopped { peer, epoch } => {
                self.neighbours.stopped(peer.into(), Epoch(epoch));
                Vec::new()
            }
            FromProxy::Broken { peer, epoch, what } => {
                self.reset_link(peer.into(), Epoch(epoch), &what, now_ns);
                Vec::new()
            }
            FromProxy::Listening { address } => self.listener_queries.listening(address),
            FromProxy::ListenFailed { address, reason } => {
                warn!(%address, "the proxy cannot listen at an address of another node: {reason}");
                self.listener_queries.listen_failed(address)
            }
            FromProxy::Refused { address } => self.listener_queries.refused(address),
            // Handled when the message was received. The state of links is polled in each iteration.
            FromProxy::Deposit(_)
            | FromProxy::Deposits(_)
            | FromProxy::Withdraw { .. }
            | FromProxy::PeerLeft { .. } => Vec::new(),
        };
        self.execute(actions);
    }

    fn reset_link(&mut self, slot: usize, epoch: Epoch, what: &str, now_ns: u64) {
        let is_current =
            self.neighbours.iter().any(|it| it.slot == slot && it.peer.epoch() == epoch && it.peer.is_open());
        if is_current {
            let reason = format!("node {} {what}", self.name(slot));
            self.take_down(slot, &reason, now_ns);
        }
    }

    fn serve_clients(&mut self, now_ns: u64) {
        self.clients.accept();
        let numbers: Vec<u64> = self.clients.descriptors().1.map(|(number, _)| number).collect();
        for number in numbers {
            match self.clients.next_request(number) {
                Ok(Some(ClientRequest::RemoteListener(address))) => self.query_listener(number, address, now_ns),
                Ok(Some(ClientRequest::Command(Request::Status))) => {
                    let is_requested = self.proxy.send(&ToProxy::Report);
                    self.status_waiters.push((number, if is_requested { now_ns + REPORT_TIMEOUT_NS } else { now_ns }));
                }
                Ok(Some(ClientRequest::Command(Request::Stop))) => {
                    info!("received a request to stop");
                    self.clients.respond(number, &Response::Stopping);
                    self.is_stopping = true;
                }
                Ok(None) => {}
                Err(gone) => self.listener_queries.forget(gone),
            }
        }
    }

    /// Handles a program's query for a listener of another node.
    fn query_listener(&mut self, client: u64, address: SocketAddr, now_ns: u64) {
        let slot = self.settings.remote_slot(address).and_then(|slot| {
            let is_usable = self.neighbours.is_open(slot) && self.proxy.is_ready();
            if is_usable { Ok(slot) } else { Err(FallbackReason::LinkDown) }
        });
        match slot {
            Ok(slot) => {
                let actions = self.listener_queries.ask(client, slot, address, now_ns);
                self.execute(actions);
            }
            Err(reason) => self.clients.answer_query(client, ListenerResponse::Unavailable(reason)),
        }
    }

    fn execute(&mut self, actions: Vec<Action>) {
        for action in actions {
            let more = match action {
                Action::Ready(client) => {
                    self.clients.answer_query(client, ListenerResponse::Ready { node: self.settings.node().address });
                    Vec::new()
                }
                Action::Refuse(client, reason) => {
                    self.clients.answer_query(client, ListenerResponse::Unavailable(reason));
                    Vec::new()
                }
                Action::Query(slot, address) => self.query(slot, address),
                Action::Listen(slot, address) => {
                    let is_sent = self.proxy.send(&ToProxy::Listen { peer: slot as u8, address });
                    if is_sent { Vec::new() } else { self.listener_queries.listen_failed(address) }
                }
                Action::StopListening(address) => {
                    self.proxy.send(&ToProxy::StopListening { address });
                    Vec::new()
                }
            };
            self.execute(more);
        }
    }

    fn query(&mut self, slot: usize, address: SocketAddr) -> Vec<Action> {
        match self.neighbours.session(slot) {
            Some(session) => {
                session.query(address);
                Vec::new()
            }
            None => self.listener_queries.link_down(slot),
        }
    }

    /// Publishes the states of links in etcd, and applies changes of the rack.
    fn apply_updates(&mut self, now_ns: u64) {
        let Some(subscription) = &mut self.subscription else { return };
        let links = self.neighbours.iter().map(|it| (it.slot, it.peer.state()));
        subscription.publish_links(&self.settings.rack, links);
        for update in subscription.updates(&self.settings) {
            match update {
                ConfigUpdate::MetricsPort(port) => {
                    if let Err(error) = self.metrics.set_port(port) {
                        warn!("{error}");
                    }
                }
                ConfigUpdate::Rack(rack) => self.apply_rack(rack, now_ns),
            }
        }
    }

    /// Applies a rack that differs only in what can change at run time.
    fn apply_rack(&mut self, rack: Rack, now_ns: u64) {
        let nodes_before = self.settings.rack.nodes.len();
        self.settings.rack = rack;
        let rack = &self.settings.rack;
        self.listener_queries.set_timeout(rack.timeouts.query_ns as u64);
        self.registry.grow(rack.nodes.len());
        self.neighbours.set_settings(&self.settings);
        for slot in nodes_before..self.settings.rack.nodes.len() {
            let node = &self.settings.rack.nodes[slot];
            info!(peer = node.name, address = %node.address, "a node has joined the rack");
            self.neighbours.add(&self.settings, &self.device, slot);
        }
        if !self.proxy.reconfigure(self.settings.configuration(self.direct_obstacle.as_deref())) {
            // The proxy would continue with outdated access rules.
            self.end_proxy("killed because it did not accept the changed rack", now_ns);
        }
        let (rack, own) = (&self.settings.rack, self.settings.slot);
        let actions = self.listener_queries.restrict(|peer, port| rack.allows(own, peer, port));
        let withdrawn = self.registry.restrict(|peer, port| rack.allows(peer, own, port));
        self.execute(actions);
        self.neighbours.withdraw(withdrawn);
    }

    fn status(&self) -> Status {
        let sources = StatusSources {
            settings: &self.settings,
            started_at_ns: self.started_at_ns,
            device: &self.device,
            direct_obstacle: self.direct_obstacle.as_deref(),
            neighbours: &self.neighbours,
            proxy: &self.proxy,
            registry: &self.registry,
            listener_queries: &self.listener_queries,
            subscription: self.subscription.as_ref(),
        };
        sources.status()
    }

    fn send_status(&mut self, now_ns: u64) {
        if self.status_waiters.iter().all(|(_, deadline_ns)| *deadline_ns > now_ns) {
            return;
        }
        let (due, rest): (Vec<_>, Vec<_>) =
            self.status_waiters.iter().copied().partition(|(_, deadline)| *deadline <= now_ns);
        self.status_waiters = rest;
        let answer = Response::Status(Box::new(self.status()));
        due.into_iter().for_each(|(client, _)| self.clients.respond(client, &answer));
    }

    fn serve_metrics(&mut self, now_ns: u64) {
        if self.metrics.poll(now_ns) {
            let status = self.status();
            let programs = stats_page::reader::read_rack(&self.settings.node_run_dir().directory).ok();
            self.metrics.respond(&status, programs.as_ref().map(|programs| &programs.processes[..]));
        }
    }

    fn run_periodic(&mut self, now_ns: u64) {
        let heartbeat_ns = self.settings.rack.timeouts.silence_ns as u64 / 4;
        if now_ns >= self.heartbeat_sent_at_ns + heartbeat_ns.min(POLL_INTERVAL_NS) {
            self.heartbeat_sent_at_ns = now_ns;
            self.device.heartbeat();
        }
        if !self.listener_may_be_gone && now_ns < self.polled_at_ns + POLL_INTERVAL_NS {
            return;
        }
        self.polled_at_ns = now_ns;
        if !self.proxy.check_alive(now_ns) {
            self.end_proxy("killed because it hangs", now_ns);
        }
        if self.registry.has_subscriptions() || self.listener_may_be_gone {
            let vanished = self.registry.vanished();
            self.neighbours.withdraw(vanished);
        }
    }

    /// Ends the proxy first, so that it accesses no window whose link the peers see going down.
    fn end(mut self) {
        let now_ns = self.now_ns();
        drop(self.proxy);
        drop(self.subscription);
        for neighbour in self.neighbours.iter_mut() {
            neighbour.peer.shut_down("its monitor was stopped", now_ns);
        }
        remove_sockets(&self.settings);
        info!("monitor ended");
    }

    /// Ends without accessing the device's memory.
    fn abandon_device(self) {
        drop(self.proxy);
        remove_sockets(&self.settings);
    }
}
