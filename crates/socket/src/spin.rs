//! Waiting that is bounded and yields.

use crate::clock::{TICKS_PER_MICROSECOND, ticks};
use std::sync::atomic::{AtomicU32, Ordering};

/// Looks at full speed before anything slower: about a microsecond.
const LOOKS_AT_FULL_SPEED: u32 = 1500;
/// How long a waiter stays awake before it sleeps in the kernel. A wake-up across cores costs 20 us and more, so
/// waiting for about twice that is never much worse than the best choice in hindsight.
const AWAKE_MICROSECONDS: u64 = 50;
/// How often a waiter looks at the lifeline, which is a system call.
const LIFELINE_MICROSECONDS: u64 = 5;

static PROCESSORS: AtomicU32 = AtomicU32::new(0);

/// Processors this process may run on. With one, looking without yielding only keeps the peer from answering.
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
#[derive(Debug)]
pub struct Spin {
    looks: u32,
    started: u64,
    asked: u64,
}

impl Spin {
    /// A wait that starts now.
    #[inline]
    pub fn new() -> Self {
        let looks = if processors() == 1 { LOOKS_AT_FULL_SPEED } else { 0 };
        Self { looks, started: 0, asked: 0 }
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
        rustix::thread::sched_yield();
        Turn::Look
    }
}

impl Default for Spin {
    fn default() -> Self {
        Self::new()
    }
}
