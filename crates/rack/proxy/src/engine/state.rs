//! The state of an engine, and what all its parts do with it: connections, queues of control frames, resets.

use super::event::{EngineEvent, LinkFault};
use super::partition::{PartitionLanes, PublishOrder};
use super::settings::EngineSettings;
use super::yielding::Yielding;
use crate::connection::{Connection, Due, OpenPayload, Phase, StreamEnd, WaitState};
use crate::counters::EngineCounters;
use crate::frame::{ConnectionNumber, FrameHeader, FrameKind};
use crate::local::LocalEndpoint;
use crate::placement::Class;
use crate::table::{ConnectionKey, Table};
use fabric::{Inbound, Outbound};
use std::collections::VecDeque;

/// Bound on queued frames without a connection: refusals when the table is full.
const ORPHANS_MAX: usize = 256;
/// `EPROTO`: the error of a reset after a protocol violation.
pub(super) const PROTOCOL_ERROR: u32 = 71;
/// `ECONNRESET`: the error of a reset after a program was reset, or reset the connection.
pub(super) const CONNECTION_RESET: u32 = 104;
/// `ENOBUFS`: the error of a refusal when there are too many connections.
const TABLE_FULL: u32 = 105;

/// One or two partitions of a link, and the connections in them. See the crate's documentation.
#[derive(Debug)]
pub struct Engine<I, O, L> {
    pub(super) settings: EngineSettings,
    pub(super) partitions: Vec<PartitionLanes<I, O>>,
    pub(super) table: Table<Connection<L>>,
    /// Counts the connections that this engine has opened, modulo its share of the numbers.
    pub(super) numbers_given: u32,
    /// Connections whose programs every poll checks for input.
    pub(super) polled: Vec<ConnectionKey>,
    /// Connections whose programs are woken at the end of the poll.
    pub(super) wake_list: Vec<ConnectionKey>,
    /// Frames to send that belong to no connection of the table.
    pub(super) orphans: VecDeque<FrameHeader>,
    pub(super) events: VecDeque<EngineEvent<L>>,
    pub(super) counters: EngineCounters,
    pub(super) publish_order: PublishOrder,
    /// The time of this poll.
    pub(super) now_ns: u64,
    /// A partition is being drained because the other one is ahead of it.
    pub(super) is_catching_up: bool,
    /// Threads that are woken would take the processor from the engine's driver.
    pub(super) is_oversubscribed: bool,
    /// Polls with progress since sleepers were last woken.
    pub(super) polls_without_wake: u32,
    pub(super) yielding: Yielding,
}

impl<I: Inbound, O: Outbound, L: LocalEndpoint> Engine<I, O, L> {
    /// Creates an engine over unused partitions: of the latency class, then, if there is one, of the bulk class.
    ///
    /// # Panics
    /// If there is no partition or more than two, or if a setting is out of range.
    pub fn new(settings: EngineSettings, partitions: Vec<PartitionLanes<I, O>>) -> Self {
        settings.check();
        assert!((1..=Class::ALL.len()).contains(&partitions.len()), "an engine with {} partitions", partitions.len());
        Self {
            settings,
            partitions,
            table: Table::new(settings.connections_max, settings.secret),
            numbers_given: 0,
            polled: Vec::new(),
            wake_list: Vec::new(),
            orphans: VecDeque::new(),
            events: VecDeque::new(),
            counters: EngineCounters::default(),
            publish_order: PublishOrder::default(),
            now_ns: 0,
            is_catching_up: false,
            is_oversubscribed: false,
            polls_without_wake: 0,
            yielding: Yielding::default(),
        }
    }

    /// Sets whether there are fewer processors than threads that need one. If so, sleepers are woken when nothing more
    /// arrives for them, or after some polls: woken at once, they would take the processor for the first piece of what
    /// they wait for. Connections are also polled for longer.
    pub fn set_oversubscribed(&mut self, is_oversubscribed: bool) {
        self.is_oversubscribed = is_oversubscribed;
    }

    /// Returns the counters since the engine began.
    pub fn counters(&self) -> &EngineCounters {
        &self.counters
    }

