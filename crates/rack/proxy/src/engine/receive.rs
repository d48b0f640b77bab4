//! Frames of the peer. Every one of them is hostile until it is checked.

use super::{CONNECTION_RESET, Engine, Event, Fault};
use crate::connection::{Connection, Due, End, Phase, Tuple};
use crate::frame::{FrameError, HEADER_BYTES, Header, Kind, TUPLE_BYTES_MAX};
use crate::{Class, Input, Key, Local};
use fabric::{Inbound, Outbound};
use lane::Chunk;

/// Frames that are taken from a partition in a turn, and no more than a slice of bytes: then the others have theirs.
const FRAMES_MAX: usize = 32;
/// Frames that are taken from a partition that another one is ahead of: more than any ring holds, each of which takes a
/// slot at least. A peer that goes on writing while they are taken keeps the thread from its other links no longer.
const FRAMES_BEHIND_MAX: usize = 1 << 14;

impl<I: Inbound, O: Outbound, L: Local> Engine<I, O, L> {
    pub(super) fn receive(&mut self, port: usize) -> Result<bool, Fault> {
        let (frames_before, bytes_before) = (self.counters.frames_received, self.counters.bytes_received);
        for _ in 0..FRAMES_MAX {
            let received_bytes = self.counters.bytes_received - bytes_before;
            if received_bytes >= self.settings.slice_bytes as u64 || !self.receive_one(port)? {
                break;
            }
        }
        Ok(self.counters.frames_received != frames_before)
    }

    fn receive_one(&mut self, port: usize) -> Result<bool, Fault> {
        let corrupt = |corrupt| Fault::Lane { partition: port, corrupt };
        let Some(chunk) = self.ports[port].from.peek().map_err(corrupt)? else { return Ok(false) };
        let header = self.header_of(port, chunk).map_err(|error| Fault::Frame { partition: port, error })?;
        if !self.take_frame(port, &header, chunk)? {
            return Ok(false);
        }
        self.counters.frames_received += 1;
        self.check_orphans()?;
        self.ports[port].from.consume(chunk.len_bytes).map_err(corrupt)?;
        Ok(true)
    }

    fn header_of(&self, port: usize, chunk: Chunk) -> Result<Header, FrameError> {
        if chunk.len_bytes < HEADER_BYTES {
            return Err(FrameError::Short(chunk.len_bytes));
        }
        let mut bytes = [0; HEADER_BYTES];
        self.ports[port].from.span(chunk).read(&mut bytes);
        Header::decode(&bytes, chunk.len_bytes)
    }

    /// `false`: it is not this frame's turn.
    fn take_frame(&mut self, port: usize, header: &Header, chunk: Chunk) -> Result<bool, Fault> {
        let Some(key) = self.connection_of(port, header)? else {
            return self.take_first_frame(port, header, chunk).map(|()| true);
        };
        if self.settings.is_failover && self.take_word_of_end(key, header.kind) {
            return Ok(true);
        }
        if self.is_catching_up && self.in_port(key).is_some_and(|before| before != port) {
            // Published behind whatever is looked for: the word that its connection leaves the other partition comes
            // there behind the frame that waits.
            return Ok(false);
        }
        match self.is_in_order(key, port)? {
            true => self.take_frame_in_order(key, port, header, chunk)?,
            false => self.offend(key, "a frame in a partition that the connection is not in"),
        }
        Ok(true)
    }

    fn take_frame_in_order(&mut self, key: Key, port: usize, header: &Header, chunk: Chunk) -> Result<(), Fault> {
        // Catching up may have brought its end.
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        if connection.phase == Phase::Over {
            self.counters.frames_late += 1;
            self.take_late_frame(key, port, header, chunk);
            return Ok(());
        }
        let is_held = connection.is_direct && connection.is_resuming;
        if is_held && header.kind == Kind::Open && header.connection.opener() != self.settings.side {
            // The peer does not know it any more, and gives its number to another.
            self.take_reset(key);
            return self.take_first_frame(port, header, chunk);
        }
        let taken = match connection.is_resuming {
            true if is_held => self.take_frame_of_held(key, header),
            true => self.take_frame_resuming(key, port, header, chunk),
            false if connection.is_direct => self.take_direct_frame(key, header),
            false => self.take_known_frame(key, port, header, chunk),
        };
        match taken {
            Ok(()) => {}
            Err(what) => self.offend(key, what),
        }
        Ok(())
    }

    /// Whose frame it is. Connections are opened in the first partition: where one that is not known speaks in another,
    /// its `Open` was published before, and may not be taken yet.
    fn connection_of(&mut self, port: usize, header: &Header) -> Result<Option<Key>, Fault> {
        let number = header.connection;
        let mut found = self.table.find(number);
        let may_be_unopened = found.is_none() && port != 0 && number.opener() != self.settings.side;
        if !may_be_unopened || std::mem::replace(&mut self.is_catching_up, true) {
            return Ok(found);
        }
        let mut outcome = Ok(true);
        for _ in 0..FRAMES_BEHIND_MAX {
            outcome = self.receive_one(0);
            found = self.table.find(number);
            if outcome != Ok(true) || found.is_some() {
                break;
            }
        }
        self.is_catching_up = false;
        outcome.map(|_| found)
    }

