//! Frames to the peer, and whose turn it is.
//!
//! A turn puts all frames that are ready into the partitions, and then shows those of a partition together: one fence
//! and one store, where each frame would cost as much. Nothing waits for more to come: the first frame of a connection
//! is shown at once where nobody else waits for its turn, and what is there already before anything that takes long:
//! the copy of a long frame, or looks at many connections.

use super::{Engine, Fault, Port};
use crate::connection::{self, Connection, Due, Phase, Place};
use crate::frame::{HEADER_BYTES, Header, Kind, PAYLOAD_BYTES_MAX};
use crate::{Counters, Input, Key, Local, Tuple};
use fabric::{Inbound, Outbound};

/// Connections that send in a turn, by class: then what has arrived meanwhile is looked at.
const VISITS_MAX: [usize; 2] = [16, 2];
/// Turns that those with little to say have before one with much.
const FRESH_RUN_MAX: u32 = 8;
/// Frames of a slice at most: short ones cost by their number.
const FRAMES_PER_SLICE_MAX: u64 = 16;
/// A slice of a connection that has a crowded engine to itself: all that it may have under way by default. Slices are
/// there for the others; where parties wait for each other's processors, short ones take two to three times as long.
const LONE_SLICE_BYTES: usize = 256 << 10;
/// Before a frame with so many bytes is copied, the peer is shown what is there: the copy takes longer than the fence.
const LONG_FRAME_BYTES: usize = 1 << 10;
/// With slicing off, a connection with less to say than this has little to say.
const SPARSE_BYTES_MAX: usize = 4096;

/// How a look at what has to be said ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Said {
    /// With everything said.
    All,
    /// For want of room.
    Full,
}

/// How a connection's turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Slice,
    Full,
    NoCredit,
    Said(Input),
}

impl<I: Inbound, O: Outbound, L: Local> Engine<I, O, L> {
    /// Says what has to be said besides bytes.
    pub(super) fn send_due(&mut self) -> Result<bool, Fault> {
        let frames_before = self.counters.frames_sent;
        while let Some(header) = self.orphans.front().copied() {
            if !self.send_control(0, &header, &[])? {
                break;
            }
            self.orphans.pop_front();
        }
        for port in 0..self.ports.len() {
            for _ in 0..self.ports[port].control.len() {
                let Some(key) = self.ports[port].control.pop_front() else { break };
                if let Some(connection) = self.table.get(key) {
                    connection.is_in_control = false;
                }
                if self.say_due(key)? == Said::Full {
                    self.note_due_first(key);
                    break;
                }
            }
        }
        Ok(self.counters.frames_sent != frames_before)
    }

    fn say_due(&mut self, key: Key) -> Result<Said, Fault> {
        loop {
            let Some(connection) = self.table.get(key) else { return Ok(Said::All) };
            let Some(due) = connection.sayable().first() else { return Ok(Said::All) };
            let (kind, aux) = what_to_say(connection, due, self.settings.credit_bytes);
            let tuple = connection.tuple.filter(|_| kind == Kind::Open);
            let resumption = (kind == Kind::Resume).then(|| connection.resumption().encode());
            let payload = tuple.as_ref().map(Tuple::bytes).or(resumption.as_ref().map(|bytes| &bytes[..]));
            let payload = payload.unwrap_or_default();
            let header = Header { connection: connection.number, kind, len_bytes: payload.len(), aux };
            let class = connection.class;
            if !self.send_control(self.port_of(class), &header, payload)? {
                return Ok(Said::Full);
            }
            self.note_said(key, due);
            if due == Due::MOVE {
                self.publish();
            }
        }
    }

    fn note_said(&mut self, key: Key, due: Due) {
        let Some(connection) = self.table.get(key) else { return };
        connection.due.remove(due);
        if due == Due::MOVE {
            connection.class = connection.class_next;
            self.counters.moves += 1;
        }
        // One in the windows is over when the other end has closed too.
        let stays = due == Due::CLOSE && connection.is_direct && connection.in_end != connection::End::Closed;
        // In failover, it may have to be said again: as long as the peer has not answered.
        if Due::FAREWELLS.has(due) && !stays && !self.settings.is_failover {
            self.table.remove(key);
        }
    }

