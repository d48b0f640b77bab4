//! Leaving a link that is lost, and going on elsewhere.
//!
//! With failover, who says `Refused`, `Close` or `Reset` remembers the connection until the peer has answered `Gone`,
//! and bytes are kept until the peer's credit says that its program has them. So when the link is lost, each end knows
//! of every connection that the other one may know of. On the new way each says `Resume` for all of them: the position
//! up to which it has received. What the peer does not have is then sent again, and so is the end, and the good-bye.
//! Nothing else of a connection is said before the peer has said where it stands.
//!
//! | this end | says | the peer, if it does not know it |
//! |---|---|---|
//! | has opened, and was not answered | `Open`, again | opens it: it never heard of it |
//! | anything else | `Resume` | `Reset`: it was told good-bye, and has forgotten it |

use super::{CONNECTION_RESET, Engine, Event};
use crate::connection::{Connection, Due, End, Phase, Place};
use crate::frame::{HEADER_BYTES, Header, Kind, Resumption};
use crate::placement::Observed;
use crate::table::Table;
use crate::{Class, Counters, Key, Local, Port, Settings};
use fabric::{Inbound, Outbound};
use lane::Chunk;
use std::collections::VecDeque;

/// The connections of an engine that has lost its link. Nothing happens to them until they are attached elsewhere.
#[derive(Debug)]
pub struct Detached<L> {
    settings: Settings,
    table: Table<Connection<L>>,
    numbers_given: u32,
    events: VecDeque<Event<L>>,
    counters: Counters,
    now_ns: u64,
}

impl<L: Local> Detached<L> {
    /// Connections that are not over.
    pub fn connections(&self) -> usize {
        self.table.len()
    }

    /// What the engine has done; it begins to count anew.
    pub fn take_counters(&mut self) -> Counters {
        std::mem::take(&mut self.counters)
    }

    /// The lifeline of a connection has something to say: it is heard, and acted upon later.
    pub fn hear(&mut self, key: Key) {
        if let Some(local) = self.table.get(key).and_then(|connection| connection.local.as_mut()) {
            local.hear();
        }
    }

    /// Goes on over fresh partitions, at whose other end the peer does the same.
    ///
    /// # Panics
    /// As [`Engine::new`], and where bytes are not kept ([`Settings::is_failover`]).
    pub fn attach<I: Inbound, O: Outbound>(self, ports: Vec<Port<I, O>>) -> Engine<I, O, L> {
        assert!(self.settings.is_failover, "an engine without failover is attached again");
        let mut engine = Engine {
            table: self.table,
            numbers_given: self.numbers_given,
            events: self.events,
            counters: self.counters,
            now_ns: self.now_ns,
            ..Engine::new(self.settings, ports)
        };
        for key in engine.table.keys() {
            engine.begin_resuming(key);
        }
        engine
    }
}

impl<I: Inbound, O: Outbound, L: Local> Engine<I, O, L> {
    /// Leaves a link that is lost, and its partitions, with all connections.
    pub fn detach(mut self) -> Detached<L> {
        self.ring_locals();
        Detached {
            settings: self.settings,
            table: self.table,
            numbers_given: self.numbers_given,
            events: self.events,
            counters: self.counters,
            now_ns: self.now_ns,
        }
    }

    /// Whether the peer has said of every connection where it stands.
    pub fn is_resumed(&mut self) -> bool {
        self.table.keys().into_iter().all(|key| self.table.get(key).is_none_or(|connection| !connection.is_resuming))
    }

    /// Resets the connections of which the peer has not said where it stands: it has had its time. Answers how many.
    pub fn reset_unresumed(&mut self) -> usize {
        self.reset_where(|connection| connection.is_resuming)
    }

    /// The other way is lost too: all connections are reset, but those whose peer has said all it had to say: what came
    /// is still handed to their programs, in further turns. Answers how many.
    pub fn lose_peer(&mut self) -> usize {
        self.orphans.clear();
        self.reset_where(|connection| connection.in_end != End::Closed)
    }

    pub(super) fn reset_where(&mut self, is_meant: impl Fn(&Connection<L>) -> bool) -> usize {
        let mut resets = 0;
        for key in self.table.keys() {
            let Some(connection) = self.table.get(key).filter(|connection| is_meant(connection)) else { continue };
            let local = connection.local.take();
            self.table.remove(key);
            // What is over had no program any more.
            resets += usize::from(local.is_some());
            local.map(L::reset).unwrap_or_default();
        }
        self.counters.resets += resets as u64;
        resets
    }

    fn begin_resuming(&mut self, key: Key) {
        let now_ns = self.now_ns;
        let Some(connection) = self.table.get(key) else { return };
        (connection.is_in_polled, connection.is_in_control, connection.is_touched) = (false, false, false);
        (connection.class, connection.class_next, connection.in_class) =
            (Class::Latency, Class::Latency, Class::Latency);
        (connection.observed, connection.is_sparse) = (Observed::new(now_ns), true);
        let place = std::mem::replace(&mut connection.place, Place::Resting);
        if let Some(local) = connection.local.as_mut().filter(|_| place == Place::Parked) {
            local.unpark();
        }
        if connection.in_end == End::Closed {
            // The peer has forgotten it. What came is still to be handed over.
            connection.due = Due::default();
            return self.poll_again(key);
        }
        connection.is_resuming = true;
        connection.due = if connection.phase == Phase::Opening { Due::OPEN } else { Due::RESUME };
        self.note_due(key);
    }

    /// A good-bye of the peer has come: it may forget the connection.
    pub(super) fn say_gone(&mut self, key: Key) {
        if let Some(connection) = self.table.get(key).filter(|_| self.settings.is_failover) {
            self.orphans.push_back(Header::control(connection.number, Kind::Gone, 0));
        }
    }

