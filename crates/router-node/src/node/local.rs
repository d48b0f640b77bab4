//! What this node can reach by itself, without I/O: the kernel's news, neighbours and the cluster file come in; routes
//! to announce, and what the forwarder must be told, come out.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use packet::ethernet::MacAddress;
use router::{AdjacencyId, PortConfig, PortId};
use router_ports::InterfaceIndex;
use router_ports::netlink::{Address, Change, Link, NeighbourState, Route, RouteKey, RouteKind as KernelKind};

use crate::cluster::{MTU_BYTES_MAX, PortOfNode, StaticRoute};
use crate::control::Announcements;
use crate::control::words::{Announced, HOPS_MAX, HopOfNode, Origin, RouteChange, RouteKind};

/// The routing protocol number of what the kernel does by itself (`RTPROT_KERNEL`).
const PROTOCOL_KERNEL: u8 = 2;
/// The kernel's own interface.
const LOOPBACK: &str = "lo";

/// What has to be done because of news.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// A port has changed.
    Port(PortId, PortConfig),
    /// A route names this neighbour: its number is wanted.
    Pin(PortId, IpAddr),
    /// No route names it any more.
    Unpin(AdjacencyId),
    /// An administrator says where this neighbour is.
    Hear(PortId, IpAddr, MacAddress),
    /// The address is this node's from now on.
    Own(IpAddr),
    /// The address is no longer this node's.
    Disowned(IpAddr),
}

/// One way of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    /// The node itself.
    Kernel,
    /// Whoever has the destination, on the port's network.
    OnLink(PortId),
    /// A neighbour whose number is known.
    Adjacent(PortId, AdjacencyId),
    /// A router, whose number the forwarder gives.
    Via(PortId, IpAddr),
}

impl Way {
    fn port(self) -> Option<PortId> {
        match self {
            Way::Kernel => None,
            Way::OnLink(port) | Way::Adjacent(port, _) | Way::Via(port, _) => Some(port),
        }
    }
}

/// Which of several routes to the same destinations is taken: the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    metric: u32,
    origin: Origin,
    /// Tells apart what may be there several times: neighbours of different ports, entries of the cluster file.
    which: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Candidate {
    kind: RouteKind,
    ways: Vec<Way>,
}

/// A router that routes name.
#[derive(Debug, Default)]
struct Gateway {
    /// `None` as long as the forwarder has not said, or when it has no room.
    adjacency: Option<AdjacencyId>,
    is_asked: bool,
    prefixes: BTreeSet<IpNet>,
}

/// A port, as far as the kernel or the cluster file knows it.
#[derive(Debug)]
struct LocalPort {
    interface: Option<InterfaceIndex>,
    config: PortConfig,
    mtu_bytes_max: u16,
    /// Destinations with a route by it.
    prefixes: BTreeSet<IpNet>,
}

/// What this node can reach by itself.
#[derive(Debug, Default)]
pub struct Local {
    ports: Vec<LocalPort>,
    links: BTreeMap<InterfaceIndex, Link>,
    /// Addresses of the kernel.
    addresses: BTreeSet<(InterfaceIndex, IpNet)>,
    /// Where packets for the node's kernel arrive that came in at other nodes.
    slow_path: Option<InterfaceIndex>,
    candidates: BTreeMap<IpNet, BTreeMap<Rank, Candidate>>,
    gateways: BTreeMap<(PortId, IpAddr), Gateway>,
    /// What other nodes are told.
    announcements: Announcements,
    /// Own addresses that are not announced: those of interfaces that are no ports.
    private: BTreeSet<IpNet>,
    dirty: BTreeSet<IpNet>,
    effects: Vec<Effect>,
}

impl Local {
    /// A node whose slow path is this interface.
    pub fn new(slow_path: Option<InterfaceIndex>) -> Self {
        Self { slow_path, ..Self::default() }
    }

