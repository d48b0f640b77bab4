//! Statistics of measurements, and tables to print them.

mod latencies;
mod median;
mod table;

pub use latencies::{Latencies, Quantiles};
pub use median::{Ratio, median, median_ratio, ratios};
pub use table::{Align, Table};

/// Returns the smallest of `sorted` values that at least `share` (0 to 1) of them do not exceed (the nearest rank).
/// `None` without values.
pub fn nearest_rank<T: Copy>(sorted: &[T], share: f64) -> Option<T> {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nearest_rank_is_one_of_the_values() {
        let values: Vec<u32> = (1..=100).collect();
        let ranks = [0.0, 0.5, 0.95, 0.99, 0.991, 1.0].map(|share| nearest_rank(&values, share));
        assert_eq!(ranks, [1, 50, 95, 99, 100, 100].map(Some));
        assert_eq!(nearest_rank::<f64>(&[], 0.5), None);
    }
}
