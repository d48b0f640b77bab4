//! The real region: words by atomics, bytes by opaque copies.

use crate::lines::for_each_line;
use crate::sync::{AtomicU64, Ordering};
use crate::{CACHE_LINE_BYTES, LineInstruction, Mapping};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;

/// Who keeps the memory of a region alive.
#[derive(Debug, Clone)]
#[allow(dead_code)] // Held for their `Drop`.
enum Keeper {
    Heap(Arc<HeapBlock>),
    Mapping(Arc<Mapping>),
}

/// A span of memory that another party may write at any time. Cloning shares the span.
#[derive(Debug, Clone)]
pub struct Region {
    base: NonNull<u8>,
    len_bytes: usize,
    _keeper: Keeper,
}

// SAFETY: every access through a region is atomic or an opaque copy of bytes without validity requirements.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Zeroed memory of this process, cache-line aligned, for tests and for lanes between threads.
    pub fn heap(len_bytes: usize) -> Self {
        let block = Arc::new(HeapBlock::new(len_bytes));
        Self { base: block.base, len_bytes, _keeper: Keeper::Heap(block) }
    }

    /// All of a mapping.
    pub fn of_mapping(mapping: Arc<Mapping>) -> Self {
        Self { base: mapping.base(), len_bytes: mapping.len_bytes(), _keeper: Keeper::Mapping(mapping) }
    }

    /// The `len_bytes` from `offset` on, sharing the same memory.
    ///
    /// # Panics
    /// If the span is not inside this region.
    pub fn sub(&self, offset: usize, len_bytes: usize) -> Self {
        let base = self.checked(offset, len_bytes);
        Self { base, len_bytes, _keeper: self._keeper.clone() }
    }

    /// Length in bytes.
    #[inline]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Address of a span, for system calls that read or write it in place.
    ///
    /// # Panics
    /// If the span is not inside this region.
    #[inline]
    pub fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        self.checked(offset, len_bytes)
    }

    /// Hints that another core will read the span next: its lines move to the cache that the cores share. Changes no
    /// contents.
    #[inline]
    pub fn demote(&self, offset: usize, len_bytes: usize) {
        for_each_line(LineInstruction::Cldemote, self, offset, len_bytes);
    }

    /// Hints that this core writes the span soon: its lines are brought here all at once, from the caches of other
    /// cores too, where stores would wait for one after the other. Changes no contents.
    #[inline]
    pub fn prefetch_for_writes(&self, offset: usize, len_bytes: usize) {
        for_each_line(LineInstruction::Prefetchw, self, offset, len_bytes);
    }

    /// Gives the memory of the whole pages of a span back to the system: they are zero from then on, and have memory
    /// again once anybody reads or writes them. Only in a mapping of shared memory (`MADV_REMOVE`); elsewhere, and
    /// where the system refuses, nothing happens.
    ///
    /// # Panics
    /// If the span is not inside this region.
    pub fn discard(&self, offset: usize, len_bytes: usize) {
        let begin = self.checked(offset, len_bytes);
        if let Keeper::Mapping(mapping) = &self._keeper {
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

    /// Loads the `N` words from `offset` on (8-byte aligned), each for itself and in any order: one check for all.
    #[inline(always)] // So that the check is part of the caller's arithmetic.
    pub fn load_words<const N: usize>(&self, offset: usize) -> [u64; N] {
        let words = self.words(offset, N);
        std::array::from_fn(|index| words[index].load(Ordering::Relaxed))
    }

    /// Stores `words` from `offset` on (8-byte aligned), each for itself, and the first of them last, with release
    /// order: who finds it finds the others.
    #[inline(always)] // As above.
    pub fn publish_words(&self, offset: usize, words: &[u64]) {
        let places = self.words(offset, words.len());
        for (place, word) in places.iter().zip(words).skip(1) {
            place.store(*word, Ordering::Relaxed);
        }
        if let (Some(place), Some(word)) = (places.first(), words.first()) {
            place.store(*word, Ordering::Release);
        }
    }

    /// Swaps the word at `offset` (8-byte aligned).
    #[inline]
    pub fn swap_u64(&self, offset: usize, value: u64, order: Ordering) -> u64 {
        self.word(offset).swap(value, order)
    }

    /// Adds to the word at `offset` (8-byte aligned), wrapping; returns the value before.
    #[inline]
    pub fn add_u64(&self, offset: usize, value: u64, order: Ordering) -> u64 {
        self.word(offset).fetch_add(value, order)
    }

    /// Replaces `current` by `new` at `offset`, or returns what was there instead.
    ///
    /// # Errors
    /// The value found, when it was not `current`.
    #[inline]
    pub fn compare_exchange_u64(&self, offset: usize, current: u64, new: u64) -> Result<u64, u64> {
        self.word(offset).compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
    }

    /// Copies bytes out of the region.
    #[inline]
    pub fn read(&self, offset: usize, destination: &mut [u8]) {
        // SAFETY: the slice is writable for its length.
        unsafe { self.read_to(offset, destination.as_mut_ptr(), destination.len()) }
    }

    /// Copies bytes into the region.
    #[inline]
    pub fn write(&self, offset: usize, source: &[u8]) {
        // SAFETY: the slice is readable for its length.
        unsafe { self.write_from(offset, source.as_ptr(), source.len()) }
    }

    /// Copies `len_bytes` from `offset` to `destination`.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes` and does not overlap the region.
    #[inline]
    pub unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        let source = self.checked(offset, len_bytes);
        // SAFETY: `checked` bounds the source, the caller vouches for the destination.
        unsafe { copy_out(source.as_ptr(), destination, len_bytes) }
    }

    /// Copies `len_bytes` from `source` to `offset`.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes` and does not overlap the region.
    #[inline]
    pub unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        let destination = self.checked(offset, len_bytes);
        // SAFETY: `checked` bounds the destination, the caller vouches for the source.
        unsafe { copy_in(source, destination.as_ptr(), len_bytes) }
    }

    #[inline]
    fn checked(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        if offset > self.len_bytes || len_bytes > self.len_bytes - offset {
            outside(offset, len_bytes, self.len_bytes);
        }
        // SAFETY: the offset is inside the allocation, which is smaller than `isize::MAX`.
        unsafe { self.base.add(offset) }
    }

    #[inline(always)]
    fn words(&self, offset: usize, count: usize) -> &[AtomicU64] {
        // As in `word`.
        let index = offset.rotate_right(size_of::<u64>().ilog2());
        let words = self.len_bytes / size_of::<u64>();
        if index > words || words - index < count {
            no_words(offset, count, self.len_bytes);
        }
        // SAFETY: in bounds, aligned and borrowed as in `word`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset).cast(), count) }
    }

    #[inline]
    fn word(&self, offset: usize) -> &AtomicU64 {
        // An offset between words becomes a huge index: one comparison asks for bounds and alignment.
        let index = offset.rotate_right(size_of::<u64>().ilog2());
        if index >= self.len_bytes / size_of::<u64>() {
            no_word(offset, self.len_bytes);
        }
        // SAFETY: in bounds and aligned (bases are page- or line-aligned). An atomic is the one type that may be
        // borrowed here: it claims nothing about its value and every access to it is a whole word. The borrow never
        // leaves this module.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }
}

