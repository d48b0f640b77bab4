//! A system call filter (seccomp) that the program has put itself under.
//!
//! What the filter allows was chosen for a program on kernel TCP: a filter of `read`, `write` and `exit` suits that,
//! and ends a process that makes any other call. So from then on an established connection makes the call that the
//! program made and no other: see `connection::confined`. What that needs is got ready while all calls are allowed.
//! New sockets are the kernel's alone.
//!
//! The filter may be one thread's; the whole process counts as filtered, because its threads share locks.

use crate::lifecycle;
use crate::system;
use crate::table::{self, Entry};
use std::ffi::{c_int, c_long};
use std::os::fd::RawFd;
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

/// Whether a `prctl(2)` puts a filter in force.
pub fn is_filter_by_prctl(option: c_int) -> bool {
    option == libc::PR_SET_SECCOMP
}

/// Whether a `seccomp(2)` puts a filter in force.
pub fn is_filter_by_seccomp(operation: usize) -> bool {
    matches!(operation, SECCOMP_SET_MODE_STRICT | SECCOMP_SET_MODE_FILTER)
}

/// Runs `install`, which puts the process under a filter. Behind it no call is made that the program did not make.
pub fn confine(install: impl FnOnce() -> c_long) -> c_long {
    if lifecycle::settings().off || is_confined() {
        return install();
    }
    confine_connections();
    SPAWNS.store(system::spawns(), Ordering::Relaxed);
    IS_CONFINED.store(true, Ordering::SeqCst);
    let result = install();
    if result < 0 {
        let error = system::errno();
        IS_CONFINED.store(false, Ordering::SeqCst);
        release_connections();
        // SAFETY: libc's own variable of this thread.
        unsafe { *libc::__errno_location() = error.raw_os_error() };
    }
    result
}

fn confine_connections() {
    table::for_each(0..=RawFd::MAX, |fd, entry| {
        if let Entry::Connection(connection) = entry
            && connection.confine()
        {
            table::set(fd, Entry::Confined(connection));
        }
    });
}

/// The filter was refused.
fn release_connections() {
    table::for_each(0..=RawFd::MAX, |fd, entry| {
        if let Entry::Confined(connection) = entry {
            connection.release();
            table::set(fd, Entry::Connection(connection));
        }
    });
}
