//! What there is, then what changes.

use std::os::fd::BorrowedFd;

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

/// The kernel's links, addresses, routes and neighbours, as changes.
pub struct Monitor {
    events: Socket,
    questions: Socket,
    state: State,
    is_stale: bool,
    resyncs: u64,
    /// What the state has already, and the caller was not told because something failed.
    untold: Vec<Change>,
    /// Events that could not be read.
    unreadable: u64,
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
        Ok(Monitor { events, questions, state, is_stale: true, resyncs: 0, untold, unreadable: 0 })
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
        self.hear()?;
        if self.is_stale || self.state.is_doubtful() {
            let now = self.read_anew()?;
            self.untold.extend(now.differences(&self.state));
            self.state = now;
            self.is_stale = false;
            self.resyncs += 1;
        }
        Ok(std::mem::take(&mut self.untold))
    }

    /// The kernel gives it little room, so that events are lost.
    #[cfg(test)]
    pub(super) fn shrink_queue(&self) {
        rustix::net::sockopt::set_socket_recv_buffer_size(self.events.as_fd(), 4096).unwrap();
    }

    /// Hears from the socket that is given back instead of the kernel.
    #[cfg(test)]
    pub(super) fn hear_instead(&mut self) -> std::os::unix::net::UnixDatagram {
        let (here, there) = std::os::unix::net::UnixDatagram::pair().unwrap();
        self.events = Socket::of(here.into());
        there
    }

    fn hear(&mut self) -> Result<(), NetlinkError> {
        for _ in 0..RECEIVES_MAX {
            let Monitor { events, state, untold, unreadable, .. } = self;
            let received = events.receive(RecvFlags::DONTWAIT, |raw| {
                match raw.kind {
                    NEXTHOP_GONE => state.doubt(),
                    kind if is_event(kind) => match raw.read() {
                        Ok(message) => state.apply(message, raw.flags, untold),
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
                Err(ReceiveError::Empty) => return Ok(()),
                // What is still queued is older than what will be read.
                Err(ReceiveError::Lost) => self.is_stale = true,
                Err(ReceiveError::Failed(error)) => {
                    self.is_stale = true;
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn read_anew(&mut self) -> Result<State, NetlinkError> {
        let mut state = State::default();
        let learn = State::learn;
        self.questions.dump(&Message::GetLink(LinkMessage::default()), &mut state, State::clear_links, learn)?;
        let addresses = Message::GetAddress(AddressMessage::default());
        self.questions.dump(&addresses, &mut state, State::clear_addresses, learn)?;
        let neighbours = Message::GetNeighbour(NeighbourMessage::default());
        self.questions.dump(&neighbours, &mut state, State::clear_neighbours, learn)?;
        for (family, is_v6) in [(AddressFamily::Inet, false), (AddressFamily::Inet6, true)] {
            let request = routes_of(family);
            self.questions.dump(&request, &mut state, |state| state.clear_routes(is_v6), learn)?;
        }
        Ok(state)
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
