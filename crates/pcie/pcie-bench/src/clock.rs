//! A clock for single accesses, calibrated for its tick and its own cost.

use std::time::{Duration, Instant};

use crate::device::Timer;

/// Duration of the calibration of the tick.
const CALIBRATION: Duration = Duration::from_millis(20);
/// Number of empty intervals whose median is the cost of a reading.
const EMPTY_INTERVALS: usize = 10_001;

/// Reads the processor's time stamp counter where there is one, else the system's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    ns_per_tick: f64,
    /// Ticks of an empty interval: the cost of the two readings.
    empty_ticks: u64,
    /// Greatest common divisor of all readings.
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

    /// Returns the ticks that `work` takes until all its loads are complete, including the cost of the clock.
    #[inline]
    pub fn interval(work: impl FnOnce()) -> u64 {
        let start = ticks::start();
        work();
        ticks::end().saturating_sub(start)
    }

    /// Converts an interval to nanoseconds and subtracts the cost of the clock.
    #[inline]
    pub fn ns(&self, interval_ticks: u64) -> f64 {
        interval_ticks.saturating_sub(self.empty_ticks) as f64 * self.ns_per_tick
    }

    /// Returns the cost and the step of the clock.
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
        // SAFETY: every x86-64 processor has `rdtsc`, which reads a register and touches no memory.
        unsafe { _rdtsc() }
    }

    /// Reads the counter after all earlier loads and stores are complete and before any later instruction starts.
    #[inline]
    pub(super) fn start() -> u64 {
        // SAFETY: every x86-64 processor has `rdtsc` and the SSE2 fences; none of them accesses memory.
        unsafe {
            _mm_mfence();
            _mm_lfence();
            let now = _rdtsc();
            _mm_lfence();
            now
        }
    }

    /// Reads the counter after all earlier loads are complete and before any later instruction starts.
    #[inline]
    pub(super) fn end() -> u64 {
        // SAFETY: every x86-64 processor has `rdtsc` and `lfence`; neither accesses memory. (`rdtscp` would save a
        // fence, but not every processor has it.)
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
    fn an_interval_excludes_the_cost_of_the_clock() {
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
    fn the_step_is_the_greatest_common_divisor_of_the_readings() {
        assert_eq!([30, 42, 54].into_iter().fold(0, greatest_common_divisor), 6);
    }
}
