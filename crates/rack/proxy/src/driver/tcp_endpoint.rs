//! The proxy's endpoint of a kernel TCP connection with a program, which stands in for the program of the other node.
//!
//! With `trust = "direct"` it may have a span of the windows, which its program gets when the two meet. Once the
//! program uses it, the monitor keeps duplicates of the two descriptors, so that the connection outlives this proxy.

use super::epoll_set::EpollSet;
use super::open_payload::Secrets;
use super::shared::Shared;
use super::source_ports::SourcePort;
use super::span_pool::{SpanAcceptance, SpanGrant, SpanProposal};
use crate::frame::{Carried, ConnectionNumber};
use crate::local::{Broken, Input, LocalEndpoint};
use crate::table::ConnectionKey;
use control::proxy::{RetainedConnection, RetainedDescriptors};
use fabric::{Inbound, Outbound};
use lane::Draft;
use meeting::{Memory, Role, Tuple, Window};
use rustix::io::Errno;
use segment::SPAN_BYTES;
use segment::window::WindowSpans;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use stream::connection::{Relay, RelayInput, WindowOffer};
use stream::remote::{TableWriter, Verdict};

/// Where the descriptors of an endpoint are watched.
#[derive(Debug)]
struct Watch {
    epoll: EpollSet,
    engine: usize,
    key: ConnectionKey,
    /// The descriptor besides the socket that is watched now.
    meeting_fd: Option<RawFd>,
}

/// A program that has connected to a remote listener, and waits for the answer of the other node.
#[derive(Debug)]
struct Client {
    destination: SocketAddr,
    cookie: u64,
    table: Arc<TableWriter>,
    awaits_verdict: bool,
}

/// The proxy's endpoint of a connection. If the proxy dies, the kernel resets it, unless the monitor has retained it.
#[derive(Debug)]
pub(super) struct TcpEndpoint {
    /// `None` once it was closed.
    relay: Option<Box<Relay>>,
    client: Option<Client>,
    /// The ports of the client and of the server, as the programs see them.
    ports: [u16; 2],
    span: Span,
    /// The port from which the proxy has connected, held until the end.
    _source_port: Option<SourcePort>,
    watch: Option<Watch>,
    has_reported_end: bool,
    has_reported_close: bool,
}

/// The span of an endpoint.
#[derive(Debug)]
enum Span {
    None,
    /// Proposed to the other proxy, which has not answered.
    Proposed(Box<SpanProposal>, Secrets),
    /// Accepted by both proxies, until the connection is over at this node.
    Granted(Granted),
}

/// A span that a connection has.
#[derive(Debug)]
struct Granted {
    grant: SpanGrant,
    /// The number by which both proxies know the connection, once it is open.
    number: Option<ConnectionNumber>,
    is_attached: bool,
}

impl Granted {
    fn retained(&self, ports: [u16; 2]) -> Option<RetainedConnection> {
        let number = self.number?.0;
        Some(RetainedConnection { peer: self.grant.peer(), span: self.grant.index(), number, ports })
    }
}

impl TcpEndpoint {
    /// Sets the span that is proposed to the other proxy.
    pub(super) fn proposing(mut self, proposal: Option<SpanProposal>, secrets: Secrets) -> Self {
        if let (Some(proposal), Some(relay)) = (proposal, &mut self.relay) {
            relay.await_window();
            self.span = Span::Proposed(Box::new(proposal), secrets);
        }
        self
    }

    /// Sets the span that was accepted for the other proxy.
    pub(super) fn with_span(mut self, accepted: Option<(SpanAcceptance, Secrets)>) -> Self {
        if let Some((SpanAcceptance { grant, spans, lease }, secrets)) = accepted {
            let secrets = [secrets.to_acceptor, secrets.to_connector];
            self.give(grant, spans, lease, secrets);
        }
        self
    }

    fn take_proposal(&mut self) -> Option<(Box<SpanProposal>, Secrets)> {
        match std::mem::replace(&mut self.span, Span::None) {
            Span::Proposed(proposal, secrets) => Some((proposal, secrets)),
            other => {
                self.span = other;
                None
            }
        }
    }

