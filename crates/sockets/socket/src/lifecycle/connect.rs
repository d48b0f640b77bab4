//! `connect`: by a lane if possible, otherwise by kernel TCP.

use super::pending;
use super::{already_connected, family, warn_user};
use crate::accounting::process_stats;
use crate::connection::{Connection, ConnectionParams, InitialPath};
use crate::descriptor::hidden::{self, HiddenFd};
use crate::entry::{self, Entry};
use crate::epoll;
use crate::options::inspect;
use crate::process::background_connects;
use crate::process::blocking;
use crate::process::clock::now_ns;
use crate::process::limit;
use crate::process::sandbox;
use crate::process::settings::settings;
use crate::process::signals;
use crate::process::signals::SignalCheckpoint;
use crate::rendezvous::address::Tuple;
use crate::rendezvous::local_page::MemoryFds;
use crate::rendezvous::{self, ConnectProgress, Connected, RemoteConnect};
use crate::stream::ConnectTarget;
use crate::stream::{PortChoice, STREAMS, Stream, StreamInner};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use segment::Side;
use stats_page::{DataPath, FallbackReason, Role};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// Time that a blocking connect waits for room in a backlog before it fails: as long as Linux sends SYNs.
const BACKLOG_WAIT_NS: u64 = 127_000_000_000;
/// Time that a non-blocking connect to another node waits for the answer before it continues in the background. Most
/// answers arrive within 100 us, and a connect that gets one in the call needs no polls, waits or second socket; but if
/// the monitor or the proxy is slow, an event loop must not block for longer than its own iterations take.
const REMOTE_WAIT_NS: u64 = 5_000_000;

/// The result of `connect`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The call is complete, with this result for the program.
    Answered(Result<(), Errno>),
    /// The kernel's `connect` is to be called, and [`note_kernel_failure`] if it fails for good.
    Kernel,
}

/// Connects `fd` to `destination`, by a lane if possible.
pub fn connect(fd: RawFd, destination: Result<SocketAddr, Errno>) -> Outcome {
    match (entry::get(fd), destination) {
        (Entry::Stream(_), _) if sandbox::is_confined() => Outcome::Kernel,
        (Entry::Confined(connection), Ok(_)) => Outcome::Answered(already_connected(connection)),
        (Entry::Connection(connection), Ok(_)) => Outcome::Answered(already_connected(connection)),
        (Entry::Connection(connection), Err(Errno::AFNOSUPPORT)) => {
            Outcome::Answered(signals::without_handlers(|| disconnect(fd, connection)))
        }
        (Entry::Connection(_), Err(error)) => Outcome::Answered(Err(error)),
        (Entry::Stream(stream), Ok(destination)) => connect_stream(fd, stream, destination),
        (Entry::Stream(stream), Err(Errno::AFNOSUPPORT)) => {
            pending::abandon(stream);
            Outcome::Kernel
        }
        _ => Outcome::Kernel,
    }
}

/// Resets a connection, as `connect` with `AF_UNSPEC` does, and replaces it by a socket that can connect again.
fn disconnect(fd: RawFd, connection: &'static Connection) -> Result<(), Errno> {
    let tuple = connection.tuple().ok_or(Errno::NOTCONN)?;
    let options = connection.with_options(|record| record.clone());
    let is_v6 = tuple.local.is_ipv6();
    let socket = options.template(family(is_v6))?;
    disconnect_as_tcp(&socket, tuple.local);
    if is_blocking(fd) {
        rustix::fs::fcntl_setfl(&socket, OFlags::empty())?;
    }
    let outcome = connection.disconnect(|descriptors| {
        epoll::while_replaced(descriptors, connection, || {
            for &descriptor in descriptors {
                replace(descriptor, socket.as_raw_fd())?;
            }
            let stream = STREAMS.take();
            let descriptors = descriptors.to_vec();
            for &descriptor in &descriptors {
                entry::set(descriptor, Entry::Stream(stream));
            }
            stream.with(|inner| *inner = StreamInner { is_v6, descriptors, options, ..StreamInner::default() });
            Ok(())
        })
    });
    hidden::close(socket);
    outcome
}

