//! Time as it is handed in.

use std::ops::Add;
use std::time::Duration;

/// A moment: nanoseconds since the router began. 64 bits last 584 years.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// When the router began.
    pub const ZERO: Time = Time(0);

    /// This many nanoseconds after the router began.
    pub const fn from_ns(ns: u64) -> Time {
        Time(ns)
    }

    /// Nanoseconds since the router began.
    pub const fn ns(self) -> u64 {
        self.0
    }

    /// How long after `earlier` this is; nothing when it is not after.
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
