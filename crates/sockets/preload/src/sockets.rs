//! `socket`, `listen`, `accept`, `connect`, names and options.

use crate::errno::{create_descriptor, fail, preserving_errno, zero_or_errno};
use crate::{closing, real};
use libc::{sockaddr, socklen_t};
use rustix::io::Errno;
use socket::connection::{SHUTDOWN_READ, SHUTDOWN_WRITE};
use socket::entry::{self, Entry};
use socket::lifecycle::{self, Outcome};
use socket::process::background_connects;
use socket::rendezvous::address;
use std::ffi::{c_int, c_void};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    let call = || unsafe { real::socket(domain, kind, protocol) };
    preserving_errno(|| {
        let fd = create_descriptor(call);
        if fd >= 0 {
            lifecycle::note_socket(fd, domain, kind, protocol);
        }
        fd
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    preserving_errno(|| unsafe { bind_and_note(fd, address, len) })
}

unsafe fn bind_and_note(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    let wanted = match entry::get(fd) {
        // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
        Entry::Stream(_) => unsafe { address::read_sockaddr(address, len) }.ok(),
        _ => None,
    };
    if let Some(Err(error)) = wanted.map(|wanted| lifecycle::may_bind(fd, wanted)) {
        return fail(error);
    }
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    let result = unsafe { real::bind(fd, address, len) };
    if let (0, Some(wanted)) = (result, wanted) {
        lifecycle::note_bound(fd, wanted);
    }
    result
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    let in_kernel = || {
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        if unsafe { real::listen(fd, backlog) } == 0 { Ok(()) } else { Err(socket::process::system::errno()) }
    };
    preserving_errno(|| zero_or_errno(lifecycle::listen(fd, backlog, in_kernel)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    if matches!(entry::get(fd), Entry::None) {
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        return unsafe { real::connect(fd, address, len) };
    }
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    preserving_errno(|| unsafe { connect_stream(fd, address, len) })
}

unsafe fn connect_stream(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let destination = unsafe { address::read_sockaddr(address, len) };
    match lifecycle::connect(fd, destination) {
        Outcome::Complete(result) => zero_or_errno(result),
        Outcome::Kernel => {
            // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
            let result = unsafe { real::connect(fd, address, len) };
            // SAFETY: libc's own variable of this thread.
            let error = unsafe { *libc::__errno_location() };
            if result < 0 && !matches!(error, libc::EINPROGRESS | libc::EALREADY | libc::EINTR | libc::EISCONN) {
                lifecycle::note_kernel_failure(fd);
                // SAFETY: libc's own variable of this thread.
                unsafe { *libc::__errno_location() = error };
            }
            result
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept4(fd: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int {
    let Entry::Listener(listener) = entry::get(fd) else {
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        return create_descriptor(|| unsafe { real::accept4(fd, address, len, flags) });
    };
    if flags & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) != 0 {
        return fail(Errno::INVAL);
    }
    let call = || {
        socket::process::limit::retry_with_room(
            || lifecycle::accept(fd, listener, flags),
            |error| *error == Errno::MFILE,
        )
    };
    preserving_errno(|| match call() {
        Ok(new) => {
            if let Some(peer) = new.peer
                && !address.is_null()
            {
                // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
                if let Err(error) = unsafe { address::write_sockaddr(peer, address, len) } {
                    // SAFETY: the program does not know the descriptor. The kernel closes the connection too.
                    unsafe { closing::close(new.fd) };
                    return fail(error);
                }
            }
            new.fd
        }
        Err(error) => fail(error),
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    match entry::get(fd) {
        Entry::Connection(connection) => {
            zero_or_errno(directions_of(how).and_then(|directions| connection.shutdown(directions)))
        }
        Entry::Confined(connection) if connection.sends_confined_by_lane() => match directions_of(how) {
            Ok(directions) => {
                connection.note_confined_shutdown(directions);
                // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
                unsafe { real::shutdown(fd, how) }
            }
            Err(error) => fail(error),
        },
        Entry::Listener(listener) => {
            // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
            let result = unsafe { real::shutdown(fd, how) };
            if result == 0 && how != libc::SHUT_WR {
                lifecycle::shutdown_listener(listener);
            }
            result
        }
        entry => {
            if let Entry::Stream(stream) = entry {
                lifecycle::abandon_connect(stream);
            }
            // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
            unsafe { real::shutdown(fd, how) }
        }
    }
}

/// Returns the directions that a `shutdown` names.
fn directions_of(how: c_int) -> Result<u64, Errno> {
    match how {
        libc::SHUT_RD => Ok(SHUTDOWN_READ),
        libc::SHUT_WR => Ok(SHUTDOWN_WRITE),
        libc::SHUT_RDWR => Ok(SHUTDOWN_READ | SHUTDOWN_WRITE),
        _ => Err(Errno::INVAL),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sockatmark(fd: c_int) -> c_int {
    match entry::get(fd) {
        Entry::Connection(connection) => c_int::from(connection.is_at_mark()),
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        _ => unsafe { real::sockatmark(fd) },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockname(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    match entry::get(fd) {
        Entry::Connection(connection) | Entry::Confined(connection) => match connection.tuple() {
            // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
            Some(tuple) => zero_or_errno(unsafe { address::write_sockaddr(tuple.local, address, len) }),
            None => fail(Errno::BADF),
        },
        entry => {
            if let Entry::Stream(stream) = entry {
                lifecycle::note_address_read(stream);
            }
            // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
            unsafe { real::getsockname(fd, address, len) }
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getpeername(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    background_connects::advance();
    match entry::get(fd) {
        Entry::Connection(connection) | Entry::Confined(connection) => match connection.tuple() {
            Some(_) if connection.is_closed() => fail(Errno::NOTCONN),
            // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
            Some(tuple) => zero_or_errno(unsafe { address::write_sockaddr(tuple.peer, address, len) }),
            None => fail(Errno::BADF),
        },
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        _ => unsafe { real::getpeername(fd, address, len) },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    background_connects::advance();
    match entry::get(fd) {
        Entry::Connection(connection) | Entry::Confined(connection) => {
            // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
            zero_or_errno(unsafe { lifecycle::get_option(connection, level, name, value, len) })
        }
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        _ => unsafe { real::getsockopt(fd, level, name, value, len) },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    match entry::get(fd) {
        Entry::Connection(connection) | Entry::Confined(connection) => {
            // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
            zero_or_errno(unsafe { lifecycle::set_option(connection, level, name, value, len) })
        }
        // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
        Entry::Listener(_) if let Some(error) = unsafe { lifecycle::refusal(level, name, value, len) } => fail(error),
        Entry::Stream(_) | Entry::Listener(_) => {
            // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
            let result = unsafe { real::setsockopt(fd, level, name, value, len) };
            if result < 0 {
                return result;
            }
            // SAFETY: the kernel has just read the value, so that it is readable for `len` bytes.
            zero_or_errno(unsafe { lifecycle::note_option(fd, level, name, value, len) })
        }
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        _ => unsafe { real::setsockopt(fd, level, name, value, len) },
    }
}

aliases! {
    accept(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int = accept4(fd, address, len, 0);
}
