//! The routes of this node, without I/O. The inputs are kernel changes, neighbours and the cluster file; the outputs
//! are routes to announce and commands for the forwarding thread.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use packet::ipv4;
use router::interner::{InternedId, Interner};
use router::routes::expand_weights;
use router::{AdjacencyId, PortConfig, PortId};
use router_ports::InterfaceIndex;
use router_ports::netlink::{
    Address, Change, Link, NeighbourState, Route, RouteHop, RouteKey, RouteKind as KernelKind,
};

use super::candidate::{
    CandidateRoute, Candidates, LOCAL, NextHop, Preference, is_routed, neighbour, of_kernel, on_port, unicast,
};
use super::effect::Effect;
use super::gateways::Gateways;
use super::open_ports::MTU_BYTES_DEFAULT;
use super::rejected_routes::{RejectReason, RejectedCounts, RejectedRoute, RejectedRoutes};
use super::rescan::Rescan;
use super::stale_routes::StaleRoutes;
use crate::cluster::{MTU_BYTES_MAX, Node, PortOfNode};
use crate::control::Announcements;
use crate::control::message::{AnnouncedHop, AnnouncedRoute, Origin, RouteChange, RouteKind};

/// `RTPROT_KERNEL`: routes that the kernel installs itself (rtnetlink(7)).
const PROTOCOL_KERNEL: u8 = 2;
/// The loopback interface.
const LOOPBACK: &str = "lo";
/// How many prefixes are visited in the time that one change takes.
const VISITS_PER_CHANGE: usize = 16;

/// A port, as far as the kernel or the cluster file knows it.
#[derive(Debug)]
struct LocalPort {
    interface: Option<InterfaceIndex>,
    config: PortConfig,
    /// The MTU of a device without a kernel interface. A VLAN has that of its parent.
    mtu_bytes_opened: u16,
    mtu_bytes_max: u16,
}

/// A newly opened port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenedPort {
    /// Its kernel interface, if the kernel has its addresses.
    pub interface: Option<InterfaceIndex>,
    /// Its configuration, as far as the device determines it.
    pub config: PortConfig,
}

impl LocalPort {
    fn new(opened: OpenedPort) -> LocalPort {
        let OpenedPort { interface, config } = opened;
        let mtu_bytes_opened = config.mtu_bytes;
        LocalPort { interface, config, mtu_bytes_opened, mtu_bytes_max: 0 }
    }
}

/// The routes of this node, and the state from which they are derived.
#[derive(Debug, Default)]
pub struct LocalRoutes {
    ports: Vec<LocalPort>,
    links: BTreeMap<InterfaceIndex, Link>,
    /// Addresses of the kernel.
    addresses: BTreeSet<(InterfaceIndex, IpNet)>,
    /// The TUN interface for packets to this node's kernel that arrived at other nodes.
    slow_path: Option<InterfaceIndex>,
    candidates: BTreeMap<IpNet, Candidates>,
    routes: Interner<CandidateRoute>,
    /// Of ports and gateways that have changed.
    rescan: Rescan,
    gateways: Gateways,
    /// The announced routes.
    announcements: Announcements,
    /// Addresses of the node that are not announced: those of interfaces that are not ports.
    private: BTreeSet<IpNet>,
    /// Static routes, and the number of times that they were set.
    statics: Vec<(IpNet, Preference)>,
    statics_generation: u16,
    /// Kernel routes that were not accepted as they are.
    rejected: RejectedRoutes,
    /// Kernel routes that are used though the kernel does not have them any more.
    stale: StaleRoutes,
    /// Whether a port or a gateway of these routes may have gone.
    is_stale_check_due: bool,
    dirty: BTreeSet<IpNet>,
    effects: Vec<Effect>,
}

impl LocalRoutes {
    /// Returns the state of a node without ports, with this TUN interface.
    pub fn new(slow_path: Option<InterfaceIndex>) -> Self {
        Self { slow_path, ..Self::default() }
    }

