//! One connection to another node, without I/O: time and packets are handed in, packets and news come out.

use std::collections::{BTreeSet, VecDeque};
use std::os::fd::OwnedFd;

use ipnet::IpNet;
use router::NodeId;

use super::announcements::Announcements;
use super::message::{ControlError, Hello, Message, RouteChange, SETUP_BYTES_MAX, UPDATE_ROUTES_MAX, VERSION};

/// Routes of one node at most: two full tables and some more.
const ROUTES_MAX: usize = 3 << 20;
/// What an interconnect wants packet and nobody has taken yet, at most.
const SETUPS_QUEUED_MAX: usize = 64;
/// How long a connection may take to receive_hello: its node may have to wait for a processor.
const HELLO_WAIT_NS_MAX: u64 = 1_000_000_000;

/// How often beats go out, and how long silence is borne.
#[derive(Clone, Copy, Debug)]
pub struct SessionTimers {
    /// Nanoseconds from one beat to the next.
    pub keepalive_ns: u64,
    /// Nanoseconds of silence after which the other node counts as dead.
    pub hold_ns: u64,
}

/// What a packet of another node has brought.
#[derive(Debug, PartialEq, Eq)]
pub enum SessionEvent {
    /// The other node's first word.
    Hello {
        /// Who it is.
        node: NodeId,
        /// Which of its runs.
        incarnation: u64,
    },
    /// It is there.
    Keepalive,
    /// The longest packet of each of its ports; 0 of those that are down.
    PortMtus(Vec<u16>),
    /// Its routes have changed so.
    RouteUpdate(Vec<RouteChange>),
    /// What its interconnect says.
    InterconnectSetup(Vec<u8>),
}

/// A packet to send, and the descriptors that go with it.
#[derive(Debug)]
pub struct OutgoingPacket {
    /// The packet.
    pub bytes: Vec<u8>,
    /// Of the interconnect.
    pub descriptors: Vec<OwnedFd>,
}

/// One connection to another node.
#[derive(Debug)]
pub struct Session {
    own: Hello,
    timers: SessionTimers,
    /// Who is at the other end: known from the start to the one who connects.
    peer: Option<NodeId>,
    /// How many ports each node has at most: how many changes while it is up.
    ports: Vec<usize>,
    hello_sent: bool,
    hello_received: bool,
    opened_at_ns: u64,
    received_at_ns: u64,
    sent_at_ns: u64,
    /// The last change of this node's routes that the other one was advertised.
    advertised: u64,
    /// The last change of this node's ports that the other one was advertised.
    mtus_advertised: u64,
    setup_queue: VecDeque<OutgoingPacket>,
    /// What the other one announces.
    announced: BTreeSet<IpNet>,
}

impl Session {
    /// A connection that begins now. `ports` says how many ports each node has at most; `peer` is whom this node has
    /// connected to, nobody where it was connected to.
    pub fn new(own: Hello, peer: Option<NodeId>, ports: Vec<usize>, timers: SessionTimers, now_ns: u64) -> Self {
        Self {
            own,
            timers,
            peer,
            ports,
            hello_sent: false,
            hello_received: false,
            opened_at_ns: now_ns,
            received_at_ns: now_ns,
            sent_at_ns: now_ns,
            advertised: 0,
            mtus_advertised: 0,
            setup_queue: VecDeque::new(),
            announced: BTreeSet::new(),
        }
    }

    /// Who is at the other end, as soon as that is certain.
    pub fn peer(&self) -> Option<NodeId> {
        self.peer.filter(|_| self.hello_received)
    }

    /// The last change of this node's routes that the other one was advertised.
    pub fn advertised(&self) -> u64 {
        self.advertised
    }

    /// Destinations that the other node announces.
    pub fn routes(&self) -> usize {
        self.announced.len()
    }

    /// Takes a packet.
    ///
    /// # Errors
    /// Why the connection has to end: what came is nothing that a node of this cluster says, or a good-cease.
    pub fn receive(&mut self, now_ns: u64, packet: &[u8]) -> Result<SessionEvent, ControlError> {
        let message = Message::decode(packet)?;
        self.received_at_ns = now_ns;
        match message {
            Message::Hello(hello) => self.receive_hello(hello),
            Message::Cease(reason) => Err(ControlError::Ceased(reason)),
            _ if !self.hello_received => Err(ControlError::UnexpectedMessage("a message before the hello")),
            Message::Keepalive => Ok(SessionEvent::Keepalive),
            Message::InterconnectSetup(bytes) => Ok(SessionEvent::InterconnectSetup(bytes)),
            Message::PortMtus(mtus_bytes) => self.receive_port_mtus(mtus_bytes),
            Message::RouteUpdate(changes) => self.receive_routes(changes),
        }
    }

