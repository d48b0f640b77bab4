//! The cheapest clock of the machine, by which the library decides when to poll what is slow.

pub use volmem::{TICKS_PER_MICROSECOND, TICKS_PER_MILLISECOND, ticks};

/// Returns the monotonic clock in nanoseconds, for deadlines that a program has set.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
