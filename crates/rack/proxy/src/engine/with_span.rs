//! Connections whose bytes the proxies forward until their programs move them to a span of the windows, and whenever
//! these move them back: the path of each direction is the programs' own affair (crate `path`).
//!
//! ```text
//!   opener                              accepting end
//!   Open, with a span proposed ─────────►   accepts the span, connects to the server
//!           ◄──────────────────── OpenedWithSpan (or Opened: the span is in use)
//!   Ring ◄──────────────────────────────► Ring: a program has stored, and the other one sleeps
//!   Left ◄──────────────────────────────► Left: no process holds the bell of a program any more
//! ```
//!
//! Everything else is as for other connections that are forwarded. In particular, their ends are those of the two
//! kernel TCP connections.

use super::state::Engine;
use crate::connection::{Due, Phase};
use crate::frame::FrameKind;
use crate::local::LocalEndpoint;
use crate::table::ConnectionKey;
use fabric::{Inbound, Outbound};

impl<I: Inbound, O: Outbound, L: LocalEndpoint> Engine<I, O, L> {
    /// The peer has opened the connection and accepted the span that this end has proposed.
    pub(super) fn handle_opened_with_span(&mut self, key: ConnectionKey, limit: u32) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        if connection.phase == Phase::Opening {
            let number = connection.number;
            connection.has_span = connection.local.as_mut().is_some_and(|local| local.begin_with_span(number));
            if connection.local.is_some() && !connection.has_span {
                return Err("a span that was not proposed");
            }
        }
        self.handle_opened(key, limit)
    }

    /// Forwards what the program has reported by its bell. Returns whether that is all that has happened to it.
    pub(super) fn forward_bell(&mut self, key: ConnectionKey) -> bool {
        let Some(connection) = self.table.get(key).filter(|connection| connection.has_span) else { return false };
        let Some(local) = &mut connection.local else { return false };
        let (has_rung, has_left) = (local.take_ring(), local.take_left());
        for (is_due, due) in [(has_left, Due::LEFT), (has_rung, Due::RING)] {
            if is_due && connection.phase == Phase::Open {
                connection.due.add(due);
            }
        }
        let is_all =
            has_rung && !has_left && connection.undelivered.is_empty() && !local.may_have_input() && !local.is_broken();
        if has_rung || has_left {
            self.queue_control(key);
        }
        is_all
    }

    /// Handles a frame that only connections with a span have.
    pub(super) fn handle_span_frame(&mut self, key: ConnectionKey, kind: FrameKind) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        if !connection.has_span {
            return Err("a frame of a connection with a span");
        }
        match (kind, &mut connection.local) {
            (FrameKind::Left, Some(local)) => local.peer_left(),
            (_, Some(local)) => local.wake(),
            (_, None) => {}
        }
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests;
