//! The published experiments: goodput by queue pairs and by loss, latency by size, slowdown of flows.
//!
//! Each experiment is a struct of a few parameters. The same parameters and seed give the same result, byte for byte.

mod error;
mod fct;
mod latency;
mod stream;

pub use error::ExperimentError;
pub use fct::{FctExperiment, FctResult, Observers};
pub use latency::{LatencyExperiment, LatencyResult};
pub use stream::{QpOrder, StreamExperiment, StreamResult};

#[cfg(test)]
mod tests;
