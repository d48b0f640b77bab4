//! `read`, `write` and the other calls that move the bytes of one or several buffers.
//!
//! A call on a descriptor that only the kernel knows goes to libc unchanged. So does one on a connection that has not
//! proved busy; its success is counted. Only a connection that has met its other end is asked which path a call takes.

use crate::errno::{count_or_errno, fail, keeping_errno};
use crate::real;
use libc::{iovec, off_t, sockaddr, socklen_t};
use rustix::io::Errno;
use socket::process::memory;
use std::ffi::{c_int, c_void};
use stream::connection::{Connection, Received, Sent};
use stream::flags::MessageFlags;
use stream::lifecycle::{self, Begun};
use stream::requirement;
use stream::sharing::Epoch;
use stream::table::{self, Entry};
use stream::young::Transfer;

const SPANS_MAX: usize = 1024;

/// The program's spans, or the error that the kernel would report for them.
pub(crate) type Spans<'a> = Result<&'a [iovec], Errno>;

#[inline]
pub(crate) fn span(buffer: *const c_void, len: usize) -> [iovec; 1] {
    [iovec { iov_base: buffer.cast_mut(), iov_len: len }]
}

/// Returns the program's spans. Those that the kernel would refuse are left to it.
pub(crate) unsafe fn spans<'a>(spans: *const iovec, count: usize, too_many: Errno) -> Spans<'a> {
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

unsafe fn counted_spans<'a>(vector: *const iovec, count: c_int) -> Spans<'a> {
    let count = usize::try_from(count).map_err(|_| Errno::INVAL)?;
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { self::spans(vector, count, Errno::INVAL) }
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

/// The size of the page at null, which Linux does not map by default (`vm.mmap_min_addr`).
const ADDRESS_MIN: usize = 4096;
/// The end of user space where page tables have five levels.
const ADDRESS_END: usize = 1 << 56;

/// In place of spans: the call is the kernel's.
pub(crate) const KERNEL_ONLY: Errno = Errno::OPNOTSUPP;

/// Returns the spans and the flags of a call. One with a buffer in the page at null is the kernel's to refuse, if its
/// bytes would get there: it gets the spans before that. Whether any other address is mapped, only the kernel knows.
///
/// # Errors
/// `FAULT` for a buffer beyond user space, which the kernel refuses before it looks at the connection.
#[inline]
fn served<'a>(spans: Result<&'a [iovec], &Errno>, flags: c_int) -> Result<(&'a [iovec], MessageFlags), Errno> {
    let is_outside = |span: &iovec| span.iov_base.addr().wrapping_sub(ADDRESS_MIN) >= ADDRESS_END - ADDRESS_MIN;
    let flags = MessageFlags::from_bits(flags);
    match spans {
        Ok(spans) if !spans.iter().any(is_outside) => Ok((spans, flags)),
        Ok(spans) => served_with_bad_address(spans, flags),
        Err(&KERNEL_ONLY) => Ok((&[], flags.of_kernel())),
        Err(error) => Err(*error),
    }
}

#[cold]
fn served_with_bad_address(spans: &[iovec], flags: MessageFlags) -> Result<(&[iovec], MessageFlags), Errno> {
    if spans.iter().any(|span| span.iov_base.addr() >= ADDRESS_END) {
        return Err(Errno::FAULT);
    }
    let is_at_null = |span: &iovec| span.iov_base.addr() < ADDRESS_MIN && span.iov_len > 0;
    Ok(match spans.iter().position(is_at_null) {
        Some(first) if !flags.discard() => (&spans[..first], flags.of_kernel()),
        _ => (spans, flags),
    })
}

/// Returns a count, or -1 with `errno`. `EPIPE` also raises `SIGPIPE`, unless the flags forbid it.
pub(crate) fn count_or_signal(result: Result<usize, Errno>, flags: c_int) -> isize {
    if result == Err(Errno::PIPE) && flags & libc::MSG_NOSIGNAL == 0 {
        // SAFETY: the system calls take integers only; the signal goes to this thread, as the kernel sends it.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::syscall(libc::SYS_gettid), libc::SIGPIPE) };
    }
    count_or_errno(result)
}

/// Sends by the path of the direction; `in_kernel` is the program's own call.
///
/// # Safety
/// The spans are valid as the C program's call requires.
#[inline(always)] // Most calls consist of this short path.
pub(crate) unsafe fn send_by_path<S: AsRef<[iovec]>>(
    fd: c_int,
    flags: c_int,
    spans: impl FnOnce() -> Result<S, Errno>,
    in_kernel: impl FnOnce() -> isize,
) -> isize {
    match table::get(fd) {
        Entry::None | Entry::Set(_) => in_kernel(),
        // The kernel's counts of such a stream are not exact, and the peer may agree to meet at this moment.
        Entry::Young(_) if flags & libc::MSG_OOB != 0 => {
            keeping_errno(|| lifecycle::stay_on_tcp(fd));
            in_kernel()
        }
        Entry::Young(young) => match lifecycle::begin(fd, young, Transfer::Sent) {
            Begun::Uncounted => in_kernel(),
            Begun::Counted(call) => {
                let sent = in_kernel();
                keeping_errno(|| lifecycle::end(fd, &call, usize::try_from(sent).unwrap_or(0)));
                sent
            }
            // SAFETY: the C program's spans, valid as its call requires (manual page).
            Begun::Connection(connection) => unsafe {
                send_by(connection, fd, flags, spans().as_ref().map(AsRef::as_ref), in_kernel)
            },
        },
        // SAFETY: the C program's spans, valid as its call requires (manual page).
        Entry::Connection(connection) => unsafe {
            send_by(connection, fd, flags, spans().as_ref().map(AsRef::as_ref), in_kernel)
        },
    }
}

/// Takes the call to a connection that has proved busy.
///
/// # Safety
/// The spans are valid as the C program's call requires.
unsafe fn send_by(
    connection: &'static Connection,
    fd: c_int,
    flags: c_int,
    spans: Result<&[iovec], &Errno>,
    in_kernel: impl FnOnce() -> isize,
) -> isize {
    cancellation_point();
    if let Err(error) = requirement::check(fd, connection) {
        return fail(error);
    }
    let (spans, flags_of_stream) = match served(spans, flags) {
        Ok(served) => served,
        Err(error) => return fail(error),
    };
    // SAFETY: the C program's spans, valid as its call requires (manual page).
    match unsafe { connection.send(fd, spans, flags_of_stream) } {
        Sent::Done(result) => count_or_signal(result, flags),
        Sent::Kernel(call) => {
            let sent = in_kernel();
            let bytes = usize::try_from(sent).unwrap_or(0);
            let kept = if flags & libc::MSG_OOB == 0 { spans } else { &[] };
            // SAFETY: the kernel has read the bytes that it has sent.
            keeping_errno(|| unsafe { connection.use_of(fd, call).note_sent(kept, bytes) });
            sent
        }
    }
}

/// Receives by the path of the direction; `in_kernel` is the program's own call.
///
/// # Safety
/// The spans are valid as the C program's call requires.
#[inline(always)] // Most calls consist of this short path.
pub(crate) unsafe fn receive_by_path<S: AsRef<[iovec]>>(
    fd: c_int,
    flags: c_int,
    spans: impl FnOnce() -> Result<S, Errno>,
    in_kernel: impl FnOnce() -> isize,
) -> isize {
    match table::get(fd) {
        Entry::None | Entry::Set(_) => in_kernel(),
        Entry::Young(young) => match lifecycle::begin(fd, young, Transfer::Received) {
            Begun::Uncounted => in_kernel(),
            Begun::Counted(call) => {
                let received = in_kernel();
                let taken = if flags & libc::MSG_PEEK == 0 { usize::try_from(received).unwrap_or(0) } else { 0 };
                keeping_errno(|| lifecycle::end(fd, &call, taken));
                received
            }
            // SAFETY: the C program's spans, valid as its call requires (manual page).
            Begun::Connection(connection) => unsafe {
                receive_by(connection, fd, flags, spans().as_ref().map(AsRef::as_ref), in_kernel)
            },
        },
        // SAFETY: the C program's spans, valid as its call requires (manual page).
        Entry::Connection(connection) => unsafe {
            receive_by(connection, fd, flags, spans().as_ref().map(AsRef::as_ref), in_kernel)
        },
    }
}

/// Takes the call to a connection that has proved busy.
///
/// # Safety
/// The spans are valid as the C program's call requires.
unsafe fn receive_by(
    connection: &'static Connection,
    fd: c_int,
    flags: c_int,
    spans: Result<&[iovec], &Errno>,
    in_kernel: impl FnOnce() -> isize,
) -> isize {
    cancellation_point();
    if let Err(error) = requirement::check(fd, connection) {
        return fail(error);
    }
    let (spans, flags_of_stream) = match served(spans, flags) {
        Ok(served) => served,
        Err(error) => return fail(error),
    };
    // SAFETY: the C program's spans, valid as its call requires (manual page).
    match unsafe { connection.receive(fd, spans, flags_of_stream) } {
        Received::Done(result) => count_or_errno(result),
        Received::Kernel(call) => {
            let received = in_kernel();
            let taken = if flags & libc::MSG_PEEK == 0 { usize::try_from(received).unwrap_or(0) } else { 0 };
            // With `MSG_TRUNC`, the kernel drops the bytes.
            let kept = if flags & (libc::MSG_OOB | libc::MSG_TRUNC) == 0 { spans } else { &[] };
            // SAFETY: the kernel has written the bytes that were received.
            keeping_errno(|| unsafe { connection.use_of(fd, call).note_received(kept, taken) });
            received
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, len: usize) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { receive_by_path(fd, 0, || Ok(span(buffer, len)), || real::read(fd, buffer, len)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, buffer: *const c_void, len: usize) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { send_by_path(fd, 0, || Ok(span(buffer, len)), || real::write(fd, buffer, len)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recv(fd: c_int, buffer: *mut c_void, len: usize, flags: c_int) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { receive_by_path(fd, flags, || Ok(span(buffer, len)), || real::recv(fd, buffer, len, flags)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn send(fd: c_int, buffer: *const c_void, len: usize, flags: c_int) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { send_by_path(fd, flags, || Ok(span(buffer, len)), || real::send(fd, buffer, len, flags)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn readv(fd: c_int, vector: *const iovec, count: c_int) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { receive_by_path(fd, 0, || counted_spans(vector, count), || real::readv(fd, vector, count)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn writev(fd: c_int, vector: *const iovec, count: c_int) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { send_by_path(fd, 0, || counted_spans(vector, count), || real::writev(fd, vector, count)) }
}

/// Returns the `recv` or `send` flags that correspond to flags of `preadv2` or `pwritev2`.
fn message_flags(flags: c_int) -> c_int {
    if flags & libc::RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 }
}

/// Returns the spans of a `preadv2` or `pwritev2`, if they are valid for a stream, which has no positions.
unsafe fn positioned_spans<'a>(vector: *const iovec, count: c_int, position: off_t, flags: c_int) -> Spans<'a> {
    const KNOWN: c_int = libc::RWF_NOWAIT | libc::RWF_HIPRI | libc::RWF_DSYNC | libc::RWF_SYNC | libc::RWF_APPEND;
    if position != -1 {
        return Err(Errno::SPIPE);
    }
    if flags & !KNOWN != 0 {
        return Err(KERNEL_ONLY);
    }
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { counted_spans(vector, count) }
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
        receive_by_path(
            fd,
            message_flags(flags),
            || positioned_spans(vector, count, position, flags),
            || real::preadv2(fd, vector, count, position, flags),
        )
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
        send_by_path(
            fd,
            message_flags(flags),
            || positioned_spans(vector, count, position, flags),
            || real::pwritev2(fd, vector, count, position, flags),
        )
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
    let wants_address = !address.is_null() && !address_len.is_null();
    if matches!(table::get(fd), Entry::Connection(_)) && wants_address && !memory::is_writable(address_len) {
        return fail(Errno::FAULT);
    }
    let mut is_kernels = false;
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe {
        let received = receive_by_path(
            fd,
            flags,
            || Ok(span(buffer, len)),
            || {
                is_kernels = true;
                real::recvfrom(fd, buffer, len, flags, address, address_len)
            },
        );
        if received >= 0 && !is_kernels && !address.is_null() && memory::is_writable(address_len) {
            // Data of a stream have no address.
            *address_len = 0;
        }
        received
    }
}

/// As in TCP, a connected stream ignores the address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendto(
    fd: c_int,
    buffer: *const c_void,
    len: usize,
    flags: c_int,
    address: *const sockaddr,
    address_len: socklen_t,
) -> isize {
    let in_kernel = || {
        let epoch = Epoch::now();
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        let sent = unsafe { real::sendto(fd, buffer, len, flags, address, address_len) };
        if flags & libc::MSG_FASTOPEN != 0 && sent > 0 {
            lifecycle::note_connected(fd, epoch);
        }
        sent
    };
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { send_by_path(fd, flags, || Ok(span(buffer, len)), in_kernel) }
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
