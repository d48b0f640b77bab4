//! The live proxy: engines over the partitions of a device, driven by one thread a core, under a monitor.
//!
//! Threads share the device, the listeners' sockets and the socket to the monitor; connections, engines and partitions
//! are one thread's alone. The monitor gives the orders ([`control::proxy`]); when it dies, the proxy goes on with what
//! it has until another one comes for it.
//!
//! * `end`: the proxy's end of a program's segment.
//! * `direct`: the proxy's end where programs store into the windows themselves, and the spans for that.
//! * `held`: those connections without a link, a proxy, a monitor.
//! * `owner`: a thread, its loop, and when it sleeps.
//! * `links`: the engines of a thread, one a link and place in the plan.
//! * `relay`: connections that outlive their link, over kernel TCP.
//! * `to_monitor`: the way to the monitor.
//! * `doors`: listeners that stand in for those of other nodes, and the servers of this one.
//! * `turn_clock`: the time of a turn, without asking for it in each.

mod direct;
mod doors;
mod end;
mod held;
mod links;
mod owner;
mod relay;
mod to_monitor;
mod turn_clock;

use crate::frame::ConnectionNumber;
use crate::{Class, SuspendedConnection};
use control::proxy::{
    Access, Configuration, DeviceParts, FromProxy, Node, PeerReport, Report, RetainedConnection, ToProxy, VERSION,
};
use control::{Channel, ChannelError, Received};
use direct::{ProgramEnd, SpanPool};
use fabric::device::{Device, NodeSlot};
use fabric::timed::{LinkTiming, Pacer};
use held::{Heirs, HeldEnd, Wish};
use owner::{Command, Owner};
use pcie::host::path::Path;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CpuSet, sched_setaffinity};
use socket::process::clock::now_ns;
use socket::rendezvous::directory::Rack;
use socket::rendezvous::{LaneListener, listen_for_remote};
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, mpsc};
use std::thread::JoinHandle;
use thiserror::Error;
use to_monitor::ToMonitor;

/// Connections that wait at a listener for the proxy.
const BACKLOG: i32 = 4096;

/// Why a proxy ended.
#[derive(Debug, Error)]
pub enum DriverError {
    /// The socket to the monitor.
    #[error("the monitor's socket: {0}; start the proxy by crosslane up")]
    Channel(#[from] ChannelError),
    /// The order of messages.
    #[error("the monitor sent {0}; start monitor and proxy from one build")]
    Order(&'static str),
    /// The rack directory.
    #[error("rack directory {path}: {errno}")]
    Rack {
        /// Which.
        path: String,
        /// What open answered.
        errno: Errno,
    },
    /// The device.
    #[error(transparent)]
    Device(#[from] fabric::device::DeviceError),
    /// A partition is too small for a ring.
    #[error(
        "windows of {window_bytes} bytes are too small for {partitions} partitions: ask for fewer, or larger windows"
    )]
    Windows {
        /// Bytes of a window.
        window_bytes: usize,
        /// Partitions asked for.
        partitions: usize,
    },
    /// What programs and proxies share of a modelled link.
    #[error("cannot map what programs share of a modelled link: {0}; set trust = \"proxy\"")]
    Pacer(Errno),
    /// Something that a thread needs.
    #[error("cannot start a thread: {0}")]
    Thread(Errno),
}

/// Runs a proxy until its monitor tells it to end, or until the last one has died and none comes.
///
/// # Errors
/// What keeps it from running.
pub fn run(channel: Channel) -> Result<(), DriverError> {
    raise_descriptor_limit();
    let monitor = Arc::new(ToMonitor::new(channel));
    let mut proxy: Option<Proxy> = None;
    while serve(&monitor, &mut proxy)? {
        proxy = proxy.and_then(Proxy::outlive_monitor);
        if proxy.is_none() {
            return Ok(());
        }
    }
    proxy.map(Proxy::stop).unwrap_or_default();
    Ok(())
}

/// Obeys a monitor; whether it has died, and not told the proxy to end.
fn serve(monitor: &Arc<ToMonitor>, proxy: &mut Option<Proxy>) -> Result<bool, DriverError> {
    let channel = monitor.channel();
    let mut parts = DeviceParts::default();
    while let Some((message, descriptors)) = wait(&channel, proxy)? {
        match (message, &mut *proxy) {
            (ToProxy::Configure(setup), None) => *proxy = Some(Proxy::start(setup, Arc::clone(monitor))?),
            (ToProxy::Configure(_), Some(_)) => return Err(DriverError::Order("a second configuration")),
            (ToProxy::Stop, _) => return Ok(false),
            (ToProxy::Descriptors, _) => parts.add(descriptors),
            (_, None) => return Err(DriverError::Order("an order before the configuration")),
            (ToProxy::Retained(kept), Some(proxy)) => proxy.kept.extend(kept.into_iter().zip(descriptors)),
            (ToProxy::Device { bytes }, Some(proxy)) => proxy.take_device(&bytes, parts.take())?,
            (message, Some(proxy)) => proxy.obey(message),
        }
    }
    Ok(true)
}

/// The next message of the monitor; `None` once it is gone. Meanwhile, does what the threads ask for.
fn wait(channel: &Channel, proxy: &mut Option<Proxy>) -> Result<Option<(ToProxy, Vec<OwnedFd>)>, DriverError> {
    loop {
        match channel.receive()? {
            Received::Message(message, descriptors) => return Ok(Some((message, descriptors))),
            Received::Ended => return Ok(None),
            Received::Nothing => {}
        }
        match proxy {
            Some(proxy) => proxy.wait_for_threads(channel),
            None => _ = poll(&mut [PollFd::new(channel, PollFlags::IN)], None),
        }
    }
}

/// Each connection has a descriptor.
fn raise_descriptor_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// One engine's partitions, by number, and the core of its thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    latency: usize,
    bulk: Option<usize>,
    core: Option<u16>,
}

