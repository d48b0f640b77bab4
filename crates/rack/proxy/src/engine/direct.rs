//! Direct connections, whose programs store into the windows themselves. The proxies only wake sleepers, because a
//! lifeline ends at its node's proxy, and tell each program when the other one has closed.
//!
//! ```text
//!   opener                              accepting end
//!   Open, with a span proposed ─────────►   accepts the span, connects to the server
//!           ◄──────────────────────────── Placed (or Opened: the span is in use, the proxies forward the bytes)
//!   Ring ◄──────────────────────────────► Ring: earlier stores are visible
//!   Close ◄─────────────────────────────► Close: the program there stores no more
//! ```
//!
//! A connection is over when both ends have closed. Only then may its span be used for another connection.
//!
//! When the link is lost, the programs lose only the rings. This proxy or its successor therefore keeps a direct
//! connection as a [`SuspendedConnection`] and resumes it over the next link: each end sends `ResumeDirect` for every
//! connection that it still has. A connection that both ends have is resumed; one that the peer does not know is
//! answered with `Reset`. Rings may have been lost, so both ends then ring their programs. Programs that knew of a
//! close are notified again.

use super::state::Engine;
use crate::connection::{Connection, Due, Phase, StreamEnd};
use crate::frame::{ConnectionNumber, FrameHeader, FrameKind};
use crate::local::LocalEndpoint;
use crate::table::ConnectionKey;
use fabric::{Inbound, Outbound};

/// A direct connection without a link.
#[derive(Debug)]
pub struct SuspendedConnection<L> {
    /// The number by which both proxies know it.
    pub number: ConnectionNumber,
    /// The proxy's endpoint.
    pub local: L,
    /// When its link was lost: the last link over which the peer mentioned the connection.
    pub lost_ns: u64,
}

impl<I: Inbound, O: Outbound, L: LocalEndpoint> Engine<I, O, L> {
    /// The link is lost: returns the direct connections, which [`Engine::resume_direct`] can resume over another link.
    /// Resets all others.
    pub fn suspend(&mut self, now_ns: u64) -> Vec<SuspendedConnection<L>> {
        let mut suspended = Vec::new();
        let is_there = |connection: &Connection<L>| connection.is_direct && connection.phase == Phase::Open;
        for key in self.table.keys() {
            let Some(connection) = self.table.get(key).filter(|connection| is_there(connection)) else { continue };
            let (number, lost_ns) =
                (connection.number, if connection.is_resuming { connection.lost_ns } else { now_ns });
            let local = self.table.remove(key).and_then(|connection| connection.local);
            suspended.extend(local.map(|local| SuspendedConnection { number, local, lost_ns }));
        }
        self.take_down();
        suspended
    }

    /// Resumes a suspended connection. `make` receives the key for [`Engine::lifeline_ready`]. Returns `None` if there
    /// are too many connections, or if another one has its number.
    pub fn resume_direct(
        &mut self,
        number: ConnectionNumber,
        lost_ns: u64,
        make: impl FnOnce(ConnectionKey) -> L,
    ) -> Option<ConnectionKey> {
        if self.table.is_full() || self.table.find(number).is_some() {
            return None;
        }
        let mut connection = Connection::new(number, Phase::Open, self.now_ns);
        (connection.is_direct, connection.is_resuming, connection.lost_ns) = (true, true, lost_ns);
        connection.due.add(Due::RESUME);
        let key = self.table.insert(number, connection);
        let local = make(key);
        self.table.get(key).expect("inserted above").local = Some(local);
        self.queue_control(key);
        Some(key)
    }

    /// Returns the number of connections that the peer has not confirmed since the link was lost.
    pub fn unresumed(&mut self) -> usize {
        let keys = self.table.keys();
        keys.into_iter().filter(|key| self.table.get(*key).is_some_and(|connection| connection.is_resuming)).count()
    }

