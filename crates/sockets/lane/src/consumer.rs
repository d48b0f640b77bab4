//! The receiving endpoint of a lane.

mod moves;
mod records;
mod scan;

use crate::layout::Ring;
use crate::producer::{WAKE_EVERY_SLOTS, open_read_mark};
use crate::record::{HEADER_BYTES, INLINE_BYTES, Record, SHORT_SLOTS_MAX, SLOT_BYTES, slots_of, tag};
use crate::words::{WORD_BYTES, WORDWISE_BYTES_MAX, store_short, store_words};
use crate::{Corrupt, Layout, wake};
use fabric::{Coherence, Inbound, Outbound};
use records::step_over;
use std::ptr::NonNull;
use volmem::Region;
use volmem::sync::Ordering;

// Offsets of the words of the receiver's own state. The first two words are loaded together.
const HEAD: usize = 0;
const RECORD_STATE: usize = 8;
/// Not 0: a sender may sleep for room that was freed since the last check.
const WAKE_DUE: usize = 16;
const SLEEPS: usize = 24;
const WAKES: usize = 32;

// Fields of `RECORD_STATE`, from the lowest bit: the ring's number (8 bits), whether the record at the head is open,
// the record's length (24 bits from bit 16 on) and the read offset in it (24 bits).
const STATE_BITS: u32 = 24;
const STATE_RING: u64 = 0xff;
const STATE_OPEN: u64 = 1 << 8;
const STATE_SHIFT: u32 = 16;
const STATE_MASK: u64 = (1 << STATE_BITS) - 1;

/// The receiving endpoint of a lane.
///
/// Its cursor lies in its own state, which processes that share the connection (after `fork`) share, too; see
/// [`Consumer::with_state`]. `&mut self` requires mutual exclusion: processes and threads that share a consumer must
/// exclude each other.
#[derive(Debug)]
pub struct Consumer<I, O> {
    inbound: I,
    outbound: O,
    own: Region,
    layout: Layout,
    secret: u64,
    /// Length of the last peek, in memory of this process alone.
    peeked_bytes: usize,
}

/// Unread bytes of one record, in place.
#[derive(Debug, Clone, Copy)]
pub struct Chunk {
    /// Offset of the first unread byte in the inbound memory.
    pub offset: usize,
    /// Unread bytes of the record.
    pub len_bytes: usize,
}

/// The result of [`Consumer::read_short_to`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShortRead {
    /// This number of bytes was read.
    Read(usize),
    /// There is no record now.
    Empty,
    /// Nothing was read: the caller must use [`Consumer::read_to`].
    UseReadTo,
}

/// The read position, loaded once at the start of an operation. A peek advances a copy of it.
#[derive(Debug, Clone, Copy)]
struct Cursor {
    head: u64,
    record_bytes: usize,
    offset_bytes: usize,
    ring: u8,
    /// The sender may append to the record.
    is_open: bool,
    /// The position has passed a record whose credit is not returned yet.
    is_credit_due: bool,
}

impl<I: Inbound, O: Outbound> Consumer<I, O> {
    /// Attaches to a new lane that `layout` describes: the sender writes `inbound`, and the receiver writes `outbound`.
    /// Both endpoints must use the same `secret`, which is random and not zero. A new lane requires zeroed memory.
    ///
    /// # Panics
    /// If the layout does not fit the memory.
    pub fn new(inbound: I, outbound: O, layout: Layout, secret: u64) -> Self {
        let own = Region::heap(Layout::CONSUMER_STATE_BYTES);
        Self::with_state(inbound, outbound, own, layout, secret)
    }

    /// Attaches as [`Consumer::new`] does, with the endpoint's own state in `own`, so that processes that share that
    /// memory share the endpoint. It has [`Layout::CONSUMER_STATE_BYTES`], and is zero for a new lane.
    ///
    /// # Panics
    /// If the layout does not fit the memory, or `own` is of another size.
    pub fn with_state(inbound: I, outbound: O, own: Region, layout: Layout, secret: u64) -> Self {
        layout.check(inbound.len_bytes(), outbound.len_bytes());
        assert_eq!(own.len_bytes(), Layout::CONSUMER_STATE_BYTES, "the state of a receiver");
        Self { inbound, outbound, own, layout, secret, peeked_bytes: 0 }
    }

