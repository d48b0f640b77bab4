//! One connection to another node, without I/O: time and packets are handed in, packets and news come out.

use std::collections::{BTreeSet, VecDeque};
use std::os::fd::OwnedFd;

use ipnet::IpNet;
use router::NodeId;

use super::Announcements;
use super::words::{CHANGES_MAX, ControlError, Greeting, Message, RouteChange, VERSION, WIRING_BYTES_MAX};

/// Routes of one node at most: two full tables and some more.
const ROUTES_MAX: usize = 3 << 20;
/// What an interconnect wants said and nobody has taken yet, at most.
const WIRINGS_MAX: usize = 64;
/// How long a connection may take to greet: its node may have to wait for a processor.
const GREETING_NS_MAX: u64 = 1_000_000_000;

/// How often beats go out, and how long silence is borne.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Nanoseconds from one beat to the next.
    pub beat_ns: u64,
    /// Nanoseconds of silence after which the other node counts as dead.
    pub silence_ns: u64,
}

/// What a packet of another node has brought.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard {
    /// The other node's first word.
    Met {
        /// Who it is.
        node: NodeId,
        /// Which of its runs.
        incarnation: u64,
    },
    /// It is there.
    Beat,
    /// The longest packet of each of its ports; 0 of those that are down.
    Ports(Vec<u16>),
    /// Its routes have changed so.
    Routes(Vec<RouteChange>),
    /// What its interconnect says.
    Wiring(Vec<u8>),
}

/// A packet to send, and the descriptors that go with it.
#[derive(Debug)]
pub struct Said {
    /// The packet.
    pub packet: Vec<u8>,
    /// Of the interconnect.
    pub descriptors: Vec<OwnedFd>,
}

/// One connection to another node.
#[derive(Debug)]
pub struct Session {
    own: Greeting,
    limits: Limits,
    /// Who is at the other end: known from the start to the one who connects.
    peer: Option<NodeId>,
    /// How many ports each node has at most: how many changes while it is up.
    ports: Vec<usize>,
    is_greeted: bool,
    has_greeted: bool,
    begun_at_ns: u64,
    heard_at_ns: u64,
    said_at_ns: u64,
    /// The last change of this node's routes that the other one was told.
    told: u64,
    /// The last change of this node's ports that the other one was told.
    told_mtus: u64,
    wirings: VecDeque<Said>,
    /// What the other one announces.
    announced: BTreeSet<IpNet>,
}

impl Session {
    /// A connection that begins now. `ports` says how many ports each node has at most; `peer` is whom this node has
    /// connected to, nobody where it was connected to.
    pub fn new(own: Greeting, peer: Option<NodeId>, ports: Vec<usize>, limits: Limits, now_ns: u64) -> Self {
        Self {
            own,
            limits,
            peer,
            ports,
            is_greeted: false,
            has_greeted: false,
            begun_at_ns: now_ns,
            heard_at_ns: now_ns,
            said_at_ns: now_ns,
            told: 0,
            told_mtus: 0,
            wirings: VecDeque::new(),
            announced: BTreeSet::new(),
        }
    }

    /// Who is at the other end, as soon as that is certain.
    pub fn peer(&self) -> Option<NodeId> {
        self.peer.filter(|_| self.has_greeted)
    }

    /// The last change of this node's routes that the other one was told.
    pub fn told(&self) -> u64 {
        self.told
    }

    /// Destinations that the other node announces.
    pub fn routes(&self) -> usize {
        self.announced.len()
    }

    /// Takes a packet.
    ///
    /// # Errors
    /// Why the connection has to end: what came is nothing that a node of this cluster says, or a good-bye.
    pub fn receive(&mut self, now_ns: u64, packet: &[u8]) -> Result<Heard, ControlError> {
        let message = Message::decode(packet)?;
        self.heard_at_ns = now_ns;
        match message {
            Message::Greeting(greeting) => self.greet(greeting),
            Message::Bye(reason) => Err(ControlError::Left(reason)),
            _ if !self.has_greeted => Err(ControlError::OutOfTurn("a message before the greeting")),
            Message::Beat => Ok(Heard::Beat),
            Message::Wiring(bytes) => Ok(Heard::Wiring(bytes)),
            Message::Ports(mtus_bytes) => self.take_ports(mtus_bytes),
            Message::Routes(changes) => self.take_routes(changes),
        }
    }

