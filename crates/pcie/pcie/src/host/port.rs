//! The root complex's port to cache and memory. Lines pass it one by one, in the order in which requests leave
//! translation. A page table walk, which also reads memory, waits behind the requests that arrived before it.

use sim::{Span, Time};

/// Number of recent requests kept: more than can leave translation after the start of a walk for a younger one.
const RECENT_REQUESTS: usize = 64;

/// The port.
#[derive(Clone, Debug)]
pub struct Port {
    line: Span,
    /// The last few requests; the oldest is at `next`.
    recent: [Admission; RECENT_REQUESTS],
    next: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Admission {
    arrived: Time,
    done: Time,
}

impl Port {
    /// Returns an idle port that a line occupies for this long.
    pub fn new(line: Span) -> Self {
        Self { line, recent: [Admission::default(); RECENT_REQUESTS], next: 0 }
    }

    /// Returns the request that arrived `age` requests before the last.
    fn before(&self, age: usize) -> Admission {
        self.recent[(self.next + RECENT_REQUESTS - 1 - age) % RECENT_REQUESTS]
    }

    /// Admits `lines` that arrive at `arrived`, after all admitted before, and returns when the first passes.
    pub fn admit(&mut self, arrived: Time, lines: u32) -> Time {
        let begun = arrived.max(self.before(0).done);
        self.recent[self.next] = Admission { arrived, done: begun + self.line * u64::from(lines) };
        self.next = (self.next + 1) % RECENT_REQUESTS;
        begun
    }

    /// Returns how long a walk that arrives at `at` waits for all requests that arrived by then.
    pub fn wait(&self, at: Time) -> Span {
        let last = (0..RECENT_REQUESTS).map(|age| self.before(age)).find(|admission| admission.arrived <= at);
        last.map_or(Span::ZERO, |admission| admission.done.max(at).since(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ns: u64) -> Time {
        Time::from_ps(ns * 1000)
    }

    #[test]
    fn lines_pass_one_after_the_other() {
        let mut port = Port::new(Span::from_ns(4.0));
        assert_eq!(port.admit(at(100), 3), at(100));
        assert_eq!(port.admit(at(101), 1), at(112));
        assert_eq!(port.admit(at(200), 1), at(200));
    }

    #[test]
    fn a_walk_waits_only_for_requests_that_arrived_before_it() {
        let mut port = Port::new(Span::from_ns(4.0));
        assert_eq!(port.wait(at(50)), Span::ZERO);
        port.admit(at(100), 8);
        port.admit(at(500), 2);
        assert_eq!(port.wait(at(99)), Span::ZERO);
        assert_eq!(port.wait(at(100)), Span::from_ns(32.0));
        assert_eq!(port.wait(at(130)), Span::from_ns(2.0));
        assert_eq!(port.wait(at(499)), Span::ZERO, "a later request causes no wait");
        assert_eq!(port.wait(at(505)), Span::from_ns(3.0));
    }

    #[test]
    fn recent_requests_are_kept_in_a_ring() {
        let mut port = Port::new(Span::from_ns(1.0));
        for request in 0..1000 {
            assert_eq!(port.admit(at(request * 10), 5), at(request * 10));
        }
        assert_eq!(port.wait(at(9992)), Span::from_ns(3.0));
    }
}
