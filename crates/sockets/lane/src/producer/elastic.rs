//! Elastic lanes: their capacity, the choice of a ring, and the charge of its memory to the budget.

use super::{CAPACITY, CREDIT_SEEN, Cursor, LEFT_RING, Producer, RINGS_USED, WAKE_EVERY_SLOTS};
use crate::record::{RECORD_BYTES_MAX, SLOT_BYTES, slots_of};
use crate::{Corrupt, ELASTIC_SLOTS_MIN};
use fabric::{Inbound, Outbound};

/// A receiver lags once this number of slots is unread. Until then each write is a separate record, which is read
/// faster.
const LAG_SLOTS: u64 = 4096;
/// A sender is writable once one part in this number of the lane's capacity is free. Linux requires a third of the send
/// buffer (`sk_stream_is_writeable`), and the send buffer is about half of the capacity.
const ROOM_SHARE: u64 = 6;
/// A receiver also lags once one part in this number of the lane's capacity is unread. Separate records of single bytes
/// up to then take only a small part of the capacity.
const LAG_SHARE: u64 = 32;
/// A sender that prefers waiting for the receiver to using more memory grows to rings of this number of slots, or to
/// rings of [`BULK_SLOTS`] if its writes have at least [`BULK_BYTES`]. 256 KiB fit the second-level cache, which is
/// best for writes of 4 KiB; writes of 16 KiB and more were 1.3 to 1.8 times as fast with 4 MiB.
const STREAM_SLOTS: u64 = 4096;
const BULK_SLOTS: u64 = 65_536;
const BULK_BYTES: usize = 8192;
/// A long write moves the lane to a ring that holds this number of writes of the same length. Round trips of 40 kB took
/// 16% longer with 4 than with 16. Under loom the rings are too small for 16.
const RING_PER_WRITE: u64 = if cfg!(loom) { 4 } else { 16 };
/// Memory is charged to the budget in steps of this number of slots, when a ring is used for the first time.
const ACCOUNT_SLOTS: u64 = 1024;

/// The room of an elastic lane: in its ring, and by its capacity.
#[derive(Debug, Clone, Copy)]
struct AvailableRoom {
    credit: u64,
    ring_slots: u64,
    capacity_left: u64,
}

impl AvailableRoom {
    fn slots(&self) -> u64 {
        self.ring_slots.min(self.capacity_left)
    }
}

/// Where the next record of an elastic lane goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Placement {
    /// Into the current ring.
    Stay,
    /// Into this larger ring.
    Grow(u8),
    /// Into the small ring: the memory of the current one was released, or there is none for more of its slots.
    Return,
    /// Nowhere until the receiver has read more.
    Wait,
}

impl<O: Outbound, I: Inbound> Producer<O, I> {
    /// Does the work of [`Producer::room_by_credit`] for an elastic lane.
    pub(super) fn elastic_room(&mut self, cursor: &mut Cursor, wanted_bytes: usize) -> Result<usize, Corrupt> {
        let wanted_slots = slots_of(wanted_bytes.min(RECORD_BYTES_MAX));
        let capacity_slots = self.capacity_slots();
        let mut found = self.available_room(cursor, self.own_word(CREDIT_SEEN), capacity_slots)?;
        // Loading the receiver's line costs as much as a message, so it is loaded only where it can change the result.
        if found.slots() < wanted_slots || self.was_released(cursor) {
            found = self.available_room(cursor, self.reload_credit(cursor)?, capacity_slots)?;
        }
        let mut placed = self.place(cursor, &found, wanted_bytes, capacity_slots)?;
        if placed.is_none() {
            // Other lanes have used up the memory since: this one goes where it needs none.
            placed = self.place(cursor, &found, wanted_bytes, capacity_slots)?;
        }
        let room_slots = placed.unwrap_or(0);
        // Once the receiver lags, writes share records, which requires that they take this path.
        let lag_slots = self.lag_slots(capacity_slots).saturating_sub(cursor.tail.wrapping_sub(found.credit));
        Ok(self.known_room(cursor, room_slots, room_slots.min(lag_slots)))
    }

