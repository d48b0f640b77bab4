//! The other nodes: a connection to each, made again when it is lost.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use router::NodeId;
use rustix::event::PollFlags;
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use super::watch::{LOOK_NS, StopWatch};
use crate::control::transport::{Accepted, ControlAddress, Listener, Transport};
use crate::control::{
    Announcements, ControlError, Hello, OutgoingPacket, RouteChange, Session, SessionEvent, SessionTimers,
};
use crate::interconnect::{ConnectionParams, Offer};

/// How long after a failure a connection is tried again, at first and at most.
const RETRY_NS_MIN: u64 = 10_000_000;
const RETRY_NS_MAX: u64 = 320_000_000;
/// Connections that have not said who they are, in all and from one address: whoever has the address of one node keeps
/// no other out.
const NEWCOMERS_MAX: usize = 32;
const NEWCOMERS_OF_ADDRESS_MAX: usize = 4;
/// How long a reason is not said again, when a connection is refused for the same one, and how many are said meanwhile:
/// anybody may come, and the log must not grow by that.
const REFUSED_AGAIN_NS: u64 = 60_000_000_000;
const REFUSALS_MAX: usize = 16;
/// Packets of one connection that are taken, and sent, in one turn.
const PACKETS_PER_TURN: usize = 64;

/// What has become of another node, or come from it.
#[derive(Debug)]
pub enum News {
    /// It has greeted.
    Met(NodeId),
    /// It is gone.
    Lost(NodeId),
    /// The longest packet of each of its ports.
    Ports(NodeId, Vec<u16>),
    /// Its routes.
    Routes(NodeId, Vec<RouteChange>),
    /// Its interconnect makes an offer.
    Offer(NodeId, Offer),
    /// Its interconnect takes an offer.
    ConnectionParams(NodeId, ConnectionParams),
}

/// What interconnects say to each other.
#[derive(Debug, Serialize, Deserialize)]
enum Wiring {
    Offer(EncodedParams),
    ConnectionParams(EncodedParams),
}

/// [`ConnectionParams`], as they are encoded.
#[derive(Debug, Serialize, Deserialize)]
struct EncodedParams {
    secret: u64,
    queue_pair: u32,
    packet_sequence: u32,
    address: Option<std::net::SocketAddr>,
}

impl From<ConnectionParams> for EncodedParams {
    fn from(params: ConnectionParams) -> Self {
        let ConnectionParams { secret, queue_pair, packet_sequence, address } = params;
        Self { secret, queue_pair, packet_sequence, address }
    }
}

impl From<EncodedParams> for ConnectionParams {
    fn from(params: EncodedParams) -> Self {
        let EncodedParams { secret, queue_pair, packet_sequence, address } = params;
        Self { secret, queue_pair, packet_sequence, address }
    }
}

#[derive(Debug)]
struct Connection {
    session: Session,
    transport: Transport,
    /// What the socket had no room for.
    pending: Option<OutgoingPacket>,
    /// Whether the socket may have something to read.
    is_readable: bool,
}

impl Connection {
    /// Sends what there is to say.
    fn speak(&mut self, now_ns: u64, own: &Announcements) -> Result<(), ControlError> {
        self.transport.flush()?;
        for _ in 0..PACKETS_PER_TURN {
            let Some(said) = self.pending.take().or_else(|| self.session.next_packet(now_ns, own)) else {
                return Ok(());
            };
            if !self.transport.send(&said.packet, &said.descriptors)? {
                self.pending = Some(said);
                return Ok(());
            }
        }
        Ok(())
    }

    /// What has come, if anything has.
    fn hear(&mut self, now_ns: u64) -> Result<Option<(SessionEvent, Vec<OwnedFd>)>, ControlError> {
        if self.is_readable
            && let Some((packet, descriptors)) = self.transport.receive()?
        {
            return self.session.receive(now_ns, &packet).map(|heard| Some((heard, descriptors)));
        }
        self.is_readable = false;
        self.session.check_hold_timer(now_ns).map(|()| None)
    }