    /// Frees what the peer keeps of a connection that goes quiet.
    pub(super) fn acknowledge(&mut self, key: Key) {
        let credit_bytes = u64::from(self.settings.credit_bytes);
        let Some(connection) = self.table.get(key).filter(|_| self.settings.is_failover) else { return };
        let kept_bytes = connection.delivered().saturating_add(credit_bytes).saturating_sub(connection.granted);
        if kept_bytes >= credit_bytes / KEPT_PARTS && connection.phase == Phase::Open && connection.in_end == End::None
        {
            connection.due.add(Due::CREDIT);
            self.note_due(key);
        }
    }

    /// Says good-bye, once everything before it is said again.
    pub(super) fn say_farewell(&mut self, key: Key) {
        let Some(connection) = self.table.get(key) else { return };
        if connection.phase == Phase::Over && connection.unsent_bytes() == 0 {
            let farewell = connection.farewell;
            connection.due.add(farewell);
            self.note_due(key);
        }
    }

    /// What needs no order: the peer's word on a connection of which one of the two has said good-bye. Whether that is
    /// all there is to the frame.
    pub(super) fn take_word_of_end(&mut self, key: Key, kind: Kind) -> bool {
        let Some(connection) = self.table.get(key) else { return false };
        if connection.in_end == End::Closed {
            self.counters.frames_late += 1;
            if matches!(kind, Kind::Resume | Kind::Close) {
                self.say_gone(key);
            }
            return true;
        }
        let is_answer = kind == Kind::Gone && connection.phase == Phase::Over;
        if is_answer {
            self.table.remove(key);
        }
        is_answer
    }

    /// A frame of a connection of which this end has said, or will say, good-bye.
    pub(super) fn take_late_frame(&mut self, key: Key, port: usize, header: &Header, chunk: Chunk) {
        if header.kind == Kind::Move {
            // Else what follows would be looked for where it is not.
            let _ = self.take_move(key, port, header.aux);
            return;
        }
        let Some(connection) = self.table.get(key).filter(|_| self.settings.is_failover) else { return };
        let is_resuming = connection.is_resuming;
        match header.kind {
            // Both say good-bye. The peer may not get to hear this end's, which counts as the answer to its own.
            Kind::Refused | Kind::Close | Kind::Reset => {
                self.say_gone(key);
                self.table.remove(key);
            }
            Kind::Open | Kind::Opened | Kind::Resume
                if is_resuming && self.take_frame_resuming(key, port, header, chunk).is_err() =>
            {
                self.table.remove(key);
            }
            _ => {}
        }
    }

    /// The first frame of a connection on a new way.
    pub(super) fn take_frame_resuming(
        &mut self,
        key: Key,
        port: usize,
        header: &Header,
        chunk: Chunk,
    ) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        let is_opening = connection.phase == Phase::Opening;
        let at_start = Resumption { limit: header.aux, has_end: false };
        match header.kind {
            Kind::Resume => {
                let mut bytes = [0; Resumption::BYTES];
                self.ports[port].from.span(chunk).part(HEADER_BYTES, bytes.len()).read(&mut bytes);
                self.resume(key, header.aux, Resumption::decode(&bytes).ok_or("a resumption with more to say")?)
            }
            // The peer does not know that it was answered.
            Kind::Open if header.connection.opener() != self.settings.side => {
                if connection.phase == Phase::Open || connection.farewell == Due::CLOSE {
                    connection.due.add(Due::OPENED);
                }
                self.resume(key, 0, at_start)
            }
            // The peer had never heard of it.
            Kind::Opened if header.connection.opener() == self.settings.side => {
                self.resume(key, 0, at_start)?;
                if is_opening { self.take_opened(key, header.aux) } else { Ok(()) }
            }
            Kind::Refused if is_opening => self.take_refused(key, header.aux),
            Kind::Reset => {
                self.take_reset(key);
                Ok(())
            }
            _ => Err("a frame before it was resumed"),
        }
    }

    /// A connection that this end does not know was told good-bye, and the peer has not heard the answer. Or it lay in
    /// the windows, and was lost with this node's proxy.
    pub(super) fn take_unknown_resumption(&mut self, header: &Header) {
        if header.kind == Kind::Held || (header.kind == Kind::Resume && self.settings.is_failover) {
            self.orphans.push_back(Header::control(header.connection, Kind::Reset, CONNECTION_RESET));
        }
    }

    /// The peer has the bytes before `received`; the others are sent again.
    fn resume(&mut self, key: Key, received: u32, theirs: Resumption) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        if connection.phase == Phase::Over && connection.farewell != Due::CLOSE {
            connection.is_resuming = false;
            self.say_farewell(key);
            return Ok(());
        }
        let received = connection.retained.position(received).filter(|position| *position <= connection.sent);
        let received = received.ok_or("resumed from a position that it cannot have")?;
        if theirs.has_end && connection.out_end == End::None {
            return Err("an end that was never said");
        }
        let limit = Connection::<L>::position_after(connection.sent, theirs.limit);
        let limit = limit.filter(|limit| *limit >= connection.limit).ok_or("credit taken back")?;
        (connection.limit, connection.sent, connection.is_resuming) = (limit, received, false);
        connection.retained.forget_before(received);
        if connection.out_end == End::Finished && !theirs.has_end {
            // Found again at the end of what is sent again.
            connection.out_end = End::None;
        }
        self.note_due(key);
        self.queue(key);
        Ok(())
    }
}

/// A quiet connection's peer keeps less than this part of the credit.
const KEPT_PARTS: u64 = 64;
