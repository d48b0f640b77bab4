//! A value behind a lock of the library.

use crate::process::lock::Lock;
use std::cell::UnsafeCell;

/// A value that threads access only while they hold its [`Lock`].
#[derive(Default)]
pub struct Locked<T> {
    lock: Lock,
    value: UnsafeCell<T>,
}

// SAFETY: the value is accessed only by the holder of the lock, which is one thread.
unsafe impl<T: Send> Sync for Locked<T> {}

impl<T> Locked<T> {
    /// Returns a value behind a lock that no thread holds.
    pub const fn new(value: T) -> Self {
        Self { lock: Lock::new(), value: UnsafeCell::new(value) }
    }

    /// Returns the lock, for the handlers around `fork`.
    pub fn lock(&self) -> &Lock {
        &self.lock
    }

    /// Runs `access` on the value under the lock.
    pub fn with<R>(&self, access: impl FnOnce(&mut T) -> R) -> R {
        let _guard = self.lock.lock();
        // SAFETY: the guard above excludes all other accesses until the end of this function.
        access(unsafe { &mut *self.value.get() })
    }
    /// Returns the value without acquiring the lock.
    ///
    /// # Safety
    /// The caller holds the lock, and neither it nor another thread changes the value while the reference lives.
    pub(crate) unsafe fn get_while_locked(&self) -> &T {
        // SAFETY: the caller guarantees that nothing changes the value meanwhile.
        unsafe { &*self.value.get() }
    }
}
