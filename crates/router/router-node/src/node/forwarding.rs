//! The forwarding thread. It alone owns the forwarder, the buffers, the ports and the interconnect, processes vectors
//! of packets to completion, and blocks when it is idle. It never waits for the control thread.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError};
use std::time::{Duration, Instant, SystemTime};

use router::batch;
use router::{
    Forwarder, NodeId, Output, PORTS_MAX, Packet, Pool, Port, PortId, RoutedPacket, Time, VECTOR_PACKETS_MAX,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::capture::{Capture, Direction};
use super::interconnect_clock::InterconnectClock;
use super::liveness::Heartbeat;
use super::messages::{Command, Notifier, Report, Snapshot};
use crate::interconnect::{Interconnect, PeerState};

/// Idle time before the thread blocks. On two cores, a thread that polls for longer keeps one from the hosts and from
/// other nodes: with 40 us, packets take twice as long or more (docs/results/router.md).
const IDLE_NS_MAX: u64 = 5_000;
/// Retry interval for packets that a port had no room for.
const RETRY_NS: u64 = 100_000;
/// Maximum time for which the thread blocks: a longer gap means that the process was suspended.
const SLEEP_NS_MAX: u64 = 250_000_000;
/// Packets that waited this long in a suspended process are dropped: their senders no longer expect them, as the time
/// to live is in seconds (RFC 791).
const SUSPENDED_NS_MIN: u64 = 1_000_000_000;
/// Maximum number of polls per source when packets are dropped after a suspension.
const DRAIN_POLLS_MAX: usize = 4096;
/// Maximum number of commands per iteration, which bounds the delay of packets.
const COMMANDS_PER_POLL: usize = 32;

/// Maximum number of captures.
const CAPTURES_MAX: usize = 8;

/// The parts that the thread is started with.
pub struct ForwardingParts {
    /// The forwarder.
    pub forwarder: Forwarder,
    /// Buffers of all packets.
    pub pool: Pool,
    /// Output queues.
    pub output: Output,
    /// The TUN interface to the node's kernel.
    pub kernel: Box<dyn Port + Send>,
    /// The interconnect to the other nodes.
    pub interconnect: Box<dyn Interconnect>,
    /// Number of nodes in the cluster.
    pub nodes: usize,
    /// Commands of the control thread.
    pub commands: Receiver<Command>,
    /// Signalled for commands.
    pub commands_notifier: Arc<Notifier>,
    /// Reports to the control thread.
    pub reports: SyncSender<Report>,
    /// Signalled for reports.
    pub reports_notifier: Arc<Notifier>,
    /// The progress of the thread.
    pub heartbeat: Arc<Heartbeat>,
    /// The origin of its clock.
    pub begun: Instant,
}

/// The state of the forwarding thread.
pub struct ForwardingThread {
    parts: ForwardingParts,
    ports: Vec<Option<Box<dyn Port + Send>>>,
    frames: Vec<Packet>,
    parcels: Vec<batch::Parcel>,
    received_parcels: Vec<batch::Parcel>,
    arrived: Vec<RoutedPacket>,
    captures: Vec<Capture>,
    /// Reports that the control thread had no room for.
    report_backlog: VecDeque<Report>,
    /// By node: its state when that was last reported, and whether it had answered.
    reported: Vec<(PeerState, bool)>,
    interconnect_clock: InterconnectClock,
    /// When the last iteration began.
    polled_at: Time,
    is_stopping: bool,
}

impl ForwardingThread {
    /// Returns the thread's state without ports.
    pub fn new(parts: ForwardingParts) -> Self {
        let reported = vec![(PeerState::Absent, false); parts.nodes];
        Self {
            parts,
            ports: Vec::new(),
            frames: Vec::with_capacity(VECTOR_PACKETS_MAX),
            parcels: Vec::with_capacity(VECTOR_PACKETS_MAX),
            received_parcels: Vec::with_capacity(VECTOR_PACKETS_MAX),
            arrived: Vec::with_capacity(VECTOR_PACKETS_MAX),
            captures: Vec::new(),
            report_backlog: VecDeque::new(),
            reported,
            interconnect_clock: InterconnectClock::default(),
            polled_at: Time::ZERO,
            is_stopping: false,
        }
    }

    /// Runs until a command stops the thread, or the control thread has ended.
    pub fn run(mut self) {
        let mut was_busy = false;
        self.parts.heartbeat.begin();
        self.polled_at = self.now();
        let mut busy_at = self.polled_at;
        while !self.is_stopping {
            self.parts.heartbeat.begin_iteration();
            self.detect_suspension();
            self.parts.interconnect.begin_iteration(self.interconnect_clock.time(self.polled_at), was_busy);
            was_busy = self.poll_once();
            if was_busy {
                busy_at = self.polled_at;
            } else if self.polled_at.ns() - busy_at.ns() > IDLE_NS_MAX {
                self.sleep();
                busy_at = self.now();
            }
        }
    }

    /// Detects that the process was suspended. Packets that waited meanwhile must not be forwarded.
    fn detect_suspension(&mut self) {
        let now = self.now();
        let suspended_ns = now.ns().saturating_sub(std::mem::replace(&mut self.polled_at, now).ns());
        if suspended_ns >= SUSPENDED_NS_MIN + SLEEP_NS_MAX {
            let dropped = self.drop_stale();
            self.report(Report::Suspended(suspended_ns, dropped));
        }
    }

    /// Drops all packets that wait in ports, the kernel's interface, the interconnect and queues. Returns their number.
    fn drop_stale(&mut self) -> usize {
        let now = self.interconnect_clock.time(self.now());
        let ForwardingParts { pool, output, kernel, interconnect, .. } = &mut self.parts;
        let mut dropped = 0;
        for port in self.ports.iter_mut().flatten().chain([&mut *kernel]) {
            for _ in 0..DRAIN_POLLS_MAX {
                // An error is reported in the next iteration.
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

    /// Runs one iteration. Returns whether there was any work.
    fn poll_once(&mut self) -> bool {
        let mut is_busy = self.process_commands();
        for index in 0..self.ports.len() {
            is_busy |= self.receive(index);
        }
        is_busy |= self.receive_from_kernel();
        // An idle iteration reads the clock once.
        let now = if is_busy { self.now() } else { self.polled_at };
        let has_received = self.receive_from_nodes(now);
        is_busy |= has_received;
        let now = if has_received { self.now() } else { now };
        if self.parts.forwarder.next_timer().is_some_and(|due| due <= now) {
            let ForwardingParts { forwarder, pool, output, .. } = &mut self.parts;
            forwarder.poll(now, pool, output);
            is_busy = true;
        }
        is_busy |= self.transmit();
        // A capture of which a write fails has lost its reader.
        self.captures.retain_mut(Capture::flush);
        self.report_events();
        is_busy
    }

    fn receive(&mut self, index: usize) -> bool {
        let Some(port) = self.ports[index].as_mut() else { return false };
        let id = PortId(index as u8);
        match port.receive(&mut self.parts.pool, &mut self.frames, VECTOR_PACKETS_MAX) {
            Ok(0) => false,
            Ok(_) => {
                self.capture_received(id);
                let now = self.now();
                let ForwardingParts { forwarder, pool, output, .. } = &mut self.parts;
                forwarder.ingress(now, id, &mut self.frames, pool, output);
                true
            }
            Err(error) => {
                self.fail_port(id, error);
                true
            }
        }
    }

    /// Removes a port whose device is gone, and drops its queue.
    fn fail_port(&mut self, port: PortId, error: io::Error) {
        if let Some(closed) = self.detach(port) {
            self.report(Report::PortFailed(port, error, closed));
        }
    }

    fn detach(&mut self, port: PortId) -> Option<Box<dyn Port + Send>> {
        let detached = self.ports.get_mut(usize::from(port.0))?.take();
        self.frames.drain(..).for_each(|frame| self.parts.pool.free(frame));
        let ForwardingParts { output, pool, .. } = &mut self.parts;
        output.to_port(port).drain(..).for_each(|frame| pool.free(frame));
        detached
    }

    fn receive_from_kernel(&mut self) -> bool {
        let kernel = &mut self.parts.kernel;
        // The TUN interface belongs to this process and exists as long as it.
        let received = kernel.receive(&mut self.parts.pool, &mut self.frames, VECTOR_PACKETS_MAX).unwrap_or(0);
        if received == 0 {
            return false;
        }
        let now = self.now();
        let ForwardingParts { forwarder, pool, output, .. } = &mut self.parts;
        forwarder.from_kernel(now, &mut self.frames, pool, output);
        true
    }

    fn receive_from_nodes(&mut self, now: Time) -> bool {
        let interconnect_now = self.interconnect_clock.time(now);
        let ForwardingParts { forwarder, pool, output, interconnect, .. } = &mut self.parts;
        let is_busy = interconnect.poll(interconnect_now, pool, &mut self.received_parcels, VECTOR_PACKETS_MAX);
        // The egress node does not need the flow hash.
        self.arrived.extend(self.received_parcels.drain(..).map(|(hop, packet)| RoutedPacket { hop, flow: 0, packet }));
        if !self.arrived.is_empty() {
            forwarder.egress(now, &mut self.arrived, pool, output);
        }
        is_busy
    }

    /// Sends what is queued. Returns whether anything was sent.
    fn transmit(&mut self) -> bool {
        let mut is_busy = false;
        let ForwardingParts { pool, output, kernel, interconnect, nodes, begun, .. } = &mut self.parts;
        for node in (0..*nodes as u8).map(NodeId) {
            let queue = output.to_node(node);
            if !queue.is_empty() {
                self.parcels.extend(queue.drain(..).map(|parcel| (parcel.hop, parcel.packet)));
                let now = Time::from_ns(begun.elapsed().as_nanos() as u64);
                interconnect.send(self.interconnect_clock.time(now), pool, node, &mut self.parcels);
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
                Some(port) if self.captures.is_empty() => port.transmit(pool, queue),
                Some(port) => captured(&mut self.captures, id, port.as_mut(), pool, queue),
                None => {
                    queue.drain(..).for_each(|frame| pool.free(frame));
                    continue;
                }
            };
            match sent {
                Ok(sent) => is_busy |= sent > 0,
                Err(error) => self.fail_port(id, error),
            }
        }
        is_busy
    }

    /// Returns whether packets wait that a port had no room for.
    fn has_unsent(&mut self) -> bool {
        let output = &self.parts.output;
        !output.to_kernel.is_empty() || output.to_ports[..self.ports.len()].iter().any(|queue| !queue.is_empty())
    }

    fn process_commands(&mut self) -> bool {
        for processed in 0..COMMANDS_PER_POLL {
            match self.parts.commands.try_recv() {
                Ok(command) => self.process_command(command),
                Err(TryRecvError::Empty) => return processed > 0,
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
                // The control thread has already adapted the configuration to the limits of ports.
                set.unwrap_or_else(|error| panic!("{error}"));
            }
            Command::RenumberPorts(gone, stays) => self.renumber_ports(&gone, &stays),
            Command::SetBatching(policy) => interconnect.set_policy(policy),
            Command::SetRedirects(are_sent) => forwarder.set_redirects(are_sent),
            Command::SetTransit(path) => {
                forwarder.set_transit(path);
                self.report(Report::TransitSet(path));
            }
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
            Command::Capture(capture) if self.captures.len() < CAPTURES_MAX => self.captures.push(*capture),
            // Its reader finds the end of the pipe.
            Command::Capture(_) => {}
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
                self.reported[usize::from(node.0)] = (PeerState::Absent, false);
                self.report(Report::PeerRemoved(node));
            }
            Command::RestartInterconnect => {
                let restarted = interconnect.restart(pool);
                self.interconnect_clock.restart(now);
                self.reported.fill((PeerState::Absent, false));
                self.report(Report::InterconnectRestarted(restarted));
            }
            Command::Stop => self.is_stopping = true,
        }
    }

    fn capture_received(&mut self, port: PortId) {
        for capture in self.captures.iter_mut().filter(|capture| capture.port() == port) {
            let now = SystemTime::now();
            for frame in &self.frames {
                capture.record(now, Direction::Received, self.parts.pool.bytes(frame));
            }
        }
    }

    fn renumber_ports(&mut self, gone: &[PortId], stays: &[Option<PortId>]) {
        // They would go on with other ports.
        self.captures.clear();
        let now = self.now();
        let ForwardingParts { forwarder, pool, output, .. } = &mut self.parts;
        for port in gone {
            forwarder.remove_port(now, *port, pool, output);
            output.to_port(*port).drain(..).for_each(|frame| pool.free(frame));
        }
        forwarder.renumber_counters(stays);
        let mut former = std::mem::take(&mut self.ports);
        let mut take_former = |from: &Option<PortId>| former.get_mut(usize::from(from.as_ref()?.0))?.take();
        self.ports = stays.iter().map(&mut take_former).collect();
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

    /// Sends a report to the control thread, or queues it when the channel is full.
    fn report(&mut self, report: Report) {
        if self.report_backlog.is_empty() {
            match self.parts.reports.try_send(report) {
                Ok(()) => self.parts.reports_notifier.notify(),
                Err(TrySendError::Full(report)) => self.report_backlog.push_back(report),
                Err(TrySendError::Disconnected(_)) => self.is_stopping = true,
            }
        } else {
            // Only responses are queued: at most one per command, and the control thread reads reports before it sends
            // more.
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
        self.report_peers();
    }

    /// Reports what has changed in the interconnect's view of the other nodes.
    fn report_peers(&mut self) {
        for index in 0..self.parts.nodes {
            let node = NodeId(index as u8);
            let state = (self.parts.interconnect.state(node), self.parts.interconnect.has_answered(node));
            if std::mem::replace(&mut self.reported[index], state) == state {
                continue;
            }
            match state {
                (PeerState::Broken, _) => self.report(Report::PeerFailed(node)),
                (PeerState::Unanswered, _) => self.report(Report::PeerUnanswered(node)),
                (PeerState::Up, true) => self.report(Report::PeerAnswered(node)),
                (PeerState::Absent | PeerState::Offered | PeerState::Up, _) => {}
            }
        }
    }

    /// Blocks until there is work. Each source is asked for a wake-up first and polled once more afterwards.
    fn sleep(&mut self) {
        let may_sleep = self.prepare_wait();
        if may_sleep {
            let timeout = Timespec::try_from(self.poll_timeout()).expect("less than a second");
            let mut polled = vec![PollFd::new(&*self.parts.commands_notifier, PollFlags::IN)];
            let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
            polled.extend(self.parts.kernel.wakes().map(readable));
            polled.extend(self.ports.iter().flatten().filter_map(|port| port.wakes()).map(readable));
            polled.extend(self.parts.interconnect.wait_fds().into_iter().map(readable));
            self.parts.heartbeat.sleep();
            // After an interruption or a timeout, the next iteration polls everything anyway.
            let _ = poll(&mut polled, Some(&timeout));
            if !polled[0].revents().is_empty() {
                drop(polled);
                self.parts.commands_notifier.drain();
            }
        }
        self.parts.interconnect.finish_wait();
    }

    fn prepare_wait(&mut self) -> bool {
        // Every source has to be asked, as that arms its notification.
        let mut may_sleep = self.parts.interconnect.prepare_wait();
        may_sleep &= self.parts.kernel.may_sleep();
        for port in self.ports.iter_mut().flatten() {
            may_sleep &= port.may_sleep();
        }
        may_sleep
    }

    /// Returns how long to block at most.
    fn poll_timeout(&mut self) -> Duration {
        let now_ns = self.now().ns();
        let has_unsent = self.has_unsent() || self.captures.iter().any(Capture::has_unwritten);
        let retry_ns = has_unsent.then_some(now_ns + RETRY_NS);
        let dues = [
            self.parts.forwarder.next_timer().map(Time::ns),
            self.parts.interconnect.deadline().map(|due| self.interconnect_clock.ns(due)),
            retry_ns,
        ];
        let due_ns = dues.into_iter().flatten().min().unwrap_or(u64::MAX);
        let left_ns = due_ns.saturating_sub(now_ns).min(SLEEP_NS_MAX);
        Duration::from_nanos(left_ns)
    }
}

/// Transmits packets from the front of a queue, and records those that were sent in the captures of the port.
fn captured(
    captures: &mut [Capture],
    id: PortId,
    port: &mut dyn Port,
    pool: &mut Pool,
    queue: &mut VecDeque<Packet>,
) -> io::Result<usize> {
    let now = SystemTime::now();
    let mut of_port: Vec<_> = captures.iter_mut().filter(|capture| capture.port() == id).collect();
    let frames = || queue.iter().map(|packet| pool.bytes(packet));
    let recorded: Vec<_> = of_port.iter_mut().map(|capture| capture.record_tentatively(now, frames())).collect();
    let sent = port.transmit(pool, queue);
    for (capture, recorded) in of_port.iter_mut().zip(&recorded) {
        capture.keep(recorded, sent.as_ref().copied().unwrap_or(0));
    }
    sent
}
