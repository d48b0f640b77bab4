//! Connections to other nodes: the proxy of this node stands in for what is there.
//!
//! A connecting program connects to the proxy as it would to the listener, sends its handshake and waits for the
//! [`ProxyReply`]: whether the listener on the other node has accepted the connection and, where programs may store
//! into windows themselves, which spans of them belong to the connection. On the accepting side the proxy connects like
//! any program and names the spans in its handshake. The descriptor that comes with either message is
//! [leased](crate::rendezvous::span_lease).
//!
//! ```text
//!    0  magic            "XLREPLY" and a zero
//!    8  version          of this and of the segment's layout
//!   12  error            0, or the error number that refuses the connection
//!   16  flags            as in a handshake; 1: the connection lies in the memory whose descriptor is attached
//!   24  inbound          offset of the connecting end's span
//!   32  outbound         offset of the accepting end's span
//!   40  model            what a program must know of such a link
//! ```

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use fabric::device::DeviceMemory;
use fabric::shm;
use rustix::fs::FileType;
use rustix::io::Errno;
use stats_page::FallbackReason;
use volmem::{Alignment, Mapping, Region};

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
use crate::rendezvous::local_page::{self, LocalPage, MemoryFds};
use crate::rendezvous::monitor::{self, ListenerResponse};
use crate::rendezvous::span_lease;
use segment::model::{LinkModel, MODEL_BYTES, ModelledLink};
use segment::{LAYOUT_VERSION, Secrets, Segment, Side};
use wait::{Action, Spin};

const REPLY_BYTES: usize = MODEL_OFFSET + MODEL_BYTES;
const MODEL_OFFSET: usize = 40;
const MAGIC: u64 = u64::from_ne_bytes(*b"XLREPLY\0");
/// How long a program waits for the other node's answer.
const REPLY_WAIT_NS: u64 = 5_000_000_000;
/// Ports that are tried, each a word to the other node and back, until one is found which that has no connection of.
const PORT_TRIES_MAX: u32 = 32;
/// Looks at memory that take as long as one look at a socket.
const POLLS_PER_SYSCALL: u32 = 250;
/// File system of the files that are the BARs of PCI devices.
const SYSFS_MAGIC: u64 = 0x6265_6572;

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

/// What became of a connection to another node, from the proxy to the program that connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyReply {
    /// Taken; where it lies, if not in the memory that the program has made.
    Accepted(Option<WindowSpans>),
    /// Refused, with what TCP would have shown.
    Refused(Errno),
}

impl ProxyReply {
    fn encode(self) -> [u8; REPLY_BYTES] {
        let (error, spans) = match self {
            Self::Accepted(spans) => (0, spans),
            Self::Refused(errno) => (errno.raw_os_error(), None),
        };
        let flags = u64::from(WindowSpans::flags(spans));
        let spans = spans.unwrap_or(WindowSpans::new(0, 0));
        let mut bytes = [0_u8; REPLY_BYTES];
        bytes[..8].copy_from_slice(&MAGIC.to_ne_bytes());
        bytes[8..12].copy_from_slice(&LAYOUT_VERSION.to_ne_bytes());
        bytes[12..16].copy_from_slice(&error.to_ne_bytes());
        bytes[16..24].copy_from_slice(&flags.to_ne_bytes());
        bytes[24..32].copy_from_slice(&spans.inbound_offset.to_ne_bytes());
        bytes[32..MODEL_OFFSET].copy_from_slice(&spans.outbound_offset.to_ne_bytes());
        bytes[MODEL_OFFSET..].copy_from_slice(&LinkModel::encode(spans.model));
        bytes
    }

    /// Nothing but what [`ProxyReply::encode`] writes is one.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| bytes.get(at..at + 8)?.try_into().ok().map(u64::from_ne_bytes);
        let error = i32::from_ne_bytes(bytes.get(12..16)?.try_into().ok()?);
        let model = bytes.get(MODEL_OFFSET..)?.first_chunk().and_then(LinkModel::decode);
        let flags = u32::try_from(word(16)?).ok()?;
        let (alignment, caching) = (WindowSpans::alignment_in(flags), WindowSpans::caching_in(flags));
        let spans = WindowSpans { inbound_offset: word(24)?, outbound_offset: word(32)?, alignment, caching, model };
        let reply = match error {
            0 => Self::Accepted((flags != 0).then_some(spans)),
            1..=4095 => Self::Refused(Errno::from_raw_os_error(error)),
            _ => return None,
        };
        (reply.encode() == bytes).then_some(reply)
    }
}

