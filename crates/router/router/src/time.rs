//! Time, as passed in by the caller.

use std::ops::Add;
use std::time::Duration;

/// A point in time: nanoseconds since the start of the router. 64 bits last 584 years.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// The start of the router.
    pub const ZERO: Time = Time(0);

    /// Returns the time `ns` nanoseconds after the start of the router.
    pub const fn from_ns(ns: u64) -> Time {
        Time(ns)
    }

    /// Returns the nanoseconds since the start of the router.
    pub const fn ns(self) -> u64 {
        self.0
    }

    /// Returns the duration since `earlier`, or zero if `earlier` is later.
    pub const fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Time;

    fn add(self, span: Duration) -> Time {
        Time(self.0.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }
}
