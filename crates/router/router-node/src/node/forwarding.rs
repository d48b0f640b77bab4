//! The thread that forwards: it alone has the forwarder, the buffers, the ports and the interconnect. Packets run to
//! their end in it, a vector at a time, and it sleeps when there is nothing to do. It never waits for the other thread.

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError};
use std::time::Instant;

use packet::ethernet::MacAddress;
use router::batch::{self, Policy};
use router::{
    AdjacencyId, ClaimState, Counters, Event, Filter, Forwarder, Neighbour, NodeId, Output, PORTS_MAX, Packet, Pool,
    Port, PortConfig, PortId, PortLosses, RoutedPacket, Time, TracedStep, VECTOR_PACKETS_MAX,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::liveness::Heartbeat;
use crate::interconnect::{self, ConnectionParams, Interconnect, InterconnectError, Offer, PeerState};

/// Turns without anything to do after which the thread sleeps: about as long as going to sleep and being woken takes.
const IDLE_POLLS_MAX: u32 = 64;
/// How long packets wait that a port had no room for, when nothing else happens.
const RETRY_NS: u64 = 100_000;
/// How long the thread sleeps at most, so that it knows when it was away for longer.
const SLEEP_NS_MAX: u64 = 250_000_000;
/// Packets that waited here for so long, because the process was stopped, are nobody's any more: senders have given
/// them up, and a packet's time to live is in seconds (RFC 791).
const SUSPENDED_NS_MIN: u64 = 1_000_000_000;
/// Looks for packets to be dropped after that, for each place where some may wait.
const DRAIN_POLLS_MAX: usize = 4096;
/// Commands taken in one turn: packets do not wait for more.
const COMMANDS_PER_POLL: usize = 32;
/// Reports that wait for the control thread at most; news of neighbours that do not opened_interface are asked for later.
pub const REPORTS_MAX: usize = 4096;
/// Commands that wait at most: the control thread waits for room, as this one never waits for it.
pub const COMMANDS_MAX: usize = 4096;

/// What the control thread wants.
pub enum Command {
    /// A port is attached in, in the place of what was there.
    AttachPort(PortId, Box<dyn Port + Send>),
    /// A port is to be closed, and another one attached in soon: [`Report::PortDetached`].
    DetachPort(PortId),
    /// A port has become this.
    ConfigurePort(PortId, PortConfig),
    /// These ports are there no longer. What stays attached in gets these numbers: by number, which it had before.
    RenumberPorts(Vec<PortId>, Vec<Option<PortId>>),
    /// Packets go together so from now on.
    SetBatching(Policy),
    /// Whether hosts are told of a nearer way.
    SetRedirects(bool),
    /// The longest packets of another node's ports.
    SetRemoteMtus(NodeId, Vec<u16>),
    /// Whether another node can be reached.
    SetNodeUp(NodeId, bool),
    /// The number of a neighbour is wanted: [`Report::AdjacencyPinned`].
    PinAdjacency(PortId, IpAddr),
    /// No route names a neighbour any more.
    UnpinAdjacency(AdjacencyId),
    /// Where a neighbour is.
    LearnNeighbour(PortId, IpAddr, MacAddress),
    /// Packets are to be followed, or no more.
    Trace(Option<Filter>),
    /// How everything is: [`Report::Snapshot`].
    Snapshot,
    /// To join a node: [`Report::Offered`].
    OfferInterconnect(NodeId),
    /// To join a node that has made an offer: [`Report::Accepted`].
    AcceptOffer(NodeId, Offer),
    /// To join a node that has accepted an offer.
    FinishOffer(NodeId, ConnectionParams),
    /// A node is gone: [`Report::PeerRemoved`].
    RemovePeer(NodeId),
    /// The interconnect begins anew: [`Report::InterconnectRestarted`].
    RestartInterconnect,
    /// To end.
    Stop,
}

/// What the control thread is told.
pub enum Report {
    /// A neighbour's number; `None` when there is no room for it.
    AdjacencyPinned(PortId, IpAddr, Option<AdjacencyId>),
    /// PeerUpdate of neighbours.
    NeighbourEvents(Vec<Event>),
    /// All neighbours that are known, after news of them were lost.
    AllNeighbours(Vec<Neighbour>),
    /// Steps of packets that are followed.
    Traced(Vec<TracedStep>),
    /// How everything is.
    Snapshot(Box<Snapshot>),
    /// What is to be told to another node.
    Offered(NodeId, Result<Offer, InterconnectError>),
    /// What is to be told to another node.
    Accepted(NodeId, Result<ConnectionParams, InterconnectError>),
    /// Whether another node is joined.
    Finished(NodeId, Result<(), InterconnectError>),
    /// Another node breaks the interconnect's protocol.
    PeerFailed(NodeId),
    /// No packet goes to that node any more.
    PeerRemoved(NodeId),
    /// A port's device is gone. To close what is left of it may take the kernel long.
    PortFailed(PortId, io::Error, Box<dyn Port + Send>),
    /// A port was taken out as it was told.
    PortDetached(PortId, Box<dyn Port + Send>),
    /// Ports are rearranged, and these are none any more: to close them may take the kernel long, too.
    PortsRenumbered(Vec<Box<dyn Port + Send>>),
    /// Whether the interconnect has begun anew.
    InterconnectRestarted(Result<(), InterconnectError>),
    /// The thread was away for so many nanoseconds, and has dropped so many packets that received_parcels meanwhile.
    Suspended(u64, usize),
}

/// How everything is.
pub struct Snapshot {
    /// The forwarder's counters.
    pub counters: Counters,
    /// The interconnect's, by node.
    pub peers: Vec<interconnect::PeerCounters>,
    /// Losses of each port.
    pub losses: Vec<PortLosses>,
    /// Neighbours, at most so many as were asked for.
    pub neighbours: Vec<Neighbour>,
    /// Own addresses that are not used, by port.
    pub unused: Vec<(PortId, IpAddr, ClaimState)>,
    /// Buffers that are free.
    pub buffers_free: usize,
}

/// Wakes a thread that sleeps on it, or is about to.
#[derive(Debug)]
pub struct Notifier(OwnedFd);

impl Notifier {
    /// A new one.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Rings.
    pub fn notify(&self) {
        // Full after 2^64 rings that nobody heard: it is ringing then.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Forgets rings that were heard.
    pub fn drain(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What the thread starts with.
pub struct ForwardingParts {
    /// The forwarder.
    pub forwarder: Forwarder,
    /// Buffers for all packets.
    pub pool: Pool,
    /// Queues.
    pub output: Output,
    /// The slow path to the node's kernel: IP packets.
    pub kernel: Box<dyn Port + Send>,
    /// To other nodes.
    pub interconnect: Box<dyn Interconnect>,
    /// Nodes of the cluster.
    pub nodes: usize,
    /// From the control thread.
    pub commands: Receiver<Command>,
    /// Rung for commands.
    pub commands_notifier: Arc<Notifier>,
    /// To the control thread.
    pub reports: SyncSender<Report>,
    /// Rung for reports.
    pub reports_notifier: Arc<Notifier>,
    /// How far the thread has come.
    pub heartbeat: Arc<Heartbeat>,
    /// The moment from which time counts.
    pub begun: Instant,
}

/// The thread's state.
pub struct ForwardingThread {
    parts: ForwardingParts,
    ports: Vec<Option<Box<dyn Port + Send>>>,
    frames: Vec<Packet>,
    parcels: Vec<batch::Parcel>,
    received_parcels: Vec<batch::Parcel>,
    arrived: Vec<RoutedPacket>,
    /// Reports that the control thread had no room for.
    report_backlog: VecDeque<Report>,
    broken: Vec<bool>,
    interconnect_clock: InterconnectClock,
    /// When the last turn began.
    polled_at: Time,
    is_stopping: bool,
}

impl ForwardingThread {
    /// With no port attached in yet.
    pub fn new(parts: ForwardingParts) -> Self {
        let broken = vec![false; parts.nodes];
        Self {
            parts,
            ports: Vec::new(),
            frames: Vec::with_capacity(VECTOR_PACKETS_MAX),
            parcels: Vec::with_capacity(VECTOR_PACKETS_MAX),
            received_parcels: Vec::with_capacity(VECTOR_PACKETS_MAX),
            arrived: Vec::with_capacity(VECTOR_PACKETS_MAX),
            report_backlog: VecDeque::new(),
            broken,
            interconnect_clock: InterconnectClock::default(),
            polled_at: Time::ZERO,
            is_stopping: false,
        }
    }

    /// Works until it is told to stop, or the control thread is gone.
    pub fn run(mut self) {
        let (mut idle_polls, mut was_busy) = (0, false);
        self.parts.heartbeat.begin();
        self.polled_at = self.now();
        while !self.is_stopping {
            self.parts.heartbeat.begin_iteration();
            self.detect_suspension();
            self.parts.interconnect.begin_round(self.interconnect_clock.time(self.polled_at), was_busy);
            was_busy = self.poll_once();
            idle_polls = if was_busy { 0 } else { idle_polls + 1 };
            if idle_polls > IDLE_POLLS_MAX {
                self.sleep();
                idle_polls = 0;
            }
        }
    }

    /// A process that was stopped goes on with what lay there when it was, as if nothing had been.
    fn detect_suspension(&mut self) {
        let now = self.now();
        let suspended_ns = now.ns().saturating_sub(std::mem::replace(&mut self.polled_at, now).ns());
        if suspended_ns >= SUSPENDED_NS_MIN + SLEEP_NS_MAX {
            let dropped = self.drop_stale();
            self.report(Report::Suspended(suspended_ns, dropped));
        }
    }

    /// Drops all packets that wait: in ports, in the kernel's interface, in the interconnect and in queues. Says how
    /// many.
    fn drop_stale(&mut self) -> usize {
        let now = self.interconnect_clock.time(self.now());
        let ForwardingParts { pool, output, kernel, interconnect, .. } = &mut self.parts;
        let mut dropped = 0;
        for port in self.ports.iter_mut().flatten().chain([&mut *kernel]) {
            for _ in 0..DRAIN_POLLS_MAX {
                // An error shows in the next turn too.
                let received = port.receive(pool, &mut self.frames, VECTOR_PACKETS_MAX).unwrap_or(0);
                self.frames.drain(..).for_each(|frame| pool.free(frame));
                dropped += received;
                if received == 0 {
                    break;
                }
            }
        }
        for _ in 0..DRAIN_POLLS_MAX {
            let is_busy = interconnect.poll(now, pool, &mut self.received_parcels, VECTOR_PACKETS_MAX);
            dropped += self.received_parcels.len();
            self.received_parcels.drain(..).for_each(|(_, packet)| pool.free(packet));
            if !is_busy {
                break;
            }
        }
        let parcels = output.to_nodes.iter_mut().flat_map(|queue| queue.drain(..)).map(|parcel| parcel.packet);
        let frames = output.to_ports.iter_mut().chain([&mut output.to_kernel]).flat_map(|queue| queue.drain(..));
        parcels.chain(frames).fold(dropped, |dropped, packet| {
            pool.free(packet);
            dropped + 1
        })
    }

    fn now(&self) -> Time {
        Time::from_ns(self.parts.begun.elapsed().as_nanos() as u64)
    }

    /// Whether anything happened.
    fn poll_once(&mut self) -> bool {
        let mut is_busy = self.process_commands();
        for index in 0..self.ports.len() {
            is_busy |= self.receive(index);
        }
        is_busy |= self.receive_from_kernel();
        is_busy |= self.receive_from_nodes();
        let now = self.now();
        if self.parts.forwarder.next_timer().is_some_and(|due| due <= now) {
            let ForwardingParts { forwarder, pool, output, .. } = &mut self.parts;
            forwarder.poll(now, pool, output);
            is_busy = true;
        }
        is_busy |= self.transmit();
        self.report_events();
        is_busy
    }

    fn receive(&mut self, index: usize) -> bool {
        let Some(port) = self.ports[index].as_mut() else { return false };
        let id = PortId(index as u8);
        match port.receive(&mut self.parts.pool, &mut self.frames, VECTOR_PACKETS_MAX) {
            Ok(0) => false,
            Ok(_) => {
                let now = self.now();
                let ForwardingParts { forwarder, pool, output, .. } = &mut self.parts;
                forwarder.ingress(now, id, &mut self.frames, pool, output);
                true
            }
            Err(error) => {
                self.unplug(id, error);
                true
            }
        }
    }

    /// A port whose device is gone: what waits for it goes nowhere.
    fn unplug(&mut self, port: PortId, error: io::Error) {
        if let Some(closed) = self.detach(port) {
            self.report(Report::PortFailed(port, error, closed));
        }
    }

    fn detach(&mut self, port: PortId) -> Option<Box<dyn Port + Send>> {
        let taken = self.ports.get_mut(usize::from(port.0))?.take();
        self.frames.drain(..).for_each(|frame| self.parts.pool.free(frame));
        let ForwardingParts { output, pool, .. } = &mut self.parts;
        output.to_port(port).drain(..).for_each(|frame| pool.free(frame));
        taken
    }

    fn receive_from_kernel(&mut self) -> bool {
        let kernel = &mut self.parts.kernel;
        // The interface of the slow path is this process' own: while the process lives, it is there.
        let received = kernel.receive(&mut self.parts.pool, &mut self.frames, VECTOR_PACKETS_MAX).unwrap_or(0);
        if received == 0 {
            return false;
        }
        let now = self.now();
        let ForwardingParts { forwarder, pool, output, .. } = &mut self.parts;
        forwarder.from_kernel(now, &mut self.frames, pool, output);
        true
    }

    fn receive_from_nodes(&mut self) -> bool {
        let now = self.now();
        let interconnect_now = self.interconnect_clock.time(now);
        let ForwardingParts { forwarder, pool, output, interconnect, .. } = &mut self.parts;
        let is_busy = interconnect.poll(interconnect_now, pool, &mut self.received_parcels, VECTOR_PACKETS_MAX);
        // The egress node does not tell flows apart.
        self.arrived.extend(self.received_parcels.drain(..).map(|(hop, packet)| RoutedPacket { hop, flow: 0, packet }));
        if !self.arrived.is_empty() {
            forwarder.egress(now, &mut self.arrived, pool, output);
        }
        is_busy
    }

    /// Whether anything left.
    fn transmit(&mut self) -> bool {
        let mut is_busy = false;
        let interconnect_now = self.interconnect_clock.time(self.now());
        let ForwardingParts { pool, output, kernel, interconnect, nodes, .. } = &mut self.parts;
        for node in (0..*nodes as u8).map(NodeId) {
            let queue = output.to_node(node);
            if !queue.is_empty() {
                self.parcels.extend(queue.drain(..).map(|parcel| (parcel.hop, parcel.packet)));
                interconnect.send(interconnect_now, pool, node, &mut self.parcels);
                is_busy = true;
            }
        }
        if !output.to_kernel.is_empty() {
            is_busy |= kernel.transmit(pool, &mut output.to_kernel).is_ok_and(|sent| sent > 0);
        }
        for index in 0..self.ports.len() {
            let (id, ForwardingParts { pool, output, .. }) = (PortId(index as u8), &mut self.parts);
            let queue = output.to_port(id);
            if queue.is_empty() {
                continue;
            }
            let sent = match self.ports[index].as_mut() {
                Some(port) => port.transmit(pool, queue),
                None => {
                    queue.drain(..).for_each(|frame| pool.free(frame));
                    continue;
                }
            };
            match sent {
                Ok(sent) => is_busy |= sent > 0,
                Err(error) => self.unplug(id, error),
            }
        }
        is_busy
    }

    /// Whether packets wait that a port had no room for.
    fn has_unsent(&mut self) -> bool {
        let output = &self.parts.output;
        !output.to_kernel.is_empty() || output.to_ports[..self.ports.len()].iter().any(|queue| !queue.is_empty())
    }

    fn process_commands(&mut self) -> bool {
        for taken in 0..COMMANDS_PER_POLL {
            match self.parts.commands.try_recv() {
                Ok(command) => self.process_command(command),
                Err(TryRecvError::Empty) => return taken > 0,
                Err(TryRecvError::Disconnected) => {
                    self.is_stopping = true;
                    return true;
                }
            }
        }
        true
    }

    fn process_command(&mut self, command: Command) {
        let now = self.now();
        let ForwardingParts { forwarder, pool, output, interconnect, .. } = &mut self.parts;
        match command {
            Command::AttachPort(port, attached) => {
                let index = usize::from(port.0);
                self.ports.resize_with(self.ports.len().max(index + 1), || None);
                self.ports[index] = Some(attached);
            }
            Command::DetachPort(port) => {
                if let Some(closed) = self.detach(port) {
                    self.report(Report::PortDetached(port, closed));
                }
            }
            Command::ConfigurePort(port, config) => {
                let set = forwarder.set_port(now, port, config, pool, output);
                // Whatever the kernel and the cluster file say was made into what a port can be.
                set.unwrap_or_else(|error| panic!("{error}"));
            }
            Command::RenumberPorts(gone, stays) => self.renumber_ports(&gone, &stays),
            Command::SetBatching(policy) => interconnect.set_policy(policy),
            Command::SetRedirects(are_sent) => forwarder.set_redirects(are_sent),
            Command::SetRemoteMtus(node, mtus_bytes) => {
                for port in 0..PORTS_MAX {
                    let mtu_bytes = mtus_bytes.get(usize::from(port)).copied().unwrap_or(0);
                    forwarder.set_remote_mtu(node, PortId(port), mtu_bytes);
                }
            }
            Command::SetNodeUp(node, is_up) => forwarder.set_node_up(node, is_up),
            Command::PinAdjacency(port, address) => {
                let pinned = forwarder.pin_adjacency(now, port, address, pool, output).ok();
                self.report(Report::AdjacencyPinned(port, address, pinned));
            }
            Command::UnpinAdjacency(adjacency) => forwarder.unpin_adjacency(now, adjacency, pool, output),
            Command::LearnNeighbour(port, address, mac) => {
                forwarder.learn_neighbour(now, port, address, mac, pool, output)
            }
            Command::Trace(filter) => forwarder.trace(filter),
            Command::Snapshot => self.snapshot(),
            Command::OfferInterconnect(node) => {
                let offered = interconnect.offer(node);
                self.report(Report::Offered(node, offered));
            }
            Command::AcceptOffer(node, offer) => {
                let accepted = interconnect.accept(node, offer);
                self.report(Report::Accepted(node, accepted));
            }
            Command::FinishOffer(node, params) => {
                let finished = interconnect.finish(node, &params);
                self.report(Report::Finished(node, finished));
            }
            Command::RemovePeer(node) => {
                forwarder.set_node_up(node, false);
                output.to_node(node).drain(..).for_each(|parcel| pool.free(parcel.packet));
                interconnect.remove_peer(pool, node);
                self.broken[usize::from(node.0)] = false;
                self.report(Report::PeerRemoved(node));
            }
            Command::RestartInterconnect => {
                let restarted = interconnect.restart(pool);
                self.interconnect_clock.restart(now);
                self.report(Report::InterconnectRestarted(restarted));
            }
            Command::Stop => self.is_stopping = true,
        }
    }

    fn renumber_ports(&mut self, gone: &[PortId], stays: &[Option<PortId>]) {
        let now = self.now();
        let ForwardingParts { forwarder, pool, output, .. } = &mut self.parts;
        for port in gone {
            forwarder.remove_port(now, *port, pool, output);
            output.to_port(*port).drain(..).for_each(|frame| pool.free(frame));
        }
        let mut former = std::mem::take(&mut self.ports);
        let mut taken = |from: &Option<PortId>| former.get_mut(usize::from(from.as_ref()?.0))?.take();
        self.ports = stays.iter().map(&mut taken).collect();
        self.report(Report::PortsRenumbered(former.into_iter().flatten().collect()));
    }

    fn snapshot(&mut self) {
        let ForwardingParts { forwarder, pool, interconnect, nodes, .. } = &self.parts;
        let losses = |port: &Option<Box<dyn Port + Send>>| port.as_ref().map(|port| port.losses()).unwrap_or_default();
        let snapshot = Snapshot {
            counters: forwarder.counters().clone(),
            peers: (0..*nodes as u8).map(|node| interconnect.counters(NodeId(node))).collect(),
            losses: self.ports.iter().map(losses).collect(),
            neighbours: forwarder.neighbours().take(crate::management::NEIGHBOURS_SHOWN_MAX).collect(),
            unused: forwarder.unassigned_addresses().collect(),
            buffers_free: pool.available(),
        };
        self.report(Report::Snapshot(Box::new(snapshot)));
    }

    /// Tells the control thread, or keeps for later what it has no room for.
    fn report(&mut self, report: Report) {
        if self.report_backlog.is_empty() {
            match self.parts.reports.try_send(report) {
                Ok(()) => self.parts.reports_notifier.notify(),
                Err(TrySendError::Full(report)) => self.report_backlog.push_back(report),
                Err(TrySendError::Disconnected(_)) => self.is_stopping = true,
            }
        } else {
            // Answers only: as many as commands, of which the control thread gives no more before it has looked.
            self.report_backlog.push_back(report);
        }
    }

    fn report_events(&mut self) {
        while let Some(report) = self.report_backlog.pop_front() {
            if let Err(TrySendError::Full(report)) = self.parts.reports.try_send(report) {
                self.report_backlog.push_front(report);
                return;
            }
            self.parts.reports_notifier.notify();
        }
        let output = &mut self.parts.output;
        if output.events_lost {
            output.events_lost = false;
            output.events.clear();
            let all = self.parts.forwarder.neighbours().collect();
            self.report(Report::AllNeighbours(all));
        } else if !output.events.is_empty() {
            let events = output.events.drain(..).collect();
            self.report(Report::NeighbourEvents(events));
        }
        if !self.parts.output.traced.is_empty() {
            let steps = self.parts.output.traced.drain(..).collect();
            self.report(Report::Traced(steps));
        }
        for node in 0..self.parts.nodes {
            let is_broken = self.parts.interconnect.state(NodeId(node as u8)) == PeerState::Broken;
            if is_broken && !self.broken[node] {
                self.report(Report::PeerFailed(NodeId(node as u8)));
            }
            self.broken[node] = is_broken;
        }
    }

    /// Until something can be done. Everybody who could wake is told first, and looked at once more after that.
    fn sleep(&mut self) {
        let may_sleep = self.prepare_wait();
        if may_sleep {
            let timeout = self.poll_timeout();
            let mut polled = vec![PollFd::new(&*self.parts.commands_notifier, PollFlags::IN)];
            let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
            polled.extend(self.parts.kernel.wakes().map(readable));
            polled.extend(self.ports.iter().flatten().filter_map(|port| port.wakes()).map(readable));
            polled.extend(self.parts.interconnect.wait_fds().into_iter().map(readable));
            self.parts.heartbeat.sleep();
            // Interrupted or late: the next turn looks at everything anyway.
            let _ = poll(&mut polled, Some(&timeout));
            if !polled[0].revents().is_empty() {
                drop(polled);
                self.parts.commands_notifier.drain();
            }
        }
        self.parts.interconnect.finish_wait();
    }

    fn prepare_wait(&mut self) -> bool {
        // Each has to be asked, for that arms its notifier.
        let mut may_sleep = self.parts.interconnect.prepare_wait();
        may_sleep &= self.parts.kernel.may_sleep();
        for port in self.ports.iter_mut().flatten() {
            may_sleep &= port.may_sleep();
        }
        may_sleep
    }

    /// How long to sleep at most.
    fn poll_timeout(&mut self) -> Timespec {
        let now_ns = self.now().ns();
        let retry_ns = self.has_unsent().then_some(now_ns + RETRY_NS);
        let dues = [
            self.parts.forwarder.next_timer().map(Time::ns),
            self.parts.interconnect.deadline().map(|due| self.interconnect_clock.ns(due)),
            retry_ns,
        ];
        let due_ns = dues.into_iter().flatten().min().unwrap_or(u64::MAX);
        let left_ns = due_ns.saturating_sub(now_ns).min(SLEEP_NS_MAX);
        Timespec { tv_sec: (left_ns / 1_000_000_000) as i64, tv_nsec: (left_ns % 1_000_000_000) as i64 }
    }
}

/// The same moments as interconnects count them: in picoseconds since they began, which last for 213 days.
#[derive(Clone, Copy, Debug, Default)]
pub struct InterconnectClock {
    began: Time,
}

impl InterconnectClock {
    /// How long, in nanoseconds, it may be used before an interconnect is to begin anew: half of what it can say.
    pub const NS_MAX: u64 = u64::MAX / 2000;

    fn restart(&mut self, now: Time) {
        self.began = now;
    }

    fn time(&self, now: Time) -> sim::Time {
        sim::Time::from_ps((now.ns() - self.began.ns()).saturating_mul(1000))
    }

    /// The first nanosecond that is not before that moment.
    fn ns(&self, time: sim::Time) -> u64 {
        self.began.ns().saturating_add(time.ps().div_ceil(1000))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_of_an_interconnect_goes_on_after_its_end() {
        const HOUR_NS: u64 = 3_600_000_000_000;
        let mut clock = InterconnectClock::default();
        let end = Time::from_ns(u64::MAX / 1000);
        let later = Time::from_ns(end.ns() + HOUR_NS);
        assert!(clock.time(end) < sim::Time::MAX && clock.time(later) == sim::Time::MAX, "it stands still");
        let renewed = Time::from_ns(InterconnectClock::NS_MAX);
        assert!(clock.time(renewed).ps() <= u64::MAX / 2, "long before its end it begins anew");
        clock.restart(renewed);
        assert_eq!(clock.time(renewed), sim::Time::ZERO);
        for now_ns in [renewed.ns(), renewed.ns() + 1, end.ns(), later.ns()] {
            let time = clock.time(Time::from_ns(now_ns));
            assert_eq!((time.ps(), clock.ns(time)), ((now_ns - renewed.ns()) * 1000, now_ns));
        }
        assert_eq!(clock.ns(sim::Time::from_ps(1001)), renewed.ns() + 2);
    }
}
