//! The engines of a thread, over links and after them, and what happens to them when links come up and go down.

use super::awaiting_link::{AwaitingLink, AwaitingLinks};
use super::dyn_engine::DynEngine;
use super::epoll_set::{ENGINES_MAX, EpollSet, EpollToken};
use super::failover::FailoverEngines;
use super::failover::contact::EngineId;
use super::idle::LinkState;
use super::link_engine::{LinkEngine, LinkHealth};
use super::shared::Shared;
use crate::counters::EngineCounters;
use crate::engine::{LinkFault, PollOutcome};
use crate::table::ConnectionKey;
use control::proxy::{FromProxy, LinkLossPolicy, PeerReport, RetainedConnection, RetainedDescriptors};
use fabric::device::{Device, Vector, VectorDoorbell};
use rustix::event::epoll::EventFlags;
use socket::process::clock::now_ns;
use std::collections::HashMap;
use std::sync::Arc;

/// The engines of a thread. An engine keeps its index when it loses its link, as long as it has connections.
pub(super) struct EngineTable {
    shared: Arc<Shared>,
    /// Indexes of the plans that this thread runs.
    plans: Vec<usize>,
    vector: Vector,
    device: Option<(Device, VectorDoorbell)>,
    links: Vec<Option<LinkEngine>>,
    /// Engines that have lost their link and continue over TCP, by the same indexes.
    failover: FailoverEngines,
    /// Connections with a span that wait for a link.
    awaiting: AwaitingLinks,
    /// The last engine of a link that got a connection, for round robin.
    last_engine: usize,
    /// Counters of engines that are gone, by peer.
    past: HashMap<u8, EngineCounters>,
    /// The thread stops: connections are reset instead of kept.
    is_stopping: bool,
}

impl EngineTable {
    pub(super) fn new(shared: Arc<Shared>, plans: Vec<usize>, vector: Vector, failover: FailoverEngines) -> Self {
        Self {
            shared,
            plans,
            vector,
            device: None,
            links: Vec::new(),
            failover,
            awaiting: AwaitingLinks::default(),
            last_engine: 0,
            past: HashMap::new(),
            is_stopping: false,
        }
    }

    pub(super) fn device(&self) -> Option<&Device> {
        self.device.as_ref().map(|(device, _)| device)
    }

    /// Uses the first device, or the same memory with the doorbells of another monitor.
    pub(super) fn use_device(&mut self, device: Device, epoll: &EpollSet) {
        if let Some(descriptor) = self.device.as_ref().and_then(|(_, doorbell)| doorbell.descriptor()) {
            epoll.remove(descriptor);
        }
        self.links.iter_mut().flatten().for_each(|link| link.replace_device(&device, self.vector));
        let doorbell = device.vector_doorbell(self.vector);
        if let Some(descriptor) = doorbell.descriptor() {
            let _ = epoll.add(descriptor, EpollToken::Doorbell, EventFlags::IN);
        }
        self.device = Some((device, doorbell));
    }

    /// Consumes the rings of this thread's doorbell.
    pub(super) fn clear_doorbell(&self) {
        if let Some((_, doorbell)) = &self.device {
            doorbell.take();
        }
    }

    /// Returns what a block time depends on.
    pub(super) fn link_state(&self) -> LinkState {
        let has_doorbell = self.device.as_ref().is_some_and(|(_, doorbell)| doorbell.descriptor().is_some());
        let is_greeting = self.links.iter().flatten().any(LinkEngine::is_greeting);
        match () {
            () if is_greeting => LinkState::Greeting,
            () if self.count() > 0 && !has_doorbell => LinkState::WithoutDoorbell,
            () => LinkState::Announced,
        }
    }
}

/// Polling.
impl EngineTable {
    /// Returns the bound of the indexes of engines with a link.
    pub(super) fn indexes(&self) -> std::ops::Range<usize> {
        0..self.links.len()
    }

    /// Returns the number of engines with a link.
    pub(super) fn count(&self) -> usize {
        self.links.iter().flatten().count()
    }

    /// Polls an engine that has a link. A fault takes the link down.
    pub(super) fn poll_link(
        &mut self,
        index: usize,
        now_ns: u64,
        is_oversubscribed: bool,
        epoll: &EpollSet,
    ) -> PollOutcome {
        let Some(link) = &mut self.links[index] else { return PollOutcome::default() };
        match link.poll(now_ns, is_oversubscribed) {
            Ok(outcome) => outcome,
            Err(fault) => {
                self.take_link_down(index, &fault, epoll);
                PollOutcome::default()
            }
        }
    }

