//! The times at which registrations became ready, which decide the order of reports.
//!
//! The kernel has a list to which a file is appended when it becomes ready. Memory has no such list. Senders therefore
//! write a timestamp into their records, and a wait sorts the ready connections by these timestamps.

use crate::process::clock::stamp_now;
use lane::STAMP_BITS;

const STAMP_MASK: u64 = (1 << STAMP_BITS) - 1;
/// Tolerance for records that arrived after the clock was read: a few milliseconds, in units of timestamps.
const AHEAD_MAX: u64 = 1 << 18;

/// A point in time, in units of timestamps, that does not wrap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ReadyTime(u64);

impl ReadyTime {
    /// Reads the clock that timestamps are taken from; later sends of this process get later timestamps.
    #[inline]
    pub fn now() -> Self {
        Self(stamp_now())
    }

    /// Returns a time `others` units later, to sort behind that many others of the same time.
    #[inline]
    pub fn behind(self, others: usize) -> Self {
        Self(self.0.saturating_add(others as u64))
    }

    /// Returns the time in units of timestamps.
    #[cfg(test)]
    pub fn units(self) -> u64 {
        self.0
    }

    /// Converts a timestamp, which wraps, to the time nearest to `now`. One that is too far in the future, which only a
    /// peer that violates the protocol writes, or older than half the range, counts as `now`. Times are therefore
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

/// Converts a timestamp that was found by a scan which began at `now` and may have been interrupted since.
#[inline]
fn sent_at(stamp: u64, now: ReadyTime) -> ReadyTime {
    ReadyTime::near(stamp, now).unwrap_or_else(|| ReadyTime::from_stamp(stamp, ReadyTime::now()))
}

/// Returns when a registration joined the ready list by the kernel's rules: when its first unread record was sent
/// (`stamp`), or, without a timestamp, when it was `seen` ready; but not before `joined`, the time at which it was
/// added, modified or last reported, because it then moves to the tail.
#[inline]
pub(super) fn ready_time(stamp: Option<u64>, seen: ReadyTime, joined: ReadyTime, now: ReadyTime) -> ReadyTime {
    stamp.map_or(seen, |stamp| sent_at(stamp, now)).max(joined)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 7 << STAMP_BITS;

    /// Returns the timestamp that a sender writes at this time.
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
    fn a_reported_registration_sorts_behind_data_that_arrived_before_the_report() {
        assert_eq!(ready_time(stamped(500), NOW, at(100), NOW), at(500));
        assert_eq!(ready_time(stamped(500), NOW, at(900), NOW), at(900));
        assert_eq!(ready_time(None, at(700), at(100), NOW), at(700));
        assert_eq!(ready_time(None, at(700), at(900), NOW), at(900));
    }
}
