//! `read`, `write` and everything else that moves bytes of one buffer or several.

use crate::{count_or_errno, keeping_errno, real, set_errno, sockets};
use libc::{iovec, msghdr, off_t, sockaddr, socklen_t};
use rustix::io::Errno;
use socket::connection::{Connection, Flags, Pipe, total_bytes};
use socket::entry::{self, Entry};
use socket::process::background_connects;
use socket::process::system::errno;
use socket::stream::Stream;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;

const SPANS_MAX: usize = 1024;
pub(crate) const NO_MESSAGE: msghdr = msghdr {
    msg_name: std::ptr::null_mut(),
    msg_namelen: 0,
    msg_iov: std::ptr::null_mut(),
    msg_iovlen: 0,
    msg_control: std::ptr::null_mut(),
    msg_controllen: 0,
    msg_flags: 0,
};

#[inline(always)] // The short path of the call is all there is to most calls.
pub(crate) unsafe fn receive_spans(connection: &'static Connection, spans: &[iovec], flags: c_int) -> isize {
    if flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
        // SAFETY: the C program's buffers, valid as its call requires (manual page).
        return unsafe { receive_aside(connection, spans, flags) };
    }
    cancellation_point();
    // SAFETY: the C program's buffers, valid as its call requires (manual page).
    count_or_errno(unsafe { connection.receive(spans, Flags::from_bits(flags)) })
}

/// A receive of what is not in the stream: the urgent byte, or one from the error queue, where there never is any.
#[cold]
unsafe fn receive_aside(connection: &'static Connection, spans: &[iovec], flags: c_int) -> isize {
    if flags & libc::MSG_ERRQUEUE != 0 {
        return count_or_errno(Err(Errno::AGAIN));
    }
    // SAFETY: the C program's buffers, valid as its call requires (manual page).
    count_or_errno(unsafe { connection.receive_urgent(spans, Flags::from_bits(flags)) })
}

/// A send whose last byte is urgent.
#[cold]
unsafe fn send_urgent(connection: &'static Connection, spans: &[iovec], flags: c_int) -> isize {
    // SAFETY: the C program's buffers, valid as its call requires (manual page).
    count_or_signal(unsafe { connection.send_urgent(spans, Flags::from_bits(flags)) }, flags)
}

/// A send whose last byte is urgent, of a process under a system call filter: the calls that it takes are not the
/// program's.
#[cold]
pub(crate) fn refuse_urgent() -> isize {
    count_or_errno(Err(Errno::OPNOTSUPP))
}

/// What `msg_flags` says after a receive.
pub(crate) fn received_flags(flags: c_int, received: isize) -> c_int {
    match flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) {
        libc::MSG_OOB if received == 0 => libc::MSG_OOB | libc::MSG_TRUNC,
        libc::MSG_OOB => libc::MSG_OOB,
        _ => 0,
    }
}

#[inline(always)] // As above.
pub(crate) unsafe fn send_spans(connection: &'static Connection, spans: &[iovec], flags: c_int) -> isize {
    if flags & libc::MSG_OOB != 0 {
        // SAFETY: the C program's buffers, valid as its call requires (manual page).
        return unsafe { send_urgent(connection, spans, flags) };
    }
    cancellation_point();
    // SAFETY: the C program's buffers, valid as its call requires (manual page).
    let result = unsafe { connection.send(spans, Flags::from_bits(flags)) };
    count_or_signal(result, flags)
}

/// A thread that has been cancelled ends here, as in libc's own calls. Nothing is held.
#[inline]
fn cancellation_point() {
    unsafe extern "C" {
        fn pthread_testcancel();
    }
    if !socket::process::threads::is_single() {
        // SAFETY: takes nothing; the frames above are plain ones.
        unsafe { pthread_testcancel() }
    }
}

/// A count, or -1 with `errno`; a broken pipe also raises its signal, unless the call forbids it.
fn count_or_signal(result: Result<usize, Errno>, flags: c_int) -> isize {
    if result == Err(Errno::PIPE) && flags & libc::MSG_NOSIGNAL == 0 {
        // SAFETY: a signal to this thread, as the kernel would send it.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::syscall(libc::SYS_gettid), libc::SIGPIPE) };
    }
    count_or_errno(result)
}

/// Flags of a send that a ring has too.
pub(crate) const CONFINED_FLAGS: c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

