//! Frames from the peer. Every frame is hostile until it is checked.

use super::event::{EngineEvent, LinkFault};
use super::state::{CONNECTION_RESET, Engine};
use crate::connection::{Connection, Due, OpenPayload, Phase, StreamEnd};
use crate::frame::{FrameError, FrameHeader, FrameKind, HEADER_BYTES, OPEN_PAYLOAD_BYTES_MAX};
use crate::local::{Input, LocalEndpoint};
use crate::placement::Class;
use crate::table::ConnectionKey;
use fabric::{Inbound, Outbound};
use lane::Chunk;

/// Bound on the frames received from a partition in one poll, besides one slice of bytes; then the other partitions are
/// polled.
const FRAMES_MAX: usize = 32;
/// Bound on the frames received from a partition that another one is ahead of: more than any ring holds, since each
/// frame takes at least one slot. A peer that keeps writing meanwhile therefore cannot keep the thread from its other
/// links.
const FRAMES_BEHIND_MAX: usize = 1 << 14;

impl<I: Inbound, O: Outbound, L: LocalEndpoint> Engine<I, O, L> {
    pub(super) fn receive(&mut self, partition: usize) -> Result<bool, LinkFault> {
        let (frames_before, bytes_before) = (self.counters.frames_received, self.counters.bytes_received);
        for _ in 0..FRAMES_MAX {
            let received_bytes = self.counters.bytes_received - bytes_before;
            if received_bytes >= self.settings.slice_bytes as u64 || !self.receive_one(partition)? {
                break;
            }
        }
        Ok(self.counters.frames_received != frames_before)
    }

    fn receive_one(&mut self, partition: usize) -> Result<bool, LinkFault> {
        let corrupt = |corrupt| LinkFault::Lane { partition, corrupt };
        let Some(chunk) = self.partitions[partition].from.peek().map_err(corrupt)? else { return Ok(false) };
        let header = self.header_of(partition, chunk).map_err(|error| LinkFault::Frame { partition, error })?;
        if !self.handle_frame(partition, &header, chunk)? {
            return Ok(false);
        }
        self.counters.frames_received += 1;
        self.check_orphans()?;
        self.partitions[partition].from.consume(chunk.len_bytes).map_err(corrupt)?;
        Ok(true)
    }

    fn header_of(&self, partition: usize, chunk: Chunk) -> Result<FrameHeader, FrameError> {
        if chunk.len_bytes < HEADER_BYTES {
            return Err(FrameError::Short(chunk.len_bytes));
        }
        let mut bytes = [0; HEADER_BYTES];
        self.partitions[partition].from.span(chunk).read(&mut bytes);
        FrameHeader::decode(&bytes, chunk.len_bytes)
    }

    /// Copies the payload of a frame of a kind whose payload has `N` bytes.
    pub(super) fn payload<const N: usize>(&self, partition: usize, chunk: Chunk) -> [u8; N] {
        let mut bytes = [0; N];
        self.partitions[partition].from.span(chunk).part(HEADER_BYTES, N).read(&mut bytes);
        bytes
    }

    /// Handles a frame. Returns `false` if an earlier frame of its connection must be received first.
    fn handle_frame(&mut self, partition: usize, header: &FrameHeader, chunk: Chunk) -> Result<bool, LinkFault> {
        let Some(key) = self.connection_of(partition, header)? else {
            return self.handle_first_frame(partition, header, chunk).map(|()| true);
        };
        if self.settings.is_failover && self.handle_frame_after_end(key, header.kind) {
            return Ok(true);
        }
        if self.is_catching_up && self.partition_in(key).is_some_and(|before| before != partition) {
            // While a partition is drained, a frame of a connection in the other partition ends the search: the `Move`
            // that it needs was published after the frame that is searched for.
            return Ok(false);
        }
        match self.is_in_order(key, partition)? {
            true => self.handle_frame_in_order(key, partition, header, chunk)?,
            false => self.reset_for_violation(key, "a frame in a partition that the connection is not in"),
        }
        Ok(true)
    }

