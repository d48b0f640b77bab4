//! Epoch-based reclamation (Fraser, *Practical lock-freedom*, 2004): memory that the writer unlinked from a table is
//! reused after a grace period, when every reader that could have seen it has ended its batch.
//!
//! A reader publishes the current epoch when it enters a batch (it is *pinned*), and clears it when it leaves (it is
//! *quiescent*). The writer tags what it unlinks with the current epoch; checking for pinned readers begins the next
//! epoch. A reader pinned in a later epoch cannot have found what was unlinked in an earlier one, and a quiescent
//! reader holds nothing. Readers never wait, and one that sleeps outside of a batch delays nothing.
//!
//! Correctness: a reader stores its epoch, fences, and then reads tables; the writer unlinks, fences, and then reads
//! the readers' epochs. Either the writer sees the reader pinned, with the epoch in which it entered, or the reader's
//! fence comes after the writer's, and the reader does not find what was unlinked. A reader that loads a later epoch
//! synchronizes with the store of that epoch, which follows the unlinking. `tests/epoch.rs` model-checks this file.

use std::collections::VecDeque;

use super::sync::{Arc, AtomicU64, Mutex, Ordering, fence};

/// Number of retired items at which the writer checks the readers' epochs. Each check costs every reader a cache miss.
pub(crate) const COLLECT_THRESHOLD: usize = 64;

/// The epoch of a reader outside of a batch.
const QUIESCENT: u64 = 0;

/// The epoch in which a reader was pinned, or [`QUIESCENT`]. On cache lines of its own: two, for processors that
/// prefetch pairs.
#[repr(align(128))]
struct Slot(AtomicU64);

/// State shared by the readers and the writer of a set of tables.
pub(crate) struct Domain {
    /// The current epoch, from 1 on; only the writer stores it.
    epoch: AtomicU64,
    /// The slots of all readers.
    slots: Mutex<Vec<Arc<Slot>>>,
}

impl Domain {
    pub fn new() -> Domain {
        Domain { epoch: AtomicU64::new(1), slots: Mutex::new(Vec::new()) }
    }

    /// Registers a new reader.
    pub fn register(domain: &Arc<Domain>) -> Participant {
        let slot = Arc::new(Slot(AtomicU64::new(QUIESCENT)));
        domain.slots.lock().expect("no thread panics while holding the lock").push(slot.clone());
        Participant { domain: domain.clone(), slot }
    }

    /// Begins the next epoch, and returns the earliest epoch in which a pinned reader entered. The writer calls it
    /// after unlinking.
    fn advance(&self) -> u64 {
        let epoch = self.epoch.load(Ordering::Relaxed);
        // Release: a reader that loads the new epoch sees what was unlinked before it.
        self.epoch.store(epoch + 1, Ordering::Release);
        // Orders the unlinking before the loads of the readers' epochs.
        fence(Ordering::SeqCst);
        let slots = self.slots.lock().expect("no thread panics while holding the lock");
        // Acquire: a reader that has left finished its reads before the memory is reused.
        let pinned = slots.iter().map(|slot| slot.0.load(Ordering::Acquire)).filter(|since| *since != QUIESCENT);
        pinned.min().unwrap_or(epoch + 1)
    }
}

/// A registered reader.
pub(crate) struct Participant {
    domain: Arc<Domain>,
    slot: Arc<Slot>,
}

impl Participant {
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// Pins the reader: until the guard is dropped, nothing that this reader finds is reused. Takes `&mut self` because
    /// a pinned reader cannot be pinned again.
    #[inline]
    pub fn pin(&mut self) -> Guard<'_> {
        // Acquire: sees what was unlinked before this epoch.
        let epoch = self.domain.epoch.load(Ordering::Acquire);
        self.slot.0.store(epoch, Ordering::Relaxed);
        // Orders the store of the epoch before the first read of a table.
        fence(Ordering::SeqCst);
        Guard { slot: &self.slot }
    }
}

impl Drop for Participant {
    fn drop(&mut self) {
        let mut slots = self.domain.slots.lock().expect("no thread panics while holding the lock");
        slots.retain(|slot| !Arc::ptr_eq(slot, &self.slot));
    }
}

/// Keeps a reader pinned.
pub(crate) struct Guard<'a> {
    slot: &'a Slot,
}

impl Drop for Guard<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: all reads of the batch come before.
        self.slot.0.store(QUIESCENT, Ordering::Release);
    }
}

/// Unlinked items that await the end of their grace period, in the order of unlinking.
pub(crate) struct Retired<T> {
    items: VecDeque<(u64, T)>,
}

impl<T> Retired<T> {
    pub fn new() -> Retired<T> {
        Retired { items: VecDeque::new() }
    }

    /// Adds an unlinked item: readers that enter from the next epoch on cannot find it.
    pub fn push(&mut self, domain: &Domain, item: T) {
        self.items.push_back((domain.epoch.load(Ordering::Relaxed), item));
    }

    pub fn len(&self) -> usize {
        self.items.len()
    }

    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Passes to `free` the items that no reader can hold any more.
    pub fn collect(&mut self, domain: &Domain, mut free: impl FnMut(T)) {
        if self.items.is_empty() {
            return;
        }
        let first_pinned = domain.advance();
        while self.items.front().is_some_and(|(epoch, _)| *epoch < first_pinned) {
            free(self.items.pop_front().expect("the queue has a front item").1);
        }
    }
}
