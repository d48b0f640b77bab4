//! The oracle: the behaviour of a lane, modelled as a queue of bytes.

use crate::windows::{self, Random, SECRET, WriteCombined};
use fabric::test_support::non_coherent::{CacheBehavior, NonCoherentMemory};
use fabric::{Inbound, Memory, MemoryInbound, MemoryOutbound, Outbound};
use lane::{Consumer, ELASTIC_RINGS, LargerRings, Layout, MemoryRelease, Producer, SHORT_BYTES_MAX, ShortRead};
use std::collections::VecDeque;
use volmem::Region;

/// An elastic lane at the start of both windows, whose small ring skips positions.
pub const ELASTIC: Layout = {
    let packed = Layout::packed(128, 0);
    let rings = LargerRings::in_a_row(packed.big_offset, ELASTIC_RINGS as u8);
    Layout { small_slots_used: 115, elastic: Some(rings), ..packed }
};

/// One call of a user at either endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(fuzzing, derive(arbitrary::Arbitrary))]
pub enum Op {
    /// Write this number of bytes.
    Write(u16),
    /// Write this number of bytes with the short path, if they are short and there is room.
    WriteShort(u16),
    /// Reserve, fill, commit a part.
    InPlaceWrite {
        /// Bytes requested.
        reserve_bytes: u16,
        /// Bytes committed, at most those reserved.
        commit_bytes: u16,
    },
    /// Stage a record.
    Stage(u16),
    /// Publish the staged records.
    PublishStaged,
    /// Read into a buffer of this number of bytes.
    Read(u16),
    /// Read a short record into a buffer of this number of bytes.
    ReadShort(u16),
    /// Peek without consuming.
    PeekTo {
        /// Bytes skipped first.
        skip_bytes: u16,
        /// Bytes of the buffer.
        len_bytes: u16,
    },
    /// Peek in place, read the bytes, consume a part.
    InPlaceRead(u16),
    /// The sender waits for room.
    ProducerSleeps,
    /// The receiver waits for bytes.
    ConsumerSleeps,
    /// The sender finishes.
    Finish,
    /// The sender of an elastic lane sets its capacity.
    SetCapacity(u16),
    /// The sender of an elastic lane sets whether it prefers waiting to using more memory.
    Patience(bool),
    /// The memory of larger rings is released if everything is read.
    GiveBack,
    /// Write-combined stores reach the peer (in windows that combine them).
    Drain(u8),
}

/// The rings of a lane under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(fuzzing, derive(arbitrary::Arbitrary))]
pub struct Shape {
    /// Number of times that the small ring's 8 slots are doubled (at most 3).
    pub small_doublings: u8,
    /// Number of times that the small ring's slots are doubled for the big ring (at most 6). 0: there is no big ring.
    /// 7: on coherent memory the lane is elastic.
    pub big_doublings: u8,
}

impl Shape {
    /// Returns the layout of this shape.
    pub fn layout(self) -> Layout {
        if self.is_elastic() { ELASTIC } else { self.fixed_layout() }
    }

    fn is_elastic(self) -> bool {
        self.big_doublings % 8 == 7
    }

    /// Returns the layout of this shape without elastic rings.
    pub fn fixed_layout(self) -> Layout {
        let small_slots = 8 << (self.small_doublings % 4);
        let big_doublings = self.big_doublings % 7;
        Layout::packed(small_slots, if big_doublings == 0 { 0 } else { small_slots << big_doublings })
    }
}

/// Runs the calls on a lane in coherent memory and on the oracle; panics if they differ.
pub fn check_coherent(shape: Shape, ops: &[Op]) {
    let layout = shape.layout();
    let (senders, receivers) = (windows::memory(&layout), windows::memory(&layout));
    let producer =
        Producer::new(MemoryOutbound::new(receivers.clone()), MemoryInbound::new(senders.clone()), layout, SECRET);
    let consumer = Consumer::new(MemoryInbound::new(receivers), MemoryOutbound::new(senders), layout, SECRET);
    let mut harness = Harness::new(producer, consumer, Visibility::Immediate { credit_is_lazy: false });
    harness.is_elastic = shape.is_elastic();
    for op in ops {
        harness.step(*op);
        harness.check_now();
    }
    harness.publish_staged();
    harness.check_rest();
}

