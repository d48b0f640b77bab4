//! `close`, `close_range` and `closefrom`.

use crate::errno::{fail, keeping_errno, zero_or_errno};
use crate::real;
use rustix::io::Errno;
use socket::descriptor::hidden;
use std::ffi::{c_int, c_uint};
use stream::lifecycle;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    if hidden::is_hidden(fd) {
        return fail(Errno::BADF);
    }
    keeping_errno(|| lifecycle::before_close(fd));
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    unsafe { real::close(fd) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    zero_or_errno(lifecycle::close_range(first, last, flags as c_uint))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn closefrom(first: c_int) {
    let _ = lifecycle::close_range(first.max(0) as c_uint, c_uint::MAX, 0);
}
