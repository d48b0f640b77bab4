//! The RIB: merges the routes that nodes announce, and installs the best ones in the FIB.

mod apportion;
mod error;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use fib::{GROUPS_MAX, GroupId, HOPS_MAX};
use ipnet::IpNet;

use apportion::apportion;

use crate::interner::{InternedId, Interner};
use crate::sparse_map::shrink_if_sparse;
use crate::{Hop, NODES_MAX, NodeId, PortId};

pub use error::RouteError;

/// A reader of the FIB. Each forwarder has its own; clones read the same tables.
#[derive(Clone)]
pub struct Tables {
    reader: fib::Reader<Hop>,
}

impl Tables {
    #[inline]
    pub(crate) fn read<R>(&mut self, read: impl FnOnce(&fib::Tables<Hop>) -> R) -> R {
        self.reader.batch(read)
    }

    /// Returns the equal-cost hops for an address.
    pub fn lookup(&mut self, address: IpAddr) -> Option<Vec<Hop>> {
        self.read(|tables| {
            let group = match address {
                IpAddr::V4(address) => tables.v4.lookup(address),
                IpAddr::V6(address) => tables.v6.lookup(address),
            }?;
            Some(tables.groups.hops(group))
        })
    }
}

/// A node's announcement of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Announcement {
    metric: u32,
    hop_set: InternedId,
}

/// An announcement of a prefix, as displayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteSource {
    /// Announcing node.
    pub node: NodeId,
    /// Metric; lower is better.
    pub metric: u32,
    /// Hops at that node.
    pub hops: Vec<Hop>,
}

/// The FIB entry of a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FibEntry {
    /// The lowest announced metric.
    pub metric: u32,
    /// The hops that share the traffic, or the one hop that drops it; empty while the routes of failed nodes are being
    /// withdrawn. `None` if the FIB has no room for the prefix: packets take a less specific route, if there is one.
    pub hops: Option<Vec<Hop>>,
}

/// The routing information base: all routes of the cluster, as known to one node. The announcements of a prefix with
/// the lowest metric win; equal ones share the traffic (ECMP), unless one of them drops packets: then all are dropped.
pub struct Rib {
    writer: fib::Writer<Hop>,
    /// Announcements by node.
    announced: Vec<HashMap<IpNet, Announcement>>,
    /// Prefixes whose routes are to be merged again, because a node has failed or returned.
    pending: Vec<IpNet>,
    hop_sets: Interner<[Hop]>,
    groups: HashMap<Box<[Hop]>, GroupId>,
    /// The intended hops of each group, by number; groups in the FIB lack the hops of failed nodes.
    hops: Vec<Box<[Hop]>>,
    /// Failed nodes, whose announcements are kept but not used.
    is_gone: [bool; NODES_MAX as usize],
    /// Nodes that packets do not reach, whose announcements are not used.
    is_unreachable: [bool; NODES_MAX as usize],
    /// Announced prefixes for which the FIB had no room.
    not_installed: BTreeSet<IpNet>,
    merged: Vec<Hop>,
}

impl Rib {
    /// Creates an empty RIB, and a reader of its FIB.
    ///
    /// # Errors
    /// The kernel cannot map the memory of the tables.
    pub fn new() -> io::Result<(Rib, Tables)> {
        let (writer, reader) = fib::tables()?;
        let rib = Rib {
            writer,
            announced: (0..NODES_MAX).map(|_| HashMap::new()).collect(),
            pending: Vec::new(),
            hop_sets: Interner::default(),
            groups: HashMap::new(),
            hops: vec![Box::default(); usize::from(GROUPS_MAX) + 1],
            is_gone: [false; NODES_MAX as usize],
            is_unreachable: [false; NODES_MAX as usize],
            not_installed: BTreeSet::new(),
            merged: Vec::new(),
        };
        Ok((rib, Tables { reader }))
    }

    /// Adds or replaces a node's route to a prefix. Bits beyond the prefix length are ignored. A hop that is given
    /// twice gets twice the share.
    ///
    /// # Errors
    /// The announcement is invalid; then nothing changes. Or the FIB has no room: then it has no route to the prefix,
    /// not even the former one, until there is room.
    pub fn announce(&mut self, node: NodeId, prefix: IpNet, metric: u32, hops: &[Hop]) -> Result<(), RouteError> {
        let prefix = prefix.trunc();
        check(node, prefix, hops)?;
        if self.is_gone[usize::from(node.0)] {
            // Announcements from before the failure must not be merged with new ones.
            self.forget_node(node);
            while self.process_pending(usize::MAX, |_| {})? {}
            self.is_gone[usize::from(node.0)] = false;
        }
        let (hop_set, _) = self.hop_sets.add(hops, |hops| Arc::from(hops));
        let former = self.announced[usize::from(node.0)].insert(prefix, Announcement { metric, hop_set });
        if let Some(former) = former {
            self.hop_sets.release(former.hop_set);
        }
        self.update_fib(prefix)
    }