    fn flags(&self) -> PollFlags {
        let has_left = self.pending.is_some() || self.transport.has_unsent();
        if has_left { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }
}

/// Another node.
#[derive(Debug)]
pub struct Peer {
    /// Its name.
    pub name: String,
    address: ControlAddress,
    connection: Option<Connection>,
    /// Its process, where that is of this machine.
    watch: Option<StopWatch>,
    /// Whether it has greeted on this connection.
    is_met: bool,
    /// Whether the interconnect carries packets to it.
    pub is_joined: bool,
    /// Why it is not there.
    pub reason: Option<String>,
    /// How often it was lost.
    pub losses: u64,
    /// Times that the forwarding thread was told to leave it and has not said that it has.
    leaves_pending: u32,
    lost_at_ns: u64,
    /// From the moment when the last loss was known until no packet was sent to it any more.
    pub withdrawn_ns: Option<u64>,
    retry_at_ns: u64,
    retry_ns: u64,
}

impl Peer {
    /// Whether what the forwarding thread says of it is of the connection that there is now.
    pub fn is_current(&self) -> bool {
        self.leaves_pending == 0 && self.is_met
    }

    /// In a word.
    pub fn state(&self) -> &'static str {
        match (self.is_met, self.is_joined) {
            (true, true) => "up",
            (true, false) => "joining",
            (false, _) => "down",
        }
    }

    /// Destinations that it announces.
    pub fn routes(&self) -> usize {
        self.connection.as_ref().map_or(0, |connection| connection.session.routes())
    }
}

/// All other nodes.
#[derive(Debug)]
pub struct Peers {
    own: Hello,
    limits: SessionTimers,
    /// How many ports each node has at most.
    ports: Vec<usize>,
    listener: Listener,
    /// By node; `None` for this one.
    peers: Vec<Option<Peer>>,
    newcomers: Vec<Connection>,
    /// Whether somebody may have come.
    has_visitors: bool,
    /// This node keeps away from all others.
    is_held: bool,
    watched_at_ns: u64,
    /// Why connections were refused lately, and when that was said.
    refused: BTreeMap<String, u64>,
    news: Vec<News>,
}

impl Peers {
    /// Nobody is there yet. `paths` has each node's name, where it is reached, and how many ports it has at most.
    pub fn new(
        own: Hello,
        limits: SessionTimers,
        listener: Listener,
        paths: Vec<(String, ControlAddress, usize)>,
    ) -> Self {
        let ports = paths.iter().map(|(_, _, ports)| *ports).collect();
        let peer = |(node, (name, address, _)): (usize, (String, ControlAddress, usize))| {
            let peer = Peer {
                name,
                address,
                connection: None,
                watch: None,
                is_met: false,
                is_joined: false,
                reason: None,
                losses: 0,
                leaves_pending: 0,
                lost_at_ns: 0,
                withdrawn_ns: None,
                retry_at_ns: 0,
                retry_ns: RETRY_NS_MIN,
            };
            (node != usize::from(own.node)).then_some(peer)
        };
        let peers = paths.into_iter().enumerate().map(peer).collect();
        Self {
            own,
            limits,
            ports,
            listener,
            peers,
            newcomers: Vec::new(),
            has_visitors: true,
            is_held: false,
            watched_at_ns: 0,
            refused: BTreeMap::new(),
            news: Vec::new(),
        }
    }

    /// The cluster file is another one, for nodes that are met from now on.
    pub fn set_digest(&mut self, digest: u64) {
        self.own.digest = digest;
    }

    /// Another node.
    pub fn peer(&mut self, node: NodeId) -> Option<&mut Peer> {
        self.peers.get_mut(usize::from(node.0))?.as_mut()
    }