/// Does the same with windows whose stores are combined and arrive in any order that the fences allow.
pub fn check_write_combined(shape: Shape, ops: &[Op], seed: u64) {
    let layout = shape.fixed_layout();
    let (senders, receivers) = (Region::heap(layout.window_bytes()), Region::heap(layout.window_bytes()));
    let (forward, back) = (WriteCombined::new(receivers.clone()), WriteCombined::new(senders.clone()));
    let producer = Producer::new(forward.clone(), MemoryInbound::new(senders), layout, SECRET);
    let consumer = Consumer::new(MemoryInbound::new(receivers), back.clone(), layout, SECRET);
    let mut harness = Harness::new(producer, consumer, Visibility::Eventual);
    let mut random = Random(seed);
    for op in ops {
        if let Op::Drain(_) = op {
            forward.drain_some(&mut random);
            back.drain_some(&mut random);
        }
        harness.step(*op);
    }
    harness.publish_staged();
    forward.drain();
    back.drain();
    harness.check_rest();
}

/// Does the same on memory that is not coherent. With caches that fetch and evict lines only on request, each store is
/// visible at once; with others, which do so at any time, it is visible eventually.
pub fn check_non_coherent(shape: Shape, ops: &[Op], habits: CacheBehavior) {
    let layout = shape.fixed_layout();
    let [(senders_own, receivers_peer), (receivers_own, senders_peer)] =
        NonCoherentMemory::windows(layout.window_bytes(), habits);
    let (forward, back) = (receivers_peer.clone(), senders_peer.clone());
    let producer = Producer::new(MemoryOutbound::new(receivers_peer), MemoryInbound::new(senders_own), layout, SECRET);
    let consumer = Consumer::new(MemoryInbound::new(receivers_own), MemoryOutbound::new(senders_peer), layout, SECRET);
    let at_once = Visibility::Immediate { credit_is_lazy: true };
    let visibility = if habits.is_spontaneous { Visibility::Eventual } else { at_once };
    let mut harness = Harness::new(producer, consumer, visibility);
    for op in ops {
        if let Op::Drain(_) = op {
            forward.barrier();
            back.barrier();
        }
        harness.step(*op);
        if visibility == at_once {
            harness.check_now();
        }
    }
    harness.publish_staged();
    forward.barrier();
    back.barrier();
    harness.check_rest();
}

/// When a store becomes visible to the other endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Visibility {
    Immediate {
        /// Whether credit is returned only in quarters of the ring.
        credit_is_lazy: bool,
    },
    Eventual,
}

struct Harness<O: Outbound, I: Inbound> {
    producer: Producer<O, I>,
    consumer: Consumer<I, O>,
    unread: VecDeque<u8>,
    /// Bytes that are in place but not visible: in staged records, or behind them.
    staged: Option<Vec<u8>>,
    written_bytes: u64,
    is_finished: bool,
    visibility: Visibility,
    producer_sleeps: bool,
    consumer_sleeps: bool,
    arrivals_seen: u64,
    has_arrived: bool,
    is_elastic: bool,
    prefers_waiting: bool,
}

impl<O: Outbound, I: Inbound> Harness<O, I> {
    fn new(producer: Producer<O, I>, consumer: Consumer<I, O>, visibility: Visibility) -> Self {
        Self {
            producer,
            consumer,
            unread: VecDeque::new(),
            staged: None,
            written_bytes: 0,
            is_finished: false,
            visibility,
            producer_sleeps: false,
            consumer_sleeps: false,
            arrivals_seen: 0,
            has_arrived: false,
            is_elastic: false,
            prefers_waiting: false,
        }
    }

