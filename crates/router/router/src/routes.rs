//! Routes: what every node announces, merged, and written into the tables that packets are looked up in.

mod apportion;
mod error;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::IpAddr;

use fib::{GROUPS_MAX, GroupId, HOPS_MAX};
use ipnet::IpNet;

use apportion::apportion;

use crate::{Hop, NODES_MAX, NodeId, PortId};

pub use error::RouteError;

/// The tables, as a forwarder reads them. Each forwarder has its own of these, all of the same tables.
#[derive(Clone)]
pub struct Tables {
    reader: fib::Reader<Hop>,
}

impl Tables {
    #[inline]
    pub(crate) fn read<R>(&mut self, read: impl FnOnce(&fib::Tables<Hop>) -> R) -> R {
        self.reader.batch(read)
    }

    /// The hops among which a forwarder chooses for packets to an address.
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

/// What one node says of one prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Announcement {
    metric: u32,
    hop_set: HopSetId,
}

/// A set of hops that announcements share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct HopSetId(u32);

/// Sets of hops, each kept once.
#[derive(Default)]
struct HopSets {
    sets: Vec<Box<[Hop]>>,
    users: Vec<u32>,
    free: Vec<u32>,
    ids: HashMap<Box<[Hop]>, HopSetId>,
}

impl HopSets {
    fn add(&mut self, hops: &[Hop]) -> HopSetId {
        if let Some(id) = self.ids.get(hops) {
            self.users[id.0 as usize] += 1;
            return *id;
        }
        let set: Box<[Hop]> = hops.into();
        let id = match self.free.pop() {
            Some(id) => {
                self.sets[id as usize] = set.clone();
                self.users[id as usize] = 1;
                HopSetId(id)
            }
            None => {
                self.sets.push(set.clone());
                self.users.push(1);
                HopSetId(self.sets.len() as u32 - 1)
            }
        };
        self.ids.insert(set, id);
        id
    }

    fn release(&mut self, id: HopSetId) {
        let users = &mut self.users[id.0 as usize];
        *users -= 1;
        if *users == 0 {
            let set = std::mem::take(&mut self.sets[id.0 as usize]);
            self.ids.remove(&set);
            self.free.push(id.0);
        }
    }

    fn get(&self, id: HopSetId) -> &[Hop] {
        &self.sets[id.0 as usize]
    }
}

/// Where routes to one prefix come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteSource {
    /// Who announces it.
    pub node: NodeId,
    /// How good it is there: less is better.
    pub metric: u32,
    /// By which hops of that node's.
    pub hops: Vec<Hop>,
}

/// What the tables have of one prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FibEntry {
    /// The lowest one that is announced.
    pub metric: u32,
    /// The hops that share the traffic, or the one end of it; nobody's while the nodes that had it are being taken out.
    /// `None` where the tables have no room for the prefix: packets take a wider route, if there is one.
    pub hops: Option<Vec<Hop>>,
}

/// All routes of the cluster, as one node knows them. Of the announcements of a prefix those with the lowest metric
/// win; equal ones share the traffic, unless one of them is an end: then all of it ends.
pub struct Rib {
    writer: fib::Writer<Hop>,
    /// What each node announces.
    announced: Vec<HashMap<IpNet, Announcement>>,
    /// What nodes announced that are gone, as far as it is in the tables still.
    pending_withdrawals: Vec<(IpNet, Announcement)>,
    hop_sets: HopSets,
    groups: HashMap<Box<[Hop]>, GroupId>,
    /// What each group should be, by its number: what is in the tables lacks the hops of nodes that are gone.
    hops: Vec<Box<[Hop]>>,
    is_gone: [bool; NODES_MAX as usize],
    /// What is announced, and found no room in the tables.
    not_installed: BTreeSet<IpNet>,
    merged: Vec<Hop>,
}

impl Rib {
    /// No routes yet, and what reads them.
    ///
    /// # Errors
    /// The kernel has no memory for tables to give.
    pub fn new() -> io::Result<(Rib, Tables)> {
        let (writer, reader) = fib::tables()?;
        let rib = Rib {
            writer,
            announced: (0..NODES_MAX).map(|_| HashMap::new()).collect(),
            pending_withdrawals: Vec::new(),
            hop_sets: HopSets::default(),
            groups: HashMap::new(),
            hops: vec![Box::default(); usize::from(GROUPS_MAX) + 1],
            is_gone: [false; NODES_MAX as usize],
            not_installed: BTreeSet::new(),
            merged: Vec::new(),
        };
        Ok((rib, Tables { reader }))
    }