    fn send_control(&mut self, port: usize, header: &Header, payload: &[u8]) -> Result<bool, Fault> {
        let state = &mut self.ports[port];
        let draft = state.to.draft(HEADER_BYTES + payload.len());
        let Some(mut draft) = draft.map_err(|corrupt| Fault::Lane { partition: port, corrupt })? else {
            self.counters.partitions_full += u64::from(!std::mem::replace(&mut state.is_full, true));
            return Ok(false);
        };
        draft.append(&header.encode());
        draft.append(payload);
        draft.stage();
        self.counters.frames_sent += 1;
        Ok(true)
    }

    /// Lets connections send, each its slice; those with little to say first. `backlog_bytes` is how much may wait in
    /// the partition when one with much to say sends.
    pub(super) fn serve(&mut self, port: usize, backlog_bytes: usize) -> Result<bool, Fault> {
        self.ports[port].is_full = false;
        let mut progressed = false;
        let (bytes_before, frames_before) = (self.counters.bytes_sent, self.counters.frames_sent);
        for _ in 0..VISITS_MAX[port] {
            let Some(key) = self.pick(port, backlog_bytes)? else { break };
            let slice_bytes = self.slice_bytes();
            let is_full = self.visit(key, port, slice_bytes)?;
            // After a slice, what has arrived meanwhile is looked at first.
            let sent_bytes = self.counters.bytes_sent - bytes_before;
            let sent_frames = self.counters.frames_sent - frames_before;
            progressed |= sent_bytes > 0;
            let is_slice = sent_bytes >= slice_bytes as u64 || sent_frames >= FRAMES_PER_SLICE_MAX;
            if is_full || is_slice {
                break;
            }
        }
        Ok(progressed)
    }

    fn pick(&mut self, port: usize, backlog_bytes: usize) -> Result<Option<Key>, Fault> {
        let state = &mut self.ports[port];
        let fresh_has_turn = state.stale.is_empty() || state.fresh_run < FRESH_RUN_MAX;
        if !fresh_has_turn || state.fresh.is_empty() {
            let backlog = || state.to.unread_slots().map_err(|corrupt| Fault::Lane { partition: port, corrupt });
            let lag_bytes = || state.to.credit_lag_slots() as usize * lane::SLOT_BYTES;
            let may_add = state.stale.is_empty()
                || backlog_bytes == usize::MAX
                || backlog()? as usize * lane::SLOT_BYTES <= backlog_bytes.saturating_add(lag_bytes());
            state.fresh_run = 0;
            if may_add && !state.stale.is_empty() {
                return Ok(state.stale.pop_front());
            }
        }
        state.fresh_run += 1;
        Ok(state.fresh.pop_front())
    }

    /// Bytes that the connection whose turn it is may send: more in a crowd, where no other has been active lately.
    /// Where processors suffice, short slices cost little, and whoever comes waits for no long one.
    fn slice_bytes(&self) -> usize {
        let is_alone = self.is_crowded && self.polled.is_empty() && !self.ports.iter().any(Port::has_queued);
        if is_alone { self.settings.slice_bytes.max(LONE_SLICE_BYTES) } else { self.settings.slice_bytes }
    }

    /// A connection's turn, of `slice_bytes` at most; answers whether the partition is full.
    fn visit(&mut self, key: Key, port: usize, slice_bytes: usize) -> Result<bool, Fault> {
        if self.table.get(key).is_none_or(|connection| connection.place != Place::Queued) {
            return Ok(false);
        }
        // An `Open` goes ahead of the first bytes, and a `Move` ahead of the first ones in the new partition.
        let said = self.say_due(key)?;
        let Some(connection) = self.table.get(key) else { return Ok(false) };
        if said == Said::Full {
            self.queue_first(key);
            return Ok(true);
        }
        let class = connection.class;
        if self.port_of(class) != port {
            self.queue(key);
            return Ok(false);
        }
        let bytes_before = self.counters.bytes_sent;
        let mut left_bytes = slice_bytes;
        let mut left_frames = if left_bytes == usize::MAX { u64::MAX } else { FRAMES_PER_SLICE_MAX };
        let mut is_alone = !self.ports.iter().any(Port::has_queued);
        let end = loop {
            match self.send_frame(key, port, left_bytes, std::mem::take(&mut is_alone))? {
                Ok(bytes) => left_bytes -= bytes,
                Err(end) => break end,
            }
            left_frames -= 1;
            if left_bytes == 0 || left_frames == 0 {
                break End::Slice;
            }
        };
        let sent_bytes = self.counters.bytes_sent - bytes_before;
        self.observe(key, sent_bytes, matches!(end, End::Said(_)));
        self.end_turn(key, end);
        Ok(end == End::Full)
    }

