//! Compares two sets of results.

use pcie::result::{Outcome, PredictionNote, Provenance, TestResult};
use pcie::test::Test;
use serde::Serialize;

/// One figure of a test that is in both sets.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// The test; samples and seed are those of the first set.
    #[serde(flatten)]
    pub test: Test,
    /// Device of the first set.
    pub device_a: String,
    /// Device of the second set.
    pub device_b: String,
    /// Where the value of the first set comes from.
    pub provenance_a: Provenance,
    /// Where the value of the second set comes from.
    pub provenance_b: Provenance,
    /// What the value of the first set rests on, if it is a prediction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prediction_a: Option<PredictionNote>,
    /// What the value of the second set rests on, if it is a prediction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prediction_b: Option<PredictionNote>,
    /// Name of the figure, as in the results: `p50_ns`, `gbps` and so on.
    pub figure: &'static str,
    /// Value of the first set.
    pub a: f64,
    /// Value of the second set.
    pub b: f64,
    /// Second minus first, in the unit of the figure.
    pub difference: f64,
    /// Difference in percent of the first value; absent if that is zero.
    pub percent: Option<f64>,
}

/// The comparison of two sets.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Comparison {
    /// Figures of the tests that are in both sets, in the order of the first.
    pub differences: Vec<Difference>,
    /// Number of results of the first set whose test is not in the second.
    pub only_a: usize,
    /// Number of results of the second set whose test is not in the first.
    pub only_b: usize,
}

/// Compares every result of `a` with every result of `b` for the same test.
pub fn compare(a: &[TestResult], b: &[TestResult]) -> Comparison {
    let mut comparison = Comparison::default();
    let mut is_matched = vec![false; b.len()];
    for one in a {
        let mut is_only = true;
        for (other, matched) in b.iter().zip(&mut is_matched).filter(|(other, _)| is_same(&one.test, &other.test)) {
            (is_only, *matched) = (false, true);
            comparison.differences.extend(differences(one, other));
        }
        comparison.only_a += usize::from(is_only);
    }
    comparison.only_b = is_matched.into_iter().filter(|matched| !matched).count();
    comparison
}

/// Returns whether two tests are equal apart from samples and seed.
fn is_same(one: &Test, other: &Test) -> bool {
    Test { samples: one.samples, seed: one.seed, ..other.clone() } == *one
}

fn differences(one: &TestResult, other: &TestResult) -> Vec<Difference> {
    let pairs = match (&one.outcome, &other.outcome) {
        (Outcome::Latency(one), Outcome::Latency(other)) => vec![
            ("average_ns", Some(one.average_ns), Some(other.average_ns)),
            ("trimmed_average_ns", one.trimmed_average_ns, other.trimmed_average_ns),
            ("min_ns", Some(one.min_ns), Some(other.min_ns)),
            ("p50_ns", Some(one.p50_ns), Some(other.p50_ns)),
            ("p95_ns", Some(one.p95_ns), Some(other.p95_ns)),
            ("p99_ns", one.p99_ns, other.p99_ns),
            ("p999_ns", Some(one.p999_ns), Some(other.p999_ns)),
            ("max_ns", Some(one.max_ns), Some(other.max_ns)),
        ],
        (Outcome::Bandwidth(one), Outcome::Bandwidth(other)) => {
            vec![("gbps", Some(one.gbps), Some(other.gbps))]
        }
        _ => Vec::new(),
    };
    let difference = |(figure, a, b): (&'static str, Option<f64>, Option<f64>)| {
        let (a, b) = (a?, b?);
        Some(Difference {
            test: one.test.clone(),
            device_a: one.device.clone(),
            device_b: other.device.clone(),
            provenance_a: one.provenance,
            provenance_b: other.provenance,
            prediction_a: one.prediction.clone(),
            prediction_b: other.prediction.clone(),
            figure,
            a,
            b,
            difference: b - a,
            percent: (a != 0.0).then(|| (b - a) / a * 100.0),
        })
    };
    pairs.into_iter().filter_map(difference).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{bandwidth, latency};

    #[test]
    fn results_of_the_same_test_are_compared_regardless_of_samples_and_seed() {
        let a = [bandwidth("hsw", 64, 20.0), bandwidth("hsw", 128, 40.0)];
        let mut b = [bandwidth("sim:hsw", 64, 21.0), bandwidth("sim:hsw", 256, 50.0)];
        (b[0].test.samples, b[0].test.seed) = (5, 6);
        let comparison = compare(&a, &b);
        let [only] = &comparison.differences[..] else { panic!("{comparison:?}") };
        assert_eq!((only.figure, only.a, only.b, only.difference, only.percent), ("gbps", 20.0, 21.0, 1.0, Some(5.0)));
        assert_eq!((comparison.only_a, comparison.only_b), (1, 1));
        assert_eq!((only.device_a.as_str(), only.device_b.as_str()), ("hsw", "sim:hsw"));
    }

    #[test]
    fn every_latency_figure_that_both_sets_have_is_compared() {
        let (a, mut b) = (latency("hsw", 64, 600.0), latency("sim:hsw", 64, 606.0));
        let Outcome::Latency(second) = &mut b.outcome else { panic!("a latency") };
        second.p99_ns = None;
        let figures: Vec<_> =
            compare(&[a], &[b]).differences.iter().map(|found| (found.figure, found.percent)).collect();
        assert_eq!(figures.len(), 7);
        assert!(figures.iter().all(|(figure, percent)| *figure != "p99_ns" && percent.unwrap().round() == 1.0));
    }
}
