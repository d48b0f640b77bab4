//! Conversion between short spans of private memory and words, to move payloads without calling `memcpy`.

/// Payloads of up to this number of bytes are copied word by word; for longer ones `memcpy` is faster.
pub(crate) const WORDWISE_BYTES_MAX: usize = 16;
pub(crate) const WORD_BYTES: usize = size_of::<u64>();

/// Returns the `len_bytes` (up to 8) at `source` as a word with these bytes in memory order, followed by zeros. Of more
/// than 8 bytes only the first 8 are loaded.
///
/// # Safety
/// `source` is readable for `len_bytes`.
#[inline(always)]
pub(crate) unsafe fn load_short(source: *const u8, len_bytes: usize) -> u64 {
    if len_bytes >= WORD_BYTES {
        // SAFETY: `source` is readable for `len_bytes`, by this function's contract, which are at least the 8 of a
        // word; the read is unaligned.
        return unsafe { source.cast::<u64>().read_unaligned() };
    }
    let (mut word, mut at) = (0_u64, 0);
    if len_bytes & 4 != 0 {
        // SAFETY: bit 2 of `len_bytes` is set, so at least four bytes are readable at `source`, by this function's
        // contract; the read is unaligned.
        word = u32::from_le(unsafe { source.cast::<u32>().read_unaligned() }).into();
        at = 4;
    }
    if len_bytes & 2 != 0 {
        // SAFETY: bit 1 of `len_bytes` is set, so two more bytes are readable behind the `at` bytes of bit 2, by this
        // function's contract; the read is unaligned.
        word |= u64::from(u16::from_le(unsafe { source.add(at).cast::<u16>().read_unaligned() })) << (at * 8);
        at += 2;
    }
    if len_bytes & 1 != 0 {
        // SAFETY: bit 0 of `len_bytes` is set, so one more byte is readable behind the `at` bytes of the higher bits,
        // by this function's contract.
        word |= u64::from(unsafe { source.add(at).read() }) << (at * 8);
    }
    word.to_le()
}

/// Returns the `len_bytes` at `source` as words with these bytes in memory order, followed by zeros.
///
/// # Safety
/// `source` is readable for `len_bytes`, which are at most what `N` words hold.
#[inline(always)]
pub(crate) unsafe fn load_words<const N: usize>(source: *const u8, len_bytes: usize) -> [u64; N] {
    std::array::from_fn(|index| {
        let left_bytes = len_bytes.saturating_sub(index * WORD_BYTES);
        // SAFETY: `source` is readable for `len_bytes`, by this function's contract. `left_bytes` of them lie from word
        // `index` on, and it is not 0 here, so the pointer stays inside the span.
        if left_bytes == 0 { 0 } else { unsafe { load_short(source.add(index * WORD_BYTES), left_bytes) } }
    })
}

/// Stores the first `len_bytes` of the words, in memory order, to `destination`.
///
/// # Safety
/// `destination` is writable for `len_bytes`, which are at most what `N` words hold.
#[inline(always)]
pub(crate) unsafe fn store_words<const N: usize>(destination: *mut u8, words: [u64; N], len_bytes: usize) {
    for (index, word) in words.into_iter().enumerate() {
        let left_bytes = len_bytes.saturating_sub(index * WORD_BYTES);
        if left_bytes == 0 {
            return;
        }
        // SAFETY: `destination` is writable for `len_bytes`, by this function's contract. `left_bytes` of them lie from
        // word `index` on, and it is not 0 here, so the pointer stays inside the span.
        unsafe { store_short(destination.add(index * WORD_BYTES), word, left_bytes) };
    }
}

/// Stores the first `len_bytes` (up to 8) of the word, in memory order, to `destination`. Of more than 8 bytes only the
/// first 8 are stored.
///
/// # Safety
/// `destination` is writable for `len_bytes`.
#[inline(always)]
pub(crate) unsafe fn store_short(destination: *mut u8, word: u64, len_bytes: usize) {
    if len_bytes >= WORD_BYTES {
        // SAFETY: `destination` is writable for `len_bytes`, by this function's contract, which are at least the 8 of a
        // word; the write is unaligned.
        return unsafe { destination.cast::<u64>().write_unaligned(word) };
    }
    let word = u64::from_le(word);
    let mut at = 0;
    if len_bytes & 4 != 0 {
        // SAFETY: bit 2 of `len_bytes` is set, so at least four bytes are writable at `destination`, by this function's
        // contract; the write is unaligned.
        unsafe { destination.cast::<u32>().write_unaligned((word as u32).to_le()) };
        at = 4;
    }
    if len_bytes & 2 != 0 {
        // SAFETY: bit 1 of `len_bytes` is set, so two more bytes are writable behind the `at` bytes of bit 2, by this
        // function's contract; the write is unaligned.
        unsafe { destination.add(at).cast::<u16>().write_unaligned(((word >> (at * 8)) as u16).to_le()) };
        at += 2;
    }
    if len_bytes & 1 != 0 {
        // SAFETY: bit 0 of `len_bytes` is set, so one more byte is writable behind the `at` bytes of the higher bits,
        // by this function's contract.
        unsafe { destination.add(at).write((word >> (at * 8)) as u8) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn miri_a_short_span_goes_through_a_word_unchanged() {
        for len_bytes in 0..=WORD_BYTES {
            // The vectors have exactly this length, so that Miri reports an access beyond it.
            let source: Vec<u8> = (1..=len_bytes as u8).collect();
            let mut destination = vec![0; len_bytes];
            // SAFETY: both vectors have `len_bytes`.
            unsafe { store_short(destination.as_mut_ptr(), load_short(source.as_ptr(), len_bytes), len_bytes) };
            assert_eq!(source, destination);
        }
    }

    #[test]
    fn miri_a_span_goes_through_words_unchanged() {
        for len_bytes in 0..=6 * WORD_BYTES {
            let source: Vec<u8> = (1..=len_bytes as u8).collect();
            let mut destination = vec![0; len_bytes];
            // SAFETY: `source` has `len_bytes`, which are at most the 48 of six words.
            let words: [u64; 6] = unsafe { load_words(source.as_ptr(), len_bytes) };
            assert!(words[len_bytes.div_ceil(WORD_BYTES)..].iter().all(|word| *word == 0));
            // SAFETY: `destination` has `len_bytes`, which are at most the 48 of six words.
            unsafe { store_words(destination.as_mut_ptr(), words, len_bytes) };
            assert_eq!(source, destination);
        }
    }

    #[test]
    fn a_word_holds_its_bytes_in_the_order_of_memory() {
        // SAFETY: the array has three bytes.
        let word = unsafe { load_short([1, 2, 3].as_ptr(), 3) };
        assert_eq!(word.to_ne_bytes(), [1, 2, 3, 0, 0, 0, 0, 0]);
    }
}
