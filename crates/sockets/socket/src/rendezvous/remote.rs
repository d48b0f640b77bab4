//! Connections to other nodes, by the proxy of this node, which stands in for the listeners there.
//!
//! A connecting program connects to the proxy as it would to the listener, sends its handshake and waits for the
//! [`ProxyReply`]: whether the listener on the other node has accepted the connection and, where programs may store
//! into windows themselves, which spans of them belong to the connection. On the accepting side the proxy connects like
//! any program and names the spans in its handshake. The descriptor that comes with either message is
//! [leased](crate::rendezvous::span_lease).

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use stats_page::FallbackReason;

use super::local::{
    ConnectRequest, Connected, LaneListener, NoLane, Route, bind_tuple, check_trusted, connect_lifeline,
    connect_to_first, hand_over_memory, listen_as, new_lifeline, new_memory, path_in, receive_with_descriptors,
    send_with_descriptor, spread_u32,
};
use crate::descriptor::hidden::{HiddenFd, Need, close};
use crate::descriptor::received::discard;
use crate::process::clock::now_ns;
use crate::rendezvous::address::{Tuple, canonical, destination};
use crate::rendezvous::directory::{ListenerName, Rack, RackLock};
use crate::rendezvous::handshake::{Handshake, WindowSpans};
use crate::rendezvous::local_page::MemoryFds;
use crate::rendezvous::monitor::{self, ListenerResponse};
use crate::rendezvous::proxy_reply::{ProxyReply, REPLY_BYTES};
use crate::rendezvous::window_segment::open_in_windows;
use segment::{Secrets, Segment, Side};
use wait::{Action, Spin};

/// Time that a program waits for the proxy's reply.
const REPLY_WAIT_NS: u64 = 5_000_000_000;
/// Maximum number of ports that are tried, each with a round trip to the other node, until one is found of which that
/// node has no connection.
const PORT_TRIES_MAX: u32 = 32;
/// Polls of memory that take as long as one system call.
const POLLS_PER_SYSCALL: u32 = 250;

/// Adds a listener of the proxy to a rack, which stands in for a listener of another node. The proxy must send each
/// accepted connection a [`ProxyReply`] when it knows the answer of the other node.
///
/// # Errors
/// Those of [`super::listen_in`].
pub fn listen_for_remote(rack: &Arc<Rack>, address: SocketAddr, backlog: i32) -> Result<LaneListener, Errno> {
    let name = ListenerName::remote(address);
    let free = |lock: &RackLock<'_>| lock.remove_if_stale(&name)?.then_some(name).ok_or(Errno::ADDRINUSE);
    listen_as(rack, name.address, free, backlog)
}

impl ConnectRequest {
    /// Returns whether the destination may be another node, beyond a window: on a machine of its own, or, where several
    /// nodes are on one machine, at one of their addresses that is not this node's.
    pub(super) fn may_be_remote(&self, route: &Result<Route, NoLane>) -> bool {
        let Some(node) = self.node else { return false };
        match route {
            Ok(route) => super::local::is_node(route.destination.ip()) && route.destination.ip() != node,
            Err(no_lane) => no_lane.reason == FallbackReason::RemoteAddress,
        }
    }

    /// Returns the route to another node from `node`, the address of this one.
    fn remote_route(&self, node: IpAddr) -> Result<Route, NoLane> {
        let destination = destination(self.destination);
        let bound = self.source.map(canonical);
        let source = bound.map(|bound| bound.ip()).filter(|ip| !ip.is_unspecified()).unwrap_or(node);
        if source.is_ipv4() != destination.is_ipv4() {
            return Err(NoLane::new(FallbackReason::SocketOption));
        }
        Ok(Route { destination, source, port: bound.map_or(0, |bound| bound.port()) })
    }
}

