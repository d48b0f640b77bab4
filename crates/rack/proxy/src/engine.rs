//! The engine: what happens in a turn, and in which order.
//!
//! * `receive`: frames of the peer.
//! * `send`: frames to the peer, and whose turn it is.
//! * `rest`: looking at local ends, parking them, and sleeping.
//! * `manners`: letting others run, where processors are few.
//! * `resume`: leaving a link that is lost, and going on elsewhere.
//! * `direct`: connections whose programs store into the windows themselves.

mod direct;
mod manners;
mod receive;
mod rest;
mod resume;
mod send;

pub use direct::Held;
pub use resume::Detached;

use crate::connection::{CREDIT_BYTES_INITIAL, CREDIT_BYTES_MAX, Connection, Due, End, Phase, Place};
use crate::frame::{FrameError, Header, Kind, Number, Side};
use crate::table::Table;
use crate::{Class, Counters, Key, Local, Placement, Tuple};
use fabric::{Inbound, Outbound};
use lane::{Consumer, Corrupt, Producer};
use manners::Manners;
use send::Shown;
use std::collections::VecDeque;
use thiserror::Error;

/// Frames without a connection that wait for room: refusals of what a full table cannot take.
const ORPHANS_MAX: usize = 256;

/// Connections that are looked at while the peer is not shown what was said before: no more than take as long as a
/// fence.
const LOOKS_UNPUBLISHED_MAX: usize = 16;
/// Turns in which a crowded engine does not ring: what a program's buffer of 64 KiB takes, in slices.
const TURNS_UNRUNG_MAX: u32 = 32;
/// How many times as long as ever a crowded engine looks at a connection: the others have their turns meanwhile.
const CROWDED_AWAKE: u64 = 10;

/// How an engine works.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Which end of the link this node is.
    pub side: Side,
    /// The first number that this engine gives to a connection.
    pub number_first: u32,
    /// From one number to the next: how many engines of this node share the link.
    pub number_step: u32,
    /// Keeps the peer from choosing numbers that are slow to find.
    pub secret: u64,
    /// Connections at a time.
    pub connections_max: usize,
    /// Bytes that a connection sends before it is another's turn; `usize::MAX` switches slicing off.
    pub slice_bytes: usize,
    /// Bytes in a partition that the peer has not taken, beyond which only short messages are added.
    pub backlog_bytes: usize,
    /// Bytes under way to one connection, at most.
    pub credit_bytes: u32,
    /// Bytes are kept until the peer has them, so that connections can outlive the link. Both nodes' alike.
    pub is_failover: bool,
    /// How long a connection is looked at after it last had something.
    pub awake_ns: u64,
    /// What makes a connection move; `None` leaves all where they began.
    pub placement: Option<Placement>,
}

impl Settings {
    /// The defaults, for this end of a link and an engine that has it to itself.
    pub fn new(side: Side) -> Self {
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
            awake_ns: 50_000,
            placement: Some(Placement::default()),
        }
    }

    fn check(&self) {
        assert!(self.slice_bytes > 0 && self.connections_max > 0 && self.number_step > 0, "{self:?}");
        assert!((CREDIT_BYTES_INITIAL..=CREDIT_BYTES_MAX / 2).contains(&self.credit_bytes), "{self:?}");
    }
}

/// A partition: a lane each way.
#[derive(Debug)]
pub struct Port<I, O> {
    to: Producer<O, I>,
    from: Consumer<I, O>,
    /// Those that came back with little to say.
    fresh: VecDeque<Key>,
    /// Those that had their turn and have more.
    stale: VecDeque<Key>,
    /// Those that have something to say besides bytes.
    control: VecDeque<Key>,
    /// Turns given to `fresh` since `stale` last had one.
    fresh_run: u32,
    /// The last frame found no room.
    is_full: bool,
    /// Something was published that the peer was not woken for.
    has_sent: bool,
}

impl<I: Inbound, O: Outbound> Port<I, O> {
    /// The lane to the peer and the one from it, both fresh.
    pub fn new(to: Producer<O, I>, from: Consumer<I, O>) -> Self {
        let [fresh, stale, control] = [const { VecDeque::new() }; 3];
        Self { to, from, fresh, stale, control, fresh_run: 0, is_full: false, has_sent: false }
    }

