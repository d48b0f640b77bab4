//! Open records, which short writes share while the receiver of an elastic lane lags.

use super::{CLOSED, CREDIT_SEEN, Cursor, OPEN, Producer, TAIL, TAIL_LIMIT, open_read_mark};
use crate::Corrupt;
use crate::record::{HEADER_BYTES, RECORD_BYTES_MAX, Record, SLOT_BYTES, slots_of};
use crate::words::WORD_BYTES;
use fabric::{Inbound, Outbound};
use volmem::sync::Ordering;

/// Writes shorter than this share an open record while the receiver lags.
const SHARED_BYTES_MAX: usize = 2048;
/// Maximum number of slots of an open record. Under loom it is smaller, because a model's ring is small.
const OPEN_SLOTS: u64 = if cfg!(loom) { 2 } else { 64 };

/// The record at the tail to which writes are appended.
#[derive(Debug, Clone, Copy)]
struct Open {
    len_bytes: usize,
    slots: u64,
}

impl<O: Outbound, I: Inbound> Producer<O, I> {
    #[inline]
    pub(super) fn has_open_record(&self) -> bool {
        self.layout.elastic.is_some() && self.own_word(OPEN) != 0
    }

    /// Returns whether a write shares a record with others: short writes do while the receiver lags.
    pub(super) fn shares_records(&self, cursor: &Cursor, len_bytes: usize) -> Result<bool, Corrupt> {
        let never = self.layout.elastic.is_none() || self.prefers_waiting || len_bytes >= SHARED_BYTES_MAX;
        if never || cursor.switch.is_some() {
            return Ok(false);
        }
        let lag_slots = self.lag_slots(self.capacity_slots());
        let lags = |credit: u64| cursor.tail.wrapping_sub(credit) >= lag_slots;
        Ok(lags(self.own_word(CREDIT_SEEN)) && lags(self.reload_credit(cursor)?))
    }

    /// Sends the rest of a short write, from `sent_bytes` on, in open records that the next write may share.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes` and outside the lane's memory.
    pub(super) unsafe fn write_shared(
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
            // SAFETY: `source` is readable for `len_bytes` and outside the window, by this function's contract;
            // `sent_bytes` plus `record_bytes` are at most that.
            unsafe { self.open_record(&mut cursor, source.add(sent_bytes), record_bytes, slots_of(room_bytes)) };
            sent_bytes += record_bytes;
        }
        Ok(sent_bytes)
    }

    /// Returns the maximum number of slots of an open record. It is a small part of the capacity and of the ring, so
    /// that an open record does not keep the lane from being writable: a receiver that has read all of it may return
    /// its credit only once another record follows.
    fn open_slots_max(&self) -> u64 {
        let ring_slots = self.ring(&self.cursor()).slots_used;
        OPEN_SLOTS.min(self.capacity_slots() / 8).min(ring_slots / 4)
    }

    /// Publishes an open record of `slots` slots with its first bytes.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes` and outside the lane's memory.
    unsafe fn open_record(&mut self, cursor: &mut Cursor, source: *const u8, len_bytes: usize, slots: u64) {
        let slot = self.ring(cursor).slot_offset(cursor.tail);
        // SAFETY: `source` is readable for `len_bytes` and outside the window, by this function's contract; the window
        // checks the bounds of its own side.
        unsafe { self.outbound.write_from(slot + HEADER_BYTES, source, len_bytes) };
        self.store_header_and_tag(slot, cursor.tail, Record::Open(len_bytes));
        if let Some(switch) = cursor.switch.take() {
            self.publish_switch(cursor, switch);
        }
        self.set_own_word(TAIL, cursor.tail);
        self.set_own_word(TAIL_LIMIT, 0);
        self.set_own_word(OPEN, len_bytes as u64 | slots << 32);
    }

    /// Appends as many bytes to the open record as it has room for, and closes it if some are left.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes` and outside the lane's memory.
    #[cold]
    pub(super) unsafe fn append_to_open_record(
        &mut self,
        source: *const u8,
        len_bytes: usize,
    ) -> Result<usize, Corrupt> {
        let open = self.open()?;
        let cursor = self.cursor();
        let room_bytes = open.slots as usize * SLOT_BYTES - HEADER_BYTES - open.len_bytes;
        let is_read = self.receiver_word(self.layout.open_read()) == open_read_mark(cursor.tail, open.len_bytes);
        // A receiver that has caught up gets separate records.
        let appended_bytes = if is_read || len_bytes >= SHARED_BYTES_MAX { 0 } else { room_bytes.min(len_bytes) };
        if appended_bytes > 0 {
            let slot = self.ring(&cursor).slot_offset(cursor.tail);
            // SAFETY: `source` is readable for `len_bytes` and outside the window, by this function's contract, and
            // `appended_bytes` is at most that (`min`).
            unsafe { self.outbound.write_from(slot + HEADER_BYTES + open.len_bytes, source, appended_bytes) };
            let so_far = open.len_bytes + appended_bytes;
            self.outbound.fence();
            let header = Record::Open(so_far).encode();
            self.outbound.store_u64(slot + WORD_BYTES, header, Ordering::Release);
            self.set_own_word(OPEN, so_far as u64 | open.slots << 32);
        }
        if appended_bytes < len_bytes {
            self.close_open_record();
        }
        Ok(appended_bytes)
    }

    /// Returns the open record at the tail. A peer may have stored to its words, so they are checked: the returned
    /// record lies inside the ring.
    fn open(&self) -> Result<Open, Corrupt> {
        let word = self.own_word(OPEN);
        let cursor = self.cursor();
        let (len_bytes, slots) = ((word & u64::from(u32::MAX)) as usize, word >> 32);
        let fits = slots <= OPEN_SLOTS.min(self.ring(&cursor).slots_to_end(cursor.tail))
            && len_bytes > 0
            && slots_of(len_bytes.min(RECORD_BYTES_MAX)) <= slots;
        if fits { Ok(Open { len_bytes, slots }) } else { Err(Corrupt { what: "open record", value: word }) }
    }

    /// Closes the open record, if there is one.
    pub(super) fn close_open_record(&mut self) {
        if self.has_open_record() {
            self.close_record();
        }
    }

    #[cold]
    fn close_record(&mut self) {
        let (open, cursor) = (self.open(), self.cursor());
        self.set_own_word(OPEN, 0);
        // A peer that has corrupted the record loses only its own bytes.
        let Ok(Open { len_bytes, .. }) = open else { return };
        let ring = self.ring(&cursor);
        let header = Record::Data(len_bytes).encode();
        self.outbound.store_u64(ring.slot_offset(cursor.tail) + WORD_BYTES, header, Ordering::Release);
        self.set_own_word(CLOSED, open_read_mark(cursor.tail, len_bytes));
        self.set_own_word(TAIL, ring.used_position(cursor.tail.wrapping_add(slots_of(len_bytes))));
    }
}
