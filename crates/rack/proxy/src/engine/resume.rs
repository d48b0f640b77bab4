//! Leaving a lost link, and resuming over another transport.
//!
//! With failover, an end that sends `Refused`, `Close` or `Reset` remembers the connection until the peer has answered
//! `EndAck`, and bytes are retained until the peer's credit shows that its program has them. When the link is lost,
//! each end therefore knows every connection that the other one may know. On the new transport each end sends `Resume`
//! for all of them, with the position up to which it has received. Bytes that the peer does not have are sent again,
//! and so are the ends of the stream and of the connection. No other frame of a connection is sent before the peer has
//! resumed it.
//!
//! | this end | sends | the peer, if it does not know the connection |
//! |---|---|---|
//! | has opened, and was not answered | `Open`, again | opens it, because it has not received the first `Open` |
//! | all others | `Resume` | `Reset`: it received a final frame and has forgotten the connection |

use super::event::EngineEvent;
use super::partition::PartitionLanes;
use super::settings::EngineSettings;
use super::state::{CONNECTION_RESET, Engine};
use crate::connection::{Connection, Due, Phase, StreamEnd, WaitState};
use crate::counters::EngineCounters;
use crate::frame::{FrameHeader, FrameKind, Resumption};
use crate::local::LocalEndpoint;
use crate::placement::{Class, TrafficHistory};
use crate::table::{ConnectionKey, Table};
use fabric::{Inbound, Outbound};
use lane::Chunk;
use std::collections::VecDeque;

/// The connections of an engine that has lost its link. They are not touched until they are attached to another
/// transport.
#[derive(Debug)]
pub struct DetachedEngine<L> {
    settings: EngineSettings,
    table: Table<Connection<L>>,
    numbers_given: u32,
    events: VecDeque<EngineEvent<L>>,
    counters: EngineCounters,
    now_ns: u64,
}

impl<L: LocalEndpoint> DetachedEngine<L> {
    /// Returns the number of connections that are not over.
    pub fn connections(&self) -> usize {
        self.table.len()
    }

    /// Returns the engine's counters, and resets them.
    pub fn take_counters(&mut self) -> EngineCounters {
        std::mem::take(&mut self.counters)
    }

    /// Takes the events of a connection's descriptors, which are handled once the engine is attached.
    pub fn note_events(&mut self, key: ConnectionKey) {
        if let Some(local) = self.table.get(key).and_then(|connection| connection.local.as_mut()) {
            local.note_events();
        }
    }

    /// Attaches the connections to unused partitions; the peer does the same.
    ///
    /// # Panics
    /// As [`Engine::new`], and if bytes are not retained ([`EngineSettings::is_failover`]).
    pub fn attach<I: Inbound, O: Outbound>(self, partitions: Vec<PartitionLanes<I, O>>) -> Engine<I, O, L> {
        assert!(self.settings.is_failover, "an engine without failover is attached again");
        let mut engine = Engine {
            table: self.table,
            numbers_given: self.numbers_given,
            events: self.events,
            counters: self.counters,
            now_ns: self.now_ns,
            ..Engine::new(self.settings, partitions)
        };
        for key in engine.table.keys() {
            engine.begin_resuming(key);
        }
        engine
    }
}

impl<I: Inbound, O: Outbound, L: LocalEndpoint> Engine<I, O, L> {
    /// Leaves a lost link and its partitions, with all connections.
    pub fn detach(mut self) -> DetachedEngine<L> {
        self.wake_programs();
        DetachedEngine {
            settings: self.settings,
            table: self.table,
            numbers_given: self.numbers_given,
            events: self.events,
            counters: self.counters,
            now_ns: self.now_ns,
        }
    }

    /// Returns whether the peer has resumed every connection.
    pub fn is_resumed(&mut self) -> bool {
        self.table.keys().into_iter().all(|key| self.table.get(key).is_none_or(|connection| !connection.is_resuming))
    }

    /// Resets the connections that the peer has not resumed in time. Returns their number.
    pub fn reset_unresumed(&mut self) -> usize {
        self.reset_where(|connection| connection.is_resuming)
    }