    /// Whether nothing has come, and nobody waits for it.
    #[inline]
    fn is_quiet(&self) -> bool {
        !self.has_sent && !self.has_queued() && !self.from.may_have_data()
    }

    #[inline]
    fn has_queued(&self) -> bool {
        !(self.fresh.is_empty() && self.stale.is_empty() && self.control.is_empty())
    }
}

/// What an engine cannot do by itself.
#[derive(Debug)]
pub enum Event<L> {
    /// A program of the other node connects: find its server, then call [`Engine::answer`].
    Open {
        /// For the answer.
        key: Key,
        /// What the other node says of it: hostile.
        tuple: Tuple,
    },
    /// The other node has no server for a program of this one.
    Refused {
        /// The program, still connected.
        local: L,
        /// Why, as the other node says: hostile.
        errno: u32,
    },
    /// The peer broke the protocol for one connection, which was reset.
    Offence {
        /// Which connection.
        number: Number,
        /// How.
        what: &'static str,
    },
}

/// The link cannot be used any more: take it down.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Fault {
    /// The lane of a partition is spoiled.
    #[error("partition {partition}: {corrupt}")]
    Lane {
        /// Which of the engine's.
        partition: usize,
        /// How.
        corrupt: Corrupt,
    },
    /// A record that is no frame.
    #[error("partition {partition}: {error}")]
    Frame {
        /// Which of the engine's.
        partition: usize,
        /// How.
        error: FrameError,
    },
    /// The peer opened a connection with a number that is this node's to give.
    #[error("the peer opened connection {:#x}, a number of this node's", .0.0)]
    Number(Number),
    /// The peer opens connections and takes no answers.
    #[error("the peer opens connections beyond {0} and takes no refusals")]
    Flood(usize),
}

/// What a turn came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Turn {
    /// Something was received or sent: take another turn.
    pub progressed: bool,
    /// The peer sleeps: ring its doorbell.
    pub ring: bool,
    /// Somebody may wait for this processor with a short message: let others run, if there are any.
    pub gives_way: bool,
}

/// One or two partitions of a link, and the connections in them. See the crate's documentation.
#[derive(Debug)]
pub struct Engine<I, O, L> {
    settings: Settings,
    ports: Vec<Port<I, O>>,
    table: Table<Connection<L>>,
    numbers_given: u32,
    polled: Vec<Key>,
    touched: Vec<Key>,
    orphans: VecDeque<Header>,
    events: VecDeque<Event<L>>,
    counters: Counters,
    shown: Shown,
    now_ns: u64,
    /// A partition is being emptied because another one is ahead of it.
    is_catching_up: bool,
    /// Those who are rung would take the processor from whoever drives the engine.
    is_crowded: bool,
    /// Turns with something to do since sleepers were last rung.
    turns_unrung: u32,
    manners: Manners,
}

impl<I: Inbound, O: Outbound, L: Local> Engine<I, O, L> {
    /// An engine over fresh partitions: of the latency class, then, if there is one, of the bulk class.
    ///
    /// # Panics
    /// If there is no partition or more than two, or a setting makes no sense.
    pub fn new(settings: Settings, ports: Vec<Port<I, O>>) -> Self {
        settings.check();
        assert!((1..=Class::ALL.len()).contains(&ports.len()), "an engine with {} partitions", ports.len());
        Self {
            settings,
            ports,
            table: Table::new(settings.connections_max, settings.secret),
            numbers_given: 0,
            polled: Vec::new(),
            touched: Vec::new(),
            orphans: VecDeque::new(),
            events: VecDeque::new(),
            counters: Counters::default(),
            shown: Shown::default(),
            now_ns: 0,
            is_catching_up: false,
            is_crowded: false,
            turns_unrung: 0,
            manners: Manners::default(),
        }
    }

    /// Says whether there are fewer processors than parties that need one. Then sleepers are rung once there is nothing
    /// more for them, or after some turns: at once, they would take the processor for the first piece of what they wait
    /// for. And connections are looked at for longer.
    pub fn set_crowded(&mut self, is_crowded: bool) {
        self.is_crowded = is_crowded;
    }

    /// What it has done.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Connections that are not over.
    pub fn connections(&self) -> usize {
        self.table.len()
    }