/// `read(2)` of a process under a system call filter.
#[cold]
unsafe fn confined_read(connection: &'static Connection, fd: c_int, buffer: *mut c_void, len: usize) -> isize {
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    let call = |bytes: *mut c_void, len| unsafe { real::read(fd, bytes, len) };
    if !connection.receives_confined_by_lane() {
        return call(buffer, len);
    }
    // SAFETY: the C program's buffer, valid as its call requires (manual page).
    unsafe { receive_confined(connection, &span(buffer, len), 0, |bytes, len, _| call(bytes.cast(), len)) }
}

/// `write(2)` of a process under a system call filter.
#[cold]
unsafe fn confined_write(connection: &'static Connection, fd: c_int, buffer: *const c_void, len: usize) -> isize {
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    let call = |bytes: *const c_void, len| unsafe { real::write(fd, bytes, len) };
    if !connection.sends_confined_by_lane() {
        return call(buffer, len);
    }
    // SAFETY: the C program's buffer, valid as its call requires (manual page).
    unsafe { send_confined(connection, &span(buffer, len), |bytes, len, _| call(bytes.cast_const().cast(), len)) }
}

/// A receive of a process under a filter, by the lane; `call` is the program's, on the lifeline.
#[cold]
pub(crate) unsafe fn receive_confined(
    connection: &'static Connection,
    spans: &[iovec],
    flags: c_int,
    call: impl Fn(*mut u8, usize, c_int) -> isize,
) -> isize {
    if flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
        set_errno(if flags & libc::MSG_OOB != 0 { Errno::INVAL } else { Errno::AGAIN });
        return -1;
    }
    // SAFETY: the C program's buffers, valid as its call requires (manual page).
    keeping_errno(|| count_or_errno(unsafe { connection.receive_confined(spans, Flags::from_bits(flags), call) }))
}

/// As [`receive_confined`], for a send. A pipe that is broken raises its signal by `call`, if at all.
#[cold]
pub(crate) unsafe fn send_confined(
    connection: &'static Connection,
    spans: &[iovec],
    call: impl Fn(*mut u8, usize, c_int) -> isize,
) -> isize {
    // SAFETY: the C program's buffers, valid as its call requires (manual page).
    keeping_errno(|| count_or_errno(unsafe { connection.send_confined(spans, call) }))
}

#[inline]
fn span(buffer: *const c_void, len: usize) -> [iovec; 1] {
    [iovec { iov_base: buffer.cast_mut(), iov_len: len }]
}

/// The caller's spans, if there are as many as it may pass; `too_many` else.
pub(crate) unsafe fn spans<'a>(spans: *const iovec, count: usize, too_many: Errno) -> Result<&'a [iovec], Errno> {
    if count == 0 {
        return Ok(&[]);
    }
    if count > SPANS_MAX {
        return Err(too_many);
    }
    if spans.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the C program's array, valid as its call requires (manual page).
    let spans = unsafe { std::slice::from_raw_parts(spans, count) };
    let is_too_long = |span: &iovec| isize::try_from(span.iov_len).is_err();
    if spans.iter().any(is_too_long) { Err(Errno::INVAL) } else { Ok(spans) }
}

/// As [`spans`], for a count that `readv` and `writev` take as a number with a sign.
unsafe fn counted_spans<'a>(vector: *const iovec, count: c_int) -> Result<&'a [iovec], Errno> {
    let count = usize::try_from(count).map_err(|_| Errno::INVAL)?;
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { spans(vector, count, Errno::INVAL) }
}

/// What was only looked at will be received again.
pub(crate) fn counted_receive_with(stream: &'static Stream, flags: c_int, result: isize) -> isize {
    if flags & libc::MSG_PEEK != 0 { result } else { counted_receive(stream, result) }
}

pub(crate) fn counted_receive(stream: &'static Stream, result: isize) -> isize {
    if result > 0 {
        stream.count_received(result as usize);
    } else if result < 0 {
        go_on_connecting();
    }
    result
}

pub(crate) fn counted_send(stream: &'static Stream, result: isize) -> isize {
    if result > 0 {
        stream.count_sent(result as usize);
    } else if result < 0 {
        go_on_connecting();
    }
    result
}