    /// Lets the program have a span once it meets this end. The secrets are those of the lanes to it and from it.
    fn give(&mut self, grant: SpanGrant, spans: WindowSpans, descriptor: OwnedFd, secrets: [u64; 2]) {
        let Some(relay) = &mut self.relay else { return };
        let [secret, outgoing_secret] = secrets;
        let WindowSpans { inbound_offset, outbound_offset, .. } = spans;
        let window = Some(Window { kind: spans.kind(), inbound_offset, outbound_offset, outgoing_secret });
        let memory = Memory { window, ..Memory::own(SPAN_BYTES as u64, secret) };
        relay.offer_window(Some(WindowOffer { descriptor, memory }));
        self.span = Span::Granted(Granted { grant, number: None, is_attached: false });
        // A program that has proposed before has just met this end.
        self.follow_meeting();
    }

    fn new(relay: Relay, ports: [u16; 2], client: Option<Client>, source_port: Option<SourcePort>) -> Self {
        Self {
            relay: Some(Box::new(relay)),
            client,
            ports,
            span: Span::None,
            _source_port: source_port,
            watch: None,
            has_reported_end: false,
            has_reported_close: false,
        }
    }

    /// Creates the endpoint of a program that has connected to a remote listener.
    pub(super) fn of_client(relay: Relay, tuple: Tuple, cookie: u64, table: Arc<TableWriter>) -> Self {
        let client = Client { destination: tuple.peer, cookie, table, awaits_verdict: true };
        Self::new(relay, [tuple.local.port(), tuple.peer.port()], Some(client), None)
    }

    /// Creates the endpoint of a server to which the proxy has connected from a port, for a connection with these ports
    /// of client and server.
    pub(super) fn of_server(relay: Relay, ports: [u16; 2], source_port: SourcePort) -> Self {
        Self::new(relay, ports, None, Some(source_port))
    }

    /// Continues a connection of an earlier proxy. Returns `None` if there is no such span, or another connection has
    /// it.
    pub(super) fn readopt(
        shared: &Shared,
        retained: RetainedConnection,
        descriptors: RetainedDescriptors,
    ) -> Option<Self> {
        let RetainedConnection { peer, number, ports, .. } = retained;
        let pool = shared.span_pool(peer).filter(|_| peer != shared.setup.own_slot)?;
        let number = ConnectionNumber(number);
        let is_opener = number.opener() == pool.own_side();
        let role = if is_opener { Role::Accepted } else { Role::Connected };
        let duplicates = descriptors.try_clone().ok()?;
        let port = port_of(descriptors.socket.as_fd())?;
        let grant = pool.grant_retained(retained, descriptors)?;
        if is_opener {
            shared.table.set_stands_for(port, peer, ports[1]);
        } else {
            shared.table.set_client(port, peer, ports[0], ports[1]);
        }
        let source_port = if is_opener { None } else { shared.source_ports.reserve(port) };
        let relay = Relay::resume(duplicates.socket, duplicates.bell, role, shared.meeting_key());
        let span = Span::Granted(Granted { grant, number: Some(number), is_attached: true });
        let mut endpoint = Self::new(relay, ports, None, source_port);
        endpoint.span = span;
        Some(endpoint)
    }

    /// Returns what the next monitor needs to retain the connection after this proxy's monitor has died.
    pub(super) fn into_retained(mut self) -> Option<(RetainedConnection, RetainedDescriptors)> {
        let Span::Granted(granted) = &self.span else { return None };
        let retained = granted.retained(self.ports)?;
        let (socket, bell) = self.relay.as_mut()?.duplicate()?;
        // Not reset: the duplicates continue it.
        drop(self.relay.take());
        Some((retained, RetainedDescriptors { socket, bell }))
    }

