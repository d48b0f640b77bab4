//! Forks, ends of processes and runs of other programs: who holds a connection, and who may use lanes.
//!
//! While several processes hold a connection it stays on TCP; [`crate::holders`] counts them. A process that finds
//! itself to be the only one uses lanes again. This module does that for connections that have not proved busy, and
//! calls `connection` for the others.

use crate::connection;
use crate::holders;
use crate::table::{self, Entry};
use crate::young::Young;
use socket::process::lock::Lock;
use std::cell::Cell;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Held while this process forks.
static FORKS: Lock = Lock::new();
/// Incremented when a fork begins and when it has ended: odd while one is in progress.
static EPOCH: AtomicU64 = AtomicU64::new(0);
/// This process has released holds, and may come back from a failed `exec`.
static HAS_RELEASED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The epoch of the last fork that this thread has begun.
    static LAST_FORK: Cell<u64> = const { Cell::new(0) };
    /// The record of the child that it was to create.
    static CHILDS_RECORD: Cell<holders::ChildsRecord> = const { Cell::new(holders::ChildsRecord::NONE) };
}

/// The time between two forks, as the creator of a descriptor sees it.
#[derive(Debug, Clone, Copy)]
pub struct Epoch(u64);

impl Epoch {
    /// Returns the present one. Call this before the descriptor is created.
    #[inline]
    pub fn now() -> Self {
        Self(EPOCH.load(Ordering::SeqCst))
    }

    /// Returns whether a child may have got a copy of a descriptor that was created and put in the table since: the
    /// fork has not seen it there.
    #[inline]
    pub fn may_have_forked(self) -> bool {
        // The entry is in the table before this load; a fork changes the epoch before it reads the table.
        std::sync::atomic::fence(Ordering::SeqCst);
        self.0 % 2 == 1 || EPOCH.load(Ordering::SeqCst) != self.0
    }
}

/// Counts the child that is about to be created as a holder of every connection that has not proved busy.
pub fn before_fork() {
    FORKS.lock_without_guard();
    let epoch = EPOCH.fetch_add(1, Ordering::SeqCst) + 1;
    LAST_FORK.set(epoch);
    std::sync::atomic::fence(Ordering::SeqCst);
    table::for_each(0..=RawFd::MAX, |fd, entry| {
        if let Entry::Young(_) = entry {
            share(fd);
        }
    });
}

fn share(fd: RawFd) {
    while let entry @ Entry::Young(young) = table::get(fd) {
        let (after, new) = match young.hold() {
            Some(hold) if hold.add_child() => return,
            // Another thread takes over at this moment, or there is no slot: both processes leave it to the kernel.
            Some(_) => (Entry::None, None),
            None => match holders::share() {
                Some(hold) => (Entry::Young(young.shared(hold)), Some(hold)),
                None => (Entry::None, None),
            },
        };
        if table::replace(fd, entry, after) {
            return;
        }
        if let Some(hold) = new {
            holders::unshare(hold);
        }
    }
}

/// Continues after a fork, in the parent.
pub fn after_fork_in_parent() {
    CHILDS_RECORD.set(holders::after_fork_in_parent());
    EPOCH.fetch_add(1, Ordering::SeqCst);
    FORKS.unlock();
}

/// Undoes what [`before_fork`] has counted, because this thread's last fork has failed. If another thread has forked
/// since, nobody knows any more which connections were counted: they stay on TCP.
pub fn after_failed_fork() {
    let _one_at_a_time = FORKS.lock();
    if EPOCH.load(Ordering::SeqCst) != LAST_FORK.get() + 1 {
        return;
    }
    table::for_each(0..=RawFd::MAX, |_, entry| {
        if let Entry::Young(young) = entry
            && let Some(hold) = young.hold()
        {
            hold.release_of_child();
        }
    });
    connection::after_failed_fork();
    CHILDS_RECORD.take().free();
}

