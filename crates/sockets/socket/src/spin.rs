//! Waiting that is bounded and yields: who looks, who yields, who sleeps, and when.
//!
//! All who wait do it by the same policy: programs at lanes in shared memory and in windows, calls that wait for many
//! connections at once, and the threads of proxies. A wait ([`Spin`]) has three stages:
//!
//! 1. it looks at full speed, for about 10 us;
//! 2. it looks and yields in turn, and asks the kernel every 5 us, until it has been awake for 50 us, not counting
//!    short turns that others had in its yields, and for 300 us at most;
//! 3. it sleeps, until it is rung.
//!
//! With processors to spare that is all there is to it. Nobody can know whether somebody else needs the processor from
//! which he looks. But four things can be measured, and each of them changes the waits to come:
//!
//! * **What others did in a yield**, by each wait that yields, for the process. They had a turn of 0.7 to 100 us: they
//!   need the processor for a moment, and one of them may be who is waited for. They had none, or kept it for longer:
//!   there is nobody, or somebody who computes. Where most yields of a wait brought short turns, and it ended well, the
//!   next 2048 waits begin with the second stage, until 16 in a row bring nothing. Four programs that take turns on two
//!   processors have single waits like that all the time; going back to looks and sleeps for one of them costs them the
//!   better part of both processors.
//! * **How many threads want to run**, by the kernel, asked every 4 ms, for the machine. With more of them than
//!   processors, who is awake is run last when it matters, and who sleeps at once. Waits leave out the second stage
//!   then, but for those whose yields bring short turns. After 16 waits one tries what yields bring; twice as many each
//!   time that it was nothing, 1024 at most.
//! * **Waits in a row that ended in a long sleep**, at one place ([`Patience::new`]). What is waited for there does not
//!   come within 50 us: after 8 of them, waits leave out both stages. One in 32 does not, and while that brings
//!   something, none does.
//! * **How long a thread was away**, in a yield or between two looks of a thread that many wait for
//!   ([`Patience::of_server`]), for the process (`crate::hogs`). Nearly all the time, milliseconds at once: somebody
//!   computes on its processor, and will again. Waits do not yield for a while, and after one that was in vain, some at
//!   its place sleep at once: twice as many each time, 32 at most. A thread that many wait for leaves out the second
//!   stage then.
//!
//! They are four because none says what another does. Yields cost a waiter its turn, so they are not tried where the
//! kernel says that somebody computes. The kernel's count does not tell who gives a turn back, nor whether they run on
//! this processor. And what is waited for may never come, on the idlest machine. They are one policy because each wait
//! is decided in one place when it begins (`Manner::of`), and in one after each look (`Spin::next_step`).

use crate::clock::{TICKS_PER_MICROSECOND, ticks};
use crate::crowd;
use crate::hogs::Hogs;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Looks at full speed before anything slower: about ten microseconds.
const LOOKS_AT_FULL_SPEED: u32 = 1500;
/// So many waits begin by yielding after one that found others to need this processor.
const YIELDING_WAITS: u32 = 2048;
/// So many in a row that brought nothing end that.
const VAIN_YIELDING_WAITS: u32 = 16;
/// Of waits in a crowd, so many do not find out whether others only take short turns before one does.
const UNTRIED_WAITS: RangeInclusive<u32> = 16..=1024;
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
/// So many waits at one place sleep at once after one beside hogs that was in vain. Two ends with a processor each lose
/// it at times, and are as fast as ever in between; those that share one with whom they wait for must not look at all.
const SLEEPING_WAITS: RangeInclusive<u32> = 1..=32;

/// What the waits of a process have taught about the processors.
#[derive(Debug)]
struct Lessons {
    yielding_waits_left: AtomicU32,
    /// Waits in a row whose yields brought nothing.
    vain_yielding_waits: AtomicU32,
    /// Waits in a crowd before one that yields.
    untried_waits_left: AtomicU32,
    untried_waits: Backoff,
    /// Whether there is a crowd; by the clock's ticks.
    is_crowd_there: fn(u64) -> bool,
    hogs: Hogs,
}

static LESSONS: Lessons = Lessons::new(crowd::is_there);

impl Lessons {
    const fn new(is_crowd_there: fn(u64) -> bool) -> Self {
        Self {
            yielding_waits_left: AtomicU32::new(0),
            vain_yielding_waits: AtomicU32::new(0),
            untried_waits_left: AtomicU32::new(0),
            untried_waits: Backoff::new(UNTRIED_WAITS),
            is_crowd_there,
            hogs: Hogs::new(),
        }
    }

