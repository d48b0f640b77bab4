//! Held records, for a sender that has corked its stream (`TCP_CORK`, `MSG_MORE`) because more will follow.
//!
//! Held records lie complete in the ring, except for the tag of the first one: the receiver sees none of them until
//! that tag is stored, and then all of them. The sender publishes the position of the first one and the time since when
//! it is held. Once that time is long enough ago, or the receiver knows that the sender has died, the receiver notes in
//! its own state that it reads the record without a tag ([`crate::Consumer::publish_held`]). So no timer is needed, and
//! delivery does not depend on a living sender.

use super::{Cursor, HELD, HELD_STATE, Producer, Record, Ring, TAIL, TAIL_LIMIT, slots_of, tag};
use fabric::{Inbound, Outbound};
use volmem::sync::Ordering;

/// Maximum time for which records are held: 200 ms, as for `TCP_CORK` in tcp(7).
pub const HELD_MS_MAX: u32 = 200;

// Fields of `HELD_STATE`, from the lowest bit: the ring's number, the bytes, the milliseconds.
const BYTES_SHIFT: u32 = 8;
const BYTES_MASK: u64 = (1 << 24) - 1;
const MS_SHIFT: u32 = 32;

impl<O: Outbound, I: Inbound> Producer<O, I> {
    /// Holds the records that follow, behind those already held, until [`Producer::end_hold`]. `now_ms` is the time of
    /// a clock that both endpoints share. Memory must be coherent, and the records must be written with
    /// [`Producer::write_from`] or [`Producer::commit`].
    pub fn begin_hold(&mut self, now_ms: u32) {
        self.close_open_record();
        let since_ms = (self.own_word(HELD_STATE) >> MS_SHIFT) as u32;
        // The receiver may already have published records of this age. They are published here too; otherwise the new
        // records would become visible right behind them instead of being held.
        if self.has_read_held() || now_ms.wrapping_sub(since_ms) >= HELD_MS_MAX {
            self.publish_held();
        }
        self.holding_ms = Some(now_ms);
    }

    /// Stops holding the records that follow. Resets the state that a failed operation may have left.
    #[inline]
    pub fn forget_hold(&mut self) {
        self.holding_ms = None;
    }

    /// Ends [`Producer::begin_hold`]. Publishes the held records unless `stays` is set and they have fewer bytes than
    /// `bytes_max`. The caller must wake a sleeping receiver in both cases: it may not have seen yet that records are
    /// held, or it may have published the earlier ones.
    pub fn end_hold(&mut self, stays: bool, bytes_max: usize) {
        self.holding_ms = None;
        if self.own_word(HELD) == 0 {
            return;
        }
        // The short path of a write does not publish held records, so the next write must not take it.
        self.ask_for_room_next();
        let held_bytes = (self.own_word(HELD_STATE) >> BYTES_SHIFT & BYTES_MASK) as usize;
        if !stays || held_bytes >= bytes_max {
            self.publish_held();
        }
    }

    /// Makes the next write compute its room, so that it does not take the short path.
    pub fn ask_for_room_next(&mut self) {
        self.set_own_word(TAIL_LIMIT, 0);
    }

    /// Publishes the held records. Returns `false` if there are none.
    pub fn publish_held(&mut self) -> bool {
        let held = self.own_word(HELD);
        if held == 0 {
            return false;
        }
        self.set_own_word(HELD, 0);
        if self.has_passed(held) {
            return false;
        }
        let position = held.wrapping_sub(1);
        let slot = Ring::of(&self.layout, self.own_word(HELD_STATE) as u8).slot_offset(position);
        self.outbound.fence();
        self.outbound.store_u64(slot, tag(self.secret, position), Ordering::Release);
        true
    }

    /// Returns the number of held bytes; 0 once the receiver has read them.
    pub fn held_bytes(&self) -> usize {
        let is_held = self.own_word(HELD) != 0 && !self.has_read_held();
        if is_held { (self.own_word(HELD_STATE) >> BYTES_SHIFT & BYTES_MASK) as usize } else { 0 }
    }

    /// Returns whether the receiver has read held records without waiting for the sender.
    fn has_read_held(&self) -> bool {
        let held = self.own_word(HELD);
        held != 0 && self.has_passed(held)
    }

    /// Returns whether the receiver is past the record of [`HELD`]. If not, the slot still belongs to that record: only
    /// the sender reuses slots, and only those whose credit was returned.
    fn has_passed(&self, held: u64) -> bool {
        self.credit().wrapping_sub(held) as i64 >= 0
    }

    /// Puts a record in place without making it visible; the counterpart of [`Producer::publish`] for held records.
    #[cold]
    #[inline(never)]
    pub(super) fn hold_record(&mut self, cursor: &mut Cursor, len_bytes: usize, now_ms: u32) {
        let (slot, record) = (self.ring(cursor).slot_offset(cursor.tail), Record::Data(len_bytes));
        let state = self.own_word(HELD_STATE);
        let (held_bytes, since) = if self.own_word(HELD) != 0 {
            self.store_header_and_tag(slot, cursor.tail, record);
            if let Some(switch) = cursor.switch.take() {
                self.publish_switch(cursor, switch);
            }
            (state >> BYTES_SHIFT & BYTES_MASK, state & !(BYTES_MASK << BYTES_SHIFT))
        } else {
            let (ring, position) = self.withhold(cursor, slot, record);
            self.outbound.store_u64(self.layout.held_since(), now_ms.into(), Ordering::Relaxed);
            self.outbound.store_u64(self.layout.held(), position.wrapping_add(1), Ordering::Release);
            self.set_own_word(HELD, position.wrapping_add(1));
            (0, u64::from(ring) | u64::from(now_ms) << MS_SHIFT)
        };
        let held_bytes = (held_bytes + len_bytes as u64).min(BYTES_MASK);
        self.set_own_word(HELD_STATE, since | held_bytes << BYTES_SHIFT);
        cursor.tail = self.ring(cursor).used_position(cursor.tail.wrapping_add(slots_of(len_bytes)));
        self.set_own_word(TAIL, cursor.tail);
    }

    /// Stores a record, and the switch that leads to it, except for the tag that a receiver checks first. Returns the
    /// ring and the position of that tag.
    fn withhold(&mut self, cursor: &mut Cursor, slot: usize, record: Record) -> (u8, u64) {
        let Some(switch) = cursor.switch.take() else {
            self.outbound.store_u64(slot + 8, record.encode(self.stamp), Ordering::Relaxed);
            return (cursor.ring, cursor.tail);
        };
        self.store_header_and_tag(slot, cursor.tail, record);
        let slot = Ring::of(&self.layout, switch.from).slot_offset(switch.position);
        self.outbound.store_u64(slot + 8, Record::Switch(cursor.ring).encode(self.stamp), Ordering::Relaxed);
        self.note_ring(cursor, switch.from);
        self.ask_for_room_next();
        (switch.from, switch.position)
    }
}
