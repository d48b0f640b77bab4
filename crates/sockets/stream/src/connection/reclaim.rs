//! What is done for lanes from time to time: the memory of rings that have been drained is returned, and a direction
//! goes back to TCP if its lane is full and the receiver does not enter it.
//!
//! Only the sender of a lane can release the rings into which the lane has grown, because only the sender knows that it
//! does not write there. It releases them once everything was read and nothing was sent for a while. Threads that are
//! about to block wake a few times a second to check, as long as a lane of the process has such memory; and a process
//! whose lanes have charged more than a few MiB releases the memory of briefly idle lanes when another lane grows.

use super::lanes::OutLane;
use super::{Connection, POOL};
use crate::kernel::Tcp;
use crate::table::{self, Entry};
use lane::MemoryRelease;
use socket::accounting::memory_budget::{WARM_BYTES, charged_bytes};
use socket::process::clock::{TICKS_PER_MILLISECOND, ticks};
use socket::process::{blocking, sandbox};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Milliseconds without a send after which a lane's memory is released, when its process blocks.
const IDLE_MS: u64 = 200;
/// Milliseconds without a send after which a lane's memory is released, if the process has more than it keeps warm.
const IDLE_UNDER_PRESSURE_MS: u64 = 10;
/// Number of lanes of this process that have memory beyond their small rings, or were full.
static COUNTED_LANES: AtomicU32 = AtomicU32::new(0);
/// Clock ticks at the last sweep.
static SWEPT_TICKS: AtomicU64 = AtomicU64::new(0);

/// What is known of a lane's memory beyond its small ring, and whether it was full.
#[derive(Default)]
pub(super) struct Growth {
    is_counted: bool,
    /// The position of the sender at the last check, and when it was first seen there.
    idle_position: u64,
    idle_since_ticks: u64,
}

impl Growth {
    /// Notes after a send whether the lane is full or has memory to release.
    #[inline]
    pub fn note(&mut self, lane: &OutLane, is_full: bool) {
        if !self.is_counted && (is_full || lane.memory_bytes() > 0) {
            self.begin();
        }
    }

    #[cold]
    fn begin(&mut self) {
        self.is_counted = true;
        COUNTED_LANES.fetch_add(1, Ordering::Relaxed);
        blocking::set_idle_work(sweep);
    }

    /// Notes that the lane has no memory to release any more.
    fn end(&mut self) {
        if std::mem::take(&mut self.is_counted) {
            COUNTED_LANES.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Releases the memory of the lane if it has been idle for `idle_ms`.
    pub fn reclaim_if_idle(&mut self, lane: Option<&mut OutLane>, now_ticks: u64, idle_ms: u64) {
        if !self.is_counted {
            return;
        }
        let Some(lane) = lane else { return self.end() };
        if self.idle_position != lane.position() {
            (self.idle_position, self.idle_since_ticks) = (lane.position(), now_ticks);
            return;
        }
        if now_ticks.wrapping_sub(self.idle_since_ticks) < idle_ms * TICKS_PER_MILLISECOND {
            return;
        }
        match lane.release_memory() {
            MemoryRelease::NothingUsed | MemoryRelease::Released => self.end(),
            MemoryRelease::InUse => {}
        }
    }
}

impl Drop for Growth {
    fn drop(&mut self) {
        self.end();
    }
}

/// Releases the memory of idle lanes, unless a sweep has just done so. Returns whether some may be left.
fn sweep() -> bool {
    sweep_after(IDLE_MS, IDLE_MS / 2);
    COUNTED_LANES.load(Ordering::Relaxed) > 0
}

/// Does the same after a call that found nothing to receive or no room: a program that only polls never blocks.
#[inline]
pub(super) fn sweep_while_polling() {
    if COUNTED_LANES.load(Ordering::Relaxed) > 0 {
        sweep_after(IDLE_MS, IDLE_MS / 2);
    }
}

/// Releases memory after a lane has grown. No lock of a connection is held then.
#[inline]
pub(super) fn sweep_under_pressure() {
    if COUNTED_LANES.load(Ordering::Relaxed) > 0 && charged_bytes() > WARM_BYTES {
        sweep_after(IDLE_UNDER_PRESSURE_MS, IDLE_UNDER_PRESSURE_MS / 4);
    }
}

/// Releases the memory of lanes that have been idle for `idle_ms`, unless a sweep was less than `pause_ms` ago.
#[cold]
#[inline(never)]
fn sweep_after(idle_ms: u64, pause_ms: u64) {
    if sandbox::is_confined() {
        return;
    }
    let (now, swept) = (ticks(), SWEPT_TICKS.load(Ordering::Relaxed));
    let is_pause_over = now.wrapping_sub(swept) > pause_ms * TICKS_PER_MILLISECOND;
    if is_pause_over && SWEPT_TICKS.compare_exchange(swept, now, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
        let mut is_entry_due = false;
        POOL.for_each(|connection| {
            // The holder of the lock is sending, and this may be a signal handler that has interrupted it.
            if let Some(mut sender) = connection.sender.try_lock() {
                sender.reclaim_if_idle(now, idle_ms);
                is_entry_due |= sender.is_entry_due(now);
            }
        });
        if is_entry_due {
            make_room(now);
        }
    }
}

/// Makes room for sends where a lane was full before the peer has entered it.
fn make_room(now_ticks: u64) {
    table::for_each(0..=RawFd::MAX, |fd, entry| {
        if let Entry::Connection(connection) = entry {
            connection.make_room(Tcp(fd), now_ticks);
        }
    });
}

impl Connection {
    fn make_room(&'static self, tcp: Tcp, now_ticks: u64) {
        let Some(mut sender) = self.sender.try_lock() else { return };
        // A close by another thread takes the lock before it frees the number; the object may be another connection.
        let is_its_own = || self.descriptors.lock().is_some_and(|descriptors| descriptors.contains(&tcp.0));
        if !sender.is_entry_due(now_ticks) || !is_its_own() {
            return;
        }
        sender.make_room(tcp, self.role());
        drop(sender);
        self.ring();
        self.for_each_watcher(|set| {
            set.note_path(self);
            set.poll_again(self);
        });
    }
}
