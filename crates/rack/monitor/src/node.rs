//! The monitor's process: everything that happens at a node, in one loop.

use std::fs::File;
use std::io::Write as _;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::process;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use control::monitor::{Answer, Ask, Direct, Link as LinkStatus, Partition, Proxy, Status};
use control::proxy::{self as words, Configuration, FromProxy, ToProxy};
use fabric::Epoch;
use fabric::device::{Device, DeviceError, DeviceEvent, DeviceLink, NodeSlot, Vector, VectorDoorbell};
use rack::{Access, AccessRule, Class, NodePlaces, Places, Rack};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};
use socket::rendezvous::monitor::Answer as FarAnswer;
use stats_page::FallbackReason;
use thiserror::Error;
use tracing::{error, info, warn};

use crate::clients::{Clients, Wish};
use crate::description::{Description, Heard, InEtcd};
use crate::device;
use crate::metrics::Metrics;
use crate::peer::{Event, Peer};
use crate::proxy_child::ProxyChild;
use crate::questions::{Action, Questions};
use crate::registry::Registry;
use crate::session::{self, Said, Verdict};
use crate::store::Store;

/// How often everything is looked at that tells nobody when it changes.
const LOOK_NS: u64 = 1_000_000_000;
/// How long a proxy may take to let go of a lost link before it is killed.
const STOP_NS_MAX: u64 = 1_000_000_000;
/// How often the device is looked at where no bell wakes.
const BELL_NS: u64 = 5_000_000;
/// How long a question for the state waits for the proxy's report.
const REPORT_NS_MAX: u64 = 100_000_000;
/// Listeners and mirrors that a state names.
const SHOWN_MAX: usize = 256;

/// Why a monitor cannot start, or has to end.
#[derive(Debug, Error)]
pub enum MonitorError {
    /// Another monitor of this node runs.
    #[error("node '{node}' is up already (process {pid}); end it with 'crosslane down'")]
    Taken {
        /// The node.
        node: String,
        /// The other monitor, as far as known.
        pid: String,
    },
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The kernel refused.
    #[error("{what}: {error}")]
    System {
        /// What was attempted.
        what: String,
        /// What the kernel said.
        error: Errno,
    },
    /// Metrics cannot be served.
    #[error("{0}")]
    Metrics(String),
    /// etcd does not give the node its lease.
    #[error(transparent)]
    Etcd(#[from] etcd::EtcdError),
}

fn system(what: impl Into<String>) -> impl FnOnce(Errno) -> MonitorError {
    move |error| MonitorError::System { what: what.into(), error }
}

/// What a monitor is of.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The rack.
    pub rack: Rack,
    /// The node's slot in it.
    pub slot: usize,
    /// Where the rack's files lie.
    pub places: Places,
    /// This program, which is the proxy's too.
    pub command: PathBuf,
    /// Where the rack lies, unless it is a file.
    pub etcd: Option<InEtcd>,
    /// The last monitor's proxy is to be replaced, as after an upgrade.
    pub replaces_proxy: bool,
}

impl Settings {
    fn node(&self) -> &rack::Node {
        &self.rack.nodes[self.slot]
    }

    fn node_places(&self) -> NodePlaces {
        self.places.node(&self.node().name)
    }

    /// Whether a proxy may have the device while another monitor opens it. A device bound to `vfio-pci` is opened by
    /// one at a time.
    fn may_outlive(&self) -> bool {
        let is_pci = self.rack.backend_of(self.node()) == rack::Backend::Pci;
        !(is_pci && self.rack.device.mode == Some(rack::PciMode::Vfio))
    }

