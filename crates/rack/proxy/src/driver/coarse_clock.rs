//! The clock of the event loop.
//!
//! A poll that finds nothing takes some 40 ns, and reading the kernel's clock takes half as long again, which delays a
//! message that arrives meanwhile. No decision of an engine depends on a few microseconds. The clock is therefore read
//! only when the processor's time-stamp counter shows that time has passed.

use socket::process::clock::{TICKS_PER_MICROSECOND, now_ns};

/// Maximum age of the time, in ticks of the counter.
const AGE_TICKS_MAX: u64 = 2 * TICKS_PER_MICROSECOND;

/// A clock that is exact to [`AGE_TICKS_MAX`].
#[derive(Debug, Default)]
pub(super) struct CoarseClock {
    ns: u64,
    /// The counter when the clock was read.
    ticks: u64,
}

impl CoarseClock {
    /// Returns the time when the counter is at `ticks`.
    #[inline]
    pub(super) fn now_ns(&mut self, ticks: u64) -> u64 {
        self.now_ns_by(ticks, now_ns)
    }

    #[inline]
    fn now_ns_by(&mut self, ticks: u64, read: impl FnOnce() -> u64) -> u64 {
        // A counter that was set back, as by a restored virtual machine, makes the difference large.
        if self.ns == 0 || ticks.wrapping_sub(self.ticks) > AGE_TICKS_MAX {
            (self.ns, self.ticks) = (read(), ticks);
        }
        self.ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_read_when_the_counter_has_advanced_or_was_set_back() {
        let mut clock = CoarseClock::default();
        let begin = 10 * AGE_TICKS_MAX;
        let steps = [(begin, 100), (begin + AGE_TICKS_MAX, 100), (begin + AGE_TICKS_MAX + 1, 102), (begin, 103)];
        for (index, (ticks, expected)) in steps.into_iter().enumerate() {
            assert_eq!(clock.now_ns_by(ticks, || 100 + index as u64), expected, "step {index}");
        }
    }
}
