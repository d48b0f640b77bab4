//! Why a proxy ends.

use control::ChannelError;
use rustix::io::Errno;
use thiserror::Error;

/// Why a proxy ended.
#[derive(Debug, Error)]
pub enum DriverError {
    /// The socket to the monitor failed.
    #[error("the monitor's socket: {0}; start the proxy by crosslane up")]
    Channel(#[from] ChannelError),
    /// The monitor sent a message that is invalid, or out of order.
    #[error("the monitor sent {0}; start monitor and proxy from one build")]
    Order(&'static str),
    /// The rack directory, or a socket in it, cannot be used.
    #[error("rack directory {path}: {errno}")]
    Rack {
        /// The path that failed.
        path: String,
        /// The error of the system call.
        errno: Errno,
    },
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] fabric::device::DeviceError),
    /// A partition is too small for a ring.
    #[error(
        "windows of {window_bytes} bytes are too small for {partitions} partitions: ask for fewer, or larger windows"
    )]
    Windows {
        /// Bytes of a window.
        window_bytes: usize,
        /// Partitions of the rack file.
        partitions: usize,
    },
    /// The page by which programs and proxies share the rate of a modelled link cannot be mapped.
    #[error("cannot map what programs share of a modelled link: {0}; set trust = \"proxy\"")]
    Pacer(Errno),
    /// A thread, or a descriptor that it needs, cannot be created.
    #[error("cannot start a thread: {0}")]
    Thread(Errno),
}
