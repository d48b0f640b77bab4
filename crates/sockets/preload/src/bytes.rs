//! `read`, `write` and the other calls that move the bytes of one or several buffers.

use crate::errno::{count_or_errno, fail, preserving_errno, set_errno};
use crate::{real, sockets};
use libc::{iovec, msghdr, off_t, sockaddr, socklen_t};
use rustix::io::Errno;
use socket::connection::{Connection, MessageFlags, total_bytes};
use socket::entry::{self, Entry};
use socket::process::background_connects;
use socket::process::memory;
use socket::process::system::errno;
use std::ffi::{c_int, c_void};

const SPANS_MAX: usize = 1024;
pub(crate) const EMPTY_MESSAGE: msghdr = msghdr {
    msg_name: std::ptr::null_mut(),
    msg_namelen: 0,
    msg_iov: std::ptr::null_mut(),
    msg_iovlen: 0,
    msg_control: std::ptr::null_mut(),
    msg_controllen: 0,
    msg_flags: 0,
};

#[inline(always)] // Most calls consist of this short path.
pub(crate) unsafe fn receive_spans(connection: &'static Connection, spans: &[iovec], flags: c_int) -> isize {
    if flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
        // SAFETY: the C program's buffers, valid as its call requires (manual page).
        return unsafe { receive_out_of_stream(connection, spans, flags) };
    }
    cancellation_point();
    // SAFETY: the C program's buffers, valid as its call requires (manual page).
    count_or_errno(unsafe { connection.receive(spans, MessageFlags::from_bits(flags)) })
}

/// Receives data outside the stream: the urgent byte, or an entry of the error queue, which is always empty.
#[cold]
unsafe fn receive_out_of_stream(connection: &'static Connection, spans: &[iovec], flags: c_int) -> isize {
    if flags & libc::MSG_ERRQUEUE != 0 {
        return fail(Errno::AGAIN);
    }
    // SAFETY: the C program's buffers, valid as its call requires (manual page).
    count_or_errno(unsafe { connection.receive_urgent(spans, MessageFlags::from_bits(flags)) })
}

/// Sends data whose last byte is urgent.
#[cold]
unsafe fn send_urgent(connection: &'static Connection, spans: &[iovec], flags: c_int) -> isize {
    // SAFETY: the C program's buffers, valid as its call requires (manual page).
    count_or_signal(unsafe { connection.send_urgent(spans, MessageFlags::from_bits(flags)) }, flags)
}

/// Refuses to send urgent data in a process under a system call filter, which may forbid the system calls needed.
#[cold]
pub(crate) fn refuse_urgent() -> isize {
    fail(Errno::OPNOTSUPP)
}

/// Returns `msg_flags` after a receive.
pub(crate) fn received_flags(flags: c_int, received: isize) -> c_int {
    match flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) {
        libc::MSG_OOB if received == 0 => libc::MSG_OOB | libc::MSG_TRUNC,
        libc::MSG_OOB => libc::MSG_OOB,
        _ => 0,
    }
}

#[inline(always)] // Most calls consist of this short path.
pub(crate) unsafe fn send_spans(connection: &'static Connection, spans: &[iovec], flags: c_int) -> isize {
    if flags & libc::MSG_OOB != 0 {
        // SAFETY: the C program's buffers, valid as its call requires (manual page).
        return unsafe { send_urgent(connection, spans, flags) };
    }
    cancellation_point();
    // SAFETY: the C program's buffers, valid as its call requires (manual page).
    let result = unsafe { connection.send(spans, MessageFlags::from_bits(flags)) };
    count_or_signal(result, flags)
}

/// Ends a cancelled thread, as libc's own calls do. No lock is held here.
#[inline]
pub(crate) fn cancellation_point() {
    unsafe extern "C" {
        fn pthread_testcancel();
    }
    if !socket::process::threads::is_single() {
        // SAFETY: the function takes no arguments, and no frame that it may unwind holds a resource.
        unsafe { pthread_testcancel() }
    }
}

