//! Waiting that is bounded and yields.

use crate::clock::{TICKS_PER_MICROSECOND, ticks};
use crate::crowd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Looks at full speed before anything slower: about ten microseconds.
const LOOKS_AT_FULL_SPEED: u32 = 1500;
/// So many waits begin by yielding after one that found others to need this processor.
const YIELDING_WAITS: u32 = 2048;
/// Of waits in a crowd, one in so many finds out whether others only take short turns.
const TURNS_TRIED_EVERY: u32 = 1024;
/// A yield that lasted longer was not the turn of somebody who waits or copies a message: a program computes, and keeps
/// the processor for milliseconds.
const TURN_MICROSECONDS: u64 = 100;
/// A yield that was shorter came back at once: nobody else wanted the processor.
const SWITCH_TICKS: u64 = 7 * TICKS_PER_MICROSECOND / 10;
/// How long a waiter stays awake before it sleeps in the kernel. A wake-up across cores costs 20 us and more, so
/// waiting for about twice that is never much worse than the best choice in hindsight.
const AWAKE_MICROSECONDS: u64 = 50;
/// The same where others had turns meanwhile, which do not count: they may be what the wait is for.
const AWAKE_BESIDE_OTHERS_MICROSECONDS: u64 = 300;
/// How often a waiter looks at the lifeline, which is a system call.
const LIFELINE_MICROSECONDS: u64 = 5;
/// After so many waits in a row that outlasted being awake, waits sleep at once.
const VAIN_WAITS: u32 = 8;
/// After so many sleeps one wait stays awake whatever was learned, and so do those that follow it while that brings
/// something. Two ends that both sleep at once find out by it that neither has to.
const HOPE_EVERY: u32 = 32;
/// A sleep that ended sooner, with its wake-up, is one that being awake would have saved.
const SHORT_SLEEP_MICROSECONDS: u64 = AWAKE_MICROSECONDS;

static YIELDING_WAITS_LEFT: AtomicU32 = AtomicU32::new(0);
static CROWDED_WAITS: AtomicU32 = AtomicU32::new(0);

/// What the waits at one place have taught: whether being awake brings what they wait for.
#[derive(Debug, Default)]
pub struct Patience {
    /// Waits in a row that slept long.
    vain_waits: AtomicU32,
    /// Waits that slept.
    sleeps: AtomicU32,
    /// Clock ticks when the last of them began to.
    asleep_since: AtomicU64,
}

impl Patience {
    /// That has learned nothing.
    pub const fn new() -> Self {
        Self { vain_waits: AtomicU32::new(0), sleeps: AtomicU32::new(0), asleep_since: AtomicU64::new(0) }
    }

    /// Forgets what it has learned.
    pub fn forget(&self) {
        self.vain_waits.store(0, Ordering::Relaxed);
    }

    #[inline]
    fn is_lost(&self) -> bool {
        self.vain_waits.load(Ordering::Relaxed) >= VAIN_WAITS
    }

    #[inline]
    fn has_hope(&self) -> bool {
        self.sleeps.load(Ordering::Relaxed).is_multiple_of(HOPE_EVERY)
    }

    #[cold]
    fn note_sleep(&self, now: u64) {
        // Two threads may count as one.
        let vain_waits = self.vain_waits.load(Ordering::Relaxed);
        self.vain_waits.store(vain_waits.saturating_add(1), Ordering::Relaxed);
        self.sleeps.store(self.sleeps.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        self.asleep_since.store(now, Ordering::Relaxed);
    }

    /// The sleep that a [`Spin`] ended with is over.
    pub fn note_awake(&self) {
        self.note_awake_at(ticks());
    }

    fn note_awake_at(&self, now: u64) {
        let slept = now.wrapping_sub(self.asleep_since.load(Ordering::Relaxed));
        if slept < SHORT_SLEEP_MICROSECONDS * TICKS_PER_MICROSECOND {
            self.forget();
        }
    }
}

/// What a waiter should do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Look again.
    Look,
    /// Look at what only the kernel knows, too.
    AskKernel,
    /// Sleep.
    Sleep,
}

