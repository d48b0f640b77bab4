//! The protocols of threads that use a connection: [`Lifetime`] keeps its memory while a thread polls it without a
//! lock, [`BlockedCalls`] defers a close to the calls of other threads, and with [`Sleepers`], threads that sleep on
//! one lifeline do not consume each other's rings.
//!
//! They are generic over [`Word`] and depend on nothing else, so that `tests/waiters.rs` can have a model checker try
//! every interleaving of this file.

/// A word that threads of one process share. All accesses are in one order that all threads agree on.
pub(super) trait Word: Default {
    fn load(&self) -> u32;
    /// Stores a value, where no other thread decides by the word at the same time.
    fn store(&self, value: u32);
    /// Adds, wrapping, and returns the previous value.
    fn add(&self, value: u32) -> u32;
    /// Stores a value and returns the previous one.
    fn swap(&self, value: u32) -> u32;
}

/// Whether the object is a connection, which one, and which threads poll its memory.
#[derive(Default)]
pub(super) struct Lifetime<W> {
    is_open: W,
    /// Closed, and not yet returned to the pool.
    is_retired: W,
    /// Incremented with every use of the object, so that a thread that still works for an earlier use notices.
    generation: W,
    /// Number of threads that have found nothing and poll the memory without a lock.
    waiters: W,
}

impl<W: Word> Lifetime<W> {
    /// Makes the object another connection. The caller holds both locks.
    pub fn begin_generation(&self) {
        self.generation.add(1);
    }

    /// Returns the number of the object's present use.
    #[inline]
    pub fn generation(&self) -> u32 {
        self.generation.load()
    }

    /// Marks the connection as complete.
    pub fn open(&self) {
        self.is_open.store(1);
    }

    /// Returns whether the object is an open connection.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.is_open.load() != 0
    }

    /// Adds a waiter. It may poll without a lock once [`Lifetime::may_access`] has returned `true` under either lock,
    /// and until [`Lifetime::remove_waiter`].
    #[inline]
    pub fn add_waiter(&self) {
        self.waiters.add(1);
    }

    /// Returns whether the object is still the open connection of `generation`. The caller holds either lock. A thread
    /// that removes the memory holds both: it sees the waiter, or has finished before.
    #[inline]
    pub fn may_access(&self, generation: u32) -> bool {
        self.is_open() && self.generation() == generation
    }

    /// Removes a waiter. Returns `true` if the connection was closed meanwhile and this waiter may have been the last.
    #[inline]
    #[must_use]
    pub fn remove_waiter(&self) -> bool {
        self.waiters.add(u32::MAX) == 1 && !self.is_open()
    }

    /// Returns whether there is a waiter. Without a lock the result may be outdated.
    pub fn has_waiters(&self) -> bool {
        self.waiters.load() != 0
    }

    /// Closes the connection. Returns `false` if it was closed before. The caller holds both locks.
    pub fn close(&self) -> bool {
        let was_open = self.is_open.swap(0) != 0;
        if was_open {
            self.is_retired.store(1);
        }
        was_open
    }

    /// Returns whether the caller has to remove the memory: once after a close, when no thread polls any more. The
    /// caller holds both locks.
    pub fn try_reclaim(&self) -> bool {
        !self.is_open() && self.waiters.load() == 0 && self.is_retired.swap(0) != 0
    }

    /// Forgets the waiters, in the child of a fork, which has none of those threads.
    pub fn forget_waiters(&self) {
        self.waiters.store(0);
    }
}

/// The blocked calls that a close by another thread waits for: the kernel keeps a socket open during a call on it.
#[derive(Default)]
pub(super) struct BlockedCalls<W> {
    count: W,
    /// Closed; the last call to return finishes the close.
    is_closing: W,
}

impl<W: Word> BlockedCalls<W> {
    /// Notes that a call begins to block.
    pub fn enter(&self) {
        self.count.add(1);
    }

    /// Returns the number of calls that have blocked and not returned.
    pub fn count(&self) -> u32 {
        self.count.load()
    }

    /// Notes that a call that has blocked returns. Returns `true` if it was the last one and the caller has to finish a
    /// close.
    #[must_use]
    pub fn leave(&self) -> bool {
        self.count.add(u32::MAX) == 1 && self.is_closing.swap(0) != 0
    }

    /// Defers a close to the last blocked call. Returns `false` if there is none any more and the caller has to close.
    #[must_use]
    pub fn defer_close(&self) -> bool {
        self.is_closing.swap(1);
        // A call that returned before the swap saw no close to finish; one that returns after it does.
        self.count.load() != 0 || self.is_closing.swap(0) == 0
    }

    /// Forgets the calls, in the child of a fork or for another connection. Returns `true` if a close was deferred to
    /// them.
    pub fn forget(&self) -> bool {
        self.count.store(0);
        self.is_closing.swap(0) != 0
    }
}

/// Threads and readiness sets that rely on the lifeline to wake them.
///
/// A sleeper enters before it asks the peer to ring. A thread that consumes a ring holds the locks that asking
/// requires, while it checks that it is the only sleeper and consumes the ring. So it never consumes a ring that
/// another sleeper relies on: that sleeper has entered before the check, or asks for its ring afterwards.
#[derive(Default)]
pub(super) struct Sleepers<W> {
    count: W,
}

impl<W: Word> Sleepers<W> {
    /// Enters, before a sleep and before the peer is asked to ring.
    pub fn enter(&self) {
        self.count.add(1);
    }

    /// Leaves, after a sleep and after its ring was consumed.
    pub fn leave(&self) {
        self.count.add(u32::MAX);
    }

    /// Returns whether there is a sleeper.
    pub fn is_any(&self) -> bool {
        self.count.load() > 0
    }

    /// Returns whether the calling sleeper is the only one.
    pub fn is_one(&self) -> bool {
        self.count.load() == 1
    }

    /// Sleeps once by `sleep`, whose argument says whether this sleeper is alone: one that is not finds rings that are
    /// left for the others, and only naps. `end` consumes the ring if the sleeper is alone by then. `is_held_alone`
    /// returns whether no other process sleeps on the same lifeline.
    pub fn sleep<S, R>(
        &self,
        is_held_alone: impl Fn() -> bool,
        sleep: impl FnOnce(bool) -> S,
        end: impl FnOnce(S, &dyn Fn() -> bool) -> R,
    ) -> R {
        let is_alone = || self.is_one() && is_held_alone();
        end(sleep(is_alone()), &is_alone)
    }

    /// Forgets the sleepers, in the child of a fork, which has none of those threads.
    pub fn forget(&self) {
        self.count.store(0);
    }
}
