//! What goes into the neighbour table, and what comes out.

use std::net::IpAddr;

use packet::ethernet::MacAddress;

use crate::{AdjacencyId, DropReason, Packet, PortId};

/// What a message said of a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NeighbourUpdate {
    pub(crate) port: PortId,
    pub(crate) address: IpAddr,
    pub(crate) mac: MacAddress,
    /// It answers what was asked: the way there and back works.
    pub(crate) is_solicited: bool,
    /// It may take the place of another hardware address.
    pub(crate) overrides: bool,
    /// Enough to begin an entry with: it was said to this node.
    pub(crate) creates: bool,
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Ask who has this address: everybody, or the one that had it.
    Solicit { port: PortId, address: IpAddr, to: Option<MacAddress> },
    /// This packet waited for a hardware address that is now known.
    Send { adjacency: AdjacencyId, port: PortId, packet: Packet },
    /// This packet waited in vain.
    Undeliverable { port: PortId, packet: Packet },
    /// This packet waits no longer, for others came.
    Dropped { port: PortId, packet: Packet, reason: DropReason },
    /// The neighbour is known.
    Up { port: PortId, address: IpAddr, adjacency: AdjacencyId },
    /// It is no longer.
    Down { port: PortId, address: IpAddr, adjacency: AdjacencyId },
}
