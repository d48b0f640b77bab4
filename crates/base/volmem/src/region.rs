//! The real region: words are accessed by atomics, bytes by opaque copies.

use crate::cache_line::CACHE_LINE_BYTES;
use crate::line_instruction::{LineInstruction, for_each_line};
use crate::mapping::Mapping;
use crate::sync::{AtomicU64, Ordering};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;

/// The owner of a region's memory.
#[derive(Debug, Clone)]
#[allow(dead_code)] // Held for their `Drop`.
enum Owner {
    Heap(Arc<HeapBlock>),
    Mapping(Arc<Mapping>),
}

/// A span of memory that another party may write at any time. Clones share the span.
#[derive(Debug, Clone)]
pub struct Region {
    base: NonNull<u8>,
    len_bytes: usize,
    owner: Owner,
}

// SAFETY: every access through a region is atomic, or an opaque copy of bytes, which have no validity requirements. So
// a region may move to another thread.
unsafe impl Send for Region {}
// SAFETY: every access through `&Region` is atomic, or an opaque copy of bytes, which have no validity requirements.
unsafe impl Sync for Region {}

impl Region {
    /// Allocates zeroed memory of this process, aligned to the cache line, for tests and for lanes between threads.
    pub fn heap(len_bytes: usize) -> Self {
        let block = Arc::new(HeapBlock::new(len_bytes));
        Self { base: block.base, len_bytes, owner: Owner::Heap(block) }
    }

    /// Returns the region of a whole mapping.
    pub fn of_mapping(mapping: Arc<Mapping>) -> Self {
        Self { base: mapping.base(), len_bytes: mapping.len_bytes(), owner: Owner::Mapping(mapping) }
    }

    /// Returns `len_bytes` from `offset` on, sharing the same memory.
    ///
    /// # Panics
    /// If the span is not inside this region.
    pub fn sub(&self, offset: usize, len_bytes: usize) -> Self {
        let base = self.checked(offset, len_bytes);
        Self { base, len_bytes, owner: self.owner.clone() }
    }

