//! The lock of a direction, which signal handlers may find held by the thread that they have interrupted.
//!
//! Such a handler would wait forever. While it runs, the holder does not, so the handler may read without the lock:
//! every word that it reads is one that a peer could have written. Work that changes the lanes is deferred to the
//! holder, which does it when it releases the lock.

use super::{Connection, SHUTDOWN_READ, SHUTDOWN_WRITE};
use crate::process::lock::Lock;
use crate::process::signals;
use rustix::io::Errno;
use std::sync::atomic::{Ordering, compiler_fence};

/// The directions to shut down, as [`Connection::shutdown`] takes them.
const DEFERRED_SHUTDOWN: u32 = (SHUTDOWN_READ | SHUTDOWN_WRITE) as u32;
/// The last descriptor was closed.
pub(super) const DEFERRED_CLOSE: u32 = 4;
/// The last waiter of a closed connection has left.
pub(super) const DEFERRED_RECYCLE: u32 = 8;

/// Signal handlers are deferred until the lock of this direction is free.
pub(super) const DEFERRED_SEND_HANDLERS: u32 = 16;
pub(super) const DEFERRED_RECEIVE_HANDLERS: u32 = 32;
pub(super) const DEFERRED_HANDLERS: u32 = DEFERRED_SEND_HANDLERS | DEFERRED_RECEIVE_HANDLERS;

/// The lock of a direction, held by this thread.
pub(super) struct DirectionGuard {
    connection: &'static Connection,
    lock: &'static Lock,
}

impl DirectionGuard {
    /// Releases the lock as dropping does, inline.
    #[inline(always)]
    pub(super) fn release(self) {
        std::mem::ManuallyDrop::new(self).unlock();
    }

    #[inline(always)]
    fn unlock(&self) {
        self.lock.unlock();
        // A handler that runs before this fence leaves its work here; one that runs after it finds the lock free.
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
    /// Takes a direction's lock, waiting for it. Returns `None` in a signal handler that has interrupted the holder;
    /// the handler may read.
    #[inline(always)]
    pub(super) fn lock_direction(&'static self, lock: &'static Lock) -> Option<DirectionGuard> {
        std::mem::forget(lock.lock_unless_held()?);
        Some(DirectionGuard { connection: self, lock })
    }

    /// Takes a direction's lock to move bytes of the connection that the object was in `generation`.
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

    /// Takes a direction's lock if it is free.
    pub(super) fn try_lock_direction(&'static self, lock: &'static Lock) -> Option<DirectionGuard> {
        std::mem::forget(lock.try_lock()?);
        Some(DirectionGuard { connection: self, lock })
    }

    /// Takes both locks. Returns `None` where [`Connection::lock_direction`] does.
    pub(super) fn lock_both(&'static self) -> Option<(DirectionGuard, DirectionGuard)> {
        let send = self.lock_direction(&self.send_lock)?;
        Some((send, self.lock_direction(&self.receive_lock)?))
    }

    /// Defers work to the lock's holder, from a signal handler that has interrupted it.
    #[cold]
    pub(super) fn defer_to_holder(&self, deferred: u32) {
        self.deferred.fetch_or(deferred, Ordering::SeqCst);
    }

    /// Does the work that signal handlers have deferred, after a lock was released.
    #[cold]
    fn run_deferred(&'static self, lock: &'static Lock) {
        let is_send = std::ptr::eq(lock, &raw const self.send_lock);
        let of_lock = if is_send { DEFERRED_SEND_HANDLERS } else { DEFERRED_RECEIVE_HANDLERS };
        // Work of another thread or of the other direction stays deferred.
        let of_thread = if signals::are_handlers_deferred() { of_lock } else { 0 };
        let deferred = self.deferred.fetch_and(DEFERRED_HANDLERS & !of_thread, Ordering::SeqCst)
            & (of_thread | !DEFERRED_HANDLERS);
        // After a close the lifeline's number may belong to another file; the close ends both directions anyway.
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