    /// All other nodes, by their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (NodeId, &Peer)> {
        self.peers.iter().enumerate().filter_map(|(node, peer)| Some((NodeId(node as u8), peer.as_ref()?)))
    }

    /// What has happened since.
    pub fn take_news(&mut self) -> Vec<News> {
        std::mem::take(&mut self.news)
    }

    /// The last change of this node's routes that all who are there were told.
    pub fn told_to_all(&self) -> Option<u64> {
        let connections = self.peers.iter().flatten().filter_map(|peer| peer.connection.as_ref());
        connections.chain(&self.newcomers).map(|connection| connection.session.advertised()).min()
    }

    /// What to poll.
    pub fn descriptors(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        let connections = self.peers.iter().flatten().filter_map(|peer| peer.connection.as_ref());
        let connections = connections.chain(&self.newcomers);
        let connections = connections.map(|connection| (connection.transport.as_fd(), connection.flags()));
        // Who cannot be let in now must not wake anybody.
        let is_full = self.newcomers.len() >= NEWCOMERS_MAX;
        let wanted = if self.is_held || is_full { PollFlags::empty() } else { PollFlags::IN };
        std::iter::once((self.listener.as_fd(), wanted)).chain(connections).collect()
    }

    /// Which of [`Peers::descriptors`] have something to be read, in their order.
    pub fn note_readable(&mut self, readable: &[bool]) {
        let (listener, connections) = readable.split_first().unwrap_or((&false, &[]));
        self.has_visitors = *listener;
        let own = self.peers.iter_mut().flatten().filter_map(|peer| peer.connection.as_mut());
        for (connection, is_readable) in own.chain(&mut self.newcomers).zip(connections) {
            connection.is_readable |= is_readable;
        }
    }

    /// Whether some node has said more than was taken in one turn.
    pub fn has_more(&self) -> bool {
        self.peers.iter().flatten().filter_map(|peer| peer.connection.as_ref()).any(|connection| connection.is_readable)
    }

    /// When [`Peers::turn`] has something to do although nothing comes.
    pub fn due_ns(&self) -> u64 {
        let peers = self.peers.iter().enumerate().filter_map(|(node, peer)| {
            let peer = peer.as_ref()?;
            match &peer.connection {
                Some(connection) if peer.watch.is_some() => {
                    Some(connection.session.next_timer_ns().min(self.watched_at_ns + LOOK_NS))
                }
                Some(connection) => Some(connection.session.next_timer_ns()),
                None => self.connects_to(node).then_some(peer.retry_at_ns),
            }
        });
        let newcomers = self.newcomers.iter().map(|connection| connection.session.next_timer_ns());
        peers.chain(newcomers).min().unwrap_or(u64::MAX)
    }

    /// Of two nodes the one with the higher number connects.
    fn connects_to(&self, node: usize) -> bool {
        !self.is_held && node < usize::from(self.own.node)
    }

    /// Takes what has come, and makes connections.
    pub fn turn(&mut self, now_ns: u64, own: &Announcements) {
        self.watch(now_ns);
        self.accept(now_ns);
        self.hear_newcomers(now_ns, own);
        for node in 0..self.peers.len() {
            self.connect(node, now_ns);
            self.hear(node, now_ns);
        }
    }

    /// Sends what is to be said.
    pub fn speak(&mut self, now_ns: u64, own: &Announcements) {
        (0..self.peers.len()).for_each(|node| self.speak_to(node, now_ns, own));
    }

    fn accept(&mut self, now_ns: u64) {
        for _ in 0..NEWCOMERS_MAX {
            if !self.has_visitors || self.is_held || self.newcomers.len() >= NEWCOMERS_MAX {
                return;
            }
            match self.listener.accept() {
                Some(Accepted::Peer(transport)) => {
                    self.make_room_for(&transport);
                    let session = Session::new(self.own, None, self.ports.clone(), self.limits, now_ns);
                    self.newcomers.push(Connection { session, transport, pending: None, is_readable: true });
                }
                Some(Accepted::UnknownAddress(from)) => {
                    self.refused(format!("from {from}, which no node of the cluster file has as 'control'"), now_ns);
                }
                Some(Accepted::Refused) => {}
                None => return,
            }
        }
    }

    /// Of those from one address the first goes who has been there for longest.
    fn make_room_for(&mut self, transport: &Transport) {
        let Some(from) = transport.peer_ip() else { return };
        let is_same = |newcomer: &Connection| newcomer.transport.peer_ip() == Some(from);
        if self.newcomers.iter().filter(|newcomer| is_same(newcomer)).count() >= NEWCOMERS_OF_ADDRESS_MAX
            && let Some(oldest) = self.newcomers.iter().position(is_same)
        {
            self.newcomers.remove(oldest);
        }
    }

    /// Says why a connection was refused, and not again when who was refused tries again.
    fn refused(&mut self, reason: String, now_ns: u64) {
        self.refused.retain(|_, said_at_ns| now_ns.saturating_sub(*said_at_ns) < REFUSED_AGAIN_NS);
        if self.refused.len() >= REFUSALS_MAX || self.refused.contains_key(&reason) {
            return;
        }
        warn!("a connection was refused: {reason}");
        self.refused.insert(reason, now_ns);
        if self.refused.len() == REFUSALS_MAX {
            warn!("connections are refused for more reasons than are said in a minute");
        }
    }

    fn hear_newcomers(&mut self, now_ns: u64, own: &Announcements) {
        for mut newcomer in std::mem::take(&mut self.newcomers) {
            let heard = newcomer.speak(now_ns, own).and_then(|()| newcomer.hear(now_ns));
            match heard {
                Ok(Some((SessionEvent::Hello { node, .. }, _))) => self.meet_newcomer(node, newcomer, now_ns),
                Ok(_) => self.newcomers.push(newcomer),
                Err(error) => self.refused(error.to_string(), now_ns),
            }
        }
    }

    /// While this node was stopped, another one may have come and gone again more than once.
    fn meet_newcomer(&mut self, node: NodeId, mut newcomer: Connection, now_ns: u64) {
        match newcomer.hear(now_ns) {
            Ok(heard) => {
                self.meet(node, newcomer, now_ns);
                if let Some((heard, descriptors)) = heard {
                    self.heard(node, heard, descriptors, now_ns);
                }
            }
            Err(error) => info!("a connection came and is gone: {error}"),
        }
    }

    /// A process that is stopped, or frozen, says nothing, and its connection does not end.
    fn watch(&mut self, now_ns: u64) {
        if now_ns < self.watched_at_ns + LOOK_NS {
            return;
        }
        self.watched_at_ns = now_ns;
        for node in 0..self.peers.len() {
            let peer = self.peers[node].as_mut().filter(|peer| peer.connection.is_some());
            let watch = peer.and_then(|peer| peer.watch.as_mut());
            if let Some(halt) = watch.and_then(StopWatch::halt) {
                self.lose(NodeId(node as u8), halt, now_ns);
            }
        }
    }

    /// A node has come: what there was of it before is over.
    fn meet(&mut self, node: NodeId, connection: Connection, now_ns: u64) {
        if self.peer(node).is_some_and(|peer| peer.connection.is_some()) {
            self.lose(node, "it has come again", now_ns);
        }
        let Some(peer) = self.peer(node) else { return };
        info!(node = peer.name, "met");
        peer.watch = connection.transport.peer_pid().and_then(StopWatch::of);
        (peer.connection, peer.is_met, peer.reason) = (Some(connection), true, None);
        peer.retry_ns = RETRY_NS_MIN;
        self.news.push(News::Met(node));
    }

    fn connect(&mut self, node: usize, now_ns: u64) {
        if !self.connects_to(node) {
            return;
        }
        let session = Session::new(self.own, Some(NodeId(node as u8)), self.ports.clone(), self.limits, now_ns);
        let Some(peer) = self.peers[node].as_mut().filter(|peer| peer.connection.is_none()) else { return };
        if now_ns < peer.retry_at_ns {
            return;
        }
        // Its socket takes connections, of which it would find one after the other when it goes on.
        if peer.watch.as_mut().and_then(StopWatch::halt).is_some() {
            peer.retry_at_ns = now_ns + LOOK_NS;
            return;
        }
        peer.connection = Transport::connect(&peer.address).map(|transport| Connection {
            session,
            transport,
            pending: None,
            is_readable: true,
        });
        peer.retry_at_ns = now_ns + peer.retry_ns;
        peer.retry_ns = (2 * peer.retry_ns).min(RETRY_NS_MAX);
    }

    fn hear(&mut self, node: usize, now_ns: u64) {
        let id = NodeId(node as u8);
        for _ in 0..PACKETS_PER_TURN {
            let Some(connection) = self.peers[node].as_mut().and_then(|peer| peer.connection.as_mut()) else { return };
            match connection.hear(now_ns) {
                Ok(Some((heard, descriptors))) => self.heard(id, heard, descriptors, now_ns),
                Ok(None) => return,
                Err(error) => return self.lose(id, &error.to_string(), now_ns),
            }
        }
    }

    fn heard(&mut self, node: NodeId, heard: SessionEvent, descriptors: Vec<OwnedFd>, now_ns: u64) {
        match heard {
            SessionEvent::Hello { .. } => {
                let connection = self.peer(node).and_then(|peer| peer.connection.take());
                if let Some(connection) = connection {
                    self.meet(node, connection, now_ns);
                }
            }
            SessionEvent::Keepalive => {}
            SessionEvent::PortMtus(mtus_bytes) => self.news.push(News::Ports(node, mtus_bytes)),
            SessionEvent::RouteUpdate(changes) => self.news.push(News::Routes(node, changes)),
            SessionEvent::InterconnectSetup(bytes) => match postcard::from_bytes::<Wiring>(&bytes) {
                Ok(Wiring::Offer(params)) => {
                    self.news.push(News::Offer(node, Offer { params: params.into(), descriptors }));
                }
                Ok(Wiring::ConnectionParams(params)) => self.news.push(News::ConnectionParams(node, params.into())),
                Err(error) => self.lose(node, &format!("its interconnect says nonsense: {error}"), now_ns),
            },
        }
    }

    fn speak_to(&mut self, node: usize, now_ns: u64, own: &Announcements) {
        let Some(connection) = self.peers[node].as_mut().and_then(|peer| peer.connection.as_mut()) else { return };
        if let Err(error) = connection.speak(now_ns, own) {
            self.lose(NodeId(node as u8), &error.to_string(), now_ns);
        }
    }

    /// Gives a node up, until it comes again.
    pub fn lose(&mut self, node: NodeId, reason: &str, now_ns: u64) {
        let Some(peer) = self.peer(node) else { return };
        let was_met = peer.is_met;
        (peer.connection, peer.is_met, peer.is_joined) = (None, false, false);
        peer.reason = Some(reason.to_owned());
        peer.retry_at_ns = peer.retry_at_ns.max(now_ns + RETRY_NS_MIN);
        if was_met {
            warn!(node = peer.name, "lost: {reason}");
            peer.losses += 1;
            peer.leaves_pending += 1;
            peer.lost_at_ns = now_ns;
            self.news.push(News::Lost(node));
        }
    }

    /// Takes leave of all others, and keeps away from them until [`Peers::release`].
    pub fn hold(&mut self, reason: &str, now_ns: u64) {
        self.bye(reason);
        (0..self.peers.len()).for_each(|node| self.lose(NodeId(node as u8), reason, now_ns));
        self.newcomers.clear();
        self.is_held = true;
    }

    /// Meets others again.
    pub fn release(&mut self) {
        (self.is_held, self.has_visitors) = (false, true);
    }

    /// No packet goes to that node any more.
    pub fn left(&mut self, node: NodeId, now_ns: u64) {
        if let Some(peer) = self.peer(node) {
            peer.leaves_pending = peer.leaves_pending.saturating_sub(1);
            peer.withdrawn_ns = Some(now_ns.saturating_sub(peer.lost_at_ns));
        }
    }

    /// Has another node's interconnect made an offer.
    pub fn offer(&mut self, node: NodeId, offer: Offer, now_ns: u64) {
        self.wire(node, &Wiring::Offer(offer.params.into()), offer.descriptors, now_ns);
    }

    /// Has another node's interconnect told that its offer is taken.
    pub fn accept_offer(&mut self, node: NodeId, params: ConnectionParams, now_ns: u64) {
        self.wire(node, &Wiring::ConnectionParams(params.into()), Vec::new(), now_ns);
    }

    fn wire(&mut self, node: NodeId, wiring: &Wiring, descriptors: Vec<OwnedFd>, now_ns: u64) {
        let bytes = postcard::to_stdvec(wiring).unwrap_or_else(|error| panic!("numbers and addresses: {error}"));
        let Some(connection) = self.peer(node).and_then(|peer| peer.connection.as_mut()) else { return };
        if !connection.session.queue_setup(bytes, descriptors) {
            self.lose(node, "it does not listen", now_ns);
        }
    }

    /// Tells all that this node ends.
    pub fn bye(&mut self, reason: &str) {
        for connection in self.peers.iter_mut().flatten().filter_map(|peer| peer.connection.as_mut()) {
            // Who does not hear it sees that the connection ends.
            let _ = connection.transport.send(&Session::cease(reason), &[]);
        }
    }
}

#[cfg(test)]
#[path = "peers_tests.rs"]
mod tests;
