//! `connect`, `accept`, `shutdown` and options. All of them are the kernel's; the library notes what they mean for a
//! connection.

use crate::errno::{create_descriptor, keeping_errno, zero_or_errno};
use crate::{files, real};
use libc::{sockaddr, socklen_t};
use rustix::io::Errno;
use socket::process::memory;
use socket::process::settings::settings;
use socket::rack::address::{encode_sockaddr, read_sockaddr, write_sockaddr};
use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use stream::sharing::Epoch;
use stream::table::{self, Entry};
use stream::{lifecycle, remote};

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
    // SAFETY: the C program's call requires the address to be readable for its length.
    let remote = if dissolves { None } else { unsafe { connect_to_node(fd, address, len) } };
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    let result = remote.map_or_else(|| unsafe { real::connect(fd, address, len) }, zero_or_errno);
    // SAFETY: libc's own variable of this thread.
    if !dissolves && (result == 0 || unsafe { *libc::__errno_location() } == libc::EINPROGRESS) {
        keeping_errno(|| lifecycle::note_connected(fd, epoch));
    }
    result
}

/// Connects to a program of another node, by the proxy; `None` if the address is not one of another node.
///
/// # Safety
/// `address` is null or readable for `len` bytes.
unsafe fn connect_to_node(fd: c_int, address: *const sockaddr, len: socklen_t) -> Option<Result<(), Errno>> {
    settings().node?;
    keeping_errno(|| {
        // SAFETY: as this function's contract says.
        let destination = unsafe { read_sockaddr(address, len) }.ok()?;
        remote::connect(fd, destination, |to| {
            let (bytes, len) = encode_sockaddr(to);
            // SAFETY: the address is a local of this length.
            match unsafe { real::connect(fd, bytes.as_ptr().cast(), len as socklen_t) } {
                0 => Ok(()),
                _ => Err(socket::process::system::errno()),
            }
        })
    })
}

/// Shows the program the address of the other node's program instead of the proxy's.
///
/// # Safety
/// As [`write_sockaddr`].
unsafe fn show(shown: Option<SocketAddr>, address: *mut sockaddr, len: *mut socklen_t, room: socklen_t) {
    if let Some(shown) = shown {
        // SAFETY: the kernel has just written an address and its length there.
        unsafe {
            *len = room;
            let _ = write_sockaddr(shown, address, len);
        }
    }
}

/// Returns how many bytes of an address the program has room for; 0 if it wants none.
///
/// # Safety
/// `len` is null or readable, if it is mapped at all.
unsafe fn room_of(len: *const socklen_t) -> socklen_t {
    // SAFETY: readable, as was just checked.
    if settings().node.is_some() && memory::is_readable(len) { unsafe { *len } } else { 0 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getpeername(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the C program's arguments; its call requires them to be valid.
    unsafe {
        let room = room_of(len);
        let result = real::getpeername(fd, address, len);
        if result == 0 && room > 0 {
            keeping_errno(|| show(remote::peer_address(fd), address, len, room));
        }
        result
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockname(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the C program's arguments; its call requires them to be valid.
    unsafe {
        let room = room_of(len);
        let result = real::getsockname(fd, address, len);
        if result == 0 && room > 0 {
            keeping_errno(|| show(remote::source_address(fd), address, len, room));
        }
        result
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept4(fd: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int {
    let epoch = Epoch::now();
    // SAFETY: the C program's call requires the length to be readable.
    let room = unsafe { room_of(len) };
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    let new = create_descriptor(|| unsafe { real::accept4(fd, address, len, flags) });
    if new >= 0 {
        keeping_errno(|| {
            if room > 0 && !address.is_null() {
                // SAFETY: the kernel has just written an address and its length there.
                unsafe { show(remote::peer_address(new), address, len, room) };
            }
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
    let is_error = result == 0 && (level, name) == (libc::SOL_SOCKET, libc::SO_ERROR);
    let number = value.cast::<c_int>();
    if is_error
        // SAFETY: the kernel has just written this number of bytes there, and the number.
        && unsafe { *len as usize >= size_of::<c_int>() && number.read_unaligned() == libc::ECONNRESET }
        && keeping_errno(|| remote::is_refused(fd))
    {
        // SAFETY: the kernel has just written a whole number there, as was checked.
        unsafe { number.write_unaligned(libc::ECONNREFUSED) };
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