/// The engines of every link: one for each latency partition, with the bulk partition of the same rank.
fn places_of(setup: &Configuration) -> Vec<Place> {
    let of_class = |class| move |partition: &(usize, &control::proxy::Partition)| class_of(partition.1) == class;
    let numbered = || setup.partitions.iter().enumerate();
    let bulk: Vec<usize> = numbered().filter(of_class(Class::Bulk)).map(|(index, _)| index).collect();
    numbered()
        .filter(of_class(Class::Latency))
        .enumerate()
        .map(|(rank, (latency, partition))| Place { latency, bulk: bulk.get(rank).copied(), core: partition.core })
        .collect()
}

fn class_of(partition: &control::proxy::Partition) -> Class {
    match partition.class {
        control::proxy::Class::Latency => Class::Latency,
        control::proxy::Class::Bulk => Class::Bulk,
    }
}

/// Places by thread: those with the same core share one, and so do those without; in the same order at both ends.
fn threads_of(places: &[Place]) -> Vec<(Option<u16>, Vec<usize>)> {
    let mut threads = BTreeMap::<Option<u16>, Vec<usize>>::new();
    for (index, place) in places.iter().enumerate() {
        threads.entry(place.core).or_default().push(index);
    }
    threads.into_iter().collect()
}

/// What all threads know.
#[derive(Debug)]
struct Shared {
    setup: Configuration,
    /// The nodes' addresses by slot, as far as they are known: nodes join while others run.
    addresses: Vec<OnceLock<IpAddr>>,
    access: RwLock<Access>,
    places: Vec<Place>,
    /// The model that links are slowed down to.
    timing: Option<LinkTiming>,
    /// What this node's threads share of each link's rate, by peer.
    paces: Vec<Pacer>,
    rack: Arc<Rack>,
    monitor: Arc<ToMonitor>,
    /// Spans for programs, by peer; none where programs are not trusted with windows.
    span_pools: Vec<Arc<SpanPool>>,
    /// Listeners that the other node has none for.
    refused: Mutex<Vec<SocketAddr>>,
    /// Rings for them.
    refused_bell: OwnedFd,
}

impl Shared {
    fn new(setup: Configuration, monitor: Arc<ToMonitor>) -> Result<Self, DriverError> {
        let timing = setup.timing.as_ref().map(timing_of).transpose()?;
        let slots = setup.nodes.len().max(usize::from(setup.slots));
        let paces = (0..slots).map(|_| Pacer::new()).collect();
        let known = |slot: usize| setup.nodes.get(slot).map_or_else(OnceLock::new, |node| OnceLock::from(node.address));
        let addresses = (0..slots).map(known).collect();
        let failed = |errno| DriverError::Rack { path: setup.rack_directory.display().to_string(), errno };
        let rack = Arc::new(Rack::open(&setup.rack_directory).map_err(failed)?);
        let places = places_of(&setup);
        let refused_bell = new_bell().map_err(DriverError::Thread)?;
        let span_pools = span_pools(&setup, &monitor, timing);
        let access = RwLock::new(setup.access.clone());
        let refused = Mutex::default();
        Ok(Self { setup, addresses, access, places, timing, paces, rack, monitor, span_pools, refused, refused_bell })
    }

