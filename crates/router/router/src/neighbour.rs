//! Neighbours: who on a port's network has which hardware address, by RFC 4861's states, for IPv4 (ARP) too.
//!
//! The table is without I/O: what is to be done comes out as [`Action`]s. Each neighbour is an *adjacency*, whose
//! number other nodes of the cluster know; a number that was given back rests for a while before another neighbour gets
//! it, so that nothing under way reaches the wrong one.

mod table;
mod timing;

use std::net::IpAddr;

use packet::ethernet::MacAddress;

use crate::{AdjacencyId, DropReason, Packet, PortId, Time};

pub(crate) use table::{Adjacency, Neighbours, PortL2};

/// What is known of a neighbour (RFC 4861, section 7.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NeighbourState {
    /// Asked for; has never answered.
    Incomplete,
    /// Answered not long ago.
    Reachable,
    /// Answered once; is asked again when it is sent to.
    Stale,
    /// Was sent to since; is asked again soon.
    Delay,
    /// Is being asked again.
    Probe,
    /// Did not answer; is kept because routes name it, and asked again when it is sent to.
    Failed,
}

impl NeighbourState {
    /// In a word, as it is shown.
    pub const fn name(self) -> &'static str {
        match self {
            NeighbourState::Incomplete => "incomplete",
            NeighbourState::Reachable => "reachable",
            NeighbourState::Stale => "stale",
            NeighbourState::Delay => "delay",
            NeighbourState::Probe => "probe",
            NeighbourState::Failed => "failed",
        }
    }

    pub(crate) const fn has_mac(self) -> bool {
        !matches!(self, NeighbourState::Incomplete | NeighbourState::Failed)
    }
}

/// A neighbour, as it is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// Its number.
    pub adjacency: AdjacencyId,
    /// On which port's network.
    pub port: PortId,
    /// Its address.
    pub address: IpAddr,
    /// Its hardware address, once known.
    pub mac: Option<MacAddress>,
    /// How well it is known.
    pub state: NeighbourState,
}

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

/// A time that was set for a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Timer {
    at: Time,
    adjacency: AdjacencyId,
}
