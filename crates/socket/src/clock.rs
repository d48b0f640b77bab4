//! The cheapest clock there is, for deciding when to look at something slow.

pub use volmem::{TICKS_PER_MICROSECOND, TICKS_PER_MILLISECOND, ticks};

/// Nanoseconds of the monotonic clock, for deadlines that a program set.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