    /// Whether a device has room for everything in each window.
    fn check_room(&self, device: &Device) -> Result<(), DriverError> {
        let (window_bytes, partitions) = (device.layout().window_bytes(), self.setup.partitions.len());
        let bytes = links::partition_bytes(window_bytes, &self.setup);
        let holds_model = self.timing.is_none_or(|timing| links::timed_slots(bytes, timing).is_some());
        let holds_ring = links::ring_slots(window_bytes, &self.setup).is_some();
        let holds_spans = self.span_pools.iter().all(|pool| pool.fits(window_bytes));
        if !holds_model || !holds_ring || !holds_spans || self.places.is_empty() {
            return Err(DriverError::Windows { window_bytes, partitions });
        }
        Ok(())
    }

    /// The other node has nobody at this address.
    fn note_refused(&self, address: SocketAddr) {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).push(address);
        let _ = rustix::io::write(&self.refused_bell, &1_u64.to_ne_bytes());
    }

    /// With the peer that each is shared with.
    fn span_pools_of_peers(&self) -> impl Iterator<Item = (usize, &Arc<SpanPool>)> {
        let own = usize::from(self.setup.own_slot);
        self.span_pools.iter().enumerate().filter(move |(peer, _)| *peer != own)
    }

    fn span_pool(&self, peer: u8) -> Option<&Arc<SpanPool>> {
        self.span_pools.get(usize::from(peer))
    }

    /// What all who write over the link to a peer share of its rate.
    fn pace(&self, peer: u8) -> Pacer {
        let of_programs = self.span_pool(peer).and_then(|pool| pool.pace());
        of_programs.unwrap_or_else(|| self.paces[usize::from(peer)].clone())
    }

    fn take_refused(&self) -> Vec<SocketAddr> {
        let _ = rustix::io::read(&self.refused_bell, &mut [0_u8; 8]);
        std::mem::take(&mut self.refused.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The address of a node.
    fn address(&self, slot: u8) -> Option<IpAddr> {
        self.addresses.get(usize::from(slot))?.get().copied()
    }

    /// The rules by which peers are judged that connect.
    fn access(&self) -> RwLockReadGuard<'_, Access> {
        self.access.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, nodes: &[Node], access: Access) {
        for (place, node) in self.addresses.iter().zip(nodes) {
            // One that is known already keeps its address.
            let _ = place.set(node.address);
        }
        *self.access.write().unwrap_or_else(PoisonError::into_inner) = access;
    }

    /// Where a thread listens for the proxies of other nodes that have lost a link; nowhere unless it is asked for.
    fn rescue_address(&self, thread: usize) -> Option<SocketAddr> {
        let ip = self.address(self.setup.own_slot).filter(|_| self.setup.is_failover)?;
        let port = self.setup.failover_port.map_or(Some(0), |first| first.checked_add(thread as u16));
        Some(SocketAddr::new(ip, port?))
    }

    /// Tells the monitor. One that is gone will be noticed by whoever reads from it.
    fn tell(&self, message: &FromProxy) {
        let _ = self.monitor.send(message, &[]);
    }
}

/// A thread, as the others see it.
struct Thread {
    commands: mpsc::Sender<Command>,
    bell: Arc<OwnedFd>,
    handle: JoinHandle<()>,
}

impl Thread {
    fn order(&self, command: Command) {
        if self.commands.send(command).is_ok() {
            let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        }
    }
}

/// The spans of every link, also of those with nodes that have not joined yet.
fn span_pools(setup: &Configuration, monitor: &Arc<ToMonitor>, timing: Option<LinkTiming>) -> Vec<Arc<SpanPool>> {
    // What lies in windows cannot go on without them.
    let Some(spans) = setup.spans.filter(|_| !setup.is_failover) else { return Vec::new() };
    let pool = |peer| {
        let ends = (NodeSlot(peer as u8), NodeSlot(setup.own_slot));
        Arc::new(SpanPool::new(ends, spans, timing, Arc::clone(monitor)))
    };
    (0..setup.nodes.len().max(usize::from(setup.slots))).map(pool).collect()
}

