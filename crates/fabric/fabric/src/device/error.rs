//! Errors of a device.

use super::format::{NODES_MAX, VERSION};
use std::{fmt, io};
use volmem::CACHE_LINE_BYTES;

/// Why a device could not be used.
#[derive(Debug)]
pub struct DeviceError {
    /// The device, as the user named it.
    pub device: String,
    /// What is wrong with it.
    pub problem: DeviceProblem,
}

/// What is wrong with a device, or with the configuration it was opened with.
#[derive(Debug)]
pub enum DeviceProblem {
    /// The number of nodes is not from 2 to [`NODES_MAX`].
    Nodes {
        /// Nodes asked for.
        nodes: u8,
    },
    /// The slot is not below the number of nodes.
    Slot {
        /// NodeSlot asked for.
        own: usize,
        /// Nodes of the rack.
        nodes: u8,
    },
    /// The size of a window is not a positive multiple of the cache line, or the windows exceed the address space.
    WindowSize {
        /// Bytes asked for.
        window_bytes: usize,
    },
    /// The memory is too small for the nodes and windows.
    TooSmall {
        /// Bytes of the device.
        found_bytes: u64,
        /// Nodes asked for.
        nodes: u8,
        /// Bytes of each window. There are two windows for each pair of nodes.
        window_bytes: usize,
        /// Bytes needed.
        needed_bytes: usize,
    },
    /// The first page holds something other than a header of this layout.
    UnknownContents {
        /// The first unexpected word.
        found: u64,
    },
    /// The layout has another version.
    Version {
        /// Version found.
        found: u64,
    },
    /// The layout is for another rack.
    LayoutMismatch {
        /// The property that differs, as the unit of the two values.
        what: &'static str,
        /// Value found.
        found: u64,
        /// Value of this rack.
        expected: u64,
    },
    /// Another node has claimed the header for another rack, or gave up half-way.
    ClaimLost,
    /// The file has an owner other than root and this process's user, or others can write it.
    Owner {
        /// User ID of the owner.
        owner: u32,
        /// Permission bits; 0 where they do not matter.
        mode: u32,
    },
    /// The memory is not sealed against truncation.
    Shrinkable,
    /// The memory has become smaller than its mapping.
    Shrunk {
        /// Bytes found.
        found_bytes: u64,
        /// Bytes mapped.
        mapped_bytes: u64,
    },
    /// A system call failed.
    System {
        /// The attempted operation.
        what: String,
        /// The kernel's error.
        error: io::Error,
    },
    /// Another requirement is not met.
    Unsuitable {
        /// The violated requirement.
        found: String,
        /// The remedy.
        remedy: String,
    },
}

impl DeviceProblem {
    pub(super) fn on_device(self, device: &str) -> DeviceError {
        DeviceError { device: device.to_owned(), problem: self }
    }

    pub(super) fn unsuitable(found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Unsuitable { found: found.into(), remedy: remedy.into() }
    }

    /// Returns a function for `map_err` that says which operation failed.
    pub(super) fn system<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        |error| Self::System { what: what.into(), error: error.into() }
    }
}

const CLEAR: &str = "if nothing on it is needed, clear its first 4096 bytes";

impl fmt::Display for DeviceProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nodes { nodes } => write!(f, "{nodes} nodes: use 2 to {NODES_MAX}"),
            Self::Slot { own, nodes } => write!(f, "node {own} of {nodes}: nodes are counted from 0"),
            Self::WindowSize { window_bytes } => {
                write!(f, "windows of {window_bytes} bytes: use a positive multiple of {CACHE_LINE_BYTES} that fits")
            }
            Self::TooSmall { found_bytes, nodes, window_bytes, needed_bytes } => write!(
                f,
                "{found_bytes} bytes: {nodes} nodes with windows of {window_bytes} bytes need {needed_bytes}; \
                 use fewer nodes, smaller windows or a larger device"
            ),
            Self::UnknownContents { found } => write!(
                f,
                "its first page holds {found:#x}, which is not a Crosslane layout; use another device, or {CLEAR}"
            ),
            Self::Version { found } => {
                write!(f, "layout version {found}, this program has {VERSION}; update the older program, or {CLEAR}")
            }
            Self::LayoutMismatch { what, found, expected } => write!(
                f,
                "laid out for {found} {what}, the rack has {expected}; give all nodes the same rack file, or {CLEAR}"
            ),
            Self::ClaimLost => {
                write!(f, "another node has claimed it for another rack; give all nodes the same rack file, or {CLEAR}")
            }
            Self::Owner { owner, mode: 0 } => {
                write!(f, "owned by user {owner}; only root or the user of this process may own it")
            }
            Self::Owner { owner, mode } => write!(
                f,
                "owned by user {owner}, mode {mode:o}; only root or the user of this process may own and write it \
                 (chown, chmod go-w)"
            ),
            Self::Shrinkable => write!(
                f,
                "memory that may be truncated while it is mapped; use a server that seals it (F_SEAL_SHRINK), as \
                 'crosslane device-server' does"
            ),
            Self::Shrunk { found_bytes, mapped_bytes } => {
                write!(f, "{found_bytes} bytes, but {mapped_bytes} are mapped: the file was truncated; stop the rack")
            }
            Self::System { what, error } => write!(f, "{what}: {error}"),
            Self::Unsuitable { found, remedy } => write!(f, "{found}; {remedy}"),
        }
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}: {}", self.device, self.problem)
    }
}

impl std::error::Error for DeviceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.problem {
            DeviceProblem::System { error, .. } => Some(error),
            _ => None,
        }
    }
}