/// The progress of a connect that does not wait.
#[derive(Debug)]
pub enum ConnectProgress {
    /// The connection is established, with its memory.
    Connected(Box<Connected>),
    /// The lifeline is connected to a listener of this node; it is non-blocking and closed at `exec`.
    LifelineConnected {
        /// The kernel object to install behind the program's descriptor.
        lifeline: OwnedFd,
        /// Its addresses, in canonical form.
        tuple: Tuple,
    },
    /// The monitor or the proxy has to answer first.
    Pending(RemoteConnect),
    /// A connection with these addresses exists already: the one that the program has bound its socket to, and the
    /// destination.
    TupleInUse,
}

/// A connect to another node that waits for the monitor or the proxy. No step of it blocks, and its descriptors are
/// hidden.
#[derive(Debug)]
pub struct RemoteConnect {
    stage: Stage,
    deadline_ns: u64,
}

#[derive(Debug)]
enum Stage {
    AwaitingMonitor(Box<AwaitingMonitor>),
    AwaitingProxy(Box<AwaitingProxy>),
}

/// What a connect starts from, and starts from again if the other node still has a connection of the chosen port.
#[derive(Debug)]
struct ConnectAttempt {
    rack: Arc<Rack>,
    request: ConnectRequest,
    tries_left: u32,
}

/// The monitor is to ensure that the proxy stands in for the listener.
#[derive(Debug)]
struct AwaitingMonitor {
    attempt: ConnectAttempt,
    lifeline: HiddenFd,
    /// The lifeline's addresses, if it is bound already.
    tuple: Option<Tuple>,
    /// The connection to the monitor; `None` while too many programs query it.
    query: Option<HiddenFd>,
}

/// The proxy has received the handshake, and is to reply.
#[derive(Debug)]
struct AwaitingProxy {
    attempt: ConnectAttempt,
    lifeline: HiddenFd,
    tuple: Tuple,
    segment: Segment,
    memory: Option<MemoryFds<HiddenFd>>,
}

/// Connects to the proxy of this node, which stands in for a listener of another node. If it does not yet, the monitor
/// is queried, which ensures that it does.
pub(super) fn connect(rack: Arc<Rack>, request: &ConnectRequest, lifeline: OwnedFd) -> Result<ConnectProgress, NoLane> {
    ConnectAttempt { rack, request: *request, tries_left: PORT_TRIES_MAX }.connect(lifeline)
}

/// The result of an attempt with one port. `Err`: the other node still has a connection of the port, and another one is
/// to be tried.
type PortAttempt = Result<ConnectProgress, ConnectAttempt>;

fn or_another_port(result: PortAttempt) -> Result<ConnectProgress, NoLane> {
    result.or_else(|attempt| attempt.connect(new_lifeline()?))
}

impl ConnectAttempt {
    fn connect(mut self, mut lifeline: OwnedFd) -> Result<ConnectProgress, NoLane> {
        loop {
            match self.try_port(lifeline)? {
                Ok(progress) => return Ok(progress),
                Err(attempt) => self = attempt,
            }
            lifeline = new_lifeline()?;
        }
    }

    #[inline(never)] // Its variables are not to add to the caller's on a small stack.
    fn try_port(self, lifeline: OwnedFd) -> Result<PortAttempt, NoLane> {
        let destination = destination(self.request.destination);
        let name = ListenerName::remote(destination);
        // The settings name one address of the node; for a destination of the other family, the monitor must be
        // queried.
        let known = self.request.node.filter(|node| node.is_ipv4() == destination.is_ipv4());
        let Some(node) = known.filter(|_| self.rack.is_live(&name) == Ok(true)) else {
            return self.query_monitor(lifeline, None).map(Ok);
        };
        let tuple = self.bind(&lifeline, node)?;
        match connect_to_first(&self.rack, lifeline.as_fd(), &[name], || Ok(())) {
            // The listener has its name but does not listen, not yet or not any more: the monitor is queried.
            Err(no_lane) if no_lane.reason == FallbackReason::NoListener => {
                self.query_monitor(lifeline, Some(tuple)).map(Ok)
            }
            connected => connected.and_then(|()| self.begin_handshake(lifeline, tuple)),
        }
    }

