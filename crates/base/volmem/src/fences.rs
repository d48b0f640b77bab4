//! Fences for memory that a device's mapping takes out of the order that atomics keep.
//!
//! Acquire and release order ordinary memory. Where stores gather in write-combining buffers they stay there past a
//! release, and loads of such memory may be answered out of order.

/// Sends every store made before it on its way, ahead of every store after it, gathered or not.
#[inline]
pub fn store_fence() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every x86-64 processor has the instruction; it touches no memory of this program.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// Finishes every load made before it ahead of every load after it, cached or not.
#[inline]
pub fn load_fence() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: as above.
    unsafe {
        std::arch::x86_64::_mm_lfence();
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}
