//! The side that reads.
#![allow(unsafe_code)] // One call of the same code, compiled for processors that count bits.

use std::net::Ipv6Addr;
use std::sync::atomic::{Ordering, fence};

use super::{
    LEAVES_INLINE, LEVELS_MAX, NODE, ROOT_BITS, STRIDE_BITS, Table, UNIT_WORDS, WORD_BLOCK, WORD_CHILDREN, WORD_LEAVES,
    WORD_LEAVES_INLINE, WORD_STARTS,
};
use crate::GroupId;
use crate::memory::prefetch;

/// Lookups in flight at a time.
const LANES: usize = 32;

/// A lookup under way.
#[derive(Clone, Copy, Default)]
struct Lane {
    /// What of the address is not yet decided, from the highest bit on.
    bits: u128,
    /// The node that decides next.
    unit: u32,
    /// Whose it is.
    index: u32,
}

/// What a node decides.
enum Step {
    Child(u32),
    Leaf(u16),
}

impl Table {
    /// The group of the longest prefix that covers the address.
    #[inline]
    pub fn lookup(&self, address: Ipv6Addr) -> Option<GroupId> {
        let mut group = [None];
        self.lookup_batch(&[address.to_bits()], &mut group);
        group[0]
    }

    /// [`Table::lookup`] of many, that do not wait for one another's memory: `groups` gets as many as there are
    /// `addresses`. More of these than of those are a bug of the caller's.
    pub fn lookup_batch(&self, addresses: &[u128], groups: &mut [Option<GroupId>]) {
        assert!(addresses.len() <= groups.len(), "{} groups for {} addresses", groups.len(), addresses.len());
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("popcnt") && is_x86_feature_detected!("bmi2") {
            // SAFETY: the processor has both, as was just asked.
            return unsafe { self.lookup_batch_counting(addresses, groups) };
        }
        self.lookup_batch_any(addresses, groups);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "popcnt,bmi2")]
    fn lookup_batch_counting(&self, addresses: &[u128], groups: &mut [Option<GroupId>]) {
        self.lookup_batch_any(addresses, groups);
    }

    #[inline(always)]
    fn lookup_batch_any(&self, addresses: &[u128], groups: &mut [Option<GroupId>]) {
        for (addresses, groups) in addresses.chunks(LANES).zip(groups.chunks_mut(LANES)) {
            let mut lanes = [Lane::default(); LANES];
            let mut active = self.begin(addresses, groups, &mut lanes);
            // Each round looks at a node of every lookup that is under way, and asks for its next one: by the time that
            // comes around, it is there.
            for _ in 0..LEVELS_MAX {
                if active == 0 {
                    break;
                }
                active = self.round(&mut lanes, active, groups);
            }
            assert!(active == 0, "a trie of more levels than an address has bits for");
            // What a group is was stored before a route to it was.
            fence(Ordering::Acquire);
        }
    }

    /// Looks at the root; lanes are what is not decided by it. Says how many those are.
    #[inline(always)]
    fn begin(&self, addresses: &[u128], groups: &mut [Option<GroupId>], lanes: &mut [Lane; LANES]) -> usize {
        let mut entries = [0; LANES];
        for (entry, address) in entries.iter_mut().zip(addresses) {
            *entry = self.root[(address >> (128 - ROOT_BITS)) as usize].load(Ordering::Relaxed);
        }
        // Nodes were stored before the root's entry was.
        fence(Ordering::Acquire);
        let mut active = 0;
        for (index, ((entry, address), group)) in entries.iter().zip(addresses).zip(groups).enumerate() {
            if entry & NODE == 0 {
                *group = GroupId::from_entry(*entry as u16);
                continue;
            }
            let unit = entry & !NODE;
            prefetch(&self.units[unit as usize * UNIT_WORDS]);
            lanes[active] = Lane { bits: address << ROOT_BITS, unit, index: index as u32 };
            active += 1;
        }
        active
    }

    /// One node further in the first `active` lanes; those that are still under way come to the front.
    #[inline(always)]
    fn round(&self, lanes: &mut [Lane; LANES], active: usize, groups: &mut [Option<GroupId>]) -> usize {
        let mut kept = 0;
        for at in 0..active {
            let mut lane = lanes[at];
            match self.step(lane.unit, (lane.bits >> (128 - STRIDE_BITS)) as u32) {
                Step::Child(unit) => {
                    prefetch(&self.units[unit as usize * UNIT_WORDS]);
                    lane.unit = unit;
                    lane.bits <<= STRIDE_BITS;
                    lanes[kept] = lane;
                    kept += 1;
                }
                Step::Leaf(entry) => groups[lane.index as usize] = GroupId::from_entry(entry),
            }
        }
        kept
    }

    /// What the node at `unit` decides for `slot`, 0 to 63.
    #[inline(always)]
    fn step(&self, unit: u32, slot: u32) -> Step {
        let at = unit as usize * UNIT_WORDS;
        let node = &self.units[at..at + UNIT_WORDS];
        let word = |index: usize| node[index].load(Ordering::Relaxed);
        let children = word(WORD_CHILDREN);
        // Slots up to this one, and it.
        let up_to = u64::MAX >> (63 - slot);
        let before = (children & up_to).count_ones();
        if children >> slot & 1 != 0 {
            return Step::Child(word(WORD_BLOCK) as u32 + before - 1);
        }
        let leaf = (word(WORD_STARTS) & up_to).count_ones() as usize - 1;
        if leaf < LEAVES_INLINE {
            return Step::Leaf((word(WORD_LEAVES_INLINE) >> (16 * leaf)) as u16);
        }
        let leaf = leaf - LEAVES_INLINE;
        let block = (word(WORD_BLOCK) as usize + children.count_ones() as usize) * UNIT_WORDS;
        let leaves = self.units[block + leaf / WORD_LEAVES].load(Ordering::Relaxed);
        Step::Leaf((leaves >> (16 * (leaf % WORD_LEAVES))) as u16)
    }
}
