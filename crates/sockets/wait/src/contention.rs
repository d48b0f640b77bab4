//! Detects CPU-bound threads that share the processors with this process.
//!
//! A thread that yields gets its processor back within microseconds where the others wait for messages too: they pass
//! one on, and wait again. A CPU-bound thread keeps the processor until the scheduler's next tick, milliseconds later,
//! each time. Then only blocking serves, because the scheduler runs a thread that wakes at once, and one that was
//! spinning last.
//!
//! When threads of this process lose nearly all their time, a tick or more at once, an episode of CPU contention
//! begins: its waits do not yield. After the episode they try again; episodes that follow each other grow longer.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};

use volmem::TICKS_PER_MILLISECOND;

/// A longer preemption may be due to a CPU-bound thread. Schedulers tick every 4 ms, or have slices of 3 ms; threads
/// that share a processor with others that wait lose it for 1 to 3 ms now and then.
const PREEMPTION_TICKS_MIN: u64 = 2 * TICKS_PER_MILLISECOND;
/// One preemption counts for at most this much: a pause of the whole machine is not contention.
const LOST_TICKS_PER_PREEMPTION_MAX: u64 = 4 * TICKS_PER_MILLISECOND;
/// Time with the processor counts this many times against time lost: under contention, a thread that needs little
/// processor time gets hardly any.
const RECOVERY_FACTOR: u64 = 3;
/// A thread that has lost this much is contended: 13 to 50 ms are soon reached where CPU-bound threads run (measured),
/// and at most 6 ms where programs and proxies alternate under load.
const LOST_TICKS_CONTENDED: u64 = 9 * TICKS_PER_MILLISECOND;
/// Length of an episode. The next one is longer if it begins soon after.
const EPISODE_TICKS: RangeInclusive<u64> = 64 * TICKS_PER_MILLISECOND..=8192 * TICKS_PER_MILLISECOND;
/// Factor of that growth. In the end, three ticks in eight seconds are lost to finding out.
const EPISODE_GROWTH: u64 = 16;

/// The contention that a process has measured.
#[derive(Debug)]
pub(crate) struct CpuContention {
    /// Time in ticks of the last long preemption.
    preempted_ticks: AtomicU64,
    /// Time lost by then, less what was recovered.
    lost_ticks: AtomicU64,
    /// Length of the last episode, and when it ends; zero once it has.
    episode_ticks: AtomicU64,
    until_ticks: AtomicU64,
    ended_ticks: AtomicU64,
}

impl CpuContention {
    pub(crate) const fn new() -> Self {
        Self {
            preempted_ticks: AtomicU64::new(0),
            lost_ticks: AtomicU64::new(0),
            episode_ticks: AtomicU64::new(0),
            until_ticks: AtomicU64::new(0),
            ended_ticks: AtomicU64::new(0),
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
            self.ended_ticks.store(until_ticks, Ordering::Relaxed);
            self.preempted_ticks.store(now, Ordering::Relaxed);
            self.lost_ticks.store(0, Ordering::Relaxed);
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
        let regained_ticks = before.saturating_sub(last).saturating_mul(RECOVERY_FACTOR);
        let left_ticks = self.lost_ticks.load(Ordering::Relaxed).saturating_sub(regained_ticks);
        let lost_ticks = left_ticks + (after - before).min(LOST_TICKS_PER_PREEMPTION_MAX);
        self.lost_ticks.store(lost_ticks, Ordering::Relaxed);
        if lost_ticks >= LOST_TICKS_CONTENDED {
            self.begin(after);
        }
    }

    pub(crate) fn begin(&self, now: u64) {
        let last_ticks = self.episode_ticks.load(Ordering::Relaxed);
        let is_soon = now.wrapping_sub(self.ended_ticks.load(Ordering::Relaxed)) <= last_ticks;
        let grown_ticks = if is_soon { EPISODE_GROWTH * last_ticks } else { 0 };
        let episode_ticks = grown_ticks.clamp(*EPISODE_TICKS.start(), *EPISODE_TICKS.end());
        self.episode_ticks.store(episode_ticks, Ordering::Relaxed);
        self.until_ticks.store(now.wrapping_add(episode_ticks), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 1 << 40;

    /// Records `times` preemptions from `start` on, each after running for `back_ticks`. Returns the end of the last.
    fn preempt(contention: &CpuContention, times: u64, start: u64, preempted_ticks: u64, back_ticks: u64) -> u64 {
        (0..times).fold(start, |now, _| {
            let before = now + back_ticks;
            contention.note_preemption(before, before + preempted_ticks);
            before + preempted_ticks
        })
    }

    /// Records preemptions until contention is found. Returns when it is.
    fn preempt_until_contended(contention: &CpuContention, start: u64) -> u64 {
        let mut now = start;
        while !contention.may_be_present() {
            now = preempt(contention, 1, now, TICK_TICKS, TICK_TICKS / 20);
            assert!(now - start < 10 * TICK_TICKS, "a few ticks suffice");
        }
        now
    }

    /// A tick of the scheduler.
    const TICK_TICKS: u64 = 4 * TICKS_PER_MILLISECOND;

    #[test]
    fn contention_begins_once_most_of_the_time_is_lost_and_lasts_an_episode() {
        let contention = CpuContention::new();
        let now = preempt_until_contended(&contention, START);
        let end = now + EPISODE_TICKS.start();
        assert!(contention.is_present(now) && contention.is_present(end - 1));
        assert!(!contention.is_present(end) && !contention.may_be_present());
    }

    #[test]
    fn short_preemptions_pauses_and_half_of_the_time_are_not_contention() {
        for (preempted_ticks, back_ticks) in [
            (PREEMPTION_TICKS_MIN - 1, 1),
            (TICK_TICKS, TICK_TICKS),
            (PREEMPTION_TICKS_MIN, PREEMPTION_TICKS_MIN / 2),
            (100 * TICK_TICKS, 10 * TICK_TICKS),
            (TICK_TICKS, 1 << 40),
        ] {
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
    fn episodes_grow_while_they_follow_soon_and_begin_short_again() {
        let contention = CpuContention::new();
        let mut now = START;
        let mut episode = |pause_ticks| {
            let begin = preempt_until_contended(&contention, now + pause_ticks);
            let episode_ticks = contention.until_ticks.load(Ordering::Relaxed) - begin;
            now = begin + episode_ticks;
            assert!(!contention.is_present(now));
            episode_ticks
        };
        let (shortest, longest) = EPISODE_TICKS.into_inner();
        assert_eq!([0; 4].map(&mut episode), [shortest, EPISODE_GROWTH * shortest, longest, longest]);
        assert_eq!(episode(longest + 1), shortest);
    }

    #[test]
    fn a_clock_that_jumps_back_ends_an_episode() {
        let contention = CpuContention::new();
        contention.begin(START);
        assert!(!contention.is_present(5));
    }
}
