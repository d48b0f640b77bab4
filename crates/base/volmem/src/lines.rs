//! Cache lines on their way between this processor's caches and memory that other machines reach too.
//!
//! Where two hosts share memory without coherence, a store stays in the writer's cache until its line is written back,
//! and a load finds what the reader's cache kept until its line is dropped.

use crate::{CACHE_LINE_BYTES, Region};

/// What a processor can be told about a line. None changes its contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineInstruction {
    /// Keeps the line in the cache; does not wait for others.
    Clwb,
    /// Takes the line out of the cache; does not wait for others.
    Clflushopt,
    /// Takes the line out of the cache, one line after the other: every 64-bit x86 has it.
    Clflush,
    /// A hint that another core reads it next: it moves to the cache that the cores share. A no-operation on older
    /// processors.
    Cldemote,
    /// A hint that this core writes it soon: it is brought here, from another core's cache too. A no-operation on older
    /// processors.
    Prefetchw,
}

/// Writes lines back and drops them, by the best instructions of this processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineControl {
    write_back: LineInstruction,
    drop: LineInstruction,
}

impl LineControl {
    /// What this processor can do; `None` on one that lets no program say what its caches keep.
    pub fn detect() -> Option<Self> {
        features().map(|features| Self::of_features(features.clwb, features.clflushopt))
    }

    fn of_features(has_clwb: bool, has_clflushopt: bool) -> Self {
        let drop = if has_clflushopt { LineInstruction::Clflushopt } else { LineInstruction::Clflush };
        Self { write_back: if has_clwb { LineInstruction::Clwb } else { drop }, drop }
    }

    /// The instructions that write back and drop.
    pub fn instructions(&self) -> (LineInstruction, LineInstruction) {
        (self.write_back, self.drop)
    }

    /// Starts to write every line of the span back; [`LineControl::barrier`] waits for it.
    ///
    /// # Panics
    /// If the span is not inside the region.
    #[inline]
    pub fn write_back(&self, region: &Region, offset: usize, len_bytes: usize) {
        for_each_line(self.write_back, region, offset, len_bytes);
    }

    /// Writes every line of the span back, where it was changed, and drops it: what is loaded next is what memory has.
    ///
    /// # Panics
    /// If the span is not inside the region.
    #[inline]
    pub fn invalidate_lines(&self, region: &Region, offset: usize, len_bytes: usize) {
        for_each_line(self.drop, region, offset, len_bytes);
        self.barrier();
    }

    /// What was stored, written back and dropped before it is done before any load or store after it.
    #[inline]
    pub fn barrier(&self) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: orders memory accesses and changes nothing; part of every 64-bit x86.
        unsafe {
            core::arch::asm!("mfence", options(nostack, preserves_flags))
        };
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        crate::sync::fence(crate::sync::Ordering::SeqCst);
    }
}

#[derive(Debug, Clone, Copy)]
struct Features {
    clwb: bool,
    clflushopt: bool,
}

/// Bits of the processor's leaf 7: see Intel's manual, CPUID.
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

/// An interpreter has no caches: everything is written back at once.
#[cfg(miri)]
fn features() -> Option<Features> {
    Some(Features { clwb: true, clflushopt: true })
}

#[cfg(not(any(target_arch = "x86_64", miri)))]
fn features() -> Option<Features> {
    None
}

#[inline]
pub(crate) fn for_each_line(instruction: LineInstruction, region: &Region, offset: usize, len_bytes: usize) {
    let first = region.pointer(offset, len_bytes).as_ptr();
    if len_bytes == 0 {
        return;
    }
    // The line that the span begins in may begin before it.
    let lead_bytes = first.addr() % CACHE_LINE_BYTES;
    for at in (0..lead_bytes + len_bytes).step_by(CACHE_LINE_BYTES) {
        let line = first.wrapping_sub(lead_bytes).wrapping_add(at);
        // SAFETY: the line holds bytes of the region, which `pointer` has checked, so its page is mapped.
        unsafe { of_line(instruction, line) };
    }
}

/// # Safety
/// `line` is in a mapped page, and the processor has the instruction.
#[inline]
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn of_line(instruction: LineInstruction, line: *mut u8) {
    use core::arch::asm;
    // SAFETY: the caller's; contents do not change.
    unsafe {
        match instruction {
            LineInstruction::Clwb => asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags)),
            LineInstruction::Clflushopt => asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags)),
            LineInstruction::Clflush => asm!("clflush [{}]", in(reg) line, options(nostack, preserves_flags)),
            LineInstruction::Cldemote => asm!("cldemote [{}]", in(reg) line, options(nostack, preserves_flags)),
            LineInstruction::Prefetchw => asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags)),
        }
    }
}

/// # Safety
/// None here: there is nothing to write back.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
unsafe fn of_line(_instruction: LineInstruction, _line: *mut u8) {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Ordering;

    #[test]
    fn the_best_instruction_is_taken_and_clflush_when_there_is_no_better() {
        use LineInstruction::{Clflush, Clflushopt, Clwb};
        let chosen = |clwb, clflushopt| LineControl::of_features(clwb, clflushopt).instructions();
        assert_eq!(chosen(true, true), (Clwb, Clflushopt));
        assert_eq!(chosen(false, true), (Clflushopt, Clflushopt));
        assert_eq!(chosen(true, false), (Clwb, Clflush));
        assert_eq!(chosen(false, false), (Clflush, Clflush));
    }

    #[test]
    fn miri_lines_written_back_and_dropped_keep_their_contents() {
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
    #[cfg(target_arch = "x86_64")]
    fn a_64_bit_x86_can_always_write_back() {
        assert!(LineControl::detect().is_some());
    }

    #[test]
    #[should_panic(expected = "outside a region")]
    fn lines_outside_the_region_are_refused() {
        LineControl::of_features(false, false).invalidate_lines(&Region::heap(64), 64, 1);
    }
}
