//! Virtual time in picoseconds.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul, Sub};

/// Number of picoseconds in a nanosecond.
const PS_PER_NS: f64 = 1000.0;

/// A point in virtual time, in picoseconds since the start of the simulation. 64 bits last 213 days.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

/// A duration of virtual time, in picoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span(u64);

impl Time {
    /// The start of the simulation.
    pub const ZERO: Self = Self(0);
    /// The latest representable time, which stands for "never".
    pub const MAX: Self = Self(u64::MAX);

    /// Creates the time `ps` picoseconds after the start.
    pub const fn from_ps(ps: u64) -> Self {
        Self(ps)
    }

    /// Returns the picoseconds since the start.
    pub const fn ps(self) -> u64 {
        self.0
    }

    /// Returns the duration from `earlier` to this time, or zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }
}

impl Span {
    /// The empty duration.
    pub const ZERO: Self = Self(0);

    /// Creates a duration of `ps` picoseconds.
    pub const fn from_ps(ps: u64) -> Self {
        Self(ps)
    }

    /// Creates a duration of `ns` nanoseconds, rounded to the nearest picosecond; negative values and NaN give zero.
    pub fn from_ns(ns: f64) -> Self {
        Self((ns * PS_PER_NS).round() as u64)
    }

    /// Returns the duration in picoseconds.
    pub const fn ps(self) -> u64 {
        self.0
    }

    /// Returns the duration in nanoseconds.
    pub fn ns(self) -> f64 {
        self.0 as f64 / PS_PER_NS
    }
}

impl Add<Span> for Time {
    type Output = Self;

    fn add(self, span: Span) -> Self {
        Self(self.0 + span.0)
    }
}

impl AddAssign<Span> for Time {
    fn add_assign(&mut self, span: Span) {
        self.0 += span.0;
    }
}

impl Sub for Time {
    type Output = Span;

    /// # Panics
    /// In debug builds, if `earlier` is later.
    fn sub(self, earlier: Self) -> Span {
        Span(self.0 - earlier.0)
    }
}

impl Add for Span {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl AddAssign for Span {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl Mul<u64> for Span {
    type Output = Self;

    fn mul(self, times: u64) -> Self {
        Self(self.0 * times)
    }
}

impl Sum for Span {
    fn sum<I: Iterator<Item = Self>>(spans: I) -> Self {
        Self(spans.map(|span| span.0).sum())
    }
}

impl fmt::Display for Span {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ns", self.ns())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nanoseconds_become_the_nearest_picosecond() {
        assert_eq!(Span::from_ns(13.3333).ps(), 13_333);
        assert_eq!(Span::from_ns(0.0006).ps(), 1);
        assert_eq!(Span::from_ns(-1.0), Span::ZERO);
        assert_eq!(Span::from_ns(f64::NAN), Span::ZERO);
        assert!((Span::from_ps(1500).ns() - 1.5).abs() < 1e-12);
    }

    #[test]
    fn durations_add_up() {
        let begin = Time::from_ps(5);
        let end = begin + Span::from_ps(7) * 3;
        assert_eq!((end - begin).ps(), 21);
        assert_eq!(begin.since(end), Span::ZERO);
        assert_eq!([Span::from_ps(1), Span::from_ps(2)].into_iter().sum::<Span>().ps(), 3);
    }
}
