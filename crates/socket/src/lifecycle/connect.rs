//! `connect`: a lane where there is one.

use super::{STREAMS, Stream, StreamInner, already_connected, complain, count_fallback, family, ledger, settings};
use super::{inspect, pending};
use crate::address::Tuple;
use crate::clock::now_ns;
use crate::connection::{Connection, Origin};
use crate::descriptors::{HiddenFd, Need};
use crate::interest;
use crate::limit;
use crate::rendezvous::{self, Connected};
use crate::signals::Moment;
use crate::system;
use crate::table::{self, Entry};
use ledger::{FallbackReason, Path, Role};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// How long a blocking connect waits at a full backlog before it gives up: as long as Linux sends SYNs.
const BACKLOG_WAIT_NS: u64 = 127_000_000_000;

/// What `connect` came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Done; the answer for the program.
    Answered(Result<(), Errno>),
    /// Not ours: call the kernel's `connect`, and where it fails for good, tell [`note_kernel_failure`].
    Kernel,
}

/// Connects `fd` to `destination` by a lane if it can.
pub fn connect(fd: RawFd, destination: Result<SocketAddr, Errno>) -> Outcome {
    match (table::get(fd), destination) {
        (Entry::Connection(connection), Ok(_)) => Outcome::Answered(already_connected(connection)),
        (Entry::Connection(connection), Err(Errno::AFNOSUPPORT)) => Outcome::Answered(dissolve(connection)),
        (Entry::Connection(_), Err(error)) => Outcome::Answered(Err(error)),
        (Entry::Stream(stream), Ok(destination)) => connect_stream(fd, stream, destination),
        _ => Outcome::Kernel,
    }
}

/// `connect` with `AF_UNSPEC` ends a connection.
fn dissolve(connection: &'static Connection) -> Result<(), Errno> {
    connection.shutdown(crate::connection::SHUTDOWN_READ | crate::connection::SHUTDOWN_WRITE)
}

fn connect_stream(fd: RawFd, stream: &'static Stream, destination: SocketAddr) -> Outcome {
    if stream.with(|inner| inner.slot.is_some()) {
        // The kernel is already at it: a second call asks how it went.
        return Outcome::Kernel;
    }
    if !settings().applies_to(destination.port()) {
        count_fallback(FallbackReason::PortRule);
        enter_kernel_connection(fd, stream, destination);
        return Outcome::Kernel;
    }
    if pending::is_pending(stream) {
        return wait_for_room(fd, stream, || pending::outcome(fd), || Ok(()));
    }
    if stream.with_options(|options| inspect::asks_more_than_lanes_offer(fd, options)) {
        return fall_back(fd, stream, destination, FallbackReason::UnsupportedCall);
    }
    let bound = inspect::local_of(fd).ok();
    let look = || match attempt(destination, bound) {
        Attempt::Full => None,
        outcome => Some(settle(fd, stream, destination, outcome)),
    };
    let begin = || {
        let begun = pending::begin(fd, stream, destination, bound);
        begun.map_err(|_| fall_back(fd, stream, destination, FallbackReason::BacklogFull))
    };
    wait_for_room(fd, stream, look, begin)
}

/// What one try came to.
pub(super) enum Attempt {
    Connected(Box<Connected>),
    /// The listener's backlog is full.
    Full,
    NoLane(FallbackReason),
}

pub(super) fn attempt(destination: SocketAddr, bound: Option<SocketAddr>) -> Attempt {
    let connected = limit::above_when_needed(
        || rendezvous::connect(destination, bound),
        |reason| *reason == FallbackReason::ResourceLimit,
    );
    match connected {
        Ok(connected) => Attempt::Connected(Box::new(connected)),
        Err(FallbackReason::BacklogFull) => Attempt::Full,
        Err(reason) => Attempt::NoLane(reason),
    }
}