    /// One frame of at most `left_bytes`, which is shown at once or later; answers how many it had.
    fn send_frame(
        &mut self,
        key: Key,
        port: usize,
        left_bytes: usize,
        is_shown_at_once: bool,
    ) -> Result<Result<usize, End>, Fault> {
        let Some(connection) = self.table.get(key) else { return Ok(Err(End::Said(Input::Nothing))) };
        let input_bytes = match connection.input() {
            Input::Bytes(bytes) => bytes,
            input => return Ok(Err(End::Said(input))),
        };
        let credit_bytes = usize::try_from(connection.limit - connection.sent).unwrap_or(usize::MAX);
        if credit_bytes == 0 {
            return Ok(Err(End::NoCredit));
        }
        let wanted_bytes = input_bytes.min(credit_bytes).min(left_bytes).min(PAYLOAD_BYTES_MAX);
        if wanted_bytes >= LONG_FRAME_BYTES {
            self.shown.publish(&mut self.ports, &mut self.counters);
        }
        let state = &mut self.ports[port];
        let draft = state.to.draft(HEADER_BYTES + wanted_bytes);
        let draft = draft.map_err(|corrupt| Fault::Lane { partition: port, corrupt })?;
        let Some(mut draft) = draft.filter(|draft| draft.room_bytes() > HEADER_BYTES) else {
            self.counters.partitions_full += u64::from(!std::mem::replace(&mut state.is_full, true));
            return Ok(Err(End::Full));
        };
        let len_bytes = draft.room_bytes() - HEADER_BYTES;
        let aux = connection.sent as u32;
        draft.append(&Header { connection: connection.number, kind: Kind::Data, len_bytes, aux }.encode());
        let retained = match &mut connection.local {
            Some(local) if !self.settings.is_failover => {
                local.copy_input(&mut draft, len_bytes);
                None
            }
            _ => {
                let retained = connection.retain(len_bytes);
                connection.retained.from(connection.sent, len_bytes).iter().for_each(|piece| draft.append(piece));
                Some(retained)
            }
        };
        draft.stage();
        if is_shown_at_once {
            self.shown.publish(&mut self.ports, &mut self.counters);
        }
        let consumed = match (retained, &mut connection.local) {
            (None, Some(local)) => local.consume(len_bytes),
            (retained, _) => retained.unwrap_or(Ok(())),
        };
        connection.sent += len_bytes as u64;
        self.counters.frames_sent += 1;
        self.counters.bytes_sent += len_bytes as u64;
        self.note_handed_on(port);
        self.touch(key);
        Ok(consumed.map(|()| len_bytes).map_err(|_| End::Said(Input::Broken)))
    }

    /// Judges by what a turn brought which partition the connection belongs to.
    fn observe(&mut self, key: Key, sent_bytes: u64, is_dry: bool) {
        let now_ns = self.now_ns;
        let has_classes = self.ports.len() > 1;
        let sparse_bytes_max = (self.settings.slice_bytes / 4).min(SPARSE_BYTES_MAX) as u64;
        let Some(rule) = self.settings.placement.filter(|_| has_classes) else {
            if let Some(connection) = self.table.get(key) {
                connection.is_sparse = is_dry && sent_bytes <= sparse_bytes_max;
            }
            return;
        };
        let Some(connection) = self.table.get(key) else { return };
        connection.is_sparse = is_dry && sent_bytes <= sparse_bytes_max;
        let verdict = connection.observed.note(now_ns, sent_bytes, &rule);
        if is_dry {
            connection.observed.note_dry();
        }
        let Some(class) = verdict.filter(|_| connection.phase != Phase::Over) else { return };
        connection.class_next = class;
        if class == connection.class {
            connection.due.remove(Due::MOVE);
        } else {
            connection.due.add(Due::MOVE);
            self.note_due(key);
        }
    }

