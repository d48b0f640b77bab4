//! The processor's counter of time.

/// A counter that grows at a constant rate, read in a few nanoseconds. Not ordered against memory accesses. Miri, which
/// has none, always reads 0.
#[inline]
pub fn ticks() -> u64 {
    #[cfg(miri)]
    return 0;
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: reads a counter; every x86-64 processor has it.
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    {
        let count: u64;
        // SAFETY: reads the virtual counter, which Linux lets user space read.
        unsafe { core::arch::asm!("mrs {}, cntvct_el0", out(reg) count, options(nomem, nostack)) };
        count
    }
}
