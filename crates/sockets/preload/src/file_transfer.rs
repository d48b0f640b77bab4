//! `sendfile` and `splice`.

use crate::bytes::{cancellation_point, count_or_signal, counted_receive, counted_send};
use crate::errno::{count_or_errno, fail};
use crate::real;
use libc::off_t;
use rustix::io::Errno;
use socket::connection::{Connection, MessageFlags, Pipe};
use socket::entry::{self, Entry};
use socket::process::memory;
use std::ffi::{c_int, c_uint};
use std::os::fd::BorrowedFd;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile(out: c_int, input: c_int, offset: *mut off_t, count: usize) -> isize {
    match entry::get(out) {
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        Entry::Connection(connection) => unsafe { send_file(connection, input, offset, count) },
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        entry => counted_send(entry, unsafe { real::sendfile(out, input, offset, count) }),
    }
}

/// Checks that `sendfile` may read from a file, without reading it: it must have positions, unlike a directory or an
/// eventfd.
fn check_is_file(file: BorrowedFd<'_>, has_offset: bool) -> Result<(), Errno> {
    let no_position = if has_offset { Errno::SPIPE } else { Errno::INVAL };
    match rustix::fs::fstat(file)?.st_mode & libc::S_IFMT {
        libc::S_IFREG | libc::S_IFBLK => Ok(()),
        libc::S_IFCHR if rustix::fs::tell(file) != Err(Errno::SPIPE) => Ok(()),
        libc::S_IFCHR | libc::S_IFIFO => Err(no_position),
        _ => Err(Errno::INVAL),
    }
}

/// Sends a file by reading it directly into the lane.
unsafe fn send_file(connection: &'static Connection, input: c_int, offset: *mut off_t, count: usize) -> isize {
    const COUNT_MAX: usize = 0x7fff_f000;
    if input < 0 || !matches!(entry::get(input), Entry::None) {
        return fail(if input < 0 { Errno::BADF } else { Errno::INVAL });
    }
    if !offset.is_null() && !memory::is_writable(offset) {
        return fail(Errno::FAULT);
    }
    // SAFETY: the C program's descriptor, valid as its call requires (manual page).
    let file = unsafe { BorrowedFd::borrow_raw(input) };
    // SAFETY: null, or readable as the C program's call requires (manual page).
    let start = unsafe { offset.as_ref() }.copied();
    if let Err(error) = check_is_file(file, start.is_some()) {
        return fail(error);
    }
    let (mut position, count) = (start, count.min(COUNT_MAX));
    match connection.send_file_by_lifeline(file, position.as_mut(), count) {
        Ok(None) => {}
        result => {
            if let Some(position) = position {
                // SAFETY: not null, so valid as the C program's call requires (manual page).
                unsafe { *offset = position };
            }
            return count_or_errno(result.map(|sent| sent.unwrap_or(0)));
        }
    }
    let is_at_end = || {
        let position = start.map_or_else(|| rustix::fs::tell(file), |start| Ok(start as u64));
        position.and_then(|position| rustix::io::pread(file, &mut [0_u8; 1], position)) == Ok(0)
    };
    let result = connection.send_in_place(count, MessageFlags::default(), is_at_end, |pointer, len, done| {
        // SAFETY: the lane has reserved `len` bytes at `pointer` for this closure to write.
        let span = unsafe { std::slice::from_raw_parts_mut(pointer.cast::<std::mem::MaybeUninit<u8>>(), len) };
        let read = match start {
            Some(start) => rustix::io::pread(file, span, start as u64 + done as u64),
            None => rustix::io::read(file, span),
        };
        read.map(|(filled, _)| filled.len())
    });
    if let (Ok(sent), Some(start)) = (&result, start) {
        // SAFETY: not null, so valid as the C program's call requires (manual page).
        unsafe { *offset = start + *sent as off_t };
    }
    count_or_signal(result, 0)
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
    let pass_through = || unsafe { real::splice(input, input_offset, output, output_offset, len, flags) };
    match (entry::get(input), entry::get(output)) {
        (Entry::Connection(_), _) | (_, Entry::Connection(_)) if len == 0 => 0,
        (Entry::Connection(from), _) => {
            let offsets = [input_offset, output_offset];
            let moved = pipe(output, true, offsets, flags).and_then(|pipe| from.splice_to(pipe, len));
            count_or_signal(moved, 0)
        }
        (_, Entry::Connection(to)) => {
            let offsets = [output_offset, input_offset];
            let moved = pipe(input, false, offsets, flags).and_then(|pipe| to.splice_from(pipe, len));
            count_or_signal(moved, 0)
        }
        (from @ Entry::Stream(_), _) => counted_receive(from, 0, pass_through()),
        (_, to) => counted_send(to, pass_through()),
    }
}

/// Returns the pipe of a `splice` with a connection; `offsets` are those of the connection and of the pipe.
fn pipe<'a>(fd: c_int, is_written: bool, offsets: [*mut i64; 2], flags: c_uint) -> Result<Pipe<'a>, Errno> {
    const KNOWN: c_uint = libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;
    cancellation_point();
    if flags & !KNOWN != 0 {
        return Err(Errno::INVAL);
    }
    if fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: the C program's descriptor, valid as its call requires (manual page).
    let pipe = Pipe::of(unsafe { BorrowedFd::borrow_raw(fd) }, is_written, flags & libc::SPLICE_F_NONBLOCK != 0)?;
    match offsets.map(|offset| offset.is_null()) {
        [_, false] => Err(Errno::SPIPE),
        [false, true] => Err(Errno::INVAL),
        [true, true] => Ok(pipe),
    }
}

// `off_t` has 64 bits.
aliases! {
    sendfile64(out: c_int, input: c_int, offset: *mut off_t, count: usize) -> isize
        = sendfile(out, input, offset, count);
}
