//! Connects that wait in the background: for room in a listener's backlog, as TCP's do when nobody answers their SYN,
//! or for what monitor and proxy say of another node's listener.
//!
//! The program's socket really waits in the kernel, for an answer that never comes: it is connected to a *silent*
//! listener of our own, whose backlog is full. So every call about it answers what it answers of a TCP socket that is
//! connecting, and it gives up when TCP does. Meanwhile those who wait for readiness, or ask how the connect goes, look
//! whether it can go on; no step of it waits.

use super::Outcome;
use super::connect::{Attempt, Established, attempt, fall_back, install, refuse};
use crate::descriptor::hidden::{HiddenFd, Need};
use crate::entry::{self, Entry};
use crate::epoll;
use crate::options::inspect;
use crate::process::background_connects::{self, Counted, is_any_pending};
use crate::process::lock::Lock;
use crate::process::signals;
use crate::rendezvous::RemoteConnect;
use crate::stream::ConnectTarget;
use crate::stream::{Advance, PendingConnect};
use crate::stream::{STREAMS, Stream, StreamInner};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use stats_page::FallbackReason;
use std::cell::UnsafeCell;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// Between two looks at a connect that waits.
pub(crate) const RETRY_INTERVAL_NS: u64 = 1_000_000;

/// Whether this socket's connect waits.
pub fn is_pending(stream: &'static Stream) -> bool {
    is_any_pending() && stream.with(|inner| inner.pending.is_some())
}

/// Whether somebody is just looking at this socket's connect, and may be ending it.
pub fn is_advancing(stream: &'static Stream) -> bool {
    let is_taken = |pending: &PendingConnect| matches!(pending.advance, Advance::Running);
    is_any_pending() && stream.with(|inner| inner.pending.as_ref().is_some_and(is_taken))
}

/// Sends the connect of `fd` to the background.
///
/// # Errors
/// What the system answers to one that wants a silent listener.
pub(super) fn begin(
    fd: RawFd,
    stream: &'static Stream,
    aim: ConnectTarget,
    remote: Option<Box<RemoteConnect>>,
) -> Result<(), Errno> {
    if is_pending(stream) {
        return Ok(());
    }
    connect_to_silent_listener(fd, aim.netns)?;
    let pending = PendingConnect { aim, advance: Advance::Due(remote), _counted: Counted::new(advance_all) };
    stream.with(|inner| inner.pending = Some(pending));
    epoll::wake_sleepers();
    Ok(())
}

/// Advances all pending connects.
fn advance_all() {
    let mut full = None;
    // A handler that jumped away would leave a turn taken for ever.
    signals::without_handlers(|| STREAMS.for_each(|stream| advance_one(stream, &mut full)));
}

/// `full`: a destination that has just been found full.
fn advance_one(stream: &'static Stream, full: &mut Option<SocketAddr>) {
    let Some((waiting, remote)) = stream.with(|inner| Waiting::take_turn(inner, *full)) else { return };
    if stream.with_options(|options| options.needs_kernel_tcp()) {
        return end(stream, waiting, Err(FallbackReason::UnsupportedCall));
    }
    let left = match attempt(waiting.aim, remote) {
        Attempt::BacklogFull => {
            *full = Some(waiting.aim.destination);
            None
        }
        Attempt::Pending(remote) => Some(remote),
        Attempt::Established(established) => return end(stream, waiting, Ok(established)),
        Attempt::NoLane(reason) => return end(stream, waiting, Err(reason)),
        Attempt::TupleInUse => return end(stream, waiting, Err(FallbackReason::HandshakeFailed)),
    };
    // What a socket leaves that was closed meanwhile is dropped without its lock.
    let _left = stream.with(|inner| waiting.return_turn(inner, left));
}

/// A connect that waits, as it was before a try.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Waiting {
    fd: RawFd,
    aim: ConnectTarget,
}

impl Waiting {
    fn of(inner: &StreamInner) -> Option<Self> {
        let fd = inner.descriptors.first().copied()?;
        inner.pending.as_ref().map(|&PendingConnect { aim, .. }| Self { fd, aim })
    }

