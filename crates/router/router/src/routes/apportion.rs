//! Weights of equal ways as parts of a group, which has few.

/// So many of `slots` parts for each weight, in proportion as near as goes, the same wherever it is asked: exactly
/// where the weights' ratio fits, else by highest averages (Sainte-Laguë), and no way without a part. Where there are
/// more ways than parts, those behind get none, which is what a weight of 0 gets too.
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
        // The one whose parts are furthest below its weight; of equal ones the first.
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
    fn ratios_that_fit_are_exact_and_others_near() {
        assert_eq!(apportion(&[], 16), [0; 0]);
        assert_eq!(apportion(&[7], 16), [1]);
        assert_eq!(apportion(&[3, 1], 16), [3, 1]);
        assert_eq!(apportion(&[256, 256], 16), [1, 1]);
        assert_eq!(apportion(&[100, 200, 100], 16), [1, 2, 1]);
        assert_eq!(apportion(&[0, 5], 16), [0, 1]);
        assert_eq!(apportion(&[256, 1], 16), [15, 1]);
        assert_eq!(apportion(&[70, 30], 16), [7, 3]);
        assert_eq!(apportion(&[71, 29], 16), [11, 5]);
        assert_eq!(apportion(&[1; 20], 16), [&[1; 16][..], &[0; 4]].concat());
    }

    proptest! {
        #[test]
        fn no_way_is_without_a_part_and_none_has_one_too_many(
            weights in prop::collection::vec(1..=256u32, 1..=16),
        ) {
            let parts = apportion(&weights, 16);
            prop_assert!(parts.iter().sum::<usize>() <= 16 && parts.iter().all(|part| *part > 0));
            let total: u32 = weights.iter().sum();
            let all = parts.iter().sum::<usize>() as f64;
            for (weight, part) in weights.iter().zip(&parts) {
                // One that has more than the part that everybody gets is not above its due by more than one.
                let due = f64::from(*weight) / f64::from(total) * all;
                prop_assert!(*part == 1 || *part as f64 <= due + 1.0, "{weights:?}: {parts:?}");
            }
        }
    }
}
