//! One attempt to connect, and how a connect ends: the lifeline replaces the TCP socket, kernel TCP connects instead,
//! or the connect is refused.

use super::{family, warn_user};
use crate::accounting::process_stats;
use crate::connection::{Connection, ConnectionParams, InitialPath};
use crate::descriptor::hidden::HiddenFd;
use crate::entry::{self, Entry};
use crate::epoll;
use crate::options::inspect;
use crate::process::settings::settings;
use crate::process::{limit, signals};
use crate::rendezvous::address::Tuple;
use crate::rendezvous::local_page::MemoryFds;
use crate::rendezvous::{self, ConnectProgress, Connected, RemoteConnect};
use crate::stream::{ConnectTarget, PortChoice, STREAMS, Stream, StreamInner};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use segment::Side;
use stats_page::{DataPath, FallbackReason, Role};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// The result of `connect`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The call is complete, with this result for the program.
    Complete(Result<(), Errno>),
    /// The kernel's `connect` is to be called, and [`note_kernel_failure`](super::note_kernel_failure) if it fails for
    /// good.
    Kernel,
}

/// A lifeline that is connected to a listener, and what is known of the connection.
pub(super) struct Established {
    lifeline: OwnedFd,
    tuple: Tuple,
    path: InitialPath,
    is_remote: bool,
}

impl From<Connected> for Established {
    fn from(connected: Connected) -> Self {
        let Connected { lifeline, tuple, segment, memory, is_remote } = connected;
        Self { lifeline, tuple, path: InitialPath::Lanes(segment, hide(memory)), is_remote }
    }
}

/// The result of one attempt to connect.
pub(super) enum Attempt {
    Established(Box<Established>),
    /// The listener's backlog is full.
    BacklogFull,
    /// The monitor or the proxy has to answer first.
    Pending(Box<RemoteConnect>),
    NoLane(FallbackReason),
    /// A connection with these addresses exists already.
    TupleInUse,
}

/// Advances a pending connect to another node, or starts one.
pub(super) fn attempt(target: ConnectTarget, remote: Option<Box<RemoteConnect>>) -> Attempt {
    match (attempt_from(target, remote), target.port_choice) {
        // The kernel would not have chosen the port if it knew the connection: another port serves as well.
        (Attempt::TupleInUse, PortChoice::Kernel) => {
            let bound = target.bound.map(|bound| SocketAddr::new(bound.ip(), 0));
            attempt_from(ConnectTarget { bound, ..target }, None)
        }
        (Attempt::TupleInUse, PortChoice::KnownKernel) => Attempt::NoLane(FallbackReason::NoFreePort),
        (attempt, _) => attempt,
    }
}

/// Makes one attempt from exactly the address that the socket is bound to.
fn attempt_from(target: ConnectTarget, remote: Option<Box<RemoteConnect>>) -> Attempt {
    let is_resource_limit = |reason: &FallbackReason| *reason == FallbackReason::ResourceLimit;
    let advanced = remote.map(|remote| remote.advance());
    let progress = advanced.filter(|progress| !progress.as_ref().is_err_and(is_resource_limit));
    let connect = || rendezvous::connect(target.destination, target.bound, target.shares, target.netns);
    match progress.unwrap_or_else(|| limit::with_raised_limit(connect, is_resource_limit)) {
        Ok(ConnectProgress::Connected(connected)) => Attempt::Established(Box::new((*connected).into())),
        Ok(ConnectProgress::LifelineConnected { lifeline, tuple }) => {
            let path = InitialPath::Lifeline(Side::Connector);
            Attempt::Established(Box::new(Established { lifeline, tuple, path, is_remote: false }))
        }
        Ok(ConnectProgress::TupleInUse) => Attempt::TupleInUse,
        Ok(ConnectProgress::Pending(remote)) => Attempt::Pending(Box::new(remote)),
        Err(FallbackReason::BacklogFull) => Attempt::BacklogFull,
        Err(reason) => Attempt::NoLane(reason),
    }
}

/// Ends a connect without a lane: it is left to kernel TCP, or refused with `--require-lane`.
pub(super) fn fall_back(
    fd: RawFd,
    stream: &'static Stream,
    destination: SocketAddr,
    reason: FallbackReason,
) -> Outcome {
    // A socket that connects to itself reaches no other program, so no lane is missing.
    if settings().require_lane && reason != FallbackReason::ToItself {
        let reason = match reason {
            FallbackReason::NoListener => rendezvous::reasons::of_missing_listener(destination),
            reason => reason,
        };
        process_stats::count_fallback(reason);
        warn_user(&format_args!(
            "connect to {destination}: no lane: {}; refused by --require-lane",
            reason.explanation()
        ));
        return refuse(fd);
    }
    record_kernel_connection(fd, stream, destination, reason);
    Outcome::Kernel
}

/// Makes the kernel refuse the connection in its own way, blocking or not: the socket connects to a port that is bound
/// but does not listen.
pub(super) fn refuse(fd: RawFd) -> Outcome {
    let is_v6 = inspect::local_address(fd).is_ok_and(|local| local.is_ipv6());
    let refused = || {
        let (_bound, address) = bound_to_loopback(is_v6)?;
        // SAFETY: the descriptor is borrowed for one call; the program is connecting it. If it closes it meanwhile, the
        // call fails.
        rustix::net::connect(unsafe { BorrowedFd::borrow_raw(fd) }, &address)
    };
    Outcome::Complete(refused().map_or_else(Err, |()| Err(Errno::CONNREFUSED)))
}