/// Returns a count, or -1 with `errno`. `EPIPE` also raises `SIGPIPE`, unless the flags forbid it.
pub(crate) fn count_or_signal(result: Result<usize, Errno>, flags: c_int) -> isize {
    if result == Err(Errno::PIPE) && flags & libc::MSG_NOSIGNAL == 0 {
        // SAFETY: the system calls take integers only; the signal goes to this thread, as the kernel sends it.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::syscall(libc::SYS_gettid), libc::SIGPIPE) };
    }
    count_or_errno(result)
}

/// The flags of a send that also apply to the send of a wakeup.
pub(crate) const CONFINED_FLAGS: c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

/// `read(2)` in a process under a system call filter.
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

/// `write(2)` in a process under a system call filter.
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

/// Receives from a lane in a process under a filter; `call` makes the program's system call on the lifeline.
#[cold]
pub(crate) unsafe fn receive_confined(
    connection: &'static Connection,
    spans: &[iovec],
    flags: c_int,
    call: impl Fn(*mut u8, usize, c_int) -> isize,
) -> isize {
    if flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
        return fail(if flags & libc::MSG_OOB != 0 { Errno::INVAL } else { Errno::AGAIN });
    }
    let flags = MessageFlags::from_bits(flags);
    // SAFETY: the C program's buffers, valid as its call requires (manual page).
    preserving_errno(|| count_or_errno(unsafe { connection.receive_confined(spans, flags, call) }))
}

/// As [`receive_confined`], for a send. `call` raises `SIGPIPE` if the pipe is broken, unless its flags forbid it.
#[cold]
pub(crate) unsafe fn send_confined(
    connection: &'static Connection,
    spans: &[iovec],
    call: impl Fn(*mut u8, usize, c_int) -> isize,
) -> isize {
    // SAFETY: the C program's buffers, valid as its call requires (manual page).
    preserving_errno(|| count_or_errno(unsafe { connection.send_confined(spans, call) }))
}

#[inline]
fn span(buffer: *const c_void, len: usize) -> [iovec; 1] {
    [iovec { iov_base: buffer.cast_mut(), iov_len: len }]
}

/// Returns the program's spans, or `too_many` if there are more than [`SPANS_MAX`].
pub(crate) unsafe fn spans<'a>(spans: *const iovec, count: usize, too_many: Errno) -> Result<&'a [iovec], Errno> {
    if count == 0 {
        return Ok(&[]);
    }
    if count > SPANS_MAX {
        return Err(too_many);
    }
    if !memory::are_readable(spans, count) {
        return Err(Errno::FAULT);
    }
    // SAFETY: the array is readable, as was just checked.
    let spans = unsafe { std::slice::from_raw_parts(spans, count) };
    let is_too_long = |span: &iovec| isize::try_from(span.iov_len).is_err();
    if spans.iter().any(is_too_long) { Err(Errno::INVAL) } else { Ok(spans) }
}

/// As [`spans`], for the signed count of `readv` and `writev`.
unsafe fn counted_spans<'a>(vector: *const iovec, count: c_int) -> Result<&'a [iovec], Errno> {
    let count = usize::try_from(count).map_err(|_| Errno::INVAL)?;
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { spans(vector, count, Errno::INVAL) }
}

/// Counts the bytes of a receive in the kernel if the socket is a plain TCP socket, and returns the result. Bytes that
/// were only peeked at are not counted, because they are received again.
pub(crate) fn counted_receive(entry: Entry, flags: c_int, result: isize) -> isize {
    if let Entry::Stream(stream) = entry
        && flags & libc::MSG_PEEK == 0
    {
        if result > 0 {
            stream.count_received(result as usize);
        } else if result < 0 {
            advance_connects();
        }
    }
    result
}

/// As [`counted_receive`], for a send.
pub(crate) fn counted_send(entry: Entry, result: isize) -> isize {
    if let Entry::Stream(stream) = entry {
        if result > 0 {
            stream.count_sent(result as usize);
        } else if result < 0 {
            advance_connects();
        }
    }
    result
}

