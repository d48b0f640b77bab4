//! The offsets of a lane's parts in the two windows.

use crate::SLOT_BYTES;
use crate::producer::WAKE_EVERY_SLOTS;
use volmem::CACHE_LINE_BYTES as LINE;

/// Maximum number of larger rings of an elastic lane. Under loom they are fewer and smaller, because loom tracks each
/// word.
pub const ELASTIC_RINGS: usize = if cfg!(loom) { 2 } else { 10 };
/// Number of slots of the smallest larger ring (32 KiB). Each next ring has twice as many; the last has 16 MiB.
pub const ELASTIC_SLOTS_MIN: u64 = if cfg!(loom) { 16 } else { 512 };

/// The offsets of a lane's parts: the forward part lies in the memory that the sender writes and the receiver reads,
/// the back part in the memory that the receiver writes and the sender reads. Each endpoint's own state lies in
/// neither.
///
/// A lane has a small ring. In addition it has either no other ring, or one big ring to which it moves permanently, or
/// the [`LargerRings`] of an *elastic* lane, whose sender moves to a larger ring when it needs room, and
/// back to the small ring once everything is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Offset of the forward block, in the memory that the sender writes.
    pub forward_offset: usize,
    /// Offset of the back block, in the memory that the receiver writes.
    pub back_offset: usize,
    /// Offset of the small ring, in the memory that the sender writes.
    pub small_offset: usize,
    /// Slots of the small ring: a power of two, at least 8.
    pub small_slots: u64,
    /// Number of those slots that are used in each lap, at least half: positions skip the others. This lets a ring of
    /// any size be indexed with a mask.
    pub small_slots_used: u64,
    /// Offset of the big ring, in the memory that the sender writes.
    pub big_offset: usize,
    /// Slots of the big ring: a power of two larger than the small ring's, or 0 for a lane without one.
    pub big_slots: u64,
    /// The larger rings of an elastic lane, which has no big ring.
    pub elastic: Option<LargerRings>,
}

/// The offsets of the larger rings of an elastic lane in the memory that the sender writes: ring `index` (of
/// [`ELASTIC_RINGS`]) lies at `origin + (unit << index)`. Either the rings of one lane are contiguous, or the rings of
/// the same size of several lanes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LargerRings {
    /// Base of the rings' offsets. Additions wrap, so the base may lie before the window.
    pub origin: usize,
    /// Bytes from the base to the first ring.
    pub unit: usize,
    /// Number of rings, from 1 to [`ELASTIC_RINGS`].
    pub count: u8,
}

impl LargerRings {
    /// Bytes of the first ring.
    pub const BYTES_MIN: usize = ELASTIC_SLOTS_MIN as usize * SLOT_BYTES;
    /// Bytes of [`ELASTIC_RINGS`] rings together.
    pub const BYTES: usize = Self::bytes_together(ELASTIC_RINGS as u8);

    /// Returns `count` contiguous rings from `offset` on.
    pub const fn in_a_row(offset: usize, count: u8) -> Self {
        Self { origin: offset.wrapping_sub(Self::BYTES_MIN), unit: Self::BYTES_MIN, count }
    }

    /// Returns the smallest number of rings of which the largest holds `capacity_bytes`, or [`ELASTIC_RINGS`].
    pub const fn count_for(capacity_bytes: usize) -> u8 {
        let mut count = 1;
        while (count as usize) < ELASTIC_RINGS && Self::bytes_of(count as usize - 1) < capacity_bytes {
            count += 1;
        }
        count
    }

    /// Returns the bytes of `count` rings together.
    pub const fn bytes_together(count: u8) -> usize {
        Self::BYTES_MIN * ((1 << count) - 1)
    }

    /// Returns the slots of the largest ring.
    #[inline]
    pub(crate) const fn slots_largest(&self) -> u64 {
        ELASTIC_SLOTS_MIN << (self.count - 1)
    }

    /// Returns the offset of a ring.
    #[inline]
    pub const fn offset_of(&self, index: usize) -> usize {
        self.origin.wrapping_add(self.unit << index)
    }

    /// Returns the bytes of a ring.
    #[inline]
    pub const fn bytes_of(index: usize) -> usize {
        Self::BYTES_MIN << index
    }
}