    /// Returns the length in bytes.
    #[inline]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Returns the address of a span, for system calls that access it in place.
    ///
    /// # Panics
    /// If the span is not inside this region.
    #[inline]
    pub fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        self.checked(offset, len_bytes)
    }

    /// Hints that another core reads the span next: its lines move to the cache that the cores share. Contents do not
    /// change.
    #[inline]
    pub fn demote(&self, offset: usize, len_bytes: usize) {
        let first = self.checked(offset, len_bytes);
        // SAFETY: `checked` has bounded the span, and the memory is mapped while `self` lives. The instruction is a
        // no-operation on x86 processors that do not have it, and is not executed on others.
        unsafe { for_each_line(LineInstruction::Cldemote, first, len_bytes) };
    }

    /// Hints that this core writes the span soon: its lines are fetched for ownership all at once, also from the caches
    /// of other cores, whereas stores would wait for one after the other. Contents do not change.
    #[inline]
    pub fn prefetch_for_writes(&self, offset: usize, len_bytes: usize) {
        let first = self.checked(offset, len_bytes);
        // SAFETY: `checked` has bounded the span, and the memory is mapped while `self` lives. The instruction is a
        // no-operation on x86 processors that do not have it, and is not executed on others.
        unsafe { for_each_line(LineInstruction::Prefetchw, first, len_bytes) };
    }

    /// Returns the memory of the whole pages of a span to the operating system (`MADV_REMOVE`). They read as zeros, and
    /// are allocated again when they are accessed. Only in a mapping of shared memory; elsewhere, and where the kernel
    /// refuses, nothing happens.
    ///
    /// # Panics
    /// If the span is not inside this region.
    pub fn discard(&self, offset: usize, len_bytes: usize) {
        let begin = self.checked(offset, len_bytes);
        if let Owner::Mapping(mapping) = &self.owner {
            mapping.discard(begin, len_bytes);
        }
    }

    /// Loads the word at `offset` (8-byte aligned).
    #[inline]
    pub fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        self.word(offset).load(order)
    }

    /// Stores the word at `offset` (8-byte aligned).
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        self.word(offset).store(value, order);
    }

    /// Loads `N` words from `offset` on (8-byte aligned) after one bounds check. The loads are relaxed and have no
    /// order.
    #[inline(always)] // So that the check becomes part of the caller's arithmetic.
    pub fn load_words<const N: usize>(&self, offset: usize) -> [u64; N] {
        let words = self.words(offset, N);
        std::array::from_fn(|index| words[index].load(Ordering::Relaxed))
    }

    /// Stores `words` from `offset` on (8-byte aligned). The first of them is stored last, with release order, so that
    /// a reader that acquires it sees the others.
    #[inline(always)] // So that the check becomes part of the caller's arithmetic.
    pub fn publish_words(&self, offset: usize, words: &[u64]) {
        let targets = self.words(offset, words.len());
        for (target, word) in targets.iter().zip(words).skip(1) {
            target.store(*word, Ordering::Relaxed);
        }
        if let (Some(target), Some(word)) = (targets.first(), words.first()) {
            target.store(*word, Ordering::Release);
        }
    }

    /// Swaps the word at `offset` (8-byte aligned).
    #[inline]
    pub fn swap_u64(&self, offset: usize, value: u64, order: Ordering) -> u64 {
        self.word(offset).swap(value, order)
    }

    /// Adds to the word at `offset` (8-byte aligned), wrapping. Returns the previous value.
    #[inline]
    pub fn add_u64(&self, offset: usize, value: u64, order: Ordering) -> u64 {
        self.word(offset).fetch_add(value, order)
    }

    /// Replaces `current` by `new` at `offset` (8-byte aligned). Returns `current`.
    ///
    /// # Errors
    /// The value found, if it is not `current`.
    #[inline]
    pub fn compare_exchange_u64(&self, offset: usize, current: u64, new: u64) -> Result<u64, u64> {
        self.word(offset).compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
    }

    /// Copies bytes out of the region.
    #[inline]
    pub fn read(&self, offset: usize, destination: &mut [u8]) {
        // SAFETY: a mutable slice is writable for its length and does not overlap the region, to which no reference
        // exists.
        unsafe { self.read_to(offset, destination.as_mut_ptr(), destination.len()) }
    }

    /// Copies bytes into the region.
    #[inline]
    pub fn write(&self, offset: usize, source: &[u8]) {
        // SAFETY: a slice is readable for its length and does not overlap the region, to which no reference exists.
        unsafe { self.write_from(offset, source.as_ptr(), source.len()) }
    }

    /// Copies `len_bytes` from `offset` to `destination`.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes` and does not overlap the region.
    #[inline]
    pub unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        let source = self.checked(offset, len_bytes);
        // SAFETY: `checked` has bounded the source, and the caller guarantees that `destination` is writable for
        // `len_bytes` and does not overlap it.
        unsafe { copy_out(source.as_ptr(), destination, len_bytes) }
    }

    /// Copies `len_bytes` from `source` to `offset`.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes` and does not overlap the region.
    #[inline]
    pub unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        let destination = self.checked(offset, len_bytes);
        // SAFETY: `checked` has bounded the destination, and the caller guarantees that `source` is readable for
        // `len_bytes` and does not overlap it.
        unsafe { copy_in(source, destination.as_ptr(), len_bytes) }
    }

    #[inline]
    fn checked(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        if offset > self.len_bytes || len_bytes > self.len_bytes - offset {
            outside(offset, len_bytes, self.len_bytes);
        }
        // SAFETY: the offset was checked to be inside the allocation, which is smaller than `isize::MAX`.
        unsafe { self.base.add(offset) }
    }

    #[inline(always)]
    fn words(&self, offset: usize, count: usize) -> &[AtomicU64] {
        // A misaligned offset becomes a huge index, so that one comparison checks bounds and alignment.
        let index = offset.rotate_right(size_of::<u64>().ilog2());
        let words = self.len_bytes / size_of::<u64>();
        if index > words || words - index < count {
            no_words(offset, count, self.len_bytes);
        }
        // SAFETY: the index was checked, so all `count` words are in bounds and aligned (bases are aligned to pages or
        // lines). A reference to atomics makes no assumption about their values, and does not leave this module.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset).cast(), count) }
    }

    #[inline]
    fn word(&self, offset: usize) -> &AtomicU64 {
        // A misaligned offset becomes a huge index, so that one comparison checks bounds and alignment.
        let index = offset.rotate_right(size_of::<u64>().ilog2());
        if index >= self.len_bytes / size_of::<u64>() {
            no_word(offset, self.len_bytes);
        }
        // SAFETY: the index was checked, so the word is in bounds and aligned (bases are aligned to pages or lines). A
        // reference to an atomic makes no assumption about its value, and does not leave this module.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }
}

