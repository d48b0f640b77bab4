//! Connections to other nodes: the proxy of this node stands in for what is there.
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

/// How long a program waits for the other node's answer.
const REPLY_WAIT_NS: u64 = 5_000_000_000;
/// Ports that are tried, each a word to the other node and back, until one is found which that has no connection of.
const PORT_TRIES_MAX: u32 = 32;
/// Looks at memory that take as long as one look at a socket.
const POLLS_PER_SYSCALL: u32 = 250;

/// Adds a listener in a rack that stands in for another node's: the proxy's, not a program's. Whoever accepts there
/// owes each connection an [`send_reply`], once it is known what the other node says.
///
/// # Errors
/// As [`listen_in`].
pub fn listen_for_remote(rack: &Arc<Rack>, address: SocketAddr, backlog: i32) -> Result<LaneListener, Errno> {
    let name = ListenerName::remote(address);
    let free = |lock: &RackLock<'_>| lock.remove_if_stale(&name)?.then_some(name).ok_or(Errno::ADDRINUSE);
    listen_as(rack, name.address, free, backlog)
}

impl ConnectRequest {
    /// Whether the destination may be another node's, beyond a window: on a machine of its own, or, where several nodes
    pub(super) fn may_be_remote(&self, route: &Result<Route, NoLane>) -> bool {
        let Some(node) = self.node else { return false };
        match route {
            Ok(route) => super::local::is_node(route.destination.ip()) && route.destination.ip() != node,
            Err(no_lane) => no_lane.reason == FallbackReason::RemoteAddress,
        }
    }

    /// The way to another node, from `node`, which is the address of this one.
    fn remote_route(&self, node: IpAddr) -> Result<Route, NoLane> {
        let destination = destination(self.destination);
        let bound = self.source.map(canonical);
        let source = bound.map(|bound| bound.ip()).filter(|ip| !ip.is_unspecified()).unwrap_or(node);
        if source.is_ipv4() != destination.is_ipv4() {
            return Err(NoLane::new(FallbackReason::UnsupportedCall));
        }
        Ok(Route { destination, source, port: bound.map_or(0, |bound| bound.port()) })
    }
}

/// How far a connect has come that need not be waited for.
#[derive(Debug)]
pub enum ConnectProgress {
    /// There, with the memory of the connection.
    Connected(Box<Connected>),
    /// There: the lifeline has reached a listener of this node, non-blocking and closed at `exec`.
    LifelineConnected {
        /// The kernel object that is to stand behind the program's descriptor.
        lifeline: OwnedFd,
        /// Its addresses, canonical.
        tuple: Tuple,
    },
    /// Others have to say something first.
    Pending(RemoteConnect),
    /// There is a connection with these addresses: the one that the program has bound its socket to, and the
    /// destination.
    TupleInUse,
}

/// A connection to another node that waits for what others say: no step of it does. Its descriptors are hidden.
#[derive(Debug)]
pub struct RemoteConnect {
    stage: Stage,
    deadline_ns: u64,
}

#[derive(Debug)]
enum Stage {
    AwaitingMonitor(AwaitingMonitor),
    AwaitingProxy(Box<AwaitingProxy>),
}

/// What a connect begins with; and begins anew with, where the other node still has a connection of the port chosen.
#[derive(Debug)]
struct ConnectAttempt {
    rack: Arc<Rack>,
    request: ConnectRequest,
    tries_left: u32,
}

/// The monitor is to see to it that the proxy stands in for the listener.
#[derive(Debug)]
struct AwaitingMonitor {
    attempt: ConnectAttempt,
    lifeline: HiddenFd,
    /// The lifeline's, if that has one already.
    tuple: Option<Tuple>,
    /// Nothing while too many others ask.
    query: Option<HiddenFd>,
}

/// The proxy has got the handshake, and is to reply.
#[derive(Debug)]
struct AwaitingProxy {
    attempt: ConnectAttempt,
    lifeline: HiddenFd,
    tuple: Tuple,
    segment: Segment,
    memory: Option<MemoryFds<HiddenFd>>,
}

/// Connects to the proxy of this node, which stands in for a listener of another. Where it does not yet, the monitor is
/// asked to see to it.
pub(super) fn connect(rack: Arc<Rack>, request: &ConnectRequest, lifeline: OwnedFd) -> Result<ConnectProgress, NoLane> {
    ConnectAttempt { rack, request: *request, tries_left: PORT_TRIES_MAX }.connect(lifeline)
}

