//! A direction's lock, in signal handlers too.
//!
//! A handler that has interrupted the holder would wait for it for ever. While the handler runs the holder stands
//! still, so looking needs no lock: every word that is looked at is one that a peer could have written. What changes
//! the lanes is left to the holder, who does it when it lets go.

use super::{Connection, SHUTDOWN_READ, SHUTDOWN_WRITE};
use crate::process::lock::Lock;
use crate::process::signals;
use rustix::io::Errno;
use std::sync::atomic::{Ordering, compiler_fence};

/// Directions to shut down: as [`Connection::shutdown`] takes them.
const DEFERRED_SHUTDOWN: u32 = (SHUTDOWN_READ | SHUTDOWN_WRITE) as u32;
/// The last descriptor is gone.
pub(super) const DEFERRED_CLOSE: u32 = 4;
/// The last waiter of a closed connection is gone.
pub(super) const DEFERRED_RECYCLE: u32 = 8;

/// Signal handlers of the holder have been put off until the lock of this direction is free.
pub(super) const DEFERRED_SEND_HANDLERS: u32 = 16;
pub(super) const DEFERRED_RECEIVE_HANDLERS: u32 = 32;
pub(super) const DEFERRED_HANDLERS: u32 = DEFERRED_SEND_HANDLERS | DEFERRED_RECEIVE_HANDLERS;

/// A direction, held by this thread.
pub(super) struct DirectionGuard {
    connection: &'static Connection,
    lock: &'static Lock,
}

impl DirectionGuard {
    /// What dropping does, where a call would cost as much again.
    #[inline(always)]
    pub(super) fn release(self) {
        std::mem::ManuallyDrop::new(self).unlock();
    }

    #[inline(always)]
    fn unlock(&self) {
        self.lock.unlock();
        // A handler that comes before this line leaves its work here, one that comes after it finds the lock free.
        compiler_fence(Ordering::SeqCst);
        if self.connection.deferred.load(Ordering::Relaxed) != 0 {
            self.connection.run_deferred(self.lock);
        }
    }
}

impl Drop for DirectionGuard {
    #[inline]
    fn drop(&mut self) {
        self.unlock();
    }
}

impl Connection {
    /// Takes a direction's lock, waiting for it; `None` in a signal handler that has interrupted the holder: it may
    /// look.
    #[inline(always)]
    pub(super) fn lock_direction(&'static self, lock: &'static Lock) -> Option<DirectionGuard> {
        std::mem::forget(lock.lock_unless_held()?);
        Some(DirectionGuard { connection: self, lock })
    }

    /// As [`Connection::lock_direction`], to move bytes of the connection that the object was at `generation`.
    ///
    /// # Errors
    /// `AGAIN` in a handler that has interrupted the holder, `BADF` if the object is another connection by now.
    #[inline(always)]
    pub(super) fn lock_for_generation(
        &'static self,
        generation: u32,
        lock: &'static Lock,
    ) -> Result<DirectionGuard, Errno> {
        let guard = self.lock_direction(lock).ok_or(Errno::AGAIN)?;
        if self.generation() == generation { Ok(guard) } else { Err(Errno::BADF) }
    }

    /// As [`Connection::lock_direction`], where nobody is to be waited for.
    pub(super) fn try_lock_direction(&'static self, lock: &'static Lock) -> Option<DirectionGuard> {
        std::mem::forget(lock.try_lock()?);
        Some(DirectionGuard { connection: self, lock })
    }

    /// Both directions; `None` as [`Connection::lock_direction`].
    pub(super) fn lock_both(&'static self) -> Option<(DirectionGuard, DirectionGuard)> {
        let send = self.lock_direction(&self.send_lock)?;
        Some((send, self.lock_direction(&self.receive_lock)?))
    }

    /// In a handler that has interrupted the holder.
    #[cold]
    pub(super) fn defer_to_holder(&self, deferred: u32) {
        self.deferred.fetch_or(deferred, Ordering::SeqCst);
    }

    #[cold]
    fn run_deferred(&'static self, lock: &'static Lock) {
        let is_send = std::ptr::eq(lock, &raw const self.send_lock);
        let of_lock = if is_send { DEFERRED_SEND_HANDLERS } else { DEFERRED_RECEIVE_HANDLERS };
        // What is of another thread or the other direction stays for those.
        let own = if signals::are_handlers_deferred() { of_lock } else { 0 };
        let deferred = self.deferred.fetch_and(DEFERRED_HANDLERS & !own, Ordering::SeqCst) & (own | !DEFERRED_HANDLERS);
        // After a close the lifeline's number may be another file's; the close ends both directions anyway.
        if deferred & DEFERRED_CLOSE != 0 {
            self.finish_close();
        } else if deferred & DEFERRED_SHUTDOWN != 0 {
            let _ = self.shutdown(u64::from(deferred & DEFERRED_SHUTDOWN));
        }
        if deferred & DEFERRED_RECYCLE != 0 {
            self.recycle_if_unused();
        }
        if deferred & DEFERRED_HANDLERS != 0 {
            signals::deliver_deferred_signals();
        }
    }
}
