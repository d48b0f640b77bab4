//! Whether programs that compute share the processors with this process.
//!
//! A thread that gives its processor away while it waits is back within microseconds where others take turns, too: they
//! hand on a message, and wait themselves. A program that computes keeps the processor until the kernel's next tick,
//! milliseconds later, and again each time. Beside such programs only one way of waiting serves: to sleep. The kernel
//! runs who wakes at once, and whoever was awake comes last.
//!
//! So when threads of this process lose nearly all their time to others, a tick at once, all its waits count as being
//! beside hogs for a while, and nobody gives way by yielding. Whether the hogs are still there is found out by trying,
//! ever more rarely.

use crate::clock::TICKS_PER_MILLISECOND;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};

/// Who was away for longer may have met a hog. Kernels tick each 4 ms, or have slices of 3 ms; those who take turns
/// with others that work are away for 1 to 3 ms now and then.
const AWAY_TICKS: u64 = 2 * TICKS_PER_MILLISECOND;
/// For one time away there counts so much at most: a pause of the whole machine is no hog.
const LOST_TICKS_MAX: u64 = 4 * TICKS_PER_MILLISECOND;
/// Of what was lost, so many times what there was between counts as regained: a thread that wants little of its
/// processor has hardly any beside a hog.
const REGAIN: u64 = 3;
/// Lost so much, a thread has met a hog: beside some it is 13 to 50 ms soon (measured), and 6 ms at most where programs
/// and proxies take turns under load.
const ENOUGH_LOST_TICKS: u64 = 9 * TICKS_PER_MILLISECOND;
/// How long a spell beside hogs counts as such. The next one is longer if it begins soon after.
const SPELL_TICKS: RangeInclusive<u64> = 64 * TICKS_PER_MILLISECOND..=8192 * TICKS_PER_MILLISECOND;
/// By so much. At last, finding out that hogs are still there takes three ticks in eight seconds.
const SPELL_GROWTH: u64 = 16;

/// What a process knows of programs that compute.
#[derive(Debug)]
pub(crate) struct Hogs {
    /// When a thread was last away for long, by the clock's ticks.
    away_ticks: AtomicU64,
    /// What was lost by then and not regained.
    lost_ticks: AtomicU64,
    /// How long the last spell was, and when it ends; zero once it has.
    spell_ticks: AtomicU64,
    until_ticks: AtomicU64,
    ended_ticks: AtomicU64,
}

impl Hogs {
    pub(crate) const fn new() -> Self {
        Self {
            away_ticks: AtomicU64::new(0),
            lost_ticks: AtomicU64::new(0),
            spell_ticks: AtomicU64::new(0),
            until_ticks: AtomicU64::new(0),
            ended_ticks: AtomicU64::new(0),
        }
    }

    /// Whether hogs are there, as far as is known, without a look at the clock: until somebody asks by it.
    #[inline]
    pub(crate) fn may_be_there(&self) -> bool {
        self.until_ticks.load(Ordering::Relaxed) != 0
    }

    /// Whether hogs are there, as far as is known.
    #[inline]
    pub(crate) fn are_there(&self, now: u64) -> bool {
        self.may_be_there() && self.goes_on(now)
    }

    #[cold]
    fn goes_on(&self, now: u64) -> bool {
        let until_ticks = self.until_ticks.load(Ordering::Relaxed);
        // A clock that was set back, with the whole machine, ends it.
        let goes_on = (1..=*SPELL_TICKS.end()).contains(&until_ticks.wrapping_sub(now));
        if !goes_on {
            self.ended_ticks.store(until_ticks, Ordering::Relaxed);
            self.away_ticks.store(now, Ordering::Relaxed);
            self.lost_ticks.store(0, Ordering::Relaxed);
            self.until_ticks.store(0, Ordering::Relaxed);
        }
        goes_on
    }

    /// A thread that was awake got its processor back after so long; its looks at the clock.
    #[inline]
    pub(crate) fn note_away(&self, before: u64, after: u64) {
        if after.saturating_sub(before) >= AWAY_TICKS {
            self.note_long(before, after);
        }
    }