    /// Removes a node's route to a prefix, and returns whether there was one.
    ///
    /// # Errors
    /// The FIB has no room for the announcements of other nodes: then it has no route to the prefix.
    pub fn withdraw(&mut self, node: NodeId, prefix: IpNet) -> Result<bool, RouteError> {
        let prefix = prefix.trunc();
        let Some(announced) = self.announced.get_mut(usize::from(node.0)) else { return Ok(false) };
        let Some(former) = announced.remove(&prefix) else { return Ok(false) };
        shrink_if_sparse(announced);
        self.hop_sets.release(former.hop_set);
        self.update_fib(prefix)?;
        self.retry_install(1);
        Ok(true)
    }

    /// Notes that a node has failed. No packet is sent to it from now on. Its announcements are kept for
    /// [`Rib::resume_node`]; once [`Rib::process_pending`] is done, routes with higher metrics are used instead.
    ///
    /// # Errors
    /// The FIB has no room for the change.
    pub fn suspend_node(&mut self, node: NodeId) -> Result<(), RouteError> {
        let is_new = self.announced.get(usize::from(node.0)).is_some_and(|announced| !announced.is_empty());
        if !is_new || std::mem::replace(&mut self.is_gone[usize::from(node.0)], true) {
            return Ok(());
        }
        self.merge_later(node);
        self.set_groups(node)
    }

    /// Has all routes of a node merged again. A node that fails and returns often has each of them once.
    fn merge_later(&mut self, node: NodeId) {
        let is_first = self.pending.is_empty();
        self.pending.extend(self.announced[usize::from(node.0)].keys());
        if !is_first {
            self.pending.sort_unstable();
            self.pending.dedup();
        }
    }

    /// Uses the announcements of a failed node again. Returns whether there were any.
    ///
    /// # Errors
    /// As [`Rib::suspend_node`].
    pub fn resume_node(&mut self, node: NodeId) -> Result<bool, RouteError> {
        let is_gone = self.is_gone.get_mut(usize::from(node.0)).is_some_and(std::mem::take);
        if is_gone {
            self.merge_later(node);
            self.set_groups(node)?;
        }
        Ok(is_gone)
    }

    /// Sets whether packets reach a node. The announcements of one that they do not reach are stored, but not used.
    /// Initially all nodes are reachable.
    ///
    /// # Errors
    /// As [`Rib::suspend_node`].
    pub fn set_reachable(&mut self, node: NodeId, is_reachable: bool) -> Result<(), RouteError> {
        let Some(is_unreachable) = self.is_unreachable.get_mut(usize::from(node.0)) else { return Ok(()) };
        let was_reachable = !std::mem::replace(is_unreachable, !is_reachable);
        if was_reachable == is_reachable || self.is_gone[usize::from(node.0)] {
            return Ok(());
        }
        self.merge_later(node);
        self.set_groups(node)
    }

    /// Returns whether the announcements of a node are not used.
    fn is_unused(&self, node: NodeId) -> bool {
        let node = usize::from(node.0);
        self.is_gone[node] || self.is_unreachable[node]
    }

    /// Forgets the announcements of a failed node.
    pub fn forget_node(&mut self, node: NodeId) {
        if !self.is_gone.get(usize::from(node.0)).is_some_and(|is_gone| *is_gone) {
            return;
        }
        // Their prefixes are pending, or were merged without them.
        for announcement in std::mem::take(&mut self.announced[usize::from(node.0)]).into_values() {
            self.hop_sets.release(announcement.hop_set);
        }
    }

    /// Sets the groups with hops at a node, which lack those of failed nodes.
    fn set_groups(&mut self, node: NodeId) -> Result<(), RouteError> {
        for group in self.groups.values() {
            let hops = &self.hops[usize::from(group.get())];
            if hops.iter().any(|hop| is_via(hop, node)) {
                let left: Vec<Hop> = hops.iter().filter(|hop| !self.is_lost(hop)).copied().collect();
                if self.writer.set_group(*group, &left).is_err() {
                    // A single hop needs no room. `process_pending` installs the remaining hops later.
                    self.writer.set_group(*group, &left[..left.len().min(1)])?;
                }
            }
        }
        Ok(())
    }

    /// Returns whether a hop belongs to a node whose announcements are not used.
    fn is_lost(&self, hop: &Hop) -> bool {
        hop.port != PortId::NOWHERE && self.is_unused(hop.node)
    }

