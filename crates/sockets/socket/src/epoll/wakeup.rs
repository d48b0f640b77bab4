//! Wakes the threads that sleep on sets.

use super::closing::{is_inside_a_set, is_inside_a_socket};
use super::registration::Target;
use super::set::{POOL, REGISTERED};
use crate::connection::Connection;
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

thread_local! {
    /// Connections that this thread, inside a set, has found to use lanes now, and that other sets may hold.
    static SWITCHED: Cell<Vec<&'static Connection>> = const { Cell::new(Vec::new()) };
}

/// Number of connections in the lists of all threads.
static SWITCHED_COUNT: AtomicU32 = AtomicU32::new(0);

/// Notes that a poll inside a set has received the message by which a connection switched to lanes. Other sets that
/// hold the connection do not see the message, and what came with it was sent before they could ask for wakeups.
pub(super) fn note_switch(connection: &'static Connection) {
    let mut switched = SWITCHED.take();
    switched.push(connection);
    SWITCHED.set(switched);
    SWITCHED_COUNT.fetch_add(1, Ordering::Relaxed);
}

/// Returns whether a thread has noted a switch that it has not passed on.
#[inline]
pub(super) fn has_noted_switches() -> bool {
    SWITCHED_COUNT.load(Ordering::Relaxed) > 0
}

/// Makes other sets poll the connections that this thread has noted, when it leaves the outermost set.
#[cold]
pub(super) fn pass_on_switches() {
    if is_inside_a_set() || is_inside_a_socket() {
        return; // Other threads may wait for a lock that this thread holds.
    }
    let switched = SWITCHED.take();
    SWITCHED_COUNT.fetch_sub(switched.len() as u32, Ordering::Relaxed);
    switched.into_iter().for_each(poll_again);
}

/// Forgets what other threads have noted, in the child of a fork, which has none of them.
pub(super) fn forget_switches() {
    SWITCHED.take();
    SWITCHED_COUNT.store(0, Ordering::Relaxed);
}

/// Wakes all threads that sleep on sets, because the time that they may sleep has changed.
pub fn wake_sleepers() {
    POOL.for_each(|set| {
        if set.sleepers.load(Ordering::SeqCst) > 0 {
            set.with(|ready_list| {
                if set.prepare_for_lanes(ready_list).is_ok() {
                    ready_list.wake_sleepers();
                }
            });
        }
    });
}

/// Makes the sets that hold a connection poll it in their next wait, and wakes the threads that sleep on them.
pub fn poll_again(connection: &'static Connection) {
    if REGISTERED.load(Ordering::Relaxed) == 0 {
        return;
    }
    let target = Target::Connection(connection);
    let descriptors = target.descriptors();
    POOL.for_each(|set| {
        // A set that this thread is inside, below a signal handler, is skipped: the interrupted wait polls the
        // connection.
        if !set.lock.is_held_by_this_thread() {
            set.with(|ready_list| {
                let registered = ready_list.registrations_of(target, &descriptors);
                set.unpark_for_poll_all(ready_list, registered);
            });
        }
    });
}
