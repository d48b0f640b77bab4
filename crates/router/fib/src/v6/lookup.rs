//! Lookups.
#![allow(unsafe_code)] // One call of a function compiled for processors with POPCNT and BMI2.

use std::net::Ipv6Addr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::{
    INLINE_LEAVES, LEAVES_PER_WORD, LEVELS_MAX, NODE_FLAG, ROOT_BITS, STRIDE_BITS, Table, UNIT_WORDS, WORD_BLOCK,
    WORD_INLINE_LEAVES, WORD_LEAFVEC, WORD_VECTOR,
};
use crate::GroupId;
use crate::memory::prefetch;

/// Number of lookups in flight.
const IN_FLIGHT_MAX: usize = 32;

/// Bits of the high half of an address, and the levels that use only this half: those of nearly all routes.
const HIGH_HALF_BITS: u8 = 64;
const LEVELS_IN_HIGH_HALF: usize = ((HIGH_HALF_BITS - ROOT_BITS) / STRIDE_BITS) as usize;

/// A node, or 16 leaves.
type Unit = [AtomicU64; UNIT_WORDS];

/// A lookup that is not finished.
#[derive(Clone, Copy, Default)]
struct Pending {
    /// The next node.
    unit: u32,
    /// Index of the lookup in the batch, below [`IN_FLIGHT_MAX`].
    owner: u32,
}

/// A batch of lookups that advance level by level, so that all of them use the same address bits in a step.
struct BatchLookup<'a> {
    units: &'a [Unit],
    addresses: &'a [u128],
    /// High halves of the addresses.
    high: [u64; IN_FLIGHT_MAX],
    /// Unfinished lookups, at the front.
    pending: [Pending; IN_FLIGHT_MAX],
    /// Results.
    entries: [u16; IN_FLIGHT_MAX],
}

impl Table {
    /// Returns the group of the longest prefix that contains the address.
    #[inline]
    pub fn lookup(&self, address: Ipv6Addr) -> Option<GroupId> {
        let mut group = [None];
        self.lookup_batch(&[address.to_bits()], &mut group);
        group[0]
    }

    /// Looks up many addresses whose memory accesses overlap; `groups[i]` becomes the group of `addresses[i]`. Panics
    /// if `groups` is shorter than `addresses`.
    pub fn lookup_batch(&self, addresses: &[u128], groups: &mut [Option<GroupId>]) {
        assert!(addresses.len() <= groups.len(), "{} groups for {} addresses", groups.len(), addresses.len());
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("popcnt") && is_x86_feature_detected!("bmi2") {
            // SAFETY: the condition above has checked that the processor has POPCNT and BMI2, which are all that the
            // function requires.
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
        let (units, _) = self.units.as_chunks::<UNIT_WORDS>();
        // An array of constant length, so that the compiler omits bounds checks.
        let root: &[AtomicU32; 1 << ROOT_BITS] = self.root[..].try_into().expect("the length of the root");
        let (pending, entries) = ([Pending::default(); IN_FLIGHT_MAX], [0; IN_FLIGHT_MAX]);
        let mut batch = BatchLookup { units, addresses, high: [0; IN_FLIGHT_MAX], pending, entries };
        for (addresses, groups) in addresses.chunks(IN_FLIGHT_MAX).zip(groups.chunks_mut(IN_FLIGHT_MAX)) {
            batch.addresses = addresses;
            batch.run(root);
            // Pairs with the release store of a route, which follows the store of its group.
            fence(Ordering::Acquire);
            for (group, entry) in groups.iter_mut().zip(&batch.entries).take(addresses.len()) {
                *group = GroupId::from_entry(*entry);
            }
        }
    }
}

impl BatchLookup<'_> {
    /// Advances all unfinished lookups by one node per step and prefetches their next nodes, which arrive in the cache
    /// while the other lookups advance.
    #[inline(always)]
    fn run(&mut self, root: &[AtomicU32; 1 << ROOT_BITS]) {
        let mut active = self.lookup_root(root);
        for level in 0..LEVELS_IN_HIGH_HALF {
            if active == 0 {
                return;
            }
            let shift = HIGH_HALF_BITS - ROOT_BITS - STRIDE_BITS * (level as u8 + 1);
            active = self.step(active, |batch, owner| (batch.high[owner] >> shift) as u32 & 63);
        }
        for level in LEVELS_IN_HIGH_HALF..LEVELS_MAX {
            if active == 0 {
                return;
            }
            let decided = ROOT_BITS + STRIDE_BITS * level as u8;
            let slot = |batch: &Self, owner: usize| (batch.addresses[owner] << decided >> (128 - STRIDE_BITS)) as u32;
            active = self.step(active, slot);
        }
        assert!(active == 0, "the trie has more levels than an address has bits");
    }

