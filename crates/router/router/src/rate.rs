//! How often something may be done.

use crate::Time;

/// A token bucket: so many a second, and at once as many as were saved up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// In the long run.
    pub per_second: u32,
    /// At once, after a pause.
    pub burst: u32,
}

#[derive(Debug)]
pub(crate) struct TokenBucket {
    rate: Rate,
    /// Nanoseconds of saved-up time: each token costs a second's part of it.
    tokens_ns: u64,
    refilled_at: Time,
}

const NS_PER_S: u64 = 1_000_000_000;

impl TokenBucket {
    /// A full one.
    pub(crate) fn new(rate: Rate, now: Time) -> TokenBucket {
        let mut bucket = TokenBucket { rate, tokens_ns: 0, refilled_at: now };
        bucket.tokens_ns = bucket.full_ns();
        bucket
    }

    /// Whether it may be done now; then it counts as done.
    pub(crate) fn take(&mut self, now: Time) -> bool {
        if self.rate.per_second == 0 {
            return false;
        }
        let passed_ns = now.ns().saturating_sub(self.refilled_at.ns());
        self.refilled_at = self.refilled_at.max(now);
        self.tokens_ns = self.tokens_ns.saturating_add(passed_ns).min(self.full_ns());
        let token_ns = self.token_ns();
        if self.tokens_ns < token_ns {
            return false;
        }
        self.tokens_ns -= token_ns;
        true
    }

    fn token_ns(&self) -> u64 {
        NS_PER_S / u64::from(self.rate.per_second.max(1))
    }

    fn full_ns(&self) -> u64 {
        self.token_ns() * u64::from(self.rate.burst.max(1))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_burst_and_then_the_rate() {
        let mut bucket = TokenBucket::new(Rate { per_second: 10, burst: 3 }, Time::ZERO);
        let taken = |bucket: &mut TokenBucket, now| (0..100).filter(|_| bucket.take(now)).count();
        assert_eq!(taken(&mut bucket, Time::ZERO), 3);
        let mut now = Time::ZERO;
        let mut count = 0;
        for _ in 0..1000 {
            now = now + Duration::from_millis(10);
            count += taken(&mut bucket, now);
        }
        assert_eq!(count, 100, "10 s at 10 a second");
        assert_eq!(taken(&mut bucket, now + Duration::from_secs(3600)), 3, "a long pause saves up one burst");
    }

    #[test]
    fn none_a_second_is_never() {
        let mut bucket = TokenBucket::new(Rate { per_second: 0, burst: 3 }, Time::ZERO);
        assert!(!bucket.take(Time::from_ns(u64::MAX)));
    }

    #[test]
    fn time_that_goes_back_gives_nothing() {
        let mut bucket = TokenBucket::new(Rate { per_second: 1, burst: 1 }, Time::from_ns(NS_PER_S));
        assert!(bucket.take(Time::from_ns(NS_PER_S)));
        assert!(!bucket.take(Time::ZERO));
        assert!(!bucket.take(Time::from_ns(NS_PER_S + 1)));
    }
}