    /// The new transport is lost too: resets all connections, except those that the peer has closed, whose bytes are
    /// still delivered to their programs by further polls. Returns the number of resets.
    pub fn lose_peer(&mut self) -> usize {
        self.orphans.clear();
        self.reset_where(|connection| connection.in_end != StreamEnd::Closed)
    }

    pub(super) fn reset_where(&mut self, is_selected: impl Fn(&Connection<L>) -> bool) -> usize {
        let mut resets = 0;
        for key in self.table.keys() {
            let Some(connection) = self.table.get(key).filter(|connection| is_selected(connection)) else { continue };
            let local = connection.local.take();
            self.table.remove(key);
            // A connection that was over had no program any more.
            resets += usize::from(local.is_some());
            local.map(L::reset).unwrap_or_default();
        }
        self.counters.resets += resets as u64;
        resets
    }

    fn begin_resuming(&mut self, key: ConnectionKey) {
        let now_ns = self.now_ns;
        let Some(connection) = self.table.get(key) else { return };
        (connection.is_in_polled, connection.is_in_control, connection.is_in_wake_list) = (false, false, false);
        (connection.class, connection.class_next, connection.in_class) =
            (Class::Latency, Class::Latency, Class::Latency);
        (connection.traffic, connection.is_sparse) = (TrafficHistory::new(now_ns), true);
        let wait_state = std::mem::replace(&mut connection.wait_state, WaitState::Idle);
        if let Some(local) = connection.local.as_mut().filter(|_| wait_state == WaitState::Parked) {
            local.unpark();
        }
        if connection.in_end == StreamEnd::Closed {
            // The peer has forgotten the connection. Received bytes must still be delivered.
            connection.due = Due::default();
            return self.poll_again(key);
        }
        connection.is_resuming = true;
        connection.due = if connection.phase == Phase::Opening { Due::OPEN } else { Due::RESUME };
        self.queue_control(key);
    }

    /// Acknowledges a final frame, so that the peer may forget the connection.
    pub(super) fn acknowledge_end(&mut self, key: ConnectionKey) {
        if let Some(connection) = self.table.get(key).filter(|_| self.settings.is_failover) {
            self.orphans.push_back(FrameHeader::control(connection.number, FrameKind::EndAck, 0));
        }
    }

    /// Grants credit when a connection becomes idle, which lets the peer discard bytes that it retains.
    pub(super) fn send_idle_credit(&mut self, key: ConnectionKey) {
        let credit_bytes = u64::from(self.settings.credit_bytes);
        let Some(connection) = self.table.get(key).filter(|_| self.settings.is_failover) else { return };
        let retained_bytes = connection.delivered().saturating_add(credit_bytes).saturating_sub(connection.granted);
        if retained_bytes >= credit_bytes / RETAINED_PARTS
            && connection.phase == Phase::Open
            && connection.in_end == StreamEnd::None
        {
            connection.due.add(Due::CREDIT);
            self.queue_control(key);
        }
    }

    /// Queues the final frame, once everything before it has been sent again.
    pub(super) fn queue_final_frame(&mut self, key: ConnectionKey) {
        let Some(connection) = self.table.get(key) else { return };
        if connection.phase == Phase::Over && connection.unsent_bytes() == 0 {
            let final_frame = connection.final_frame;
            connection.due.add(final_frame);
            self.queue_control(key);
        }
    }

    /// Handles frames for a connection that one end has ended, which need no order. Returns whether the frame is done
    /// with.
    pub(super) fn handle_frame_after_end(&mut self, key: ConnectionKey, kind: FrameKind) -> bool {
        let Some(connection) = self.table.get(key) else { return false };
        if connection.in_end == StreamEnd::Closed {
            self.counters.frames_late += 1;
            if matches!(kind, FrameKind::Resume | FrameKind::Close) {
                self.acknowledge_end(key);
            }
            return true;
        }
        let is_answer = kind == FrameKind::EndAck && connection.phase == Phase::Over;
        if is_answer {
            self.table.remove(key);
        }
        is_answer
    }