    /// Returns the number of connections that are not over.
    pub fn connections(&self) -> usize {
        self.table.len()
    }

    /// Opens a connection from a program of this node to a server of the other. `make` receives the key for
    /// [`Engine::endpoint_ready`]. Returns `None` if there are too many connections.
    pub fn open(&mut self, open_payload: OpenPayload, make: impl FnOnce(ConnectionKey) -> L) -> Option<ConnectionKey> {
        if self.table.is_full() {
            return None;
        }
        let number = self.next_number()?;
        let mut connection = Connection::new(number, Phase::Opening, self.now_ns);
        connection.open_payload = Some(open_payload);
        connection.due.add(Due::OPEN);
        connection.granted = u64::from(self.settings.credit_bytes);
        let key = self.table.insert(number, connection);
        let local = make(key);
        let connection = self.table.get(key).expect("inserted above");
        connection.local = Some(local);
        self.counters.connections_opened += 1;
        self.queue_control(key);
        self.poll_again(key);
        Some(key)
    }

    /// Answers [`EngineEvent::Open`] with the local endpoint, or with an error number.
    pub fn answer(&mut self, key: ConnectionKey, answer: Result<L, u32>) {
        let credit_bytes = u64::from(self.settings.credit_bytes);
        let Some(connection) = self.table.get(key).filter(|connection| connection.phase == Phase::Answering) else {
            // The connection was reset in the meantime.
            return answer.map(L::reset).unwrap_or_default();
        };
        match answer {
            Ok(mut local) => {
                connection.has_span = local.begin_with_span(connection.number);
                connection.local = Some(local);
                connection.phase = Phase::Open;
                connection.granted = credit_bytes;
                connection.due.add(Due::OPENED);
                self.counters.connections_opened += 1;
                self.queue_control(key);
                self.deliver_undelivered(key);
                self.poll_again(key);
            }
            Err(errno) => {
                connection.errno = errno;
                self.retire(key, Due::REFUSED);
            }
        }
    }

    /// Returns the next event that the driver must handle.
    pub fn next_event(&mut self) -> Option<EngineEvent<L>> {
        self.events.pop_front()
    }

    /// The link is lost: resets all its connections.
    pub fn take_down(&mut self) {
        self.polled.clear();
        self.wake_list.clear();
        self.orphans.clear();
        for connection in self.table.drain() {
            if let Some(local) = connection.local {
                self.counters.resets += 1;
                local.reset();
            }
        }
    }

    pub(super) fn next_number(&mut self) -> Option<ConnectionNumber> {
        // Numbers in use are rare and far behind: the counter needs hours to wrap around.
        for _ in 0..=self.table.len() {
            let count =
                self.settings.number_first.wrapping_add(self.numbers_given.wrapping_mul(self.settings.number_step));
            let is_last = count >= (1 << 31) - self.settings.number_step;
            self.numbers_given = if is_last { 0 } else { self.numbers_given + 1 };
            let number = ConnectionNumber::new(count, self.settings.side);
            if self.table.find(number).is_none() {
                return Some(number);
            }
        }
        None
    }

    /// Returns the index of the partition of a class.
    pub(super) fn partition_of(&self, class: Class) -> usize {
        (class as usize).min(self.partitions.len() - 1)
    }

    /// Queues a connection that has control frames to send.
    pub(super) fn queue_control(&mut self, key: ConnectionKey) {
        self.queue_control_with(key, VecDeque::push_back);
    }

    /// As [`Engine::queue_control`], ahead of the others.
    pub(super) fn queue_control_first(&mut self, key: ConnectionKey) {
        self.queue_control_with(key, VecDeque::push_front);
    }

    pub(super) fn queue_control_with(
        &mut self,
        key: ConnectionKey,
        push: impl FnOnce(&mut VecDeque<ConnectionKey>, ConnectionKey),
    ) {
        let Some(connection) = self.table.get(key) else { return };
        if std::mem::replace(&mut connection.is_in_control, true) {
            return;
        }
        let class = connection.class;
        let partition = self.partition_of(class);
        push(&mut self.partitions[partition].control, key);
    }