/// Returns a new TCP socket.
pub(super) fn tcp_socket(is_v6: bool) -> Result<OwnedFd, Errno> {
    let family = if is_v6 { AddressFamily::INET6 } else { AddressFamily::INET };
    rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)
}

/// Returns a new TCP socket that is bound to a free port of the loopback address, and its address.
pub(super) fn bound_to_loopback(is_v6: bool) -> Result<(OwnedFd, SocketAddr), Errno> {
    let ip: IpAddr = if is_v6 { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() };
    let socket = tcp_socket(is_v6)?;
    rustix::net::bind(&socket, &SocketAddr::new(ip, 0))?;
    let address = inspect::local_address(socket.as_raw_fd())?;
    Ok((socket, address))
}

/// Counts the reason, and records on the stats page that the kernel connects the socket.
pub(super) fn record_kernel_connection(
    fd: RawFd,
    stream: &'static Stream,
    destination: SocketAddr,
    reason: FallbackReason,
) {
    process_stats::count_fallback(reason);
    let slot = process_stats::page().open_connection(&stats_page::NewConnection {
        fd,
        path: DataPath::Kernel,
        role: Role::Connect,
        local: None,
        peer: Some(destination),
        reason: Some(reason),
    });
    stream.with(|inner| inner.slot = Some(slot));
}

/// Replaces the TCP socket by the lifeline, under all its descriptors. Returns whether it is in non-blocking mode.
pub(super) fn install(fd: RawFd, stream: &'static Stream, established: Established) -> Result<bool, Errno> {
    // No handler that closes the socket may run between the steps.
    signals::without_handlers(|| replace_socket(fd, stream, established))
}

fn replace_socket(fd: RawFd, stream: &'static Stream, established: Established) -> Result<bool, Errno> {
    let Established { lifeline, tuple, path, is_remote } = established;
    // SAFETY: the descriptor is borrowed for one call; the program is connecting it. If it closes it meanwhile, the
    // call fails.
    let flags = rustix::fs::fcntl_getfl(unsafe { BorrowedFd::borrow_raw(fd) })?;
    let is_nonblocking = flags.contains(OFlags::NONBLOCK);
    if !is_nonblocking {
        rustix::fs::fcntl_setfl(&lifeline, OFlags::empty())?;
    }
    let (descriptors, is_v6) = stream.with(|inner| (inner.descriptors.clone(), inner.is_v6));
    let mut outlives_exec = false;
    for &descriptor in &descriptors {
        outlives_exec |= !replace(descriptor, lifeline.as_raw_fd())?;
    }
    let options = stream.with(|inner| std::mem::take(&mut inner.options));
    let tuple = tuple.to_family(family(is_v6));
    let connection = Connection::open(
        ConnectionParams {
            fd,
            tuple,
            options,
            nonblocking: is_nonblocking,
            slot: Some(record_lane_connection(fd, tuple, Role::Connect, is_remote)),
        },
        path,
    );
    connection.begin(is_nonblocking);
    for &descriptor in &descriptors {
        if descriptor != fd {
            connection.add_descriptor(descriptor);
        }
        entry::set(descriptor, Entry::Connection(connection));
        epoll::adopt(descriptor, connection);
    }
    // Only now: threads that still find the stream must not take the lifeline for a TCP socket that has connected.
    let inner = stream.with(std::mem::take::<StreamInner>);
    // Otherwise another thread has closed it meanwhile, and returned it to the pool.
    if !inner.descriptors.is_empty() {
        STREAMS.release(stream);
    }
    if outlives_exec {
        connection.set_inheritable(true);
    }
    Ok(is_nonblocking)
}

/// Hides the descriptors of the memory, by which the connection can be transferred, from the program.
pub(super) fn hide(memory: Option<MemoryFds>) -> Option<MemoryFds<HiddenFd>> {
    memory.and_then(|memory| memory.hide().ok())
}

pub(super) fn record_lane_connection(
    fd: RawFd,
    tuple: Tuple,
    role: Role,
    is_remote: bool,
) -> stats_page::ConnectionSlot {
    process_stats::page().open_connection(&stats_page::NewConnection {
        fd,
        path: if is_remote { DataPath::Window } else { DataPath::Lane },
        role,
        local: Some(tuple.local),
        peer: Some(tuple.peer),
        reason: None,
    })
}

/// Makes `descriptor` refer to the open file of `source` and keeps its close-on-exec flag. Returns whether that is set.
pub(super) fn replace(descriptor: RawFd, source: RawFd) -> Result<bool, Errno> {
    // SAFETY: the descriptor is borrowed for one query of its flags.
    let flags = rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(descriptor) })?;
    let is_cloexec = flags.contains(rustix::io::FdFlags::CLOEXEC);
    let cloexec = if is_cloexec { libc::O_CLOEXEC } else { 0 };
    // SAFETY: `dup3` replaces a descriptor of the program by the connection that the program has asked for; no other
    // code of the library owns it.
    let result = unsafe { crate::process::system::call!(libc::SYS_dup3, source, descriptor, cloexec) };
    if result < 0 { Err(Errno::MFILE) } else { Ok(is_cloexec) }
}
