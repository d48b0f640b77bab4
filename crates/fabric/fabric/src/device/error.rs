//! What can be wrong with a device, in one line each.

use super::layout::{NODES_MAX, VERSION};
use std::{fmt, io};
use volmem::CACHE_LINE_BYTES;

/// Why a device could not be used.
#[derive(Debug)]
pub struct DeviceError {
    /// The device, as the user named it.
    pub device: String,
    /// What is wrong with it.
    pub problem: Problem,
}

/// What is wrong with a device, or with what is asked of it.
#[derive(Debug)]
pub enum Problem {
    /// A rack has two nodes at least, and this version knows so many at most.
    Nodes {
        /// Nodes asked for.
        nodes: u8,
    },
    /// There is no such place in the rack.
    Slot {
        /// Slot asked for.
        own: usize,
        /// Nodes of the rack.
        nodes: u8,
    },
    /// A window is whole cache lines, at least one, and all of them together fit an address space.
    WindowSize {
        /// Bytes asked for.
        window_bytes: usize,
    },
    /// The memory cannot hold what is asked for.
    TooSmall {
        /// Bytes of the device.
        found_bytes: u64,
        /// Nodes asked for.
        nodes: u8,
        /// Bytes of each window, of which there are two for each pair of nodes.
        window_bytes: usize,
        /// Bytes that this takes.
        needed_bytes: usize,
    },
    /// The first page holds something else.
    Stranger {
        /// The first word of it that is not ours.
        found: u64,
    },
    /// Laid out by another version of this program.
    Version {
        /// The layout's version found.
        found: u64,
    },
    /// Laid out for another rack.
    Shape {
        /// What differs.
        what: &'static str,
        /// The value found.
        found: u64,
        /// The value of this rack.
        expected: u64,
    },
    /// Somebody else begins to lay it out for another rack, or gave up half-way.
    Claimed,
    /// Only root and the user of this process may own it, and nobody else write it.
    Owner {
        /// The user that owns it.
        owner: u32,
        /// Permission bits, 0 where they do not matter.
        mode: u32,
    },
    /// The memory could be truncated under a mapping.
    Shrinkable,
    /// The memory has become smaller under the mapping.
    Shrunk {
        /// Bytes that there are now.
        found_bytes: u64,
        /// Bytes that are mapped.
        mapped_bytes: u64,
    },
    /// The kernel refused.
    System {
        /// What was attempted.
        what: String,
        /// What the kernel said.
        error: io::Error,
    },
    /// Something else is not as it must be.
    Unfit {
        /// What was found.
        found: String,
        /// What to do.
        remedy: String,
    },
}

impl Problem {
    pub(super) fn of(self, device: &str) -> DeviceError {
        DeviceError { device: device.to_owned(), problem: self }
    }

    pub(super) fn unfit(found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Unfit { found: found.into(), remedy: remedy.into() }
    }

    /// For `map_err`: the kernel refused `what`.
    pub(super) fn system<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        |error| Self::System { what: what.into(), error: error.into() }
    }
}

const CLEAR: &str = "if nothing on it is needed, clear its first 4096 bytes";

impl fmt::Display for Problem {
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
            Self::Stranger { found } => write!(
                f,
                "its first page holds {found:#x}, which is no layout of Crosslane's; use another device, or {CLEAR}"
            ),
            Self::Version { found } => {
                write!(f, "layout version {found}, this program has {VERSION}; update the older program, or {CLEAR}")
            }
            Self::Shape { what, found, expected } => write!(
                f,
                "laid out for {what} {found}, the rack has {expected}; give all nodes the same rack file, or {CLEAR}"
            ),
            Self::Claimed => {
                write!(f, "another node lays it out for another rack; give all nodes the same rack file, or {CLEAR}")
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
                write!(f, "{found_bytes} bytes, {mapped_bytes} are mapped; somebody truncated it: stop the rack")
            }
            Self::System { what, error } => write!(f, "{what}: {error}"),
            Self::Unfit { found, remedy } => write!(f, "{found}; {remedy}"),
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
            Problem::System { error, .. } => Some(error),
            _ => None,
        }
    }
}
