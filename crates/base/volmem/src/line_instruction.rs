//! Instructions that act on single cache lines.

use crate::cache_line::CACHE_LINE_BYTES;
use std::ptr::NonNull;

/// An instruction that acts on a cache line, named after that of x86. None changes its contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineInstruction {
    /// Writes the line back and may keep it in the cache. Not ordered with other write-backs. On AArch64 `dc cvac`.
    Clwb,
    /// Writes the line back and invalidates it. Not ordered with other write-backs. On AArch64 `dc civac`.
    Clflushopt,
    /// Writes the line back and invalidates it, one line after the other. Every 64-bit x86 has it. On AArch64 like
    /// [`Self::Clflushopt`].
    Clflush,
    /// Hints that another core reads the line next: it moves to the cache that the cores share. A no-operation on older
    /// processors.
    Cldemote,
    /// Hints that this core writes the line soon: it is fetched for ownership, also from another core's cache. A
    /// no-operation on older processors.
    Prefetchw,
}

/// Applies `instruction` to every cache line of a span.
///
/// # Safety
/// The `len_bytes` from `first` on are mapped, and the processor has the instruction.
#[inline]
pub(crate) unsafe fn for_each_line(instruction: LineInstruction, first: NonNull<u8>, len_bytes: usize) {
    if len_bytes == 0 {
        return;
    }
    let first = first.as_ptr();
    // The first line may begin before the span.
    let lead_bytes = first.addr() % CACHE_LINE_BYTES;
    for at in (0..lead_bytes + len_bytes).step_by(CACHE_LINE_BYTES) {
        let line = first.wrapping_sub(lead_bytes).wrapping_add(at);
        // SAFETY: the line holds a byte of the span, which the caller guarantees is mapped, and a line does not cross
        // pages. The caller guarantees that the processor has the instruction.
        unsafe { execute(instruction, line) };
    }
}

/// Executes `instruction` on the line at an address.
///
/// # Safety
/// `line` is in a mapped page, and the processor has the instruction.
#[inline]
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn execute(instruction: LineInstruction, line: *mut u8) {
    use core::arch::asm;
    // SAFETY: the caller guarantees that the page is mapped and that the processor has the instruction. None of the
    // instructions changes the contents of memory.
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

/// Executes `instruction` on the line at an address. Hints are left out.
///
/// # Safety
/// `line` is in a mapped page.
#[inline]
#[cfg(all(target_arch = "aarch64", not(miri)))]
unsafe fn execute(instruction: LineInstruction, line: *mut u8) {
    use core::arch::asm;
    // SAFETY: `dc cvac` and `dc civac` fault only at an address that is not mapped, which `line` is by this function's
    // contract, and where the kernel forbids them, which Linux does not (`SCTLR_EL1.UCI`). They write a modified line
    // back, so that every load returns what it would return without them.
    unsafe {
        match instruction {
            LineInstruction::Clwb => asm!("dc cvac, {}", in(reg) line, options(nostack, preserves_flags)),
            LineInstruction::Clflushopt | LineInstruction::Clflush => {
                asm!("dc civac, {}", in(reg) line, options(nostack, preserves_flags));
            }
            LineInstruction::Cldemote | LineInstruction::Prefetchw => {}
        }
    }
}

/// Does nothing: other processors have no such instructions, and Miri has no caches.
///
/// # Safety
/// No conditions.
#[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri))]
unsafe fn execute(_instruction: LineInstruction, _line: *mut u8) {}
