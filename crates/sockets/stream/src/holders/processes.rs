//! Which processes of a family hold which connections, so that the holds of one that was killed can be released.
//!
//! | state of a record | event | next state |
//! |---|---|---|
//! | free | a process is about to create a child that will hold connections, or holds one itself | starting |
//! | starting | the child, or the process, has locked the record | running |
//! | starting | there is no child, because the fork has failed | free |
//! | running | the process gives up its descriptor, and with that the lock | starting |
//! | running | the process has no hold any more and is about to end | free |
//! | running | another process finds the record unlocked | ending |
//! | ending | that process has released the holds | free |
//!
//! Each state has a number that grows with each use of the record, so that a process which is late does not end the
//! next use. The lock is one of an open file description (`F_OFD_SETLK`), of which each process has its own: the kernel
//! releases it when the process ends or runs another program. Its copy in a child of `vfork` lasts until the child runs
//! a program, which delays the discovery and nothing else.
//!
//! A hold is recorded after it was counted, and removed before it is released. A process that is killed in between, or
//! before it has locked its record, stays counted, which is safe.

use rustix::fs::{Mode, OFlags};
use socket::descriptor::hidden;
use socket::process::system::raw_syscall;
use std::ffi::CStr;
use std::io::Write;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

const FREE: u64 = 0;
const STARTING: u64 = 1;
const RUNNING: u64 = 2;
const ENDING: u64 = 3;
const STATE_BITS: u32 = 2;
const STATE: u64 = (1 << STATE_BITS) - 1;

/// What one process holds: by the index of a slot, one bit.
pub(super) type Holds<const WORDS: usize> = [AtomicU64; WORDS];

/// The records of a family. All zeros are free records.
#[derive(Clone, Copy)]
pub(super) struct Processes<'a, const WORDS: usize> {
    /// The states, and above each the number of uses of the record. Together, so that a search touches few pages.
    pub states: &'a [AtomicU64],
    pub holds: &'a [Holds<WORDS>],
}

/// Replaces a state, if the word is `before`. Returns whether it was.
fn change(word: &AtomicU64, before: u64, state: u64) -> bool {
    word.compare_exchange(before, before & !STATE | state, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

impl<const WORDS: usize> Processes<'_, WORDS> {
    /// Reserves a record. `None` if none is free.
    pub fn allocate(self) -> Option<usize> {
        self.states.iter().position(|word| {
            let free = word.load(Ordering::Relaxed);
            let starting = ((free >> STATE_BITS) + 1) << STATE_BITS | STARTING;
            free & STATE == FREE && word.compare_exchange(free, starting, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })
    }

    /// Notes that the record's process has locked it.
    pub fn begin(self, record: usize) {
        self.end_start(record, RUNNING);
    }

    /// Frees a record whose process does not exist; the caller has released its holds.
    pub fn free(self, record: usize) {
        self.holds[record].iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.end_start(record, FREE);
    }

    /// Keeps the holds of this process counted when it ends, because it is about to unlock its record.
    pub fn keep_counted(self, record: usize) {
        let running = self.states[record].load(Ordering::Acquire);
        if running & STATE == RUNNING {
            change(&self.states[record], running, STARTING);
        }
    }

    /// Frees the record of this process, if it has no hold any more. Returns whether it has.
    pub fn end_if_empty(self, record: usize) -> bool {
        let running = self.states[record].load(Ordering::Acquire);
        running & STATE == RUNNING
            && self.holds[record].iter().all(|word| word.load(Ordering::Relaxed) == 0)
            && change(&self.states[record], running, FREE)
    }

    fn end_start(self, record: usize, state: u64) {
        let before = self.states[record].load(Ordering::Acquire) & !STATE | STARTING;
        change(&self.states[record], before, state);
    }

    /// Records a hold, which was counted.
    pub fn add(self, record: usize, index: u16) {
        self.holds[record][usize::from(index) / 64].fetch_or(1 << (index % 64), Ordering::AcqRel);
    }

    /// Removes a hold that is about to be released. Returns whether it was recorded.
    pub fn remove(self, record: usize, index: u16) -> bool {
        let bit = 1 << (index % 64);
        self.holds[record][usize::from(index) / 64].fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }

    /// Calls `release` for the holds of a process that has locked its record and is killed by now. Then the record is
    /// free.
    pub fn release_if(self, record: usize, is_killed: impl Fn(usize) -> bool, release: impl Fn(u16)) {
        let word = &self.states[record];
        let running = word.load(Ordering::Acquire);
        if running & STATE != RUNNING || !is_killed(record) || !change(word, running, ENDING) {
            return;
        }
        for (number, holds) in self.holds[record].iter().enumerate() {
            let mut holds = holds.swap(0, Ordering::AcqRel);
            while holds != 0 {
                release((number * 64) as u16 + holds.trailing_zeros() as u16);
                holds &= holds - 1;
            }
        }
        change(word, running & !STATE | ENDING, FREE);
    }
}

/// Replaces the open file description of an inherited descriptor by another one of the same file, whose locks are this
/// process's own. Returns whether it has.
pub(super) fn reopen(number: RawFd) -> bool {
    // On the stack: in the child of a fork, another thread of the parent may have held the allocator's locks.
    let mut path = [0_u8; 32];
    let Ok(()) = write!(&mut path[..], "/proc/self/fd/{number}") else { return false };
    let Ok(path) = CStr::from_bytes_until_nul(&path) else { return false };
    let Ok(own) = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) else { return false };
    let arguments = [own.as_raw_fd() as usize, number as usize, libc::O_CLOEXEC as usize];
    // SAFETY: the call takes no pointers, and the number is a descriptor of this crate.
    let replaced = unsafe { raw_syscall(libc::SYS_dup3, arguments) };
    hidden::close(own);
    replaced >= 0
}

/// Locks a record for as long as this process runs its program. Returns whether it has.
pub(super) fn lock(number: RawFd, record: usize) -> bool {
    control_lock(number, libc::F_OFD_SETLK, record).is_some()
}

/// Returns whether the kernel says that no process has locked a record.
pub(super) fn is_unlocked(number: RawFd, record: usize) -> bool {
    control_lock(number, libc::F_OFD_GETLK, record) == Some(libc::F_UNLCK as i16)
}

/// Makes a call about the lock of a record. Returns the kind of lock that it has stored.
fn control_lock(number: RawFd, command: i32, record: usize) -> Option<i16> {
    // SAFETY: all zeros are a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_whence) = (libc::F_WRLCK as i16, libc::SEEK_SET as i16);
    (lock.l_start, lock.l_len) = (record as i64, 1);
    let arguments = [number as usize, command as usize, (&raw mut lock).expose_provenance()];
    // SAFETY: the structure is a local.
    let result = unsafe { raw_syscall(libc::SYS_fcntl, arguments) };
    (result >= 0).then_some(lock.l_type)
}