/// Answers a program that has connected to another node's listener; `memory` is that of the windows, where the
/// connection lies in them.
///
/// # Errors
/// What sendmsg answers: `PIPE` for a program that has gone.
pub fn send_reply(lifeline: BorrowedFd<'_>, reply: ProxyReply, memory: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    send_with_descriptor(lifeline, &reply.encode(), memory)
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
                let (attempt, connected) = self.show()?;
                or_another_port(attempt.apply_reply(connected, received)?)
            }
            None if now_ns() >= deadline_ns => {
                Err(NoLane::with_errno(FallbackReason::HandshakeFailed, Errno::TIMEDOUT))
            }
            None => Ok(ConnectProgress::Pending(RemoteConnect { stage: Stage::AwaitingProxy(self), deadline_ns })),
        }
    }

    fn show(self) -> Result<(ConnectAttempt, Connected), NoLane> {
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

/// The end of a connection whose spans lie in `memory`, and what it is handed on by.
///
/// # Errors
/// `PERM` for memory that somebody could cut off under a mapping, `INVAL` for a spans that is not in it, and what mmap
/// answers. The descriptor is closed then.
pub(super) fn open_in_windows(
    memory: OwnedFd,
    spans: WindowSpans,
    side: Side,
    secrets: Secrets,
) -> Result<(Segment, MemoryFds), Errno> {
    match open_spans(memory.as_fd(), spans, side, secrets) {
        Ok((segment, None)) => Ok((segment, MemoryFds::of_memfd(memory))),
        Ok((segment, Some(page))) => Ok((segment, MemoryFds { device: Some(memory), ..MemoryFds::of_memfd(page) })),
        Err(errno) => {
            close(memory);
            Err(errno)
        }
    }
}

/// The end, set up, and its local page if it has one: where its state is, or where the memory cannot say itself what
/// lies where.
fn open_spans(
    memory: BorrowedFd<'_>,
    spans: WindowSpans,
    side: Side,
    secrets: Secrets,
) -> Result<(Segment, Option<OwnedFd>), Errno> {
    let [inbound, outbound] = map_spans(memory, spans)?;
    let has_local_page = spans.is_apart() || !shm::is_sealed(memory);
    let page = has_local_page.then(|| local_page::create(spans, memory)).transpose()?;
    let segment = match (spans.model, &page) {
        (None, Some((_, page))) if spans.is_apart() => {
            let (inbound, outbound) = device_memory([inbound, outbound], spans)?;
            Segment::with_local_page(inbound, outbound, page, side, secrets)
        }
        (None, _) => Segment::in_windows(&inbound, &outbound, side, secrets),
        (Some(model), _) => {
            let link = ModelledLink::map(memory, model)?;
            Segment::in_modelled_windows(&inbound, &outbound, link, side, secrets)?
        }
    };
    segment.set_up();
    Ok((segment, page.map(|(memfd, _)| memfd)))
}

fn device_memory(regions: [Region; 2], spans: WindowSpans) -> Result<(DeviceMemory, DeviceMemory), Errno> {
    let [inbound, outbound] = regions.map(|region| DeviceMemory::new(region, spans.caching));
    inbound.zip(outbound).ok_or(Errno::OPNOTSUPP)
}

/// The end of a connection in windows that another process set up, by its [lease].
///
/// # Errors
/// `INVAL` for a descriptor that is no lease, or a model that no link can have, and `NOTCONN` where nobody has set the
/// end up.
pub(crate) fn adopt(lease: BorrowedFd<'_>) -> Result<Segment, Errno> {
    let spans = span_lease::spans_of(lease).ok_or(Errno::INVAL)?;
    let [inbound, outbound] = map_spans(lease, spans)?;
    let segment = Segment::adopt_in_windows(&inbound, &outbound, None)?;
    if !span_lease::is_modelled(lease) {
        return Ok(segment);
    }
    let model = segment.model().ok_or(Errno::INVAL)?;
    let [inbound, outbound] = map_spans(lease, WindowSpans { model: Some(model), ..spans })?;
    Segment::adopt_in_windows(&inbound, &outbound, Some(ModelledLink::map(lease, model)?))
}

/// Adopts an endpoint whose connection lies in the memory of a device, by its local page and a descriptor of that
/// memory.
///
/// # Errors
/// `INVAL` for a descriptor that is not a local page or memory of another device, and `NOTCONN` where nobody has set up
/// the endpoint.
pub(crate) fn adopt_on_device(memfd: &OwnedFd, memory: BorrowedFd<'_>) -> Result<Segment, Errno> {
    let LocalPage { spans, .. } =
        LocalPage::read(memfd.as_fd()).filter(|page| page.describes(memory)).ok_or(Errno::INVAL)?;
    let regions = map_spans(memory, spans)?;
    if spans.is_apart() {
        let (inbound, outbound) = device_memory(regions, spans)?;
        return Segment::adopt_with_local_page(inbound, outbound, &local_page::map(memfd)?);
    }
    let [inbound, outbound] = regions;
    Segment::adopt_in_windows(&inbound, &outbound, None)
}

fn map_spans(memory: BorrowedFd<'_>, spans: WindowSpans) -> Result<[Region; 2], Errno> {
    check_spans(memory, spans)?;
    let span = |offset| {
        let span_bytes = spans.span_bytes();
        let (mapping, begin) = match spans.alignment {
            None => (Mapping::at(memory, offset, span_bytes)?, 0),
            // More than the span: who trusts programs with windows trusts them with all of the memory.
            Some(alignment) => Mapping::around(memory, offset, span_bytes, alignment)?,
        };
        Ok(Region::of_mapping(Arc::new(mapping)).sub(begin, span_bytes))
    };
    let errno = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL);
    Ok([span(spans.inbound_offset).map_err(errno)?, span(spans.outbound_offset).map_err(errno)?])
}

