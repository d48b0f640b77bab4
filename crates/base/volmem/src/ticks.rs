//! The processor's time-stamp counter.

/// About a millisecond in ticks: from 0.6 ms where the counter runs at 5 GHz to 3 ms where it runs at 1 GHz. Use it
/// only for how often to poll.
pub const TICKS_PER_MILLISECOND: u64 = if cfg!(target_arch = "aarch64") { 50_000 } else { 3_000_000 };
/// About a microsecond in ticks, with the same accuracy as [`TICKS_PER_MILLISECOND`].
pub const TICKS_PER_MICROSECOND: u64 = TICKS_PER_MILLISECOND / 1000;

/// Reads a counter with a constant rate, in a few nanoseconds. The reading is not ordered with memory accesses. Always
/// 0 under Miri, which has no counter.
#[inline]
pub fn ticks() -> u64 {
    #[cfg(miri)]
    return 0;
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every x86-64 processor has the instruction, which only reads a counter.
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    {
        let count: u64;
        // SAFETY: the instruction only reads the virtual counter, which Linux permits in user space.
        unsafe { core::arch::asm!("mrs {}, cntvct_el0", out(reg) count, options(nomem, nostack)) };
        count
    }
}
