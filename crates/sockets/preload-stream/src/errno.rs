//! `errno`, and the conversion of results to those of libc.

use rustix::io::Errno;
use std::ffi::c_int;

pub fn set_errno(error: Errno) {
    // SAFETY: libc's own variable of this thread.
    unsafe { *libc::__errno_location() = error.raw_os_error() };
}

/// Sets `errno` and returns -1, as functions of libc do when they fail.
pub fn fail<N: From<i8>>(error: Errno) -> N {
    set_errno(error);
    N::from(-1)
}

/// Returns a count, or -1 with `errno`.
pub fn count_or_errno(result: Result<usize, Errno>) -> isize {
    result.map_or_else(fail, |count| count as isize)
}

/// Returns 0, or -1 with `errno`.
pub fn zero_or_errno(result: Result<(), Errno>) -> c_int {
    result.map_or_else(fail, |()| 0)
}

/// Runs work of the library, which leaves `errno` as it was.
#[inline]
pub fn keeping_errno<R>(work: impl FnOnce() -> R) -> R {
    // SAFETY: libc's own variable of this thread.
    let before = unsafe { *libc::__errno_location() };
    let result = work();
    // SAFETY: libc's own variable of this thread.
    unsafe { *libc::__errno_location() = before };
    result
}
