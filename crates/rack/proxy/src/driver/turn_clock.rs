//! The time of a turn.
//!
//! A turn that finds nothing takes some 40 ns, and the kernel's clock takes half as long again, before anything is
//! looked at: of a message that comes meanwhile, that is delay. Nothing that engines decide by the time is decided
//! within a few microseconds. So the clock is read only where the processor's counter says that it has moved on.

use socket::process::clock::{TICKS_PER_MICROSECOND, now_ns};

/// How old the time of a turn is at most, as the counter has it.
const AGE_TICKS_MAX: u64 = 2 * TICKS_PER_MICROSECOND;

/// A clock for turns.
#[derive(Debug, Default)]
pub(super) struct TurnClock {
    ns: u64,
    /// Where the counter was when it was read.
    ticks: u64,
}

impl TurnClock {
    /// The time, where the counter is at `ticks` by now.
    #[inline]
    pub(super) fn now_ns(&mut self, ticks: u64) -> u64 {
        self.now_ns_by(ticks, now_ns)
    }

    #[inline]
    fn now_ns_by(&mut self, ticks: u64, read: impl FnOnce() -> u64) -> u64 {
        // A counter that was set back, with the whole machine, counts as one that has moved on far.
        if self.ns == 0 || ticks.wrapping_sub(self.ticks) > AGE_TICKS_MAX {
            (self.ns, self.ticks) = (read(), ticks);
        }
        self.ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_read_where_the_counter_has_moved_on_or_was_set_back() {
        let mut clock = TurnClock::default();
        let begin = 10 * AGE_TICKS_MAX;
        let steps = [(begin, 100), (begin + AGE_TICKS_MAX, 100), (begin + AGE_TICKS_MAX + 1, 102), (begin, 103)];
        for (index, (ticks, expected)) in steps.into_iter().enumerate() {
            assert_eq!(clock.now_ns_by(ticks, || 100 + index as u64), expected, "step {index}");
        }
    }
}
