//! The room of a lane: what the receiver's credit leaves free, and when a sender counts as writable.

use super::{CLOSED, CREDIT_SEEN, Cursor, ENTRY, OPEN, Producer, START, Switch, TAIL_LIMIT, open_read_mark};
use crate::Corrupt;
use crate::layout::Ring;
use crate::record::{HEADER_BYTES, INLINE_BYTES, RECORD_BYTES_MAX, SLOT_BYTES, slots_of};
use fabric::{Coherence, Inbound, Outbound};

impl<O: Outbound, I: Inbound> Producer<O, I> {
    /// Returns whether there is the room at which a sleeping sender is woken: at least a quarter of the ring, or, in an
    /// elastic lane, a sixth of its capacity (`elastic::ROOM_SHARE`).
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    pub fn is_writable(&self) -> Result<bool, Corrupt> {
        let cursor = self.cursor();
        if self.layout.elastic.is_some() {
            return self.is_elastic_writable(&cursor, false);
        }
        if self.can_grow(&cursor) || self.has_room_to_wake(&cursor, self.own_word(CREDIT_SEEN))? {
            return Ok(true);
        }
        let credit = self.reload_credit(&cursor)?;
        self.has_room_to_wake(&cursor, credit)
    }

    /// Returns whether a sender is writable without moving to a larger ring, for a sender that first waits for the
    /// receiver. See [`Producer::is_writable`].
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    pub fn is_ring_writable(&self) -> Result<bool, Corrupt> {
        if self.layout.elastic.is_some() { self.is_elastic_writable(&self.cursor(), true) } else { self.is_writable() }
    }

    /// Returns whether the receiver has consumed every byte sent.
    pub fn is_drained(&self) -> bool {
        let (position, credit) = (self.position(), self.credit());
        let open_bytes = self.own_word(OPEN) & u64::from(u32::MAX);
        if credit != position {
            return open_bytes == 0 && self.has_read_closed_record(credit);
        }
        let is_read = |mark| self.receiver_word(self.layout.open_read()) == mark;
        open_bytes == 0 || is_read(open_read_mark(position, open_bytes as usize))
    }

    /// Returns whether the last record begins at `credit` and was read before the receiver could see that it is closed.
    /// The receiver returns the credit of such a record when it next polls, which may be only once another record
    /// arrives.
    fn has_read_closed_record(&self, credit: u64) -> bool {
        let closed = self.own_word(CLOSED);
        let len_bytes = (closed & u64::from(u16::MAX)) as usize;
        let end = self.ring(&self.cursor()).used_position(credit.wrapping_add(slots_of(len_bytes)));
        let is_last = closed == open_read_mark(credit, len_bytes) && end == self.position();
        closed != 0 && is_last && self.receiver_word(self.layout.open_read()) == closed
    }

