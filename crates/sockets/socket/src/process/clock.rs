//! The cheapest clock there is, for deciding when to look at something slow.

use crate::process::threads;
use lane::STAMP_BITS;
use std::sync::atomic::{AtomicU64, Ordering};

pub use volmem::{TICKS_PER_MICROSECOND, TICKS_PER_MILLISECOND, ticks};

/// Nanoseconds of the monotonic clock, for deadlines that a program set.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Ticks of a [`stamp`]: a few nanoseconds, so that none wraps around within a day.
const TICKS_PER_STAMP_LOG2: u32 = 4;

/// 0 until the clock is read for the first time, which is before a connection gets lanes.
static LAST_STAMP: AtomicU64 = AtomicU64::new(0);

/// A number for what is sent now, greater than that of anything this process has sent before: a hybrid logical clock
/// (Kulkarni et al. 2014). A process with one thread counts on from the last time that it has read the clock, which is
/// cheaper than reading it.
#[inline(always)]
pub fn stamp() -> u64 {
    if threads::is_single() {
        let next = LAST_STAMP.load(Ordering::Relaxed) + 1;
        LAST_STAMP.store(next, Ordering::Relaxed);
        next
    } else {
        ticks() >> TICKS_PER_STAMP_LOG2
    }
}

/// Stamps may be ahead of this process's by so much, a few milliseconds, without its looking at the clock.
const AHEAD_MAX: u64 = 1 << 18;

/// Brings [`stamp`] up to that of a record which has been received: what is sent now was sent later.
#[inline(always)]
pub fn note_stamp(received: u64) {
    let last = LAST_STAMP.load(Ordering::Relaxed);
    let ahead = received.wrapping_sub(last) << (u64::BITS - STAMP_BITS) >> (u64::BITS - STAMP_BITS);
    if ahead > AHEAD_MAX {
        // Older, or this process has not looked at the clock for long; or a peer makes it up.
        note_distant(ahead);
    } else {
        LAST_STAMP.store(last + ahead, Ordering::Relaxed);
    }
}

#[cold]
fn note_distant(ahead: u64) {
    if ahead < 1 << (STAMP_BITS - 1) {
        note_ticks(ticks());
    }
}

/// Brings [`stamp`] up to a reading of the clock.
#[inline]
pub fn note_ticks(now: u64) {
    let stamp = now >> TICKS_PER_STAMP_LOG2;
    if stamp > LAST_STAMP.load(Ordering::Relaxed) {
        LAST_STAMP.store(stamp, Ordering::Relaxed);
    }
}

/// The stamp of now, for comparison with those of others.
pub fn stamp_now() -> u64 {
    let now = ticks();
    note_ticks(now);
    now >> TICKS_PER_STAMP_LOG2
}
