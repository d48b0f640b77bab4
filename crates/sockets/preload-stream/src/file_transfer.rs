//! `sendfile` and `splice`, which move bytes inside the kernel: the connection goes back to TCP for them.

use crate::bytes::{KERNEL_ONLY, receive_by_path, send_by_path};
use crate::errno::count_or_errno;
use crate::real;
use libc::{iovec, off_t};
use rustix::io::Errno;
use rustix::pipe::SpliceFlags;
use std::ffi::{c_int, c_uint};
use std::os::fd::BorrowedFd;
use stream::table::{self, Entry};

const NO_SPANS: Result<&[iovec], Errno> = Err(KERNEL_ONLY);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile(out: c_int, input: c_int, offset: *mut off_t, count: usize) -> isize {
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    unsafe { send_by_path(out, 0, || NO_SPANS, || real::sendfile(out, input, offset, count)) }
}

const KNOWN_FLAGS: c_uint = libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;

/// Returns whether a descriptor is a pipe.
fn is_pipe(fd: c_int) -> bool {
    // SAFETY: the call only reads, and fails for a closed number.
    let status = (fd >= 0).then(|| rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(fd) }));
    status.is_some_and(|status| status.is_ok_and(|status| status.st_mode & libc::S_IFMT == libc::S_IFIFO))
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
        let has_offset = !input_offset.is_null() || !output_offset.is_null();
        let is_refused = flags & !KNOWN_FLAGS != 0 || has_offset || !(is_pipe(input) || is_pipe(output));
        if is_refused || len == 0 {
            return real::splice(input, input_offset, output, output_offset, len, flags);
        }
        if let Entry::Connection(from) = table::get(input) {
            let flags = SpliceFlags::from_bits_retain(flags);
            if let Some(moved) = from.splice_to(input, BorrowedFd::borrow_raw(output), len, flags) {
                return count_or_errno(moved);
            }
        }
        let call = || real::splice(input, input_offset, output, output_offset, len, flags);
        receive_by_path(input, 0, || NO_SPANS, || send_by_path(output, 0, || NO_SPANS, call))
    }
}

// `off_t` has 64 bits.
aliases! {
    sendfile64(out: c_int, input: c_int, offset: *mut off_t, count: usize) -> isize
        = sendfile(out, input, offset, count);
}
