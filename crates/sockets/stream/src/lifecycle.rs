//! What calls that create, duplicate, pass on and close descriptors mean for connections.

use crate::connection::Connection;
use crate::epoll;
use crate::kernel::Tcp;
use crate::sharing::{self, Epoch};
use crate::table::{self, Entry};
use crate::young::{Occasion, Transfer, Young};
use crate::{fitness, identity, order, process, requirement, statistics};
use meeting::{Reason, Role};
use rustix::io::Errno;
use socket::descriptor::hidden;
use socket::process::clock::{TICKS_PER_MILLISECOND, ticks};
use socket::process::settings::settings;
use socket::process::signals;
use socket::process::system::{count_or_error, raw_syscall};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};

/// How a call of the program transfers bytes by a descriptor that was a connection which has not proved busy.
pub enum Begun {
    /// In the kernel, and nothing is to be done afterwards.
    Uncounted,
    /// In the kernel; call [`end`] afterwards.
    Counted(Call),
    /// The connection has proved busy, and knows how.
    Connection(&'static Connection),
}

/// A call that is counted in the kernel.
#[derive(Clone, Copy)]
pub struct Call {
    transfer: Transfer,
    /// [`Young::number`] of the connection.
    number: u32,
}

/// Counts a call that is about to transfer bytes in the kernel.
#[inline]
pub fn begin(fd: RawFd, young: Young, transfer: Transfer) -> Begun {
    let mut young = young;
    loop {
        if let Some(next) = young.enter(transfer) {
            if table::replace(fd, Entry::Young(young), Entry::Young(next)) {
                return Begun::Counted(Call { transfer, number: next.number() });
            }
        } else if young.is_released() {
            sharing::hold_again(fd, young);
        } else if table::replace(fd, Entry::Young(young), Entry::None) {
            sharing::leave_counted(young);
        }
        match table::get(fd) {
            Entry::Young(now) => young = now,
            Entry::Connection(connection) => return Begun::Connection(connection),
            Entry::None | Entry::Set(_) => return Begun::Uncounted,
        }
    }
}

/// Notes that a call that was counted has returned, and has sent or taken this number of bytes. A transfer is counted
/// afterwards, so that what it is the occasion for is done while the peer works on what was sent.
#[inline]
pub fn end(fd: RawFd, call: &Call, bytes: usize) {
    // Where the descriptor is another connection's by now, nobody counts the call any more.
    loop {
        match table::get(fd) {
            Entry::Young(young) if young.number() == call.number => {
                if call.transfer == Transfer::Sent && bytes > 0 {
                    order::note_use_of_kernel();
                }
                let left = young.leave(call.transfer);
                let (next, occasion) = if bytes == 0 { (left, Occasion::None) } else { left.count(call.transfer) };
                if table::replace(fd, Entry::Young(young), Entry::Young(next)) {
                    if occasion != Occasion::None {
                        begin_to_meet(fd, next, occasion);
                    }
                    return;
                }
            }
            Entry::Connection(connection) => return connection.note_young_call(fd, call.number, call.transfer, bytes),
            Entry::None | Entry::Set(_) | Entry::Young(_) => return,
        }
    }
}

/// Lets a connection that has proved busy meet its other end.
#[cold]
#[inline(never)]
fn begin_to_meet(fd: RawFd, young: Young, occasion: Occasion) {
    match occasion {
        Occasion::Holders => return sharing::take_over(fd, young),
        Occasion::Meet => {}
        // Nothing has begun.
        Occasion::Check | Occasion::None => return,
    }
    // A handler that jumps out of this call must not leave the allocator's locks held.
    signals::without_handlers(|| {
        if identity::is_switched_off() {
            statistics::count_failure(Reason::Off);
            leave_all_lanes();
        } else if !may_ever_meet(fd, young.role()) {
            statistics::count_excluded(fd, young.role());
            leave_to_kernel(fd, young.number());
        } else if let Some(connection) = grow_up(fd, young) {
            connection.meet(Tcp(fd), occasion);
        }
    });
}

/// Forgets a connection that has not proved busy.
fn leave_to_kernel(fd: RawFd, number: u32) {
    while let entry @ Entry::Young(now) = table::get(fd)
        && now.number() == number
    {
        if table::replace(fd, entry, Entry::None) {
            sharing::leave_counted(now);
        }
    }
}

/// Gives a connection an object, which knows the calls that are in the kernel. Returns `None` if another thread has
/// done so meanwhile, or has closed the descriptor.
fn grow_up(fd: RawFd, young: Young) -> Option<&'static Connection> {
    let connection = Connection::open(fd, young, Tcp(fd).is_nonblocking());
    // A fork or a take-over has changed who holds the connection if the hold is another one.
    while let entry @ Entry::Young(now) = table::get(fd)
        && now.number() == young.number()
        && now.hold() == young.hold()
    {
        connection.adopt_calls(now);
        if table::replace(fd, entry, Entry::Connection(connection)) {
            return Some(connection);
        }
    }
    connection.forget_holders();
    connection.remove_descriptor(fd);
    None
}

