//! Inputs and outputs of the neighbour table.

use std::net::IpAddr;

use packet::ethernet::MacAddress;

use crate::{AdjacencyId, DropReason, Packet, PortId};

/// What a message states about a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NeighbourUpdate {
    pub(crate) port: PortId,
    pub(crate) address: IpAddr,
    pub(crate) mac: MacAddress,
    /// The message answers a solicitation, which confirms reachability in both directions.
    pub(crate) is_solicited: bool,
    /// The message may replace a different cached MAC address.
    pub(crate) overrides: bool,
    /// The message may create an entry, because it was directed to this node.
    pub(crate) creates: bool,
    /// An administrator has configured the neighbour.
    pub(crate) is_configured: bool,
}

/// An action that the table requests.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Send a solicitation for this address: multicast, or unicast to its last known MAC address.
    Solicit { port: PortId, address: IpAddr, to: Option<MacAddress> },
    /// Send a packet that was queued for address resolution.
    Send { adjacency: AdjacencyId, port: PortId, packet: Packet },
    /// Drop a packet, because address resolution failed.
    Undeliverable { port: PortId, packet: Packet },
    /// Drop a packet that found no room in a queue or in the table.
    Dropped { port: PortId, packet: Packet, reason: DropReason },
    /// A neighbour that a message states was not learned, because of the limits of the port.
    Refused,
    /// The neighbour was confirmed: it has answered, or it was configured.
    Up { port: PortId, address: IpAddr, adjacency: AdjacencyId },
    /// A confirmed neighbour is gone.
    Down { port: PortId, address: IpAddr, adjacency: AdjacencyId },
}
