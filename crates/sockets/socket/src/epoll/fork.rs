//! Handlers that run around a fork.

use super::ready_list::ReadyList;
use super::set::{NESTING, POOL};
use super::wakeup;
use crate::process::lock::Lock;
use std::sync::atomic::Ordering;

/// Locks all sets before a fork, so that no thread is inside one while the process is copied.
pub fn before_fork() {
    while !lock_all_around_fork() {
        rustix::thread::sched_yield();
    }
}

/// Locks all sets. Returns `false`, with nothing locked, if a thread stays inside one: it may be in a signal handler
/// that waits for the list of all sets.
fn lock_all_around_fork() -> bool {
    let sets = POOL.lock_around_fork();
    let locks = || std::iter::once(&NESTING).chain(sets.iter().map(|set| &set.lock));
    let Some(held) = locks().position(|lock| !lock.try_lock_without_guard()) else { return true };
    locks().take(held).for_each(Lock::unlock);
    POOL.unlock_after_fork();
    false
}

/// Unlocks all sets in the parent. Connections that got lanes just before the fork are polled by the next wait.
pub fn after_fork_in_parent() {
    for set in POOL.all_during_fork() {
        // SAFETY: this thread has held the lock of the set since before the fork.
        let ready_list = unsafe { &mut *set.ready_list.get() };
        let switched = ready_list.switched();
        set.unpark_for_poll_all(ready_list, switched);
        ready_list.after_fork_in_parent();
        set.lock.unlock();
    }
    NESTING.unlock();
    POOL.unlock_after_fork();
}

/// Resets all sets in the child, which has one thread. The kernel objects of the sets are shared with the parent.
pub fn after_fork_in_child() {
    wakeup::forget_switches();
    for set in POOL.all_during_fork() {
        set.lock.reset();
        set.sleepers.store(0, Ordering::Relaxed);
        set.with(ReadyList::after_fork_in_child);
    }
    NESTING.unlock();
    POOL.unlock_after_fork();
}
