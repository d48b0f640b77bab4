//! Who is at a connection: the protocols by which its memory stays while a thread looks at it without a lock, and by
//! which threads that sleep on one lifeline leave each other's rings alone.
//!
//! Both are written over [`Word`] and stand alone, so that `tests/waiters.rs` has a model checker try every
//! interleaving of this very file.

/// A word that threads of one process share. Every access is in one order that all threads agree on.
pub(super) trait Word: Default {
    fn load(&self) -> u32;
    /// Where no other thread decides by it at the same time.
    fn store(&self, value: u32);
    /// Returns what it was.
    fn add(&self, value: u32) -> u32;
    /// Returns what it was.
    fn swap(&self, value: u32) -> u32;
}

/// Whether the object is a connection, which one, and who looks at its memory.
#[derive(Default)]
pub(super) struct Lifetime<W> {
    is_open: W,
    /// Closed, and not yet back in the pool.
    is_retired: W,
    /// Grows with every use of the object: a thread that still works for an earlier one finds out.
    generation: W,
    /// Threads between "found nothing" and "look again": they look at the memory without a lock.
    waiters: W,
}

impl<W: Word> Lifetime<W> {
    /// Under both locks: the object is another connection from now on.
    pub fn begin_generation(&self) {
        self.generation.add(1);
    }

    #[inline]
    pub fn generation(&self) -> u32 {
        self.generation.load()
    }

    /// The connection is complete.
    pub fn open(&self) {
        self.is_open.store(1);
    }

    #[inline]
    pub fn is_open(&self) -> bool {
        self.is_open.load() != 0
    }

    /// A waiter comes. It may look without a lock once [`Lifetime::may_access`] has said so under either one, and until
    /// [`Lifetime::remove_waiter`].
    #[inline]
    pub fn add_waiter(&self) {
        self.waiters.add(1);
    }

    /// Under either lock, which whoever takes the memory away holds too: it sees the waiter, or was here before.
    #[inline]
    pub fn may_access(&self, generation: u32) -> bool {
        self.is_open() && self.generation() == generation
    }

    /// A waiter goes. `true`: the connection was closed meanwhile, and this may be the last who has looked at it.
    #[inline]
    #[must_use]
    pub fn remove_waiter(&self) -> bool {
        self.waiters.add(u32::MAX) == 1 && !self.is_open()
    }

    /// Whether there is a waiter, as a glance.
    pub fn has_waiters(&self) -> bool {
        self.waiters.load() != 0
    }

    /// Under both locks. `false`: it was closed before.
    pub fn close(&self) -> bool {
        let was_open = self.is_open.swap(0) != 0;
        if was_open {
            self.is_retired.store(1);
        }
        was_open
    }

    /// Under both locks: whether the memory is the caller's now, to take away. It is so once after a close, when
    /// nobody looks any more.
    pub fn try_reclaim(&self) -> bool {
        !self.is_open() && self.waiters.load() == 0 && self.is_retired.swap(0) != 0
    }

    /// In the child of a fork: the threads that were waiting are not here.
    pub fn forget_waiters(&self) {
        self.waiters.store(0);
    }
}

/// Calls that sleep, for which a close by another thread waits: the kernel keeps a socket open while somebody is in a
/// call on it.
#[derive(Default)]
pub(super) struct BlockedCalls<W> {
    count: W,
    /// Closed; the last call to end does what is left of it.
    is_closing: W,
}

impl<W: Word> BlockedCalls<W> {
    /// A call begins to sleep.
    pub fn enter(&self) {
        self.count.add(1);
    }

    /// How many sleep, or have slept and not ended.
    pub fn count(&self) -> u32 {
        self.count.load()
    }

    /// A call ends that has slept. `true`: it was the last, and what is left of a close is the caller's to do.
    #[must_use]
    pub fn leave(&self) -> bool {
        self.count.add(u32::MAX) == 1 && self.is_closing.swap(0) != 0
    }

    /// Leaves a close to the last call to end. `false`: there is none any more, and the close is the caller's to do.
    #[must_use]
    pub fn defer_close(&self) -> bool {
        self.is_closing.swap(1);
        // Who has ended before this saw nothing to do, who ends after it does.
        self.count.load() != 0 || self.is_closing.swap(0) == 0
    }

    /// In the child of a fork, or in another connection: nobody sleeps here. `true`: a close was left to who did.
    pub fn forget(&self) -> bool {
        self.count.store(0);
        self.is_closing.swap(0) != 0
    }
}

/// Threads and readiness sets that rely on the lifeline to wake them.
///
/// Who enters does so before it asks the peer to ring. Who takes a ring asks whether it is the only one and takes it
/// under the locks that asking needs. Then a ring is never taken from one who relies on it: it has entered before that
/// question, or asks for its ring after the taking.
#[derive(Default)]
pub(super) struct Sleepers<W> {
    count: W,
}

impl<W: Word> Sleepers<W> {
    /// Before a sleep, and before the peer is asked to ring.
    pub fn enter(&self) {
        self.count.add(1);
    }

    /// After a sleep, and after its ring was taken.
    pub fn leave(&self) {
        self.count.add(u32::MAX);
    }

    /// Whether anybody sleeps.
    pub fn is_any(&self) -> bool {
        self.count.load() > 0
    }

    /// For one that has entered: whether it is the only one.
    pub fn is_one(&self) -> bool {
        self.count.load() == 1
    }

    /// Sleeps once, by `sleep`, which is told whether it is alone: one that is not finds rings that are left lying for
    /// the others, and only naps. `end` takes the ring, if by then it is alone. `is_sole_user`: no other process
    /// sleeps on the same lifeline.
    pub fn sleep<S, R>(
        &self,
        is_sole_user: impl Fn() -> bool,
        sleep: impl FnOnce(bool) -> S,
        end: impl FnOnce(S, &dyn Fn() -> bool) -> R,
    ) -> R {
        let is_alone = || self.is_one() && is_sole_user();
        end(sleep(is_alone()), &is_alone)
    }

    /// In the child of a fork: the threads that slept are not here.
    pub fn forget(&self) {
        self.count.store(0);
    }
}
