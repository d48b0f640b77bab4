//! The processor's time-stamp counter.

/// About a millisecond in ticks: from 0.6 ms where the counter of an x86-64 runs at 5 GHz to 3 ms where it runs at
/// 1 GHz; exact on AArch64. Use it only for how often to poll.
pub const TICKS_PER_MILLISECOND: u64 = if cfg!(target_arch = "aarch64") { 1_000_000 } else { 3_000_000 };
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
    scaled::ticks()
}

/// The virtual counter, scaled to nanoseconds: its rate is from 1 MHz to 1 GHz, depending on the machine.
#[cfg(all(target_arch = "aarch64", not(miri)))]
mod scaled {
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Fractional bits of [`NS_PER_COUNT`].
    const FRACTION_BITS: u32 = 32;
    /// Nanoseconds per count, scaled; 0 before the first reading.
    static NS_PER_COUNT: AtomicU64 = AtomicU64::new(0);

    #[inline]
    pub(super) fn ticks() -> u64 {
        let count: u64;
        // SAFETY: the instruction only reads the virtual counter, which Linux permits in user space.
        unsafe { core::arch::asm!("mrs {}, cntvct_el0", out(reg) count, options(nomem, nostack)) };
        let known = NS_PER_COUNT.load(Ordering::Relaxed);
        let ns_per_count = if known == 0 { measure() } else { known };
        ((u128::from(count) * u128::from(ns_per_count)) >> FRACTION_BITS) as u64
    }

    #[cold]
    fn measure() -> u64 {
        let rate_hz: u64;
        // SAFETY: the instruction only reads the counter's rate, which Linux permits in user space.
        unsafe { core::arch::asm!("mrs {}, cntfrq_el0", out(reg) rate_hz, options(nomem, nostack)) };
        let ns_per_count = (1_000_000_000 << FRACTION_BITS) / rate_hz.max(1);
        NS_PER_COUNT.store(ns_per_count, Ordering::Relaxed);
        ns_per_count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn a_millisecond_in_ticks_is_of_that_order() {
        let (began, begun) = (Instant::now(), ticks());
        std::thread::sleep(Duration::from_millis(20));
        let milliseconds = (ticks() - begun) / TICKS_PER_MILLISECOND;
        let elapsed = began.elapsed().as_millis() as u64;
        assert!((20 / 4..=elapsed * 2).contains(&milliseconds), "{milliseconds} of {elapsed}");
    }
}