    fn take_first_frame(&mut self, port: usize, header: &Header, chunk: Chunk) -> Result<(), Fault> {
        if header.kind != Kind::Open {
            self.counters.frames_late += 1;
            self.take_unknown_resumption(header);
            return Ok(());
        }
        if header.connection.opener() == self.settings.side {
            return Err(Fault::Number(header.connection));
        }
        if self.table.is_full() {
            return self.refuse_unentered(header.connection);
        }
        let mut bytes = [0; TUPLE_BYTES_MAX];
        let bytes = &mut bytes[..header.len_bytes];
        self.ports[port].from.span(chunk).part(HEADER_BYTES, header.len_bytes).read(bytes);
        let tuple = Tuple::new(bytes).expect("the kind bounds the length");
        let mut connection = Connection::new(header.connection, Phase::Answering, self.now_ns);
        connection.in_class = Class::ALL[port];
        let limit = Connection::<L>::position_after(0, header.aux);
        connection.limit = limit.unwrap_or(0);
        let key = self.table.insert(header.connection, connection);
        match limit {
            Some(_) => self.events.push_back(Event::Open { key, tuple }),
            None => self.offend(key, "more credit than there can be"),
        }
        Ok(())
    }

    /// Whether a frame in this partition is the next one of its connection. If the connection is still in another one,
    /// its last frame there was published before this one: that partition is taken up to it first.
    fn is_in_order(&mut self, key: Key, port: usize) -> Result<bool, Fault> {
        let Some(before) = self.in_port(key) else { return Ok(true) };
        if before == port {
            return Ok(true);
        }
        self.is_catching_up = true;
        let mut outcome = Ok(true);
        for _ in 0..FRAMES_BEHIND_MAX {
            outcome = self.receive_one(before);
            if outcome != Ok(true) || self.in_port(key).is_none_or(|now| now == port) {
                break;
            }
        }
        self.is_catching_up = false;
        outcome?;
        Ok(self.in_port(key).is_none_or(|now| now == port))
    }

    fn in_port(&mut self, key: Key) -> Option<usize> {
        let class = self.table.get(key)?.in_class;
        Some(self.port_of(class))
    }

