//! Medians over rounds, and ratios taken round by round so that a machine that drifts between rounds moves both sides.

/// The median; of an even count, the mean of the middle two. `None` of nothing.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        count if count % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

/// The median of `over / under`, round by round, for the rounds both sides have.
pub fn median_ratio(over: &[f64], under: &[f64]) -> Option<f64> {
    median(over.iter().zip(under).filter(|(_, under)| **under > 0.0).map(|(over, under)| over / under))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_takes_the_middle_whatever_the_order() {
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median([]), None);
    }

    #[test]
    fn one_wild_round_does_not_move_the_median() {
        assert_eq!(median([10.0, 11.0, 9.0, 10.5, 4000.0]), Some(10.5));
    }

    #[test]
    fn ratio_is_taken_within_each_round() {
        // Both sides slow down tenfold in the second round: the ratio does not notice.
        assert_eq!(median_ratio(&[10.0, 100.0, 10.0], &[5.0, 50.0, 5.0]), Some(2.0));
    }

    #[test]
    fn ratio_needs_a_round_on_both_sides() {
        assert_eq!(median_ratio(&[10.0], &[]), None);
        assert_eq!(median_ratio(&[10.0, 20.0], &[5.0]), Some(2.0));
        assert_eq!(median_ratio(&[10.0], &[0.0]), None);
    }
}
