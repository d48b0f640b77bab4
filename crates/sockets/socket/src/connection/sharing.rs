//! An endpoint that several processes hold, after `fork` or after its descriptor was transferred.
//!
//! Cursors are in the segment, so every holder sees the same positions. What remains is mutual exclusion: while more
//! than one process holds the endpoint, a direction is also locked between processes, by a word that names the lock's
//! holder.

use super::lanes::Lanes;
use super::{Connection, POOL};
use crate::process::clock::{TICKS_PER_MILLISECOND, now_ns, ticks};
use crate::process::others::{Activity, activity_of, has_socket};
use crate::process::system::inode_of;
use crate::process::{blocking, identity, sandbox, system};
use rustix::io::Errno;
use segment::{HOLDERS_NAMED_MAX, OwnState, Segment};
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of waits for a lock after which its holder is checked, so that a dead one loses the lock.
const SUSPECT_AFTER_WAITS: u32 = 10;
/// Interval at which a connection with several holders checks which of them are alive.
const HOLDERS_CHECK_TICKS: u64 = 10 * TICKS_PER_MILLISECOND;
/// How long a fork waits for the handshakes of all clients together.
const HANDSHAKES_WAIT_NS: u64 = 100_000_000;
/// How long one attempt waits for a lock.
const LOCK_WAIT_NS: u64 = 1_000_000;
/// The same while the holder is stopped, in milliseconds, in which the thread sleeps.
const STOPPED_WAIT_MS: i32 = 1;
/// Number of consecutive failures to take a lock after which it is checked whether its holder can have taken it: the
/// peer may have forged the word, which is in memory that it can write.
pub(super) const LOCK_WAITS_MAX: u32 = 300;

/// The lock of a direction between processes.
pub(super) struct ProcessGuard<'a> {
    segment: &'a Segment,
    word: OwnState,
}

impl Drop for ProcessGuard<'_> {
    fn drop(&mut self) {
        self.segment.swap(self.word, 0);
    }
}

impl Connection {
    /// Waits for a late handshake, for a short time and only once.
    fn attach_before_fork(&'static self, deadline_ns: u64) {
        if self.attach_if_pending() == Ok(false) && !self.was_handshake_awaited.swap(true, Ordering::Relaxed) {
            let left_ms = deadline_ns.saturating_sub(now_ns()).div_ceil(1_000_000);
            blocking::poll_for(self.lifeline(), libc::POLLIN, i32::try_from(left_ms).unwrap_or(0));
            let _ = self.attach_if_pending();
        }
    }

    /// Waits for a late handshake before the connection is transferred to another process.
    pub fn await_handshake(&'static self) {
        self.attach_before_fork(now_ns().saturating_add(HANDSHAKES_WAIT_NS));
    }

    /// Returns whether another process can hold this endpoint: it has been transferred, or this process has spawned a
    /// child since. The segment's own count of holders may have been written by a peer.
    #[inline(always)] // Called by every send and receive.
    pub(super) fn may_have_other_holders(&self) -> bool {
        self.spawns_at_open.load(Ordering::Relaxed) != system::spawns() || self.is_transferred.load(Ordering::Relaxed)
    }

    /// Returns whether other processes may hold this endpoint now.
    #[inline]
    pub(super) fn has_other_holders(&self, lanes: &Lanes) -> bool {
        self.may_have_other_holders() && lanes.segment.load(OwnState::Holders) > 1
    }

