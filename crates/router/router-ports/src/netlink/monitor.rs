//! What there is, then what changes.
//!
//! Some things of the kernel's are not as one would think. When events found no room, it says so once, and drops all
//! that follow, without a word, until the queue was empty. Of IPv6 it tells routes in pieces: when one comes between
//! two of them, it begins anew and passes over as many as it had told, which are too many where others went. So all
//! is heard before all is read, and what is read while routes of IPv6 go is read again. So is a route that was hidden
//! among the ways of another one, once these go.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use netlink_packet_core::NLM_F_REPLACE;
use netlink_packet_route::RouteNetlinkMessage as Message;
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::LinkMessage;
use netlink_packet_route::neighbour::NeighbourMessage;
use netlink_packet_route::route::RouteMessage;
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::net::RecvFlags;

use super::model::Change;
use super::socket::{NetlinkError, ReceiveError, Socket};
use super::state::State;

/// `RTMGRP_LINK`, `_NEIGH`, `_IPV4_IFADDR`, `_IPV4_ROUTE`, `_IPV6_IFADDR`, `_IPV6_ROUTE` (`linux/rtnetlink.h`), and
/// group 32, `RTNLGRP_NEXTHOP`.
const GROUPS: u32 = 0x1 | 0x4 | 0x10 | 0x40 | 0x100 | 0x400 | 1 << 31;
/// `RTM_DELNEXTHOP`; the library has no next-hop objects.
const NEXTHOP_GONE: u16 = 105;
/// The kernel's messages of one look, so that a flood of them does not keep the caller for ever.
const RECEIVES_MAX: u32 = 10_000;
/// Such looks until a queue must be empty that the kernel adds nothing to.
const LOOKS_MAX: u32 = 16;
/// How often routes are read at a time, while some of them go.
const READS_MAX: u32 = 3;
/// When routes went each time, all is read again after a pause: so many times as long as reading took, and twice as
/// long whenever that happens again.
const PAUSE_READS: u32 = 10;
const PAUSE_MAX: Duration = Duration::from_secs(64);
/// Routes that are read in some milliseconds: of more of them, one that may have been hidden has to wait.
const ROUTES_FEW: usize = 10_000;
const PAUSE_HIDDEN: Duration = Duration::from_secs(10);

/// The kernel's links, addresses, routes and neighbours, as changes.
pub struct Monitor {
    events: Socket,
    questions: Socket,
    state: State,
    is_stale: bool,
    resyncs: u64,
    /// Some of what there is may be missing: when all is to be read again, and after which pause.
    again: Option<(Instant, Duration)>,
    /// What the state has already, and the caller was not told because something failed.
    untold: Vec<Change>,
    /// Events that could not be read.
    unreadable: u64,
    /// Messages that are heard at a time.
    receives_max: u32,
}

impl Monitor {
    /// Hears of everything from now on. What there is comes with the first [`Monitor::changes`].
    pub fn open() -> Result<Monitor, NetlinkError> {
        let compatible = std::fs::read_to_string("/proc/sys/net/ipv4/nexthop_compat_mode");
        if compatible.is_ok_and(|mode| mode.trim() == "0") {
            return Err(NetlinkError::HopsHidden);
        }
        let (events, questions) = (Socket::open(GROUPS)?, Socket::open(0)?);
        let (state, untold) = (State::default(), Vec::new());
        let receives_max = RECEIVES_MAX;
        let (is_stale, again, resyncs, unreadable) = (true, None, 0, 0);
        Ok(Monitor { events, questions, state, is_stale, resyncs, again, untold, unreadable, receives_max })
    }

