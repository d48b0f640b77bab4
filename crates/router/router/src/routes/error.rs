//! What routes are refused.

use fib::HOPS_MAX;
use ipnet::IpNet;

use crate::{Hop, NODES_MAX};

/// Why a route is not as it was announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// No such node.
    #[error("node {node}: a cluster has nodes 0 to {last}", last = NODES_MAX - 1)]
    Node {
        /// Its number.
        node: u8,
    },
    /// A route without hops, or with more than a group has.
    #[error("{prefix}: a route with {hops} hops; announce 1 to {HOPS_MAX}")]
    Hops {
        /// Whither.
        prefix: IpNet,
        /// How many.
        hops: usize,
    },
    /// A node announces a hop that is none of its own.
    #[error(
        "{prefix}: node {node} announces a hop by port {} of node {}; a node announces its own ports only",
        hop.port.0,
        hop.node.0
    )]
    Hop {
        /// Whither.
        prefix: IpNet,
        /// Who announces it.
        node: u8,
        /// What it says.
        hop: Hop,
    },
    /// No room in the tables.
    #[error(transparent)]
    Table(#[from] fib::Error),
}