impl Layout {
    /// Bytes of the block at `forward_offset`: the end of the stream, then the sleep of the sender.
    pub const FORWARD_BYTES: usize = 2 * LINE;
    /// Bytes of the block at `back_offset`: credit, then the sleep of the receiver.
    pub const BACK_BYTES: usize = 2 * LINE;
    /// Offset in the forward block of [`Layout::SPARE_BESIDE_FIN_WORDS`] words that the lane does not use: in the line
    /// that a receiver loads when it finds no record. The sender's side may write them.
    pub const SPARE_BESIDE_FIN: usize = 8;
    /// See [`Layout::SPARE_BESIDE_FIN`].
    pub const SPARE_BESIDE_FIN_WORDS: usize = 7;
    /// Offset in either block of [`Layout::SPARE_BESIDE_SLEEP_WORDS`] words that the lane does not use: in the line
    /// with the announcement of sleep, which a sender loads with every message. The side that writes the block may
    /// write them.
    pub const SPARE_BESIDE_SLEEP: usize = LINE + 16;
    /// See [`Layout::SPARE_BESIDE_SLEEP`].
    pub const SPARE_BESIDE_SLEEP_WORDS: usize = 6;
    /// Bytes of a sender's own state.
    pub const PRODUCER_STATE_BYTES: usize = 2 * LINE;
    /// Bytes of a receiver's own state.
    pub const CONSUMER_STATE_BYTES: usize = LINE;

    /// Returns the layout of a single lane at the start of both windows.
    pub const fn packed(small_slots: u64, big_slots: u64) -> Self {
        let small_offset = 512;
        Self {
            forward_offset: 0,
            back_offset: Self::FORWARD_BYTES,
            small_offset,
            small_slots,
            small_slots_used: small_slots,
            big_offset: small_offset + small_slots as usize * SLOT_BYTES,
            big_slots,
            elastic: None,
        }
    }

    /// Returns the bytes that each window must have for this layout.
    pub const fn window_bytes(&self) -> usize {
        match self.elastic {
            None => self.big_offset + self.big_slots as usize * SLOT_BYTES,
            Some(rings) => {
                let last = rings.count as usize - 1;
                rings.offset_of(last) + LargerRings::bytes_of(last)
            }
        }
    }

    /// Checks what both endpoints rely on: each part lies inside its window and on cache lines, and parts do not
    /// overlap.
    pub(crate) fn check(&self, forward_bytes: usize, back_bytes: usize) {
        assert!(
            self.small_slots.is_power_of_two() && self.small_slots >= 8,
            "small ring of {} slots",
            self.small_slots
        );
        let is_used = (self.small_slots / 2..=self.small_slots).contains(&self.small_slots_used);
        assert!(is_used, "{} slots used of {}", self.small_slots_used, self.small_slots);
        assert!(self.elastic.is_none() || self.big_slots == 0, "an elastic lane with a big ring");
        let has_rings = self.elastic.is_none_or(|rings| (1..=ELASTIC_RINGS).contains(&rings.count.into()));
        assert!(has_rings, "{} larger rings", self.rings_larger());
        let big_fits = self.big_slots == 0 || (self.big_slots.is_power_of_two() && self.big_slots > self.small_slots);
        assert!(big_fits, "big ring of {} slots", self.big_slots);
        let forward = Part::new(self.forward_offset, Self::FORWARD_BYTES as u64);
        let rings = (0..=self.rings_larger()).map(|ring| Ring::of(self, ring as u8));
        let mut parts = vec![forward];
        parts.extend(rings.map(|ring| Part::of_slots(ring.offset, ring.slots_used)));
        for (index, part) in parts.iter().enumerate() {
            part.check_inside(forward_bytes);
            let is_disjoint = parts[..index].iter().all(|other| part.is_disjoint(*other));
            assert!(is_disjoint, "parts of a layout overlap: {self:?}");
        }
        Part::new(self.back_offset, Self::BACK_BYTES as u64).check_inside(back_bytes);
    }

