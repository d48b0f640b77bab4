//! Connects that are pending in the background: they wait for room in a listener's backlog, as a TCP connect does when
//! its SYN is not answered, or for the answer of the monitor or the proxy about a listener on another node.
//!
//! Meanwhile the program's socket is connecting in the kernel, to a *silent* listener of the library, whose backlog is
//! full. So every call about it returns what it returns for a TCP socket that is connecting, and it fails when TCP
//! does. Calls that wait for readiness, or ask for the state of the connect, advance it; no step of that blocks.

use super::attempt::{
    Attempt, Established, Outcome, attempt, bound_to_loopback, fall_back, install, refuse, tcp_socket,
};
use crate::descriptor::hidden::{HiddenFd, Need};
use crate::entry::{self, Entry};
use crate::epoll;
use crate::options::inspect;
use crate::process::background_connects::{self, Counted, is_any_pending};
use crate::process::locked::Locked;
use crate::process::signals;
use crate::rendezvous::RemoteConnect;
use crate::stream::{Advance, ConnectTarget, PendingConnect, STREAMS, Stream, StreamInner};
use rustix::fs::OFlags;
use rustix::io::Errno;
use stats_page::FallbackReason;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// Interval between two attempts of a pending connect.
pub(crate) const RETRY_INTERVAL_NS: u64 = 1_000_000;

/// Returns whether the connect of this socket is pending.
pub fn is_pending(stream: &'static Stream) -> bool {
    is_any_pending() && stream.with(|inner| inner.pending.is_some())
}

/// Returns whether a thread is advancing the connect of this socket just now, and may be ending it.
pub fn is_advancing(stream: &'static Stream) -> bool {
    let is_taken = |pending: &PendingConnect| matches!(pending.advance, Advance::Running);
    is_any_pending() && stream.with(|inner| inner.pending.as_ref().is_some_and(is_taken))
}

/// Moves the connect of `fd` to the background.
///
/// # Errors
/// Those of the system calls that create a silent listener.
pub(super) fn begin(
    fd: RawFd,
    stream: &'static Stream,
    target: ConnectTarget,
    remote: Option<Box<RemoteConnect>>,
) -> Result<(), Errno> {
    if is_pending(stream) {
        return Ok(());
    }
    connect_to_silent_listener(fd, target.netns)?;
    let pending = PendingConnect { target, advance: Advance::Due(remote), _counted: Counted::new(advance_all) };
    stream.with(|inner| inner.pending = Some(pending));
    epoll::wake_sleepers();
    Ok(())
}

/// Advances all pending connects.
fn advance_all() {
    let mut full = None;
    // A handler that jumped out of this function would leave a connect marked as running forever.
    signals::without_handlers(|| STREAMS.for_each(|stream| advance_one(stream, &mut full)));
}

/// Advances the connect of one socket. `full` is a destination whose backlog has just been found full.
fn advance_one(stream: &'static Stream, full: &mut Option<SocketAddr>) {
    let Some((pending_id, remote)) = stream.with(|inner| PendingId::start_advance(inner, *full)) else { return };
    if stream.with_options(|options| options.needs_kernel_tcp()) {
        return end(stream, pending_id, Err(FallbackReason::UnsupportedCall));
    }
    let left = match attempt(pending_id.target, remote) {
        Attempt::BacklogFull => {
            *full = Some(pending_id.target.destination);
            None
        }
        Attempt::Pending(remote) => Some(remote),
        Attempt::Established(established) => return end(stream, pending_id, Ok(established)),
        Attempt::NoLane(reason) => return end(stream, pending_id, Err(reason)),
        Attempt::TupleInUse => return end(stream, pending_id, Err(FallbackReason::HandshakeFailed)),
    };
    // If the socket was closed meanwhile, the remote connect is dropped here, without its lock.
    let _left = stream.with(|inner| pending_id.stop_advance(inner, left));
}