/// Whether a program could have a spans in the memory: maps it, and lets go of it untouched.
///
/// # Errors
/// As a program would find: `PERM` where it [must not be leased](may_lease), `INVAL` for a spans that is not in it, and
/// what mmap answers.
pub fn try_map_spans(memory: BorrowedFd<'_>, spans: WindowSpans) -> Result<(), Errno> {
    map_spans(memory, spans).map(drop)
}

/// A spans in memory that [may be leased](may_lease), before its end.
fn check_spans(memory: BorrowedFd<'_>, spans: WindowSpans) -> Result<(), Errno> {
    if !may_lease(memory)? {
        return Err(Errno::PERM);
    }
    let stat = rustix::fs::fstat(memory)?;
    let end_bytes = match FileType::from_raw_mode(stat.st_mode) {
        // Where a device ends, neither its node nor mmap says: only the proxy knows, which has mapped all of it.
        FileType::CharacterDevice => i64::MAX as u64,
        _ => stat.st_size as u64,
    };
    let span_bytes = spans.span_bytes() as u64;
    let is_fit = |offset: u64| {
        let ends_within = offset.checked_add(span_bytes).is_some_and(|end| end <= end_bytes);
        ends_within && offset.is_multiple_of(Alignment::MIN_BYTES)
    };
    let are_apart = spans.inbound_offset.abs_diff(spans.outbound_offset) >= span_bytes;
    let are_fit = [spans.inbound_offset, spans.outbound_offset].into_iter().all(is_fit);
    if are_fit && are_apart { Ok(()) } else { Err(Errno::INVAL) }
}

