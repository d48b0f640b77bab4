//! The neighbour table and its state machine.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;

use packet::ethernet::MacAddress;
use sim::Random;

use super::action::{Action, NeighbourUpdate};
use super::adjacency::{Adjacency, PortL2};
use super::state::{Neighbour, NeighbourState};
use super::timing::{
    DELAY_FIRST_PROBE_TIME, ID_REUSE_DELAY, MULTICAST_SOLICIT_MAX, REACHABLE_TIME, RETRANS_TIMER, STALE_LIFETIME,
    UNICAST_SOLICIT_MAX,
};
use crate::config::Limits;
use crate::rate::TokenBucket;
use crate::{AdjacencyId, DropReason, Packet, PortId, Time};

/// An armed timer of a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Timer {
    at: Time,
    adjacency: AdjacencyId,
}

#[derive(Debug)]
struct Entry {
    port: PortId,
    address: IpAddr,
    state: NeighbourState,
    mac: MacAddress,
    /// Number of routes that refer to the neighbour.
    pins: u32,
    solicitations_sent: u8,
    /// When the timer expires; [`Time::ZERO`] if it is not armed.
    timer: Time,
    pending: VecDeque<Packet>,
}

/// The neighbours of a node.
pub(crate) struct Neighbours {
    limits: Limits,
    random: Random,
    /// By adjacency number; 0 is unused.
    adjacencies: Vec<Adjacency>,
    entries: Vec<Option<Entry>>,
    by_address: HashMap<(PortId, IpAddr), AdjacencyId>,
    /// Free adjacency numbers, each with the time from which it may be reused.
    free_ids: VecDeque<(Time, AdjacencyId)>,
    timers: BTreeSet<Timer>,
    /// Number of incomplete neighbours that no route pins.
    incomplete: usize,
    pending: usize,
    learned: TokenBucket,
    actions: VecDeque<Action>,
}

impl Neighbours {
    pub(crate) fn new(limits: Limits, seed: u64) -> Neighbours {
        let count = usize::from(limits.neighbours_max) + 1;
        Neighbours {
            limits,
            random: Random::new(seed, "neighbours"),
            adjacencies: vec![Adjacency::INVALID; count],
            entries: (0..count).map(|_| None).collect(),
            by_address: HashMap::new(),
            free_ids: (1..=limits.neighbours_max).map(|id| (Time::ZERO, AdjacencyId(id))).collect(),
            timers: BTreeSet::new(),
            incomplete: 0,
            pending: 0,
            learned: TokenBucket::new(limits.learned, Time::ZERO),
            actions: VecDeque::new(),
        }
    }

    /// Returns the adjacency if it is ready for the fast path.
    #[inline]
    pub(crate) fn ready(&self, adjacency: AdjacencyId) -> Option<&Adjacency> {
        self.adjacencies.get(usize::from(adjacency.0)).filter(|ready| ready.is_ready)
    }

    /// Returns all adjacencies by number, for lookups in bulk.
    #[inline]
    pub(crate) fn adjacencies(&self) -> &[Adjacency] {
        &self.adjacencies
    }

    /// Returns the adjacency if the neighbour is resolved.
    pub(crate) fn resolved(&self, adjacency: AdjacencyId) -> Option<&Adjacency> {
        self.entry(adjacency).filter(|entry| entry.state.has_mac())?;
        self.adjacencies.get(usize::from(adjacency.0))
    }

    /// Returns the MAC address of the neighbour if it is resolved.
    pub(crate) fn mac(&self, adjacency: AdjacencyId) -> Option<MacAddress> {
        self.entry(adjacency).filter(|entry| entry.state.has_mac()).map(|entry| entry.mac)
    }

    /// Returns the next action to execute.
    pub(crate) fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns when the next timer expires.
    pub(crate) fn next_timer(&self) -> Option<Time> {
        self.timers.first().map(|timer| timer.at)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Neighbour> + '_ {
        self.entries.iter().enumerate().filter_map(|(id, entry)| {
            let entry = entry.as_ref()?;
            Some(Neighbour {
                adjacency: AdjacencyId(id as u16),
                port: entry.port,
                address: entry.address,
                mac: entry.state.has_mac().then_some(entry.mac),
                state: entry.state,
            })
        })
    }

    /// Returns the neighbour with this address, if it is in the table.
    pub(crate) fn find(&self, port: PortId, address: IpAddr) -> Option<AdjacencyId> {
        self.by_address.get(&(port, address)).copied()
    }

    /// Returns the address of the neighbour.
    pub(crate) fn address_of(&self, adjacency: AdjacencyId) -> Option<IpAddr> {
        self.entry(adjacency).map(|entry| entry.address)
    }

