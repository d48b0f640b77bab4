//! The state machine of a session with another node, without I/O: it receives the time and packets, and returns packets
//! and events.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use ::control::SilenceTimer;
use router::NodeId;

use super::announcements::Announcements;
use super::message::{
    ControlError, Hello, KeptRoutes, Message, RouteChange, SETUP_BYTES_MAX, UPDATE_ROUTES_MAX, VERSION,
};

/// Maximum number of interconnect setup messages that wait to be sent.
const SETUPS_QUEUED_MAX: usize = 64;
/// Maximum time until the hello of a new connection, in nanoseconds: the peer may have to wait for a CPU.
const HELLO_WAIT_NS_MAX: u64 = 1_000_000_000;

/// The keepalive interval and the hold time.
#[derive(Clone, Copy, Debug)]
pub struct SessionTimers {
    /// Nanoseconds between two keepalives.
    pub keepalive_ns: u64,
    /// Nanoseconds of silence after which the peer counts as dead.
    pub hold_ns: u64,
}

/// What a received packet contained.
#[derive(Debug, PartialEq, Eq)]
pub enum SessionEvent {
    /// The peer identified itself.
    Hello {
        /// The peer.
        node: NodeId,
        /// Identifies the run of the peer.
        incarnation: u64,
    },
    /// A keepalive.
    Keepalive,
    /// The MTU of each port of the peer; 0 for a port that is down.
    PortMtus(Vec<u16>),
    /// The updates that follow begin with the peer's first route, or continue what was kept of an earlier session.
    RoutesBegin {
        /// Whether what was kept is used.
        is_continued: bool,
    },
    /// Changes of the peer's routes.
    RouteUpdate(Vec<RouteChange>),
    /// A message of the peer's interconnect.
    InterconnectSetup(Vec<u8>),
}

/// A packet to send, with its descriptors.
#[derive(Debug)]
pub struct OutgoingPacket {
    /// The encoded message.
    pub bytes: Vec<u8>,
    /// Descriptors of the interconnect.
    pub descriptors: Vec<OwnedFd>,
}

/// A session with another node.
#[derive(Debug)]
pub struct Session {
    own: Hello,
    timers: SessionTimers,
    /// The peer. The connecting node knows it from the beginning.
    peer: Option<NodeId>,
    /// Maximum number of ports of each node: their number may change while the node is up.
    ports: Vec<usize>,
    hello_sent: bool,
    hello_received: bool,
    silence: SilenceTimer,
    sent_at_ns: u64,
    /// Number of the last change of this node's routes that was sent.
    advertised: u64,
    /// Number of the last change of this node's MTUs that was sent.
    mtus_advertised: u64,
    /// Whether the peer knows after which change its updates begin.
    has_begun_routes: bool,
    /// The run of the peer, once its hello was received.
    incarnation: u64,
    /// What the peer has kept of this node's routes.
    kept_by_peer: Option<KeptRoutes>,
    /// What this node has of the peer's routes; before their beginning, what it has kept.
    received: Option<KeptRoutes>,
    has_received_begin: bool,
    setup_queue: VecDeque<OutgoingPacket>,
}

impl Session {
    /// Returns the session of a new connection. `ports` has the maximum number of ports of each node. `peer` is the
    /// node that this one has connected to, or `None` for an accepted connection.
    pub fn new(own: Hello, peer: Option<NodeId>, ports: Vec<usize>, timers: SessionTimers, now_ns: u64) -> Self {
        Self {
            own,
            timers,
            peer,
            ports,
            hello_sent: false,
            hello_received: false,
            silence: SilenceTimer::new(HELLO_WAIT_NS_MAX, now_ns),
            sent_at_ns: now_ns,
            advertised: 0,
            mtus_advertised: 0,
            has_begun_routes: false,
            incarnation: 0,
            kept_by_peer: None,
            received: None,
            has_received_begin: false,
            setup_queue: VecDeque::new(),
        }
    }

