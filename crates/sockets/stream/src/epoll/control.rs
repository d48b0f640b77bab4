//! `epoll_ctl`.

use super::registry::{self, Registration};
use super::set::{self, EpollSet};
use crate::table::{self, Entry};
use libc::epoll_event;
use rustix::io::Errno;
use socket::process::threads;
use std::os::fd::RawFd;
use std::sync::atomic::{Ordering, fence};

/// Notes what a call of `epoll_ctl` does, or does it. `event` is the program's, if it is readable; `in_kernel` makes
/// the program's call.
///
/// # Errors
/// Those of `epoll_ctl(2)`.
pub fn control(
    epfd: RawFd,
    operation: i32,
    fd: RawFd,
    event: Option<epoll_event>,
    in_kernel: impl FnOnce() -> Result<(), Errno>,
) -> Result<(), Errno> {
    // A set with several descriptors is known by one of them.
    let epfd = set::known_number(epfd);
    if let Entry::Set(set) = table::get(epfd)
        && let Some(result) = control_member(set, epfd, operation, fd, event)
    {
        return result;
    }
    if operation == libc::EPOLL_CTL_ADD
        && let (Entry::Connection(connection), Some(event)) = (table::get(fd), event)
        && connection.has_met()
    {
        let registration = Registration { epfd, events: event.events, data: event.u64 };
        if let Some(result) = set::of(epfd).and_then(|set| set.add_member(connection, fd, registration)) {
            if result.is_ok() {
                registry::put(fd, registration);
            }
            return result;
        }
    }
    in_kernel()?;
    match (operation, event) {
        (libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD, Some(event)) => {
            let registration = Registration { epfd, events: event.events, data: event.u64 };
            registry::put(fd, registration);
            super::nested::note_registration(fd);
            if !threads::is_single() {
                note_meeting_meanwhile(operation == libc::EPOLL_CTL_ADD, fd, registration);
            }
        }
        _ => {
            registry::remove(fd, epfd);
            // Pairs with the one in `adopt_member`: a thread that adopts the connection has made the set, or sees that
            // the registration is gone.
            fence(Ordering::SeqCst);
            if let Entry::Set(set) = table::get(epfd) {
                set.remove_member(fd);
            }
        }
    }
    Ok(())
}

/// Makes up for a meeting of the connection, in another thread, during the call: that thread has not found a new
/// registration, or the kernel has changed one that was a member's by then.
fn note_meeting_meanwhile(is_new: bool, fd: RawFd, registration: Registration) {
    // Pairs with the one in `adopt`: that thread sees the registration, or this one the meeting.
    fence(Ordering::SeqCst);
    let Entry::Connection(connection) = table::get(fd) else { return };
    if !connection.has_met() {
        return;
    }
    let Registration { epfd, events, data } = registration;
    let is_one_shot = events & libc::EPOLLONESHOT as u32 != 0;
    if is_new {
        match set::of(epfd) {
            Some(set) if set.has_member(fd) => {}
            Some(set) if !is_one_shot => set.adopt_member(connection, fd, registration),
            // Only the kernel knows whether the event of a one-shot registration was reported, and a move may have
            // begun.
            _ => connection.leave_lanes(fd),
        }
    } else if let Entry::Set(set) = table::get(epfd)
        && !is_one_shot
    {
        // A one-shot member awaits the next change, and the connection does not move before that.
        set.register_again(fd, events, data);
    }
}

/// Does what a call asks for if it concerns a member.
fn control_member(
    set: &'static EpollSet,
    epfd: RawFd,
    operation: i32,
    fd: RawFd,
    event: Option<epoll_event>,
) -> Option<Result<(), Errno>> {
    match (operation, event) {
        (libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD, Some(event)) => {
            let result = set.change_member(operation == libc::EPOLL_CTL_ADD, fd, event.events, event.u64)?;
            if result.is_ok() {
                registry::put(fd, Registration { epfd, events: event.events, data: event.u64 });
            }
            Some(result)
        }
        (libc::EPOLL_CTL_DEL, _) => {
            let result = set.end_member(fd)?;
            registry::remove(fd, epfd);
            Some(result)
        }
        _ => None,
    }
}
