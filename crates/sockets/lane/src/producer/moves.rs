//! Moves of a stream to the lane and away from it, as their sender makes them.
//!
//! A stream may use the lane for a part of its bytes only, several times. The sender ends a part with
//! [`Producer::end_move`] and tells the receiver the position, which reads up to it
//! ([`crate::Consumer::has_reached`]). If the receiver stops before, it publishes its read position
//! ([`crate::Consumer::frozen_cursor`]), and the sender reads the rest in its own memory ([`Producer::unread_from`]) to
//! send it in another way. A sender that leaves the lane by itself does so from the record on of which the receiver has
//! not returned the credit ([`Producer::credited_cursor`]). The next part begins with [`Producer::restart`] and
//! [`crate::Consumer::restart`].

use super::{CLOSED, CREDIT_SEEN, ENTRY, LEFT_RING, Producer, RING, START, TAIL, TAIL_LIMIT, open_read_mark};
use crate::consumer::Chunk;
use crate::layout::Ring;
use crate::record::{FrozenCursor, HEADER_BYTES, Record, slots_of, tag};
use crate::words::WORD_BYTES;
use crate::{Corrupt, Layout};
use fabric::{Inbound, Outbound};
use volmem::Region;
use volmem::sync::Ordering;

impl<O: Outbound, I: Inbound> Producer<O, I> {
    /// Publishes all staged records, and closes the open one. Returns the position of the end, which the
    /// caller publishes with release order.
    pub fn end_move(&mut self) -> u64 {
        self.publish_staged();
        self.close_open_record();
        self.outbound.fence();
        self.position()
    }

    /// Restarts the lane in its small ring, at a new position, which the caller publishes with release order for
    /// [`Consumer::restart`](crate::Consumer::restart). The receiver has told the caller before that it has read
    /// everything, or that it reads no more: what is unread is lost, and the memory of larger rings is released. The
    /// caller may write at once. No position is used twice, so that no earlier record can be taken for a new one. Sleep
    /// for room in the earlier part is cancelled: the caller wakes threads that are in it.
    pub fn restart(&mut self) -> u64 {
        let end = self.end_move();
        self.cancel_sleep();
        self.discard_all_rings();
        let alignment = self.layout.restart_alignment();
        let start = (end | (alignment - 1)).wrapping_add(1);
        for field in [TAIL, CREDIT_SEEN, START, ENTRY] {
            self.set_own_word(field, start);
        }
        for field in [RING, TAIL_LIMIT, LEFT_RING, CLOSED] {
            self.set_own_word(field, 0);
        }
        self.reserved = None;
        start
    }

    /// Returns whether the receiver has [restarted](crate::Consumer::restart) the lane since [`Producer::restart`].
    pub fn has_restarted(&self) -> bool {
        self.receiver_word(self.layout.credit()).wrapping_sub(self.own_word(START)) as i64 >= 0
    }

    /// Returns a cursor for [`Producer::unread_from`] before which the receiver has read everything, as far as this
    /// end knows without its help: it may have read more, up to one record. Ends the move.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    ///
    /// # Panics
    /// As [`Producer::unread_from`].
    pub fn credited_cursor(&mut self, memory: &Region) -> Result<[u64; 2], Corrupt> {
        assert_eq!(memory.len_bytes(), self.outbound.len_bytes(), "the memory of the outbound window");
        self.end_move();
        let end = self.cursor();
        let head = self.reload_credit(&end)?;
        self.used_slots(&end, head)?;
        let records = Records { memory, layout: &self.layout, secret: self.secret, end: end.tail, end_ring: end.ring };
        // A record that was closed after the receiver had read all of it is credited with the next one.
        let (closed, read) = (self.own_word(CLOSED), self.receiver_word(self.layout.open_read()));
        let len_bytes = (closed & u64::from(u16::MAX)) as usize;
        let is_read = closed != 0 && closed == read && closed == open_read_mark(head, len_bytes);
        let offset_bytes = if is_read { len_bytes } else { 0 };
        let place = |ring| FrozenCursor { head, ring, offset_bytes };
        // A position belongs to one ring, but the sender may have left several while they had unread records.
        let rings = std::iter::once(end.ring).chain(0..=self.layout.rings_larger() as u8);
        let place = rings.map(place).find(|place| records.count(*place).is_some());
        Ok(place.ok_or(Corrupt { what: "credit", value: head })?.encode())
    }

    /// Returns the bytes that the receiver has left unread, if `cursor` is its [`frozen
    /// cursor`](crate::Consumer::frozen_cursor). Ends the move. `memory` is the memory of the outbound window, where
    /// only this endpoint writes.
    ///
    /// # Errors
    /// [`Corrupt`] if `cursor` is not the start of a record, or inside one, between the last credit and the end: the
    /// records from there on must lead to the end. (The receiver may choose the offset in a record, so a position that
    /// it makes look like a record by the payload that it requested gives it no more.)
    ///
    /// # Panics
    /// If `memory` has another length than the outbound window.
    pub fn unread_from<'a>(&'a mut self, memory: &'a Region, cursor: [u64; 2]) -> Result<UnreadBytes<'a>, Corrupt> {
        assert_eq!(memory.len_bytes(), self.outbound.len_bytes(), "the memory of the outbound window");
        self.end_move();
        let place = FrozenCursor::decode(cursor);
        let corrupt = Corrupt { what: "frozen cursor", value: cursor[0] };
        let (end, credit) = (self.cursor(), self.own_word(CREDIT_SEEN));
        let sent_slots = self.used_slots(&end, credit)?;
        if place.head.wrapping_sub(credit) > sent_slots || usize::from(place.ring) > self.layout.rings_larger() {
            return Err(corrupt);
        }
        let records = Records { memory, layout: &self.layout, secret: self.secret, end: end.tail, end_ring: end.ring };
        let len_bytes = records.count(place).ok_or(corrupt)?;
        Ok(UnreadBytes { records, place, len_bytes })
    }
}

