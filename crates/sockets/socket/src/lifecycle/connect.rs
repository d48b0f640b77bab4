//! `connect`: by a lane if possible, otherwise by kernel TCP.

use super::attempt::{
    Attempt, Established, Outcome, attempt, bound_to_loopback, fall_back, install, record_kernel_connection, replace,
};
use super::{already_connected, family, pending};
use crate::accounting::process_stats;
use crate::connection::Connection;
use crate::descriptor::hidden;
use crate::entry::{self, Entry};
use crate::epoll;
use crate::options::inspect;
use crate::process::clock::now_ns;
use crate::process::settings::settings;
use crate::process::signals::{self, SignalCheckpoint};
use crate::process::{background_connects, blocking, sandbox};
use crate::rendezvous::{self, RemoteConnect};
use crate::stream::{ConnectTarget, STREAMS, Stream, StreamInner};
use rustix::fs::OFlags;
use rustix::io::Errno;
use stats_page::FallbackReason;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// Time that a blocking connect waits for room in a backlog before it fails: as long as Linux sends SYNs.
const BACKLOG_WAIT_NS: u64 = 127_000_000_000;
/// Time that a non-blocking connect to another node waits for the answer before it continues in the background. Most
/// answers arrive within 100 us, and a connect that gets one in the call needs no polls, waits or second socket; but if
/// the monitor or the proxy is slow, an event loop must not block for longer than its own iterations take.
const REMOTE_WAIT_NS: u64 = 5_000_000;

/// Connects `fd` to `destination`, by a lane if possible.
pub fn connect(fd: RawFd, destination: Result<SocketAddr, Errno>) -> Outcome {
    match (entry::get(fd), destination) {
        (Entry::Stream(_), _) if sandbox::is_confined() => {
            process_stats::count_under_filter();
            Outcome::Kernel
        }
        (Entry::Confined(connection), Ok(_)) => Outcome::Complete(already_connected(connection)),
        (Entry::Connection(connection), Ok(_)) => Outcome::Complete(already_connected(connection)),
        (Entry::Connection(connection), Err(Errno::AFNOSUPPORT)) => {
            Outcome::Complete(signals::without_handlers(|| disconnect(fd, connection)))
        }
        (Entry::Connection(_), Err(error)) => Outcome::Complete(Err(error)),
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
    let is_v6 = local.is_ipv6();
    let any: IpAddr = if is_v6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let connect_and_disconnect = || -> Result<(), Errno> {
        let (listener, address) = bound_to_loopback(is_v6)?;
        rustix::net::listen(&listener, 1)?;
        let _ = rustix::net::bind(socket, &SocketAddr::new(any, local.port()));
        let connected = rustix::net::connect(socket, &address);
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
    // A listener that was shut down may connect.
    stream.with(|inner| inner.listener_slot = None);
    if !settings().applies_to(destination.port()) {
        record_kernel_connection(fd, stream, destination, FallbackReason::PortRule);
        return Outcome::Kernel;
    }
    let is_pending = pending::is_pending(stream);
    if !is_pending && is_without_listener(fd, destination) {
        return fall_back(fd, stream, destination, FallbackReason::NoListener);
    }
    let is_v6 = stream.with(|inner| inner.is_v6);
    let is_denied = if is_pending { Ok(false) } else { inspect::is_connect_denied(fd, is_v6, destination.port()) };
    if let Err(earlier) = is_denied {
        return Outcome::Complete(Err(earlier));
    }
    if is_denied == Ok(true) {
        // The kernel returns its own error; `--require-lane` has nothing to add to a refusal.
        record_kernel_connection(fd, stream, destination, FallbackReason::ConnectDenied);
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

/// Returns whether an unbound socket's connect certainly finds no listener with lanes. A bound one may have the
/// addresses of a connection with lanes whose listener is closed.
fn is_without_listener(fd: RawFd, destination: SocketAddr) -> bool {
    rendezvous::is_without_listener(destination, inspect::netns_of(fd))
        && inspect::local_address(fd).is_ok_and(|local| local.port() == 0)
}

/// Returns whether a destination is an IPv4 address in the form of an IPv6 one.
fn is_v4_mapped(destination: SocketAddr) -> bool {
    matches!(destination, SocketAddr::V6(v6) if v6.ip().to_ipv4_mapped().is_some())
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
    error: Errno,
}

impl Call {
    fn run(mut self) -> Outcome {
        if let Some(outcome) = self.poll() {
            return outcome;
        }
        match self.wait() {
            Ok(outcome) => outcome,
            Err(error) if self.is_pending || error == Errno::TIMEDOUT => Outcome::Complete(Err(error)),
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
            Attempt::TupleInUse => Some(Outcome::Complete(Err(Errno::ADDRNOTAVAIL))),
            Attempt::NoLane(reason) => Some(fall_back(self.fd, self.stream, self.target.destination, reason)),
        }
    }

    fn install(&self, established: Established) -> Outcome {
        match install(self.fd, self.stream, established) {
            Ok(is_nonblocking) if is_nonblocking => Outcome::Complete(Err(Errno::INPROGRESS)),
            Ok(_) => Outcome::Complete(Ok(())),
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
                return Err(limit.error);
            }
            if self.sleep(left_ns) == Err(Errno::INTR) && (limit.has_timeout || !began.restarts()) {
                return Err(if is_blocking(self.fd) { Errno::INTR } else { limit.error });
            }
            if let Some(outcome) = self.poll() {
                return Ok(outcome);
            }
        }
    }

    fn wait_limit(&self) -> WaitLimit {
        let error = if self.is_pending { Errno::ALREADY } else { Errno::INPROGRESS };
        if !is_blocking(self.fd) {
            // If other connects are pending, this one moves to the background at once: the waits of many consecutive
            // calls must not add up.
            let waits_for_remote = self.remote.is_some() && !background_connects::is_any_pending();
            return WaitLimit { limit_ns: if waits_for_remote { REMOTE_WAIT_NS } else { 0 }, has_timeout: true, error };
        }
        match self.stream.with_options(|options| options.send_timeout_ns()) {
            0 => WaitLimit { limit_ns: BACKLOG_WAIT_NS, has_timeout: false, error: Errno::TIMEDOUT },
            limit_ns @ ..BACKLOG_WAIT_NS => WaitLimit { limit_ns, has_timeout: true, error },
            _ => WaitLimit { limit_ns: BACKLOG_WAIT_NS, has_timeout: true, error: Errno::TIMEDOUT },
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

    fn go_to_background(self, error: Errno) -> Outcome {
        let Self { fd, stream, target, remote, .. } = self;
        let reason = if remote.is_some() { FallbackReason::ResourceLimit } else { FallbackReason::BacklogFull };
        match pending::begin(fd, stream, target, remote) {
            Ok(()) => Outcome::Complete(Err(error)),
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

/// Records that the kernel's `connect` has failed for good: the socket can connect again.
pub fn note_kernel_failure(fd: RawFd) {
    if let Entry::Stream(stream) = entry::get(fd) {
        stream.with(|inner| inner.slot = None);
    }
}
