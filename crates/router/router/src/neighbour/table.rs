//! The neighbour table and its state machine.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;

use packet::ethernet::MacAddress;
use sim::Random;

use super::action::{Action, NeighbourUpdate};
use super::adjacency::{Adjacency, PortL2};
use super::bounds::{PortBounds, PortNeighbours};
use super::state::{Neighbour, NeighbourState};
use super::timing::{
    DELAY_FIRST_PROBE_TIME, ID_REUSE_DELAY, MULTICAST_SOLICIT_MAX, REACHABLE_TIME, RETRANS_TIMER, STALE_LIFETIME,
    UNICAST_SOLICIT_MAX,
};
use crate::config::Limits;
use crate::{AdjacencyId, DropReason, PORTS_MAX, Packet, PortId, Time};

/// An armed timer of a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Timer {
    at: Time,
    adjacency: AdjacencyId,
}

#[derive(Debug)]
pub(super) struct Entry {
    port: PortId,
    address: IpAddr,
    pub(super) state: NeighbourState,
    mac: MacAddress,
    /// Number of routes that refer to the neighbour.
    pub(super) pins: u32,
    solicitations_sent: u8,
    /// When the timer expires; [`Time::ZERO`] if it is not armed.
    timer: Time,
    pending: VecDeque<Packet>,
    /// The neighbour has answered a solicitation, or an administrator has configured it: only then do other nodes learn
    /// of it.
    pub(super) is_confirmed: bool,
}

impl Entry {
    fn new(port: PortId, address: IpAddr, pins: u32) -> Entry {
        Entry {
            port,
            address,
            state: NeighbourState::Failed,
            mac: MacAddress::default(),
            pins,
            solicitations_sent: 0,
            timer: Time::ZERO,
            pending: VecDeque::new(),
            is_confirmed: false,
        }
    }

    /// Returns whether a solicitation has not been answered yet.
    fn is_soliciting(&self) -> bool {
        matches!(self.state, NeighbourState::Incomplete | NeighbourState::Probe)
    }