    /// Handles a frame for a connection that this end has ended, or is about to end.
    pub(super) fn handle_late_frame(
        &mut self,
        key: ConnectionKey,
        partition: usize,
        header: &FrameHeader,
        chunk: Chunk,
    ) {
        if header.kind == FrameKind::Move {
            // Otherwise later frames would be expected in the wrong partition.
            let _ = self.handle_move(key, partition, header.aux);
            return;
        }
        let Some(connection) = self.table.get(key).filter(|_| self.settings.is_failover) else { return };
        let is_resuming = connection.is_resuming;
        match header.kind {
            // Both ends send a final frame. The peer may never receive this end's, so its own counts as the
            // acknowledgement.
            FrameKind::Refused | FrameKind::Close | FrameKind::Reset => {
                self.acknowledge_end(key);
                self.table.remove(key);
            }
            FrameKind::Open | FrameKind::Opened | FrameKind::Resume
                if is_resuming && self.handle_resuming_frame(key, partition, header, chunk).is_err() =>
            {
                self.table.remove(key);
            }
            _ => {}
        }
    }

    /// Handles the first frame of a connection on a new transport.
    pub(super) fn handle_resuming_frame(
        &mut self,
        key: ConnectionKey,
        partition: usize,
        header: &FrameHeader,
        chunk: Chunk,
    ) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        let is_opening = connection.phase == Phase::Opening;
        let at_start = Resumption { limit: header.aux, has_end: false };
        match header.kind {
            FrameKind::Resume => {
                let resumption = Resumption::decode(&self.payload(partition, chunk));
                self.resume(key, header.aux, resumption.ok_or("an invalid resumption")?)
            }
            // The peer does not know that its `Open` was answered.
            FrameKind::Open if header.connection.opener() != self.settings.side => {
                if connection.phase == Phase::Open || connection.final_frame == Due::CLOSE {
                    connection.due.add(Due::OPENED);
                }
                self.resume(key, 0, at_start)
            }
            // The peer had not received the first `Open`.
            FrameKind::Opened if header.connection.opener() == self.settings.side => {
                self.resume(key, 0, at_start)?;
                if is_opening { self.handle_opened(key, header.aux) } else { Ok(()) }
            }
            FrameKind::Refused if is_opening => self.handle_refused(key, header.aux),
            FrameKind::Reset => {
                self.handle_reset(key);
                Ok(())
            }
            _ => Err("a frame before the resumption"),
        }
    }

    /// Answers a resumption of an unknown connection: the peer has not received the acknowledgement of its end, or the
    /// connection was lost with this node's proxy.
    pub(super) fn handle_unknown_resumption(&mut self, header: &FrameHeader) {
        if header.kind == FrameKind::ResumeWithSpan || (header.kind == FrameKind::Resume && self.settings.is_failover) {
            self.orphans.push_back(FrameHeader::control(header.connection, FrameKind::Reset, CONNECTION_RESET));
        }
    }

    /// Resumes a connection: the peer has the bytes before `received`; the others are sent again.
    fn resume(&mut self, key: ConnectionKey, received: u32, theirs: Resumption) -> Result<(), &'static str> {
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        if connection.phase == Phase::Over && connection.final_frame != Due::CLOSE {
            connection.is_resuming = false;
            self.queue_final_frame(key);
            return Ok(());
        }
        let received = connection.retransmit.position(received).filter(|position| *position <= connection.sent);
        let received = received.ok_or("a resumption from an impossible position")?;
        if theirs.has_end && connection.out_end == StreamEnd::None {
            return Err("an end that was never sent");
        }
        let limit = Connection::<L>::position_after(connection.sent, theirs.limit);
        let limit = limit.filter(|limit| *limit >= connection.send_limit).ok_or("reduced credit")?;
        (connection.send_limit, connection.sent, connection.is_resuming) = (limit, received, false);
        connection.retransmit.forget_before(received);
        if connection.out_end == StreamEnd::Finished && !theirs.has_end {
            // The end is found again after the bytes that are sent again.
            connection.out_end = StreamEnd::None;
        }
        self.queue_control(key);
        self.queue(key);
        Ok(())
    }
}

/// The peer of an idle connection retains less than this fraction of the credit.
const RETAINED_PARTS: u64 = 64;
