//! The engine: what a poll does, and in which order.
//!
//! * `receive`: frames from the peer.
//! * `send`: frames to the peer, and which connection sends next.
//! * `parking`: polling local endpoints, parking them, and sleeping.
//! * `yielding`: yielding the processor when it is shared.
//! * `resume`: leaving a lost link, and resuming over another transport.
//! * `direct`: connections whose programs store into the windows themselves.

mod direct;
mod parking;
mod receive;
mod resume;
mod send;
mod yielding;

pub use direct::SuspendedConnection;
pub use resume::DetachedEngine;

use crate::connection::{CREDIT_BYTES_INITIAL, CREDIT_BYTES_MAX, Connection, Due, Phase, StreamEnd, WaitState};
use crate::frame::{ConnectionNumber, FrameError, FrameHeader, FrameKind, LinkSide};
use crate::table::Table;
use crate::{Class, ConnectionKey, EngineCounters, LocalEndpoint, OpenPayload, Placement};
use fabric::{Inbound, Outbound};
use lane::{Consumer, Corrupt, Producer};
use send::PublishOrder;
use std::collections::VecDeque;
use thiserror::Error;
use yielding::Yielding;

/// Bound on queued frames without a connection: refusals when the table is full.
const ORPHANS_MAX: usize = 256;

/// Number of connections that are polled before earlier frames are published: polling them takes no longer than a
/// fence.
const POLLED_UNPUBLISHED_MAX: usize = 16;
/// Polls in which an engine on oversubscribed processors wakes nobody: as many slices as fill a program's buffer of 64
/// KiB.
const POLLS_WITHOUT_WAKE_MAX: u32 = 32;
/// Factor by which an engine on oversubscribed processors polls a connection for longer, because other threads run
/// meanwhile.
const OVERSUBSCRIBED_POLL_FACTOR: u64 = 10;

/// How an engine works.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineSettings {
    /// Which side of the link this node is.
    pub side: LinkSide,
    /// The first number that this engine gives to a connection.
    pub number_first: u32,
    /// The difference between consecutive numbers: how many engines of this node share the link.
    pub number_step: u32,
    /// A secret that keeps the peer from choosing connection numbers that collide in the hash table.
    pub secret: u64,
    /// Bound on simultaneous connections.
    pub connections_max: usize,
    /// Bytes that a connection sends before the next one is served; `usize::MAX` switches slicing off.
    pub slice_bytes: usize,
    /// Unread bytes in a partition beyond which only short messages are added.
    pub backlog_bytes: usize,
    /// Bound on the bytes in flight to one connection.
    pub credit_bytes: u32,
    /// Bytes are retained until the peer has acknowledged them, so that connections can outlive the link. Both nodes
    /// must agree.
    pub is_failover: bool,
    /// How long a connection is polled after it was last active.
    pub poll_ns: u64,
    /// When a connection changes its class; `None` keeps all in the class in which they began.
    pub placement: Option<Placement>,
}

impl EngineSettings {
    /// Returns the defaults for an engine that has its side of a link to itself.
    pub fn new(side: LinkSide) -> Self {
        Self {
            side,
            number_first: 0,
            number_step: 1,
            secret: 0,
            connections_max: 65_536,
            slice_bytes: 2 << 10,
            backlog_bytes: 32 << 10,
            credit_bytes: 256 << 10,
            is_failover: false,
            poll_ns: 50_000,
            placement: Some(Placement::default()),
        }
    }

    fn check(&self) {
        assert!(self.slice_bytes > 0 && self.connections_max > 0 && self.number_step > 0, "{self:?}");
        assert!((CREDIT_BYTES_INITIAL..=CREDIT_BYTES_MAX / 2).contains(&self.credit_bytes), "{self:?}");
    }
}

/// A partition, as a lane in each direction, and the connections that wait to send in it.
#[derive(Debug)]
pub struct PartitionLanes<I, O> {
    to: Producer<O, I>,
    from: Consumer<I, O>,
    /// Connections that became active again with few bytes to send (RFC 8290, new flows).
    new_flows: VecDeque<ConnectionKey>,
    /// Connections that were served and have more to send (RFC 8290, old flows).
    old_flows: VecDeque<ConnectionKey>,
    /// Connections that have control frames to send.
    control: VecDeque<ConnectionKey>,
    /// Connections of `new_flows` served since `old_flows` was last served.
    new_flow_run: u32,
    /// The last frame found no room.
    is_full: bool,
    /// Something was published for which the peer was not woken yet.
    has_sent: bool,
}