fn settle(fd: RawFd, stream: &'static Stream, destination: SocketAddr, outcome: Attempt) -> Outcome {
    match outcome {
        Attempt::Connected(connected) => match install(fd, stream, *connected) {
            Ok(is_nonblocking) if is_nonblocking => Outcome::Answered(Err(Errno::INPROGRESS)),
            Ok(_) => Outcome::Answered(Ok(())),
            Err(_) => fall_back(fd, stream, destination, FallbackReason::ResourceLimit),
        },
        Attempt::Full => fall_back(fd, stream, destination, FallbackReason::BacklogFull),
        Attempt::NoLane(reason) => fall_back(fd, stream, destination, reason),
    }
}

/// A blocking connect waits at a full backlog, as TCP's does. One that does not wait, or is interrupted, or has waited
/// for long enough, goes on in the background. `look` answers once there was room.
fn wait_for_room(
    fd: RawFd,
    stream: &'static Stream,
    look: impl Fn() -> Option<Outcome>,
    begin: impl FnOnce() -> Result<(), Outcome>,
) -> Outcome {
    if let Some(outcome) = look() {
        return outcome;
    }
    let answer = if waits(fd) {
        match wait_longer_for_room(stream, &look) {
            Ok(outcome) => return outcome,
            Err(error) => error,
        }
    } else if pending::is_pending(stream) {
        Errno::ALREADY
    } else {
        Errno::INPROGRESS
    };
    begin().map_or_else(|outcome| outcome, |()| Outcome::Answered(Err(answer)))
}

/// `INTR` after a signal, `INPROGRESS` when the program's time is up, as Linux has it.
fn wait_longer_for_room(stream: &Stream, look: impl Fn() -> Option<Outcome>) -> Result<Outcome, Errno> {
    let timeout_ns = stream.with_options(|options| options.send_timeout_ns());
    let limit_ns = if timeout_ns == 0 { BACKLOG_WAIT_NS } else { timeout_ns.min(BACKLOG_WAIT_NS) };
    let (began, began_ns) = (Moment::now(), now_ns());
    while now_ns() - began_ns < limit_ns {
        // SAFETY: no mask.
        let slept = unsafe { system::ppoll(&mut [], Some(pending::LOOK_EVERY_NS), std::ptr::null()) };
        if slept == Err(Errno::INTR) && (timeout_ns != 0 || !began.goes_on()) {
            return Err(Errno::INTR);
        }
        if let Some(outcome) = look() {
            return Ok(outcome);
        }
    }
    if limit_ns < BACKLOG_WAIT_NS { Err(Errno::INPROGRESS) } else { Ok(Outcome::Answered(Err(Errno::TIMEDOUT))) }
}

/// Whether the program's descriptor is in blocking mode.
fn waits(fd: RawFd) -> bool {
    // SAFETY: the program's descriptor, which it is connecting.
    rustix::fs::fcntl_getfl(unsafe { BorrowedFd::borrow_raw(fd) }).is_ok_and(|flags| !flags.contains(OFlags::NONBLOCK))
}

pub(super) fn fall_back(fd: RawFd, stream: &Stream, destination: SocketAddr, reason: FallbackReason) -> Outcome {
    count_fallback(reason);
    // A socket that connects to itself reaches no other program, and is no lane lost.
    if settings().require_lane && reason != FallbackReason::ToItself {
        complain(&format_args!(
            "connect to {destination}: no lane: {}; refused by --require-lane",
            reason.explanation()
        ));
        return refuse(fd);
    }
    enter_kernel_connection(fd, stream, destination);
    Outcome::Kernel
}

/// The kernel refuses the connection in its own way, blocking or not: it is sent to a port that is taken and does not
/// listen.
fn refuse(fd: RawFd) -> Outcome {
    let is_v6 = inspect::local_of(fd).is_ok_and(|local| local.is_ipv6());
    let nowhere: SocketAddr = if is_v6 { (Ipv6Addr::LOCALHOST, 0).into() } else { (Ipv4Addr::LOCALHOST, 0).into() };
    let family = if is_v6 { AddressFamily::INET6 } else { AddressFamily::INET };
    let refused = || {
        let taken = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        rustix::net::bind(&taken, &nowhere)?;
        let port = inspect::local_of(taken.as_raw_fd())?;
        // SAFETY: the program's descriptor, which it is connecting.
        rustix::net::connect(unsafe { BorrowedFd::borrow_raw(fd) }, &port)
    };
    Outcome::Answered(refused().map_or_else(Err, |()| Err(Errno::CONNREFUSED)))
}

