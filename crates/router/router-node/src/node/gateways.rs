//! The gateways that routes use, and their adjacencies, which the forwarding thread assigns.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use router::{AdjacencyId, PortId};

use super::effect::Effect;

/// A gateway that routes use.
#[derive(Debug, Default)]
struct Gateway {
    /// `None` until the forwarding thread has assigned one, and when it has no room.
    adjacency: Option<AdjacencyId>,
    is_requested: bool,
    prefixes: BTreeSet<IpNet>,
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

    /// Records that a route to the prefix uses the gateway. Requests the adjacency of a new gateway.
    pub fn reference(&mut self, port: PortId, address: IpAddr, prefix: IpNet, effects: &mut Vec<Effect>) {
        let gateway = self.gateways.entry((port, address)).or_default();
        gateway.prefixes.insert(prefix);
        if !gateway.is_requested {
            gateway.is_requested = true;
            effects.push(Effect::PinAdjacency(port, address));
        }
    }

    /// Records that no route to the prefix uses the gateway any more. Releases the adjacency of an unused gateway; one
    /// whose request is pending is released when the response arrives.
    pub fn release(&mut self, port: PortId, address: IpAddr, prefix: IpNet, effects: &mut Vec<Effect>) {
        let Some(gateway) = self.gateways.get_mut(&(port, address)) else { return };
        gateway.prefixes.remove(&prefix);
        if !gateway.prefixes.is_empty() {
            return;
        }
        let adjacency = gateway.adjacency;
        if self.unpinned.remove(&(port, address)) || adjacency.is_some() {
            self.gateways.remove(&(port, address));
            adjacency.into_iter().for_each(|adjacency| self.unpin(adjacency, effects));
        }
    }

    /// Sets the requested adjacency of a gateway; `None` when the neighbour table is full. Returns the prefixes whose
    /// routes use the gateway.
    pub fn set_adjacency(
        &mut self,
        port: PortId,
        address: IpAddr,
        adjacency: Option<AdjacencyId>,
        effects: &mut Vec<Effect>,
    ) -> BTreeSet<IpNet> {
        let Some(gateway) = self.gateways.get_mut(&(port, address)) else { return BTreeSet::new() };
        gateway.adjacency = adjacency;
        let prefixes = gateway.prefixes.clone();
        if prefixes.is_empty() {
            self.gateways.remove(&(port, address));
            adjacency.into_iter().for_each(|adjacency| self.unpin(adjacency, effects));
        } else if adjacency.is_none() {
            self.unpinned.insert((port, address));
        }
        prefixes
    }

    /// Releases an adjacency, and requests one for a gateway that found no room.
    fn unpin(&mut self, adjacency: AdjacencyId, effects: &mut Vec<Effect>) {
        effects.push(Effect::UnpinAdjacency(adjacency));
        effects.extend(self.unpinned.pop_first().map(|(port, address)| Effect::PinAdjacency(port, address)));
    }
}
