//! The routes of all nodes. They are written to the forwarding tables; those to other nodes are also installed in the
//! kernel, for the node's own programs.

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;
use router::routes::{FibEntry, Rib, RouteError};
use router::{Hop, NodeId, PortId};
use router_ports::InterfaceIndex;
use router_ports::netlink::{Requests, RouteRequest};
use tracing::warn;

use crate::control::message::{AnnouncedHop, AnnouncedRoute, Origin, RouteChange, RouteKind};

/// Metric of the routes installed in the kernel: any other route there is preferred.
const KERNEL_METRIC: u32 = 30_000;
/// Maximum number of routes installed in the kernel. With a full Internet table, the kernel needs a default route for
/// its own packets.
const INSTALLED_MAX: usize = 1 << 16;
/// Interval between two looks at prefixes that wait for room in the kernel.
const REFILL_INTERVAL_NS: u64 = 1_000_000_000;
/// Maximum number of prefixes installed in the kernel per call.
const INSTALLS_PER_CALL: usize = 1024;
/// Maximum number of routes of a lost or returned node that are merged per call.
const MERGES_PER_CALL: usize = 4096;
/// Maximum number of routes of one node: two full Internet tables and some more.
pub const ROUTES_MAX: usize = 3 << 20;

/// Which prefixes the kernel has, and which it needs and has no room for.
#[derive(Default)]
struct KernelPrefixes {
    installed: BTreeSet<IpNet>,
    waiting: BTreeSet<IpNet>,
}

/// What is to be done with a prefix.
#[derive(Debug, PartialEq, Eq)]
enum KernelStep {
    None,
    Install,
    Remove,
    Wait,
}

impl KernelPrefixes {
    /// Sets whether the kernel needs a prefix, of which it has room for this number.
    fn set(&mut self, prefix: IpNet, is_wanted: bool, installed_max: usize) -> KernelStep {
        match (is_wanted, self.installed.contains(&prefix)) {
            (true, false) if self.installed.len() < installed_max => {
                self.waiting.remove(&prefix);
                self.installed.insert(prefix);
                KernelStep::Install
            }
            (true, false) => {
                self.waiting.insert(prefix);
                KernelStep::Wait
            }
            (false, true) => {
                self.installed.remove(&prefix);
                KernelStep::Remove
            }
            (false, false) => {
                self.waiting.remove(&prefix);
                KernelStep::None
            }
            (true, true) => KernelStep::None,
        }
    }

    /// Takes prefixes that wait, as many as there is room for, and at most `prefixes_max`.
    fn take_waiting(&mut self, prefixes_max: usize, installed_max: usize) -> Vec<IpNet> {
        let count = installed_max.saturating_sub(self.installed.len()).min(prefixes_max);
        (0..count).map_while(|_| self.waiting.pop_first()).collect()
    }
}

/// The routes of all nodes.
pub struct RouteTable {
    rib: Rib,
    own: NodeId,
    slow_path: InterfaceIndex,
    requests: Requests,
    /// By node: its neighbours. The kernel has the route to their network instead.
    neighbours: Vec<HashSet<IpNet>>,
    /// Whether the kernel forwards: it then needs the routes to neighbours of other nodes as well, as their network may
    /// have ports of several nodes.
    kernel_forwards: bool,
    /// Ports of this node whose networks its kernel does not know.
    ports_without_kernel: Vec<PortId>,
    /// Prefixes that this node reaches by those ports or by static routes, which its kernel does not know.
    unknown_to_kernel: HashSet<IpNet>,
    in_kernel: KernelPrefixes,
    /// When prefixes that wait may be installed again.
    refill_at_ns: u64,
    dirty: BTreeSet<IpNet>,
    has_pending: bool,
    is_full_logged: bool,
    unusable_routes: u64,
}

impl RouteTable {
    /// Returns an empty table.
    pub fn new(rib: Rib, own: NodeId, nodes: usize, slow_path: InterfaceIndex, requests: Requests) -> Self {
        Self {
            rib,
            own,
            slow_path,
            requests,
            neighbours: vec![HashSet::new(); nodes],
            kernel_forwards: false,
            ports_without_kernel: Vec::new(),
            unknown_to_kernel: HashSet::new(),
            in_kernel: KernelPrefixes::default(),
            refill_at_ns: 0,
            dirty: BTreeSet::new(),
            has_pending: false,
            is_full_logged: false,
            unusable_routes: 0,
        }
    }

