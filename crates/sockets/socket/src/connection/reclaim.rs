//! Memory of what was read.
//!
//! The rings into which a lane has grown are the sender's to give back: only it knows that it does not write there. It
//! does so once everything was read and nothing was sent for a while, in two ways: threads that are about to block wake
//! up a few times a second as long as any lane of the process has such memory; and a process whose lanes have taken
//! more than a few MiB gives back those that have rested for a moment when another one grows.

use super::{Connection, Lanes, POOL};
use crate::accounting::memory_budget::{WARM_BYTES, taken_bytes};
use crate::process::blocking;
use crate::process::clock::{TICKS_PER_MILLISECOND, ticks};
use crate::process::sandbox;
use lane::MemoryRelease;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A lane that nothing was sent on for so long gives its memory back when its process blocks.
const REST_MS: u64 = 200;
/// The same when the process has more memory than it keeps warm.
const REST_UNDER_PRESSURE_MS: u64 = 10;
/// Lanes of this process that have memory beyond their small rings.
static LANES: AtomicU32 = AtomicU32::new(0);
/// Clock ticks at the last sweep.
static SWEPT_TICKS: AtomicU64 = AtomicU64::new(0);

/// Gives back the memory of lanes that have rested, if nobody has just done so; answers whether there may be more.
fn sweep() -> bool {
    sweep_after(REST_MS, REST_MS / 2);
    LANES.load(Ordering::Relaxed) > 0
}

/// A call has found nothing to receive: a program that only polls never blocks.
#[inline]
pub(super) fn while_polling() {
    if LANES.load(Ordering::Relaxed) > 0 {
        sweep_after(REST_MS, REST_MS / 2);
    }
}

/// After a lane has grown.
#[inline]
pub(super) fn under_pressure() {
    if LANES.load(Ordering::Relaxed) > 0 && taken_bytes() > WARM_BYTES {
        sweep_after(REST_UNDER_PRESSURE_MS, REST_UNDER_PRESSURE_MS / 4);
    }
}

#[cold]
fn sweep_after(rest_ms: u64, pause_ms: u64) {
    if sandbox::is_confined() {
        return;
    }
    let (now, swept) = (ticks(), SWEPT_TICKS.load(Ordering::Relaxed));
    let is_pause_over = now.wrapping_sub(swept) > pause_ms * TICKS_PER_MILLISECOND;
    if is_pause_over && SWEPT_TICKS.compare_exchange(swept, now, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
        POOL.for_each(|connection| connection.give_back_if_rested(now, rest_ms));
    }
}

impl Connection {
    /// After a send, under the send lock: whether the lane has memory to be given back.
    #[inline]
    pub(super) fn note_memory(&self, lanes: &Lanes) {
        // SAFETY: under the send lock.
        let has_memory = unsafe { (*lanes.sender.get()).memory_bytes() } > 0;
        if has_memory && !self.has_memory.load(Ordering::Relaxed) {
            self.has_memory.store(true, Ordering::Relaxed);
            LANES.fetch_add(1, Ordering::Relaxed);
            blocking::set_idle_work(sweep);
        }
    }

    /// Under the send lock: there is none any more.
    pub(super) fn forget_memory(&self) {
        if self.has_memory.swap(false, Ordering::Relaxed) {
            LANES.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn give_back_if_rested(&'static self, now: u64, rest_ms: u64) {
        if !self.has_memory.load(Ordering::Relaxed) {
            return;
        }
        // Whoever holds the direction is sending, and this may be a signal handler that has interrupted it.
        let Some(_send) = self.hold_if_free(&self.send_lock) else { return };
        let Some(lanes) = self.lanes() else { return self.forget_memory() };
        // SAFETY: under the send lock.
        let sender = unsafe { &mut *lanes.sender.get() };
        let position = sender.position();
        if self.seen_position.swap(position, Ordering::Relaxed) != position {
            self.seen_ticks.store(now, Ordering::Relaxed);
            return;
        }
        let has_rested = now.wrapping_sub(self.seen_ticks.load(Ordering::Relaxed)) >= rest_ms * TICKS_PER_MILLISECOND;
        if !has_rested || self.may_be_shared(lanes) {
            return;
        }
        match sender.release_memory() {
            MemoryRelease::NothingUsed | MemoryRelease::Released => self.forget_memory(),
            MemoryRelease::InUse => {}
        }
    }
}