    fn is_immediate(&self) -> bool {
        self.visibility != Visibility::Eventual
    }

    fn step(&mut self, op: Op) {
        match op {
            Op::Write(len_bytes) => self.write(len_bytes.into()),
            Op::WriteShort(len_bytes) => self.write_short(len_bytes.into()),
            Op::InPlaceWrite { reserve_bytes, commit_bytes } => {
                self.write_in_place(reserve_bytes.into(), commit_bytes.into());
            }
            Op::Stage(len_bytes) => self.stage(len_bytes.into()),
            Op::PublishStaged => self.publish_staged(),
            Op::Read(len_bytes) => self.read(len_bytes.into()),
            Op::ReadShort(len_bytes) => self.read_short(len_bytes.into()),
            Op::PeekTo { skip_bytes, len_bytes } => self.peek_to(skip_bytes.into(), len_bytes.into()),
            Op::InPlaceRead(len_bytes) => self.read_in_place(len_bytes.into()),
            Op::ProducerSleeps => self.sleep_producer(),
            Op::ConsumerSleeps => self.sleep_consumer(),
            Op::Finish => {
                self.producer.finish();
                self.is_finished = true;
                let staged = self.staged.take().unwrap_or_default();
                self.published(&staged);
            }
            Op::SetCapacity(bytes) if self.is_elastic => self.set_capacity(bytes.into()),
            Op::Patience(prefers_waiting) => {
                self.prefers_waiting = prefers_waiting && self.is_elastic;
                self.producer.set_prefers_waiting(self.prefers_waiting);
            }
            Op::GiveBack => self.give_back(),
            Op::SetCapacity(_) | Op::Drain(_) => {}
        }
    }

    fn set_capacity(&mut self, bytes: usize) {
        self.producer.set_capacity(bytes);
        if self.producer_sleeps {
            self.sleep_producer(); // The sender itself must check again.
        }
    }

    fn give_back(&mut self) {
        let given = self.producer.release_memory();
        if self.unread.is_empty() && self.staged.is_none() {
            assert_ne!(given, MemoryRelease::InUse, "everything is read");
        } else {
            assert_ne!(given, MemoryRelease::Released, "something is unread");
        }
        assert!(given != MemoryRelease::Released || self.producer.memory_bytes() == 0);
    }

    fn write(&mut self, len_bytes: usize) {
        if self.is_finished {
            return;
        }
        let was_writable = match self.prefers_waiting {
            true => self.producer.is_ring_writable(),
            false => self.producer.is_writable(),
        }
        .expect("an honest receiver");
        let bytes = self.next_bytes(len_bytes);
        let sent_bytes = self.producer.write(&bytes).expect("an honest receiver");
        assert!(sent_bytes <= len_bytes);
        assert!(sent_bytes > 0 || len_bytes == 0 || !was_writable, "a writable lane took nothing of {len_bytes}");
        self.sent(&bytes[..sent_bytes]);
    }

    fn write_short(&mut self, len_bytes: usize) {
        if self.is_finished {
            return;
        }
        let bytes = self.next_bytes(len_bytes);
        // SAFETY: a vector is readable for its length, and the windows have their own memory.
        if unsafe { self.producer.write_short_from(bytes.as_ptr(), len_bytes, len_bytes.is_multiple_of(2)) } {
            assert!((1..=SHORT_BYTES_MAX).contains(&len_bytes));
            self.sent(&bytes);
        }
    }

    fn write_in_place(&mut self, reserve_bytes: usize, commit_bytes: usize) {
        if self.is_finished {
            return;
        }
        let Some(reservation) = self.producer.reserve(reserve_bytes).expect("an honest receiver") else { return };
        assert!(reservation.len_bytes <= reserve_bytes);
        let bytes = self.next_bytes(commit_bytes.min(reservation.len_bytes));
        // SAFETY: the reservation is writable for its length, which is at least that of `bytes`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), reservation.pointer.as_ptr(), bytes.len()) };
        self.producer.commit(bytes.len()).expect("nothing was written since the reservation");
        self.sent(&bytes);
    }

