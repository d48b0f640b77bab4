//! Latencies of one sample, or of several merged, at a tenth of a nanosecond.

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use serde::Serialize;

/// A cache line takes some 60 ns: whole nanoseconds would round that by 1%.
const STEPS_PER_NS: f64 = 10.0;
const LATENCY_NS_MAX: f64 = 1e12;

/// How often each latency occurred.
#[derive(Clone, Debug)]
pub struct Latencies {
    counts: Histogram<u64>,
    max_ns: f64,
}

/// What a report says of one distribution of latencies.
#[derive(Clone, Debug, Serialize)]
pub struct Quantiles {
    /// Median.
    pub p50_ns: f64,
    /// 99% took at most this.
    pub p99_ns: f64,
    /// 99.9% took at most this.
    pub p999_ns: f64,
    /// The longest.
    pub max_ns: f64,
    /// How many operations there were.
    pub samples: u64,
}

impl Latencies {
    /// Without any yet.
    ///
    /// # Errors
    /// Without memory for the counts.
    pub fn new() -> Result<Self> {
        let counts =
            Histogram::new_with_bounds(1, (LATENCY_NS_MAX * STEPS_PER_NS) as u64, 3).context("making a histogram")?;
        Ok(Self { counts, max_ns: 0.0 })
    }

    /// Adds `count` operations that took `ns` each.
    pub fn add(&mut self, ns: f64, count: u64) {
        let steps = (ns.clamp(0.0, LATENCY_NS_MAX) * STEPS_PER_NS).round().max(1.0);
        self.counts.saturating_record_n(steps as u64, count);
        self.max_ns = self.max_ns.max(ns);
    }

    /// The exact maximum, where it is known better than its bucket.
    pub fn set_max(&mut self, ns: f64) {
        self.max_ns = ns;
    }

    /// Adds all that `other` counted.
    ///
    /// # Errors
    /// Never for histograms made here, which all have the same bounds.
    pub fn merge(&mut self, other: &Self) -> Result<()> {
        self.counts.add(&other.counts).context("merging histograms")?;
        self.max_ns = self.max_ns.max(other.max_ns);
        Ok(())
    }

    /// How many operations were counted.
    pub fn samples(&self) -> u64 {
        self.counts.len()
    }

    /// What the share `quantile` (0 to 1) of operations took at most, in nanoseconds.
    pub fn quantile_ns(&self, quantile: f64) -> f64 {
        // A bucket answers with its upper edge, which may lie above the exact maximum.
        (self.counts.value_at_quantile(quantile) as f64 / STEPS_PER_NS).min(self.max_ns)
    }

    /// Median, tail and maximum.
    pub fn quantiles(&self) -> Quantiles {
        Quantiles {
            p50_ns: self.quantile_ns(0.5),
            p99_ns: self.quantile_ns(0.99),
            p999_ns: self.quantile_ns(0.999),
            max_ns: self.max_ns,
            samples: self.samples(),
        }
    }

    /// How often each latency occurred: (ns, count).
    pub fn counts(&self) -> impl Iterator<Item = (f64, u64)> {
        self.counts
            .iter_recorded()
            .map(|step| (step.value_iterated_to() as f64 / STEPS_PER_NS, step.count_since_last_iteration()))
    }

    /// The longest.
    pub fn max_ns(&self) -> f64 {
        self.max_ns
    }

    /// The points of the cumulative distribution: (ns, share of operations at or below it).
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
    fn quantiles_find_the_tail() {
        let mut latencies = Latencies::new().unwrap();
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
    fn merging_is_adding_all_operations_to_one() {
        let mut first = Latencies::new().unwrap();
        first.add(100.0, 3);
        let mut second = Latencies::new().unwrap();
        second.add(200.0, 5);
        second.set_max(201.5);
        first.merge(&second).unwrap();
        assert_eq!(first.samples(), 8);
        close(first.quantile_ns(0.5), 200.0);
        assert_eq!(first.quantiles().max_ns, 201.5);
    }

    #[test]
    fn cumulative_rises_to_one() {
        let mut latencies = Latencies::new().unwrap();
        latencies.add(10.0, 1);
        latencies.add(20.0, 3);
        let points = latencies.cumulative();
        assert_eq!(points.len(), 2);
        assert_eq!(points[0].1, 0.25);
        assert_eq!(points[1].1, 1.0);
    }

    #[test]
    fn absurd_latencies_are_kept_inside_the_range() {
        let mut latencies = Latencies::new().unwrap();
        latencies.add(-1.0, 1);
        latencies.add(f64::INFINITY, 1);
        assert_eq!(latencies.samples(), 2);
    }
}
