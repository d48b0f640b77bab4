//! Windows in memory that this node's loads and stores reach: of this process, or shared with another, or with another
//! machine.

use crate::window::{assert_one_line, assert_whole_lines};
use crate::{Coherence, Inbound, Outbound, Slice};
use std::ptr::NonNull;
use volmem::Region;
use volmem::sync::Ordering;

/// Memory as one node reaches it: directly, or through a cache that does not follow the other node's.
///
/// Where it does, as in a [`Region`], there is nothing to write back and nothing to drop.
pub trait Memory: Clone + Send {
    /// What windows in it ask of their users.
    fn coherence(&self) -> Coherence;
    /// Length in bytes.
    fn len_bytes(&self) -> usize;
    /// The `len_bytes` from `offset` on.
    ///
    /// # Panics
    /// If they are not inside.
    fn part(&self, offset: usize, len_bytes: usize) -> Self;
    /// Loads the 8-byte aligned word at `offset`.
    fn load_u64(&self, offset: usize, order: Ordering) -> u64;
    /// Loads the `N` words from `offset` on (8-byte aligned), each for itself and in any order.
    #[inline(always)]
    fn load_words<const N: usize>(&self, offset: usize) -> [u64; N] {
        std::array::from_fn(|index| self.load_u64(offset + index * size_of::<u64>(), Ordering::Relaxed))
    }
    /// Stores the 8-byte aligned word at `offset`.
    fn store_u64(&self, offset: usize, value: u64, order: Ordering);
    /// Stores `words`, all in one line, from `offset` on: the first of them last.
    #[inline]
    fn store_line(&self, offset: usize, words: &[u64]) {
        for (index, word) in words.iter().enumerate().skip(1) {
            self.store_u64(offset + index * size_of::<u64>(), *word, Ordering::Relaxed);
        }
        if self.coherence() == Coherence::WriteCombined {
            self.barrier(); // A buffer that is not full leaves in pieces, in any order.
        }
        if let Some(first) = words.first() {
            self.store_u64(offset, *first, Ordering::Release);
        }
    }
    /// Copies bytes out.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes` and outside the memory.
    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize);
    /// Copies bytes in.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes` and outside the memory.
    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize);
    /// Address of bytes, checked.
    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8>;
    /// Hints that another core reads the span next.
    #[inline]
    fn demote(&self, _offset: usize, _len_bytes: usize) {}
    /// Hints that this core writes the span soon.
    #[inline]
    fn prefetch_for_writes(&self, _offset: usize, _len_bytes: usize) {}
    /// Gives the memory of whole pages of the span back to the system, where that is possible.
    fn discard(&self, _offset: usize, _len_bytes: usize) {}
    /// Starts to write the span's lines back to where the other node finds them.
    #[inline]
    fn write_back(&self, _offset: usize, _len_bytes: usize) {}
    /// Writes changed lines of the span back and forgets all of them: the next load finds what is there then.
    #[inline]
    fn invalidate_lines(&self, _offset: usize, _len_bytes: usize) {}
    /// What was stored and written back before gets there before anything after.
    #[inline]
    fn barrier(&self) {}
    /// What was stored and written back before has got there.
    #[inline]
    fn flush_posted(&self) {
        self.barrier();
    }
}

impl Memory for Region {
    #[inline]
    fn coherence(&self) -> Coherence {
        Coherence::Coherent
    }

    #[inline]
    fn len_bytes(&self) -> usize {
        self.len_bytes()
    }

    #[inline]
    fn part(&self, offset: usize, len_bytes: usize) -> Self {
        self.sub(offset, len_bytes)
    }

    #[inline]
    fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        self.load_u64(offset, order)
    }

    #[inline(always)]
    fn load_words<const N: usize>(&self, offset: usize) -> [u64; N] {
        self.load_words(offset)
    }

    #[inline]
    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        self.store_u64(offset, value, order);
    }

    #[inline(always)]
    fn store_line(&self, offset: usize, words: &[u64]) {
        self.publish_words(offset, words);
    }

    #[inline]
    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        // SAFETY: the caller's.
        unsafe { self.read_to(offset, destination, len_bytes) }
    }

    #[inline]
    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        // SAFETY: the caller's.
        unsafe { self.write_from(offset, source, len_bytes) }
    }

    #[inline]
    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        self.pointer(offset, len_bytes)
    }

    #[inline]
    fn demote(&self, offset: usize, len_bytes: usize) {
        self.demote(offset, len_bytes);
    }

    #[inline]
    fn prefetch_for_writes(&self, offset: usize, len_bytes: usize) {
        self.prefetch_for_writes(offset, len_bytes);
    }

    fn discard(&self, offset: usize, len_bytes: usize) {
        self.discard(offset, len_bytes);
    }
}