/// Panics for a span outside the region. A separate function, so that accesses do not prepare the arguments of the
/// message.
#[cold]
#[inline(never)]
fn outside(offset: usize, len_bytes: usize, region_bytes: usize) -> ! {
    panic!("span {offset}+{len_bytes} outside a region of {region_bytes} bytes");
}

/// Panics for a word outside the region, or a misaligned one.
#[cold]
#[inline(never)]
fn no_word(offset: usize, region_bytes: usize) -> ! {
    no_words(offset, 1, region_bytes);
}

/// Panics for words outside the region, or misaligned ones.
#[cold]
#[inline(never)]
fn no_words(offset: usize, count: usize, region_bytes: usize) -> ! {
    assert!(offset.is_multiple_of(align_of::<u64>()), "word at unaligned offset {offset}");
    outside(offset, count.saturating_mul(size_of::<u64>()), region_bytes);
}

/// Copies bytes from memory that another party may write to private memory.
///
/// `memcpy` is called as a foreign function, so the compiler assumes nothing about the source: if the peer writes
/// meanwhile, the result is unspecified bytes, and callers assume nothing about them.
///
/// # Safety
/// Both sides are valid for `len_bytes` and do not overlap, as `memcpy(3)` requires.
#[inline]
#[cfg(not(miri))]
unsafe fn copy_out(source: *const u8, destination: *mut u8, len_bytes: usize) {
    // SAFETY: the caller guarantees the conditions of `memcpy`: both sides are valid for `len_bytes` and do not
    // overlap.
    unsafe { libc::memcpy(destination.cast(), source.cast(), len_bytes) };
}

/// Copies bytes from private memory to memory that another party may write, like [`copy_out`].
///
/// # Safety
/// Both sides are valid for `len_bytes` and do not overlap, as `memcpy(3)` requires.
#[inline]
#[cfg(not(miri))]
unsafe fn copy_in(source: *const u8, destination: *mut u8, len_bytes: usize) {
    // SAFETY: the caller guarantees the conditions of `memcpy`: both sides are valid for `len_bytes` and do not
    // overlap.
    unsafe { libc::memcpy(destination.cast(), source.cast(), len_bytes) };
}

/// Does the same under Miri, which runs both parties in one process, where a plain copy would be a data race. The
/// shared side is read byte by byte, atomically. The private side is accessed plainly, because it may be read-only.
#[cfg(miri)]
unsafe fn copy_out(source: *const u8, destination: *mut u8, len_bytes: usize) {
    use std::sync::atomic::AtomicU8;
    for index in 0..len_bytes {
        // SAFETY: the caller guarantees that both sides are valid for `len_bytes`, and `index` is less than that.
        unsafe {
            let from = AtomicU8::from_ptr(source.add(index).cast_mut());
            destination.add(index).write(from.load(Ordering::Relaxed));
        }
    }
}

/// Copies in the other direction under Miri, with atomic stores to the shared side.
#[cfg(miri)]
unsafe fn copy_in(source: *const u8, destination: *mut u8, len_bytes: usize) {
    use std::sync::atomic::AtomicU8;
    for index in 0..len_bytes {
        // SAFETY: the caller guarantees that both sides are valid for `len_bytes`, and `index` is less than that.
        unsafe {
            let to = AtomicU8::from_ptr(destination.add(index));
            to.store(source.add(index).read(), Ordering::Relaxed);
        }
    }
}

#[derive(Debug)]
struct HeapBlock {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the block owns its memory, which is accessed only through `Region`, whose accesses are atomic or opaque
// copies.
unsafe impl Send for HeapBlock {}
// SAFETY: `&HeapBlock` gives no access to the memory except through `Region`, whose accesses are atomic or opaque
// copies.
unsafe impl Sync for HeapBlock {}

impl HeapBlock {
    fn new(len_bytes: usize) -> Self {
        let layout =
            Layout::from_size_align(len_bytes.max(1), CACHE_LINE_BYTES).expect("region fits the address space");
        // SAFETY: the layout has at least one byte.
        let base = unsafe { alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(layout) };
        Self { base, layout }
    }
}

impl Drop for HeapBlock {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the block with this layout. Every region of it holds an `Arc`, so none is left.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn miri_bytes_written_are_bytes_read() {
        let region = Region::heap(256);
        region.write(3, b"hello");
        let mut bytes = [0; 5];
        region.read(3, &mut bytes);
        assert_eq!(&bytes, b"hello");
    }