    /// Adds the next port: as it was opened, with the interface of those whose kernel has addresses.
    pub fn add_port(&mut self, interface: Option<InterfaceIndex>, config: PortConfig, of_file: &PortOfNode) -> PortId {
        let port = PortId(self.ports.len() as u8);
        let mtu_bytes_max = of_file.mtu_bytes.unwrap_or(MTU_BYTES_MAX);
        let mut config = PortConfig { mtu_bytes: config.mtu_bytes.min(mtu_bytes_max), ..config };
        if !config.has_kernel {
            config.addresses = of_file.addresses.clone();
        }
        for network in config.addresses.clone() {
            self.own(network.addr(), false);
            self.set(network.trunc(), connected(0), Some(unicast(vec![Way::OnLink(port)])));
        }
        self.effects.push(Effect::Port(port, config.clone()));
        self.ports.push(LocalPort { interface, config, mtu_bytes_max, prefixes: BTreeSet::new() });
        port
    }

    /// Adds a route of the cluster file.
    pub fn add_static(&mut self, which: usize, port: PortId, route: &StaticRoute) {
        let way = route.via.map_or(Way::OnLink(port), |via| Way::Via(port, via));
        let rank = Rank { metric: route.metric, origin: Origin::Static, which: which as u32 };
        self.set(route.to, rank, Some(unicast(vec![way])));
    }

    /// A device is there no longer, or there again.
    pub fn set_interface(&mut self, port: PortId, interface: Option<InterfaceIndex>) {
        self.ports[usize::from(port.0)].interface = interface;
        self.refresh(port);
    }

    /// The device of each port whose addresses a kernel has.
    pub fn port_of(&self, interface: InterfaceIndex) -> Option<PortId> {
        let index = self.ports.iter().position(|port| port.interface == Some(interface))?;
        Some(PortId(index as u8))
    }

    /// A port as it is.
    pub fn port(&self, port: PortId) -> &PortConfig {
        &self.ports[usize::from(port.0)].config
    }

    /// What other nodes are told.
    pub fn announcements(&self) -> &Announcements {
        &self.announcements
    }

    /// What other nodes are told, to forget what all were told.
    pub fn announcements_mut(&mut self) -> &mut Announcements {
        &mut self.announcements
    }

    /// News of the kernel.
    pub fn kernel(&mut self, change: Change) {
        match change {
            Change::Link(link) => {
                let index = link.index;
                self.links.insert(index, link);
                self.refresh_interface(index);
            }
            Change::LinkGone(index) => {
                self.links.remove(&index);
                self.refresh_interface(index);
            }
            Change::Address(address) => self.address(&address),
            Change::AddressGone { interface, network } => self.address_gone(interface, network),
            Change::Route(route) => self.route(route),
            Change::RouteGone(key) => {
                for origin in [Origin::Connected, Origin::Kernel] {
                    self.set(key.prefix, Rank { metric: key.metric, origin, which: 0 }, None);
                }
            }
            Change::Neighbour(neighbour) => {
                if let (Some(port), Some(mac), NeighbourState::Permanent) =
                    (self.port_of(neighbour.interface), neighbour.mac, neighbour.state)
                {
                    self.effects.push(Effect::Hear(port, neighbour.address, mac));
                }
            }
            // Who is a neighbour the router finds out by itself.
            Change::NeighbourGone { .. } => {}
        }
    }

    fn address(&mut self, address: &Address) {
        let Address { interface, network, is_usable, .. } = *address;
        if !is_usable {
            return self.address_gone(interface, network);
        }
        if self.addresses.insert((interface, network)) {
            self.own(network.addr(), self.is_private(interface));
            self.refresh_interface(interface);
        }
    }

    fn address_gone(&mut self, interface: InterfaceIndex, network: IpNet) {
        if !self.addresses.remove(&(interface, network)) {
            return;
        }
        let address = network.addr();
        match self.addresses.iter().find(|(_, other)| other.addr() == address).map(|(other, _)| *other) {
            Some(other) => self.own(address, self.is_private(other)),
            None => self.disown(address),
        }
        self.refresh_interface(interface);
    }