    /// What a proxy of the node works by; `direct_obstacle` is what keeps programs from windows.
    pub fn configuration(&self, direct_obstacle: Option<&str>) -> Configuration {
        let rack = &self.rack;
        let node = |node: &rack::Node| words::Node { name: node.name.clone(), address: node.address };
        let partition = |partition: rack::Partition| words::Partition {
            class: match partition.class {
                Class::Latency => words::Class::Latency,
                Class::Bulk => words::Class::Bulk,
            },
            core: partition.core,
        };
        let cut = rack.cut();
        let spans = |spans: rack::Spans| words::Spans {
            offset_bytes: spans.offset_bytes,
            span_bytes: spans.span_bytes,
            count: spans.count,
        };
        Configuration {
            version: words::VERSION,
            own: self.slot as u8,
            slots: rack.slots() as u8,
            nodes: rack.nodes.iter().map(node).collect(),
            rack_directory: self.node_places().directory,
            control_partition_bytes: rack::CONTROL_PARTITION_BYTES,
            data_bytes: cut.data_bytes,
            spans: cut.spans.filter(|_| direct_obstacle.is_none()).map(spans),
            return_ns: rack.timeouts.return_ns as u64,
            heir_socket: self.may_outlive().then(|| self.node_places().heir_socket()),
            keeps_partitions: rack.is_coherent(),
            partitions: rack.data_partitions().into_iter().map(partition).collect(),
            slice_bytes: rack.proxy.slice_bytes,
            is_failover: rack.failover,
            failover_port: rack.failover_port,
            timing: rack
                .link
                .as_ref()
                .map(|link| words::Timing { name: link.timing.word().to_owned(), one_way_ns: link.one_way_ns }),
            access: access(rack, self.slot),
        }
    }
}

/// The access rules that speak of the node in `slot`.
fn access(rack: &Rack, slot: usize) -> words::Access {
    let rule = |rule: &AccessRule| words::Rule {
        from: rule.from_node().and_then(|from| rack.node(from)).map(|(slot, _)| slot as u8),
        ports: rule.ports.as_ref().map(|ports| ports.ranges().to_vec()),
        allows: rule.action == Access::Allow,
    };
    let rules = rack.access.iter().filter(|rule| rule.concerns(&rack.nodes[slot].name)).map(rule).collect();
    words::Access { rules, allows_others: rack.access_default == Access::Allow }
}

/// What links one slot of the rack with this node, and what the proxy knows of it.
struct Neighbour {
    slot: usize,
    peer: Peer<DeviceLink>,
    /// The epoch that the proxy was told of and has not let go.
    told: Option<Epoch>,
    /// When the proxy must have let go.
    stop_deadline_ns: Option<u64>,
    /// The last beat, and when it came.
    beat: (u64, u64),
}

/// A node's monitor.
pub struct Monitor {
    settings: Settings,
    started: Instant,
    started_at_ns: u64,
    device: Device,
    bell: VectorDoorbell,
    neighbours: Vec<Neighbour>,
    clients: Clients,
    registry: Registry,
    questions: Questions,
    proxy: ProxyChild,
    metrics: Metrics,
    /// The rack in etcd, unless it is a file.
    description: Option<Description>,
    /// Who waits for the state, until when at most.
    asking: Vec<(u64, u64)>,
    looked_at_ns: u64,
    beaten_at_ns: u64,
    is_stopping: bool,
    is_server_gone: bool,
    /// Why programs go by the proxies although they are trusted with windows.
    direct_obstacle: Option<String>,
    /// A listener of this node may be gone.
    has_news: bool,
    /// Locked as long as this monitor lives.
    _pid: File,
}

impl Monitor {
    /// Takes the node: its lock, its device, its sockets.
    ///
    /// # Errors
    /// What keeps it from that.
    pub fn new(settings: Settings) -> Result<Self, MonitorError> {
        raise_descriptor_limit();
        let places = settings.node_places();
        let node = settings.node().clone();
        let directory = places.directory.display().to_string();
        let registry = Registry::open(&places.directory, settings.rack.nodes.len()).map_err(system(&directory))?;
        let pid = take_pid(&places, &node.name)?;
        let started_at_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        let description = Description::take(&settings, started_at_ns)?;
        let device = device::open(&settings.rack, settings.slot, &settings.places)?;
        let direct_obstacle = device::direct_obstacle(&settings.rack, &device);
        let configuration = settings.configuration(direct_obstacle.as_deref());
        // Before any link is trained: a proxy that is to be replaced may touch windows until then.
        let wanted = Some(&configuration).filter(|_| !settings.replaces_proxy);
        let inherited = Store::inherit(&places.heir_socket(), wanted);
        let socket = places.monitor_socket();
        let clients = Clients::listen(&socket).map_err(system(socket.display().to_string()))?;
        let metrics = Metrics::listen(&places.metrics_socket(), node.metrics).map_err(MonitorError::Metrics)?;
        let neighbours = (0..settings.rack.nodes.len()).filter(|slot| *slot != settings.slot);
        let neighbours = neighbours.map(|slot| neighbour(&settings, &device, slot)).collect();
        let proxy = ProxyChild::new(settings.command.clone(), places.proxy_log(), configuration, inherited);
        if let Some(obstacle) = &direct_obstacle {
            warn!("programs go by the proxies: {obstacle}");
        }
        info!(node = node.name, address = %node.address, "monitor started, {}", device.describe());
        Ok(Self {
            questions: Questions::new(settings.rack.timeouts.query_ns as u64),
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
            description,
            asking: Vec::new(),
            looked_at_ns: 0,
            beaten_at_ns: 0,
            is_stopping: false,
            is_server_gone: false,
            direct_obstacle,
            has_news: false,
            _pid: pid,
        })
    }

