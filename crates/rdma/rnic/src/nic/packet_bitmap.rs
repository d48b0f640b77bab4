//! A bitmap of packets that shifts as the window advances.

use super::limits::WINDOW_PACKETS_MAX;

const WORD_BITS: u32 = u64::BITS;
const WORDS: usize = (WINDOW_PACKETS_MAX / WORD_BITS) as usize;

/// One bit for each packet of the maximum window.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PacketBitmap {
    words: [u64; WORDS],
}

impl PacketBitmap {
    /// The bitmap without set bits.
    pub const EMPTY: Self = Self { words: [0; WORDS] };

    /// Sets a bit. Returns false if it was set already or does not exist.
    pub fn set(&mut self, bit: u32) -> bool {
        let Some(word) = self.words.get_mut((bit / WORD_BITS) as usize) else { return false };
        let mask = 1 << (bit % WORD_BITS);
        let is_new = *word & mask == 0;
        *word |= mask;
        is_new
    }

    /// Returns whether a bit is set.
    pub fn has(&self, bit: u32) -> bool {
        self.words.get((bit / WORD_BITS) as usize).is_some_and(|word| word >> (bit % WORD_BITS) & 1 == 1)
    }

    /// Returns whether no bit is set.
    pub fn is_empty(&self) -> bool {
        self.words == [0; WORDS]
    }

    /// Returns the number of set bits.
    pub fn count(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// Returns the number of consecutive set bits from bit 0 on.
    pub fn leading_ones(&self) -> u32 {
        let full = self.words.iter().take_while(|word| **word == u64::MAX).count();
        full as u32 * WORD_BITS + self.words.get(full).map_or(0, |word| word.trailing_ones())
    }

    /// Returns the index after the last set bit, or 0 if none is set.
    pub fn end(&self) -> u32 {
        let last = self.words.iter().rposition(|word| *word != 0);
        last.map_or(0, |index| (index as u32 + 1) * WORD_BITS - self.words[index].leading_zeros())
    }

    /// Clears the first run of set bits; returns its first bit and its length.
    pub fn take_run(&mut self) -> (u32, u32) {
        let first = (0..WINDOW_PACKETS_MAX).find(|bit| self.has(*bit)).unwrap_or(WINDOW_PACKETS_MAX);
        let bits = (first..WINDOW_PACKETS_MAX).take_while(|bit| self.has(*bit)).count() as u32;
        for bit in first..first + bits {
            self.words[(bit / WORD_BITS) as usize] &= !(1 << (bit % WORD_BITS));
        }
        (first, bits)
    }

    /// Shifts the bitmap down by `bits`.
    pub fn advance(&mut self, bits: u32) {
        let (words, shift) = ((bits / WORD_BITS) as usize, bits % WORD_BITS);
        for index in 0..WORDS {
            self.words[index] = self.shifted(index + words, shift);
        }
    }

    /// Returns 128 bits from `first` on.
    pub fn window(&self, first: u32) -> u128 {
        let (words, shift) = ((first / WORD_BITS) as usize, first % WORD_BITS);
        u128::from(self.shifted(words, shift)) | u128::from(self.shifted(words + 1, shift)) << WORD_BITS
    }

    /// Sets the bits of `window`, starting at bit `first`.
    pub fn or_window(&mut self, first: u32, window: u128) {
        let (words, shift) = ((first / WORD_BITS) as usize, first % WORD_BITS);
        let low = window << shift;
        let high = if shift == 0 { 0 } else { (window >> (u128::BITS - shift)) as u64 };
        for (index, value) in [low as u64, (low >> WORD_BITS) as u64, high].into_iter().enumerate() {
            if let Some(word) = self.words.get_mut(words + index) {
                *word |= value;
            }
        }
    }

    fn shifted(&self, index: usize, shift: u32) -> u64 {
        let word = |index: usize| self.words.get(index).copied().unwrap_or(0);
        if shift == 0 { word(index) } else { word(index) >> shift | word(index + 1) << (WORD_BITS - shift) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BITS: u32 = WINDOW_PACKETS_MAX;

    fn of(set: &[u32]) -> PacketBitmap {
        let mut bits = PacketBitmap::EMPTY;
        for bit in set {
            bits.set(*bit);
        }
        bits
    }

    fn all(bits: &PacketBitmap) -> Vec<u32> {
        (0..BITS).filter(|bit| bits.has(*bit)).collect()
    }

    proptest! {
        #[test]
        fn it_is_a_set_of_numbers(set in proptest::collection::btree_set(0..BITS, 0..200), by in 0..BITS + 9) {
            let list: Vec<u32> = set.iter().copied().collect();
            let mut bits = of(&list);
            prop_assert_eq!(all(&bits), list.clone());
            prop_assert_eq!(bits.count() as usize, list.len());
            prop_assert_eq!(bits.end(), list.last().map_or(0, |last| last + 1));
            let leading = (0..).take_while(|bit| set.contains(bit)).count();
            prop_assert_eq!(bits.leading_ones() as usize, leading);
            let window = (0..128).filter(|bit| set.contains(&(by + bit))).fold(0_u128, |sum, bit| sum | 1 << bit);
            prop_assert_eq!(bits.window(by), window);
            let (mut rest, mut runs) = (bits.clone(), Vec::new());
            while !rest.is_empty() {
                let (first, length) = rest.take_run();
                runs.extend(first..first + length);
                prop_assert!(!bits.has(first + length));
            }
            prop_assert_eq!(&runs, &list);
            bits.advance(by);
            let moved: Vec<u32> = list.iter().filter_map(|bit| bit.checked_sub(by)).collect();
            prop_assert_eq!(all(&bits), moved);
        }

        #[test]
        fn a_window_is_merged_at_its_offset(window: u128, first in 0..BITS) {
            let mut bits = PacketBitmap::EMPTY;
            bits.or_window(first, window);
            let set = (0..128).filter(|bit| window >> bit & 1 == 1).map(|bit| first + bit);
            let expected: Vec<u32> = set.filter(|bit| *bit < BITS).collect();
            prop_assert_eq!(all(&bits), expected);
        }
    }

    #[test]
    fn setting_a_bit_reports_whether_it_is_new() {
        let mut bits = PacketBitmap::EMPTY;
        assert!(bits.set(BITS - 1));
        assert!(!bits.set(BITS - 1));
        assert!(!bits.set(BITS));
        assert!(!bits.has(BITS));
        assert_eq!(of(&(0..BITS).collect::<Vec<_>>()).leading_ones(), BITS);
    }
}
