//! Several processes holding one end: after `fork`, and after the descriptor was handed on.
//!
//! Cursors live in the segment, so every holder sees the same position. What is left is exclusion: while more than one
//! process holds the end, a direction is also locked between processes, by a word that names the holder.

use super::{Connection, Lanes, POOL};
use crate::clock::now_ns;
use crate::segment::{Own, Segment};
use crate::system;
use rustix::io::Errno;
use std::sync::atomic::Ordering;

/// A holder that died leaves its lock to the next after this long, once it is seen to be dead.
const SUSPECT_AFTER_NS: u64 = 10_000_000;
/// How long a fork waits for a client that has connected and not said hello.
const HELLO_WAIT_MS: i32 = 100;
/// A lock that cannot be had for this long is a peer's forgery: the words are in memory that it can write.
const GIVE_UP_AFTER_NS: u64 = 5_000_000_000;

/// A direction, locked between processes.
pub(super) struct Shared<'a> {
    segment: &'a Segment,
    word: Own,
}

impl Drop for Shared<'_> {
    fn drop(&mut self) {
        self.segment.swap(self.word, 0);
    }
}

impl Connection {
    /// Waits, but not for long, for a hello that is late.
    fn attach_before_fork(&'static self) {
        if self.attach_if_pending() == Ok(false) {
            system::poll_for(self.lifeline(), libc::POLLIN, HELLO_WAIT_MS);
            let _ = self.attach_if_pending();
        }
    }

    /// Excludes the other processes that hold this end, if there are any. The caller holds the direction's lock in this
    /// process.
    #[inline]
    pub(super) fn share<'a>(&self, lanes: &'a Lanes, word: Own) -> Result<Option<Shared<'a>>, Errno> {
        if lanes.segment.load(Own::Holders) <= 1 {
            Ok(None)
        } else {
            lock_between_processes(&lanes.segment, word).map(Some)
        }
    }
}

#[cold]
fn lock_between_processes(segment: &Segment, word: Own) -> Result<Shared<'_>, Errno> {
    let own = rustix::process::getpid().as_raw_nonzero().get() as u64;
    let started = now_ns();
    loop {
        let Err(holder) = segment.compare_exchange(word, 0, own) else { return Ok(Shared { segment, word }) };
        let waited_ns = now_ns() - started;
        if waited_ns > GIVE_UP_AFTER_NS {
            return Err(Errno::CONNRESET);
        }
        if waited_ns > SUSPECT_AFTER_NS && is_dead(holder) && segment.compare_exchange(word, holder, own).is_ok() {
            return Ok(Shared { segment, word });
        }
        rustix::thread::sched_yield();
    }
}

fn is_dead(process: u64) -> bool {
    let Some(process) = i32::try_from(process).ok().and_then(rustix::process::Pid::from_raw) else { return true };
    rustix::process::test_kill_process(process) == Err(Errno::SRCH)
}

/// Runs `visit` on every open connection of this process.
pub fn for_each_open(mut visit: impl FnMut(&'static Connection)) {
    POOL.for_each(|connection| {
        if connection.is_open.load(Ordering::Acquire) {
            visit(connection);
        }
    });
}

/// Before a fork: no thread is inside a connection while the process is copied, and each has one holder more.
pub fn before_fork() {
    crate::system::note_spawn();
    // One process would take the hello, and the other would wait for it for ever.
    for_each_open(Connection::attach_before_fork);
    for connection in POOL.lock_around_fork() {
        connection.send_lock.lock_until_unlocked();
        connection.receive_lock.lock_until_unlocked();
        connection.details_lock.lock_until_unlocked();
        if connection.is_open.load(Ordering::Relaxed)
            && let Some(lanes) = connection.lanes()
        {
            lanes.segment.add(Own::Holders, 1);
        }
    }
}

/// After a fork, in the parent.
pub fn after_fork_in_parent() {
    for connection in POOL.all_during_fork() {
        connection.details_lock.unlock();
        connection.receive_lock.unlock();
        connection.send_lock.unlock();
    }
    POOL.unlock_after_fork();
}

/// After a fork, in the child, which has one thread: the others' waits do not exist here.
pub fn after_fork_in_child() {
    for connection in POOL.all_during_fork() {
        connection.details_lock.reset();
        connection.receive_lock.reset();
        connection.send_lock.reset();
        if connection.lanes().is_none() {
            connection.is_orphan.store(true, Ordering::Relaxed);
        }
        connection.waiters.store(0, Ordering::Relaxed);
        connection.sleepers.store(0, Ordering::Relaxed);
    }
    POOL.unlock_after_fork();
}
