//! The two sides of a window.

use std::ptr::NonNull;
use volmem::CACHE_LINE_BYTES;
use volmem::sync::Ordering;

/// What a writer of an outbound window must do before the peer may act on its stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coherence {
    /// Stores become visible in program order (shared memory).
    Coherent,
    /// Stores gather in write-combining buffers: the writer needs a fence before the word that publishes them.
    WriteCombined,
    /// Caches are not coherent (non-coherent CXL memory). An outbound window writes back its stores itself, but its
    /// owner calls [`Inbound::invalidate`] before it loads lines. No line may have two writers, because a cache writes
    /// back whole lines.
    NonCoherent,
}

/// Memory of this node that a peer may write at any time. Every loaded value is hostile until it is checked.
pub trait Inbound: Send {
    /// Length in bytes.
    fn len_bytes(&self) -> usize;
    /// Loads the 8-byte aligned word at `offset`.
    fn load_u64(&self, offset: usize, order: Ordering) -> u64;
    /// Loads `N` words from `offset` on (8-byte aligned). The loads are relaxed and have no order.
    #[inline(always)]
    fn load_words<const N: usize>(&self, offset: usize) -> [u64; N] {
        std::array::from_fn(|index| self.load_u64(offset + index * size_of::<u64>(), Ordering::Relaxed))
    }
    /// Stores a word that this node owns. Where memory is not coherent, the peer must not write the same line.
    fn store_u64(&self, offset: usize, value: u64, order: Ordering);
    /// Copies bytes out of the window.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes` and outside the window.
    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize);
    /// Address of bytes that are read in place. Their contents can change while they are read.
    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8>;
    /// Copies bytes out of the window.
    #[inline]
    fn read(&self, offset: usize, destination: &mut [u8]) {
        // SAFETY: a mutable slice is writable for its length, and no reference into a window ever exists, so it does
        // not overlap one.
        unsafe { self.read_to(offset, destination.as_mut_ptr(), destination.len()) }
    }
    /// Invalidates the span's lines in this node's cache, so that the next loads return what the peer has written. Does
    /// nothing where memory is coherent.
    fn invalidate(&self, _offset: usize, _len_bytes: usize) {}
}

/// Memory of the peer. It can only be stored to.
pub trait Outbound: Send {
    /// Length in bytes.
    fn len_bytes(&self) -> usize;
    /// What the mapping needs from a writer.
    fn coherence(&self) -> Coherence;
    /// Stores the 8-byte aligned word at `offset`. With release order it reaches the peer eventually; with any order it
    /// does after a fence or a flush.
    fn store_u64(&self, offset: usize, value: u64, order: Ordering);
    /// Stores `words` from `offset` on, all in one line. The peer sees the first word only together with the others, as
    /// if there were a fence before it. Where the mapping permits, a short record is one packet. Other stores are not
    /// ordered.
    #[inline]
    fn store_line(&self, offset: usize, words: &[u64]) {
        self.store_line_fenced(offset, words);
    }
    /// Stores `words` like [`Outbound::store_line`], after a fence: the peer sees the first word only together with all
    /// earlier stores too.
    #[inline]
    fn store_line_fenced(&self, offset: usize, words: &[u64]) {
        assert_one_line(offset, words);
        for (index, word) in words.iter().enumerate().skip(1) {
            self.store_u64(offset + index * size_of::<u64>(), *word, Ordering::Relaxed);
        }
        self.fence();
        if let Some(first) = words.first() {
            self.store_u64(offset, *first, Ordering::Release);
        }
    }
    /// Copies bytes into the window.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes` and outside the window.
    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize);
    /// Copies bytes into the window.
    #[inline]
    fn write(&self, offset: usize, source: &[u8]) {
        // SAFETY: a slice is readable for its length, and no reference into a window ever exists, so it does not
        // overlap one.
        unsafe { self.write_from(offset, source.as_ptr(), source.len()) }
    }
    /// Address at which stores reach the peer; `None` where bytes must go through [`Outbound::write_from`]. Only for
    /// stores: a load would cross the link.
    fn pointer(&self, offset: usize, len_bytes: usize) -> Option<NonNull<u8>>;
    /// Orders all earlier stores ahead of all later ones, as the mapping needs (payload, fence, tag).
    fn fence(&self);
    /// Hints that the span is written soon.
    #[inline]
    fn prefetch_for_writes(&self, _offset: usize, _len_bytes: usize) {}
    /// Hints that the peer reads the span next: its lines move to the cache that the cores share.
    #[inline]
    fn demote(&self, _offset: usize, _len_bytes: usize) {}
    /// Returns the memory of whole pages of the span to the operating system, where possible. The pages then read as
    /// zeros. No one may store there meanwhile.
    fn discard(&self, _offset: usize, _len_bytes: usize) {}
    /// Returns when all earlier stores are visible to the peer. May cost a round trip, so it is only for a node that is
    /// about to block.
    fn flush(&self);
}

/// A window that can be divided, so that several lanes share one link.
pub trait Slice: Sized {
    /// Returns `len_bytes` from `offset` on as a window of its own, in the same memory.
    ///
    /// # Panics
    /// If the span is not inside the window, or does not begin and end on cache lines: slices do not share lines.
    fn slice(&self, offset: usize, len_bytes: usize) -> Self;
}

#[inline(always)] // A few instructions where the number of words is a constant.
pub(crate) fn assert_one_line(offset: usize, words: &[u64]) {
    if offset % CACHE_LINE_BYTES + size_of_val(words) > CACHE_LINE_BYTES {
        not_one_line(offset, words.len());
    }
}

#[cold]
#[inline(never)]
fn not_one_line(offset: usize, words: usize) -> ! {
    panic!("{words} words at {offset} do not lie in one line of {CACHE_LINE_BYTES} bytes");
}

/// Panics unless a slice at `offset` of `len_bytes` consists of whole lines. The window itself checks that it contains
/// the slice.
pub(crate) fn assert_whole_lines(offset: usize, len_bytes: usize) {
    let whole = offset.is_multiple_of(CACHE_LINE_BYTES) && len_bytes.is_multiple_of(CACHE_LINE_BYTES);
    assert!(whole, "slice {offset}+{len_bytes} does not begin and end on lines of {CACHE_LINE_BYTES} bytes");
}
