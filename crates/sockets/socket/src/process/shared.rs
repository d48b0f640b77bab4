//! State of a socket that all threads of a program use.

use crate::process::lock::Lock;
use crate::process::signals;
use std::cell::UnsafeCell;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering, compiler_fence};

/// The state of a socket behind its lock.
#[derive(Default)]
pub(crate) struct Shared<T> {
    pub(crate) lock: Lock,
    /// Protected by `lock`.
    pub(crate) inner: UnsafeCell<T>,
    /// The closes by signal handlers that have interrupted the holder of `lock`.
    pub(crate) deferred_closes: DeferredCloses,
}

// SAFETY: the cell is accessed only by the holder of the lock, which is one thread.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Returns whether this thread holds the lock, and if so has it deliver deferred signals when it releases the lock.
    pub(crate) fn defers_handlers(&self) -> bool {
        let is_held = self.lock.is_held_by_this_thread();
        if is_held {
            self.deferred_closes.has_deferred_handlers.store(true, Ordering::SeqCst);
            self.deferred_closes.is_any.store(true, Ordering::SeqCst);
        }
        is_held
    }

    /// Runs `access` on the state under the lock, and `forget` on each descriptor that a signal handler has closed
    /// meanwhile.
    pub(crate) fn with<R>(&self, access: impl FnOnce(&mut T) -> R, forget: impl FnMut(RawFd)) -> R {
        let guard = self.lock.lock();
        // SAFETY: this thread holds the lock until `guard` is dropped below, so no other reference to the state exists.
        let result = access(unsafe { &mut *self.inner.get() });
        drop(guard);
        // A handler that runs before this line leaves its work here; one that runs after it finds the lock free.
        compiler_fence(Ordering::SeqCst);
        if !self.deferred_closes.is_empty() {
            self.deferred_closes.take().for_each(forget);
            self.deferred_closes.deliver_deferred_signals();
        }
        result
    }

    /// Runs `access` on the state unless the lock is held, for callers that must not wait.
    pub(crate) fn with_if_free(&self, access: impl FnOnce(&mut T)) {
        if let Some(_guard) = self.lock.try_lock() {
            // SAFETY: this thread holds the lock until `_guard` is dropped, so no other reference to the state exists.
            access(unsafe { &mut *self.inner.get() });
        }
    }

    /// Returns whether this thread holds the lock, which means that the caller is a signal handler that has interrupted
    /// the holder. The close is then left to the holder.
    pub(crate) fn defers_close(&self, fd: RawFd) -> bool {
        let is_held = self.lock.is_held_by_this_thread();
        if is_held {
            self.deferred_closes.add(fd);
        }
        is_held
    }
}

/// The descriptors of a socket that signal handlers have closed while they had interrupted the holder of its lock, for
/// which they cannot wait. An entry is the descriptor plus one; zero is free.
#[derive(Default)]
pub(crate) struct DeferredCloses {
    is_any: AtomicBool,
    /// Whether handlers have been deferred until the lock is free.
    has_deferred_handlers: AtomicBool,
    entries: [AtomicI32; 8],
}

impl DeferredCloses {
    /// Adds a descriptor. Without a free entry it stays known as if it were open; that takes more closes within a few
    /// instructions than a socket has descriptors, except in contrived programs.
    pub(crate) fn add(&self, fd: RawFd) {
        let is_free =
            |entry: &&AtomicI32| entry.compare_exchange(0, fd + 1, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        self.entries.iter().find(is_free);
        self.is_any.store(true, Ordering::SeqCst);
    }

    /// Delivers the signals that were deferred in this thread; those of another thread remain for that one.
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

    /// Removes and returns the descriptors. One that is added meanwhile is returned now, or sets the flag again.
    pub(crate) fn take(&self) -> impl Iterator<Item = RawFd> {
        self.is_any.store(false, Ordering::SeqCst);
        self.entries.iter().map(|entry| entry.swap(0, Ordering::SeqCst) - 1).filter(|fd| *fd >= 0)
    }
}

/// Removes a descriptor from the list. Returns whether it was the last one.
pub(crate) fn remove_is_last(descriptors: &mut Vec<RawFd>, fd: RawFd) -> bool {
    let before = descriptors.len();
    descriptors.retain(|&known| known != fd);
    descriptors.is_empty() && before > 0
}
