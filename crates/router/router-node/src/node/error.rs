//! Why a node cannot start, or has to end.

use std::io;

use router_ports::netlink::NetlinkError;
use thiserror::Error;

use crate::control::KeyError;
use crate::interconnect::InterconnectError;

/// RejectReason a node cannot start, or has to end.
#[derive(Debug, Error)]
pub enum NodeError {
    /// The node runs already.
    #[error("node '{node}' is up already (process {pid}); end it with 'crosslane router down'")]
    AlreadyRunning {
        /// The node.
        node: String,
        /// Its process, as far as known.
        pid: String,
    },
    /// The kernel refused.
    #[error("{what}: {error}")]
    System {
        /// What was attempted.
        what: String,
        /// What the kernel said.
        error: io::Error,
    },
    /// No such namespace.
    #[error("'{shown}' cannot be entered: {error}; make it with 'ip netns add', and run as root")]
    Namespace {
        /// Its path.
        shown: String,
        /// What the kernel said.
        error: io::Error,
    },
    /// A port cannot be opened.
    #[error("{error}")]
    Port {
        /// Its place among the node's.
        place: usize,
        /// RejectReason.
        error: String,
    },
    /// A file of a port cannot be opened.
    #[error("{error}")]
    PortFile {
        /// The port's place among the node's.
        place: usize,
        /// Which of its files.
        key: &'static str,
        /// RejectReason.
        error: String,
    },
    /// The interface to the node's own kernel.
    #[error("interface crosslane0: {0}; it takes root, and each node a network namespace of its own")]
    SlowPath(String),
    /// What joins nodes.
    #[error(transparent)]
    Interconnect(#[from] InterconnectError),
    /// A modelled link that is none.
    #[error("interconnect.timing: {0}")]
    Timing(String),
    /// A key that this kind of interconnect needs.
    #[error("{0} is missing for this node; add it to the cluster file")]
    Missing(&'static str),
    /// The key of the cluster.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The kernel's routes.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// The thread that forwards has ended by itself.
    #[error("the thread that forwards has ended by itself; its last words are in the log")]
    ForwardingEnded,
    /// The thread that forwards hangs.
    #[error("the thread that forwards has hung for {0} s; start the node again, and report what stands in its log")]
    ForwardingHung(u64),
}

impl NodeError {
    /// The key of the cluster file that it is about, for the node of that place.
    pub fn key(&self, node: usize) -> Option<String> {
        match self {
            Self::Namespace { .. } => Some(format!("nodes[{node}].namespace")),
            Self::Key(_) => Some("key".to_owned()),
            Self::Port { place, .. } => Some(format!("nodes[{node}].ports[{place}].device")),
            Self::PortFile { place, key, .. } => Some(format!("nodes[{node}].ports[{place}].{key}")),
            _ => None,
        }
    }
}

pub fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> NodeError {
    move |error| NodeError::System { what: what.into(), error }
}
