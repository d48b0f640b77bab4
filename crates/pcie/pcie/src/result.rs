//! The result of a test, in one versioned form for models, simulations, measurements and published data.

use serde::{Deserialize, Serialize};

use crate::link::Link;
use crate::test::Test;

/// Name and version of the JSON form. New optional fields keep the version; any other change increments it.
pub const SCHEMA: &str = "crosslane-pcie/1";

/// Where a figure comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Provenance {
    /// Measured on a real device.
    Measured,
    /// Calculated or simulated.
    Modelled,
    /// Published by others.
    Published,
}

/// The result of one test.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TestResult {
    /// [`SCHEMA`].
    pub schema: String,
    /// Where the figures come from.
    pub provenance: Provenance,
    /// Name of the device on the command line: `sim:hsw`, `memory`, `pci:0000:00:04.0`, `cuda:0`.
    pub device: String,
    /// Description of host, device and link, as far as known.
    pub description: String,
    /// The link, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<Link>,
    /// What a prediction rests on; absent if the figures are measured, or modelled on a system whose parameters come
    /// from measurements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<PredictionNote>,
    /// The test.
    #[serde(flatten)]
    pub test: Test,
    /// The figures.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// What a predicted figure rests on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PredictionNote {
    /// The sources of the system's parameters, in a phrase.
    pub rests_on: String,
    /// How far this figure may be off, in percent of it; absent if that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_percent: Option<f64>,
}

/// The figures of a test.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Outcome {
    /// Result of a latency test.
    Latency(Latency),
    /// Result of a bandwidth test.
    Bandwidth(Bandwidth),
}

/// A distribution of latencies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Mean of all samples.
    pub average_ns: f64,
    /// Mean without the lowest and the highest 0.1% of samples; some published data do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trimmed_average_ns: Option<f64>,
    /// Smallest.
    pub min_ns: f64,
    /// Median.
    pub p50_ns: f64,
    /// 95% of samples are at most this.
    pub p95_ns: f64,
    /// 99% of samples are at most this; some published data do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_ns: Option<f64>,
    /// 99.9% of samples are at most this.
    pub p999_ns: f64,
    /// Largest; outliers are included.
    pub max_ns: f64,
    /// Cost of reading the timer, already subtracted from every figure.
    #[serde(default)]
    pub timer_cost_ns: f64,
    /// Resolution of the timer.
    #[serde(default)]
    pub timer_step_ns: f64,
    /// Points of the cumulative distribution: nanoseconds, and the share of samples at or below.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cdf: Vec<(f64, f64)>,
    /// Every sample in order, on request.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub raw_ns: Vec<f64>,
}

/// A bandwidth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// Payload in 10^9 bits a second; of a read-and-write test, in each direction.
    pub gbps: f64,
    /// Millions of transfers a second; of a read-and-write test, in each direction.
    pub mtransfers_per_s: f64,
    /// Duration in nanoseconds of the device's clock.
    pub elapsed_ns: f64,
}
