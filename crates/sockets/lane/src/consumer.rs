//! The receiving end.

use crate::layout::Ring;
use crate::producer::{WAKE_EVERY_SLOTS, open_read_mark};
use crate::record::{
    HEADER_BYTES, INLINE_BYTES, RECORD_BYTES_MAX, Record, SHORT_SLOTS_MAX, SLOT_BYTES, Urgent, slots_of, stamp_of, tag,
};
use crate::words::{WORD_BYTES, WORDWISE_BYTES_MAX, store_short, store_words};
use crate::{Corrupt, Layout, wake};
use fabric::{Coherence, Inbound, Outbound};
use std::cell::Cell;
use std::ptr::NonNull;
use volmem::sync::Ordering;

/// The first two are loaded together.
const HEAD: usize = 0;
const RECORD_STATE: usize = 8;
const WAKE_DUE: usize = 16;
const SLEEPS: usize = 24;
const WAKES: usize = 32;

/// Where in the record at the head: its length and the offset in it take 24 bits each, above a bit that says whether it
/// is open; the lowest byte is the ring's number.
const STATE_BITS: u32 = 24;
const STATE_RING: u64 = 0xff;
const STATE_OPEN: u64 = 1 << 8;
const STATE_SHIFT: u32 = 16;
const STATE_MASK: u64 = (1 << STATE_BITS) - 1;

/// In [`WAKE_DUE`]: a sleeping sender is woken if there is as much room as it needs, or in any case.
const WAKE_IF_ROOM: u64 = 1;
const WAKE_ALWAYS: u64 = 2;

/// The receiving end of a lane.
///
/// Its cursor lives in the receiver's own window, so that processes which share the connection (after `fork`) share the
/// position. `&mut self` stands for "one at a time", as for [`crate::Producer`].
#[derive(Debug)]
pub struct Consumer<I, O> {
    inbound: I,
    outbound: O,
    layout: Layout,
    secret: u64,
    /// What the last peek showed, in memory of this process alone.
    peeked_bytes: usize,
    /// Of the last record that a read began.
    stamp: Cell<u64>,
}

/// Unread bytes of one record, in place.
#[derive(Debug, Clone, Copy)]
pub struct Chunk {
    /// Offset of the first unread byte in the receiver's window.
    pub offset: usize,
    /// Unread bytes of the record.
    pub len_bytes: usize,
}

/// What [`Consumer::read_short_to`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShortRead {
    /// So many bytes, and read them.
    Read(usize),
    /// No record now.
    Empty,
    /// What [`Consumer::read_to`] can tell.
    UseReadTo,
}

/// What an urgent byte is to who looks at what is unread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UrgentHandling {
    /// A byte like any other.
    Include,
    /// Not there.
    Skip,
    /// The end of what is looked at.
    Stop,
}

/// Where reading stands: loaded once at the start of an operation. A copy of it can run ahead, to peek.
#[derive(Debug, Clone, Copy)]
struct Cursor {
    head: u64,
    record_bytes: usize,
    offset_bytes: usize,
    ring: u8,
    /// The sender may append to the record.
    is_open: bool,
    /// The record is one urgent byte. Never in memory: reading stands before such a record or behind it.
    is_urgent: bool,
    /// It has come past something whose credit is not returned yet.
    is_credit_due: bool,
}

impl Cursor {
    /// Leaves the record that it has just come to, as if it had not looked at its header.
    fn reset_record(&mut self) {
        (self.record_bytes, self.offset_bytes, self.is_urgent) = (0, 0, false);
    }
}

impl<I: Inbound, O: Outbound> Consumer<I, O> {
    /// Attaches to the lane that `layout` describes: `inbound` is the receiver's own window, `outbound` the sender's.
    /// Both ends must use the same `secret`, which is random and not zero. A fresh lane starts from zeroed windows.
    ///
    /// # Panics
    /// If the layout does not fit the windows.
    pub fn new(inbound: I, outbound: O, layout: Layout, secret: u64) -> Self {
        layout.check(inbound.len_bytes(), outbound.len_bytes());
        Self { inbound, outbound, layout, secret, peeked_bytes: 0, stamp: Cell::new(0) }
    }

