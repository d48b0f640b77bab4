//! The region under a model checker: an array of modelled words.

use crate::cache_line::CACHE_LINE_BYTES;
use crate::sync::{Arc, AtomicU64, Ordering};

const WORD_BYTES: usize = size_of::<u64>();

/// A span of modelled memory. Bytes are copied by relaxed word operations.
#[derive(Debug, Clone)]
pub struct Region {
    words: Arc<Vec<AtomicU64>>,
    first_byte: usize,
    len_bytes: usize,
}

#[allow(missing_docs)] // Documented on the real region, which has the same methods.
impl Region {
    pub fn heap(len_bytes: usize) -> Self {
        let words = (0..len_bytes.div_ceil(WORD_BYTES)).map(|_| AtomicU64::new(0)).collect();
        Self { words: Arc::new(words), first_byte: 0, len_bytes }
    }

    pub fn sub(&self, offset: usize, len_bytes: usize) -> Self {
        assert!(offset + len_bytes <= self.len_bytes);
        Self { words: self.words.clone(), first_byte: self.first_byte + offset, len_bytes }
    }

    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    pub fn pointer(&self, _offset: usize, _len_bytes: usize) -> std::ptr::NonNull<u8> {
        unimplemented_in_model()
    }

    pub fn demote(&self, _offset: usize, _len_bytes: usize) {}

    pub fn prefetch_for_writes(&self, _offset: usize, _len_bytes: usize) {}

    /// In the model a page is a cache line.
    pub fn discard(&self, offset: usize, len_bytes: usize) {
        let end = offset + len_bytes;
        assert!(end <= self.len_bytes);
        let pages = offset.next_multiple_of(CACHE_LINE_BYTES)..end / CACHE_LINE_BYTES * CACHE_LINE_BYTES;
        for word in pages.step_by(WORD_BYTES) {
            self.store_u64(word, 0, Ordering::Relaxed);
        }
    }

    pub fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        self.word(offset).load(order)
    }

    pub fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        self.word(offset).store(value, order);
    }

    pub fn load_words<const N: usize>(&self, offset: usize) -> [u64; N] {
        std::array::from_fn(|index| self.load_u64(offset + index * WORD_BYTES, Ordering::Relaxed))
    }

    pub fn publish_words(&self, offset: usize, words: &[u64]) {
        for (index, word) in words.iter().enumerate().rev() {
            let order = if index == 0 { Ordering::Release } else { Ordering::Relaxed };
            self.store_u64(offset + index * WORD_BYTES, *word, order);
        }
    }

    pub fn swap_u64(&self, offset: usize, value: u64, order: Ordering) -> u64 {
        self.word(offset).swap(value, order)
    }

    pub fn add_u64(&self, offset: usize, value: u64, order: Ordering) -> u64 {
        self.word(offset).fetch_add(value, order)
    }

    pub fn compare_exchange_u64(&self, offset: usize, current: u64, new: u64) -> Result<u64, u64> {
        self.word(offset).compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
    }

    pub fn read(&self, offset: usize, destination: &mut [u8]) {
        for (index, byte) in destination.iter_mut().enumerate() {
            let at = offset + index;
            let word = self.load_u64(at / WORD_BYTES * WORD_BYTES, Ordering::Relaxed);
            *byte = word.to_ne_bytes()[at % WORD_BYTES];
        }
    }

    pub fn write(&self, offset: usize, source: &[u8]) {
        let mut at = offset;
        while at < offset + source.len() {
            let (word_at, skip_bytes) = (at / WORD_BYTES * WORD_BYTES, at % WORD_BYTES);
            let piece_bytes = (WORD_BYTES - skip_bytes).min(offset + source.len() - at);
            // Bytes that are not overwritten keep their values.
            let is_whole = piece_bytes == WORD_BYTES;
            let before = if is_whole { 0 } else { self.load_u64(word_at, Ordering::Relaxed) };
            let mut bytes = before.to_ne_bytes();
            bytes[skip_bytes..skip_bytes + piece_bytes].copy_from_slice(&source[at - offset..][..piece_bytes]);
            self.store_u64(word_at, u64::from_ne_bytes(bytes), Ordering::Relaxed);
            at += piece_bytes;
        }
    }

    /// # Safety
    /// `destination` is writable for `len_bytes`.
    pub unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        // SAFETY: the caller guarantees that `destination` is writable for `len_bytes`.
        self.read(offset, unsafe { std::slice::from_raw_parts_mut(destination, len_bytes) });
    }

    /// # Safety
    /// `source` is readable for `len_bytes`.
    pub unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        // SAFETY: the caller guarantees that `source` is readable for `len_bytes`.
        self.write(offset, unsafe { std::slice::from_raw_parts(source, len_bytes) });
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset + WORD_BYTES <= self.len_bytes && offset.is_multiple_of(WORD_BYTES));
        &self.words[(self.first_byte + offset) / WORD_BYTES]
    }
}

fn unimplemented_in_model() -> ! {
    panic!("modelled memory has no address")
}
