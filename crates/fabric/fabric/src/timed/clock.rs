//! The clock that both ends of a modelled link read.

use std::sync::atomic::AtomicU64;
use volmem::sync::Ordering;
use volmem::{TICKS_PER_MICROSECOND, ticks};

/// A clock that both ends of a link read alike.
pub trait Clock: Clone + Send + Sync {
    /// Nanoseconds since some moment that is the same for both ends.
    fn now_ns(&self) -> u64;
    /// Returns when it is `time_ns`.
    fn wait_until(&self, time_ns: u64);
}

/// The kernel's monotonic clock, which all processes of a machine share; carried on by the processor's counter for a
/// moment after each look at it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Monotonic;

/// A longer wait sleeps, as a sleep this long is not much late.
const SPIN_NS_MAX: u64 = 50_000;

impl Clock for Monotonic {
    #[inline]
    fn now_ns(&self) -> u64 {
        static CARRIED_ON: CarriedOn = CarriedOn::new();
        CARRIED_ON.now_ns(ticks, kernel_ns)
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

/// Without a symbol of libc's, which may be a library's that stands in for it. A signal ends it early.
fn sleep(span_ns: u64) {
    let (seconds, rest_ns) = (span_ns / 1_000_000_000, span_ns % 1_000_000_000);
    let request = rustix::time::Timespec { tv_sec: seconds as i64, tv_nsec: rest_ns as i64 };
    let _ = rustix::thread::nanosleep(&request);
}

/// So long a look at the kernel's clock is carried on.
const CARRIED_TICKS: u64 = TICKS_PER_MICROSECOND;
/// A look that took longer was interrupted, and nobody knows to which count its time belongs.
const LOOK_TICKS_MAX: u64 = CARRIED_TICKS / 6;
/// The counter's rate is known by two looks that are so far apart.
const RATE_NS_MIN: u64 = 10_000_000;
/// Bits behind the point of a rate.
const RATE_BITS: u32 = 32;

/// A clock whose looks are dear, carried on by a counter whose looks are cheap: a message over a modelled link looks
/// three times each way within a tenth of a microsecond, and what a look takes is time that the link does not.
///
/// Where counters of processors differ, the time of the last look may be told once more, for a microsecond at most: no
/// look is carried on for longer. On a machine that moved to another counter each microsecond is as wrong as the rate
/// is, and the next begins right. Threads share it without a lock: two looks that are mixed differ by what the rate's
/// error made of the time between them, some hundred thousandths of it.
#[derive(Debug)]
struct CarriedOn {
    /// The first look, by which the rate is found.
    first_ticks: AtomicU64,
    first_ns: AtomicU64,
    /// Nanoseconds of a tick; 0 as long as it is not known.
    rate_scaled: AtomicU64,
    /// The last look: its count, and its time beyond what that count is in nanoseconds.
    looked_ticks: AtomicU64,
    beyond_ns: AtomicU64,
}

impl CarriedOn {
    const fn new() -> Self {
        Self {
            first_ticks: AtomicU64::new(0),
            first_ns: AtomicU64::new(0),
            rate_scaled: AtomicU64::new(0),
            looked_ticks: AtomicU64::new(0),
            beyond_ns: AtomicU64::new(0),
        }
    }

    #[inline]
    fn now_ns(&self, ticks: impl Fn() -> u64, clock_ns: impl Fn() -> u64) -> u64 {
        let now_ticks = ticks();
        let rate_scaled = self.rate_scaled.load(Ordering::Relaxed);
        if rate_scaled != 0 && now_ticks.wrapping_sub(self.looked_ticks.load(Ordering::Acquire)) < CARRIED_TICKS {
            return to_ns(now_ticks, rate_scaled).wrapping_add(self.beyond_ns.load(Ordering::Relaxed));
        }
        let now_ns = clock_ns();
        let look_ticks = ticks().wrapping_sub(now_ticks);
        if look_ticks <= LOOK_TICKS_MAX {
            self.note(now_ticks.wrapping_add(look_ticks / 2), now_ns, rate_scaled);
        }
        now_ns
    }

    fn note(&self, at_ticks: u64, at_ns: u64, rate_scaled: u64) {
        if rate_scaled == 0 {
            return self.note_for_rate(at_ticks, at_ns);
        }
        self.beyond_ns.store(at_ns.wrapping_sub(to_ns(at_ticks, rate_scaled)), Ordering::Relaxed);
        // Behind it: who sees this look has no time of a much older one.
        self.looked_ticks.store(at_ticks, Ordering::Release);
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

/// What a count is in nanoseconds, from the counter's zero on.
#[inline]
fn to_ns(count_ticks: u64, rate_scaled: u64) -> u64 {
    ((u128::from(count_ticks) * u128::from(rate_scaled)) >> RATE_BITS) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// A counter at 2.5 GHz and a clock, whose looks are counted.
    struct Machine {
        ns: Cell<u64>,
        ticks_off: Cell<u64>,
        look_ns: Cell<u64>,
        looks: Cell<u32>,
        carried_on: CarriedOn,
    }

    impl Machine {
        fn new() -> Self {
            Self {
                ns: Cell::new(1_000_000_000),
                ticks_off: Cell::new(u64::MAX - 77),
                look_ns: Cell::new(25),
                looks: Cell::new(0),
                carried_on: CarriedOn::new(),
            }
        }

        /// That knows the counter's rate, and has just looked.
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
            (self.ns.get() * 5 / 2).wrapping_add(self.ticks_off.get())
        }

        fn look(&self) -> u64 {
            self.looks.set(self.looks.get() + 1);
            self.pass(self.look_ns.get() / 2);
            let now_ns = self.ns.get();
            self.pass(self.look_ns.get() / 2);
            now_ns
        }

        fn now_ns(&self) -> u64 {
            self.carried_on.now_ns(|| self.ticks(), || self.look())
        }

        /// How far the time that it tells is from the time that it is, and whether that took a look at the clock.
        fn error_and_look(&self) -> (u64, bool) {
            let looks = self.looks.get();
            let (before_ns, now_ns) = (self.ns.get(), self.now_ns());
            (now_ns.abs_diff(before_ns).min(now_ns.abs_diff(self.ns.get())), self.looks.get() != looks)
        }
    }

    #[test]
    fn a_look_is_carried_on_for_a_microsecond() {
        let machine = Machine::with_rate();
        for _ in 0..5 {
            machine.pass(200);
            let (error_ns, looked) = machine.error_and_look();
            assert!(error_ns <= 2 && !looked, "{error_ns} ns, {looked}");
        }
        machine.pass(300);
        let (error_ns, looked) = machine.error_and_look();
        assert!(error_ns <= 13 && looked, "{error_ns} ns, {looked}");
        machine.pass(900);
        assert!(!machine.error_and_look().1);
    }

    #[test]
    fn without_a_rate_the_clock_is_looked_at() {
        let machine = Machine::new();
        for _ in 0..1000 {
            assert!(machine.error_and_look().1);
        }
        // A counter that stands still has none.
        let stuck = CarriedOn::new();
        for time_ns in (1..10).map(|look| look * RATE_NS_MIN) {
            assert_eq!(stuck.now_ns(|| 7, || time_ns), time_ns);
        }
    }

    #[test]
    fn a_look_that_was_interrupted_is_not_carried_on() {
        let machine = Machine::with_rate();
        machine.pass(2000);
        machine.look_ns.set(5000);
        machine.now_ns();
        machine.pass(10);
        assert!(machine.error_and_look().1);
    }

    #[test]
    fn a_counter_that_jumps_makes_the_time_wrong_for_a_microsecond_at_most() {
        for jump_ticks in (-5000_i64..5000).step_by(50) {
            let machine = Machine::with_rate();
            machine.pass(3_600_000_000_000);
            // As if a processor's counter were behind by the time since then.
            let behind_ticks = 3_600_000_000_000 / 2 * 5;
            let off_ticks = machine.ticks_off.get().wrapping_sub(behind_ticks);
            machine.ticks_off.set(off_ticks.wrapping_add_signed(jump_ticks));
            let mut looks = 0;
            // Whatever it is at first, it is right a microsecond of that counter later.
            while !machine.error_and_look().1 && looks < 1000 {
                machine.pass(10);
                looks += 1;
            }
            assert!(looks * 10 <= 1200, "{jump_ticks} ticks: {looks} looks");
        }
    }

    #[test]
    fn the_time_of_this_machine_is_the_kernels() {
        for _ in 0..100_000 {
            let before_ns = kernel_ns();
            let now_ns = Monotonic.now_ns();
            // Carried on from a look up to a microsecond ago, by a rate that may differ in the fifth digit.
            assert!((before_ns.saturating_sub(1000)..=kernel_ns() + 1000).contains(&now_ns));
        }
    }
}