/// Everything, as the thread sees it that listens to the monitor.
struct Proxy {
    shared: Arc<Shared>,
    threads: Vec<Thread>,
    device: Option<Device>,
    listeners: HashMap<SocketAddr, Arc<LaneListener>>,
    /// Connections of an earlier proxy, until the device is there.
    kept: Vec<(RetainedConnection, OwnedFd)>,
    heirs: Option<Heirs>,
    /// Another monitor has come, and brings a device of its own.
    is_adopted: bool,
}

impl Proxy {
    fn start(setup: Configuration, monitor: Arc<ToMonitor>) -> Result<Self, DriverError> {
        if setup.version != VERSION {
            return Err(DriverError::Order("a configuration of another version"));
        }
        let shared = Arc::new(Shared::new(setup, monitor)?);
        let heirs = shared.setup.successor_socket.as_deref().map(Heirs::listen).transpose()?;
        let threads = threads_of(&shared.places)
            .into_iter()
            .enumerate()
            .map(|(index, (core, places))| Self::start_thread(&shared, index, core, places))
            .collect::<Result<_, _>>()
            .map_err(DriverError::Thread)?;
        let listeners = HashMap::new();
        Ok(Self { shared, threads, device: None, listeners, kept: Vec::new(), heirs, is_adopted: false })
    }

    fn start_thread(
        shared: &Arc<Shared>,
        index: usize,
        core: Option<u16>,
        places: Vec<usize>,
    ) -> Result<Thread, Errno> {
        let (commands, orders) = mpsc::channel();
        let bell = Arc::new(new_bell()?);
        let mut owner = Owner::new(Arc::clone(shared), index, places, orders, Arc::clone(&bell))?;
        let run = move || {
            if let Some(core) = core {
                pin_to(core);
            }
            owner.run();
        };
        let handle = std::thread::Builder::new().name(format!("owner {index}")).spawn(run).map_err(|_| Errno::AGAIN)?;
        Ok(Thread { commands, bell, handle })
    }

    fn take_device(&mut self, text: &[u8], descriptors: Vec<OwnedFd>) -> Result<(), DriverError> {
        if let Some(device) = self.device.as_ref().filter(|_| !self.is_adopted) {
            return Ok(device.update_peers(text, descriptors)?);
        }
        let device = Device::take_over(text, descriptors)?;
        self.shared.check_room(&device)?;
        for (_, pool) in self.shared.span_pools_of_peers() {
            pool.find_pace(&device).map_err(DriverError::Pacer)?;
        }
        self.order(|| Command::Device(device.clone()));
        self.adopt_kept(&device);
        let is_first = self.device.replace(device.clone()).is_none();
        let is_heirs = std::mem::take(&mut self.is_adopted);
        for (_, pool) in self.shared.span_pools_of_peers() {
            if is_heirs {
                pool.deposit_all()?;
            }
            if is_first {
                pool.reset_orphans(&device);
            }
        }
        self.shared.tell(&FromProxy::Ready { version: VERSION });
        Ok(())
    }

    /// Goes on with the connections of an earlier proxy: those that make no sense any more end with their lifelines.
    fn adopt_kept(&mut self, device: &Device) {
        let (places, lost_ns) = (self.shared.places.len(), now_ns());
        let mut held = BTreeMap::<usize, Vec<HeldEnd>>::new();
        for (kept, lifeline) in self.kept.drain(..) {
            let Some(pool) = self.shared.span_pool(kept.peer).filter(|_| kept.peer != self.shared.setup.own_slot)
            else {
                continue;
            };
            let (number, peer) = (ConnectionNumber(kept.number), kept.peer);
            // As the engines give out numbers.
            let place = number.count() as usize % places;
            if let Some(end) = pool.adopt(device, kept, lifeline) {
                let held_end = SuspendedConnection { number, local: ProgramEnd::Direct(end), lost_ns };
                held.entry(place).or_default().push(HeldEnd { peer, place, held: held_end });
            }
        }
        for (thread, (_, places)) in self.threads.iter().zip(threads_of(&self.shared.places)) {
            places.iter().filter_map(|place| held.remove(place)).for_each(|ends| thread.order(Command::Hold(ends)));
        }
    }