/// Connects and disconnects a TCP socket, so that it keeps the port of `local` and reports once that it was reset. If
/// that fails, it stays a new socket.
fn disconnect_as_tcp(socket: &OwnedFd, local: SocketAddr) {
    let (loopback, any): (SocketAddr, SocketAddr) = if local.is_ipv6() {
        ((Ipv6Addr::LOCALHOST, 0).into(), (Ipv6Addr::UNSPECIFIED, local.port()).into())
    } else {
        ((Ipv4Addr::LOCALHOST, 0).into(), (Ipv4Addr::UNSPECIFIED, local.port()).into())
    };
    let connect_and_disconnect = || -> Result<(), Errno> {
        let family = if local.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
        let listener = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        rustix::net::bind(&listener, &loopback)?;
        rustix::net::listen(&listener, 1)?;
        let _ = rustix::net::bind(socket, &any);
        let connected = rustix::net::connect(socket, &inspect::local_address(listener.as_raw_fd())?);
        hidden::close(listener);
        connected.or_else(|error| if error == Errno::INPROGRESS { Ok(()) } else { Err(error) })?;
        rustix::net::connect_unspec(socket)
    };
    let _ = connect_and_disconnect();
}

fn connect_stream(fd: RawFd, stream: &'static Stream, destination: SocketAddr) -> Outcome {
    if stream.with(|inner| inner.slot.is_some()) {
        // The kernel is connecting it already: a second call gets its result.
        return Outcome::Kernel;
    }
    if !settings().applies_to(destination.port()) {
        process_stats::count_fallback(FallbackReason::PortRule);
        record_kernel_connection(fd, stream, destination);
        return Outcome::Kernel;
    }
    let is_pending = pending::is_pending(stream);
    let is_v6 = stream.with(|inner| inner.is_v6);
    let is_denied = if is_pending { Ok(false) } else { inspect::is_connect_denied(fd, is_v6, destination.port()) };
    if let Err(earlier) = is_denied {
        return Outcome::Answered(Err(earlier));
    }
    if is_denied == Ok(true) {
        // The kernel returns its own error; `--require-lane` has nothing to add to a refusal.
        process_stats::count_fallback(FallbackReason::ConnectDenied);
        record_kernel_connection(fd, stream, destination);
        return Outcome::Kernel;
    }
    if !is_pending && is_v6 && is_v4_mapped(destination) && inspect::is_v6only(fd) {
        // The kernel has no route for such an address.
        return fall_back(fd, stream, destination, FallbackReason::UnsupportedCall);
    }
    if !is_pending && stream.with_options(|options| inspect::needs_kernel_tcp(fd, options)) {
        return fall_back(fd, stream, destination, FallbackReason::UnsupportedCall);
    }
    let bound = if is_pending { None } else { inspect::local_address(fd).ok() };
    let shares = stream.with_options(|options| options.shares_address());
    let port_choice = stream.with(|inner| inner.port_choice);
    let target = ConnectTarget { destination, bound, port_choice, shares, netns: inspect::netns_of(fd) };
    Call { fd, stream, target, is_pending, remote: None }.run()
}

/// Returns whether a destination is an IPv4 address in the form of an IPv6 one.
fn is_v4_mapped(destination: SocketAddr) -> bool {
    matches!(destination, SocketAddr::V6(v6) if v6.ip().to_ipv4_mapped().is_some())
}

/// A lifeline that is connected to a listener, and what is known of the connection.
pub(super) struct Established {
    lifeline: OwnedFd,
    tuple: Tuple,
    start: InitialPath,
    is_remote: bool,
}

impl From<Connected> for Established {
    fn from(connected: Connected) -> Self {
        let Connected { lifeline, tuple, segment, memory, is_remote } = connected;
        Self { lifeline, tuple, start: InitialPath::Lanes(segment, hide(memory)), is_remote }
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
            let start = InitialPath::Lifeline(Side::Connector);
            Attempt::Established(Box::new(Established { lifeline, tuple, start, is_remote: false }))
        }
        Ok(ConnectProgress::TupleInUse) => Attempt::TupleInUse,
        Ok(ConnectProgress::Pending(remote)) => Attempt::Pending(Box::new(remote)),
        Err(FallbackReason::BacklogFull) => Attempt::BacklogFull,
        Err(reason) => Attempt::NoLane(reason),
    }
}

/// A call of `connect` on a socket that is not connected.
struct Call {
    fd: RawFd,
    stream: &'static Stream,
    target: ConnectTarget,
    /// Whether an earlier call has moved the connect to the background.
    is_pending: bool,
    remote: Option<Box<RemoteConnect>>,
}