    /// Adds the next port.
    pub fn add_port(&mut self, opened: OpenedPort, port_config: &PortOfNode) -> PortId {
        let port = PortId(self.ports.len() as u8);
        self.ports.push(LocalPort::new(opened));
        self.apply_config(port, port_config);
        if !self.port(port).has_kernel {
            self.refresh(port);
        }
        self.effects.push(Effect::ConfigurePort(port, self.port(port).clone()));
        port
    }

    /// Applies the cluster file's settings of a port.
    fn apply_config(&mut self, port: PortId, port_config: &PortOfNode) {
        let state = &mut self.ports[usize::from(port.0)];
        state.mtu_bytes_max = port_config.mtu_bytes.unwrap_or(MTU_BYTES_MAX);
        if state.config.has_kernel {
            return;
        }
        state.mtu_bytes_opened = port_config.mtu_bytes.unwrap_or(MTU_BYTES_DEFAULT);
        let mut config = state.config.clone();
        config.addresses.clone_from(&port_config.addresses);
        let former = std::mem::replace(&mut state.config, config.clone());
        for network in former.addresses.iter().filter(|network| !config.addresses.contains(network)) {
            self.set_candidate(network.addr().into(), LOCAL, None);
            self.set_candidate(network.trunc(), on_port(port), None);
        }
        // All are set again, as two addresses may share a network. Their routes lead to the router itself, not to a
        // kernel.
        for network in config.addresses.iter().filter(|network| is_routed(network)) {
            self.set_candidate(network.addr().into(), LOCAL, Some(unicast(NextHop::Router)));
            self.set_candidate(network.trunc(), on_port(port), Some(unicast(NextHop::OnLink(port))));
        }
    }

    /// Replaces the static routes.
    pub fn set_static(&mut self, node: &Node) {
        // New routes are added before old ones are removed, so that a gateway in both keeps its adjacency.
        self.statics_generation = self.statics_generation.wrapping_add(1);
        let mut set = Vec::new();
        for (instance, route) in node.routes.iter().enumerate() {
            let Some((port, _)) = node.port(&route.port) else { continue };
            let next_hop = route.via.map_or(NextHop::OnLink(port), |via| NextHop::Via(port, via));
            let instance = u32::from(self.statics_generation) << 16 | instance as u32;
            let preference = Preference { metric: route.metric, origin: Origin::Static, instance };
            self.set_candidate(route.to, preference, Some(unicast(next_hop)));
            set.push((route.to, preference));
        }
        for (prefix, preference) in std::mem::replace(&mut self.statics, set) {
            self.set_candidate(prefix, preference, None);
        }
    }

    /// Replaces the ports: each is a former port by its number, or a newly opened one. Returns the former numbers that
    /// no longer denote the same port. The kernel's links, addresses, routes and neighbours have to be applied again.
    pub fn renumber_ports(&mut self, node: &Node, opened: Vec<Result<PortId, OpenedPort>>) -> Vec<PortId> {
        assert_eq!(node.ports.len(), opened.len());
        let stays = |index: usize| {
            let is_kept = |at: usize| matches!(opened.get(at), Some(Ok(from)) if usize::from(from.0) == at);
            let parent = self.ports[index].config.vlan.map(|vlan| usize::from(vlan.parent.0));
            is_kept(index) && parent.is_none_or(is_kept)
        };
        let others: Vec<usize> = (0..self.ports.len()).filter(|index| !stays(*index)).collect();
        others.iter().for_each(|index| self.detach(PortId(*index as u8)));
        let mut former: Vec<Option<LocalPort>> = std::mem::take(&mut self.ports).into_iter().map(Some).collect();
        for (index, (from, port_config)) in opened.into_iter().zip(&node.ports).enumerate() {
            let port = PortId(index as u8);
            let mut local_port = match from {
                Ok(from) => former[usize::from(from.0)].take().expect("each port stays once"),
                Err(opened) => LocalPort::new(opened),
            };
            local_port.config.vlan = node.vlan(port_config);
            let configured = local_port.config.clone();
            self.ports.push(local_port);
            self.apply_config(port, port_config);
            self.refresh(port);
            if others.contains(&index) || index >= former.len() || *self.port(port) != configured {
                self.effects.push(Effect::ConfigurePort(port, self.port(port).clone()));
            }
        }
        others.into_iter().map(|index| PortId(index as u8)).collect()
    }