    fn available_room(&self, cursor: &Cursor, credit: u64, capacity_slots: u64) -> Result<AvailableRoom, Corrupt> {
        let ring_slots = self.elastic_ring_slots(cursor, credit)?;
        let capacity_left = capacity_slots.saturating_sub(cursor.tail.wrapping_sub(credit));
        Ok(AvailableRoom { credit, ring_slots, capacity_left })
    }

    /// Moves the cursor to where the next record goes, and charges its memory. Returns the number of slots that it may
    /// have, or `None` if the memory could not be charged.
    #[inline]
    fn place(
        &mut self,
        cursor: &mut Cursor,
        found: &AvailableRoom,
        wanted_bytes: usize,
        capacity_slots: u64,
    ) -> Result<Option<u64>, Corrupt> {
        let saved = *cursor;
        let wanted_slots = slots_of(wanted_bytes.min(RECORD_BYTES_MAX));
        // The charge below asks the budget.
        let may_charge = |_| !self.is_growth_forbidden;
        match self.placement(cursor, found, wanted_bytes, self.prefers_waiting, may_charge) {
            Placement::Wait => return Ok(Some(0)),
            Placement::Stay => {}
            Placement::Return => self.move_to(cursor, 0),
            Placement::Grow(ring) => {
                self.move_to(cursor, ring);
                if !self.charge_ring(cursor) {
                    *cursor = saved;
                    self.is_growth_forbidden = true;
                    return Ok(None);
                }
            }
        }
        let has_moved = cursor.ring != saved.ring;
        let room = if has_moved { self.available_room(cursor, found.credit, capacity_slots)? } else { *found };
        if cursor.ring == 0 || room.slots() == 0 {
            return Ok(Some(room.slots()));
        }
        let charged_slots = self.charge_slots(cursor, room.slots().min(wanted_slots));
        Ok((charged_slots > 0).then(|| room.slots().min(charged_slots)))
    }

    /// Returns where the next record goes, if `may_charge` says whether the memory of a number of slots can be charged.
    /// Sends and readiness both use it, so that a lane is writable exactly if a write finds room.
    #[inline]
    fn placement(
        &self,
        cursor: &Cursor,
        found: &AvailableRoom,
        wanted_bytes: usize,
        prefers_waiting: bool,
        may_charge: impl Fn(u64) -> bool,
    ) -> Placement {
        if cursor.switch.is_some() {
            return Placement::Stay;
        }
        if self.was_released(cursor) && self.is_drained() {
            return Placement::Return;
        }
        if let Some(ring) = self.larger_ring(cursor, found, wanted_bytes, prefers_waiting)
            && may_charge(ELASTIC_SLOTS_MIN)
        {
            return Placement::Grow(ring);
        }
        match () {
            () if found.slots() == 0 => Placement::Wait,
            () if self.has_charged_slot(cursor) || may_charge(self.next_charge_slots(cursor)) => Placement::Stay,
            () if self.has_followed(cursor, found.credit) => Placement::Return,
            () => Placement::Wait,
        }
    }

    /// Returns whether the lane is in a larger ring whose memory was released.
    fn was_released(&self, cursor: &Cursor) -> bool {
        cursor.ring != 0 && self.own_word(RINGS_USED) & !1 == 0
    }

    /// Returns whether the receiver has come to the current ring, so that nothing is unread in the others.
    fn has_followed(&self, cursor: &Cursor, credit: u64) -> bool {
        credit.wrapping_sub(self.entry(cursor)) as i64 >= 0
    }

    /// Returns the larger ring that suits a write, if the current one does not and such a ring exists.
    #[inline]
    fn larger_ring(
        &self,
        cursor: &Cursor,
        found: &AvailableRoom,
        wanted_bytes: usize,
        prefers_waiting: bool,
    ) -> Option<u8> {
        let AvailableRoom { credit, ring_slots, capacity_left } = *found;
        let ring = self.ring(cursor);
        let wanted_slots = slots_of(wanted_bytes.min(RECORD_BYTES_MAX)).min(capacity_left);
        let bulk_slots = ((wanted_bytes / SLOT_BYTES) as u64).min(capacity_left);
        let is_full = ring_slots < wanted_slots;
        let holds_writes = if cursor.ring == 0 { 2 } else { RING_PER_WRITE / 2 };
        let is_bulk = bulk_slots * holds_writes > ring.slots_used && ring.slots < BULK_SLOTS;
        let suitable_slots = if wanted_bytes >= BULK_BYTES { BULK_SLOTS } else { STREAM_SLOTS };
        let grows = is_bulk || (is_full && (ring.slots < suitable_slots || !prefers_waiting));
        if grows { self.ring_for_writes(cursor, credit, bulk_slots) } else { None }
    }