/// A program may find out by sending or receiving, again and again, whether a connect has come to its end.
fn go_on_connecting() {
    if background_connects::is_any_pending() {
        // SAFETY: libc's own variable of this thread.
        let error = unsafe { *libc::__errno_location() };
        background_connects::advance();
        // SAFETY: libc's own variable of this thread.
        unsafe { *libc::__errno_location() = error };
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, len: usize) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe {
        match entry::get(fd) {
            Entry::Connection(_) if len == 0 => 0,
            Entry::Connection(connection) => receive_spans(connection, &span(buffer, len), 0),
            Entry::Confined(connection) => confined_read(connection, fd, buffer, len),
            Entry::Stream(stream) => counted_receive(stream, real::read(fd, buffer, len)),
            _ => real::read(fd, buffer, len),
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, buffer: *const c_void, len: usize) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe {
        match entry::get(fd) {
            Entry::Connection(connection) => send_spans(connection, &span(buffer, len), 0),
            Entry::Confined(connection) => confined_write(connection, fd, buffer, len),
            Entry::Stream(stream) => counted_send(stream, real::write(fd, buffer, len)),
            _ => real::write(fd, buffer, len),
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recv(fd: c_int, buffer: *mut c_void, len: usize, flags: c_int) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe {
        match entry::get(fd) {
            Entry::Connection(connection) => receive_spans(connection, &span(buffer, len), flags),
            Entry::Confined(connection) if connection.receives_confined_by_lane() => {
                receive_confined(connection, &span(buffer, len), flags, |bytes, len, more| {
                    real::recv(fd, bytes.cast(), len, flags & libc::MSG_DONTWAIT | more)
                })
            }
            Entry::Stream(stream) => counted_receive_with(stream, flags, real::recv(fd, buffer, len, flags)),
            _ => real::recv(fd, buffer, len, flags),
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn send(fd: c_int, buffer: *const c_void, len: usize, flags: c_int) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe {
        match entry::get(fd) {
            Entry::Connection(connection) => send_spans(connection, &span(buffer, len), flags),
            Entry::Confined(_) if flags & libc::MSG_OOB != 0 => refuse_urgent(),
            Entry::Confined(connection) if connection.sends_confined_by_lane() => {
                send_confined(connection, &span(buffer, len), |bytes, len, _| {
                    real::send(fd, bytes.cast(), len, flags & CONFINED_FLAGS)
                })
            }
            Entry::Stream(stream) => counted_send(stream, real::send(fd, buffer, len, flags)),
            _ => real::send(fd, buffer, len, flags),
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn readv(fd: c_int, vector: *const iovec, count: c_int) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe {
        match entry::get(fd) {
            Entry::Connection(connection) => match counted_spans(vector, count) {
                Ok(spans) if total_bytes(spans) == 0 => 0,
                Ok(spans) => receive_spans(connection, spans, 0),
                Err(error) => count_or_errno(Err(error)),
            },
            Entry::Confined(connection) if connection.receives_confined_by_lane() => {
                match counted_spans(vector, count) {
                    Ok(spans) => receive_confined(connection, spans, 0, |bytes, len, _| {
                        real::readv(fd, span(bytes.cast(), len).as_ptr(), 1)
                    }),
                    Err(error) => count_or_errno(Err(error)),
                }
            }
            Entry::Stream(stream) => counted_receive(stream, real::readv(fd, vector, count)),
            _ => real::readv(fd, vector, count),
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn writev(fd: c_int, vector: *const iovec, count: c_int) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe {
        match entry::get(fd) {
            Entry::Connection(connection) => match counted_spans(vector, count) {
                Ok(spans) => send_spans(connection, spans, 0),
                Err(error) => count_or_errno(Err(error)),
            },
            Entry::Confined(connection) if connection.sends_confined_by_lane() => match counted_spans(vector, count) {
                Ok(spans) => send_confined(connection, spans, |bytes, len, _| {
                    real::writev(fd, span(bytes.cast(), len).as_ptr(), 1)
                }),
                Err(error) => count_or_errno(Err(error)),
            },
            Entry::Stream(stream) => counted_send(stream, real::writev(fd, vector, count)),
            _ => real::writev(fd, vector, count),
        }
    }
}

/// Where a call at a position is to read or write: a stream has none, so that only the call without one may.
fn must_be_here(position: off_t) -> Result<(), Errno> {
    if position == -1 { Ok(()) } else { Err(Errno::SPIPE) }
}

/// The flags of a `recv` or `send` like a `preadv2` or `pwritev2` with these.
fn message_flags(flags: c_int) -> Result<c_int, Errno> {
    const IGNORED: c_int = libc::RWF_HIPRI | libc::RWF_DSYNC | libc::RWF_SYNC | libc::RWF_APPEND;
    match flags & !IGNORED {
        0 => Ok(0),
        libc::RWF_NOWAIT => Ok(libc::MSG_DONTWAIT),
        _ => Err(Errno::OPNOTSUPP),
    }
}

/// The spans and the message flags of a `preadv2` or `pwritev2`, if a stream can answer it.
unsafe fn positioned_spans<'a>(
    vector: *const iovec,
    count: c_int,
    position: off_t,
    flags: c_int,
) -> Result<(&'a [iovec], c_int), Errno> {
    must_be_here(position)?;
    let flags = message_flags(flags)?;
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    Ok((unsafe { counted_spans(vector, count) }?, flags))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn preadv2(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    position: off_t,
    flags: c_int,
) -> isize {
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    unsafe {
        let call = || real::preadv2(fd, vector, count, position, flags);
        match entry::get(fd) {
            Entry::Connection(connection) => match positioned_spans(vector, count, position, flags) {
                Ok((spans, _)) if total_bytes(spans) == 0 => 0,
                Ok((spans, flags)) => receive_spans(connection, spans, flags),
                Err(error) => count_or_errno(Err(error)),
            },
            Entry::Stream(stream) => counted_receive(stream, call()),
            _ => call(),
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwritev2(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    position: off_t,
    flags: c_int,
) -> isize {
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    unsafe {
        let call = || real::pwritev2(fd, vector, count, position, flags);
        match entry::get(fd) {
            Entry::Connection(connection) => match positioned_spans(vector, count, position, flags) {
                Ok((spans, flags)) => send_spans(connection, spans, flags),
                Err(error) => count_or_errno(Err(error)),
            },
            Entry::Stream(stream) => counted_send(stream, call()),
            _ => call(),
        }
    }
}

/// `off_t` has 64 bits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn preadv64v2(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    position: off_t,
    flags: c_int,
) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { preadv2(fd, vector, count, position, flags) }
}

/// `off_t` has 64 bits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwritev64v2(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    position: off_t,
    flags: c_int,
) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { pwritev2(fd, vector, count, position, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvfrom(
    fd: c_int,
    buffer: *mut c_void,
    len: usize,
    flags: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe {
        match entry::get(fd) {
            Entry::Connection(connection) => {
                let result = receive_spans(connection, &span(buffer, len), flags);
                if result >= 0 && !address.is_null() && !address_len.is_null() {
                    // A stream's data come without an address.
                    *address_len = 0;
                }
                result
            }
            Entry::Confined(connection) if connection.receives_confined_by_lane() => {
                let result = receive_confined(connection, &span(buffer, len), flags, |bytes, len, more| {
                    let (none, no_len) = (std::ptr::null_mut(), std::ptr::null_mut());
                    real::recvfrom(fd, bytes.cast(), len, flags & libc::MSG_DONTWAIT | more, none, no_len)
                });
                if result >= 0 && !address.is_null() && !address_len.is_null() {
                    *address_len = 0;
                }
                result
            }
            Entry::Stream(stream) => {
                counted_receive_with(stream, flags, real::recvfrom(fd, buffer, len, flags, address, address_len))
            }
            _ => real::recvfrom(fd, buffer, len, flags, address, address_len),
        }
    }
}

/// `MSG_FASTOPEN`: a `connect` and a `send`, which is what it comes to over TCP too where the server has given no
/// cookie before. A lane is there at once, so that the bytes of a socket that does not wait go with it.
pub(crate) unsafe fn connect_and_send(
    fd: c_int,
    spans: &[iovec],
    flags: c_int,
    (address, address_len): (*const sockaddr, socklen_t),
) -> isize {
    let flags = flags & !libc::MSG_FASTOPEN;
    keeping_errno(|| {
        // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
        let is_connected = unsafe { sockets::connect(fd, address, address_len) } == 0 || errno() == Errno::ISCONN;
        match entry::get(fd) {
            // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
            Entry::Connection(connection) => unsafe { send_spans(connection, spans, flags) },
            Entry::Stream(stream) if is_connected => {
                let message = msghdr { msg_iov: spans.as_ptr().cast_mut(), msg_iovlen: spans.len(), ..NO_MESSAGE };
                // SAFETY: the C program's spans, valid as its call requires (manual page).
                counted_send(stream, unsafe { real::sendmsg(fd, &raw const message, flags) })
            }
            _ => -1,
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendto(
    fd: c_int,
    buffer: *const c_void,
    len: usize,
    flags: c_int,
    address: *const sockaddr,
    address_len: socklen_t,
) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe {
        match entry::get(fd) {
            // A connected stream ignores the address, as TCP does.
            Entry::Connection(connection) => send_spans(connection, &span(buffer, len), flags),
            Entry::Confined(_) if flags & libc::MSG_OOB != 0 => refuse_urgent(),
            Entry::Confined(connection) if connection.sends_confined_by_lane() => {
                send_confined(connection, &span(buffer, len), |bytes, len, _| {
                    real::sendto(fd, bytes.cast(), len, flags & CONFINED_FLAGS, std::ptr::null(), 0)
                })
            }
            // AF_UNIX would refuse the address that TCP ignores.
            Entry::Confined(_) => real::sendto(fd, buffer, len, flags, std::ptr::null(), 0),
            Entry::Stream(_) if flags & libc::MSG_FASTOPEN != 0 && !address.is_null() => {
                connect_and_send(fd, &span(buffer, len), flags, (address, address_len))
            }
            Entry::Stream(stream) => counted_send(stream, real::sendto(fd, buffer, len, flags, address, address_len)),
            _ => real::sendto(fd, buffer, len, flags, address, address_len),
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __read_chk(fd: c_int, buffer: *mut c_void, len: usize, room: usize) -> isize {
    check_room(len, room);
    // SAFETY: the C program's buffer, valid as its call requires; `check_room` has checked its length.
    unsafe { read(fd, buffer, len) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __recv_chk(fd: c_int, buffer: *mut c_void, len: usize, room: usize, flags: c_int) -> isize {
    check_room(len, room);
    // SAFETY: the C program's buffer, valid as its call requires; `check_room` has checked its length.
    unsafe { recv(fd, buffer, len, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    buffer: *mut c_void,
    len: usize,
    room: usize,
    flags: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
) -> isize {
    check_room(len, room);
    // SAFETY: the C program's buffer, valid as its call requires; `check_room` has checked its length.
    unsafe { recvfrom(fd, buffer, len, flags, address, address_len) }
}

/// A fortified program that is about to overflow its buffer ends, as with libc.
fn check_room(len: usize, room: usize) {
    unsafe extern "C" {
        fn __chk_fail() -> !;
    }
    if len > room {
        // SAFETY: never returns.
        unsafe { __chk_fail() }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile(out: c_int, input: c_int, offset: *mut off_t, count: usize) -> isize {
    match entry::get(out) {
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        Entry::Connection(connection) => unsafe { send_file(connection, input, offset, count) },
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        Entry::Stream(stream) => counted_send(stream, unsafe { real::sendfile(out, input, offset, count) }),
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        _ => unsafe { real::sendfile(out, input, offset, count) },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile64(out: c_int, input: c_int, offset: *mut off_t, count: usize) -> isize {
    // SAFETY: the C program's arguments, passed on unchanged: `off_t` has 64 bits.
    unsafe { sendfile(out, input, offset, count) }
}

/// What `sendfile` reads has positions: a directory, an event counter or the like is not read, and loses nothing.
fn must_be_a_file(file: BorrowedFd<'_>, has_offset: bool) -> Result<(), Errno> {
    let no_position = if has_offset { Errno::SPIPE } else { Errno::INVAL };
    match rustix::fs::fstat(file)?.st_mode & libc::S_IFMT {
        libc::S_IFREG | libc::S_IFBLK => Ok(()),
        libc::S_IFCHR if rustix::fs::tell(file) != Err(Errno::SPIPE) => Ok(()),
        libc::S_IFCHR | libc::S_IFIFO => Err(no_position),
        _ => Err(Errno::INVAL),
    }
}

/// Reads the file straight into the lane.
unsafe fn send_file(connection: &'static Connection, input: c_int, offset: *mut off_t, count: usize) -> isize {
    const COUNT_MAX: usize = 0x7fff_f000;
    if input < 0 || !matches!(entry::get(input), Entry::None) {
        set_errno(if input < 0 { Errno::BADF } else { Errno::INVAL });
        return -1;
    }
    // SAFETY: the C program's descriptor, valid as its call requires (manual page).
    let file = unsafe { BorrowedFd::borrow_raw(input) };
    // SAFETY: null or readable.
    let start = unsafe { offset.as_ref() }.copied();
    if let Err(error) = must_be_a_file(file, start.is_some()) {
        set_errno(error);
        return -1;
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
    let result = connection.send_in_place(count, Flags::default(), is_at_end, |pointer, len, done| {
        // SAFETY: the lane reserved this span for us to write.
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
        (Entry::Stream(from), _) => counted_receive(from, pass_through()),
        (_, Entry::Stream(to)) => counted_send(to, pass_through()),
        _ => pass_through(),
    }
}

/// The pipe of a `splice` between it and a connection; `offsets` are the connection's and its own.
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
