//! Records that are held back, for a sender that has more to say in a moment.
//!
//! They lie in the ring, whole, but for the first tag: so a receiver finds none of them, and finds all of them once
//! that is stored. It is told where that is, and since when. Once it has waited for long enough, or knows that the
//! sender is gone, it shows them itself ([`crate::Consumer::show_held`]): so nothing depends on a sender that is alive,
//! and there is no timer.

use super::{Cursor, HELD, HELD_STATE, Producer, Record, Ring, TAIL, TAIL_LIMIT, slots_of, tag};
use fabric::{Inbound, Outbound};
use volmem::sync::Ordering;

/// How long records are held back, as TCP does it: 200 ms.
pub const HELD_MS_MAX: u32 = 200;

/// In [`HELD_STATE`]: the ring's number, then the bytes, then the milliseconds.
const BYTES_SHIFT: u32 = 8;
const BYTES_MASK: u64 = (1 << 24) - 1;
const MS_SHIFT: u32 = 32;

impl<O: Outbound, I: Inbound> Producer<O, I> {
    /// Has the records that follow held back, behind those that are, until [`Producer::end_hold`]. `now_ms` is a clock
    /// that both ends have. Memory has to be coherent, and the records are written by [`Producer::write_from`] or
    /// [`Producer::commit`].
    pub fn begin_hold(&mut self, now_ms: u32) {
        self.close_open_record();
        let since_ms = (self.inbound_word(HELD_STATE) >> MS_SHIFT) as u32;
        // What the receiver shows by now is shown here too, or these records would be seen behind it.
        if self.has_read_held() || now_ms.wrapping_sub(since_ms) >= HELD_MS_MAX {
            self.show_held();
        }
        self.holding_ms = Some(now_ms);
    }

    /// The next records are not held back, whatever an operation that failed has left.
    #[inline]
    pub fn forget_hold(&mut self) {
        self.holding_ms = None;
    }

    /// Ends [`Producer::begin_hold`]. What is held back is shown, unless it `stays` and has fewer bytes than
    /// `bytes_max`. A receiver that sleeps is to be woken in either case: it may not know of it yet, or have shown what
    /// was held back before.
    pub fn end_hold(&mut self, stays: bool, bytes_max: usize) {
        self.holding_ms = None;
        if self.inbound_word(HELD) == 0 {
            return;
        }
        // Whoever sends next comes by what asks for room, and so by here.
        self.ask_for_room_next();
        let held_bytes = (self.inbound_word(HELD_STATE) >> BYTES_SHIFT & BYTES_MASK) as usize;
        if !stays || held_bytes >= bytes_max {
            self.show_held();
        }
    }

    /// Has the next write ask for room, and so not take the short path.
    pub fn ask_for_room_next(&mut self) {
        self.set_inbound_word(TAIL_LIMIT, 0);
    }

    /// Shows what is held back; `false`: there was nothing.
    pub fn show_held(&mut self) -> bool {
        let held = self.inbound_word(HELD);
        if held == 0 {
            return false;
        }
        self.set_inbound_word(HELD, 0);
        if self.has_passed(held) {
            return false;
        }
        let position = held.wrapping_sub(1);
        let slot = Ring::of(&self.layout, self.inbound_word(HELD_STATE) as u8).slot_offset(position);
        self.outbound.fence();
        self.outbound.store_u64(slot, tag(self.secret, position), Ordering::Release);
        true
    }

    /// Bytes that are held back, as far as this end knows.
    pub fn held_bytes(&self) -> usize {
        let is_held = self.inbound_word(HELD) != 0 && !self.has_read_held();
        if is_held { (self.inbound_word(HELD_STATE) >> BYTES_SHIFT & BYTES_MASK) as usize } else { 0 }
    }

    /// Whether the receiver has not waited for what was held back.
    fn has_read_held(&self) -> bool {
        let held = self.inbound_word(HELD);
        held != 0 && self.has_passed(held)
    }

    /// Whether the receiver is past the record of [`HELD`]. Else its slot is no other record's: only this end reuses
    /// slots, and only those whose credit has come back.
    fn has_passed(&self, held: u64) -> bool {
        let credit = self.receiver_word(self.layout.credit());
        credit.wrapping_sub(held) as i64 >= 0
    }

    /// [`Producer::publish`] of a record that is held back.
    #[cold]
    #[inline(never)]
    pub(super) fn hold_record(&mut self, cursor: &mut Cursor, len_bytes: usize, now_ms: u32) {
        let (slot, record) = (self.ring(cursor).slot_offset(cursor.tail), Record::Data(len_bytes));
        let state = self.inbound_word(HELD_STATE);
        let (held_bytes, since) = if self.inbound_word(HELD) != 0 {
            self.store_header_and_tag(slot, cursor.tail, record);
            if let Some(switch) = cursor.switch.take() {
                self.publish_switch(cursor, switch);
            }
            (state >> BYTES_SHIFT & BYTES_MASK, state & !(BYTES_MASK << BYTES_SHIFT))
        } else {
            let (ring, position) = self.withhold(cursor, slot, record);
            self.outbound.store_u64(self.layout.held_since(), now_ms.into(), Ordering::Relaxed);
            self.outbound.store_u64(self.layout.held(), position.wrapping_add(1), Ordering::Release);
            self.set_inbound_word(HELD, position.wrapping_add(1));
            (0, u64::from(ring) | u64::from(now_ms) << MS_SHIFT)
        };
        let held_bytes = (held_bytes + len_bytes as u64).min(BYTES_MASK);
        self.set_inbound_word(HELD_STATE, since | held_bytes << BYTES_SHIFT);
        cursor.tail = self.ring(cursor).used_position(cursor.tail.wrapping_add(slots_of(len_bytes)));
        self.set_inbound_word(TAIL, cursor.tail);
    }

    /// Puts a record in place, and the switch that leads to it, all but the tag that a receiver finds first. Answers
    /// the ring and the position of that.
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