    /// Merges at most `routes_max` routes that a failed node had, or a returned one has, and passes their prefixes to
    /// `done`. Returns whether there are more.
    ///
    /// # Errors
    /// The FIB has no room for a change; that route is not installed.
    pub fn process_pending(&mut self, routes_max: usize, mut done: impl FnMut(IpNet)) -> Result<bool, RouteError> {
        for _ in 0..routes_max.min(self.pending.len()) {
            let Some(prefix) = self.pending.pop() else { break };
            done(prefix);
            self.update_fib(prefix)?;
        }
        self.retry_install(routes_max);
        if self.pending.is_empty() {
            self.pending = Vec::new();
        }
        Ok(!self.pending.is_empty())
    }

    /// Tries again to install up to `routes_max` routes for which the FIB had no room.
    fn retry_install(&mut self, routes_max: usize) {
        for _ in 0..routes_max {
            let Some(prefix) = self.not_installed.pop_first() else { return };
            if self.update_fib(prefix).is_err() {
                return;
            }
        }
    }

    /// Returns the number of announced prefixes for which the FIB has no room.
    pub fn not_installed(&self) -> usize {
        self.not_installed.len()
    }

    /// Iterates over these prefixes, in their order.
    pub fn prefixes_not_installed(&self) -> impl Iterator<Item = IpNet> + '_ {
        self.not_installed.iter().copied()
    }

    /// Returns the number of routes of a node; 0 for a failed one, and for one that packets do not reach.
    pub fn routes_of(&self, node: NodeId) -> usize {
        self.used().find(|(of, _)| *of == node).map_or(0, |(_, announced)| announced.len())
    }

    /// Returns the announcements of all nodes that have not failed and are reachable.
    fn used(&self) -> impl Iterator<Item = (NodeId, &HashMap<IpNet, Announcement>)> + Clone {
        let all = (0..).map(NodeId).zip(&self.announced);
        all.filter(|(node, _)| !self.is_unused(*node))
    }

    /// Returns the number of IPv4 prefixes and of IPv6 prefixes.
    pub fn routes(&self) -> (usize, usize) {
        self.writer.routes()
    }

    /// Returns the longest prefix that contains the address, and its hops.
    pub fn lookup(&self, address: IpAddr) -> Option<(IpNet, Vec<Hop>)> {
        let (prefix, group) = self.writer.lookup(address.into())?;
        Some((prefix, self.writer.hops(group).ok()?))
    }

    /// Returns the FIB entry of a prefix: what is installed, not what its announcements call for.
    pub fn fib_entry(&self, prefix: IpNet) -> Option<FibEntry> {
        let prefix = prefix.trunc();
        let metrics = self.used().filter_map(|(_, announced)| announced.get(&prefix));
        let metric = metrics.map(|announcement| announcement.metric).min()?;
        if self.not_installed.contains(&prefix) {
            return Some(FibEntry { metric, hops: None });
        }
        let (_, group) = self.writer.lookup(prefix).filter(|(found, _)| *found == prefix)?;
        Some(FibEntry { metric, hops: Some(self.writer.hops(group).ok()?) })
    }

    /// Iterates over all installed routes, in the order of their prefixes.
    pub fn iter(&self) -> impl Iterator<Item = (IpNet, Vec<Hop>)> + '_ {
        let v4 = self.writer.routes_v4().map(|(prefix, group)| (IpNet::from(prefix), group));
        let v6 = self.writer.routes_v6().map(|(prefix, group)| (IpNet::from(prefix), group));
        v4.chain(v6).map(|(prefix, group)| (prefix, self.writer.hops(group).unwrap_or_default()))
    }

    /// Returns all announcements of a prefix.
    pub fn sources(&self, prefix: IpNet) -> Vec<RouteSource> {
        let of = |(node, announced): (NodeId, &HashMap<IpNet, Announcement>)| {
            let announcement = announced.get(&prefix.trunc())?;
            let hops = self.hop_sets.get(announcement.hop_set).to_vec();
            Some(RouteSource { node, metric: announcement.metric, hops })
        };
        self.used().filter_map(of).collect()
    }

    /// Returns the nodes that announce a prefix with the lowest metric.
    pub fn winners(&self, prefix: IpNet) -> impl Iterator<Item = NodeId> {
        let prefix = prefix.trunc();
        let metrics = self.used().filter_map(move |(node, announced)| Some((node, announced.get(&prefix)?.metric)));
        let best = metrics.clone().map(|(_, metric)| metric).min();
        metrics.filter(move |(_, metric)| Some(*metric) == best).map(|(node, _)| node)
    }

    /// Installs the merged announcements of a prefix. If there is no room, the former route is removed as well, because
    /// it is outdated.
    fn update_fib(&mut self, prefix: IpNet) -> Result<(), RouteError> {
        self.not_installed.remove(&prefix);
        if self.install(prefix).is_ok() {
            return Ok(());
        }
        // Removing the former route may free enough room.
        let removed = self.uninstall(prefix);
        let written = removed.and_then(|()| self.install(prefix));
        if written.is_err() {
            self.not_installed.insert(prefix);
        }
        written
    }

    fn uninstall(&mut self, prefix: IpNet) -> Result<(), RouteError> {
        let before = self.writer.remove(prefix)?;
        self.release(before);
        Ok(())
    }

    fn install(&mut self, prefix: IpNet) -> Result<(), RouteError> {
        self.merge(&prefix);
        if self.merged.is_empty() {
            return self.uninstall(prefix);
        }
        let group = self.group()?;
        let inserted = self.writer.insert(prefix, group);
        match inserted {
            Ok(before) if before == Some(group) => {}
            Ok(before) => self.release(before),
            // The group may have been created for this route.
            Err(_) => self.release(Some(group)),
        }
        inserted?;
        Ok(())
    }

    /// Merges the hops of the best announcements into `merged`. If they exceed a group, they are reduced in proportion,
    /// in the same way at all nodes.
    fn merge(&mut self, prefix: &IpNet) {
        self.merged.clear();
        let mut best = u32::MAX;
        let unused: [bool; NODES_MAX as usize] = std::array::from_fn(|node| self.is_unused(NodeId(node as u8)));
        let used = self.announced.iter().zip(&unused).filter(|(announced, unused)| !*unused && !announced.is_empty());
        for (announced, _) in used {
            let Some(announcement) = announced.get(prefix) else { continue };
            if announcement.metric < best {
                best = announcement.metric;
                self.merged.clear();
            }
            if announcement.metric == best {
                self.merged.extend_from_slice(self.hop_sets.get(announcement.hop_set));
            }
        }
        // A route that drops packets takes precedence over others with the same metric.
        if let Some(dropping) = self.merged.iter().copied().find(|hop| hop.port == PortId::NOWHERE) {
            self.merged.clear();
            self.merged.push(dropping);
        }
        self.merged.sort_unstable();
        if self.merged.len() > HOPS_MAX {
            let counted = self.merged.chunk_by(|one, other| one == other);
            let counted: Vec<(Hop, u32)> = counted.map(|equal| (equal[0], equal.len() as u32)).collect();
            self.merged.clear();
            self.merged.extend(expand_weights(&counted));
        }
    }

    /// Returns the group of the merged hops, and creates it if necessary.
    fn group(&mut self) -> Result<GroupId, RouteError> {
        if let Some(group) = self.groups.get(&self.merged[..]) {
            return Ok(*group);
        }
        let group = self.writer.add_group(&self.merged)?;
        let hops: Box<[Hop]> = self.merged[..].into();
        self.hops[usize::from(group.get())] = hops.clone();
        self.groups.insert(hops, group);
        Ok(group)
    }

    /// Removes a group if no route uses it any more.
    fn release(&mut self, group: Option<GroupId>) {
        let Some(group) = group else { return };
        if self.writer.remove_group(group).is_ok() {
            let hops = std::mem::take(&mut self.hops[usize::from(group.get())]);
            self.groups.remove(&hops);
        }
    }
}

