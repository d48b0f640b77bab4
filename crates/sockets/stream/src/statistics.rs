//! What `crosslane stat` shows of this process: its connections with lanes, and why others have none.
//!
//! The page is created when a connection first proves busy and has met its other end, or could not, so that processes
//! whose connections stay short have none. A connection is on it from its first attempt on that fails, with the reason,
//! or from its meeting on. One that a setting or an option keeps on TCP is only counted. Each half of a connection
//! counts its own direction, under its own lock.

use crate::kernel::Tcp;
use crate::{identity, remote};
use meeting::{Met, Reason, Role};
use socket::accounting::process_stats::{page, page_if_any};
use socket::process::settings::settings;
use socket::process::threads;
use stats_page::{ConnectionSlot, DataPath, FallbackReason, NewConnection};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;

/// The counters of a connection; nothing before it has tried to meet its other end.
#[derive(Clone, Default)]
pub struct Counters(Option<Arc<Counted>>);

struct Counted {
    slot: ConnectionSlot,
    /// The ends have met.
    has_lanes: bool,
}

impl Counters {
    /// Begins to count a connection that has just met its other end, and whose transfers still use TCP. Its two halves
    /// keep one clone each; the last one that is dropped ends the connection in the page.
    pub fn open(fd: RawFd, role: Role, met: &Met) -> Self {
        let slot = open_slot(fd, role, None);
        slot.add_by_tcp(met.own_counts.written, met.own_counts.consumed);
        slot.set_sends_on_tcp(true);
        slot.set_receives_on_tcp(true);
        Self(Some(Arc::new(Counted { slot, has_lanes: true })))
    }

    /// Begins to count a connection that stays on TCP for now, because it could not meet its other end.
    /// `is_reported` says that the reason is the other end's.
    pub fn open_on_tcp(fd: RawFd, role: Role, reason: Reason, is_reported: bool) -> Self {
        let slot = open_slot(fd, role, Some(shown(reason)));
        if is_reported {
            slot.note_reported();
        }
        if let Ok(counts) = meeting::counts::read(Tcp(fd).borrow(), role) {
            slot.add_sent(counts.written);
            slot.add_received(counts.consumed);
        }
        Self(Some(Arc::new(Counted { slot, has_lanes: false })))
    }

    /// Leaves the connection to other counters. If lanes have carried nothing, those have what TCP has carried so far.
    pub fn be_replaced(&self) {
        let Some(Counted { slot, has_lanes }) = self.0.as_deref() else { return };
        slot.note_replaced();
        if !has_lanes || slot.carried_bytes() == (0, 0) {
            slot.forget_bytes();
        }
    }

    fn with(&self, count: impl FnOnce(&ConnectionSlot)) {
        if let Some(counted) = self.0.as_deref().filter(|counted| counted.has_lanes) {
            count(&counted.slot);
        }
    }

    /// Counts a send by the lane.
    #[inline]
    pub fn add_sent(&self, bytes: usize) {
        self.with(|slot| slot.add_sent(bytes as u64));
    }

    /// Counts a receive by the lane.
    #[inline]
    pub fn add_received(&self, bytes: usize) {
        self.with(|slot| slot.add_received(bytes as u64));
    }

    /// Counts what TCP has carried.
    pub fn add_by_tcp(&self, sent_bytes: usize, received_bytes: usize) {
        let Some(Counted { slot, has_lanes }) = self.0.as_deref() else { return };
        if *has_lanes {
            return slot.add_by_tcp(sent_bytes as u64, received_bytes as u64);
        }
        slot.add_by_kernel(sent_bytes as u64, received_bytes as u64, threads::is_single());
    }

    /// Notes by what this end sends now.
    pub fn note_sending_path(&self, is_by_lane: bool) {
        self.with(|slot| slot.set_sends_on_tcp(!is_by_lane));
    }

    /// Notes by what this end receives now.
    pub fn note_receiving_path(&self, is_by_lane: bool) {
        self.with(|slot| slot.set_receives_on_tcp(!is_by_lane));
    }

    /// Returns the bytes that lanes have carried from this end and to it.
    pub fn carried_bytes(&self) -> (u64, u64) {
        let of_lanes = self.0.as_deref().filter(|counted| counted.has_lanes);
        of_lanes.map_or((0, 0), |counted| counted.slot.carried_bytes())
    }

    /// Counts a sleep of this end.
    pub fn count_sleep(&self) {
        self.with(ConnectionSlot::count_sleep);
    }