/// Whether programs can have parts of the memory: one whose end nobody can move, which is a sealed memfd, the BAR of a
/// device, or a device.
///
/// # Errors
/// What fstat and fstatfs answer.
pub fn may_lease(memory: BorrowedFd<'_>) -> Result<bool, Errno> {
    let is_device = FileType::from_raw_mode(rustix::fs::fstat(memory)?.st_mode) == FileType::CharacterDevice;
    if is_device {
        return Ok(true);
    }
    match rustix::fs::fstatfs(memory)?.f_type as u64 {
        // Not a sealed file of huge pages: those may run out at the first touch, which kills.
        shm::TMPFS_MAGIC => Ok(shm::is_sealed(memory)),
        file_system => Ok(file_system == SYSFS_MAGIC),
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
mod tests {
    use super::*;
    use crate::rendezvous::address::Opener;
    use crate::rendezvous::directory::tests::Scratch;
    use crate::rendezvous::{Accepted, accept, connect_in, listen_in, receive_handshake, unix_stream};
    use fabric::device::Caching;
    use fabric::timed::LinkTiming;
    use proptest::prelude::*;
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType};
    use std::os::fd::AsRawFd;
    use std::thread::JoinHandle;

    const SERVER: &str = "127.77.0.2:6379";

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn segment_in(memory: BorrowedFd<'_>, spans: WindowSpans, side: Side, secrets: Secrets) -> Result<Segment, Errno> {
        open_spans(memory, spans, side, secrets).map(|(segment, _page)| segment)
    }

    fn request() -> ConnectRequest {
        let node = Some(IpAddr::from([127, 77, 0, 1]));
        ConnectRequest { destination: address(SERVER), source: None, node, opener: Opener::Program }
    }

    fn node(scratch: &Scratch) -> Arc<Rack> {
        Arc::new(scratch.rack())
    }

    fn connect_to(rack: &Arc<Rack>) -> Result<Connected, FallbackReason> {
        connect_as(rack, &request())
    }

    fn connect_as(rack: &Arc<Rack>, request: &ConnectRequest) -> Result<Connected, FallbackReason> {
        let mut progress = connect(Arc::clone(rack), request, unix_stream().unwrap()).map_err(|none| none.reason)?;
        loop {
            progress = match progress {
                ConnectProgress::Connected(connected) => return Ok(*connected),
                ConnectProgress::Pending(pending) => pending.advance()?,
                ConnectProgress::LifelineConnected { .. } | ConnectProgress::TupleInUse => panic!("no proxy"),
            };
            std::thread::yield_now();
        }
    }

    fn begin(rack: &Arc<Rack>) -> RemoteConnect {
        match connect(Arc::clone(rack), &request(), unix_stream().unwrap()).unwrap() {
            ConnectProgress::Pending(pending) => pending,
            other => panic!("{other:?}"),
        }
    }

    /// A monitor that answers nobody.
    fn deaf_monitor(rack: &Rack, backlog: i32) -> OwnedFd {
        let path = rack.path().join("../..").join(monitor::SOCKET_NAME);
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&socket, backlog).unwrap();
        socket
    }

    /// A monitor that answers one question, after `before`.
    fn monitor(rack: &Rack, answer: ListenerResponse, before: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
        let socket = deaf_monitor(rack, 1);
        std::thread::spawn(move || {
            let asker = rustix::net::accept(&socket).unwrap();
            let mut packet = [0; monitor::PACKET_BYTES_MAX];
            let (length, _) = rustix::net::recv(&asker, &mut packet, RecvFlags::empty()).unwrap();
            assert_eq!(monitor::decode_query(&packet[..length]), Some(address(SERVER)));
            before();
            rustix::net::send(&asker, answer.encode().as_bytes(), SendFlags::NOSIGNAL).unwrap();
        })
    }

    /// A proxy that takes one connection and replies.
    fn proxy(listener: LaneListener, reply: ProxyReply, memory: Option<OwnedFd>) -> JoinHandle<(OwnedFd, Segment)> {
        std::thread::spawn(move || {
            let (accepted, segment) = take(&listener, reply, memory);
            (accepted.lifeline, segment)
        })
    }

    fn take(listener: &LaneListener, reply: ProxyReply, memory: Option<OwnedFd>) -> (Accepted, Segment) {
        let accepted = loop {
            match accept(listener.fd(), &listener.key(), libc::SOCK_CLOEXEC) {
                Err(Errno::AGAIN) => std::thread::yield_now(),
                accepted => break accepted.unwrap(),
            }
        };
        let from = accepted.tuple.peer.ip().to_string();
        assert_eq!((from.as_str(), accepted.opener), ("127.77.0.1", Opener::Program));
        let segment = loop {
            if let Some((segment, _memfd)) = receive_handshake(accepted.lifeline.as_fd()).unwrap() {
                break segment;
            }
        };
        send_reply(accepted.lifeline.as_fd(), reply, memory.as_ref().map(OwnedFd::as_fd)).unwrap();
        (accepted, segment)
    }

    #[test]
    fn a_listener_that_is_new_here_is_asked_for_and_a_known_one_is_not() {
        let _no_child = test_support::spawn::forbid();
        let scratch = Scratch::new();
        let rack = node(&scratch);
        let proxy_rack = Arc::clone(&rack);
        let ready = ListenerResponse::Ready { node: "127.77.0.1".parse().unwrap() };
        let (made, listener) = std::sync::mpsc::channel();
        let listen = move || made.send(listen_for_remote(&proxy_rack, address(SERVER), 1).unwrap()).unwrap();
        let monitor = monitor(&rack, ready, listen);
        let taking =
            std::thread::spawn(move || proxy(listener.recv().unwrap(), ProxyReply::Accepted(None), None).join());
        let connected = connect_to(&rack).unwrap();
        assert!(connected.is_remote && connected.memory.is_some() && is_connected_to_proxy(connected.lifeline.as_fd()));
        monitor.join().unwrap();
        let (_lifeline, segment) = taking.join().unwrap().unwrap();
        assert_eq!(segment.secrets(), connected.segment.secrets());

        let listener = listen_for_remote(&rack, address(SERVER), 1).unwrap();
        assert_eq!(listen_for_remote(&rack, address(SERVER), 1).unwrap_err(), Errno::ADDRINUSE);
        let taking = proxy(listener, ProxyReply::Accepted(None), None);
        connect_to(&rack).unwrap();
        taking.join().unwrap();
    }

    #[test]
    fn a_name_behind_which_nobody_listens_yet_is_asked_for() {
        let _no_child = test_support::spawn::forbid();
        let scratch = Scratch::new();
        let rack = node(&scratch);
        let name = ListenerName::remote(address(SERVER));
        let early = unix_stream().unwrap();
        rack.lock(name.address).unwrap().bind(early.as_fd(), &name).unwrap();
        assert_eq!(rack.is_live(&name), Ok(true));
        let proxy_rack = Arc::clone(&rack);
        let (made, listener) = std::sync::mpsc::channel();
        let listen = move || {
            drop(early);
            made.send(listen_for_remote(&proxy_rack, address(SERVER), 1).unwrap()).unwrap();
        };
        let monitor = monitor(&rack, ListenerResponse::Ready { node: "127.77.0.1".parse().unwrap() }, listen);
        let taking =
            std::thread::spawn(move || proxy(listener.recv().unwrap(), ProxyReply::Accepted(None), None).join());
        assert!(connect_to(&rack).unwrap().is_remote);
        monitor.join().unwrap();
        taking.join().unwrap().unwrap();
    }

    #[test]
    fn what_stands_against_a_connection_is_said() {
        let _no_child = test_support::spawn::forbid();
        let scratch = Scratch::new();
        let rack = node(&scratch);
        let monitor = monitor(&rack, ListenerResponse::Unavailable(FallbackReason::PeerRefused), || ());
        assert_eq!(connect_to(&rack).unwrap_err(), FallbackReason::PeerRefused);
        monitor.join().unwrap();
        for (errno, reason) in [
            (Errno::CONNREFUSED, FallbackReason::NoListener),
            (Errno::AGAIN, FallbackReason::BacklogFull),
            (Errno::NETUNREACH, FallbackReason::LinkDown),
            (Errno::IO, FallbackReason::HandshakeFailed),
        ] {
            let taking = proxy(listen_for_remote(&rack, address(SERVER), 1).unwrap(), ProxyReply::Refused(errno), None);
            assert_eq!(connect_to(&rack).unwrap_err(), reason);
            taking.join().unwrap();
        }
    }

    #[test]
    fn another_port_is_tried_while_the_other_node_has_a_connection_of_the_one_before() {
        let _no_child = test_support::spawn::forbid();
        let scratch = Scratch::new();
        let rack = node(&scratch);
        let listener = listen_for_remote(&rack, address(SERVER), 1).unwrap();
        let in_use = ProxyReply::Refused(Errno::ADDRINUSE);
        let taking = std::thread::spawn(move || {
            let first = take(&listener, in_use, None).0.tuple;
            let second = take(&listener, ProxyReply::Accepted(None), None).0.tuple;
            (0..=PORT_TRIES_MAX).for_each(|_| drop(take(&listener, in_use, None)));
            take(&listener, in_use, None);
            [first, second]
        });
        let connected = connect_to(&rack).unwrap();
        assert_eq!(connect_to(&rack).unwrap_err(), FallbackReason::PortInUse);
        // A program that has named its port has no other.
        let source = Some(SocketAddr::from(([127, 77, 0, 1], crate::rendezvous::tests::own_port())));
        let named = ConnectRequest { source, ..request() };
        assert_eq!(connect_as(&rack, &named).unwrap_err(), FallbackReason::PortInUse);
        let [first, second] = taking.join().unwrap().map(|tuple| tuple.reversed());
        assert_ne!(first, second);
        assert_eq!(connected.tuple, second);
    }

    #[test]
    fn a_connection_under_way_waits_for_nobody_keeps_out_of_sight_and_ends_at_its_deadline() {
        let _no_child = test_support::spawn::forbid();
        let scratch = Scratch::new();
        let rack = node(&scratch);
        let _deaf_monitor = deaf_monitor(&rack, 8);
        let ends_with = |reason| {
            let (pending, deadline_ns) = (begin(&rack), now_ns() + REPLY_WAIT_NS);
            assert!(crate::descriptor::hidden::is_hidden(pending.wait_target().0.unwrap().as_raw_fd()));
            assert!(pending.wait_target().1 <= deadline_ns);
            let ConnectProgress::Pending(mut pending) = pending.advance().unwrap() else { panic!("who has answered?") };
            pending.deadline_ns = now_ns();
            assert_eq!(pending.advance().unwrap_err(), reason);
        };
        ends_with(FallbackReason::LinkDown);
        let _deaf_proxy = listen_for_remote(&rack, address(SERVER), 8).unwrap();
        ends_with(FallbackReason::HandshakeFailed);
    }

    #[test]
    fn a_monitor_whom_too_many_ask_is_asked_once_there_is_room() {
        let _no_child = test_support::spawn::forbid();
        let scratch = Scratch::new();
        let rack = node(&scratch);
        let monitor = deaf_monitor(&rack, 0);
        let mut asking = Vec::new();
        while let Some(query) = monitor::send_query(&rack, address(SERVER)).unwrap() {
            asking.push(query);
        }
        let pending = begin(&rack);
        assert!(pending.wait_target().0.is_none());
        asking.iter().for_each(|_| drop(rustix::net::accept(&monitor).unwrap()));
        let ConnectProgress::Pending(pending) = pending.advance().unwrap() else { panic!("who has answered?") };
        assert!(pending.wait_target().0.is_some());
    }

    #[test]
    fn a_proxy_that_goes_without_a_word_is_no_connection() {
        let _no_child = test_support::spawn::forbid();
        let scratch = Scratch::new();
        let rack = node(&scratch);
        let listener = listen_for_remote(&rack, address(SERVER), 1).unwrap();
        let going = std::thread::spawn(move || {
            while let Err(Errno::AGAIN) = accept(listener.fd(), &listener.key(), libc::SOCK_CLOEXEC) {
                std::thread::yield_now();
            }
        });
        assert_eq!(connect_to(&rack).unwrap_err(), FallbackReason::HandshakeFailed);
        going.join().unwrap();
    }

    #[test]
    fn a_connection_moves_to_the_windows_that_the_reply_names() {
        let scratch = Scratch::new();
        let rack = node(&scratch);
        let span_bytes = Segment::WINDOW_BYTES as u64;
        let (memory, mapping) = shm::create(3 * Segment::WINDOW_BYTES).unwrap();
        let spans = WindowSpans::new(span_bytes, 2 * span_bytes);
        let listener = listen_for_remote(&rack, address(SERVER), 1).unwrap();
        let taking = proxy(listener, ProxyReply::Accepted(Some(spans)), Some(memory.try_clone().unwrap()));
        let connected = connect_to(&rack).unwrap();
        assert!(connected.memory.is_some() && connected.segment.is_in_windows());
        let secrets = taking.join().unwrap().1.secrets();
        let back = WindowSpans::new(spans.outbound_offset, spans.inbound_offset);
        let other = segment_in(memory.as_fd(), back, Side::Acceptor, secrets).unwrap();
        assert_eq!(connected.segment.sender().write(b"through the window"), Ok(18));
        let mut bytes = [0; 18];
        assert_eq!(other.receiver().read(&mut bytes), Ok(18));
        assert_eq!(&bytes, b"through the window");
        let first = Region::of_mapping(Arc::new(mapping)).sub(0, Segment::WINDOW_BYTES);
        assert!(
            (0..Segment::WINDOW_BYTES).step_by(8).all(|at| first.load_u64(at, volmem::sync::Ordering::Relaxed) == 0)
        );
    }

    /// Two pages for paces, and two spans.
    #[test]
    fn who_comes_to_hold_an_end_over_a_modelled_link_finds_the_model_in_its_span() {
        const SPAN_BYTES: u64 = Segment::TIMED_WINDOW_BYTES as u64;
        const FIRST: u64 = 2 * 4096;
        let (memory, _mapping) = shm::create((FIRST + 2 * SPAN_BYTES) as usize).unwrap();
        let timing = LinkTiming { one_way_ns: 100, bytes_per_us: 10_000, header_bytes: 24, payload_bytes_max: 256 };
        let secrets = Secrets { to_acceptor: 7, to_connector: 8 };
        let spans = |own: u64| WindowSpans {
            model: Some(LinkModel { timing, inbound_pace_offset: own * 4096, outbound_pace_offset: (1 - own) * 4096 }),
            ..WindowSpans::new(FIRST + own * SPAN_BYTES, FIRST + (1 - own) * SPAN_BYTES)
        };
        let open = |spans, side| segment_in(memory.as_fd(), spans, side, secrets);
        let one = open(spans(0), Side::Connector).unwrap();
        open(spans(1), Side::Acceptor).unwrap();
        let heir = adopt(span_lease::lease(memory.as_fd(), spans(1)).unwrap().as_fd()).unwrap();
        assert_eq!((heir.model(), heir.side(), heir.secrets()), (spans(1).model, Side::Acceptor, secrets));
        assert_eq!(one.timed_sender().unwrap().write(b"to the heir"), Ok(11));
        heir.wait_for_arrivals();
        let mut bytes = [0; 11];
        assert_eq!(heir.timed_receiver().unwrap().read(&mut bytes), Ok(11));
        assert_eq!(&bytes, b"to the heir");
        // One that is as fast as its memory is that, whatever a peer writes.
        let plain = WindowSpans { model: None, ..spans(1) };
        assert!(adopt(span_lease::lease(memory.as_fd(), plain).unwrap().as_fd()).unwrap().timed_sender().is_none());
        let beyond = |offset| {
            let model = spans(0).model.map(|model| LinkModel { inbound_pace_offset: offset, ..model });
            open(WindowSpans { model, ..spans(0) }, Side::Connector).map(|_| ()).unwrap_err()
        };
        assert_eq!([FIRST + 2 * SPAN_BYTES, 1, u64::MAX].map(beyond), [Errno::INVAL; 3]);
    }

    #[test]
    fn a_process_that_adopts_an_endpoint_with_a_local_page_continues_where_it_was() {
        let (memory, _mapping) = shm::create(3 * Segment::WINDOW_BYTES).unwrap();
        let span_bytes = Segment::WINDOW_BYTES as u64;
        let secrets = Secrets { to_acceptor: 9, to_connector: 10 };
        for caching in [Caching::Uncached, Caching::WriteCombined, Caching::NonCoherent] {
            let spans = WindowSpans { caching, ..WindowSpans::new(0, span_bytes) };
            let back = WindowSpans { caching, ..WindowSpans::new(span_bytes, 0) };
            let lease = span_lease::lease(memory.as_fd(), spans).unwrap();
            let (one, fds) = open_in_windows(lease, spans, Side::Connector, secrets).unwrap();
            let device = fds.device.as_ref().unwrap().try_clone().unwrap();
            let other = segment_in(memory.as_fd(), back, Side::Acceptor, secrets).unwrap();
            assert_eq!(one.local_page_sender().unwrap().write(b"first "), Ok(6));
            let heir = adopt_on_device(&fds.memfd, device.as_fd()).unwrap();
            assert_eq!((heir.side(), heir.secrets(), heir.is_adopted()), (Side::Connector, secrets, true));
            assert_eq!(heir.local_page_sender().unwrap().write(b"second"), Ok(6));
            let mut bytes = [0; 12];
            assert_eq!(other.local_page_receiver().unwrap().read(&mut bytes), Ok(12));
            assert_eq!(&bytes, b"first second");
            // Memory that it is not about, and a local page that nobody has set up.
            let (stranger, _mapping) = shm::create(3 * Segment::WINDOW_BYTES).unwrap();
            assert_eq!(adopt_on_device(&fds.memfd, stranger.as_fd()).unwrap_err(), Errno::INVAL);
            let (empty, _region) = local_page::create(spans, memory.as_fd()).unwrap();
            assert_eq!(adopt_on_device(&empty, memory.as_fd()).unwrap_err(), Errno::NOTCONN);
            drop((one, other, heir, fds, device));
            assert!(!span_lease::is_leased(memory.as_fd(), spans).unwrap());
        }
    }

    #[test]
    fn a_server_gets_its_place_in_the_windows_with_the_handshake() {
        let _no_child = test_support::spawn::forbid();
        let scratch = Scratch::new();
        let rack = node(&scratch);
        let (memory, _mapping) = shm::create(2 * Segment::WINDOW_BYTES).unwrap();
        let (own, other) = (0, Segment::WINDOW_BYTES as u64);
        let spans = WindowSpans::new(own, other);
        let secrets = Secrets { to_acceptor: 5, to_connector: 6 };
        // Other runs of this test may be on the machine.
        let source = SocketAddr::from(([127, 77, 0, 1], crate::rendezvous::tests::own_port()));
        let request = ConnectRequest { source: Some(source), node: None, opener: Opener::Proxy, ..request() };
        let connect = || {
            let lease = span_lease::lease(memory.as_fd(), spans).unwrap();
            connect_in_windows(&rack, &request, (spans, secrets), lease.as_fd())
        };
        assert_eq!(connect().unwrap_err().reason, FallbackReason::NoListener);
        assert!(!span_lease::is_leased(memory.as_fd(), spans).unwrap());
        let server = listen_in(&rack, address(SERVER), false, false, 1).unwrap();
        let _lifeline = connect().unwrap();
        let accepted = accept(server.fd(), &server.key(), libc::SOCK_CLOEXEC).unwrap();
        assert_eq!(accepted.tuple.peer, source);
        let (segment, memfd) = receive_handshake(accepted.lifeline.as_fd()).unwrap().unwrap();
        drop(memfd);
        assert_eq!((segment.is_in_windows(), segment.secrets()), (true, secrets));
        assert!(span_lease::is_leased(memory.as_fd(), spans).unwrap(), "as long as the server has it mapped");
        drop(segment);
        assert!(!span_lease::is_leased(memory.as_fd(), spans).unwrap());
    }

    #[test]
    fn memory_that_could_be_cut_off_and_places_outside_it_are_refused() {
        let span_bytes = Segment::WINDOW_BYTES as u64;
        let secrets = Secrets { to_acceptor: 1, to_connector: 2 };
        let (memory, _mapping) = shm::create(2 * Segment::WINDOW_BYTES).unwrap();
        let open = |memory: BorrowedFd<'_>, inbound_offset, outbound_offset| {
            segment_in(memory, WindowSpans::new(inbound_offset, outbound_offset), Side::Acceptor, secrets).map(|_| ())
        };
        assert_eq!(open(memory.as_fd(), 0, span_bytes), Ok(()));
        for (inbound, outbound) in
            [(0, 0), (0, span_bytes + 4096), (1, span_bytes), (0, 4096), (u64::MAX - 4095, 0), (1 << 63, 0)]
        {
            assert_eq!(open(memory.as_fd(), inbound, outbound), Err(Errno::INVAL), "{inbound:#x} {outbound:#x}");
        }
        let scratch = Scratch::new();
        let file = std::fs::File::create_new(scratch.0.join("file")).unwrap();
        file.set_len(2 * span_bytes).unwrap();
        assert_eq!(open(file.as_fd(), 0, span_bytes), Err(Errno::PERM));
    }

    /// As of a DAX device, which maps nothing less: spans at any page, one of them across a multiple.
    #[test]
    fn spans_of_memory_that_is_mapped_by_larger_pieces_are_the_same_memory() {
        const PIECE_BYTES: u64 = 1 << 20;
        let span_bytes = Segment::WINDOW_BYTES as u64;
        let secrets = Secrets { to_acceptor: 1, to_connector: 2 };
        let (memory, _mapping) = shm::create(3 * PIECE_BYTES as usize).unwrap();
        let spans = WindowSpans::new(4096, 2 * PIECE_BYTES - span_bytes / 2 / 4096 * 4096);
        let back = WindowSpans::new(spans.outbound_offset, spans.inbound_offset);
        let by_pieces = WindowSpans { alignment: Alignment::new(PIECE_BYTES), ..spans };
        let connector = segment_in(memory.as_fd(), by_pieces, Side::Connector, secrets).unwrap();
        let acceptor = segment_in(memory.as_fd(), back, Side::Acceptor, secrets).unwrap();
        for (from, to) in [(&connector, &acceptor), (&acceptor, &connector)] {
            assert_eq!(from.sender().write(b"in its spans"), Ok(12));
            let mut bytes = [0; 12];
            assert_eq!((to.receiver().read(&mut bytes), &bytes), (Ok(12), b"in its spans"));
        }
        let between_pages = WindowSpans { inbound_offset: 8, ..by_pieces };
        assert_eq!(try_map_spans(memory.as_fd(), between_pages), Err(Errno::INVAL));
        assert_eq!(try_map_spans(memory.as_fd(), by_pieces), Ok(()));
    }

    #[test]
    fn a_program_that_cannot_map_its_span_says_so() {
        let scratch = Scratch::new();
        let rack = node(&scratch);
        let span_bytes = Segment::WINDOW_BYTES as u64;
        let (memory, _mapping) = shm::create(2 * Segment::WINDOW_BYTES).unwrap();
        let beyond = ProxyReply::Accepted(Some(WindowSpans::new(0, 2 * span_bytes)));
        let taking = proxy(listen_for_remote(&rack, address(SERVER), 1).unwrap(), beyond, Some(memory));
        assert_eq!(connect_to(&rack).unwrap_err(), FallbackReason::WindowUnmapped);
        taking.join().unwrap();
    }

    #[test]
    fn a_proxy_connects_with_the_far_programs_addresses_though_that_program_is_on_this_machine() {
        let (here, there) = (Scratch::new(), Scratch::new());
        let (rack, remote_rack) = (node(&here), node(&there));
        let taking = proxy(listen_for_remote(&rack, address(SERVER), 1).unwrap(), ProxyReply::Accepted(None), None);
        let program = connect_to(&rack).unwrap();
        taking.join().unwrap();
        let server = listen_in(&remote_rack, address(SERVER), false, false, 1).unwrap();
        let source = Some(program.tuple.local);
        let onward =
            connect_in(&remote_rack, &ConnectRequest { source, node: None, opener: Opener::Proxy, ..request() })
                .unwrap();
        let accepted = accept(server.fd(), &server.key(), libc::SOCK_CLOEXEC).unwrap();
        assert_eq!((accepted.tuple.peer, accepted.opener), (program.tuple.local, Opener::Proxy));
        assert_eq!(onward.tuple, program.tuple);
    }

    #[test]
    fn only_addresses_of_other_nodes_and_machines_may_be_far() {
        let may_be = |destination: &str, node| {
            let request = ConnectRequest { destination: address(destination), node, ..request() };
            request.may_be_remote(&request.route())
        };
        let node = request().node;
        for (destination, expected) in
            [("127.77.0.2:1", true), ("127.77.0.1:1", false), ("127.0.0.1:1", false), ("198.51.100.7:1", true)]
        {
            assert_eq!(may_be(destination, node), expected, "{destination}");
            assert!(!may_be(destination, None), "{destination}");
        }
    }

    proptest! {
        #[test]
        fn other_bytes_are_not_replies(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
            prop_assert_eq!(ProxyReply::decode(&bytes), None);
        }

        #[test]
        fn replies_survive_encoding(inbound_offset: u64, outbound_offset: u64, errno in 1..4096_i32) {
            let spans = WindowSpans::new(inbound_offset, outbound_offset);
            let aligned = WindowSpans { alignment: Alignment::new(1 << 30), ..spans };
            let refused = ProxyReply::Refused(Errno::from_raw_os_error(errno));
            let accepted = [None, Some(spans), Some(aligned)].map(ProxyReply::Accepted);
            for reply in accepted.into_iter().chain([refused]) {
                prop_assert_eq!(ProxyReply::decode(&reply.encode()), Some(reply));
            }
        }
    }
}
