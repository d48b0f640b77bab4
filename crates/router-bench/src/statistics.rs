//! What a few samples say.

use serde::Serialize;

/// What a report says of one distribution of latencies, in microseconds. *Measured.*
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Quantiles {
    /// Half took at most this.
    pub p50_us: f64,
    /// 99% took at most this.
    pub p99_us: f64,
    /// 99.9% took at most this.
    pub p999_us: f64,
    /// The longest.
    pub max_us: f64,
    /// How many there were.
    pub samples: usize,
}

impl Quantiles {
    /// Of nanoseconds in any order; zeros of none.
    pub fn of(samples_ns: &mut [u64]) -> Quantiles {
        samples_ns.sort_unstable();
        let count = samples_ns.len();
        let at = |quantile: f64| {
            let rank = (quantile * count as f64).ceil() as usize;
            samples_ns.get(rank.max(1) - 1).map_or(0.0, |ns| *ns as f64 / 1000.0)
        };
        Quantiles { p50_us: at(0.5), p99_us: at(0.99), p999_us: at(0.999), max_us: at(1.0), samples: count }
    }
}

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

/// Between which of some independent values the median of whatever they are drawn from lies, 95 times of a hundred: by
/// ranks, whatever its distribution (as many lie below it as heads are tossed). Of fewer than six, which do not suffice
/// for that, the least and the greatest. `None` of nothing.
pub fn median_interval(values: &[f64]) -> Option<[f64; 2]> {
    const MISSED_ON_A_SIDE: f64 = 0.025;
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let count = sorted.len();
    let last = count.checked_sub(1)?;
    let (mut below, mut fewer_heads, mut heads_chance) = (0, 0.0, 0.5_f64.powi(count as i32));
    while below < last / 2 {
        fewer_heads += heads_chance;
        heads_chance *= (count - below) as f64 / (below + 1) as f64;
        if fewer_heads + heads_chance > MISSED_ON_A_SIDE {
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
    fn quantiles_are_values_that_were_there() {
        let mut samples: Vec<u64> = (1..=1000).rev().map(|us| us * 1000).collect();
        let found = Quantiles::of(&mut samples);
        assert_eq!((found.p50_us, found.p99_us, found.p999_us, found.max_us), (500.0, 990.0, 999.0, 1000.0));
        assert_eq!(Quantiles::of(&mut []), Quantiles::default());
        assert_eq!(Quantiles::of(&mut [7000]).p99_us, 7.0);
    }

    #[test]
    fn the_median_takes_the_middle_whatever_the_order() {
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median([]), None);
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
}
