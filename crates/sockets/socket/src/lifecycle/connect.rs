//! `connect`: a lane where there is one.

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

/// How long a blocking connect waits at a full backlog before it gives up: as long as Linux sends SYNs.
const BACKLOG_WAIT_NS: u64 = 127_000_000_000;
/// How long a non-blocking connect to another node waits for the answer from there before it goes to the background.
/// Answers come within some 100 us, and who has got one in the call does without looks, naps and a second socket; but
/// where monitor or proxy are slow, an event loop is not to stand still for longer than its own turns take.
const REMOTE_WAIT_NS: u64 = 5_000_000;

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

/// `connect` with `AF_UNSPEC` resets a connection, and leaves a socket that can connect again.
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

/// Has a TCP socket go through the same: it keeps the port of `local`, and says once that it was reset. Where that does
/// not work it is a fresh one.
fn disconnect_as_tcp(socket: &OwnedFd, local: SocketAddr) {
    let (loopback, any): (SocketAddr, SocketAddr) = if local.is_ipv6() {
        ((Ipv6Addr::LOCALHOST, 0).into(), (Ipv6Addr::UNSPECIFIED, local.port()).into())
    } else {
        ((Ipv4Addr::LOCALHOST, 0).into(), (Ipv4Addr::UNSPECIFIED, local.port()).into())
    };
    let go_through = || -> Result<(), Errno> {
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
    let _ = go_through();
}

fn connect_stream(fd: RawFd, stream: &'static Stream, destination: SocketAddr) -> Outcome {
    if stream.with(|inner| inner.slot.is_some()) {
        // The kernel is already at it: a second call asks how it went.
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
        // The kernel gives its own answer; `--require-lane` has nothing to add to a refusal.
        process_stats::count_fallback(FallbackReason::ConnectDenied);
        record_kernel_connection(fd, stream, destination);
        return Outcome::Kernel;
    }
    if !is_pending && is_v6 && is_v4_mapped(destination) && inspect::is_v6only(fd) {
        // The kernel has no route for it.
        return fall_back(fd, stream, destination, FallbackReason::UnsupportedCall);
    }
    if !is_pending && stream.with_options(|options| inspect::needs_kernel_tcp(fd, options)) {
        return fall_back(fd, stream, destination, FallbackReason::UnsupportedCall);
    }
    let bound = if is_pending { None } else { inspect::local_address(fd).ok() };
    let shares = stream.with_options(|options| options.shares_address());
    let port_choice = stream.with(|inner| inner.port_choice);
    let aim = ConnectTarget { destination, bound, port_choice, shares, netns: inspect::netns_of(fd) };
    Call { fd, stream, aim, is_pending, remote: None }.run()
}

/// Whether a destination is an IPv4 address in the form of an IPv6 one.
fn is_v4_mapped(destination: SocketAddr) -> bool {
    matches!(destination, SocketAddr::V6(v6) if v6.ip().to_ipv4_mapped().is_some())
}

/// A lifeline that has reached a listener, and what is known of the connection.
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

/// What one try came to.
pub(super) enum Attempt {
    Established(Box<Established>),
    /// The listener's backlog is full.
    BacklogFull,
    /// Others have to say something first.
    Pending(Box<RemoteConnect>),
    NoLane(FallbackReason),
    /// There is a connection with these addresses.
    TupleInUse,
}

/// Goes on with a connect that is under way, or begins one.
pub(super) fn attempt(aim: ConnectTarget, remote: Option<Box<RemoteConnect>>) -> Attempt {
    match (attempt_from(aim, remote), aim.port_choice) {
        // The kernel would not have chosen the port had it known of the connection: another one is as good.
        (Attempt::TupleInUse, PortChoice::Kernel) => {
            let bound = aim.bound.map(|bound| SocketAddr::new(bound.ip(), 0));
            attempt_from(ConnectTarget { bound, ..aim }, None)
        }
        (Attempt::TupleInUse, PortChoice::KnownKernel) => Attempt::NoLane(FallbackReason::NoFreePort),
        (attempt, _) => attempt,
    }
}

/// As [`attempt`], from the very address that the socket is bound to.
fn attempt_from(aim: ConnectTarget, remote: Option<Box<RemoteConnect>>) -> Attempt {
    let is_resource_limit = |reason: &FallbackReason| *reason == FallbackReason::ResourceLimit;
    let advanced = remote.map(|remote| remote.advance());
    let progress = advanced.filter(|progress| !progress.as_ref().is_err_and(is_resource_limit));
    let connect = || rendezvous::connect(aim.destination, aim.bound, aim.shares, aim.netns);
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

/// A call of `connect` for a socket that is not connected.
struct Call {
    fd: RawFd,
    stream: &'static Stream,
    aim: ConnectTarget,
    /// An earlier call has sent the connect to the background.
    is_pending: bool,
    remote: Option<Box<RemoteConnect>>,
}

/// How long a call waits.
struct WaitLimit {
    limit_ns: u64,
    /// A signal ends the wait; else only one whose handler wants that does.
    has_timeout: bool,
    /// The answer when it is over.
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

    /// The outcome, once there is one.
    fn poll(&mut self) -> Option<Outcome> {
        if self.is_pending {
            return pending::outcome(self.fd);
        }
        match attempt(self.aim, self.remote.take()) {
            Attempt::BacklogFull => None,
            Attempt::Pending(remote) => {
                self.remote = Some(remote);
                None
            }
            Attempt::Established(established) => Some(self.install(*established)),
            Attempt::TupleInUse => Some(Outcome::Answered(Err(Errno::ADDRNOTAVAIL))),
            Attempt::NoLane(reason) => Some(fall_back(self.fd, self.stream, self.aim.destination, reason)),
        }
    }

    fn install(&self, established: Established) -> Outcome {
        match install(self.fd, self.stream, established) {
            Ok(is_nonblocking) if is_nonblocking => Outcome::Answered(Err(Errno::INPROGRESS)),
            Ok(_) => Outcome::Answered(Ok(())),
            Err(_) => fall_back(self.fd, self.stream, self.aim.destination, FallbackReason::ResourceLimit),
        }
    }

    /// Waits as TCP's connect does: `INTR` after a signal, `INPROGRESS` when the program's time is up.
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
            // While others wait, it is to the background at once: many calls in turn are not to add up.
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

    /// Until others have spoken, or for as long as a full backlog is left alone.
    fn sleep(&self, left_ns: u64) -> Result<usize, Errno> {
        let target = self.remote.as_ref().map(|remote| remote.wait_target());
        let (fd, until_ns) = match target {
            Some((Some(place), deadline_ns)) => (place.as_raw_fd(), deadline_ns.saturating_sub(now_ns())),
            _ => (-1, pending::RETRY_INTERVAL_NS),
        };
        let mut entry = [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }];
        // SAFETY: no mask.
        unsafe { blocking::ppoll(&mut entry, Some(until_ns.min(left_ns)), std::ptr::null()) }
    }

    fn go_to_background(self, answer: Errno) -> Outcome {
        let Self { fd, stream, aim, remote, .. } = self;
        let reason = if remote.is_some() { FallbackReason::ResourceLimit } else { FallbackReason::BacklogFull };
        match pending::begin(fd, stream, aim, remote) {
            Ok(()) => Outcome::Answered(Err(answer)),
            Err(_) => fall_back(fd, stream, aim.destination, reason),
        }
    }
}

/// Whether the program's descriptor is in blocking mode.
fn is_blocking(fd: RawFd) -> bool {
    // SAFETY: the program's descriptor, which it is connecting.
    rustix::fs::fcntl_getfl(unsafe { BorrowedFd::borrow_raw(fd) }).is_ok_and(|flags| !flags.contains(OFlags::NONBLOCK))
}

pub(super) fn fall_back(
    fd: RawFd,
    stream: &'static Stream,
    destination: SocketAddr,
    reason: FallbackReason,
) -> Outcome {
    process_stats::count_fallback(reason);
    // A socket that connects to itself reaches no other program, and is no lane lost.
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

/// The kernel refuses the connection in its own way, blocking or not: it is sent to a port that is taken and does not
/// listen.
pub(super) fn refuse(fd: RawFd) -> Outcome {
    let is_v6 = inspect::local_address(fd).is_ok_and(|local| local.is_ipv6());
    let nowhere: SocketAddr = if is_v6 { (Ipv6Addr::LOCALHOST, 0).into() } else { (Ipv4Addr::LOCALHOST, 0).into() };
    let family = if is_v6 { AddressFamily::INET6 } else { AddressFamily::INET };
    let refused = || {
        let taken = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        rustix::net::bind(&taken, &nowhere)?;
        let port = inspect::local_address(taken.as_raw_fd())?;
        // SAFETY: the program's descriptor, which it is connecting.
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

/// After the kernel's `connect` has failed for good: the socket is a fresh one again.
pub fn note_kernel_failure(fd: RawFd) {
    if let Entry::Stream(stream) = entry::get(fd) {
        stream.with(|inner| inner.slot = None);
    }
}

/// Puts the lifeline in the place of the TCP socket, under all its descriptors. Answers whether it is in non-blocking
/// mode.
pub(super) fn install(fd: RawFd, stream: &'static Stream, established: Established) -> Result<bool, Errno> {
    // No handler that closes the socket comes between its steps.
    signals::without_handlers(|| replace_socket(fd, stream, established))
}

fn replace_socket(fd: RawFd, stream: &'static Stream, established: Established) -> Result<bool, Errno> {
    let Established { lifeline, tuple, start, is_remote } = established;
    // SAFETY: the program's descriptor, which it is connecting.
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
    // Only now: threads that still find the stream are not to take the lifeline for a TCP socket that has connected.
    let inner = stream.with(std::mem::take::<StreamInner>);
    // Else another thread has closed it meanwhile, and given it back.
    if !inner.descriptors.is_empty() {
        STREAMS.release(stream);
    }
    if outlives_exec {
        connection.set_inheritable(true);
    }
    Ok(is_nonblocking)
}

/// Keeps the memory's descriptors for handing the connection on, out of the program's sight.
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

/// Makes `descriptor` name what `source` names, keeping its close-on-exec flag. Answers whether that is set.
fn replace(descriptor: RawFd, source: RawFd) -> Result<bool, Errno> {
    // SAFETY: both are open; the numbers stay what they are.
    let flags = rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(descriptor) })?;
    let is_cloexec = flags.contains(rustix::io::FdFlags::CLOEXEC);
    let cloexec = if is_cloexec { libc::O_CLOEXEC } else { 0 };
    // SAFETY: replaces the program's descriptor, on the program's behalf.
    let result = unsafe { crate::process::system::call!(libc::SYS_dup3, source, descriptor, cloexec) };
    if result < 0 { Err(Errno::MFILE) } else { Ok(is_cloexec) }
}
