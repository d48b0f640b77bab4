//! The sending end.

mod held;

pub use held::HELD_MS_MAX;

use crate::batch::Batch;
use crate::layout::Ring;
use crate::record::{
    HEADER_BYTES, INLINE_BYTES, RECORD_BYTES_MAX, Record, SHORT_BYTES_MAX, SLOT_BYTES, Urgent, slots_of, tag,
};
use crate::words::{WORD_BYTES, WORDWISE_BYTES_MAX, load_short, load_words};
use crate::{Corrupt, ELASTIC_RINGS, ELASTIC_SLOTS_MIN, Layout, wake};
use fabric::{Coherence, Inbound, Outbound};
use std::ptr::NonNull;
use volmem::sync::Ordering;

/// Messages up to this long are handed over to the shared cache: 3% of a round trip at one line, 15% at 1 KiB, nothing
/// from 4 KiB on. In a stream of short messages it costs half the rate.
const HAND_OVER_SLOTS_MAX: u64 = 64;
/// The first four are loaded together.
const TAIL: usize = 0;
const CREDIT_SEEN: usize = 8;
const RING: usize = 16;
const TAIL_LIMIT: usize = 24;
const CAPACITY: usize = 32;
const SLEEPS: usize = 40;
const WAKES: usize = 48;
/// Position of the first record in the present ring.
const ENTRY: usize = 56;
/// Length and slots of the open record at the tail; 0 where there is none.
const OPEN: usize = 64;
/// Its stamp.
const OPEN_STAMP: usize = 72;
/// Larger rings whose memory has been used since it was last given back, a bit each.
const RINGS_USED: usize = 80;
/// The larger ring from which the lane has come back to the small one: the record that led here may be unread there.
const LEFT_RING: usize = 88;
/// What a receiver says that has read all of the record that was closed last.
const CLOSED: usize = 96;
/// One more than the position of the first record that is held back; 0 where there is none. See [`held`].
const HELD: usize = 112;
/// Of those records: the ring of the first one, their bytes, and since when they are held.
const HELD_STATE: usize = 120;

/// A receiver of an elastic lane looks for a sleeping sender whenever it crosses a multiple of so many slots. In the
/// small rings of a model there is room for several multiples of fewer.
pub(crate) const WAKE_EVERY_SLOTS: u64 = if cfg!(loom) { 4 } else { 32 };
/// Writes shorter than this share records where the receiver lags.
const SHARED_BYTES_MAX: usize = 2048;
/// Most slots of a record that writes share: of a model's small ring, few.
const OPEN_SLOTS: u64 = if cfg!(loom) { 2 } else { 64 };
/// A receiver that lags so many slots is behind: before, each write is a record of its own, which is read faster.
const LAG_SLOTS: u64 = 4096;
/// A sender is writable once this part of the lane's capacity is free. Linux asks for a third of the send buffer
/// (`sk_stream_is_writeable`), and that is about half of the capacity.
const ROOM_SHARE: u64 = 6;
/// Or this share of what the lane may hold: single bytes before then are a small part of it.
const LAG_SHARE: u64 = 32;
/// A sender that would rather wait for a receiver than use more memory moves on to rings of so many slots; by writes of
/// at least [`BULK_BYTES`] to rings of [`BULK_SLOTS`]. 256 KiB fit the second-level cache, which is best for writes of
/// 4 KiB; those of 16 KiB and more went 1.3 to 1.8 times as fast with 4 MiB.
const STREAM_SLOTS: u64 = 4096;
const BULK_SLOTS: u64 = 65_536;
const BULK_BYTES: usize = 8192;
/// A long write moves on to a ring that holds so many of its length: by round trips of 40 kB, 4 of them took 16% longer
/// than 16. A model has no rings for that.
const RING_PER_WRITE: u64 = if cfg!(loom) { 4 } else { 16 };
/// Memory is accounted for in steps of so many slots, as a ring is used for the first time.
const ACCOUNT_SLOTS: u64 = 1024;

/// What a process lets its lanes take of memory, beyond their small rings.
pub trait Budget: Sync {
    /// Takes so many bytes; `false`: there are not so many left.
    fn take(&self, bytes: usize) -> bool;
    /// Gives back what was taken.
    fn give_back(&self, bytes: usize);
}

/// A budget without an end.
#[derive(Debug)]
struct Unlimited;

impl Budget for Unlimited {
    fn take(&self, _bytes: usize) -> bool {
        true
    }

    fn give_back(&self, _bytes: usize) {}
}

/// What [`Producer::release_memory`] came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryRelease {
    /// There is nothing but the small ring.
    NothingUsed,
    /// Everything was read, and the larger rings have no memory any more.
    Released,
    /// Something is unread.
    InUse,
}

/// The sending end of a lane.
///
/// Its cursor lives in the sender's own window, so that processes which share the connection (after `fork`) share the
/// position. `&mut self` stands for "one at a time": whoever shares a producer must exclude the others. A violation
/// garbles the stream and nothing else.
#[derive(Debug)]
pub struct Producer<O, I> {
    outbound: O,
    inbound: I,
    layout: Layout,
    secret: u64,
    reserved: Option<Reserved>,
    batch: Batch,
    stamp: u64,
    /// See [`Producer::set_prefers_waiting`].
    prefers_waiting: bool,
    /// What is written now is held back, from this millisecond on.
    holding_ms: Option<u32>,
    /// There was no memory for a larger ring, or none may be used: the room is that of the present one.
    is_growth_forbidden: bool,
    memory: Account,
}

/// Memory that a lane has taken from a budget.
struct Account {
    budget: &'static dyn Budget,
    taken_bytes: usize,
    /// Positions up to which the present ring is accounted for; what lies outside of its first lap is an old ring's.
    charged_until: u64,
}

impl std::fmt::Debug for Account {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes taken, positions until {}", self.taken_bytes, self.charged_until)
    }
}

impl Account {
    fn take(&mut self, bytes: usize) -> bool {
        let is_taken = self.budget.take(bytes);
        self.taken_bytes += if is_taken { bytes } else { 0 };
        is_taken
    }

    fn give_back(&mut self) {
        let taken_bytes = std::mem::take(&mut self.taken_bytes);
        if taken_bytes > 0 {
            self.budget.give_back(taken_bytes);
        }
        self.charged_until = 0;
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// Where writing stands: loaded once at the start of an operation, because a peer on shared memory can change it at any
/// time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cursor {
    tail: u64,
    ring: u8,
    /// The next record is the first in another ring: it is published together with the switch that leads there.
    switch: Option<Switch>,
}

/// A switch to another ring that is not published yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Switch {
    /// The ring that is left.
    from: u8,
    /// The position of the switch in it.
    position: u64,
}

