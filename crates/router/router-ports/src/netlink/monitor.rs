//! Monitoring of the kernel's state: what exists, then each change.
//!
//! Three properties of the kernel need care:
//! - If the event queue overflows, the kernel reports it once (`ENOBUFS`) and then drops all events silently until the
//!   queue has been drained. All queued events are therefore received before a dump.
//! - The kernel dumps IPv6 routes in parts. If a route is added between two parts, it restarts and skips as many routes
//!   as it had sent, which is too many if others were removed. Routes that were dumped while IPv6 routes were removed
//!   are therefore dumped again.
//! - The kernel does not report an IPv6 route that lies among the next hops of a multipath route. When these are
//!   removed, routes are dumped again as well.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use netlink_packet_core::NLM_F_REPLACE;
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::LinkMessage;
use netlink_packet_route::neighbour::NeighbourMessage;
use netlink_packet_route::route::RouteMessage;
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage as Message};
use rustix::net::RecvFlags;

use super::model::{Change, RouteKey};
use super::socket::{NetlinkError, ReceiveError, Socket};
use super::state::State;

/// `RTMGRP_LINK`, `_NEIGH`, `_IPV4_IFADDR`, `_IPV4_ROUTE`, `_IPV6_IFADDR`, `_IPV6_ROUTE` (`linux/rtnetlink.h`), and
/// group 32, `RTNLGRP_NEXTHOP`.
const GROUPS: u32 = 0x1 | 0x4 | 0x10 | 0x40 | 0x100 | 0x400 | 1 << 31;
/// `RTM_DELNEXTHOP`; the library has no next-hop objects.
const NEXTHOP_GONE: u16 = 105;
/// The largest number of messages in a batch, so that a flood of events does not block the caller.
const RECEIVES_MAX: u32 = 4096;
/// The largest number of batches after which a queue is empty to which the kernel adds nothing.
const BATCHES_MAX: u32 = 40;
/// The largest number of dumps in a resynchronization while routes are removed.
const DUMPS_MAX: u32 = 3;
/// If routes were removed during each of these dumps, everything is dumped again after a pause: this multiple of the
/// time of the dumps, doubled each time that it happens again.
const PAUSE_DUMPS: u32 = 10;
const PAUSE_MAX: Duration = Duration::from_secs(64);
/// The number of routes that are dumped in some milliseconds. With more routes, a route that may have been hidden is
/// reported after `PAUSE_HIDDEN`.
const ROUTES_FEW: usize = 10_000;
const PAUSE_HIDDEN: Duration = Duration::from_secs(10);

/// Monitors the kernel's links, addresses, routes and neighbours, and reports changes.
pub struct Monitor {
    events: Socket,
    dumps: Socket,
    state: State,
    is_stale: bool,
    resyncs: u64,
    /// The time of the next resynchronization and the pause before it, if the state may be incomplete.
    next_resync: Option<(Instant, Duration)>,
    /// Changes that the state contains but that were not reported yet.
    unreported: Vec<Change>,
    /// Keys of routes that were not reported as the state has them, from a resynchronization.
    unreported_routes: Vec<RouteKey>,
    /// The number of events that could not be parsed.
    unreadable: u64,
    /// The largest number of messages in a batch.
    receives_max: u32,
}

impl Monitor {
    /// Subscribes to all events. The first [`Monitor::changes`] reports the existing state.
    pub fn open() -> Result<Monitor, NetlinkError> {
        let compatible = std::fs::read_to_string("/proc/sys/net/ipv4/nexthop_compat_mode");
        if compatible.is_ok_and(|mode| mode.trim() == "0") {
            return Err(NetlinkError::HopsHidden);
        }
        Ok(Monitor {
            events: Socket::open(GROUPS)?,
            dumps: Socket::open(0)?,
            state: State::default(),
            is_stale: true,
            resyncs: 0,
            next_resync: None,
            unreported: Vec::new(),
            unreported_routes: Vec::new(),
            unreadable: 0,
            receives_max: RECEIVES_MAX,
        })
    }

