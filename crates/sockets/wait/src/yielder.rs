//! Yielding of the processor in long work, as long as it lets other threads run.

use std::sync::atomic::{AtomicU64, Ordering};

use volmem::{TICKS_PER_MICROSECOND, ticks};

use crate::spin;

/// Pause of yields after one that was not short. It doubles each time,
const PAUSE_TICKS_MIN: u64 = 2 * TICKS_PER_MICROSECOND;
/// up to this multiple of the length of the yield, which is milliseconds where a CPU-bound thread runs.
const PAUSE_PER_YIELD_MAX: u64 = 16;

/// Yields the processor as long as other threads use it for a moment. A yield without another ready thread costs half a
/// microsecond, and one to a CPU-bound thread milliseconds: after these, yields pause.
#[derive(Debug)]
pub struct Yielder {
    /// Time in ticks at which the last yield ended; zero before the first.
    yielded_ticks: AtomicU64,
    /// Pause after it; zero where it was short.
    pause_ticks: AtomicU64,
}

impl Yielder {
    /// Returns one that has not yielded yet.
    pub const fn new() -> Self {
        Self { yielded_ticks: AtomicU64::new(0), pause_ticks: AtomicU64::new(0) }
    }

    /// Yields, unless yields pause.
    pub fn yield_if_useful(&self) {
        let before = ticks();
        if self.is_due(before) && !spin::cpu_contention().is_present(before) {
            rustix::thread::sched_yield();
            let after = ticks();
            self.note(before, after);
            spin::cpu_contention().note_preemption(before, after);
        }
    }

    /// Returns whether the last yield let another thread run for a moment.
    pub fn is_useful(&self) -> bool {
        self.yielded_ticks.load(Ordering::Relaxed) != 0 && self.pause_ticks.load(Ordering::Relaxed) == 0
    }

    fn is_due(&self, now: u64) -> bool {
        // A clock that jumps back, as after the restore of a virtual machine, ends a pause.
        now.wrapping_sub(self.yielded_ticks.load(Ordering::Relaxed)) >= self.pause_ticks.load(Ordering::Relaxed)
    }

    /// Records when a yield began and ended.
    fn note(&self, before: u64, after: u64) {
        let took_ticks = after.saturating_sub(before);
        // Threads that yield at once overwrite each other; the pause is then too short or too long.
        let pause_ticks = match spin::is_short_yield(took_ticks) {
            true => 0,
            false => {
                let doubled_ticks = self.pause_ticks.load(Ordering::Relaxed).saturating_mul(2);
                doubled_ticks.min(PAUSE_PER_YIELD_MAX.saturating_mul(took_ticks)).max(PAUSE_TICKS_MIN)
            }
        };
        self.pause_ticks.store(pause_ticks, Ordering::Relaxed);
        self.yielded_ticks.store(after, Ordering::Relaxed);
    }
}

impl Default for Yielder {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT_TICKS: u64 = 2 * TICKS_PER_MICROSECOND;
    /// A yield to a CPU-bound thread.
    const LONG_TICKS: u64 = 4000 * TICKS_PER_MICROSECOND;

    #[test]
    fn yields_continue_while_they_are_short() {
        let yielder = Yielder::new();
        for before in (1..100).map(|count| count * SHORT_TICKS) {
            assert!(yielder.is_due(before));
            yielder.note(before, before + SHORT_TICKS);
        }
    }

    #[test]
    fn pauses_double_after_yields_that_are_not_short_until_one_is() {
        let yielder = Yielder::new();
        let pause_after = |took_ticks| {
            yielder.note(1000, 1000 + took_ticks);
            yielder.pause_ticks.load(Ordering::Relaxed)
        };
        assert!(!spin::is_short_yield(1) && !spin::is_short_yield(LONG_TICKS), "the other yields");
        let pauses = [(); 5].map(|()| pause_after(LONG_TICKS));
        assert_eq!(pauses, [1, 2, 4, 8, 16].map(|times| times * PAUSE_TICKS_MIN));
        let end = 1000 + LONG_TICKS + pauses[4];
        assert_eq!([end - 1, end, 999].map(|now| yielder.is_due(now)), [false, true, true]);
        assert_eq!([pause_after(SHORT_TICKS), pause_after(1), pause_after(1)], [0, PAUSE_TICKS_MIN, PAUSE_TICKS_MIN]);
    }

    #[test]
    fn a_pause_is_bounded_by_the_length_of_the_yield() {
        let yielder = Yielder::new();
        (0..64).for_each(|_| yielder.note(1000, 1000 + LONG_TICKS));
        assert_eq!(yielder.pause_ticks.load(Ordering::Relaxed), PAUSE_PER_YIELD_MAX * LONG_TICKS);
        assert!(!yielder.is_useful());
    }
}
