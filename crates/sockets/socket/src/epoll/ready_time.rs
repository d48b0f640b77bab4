//! When registrations became ready: what decides the order in which waits report them.
//!
//! The kernel has a list that a file joins at its tail when it becomes ready. Memory has no such list, so senders stamp
//! their records, and a wait sorts what it finds by the stamps.

use crate::process::clock::stamp_now;
use lane::STAMP_BITS;

const STAMP_MASK: u64 = (1 << STAMP_BITS) - 1;
/// Records may have arrived since the clock was read: this much later, a few milliseconds.
const AHEAD_MAX: u64 = 1 << 18;

/// A point in time, in the unit of stamps, that does not wrap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ReadyTime(u64);

impl ReadyTime {
    /// The clock that stamps are taken from; those that this process sends from now on are later.
    #[inline]
    pub fn now() -> Self {
        Self(stamp_now())
    }

    /// Behind others that get the same time.
    #[inline]
    pub fn behind(self, others: usize) -> Self {
        Self(self.0.saturating_add(others as u64))
    }

    /// In the unit of stamps.
    #[cfg(test)]
    pub fn units(self) -> u64 {
        self.0
    }

    /// The time of a stamp, which wraps: the one nearest to `now`. One that is far in the future, which only a peer
    /// that breaks the protocol writes, or older than half the range of stamps, counts as `now`. So all times are
    /// totally ordered whatever a peer wrote.
    #[inline]
    pub fn from_stamp(stamp: u64, now: Self) -> Self {
        Self::near(stamp, now).unwrap_or(now)
    }

    fn near(stamp: u64, now: Self) -> Option<Self> {
        let ahead = stamp.wrapping_sub(now.0) & STAMP_MASK;
        let age = now.0.wrapping_sub(stamp) & STAMP_MASK;
        match () {
            () if ahead <= AHEAD_MAX => Some(Self(now.0.saturating_add(ahead))),
            () if age <= STAMP_MASK / 2 => Some(Self(now.0.saturating_sub(age))),
            () => None,
        }
    }
}

/// The time of a stamp that a scan has found which began at `now`, and may have been interrupted since.
#[inline]
fn sent_at(stamp: u64, now: ReadyTime) -> ReadyTime {
    ReadyTime::near(stamp, now).unwrap_or_else(|| ReadyTime::from_stamp(stamp, ReadyTime::now()))
}

/// When a registration joined the ready list, as the kernel would have it: when its first unread record arrived
/// (`stamp`), or, where there is none, when it was `seen` ready; and not before it was added, changed or last reported
/// (`joined`), for then it goes to the tail.
#[inline]
pub(super) fn ready_time(stamp: Option<u64>, seen: ReadyTime, joined: ReadyTime, now: ReadyTime) -> ReadyTime {
    stamp.map_or(seen, |stamp| sent_at(stamp, now)).max(joined)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 7 << STAMP_BITS;

    /// What a sender writes at this time.
    fn stamp_at(time: u64) -> u64 {
        time & STAMP_MASK
    }

    #[test]
    fn stamps_keep_their_order_where_they_wrap() {
        let now = ReadyTime(BASE + 50);
        let times = [BASE - 1000, BASE - 1, BASE, BASE + 1, BASE + 50].map(|time| (time, stamp_at(time)));
        for (time, stamp) in times {
            assert_eq!(ReadyTime::from_stamp(stamp, now), ReadyTime(time));
        }
    }

    #[test]
    fn a_stamp_of_the_future_counts_as_now() {
        let now = ReadyTime(BASE + 50);
        assert_eq!(ReadyTime::from_stamp(stamp_at(BASE + 51 + AHEAD_MAX), now), now);
        assert_eq!(ReadyTime::from_stamp(stamp_at(BASE + 50 + STAMP_MASK / 2), now), now);
        assert_eq!(ReadyTime::from_stamp(stamp_at(BASE + 51), now), ReadyTime(BASE + 51), "arrived since");
        assert_eq!(ReadyTime::from_stamp(!0, ReadyTime(3)), ReadyTime(0), "just before the counter started");
    }

    const NOW: ReadyTime = ReadyTime(BASE + 1000);

    fn at(time: u64) -> ReadyTime {
        ReadyTime(BASE + time)
    }

    fn stamped(time: u64) -> Option<u64> {
        Some(stamp_at(BASE + time))
    }

    #[test]
    fn what_was_reported_is_behind_what_arrived_before_that() {
        assert_eq!(ready_time(stamped(500), NOW, at(100), NOW), at(500));
        assert_eq!(ready_time(stamped(500), NOW, at(900), NOW), at(900));
        assert_eq!(ready_time(None, at(700), at(100), NOW), at(700));
        assert_eq!(ready_time(None, at(700), at(900), NOW), at(900));
    }
}