    /// Sets what this node has kept of the peer's routes, before its hello is sent.
    pub fn set_kept(&mut self, kept: Option<KeptRoutes>) {
        self.received = kept;
    }

    /// Returns what this node has of the peer's routes, and may keep when the session ends.
    pub fn received(&self) -> Option<KeptRoutes> {
        self.received
    }

    /// Returns the peer once its hello was received.
    pub fn peer(&self) -> Option<NodeId> {
        self.peer.filter(|_| self.hello_received)
    }

    /// Returns the number of the last change of this node's routes that was sent.
    pub fn advertised(&self) -> u64 {
        self.advertised
    }

    /// Processes a received packet.
    ///
    /// # Errors
    /// Returns why the session has to end: the packet is invalid, or ends the session.
    pub fn receive(&mut self, now_ns: u64, packet: &[u8]) -> Result<SessionEvent, ControlError> {
        let message = Message::decode(packet)?;
        self.silence.heard(now_ns);
        match message {
            Message::Hello(hello) => self.receive_hello(hello, now_ns),
            Message::Cease(reason) => Err(ControlError::Ceased(reason)),
            _ if !self.hello_received => Err(ControlError::UnexpectedMessage("a message before the hello")),
            Message::Keepalive => Ok(SessionEvent::Keepalive),
            Message::InterconnectSetup(bytes) => Ok(SessionEvent::InterconnectSetup(bytes)),
            Message::PortMtus(mtus_bytes) => self.receive_port_mtus(mtus_bytes),
            Message::RoutesBegin(change) => self.receive_begin(change),
            Message::RouteUpdate(changes, change) => self.receive_routes(changes, change),
        }
    }

    fn receive_hello(&mut self, hello: Hello, now_ns: u64) -> Result<SessionEvent, ControlError> {
        if self.hello_received {
            return Err(ControlError::UnexpectedMessage("a second hello"));
        }
        if hello.digest != self.own.digest {
            return Err(ControlError::ConfigMismatch);
        }
        let node = NodeId(hello.node);
        // The node with the lower number accepts.
        let is_expected = match self.peer {
            Some(peer) => node == peer,
            None => hello.node > self.own.node && usize::from(hello.node) < self.ports.len(),
        };
        if !is_expected {
            let expected = self.peer.map_or_else(|| format!("above {}", self.own.node), |peer| peer.0.to_string());
            return Err(ControlError::UnexpectedNode { found: hello.node, expected });
        }
        (self.peer, self.hello_received) = (Some(node), true);
        self.kept_by_peer = hello.kept;
        self.incarnation = hello.incarnation;
        self.silence = SilenceTimer::new(self.timers.hold_ns, now_ns);
        Ok(SessionEvent::Hello { node, incarnation: hello.incarnation })
    }

    /// Returns the maximum number of ports of the peer.
    fn peer_ports_max(&self) -> usize {
        self.peer.and_then(|peer| self.ports.get(usize::from(peer.0))).copied().unwrap_or(0)
    }

    fn receive_port_mtus(&mut self, mtus_bytes: Vec<u16>) -> Result<SessionEvent, ControlError> {
        let (found, expected) = (mtus_bytes.len(), self.peer_ports_max());
        if found <= expected {
            return Ok(SessionEvent::PortMtus(mtus_bytes));
        }
        Err(ControlError::Malformed(format!("{found} ports of a node with at most {expected}")))
    }

    fn receive_begin(&mut self, change: u64) -> Result<SessionEvent, ControlError> {
        if std::mem::replace(&mut self.has_received_begin, true) {
            return Err(ControlError::UnexpectedMessage("a second beginning of the routes"));
        }
        let begin = KeptRoutes { incarnation: self.incarnation, change };
        let is_continued = change > 0;
        if is_continued && self.received != Some(begin) {
            return Err(ControlError::UnexpectedMessage("routes that continue what was not kept"));
        }
        self.received = Some(begin);
        Ok(SessionEvent::RoutesBegin { is_continued })
    }