/// One wait: call [`Spin::turn`] after every look that found nothing.
///
/// A process cannot know whether its peer needs the processor that it looks from. Looking without yielding keeps such a
/// peer from answering; yielding is slow where the peer runs elsewhere. A wait looks, and learns: where others had
/// short turns in most of its yields, and that brought what all looks before had not, the waits to come begin so.
/// They do no longer once yields come back at once, or late, or bring nothing: nobody short of the processor is there,
/// or somebody who keeps it.
///
/// Where more programs want to run than there are processors, and do not give each other turns like that, being awake
/// is worse than being asleep: the kernel runs at once who wakes, and last who has used its share. What is not there at
/// full speed is slept for then.
#[derive(Debug)]
pub struct Spin {
    looks: u32,
    /// When looking became slow.
    started: u64,
    asked: u64,
    yields: u32,
    /// Yields in which others had a short turn.
    turns: u32,
    /// Ticks of those turns.
    turns_ticks: u64,
    begins_by_yielding: bool,
    ends_in_sleep: bool,
    yielding_waits_left: &'static AtomicU32,
    /// What earlier waits at this place have learned.
    patience: Option<&'static Patience>,
    sleeps_at_once: bool,
    minds_crowd: bool,
    /// It stays awake in a crowd too, and does not yield there.
    has_hope: bool,
    tries_turns: bool,
}

/// Whether waits of this process begin by yielding: there are fewer processors than parties that need one.
pub fn is_crowded() -> bool {
    YIELDING_WAITS_LEFT.load(Ordering::Relaxed) > 0
}

impl Spin {
    /// A wait that starts now.
    #[inline]
    pub fn new() -> Self {
        let mut spin = Self::on(&YIELDING_WAITS_LEFT);
        spin.minds_crowd = true;
        spin
    }

    /// As [`Spin::new`], at a place where waits learn from each other. A sleep that it ends with is told to
    /// [`Patience::note_awake`].
    #[inline]
    pub fn with(patience: &'static Patience) -> Self {
        let mut spin = Self::new();
        spin.patience = Some(patience);
        if patience.has_hope() {
            spin.has_hope = true;
        } else if patience.is_lost() {
            spin.sleeps_at_once = true;
            spin.looks = LOOKS_AT_FULL_SPEED;
        }
        spin
    }

    #[inline]
    fn on(yielding_waits_left: &'static AtomicU32) -> Self {
        let left = yielding_waits_left.load(Ordering::Relaxed);
        if left > 0 {
            yielding_waits_left.store(left - 1, Ordering::Relaxed);
        }
        Self {
            looks: if left > 0 { LOOKS_AT_FULL_SPEED } else { 0 },
            started: 0,
            asked: 0,
            yields: 0,
            turns: 0,
            turns_ticks: 0,
            begins_by_yielding: left > 0,
            ends_in_sleep: false,
            yielding_waits_left,
            patience: None,
            sleeps_at_once: false,
            minds_crowd: false,
            has_hope: false,
            tries_turns: false,
        }
    }

    /// Waits a moment; says what to do next.
    #[inline]
    pub fn turn(&mut self) -> Turn {
        self.turn_of(1)
    }

    /// As [`Spin::turn`], after a look that took as long as `looks` ordinary ones.
    #[inline]
    pub fn turn_of(&mut self, looks: u32) -> Turn {
        self.looks = self.looks.saturating_add(looks);
        if self.looks < LOOKS_AT_FULL_SPEED { Turn::Look } else { self.slow_turn() }
    }

    #[cold]
    fn slow_turn(&mut self) -> Turn {
        let now = ticks();
        let is_crowded = self.is_in_crowd(now);
        if self.sleeps_at_once || self.is_over(now) || (is_crowded && !self.has_hope) {
            if let Some(patience) = self.patience.take() {
                patience.note_sleep(now);
            }
            self.ends_in_sleep = true;
            return Turn::Sleep;
        }
        if self.started == 0 {
            self.started = now;
            self.asked = now;
            if !self.begins_by_yielding {
                return Turn::AskKernel;
            }
        }
        if now.wrapping_sub(self.asked) > LIFELINE_MICROSECONDS * TICKS_PER_MICROSECOND {
            self.asked = ticks();
            return Turn::AskKernel;
        }
        if is_crowded {
            return Turn::Look;
        }
        rustix::thread::sched_yield();
        self.note_yield(ticks().wrapping_sub(now));
        Turn::Look
    }

    /// Whether it has been awake for long enough.
    fn is_over(&self, now: u64) -> bool {
        let limit_ticks = AWAKE_MICROSECONDS * TICKS_PER_MICROSECOND + self.turns_ticks;
        let limit_ticks = limit_ticks.min(AWAKE_BESIDE_OTHERS_MICROSECONDS * TICKS_PER_MICROSECOND);
        self.started != 0 && now.wrapping_sub(self.started) > limit_ticks
    }