    /// Returns the number of rings in addition to the small one.
    #[inline]
    pub(crate) fn rings_larger(&self) -> usize {
        self.elastic.map_or(usize::from(self.big_slots != 0), |rings| rings.count.into())
    }

    /// Returns the number of slots of all rings together.
    #[inline]
    pub(crate) fn slots_total(&self) -> u64 {
        self.small_slots + self.elastic.map_or(self.big_slots, |rings| 2 * rings.slots_largest() - ELASTIC_SLOTS_MIN)
    }

    /// Returns the number of which the positions at which a lane restarts are multiples.
    pub(crate) fn restart_alignment(&self) -> u64 {
        self.small_slots.max(WAKE_EVERY_SLOTS)
    }

    // Written by the sender.
    pub(crate) const fn fin(&self) -> usize {
        self.forward_offset
    }
    /// Offset of the number of the sender's announcement, which the position that it waits for follows.
    pub(crate) const fn producer_asleep(&self) -> usize {
        self.forward_offset + LINE
    }
    // Written by the receiver.
    pub(crate) const fn credit(&self) -> usize {
        self.back_offset
    }
    pub(crate) const fn open_read(&self) -> usize {
        self.back_offset + 8
    }
    pub(crate) const fn consumer_asleep(&self) -> usize {
        self.back_offset + LINE
    }
}

/// A span of the layout that has not been checked against its window.
#[derive(Debug, Clone, Copy)]
struct Part {
    start: u64,
    end: u64,
}

impl Part {
    fn new(offset: usize, len_bytes: u64) -> Self {
        assert!(offset.is_multiple_of(LINE), "a part of a layout at {offset}: not on a cache line");
        let start = offset as u64;
        Self { start, end: start.saturating_add(len_bytes) }
    }

    fn of_slots(offset: usize, slots: u64) -> Self {
        Self::new(offset, slots.saturating_mul(SLOT_BYTES as u64))
    }

    fn check_inside(self, window_bytes: usize) {
        assert!(
            self.is_empty() || self.end <= window_bytes as u64,
            "part {self:?} of a layout in a window of {window_bytes} bytes"
        );
    }

    fn is_disjoint(self, other: Self) -> bool {
        self.is_empty() || other.is_empty() || self.end <= other.start || other.end <= self.start
    }

    fn is_empty(self) -> bool {
        self.start == self.end
    }
}

/// One of the rings of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ring {
    pub offset: usize,
    /// Number of positions in a lap, a power of two.
    pub slots: u64,
    /// Number of those positions that have a slot.
    pub slots_used: u64,
}

impl Ring {
    /// Returns ring `number` of a lane, where 0 is the small one. A peer may have written the number: one that no ring
    /// has selects the largest.
    #[inline(always)] // For the small ring this is a single comparison.
    pub(crate) fn of(layout: &Layout, number: u8) -> Self {
        if number == 0 {
            return Self {
                offset: layout.small_offset,
                slots: layout.small_slots,
                slots_used: layout.small_slots_used,
            };
        }
        Self::larger(layout, number)
    }

    #[inline]
    fn larger(layout: &Layout, number: u8) -> Self {
        let (offset, slots) = match &layout.elastic {
            Some(rings) => {
                let index = usize::from(number.min(rings.count) - 1);
                (rings.offset_of(index), ELASTIC_SLOTS_MIN << index)
            }
            None if layout.big_slots != 0 => (layout.big_offset, layout.big_slots),
            None => return Self::of(layout, 0),
        };
        Self { offset, slots, slots_used: slots }
    }

    #[inline]
    pub(crate) fn slot_offset(&self, position: u64) -> usize {
        self.offset + (position & (self.slots - 1)) as usize * SLOT_BYTES
    }

    /// Returns the number of slots from `position` to the end of the lap: a record does not wrap.
    #[inline]
    pub(crate) fn slots_to_end(&self, position: u64) -> u64 {
        self.slots_used.saturating_sub(position & (self.slots - 1))
    }

    /// Returns the first position from `position` on that has a slot.
    #[inline(always)]
    pub(crate) fn used_position(&self, position: u64) -> u64 {
        if position & (self.slots - 1) < self.slots_used {
            position
        } else {
            (position | (self.slots - 1)).wrapping_add(1)
        }
    }
}