    /// Removes the routes by a port, and its addresses.
    fn detach(&mut self, port: PortId) {
        let addresses = match &mut self.ports[usize::from(port.0)].config {
            config if config.has_kernel => Vec::new(),
            config => std::mem::take(&mut config.addresses),
        };
        for network in addresses {
            self.set_candidate(network.addr().into(), LOCAL, None);
        }
        let by_port: HashSet<InternedId> = self.routes_by(|next_hop| next_hop.port() == Some(port)).collect();
        let is_by_port =
            |(_, candidates): &(&IpNet, &Candidates)| candidates.iter().any(|(_, id)| by_port.contains(&id));
        let prefixes: Vec<IpNet> = self.candidates.iter().filter(is_by_port).map(|(prefix, _)| *prefix).collect();
        for prefix in prefixes {
            let of_prefix: Vec<_> = self.candidates.get(&prefix).into_iter().flat_map(Candidates::iter).collect();
            for (preference, id) in of_prefix.into_iter().filter(|(_, id)| by_port.contains(id)) {
                let mut candidate = self.routes.get(id).clone();
                candidate.next_hops.retain(|(next_hop, _)| next_hop.port() != Some(port));
                let is_left = candidate.kind != RouteKind::Unicast || !candidate.next_hops.is_empty();
                self.set_candidate(prefix, preference, is_left.then_some(candidate));
            }
        }
    }

    /// Returns the candidate routes with a next hop of this kind.
    fn routes_by(&self, is_it: impl Fn(NextHop) -> bool) -> impl Iterator<Item = InternedId> {
        let uses_it =
            move |candidate: &CandidateRoute| candidate.next_hops.iter().any(|(next_hop, _)| is_it(*next_hop));
        self.routes.iter().filter(move |(_, candidate)| uses_it(candidate)).map(|(id, _)| id)
    }

    /// Sets the interface of a port, or removes it when the device is gone.
    pub fn set_interface(&mut self, port: PortId, interface: Option<InterfaceIndex>) {
        self.ports[usize::from(port.0)].interface = interface;
        self.refresh(port);
    }

    /// Returns the port of a kernel interface.
    pub fn port_of(&self, interface: InterfaceIndex) -> Option<PortId> {
        let index = self.ports.iter().position(|port| port.interface == Some(interface))?;
        Some(PortId(index as u8))
    }

    /// Returns the kernel's link of a port.
    pub fn link(&self, port: PortId) -> Option<&Link> {
        self.links.get(&self.ports[usize::from(port.0)].interface?)
    }

    /// Returns the configuration of a port.
    pub fn port(&self, port: PortId) -> &PortConfig {
        &self.ports[usize::from(port.0)].config
    }

    /// Returns the announced routes.
    pub fn announcements(&self) -> &Announcements {
        &self.announcements
    }

    /// Returns the announced routes, to prune withdrawals.
    pub fn announcements_mut(&mut self) -> &mut Announcements {
        &mut self.announcements
    }

