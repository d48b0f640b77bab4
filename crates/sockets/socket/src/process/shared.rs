//! State of a socket that the threads of a program share.

use crate::process::lock::Lock;
use crate::process::signals;
use std::cell::UnsafeCell;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering, compiler_fence};

/// What the threads of the program share of a socket.
#[derive(Default)]
pub(crate) struct Shared<T> {
    pub(crate) lock: Lock,
    /// Under `lock`.
    pub(crate) inner: UnsafeCell<T>,
    /// Closed in signal handlers that have interrupted the holder of `lock`.
    pub(crate) deferred_closes: DeferredCloses,
}

// SAFETY: the cell is accessed under the lock.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Has handlers put off if this thread holds the lock.
    pub(crate) fn defers_handlers(&self) -> bool {
        let is_held = self.lock.is_held_by_this_thread();
        if is_held {
            self.deferred_closes.has_deferred_handlers.store(true, Ordering::SeqCst);
            self.deferred_closes.is_any.store(true, Ordering::SeqCst);
        }
        is_held
    }

    /// `forget`: what a close does.
    pub(crate) fn with<R>(&self, access: impl FnOnce(&mut T) -> R, forget: impl FnMut(RawFd)) -> R {
        let guard = self.lock.lock();
        // SAFETY: under the lock.
        let answer = access(unsafe { &mut *self.inner.get() });
        drop(guard);
        // A handler that comes before this line leaves its work here, one that comes after it finds the lock free.
        compiler_fence(Ordering::SeqCst);
        if !self.deferred_closes.is_empty() {
            self.deferred_closes.take().for_each(forget);
            self.deferred_closes.deliver_deferred_signals();
        }
        answer
    }

    /// Runs `access` unless somebody holds the lock: where there is no time to wait.
    pub(crate) fn with_if_free(&self, access: impl FnOnce(&mut T)) {
        if let Some(_guard) = self.lock.try_lock() {
            // SAFETY: under the lock.
            access(unsafe { &mut *self.inner.get() });
        }
    }

    /// Whether a close is left to the holder of the lock, which this is a signal handler above.
    pub(crate) fn defers_close(&self, fd: RawFd) -> bool {
        let is_held = self.lock.is_held_by_this_thread();
        if is_held {
            self.deferred_closes.add(fd);
        }
        is_held
    }
}

/// Descriptors of a socket that were closed in signal handlers which had interrupted the holder of its lock: waiting
/// there would have no end. Each is one more than the number, and zero is none.
#[derive(Default)]
pub(crate) struct DeferredCloses {
    is_any: AtomicBool,
    /// Handlers have been put off until the lock is free.
    has_deferred_handlers: AtomicBool,
    places: [AtomicI32; 8],
}

impl DeferredCloses {
    /// One for which there is no room stays known, as if it were not closed: more were closed within a few instructions
    /// than a socket has, but for contrived ones.
    pub(crate) fn add(&self, fd: RawFd) {
        let is_free =
            |place: &&AtomicI32| place.compare_exchange(0, fd + 1, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        self.places.iter().find(is_free);
        self.is_any.store(true, Ordering::SeqCst);
    }

    /// Lets in what was put off in this thread; what was in another one stays for that.
    pub(crate) fn deliver_deferred_signals(&self) {
        if !self.has_deferred_handlers.load(Ordering::SeqCst) {
            return;
        }
        if signals::are_handlers_deferred() {
            self.has_deferred_handlers.store(false, Ordering::SeqCst);
            signals::deliver_deferred_signals();
        } else {
            self.is_any.store(true, Ordering::SeqCst);
        }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        !self.is_any.load(Ordering::Relaxed)
    }

    /// What comes meanwhile is taken now or says so anew.
    pub(crate) fn take(&self) -> impl Iterator<Item = RawFd> {
        self.is_any.store(false, Ordering::SeqCst);
        self.places.iter().map(|place| place.swap(0, Ordering::SeqCst) - 1).filter(|fd| *fd >= 0)
    }
}

/// Removes a descriptor. Returns whether it was the last.
pub(crate) fn remove_is_last(descriptors: &mut Vec<RawFd>, fd: RawFd) -> bool {
    let before = descriptors.len();
    descriptors.retain(|&known| known != fd);
    descriptors.is_empty() && before > 0
}
