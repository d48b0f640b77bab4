//! poll and select over lanes.
//!
//! A call that names no descriptor of ours is the kernel's at once. Otherwise connections are looked at in memory, the
//! others in the kernel; then the thread spins for a while, has the peers ring, and sleeps in the kernel's `ppoll` on
//! everything together.

mod call;
mod confined;
mod entries;
mod select;
#[cfg(test)]
mod tests;

pub use confined::poll_entries_confined;
pub use select::select;

use crate::process::blocking;
use call::{Deadline, has_answer, poll_lanes};
use entries::{STACK_ENTRIES, is_ours};
use libc::{pollfd, sigset_t};
use rustix::io::Errno;
use rustix::process::Resource;

const MILLISECOND_NS: u64 = 1_000_000;
/// Entries of a call in a process under a system call filter.
const CONFINED_ENTRIES_MAX: u64 = 1 << 20;

/// Whether a call may have so many entries: as many as the program may have descriptors. Who has more entries than the
/// least limit of a program that works pays for the question with them.
pub fn allows_entries(entries: u64) -> bool {
    // Under a filter the question may not be asked; the kernel's limit is no higher by default.
    let is_confined = crate::process::sandbox::is_confined();
    entries <= STACK_ENTRIES as u64
        || (is_confined && entries <= CONFINED_ENTRIES_MAX)
        || !is_confined && rustix::process::getrlimit(Resource::Nofile).current.is_none_or(|limit| entries <= limit)
}

/// `ppoll(2)`; no time-out waits for ever.
///
/// # Errors
/// As the system call.
///
/// # Safety
/// `mask` is null or a signal set.
pub unsafe fn poll(fds: &mut [pollfd], timeout_ns: Option<u64>, mask: *const sigset_t) -> Result<usize, Errno> {
    if fds.iter().any(|entry| is_ours(entry.fd)) {
        return poll_lanes(fds, has_answer, &mut Deadline::new(timeout_ns), mask);
    }
    match timeout_ns {
        _ if !mask.is_null() => {}
        None => return blocking::poll(fds, -1),
        Some(ns) if ns % MILLISECOND_NS == 0 && i32::try_from(ns / MILLISECOND_NS).is_ok() => {
            return blocking::poll(fds, (ns / MILLISECOND_NS) as i32);
        }
        Some(_) => {}
    }
    // SAFETY: the caller's mask.
    unsafe { blocking::ppoll(fds, timeout_ns, mask) }
}

/// As [`poll`], in a process under a system call filter: the kernel is asked by the call that the program made, `poll`
/// or `ppoll`.
///
/// # Errors
/// As the system call.
///
/// # Safety
/// As [`poll`].
pub unsafe fn poll_confined(
    fds: &mut [pollfd],
    timeout_ns: Option<u64>,
    mask: *const sigset_t,
    is_ppoll: bool,
) -> Result<usize, Errno> {
    if fds.iter().any(|entry| is_ours(entry.fd)) {
        return poll_lanes(fds, has_answer, &mut Deadline::new(timeout_ns), mask);
    }
    if is_ppoll {
        // SAFETY: the caller's mask.
        return unsafe { blocking::ppoll(fds, timeout_ns, mask) };
    }
    let timeout_ms = timeout_ns.map_or(-1, |ns| i32::try_from(ns.div_ceil(MILLISECOND_NS)).unwrap_or(i32::MAX));
    blocking::poll(fds, timeout_ms)
}
