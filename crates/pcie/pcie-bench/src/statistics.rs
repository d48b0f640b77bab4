//! Summarises the latencies of a test.

use pcie::result::Latency;
use stats::Latencies;

use crate::device::Timer;
use crate::error::{Error, Result};

/// Share of samples that a trimmed average omits at each end.
const TRIMMED_SHARE: f64 = 0.001;

/// Records latencies one by one in bounded memory, unless the raw samples are kept.
pub struct Recorder {
    latencies: Latencies,
    sum_ns: f64,
    min_ns: f64,
    max_ns: f64,
    raw_ns: Option<Vec<f64>>,
}

impl Recorder {
    /// Creates a recorder; with `raw` it keeps every sample.
    pub fn new(raw: bool) -> Self {
        let raw_ns = raw.then(Vec::new);
        Self { latencies: Latencies::new(), sum_ns: 0.0, min_ns: f64::INFINITY, max_ns: 0.0, raw_ns }
    }

    /// Adds a sample; outliers are not discarded.
    pub fn add(&mut self, ns: f64) {
        self.latencies.add(ns, 1);
        self.sum_ns += ns;
        self.min_ns = self.min_ns.min(ns);
        self.max_ns = self.max_ns.max(ns);
        if let Some(raw_ns) = &mut self.raw_ns {
            raw_ns.push(ns);
        }
    }

    /// Returns the figures of all samples.
    ///
    /// # Errors
    /// There is no sample.
    pub fn finish(self, timer: Timer) -> Result<Latency> {
        if self.latencies.samples() == 0 {
            return Error::failed("the device took no sample");
        }
        let cdf = self.latencies.cumulative();
        // A histogram returns the upper edge of a bucket, whereas the extremes are known exactly.
        let quantile_ns = |quantile| self.latencies.quantile_ns(quantile).clamp(self.min_ns, self.max_ns);
        Ok(Latency {
            average_ns: self.sum_ns / self.latencies.samples() as f64,
            trimmed_average_ns: Some(trimmed_average(&cdf).clamp(self.min_ns, self.max_ns)),
            min_ns: self.min_ns,
            p50_ns: quantile_ns(0.5),
            p95_ns: quantile_ns(0.95),
            p99_ns: Some(quantile_ns(0.99)),
            p999_ns: quantile_ns(0.999),
            max_ns: self.max_ns,
            timer_cost_ns: timer.cost_ns,
            timer_step_ns: timer.step_ns,
            cdf,
            raw_ns: self.raw_ns.unwrap_or_default(),
        })
    }
}

/// Returns the mean of a distribution without [`TRIMMED_SHARE`] at each end.
pub fn trimmed_average(cdf: &[(f64, f64)]) -> f64 {
    let (from, to) = (TRIMMED_SHARE, 1.0 - TRIMMED_SHARE);
    let mut below = 0.0_f64;
    let mut sum = 0.0;
    for (ns, share) in cdf {
        sum += ns * (share.min(to) - below.max(from)).max(0.0);
        below = *share;
    }
    sum / (to - from)
}

/// Returns the smallest latency that at least the share `quantile` of a distribution does not exceed.
pub fn quantile_of_cdf(cdf: &[(f64, f64)], quantile: f64) -> Option<f64> {
    cdf.iter().find(|(_, share)| *share >= quantile).map(|(ns, _)| *ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(samples: &[(f64, usize)], raw: bool) -> Latency {
        let mut recorder = Recorder::new(raw);
        samples.iter().for_each(|(ns, count)| (0..*count).for_each(|_| recorder.add(*ns)));
        recorder.finish(Timer { cost_ns: 20.0, step_ns: 0.5 }).unwrap()
    }

    fn close(actual: f64, expected: f64) {
        assert!((actual - expected).abs() <= expected * 0.002 + 0.1, "{actual} is not {expected}");
    }

    #[test]
    fn the_average_includes_outliers_and_the_trimmed_average_does_not() {
        let latency = recorded(&[(600.0, 9995), (1_000_000.0, 5)], false);
        close(latency.average_ns, 1099.7);
        close(latency.trimmed_average_ns.unwrap(), 600.0);
        assert_eq!((latency.min_ns, latency.max_ns), (600.0, 1_000_000.0));
        close(latency.p999_ns, 600.0);
        assert_eq!((latency.timer_cost_ns, latency.timer_step_ns), (20.0, 0.5));
    }

    #[test]
    fn trimming_can_omit_a_part_of_a_bucket() {
        close(trimmed_average(&[(100.0, 0.5), (200.0, 1.0)]), 150.0);
        close(trimmed_average(&[(0.0, 0.001), (100.0, 0.999), (9e9, 1.0)]), 100.0);
    }

    #[test]
    fn quantiles_are_between_the_extremes() {
        let latency = recorded(&[(100.0, 94), (200.0, 4), (300.0, 2)], false);
        close(latency.p50_ns, 100.0);
        close(latency.p95_ns, 200.0);
        close(latency.p99_ns.unwrap(), 300.0);
        let one = recorded(&[(123.456, 1)], false);
        assert_eq!([one.min_ns, one.p50_ns, one.p95_ns, one.p999_ns, one.max_ns], [123.456; 5]);
        assert_eq!(quantile_of_cdf(&latency.cdf, 0.95).map(f64::round), Some(200.0));
        assert_eq!(quantile_of_cdf(&[], 0.5), None);
    }

    #[test]
    fn raw_samples_are_kept_in_order_when_asked_for() {
        assert_eq!(recorded(&[(3.0, 1), (1.0, 2)], true).raw_ns, [3.0, 1.0, 1.0]);
        assert!(recorded(&[(3.0, 1)], false).raw_ns.is_empty());
    }

    #[test]
    fn no_sample_is_an_error() {
        assert!(Recorder::new(false).finish(Timer::default()).is_err());
    }
}
