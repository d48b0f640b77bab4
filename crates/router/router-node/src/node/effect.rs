//! What changes of the node's routes require of the rest of the node.

use std::net::IpAddr;

use ipnet::IpNet;
use packet::ethernet::MacAddress;
use router::{AdjacencyId, PortConfig, PortId};

use super::rejected_routes::RejectedRoute;
use super::stale_routes::StaleEvent;

/// An action that a change requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The configuration of a port has changed.
    ConfigurePort(PortId, PortConfig),
    /// A route uses this gateway: its adjacency is needed.
    PinAdjacency(PortId, IpAddr),
    /// No route uses the adjacency any more.
    UnpinAdjacency(AdjacencyId),
    /// A permanent neighbour entry of the kernel.
    LearnNeighbour(PortId, IpAddr, MacAddress),
    /// The node has a new address.
    AddLocalAddress(IpAddr),
    /// The node does not have the address any more.
    RemoveLocalAddress(IpAddr),
    /// A kernel route was not accepted as it is.
    RouteRejected(IpNet, RejectedRoute),
    /// Routes of a routing daemon are kept as stale, or are not kept any longer.
    StaleRoutes(StaleEvent),
}
