//! The clock that both endpoints of a modelled link read.

use std::sync::atomic::AtomicU64;
use volmem::sync::Ordering;
use volmem::{TICKS_PER_MICROSECOND, ticks};

/// A clock with the same time at both endpoints of a link.
pub trait Clock: Clone + Send + Sync {
    /// Nanoseconds since a moment that is the same for both endpoints.
    fn now_ns(&self) -> u64;
    /// Waits until `time_ns`.
    fn wait_until(&self, time_ns: u64);
}

/// The kernel's monotonic clock, which all processes of a machine share. Between reads it is extrapolated for a
/// microsecond by the processor's time-stamp counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Monotonic;

/// Longest wait that only spins. A longer wait sleeps first.
const SPIN_NS_MAX: u64 = 50_000;

impl Clock for Monotonic {
    #[inline]
    fn now_ns(&self) -> u64 {
        static CLOCK: ExtrapolatedClock = ExtrapolatedClock::new();
        CLOCK.now_ns(ticks, kernel_ns)
    }

    fn wait_until(&self, time_ns: u64) {
        loop {
            let left_ns = time_ns.saturating_sub(self.now_ns());
            match left_ns {
                0 => return,
                1..SPIN_NS_MAX => volmem::sync::spin_hint(),
                _ => sleep(left_ns - SPIN_NS_MAX / 2),
            }
        }
    }
}

fn kernel_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Sleeps without a libc symbol, which a preloaded library may replace. A signal ends the sleep early.
fn sleep(span_ns: u64) {
    let (seconds, rest_ns) = (span_ns / 1_000_000_000, span_ns % 1_000_000_000);
    let request = rustix::time::Timespec { tv_sec: seconds as i64, tv_nsec: rest_ns as i64 };
    let _ = rustix::thread::nanosleep(&request);
}

/// How long a read of the kernel's clock is extrapolated.
const EXTRAPOLATED_TICKS: u64 = TICKS_PER_MICROSECOND;
/// A read that took longer was interrupted, so it is unknown which count its time belongs to.
const READ_TICKS_MAX: u64 = EXTRAPOLATED_TICKS / 6;
/// Time between the two reads that determine the counter's rate.
const RATE_NS_MIN: u64 = 10_000_000;
/// Fractional bits of a rate.
const RATE_BITS: u32 = 32;

/// A clock whose reads are expensive, extrapolated by a counter whose reads are cheap. A message over a modelled link
/// reads the clock three times each way within a tenth of a microsecond, and the time of a read is not part of the
/// link's.
///
/// Where the counters of processors differ, the time of the last read may be returned again, for a microsecond at most:
/// no read is extrapolated longer. On a virtual machine that moved to another counter, each microsecond is wrong by the
/// error of the rate, and the next one starts right. Threads share the clock without a lock. Two reads that are mixed
/// differ by the rate's error over the time between them, a few hundred-thousandths of it.
#[derive(Debug)]
struct ExtrapolatedClock {
    /// The first read, which determines the rate.
    first_ticks: AtomicU64,
    first_ns: AtomicU64,
    /// Nanoseconds per tick, scaled; 0 while unknown.
    rate_scaled: AtomicU64,
    /// The last read: its count, and the difference between its time and its count in nanoseconds.
    read_ticks: AtomicU64,
    beyond_ns: AtomicU64,
}

impl ExtrapolatedClock {
    const fn new() -> Self {
        Self {
            first_ticks: AtomicU64::new(0),
            first_ns: AtomicU64::new(0),
            rate_scaled: AtomicU64::new(0),
            read_ticks: AtomicU64::new(0),
            beyond_ns: AtomicU64::new(0),
        }
    }

    #[inline]
    fn now_ns(&self, ticks: impl Fn() -> u64, clock_ns: impl Fn() -> u64) -> u64 {
        let now_ticks = ticks();
        let rate_scaled = self.rate_scaled.load(Ordering::Relaxed);
        if rate_scaled != 0 && now_ticks.wrapping_sub(self.read_ticks.load(Ordering::Acquire)) < EXTRAPOLATED_TICKS {
            return to_ns(now_ticks, rate_scaled).wrapping_add(self.beyond_ns.load(Ordering::Relaxed));
        }
        let now_ns = clock_ns();
        let duration_ticks = ticks().wrapping_sub(now_ticks);
        if duration_ticks <= READ_TICKS_MAX {
            self.note(now_ticks.wrapping_add(duration_ticks / 2), now_ns, rate_scaled);
        }
        now_ns
    }

    fn note(&self, at_ticks: u64, at_ns: u64, rate_scaled: u64) {
        if rate_scaled == 0 {
            return self.note_for_rate(at_ticks, at_ns);
        }
        self.beyond_ns.store(at_ns.wrapping_sub(to_ns(at_ticks, rate_scaled)), Ordering::Relaxed);
        // Stored last: a thread that sees this count does not combine it with the time of a much older read.
        self.read_ticks.store(at_ticks, Ordering::Release);
    }

