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

/// Runs a call that creates a descriptor. If none is free, releases optional descriptors of the library and tries
/// again.
pub fn create_descriptor(call: impl Fn() -> c_int) -> c_int {
    let call = || match call() {
        fd if fd >= 0 => Ok(fd),
        _ => Err(socket::process::system::errno()),
    };
    preserving_errno(|| {
        socket::process::limit::retry_with_room(call, |error| *error == Errno::MFILE).unwrap_or_else(fail)
    })
}

/// Returns a count, or -1 with `errno`.
pub fn count_or_errno(result: Result<usize, Errno>) -> isize {
    result.map_or_else(fail, |count| count as isize)
}

/// Runs a call of the program and restores `errno` if it succeeds, because locks of the standard library and repeated
/// calls of libc change it.
#[inline]
pub fn preserving_errno<N: From<i8> + PartialOrd>(call: impl FnOnce() -> N) -> N {
    // SAFETY: libc's own variable of this thread.
    let before = unsafe { *libc::__errno_location() };
    let result = call();
    if result >= N::from(0) {
        // SAFETY: libc's own variable of this thread.
        unsafe { *libc::__errno_location() = before };
    }
    result
}

/// Returns 0, or -1 with `errno`.
pub fn zero_or_errno(result: Result<(), Errno>) -> c_int {
    result.map_or_else(fail, |()| 0)
}