    /// Returns the number of slots that are sent and whose credit has not been returned.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    pub fn unread_slots(&self) -> Result<u64, Corrupt> {
        let cursor = self.cursor();
        let credit = self.reload_credit(&cursor)?;
        self.used_slots(&cursor, credit)
    }

    /// Returns the maximum number of slots that may be read without their credit having been returned: where a store
    /// crosses a link, the receiver returns credit in quarters of the ring.
    pub fn credit_lag_slots(&self) -> u64 {
        if self.outbound.coherence() == Coherence::Coherent { 0 } else { self.ring(&self.cursor()).slots / 4 }
    }

    /// Returns the number of payload bytes that the next record can carry; may move the cursor to a larger ring for
    /// `wanted_bytes`. Whatever values a peer stored in the words used here, a record of that length at the cursor lies
    /// inside the ring.
    #[inline]
    pub(super) fn room_for(&mut self, cursor: &mut Cursor, wanted_bytes: usize) -> Result<usize, Corrupt> {
        if wanted_bytes <= INLINE_BYTES && cursor.tail < self.own_word(TAIL_LIMIT) {
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
        let mut free_slots = self.writable_slots(cursor, self.own_word(CREDIT_SEEN))?;
        if free_slots < wanted_slots {
            let credit = self.reload_credit(cursor)?;
            free_slots = self.writable_slots(cursor, credit)?;
        }
        let is_bulk = wanted_bytes / SLOT_BYTES > self.layout.small_slots as usize / 2;
        if (is_bulk || free_slots < wanted_slots) && self.can_grow(cursor) {
            self.move_to(cursor, 1);
            free_slots = self.writable_slots(cursor, self.own_word(CREDIT_SEEN))?;
        }
        Ok(self.known_room(cursor, free_slots, free_slots))
    }

    /// Returns the payload bytes that one record can have, and stores the limit up to which the next records need no
    /// check.
    pub(super) fn known_room(&self, cursor: &Cursor, free_slots: u64, unchecked_slots: u64) -> usize {
        // The switch is not published yet and may be dropped: until then the limit remains that of the old ring.
        if cursor.switch.is_none() {
            self.set_own_word(TAIL_LIMIT, cursor.tail.wrapping_add(unchecked_slots));
        }
        let slots = free_slots.min(self.ring(cursor).slots_to_end(cursor.tail));
        (slots as usize * SLOT_BYTES).saturating_sub(HEADER_BYTES).min(RECORD_BYTES_MAX)
    }

    pub(super) fn move_to(&self, cursor: &mut Cursor, ring: u8) {
        let switch = Switch { from: cursor.ring, position: cursor.tail };
        let tail = Ring::of(&self.layout, ring).used_position(cursor.tail.wrapping_add(1));
        *cursor = Cursor { tail, ring, switch: Some(switch) };
    }

    /// Returns the number of slots that may be written. The small ring reserves one for a switch record.
    fn writable_slots(&self, cursor: &Cursor, credit: u64) -> Result<u64, Corrupt> {
        let reserved_slots = u64::from(self.can_grow(cursor));
        Ok(self.free_slots(cursor, credit)?.saturating_sub(reserved_slots))
    }

    /// Returns the number of free slots of the ring; unread records in other rings do not count.
    pub(super) fn free_slots(&self, cursor: &Cursor, credit: u64) -> Result<u64, Corrupt> {
        let corrupt = Corrupt { what: "credit", value: credit };
        let used_slots = self.used_slots(cursor, credit)?;
        let in_ring_slots = used_slots.min(cursor.tail.wrapping_sub(self.entry(cursor)));
        self.ring(cursor).slots.checked_sub(in_ring_slots).ok_or(corrupt)
    }

    /// Returns the number of unread slots in all rings.
    pub(super) fn used_slots(&self, cursor: &Cursor, credit: u64) -> Result<u64, Corrupt> {
        let used_slots = cursor.tail.wrapping_sub(credit);
        let is_possible = used_slots <= self.layout.slots_total();
        if is_possible { Ok(used_slots) } else { Err(Corrupt { what: "credit", value: credit }) }
    }

    /// Returns the position of the first record in the ring of `cursor`.
    pub(super) fn entry(&self, cursor: &Cursor) -> u64 {
        if cursor.switch.is_some() { cursor.tail } else { self.own_word(ENTRY) }
    }

    /// Returns whether there is the room at which the receiver wakes a sender. The receiver checks for sleepers when it
    /// crosses a quarter of the ring, so only whole quarters count: credit in between is returned without a wake-up.
    fn has_room_to_wake(&self, cursor: &Cursor, credit: u64) -> Result<bool, Corrupt> {
        self.free_slots(cursor, credit)?;
        let slots = self.ring(cursor).slots;
        let quarter = slots / 4;
        Ok(cursor.tail.wrapping_sub(credit & !(quarter - 1)) <= slots - quarter)
    }

    pub(super) fn reload_credit(&self, cursor: &Cursor) -> Result<u64, Corrupt> {
        let credit = self.credit();
        let seen = self.own_word(CREDIT_SEEN);
        if credit.wrapping_sub(seen) > cursor.tail.wrapping_sub(seen) {
            return Err(Corrupt { what: "credit", value: credit });
        }
        self.set_own_word(CREDIT_SEEN, credit);
        Ok(credit)
    }

    /// Returns the position up to which the receiver has read. A receiver that has not restarted the lane yet has read
    /// nothing of what follows [`Producer::restart`].
    pub(super) fn credit(&self) -> u64 {
        self.receiver_word(self.layout.credit()).max(self.own_word(START))
    }

    fn can_grow(&self, cursor: &Cursor) -> bool {
        self.layout.big_slots != 0 && cursor.ring == 0
    }
}
