//! Errors of route announcements.

use fib::HOPS_MAX;
use ipnet::IpNet;

use crate::{Hop, NODES_MAX};

/// Why a route was rejected or not installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// The node number is too high.
    #[error("node {node}: a cluster has nodes 0 to {last}", last = NODES_MAX - 1)]
    Node {
        /// Node number.
        node: u8,
    },
    /// A route without hops, or with too many.
    #[error("{prefix}: a route with {hops} hops; announce 1 to {HOPS_MAX}")]
    Hops {
        /// Prefix of the route.
        prefix: IpNet,
        /// Number of hops.
        hops: usize,
    },
    /// A node announces a hop of another node or an invalid one.
    #[error(
        "{prefix}: node {node} announces a hop by port {} of node {}; a node announces its own ports only",
        hop.port.0,
        hop.node.0
    )]
    Hop {
        /// Prefix of the route.
        prefix: IpNet,
        /// Announcing node.
        node: u8,
        /// Invalid hop.
        hop: Hop,
    },
    /// The FIB has no room.
    #[error(transparent)]
    Table(#[from] fib::Error),
}
