//! Waiting for a ring of a doorbell.

use crate::WaitOutcome;
use std::thread;
use std::time::{Duration, Instant};

/// Polls with `take` until it takes a ring or the timeout has passed. Between polls, `pause` waits for at most the
/// remaining time, `None` without a timeout. A timeout that the clock cannot represent counts as none.
pub(crate) fn wait_for_ring(
    timeout: Option<Duration>,
    mut take: impl FnMut() -> bool,
    mut pause: impl FnMut(Option<Duration>),
) -> WaitOutcome {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        if take() {
            return WaitOutcome::Rung;
        }
        let remaining = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if remaining == Some(Duration::ZERO) {
            return WaitOutcome::TimedOut;
        }
        pause(remaining);
    }
}

/// Yields of a waiter before its first sleep.
const YIELDS: u32 = 32;
const SLEEP_FIRST: Duration = Duration::from_micros(20);
/// Longest sleep of a waiter: the latest that it notices a ring.
const SLEEP_MAX: Duration = Duration::from_millis(2);

/// Pauses of a waiter without a descriptor: first yields, then sleeps that double up to a bound.
#[derive(Debug)]
pub(crate) struct Backoff {
    yields_left: u32,
    sleep: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { yields_left: YIELDS, sleep: SLEEP_FIRST }
    }
}

impl Backoff {
    /// Pauses, no longer than `remaining`.
    pub(crate) fn pause(&mut self, remaining: Option<Duration>) {
        if self.yields_left > 0 {
            self.yields_left -= 1;
            return thread::yield_now();
        }
        thread::sleep(remaining.map_or(self.sleep, |remaining| remaining.min(self.sleep)));
        self.sleep = (2 * self.sleep).min(SLEEP_MAX);
    }
}