    /// Whether there may be something to read: one load of the line that would carry it. Needs no exclusion.
    #[inline(always)] // Looked at in a loop.
    pub fn may_have_data(&self) -> bool {
        let cursor = self.cursor();
        let has_record = if cursor.record_bytes != 0 { self.has_more(&cursor) } else { self.is_published(&cursor) };
        has_record || self.fin(Ordering::Relaxed) != 0
    }

    /// In a record: whether something of it is unread, or follows.
    #[inline(never)]
    fn has_more(&self, cursor: &Cursor) -> bool {
        let mut ahead = *cursor;
        self.load_record(&mut ahead).unwrap_or(true)
    }

    /// The [stamp](crate::Producer::set_stamp) of the last record that a read has found.
    #[inline(always)]
    pub fn last_stamp(&self) -> u64 {
        self.stamp.get()
    }

    /// The [stamp](crate::Producer::set_stamp) of the record that is read next.
    pub fn next_stamp(&self) -> Option<u64> {
        let mut cursor = self.cursor();
        if !self.load_record(&mut cursor).unwrap_or(false) {
            return None;
        }
        let slot = self.ring(&cursor).slot_offset(cursor.head);
        Some(stamp_of(self.inbound.load_u64(slot + WORD_BYTES, Ordering::Relaxed)))
    }

    /// Copies up to `len_bytes` unread bytes to `destination`; returns how many. Zero: nothing there now, or
    /// [`Consumer::is_finished`], or an [urgent byte](Consumer::urgent), before which each read ends.
    ///
    /// # Errors
    /// [`Corrupt`] if the sender published an impossible record.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes`.
    #[inline]
    pub unsafe fn read_to(&mut self, destination: *mut u8, len_bytes: usize) -> Result<usize, Corrupt> {
        let mut cursor = self.cursor();
        let mut read_bytes = 0;
        let mut end = Ok(());
        while read_bytes < len_bytes {
            match self.load_record(&mut cursor) {
                Ok(true) if cursor.is_urgent => {
                    cursor.reset_record();
                    break;
                }
                Ok(true) => {}
                Ok(false) => break,
                Err(corrupt) => {
                    end = Err(corrupt);
                    break;
                }
            }
            let chunk_bytes = (cursor.record_bytes - cursor.offset_bytes).min(len_bytes - read_bytes);
            // SAFETY: the caller's span, from what is not yet read on.
            unsafe { self.copy_out(&cursor, destination.add(read_bytes), chunk_bytes) };
            read_bytes += chunk_bytes;
            self.advance(&mut cursor, chunk_bytes);
        }
        self.store_cursor(&cursor);
        // What came before nonsense was good: it is delivered, and the next read finds the nonsense again.
        if read_bytes == 0 && len_bytes > 0 {
            end?;
            self.check_fin(&cursor)?;
        }
        Ok(read_bytes)
    }

    /// Copies the next record to `destination` if it is there, unread, not longer than [`crate::SHORT_BYTES_MAX`] and
    /// `len_bytes`, and nothing that there would be room for follows: what a receiver of short messages finds, or
    /// nothing.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes`.
    #[inline(always)] // Most of what it spares is the work of being called.
    pub unsafe fn read_short_to(&mut self, destination: *mut u8, len_bytes: usize) -> ShortRead {
        let [head, state] = self.inbound.load_words(self.layout.consumer_cursor());
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
        self.stamp.set(stamp_of(header));
        let Some(record_bytes) = Record::decode_inline(header) else {
            // SAFETY: the caller's span.
            return unsafe { self.read_slots_to(header, ring, head, destination, len_bytes) };
        };
        let next = ring.used_position(head.wrapping_add(1));
        if !self.is_complete_read(record_bytes, len_bytes, next, ring) {
            return ShortRead::UseReadTo;
        }
        if record_bytes <= WORDWISE_BYTES_MAX {
            // SAFETY: the caller's span.
            unsafe { store_words(destination, [first, second], record_bytes) };
        } else {
            let words: [u64; INLINE_BYTES / WORD_BYTES] = self.inbound.load_words(slot + HEADER_BYTES);
            // SAFETY: the caller's span.
            unsafe { store_words(destination, words, record_bytes) };
        }
        self.return_credit(ring, head, next);
        self.set_word(HEAD, next);
        ShortRead::Read(record_bytes)
    }