    /// Returns the larger ring for writes of `bulk_slots`, if there is one.
    #[cold]
    fn ring_for_writes(&self, cursor: &Cursor, credit: u64, bulk_slots: u64) -> Option<u8> {
        let ring = self.ring(cursor);
        let wanted_ring_slots = (bulk_slots * RING_PER_WRITE).clamp(ring.slots * 2, BULK_SLOTS.max(ring.slots * 2));
        let ring_number = |slots: u64| (slots / ELASTIC_SLOTS_MIN).max(1).next_power_of_two().ilog2() as u8 + 1;
        let number = ring_number(wanted_ring_slots).min(self.layout.rings_larger() as u8);
        // These rings may still contain unread records: rings smaller than the current one, and the ring from which the
        // lane returned to the small one, until the receiver has followed.
        let is_left_unread = cursor.ring == 0 && !self.has_followed(cursor, credit);
        let left_ring = if is_left_unread { self.own_word(LEFT_RING) as u8 } else { 0 };
        let number = number.max(left_ring.saturating_add(1));
        (number > cursor.ring && usize::from(number) <= self.layout.rings_larger()).then_some(number)
    }

    /// Returns whether the memory of this number of slots could be charged now.
    fn may_charge(&self, slots: u64) -> bool {
        !self.is_growth_forbidden && self.memory.has_room(slots as usize * SLOT_BYTES)
    }

    /// Charges the first slots of a ring that is about to be entered, once.
    fn charge_ring(&mut self, cursor: &Cursor) -> bool {
        let charged_until = cursor.tail.wrapping_add(ELASTIC_SLOTS_MIN);
        let is_charged =
            self.memory.charged_until == charged_until || self.memory.charge(ELASTIC_SLOTS_MIN as usize * SLOT_BYTES);
        if is_charged {
            self.memory.charged_until = charged_until;
        }
        is_charged
    }

    /// Charges slots that are used for the first time since their memory was released; returns how many may be used.
    fn charge_slots(&mut self, cursor: &Cursor, wanted_slots: u64) -> u64 {
        if !self.is_first_lap(cursor) {
            return u64::MAX;
        }
        let end = self.entry(cursor).wrapping_add(self.ring(cursor).slots);
        self.memory.charged_until = self.charged_until(cursor);
        while self.memory.charged_until != end && self.charged_slots(cursor) < wanted_slots {
            let slots = self.next_charge_slots(cursor);
            if self.is_growth_forbidden || !self.memory.charge(slots as usize * SLOT_BYTES) {
                self.is_growth_forbidden = true;
                break;
            }
            self.memory.charged_until = self.memory.charged_until.wrapping_add(slots);
        }
        if self.memory.charged_until == end { u64::MAX } else { self.charged_slots(cursor) }
    }

    /// Returns the number of slots that are charged next.
    fn next_charge_slots(&self, cursor: &Cursor) -> u64 {
        let end = self.entry(cursor).wrapping_add(self.ring(cursor).slots);
        ACCOUNT_SLOTS.min(end.wrapping_sub(self.charged_until(cursor)))
    }

    /// Returns the position up to which the current ring is charged.
    fn charged_until(&self, cursor: &Cursor) -> u64 {
        let entry = self.entry(cursor);
        let is_of_ring = self.memory.charged_until.wrapping_sub(entry) <= self.ring(cursor).slots;
        // Otherwise another process has moved the lane to this ring.
        if is_of_ring { self.memory.charged_until } else { entry }
    }

    /// Returns whether the lane uses slots of its ring for the first time.
    fn is_first_lap(&self, cursor: &Cursor) -> bool {
        cursor.tail.wrapping_sub(self.entry(cursor)) < self.ring(cursor).slots
    }

