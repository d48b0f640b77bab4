//! How the read position follows the records: through headers, open records and ring switches, to the end of the
//! stream. Every word is the peer's, and is checked before it is used.

use super::{Consumer, Cursor};
use crate::Corrupt;
use crate::layout::Ring;
use crate::record::{RECORD_BYTES_MAX, Record, SLOT_BYTES, slots_of};
use crate::words::WORD_BYTES;
use fabric::{Inbound, Outbound};
use volmem::sync::Ordering;

impl<I: Inbound, O: Outbound> Consumer<I, O> {
    /// Advances the cursor to a record with unread bytes. Returns `false` if there is none.
    #[inline]
    pub(super) fn load_record(&self, cursor: &mut Cursor) -> Result<bool, Corrupt> {
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

    /// Handles a cursor at the end of what was seen of an open record: loads the appended bytes, or the next record
    /// once this one is closed.
    #[cold]
    fn load_rest(&self, cursor: &mut Cursor) -> Result<bool, Corrupt> {
        let ring = self.ring(cursor);
        let word = self.inbound.load_u64(ring.slot_offset(cursor.head) + WORD_BYTES, Ordering::Acquire);
        let (so_far, is_open) = match Record::decode(word, ring.slots_to_end(cursor.head))? {
            Record::Open(len_bytes) => (len_bytes, true),
            Record::Data(len_bytes) => (len_bytes, false),
            Record::Switch(_) => return Err(Corrupt { what: "open record", value: word }),
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
        // Acquire: an open record's header is stored after the bytes that its length covers.
        let word = self.inbound.load_u64(slot + WORD_BYTES, Ordering::Acquire);
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
            Record::Switch(ring) => self.follow_switch(cursor, ring, word),
            Record::Open(_) => Err(Corrupt { what: "record header", value: word }),
        }
    }

    /// Moves the cursor to another ring. A switch is always followed by a record there, so a second switch is an error.
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

    /// Checks the cursor, which lies in memory that the peer can write on some backends (see the crate's
    /// documentation).
    #[inline]
    pub(super) fn check_in_record(&self, cursor: &Cursor) -> Result<(), Corrupt> {
        let fits = cursor.record_bytes <= RECORD_BYTES_MAX
            && (cursor.offset_bytes < cursor.record_bytes
                || (cursor.is_open && cursor.offset_bytes == cursor.record_bytes))
            && slots_of(cursor.record_bytes) <= self.ring(cursor).slots_to_end(cursor.head);
        if fits { Ok(()) } else { Err(self.corrupt_cursor(cursor)) }
    }

    #[cold]
    pub(super) fn corrupt_cursor(&self, cursor: &Cursor) -> Corrupt {
        Corrupt { what: "read cursor", value: cursor.record_bytes as u64 }
    }

    /// Returns whether the sender has finished and everything is read.
    pub fn is_finished(&self) -> bool {
        let fin = self.fin(Ordering::Acquire);
        if fin == 0 {
            return false;
        }
        // A record that was read while open may have been closed since, without a read having stepped over it.
        let mut cursor = self.cursor();
        let is_any_left = self.load_record(&mut cursor).unwrap_or(true);
        !is_any_left && cursor.record_bytes == 0 && cursor.head == fin.wrapping_sub(1)
    }

    /// Returns the position of the end of the stream, plus 1; 0 if the sender has not finished.
    #[inline]
    pub(super) fn fin(&self, order: Ordering) -> u64 {
        self.inbound.invalidate(self.layout.fin(), WORD_BYTES);
        self.inbound.load_u64(self.layout.fin(), order)
    }

    /// Checks that, if nothing is unread at the cursor, an announced end of the stream is at the cursor, too. Otherwise
    /// the reader would wait for a record that cannot arrive: a sender publishes all records, and closes an open one,
    /// before it announces the end.
    pub(super) fn check_fin(&self, cursor: &Cursor) -> Result<(), Corrupt> {
        let fin = self.fin(Ordering::Acquire);
        if fin == 0 {
            return Ok(());
        }
        let mut end = *cursor;
        let is_any_left = self.load_record(&mut end)?;
        let is_fine = is_any_left || (end.record_bytes == 0 && end.head == fin.wrapping_sub(1));
        if is_fine { Ok(()) } else { Err(Corrupt { what: "end of stream", value: fin }) }
    }
}

/// Moves the cursor past a closed record whose bytes are all read. Returns whether it did.
#[inline]
pub(super) fn step_over(cursor: &mut Cursor, ring: Ring) -> bool {
    if cursor.offset_bytes < cursor.record_bytes || cursor.is_open {
        return false;
    }
    cursor.head = ring.used_position(cursor.head.wrapping_add(slots_of(cursor.record_bytes)));
    (cursor.record_bytes, cursor.offset_bytes) = (0, 0);
    true
}