    #[cold]
    fn note_for_rate(&self, at_ticks: u64, at_ns: u64) {
        let first_ns = self.first_ns.load(Ordering::Acquire);
        if first_ns == 0 {
            self.first_ticks.store(at_ticks, Ordering::Relaxed);
            return self.first_ns.store(at_ns, Ordering::Release);
        }
        let span_ns = at_ns.saturating_sub(first_ns);
        let span_ticks = at_ticks.wrapping_sub(self.first_ticks.load(Ordering::Relaxed));
        if span_ns >= RATE_NS_MIN
            && let Some(rate_scaled) = (u128::from(span_ns) << RATE_BITS).checked_div(u128::from(span_ticks))
        {
            self.rate_scaled.store(u64::try_from(rate_scaled).unwrap_or(0), Ordering::Relaxed);
        }
    }
}

/// Converts a count to nanoseconds since the counter's zero.
#[inline]
fn to_ns(count_ticks: u64, rate_scaled: u64) -> u64 {
    ((u128::from(count_ticks) * u128::from(rate_scaled)) >> RATE_BITS) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// A simulated counter at five sixths of the assumed rate, and a clock, whose reads are counted.
    struct Machine {
        ns: Cell<u64>,
        ticks_off: Cell<u64>,
        read_ns: Cell<u64>,
        reads: Cell<u32>,
        clock: ExtrapolatedClock,
    }

    impl Machine {
        fn new() -> Self {
            Self {
                ns: Cell::new(1_000_000_000),
                ticks_off: Cell::new(u64::MAX - 77),
                read_ns: Cell::new(25),
                reads: Cell::new(0),
                clock: ExtrapolatedClock::new(),
            }
        }

        /// A machine whose clock knows the counter's rate and was just read.
        fn with_rate() -> Self {
            let machine = Self::new();
            for _ in 0..3 {
                machine.now_ns();
                machine.pass(RATE_NS_MIN);
            }
            machine.now_ns();
            machine
        }

        fn pass(&self, span_ns: u64) {
            self.ns.set(self.ns.get() + span_ns);
        }

        fn ticks(&self) -> u64 {
            (self.ns.get() * (TICKS_PER_MICROSECOND * 5 / 6) / 1000).wrapping_add(self.ticks_off.get())
        }

        fn read(&self) -> u64 {
            self.reads.set(self.reads.get() + 1);
            self.pass(self.read_ns.get() / 2);
            let now_ns = self.ns.get();
            self.pass(self.read_ns.get() / 2);
            now_ns
        }

        fn now_ns(&self) -> u64 {
            self.clock.now_ns(|| self.ticks(), || self.read())
        }

        /// The error of the returned time, and whether the clock was read.
        fn error_and_read(&self) -> (u64, bool) {
            let reads = self.reads.get();
            let (before_ns, now_ns) = (self.ns.get(), self.now_ns());
            (now_ns.abs_diff(before_ns).min(now_ns.abs_diff(self.ns.get())), self.reads.get() != reads)
        }
    }

    #[test]
    fn a_read_is_extrapolated_for_a_microsecond() {
        let machine = Machine::with_rate();
        for _ in 0..5 {
            machine.pass(200);
            let (error_ns, was_read) = machine.error_and_read();
            assert!(error_ns <= 2 && !was_read, "{error_ns} ns, {was_read}");
        }
        machine.pass(300);
        let (error_ns, was_read) = machine.error_and_read();
        assert!(error_ns <= 13 && was_read, "{error_ns} ns, {was_read}");
        machine.pass(900);
        assert!(!machine.error_and_read().1);
    }

    #[test]
    fn without_a_rate_the_clock_is_read_each_time() {
        let machine = Machine::new();
        for _ in 0..1000 {
            assert!(machine.error_and_read().1);
        }
        // A counter that stands still has no rate.
        let stuck = ExtrapolatedClock::new();
        for time_ns in (1..10).map(|read| read * RATE_NS_MIN) {
            assert_eq!(stuck.now_ns(|| 7, || time_ns), time_ns);
        }
    }

    #[test]
    fn an_interrupted_read_is_not_extrapolated() {
        let machine = Machine::with_rate();
        machine.pass(2000);
        machine.read_ns.set(5000);
        machine.now_ns();
        machine.pass(10);
        assert!(machine.error_and_read().1);
    }

    #[test]
    fn a_counter_that_jumps_makes_the_time_wrong_for_a_microsecond_at_most() {
        for jump_ticks in (-5000_i64..5000).step_by(50) {
            let machine = Machine::with_rate();
            machine.pass(3_600_000_000_000);
            // As if another processor's counter were behind by the time since then.
            let behind_ticks = 3_600_000_000_000 / 2 * 5;
            let off_ticks = machine.ticks_off.get().wrapping_sub(behind_ticks);
            machine.ticks_off.set(off_ticks.wrapping_add_signed(jump_ticks));
            let mut steps = 0;
            // However wrong it is at first, it is right after a microsecond of that counter.
            while !machine.error_and_read().1 && steps < 1000 {
                machine.pass(10);
                steps += 1;
            }
            assert!(steps * 10 <= 1200, "{jump_ticks} ticks: {steps} steps");
        }
    }

    #[test]
    fn the_time_of_this_machine_is_the_kernels() {
        for _ in 0..100_000 {
            let before_ns = kernel_ns();
            let now_ns = Monotonic.now_ns();
            // Extrapolated from a read up to a microsecond ago, by a rate that may differ in the fifth digit.
            assert!((before_ns.saturating_sub(1000)..=kernel_ns() + 1000).contains(&now_ns));
        }
    }
}