/// The identity of a pending connect, as it was before an attempt.
#[derive(Clone, Copy, PartialEq, Eq)]
struct PendingId {
    fd: RawFd,
    target: ConnectTarget,
}

impl PendingId {
    fn of(inner: &StreamInner) -> Option<Self> {
        let fd = inner.descriptors.first().copied()?;
        inner.pending.as_ref().map(|&PendingConnect { target, .. }| Self { fd, target })
    }

    /// Marks the connect as running, unless it is, or the destination is known to be full.
    fn start_advance(inner: &mut StreamInner, full: Option<SocketAddr>) -> Option<(Self, Option<Box<RemoteConnect>>)> {
        let pending_id = Self::of(inner)?;
        let advance = &mut inner.pending.as_mut()?.advance;
        let is_pointless = matches!(advance, Advance::Due(None)) && Some(pending_id.target.destination) == full;
        match std::mem::replace(advance, Advance::Running) {
            Advance::Due(remote) if !is_pointless => Some((pending_id, remote)),
            other => {
                *advance = other;
                None
            }
        }
    }

    /// Marks the connect as due again. Returns `remote` if the connect is no longer the same.
    fn stop_advance(self, inner: &mut StreamInner, remote: Option<Box<RemoteConnect>>) -> Option<Box<RemoteConnect>> {
        let is_mine = Self::of(inner) == Some(self);
        match inner.pending.as_mut().map(|pending| &mut pending.advance) {
            Some(advance @ Advance::Running) if is_mine => {
                *advance = Advance::Due(remote);
                None
            }
            _ => remote,
        }
    }
}

/// Ends a pending connect. A close in another thread runs before this, or finds the new state of the descriptor.
fn end(stream: &'static Stream, pending_id: PendingId, outcome: Result<Box<Established>, FallbackReason>) {
    let Some(_guard) = background_connects::enter_ending() else {
        // This is a signal handler that has interrupted a close: a later attempt ends the connect.
        return drop(stream.with(|inner| pending_id.stop_advance(inner, None)));
    };
    if stream.with(|inner| PendingId::of(inner)) != Some(pending_id) {
        return;
    }
    match outcome {
        Ok(established) => finish(stream, pending_id, *established),
        Err(reason) => fall_back_to_kernel(stream, pending_id, reason),
    }
}

fn finish(stream: &'static Stream, pending_id: PendingId, established: Established) {
    if install(pending_id.fd, stream, established).is_err() {
        // The connection is dropped, and the connect is tried again.
        drop(stream.with(|inner| pending_id.stop_advance(inner, None)));
    } else if let Entry::Connection(connection) = entry::get(pending_id.fd) {
        connection.report_connect_later(true);
    }
}

/// No lane is possible any more: kernel TCP connects from the start, to a TCP listener or to none.
fn fall_back_to_kernel(stream: &'static Stream, pending_id: PendingId, reason: FallbackReason) {
    let PendingId { fd, target: ConnectTarget { destination, .. } } = pending_id;
    // SAFETY: the descriptor is open as long as its connect is not ended, which only the thread that advances it does.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    // The socket is disconnected in between, and the error of that is not for the program.
    let descriptors = stream.with(|inner| inner.descriptors.clone());
    epoll::while_unregistered(&descriptors, || {
        let _ = rustix::net::connect_unspec(socket);
        let _ = in_nonblocking_mode(fd, || {
            let begun = match fall_back(fd, stream, destination, reason) {
                Outcome::Kernel => rustix::net::connect(socket, &destination),
                Outcome::Complete(result) => result,
            };
            // An immediate error of TCP, such as a missing route, has no call left that could return it.
            if begun.is_err_and(|errno| errno != Errno::INPROGRESS) {
                refuse(fd);
            }
        });
    });
    // Only now: to other threads, a socket that is not connecting looks like one that is connected or was disconnected.
    drop(stream.with(|inner| inner.pending.take()));
}

