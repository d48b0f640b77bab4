//! The order in which the units of a window are visited.

use pcie::test::{Order, Test};

/// Rounds of the Feistel network: enough for a permutation that looks random.
const ROUNDS: u64 = 4;

/// The order of visits: a pass visits each unit once, and in a random test each pass has another permutation.
///
/// The permutation is computed, because a stored table would occupy a part of the measured caches.
#[derive(Clone, Copy, Debug)]
pub struct Visits {
    units: u64,
    order: Order,
    /// Half the bits of the smallest even power of two that is at least the number of units.
    half_bits: u32,
    seed: u64,
}

impl Visits {
    /// Returns the visits of a test.
    pub fn of(test: &Test) -> Self {
        let bits = u64::BITS - (test.units() - 1).leading_zeros();
        Self { units: test.units(), order: test.order, half_bits: bits.div_ceil(2).max(1), seed: test.seed }
    }

    /// Returns the number of units in the window.
    pub fn units(&self) -> u64 {
        self.units
    }

    /// Returns the unit that visit `index` of pass `pass` goes to.
    pub fn unit(&self, pass: u64, index: u64) -> u64 {
        debug_assert!(index < self.units);
        if self.order == Order::Sequential {
            return index;
        }
        // The permutation is of at most four times as many numbers, so it is applied until the result is a unit (cycle
        // walking). That terminates: every cycle that leaves the range of units returns to it.
        let mut unit = self.permuted(pass, index);
        while unit >= self.units {
            unit = self.permuted(pass, unit);
        }
        unit
    }

    /// Applies a Feistel network, which is a permutation for every round function.
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

/// The finalizer of SplitMix64: every input bit affects every output bit.
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
    fn a_window_of_one_unit_is_visited_repeatedly() {
        let visits = Visits::of(&Test { window_bytes: 4096, size_bytes: 4096, ..test(Kind::LatRd) });
        assert_eq!((visits.units(), visits.unit(0, 0), visits.unit(7, 0)), (1, 0, 0));
    }

    #[test]
    fn the_order_is_determined_by_pass_and_seed() {
        let with_seed = |seed| Visits::of(&Test { window_bytes: 1 << 16, seed, ..test(Kind::LatRd) });
        assert_eq!(pass(&with_seed(1), 0), pass(&with_seed(1), 0));
        assert_ne!(pass(&with_seed(1), 0), pass(&with_seed(1), 1));
        assert_ne!(pass(&with_seed(1), 0), pass(&with_seed(2), 0));
    }

    #[test]
    fn neighbours_are_rarely_visited_in_succession() {
        let visits = Visits::of(&Test { window_bytes: 1 << 20, seed: 3, ..test(Kind::LatRd) });
        let units = pass(&visits, 0);
        let neighbours = units.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) == 1).count();
        assert!(neighbours < units.len() / 100, "{neighbours} of {}", units.len());
    }

    #[test]
    fn a_sequential_test_visits_units_in_address_order() {
        let visits = Visits::of(&Test { order: Order::Sequential, window_bytes: 1024, ..test(Kind::LatRd) });
        assert_eq!(pass(&visits, 5), (0..16).collect::<Vec<_>>());
    }
}