    /// Polls the engines without a link. Returns their indexes and whether there was progress.
    pub(super) fn poll_failover(&mut self, now_ns: u64) -> (Vec<usize>, bool) {
        if self.failover.is_empty() {
            return (Vec::new(), false);
        }
        let progressed = self.failover.poll(now_ns);
        (self.failover.indexes(), progressed)
    }

    pub(super) fn failover(&mut self) -> &mut FailoverEngines {
        &mut self.failover
    }

    /// Receives the handshake of a proxy that connects by TCP.
    pub(super) fn receive_failover_handshake(&mut self, number: u32, epoll: &EpollSet) {
        let links = &self.links;
        let live = |id: EngineId| {
            let link = links.iter().flatten().find(|link| link.id() == id);
            link.and_then(LinkEngine::failover_token)
        };
        self.failover.receive_handshake(number, live, epoll);
    }

    /// Returns the running engine at an index, with a link or over TCP, and its peer.
    pub(super) fn engine(&mut self, index: usize) -> Option<(u8, &mut (dyn DynEngine + 'static))> {
        match self.links.get_mut(index) {
            Some(Some(link)) => {
                let peer = link.peer;
                link.engine().map(|engine| (peer, engine))
            }
            _ => self.failover.engine(index),
        }
    }

    /// Handles an event of a connection's descriptors.
    pub(super) fn endpoint_ready(&mut self, index: usize, key: ConnectionKey) {
        match self.links.get_mut(index).and_then(Option::as_mut).and_then(LinkEngine::engine) {
            Some(engine) => engine.endpoint_ready(key),
            None => self.failover.endpoint_ready(index, key),
        }
    }

    pub(super) fn park_all(&mut self) {
        self.links.iter_mut().flatten().filter_map(LinkEngine::engine).for_each(DynEngine::park_all);
        self.failover.park_all();
    }

    /// Prepares all engines for sleep. Returns `false`, with none of them prepared, if one has work.
    pub(super) fn prepare_sleep(&mut self, epoll: &EpollSet) -> bool {
        let mut may_sleep = true;
        for index in 0..self.links.len() {
            let Some(link) = &mut self.links[index] else { continue };
            match link.prepare_sleep() {
                Ok(is_ready) => may_sleep &= is_ready,
                Err(fault) => self.take_link_down(index, &fault, epoll),
            }
            if !may_sleep {
                self.end_sleep();
                return false;
            }
        }
        if !self.failover.prepare_sleep() {
            self.end_sleep();
            return false;
        }
        true
    }

    /// Returns memory that connections do not use.
    pub(super) fn reclaim(&mut self) {
        self.links.iter_mut().flatten().filter_map(LinkEngine::engine).for_each(DynEngine::reclaim);
    }

    pub(super) fn end_sleep(&mut self) {
        self.links.iter_mut().flatten().for_each(LinkEngine::end_sleep);
        self.failover.end_sleep();
    }
}

/// Opening connections.
impl EngineTable {
    pub(super) fn link(&mut self, index: usize) -> Option<&mut LinkEngine> {
        self.links.get_mut(index)?.as_mut()
    }

    pub(super) fn is_greeting(&self, index: usize) -> bool {
        self.links[index].as_ref().is_some_and(LinkEngine::is_greeting)
    }