    /// Counts a ring of the peer's bell.
    pub fn count_wake(&self) {
        self.with(ConnectionSlot::count_wake);
    }
}

fn open_slot(fd: RawFd, role: Role, reason: Option<FallbackReason>) -> ConnectionSlot {
    let tcp = Tcp(fd);
    let local = rustix::net::getsockname(tcp.borrow()).ok();
    let peer = rustix::net::getpeername(tcp.borrow()).ok().flatten();
    let remote = remote::shown_addresses(fd);
    page().open_connection(&NewConnection {
        path: match (reason, remote) {
            (Some(_), _) => DataPath::Kernel,
            (None, Some(_)) => DataPath::Window,
            (None, None) => DataPath::Lane,
        },
        role: match role {
            Role::Connected => stats_page::Role::Connect,
            Role::Accepted => stats_page::Role::Accept,
        },
        fd,
        local: remote.map(|[local, _]| local).or(local.and_then(|address| SocketAddr::try_from(address).ok())),
        peer: remote.map(|[_, peer]| peer).or(peer.and_then(|address| SocketAddr::try_from(address).ok())),
        reason,
    })
}

/// Counts an attempt to meet that has failed; a connection may make several.
pub fn count_failure(reason: Reason) {
    page().count_fallback(shown(reason));
}

/// Notes that the program is about to install a system call filter, so that no connection of it uses lanes any more.
pub fn note_confined() {
    if let Some(page) = page_if_any() {
        page.count_fallback(FallbackReason::Sandbox);
    }
}

/// Counts a connection that has proved busy, and that a setting or an option of its socket keeps on TCP.
pub fn count_excluded(fd: RawFd, role: Role) {
    if !Tcp(fd).is_stream() {
        return;
    }
    page().count_fallback(match identity::is_excluded(fd, role) {
        true if settings().honours_filters => FallbackReason::PacketFilters,
        true => FallbackReason::PortRule,
        false => FallbackReason::SocketOption,
    });
}

/// Returns the reason that `crosslane stat` shows.
fn shown(reason: Reason) -> FallbackReason {
    match reason {
        Reason::NotTcp | Reason::Urgent | Reason::Repair | Reason::Ulp | Reason::Options => {
            FallbackReason::SocketOption
        }
        Reason::Shared => FallbackReason::SharedSocket,
        Reason::SelfConnected => FallbackReason::ToItself,
        Reason::Nobody => FallbackReason::NoAnswer,
        Reason::User => FallbackReason::OtherUser,
        Reason::Namespace => FallbackReason::NamespaceDiffers,
        Reason::NoRule => FallbackReason::NoRule,
        Reason::OtherTuple => FallbackReason::AddressTranslated,
        Reason::NoProof => FallbackReason::NoProof,
        Reason::NoLookUp => FallbackReason::NoLookUp,
        Reason::Unmapped => FallbackReason::UnmappedUser,
        Reason::Version | Reason::Other(_) => FallbackReason::VersionMismatch,
        Reason::Off => FallbackReason::SwitchedOff,
        Reason::Sandbox => FallbackReason::Sandbox,
        Reason::AddressSpace => FallbackReason::AddressSpaceLimited,
        Reason::Rack | Reason::Rules => FallbackReason::RackUnavailable,
        Reason::RackUser => FallbackReason::RackOfOtherUser,
        Reason::NoMemory | Reason::NoDescriptors | Reason::System => FallbackReason::ResourceLimit,
        Reason::State
        | Reason::Busy
        | Reason::Full
        | Reason::NameTaken
        | Reason::Gone
        | Reason::Role
        | Reason::Counts
        | Reason::Cookie
        | Reason::Malformed
        | Reason::Descriptors
        | Reason::Memory => FallbackReason::HandshakeFailed,
        Reason::Window => FallbackReason::WindowUnmapped,
    }
}

/// Gives a child of `fork` a page of its own, if its parent had one.
pub fn after_fork_in_child() {
    socket::accounting::process_stats::after_fork_in_child();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_a_connection_that_has_not_met_its_other_end_count_nothing() {
        let counters = Counters::default();
        counters.add_sent(1);
        counters.note_sending_path(true);
        assert!(counters.0.is_none());
    }

    #[test]
    fn each_reason_is_shown_as_one_that_people_know() {
        assert!(Reason::ALL.iter().all(|reason| FallbackReason::ALL.contains(&shown(*reason))));
        assert_eq!(shown(Reason::Other(999)), FallbackReason::VersionMismatch);
    }
}
