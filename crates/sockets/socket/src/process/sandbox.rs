//! A system call filter (seccomp) that the program has put itself under.
//!
//! What the filter allows was chosen for a program on kernel TCP: a filter of `read`, `write` and `exit` suits that,
//! and ends a process that makes any other call. So from then on an established connection makes the call that the
//! program made and no other: see `connection::confined`. What that needs is got ready while all calls are allowed.
//! New sockets are the kernel's alone.
//!
//! The filter may be one thread's; the whole process counts as filtered, because its threads share locks.

use crate::process::system;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// `seccomp(2)`: what puts a filter in force.
const SECCOMP_SET_MODE_STRICT: usize = 0;
const SECCOMP_SET_MODE_FILTER: usize = 1;

static IS_CONFINED: AtomicBool = AtomicBool::new(false);
/// Children that the process had made by then.
static SPAWNS: AtomicU32 = AtomicU32::new(0);

/// Whether the program has put this process under a filter. Asked where a system call would follow, and never on the
/// way of a byte that needs none.
#[inline]
pub fn is_confined() -> bool {
    IS_CONFINED.load(Ordering::Relaxed)
}

/// Whether this is certainly no child of `vfork` in a filtered process's memory: nobody need ask for its number.
pub(crate) fn is_confined_without_children() -> bool {
    is_confined() && SPAWNS.load(Ordering::Relaxed) == system::spawns()
}

/// Records whether a filter of the program's is in force.
pub(crate) fn set_confined(is_confined: bool) {
    SPAWNS.store(system::spawns(), Ordering::Relaxed);
    IS_CONFINED.store(is_confined, Ordering::SeqCst);
}

/// Whether a `prctl(2)` puts a filter in force.
pub fn is_filter_by_prctl(option: c_int) -> bool {
    option == libc::PR_SET_SECCOMP
}

/// Whether a `seccomp(2)` puts a filter in force.
pub fn is_filter_by_seccomp(operation: usize) -> bool {
    matches!(operation, SECCOMP_SET_MODE_STRICT | SECCOMP_SET_MODE_FILTER)
}