    /// Works until it is told to stop, or `stop` is readable.
    ///
    /// # Errors
    /// When the device's memory shrinks.
    pub fn run(mut self, stop: BorrowedFd<'_>) -> Result<(), MonitorError> {
        while !self.is_stopping {
            let now_ns = self.now_ns();
            if let Err(error) = self.look_at_device(now_ns) {
                self.flee();
                return Err(error);
            }
            self.turn(now_ns);
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

    fn turn(&mut self, now_ns: u64) {
        self.bell.take();
        self.serve_clients(now_ns);
        self.proxy.start(&self.device, now_ns);
        self.hear_proxy(now_ns);
        self.hear_etcd(now_ns);
        for index in 0..self.neighbours.len() {
            self.note_beat(index, now_ns);
            self.neighbours[index].peer.step(now_ns);
            self.handle_events(index, now_ns);
        }
        self.tell_proxy_of_links();
        self.check_stops(now_ns);
        let actions = self.questions.tick(now_ns);
        self.perform(actions);
        self.answer_status(now_ns);
        self.serve_metrics(now_ns);
        self.look_now_and_then(now_ns);
    }

    /// A silent monitor is dead and not late where its proxy says that it waits for another.
    fn note_beat(&mut self, index: usize, now_ns: u64) {
        if !self.settings.rack.is_coherent() {
            return;
        }
        let neighbour = &mut self.neighbours[index];
        let (beat, is_alone) = self.device.heartbeat_of(NodeSlot(neighbour.slot as u8));
        if beat != neighbour.beat.0 {
            neighbour.beat = (beat, now_ns);
        }
        let silence_ns = self.settings.rack.timeouts.silence_ns as u64;
        neighbour.peer.set_kept(is_alone && now_ns.saturating_sub(neighbour.beat.1) <= silence_ns);
    }

    /// Until something happens or is due.
    fn sleep(&mut self, stop: BorrowedFd<'_>) {
        let now_ns = self.now_ns();
        let left_ns = self.due_ns(now_ns).saturating_sub(now_ns);
        let mut descriptors = vec![stop, self.registry.descriptor()];
        let (listener, clients) = self.clients.descriptors();
        descriptors.push(listener);
        descriptors.extend(clients.map(|(_, descriptor)| descriptor));
        // The socket of a server that is gone stays readable, and says no more.
        descriptors.extend(self.device.descriptor().filter(|_| !self.is_server_gone));
        descriptors.extend(self.bell.descriptor());
        descriptors.extend(self.proxy.channel().map(AsFd::as_fd));
        descriptors.extend(self.metrics.descriptors());
        descriptors.extend(self.description.as_ref().map(Description::descriptor));
        let mut polled: Vec<PollFd<'_>> =
            descriptors.iter().map(|descriptor| PollFd::from_borrowed_fd(*descriptor, PollFlags::IN)).collect();
        let timeout = Timespec { tv_sec: (left_ns / 1_000_000_000) as i64, tv_nsec: (left_ns % 1_000_000_000) as i64 };
        // Interrupted or late: the next turn looks at everything anyway.
        let _ = poll(&mut polled, Some(&timeout));
        let [stopped, news] = [0, 1].map(|index: usize| !polled[index].revents().is_empty());
        (self.is_stopping, self.has_news) = (stopped, news);
    }

    fn due_ns(&self, now_ns: u64) -> u64 {
        let links = self.neighbours.iter().flat_map(|neighbour| {
            let room_ns = neighbour.peer.wants_room_ns().map(|wait_ns| now_ns + wait_ns);
            [Some(neighbour.peer.due_ns()), neighbour.stop_deadline_ns, room_ns]
        });
        let links = links.flatten().min();
        let bell = self.bell.descriptor().is_none().then_some(now_ns + BELL_NS);
        let asking = self.asking.iter().map(|(_, deadline_ns)| *deadline_ns).min();
        let all = [links, bell, asking, self.questions.due_ns(), self.proxy.due_ns(), self.metrics.due_ns()];
        all.into_iter().flatten().min().unwrap_or(u64::MAX).min(self.looked_at_ns + LOOK_NS)
    }

    /// First of all in a turn: memory that has become smaller must not be touched.
    fn look_at_device(&mut self, now_ns: u64) -> Result<(), MonitorError> {
        for change in self.device.poll()? {
            match change {
                DeviceEvent::PeerDoorbells => {
                    // Without the bells it would wake nobody who sleeps there.
                    if !self.proxy.renew(&self.device) {
                        self.end_proxy("killed, for it did not take new bells", now_ns);
                    }
                }
                DeviceEvent::HeaderRepaired => warn!("a node spoiled the header of the device; it is mended"),
                DeviceEvent::ServerGone => {
                    self.is_server_gone = true;
                    error!("the device server is gone: links stay, but no node can come; 'crosslane down', then 'up'");
                }
                DeviceEvent::NodesGone(slots) => {
                    for slot in slots {
                        self.proxy.tell(&ToProxy::Gone { peer: slot.0 });
                        self.lose(slot.0.into(), "its monitor and its proxy have ended", now_ns);
                    }
                }
            }
        }
        Ok(())
    }

    fn lose(&mut self, slot: usize, reason: &str, now_ns: u64) {
        let Some(index) = self.neighbours.iter().position(|neighbour| neighbour.slot == slot) else { return };
        // A peer that left in good order has said why.
        self.neighbours[index].peer.step(now_ns);
        self.handle_events(index, now_ns);
        if self.neighbours[index].peer.state() != "down" {
            self.neighbours[index].peer.lose(reason, now_ns);
        }
    }

    fn name(&self, slot: usize) -> &str {
        &self.settings.rack.nodes[slot].name
    }

    fn handle_events(&mut self, index: usize, now_ns: u64) {
        while let Some(event) = self.neighbours[index].peer.take_event() {
            let slot = self.neighbours[index].slot;
            match event {
                Event::Up(epoch) => info!(peer = self.name(slot), %epoch, "link up"),
                Event::Down(epoch) => self.link_is_down(index, epoch, now_ns),
                Event::Said(said) => self.handle_said(index, said),
            }
        }
    }

    fn link_is_down(&mut self, index: usize, epoch: Epoch, now_ns: u64) {
        let neighbour = &mut self.neighbours[index];
        let slot = neighbour.slot;
        let reason = neighbour.peer.reason().unwrap_or_default().to_owned();
        if neighbour.told == Some(epoch) {
            neighbour.peer.hold(true);
            neighbour.stop_deadline_ns = Some(now_ns + STOP_NS_MAX);
            let fate = neighbour.peer.fate();
            if !self.proxy.tell(&ToProxy::LinkDown { peer: slot as u8, epoch: epoch.0, fate }) {
                self.end_proxy("killed, for it did not take a message", now_ns);
            }
        }
        warn!(peer = self.name(slot), %epoch, "link down: {reason}");
        self.registry.forget(slot);
        let actions = self.questions.link_down(slot);
        self.perform(actions);
    }

    fn handle_said(&mut self, index: usize, said: Said) {
        let slot = self.neighbours[index].slot;
        match said {
            Said::Hello => {}
            Said::Query(address) => {
                let verdict = self.verdict(slot, address);
                if let Some(session) = self.neighbours[index].peer.session() {
                    session.answer(address, verdict);
                }
            }
            Said::Answer(address, verdict) => {
                let actions = self.questions.answered(slot, address, verdict);
                self.perform(actions);
            }
            Said::Withdraw(address) => {
                let actions = self.questions.withdrawn(slot, address);
                self.perform(actions);
            }
        }
    }

    /// What a peer is told of an address: this node's own alone are its business.
    fn verdict(&mut self, from: usize, address: SocketAddr) -> Verdict {
        let own = self.settings.slot;
        if self.settings.rack.slot_of(address.ip()) != Some(own) {
            return Verdict::Nobody;
        }
        if !self.settings.rack.allows(from, own, address.port()) {
            return Verdict::Denied;
        }
        if self.registry.is_listening(from, address) { Verdict::Listening } else { Verdict::Nobody }
    }

    fn tell_proxy_of_links(&mut self) {
        if !self.proxy.is_ready() {
            return;
        }
        for neighbour in &mut self.neighbours {
            let epoch = neighbour.peer.epoch();
            if neighbour.peer.is_open() && neighbour.told.is_none() {
                let message = ToProxy::LinkUp { peer: neighbour.slot as u8, epoch: epoch.0 };
                neighbour.told = self.proxy.tell(&message).then_some(epoch);
            }
        }
    }

    fn check_stops(&mut self, now_ns: u64) {
        let is_late = |neighbour: &Neighbour| neighbour.stop_deadline_ns.is_some_and(|deadline| deadline <= now_ns);
        if self.neighbours.iter().any(is_late) {
            self.end_proxy("killed, for it did not let go of a lost link", now_ns);
        }
    }

    /// Afterwards nobody touches the windows, and links can be trained again.
    fn end_proxy(&mut self, reason: &str, now_ns: u64) {
        self.proxy.end(reason, now_ns);
        for index in 0..self.neighbours.len() {
            let neighbour = &mut self.neighbours[index];
            neighbour.stop_deadline_ns = None;
            neighbour.peer.hold(false);
            // What is left in the windows is the dead proxy's: only a new epoch starts clean.
            if neighbour.told.take().is_some() && neighbour.peer.is_open() {
                neighbour.peer.lose("this node's proxy has ended", now_ns);
                self.handle_events(index, now_ns);
            }
        }
        let actions = self.questions.proxy_gone();
        self.perform(actions);
    }

    fn hear_proxy(&mut self, now_ns: u64) {
        loop {
            match self.proxy.hear() {
                Ok(Some(message)) => self.handle_proxy(message, now_ns),
                Ok(None) => return,
                Err(reason) => return self.end_proxy(&reason, now_ns),
            }
        }
    }

    fn handle_proxy(&mut self, message: FromProxy, now_ns: u64) {
        let actions = match message {
            FromProxy::Ready { .. } => {
                info!("the proxy is ready");
                Vec::new()
            }
            FromProxy::Report(_) => {
                self.asking.iter_mut().for_each(|(_, deadline_ns)| *deadline_ns = now_ns);
                Vec::new()
            }
            FromProxy::Stopped { peer, epoch } => {
                self.proxy_let_go(peer.into(), Epoch(epoch));
                Vec::new()
            }
            FromProxy::Broken { peer, epoch, what } => {
                self.break_link(peer.into(), Epoch(epoch), &what, now_ns);
                Vec::new()
            }
            FromProxy::Mirrored { address } => self.questions.made(address),
            FromProxy::NotMirrored { address, reason } => {
                warn!(%address, "the proxy cannot listen for another node: {reason}");
                self.questions.not_made(address)
            }
            FromProxy::Refused { address } => self.questions.refused(address),
            // Taken by whoever has heard it. The link itself is looked at in each turn.
            FromProxy::Deposit(_) | FromProxy::Deposits(_) | FromProxy::Withdraw { .. } | FromProxy::Left { .. } => {
                Vec::new()
            }
        };
        self.perform(actions);
    }

    fn proxy_let_go(&mut self, slot: usize, epoch: Epoch) {
        let meant = self.neighbours.iter_mut().find(|neighbour| neighbour.slot == slot);
        if let Some(neighbour) = meant.filter(|neighbour| neighbour.told == Some(epoch)) {
            (neighbour.told, neighbour.stop_deadline_ns) = (None, None);
            neighbour.peer.hold(false);
        }
    }

    fn break_link(&mut self, slot: usize, epoch: Epoch, what: &str, now_ns: u64) {
        let meant = self.neighbours.iter().any(|it| it.slot == slot && it.peer.epoch() == epoch && it.peer.is_open());
        if meant {
            let reason = format!("node {} {what}", self.name(slot));
            self.lose(slot, &reason, now_ns);
        }
    }

    fn serve_clients(&mut self, now_ns: u64) {
        self.clients.accept();
        let numbers: Vec<u64> = self.clients.descriptors().1.map(|(number, _)| number).collect();
        for number in numbers {
            match self.clients.wish(number) {
                Ok(Some(Wish::Far(address))) => self.ask_far(number, address, now_ns),
                Ok(Some(Wish::Ask(Ask::Status))) => {
                    let waits = self.proxy.tell(&ToProxy::Report);
                    self.asking.push((number, if waits { now_ns + REPORT_NS_MAX } else { now_ns }));
                }
                Ok(Some(Wish::Ask(Ask::Stop))) => {
                    info!("told to stop");
                    self.clients.answer(number, &Answer::Stopping);
                    self.is_stopping = true;
                }
                Ok(None) => {}
                Err(gone) => self.questions.forget(gone),
            }
        }
    }

    /// A program asks for a listener of another node.
    fn ask_far(&mut self, client: u64, address: SocketAddr, now_ns: u64) {
        let own = self.settings.slot;
        let refusal = match self.settings.rack.slot_of(address.ip()) {
            None if address.ip().is_loopback() => Some(FallbackReason::NoListener),
            None => Some(FallbackReason::RemoteAddress),
            Some(slot) if slot == own => Some(FallbackReason::NoListener),
            Some(slot) if !self.settings.rack.allows(own, slot, address.port()) => Some(FallbackReason::AccessDenied),
            Some(_) if self.settings.node().address.is_ipv4() != address.is_ipv4() => {
                Some(FallbackReason::UnsupportedCall)
            }
            Some(slot) => {
                let is_open = self.neighbours.iter().any(|it| it.slot == slot && it.peer.is_open());
                if is_open && self.proxy.is_ready() {
                    let actions = self.questions.ask(client, slot, address, now_ns);
                    return self.perform(actions);
                }
                Some(FallbackReason::LinkDown)
            }
        };
        if let Some(reason) = refusal {
            self.clients.tell(client, FarAnswer::No(reason));
        }
    }

    fn perform(&mut self, actions: Vec<Action>) {
        for action in actions {
            let more = match action {
                Action::Ready(client) => {
                    self.clients.tell(client, FarAnswer::Ready { node: self.settings.node().address });
                    Vec::new()
                }
                Action::No(client, reason) => {
                    self.clients.tell(client, FarAnswer::No(reason));
                    Vec::new()
                }
                Action::Query(slot, address) => self.query(slot, address),
                Action::Mirror(slot, address) => {
                    let told = self.proxy.tell(&ToProxy::Mirror { peer: slot as u8, address });
                    if told { Vec::new() } else { self.questions.not_made(address) }
                }
                Action::Unmirror(address) => {
                    self.proxy.tell(&ToProxy::Unmirror { address });
                    Vec::new()
                }
            };
            self.perform(more);
        }
    }

    fn query(&mut self, slot: usize, address: SocketAddr) -> Vec<Action> {
        let neighbour = self.neighbours.iter_mut().find(|neighbour| neighbour.slot == slot);
        match neighbour.and_then(|neighbour| neighbour.peer.session()) {
            Some(session) => {
                session.query(address);
                Vec::new()
            }
            None => self.questions.link_down(slot),
        }
    }

    /// The rack has changed, or etcd has.
    fn hear_etcd(&mut self, now_ns: u64) {
        let Some(description) = &mut self.description else { return };
        let links = self.neighbours.iter().map(|it| (it.slot, it.peer.state()));
        description.tell_links(&self.settings.rack, links);
        for heard in description.hear(&self.settings) {
            match heard {
                Heard::Port(port) => {
                    if let Err(error) = self.metrics.set_port(port) {
                        warn!("{error}");
                    }
                }
                Heard::Rack(rack) => self.take_rack(rack, now_ns),
            }
        }
    }

    /// Goes on with a rack that differs in what can differ while nodes run.
    fn take_rack(&mut self, rack: Rack, now_ns: u64) {
        let nodes_before = self.settings.rack.nodes.len();
        self.settings.rack = rack;
        let rack = &self.settings.rack;
        self.questions.set_patience(rack.timeouts.query_ns as u64);
        self.registry.grow(rack.nodes.len());
        for neighbour in &mut self.neighbours {
            neighbour.peer.set_settings(session_settings(&self.settings, neighbour.slot));
        }
        for slot in nodes_before..self.settings.rack.nodes.len() {
            let node = &self.settings.rack.nodes[slot];
            info!(peer = node.name, address = %node.address, "a node has joined the rack");
            self.neighbours.push(neighbour(&self.settings, &self.device, slot));
        }
        if !self.proxy.reconfigure(self.settings.configuration(self.direct_obstacle.as_deref())) {
            // It would go on by rules that hold no more.
            self.end_proxy("killed, for it did not take the changed rack", now_ns);
        }
        let (rack, own) = (&self.settings.rack, self.settings.slot);
        let actions = self.questions.restrict(|peer, port| rack.allows(own, peer, port));
        let withdrawn = self.registry.restrict(|peer, port| rack.allows(peer, own, port));
        self.perform(actions);
        self.withdraw(withdrawn);
    }

    /// Tells peers that listeners are gone, or theirs no more.
    fn withdraw(&mut self, addresses: Vec<(usize, SocketAddr)>) {
        for (slot, address) in addresses {
            let neighbour = self.neighbours.iter_mut().find(|neighbour| neighbour.slot == slot);
            if let Some(session) = neighbour.and_then(|neighbour| neighbour.peer.session()) {
                session.withdraw(address);
            }
        }
    }

    fn answer_status(&mut self, now_ns: u64) {
        if self.asking.iter().all(|(_, deadline_ns)| *deadline_ns > now_ns) {
            return;
        }
        let (due, rest): (Vec<_>, Vec<_>) = self.asking.iter().copied().partition(|(_, deadline)| *deadline <= now_ns);
        self.asking = rest;
        let answer = Answer::Status(Box::new(self.status()));
        due.into_iter().for_each(|(client, _)| self.clients.answer(client, &answer));
    }

    fn serve_metrics(&mut self, now_ns: u64) {
        if self.metrics.listen_turn(now_ns) {
            let status = self.status();
            let programs = stats_page::reader::read_rack(&self.settings.node_places().directory).ok();
            self.metrics.answer(&status, programs.as_ref().map(|programs| &programs.processes[..]));
        }
    }

    fn look_now_and_then(&mut self, now_ns: u64) {
        let beat_ns = self.settings.rack.timeouts.silence_ns as u64 / 4;
        if now_ns >= self.beaten_at_ns + beat_ns.min(LOOK_NS) {
            self.beaten_at_ns = now_ns;
            self.device.heartbeat();
        }
        if !self.has_news && now_ns < self.looked_at_ns + LOOK_NS {
            return;
        }
        self.looked_at_ns = now_ns;
        if !self.proxy.is_working(now_ns) {
            self.end_proxy("killed, for it hangs", now_ns);
        }
        if self.registry.has_interests() || self.has_news {
            let vanished = self.registry.vanished();
            self.withdraw(vanished);
        }
    }

    fn status(&self) -> Status {
        let rack = &self.settings.rack;
        let node = self.settings.node();
        let partition = |it: rack::Partition| Partition { class: it.class.word().to_owned(), core: it.core };
        Status {
            node: node.name.clone(),
            address: node.address,
            pid: process::id(),
            started_at_ns: self.started_at_ns,
            device: self.device.describe(),
            rack_digest: format!("{:016x}", rack.digest()),
            timing: rack.link.as_ref().map(|link| link.timing.word().to_owned()),
            partitions: rack.data_partitions().into_iter().map(partition).collect(),
            direct: rack.cut().spans.map(|spans| Direct {
                spans: if self.direct_obstacle.is_none() { spans.count } else { 0 },
                obstacle: self.direct_obstacle.clone(),
            }),
            proxy: self.proxy.process().map(|(pid, is_ready)| Proxy { pid, is_ready }),
            proxy_restarts: self.proxy.restarts(),
            links: self.neighbours.iter().map(|neighbour| self.link_status(neighbour)).collect(),
            listeners: self.registry.listeners(SHOWN_MAX),
            mirrors: self.questions.ready().take(SHOWN_MAX).collect(),
            etcd: self.description.as_ref().map(|description| description.status.clone()),
        }
    }

    fn link_status(&self, neighbour: &Neighbour) -> LinkStatus {
        let node = &self.settings.rack.nodes[neighbour.slot];
        LinkStatus {
            peer: node.name.clone(),
            address: node.address,
            state: neighbour.peer.state().to_owned(),
            reason: neighbour.peer.reason().map(str::to_owned),
            epoch: neighbour.peer.epoch().0,
            ups: neighbour.peer.ups(),
            round_trip_ns: neighbour.peer.round_trip_ns(),
            carried: self.proxy.report.peers.get(neighbour.slot).copied().unwrap_or_default(),
        }
    }

    /// The proxy first, so that it touches no window that the peers hear is down.
    fn end(mut self) {
        let now_ns = self.now_ns();
        drop(self.proxy);
        drop(self.description);
        for neighbour in &mut self.neighbours {
            neighbour.peer.end("its monitor was told to stop", now_ns);
        }
        remove_sockets(&self.settings);
        info!("monitor ended");
    }

    /// Leaves memory that is not to be touched any more.
    fn flee(self) {
        drop(self.proxy);
        remove_sockets(&self.settings);
    }
}

/// As long as the node's lock is held.
fn remove_sockets(settings: &Settings) {
    let places = settings.node_places();
    // The last to go: who finds no socket knows that nothing of this node runs.
    let _ = std::fs::remove_file(places.heir_socket());
    let _ = std::fs::remove_file(places.metrics_socket());
    let _ = std::fs::remove_file(places.monitor_socket());
}

/// Each peer's bells are descriptors, twice while the proxy is told of them, and so is each program that asks.
fn raise_descriptor_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

fn neighbour(settings: &Settings, device: &Device, slot: usize) -> Neighbour {
    let peer = Peer::new(device.link(NodeSlot(slot as u8)), session_settings(settings, slot));
    Neighbour { slot, peer, told: None, stop_deadline_ns: None, beat: (0, 0) }
}

fn session_settings(settings: &Settings, slot: usize) -> session::Settings {
    let rack = &settings.rack;
    session::Settings {
        own: settings.node().name.clone(),
        peer: rack.nodes[slot].name.clone(),
        digest: rack.digest(),
        silence_ns: rack.timeouts.silence_ns as u64,
    }
}

/// The node's lock, with this process's number in it.
fn take_pid(places: &NodePlaces, node: &str) -> Result<File, MonitorError> {
    let path = places.monitor_pid();
    let shown = path.display().to_string();
    let failed = |error: std::io::Error| MonitorError::System {
        what: shown.clone(),
        error: Errno::from_io_error(&error).unwrap_or(Errno::IO),
    };
    let mut file = File::options().create(true).truncate(false).read(true).write(true).open(&path).map_err(failed)?;
    if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        let pid = std::fs::read_to_string(&path).unwrap_or_default().trim().to_owned();
        return Err(MonitorError::Taken { node: node.to_owned(), pid });
    }
    file.set_len(0).map_err(failed)?;
    writeln!(file, "{}", process::id()).map_err(failed)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rack::{ACCESS_PARTS_MAX, Backend, RackFile};
    use std::path::Path;

    fn settings(rules: &str) -> Settings {
        let text = Rack::example(3, Backend::Shm, None, rack::Trust::Proxy).to_string() + rules;
        let rack = RackFile::parse(Path::new("r.toml"), text.as_bytes()).unwrap().rack;
        let places = Places::new(Path::new("/base"), &rack, Path::new("/r.toml"));
        Settings { rack, slot: 1, places, command: PathBuf::new(), etcd: None, replaces_proxy: false }
    }

    #[test]
    fn the_proxy_holds_peers_to_what_the_monitor_answers() {
        let rules = [
            "[[access]]\nto = \"a\"\naction = \"deny\"",
            "[[access]]\nfrom = \"a\"\nto = \"b\"\nports = \"80,6000-6010\"\naction = \"deny\"",
            "[[access]]\nfrom = \"c\"\nports = 81\naction = \"allow\"",
            "[[access]]\nfrom = \"c\"\naction = \"deny\"",
        ];
        let settings = settings(&format!("\n{}\n", rules.join("\n")));
        let configuration = settings.configuration(None);
        for from in [0, 2] {
            for port in [1, 79, 80, 81, 5999, 6000, 6005, 6010, 6011, 65535] {
                let allows = settings.rack.allows(from, settings.slot, port);
                assert_eq!(configuration.access.admits(from as u8, port), allows, "{from} {port}");
            }
        }
        assert_eq!(configuration.access.rules.len(), 3, "one speaks of another node");
    }

    #[test]
    fn as_many_rules_as_there_may_be_fit_a_message() {
        let rule = "[[access]]\nfrom = \"c\"\nports = \"60000-60001\"\naction = \"allow\"\n";
        let configuration = settings(&format!("\n{}", rule.repeat(ACCESS_PARTS_MAX / 2))).configuration(None);
        let (own, _proxys) = control::Channel::pair().unwrap();
        own.send(&ToProxy::Configure(configuration), &[]).unwrap();
    }
}
