//! Seeded random numbers: the same seed and the same calls give the same numbers.

use std::ops::RangeInclusive;

/// SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014): small, and every seed is
/// good.
#[derive(Debug)]
pub(crate) struct Random {
    state: u64,
}

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `limit`, which is not zero.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        assert!(limit != 0, "a choice from an empty range");
        (self.next() % limit as u64) as usize
    }

    pub(crate) fn within(&mut self, range: &RangeInclusive<u64>) -> u64 {
        let span = range.end().saturating_sub(*range.start());
        match span.checked_add(1) {
            Some(choices) => range.start() + self.next() % choices,
            None => self.next(),
        }
    }

    /// Returns true with a probability of `chances` in a million.
    pub(crate) fn is_one_of_million(&mut self, chances: u32) -> bool {
        chances != 0 && self.next() % 1_000_000 < u64::from(chances)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_numbers_and_another_seed_others() {
        let numbers = |seed| {
            let mut random = Random::new(seed);
            [(); 8].map(|()| random.next())
        };
        assert_eq!(numbers(7), numbers(7));
        assert_ne!(numbers(7), numbers(8));
    }

    #[test]
    fn choices_stay_in_range_and_reach_its_ends() {
        let mut random = Random::new(1);
        let seen: std::collections::BTreeSet<u64> = (0..200).map(|_| random.within(&(3..=6))).collect();
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [3, 4, 5, 6]);
        assert_eq!(random.within(&(5..=5)), 5);
        assert!((0..200).all(|_| random.below(3) < 3));
    }

    #[test]
    fn probabilities_of_zero_and_one_are_exact() {
        let mut random = Random::new(1);
        assert!((0..100).all(|_| !random.is_one_of_million(0)));
        assert!((0..100).all(|_| random.is_one_of_million(1_000_000)));
    }
}
