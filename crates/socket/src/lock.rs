//! A lock small enough to be in every connection, and resettable in the child of a fork.

use crate::threads;
use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, Ordering};

const FREE: u32 = 0;
const HELD: u32 = 1;
const AWAITED: u32 = 2;
const SPINS: u32 = 100;

/// Mutual exclusion between the threads of one process. Never held across a sleep in the kernel.
///
/// Not `std::sync::Mutex`, because the child of a fork must be able to free locks that threads of its parent held.
#[derive(Debug, Default)]
pub struct Lock {
    word: AtomicU32,
}

/// Held for as long as it lives.
#[derive(Debug)]
pub struct Guard<'a>(&'a Lock);

impl Lock {
    /// A free lock.
    pub const fn new() -> Self {
        Self { word: AtomicU32::new(FREE) }
    }

    /// Takes the lock, waiting for it.
    #[inline]
    pub fn lock(&self) -> Guard<'_> {
        let is_mine = if threads::is_single() {
            let is_free = self.word.load(Ordering::Relaxed) == FREE;
            if is_free {
                self.word.store(HELD, Ordering::Relaxed);
            }
            is_free
        } else {
            self.word.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        if !is_mine {
            self.lock_slowly();
        }
        Guard(self)
    }

    /// Takes the lock without a guard, until [`Lock::unlock`]: for the handlers around `fork`.
    pub fn lock_until_unlocked(&self) {
        std::mem::forget(self.lock());
    }

    /// Frees the lock.
    #[inline]
    pub fn unlock(&self) {
        if threads::is_single() {
            self.word.store(FREE, Ordering::Release);
        } else if self.word.swap(FREE, Ordering::Release) == AWAITED {
            let _ = futex::wake(&self.word, futex::Flags::PRIVATE, 1);
        }
    }

    /// Frees a lock whose holder does not exist here: only in the child of a fork, before it has threads.
    pub fn reset(&self) {
        self.word.store(FREE, Ordering::Relaxed);
    }

    #[cold]
    fn lock_slowly(&self) {
        for _ in 0..SPINS {
            std::hint::spin_loop();
            if self.word.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return;
            }
        }
        while self.word.swap(AWAITED, Ordering::Acquire) != FREE {
            let _ = futex::wait(&self.word, futex::Flags::PRIVATE, AWAITED, None);
        }
    }
}

impl Drop for Guard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_exclude_each_other() {
        struct Counter(std::cell::UnsafeCell<u64>);
        // SAFETY: the test takes the lock around every access.
        unsafe impl Sync for Counter {}
        let lock = Lock::new();
        let counter = Counter(std::cell::UnsafeCell::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let counter = &counter;
                    for _ in 0..20_000 {
                        let _guard = lock.lock();
                        // SAFETY: under the lock.
                        unsafe { *counter.0.get() += 1 };
                    }
                });
            }
        });
        assert_eq!(counter.0.into_inner(), 80_000);
    }

    #[test]
    fn a_lock_held_by_nobody_left_can_be_reset() {
        let lock = Lock::new();
        lock.lock_until_unlocked();
        lock.reset();
        drop(lock.lock());
    }
}
