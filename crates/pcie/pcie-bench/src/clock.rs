//! A clock for single accesses, and what it costs to read.

use std::time::{Duration, Instant};

use crate::device::Timer;

/// How long the tick is measured.
const CALIBRATION: Duration = Duration::from_millis(20);
/// Empty intervals taken to know the cost of a reading.
const EMPTY_INTERVALS: usize = 10_001;

/// The processor's time stamp counter where there is one, else the system's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    ns_per_tick: f64,
    /// What an interval with nothing in it shows.
    empty_ticks: u64,
    /// All readings are multiples of this.
    step_ticks: u64,
}

impl Clock {
    /// Measures the tick against the system's clock, and the cost of a reading.
    pub fn calibrated() -> Self {
        let (wall, ticks) = (Instant::now(), ticks::now());
        while wall.elapsed() < CALIBRATION {
            std::hint::spin_loop();
        }
        let elapsed_ticks = ticks::now().saturating_sub(ticks).max(1);
        let ns_per_tick = wall.elapsed().as_nanos() as f64 / elapsed_ticks as f64;
        let mut empty: Vec<u64> = (0..EMPTY_INTERVALS).map(|_| Self::interval(|| {})).collect();
        let step_ticks = empty.iter().copied().fold(0, greatest_common_divisor).max(1);
        empty.sort_unstable();
        Self { ns_per_tick, empty_ticks: empty[EMPTY_INTERVALS / 2], step_ticks }
    }

    /// Ticks that `work` takes, everything it loads included, the cost of the clock too.
    #[inline]
    pub fn interval(work: impl FnOnce()) -> u64 {
        let start = ticks::start();
        work();
        ticks::end().saturating_sub(start)
    }

    /// Nanoseconds of an interval, without the cost of the clock.
    #[inline]
    pub fn ns(&self, interval_ticks: u64) -> f64 {
        interval_ticks.saturating_sub(self.empty_ticks) as f64 * self.ns_per_tick
    }

    /// Its cost and step.
    pub fn timer(&self) -> Timer {
        let ns = |ticks: u64| ticks as f64 * self.ns_per_tick;
        Timer { cost_ns: ns(self.empty_ticks), step_ns: ns(self.step_ticks) }
    }
}

fn greatest_common_divisor(mut one: u64, mut other: u64) -> u64 {
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

#[cfg(target_arch = "x86_64")]
mod ticks {
    use core::arch::x86_64::{_mm_lfence, _mm_mfence, _rdtsc};

    pub(super) fn now() -> u64 {
        // SAFETY: every processor of this architecture has the instruction.
        unsafe { _rdtsc() }
    }

    /// What came before is done, what comes after has not begun.
    #[inline]
    pub(super) fn start() -> u64 {
        // SAFETY: as above.
        unsafe {
            _mm_mfence();
            _mm_lfence();
            let now = _rdtsc();
            _mm_lfence();
            now
        }
    }

    /// All loads before are done; nothing after has begun.
    #[inline]
    pub(super) fn end() -> u64 {
        // SAFETY: as above. `rdtscp` would save a fence, but not every processor has it.
        unsafe {
            _mm_lfence();
            let now = _rdtsc();
            _mm_lfence();
            now
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod ticks {
    use std::sync::OnceLock;
    use std::sync::atomic::{Ordering, fence};
    use std::time::Instant;

    pub(super) fn now() -> u64 {
        static ZERO: OnceLock<Instant> = OnceLock::new();
        u64::try_from(ZERO.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    pub(super) fn start() -> u64 {
        fence(Ordering::SeqCst);
        now()
    }

    pub(super) fn end() -> u64 {
        fence(Ordering::SeqCst);
        now()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_known_without_the_cost_of_the_clock() {
        let clock = Clock { ns_per_tick: 0.5, empty_ticks: 40, step_ticks: 2 };
        assert_eq!([clock.ns(140), clock.ns(40), clock.ns(10)], [50.0, 0.0, 0.0]);
        assert_eq!(clock.timer(), Timer { cost_ns: 20.0, step_ns: 1.0 });
    }

    #[test]
    fn the_clock_of_this_machine_moves_and_has_a_step() {
        let clock = Clock::calibrated();
        let ticks = Clock::interval(|| std::thread::sleep(Duration::from_millis(2)));
        assert!(clock.ns(ticks) > 1e6, "{clock:?}: {ticks}");
        assert!(clock.timer().step_ns > 0.0 && clock.timer().cost_ns >= 0.0);
    }

    #[test]
    fn a_step_is_what_divides_all_readings() {
        assert_eq!([30, 42, 54].into_iter().fold(0, greatest_common_divisor), 6);
    }
}
