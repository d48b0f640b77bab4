//! Rate limits by token buckets.

use crate::Time;

/// The parameters of a token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Sustained rate.
    pub per_second: u32,
    /// Maximum number of events at once, after a pause.
    pub burst: u32,
}

#[derive(Debug)]
pub(crate) struct TokenBucket {
    rate: Rate,
    /// Tokens in units of time: each costs the nanoseconds in which one accrues.
    tokens_ns: u64,
    refilled_at: Time,
}

const NS_PER_S: u64 = 1_000_000_000;

impl TokenBucket {
    /// Creates a full bucket.
    pub(crate) fn new(rate: Rate, now: Time) -> TokenBucket {
        let mut bucket = TokenBucket { rate, tokens_ns: 0, refilled_at: now };
        bucket.tokens_ns = bucket.full_ns();
        bucket
    }

    /// Takes a token if there is one, and returns whether there was.
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
    fn a_burst_is_followed_by_the_rate() {
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
        assert_eq!(taken(&mut bucket, now + Duration::from_secs(3600)), 3, "a long pause accrues one burst");
    }

    #[test]
    fn a_rate_of_zero_allows_nothing() {
        let mut bucket = TokenBucket::new(Rate { per_second: 0, burst: 3 }, Time::ZERO);
        assert!(!bucket.take(Time::from_ns(u64::MAX)));
    }

    #[test]
    fn time_that_goes_backwards_adds_no_tokens() {
        let mut bucket = TokenBucket::new(Rate { per_second: 1, burst: 1 }, Time::from_ns(NS_PER_S));
        assert!(bucket.take(Time::from_ns(NS_PER_S)));
        assert!(!bucket.take(Time::ZERO));
        assert!(!bucket.take(Time::from_ns(NS_PER_S + 1)));
    }
}