    /// Returns the engine for the next connection to a peer: the engines of its link in turn, preferring those that
    /// have greeted.
    pub(super) fn next_engine(&mut self, peer: u8) -> Option<usize> {
        let is_of_peer = |index: &usize| self.links[*index].as_ref().is_some_and(|link| link.peer == peer);
        let all: Vec<usize> = (0..self.links.len()).filter(is_of_peer).collect();
        let greeted: Vec<usize> = all.iter().copied().filter(|index| !self.is_greeting(*index)).collect();
        let engines = if greeted.is_empty() { all } else { greeted };
        self.last_engine = self.last_engine.wrapping_add(1);
        engines.get(self.last_engine % engines.len().max(1)).copied()
    }
}

/// Links that come up and go down.
impl EngineTable {
    /// Creates the engines of a link, except those that continue over it.
    pub(super) fn link_up(&mut self, peer: u8, epoch: u32, epoll: &EpollSet) {
        let continuing = self.continue_over(peer, epoch);
        for index in 0..self.links.len() {
            let is_other = |link: &LinkEngine| link.peer == peer && !continuing.contains(&link.plan);
            if self.links[index].as_ref().is_some_and(is_other) {
                self.drop_link(index, epoll);
            }
        }
        let Some((device, _)) = &self.device else { return };
        for &plan in self.plans.iter().filter(|plan| !continuing.contains(plan)) {
            let contact = if self.shared.setup.is_failover { self.failover.new_contact() } else { None };
            let engine = LinkEngine::new(&self.shared, device, (peer, epoch), plan, self.vector, contact);
            if self.links.len() >= ENGINES_MAX
                && self.free_index().is_none()
                && let Some(oldest) = self.failover.oldest()
            {
                self.failover.drop_engine(oldest);
            }
            match self.free_index() {
                Some(free) => self.links[free] = Some(engine),
                None if self.links.len() < ENGINES_MAX => self.links.push(Some(engine)),
                None => {}
            }
        }
    }

    /// Continues engines of a link in another epoch. Returns their plans.
    fn continue_over(&mut self, peer: u8, epoch: u32) -> Vec<usize> {
        let (now_ns, return_ns) = (now_ns(), self.shared.setup.return_ns);
        let mut plans = Vec::new();
        for link in self.links.iter_mut().flatten().filter(|link| link.peer == peer) {
            if link.suspend_epoch(now_ns) && link.health(now_ns, return_ns) == LinkHealth::Good {
                link.continue_in(epoch);
                plans.push(link.plan);
            }
        }
        plans
    }

    /// Returns an index that no engine has, with or without a link.
    fn free_index(&self) -> Option<usize> {
        (0..self.links.len()).find(|&index| self.links[index].is_none() && !self.failover.has(index))
    }

    pub(super) fn link_down(&mut self, peer: u8, policy: LinkLossPolicy, epoll: &EpollSet) {
        let now_ns = now_ns();
        for index in 0..self.links.len() {
            let link = self.links[index].as_mut().filter(|link| link.peer == peer);
            if link.is_some_and(|link| policy != LinkLossPolicy::RetainAll || !link.suspend_epoch(now_ns)) {
                self.drop_link(index, epoll);
            }
        }
        self.awaiting.reset(|connection| connection.peer == peer && policy == LinkLossPolicy::Reset);
    }

    /// Takes down a link that the peer has corrupted.
    fn take_link_down(&mut self, index: usize, fault: &LinkFault, epoll: &EpollSet) {
        let Some(link) = &self.links[index] else { return };
        let (peer, epoch) = (link.peer, link.epoch);
        for index in 0..self.links.len() {
            if self.links[index].as_ref().is_some_and(|link| link.peer == peer) {
                self.drop_link(index, epoll);
            }
        }
        self.awaiting.reset(|connection| connection.peer == peer);
        let what = format!("violated the protocol: {fault}");
        self.shared.notify_monitor(&FromProxy::Broken { peer, epoch, what });
    }

    /// Removes an engine's link. Connections with a span wait for the next link; with failover, the engine continues
    /// over TCP; all other connections are reset.
    fn drop_link(&mut self, index: usize, epoll: &EpollSet) {
        let Some(mut link) = self.links[index].take() else { return };
        let (peer, plan) = (link.peer, link.plan);
        *self.past.entry(peer).or_default() += link.counters();
        if self.is_stopping {
            return link.take_down();
        }
        for mut suspended in link.suspend(now_ns()) {
            suspended.local.unwatch();
            self.awaiting.extend([AwaitingLink { peer, plan, suspended }]);
        }
        if let (Some(lost), Some(address)) = (link.detach(), self.shared.address(peer)) {
            self.failover.begin(index, lost, address, epoll);
        }
    }

    /// Keeps connections of an earlier proxy until their link is up.
    pub(super) fn await_link(&mut self, connections: Vec<AwaitingLink>) {
        self.awaiting.extend(connections);
    }

    /// Resumes the waiting connections of an engine once the peer has greeted, before any frame is received from it.
    pub(super) fn resume_awaiting(&mut self, index: usize, epoll: &EpollSet) {
        if self.awaiting.is_empty() {
            return;
        }
        let Some(link) = self.links[index].as_mut().filter(|link| !link.is_greeting()) else { return };
        let (peer, plan) = (link.peer, link.plan);
        for AwaitingLink { suspended, .. } in self.awaiting.take(|it| (it.peer, it.plan) == (peer, plan)) {
            // Events since the link was lost are reported at once.
            link.resume_suspended(suspended, |key, endpoint| _ = endpoint.watch(epoll, index, key));
        }
    }

