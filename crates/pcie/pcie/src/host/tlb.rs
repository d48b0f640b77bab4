//! A cache of address translations: the IOTLB of an IOMMU, or the TLB of a device with Address Translation Services.

use sim::{Random, Time};

use super::parameters::Replacement;

/// Marks an absent slot or page.
const NONE: u32 = u32::MAX;

/// A cache of translations.
#[derive(Clone, Debug)]
pub struct Tlb {
    ways: u32,
    sets: u32,
    replacement: Replacement,
    random: Random,
    /// For each page of the window, its slot or [`NONE`].
    slot_of_page: Vec<u32>,
    slots: Vec<Slot>,
    /// Number of slots in use in each set.
    filled: Vec<u32>,
    /// Use counter, whose value is the stamp of the next use.
    uses: u64,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    page: u32,
    used: u64,
    /// Time from which the translation is known.
    known: Time,
}

impl Tlb {
    /// Returns an empty TLB of this many entries for a window of this many pages; 0 ways are fully associative.
    pub fn new(entries: u32, ways: u32, replacement: Replacement, pages: usize, random: Random) -> Self {
        let ways = if ways == 0 { entries } else { ways };
        let sets = entries / ways;
        Self {
            ways,
            sets,
            replacement,
            random,
            slot_of_page: vec![NONE; pages],
            slots: vec![Slot { page: NONE, used: 0, known: Time::ZERO }; entries as usize],
            filled: vec![0; sets as usize],
            uses: 0,
        }
    }

    /// Returns the time from which the translation of `page` is known, in the future if it was requested and has not
    /// arrived; `None` for a miss.
    pub fn lookup(&mut self, page: u32) -> Option<Time> {
        self.uses += 1;
        let slot = self.slots.get_mut(self.slot_of_page[page as usize] as usize)?;
        slot.used = self.uses;
        Some(slot.known)
    }

    /// Enters the translation of `page`, which is known from `known` on, in place of another one if its set is full.
    pub fn insert(&mut self, page: u32, known: Time) {
        let slot = self.victim(page);
        let old = self.slots[slot as usize].page;
        if old != NONE {
            self.slot_of_page[old as usize] = NONE;
        }
        self.slots[slot as usize] = Slot { page, used: self.uses, known };
        self.slot_of_page[page as usize] = slot;
    }

    /// Chooses the slot for `page`: an empty one of its set if there is one, otherwise a victim.
    fn victim(&mut self, page: u32) -> u32 {
        let set = page % self.sets;
        let first = set * self.ways;
        let filled = &mut self.filled[set as usize];
        if *filled < self.ways {
            *filled += 1;
            return first + *filled - 1;
        }
        match self.replacement {
            Replacement::Random => first + self.random.below(u64::from(self.ways)) as u32,
            Replacement::Lru => {
                let slots = (first..).zip(&self.slots[first as usize..(first + self.ways) as usize]);
                slots.min_by_key(|(_, slot)| slot.used).map_or(first, |(slot, _)| slot)
            }
        }
    }
}
