//! The cheapest clock of the machine, by which the library decides when to poll what is slow.

use crate::process::threads;
use lane::STAMP_BITS;
use std::sync::atomic::{AtomicU64, Ordering};

pub use volmem::{TICKS_PER_MICROSECOND, TICKS_PER_MILLISECOND, ticks};

/// Returns the monotonic clock in nanoseconds, for deadlines that a program has set.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Ticks per unit of a [`stamp`], as a power of two. A unit is a few nanoseconds, so that no stamp wraps around within
/// a day.
const TICKS_PER_STAMP_LOG2: u32 = 4;

/// The last stamp. 0 until the clock is first read, which happens before a connection gets lanes.
static LAST_STAMP: AtomicU64 = AtomicU64::new(0);

/// Returns a number for a record that is sent now, greater than those of all records that this process has sent before:
/// a hybrid logical clock (Kulkarni et al. 2014). A process with one thread increments the last stamp, which is cheaper
/// than reading the clock.
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

/// A received stamp that is ahead of this process's by at most this much, a few milliseconds, is accepted without
/// reading the clock.
const AHEAD_MAX: u64 = 1 << 18;

/// Advances [`stamp`] to that of a received record: what is sent from now on was sent later.
#[inline(always)]
pub fn note_stamp(received: u64) {
    let last = LAST_STAMP.load(Ordering::Relaxed);
    let ahead = received.wrapping_sub(last) << (u64::BITS - STAMP_BITS) >> (u64::BITS - STAMP_BITS);
    if ahead > AHEAD_MAX {
        // The record is older, or this process has not read the clock for long, or the peer has invented the stamp.
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

/// Advances [`stamp`] to a reading of the clock.
#[inline]
pub fn note_ticks(now: u64) {
    let stamp = now >> TICKS_PER_STAMP_LOG2;
    if stamp > LAST_STAMP.load(Ordering::Relaxed) {
        LAST_STAMP.store(stamp, Ordering::Relaxed);
    }
}

/// Returns the stamp of the present time, for comparison with received stamps.
pub fn stamp_now() -> u64 {
    let now = ticks();
    note_ticks(now);
    now >> TICKS_PER_STAMP_LOG2
}