    /// Whether others want the processor who do not only take short turns, as far as is known: what a yield would bring
    /// is only tried now and then.
    fn is_in_crowd(&mut self, now: u64) -> bool {
        if self.begins_by_yielding || self.tries_turns {
            return self.minds_crowd && self.yields > 0 && !self.gives_turns() && crowd::is_there(now);
        }
        if !self.minds_crowd || !crowd::is_there(now) {
            return false;
        }
        self.tries_turns = CROWDED_WAITS.fetch_add(1, Ordering::Relaxed).is_multiple_of(TURNS_TRIED_EVERY);
        !self.tries_turns
    }

    fn note_yield(&mut self, ticks: u64) {
        self.yields = self.yields.saturating_add(1);
        if (SWITCH_TICKS..TURN_MICROSECONDS * TICKS_PER_MICROSECOND).contains(&ticks) {
            self.turns = self.turns.saturating_add(1);
            self.turns_ticks += ticks;
        }
    }

    /// Whether others had a short turn in most of the yields.
    fn gives_turns(&self) -> bool {
        2 * u64::from(self.turns) > u64::from(self.yields)
    }

    /// At the end of a wait that has yielded.
    #[cold]
    fn learn(&self) {
        let has_helped = self.gives_turns() && !self.ends_in_sleep;
        self.yielding_waits_left.store(if has_helped { YIELDING_WAITS } else { 0 }, Ordering::Relaxed);
    }
}

impl Drop for Spin {
    #[inline]
    fn drop(&mut self) {
        if self.yields > 0 {
            self.learn();
        }
        // What was there before the first look says nothing of waits.
        if let Some(patience) = self.patience
            && self.looks != 0
            && !self.sleeps_at_once
            && patience.vain_waits.load(Ordering::Relaxed) != 0
        {
            patience.forget();
        }
    }
}

impl Default for Spin {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TURN_TICKS: u64 = 2 * TICKS_PER_MICROSECOND;
    const AT_ONCE_TICKS: u64 = SWITCH_TICKS - 1;
    const LATE_TICKS: u64 = TURN_MICROSECONDS * TICKS_PER_MICROSECOND;

    /// Whether a wait looks before it does anything slower.
    fn looks_first(spin: &mut Spin) -> bool {
        (1..LOOKS_AT_FULL_SPEED).all(|_| spin.turn() == Turn::Look && spin.started == 0)
    }

    fn end_after_yields(mut spin: Spin, yields: &[u64]) {
        yields.iter().for_each(|&ticks| spin.note_yield(ticks));
    }

    /// Waits to the end.
    fn wait_in_vain(patience: &'static Patience) {
        let mut spin = Spin::with(patience);
        spin.started = 1;
        while spin.turn() != Turn::Sleep {}
    }

    #[test]
    fn waits_that_never_bring_anything_sleep_at_once_and_now_and_then_one_does_not() {
        static PATIENCE: Patience = Patience::new();
        for _ in 0..VAIN_WAITS {
            assert!(!Spin::with(&PATIENCE).sleeps_at_once);
            PATIENCE.note_sleep(0);
        }
        let sleeps_at_once = |_| {
            let mut spin = Spin::with(&PATIENCE);
            let sleeps_at_once = spin.sleeps_at_once;
            assert_ne!(sleeps_at_once, spin.has_hope);
            if sleeps_at_once {
                assert_eq!(spin.turn(), Turn::Sleep);
            } else {
                PATIENCE.note_sleep(0);
            }
            spin.patience.take();
            sleeps_at_once
        };
        assert_eq!((0..HOPE_EVERY).filter(|&wait| !sleeps_at_once(wait)).count(), 1);
    }

    #[test]
    fn a_wait_that_brings_something_while_awake_gives_hope_again() {
        static PATIENCE: Patience = Patience::new();
        (0..VAIN_WAITS).for_each(|_| PATIENCE.note_sleep(0));
        // Not one that is only about to sleep.
        wait_in_vain(&PATIENCE);
        assert!(PATIENCE.is_lost());
        drop(Spin::with(&PATIENCE));
        assert!(PATIENCE.is_lost());
        let mut spin = Spin::with(&PATIENCE);
        spin.sleeps_at_once = false;
        drop(spin);
        assert!(!PATIENCE.is_lost());
    }