    /// Sets the ports without a kernel interface, for later changes.
    pub fn set_ports_without_kernel(&mut self, ports: Vec<PortId>) {
        self.ports_without_kernel = ports;
    }

    /// Sets whether the kernel forwards.
    pub fn set_kernel_forwards(&mut self, kernel_forwards: bool) {
        self.kernel_forwards = kernel_forwards;
        // What it means that the kernel is full differs.
        self.is_full_logged = false;
        self.dirty.extend(self.neighbours.iter().flatten());
    }

    fn is_unknown_to_kernel(&self, announced: &AnnouncedRoute) -> bool {
        let is_without = |hop: &AnnouncedHop| self.ports_without_kernel.contains(&PortId(hop.port));
        match announced.origin {
            Origin::Static => true,
            Origin::Connected => announced.hops.iter().all(is_without),
            Origin::Local | Origin::Neighbour | Origin::Kernel => false,
        }
    }

    /// Applies changes of a node's routes. Routes that the forwarding tables have no room for are left out and logged.
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

    /// Stops using the routes of a node, and keeps them for [`RouteTable::resume_node`].
    pub fn suspend_node(&mut self, node: NodeId) {
        let done = self.rib.suspend_node(node);
        self.log_left_out(done);
        self.has_pending = true;
    }

    /// Uses the routes of a node again, which were kept.
    pub fn resume_node(&mut self, node: NodeId) {
        let done = self.rib.resume_node(node).map(|_| ());
        self.log_left_out(done);
        self.has_pending = true;
    }

    /// Sets whether packets reach a node. The routes of one that they do not reach are stored, and not used.
    pub fn set_reachable(&mut self, node: NodeId, is_reachable: bool) {
        let done = self.rib.set_reachable(node, is_reachable);
        self.log_left_out(done);
        self.has_pending = true;
    }

    /// Forgets the routes of a node that are kept.
    pub fn forget_node(&mut self, node: NodeId) {
        self.rib.forget_node(node);
        self.neighbours[usize::from(node.0)] = HashSet::new();
    }

    /// Returns the number of routes of a node that are used.
    pub fn routes_of(&self, node: NodeId) -> usize {
        self.rib.routes_of(node)
    }

    fn log_left_out(&mut self, done: Result<(), RouteError>) {
        if let Err(error) = done {
            self.unusable_routes += 1;
            // Logged at each power of two only, as there may be very many.
            if self.unusable_routes.is_power_of_two() {
                warn!(left_out = self.unusable_routes, "a route is left out of the forwarding tables: {error}");
            }
        }
    }

    /// Processes a bounded part of the pending work. Returns whether more is pending.
    pub fn process(&mut self, now_ns: u64) -> bool {
        // Slowly: those that wait may be the next ones to go.
        if now_ns >= self.refill_at_ns {
            self.refill_at_ns = now_ns + REFILL_INTERVAL_NS;
            self.dirty.extend(self.in_kernel.take_waiting(INSTALLS_PER_CALL, INSTALLED_MAX));
        }
        if self.has_pending {
            let Self { rib, dirty, .. } = self;
            match rib.process_pending(MERGES_PER_CALL, |prefix| _ = dirty.insert(prefix)) {
                Ok(has_more) => self.has_pending = has_more,
                Err(error) => self.log_left_out(Err(error)),
            }
        }
        self.install();
        self.has_pending || !self.dirty.is_empty()
    }