/// An inbound window in memory.
#[derive(Debug, Clone)]
pub struct MemoryInbound<M = Region>(M);

/// An outbound window in memory.
#[derive(Debug, Clone)]
pub struct MemoryOutbound<M = Region>(M);

impl<M: Memory> MemoryInbound<M> {
    /// The owner's side of `memory`.
    pub fn new(memory: M) -> Self {
        Self(memory)
    }
}

impl MemoryInbound {
    /// The memory itself, for words that are not part of any protocol with the peer.
    pub fn region(&self) -> &Region {
        &self.0
    }
}

impl<M: Memory> MemoryOutbound<M> {
    /// The peer's side of `memory`.
    pub fn new(memory: M) -> Self {
        Self(memory)
    }
}

impl<M: Memory> Inbound for MemoryInbound<M> {
    #[inline]
    fn len_bytes(&self) -> usize {
        self.0.len_bytes()
    }

    #[inline]
    fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        self.0.load_u64(offset, order)
    }

    #[inline(always)]
    fn load_words<const N: usize>(&self, offset: usize) -> [u64; N] {
        self.0.load_words(offset)
    }

    #[inline]
    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        self.0.store_u64(offset, value, order);
    }

    #[inline]
    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        // SAFETY: the caller's.
        unsafe { self.0.read_to(offset, destination, len_bytes) }
    }

    #[inline]
    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        self.0.pointer(offset, len_bytes)
    }

    #[inline]
    fn invalidate(&self, offset: usize, len_bytes: usize) {
        self.0.invalidate_lines(offset, len_bytes);
    }
}

/// What is stored is written back at once: a line with a release store in it needs nothing more.
impl<M: Memory> Outbound for MemoryOutbound<M> {
    #[inline]
    fn len_bytes(&self) -> usize {
        self.0.len_bytes()
    }

    #[inline]
    fn coherence(&self) -> Coherence {
        self.0.coherence()
    }

    #[inline]
    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        self.0.store_u64(offset, value, order);
        self.0.write_back(offset, size_of::<u64>());
    }

    /// A line leaves a cache whole, so the order of the stores is all that is needed.
    #[inline(always)]
    fn store_line(&self, offset: usize, words: &[u64]) {
        assert_one_line(offset, words);
        self.0.store_line(offset, words);
        self.0.write_back(offset, size_of_val(words));
    }

    /// Stores that gather are ordered by the barrier within the line; lines on their way back wait for one before it.
    #[inline(always)]
    fn store_line_fenced(&self, offset: usize, words: &[u64]) {
        if self.0.coherence() == Coherence::NonCoherent {
            self.0.barrier();
        }
        self.store_line(offset, words);
    }

    #[inline]
    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        // SAFETY: the caller's.
        unsafe { self.0.write_from(offset, source, len_bytes) };
        self.0.write_back(offset, len_bytes);
    }

    /// Where lines must be written back, stores in place would stay in the cache.
    #[inline]
    fn pointer(&self, offset: usize, len_bytes: usize) -> Option<NonNull<u8>> {
        let pointer = self.0.pointer(offset, len_bytes);
        (self.0.coherence() != Coherence::NonCoherent).then_some(pointer)
    }

    #[inline]
    fn prefetch_for_writes(&self, offset: usize, len_bytes: usize) {
        self.0.prefetch_for_writes(offset, len_bytes);
    }

    #[inline]
    fn demote(&self, offset: usize, len_bytes: usize) {
        self.0.demote(offset, len_bytes);
    }

    fn discard(&self, offset: usize, len_bytes: usize) {
        self.0.discard(offset, len_bytes);
    }

    /// Nothing to do on coherent memory: the release store that publishes orders it by itself.
    #[inline]
    fn fence(&self) {
        self.0.barrier();
    }

    /// Nothing to do on coherent memory: a store is visible as soon as it leaves the core, and whoever sleeps fences
    /// anyway.
    #[inline]
    fn flush(&self) {
        self.0.flush_posted();
    }
}

impl<M: Memory> Slice for MemoryInbound<M> {
    fn slice(&self, offset: usize, len_bytes: usize) -> Self {
        assert_whole_lines(offset, len_bytes);
        Self(self.0.part(offset, len_bytes))
    }
}

impl<M: Memory> Slice for MemoryOutbound<M> {
    fn slice(&self, offset: usize, len_bytes: usize) -> Self {
        assert_whole_lines(offset, len_bytes);
        Self(self.0.part(offset, len_bytes))
    }
}
