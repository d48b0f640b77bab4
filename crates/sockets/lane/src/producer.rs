//! The sending endpoint of a lane.

mod elastic;
mod memory;
mod moves;
mod open;
mod room;

pub use memory::{Budget, MemoryRelease};
pub use moves::UnreadBytes;

use crate::batch::Batch;
use crate::layout::Ring;
use crate::record::{HEADER_BYTES, INLINE_BYTES, RECORD_BYTES_MAX, Record, SHORT_BYTES_MAX, SLOT_BYTES, slots_of, tag};
use crate::words::{WORD_BYTES, WORDWISE_BYTES_MAX, load_short, load_words};
use crate::{Corrupt, Layout, wake};
use fabric::{Coherence, Inbound, Outbound};
use memory::Account;
use std::ptr::NonNull;
use volmem::Region;
use volmem::sync::Ordering;

/// Maximum slots of a message that is demoted to the shared cache. This saves 3% of a round trip at one line, 15% at
/// 1 KiB and nothing from 4 KiB on; in a stream of short messages it halves the rate.
const DEMOTE_SLOTS_MAX: u64 = 64;
// Offsets of the words of the sender's own state. The first four words are loaded together.
const TAIL: usize = 0;
const CREDIT_SEEN: usize = 8;
const RING: usize = 16;
const TAIL_LIMIT: usize = 24;
const CAPACITY: usize = 32;
const SLEEPS: usize = 40;
const WAKES: usize = 48;
/// Position of the first record in the current ring.
const ENTRY: usize = 56;
/// Length and slots of the open record at the tail; 0 if no record is open.
const OPEN: usize = 64;
/// Bitmap of the larger rings whose memory has been used since it was last released.
const RINGS_USED: usize = 72;
/// The larger ring from which the lane returned to the small one. The switch record in it may still be unread.
const LEFT_RING: usize = 80;
/// The [`open_read_mark`] that a receiver stores once it has read all of the record that was closed last.
const CLOSED: usize = 88;
/// Position at which the lane was last restarted: 0 at first.
const START: usize = 96;

/// A receiver of an elastic lane checks for a sleeping sender whenever it crosses a multiple of this number of slots.
/// Under loom it is smaller, so that the small rings of a model contain several multiples.
pub(crate) const WAKE_EVERY_SLOTS: u64 = if cfg!(loom) { 4 } else { 32 };

/// The sending endpoint of a lane.
///
/// Its cursor lies in its own state, which processes that share the connection (after `fork`) share, too; see
/// [`Producer::with_state`]. `&mut self` requires mutual exclusion: processes and threads that share a producer must
/// exclude each other. A violation corrupts the stream but does not affect memory safety.
#[derive(Debug)]
pub struct Producer<O, I> {
    outbound: O,
    inbound: I,
    own: Region,
    layout: Layout,
    secret: u64,
    reserved: Option<Reserved>,
    batch: Batch,
    /// See [`Producer::set_prefers_waiting`].
    prefers_waiting: bool,
    /// The lane uses only memory that is charged: there was none for a larger ring or for more of the current one, or
    /// none may be used.
    is_growth_forbidden: bool,
    memory: Account,
}

/// The write position. It is loaded once at the start of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cursor {
    tail: u64,
    ring: u8,
    /// Set if the next record is the first in another ring: it is published together with the switch to that ring.
    switch: Option<Switch>,
}

/// A switch record to another ring that is not yet published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Switch {
    /// The ring that is left.
    from: u8,
    /// The position of the switch record in that ring.
    position: u64,
}

/// The last reservation, in memory of this process alone.
#[derive(Debug, Clone, Copy)]
struct Reserved {
    /// The write position before the reservation.
    before: Cursor,
    /// The position of the reserved record.
    cursor: Cursor,
    len_bytes: usize,
}

/// Returns the word with which a receiver reports that it has read `len_bytes` of the open record at `position`; never
/// 0.
#[inline]
pub(crate) fn open_read_mark(position: u64, len_bytes: usize) -> u64 {
    position << 16 | len_bytes as u64
}