    fn install(&mut self) {
        let (mut wanted, mut unwanted) = (Vec::new(), Vec::new());
        for _ in 0..INSTALLS_PER_CALL {
            let Some(prefix) = self.dirty.pop_first() else { break };
            let is_wanted = self.is_wanted(prefix);
            match self.in_kernel.set(prefix, is_wanted, INSTALLED_MAX) {
                KernelStep::Install => wanted.push(self.request(prefix)),
                KernelStep::Remove => unwanted.push(self.request(prefix)),
                KernelStep::Wait => self.log_full(),
                KernelStep::None => {}
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

    fn log_full(&mut self) {
        if std::mem::replace(&mut self.is_full_logged, true) {
            return;
        }
        let remedy = match self.kernel_forwards {
            true => "the kernel forwards because of packet filters, and loses packets to other destinations: add",
            false => "for packets of this node's programs, add",
        };
        warn!(
            "no more than {INSTALLED_MAX} routes are installed in the kernel; {remedy} a default route dev crosslane0"
        );
    }

    /// Returns the number of routes that the kernel needs and has no room for.
    pub fn waiting(&self) -> usize {
        self.in_kernel.waiting.len()
    }

    fn request(&self, prefix: IpNet) -> RouteRequest {
        RouteRequest { prefix, metric: KERNEL_METRIC, interface: self.slow_path, gateway: None }
    }

    /// Returns whether the kernel needs a route to the prefix through the router: it is at other nodes, or at a port
    /// without a kernel interface.
    fn is_wanted(&self, prefix: IpNet) -> bool {
        let mut winners = self.rib.winners(prefix).peekable();
        if winners.peek().is_none() {
            return false;
        }
        let mut is_host_elsewhere = true;
        for node in winners {
            if node == self.own {
                return self.unknown_to_kernel.contains(&prefix);
            }
            is_host_elsewhere &= self.neighbours[usize::from(node.0)].contains(&prefix);
        }
        self.kernel_forwards || !is_host_elsewhere
    }

    /// Removes the installed routes from the kernel.
    pub fn clean_up(&mut self) {
        if let Err(error) = self.requests.remove_own_routes() {
            warn!("routes of the kernel: {error}");
        }
        self.in_kernel = KernelPrefixes::default();
    }

    /// Returns the numbers of IPv4 and IPv6 destinations in the forwarding tables.
    pub fn routes(&self) -> (usize, usize) {
        self.rib.routes()
    }

    /// Returns the number of routes installed in the kernel.
    pub fn installed(&self) -> usize {
        self.in_kernel.installed.len()
    }

    /// Returns the number of announced destinations that the tables have no room for.
    pub fn left_out(&self) -> usize {
        self.rib.not_installed()
    }

    /// Returns the longest matching prefix of an address, preceded by longer ones that the tables have no room for.
    pub fn prefixes_of(&self, address: IpAddr) -> Vec<IpNet> {
        let found = self.rib.lookup(address).map(|(prefix, _)| prefix);
        let is_more_specific = |prefix: &IpNet| found.is_none_or(|found| found.prefix_len() < prefix.prefix_len());
        let left_out =
            self.rib.prefixes_not_installed().filter(|prefix| prefix.contains(&address) && is_more_specific(prefix));
        let mut more_specific: Vec<IpNet> = left_out.collect();
        more_specific.reverse();
        more_specific.extend(found);
        more_specific
    }

    /// Returns all prefixes within a network in order, those without room included.
    pub fn prefixes(&self, within: Option<IpNet>) -> Vec<IpNet> {
        let is_selected = |prefix: &IpNet| within.is_none_or(|within| within.contains(prefix));
        let mut all: Vec<IpNet> = self.rib.iter().map(|(prefix, _)| prefix).filter(is_selected).collect();
        let in_tables = all.len();
        all.extend(self.rib.prefixes_not_installed().filter(is_selected));
        if all.len() > in_tables {
            all.sort();
        }
        all
    }

    /// Returns the entry of a prefix in the forwarding tables.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_without_room_in_the_kernel_gets_it_when_another_one_goes() {
        let prefix = |number: u8| -> IpNet { format!("10.{number}.0.0/16").parse().unwrap() };
        let mut kernel = KernelPrefixes::default();
        assert_eq!(
            [1, 2].map(|number| kernel.set(prefix(number), true, 2)),
            [KernelStep::Install, KernelStep::Install]
        );
        assert_eq!([3, 4, 3].map(|number| kernel.set(prefix(number), true, 2)), [const { KernelStep::Wait }; 3]);
        assert_eq!(kernel.waiting.len(), 2);
        assert_eq!(kernel.set(prefix(3), false, 2), KernelStep::None);
        assert_eq!(kernel.take_waiting(9, 2), []);
        assert_eq!(kernel.set(prefix(1), false, 2), KernelStep::Remove);
        assert_eq!(kernel.take_waiting(9, 2), [prefix(4)]);
        assert_eq!(kernel.set(prefix(4), true, 2), KernelStep::Install);
        assert_eq!(kernel.set(prefix(2), true, 2), KernelStep::None);
        assert_eq!(kernel.set(prefix(2), false, 2), KernelStep::Remove);
        assert!(kernel.installed.iter().eq([&prefix(4)]) && kernel.waiting.is_empty());
    }
}
