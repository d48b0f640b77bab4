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
//!
//! A lost link takes nothing from the programs but their rings. So the connection is [`Held`], by this proxy or the
//! next one, and goes on over the next link: each end says `Held` for every one that it still has. What both have goes
//! on; what the peer does not know, it answers with `Reset`. Rings may have been lost, so both ends then ring their
//! programs. Ends that were told before are told again.

use super::Engine;
use crate::connection::{Connection, Due, End, Phase};
use crate::frame::{Header, Kind, Number};
use crate::{Key, Local};
use fabric::{Inbound, Outbound};

/// A connection in the windows without a link.
#[derive(Debug)]
pub struct Held<L> {
    /// What both proxies call it.
    pub number: Number,
    /// The program's end.
    pub local: L,
    /// When its link was lost: the last one over which the peer was heard of it.
    pub lost_ns: u64,
}

impl<I: Inbound, O: Outbound, L: Local> Engine<I, O, L> {
    /// The link is gone: what lies in the windows may go on over another one, by [`Engine::adopt`]. All else is reset.
    pub fn leave(&mut self, now_ns: u64) -> Vec<Held<L>> {
        let mut held = Vec::new();
        let is_there = |connection: &Connection<L>| connection.is_direct && connection.phase == Phase::Open;
        for key in self.table.keys() {
            let Some(connection) = self.table.get(key).filter(|connection| is_there(connection)) else { continue };
            let (number, lost_ns) =
                (connection.number, if connection.is_resuming { connection.lost_ns } else { now_ns });
            let local = self.table.remove(key).and_then(|connection| connection.local);
            held.extend(local.map(|local| Held { number, local, lost_ns }));
        }
        self.take_down();
        held
    }

    /// Goes on with a connection that was held. `make` gets the key under which the lifeline's news are to be told.
    /// `None`: there are too many connections, or another one has its number.
    pub fn adopt(&mut self, number: Number, lost_ns: u64, make: impl FnOnce(Key) -> L) -> Option<Key> {
        if self.table.is_full() || self.table.find(number).is_some() {
            return None;
        }
        let mut connection = Connection::new(number, Phase::Open, self.now_ns);
        (connection.is_direct, connection.is_resuming, connection.lost_ns) = (true, true, lost_ns);
        connection.due.add(Due::RESUME);
        let key = self.table.insert(number, connection);
        let local = make(key);
        self.table.get(key).expect("just entered").local = Some(local);
        self.note_due(key);
        Some(key)
    }

    /// Connections that the peer has not said to have, since the link was lost.
    pub fn unresumed(&mut self) -> usize {
        let keys = self.table.keys();
        keys.into_iter().filter(|key| self.table.get(*key).is_some_and(|connection| connection.is_resuming)).count()
    }

    /// Resets those whose link was lost before `lost_ns`, and of which the peer has not said since that it has them.
    pub fn reset_lost_before(&mut self, lost_ns: u64) -> usize {
        self.reset_where(|connection| connection.is_direct && connection.is_resuming && connection.lost_ns < lost_ns)
    }

    /// The first frame of a connection that was held.
    pub(super) fn take_frame_of_held(&mut self, key: Key, header: &Header) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        match (header.kind, &mut connection.local) {
            (Kind::Held, Some(local)) if local.place() == header.aux => {
                connection.is_resuming = false;
                local.call();
                self.note_due(key);
                Ok(())
            }
            (Kind::Held, _) => Err("held in another place"),
            (Kind::Reset, _) => {
                self.take_reset(key);
                Ok(())
            }
            _ => Err("a frame before it was said to be held"),
        }
    }

    /// Begins such a connection at the end that was asked for it.
    pub(super) fn begin_direct(&mut self, key: Key) {
        let Some(connection) = self.table.get(key) else { return };
        connection.phase = Phase::Open;
        connection.is_direct = true;
        connection.due.add(Due::OPENED);
        let number = connection.number;
        connection.local.as_mut().map(|local| local.placed(number));
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
        let number = connection.number;
        let is_proposed = connection.local.as_mut().is_none_or(|local| local.placed(number));
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

#[cfg(test)]
#[path = "held_tests.rs"]
mod held_tests;
