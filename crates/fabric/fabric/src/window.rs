//! The two sides of a window.

use std::ptr::NonNull;
use volmem::CACHE_LINE_BYTES;
use volmem::sync::Ordering;

/// What stores through an outbound window need before the peer may act on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coherence {
    /// Stores become visible in program order (shared memory).
    Coherent,
    /// Stores gather in write-combining buffers: a fence before the word that publishes them.
    WriteCombined,
    /// Caches do not follow one another (non-coherent CXL memory): stores of an outbound window are written back by
    /// the window itself, but its owner drops lines with [`Inbound::invalidate`] before it loads them, and no line may
    /// have two writers: a cache writes back whole lines.
    NonCoherent,
}

/// Memory of this node that a peer may write at any time: whatever is loaded is hostile until checked.
pub trait Inbound: Send {
    /// Length in bytes.
    fn len_bytes(&self) -> usize;
    /// Loads the 8-byte aligned word at `offset`.
    fn load_u64(&self, offset: usize, order: Ordering) -> u64;
    /// Loads the `N` words from `offset` on (8-byte aligned), each for itself and in any order.
    #[inline(always)]
    fn load_words<const N: usize>(&self, offset: usize) -> [u64; N] {
        std::array::from_fn(|index| self.load_u64(offset + index * size_of::<u64>(), Ordering::Relaxed))
    }
    /// Stores a word that this node owns: where memory is not coherent, in a line that the peer does not write.
    fn store_u64(&self, offset: usize, value: u64, order: Ordering);
    /// Copies bytes out.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes` and outside the window.
    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize);
    /// Address of bytes to be read in place. Their contents can change while they are read.
    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8>;
    /// Copies bytes out.
    #[inline]
    fn read(&self, offset: usize, destination: &mut [u8]) {
        // SAFETY: a slice is writable for its length, and no reference into a window exists that it could be.
        unsafe { self.read_to(offset, destination.as_mut_ptr(), destination.len()) }
    }
    /// Makes the next loads of the span see what the peer has written (a no-op where memory is coherent).
    fn invalidate(&self, _offset: usize, _len_bytes: usize) {}
}

/// Memory of the peer: stores only.
pub trait Outbound: Send {
    /// Length in bytes.
    fn len_bytes(&self) -> usize;
    /// What the mapping asks of a writer.
    fn coherence(&self) -> Coherence;
    /// Stores the 8-byte aligned word at `offset`. With release order it gets to the peer by itself, in time; in any
    /// order after a fence or a flush.
    fn store_u64(&self, offset: usize, value: u64, order: Ordering);
    /// Stores `words` from `offset` on, all in one line, so that the peer sees the first of them only with the others,
    /// as if there were a fence between: a short record in one packet, where the mapping can. Orders nothing else.
    #[inline]
    fn store_line(&self, offset: usize, words: &[u64]) {
        self.store_line_fenced(offset, words);
    }
    /// As [`Outbound::store_line`], and the peer sees the first word only with all that was stored before, too: one
    /// fence for whatever that word publishes.
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
    /// Copies bytes in.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes` and outside the window.
    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize);
    /// Copies bytes in.
    #[inline]
    fn write(&self, offset: usize, source: &[u8]) {
        // SAFETY: a slice is readable for its length, and no reference into a window exists that it could be.
        unsafe { self.write_from(offset, source.as_ptr(), source.len()) }
    }
    /// Address at which stores reach the peer, or `None` where bytes must go through [`Outbound::write_from`].
    /// Write only: a load through it would cross the link.
    fn pointer(&self, offset: usize, len_bytes: usize) -> Option<NonNull<u8>>;
    /// Orders all stores before it ahead of all stores after it, as the mapping needs (payload, fence, tag).
    fn fence(&self);
    /// Hints that the span is written soon, where that can hurry it.
    #[inline]
    fn prefetch_for_writes(&self, _offset: usize, _len_bytes: usize) {}
    /// Hints that the peer reads the span next, where that can hurry it.
    #[inline]
    fn demote(&self, _offset: usize, _len_bytes: usize) {}
    /// Gives the memory of whole pages of the span back to the system, where that is possible: they are zero from then
    /// on. Nobody may store there meanwhile.
    fn discard(&self, _offset: usize, _len_bytes: usize) {}
    /// Returns once all stores before it are visible to the peer. May cost a round trip: only for a node about to
    /// sleep.
    fn flush(&self);
}

/// A window that can be divided, so that several lanes share one link.
pub trait Slice: Sized {
    /// The `len_bytes` from `offset` on as a window of their own, in the same memory.
    ///
    /// # Panics
    /// If the span is not inside the window, or does not begin and end on cache lines: slices share no line.
    fn slice(&self, offset: usize, len_bytes: usize) -> Self;
}

#[inline(always)] // A few instructions where the number of words is known.
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

/// Whether a slice of a window may begin at `offset` and have `len_bytes`; the window itself checks that it is inside.
pub(crate) fn assert_whole_lines(offset: usize, len_bytes: usize) {
    let whole = offset.is_multiple_of(CACHE_LINE_BYTES) && len_bytes.is_multiple_of(CACHE_LINE_BYTES);
    assert!(whole, "slice {offset}+{len_bytes} does not begin and end on lines of {CACHE_LINE_BYTES} bytes");
}
