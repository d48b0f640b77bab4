//! Connections that lie in the windows, where the two programs store themselves. What is left to the proxies is to wake
//! sleepers, because a lifeline ends at its node's proxy, and to tell each program when the other is gone.
//!
//! ```text
//!   opener                                accepting end
//!   Open, with a place proposed ────────►   takes the place, connects to the server
//!           ◄──────────────────────────── Placed (or Opened: the place is not free, the proxies carry the bytes)
//!   Ring ◄──────────────────────────────► Ring: what was stored before is there to be seen
//!   Close ◄─────────────────────────────► Close: nobody stores any more at that end
//! ```
//!
//! A connection is over when both ends have closed. Only then can its place be another's.

use super::Engine;
use crate::connection::{Due, End, Phase};
use crate::frame::{Header, Kind};
use crate::{Key, Local};
use fabric::{Inbound, Outbound};

impl<I: Inbound, O: Outbound, L: Local> Engine<I, O, L> {
    /// Begins such a connection at the end that was asked for it.
    pub(super) fn begin_direct(&mut self, key: Key) {
        let Some(connection) = self.table.get(key) else { return };
        connection.phase = Phase::Open;
        connection.is_direct = true;
        connection.due.add(Due::OPENED);
        self.counters.connections_opened += 1;
        self.note_due(key);
        self.tell_direct_end(key);
    }

    /// The server's end lies where this one has proposed.
    pub(super) fn take_placed(&mut self, key: Key) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        if connection.phase != Phase::Opening {
            return Err("answered twice");
        }
        connection.phase = Phase::Open;
        connection.tuple = None;
        let is_proposed = connection.local.as_mut().is_none_or(L::placed);
        connection.is_direct = is_proposed;
        if is_proposed { Ok(()) } else { Err("placed where nothing was proposed") }
    }

    /// A frame of a connection in the windows.
    pub(super) fn take_direct_frame(&mut self, key: Key, header: &Header) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        match header.kind {
            Kind::Ring => {
                if let Some(local) = &mut connection.local {
                    local.call();
                }
                Ok(())
            }
            Kind::Close if connection.in_end == End::Closed => Err("ended twice"),
            Kind::Close => {
                connection.in_end = End::Closed;
                self.tell_direct_end(key);
                Ok(())
            }
            Kind::Reset => {
                self.take_reset(key);
                Ok(())
            }
            _ => Err("a frame with no meaning for a connection in the windows"),
        }
    }

    /// The program rings for the other one.
    pub(super) fn forward_ring(&mut self, key: Key) {
        let Some(connection) = self.table.get(key) else { return };
        if connection.is_direct && connection.in_end == End::None {
            connection.due.add(Due::CREDIT);
            self.note_due(key);
        }
    }

    /// This node's program is gone.
    pub(super) fn close_direct(&mut self, key: Key) {
        let Some(connection) = self.table.get(key) else { return };
        if connection.out_end != End::Closed {
            connection.out_end = End::Closed;
            connection.due.add(Due::CLOSE);
            self.note_due(key);
        }
    }

    /// The other node's program is gone; with this one too, the connection is over.
    fn tell_direct_end(&mut self, key: Key) {
        let Some(connection) = self.table.get(key) else { return };
        if connection.in_end != End::Closed {
            return;
        }
        if connection.out_end != End::Closed {
            if let Some(local) = &mut connection.local {
                local.peer_left();
            }
        } else if !connection.due.has(Due::CLOSE) {
            self.table.remove(key);
        }
    }
}

#[cfg(test)]
#[path = "direct_tests.rs"]
mod tests;