    /// Returns whether there may be something to read, with one load of the line that would carry it. Requires no
    /// mutual exclusion.
    #[inline(always)] // Called in polling loops.
    pub fn may_have_data(&self) -> bool {
        self.may_have_record() || self.fin(Ordering::Relaxed) != 0
    }

    /// As [`Consumer::may_have_data`], where the lane does not say whether the stream has ended.
    #[inline(always)]
    pub fn may_have_record(&self) -> bool {
        let cursor = self.cursor();
        if cursor.record_bytes != 0 { self.has_more(&cursor) } else { self.is_published(&cursor) }
    }

    /// Returns whether the record at the cursor has unread bytes, or another record follows it.
    #[inline(never)]
    fn has_more(&self, cursor: &Cursor) -> bool {
        let mut ahead = *cursor;
        self.load_record(&mut ahead).unwrap_or(true)
    }

    /// Copies up to `len_bytes` unread bytes to `destination`; returns their number. It is 0 if nothing is unread now,
    /// or if the stream [has ended](Consumer::is_finished).
    ///
    /// # Errors
    /// [`Corrupt`] if the sender published an impossible record.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes` and outside the lane's memory.
    #[inline]
    pub unsafe fn read_to(&mut self, destination: *mut u8, len_bytes: usize) -> Result<usize, Corrupt> {
        let mut cursor = self.cursor();
        let mut read_bytes = 0;
        let mut end = Ok(());
        while read_bytes < len_bytes {
            match self.load_record(&mut cursor) {
                Ok(true) => {}
                Ok(false) => break,
                Err(corrupt) => {
                    end = Err(corrupt);
                    break;
                }
            }
            let chunk_bytes = (cursor.record_bytes - cursor.offset_bytes).min(len_bytes - read_bytes);
            // SAFETY: `destination` is writable for `len_bytes` and outside the window, by this function's contract,
            // and `read_bytes` plus `chunk_bytes` are at most that (`min`).
            unsafe { self.copy_out(&cursor, destination.add(read_bytes), chunk_bytes) };
            read_bytes += chunk_bytes;
            self.advance(&mut cursor, chunk_bytes);
        }
        self.store_cursor(&cursor);
        // The bytes before an invalid record are valid and are delivered; the next read finds the invalid record again.
        if read_bytes == 0 && len_bytes > 0 {
            end?;
            self.check_fin(&cursor)?;
        }
        Ok(read_bytes)
    }

    /// Copies the next record to `destination` if it is complete and unread, is at most [`crate::SHORT_BYTES_MAX`] and
    /// `len_bytes` long, and either fills the buffer or is not followed by another record. A receiver of short messages
    /// nearly always finds this case or an empty lane.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes` and outside the lane's memory.
    #[inline(always)] // Most of the saving is the cost of the call.
    pub unsafe fn read_short_to(&mut self, destination: *mut u8, len_bytes: usize) -> ShortRead {
        let [head, state] = self.own.load_words(HEAD);
        if state & !STATE_RING != 0 {
            return ShortRead::UseReadTo;
        }
        let ring = Ring::of(&self.layout, state as u8);
        let slot = ring.slot_offset(head);
        self.inbound.invalidate(slot, SLOT_BYTES);
        if self.inbound.load_u64(slot, Ordering::Acquire) != tag(self.secret, head) {
            return ShortRead::Empty;
        }
        let [header, first, second] = self.inbound.load_words(slot + WORD_BYTES);
        let Some(record_bytes) = Record::decode_inline(header) else {
            // SAFETY: `destination` is writable for `len_bytes` and outside the window, by this function's contract.
            return unsafe { self.read_slots_to(header, ring, head, destination, len_bytes) };
        };
        let next = ring.used_position(head.wrapping_add(1));
        if !self.is_complete_read(record_bytes, len_bytes, next, ring) {
            return ShortRead::UseReadTo;
        }
        if record_bytes <= WORDWISE_BYTES_MAX {
            // SAFETY: `destination` is writable for `len_bytes` and outside the window, by this function's contract;
            // `record_bytes` is at most that (`is_complete_read`), and at most `WORDWISE_BYTES_MAX`, which two words
            // hold.
            unsafe { store_words(destination, [first, second], record_bytes) };
        } else {
            let words: [u64; INLINE_BYTES / WORD_BYTES] = self.inbound.load_words(slot + HEADER_BYTES);
            // SAFETY: `destination` is writable for `len_bytes` and outside the window, by this function's contract;
            // `record_bytes` is at most that (`is_complete_read`), and at most `INLINE_BYTES` (`decode_inline`), which
            // the words hold.
            unsafe { store_words(destination, words, record_bytes) };
        }
        self.return_credit(ring, head, next);
        self.set_word(HEAD, next);
        ShortRead::Read(record_bytes)
    }