    /// Unless it is somebody else's turn, or there is nothing to find out before `full` has room.
    fn take_turn(inner: &mut StreamInner, full: Option<SocketAddr>) -> Option<(Self, Option<Box<RemoteConnect>>)> {
        let waiting = Self::of(inner)?;
        let turn = &mut inner.pending.as_mut()?.advance;
        let is_pointless = matches!(turn, Advance::Due(None)) && Some(waiting.aim.destination) == full;
        match std::mem::replace(turn, Advance::Running) {
            Advance::Due(remote) if !is_pointless => Some((waiting, remote)),
            kept => {
                *turn = kept;
                None
            }
        }
    }

    /// Answers what it is not for any more.
    fn return_turn(self, inner: &mut StreamInner, remote: Option<Box<RemoteConnect>>) -> Option<Box<RemoteConnect>> {
        let is_mine = Self::of(inner) == Some(self);
        match inner.pending.as_mut().map(|pending| &mut pending.advance) {
            Some(turn @ Advance::Running) if is_mine => {
                *turn = Advance::Due(remote);
                None
            }
            _ => remote,
        }
    }
}

/// A close in another thread comes before this, or finds what has become of the descriptor.
fn end(stream: &'static Stream, waiting: Waiting, outcome: Result<Box<Established>, FallbackReason>) {
    let Some(_guard) = background_connects::enter_ending() else {
        // A signal handler has interrupted a close: it is another look's turn.
        return drop(stream.with(|inner| waiting.return_turn(inner, None)));
    };
    if stream.with(|inner| Waiting::of(inner)) != Some(waiting) {
        return;
    }
    match outcome {
        Ok(established) => finish(stream, waiting, *established),
        Err(reason) => fall_back_to_kernel(stream, waiting, reason),
    }
}

fn finish(stream: &'static Stream, waiting: Waiting, established: Established) {
    if install(waiting.fd, stream, established).is_err() {
        // It is dropped, and tried again.
        drop(stream.with(|inner| waiting.return_turn(inner, None)));
    } else if let Entry::Connection(connection) = entry::get(waiting.fd) {
        connection.report_connect_later(true);
    }
}

/// There is no lane any more, only a TCP listener, or none: kernel TCP finds out, from the beginning.
fn fall_back_to_kernel(stream: &'static Stream, waiting: Waiting, reason: FallbackReason) {
    let Waiting { fd, aim: ConnectTarget { destination, .. } } = waiting;
    // SAFETY: the program's descriptor, which is open while its connect is not ended.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    // On the way it is disconnected, with an error that is nobody's.
    let descriptors = stream.with(|inner| inner.descriptors.clone());
    epoll::while_unregistered(&descriptors, || {
        let _ = rustix::net::connect_unspec(socket);
        let _ = in_nonblocking_mode(fd, || {
            let begun = match fall_back(fd, stream, destination, reason) {
                Outcome::Kernel => rustix::net::connect(socket, &destination),
                Outcome::Answered(result) => result,
            };
            // What TCP says at once, such as that there is no route, has no call any more that could answer it.
            if begun.is_err_and(|errno| errno != Errno::INPROGRESS) {
                refuse(fd);
            }
        });
    });
    // Only now: a socket that does not connect looks to other threads like one that has, and has been left.
    drop(stream.with(|inner| inner.pending.take()));
}

/// What a connect that waited has come to, for a program that calls `connect` again; `None`: it waits still.
pub(super) fn outcome(fd: RawFd) -> Option<Outcome> {
    background_connects::advance();
    match entry::get(fd) {
        Entry::Connection(connection) => Some(Outcome::Answered(super::already_connected(connection))),
        Entry::Stream(stream) if is_pending(stream) => None,
        _ => Some(Outcome::Kernel),
    }
}

/// The program takes back what it has asked for: by `shutdown`, or by `connect` to no address.
pub fn abandon(stream: &'static Stream) {
    if is_pending(stream) {
        let _guard = background_connects::hold_off();
        drop(stream.with(|inner| inner.pending.take()));
    }
}

