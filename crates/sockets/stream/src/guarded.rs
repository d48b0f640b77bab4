//! A value behind a lock that signal handlers may find held by the thread that they have interrupted.

use socket::process::lock::{Guard, Lock};
use socket::process::signals;
use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence};

/// A value that threads access only while they hold its lock.
///
/// A handler of the program that would interrupt the holder is deferred until the lock is free: it could leave the
/// call by a jump, and the lock would stay held.
#[derive(Default)]
pub struct Guarded<T> {
    lock: Lock,
    /// Handlers have been deferred until the lock is free.
    has_deferred: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is accessed only by the holder of the lock, which is one thread.
unsafe impl<T: Send> Sync for Guarded<T> {}

/// Access to the value, until it is dropped.
pub struct Access<'a, T> {
    guarded: &'a Guarded<T>,
    guard: std::mem::ManuallyDrop<Guard<'a>>,
}

impl<T> Guarded<T> {
    /// Waits for the lock. Returns `None` in a signal handler that the library could not defer and that has interrupted
    /// the holder.
    #[inline(always)] // Part of the path of short messages.
    pub fn lock(&self) -> Option<Access<'_, T>> {
        let guard = std::mem::ManuallyDrop::new(self.lock.lock_unless_held()?);
        Some(Access { guarded: self, guard })
    }

    /// Returns access if the lock is free.
    pub fn try_lock(&self) -> Option<Access<'_, T>> {
        let guard = std::mem::ManuallyDrop::new(self.lock.try_lock()?);
        Some(Access { guarded: self, guard })
    }

    /// Returns whether this thread holds the lock; if so, handlers are delivered when it releases it.
    pub fn defers_handlers(&self) -> bool {
        let is_held = self.lock.is_held_by_this_thread();
        if is_held {
            self.has_deferred.store(true, Ordering::SeqCst);
        }
        is_held
    }

    /// Takes the lock before a fork, until [`Guarded::unlock_after_fork`].
    pub fn lock_before_fork(&self) {
        self.lock.lock_without_guard();
    }

    /// Releases the lock after a fork, in the parent.
    pub fn unlock_after_fork(&self) {
        self.lock.unlock();
    }

    /// Releases the lock in the child of a fork, where its holder does not exist.
    pub fn reset_after_fork(&self) {
        self.lock.reset();
    }
}

impl<T> Deref for Access<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: the guard excludes other accesses as long as `self` lives, and `self` is borrowed.
        unsafe { &*self.guarded.value.get() }
    }
}

impl<T> DerefMut for Access<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard excludes other accesses as long as `self` lives, and `self` is borrowed mutably.
        unsafe { &mut *self.guarded.value.get() }
    }
}

impl<T> Drop for Access<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: the guard is not used again.
        unsafe { std::mem::ManuallyDrop::drop(&mut self.guard) };
        // A handler that runs before this fence leaves its work here; one that runs after it finds the lock free.
        compiler_fence(Ordering::SeqCst);
        if self.guarded.has_deferred.load(Ordering::Relaxed) && signals::are_handlers_deferred() {
            self.guarded.has_deferred.store(false, Ordering::SeqCst);
            signals::deliver_deferred_signals();
        }
    }
}
