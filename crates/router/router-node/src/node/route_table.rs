//! The routes of all nodes: written into the tables that the forwarder reads, and those to other nodes into the kernel,
//! so that the node's own programs reach them.

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;
use router::routes::{FibEntry, Rib, RouteError};
use router::{Hop, NodeId, PortId};
use router_ports::InterfaceIndex;
use router_ports::netlink::{Requests, RouteRequest};
use tracing::warn;

use crate::control::message::{AnnouncedHop, AnnouncedRoute, Origin, RouteChange, RouteKind};

/// The metric of routes in the kernel that lead to other nodes: whoever has a route of their own there prefers that.
const KERNEL_METRIC: u32 = 30_000;
/// Routes to other nodes in the kernel at most: a full table is for the forwarder, and the kernel's own packets to what
/// is left out need a default route.
const INSTALLED_MAX: usize = 1 << 16;
/// Routes that are written into the kernel in one turn.
const INSTALLS_PER_CALL: usize = 1024;
/// Routes of a node that is gone that are taken out in one turn.
const WITHDRAWALS_PER_CALL: usize = 4096;

/// The routes of all nodes.
pub struct RouteTable {
    rib: Rib,
    own: NodeId,
    slow_path: InterfaceIndex,
    requests: Requests,
    /// By node: neighbours, whose network is in the kernel as a whole.
    neighbours: Vec<HashSet<IpNet>>,
    /// Ports of this node's whose networks its kernel does not know.
    ports_without_kernel: Vec<PortId>,
    /// What this node reaches by those ports, or by the cluster file: its kernel knows nothing of it.
    unknown_to_kernel: HashSet<IpNet>,
    installed: BTreeSet<IpNet>,
    dirty: BTreeSet<IpNet>,
    has_withdrawals: bool,
    is_full: bool,
    unusable_routes: u64,
}

impl RouteTable {
    /// No routes yet.
    pub fn new(rib: Rib, own: NodeId, nodes: usize, slow_path: InterfaceIndex, requests: Requests) -> Self {
        Self {
            rib,
            own,
            slow_path,
            requests,
            neighbours: vec![HashSet::new(); nodes],
            ports_without_kernel: Vec::new(),
            unknown_to_kernel: HashSet::new(),
            installed: BTreeSet::new(),
            dirty: BTreeSet::new(),
            has_withdrawals: false,
            is_full: false,
            unusable_routes: 0,
        }
    }

    /// These ports of this node's have no kernel. It counts for routes that change after that.
    pub fn set_ports_without_kernel(&mut self, ports: Vec<PortId>) {
        self.ports_without_kernel = ports;
    }

    fn is_unknown_to_kernel(&self, announced: &AnnouncedRoute) -> bool {
        let is_without = |hop: &AnnouncedHop| self.ports_without_kernel.contains(&PortId(hop.port));
        match announced.origin {
            Origin::Static => true,
            Origin::Connected => announced.hops.iter().all(is_without),
            Origin::Local | Origin::Neighbour | Origin::Kernel => false,
        }
    }

    /// A node's routes have changed. What the tables have no room for is said, and left out.
    pub fn change(&mut self, node: NodeId, changes: Vec<RouteChange>) {
        for RouteChange { prefix, announced } in changes {
            let neighbours = &mut self.neighbours[usize::from(node.0)];
            let is_host = announced.as_ref().is_some_and(|announced| announced.origin == Origin::Neighbour);
            if is_host {
                neighbours.insert(prefix);
            } else {
                neighbours.remove(&prefix);
            }
            if node == self.own {
                if announced.as_ref().is_some_and(|announced| self.is_unknown_to_kernel(announced)) {
                    self.unknown_to_kernel.insert(prefix);
                } else {
                    self.unknown_to_kernel.remove(&prefix);
                }
            }
            let done = match announced {
                Some(announced) => {
                    let hops = hops_of(node, &announced);
                    self.rib.announce(node, prefix, announced.metric, &hops)
                }
                None => self.rib.withdraw(node, prefix).map(|_| ()),
            };
            self.log_left_out(done);
            self.dirty.insert(prefix);
        }
    }

    /// A node is gone.
    pub fn withdraw_node(&mut self, node: NodeId) {
        let done = self.rib.withdraw_node(node);
        self.log_left_out(done);
        self.neighbours[usize::from(node.0)].clear();
        self.dirty.extend(self.installed.iter());
        self.has_withdrawals = true;
    }

    fn log_left_out(&mut self, done: Result<(), RouteError>) {
        if let Err(error) = done {
            self.unusable_routes += 1;
            // The first of a flood tells as much as all of them.
            if self.unusable_routes.is_power_of_two() {
                warn!(left_out = self.unusable_routes, "a route is left out: {error}");
            }
        }
    }

