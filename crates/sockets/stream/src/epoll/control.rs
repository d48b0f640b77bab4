//! `epoll_ctl`.

use super::registry::{self, Registration};
use super::set::{self, EpollSet};
use crate::table::{self, Entry};
use libc::epoll_event;
use rustix::io::Errno;
use std::os::fd::RawFd;

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
            registry::put(fd, Registration { epfd, events: event.events, data: event.u64 });
            super::nested::note_registration(fd);
        }
        _ => {
            registry::remove(fd, epfd);
            if let Entry::Set(set) = table::get(epfd) {
                set.remove_member(fd);
            }
        }
    }
    Ok(())
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
