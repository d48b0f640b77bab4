//! Memory of what was read.
//!
//! The rings into which a lane has grown are the sender's to give back: only it knows that it does not write there. It
//! does so once everything was read and nothing was sent for a while, in two ways: threads that are about to block wake
//! up a few times a second as long as any lane of the process has such memory; and a process whose lanes have taken
//! more than a few MiB gives back those that have rested for a moment when another one grows.

use super::lanes::Lanes;
use super::{Connection, POOL};
use crate::accounting::memory_budget::{WARM_BYTES, charged_bytes};
use crate::process::blocking;
use crate::process::clock::{TICKS_PER_MILLISECOND, ticks};
use crate::process::sandbox;
use lane::MemoryRelease;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A lane that nothing was sent on for so long gives its memory back when its process blocks.
const IDLE_MS: u64 = 200;
/// The same when the process has more memory than it keeps warm.
const IDLE_UNDER_PRESSURE_MS: u64 = 10;
/// Lanes of this process that have memory beyond their small rings.
static GROWN_LANES: AtomicU32 = AtomicU32::new(0);
/// Clock ticks at the last sweep.
static SWEPT_TICKS: AtomicU64 = AtomicU64::new(0);

/// Gives back the memory of lanes that have rested, if nobody has just done so; answers whether there may be more.
fn sweep() -> bool {
    sweep_after(IDLE_MS, IDLE_MS / 2);
    GROWN_LANES.load(Ordering::Relaxed) > 0
}

/// A call has found nothing to receive: a program that only polls never blocks.
#[inline]
pub(super) fn reclaim_while_polling() {
    if GROWN_LANES.load(Ordering::Relaxed) > 0 {
        sweep_after(IDLE_MS, IDLE_MS / 2);
    }
}

/// After a lane has grown.
#[inline]
pub(super) fn reclaim_under_pressure() {
    if GROWN_LANES.load(Ordering::Relaxed) > 0 && charged_bytes() > WARM_BYTES {
        sweep_after(IDLE_UNDER_PRESSURE_MS, IDLE_UNDER_PRESSURE_MS / 4);
    }
}

#[cold]
fn sweep_after(idle_ms: u64, pause_ms: u64) {
    if sandbox::is_confined() {
        return;
    }
    let (now, swept) = (ticks(), SWEPT_TICKS.load(Ordering::Relaxed));
    let is_pause_over = now.wrapping_sub(swept) > pause_ms * TICKS_PER_MILLISECOND;
    if is_pause_over && SWEPT_TICKS.compare_exchange(swept, now, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
        POOL.for_each(|connection| connection.reclaim_if_idle(now, idle_ms));
    }
}

impl Connection {
    /// After a send, under the send lock: whether the lane has memory to be given back.
    #[inline]
    pub(super) fn note_growth(&self, lanes: &Lanes) {
        // SAFETY: under the send lock.
        let has_grown = unsafe { (*lanes.sender.get()).memory_bytes() } > 0;
        if has_grown && !self.has_grown.load(Ordering::Relaxed) {
            self.has_grown.store(true, Ordering::Relaxed);
            GROWN_LANES.fetch_add(1, Ordering::Relaxed);
            blocking::set_idle_work(sweep);
        }
    }

    /// Under the send lock: there is none any more.
    pub(super) fn forget_growth(&self) {
        if self.has_grown.swap(false, Ordering::Relaxed) {
            GROWN_LANES.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn reclaim_if_idle(&'static self, now: u64, idle_ms: u64) {
        if !self.has_grown.load(Ordering::Relaxed) {
            return;
        }
        // Whoever holds the direction is sending, and this may be a signal handler that has interrupted it.
        let Some(_send) = self.try_lock_direction(&self.send_lock) else { return };
        let Some(lanes) = self.lanes() else { return self.forget_growth() };
        // SAFETY: under the send lock.
        let sender = unsafe { &mut *lanes.sender.get() };
        let position = sender.position();
        if self.idle_position.swap(position, Ordering::Relaxed) != position {
            self.idle_since_ticks.store(now, Ordering::Relaxed);
            return;
        }
        let is_idle =
            now.wrapping_sub(self.idle_since_ticks.load(Ordering::Relaxed)) >= idle_ms * TICKS_PER_MILLISECOND;
        if !is_idle || self.has_other_holders(lanes) {
            return;
        }
        match sender.release_memory() {
            MemoryRelease::NothingUsed | MemoryRelease::Released => self.forget_growth(),
            MemoryRelease::InUse => {}
        }
    }
}
