//! The states of a neighbour.

use std::net::IpAddr;

use packet::ethernet::MacAddress;

use crate::{AdjacencyId, PortId};

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
