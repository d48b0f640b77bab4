//! Errors that keep a monitor from starting or continuing.

use fabric::device::DeviceError;
use rustix::io::Errno;
use thiserror::Error;

/// Why a monitor cannot start, or has to end.
#[derive(Debug, Error)]
pub enum MonitorError {
    /// Another monitor runs this node.
    #[error("node '{node}' is up already (process {pid}); end it with 'crosslane down'")]
    AlreadyRunning {
        /// Name of the node.
        node: String,
        /// Process number of the other monitor, if it is known.
        pid: String,
    },
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A system call failed.
    #[error("{what}: {error}")]
    System {
        /// The operation or file.
        what: String,
        /// The error of the kernel.
        error: Errno,
    },
    /// Metrics cannot be served.
    #[error("{0}")]
    Metrics(String),
    /// The node's lease cannot be acquired from etcd.
    #[error(transparent)]
    Etcd(#[from] etcd::EtcdError),
}

pub(crate) fn system_error(what: impl Into<String>) -> impl FnOnce(Errno) -> MonitorError {
    move |error| MonitorError::System { what: what.into(), error }
}
