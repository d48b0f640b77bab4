//! Flow control: a sender consumes credits of the receiver's buffer, which the receiver returns when it has freed
//! space.

use std::collections::VecDeque;

use sim::Time;

use crate::tlp::Credits;

/// The credits of one class of packets in one direction.
#[derive(Clone, Debug)]
pub struct CreditPool {
    /// Credits that the receiver advertised; 0 means infinite, as on the wire.
    limit: Credits,
    used: Credits,
    /// Credits that will return, earliest first.
    returns: VecDeque<(Time, Credits)>,
}

/// Returns whether `used` and `more` fit in a limit, where 0 means infinite.
fn fits(used: u32, more: u32, limit: u32) -> bool {
    limit == 0 || used + more <= limit
}

impl CreditPool {
    /// Returns a pool with all of its credits available; a limit of 0 is infinite.
    pub fn new(limit: Credits) -> Self {
        Self { limit, used: Credits::default(), returns: VecDeque::new() }
    }

    /// Returns whether header and data credits are both infinite.
    fn is_infinite(&self) -> bool {
        self.limit == Credits::default()
    }

    /// Consumes `need` at `at`, or as soon afterwards as enough credits have returned, and returns that time.
    ///
    /// # Panics
    /// `need` can never be met: the limit is below one packet, or no credits are due to return.
    pub fn consume(&mut self, at: Time, need: Credits) -> Time {
        if self.is_infinite() {
            return at;
        }
        let mut now = at;
        while let Some(&(when, _)) = self.returns.front() {
            if when > now {
                if self.has(need) {
                    break;
                }
                now = when;
            }
            self.apply_next_return();
        }
        assert!(self.has(need), "{need:?} of {:?} never return", self.limit);
        self.used.header += need.header;
        self.used.data += need.data;
        now
    }

    /// Schedules the return of credits at `at`, but not before those scheduled earlier.
    pub fn schedule_return(&mut self, at: Time, credits: Credits) {
        if !self.is_infinite() {
            let at = self.returns.back().map_or(at, |&(last, _)| at.max(last));
            self.returns.push_back((at, credits));
        }
    }

    fn has(&self, need: Credits) -> bool {
        fits(self.used.header, need.header, self.limit.header) && fits(self.used.data, need.data, self.limit.data)
    }

    fn apply_next_return(&mut self) {
        if let Some((_, credits)) = self.returns.pop_front() {
            self.used.header -= credits.header;
            self.used.data -= credits.data;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use sim::Span;

    fn credits(header: u32, data: u32) -> Credits {
        Credits { header, data }
    }

    proptest! {
        #[test]
        fn a_pool_is_never_overdrawn(
            limit in (1..8_u32, 4..64_u32),
            packets in proptest::collection::vec((0..5_u32, 0..100_u64, 1..500_u64), 1..200),
        ) {
            let mut pool = CreditPool::new(credits(limit.0, limit.1));
            let mut now = Time::ZERO;
            let mut last_return = Time::ZERO;
            for (data, gap, hold) in packets {
                let need = credits(1, data.min(limit.1));
                let spent = pool.consume(now + Span::from_ps(gap), need);
                prop_assert!(spent >= now);
                prop_assert!(pool.used.header <= limit.0 && pool.used.data <= limit.1);
                now = spent;
                last_return = last_return.max(now + Span::from_ps(hold));
                pool.schedule_return(last_return, need);
            }
            pool.consume(last_return, credits(0, 0));
            prop_assert_eq!(pool.used, credits(0, 0));
        }
    }

    #[test]
    fn throughput_is_credits_per_round_trip() {
        let mut pool = CreditPool::new(credits(4, 0));
        let round_trip = Span::from_ps(1000);
        let mut now = Time::ZERO;
        for _ in 0..400 {
            now = pool.consume(now, credits(1, 16));
            pool.schedule_return(now + round_trip, credits(1, 16));
        }
        assert_eq!(now.ps(), 99 * 1000, "four packets a round trip");
    }

    #[test]
    fn infinite_credits_never_wait() {
        let mut pool = CreditPool::new(credits(0, 0));
        for packet in 0..1000 {
            assert_eq!(pool.consume(Time::from_ps(packet), credits(1, 256)), Time::from_ps(packet));
        }
    }
}