    fn obey(&mut self, message: ToProxy) {
        match message {
            ToProxy::LinkUp { peer, epoch } => self.order(|| Command::LinkUp { peer, epoch }),
            ToProxy::LinkDown { peer, epoch, policy } => {
                self.wait_for_all(|done| Command::LinkDown { peer, policy, done });
                self.shared.tell(&FromProxy::Stopped { peer, epoch });
            }
            ToProxy::Gone { peer } => self.order(|| Command::Gone { peer }),
            ToProxy::Change { nodes, access } => self.shared.change(&nodes, access),
            ToProxy::Listen { peer, address } => self.mirror(peer, address),
            ToProxy::StopListening { address } => self.unmirror(address),
            ToProxy::Report => self.shared.tell(&FromProxy::Report(self.report())),
            // Taken before.
            ToProxy::Configure(_)
            | ToProxy::Retained(_)
            | ToProxy::Descriptors
            | ToProxy::Device { .. }
            | ToProxy::Adopt
            | ToProxy::Release
            | ToProxy::Stop => {}
        }
    }

    fn mirror(&mut self, peer: u8, address: SocketAddr) {
        if self.listeners.contains_key(&address) {
            return self.shared.tell(&FromProxy::Listening { address });
        }
        match listen_for_remote(&self.shared.rack, address, BACKLOG) {
            Ok(listener) => {
                let listener = Arc::new(listener);
                self.order(|| Command::Mirror { peer, address, listener: Arc::clone(&listener) });
                self.listeners.insert(address, listener);
                self.shared.tell(&FromProxy::Listening { address });
            }
            Err(errno) => self.shared.tell(&FromProxy::ListenFailed { address, reason: errno.to_string() }),
        }
    }

    /// Threads forget the listener before it is closed.
    fn unmirror(&mut self, address: SocketAddr) {
        if let Some(listener) = self.listeners.remove(&address) {
            self.wait_for_all(|done| Command::Unmirror { address, done });
            drop(listener);
        }
    }

    /// Waits for the monitor; meanwhile, stops standing in for listeners that the other node does not have.
    fn wait_for_threads(&mut self, channel: &Channel) {
        let shared = Arc::clone(&self.shared);
        let _ =
            poll(&mut [PollFd::new(channel, PollFlags::IN), PollFd::new(&shared.refused_bell, PollFlags::IN)], None);
        for address in shared.take_refused() {
            if self.listeners.contains_key(&address) {
                self.unmirror(address);
                shared.tell(&FromProxy::Refused { address });
            }
        }
    }

    fn report(&self) -> Report {
        let mut peers = vec![PeerReport::default(); self.shared.addresses.len()];
        for (peer, more) in self.wait_for_all(|done| Command::Report { done }).into_iter().flatten() {
            if let Some(sum) = peers.get_mut(usize::from(peer)) {
                *sum += more;
            }
        }
        for (peer, pool) in self.shared.span_pools_of_peers() {
            (peers[peer].direct_open, peers[peer].direct_total, peers[peer].direct_missed) = pool.counts();
        }
        Report { peers }
    }

    fn order(&self, command: impl Fn() -> Command) {
        self.threads.iter().for_each(|thread| thread.order(command()));
    }

    /// Orders all threads, and waits until each has done it.
    fn wait_for_all<T>(&self, command: impl Fn(mpsc::Sender<T>) -> Command) -> Vec<T> {
        let (done, answers) = mpsc::channel();
        self.threads.iter().for_each(|thread| thread.order(command(done.clone())));
        drop(done);
        answers.iter().collect()
    }

    fn stop(self) {
        self.order(|| Command::Stop);
        self.threads.into_iter().for_each(|thread| drop(thread.handle.join()));
    }

    /// The monitor has died. What goes on without it does so until another monitor comes. `None`: this proxy ends.
    fn outlive_monitor(mut self) -> Option<Self> {
        let Some(heirs) = self.heirs.take() else { return self.leave(None) };
        let until_ns = now_ns().saturating_add(self.shared.setup.return_ns);
        let mut is_in_windows = self.shared.setup.keeps_partitions;
        if !is_in_windows {
            self.part();
        }
        // In failover, what has lost its windows needs no monitor.
        while self.has_connections() && (now_ns() < until_ns || self.shared.setup.is_failover) {
            if now_ns() >= until_ns && std::mem::take(&mut is_in_windows) {
                self.part();
            }
            if let Some(device) = self.device.as_ref().filter(|_| is_in_windows) {
                device.heartbeat_without_monitor();
            }
            match heirs.next(HEIR_PAUSE, &self.shared.setup) {
                None => {}
                Some((heir, Wish::Part)) => return self.leave(Some(&heir)),
                Some((heir, Wish::Adopt)) => {
                    self.heirs = Some(heirs);
                    self.adopt(heir);
                    return Some(self);
                }
            }
        }
        self.leave(None)
    }