    /// Looks up the root entries, and returns the number of lookups that need a node.
    #[inline(always)]
    fn lookup_root(&mut self, root: &[AtomicU32; 1 << ROOT_BITS]) -> usize {
        let mut found = [0; IN_FLIGHT_MAX];
        // Independent loads, whose cache misses overlap.
        for ((found, high), address) in found.iter_mut().zip(&mut self.high).zip(self.addresses) {
            *high = (address >> HIGH_HALF_BITS) as u64;
            *found = root[(*high >> (HIGH_HALF_BITS - ROOT_BITS)) as usize].load(Ordering::Relaxed);
        }
        // Pairs with the release store of a root entry, which follows the stores of its nodes.
        fence(Ordering::Acquire);
        let mut active = 0;
        for (owner, found) in found.into_iter().enumerate().take(self.addresses.len()) {
            // The result if the entry is a group; if it is a node, a later step overwrites the result.
            self.entries[owner] = found as u16;
            let unit = found & !NODE_FLAG;
            prefetch(self.units, unit as usize);
            self.pending[active % IN_FLIGHT_MAX] = Pending { unit, owner: owner as u32 };
            active += usize::from(found & NODE_FLAG != 0);
        }
        active
    }

    /// Advances the first `active` pending lookups by one node, and moves those that are still unfinished to the front.
    /// `slot` returns the slot, of 64, that an address selects at this level. Returns the number of unfinished lookups.
    #[inline(always)]
    fn step(&mut self, active: usize, slot: impl Fn(&Self, usize) -> u32) -> usize {
        let mut kept = 0;
        for at in 0..active.min(IN_FLIGHT_MAX) {
            let Pending { unit, owner } = self.pending[at];
            let slot = slot(self, owner as usize % IN_FLIGHT_MAX);
            let node = &self.units[unit as usize];
            let children = node[WORD_VECTOR].load(Ordering::Relaxed);
            // All slots up to and including this one.
            let up_to = u64::MAX >> (63 - slot);
            if children >> slot & 1 != 0 {
                let block = node[WORD_BLOCK].load(Ordering::Relaxed) as u32;
                let unit = block.wrapping_add((children & up_to).count_ones()).wrapping_sub(1);
                prefetch(self.units, unit as usize);
                self.pending[kept % IN_FLIGHT_MAX] = Pending { unit, owner };
                kept += 1;
            } else {
                self.entries[owner as usize % IN_FLIGHT_MAX] = self.leaf(node, children, up_to);
            }
        }
        kept
    }

    /// Returns the leaf of the last slot in `up_to`, which has no child.
    #[inline(always)]
    fn leaf(&self, node: &Unit, children: u64, up_to: u64) -> u16 {
        let word = |index: usize| node[index].load(Ordering::Relaxed);
        let leaf = (word(WORD_LEAFVEC) & up_to).count_ones() as usize - 1;
        if leaf < INLINE_LEAVES {
            return (word(WORD_INLINE_LEAVES) >> (16 * leaf)) as u16;
        }
        let leaf = leaf - INLINE_LEAVES;
        let block = word(WORD_BLOCK) as usize + children.count_ones() as usize;
        let leaves = &self.units[block + leaf / (LEAVES_PER_WORD * UNIT_WORDS)];
        let leaves = leaves[leaf / LEAVES_PER_WORD % UNIT_WORDS].load(Ordering::Relaxed);
        (leaves >> (16 * (leaf % LEAVES_PER_WORD))) as u16
    }
}