    /// Returns a descriptor that becomes readable when there may be changes.
    pub fn wakes(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Returns how often everything was dumped, the first time included: because an event was lost or was ambiguous.
    pub fn resyncs(&self) -> u64 {
        self.resyncs
    }

    /// Returns the number of kernel messages that could not be parsed and were skipped, because the kernel is newer
    /// than this program or an interface is of a rare kind.
    pub fn unreadable(&self) -> u64 {
        self.unreadable + self.dumps.unreadable()
    }

    /// Returns the reported state, as changes from nothing.
    pub fn all(&self) -> Vec<Change> {
        let (mut changes, keys) = self.state.differences(&State::default());
        changes.extend(keys.into_iter().map(|key| self.state.route_change(key)));
        changes
    }

    /// Returns the changes since the last call. Waits only for the kernel's answers in a resynchronization. After an
    /// error, the next call reports what is missing.
    pub fn changes(&mut self) -> Result<Vec<Change>, NetlinkError> {
        self.changes_part(usize::MAX).map(|(changes, _)| changes)
    }

    /// As [`Monitor::changes`], but with at most `routes_max` routes of a resynchronization. Returns whether there are
    /// more changes than the returned ones.
    pub fn changes_part(&mut self, routes_max: usize) -> Result<(Vec<Change>, bool), NetlinkError> {
        let has_more = if self.unreported_routes.is_empty() { !self.update()? } else { true };
        // Only then may the state change again: an event of a route that was not reported would be ambiguous.
        let left = self.unreported_routes.len().saturating_sub(routes_max);
        let mut changes = std::mem::take(&mut self.unreported);
        changes.extend(self.unreported_routes.drain(left..).rev().map(|key| self.state.route_change(key)));
        if left == 0 {
            self.unreported_routes = Vec::new();
        }
        Ok((changes, has_more || left > 0))
    }

    /// Receives a batch of events, and resynchronizes if necessary. Returns whether all events were received.
    fn update(&mut self) -> Result<bool, NetlinkError> {
        let (mut state, mut unreported) = (std::mem::take(&mut self.state), std::mem::take(&mut self.unreported));
        let batch = self.receive_all(&mut state, &mut unreported);
        (self.state, self.unreported) = (state, unreported);
        if self.state.may_hide_routes() && self.next_resync.is_none() {
            let pause = if self.state.routes() > ROUTES_FEW { PAUSE_HIDDEN } else { Duration::ZERO };
            self.next_resync = Some((Instant::now() + pause, pause));
        }
        let is_due = self.next_resync.is_some_and(|(at, _)| at <= Instant::now());
        let is_all = batch?.is_all;
        // Events that are still queued after a loss are older than what a dump would return.
        if (is_all || !self.is_stale) && (self.is_stale || self.state.may_be_incomplete() || is_due) {
            self.is_stale = false;
            self.resync().inspect_err(|_| self.is_stale = true)?;
        }
        Ok(is_all)
    }

    /// Receives all queued events if some were lost: later events are reported only after the queue has been drained,
    /// and the kernel adds nothing until then.
    fn receive_all(&mut self, state: &mut State, changes: &mut Vec<Change>) -> Result<EventBatch, NetlinkError> {
        let mut batch = self.receive_batch(state, changes)?;
        for _ in 1..BATCHES_MAX {
            if batch.is_all || !self.is_stale {
                break;
            }
            let more = self.receive_batch(state, changes)?;
            batch = EventBatch { is_all: more.is_all, routes_removed: batch.routes_removed || more.routes_removed };
        }
        Ok(batch)
    }

    /// Dumps everything, and the IPv6 routes again while some of them are removed: a route that one dump skips, another
    /// one returns.
    fn resync(&mut self) -> Result<(), NetlinkError> {
        let begun = Instant::now();
        let (mut now, mut is_consistent) = self.dump_all()?;
        // Changes that these events report are part of the differences below.
        is_consistent &= !self.receive_all(&mut now, &mut Vec::new())?.routes_removed;
        for _ in 1..DUMPS_MAX {
            if is_consistent {
                break;
            }
            let mut routes = State::default();
            is_consistent = self.dump_routes(&mut routes, AddressFamily::Inet6)?;
            now.add_routes(routes);
            is_consistent &= !self.receive_all(&mut now, &mut Vec::new())?.routes_removed;
        }
        let pause = self.next_resync.map_or(Duration::ZERO, |(_, pause)| 2 * pause);
        let pause = pause.max(begun.elapsed() * PAUSE_DUMPS).min(PAUSE_MAX);
        self.next_resync = (!is_consistent).then(|| (Instant::now() + pause, pause));
        let (changes, mut routes) = now.differences(&self.state);
        self.unreported.extend(changes);
        // They are reported from the end, in order: neighbours in memory are neighbours in whatever follows.
        routes.sort_unstable_by(|one, other| other.cmp(one));
        self.unreported_routes = routes;
        self.state = now;
        self.resyncs += 1;
        Ok(())
    }

    /// Sets the size of the event queue; a small one loses events.
    #[cfg(test)]
    pub(super) fn set_queue(&self, bytes: usize) {
        rustix::net::sockopt::set_socket_recv_buffer_size(self.events.as_fd(), bytes).unwrap();
    }

    /// Sets the largest number of messages in a batch.
    #[cfg(test)]
    pub(super) fn set_receives_max(&mut self, receives: u32) {
        self.receives_max = receives;
    }

    /// Receives events from the returned socket instead of the kernel.
    #[cfg(test)]
    pub(super) fn replace_events(&mut self) -> std::os::unix::net::UnixDatagram {
        let (receiver, sender) = std::os::unix::net::UnixDatagram::pair().unwrap();
        self.events = Socket::of(receiver.into());
        sender
    }

    /// Receives one batch of events.
    fn receive_batch(&mut self, state: &mut State, changes: &mut Vec<Change>) -> Result<EventBatch, NetlinkError> {
        let mut batch = EventBatch { is_all: true, routes_removed: false };
        for _ in 0..self.receives_max {
            let Monitor { events, unreadable, .. } = self;
            let received = events.receive(RecvFlags::DONTWAIT, |raw| {
                match raw.kind {
                    NEXTHOP_GONE => state.mark_incomplete(),
                    kind if is_event(kind) => match raw.read() {
                        Ok(message) => {
                            batch.routes_removed |= removes_routes(&message, raw.flags);
                            state.apply(message, raw.flags, changes);
                        }
                        Err(_) => {
                            *unreadable += 1;
                            state.mark_incomplete();
                        }
                    },
                    _ => {}
                }
                Ok(())
            });
            match received {
                Ok(()) => {}
                Err(ReceiveError::Empty) => return Ok(batch),
                Err(ReceiveError::Lost) => self.is_stale = true,
                Err(ReceiveError::Failed(error)) => {
                    self.is_stale = true;
                    return Err(error);
                }
            }
        }
        Ok(EventBatch { is_all: false, ..batch })
    }

    /// Dumps everything, and returns whether the tables did not change during the dumps, as far as the kernel reports
    /// it.
    fn dump_all(&mut self) -> Result<(State, bool), NetlinkError> {
        let mut state = State::default();
        let learn = State::learn;
        let links = Message::GetLink(LinkMessage::default());
        let mut is_consistent = self.dumps.dump(&links, &mut state, State::clear_links, learn)?;
        let addresses = Message::GetAddress(AddressMessage::default());
        is_consistent &= self.dumps.dump(&addresses, &mut state, State::clear_addresses, learn)?;
        let neighbours = Message::GetNeighbour(NeighbourMessage::default());
        is_consistent &= self.dumps.dump(&neighbours, &mut state, State::clear_neighbours, learn)?;
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            is_consistent &= self.dump_routes(&mut state, family)?;
        }
        Ok((state, is_consistent))
    }

