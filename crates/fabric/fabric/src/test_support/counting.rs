//! Memory that counts barriers and flushes, which measures what a protocol costs where they are expensive. A hook that
//! runs after every store shows in which order a protocol publishes.

use crate::{Coherence, Memory};
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use volmem::sync::Ordering;

/// Numbers of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OperationCounts {
    /// Barriers: a fence of an outbound window, and a fence within a line that publishes.
    pub barriers: u64,
    /// Flushes of an outbound window.
    pub flushes: u64,
    /// Spans that were written back.
    pub write_backs: u64,
    /// Bytes of spans that were prefetched for writing.
    pub prefetched_bytes: u64,
}

/// A function that runs after each store.
pub type StoreHook = Box<dyn FnMut() + Send>;

/// Memory that counts its operations. Clones and parts share the counts.
#[derive(Clone)]
pub struct CountingMemory<M> {
    memory: M,
    coherence: Coherence,
    tally: Arc<Tally>,
    hook: Option<Arc<Mutex<StoreHook>>>,
}

#[derive(Debug, Default)]
struct Tally {
    barriers: AtomicU64,
    flushes: AtomicU64,
    write_backs: AtomicU64,
    prefetched_bytes: AtomicU64,
}

impl<M: Memory> CountingMemory<M> {
    /// Wraps memory, with counts of zero.
    pub fn new(memory: M) -> Self {
        let coherence = memory.coherence();
        Self::with_coherence(memory, coherence)
    }

    /// Wraps memory like [`CountingMemory::new`], and reports another coherence.
    pub fn with_coherence(memory: M, coherence: Coherence) -> Self {
        Self { memory, coherence, tally: Arc::default(), hook: None }
    }

    /// The same memory with a hook that runs after every store.
    #[must_use]
    pub fn with_store_hook(self, hook: StoreHook) -> Self {
        Self { hook: Some(Arc::new(Mutex::new(hook))), ..self }
    }

    /// Runs the hook, as after a store.
    pub fn run_hook(&self) {
        if let Some(hook) = &self.hook {
            // A poisoned lock is ignored: the test that panicked has failed already.
            (hook.lock().unwrap_or_else(PoisonError::into_inner))();
        }
    }

    /// The counts so far.
    pub fn counts(&self) -> OperationCounts {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Tally { barriers, flushes, write_backs, prefetched_bytes } = &*self.tally;
        OperationCounts {
            barriers: load(barriers),
            flushes: load(flushes),
            write_backs: load(write_backs),
            prefetched_bytes: load(prefetched_bytes),
        }
    }
}

impl<M: fmt::Debug> fmt::Debug for CountingMemory<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CountingMemory({:?}, {:?}, {:?})", self.memory, self.coherence, self.tally)
    }
}

fn count(count: &AtomicU64) {
    count.fetch_add(1, Ordering::Relaxed);
}

impl<M: Memory> Memory for CountingMemory<M> {
    fn coherence(&self) -> Coherence {
        self.coherence
    }

    fn len_bytes(&self) -> usize {
        self.memory.len_bytes()
    }

    fn part(&self, offset: usize, len_bytes: usize) -> Self {
        Self { memory: self.memory.part(offset, len_bytes), ..self.clone() }
    }

    fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        self.memory.load_u64(offset, order)
    }

    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        self.memory.store_u64(offset, value, order);
        self.run_hook();
    }

    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        // SAFETY: the caller guarantees that `destination` is writable for `len_bytes` and outside the memory.
        unsafe { self.memory.read_to(offset, destination, len_bytes) }
    }

    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        // SAFETY: the caller guarantees that `source` is readable for `len_bytes` and outside the memory.
        unsafe { self.memory.write_from(offset, source, len_bytes) };
        self.run_hook();
    }

    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        self.memory.pointer(offset, len_bytes)
    }

    fn prefetch_for_writes(&self, offset: usize, len_bytes: usize) {
        self.tally.prefetched_bytes.fetch_add(len_bytes as u64, Ordering::Relaxed);
        self.memory.prefetch_for_writes(offset, len_bytes);
    }

    fn write_back(&self, offset: usize, len_bytes: usize) {
        count(&self.tally.write_backs);
        self.memory.write_back(offset, len_bytes);
    }

    fn invalidate_lines(&self, offset: usize, len_bytes: usize) {
        self.memory.invalidate_lines(offset, len_bytes);
    }

    fn barrier(&self) {
        count(&self.tally.barriers);
        self.memory.barrier();
    }

    fn flush_posted(&self) {
        count(&self.tally.flushes);
        self.memory.flush_posted();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryOutbound, Outbound, Slice};
    use volmem::Region;

    #[test]
    fn operations_of_a_window_are_counted_for_all_its_parts() {
        let memory = CountingMemory::with_coherence(Region::heap(256), Coherence::WriteCombined);
        let window = MemoryOutbound::new(memory.clone());
        let part = window.slice(64, 128);
        assert_eq!(part.coherence(), Coherence::WriteCombined);
        window.write(0, &[1; 8]);
        assert_eq!(memory.counts().barriers, 0);
        part.store_line(0, &[1, 2]);
        part.store_line_fenced(64, &[3, 4]);
        window.fence();
        part.flush();
        assert_eq!(memory.counts(), OperationCounts { barriers: 3, flushes: 1, write_backs: 3, prefetched_bytes: 0 });
        assert_eq!((memory.load_u64(64, Ordering::Relaxed), memory.load_u64(136, Ordering::Relaxed)), (1, 4));
    }

    #[test]
    fn the_hook_runs_after_each_store_and_sees_it() {
        let region = Region::heap(128);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (own, told) = (region.clone(), seen.clone());
        let hook = move || told.lock().unwrap().push(own.load_u64(0, Ordering::Relaxed));
        let memory = CountingMemory::new(region).with_store_hook(Box::new(hook));
        MemoryOutbound::new(memory).store_line_fenced(0, &[5, 6]);
        assert_eq!(*seen.lock().unwrap(), [0, 5]);
    }
}
