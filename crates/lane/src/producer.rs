//! The sending end.

use crate::batch::Batch;
use crate::layout::Ring;
use crate::record::{HEADER_BYTES, INLINE_BYTES, RECORD_BYTES_MAX, Record, SHORT_BYTES_MAX, SLOT_BYTES, slots_of, tag};
use crate::words::{WORD_BYTES, WORDWISE_BYTES_MAX, load_short, load_words};
use crate::{Corrupt, Layout, wake};
use fabric::{Coherence, Inbound, Outbound};
use std::ptr::NonNull;
use volmem::sync::Ordering;

/// Messages up to this long are handed over to the shared cache: 3% of a round trip at one line, 15% at 1 KiB, nothing
/// from 4 KiB on. In a stream of short messages it costs half the rate.
const HAND_OVER_SLOTS_MAX: u64 = 64;
/// The first four are loaded together.
const TAIL: usize = 0;
const CREDIT_SEEN: usize = 8;
const IN_BIG_RING: usize = 16;
const TAIL_LIMIT: usize = 24;
const CAPACITY: usize = 32;
const SLEEPS: usize = 40;
const WAKES: usize = 48;

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
}

/// Where writing stands: loaded once at the start of an operation, because a peer on shared memory can change it at any
/// time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cursor {
    tail: u64,
    in_big_ring: bool,
    /// The next record is the first in the big ring: it is published together with the switch in the slot before it.
    switch_is_due: bool,
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
        Self { outbound, inbound, layout, secret, reserved: None, batch: Batch::default() }
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
        let mut cursor = self.cursor();
        let mut sent_bytes = 0;
        while sent_bytes < len_bytes {
            let rest_bytes = len_bytes - sent_bytes;
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
        let [tail, _, in_big_ring, limit] = self.inbound.load_words(self.layout.producer_cursor());
        let is_coherent = self.outbound.coherence() == Coherence::Coherent;
        if !is_coherent || tail >= limit {
            return false;
        }
        let ring = Ring::of(&self.layout, in_big_ring != 0);
        if !(1..=INLINE_BYTES).contains(&len_bytes) {
            // SAFETY: the caller's span.
            return unsafe { self.write_slots_from(ring, tail, limit, source, len_bytes, is_awaited) };
        }
        let slot = ring.slot_offset(tail);
        let (tag, header) = (tag(self.secret, tail), Record::Data(len_bytes).encode());
        if len_bytes <= WORDWISE_BYTES_MAX {
            // SAFETY: the caller's span.
            let [first, second] = unsafe { load_words(source, len_bytes) };
            self.outbound.store_line(slot, &[tag, header, first, second]);
        } else {
            // SAFETY: the caller's span.
            let [first, second, third, fourth, fifth, sixth] = unsafe { load_words(source, len_bytes) };
            self.outbound.store_line(slot, &[tag, header, first, second, third, fourth, fifth, sixth]);
        }
        self.set_inbound_word(TAIL, tail.wrapping_add(1));
        if is_awaited {
            self.outbound.hand_over(slot, SLOT_BYTES);
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
        self.show(slot, tail, Record::Data(len_bytes));
        let next = tail.wrapping_add(slots);
        self.set_inbound_word(TAIL, next);
        if is_awaited && slots <= HAND_OVER_SLOTS_MAX {
            self.outbound.hand_over(slot, slots as usize * SLOT_BYTES);
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

    /// Reserves room for one record of up to `len_bytes_max` bytes, to be filled in place. `None` when there is no room
    /// now, or the window cannot be written in place. It lasts until the next write or reservation.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    pub fn reserve(&mut self, len_bytes_max: usize) -> Result<Option<Reservation>, Corrupt> {
        let before = self.cursor();
        let (cursor, start, len_bytes) = self.place_for(len_bytes_max)?;
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
    pub(crate) fn place_for(&mut self, len_bytes_max: usize) -> Result<(Cursor, usize, usize), Corrupt> {
        self.reserved = None;
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

    /// Says how many bytes this end should hold unread, 0 for as many as the lane can. A lane whose ends together ask
    /// for less than a quarter of the big ring does not move there; one that has moved stays.
    pub fn set_capacity(&mut self, bytes: usize) {
        self.set_inbound_word(CAPACITY, bytes as u64);
    }

    /// Shows the receiver all records that were [staged](crate::Draft::stage), in one go; `false`: there were none.
    /// Whoever stages records does so before it asks for [`Producer::take_wake_request`], waits, or lets anybody else
    /// use this end: what others send behind them is not seen before.
    #[inline]
    pub fn publish_staged(&mut self) -> bool {
        self.batch.show(&self.outbound, false)
    }

    /// As [`Producer::publish_staged`]; and whoever sees these records sees what this node has shown before in other
    /// lanes of the link, too.
    #[inline]
    pub fn publish_staged_behind(&mut self) -> bool {
        self.batch.show(&self.outbound, true)
    }

    /// Whether nothing is staged.
    #[inline]
    pub(crate) fn has_shown_all(&self) -> bool {
        self.batch.is_empty()
    }

    /// Says that nothing follows. Idempotent; needs no room.
    pub fn finish(&mut self) {
        self.publish_staged();
        self.outbound.fence();
        self.outbound.store_u64(self.layout.fin(), self.position().wrapping_add(1), Ordering::Release);
    }

    /// Whether at least a quarter of the ring is free: the level at which a sleeping sender is woken.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    pub fn is_writable(&self) -> Result<bool, Corrupt> {
        let cursor = self.cursor();
        if self.may_grow(&cursor) || self.has_room_to_wake(&cursor, self.inbound_word(CREDIT_SEEN))? {
            return Ok(true);
        }
        let credit = self.reload_credit(&cursor)?;
        self.has_room_to_wake(&cursor, credit)
    }

    /// Whether the receiver has consumed every byte sent.
    pub fn is_drained(&self) -> bool {
        self.receivers_word(self.layout.credit()) == self.position()
    }

    /// Slots that are sent and whose credit has not come back.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    pub fn unread_slots(&self) -> Result<u64, Corrupt> {
        let cursor = self.cursor();
        let credit = self.reload_credit(&cursor)?;
        Ok(self.ring(&cursor).slots - self.free_slots(&cursor, credit)?)
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
        if slots <= HAND_OVER_SLOTS_MAX && slots <= ring.slots_to_end(position) {
            self.outbound.hand_over(ring.slot_offset(position), slots as usize * SLOT_BYTES);
        }
    }

    /// Asks the receiver to ring when room has come back. Look at [`Producer::is_writable`] once more before sleeping.
    pub fn announce_sleep(&self) {
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
        debug_assert!(self.has_shown_all(), "who looks for sleepers has shown everything");
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
        let wanted_slots = slots_of(wanted_bytes.min(RECORD_BYTES_MAX));
        let mut free_slots = self.writable_slots(cursor, self.inbound_word(CREDIT_SEEN))?;
        if free_slots < wanted_slots {
            let credit = self.reload_credit(cursor)?;
            free_slots = self.writable_slots(cursor, credit)?;
        }
        let is_bulk = wanted_bytes / SLOT_BYTES > self.layout.small_slots as usize / 2;
        if (is_bulk || free_slots < wanted_slots) && self.may_grow(cursor) {
            *cursor = Cursor { tail: cursor.tail.wrapping_add(1), in_big_ring: true, switch_is_due: true };
            free_slots = self.writable_slots(cursor, self.inbound_word(CREDIT_SEEN))?;
        }
        // As long as the switch may not come to be, the limit stays the small ring's.
        if !cursor.switch_is_due {
            self.set_inbound_word(TAIL_LIMIT, cursor.tail.wrapping_add(free_slots));
        }
        let slots = free_slots.min(self.ring(cursor).slots_to_end(cursor.tail));
        Ok((slots as usize * SLOT_BYTES).saturating_sub(HEADER_BYTES).min(RECORD_BYTES_MAX))
    }

    #[inline]
    unsafe fn publish_copy(&mut self, cursor: &mut Cursor, source: *const u8, len_bytes: usize) {
        if len_bytes <= INLINE_BYTES && self.outbound.coherence() != Coherence::Coherent {
            // SAFETY: the caller's span.
            unsafe { self.show_line(cursor, source, len_bytes) };
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
        self.show(self.ring(cursor).slot_offset(cursor.tail), cursor.tail, Record::Data(len_bytes));
        self.step_over(cursor, len_bytes);
    }

    /// Adds a record to those that are shown together: its payload is in place, but for `line`, whose first two words
    /// are filled in here. `is_whole`: all of the record is in the first of its words.
    pub(crate) fn stage(&mut self, cursor: Cursor, line: &mut [u64], len_bytes: usize, is_whole: bool) {
        if cursor.switch_is_due {
            // The receiver comes by it before the record.
            let position = cursor.tail.wrapping_sub(1);
            let switch = [tag(self.secret, position), Record::Switch.encode()];
            let slot = Ring::of(&self.layout, false).slot_offset(position);
            self.batch.add(&self.outbound, slot, &switch, true);
            self.set_inbound_word(IN_BIG_RING, 1);
        }
        line[0] = tag(self.secret, cursor.tail);
        line[1] = Record::Data(len_bytes).encode();
        self.batch.add(&self.outbound, self.ring(&cursor).slot_offset(cursor.tail), line, is_whole);
        self.set_inbound_word(TAIL, cursor.tail.wrapping_add(slots_of(len_bytes)));
    }

    /// A short record as the one line that it is: stored as such, it crosses in one packet.
    unsafe fn show_line(&self, cursor: &Cursor, source: *const u8, len_bytes: usize) {
        let mut line = [0; SLOT_BYTES / WORD_BYTES];
        line[0] = tag(self.secret, cursor.tail);
        line[1] = Record::Data(len_bytes).encode();
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
        if cursor.switch_is_due {
            self.publish_switch(cursor);
        }
        cursor.tail = cursor.tail.wrapping_add(slots_of(len_bytes));
        self.set_inbound_word(TAIL, cursor.tail);
    }

    /// Leads the receiver to the big ring, where a record awaits it: a switch alone would be something unread without
    /// a byte.
    #[cold]
    fn publish_switch(&mut self, cursor: &mut Cursor) {
        let position = cursor.tail.wrapping_sub(1);
        self.show(Ring::of(&self.layout, false).slot_offset(position), position, Record::Switch);
        self.set_inbound_word(IN_BIG_RING, 1);
        cursor.switch_is_due = false;
    }

    /// Header, fence, tag.
    #[inline(always)]
    fn show(&mut self, slot: usize, position: u64, record: Record) {
        self.outbound.store_u64(slot + 8, record.encode(), Ordering::Relaxed);
        self.outbound.fence();
        self.outbound.store_u64(slot, tag(self.secret, position), Ordering::Release);
    }

    /// Slots that may be written. The small ring keeps one back, for the record that leaves it.
    fn writable_slots(&self, cursor: &Cursor, credit: u64) -> Result<u64, Corrupt> {
        let kept_slots = u64::from(self.can_grow(cursor));
        Ok(self.free_slots(cursor, credit)?.saturating_sub(kept_slots))
    }

    fn free_slots(&self, cursor: &Cursor, credit: u64) -> Result<u64, Corrupt> {
        let used_slots = cursor.tail.wrapping_sub(credit);
        // After a switch, what is unread in the small ring counts too: never more than the big ring holds.
        self.ring(cursor).slots.checked_sub(used_slots).ok_or(Corrupt { what: "credit", value: credit })
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
        let credit = self.receivers_word(self.layout.credit());
        let seen = self.inbound_word(CREDIT_SEEN);
        if credit.wrapping_sub(seen) > cursor.tail.wrapping_sub(seen) {
            return Err(Corrupt { what: "credit", value: credit });
        }
        self.set_inbound_word(CREDIT_SEEN, credit);
        Ok(credit)
    }

    fn can_grow(&self, cursor: &Cursor) -> bool {
        self.layout.big_slots != 0 && !cursor.in_big_ring
    }

    fn may_grow(&self, cursor: &Cursor) -> bool {
        let own_bytes = self.inbound_word(CAPACITY);
        let is_bounded = || {
            let theirs_bytes = self.receivers_word(self.layout.receiver_capacity());
            own_bytes.saturating_add(theirs_bytes) < self.layout.big_slots * SLOT_BYTES as u64 / 4
        };
        self.can_grow(cursor) && (own_bytes == 0 || !is_bounded())
    }

    #[inline]
    fn ring(&self, cursor: &Cursor) -> Ring {
        Ring::of(&self.layout, cursor.in_big_ring)
    }

    #[inline]
    fn cursor(&self) -> Cursor {
        let in_big_ring = self.inbound_word(IN_BIG_RING) != 0;
        Cursor { tail: self.inbound_word(TAIL), in_big_ring, switch_is_due: false }
    }

    /// A word that the receiver writes.
    #[inline]
    fn receivers_word(&self, offset: usize) -> u64 {
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