    /// Does the work of [`Consumer::read_short_to`] for records longer than a slot. The peer wrote `header`, so it is
    /// checked against the ring.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes` and outside the lane's memory.
    #[inline(never)]
    unsafe fn read_slots_to(
        &mut self,
        header: u64,
        ring: Ring,
        head: u64,
        destination: *mut u8,
        len_bytes: usize,
    ) -> ShortRead {
        let Ok(Record::Data(record_bytes)) = Record::decode(header, ring.slots_to_end(head).min(SHORT_SLOTS_MAX))
        else {
            return ShortRead::UseReadTo;
        };
        let slot = ring.slot_offset(head);
        let slots = slots_of(record_bytes);
        let rest_bytes = (slots as usize - 1) * SLOT_BYTES;
        self.inbound.invalidate(slot + SLOT_BYTES, rest_bytes);
        let next = ring.used_position(head.wrapping_add(slots));
        if !self.is_complete_read(record_bytes, len_bytes, next, ring) {
            return ShortRead::UseReadTo;
        }
        // SAFETY: `destination` is writable for `len_bytes` and outside the window, by this function's contract, and
        // `record_bytes` is at most that (`is_complete_read`); the window checks the bounds of its own side.
        unsafe { self.inbound.read_to(slot + HEADER_BYTES, destination, record_bytes) };
        self.return_credit(ring, head, next);
        self.set_word(HEAD, next);
        ShortRead::Read(record_bytes)
    }

    /// Returns whether a record fits a buffer of `len_bytes`, and no record at `next` would also fit: a read must not
    /// return fewer bytes than are there, because a peek may already have reported them.
    #[inline(always)]
    fn is_complete_read(&self, record_bytes: usize, len_bytes: usize, next: u64, ring: Ring) -> bool {
        record_bytes == len_bytes || (record_bytes < len_bytes && !self.is_published_in(ring, next))
    }

    /// Copies unread bytes to `destination`; returns their number, which is 0 if nothing is unread now.
    ///
    /// # Errors
    /// [`Corrupt`] if the sender published an impossible record.
    pub fn read(&mut self, destination: &mut [u8]) -> Result<usize, Corrupt> {
        // SAFETY: a mutable slice is writable for its length, and outside the window: nothing borrows memory that a
        // peer can write.
        unsafe { self.read_to(destination.as_mut_ptr(), destination.len()) }
    }

    /// Returns the unread bytes of the next record in place, or `None` if there are none. The peer can still change the
    /// bytes while they are read.
    ///
    /// # Errors
    /// [`Corrupt`] if the sender published an impossible record.
    pub fn peek(&mut self) -> Result<Option<Chunk>, Corrupt> {
        self.peeked_bytes = 0;
        let mut cursor = self.cursor();
        let is_loaded = self.load_record(&mut cursor)?;
        self.store_cursor(&cursor);
        if !is_loaded {
            self.check_fin(&cursor)?;
            return Ok(None);
        }
        let len_bytes = cursor.record_bytes - cursor.offset_bytes;
        self.peeked_bytes = len_bytes;
        Ok(Some(Chunk { offset: self.offset_of(&cursor), len_bytes }))
    }