    /// Whether addresses there are nobody else's business.
    fn is_private(&self, interface: InterfaceIndex) -> bool {
        let is_loopback = self.links.get(&interface).is_some_and(|link| link.name == LOOPBACK);
        self.port_of(interface).is_none() && self.slow_path != Some(interface) && !is_loopback
    }

    fn own(&mut self, address: IpAddr, is_private: bool) {
        self.effects.push(Effect::Own(address));
        let prefix = IpNet::from(address);
        if !is_routed(&prefix) {
            return;
        }
        if is_private {
            self.private.insert(prefix);
        } else {
            self.private.remove(&prefix);
        }
        self.set(prefix, OWN, Some(unicast(vec![Way::Kernel])));
        // Whether it is private may have changed, and nothing else.
        self.dirty.insert(prefix);
    }

    fn disown(&mut self, address: IpAddr) {
        self.effects.push(Effect::Disowned(address));
        self.set(address.into(), OWN, None);
    }

    fn route(&mut self, route: Route) {
        let Route { key: RouteKey { prefix, metric }, protocol, kind, hops } = route;
        let ways: Vec<Way> = hops
            .iter()
            .filter_map(|hop| {
                let port = self.port_of(hop.interface)?;
                Some(hop.gateway.map_or(Way::OnLink(port), |gateway| Way::Via(port, gateway)))
            })
            .collect();
        let is_connected = protocol == PROTOCOL_KERNEL && !ways.iter().any(|way| matches!(way, Way::Via(..)));
        let origin = if is_connected { Origin::Connected } else { Origin::Kernel };
        let kind = match kind {
            KernelKind::Unicast => RouteKind::Unicast,
            KernelKind::Blackhole => RouteKind::Blackhole,
            KernelKind::Unreachable => RouteKind::Unreachable,
            KernelKind::Prohibit => RouteKind::Prohibited,
        };
        // By other interfaces only, or what the kernel rejects by itself: nobody else's business.
        let is_ours = if kind == RouteKind::Unicast { !ways.is_empty() } else { protocol != PROTOCOL_KERNEL };
        let other = if is_connected { Origin::Kernel } else { Origin::Connected };
        self.set(prefix, Rank { metric, origin: other, which: 0 }, None);
        let candidate = (is_ours && is_routed(&prefix)).then_some(Candidate { kind, ways });
        self.set(prefix, Rank { metric, origin, which: 0 }, candidate);
    }

    /// The forwarder knows a neighbour.
    pub fn neighbour_up(&mut self, port: PortId, address: IpAddr, adjacency: AdjacencyId) {
        let prefix = IpNet::from(address);
        if is_routed(&prefix) {
            self.set(prefix, neighbour(port), Some(unicast(vec![Way::Adjacent(port, adjacency)])));
        }
    }

    /// The forwarder does not know a neighbour any more.
    pub fn neighbour_down(&mut self, port: PortId, address: IpAddr) {
        self.set(address.into(), neighbour(port), None);
    }

    /// The neighbours that the forwarder knows, and no others: after news of them were lost.
    pub fn neighbours(&mut self, known: impl IntoIterator<Item = (PortId, IpAddr, AdjacencyId)>) {
        let mut former: Vec<(IpNet, Rank)> = Vec::new();
        for (prefix, candidates) in &self.candidates {
            let neighbours = candidates.keys().filter(|rank| rank.origin == Origin::Neighbour);
            former.extend(neighbours.map(|rank| (*prefix, *rank)));
        }
        let known: Vec<_> = known.into_iter().collect();
        for (prefix, rank) in former {
            let is_known = |(port, address, _): &(PortId, IpAddr, AdjacencyId)| {
                neighbour(*port) == rank && IpNet::from(*address) == prefix
            };
            if !known.iter().any(is_known) {
                self.set(prefix, rank, None);
            }
        }
        for (port, address, adjacency) in known {
            self.neighbour_up(port, address, adjacency);
        }
    }