impl<I: Inbound, O: Outbound> PartitionLanes<I, O> {
    /// Takes the lane to the peer and the lane from it, both unused.
    pub fn new(to: Producer<O, I>, from: Consumer<I, O>) -> Self {
        let [new_flows, old_flows, control] = [const { VecDeque::new() }; 3];
        Self { to, from, new_flows, old_flows, control, new_flow_run: 0, is_full: false, has_sent: false }
    }

    /// Returns whether nothing has arrived, and nothing waits to be sent.
    #[inline]
    fn is_quiet(&self) -> bool {
        !self.has_sent && !self.has_queued() && !self.from.may_have_data()
    }

    #[inline]
    fn has_queued(&self) -> bool {
        !(self.new_flows.is_empty() && self.old_flows.is_empty() && self.control.is_empty())
    }
}

/// An event that the engine's driver must handle.
#[derive(Debug)]
pub enum EngineEvent<L> {
    /// A program of the other node connects: find its server, then call [`Engine::answer`].
    Open {
        /// Identifies the connection in the answer.
        key: ConnectionKey,
        /// What the other node says about the connection: hostile.
        open_payload: OpenPayload,
    },
    /// The other node has no server for a program of this one.
    Refused {
        /// The program's connection, still open.
        local: L,
        /// The error number that the other node gave: hostile.
        errno: u32,
    },
    /// The peer violated the protocol for one connection, which was reset.
    Violation {
        /// The connection's number.
        number: ConnectionNumber,
        /// The violation.
        what: &'static str,
    },
}

/// A fault after which the link cannot be used: take it down.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LinkFault {
    /// The lane of a partition is corrupt.
    #[error("partition {partition}: {corrupt}")]
    Lane {
        /// Index of the partition in this engine.
        partition: usize,
        /// What is corrupt.
        corrupt: Corrupt,
    },
    /// A record is not a valid frame.
    #[error("partition {partition}: {error}")]
    Frame {
        /// Index of the partition in this engine.
        partition: usize,
        /// What is invalid.
        error: FrameError,
    },
    /// The peer opened a connection with a number that only this node may assign.
    #[error("the peer opened connection {:#x}, a number that only this node assigns", .0.0)]
    ConnectionNumber(ConnectionNumber),
    /// The peer opens connections and does not receive the refusals.
    #[error("the peer opens more than {0} connections and does not receive the refusals")]
    Flood(usize),
}

/// The outcome of a poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PollOutcome {
    /// Something was received or sent: poll again.
    pub progressed: bool,
    /// The peer sleeps: ring its doorbell.
    pub ring_peer: bool,
    /// A short message may wait for this processor: yield to other threads.
    pub should_yield: bool,
}