    #[cold]
    fn note_long(&self, before: u64, after: u64) {
        let last = self.away_ticks.swap(after, Ordering::Relaxed);
        // It was one hog, or one pause, for both: another thread's, or seen a second time.
        if after.wrapping_sub(last) < AWAY_TICKS || self.are_there(after) {
            return;
        }
        let regained_ticks = before.saturating_sub(last).saturating_mul(REGAIN);
        let left_ticks = self.lost_ticks.load(Ordering::Relaxed).saturating_sub(regained_ticks);
        let lost_ticks = left_ticks + (after - before).min(LOST_TICKS_MAX);
        self.lost_ticks.store(lost_ticks, Ordering::Relaxed);
        if lost_ticks >= ENOUGH_LOST_TICKS {
            self.begin(after);
        }
    }

    pub(crate) fn begin(&self, now: u64) {
        let last_ticks = self.spell_ticks.load(Ordering::Relaxed);
        let is_soon = now.wrapping_sub(self.ended_ticks.load(Ordering::Relaxed)) <= last_ticks;
        let grown_ticks = if is_soon { SPELL_GROWTH * last_ticks } else { 0 };
        let spell_ticks = grown_ticks.clamp(*SPELL_TICKS.start(), *SPELL_TICKS.end());
        self.spell_ticks.store(spell_ticks, Ordering::Relaxed);
        self.until_ticks.store(now.wrapping_add(spell_ticks), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 1 << 40;

    /// Is away so many times from `start` on, for so long each time and so long after it was back; answers when it is
    /// back for the last time.
    fn be_away(hogs: &Hogs, times: u64, start: u64, away_ticks: u64, back_ticks: u64) -> u64 {
        (0..times).fold(start, |now, _| {
            let before = now + back_ticks;
            hogs.note_away(before, before + away_ticks);
            before + away_ticks
        })
    }

    /// As beside a hog, until that is found; answers when it is.
    fn lose(hogs: &Hogs, start: u64) -> u64 {
        let mut now = start;
        while !hogs.may_be_there() {
            now = be_away(hogs, 1, now, TICK_TICKS, TICK_TICKS / 20);
            assert!(now - start < 10 * TICK_TICKS, "a few ticks suffice");
        }
        now
    }

    /// Of a kernel.
    const TICK_TICKS: u64 = 4 * TICKS_PER_MILLISECOND;

    #[test]
    fn hogs_are_there_once_most_of_the_time_was_lost_and_for_a_while() {
        let hogs = Hogs::new();
        let now = lose(&hogs, START);
        let end = now + SPELL_TICKS.start();
        assert!(hogs.are_there(now) && hogs.are_there(end - 1));
        assert!(!hogs.are_there(end) && !hogs.may_be_there());
    }

    #[test]
    fn turns_pauses_and_half_of_the_time_are_no_hogs() {
        for (away_ticks, back_ticks) in [
            (AWAY_TICKS - 1, 1),
            (TICK_TICKS, TICK_TICKS),
            (AWAY_TICKS, AWAY_TICKS / 2),
            (100 * TICK_TICKS, 10 * TICK_TICKS),
            (TICK_TICKS, 1 << 40),
        ] {
            let hogs = Hogs::new();
            be_away(&hogs, 100, START, away_ticks, back_ticks);
            assert!(!hogs.may_be_there(), "{away_ticks} of {back_ticks}");
        }
    }

    #[test]
    fn what_two_threads_see_counts_once() {
        let hogs = Hogs::new();
        for now in (0..100).map(|count| START + 2 * count * TICK_TICKS) {
            [now, now + 1].iter().for_each(|&before| hogs.note_away(before, before + TICK_TICKS));
        }
        assert!(!hogs.may_be_there());
    }

    #[test]
    fn spells_grow_while_hogs_are_found_soon_after_them_and_begin_small_again() {
        let hogs = Hogs::new();
        let mut now = START;
        let mut spell = |pause_ticks| {
            let begin = lose(&hogs, now + pause_ticks);
            let spell_ticks = hogs.until_ticks.load(Ordering::Relaxed) - begin;
            now = begin + spell_ticks;
            assert!(!hogs.are_there(now));
            spell_ticks
        };
        let (shortest, longest) = SPELL_TICKS.into_inner();
        assert_eq!([0; 4].map(&mut spell), [shortest, SPELL_GROWTH * shortest, longest, longest]);
        assert_eq!(spell(longest + 1), shortest);
    }

    #[test]
    fn a_clock_that_was_set_back_ends_a_spell() {
        let hogs = Hogs::new();
        hogs.begin(START);
        assert!(!hogs.are_there(5));
    }
}
