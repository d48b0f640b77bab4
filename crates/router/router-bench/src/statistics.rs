//! Medians, best values and quantiles of samples.

use serde::Serialize;
pub use stats::median;

/// The quantiles of a latency distribution in a report, in microseconds. *Measured.*
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Quantiles {
    /// The median.
    pub p50_us: f64,
    /// The 99th percentile.
    pub p99_us: f64,
    /// The 99.9th percentile.
    pub p999_us: f64,
    /// The maximum.
    pub max_us: f64,
    /// The number of samples.
    pub samples: usize,
}

impl Quantiles {
    /// Returns the quantiles of times in ns, in any order; zeros without samples.
    pub fn of(samples_ns: &mut [u64]) -> Quantiles {
        samples_ns.sort_unstable();
        let at = |share| stats::nearest_rank(samples_ns, share).map_or(0.0, |ns| ns as f64 / 1000.0);
        Quantiles { p50_us: at(0.5), p99_us: at(0.99), p999_us: at(0.999), max_us: at(1.0), samples: samples_ns.len() }
    }
}

/// A figure of several rounds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Rounds {
    /// The median.
    pub median: f64,
    /// The best value, which is closest to an otherwise idle machine.
    pub best: f64,
}

impl Rounds {
    /// Returns the figure of rates, of which the highest is the best. Panics without values.
    pub fn of_rates(mut values: Vec<f64>) -> Rounds {
        values.sort_unstable_by(f64::total_cmp);
        Rounds { median: values[values.len() / 2], best: values[values.len() - 1] }
    }

    /// Returns the figure of times, of which the shortest is the best. Panics without values.
    pub fn of_times(mut values: Vec<f64>) -> Rounds {
        values.sort_unstable_by(f64::total_cmp);
        Rounds { median: values[values.len() / 2], best: values[0] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_of_the_samples() {
        let mut samples: Vec<u64> = (1..=1000).rev().map(|us| us * 1000).collect();
        let found = Quantiles::of(&mut samples);
        assert_eq!((found.p50_us, found.p99_us, found.p999_us, found.max_us), (500.0, 990.0, 999.0, 1000.0));
        assert_eq!(Quantiles::of(&mut []), Quantiles::default());
        assert_eq!(Quantiles::of(&mut [7000]).p99_us, 7.0);
    }
}