    fn handle_frame_in_order(
        &mut self,
        key: ConnectionKey,
        partition: usize,
        header: &FrameHeader,
        chunk: Chunk,
    ) -> Result<(), LinkFault> {
        // Draining the other partition may have ended the connection.
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        if connection.phase == Phase::Over {
            self.counters.frames_late += 1;
            self.handle_late_frame(key, partition, header, chunk);
            return Ok(());
        }
        let is_suspended = connection.is_suspended();
        if is_suspended && header.kind == FrameKind::Open && header.connection.opener() != self.settings.side {
            // The peer has forgotten the connection and reuses its number.
            self.handle_reset(key);
            return self.handle_first_frame(partition, header, chunk);
        }
        let handled = match connection.is_resuming {
            true if is_suspended => self.handle_suspended_frame(key, partition, header, chunk),
            true => self.handle_resuming_frame(key, partition, header, chunk),
            false => self.handle_known_frame(key, partition, header, chunk),
        };
        if let Err(what) = handled {
            self.reset_for_violation(key, what);
        }
        Ok(())
    }

    /// Finds the connection of a frame. Connections are opened in the first partition. If an unknown connection sends
    /// in another partition, its `Open` was published before, and may not have been received yet.
    fn connection_of(&mut self, partition: usize, header: &FrameHeader) -> Result<Option<ConnectionKey>, LinkFault> {
        let number = header.connection;
        let mut found = self.table.find(number);
        let may_be_unopened = found.is_none() && partition != 0 && number.opener() != self.settings.side;
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

    fn handle_first_frame(&mut self, partition: usize, header: &FrameHeader, chunk: Chunk) -> Result<(), LinkFault> {
        if header.kind != FrameKind::Open {
            self.counters.frames_late += 1;
            self.handle_unknown_resumption(header);
            return Ok(());
        }
        if header.connection.opener() == self.settings.side {
            return Err(LinkFault::ConnectionNumber(header.connection));
        }
        if self.table.is_full() {
            return self.refuse_table_full(header.connection);
        }
        let mut bytes = [0; OPEN_PAYLOAD_BYTES_MAX];
        let bytes = &mut bytes[..header.len_bytes];
        self.partitions[partition].from.span(chunk).part(HEADER_BYTES, header.len_bytes).read(bytes);
        let open_payload = OpenPayload::new(bytes).expect("the kind bounds the length");
        let mut connection = Connection::new(header.connection, Phase::Answering, self.now_ns);
        connection.in_class = Class::ALL[partition];
        let limit = Connection::<L>::position_after(0, header.aux);
        connection.send_limit = limit.unwrap_or(0);
        let key = self.table.insert(header.connection, connection);
        match limit {
            Some(_) => self.events.push_back(EngineEvent::Open { key, open_payload }),
            None => self.reset_for_violation(key, "credit beyond the maximum"),
        }
        Ok(())
    }

    /// Returns whether a frame in this partition is the next one of its connection. If the connection is still in
    /// another partition, its last frame there was published before this one: that partition is received up to it
    /// first.
    fn is_in_order(&mut self, key: ConnectionKey, partition: usize) -> Result<bool, LinkFault> {
        let Some(before) = self.partition_in(key) else { return Ok(true) };
        if before == partition {
            return Ok(true);
        }
        self.is_catching_up = true;
        let mut outcome = Ok(true);
        for _ in 0..FRAMES_BEHIND_MAX {
            outcome = self.receive_one(before);
            if outcome != Ok(true) || self.partition_in(key).is_none_or(|now| now == partition) {
                break;
            }
        }
        self.is_catching_up = false;
        outcome?;
        Ok(self.partition_in(key).is_none_or(|now| now == partition))
    }

    fn partition_in(&mut self, key: ConnectionKey) -> Option<usize> {
        let class = self.table.get(key)?.in_class;
        Some(self.partition_of(class))
    }

    fn handle_known_frame(
        &mut self,
        key: ConnectionKey,
        partition: usize,
        header: &FrameHeader,
        chunk: Chunk,
    ) -> Result<(), &'static str> {
        match header.kind {
            FrameKind::Open => Err("a second Open"),
            FrameKind::Data => self.handle_data(key, partition, header, chunk),
            FrameKind::Opened => self.handle_opened(key, header.aux),
            FrameKind::Refused => self.handle_refused(key, header.aux),
            FrameKind::Credit => self.handle_credit(key, header.aux),
            FrameKind::Fin => self.handle_end(key, StreamEnd::Finished, header.aux),
            FrameKind::Close => self.handle_end(key, StreamEnd::Closed, header.aux),
            FrameKind::Move => self.handle_move(key, partition, header.aux),
            FrameKind::OpenedWithSpan => self.handle_opened_with_span(key, header.aux),
            FrameKind::Ring | FrameKind::Left => self.handle_span_frame(key, header.kind),
            FrameKind::Reset => {
                self.handle_reset(key);
                Ok(())
            }
            FrameKind::Resume => Err("a second Resume"),
            // It means an earlier connection of this number, which the peer will learn from the `Open`.
            FrameKind::ResumeWithSpan
                if self.table.get(key).is_some_and(|connection| connection.phase == Phase::Opening) =>
            {
                Ok(())
            }
            FrameKind::ResumeWithSpan => Err("a second ResumeWithSpan"),
            FrameKind::EndAck => Err("an EndAck without a final frame"),
        }
    }