    fn end_turn(&mut self, key: Key, end: End) {
        match end {
            End::Slice => self.queue(key),
            End::Full => self.queue_first(key),
            End::NoCredit => {
                self.counters.stalls += 1;
                if let Some(connection) = self.table.get(key) {
                    connection.place = Place::Resting;
                }
                self.poll_again(key);
            }
            End::Said(input) => {
                if let Some(connection) = self.table.get(key) {
                    connection.place = Place::Resting;
                }
                self.poll_again(key);
                self.take_input_end(key, input);
                if self.settings.is_failover {
                    self.say_farewell(key);
                }
            }
        }
    }

    /// At the end of those who wait for their turn.
    pub(super) fn queue(&mut self, key: Key) {
        self.queue_with(key, |queue, key| queue.push_back(key));
    }

    fn queue_first(&mut self, key: Key) {
        self.queue_with(key, |queue, key| queue.push_front(key));
    }

    fn queue_with(&mut self, key: Key, push: impl FnOnce(&mut std::collections::VecDeque<Key>, Key)) {
        let Some(connection) = self.table.get(key) else { return };
        connection.place = Place::Queued;
        let (class, is_sparse) = (connection.class, connection.is_sparse);
        let port = self.port_of(class);
        let state = &mut self.ports[port];
        push(if is_sparse { &mut state.fresh } else { &mut state.stale }, key);
    }

    /// Shows the peer what this turn has put into the partitions so far.
    pub(super) fn publish(&mut self) {
        self.shown.publish(&mut self.ports, &mut self.counters);
    }

    /// Wakes the peer for what was published and taken since the last time; answers whether it sleeps.
    pub(super) fn take_peers_ring(&mut self) -> bool {
        let mut ring = false;
        for port in &mut self.ports {
            if std::mem::take(&mut port.has_sent) {
                ring |= port.to.take_wake_request();
            }
            ring |= port.from.take_wake_request();
        }
        self.counters.rings_peer += u64::from(ring);
        ring
    }
}

/// Which partition the peer was last shown something in.
///
/// A frame may mean nothing without one in the other partition: bytes in the bulk partition come behind the `Open` in
/// the first one, and behind a `Move` in that which their connection has left. The first is shown before the others,
/// and a `Move` at once; so a partition that follows another one is shown behind it, and no frame overtakes one that
/// was said before.
#[derive(Debug, Default)]
pub(super) struct Shown {
    port_last: usize,
}

impl Shown {
    fn publish<I: Inbound, O: Outbound>(&mut self, ports: &mut [Port<I, O>], counters: &mut Counters) {
        for (index, port) in ports.iter_mut().enumerate() {
            let follows_itself = index == self.port_last;
            let is_shown = if follows_itself { port.to.publish_staged() } else { port.to.publish_staged_behind() };
            if is_shown {
                self.port_last = index;
                port.has_sent = true;
                counters.publishes += 1;
            }
        }
    }
}

/// The frame for one thing that is due.
fn what_to_say<L: Local>(connection: &mut Connection<L>, due: Due, credit_bytes: u32) -> (Kind, u32) {
    match due {
        Due::RESUME if connection.is_direct => (Kind::Held, connection.local.as_ref().map_or(0, L::place)),
        Due::RESUME => (Kind::Resume, connection.received as u32),
        Due::OPEN => (Kind::Open, connection.granted as u32),
        Due::OPENED if connection.is_direct => (Kind::Placed, 0),
        Due::CREDIT if connection.is_direct => (Kind::Ring, 0),
        Due::OPENED => (Kind::Opened, connection.granted as u32),
        Due::REFUSED => (Kind::Refused, connection.errno),
        Due::CREDIT => {
            connection.granted = connection.granted.max(connection.delivered() + u64::from(credit_bytes));
            (Kind::Credit, connection.granted as u32)
        }
        Due::MOVE => (Kind::Move, connection.class_next as u32),
        Due::FIN => (Kind::Fin, connection.sent as u32),
        Due::CLOSE => (Kind::Close, connection.sent as u32),
        _ => (Kind::Reset, connection.errno),
    }
}