    /// Notes that the program has begun to use its span, and lets the connection outlive this proxy.
    fn note_attached(&mut self) {
        let (Span::Granted(granted), Some(relay)) = (&mut self.span, &mut self.relay) else { return };
        if granted.is_attached || !relay.is_attached() {
            return;
        }
        granted.is_attached = true;
        granted.grant.note_attached();
        if let (Some(retained), Some((socket, bell))) = (granted.retained(self.ports), relay.duplicate()) {
            granted.grant.deposit(retained, RetainedDescriptors { socket, bell });
        }
    }

    /// Returns the address to which the program has connected, if it opened the connection.
    pub(super) fn destination(&self) -> Option<SocketAddr> {
        self.client.as_ref().map(|client| client.destination)
    }

    /// Watches the descriptors for a connection of an engine.
    pub(super) fn watch(&mut self, epoll: &EpollSet, engine: usize, key: ConnectionKey) -> Result<(), Errno> {
        let relay = self.relay.as_ref().ok_or(Errno::BADF)?;
        match epoll.add_socket(relay.socket(), engine, key) {
            // It was watched while it was connecting.
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
        self.watch = Some(Watch { epoll: epoll.clone(), engine, key, meeting_fd: None });
        self.follow_meeting();
        Ok(())
    }

    /// Does not watch the descriptors any more.
    pub(super) fn unwatch(&mut self) {
        let (Some(watch), Some(relay)) = (self.watch.take(), &self.relay) else { return };
        watch.epoll.remove(relay.socket());
        _ = relay.meeting_descriptor().map(|descriptor| watch.epoll.remove(descriptor));
    }

    /// Watches the descriptor by which the ends meet, which changes until they have met.
    fn follow_meeting(&mut self) {
        let (Some(watch), Some(relay)) = (&mut self.watch, &self.relay) else { return };
        let descriptor = relay.meeting_descriptor();
        let number = descriptor.map(|descriptor| descriptor.as_raw_fd());
        if number != watch.meeting_fd {
            watch.meeting_fd = number;
            if let Some(descriptor) = descriptor {
                // The kernel forgets descriptors that are closed, and may know this one.
                let _ = watch.epoll.add_bell(descriptor, watch.engine, watch.key);
            }
        }
    }

    fn publish(&mut self, verdict: Verdict) {
        if let Some(client) = &mut self.client
            && std::mem::take(&mut client.awaits_verdict)
        {
            client.table.publish_verdict(client.cookie, verdict);
        }
    }

    /// Refuses the connection: the other node has no server.
    pub(super) fn refuse(mut self, errno: Errno) {
        self.publish(Verdict::Refused(errno));
        self.reset();
    }

    /// Calls `work` with the relay, and notes that the meeting may have proceeded.
    fn with<R>(&mut self, otherwise: R, work: impl FnOnce(&mut Relay) -> R) -> R {
        let Some(relay) = &mut self.relay else { return otherwise };
        let had_met = relay.has_met();
        let result = work(relay);
        if !had_met {
            self.follow_meeting();
        }
        result
    }
}

impl LocalEndpoint for TcpEndpoint {
    #[inline]
    fn may_have_input(&mut self) -> bool {
        let Some(relay) = &mut self.relay else { return false };
        relay.may_have_input() || (self.has_reported_end && !self.has_reported_close && relay.is_over())
    }

    fn input(&mut self) -> Input {
        let Some(relay) = &mut self.relay else { return Input::Broken };
        match relay.input() {
            RelayInput::Bytes(bytes) => Input::Bytes(bytes),
            RelayInput::Nothing => Input::Nothing,
            RelayInput::Broken => Input::Broken,
            RelayInput::End => {
                self.has_reported_end = true;
                self.has_reported_close = relay.is_over();
                if self.has_reported_close { Input::Closed } else { Input::Finished }
            }
        }
    }

    #[inline]
    fn copy_input<O: Outbound, I: Inbound>(&mut self, draft: &mut Draft<'_, O, I>, len_bytes: usize) {
        if let Some(relay) = &mut self.relay {
            relay.copy_input(draft, len_bytes);
        }
    }

    fn read_input(&mut self, skip_bytes: usize, destination: &mut [u8]) {
        if let Some(relay) = &mut self.relay {
            relay.read_input(skip_bytes, destination);
        }
    }

