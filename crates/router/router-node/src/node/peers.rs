//! The sessions with the other nodes, which are opened again when they are lost.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use router::NodeId;
use rustix::event::PollFlags;
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use super::liveness::{ProcessWatch, SAMPLE_INTERVAL_NS};
use crate::control::transport::{Accepted, ControlAddress, Listener, Transport};
use crate::control::{
    Announcements, ControlError, Hello, KeptRoutes, OutgoingPacket, RouteChange, Session, SessionEvent, SessionTimers,
};
use crate::interconnect::{ConnectionParams, Offer};

/// Initial and maximum interval between attempts to connect.
const RETRY_NS_MIN: u64 = 10_000_000;
const RETRY_NS_MAX: u64 = 320_000_000;
/// Maximum number of connections without a hello, in all and per address, so that the owner of one address cannot keep
/// other nodes out.
const PENDING_MAX: usize = 32;
const PENDING_PER_ADDRESS_MAX: usize = 4;
/// Maximum number of unread packets that are discarded when a session is ended.
const UNREAD_MAX: usize = 1024;
/// How long a refusal with the same reason is not logged again, and how many reasons are logged in that time: anyone
/// can connect, and must not be able to fill the log.
const REFUSAL_REPEAT_NS: u64 = 60_000_000_000;
const REFUSALS_MAX: usize = 16;
/// How long the routes of a lost node are kept, and withdrawals for it: if it returns, only changes are sent.
const KEPT_NS: u64 = 60_000_000_000;
/// Maximum number of packets per session that are received, and sent, in one iteration.
const PACKETS_PER_POLL: usize = 8;

/// A change of another node, or a message of it.
#[derive(Debug)]
pub enum PeerUpdate {
    /// The session is up.
    Up(NodeId),
    /// The session is lost.
    Down(NodeId),
    /// The MTU of each of its ports.
    PortMtus(NodeId, Vec<u16>),
    /// Its routes begin: whether those of the former session are used again.
    RoutesBegin(NodeId, bool),
    /// Changes of its routes.
    Routes(NodeId, Vec<RouteChange>),
    /// The routes of its former session are not needed any more.
    Forget(NodeId),
    /// An offer of its interconnect.
    Offer(NodeId, Offer),
    /// Its interconnect accepted an offer.
    Params(NodeId, ConnectionParams),
}

/// The setup messages of interconnects. Postcard encodes variants by their position.
#[derive(Debug, Serialize, Deserialize)]
enum SetupMessage {
    Offer(ConnectionParams),
    Params(ConnectionParams),
}

#[derive(Debug)]
struct Connection {
    session: Session,
    transport: Transport,
    /// A packet that the socket had no room for.
    unsent: Option<OutgoingPacket>,
    /// Whether the socket may be readable.
    is_readable: bool,
}

impl Connection {
    /// Sends the packets that are due.
    fn send(&mut self, now_ns: u64, own: &Announcements) -> Result<(), ControlError> {
        self.transport.flush()?;
        for _ in 0..PACKETS_PER_POLL {
            let Some(packet) = self.unsent.take().or_else(|| self.session.next_packet(now_ns, own)) else {
                return Ok(());
            };
            if !self.transport.send(&packet.bytes, &packet.descriptors)? {
                self.unsent = Some(packet);
                return Ok(());
            }
        }
        Ok(())
    }

    /// Receives and processes the next packet, and checks the hold timer.
    fn receive(&mut self, now_ns: u64) -> Result<Option<(SessionEvent, Vec<OwnedFd>)>, ControlError> {
        if self.is_readable
            && let Some((packet, descriptors)) = self.transport.receive()?
        {
            return self.session.receive(now_ns, &packet).map(|event| Some((event, descriptors)));
        }
        self.is_readable = false;
        self.session.check_hold_timer(now_ns).map(|()| None)
    }

    fn flags(&self) -> PollFlags {
        let has_unsent = self.unsent.is_some() || self.transport.has_unsent();
        if has_unsent { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }
}

/// The state of another node.
#[derive(Debug)]
pub struct Peer {
    /// Its name.
    pub name: String,
    address: ControlAddress,
    connection: Option<Connection>,
    /// Watches its process, if that is on this machine.
    watch: Option<ProcessWatch>,
    /// Whether its hello was received on this connection.
    is_session_up: bool,
    /// Whether the interconnect carries packets to it.
    pub is_joined: bool,
    /// Why it is not up.
    pub reason: Option<String>,
    /// Number of times that the session was lost.
    pub losses: u64,
    /// Removals of the node that the forwarding thread has not confirmed.
    removals_pending: u32,
    down_at_ns: u64,
    /// For the last loss: time from its detection until no packet was sent to the node any more.
    pub withdrawn_ns: Option<u64>,
    retry_at_ns: u64,
    retry_ns: u64,
    /// What is kept of its routes since the last session.
    kept: Option<KeptRoutes>,
}

impl Peer {
    /// Returns whether reports of the forwarding thread are about the current session.
    pub fn is_current(&self) -> bool {
        self.removals_pending == 0 && self.is_session_up
    }

