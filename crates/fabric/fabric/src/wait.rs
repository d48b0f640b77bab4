//! Waiting with a timeout.

use std::thread;
use std::time::{Duration, Instant};

/// When a wait ends. A timeout that the clock cannot represent counts as none.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    pub(crate) fn after(timeout: Option<Duration>) -> Self {
        Self(timeout.and_then(|timeout| Instant::now().checked_add(timeout)))
    }

    /// Time that is left, zero once the deadline has passed; `None` without a deadline.
    pub(crate) fn remaining(self) -> Option<Duration> {
        self.0.map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }
}

/// Pauses of a poll loop: first yields, then sleeps that double up to a bound.
#[derive(Debug)]
pub(crate) struct Backoff {
    yields_left: u32,
    sleep: Duration,
    sleep_max: Duration,
}

const SLEEP_FIRST: Duration = Duration::from_micros(20);

impl Backoff {
    pub(crate) fn new(yields: u32, sleep_max: Duration) -> Self {
        Self { yields_left: yields, sleep: SLEEP_FIRST, sleep_max }
    }

    /// Pauses, no longer than `remaining`.
    pub(crate) fn pause(&mut self, remaining: Option<Duration>) {
        if self.yields_left > 0 {
            self.yields_left -= 1;
            return thread::yield_now();
        }
        thread::sleep(remaining.map_or(self.sleep, |remaining| remaining.min(self.sleep)));
        self.sleep = (2 * self.sleep).min(self.sleep_max);
    }
}
