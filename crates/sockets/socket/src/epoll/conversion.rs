//! Registered sockets that change their kind: a TCP socket becomes a connection or a listener with lanes, or the
//! reverse.

use super::control::{control_in, control_stream};
use super::kernel;
use super::ready_list::ReadyList;
use super::registration::{Registration, Target};
use super::set::{EpollSet, POOL, REGISTERED};
use crate::connection::Connection;
use crate::listener::Listener;
use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, epoll_event};
use rustix::io::Errno;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

impl EpollSet {
    /// Removes a socket registered as a plain TCP socket from the kernel's instance, or adds it again.
    fn control_stream_again(&self, operation: i32, fd: RawFd) {
        self.with(|ready_list| {
            let registration = ready_list.find(fd).map(|index| ready_list.at(index));
            if let (Some(Registration { target: Target::Stream, events, data, .. }), Some(epfd)) =
                (registration, ready_list.epfd())
            {
                let _ = kernel::control(epfd, operation, fd, *events, *data);
            }
        });
    }

    /// Replaces the registration of a plain TCP socket by one of `target`.
    fn convert(&self, fd: RawFd, target: Target) {
        self.with(|ready_list| {
            let Some(index) = ready_list.find(fd) else { return };
            let old = ready_list.at(index);
            if !matches!(old.target, Target::Stream) {
                return;
            }
            let (events, data, epfd) = (old.events, old.data, ready_list.epfd().unwrap_or(-1));
            self.drop_registration(ready_list, index);
            if let Target::Listener(_) = target {
                // The kernel socket stays the same; `add` registers it again, together with the lane listener.
                let _ = kernel::control(epfd, EPOLL_CTL_DEL, fd, 0, 0);
            }
            // If no descriptor is left for the kernel's part, the registration is lost.
            let _ = self.add(ready_list, Registration::new(fd, target, events, data));
        });
    }

    /// Replaces the registration of a listener with a lane listener by one of a plain TCP socket.
    fn revert(&self, fd: RawFd) {
        self.with(|ready_list| {
            let Some(index) = ready_list.find(fd) else { return };
            let Registration { target: Target::Listener(_), events, data, .. } = *ready_list.at(index) else { return };
            self.forget(ready_list, index, &[]);
            // The kernel's instance still has it if another process shares the registration; the call then fails with
            // `EEXIST`.
            let _ = kernel::control(ready_list.epfd().unwrap_or(-1), EPOLL_CTL_ADD, fd, events, data);
            ready_list.has_foreign = true;
            ready_list.insert(Registration::new(fd, Target::Stream, events, data));
            REGISTERED.fetch_add(1, Ordering::Relaxed);
        });
    }
}

/// Updates all sets after `connect` has replaced the TCP socket `fd` by a lifeline.
pub fn adopt(fd: RawFd, connection: &'static Connection) {
    convert_everywhere(fd, Target::Connection(connection));
}

/// Updates all sets after `listen` has added a lane listener to the TCP socket `fd`.
pub fn adopt_listener(fd: RawFd, listener: &'static Listener) {
    convert_everywhere(fd, Target::Listener(listener));
}

/// Updates all sets after the lane listener of the TCP socket `fd` was removed.
pub fn adopt_stream(fd: RawFd) {
    if REGISTERED.load(Ordering::Relaxed) > 0 {
        POOL.for_each(|set| set.revert(fd));
    }
}

fn convert_everywhere(fd: RawFd, target: Target) {
    if REGISTERED.load(Ordering::Relaxed) > 0 {
        POOL.for_each(|set| set.convert(fd, target));
    }
}

/// Runs `switch`, which changes the descriptor that stands for a listener's lanes, and registers the new descriptor.
pub fn rewatch_listener(listener: &'static Listener, switch: impl FnOnce()) {
    let for_each_registration = |work: &dyn Fn(&EpollSet, &mut ReadyList, u32)| {
        let descriptors = Target::Listener(listener).descriptors();
        POOL.for_each(|set| {
            set.with(|ready_list| {
                let is_of_listener = |index: &u32| ready_list.at(*index).target.is(Target::Listener(listener));
                let found: Vec<u32> =
                    descriptors.iter().filter_map(|&fd| ready_list.find(fd)).filter(is_of_listener).collect();
                found.into_iter().for_each(|index| work(set, ready_list, index));
            });
        });
    };
    if REGISTERED.load(Ordering::Relaxed) == 0 {
        return switch();
    }
    for_each_registration(&|_, ready_list, index| ready_list.unregister_in_kernel(index));
    switch();
    for_each_registration(&|set, ready_list, index| {
        let Registration { events, data, .. } = *ready_list.at(index);
        // Without a descriptor for it, the listener reports only what arrives by TCP, as after a failed registration.
        let _ = set.change(ready_list, index, epoll_event { events, u64: data });
    });
}

/// Runs `work` while the kernel reports no events of a TCP socket of the program, which passes through states that the
/// program must not see. The caller must prevent concurrent changes of its registrations.
pub fn while_unregistered(descriptors: &[RawFd], work: impl FnOnce()) {
    if REGISTERED.load(Ordering::Relaxed) == 0 {
        return work();
    }
    let control_all = |operation| {
        POOL.for_each(|set| descriptors.iter().for_each(|&fd| set.control_stream_again(operation, fd)));
    };
    control_all(EPOLL_CTL_DEL);
    work();
    control_all(EPOLL_CTL_ADD);
}

/// Runs `replace`, which replaces the connection under `descriptors` by a TCP socket, and updates all sets accordingly.
///
/// # Errors
/// As `replace`.
pub fn while_replaced(
    descriptors: &[RawFd],
    connection: &'static Connection,
    replace: impl FnOnce() -> Result<(), Errno>,
) -> Result<(), Errno> {
    if REGISTERED.load(Ordering::Relaxed) == 0 {
        return replace();
    }
    let mut held = Vec::new();
    POOL.for_each(|set| {
        set.with(|ready_list| {
            for &fd in descriptors {
                let found =
                    ready_list.find(fd).filter(|index| ready_list.at(*index).target.is(Target::Connection(connection)));
                if let (Some(index), Some(epfd)) = (found, ready_list.epfd()) {
                    let registration = ready_list.at(index);
                    held.push((set, epfd, fd, epoll_event { events: registration.events, u64: registration.data }));
                    set.forget(ready_list, index, &[]);
                }
            }
        });
    });
    let replaced = replace();
    for (set, epfd, fd, event) in held {
        let _ = if replaced.is_ok() {
            control_stream(set, epfd, EPOLL_CTL_ADD, fd, event)
        } else {
            control_in(set, epfd, EPOLL_CTL_ADD, fd, Target::Connection(connection), event)
        };
    }
    replaced
}

/// Returns whether an epoll instance of the program may hold a listener.
pub fn holds_listener(listener: &'static Listener) -> bool {
    is_registered(Target::Listener(listener))
}

/// Returns whether a set holds this connection.
pub(crate) fn is_in_a_set(connection: &'static Connection) -> bool {
    is_registered(Target::Connection(connection))
}

/// Returns whether a descriptor of an object is registered in a set.
fn is_registered(target: Target) -> bool {
    if REGISTERED.load(Ordering::Relaxed) == 0 {
        return false;
    }
    let descriptors = target.descriptors();
    let mut is_found = false;
    POOL.for_each(|set| set.with(|ready_list| is_found |= descriptors.iter().any(|&fd| ready_list.find(fd).is_some())));
    is_found
}