    /// Checks that the peers of all links are alive. A link whose peer has left the epoch is not used any more, even if
    /// the monitor does not know yet, unless the same proxy may come back in another epoch.
    pub(super) fn check_peers(&mut self, epoll: &EpollSet) {
        let now_ns = now_ns();
        for index in 0..self.links.len() {
            let Some(link) = self.links[index].as_mut() else { continue };
            let (peer, epoch) = (link.peer, link.epoch);
            match link.health(now_ns, self.shared.setup.return_ns) {
                LinkHealth::Good => {}
                LinkHealth::Left => {
                    link.suspend_epoch(now_ns);
                    self.shared.notify_monitor(&FromProxy::PeerLeft { peer, epoch });
                }
                LinkHealth::Lost(reason) => {
                    // The peer may be back before the monitor checks, but not in this epoch.
                    self.drop_link(index, epoll);
                    self.shared.notify_monitor(&FromProxy::Broken { peer, epoch, what: reason.to_owned() });
                }
            }
        }
        self.failover.check_deadlines();
        self.reset_late();
    }

    /// Resets the connections that have waited too long for their link.
    fn reset_late(&mut self) {
        let lost_ns = now_ns().saturating_sub(self.shared.setup.return_ns);
        self.awaiting.reset(|connection| connection.suspended.lost_ns < lost_ns);
        let engines = self.links.iter_mut().flatten().filter_map(LinkEngine::engine);
        engines.for_each(|engine| engine.reset_lost_before(lost_ns));
    }

    /// Removes all links, so that no window is accessed any more.
    pub(super) fn release_windows(&mut self, epoll: &EpollSet) {
        (0..self.links.len()).for_each(|index| self.drop_link(index, epoll));
    }

    /// Removes all links, and returns all connections with a span for the next monitor.
    pub(super) fn release_retained(&mut self, epoll: &EpollSet) -> Vec<(RetainedConnection, RetainedDescriptors)> {
        self.release_windows(epoll);
        self.awaiting.take(|_| true).into_iter().filter_map(AwaitingLink::into_retained).collect()
    }

    /// From now on, connections of a lost link are reset.
    pub(super) fn stop(&mut self) {
        self.is_stopping = true;
    }

    /// Resets all connections.
    pub(super) fn clear(&mut self, epoll: &EpollSet) {
        self.release_windows(epoll);
        self.awaiting.reset(|_| true);
        self.failover.clear();
    }
}

/// Counters.
impl EngineTable {
    /// Returns the counters, by peer.
    pub(super) fn report(&mut self) -> Vec<(u8, PeerReport)> {
        let now = self.links.iter_mut().flatten().map(|link| {
            let (connections_open, direct_held) =
                link.engine().map_or((0, 0), |engine| (engine.connections() as u64, engine.unresumed() as u64));
            (link.peer, PeerReport { connections_open, direct_held, ..report_of(&link.counters()) })
        });
        let one_awaiting = PeerReport { connections_open: 1, direct_held: 1, ..PeerReport::default() };
        let awaiting = self.awaiting.peers().map(|peer| (peer, one_awaiting));
        let past = self.past.iter().map(|(peer, counters)| (*peer, report_of(counters)));
        let over_tcp = self.failover.report().into_iter().map(|(peer, report)| (peer, report.to_peer_report()));
        now.chain(awaiting).chain(past).chain(over_tcp).collect()
    }
}

fn report_of(counters: &EngineCounters) -> PeerReport {
    PeerReport {
        connections_open: 0,
        connections_total: counters.connections_opened,
        bytes_sent: counters.bytes_sent,
        bytes_received: counters.bytes_received,
        moves: counters.moves,
        bytes_copied: counters.bytes_sent + counters.bytes_received + counters.bytes_buffered,
        frames_sent: counters.frames_sent,
        publishes: counters.publishes,
        flushes: counters.flushes,
        frames_received: counters.frames_received,
        stalls: counters.stalls,
        partitions_full: counters.partitions_full,
        rings_peer: counters.rings_peer,
        rings_local: counters.rings_local,
        wakes: counters.wakes,
        ..PeerReport::default()
    }
}