    #[inline]
    fn consume(&mut self, len_bytes: usize) -> Result<(), Broken> {
        self.relay.as_mut().ok_or(Broken)?.consume(len_bytes).map_err(|_| Broken)
    }

    #[inline]
    fn write_span<I: Inbound>(&mut self, bytes: &lane::Span<'_, I>) -> Result<usize, Broken> {
        self.with(Err(Broken), |relay| relay.write_span(bytes).map_err(|_| Broken))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        self.with(Err(Broken), |relay| relay.write(bytes).map_err(|_| Broken))
    }

    fn has_room(&mut self) -> bool {
        self.relay.as_mut().is_none_or(|relay| relay.has_room())
    }

    fn wake_sleeper(&mut self) -> bool {
        self.relay.as_mut().is_some_and(|relay| relay.wake_peer())
    }

    fn finish(&mut self) {
        self.with((), Relay::finish);
    }

    fn close(mut self) {
        if let Some(relay) = self.relay.take() {
            relay.close();
        }
    }

    fn reset(mut self) {
        self.publish(Verdict::Refused(Errno::NETUNREACH));
        if let Some(relay) = self.relay.take() {
            relay.reset();
        }
    }

    fn park(&mut self, for_room: bool) {
        self.with((), |relay| relay.park(for_room));
    }

    fn reclaim(&mut self) {
        if let Some(relay) = &mut self.relay {
            relay.reclaim();
        }
    }

    fn unpark(&mut self) {
        self.with((), Relay::unpark);
    }

    fn note_events(&mut self) {
        self.with((), Relay::note_events);
        self.note_attached();
    }

    fn begin_with_span(&mut self, number: ConnectionNumber) -> bool {
        if let Some((proposal, secrets)) = self.take_proposal() {
            let Some(SpanProposal { grant, spans, descriptor }) = proposal.marked_leased() else {
                self.with((), |relay| relay.offer_window(None));
                // The other program finds nothing in its span if this one has none.
                return true;
            };
            self.give(grant, spans, descriptor, [secrets.to_connector, secrets.to_acceptor]);
        }
        let Span::Granted(granted) = &mut self.span else { return false };
        granted.number = Some(number);
        true
    }

    fn take_ring(&mut self) -> bool {
        self.relay.as_mut().is_some_and(|relay| relay.take_ring())
    }

    fn take_left(&mut self) -> bool {
        self.relay.as_mut().is_some_and(|relay| relay.take_left())
    }

    fn peer_left(&mut self) {
        self.with((), Relay::hang_up);
    }

    fn wake(&mut self) {
        if let Some(relay) = &mut self.relay {
            relay.wake();
        }
    }

    fn may_outlive_link(&mut self) -> bool {
        matches!(&self.span, Span::Granted(granted) if granted.is_attached)
    }

    fn span_index(&self) -> u32 {
        if let Span::Granted(granted) = &self.span { granted.grant.index() } else { 0 }
    }

    fn carried(&mut self) -> Option<Carried> {
        let (taken, given) = self.relay.as_ref()?.carried()?;
        Some(Carried { taken, given })
    }

    fn is_broken(&mut self) -> bool {
        self.relay.as_ref().is_none_or(|relay| relay.is_broken())
    }

    fn opened(&mut self) {
        if let Some(proposal) = self.take_proposal() {
            proposal.0.refused();
            self.with((), |relay| relay.offer_window(None));
        }
        self.publish(Verdict::Accepted);
    }
}

/// An endpoint that an engine drops was closed in good order if it has said so.
impl Drop for TcpEndpoint {
    fn drop(&mut self) {
        match self.relay.take() {
            Some(relay) if self.has_reported_close => relay.close(),
            Some(relay) => relay.reset(),
            None => {}
        }
    }
}

/// Returns the port of a socket's own address.
fn port_of(socket: BorrowedFd<'_>) -> Option<u16> {
    SocketAddr::try_from(rustix::net::getsockname(socket).ok()?).ok().map(|address| address.port())
}