    /// The number of a router that was asked for; `None` when the forwarder has no room for it.
    pub fn pinned(&mut self, port: PortId, address: IpAddr, adjacency: Option<AdjacencyId>) {
        let Some(gateway) = self.gateways.get_mut(&(port, address)) else { return };
        gateway.adjacency = adjacency;
        self.dirty.extend(gateway.prefixes.iter());
        if gateway.prefixes.is_empty() {
            self.gateways.remove(&(port, address));
            self.effects.extend(adjacency.map(Effect::Unpin));
        }
    }

    /// Sets or removes one of the routes to a prefix.
    fn set(&mut self, prefix: IpNet, rank: Rank, candidate: Option<Candidate>) {
        let candidates = self.candidates.entry(prefix).or_default();
        let used = ways_of(candidates);
        let is_change = match candidate {
            Some(candidate) => candidates.insert(rank, candidate.clone()) != Some(candidate),
            None => candidates.remove(&rank).is_some(),
        };
        let uses = ways_of(candidates);
        if candidates.is_empty() {
            self.candidates.remove(&prefix);
        }
        if !is_change {
            return;
        }
        self.dirty.insert(prefix);
        for way in used.difference(&uses) {
            self.unuse(prefix, *way, &uses);
        }
        for way in uses.difference(&used) {
            self.use_way(prefix, *way);
        }
    }

    fn use_way(&mut self, prefix: IpNet, way: Way) {
        if let Some(port) = way.port().and_then(|port| self.ports.get_mut(usize::from(port.0))) {
            port.prefixes.insert(prefix);
        }
        let Way::Via(port, address) = way else { return };
        let gateway = self.gateways.entry((port, address)).or_default();
        gateway.prefixes.insert(prefix);
        if !gateway.is_asked {
            gateway.is_asked = true;
            self.effects.push(Effect::Pin(port, address));
        }
    }

    fn unuse(&mut self, prefix: IpNet, way: Way, uses: &BTreeSet<Way>) {
        let Some(port) = way.port() else { return };
        if !uses.iter().any(|other| other.port() == Some(port))
            && let Some(port) = self.ports.get_mut(usize::from(port.0))
        {
            port.prefixes.remove(&prefix);
        }
        let Way::Via(port, address) = way else { return };
        let Some(gateway) = self.gateways.get_mut(&(port, address)) else { return };
        gateway.prefixes.remove(&prefix);
        // One that is still asked for is given back with the answer.
        if gateway.prefixes.is_empty()
            && let Some(adjacency) = gateway.adjacency
        {
            self.gateways.remove(&(port, address));
            self.effects.push(Effect::Unpin(adjacency));
        }
    }

    fn refresh_interface(&mut self, interface: InterfaceIndex) {
        if let Some(port) = self.port_of(interface) {
            self.refresh(port);
        }
        // Names tell whose addresses are private.
        let own: Vec<IpAddr> =
            self.addresses.iter().filter(|(on, _)| *on == interface).map(|(_, network)| network.addr()).collect();
        let is_private = self.is_private(interface);
        for prefix in own.into_iter().map(IpNet::from).filter(is_routed) {
            let is_change = if is_private { self.private.insert(prefix) } else { self.private.remove(&prefix) };
            if is_change {
                self.dirty.insert(prefix);
            }
        }
    }

    /// What a port has become, by its link and addresses.
    fn refresh(&mut self, port: PortId) {
        let state = &mut self.ports[usize::from(port.0)];
        if !state.config.has_kernel {
            return;
        }
        let link = state.interface.and_then(|interface| self.links.get(&interface));
        let mut config = state.config.clone();
        config.is_up = link.is_some_and(|link| link.is_up && link.has_carrier);
        if let Some(link) = link {
            let mtu_bytes = link.mtu_bytes.min(u32::from(state.mtu_bytes_max));
            config.mtu_bytes = u16::try_from(mtu_bytes).unwrap_or(state.mtu_bytes_max);
            config.mac = link.mac.unwrap_or(config.mac);
        }
        let of_port = self.addresses.iter().filter(|(on, _)| Some(*on) == state.interface);
        config.addresses = of_port.map(|(_, network)| *network).collect();
        if config == state.config {
            return;
        }
        if config.is_up != state.config.is_up {
            self.dirty.extend(state.prefixes.iter());
        }
        state.config = config.clone();
        self.effects.push(Effect::Port(port, config));
    }