/// Time between checks of whether lanes were switched off in the rack.
const SWITCH_EVERY_TICKS: u64 = 500 * TICKS_PER_MILLISECOND;
/// When that was last checked, by the processor's clock.
static SWITCH_TICKS: AtomicU64 = AtomicU64::new(0);

/// Sends all connections back to TCP if lanes were switched off in the rack. Called with no lock held, before a thread
/// that waits for lanes asks the kernel.
#[inline]
pub fn follow_switch() {
    let (now, checked) = (ticks(), SWITCH_TICKS.load(Ordering::Relaxed));
    if now.wrapping_sub(checked) > SWITCH_EVERY_TICKS
        && SWITCH_TICKS.compare_exchange(checked, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    {
        check_switch();
    }
}

#[cold]
#[inline(never)]
fn check_switch() {
    if process::is_confined() || process::is_child_in_memory() {
        return;
    }
    signals::without_handlers(|| {
        if identity::is_switched_off() {
            leave_all_lanes();
        }
    });
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

/// Notes that the program has connected a socket, or has begun to, by a call that began in this epoch.
pub fn note_connected(fd: RawFd, epoch: Epoch) {
    order::note_use_of_kernel();
    if matches!(table::get(fd), Entry::None) && counts_connections() && !process::is_child_in_memory() {
        note_connection(fd, Role::Connected, epoch);
    }
}

/// Notes that the program has accepted a connection, by a call that began in this epoch.
pub fn note_accepted(fd: RawFd, epoch: Epoch) {
    before_close(fd);
    if counts_connections() && !process::is_child_in_memory() {
        note_connection(fd, Role::Accepted, epoch);
    }
}

fn note_connection(fd: RawFd, role: Role, epoch: Epoch) {
    let young = Young::new(role);
    if settings().require_lane && Tcp(fd).is_stream() {
        let connection = Connection::open(fd, young, Tcp(fd).is_nonblocking());
        table::set(fd, Entry::Connection(connection));
        requirement::begin(fd, connection, may_ever_meet(fd, role));
    } else {
        table::set(fd, Entry::Young(young));
    }
    if epoch.may_have_forked() {
        stay_on_tcp(fd);
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
        Entry::Young(_) | Entry::Connection(_) | Entry::Set(_) => {
            order::note_use_of_kernel();
            match table::set(fd, Entry::None) {
                Entry::Connection(connection) => connection.remove_descriptor(fd),
                Entry::Set(set) => set.remove_descriptor(fd),
                Entry::Young(young) => sharing::release(young),
                Entry::None => {}
            }
        }
    }
}

/// Notes that `new` is a duplicate of `old`. A connection has one object, whatever number the program uses.
pub fn note_duplicate(old: RawFd, new: RawFd) {
    if process::is_child_in_memory() {
        return stay_on_tcp(old);
    }
    let connection = match table::get(old) {
        Entry::None => return epoll::note_duplicate(old, new),
        Entry::Set(set) => {
            set.add_descriptor(new);
            table::set(new, Entry::Set(set));
            return;
        }
        Entry::Connection(connection) => connection,
        Entry::Young(young) if !may_ever_meet(old, young.role()) => return leave_to_kernel(old, young.number()),
        Entry::Young(young) => match grow_up(old, young) {
            Some(connection) => connection,
            // Another thread has done so, or has closed it.
            None => return note_duplicate(old, new),
        },
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
        Entry::Young(young) => {
            leave_to_kernel(fd, young.number());
            if let Entry::Connection(connection) = table::get(fd) {
                connection.stay_on_tcp(Tcp(fd));
            }
        }
        Entry::Connection(connection) => connection.stay_on_tcp(Tcp(fd)),
    }
}

/// Notes that the program is about to shut down directions of a connection. TCP refuses what is sent by this end after
/// its end, and what is sent to an end that does not receive any more: both go by TCP from now on.
/// Returns whether to call [`after_shutdown`] afterwards.
pub fn before_shutdown(fd: RawFd, how: i32) -> bool {
    order::note_use_of_kernel();
    match table::get(fd) {
        Entry::Connection(connection) => {
            connection.before_shutdown(Tcp(fd), how);
            false
        }
        Entry::Young(_) => true,
        Entry::None | Entry::Set(_) => false,
    }
}

/// Notes that the program has shut down directions of a connection that had not proved busy. Another thread may have
/// let it meet its other end meanwhile, and begun a move; from now on the kernel's state of the socket prevents that.
pub fn after_shutdown(fd: RawFd, how: i32) {
    before_shutdown(fd, how);
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
            libc::SO_SNDBUFFORCE,
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
            libc::TCP_CORK,
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

/// Notes that an option was set.
pub fn after_option(fd: RawFd, level: i32, name: i32) {
    if let (libc::SOL_SOCKET, libc::SO_SNDBUF | libc::SO_SNDBUFFORCE) = (level, name)
        && let Entry::Connection(connection) = table::get(fd)
    {
        connection.note_send_buffer(fd);
    }
}