/// A function of its own: else every access would put what the message names into memory first.
#[cold]
#[inline(never)]
fn outside(offset: usize, len_bytes: usize, region_bytes: usize) -> ! {
    panic!("span {offset}+{len_bytes} outside a region of {region_bytes} bytes");
}

/// As [`outside`].
#[cold]
#[inline(never)]
fn no_word(offset: usize, region_bytes: usize) -> ! {
    no_words(offset, 1, region_bytes);
}

/// As [`outside`].
#[cold]
#[inline(never)]
fn no_words(offset: usize, count: usize, region_bytes: usize) -> ! {
    assert!(offset.is_multiple_of(align_of::<u64>()), "word at unaligned offset {offset}");
    outside(offset, count.saturating_mul(size_of::<u64>()), region_bytes);
}

/// Copies bytes from memory under another party's hands to private memory.
///
/// `memcpy` is called as the foreign function it is: whatever the peer writes meanwhile, the result is some bytes, and
/// callers treat them as nothing more.
///
/// # Safety
/// As `memcpy(3)`.
#[inline]
#[cfg(not(miri))]
unsafe fn copy_out(source: *const u8, destination: *mut u8, len_bytes: usize) {
    // SAFETY: the caller's.
    unsafe { libc::memcpy(destination.cast(), source.cast(), len_bytes) };
}

/// Copies bytes from private memory to memory under another party's hands, as [`copy_out`] does.
///
/// # Safety
/// As `memcpy(3)`.
#[inline]
#[cfg(not(miri))]
unsafe fn copy_in(source: *const u8, destination: *mut u8, len_bytes: usize) {
    // SAFETY: the caller's.
    unsafe { libc::memcpy(destination.cast(), source.cast(), len_bytes) };
}

/// Miri sees both parties in one process, where a plain copy would be a data race: the shared side goes byte by byte,
/// atomically. The private side is plain: it may be read-only.
#[cfg(miri)]
unsafe fn copy_out(source: *const u8, destination: *mut u8, len_bytes: usize) {
    use std::sync::atomic::AtomicU8;
    for index in 0..len_bytes {
        // SAFETY: the caller's; both sides are good for the length.
        unsafe {
            let from = AtomicU8::from_ptr(source.add(index).cast_mut());
            destination.add(index).write(from.load(Ordering::Relaxed));
        }
    }
}

/// As [`copy_out`], the other way.
#[cfg(miri)]
unsafe fn copy_in(source: *const u8, destination: *mut u8, len_bytes: usize) {
    use std::sync::atomic::AtomicU8;
    for index in 0..len_bytes {
        // SAFETY: the caller's; both sides are good for the length.
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

// SAFETY: owns plain memory, reached only through `Region`.
unsafe impl Send for HeapBlock {}
// SAFETY: as above.
unsafe impl Sync for HeapBlock {}

impl HeapBlock {
    fn new(len_bytes: usize) -> Self {
        let layout =
            Layout::from_size_align(len_bytes.max(1), CACHE_LINE_BYTES).expect("region fits the address space");
        // SAFETY: the layout is not empty.
        let base = unsafe { alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(layout) };
        Self { base, layout }
    }
}

impl Drop for HeapBlock {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout; every region of it holds an `Arc`, so none is left.
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
    fn memory_outlives_the_region_it_was_made_with() {
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
    fn the_last_whole_word_is_there_and_none_after_it() {
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
    fn words_are_inside_the_region_all_of_them() {
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
    fn compare_exchange_reports_what_it_found() {
        let region = Region::heap(64);
        assert_eq!(region.compare_exchange_u64(0, 0, 5), Ok(0));
        assert_eq!(region.compare_exchange_u64(0, 0, 6), Err(5));
        assert_eq!(region.swap_u64(0, 9, Ordering::AcqRel), 5);
        assert_eq!(region.add_u64(0, 1, Ordering::AcqRel), 9);
    }
}
