//! The proxy as a process: its main thread serves the monitor and commands the threads that own engines.

use super::awaiting_link::AwaitingLink;
use super::command::{self, Command, CommandSender};
use super::engine_plan::threads_of;
use super::error::DriverError;
use super::event_loop::EventLoop;
use super::monitor_channel::MonitorChannel;
use super::shared::Shared;
use super::successor::{self, SuccessorListener, SuccessorRequest};
use super::tcp_endpoint::TcpEndpoint;
use super::tcp_listener::TcpListener;
use super::tcp_server::is_own;
use crate::engine::SuspendedConnection;
use crate::frame::ConnectionNumber;
use control::proxy::{
    Configuration, DeviceParts, FromProxy, PeerReport, Report, RetainedConnection, RetainedDescriptors, ToProxy,
    VERSION,
};
use control::{Channel, Received};
use fabric::device::Device;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CpuSet, sched_setaffinity};
use socket::process::clock::now_ns;
use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// Backlog of a remote listener.
const BACKLOG: i32 = 4096;
/// Interval of heartbeats while the proxy waits for another monitor.
const HEARTBEAT_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Runs a proxy until its monitor stops it, or until its monitor has died and no other one adopts it.
///
/// # Errors
/// The reason why it cannot run.
pub fn run(channel: Channel) -> Result<(), DriverError> {
    raise_descriptor_limit();
    let monitor = Arc::new(MonitorChannel::new(channel));
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

/// Serves a monitor. Returns whether it has died, as opposed to having stopped the proxy.
fn serve(monitor: &Arc<MonitorChannel>, proxy: &mut Option<Proxy>) -> Result<bool, DriverError> {
    let channel = monitor.channel();
    let mut parts = DeviceParts::default();
    while let Some((message, descriptors)) = wait(&channel, proxy)? {
        match (message, &mut *proxy) {
            (ToProxy::Configure(setup), None) => *proxy = Some(Proxy::start(*setup, Arc::clone(monitor))?),
            (ToProxy::Configure(_), Some(_)) => return Err(DriverError::Order("a second configuration")),
            (ToProxy::Stop, _) => return Ok(false),
            (ToProxy::Descriptors, _) => parts.add(descriptors),
            (_, None) => return Err(DriverError::Order("an order before the configuration")),
            (ToProxy::Retained(retained), Some(proxy)) => {
                proxy.retained.extend(retained.into_iter().zip(RetainedDescriptors::of_message(descriptors)));
            }
            (ToProxy::Device { bytes }, Some(proxy)) => proxy.use_device(&bytes, parts.take())?,
            (message, Some(proxy)) => proxy.handle(message),
        }
    }
    Ok(true)
}

/// Returns the next message of the monitor; `None` once it is gone. Meanwhile, serves the threads.
fn wait(channel: &Channel, proxy: &mut Option<Proxy>) -> Result<Option<(ToProxy, Vec<OwnedFd>)>, DriverError> {
    loop {
        match channel.receive()? {
            Received::Message(message, descriptors) => return Ok(Some((message, descriptors))),
            Received::Ended => return Ok(None),
            Received::Nothing => {}
        }
        match proxy {
            Some(proxy) => proxy.wait_and_serve_threads(channel),
            None => _ = poll(&mut [PollFd::new(channel, PollFlags::IN)], None),
        }
    }
}

/// Raises the soft limit of descriptors, since each connection has one.
fn raise_descriptor_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// A thread that owns engines.
struct OwnerThread {
    commands: CommandSender,
    handle: JoinHandle<()>,
}

/// The state of the main thread.
struct Proxy {
    shared: Arc<Shared>,
    threads: Vec<OwnerThread>,
    device: Option<Device>,
    /// The addresses of listeners of other nodes that this proxy stands in for.
    listeners: HashSet<SocketAddr>,
    /// Connections of an earlier proxy, until the device has arrived.
    retained: Vec<(RetainedConnection, RetainedDescriptors)>,
    successors: Option<SuccessorListener>,
    /// Another monitor has adopted this proxy, and will send its own device.
    is_adopted: bool,
}

impl Proxy {
    fn start(setup: Configuration, monitor: Arc<MonitorChannel>) -> Result<Self, DriverError> {
        if setup.version != VERSION {
            return Err(DriverError::Order("a configuration of another version"));
        }
        let shared = Arc::new(Shared::new(setup, monitor)?);
        let successors = shared.setup.successor_socket.as_deref().map(SuccessorListener::listen).transpose()?;
        let threads = threads_of(&shared.plans)
            .into_iter()
            .enumerate()
            .map(|(index, (cpu, plans))| Self::start_thread(&shared, index, cpu, plans))
            .collect::<Result<_, _>>()
            .map_err(DriverError::Thread)?;
        let listeners = HashSet::new();
        Ok(Self { shared, threads, device: None, listeners, retained: Vec::new(), successors, is_adopted: false })
    }

    fn start_thread(
        shared: &Arc<Shared>,
        index: usize,
        cpu: Option<u16>,
        plans: Vec<usize>,
    ) -> Result<OwnerThread, Errno> {
        let (commands, receiver) = command::channel()?;
        let mut event_loop = EventLoop::new(Arc::clone(shared), index, plans, receiver)?;
        let run = move || {
            if let Some(cpu) = cpu {
                pin_to(cpu);
            }
            event_loop.run();
        };
        let handle = std::thread::Builder::new().name(format!("owner {index}")).spawn(run).map_err(|_| Errno::AGAIN)?;
        Ok(OwnerThread { commands, handle })
    }

    /// Uses the device that the monitor has sent, or the peers that it has added to the device.
    fn use_device(&mut self, text: &[u8], descriptors: Vec<OwnedFd>) -> Result<(), DriverError> {
        if let Some(device) = self.device.as_ref().filter(|_| !self.is_adopted) {
            return Ok(device.update_peers(text, descriptors)?);
        }
        let device = Device::take_over(text, descriptors)?;
        self.shared.check_room(&device)?;
        self.command(|| Command::Device(device.clone()));
        self.adopt_retained();
        self.device = Some(device);
        if std::mem::take(&mut self.is_adopted) {
            for (_, pool) in self.shared.span_pools_of_peers() {
                pool.deposit_all()?;
            }
        }
        self.shared.notify_monitor(&FromProxy::Ready { version: VERSION });
        Ok(())
    }

    /// Distributes the connections of an earlier proxy to the threads. Those that cannot be resumed are reset.
    fn adopt_retained(&mut self) {
        let (plans, lost_ns) = (self.shared.plans.len(), now_ns());
        let mut awaiting = BTreeMap::<usize, Vec<AwaitingLink>>::new();
        for (retained, descriptors) in self.retained.drain(..) {
            let peer = retained.peer;
            let number = ConnectionNumber(retained.number);
            // Engines assign numbers in steps of the number of engines.
            let plan = number.count() as usize % plans;
            if let Some(local) = TcpEndpoint::readopt(&self.shared, retained, descriptors) {
                let suspended = SuspendedConnection { number, local, lost_ns };
                awaiting.entry(plan).or_default().push(AwaitingLink { peer, plan, suspended });
            } else {
                // Closing the monitor's duplicates resets it.
                self.shared.notify_monitor(&FromProxy::Withdraw { peer, span: retained.span });
            }
        }
        for (thread, (_, plans)) in self.threads.iter().zip(threads_of(&self.shared.plans)) {
            let connections = plans.iter().filter_map(|plan| awaiting.remove(plan));
            connections.for_each(|connections| thread.commands.send(Command::AwaitLink(connections)));
        }
    }

    fn handle(&mut self, message: ToProxy) {
        match message {
            ToProxy::LinkUp { peer, epoch } => self.command(|| Command::LinkUp { peer, epoch }),
            ToProxy::LinkDown { peer, epoch, policy } => {
                self.command_and_wait(|done| Command::LinkDown { peer, policy, done });
                self.shared.notify_monitor(&FromProxy::Stopped { peer, epoch });
            }
            ToProxy::Gone { peer } => self.command(|| Command::PeerGone { peer }),
            ToProxy::Change { nodes, access } => self.shared.change(&nodes, access),
            ToProxy::Listen { peer, address } => self.add_remote_listener(peer, address),
            ToProxy::StopListening { address } => self.remove_remote_listener(address),
            ToProxy::Report => self.shared.notify_monitor(&FromProxy::Report(self.report())),
            // Handled by `serve`, or sent only to the successor socket.
            ToProxy::Configure(_)
            | ToProxy::Retained(_)
            | ToProxy::Descriptors
            | ToProxy::Device { .. }
            | ToProxy::Adopt
            | ToProxy::Release
            | ToProxy::Stop => {}
        }
    }

    fn add_remote_listener(&mut self, peer: u8, address: SocketAddr) {
        if self.listeners.contains(&address) {
            return self.shared.notify_monitor(&FromProxy::Listening { address });
        }
        let at = SocketAddr::from((self.shared.proxy_address, 0));
        let listener = TcpListener::listen(at, BACKLOG, false);
        match listener.and_then(|listener| Ok((listener.port()?, Arc::new(listener)))) {
            Ok((port, listener)) => {
                self.command(|| Command::AddListener { peer, address, listener: Arc::clone(&listener) });
                self.shared.table.set_listener(port, peer, address.port());
                self.listeners.insert(address);
                if self.shared.publishes(address.port()) {
                    self.publish(peer, address);
                }
                self.shared.notify_monitor(&FromProxy::Listening { address });
            }
            Err(errno) => {
                let reason = format!("at {at}: {errno}");
                self.shared.notify_monitor(&FromProxy::ListenFailed { address, reason });
            }
        }
    }

    /// Listens at the other node's own address, for programs that do not load the library. They reach it as soon as
    /// the address is one of this machine.
    fn publish(&self, peer: u8, address: SocketAddr) {
        match TcpListener::listen(address, BACKLOG, true) {
            Ok(listener) => {
                let listener = Arc::new(listener);
                self.command(|| Command::AddListener { peer, address, listener: Arc::clone(&listener) });
                let ip = address.ip();
                if !is_own(ip) {
                    eprintln!("crosslane proxy: to publish {address}, run 'ip route add local {ip} dev lo' as root");
                }
            }
            Err(errno) => eprintln!("crosslane proxy: cannot publish {address}: {errno}"),
        }
    }

    /// Closes a remote listener, after all threads have stopped to accept from it.
    fn remove_remote_listener(&mut self, address: SocketAddr) {
        if let Some(peer) = self.shared.slot_of(address.ip()) {
            self.shared.table.clear_listener(peer, address.port());
        }
        if self.listeners.remove(&address) {
            self.command_and_wait(|done| Command::RemoveListeners { address, done });
        }
    }

    /// Waits for the monitor or the threads, and closes the listeners that the other node does not have any more.
    fn wait_and_serve_threads(&mut self, channel: &Channel) {
        let shared = Arc::clone(&self.shared);
        let _ =
            poll(&mut [PollFd::new(channel, PollFlags::IN), PollFd::new(&shared.refused_wakeup, PollFlags::IN)], None);
        for address in shared.take_refused() {
            if self.listeners.contains(&address) {
                self.remove_remote_listener(address);
                shared.notify_monitor(&FromProxy::Refused { address });
            }
        }
    }

    fn report(&self) -> Report {
        let mut peers = vec![PeerReport::default(); self.shared.slots()];
        for (peer, more) in self.command_and_wait(|done| Command::Report { done }).into_iter().flatten() {
            if let Some(sum) = peers.get_mut(usize::from(peer)) {
                *sum += more;
            }
        }
        for (peer, pool) in self.shared.span_pools_of_peers() {
            (peers[peer].direct_open, peers[peer].direct_total, peers[peer].direct_missed) = pool.counts();
        }
        Report { peers }
    }

    /// Sends a command to all threads.
    fn command(&self, command: impl Fn() -> Command) {
        self.threads.iter().for_each(|thread| thread.commands.send(command()));
    }

    /// Sends a command to all threads, waits until each has executed it, and returns their answers.
    fn command_and_wait<T>(&self, command: impl Fn(mpsc::Sender<T>) -> Command) -> Vec<T> {
        let (done, answers) = mpsc::channel();
        self.threads.iter().for_each(|thread| thread.commands.send(command(done.clone())));
        drop(done);
        answers.iter().collect()
    }

    fn stop(self) {
        self.command(|| Command::Stop);
        self.threads.into_iter().for_each(|thread| drop(thread.handle.join()));
    }

    /// Continues after the monitor has died, as long as there are connections to keep, until another monitor connects.
    /// Returns `None` if this proxy ends.
    fn outlive_monitor(mut self) -> Option<Self> {
        let Some(successors) = self.successors.take() else { return self.end(None) };
        let until_ns = now_ns().saturating_add(self.shared.setup.return_ns);
        let mut uses_windows = self.shared.setup.keeps_partitions;
        if !uses_windows {
            self.release_windows();
        }
        // With failover, connections that have left the windows need no monitor.
        while self.has_connections() && (now_ns() < until_ns || self.shared.setup.is_failover) {
            if now_ns() >= until_ns && std::mem::take(&mut uses_windows) {
                self.release_windows();
            }
            if let Some(device) = self.device.as_ref().filter(|_| uses_windows) {
                device.heartbeat_without_monitor();
            }
            match successors.next(HEARTBEAT_INTERVAL, &self.shared.setup) {
                None => {}
                Some((successor, SuccessorRequest::Release)) => return self.end(Some(&successor)),
                Some((successor, SuccessorRequest::Adopt)) => {
                    self.successors = Some(successors);
                    self.continue_under(successor);
                    return Some(self);
                }
            }
        }
        self.end(None)
    }

    /// Returns whether there are connections that another monitor could continue.
    fn has_connections(&self) -> bool {
        let report = self.report();
        !self.retained.is_empty() || report.peers.iter().any(|peer| peer.connections_open + peer.failover_open > 0)
    }

    /// Continues under another monitor, which does not know this proxy's listeners.
    fn continue_under(&mut self, successor: Channel) {
        self.shared.monitor.replace(successor);
        self.is_adopted = true;
        let addresses: Vec<SocketAddr> = self.listeners.iter().copied().collect();
        addresses.into_iter().for_each(|address| self.remove_remote_listener(address));
        self.shared.take_refused();
    }

    /// Stops all accesses to windows.
    fn release_windows(&self) {
        self.command_and_wait(|done| Command::ReleaseWindows { done });
    }

    /// Ends the proxy, and hands the connections that can be continued over to another monitor, if there is one.
    fn end(mut self, successor: Option<&Channel>) -> Option<Self> {
        let mut retained: Vec<_> =
            self.command_and_wait(|done| Command::ReleaseAndStop { done }).into_iter().flatten().collect();
        // Connections of an earlier proxy, if the device never arrived.
        retained.append(&mut self.retained);
        self.threads.into_iter().for_each(|thread| drop(thread.handle.join()));
        successor.map(|successor| successor::hand_over(successor, &retained)).unwrap_or_default();
        None
    }
}

/// Pins the calling thread to a CPU that the rack file names. If that fails, as for a CPU that does not exist, the
/// scheduler chooses, which costs only speed.
fn pin_to(cpu: u16) {
    let mut only = CpuSet::new();
    only.set(usize::from(cpu));
    let _ = sched_setaffinity(None, &only);
}
