//! `poll(2)` and `select(2)` over lanes.
//!
//! A call without a descriptor of the library's goes to the kernel at once. Otherwise connections are polled in memory
//! and all other descriptors in the kernel. The thread then spins for a while, requests wakeups from the peers, and
//! sleeps in the kernel's `ppoll` on all descriptors together.

mod call;
mod confined;
mod entries;
mod select;
#[cfg(test)]
mod tests;

pub use confined::poll_entries_confined;
pub use select::select;

use crate::process::blocking;
use call::{Deadline, has_result, poll_lanes};
use entries::is_ours;
use libc::{pollfd, sigset_t};
use rustix::io::Errno;
use rustix::process::Resource;

const MILLISECOND_NS: u64 = 1_000_000;
/// Number of entries that any descriptor limit allows.
const ENTRIES_UNCHECKED: u64 = 64;
/// Largest number of entries of a call in a process under a system call filter.
const CONFINED_ENTRIES_MAX: u64 = 1 << 20;

/// Returns whether a call may have this number of entries: at most the descriptor limit, as in the kernel. The limit is
/// only read for calls with more than [`ENTRIES_UNCHECKED`] entries.
pub fn allows_entries(entries: u64) -> bool {
    // A filter may forbid reading the limit; by default, the kernel's limit is not higher than this bound.
    let is_confined = crate::process::sandbox::is_confined();
    entries <= ENTRIES_UNCHECKED
        || (is_confined && entries <= CONFINED_ENTRIES_MAX)
        || !is_confined && rustix::process::getrlimit(Resource::Nofile).current.is_none_or(|limit| entries <= limit)
}

/// `ppoll(2)`; without a time-out, waits without limit.
///
/// # Errors
/// As the system call.
///
/// # Safety
/// `mask` is null or points to a signal set.
pub unsafe fn poll(fds: &mut [pollfd], timeout_ns: Option<u64>, mask: *const sigset_t) -> Result<usize, Errno> {
    if fds.iter().any(|entry| is_ours(entry.fd)) {
        // SAFETY: `mask` is null or points to a signal set, by the contract of this function.
        return unsafe { poll_lanes(fds, has_result, &mut Deadline::new(timeout_ns), mask) };
    }
    match timeout_ns {
        _ if !mask.is_null() => {}
        None => return blocking::poll(fds, -1),
        Some(ns) if ns % MILLISECOND_NS == 0 && i32::try_from(ns / MILLISECOND_NS).is_ok() => {
            return blocking::poll(fds, (ns / MILLISECOND_NS) as i32);
        }
        Some(_) => {}
    }
    // SAFETY: `mask` is null or points to a signal set, by the contract of this function.
    unsafe { blocking::ppoll(fds, timeout_ns, mask) }
}

/// As [`poll`], in a process under a system call filter: the kernel is called by the system call that the program made,
/// `poll` or `ppoll`.
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
        // SAFETY: `mask` is null or points to a signal set, by the contract of this function.
        return unsafe { poll_lanes(fds, has_result, &mut Deadline::new(timeout_ns), mask) };
    }
    if is_ppoll {
        // SAFETY: `mask` is null or points to a signal set, by the contract of this function.
        return unsafe { blocking::ppoll(fds, timeout_ns, mask) };
    }
    let timeout_ms = timeout_ns.map_or(-1, |ns| i32::try_from(ns.div_ceil(MILLISECOND_NS)).unwrap_or(i32::MAX));
    blocking::poll(fds, timeout_ms)
}
