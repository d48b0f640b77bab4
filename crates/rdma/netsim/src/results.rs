//! Results of a run: slowdowns of flows, their distribution, bins by flow size, and the result of each flow.

mod flows;

use serde::Serialize;
use sim::Span;
use stats::nearest_rank;

use crate::endpoint::Endpoint;
use crate::ideal::IdealFct;
use crate::network::Network;

pub use flows::{FLOW_COLUMNS, FlowOutcome, FlowRecord, flow_records, write_flow_records};
pub(crate) use flows::{csv_field, microseconds};

/// Number of bins by flow size: each holds 5% of the flows.
pub const BINS: usize = 20;

/// Fewest values of a 95th, a 99th and a 99.9th percentile: of fewer, the nearest rank is the maximum.
const P95_VALUES_MIN: usize = 20;
const P99_VALUES_MIN: usize = 100;
const P999_VALUES_MIN: usize = 1000;

/// Summary statistics of a set of values. A percentile that too few values define is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct SummaryStats {
    /// The mean.
    pub mean: f64,
    /// The median.
    pub p50: f64,
    /// The 95th percentile of at least 20 values.
    pub p95: Option<f64>,
    /// The 99th percentile of at least 100 values.
    pub p99: Option<f64>,
    /// The 99.9th percentile of at least 1000 values.
    pub p999: Option<f64>,
    /// The maximum.
    pub max: f64,
}

/// The flows of a bin of similar sizes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SizeBin {
    /// Percentage of all flows that are in lower bins.
    pub percent: f64,
    /// Size of the largest flow.
    pub bytes_max: u64,
    /// Number of flows.
    pub flows: usize,
    /// Slowdowns of the flows.
    #[serde(flatten)]
    pub slowdown: SummaryStats,
}

/// The result of a finished flow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlowResult {
    /// Size of the flow.
    pub bytes: u64,
    /// Flow completion time.
    pub fct: Span,
    /// Completion time divided by the ideal completion time.
    pub slowdown: f64,
}

impl SummaryStats {
    /// Computes the statistics of values in any order; zero if there are none.
    pub fn of(values: &mut [f64]) -> Self {
        values.sort_unstable_by(f64::total_cmp);
        let Some(max) = values.last().copied() else { return Self::default() };
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let p50 = nearest_rank(values, 0.5).unwrap_or(max);
        let tail = |share, values_min| nearest_rank(values, share).filter(|_| values.len() >= values_min);
        let (p95, p99) = (tail(0.95, P95_VALUES_MIN), tail(0.99, P99_VALUES_MIN));
        Self { mean, p50, p95, p99, p999: tail(0.999, P999_VALUES_MIN), max }
    }
}

/// Returns the results of a run's finished flows, in the order in which they finished.
pub fn flow_results<E: Endpoint>(network: &Network<E>, ideal: &IdealFct<'_>) -> Vec<FlowResult> {
    let of = |end: &crate::network::FinishedFlow| {
        let flow = &network.flows()[end.id.0 as usize];
        let fct = end.at.since(flow.start);
        FlowResult { bytes: flow.bytes, fct, slowdown: fct.ps() as f64 / ideal.fct(flow).ps() as f64 }
    };
    network.finished_flows().iter().map(of).collect()
}

/// Divides flows by size into bins of 5% of the flows each; flows of one size are all in one bin, which may be larger.
/// Bins without a flow are left out.
pub fn size_bins(ended: &[FlowResult]) -> Vec<SizeBin> {
    let mut sorted = ended.to_vec();
    sorted.sort_by_key(|flow| flow.bytes);
    // The end of a bin moves on to the next size.
    let end = |index: usize| match index * sorted.len() / BINS {
        0 => 0,
        end => sorted.partition_point(|flow| flow.bytes <= sorted[end - 1].bytes),
    };
    let bin = |index: usize| {
        let first = end(index);
        let flows = &sorted[first..end(index + 1)];
        let last = flows.last()?;
        let slowdown = SummaryStats::of(&mut flows.iter().map(|flow| flow.slowdown).collect::<Vec<_>>());
        let percent = 100.0 * first as f64 / sorted.len() as f64;
        Some(SizeBin { percent, bytes_max: last.bytes, flows: flows.len(), slowdown })
    };
    (0..BINS).filter_map(bin).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_statistics_of_unsorted_values_and_of_none() {
        let stats = SummaryStats::of(&mut [3.0, 1.0, 2.0]);
        assert_eq!((stats.mean, stats.p50, stats.max), (2.0, 2.0, 3.0));
        assert_eq!(SummaryStats::of(&mut []), SummaryStats::default());
    }

    #[test]
    fn too_few_values_have_no_tail_percentiles() {
        let of = |values: usize| {
            let stats = SummaryStats::of(&mut (1..=values).map(|value| value as f64).collect::<Vec<_>>());
            (stats.p95, stats.p99, stats.p999)
        };
        assert_eq!(of(19), (None, None, None));
        assert_eq!(of(20), (Some(19.0), None, None));
        assert_eq!(of(99), (Some(95.0), None, None));
        assert_eq!(of(100), (Some(95.0), Some(99.0), None));
        assert_eq!(of(1000), (Some(950.0), Some(990.0), Some(999.0)));
        let json = serde_json::to_value(SummaryStats::of(&mut [1.0; 15])).unwrap();
        assert!(json["p99"].is_null() && json["p50"] == 1.0, "{json}");
    }

    #[test]
    fn every_flow_is_in_one_bin_and_bins_are_ordered_by_size() {
        let flow = |bytes| FlowResult { bytes, fct: Span::ZERO, slowdown: bytes as f64 };
        let flows: Vec<FlowResult> = (1..=1013).rev().map(flow).collect();
        let bins = size_bins(&flows);
        assert_eq!((bins.len(), bins.iter().map(|bin| bin.flows).sum::<usize>()), (20, 1013));
        assert!(bins.is_sorted_by_key(|bin| bin.bytes_max) && bins[19].slowdown.max == 1013.0);
        assert_eq!(super::size_bins(&flows[..3]).len(), 3);
    }

    #[test]
    fn flows_of_one_size_are_in_one_bin() {
        let flow = |bytes| FlowResult { bytes, fct: Span::ZERO, slowdown: 1.0 };
        let counts = |flows: Vec<FlowResult>| {
            size_bins(&flows).iter().map(|bin| (bin.percent, bin.bytes_max, bin.flows)).collect::<Vec<_>>()
        };
        assert_eq!(counts(vec![flow(64); 15]), [(0.0, 64, 15)]);
        let mixed = [vec![flow(1); 30], vec![flow(2); 10], vec![flow(3); 60]].concat();
        assert_eq!(counts(mixed), [(0.0, 1, 30), (30.0, 2, 10), (40.0, 3, 60)]);
    }
}
