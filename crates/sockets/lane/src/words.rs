//! Short spans of private memory as words, for payloads that are moved without calling `memcpy`.

/// Payloads of up to so many bytes go word by word; the call costs less beyond.
pub(crate) const WORDWISE_BYTES_MAX: usize = 16;
pub(crate) const WORD_BYTES: usize = size_of::<u64>();

/// The first `len_bytes` (at most 8) at `source`, as the word whose bytes in memory they are; zeros follow.
///
/// # Safety
/// `source` is readable for `len_bytes`.
#[inline(always)]
pub(crate) unsafe fn load_short(source: *const u8, len_bytes: usize) -> u64 {
    if len_bytes >= WORD_BYTES {
        // SAFETY: the caller's.
        return unsafe { source.cast::<u64>().read_unaligned() };
    }
    let (mut word, mut at) = (0_u64, 0);
    if len_bytes & 4 != 0 {
        // SAFETY: the caller's: four bytes are there.
        word = u32::from_le(unsafe { source.cast::<u32>().read_unaligned() }).into();
        at = 4;
    }
    if len_bytes & 2 != 0 {
        // SAFETY: the caller's: two more bytes are there.
        word |= u64::from(u16::from_le(unsafe { source.add(at).cast::<u16>().read_unaligned() })) << (at * 8);
        at += 2;
    }
    if len_bytes & 1 != 0 {
        // SAFETY: the caller's: one more byte is there.
        word |= u64::from(unsafe { source.add(at).read() }) << (at * 8);
    }
    word.to_le()
}

/// The `len_bytes` at `source` as the words whose bytes in memory they are; zeros follow.
///
/// # Safety
/// `source` is readable for `len_bytes`, which are at most what `N` words hold.
#[inline(always)]
pub(crate) unsafe fn load_words<const N: usize>(source: *const u8, len_bytes: usize) -> [u64; N] {
    std::array::from_fn(|index| {
        let left_bytes = len_bytes.saturating_sub(index * WORD_BYTES);
        // SAFETY: the caller's: so many bytes are left there, none beyond its end.
        if left_bytes == 0 { 0 } else { unsafe { load_short(source.add(index * WORD_BYTES), left_bytes) } }
    })
}

/// Stores the first `len_bytes` of what the words hold to `destination`.
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
        // SAFETY: the caller's: there is room for so many bytes, none beyond its end.
        unsafe { store_short(destination.add(index * WORD_BYTES), word, left_bytes) };
    }
}

/// Stores the first `len_bytes` (at most 8) of the word's bytes in memory to `destination`.
///
/// # Safety
/// `destination` is writable for `len_bytes`.
#[inline(always)]
pub(crate) unsafe fn store_short(destination: *mut u8, word: u64, len_bytes: usize) {
    if len_bytes >= WORD_BYTES {
        // SAFETY: the caller's.
        return unsafe { destination.cast::<u64>().write_unaligned(word) };
    }
    let word = u64::from_le(word);
    let mut at = 0;
    if len_bytes & 4 != 0 {
        // SAFETY: the caller's: there is room for four bytes.
        unsafe { destination.cast::<u32>().write_unaligned((word as u32).to_le()) };
        at = 4;
    }
    if len_bytes & 2 != 0 {
        // SAFETY: the caller's: there is room for two more bytes.
        unsafe { destination.add(at).cast::<u16>().write_unaligned(((word >> (at * 8)) as u16).to_le()) };
        at += 2;
    }
    if len_bytes & 1 != 0 {
        // SAFETY: the caller's: there is room for one more byte.
        unsafe { destination.add(at).write((word >> (at * 8)) as u8) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn miri_a_short_span_goes_through_a_word_unchanged() {
        for len_bytes in 0..=WORD_BYTES {
            // Of exactly this length, so that Miri sees a byte too many.
            let source: Vec<u8> = (1..=len_bytes as u8).collect();
            let mut destination = vec![0; len_bytes];
            // SAFETY: both vectors have this length.
            unsafe { store_short(destination.as_mut_ptr(), load_short(source.as_ptr(), len_bytes), len_bytes) };
            assert_eq!(source, destination);
        }
    }

    #[test]
    fn miri_a_span_goes_through_words_unchanged() {
        for len_bytes in 0..=6 * WORD_BYTES {
            let source: Vec<u8> = (1..=len_bytes as u8).collect();
            let mut destination = vec![0; len_bytes];
            // SAFETY: both vectors have this length.
            let words: [u64; 6] = unsafe { load_words(source.as_ptr(), len_bytes) };
            assert!(words[len_bytes.div_ceil(WORD_BYTES)..].iter().all(|word| *word == 0));
            // SAFETY: as above.
            unsafe { store_words(destination.as_mut_ptr(), words, len_bytes) };
            assert_eq!(source, destination);
        }
    }

    #[test]
    fn a_word_holds_its_bytes_in_the_order_of_memory() {
        // SAFETY: three bytes are there.
        let word = unsafe { load_short([1, 2, 3].as_ptr(), 3) };
        assert_eq!(word.to_ne_bytes(), [1, 2, 3, 0, 0, 0, 0, 0]);
    }
}
