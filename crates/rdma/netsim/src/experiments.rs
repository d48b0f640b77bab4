//! The questions that were published with answers: goodput by queue pairs and by loss, latency by size, slowdown of
//! flows. Each is a plan of a few numbers; the same plan and seed give the same answer to the byte.

mod fct;
mod latency;
mod stream;

use serde::Serialize;
use thiserror::Error;

use crate::workload::WorkloadError;

pub use fct::{FctExperiment, FctResult};
pub use latency::{LatencyExperiment, LatencyResult};
pub use stream::{QpOrder, StreamExperiment, StreamResult};

/// What a figure is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Provenance {
    /// By a clock, on this machine.
    Measured,
    /// By the simulator.
    Modelled,
    /// By others.
    Published,
}

/// A question that makes no sense.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ExperimentError {
    /// A number out of its range.
    #[error("{what} {value}; take {least} to {most}")]
    Range {
        /// Of what.
        what: &'static str,
        /// What was asked for.
        value: f64,
        /// The least.
        least: f64,
        /// The most.
        most: f64,
    },
    /// A workload that the network cannot have.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// A NIC that there cannot be.
    #[error(transparent)]
    Profile(#[from] rnic::nic::ProfileError),
    /// Requests were completed with an error: what they carried is not in the figures.
    #[error("{failed} requests failed, of {flows} flows; lower the loss, or give senders more retries")]
    Failed {
        /// So many.
        failed: u64,
        /// Of so many.
        flows: usize,
    },
}

fn in_range(what: &'static str, value: f64, least: f64, most: f64) -> Result<(), ExperimentError> {
    if value >= least && value <= most { Ok(()) } else { Err(ExperimentError::Range { what, value, least, most }) }
}

#[cfg(test)]
mod tests;
