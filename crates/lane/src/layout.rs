//! Where the parts of a lane lie in the two windows.

use crate::SLOT_BYTES;
use volmem::CACHE_LINE_BYTES as LINE;

/// Offsets of a lane's parts. The forward part lies in the receiver's window, the back part in the sender's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Forward block and receiver's cursor, then the rings: offset in the receiver's window.
    pub forward_offset: usize,
    /// Back block and sender's cursor: offset in the sender's window.
    pub back_offset: usize,
    /// Offset of the small ring in the receiver's window.
    pub small_offset: usize,
    /// Slots of the small ring: a power of two, at least 8.
    pub small_slots: u64,
    /// Offset of the big ring in the receiver's window.
    pub big_offset: usize,
    /// Slots of the big ring: a power of two larger than the small ring's, or 0 for a lane without one.
    pub big_slots: u64,
}

impl Layout {
    /// Bytes of the block at `forward_offset`: sender's words, then the receiver's cursor.
    pub const FORWARD_BYTES: usize = 3 * LINE;
    /// Bytes of the block at `back_offset`: receiver's words, then the sender's cursor.
    pub const BACK_BYTES: usize = 3 * LINE;

    /// A lane packed at the start of both windows, for lanes that stand alone.
    pub const fn packed(small_slots: u64, big_slots: u64) -> Self {
        let small_offset = 512;
        Self {
            forward_offset: 0,
            back_offset: Self::FORWARD_BYTES,
            small_offset,
            small_slots,
            big_offset: small_offset + small_slots as usize * SLOT_BYTES,
            big_slots,
        }
    }

    /// Bytes a window must have for this layout.
    pub const fn window_bytes(&self) -> usize {
        self.big_offset + self.big_slots as usize * SLOT_BYTES
    }

    /// What the two ends rely on: every part inside its window, on cache lines, and no part on another.
    pub(crate) fn check(&self, receivers_bytes: usize, senders_bytes: usize) {
        assert!(
            self.small_slots.is_power_of_two() && self.small_slots >= 8,
            "small ring of {} slots",
            self.small_slots
        );
        let big_fits = self.big_slots == 0 || (self.big_slots.is_power_of_two() && self.big_slots > self.small_slots);
        assert!(big_fits, "big ring of {} slots", self.big_slots);
        let forward = Part::new(self.forward_offset, Self::FORWARD_BYTES as u64);
        let small = Part::of_slots(self.small_offset, self.small_slots);
        let big = Part::of_slots(self.big_offset, self.big_slots);
        for part in [forward, small, big] {
            part.check_inside(receivers_bytes);
        }
        Part::new(self.back_offset, Self::BACK_BYTES as u64).check_inside(senders_bytes);
        let apart = forward.is_apart(small) && forward.is_apart(big) && small.is_apart(big);
        assert!(apart, "parts of a layout overlap: {self:?}");
    }

    // Written by the sender, in the receiver's window.
    pub(crate) const fn fin(&self) -> usize {
        self.forward_offset
    }
    pub(crate) const fn producer_asleep(&self) -> usize {
        self.forward_offset + LINE
    }
    // The receiver's own, in its window.
    pub(crate) const fn consumer_cursor(&self) -> usize {
        self.forward_offset + 2 * LINE
    }
    // Written by the receiver, in the sender's window.
    pub(crate) const fn credit(&self) -> usize {
        self.back_offset
    }
    pub(crate) const fn consumer_asleep(&self) -> usize {
        self.back_offset + LINE
    }
    pub(crate) const fn receiver_capacity(&self) -> usize {
        self.back_offset + LINE + 8
    }
    // The sender's own, in its window.
    pub(crate) const fn producer_cursor(&self) -> usize {
        self.back_offset + 2 * LINE
    }
}

/// A span that the layout claims, before anyone knows that it is in a window.
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

    fn is_apart(self, other: Self) -> bool {
        self.is_empty() || other.is_empty() || self.end <= other.start || other.end <= self.start
    }

    fn is_empty(self) -> bool {
        self.start == self.end
    }
}

/// One of the two rings of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ring {
    pub offset: usize,
    pub slots: u64,
}

impl Ring {
    pub(crate) fn of(layout: &Layout, big: bool) -> Self {
        if big && layout.big_slots != 0 {
            Self { offset: layout.big_offset, slots: layout.big_slots }
        } else {
            Self { offset: layout.small_offset, slots: layout.small_slots }
        }
    }

    #[inline]
    pub(crate) fn slot_offset(&self, position: u64) -> usize {
        self.offset + (position & (self.slots - 1)) as usize * SLOT_BYTES
    }

    /// Slots from `position` to the end of the ring: a record does not wrap.
    #[inline]
    pub(crate) fn slots_to_end(&self, position: u64) -> u64 {
        self.slots - (position & (self.slots - 1))
    }
}
