//! The memory of a lane's larger rings: its charge to a budget, and its release.

use super::{Producer, RINGS_USED, TAIL_LIMIT};
use crate::layout::Ring;
use crate::record::SLOT_BYTES;
use fabric::{Inbound, Outbound};

/// A process-wide limit on the memory of lanes beyond their small rings.
pub trait Budget: Sync {
    /// Charges `bytes`. Returns `false`, and charges nothing, if fewer are left.
    fn charge(&self, bytes: usize) -> bool;
    /// Returns whether `bytes` could be charged now.
    fn has_room(&self, bytes: usize) -> bool;
    /// Returns `bytes` that were charged.
    fn release(&self, bytes: usize);
}

/// A budget without a limit.
#[derive(Debug)]
struct Unlimited;

impl Budget for Unlimited {
    fn charge(&self, _bytes: usize) -> bool {
        true
    }

    fn has_room(&self, _bytes: usize) -> bool {
        true
    }

    fn release(&self, _bytes: usize) {}
}

/// The result of [`Producer::release_memory`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryRelease {
    /// No larger ring was in use.
    NothingUsed,
    /// Everything was read, and the memory of the larger rings was released.
    Released,
    /// Nothing was released, because something is unread.
    InUse,
}

/// Memory that a lane has charged to a budget.
pub(super) struct Account {
    budget: &'static dyn Budget,
    charged_bytes: usize,
    /// Position up to which the current ring is charged. A value outside the ring's first lap belongs to an earlier
    /// ring.
    pub(super) charged_until: u64,
}

impl std::fmt::Debug for Account {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes charged, up to position {}", self.charged_bytes, self.charged_until)
    }
}

impl Account {
    /// Returns an account of a budget without a limit.
    pub(super) const fn unlimited() -> Self {
        Self { budget: &Unlimited, charged_bytes: 0, charged_until: 0 }
    }

    pub(super) fn charge(&mut self, bytes: usize) -> bool {
        let is_charged = self.budget.charge(bytes);
        self.charged_bytes += if is_charged { bytes } else { 0 };
        is_charged
    }

    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.budget.has_room(bytes)
    }

    fn release(&mut self) {
        let charged_bytes = std::mem::take(&mut self.charged_bytes);
        if charged_bytes > 0 {
            self.budget.release(charged_bytes);
        }
        self.charged_until = 0;
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.release();
    }
}

impl<O: Outbound, I: Inbound> Producer<O, I> {
    /// Charges the memory of larger rings to `budget`, until it is released or the lane is dropped.
    pub fn set_budget(&mut self, budget: &'static dyn Budget) {
        self.memory.release();
        self.memory.budget = budget;
    }

    /// Returns the memory of larger rings to the system if everything is read; the lane then continues in its small
    /// ring. Takes one or two system calls for each ring that was used. The page at the receiver's position may be
    /// kept.
    pub fn release_memory(&mut self) -> MemoryRelease {
        let used = self.own_word(RINGS_USED) & !1;
        if self.layout.elastic.is_none() || used == 0 {
            return MemoryRelease::NothingUsed;
        }
        if !self.is_drained() {
            return MemoryRelease::InUse;
        }
        // The slot at the receiver's position is kept: if its record was open, the receiver loads the header once more.
        let kept_offset = self.ring(&self.cursor()).slot_offset(self.credit());
        self.discard_rings(used, kept_offset);
        MemoryRelease::Released
    }

    /// Returns the memory of larger rings to the system although records in it may be unread: for a lane that restarts.
    pub(super) fn discard_all_rings(&mut self) {
        let used = self.own_word(RINGS_USED) & !1;
        if self.layout.elastic.is_some() && used != 0 {
            self.discard_rings(used, self.layout.forward_offset);
        }
    }

    /// Returns the memory of the rings in the bitmap `used` to the system, except for the slot at `kept_offset`.
    fn discard_rings(&mut self, used: u64, kept_offset: usize) {
        let is_used = |ring: &usize| used >> ring & 1 != 0;
        for ring in (1..=self.layout.rings_larger()).filter(is_used) {
            let Ring { offset, slots, .. } = Ring::of(&self.layout, ring as u8);
            let span = offset..offset + slots as usize * SLOT_BYTES;
            let kept = kept_offset.clamp(span.start, span.end)..(kept_offset + SLOT_BYTES).clamp(span.start, span.end);
            for part in [span.start..kept.start, kept.end..span.end].iter().filter(|part| !part.is_empty()) {
                self.outbound.discard(part.start, part.len());
            }
        }
        self.set_own_word(RINGS_USED, 0);
        // Without a known limit the next write computes its room, and moves to the small ring.
        self.set_own_word(TAIL_LIMIT, 0);
        self.memory.release();
        self.is_growth_forbidden = false;
    }

    /// Returns the bytes of memory that the lane has charged to its budget.
    pub fn memory_bytes(&self) -> usize {
        self.memory.charged_bytes
    }
}
