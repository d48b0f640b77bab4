//! The processor's counter of time.

/// About a millisecond: from 0.6 ms where the counter runs at 5 GHz to 3 ms where it runs at 1 GHz. Nothing may rest on
/// it but how often to look.
pub const TICKS_PER_MILLISECOND: u64 = if cfg!(target_arch = "aarch64") { 50_000 } else { 3_000_000 };
/// A microsecond, roughly, as above.
pub const TICKS_PER_MICROSECOND: u64 = TICKS_PER_MILLISECOND / 1000;

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
