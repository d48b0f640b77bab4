//! Fences for mappings whose accesses are not ordered like those of ordinary memory.
//!
//! Acquire and release order accesses of ordinary memory. Stores to write-combined memory stay in buffers past a
//! release, and loads of it may be reordered. On AArch64, acquire and release also order only what processors access
//! (the inner shareable domain), whereas a device may be beyond it, as Linux' `wmb` and `rmb` assume.

/// Orders every earlier store ahead of every later one, and drains the write-combining buffers.
#[inline]
pub fn store_fence() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every x86-64 processor has the instruction, which accesses no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: every AArch64 processor has the instruction, which accesses no memory.
    unsafe {
        core::arch::asm!("dsb st", options(nostack, preserves_flags));
    }
    #[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// Orders every earlier load ahead of every later one, cached or not.
#[inline]
pub fn load_fence() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every x86-64 processor has the instruction, which accesses no memory.
    unsafe {
        std::arch::x86_64::_mm_lfence();
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: every AArch64 processor has the instruction, which accesses no memory.
    unsafe {
        core::arch::asm!("dsb ld", options(nostack, preserves_flags));
    }
    #[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}
