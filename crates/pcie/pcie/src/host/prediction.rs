//! What a prediction rests on, and how far it may be off.

use serde::Deserialize;

use crate::test::{Iommu, Test};

/// A statement about a system whose parameters do not come from measurements of it.
///
/// The errors are in percent of the predicted figure, for a class of tests each; absent ones are not known.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prediction {
    /// The sources of the parameters, in a phrase.
    pub rests_on: String,
    /// Error of latencies.
    #[serde(default)]
    pub latency_error_percent: Option<f64>,
    /// Error of bandwidths without address translation.
    #[serde(default)]
    pub bandwidth_error_percent: Option<f64>,
    /// Error of latencies and bandwidths with address translation.
    #[serde(default)]
    pub iommu_error_percent: Option<f64>,
}

impl Prediction {
    /// Returns a prediction whose error is not known.
    pub fn unchecked(rests_on: String) -> Self {
        Self { rests_on, latency_error_percent: None, bandwidth_error_percent: None, iommu_error_percent: None }
    }

    /// Returns the stated error of the figures of `test`, in percent of them.
    pub fn error_percent(&self, test: &Test) -> Option<f64> {
        if test.iommu != Iommu::Off {
            self.iommu_error_percent
        } else if test.test.is_latency() {
            self.latency_error_percent
        } else {
            self.bandwidth_error_percent
        }
    }
}
