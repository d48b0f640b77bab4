//! `sendfile` and `splice`, which move bytes inside the kernel: the connection goes back to TCP for them.

use crate::bytes::{receive_by_path, send_by_path};
use crate::real;
use libc::{iovec, off_t};
use rustix::io::Errno;
use std::ffi::{c_int, c_uint};

const NO_SPANS: Result<&[iovec], Errno> = Err(Errno::INVAL);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile(out: c_int, input: c_int, offset: *mut off_t, count: usize) -> isize {
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    unsafe { send_by_path(out, 0, || NO_SPANS, || real::sendfile(out, input, offset, count)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn splice(
    input: c_int,
    input_offset: *mut i64,
    output: c_int,
    output_offset: *mut i64,
    len: usize,
    flags: c_uint,
) -> isize {
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    unsafe {
        let call = || real::splice(input, input_offset, output, output_offset, len, flags);
        receive_by_path(input, 0, || NO_SPANS, || send_by_path(output, 0, || NO_SPANS, call))
    }
}

// `off_t` has 64 bits.
aliases! {
    sendfile64(out: c_int, input: c_int, offset: *mut off_t, count: usize) -> isize
        = sendfile(out, input, offset, count);
}