    /// A node's route to a prefix, in place of the one that it announced before. Bits beyond the prefix's length do not
    /// count. A hop that is given twice gets twice the share.
    ///
    /// # Errors
    /// The announcement makes no sense; then everything is as it was. Or the tables have no room: then they have no
    /// route to the prefix, not even the former one, until there is room.
    pub fn announce(&mut self, node: NodeId, prefix: IpNet, metric: u32, hops: &[Hop]) -> Result<(), RouteError> {
        let prefix = prefix.trunc();
        check(node, prefix, hops)?;
        if self.is_gone[usize::from(node.0)] {
            // What is left of its former life must not be mixed with this one.
            while self.process_withdrawals(usize::MAX)? {}
            self.is_gone[usize::from(node.0)] = false;
        }
        let hop_set = self.hop_sets.add(hops);
        let former = self.announced[usize::from(node.0)].insert(prefix, Announcement { metric, hop_set });
        if let Some(former) = former {
            self.hop_sets.release(former.hop_set);
        }
        self.update_fib(prefix)
    }

    /// A node's route to a prefix is gone. Says whether there was one.
    ///
    /// # Errors
    /// The tables have no room for what others announce of the prefix: then they have no route to it.
    pub fn withdraw(&mut self, node: NodeId, prefix: IpNet) -> Result<bool, RouteError> {
        let prefix = prefix.trunc();
        let announced = self.announced.get_mut(usize::from(node.0)).and_then(|announced| announced.remove(&prefix));
        let Some(former) = announced else { return Ok(false) };
        self.hop_sets.release(former.hop_set);
        self.update_fib(prefix)?;
        self.retry_install(1);
        Ok(true)
    }

    /// A node is gone: from now on no packet is sent to it. What it announced is taken out by [`Rib::process_withdrawals`], after
    /// which routes that were not as good as its own are used.
    ///
    /// # Errors
    /// The tables have no room for the change.
    pub fn withdraw_node(&mut self, node: NodeId) -> Result<(), RouteError> {
        let Some(announced) = self.announced.get_mut(usize::from(node.0)) else { return Ok(()) };
        self.pending_withdrawals.extend(announced.drain());
        if self.pending_withdrawals.is_empty() {
            return Ok(());
        }
        self.is_gone[usize::from(node.0)] = true;
        for group in self.groups.values() {
            let hops = &self.hops[usize::from(group.get())];
            if hops.iter().any(|hop| is_via(hop, node)) {
                let left: Vec<Hop> = hops.iter().filter(|hop| !is_lost(hop, &self.is_gone)).copied().collect();
                if self.writer.set_group(*group, &left).is_err() {
                    // Several hops take room, one takes none. What it should be it becomes by `process_withdrawals`.
                    self.writer.set_group(*group, &left[..left.len().min(1)])?;
                }
            }
        }
        Ok(())
    }

    /// Takes out of the tables what nodes that are gone announced, at most `routes_max` routes. Says whether there are
    /// more.
    ///
    /// # Errors
    /// The tables have no room for a change; that route is left out.
    pub fn process_withdrawals(&mut self, routes_max: usize) -> Result<bool, RouteError> {
        for _ in 0..routes_max.min(self.pending_withdrawals.len()) {
            let Some((prefix, former)) = self.pending_withdrawals.pop() else { break };
            self.hop_sets.release(former.hop_set);
            self.update_fib(prefix)?;
        }
        self.retry_install(routes_max);
        Ok(!self.pending_withdrawals.is_empty())
    }

    /// There may be room for what was left out.
    fn retry_install(&mut self, routes_max: usize) {
        for _ in 0..routes_max {
            let Some(prefix) = self.not_installed.pop_first() else { return };
            if self.update_fib(prefix).is_err() {
                return;
            }
        }
    }

    /// How many prefixes are announced and found no room in the tables.
    pub fn not_installed(&self) -> usize {
        self.not_installed.len()
    }