/// What became of a try with one port. `Err`: the other node still has a connection of it, another is to be tried.
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

    fn try_port(self, lifeline: OwnedFd) -> Result<PortAttempt, NoLane> {
        let destination = destination(self.request.destination);
        let name = ListenerName::remote(destination);
        // A node has one address; only for a destination of the other family it must be asked for.
        let known = self.request.node.filter(|node| node.is_ipv4() == destination.is_ipv4());
        let Some(node) = known.filter(|_| self.rack.is_live(&name) == Ok(true)) else {
            return self.query_monitor(lifeline, None).map(Ok);
        };
        let tuple = self.bind(&lifeline, node)?;
        match connect_to_first(&self.rack, lifeline.as_fd(), &[name], || Ok(())) {
            // It has its name and does not listen yet, or does not any more: the monitor sees to it.
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

    fn query_monitor(self, lifeline: OwnedFd, tuple: Option<Tuple>) -> Result<ConnectProgress, NoLane> {
        let query = self.send_query()?;
        let awaiting = AwaitingMonitor { attempt: self, lifeline: hide(lifeline)?, tuple, query };
        Ok(ConnectProgress::Pending(RemoteConnect::new(Stage::AwaitingMonitor(awaiting), monitor::RESPONSE_WAIT_NS)))
    }

    fn send_query(&self) -> Result<Option<HiddenFd>, NoLane> {
        let destination = destination(self.request.destination);
        monitor::send_query(&self.rack, destination).map_err(NoLane::new)?.map(hide).transpose()
    }

    fn begin_handshake(self, lifeline: OwnedFd, tuple: Tuple) -> Result<PortAttempt, NoLane> {
        let connected = Connected { is_remote: true, ..hand_over_memory(lifeline, tuple, new_memory()?)? };
        if let Some(received) = spin_for_reply(connected.lifeline.as_fd()) {
            return self.apply_reply(connected, received);
        }
        let Connected { lifeline, tuple, segment, memory, .. } = connected;
        // Not in windows yet: it is one.
        let memory = memory.map(|memory| hide(memory.memfd).map(MemoryFds::of_memfd)).transpose()?;
        let awaiting = AwaitingProxy { attempt: self, lifeline: hide(lifeline)?, tuple, segment, memory };
        let pending = RemoteConnect::new(Stage::AwaitingProxy(Box::new(awaiting)), REPLY_WAIT_NS);
        Ok(Ok(ConnectProgress::Pending(pending)))
    }

    /// What the proxy has replied. Another port is tried if the other node still has a connection of this one, whose
    /// end here has long been closed, and the program has named none.
    fn apply_reply(mut self, connected: Connected, received: ReceivedReply) -> Result<PortAttempt, NoLane> {
        let is_port_free = self.request.source.is_none_or(|source| source.port() == 0);
        match received {
            Ok((ProxyReply::Refused(Errno::ADDRINUSE), None)) if is_port_free && self.tries_left > 0 => {
                connected.memory.into_iter().flat_map(MemoryFds::into_all).for_each(close);
                close(connected.lifeline);
                self.tries_left -= 1;
                Ok(Err(self))
            }
            received => apply_reply(connected, received).map(Box::new).map(ConnectProgress::Connected).map(Ok),
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

    /// Goes on as far as others have spoken.
    ///
    /// # Errors
    /// Why there is no lane; a reason that something ran out for may have gone if the connect is begun anew.
    pub fn advance(self) -> Result<ConnectProgress, FallbackReason> {
        let progress = match self.stage {
            Stage::AwaitingMonitor(awaiting) => awaiting.advance(self.deadline_ns),
            Stage::AwaitingProxy(awaiting) => awaiting.advance(self.deadline_ns),
        };
        progress.map_err(|no_lane| no_lane.reason)
    }

    /// Where the next word comes, if there is such a spans, and until when it counts.
    pub fn wait_target(&self) -> (Option<BorrowedFd<'_>>, u64) {
        let descriptor = match &self.stage {
            Stage::AwaitingMonitor(awaiting) => awaiting.query.as_ref().and_then(HiddenFd::get),
            Stage::AwaitingProxy(awaiting) => awaiting.lifeline.get(),
        };
        (descriptor, self.deadline_ns)
    }
}

impl AwaitingMonitor {
    fn advance(mut self, deadline_ns: u64) -> Result<ConnectProgress, NoLane> {
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

    fn unhide(self) -> Result<(ConnectAttempt, Connected), NoLane> {
        let Self { attempt, lifeline, tuple, segment, memory } = self;
        let lifeline = lifeline.unhide().ok_or(NoLane::new(FallbackReason::HandshakeFailed))?;
        let memory = memory.and_then(|memory| memory.memfd.unhide()).map(MemoryFds::of_memfd);
        Ok((attempt, Connected { lifeline, tuple, segment, memory, is_remote: true }))
    }
}

/// A proxy's reply and the descriptor with it, or what came instead.
type ReceivedReply = Result<(ProxyReply, Option<OwnedFd>), Errno>;

/// Moves to the spans that a reply names.
fn apply_reply(connected: Connected, received: ReceivedReply) -> Result<Connected, NoLane> {
    let broken = NoLane::resource_limit_or(FallbackReason::HandshakeFailed);
    let (reply, memory) = received.map_err(&broken)?;
    match (reply, memory) {
        (ProxyReply::Accepted(None), None) => Ok(connected),
        (ProxyReply::Accepted(Some(spans)), Some(memory)) => {
            let opened = open_in_windows(memory, spans, Side::Connector, connected.segment.secrets());
            connected.memory.into_iter().flat_map(MemoryFds::into_all).for_each(close);
            // Not what a connect begun anew could mend: each would be one more for the server, and a span less.
            let unmapped = |errno| NoLane::with_errno(FallbackReason::WindowUnmapped, errno);
            let (segment, memory) = opened.map_err(unmapped)?;
            Ok(Connected { segment, memory: Some(memory), ..connected })
        }
        (ProxyReply::Refused(Errno::CONNREFUSED), None) => Err(NoLane::new(FallbackReason::NoListener)),
        (ProxyReply::Refused(Errno::AGAIN), None) => Err(NoLane::new(FallbackReason::BacklogFull)),
        (ProxyReply::Refused(Errno::ACCESS), None) => Err(NoLane::new(FallbackReason::PeerRefused)),
        (ProxyReply::Refused(Errno::NETUNREACH), None) => Err(NoLane::new(FallbackReason::LinkDown)),
        (ProxyReply::Refused(errno @ Errno::ADDRINUSE), None) => {
            Err(NoLane::with_errno(FallbackReason::PortInUse, errno))
        }
        (_, memory) => {
            memory.into_iter().for_each(close);
            Err(NoLane::new(FallbackReason::HandshakeFailed))
        }
    }
}

/// Whether the proxy has replied.
fn poll_reply(lifeline: BorrowedFd<'_>) -> Option<ReceivedReply> {
    let mut bytes = [0_u8; REPLY_BYTES];
    match receive_with_descriptors(lifeline, &mut bytes) {
        Ok((0, fds, _)) => {
            fds.into_iter().for_each(close);
            Some(Err(Errno::CONNRESET))
        }
        Ok((length, mut fds, _)) => {
            let memory = fds.pop();
            fds.into_iter().for_each(close);
            Some(ProxyReply::decode(&bytes[..length]).map(|reply| (reply, memory)).ok_or(Errno::PROTO))
        }
        Err(Errno::AGAIN | Errno::INTR) => None,
        Err(errno) => Some(Err(errno)),
    }
}

/// Looks for the reply for as long as being awake is worth it: most come within that.
fn spin_for_reply(lifeline: BorrowedFd<'_>) -> Option<ReceivedReply> {
    let mut spin = Spin::new();
    loop {
        let received = poll_reply(lifeline);
        if received.is_some() || spin.iterate_by(POLLS_PER_SYSCALL) == Action::Block {
            return received;
        }
    }
}

/// Connects to a listener of this node on behalf of another node's program, to a connection in windows: `spans` is the
/// accepting end's, and `lease` the descriptor that goes with it.
///
/// # Errors
/// As [`super::connect_in`].
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
        // The server has closed already, as it may.
        Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(lifeline),
        Err(errno) => Err(NoLane::resource_limit_or(FallbackReason::HandshakeFailed)(errno)),
    }
}

/// Whether a connecting end's lifeline has reached a proxy, which stands in for a listener of another node.
pub fn is_connected_to_proxy(lifeline: BorrowedFd<'_>) -> bool {
    let path = rustix::net::getpeername(lifeline).ok().flatten().and_then(path_in);
    path.as_deref().and_then(ListenerName::from_path).is_some_and(|name| name.is_remote)
}

#[cfg(test)]
mod tests;
