//! Sets that other sets hold.
//!
//! The kernel reports an inner set to an outer one, and does not know what the lanes of its members have. A wait on any
//! set first makes that visible in the kernel, and hides what the program has received since. Each time that something
//! becomes visible is an edge, also if nothing has arrived since the last one: so the members of a set that is watched
//! by edges stay on TCP.

use super::registry;
use super::set::{self, EpollSet};
use crate::connection::Connection;
use crate::table::{self, Entry};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// Sets that hold each other in a chain; the kernel allows one fewer (`EP_MAX_NESTS`).
const DEPTH_MAX: usize = 6;

/// A set with members has been in another set.
static HAS_NESTED: AtomicBool = AtomicBool::new(false);

/// Prepares for a wait on the set `epfd`, or on some descriptors if it is `None`.
#[inline]
pub fn before_wait(epfd: Option<RawFd>) {
    if HAS_NESTED.load(Ordering::Relaxed) {
        show_all_to_kernel(epfd);
    }
}

#[cold]
fn show_all_to_kernel(except: Option<RawFd>) {
    set::for_each(|set| {
        if Some(set.epfd()) != except && is_nested(set.epfd()) {
            set.show_to_kernel();
        }
    });
}

fn is_nested(epfd: RawFd) -> bool {
    registry::is_any(epfd) && !registry::of(epfd).is_empty()
}

/// Returns whether a set that is about to get a member is watched by edges, in any other set that holds it.
pub(super) fn is_watched_by_edges(epfd: RawFd) -> bool {
    if !is_nested(epfd) {
        return false;
    }
    HAS_NESTED.store(true, Ordering::Relaxed);
    has_edges(epfd, DEPTH_MAX)
}

fn has_edges(epfd: RawFd, depth: usize) -> bool {
    let is_edge = |events: u32| events & libc::EPOLLET as u32 != 0;
    registry::of(epfd).into_iter().any(|it| is_edge(it.events) || (depth > 0 && has_edges(it.epfd, depth - 1)))
}

/// Notes a registration of a descriptor, which may be a set.
#[inline]
pub(super) fn note_registration(fd: RawFd) {
    match table::get(fd) {
        Entry::Set(set) => {
            HAS_NESTED.store(true, Ordering::Relaxed);
            leave_lanes_watched_by_edges();
            set.show_to_kernel();
        }
        // It may be a set without members, which holds one that has some.
        Entry::None if HAS_NESTED.load(Ordering::Relaxed) => leave_lanes_watched_by_edges(),
        Entry::None | Entry::Young(_) | Entry::Connection(_) => {}
    }
}

#[cold]
fn leave_lanes_watched_by_edges() {
    set::for_each(|set| {
        if has_edges(set.epfd(), DEPTH_MAX) {
            set.connections().into_iter().for_each(|(connection, fd)| connection.leave_lanes(fd));
        }
    });
}

impl EpollSet {
    /// Returns the connections of the set, with the descriptors by which it holds them.
    fn connections(&self) -> Vec<(&'static Connection, RawFd)> {
        let Some(mut state) = self.lock() else { return Vec::new() };
        let indices = state.members.indices();
        let of_member = |index| state.members.get(index).map(|member| (member.connection, member.fd));
        indices.into_iter().filter_map(of_member).filter(|(_, fd)| *fd >= 0).collect()
    }
}