fn enter_kernel_connection(fd: RawFd, stream: &Stream, destination: SocketAddr) {
    let slot = ledger().open_connection(&ledger::Connection {
        fd,
        path: Path::Kernel,
        role: Role::Connect,
        local: None,
        peer: Some(destination),
    });
    stream.with(|inner| inner.slot = Some(slot));
}

/// After the kernel's `connect` has failed for good: the socket is a fresh one again.
pub fn note_kernel_failure(fd: RawFd) {
    if let Entry::Stream(stream) = table::get(fd) {
        stream.with(|inner| inner.slot = None);
    }
}

/// Puts the lifeline in the place of the TCP socket, under all its descriptors. Answers whether it is in non-blocking
/// mode.
pub(super) fn install(fd: RawFd, stream: &'static Stream, connected: Connected) -> Result<bool, Errno> {
    // SAFETY: the program's descriptor, which it is connecting.
    let flags = rustix::fs::fcntl_getfl(unsafe { BorrowedFd::borrow_raw(fd) })?;
    let is_nonblocking = flags.contains(OFlags::NONBLOCK);
    if !is_nonblocking {
        rustix::fs::fcntl_setfl(&connected.lifeline, OFlags::empty())?;
    }
    let (descriptors, is_v6) = stream.with(|inner| (inner.descriptors.clone(), inner.is_v6));
    let mut outlives_exec = false;
    for &descriptor in &descriptors {
        outlives_exec |= !replace(descriptor, connected.lifeline.as_raw_fd())?;
    }
    let options = stream.with(|inner| std::mem::take(&mut inner.options));
    let tuple = connected.tuple.shown_in(family(is_v6));
    let connection = Connection::open(
        Origin {
            fd,
            tuple,
            options,
            nonblocking: is_nonblocking,
            slot: Some(enter_lane_connection(fd, tuple, Role::Connect, connected.is_far)),
        },
        Some((connected.segment, hide(connected.memfd))),
    );
    connection.begin(is_nonblocking);
    for &descriptor in &descriptors {
        if descriptor != fd {
            connection.add_descriptor(descriptor);
        }
        table::set(descriptor, Entry::Connection(connection));
        interest::adopt(descriptor, connection);
    }
    // Only now: threads that still find the stream are not to take the lifeline for a TCP socket that has connected.
    drop(stream.with(std::mem::take::<StreamInner>));
    STREAMS.give_back(stream);
    if outlives_exec {
        connection.set_inheritable(true);
    }
    Ok(is_nonblocking)
}

/// Keeps the memory's descriptor for handing the connection on, out of the program's sight.
pub(super) fn hide(memfd: Option<OwnedFd>) -> Option<HiddenFd> {
    memfd.and_then(|memfd| HiddenFd::hide(memfd, Need::Optional).ok())
}

pub(super) fn enter_lane_connection(fd: RawFd, tuple: Tuple, role: Role, is_far: bool) -> ledger::ConnectionSlot {
    ledger().open_connection(&ledger::Connection {
        fd,
        path: if is_far { Path::Window } else { Path::Lane },
        role,
        local: Some(tuple.local),
        peer: Some(tuple.peer),
    })
}

/// Makes `descriptor` name what `source` names, keeping its close-on-exec flag. Answers whether that is set.
fn replace(descriptor: RawFd, source: RawFd) -> Result<bool, Errno> {
    // SAFETY: both are open; the numbers stay what they are.
    let flags = rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(descriptor) })?;
    let is_cloexec = flags.contains(rustix::io::FdFlags::CLOEXEC);
    let cloexec = if is_cloexec { libc::O_CLOEXEC } else { 0 };
    // SAFETY: replaces the program's descriptor, on the program's behalf.
    let result = unsafe { crate::system::call!(libc::SYS_dup3, source, descriptor, cloexec) };
    if result < 0 { Err(Errno::MFILE) } else { Ok(is_cloexec) }
}
