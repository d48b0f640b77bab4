//! Errors that keep a node from starting, or end it.

use std::io;

use router_ports::netlink::NetlinkError;
use thiserror::Error;

use crate::control::KeyError;
use crate::interconnect::InterconnectError;

/// Why a node cannot start, or has to end.
#[derive(Debug, Error)]
pub enum NodeError {
    /// The node is already running.
    #[error("node '{node}' is up already (process {pid}); end it with 'crosslane router down'")]
    AlreadyRunning {
        /// The node.
        node: String,
        /// Its process ID, if known.
        pid: String,
    },
    /// A system call failed.
    #[error("{what}: {error}")]
    System {
        /// The operation, or the path.
        what: String,
        /// The error of the kernel.
        error: io::Error,
    },
    /// The network namespace cannot be entered.
    #[error("network namespace '{shown}' cannot be entered: {error}; create it with 'ip netns add', and run as root")]
    Namespace {
        /// Its path.
        shown: String,
        /// The error of the kernel.
        error: io::Error,
    },
    /// A port cannot be opened.
    #[error("{error}")]
    Port {
        /// The index of the port.
        index: usize,
        /// The error.
        error: String,
    },
    /// A capture file of a port cannot be opened.
    #[error("{error}")]
    PortFile {
        /// The index of the port.
        index: usize,
        /// The key of the file.
        key: &'static str,
        /// The error.
        error: String,
    },
    /// The TUN interface to the node's kernel cannot be opened.
    #[error("interface crosslane0: {0}; run as root, and give each node its own network namespace")]
    SlowPath(String),
    /// Packets would be forwarded past packet filters.
    #[error("packet filters would apply to forwarded packets: {found}; {remedy}")]
    Filters {
        /// The filters.
        found: String,
        /// What to do.
        remedy: String,
    },
    /// The interconnect.
    #[error(transparent)]
    Interconnect(#[from] InterconnectError),
    /// The model of the link is not valid.
    #[error("interconnect.timing: {0}")]
    Timing(String),
    /// The interconnect needs a key that is missing in the cluster file.
    #[error("{0} is missing for this node; add it to the cluster file")]
    Missing(&'static str),
    /// The key file.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// Netlink.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// Metrics cannot be served.
    #[error("{0}")]
    Metrics(String),
    /// The forwarding thread has ended unexpectedly.
    #[error("the forwarding thread has ended unexpectedly; see the log")]
    ForwardingEnded,
    /// The forwarding thread hangs.
    #[error("the forwarding thread has hung for {0} s; start the node again, and report its log")]
    ForwardingHung(u64),
}

impl NodeError {
    /// Returns the key of the cluster file that the error is about, for the node with index `node`.
    pub fn key(&self, node: usize) -> Option<String> {
        match self {
            Self::Namespace { .. } => Some(format!("nodes[{node}].namespace")),
            Self::Filters { .. } => Some(format!("nodes[{node}].filters")),
            Self::Metrics(_) => Some(format!("nodes[{node}].metrics")),
            Self::Key(_) => Some("key".to_owned()),
            Self::Port { index, .. } => Some(format!("nodes[{node}].ports[{index}].device")),
            Self::PortFile { index, key, .. } => Some(format!("nodes[{node}].ports[{index}].{key}")),
            _ => None,
        }
    }
}

pub fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> NodeError {
    move |error| NodeError::System { what: what.into(), error }
}
