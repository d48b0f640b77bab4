//! `dup`, `fcntl`, `ioctl`: duplicates and modes of descriptors.

use crate::errno::{count_or_errno, create_descriptor, fail, preserving_errno};
use crate::{files, real};
use rustix::io::Errno;
use socket::entry::{self, Entry};
use socket::lifecycle;
use socket::process::memory;
use std::ffi::{c_int, c_uint, c_ulong};

/// The error for `O_ASYNC`: a send into a lane raises no signal at the peer, so that a program would wait for one
/// forever.
const NO_SIGNALS: Errno = Errno::OPNOTSUPP;
/// As `F_SETOWN`, but may name a thread.
const F_SETOWN_EX: c_int = 15;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup(fd: c_int) -> c_int {
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    noted_duplicate(fd, create_descriptor(|| unsafe { real::dup(fd) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    duplicate_onto(old, new, || unsafe { real::dup2(old, new) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    let in_kernel = || unsafe { real::dup3(old, new, flags) };
    // A `dup3` that the kernel refuses closes nothing.
    if flags & !libc::O_CLOEXEC == 0 { duplicate_onto(old, new, in_kernel) } else { in_kernel() }
}

/// Refuses connections: they consist of more than a descriptor, and the owner does not hand over the rest, so that the
/// duplicate would never receive anything.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pidfd_getfd(pidfd: c_int, target: c_int, flags: c_uint) -> c_int {
    let arguments = [pidfd as usize, target as usize, flags as usize];
    // SAFETY: the call takes no pointers.
    let call = || unsafe { socket::process::system::call_kernel(libc::SYS_pidfd_getfd, arguments) as c_int };
    let fd = create_descriptor(call);
    if fd >= 0 && lifecycle::is_lifeline(fd) {
        // SAFETY: the call has just returned the descriptor, and nothing else uses its number.
        unsafe { real::close(fd) };
        return fail(Errno::PERM);
    }
    fd
}

fn duplicate_onto(old: c_int, new: c_int, call: impl FnOnce() -> c_int) -> c_int {
    if let Err(error) = lifecycle::duplicate_onto(old, new) {
        return fail(error);
    }
    preserving_errno(|| {
        let result = call();
        if old != new {
            noted_duplicate(old, result);
            files::follow_standard_stream(result);
        }
        result
    })
}

fn noted_duplicate(old: c_int, new: c_int) -> c_int {
    if new >= 0 {
        lifecycle::duplicate(old, new);
    }
    new
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: usize) -> c_int {
    let entry = entry::get(fd);
    match (command, entry) {
        (_, Entry::None) => {
            // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
            unsafe { real::fcntl(fd, command, argument) }
        }
        (libc::F_DUPFD | libc::F_DUPFD_CLOEXEC, _) => {
            // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
            noted_duplicate(fd, create_descriptor(|| unsafe { real::fcntl(fd, command, argument) }))
        }
        (libc::F_SETFL, Entry::Connection(_) | Entry::Listener(_)) if argument as c_int & libc::O_ASYNC != 0 => {
            fail(NO_SIGNALS)
        }
        (libc::F_SETFL, Entry::Connection(connection)) => {
            // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
            let result = unsafe { real::fcntl(fd, command, argument) };
            if result == 0 {
                connection.set_nonblocking(argument as c_int & libc::O_NONBLOCK != 0);
            }
            result
        }
        (libc::F_SETFL, Entry::Listener(listener)) => {
            // SAFETY: the C program's arguments, passed on to libc; the kernel socket stays non-blocking.
            let result = unsafe { real::fcntl(fd, command, argument | libc::O_NONBLOCK as usize) };
            if result == 0 {
                listener.set_nonblocking(argument as c_int & libc::O_NONBLOCK != 0);
            }
            result
        }
        (libc::F_GETFL, Entry::Listener(listener)) if !listener.is_nonblocking() => {
            // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
            let flags = unsafe { real::fcntl(fd, command, argument) };
            if flags < 0 { flags } else { flags & !libc::O_NONBLOCK }
        }
        (libc::F_SETOWN | F_SETOWN_EX, Entry::Connection(connection)) => {
            // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
            let result = unsafe { real::fcntl(fd, command, argument) };
            if result == 0 {
                connection.note_signal_owner();
            }
            result
        }
        (libc::F_SETFD, Entry::Connection(_) | Entry::Listener(_)) => {
            // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
            let result = unsafe { real::fcntl(fd, command, argument) };
            lifecycle::set_cloexec(fd);
            result
        }
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        _ => unsafe { real::fcntl(fd, command, argument) },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: usize) -> c_int {
    let result = match entry::get(fd) {
        // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
        Entry::Connection(_) | Entry::Listener(_) if request == libc::FIOASYNC && unsafe { is_on(argument) } => {
            fail(NO_SIGNALS)
        }
        // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
        Entry::Connection(connection) => unsafe { connection_ioctl(fd, connection, request, argument) },
        Entry::Listener(listener) if request == libc::FIONBIO => {
            if !memory::is_readable(argument as *const c_int) {
                return fail(Errno::FAULT);
            }
            // SAFETY: the integer is readable, as was just checked.
            listener.set_nonblocking(unsafe { is_on(argument) });
            0
        }
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        _ => unsafe { real::ioctl(fd, request, argument) },
    };
    if matches!(request, libc::FIOCLEX | libc::FIONCLEX) {
        lifecycle::set_cloexec(fd);
    }
    result
}

/// Returns whether the integer that an `ioctl` argument points to is not 0.
unsafe fn is_on(argument: usize) -> bool {
    let argument = argument as *const c_int;
    // SAFETY: the integer is readable, as is checked first.
    memory::is_readable(argument) && unsafe { *argument != 0 }
}

unsafe fn connection_ioctl(
    fd: c_int,
    connection: &'static socket::connection::Connection,
    request: c_ulong,
    argument: usize,
) -> c_int {
    const FIOSETOWN: c_ulong = 0x8901;
    const SIOCSPGRP: c_ulong = 0x8902;
    const FIOGETOWN: c_ulong = 0x8903;
    const SIOCGPGRP: c_ulong = 0x8904;
    const SIOCATMARK: c_ulong = 0x8905;
    const SIOCOUTQNSD: c_ulong = 0x894b;
    const SIOCGSKNS: c_ulong = 0x894c;
    let store = |value: usize| {
        let place = argument as *mut c_int;
        if !memory::is_writable(place) {
            return fail(Errno::FAULT);
        }
        // SAFETY: the integer is writable, as was just checked.
        unsafe { place.write(c_int::try_from(value).unwrap_or(c_int::MAX)) };
        0
    };
    match request {
        libc::FIONREAD => store(connection.unread_bytes()),
        libc::TIOCOUTQ => store(connection.unsent_bytes()),
        // Everything else has been stored in the lane; no packet waits to be sent.
        SIOCOUTQNSD => store(connection.held_bytes()),
        SIOCATMARK => store(usize::from(connection.is_at_mark())),
        libc::FIONBIO => {
            // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
            let result = unsafe { real::ioctl(fd, request, argument) };
            if result == 0 {
                // SAFETY: `FIONBIO` has succeeded, so that the kernel has just read the integer.
                connection.set_nonblocking(unsafe { *(argument as *const c_int) } != 0);
            }
            result
        }
        // Requests about the descriptor itself.
        libc::FIOCLEX | libc::FIONCLEX | libc::FIOASYNC | libc::FIOQSIZE | SIOCGSKNS => {
            // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
            unsafe { real::ioctl(fd, request, argument) }
        }
        FIOSETOWN | SIOCSPGRP | FIOGETOWN | SIOCGPGRP => {
            // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
            let result = unsafe { real::ioctl(fd, request, argument) };
            if result == 0 && matches!(request, FIOSETOWN | SIOCSPGRP) {
                connection.note_signal_owner();
            }
            result
        }
        _ => {
            // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
            let result = unsafe { lifecycle::ioctl_as_tcp(connection, request, argument) };
            count_or_errno(result.map(|value| value as usize)) as c_int
        }
    }
}

aliases! {
    fcntl64(fd: c_int, command: c_int, argument: usize) -> c_int = fcntl(fd, command, argument);
}
