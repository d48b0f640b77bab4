//! Removes descriptors that the program closes.

use super::deferred_closes::Close;
use super::ready_list::ReadyList;
use super::registration::Target;
use super::set::{EpollSet, POOL, REGISTERED, others};
use crate::connection::Connection;
use crate::listener::{self, Listener};
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

impl EpollSet {
    /// Removes a descriptor of the set before the program closes it; with the last one, the set is released.
    pub fn remove_descriptor(&'static self, fd: RawFd) {
        if is_inside_a_set() {
            defer_in_all_sets(Close { fd, is_last: false, is_of_set: false });
            return self.deferred_closes.push(Close { fd, is_last: false, is_of_set: true });
        }
        forget_descriptor(fd, Target::Nested(self), || self.with(|ready_list| others(&ready_list.descriptors, fd)));
        if self.with(|ready_list| self.drop_descriptor(ready_list, fd)) {
            POOL.release(self);
        }
    }
}

/// Called before the program closes a descriptor of a connection; with the last one, the connection leaves all sets.
pub fn forget(fd: RawFd, connection: &'static Connection) {
    forget_descriptor(fd, Target::Connection(connection), || connection.with_descriptors(|own| others(own, fd)));
}

/// Called before the program closes a descriptor of a listener; with the last one, the listener leaves all sets.
pub fn forget_listener(fd: RawFd, listener: &'static Listener) {
    forget_descriptor(fd, Target::Listener(listener), || listener.with_descriptors(|own| others(own, fd)));
}

/// Called before the program closes a descriptor of a plain TCP socket. The kernel decides whether it stays registered.
pub fn forget_stream(fd: RawFd) {
    forget_descriptor(fd, Target::Stream, Vec::new);
}

fn forget_descriptor(fd: RawFd, target: Target, survivors: impl FnOnce() -> Vec<RawFd>) {
    if REGISTERED.load(Ordering::Relaxed) == 0 {
        return;
    }
    let survivors = survivors();
    let close = Close { fd, is_last: survivors.is_empty(), is_of_set: false };
    if is_inside_a_set() {
        // Other threads may wait for a lock that this thread holds, so that waiting here for another set could
        // deadlock.
        return defer_in_all_sets(close);
    }
    POOL.for_each(|set| {
        let forget = |ready_list: &mut ReadyList| {
            // The number may already refer to another object, which is registered under it.
            let is_stale = |index: &u32| {
                let registered = ready_list.at(*index).target;
                registered.is(target) || Target::has_gone(&(fd, registered))
            };
            if let Some(index) = ready_list.find(fd).filter(is_stale) {
                set.forget(ready_list, index, &survivors);
            }
            while let Some(index) = ready_list.orphan_of(target, fd, survivors.is_empty()) {
                set.forget(ready_list, index, &survivors);
            }
        };
        if set.with_if_free(forget) {
            return;
        }
        if is_inside_a_socket() {
            // The thread inside the set may wait for what this thread holds below the signal handler.
            set.deferred_closes.push(close);
            set.with_if_free(|_| ());
        } else {
            set.with(forget);
        }
    });
}

fn defer_in_all_sets(close: Close) {
    POOL.any(|set| {
        set.deferred_closes.push(close);
        false
    });
}

/// Defers signal handlers until this thread leaves the sets that it is inside; returns `false` if there are none.
pub(crate) fn defer_handlers() -> bool {
    POOL.any(|set| {
        let is_inside = set.lock.is_held_by_this_thread();
        if is_inside {
            set.deferred_closes.defer_handlers();
        }
        is_inside
    })
}

/// Returns whether the caller is a signal handler that has interrupted a thread inside a set.
pub(super) fn is_inside_a_set() -> bool {
    POOL.any(|set| set.lock.is_held_by_this_thread())
}

/// Returns whether the caller is a signal handler that has interrupted a thread inside a connection or listener.
pub(super) fn is_inside_a_socket() -> bool {
    listener::is_inside_a_listener() || crate::connection::is_inside_a_connection()
}
