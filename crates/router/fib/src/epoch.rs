//! When what a writer has taken out of a table may be used again: once every reader that could have seen it has left.
//!
//! A reader says when it enters a batch and when it leaves. The writer unlinks something, and tags it with the epoch;
//! the next epoch begins when it asks who is still inside. Who entered in a later epoch cannot have found what was
//! unlinked in an earlier one, and who is outside holds nothing. Readers never wait, and one that sleeps outside of a
//! batch holds nothing up.
//!
//! Why it is right: a reader stores its epoch, fences, and only then looks; the writer unlinks, fences, and only then
//! asks. Either the writer sees the reader inside, with the epoch that it entered in, or the reader's fence comes
//! after the writer's, and the reader sees what was unlinked as unlinked. Who loaded a later epoch synchronizes with
//! the store of that epoch, which comes after the unlinking. Model-checked in `tests/epoch.rs`, of this very file.

use std::collections::VecDeque;

use super::sync::{Arc, AtomicU64, Mutex, Ordering, fence};

/// How many things wait for readers before it is asked whether they have left: each time costs every reader a cache
/// line.
pub(crate) const COLLECT_THRESHOLD: usize = 64;

/// A reader outside of a batch.
const QUIESCENT: u64 = 0;

/// Where a reader says since when it is inside. A cache line of its own: two, for processors that fetch pairs.
#[repr(align(128))]
struct Slot(AtomicU64);

/// What readers and the writer of one set of tables share.
pub(crate) struct Domain {
    /// From 1 on; only the writer stores.
    epoch: AtomicU64,
    /// Of every reader that there is.
    slots: Mutex<Vec<Arc<Slot>>>,
}

impl Domain {
    pub fn new() -> Domain {
        Domain { epoch: AtomicU64::new(1), slots: Mutex::new(Vec::new()) }
    }

    /// A new reader's place.
    pub fn register(domain: &Arc<Domain>) -> Participant {
        let slot = Arc::new(Slot(AtomicU64::new(QUIESCENT)));
        domain.slots.lock().expect("a lock that nobody panics under").push(slot.clone());
        Participant { domain: domain.clone(), slot }
    }

    /// Begins the next epoch, and says the first epoch that a reader inside may have entered in. Only for the writer,
    /// whose unlinking comes before.
    fn advance(&self) -> u64 {
        let epoch = self.epoch.load(Ordering::Relaxed);
        // Release, for who loads the new epoch and so counts as later.
        self.epoch.store(epoch + 1, Ordering::Release);
        // Between what was unlinked and the look at who is inside.
        fence(Ordering::SeqCst);
        let slots = self.slots.lock().expect("a lock that nobody panics under");
        // Acquire, for who has left: what it read, it read before its place is used again.
        let inside = slots.iter().map(|slot| slot.0.load(Ordering::Acquire)).filter(|since| *since != QUIESCENT);
        inside.min().unwrap_or(epoch + 1)
    }
}

/// A reader's place among the others.
pub(crate) struct Participant {
    domain: Arc<Domain>,
    slot: Arc<Slot>,
}

impl Participant {
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// From now on until the guard is dropped, nothing that this reader finds is used again. `&mut`, for who is inside
    /// cannot enter once more.
    #[inline]
    pub fn pin(&mut self) -> Guard<'_> {
        // Acquire, to see what was unlinked before this epoch.
        let epoch = self.domain.epoch.load(Ordering::Acquire);
        self.slot.0.store(epoch, Ordering::Relaxed);
        // Between saying so and the first look into a table.
        fence(Ordering::SeqCst);
        Guard { slot: &self.slot }
    }
}

impl Drop for Participant {
    fn drop(&mut self) {
        let mut slots = self.domain.slots.lock().expect("a lock that nobody panics under");
        slots.retain(|slot| !Arc::ptr_eq(slot, &self.slot));
    }
}

/// A reader inside a batch.
pub(crate) struct Guard<'a> {
    slot: &'a Slot,
}

impl Drop for Guard<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: what was read, was read before.
        self.slot.0.store(QUIESCENT, Ordering::Release);
    }
}

/// What was unlinked and waits, in the order of unlinking.
pub(crate) struct Retired<T> {
    items: VecDeque<(u64, T)>,
}

impl<T> Retired<T> {
    pub fn new() -> Retired<T> {
        Retired { items: VecDeque::new() }
    }

    /// `item` is unlinked: whoever enters from the next epoch on cannot find it.
    pub fn push(&mut self, domain: &Domain, item: T) {
        self.items.push_back((domain.epoch.load(Ordering::Relaxed), item));
    }

    pub fn len(&self) -> usize {
        self.items.len()
    }

    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Gives out what no reader can hold any more.
    pub fn collect(&mut self, domain: &Domain, mut free: impl FnMut(T)) {
        if self.items.is_empty() {
            return;
        }
        let first_inside = domain.advance();
        while self.items.front().is_some_and(|(epoch, _)| *epoch < first_inside) {
            free(self.items.pop_front().expect("it was just there").1);
        }
    }
}
