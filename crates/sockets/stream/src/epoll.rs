//! `epoll` with connections that have met their other end.
//!
//! The program's registrations are the kernel's, as it has made them. The library only remembers them, because a
//! connection that meets its other end later becomes a *member* of the sets that hold it:
//!
//! * Its registration in the kernel gets other data, by which the library recognizes its events. They are reported with
//!   the program's data. While sends go by a lane, `EPOLLOUT` is removed from it: TCP always has room then.
//! * Its bell is put in an *inner* epoll instance, which the program's instance holds.
//!
//! A wait polls the lanes of members in memory. Their number is bounded: members that have been idle are *parked*:
//! their peers have been asked to ring. The inner instance reports the rings. Before a wait sleeps, all are parked.
//!
//! * `registry`: the program's registrations, by descriptor.
//! * `members`: the connections of a set, and which of them have events.
//! * `nested`: sets that other sets hold.
//! * `set`: a set; `control` and `wait` are the program's calls.

mod buffer;
mod control;
mod dissolve;
mod members;
mod nested;
mod registry;
mod set;
mod wait;

pub use control::control;
pub use dissolve::{dissolve_sets, forget_range};
pub use nested::before_wait;
pub use set::{EpollSet, after_fork_in_child, after_fork_in_parent, before_fork, defers_handlers};
pub use wait::wait;

use crate::connection::Connection;
use std::os::fd::RawFd;
use std::sync::atomic::{Ordering, fence};

/// Makes a connection, which has met its other end, a member of the sets that hold its descriptor `fd`.
pub fn adopt(connection: &'static Connection, fd: RawFd) {
    // Pairs with the one of `epoll_ctl`, after a new registration: this thread sees it, or that one the meeting.
    fence(Ordering::SeqCst);
    for registration in registry::of(fd) {
        match set::of(registration.epfd) {
            Some(set) => set.adopt_member(connection, fd, registration),
            None => connection.leave_lanes(fd),
        }
    }
}

/// Notes that the program has created a set.
pub fn note_created(epfd: RawFd) {
    registry::note_set(epfd);
}

/// Notes that `new` is a duplicate of `old`, of which the library knows nothing but that it may be a set.
pub fn note_duplicate(old: RawFd, new: RawFd) {
    set::note_duplicate(old, new);
}

/// Forgets the registrations of a descriptor that is about to be closed, as the kernel does.
#[inline]
pub fn forget(fd: RawFd) {
    registry::forget_set(fd);
    if registry::is_any(fd) {
        forget_registrations(fd);
    }
}

#[cold]
fn forget_registrations(fd: RawFd) {
    registry::remove_all(fd);
}

/// Prepares the sets among some descriptors for a wait that asks only the kernel: what their lanes have becomes visible
/// there.
pub fn show_to_kernel(fd: RawFd) {
    if let crate::table::Entry::Set(set) = crate::table::get(fd) {
        set.show_to_kernel();
    }
}
