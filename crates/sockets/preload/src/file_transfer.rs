//! `sendfile` and `splice`, which move bytes inside the kernel. To a lane they are read in place.

use crate::bytes::{KERNEL_ONLY, cancellation_point, count_or_signal, receive_by_path, send_by_path};
use crate::errno::{count_or_errno, fail, keeping_errno};
use crate::real;
use libc::{iovec, off_t};
use rustix::io::Errno;
use rustix::pipe::SpliceFlags;
use socket::process::memory;
use std::ffi::{c_int, c_uint};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use stream::connection::{Connection, Received, Sent};
use stream::pipe::PipeEnd;
use stream::requirement;
use stream::table::{self, Entry};

const NO_SPANS: Result<&[iovec], Errno> = Err(KERNEL_ONLY);
/// Most bytes of one `sendfile`, as in the kernel (`MAX_RW_COUNT`).
const COUNT_MAX: usize = 0x7fff_f000;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile(out: c_int, input: c_int, offset: *mut off_t, count: usize) -> isize {
    let is_offset_valid = offset.is_null() || memory::is_writable(offset);
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    let in_kernel = || unsafe { real::sendfile(out, input, offset, count) };
    match table::get(out) {
        // SAFETY: the offset is null or writable, as was just checked.
        Entry::Connection(connection) if is_offset_valid && count > 0 && is_file(input) => unsafe {
            send_file(connection, out, input, offset, count.min(COUNT_MAX), in_kernel)
        },
        // SAFETY: there are no spans.
        _ => unsafe { send_by_path(out, 0, || NO_SPANS, in_kernel) },
    }
}

/// Returns whether a descriptor is a file with positions that can be read.
fn is_file(fd: c_int) -> bool {
    if fd < 0 {
        return false;
    }
    // SAFETY: the number is not negative; the calls only read, and fail for a closed one.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    let is_regular = rustix::fs::fstat(file).is_ok_and(|status| status.st_mode & libc::S_IFMT == libc::S_IFREG);
    let mode = rustix::fs::fcntl_getfl(file).map(|flags| flags & rustix::fs::OFlags::RWMODE);
    is_regular && mode.is_ok_and(|mode| mode != rustix::fs::OFlags::WRONLY)
}

/// Sends a file, which is read directly into the lane.
///
/// # Safety
/// `offset` is null or writable.
unsafe fn send_file(
    connection: &'static Connection,
    out: c_int,
    input: c_int,
    offset: *mut off_t,
    count: usize,
    in_kernel: impl FnOnce() -> isize,
) -> isize {
    // SAFETY: the number is not negative, because it is that of a file; a call on a closed one fails.
    let file = unsafe { BorrowedFd::borrow_raw(input) };
    // SAFETY: null or readable, by this function's contract.
    let start = unsafe { offset.as_ref() }.copied();
    if start.is_some_and(|start| start < 0) {
        return in_kernel();
    }
    let mut fill = |bytes: *mut u8, len_bytes: usize, done: usize| {
        // SAFETY: the lane has reserved these bytes for this closure to write.
        let span = unsafe { std::slice::from_raw_parts_mut(bytes.cast::<MaybeUninit<u8>>(), len_bytes) };
        let read = match start {
            Some(start) => rustix::io::pread(file, span, start as u64 + done as u64),
            None => rustix::io::read(file, span),
        };
        read.map(|(filled, _)| filled.len())
    };
    let is_at_end = || {
        let position = start.map_or_else(|| rustix::fs::tell(file), |start| Ok(start as u64));
        position.and_then(|position| rustix::io::pread(file, &mut [0_u8; 1], position)) == Ok(0)
    };
    send_filled(connection, out, count, &mut fill, in_kernel, |result| {
        if let (Ok(sent), Some(start)) = (result, start) {
            // SAFETY: not null, so writable by this function's contract.
            unsafe { *offset = start + sent as off_t };
        }
        if result == Err(Errno::AGAIN) && is_at_end() { Ok(0) } else { result }
    })
}

