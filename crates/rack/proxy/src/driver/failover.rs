//! Connections that outlive their link: they continue over kernel TCP, between the same two proxies.
//!
//! ```text
//!   link lost ──► Accepting or Connecting ── proxies have recognized each other ──► Running ── last one over ──► gone
//!                          │                                                         │
//!                          └── no route, wrong peer, timeout ──► Draining ◄── TCP breaks: resets, delivers the rest
//! ```
//!
//! While a link is up, the two proxies tell each other through its windows where they listen, and a token by which they
//! recognize each other ([`contact`]). When the link is lost, the node with the higher slot connects to the one with
//! the lower slot. Each engine has a TCP connection of its own, which carries the frames that the engine exchanged in
//! its partitions. The frames are neither encrypted nor authenticated, as with any plain TCP connection of a program.
//! The accepting node meanwhile probes the peer's listener with a connection on which it sends nothing: if the listener
//! is unreachable or closed, the peer will not connect either.
//!
//! * `contact`: what the proxies tell each other while the link is up.
//! * `handshake`: how they recognize each other afterwards.
//! * `engine`: one engine, in the states above.
//! * `frame_decoder`: frames in a byte stream.
//! * `pump`: moves frames between an engine and a socket.

pub(in crate::driver) mod contact;
mod deadline;
mod engine;
mod error;
mod frame_decoder;
mod handshake;
mod pump;
mod report;
mod socket;

use super::dyn_engine::DynEngine;
use super::epoll_set::{EpollSet, EpollToken};
use crate::table::ConnectionKey;
use contact::{EngineId, FailoverContact, FailoverToken, LostEngine};
use deadline::Deadline;
use engine::{FailoverEngine, ReachabilityProbe, State};
use error::{FailoverError, RESUME_NS_MAX};
use handshake::HandshakeSocket;
use report::FailoverReport;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::SocketFlags;
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// How long a connecting process may take to send its handshake.
const HANDSHAKE_NS_MAX: u64 = 2_000_000_000;
/// Bound on accepted connections without a complete handshake.
const HANDSHAKES_MAX: usize = 64;

/// An accepted connection, whose peer is not recognized, or whose link this node has not lost yet.
struct PendingPeer {
    socket: HandshakeSocket,
    deadline: Deadline,
    /// The engine of a recognized peer, as long as this node still has the link.
    recognized: Option<EngineId>,
}

/// The engines of a thread that have lost their link, by the index that they had before.
pub(super) struct FailoverEngines {
    own_slot: u8,
    listener: Option<OwnedFd>,
    port: u16,
    engines: BTreeMap<usize, FailoverEngine>,
    pending: HashMap<u32, PendingPeer>,
    numbers: u32,
    past: HashMap<u8, FailoverReport>,
}

impl FailoverEngines {
    /// Listens at an address for the proxies of other nodes, if there is one.
    pub(super) fn new(own_slot: u8, address: Option<SocketAddr>) -> Self {
        let listener = address.and_then(|address| {
            let failed = |errno: Errno| {
                let remedy = match errno {
                    Errno::ADDRINUSE => "choose another failover_port",
                    _ => "give the node an address of this machine",
                };
                eprintln!("crosslane proxy: no failover by {address}: {errno}; {remedy}");
            };
            socket::listen(address, HANDSHAKES_MAX).map_err(failed).ok()
        });
        let port = listener.as_ref().map_or(0, |(_, port)| *port);
        let listener = listener.map(|(socket, _)| socket);
        let (engines, pending) = (BTreeMap::new(), HashMap::new());
        Self { own_slot, listener, port, engines, pending, numbers: 0, past: HashMap::new() }
    }