    /// Returns whether the entry may be removed to make room.
    fn is_evictable(&self) -> bool {
        self.pins == 0 && self.state == NeighbourState::Stale
    }
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
    /// By port number.
    ports: Vec<PortNeighbours>,
    /// Number of ports that share the table.
    ports_in_use: usize,
    /// The neighbours that may be removed to make room, by port; the first of each port expires first.
    evictable: BTreeSet<(PortId, Timer)>,
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
            ports: (0..PORTS_MAX).map(|_| PortNeighbours::new(&limits)).collect(),
            ports_in_use: 1,
            evictable: BTreeSet::new(),
            actions: VecDeque::new(),
        }
    }

    /// Sets the number of ports that share the table.
    pub(crate) fn set_ports(&mut self, ports: usize) {
        self.ports_in_use = ports.max(1);
    }

    /// Returns the bounds of each port.
    fn bounds(&self) -> PortBounds {
        PortBounds::new(&self.limits, self.ports_in_use)
    }

    /// Changes an entry, and whatever depends on its state, timer or pins.
    fn change(&mut self, adjacency: AdjacencyId, change: impl FnOnce(&mut Entry)) {
        let Some(entry) = self.entries.get_mut(usize::from(adjacency.0)).and_then(Option::as_mut) else { return };
        let of_port = &mut self.ports[usize::from(entry.port.0)];
        let key = |entry: &Entry| (entry.port, Timer { at: entry.timer, adjacency });
        of_port.uncount(entry);
        self.evictable.remove(&key(entry));
        change(entry);
        of_port.count(entry);
        if entry.is_evictable() {
            self.evictable.insert(key(entry));
        }
        let is_ready = entry.state.has_mac() && entry.state != NeighbourState::Stale;
        self.adjacencies[usize::from(adjacency.0)].is_ready = is_ready;
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
                is_confirmed: entry.is_confirmed,
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
        if let Some(adjacency) = self.find(port, address) {
            self.change(adjacency, |entry| entry.pins += 1);
            return Some(adjacency);
        }
        if self.free_ids.is_empty()
            && let Some((_, timer)) = self.evictable.first().copied()
        {
            // The freed number becomes available only after a delay, for a later entry.
            self.remove(now, timer.adjacency);
        }
        self.insert(now, Entry::new(port, address, 1))
    }

    /// Releases a neighbour that a removed route had pinned.
    pub(crate) fn unpin(&mut self, now: Time, adjacency: AdjacencyId) {
        self.change(adjacency, |entry| entry.pins = entry.pins.saturating_sub(1));
        match self.entry(adjacency) {
            Some(entry) if entry.pins > 0 => return,
            None => return,
            Some(_) => {}
        }
        match self.entry(adjacency).map(|entry| entry.state) {
            Some(NeighbourState::Failed) => self.remove(now, adjacency),
            Some(NeighbourState::Stale) => self.set_timer(adjacency, now + STALE_LIFETIME),
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
        let (bounds, of_port) = (self.bounds(), &self.ports[usize::from(port.0)]);
        let has_room = of_port.incomplete < bounds.incomplete_max;
        if has_room && of_port.unpinned >= bounds.neighbours_max {
            self.evict(now, port);
        }
        let has_room = has_room && self.ports[usize::from(port.0)].unpinned < bounds.neighbours_max;
        match self.insert_if(has_room, now, port, address) {
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
        let pending_max = self.bounds().pending_packets_max;
        let Some(entry) = self.entries[usize::from(adjacency.0)].as_mut() else { return };
        let port = entry.port;
        let of_port = &mut self.ports[usize::from(port.0)];
        let is_full = of_port.pending >= pending_max;
        entry.pending.push_back(packet);
        of_port.pending += 1;
        if (is_full || entry.pending.len() > of_neighbour_max)
            && let Some(packet) = entry.pending.pop_front()
        {
            of_port.pending -= 1;
            self.actions.push_back(Action::Dropped { port, packet, reason: DropReason::NeighbourQueue });
        }
    }

    /// Processes what a message states about a neighbour (RFC 4861, sections 7.2.3 and 7.2.5).
    ///
    /// Anyone on the link can send such messages with any sender. A neighbour that only a message states is therefore
    /// verified at once by unicast solicitations, and removed if it does not answer.
    pub(crate) fn update(&mut self, now: Time, update: &NeighbourUpdate, l2: &PortL2) {
        let adjacency = match self.find(update.port, update.address) {
            Some(adjacency) => adjacency,
            None if update.creates => match self.create(now, update) {
                Some(adjacency) => adjacency,
                None => return self.actions.push_back(Action::Refused),
            },
            None => return,
        };
        let Some(entry) = self.entry(adjacency) else { return };
        let (was_known, was_confirmed) = (entry.state.has_mac(), entry.is_confirmed);
        let is_other = !was_known || entry.mac != update.mac;
        // An answer to nothing confirms nothing, except that a known neighbour is still there.
        let is_answer = update.is_solicited && (was_confirmed || entry.is_soliciting());
        if was_known && is_other && !update.overrides {
            // RFC 4861, section 7.2.5: the cached address stays, but reachability must be verified.
            if entry.state == NeighbourState::Reachable {
                self.set_stale(now, adjacency);
            }
            return;
        }
        if is_other {
            self.learn(adjacency, update.mac, l2);
        }
        if is_answer {
            self.set_confirmed(adjacency);
            self.confirm(now, adjacency);
        } else if update.is_configured {
            self.set_confirmed(adjacency);
            if is_other {
                self.set_stale(now, adjacency);
            }
        } else if was_confirmed && is_other {
            self.set_stale(now, adjacency);
        } else if !was_known {
            self.verify(now, adjacency);
        }
        self.flush_pending(adjacency);
    }

    /// Creates an entry for a neighbour that a message states, within the limits of its port. It evicts no other one.
    fn create(&mut self, now: Time, update: &NeighbourUpdate) -> Option<AdjacencyId> {
        let (bounds, of_port) = (self.bounds(), &mut self.ports[usize::from(update.port.0)]);
        let has_room = of_port.unpinned < bounds.neighbours_max && of_port.unconfirmed < bounds.unconfirmed_max;
        let is_allowed = update.is_configured || has_room && of_port.learned.take(now);
        self.insert_if(is_allowed, now, update.port, update.address)
    }

    fn learn(&mut self, adjacency: AdjacencyId, mac: MacAddress, l2: &PortL2) {
        let Some(entry) = self.entry_mut(adjacency) else { return };
        entry.mac = mac;
        let port = entry.port;
        let is_ready = self.adjacencies[usize::from(adjacency.0)].is_ready;
        self.adjacencies[usize::from(adjacency.0)] = Adjacency { is_ready, ..l2.adjacency(port, mac) };
    }

    /// Starts to verify a neighbour that only a message states. The number of solicitations does not begin again when
    /// further messages state another MAC address.
    fn verify(&mut self, now: Time, adjacency: AdjacencyId) {
        self.change(adjacency, |entry| {
            entry.state = NeighbourState::Probe;
            entry.solicitations_sent = 0;
        });
        self.resend_solicitation(now, adjacency);
    }

    /// Records that the neighbour exists, and reports it.
    fn set_confirmed(&mut self, adjacency: AdjacencyId) {
        let Some(entry) = self.entry(adjacency).filter(|entry| !entry.is_confirmed) else { return };
        let (port, address) = (entry.port, entry.address);
        self.change(adjacency, |entry| entry.is_confirmed = true);
        self.actions.push_back(Action::Up { port, address, adjacency });
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
            self.ports[usize::from(port.0)].pending -= 1;
            self.actions.push_back(Action::Send { adjacency, port, packet });
        }
    }

    /// Runs expired timers.
    pub(crate) fn poll(&mut self, now: Time) {
        while let Some(timer) = self.timers.first().copied().filter(|timer| timer.at <= now) {
            self.timers.pop_first();
            self.change(timer.adjacency, |entry| entry.timer = Time::ZERO);
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
        let Some(entry) = self.entry(adjacency) else { return };
        if entry.pins == 0 {
            return self.remove(now, adjacency);
        }
        let (port, address, was_confirmed) = (entry.port, entry.address, entry.is_confirmed);
        self.drop_pending(adjacency);
        self.change(adjacency, |entry| (entry.state, entry.is_confirmed) = (NeighbourState::Failed, false));
        if was_confirmed {
            self.actions.push_back(Action::Down { port, address, adjacency });
        }
    }

    /// Drops the packets that were queued for address resolution.
    fn drop_pending(&mut self, adjacency: AdjacencyId) {
        let Some(entry) = self.entries[usize::from(adjacency.0)].as_mut() else { return };
        let port = entry.port;
        while let Some(packet) = entry.pending.pop_front() {
            self.ports[usize::from(port.0)].pending -= 1;
            self.actions.push_back(Action::Undeliverable { port, packet });
        }
    }

    fn set_state(&mut self, adjacency: AdjacencyId, state: NeighbourState) {
        self.change(adjacency, |entry| entry.state = state);
    }

    fn set_timer(&mut self, adjacency: AdjacencyId, at: Time) {
        self.clear_timer(adjacency);
        self.change(adjacency, |entry| entry.timer = at);
        self.timers.insert(Timer { at, adjacency });
    }

    /// Creates an entry without pins if `is_allowed` is set and a number is free.
    fn insert_if(&mut self, is_allowed: bool, now: Time, port: PortId, address: IpAddr) -> Option<AdjacencyId> {
        if is_allowed { self.insert(now, Entry::new(port, address, 0)) } else { None }
    }

    fn insert(&mut self, now: Time, entry: Entry) -> Option<AdjacencyId> {
        self.free_ids.front().filter(|(from, _)| *from <= now)?;
        let (_, adjacency) = self.free_ids.pop_front()?;
        let (port, address) = (entry.port, entry.address);
        self.ports[usize::from(port.0)].count(&entry);
        self.entries[usize::from(adjacency.0)] = Some(entry);
        self.adjacencies[usize::from(adjacency.0)] = Adjacency { port, ..Adjacency::INVALID };
        self.by_address.insert((port, address), adjacency);
        Some(adjacency)
    }

    /// Removes the evictable neighbour of the port that expires first.
    fn evict(&mut self, now: Time, port: PortId) {
        let from = (port, Timer { at: Time::ZERO, adjacency: AdjacencyId(0) });
        if let Some((_, timer)) = self.evictable.range(from..).next().copied().filter(|(of, _)| *of == port) {
            self.remove(now, timer.adjacency);
        }
    }

    fn remove(&mut self, now: Time, adjacency: AdjacencyId) {
        self.drop_pending(adjacency);
        self.clear_timer(adjacency);
        let Some(entry) = self.entries[usize::from(adjacency.0)].take() else { return };
        let (port, address) = (entry.port, entry.address);
        self.evictable.remove(&(port, Timer { at: entry.timer, adjacency }));
        self.ports[usize::from(port.0)].uncount(&entry);
        self.by_address.remove(&(port, address));
        self.adjacencies[usize::from(adjacency.0)] = Adjacency::INVALID;
        if entry.is_confirmed {
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
        let Some(entry) = self.entry(adjacency) else { return };
        self.timers.remove(&Timer { at: entry.timer, adjacency });
        self.change(adjacency, |entry| entry.timer = Time::ZERO);
    }

    /// Panics unless the counts and sets agree with the entries.
    #[cfg(test)]
    pub(super) fn assert_consistent(&self) {
        let mut ports: Vec<PortNeighbours> = (0..PORTS_MAX).map(|_| PortNeighbours::new(&self.limits)).collect();
        let (mut evictable, mut timers) = (BTreeSet::new(), BTreeSet::new());
        for (id, entry) in self.entries.iter().enumerate().filter_map(|(id, entry)| Some((id, entry.as_ref()?))) {
            let (adjacency, of_port) = (AdjacencyId(id as u16), &mut ports[usize::from(entry.port.0)]);
            of_port.count(entry);
            of_port.pending += entry.pending.len();
            let timer = Timer { at: entry.timer, adjacency };
            evictable.extend(entry.is_evictable().then_some((entry.port, timer)));
            timers.extend((entry.timer != Time::ZERO).then_some(timer));
            assert!(entry.is_confirmed || entry.state != NeighbourState::Reachable);
        }
        let counts = |ports: &[PortNeighbours]| -> Vec<[usize; 4]> {
            ports.iter().map(|port| [port.unpinned, port.incomplete, port.unconfirmed, port.pending]).collect()
        };
        assert_eq!(counts(&ports), counts(&self.ports));
        assert_eq!((evictable, timers), (self.evictable.clone(), self.timers.clone()));
    }
}