/// Sends what `fill` writes; see [`Connection::send_filled`]. `finish` gets the result if it is not the kernel's.
fn send_filled(
    connection: &'static Connection,
    fd: c_int,
    len_bytes: usize,
    fill: &mut dyn FnMut(*mut u8, usize, usize) -> Result<usize, Errno>,
    in_kernel: impl FnOnce() -> isize,
    finish: impl FnOnce(Result<usize, Errno>) -> Result<usize, Errno>,
) -> isize {
    cancellation_point();
    if let Err(error) = requirement::check(fd, connection) {
        return fail(error);
    }
    match connection.send_filled(fd, len_bytes, fill) {
        Sent::Done(result) => count_or_signal(finish(result), 0),
        Sent::Kernel(call) => {
            let sent = in_kernel();
            // SAFETY: there are no spans.
            keeping_errno(|| unsafe { connection.use_of(fd, call).note_sent(&[], usize::try_from(sent).unwrap_or(0)) });
            sent
        }
    }
}

/// Sends what is in a pipe, from which it consumes only what the lane has room for.
fn send_pipe(
    connection: &'static Connection,
    fd: c_int,
    pipe: PipeEnd<'_>,
    len_bytes: usize,
    in_kernel: impl Fn() -> isize,
) -> isize {
    loop {
        let mut is_empty = false;
        let mut fill = |bytes: *mut u8, len_bytes: usize, _: usize| {
            // SAFETY: the lane has reserved these bytes for this closure to write.
            unsafe { pipe.read(bytes, len_bytes) }.inspect_err(|error| is_empty = *error == Errno::AGAIN)
        };
        let mut result = None;
        let sent = send_filled(connection, fd, len_bytes, &mut fill, &in_kernel, |sent| *result.insert(sent));
        if result != Some(Err(Errno::AGAIN)) || !is_empty {
            return sent;
        }
        if let Err(error) = pipe.wait() {
            return fail(error);
        }
    }
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
        let call = || real::splice(input, input_offset, output, output_offset, len, flags);
        if let Entry::Connection(from) = table::get(input) {
            return splice_from(from, input, output, len, flags, call);
        }
        if let Entry::Connection(to) = table::get(output)
            && let Some(pipe) = PipeEnd::to_read(BorrowedFd::borrow_raw(input), flags & libc::SPLICE_F_NONBLOCK != 0)
        {
            return send_pipe(to, output, pipe, len, call);
        }
        let moved = receive_by_path(input, 0, || NO_SPANS, || send_by_path(output, 0, || NO_SPANS, call));
        if moved == 0
            && let Entry::Connection(from) = table::get(input)
        {
            // It has just proved busy, and the library has received into no spans.
            return splice_from(from, input, output, len, flags, call);
        }
        moved
    }
}

/// Moves bytes from a connection to a pipe.
fn splice_from(
    from: &'static Connection,
    input: c_int,
    output: c_int,
    len: usize,
    flags: c_uint,
    in_kernel: impl FnOnce() -> isize,
) -> isize {
    cancellation_point();
    if let Err(error) = requirement::check(input, from) {
        return fail(error);
    }
    // SAFETY: the number is that of a pipe; a call on a closed one fails.
    let pipe = unsafe { BorrowedFd::borrow_raw(output) };
    match from.splice_to(input, pipe, len, SpliceFlags::from_bits_retain(flags)) {
        Received::Done(moved) => count_or_errno(moved),
        Received::Kernel(call) => {
            let moved = in_kernel();
            let bytes = usize::try_from(moved).unwrap_or(0);
            // SAFETY: there are no spans.
            keeping_errno(|| unsafe { from.use_of(input, call).note_received(&[], bytes) });
            moved
        }
    }
}

// `off_t` has 64 bits.
aliases! {
    sendfile64(out: c_int, input: c_int, offset: *mut off_t, count: usize) -> isize
        = sendfile(out, input, offset, count);
}