    /// Which these are, in their order.
    pub fn prefixes_not_installed(&self) -> impl Iterator<Item = IpNet> + '_ {
        self.not_installed.iter().copied()
    }

    /// Routes of a node.
    pub fn routes_of(&self, node: NodeId) -> usize {
        self.announced.get(usize::from(node.0)).map_or(0, HashMap::len)
    }

    /// How many prefixes of IPv4, and how many of IPv6.
    pub fn routes(&self) -> (usize, usize) {
        self.writer.routes()
    }

    /// The longest prefix that has this address, and its hops.
    pub fn lookup(&self, address: IpAddr) -> Option<(IpNet, Vec<Hop>)> {
        let (prefix, group) = self.writer.lookup(address.into())?;
        Some((prefix, self.writer.hops(group).ok()?))
    }

    /// What becomes of packets to a prefix, as the tables have it: not what its announcements would give.
    pub fn fib_entry(&self, prefix: IpNet) -> Option<FibEntry> {
        let prefix = prefix.trunc();
        let metrics = self.announced.iter().filter_map(|announced| announced.get(&prefix));
        let metric = metrics.map(|announcement| announcement.metric).min()?;
        if self.not_installed.contains(&prefix) {
            return Some(FibEntry { metric, hops: None });
        }
        let (_, group) = self.writer.lookup(prefix).filter(|(found, _)| *found == prefix)?;
        Some(FibEntry { metric, hops: Some(self.writer.hops(group).ok()?) })
    }

    /// Everything that is in the tables, in the order of the prefixes.
    pub fn iter(&self) -> impl Iterator<Item = (IpNet, Vec<Hop>)> + '_ {
        let v4 = self.writer.routes_v4().map(|(prefix, group)| (IpNet::from(prefix), group));
        let v6 = self.writer.routes_v6().map(|(prefix, group)| (IpNet::from(prefix), group));
        v4.chain(v6).map(|(prefix, group)| (prefix, self.writer.hops(group).unwrap_or_default()))
    }

    /// Who announces a prefix.
    pub fn sources(&self, prefix: IpNet) -> Vec<RouteSource> {
        let of = |(node, announced): (usize, &HashMap<IpNet, Announcement>)| {
            let announcement = announced.get(&prefix.trunc())?;
            let hops = self.hop_sets.get(announcement.hop_set).to_vec();
            Some(RouteSource { node: NodeId(node as u8), metric: announcement.metric, hops })
        };
        self.announced.iter().enumerate().filter_map(of).collect()
    }

    /// Writes what nodes announce of a prefix into the tables. What finds no room is left out: a route that was right
    /// before leads to somebody else now, or to nobody.
    fn update_fib(&mut self, prefix: IpNet) -> Result<(), RouteError> {
        self.not_installed.remove(&prefix);
        if self.install(prefix).is_ok() {
            return Ok(());
        }
        // What the former route gives back may be room enough.
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
            // Made for this route, and perhaps for it alone.
            Err(_) => self.release(Some(group)),
        }
        inserted?;
        Ok(())
    }

    /// Into `merged`: the hops of the best announcements. What is more than a group has is brought into proportion, in
    /// the same way at all nodes.
    fn merge(&mut self, prefix: &IpNet) {
        self.merged.clear();
        let mut best = u32::MAX;
        for announced in self.announced.iter().filter(|announced| !announced.is_empty()) {
            let Some(announcement) = announced.get(prefix) else { continue };
            if announcement.metric < best {
                best = announcement.metric;
                self.merged.clear();
            }
            if announcement.metric == best {
                self.merged.extend_from_slice(self.hop_sets.get(announcement.hop_set));
            }
        }
        // A packet has one end: where a route says so, others that are as good do not count.
        if let Some(end) = self.merged.iter().copied().find(|hop| hop.port == PortId::NOWHERE) {
            self.merged.clear();
            self.merged.push(end);
        }
        self.merged.sort_unstable();
        if self.merged.len() > HOPS_MAX {
            let counted = self.merged.chunk_by(|one, other| one == other);
            let counted: Vec<(Hop, u32)> = counted.map(|equal| (equal[0], equal.len() as u32)).collect();
            self.merged.clear();
            self.merged.extend(expand_weights(&counted));
        }
    }

    /// The group of the merged hops.
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

    /// Gives a group back that no route leads to any more.
    fn release(&mut self, group: Option<GroupId>) {
        let Some(group) = group else { return };
        if self.writer.remove_group(group).is_ok() {
            let hops = std::mem::take(&mut self.hops[usize::from(group.get())]);
            self.groups.remove(&hops);
        }
    }
}

/// Hops with weights as a group has them: a hop of twice the weight stands there twice as often.
pub fn expand_weights<T: Copy>(weighted: &[(T, u32)]) -> impl Iterator<Item = T> {
    let weights: Vec<u32> = weighted.iter().map(|(_, weight)| *weight).collect();
    let parts = apportion(&weights, HOPS_MAX);
    weighted.iter().zip(parts).flat_map(|((hop, _), parts)| std::iter::repeat_n(*hop, parts))
}

/// Whether packets with this hop go to that node.
fn is_via(hop: &Hop, node: NodeId) -> bool {
    hop.node == node && hop.port != PortId::NOWHERE
}

fn is_lost(hop: &Hop, is_gone: &[bool]) -> bool {
    hop.port != PortId::NOWHERE && is_gone[usize::from(hop.node.0)]
}

/// What another node says is checked before it is used.
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