/// In the child of a fork, once the streams are free: what waits is the parent's to go on with. The socket is both's: a
/// child that gave it to the kernel would take it from the parent.
pub(super) fn after_fork_in_child() {
    SILENT_LOCK.reset();
    if background_connects::after_fork_in_child() {
        STREAMS.for_each(|stream| drop(stream.with(|inner| inner.pending.take())));
        background_connects::forget_all();
    }
}

/// A listener of our own whose backlog is full: who connects to it hears nothing.
struct SilentListener {
    is_v6: bool,
    /// Whose connects it can keep waiting: those of its network namespace.
    netns: u64,
    address: SocketAddr,
    _listener: HiddenFd,
    _filler: HiddenFd,
}

struct SilentListeners(UnsafeCell<Vec<SilentListener>>);

// SAFETY: accessed under the lock.
unsafe impl Sync for SilentListeners {}

static SILENT_LOCK: Lock = Lock::new();
/// Under `SILENT_LOCK`; one of each family and network namespace at most.
static SILENT_LISTENERS: SilentListeners = SilentListeners(UnsafeCell::new(Vec::new()));

fn connect_to_silent_listener(fd: RawFd, netns: u64) -> Result<(), Errno> {
    let is_v6 = inspect::local_address(fd)?.is_ipv6();
    let address = signals::without_handlers(|| silent_address(is_v6, netns))?;
    // SAFETY: the program's descriptor, which it is connecting.
    match in_nonblocking_mode(fd, || rustix::net::connect(unsafe { BorrowedFd::borrow_raw(fd) }, &address))? {
        Err(Errno::INPROGRESS) => Ok(()),
        connected => Err(connected.err().unwrap_or(Errno::ISCONN)),
    }
}

fn silent_address(is_v6: bool, netns: u64) -> Result<SocketAddr, Errno> {
    let _guard = SILENT_LOCK.lock();
    // SAFETY: under the lock.
    let listeners = unsafe { &mut *SILENT_LISTENERS.0.get() };
    let known =
        listeners.iter().find(|silent| silent.is_v6 == is_v6 && silent.netns == netns).map(|silent| silent.address);
    known.map_or_else(
        || {
            let silent = SilentListener::new(is_v6)?;
            let address = silent.address;
            listeners.push(silent);
            Ok(address)
        },
        Ok,
    )
}

/// Runs `call` while `fd` is in non-blocking mode.
fn in_nonblocking_mode<R>(fd: RawFd, call: impl FnOnce() -> R) -> Result<R, Errno> {
    // SAFETY: the program's descriptor, which it is connecting.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::fs::fcntl_getfl(socket)?;
    rustix::fs::fcntl_setfl(socket, flags | OFlags::NONBLOCK)?;
    let result = call();
    rustix::fs::fcntl_setfl(socket, flags)?;
    Ok(result)
}

impl SilentListener {
    fn new(is_v6: bool) -> Result<Self, Errno> {
        let any: SocketAddr = if is_v6 { (Ipv6Addr::LOCALHOST, 0).into() } else { (Ipv4Addr::LOCALHOST, 0).into() };
        let listener = tcp(is_v6)?;
        rustix::net::bind(&listener, &any)?;
        // A backlog of none has room for one.
        rustix::net::listen(&listener, 0)?;
        let address = inspect::local_address(listener.as_raw_fd())?;
        let netns = inspect::netns_of(listener.as_raw_fd());
        let filler = tcp(is_v6)?;
        rustix::net::connect(&filler, &address)?;
        let hide = |socket: OwnedFd| HiddenFd::hide(socket, Need::Required);
        Ok(Self { is_v6, netns, address, _listener: hide(listener)?, _filler: hide(filler)? })
    }
}

fn tcp(is_v6: bool) -> Result<OwnedFd, Errno> {
    let family = if is_v6 { AddressFamily::INET6 } else { AddressFamily::INET };
    rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)
}