    pub(super) fn listener(&self) -> Option<BorrowedFd<'_>> {
        self.listener.as_ref().map(AsFd::as_fd)
    }

    /// Returns a contact with a new token, for one engine of a link.
    pub(super) fn new_contact(&self) -> Option<FailoverContact> {
        FailoverToken::new().map(|token| FailoverContact { port: self.port, token })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.engines.is_empty()
    }

    pub(super) fn has(&self, index: usize) -> bool {
        self.engines.contains_key(&index)
    }

    pub(super) fn indexes(&self) -> Vec<usize> {
        self.engines.keys().copied().collect()
    }

    /// Returns the index of the engine that lost its link first.
    pub(super) fn oldest(&self) -> Option<usize> {
        self.engines.iter().min_by_key(|(_, engine)| engine.deadline).map(|(index, _)| *index)
    }

    /// Drops an engine, which resets its connections.
    pub(super) fn drop_engine(&mut self, index: usize) {
        if let Some(engine) = self.engines.remove(&index) {
            *self.past.entry(engine.id.peer).or_default() += engine.report();
        }
    }

    pub(super) fn clear(&mut self) {
        self.engines.clear();
        self.pending.clear();
    }

    /// Begins to resume the connections of an engine that has lost its link, with a peer at this address.
    pub(super) fn begin(&mut self, index: usize, lost: LostEngine, peer: IpAddr, epoll: &EpollSet) {
        let LostEngine { id, local, remote, detached } = lost;
        self.past.entry(id.peer).or_default().connections_total += detached.connections() as u64;
        let deadline = Deadline::after(RESUME_NS_MAX);
        let engine = |state| FailoverEngine { id, local, remote, state, probe: None, deadline, is_overdue: false };
        let address = SocketAddr::new(peer, remote.port);
        let connects = self.own_slot > id.peer;
        if !connects || remote.port == 0 {
            self.engines.insert(index, engine(State::Accepting(detached)));
            return match self.port {
                _ if connects => self.abandon_peer(index, &FailoverError::PeerNotListening),
                0 => self.abandon_peer(index, &FailoverError::NotListening),
                _ => {
                    self.accept_early_peer(index, epoll);
                    self.probe(index, address, epoll);
                }
            };
        }
        match socket::connect(address, index, epoll) {
            Ok(socket) => {
                let socket = HandshakeSocket::new(socket);
                let state = State::Connecting { detached, socket, address, has_sent: false };
                self.engines.insert(index, engine(state));
            }
            Err(errno) => {
                self.engines.insert(index, engine(State::Accepting(detached)));
                self.abandon_peer(index, &FailoverError::Route(address, errno));
            }
        }
    }

    /// Probes whether a peer that has to connect is reachable.
    fn probe(&mut self, index: usize, address: SocketAddr, epoll: &EpollSet) {
        let Some(engine) = self.engines.get_mut(&index) else { return };
        if address.port() == 0 || !matches!(engine.state, State::Accepting(_)) {
            return;
        }
        match socket::connect(address, index, epoll) {
            Ok(socket) => engine.probe = Some(ReachabilityProbe { socket, address }),
            Err(errno) if socket::means_unreachable(errno) => {
                self.abandon_peer(index, &FailoverError::Route(address, errno));
            }
            Err(_) => {}
        }
    }

    /// Accepts the peer of an engine if it has connected before this node lost the link.
    fn accept_early_peer(&mut self, index: usize, epoll: &EpollSet) {
        let Some(id) = self.engines.get(&index).map(|engine| engine.id) else { return };
        let early = self.pending.iter().find(|(_, pending)| pending.recognized == Some(id));
        if let Some(pending) = early.map(|(number, _)| *number).and_then(|number| self.pending.remove(&number)) {
            self.accept_peer(index, pending.socket.socket, epoll);
        }
    }

    /// Accepts connections at the listener.
    pub(super) fn accept(&mut self, epoll: &EpollSet) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        while let Some(Ok(socket)) = self.listener.as_ref().map(|listener| rustix::net::accept_with(listener, flags)) {
            self.numbers = self.numbers.wrapping_add(1);
            let token = EpollToken::FailoverHandshake(self.numbers);
            if epoll.add(&socket, token, EventFlags::IN).is_ok() && self.pending.len() < HANDSHAKES_MAX {
                let deadline = Deadline::after(HANDSHAKE_NS_MAX);
                let pending = PendingPeer { socket: HandshakeSocket::new(socket), deadline, recognized: None };
                self.pending.insert(self.numbers, pending);
            }
        }
    }

    /// Receives the handshake of an accepted connection. `live` returns the token of an engine whose link is up.
    pub(super) fn receive_handshake(
        &mut self,
        number: u32,
        live: impl Fn(EngineId) -> Option<FailoverToken>,
        epoll: &EpollSet,
    ) {
        let Some(mut pending) = self.pending.remove(&number) else { return };
        let handshake = match pending.socket.receive() {
            // A recognized proxy has closed, or sends more than it may.
            _ if pending.recognized.is_some() => return,
            Ok(None) => return drop(self.pending.insert(number, pending)),
            Ok(Some(handshake)) => handshake,
            Err(_) => return,
        };
        let is_meant =
            |engine: &FailoverEngine| engine.id == handshake.id && matches!(engine.state, State::Accepting(_));
        match self.engines.iter().find(|(_, engine)| is_meant(engine)) {
            Some((&index, engine)) if handshake.token.is(&engine.local.token) => {
                self.accept_peer(index, pending.socket.socket, epoll);
            }
            Some(_) => {}
            None if live(handshake.id).is_some_and(|token| handshake.token.is(&token)) => {
                (pending.recognized, pending.deadline) = (Some(handshake.id), Deadline::after(RESUME_NS_MAX));
                self.pending.insert(number, pending);
            }
            None => {}
        }
    }

    /// Answers the handshake of a recognized peer, and continues over its connection.
    fn accept_peer(&mut self, index: usize, socket: OwnedFd, epoll: &EpollSet) {
        let Some(engine) = self.engines.get(&index) else { return };
        let registered = socket::register(&socket, index, epoll).map_err(FailoverError::from);
        match engine.handshake(self.own_slot).send(&socket).and(registered) {
            Ok(()) => self.run(index, Some(socket)),
            Err(error) => self.abandon_peer(index, &error),
        }
    }

    /// Continues over a TCP connection whose peer has been recognized: an accepted one, or the engine's own.
    fn run(&mut self, index: usize, accepted: Option<OwnedFd>) {
        if let Some(engine) = self.engines.remove(&index) {
            self.engines.insert(index, engine.run(accepted));
        }
    }

    /// Handles an event of an engine's socket.
    pub(super) fn socket_ready(&mut self, index: usize) {
        let Some(engine) = self.engines.get_mut(&index) else { return };
        match &mut engine.state {
            State::Running(_, pump) => pump.socket_ready(),
            State::Connecting { .. } => match engine.is_peer_connected(self.own_slot) {
                Ok(true) => self.run(index, None),
                Ok(false) => {}
                Err(error) => self.abandon_peer(index, &error),
            },
            State::Accepting(_) => {
                if let Some(error) = engine.probe_result() {
                    self.abandon_peer(index, &error);
                }
            }
            State::Draining(_) => {}
        }
    }

    /// Polls all engines. Returns whether there was progress.
    pub(super) fn poll(&mut self, now_ns: u64) -> bool {
        let mut progressed = false;
        for index in self.indexes() {
            let Some(engine) = self.engines.get_mut(&index) else { continue };
            match engine.poll(now_ns) {
                Ok(has_progressed) => progressed |= has_progressed,
                Err(error) => self.abandon_peer(index, &error),
            }
        }
        progressed
    }

    /// Ends what has reached its deadline, and drops engines that are done.
    pub(super) fn check_deadlines(&mut self) {
        self.pending.retain(|_, pending| !pending.deadline.has_passed());
        for index in self.indexes() {
            let Some(engine) = self.engines.get_mut(&index) else { continue };
            if engine.deadline.has_passed() && !std::mem::replace(&mut engine.is_overdue, true) {
                match &mut engine.state {
                    State::Running(running, _) => {
                        self.past.entry(engine.id.peer).or_default().resets += running.reset_unresumed() as u64;
                    }
                    State::Draining(_) => {}
                    State::Accepting(_) | State::Connecting { .. } => self.abandon_peer(index, &FailoverError::Timeout),
                }
            }
            if self.engines.get(&index).is_some_and(FailoverEngine::is_done) {
                self.drop_engine(index);
            }
        }
    }

    /// Gives up the peer of an engine, which cannot be reached, or not any more.
    fn abandon_peer(&mut self, index: usize, error: &FailoverError) {
        let Some(engine) = self.engines.remove(&index) else { return };
        let peer = engine.id.peer;
        let (engine, resets) = engine.drain();
        self.past.entry(peer).or_default().resets += resets;
        if resets > 0 {
            eprintln!("crosslane proxy: node {peer}: {resets} connections of a lost link are reset: {error}");
        }
        self.engines.insert(index, engine);
    }

    /// Handles an event of a connection's descriptors.
    pub(super) fn endpoint_ready(&mut self, index: usize, key: ConnectionKey) {
        match self.engines.get_mut(&index).map(|engine| &mut engine.state) {
            Some(State::Accepting(detached) | State::Connecting { detached, .. }) => detached.note_events(key),
            Some(State::Running(engine, _) | State::Draining(engine)) => engine.endpoint_ready(key),
            None => {}
        }
    }

    /// Returns the engine at an index and its peer, unless the engine is detached.
    pub(super) fn engine(&mut self, index: usize) -> Option<(u8, &mut (dyn DynEngine + 'static))> {
        let engine = self.engines.get_mut(&index)?;
        let peer = engine.id.peer;
        engine.engine().map(|engine| (peer, &mut **engine as &mut (dyn DynEngine + 'static)))
    }

    pub(super) fn park_all(&mut self) {
        self.engines.values_mut().filter_map(FailoverEngine::engine).for_each(|engine| engine.park_all());
    }

    pub(super) fn end_sleep(&mut self) {
        self.engines.values_mut().filter_map(FailoverEngine::engine).for_each(|engine| engine.end_sleep());
    }

    /// Prepares all engines for sleep. Returns `false` if one has work.
    pub(super) fn prepare_sleep(&mut self) -> bool {
        let mut may_sleep = true;
        for engine in self.engines.values_mut() {
            may_sleep &= engine.prepare_sleep();
        }
        may_sleep
    }

    /// Returns the counters, by peer.
    pub(super) fn report(&self) -> HashMap<u8, FailoverReport> {
        let mut all = self.past.clone();
        for engine in self.engines.values() {
            *all.entry(engine.id.peer).or_default() += engine.report();
        }
        all
    }
}
