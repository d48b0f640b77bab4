//! `getsockopt` and `setsockopt` of connections, and the record of what programs set before.

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

/// What a lane's round trip is said to be, where TCP reports one.
const ROUND_TRIP_US: u32 = 1;

/// `getsockopt(2)` of a connection.
///
/// # Errors
/// As `getsockopt(2)` of a TCP socket.
///
/// # Safety
/// `value` is writable for as many bytes as `length_inout` says, or null.
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
        // SAFETY: the caller's.
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
    // SAFETY: the caller's.
    unsafe { options::answer(&bytes, value, length_inout) }
}

/// `setsockopt(2)` of a connection.
///
/// # Errors
/// As `setsockopt(2)` of a TCP socket.
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
        // Most connections get this one. The lifeline knows an option of the same kind, and has no use for it.
        let alike = SocketOption { level: libc::SOL_SOCKET, name: libc::SO_DONTROUTE };
        // SAFETY: our caller says that `value` is readable for `length` bytes or null, and the kernel refuses null.
        unsafe { set_on_lifeline(connection.lifeline(), alike, value, length)? };
        // SAFETY: the kernel has just read the value, so it is readable for `length` bytes.
        let is_on = connection.with_options(|record| unsafe {
            record.note_c(option, value, length);
            record.is_on(option)
        });
        set_shared(connection, option, is_on);
        return Ok(());
    }
    // The template is several system calls: not under the connection's lock.
    let mut copy = connection.with_options(|record| record.clone());
    // SAFETY: the caller's.
    unsafe { copy.set_c(family_of(connection), option, value, length)? };
    // SAFETY: the caller's; the kernel has just accepted the value.
    connection.with_options(|record| unsafe { record.note_c(option, value, length) });
    connection.apply_recorded_options();
    set_shared(connection, option, connection.with_options(|record| record.is_on(option)));
    Ok(())
}

/// Tells the other processes that hold the end, if the option is one that they share.
fn set_shared(connection: &'static Connection, option: SocketOption, is_on: bool) {
    let Some(bit) = option.shared_bit() else { return };
    connection.set_shared_options(bit, if is_on { bit } else { 0 });
    // As TCP's: what is held back goes, the cork stays.
    if is_on && bit == options::NO_DELAY {
        connection.push();
    }
}

/// `ioctl(2)` of a connection for a request that the kernel knows of TCP sockets only.
///
/// # Errors
/// As `ioctl(2)` of a TCP socket.
///
/// # Safety
/// `argument` is what the request wants, or the kernel refuses it.
pub unsafe fn ioctl_as_tcp(connection: &'static Connection, request: u64, argument: usize) -> Result<i32, Errno> {
    // SAFETY: our caller says that `argument` is what the request wants or the kernel refuses it.
    unsafe { options::ioctl_of_template(family_of(connection), request, argument) }
}

/// The error of an option that lanes cannot honour, for a listener that has them.
///
/// # Safety
/// `value` is null or readable for `length` bytes.
pub unsafe fn refusal(level: i32, name: i32, value: *const c_void, length: libc::socklen_t) -> Option<Errno> {
    // SAFETY: our caller says that `value` is null or readable for `length` bytes.
    unsafe { SocketOption { level, name }.refusal_c(value, length) }
}

/// Notes an option that the kernel has accepted on a TCP socket which may become a connection.
///
/// # Errors
/// `MFILE` and its kin, where a listener with lanes needs a descriptor for it.
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
    // SAFETY: the caller's.
    let note = |record: &mut OptionRecord| unsafe { record.note_c(option, value, length) };
    match entry::get(fd) {
        Entry::Stream(stream) => Stream::with_options(stream, note),
        Entry::Listener(listener) => {
            Listener::with_options(listener, note);
            // From now on clients are to come by kernel TCP alone, which does what is asked.
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

/// Sets an option of the lifeline itself.
///
/// # Safety
/// `value` is readable for `length` bytes, or null.
unsafe fn set_on_lifeline(
    fd: RawFd,
    option: SocketOption,
    value: *const c_void,
    length: libc::socklen_t,
) -> Result<(), Errno> {
    // SAFETY: the kernel reads `length` bytes at most and answers a bad pointer with an error.
    let result =
        unsafe { crate::process::system::call!(libc::SYS_setsockopt, fd, option.level, option.name, value, length) };
    if result < 0 { Err(crate::process::system::error_of(result)) } else { Ok(()) }
}

unsafe fn get_on_lifeline(
    fd: RawFd,
    option: SocketOption,
    value: *mut c_void,
    length_inout: *mut libc::socklen_t,
) -> Result<(), Errno> {
    // SAFETY: the kernel checks the pointers.
    let result = unsafe {
        crate::process::system::call!(libc::SYS_getsockopt, fd, option.level, option.name, value, length_inout)
    };
    if result < 0 { Err(crate::process::system::error_of(result)) } else { Ok(()) }
}
