//! In which order the units of a window are visited.

use pcie::test::{Order, Test};

/// Rounds that make a permutation look random.
const ROUNDS: u64 = 4;

/// The order of visits over a window: each unit once a pass, each pass in another order when it is random.
///
/// The permutation is calculated, not stored: a table would take a share of the caches that are measured.
#[derive(Clone, Copy, Debug)]
pub struct Visits {
    units: u64,
    order: Order,
    /// Half the bits of the smallest even power of two that holds all units.
    half_bits: u32,
    seed: u64,
}

impl Visits {
    /// Of a test.
    pub fn of(test: &Test) -> Self {
        let bits = u64::BITS - (test.units() - 1).leading_zeros();
        Self { units: test.units(), order: test.order, half_bits: bits.div_ceil(2).max(1), seed: test.seed }
    }

    /// Units of the window, each visited once a pass.
    pub fn units(&self) -> u64 {
        self.units
    }

    /// The unit visited as number `index` of pass `pass`.
    pub fn unit(&self, pass: u64, index: u64) -> u64 {
        debug_assert!(index < self.units);
        if self.order == Order::Sequential {
            return index;
        }
        // A permutation of at most four times as many numbers, walked until it comes back into the window: it must,
        // because every cycle that leaves the window through a number enters it again.
        let mut unit = self.permuted(pass, index);
        while unit >= self.units {
            unit = self.permuted(pass, unit);
        }
        unit
    }

    /// A Feistel network: a permutation, whatever its round function is.
    fn permuted(&self, pass: u64, number: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (number >> self.half_bits, number & mask);
        for round in 0..ROUNDS {
            let key = self.seed.wrapping_add(pass.wrapping_mul(ROUNDS)).wrapping_add(round);
            (left, right) = (right, left ^ (mixed(right ^ mixed(key)) & mask));
        }
        left << self.half_bits | right
    }
}

/// SplitMix64's finish: every bit of the input moves every bit of the output.
fn mixed(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test;
    use pcie::test::Kind;
    use proptest::prelude::*;

    fn pass(visits: &Visits, pass: u64) -> Vec<u64> {
        (0..visits.units()).map(|index| visits.unit(pass, index)).collect()
    }

    proptest! {
        #[test]
        fn every_unit_is_visited_once_a_pass(lines in 16..3000_u64, seed: u64, number in 0..1000_u64) {
            let visits = Visits::of(&Test { window_bytes: lines * 64, seed, ..test(Kind::LatRd) });
            let mut units = pass(&visits, number);
            units.sort_unstable();
            prop_assert_eq!(units, (0..visits.units()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_window_of_one_unit_is_visited_over_and_over() {
        let visits = Visits::of(&Test { window_bytes: 4096, size_bytes: 4096, ..test(Kind::LatRd) });
        assert_eq!((visits.units(), visits.unit(0, 0), visits.unit(7, 0)), (1, 0, 0));
    }

    #[test]
    fn orders_differ_by_pass_and_seed_and_repeat_with_both() {
        let with_seed = |seed| Visits::of(&Test { window_bytes: 1 << 16, seed, ..test(Kind::LatRd) });
        assert_eq!(pass(&with_seed(1), 0), pass(&with_seed(1), 0));
        assert_ne!(pass(&with_seed(1), 0), pass(&with_seed(1), 1));
        assert_ne!(pass(&with_seed(1), 0), pass(&with_seed(2), 0));
    }

    #[test]
    fn neighbours_are_rarely_visited_in_turn() {
        let visits = Visits::of(&Test { window_bytes: 1 << 20, seed: 3, ..test(Kind::LatRd) });
        let units = pass(&visits, 0);
        let neighbours = units.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) == 1).count();
        assert!(neighbours < units.len() / 100, "{neighbours} of {}", units.len());
    }

    #[test]
    fn a_sequential_test_goes_from_first_to_last() {
        let visits = Visits::of(&Test { order: Order::Sequential, window_bytes: 1024, ..test(Kind::LatRd) });
        assert_eq!(pass(&visits, 5), (0..16).collect::<Vec<_>>());
    }
}