/// The records that a sender has left in its own memory.
#[derive(Debug, Clone, Copy)]
struct Records<'a> {
    memory: &'a Region,
    layout: &'a Layout,
    secret: u64,
    end: u64,
    end_ring: u8,
}

impl Records<'_> {
    /// Moves `place` to a record with bytes behind its offset, and returns the length of that record. `None` if there
    /// is no further record; [`Records::is_end`] then tells whether that is correct.
    fn find(&self, place: &mut FrozenCursor) -> Option<usize> {
        // A record follows each switch, and a record whose bytes are all read.
        const STEPS_MAX: usize = 3;
        for _ in 0..STEPS_MAX {
            let left_slots = self.end.wrapping_sub(place.head);
            if left_slots == 0 || left_slots > self.layout.slots_total() {
                return None;
            }
            match self.load(place)? {
                Record::Data(len_bytes) if place.offset_bytes < len_bytes => return Some(len_bytes),
                Record::Data(len_bytes) if place.offset_bytes == len_bytes => self.step_over(place, len_bytes),
                Record::Switch(ring) if place.offset_bytes == 0 && usize::from(ring) <= self.layout.rings_larger() => {
                    place.ring = ring;
                    place.head = self.ring(place).used_position(place.head.wrapping_add(1));
                }
                _ => return None,
            }
        }
        None
    }

    fn load(&self, place: &FrozenCursor) -> Option<Record> {
        let ring = self.ring(place);
        let slot = ring.slot_offset(place.head);
        if self.memory.load_u64(slot, Ordering::Relaxed) != tag(self.secret, place.head) {
            return None;
        }
        let header = self.memory.load_u64(slot + WORD_BYTES, Ordering::Relaxed);
        Record::decode(header, ring.slots_to_end(place.head)).ok()
    }

    fn step_over(&self, place: &mut FrozenCursor, len_bytes: usize) {
        place.head = self.ring(place).used_position(place.head.wrapping_add(slots_of(len_bytes)));
        place.offset_bytes = 0;
    }

    /// Returns the number of bytes from `place` to the end, or `None` if the records do not lead there.
    fn count(&self, mut place: FrozenCursor) -> Option<usize> {
        let mut bytes = 0;
        while let Some(record_bytes) = self.find(&mut place) {
            bytes += record_bytes - place.offset_bytes;
            self.step_over(&mut place, record_bytes);
        }
        let is_end = (place.head, place.ring, place.offset_bytes) == (self.end, self.end_ring, 0);
        is_end.then_some(bytes)
    }

    fn ring(&self, place: &FrozenCursor) -> Ring {
        Ring::of(self.layout, place.ring)
    }
}

/// The bytes that a receiver has left unread, in the memory of their sender. The sender writes nothing meanwhile.
#[derive(Debug)]
pub struct UnreadBytes<'a> {
    records: Records<'a>,
    place: FrozenCursor,
    len_bytes: usize,
}

impl UnreadBytes<'_> {
    /// Returns the number of bytes that are left.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Returns the next bytes in place, by their offset in the memory, or `None` at the end.
    pub fn chunk(&mut self) -> Option<Chunk> {
        let record_bytes = self.records.find(&mut self.place).filter(|_| self.len_bytes > 0)?;
        let slot = self.records.ring(&self.place).slot_offset(self.place.head);
        let len_bytes = (record_bytes - self.place.offset_bytes).min(self.len_bytes);
        Some(Chunk { offset: slot + HEADER_BYTES + self.place.offset_bytes, len_bytes })
    }

    /// Consumes bytes of the last [`UnreadBytes::chunk`].
    ///
    /// # Panics
    /// If fewer bytes are left in it.
    pub fn consume(&mut self, len_bytes: usize) {
        let chunk_bytes = self.chunk().map_or(0, |chunk| chunk.len_bytes);
        assert!(len_bytes <= chunk_bytes, "consumed {len_bytes} bytes of a chunk of {chunk_bytes}");
        self.place.offset_bytes += len_bytes;
        self.len_bytes -= len_bytes;
    }

    /// Copies bytes to `destination`; returns their number, which is 0 at the end.
    pub fn read(&mut self, destination: &mut [u8]) -> usize {
        let mut read_bytes = 0;
        while read_bytes < destination.len()
            && let Some(Chunk { offset, len_bytes }) = self.chunk()
        {
            let copied_bytes = len_bytes.min(destination.len() - read_bytes);
            self.records.memory.read(offset, &mut destination[read_bytes..][..copied_bytes]);
            self.consume(copied_bytes);
            read_bytes += copied_bytes;
        }
        read_bytes
    }
}
