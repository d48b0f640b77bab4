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

/// Runs a call that creates a descriptor. If the program has no number left because the library holds some, releases
/// those and tries again.
pub fn create_descriptor(call: impl Fn() -> c_int) -> c_int {
    let fd = call();
    let is_full = || socket::process::system::errno() == Errno::MFILE;
    if fd < 0 && is_full() && keeping_errno(stream::process::make_room) { call() } else { fd }
}