    fn dump_routes(&mut self, state: &mut State, family: AddressFamily) -> Result<bool, NetlinkError> {
        let is_v6 = family == AddressFamily::Inet6;
        self.dumps.dump(&routes_of(family), state, |state| state.clear_routes(is_v6), State::learn)
    }
}

/// The result of receiving a batch of events.
struct EventBatch {
    /// Whether the queue is empty.
    is_all: bool,
    /// Whether IPv6 routes were removed.
    routes_removed: bool,
}

/// Returns whether the event removes IPv6 routes, whichever protocol they belong to.
fn removes_routes(message: &Message, flags: u16) -> bool {
    match message {
        Message::DelRoute(route) => route.header.address_family == AddressFamily::Inet6,
        Message::NewRoute(route) => flags & NLM_F_REPLACE != 0 && route.header.address_family == AddressFamily::Inet6,
        _ => false,
    }
}

pub(super) fn routes_of(family: AddressFamily) -> Message {
    let mut request = RouteMessage::default();
    request.header.address_family = family;
    Message::GetRoute(request)
}

/// Links, addresses, routes and neighbours: `RTM_NEWLINK` = 16 to `RTM_DELNEIGH` = 29.
fn is_event(kind: u16) -> bool {
    matches!(kind, 16 | 17 | 20 | 21 | 24 | 25 | 28 | 29)
}
