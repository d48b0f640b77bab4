//! Why an experiment gives no result.

use thiserror::Error;

use crate::workload::WorkloadError;

/// An experiment that cannot run, or whose result would be wrong.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ExperimentError {
    /// A parameter is out of its range.
    #[error("{what} {value}; take {least} to {most}")]
    Range {
        /// The parameter's name.
        what: &'static str,
        /// The value given.
        value: f64,
        /// The smallest value allowed.
        least: f64,
        /// The largest value allowed.
        most: f64,
    },
    /// The network cannot carry the workload.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// The NIC profile is invalid.
    #[error(transparent)]
    Profile(#[from] rnic::nic::ProfileError),
    /// Requests completed with an error, so the figures would miss the bytes that they carried.
    #[error("{failed} requests failed, of {flows} flows; lower the loss, or give senders more retries")]
    Failed {
        /// Number of requests that failed.
        failed: u64,
        /// Number of flows.
        flows: usize,
    },
    /// What observed the run cannot write.
    #[error("cannot write {what}: {reason}; free space, or name another file")]
    Output {
        /// What was to be written.
        what: &'static str,
        /// The error text of the system.
        reason: String,
    },
}

impl ExperimentError {
    pub(super) fn output(what: &'static str) -> impl Fn(std::io::Error) -> Self {
        move |error| Self::Output { what, reason: error.to_string() }
    }
}

/// Fails with [`ExperimentError::Range`] unless `least <= value <= most`.
pub(super) fn in_range(what: &'static str, value: f64, least: f64, most: f64) -> Result<(), ExperimentError> {
    if value >= least && value <= most { Ok(()) } else { Err(ExperimentError::Range { what, value, least, most }) }
}