/// Expands weighted hops to the hops of a group: a hop of twice the weight occurs twice as often.
pub fn expand_weights<T: Copy>(weighted: &[(T, u32)]) -> impl Iterator<Item = T> {
    let weights: Vec<u32> = weighted.iter().map(|(_, weight)| *weight).collect();
    let parts = apportion(&weights, HOPS_MAX);
    weighted.iter().zip(parts).flat_map(|((hop, _), parts)| std::iter::repeat_n(*hop, parts))
}

/// Returns whether packets with this hop go to that node.
fn is_via(hop: &Hop, node: NodeId) -> bool {
    hop.node == node && hop.port != PortId::NOWHERE
}

/// Validates an announcement, which may come from another node.
fn check(node: NodeId, prefix: IpNet, hops: &[Hop]) -> Result<(), RouteError> {
    if node.0 >= NODES_MAX {
        return Err(RouteError::Node { node: node.0 });
    }
    if hops.is_empty() || hops.len() > HOPS_MAX {
        return Err(RouteError::Hops { prefix, hops: hops.len() });
    }
    let is_valid = |hop: &Hop| match hop.port {
        PortId::NOWHERE => matches!(*hop, Hop::BLACKHOLE | Hop::UNREACHABLE | Hop::PROHIBITED | Hop::NO_ROUTE),
        port => hop.node == node && (port.is_real() || port == PortId::KERNEL),
    };
    match hops.iter().find(|hop| !is_valid(hop)) {
        Some(hop) => Err(RouteError::Hop { prefix, node: node.0, hop: *hop }),
        None => Ok(()),
    }
}
