//! What calls that create, duplicate, pass on and close descriptors mean for connections.

use crate::connection::Connection;
use crate::epoll;
use crate::kernel::Tcp;
use crate::table::{self, Entry};
use crate::young::{Occasion, Transfer, Young};
use crate::{fitness, identity, process, requirement};
use meeting::Role;
use rustix::io::Errno;
use socket::descriptor::hidden;
use socket::process::settings::settings;
use socket::process::signals;
use socket::process::system::{count_or_error, raw_syscall};
use std::os::fd::RawFd;

/// Counts a transfer of a connection that has not proved busy. If it has by now, lets it meet its other end, and
/// returns it.
#[inline]
pub fn count(fd: RawFd, young: Young, transfer: Transfer) -> Option<&'static Connection> {
    let (next, occasion) = young.count(transfer);
    if occasion == Occasion::None {
        // If another thread has closed or counted meanwhile, this transfer is not counted.
        table::replace(fd, Entry::Young(young), Entry::Young(next));
        None
    } else {
        // A handler that jumps out of this call must not leave the allocator's locks held.
        signals::without_handlers(|| begin_to_meet(fd, young, next, occasion))
    }
}

#[cold]
#[inline(never)]
fn begin_to_meet(fd: RawFd, before: Young, young: Young, occasion: Occasion) -> Option<&'static Connection> {
    let tcp = Tcp(fd);
    if identity::is_switched_off() {
        table::replace(fd, Entry::Young(before), Entry::Young(young));
        leave_all_lanes();
        return None;
    }
    if !may_ever_meet(fd, young.role()) {
        table::replace(fd, Entry::Young(before), Entry::None);
        return None;
    }
    let connection = Connection::open(fd, young, tcp.is_nonblocking());
    if table::replace(fd, Entry::Young(before), Entry::Connection(connection)) {
        connection.meet(tcp, occasion);
        Some(connection)
    } else {
        connection.remove_descriptor(fd);
        None
    }
}

/// Sends all connections back to TCP for good, because lanes were switched off in the rack.
fn leave_all_lanes() {
    table::for_each(0..=RawFd::MAX, |fd, entry| {
        if let Entry::Connection(connection) = entry
            && connection.has_met()
        {
            connection.stay_on_tcp(Tcp(fd));
        }
    });
}

/// Returns whether a connection of the program is one that may meet its other end, as far as this end knows.
fn may_ever_meet(fd: RawFd, role: Role) -> bool {
    Tcp(fd).is_stream() && !identity::is_excluded(fd, role) && !fitness::needs_kernel(fd)
}

/// Returns whether the library counts what the program's new connections do.
#[inline]
fn counts_connections() -> bool {
    !settings().off && !process::is_confined()
}

/// Notes that the program has connected a socket, or has begun to.
pub fn note_connected(fd: RawFd) {
    if matches!(table::get(fd), Entry::None) && counts_connections() && !process::is_child_in_memory() {
        note_connection(fd, Role::Connected);
    }
}

/// Notes that the program has accepted a connection.
pub fn note_accepted(fd: RawFd) {
    before_close(fd);
    if counts_connections() && !process::is_child_in_memory() {
        note_connection(fd, Role::Accepted);
    }
}

fn note_connection(fd: RawFd, role: Role) {
    let young = Young::new(role);
    if settings().require_lane && Tcp(fd).is_stream() {
        let connection = Connection::open(fd, young, Tcp(fd).is_nonblocking());
        table::set(fd, Entry::Connection(connection));
        requirement::begin(fd, connection, may_ever_meet(fd, role));
    } else {
        table::set(fd, Entry::Young(young));
    }
}

/// Returns whether a descriptor is a connection, or a TCP socket that may become one.
pub fn is_or_becomes_connection(fd: RawFd) -> bool {
    match table::get(fd) {
        Entry::Young(_) | Entry::Connection(_) => true,
        Entry::Set(_) => false,
        Entry::None => fd >= 0 && counts_connections() && Tcp(fd).is_stream(),
    }
}

/// Notes that a descriptor is about to be closed or replaced.
#[inline]
pub fn before_close(fd: RawFd) {
    if process::is_child_in_memory() {
        return;
    }
    epoll::forget(fd);
    match table::get(fd) {
        Entry::None => {}
        Entry::Young(_) => {
            table::set(fd, Entry::None);
        }
        Entry::Connection(_) | Entry::Set(_) => match table::set(fd, Entry::None) {
            Entry::Connection(connection) => connection.remove_descriptor(fd),
            Entry::Set(set) => set.remove_descriptor(fd),
            Entry::None | Entry::Young(_) => {}
        },
    }
}

