//! `accept`: the first client, by lane or by TCP.

use super::attempt::{hide, record_lane_connection};
use super::{family, note_stream, warn_user};
use crate::accounting::process_stats;
use crate::connection::{Connection, ConnectionParams, InitialPath};
use crate::descriptor::received::discard;
use crate::entry::{self, Entry};
use crate::listener;
use crate::listener::Listener;
use crate::options::inspect;
use crate::process::clock::now_ns;
use crate::process::settings::settings;
use crate::process::signals::{HandlersRun, SignalCheckpoint};
use crate::process::{blocking, limit};
use crate::rendezvous::address::Opener;
use crate::rendezvous::local_page::MemoryFds;
use crate::rendezvous::{self, Accepted, HandshakeRejection};
use rustix::io::Errno;
use segment::{Segment, Side};
use stats_page::{DataPath, FallbackReason, Role};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, RawFd};
use wait::{Action, Spin};

/// Maximum number of clients that one call rejects.
const REJECTED_MAX: usize = 64;
/// Time that `accept` waits for a proxy's handshake.
const HANDSHAKE_WAIT_MS: i32 = 2;
/// Polls of memory that take as long as one system call.
const POLLS_PER_SYSCALL: u32 = 250;

/// A new connection.
#[derive(Debug, Clone, Copy)]
pub struct NewConnection {
    /// The program's new descriptor.
    pub fd: RawFd,
    /// The peer's address, as TCP would show it.
    pub peer: Option<SocketAddr>,
}