/// What the last reservation promised, in memory of this process alone.
#[derive(Debug, Clone, Copy)]
struct Reserved {
    /// Where writing stood.
    before: Cursor,
    /// Where the record goes.
    cursor: Cursor,
    len_bytes: usize,
}

/// What an elastic lane has room for: in its ring, and by what it may hold.
#[derive(Debug, Clone, Copy)]
struct AvailableRoom {
    credit: u64,
    ring_slots: u64,
    capacity_left: u64,
}

impl AvailableRoom {
    fn slots(&self) -> u64 {
        self.ring_slots.min(self.capacity_left)
    }
}

/// The record at the tail to which writes are appended.
#[derive(Debug, Clone, Copy)]
struct Open {
    len_bytes: usize,
    slots: u64,
}

/// What a receiver says that has read so much of the open record at `position`: never 0.
#[inline]
pub(crate) fn open_read_mark(position: u64, len_bytes: usize) -> u64 {
    position << 16 | len_bytes as u64
}

/// A span reserved in place: fill it, then [`Producer::commit`].
#[derive(Debug, Clone, Copy)]
pub struct Reservation {
    /// Where to write; write only.
    pub pointer: NonNull<u8>,
    /// Bytes that may be written.
    pub len_bytes: usize,
}

impl<O: Outbound, I: Inbound> Producer<O, I> {
    /// Attaches to the lane that `layout` describes: `outbound` is the receiver's window, `inbound` the sender's own.
    /// Both ends must use the same `secret`, which is random and not zero. A fresh lane starts from zeroed windows.
    ///
    /// # Panics
    /// If the layout does not fit the windows.
    pub fn new(outbound: O, inbound: I, layout: Layout, secret: u64) -> Self {
        layout.check(outbound.len_bytes(), inbound.len_bytes());
        Self {
            outbound,
            inbound,
            layout,
            secret,
            reserved: None,
            batch: Batch::default(),
            stamp: 0,
            prefers_waiting: false,
            holding_ms: None,
            is_growth_forbidden: false,
            memory: Account { budget: &Unlimited, taken_bytes: 0, charged_until: 0 },
        }
    }

    /// Takes the memory of larger rings from a budget, until it is given back or the lane is dropped.
    pub fn set_budget(&mut self, budget: &'static dyn Budget) {
        self.memory.give_back();
        self.memory.budget = budget;
    }

    /// Marks the records that follow: a receiver of several lanes tells by it which record was sent first, see
    /// [`crate::Consumer::next_stamp`]. The lowest [`STAMP_BITS`](crate::STAMP_BITS) bits count.
    #[inline(always)]
    pub fn set_stamp(&mut self, stamp: u64) {
        self.stamp = stamp;
    }

    /// Whether an elastic lane keeps to a ring that suits its writes, as a sender wants that can wait for the receiver,
    /// or takes what it may hold, as one that cannot.
    pub fn set_prefers_waiting(&mut self, prefers_waiting: bool) {
        self.prefers_waiting = prefers_waiting;
    }

    /// Keeps an elastic lane in the rings that it uses now.
    pub fn forbid_growth(&mut self) {
        self.is_growth_forbidden = true;
    }

    /// Sends as much of the `len_bytes` at `source` as there is room for; returns how much that was.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes`.
    #[inline]
    pub unsafe fn write_from(&mut self, source: *const u8, len_bytes: usize) -> Result<usize, Corrupt> {
        let mut sent_bytes = 0;
        if self.has_open_record() {
            // SAFETY: our caller says that `source` is readable for `len_bytes`, and no more is read.
            sent_bytes = unsafe { self.append_to_open_record(source, len_bytes) }?;
        }
        let mut cursor = self.cursor();
        while sent_bytes < len_bytes {
            let rest_bytes = len_bytes - sent_bytes;
            if self.shares_records(&cursor, rest_bytes)? {
                // SAFETY: `source` is readable for `len_bytes`, which is more than `sent_bytes` in this loop.
                return unsafe { self.write_shared(source, sent_bytes, len_bytes) };
            }
            let room_bytes = self.room_for(&mut cursor, rest_bytes)?;
            if room_bytes == 0 {
                break;
            }
            let record_bytes = rest_bytes.min(room_bytes);
            // SAFETY: the caller's span, from what is not yet sent on.
            unsafe { self.publish_copy(&mut cursor, source.add(sent_bytes), record_bytes) };
            sent_bytes += record_bytes;
        }
        Ok(sent_bytes)
    }

    /// Sends the `len_bytes` at `source` if they are at most [`SHORT_BYTES_MAX`], memory is coherent, and room for them
    /// in one piece is known: what a sender of short messages nearly always finds. `is_awaited` hands them over, see
    /// [`Producer::hand_over_since`]. `false`: nothing was sent; ask [`Producer::write_from`].
    ///
    /// # Safety
    /// `source` is readable for `len_bytes`.
    #[inline(always)] // Most of what it spares is the work of being called.
    pub unsafe fn write_short_from(&mut self, source: *const u8, len_bytes: usize, is_awaited: bool) -> bool {
        let [tail, _, ring, limit] = self.inbound.load_words(self.layout.producer_cursor());
        let is_coherent = self.outbound.coherence() == Coherence::Coherent;
        if !is_coherent || tail >= limit {
            return false;
        }
        let ring = Ring::of(&self.layout, ring as u8);
        if !(1..=INLINE_BYTES).contains(&len_bytes) {
            // SAFETY: the caller's span.
            return unsafe { self.write_slots_from(ring, tail, limit, source, len_bytes, is_awaited) };
        }
        let slot = ring.slot_offset(tail);
        let (tag, header) = (tag(self.secret, tail), Record::Data(len_bytes).encode(self.stamp));
        if len_bytes <= WORDWISE_BYTES_MAX {
            // SAFETY: the caller's span.
            let [first, second] = unsafe { load_words(source, len_bytes) };
            self.outbound.store_line(slot, &[tag, header, first, second]);
        } else {
            // SAFETY: the caller's span.
            let [first, second, third, fourth, fifth, sixth] = unsafe { load_words(source, len_bytes) };
            self.outbound.store_line(slot, &[tag, header, first, second, third, fourth, fifth, sixth]);
        }
        self.set_inbound_word(TAIL, ring.used_position(tail.wrapping_add(1)));
        if is_awaited {
            self.outbound.demote(slot, SLOT_BYTES);
        }
        true
    }