    fn bind(&self, lifeline: &OwnedFd, node: IpAddr) -> Result<Tuple, NoLane> {
        let route = self.request.remote_route(node)?;
        let key = self.rack.key();
        bind_tuple(lifeline.as_fd(), &route, spread_u32(), self.request.opener, &key).map_err(NoLane::of_bind_error)
    }

    #[inline(never)] // Its variables are not to add to the caller's on a small stack.
    fn query_monitor(self, lifeline: OwnedFd, tuple: Option<Tuple>) -> Result<ConnectProgress, NoLane> {
        let query = self.send_query()?;
        let awaiting = Box::new(AwaitingMonitor { attempt: self, lifeline: hide(lifeline)?, tuple, query });
        Ok(ConnectProgress::Pending(RemoteConnect::new(Stage::AwaitingMonitor(awaiting), monitor::RESPONSE_WAIT_NS)))
    }

    fn send_query(&self) -> Result<Option<HiddenFd>, NoLane> {
        let destination = destination(self.request.destination);
        monitor::send_query(&self.rack, destination).map_err(NoLane::new)?.map(hide).transpose()
    }

    fn begin_handshake(self, lifeline: OwnedFd, tuple: Tuple) -> Result<PortAttempt, NoLane> {
        let mut connected = hand_over_memory(lifeline, tuple, new_memory()?)?;
        connected.is_remote = true;
        if let Some(received) = spin_for_reply(connected.lifeline.as_fd()) {
            return self.apply_reply(connected, received);
        }
        self.await_reply(connected).map(Ok)
    }

    #[inline(never)] // Its variables are not to add to the caller's on a small stack.
    fn await_reply(self, connected: Box<Connected>) -> Result<ConnectProgress, NoLane> {
        let Connected { lifeline, tuple, segment, memory, .. } = *connected;
        // The connection is not in windows yet, so its memory is one memfd.
        let memory = memory.map(|memory| hide(memory.memfd).map(MemoryFds::of_memfd)).transpose()?;
        let awaiting = AwaitingProxy { attempt: self, lifeline: hide(lifeline)?, tuple, segment, memory };
        let stage = Stage::AwaitingProxy(Box::new(awaiting));
        Ok(ConnectProgress::Pending(RemoteConnect::new(stage, REPLY_WAIT_NS)))
    }

    /// Applies the proxy's reply. Another port is tried if the other node still has a connection of this one, whose
    /// endpoint here is long closed, and the program has not chosen the port.
    #[inline(never)] // Its variables are not to add to the caller's on a small stack.
    fn apply_reply(mut self, connected: Box<Connected>, received: ReceivedReply) -> Result<PortAttempt, NoLane> {
        let is_port_free = self.request.source.is_none_or(|source| source.port() == 0);
        match received {
            Ok((ProxyReply::Refused(Errno::ADDRINUSE), None)) if is_port_free && self.tries_left > 0 => {
                connected.memory.into_iter().flat_map(MemoryFds::into_all).for_each(close);
                close(connected.lifeline);
                self.tries_left -= 1;
                Ok(Err(self))
            }
            received => apply_reply(connected, received).map(ConnectProgress::Connected).map(Ok),
        }
    }
}

fn hide(fd: OwnedFd) -> Result<HiddenFd, NoLane> {
    HiddenFd::hide(fd, Need::Required).map_err(NoLane::resource_limit_or(FallbackReason::HandshakeFailed))
}

impl RemoteConnect {
    fn new(stage: Stage, wait_ns: u64) -> Self {
        Self { stage, deadline_ns: now_ns().saturating_add(wait_ns) }
    }

    /// Advances the connect as far as the monitor and the proxy have answered.
    ///
    /// # Errors
    /// The reason why there is no lane. After [`FallbackReason::ResourceLimit`], a new connect may succeed.
    pub fn advance(self) -> Result<ConnectProgress, FallbackReason> {
        let progress = match self.stage {
            Stage::AwaitingMonitor(awaiting) => awaiting.advance(self.deadline_ns),
            Stage::AwaitingProxy(awaiting) => awaiting.advance(self.deadline_ns),
        };
        progress.map_err(|no_lane| no_lane.reason)
    }