    /// As [`Consumer::read_short_to`], for what takes more than a slot. `header` is what the peer wrote: it is checked
    /// against the ring.
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
        // SAFETY: the caller's span.
        unsafe { self.inbound.read_to(slot + HEADER_BYTES, destination, record_bytes) };
        self.return_credit(ring, head, next);
        self.set_word(HEAD, next);
        ShortRead::Read(record_bytes)
    }

    /// Whether a record fits a buffer of `len_bytes`, and nothing has come at `next` that would go there too: less than
    /// is there, and has perhaps been peeked at, is no answer.
    #[inline(always)]
    fn is_complete_read(&self, record_bytes: usize, len_bytes: usize, next: u64, ring: Ring) -> bool {
        record_bytes == len_bytes || (record_bytes < len_bytes && !self.is_published_in(ring, next))
    }

    /// Copies unread bytes to `destination`; returns how many. Zero: nothing there now.
    ///
    /// # Errors
    /// [`Corrupt`] if the sender published an impossible record.
    pub fn read(&mut self, destination: &mut [u8]) -> Result<usize, Corrupt> {
        // SAFETY: a slice is writable.
        unsafe { self.read_to(destination.as_mut_ptr(), destination.len()) }
    }

    /// The urgent byte that is unread next, if it is one.
    ///
    /// # Errors
    /// [`Corrupt`] if the sender published an impossible record.
    pub fn urgent(&self) -> Result<Option<Urgent>, Corrupt> {
        let mut cursor = self.cursor();
        let is_urgent = self.load_record(&mut cursor)? && cursor.is_urgent;
        Ok(is_urgent.then(|| self.load_urgent(&cursor)))
    }

    /// Consumes the urgent byte that is unread next, if it is one.
    ///
    /// # Errors
    /// [`Corrupt`] if the sender published an impossible record.
    pub fn take_urgent(&mut self) -> Result<Option<Urgent>, Corrupt> {
        let mut cursor = self.cursor();
        if !self.load_record(&mut cursor)? || !cursor.is_urgent {
            return Ok(None);
        }
        let urgent = self.load_urgent(&cursor);
        self.advance(&mut cursor, 1);
        self.store_cursor(&cursor);
        Ok(Some(urgent))
    }

    fn load_urgent(&self, cursor: &Cursor) -> Urgent {
        Urgent::of_word(self.inbound.load_u64(self.offset_of(cursor), Ordering::Relaxed))
    }

    /// Copies unread bytes from `skip_bytes` on without consuming them; returns how many. `at_urgent` says what an
    /// urgent byte is, and is told whether it is the first unread one.
    ///
    /// # Errors
    /// [`Corrupt`] if the sender published an impossible record.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes`.
    pub unsafe fn peek_to(
        &self,
        skip_bytes: usize,
        destination: *mut u8,
        len_bytes: usize,
        at_urgent: impl FnMut(Urgent, bool) -> UrgentHandling,
    ) -> Result<usize, Corrupt> {
        let mut skip_bytes = skip_bytes;
        let mut read_bytes = 0;
        let end = self.scan_unread_with(at_urgent, |record| {
            let left_bytes = record.record_bytes - record.offset_bytes;
            let skipped_bytes = left_bytes.min(skip_bytes);
            skip_bytes -= skipped_bytes;
            let from = Cursor { offset_bytes: record.offset_bytes + skipped_bytes, ..*record };
            let chunk_bytes = (left_bytes - skipped_bytes).min(len_bytes - read_bytes);
            // SAFETY: the caller's span, from what is not yet read on.
            unsafe { self.copy_out(&from, destination.add(read_bytes), chunk_bytes) };
            read_bytes += chunk_bytes;
            read_bytes < len_bytes
        })?;
        if read_bytes == 0 && len_bytes > 0 {
            self.check_fin(&end)?;
        }
        Ok(read_bytes)
    }

    /// Unread bytes in the lane now, urgent ones with the others.
    ///
    /// # Errors
    /// [`Corrupt`] if the sender published an impossible record.
    pub fn unread_bytes(&self) -> Result<usize, Corrupt> {
        self.unread_bytes_with(|_, _| UrgentHandling::Include)
    }

    /// As [`Consumer::unread_bytes`]; `at_urgent` says what an urgent byte is, and is told whether it is the first
    /// unread one.
    ///
    /// # Errors
    /// [`Corrupt`] if the sender published an impossible record.
    pub fn unread_bytes_with(&self, at_urgent: impl FnMut(Urgent, bool) -> UrgentHandling) -> Result<usize, Corrupt> {
        let mut unread_bytes = 0;
        self.scan_unread_with(at_urgent, |record| {
            unread_bytes += record.record_bytes - record.offset_bytes;
            true
        })?;
        Ok(unread_bytes)
    }

    /// The unread bytes of the next record, in place; none of an urgent one. Their contents are the peer's: they may
    /// change while they are read.
    ///
    /// # Errors
    /// [`Corrupt`] if the sender published an impossible record.
    pub fn peek(&mut self) -> Result<Option<Chunk>, Corrupt> {
        self.peeked_bytes = 0;
        let mut cursor = self.cursor();
        let mut loaded = self.load_record(&mut cursor)?;
        if cursor.is_urgent {
            cursor.reset_record();
            loaded = false;
        }
        self.store_cursor(&cursor);
        if !loaded {
            self.check_fin(&cursor)?;
            return Ok(None);
        }
        let len_bytes = cursor.record_bytes - cursor.offset_bytes;
        self.peeked_bytes = len_bytes;
        Ok(Some(Chunk { offset: self.offset_of(&cursor), len_bytes }))
    }

    /// Address of a peeked chunk.
    pub fn pointer(&self, chunk: Chunk) -> NonNull<u8> {
        self.inbound.pointer(chunk.offset, chunk.len_bytes)
    }

    pub(crate) fn inbound(&self) -> &I {
        &self.inbound
    }

    /// Consumes bytes of the peeked record and returns its credit when it is used up.
    ///
    /// # Errors
    /// [`Corrupt`] if the peer changed the cursor since.
    ///
    /// # Panics
    /// If it is more than [`Consumer::peek`] showed.
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

    /// Tells the sender how many bytes this end should hold unread; see [`crate::Producer::set_capacity`]. As long as
    /// nothing is said, none. That may be room: ask [`Consumer::take_wake_request`] then.
    pub fn set_capacity(&mut self, bytes: usize) {
        self.outbound.store_u64(self.layout.receiver_capacity(), bytes as u64, Ordering::Release);
        self.set_word(WAKE_DUE, WAKE_ALWAYS);
    }

    /// Whether the sender has finished and everything is read.
    pub fn is_finished(&self) -> bool {
        let fin = self.fin(Ordering::Acquire);
        if fin == 0 {
            return false;
        }
        // A record that was read while it was open has been closed since, and no read has stepped over it.
        let mut cursor = self.cursor();
        let is_any_left = self.load_record(&mut cursor).unwrap_or(true);
        !is_any_left && cursor.record_bytes == 0 && cursor.head == fin.wrapping_sub(1)
    }

    /// Whether the sender has finished, read or not.
    pub fn has_fin(&self) -> bool {
        self.fin(Ordering::Acquire) != 0
    }

    /// Whether the sender may hold back what comes next: one load of the line that says whether it has finished. Needs
    /// no exclusion.
    #[inline]
    pub fn may_be_held(&self) -> bool {
        let held = self.inbound.load_u64(self.layout.held(), Ordering::Acquire);
        held != 0 && held.wrapping_sub(1).wrapping_sub(self.word(HEAD)) as i64 >= 0
    }

    /// Since which millisecond of its clock the sender holds back what comes next; `None`: it does not. Needs no
    /// exclusion.
    pub fn held_since_ms(&self) -> Option<u32> {
        self.held()?;
        Some(self.inbound.load_u64(self.layout.held_since(), Ordering::Relaxed) as u32)
    }

    /// Reads on past what the sender holds back, as if it had shown that. `false`: there is nothing.
    pub fn show_held(&mut self) -> bool {
        let Some(Cursor { ring, head, .. }) = self.held() else { return false };
        // The sender may store the same word at any time, and no other one as long as this record is unread.
        let slot = Ring::of(&self.layout, ring).slot_offset(head);
        self.inbound.store_u64(slot, tag(self.secret, head), Ordering::Release);
        true
    }

    /// Where reading stands, if the sender holds back what comes there.
    fn held(&self) -> Option<Cursor> {
        if !self.may_be_held() {
            return None;
        }
        let held = self.inbound.load_u64(self.layout.held(), Ordering::Acquire);
        let mut cursor = self.cursor();
        let is_next = !self.load_record(&mut cursor).unwrap_or(true)
            && cursor.record_bytes == 0
            && held == cursor.head.wrapping_add(1);
        is_next.then_some(cursor)
    }

    /// A number that grows whenever records arrive: for edge-triggered readiness. `seen` is the last answer.
    ///
    /// # Errors
    /// [`Corrupt`] if the sender published an impossible record.
    pub fn arrivals(&self, seen: u64) -> Result<u64, Corrupt> {
        let end = self.scan_unread(|_| true)?;
        // An open record grows where it is.
        let so_far = end.head.wrapping_mul(SLOT_BYTES as u64).wrapping_add(end.record_bytes as u64);
        Ok(so_far.max(seen))
    }

    /// Returns credit for all that was read, where that is done by quarters of a ring: for a sender that wants to know
    /// whether it was.
    pub fn return_all_credit(&self) {
        if self.outbound.coherence() != Coherence::Coherent {
            self.outbound.store_u64(self.layout.credit(), self.cursor().head, Ordering::Release);
        }
    }

    /// Asks the sender to ring when something arrives. Look once more before sleeping.
    pub fn announce_sleep(&self) {
        let count = self.layout.consumer_cursor() + SLEEPS;
        wake::announce(&self.outbound, &self.inbound, self.layout.consumer_asleep(), count);
    }

    /// Takes [`Consumer::announce_sleep`] back.
    pub fn cancel_sleep(&mut self) {
        self.outbound.store_u64(self.layout.consumer_asleep(), 0, Ordering::Relaxed);
    }

    /// Whether the sender sleeps for room that reading has given back. Takes the request: ring once.
    #[inline(always)] // Nearly always one load.
    pub fn take_wake_request(&mut self) -> bool {
        self.word(WAKE_DUE) != 0 && self.take_due_wake_request()
    }

    fn take_due_wake_request(&mut self) -> bool {
        let due = self.word(WAKE_DUE);
        self.set_word(WAKE_DUE, 0);
        if self.layout.elastic.is_some() {
            let (asleep, head) = (self.layout.producer_asleep(), self.word(HEAD));
            return wake::take_reached(&self.inbound, asleep, head, due == WAKE_ALWAYS);
        }
        let taken = self.layout.consumer_cursor() + WAKES;
        wake::take(&self.outbound, &self.inbound, self.layout.producer_asleep(), taken)
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

    /// Makes the cursor stand in a record with unread bytes, if there is one.
    #[inline]
    fn load_record(&self, cursor: &mut Cursor) -> Result<bool, Corrupt> {
        if cursor.record_bytes != 0 {
            self.check_in_record(cursor)?;
            if cursor.offset_bytes < cursor.record_bytes {
                return Ok(true);
            }
            return self.load_rest(cursor);
        }
        if !self.is_published(cursor) {
            return Ok(false);
        }
        self.load_header(cursor)
    }

    /// Past all that was seen of an open record: what has been appended, or what follows once it is closed.
    #[cold]
    fn load_rest(&self, cursor: &mut Cursor) -> Result<bool, Corrupt> {
        let ring = self.ring(cursor);
        let word = self.inbound.load_u64(ring.slot_offset(cursor.head) + WORD_BYTES, Ordering::Acquire);
        let (so_far, is_open) = match Record::decode(word, ring.slots_to_end(cursor.head))? {
            Record::Open(len_bytes) => (len_bytes, true),
            Record::Data(len_bytes) => (len_bytes, false),
            Record::Switch(_) | Record::Urgent => return Err(Corrupt { what: "open record", value: word }),
        };
        if so_far < cursor.record_bytes {
            return Err(Corrupt { what: "open record", value: word });
        }
        (cursor.record_bytes, cursor.is_open) = (so_far, is_open);
        if cursor.offset_bytes < so_far || is_open {
            return Ok(cursor.offset_bytes < so_far);
        }
        step_over(cursor, ring);
        cursor.is_credit_due = true;
        if self.is_published(cursor) { self.load_header(cursor) } else { Ok(false) }
    }

    #[inline]
    fn load_header(&self, cursor: &mut Cursor) -> Result<bool, Corrupt> {
        let ring = self.ring(cursor);
        let slot = ring.slot_offset(cursor.head);
        // What an open record's length covers is there: its header is stored after its bytes.
        let word = self.inbound.load_u64(slot + WORD_BYTES, Ordering::Acquire);
        self.stamp.set(stamp_of(word));
        match Record::decode(word, ring.slots_to_end(cursor.head))? {
            Record::Data(len_bytes) => {
                self.inbound.invalidate(slot + SLOT_BYTES, (slots_of(len_bytes) as usize - 1) * SLOT_BYTES);
                (cursor.record_bytes, cursor.offset_bytes, cursor.is_open) = (len_bytes, 0, false);
                Ok(true)
            }
            Record::Open(len_bytes) if self.layout.elastic.is_some() => {
                (cursor.record_bytes, cursor.offset_bytes, cursor.is_open) = (len_bytes, 0, true);
                Ok(true)
            }
            Record::Urgent if self.layout.elastic.is_some() => {
                (cursor.record_bytes, cursor.offset_bytes, cursor.is_open) = (1, 0, false);
                cursor.is_urgent = true;
                Ok(true)
            }
            Record::Switch(ring) => self.follow_switch(cursor, ring, word),
            Record::Open(_) | Record::Urgent => Err(Corrupt { what: "record header", value: word }),
        }
    }

    /// Goes on in another ring, where a record awaits: a switch that leads to another one is none of ours.
    #[cold]
    fn follow_switch(&self, cursor: &mut Cursor, ring: u8, word: u64) -> Result<bool, Corrupt> {
        let is_known = usize::from(ring) <= self.layout.rings_larger();
        let leads_on = ring != cursor.ring && (ring > 0 || self.layout.elastic.is_some());
        if !is_known || !leads_on {
            return Err(Corrupt { what: "a ring switch", value: word });
        }
        cursor.ring = ring;
        cursor.head = self.ring(cursor).used_position(cursor.head.wrapping_add(1));
        cursor.is_credit_due = true;
        if !self.is_published(cursor) {
            return Ok(false);
        }
        let slot = self.ring(cursor).slot_offset(cursor.head);
        let next = self.inbound.load_u64(slot + WORD_BYTES, Ordering::Acquire);
        match Record::decode(next, self.ring(cursor).slots_to_end(cursor.head))? {
            Record::Switch(_) => Err(Corrupt { what: "a second ring switch", value: next }),
            _ => self.load_header(cursor),
        }
    }

    /// The cursor is in memory that the peer can write on some backends: it is checked like everything else.
    #[inline]
    fn check_in_record(&self, cursor: &Cursor) -> Result<(), Corrupt> {
        let fits = cursor.record_bytes <= RECORD_BYTES_MAX
            && (cursor.offset_bytes < cursor.record_bytes
                || (cursor.is_open && cursor.offset_bytes == cursor.record_bytes))
            && slots_of(cursor.record_bytes) <= self.ring(cursor).slots_to_end(cursor.head);
        if fits { Ok(()) } else { Err(self.corrupt_cursor(cursor)) }
    }

    #[cold]
    fn corrupt_cursor(&self, cursor: &Cursor) -> Corrupt {
        Corrupt { what: "read cursor", value: cursor.record_bytes as u64 }
    }

    /// Where the sender ended, and one, once it has.
    #[inline]
    fn fin(&self, order: Ordering) -> u64 {
        self.inbound.invalidate(self.layout.fin(), WORD_BYTES);
        self.inbound.load_u64(self.layout.fin(), order)
    }

    /// Where nothing is published, an end that was announced is here: else the reader would wait for what cannot come.
    fn check_fin(&self, cursor: &Cursor) -> Result<(), Corrupt> {
        let fin = self.fin(Ordering::Acquire);
        let is_fine = fin == 0 || cursor.head == fin.wrapping_sub(1) || self.is_published(cursor);
        if is_fine { Ok(()) } else { Err(Corrupt { what: "end of stream", value: fin }) }
    }

    /// Shows the unread records to `visit` as long as it asks for more; returns where that ended. At most one lap: a
    /// hostile sender may publish without end.
    fn scan_unread(&self, mut visit: impl FnMut(&Cursor) -> bool) -> Result<Cursor, Corrupt> {
        let mut cursor = self.cursor();
        let first = cursor.head;
        let lap = self.layout.slots_total();
        while cursor.head.wrapping_sub(first) < lap && self.load_record(&mut cursor)? && visit(&cursor) {
            cursor.offset_bytes = cursor.record_bytes;
            let ring = self.ring(&cursor);
            step_over(&mut cursor, ring); // Of an open record, there may be more.
        }
        Ok(cursor)
    }

    /// As [`Consumer::scan_unread`], asking at each urgent byte what it is.
    fn scan_unread_with(
        &self,
        mut at_urgent: impl FnMut(Urgent, bool) -> UrgentHandling,
        mut visit: impl FnMut(&Cursor) -> bool,
    ) -> Result<Cursor, Corrupt> {
        let mut is_first = true;
        self.scan_unread(|record| {
            let kind =
                if record.is_urgent { at_urgent(self.load_urgent(record), is_first) } else { UrgentHandling::Include };
            match kind {
                UrgentHandling::Stop => false,
                UrgentHandling::Skip => true,
                UrgentHandling::Include => {
                    is_first = false;
                    visit(record)
                }
            }
        })
    }

    #[inline]
    unsafe fn copy_out(&self, cursor: &Cursor, destination: *mut u8, len_bytes: usize) {
        let offset = self.offset_of(cursor);
        if cursor.offset_bytes == 0 {
            // SAFETY: the caller's span.
            unsafe { self.copy_payload_start(offset, destination, len_bytes) };
        } else {
            // SAFETY: the caller's span.
            unsafe { self.inbound.read_to(offset, destination, len_bytes) };
        }
    }

    /// From the start of a payload. A short one comes as whole words, without a call: its last word may reach beyond
    /// it, but not beyond its slot.
    #[inline(always)]
    unsafe fn copy_payload_start(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        if len_bytes > WORDWISE_BYTES_MAX {
            // SAFETY: the caller's span.
            return unsafe { self.inbound.read_to(offset, destination, len_bytes) };
        }
        let word = self.inbound.load_u64(offset, Ordering::Relaxed);
        // SAFETY: the caller's span.
        unsafe { store_short(destination, word, len_bytes) };
        if len_bytes > WORD_BYTES {
            let word = self.inbound.load_u64(offset + WORD_BYTES, Ordering::Relaxed);
            // SAFETY: the caller's span, from what is not yet read on.
            unsafe { store_short(destination.add(WORD_BYTES), word, len_bytes - WORD_BYTES) };
        }
    }

    /// Moves over bytes of the record; at its end returns the credit.
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
            self.set_word(WAKE_DUE, self.word(WAKE_DUE).max(WAKE_IF_ROOM));
        }
        // On coherent memory the credit line stays in this core until the sender looks: returning it every time is
        // free.
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
        let [head, state] = self.inbound.load_words(self.layout.consumer_cursor());
        Cursor {
            head,
            record_bytes: ((state >> STATE_SHIFT) & STATE_MASK) as usize,
            offset_bytes: ((state >> (STATE_SHIFT + STATE_BITS)) & STATE_MASK) as usize,
            ring: (state & STATE_RING) as u8,
            is_open: state & STATE_OPEN != 0 && self.layout.elastic.is_some(),
            is_urgent: false,
            is_credit_due: false,
        }
    }

    #[inline(always)] // The compiler would share it, through memory.
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

    /// A record that led to another ring, or that was open, has its credit returned too, and may have crossed a
    /// multiple.
    #[cold]
    fn return_due_credit(&mut self, cursor: &Cursor) {
        self.set_word(WAKE_DUE, self.word(WAKE_DUE).max(WAKE_IF_ROOM));
        self.outbound.store_u64(self.layout.credit(), cursor.head, Ordering::Release);
    }

    #[inline]
    fn word(&self, field: usize) -> u64 {
        self.inbound.load_u64(self.layout.consumer_cursor() + field, Ordering::Relaxed)
    }

    #[inline]
    fn set_word(&mut self, field: usize, value: u64) {
        self.inbound.store_u64(self.layout.consumer_cursor() + field, value, Ordering::Relaxed);
    }
}

/// Leaves a record whose bytes are all read and to which none are appended; says whether it did.
#[inline]
fn step_over(cursor: &mut Cursor, ring: Ring) -> bool {
    if cursor.offset_bytes < cursor.record_bytes || cursor.is_open {
        return false;
    }
    cursor.head = ring.used_position(cursor.head.wrapping_add(slots_of(cursor.record_bytes)));
    (cursor.record_bytes, cursor.offset_bytes, cursor.is_urgent) = (0, 0, false);
    true
}