    fn greet(&mut self, greeting: Greeting) -> Result<Heard, ControlError> {
        if self.has_greeted {
            return Err(ControlError::OutOfTurn("a second greeting"));
        }
        if greeting.digest != self.own.digest {
            return Err(ControlError::OtherFile);
        }
        let node = NodeId(greeting.node);
        // Who is connected to has the lower number.
        let is_expected = match self.peer {
            Some(peer) => node == peer,
            None => greeting.node > self.own.node && usize::from(greeting.node) < self.ports.len(),
        };
        if !is_expected {
            let expected = self.peer.map_or_else(|| format!("above {}", self.own.node), |peer| peer.0.to_string());
            return Err(ControlError::OtherNode { found: greeting.node, expected });
        }
        (self.peer, self.has_greeted) = (Some(node), true);
        Ok(Heard::Met { node, incarnation: greeting.incarnation })
    }

    /// How many ports the other node has at most.
    fn ports_of_peer(&self) -> usize {
        self.peer.and_then(|peer| self.ports.get(usize::from(peer.0))).copied().unwrap_or(0)
    }

    fn take_ports(&mut self, mtus_bytes: Vec<u16>) -> Result<Heard, ControlError> {
        let (found, expected) = (mtus_bytes.len(), self.ports_of_peer());
        if found <= expected {
            return Ok(Heard::Ports(mtus_bytes));
        }
        Err(ControlError::Senseless(format!("{found} ports of a node with {expected} at most")))
    }

    fn take_routes(&mut self, changes: Vec<RouteChange>) -> Result<Heard, ControlError> {
        let ports = self.ports_of_peer();
        for change in &changes {
            change.check(ports)?;
            match &change.announced {
                Some(_) => _ = self.announced.insert(change.prefix),
                None => _ = self.announced.remove(&change.prefix),
            }
        }
        if self.announced.len() > ROUTES_MAX {
            return Err(ControlError::TooMany(ROUTES_MAX));
        }
        Ok(Heard::Routes(changes))
    }

    /// Has something said by the interconnect of this node to the other's. What does not fit is lost: whether it was.
    #[must_use]
    pub fn wire(&mut self, bytes: Vec<u8>, descriptors: Vec<OwnedFd>) -> bool {
        assert!(bytes.len() <= WIRING_BYTES_MAX, "{} bytes of wiring", bytes.len());
        let is_taken = self.wirings.len() < WIRINGS_MAX;
        if is_taken {
            self.wirings.push_back(Said { packet: Message::Wiring(bytes).encode(), descriptors });
        }
        is_taken
    }

    /// The next packet to send, when the other node can take one: the greeting, wiring, routes, or a beat that is due.
    pub fn say(&mut self, now_ns: u64, own: &Announcements) -> Option<Said> {
        let wiring = if self.has_greeted { self.wirings.pop_front() } else { None };
        let said = match wiring {
            Some(said) => said,
            None => Said { packet: self.next(now_ns, own)?.encode(), descriptors: Vec::new() },
        };
        self.said_at_ns = now_ns;
        Some(said)
    }

    fn next(&mut self, now_ns: u64, own: &Announcements) -> Option<Message> {
        if !self.is_greeted {
            self.is_greeted = true;
            return Some(Message::Greeting(Greeting { version: VERSION, ..self.own }));
        }
        if !self.has_greeted {
            return None;
        }
        let (mtus_bytes, change) = own.mtus_bytes();
        if self.told_mtus < change {
            self.told_mtus = change;
            return Some(Message::Ports(mtus_bytes.to_vec()));
        }
        if self.told < own.latest() {
            let (changes, told) = own.after(self.told, CHANGES_MAX);
            self.told = told;
            return Some(Message::Routes(changes));
        }
        (now_ns >= self.said_at_ns + self.limits.beat_ns).then_some(Message::Beat)
    }

    /// What to send last.
    pub fn bye(reason: &str) -> Vec<u8> {
        Message::bye(reason).encode()
    }

    /// When [`Session::say`] or [`Session::check`] will have something although nothing came.
    pub fn due_ns(&self) -> u64 {
        if self.has_greeted {
            (self.said_at_ns + self.limits.beat_ns).min(self.heard_at_ns + self.limits.silence_ns)
        } else {
            self.begun_at_ns + GREETING_NS_MAX
        }
    }

    /// That the other node is not silent for too long.
    ///
    /// # Errors
    /// When it is.
    pub fn check(&self, now_ns: u64) -> Result<(), ControlError> {
        let (since_ns, limit_ns) = if self.has_greeted {
            (self.heard_at_ns, self.limits.silence_ns)
        } else {
            (self.begun_at_ns, GREETING_NS_MAX)
        };
        let silent_ns = now_ns.saturating_sub(since_ns);
        if silent_ns < limit_ns { Ok(()) } else { Err(ControlError::Silent(silent_ns / 1_000_000)) }
    }
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