    /// Becomes readable when there may be changes.
    pub fn wakes(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// How often everything was read anew, the first time included: an event was lost, or left a doubt.
    pub fn resyncs(&self) -> u64 {
        self.resyncs
    }

    /// The kernel's messages that could not be read, and were passed over: of a kernel that is newer than this program,
    /// or interfaces of a rare kind.
    pub fn unreadable(&self) -> u64 {
        self.unreadable + self.questions.unreadable()
    }

    /// All that there is, as far as it was told: as changes from nothing.
    pub fn all(&self) -> Vec<Change> {
        self.state.differences(&State::default())
    }

    /// What has changed since the last call. Waits for nothing but the kernel's answers to a resync. After an error,
    /// the next call makes up for it.
    pub fn changes(&mut self) -> Result<Vec<Change>, NetlinkError> {
        let (mut state, mut untold) = (std::mem::take(&mut self.state), std::mem::take(&mut self.untold));
        let heard = self.hear_all(&mut state, &mut untold);
        (self.state, self.untold) = (state, untold);
        if self.state.may_hide() && self.again.is_none() {
            let pause = if self.state.routes() > ROUTES_FEW { PAUSE_HIDDEN } else { Duration::ZERO };
            self.again = Some((Instant::now() + pause, pause));
        }
        let is_again = self.again.is_some_and(|(at, _)| at <= Instant::now());
        // What is still queued after a loss is older than what would be read.
        let is_ready = heard?.is_all || !self.is_stale;
        if is_ready && (self.is_stale || self.state.is_doubtful() || is_again) {
            self.is_stale = false;
            self.resync().inspect_err(|_| self.is_stale = true)?;
        }
        Ok(std::mem::take(&mut self.untold))
    }

    /// Hears all there is, where some was lost: what comes later was told only if none is left. The kernel adds nothing
    /// until then.
    fn hear_all(&mut self, state: &mut State, changes: &mut Vec<Change>) -> Result<Heard, NetlinkError> {
        let mut heard = self.hear(state, changes)?;
        for _ in 1..LOOKS_MAX {
            if heard.is_all || !self.is_stale {
                break;
            }
            let more = self.hear(state, changes)?;
            heard = Heard { is_all: more.is_all, routes_went: heard.routes_went || more.routes_went };
        }
        Ok(heard)
    }

    /// Reads all anew, and the routes of IPv6 once more while some of them go: what one look passes over, another sees.
    fn resync(&mut self) -> Result<(), NetlinkError> {
        let begun = Instant::now();
        let (mut now, mut is_whole) = self.read_anew()?;
        // What is told here is in the differences.
        is_whole &= !self.hear_all(&mut now, &mut Vec::new())?.routes_went;
        for _ in 1..READS_MAX {
            if is_whole {
                break;
            }
            let mut routes = State::default();
            is_whole = self.read_routes(&mut routes, AddressFamily::Inet6)?;
            now.add_routes(routes);
            is_whole &= !self.hear_all(&mut now, &mut Vec::new())?.routes_went;
        }
        let pause = self.again.map_or(Duration::ZERO, |(_, pause)| 2 * pause);
        let pause = pause.max(begun.elapsed() * PAUSE_READS).min(PAUSE_MAX);
        self.again = (!is_whole).then(|| (Instant::now() + pause, pause));
        self.untold.extend(now.differences(&self.state));
        self.state = now;
        self.resyncs += 1;
        Ok(())
    }

    /// The kernel gives it so much room; with little, events are lost.
    #[cfg(test)]
    pub(super) fn set_queue(&self, bytes: usize) {
        rustix::net::sockopt::set_socket_recv_buffer_size(self.events.as_fd(), bytes).unwrap();
    }

    /// Hears so many messages at a time.
    #[cfg(test)]
    pub(super) fn hear_at_most(&mut self, receives: u32) {
        self.receives_max = receives;
    }

    /// Hears from the socket that is given back instead of the kernel.
    #[cfg(test)]
    pub(super) fn hear_instead(&mut self) -> std::os::unix::net::UnixDatagram {
        let (here, there) = std::os::unix::net::UnixDatagram::pair().unwrap();
        self.events = Socket::of(here.into());
        there
    }

    /// Hears what there is, of a look.
    fn hear(&mut self, state: &mut State, changes: &mut Vec<Change>) -> Result<Heard, NetlinkError> {
        let mut heard = Heard { is_all: true, routes_went: false };
        for _ in 0..self.receives_max {
            let Monitor { events, unreadable, .. } = self;
            let received = events.receive(RecvFlags::DONTWAIT, |raw| {
                match raw.kind {
                    NEXTHOP_GONE => state.doubt(),
                    kind if is_event(kind) => match raw.read() {
                        Ok(message) => {
                            heard.routes_went |= takes_routes(&message, raw.flags);
                            state.apply(message, raw.flags, changes);
                        }
                        Err(_) => {
                            *unreadable += 1;
                            state.doubt();
                        }
                    },
                    _ => {}
                }
                Ok(())
            });
            match received {
                Ok(()) => {}
                Err(ReceiveError::Empty) => return Ok(heard),
                Err(ReceiveError::Lost) => self.is_stale = true,
                Err(ReceiveError::Failed(error)) => {
                    self.is_stale = true;
                    return Err(error);
                }
            }
        }
        Ok(Heard { is_all: false, ..heard })
    }

    /// Says whether nothing changed while all was read, as far as the kernel says so.
    fn read_anew(&mut self) -> Result<(State, bool), NetlinkError> {
        let mut state = State::default();
        let learn = State::learn;
        let links = Message::GetLink(LinkMessage::default());
        let mut is_whole = self.questions.dump(&links, &mut state, State::clear_links, learn)?;
        let addresses = Message::GetAddress(AddressMessage::default());
        is_whole &= self.questions.dump(&addresses, &mut state, State::clear_addresses, learn)?;
        let neighbours = Message::GetNeighbour(NeighbourMessage::default());
        is_whole &= self.questions.dump(&neighbours, &mut state, State::clear_neighbours, learn)?;
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            is_whole &= self.read_routes(&mut state, family)?;
        }
        Ok((state, is_whole))
    }

    fn read_routes(&mut self, state: &mut State, family: AddressFamily) -> Result<bool, NetlinkError> {
        let is_v6 = family == AddressFamily::Inet6;
        self.questions.dump(&routes_of(family), state, |state| state.clear_routes(is_v6), State::learn)
    }
}

/// What a look at the events has brought.
struct Heard {
    /// No more is there.
    is_all: bool,
    /// Routes of IPv6 went.
    routes_went: bool,
}

/// Whether routes of IPv6 go by it, whoever's they are.
fn takes_routes(message: &Message, flags: u16) -> bool {
    match message {
        Message::DelRoute(route) => route.header.address_family == AddressFamily::Inet6,
        Message::NewRoute(route) => flags & NLM_F_REPLACE != 0 && route.header.address_family == AddressFamily::Inet6,
        _ => false,
    }
}

pub(super) fn routes_of(family: AddressFamily) -> RouteNetlinkMessage {
    let mut request = RouteMessage::default();
    request.header.address_family = family;
    Message::GetRoute(request)
}

/// Links, addresses, routes and neighbours: `RTM_NEWLINK` = 16 to `RTM_DELNEIGH` = 29.
fn is_event(kind: u16) -> bool {
    matches!(kind, 16 | 17 | 20 | 21 | 24 | 25 | 28 | 29)
}