    /// Returns the name of the state.
    pub fn state(&self) -> &'static str {
        match (self.is_session_up, self.is_joined) {
            (true, true) => "up",
            (true, false) => "joining",
            (false, _) => "down",
        }
    }
}

/// The other nodes.
#[derive(Debug)]
pub struct Peers {
    own: Hello,
    timers: SessionTimers,
    /// Maximum number of ports of each node.
    ports: Vec<usize>,
    listener: Listener,
    /// By node; `None` for this node.
    peers: Vec<Option<Peer>>,
    pending: Vec<Connection>,
    /// Whether connections may wait to be accepted.
    is_listener_readable: bool,
    /// Whether no session may be opened.
    is_held: bool,
    sampled_at_ns: u64,
    /// Recent reasons of refused connections, and when they were logged.
    refusals: BTreeMap<String, u64>,
    updates: Vec<PeerUpdate>,
}

impl Peers {
    /// Returns the state without sessions. `addresses` has the name of each node, its control address, and its maximum
    /// number of ports.
    pub fn new(
        own: Hello,
        timers: SessionTimers,
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
                is_session_up: false,
                is_joined: false,
                reason: None,
                losses: 0,
                removals_pending: 0,
                down_at_ns: 0,
                withdrawn_ns: None,
                retry_at_ns: 0,
                retry_ns: RETRY_NS_MIN,
                kept: None,
            };
            (node != usize::from(own.node)).then_some(peer)
        };
        let peers = paths.into_iter().enumerate().map(peer).collect();
        Self {
            own,
            timers,
            ports,
            listener,
            peers,
            pending: Vec::new(),
            is_listener_readable: true,
            is_held: false,
            sampled_at_ns: 0,
            refusals: BTreeMap::new(),
            updates: Vec::new(),
        }
    }

    /// Sets the digest of the cluster file for sessions that are opened from now on.
    pub fn set_digest(&mut self, digest: u64) {
        self.own.digest = digest;
    }

    /// Returns another node.
    pub fn peer(&mut self, node: NodeId) -> Option<&mut Peer> {
        self.peers.get_mut(usize::from(node.0))?.as_mut()
    }

    /// Returns the other nodes in the order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (NodeId, &Peer)> {
        self.peers.iter().enumerate().filter_map(|(node, peer)| Some((NodeId(node as u8), peer.as_ref()?)))
    }

    /// Returns the updates since the last call.
    pub fn take_updates(&mut self) -> Vec<PeerUpdate> {
        std::mem::take(&mut self.updates)
    }

    /// Returns the number of the last change of this node's routes that was sent on every session; `None` while a node
    /// that was lost may return.
    pub fn advertised_to_all(&self, now_ns: u64) -> Option<u64> {
        let may_return = |peer: &Peer| !peer.is_session_up && peer.losses > 0 && now_ns < peer.down_at_ns + KEPT_NS;
        if self.peers.iter().flatten().any(may_return) {
            return None;
        }
        let connections = self.peers.iter().flatten().filter_map(|peer| peer.connection.as_ref());
        connections.chain(&self.pending).map(|connection| connection.session.advertised()).min()
    }

    /// Returns the descriptors to poll.
    pub fn descriptors(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        let connections = self.peers.iter().flatten().filter_map(|peer| peer.connection.as_ref());
        let connections = connections.chain(&self.pending);
        let connections = connections.map(|connection| (connection.transport.as_fd(), connection.flags()));
        // A connection that cannot be accepted now must not cause wake-ups.
        let is_full = self.pending.len() >= PENDING_MAX;
        let wanted = if self.is_held || is_full { PollFlags::empty() } else { PollFlags::IN };
        std::iter::once((self.listener.as_fd(), wanted)).chain(connections).collect()
    }

    /// Records which of [`Peers::descriptors`] are readable, in the same order.
    pub fn note_readable(&mut self, readable: &[bool]) {
        let (listener, connections) = readable.split_first().unwrap_or((&false, &[]));
        self.is_listener_readable = *listener;
        let own = self.peers.iter_mut().flatten().filter_map(|peer| peer.connection.as_mut());
        for (connection, is_readable) in own.chain(&mut self.pending).zip(connections) {
            connection.is_readable |= is_readable;
        }
    }

    /// Returns whether a session has more packets than one iteration processes.
    pub fn has_more(&self) -> bool {
        self.peers.iter().flatten().filter_map(|peer| peer.connection.as_ref()).any(|connection| connection.is_readable)
    }

    /// Returns when [`Peers::poll`] is due though no descriptor is ready.
    pub fn due_ns(&self) -> u64 {
        let peers = self.peers.iter().enumerate().filter_map(|(node, peer)| {
            let peer = peer.as_ref()?;
            match &peer.connection {
                Some(connection) if peer.watch.is_some() => {
                    Some(connection.session.next_timer_ns().min(self.sampled_at_ns + SAMPLE_INTERVAL_NS))
                }
                Some(connection) => Some(connection.session.next_timer_ns()),
                None => self.connects_to(node).then_some(peer.retry_at_ns),
            }
        });
        let pending = self.pending.iter().map(|connection| connection.session.next_timer_ns());
        peers.chain(pending).min().unwrap_or(u64::MAX)
    }

    /// Returns whether this node connects to `node`: the one with the higher number does.
    fn connects_to(&self, node: usize) -> bool {
        !self.is_held && node < usize::from(self.own.node)
    }

    /// Receives packets, accepts connections and opens sessions.
    pub fn poll(&mut self, now_ns: u64, own: &Announcements) {
        self.watch(now_ns);
        self.accept(now_ns);
        self.receive_pending(now_ns, own);
        for node in 0..self.peers.len() {
            self.connect(node, now_ns);
            self.receive(node, now_ns);
            self.forget_kept(node, now_ns);
        }
    }

    /// Forgets the routes of a node that was lost long ago.
    fn forget_kept(&mut self, node: usize, now_ns: u64) {
        if let Some(peer) = &mut self.peers[node]
            && !peer.is_session_up
            && now_ns >= peer.down_at_ns + KEPT_NS
            && peer.kept.take().is_some()
        {
            self.updates.push(PeerUpdate::Forget(NodeId(node as u8)));
        }
    }

    /// Sends the packets that are due.
    pub fn send(&mut self, now_ns: u64, own: &Announcements) {
        (0..self.peers.len()).for_each(|node| self.send_to(node, now_ns, own));
    }

    fn accept(&mut self, now_ns: u64) {
        for _ in 0..PENDING_MAX {
            if !self.is_listener_readable || self.is_held || self.pending.len() >= PENDING_MAX {
                return;
            }
            match self.listener.accept() {
                Some(Accepted::Peer(transport)) => {
                    self.evict_oldest_from(&transport);
                    let session = Session::new(self.own, None, self.ports.clone(), self.timers, now_ns);
                    self.pending.push(Connection { session, transport, unsent: None, is_readable: true });
                }
                Some(Accepted::UnknownAddress(from)) => {
                    self.log_refusal(
                        format!("from {from}, which is not a 'control' address of the cluster file"),
                        now_ns,
                    );
                }
                Some(Accepted::Refused) => {}
                None => return,
            }
        }
    }

    /// Closes the oldest pending connection of the same address when there are too many.
    fn evict_oldest_from(&mut self, transport: &Transport) {
        let Some(from) = transport.peer_ip() else { return };
        let is_same = |connection: &Connection| connection.transport.peer_ip() == Some(from);
        if self.pending.iter().filter(|connection| is_same(connection)).count() >= PENDING_PER_ADDRESS_MAX
            && let Some(oldest) = self.pending.iter().position(is_same)
        {
            self.pending.remove(oldest);
        }
    }

    /// Logs why a connection was refused, unless that was logged recently.
    fn log_refusal(&mut self, reason: String, now_ns: u64) {
        self.refusals.retain(|_, logged_at_ns| now_ns.saturating_sub(*logged_at_ns) < REFUSAL_REPEAT_NS);
        if self.refusals.len() >= REFUSALS_MAX || self.refusals.contains_key(&reason) {
            return;
        }
        warn!("control connection refused: {reason}");
        self.refusals.insert(reason, now_ns);
        if self.refusals.len() == REFUSALS_MAX {
            warn!("more reasons for refused control connections than are logged in a minute");
        }
    }

    fn receive_pending(&mut self, now_ns: u64, own: &Announcements) {
        for mut connection in std::mem::take(&mut self.pending) {
            let event = connection.send(now_ns, own).and_then(|()| connection.receive(now_ns));
            match event {
                Ok(Some((SessionEvent::Hello { node, .. }, _))) => self.promote_pending(node, connection, now_ns),
                Ok(_) => self.pending.push(connection),
                Err(error) => {
                    // The other node then logs the reason too. If it has another key, it cannot authenticate this
                    // message, and logs that the keys differ.
                    let _ = connection.transport.send(&Session::cease(&error.to_string()), &[]);
                    let _ = connection.transport.flush();
                    self.log_refusal(error.to_string(), now_ns);
                }
            }
        }
    }

    /// While this process was suspended, the peer may have connected and disconnected several times.
    fn promote_pending(&mut self, node: NodeId, mut connection: Connection, now_ns: u64) {
        match connection.receive(now_ns) {
            Ok(event) => {
                self.session_up(node, connection, now_ns);
                if let Some((event, descriptors)) = event {
                    self.handle_event(node, event, descriptors, now_ns);
                }
            }
            Err(error) => info!("a pending control connection ended: {error}"),
        }
    }

    /// Detects stopped or frozen processes, which keep their connections open.
    fn watch(&mut self, now_ns: u64) {
        if now_ns < self.sampled_at_ns + SAMPLE_INTERVAL_NS {
            return;
        }
        self.sampled_at_ns = now_ns;
        for node in 0..self.peers.len() {
            let peer = self.peers[node].as_mut().filter(|peer| peer.connection.is_some());
            let watch = peer.and_then(|peer| peer.watch.as_mut());
            if let Some(halt_reason) = watch.and_then(ProcessWatch::halt_reason) {
                self.peer_down(NodeId(node as u8), halt_reason, now_ns);
            }
        }
    }

    /// Starts a session, and ends the former one with the same node.
    fn session_up(&mut self, node: NodeId, mut connection: Connection, now_ns: u64) {
        if self.peer(node).is_some_and(|peer| peer.connection.is_some()) {
            self.peer_down(node, "it has connected again", now_ns);
        }
        let Some(peer) = self.peer(node) else { return };
        info!(node = peer.name, "session opened");
        peer.watch = connection.transport.peer_pid().and_then(ProcessWatch::of);
        connection.session.set_kept(peer.kept);
        (peer.connection, peer.is_session_up, peer.reason) = (Some(connection), true, None);
        peer.retry_ns = RETRY_NS_MIN;
        self.updates.push(PeerUpdate::Up(node));
    }

    fn connect(&mut self, node: usize, now_ns: u64) {
        if !self.connects_to(node) {
            return;
        }
        let mut session = Session::new(self.own, Some(NodeId(node as u8)), self.ports.clone(), self.timers, now_ns);
        let Some(peer) = self.peers[node].as_mut().filter(|peer| peer.connection.is_none()) else { return };
        if now_ns < peer.retry_at_ns {
            return;
        }
        // The socket of a stopped process accepts connections into its backlog, and the process would find them all
        // when it resumes.
        if peer.watch.as_mut().and_then(ProcessWatch::halt_reason).is_some() {
            peer.retry_at_ns = now_ns + SAMPLE_INTERVAL_NS;
            return;
        }
        session.set_kept(peer.kept);
        peer.connection = Transport::connect(&peer.address).map(|transport| Connection {
            session,
            transport,
            unsent: None,
            is_readable: true,
        });
        peer.retry_at_ns = now_ns + peer.retry_ns;
        peer.retry_ns = (2 * peer.retry_ns).min(RETRY_NS_MAX);
    }

    fn receive(&mut self, node: usize, now_ns: u64) {
        let id = NodeId(node as u8);
        for _ in 0..PACKETS_PER_POLL {
            let Some(connection) = self.peers[node].as_mut().and_then(|peer| peer.connection.as_mut()) else { return };
            match connection.receive(now_ns) {
                Ok(Some((event, descriptors))) => self.handle_event(id, event, descriptors, now_ns),
                Ok(None) => return,
                Err(error) => return self.peer_down(id, &error.to_string(), now_ns),
            }
        }
    }

    fn handle_event(&mut self, node: NodeId, event: SessionEvent, descriptors: Vec<OwnedFd>, now_ns: u64) {
        match event {
            SessionEvent::Hello { .. } => {
                let connection = self.peer(node).and_then(|peer| peer.connection.take());
                if let Some(connection) = connection {
                    self.session_up(node, connection, now_ns);
                }
            }
            SessionEvent::Keepalive => {}
            SessionEvent::PortMtus(mtus_bytes) => self.updates.push(PeerUpdate::PortMtus(node, mtus_bytes)),
            SessionEvent::RoutesBegin { is_continued } => {
                self.updates.push(PeerUpdate::RoutesBegin(node, is_continued));
            }
            SessionEvent::RouteUpdate(changes) => self.updates.push(PeerUpdate::Routes(node, changes)),
            SessionEvent::InterconnectSetup(bytes) => match postcard::from_bytes::<SetupMessage>(&bytes) {
                Ok(SetupMessage::Offer(params)) => {
                    self.updates.push(PeerUpdate::Offer(node, Offer { params, descriptors }));
                }
                Ok(SetupMessage::Params(params)) => self.updates.push(PeerUpdate::Params(node, params)),
                Err(error) => self.peer_down(node, &format!("invalid interconnect setup message: {error}"), now_ns),
            },
        }
    }

    fn send_to(&mut self, node: usize, now_ns: u64, own: &Announcements) {
        let Some(connection) = self.peers[node].as_mut().and_then(|peer| peer.connection.as_mut()) else { return };
        if let Err(error) = connection.send(now_ns, own) {
            self.peer_down(NodeId(node as u8), &error.to_string(), now_ns);
        }
    }

    /// Ends a session, until the node connects again.
    pub fn peer_down(&mut self, node: NodeId, reason: &str, now_ns: u64) {
        let Some(peer) = self.peer(node) else { return };
        let was_up = peer.is_session_up;
        if let Some(connection) = peer.connection.as_ref().filter(|_| was_up) {
            peer.kept = connection.session.received();
        }
        (peer.connection, peer.is_session_up, peer.is_joined) = (None, false, false);
        peer.reason = Some(reason.to_owned());
        peer.retry_at_ns = peer.retry_at_ns.max(now_ns + RETRY_NS_MIN);
        if was_up {
            warn!(node = peer.name, "lost: {reason}");
            peer.losses += 1;
            peer.removals_pending += 1;
            peer.down_at_ns = now_ns;
            self.updates.push(PeerUpdate::Down(node));
        }
    }

    /// Ends all sessions, and opens none until [`Peers::release`].
    pub fn hold(&mut self, reason: &str, now_ns: u64) {
        self.send_cease(reason);
        (0..self.peers.len()).for_each(|node| self.peer_down(NodeId(node as u8), reason, now_ns));
        self.pending.clear();
        self.is_held = true;
    }

    /// Allows sessions to be opened again.
    pub fn release(&mut self) {
        (self.is_held, self.is_listener_readable) = (false, true);
    }

    /// The forwarding thread has confirmed that no packet is sent to the node any more.
    pub fn removed(&mut self, node: NodeId, now_ns: u64) {
        if let Some(peer) = self.peer(node) {
            peer.removals_pending = peer.removals_pending.saturating_sub(1);
            peer.withdrawn_ns = Some(now_ns.saturating_sub(peer.down_at_ns));
        }
    }

    /// Sends an offer to the interconnect of another node.
    pub fn offer(&mut self, node: NodeId, offer: Offer, now_ns: u64) {
        self.send_setup(node, &SetupMessage::Offer(offer.params), offer.descriptors, now_ns);
    }

    /// Sends the parameters of an accepted offer to the interconnect of another node.
    pub fn accept_offer(&mut self, node: NodeId, params: ConnectionParams, now_ns: u64) {
        self.send_setup(node, &SetupMessage::Params(params), Vec::new(), now_ns);
    }

    fn send_setup(&mut self, node: NodeId, setup: &SetupMessage, descriptors: Vec<OwnedFd>, now_ns: u64) {
        let bytes = postcard::to_stdvec(setup).unwrap_or_else(|error| panic!("numbers and addresses: {error}"));
        let Some(connection) = self.peer(node).and_then(|peer| peer.connection.as_mut()) else { return };
        if !connection.session.queue_setup(bytes, descriptors) {
            self.peer_down(node, "its setup queue is full", now_ns);
        }
    }

    /// Sends every peer the reason for which this node ends its sessions.
    pub fn send_cease(&mut self, reason: &str) {
        for connection in self.peers.iter_mut().flatten().filter_map(|peer| peer.connection.as_mut()) {
            // A peer that does not receive it sees the connection close. The kernel answers packets that this node has
            // not read with a reset, which would overtake the reason.
            let _ = connection.transport.send(&Session::cease(reason), &[]);
            for _ in 0..UNREAD_MAX {
                let Ok(Some(_)) = connection.transport.receive() else { break };
            }
        }
    }
}

#[cfg(test)]
mod tests;