    /// As [`Producer::write_short_from`], for what takes more than a slot. Whatever a peer did to `tail` and `limit`,
    /// the record is inside the ring.
    #[inline(never)]
    unsafe fn write_slots_from(
        &mut self,
        ring: Ring,
        tail: u64,
        limit: u64,
        source: *const u8,
        len_bytes: usize,
        is_awaited: bool,
    ) -> bool {
        let slots = slots_of(len_bytes.min(RECORD_BYTES_MAX));
        let is_room = tail.saturating_add(slots) <= limit && slots <= ring.slots_to_end(tail);
        if !(1..=SHORT_BYTES_MAX).contains(&len_bytes) || !is_room {
            return false;
        }
        let slot = ring.slot_offset(tail);
        // SAFETY: the caller's span.
        unsafe { self.outbound.write_from(slot + HEADER_BYTES, source, len_bytes) };
        self.store_header_and_tag(slot, tail, Record::Data(len_bytes));
        self.set_inbound_word(TAIL, ring.used_position(tail.wrapping_add(slots)));
        if is_awaited && slots <= HAND_OVER_SLOTS_MAX {
            self.outbound.demote(slot, slots as usize * SLOT_BYTES);
        }
        true
    }

    /// Sends as much of `source` as there is room for; returns how much that was.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    pub fn write(&mut self, source: &[u8]) -> Result<usize, Corrupt> {
        // SAFETY: a slice is readable.
        unsafe { self.write_from(source.as_ptr(), source.len()) }
    }

    /// Sends a byte that is urgent, as a record of its own; `false`: there is no room now. Of elastic lanes only.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    ///
    /// # Panics
    /// If the lane is not elastic.
    pub fn write_urgent(&mut self, urgent: Urgent) -> Result<bool, Corrupt> {
        assert!(self.layout.elastic.is_some(), "an urgent byte goes by an elastic lane");
        self.show_held();
        let (mut cursor, payload, room_bytes) = self.locate_record(1)?;
        if room_bytes == 0 {
            return Ok(false);
        }
        self.outbound.store_u64(payload, urgent.to_word(), Ordering::Relaxed);
        self.store_header_and_tag(self.ring(&cursor).slot_offset(cursor.tail), cursor.tail, Record::Urgent);
        self.step_over(&mut cursor, 1);
        Ok(true)
    }

    /// Reserves room for one record of up to `len_bytes_max` bytes, to be filled in place. `None` when there is no room
    /// now, or the window cannot be written in place. It lasts until the next write or reservation.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    pub fn reserve(&mut self, len_bytes_max: usize) -> Result<Option<Reservation>, Corrupt> {
        self.close_open_record();
        let before = self.cursor();
        let (cursor, start, len_bytes) = self.locate_record(len_bytes_max)?;
        if len_bytes == 0 {
            return Ok(None);
        }
        let Some(pointer) = self.outbound.pointer(start, len_bytes) else { return Ok(None) };
        self.reserved = Some(Reserved { before, cursor, len_bytes });
        Ok(Some(Reservation { pointer, len_bytes }))
    }

    /// Where the payload of a record of up to `len_bytes_max` bytes goes, and how long it may be: 0 when there is no
    /// room now.
    #[inline]
    pub(crate) fn locate_record(&mut self, len_bytes_max: usize) -> Result<(Cursor, usize, usize), Corrupt> {
        self.reserved = None;
        self.close_open_record();
        let mut cursor = self.cursor();
        let room_bytes = self.room_for(&mut cursor, len_bytes_max)?;
        let start = self.ring(&cursor).slot_offset(cursor.tail) + HEADER_BYTES;
        Ok((cursor, start, len_bytes_max.min(room_bytes)))
    }

    pub(crate) fn outbound(&self) -> &O {
        &self.outbound
    }

    /// Publishes the first `len_bytes` of the last reservation; zero gives it up.
    ///
    /// # Errors
    /// [`Corrupt`] if the lane has moved on since: the peer wrote the cursor, or this end wrote something else.
    ///
    /// # Panics
    /// If more is committed than was reserved.
    pub fn commit(&mut self, len_bytes: usize) -> Result<(), Corrupt> {
        let reserved = self.reserved.take();
        if len_bytes == 0 {
            return Ok(());
        }
        let reserved = reserved.filter(|reserved| len_bytes <= reserved.len_bytes);
        let Some(Reserved { before, mut cursor, .. }) = reserved else {
            panic!("commit of {len_bytes} bytes was not reserved")
        };
        let now = self.cursor();
        if now != before {
            return Err(Corrupt { what: "write cursor", value: now.tail });
        }
        self.publish(&mut cursor, len_bytes);
        Ok(())
    }

    /// Says how many bytes this end should hold unread, 0 for as many as the lane can. An elastic lane takes as many as
    /// both ends together ask for. Any other has the room of its ring; one whose ends together ask for less than a
    /// quarter of the big ring does not move there, and one that has moved stays.
    pub fn set_capacity(&mut self, bytes: usize) {
        self.set_inbound_word(CAPACITY, bytes as u64);
        self.set_inbound_word(TAIL_LIMIT, 0);
    }

    /// Shows the receiver all records that were [staged](crate::Draft::stage), in one go; `false`: there were none.
    /// Whoever stages records does so before it asks for [`Producer::take_wake_request`], waits, or lets anybody else
    /// use this end: what others send behind them is not seen before.
    #[inline]
    pub fn publish_staged(&mut self) -> bool {
        self.batch.publish(&self.outbound, false)
    }

    /// As [`Producer::publish_staged`]; and whoever sees these records sees what this node has shown before in other
    /// lanes of the link, too.
    #[inline]
    pub fn publish_staged_behind(&mut self) -> bool {
        self.batch.publish(&self.outbound, true)
    }

    /// Whether nothing is staged.
    #[inline]
    pub(crate) fn has_published_all(&self) -> bool {
        self.batch.is_empty()
    }

    /// Says that nothing follows. Idempotent; needs no room.
    pub fn finish(&mut self) {
        self.publish_staged();
        self.show_held();
        self.close_open_record();
        self.outbound.fence();
        self.outbound.store_u64(self.layout.fin(), self.position().wrapping_add(1), Ordering::Release);
    }

    /// Whether there is as much room as a sleeping sender is woken for: at least a quarter of the ring; of an elastic
    /// lane a sixth of what it may hold ([`ROOM_SHARE`]).
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    pub fn is_writable(&self) -> Result<bool, Corrupt> {
        let cursor = self.cursor();
        if self.layout.elastic.is_some() {
            return self.is_elastic_writable(&cursor, false);
        }
        if self.may_grow(&cursor) || self.has_room_to_wake(&cursor, self.inbound_word(CREDIT_SEEN))? {
            return Ok(true);
        }
        let credit = self.reload_credit(&cursor)?;
        self.has_room_to_wake(&cursor, credit)
    }

    /// As [`Producer::is_writable`], without moving to a larger ring: for a sender that waits for the receiver first.
    ///
    /// # Errors
    /// As there.
    pub fn is_ring_writable(&self) -> Result<bool, Corrupt> {
        if self.layout.elastic.is_some() { self.is_elastic_writable(&self.cursor(), true) } else { self.is_writable() }
    }

    /// Whether the receiver has consumed every byte sent.
    pub fn is_drained(&self) -> bool {
        let (position, credit) = (self.position(), self.receiver_word(self.layout.credit()));
        let open_bytes = self.inbound_word(OPEN) & u64::from(u32::MAX);
        if credit != position {
            return open_bytes == 0 && self.has_read_closed_record(credit);
        }
        let is_read = |mark| self.receiver_word(self.layout.open_read()) == mark;
        open_bytes == 0 || is_read(open_read_mark(position, open_bytes as usize))
    }

    /// Whether the last record begins at `credit`, and was read before the receiver could know that it is closed: its
    /// credit comes when the receiver looks for what follows, which it may not do before there is something.
    fn has_read_closed_record(&self, credit: u64) -> bool {
        let closed = self.inbound_word(CLOSED);
        let len_bytes = (closed & u64::from(u16::MAX)) as usize;
        let end = self.ring(&self.cursor()).used_position(credit.wrapping_add(slots_of(len_bytes)));
        let is_last = closed == open_read_mark(credit, len_bytes) && end == self.position();
        closed != 0 && is_last && self.receiver_word(self.layout.open_read()) == closed
    }

    /// Gives the memory of larger rings back to the system, once everything is read; the lane then goes on in its small
    /// ring. Costs a system call or two for each ring that was used. A page may stay, where the receiver stands.
    pub fn release_memory(&mut self) -> MemoryRelease {
        let used = self.inbound_word(RINGS_USED) & !1;
        if self.layout.elastic.is_none() || used == 0 {
            return MemoryRelease::NothingUsed;
        }
        if !self.is_drained() {
            return MemoryRelease::InUse;
        }
        // Where the receiver stands. If that is a record that was open, it looks at its header once more.
        let credit = self.receiver_word(self.layout.credit());
        let kept_offset = self.ring(&self.cursor()).slot_offset(credit);
        let is_used = |ring: &usize| used >> ring & 1 != 0;
        for ring in (1..=self.layout.rings_larger()).filter(is_used) {
            let Ring { offset, slots, .. } = Ring::of(&self.layout, ring as u8);
            let span = offset..offset + slots as usize * SLOT_BYTES;
            let kept = kept_offset.clamp(span.start, span.end)..(kept_offset + SLOT_BYTES).clamp(span.start, span.end);
            for part in [span.start..kept.start, kept.end..span.end].iter().filter(|part| !part.is_empty()) {
                self.outbound.discard(part.start, part.len());
            }
        }
        self.set_inbound_word(RINGS_USED, 0);
        // The next record finds no room known, and is led to the small ring.
        self.set_inbound_word(TAIL_LIMIT, 0);
        self.memory.give_back();
        self.is_growth_forbidden = false;
        MemoryRelease::Released
    }

    /// Bytes of memory that the lane has taken from its budget.
    pub fn memory_bytes(&self) -> usize {
        self.memory.taken_bytes
    }

    /// Slots that are sent and whose credit has not come back.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    pub fn unread_slots(&self) -> Result<u64, Corrupt> {
        let cursor = self.cursor();
        let credit = self.reload_credit(&cursor)?;
        self.used_slots(&cursor, credit)
    }

    /// Slots that may be read already though their credit is not back: where a store crosses a link, the receiver
    /// returns it by quarters of the ring.
    pub fn credit_lag_slots(&self) -> u64 {
        if self.outbound.coherence() == Coherence::Coherent { 0 } else { self.ring(&self.cursor()).slots / 4 }
    }

    /// Slots sent so far: grows with every record.
    pub fn position(&self) -> u64 {
        self.inbound_word(TAIL)
    }

    /// Hints that the receiver waits for what was sent since `position`: worth it for an answer, not in a stream.
    #[inline]
    pub fn hand_over_since(&self, position: u64) {
        let cursor = self.cursor();
        let slots = cursor.tail.wrapping_sub(position);
        let ring = self.ring(&cursor);
        let is_here = position.wrapping_sub(self.inbound_word(ENTRY)) as i64 >= 0;
        if slots <= HAND_OVER_SLOTS_MAX && slots <= ring.slots_to_end(position) && is_here {
            self.outbound.demote(ring.slot_offset(position), slots as usize * SLOT_BYTES);
        }
    }

    /// Asks the receiver to ring when room has come back. Look at [`Producer::is_writable`] once more before sleeping.
    pub fn announce_sleep(&self) {
        if self.layout.elastic.is_some() {
            let cursor = self.cursor();
            let needed = cursor.tail.wrapping_sub(self.writable_slots_used(&cursor, false));
            // The receiver looks for sleepers at multiples, and the next one is not beyond the tail.
            let target = needed.wrapping_add(WAKE_EVERY_SLOTS - 1) & !(WAKE_EVERY_SLOTS - 1);
            return wake::announce_until(&self.outbound, self.layout.producer_asleep(), target);
        }
        let count = self.layout.producer_cursor() + SLEEPS;
        wake::announce(&self.outbound, &self.inbound, self.layout.producer_asleep(), count);
    }

    /// Takes [`Producer::announce_sleep`] back.
    pub fn cancel_sleep(&mut self) {
        self.outbound.store_u64(self.layout.producer_asleep(), 0, Ordering::Relaxed);
    }

    /// Whether the receiver sleeps and must be rung for what was sent before this call. Takes the request: ring once.
    #[inline(always)] // A fence and a load.
    pub fn take_wake_request(&mut self) -> bool {
        debug_assert!(self.has_published_all(), "who looks for sleepers has shown everything");
        let taken = self.layout.producer_cursor() + WAKES;
        wake::take(&self.outbound, &self.inbound, self.layout.consumer_asleep(), taken)
    }

    /// Payload bytes that the next record can carry, in the big ring when `wanted_bytes` ask for it. Whatever a
    /// peer did to the words this comes from, a record of so many bytes at this cursor is inside the ring.
    #[inline]
    fn room_for(&mut self, cursor: &mut Cursor, wanted_bytes: usize) -> Result<usize, Corrupt> {
        if wanted_bytes <= INLINE_BYTES && cursor.tail < self.inbound_word(TAIL_LIMIT) {
            return Ok(INLINE_BYTES);
        }
        self.room_by_credit(cursor, wanted_bytes)
    }

    #[cold]
    fn room_by_credit(&mut self, cursor: &mut Cursor, wanted_bytes: usize) -> Result<usize, Corrupt> {
        if self.layout.elastic.is_some() {
            return self.elastic_room(cursor, wanted_bytes);
        }
        let wanted_slots = slots_of(wanted_bytes.min(RECORD_BYTES_MAX));
        let mut free_slots = self.writable_slots(cursor, self.inbound_word(CREDIT_SEEN))?;
        if free_slots < wanted_slots {
            let credit = self.reload_credit(cursor)?;
            free_slots = self.writable_slots(cursor, credit)?;
        }
        let is_bulk = wanted_bytes / SLOT_BYTES > self.layout.small_slots as usize / 2;
        if (is_bulk || free_slots < wanted_slots) && self.may_grow(cursor) {
            self.move_to(cursor, 1);
            free_slots = self.writable_slots(cursor, self.inbound_word(CREDIT_SEEN))?;
        }
        Ok(self.known_room(cursor, free_slots, free_slots))
    }

    /// Answers what of the room one record can have, and notes how far the next ones need not ask.
    fn known_room(&self, cursor: &Cursor, free_slots: u64, unasked_slots: u64) -> usize {
        // As long as the switch may not come to be, the limit stays the old ring's.
        if cursor.switch.is_none() {
            self.set_inbound_word(TAIL_LIMIT, cursor.tail.wrapping_add(unasked_slots));
        }
        let slots = free_slots.min(self.ring(cursor).slots_to_end(cursor.tail));
        (slots as usize * SLOT_BYTES).saturating_sub(HEADER_BYTES).min(RECORD_BYTES_MAX)
    }

    fn move_to(&self, cursor: &mut Cursor, ring: u8) {
        let switch = Switch { from: cursor.ring, position: cursor.tail };
        let tail = Ring::of(&self.layout, ring).used_position(cursor.tail.wrapping_add(1));
        *cursor = Cursor { tail, ring, switch: Some(switch) };
    }

    /// [`Producer::room_by_credit`] of an elastic lane.
    fn elastic_room(&mut self, cursor: &mut Cursor, wanted_bytes: usize) -> Result<usize, Corrupt> {
        let wanted_slots = slots_of(wanted_bytes.min(RECORD_BYTES_MAX));
        let capacity_slots = self.capacity_slots();
        let mut found = self.available_room(cursor, self.inbound_word(CREDIT_SEEN), capacity_slots)?;
        // The receiver's line costs as much as a message: it is asked only where it makes a difference.
        if found.slots() < wanted_slots || self.was_released(cursor) {
            found = self.available_room(cursor, self.reload_credit(cursor)?, capacity_slots)?;
        }
        if cursor.switch.is_none() && self.choose_ring(cursor, &found, wanted_bytes) {
            found = self.available_room(cursor, found.credit, capacity_slots)?;
        }
        let mut room_slots = found.slots();
        if cursor.ring != 0 && room_slots > 0 {
            room_slots = room_slots.min(self.charge_slots(cursor, room_slots.min(wanted_slots)));
        }
        // Where the receiver lags, writes share records: they come by here.
        let lag_slots = self.lag_slots(capacity_slots).saturating_sub(cursor.tail.wrapping_sub(found.credit));
        Ok(self.known_room(cursor, room_slots, room_slots.min(lag_slots)))
    }

    fn available_room(&self, cursor: &Cursor, credit: u64, capacity_slots: u64) -> Result<AvailableRoom, Corrupt> {
        let ring_slots = self.elastic_ring_slots(cursor, credit)?;
        let capacity_left = capacity_slots.saturating_sub(cursor.tail.wrapping_sub(credit));
        Ok(AvailableRoom { credit, ring_slots, capacity_left })
    }

    /// Whether the lane is in a larger ring whose memory was given back.
    fn was_released(&self, cursor: &Cursor) -> bool {
        cursor.ring != 0 && self.inbound_word(RINGS_USED) & !1 == 0
    }

    /// Moves to the ring in which the next record goes; `false`: it stays in this one.
    fn choose_ring(&mut self, cursor: &mut Cursor, found: &AvailableRoom, wanted_bytes: usize) -> bool {
        let AvailableRoom { credit, ring_slots, capacity_left } = *found;
        if self.was_released(cursor) && self.is_drained() {
            self.move_to(cursor, 0);
            return true;
        }
        let ring = self.ring(cursor);
        let wanted_slots = slots_of(wanted_bytes.min(RECORD_BYTES_MAX)).min(capacity_left);
        let bulk_slots = ((wanted_bytes / SLOT_BYTES) as u64).min(capacity_left);
        let is_full = ring_slots < wanted_slots;
        let holds_writes = if cursor.ring == 0 { 2 } else { RING_PER_WRITE / 2 };
        let is_bulk = bulk_slots * holds_writes > ring.slots_used && ring.slots < BULK_SLOTS;
        let suitable_slots = if wanted_bytes >= BULK_BYTES { BULK_SLOTS } else { STREAM_SLOTS };
        let grows = is_bulk || (is_full && (ring.slots < suitable_slots || !self.prefers_waiting));
        grows && !self.is_growth_forbidden && self.grow(cursor, credit, bulk_slots)
    }

    /// Moves to a larger ring, for writes of `bulk_slots`, if there is one and memory for it.
    #[cold]
    fn grow(&mut self, cursor: &mut Cursor, credit: u64, bulk_slots: u64) -> bool {
        let ring = self.ring(cursor);
        let wanted_ring_slots = (bulk_slots * RING_PER_WRITE).clamp(ring.slots * 2, BULK_SLOTS.max(ring.slots * 2));
        let ring_number = |slots: u64| (slots / ELASTIC_SLOTS_MIN).max(1).next_power_of_two().ilog2() as u8 + 1;
        let number = ring_number(wanted_ring_slots);
        // A ring that was left may still have something unread: if it is smaller than the present one; or if it is the
        // one from which the lane came back here, as long as the receiver has not followed.
        let has_followed = credit.wrapping_sub(self.entry(cursor)) as i64 >= 0;
        let left_ring = if cursor.ring == 0 && !has_followed { self.inbound_word(LEFT_RING) as u8 } else { 0 };
        let number = number.max(left_ring.saturating_add(1));
        if number <= cursor.ring || usize::from(number) > ELASTIC_RINGS {
            return false;
        }
        let saved = *cursor;
        self.move_to(cursor, number);
        if !self.charge_ring(cursor) {
            *cursor = saved;
            self.is_growth_forbidden = true;
        }
        cursor.ring == number
    }

    /// Pays for the first slots of a ring that is about to be entered, once.
    fn charge_ring(&mut self, cursor: &Cursor) -> bool {
        let charged_until = cursor.tail.wrapping_add(ELASTIC_SLOTS_MIN);
        let is_charged =
            self.memory.charged_until == charged_until || self.memory.take(ELASTIC_SLOTS_MIN as usize * SLOT_BYTES);
        if is_charged {
            self.memory.charged_until = charged_until;
        }
        is_charged
    }

    /// Pays for slots that are used for the first time since their memory was given back; answers how many may be used.
    fn charge_slots(&mut self, cursor: &Cursor, wanted_slots: u64) -> u64 {
        let (entry, ring) = (self.entry(cursor), self.ring(cursor));
        let end = entry.wrapping_add(ring.slots);
        let is_first_lap = cursor.tail.wrapping_sub(entry) < ring.slots;
        if !is_first_lap {
            return u64::MAX;
        }
        if self.memory.charged_until.wrapping_sub(entry) > ring.slots {
            self.memory.charged_until = entry; // Another process has moved here.
        }
        while self.memory.charged_until != end && self.charged_slots(cursor) < wanted_slots {
            let slots = ACCOUNT_SLOTS.min(end.wrapping_sub(self.memory.charged_until));
            if !self.memory.take(slots as usize * SLOT_BYTES) {
                self.is_growth_forbidden = true;
                break;
            }
            self.memory.charged_until = self.memory.charged_until.wrapping_add(slots);
        }
        if self.memory.charged_until == end { u64::MAX } else { self.charged_slots(cursor) }
    }

    fn charged_slots(&self, cursor: &Cursor) -> u64 {
        (self.memory.charged_until.wrapping_sub(cursor.tail) as i64).max(0) as u64
    }

    /// Free slots of the ring, but for one that is kept for the record that leaves it.
    fn elastic_ring_slots(&self, cursor: &Cursor, credit: u64) -> Result<u64, Corrupt> {
        let ring = self.ring(cursor);
        let free = self.free_slots(cursor, credit)?.saturating_sub(1);
        let (to_end, skipped) = (ring.slots_to_end(cursor.tail), ring.slots - ring.slots_used);
        // Behind the end of a lap positions are skipped, which have no slot.
        Ok(match free.checked_sub(skipped) {
            _ if free < to_end => free,
            Some(free) if free >= to_end => free,
            _ => to_end.saturating_sub(1),
        })
    }

    /// What both ends together have asked for.
    fn capacity_slots(&self) -> u64 {
        let sender_bytes = self.inbound_word(CAPACITY);
        let receiver_bytes = self.receiver_word(self.layout.receiver_capacity());
        let largest = ELASTIC_SLOTS_MIN << (ELASTIC_RINGS - 1);
        let slots = sender_bytes.saturating_add(receiver_bytes).div_ceil(SLOT_BYTES as u64);
        if sender_bytes == 0 { largest } else { slots.clamp(2 * WAKE_EVERY_SLOTS, largest) }
    }

    /// A sender that waits for the receiver fills its ring with records of their own first.
    fn lag_slots(&self, capacity_slots: u64) -> u64 {
        if self.prefers_waiting { u64::MAX } else { LAG_SLOTS.min(capacity_slots / LAG_SHARE) }
    }

    /// Slots that may be used, at most, for the lane to be writable.
    fn writable_slots_used(&self, cursor: &Cursor, in_ring: bool) -> u64 {
        let capacity_slots = self.capacity_slots();
        let by_capacity = capacity_slots - capacity_slots / ROOM_SHARE;
        let ring = self.ring(cursor);
        let is_largest = usize::from(cursor.ring) == ELASTIC_RINGS;
        if in_ring || self.is_growth_forbidden || is_largest {
            by_capacity.min(ring.slots_used - ring.slots_used / 4)
        } else {
            by_capacity
        }
    }

    fn is_elastic_writable(&self, cursor: &Cursor, in_ring: bool) -> Result<bool, Corrupt> {
        let limit_slots = self.writable_slots_used(cursor, in_ring);
        let is_within = |credit: u64| {
            // What comes back between two multiples comes without a wake-up.
            cursor.tail.wrapping_sub(credit & !(WAKE_EVERY_SLOTS - 1)) <= limit_slots.max(WAKE_EVERY_SLOTS)
        };
        if is_within(self.inbound_word(CREDIT_SEEN)) {
            return Ok(true);
        }
        self.reload_credit(cursor).map(is_within)
    }

    #[inline]
    fn has_open_record(&self) -> bool {
        self.layout.elastic.is_some() && self.inbound_word(OPEN) != 0
    }

    /// Whether a write is to share a record with others: short ones do, where the receiver lags.
    fn shares_records(&self, cursor: &Cursor, len_bytes: usize) -> Result<bool, Corrupt> {
        let never = self.layout.elastic.is_none() || self.prefers_waiting || len_bytes >= SHARED_BYTES_MAX;
        if never || cursor.switch.is_some() || self.holding_ms.is_some() {
            return Ok(false);
        }
        let lag_slots = self.lag_slots(self.capacity_slots());
        let lags = |credit: u64| cursor.tail.wrapping_sub(credit) >= lag_slots;
        Ok(lags(self.inbound_word(CREDIT_SEEN)) && lags(self.reload_credit(cursor)?))
    }

    /// Sends what is left of a short write from `sent_bytes` on in records that the next write may share.
    unsafe fn write_shared(
        &mut self,
        source: *const u8,
        sent_bytes: usize,
        len_bytes: usize,
    ) -> Result<usize, Corrupt> {
        let mut sent_bytes = sent_bytes;
        while sent_bytes < len_bytes {
            self.close_open_record();
            let mut cursor = self.cursor();
            let open_bytes = |slots: u64| slots as usize * SLOT_BYTES - HEADER_BYTES;
            let slots_max = self.open_slots_max();
            let room_bytes = self.room_for(&mut cursor, open_bytes(slots_max))?.min(open_bytes(slots_max));
            if room_bytes == 0 {
                break;
            }
            let record_bytes = room_bytes.min(len_bytes - sent_bytes);
            // SAFETY: `source` is readable for `len_bytes`; `sent_bytes` plus `record_bytes` are at most that.
            unsafe { self.open_record(&mut cursor, source.add(sent_bytes), record_bytes, slots_of(room_bytes)) };
            sent_bytes += record_bytes;
        }
        Ok(sent_bytes)
    }

    /// So few of what the lane may hold, and of the ring, that they do not keep it from being writable: a receiver that
    /// has read all of an open record may not return its credit before something follows.
    fn open_slots_max(&self) -> u64 {
        let ring_slots = self.ring(&self.cursor()).slots_used;
        OPEN_SLOTS.min(self.capacity_slots() / 8).min(ring_slots / 4)
    }

    /// Publishes an open record with its first bytes: `slots` are its own.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes`.
    unsafe fn open_record(&mut self, cursor: &mut Cursor, source: *const u8, len_bytes: usize, slots: u64) {
        let slot = self.ring(cursor).slot_offset(cursor.tail);
        // SAFETY: `source` is readable for `len_bytes`; the window checks the bounds of what is written.
        unsafe { self.outbound.write_from(slot + HEADER_BYTES, source, len_bytes) };
        self.store_header_and_tag(slot, cursor.tail, Record::Open(len_bytes));
        if let Some(switch) = cursor.switch.take() {
            self.publish_switch(cursor, switch);
        }
        self.set_inbound_word(TAIL, cursor.tail);
        self.set_inbound_word(TAIL_LIMIT, 0);
        self.set_inbound_word(OPEN, len_bytes as u64 | slots << 32);
        self.set_inbound_word(OPEN_STAMP, self.stamp);
    }

    /// Appends to the open record what it has room for, and closes it if that is not all.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes`.
    #[cold]
    unsafe fn append_to_open_record(&mut self, source: *const u8, len_bytes: usize) -> Result<usize, Corrupt> {
        let open = self.open()?;
        let cursor = self.cursor();
        let room_bytes = open.slots as usize * SLOT_BYTES - HEADER_BYTES - open.len_bytes;
        let is_read = self.receiver_word(self.layout.open_read()) == open_read_mark(cursor.tail, open.len_bytes);
        // A receiver that has caught up is served by records of their own.
        let appended_bytes = if is_read || len_bytes >= SHARED_BYTES_MAX { 0 } else { room_bytes.min(len_bytes) };
        if appended_bytes > 0 {
            let slot = self.ring(&cursor).slot_offset(cursor.tail);
            // SAFETY: `source` is readable for `len_bytes`, and `appended_bytes` are at most that (`min`).
            unsafe { self.outbound.write_from(slot + HEADER_BYTES + open.len_bytes, source, appended_bytes) };
            let so_far = open.len_bytes + appended_bytes;
            self.outbound.fence();
            let header = Record::Open(so_far).encode(self.inbound_word(OPEN_STAMP));
            self.outbound.store_u64(slot + WORD_BYTES, header, Ordering::Release);
            self.set_inbound_word(OPEN, so_far as u64 | open.slots << 32);
        }
        if appended_bytes < len_bytes {
            self.close_open_record();
        }
        Ok(appended_bytes)
    }

    /// The open record at the tail, whose words a peer may have written: what is answered lies inside the ring.
    fn open(&self) -> Result<Open, Corrupt> {
        let word = self.inbound_word(OPEN);
        let cursor = self.cursor();
        let (len_bytes, slots) = ((word & u64::from(u32::MAX)) as usize, word >> 32);
        let fits = slots <= OPEN_SLOTS.min(self.ring(&cursor).slots_to_end(cursor.tail))
            && len_bytes > 0
            && slots_of(len_bytes.min(RECORD_BYTES_MAX)) <= slots;
        if fits { Ok(Open { len_bytes, slots }) } else { Err(Corrupt { what: "open record", value: word }) }
    }

    /// Nothing more comes in the open record, if there is one.
    fn close_open_record(&mut self) {
        if self.has_open_record() {
            self.close_record();
        }
    }

    #[cold]
    fn close_record(&mut self) {
        let (open, cursor) = (self.open(), self.cursor());
        self.set_inbound_word(OPEN, 0);
        // One that a peer has spoilt is its own loss.
        let Ok(Open { len_bytes, .. }) = open else { return };
        let ring = self.ring(&cursor);
        let header = Record::Data(len_bytes).encode(self.inbound_word(OPEN_STAMP));
        self.outbound.store_u64(ring.slot_offset(cursor.tail) + WORD_BYTES, header, Ordering::Release);
        self.set_inbound_word(CLOSED, open_read_mark(cursor.tail, len_bytes));
        self.set_inbound_word(TAIL, ring.used_position(cursor.tail.wrapping_add(slots_of(len_bytes))));
    }

    #[inline]
    unsafe fn publish_copy(&mut self, cursor: &mut Cursor, source: *const u8, len_bytes: usize) {
        if len_bytes <= INLINE_BYTES && self.outbound.coherence() != Coherence::Coherent {
            // SAFETY: the caller's span.
            unsafe { self.publish_line(cursor, source, len_bytes) };
            return self.step_over(cursor, len_bytes);
        }
        let payload = self.ring(cursor).slot_offset(cursor.tail) + HEADER_BYTES;
        // SAFETY: the caller's span.
        unsafe { self.copy_in(payload, source, len_bytes) };
        self.publish(cursor, len_bytes);
    }

    #[inline(always)]
    unsafe fn copy_in(&self, offset: usize, source: *const u8, len_bytes: usize) {
        if len_bytes <= WORDWISE_BYTES_MAX {
            // SAFETY: the caller's span.
            unsafe { self.copy_words(offset, source, len_bytes) };
        } else {
            // SAFETY: the caller's span.
            unsafe { self.outbound.write_from(offset, source, len_bytes) };
        }
    }

    /// A payload of at most [`WORDWISE_BYTES_MAX`] goes as whole words, without a call.
    #[inline(always)]
    pub(crate) unsafe fn copy_words(&self, offset: usize, source: *const u8, len_bytes: usize) {
        if len_bytes == 0 {
            return;
        }
        // SAFETY: the caller's span.
        let word = unsafe { load_short(source, len_bytes) };
        self.outbound.store_u64(offset, word, Ordering::Relaxed);
        if len_bytes > WORD_BYTES {
            // SAFETY: the caller's span, from what is not yet sent on.
            let word = unsafe { load_short(source.add(WORD_BYTES), len_bytes - WORD_BYTES) };
            self.outbound.store_u64(offset + WORD_BYTES, word, Ordering::Relaxed);
        }
    }

    /// Makes a record visible. The payload is in place.
    #[inline(always)] // The compiler would share it with the cold callers, through memory.
    fn publish(&mut self, cursor: &mut Cursor, len_bytes: usize) {
        if let Some(now_ms) = self.holding_ms {
            return self.hold_record(cursor, len_bytes, now_ms);
        }
        self.store_header_and_tag(self.ring(cursor).slot_offset(cursor.tail), cursor.tail, Record::Data(len_bytes));
        self.step_over(cursor, len_bytes);
    }

    /// Adds a record to those that are shown together: its payload is in place, but for `line`, whose first two words
    /// are filled in here. `is_whole`: all of the record is in the first of its words.
    pub(crate) fn stage(&mut self, cursor: Cursor, line: &mut [u64], len_bytes: usize, is_whole: bool) {
        if let Some(Switch { from, position }) = cursor.switch {
            // The receiver comes by it before the record.
            let switch = [tag(self.secret, position), Record::Switch(cursor.ring).encode(self.stamp)];
            let slot = Ring::of(&self.layout, from).slot_offset(position);
            self.batch.add(&self.outbound, slot, &switch, true);
            self.note_ring(&cursor, from);
        }
        let ring = self.ring(&cursor);
        line[0] = tag(self.secret, cursor.tail);
        line[1] = Record::Data(len_bytes).encode(self.stamp);
        self.batch.add(&self.outbound, ring.slot_offset(cursor.tail), line, is_whole);
        self.set_inbound_word(TAIL, ring.used_position(cursor.tail.wrapping_add(slots_of(len_bytes))));
    }

    /// A short record as the one line that it is: stored as such, it crosses in one packet.
    unsafe fn publish_line(&self, cursor: &Cursor, source: *const u8, len_bytes: usize) {
        let mut line = [0; SLOT_BYTES / WORD_BYTES];
        line[0] = tag(self.secret, cursor.tail);
        line[1] = Record::Data(len_bytes).encode(self.stamp);
        let payload = &mut line[HEADER_BYTES / WORD_BYTES..];
        for (word, at) in payload.iter_mut().zip((0..len_bytes).step_by(WORD_BYTES)) {
            // SAFETY: the caller's span, from what is not yet sent on.
            *word = unsafe { load_short(source.add(at), len_bytes - at) };
        }
        let words = (HEADER_BYTES + len_bytes).div_ceil(WORD_BYTES);
        self.outbound.store_line(self.ring(cursor).slot_offset(cursor.tail), &line[..words]);
    }

    /// Moves on behind a record that is visible.
    #[inline(always)] // As `publish`.
    fn step_over(&mut self, cursor: &mut Cursor, len_bytes: usize) {
        if let Some(switch) = cursor.switch.take() {
            self.publish_switch(cursor, switch);
        }
        cursor.tail = self.ring(cursor).used_position(cursor.tail.wrapping_add(slots_of(len_bytes)));
        self.set_inbound_word(TAIL, cursor.tail);
    }

    /// Leads the receiver to another ring, where a record awaits it: a switch alone would be something unread without a
    /// byte.
    #[cold]
    fn publish_switch(&mut self, cursor: &Cursor, switch: Switch) {
        let slot = Ring::of(&self.layout, switch.from).slot_offset(switch.position);
        self.store_header_and_tag(slot, switch.position, Record::Switch(cursor.ring));
        self.note_ring(cursor, switch.from);
        // What was known of the old ring's room is not true of this one's.
        self.set_inbound_word(TAIL_LIMIT, 0);
    }

    /// From now on the lane is in the ring of `cursor`, whose tail is the first position there.
    fn note_ring(&self, cursor: &Cursor, from: u8) {
        self.set_inbound_word(RING, cursor.ring.into());
        self.set_inbound_word(ENTRY, cursor.tail);
        self.set_inbound_word(LEFT_RING, from.into());
        // The switch itself takes memory of the ring that is left.
        self.set_inbound_word(RINGS_USED, self.inbound_word(RINGS_USED) | 1 << cursor.ring | 1 << from);
    }

    /// Header, fence, tag.
    #[inline(always)]
    fn store_header_and_tag(&mut self, slot: usize, position: u64, record: Record) {
        self.outbound.store_u64(slot + 8, record.encode(self.stamp), Ordering::Relaxed);
        self.outbound.fence();
        self.outbound.store_u64(slot, tag(self.secret, position), Ordering::Release);
    }

    /// Slots that may be written. The small ring keeps one back, for the record that leaves it.
    fn writable_slots(&self, cursor: &Cursor, credit: u64) -> Result<u64, Corrupt> {
        let reserved_slots = u64::from(self.can_grow(cursor));
        Ok(self.free_slots(cursor, credit)?.saturating_sub(reserved_slots))
    }

    /// Free slots of the ring: of what is unread, only what lies in this ring counts.
    fn free_slots(&self, cursor: &Cursor, credit: u64) -> Result<u64, Corrupt> {
        let corrupt = Corrupt { what: "credit", value: credit };
        let used_slots = self.used_slots(cursor, credit)?;
        let in_ring_slots = used_slots.min(cursor.tail.wrapping_sub(self.entry(cursor)));
        self.ring(cursor).slots.checked_sub(in_ring_slots).ok_or(corrupt)
    }

    /// Slots that are unread, in whichever ring.
    fn used_slots(&self, cursor: &Cursor, credit: u64) -> Result<u64, Corrupt> {
        let used_slots = cursor.tail.wrapping_sub(credit);
        let is_possible = used_slots <= self.layout.slots_total();
        if is_possible { Ok(used_slots) } else { Err(Corrupt { what: "credit", value: credit }) }
    }

    /// Position of the first record in the ring of `cursor`.
    fn entry(&self, cursor: &Cursor) -> u64 {
        if cursor.switch.is_some() { cursor.tail } else { self.inbound_word(ENTRY) }
    }

    /// The receiver looks for sleepers when it crosses a quarter of the ring, so room counts from there on: what comes
    /// back in between would come without a wake-up.
    fn has_room_to_wake(&self, cursor: &Cursor, credit: u64) -> Result<bool, Corrupt> {
        self.free_slots(cursor, credit)?;
        let slots = self.ring(cursor).slots;
        let quarter = slots / 4;
        Ok(cursor.tail.wrapping_sub(credit & !(quarter - 1)) <= slots - quarter)
    }

    fn reload_credit(&self, cursor: &Cursor) -> Result<u64, Corrupt> {
        let credit = self.receiver_word(self.layout.credit());
        let seen = self.inbound_word(CREDIT_SEEN);
        if credit.wrapping_sub(seen) > cursor.tail.wrapping_sub(seen) {
            return Err(Corrupt { what: "credit", value: credit });
        }
        self.set_inbound_word(CREDIT_SEEN, credit);
        Ok(credit)
    }

    fn can_grow(&self, cursor: &Cursor) -> bool {
        self.layout.big_slots != 0 && cursor.ring == 0
    }

    fn may_grow(&self, cursor: &Cursor) -> bool {
        let sender_bytes = self.inbound_word(CAPACITY);
        let is_bounded = || {
            let receiver_bytes = self.receiver_word(self.layout.receiver_capacity());
            sender_bytes.saturating_add(receiver_bytes) < self.layout.big_slots * SLOT_BYTES as u64 / 4
        };
        self.can_grow(cursor) && (sender_bytes == 0 || !is_bounded())
    }

    #[inline]
    fn ring(&self, cursor: &Cursor) -> Ring {
        Ring::of(&self.layout, cursor.ring)
    }

    #[inline]
    fn cursor(&self) -> Cursor {
        let ring = self.inbound_word(RING).min(self.layout.rings_larger() as u64) as u8;
        Cursor { tail: self.inbound_word(TAIL), ring, switch: None }
    }

    /// A word that the receiver writes.
    #[inline]
    fn receiver_word(&self, offset: usize) -> u64 {
        self.inbound.invalidate(offset, WORD_BYTES);
        self.inbound.load_u64(offset, Ordering::Acquire)
    }

    #[inline]
    fn inbound_word(&self, field: usize) -> u64 {
        self.inbound.load_u64(self.layout.producer_cursor() + field, Ordering::Relaxed)
    }

    #[inline]
    fn set_inbound_word(&self, field: usize, value: u64) {
        self.inbound.store_u64(self.layout.producer_cursor() + field, value, Ordering::Relaxed);
    }
}