/// Returns the result of a pending connect, for a program that calls `connect` again; `None` while it is pending.
pub(super) fn outcome(fd: RawFd) -> Option<Outcome> {
    background_connects::advance();
    match entry::get(fd) {
        Entry::Connection(connection) => Some(Outcome::Complete(super::already_connected(connection))),
        Entry::Stream(stream) if is_pending(stream) => None,
        _ => Some(Outcome::Kernel),
    }
}

/// Abandons the connect, because the program has called `shutdown` or `connect` with `AF_UNSPEC`.
pub fn abandon(stream: &'static Stream) {
    if is_pending(stream) {
        let _guard = background_connects::hold_off();
        drop(stream.with(|inner| inner.pending.take()));
    }
}

/// In the child of a fork, once the streams are unlocked, drops pending connects: the parent continues them. Parent and
/// child share the socket, and a child that passed it to the kernel would take it from the parent.
pub(super) fn after_fork_in_child() {
    SILENT_LISTENERS.lock().reset();
    if background_connects::after_fork_in_child() {
        STREAMS.for_each(|stream| drop(stream.with(|inner| inner.pending.take())));
        background_connects::forget_all();
    }
}

/// A listener of the library whose backlog is full: a socket that connects to it gets no answer.
struct SilentListener {
    is_v6: bool,
    /// The network namespace whose connects it can keep waiting.
    netns: u64,
    address: SocketAddr,
    _listener: HiddenFd,
    _filler: HiddenFd,
}

/// At most one of each family and network namespace.
static SILENT_LISTENERS: Locked<Vec<SilentListener>> = Locked::new(Vec::new());

fn connect_to_silent_listener(fd: RawFd, netns: u64) -> Result<(), Errno> {
    let is_v6 = inspect::local_address(fd)?.is_ipv6();
    let address = signals::without_handlers(|| silent_address(is_v6, netns))?;
    // SAFETY: the descriptor is borrowed for this function only; the program is connecting it.
    match in_nonblocking_mode(fd, || rustix::net::connect(unsafe { BorrowedFd::borrow_raw(fd) }, &address))? {
        Err(Errno::INPROGRESS) => Ok(()),
        connected => Err(connected.err().unwrap_or(Errno::ISCONN)),
    }
}

fn silent_address(is_v6: bool, netns: u64) -> Result<SocketAddr, Errno> {
    SILENT_LISTENERS.with(|listeners| {
        let known = listeners.iter().find(|silent| silent.is_v6 == is_v6 && silent.netns == netns);
        if let Some(known) = known {
            return Ok(known.address);
        }
        let silent = SilentListener::new(is_v6)?;
        let address = silent.address;
        listeners.push(silent);
        Ok(address)
    })
}

/// Runs `call` while `fd` is in non-blocking mode.
fn in_nonblocking_mode<R>(fd: RawFd, call: impl FnOnce() -> R) -> Result<R, Errno> {
    // SAFETY: the descriptor is borrowed for this function only; the program is connecting it.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::fs::fcntl_getfl(socket)?;
    rustix::fs::fcntl_setfl(socket, flags | OFlags::NONBLOCK)?;
    let result = call();
    rustix::fs::fcntl_setfl(socket, flags)?;
    Ok(result)
}

impl SilentListener {
    fn new(is_v6: bool) -> Result<Self, Errno> {
        let (listener, address) = bound_to_loopback(is_v6)?;
        // A backlog of 0 has room for one connection.
        rustix::net::listen(&listener, 0)?;
        let netns = inspect::netns_of(listener.as_raw_fd());
        let filler = tcp_socket(is_v6)?;
        rustix::net::connect(&filler, &address)?;
        let hide = |socket: OwnedFd| HiddenFd::hide(socket, Need::Required);
        Ok(Self { is_v6, netns, address, _listener: hide(listener)?, _filler: hide(filler)? })
    }
}