    /// Excludes the other processes that hold this endpoint, if there are any. The caller holds the direction's lock in
    /// this process.
    ///
    /// # Errors
    /// `AGAIN` if another process holds the direction for longer than it takes to move bytes: a call that may block
    /// then waits as if there were nothing to receive or no room. `CONNRESET` if the word is forged.
    #[inline]
    pub(super) fn lock_across_processes<'a>(
        &self,
        lanes: &'a Lanes,
        word: OwnState,
    ) -> Result<Option<ProcessGuard<'a>>, Errno> {
        if !self.has_other_holders(lanes) {
            return Ok(None);
        }
        self.lock_between_processes(&lanes.segment, word).map(Some)
    }

    /// Does what [`Connection::lock_across_processes`] does, and waits instead of returning `AGAIN`.
    pub(super) fn lock_across_processes_blocking<'a>(
        &self,
        lanes: &'a Lanes,
        word: OwnState,
    ) -> Result<Option<ProcessGuard<'a>>, Errno> {
        if !self.has_other_holders(lanes) {
            return Ok(None);
        }
        loop {
            match self.lock_between_processes(&lanes.segment, word) {
                Err(Errno::AGAIN) => {}
                locked => return locked.map(Some),
            }
        }
    }

    /// Does what [`Connection::lock_across_processes`] does, and waits if the program's calls block.
    pub(super) fn lock_as_program_waits<'a>(
        &self,
        lanes: &'a Lanes,
        word: OwnState,
    ) -> Result<Option<ProcessGuard<'a>>, Errno> {
        if self.is_nonblocking.load(Ordering::Relaxed) {
            self.lock_across_processes(lanes, word)
        } else {
            self.lock_across_processes_blocking(lanes, word)
        }
    }

    /// Takes the lock `word` between processes, waiting for a short time.
    #[cold]
    fn lock_between_processes<'a>(&self, segment: &'a Segment, word: OwnState) -> Result<ProcessGuard<'a>, Errno> {
        if self.lock_waits.load(Ordering::Relaxed) > LOCK_WAITS_MAX {
            return Err(Errno::CONNRESET);
        }
        let own = identity::own_process() as u64;
        let Err(holder) = self.wait_for_lock(segment, word, own) else {
            self.lock_waits.store(0, Ordering::Relaxed);
            return Ok(ProcessGuard { segment, word });
        };
        let waited = self.lock_waits.fetch_add(1, Ordering::Relaxed);
        let is_abandoned = waited >= SUSPECT_AFTER_WAITS && has_ended(holder);
        if is_abandoned && segment.compare_exchange(word, holder, own).is_ok() {
            self.lock_waits.store(0, Ordering::Relaxed);
            return Ok(ProcessGuard { segment, word });
        }
        if waited < LOCK_WAITS_MAX {
            return Err(Errno::AGAIN);
        }
        if holder == own || !self.may_be_locked_by(holder) {
            return Err(Errno::CONNRESET);
        }
        // Checked again after as many waits.
        self.lock_waits.store(SUSPECT_AFTER_WAITS, Ordering::Relaxed);
        Err(Errno::AGAIN)
    }

    /// Takes a lock between processes if it becomes free soon. The error is the holder.
    fn wait_for_lock(&self, segment: &Segment, word: OwnState, own: u64) -> Result<(), u64> {
        let is_suspect = self.lock_waits.load(Ordering::Relaxed) >= SUSPECT_AFTER_WAITS;
        if is_suspect && process_of(segment.load(word)).is_some_and(|holder| activity_of(holder) == Activity::Stopped) {
            blocking::sleep_ms(STOPPED_WAIT_MS);
            return segment.compare_exchange(word, 0, own).map(|_| ());
        }
        lock_word_briefly(segment, word, own)
    }

    /// Returns whether the lock of a direction can be that of `holder`, which has not released it for long.
    ///
    /// The kernel knows which processes hold the endpoint, because they have its lifeline open. One that is inside a
    /// lane is never in a system call that blocks, so it is stopped or waits for a processor. All others have not taken
    /// the lock: the peer has forged the word.
    fn may_be_locked_by(&self, holder: u64) -> bool {
        let Some(holder) = process_of(holder).filter(|_| !sandbox::is_confined()) else { return false };
        let is_inside = matches!(activity_of(holder), Activity::Stopped | Activity::Runs);
        is_inside && inode_of(self.lifeline()).is_some_and(|inode| has_socket(holder, inode))
    }

    /// Counts this process, once, among the users: the processes that wait at the endpoint. A process that only sends,
    /// or receives what has arrived, relies on no ring and does not keep users from sleeping.
    #[inline]
    pub(super) fn count_as_user(&self, lanes: &Lanes) {
        if self.has_other_holders(lanes) && !self.is_user.load(Ordering::Relaxed) {
            self.is_user.store(true, Ordering::Relaxed);
            mark_as_user(&lanes.segment);
        }
    }

    /// Removes this process from the users before a fork, while none of its threads sleeps on the lifeline. A later
    /// sleeper counts it again.
    fn uncount_user(&self, segment: &Segment) {
        if self.is_user.swap(false, Ordering::Relaxed) {
            if let Some((index, entry)) = find_holder_entry(segment, own_holder_id()) {
                segment.replace_holder(index, entry, entry & !USER_FLAG);
            }
            segment.add(OwnState::Users, u64::MAX);
        }
    }

    /// Removes this process from the list of holders, and from the users if it is one.
    pub(super) fn remove_holder_entry(&self, segment: &Segment) {
        let entry = find_holder_entry(segment, own_holder_id());
        let removed = entry.filter(|&(index, entry)| segment.replace_holder(index, entry, 0));
        let is_user = removed.map_or(self.is_user.load(Ordering::Relaxed), |(_, entry)| entry & USER_FLAG != 0);
        if is_user {
            segment.add(OwnState::Users, u64::MAX);
        }
    }

    /// Returns whether no other process uses this endpoint. Checks periodically for processes that were killed, or
    /// ended without closing.
    pub(super) fn is_sole_user(&self, lanes: &Lanes) -> bool {
        if !self.has_other_holders(lanes) {
            return true;
        }
        self.count_as_user(lanes);
        let now = ticks();
        if now.wrapping_sub(self.holders_checked_ticks.load(Ordering::Relaxed)) > HOLDERS_CHECK_TICKS {
            self.holders_checked_ticks.store(now, Ordering::Relaxed);
            remove_dead_holders(&lanes.segment);
        }
        !self.has_other_holders(lanes) || lanes.segment.load(OwnState::Users) <= 1
    }
}

