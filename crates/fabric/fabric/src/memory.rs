//! Windows in memory that this node accesses by loads and stores: memory of the process, shared with another process,
//! or shared with another machine.

use crate::window::{assert_one_line, assert_whole_lines};
use crate::{Coherence, Inbound, Outbound, Slice};
use std::ptr::NonNull;
use volmem::Region;
use volmem::sync::Ordering;

/// Memory as one node accesses it: directly, or through a cache that is not coherent with the other node's.
///
/// The default implementations of the cache operations are for coherent memory, such as a [`Region`], and do nothing.
pub trait Memory: Clone + Send {
    /// The coherence of windows in this memory.
    fn coherence(&self) -> Coherence;
    /// Length in bytes.
    fn len_bytes(&self) -> usize;
    /// Returns `len_bytes` from `offset` on, sharing the same memory.
    ///
    /// # Panics
    /// If the span is not inside the memory.
    fn part(&self, offset: usize, len_bytes: usize) -> Self;
    /// Loads the 8-byte aligned word at `offset`.
    fn load_u64(&self, offset: usize, order: Ordering) -> u64;
    /// Loads `N` words from `offset` on (8-byte aligned). The loads are relaxed and have no order.
    #[inline(always)]
    fn load_words<const N: usize>(&self, offset: usize) -> [u64; N] {
        std::array::from_fn(|index| self.load_u64(offset + index * size_of::<u64>(), Ordering::Relaxed))
    }
    /// Stores the 8-byte aligned word at `offset`.
    fn store_u64(&self, offset: usize, value: u64, order: Ordering);
    /// Stores `words` from `offset` on, all in one line, the first of them last.
    #[inline]
    fn store_line(&self, offset: usize, words: &[u64]) {
        for (index, word) in words.iter().enumerate().skip(1) {
            self.store_u64(offset + index * size_of::<u64>(), *word, Ordering::Relaxed);
        }
        if self.coherence() == Coherence::WriteCombined {
            self.barrier(); // A buffer that is not full is evicted in pieces, in any order.
        }
        if let Some(first) = words.first() {
            self.store_u64(offset, *first, Ordering::Release);
        }
    }
    /// Copies bytes out of the memory.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes` and outside the memory.
    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize);
    /// Copies bytes into the memory.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes` and outside the memory.
    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize);
    /// Address of a span, after a bounds check.
    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8>;
    /// Hints that another core reads the span next.
    #[inline]
    fn demote(&self, _offset: usize, _len_bytes: usize) {}
    /// Hints that this core writes the span soon.
    #[inline]
    fn prefetch_for_writes(&self, _offset: usize, _len_bytes: usize) {}
    /// Returns the memory of whole pages of the span to the operating system, where possible.
    fn discard(&self, _offset: usize, _len_bytes: usize) {}
    /// Starts to write the span's lines back to memory, where the other node finds them.
    #[inline]
    fn write_back(&self, _offset: usize, _len_bytes: usize) {}
    /// Writes the span's modified lines back and invalidates all of its lines, so that the next loads return what
    /// memory holds.
    #[inline]
    fn invalidate_lines(&self, _offset: usize, _len_bytes: usize) {}
    /// Orders earlier stores and write-backs ahead of all later ones.
    #[inline]
    fn barrier(&self) {}
    /// Waits until earlier stores and write-backs have reached memory.
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
        // SAFETY: the caller guarantees that `destination` is writable for `len_bytes` and outside the memory.
        unsafe { self.read_to(offset, destination, len_bytes) }
    }

    #[inline]
    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        // SAFETY: the caller guarantees that `source` is readable for `len_bytes` and outside the memory.
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
    /// The memory itself, for words that are not part of a protocol with the peer.
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
        // SAFETY: the caller guarantees that `destination` is writable for `len_bytes` and outside the window.
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

/// Every store is written back immediately, so a line with a release store needs nothing more.
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

    /// A cache writes back whole lines, so only the order of the stores within the line matters.
    #[inline(always)]
    fn store_line(&self, offset: usize, words: &[u64]) {
        assert_one_line(offset, words);
        self.0.store_line(offset, words);
        self.0.write_back(offset, size_of_val(words));
    }

    /// Write-combined stores are ordered by the barrier within the line. Write-backs of other lines need a barrier
    /// before it.
    #[inline(always)]
    fn store_line_fenced(&self, offset: usize, words: &[u64]) {
        if self.0.coherence() == Coherence::NonCoherent {
            self.0.barrier();
        }
        self.store_line(offset, words);
    }

    #[inline]
    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        // SAFETY: the caller guarantees that `source` is readable for `len_bytes` and outside the window.
        unsafe { self.0.write_from(offset, source, len_bytes) };
        self.0.write_back(offset, len_bytes);
    }

    /// `None` where lines must be written back: stores through an address would stay in the cache.
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

    /// Does nothing on coherent memory: the release store that publishes orders earlier stores by itself.
    #[inline]
    fn fence(&self) {
        self.0.barrier();
    }

    /// Does nothing on coherent memory: a store is visible when it leaves the core, and a waiter fences before it
    /// blocks.
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
