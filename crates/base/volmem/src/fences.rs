//! Fences for mappings whose accesses are not ordered like those of ordinary memory.
//!
//! Acquire and release order accesses of ordinary memory. Stores to write-combined memory stay in buffers past a
//! release, and loads of it may be reordered.

/// Orders every earlier store ahead of every later one, and drains the write-combining buffers.
#[inline]
pub fn store_fence() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every x86-64 processor has the instruction, which accesses no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
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
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}
