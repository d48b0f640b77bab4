//! Detects CPU-bound threads that share the processors with this process.
//!
//! A thread that yields gets its processor back within microseconds where the others wait for messages too: they pass
//! one on, and wait again. A CPU-bound thread keeps the processor until the scheduler's next tick, milliseconds later,
//! each time. Then only blocking helps: the scheduler runs a thread that wakes up at once, but one that was spinning
//! last.
//!
//! Long preemptions in a row begin an episode of CPU contention, in which the waits of the process do not yield.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use volmem::TICKS_PER_MILLISECOND;

/// A longer preemption may be due to a CPU-bound thread. Schedulers tick every 4 ms, or have slices of 3 ms; threads
/// that share a processor with others that wait lose it for 1 to 3 ms now and then.
const PREEMPTION_TICKS_MIN: u64 = 2 * TICKS_PER_MILLISECOND;
/// Number of such preemptions in a row, with less time than that between them, that are contention. There are one or
/// two where programs and proxies alternate under load.
const PREEMPTIONS_CONTENDED: u32 = 3;
/// Length of an episode. It doubles while contention continues, which one preemption after an episode shows. In the
/// end, one tick in four seconds is spent on finding out.
const EPISODE_TICKS: RangeInclusive<u64> = 64 * TICKS_PER_MILLISECOND..=4096 * TICKS_PER_MILLISECOND;

/// The contention that a process has measured.
#[derive(Debug)]
pub(crate) struct CpuContention {
    /// Time in ticks at which the last long preemption ended.
    preempted_ticks: AtomicU64,
    /// Long preemptions in a row.
    preemptions: AtomicU32,
    /// Length of the next episode.
    episode_ticks: AtomicU64,
    /// When the episode ends; zero once it has.
    until_ticks: AtomicU64,
}

impl CpuContention {
    pub(crate) const fn new() -> Self {
        Self {
            preempted_ticks: AtomicU64::new(0),
            preemptions: AtomicU32::new(0),
            episode_ticks: AtomicU64::new(*EPISODE_TICKS.start()),
            until_ticks: AtomicU64::new(0),
        }
    }

    /// Returns whether an episode was on when the clock was last read.
    #[inline]
    pub(crate) fn may_be_present(&self) -> bool {
        self.until_ticks.load(Ordering::Relaxed) != 0
    }

    /// Returns whether an episode is on.
    #[inline]
    pub(crate) fn is_present(&self, now: u64) -> bool {
        self.may_be_present() && self.continues(now)
    }

    #[cold]
    fn continues(&self, now: u64) -> bool {
        let until_ticks = self.until_ticks.load(Ordering::Relaxed);
        // A clock that jumps back, as after the restore of a virtual machine, ends it.
        let continues = (1..=*EPISODE_TICKS.end()).contains(&until_ticks.wrapping_sub(now));
        if !continues {
            self.preempted_ticks.store(now, Ordering::Relaxed);
            self.preemptions.store(PREEMPTIONS_CONTENDED - 1, Ordering::Relaxed);
            self.until_ticks.store(0, Ordering::Relaxed);
        }
        continues
    }

    /// Records that a runnable thread did not run between two readings of the clock.
    #[inline]
    pub(crate) fn note_preemption(&self, before: u64, after: u64) {
        if after.saturating_sub(before) >= PREEMPTION_TICKS_MIN {
            self.note_long_preemption(before, after);
        }
    }

    #[cold]
    fn note_long_preemption(&self, before: u64, after: u64) {
        let last = self.preempted_ticks.swap(after, Ordering::Relaxed);
        // Two threads that lost their processors at once count once.
        if after.wrapping_sub(last) < PREEMPTION_TICKS_MIN || self.is_present(after) {
            return;
        }
        if before.saturating_sub(last) >= PREEMPTION_TICKS_MIN {
            self.preemptions.store(0, Ordering::Relaxed);
            self.episode_ticks.store(*EPISODE_TICKS.start(), Ordering::Relaxed);
        }
        if self.preemptions.fetch_add(1, Ordering::Relaxed) + 1 >= PREEMPTIONS_CONTENDED {
            self.begin(after);
        }
    }