    /// Returns the descriptor on which the next answer arrives, if there is one, and the deadline for it.
    pub fn wait_target(&self) -> (Option<BorrowedFd<'_>>, u64) {
        let descriptor = match &self.stage {
            Stage::AwaitingMonitor(awaiting) => awaiting.query.as_ref().and_then(HiddenFd::get),
            Stage::AwaitingProxy(awaiting) => awaiting.lifeline.get(),
        };
        (descriptor, self.deadline_ns)
    }
}

impl AwaitingMonitor {
    #[inline(never)] // Its variables are not to add to the caller's on a small stack.
    fn advance(mut self: Box<Self>, deadline_ns: u64) -> Result<ConnectProgress, NoLane> {
        if self.query.is_none() {
            self.query = self.attempt.send_query()?;
        }
        match self.query.as_ref().and_then(HiddenFd::get).and_then(monitor::receive_response) {
            Some(ListenerResponse::Ready { node }) => self.connect_to_proxy(node),
            Some(ListenerResponse::Unavailable(reason)) => Err(NoLane::new(reason)),
            None if now_ns() >= deadline_ns => Err(NoLane::new(FallbackReason::LinkDown)),
            None => Ok(ConnectProgress::Pending(RemoteConnect { stage: Stage::AwaitingMonitor(self), deadline_ns })),
        }
    }

    fn connect_to_proxy(self, node: IpAddr) -> Result<ConnectProgress, NoLane> {
        let Self { attempt, lifeline, tuple, .. } = self;
        let lifeline = lifeline.unhide().ok_or(NoLane::new(FallbackReason::HandshakeFailed))?;
        let tuple = tuple.map_or_else(|| attempt.bind(&lifeline, node), Ok)?;
        let name = ListenerName::remote(destination(attempt.request.destination));
        connect_to_first(&attempt.rack, lifeline.as_fd(), &[name], || Ok(()))?;
        or_another_port(attempt.begin_handshake(lifeline, tuple)?)
    }
}

impl AwaitingProxy {
    #[inline(never)] // Its variables are not to add to the caller's on a small stack.
    fn advance(self: Box<Self>, deadline_ns: u64) -> Result<ConnectProgress, NoLane> {
        match self.lifeline.get().and_then(poll_reply) {
            Some(received) => {
                let (attempt, connected) = self.unhide()?;
                or_another_port(attempt.apply_reply(connected, received)?)
            }
            None if now_ns() >= deadline_ns => {
                Err(NoLane::with_errno(FallbackReason::HandshakeFailed, Errno::TIMEDOUT))
            }
            None => Ok(ConnectProgress::Pending(RemoteConnect { stage: Stage::AwaitingProxy(self), deadline_ns })),
        }
    }

    #[inline(never)] // Its variables are not to add to the caller's on a small stack.
    fn unhide(self: Box<Self>) -> Result<(ConnectAttempt, Box<Connected>), NoLane> {
        let Self { attempt, lifeline, tuple, segment, memory } = *self;
        let lifeline = lifeline.unhide().ok_or(NoLane::new(FallbackReason::HandshakeFailed))?;
        let memory = memory.and_then(|memory| memory.memfd.unhide()).map(MemoryFds::of_memfd);
        Ok((attempt, Box::new(Connected { lifeline, tuple, segment, memory, is_remote: true })))
    }
}

/// A proxy's reply and the descriptor with it, or the error that came instead.
type ReceivedReply = Result<(ProxyReply, Option<OwnedFd>), Errno>;

