//! Connections around a fork.
//!
//! The child holds every connection too, and may use each. The lanes and the bell belong to one process, so that all
//! connections go back to TCP, and stay there as long as several processes hold them.

use super::{Connection, MEETINGS, POOL};
use crate::kernel::Tcp;
use socket::process::clock::now_ns;
use std::sync::atomic::Ordering;

impl Connection {
    /// Returns a descriptor for the connection, if it is one now.
    fn any_descriptor(&self) -> Option<Tcp> {
        let of_program = self.descriptors.lock().and_then(|descriptors| descriptors.first().copied());
        of_program.or_else(|| self.calls.retained()).map(Tcp)
    }
}

/// Ends the lanes of a process that is about to exit, as closes of its descriptors do: who holds them as well, or has
/// left bytes in the lane, gets the rest by TCP.
pub fn before_exit() {
    POOL.for_each(|connection| {
        let Some(tcp) = connection.any_descriptor() else { return };
        if let Some(mut sender) = connection.sender.lock() {
            sender.finish_stream(tcp, connection.role());
        }
        // The kernel ends an announcement with the process, but leaves its file.
        if let Some(mut meeting) = connection.meeting.lock() {
            meeting.withdraw();
        }
    });
}

/// Returns whether this thread holds a lock of a connection; if so, signal handlers are deferred until it releases it.
pub fn defers_handlers() -> bool {
    POOL.any(|connection| {
        connection.sender.defers_handlers()
            | connection.receiver.defers_handlers()
            | connection.meeting.defers_handlers()
            | connection.descriptors.defers_handlers()
            | connection.watchers.defers_handlers()
    })
}

/// How long a fork waits at most until what peers have left in lanes is in TCP.
const WAIT_NS: u64 = 1_000_000_000;

/// Prepares for a fork: nothing changes a connection until [`after_fork_in_parent`] or [`after_fork_in_child`].
///
/// Sets are locked before: a thread that holds the lock of a set waits for those of its connections, and a wait must
/// not find what is in neither a lane nor TCP while both ends of a connection go back.
pub fn before_fork() {
    let deadline_ns = now_ns().saturating_add(WAIT_NS);
    POOL.for_each(|connection| {
        if let Some(tcp) = connection.any_descriptor() {
            connection.share(tcp, deadline_ns);
        }
    });
    for connection in POOL.lock_around_fork() {
        connection.meeting.lock_before_fork();
        connection.sender.lock_before_fork();
        connection.receiver.lock_before_fork();
    }
}

/// Continues after a fork.
pub fn after_fork_in_parent() {
    for connection in POOL.all_during_fork() {
        connection.receiver.unlock_after_fork();
        connection.sender.unlock_after_fork();
        connection.meeting.unlock_after_fork();
    }
    POOL.unlock_after_fork();
    // The sets were locked when the connections went back.
    POOL.for_each(|connection| connection.for_each_watcher(|set| set.note_path(connection)));
}

/// Continues in the child, which has only the thread that forked.
pub fn after_fork_in_child() {
    MEETINGS.reset();
    for connection in POOL.all_during_fork() {
        connection.receiver.reset_after_fork();
        connection.sender.reset_after_fork();
        connection.meeting.reset_after_fork();
        connection.descriptors.reset_after_fork();
        connection.watchers.reset_after_fork();
        connection.sleepers.store(0, Ordering::Relaxed);
        connection.calls.reset_after_fork();
    }
    MEETINGS.reset();
    POOL.unlock_after_fork();
    POOL.for_each(|connection| {
        let had_calls = connection.sender.lock().is_some_and(|mut sender| sender.leave_to_parent())
            | connection.receiver.lock().is_some_and(|mut receiver| receiver.leave_to_parent());
        let misses_bytes = connection.sender.lock().is_none_or(|sender| sender.misses_bytes());
        // A call may be of the thread that has forked, in a signal handler, and go on here. What a set of both
        // processes reports of lanes would reach one of them.
        let is_watched = connection.watchers.lock().is_none_or(|watchers| !watchers.is_empty());
        // The parent's bell would not hang up while the child holds it.
        if let Some(mut meeting) = connection.meeting.lock() {
            meeting.leave_to_parent(had_calls || misses_bytes || is_watched);
            connection.bell_slot.store(-1, Ordering::Release);
        }
    });
}
