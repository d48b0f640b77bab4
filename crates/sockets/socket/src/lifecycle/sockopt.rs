//! `getsockopt` and `setsockopt` of connections, and the record of options that programs have set before.

use super::{deferral, listen::leave_to_kernel};
use crate::connection::Connection;
use crate::entry::{self, Entry};
use crate::listener;
use crate::listener::Listener;
use crate::options::{
    self, ConnectionOption, OptionRecord, PACKET_BYTES_MAX, SEGMENT_BYTES_MAX, SocketOption, TcpInfo,
};
use crate::rendezvous::address::{Family, encode_sockaddr};
use crate::stream::Stream;
use rustix::io::Errno;
use std::ffi::c_void;
use std::os::fd::RawFd;

/// The round-trip time of a lane, where TCP reports one.
const ROUND_TRIP_US: u32 = 1;

/// `getsockopt(2)` of a connection.
///
/// # Errors
/// Those of `getsockopt(2)` on a TCP socket.
///
/// # Safety
/// `length_inout` is null or readable and writable; `value` is null or writable for as many bytes as it says.
pub unsafe fn get_option(
    connection: &'static Connection,
    level: i32,
    name: i32,
    value: *mut c_void,
    length_inout: *mut libc::socklen_t,
) -> Result<(), Errno> {
    let option = SocketOption { level, name };
    if let Some(bit) = option.shared_bit() {
        let is_on = connection.has_shared_option(bit);
        connection.with_options(|record| record.note_shared(option, is_on));
    }
    let by_template = || {
        let (family, record) = (family_of(connection), connection.with_options(|record| record.clone()));
        // SAFETY: the caller guarantees `value` and `length_inout` as this function requires.
        unsafe { record.get_c(family, option, value, length_inout) }
    };
    let Some(special) = ConnectionOption::of(option) else { return by_template() };
    let bytes = match special {
        ConnectionOption::Error => connection.take_error().to_ne_bytes().to_vec(),
        ConnectionOption::ReceiveTimeout => {
            options::timeval(connection.with_options(|record| record.receive_timeout_ns())).to_vec()
        }
        ConnectionOption::SendTimeout => {
            options::timeval(connection.with_options(|record| record.send_timeout_ns())).to_vec()
        }
        ConnectionOption::SendBuffer => {
            match connection.with_options(|record| record.send_buffer_bytes_established()) {
                Some(bytes) => bytes.to_ne_bytes().to_vec(),
                None => return by_template(),
            }
        }
        ConnectionOption::WindowClamp => match connection.with_options(|record| record.window_clamp_bytes()) {
            Some(bytes) => bytes.to_ne_bytes().to_vec(),
            None => return by_template(),
        },
        ConnectionOption::TcpInfo => options::tcp_info(&facts_of(connection)).to_vec(),
        ConnectionOption::MaxSegment => SEGMENT_BYTES_MAX.to_ne_bytes().to_vec(),
        ConnectionOption::MaxPacket => PACKET_BYTES_MAX.to_ne_bytes().to_vec(),
        ConnectionOption::PeerName => {
            let tuple = connection.tuple().ok_or(Errno::NOTCONN)?;
            let (bytes, len_bytes) = encode_sockaddr(tuple.peer);
            bytes[..len_bytes].to_vec()
        }
        ConnectionOption::Lifeline => {
            // SAFETY: the caller vouches for `value` and `length_inout`; the descriptor is the connection's own.
            return unsafe { get_on_lifeline(connection.lifeline(), option, value, length_inout) };
        }
    };
    // SAFETY: the caller guarantees `value` and `length_inout` as this function requires.
    unsafe { options::write_value(&bytes, value, length_inout) }
}

/// `setsockopt(2)` of a connection.
///
/// # Errors
/// Those of `setsockopt(2)` on a TCP socket.
///
/// # Safety
/// `value` is readable for `length` bytes, or null.
pub unsafe fn set_option(
    connection: &'static Connection,
    level: i32,
    name: i32,
    value: *const c_void,
    length: libc::socklen_t,
) -> Result<(), Errno> {
    let option = SocketOption { level, name };
    if option.takes_any_number() {
        // Most connections set this option. The lifeline has an option of the same kind that it does not use, by which
        // the kernel checks `value`.
        let alike = SocketOption { level: libc::SOL_SOCKET, name: libc::SO_DONTROUTE };
        // SAFETY: the caller guarantees that `value` is readable for `length` bytes or null, and the kernel refuses
        // null.
        unsafe { set_on_lifeline(connection.lifeline(), alike, value, length)? };
        // SAFETY: the kernel has just read the value, so it is readable for `length` bytes.
        let is_on = connection.with_options(|record| unsafe {
            record.note_c(option, value, length);
            record.is_on(option)
        });
        set_shared(connection, option, is_on);
        return Ok(());
    }
    // The template takes several system calls, which must not run under the connection's lock.
    let mut copy = connection.with_options(|record| record.clone());
    // SAFETY: the caller guarantees that `value` is readable for `length` bytes, or null, which the kernel refuses.
    unsafe { copy.set_c(family_of(connection), option, value, length)? };
    // SAFETY: the kernel has just accepted the value, so it is readable for `length` bytes.
    connection.with_options(|record| unsafe { record.note_c(option, value, length) });
    connection.apply_recorded_options();
    set_shared(connection, option, connection.with_options(|record| record.is_on(option)));
    Ok(())
}