    /// Records that bytes were forwarded through a partition. They are short messages only if streams have a partition
    /// of their own.
    pub(super) fn note_forwarded(&mut self, partition: usize) {
        if self.partitions.len() > 1 && partition == Class::Latency as usize {
            self.yielding.note_latency_forwarded();
        }
    }

    /// Records activity. The program is woken at the end of the poll, if it sleeps.
    pub(super) fn note_activity(&mut self, key: ConnectionKey) {
        let now_ns = self.now_ns;
        if let Some(connection) = self.table.get(key) {
            connection.active_ns = now_ns;
            if !std::mem::replace(&mut connection.is_in_wake_list, true) {
                self.wake_list.push(key);
            }
        }
    }

    pub(super) fn wake_programs(&mut self) {
        while let Some(key) = self.wake_list.pop() {
            if let Some(connection) = self.table.get(key) {
                connection.is_in_wake_list = false;
                if let Some(local) = &mut connection.local {
                    self.counters.rings_local += u64::from(local.wake_sleeper());
                }
            }
        }
    }

    /// Ends a connection at this node; `final_frame` is the last frame that the peer receives for it.
    pub(super) fn retire(&mut self, key: ConnectionKey, final_frame: Due) {
        let Some(connection) = self.table.get(key) else { return };
        let due_before = connection.due;
        let is_peer_gone = self.settings.is_failover && connection.in_end == StreamEnd::Closed;
        if connection.is_suspended() {
            // If the peer still has it, it waits for a frame of it.
            self.orphans.push_back(FrameHeader::control(connection.number, FrameKind::Reset, connection.errno));
            self.table.remove(key);
            return;
        }
        if is_peer_gone || (final_frame == Due::RESET && due_before.has(Due::OPEN)) {
            // The peer never knew the connection, or has forgotten it, and needs no frame.
            self.table.remove(key);
            return;
        }
        (connection.due, connection.final_frame) = (final_frame, final_frame);
        if due_before.has(Due::RESUME) {
            connection.due.add(Due::RESUME);
        }
        if final_frame != Due::CLOSE {
            connection.retransmit.clear(connection.sent);
        }
        // A connection that is closed in good order must have been opened at the peer.
        for first in [Due::OPEN, Due::OPENED] {
            if final_frame == Due::CLOSE && due_before.has(first) {
                connection.due.add(first);
            }
        }
        connection.class_next = connection.class;
        connection.phase = Phase::Over;
        connection.undelivered = VecDeque::new();
        connection.wait_state = WaitState::Idle;
        self.queue_control(key);
    }

    /// Resets a connection at both ends.
    pub(super) fn reset(&mut self, key: ConnectionKey, errno: u32) {
        let Some(connection) = self.table.get(key) else { return };
        if connection.phase == Phase::Over {
            return;
        }
        connection.errno = errno;
        if let Some(local) = connection.local.take() {
            local.reset();
        }
        self.counters.resets += 1;
        self.retire(key, Due::RESET);
    }

    /// Resets a connection because the peer violated the protocol.
    pub(super) fn reset_for_violation(&mut self, key: ConnectionKey, what: &'static str) {
        let Some(connection) = self.table.get(key) else { return };
        if connection.phase == Phase::Over {
            return;
        }
        let number = connection.number;
        self.counters.violations += 1;
        if self.events.len() < ORPHANS_MAX {
            self.events.push_back(EngineEvent::Violation { number, what });
        }
        self.reset(key, PROTOCOL_ERROR);
    }

    pub(super) fn refuse_table_full(&mut self, number: ConnectionNumber) -> Result<(), LinkFault> {
        self.orphans.push_back(FrameHeader::control(number, FrameKind::Refused, TABLE_FULL));
        self.check_orphans()
    }

    /// Returns a fault if the peer lets replies pile up because it does not receive them.
    pub(super) fn check_orphans(&self) -> Result<(), LinkFault> {
        // With failover, every final frame is acknowledged, and the peer may send one for all connections at once.
        let more = if self.settings.is_failover { self.settings.connections_max } else { 0 };
        let is_fine = self.orphans.len() <= ORPHANS_MAX + more;
        if is_fine { Ok(()) } else { Err(LinkFault::Flood(self.settings.connections_max)) }
    }
}