/// Notes that `new` is a duplicate of `old`. A connection has one object, whatever number the program uses.
pub fn note_duplicate(old: RawFd, new: RawFd) {
    if process::is_child_in_memory() {
        return stay_on_tcp(old);
    }
    let connection = match table::get(old) {
        Entry::None => return,
        Entry::Set(set) => {
            set.add_descriptor(new);
            table::set(new, Entry::Set(set));
            return;
        }
        Entry::Connection(connection) => connection,
        Entry::Young(young) if !may_ever_meet(old, young.role()) => {
            table::replace(old, Entry::Young(young), Entry::None);
            return;
        }
        Entry::Young(young) => {
            let connection = Connection::open(old, young, Tcp(old).is_nonblocking());
            if !table::replace(old, Entry::Young(young), Entry::Connection(connection)) {
                return connection.remove_descriptor(old);
            }
            connection
        }
    };
    connection.add_descriptor(new);
    table::set(new, Entry::Connection(connection));
}

/// `close_range(2)`: closes the program's descriptors in the range, or sets their close-on-exec flag, and leaves those
/// of the library.
///
/// # Errors
/// Those of `close_range(2)`.
pub fn close_range(first: u32, last: u32, flags: u32) -> Result<(), Errno> {
    if first > last || flags & !(libc::CLOSE_RANGE_CLOEXEC | libc::CLOSE_RANGE_UNSHARE) != 0 {
        return Err(Errno::INVAL);
    }
    let last_fd = RawFd::try_from(last).unwrap_or(RawFd::MAX);
    let Ok(first_fd) = RawFd::try_from(first) else { return Ok(()) };
    if flags & libc::CLOSE_RANGE_CLOEXEC == 0 && !process::is_child_in_memory() {
        table::for_each(first_fd..=last_fd, |fd, _| before_close(fd));
        epoll::forget_range(first_fd, last_fd);
    }
    for (first, last) in hidden::visible_ranges(first, last) {
        // SAFETY: the program has asked to close these descriptors, and none of them is hidden.
        count_or_error(unsafe { raw_syscall(libc::SYS_close_range, [first as usize, last as usize, flags as usize]) })?;
    }
    Ok(())
}

/// Notes that the program has obtained a descriptor of another process by `pidfd_getfd(2)`. What that process has in a
/// lane does not come by this descriptor, and the library cannot ask it to go back to TCP.
pub fn note_obtained(fd: RawFd) {
    before_close(fd);
}

/// Sends a connection back to TCP for good, because the program is about to do what a lane cannot.
pub fn stay_on_tcp(fd: RawFd) {
    match table::get(fd) {
        Entry::None | Entry::Set(_) => {}
        entry @ Entry::Young(_) => {
            table::replace(fd, entry, Entry::None);
        }
        Entry::Connection(connection) => connection.stay_on_tcp(Tcp(fd)),
    }
}

/// Notes that the program is about to shut down directions of a connection. TCP refuses what is sent by this end after
/// its end, and what is sent to an end that does not receive any more: both go by TCP from now on.
pub fn before_shutdown(fd: RawFd, how: i32) {
    if let Entry::Connection(connection) = table::get(fd) {
        connection.before_shutdown(Tcp(fd), how);
    }
}

/// Sends a connection back to TCP before its descriptor is passed to another process.
pub fn before_passing(fd: RawFd) {
    stay_on_tcp(fd);
}

/// The options that change nothing of what a lane does.
const HARMLESS: [(i32, &[i32]); 4] = [
    (
        libc::SOL_SOCKET,
        &[
            libc::SO_REUSEADDR,
            libc::SO_REUSEPORT,
            libc::SO_KEEPALIVE,
            libc::SO_LINGER,
            libc::SO_SNDBUF,
            libc::SO_RCVBUF,
            libc::SO_RCVTIMEO,
            libc::SO_SNDTIMEO,
            libc::SO_PRIORITY,
            libc::SO_BUSY_POLL,
            libc::SO_INCOMING_CPU,
            libc::SO_DONTROUTE,
            libc::SO_OOBINLINE,
        ],
    ),
    (
        libc::IPPROTO_TCP,
        &[
            libc::TCP_NODELAY,
            libc::TCP_QUICKACK,
            libc::TCP_KEEPIDLE,
            libc::TCP_KEEPINTVL,
            libc::TCP_KEEPCNT,
            libc::TCP_USER_TIMEOUT,
            libc::TCP_MAXSEG,
            libc::TCP_CONGESTION,
            libc::TCP_SYNCNT,
            libc::TCP_LINGER2,
            libc::TCP_DEFER_ACCEPT,
            libc::TCP_FASTOPEN,
            libc::TCP_FASTOPEN_CONNECT,
            libc::TCP_THIN_LINEAR_TIMEOUTS,
            libc::TCP_NOTSENT_LOWAT,
            libc::TCP_WINDOW_CLAMP,
        ],
    ),
    (libc::IPPROTO_IP, &[libc::IP_TOS, libc::IP_TTL]),
    (libc::IPPROTO_IPV6, &[libc::IPV6_V6ONLY, libc::IPV6_TCLASS, libc::IPV6_UNICAST_HOPS]),
];

/// Sends a connection back to TCP before an option is set that a lane does not know.
pub fn before_option(fd: RawFd, level: i32, name: i32) {
    if matches!(table::get(fd), Entry::None) {
        return;
    }
    let is_harmless = HARMLESS.iter().any(|(of_level, names)| *of_level == level && names.contains(&name));
    if !is_harmless {
        stay_on_tcp(fd);
    }
}
