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
const DUE_SHUTDOWN: u32 = (SHUTDOWN_READ | SHUTDOWN_WRITE) as u32;
/// The last descriptor is gone.
pub(super) const DUE_CLOSE: u32 = 4;
/// The last waiter of a closed connection is gone.
pub(super) const DUE_RECYCLE: u32 = 8;

/// Signal handlers of the holder have been put off until the lock of this direction is free.
pub(super) const DUE_HANDLERS_OF_SEND: u32 = 16;
pub(super) const DUE_HANDLERS_OF_RECEIVE: u32 = 32;
pub(super) const DUE_HANDLERS: u32 = DUE_HANDLERS_OF_SEND | DUE_HANDLERS_OF_RECEIVE;

/// A direction, held by this thread.
pub(super) struct Hold {
    connection: &'static Connection,
    lock: &'static Lock,
}

impl Hold {
    /// What dropping does, where a call would cost as much again.
    #[inline(always)]
    pub(super) fn let_go(self) {
        std::mem::ManuallyDrop::new(self).unlock();
    }

    #[inline(always)]
    fn unlock(&self) {
        self.lock.unlock();
        // A handler that comes before this line leaves its work here, one that comes after it finds the lock free.
        compiler_fence(Ordering::SeqCst);
        if self.connection.due.load(Ordering::Relaxed) != 0 {
            self.connection.do_what_is_due(self.lock);
        }
    }
}

impl Drop for Hold {
    #[inline]
    fn drop(&mut self) {
        self.unlock();
    }
}

impl Connection {
    /// Takes a direction's lock, waiting for it; `None` in a signal handler that has interrupted the holder: it may
    /// look.
    #[inline(always)]
    pub(super) fn hold(&'static self, lock: &'static Lock) -> Option<Hold> {
        std::mem::forget(lock.lock_unless_held()?);
        Some(Hold { connection: self, lock })
    }

    /// As [`Connection::hold`], to move bytes of the connection that the object was at `generation`.
    ///
    /// # Errors
    /// `AGAIN` in a handler that has interrupted the holder, `BADF` if the object is another connection by now.
    #[inline(always)]
    pub(super) fn hold_of(&'static self, generation: u32, lock: &'static Lock) -> Result<Hold, Errno> {
        let hold = self.hold(lock).ok_or(Errno::AGAIN)?;
        if self.generation() == generation { Ok(hold) } else { Err(Errno::BADF) }
    }

    /// As [`Connection::hold`], where nobody is to be waited for.
    pub(super) fn hold_if_free(&'static self, lock: &'static Lock) -> Option<Hold> {
        std::mem::forget(lock.try_lock()?);
        Some(Hold { connection: self, lock })
    }

    /// Both directions; `None` as [`Connection::hold`].
    pub(super) fn hold_both(&'static self) -> Option<(Hold, Hold)> {
        let send = self.hold(&self.send_lock)?;
        Some((send, self.hold(&self.receive_lock)?))
    }

    /// In a handler that has interrupted the holder.
    #[cold]
    pub(super) fn leave_to_holder(&self, due: u32) {
        self.due.fetch_or(due, Ordering::SeqCst);
    }

    #[cold]
    fn do_what_is_due(&'static self, lock: &'static Lock) {
        let is_send = std::ptr::eq(lock, &raw const self.send_lock);
        let of_lock = if is_send { DUE_HANDLERS_OF_SEND } else { DUE_HANDLERS_OF_RECEIVE };
        // What is of another thread or the other direction stays for those.
        let own = if signals::are_handlers_deferred() { of_lock } else { 0 };
        let due = self.due.fetch_and(DUE_HANDLERS & !own, Ordering::SeqCst) & (own | !DUE_HANDLERS);
        // After a close the lifeline's number may be another file's; the close ends both directions anyway.
        if due & DUE_CLOSE != 0 {
            self.finish_close();
        } else if due & DUE_SHUTDOWN != 0 {
            let _ = self.shutdown(u64::from(due & DUE_SHUTDOWN));
        }
        if due & DUE_RECYCLE != 0 {
            self.recycle_if_unused();
        }
        if due & DUE_HANDLERS != 0 {
            signals::deliver_deferred_signals();
        }
    }
}
