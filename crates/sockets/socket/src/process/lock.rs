//! A lock small enough to be in every connection, and resettable in the child of a fork.

use crate::process::{sandbox, threads};
use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, Ordering};

const FREE: u32 = 0;
/// Set in the word while a thread waits; the other bits identify the holder.
const CONTENDED: u32 = 1;
const SPINS: u32 = 100;

/// A mutex between the threads of one process, never held while its holder blocks in the kernel.
///
/// This is not `std::sync::Mutex`, because the child of a fork must be able to release locks that threads of its parent
/// held, and because a signal handler must be able to find out that it has interrupted the holder.
#[derive(Debug, Default)]
pub struct Lock {
    word: AtomicU32,
}

/// Holds the lock until it is dropped.
#[derive(Debug)]
pub struct Guard<'a>(&'a Lock);

impl Lock {
    /// Returns a lock that no thread holds.
    pub const fn new() -> Self {
        Self { word: AtomicU32::new(FREE) }
    }

    /// Acquires the lock and waits for it if necessary.
    #[inline]
    pub fn lock(&self) -> Guard<'_> {
        if !self.acquire_if_free() {
            while !self.acquire_slowly() {
                // This is a signal handler that has interrupted the holder, at a call whose result needs the lock.
                rustix::thread::sched_yield();
            }
        }
        Guard(self)
    }

    /// Acquires the lock and waits for it if necessary. Returns `None` in a signal handler that has interrupted the
    /// holder, which would wait for itself.
    #[inline(always)] // A few instructions without contention, like `unlock` and `acquire_if_free`.
    pub fn lock_unless_held(&self) -> Option<Guard<'_>> {
        if self.acquire_if_free() || self.acquire_slowly() { Some(Guard(self)) } else { None }
    }

    /// Acquires the lock if it is free.
    pub fn try_lock(&self) -> Option<Guard<'_>> {
        // Not `then_some`: that would create the guard first, and dropping it would release what another thread holds.
        self.acquire_if_free().then(|| Guard(self))
    }

    /// Acquires the lock without a guard, until [`Lock::unlock`]: for the handlers around `fork`.
    pub fn lock_without_guard(&self) {
        std::mem::forget(self.lock());
    }
    /// Releases the lock.
    #[inline(always)]
    pub fn unlock(&self) {
        if threads::is_single() {
            self.word.store(FREE, Ordering::Release);
        } else if self.word.swap(FREE, Ordering::Release) & CONTENDED != 0 {
            let _ = futex::wake(&self.word, futex::Flags::PRIVATE, 1);
        }
    }

    /// Returns whether the calling thread holds the lock. If so, the caller is a signal handler that has interrupted
    /// the holder.
    pub fn is_held_by_this_thread(&self) -> bool {
        self.word.load(Ordering::Relaxed) & !CONTENDED == threads::current()
    }

    /// Releases a lock whose holder does not exist in this process: for the child of a fork, before it has threads.
    pub fn reset(&self) {
        self.word.store(FREE, Ordering::Relaxed);
    }

    #[inline(always)]
    fn acquire_if_free(&self) -> bool {
        let me = threads::current();
        if threads::is_single() {
            let is_free = self.word.load(Ordering::Relaxed) == FREE;
            if is_free {
                self.word.store(me, Ordering::Relaxed);
            }
            return is_free;
        }
        self.word.compare_exchange(FREE, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Acquires the lock after the fast attempt has failed. Returns false if this thread holds it already.
    #[cold]
    fn acquire_slowly(&self) -> bool {
        let me = threads::current();
        for _ in 0..SPINS {
            if self.word.compare_exchange(FREE, me, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return true;
            }
            std::hint::spin_loop();
        }
        loop {
            let word = self.word.load(Ordering::Relaxed);
            if word & !CONTENDED == me {
                return false;
            }
            if word == FREE {
                // Other threads may be waiting too, so the flag stays set.
                if self.word.compare_exchange(FREE, me | CONTENDED, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                    return true;
                }
                continue;
            }
            if sandbox::is_confined() {
                std::hint::spin_loop(); // It is never held for long, and under a filter no thread may block.
                continue;
            }
            let contended = word | CONTENDED;
            if word == contended
                || self.word.compare_exchange(word, contended, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            {
                let _ = futex::wait(&self.word, futex::Flags::PRIVATE, contended, None);
            }
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
        // SAFETY: the test acquires the lock around every access.
        unsafe impl Sync for Counter {}
        let lock = Lock::new();
        let counter = Counter(std::cell::UnsafeCell::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let counter = &counter;
                    for _ in 0..20_000 {
                        let _guard = lock.lock();
                        // SAFETY: the guard above excludes all other threads until the end of the block.
                        unsafe { *counter.0.get() += 1 };
                    }
                });
            }
        });
        assert_eq!(counter.0.into_inner(), 80_000);
    }

    #[test]
    fn a_holder_that_locks_again_gets_none() {
        let lock = Lock::new();
        let guard = lock.lock();
        assert!(lock.lock_unless_held().is_none());
        assert!(lock.is_held_by_this_thread());
        std::thread::scope(|scope| scope.spawn(|| assert!(!lock.is_held_by_this_thread())).join().unwrap());
        drop(guard);
        assert!(lock.lock_unless_held().is_some());
    }

    #[test]
    fn a_failed_attempt_leaves_the_lock_with_its_holder() {
        let lock = Lock::new();
        let guard = lock.lock();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert!(lock.try_lock().is_none());
                assert!(lock.try_lock().is_none(), "the first attempt must not release what another thread holds");
            });
        });
        assert!(lock.is_held_by_this_thread());
        drop(guard);
        assert!(lock.try_lock().is_some());
        assert!(lock.try_lock().is_some(), "a guard releases it");
    }

    #[test]
    fn a_lock_whose_holder_is_gone_can_be_reset() {
        let lock = Lock::new();
        lock.lock_without_guard();
        lock.reset();
        drop(lock.lock());
    }
}