/// Sets an option in the memory of the connection if all processes that hold the endpoint share it.
fn set_shared(connection: &'static Connection, option: SocketOption, is_on: bool) {
    let Some(bit) = option.shared_bit() else { return };
    connection.set_shared_options(bit, if is_on { bit } else { 0 });
    // As with TCP, held bytes are sent, and the cork stays.
    if is_on && bit == options::NO_DELAY {
        connection.push();
    }
}

/// `ioctl(2)` of a connection for a request that the kernel knows of TCP sockets only.
///
/// # Errors
/// Those of `ioctl(2)` on a TCP socket.
///
/// # Safety
/// `argument` is valid for the request, or the kernel refuses it.
pub unsafe fn ioctl_as_tcp(connection: &'static Connection, request: u64, argument: usize) -> Result<i32, Errno> {
    // SAFETY: the caller guarantees that `argument` is valid for the request or refused by the kernel.
    unsafe { options::ioctl_of_template(family_of(connection), request, argument) }
}

/// Returns the error of an option that lanes cannot honour, for a listener with a lane listener.
///
/// # Safety
/// `value` is null or readable for `length` bytes.
pub unsafe fn refusal(level: i32, name: i32, value: *const c_void, length: libc::socklen_t) -> Option<Errno> {
    // SAFETY: the caller guarantees that `value` is null or readable for `length` bytes.
    unsafe { SocketOption { level, name }.refusal_c(value, length) }
}

/// Records an option that the kernel has accepted on a TCP socket which may become a connection.
///
/// # Errors
/// `MFILE` and similar errors, when a listener needs a descriptor for the option and none is free.
///
/// # Safety
/// `value` is null or readable for `length` bytes.
pub unsafe fn note_option(
    fd: RawFd,
    level: i32,
    name: i32,
    value: *const c_void,
    length: libc::socklen_t,
) -> Result<(), Errno> {
    let option = SocketOption { level, name };
    // SAFETY: the caller guarantees that `value` is null or readable for `length` bytes.
    let note = |record: &mut OptionRecord| unsafe { record.note_c(option, value, length) };
    match entry::get(fd) {
        Entry::Stream(stream) => Stream::with_options(stream, note),
        Entry::Listener(listener) => {
            Listener::with_options(listener, note);
            // From now on clients connect by kernel TCP only, which honours the option.
            if listener.with_options(|options| options.needs_kernel_tcp()) {
                leave_to_kernel(listener);
                return Ok(());
            }
            if option == listener::DEFER_ACCEPT {
                return deferral::apply_option(fd, listener);
            }
        }
        _ => {}
    }
    Ok(())
}

fn family_of(connection: &Connection) -> Family {
    match connection.tuple() {
        Some(tuple) if tuple.local.is_ipv6() => Family::V6,
        _ => Family::V4,
    }
}

fn facts_of(connection: &'static Connection) -> TcpInfo {
    let (bytes_sent, bytes_received) = connection.carried_bytes();
    TcpInfo {
        state: connection.tcp_state(),
        rtt_us: ROUND_TRIP_US,
        bytes_acked: bytes_sent,
        bytes_received,
        bytes_unsent: 0,
    }
}

/// Sets an option of the lifeline.
///
/// # Safety
/// `value` is readable for `length` bytes, or null.
unsafe fn set_on_lifeline(
    fd: RawFd,
    option: SocketOption,
    value: *const c_void,
    length: libc::socklen_t,
) -> Result<(), Errno> {
    // SAFETY: the caller guarantees that `value` is readable for `length` bytes or null, which the kernel refuses.
    let result =
        unsafe { crate::process::system::call!(libc::SYS_setsockopt, fd, option.level, option.name, value, length) };
    crate::process::system::unit_or_error(result)
}

unsafe fn get_on_lifeline(
    fd: RawFd,
    option: SocketOption,
    value: *mut c_void,
    length_inout: *mut libc::socklen_t,
) -> Result<(), Errno> {
    // SAFETY: the caller guarantees that `value` and `length_inout` are valid or null, which the kernel refuses.
    let result = unsafe {
        crate::process::system::call!(libc::SYS_getsockopt, fd, option.level, option.name, value, length_inout)
    };
    crate::process::system::unit_or_error(result)
}