/// One or two partitions of a link, and the connections in them. See the crate's documentation.
#[derive(Debug)]
pub struct Engine<I, O, L> {
    settings: EngineSettings,
    partitions: Vec<PartitionLanes<I, O>>,
    table: Table<Connection<L>>,
    numbers_given: u32,
    polled: Vec<ConnectionKey>,
    wake_list: Vec<ConnectionKey>,
    orphans: VecDeque<FrameHeader>,
    events: VecDeque<EngineEvent<L>>,
    counters: EngineCounters,
    publish_order: PublishOrder,
    now_ns: u64,
    /// A partition is being drained because the other one is ahead of it.
    is_catching_up: bool,
    /// Threads that are woken would take the processor from the engine's driver.
    is_oversubscribed: bool,
    /// Polls with progress since sleepers were last woken.
    polls_without_wake: u32,
    yielding: Yielding,
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
    /// [`Engine::lifeline_ready`]. Returns `None` if there are too many connections.
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
            Ok(local) if local.is_direct() => {
                connection.local = Some(local);
                self.begin_direct(key);
            }
            Ok(local) => {
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

    /// Receives what has arrived and sends what there is room for, a bounded amount of both.
    ///
    /// # Errors
    /// The link must be taken down: see [`Engine::take_down`].
    pub fn poll(&mut self, now_ns: u64) -> Result<PollOutcome, LinkFault> {
        self.now_ns = self.now_ns.max(now_ns);
        let mut progressed = false;
        if self.partitions_are_quiet() {
            if self.polled_are_quiet() {
                self.note_idle_poll();
                return Ok(PollOutcome::default());
            }
        } else {
            for partition in 0..self.partitions.len() {
                progressed |= self.receive(partition)?;
            }
            progressed |= self.send_control_frames()?;
        }
        if self.polled.len() > POLLED_UNPUBLISHED_MAX {
            self.publish();
        }
        self.poll_connections();
        for partition in 0..self.partitions.len() {
            progressed |= self.serve_partition(partition, self.settings.backlog_bytes)?;
        }
        progressed |= self.send_control_frames()?;
        self.publish();
        let should_yield = self.should_yield();
        if self.is_oversubscribed && progressed && self.polls_without_wake < POLLS_WITHOUT_WAKE_MAX {
            self.polls_without_wake += 1;
            return Ok(PollOutcome { progressed, ring_peer: false, should_yield });
        }
        self.polls_without_wake = 0;
        self.wake_programs();
        Ok(PollOutcome { progressed, ring_peer: self.take_peer_wake_request(), should_yield })
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

    fn next_number(&mut self) -> Option<ConnectionNumber> {
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
    fn partition_of(&self, class: Class) -> usize {
        (class as usize).min(self.partitions.len() - 1)
    }

    /// Queues a connection that has control frames to send.
    fn queue_control(&mut self, key: ConnectionKey) {
        self.queue_control_with(key, VecDeque::push_back);
    }

    /// As [`Engine::queue_control`], ahead of the others.
    fn queue_control_first(&mut self, key: ConnectionKey) {
        self.queue_control_with(key, VecDeque::push_front);
    }

    fn queue_control_with(
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

    /// Records activity. The program is woken at the end of the poll, if it sleeps.
    fn note_activity(&mut self, key: ConnectionKey) {
        let (now_ns, has_latency_traffic) = (self.now_ns, self.has_latency_traffic());
        if let Some(connection) = self.table.get(key) {
            connection.active_ns = now_ns;
            if has_latency_traffic || connection.is_yielding {
                connection.update_yielding(has_latency_traffic);
            }
            if !std::mem::replace(&mut connection.is_in_wake_list, true) {
                self.wake_list.push(key);
            }
        }
    }

    fn wake_programs(&mut self) {
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
    fn retire(&mut self, key: ConnectionKey, final_frame: Due) {
        let Some(connection) = self.table.get(key) else { return };
        let unsaid = connection.due;
        let is_peer_gone = self.settings.is_failover && connection.in_end == StreamEnd::Closed;
        if connection.is_direct && connection.is_resuming {
            // If the peer still has it, it waits for a frame of it.
            self.orphans.push_back(FrameHeader::control(connection.number, FrameKind::Reset, connection.errno));
            self.table.remove(key);
            return;
        }
        if is_peer_gone || (final_frame == Due::RESET && unsaid.has(Due::OPEN)) {
            // The peer never knew the connection, or has forgotten it, and needs no frame.
            self.table.remove(key);
            return;
        }
        (connection.due, connection.final_frame) = (final_frame, final_frame);
        if unsaid.has(Due::RESUME) {
            connection.due.add(Due::RESUME);
        }
        if final_frame != Due::CLOSE {
            connection.retransmit.clear(connection.sent);
        }
        // A connection that is closed in good order must have been opened at the peer.
        for first in [Due::OPEN, Due::OPENED] {
            if final_frame == Due::CLOSE && unsaid.has(first) {
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
    fn reset(&mut self, key: ConnectionKey, errno: u32) {
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
    fn reset_for_violation(&mut self, key: ConnectionKey, what: &'static str) {
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

    fn refuse_table_full(&mut self, number: ConnectionNumber) -> Result<(), LinkFault> {
        self.orphans.push_back(FrameHeader::control(number, FrameKind::Refused, TABLE_FULL));
        self.check_orphans()
    }

    /// Returns a fault if the peer lets replies pile up because it does not receive them.
    fn check_orphans(&self) -> Result<(), LinkFault> {
        // With failover, every final frame is acknowledged, and the peer may send one for all connections at once.
        let more = if self.settings.is_failover { self.settings.connections_max } else { 0 };
        let is_fine = self.orphans.len() <= ORPHANS_MAX + more;
        if is_fine { Ok(()) } else { Err(LinkFault::Flood(self.settings.connections_max)) }
    }
}

/// `EPROTO`: the error of a reset after a protocol violation.
const PROTOCOL_ERROR: u32 = 71;
/// `ECONNRESET`: the error of a reset after a program was reset, or reset the connection.
const CONNECTION_RESET: u32 = 104;
/// `ENOBUFS`: the error of a refusal when there are too many connections.
const TABLE_FULL: u32 = 105;