    /// Returns the port of the neighbour.
    pub(crate) fn port_of(&self, adjacency: AdjacencyId) -> Option<PortId> {
        self.entry(adjacency).map(|entry| entry.port)
    }

    fn entry(&self, adjacency: AdjacencyId) -> Option<&Entry> {
        self.entries.get(usize::from(adjacency.0))?.as_ref()
    }

    fn entry_mut(&mut self, adjacency: AdjacencyId) -> Option<&mut Entry> {
        self.entries.get_mut(usize::from(adjacency.0))?.as_mut()
    }

    /// Pins the neighbour with this address for a route, and returns its adjacency, or `None` if the table is full.
    /// Resolution starts with the first packet.
    pub(crate) fn pin(&mut self, now: Time, port: PortId, address: IpAddr) -> Option<AdjacencyId> {
        let adjacency = match self.find(port, address) {
            Some(adjacency) => adjacency,
            None => {
                let adjacency = self.insert(now, port, address)?;
                self.set_state(adjacency, NeighbourState::Failed);
                adjacency
            }
        };
        let entry = self.entry_mut(adjacency)?;
        entry.pins += 1;
        if entry.pins == 1 && entry.state == NeighbourState::Incomplete {
            self.incomplete -= 1;
        }
        Some(adjacency)
    }

    /// Releases a neighbour that a removed route had pinned.
    pub(crate) fn unpin(&mut self, now: Time, adjacency: AdjacencyId) {
        let Some(entry) = self.entry_mut(adjacency) else { return };
        entry.pins = entry.pins.saturating_sub(1);
        if entry.pins > 0 {
            return;
        }
        match entry.state {
            NeighbourState::Failed => self.remove(now, adjacency),
            NeighbourState::Incomplete => self.incomplete += 1,
            NeighbourState::Stale => self.set_timer(adjacency, now + STALE_LIFETIME),
            _ => {}
        }
    }

    /// Records a use of the neighbour. Returns the packet if it can be sent at once; otherwise queues it, and starts
    /// address resolution if necessary.
    pub(crate) fn send_or_queue(&mut self, now: Time, adjacency: AdjacencyId, packet: Packet) -> Option<Packet> {
        match self.entry(adjacency).map(|entry| entry.state) {
            Some(NeighbourState::Stale) => {
                self.set_state(adjacency, NeighbourState::Delay);
                self.set_timer(adjacency, now + DELAY_FIRST_PROBE_TIME);
                Some(packet)
            }
            Some(NeighbourState::Failed) => {
                self.push_pending(adjacency, packet);
                self.start_resolution(now, adjacency);
                None
            }
            Some(NeighbourState::Incomplete) => {
                self.push_pending(adjacency, packet);
                None
            }
            _ => Some(packet),
        }
    }

    /// Queues a packet for an address without an entry, and starts address resolution.
    pub(crate) fn resolve(&mut self, now: Time, port: PortId, address: IpAddr, packet: Packet) {
        if self.incomplete >= usize::from(self.limits.neighbours_incomplete_max) {
            let reason = DropReason::NeighbourTable;
            self.actions.push_back(Action::Dropped { port, packet, reason });
            return;
        }
        match self.insert(now, port, address) {
            Some(adjacency) => {
                self.push_pending(adjacency, packet);
                self.start_resolution(now, adjacency);
            }
            None => self.actions.push_back(Action::Dropped { port, packet, reason: DropReason::NeighbourTable }),
        }
    }

    fn start_resolution(&mut self, now: Time, adjacency: AdjacencyId) {
        self.set_state(adjacency, NeighbourState::Incomplete);
        let Some(entry) = self.entry_mut(adjacency) else { return };
        entry.solicitations_sent = 1;
        let (port, address) = (entry.port, entry.address);
        self.set_timer(adjacency, now + RETRANS_TIMER);
        self.actions.push_back(Action::Solicit { port, address, to: None });
    }

    /// Queues a packet, and drops the oldest one if the queue is full (RFC 4861, section 7.2.2).
    fn push_pending(&mut self, adjacency: AdjacencyId, packet: Packet) {
        let of_neighbour_max = self.limits.pending_packets_of_neighbour_max;
        let is_full = self.pending >= self.limits.pending_packets_max;
        let Some(entry) = self.entries[usize::from(adjacency.0)].as_mut() else { return };
        let port = entry.port;
        entry.pending.push_back(packet);
        self.pending += 1;
        if (is_full || entry.pending.len() > of_neighbour_max)
            && let Some(packet) = entry.pending.pop_front()
        {
            self.pending -= 1;
            self.actions.push_back(Action::Dropped { port, packet, reason: DropReason::NeighbourQueue });
        }
    }