    /// A program of this node has connected to a server of the other. `make` gets the key under which the lifeline's
    /// news are to be told by [`Engine::wake`]. `None` when there are too many connections.
    pub fn open(&mut self, tuple: Tuple, make: impl FnOnce(Key) -> L) -> Option<Key> {
        if self.table.is_full() {
            return None;
        }
        let number = self.next_number()?;
        let mut connection = Connection::new(number, Phase::Opening, self.now_ns);
        connection.tuple = Some(tuple);
        connection.due.add(Due::OPEN);
        connection.granted = u64::from(self.settings.credit_bytes);
        let key = self.table.insert(number, connection);
        let local = make(key);
        let connection = self.table.get(key).expect("just entered");
        connection.local = Some(local);
        self.counters.connections_opened += 1;
        self.note_due(key);
        self.poll_again(key);
        Some(key)
    }

    /// The answer to [`Event::Open`]: the local end, or an error number.
    pub fn answer(&mut self, key: Key, answer: Result<L, u32>) {
        let credit_bytes = u64::from(self.settings.credit_bytes);
        let Some(connection) = self.table.get(key).filter(|connection| connection.phase == Phase::Answering) else {
            // Reset meanwhile.
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
                self.note_due(key);
                self.deliver_held(key);
                self.poll_again(key);
            }
            Err(errno) => {
                connection.errno = errno;
                self.retire(key, Due::REFUSED);
            }
        }
    }

    /// The next thing that whoever drives the engine has to do.
    pub fn next_event(&mut self) -> Option<Event<L>> {
        self.events.pop_front()
    }

    /// Receives what is there, sends what there is room for, a bounded amount of both.
    ///
    /// # Errors
    /// The link is to be taken down: see [`Engine::take_down`].
    pub fn turn(&mut self, now_ns: u64) -> Result<Turn, Fault> {
        self.now_ns = self.now_ns.max(now_ns);
        let mut progressed = false;
        if self.nothing_has_come() {
            if self.polled_are_quiet() {
                self.note_idle();
                return Ok(Turn::default());
            }
        } else {
            for port in 0..self.ports.len() {
                progressed |= self.receive(port)?;
            }
            progressed |= self.send_due()?;
        }
        if self.polled.len() > LOOKS_UNPUBLISHED_MAX {
            self.publish();
        }
        self.look_at_polled();
        for port in 0..self.ports.len() {
            progressed |= self.serve(port, self.settings.backlog_bytes)?;
        }
        progressed |= self.send_due()?;
        self.publish();
        let gives_way = self.gives_way();
        if self.is_crowded && progressed && self.turns_unrung < TURNS_UNRUNG_MAX {
            self.turns_unrung += 1;
            return Ok(Turn { progressed, ring: false, gives_way });
        }
        self.turns_unrung = 0;
        self.ring_locals();
        Ok(Turn { progressed, ring: self.take_peers_ring(), gives_way })
    }

    /// The link is gone: all its connections are reset.
    pub fn take_down(&mut self) {
        self.polled.clear();
        self.touched.clear();
        self.orphans.clear();
        for connection in self.table.drain() {
            if let Some(local) = connection.local {
                self.counters.resets += 1;
                local.reset();
            }
        }
    }

    fn next_number(&mut self) -> Option<Number> {
        // Numbers in use are rare and far behind: the counter needs hours to come round.
        for _ in 0..=self.table.len() {
            let count =
                self.settings.number_first.wrapping_add(self.numbers_given.wrapping_mul(self.settings.number_step));
            let is_last = count >= (1 << 31) - self.settings.number_step;
            self.numbers_given = if is_last { 0 } else { self.numbers_given + 1 };
            let number = Number::new(count, self.settings.side);
            if self.table.find(number).is_none() {
                return Some(number);
            }
        }
        None
    }

    /// Which partition a class uses.
    fn port_of(&self, class: Class) -> usize {
        (class as usize).min(self.ports.len() - 1)
    }

    /// Queues what a connection has to say.
    fn note_due(&mut self, key: Key) {
        self.note_due_with(key, VecDeque::push_back);
    }

    /// As [`Engine::note_due`], ahead of the others.
    fn note_due_first(&mut self, key: Key) {
        self.note_due_with(key, VecDeque::push_front);
    }

    fn note_due_with(&mut self, key: Key, push: impl FnOnce(&mut VecDeque<Key>, Key)) {
        let Some(connection) = self.table.get(key) else { return };
        if std::mem::replace(&mut connection.is_in_control, true) {
            return;
        }
        let class = connection.class;
        let port = self.port_of(class);
        push(&mut self.ports[port].control, key);
    }

    /// The program is to be woken at the end of the turn, if it sleeps.
    fn touch(&mut self, key: Key) {
        let (now_ns, has_company) = (self.now_ns, self.has_company());
        if let Some(connection) = self.table.get(key) {
            connection.active_ns = now_ns;
            if has_company || connection.gives_way {
                connection.tell_manners(has_company);
            }
            if !std::mem::replace(&mut connection.is_touched, true) {
                self.touched.push(key);
            }
        }
    }

    fn ring_locals(&mut self) {
        while let Some(key) = self.touched.pop() {
            if let Some(connection) = self.table.get(key) {
                connection.is_touched = false;
                if let Some(local) = &mut connection.local {
                    self.counters.rings_local += u64::from(local.ring());
                }
            }
        }
    }

    /// The connection is over here; `farewell` is the last that the peer hears of it.
    fn retire(&mut self, key: Key, farewell: Due) {
        let Some(connection) = self.table.get(key) else { return };
        let unsaid = connection.due;
        let is_peer_gone = self.settings.is_failover && connection.in_end == End::Closed;
        if connection.is_direct && connection.is_resuming {
            // Where the peer still has it, it waits for a word of it.
            self.orphans.push_back(Header::control(connection.number, Kind::Reset, connection.errno));
            self.table.remove(key);
            return;
        }
        if is_peer_gone || (farewell == Due::RESET && unsaid.has(Due::OPEN)) {
            // The peer has not heard of it, or does not know it any more, and need not.
            self.table.remove(key);
            return;
        }
        (connection.due, connection.farewell) = (farewell, farewell);
        if unsaid.has(Due::RESUME) {
            connection.due.add(Due::RESUME);
        }
        if farewell != Due::CLOSE {
            connection.retained.clear(connection.sent);
        }
        // One that is closed in good order was there before.
        for first in [Due::OPEN, Due::OPENED] {
            if farewell == Due::CLOSE && unsaid.has(first) {
                connection.due.add(first);
            }
        }
        connection.class_next = connection.class;
        connection.phase = Phase::Over;
        connection.held = VecDeque::new();
        connection.place = Place::Resting;
        self.note_due(key);
    }

    /// Resets a connection at both ends.
    fn reset(&mut self, key: Key, errno: u32) {
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

    /// The peer broke the protocol of one connection.
    fn offend(&mut self, key: Key, what: &'static str) {
        let Some(connection) = self.table.get(key) else { return };
        if connection.phase == Phase::Over {
            return;
        }
        let number = connection.number;
        self.counters.offences += 1;
        if self.events.len() < ORPHANS_MAX {
            self.events.push_back(Event::Offence { number, what });
        }
        self.reset(key, PROTOCOL_ERROR);
    }

    fn refuse_unentered(&mut self, number: Number) -> Result<(), Fault> {
        self.orphans.push_back(Header::control(number, Kind::Refused, TABLE_FULL));
        self.check_orphans()
    }

    /// A peer that does not take its answers does not make them pile up.
    fn check_orphans(&self) -> Result<(), Fault> {
        // One that says good-bye in failover is answered, and may do so for all connections at once.
        let more = if self.settings.is_failover { self.settings.connections_max } else { 0 };
        let is_fine = self.orphans.len() <= ORPHANS_MAX + more;
        if is_fine { Ok(()) } else { Err(Fault::Flood(self.settings.connections_max)) }
    }
}

/// `EPROTO`: what a reset says when the peer broke the protocol.
const PROTOCOL_ERROR: u32 = 71;
/// `ECONNRESET`: what a reset says when a program was reset, or reset the connection.
const CONNECTION_RESET: u32 = 104;
/// `ENOBUFS`: what a refusal says when there are too many connections.
const TABLE_FULL: u32 = 105;