    #[test]
    fn miri_sub_regions_share_memory() {
        let region = Region::heap(256);
        region.sub(64, 64).store_u64(8, 7, Ordering::Relaxed);
        assert_eq!(region.load_u64(72, Ordering::Relaxed), 7);
    }

    #[test]
    fn memory_outlives_the_region_that_allocated_it() {
        let sub = Region::heap(128).sub(64, 64);
        sub.store_u64(0, 1, Ordering::Release);
        assert_eq!(sub.load_u64(0, Ordering::Acquire), 1);
    }

    #[test]
    #[should_panic(expected = "outside a region")]
    fn a_span_past_the_end_is_refused() {
        Region::heap(64).read(60, &mut [0; 8]);
    }

    #[test]
    #[should_panic(expected = "outside a region")]
    fn an_offset_that_overflows_is_refused() {
        Region::heap(64).read(usize::MAX, &mut [0; 2]);
    }

    #[test]
    #[should_panic(expected = "unaligned")]
    fn an_unaligned_word_is_refused() {
        Region::heap(64).load_u64(4, Ordering::Relaxed);
    }

    #[test]
    fn the_last_whole_word_is_accessible_and_none_after_it() {
        for len_bytes in [0_usize, 4, 8, 15, 64, 71] {
            let region = Region::heap(64).sub(0, len_bytes.min(64));
            let words = region.len_bytes() / 8;
            for offset in (0..words).map(|index| index * 8) {
                assert_eq!(region.load_u64(offset, Ordering::Relaxed), 0);
            }
            for offset in [words * 8, words * 8 + 8, usize::MAX - 7, 1 << 63] {
                let load = std::panic::AssertUnwindSafe(|| region.load_u64(offset, Ordering::Relaxed));
                assert!(std::panic::catch_unwind(load).is_err(), "word at {offset} of {}", region.len_bytes());
            }
        }
    }

    #[test]
    fn miri_words_are_loaded_and_published_in_place() {
        let region = Region::heap(64);
        region.publish_words(16, &[1, 2, 3]);
        assert_eq!(region.load_words(8), [0, 1, 2, 3, 0]);
        region.publish_words(64, &[]);
        assert_eq!(region.load_words(64), []);
        region.publish_words(40, &[4, 5, 6]);
        assert_eq!(region.load_words(32), [3, 4, 5, 6]);
    }

    #[test]
    fn a_run_of_words_must_be_inside_the_region() {
        let region = Region::heap(64).sub(0, 60);
        for offset in [24, 32, 56, 60, 64, usize::MAX - 7, 1 << 63] {
            let load = std::panic::AssertUnwindSafe(|| region.load_words::<5>(offset));
            assert!(std::panic::catch_unwind(load).is_err(), "five words at {offset}");
            let store = std::panic::AssertUnwindSafe(|| region.publish_words(offset, &[1; 5]));
            assert!(std::panic::catch_unwind(store).is_err(), "five words at {offset}");
        }
        for offset in [0, 8, 16] {
            assert_eq!(region.load_words(offset), [0; 5]);
        }
        let too_many = std::panic::AssertUnwindSafe(|| region.load_words::<8>(0));
        assert!(std::panic::catch_unwind(too_many).is_err());
        let unaligned = std::panic::AssertUnwindSafe(|| region.load_words::<2>(4));
        assert!(std::panic::catch_unwind(unaligned).is_err());
    }

    #[test]
    fn compare_exchange_returns_the_value_found() {
        let region = Region::heap(64);
        assert_eq!(region.compare_exchange_u64(0, 0, 5), Ok(0));
        assert_eq!(region.compare_exchange_u64(0, 0, 6), Err(5));
        assert_eq!(region.swap_u64(0, 9, Ordering::AcqRel), 5);
        assert_eq!(region.add_u64(0, 1, Ordering::AcqRel), 9);
    }
}