    fn stage(&mut self, len_bytes: usize) {
        if self.is_finished {
            return;
        }
        let bytes = self.next_bytes(len_bytes);
        let Some(mut draft) = self.producer.draft(len_bytes).expect("an honest receiver") else { return };
        // In two pieces, as for a header and a payload.
        let bytes = &bytes[..draft.room_bytes()];
        let (first, second) = bytes.split_at(bytes.len().min(16));
        draft.append(first);
        draft.append(second);
        draft.stage();
        if !bytes.is_empty() {
            self.staged.get_or_insert_default();
        }
        self.sent(bytes);
    }

    fn publish_staged(&mut self) {
        assert_eq!(self.producer.publish_staged(), self.staged.is_some());
        let staged = self.staged.take().unwrap_or_default();
        self.published(&staged);
    }

    /// Returns the next bytes of the stream, no two parts of which are equal.
    fn next_bytes(&self, len_bytes: usize) -> Vec<u8> {
        (self.written_bytes..).take(len_bytes).map(|index| Random(index).next() as u8).collect()
    }

    fn sent(&mut self, bytes: &[u8]) {
        self.written_bytes += bytes.len() as u64;
        match &mut self.staged {
            Some(staged) => staged.extend_from_slice(bytes),
            None => self.published(bytes),
        }
    }

    fn published(&mut self, bytes: &[u8]) {
        self.unread.extend(bytes);
        self.has_arrived |= !bytes.is_empty();
        self.ring_consumer();
    }

    fn read(&mut self, len_bytes: usize) {
        let mut bytes = vec![0; len_bytes];
        let read_bytes = self.consumer.read(&mut bytes).expect("an honest sender");
        self.check_amount(read_bytes, len_bytes, 0);
        self.received(&bytes[..read_bytes]);
    }

    fn read_short(&mut self, len_bytes: usize) {
        let mut bytes = vec![0; len_bytes];
        // SAFETY: a vector is writable for its length, and the windows have their own memory.
        match unsafe { self.consumer.read_short_to(bytes.as_mut_ptr(), len_bytes) } {
            ShortRead::Read(read_bytes) => {
                assert!(read_bytes <= SHORT_BYTES_MAX);
                self.check_amount(read_bytes, len_bytes, 0);
                self.received(&bytes[..read_bytes]);
            }
            ShortRead::Empty => assert!(self.unread.is_empty() || !self.is_immediate(), "a record was not found"),
            // In an elastic lane, the read position may be at the end of an open record.
            ShortRead::UseReadTo => {
                assert!(!self.unread.is_empty() || self.is_elastic, "an unknown record")
            }
        }
    }

    fn read_in_place(&mut self, len_bytes: usize) {
        let Some(chunk) = self.consumer.peek().expect("an honest sender") else {
            assert!(!self.is_immediate() || self.unread.is_empty());
            return;
        };
        let mut bytes = vec![0; chunk.len_bytes];
        let pointer = self.consumer.pointer(chunk);
        // SAFETY: the chunk is readable for its length until it is consumed.
        unsafe { std::ptr::copy_nonoverlapping(pointer.as_ptr(), bytes.as_mut_ptr(), chunk.len_bytes) };
        self.check_front(0, &bytes);
        bytes.truncate(len_bytes);
        // In two parts, because the rest of a peek can still be consumed.
        self.consumer.consume(bytes.len() / 2).expect("an honest sender");
        self.consumer.consume(bytes.len() - bytes.len() / 2).expect("an honest sender");
        self.received(&bytes);
    }

