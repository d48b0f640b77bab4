//! `close`, `close_range` and `closefrom`.

use crate::errno::{fail, preserving_errno, zero_or_errno};
use crate::real;
use socket::lifecycle;
use std::ffi::{c_int, c_uint};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    preserving_errno(|| match lifecycle::close(fd) {
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        Ok(()) => unsafe { real::close(fd) },
        Err(error) => fail(error),
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    zero_or_errno(lifecycle::close_range(first, last, flags as c_uint))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn closefrom(first: c_int) {
    let _ = lifecycle::close_range(first.max(0) as c_uint, c_uint::MAX, 0);
}
