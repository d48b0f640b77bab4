//! Waiting that is bounded and yields.

use crate::clock::{TICKS_PER_MICROSECOND, ticks};
use crate::crowd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Looks at full speed before anything slower: about ten microseconds.
const LOOKS_AT_FULL_SPEED: u32 = 1500;
/// So many waits begin by yielding after one that found the peer to need this processor.
const YIELDING_WAITS: u32 = 256;
/// A yield that lasted longer was not the peer's turn alone: other programs ran.
const TURN_MICROSECONDS: u64 = 20;
/// How long a waiter stays awake before it sleeps in the kernel. A wake-up across cores costs 20 us and more, so
/// waiting for about twice that is never much worse than the best choice in hindsight.
const AWAKE_MICROSECONDS: u64 = 50;
/// How often a waiter looks at the lifeline, which is a system call.
const LIFELINE_MICROSECONDS: u64 = 5;
/// After so many waits in a row that outlasted being awake, waits sleep at once.
const VAIN_WAITS: u32 = 8;
/// After so many sleeps one wait stays awake whatever was learned, and so do those that follow it while that brings
/// something. Two ends that both sleep at once find out by it that neither has to.
const HOPE_EVERY: u32 = 32;
/// A sleep that ended sooner, with its wake-up, is one that being awake would have saved.
const SHORT_SLEEP_MICROSECONDS: u64 = AWAKE_MICROSECONDS;

static PROCESSORS: AtomicU32 = AtomicU32::new(0);
static YIELDING_WAITS_LEFT: AtomicU32 = AtomicU32::new(0);

/// Processors this process may run on.
fn processors() -> u32 {
    match PROCESSORS.load(Ordering::Relaxed) {
        0 => {
            let count = rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count()).max(1);
            PROCESSORS.store(count, Ordering::Relaxed);
            count
        }
        count => count,
    }
}

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
/// A process that may run on one processor cannot know whether its peer needs the same one, and looking without
/// yielding keeps it from answering, or runs on another, and yielding is slow. It looks, and learns: where the first
/// yield brought what all looks before had not, the waits to come begin with yielding. Now and then one looks again.
///
/// Where more programs want to run than there are processors, being awake is worse than being asleep: the kernel runs
/// at once who wakes, and last who has used its share. What is not there at full speed is slept for then.
#[derive(Debug)]
pub struct Spin {
    looks: u32,
    started: u64,
    asked: u64,
    yields: u32,
    yielded: u64,
    /// Where a wait that looked first, on the only processor there is, leaves what it has learned.
    lesson: Option<&'static AtomicU32>,
    /// What earlier waits at this place have learned.
    patience: Option<&'static Patience>,
    sleeps_at_once: bool,
    minds_crowd: bool,
    /// It stays awake in a crowd too, and does not yield there.
    has_hope: bool,
}

