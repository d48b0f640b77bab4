//! Frames to the peer, and which connection sends next.
//!
//! A poll puts all ready frames into the partitions and then publishes those of a partition together: one fence and one
//! store, instead of one per frame. No frame waits for later ones: the first frame of a connection is published at once
//! if no other connection waits to be served, and frames that are ready are published before anything that takes long,
//! which is the copy of a long frame or the polling of many connections.

use super::event::LinkFault;
use super::partition::PartitionLanes;
use super::state::Engine;
use crate::connection::{Connection, Due, Phase, WaitState};
use crate::frame::{FrameHeader, FrameKind, HEADER_BYTES, PAYLOAD_BYTES_MAX};
use crate::local::{Input, LocalEndpoint};
use crate::table::ConnectionKey;
use fabric::{Inbound, Outbound};

/// Connections served in a poll, by class; then arrivals are checked.
const SERVED_MAX: [usize; 2] = [16, 2];
/// Connections with few bytes that are served before one with many.
const NEW_FLOW_RUN_MAX: u32 = 8;
/// Frames of a slice at most: the cost of short frames is in their number.
const FRAMES_PER_SLICE_MAX: u64 = 16;
/// The slice of a connection that has an engine on oversubscribed processors to itself: its whole default credit.
/// Slices exist for the sake of other connections; with oversubscribed processors, short slices take two to three times
/// as long.
const SOLE_SLICE_BYTES: usize = 256 << 10;
/// Before a frame of this size is copied, ready frames are published: the copy takes longer than the fence.
const LONG_FRAME_BYTES: usize = 1 << 10;
/// With slicing off, a connection that sends no more than this is a sparse flow.
const SPARSE_BYTES_MAX: usize = 4096;

/// The outcome of sending control frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ControlOutcome {
    /// All due frames were sent.
    Sent,
    /// The partition had no room.
    PartitionFull,
}

/// Why the service of a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum VisitEnd {
    Slice,
    Full,
    NoCredit,
    NoInput(Input),
}

impl<I: Inbound, O: Outbound, L: LocalEndpoint> Engine<I, O, L> {
    /// Sends the control frames that are due.
    pub(super) fn send_control_frames(&mut self) -> Result<bool, LinkFault> {
        let frames_before = self.counters.frames_sent;
        while let Some(header) = self.orphans.front().copied() {
            if !self.send_control(0, &header, &[])? {
                break;
            }
            self.orphans.pop_front();
        }
        for partition in 0..self.partitions.len() {
            for _ in 0..self.partitions[partition].control.len() {
                let Some(key) = self.partitions[partition].control.pop_front() else { break };
                if let Some(connection) = self.table.get(key) {
                    connection.is_in_control = false;
                }
                if self.send_due_frames(key)? == ControlOutcome::PartitionFull {
                    self.queue_control_first(key);
                    break;
                }
            }
        }
        Ok(self.counters.frames_sent != frames_before)
    }

    fn send_due_frames(&mut self, key: ConnectionKey) -> Result<ControlOutcome, LinkFault> {
        loop {
            let Some(connection) = self.table.get(key) else { return Ok(ControlOutcome::Sent) };
            let Some(due) = connection.sendable().first() else { return Ok(ControlOutcome::Sent) };
            let (kind, aux) = control_frame(connection, due, self.settings.credit_bytes);
            let open_payload = connection.open_payload.filter(|_| kind == FrameKind::Open);
            let mut resumption = Vec::new();
            let payload = match (&open_payload, kind) {
                (Some(payload), _) => payload.bytes(),
                (None, FrameKind::Resume | FrameKind::ResumeWithSpan) => {
                    resumption.extend(connection.resumption_payload());
                    &resumption
                }
                (None, _) => &[],
            };
            let header = FrameHeader { connection: connection.number, kind, len_bytes: payload.len(), aux };
            let class = connection.class;
            if !self.send_control(self.partition_of(class), &header, payload)? {
                return Ok(ControlOutcome::PartitionFull);
            }
            self.note_sent(key, due);
            if due == Due::MOVE {
                self.publish();
            }
        }
    }

