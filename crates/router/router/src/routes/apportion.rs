//! Apportionment of the slots of a next-hop group to weighted hops.

/// Apportions `slots` to weights, deterministically: exactly if the ratio of the weights fits, else by the highest
/// averages method (Sainte-Laguë), with at least one slot for each weight above 0. If there are more weights than
/// slots, the last ones get none.
pub fn apportion(weights: &[u32], slots: usize) -> Vec<usize> {
    let divisor = weights.iter().copied().fold(0, greatest_common_divisor).max(1);
    let total: u64 = weights.iter().map(|weight| u64::from(*weight)).sum();
    if total / u64::from(divisor) <= slots as u64 {
        return weights.iter().map(|weight| (weight / divisor) as usize).collect();
    }
    let mut left = slots;
    let mut parts = vec![0; weights.len()];
    for (part, _) in parts.iter_mut().zip(weights).filter(|(_, weight)| **weight > 0).take(slots) {
        *part = 1;
        left -= 1;
    }
    for _ in 0..left {
        // The weight with the highest average gets the next slot; of equal ones the first.
        let is_below = |one: usize, other: usize| {
            let claim = |of: usize, against: usize| u64::from(weights[of]) * (2 * parts[against] as u64 + 1);
            claim(one, other) > claim(other, one)
        };
        let next = (1..weights.len()).fold(0, |best, one| if is_below(one, best) { one } else { best });
        parts[next] += 1;
    }
    parts
}

fn greatest_common_divisor(one: u32, other: u32) -> u32 {
    let (mut one, mut other) = (one, other);
    while other > 0 {
        (one, other) = (other, one % other);
    }
    one
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ratios_that_fit_are_exact_and_others_approximate() {
        assert_eq!(apportion(&[], 16), [0; 0]);
        assert_eq!(apportion(&[7], 16), [1]);
        assert_eq!(apportion(&[3, 1], 16), [3, 1]);
        assert_eq!(apportion(&[256, 256], 16), [1, 1]);
        assert_eq!(apportion(&[100, 200, 100], 16), [1, 2, 1]);
        assert_eq!(apportion(&[0, 5], 16), [0, 1]);
        assert_eq!(apportion(&[256, 1], 16), [15, 1]);
        assert_eq!(apportion(&[70, 30], 16), [7, 3]);
        assert_eq!(apportion(&[71, 29], 16), [11, 5]);
        assert_eq!(apportion(&[23, 24, 185, 38], 16), [1, 1, 12, 2]);
        assert_eq!(apportion(&[1; 20], 16), [&[1; 16][..], &[0; 4]].concat());
    }

    proptest! {
        #[test]
        fn every_weight_gets_a_slot_and_no_other_weight_has_a_higher_claim_to_it(
            weights in prop::collection::vec(1..=256u32, 1..=16),
        ) {
            let parts = apportion(&weights, 16);
            prop_assert!(parts.iter().sum::<usize>() <= 16 && parts.iter().all(|part| *part > 0));
            for (one, other) in (0..parts.len()).flat_map(|one| (0..parts.len()).map(move |other| (one, other))) {
                // Beyond the guaranteed slot, the average for which a weight has its last slot is at least that for
                // which another one would get its next.
                let last = u64::from(weights[one]) * (2 * parts[other] as u64 + 1);
                let next = u64::from(weights[other]) * (2 * parts[one] as u64 - 1);
                prop_assert!(parts[one] == 1 || last >= next, "{weights:?}: {parts:?}");
            }
        }
    }
}
