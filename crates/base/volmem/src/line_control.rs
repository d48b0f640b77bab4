//! Write-back and invalidation of cache lines of memory that other machines also access.
//!
//! Where two hosts share memory without coherence, a store stays in the writer's cache until its line is written back,
//! and a load hits the reader's cache until its line is invalidated.

use crate::line_instruction::{LineInstruction, for_each_line};
use crate::region::Region;

/// Writes back and invalidates cache lines, with the best instructions of this processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineControl {
    write_back: LineInstruction,
    invalidate: LineInstruction,
}

impl LineControl {
    /// Detects the instructions of this processor. `None` on a processor that has none for programs.
    pub fn detect() -> Option<Self> {
        features().map(|features| Self::of_features(features.clwb, features.clflushopt))
    }

    fn of_features(has_clwb: bool, has_clflushopt: bool) -> Self {
        let invalidate = if has_clflushopt { LineInstruction::Clflushopt } else { LineInstruction::Clflush };
        Self { write_back: if has_clwb { LineInstruction::Clwb } else { invalidate }, invalidate }
    }

    /// Returns the instructions for write-back and invalidation.
    pub fn instructions(&self) -> (LineInstruction, LineInstruction) {
        (self.write_back, self.invalidate)
    }

    /// Starts to write back every line of the span. [`LineControl::barrier`] waits for it.
    ///
    /// # Panics
    /// If the span is not inside the region.
    #[inline]
    pub fn write_back(&self, region: &Region, offset: usize, len_bytes: usize) {
        let first = region.pointer(offset, len_bytes);
        // SAFETY: `pointer` has checked that the span is in the region, which is mapped while `region` lives. `detect`
        // has found the instruction, or it is one that every processor of the architecture has.
        unsafe { for_each_line(self.write_back, first, len_bytes) };
    }

    /// Writes back every modified line of the span and invalidates all of them, so that the next loads return what
    /// memory holds.
    ///
    /// # Panics
    /// If the span is not inside the region.
    #[inline]
    pub fn invalidate_lines(&self, region: &Region, offset: usize, len_bytes: usize) {
        let first = region.pointer(offset, len_bytes);
        // SAFETY: `pointer` has checked that the span is in the region, which is mapped while `region` lives. `detect`
        // has found the instruction, or it is one that every processor of the architecture has.
        unsafe { for_each_line(self.invalidate, first, len_bytes) };
        self.barrier();
    }

    /// Orders earlier stores, write-backs and invalidations ahead of all later loads and stores.
    #[inline]
    pub fn barrier(&self) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: every 64-bit x86 has the instruction, which accesses no memory.
        unsafe {
            core::arch::asm!("mfence", options(nostack, preserves_flags))
        };
        #[cfg(all(target_arch = "aarch64", not(miri)))]
        // SAFETY: every AArch64 processor has the instruction, which accesses no memory. It waits for maintenance of
        // cache lines too, which the fence of the standard library does not.
        unsafe {
            core::arch::asm!("dsb sy", options(nostack, preserves_flags))
        };
        #[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri))]
        crate::sync::fence(crate::sync::Ordering::SeqCst);
    }
}

#[derive(Debug, Clone, Copy)]
struct Features {
    clwb: bool,
    clflushopt: bool,
}

/// Reads the feature bits of CPUID leaf 7 (Intel SDM, volume 2A, CPUID).
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn features() -> Option<Features> {
    use std::arch::x86_64::{__cpuid_count, __get_cpuid_max};
    const FEATURES_LEAF: u32 = 7;
    const CLFLUSHOPT_BIT: u32 = 23;
    const CLWB_BIT: u32 = 24;
    let has_leaf = __get_cpuid_max(0).0 >= FEATURES_LEAF;
    let ebx = if has_leaf { __cpuid_count(FEATURES_LEAF, 0).ebx } else { 0 };
    Some(Features { clwb: ebx >> CLWB_BIT & 1 == 1, clflushopt: ebx >> CLFLUSHOPT_BIT & 1 == 1 })
}

/// Every AArch64 processor can clean and invalidate lines, and Linux permits it in user space (`SCTLR_EL1.UCI`). Miri
/// has no caches, so every write-back has already happened.
#[cfg(any(target_arch = "aarch64", miri))]
fn features() -> Option<Features> {
    Some(Features { clwb: true, clflushopt: true })
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64", miri)))]
fn features() -> Option<Features> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Ordering;

    #[test]
    fn the_best_instruction_is_chosen_and_clflush_without_a_better_one() {
        use LineInstruction::{Clflush, Clflushopt, Clwb};
        let chosen = |clwb, clflushopt| LineControl::of_features(clwb, clflushopt).instructions();
        assert_eq!(chosen(true, true), (Clwb, Clflushopt));
        assert_eq!(chosen(false, true), (Clflushopt, Clflushopt));
        assert_eq!(chosen(true, false), (Clwb, Clflush));
        assert_eq!(chosen(false, false), (Clflush, Clflush));
    }

    #[test]
    fn miri_lines_that_are_written_back_and_invalidated_keep_their_contents() {
        let best = LineControl::detect();
        let plain = LineControl::of_features(false, false);
        let controls = best.into_iter().chain(best.map(|_| plain));
        for lines in controls {
            let region = Region::heap(1024);
            let part = region.sub(8, 500);
            (0..60).for_each(|index| part.store_u64(index * 8, index as u64 + 1, Ordering::Relaxed));
            lines.write_back(&part, 3, 400);
            lines.barrier();
            lines.invalidate_lines(&part, 0, 500);
            lines.invalidate_lines(&part, 500, 0);
            assert!((0..60).all(|index| part.load_u64(index * 8, Ordering::Relaxed) == index as u64 + 1));
            assert_eq!((region.load_u64(0, Ordering::Relaxed), region.load_u64(488, Ordering::Relaxed)), (0, 0));
        }
    }

    #[test]
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    fn a_processor_can_always_write_back() {
        assert!(LineControl::detect().is_some());
    }

    #[test]
    #[should_panic(expected = "outside a region")]
    fn lines_outside_the_region_are_refused() {
        LineControl::of_features(false, false).invalidate_lines(&Region::heap(64), 64, 1);
    }
}