    pub(crate) fn begin(&self, now: u64) {
        let episode_ticks = self.episode_ticks.load(Ordering::Relaxed);
        self.until_ticks.store(now.wrapping_add(episode_ticks), Ordering::Relaxed);
        self.episode_ticks.store((2 * episode_ticks).min(*EPISODE_TICKS.end()), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 1 << 40;
    /// A tick of the scheduler.
    const TICK_TICKS: u64 = 4 * TICKS_PER_MILLISECOND;

    /// Records `times` preemptions from `start` on, each after running for `back_ticks`. Returns the end of the last.
    fn preempt(contention: &CpuContention, times: u32, start: u64, preempted_ticks: u64, back_ticks: u64) -> u64 {
        (0..times).fold(start, |now, _| {
            let before = now + back_ticks;
            contention.note_preemption(before, before + preempted_ticks);
            before + preempted_ticks
        })
    }

    #[test]
    fn contention_begins_after_preemptions_in_a_row_and_lasts_an_episode() {
        let contention = CpuContention::new();
        let now = preempt(&contention, PREEMPTIONS_CONTENDED - 1, START, TICK_TICKS, TICK_TICKS / 20);
        assert!(!contention.may_be_present());
        let now = preempt(&contention, 1, now, TICK_TICKS, TICK_TICKS / 20);
        let end = now + EPISODE_TICKS.start();
        assert!(contention.is_present(now) && contention.is_present(end - 1));
        assert!(!contention.is_present(end) && !contention.may_be_present());
    }

    #[test]
    fn episodes_double_while_one_preemption_follows_and_begin_short_again() {
        let contention = CpuContention::new();
        let episode = |begin| {
            let episode_ticks = contention.until_ticks.load(Ordering::Relaxed) - begin;
            assert!(!contention.is_present(begin + episode_ticks));
            (episode_ticks, begin + episode_ticks)
        };
        let mut now = preempt(&contention, PREEMPTIONS_CONTENDED, START, TICK_TICKS, TICK_TICKS / 20);
        for length in [1, 2, 4, 8, 16, 32, 64, 64] {
            let (episode_ticks, end) = episode(now);
            assert_eq!(episode_ticks, length * EPISODE_TICKS.start());
            now = preempt(&contention, 1, end, TICK_TICKS, TICK_TICKS / 20);
        }
        let (_, end) = episode(now);
        let now = preempt(&contention, 1, end, TICK_TICKS, PREEMPTION_TICKS_MIN);
        assert!(!contention.may_be_present(), "it ran for long enough before");
        let now = preempt(&contention, PREEMPTIONS_CONTENDED - 1, now, TICK_TICKS, TICK_TICKS / 20);
        assert_eq!(episode(now).0, *EPISODE_TICKS.start());
    }

    #[test]
    fn short_preemptions_and_half_of_the_time_are_not_contention() {
        for (preempted_ticks, back_ticks) in
            [(PREEMPTION_TICKS_MIN - 1, 1), (TICK_TICKS, PREEMPTION_TICKS_MIN), (TICK_TICKS, 1 << 40)]
        {
            let contention = CpuContention::new();
            preempt(&contention, 100, START, preempted_ticks, back_ticks);
            assert!(!contention.may_be_present(), "{preempted_ticks} of {back_ticks}");
        }
    }

    #[test]
    fn a_preemption_of_two_threads_counts_once() {
        let contention = CpuContention::new();
        for now in (0..100).map(|count| START + 2 * count * TICK_TICKS) {
            [now, now + 1].iter().for_each(|&before| contention.note_preemption(before, before + TICK_TICKS));
        }
        assert!(!contention.may_be_present());
    }

    #[test]
    fn a_clock_that_jumps_back_ends_an_episode() {
        let contention = CpuContention::new();
        contention.begin(START);
        assert!(!contention.is_present(5));
    }
}