/// Takes a lock between processes within [`LOCK_WAIT_NS`]. The error is the holder.
fn lock_word_briefly(segment: &Segment, word: OwnState, own: u64) -> Result<(), u64> {
    let started = now_ns();
    loop {
        match segment.compare_exchange(word, 0, own) {
            Ok(_) => return Ok(()),
            Err(holder) if now_ns() - started > LOCK_WAIT_NS => return Err(holder),
            Err(_) if sandbox::is_confined() => std::hint::spin_loop(),
            Err(_) => rustix::thread::sched_yield(),
        }
    }
}

/// Returns the process that a word names.
fn process_of(word: u64) -> Option<i32> {
    i32::try_from(word).ok().filter(|process| *process > 0)
}

/// Returns whether a process of this PID namespace does not exist any more.
fn is_dead(process: u64) -> bool {
    if sandbox::is_confined() {
        return false; // The filter may forbid asking.
    }
    let Some(process) = process_of(process).and_then(rustix::process::Pid::from_raw) else { return true };
    rustix::process::test_kill_process(process) == Err(Errno::SRCH)
}

/// Returns whether a process of this PID namespace runs no more, even if its parent has not noticed that yet.
fn has_ended(process: u64) -> bool {
    let is_zombie = || process_of(process).is_some_and(|process| activity_of(process) == Activity::Dead);
    is_dead(process) || (!sandbox::is_confined() && is_zombie())
}

/// Returns the open connection of this process whose endpoint `segment` is, if there is one.
pub fn find_by_segment(segment: &Segment) -> Option<&'static Connection> {
    let mut holder = None;
    for_each_open(|connection| {
        let is_same = |lanes: &Lanes| {
            lanes.segment.side() == segment.side()
                && lanes.segment.secrets() == segment.secrets()
                && inode_of(connection.lifeline()) == Some(segment.lifeline_inode())
        };
        if connection.lanes().is_some_and(is_same) {
            holder = Some(connection);
        }
    });
    holder
}

/// Returns the open connection of this process whose lifeline has this inode, if there is one.
pub fn find_by_lifeline_inode(inode: Option<u64>) -> Option<&'static Connection> {
    let mut found = None;
    for_each_open(|connection| {
        if inode.is_some() && connection.is_on_lifeline() && inode_of(connection.lifeline()) == inode {
            found = Some(connection);
        }
    });
    found
}

