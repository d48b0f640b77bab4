//! Yielding of the processor in long work, as long as it lets other threads run.

use std::sync::atomic::{AtomicU64, Ordering};

use volmem::ticks;

use crate::spin;

/// Pause of yields after one that was not short, as a multiple of its length: yields cost at most 6% of the time.
const PAUSE_PER_YIELD: u64 = 16;

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

    fn is_due(&self, now: u64) -> bool {
        // A clock that jumps back, as after the restore of a virtual machine, ends a pause.
        now.wrapping_sub(self.yielded_ticks.load(Ordering::Relaxed)) >= self.pause_ticks.load(Ordering::Relaxed)
    }

    /// Records when a yield began and ended.
    fn note(&self, before: u64, after: u64) {
        let took_ticks = after.saturating_sub(before);
        // Threads that yield at once overwrite each other; the pause is then too short or too long.
        let pause_ticks = if spin::is_short_yield(took_ticks) { 0 } else { PAUSE_PER_YIELD.saturating_mul(took_ticks) };
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
    use volmem::TICKS_PER_MICROSECOND;

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
    fn yields_pause_after_one_that_was_not_short() {
        let yielder = Yielder::new();
        for took_ticks in [1, LONG_TICKS] {
            yielder.note(1000, 1000 + took_ticks);
            let end = 1000 + took_ticks + PAUSE_PER_YIELD * took_ticks;
            assert_eq!([end - 1, end, 999].map(|now| yielder.is_due(now)), [false, true, true]);
            yielder.note(end, end + SHORT_TICKS);
            assert!(yielder.is_due(end + SHORT_TICKS));
        }
    }
}
