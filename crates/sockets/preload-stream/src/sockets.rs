//! `connect`, `accept`, `shutdown` and options. All of them are the kernel's; the library notes what they mean for a
//! connection.

use crate::errno::{create_descriptor, keeping_errno};
use crate::{files, real};
use libc::{sockaddr, socklen_t};
use socket::process::memory;
use std::ffi::{c_int, c_void};
use stream::lifecycle;
use stream::sharing::Epoch;
use stream::table::{self, Entry};

/// Unlike other calls that create descriptors, those of this library have room made for them: sockets, epoll instances
/// and duplicates are what a server at its limit needs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    create_descriptor(|| unsafe { real::socket(domain, kind, protocol) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: readable, as is checked first.
    let dissolves = memory::is_readable(address) && unsafe { (*address).sa_family } == libc::AF_UNSPEC as u16;
    if dissolves {
        keeping_errno(|| lifecycle::stay_on_tcp(fd));
    }
    let epoch = Epoch::now();
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    let result = unsafe { real::connect(fd, address, len) };
    // SAFETY: libc's own variable of this thread.
    if !dissolves && (result == 0 || unsafe { *libc::__errno_location() } == libc::EINPROGRESS) {
        keeping_errno(|| lifecycle::note_connected(fd, epoch));
    }
    result
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept4(fd: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int {
    let epoch = Epoch::now();
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    let new = create_descriptor(|| unsafe { real::accept4(fd, address, len, flags) });
    if new >= 0 {
        keeping_errno(|| {
            lifecycle::note_accepted(new, epoch);
            files::follow_standard_stream(new);
        });
    }
    new
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    keeping_errno(|| lifecycle::before_option(fd, level, name));
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    let result = unsafe { real::setsockopt(fd, level, name, value, len) };
    keeping_errno(|| lifecycle::after_option(fd, level, name));
    result
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    if (level, name) == (libc::IPPROTO_TCP, libc::TCP_ZEROCOPY_RECEIVE) {
        // It receives.
        keeping_errno(|| lifecycle::stay_on_tcp(fd));
    }
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    let result = unsafe { real::getsockopt(fd, level, name, value, len) };
    if result == 0
        && (level, name) == (libc::IPPROTO_TCP, libc::TCP_INFO)
        && let Entry::Connection(connection) = table::get(fd)
    {
        // SAFETY: the kernel has just written this number of bytes there, and the number.
        let info = unsafe { std::slice::from_raw_parts_mut(value.cast::<u8>(), *len as usize) };
        connection.amend_tcp_info(info);
    }
    result
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    let is_young = keeping_errno(|| lifecycle::before_shutdown(fd, how));
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    let result = unsafe { real::shutdown(fd, how) };
    if is_young {
        keeping_errno(|| lifecycle::after_shutdown(fd, how));
    }
    result
}

aliases! {
    accept(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int = accept4(fd, address, len, 0);
}
