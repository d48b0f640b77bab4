//! What a test brought, in one versioned form: models, simulations, measurements and published data look alike.

use serde::{Deserialize, Serialize};

use crate::link::Link;
use crate::test::Test;

/// Name and version of the JSON form. It grows by optional fields; anything else is another version.
pub const SCHEMA: &str = "crosslane-pcie/1";

/// Where a number comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Provenance {
    /// Taken on a real device.
    Measured,
    /// Calculated or simulated.
    Modelled,
    /// Printed by others.
    Published,
}

/// One test's result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TestResult {
    /// [`SCHEMA`].
    pub schema: String,
    /// Where the numbers come from.
    pub provenance: Provenance,
    /// The device as on the command line: `sim:hsw`, `memory`, `pci:0000:00:04.0`, `cuda:0`.
    pub device: String,
    /// Host, device and link in words, as far as known.
    pub description: String,
    /// The link, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<Link>,
    /// What was asked.
    #[serde(flatten)]
    pub test: Test,
    /// What came out.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// What came out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Outcome {
    /// Of a latency test.
    Latency(Latency),
    /// Of a bandwidth test.
    Bandwidth(Bandwidth),
}

/// A distribution of latencies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Mean of all samples.
    pub average_ns: f64,
    /// Mean without the lowest and the highest 0.1% of samples; published data do not always say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trimmed_average_ns: Option<f64>,
    /// Smallest.
    pub min_ns: f64,
    /// Median.
    pub p50_ns: f64,
    /// 95% of samples are at most this.
    pub p95_ns: f64,
    /// 99% of samples are at most this; published data do not always say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_ns: Option<f64>,
    /// 99.9% of samples are at most this.
    pub p999_ns: f64,
    /// Largest; outliers are kept.
    pub max_ns: f64,
    /// What reading the timer costs, already subtracted from every figure.
    #[serde(default)]
    pub timer_cost_ns: f64,
    /// The timer's step.
    #[serde(default)]
    pub timer_step_ns: f64,
    /// Points of the cumulative distribution: nanoseconds, share at or below.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cdf: Vec<(f64, f64)>,
    /// Every sample in order, on request.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub raw_ns: Vec<f64>,
}

/// A rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// Payload in 10^9 bits a second; of a read-and-write test, of each direction.
    pub gbps: f64,
    /// Transfers a second, in millions; of a read-and-write test, of each direction.
    pub mtransfers_per_s: f64,
    /// How long it took, in nanoseconds of the device's clock.
    pub elapsed_ns: f64,
}