    fn note_sent(&mut self, key: ConnectionKey, due: Due) {
        let Some(connection) = self.table.get(key) else { return };
        connection.due.remove(due);
        if due == Due::MOVE {
            connection.class = connection.class_next;
            self.counters.moves += 1;
        }
        // With failover, the frame may have to be sent again until the peer acknowledges it.
        if Due::FINAL.has(due) && !self.settings.is_failover {
            self.table.remove(key);
        }
    }

    fn send_control(&mut self, partition: usize, header: &FrameHeader, payload: &[u8]) -> Result<bool, LinkFault> {
        let state = &mut self.partitions[partition];
        let draft = state.to.draft(HEADER_BYTES + payload.len());
        let Some(mut draft) = draft.map_err(|corrupt| LinkFault::Lane { partition, corrupt })? else {
            self.counters.partitions_full += u64::from(!std::mem::replace(&mut state.is_full, true));
            return Ok(false);
        };
        draft.append(&header.encode());
        draft.append(payload);
        draft.stage();
        self.counters.frames_sent += 1;
        Ok(true)
    }

    /// Serves connections, each up to its slice, sparse flows first. `backlog_bytes` bounds the unread bytes in the
    /// partition when other flows are served.
    pub(super) fn serve_partition(&mut self, partition: usize, backlog_bytes: usize) -> Result<bool, LinkFault> {
        self.partitions[partition].is_full = false;
        let mut progressed = false;
        let (bytes_before, frames_before) = (self.counters.bytes_sent, self.counters.frames_sent);
        for _ in 0..SERVED_MAX[partition] {
            let Some(key) = self.next_connection(partition, backlog_bytes)? else { break };
            let slice_bytes = self.slice_bytes();
            let is_full = self.serve_connection(key, partition, slice_bytes)?;
            // After a slice, arrivals are checked first.
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

    fn next_connection(&mut self, partition: usize, backlog_bytes: usize) -> Result<Option<ConnectionKey>, LinkFault> {
        let state = &mut self.partitions[partition];
        let is_new_flows_turn = state.old_flows.is_empty() || state.new_flow_run < NEW_FLOW_RUN_MAX;
        if !is_new_flows_turn || state.new_flows.is_empty() {
            let backlog = || state.to.unread_slots().map_err(|corrupt| LinkFault::Lane { partition, corrupt });
            let lag_bytes = || state.to.credit_lag_slots() as usize * lane::SLOT_BYTES;
            let may_add = state.old_flows.is_empty()
                || backlog_bytes == usize::MAX
                || backlog()? as usize * lane::SLOT_BYTES <= backlog_bytes.saturating_add(lag_bytes());
            state.new_flow_run = 0;
            if may_add && !state.old_flows.is_empty() {
                return Ok(state.old_flows.pop_front());
            }
        }
        state.new_flow_run += 1;
        Ok(state.new_flows.pop_front())
    }

    /// Returns the slice of the next connection. It is longer on oversubscribed processors if no other connection was
    /// active recently. With enough processors short slices cost little, and a new flow never waits for a long one.
    fn slice_bytes(&self) -> usize {
        let is_alone =
            self.is_oversubscribed && self.polled.is_empty() && !self.partitions.iter().any(PartitionLanes::has_queued);
        if is_alone { self.settings.slice_bytes.max(SOLE_SLICE_BYTES) } else { self.settings.slice_bytes }
    }

    /// Serves a connection, up to `slice_bytes`; returns whether the partition is full.
    fn serve_connection(
        &mut self,
        key: ConnectionKey,
        partition: usize,
        slice_bytes: usize,
    ) -> Result<bool, LinkFault> {
        if self.table.get(key).is_none_or(|connection| connection.wait_state != WaitState::Queued) {
            return Ok(false);
        }
        // An `Open` precedes the first bytes, and a `Move` the first bytes in the new partition.
        let outcome = self.send_due_frames(key)?;
        let Some(connection) = self.table.get(key) else { return Ok(false) };
        if outcome == ControlOutcome::PartitionFull {
            self.queue_first(key);
            return Ok(true);
        }
        let class = connection.class;
        if self.partition_of(class) != partition {
            self.queue(key);
            return Ok(false);
        }
        let bytes_before = self.counters.bytes_sent;
        let mut remaining_bytes = slice_bytes;
        let mut remaining_frames = if remaining_bytes == usize::MAX { u64::MAX } else { FRAMES_PER_SLICE_MAX };
        let mut is_alone = !self.partitions.iter().any(PartitionLanes::has_queued);
        let end = loop {
            match self.send_frame(key, partition, remaining_bytes, std::mem::take(&mut is_alone))? {
                Ok(bytes) => remaining_bytes -= bytes,
                Err(end) => break end,
            }
            remaining_frames -= 1;
            if remaining_bytes == 0 || remaining_frames == 0 {
                break VisitEnd::Slice;
            }
        };
        let sent_bytes = self.counters.bytes_sent - bytes_before;
        self.classify(key, sent_bytes, matches!(end, VisitEnd::NoInput(_)));
        self.end_visit(key, end);
        Ok(end == VisitEnd::Full)
    }

    /// Sends one frame of at most `remaining_bytes`, and publishes it now or later. Returns its bytes.
    fn send_frame(
        &mut self,
        key: ConnectionKey,
        partition: usize,
        remaining_bytes: usize,
        publishes_at_once: bool,
    ) -> Result<Result<usize, VisitEnd>, LinkFault> {
        let Some(connection) = self.table.get(key) else { return Ok(Err(VisitEnd::NoInput(Input::Nothing))) };
        let input_bytes = match connection.input() {
            Input::Bytes(bytes) => bytes,
            input => return Ok(Err(VisitEnd::NoInput(input))),
        };
        let credit_bytes = usize::try_from(connection.send_limit - connection.sent).unwrap_or(usize::MAX);
        if credit_bytes == 0 {
            return Ok(Err(VisitEnd::NoCredit));
        }
        let wanted_bytes = input_bytes.min(credit_bytes).min(remaining_bytes).min(PAYLOAD_BYTES_MAX);
        if wanted_bytes >= LONG_FRAME_BYTES {
            self.publish_order.publish(&mut self.partitions, &mut self.counters);
        }
        let state = &mut self.partitions[partition];
        let draft = state.to.draft(HEADER_BYTES + wanted_bytes);
        let draft = draft.map_err(|corrupt| LinkFault::Lane { partition, corrupt })?;
        let Some(mut draft) = draft.filter(|draft| draft.room_bytes() > HEADER_BYTES) else {
            self.counters.partitions_full += u64::from(!std::mem::replace(&mut state.is_full, true));
            return Ok(Err(VisitEnd::Full));
        };
        let len_bytes = draft.room_bytes() - HEADER_BYTES;
        let aux = connection.sent as u32;
        draft.append(&FrameHeader { connection: connection.number, kind: FrameKind::Data, len_bytes, aux }.encode());
        let retransmit = match &mut connection.local {
            Some(local) if !self.settings.is_failover => {
                local.copy_input(&mut draft, len_bytes);
                None
            }
            _ => {
                let retransmit = connection.retain(len_bytes);
                connection.retransmit.from(connection.sent, len_bytes).iter().for_each(|piece| draft.append(piece));
                Some(retransmit)
            }
        };
        draft.stage();
        if publishes_at_once {
            self.publish_order.publish(&mut self.partitions, &mut self.counters);
        }
        let consumed = match (retransmit, &mut connection.local) {
            (None, Some(local)) => local.consume(len_bytes),
            (retransmit, _) => retransmit.unwrap_or(Ok(())),
        };
        connection.sent += len_bytes as u64;
        self.counters.frames_sent += 1;
        self.counters.bytes_sent += len_bytes as u64;
        self.note_forwarded(partition);
        self.note_activity(key);
        Ok(consumed.map(|()| len_bytes).map_err(|_| VisitEnd::NoInput(Input::Broken)))
    }

    /// Decides to which class the connection belongs, by what it has just sent.
    fn classify(&mut self, key: ConnectionKey, sent_bytes: u64, is_dry: bool) {
        let now_ns = self.now_ns;
        let has_classes = self.partitions.len() > 1;
        let sparse_bytes_max = (self.settings.slice_bytes / 4).min(SPARSE_BYTES_MAX) as u64;
        let Some(rule) = self.settings.placement.filter(|_| has_classes) else {
            if let Some(connection) = self.table.get(key) {
                connection.is_sparse = is_dry && sent_bytes <= sparse_bytes_max;
            }
            return;
        };
        let Some(connection) = self.table.get(key) else { return };
        connection.is_sparse = is_dry && sent_bytes <= sparse_bytes_max;
        let verdict = connection.traffic.note(now_ns, sent_bytes, &rule);
        if is_dry {
            connection.traffic.note_dry();
        }
        let Some(class) = verdict.filter(|_| connection.phase != Phase::Over) else { return };
        connection.class_next = class;
        if class == connection.class {
            connection.due.remove(Due::MOVE);
        } else {
            connection.due.add(Due::MOVE);
            self.queue_control(key);
        }
    }

    fn end_visit(&mut self, key: ConnectionKey, end: VisitEnd) {
        match end {
            VisitEnd::Slice => self.queue(key),
            VisitEnd::Full => self.queue_first(key),
            VisitEnd::NoCredit => {
                self.counters.stalls += 1;
                if let Some(connection) = self.table.get(key) {
                    connection.wait_state = WaitState::Idle;
                }
                self.poll_again(key);
            }
            VisitEnd::NoInput(input) => {
                if let Some(connection) = self.table.get(key) {
                    connection.wait_state = WaitState::Idle;
                }
                self.poll_again(key);
                self.handle_input_end(key, input);
                if self.settings.is_failover {
                    self.queue_final_frame(key);
                }
            }
        }
    }

    /// Queues a connection behind the others that wait to be served.
    pub(super) fn queue(&mut self, key: ConnectionKey) {
        self.queue_with(key, |queue, key| queue.push_back(key));
    }

    fn queue_first(&mut self, key: ConnectionKey) {
        self.queue_with(key, |queue, key| queue.push_front(key));
    }

    fn queue_with(
        &mut self,
        key: ConnectionKey,
        push: impl FnOnce(&mut std::collections::VecDeque<ConnectionKey>, ConnectionKey),
    ) {
        let Some(connection) = self.table.get(key) else { return };
        connection.wait_state = WaitState::Queued;
        let (class, is_sparse) = (connection.class, connection.is_sparse);
        let partition = self.partition_of(class);
        let state = &mut self.partitions[partition];
        push(if is_sparse { &mut state.new_flows } else { &mut state.old_flows }, key);
    }

    /// Publishes the frames that this poll has put into the partitions so far.
    pub(super) fn publish(&mut self) {
        self.publish_order.publish(&mut self.partitions, &mut self.counters);
    }

    /// Returns whether the peer sleeps and must be rung for what was published and received since the last call.
    pub(super) fn take_peer_wake_request(&mut self) -> bool {
        let mut ring = false;
        for partition in &mut self.partitions {
            if std::mem::take(&mut partition.has_sent) {
                ring |= partition.to.take_wake_request();
            }
            ring |= partition.from.take_wake_request();
        }
        self.counters.rings_peer += u64::from(ring);
        ring
    }
}

/// Returns the kind and the aux value of a due frame.
fn control_frame<L: LocalEndpoint>(connection: &mut Connection<L>, due: Due, credit_bytes: u32) -> (FrameKind, u32) {
    match due {
        Due::RESUME if connection.has_span => {
            (FrameKind::ResumeWithSpan, connection.local.as_ref().map_or(0, L::span_index))
        }
        Due::RESUME => (FrameKind::Resume, connection.received as u32),
        Due::OPEN => (FrameKind::Open, connection.granted as u32),
        Due::OPENED if connection.has_span => (FrameKind::OpenedWithSpan, connection.granted as u32),
        Due::OPENED => (FrameKind::Opened, connection.granted as u32),
        Due::LEFT => (FrameKind::Left, 0),
        Due::RING => (FrameKind::Ring, 0),
        Due::REFUSED => (FrameKind::Refused, connection.errno),
        Due::CREDIT => {
            connection.granted = connection.granted.max(connection.delivered() + u64::from(credit_bytes));
            (FrameKind::Credit, connection.granted as u32)
        }
        Due::MOVE => (FrameKind::Move, connection.class_next as u32),
        Due::FIN => (FrameKind::Fin, connection.sent as u32),
        Due::CLOSE => (FrameKind::Close, connection.sent as u32),
        _ => (FrameKind::Reset, connection.errno),
    }
}