    /// Processes what a message states about a neighbour (RFC 4861, sections 7.2.3 and 7.2.5).
    pub(crate) fn update(&mut self, now: Time, update: &NeighbourUpdate, l2: &PortL2) {
        let adjacency = match self.find(update.port, update.address) {
            Some(adjacency) => adjacency,
            None if update.creates && self.learned.take(now) => match self.insert(now, update.port, update.address) {
                Some(adjacency) => adjacency,
                None => return,
            },
            None => return,
        };
        let Some(entry) = self.entry(adjacency) else { return };
        let is_other = !entry.state.has_mac() || entry.mac != update.mac;
        if entry.state.has_mac() && is_other && !update.overrides {
            // RFC 4861, section 7.2.5: the cached address stays, but reachability must be verified.
            if entry.state == NeighbourState::Reachable {
                self.set_stale(now, adjacency);
            }
            return;
        }
        if is_other {
            self.learn(adjacency, update.mac, l2);
        }
        if update.is_solicited {
            self.confirm(now, adjacency);
        } else if is_other {
            self.set_stale(now, adjacency);
        }
        self.flush_pending(adjacency);
    }

    fn learn(&mut self, adjacency: AdjacencyId, mac: MacAddress, l2: &PortL2) {
        let Some(entry) = self.entry_mut(adjacency) else { return };
        entry.mac = mac;
        entry.solicitations_sent = 0;
        let (port, address, was_known) = (entry.port, entry.address, entry.state.has_mac());
        let is_ready = self.adjacencies[usize::from(adjacency.0)].is_ready;
        self.adjacencies[usize::from(adjacency.0)] = Adjacency { is_ready, ..l2.adjacency(port, mac) };
        if !was_known {
            self.actions.push_back(Action::Up { port, address, adjacency });
        }
    }

    fn confirm(&mut self, now: Time, adjacency: AdjacencyId) {
        self.set_state(adjacency, NeighbourState::Reachable);
        let spread = 0.5 + self.random.unit();
        self.set_timer(adjacency, now + REACHABLE_TIME.mul_f64(spread));
    }

    fn set_stale(&mut self, now: Time, adjacency: AdjacencyId) {
        self.set_state(adjacency, NeighbourState::Stale);
        self.set_timer(adjacency, now + STALE_LIFETIME);
    }

    /// Sends the packets that were queued for address resolution.
    fn flush_pending(&mut self, adjacency: AdjacencyId) {
        let Some(entry) = self.entries[usize::from(adjacency.0)].as_mut() else { return };
        let port = entry.port;
        while let Some(packet) = entry.pending.pop_front() {
            self.pending -= 1;
            self.actions.push_back(Action::Send { adjacency, port, packet });
        }
    }

    /// Runs expired timers.
    pub(crate) fn poll(&mut self, now: Time) {
        while let Some(timer) = self.timers.first().copied().filter(|timer| timer.at <= now) {
            self.timers.pop_first();
            let Some(entry) = self.entry_mut(timer.adjacency) else { continue };
            entry.timer = Time::ZERO;
            self.on_timer(now, timer.adjacency);
        }
    }

    fn on_timer(&mut self, now: Time, adjacency: AdjacencyId) {
        let Some(entry) = self.entry_mut(adjacency) else { return };
        let solicitations_max =
            if entry.state == NeighbourState::Incomplete { MULTICAST_SOLICIT_MAX } else { UNICAST_SOLICIT_MAX };
        match entry.state {
            NeighbourState::Reachable => self.set_stale(now, adjacency),
            NeighbourState::Stale if entry.pins == 0 => self.remove(now, adjacency),
            NeighbourState::Stale | NeighbourState::Failed => {}
            NeighbourState::Delay => {
                entry.solicitations_sent = 0;
                self.set_state(adjacency, NeighbourState::Probe);
                self.resend_solicitation(now, adjacency);
            }
            NeighbourState::Incomplete | NeighbourState::Probe if entry.solicitations_sent < solicitations_max => {
                self.resend_solicitation(now, adjacency);
            }
            NeighbourState::Incomplete | NeighbourState::Probe => self.fail(now, adjacency),
        }
    }

    fn resend_solicitation(&mut self, now: Time, adjacency: AdjacencyId) {
        let Some(entry) = self.entry_mut(adjacency) else { return };
        entry.solicitations_sent += 1;
        let to = (entry.state == NeighbourState::Probe).then_some(entry.mac);
        let (port, address) = (entry.port, entry.address);
        self.set_timer(adjacency, now + RETRANS_TIMER);
        self.actions.push_back(Action::Solicit { port, address, to });
    }

