//! A system call filter (seccomp) that the program has put itself under.
//!
//! The filter was designed for a program on kernel TCP: one that allows `read`, `write` and `exit` suffices there, and
//! it ends a process that makes any other call. So all connections go back to TCP before the filter is installed, and
//! the library makes no call of its own from then on.
//!
//! The filter may apply to one thread only; the whole process counts as filtered, because its threads share locks.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

/// The operations of `seccomp(2)` that install a filter.
const SECCOMP_SET_MODE_STRICT: usize = 0;
const SECCOMP_SET_MODE_FILTER: usize = 1;

static IS_CONFINED: AtomicBool = AtomicBool::new(false);

/// Returns whether the program has put this process under a filter. Called before a system call would be made, and
/// never on the path of a byte that needs none.
#[inline]
pub fn is_confined() -> bool {
    IS_CONFINED.load(Ordering::Relaxed)
}

/// Records whether a filter of the program is in force.
pub fn set_confined(is_confined: bool) {
    IS_CONFINED.store(is_confined, Ordering::SeqCst);
}

/// Returns whether a `prctl(2)` installs a filter.
pub fn is_filter_by_prctl(option: c_int) -> bool {
    option == libc::PR_SET_SECCOMP
}

/// Returns whether a `seccomp(2)` installs a filter.
pub fn is_filter_by_seccomp(operation: usize) -> bool {
    matches!(operation, SECCOMP_SET_MODE_STRICT | SECCOMP_SET_MODE_FILTER)
}
