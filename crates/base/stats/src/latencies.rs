//! A histogram of latencies with a resolution of a tenth of a nanosecond.

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::median::median;

/// Steps of the histogram, a tenth of a nanosecond: a cache line takes some 60 ns, which whole nanoseconds would round
/// by 1%.
const STEPS_PER_NS: f64 = 10.0;
/// Largest latency of the histogram: 1000 s.
const LATENCY_NS_MAX: f64 = 1e12;

/// A histogram of latencies.
#[derive(Clone, Debug)]
pub struct Latencies {
    counts: Histogram<u64>,
    max_ns: f64,
}

/// The quantiles of a distribution of latencies, for reports.
#[derive(Clone, Debug, Serialize)]
pub struct Quantiles {
    /// Median.
    pub p50_ns: f64,
    /// 99th percentile.
    pub p99_ns: f64,
    /// 99.9th percentile.
    pub p999_ns: f64,
    /// Maximum.
    pub max_ns: f64,
    /// Number of operations.
    pub samples: u64,
}

impl Quantiles {
    /// Returns the median of each quantile over `rounds`; maximum and count are those of all rounds. `None` without
    /// rounds.
    pub fn over_rounds<'a>(rounds: impl IntoIterator<Item = &'a Latencies>) -> Option<Self> {
        let rounds: Vec<Self> = rounds.into_iter().map(Latencies::quantiles).collect();
        Some(Self {
            p50_ns: median(rounds.iter().map(|round| round.p50_ns))?,
            p99_ns: median(rounds.iter().map(|round| round.p99_ns))?,
            p999_ns: median(rounds.iter().map(|round| round.p999_ns))?,
            max_ns: rounds.iter().map(|round| round.max_ns).fold(0.0, f64::max),
            samples: rounds.iter().map(|round| round.samples).sum(),
        })
    }
}

impl Default for Latencies {
    fn default() -> Self {
        Self::new()
    }
}

impl Latencies {
    /// Returns an empty histogram.
    pub fn new() -> Self {
        let max = (LATENCY_NS_MAX * STEPS_PER_NS) as u64;
        Self { counts: Histogram::new_with_bounds(1, max, 3).expect("the bounds are constants"), max_ns: 0.0 }
    }

    /// Adds `count` operations that took `ns` each.
    pub fn add(&mut self, ns: f64, count: u64) {
        let steps = (ns.clamp(0.0, LATENCY_NS_MAX) * STEPS_PER_NS).round().max(1.0);
        self.counts.saturating_record_n(steps as u64, count);
        self.max_ns = self.max_ns.max(ns);
    }

    /// Sets the maximum, if it is known more exactly than by its bucket.
    pub fn set_max(&mut self, ns: f64) {
        self.max_ns = ns;
    }

    /// Adds all operations of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.counts.add(&other.counts).expect("all histograms have the same bounds");
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// Returns the number of operations.
    pub fn samples(&self) -> u64 {
        self.counts.len()
    }

    /// Returns the latency that the share `quantile` (0 to 1) of operations did not exceed, in nanoseconds.
    pub fn quantile_ns(&self, quantile: f64) -> f64 {
        // A bucket reports its upper edge, which may be above the exact maximum.
        (self.counts.value_at_quantile(quantile) as f64 / STEPS_PER_NS).min(self.max_ns)
    }

    /// Returns median, tail and maximum.
    pub fn quantiles(&self) -> Quantiles {
        Quantiles {
            p50_ns: self.quantile_ns(0.5),
            p99_ns: self.quantile_ns(0.99),
            p999_ns: self.quantile_ns(0.999),
            max_ns: self.max_ns,
            samples: self.samples(),
        }
    }

    /// Returns (ns, count) of each recorded latency.
    pub fn counts(&self) -> impl Iterator<Item = (f64, u64)> {
        self.counts
            .iter_recorded()
            .map(|step| (step.value_iterated_to() as f64 / STEPS_PER_NS, step.count_since_last_iteration()))
    }

    /// Returns the maximum.
    pub fn max_ns(&self) -> f64 {
        self.max_ns
    }

    /// Returns the points of the cumulative distribution: (ns, share of operations at or below it).
    pub fn cumulative(&self) -> Vec<(f64, f64)> {
        let total = self.samples().max(1) as f64;
        let mut below = 0;
        let mut points = Vec::new();
        for step in self.counts.iter_recorded() {
            below += step.count_since_last_iteration();
            points.push((step.value_iterated_to() as f64 / STEPS_PER_NS, below as f64 / total));
        }
        points
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(actual: f64, expected: f64) {
        assert!((actual - expected).abs() <= expected * 0.002 + 0.1, "{actual} is not {expected}");
    }

    #[test]
    fn quantiles_show_the_tail() {
        let mut latencies = Latencies::new();
        latencies.add(83.4, 9_890);
        latencies.add(1_000.0, 100);
        latencies.add(50_000.0, 10);
        let found = latencies.quantiles();
        close(found.p50_ns, 83.4);
        close(found.p99_ns, 1_000.0);
        close(found.p999_ns, 1_000.0);
        close(found.max_ns, 50_000.0);
        assert_eq!(found.samples, 10_000);
        close(latencies.quantile_ns(0.9995), 50_000.0);
    }

    #[test]
    fn rounds_have_the_median_of_each_quantile_and_the_maximum_of_all() {
        let rounds = [100.0, 900.0, 200.0].map(|ns| {
            let mut round = Latencies::new();
            round.add(ns, 10);
            round
        });
        let found = Quantiles::over_rounds(&rounds).unwrap();
        close(found.p50_ns, 200.0);
        close(found.max_ns, 900.0);
        assert_eq!(found.samples, 30);
        assert!(Quantiles::over_rounds(&[]).is_none());
    }

    #[test]
    fn merging_is_adding_all_operations_to_one() {
        let mut first = Latencies::new();
        first.add(100.0, 3);
        let mut second = Latencies::new();
        second.add(200.0, 5);
        second.set_max(201.5);
        first.merge(&second);
        assert_eq!(first.samples(), 8);
        close(first.quantile_ns(0.5), 200.0);
        assert_eq!(first.quantiles().max_ns, 201.5);
    }

    #[test]
    fn cumulative_rises_to_one() {
        let mut latencies = Latencies::new();
        latencies.add(10.0, 1);
        latencies.add(20.0, 3);
        let points = latencies.cumulative();
        assert_eq!(points.len(), 2);
        assert_eq!(points[0].1, 0.25);
        assert_eq!(points[1].1, 1.0);
    }

    #[test]
    fn latencies_out_of_range_are_clamped() {
        let mut latencies = Latencies::new();
        latencies.add(-1.0, 1);
        latencies.add(f64::INFINITY, 1);
        assert_eq!(latencies.samples(), 2);
    }
}