/// The limit of a call's wait.
struct WaitLimit {
    limit_ns: u64,
    /// Whether every signal handler ends the wait; otherwise only a handler without `SA_RESTART` does.
    has_timeout: bool,
    /// The error when the limit is reached.
    answer: Errno,
}

impl Call {
    fn run(mut self) -> Outcome {
        if let Some(outcome) = self.poll() {
            return outcome;
        }
        match self.wait() {
            Ok(outcome) => outcome,
            Err(error) if self.is_pending || error == Errno::TIMEDOUT => Outcome::Answered(Err(error)),
            Err(error) => self.go_to_background(error),
        }
    }

    /// Returns the outcome if there is one already.
    fn poll(&mut self) -> Option<Outcome> {
        if self.is_pending {
            return pending::outcome(self.fd);
        }
        match attempt(self.target, self.remote.take()) {
            Attempt::BacklogFull => None,
            Attempt::Pending(remote) => {
                self.remote = Some(remote);
                None
            }
            Attempt::Established(established) => Some(self.install(*established)),
            Attempt::TupleInUse => Some(Outcome::Answered(Err(Errno::ADDRNOTAVAIL))),
            Attempt::NoLane(reason) => Some(fall_back(self.fd, self.stream, self.target.destination, reason)),
        }
    }

    fn install(&self, established: Established) -> Outcome {
        match install(self.fd, self.stream, established) {
            Ok(is_nonblocking) if is_nonblocking => Outcome::Answered(Err(Errno::INPROGRESS)),
            Ok(_) => Outcome::Answered(Ok(())),
            Err(_) => fall_back(self.fd, self.stream, self.target.destination, FallbackReason::ResourceLimit),
        }
    }

    /// Waits as TCP's connect does: `INTR` after a signal, `INPROGRESS` when the limit is reached.
    fn wait(&mut self) -> Result<Outcome, Errno> {
        let limit = self.wait_limit();
        let (began, began_ns) = (SignalCheckpoint::now(), now_ns());
        loop {
            let left_ns = limit.limit_ns.saturating_sub(now_ns() - began_ns);
            if left_ns == 0 {
                return Err(limit.answer);
            }
            if self.sleep(left_ns) == Err(Errno::INTR) && (limit.has_timeout || !began.restarts()) {
                return Err(if is_blocking(self.fd) { Errno::INTR } else { limit.answer });
            }
            if let Some(outcome) = self.poll() {
                return Ok(outcome);
            }
        }
    }

    fn wait_limit(&self) -> WaitLimit {
        let answer = if self.is_pending { Errno::ALREADY } else { Errno::INPROGRESS };
        if !is_blocking(self.fd) {
            // If other connects are pending, this one moves to the background at once: the waits of many consecutive
            // calls must not add up.
            let waits_for_remote = self.remote.is_some() && !background_connects::is_any_pending();
            return WaitLimit {
                limit_ns: if waits_for_remote { REMOTE_WAIT_NS } else { 0 },
                has_timeout: true,
                answer,
            };
        }
        match self.stream.with_options(|options| options.send_timeout_ns()) {
            0 => WaitLimit { limit_ns: BACKLOG_WAIT_NS, has_timeout: false, answer: Errno::TIMEDOUT },
            limit_ns @ ..BACKLOG_WAIT_NS => WaitLimit { limit_ns, has_timeout: true, answer },
            _ => WaitLimit { limit_ns: BACKLOG_WAIT_NS, has_timeout: true, answer: Errno::TIMEDOUT },
        }
    }

    /// Blocks until the monitor or the proxy has answered, or until a full backlog is to be tried again.
    fn sleep(&self, left_ns: u64) -> Result<usize, Errno> {
        let awaited = self.remote.as_ref().map(|remote| remote.wait_target());
        let (fd, until_ns) = match awaited {
            Some((Some(descriptor), deadline_ns)) => (descriptor.as_raw_fd(), deadline_ns.saturating_sub(now_ns())),
            _ => (-1, pending::RETRY_INTERVAL_NS),
        };
        let mut entry = [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }];
        // SAFETY: the mask is null.
        unsafe { blocking::ppoll(&mut entry, Some(until_ns.min(left_ns)), std::ptr::null()) }
    }

    fn go_to_background(self, answer: Errno) -> Outcome {
        let Self { fd, stream, target, remote, .. } = self;
        let reason = if remote.is_some() { FallbackReason::ResourceLimit } else { FallbackReason::BacklogFull };
        match pending::begin(fd, stream, target, remote) {
            Ok(()) => Outcome::Answered(Err(answer)),
            Err(_) => fall_back(fd, stream, target.destination, reason),
        }
    }
}