/// Calls `visit` with every open connection of this process.
pub fn for_each_open(mut visit: impl FnMut(&'static Connection)) {
    POOL.for_each(|connection| {
        if connection.is_open() {
            visit(connection);
        }
    });
}

/// Prepares for a fork: takes all locks, so that no thread is inside a connection while the process is copied, and
/// counts one holder more for each connection.
pub fn before_fork() {
    // Before the child is counted: an endpoint that two processes may hold gets no lanes any more.
    for_each_open(Connection::settle_lifeline);
    crate::process::system::note_spawn();
    // One process would receive the handshake, and the other would wait for it forever.
    let deadline_ns = now_ns().saturating_add(HANDSHAKES_WAIT_NS);
    for_each_open(|connection| connection.attach_before_fork(deadline_ns));
    for connection in POOL.lock_around_fork() {
        connection.send_lock.lock_without_guard();
        connection.receive_lock.lock_without_guard();
        connection.details.lock().lock_without_guard();
        if connection.is_open()
            && let Some(lanes) = connection.lanes()
        {
            lanes.segment.add(OwnState::Holders, 1);
            if !connection.sleepers.is_any() {
                connection.uncount_user(&lanes.segment);
            }
        }
    }
}

/// The bit of a holder's entry by which its process is a user. Process IDs have 22 bits at most.
const USER_FLAG: u64 = 1 << 31;

/// The result of [`own_holder_id`] in this process; 0 before.
static OWN_HOLDER_ID: AtomicU64 = AtomicU64::new(0);

/// Returns the entry of this process in the list of holders: its process ID, and the inode of its PID namespace in the
/// upper half. 0 if the kernel does not tell.
fn own_holder_id() -> u64 {
    let known = OWN_HOLDER_ID.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    let id = find_own_holder_id();
    OWN_HOLDER_ID.store(id, Ordering::Relaxed);
    id
}

/// Asks the kernel for what [`own_holder_id`] returns.
fn find_own_holder_id() -> u64 {
    let namespace = rustix::fs::stat("/proc/self/ns/pid").map_or(0, |stat| stat.st_ino);
    match u32::try_from(namespace) {
        Ok(namespace) if namespace != 0 => {
            u64::from(namespace) << 32 | rustix::process::getpid().as_raw_nonzero().get() as u64
        }
        _ => 0,
    }
}

/// Returns the index and the entry of a process in the list of holders.
fn find_holder_entry(segment: &Segment, id: u64) -> Option<(usize, u64)> {
    let entries = (0..HOLDERS_NAMED_MAX).map(|index| (index, segment.holder(index)));
    entries.into_iter().find(|&(_, entry)| id != 0 && entry & !USER_FLAG == id)
}

/// Adds this process to the list of holders, so that the others can detect its death. A process that finds no room, or
/// has no ID, counts as alive forever. Returns `false` if the process is on the list already.
fn add_holder_entry(segment: &Segment, flags: u64) -> bool {
    let id = own_holder_id();
    if find_holder_entry(segment, id).is_some() {
        return false;
    }
    let _ = (0..HOLDERS_NAMED_MAX).find(|&index| id != 0 && segment.replace_holder(index, 0, id | flags));
    true
}

/// Registers this process as a holder. The process that sets an endpoint up is a user. Of an endpoint that was already
/// set up, this process may have been a holder before `exec`, and is not counted twice. Returns whether the process is
/// known to be counted as a user.
pub(super) fn register_holder(segment: &Segment) -> bool {
    if !segment.is_adopted() {
        add_holder_entry(segment, USER_FLAG);
        return true;
    }
    if add_holder_entry(segment, 0) {
        segment.add(OwnState::Holders, 1);
    }
    false
}

/// Marks this process as a user, unless the program that it was before `exec` has done so.
#[cold]
fn mark_as_user(segment: &Segment) {
    let is_new = match find_holder_entry(segment, own_holder_id()) {
        Some((index, entry)) => entry & USER_FLAG == 0 && segment.replace_holder(index, entry, entry | USER_FLAG),
        None => true,
    };
    if is_new {
        segment.add(OwnState::Users, 1);
    }
}

/// Removes dead holders from the list and from the counts.
#[cold]
fn remove_dead_holders(segment: &Segment) {
    let namespace = own_holder_id() >> 32;
    for index in 0..HOLDERS_NAMED_MAX {
        let holder = segment.holder(index);
        let is_dead_holder =
            holder >> 32 == namespace && holder != 0 && is_dead(holder & !USER_FLAG & u64::from(u32::MAX));
        if is_dead_holder && segment.load(OwnState::Holders) > 1 && segment.replace_holder(index, holder, 0) {
            segment.add(OwnState::Holders, u64::MAX);
            if holder & USER_FLAG != 0 {
                segment.add(OwnState::Users, u64::MAX);
            }
        }
    }
}

/// Releases all locks in the parent after a fork.
pub fn after_fork_in_parent() {
    for connection in POOL.all_during_fork() {
        connection.details.lock().unlock();
        connection.receive_lock.unlock();
        connection.send_lock.unlock();
    }
    POOL.unlock_after_fork();
}

/// Resets all locks in the child after a fork, which has one thread: the waits of other threads do not exist here.
pub fn after_fork_in_child() {
    OWN_HOLDER_ID.store(0, Ordering::Relaxed);
    for connection in POOL.all_during_fork() {
        connection.details.lock().reset();
        connection.receive_lock.reset();
        connection.send_lock.reset();
        if connection.awaits_handshake.load(Ordering::Relaxed) {
            connection.is_orphan.store(true, Ordering::Relaxed);
        }
        if connection.is_open()
            && let Some(lanes) = connection.lanes()
        {
            add_holder_entry(&lanes.segment, 0);
            connection.is_user.store(false, Ordering::Relaxed);
        }
        connection.lifetime.forget_waiters();
        connection.sleepers.forget();
    }
    POOL.unlock_after_fork();
    POOL.for_each(|connection| {
        if connection.calls.forget() {
            connection.close_now();
        }
    });
}
