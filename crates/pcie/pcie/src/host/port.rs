//! The root complex's way to cache and memory: lines go through it one by one, in the order in which requests leave
//! translation, and a page table walk, which reads memory too, waits behind those that came before it.

use sim::{Span, Time};

/// Requests that are remembered: more than can leave translation after a walk for a younger one has begun.
const REMEMBERED: usize = 64;

/// The way in.
#[derive(Clone, Debug)]
pub struct Port {
    line: Span,
    /// The last few requests, the oldest at `next`.
    recent: [Passed; REMEMBERED],
    next: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Passed {
    came: Time,
    through: Time,
}

impl Port {
    /// An idle port, through which a line takes this long.
    pub fn new(line: Span) -> Self {
        Self { line, recent: [Passed::default(); REMEMBERED], next: 0 }
    }

    /// The request that came as the last but `age`.
    fn before(&self, age: usize) -> Passed {
        self.recent[(self.next + REMEMBERED - 1 - age) % REMEMBERED]
    }

    /// Takes `lines` that come at `came`, not before those that were taken before; answers when the first goes through.
    pub fn take(&mut self, came: Time, lines: u32) -> Time {
        let begun = came.max(self.before(0).through);
        self.recent[self.next] = Passed { came, through: begun + self.line * u64::from(lines) };
        self.next = (self.next + 1) % REMEMBERED;
        begun
    }

    /// How long one more waits that comes at `at`, behind all that had come by then.
    pub fn wait(&self, at: Time) -> Span {
        let last = (0..REMEMBERED).map(|age| self.before(age)).find(|passed| passed.came <= at);
        last.map_or(Span::ZERO, |passed| passed.through.max(at).since(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ns: u64) -> Time {
        Time::from_ps(ns * 1000)
    }

    #[test]
    fn lines_go_one_after_the_other() {
        let mut port = Port::new(Span::from_ns(4.0));
        assert_eq!(port.take(at(100), 3), at(100));
        assert_eq!(port.take(at(101), 1), at(112));
        assert_eq!(port.take(at(200), 1), at(200));
    }

    #[test]
    fn a_walk_waits_behind_what_came_before_it_and_nothing_else() {
        let mut port = Port::new(Span::from_ns(4.0));
        assert_eq!(port.wait(at(50)), Span::ZERO);
        port.take(at(100), 8);
        port.take(at(500), 2);
        assert_eq!(port.wait(at(99)), Span::ZERO);
        assert_eq!(port.wait(at(100)), Span::from_ns(32.0));
        assert_eq!(port.wait(at(130)), Span::from_ns(2.0));
        assert_eq!(port.wait(at(499)), Span::ZERO, "what comes later is not waited for");
        assert_eq!(port.wait(at(505)), Span::from_ns(3.0));
    }

    #[test]
    fn the_memory_of_what_passed_is_a_ring() {
        let mut port = Port::new(Span::from_ns(1.0));
        for request in 0..1000 {
            assert_eq!(port.take(at(request * 10), 5), at(request * 10));
        }
        assert_eq!(port.wait(at(9992)), Span::from_ns(3.0));
    }
}