impl Spin {
    /// A wait that starts now.
    #[inline]
    pub fn new() -> Self {
        let mut spin = Self::on(processors(), &YIELDING_WAITS_LEFT);
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
    fn on(processors: u32, yielding_waits_left: &'static AtomicU32) -> Self {
        let mut spin = Self {
            looks: 0,
            started: 0,
            asked: 0,
            yields: 0,
            yielded: 0,
            lesson: None,
            patience: None,
            sleeps_at_once: false,
            minds_crowd: false,
            has_hope: false,
        };
        if processors == 1 {
            match yielding_waits_left.load(Ordering::Relaxed) {
                0 => spin.lesson = Some(yielding_waits_left),
                left => {
                    yielding_waits_left.store(left - 1, Ordering::Relaxed);
                    spin.looks = LOOKS_AT_FULL_SPEED;
                }
            }
        }
        spin
    }

    /// Waits a moment; says what to do next.
    #[inline]
    pub fn turn(&mut self) -> Turn {
        self.looks = self.looks.saturating_add(1);
        if self.looks < LOOKS_AT_FULL_SPEED { Turn::Look } else { self.slow_turn() }
    }

    /// As [`Spin::turn`], after a look that took as long as `looks` ordinary ones.
    #[inline]
    pub fn turn_of(&mut self, looks: u32) -> Turn {
        self.looks = self.looks.saturating_add(looks);
        if self.looks < LOOKS_AT_FULL_SPEED { Turn::Look } else { self.slow_turn() }
    }

    /// At the end of a wait, which is `now`.
    #[cold]
    fn learn(&mut self, now: u64) {
        let was_quick = now.wrapping_sub(self.yielded) < TURN_MICROSECONDS * TICKS_PER_MICROSECOND;
        if let Some(yielding_waits_left) = self.lesson.take()
            && self.yields == 1
            && was_quick
        {
            yielding_waits_left.store(YIELDING_WAITS, Ordering::Relaxed);
        }
    }

    #[cold]
    fn slow_turn(&mut self) -> Turn {
        let now = ticks();
        let is_over = self.started != 0 && now.wrapping_sub(self.started) > AWAKE_MICROSECONDS * TICKS_PER_MICROSECOND;
        let is_crowded = self.minds_crowd && crowd::is_there(now);
        if self.sleeps_at_once || is_over || (is_crowded && !self.has_hope) {
            if let Some(patience) = self.patience.take() {
                patience.note_sleep(now);
            }
            return Turn::Sleep;
        }
        if self.started == 0 {
            self.started = now;
            self.asked = now;
            return Turn::AskKernel;
        }
        if now.wrapping_sub(self.asked) > LIFELINE_MICROSECONDS * TICKS_PER_MICROSECOND {
            self.asked = now;
            return Turn::AskKernel;
        }
        if is_crowded {
            return Turn::Look;
        }
        self.yielded = now;
        rustix::thread::sched_yield();
        self.yields = self.yields.saturating_add(1);
        Turn::Look
    }
}

impl Drop for Spin {
    #[inline]
    fn drop(&mut self) {
        if self.yields == 1 {
            self.learn(ticks());
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

    /// Whether a wait looks before it does anything slower.
    fn looks_first(spin: &mut Spin) -> bool {
        (1..LOOKS_AT_FULL_SPEED).all(|_| spin.turn() == Turn::Look && spin.started == 0)
    }

    fn wait_until_after_yields(spin: &mut Spin, yields: u32) {
        while spin.yields < yields {
            if spin.turn() == Turn::Sleep {
                // Something else ran on this processor for long.
                spin.started = 0;
            }
        }
    }

    fn end_after_yield(mut spin: Spin, ticks: u64) {
        wait_until_after_yields(&mut spin, 1);
        spin.learn(spin.yielded + ticks);
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
    fn with_several_processors_every_wait_looks_first() {
        static LEFT: AtomicU32 = AtomicU32::new(0);
        for yields in [0, 1, 2, 0] {
            let mut spin = Spin::on(2, &LEFT);
            assert!(looks_first(&mut spin));
            wait_until_after_yields(&mut spin, yields);
        }
    }

    #[test]
    fn on_one_processor_waits_yield_first_once_a_yield_has_brought_what_looks_had_not() {
        static LEFT: AtomicU32 = AtomicU32::new(0);
        end_after_yield(Spin::on(1, &LEFT), 1);
        for _ in 0..YIELDING_WAITS {
            let mut spin = Spin::on(1, &LEFT);
            assert_eq!(spin.turn(), Turn::AskKernel);
            end_after_yield(spin, 1);
        }
        assert!(looks_first(&mut Spin::on(1, &LEFT)));
    }

    #[test]
    fn on_one_processor_waits_look_first_where_other_programs_took_the_turn() {
        static LEFT: AtomicU32 = AtomicU32::new(0);
        end_after_yield(Spin::on(1, &LEFT), TURN_MICROSECONDS * TICKS_PER_MICROSECOND);
        assert!(looks_first(&mut Spin::on(1, &LEFT)));
    }

    #[test]
    fn on_one_processor_waits_look_first_while_that_finds_what_they_wait_for() {
        static LEFT: AtomicU32 = AtomicU32::new(0);
        for _ in 0..3 {
            let mut spin = Spin::on(1, &LEFT);
            assert!(looks_first(&mut spin));
        }
    }

    #[test]
    fn on_one_processor_waits_look_first_where_the_peer_takes_its_time() {
        static LEFT: AtomicU32 = AtomicU32::new(0);
        wait_until_after_yields(&mut Spin::on(1, &LEFT), 3);
        assert!(looks_first(&mut Spin::on(1, &LEFT)));
    }
}
