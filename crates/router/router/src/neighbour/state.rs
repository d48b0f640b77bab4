//! The states of a neighbour entry.

use std::net::IpAddr;

use packet::ethernet::MacAddress;

use crate::{AdjacencyId, PortId};

/// The reachability state of a neighbour (RFC 4861, section 7.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NeighbourState {
    /// Address resolution is in progress.
    Incomplete,
    /// Reachability was confirmed recently.
    Reachable,
    /// Reachability is unknown; it is verified after the next packet to the neighbour.
    Stale,
    /// A packet was sent; probes begin if reachability is not confirmed soon.
    Delay,
    /// Reachability is being verified by unicast solicitations.
    Probe,
    /// Resolution failed. The entry is kept because routes pin it; the next packet starts resolution again.
    Failed,
}

impl NeighbourState {
    /// Returns the name, as displayed.
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

/// A neighbour entry, as displayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// Adjacency number.
    pub adjacency: AdjacencyId,
    /// Port.
    pub port: PortId,
    /// IP address.
    pub address: IpAddr,
    /// MAC address, if known.
    pub mac: Option<MacAddress>,
    /// Reachability state.
    pub state: NeighbourState,
    /// Whether it has answered a solicitation, or was configured; only then is it announced to other nodes.
    pub is_confirmed: bool,
}