/// `accept4` on a listener: `flags` are `SOCK_NONBLOCK` and `SOCK_CLOEXEC`.
///
/// # Errors
/// Those of `accept4(2)`; `CONNABORTED` when a client was rejected of which the program may have been notified: the
/// call does not wait for the next one then.
pub fn accept(fd: RawFd, listener: &'static Listener, flags: i32) -> Result<NewConnection, Errno> {
    let deadline_ns = if listener.is_nonblocking() { None } else { deadline_ns(listener) };
    let was_notified = listener.take_notification() && !listener.is_nonblocking();
    loop {
        // The kernel creates a socket before it checks for a client: polling first costs a third of that.
        let is_nonblocking = listener.is_nonblocking();
        let ready = if is_nonblocking { Ready { lane: true, tcp: true } } else { wait(fd, listener, deadline_ns)? };
        if !matches!(entry::get(fd), Entry::Listener(now) if std::ptr::eq(now, listener)) {
            // The listener was closed or shut down meanwhile, and the object may be that of another one: the call
            // is the kernel's.
            return inspect::accept_with_peer(fd, flags).map(|(fd, peer)| NewConnection { fd, peer });
        }
        if ready.lane {
            match accept_lane(listener, flags) {
                Err(Errno::AGAIN) => {}
                Err(Errno::CONNABORTED) if !was_notified => {}
                Err(Errno::CONNABORTED) => return Err(Errno::CONNABORTED),
                // A client that has connected by TCP needs one descriptor less.
                Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => {
                    let by_tcp = if ready.tcp { accept_tcp(fd, listener, flags) } else { Ok(None) };
                    return by_tcp.ok().flatten().ok_or(error);
                }
                // The lane listener is closed; TCP may still work.
                Err(_) => {}
                accepted => return accepted,
            }
        }
        if ready.tcp {
            match accept_tcp(fd, listener, flags) {
                Err(Errno::AGAIN) if !is_nonblocking => {}
                Ok(None) if is_nonblocking => {}
                Ok(None) => return Err(Errno::CONNABORTED),
                Ok(Some(accepted)) => return Ok(accepted),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Accepts a lane connection; `CONNABORTED` when only rejected clients came.
fn accept_lane(listener: &'static Listener, flags: i32) -> Result<NewConnection, Errno> {
    for rejected in 0..REJECTED_MAX {
        match accept_lane_once(listener, flags) {
            Ok(Some(accepted)) => return Ok(accepted),
            Ok(None) => {}
            Err(Errno::AGAIN) if rejected > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Err(Errno::CONNABORTED)
}

/// Accepts one lane connection; `None` for a client that was rejected.
#[inline(never)] // Its variables are not to add to the caller's on a small stack.
fn accept_lane_once(listener: &'static Listener, flags: i32) -> Result<Option<NewConnection>, Errno> {
    let (lane_fd, key) = listener.lane().ok_or(Errno::BADF)?;
    let from_backlog =
        || limit::retry_with_room(|| rendezvous::accept(lane_fd, &key, flags), |error| *error == Errno::MFILE);
    let accepted = listener::accept(listener, flags).unwrap_or_else(from_backlog);
    let Accepted { lifeline, tuple, opener } = match accepted {
        // The kernel returns this error before it checks for a client; a waiting client stays in the backlog, as with
        // TCP.
        Err(error @ (Errno::MFILE | Errno::NFILE)) => {
            let has_client = blocking::poll_for(lane_fd, libc::POLLIN, 0) != 0;
            return Err(if has_client { error } else { Errno::AGAIN });
        }
        accepted => accepted?,
    };
    let tuple = tuple.to_family(family(listener.with(|inner| inner.is_v6)));
    let path = match opener {
        Opener::Program | Opener::SharingProgram => InitialPath::Lifeline(Side::Acceptor),
        Opener::Proxy => match path_by_handshake(lifeline.as_fd()) {
            Ok(path) => path,
            Err(_) => {
                discard(lifeline);
                return Ok(None);
            }
        },
    };
    let fd = lifeline.into_raw_fd();
    if !entry::can_hold(fd) {
        // SAFETY: `accept` has just created the descriptor, and no other code owns it.
        unsafe { rustix::io::close(fd) };
        return Err(Errno::MFILE);
    }
    let params = ConnectionParams {
        fd,
        tuple,
        options: listener.with(|inner| inner.options.clone()),
        nonblocking: flags & libc::SOCK_NONBLOCK != 0,
        slot: Some(record_lane_connection(fd, tuple, Role::Accept, opener == Opener::Proxy)),
    };
    let connection = Connection::open(params, path);
    connection.begin(false);
    entry::set(fd, Entry::Connection(connection));
    if flags & libc::SOCK_CLOEXEC == 0 {
        connection.set_inheritable(true);
    }
    Ok(Some(NewConnection { fd, peer: Some(tuple.peer) }))
}

/// Returns the path of a connection from a proxy: lanes, or the handshake that is late.
#[inline(never)] // Its variables are not to add to the caller's on a small stack.
fn path_by_handshake(lifeline: BorrowedFd<'_>) -> Result<InitialPath, HandshakeRejection> {
    Ok(match receive_handshake(lifeline)? {
        Some((segment, memory)) => InitialPath::Lanes(segment, hide(memory)),
        None => InitialPath::Handshake,
    })
}

/// Receives the handshake of a proxy, which follows the connection at once. `None` if it is late; the connection then
/// attaches its memory when it arrives.
fn receive_handshake(lifeline: BorrowedFd<'_>) -> Result<Option<(Segment, Option<MemoryFds>)>, HandshakeRejection> {
    let receive = || limit::with_free_descriptor(lifeline, || rendezvous::receive_handshake(lifeline));
    let first = receive()?;
    if first.is_some() {
        return Ok(first);
    }
    let is_there = |timeout_ms| blocking::poll_for(lifeline.as_raw_fd(), libc::POLLIN, timeout_ms) != 0;
    if !spin_until(|| is_there(0)) {
        is_there(HANDSHAKE_WAIT_MS);
    }
    receive()
}

/// Polls a condition that takes a system call as long as spinning pays off. Returns whether it became true.
fn spin_until(mut is_true: impl FnMut() -> bool) -> bool {
    let mut spin = Spin::new();
    loop {
        if is_true() {
            return true;
        }
        if spin.iterate_by(POLLS_PER_SYSCALL) == Action::Block {
            return false;
        }
    }
}

/// Accepts a TCP connection; `None` for a client that was rejected.
#[inline(never)] // Its variables are not to add to the caller's on a small stack.
fn accept_tcp(fd: RawFd, listener: &'static Listener, flags: i32) -> Result<Option<NewConnection>, Errno> {
    let (accepted, peer) = inspect::accept_with_peer(fd, flags)?;
    process_stats::count_fallback(FallbackReason::PlainClient);
    if settings().require_lane {
        let peer = peer.map_or_else(|| "?".to_owned(), |peer| peer.to_string());
        warn_user(&format_args!(
            "closed a connection from {peer}: it came by kernel TCP, not by a lane; refused by --require-lane"
        ));
        // SAFETY: `accept4` has just created the descriptor, and no other code owns it.
        unsafe { rustix::io::close(accepted) };
        return Ok(None);
    }
    let slot = process_stats::page().open_connection(&stats_page::NewConnection {
        fd: accepted,
        path: DataPath::Kernel,
        role: Role::Accept,
        local: None,
        peer,
        reason: Some(FallbackReason::PlainClient),
    });
    let (is_v6, options) = listener.with(|inner| (inner.is_v6, inner.options.clone()));
    if entry::can_hold(accepted) {
        note_stream(accepted, is_v6, options, Some(slot));
    }
    Ok(Some(NewConnection { fd: accepted, peer }))
}

/// The sockets of a listener that may have a client.
#[derive(Clone, Copy)]
struct Ready {
    lane: bool,
    tcp: bool,
}

/// Returns when a call that begins now gives up (`SO_RCVTIMEO`); `None` for never.
fn deadline_ns(listener: &'static Listener) -> Option<u64> {
    let timeout_ms = listener.with(|inner| inner.options.receive_timeout_ms())?;
    Some(now_ns().saturating_add(u64::try_from(timeout_ms).ok()?.saturating_mul(1_000_000)))
}

/// Waits until one of the two sockets has a client. Spins at first, because a client that has just been served returns
/// sooner than a blocked thread wakes.
fn wait(fd: RawFd, listener: &'static Listener, deadline_ns: Option<u64>) -> Result<Ready, Errno> {
    let left_ms = |deadline_ns: u64| i32::try_from(deadline_ns.saturating_sub(now_ns()).div_ceil(1_000_000));
    let timeout_ms = deadline_ns.map_or(-1, |deadline_ns| left_ms(deadline_ns).unwrap_or(i32::MAX));
    let mut entries = [fd, listener.watched_fd()].map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    let mut polled = Ok(0);
    let began = SignalCheckpoint::now();
    let is_over = || {
        polled = match blocking::poll(&mut entries, 0) {
            Ok(0) if began.since() != HandlersRun::None => Err(Errno::INTR),
            polled => polled,
        };
        polled != Ok(0)
    };
    if !spin_until(is_over) {
        // Checked as late as possible: the last iteration may have taken long, and a handler that ran in it does not
        // interrupt the poll below.
        let is_interrupted = began.since() != HandlersRun::None;
        polled = if is_interrupted { Err(Errno::INTR) } else { blocking::poll(&mut entries, timeout_ms) };
    }
    match polled {
        Ok(0) => Err(Errno::AGAIN),
        Ok(_) => Ok(Ready { tcp: entries[0].revents != 0, lane: entries[1].revents != 0 }),
        Err(Errno::INTR) if timeout_ms < 0 && began.restarts() => Ok(Ready { lane: true, tcp: true }),
        Err(error) => Err(error),
    }
}