    fn take_known_frame(&mut self, key: Key, port: usize, header: &Header, chunk: Chunk) -> Result<(), &'static str> {
        match header.kind {
            Kind::Open => Err("opened twice"),
            Kind::Data => self.take_data(key, port, header, chunk),
            Kind::Opened => self.take_opened(key, header.aux),
            Kind::Refused => self.take_refused(key, header.aux),
            Kind::Credit => self.take_credit(key, header.aux),
            Kind::Fin => self.take_end(key, End::Finished, header.aux),
            Kind::Close => self.take_end(key, End::Closed, header.aux),
            Kind::Move => self.take_move(key, port, header.aux),
            Kind::Placed => self.take_placed(key),
            Kind::Ring => Err("a ring for a connection that does not lie in the windows"),
            Kind::Reset => {
                self.take_reset(key);
                Ok(())
            }
            Kind::Resume => Err("resumed twice"),
            // Another one that had this number before, which the peer learns from the `Open`.
            Kind::Held if self.table.get(key).is_some_and(|connection| connection.phase == Phase::Opening) => Ok(()),
            Kind::Held => Err("held, and not in the windows"),
            Kind::Gone => Err("an answer to a good-bye that was never said"),
        }
    }

    fn take_data(&mut self, key: Key, port: usize, header: &Header, chunk: Chunk) -> Result<(), &'static str> {
        let len_bytes = header.len_bytes;
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        if connection.in_end != End::None {
            return Err("bytes after the end");
        }
        if header.aux != connection.received as u32 {
            return Err("bytes from another position");
        }
        if len_bytes as u64 > connection.granted - connection.received {
            return Err("bytes beyond the credit");
        }
        let span = self.ports[port].from.span(chunk).part(HEADER_BYTES, len_bytes);
        let put = match &mut connection.local {
            Some(local) if connection.held.is_empty() => local.put_span(&span),
            _ => Ok(0),
        };
        let Ok(put_bytes) = put else {
            self.reset(key, CONNECTION_RESET);
            return Ok(());
        };
        connection.received += len_bytes as u64;
        if put_bytes < len_bytes {
            let mut rest = vec![0; len_bytes - put_bytes];
            span.part(put_bytes, rest.len()).read(&mut rest);
            connection.held.extend(&rest);
            self.counters.bytes_held += rest.len() as u64;
        }
        self.counters.bytes_received += len_bytes as u64;
        self.note_handed_on(port);
        self.touch(key);
        self.poll_again(key);
        self.grant(key);
        Ok(())
    }

    /// Lets the peer send on, once it is worth a frame.
    pub(super) fn grant(&mut self, key: Key) {
        let credit_bytes = u64::from(self.settings.credit_bytes);
        let Some(connection) = self.table.get(key) else { return };
        let is_worth_it = connection.delivered() + credit_bytes >= connection.granted + credit_bytes / 4;
        if is_worth_it && connection.in_end == End::None && connection.local.is_some() {
            connection.due.add(Due::CREDIT);
            self.note_due(key);
        }
    }

    pub(super) fn take_opened(&mut self, key: Key, limit: u32) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        if connection.phase != Phase::Opening {
            return Err("answered twice");
        }
        connection.phase = Phase::Open;
        connection.tuple = None;
        if let Some(local) = &mut connection.local {
            local.opened();
        }
        self.take_credit(key, limit)
    }

    pub(super) fn take_refused(&mut self, key: Key, errno: u32) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        if connection.phase != Phase::Opening {
            return Err("refused after it was answered");
        }
        let local = connection.local.take();
        self.say_gone(key);
        self.table.remove(key);
        self.events.extend(local.map(|local| Event::Refused { local, errno }));
        Ok(())
    }

    fn take_credit(&mut self, key: Key, limit: u32) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        let limit = Connection::<L>::position_after(connection.sent, limit).ok_or("more credit than there can be")?;
        if limit < connection.limit {
            return Err("credit taken back");
        }
        let was_stalled = connection.credit_bytes() == 0;
        connection.limit = limit;
        if self.settings.is_failover {
            // A limit is what the peer's program has, and as much again as everybody grants.
            let credit_bytes = u64::from(self.settings.credit_bytes);
            connection.retained.forget_before(limit.saturating_sub(credit_bytes).min(connection.sent));
        }
        if was_stalled {
            self.poll_again(key);
        }
        Ok(())
    }

    fn take_end(&mut self, key: Key, end: End, position: u32) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        if connection.in_end == End::Closed || connection.in_end == end {
            return Err("ended twice");
        }
        if position != connection.received as u32 {
            return Err("an end at another position");
        }
        connection.in_end = end;
        connection.in_end_is_told = false;
        if end == End::Closed {
            self.say_gone(key);
        }
        self.tell_end(key);
        Ok(())
    }

    /// Tells the program of the end, once it has everything that came before.
    pub(super) fn tell_end(&mut self, key: Key) {
        let Some(connection) = self.table.get(key) else { return };
        if !connection.held.is_empty() || connection.in_end_is_told {
            return;
        }
        let Some(local) = &mut connection.local else { return };
        match connection.in_end {
            End::None => {}
            End::Finished => {
                connection.in_end_is_told = true;
                local.finish();
                self.touch(key);
                self.poll_again(key);
            }
            End::Closed => {
                // Nobody is left at the other end to hear anything. Bytes that wait to be sent count as answered by
                // nobody: the program finds out as it would from TCP.
                let closed = self.table.remove(key).and_then(|connection| connection.local);
                closed.map(L::close).unwrap_or_default();
            }
        }
    }

    pub(super) fn take_move(&mut self, key: Key, port: usize, class: u32) -> Result<(), &'static str> {
        let ports = self.ports.len();
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        let class = Class::from_number(class).filter(|class| (*class as usize) < ports && *class as usize != port);
        connection.in_class = class.ok_or("a move to a partition that there is not")?;
        Ok(())
    }

    pub(super) fn take_reset(&mut self, key: Key) {
        self.counters.resets += 1;
        self.say_gone(key);
        if let Some(local) = self.table.remove(key).and_then(|connection| connection.local) {
            local.reset();
        }
    }

    /// Hands the program what it had no room for.
    pub(super) fn deliver_held(&mut self, key: Key) {
        let Some(connection) = self.table.get(key) else { return };
        let held_before = connection.held.len();
        while let Some(local) = &mut connection.local {
            let (first, _) = connection.held.as_slices();
            if first.is_empty() {
                break;
            }
            match local.put(first) {
                Ok(0) => break,
                Ok(bytes) => drop(connection.held.drain(..bytes)),
                Err(_) => return self.reset(key, CONNECTION_RESET),
            }
        }
        if connection.held.len() < held_before {
            if connection.held.is_empty() {
                connection.held = Default::default();
            }
            self.touch(key);
            self.grant(key);
        }
        self.tell_end(key);
    }

    /// What the program says besides bytes.
    pub(super) fn take_input_end(&mut self, key: Key, input: Input) {
        let Some(connection) = self.table.get(key) else { return };
        let is_behind = (connection.is_resuming && !connection.is_direct) || connection.unsent_bytes() > 0;
        match input {
            Input::Bytes(_) | Input::Nothing => {}
            // Found again once all that came before is said.
            Input::Finished | Input::Closed if is_behind => {}
            Input::Rang => self.forward_ring(key),
            Input::Closed if connection.is_direct => self.close_direct(key),
            Input::Finished if connection.out_end == End::None => {
                connection.out_end = End::Finished;
                connection.due.add(Due::FIN);
                self.note_due(key);
            }
            Input::Finished => {}
            Input::Closed => {
                connection.out_end = End::Closed;
                drop(connection.local.take());
                self.retire(key, Due::CLOSE);
            }
            Input::Broken => self.reset(key, CONNECTION_RESET),
        }
    }
}