    #[inline]
    fn take_yielding_wait(&self) -> bool {
        take_one(&self.yielding_waits_left)
    }

    /// At the end of a wait that has yielded.
    #[cold]
    fn learn(&self, wait: &Spin) {
        if wait.yields.give_turns() && !wait.ends_in_sleep {
            self.vain_yielding_waits.store(0, Ordering::Relaxed);
            self.untried_waits.reset();
            self.untried_waits_left.store(0, Ordering::Relaxed);
            return self.yielding_waits_left.store(YIELDING_WAITS, Ordering::Relaxed);
        }
        let vain = self.vain_yielding_waits.load(Ordering::Relaxed).saturating_add(1);
        self.vain_yielding_waits.store(vain, Ordering::Relaxed);
        if vain >= VAIN_YIELDING_WAITS {
            self.yielding_waits_left.store(0, Ordering::Relaxed);
        }
        if wait.tries_turns {
            self.untried_waits_left.store(self.untried_waits.next(), Ordering::Relaxed);
        }
    }
}

/// How many waits to do without something, after it has failed: twice as many each time, until it works.
#[derive(Debug)]
struct Backoff {
    range: RangeInclusive<u32>,
    next: AtomicU32,
}

impl Backoff {
    const fn new(range: RangeInclusive<u32>) -> Self {
        let next = AtomicU32::new(*range.start());
        Self { range, next }
    }

    fn next(&self) -> u32 {
        let next = self.next.load(Ordering::Relaxed);
        self.next.store((2 * next).min(*self.range.end()), Ordering::Relaxed);
        next
    }

    fn reset(&self) {
        self.next.store(*self.range.start(), Ordering::Relaxed);
    }
}

/// Counts down; `false`: none was left. Two threads may count as one.
#[inline]
fn take_one(left: &AtomicU32) -> bool {
    let count = left.load(Ordering::Relaxed);
    if count > 0 {
        left.store(count - 1, Ordering::Relaxed);
    }
    count > 0
}

/// What the waits at one place have taught: whether being awake brings what they wait for.
#[derive(Debug)]
pub struct Patience {
    is_of_server: bool,
    /// Waits in a row that slept long.
    vain_waits: AtomicU32,
    /// Waits that slept.
    sleeps: AtomicU32,
    /// Clock ticks when the last of them began to.
    asleep_since: AtomicU64,
    /// Waits that sleep at once.
    sleeping_waits_left: AtomicU32,
    sleeping_waits: Backoff,
}

impl Patience {
    /// That has learned nothing.
    pub const fn new() -> Self {
        Self {
            is_of_server: false,
            vain_waits: AtomicU32::new(0),
            sleeps: AtomicU32::new(0),
            asleep_since: AtomicU64::new(0),
            sleeping_waits_left: AtomicU32::new(0),
            sleeping_waits: Backoff::new(SLEEPING_WAITS),
        }
    }

    /// Of a thread that many wait for: it learns by looks that come late ([`Spin::note_look`]) instead of vain waits,
    /// for what it waits for comes from anybody.
    pub const fn of_server() -> Self {
        Self { is_of_server: true, ..Self::new() }
    }

    /// Forgets what it has learned.
    pub fn forget(&self) {
        self.vain_waits.store(0, Ordering::Relaxed);
    }

    /// Whether there are, as far as this process has found, fewer processors than parties that need one.
    pub fn is_crowded(&self) -> bool {
        LESSONS.hogs.may_be_there() || self.takes_turns()
    }

    /// Whether that is because others take short turns when this process yields.
    pub fn takes_turns(&self) -> bool {
        !LESSONS.hogs.may_be_there() && LESSONS.yielding_waits_left.load(Ordering::Relaxed) > 0
    }

    #[inline]
    fn is_lost(&self) -> bool {
        self.vain_waits.load(Ordering::Relaxed) >= VAIN_WAITS
    }

    #[inline]
    fn has_hope(&self) -> bool {
        !self.is_of_server && self.sleeps.load(Ordering::Relaxed).is_multiple_of(HOPE_EVERY)
    }

    #[cold]
    fn note_sleep(&self, now: u64) {
        if self.is_of_server {
            return;
        }
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

    /// For the next waits.
    fn sleep_at_once(&self) {
        self.sleeping_waits_left.store(self.sleeping_waits.next(), Ordering::Relaxed);
    }
}

impl Default for Patience {
    fn default() -> Self {
        Self::new()
    }
}

/// With which stage a wait begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// It looks at full speed.
    Looks,
    /// It yields from its first look on.
    Yields,
    /// It sleeps after its first look.
    Sleeps,
}