    #[test]
    fn waits_stay_awake_in_spite_of_all_while_that_brings_something() {
        static PATIENCE: Patience = Patience::new();
        (0..HOPE_EVERY).for_each(|_| PATIENCE.note_sleep(0));
        for _ in 0..3 {
            let mut spin = Spin::with(&PATIENCE);
            assert!(spin.has_hope && !spin.sleeps_at_once && spin.turn() == Turn::Look);
        }
        wait_in_vain(&PATIENCE);
        assert!(!Spin::with(&PATIENCE).has_hope);
    }

    #[test]
    fn a_short_sleep_gives_hope_again_and_a_long_one_does_not() {
        static PATIENCE: Patience = Patience::new();
        (0..VAIN_WAITS).for_each(|_| PATIENCE.note_sleep(1000));
        PATIENCE.note_awake_at(1000 + SHORT_SLEEP_MICROSECONDS * TICKS_PER_MICROSECOND);
        assert!(PATIENCE.is_lost());
        PATIENCE.note_awake_at(999 + SHORT_SLEEP_MICROSECONDS * TICKS_PER_MICROSECOND);
        assert!(!PATIENCE.is_lost());
    }

    #[test]
    fn waits_yield_first_once_turns_of_others_have_brought_what_looks_had_not() {
        static LEFT: AtomicU32 = AtomicU32::new(0);
        end_after_yields(Spin::on(&LEFT), &[TURN_TICKS, TURN_TICKS]);
        for _ in 0..3 {
            let mut spin = Spin::on(&LEFT);
            assert!(!looks_first(&mut spin) && spin.yields > 0);
            (spin.yields, spin.turns) = (0, 0);
            end_after_yields(spin, &[TURN_TICKS]);
        }
        // Where nothing is waited for, nothing is learned.
        (0..YIELDING_WAITS).for_each(|_| drop(Spin::on(&LEFT)));
        assert!(looks_first(&mut Spin::on(&LEFT)));
    }

    #[test]
    fn waits_look_first_where_others_kept_the_processor_or_did_not_want_it() {
        for yields in [&[LATE_TICKS][..], &[AT_ONCE_TICKS], &[TURN_TICKS, AT_ONCE_TICKS], &[TURN_TICKS, LATE_TICKS]] {
            static LEFT: AtomicU32 = AtomicU32::new(0);
            end_after_yields(Spin::on(&LEFT), yields);
            assert!(looks_first(&mut Spin::on(&LEFT)), "{yields:?}");
            LEFT.store(YIELDING_WAITS, Ordering::Relaxed);
            end_after_yields(Spin::on(&LEFT), yields);
            assert!(looks_first(&mut Spin::on(&LEFT)), "again after {yields:?}");
        }
    }

    #[test]
    fn waits_look_first_while_that_finds_what_they_wait_for() {
        static LEFT: AtomicU32 = AtomicU32::new(0);
        for _ in 0..3 {
            assert!(looks_first(&mut Spin::on(&LEFT)));
        }
    }

    #[test]
    fn waits_look_first_after_one_that_ended_in_sleep() {
        for left in [0, YIELDING_WAITS] {
            static LEFT: AtomicU32 = AtomicU32::new(0);
            LEFT.store(left, Ordering::Relaxed);
            let mut spin = Spin::on(&LEFT);
            spin.ends_in_sleep = true;
            end_after_yields(spin, &[TURN_TICKS]);
            assert!(looks_first(&mut Spin::on(&LEFT)));
        }
    }

    #[test]
    fn turns_of_others_do_not_count_as_being_awake_but_there_is_an_end() {
        static LEFT: AtomicU32 = AtomicU32::new(0);
        let mut spin = Spin::on(&LEFT);
        spin.looks = LOOKS_AT_FULL_SPEED;
        assert_eq!(spin.turn(), Turn::AskKernel);
        spin.turns_ticks = u64::MAX / 2;
        spin.started = spin.started.wrapping_sub(2 * AWAKE_MICROSECONDS * TICKS_PER_MICROSECOND);
        assert_ne!(spin.turn(), Turn::Sleep);
        spin.started = spin.started.wrapping_sub(AWAKE_BESIDE_OTHERS_MICROSECONDS * TICKS_PER_MICROSECOND);
        assert_eq!(spin.turn(), Turn::Sleep);
    }
}
