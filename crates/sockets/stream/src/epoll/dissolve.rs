//! Sets that become the kernel's alone again.

use super::registry::{self, Registration};
use super::set::{EpollSet, State, control_in_kernel};
use crate::table::{self, Entry};
use std::os::fd::RawFd;

/// Registrations of descriptors from this number on are found when they are used next, and not before.
const FORGOTTEN_AT_ONCE: RawFd = 8192;

/// Forgets the registrations of descriptors that the program closes together.
pub fn forget_range(first: RawFd, last: RawFd) {
    (first..=last.min(FORGOTTEN_AT_ONCE)).for_each(super::forget);
}

/// Gives the registrations of all members the program's events and data again. The connections are on TCP by now, and
/// from now on the library asks the kernel alone, by the calls that the program makes.
pub fn dissolve_sets() {
    table::for_each(0..=RawFd::MAX, |fd, entry| {
        if let Entry::Set(set) = entry {
            set.dissolve();
            table::set(fd, Entry::None);
        }
    });
}

impl EpollSet {
    fn dissolve(&'static self) {
        let epfd = self.epfd();
        let Some(mut state) = self.lock() else { return };
        for index in state.members.indices() {
            let Some(member) = state.members.remove(index) else { continue };
            member.connection.forget_watcher(self);
            let known = registry::of(member.fd).into_iter().find(|registration| registration.epfd == epfd);
            let (operation, events, data) = match known {
                _ if member.is_removed() => (libc::EPOLL_CTL_DEL, 0, 0),
                // An event was reported once, or only the kernel knows whether it was: the registration stays spent.
                Some(Registration { data, .. }) if member.is_off() && member.is_one_shot() => {
                    (libc::EPOLL_CTL_MOD, (libc::EPOLLONESHOT | libc::EPOLLET) as u32, data)
                }
                Some(Registration { events, data, .. }) => (libc::EPOLL_CTL_MOD, events, data),
                None => (libc::EPOLL_CTL_MOD, member.events, member.data),
            };
            let _ = control_in_kernel(epfd, operation, member.fd, events, data);
        }
        // Closes the inner instance, which thus leaves the program's one.
        *state = State::default();
    }
}