    /// Returns the address of a peeked chunk.
    pub fn pointer(&self, chunk: Chunk) -> NonNull<u8> {
        self.inbound.pointer(chunk.offset, chunk.len_bytes)
    }

    pub(crate) fn inbound(&self) -> &I {
        &self.inbound
    }

    /// Consumes bytes of the peeked record, and returns its credit once all are consumed.
    ///
    /// # Errors
    /// [`Corrupt`] if the peer has changed the cursor since the peek.
    ///
    /// # Panics
    /// If `len_bytes` is more than [`Consumer::peek`] returned.
    pub fn consume(&mut self, len_bytes: usize) -> Result<(), Corrupt> {
        assert!(len_bytes <= self.peeked_bytes, "consumed {len_bytes} bytes of {} that were peeked", self.peeked_bytes);
        if len_bytes == 0 {
            return Ok(());
        }
        self.peeked_bytes -= len_bytes;
        let mut cursor = self.cursor();
        self.check_in_record(&cursor)?;
        if len_bytes > cursor.record_bytes - cursor.offset_bytes {
            return Err(self.corrupt_cursor(&cursor));
        }
        self.advance(&mut cursor, len_bytes);
        self.store_cursor(&cursor);
        Ok(())
    }

    /// Asks the sender to ring the doorbell when something arrives. The caller must poll once more before it blocks.
    pub fn announce_sleep(&self) {
        wake::announce(&self.outbound, &self.own, self.layout.consumer_asleep(), SLEEPS);
    }

    /// Cancels [`Consumer::announce_sleep`].
    pub fn cancel_sleep(&mut self) {
        self.outbound.store_u64(self.layout.consumer_asleep(), 0, Ordering::Relaxed);
    }

    /// Returns whether the sender sleeps for room that reads have freed. Clears the request: the caller must ring once.
    #[inline(always)] // Nearly always one load.
    pub fn take_wake_request(&mut self) -> bool {
        self.word(WAKE_DUE) != 0 && self.take_due_wake_request()
    }

    fn take_due_wake_request(&mut self) -> bool {
        self.set_word(WAKE_DUE, 0);
        if self.layout.elastic.is_some() {
            let (asleep, head) = (self.layout.producer_asleep(), self.word(HEAD));
            return wake::take_reached(&self.inbound, &self.own, asleep, WAKES, head);
        }
        wake::take(&self.inbound, &self.own, self.layout.producer_asleep(), WAKES)
    }

    #[inline]
    fn is_published(&self, cursor: &Cursor) -> bool {
        self.is_published_in(self.ring(cursor), cursor.head)
    }

    #[inline(always)]
    fn is_published_in(&self, ring: Ring, position: u64) -> bool {
        let slot = ring.slot_offset(position);
        self.inbound.invalidate(slot, SLOT_BYTES);
        self.inbound.load_u64(slot, Ordering::Acquire) == tag(self.secret, position)
    }

    /// Copies bytes of the record from the cursor's offset on.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes` and outside the lane's memory.
    #[inline]
    unsafe fn copy_out(&self, cursor: &Cursor, destination: *mut u8, len_bytes: usize) {
        let offset = self.offset_of(cursor);
        if cursor.offset_bytes == 0 {
            // SAFETY: `destination` is writable for `len_bytes` and outside the window, by this function's contract.
            unsafe { self.copy_payload_start(offset, destination, len_bytes) };
        } else {
            // SAFETY: `destination` is writable for `len_bytes` and outside the window, by this function's contract;
            // the window checks the bounds of its own side.
            unsafe { self.inbound.read_to(offset, destination, len_bytes) };
        }
    }