/// Continues in the child.
pub fn after_fork_in_child() {
    EPOCH.fetch_add(1, Ordering::SeqCst);
    FORKS.reset();
    holders::after_fork_in_child();
    HAS_RELEASED.store(false, Ordering::Relaxed);
    table::for_each(0..=RawFd::MAX, |fd, entry| {
        if let Entry::Young(young) = entry {
            // What is not shared was created by another thread while this one forked.
            let after = if young.hold().is_some() { Entry::Young(young.in_child()) } else { Entry::None };
            table::set(fd, after);
        }
    });
}

/// Returns whether no other process holds a connection, now that those that were killed do not.
pub fn is_sole(hold: holders::Hold) -> bool {
    hold.is_sole() || {
        holders::release_those_of_killed();
        hold.is_sole()
    }
}

/// Makes a connection one that no other process holds, if there is none.
pub fn take_over(fd: RawFd, young: Young) {
    let Some(hold) = young.hold() else { return };
    if !young.may_take_over() || !is_sole(hold) || !hold.take_over() {
        return;
    }
    // Calls of other threads change the counters meanwhile. A fork replaces the entry, because the hold is void.
    while let entry @ Entry::Young(now) = table::get(fd)
        && now.number() == young.number()
        && now.hold() == Some(hold)
    {
        table::replace(fd, entry, Entry::Young(now.taken_over()));
    }
}

/// Releases the hold on a connection whose descriptor is about to be closed. A call of another thread that is in the
/// kernel goes on after the close, and may write or take bytes: then the connection stays counted.
pub fn release(young: Young) {
    if let Some(hold) = young.hold()
        && young.is_idle()
        && !young.is_released()
    {
        hold.release();
    }
}

/// Notes that the library forgets a connection, which somebody whom it does not know may get.
pub fn leave_counted(young: Young) {
    if let Some(hold) = young.hold() {
        hold.leave_counted();
    }
}

/// Returns whether this process has one thread; `false` if that cannot be found out.
pub fn is_only_thread() -> bool {
    // The links of a directory are its subdirectories and two more (proc(5)).
    rustix::fs::stat(c"/proc/self/task").is_ok_and(|stat| stat.st_nlink == 3)
}

/// Releases the holds on all connections. This process should not use these any more.
pub fn release_all() {
    HAS_RELEASED.store(true, Ordering::Relaxed);
    table::for_each(0..=RawFd::MAX, |fd, entry| match entry {
        Entry::Young(young) => release_young(fd, young),
        Entry::Connection(connection) => connection.release_hold(),
        Entry::None | Entry::Set(_) => {}
    });
    holders::end_process();
}

fn release_young(fd: RawFd, young: Young) {
    let can_release = young.hold().is_some() && young.is_idle() && !young.is_released();
    if can_release && table::replace(fd, Entry::Young(young), Entry::Young(young.with_released(true))) {
        release(young);
    }
}

/// Takes the released holds again, because this process goes on: the program that it was about to run could not be run.
pub fn hold_all_again() {
    if HAS_RELEASED.swap(false, Ordering::Relaxed) {
        table::for_each(0..=RawFd::MAX, |fd, entry| match entry {
            Entry::Young(young) if young.is_released() => {
                hold_again(fd, young);
            }
            Entry::Connection(connection) => connection.hold_again(),
            _ => {}
        });
    }
}

/// Takes the released hold on a connection again. Returns `false` if the connection was taken over meanwhile, and is
/// left to the kernel.
///
/// This process then never uses a lane of the connection. That does not make its use of TCP safe: bytes that it sends
/// are not where the other process and the peer expect them, and both reset the connection when they find that. It
/// suffices for programs that end, or close the descriptor, after a failed `exec`. A program that goes on with it must
/// share it with a process that uses it too, in the time between `exec` and its failure, and both at once.
#[cold]
pub fn hold_again(fd: RawFd, young: Young) -> bool {
    let is_held = young.hold().is_some_and(holders::Hold::add);
    let after = if is_held { Entry::Young(young.with_released(false)) } else { Entry::None };
    table::replace(fd, Entry::Young(young), after);
    is_held
}