/// Completes a connection as the reply says, in the spans that it names if there are any.
fn apply_reply(mut connected: Box<Connected>, received: ReceivedReply) -> Result<Box<Connected>, NoLane> {
    let broken = NoLane::resource_limit_or(FallbackReason::HandshakeFailed);
    let (reply, memory) = received.map_err(&broken)?;
    match (reply, memory) {
        (ProxyReply::Accepted(None), None) => Ok(connected),
        (ProxyReply::Accepted(Some(spans)), Some(memory)) => {
            let opened = open_in_windows(memory, spans, Side::Connector, connected.segment.secrets());
            connected.memory.take().into_iter().flat_map(MemoryFds::into_all).for_each(close);
            // Not a temporary error: each new attempt would create one more connection for the server and use up a
            // span.
            let unmapped = |errno| NoLane::with_errno(FallbackReason::WindowUnmapped, errno);
            let (segment, memory) = opened.map_err(unmapped)?;
            (connected.segment, connected.memory) = (segment, Some(memory));
            Ok(connected)
        }
        (ProxyReply::Refused(Errno::CONNREFUSED), None) => Err(NoLane::new(FallbackReason::NoListener)),
        (ProxyReply::Refused(Errno::AGAIN), None) => Err(NoLane::new(FallbackReason::HandshakeFailed)),
        (ProxyReply::Refused(Errno::ACCESS), None) => Err(NoLane::new(FallbackReason::AccessDenied)),
        (ProxyReply::Refused(Errno::NETUNREACH), None) => Err(NoLane::new(FallbackReason::LinkDown)),
        (ProxyReply::Refused(errno @ Errno::ADDRINUSE), None) => {
            Err(NoLane::with_errno(FallbackReason::PortInUse, errno))
        }
        (_, memory) => {
            memory.into_iter().for_each(discard);
            Err(NoLane::new(FallbackReason::HandshakeFailed))
        }
    }
}

/// Receives the proxy's reply, if it has arrived.
fn poll_reply(lifeline: BorrowedFd<'_>) -> Option<ReceivedReply> {
    let mut bytes = [0_u8; REPLY_BYTES];
    match receive_with_descriptors(lifeline, &mut bytes) {
        Ok((0, fds, _)) => {
            fds.into_iter().for_each(discard);
            Some(Err(Errno::CONNRESET))
        }
        Ok((length, mut fds, _)) => {
            let memory = fds.pop();
            fds.into_iter().for_each(discard);
            Some(ProxyReply::decode(&bytes[..length]).map(|reply| (reply, memory)).ok_or(Errno::PROTO))
        }
        Err(Errno::AGAIN | Errno::INTR) => None,
        Err(errno) => Some(Err(errno)),
    }
}

/// Polls for the reply as long as spinning pays off; most replies arrive within that time.
fn spin_for_reply(lifeline: BorrowedFd<'_>) -> Option<ReceivedReply> {
    let mut spin = Spin::new();
    loop {
        let received = poll_reply(lifeline);
        if received.is_some() || spin.iterate_by(POLLS_PER_SYSCALL) == Action::Block {
            return received;
        }
    }
}

/// Connects to a listener of this node on behalf of a program on another node, for a connection in windows. `spans` are
/// the accepting endpoint's, and `lease` is the descriptor that goes with them.
///
/// # Errors
/// Those of [`super::connect_in`].
pub fn connect_in_windows(
    rack: &Rack,
    request: &ConnectRequest,
    (spans, secrets): (WindowSpans, Secrets),
    lease: BorrowedFd<'_>,
) -> Result<OwnedFd, NoLane> {
    let (lifeline, _) = connect_lifeline(rack, request.route()?, new_lifeline()?, request.opener, || Ok(()))?;
    check_trusted(lifeline.as_fd())?;
    let handshake = Handshake { secrets, spans: Some(spans) }.encode();
    match send_with_descriptor(lifeline.as_fd(), &handshake, Some(lease)) {
        // The server may close the connection at once.
        Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(lifeline),
        Err(errno) => Err(NoLane::resource_limit_or(FallbackReason::HandshakeFailed)(errno)),
    }
}

/// Returns whether the lifeline of a connecting endpoint leads to a proxy, which stands in for a listener of another
/// node.
pub fn is_connected_to_proxy(lifeline: BorrowedFd<'_>) -> bool {
    let path = rustix::net::getpeername(lifeline).ok().flatten().and_then(path_in);
    path.as_deref().and_then(ListenerName::from_path).is_some_and(|name| name.is_remote)
}

#[cfg(test)]
mod tests;
