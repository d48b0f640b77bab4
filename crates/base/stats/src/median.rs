//! Medians over rounds, and ratios formed within each round, so that a drift of the machine between rounds affects both
//! sides alike.

use serde::Serialize;

/// Returns the median; for an even count, the mean of the middle two. `None` without values.
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

/// Returns `over / under` for each round that both sides have.
pub fn ratios(over: &[f64], under: &[f64]) -> Vec<f64> {
    over.iter().zip(under).filter(|(_, under)| **under > 0.0).map(|(over, under)| over / under).collect()
}

/// Returns the median of [`ratios`].
pub fn median_ratio(over: &[f64], under: &[f64]) -> Option<f64> {
    median(ratios(over, under))
}

/// A ratio is known precisely if its interval extends at most this share of it to either side.
const RATIO_PRECISION: f64 = 0.05;

/// A ratio of two figures of the same round, over all rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Ratio {
    /// The median; 0 without rounds.
    pub median: f64,
    /// The 95% confidence interval of the median, by ranks. A ratio whose interval contains 1 is not distinguishable
    /// from 1.
    pub interval: [f64; 2],
    /// Number of rounds with a ratio.
    pub rounds: usize,
}

impl Ratio {
    /// Fewest rounds for a 95% interval; with fewer, the interval is the smallest and the largest ratio.
    pub const ROUNDS_MIN: usize = 6;

    /// Returns the summary of the ratios of all rounds.
    pub fn of(ratios: &[f64]) -> Self {
        let median = median(ratios.iter().copied()).unwrap_or(0.0);
        Self { median, interval: median_interval(ratios).unwrap_or_default(), rounds: ratios.len() }
    }

    /// Returns whether the interval is narrow enough that more rounds would change little.
    pub fn is_known(&self) -> bool {
        let Self { median, interval: [low, high], rounds } = self;
        *rounds >= Self::ROUNDS_MIN && high - low <= 2.0 * RATIO_PRECISION * median
    }
}

/// Returns the 95% confidence interval of the median by ranks (the sign test), which assumes nothing about the
/// distribution of the independent values. For fewer than [`Ratio::ROUNDS_MIN`] values, returns the smallest and the
/// largest. `None` without values.
fn median_interval(values: &[f64]) -> Option<[f64; 2]> {
    const TAIL_PROBABILITY: f64 = 0.025;
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let count = sorted.len();
    let last = count.checked_sub(1)?;
    let (mut below, mut fewer_heads, mut heads_chance) = (0, 0.0, 0.5_f64.powi(count as i32));
    while below < last / 2 {
        fewer_heads += heads_chance;
        heads_chance *= (count - below) as f64 / (below + 1) as f64;
        if fewer_heads + heads_chance > TAIL_PROBABILITY {
            break;
        }
        below += 1;
    }
    Some([sorted[below], sorted[last - below]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_does_not_depend_on_the_order() {
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median([]), None);
    }

    #[test]
    fn one_outlier_does_not_move_the_median() {
        assert_eq!(median([10.0, 11.0, 9.0, 10.5, 4000.0]), Some(10.5));
    }

    #[test]
    fn a_ratio_is_formed_within_each_round() {
        // Both sides slow down tenfold in the second round, which does not change the ratio.
        assert_eq!(median_ratio(&[10.0, 100.0, 10.0], &[5.0, 50.0, 5.0]), Some(2.0));
    }

    #[test]
    fn a_ratio_needs_a_round_on_both_sides() {
        assert_eq!(median_ratio(&[10.0], &[]), None);
        assert_eq!(median_ratio(&[10.0, 20.0], &[5.0]), Some(2.0));
        assert_eq!(median_ratio(&[10.0], &[0.0]), None);
    }

    #[test]
    fn the_interval_of_the_median_has_the_ranks_of_the_sign_test() {
        // Those of the sign test at 5%, two-sided.
        for (count, rank) in [(6, 1), (9, 2), (11, 2), (15, 4), (21, 6), (30, 10), (50, 18)] {
            let values: Vec<f64> = (1..=count).rev().map(f64::from).collect();
            let expected = [f64::from(rank), f64::from(count + 1 - rank)];
            assert_eq!(median_interval(&values), Some(expected), "{count}");
        }
        assert_eq!(median_interval(&[3.0, 1.0, 2.0]), Some([1.0, 3.0]));
        assert_eq!(median_interval(&[3.0]), Some([3.0, 3.0]));
        assert_eq!(median_interval(&[]), None);
    }

    #[test]
    fn a_ratio_is_known_once_its_interval_is_narrow() {
        let of = |spread: f64| Ratio::of(&[2.0 - spread, 2.0, 2.0, 2.0, 2.0, 2.0 + spread]).is_known();
        assert_eq!([0.0, 0.09, 0.11].map(of), [true, true, false]);
        assert!(!Ratio::of(&[2.0; 5]).is_known() && !Ratio::of(&[]).is_known(), "too few rounds");
    }
}
