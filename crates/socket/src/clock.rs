//! The cheapest clock there is, for deciding when to look at something slow.

pub use volmem::ticks;

/// About a millisecond: from 0.6 ms where the counter runs at 5 GHz to 3 ms where it runs at 1 GHz. Nothing may rest on
/// it but how often to look.
pub const TICKS_PER_MILLISECOND: u64 = if cfg!(target_arch = "aarch64") { 50_000 } else { 3_000_000 };
/// A microsecond, roughly, as above.
pub const TICKS_PER_MICROSECOND: u64 = TICKS_PER_MILLISECOND / 1000;

/// Nanoseconds of the monotonic clock, for deadlines that a program set.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
