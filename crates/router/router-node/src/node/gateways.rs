//! The gateways that routes use, and their adjacencies, which the forwarding thread assigns.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use router::{AdjacencyId, PortId};

use super::effect::Effect;

/// A gateway that routes use.
#[derive(Debug, Default)]
struct Gateway {
    /// `None` until the forwarding thread has assigned one, and when it has no room.
    adjacency: Option<AdjacencyId>,
    is_requested: bool,
    /// Number of references.
    users: u32,
    /// Whether it has stopped answering.
    is_unreachable: bool,
}

/// The gateways by port and address.
#[derive(Debug, Default)]
pub struct Gateways {
    gateways: BTreeMap<(PortId, IpAddr), Gateway>,
    /// Gateways that the neighbour table had no room for.
    unpinned: BTreeSet<(PortId, IpAddr)>,
}

impl Gateways {
    /// Returns the adjacency of a gateway, once it is assigned.
    pub fn adjacency(&self, port: PortId, address: IpAddr) -> Option<AdjacencyId> {
        self.gateways.get(&(port, address))?.adjacency
    }

    /// Returns the number of gateways.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.gateways.len()
    }

    /// Records whether a neighbour answers. Returns whether it is a gateway.
    pub fn set_unreachable(&mut self, port: PortId, address: IpAddr, is_unreachable: bool) -> bool {
        let gateway = self.gateways.get_mut(&(port, address));
        gateway.map(|gateway| gateway.is_unreachable = is_unreachable).is_some()
    }

    /// Returns whether the gateway has stopped answering. One that was never resolved counts as reachable.
    pub fn is_unreachable(&self, port: PortId, address: IpAddr) -> bool {
        self.gateways.get(&(port, address)).is_some_and(|gateway| gateway.is_unreachable)
    }

    /// Records that a candidate route uses the gateway. Requests the adjacency of a new gateway.
    pub fn reference(&mut self, port: PortId, address: IpAddr, effects: &mut Vec<Effect>) {
        let gateway = self.gateways.entry((port, address)).or_default();
        gateway.users += 1;
        if !gateway.is_requested {
            gateway.is_requested = true;
            effects.push(Effect::PinAdjacency(port, address));
        }
    }

    /// Records that a candidate route does not use the gateway any more. Releases the adjacency of an unused gateway;
    /// one whose request is pending is released when the response arrives.
    pub fn release(&mut self, port: PortId, address: IpAddr, effects: &mut Vec<Effect>) {
        let Some(gateway) = self.gateways.get_mut(&(port, address)) else { return };
        gateway.users = gateway.users.saturating_sub(1);
        if gateway.users > 0 {
            return;
        }
        let adjacency = gateway.adjacency;
        if self.unpinned.remove(&(port, address)) || adjacency.is_some() {
            self.gateways.remove(&(port, address));
            adjacency.into_iter().for_each(|adjacency| self.unpin(adjacency, effects));
        }
    }

    /// Sets the requested adjacency of a gateway; `None` when the neighbour table is full. Returns whether routes use
    /// the gateway.
    pub fn set_adjacency(
        &mut self,
        port: PortId,
        address: IpAddr,
        adjacency: Option<AdjacencyId>,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Some(gateway) = self.gateways.get_mut(&(port, address)) else { return false };
        gateway.adjacency = adjacency;
        let is_used = gateway.users > 0;
        if !is_used {
            self.gateways.remove(&(port, address));
            adjacency.into_iter().for_each(|adjacency| self.unpin(adjacency, effects));
        } else if adjacency.is_none() {
            self.unpinned.insert((port, address));
        }
        is_used
    }

    /// Releases an adjacency, and requests one for a gateway that found no room.
    fn unpin(&mut self, adjacency: AdjacencyId, effects: &mut Vec<Effect>) {
        effects.push(Effect::UnpinAdjacency(adjacency));
        effects.extend(self.unpinned.pop_first().map(|(port, address)| Effect::PinAdjacency(port, address)));
    }
}