    fn receive_routes(&mut self, changes: Vec<RouteChange>, change: u64) -> Result<SessionEvent, ControlError> {
        let Some(received) = self.received.as_mut().filter(|_| self.has_received_begin) else {
            return Err(ControlError::UnexpectedMessage("routes before their beginning"));
        };
        if change <= received.change {
            return Err(ControlError::Malformed(format!("change {change} after change {}", received.change)));
        }
        received.change = change;
        let ports = self.peer_ports_max();
        changes.iter().try_for_each(|change| change.check(ports))?;
        Ok(SessionEvent::RouteUpdate(changes))
    }

    /// Queues a message of this node's interconnect to the peer's. Returns whether there was room for it.
    #[must_use]
    pub fn queue_setup(&mut self, bytes: Vec<u8>, descriptors: Vec<OwnedFd>) -> bool {
        assert!(bytes.len() <= SETUP_BYTES_MAX, "{} bytes of interconnect setup", bytes.len());
        let is_queued = self.setup_queue.len() < SETUPS_QUEUED_MAX;
        if is_queued {
            self.setup_queue
                .push_back(OutgoingPacket { bytes: Message::InterconnectSetup(bytes).encode(), descriptors });
        }
        is_queued
    }

    /// Returns the next packet to send, if any is due: hello, interconnect setup, route update, or keepalive. The node
    /// that has accepted the connection sends its hello second, as it says what it has kept of the peer's routes.
    pub fn next_packet(&mut self, now_ns: u64, own: &Announcements) -> Option<OutgoingPacket> {
        let setup = if self.hello_sent && self.hello_received { self.setup_queue.pop_front() } else { None };
        let packet = match setup {
            Some(packet) => packet,
            None => OutgoingPacket { bytes: self.next_message(now_ns, own)?.encode(), descriptors: Vec::new() },
        };
        self.sent_at_ns = now_ns;
        Some(packet)
    }

    fn next_message(&mut self, now_ns: u64, own: &Announcements) -> Option<Message> {
        if !self.hello_sent && self.peer.is_some() {
            self.hello_sent = true;
            return Some(Message::Hello(Hello { version: VERSION, kept: self.received, ..self.own }));
        }
        if !self.hello_received {
            return None;
        }
        let (mtus_bytes, change) = own.mtus_bytes();
        if self.mtus_advertised < change {
            self.mtus_advertised = change;
            return Some(Message::PortMtus(mtus_bytes.to_vec()));
        }
        if !self.has_begun_routes {
            let is_usable =
                |kept: &KeptRoutes| kept.incarnation == self.own.incarnation && own.continues_after(kept.change);
            self.has_begun_routes = true;
            self.advertised = self.kept_by_peer.filter(is_usable).map_or(0, |kept| kept.change);
            return Some(Message::RoutesBegin(self.advertised));
        }
        if self.advertised < own.latest() {
            let (changes, advertised) = own.changes_after(self.advertised, UPDATE_ROUTES_MAX);
            self.advertised = advertised;
            return Some(Message::RouteUpdate(changes, advertised));
        }
        (now_ns >= self.sent_at_ns + self.timers.keepalive_ns).then_some(Message::Keepalive)
    }

    /// Returns the packet that ends the session.
    pub fn cease(reason: &str) -> Vec<u8> {
        Message::cease(reason).encode()
    }

    /// Returns when [`Session::next_packet`] or [`Session::check_hold_timer`] has to be called though no packet
    /// arrives.
    pub fn next_timer_ns(&self) -> u64 {
        let silence_ns = self.silence.due_ns();
        if self.hello_received { silence_ns.min(self.sent_at_ns + self.timers.keepalive_ns) } else { silence_ns }
    }

    /// Checks the hold timer.
    ///
    /// # Errors
    /// Returns an error when it has expired.
    pub fn check_hold_timer(&mut self, now_ns: u64) -> Result<(), ControlError> {
        match self.silence.expired(now_ns) {
            None => Ok(()),
            Some(silent_ns) => Err(ControlError::HoldTimerExpired(silent_ns / 1_000_000)),
        }
    }
}

#[cfg(test)]
mod tests;