    /// What has to be done because of the news so far, in this order.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// What has changed of this node's routes because of the news so far: for its own table. Others are told the same,
    /// but for what is private.
    pub fn settle(&mut self) -> Vec<RouteChange> {
        let mtu = |port: &LocalPort| if port.config.is_up { port.config.mtu_bytes } else { 0 };
        self.announcements.set_mtus_bytes(self.ports.iter().map(mtu).collect());
        let dirty = std::mem::take(&mut self.dirty);
        let mut changes = Vec::with_capacity(dirty.len());
        for prefix in dirty {
            let best = self.best(&prefix);
            let is_private =
                best.as_ref().is_some_and(|best| best.origin == Origin::Own) && self.private.contains(&prefix);
            match &best {
                Some(announced) if !is_private => _ = self.announcements.announce(prefix, announced.clone()),
                _ => _ = self.announcements.withdraw(&prefix),
            }
            changes.push(RouteChange { prefix, announced: best });
        }
        changes
    }

    fn best(&self, prefix: &IpNet) -> Option<Announced> {
        self.candidates.get(prefix)?.iter().find_map(|(rank, candidate)| {
            let hops = self.hops(candidate);
            let is_usable = candidate.kind != RouteKind::Unicast || !hops.is_empty();
            is_usable.then_some(Announced { metric: rank.metric, origin: rank.origin, kind: candidate.kind, hops })
        })
    }

    fn hops(&self, candidate: &Candidate) -> Vec<HopOfNode> {
        let hop = |port: PortId, adjacency: AdjacencyId| HopOfNode { port: port.0, adjacency: adjacency.0 };
        let is_up = |way: &Way| way.port().is_none_or(|port| self.ports[usize::from(port.0)].config.is_up);
        let hops = candidate.ways.iter().filter(|way| is_up(way)).filter_map(|way| match *way {
            Way::Kernel => Some(hop(PortId::KERNEL, AdjacencyId::ON_LINK)),
            Way::OnLink(port) => Some(hop(port, AdjacencyId::ON_LINK)),
            Way::Adjacent(port, adjacency) => Some(hop(port, adjacency)),
            Way::Via(port, address) => Some(hop(port, self.gateways.get(&(port, address))?.adjacency?)),
        });
        let hops: BTreeSet<HopOfNode> = hops.collect();
        hops.into_iter().take(HOPS_MAX).collect()
    }
}

const OWN: Rank = Rank { metric: 0, origin: Origin::Own, which: 0 };

fn neighbour(port: PortId) -> Rank {
    Rank { metric: 0, origin: Origin::Neighbour, which: u32::from(port.0) }
}

fn connected(metric: u32) -> Rank {
    Rank { metric, origin: Origin::Connected, which: 0 }
}

fn unicast(ways: Vec<Way>) -> Candidate {
    Candidate { kind: RouteKind::Unicast, ways }
}

fn ways_of(candidates: &BTreeMap<Rank, Candidate>) -> BTreeSet<Way> {
    candidates.values().flat_map(|candidate| candidate.ways.iter().copied()).collect()
}

/// What stays on its link or in its node is not routed.
fn is_routed(prefix: &IpNet) -> bool {
    let (address, is_host_or_net) = (prefix.addr(), prefix.prefix_len() > 0);
    let is_link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !(is_host_or_net && (address.is_multicast() || address.is_loopback() || is_link_local))
}

#[cfg(test)]
#[path = "local_tests.rs"]
mod tests;
