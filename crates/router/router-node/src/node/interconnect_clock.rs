//! The clock of an interconnect.

use router::Time;

/// Converts time to the clock of the interconnect: picoseconds since its start, which overflow after 213 days.
#[derive(Clone, Copy, Debug, Default)]
pub struct InterconnectClock {
    began: Time,
}

impl InterconnectClock {
    /// Nanoseconds after which the interconnect has to be restarted: half of the clock's range.
    pub const NS_MAX: u64 = u64::MAX / 2000;

    pub fn restart(&mut self, now: Time) {
        self.began = now;
    }

    pub fn time(&self, now: Time) -> sim::Time {
        sim::Time::from_ps((now.ns() - self.began.ns()).saturating_mul(1000))
    }

    /// Returns the first nanosecond that is not before `time`.
    pub fn ns(&self, time: sim::Time) -> u64 {
        self.began.ns().saturating_add(time.ps().div_ceil(1000))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_of_an_interconnect_advances_past_its_range_after_a_restart() {
        const HOUR_NS: u64 = 3_600_000_000_000;
        let mut clock = InterconnectClock::default();
        let end = Time::from_ns(u64::MAX / 1000);
        let later = Time::from_ns(end.ns() + HOUR_NS);
        assert!(clock.time(end) < sim::Time::MAX && clock.time(later) == sim::Time::MAX, "it has stopped");
        let restarted = Time::from_ns(InterconnectClock::NS_MAX);
        assert!(clock.time(restarted).ps() <= u64::MAX / 2, "it is restarted long before its end");
        clock.restart(restarted);
        assert_eq!(clock.time(restarted), sim::Time::ZERO);
        for now_ns in [restarted.ns(), restarted.ns() + 1, end.ns(), later.ns()] {
            let time = clock.time(Time::from_ns(now_ns));
            assert_eq!((time.ps(), clock.ns(time)), ((now_ns - restarted.ns()) * 1000, now_ns));
        }
        assert_eq!(clock.ns(sim::Time::from_ps(1001)), restarted.ns() + 2);
    }
}
