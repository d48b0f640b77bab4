//! The published experiments: goodput by queue pairs, by loss and over several paths, latency
//! and message rate by size, slowdown of flows.
//!
//! Each experiment is a struct of a few parameters. The same parameters and seed give the same result, byte for byte.

mod error;
mod fct;
mod latency;
mod message_rate;
mod spray;
mod stream;

pub use error::ExperimentError;
pub use fct::{FctExperiment, FctResult, Observers};
pub use latency::{LatencyExperiment, LatencyResult};
pub use message_rate::{PIPELINE_MOPS, RateExperiment, RateLimit, RateResult};
pub use spray::{PathUse, SprayExperiment, SprayResult};
pub use stream::{MessageDepth, QpOrder, StreamExperiment, StreamResult};

#[cfg(test)]
mod tests;