/// A span of the receiver's ring to be filled in place, then published with [`Producer::commit`].
#[derive(Debug, Clone, Copy)]
pub struct Reservation {
    /// Start of the span, which must only be written.
    pub pointer: NonNull<u8>,
    /// Bytes that may be written.
    pub len_bytes: usize,
}

impl<O: Outbound, I: Inbound> Producer<O, I> {
    /// Attaches to a new lane that `layout` describes: the sender writes `outbound`, and the receiver writes `inbound`.
    /// Both endpoints must use the same `secret`, which is random and not zero. A new lane requires zeroed memory.
    ///
    /// # Panics
    /// If the layout does not fit the memory.
    pub fn new(outbound: O, inbound: I, layout: Layout, secret: u64) -> Self {
        let own = Region::heap(Layout::PRODUCER_STATE_BYTES);
        Self::with_state(outbound, inbound, own, layout, secret)
    }

    /// Attaches as [`Producer::new`] does, with the endpoint's own state in `own`, so that processes that share that
    /// memory share the endpoint. It has [`Layout::PRODUCER_STATE_BYTES`], and is zero for a new lane.
    ///
    /// # Panics
    /// If the layout does not fit the memory, or `own` is of another size.
    pub fn with_state(outbound: O, inbound: I, own: Region, layout: Layout, secret: u64) -> Self {
        layout.check(outbound.len_bytes(), inbound.len_bytes());
        assert_eq!(own.len_bytes(), Layout::PRODUCER_STATE_BYTES, "the state of a sender");
        Self {
            outbound,
            inbound,
            own,
            layout,
            secret,
            reserved: None,
            batch: Batch::default(),
            prefers_waiting: false,
            is_growth_forbidden: false,
            memory: Account::unlimited(),
        }
    }

    /// Sets how an elastic lane grows. A sender that can wait for the receiver sets `true`: the lane then stays in a
    /// ring of a size suitable for its writes. With `false` the lane grows up to its capacity.
    pub fn set_prefers_waiting(&mut self, prefers_waiting: bool) {
        self.prefers_waiting = prefers_waiting;
    }

    /// Sends as many of the `len_bytes` at `source` as there is room for; returns their number.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes` and outside the lane's memory.
    #[inline]
    pub unsafe fn write_from(&mut self, source: *const u8, len_bytes: usize) -> Result<usize, Corrupt> {
        let mut sent_bytes = 0;
        if self.has_open_record() {
            // SAFETY: `source` is readable for `len_bytes` and outside the window, by this function's contract.
            sent_bytes = unsafe { self.append_to_open_record(source, len_bytes) }?;
        }
        let mut cursor = self.cursor();
        while sent_bytes < len_bytes {
            let rest_bytes = len_bytes - sent_bytes;
            if self.shares_records(&cursor, rest_bytes)? {
                // SAFETY: `source` is readable for `len_bytes` and outside the window, by this function's contract, and
                // `sent_bytes` is less than `len_bytes`.
                return unsafe { self.write_shared(source, sent_bytes, len_bytes) };
            }
            let room_bytes = self.room_for(&mut cursor, rest_bytes)?;
            if room_bytes == 0 {
                break;
            }
            let record_bytes = rest_bytes.min(room_bytes);
            // SAFETY: `source` is readable for `len_bytes` and outside the window, by this function's contract, and
            // `sent_bytes` plus `record_bytes` are at most that: `record_bytes` is limited to `rest_bytes`.
            unsafe { self.publish_copy(&mut cursor, source.add(sent_bytes), record_bytes) };
            sent_bytes += record_bytes;
        }
        Ok(sent_bytes)
    }