    fn peek_to(&mut self, skip_bytes: usize, len_bytes: usize) {
        let mut bytes = vec![0; len_bytes];
        // SAFETY: a vector is writable for its length, and the windows have their own memory.
        let peeked = unsafe { self.consumer.peek_to(skip_bytes, bytes.as_mut_ptr(), len_bytes) };
        let peeked_bytes = peeked.expect("an honest sender");
        self.check_amount(peeked_bytes, len_bytes, skip_bytes);
        self.check_front(skip_bytes, &bytes[..peeked_bytes]);
    }

    fn check_amount(&self, got_bytes: usize, len_bytes: usize, skip_bytes: usize) {
        let due_bytes = len_bytes.min(self.unread.len().saturating_sub(skip_bytes));
        if self.is_immediate() {
            assert_eq!(got_bytes, due_bytes);
        } else {
            assert!(got_bytes <= due_bytes, "{got_bytes} of {due_bytes} bytes");
        }
    }

    fn check_front(&self, skip_bytes: usize, bytes: &[u8]) {
        let expected: Vec<u8> = self.unread.iter().skip(skip_bytes).take(bytes.len()).copied().collect();
        assert_eq!(bytes, expected, "not the bytes that were written");
    }

    fn received(&mut self, bytes: &[u8]) {
        self.check_front(0, bytes);
        self.unread.drain(..bytes.len());
        self.ring_producer();
    }

    fn ring_producer(&mut self) {
        if self.consumer.take_wake_request() {
            assert!(self.producer_sleeps || !self.is_immediate(), "the doorbell was rung without a sleeper");
            self.producer_sleeps = false;
            self.sleep_producer();
        }
    }

    fn sleep_producer(&mut self) {
        self.producer.announce_sleep();
        self.producer_sleeps = !self.producer.is_writable().expect("an honest receiver");
        if !self.producer_sleeps {
            self.producer.cancel_sleep();
        }
    }

    fn sleep_consumer(&mut self) {
        self.consumer.announce_sleep();
        self.consumer_sleeps = !self.consumer.may_have_data();
        if !self.consumer_sleeps {
            self.consumer.cancel_sleep();
        }
    }

    fn ring_consumer(&mut self) {
        if self.producer.take_wake_request() {
            assert!(self.consumer_sleeps || !self.is_immediate(), "the doorbell was rung without a sleeper");
            self.consumer_sleeps = false;
        }
    }

    /// Checks what must hold after every call if stores are visible at once.
    fn check_now(&mut self) {
        assert_eq!(self.consumer.unread_bytes(), Ok(self.unread.len()));
        let is_all_read = self.unread.is_empty() && self.staged.is_none();
        assert!(self.producer.is_drained() == is_all_read || !self.is_elastic, "drained, or not");
        let has_something = !self.unread.is_empty() || self.is_finished;
        assert!(self.consumer.may_have_data() || !has_something);
        assert!(!has_something || !self.consumer_sleeps, "the receiver sleeps on bytes");
        assert!(!self.producer_sleeps || self.producer.is_writable() == Ok(false), "the sender sleeps with room");
        let arrivals = self.consumer.arrivals(self.arrivals_seen).expect("an honest sender");
        assert!(arrivals > self.arrivals_seen || !self.has_arrived, "bytes arrived unnoticed");
        self.arrivals_seen = arrivals;
        self.has_arrived = false;
    }

    /// Checks what must hold once every store is visible: no byte is lost, and the stream ends.
    fn check_rest(&mut self) {
        assert!(self.staged.is_none(), "the staged records were published before");
        assert_eq!(self.consumer.unread_bytes(), Ok(self.unread.len()));
        self.read(self.unread.len() + 1);
        assert!(self.unread.is_empty());
        assert_eq!(self.consumer.is_finished(), self.is_finished);
        let credit_is_due = self.visibility == Visibility::Immediate { credit_is_lazy: false };
        assert!(!credit_is_due || self.producer.is_drained());
    }
}
