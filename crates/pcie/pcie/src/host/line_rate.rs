//! A part of the host that handles one line after another: the links between two sockets, and writes in strict order.

use sim::{Span, Time};

use crate::test::LINE_BYTES;

/// The part, which serves requests in the order in which they arrive.
#[derive(Clone, Debug)]
pub struct LineRate {
    line: Span,
    free_at: Time,
}

impl LineRate {
    /// Returns an idle part that handles lines at this rate, in 10^9 bits a second. The time of a line is rounded up to
    /// whole picoseconds, so that the rate is never exceeded.
    pub fn new(gbps: f64) -> Self {
        Self { line: Span::from_ps(((LINE_BYTES * 8) as f64 * 1000.0 / gbps).ceil() as u64), free_at: Time::ZERO }
    }

    /// Admits `lines` that arrive at `arrived`, after all admitted before, and returns how long the first one waits.
    pub fn admit(&mut self, arrived: Time, lines: u32) -> Span {
        let begun = arrived.max(self.free_at);
        self.free_at = begun + self.line * u64::from(lines);
        begun.since(arrived)
    }

    /// Returns the time from which it is idle.
    pub fn free_at(&self) -> Time {
        self.free_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_follow_at_the_rate() {
        let at = |ns: u64| Time::from_ps(ns * 1000);
        let mut part = LineRate::new(128.0);
        assert_eq!(part.admit(at(100), 3), Span::ZERO);
        assert_eq!(part.admit(at(101), 1), Span::from_ns(11.0), "three lines of 4 ns");
        assert_eq!(part.free_at(), at(116));
        assert_eq!(part.admit(at(200), 1), Span::ZERO);
    }
}