    /// Sends the `len_bytes` at `source` if they are at most [`SHORT_BYTES_MAX`], memory is coherent, and contiguous
    /// room is known without loading the credit, which is nearly always the case for a sender of short messages.
    /// `is_awaited` demotes them to the shared cache; see [`Producer::demote_since`]. Returns `false` if nothing was
    /// sent: call [`Producer::write_from`] then.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes` and outside the lane's memory.
    #[inline(always)] // Most of the saving is the cost of the call.
    pub unsafe fn write_short_from(&mut self, source: *const u8, len_bytes: usize, is_awaited: bool) -> bool {
        let [tail, _, ring, limit] = self.own.load_words(TAIL);
        let is_coherent = self.outbound.coherence() == Coherence::Coherent;
        if !is_coherent || tail >= limit {
            return false;
        }
        let ring = Ring::of(&self.layout, ring as u8);
        if !(1..=INLINE_BYTES).contains(&len_bytes) {
            // SAFETY: `source` is readable for `len_bytes` and outside the window, by this function's contract.
            return unsafe { self.write_slots_from(ring, tail, limit, source, len_bytes, is_awaited) };
        }
        let slot = ring.slot_offset(tail);
        let (tag, header) = (tag(self.secret, tail), Record::Data(len_bytes).encode());
        if len_bytes <= WORDWISE_BYTES_MAX {
            // SAFETY: `source` is readable for `len_bytes` and outside the window, by this function's contract, and two
            // words hold them: `len_bytes` is at most `WORDWISE_BYTES_MAX`.
            let [first, second] = unsafe { load_words(source, len_bytes) };
            self.outbound.store_line(slot, &[tag, header, first, second]);
        } else {
            // SAFETY: `source` is readable for `len_bytes` and outside the window, by this function's contract, and six
            // words hold them: `len_bytes` is at most `INLINE_BYTES`, which was checked above.
            let [first, second, third, fourth, fifth, sixth] = unsafe { load_words(source, len_bytes) };
            self.outbound.store_line(slot, &[tag, header, first, second, third, fourth, fifth, sixth]);
        }
        self.set_own_word(TAIL, ring.used_position(tail.wrapping_add(1)));
        if is_awaited {
            self.outbound.demote(slot, SLOT_BYTES);
        }
        true
    }