    /// Returns whether the memory of the next slot is charged, or is that of the small ring.
    fn has_charged_slot(&self, cursor: &Cursor) -> bool {
        cursor.ring == 0 || !self.is_first_lap(cursor) || self.charged_slots(cursor) > 0
    }

    /// Returns the number of charged slots in the first lap of the current ring.
    fn charged_slots(&self, cursor: &Cursor) -> u64 {
        (self.charged_until(cursor).wrapping_sub(cursor.tail) as i64).max(0) as u64
    }

    /// Returns the free slots of the ring, less the slot reserved for a switch record.
    fn elastic_ring_slots(&self, cursor: &Cursor, credit: u64) -> Result<u64, Corrupt> {
        let ring = self.ring(cursor);
        let free = self.free_slots(cursor, credit)?.saturating_sub(1);
        let (to_end, skipped) = (ring.slots_to_end(cursor.tail), ring.slots - ring.slots_used);
        // The positions behind the last used slot of a lap have no slot and are skipped.
        Ok(match free.checked_sub(skipped) {
            _ if free < to_end => free,
            Some(free) if free >= to_end => free,
            _ => to_end.saturating_sub(1),
        })
    }

    /// Returns the lane's capacity.
    pub(super) fn capacity_slots(&self) -> u64 {
        let bytes = self.own_word(CAPACITY);
        let largest = self.layout.elastic.map_or(0, |rings| rings.slots_largest()).max(2 * WAKE_EVERY_SLOTS);
        let slots = bytes.div_ceil(SLOT_BYTES as u64);
        if bytes == 0 { largest } else { slots.clamp(2 * WAKE_EVERY_SLOTS, largest) }
    }

    /// Returns the number of unread slots from which the receiver lags. A sender that prefers waiting never shares
    /// records, and fills its ring with separate ones.
    pub(super) fn lag_slots(&self, capacity_slots: u64) -> u64 {
        if self.prefers_waiting { u64::MAX } else { LAG_SLOTS.min(capacity_slots / LAG_SHARE) }
    }

    /// Returns the maximum number of used slots at which the lane is writable.
    pub(super) fn writable_slots_used(&self, cursor: &Cursor, in_ring: bool) -> u64 {
        let capacity_slots = self.capacity_slots();
        let by_capacity = capacity_slots - capacity_slots / ROOM_SHARE;
        let ring = self.ring(cursor);
        let is_largest = usize::from(cursor.ring) == self.layout.rings_larger();
        if in_ring || self.is_growth_forbidden || is_largest {
            by_capacity.min(ring.slots_used - ring.slots_used / 4)
        } else {
            by_capacity
        }
    }

    /// Returns the position that the receiver must reach before the lane is writable.
    pub(super) fn needed_position(&self, cursor: &Cursor) -> u64 {
        let needed = cursor.tail.wrapping_sub(self.writable_slots_used(cursor, false));
        let entry = self.entry(cursor);
        let is_before_entry = (entry.wrapping_sub(needed) as i64) > 0;
        // Without memory for more of a larger ring the lane returns to the small one, once the receiver has left that.
        let returns = !self.has_charged_slot(cursor) && !self.may_charge(self.next_charge_slots(cursor));
        if returns && is_before_entry { entry } else { needed }
    }

    pub(super) fn is_elastic_writable(&self, cursor: &Cursor, in_ring: bool) -> Result<bool, Corrupt> {
        let limit_slots = self.writable_slots_used(cursor, in_ring);
        let capacity_slots = self.capacity_slots();
        let is_writable = |credit: u64| {
            // Credit between two multiples is returned without a wake-up, so it does not count.
            let used_slots = cursor.tail.wrapping_sub(credit & !(WAKE_EVERY_SLOTS - 1));
            if used_slots > limit_slots.max(WAKE_EVERY_SLOTS) {
                return Ok(false);
            }
            let found = self.available_room(cursor, credit, capacity_slots)?;
            let placement = self.placement(cursor, &found, 1, in_ring, |slots| self.may_charge(slots));
            Ok(placement != Placement::Wait)
        };
        Ok(is_writable(self.own_word(CREDIT_SEEN))? || is_writable(self.reload_credit(cursor)?)?)
    }
}