    fn handle_data(
        &mut self,
        key: ConnectionKey,
        partition: usize,
        header: &FrameHeader,
        chunk: Chunk,
    ) -> Result<(), &'static str> {
        let len_bytes = header.len_bytes;
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        if connection.in_end != StreamEnd::None {
            return Err("bytes after the end");
        }
        if header.aux != connection.received as u32 {
            return Err("bytes from another position");
        }
        if len_bytes as u64 > connection.granted - connection.received {
            return Err("bytes beyond the credit");
        }
        let span = self.partitions[partition].from.span(chunk).part(HEADER_BYTES, len_bytes);
        let put = match &mut connection.local {
            Some(local) if connection.undelivered.is_empty() => local.write_span(&span),
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
            connection.undelivered.extend(&rest);
            self.counters.bytes_buffered += rest.len() as u64;
        }
        self.counters.bytes_received += len_bytes as u64;
        self.note_forwarded(partition);
        self.note_activity(key);
        self.poll_again(key);
        self.grant(key);
        Ok(())
    }

    /// Grants credit to the peer, once a frame is justified.
    pub(super) fn grant(&mut self, key: ConnectionKey) {
        let credit_bytes = u64::from(self.settings.credit_bytes);
        let Some(connection) = self.table.get(key) else { return };
        let justifies_frame = connection.delivered() + credit_bytes >= connection.granted + credit_bytes / 4;
        if justifies_frame && connection.in_end == StreamEnd::None && connection.local.is_some() {
            connection.due.add(Due::CREDIT);
            self.queue_control(key);
        }
    }

    pub(super) fn handle_opened(&mut self, key: ConnectionKey, limit: u32) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        if connection.phase != Phase::Opening {
            return Err("a second answer");
        }
        connection.phase = Phase::Open;
        connection.open_payload = None;
        if let Some(local) = &mut connection.local {
            local.opened();
        }
        self.handle_credit(key, limit)
    }

    pub(super) fn handle_refused(&mut self, key: ConnectionKey, errno: u32) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        if connection.phase != Phase::Opening {
            return Err("a refusal after the answer");
        }
        let local = connection.local.take();
        self.acknowledge_end(key);
        self.table.remove(key);
        self.events.extend(local.map(|local| EngineEvent::Refused { local, errno }));
        Ok(())
    }

    fn handle_credit(&mut self, key: ConnectionKey, limit: u32) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        let limit = Connection::<L>::position_after(connection.sent, limit).ok_or("credit beyond the maximum")?;
        if limit < connection.send_limit {
            return Err("reduced credit");
        }
        let was_stalled = connection.credit_bytes() == 0;
        connection.send_limit = limit;
        if self.settings.is_failover {
            // The peer's program has received all bytes up to the limit less the credit that every node grants.
            let credit_bytes = u64::from(self.settings.credit_bytes);
            connection.retransmit.forget_before(limit.saturating_sub(credit_bytes).min(connection.sent));
        }
        if was_stalled {
            self.poll_again(key);
        }
        Ok(())
    }

    fn handle_end(&mut self, key: ConnectionKey, end: StreamEnd, position: u32) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        if connection.in_end == StreamEnd::Closed || connection.in_end == end {
            return Err("a second end");
        }
        if position != connection.received as u32 {
            return Err("an end at another position");
        }
        connection.in_end = end;
        connection.in_end_is_delivered = false;
        if end == StreamEnd::Closed {
            self.acknowledge_end(key);
        }
        self.deliver_end(key);
        Ok(())
    }

    /// Tells the program of the end, once it has received everything before.
    pub(super) fn deliver_end(&mut self, key: ConnectionKey) {
        let Some(connection) = self.table.get(key) else { return };
        if !connection.undelivered.is_empty() || connection.in_end_is_delivered {
            return;
        }
        let Some(local) = &mut connection.local else { return };
        match connection.in_end {
            StreamEnd::None => {}
            StreamEnd::Finished => {
                connection.in_end_is_delivered = true;
                local.finish();
                self.note_activity(key);
                self.poll_again(key);
            }
            StreamEnd::Closed => {
                // The other endpoint is gone. Bytes that wait to be sent are discarded; the program finds out as it
                // would with TCP.
                let closed = self.table.remove(key).and_then(|connection| connection.local);
                closed.map(L::close).unwrap_or_default();
            }
        }
    }

    pub(super) fn handle_move(&mut self, key: ConnectionKey, partition: usize, class: u32) -> Result<(), &'static str> {
        let partitions = self.partitions.len();
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        let class =
            Class::from_number(class).filter(|class| (*class as usize) < partitions && *class as usize != partition);
        connection.in_class = class.ok_or("a Move to a partition that does not exist")?;
        Ok(())
    }

    pub(super) fn handle_reset(&mut self, key: ConnectionKey) {
        self.counters.resets += 1;
        self.acknowledge_end(key);
        if let Some(local) = self.table.remove(key).and_then(|connection| connection.local) {
            local.reset();
        }
    }

    /// Writes bytes to the program for which it had no room before.
    pub(super) fn deliver_undelivered(&mut self, key: ConnectionKey) {
        let Some(connection) = self.table.get(key) else { return };
        let undelivered_before = connection.undelivered.len();
        while let Some(local) = &mut connection.local {
            let (first, _) = connection.undelivered.as_slices();
            if first.is_empty() {
                break;
            }
            match local.write(first) {
                Ok(0) => break,
                Ok(bytes) => drop(connection.undelivered.drain(..bytes)),
                Err(_) => return self.reset(key, CONNECTION_RESET),
            }
        }
        if connection.undelivered.len() < undelivered_before {
            if connection.undelivered.is_empty() {
                connection.undelivered = Default::default();
            }
            self.note_activity(key);
            self.grant(key);
        }
        self.deliver_end(key);
    }

    /// Handles what the program reports besides bytes.
    pub(super) fn handle_input_end(&mut self, key: ConnectionKey, input: Input) {
        let Some(connection) = self.table.get(key) else { return };
        let is_behind = connection.is_resuming || connection.unsent_bytes() > 0;
        match input {
            Input::Bytes(_) | Input::Nothing => {}
            // It is reported again once everything before has been sent.
            Input::Finished | Input::Closed if is_behind => {}
            Input::Finished if connection.out_end == StreamEnd::None => {
                connection.out_end = StreamEnd::Finished;
                connection.due.add(Due::FIN);
                self.queue_control(key);
            }
            Input::Finished => {}
            Input::Closed => {
                connection.out_end = StreamEnd::Closed;
                drop(connection.local.take());
                self.retire(key, Due::CLOSE);
            }
            Input::Broken => self.reset(key, CONNECTION_RESET),
        }
    }
}