    /// Does the work of [`Producer::write_short_from`] for messages longer than a slot. Whatever values a peer stored
    /// in `tail` and `limit`, the record lies inside the ring.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes` and outside the lane's memory.
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
        // SAFETY: `source` is readable for `len_bytes` and outside the window, by this function's contract; the window
        // checks the bounds of its own side.
        unsafe { self.outbound.write_from(slot + HEADER_BYTES, source, len_bytes) };
        self.store_header_and_tag(slot, tail, Record::Data(len_bytes));
        self.set_own_word(TAIL, ring.used_position(tail.wrapping_add(slots)));
        if is_awaited && slots <= DEMOTE_SLOTS_MAX {
            self.outbound.demote(slot, slots as usize * SLOT_BYTES);
        }
        true
    }

    /// Sends as many bytes of `source` as there is room for; returns their number.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    pub fn write(&mut self, source: &[u8]) -> Result<usize, Corrupt> {
        // SAFETY: a slice is readable for its length, and outside the window: nothing borrows memory that a peer can
        // write.
        unsafe { self.write_from(source.as_ptr(), source.len()) }
    }

    /// Reserves room for one record of up to `len_bytes_max` bytes, to be filled in place. Returns `None` if there is
    /// no room now, or if the window cannot be written in place. The reservation lasts until the next write or
    /// reservation.
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

    /// Returns the position and the payload offset of the next record, and the length it may have: at most
    /// `len_bytes_max`, and 0 if there is no room now.
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

    /// Publishes the first `len_bytes` of the last reservation; 0 cancels it.
    ///
    /// # Errors
    /// [`Corrupt`] if the write position has changed since the reservation: the peer stored to the cursor, or this
    /// endpoint wrote something else.
    ///
    /// # Panics
    /// If `len_bytes` is more than was reserved.
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

    /// Sets the capacity of an elastic lane for unread bytes; 0 means as many as the lane can hold. Any other lane has
    /// the capacity of its rings.
    pub fn set_capacity(&mut self, bytes: usize) {
        self.set_own_word(CAPACITY, bytes as u64);
        self.set_own_word(TAIL_LIMIT, 0);
    }

    /// Publishes all [staged](crate::Draft::stage) records at once. Returns `false` if there are none. A caller that
    /// has staged records must call this before it calls [`Producer::take_wake_request`], waits, or lets another thread
    /// or process use this endpoint: records that are sent behind the staged ones are not visible before them.
    #[inline]
    pub fn publish_staged(&mut self) -> bool {
        self.batch.publish(&self.outbound, false)
    }

    /// Does the same as [`Producer::publish_staged`], and orders the records after all records that this node has
    /// published before in other lanes of the link.
    #[inline]
    pub fn publish_staged_behind(&mut self) -> bool {
        self.batch.publish(&self.outbound, true)
    }

    /// Returns whether no record is staged.
    #[inline]
    pub(crate) fn has_published_all(&self) -> bool {
        self.batch.is_empty()
    }

    /// Marks the end of the stream. Idempotent; needs no room in the ring.
    pub fn finish(&mut self) {
        let end = self.end_move();
        self.outbound.store_u64(self.layout.fin(), end.wrapping_add(1), Ordering::Release);
    }

    /// Returns the write position in slots, which grows with every record.
    pub fn position(&self) -> u64 {
        self.own_word(TAIL)
    }

    /// Demotes the lines of the records since `position` to the shared cache, as a hint that the receiver waits for
    /// them. This helps a response, but slows down a stream.
    #[inline]
    pub fn demote_since(&self, position: u64) {
        let cursor = self.cursor();
        let slots = cursor.tail.wrapping_sub(position);
        let ring = self.ring(&cursor);
        let is_here = position.wrapping_sub(self.own_word(ENTRY)) as i64 >= 0;
        if slots <= DEMOTE_SLOTS_MAX && slots <= ring.slots_to_end(position) && is_here {
            self.outbound.demote(ring.slot_offset(position), slots as usize * SLOT_BYTES);
        }
    }

    /// Asks the receiver to ring the doorbell once there is room again. The caller must check [`Producer::is_writable`]
    /// once more before it blocks.
    pub fn announce_sleep(&self) {
        if self.layout.elastic.is_some() {
            let cursor = self.cursor();
            let needed = self.needed_position(&cursor);
            // The receiver checks for sleepers at multiples of this number, and the next multiple is not beyond the
            // tail.
            let target = needed.wrapping_add(WAKE_EVERY_SLOTS - 1) & !(WAKE_EVERY_SLOTS - 1);
            return wake::announce_until(&self.outbound, &self.own, self.layout.producer_asleep(), SLEEPS, target);
        }
        wake::announce(&self.outbound, &self.own, self.layout.producer_asleep(), SLEEPS);
    }

    /// Cancels [`Producer::announce_sleep`].
    pub fn cancel_sleep(&mut self) {
        self.outbound.store_u64(self.layout.producer_asleep(), 0, Ordering::Relaxed);
    }

    /// Returns whether the receiver sleeps and its doorbell must be rung for records sent before this call. Clears the
    /// request: the caller must ring once.
    #[inline(always)] // A fence and a load.
    pub fn take_wake_request(&mut self) -> bool {
        debug_assert!(self.has_published_all(), "staged records must be published before a check for sleepers");
        wake::take(&self.inbound, &self.own, self.layout.consumer_asleep(), WAKES)
    }

    /// Copies a payload to the record at the cursor and publishes it.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes` and outside the lane's memory.
    #[inline]
    unsafe fn publish_copy(&mut self, cursor: &mut Cursor, source: *const u8, len_bytes: usize) {
        if len_bytes <= INLINE_BYTES && self.outbound.coherence() != Coherence::Coherent {
            // SAFETY: `source` is readable for `len_bytes` and outside the window, by this function's contract, and
            // `len_bytes` is at most `INLINE_BYTES`.
            unsafe { self.publish_line(cursor, source, len_bytes) };
            return self.step_over(cursor, len_bytes);
        }
        let payload = self.ring(cursor).slot_offset(cursor.tail) + HEADER_BYTES;
        // SAFETY: `source` is readable for `len_bytes` and outside the window, by this function's contract.
        unsafe { self.copy_in(payload, source, len_bytes) };
        self.publish(cursor, len_bytes);
    }

    /// Copies a payload to `offset` in the outbound memory.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes` and outside the lane's memory.
    #[inline(always)]
    unsafe fn copy_in(&self, offset: usize, source: *const u8, len_bytes: usize) {
        if len_bytes <= WORDWISE_BYTES_MAX {
            // SAFETY: `source` is readable for `len_bytes` and outside the window, by this function's contract, and
            // `len_bytes` is at most `WORDWISE_BYTES_MAX`.
            unsafe { self.copy_words(offset, source, len_bytes) };
        } else {
            // SAFETY: `source` is readable for `len_bytes` and outside the window, by this function's contract; the
            // window checks the bounds of its own side.
            unsafe { self.outbound.write_from(offset, source, len_bytes) };
        }
    }

    /// Copies a payload of at most [`WORDWISE_BYTES_MAX`] as whole words, without calling `memcpy`.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes` and outside the lane's memory; `len_bytes` is at most
    /// [`WORDWISE_BYTES_MAX`].
    #[inline(always)]
    pub(crate) unsafe fn copy_words(&self, offset: usize, source: *const u8, len_bytes: usize) {
        if len_bytes == 0 {
            return;
        }
        // SAFETY: `source` is readable for `len_bytes` and outside the window, by this function's contract.
        let word = unsafe { load_short(source, len_bytes) };
        self.outbound.store_u64(offset, word, Ordering::Relaxed);
        if len_bytes > WORD_BYTES {
            // SAFETY: `source` is readable for `len_bytes` and outside the window, by this function's contract;
            // `len_bytes` is more than `WORD_BYTES`, and the rest is read from there on.
            let word = unsafe { load_short(source.add(WORD_BYTES), len_bytes - WORD_BYTES) };
            self.outbound.store_u64(offset + WORD_BYTES, word, Ordering::Relaxed);
        }
    }

    /// Makes a record visible whose payload is in place.
    #[inline(always)] // Otherwise the compiler emits one copy for the cold callers too, which passes values in memory.
    fn publish(&mut self, cursor: &mut Cursor, len_bytes: usize) {
        self.store_header_and_tag(self.ring(cursor).slot_offset(cursor.tail), cursor.tail, Record::Data(len_bytes));
        self.step_over(cursor, len_bytes);
    }

    /// Adds a record to the batch that is published together. Its payload is in place except for `line`, whose first
    /// two words are filled in here. `is_whole` says that `line` contains the whole record.
    pub(crate) fn stage(&mut self, cursor: Cursor, line: &mut [u64], len_bytes: usize, is_whole: bool) {
        if let Some(Switch { from, position }) = cursor.switch {
            // The receiver reaches the switch before the record, so it is added first.
            let switch = [tag(self.secret, position), Record::Switch(cursor.ring).encode()];
            let slot = Ring::of(&self.layout, from).slot_offset(position);
            self.batch.add(&self.outbound, slot, &switch, true);
            self.note_ring(&cursor, from);
        }
        let ring = self.ring(&cursor);
        line[0] = tag(self.secret, cursor.tail);
        line[1] = Record::Data(len_bytes).encode();
        self.batch.add(&self.outbound, ring.slot_offset(cursor.tail), line, is_whole);
        self.set_own_word(TAIL, ring.used_position(cursor.tail.wrapping_add(slots_of(len_bytes))));
    }

    /// Publishes a short record as one line: stored as such, it crosses the link in one packet.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes` and outside the lane's memory; `len_bytes` is at most [`INLINE_BYTES`].
    unsafe fn publish_line(&self, cursor: &Cursor, source: *const u8, len_bytes: usize) {
        let mut line = [0; SLOT_BYTES / WORD_BYTES];
        line[0] = tag(self.secret, cursor.tail);
        line[1] = Record::Data(len_bytes).encode();
        let payload = &mut line[HEADER_BYTES / WORD_BYTES..];
        for (word, at) in payload.iter_mut().zip((0..len_bytes).step_by(WORD_BYTES)) {
            // SAFETY: `source` is readable for `len_bytes` and outside the window, by this function's contract, and
            // `at` is less than that: the range ends there.
            *word = unsafe { load_short(source.add(at), len_bytes - at) };
        }
        let words = (HEADER_BYTES + len_bytes).div_ceil(WORD_BYTES);
        self.outbound.store_line(self.ring(cursor).slot_offset(cursor.tail), &line[..words]);
    }

    /// Moves the cursor past a record that is visible, and publishes the switch that leads to it.
    #[inline(always)] // Otherwise the compiler emits one copy for the cold callers too, which passes values in memory.
    fn step_over(&mut self, cursor: &mut Cursor, len_bytes: usize) {
        if let Some(switch) = cursor.switch.take() {
            self.publish_switch(cursor, switch);
        }
        cursor.tail = self.ring(cursor).used_position(cursor.tail.wrapping_add(slots_of(len_bytes)));
        self.set_own_word(TAIL, cursor.tail);
    }

    /// Publishes a switch to another ring, in which the next record is already in place: a switch alone would make the
    /// lane readable without a byte.
    #[cold]
    fn publish_switch(&mut self, cursor: &Cursor, switch: Switch) {
        let slot = Ring::of(&self.layout, switch.from).slot_offset(switch.position);
        self.store_header_and_tag(slot, switch.position, Record::Switch(cursor.ring));
        self.note_ring(cursor, switch.from);
        // The known limit applied to the old ring.
        self.set_own_word(TAIL_LIMIT, 0);
    }

    /// Stores that the lane is now in the ring of `cursor`, whose tail is the first position there.
    fn note_ring(&self, cursor: &Cursor, from: u8) {
        self.set_own_word(RING, cursor.ring.into());
        self.set_own_word(ENTRY, cursor.tail);
        self.set_own_word(LEFT_RING, from.into());
        // The switch record uses memory of the previous ring, too.
        self.set_own_word(RINGS_USED, self.own_word(RINGS_USED) | 1 << cursor.ring | 1 << from);
    }

    /// Stores a record's header, a fence and its tag, which makes the record visible.
    #[inline(always)]
    fn store_header_and_tag(&mut self, slot: usize, position: u64, record: Record) {
        self.outbound.store_u64(slot + 8, record.encode(), Ordering::Relaxed);
        self.outbound.fence();
        self.outbound.store_u64(slot, tag(self.secret, position), Ordering::Release);
    }

    #[inline]
    fn ring(&self, cursor: &Cursor) -> Ring {
        Ring::of(&self.layout, cursor.ring)
    }

    #[inline]
    fn cursor(&self) -> Cursor {
        let ring = self.own_word(RING).min(self.layout.rings_larger() as u64) as u8;
        Cursor { tail: self.own_word(TAIL), ring, switch: None }
    }

    /// Loads a word that the receiver writes.
    #[inline]
    fn receiver_word(&self, offset: usize) -> u64 {
        self.inbound.invalidate(offset, WORD_BYTES);
        self.inbound.load_u64(offset, Ordering::Acquire)
    }

    #[inline]
    fn own_word(&self, field: usize) -> u64 {
        self.own.load_u64(field, Ordering::Relaxed)
    }

    #[inline]
    fn set_own_word(&self, field: usize, value: u64) {
        self.own.store_u64(field, value, Ordering::Relaxed);
    }
}