    /// Ends resolution: the neighbour did not answer.
    fn fail(&mut self, now: Time, adjacency: AdjacencyId) {
        let Some(entry) = self.entries[usize::from(adjacency.0)].as_mut() else { return };
        let (port, address, is_pinned) = (entry.port, entry.address, entry.pins > 0);
        let was_known = entry.state.has_mac();
        while let Some(packet) = entry.pending.pop_front() {
            self.pending -= 1;
            self.actions.push_back(Action::Undeliverable { port, packet });
        }
        if !is_pinned {
            self.remove(now, adjacency);
            return;
        }
        self.set_state(adjacency, NeighbourState::Failed);
        if was_known {
            self.actions.push_back(Action::Down { port, address, adjacency });
        }
    }

    /// Sets the state, and whether the fast path may use the adjacency.
    fn set_state(&mut self, adjacency: AdjacencyId, state: NeighbourState) {
        let Some(entry) = self.entries[usize::from(adjacency.0)].as_mut() else { return };
        if entry.pins == 0 {
            let is_incomplete = |state| usize::from(state == NeighbourState::Incomplete);
            self.incomplete = self.incomplete + is_incomplete(state) - is_incomplete(entry.state);
        }
        entry.state = state;
        self.adjacencies[usize::from(adjacency.0)].is_ready = state.has_mac() && state != NeighbourState::Stale;
    }

    fn set_timer(&mut self, adjacency: AdjacencyId, at: Time) {
        let Some(entry) = self.entries[usize::from(adjacency.0)].as_mut() else { return };
        self.timers.remove(&Timer { at: entry.timer, adjacency });
        entry.timer = at;
        self.timers.insert(Timer { at, adjacency });
    }

    /// Creates an entry; if the table is full, evicts the one that has been stale for longest.
    fn insert(&mut self, now: Time, port: PortId, address: IpAddr) -> Option<AdjacencyId> {
        if self.free_ids.is_empty() {
            // The freed number becomes available only after a delay, for a later entry.
            self.evict(now);
        }
        self.free_ids.front().filter(|(from, _)| *from <= now)?;
        let (_, adjacency) = self.free_ids.pop_front()?;
        self.entries[usize::from(adjacency.0)] = Some(Entry {
            port,
            address,
            state: NeighbourState::Failed,
            mac: MacAddress::default(),
            pins: 0,
            solicitations_sent: 0,
            timer: Time::ZERO,
            pending: VecDeque::new(),
        });
        self.adjacencies[usize::from(adjacency.0)] = Adjacency { port, ..Adjacency::INVALID };
        self.by_address.insert((port, address), adjacency);
        Some(adjacency)
    }

    /// Removes the unpinned stale neighbour whose timer expires first.
    fn evict(&mut self, now: Time) {
        let is_quiet = |entry: &Entry| entry.pins == 0 && entry.state == NeighbourState::Stale;
        let quiet = self.timers.iter().find(|timer| self.entry(timer.adjacency).is_some_and(is_quiet));
        if let Some(timer) = quiet.copied() {
            self.remove(now, timer.adjacency);
        }
    }

    fn remove(&mut self, now: Time, adjacency: AdjacencyId) {
        let Some(mut entry) = self.entries[usize::from(adjacency.0)].take() else { return };
        let (port, address) = (entry.port, entry.address);
        self.timers.remove(&Timer { at: entry.timer, adjacency });
        self.by_address.remove(&(port, address));
        self.adjacencies[usize::from(adjacency.0)] = Adjacency::INVALID;
        if entry.pins == 0 && entry.state == NeighbourState::Incomplete {
            self.incomplete -= 1;
        }
        while let Some(packet) = entry.pending.pop_front() {
            self.pending -= 1;
            self.actions.push_back(Action::Undeliverable { port, packet });
        }
        if entry.state.has_mac() {
            self.actions.push_back(Action::Down { port, address, adjacency });
        }
        self.free_ids.push_back((now + ID_REUSE_DELAY, adjacency));
    }

    /// Flushes the neighbours of a port that went down or whose MAC address changed.
    pub(crate) fn flush_port(&mut self, now: Time, port: PortId) {
        let of_port = |entry: &Option<Entry>| entry.as_ref().is_some_and(|entry| entry.port == port);
        for id in 1..self.entries.len() {
            if of_port(&self.entries[id]) {
                self.fail(now, AdjacencyId(id as u16));
                self.clear_timer(AdjacencyId(id as u16));
            }
        }
    }

    fn clear_timer(&mut self, adjacency: AdjacencyId) {
        let Some(entry) = self.entries[usize::from(adjacency.0)].as_mut() else { return };
        self.timers.remove(&Timer { at: entry.timer, adjacency });
        entry.timer = Time::ZERO;
    }
}
