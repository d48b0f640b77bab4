//! Objects that live for ever and are used again: a thread that still holds one while another closes it touches valid
//! memory.

use crate::lock::Lock;
use std::cell::UnsafeCell;

/// All objects of one kind.
pub struct Pool<T: 'static> {
    lock: Lock,
    /// Under `lock`.
    lists: UnsafeCell<Lists<T>>,
}

struct Lists<T: 'static> {
    all: Vec<&'static T>,
    free: Vec<&'static T>,
}

// SAFETY: the lists are accessed under the lock, and hold shared references only.
unsafe impl<T: Sync> Sync for Pool<T> {}

impl<T: Default + Sync> Pool<T> {
    /// An empty pool.
    pub const fn new() -> Self {
        Self { lock: Lock::new(), lists: UnsafeCell::new(Lists { all: Vec::new(), free: Vec::new() }) }
    }

    /// An object that nobody uses.
    pub fn take(&self) -> &'static T {
        self.with_lists(|lists| {
            lists.free.pop().unwrap_or_else(|| {
                let object: &'static T = Box::leak(Box::default());
                lists.all.push(object);
                object
            })
        })
    }

    /// Gives an object back, once.
    pub fn give_back(&self, object: &'static T) {
        self.with_lists(|lists| lists.free.push(object));
    }

    /// Runs `visit` on every object, used or not.
    pub fn for_each(&self, mut visit: impl FnMut(&'static T)) {
        self.with_lists(|lists| lists.all.iter().for_each(|object| visit(object)));
    }

    /// Takes the lock before a fork; returns all objects.
    pub fn lock_around_fork(&'static self) -> &'static [&'static T] {
        self.lock.lock_until_unlocked();
        self.all_during_fork()
    }

    /// All objects; the caller holds the lock since [`Pool::lock_around_fork`].
    pub fn all_during_fork(&'static self) -> &'static [&'static T] {
        // SAFETY: the lock is held by the handler that ran before the fork, so nothing changes the list.
        unsafe { &(*self.lists.get()).all }
    }

    /// Frees the lock after a fork, in parent and child.
    pub fn unlock_after_fork(&self) {
        self.lock.unlock();
    }

    fn with_lists<R>(&self, access: impl FnOnce(&mut Lists<T>) -> R) -> R {
        let _guard = self.lock.lock();
        // SAFETY: under the lock.
        access(unsafe { &mut *self.lists.get() })
    }
}

impl<T: Default + Sync> Default for Pool<T> {
    fn default() -> Self {
        Self::new()
    }
}
