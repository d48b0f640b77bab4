//! Wakes the threads that sleep on sets.

use super::registration::Target;
use super::set::{POOL, REGISTERED};
use crate::connection::Connection;
use std::sync::atomic::Ordering;

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
    let descriptors = Target::Connection(connection).descriptors();
    POOL.for_each(|set| {
        // A set that this thread is inside, below a signal handler, is skipped: the interrupted wait polls the
        // connection.
        if !set.lock.is_held_by_this_thread() {
            set.with(|ready_list| {
                let registered: Vec<u32> = descriptors.iter().filter_map(|&fd| ready_list.find(fd)).collect();
                set.unpark_for_poll_all(ready_list, registered);
            });
        }
    });
}