/// Runs `call` on spans of the program, or fails with the error of an invalid array.
#[inline(always)] // Most calls lead through it.
pub(crate) fn with_spans<S>(spans: Result<S, Errno>, call: impl FnOnce(S) -> isize) -> isize {
    spans.map_or_else(fail, call)
}

/// Advances pending connects after a failed call, because a program may send or receive repeatedly to find out whether
/// a connect is done.
fn advance_connects() {
    if background_connects::is_any_pending() {
        let error = errno();
        background_connects::advance();
        set_errno(error);
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
            entry => counted_receive(entry, 0, real::read(fd, buffer, len)),
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
            entry => counted_send(entry, real::write(fd, buffer, len)),
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
            entry => counted_receive(entry, flags, real::recv(fd, buffer, len, flags)),
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
            entry => counted_send(entry, real::send(fd, buffer, len, flags)),
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn readv(fd: c_int, vector: *const iovec, count: c_int) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe {
        match entry::get(fd) {
            Entry::Connection(connection) => with_spans(counted_spans(vector, count), |spans| {
                if total_bytes(spans) == 0 { 0 } else { receive_spans(connection, spans, 0) }
            }),
            Entry::Confined(connection) if connection.receives_confined_by_lane() => {
                with_spans(counted_spans(vector, count), |spans| {
                    receive_confined(connection, spans, 0, |bytes, len, _| {
                        real::readv(fd, span(bytes.cast(), len).as_ptr(), 1)
                    })
                })
            }
            entry => counted_receive(entry, 0, real::readv(fd, vector, count)),
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn writev(fd: c_int, vector: *const iovec, count: c_int) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe {
        match entry::get(fd) {
            Entry::Connection(connection) => {
                with_spans(counted_spans(vector, count), |spans| send_spans(connection, spans, 0))
            }
            Entry::Confined(connection) if connection.sends_confined_by_lane() => {
                with_spans(counted_spans(vector, count), |spans| {
                    send_confined(connection, spans, |bytes, len, _| {
                        real::writev(fd, span(bytes.cast(), len).as_ptr(), 1)
                    })
                })
            }
            entry => counted_send(entry, real::writev(fd, vector, count)),
        }
    }
}

/// Returns the `recv` or `send` flags that correspond to flags of `preadv2` or `pwritev2`.
fn message_flags(flags: c_int) -> Result<c_int, Errno> {
    const IGNORED: c_int = libc::RWF_HIPRI | libc::RWF_DSYNC | libc::RWF_SYNC | libc::RWF_APPEND;
    match flags & !IGNORED {
        0 => Ok(0),
        libc::RWF_NOWAIT => Ok(libc::MSG_DONTWAIT),
        _ => Err(Errno::OPNOTSUPP),
    }
}

/// Returns the spans and the message flags of a `preadv2` or `pwritev2`, if they are valid for a stream.
unsafe fn positioned_spans<'a>(
    vector: *const iovec,
    count: c_int,
    position: off_t,
    flags: c_int,
) -> Result<(&'a [iovec], c_int), Errno> {
    // A stream has no positions, so that only -1 is valid.
    if position != -1 {
        return Err(Errno::SPIPE);
    }
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
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe {
        match entry::get(fd) {
            Entry::Connection(connection) => {
                with_spans(positioned_spans(vector, count, position, flags), |(spans, flags)| {
                    if total_bytes(spans) == 0 { 0 } else { receive_spans(connection, spans, flags) }
                })
            }
            entry => counted_receive(entry, 0, real::preadv2(fd, vector, count, position, flags)),
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
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe {
        match entry::get(fd) {
            Entry::Connection(connection) => {
                with_spans(positioned_spans(vector, count, position, flags), |(spans, flags)| {
                    send_spans(connection, spans, flags)
                })
            }
            entry => counted_send(entry, real::pwritev2(fd, vector, count, position, flags)),
        }
    }
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
            Entry::Connection(_) | Entry::Confined(_)
                if !address.is_null() && !address_len.is_null() && !memory::is_writable(address_len) =>
            {
                fail(Errno::FAULT)
            }
            Entry::Connection(connection) => {
                let result = receive_spans(connection, &span(buffer, len), flags);
                if result >= 0 && !address.is_null() && !address_len.is_null() {
                    // Data of a stream have no address.
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
            entry => counted_receive(entry, flags, real::recvfrom(fd, buffer, len, flags, address, address_len)),
        }
    }
}

/// `MSG_FASTOPEN`: a `connect` and a `send`. TCP does the same if the server has not given a cookie before. A lane is
/// ready at once, so that even a non-blocking socket sends its bytes here.
pub(crate) unsafe fn connect_and_send(
    fd: c_int,
    spans: &[iovec],
    flags: c_int,
    (address, address_len): (*const sockaddr, socklen_t),
) -> isize {
    let flags = flags & !libc::MSG_FASTOPEN;
    preserving_errno(|| {
        // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
        let is_connected = unsafe { sockets::connect(fd, address, address_len) } == 0 || errno() == Errno::ISCONN;
        match entry::get(fd) {
            // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
            Entry::Connection(connection) => unsafe { send_spans(connection, spans, flags) },
            entry @ Entry::Stream(_) if is_connected => {
                let message = msghdr { msg_iov: spans.as_ptr().cast_mut(), msg_iovlen: spans.len(), ..EMPTY_MESSAGE };
                // SAFETY: the C program's spans, valid as its call requires (manual page).
                counted_send(entry, unsafe { real::sendmsg(fd, &raw const message, flags) })
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
            // As in TCP, a connected stream ignores the address.
            Entry::Connection(connection) => send_spans(connection, &span(buffer, len), flags),
            Entry::Confined(_) if flags & libc::MSG_OOB != 0 => refuse_urgent(),
            Entry::Confined(connection) if connection.sends_confined_by_lane() => {
                send_confined(connection, &span(buffer, len), |bytes, len, _| {
                    real::sendto(fd, bytes.cast(), len, flags & CONFINED_FLAGS, std::ptr::null(), 0)
                })
            }
            // An AF_UNIX socket would refuse the address, which TCP ignores.
            Entry::Confined(_) => real::sendto(fd, buffer, len, flags, std::ptr::null(), 0),
            Entry::Stream(_) if flags & libc::MSG_FASTOPEN != 0 && !address.is_null() => {
                connect_and_send(fd, &span(buffer, len), flags, (address, address_len))
            }
            entry => counted_send(entry, real::sendto(fd, buffer, len, flags, address, address_len)),
        }
    }
}

/// Returns `len`. Ends a fortified program that is about to overflow its buffer of `room` bytes, as libc does.
fn checked(len: usize, room: usize) -> usize {
    unsafe extern "C" {
        fn __chk_fail() -> !;
    }
    if len > room {
        // SAFETY: the function takes no arguments and never returns.
        unsafe { __chk_fail() }
    }
    len
}

// `off_t` has 64 bits.
aliases! {
    __read_chk(fd: c_int, buffer: *mut c_void, len: usize, room: usize) -> isize = read(fd, buffer, checked(len, room));
    __recv_chk(fd: c_int, buffer: *mut c_void, len: usize, room: usize, flags: c_int) -> isize
        = recv(fd, buffer, checked(len, room), flags);
    __recvfrom_chk(fd: c_int, buffer: *mut c_void, len: usize, room: usize, flags: c_int, address: *mut sockaddr,
        address_len: *mut socklen_t) -> isize = recvfrom(fd, buffer, checked(len, room), flags, address, address_len);
    preadv64v2(fd: c_int, vector: *const iovec, count: c_int, position: off_t, flags: c_int) -> isize
        = preadv2(fd, vector, count, position, flags);
    pwritev64v2(fd: c_int, vector: *const iovec, count: c_int, position: off_t, flags: c_int) -> isize
        = pwritev2(fd, vector, count, position, flags);
}