    /// Copies from the start of a payload. A short one is loaded as whole words, without calling `memcpy`: the last
    /// word may extend beyond the payload, but not beyond its slot.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes` and outside the lane's memory.
    #[inline(always)]
    unsafe fn copy_payload_start(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        if len_bytes > WORDWISE_BYTES_MAX {
            // SAFETY: `destination` is writable for `len_bytes` and outside the window, by this function's contract;
            // the window checks the bounds of its own side.
            return unsafe { self.inbound.read_to(offset, destination, len_bytes) };
        }
        let word = self.inbound.load_u64(offset, Ordering::Relaxed);
        // SAFETY: `destination` is writable for `len_bytes` and outside the window, by this function's contract.
        unsafe { store_short(destination, word, len_bytes) };
        if len_bytes > WORD_BYTES {
            let word = self.inbound.load_u64(offset + WORD_BYTES, Ordering::Relaxed);
            // SAFETY: `destination` is writable for `len_bytes` and outside the window, by this function's contract;
            // `len_bytes` is more than `WORD_BYTES`, and the rest is written from there on.
            unsafe { store_short(destination.add(WORD_BYTES), word, len_bytes - WORD_BYTES) };
        }
    }

    /// Advances the cursor within the record, and returns the record's credit at its end.
    #[inline]
    fn advance(&mut self, cursor: &mut Cursor, len_bytes: usize) {
        cursor.offset_bytes += len_bytes;
        let (head_before, ring) = (cursor.head, self.ring(cursor));
        if step_over(cursor, ring) {
            self.return_credit(ring, head_before, cursor.head);
        } else if cursor.is_open && cursor.offset_bytes == cursor.record_bytes {
            let mark = open_read_mark(cursor.head, cursor.record_bytes);
            self.outbound.store_u64(self.layout.open_read(), mark, Ordering::Release);
        }
    }

    #[inline(always)]
    fn return_credit(&mut self, ring: Ring, head_before: u64, head: u64) {
        let quarter = if self.layout.elastic.is_some() { WAKE_EVERY_SLOTS } else { ring.slots / 4 };
        let crossed = (head_before ^ head) & !(quarter - 1) != 0;
        if crossed {
            self.set_word(WAKE_DUE, 1);
        }
        // On coherent memory the credit line stays in this core's cache until the sender loads it, so returning credit
        // for every record is free.
        if crossed || self.outbound.coherence() == Coherence::Coherent {
            self.outbound.store_u64(self.layout.credit(), head, Ordering::Release);
        }
    }

    #[inline]
    fn offset_of(&self, cursor: &Cursor) -> usize {
        self.ring(cursor).slot_offset(cursor.head) + HEADER_BYTES + cursor.offset_bytes
    }

    #[inline]
    fn ring(&self, cursor: &Cursor) -> Ring {
        Ring::of(&self.layout, cursor.ring)
    }

    #[inline]
    fn cursor(&self) -> Cursor {
        let [head, state] = self.own.load_words(HEAD);
        Cursor {
            head,
            record_bytes: ((state >> STATE_SHIFT) & STATE_MASK) as usize,
            offset_bytes: ((state >> (STATE_SHIFT + STATE_BITS)) & STATE_MASK) as usize,
            ring: (state & STATE_RING) as u8,
            is_open: state & STATE_OPEN != 0 && self.layout.elastic.is_some(),
            is_credit_due: false,
        }
    }

    #[inline(always)] // Otherwise the compiler emits one shared copy, which passes the cursor in memory.
    fn store_cursor(&mut self, cursor: &Cursor) {
        if cursor.is_credit_due {
            self.return_due_credit(cursor);
        }
        let record = (cursor.record_bytes as u64) << STATE_SHIFT
            | (cursor.offset_bytes as u64) << (STATE_SHIFT + STATE_BITS)
            | if cursor.is_open { STATE_OPEN } else { 0 };
        self.set_word(HEAD, cursor.head);
        self.set_word(RECORD_STATE, record | u64::from(cursor.ring));
    }

    /// Returns the credit of a switch or of an open record that was passed. Such a record may have crossed a multiple
    /// of [`WAKE_EVERY_SLOTS`].
    #[cold]
    fn return_due_credit(&mut self, cursor: &Cursor) {
        self.set_word(WAKE_DUE, 1);
        self.outbound.store_u64(self.layout.credit(), cursor.head, Ordering::Release);
    }

    #[inline]
    fn word(&self, field: usize) -> u64 {
        self.own.load_u64(field, Ordering::Relaxed)
    }

    #[inline]
    fn set_word(&mut self, field: usize, value: u64) {
        self.own.store_u64(field, value, Ordering::Relaxed);
    }
}