impl Manner {
    /// What earlier waits have taught a new one, and whether it is to hope in spite of a crowd.
    #[inline]
    fn of(lessons: &Lessons, patience: Option<&Patience>) -> (Self, bool) {
        if patience.is_some_and(|patience| take_one(&patience.sleeping_waits_left)) {
            return (Self::Sleeps, false);
        }
        if lessons.hogs.may_be_there() && lessons.hogs.are_there(ticks()) {
            return (Self::Looks, patience.is_none_or(|patience| !patience.is_of_server));
        }
        let awake = if lessons.take_yielding_wait() { Self::Yields } else { Self::Looks };
        match patience {
            Some(patience) if patience.has_hope() => (awake, true),
            Some(patience) if patience.is_lost() => (Self::Sleeps, false),
            _ => (awake, false),
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

/// What a wait does before its next look, once full speed has brought nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Sleep,
    AskKernel,
    Yield,
    Nothing,
}

/// What this process knows of programs that compute.
pub(crate) fn hogs() -> &'static Hogs {
    &LESSONS.hogs
}

/// Whether a yield that took so long was the turn of somebody who waits, or copies a message.
pub(crate) fn is_short_turn(ticks: u64) -> bool {
    (SWITCH_TICKS..TURN_MICROSECONDS * TICKS_PER_MICROSECOND).contains(&ticks)
}

/// What others did in the yields of a wait.
#[derive(Debug, Clone, Copy, Default)]
struct Yields {
    count: u32,
    /// Those in which others had a short turn.
    turns: u32,
    /// Ticks of those turns.
    turns_ticks: u64,
}

impl Yields {
    fn note(&mut self, ticks: u64) {
        self.count = self.count.saturating_add(1);
        if is_short_turn(ticks) {
            self.turns = self.turns.saturating_add(1);
            self.turns_ticks += ticks;
        }
    }

    /// Whether others had a short turn in most of them.
    fn give_turns(&self) -> bool {
        2 * u64::from(self.turns) > u64::from(self.count)
    }
}

/// One wait: call [`Spin::turn`] after every look that found nothing. See the module for what it does when.
#[derive(Debug)]
pub struct Spin {
    looks: u32,
    /// When looking became slow.
    started: u64,
    asked: u64,
    yields: Yields,
    manner: Manner,
    /// It stays awake in a crowd too, and does not yield there.
    has_hope: bool,
    /// It is the one that finds out what yields bring in a crowd.
    tries_turns: bool,
    ends_in_sleep: bool,
    lessons: &'static Lessons,
    patience: Option<&'static Patience>,
    /// When it last looked, where it was told.
    looked: u64,
}

impl Spin {
    /// A wait that starts now.
    #[inline]
    pub fn new() -> Self {
        Self::by(&LESSONS, None)
    }

    /// As [`Spin::new`], at a place where waits learn from each other. A sleep that it ends with is told to
    /// [`Patience::note_awake`].
    #[inline]
    pub fn with(patience: &'static Patience) -> Self {
        Self::by(&LESSONS, Some(patience))
    }

    #[inline]
    fn by(lessons: &'static Lessons, patience: Option<&'static Patience>) -> Self {
        let (manner, has_hope) = Manner::of(lessons, patience);
        Self {
            looks: if manner == Manner::Looks { 0 } else { LOOKS_AT_FULL_SPEED },
            started: 0,
            asked: 0,
            yields: Yields::default(),
            manner,
            has_hope,
            tries_turns: false,
            ends_in_sleep: false,
            lessons,
            patience,
            looked: 0,
        }
    }

    /// Whether its first turn says to sleep: whoever looks at many may spare itself the look.
    pub fn sleeps_at_once(&self) -> bool {
        self.manner == Manner::Sleeps
    }

    /// A server looks now, for the first time in this wait or again; answers where the clock's ticks are.
    pub fn note_look(&mut self) -> u64 {
        let now = ticks();
        self.note_look_at(now);
        now
    }

