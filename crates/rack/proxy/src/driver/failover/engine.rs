//! An engine that has lost its link.

use super::contact::{EngineId, FailoverContact};
use super::deadline::Deadline;
use super::error::FailoverError;
use super::handshake::{Handshake, HandshakeSocket};
use super::pump::{HeapInbound, HeapOutbound, Pump};
use super::report::FailoverReport;
use super::socket::means_unreachable;
use crate::counters::EngineCounters;
use crate::driver::tcp_endpoint::TcpEndpoint;
use crate::engine::{DetachedEngine, Engine};
use rustix::io::Errno;
use rustix::net::sockopt;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

pub(super) type HeapEngine = Box<Engine<HeapInbound, HeapOutbound, TcpEndpoint>>;

pub(super) enum State {
    /// Waits for the peer to connect.
    Accepting(DetachedEngine<TcpEndpoint>),
    /// Waits for the TCP connection, then for the peer's handshake.
    Connecting { detached: DetachedEngine<TcpEndpoint>, socket: HandshakeSocket, address: SocketAddr, has_sent: bool },
    /// Exchanges frames over TCP.
    Running(HeapEngine, Box<Pump>),
    /// Has no peer: delivers received bytes to the programs.
    Draining(HeapEngine),
}

/// A connection attempt that only shows whether the peer is reachable.
pub(super) struct ReachabilityProbe {
    pub(super) socket: OwnedFd,
    pub(super) address: SocketAddr,
}

/// An engine that has lost its link.
pub(super) struct FailoverEngine {
    pub(super) id: EngineId,
    pub(super) local: FailoverContact,
    pub(super) remote: FailoverContact,
    pub(super) state: State,
    /// The probe of an engine that waits for the peer.
    pub(super) probe: Option<ReachabilityProbe>,
    pub(super) deadline: Deadline,
    pub(super) is_overdue: bool,
}

impl FailoverEngine {
    /// Returns the engine, unless it is detached.
    pub(super) fn engine(&mut self) -> Option<&mut HeapEngine> {
        match &mut self.state {
            State::Running(engine, _) | State::Draining(engine) => Some(engine),
            State::Accepting(_) | State::Connecting { .. } => None,
        }
    }

    /// Returns the handshake that this node sends.
    pub(super) fn handshake(&self, own_slot: u8) -> Handshake {
        Handshake { id: EngineId { peer: own_slot, ..self.id }, token: self.remote.token }
    }

    /// Returns why the peer will not connect, if the probe shows it. A probe that succeeds is closed.
    pub(super) fn probe_result(&mut self) -> Option<FailoverError> {
        let ReachabilityProbe { socket, address } = self.probe.take()?;
        let outcome = sockopt::socket_error(&socket).and_then(|outcome| outcome);
        if outcome.is_ok() && rustix::net::getpeername(&socket).is_err() {
            // Not decided yet.
            self.probe = Some(ReachabilityProbe { socket, address });
            return None;
        }
        outcome.err().filter(|errno| means_unreachable(*errno)).map(|errno| FailoverError::Route(address, errno))
    }

    /// Continues a handshake. Returns whether the peer has been recognized.
    pub(super) fn is_peer_connected(&mut self, own_slot: u8) -> Result<bool, FailoverError> {
        let own = self.handshake(own_slot);
        let State::Connecting { socket, address, has_sent, .. } = &mut self.state else { return Ok(false) };
        if !*has_sent {
            let error = sockopt::socket_error(&socket.socket)?;
            error.map_err(|errno| FailoverError::Route(*address, errno))?;
            match own.send(&socket.socket) {
                Ok(()) => *has_sent = true,
                // Not connected yet.
                Err(FailoverError::Failed(Errno::AGAIN | Errno::NOTCONN)) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        let Some(handshake) = socket.receive()? else { return Ok(false) };
        let is_peer = handshake.id == self.id && handshake.token.is(&self.local.token);
        if is_peer { Ok(true) } else { Err(FailoverError::UnexpectedPeer) }
    }

    /// Attaches the engine to a TCP connection whose peer has been recognized: to `accepted`, or to its own.
    pub(super) fn run(self, accepted: Option<OwnedFd>) -> Self {
        let id = self.id;
        let state = match self.state {
            State::Accepting(detached) => running(id, detached, accepted),
            State::Connecting { detached, socket, .. } => running(id, detached, Some(socket.socket)),
            other => other,
        };
        Self { state, probe: None, ..self }
    }

    /// Gives up the peer: resets all connections, except those whose peer has closed and whose bytes must still be
    /// delivered. Also returns the number of resets.
    pub(super) fn drain(self) -> (Self, u64) {
        let mut engine = match self.state {
            State::Accepting(detached) | State::Connecting { detached, .. } => {
                Box::new(detached.attach(vec![Pump::new(None).1]))
            }
            State::Running(engine, _) | State::Draining(engine) => engine,
        };
        let resets = engine.lose_peer() as u64;
        (Self { state: State::Draining(engine), probe: None, ..self }, resets)
    }

    pub(super) fn poll(&mut self, now_ns: u64) -> Result<bool, FailoverError> {
        match &mut self.state {
            State::Accepting(_) | State::Connecting { .. } => Ok(false),
            State::Draining(engine) => Ok(engine.poll(now_ns)?.progressed),
            State::Running(engine, pump) => {
                let moved = pump.poll()?;
                let progressed = engine.poll(now_ns)?.progressed | pump.poll()? | moved;
                if pump.is_over() && !progressed { Err(FailoverError::Ended) } else { Ok(progressed) }
            }
        }
    }

    /// As [`Engine::prepare_sleep`]. A fault is found again by the next poll.
    pub(super) fn prepare_sleep(&mut self) -> bool {
        match &mut self.state {
            State::Accepting(_) | State::Connecting { .. } => true,
            State::Running(engine, pump) => engine.prepare_sleep() == Ok(true) && pump.may_sleep(),
            State::Draining(engine) => engine.prepare_sleep() == Ok(true),
        }
    }

    /// Returns whether nothing is left to do. Until the deadline the peer may resume more connections.
    pub(super) fn is_done(&self) -> bool {
        match &self.state {
            State::Accepting(_) | State::Connecting { .. } => false,
            State::Running(engine, pump) => self.is_overdue && engine.connections() == 0 && pump.is_flushed(),
            State::Draining(engine) => engine.connections() == 0,
        }
    }

    pub(super) fn report(&self) -> FailoverReport {
        let (connections, counters) = match &self.state {
            State::Accepting(detached) | State::Connecting { detached, .. } => {
                (detached.connections(), EngineCounters::default())
            }
            State::Running(engine, _) | State::Draining(engine) => (engine.connections(), *engine.counters()),
        };
        FailoverReport { connections_open: connections as u64, counters, ..FailoverReport::default() }
    }
}

/// Attaches connections to a TCP connection.
fn running(id: EngineId, detached: DetachedEngine<TcpEndpoint>, socket: Option<OwnedFd>) -> State {
    let (pump, lanes) = Pump::new(socket);
    let (peer, epoch, count) = (id.peer, id.epoch, detached.connections());
    if count > 0 {
        eprintln!("crosslane proxy: node {peer}: {count} connections of epoch {epoch} continue over kernel TCP");
    }
    State::Running(Box::new(detached.attach(vec![lanes])), Box::new(pump))
}