    /// Resets the suspended connections whose link was lost before `lost_ns` and that the peer has not confirmed since.
    pub fn reset_lost_before(&mut self, lost_ns: u64) -> usize {
        self.reset_where(|connection| connection.is_direct && connection.is_resuming && connection.lost_ns < lost_ns)
    }

    /// Handles the first frame for a suspended connection.
    pub(super) fn handle_suspended_frame(
        &mut self,
        key: ConnectionKey,
        header: &FrameHeader,
    ) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        match (header.kind, &mut connection.local) {
            (FrameKind::ResumeDirect, Some(local)) if local.span_index() == header.aux => {
                connection.is_resuming = false;
                local.wake();
                self.queue_control(key);
                Ok(())
            }
            (FrameKind::ResumeDirect, _) => Err("a resumption with another span"),
            (FrameKind::Reset, _) => {
                self.handle_reset(key);
                Ok(())
            }
            _ => Err("a frame before the resumption"),
        }
    }

    /// Begins a direct connection at the accepting end.
    pub(super) fn begin_direct(&mut self, key: ConnectionKey) {
        let Some(connection) = self.table.get(key) else { return };
        connection.phase = Phase::Open;
        connection.is_direct = true;
        connection.due.add(Due::OPENED);
        let number = connection.number;
        connection.local.as_mut().map(|local| local.move_to_span(number));
        self.counters.connections_opened += 1;
        self.queue_control(key);
        self.deliver_direct_end(key);
    }

    /// The peer has accepted the span that this end proposed.
    pub(super) fn handle_placed(&mut self, key: ConnectionKey) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        if connection.phase != Phase::Opening {
            return Err("a second answer");
        }
        connection.phase = Phase::Open;
        connection.open_payload = None;
        let number = connection.number;
        let is_proposed = connection.local.as_mut().is_none_or(|local| local.move_to_span(number));
        connection.is_direct = is_proposed;
        if is_proposed { Ok(()) } else { Err("a direct connection without a proposed span") }
    }

    /// Handles a frame for a direct connection.
    pub(super) fn handle_direct_frame(&mut self, key: ConnectionKey, header: &FrameHeader) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        match header.kind {
            FrameKind::Ring => {
                if let Some(local) = &mut connection.local {
                    local.wake();
                }
                Ok(())
            }
            FrameKind::Close if connection.in_end == StreamEnd::Closed => Err("a second end"),
            FrameKind::Close => {
                connection.in_end = StreamEnd::Closed;
                self.deliver_direct_end(key);
                Ok(())
            }
            FrameKind::Reset => {
                self.handle_reset(key);
                Ok(())
            }
            _ => Err("a frame that direct connections do not have"),
        }
    }

    /// Forwards a ring of this node's program to the peer.
    pub(super) fn forward_ring(&mut self, key: ConnectionKey) {
        let Some(connection) = self.table.get(key) else { return };
        if connection.is_direct && connection.in_end == StreamEnd::None {
            connection.due.add(Due::CREDIT);
            self.queue_control(key);
        }
    }

    /// This node's program has closed.
    pub(super) fn close_direct(&mut self, key: ConnectionKey) {
        let Some(connection) = self.table.get(key) else { return };
        if connection.out_end != StreamEnd::Closed {
            connection.out_end = StreamEnd::Closed;
            connection.due.add(Due::CLOSE);
            self.queue_control(key);
        }
    }

    /// Tells this node's program that the other one has closed. The connection is over if both have closed.
    fn deliver_direct_end(&mut self, key: ConnectionKey) {
        let Some(connection) = self.table.get(key) else { return };
        if connection.in_end != StreamEnd::Closed {
            return;
        }
        if connection.out_end != StreamEnd::Closed {
            if let Some(local) = &mut connection.local {
                local.peer_closed();
            }
        } else if !connection.due.has(Due::CLOSE) {
            self.table.remove(key);
        }
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod suspended_tests;