    fn note_look_at(&mut self, now: u64) {
        let before = std::mem::replace(&mut self.looked, now);
        if before != 0 {
            self.lessons.hogs.note_away(before, now);
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
        match self.next_step(now) {
            Step::Sleep => {
                if let Some(patience) = self.patience.take() {
                    if self.manner != Manner::Sleeps && self.lessons.hogs.may_be_there() {
                        patience.sleep_at_once();
                    }
                    patience.note_sleep(now);
                }
                self.ends_in_sleep = true;
                Turn::Sleep
            }
            Step::AskKernel => {
                self.asked = now;
                Turn::AskKernel
            }
            Step::Yield => {
                rustix::thread::sched_yield();
                let after = ticks();
                self.yields.note(after.wrapping_sub(now));
                self.lessons.hogs.note_away(now, after);
                Turn::Look
            }
            Step::Nothing => Turn::Look,
        }
    }

    /// What comes now, in the second stage.
    fn next_step(&mut self, now: u64) -> Step {
        if self.manner == Manner::Sleeps || self.is_over(now) {
            return Step::Sleep;
        }
        let is_crowded = self.is_in_crowd(now);
        if is_crowded && !self.has_hope {
            return Step::Sleep;
        }
        if self.started == 0 {
            (self.started, self.asked) = (now, now);
            if self.manner == Manner::Looks {
                return Step::AskKernel;
            }
        }
        match () {
            () if now.wrapping_sub(self.asked) > LIFELINE_MICROSECONDS * TICKS_PER_MICROSECOND => Step::AskKernel,
            () if is_crowded => Step::Nothing,
            () => Step::Yield,
        }
    }

    /// Whether it has been awake for long enough.
    fn is_over(&self, now: u64) -> bool {
        let limit_ticks = AWAKE_MICROSECONDS * TICKS_PER_MICROSECOND + self.yields.turns_ticks;
        let limit_ticks = limit_ticks.min(AWAKE_BESIDE_OTHERS_MICROSECONDS * TICKS_PER_MICROSECOND);
        self.started != 0 && now.wrapping_sub(self.started) > limit_ticks
    }

    /// Whether others want the processor who do not only take short turns, as far as is known: what a yield would bring
    /// is only tried now and then.
    fn is_in_crowd(&mut self, now: u64) -> bool {
        if self.lessons.hogs.are_there(now) {
            return true;
        }
        let is_there = self.lessons.is_crowd_there;
        if self.manner == Manner::Yields || self.tries_turns {
            return self.yields.count > 0 && !self.yields.give_turns() && is_there(now);
        }
        if !is_there(now) {
            return false;
        }
        self.tries_turns = !take_one(&self.lessons.untried_waits_left);
        !self.tries_turns
    }
}

impl Drop for Spin {
    #[inline]
    fn drop(&mut self) {
        if self.yields.count > 0 {
            self.lessons.learn(self);
        }
        // What was there before the first look says nothing of waits.
        let Some(patience) = self.patience.filter(|_| self.looks != 0 && !self.sleeps_at_once()) else { return };
        if patience.vain_waits.load(Ordering::Relaxed) != 0 {
            patience.forget();
        }
        if self.lessons.hogs.may_be_there() {
            patience.sleeping_waits.reset();
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
    const LONG_TICKS: u64 = TURN_MICROSECONDS * TICKS_PER_MICROSECOND;

    /// Lessons of a test, on a machine with processors to spare.
    const fn quiet() -> Lessons {
        Lessons::new(|_| false)
    }

    fn wait_on(lessons: &'static Lessons) -> Spin {
        Spin::by(lessons, None)
    }

    /// A wait that learns at its place, and nothing from what the process has been through in other tests.
    fn wait_at(patience: &'static Patience) -> Spin {
        static LESSONS: Lessons = quiet();
        Spin::by(&LESSONS, Some(patience))
    }

    /// Whether a wait looks before it does anything slower.
    fn looks_first(spin: &mut Spin) -> bool {
        (1..LOOKS_AT_FULL_SPEED).all(|_| spin.turn() == Turn::Look && spin.started == 0)
    }

    fn end_after_yields(mut spin: Spin, yields: &[u64]) {
        yields.iter().for_each(|&ticks| spin.yields.note(ticks));
    }

    /// Waits to the end.
    fn wait_in_vain(patience: &'static Patience) {
        let mut spin = wait_at(patience);
        spin.started = 1;
        while spin.turn() != Turn::Sleep {}
    }

    #[test]
    fn waits_that_never_bring_anything_sleep_at_once_and_now_and_then_one_does_not() {
        static PATIENCE: Patience = Patience::new();
        for _ in 0..VAIN_WAITS {
            assert!(!wait_at(&PATIENCE).sleeps_at_once());
            PATIENCE.note_sleep(0);
        }
        let sleeps_at_once = |_| {
            let mut spin = wait_at(&PATIENCE);
            let sleeps_at_once = spin.sleeps_at_once();
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
        drop(wait_at(&PATIENCE));
        assert!(PATIENCE.is_lost());
        let mut spin = wait_at(&PATIENCE);
        spin.manner = Manner::Looks;
        drop(spin);
        assert!(!PATIENCE.is_lost());
    }

    #[test]
    fn waits_stay_awake_in_spite_of_all_while_that_brings_something() {
        static PATIENCE: Patience = Patience::new();
        (0..HOPE_EVERY).for_each(|_| PATIENCE.note_sleep(0));
        for _ in 0..3 {
            let mut spin = wait_at(&PATIENCE);
            assert!(spin.has_hope && !spin.sleeps_at_once() && spin.turn() == Turn::Look);
        }
        wait_in_vain(&PATIENCE);
        assert!(!wait_at(&PATIENCE).has_hope);
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
        static LESSONS: Lessons = quiet();
        end_after_yields(wait_on(&LESSONS), &[TURN_TICKS, TURN_TICKS]);
        for _ in 0..3 {
            let mut spin = wait_on(&LESSONS);
            assert!(!looks_first(&mut spin) && spin.yields.count > 0);
            spin.yields = Yields::default();
            end_after_yields(spin, &[TURN_TICKS]);
        }
        // Where nothing is waited for, nothing is learned.
        (0..YIELDING_WAITS).for_each(|_| drop(wait_on(&LESSONS)));
        assert!(looks_first(&mut wait_on(&LESSONS)));
    }

    #[test]
    fn waits_look_first_where_others_kept_the_processor_or_did_not_want_it() {
        for yields in [&[LONG_TICKS][..], &[AT_ONCE_TICKS], &[TURN_TICKS, AT_ONCE_TICKS], &[TURN_TICKS, LONG_TICKS]] {
            static LESSONS: Lessons = quiet();
            end_after_yields(wait_on(&LESSONS), yields);
            assert!(looks_first(&mut wait_on(&LESSONS)), "{yields:?}");
            end_after_yields(wait_on(&LESSONS), &[TURN_TICKS]);
            for _ in 0..VAIN_YIELDING_WAITS {
                assert_eq!(wait_on(&LESSONS).manner, Manner::Yields, "in spite of one with {yields:?}");
                end_after_yields(wait_on(&LESSONS), yields);
            }
            assert!(looks_first(&mut wait_on(&LESSONS)), "again after {yields:?}");
        }
    }

    #[test]
    fn waits_look_first_while_that_finds_what_they_wait_for() {
        static LESSONS: Lessons = quiet();
        for _ in 0..3 {
            assert!(looks_first(&mut wait_on(&LESSONS)));
        }
    }

    #[test]
    fn waits_look_first_after_some_that_ended_in_sleep() {
        static LESSONS: Lessons = quiet();
        end_after_yields(wait_on(&LESSONS), &[TURN_TICKS]);
        for _ in 0..VAIN_YIELDING_WAITS {
            let mut spin = wait_on(&LESSONS);
            assert_eq!(spin.manner, Manner::Yields);
            spin.ends_in_sleep = true;
            end_after_yields(spin, &[TURN_TICKS]);
        }
        assert!(looks_first(&mut wait_on(&LESSONS)));
    }

    #[test]
    fn turns_of_others_do_not_count_as_being_awake_but_there_is_an_end() {
        static LESSONS: Lessons = quiet();
        let mut spin = wait_on(&LESSONS);
        spin.looks = LOOKS_AT_FULL_SPEED;
        assert_eq!(spin.turn(), Turn::AskKernel);
        spin.yields.turns_ticks = u64::MAX / 2;
        spin.started = spin.started.wrapping_sub(2 * AWAKE_MICROSECONDS * TICKS_PER_MICROSECOND);
        assert_ne!(spin.turn(), Turn::Sleep);
        spin.started = spin.started.wrapping_sub(AWAKE_BESIDE_OTHERS_MICROSECONDS * TICKS_PER_MICROSECOND);
        assert_eq!(spin.turn(), Turn::Sleep);
    }

    #[test]
    fn waits_in_a_crowd_sleep_after_full_speed_and_ever_fewer_try_to_yield() {
        static LESSONS: Lessons = Lessons::new(|_| true);
        let sleeps_before_a_try = || {
            let sleeps = (0..).take_while(|_| wait_on(&LESSONS).is_in_crowd(0)).count();
            let mut spin = wait_on(&LESSONS);
            assert!(!spin.is_in_crowd(0));
            end_after_yields(spin, &[LONG_TICKS]);
            sleeps
        };
        let (least, most) = UNTRIED_WAITS.into_inner();
        let counts = [0, least, 2 * least, 4 * least].map(|count| count as usize);
        assert_eq!([(); 4].map(|()| sleeps_before_a_try()), counts);
        for _ in 0..10 {
            sleeps_before_a_try();
        }
        assert_eq!(sleeps_before_a_try(), most as usize);
        end_after_yields(wait_on(&LESSONS), &[TURN_TICKS]);
        (0..VAIN_YIELDING_WAITS).for_each(|_| end_after_yields(wait_on(&LESSONS), &[LONG_TICKS]));
        assert_eq!([(); 2].map(|()| sleeps_before_a_try()), [0, least as usize]);
        let mut spin = wait_on(&LESSONS);
        assert!(looks_first(&mut spin));
        assert_eq!(spin.turn(), Turn::Sleep);
    }

    #[test]
    fn a_wait_in_a_crowd_goes_on_while_its_yields_bring_short_turns() {
        static LESSONS: Lessons = Lessons::new(|_| true);
        LESSONS.yielding_waits_left.store(2, Ordering::Relaxed);
        for (yields, step) in [(TURN_TICKS, Step::Yield), (LONG_TICKS, Step::Sleep)] {
            let mut spin = wait_on(&LESSONS);
            spin.yields.note(yields);
            assert_eq!(spin.next_step(ticks()), step);
            spin.yields = Yields::default();
        }
    }

    #[test]
    fn waits_beside_hogs_do_not_yield_and_sleep_at_once_after_one_that_was_in_vain() {
        static LESSONS: Lessons = quiet();
        static PATIENCE: Patience = Patience::new();
        LESSONS.yielding_waits_left.store(YIELDING_WAITS, Ordering::Relaxed);
        LESSONS.hogs.begin(ticks());
        let wait = || Spin::by(&LESSONS, Some(&PATIENCE));
        assert!([(); 3].into_iter().all(|()| looks_first(&mut wait())), "while nothing was in vain");
        let sleeping_after_a_vain_one = || {
            let mut spin = wait();
            while spin.turn() != Turn::Sleep {}
            assert_eq!((spin.manner, spin.yields.count), (Manner::Looks, 0));
            drop(spin);
            (0..)
                .take_while(|_| PATIENCE.sleeping_waits_left.load(Ordering::Relaxed) > 0 && wait().sleeps_at_once())
                .count()
        };
        assert_eq!([(); 7].map(|()| sleeping_after_a_vain_one()), [1, 2, 4, 8, 16, 32, 32]);
        assert!(looks_first(&mut wait()), "which ends well");
        assert_eq!(sleeping_after_a_vain_one(), 1);
    }

    #[test]
    fn a_wait_that_yields_stops_when_hogs_are_found() {
        static LESSONS: Lessons = quiet();
        LESSONS.yielding_waits_left.store(1, Ordering::Relaxed);
        let mut spin = wait_on(&LESSONS);
        assert_eq!(spin.next_step(ticks()), Step::Yield);
        LESSONS.hogs.begin(ticks());
        assert_eq!(spin.next_step(ticks()), Step::Sleep);
    }

    #[test]
    fn a_server_finds_hogs_by_its_looks_and_is_awake_beside_them_for_the_first_stage_only() {
        static LESSONS: Lessons = quiet();
        static PATIENCE: Patience = Patience::of_server();
        let late_ticks = crate::clock::TICKS_PER_MILLISECOND;
        let mut spin = Spin::by(&LESSONS, Some(&PATIENCE));
        (0..40).for_each(|count| spin.note_look_at(5 + count * late_ticks));
        assert!(!LESSONS.hogs.may_be_there());
        (1..40).for_each(|count| spin.note_look_at((1 << 40) + count * 4 * late_ticks));
        assert!(LESSONS.hogs.may_be_there());
        LESSONS.hogs.begin(ticks());
        let mut spin = Spin::by(&LESSONS, Some(&PATIENCE));
        assert!(looks_first(&mut spin));
        assert_eq!(spin.turn(), Turn::Sleep);
    }

    #[test]
    fn a_server_does_not_learn_from_waits_that_nobody_ended() {
        static PATIENCE: Patience = Patience::of_server();
        (0..2 * VAIN_WAITS).for_each(|_| wait_in_vain(&PATIENCE));
        assert!(!wait_at(&PATIENCE).sleeps_at_once());
    }
}