    /// Does some of what is left to be done. Whether there is more.
    pub fn process(&mut self) -> bool {
        if self.has_withdrawals {
            match self.rib.process_withdrawals(WITHDRAWALS_PER_CALL) {
                Ok(has_more) => self.has_withdrawals = has_more,
                Err(error) => self.log_left_out(Err(error)),
            }
        }
        self.install();
        self.has_withdrawals || !self.dirty.is_empty()
    }

    fn install(&mut self) {
        let (mut wanted, mut unwanted) = (Vec::new(), Vec::new());
        for _ in 0..INSTALLS_PER_CALL {
            let Some(prefix) = self.dirty.pop_first() else { break };
            match (self.is_wanted(prefix), self.installed.contains(&prefix)) {
                (true, false) if self.installed.len() < INSTALLED_MAX => {
                    self.installed.insert(prefix);
                    wanted.push(self.request(prefix));
                }
                (true, false) if !self.is_full => {
                    self.is_full = true;
                    warn!(
                        "the kernel gets no more than {INSTALLED_MAX} routes: give it a default route dev crosslane0 \
                         for its own packets to others"
                    );
                }
                (false, true) => {
                    self.installed.remove(&prefix);
                    unwanted.push(self.request(prefix));
                }
                _ => {}
            }
        }
        if !unwanted.is_empty()
            && let Err(error) = self.requests.remove_routes(&unwanted)
        {
            warn!("routes of the kernel: {error}");
        }
        if !wanted.is_empty()
            && let Err(error) = self.requests.install_routes(&wanted)
        {
            warn!("routes of the kernel: {error}");
        }
    }

    fn request(&self, prefix: IpNet) -> RouteRequest {
        RouteRequest { prefix, metric: KERNEL_METRIC, interface: self.slow_path, gateway: None }
    }

    /// Whether the node's own programs reach a destination by way of the router: it is at other nodes, or at a port
    /// without a kernel.
    fn is_wanted(&self, prefix: IpNet) -> bool {
        let sources = self.rib.sources(prefix);
        let Some(best) = sources.iter().map(|source| source.metric).min() else { return false };
        let mut winners = sources.iter().filter(|source| source.metric == best);
        if winners.clone().any(|source| source.node == self.own) {
            return self.unknown_to_kernel.contains(&prefix);
        }
        winners.any(|source| !self.neighbours[usize::from(source.node.0)].contains(&prefix))
    }

    /// Takes out of the kernel what was put there.
    pub fn clean_up(&mut self) {
        if let Err(error) = self.requests.remove_own_routes() {
            warn!("routes of the kernel: {error}");
        }
        self.installed.clear();
    }

    /// Destinations of IPv4 and of IPv6 that packets are forwarded to.
    pub fn routes(&self) -> (usize, usize) {
        self.rib.routes()
    }

    /// Routes that the kernel has from here.
    pub fn installed(&self) -> usize {
        self.installed.len()
    }

    /// Destinations that are announced, and that the tables have no room for.
    pub fn left_out(&self) -> usize {
        self.rib.not_installed()
    }

    /// The prefix that packets to an address match, and before it those that they would match if there were room.
    pub fn prefixes_of(&self, address: IpAddr) -> Vec<IpNet> {
        let found = self.rib.lookup(address).map(|(prefix, _)| prefix);
        let is_nearer = |prefix: &IpNet| found.is_none_or(|found| found.prefix_len() < prefix.prefix_len());
        let left_out =
            self.rib.prefixes_not_installed().filter(|prefix| prefix.contains(&address) && is_nearer(prefix));
        let mut nearer: Vec<IpNet> = left_out.collect();
        nearer.reverse();
        nearer.extend(found);
        nearer
    }

    /// All prefixes within a network, in their order: also those that there is no room for.
    pub fn prefixes(&self, within: Option<IpNet>) -> Vec<IpNet> {
        let is_asked = |prefix: &IpNet| within.is_none_or(|within| within.contains(prefix));
        let mut all: Vec<IpNet> = self.rib.iter().map(|(prefix, _)| prefix).filter(is_asked).collect();
        let in_tables = all.len();
        all.extend(self.rib.prefixes_not_installed().filter(is_asked));
        if all.len() > in_tables {
            all.sort();
        }
        all
    }

    /// How packets to a prefix are forwarded, by the tables that they are looked up in.
    pub fn fib_entry(&self, prefix: IpNet) -> Option<FibEntry> {
        self.rib.fib_entry(prefix)
    }
}

fn hops_of(node: NodeId, announced: &AnnouncedRoute) -> Vec<Hop> {
    match announced.kind {
        RouteKind::Unicast => announced.hops.iter().map(|hop| hop.at(node)).collect(),
        RouteKind::Blackhole => vec![Hop::BLACKHOLE],
        RouteKind::Unreachable => vec![Hop::UNREACHABLE],
        RouteKind::Prohibited => vec![Hop::PROHIBITED],
        RouteKind::Throw => vec![Hop::NO_ROUTE],
    }
}
