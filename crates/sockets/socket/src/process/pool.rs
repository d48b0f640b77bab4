//! Pools of objects that are never freed but reused: a thread that still holds one while another thread closes it
//! accesses valid memory.

use crate::process::locked::Locked;
use crate::process::signals;
use std::collections::VecDeque;

/// Number of objects that are collected at each acquisition of the lock.
const VISITED_AT_ONCE: usize = 32;

/// A pool of all objects of one type.
pub struct Pool<T: 'static> {
    lists: Locked<Lists<T>>,
}

struct Lists<T: 'static> {
    all: Vec<&'static T>,
    /// The object that has been free for longest comes first: a thread that still holds it has had time to notice.
    free: VecDeque<&'static T>,
}

impl<T: Default + Sync> Pool<T> {
    /// Returns an empty pool.
    pub const fn new() -> Self {
        Self { lists: Locked::new(Lists { all: Vec::new(), free: VecDeque::new() }) }
    }

    /// Returns a free object, or a new one.
    pub fn take(&self) -> &'static T {
        self.with_lists(|lists| {
            lists.free.pop_front().unwrap_or_else(|| {
                let object: &'static T = Box::leak(Box::default());
                lists.all.push(object);
                object
            })
        })
    }

    /// Returns an object to the pool. Each object is returned once for each time that it was taken.
    pub fn release(&self, object: &'static T) {
        self.with_lists(|lists| lists.free.push_back(object));
    }

    /// Runs `visit` on every object, in use or free, without holding the lock. Does not allocate: a signal handler that
    /// closes a socket may have interrupted the program's allocator.
    pub fn for_each(&self, mut visit: impl FnMut(&'static T)) {
        let mut seen = 0;
        loop {
            let mut some = [None; VISITED_AT_ONCE];
            self.with_lists(|lists| {
                some.iter_mut().zip(lists.all.iter().skip(seen)).for_each(|(slot, object)| *slot = Some(*object));
            });
            some.into_iter().flatten().for_each(&mut visit);
            seen += VISITED_AT_ONCE;
            if some.last().is_none_or(Option::is_none) {
                return;
            }
        }
    }

    /// Returns whether an object, in use or free, fulfils `is_wanted`, which is called under the lock. Does not
    /// allocate.
    pub fn any(&self, is_wanted: impl FnMut(&'static T) -> bool) -> bool {
        self.with_lists(|lists| lists.all.iter().copied().any(is_wanted))
    }

    /// Acquires the lock before a fork and returns all objects.
    pub fn lock_around_fork(&'static self) -> &'static [&'static T] {
        self.lists.lock().lock_without_guard();
        self.all_during_fork()
    }

    /// Returns all objects, for the handlers that run between [`Pool::lock_around_fork`] and
    /// [`Pool::unlock_after_fork`].
    pub fn all_during_fork(&'static self) -> &'static [&'static T] {
        // SAFETY: the handler that ran before the fork holds the lock until `unlock_after_fork`, so nothing changes the
        // list.
        &unsafe { self.lists.get_while_locked() }.all
    }

    /// Releases the lock after a fork, in parent and child.
    pub fn unlock_after_fork(&self) {
        self.lists.lock().unlock();
    }

    fn with_lists<R>(&self, access: impl FnOnce(&mut Lists<T>) -> R) -> R {
        signals::without_handlers(|| self.lists.with(access))
    }
}

impl<T: Default + Sync> Default for Pool<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_object_that_has_been_free_for_longest_is_reused_first() {
        static POOL: Pool<u8> = Pool::new();
        let [one, two] = [POOL.take(), POOL.take()];
        POOL.release(one);
        POOL.release(two);
        assert!(std::ptr::eq(POOL.take(), one));
        assert!(std::ptr::eq(POOL.take(), two));
    }

    #[test]
    fn all_objects_are_visited_once() {
        for count in [0, 1, VISITED_AT_ONCE, VISITED_AT_ONCE + 1, 2 * VISITED_AT_ONCE] {
            let pool: &Pool<u8> = Box::leak(Box::default());
            let all: Vec<_> = (0..count).map(|_| std::ptr::from_ref(pool.take())).collect();
            let mut visited = Vec::new();
            pool.for_each(|object| visited.push(std::ptr::from_ref(object)));
            assert_eq!(visited, all);
        }
    }

    #[test]
    fn a_visitor_may_use_the_pool() {
        static POOL: Pool<u8> = Pool::new();
        POOL.release(POOL.take());
        let mut visits = 0;
        POOL.for_each(|_| {
            POOL.release(POOL.take());
            visits += 1;
        });
        assert_eq!(visits, 1);
    }
}