    /// Whether there is anything that another monitor could want to go on.
    fn has_connections(&self) -> bool {
        let report = self.report();
        !self.kept.is_empty() || report.peers.iter().any(|peer| peer.connections_open + peer.failover_open > 0)
    }

    /// Goes on for another monitor, which knows of no listener of this proxy.
    fn adopt(&mut self, heir: Channel) {
        self.shared.monitor.replace(heir);
        self.is_adopted = true;
        let addresses: Vec<SocketAddr> = self.listeners.keys().copied().collect();
        addresses.into_iter().for_each(|address| self.unmirror(address));
        self.shared.take_refused();
    }

    /// No window is touched any more.
    fn part(&self) {
        self.wait_for_all(|done| Command::Part { done });
    }

    /// Ends, and gives to an heir what programs have in windows themselves.
    fn leave(mut self, heir: Option<&Channel>) -> Option<Self> {
        let mut kept: Vec<_> = self.wait_for_all(|done| Command::Leave { done }).into_iter().flatten().collect();
        // Of an earlier proxy, where this one never had the device.
        kept.append(&mut self.kept);
        self.threads.into_iter().for_each(|thread| drop(thread.handle.join()));
        self.listeners.clear();
        heir.map(|heir| held::hand_over(heir, &kept)).unwrap_or_default();
        None
    }
}

/// How long to wait for another monitor between two beats.
const HEIR_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

fn new_bell() -> Result<OwnedFd, Errno> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// The model of a link by its name in the rack file.
fn timing_of(timing: &control::proxy::Timing) -> Result<LinkTiming, DriverError> {
    let path = Path::named(&timing.name).map_err(|_| DriverError::Order("the name of no link"))?;
    let payload_bytes_max = u64::from(path.link().mps_bytes.bytes());
    Ok(LinkTiming {
        one_way_ns: timing.one_way_ns.unwrap_or_else(|| path.write(0).ns()).round() as u64,
        bytes_per_us: (path.packet_gbps() * 125.0).round() as u64,
        header_bytes: PACKET_HEADER_BYTES,
        payload_bytes_max,
    })
}

/// Bytes of a packet besides its payload, with a header of 64-bit addresses.
const PACKET_HEADER_BYTES: u64 = 24;

/// Pins the calling thread to a core that the rack file names. Where that fails, as for a core that does not exist, the
/// scheduler chooses, which costs speed only.
fn pin_to(core: u16) {
    let mut only = CpuSet::new();
    only.set(usize::from(core));
    let _ = sched_setaffinity(None, &only);
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::proxy::Partition;

    fn setup(partitions: &[(control::proxy::Class, Option<u16>)]) -> Configuration {
        Configuration {
            version: VERSION,
            own_slot: 0,
            slots: 0,
            nodes: Vec::new(),
            rack_directory: "/nowhere".into(),
            control_partition_bytes: 65_536,
            partitions: partitions.iter().map(|&(class, core)| Partition { class, core }).collect(),
            slice_bytes: None,
            data_bytes: u64::MAX,
            spans: None,
            return_ns: 0,
            successor_socket: None,
            keeps_partitions: true,
            is_failover: false,
            failover_port: None,
            timing: None,
            access: control::proxy::Access { rules: Vec::new(), allows_others: true },
        }
    }

    #[test]
    fn partitions_are_paired_by_rank_and_threads_own_those_of_their_core() {
        use control::proxy::Class::{Bulk, Latency};
        let setup = setup(&[(Latency, Some(1)), (Bulk, None), (Latency, Some(0)), (Latency, Some(1)), (Bulk, None)]);
        let places = places_of(&setup);
        let place = |latency, bulk, core| Place { latency, bulk, core: Some(core) };
        assert_eq!(places, [place(0, Some(1), 1), place(2, Some(4), 0), place(3, None, 1)]);
        assert_eq!(threads_of(&places), [(Some(0), vec![1]), (Some(1), vec![0, 2])]);
    }
}