    /// Applies a change of the kernel's state.
    pub fn apply_kernel_change(&mut self, change: Change) {
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
            Change::Address(address) => self.update_address(&address),
            Change::AddressGone { interface, network } => self.remove_address(interface, network),
            Change::Route(route) => self.update_route(route),
            Change::RouteGone(key) => {
                let connected = Preference { origin: Origin::Connected, ..of_kernel(key.metric) };
                self.set_candidate(key.prefix, connected, None);
                self.remove_kernel_route(key);
                self.rejected.set(key, None);
            }
            Change::Neighbour(neighbour) => {
                if let (Some(port), Some(mac), NeighbourState::Permanent) =
                    (self.port_of(neighbour.interface), neighbour.mac, neighbour.state)
                {
                    self.effects.push(Effect::LearnNeighbour(port, neighbour.address, mac));
                }
            }
            // The router tracks the reachability of neighbours itself.
            Change::NeighbourGone { .. } => {}
        }
    }

    fn update_address(&mut self, address: &Address) {
        let Address { interface, network, is_usable, .. } = *address;
        if !is_usable {
            return self.remove_address(interface, network);
        }
        if self.addresses.insert((interface, network)) {
            self.add_local_address(network.addr(), self.is_private(interface));
            self.refresh_interface(interface);
        }
    }

    fn remove_address(&mut self, interface: InterfaceIndex, network: IpNet) {
        if !self.addresses.remove(&(interface, network)) {
            return;
        }
        let address = network.addr();
        match self.addresses.iter().find(|(_, other)| other.addr() == address).map(|(other, _)| *other) {
            Some(other) => self.add_local_address(address, self.is_private(other)),
            None => self.remove_local_address(address),
        }
        self.refresh_interface(interface);
    }

    /// Returns whether the addresses of an interface are not announced.
    fn is_private(&self, interface: InterfaceIndex) -> bool {
        let is_loopback = self.links.get(&interface).is_some_and(|link| link.name == LOOPBACK);
        self.port_of(interface).is_none() && self.slow_path != Some(interface) && !is_loopback
    }

    fn add_local_address(&mut self, address: IpAddr, is_private: bool) {
        self.effects.push(Effect::AddLocalAddress(address));
        let prefix = IpNet::from(address);
        if !is_routed(&prefix) {
            return;
        }
        if is_private {
            self.private.insert(prefix);
        } else {
            self.private.remove(&prefix);
        }
        self.set_candidate(prefix, LOCAL, Some(unicast(NextHop::Kernel)));
        // The route may be unchanged while its privacy has changed.
        self.dirty.insert(prefix);
    }

    fn remove_local_address(&mut self, address: IpAddr) {
        self.effects.push(Effect::RemoveLocalAddress(address));
        self.set_candidate(address.into(), LOCAL, None);
    }

    fn update_route(&mut self, route: Route) {
        let next_hops: Vec<(NextHop, u16)> =
            route.hops.iter().filter_map(|hop| Some((self.next_hop(route.kind, hop)?, hop.weight))).collect();
        let rejected = self.rejection_of(&route, next_hops.is_empty());
        if self.rejected.set(route.key, rejected) {
            self.effects.extend(rejected.map(|rejected| Effect::RouteRejected(route.key.prefix, rejected)));
        }
        let Route { key: RouteKey { prefix, metric }, protocol, kind, .. } = route;
        let is_connected =
            protocol == PROTOCOL_KERNEL && !next_hops.iter().any(|(next_hop, _)| matches!(next_hop, NextHop::Via(..)));
        let origin = if is_connected { Origin::Connected } else { Origin::Kernel };
        let kind = match kind {
            KernelKind::Unicast | KernelKind::Local => RouteKind::Unicast,
            KernelKind::Blackhole => RouteKind::Blackhole,
            KernelKind::Unreachable => RouteKind::Unreachable,
            KernelKind::Prohibit => RouteKind::Prohibited,
            KernelKind::Throw => RouteKind::Throw,
        };
        // Routes by other interfaces only, and the kernel's own unreachable routes, are not announced.
        let is_announced = if kind == RouteKind::Unicast { !next_hops.is_empty() } else { protocol != PROTOCOL_KERNEL };
        let other = if is_connected { Origin::Kernel } else { Origin::Connected };
        self.set_candidate(prefix, Preference { origin: other, ..of_kernel(metric) }, None);
        let candidate = (is_announced && is_routed(&prefix)).then_some(CandidateRoute { kind, next_hops, protocol });
        self.set_candidate(prefix, Preference { origin, ..of_kernel(metric) }, candidate);
        self.replace_stale_routes(route.key, protocol);
    }

    /// Converts a next hop of the kernel; `None` if the router cannot forward the same way.
    fn next_hop(&self, kind: KernelKind, hop: &RouteHop) -> Option<NextHop> {
        if kind == KernelKind::Local {
            return (!self.is_private(hop.interface)).then_some(NextHop::Kernel);
        }
        let port = self.port_of(hop.interface).filter(|_| !hop.is_encapsulated)?;
        Some(hop.gateway.map_or(NextHop::OnLink(port), |gateway| NextHop::Via(port, gateway)))
    }

    /// Returns why a route is not accepted, if so. Routes by the TUN interface are the cluster's own.
    fn rejection_of(&self, route: &Route, is_entire_route: bool) -> Option<RejectedRoute> {
        let is_lost =
            |hop: &&RouteHop| self.next_hop(route.kind, hop).is_none() && self.slow_path != Some(hop.interface);
        let reason = match route.hops.iter().find(is_lost) {
            _ if !is_routed(&route.key.prefix) => None,
            Some(hop) if hop.is_encapsulated => Some(RejectReason::Encapsulated),
            Some(hop) => Some(RejectReason::NoPort(hop.interface)),
            None if is_entire_route => None,
            None => route.mtu_bytes.map(RejectReason::Mtu),
        };
        reason.map(|reason| RejectedRoute { reason, is_entire_route })
    }

    /// Returns the number of kernel routes that were not accepted as they are.
    pub fn rejected(&self) -> RejectedCounts {
        self.rejected.counts()
    }

    /// Returns the kernel's name of an interface.
    pub fn name_of(&self, interface: InterfaceIndex) -> Option<&str> {
        self.links.get(&interface).map(|link| link.name.as_str())
    }

    /// Adds a neighbour that the forwarding thread has resolved.
    pub fn neighbour_up(&mut self, port: PortId, address: IpAddr, adjacency: AdjacencyId) {
        self.gateways.set_unreachable(port, address, false);
        let prefix = IpNet::from(address);
        if is_routed(&prefix) {
            self.set_candidate(prefix, neighbour(port), Some(unicast(NextHop::Adjacent(port, adjacency))));
        }
    }

    /// Removes a neighbour.
    pub fn neighbour_down(&mut self, port: PortId, address: IpAddr) {
        self.is_stale_check_due |= self.gateways.set_unreachable(port, address, true);
        self.set_candidate(address.into(), neighbour(port), None);
    }

    /// Replaces all neighbours, after events were lost.
    pub fn replace_neighbours(&mut self, known: impl IntoIterator<Item = (PortId, IpAddr, AdjacencyId)>) {
        let mut former: Vec<(IpNet, Preference)> = Vec::new();
        for (prefix, candidates) in &self.candidates {
            let neighbours = candidates.iter().filter(|(preference, _)| preference.origin == Origin::Neighbour);
            former.extend(neighbours.map(|(preference, _)| (*prefix, preference)));
        }
        let known: Vec<_> = known.into_iter().collect();
        // A set, as there may be thousands of neighbours.
        let current: BTreeSet<(IpNet, Preference)> =
            known.iter().map(|(port, address, _)| (IpNet::from(*address), neighbour(*port))).collect();
        for (prefix, preference) in former.into_iter().filter(|of_neighbour| !current.contains(of_neighbour)) {
            self.neighbour_down(PortId(preference.instance as u8), prefix.addr());
        }
        for (port, address, adjacency) in known {
            self.neighbour_up(port, address, adjacency);
        }
    }

    /// Sets the requested adjacency of a gateway; `None` when the neighbour table is full.
    pub fn adjacency_pinned(&mut self, port: PortId, address: IpAddr, adjacency: Option<AdjacencyId>) {
        if self.gateways.set_adjacency(port, address, adjacency, &mut self.effects) {
            let by_gateway: Vec<_> = self.routes_by(|next_hop| next_hop == NextHop::Via(port, address)).collect();
            self.rescan.begin(by_gateway);
        }
    }

    /// Sets or removes a candidate route to a prefix.
    fn set_candidate(&mut self, prefix: IpNet, preference: Preference, candidate: Option<CandidateRoute>) {
        let protocol = candidate.as_ref().map(|candidate| candidate.protocol);
        let id = candidate.map(|candidate| self.add_user(&candidate));
        let candidates = match id {
            Some(_) => self.candidates.entry(prefix).or_default(),
            None => match self.candidates.get_mut(&prefix) {
                Some(candidates) => candidates,
                None => return,
            },
        };
        let former = candidates.set(preference, id);
        if candidates.is_empty() {
            self.candidates.remove(&prefix);
        }
        if former != id {
            self.dirty.insert(prefix);
        }
        if preference.origin == Origin::Kernel {
            let former = former.map(|former| self.routes.get(former).protocol);
            self.count_of_protocol(RouteKey { prefix, metric: preference.metric }, former, protocol);
        }
        let unused = former.and_then(|former| self.routes.release(former));
        for (next_hop, _) in unused.iter().flat_map(|route| &route.next_hops) {
            if let NextHop::Via(port, address) = *next_hop {
                self.gateways.release(port, address, &mut self.effects);
            }
        }
    }

    /// Adds a user of a candidate route, whose gateways are used from the first one on.
    fn add_user(&mut self, candidate: &CandidateRoute) -> InternedId {
        let (id, is_new) = self.routes.add(candidate, |candidate| Arc::new(candidate.clone()));
        for (next_hop, _) in candidate.next_hops.iter().filter(|_| is_new) {
            if let NextHop::Via(port, address) = *next_hop {
                self.gateways.reference(port, address, &mut self.effects);
            }
        }
        id
    }

    fn refresh_interface(&mut self, interface: InterfaceIndex) {
        if let Some(port) = self.port_of(interface) {
            self.refresh(port);
        }
        // The name of the interface decides whether its addresses are private.
        let local: Vec<IpAddr> =
            self.addresses.iter().filter(|(on, _)| *on == interface).map(|(_, network)| network.addr()).collect();
        let is_private = self.is_private(interface);
        for prefix in local.into_iter().map(IpNet::from).filter(is_routed) {
            let is_change = if is_private { self.private.insert(prefix) } else { self.private.remove(&prefix) };
            if is_change {
                self.dirty.insert(prefix);
            }
        }
    }

    /// Updates a port from its link and addresses, then its VLANs.
    fn refresh(&mut self, port: PortId) {
        self.refresh_one(port);
        for index in 0..self.ports.len() {
            if self.ports[index].config.vlan.is_some_and(|vlan| vlan.parent == port) {
                self.refresh_one(PortId(index as u8));
            }
        }
    }

    fn refresh_one(&mut self, port: PortId) {
        let state = &self.ports[usize::from(port.0)];
        let mut config = state.config.clone();
        if config.has_kernel {
            let link = state.interface.and_then(|interface| self.links.get(&interface));
            // Some interfaces accept an MTU below the IPv4 minimum.
            let carries_v4 = |link: &Link| link.mtu_bytes >= ipv4::MTU_MIN as u32;
            config.is_up = link.is_some_and(|link| link.is_up && link.has_carrier && carries_v4(link));
            if let Some(link) = link {
                let mtu_bytes = link.mtu_bytes.min(u32::from(state.mtu_bytes_max));
                config.mtu_bytes = u16::try_from(mtu_bytes).unwrap_or(state.mtu_bytes_max).max(ipv4::MTU_MIN as u16);
                config.mac = link.mac.unwrap_or(config.mac);
            }
            let of_port = self.addresses.iter().filter(|(on, _)| Some(*on) == state.interface);
            config.addresses = of_port.map(|(_, network)| *network).collect();
        } else if let Some(vlan) = config.vlan {
            let parent = &self.ports[usize::from(vlan.parent.0)].config;
            (config.mac, config.is_up) = (parent.mac, parent.is_up);
            config.mtu_bytes = parent.mtu_bytes.min(state.mtu_bytes_max);
        } else {
            config.mtu_bytes = state.mtu_bytes_opened.min(state.mtu_bytes_max);
        }
        if config == state.config {
            return;
        }
        if config.is_up != state.config.is_up {
            let by_port: Vec<_> = self.routes_by(|next_hop| next_hop.port() == Some(port)).collect();
            self.rescan.begin(by_port);
        }
        self.ports[usize::from(port.0)].config = config.clone();
        self.is_stale_check_due = true;
        self.effects.push(Effect::ConfigurePort(port, config));
    }

    /// Returns the pending effects in order.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Returns at most `changes_max` of the changes of this node's routes since the last call, for its own table, and
    /// updates the announcements, which exclude private addresses. [`LocalRoutes::has_more`] says whether there are
    /// others.
    pub fn update_routes(&mut self, changes_max: usize) -> Vec<RouteChange> {
        let mtu = |port: &LocalPort| if port.config.is_up { port.config.mtu_bytes } else { 0 };
        self.announcements.set_mtus_bytes(self.ports.iter().map(mtu).collect());
        if self.dirty.len() < changes_max {
            let visits_max = changes_max.saturating_mul(VISITS_PER_CHANGE);
            self.dirty.extend(self.rescan.proceed(&self.candidates, visits_max));
        }
        let mut changes = Vec::new();
        while changes.len() < changes_max
            && let Some(prefix) = self.dirty.pop_first()
        {
            let best = self.best(&prefix);
            let is_private =
                best.as_ref().is_some_and(|best| best.origin == Origin::Local) && self.private.contains(&prefix);
            match &best {
                Some(announced) if !is_private => _ = self.announcements.announce(prefix, announced),
                _ => _ = self.announcements.withdraw(&prefix),
            }
            changes.push(RouteChange { prefix, announced: best });
        }
        changes
    }

    /// Returns whether there are changes that [`LocalRoutes::update_routes`] has not returned.
    pub fn has_more(&self) -> bool {
        !self.dirty.is_empty() || !self.rescan.is_done()
    }

    fn best(&self, prefix: &IpNet) -> Option<AnnouncedRoute> {
        self.candidates.get(prefix)?.iter().find_map(|(preference, id)| {
            let candidate = self.routes.get(id);
            let hops = self.hops(candidate);
            let is_usable = candidate.kind != RouteKind::Unicast || !hops.is_empty();
            is_usable.then(|| AnnouncedRoute {
                metric: preference.announced(),
                origin: preference.origin,
                kind: candidate.kind,
                hops,
            })
        })
    }

    fn hops(&self, candidate: &CandidateRoute) -> Vec<AnnouncedHop> {
        let hop = |port: PortId, adjacency: AdjacencyId| AnnouncedHop { port: port.0, adjacency: adjacency.0 };
        let is_up =
            |next_hop: &NextHop| next_hop.port().is_none_or(|port| self.ports[usize::from(port.0)].config.is_up);
        let mut weights: BTreeMap<AnnouncedHop, u32> = BTreeMap::new();
        for (next_hop, weight) in candidate.next_hops.iter().filter(|(next_hop, _)| is_up(next_hop)) {
            let found = match *next_hop {
                NextHop::Kernel => Some(hop(PortId::KERNEL, AdjacencyId::ON_LINK)),
                NextHop::Router => Some(hop(PortId::KERNEL, AdjacencyId::ROUTER)),
                NextHop::OnLink(port) => Some(hop(port, AdjacencyId::ON_LINK)),
                NextHop::Adjacent(port, adjacency) => Some(hop(port, adjacency)),
                NextHop::Via(port, address) => {
                    self.gateways.adjacency(port, address).map(|adjacency| hop(port, adjacency))
                }
            };
            if let Some(found) = found {
                *weights.entry(found).or_default() += u32::from(*weight);
            }
        }
        let weights: Vec<(AnnouncedHop, u32)> = weights.into_iter().collect();
        expand_weights(&weights).collect()
    }
}

mod stale;

#[cfg(test)]
mod tests;
