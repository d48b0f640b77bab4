//! Waiting that is bounded and yields.

use crate::clock::{TICKS_PER_MICROSECOND, ticks};
use std::sync::atomic::{AtomicU32, Ordering};

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
#[derive(Debug)]
pub struct Spin {
    looks: u32,
    started: u64,
    asked: u64,
    yields: u32,
    yielded: u64,
    /// Where a wait that looked first, on the only processor there is, leaves what it has learned.
    lesson: Option<&'static AtomicU32>,
}

impl Spin {
    /// A wait that starts now.
    #[inline]
    pub fn new() -> Self {
        Self::on(processors(), &YIELDING_WAITS_LEFT)
    }

    #[inline]
    fn on(processors: u32, yielding_waits_left: &'static AtomicU32) -> Self {
        let mut spin = Self { looks: 0, started: 0, asked: 0, yields: 0, yielded: 0, lesson: None };
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
        if self.started == 0 {
            self.started = now;
            self.asked = now;
            return Turn::AskKernel;
        }
        if now.wrapping_sub(self.started) > AWAKE_MICROSECONDS * TICKS_PER_MICROSECOND {
            return Turn::Sleep;
        }
        if now.wrapping_sub(self.asked) > LIFELINE_MICROSECONDS * TICKS_PER_MICROSECOND {
            self.asked = now;
            return Turn::AskKernel;
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
