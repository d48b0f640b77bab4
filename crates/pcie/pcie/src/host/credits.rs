//! Flow control: a sender spends credits of the receiver's buffer and gets them back when the receiver has made room.

use std::collections::VecDeque;

use sim::Time;

use crate::tlp::Credits;

/// The credits of one class in one direction.
#[derive(Clone, Debug)]
pub struct CreditPool {
    /// What the receiver advertised; 0 stands for "without limit", as on the wire.
    limit: Credits,
    used: Credits,
    /// When what comes back, earliest first.
    returns: VecDeque<(Time, Credits)>,
}

/// Whether `used` and `more` fit a limit of which 0 means none.
fn fits(used: u32, more: u32, limit: u32) -> bool {
    limit == 0 || used + more <= limit
}

impl CreditPool {
    /// A pool of this many credits, all there; a part that is 0 has no limit.
    pub fn new(limit: Credits) -> Self {
        Self { limit, used: Credits::default(), returns: VecDeque::new() }
    }

    /// Whether neither part has a limit.
    fn is_infinite(&self) -> bool {
        self.limit == Credits::default()
    }

    /// Spends `need` at `at`, or as soon after as enough has come back; answers when.
    ///
    /// # Panics
    /// When `need` can never be met: the limits are below one packet, or nothing is on its way back.
    pub fn spend(&mut self, at: Time, need: Credits) -> Time {
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
            self.take_back();
        }
        assert!(self.has(need), "{need:?} of {:?} never come back", self.limit);
        self.used.header += need.header;
        self.used.data += need.data;
        now
    }

    /// What `spend` took comes back at `at`, or when what was given back before has come.
    pub fn give_back(&mut self, at: Time, credits: Credits) {
        if !self.is_infinite() {
            let at = self.returns.back().map_or(at, |&(last, _)| at.max(last));
            self.returns.push_back((at, credits));
        }
    }

    fn has(&self, need: Credits) -> bool {
        fits(self.used.header, need.header, self.limit.header) && fits(self.used.data, need.data, self.limit.data)
    }

    fn take_back(&mut self) {
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
                let spent = pool.spend(now + Span::from_ps(gap), need);
                prop_assert!(spent >= now);
                prop_assert!(pool.used.header <= limit.0 && pool.used.data <= limit.1);
                now = spent;
                last_return = last_return.max(now + Span::from_ps(hold));
                pool.give_back(last_return, need);
            }
            pool.spend(last_return, credits(0, 0));
            prop_assert_eq!(pool.used, credits(0, 0));
        }
    }

    #[test]
    fn throughput_is_credits_by_round_trip() {
        let mut pool = CreditPool::new(credits(4, 0));
        let round_trip = Span::from_ps(1000);
        let mut now = Time::ZERO;
        for _ in 0..400 {
            now = pool.spend(now, credits(1, 16));
            pool.give_back(now + round_trip, credits(1, 16));
        }
        assert_eq!(now.ps(), 99 * 1000, "four packets a round trip");
    }

    #[test]
    fn no_limit_never_waits() {
        let mut pool = CreditPool::new(credits(0, 0));
        for packet in 0..1000 {
            assert_eq!(pool.spend(Time::from_ps(packet), credits(1, 256)), Time::from_ps(packet));
        }
    }
}