/// Returns whether the program's descriptor is in blocking mode.
fn is_blocking(fd: RawFd) -> bool {
    // SAFETY: the descriptor is borrowed for one call; the program is connecting it. If it closes it meanwhile, the
    // call fails.
    rustix::fs::fcntl_getfl(unsafe { BorrowedFd::borrow_raw(fd) }).is_ok_and(|flags| !flags.contains(OFlags::NONBLOCK))
}

pub(super) fn fall_back(
    fd: RawFd,
    stream: &'static Stream,
    destination: SocketAddr,
    reason: FallbackReason,
) -> Outcome {
    process_stats::count_fallback(reason);
    // A socket that connects to itself reaches no other program, so no lane is missing.
    if settings().require_lane && reason != FallbackReason::ToItself {
        warn_user(&format_args!(
            "connect to {destination}: no lane: {}; refused by --require-lane",
            reason.explanation()
        ));
        return refuse(fd);
    }
    record_kernel_connection(fd, stream, destination);
    Outcome::Kernel
}

/// Makes the kernel refuse the connection in its own way, blocking or not: the socket connects to a port that is bound
/// but does not listen.
pub(super) fn refuse(fd: RawFd) -> Outcome {
    let is_v6 = inspect::local_address(fd).is_ok_and(|local| local.is_ipv6());
    let nowhere: SocketAddr = if is_v6 { (Ipv6Addr::LOCALHOST, 0).into() } else { (Ipv4Addr::LOCALHOST, 0).into() };
    let family = if is_v6 { AddressFamily::INET6 } else { AddressFamily::INET };
    let refused = || {
        let taken = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        rustix::net::bind(&taken, &nowhere)?;
        let port = inspect::local_address(taken.as_raw_fd())?;
        // SAFETY: the descriptor is borrowed for one call; the program is connecting it. If it closes it meanwhile, the
        // call fails.
        rustix::net::connect(unsafe { BorrowedFd::borrow_raw(fd) }, &port)
    };
    Outcome::Answered(refused().map_or_else(Err, |()| Err(Errno::CONNREFUSED)))
}

fn record_kernel_connection(fd: RawFd, stream: &'static Stream, destination: SocketAddr) {
    let slot = process_stats::page().open_connection(&stats_page::NewConnection {
        fd,
        path: DataPath::Kernel,
        role: Role::Connect,
        local: None,
        peer: Some(destination),
    });
    stream.with(|inner| inner.slot = Some(slot));
}

/// Records that the kernel's `connect` has failed for good: the socket can connect again.
pub fn note_kernel_failure(fd: RawFd) {
    if let Entry::Stream(stream) = entry::get(fd) {
        stream.with(|inner| inner.slot = None);
    }
}

/// Replaces the TCP socket by the lifeline, under all its descriptors. Returns whether it is in non-blocking mode.
pub(super) fn install(fd: RawFd, stream: &'static Stream, established: Established) -> Result<bool, Errno> {
    // No handler that closes the socket may run between the steps.
    signals::without_handlers(|| replace_socket(fd, stream, established))
}

fn replace_socket(fd: RawFd, stream: &'static Stream, established: Established) -> Result<bool, Errno> {
    let Established { lifeline, tuple, start, is_remote } = established;
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
        start,
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
    })
}

/// Makes `descriptor` refer to the open file of `source` and keeps its close-on-exec flag. Returns whether that is set.
fn replace(descriptor: RawFd, source: RawFd) -> Result<bool, Errno> {
    // SAFETY: the descriptor is borrowed for one query of its flags.
    let flags = rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(descriptor) })?;
    let is_cloexec = flags.contains(rustix::io::FdFlags::CLOEXEC);
    let cloexec = if is_cloexec { libc::O_CLOEXEC } else { 0 };
    // SAFETY: `dup3` replaces a descriptor of the program by the connection that the program has asked for; no other
    // code of the library owns it.
    let result = unsafe { crate::process::system::call!(libc::SYS_dup3, source, descriptor, cloexec) };
    if result < 0 { Err(Errno::MFILE) } else { Ok(is_cloexec) }
}
