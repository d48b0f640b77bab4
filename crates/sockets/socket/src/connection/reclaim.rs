//! Returns the memory of rings that have been drained.
//!
//! Only the sender of a lane can release the rings into which the lane has grown, because only the sender knows that it
//! does not write there. It releases them once everything was read and nothing was sent for a while. Threads that are
//! about to block wake a few times a second to check, as long as a lane of the process has such memory; and a process
//! whose lanes have charged more than a few MiB releases the memory of briefly idle lanes when another lane grows.

use super::lanes::Lanes;
use super::{Connection, POOL};
use crate::accounting::memory_budget::{WARM_BYTES, charged_bytes};
use crate::process::clock::{TICKS_PER_MILLISECOND, ticks};
use crate::process::{blocking, sandbox};
use lane::MemoryRelease;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Milliseconds without a send after which a lane's memory is released, when its process blocks.
const IDLE_MS: u64 = 200;
/// Milliseconds without a send after which a lane's memory is released, if the process has more than it keeps warm.
const IDLE_UNDER_PRESSURE_MS: u64 = 10;
/// Number of lanes of this process that have memory beyond their small rings.
static GROWN_LANES: AtomicU32 = AtomicU32::new(0);
/// Clock ticks at the last sweep.
static SWEPT_TICKS: AtomicU64 = AtomicU64::new(0);

/// Releases the memory of idle lanes, unless a sweep has just done so. Returns whether some may be left.
fn sweep() -> bool {
    sweep_after(IDLE_MS, IDLE_MS / 2);
    GROWN_LANES.load(Ordering::Relaxed) > 0
}

/// Releases memory after a call that found nothing to receive: a program that only polls never blocks.
#[inline]
pub(super) fn sweep_while_polling() {
    if GROWN_LANES.load(Ordering::Relaxed) > 0 {
        sweep_after(IDLE_MS, IDLE_MS / 2);
    }
}

/// Releases memory after a lane has grown.
#[inline]
pub(super) fn sweep_under_pressure() {
    if GROWN_LANES.load(Ordering::Relaxed) > 0 && charged_bytes() > WARM_BYTES {
        sweep_after(IDLE_UNDER_PRESSURE_MS, IDLE_UNDER_PRESSURE_MS / 4);
    }
}

/// Releases the memory of lanes that have been idle for `idle_ms`, unless a sweep was less than `pause_ms` ago.
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
    /// Notes after a send whether the lane has memory to release. The caller holds the send lock.
    #[inline]
    pub(super) fn note_growth(&self, lanes: &Lanes) {
        // SAFETY: the caller holds the send lock, which protects the sender.
        let has_grown = unsafe { (*lanes.sender.get()).memory_bytes() } > 0;
        if has_grown && !self.has_grown.load(Ordering::Relaxed) {
            self.has_grown.store(true, Ordering::Relaxed);
            GROWN_LANES.fetch_add(1, Ordering::Relaxed);
            blocking::set_idle_work(sweep);
        }
    }

    /// Notes that the lane has no memory to release any more. The caller holds the send lock.
    pub(super) fn forget_growth(&self) {
        if self.has_grown.swap(false, Ordering::Relaxed) {
            GROWN_LANES.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Releases the memory of the outgoing lane if it has been idle for `idle_ms`.
    fn reclaim_if_idle(&'static self, now: u64, idle_ms: u64) {
        if !self.has_grown.load(Ordering::Relaxed) {
            return;
        }
        // The holder of the lock is sending, and this may be a signal handler that has interrupted it.
        let Some(_send) = self.try_lock_direction(&self.send_lock) else { return };
        let Some(lanes) = self.lanes() else { return self.forget_growth() };
        // SAFETY: the send lock is held, which protects the sender.
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
