//! `dup`, `fcntl`, `ioctl`: duplicates and modes of descriptors.

use crate::errno::{create_descriptor, fail, keeping_errno};
use crate::{files, real};
use socket::descriptor::hidden;
use socket::process::memory;
use std::ffi::{c_int, c_uint, c_ulong};
use stream::lifecycle;
use stream::table::{self, Entry};

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
    if flags & !libc::O_CLOEXEC == 0 && old != new { duplicate_onto(old, new, in_kernel) } else { in_kernel() }
}

fn duplicate_onto(old: c_int, new: c_int, call: impl FnOnce() -> c_int) -> c_int {
    if old != new {
        if let Err(error) = hidden::relocate(new) {
            return fail(error);
        }
        // SAFETY: the call only reads the flags, and fails for a closed number.
        if !stream::process::is_confined() && unsafe { real::fcntl(old, libc::F_GETFD, 0) } >= 0 {
            keeping_errno(|| lifecycle::before_close(new));
        }
    }
    let result = noted_duplicate(old, call());
    if old != new {
        keeping_errno(|| files::follow_standard_stream(result));
    }
    result
}

/// A descriptor of another process, which is not known here: what it receives and sends is TCP's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pidfd_getfd(pidfd: c_int, target: c_int, flags: c_uint) -> c_int {
    let arguments = [pidfd as usize, target as usize, flags as usize];
    // SAFETY: the call takes no pointers.
    let call = || unsafe { socket::process::system::call_kernel(libc::SYS_pidfd_getfd, arguments) as c_int };
    let fd = create_descriptor(call);
    if fd >= 0 {
        keeping_errno(|| lifecycle::note_obtained(fd));
    }
    fd
}

fn noted_duplicate(old: c_int, new: c_int) -> c_int {
    if new >= 0 && new != old {
        keeping_errno(|| lifecycle::note_duplicate(old, new));
    }
    new
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: usize) -> c_int {
    if command == libc::F_SETFL && argument as c_int & libc::O_ASYNC != 0 {
        keeping_errno(|| lifecycle::stay_on_tcp(fd));
    }
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    let call = || unsafe { real::fcntl(fd, command, argument) };
    let duplicates = matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC);
    let result = if duplicates { create_descriptor(call) } else { call() };
    match (command, table::get(fd)) {
        (libc::F_DUPFD | libc::F_DUPFD_CLOEXEC, _) => noted_duplicate(fd, result),
        (libc::F_SETFL, Entry::Connection(connection)) if result == 0 => {
            connection.set_nonblocking(argument as c_int & libc::O_NONBLOCK != 0);
            result
        }
        _ => result,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: usize) -> c_int {
    const SIOCATMARK: c_ulong = 0x8905;
    if request == libc::FIOASYNC {
        keeping_errno(|| lifecycle::stay_on_tcp(fd));
    }
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    let result = unsafe { real::ioctl(fd, request, argument) };
    let Entry::Connection(connection) = table::get(fd) else { return result };
    let number = argument as *mut c_int;
    let is_known = matches!(request, libc::FIONBIO | libc::FIONREAD | libc::TIOCOUTQ | SIOCATMARK);
    if result == 0 && is_known && memory::is_writable(number) {
        // SAFETY: the kernel has accepted the pointer, and the number is writable, as was just checked.
        unsafe {
            match request {
                libc::FIONBIO => connection.set_nonblocking(*number != 0),
                libc::FIONREAD => *number = connection.unread_bytes(fd, number.read()),
                // The mark is in TCP, behind what is in the lane.
                SIOCATMARK if connection.unread_bytes(fd, 0) > 0 => *number = 0,
                libc::TIOCOUTQ => *number = number.read().saturating_add(connection.unsent_bytes()),
                _ => {}
            }
        }
    }
    result
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sockatmark(fd: c_int) -> c_int {
    match table::get(fd) {
        Entry::Connection(connection) if connection.unread_bytes(fd, 0) > 0 => 0,
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        _ => unsafe { real::sockatmark(fd) },
    }
}

aliases! {
    fcntl64(fd: c_int, command: c_int, argument: usize) -> c_int = fcntl(fd, command, argument);
}
