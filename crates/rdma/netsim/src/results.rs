//! Figures of a run.

use serde::Serialize;
use sim::Span;

use crate::endpoint::Endpoint;
use crate::ideal::IdealFct;
use crate::network::Network;

/// Bins of sizes: each holds 5% of the flows.
pub const BINS: usize = 20;

/// How much longer flows took than alone in the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct SummaryStats {
    /// The mean of all.
    pub mean: f64,
    /// Half of them were not slower.
    pub p50: f64,
    /// 95% were not slower.
    pub p95: f64,
    /// 99% were not slower.
    pub p99: f64,
    /// 99.9% were not slower.
    pub p999: f64,
    /// The slowest.
    pub max: f64,
}

/// Flows of like size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SizeBin {
    /// Of all flows, so many percent are smaller than these.
    pub percent: f64,
    /// The largest of them.
    pub bytes_max: u64,
    /// How many.
    pub flows: usize,
    /// What they suffered.
    #[serde(flatten)]
    pub slowdown: SummaryStats,
}

/// A flow that has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlowResult {
    /// Its size.
    pub bytes: u64,
    /// How long it took.
    pub span: Span,
    /// By how much longer than alone.
    pub slowdown: f64,
}

impl SummaryStats {
    /// Of these values, in any order; all zero of none.
    pub fn of(values: &mut [f64]) -> Self {
        values.sort_unstable_by(f64::total_cmp);
        let Some(max) = values.last().copied() else { return Self::default() };
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let at = |quantile| percentile(values, quantile);
        Self { mean, p50: at(0.5), p95: at(0.95), p99: at(0.99), p999: at(0.999), max }
    }
}

/// The smallest of sorted values that is not exceeded by this share of them.
///
/// # Panics
/// Of no values.
pub fn percentile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

/// The flows of a run that have ended, in that order.
pub fn flow_results<E: Endpoint>(network: &Network<E>, ideal: &IdealFct<'_>) -> Vec<FlowResult> {
    let of = |end: &crate::network::FinishedFlow| {
        let flow = &network.flows()[end.id.0 as usize];
        let span = end.at.since(flow.start);
        FlowResult { bytes: flow.bytes, span, slowdown: span.ps() as f64 / ideal.fct(flow).ps() as f64 }
    };
    network.finished_flows().iter().map(of).collect()
}

/// Flows by size, 5% of them a bin; fewer bins of fewer flows.
pub fn size_bins(ended: &[FlowResult]) -> Vec<SizeBin> {
    let mut sorted = ended.to_vec();
    sorted.sort_by_key(|flow| flow.bytes);
    let bin = |index: usize| {
        let flows = &sorted[index * sorted.len() / BINS..(index + 1) * sorted.len() / BINS];
        let last = flows.last()?;
        let slowdown = SummaryStats::of(&mut flows.iter().map(|flow| flow.slowdown).collect::<Vec<_>>());
        let percent = 100.0 * index as f64 / BINS as f64;
        Some(SizeBin { percent, bytes_max: last.bytes, flows: flows.len(), slowdown })
    };
    (0..BINS).filter_map(bin).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_met() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(
            [0.0, 0.5, 0.95, 0.99, 0.991, 1.0].map(|share| percentile(&values, share)),
            [1.0, 50.0, 95.0, 99.0, 100.0, 100.0]
        );
        let slowdown = SummaryStats::of(&mut [3.0, 1.0, 2.0]);
        assert_eq!((slowdown.mean, slowdown.p50, slowdown.max), (2.0, 2.0, 3.0));
        assert_eq!(SummaryStats::of(&mut []), SummaryStats::default());
    }

    #[test]
    fn every_flow_is_in_one_bin_and_bins_go_by_size() {
        let flow = |bytes| FlowResult { bytes, span: Span::ZERO, slowdown: bytes as f64 };
        let flows: Vec<FlowResult> = (1..=1013).rev().map(flow).collect();
        let bins = size_bins(&flows);
        assert_eq!((bins.len(), bins.iter().map(|bin| bin.flows).sum::<usize>()), (20, 1013));
        assert!(bins.is_sorted_by_key(|bin| bin.bytes_max) && bins[19].slowdown.max == 1013.0);
        assert_eq!(super::size_bins(&flows[..3]).len(), 3);
    }
}