    fn receive_hello(&mut self, hello: Hello) -> Result<SessionEvent, ControlError> {
        if self.hello_received {
            return Err(ControlError::UnexpectedMessage("a second hello"));
        }
        if hello.digest != self.own.digest {
            return Err(ControlError::ConfigMismatch);
        }
        let node = NodeId(hello.node);
        // Who is connected to has the lower number.
        let is_expected = match self.peer {
            Some(peer) => node == peer,
            None => hello.node > self.own.node && usize::from(hello.node) < self.ports.len(),
        };
        if !is_expected {
            let expected = self.peer.map_or_else(|| format!("above {}", self.own.node), |peer| peer.0.to_string());
            return Err(ControlError::UnexpectedNode { found: hello.node, expected });
        }
        (self.peer, self.hello_received) = (Some(node), true);
        Ok(SessionEvent::Hello { node, incarnation: hello.incarnation })
    }

    /// How many ports the other node has at most.
    fn peer_ports_max(&self) -> usize {
        self.peer.and_then(|peer| self.ports.get(usize::from(peer.0))).copied().unwrap_or(0)
    }

    fn receive_port_mtus(&mut self, mtus_bytes: Vec<u16>) -> Result<SessionEvent, ControlError> {
        let (found, expected) = (mtus_bytes.len(), self.peer_ports_max());
        if found <= expected {
            return Ok(SessionEvent::PortMtus(mtus_bytes));
        }
        Err(ControlError::Malformed(format!("{found} ports of a node with {expected} at most")))
    }

    fn receive_routes(&mut self, changes: Vec<RouteChange>) -> Result<SessionEvent, ControlError> {
        let ports = self.peer_ports_max();
        for change in &changes {
            change.check(ports)?;
            match &change.announced {
                Some(_) => _ = self.announced.insert(change.prefix),
                None => _ = self.announced.remove(&change.prefix),
            }
        }
        if self.announced.len() > ROUTES_MAX {
            return Err(ControlError::TooManyRoutes(ROUTES_MAX));
        }
        Ok(SessionEvent::RouteUpdate(changes))
    }

    /// Has something packet by the interconnect of this node to the other's. What does not fit is lost: whether it was.
    #[must_use]
    pub fn queue_setup(&mut self, bytes: Vec<u8>, descriptors: Vec<OwnedFd>) -> bool {
        assert!(bytes.len() <= SETUP_BYTES_MAX, "{} bytes of wiring", bytes.len());
        let is_queued = self.setup_queue.len() < SETUPS_QUEUED_MAX;
        if is_queued {
            self.setup_queue
                .push_back(OutgoingPacket { bytes: Message::InterconnectSetup(bytes).encode(), descriptors });
        }
        is_queued
    }

    /// The next packet to send, when the other node can take one: the hello, wiring, routes, or a beat that is due.
    pub fn next_packet(&mut self, now_ns: u64, own: &Announcements) -> Option<OutgoingPacket> {
        let setup = if self.hello_received { self.setup_queue.pop_front() } else { None };
        let packet = match setup {
            Some(packet) => packet,
            None => OutgoingPacket { bytes: self.next_message(now_ns, own)?.encode(), descriptors: Vec::new() },
        };
        self.sent_at_ns = now_ns;
        Some(packet)
    }

    fn next_message(&mut self, now_ns: u64, own: &Announcements) -> Option<Message> {
        if !self.hello_sent {
            self.hello_sent = true;
            return Some(Message::Hello(Hello { version: VERSION, ..self.own }));
        }
        if !self.hello_received {
            return None;
        }
        let (mtus_bytes, change) = own.mtus_bytes();
        if self.mtus_advertised < change {
            self.mtus_advertised = change;
            return Some(Message::PortMtus(mtus_bytes.to_vec()));
        }
        if self.advertised < own.latest() {
            let (changes, advertised) = own.changes_after(self.advertised, UPDATE_ROUTES_MAX);
            self.advertised = advertised;
            return Some(Message::RouteUpdate(changes));
        }
        (now_ns >= self.sent_at_ns + self.timers.keepalive_ns).then_some(Message::Keepalive)
    }

    /// What to send last.
    pub fn cease(reason: &str) -> Vec<u8> {
        Message::cease(reason).encode()
    }

    /// When [`Session::next_packet`] or [`Session::check_hold_timer`] will have something although nothing came.
    pub fn next_timer_ns(&self) -> u64 {
        if self.hello_received {
            (self.sent_at_ns + self.timers.keepalive_ns).min(self.received_at_ns + self.timers.hold_ns)
        } else {
            self.opened_at_ns + HELLO_WAIT_NS_MAX
        }
    }

    /// That the other node is not silent for too long.
    ///
    /// # Errors
    /// When it is.
    pub fn check_hold_timer(&self, now_ns: u64) -> Result<(), ControlError> {
        let (since_ns, limit_ns) = if self.hello_received {
            (self.received_at_ns, self.timers.hold_ns)
        } else {
            (self.opened_at_ns, HELLO_WAIT_NS_MAX)
        };
        let silent_ns = now_ns.saturating_sub(since_ns);
        if silent_ns < limit_ns { Ok(()) } else { Err(ControlError::HoldTimerExpired(silent_ns / 1_000_000)) }
    }
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
