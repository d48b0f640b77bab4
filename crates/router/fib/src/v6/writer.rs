//! The writer: holds an uncompressed trie, and encodes it into the table that readers use.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ipnet::Ipv6Net;
use prefix_trie::PrefixMap;

use super::{
    BLOCK_UNITS_MAX, CHANGE_UNITS_MAX, INLINE_LEAVES, LEAVES_PER_WORD, NODE_FLAG, NODE_UNITS_MAX, NODES_MAX, ROOT_BITS,
    SEMISPACE_UNITS, STRIDE_BITS, Table, UNIT_WORDS, WORD_BLOCK, WORD_INLINE_LEAVES, WORD_LEAFVEC, WORD_VECTOR,
};
use crate::epoch::{COLLECT_THRESHOLD, Domain, Retired};
use crate::wait::wait_for_readers;
use crate::{Error, GroupId};

/// Fragmentation at which the table is compacted into the other semispace: this plus three times the units in use.
const FRAGMENTATION_UNITS: usize = 1 << 16;

/// A slot of a node, or an entry of the root: a child, or a leaf with the length of its prefix.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Slot(u32);

impl Slot {
    const CHILD: u32 = 1 << 31;
    const NONE: Slot = Slot(0);

    fn leaf(entry: u16, depth: u8) -> Slot {
        Slot(u32::from(depth) << 16 | u32::from(entry))
    }

    fn to_child(node: u32) -> Slot {
        Slot(Slot::CHILD | node)
    }

    fn child(self) -> Option<u32> {
        (self.0 & Slot::CHILD != 0).then_some(self.0 & !Slot::CHILD)
    }

    fn entry(self) -> u16 {
        self.0 as u16
    }

    fn depth(self) -> u8 {
        (self.0 >> 16) as u8
    }
}

/// Contiguous units.
#[derive(Clone, Copy, Default)]
struct Block {
    first: u32,
    units: u8,
}

struct Node {
    slots: [Slot; 64],
    /// Number of prefixes that end in the node or below it; a node without one is replaced by a leaf of its parent.
    routes: u32,
    /// The node's block in the table: its children, and the leaves that are not in the node itself.
    block: Block,
    /// The node's encoding in the table, which is stored in the block of its parent.
    words: [u64; UNIT_WORDS],
}

/// Allocates units: blocks of the same size that were freed, else from the end (segregated free lists).
struct Semispace {
    first: u32,
    next: u32,
    /// Free blocks by size.
    free: Vec<Vec<u32>>,
}

impl Semispace {
    fn new(first: usize) -> Semispace {
        Semispace { first: first as u32, next: first as u32, free: vec![Vec::new(); BLOCK_UNITS_MAX + 1] }
    }

    fn used(&self) -> usize {
        (self.next - self.first) as usize
    }

    fn allocate(&mut self, units: usize) -> u32 {
        if let Some(first) = self.free[units].pop() {
            return first;
        }
        let first = self.next;
        self.next += units as u32;
        assert!(self.used() <= SEMISPACE_UNITS, "a change allocated more than it had reserved");
        first
    }

    fn reset(&mut self) {
        self.next = self.first;
        self.free.iter_mut().for_each(Vec::clear);
    }
}

/// What awaits the end of a grace period.
enum Garbage {
    Block(Block),
    /// All blocks of a semispace, by its index.
    Semispace(usize),
}

/// The writer's state.
pub(crate) struct Writer {
    domain: Arc<Domain>,
    retired: Retired<Garbage>,
    rib: PrefixMap<Ipv6Net, GroupId>,
    root: Vec<Slot>,
    nodes: Vec<Node>,
    nodes_free: Vec<u32>,
    semispaces: [Semispace; 2],
    /// The semispace from which blocks are allocated.
    active: usize,
    /// Whether the other semispace awaits the end of its grace period.
    is_other_retired: bool,
    /// Units in use by the current version of the trie.
    units_live: usize,
}

/// A change of the leaves within a prefix: of those up to its length, or of its length only.
#[derive(Clone, Copy)]
struct Change {
    bits: u128,
    length: u8,
    new: Slot,
    exact_only: bool,
    /// The change of the number of routes.
    routes: i32,
}

impl Change {
    fn includes(&self, slot: Slot) -> bool {
        if self.exact_only { slot.depth() == self.length } else { slot.depth() <= self.length }
    }

    /// Returns the slots of a node at depth `base` bits that the prefix covers; one slot if the prefix ends below the
    /// node.
    fn slots(&self, base: u8) -> std::ops::Range<usize> {
        let first = (self.bits << base >> (128 - STRIDE_BITS)) as usize;
        let decided = self.length.saturating_sub(base).min(STRIDE_BITS);
        first..first + (1 << (STRIDE_BITS - decided))
    }
}

impl Writer {
    pub fn new(domain: Arc<Domain>) -> Writer {
        Writer {
            domain,
            retired: Retired::new(),
            rib: PrefixMap::new(),
            root: vec![Slot::NONE; 1 << ROOT_BITS],
            nodes: Vec::new(),
            nodes_free: Vec::new(),
            semispaces: [Semispace::new(0), Semispace::new(SEMISPACE_UNITS)],
            active: 0,
            is_other_retired: false,
            units_live: 0,
        }
    }

    pub fn rib(&self) -> &PrefixMap<Ipv6Net, GroupId> {
        &self.rib
    }

    /// Returns the number of nodes in use.
    pub fn nodes_used(&self) -> usize {
        self.nodes.len() - self.nodes_free.len()
    }

    /// Returns the size of the nodes and leaves in the table, in bytes.
    pub fn reader_bytes(&self) -> usize {
        self.units_live * UNIT_WORDS * size_of::<u64>()
    }

    /// Returns the memory of the writer without the routes, in bytes.
    pub fn writer_bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<Node>() + self.root.len() * size_of::<Slot>()
    }

    pub fn insert(&mut self, table: &Table, prefix: Ipv6Net, group: GroupId) -> Result<Option<GroupId>, Error> {
        let before = self.rib.get(&prefix).copied();
        if self.nodes_used() + self.nodes_needed(prefix) > NODES_MAX {
            return Err(Error::NodesFull { prefix, nodes_max: NODES_MAX });
        }
        self.reserve(table, prefix)?;
        self.rib.insert(prefix, group);
        self.apply(
            table,
            Change {
                bits: prefix.network().to_bits(),
                length: prefix.prefix_len(),
                new: Slot::leaf(group.get(), prefix.prefix_len()),
                exact_only: false,
                routes: i32::from(before.is_none()),
            },
        );
        Ok(before)
    }

    pub fn remove(&mut self, table: &Table, prefix: Ipv6Net) -> Result<Option<GroupId>, Error> {
        if self.rib.get(&prefix).is_none() {
            return Ok(None);
        }
        self.reserve(table, prefix)?;
        let before = self.rib.remove(&prefix);
        let new = match self.rib.get_lpm(&prefix) {
            Some((covering, group)) => Slot::leaf(group.get(), covering.prefix_len()),
            None => Slot::NONE,
        };
        let (bits, length) = (prefix.network().to_bits(), prefix.prefix_len());
        self.apply(table, Change { bits, length, new, exact_only: true, routes: -1 });
        Ok(before)
    }

    /// Applies a change to every root entry within its prefix.
    fn apply(&mut self, table: &Table, change: Change) {
        for index in root_range(change.bits, change.length) {
            let before = self.root[index];
            let (after, is_changed) = self.change_slot(table, before, change, ROOT_BITS);
            self.root[index] = after;
            if is_changed {
                self.publish(table, index);
            }
        }
    }

    /// Applies a change to a slot whose child is at depth `base` bits. Returns the new slot, and whether it must be
    /// published.
    fn change_slot(&mut self, table: &Table, slot: Slot, change: Change, base: u8) -> (Slot, bool) {
        if let Some(node) = slot.child() {
            return self.change_node(table, node, change, base);
        }
        if change.length > base {
            let node = self.new_node(slot);
            return self.change_node(table, node, change, base);
        }
        if change.includes(slot) { (change.new, slot.entry() != change.new.entry()) } else { (slot, false) }
    }

    fn change_node(&mut self, table: &Table, node: u32, change: Change, base: u8) -> (Slot, bool) {
        // The node counts a route only if its prefix ends in the node or below it.
        let is_inside = change.length > base;
        let mut is_changed = false;
        for index in if is_inside { change.slots(base) } else { 0..64 } {
            let before = self.nodes[node as usize].slots[index];
            let (after, is_slot_changed) = self.change_slot(table, before, change, base + STRIDE_BITS);
            self.nodes[node as usize].slots[index] = after;
            is_changed |= is_slot_changed;
        }
        let Node { routes, words, .. } = &mut self.nodes[node as usize];
        if is_inside {
            *routes = routes.checked_add_signed(change.routes).expect("the number of routes is not negative");
        }
        if *routes == 0 {
            return (self.remove_node(node), true);
        }
        // A new node is not encoded yet.
        is_changed |= words[WORD_VECTOR] | words[WORD_LEAFVEC] == 0;
        if is_changed {
            let before = self.encode(table, node);
            self.retire(before);
        }
        (Slot::to_child(node), is_changed)
    }

    /// Creates a node that replaces a leaf: all its slots are equal to that leaf.
    fn new_node(&mut self, slot: Slot) -> u32 {
        let node = Node { slots: [slot; 64], routes: 0, block: Block::default(), words: [0; UNIT_WORDS] };
        if let Some(free) = self.nodes_free.pop() {
            self.nodes[free as usize] = node;
            return free;
        }
        self.nodes.push(node);
        self.nodes.len() as u32 - 1
    }

    /// Removes a node without routes, and returns the leaf that all its slots are equal to.
    fn remove_node(&mut self, node: u32) -> Slot {
        let Node { slots, block, .. } = &mut self.nodes[node as usize];
        let (slot, block) = (slots[0], std::mem::take(block));
        self.nodes_free.push(node);
        self.retire(block);
        slot
    }

    fn retire(&mut self, block: Block) {
        if block.units > 0 {
            self.units_live -= usize::from(block.units);
            self.retired.push(&self.domain, Garbage::Block(block));
        }
    }

    fn allocate(&mut self, units: usize) -> u32 {
        self.units_live += units;
        self.semispaces[self.active].allocate(units)
    }

    /// Encodes a node, whose children are encoded already, into its words and a new block. Returns its former block.
    fn encode(&mut self, table: &Table, node: u32) -> Block {
        let slots = self.nodes[node as usize].slots;
        let mut words = [0; UNIT_WORDS];
        let mut children = Vec::with_capacity(64);
        let mut leaves = Vec::with_capacity(64);
        for (index, slot) in slots.into_iter().enumerate() {
            if let Some(child) = slot.child() {
                words[WORD_VECTOR] |= 1 << index;
                children.push(child);
            } else if leaves.last() != Some(&slot.entry()) {
                words[WORD_LEAFVEC] |= 1 << index;
                leaves.push(slot.entry());
            }
        }
        let (inside, outside) = leaves.split_at(leaves.len().min(INLINE_LEAVES));
        words[WORD_INLINE_LEAVES] = pack_leaves(inside);
        let units = children.len() + outside.len().div_ceil(LEAVES_PER_WORD * UNIT_WORDS);
        let mut block = Block::default();
        if units > 0 {
            block = Block { first: self.allocate(units), units: units as u8 };
            words[WORD_BLOCK] = u64::from(block.first);
            let childrens = children.iter().flat_map(|child| self.nodes[*child as usize].words);
            let leaves = outside.chunks(LEAVES_PER_WORD).map(pack_leaves);
            let at = block.first as usize * UNIT_WORDS;
            for (at, word) in table.units[at..].iter().zip(childrens.chain(leaves)) {
                at.store(word, Ordering::Relaxed);
            }
        }
        let node = &mut self.nodes[node as usize];
        node.words = words;
        std::mem::replace(&mut node.block, block)
    }

    /// Publishes an entry of the root, and retires the unit of its former node.
    fn publish(&mut self, table: &Table, index: usize) {
        let before = table.root[index].load(Ordering::Relaxed);
        self.store_root_entry(table, index);
        if before & NODE_FLAG != 0 {
            self.retire(Block { first: before & !NODE_FLAG, units: 1 });
        }
    }

    fn store_root_entry(&mut self, table: &Table, index: usize) {
        let slot = self.root[index];
        let entry = match slot.child() {
            None => u32::from(slot.entry()),
            Some(node) => {
                let unit = self.allocate(1);
                let at = unit as usize * UNIT_WORDS;
                for (at, word) in table.units[at..].iter().zip(self.nodes[node as usize].words) {
                    at.store(word, Ordering::Relaxed);
                }
                NODE_FLAG | unit
            }
        };
        // Release: readers that load the entry see the stores to its nodes and leaves.
        table.root[index].store(entry, Ordering::Release);
    }

    /// Ensures room for a change of the prefix in advance, so that it cannot fail half-way.
    fn reserve(&mut self, table: &Table, prefix: Ipv6Net) -> Result<(), Error> {
        if self.retired.len() >= COLLECT_THRESHOLD {
            self.collect();
        }
        let units = CHANGE_UNITS_MAX + NODE_UNITS_MAX * self.nodes_below(prefix);
        let used = self.semispaces[self.active].used();
        if used + units > SEMISPACE_UNITS || used > 4 * self.units_live + FRAGMENTATION_UNITS {
            self.compact(table)?;
        }
        Ok(())
    }

    /// Returns the number of nodes below the prefix, which a change of it may copy.
    fn nodes_below(&self, prefix: Ipv6Net) -> usize {
        let (bits, length) = (prefix.network().to_bits(), prefix.prefix_len());
        if length <= ROOT_BITS {
            return root_range(bits, length).map(|index| self.count_nodes(self.root[index])).sum();
        }
        let change = Change { bits, length, new: Slot::NONE, exact_only: true, routes: 0 };
        let mut slot = self.root[root_range(bits, ROOT_BITS).start];
        let mut base = ROOT_BITS;
        while let Some(node) = slot.child() {
            let slots = &self.nodes[node as usize].slots[change.slots(base)];
            base += STRIDE_BITS;
            if length <= base {
                return slots.iter().map(|slot| self.count_nodes(*slot)).sum();
            }
            slot = slots[0];
        }
        0
    }

    /// Returns the number of nodes that must be created on the path to the prefix.
    fn nodes_needed(&self, prefix: Ipv6Net) -> usize {
        let (bits, length) = (prefix.network().to_bits(), prefix.prefix_len());
        let mut slot = self.root[root_range(bits, ROOT_BITS).start];
        let mut base = ROOT_BITS;
        while let Some(node) = slot.child().filter(|_| length > base) {
            slot = self.nodes[node as usize].slots[(bits << base >> (128 - STRIDE_BITS)) as usize];
            base += STRIDE_BITS;
        }
        usize::from(length.saturating_sub(base).div_ceil(STRIDE_BITS))
    }

    fn count_nodes(&self, slot: Slot) -> usize {
        let Some(node) = slot.child() else { return 0 };
        1 + self.nodes[node as usize].slots.iter().map(|slot| self.count_nodes(*slot)).sum::<usize>()
    }

    /// Copies the whole table to the other semispace, which leaves all free units contiguous at its end.
    fn compact(&mut self, table: &Table) -> Result<(), Error> {
        wait_for_readers(|| {
            if self.is_other_retired {
                self.collect();
            }
            (!self.is_other_retired).then_some(())
        })?;
        let before = self.active;
        self.active = 1 - before;
        self.units_live = 0;
        for index in 0..self.root.len() {
            if let Some(node) = self.root[index].child() {
                self.encode_subtree(table, node);
                self.store_root_entry(table, index);
            }
        }
        self.is_other_retired = true;
        self.retired.push(&self.domain, Garbage::Semispace(before));
        Ok(())
    }

    /// Encodes a node and all nodes below it. Their former semispace is retired as a whole.
    fn encode_subtree(&mut self, table: &Table, node: u32) {
        for index in 0..64 {
            if let Some(child) = self.nodes[node as usize].slots[index].child() {
                self.encode_subtree(table, child);
            }
        }
        self.encode(table, node);
    }

    fn collect(&mut self) {
        let Writer { retired, domain, semispaces, is_other_retired, .. } = self;
        retired.collect(domain, |garbage| match garbage {
            Garbage::Block(block) => {
                let half = usize::from(block.first as usize >= SEMISPACE_UNITS);
                semispaces[half].free[usize::from(block.units)].push(block.first);
            }
            Garbage::Semispace(half) => {
                semispaces[half].reset();
                *is_other_retired = false;
            }
        });
    }
}

/// Returns the root entries that a prefix covers, or the one that contains it.
fn root_range(bits: u128, length: u8) -> std::ops::Range<usize> {
    let first = (bits >> (128 - ROOT_BITS)) as usize;
    first..first + (1 << (ROOT_BITS - length.min(ROOT_BITS)))
}

/// Packs up to four leaves into a word, the first one lowest.
fn pack_leaves(leaves: &[u16]) -> u64 {
    leaves.iter().rev().fold(0, |word, leaf| word << 16 | u64::from(*leaf))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::epoch::Domain;

    /// Returns a table with generated routes, and addresses with their expected groups.
    fn filled(routes: usize) -> (Table, Writer, Vec<u128>, Vec<Option<GroupId>>) {
        let table = Table::new().expect("memory");
        let mut writer = Writer::new(Arc::new(Domain::new()));
        let nets = crate::generate::v6(5, routes);
        for (index, net) in nets.iter().enumerate() {
            let group = GroupId::new(1 + index as u16 % 1000).expect("a number");
            writer.insert(&table, *net, group).expect("room");
        }
        let keys = crate::generate::addresses_v6(6, &nets, 4_000);
        let covered = |key: &u128| {
            let net = Ipv6Net::new((*key).into(), 128).expect("a length");
            writer.rib.get_lpm(&net).map(|(_, group)| *group)
        };
        let groups = keys.iter().map(covered).collect();
        (table, writer, keys, groups)
    }

    fn check(table: &Table, keys: &[u128], groups: &[Option<GroupId>]) {
        let mut found = vec![None; keys.len()];
        table.lookup_batch(keys, &mut found);
        assert_eq!(found, groups);
        for (key, group) in keys.iter().zip(groups).take(100) {
            assert_eq!(table.lookup((*key).into()), *group);
        }
    }

    #[test]
    fn a_compacted_table_is_unchanged_and_has_no_fragmentation() {
        let (table, mut writer, keys, groups) = filled(3_000);
        check(&table, &keys, &groups);
        for _ in 0..3 {
            let live = writer.units_live;
            writer.compact(&table).expect("no reader stays");
            assert_eq!(writer.units_live, live);
            assert_eq!(writer.semispaces[writer.active].used(), live, "no fragmentation");
            check(&table, &keys, &groups);
            let (net, group) = writer.rib.iter().next().map(|(net, group)| (net, *group)).expect("a route");
            assert_eq!(writer.remove(&table, net), Ok(Some(group)));
            assert_eq!(writer.insert(&table, net, group), Ok(None));
            check(&table, &keys, &groups);
        }
    }

    #[test]
    fn changes_compact_a_table_before_it_grows() {
        let (table, mut writer, keys, groups) = filled(300);
        let net: Ipv6Net = "2001:db8:1234::/48".parse().expect("a prefix");
        let group = GroupId::new(7).expect("a number");
        let mut participant = Domain::register(&writer.domain);
        let (mut compactions, mut active) = (0, writer.active);
        for round in 0..40_000 {
            // A reader is pinned in nearly all rounds, so that memory is seldom reused.
            let inside = (round % 4096 != 0).then(|| participant.pin());
            writer.insert(&table, net, group).expect("room");
            drop(inside);
            writer.remove(&table, net).expect("room");
            compactions += usize::from(writer.active != active);
            active = writer.active;
        }
        assert!(writer.semispaces[active].used() <= 4 * writer.units_live + FRAGMENTATION_UNITS + CHANGE_UNITS_MAX);
        check(&table, &keys, &groups);
        println!("{compactions} compactions");
    }

    #[test]
    fn a_pinned_reader_keeps_the_semispace_that_it_may_read() {
        let (table, mut writer, keys, groups) = filled(300);
        let mut participant = Domain::register(&writer.domain);
        let inside = participant.pin();
        writer.compact(&table).expect("the other semispace is free");
        let error = writer.compact(&table).expect_err("a reader may be in the other semispace");
        assert!(matches!(error, Error::ReaderStalled { .. }), "{error}");
        check(&table, &keys, &groups);
        drop(inside);
        writer.compact(&table).expect("the reader has left");
        check(&table, &keys, &groups);
    }

    #[test]
    fn leaves_are_packed_and_slots_selected_by_address_bits() {
        assert_eq!(pack_leaves(&[1, 2, 3, 4]), 0x0004_0003_0002_0001);
        assert_eq!(pack_leaves(&[5]), 5);
        assert_eq!(root_range(0xfff_u128 << 116, 12), 0xfff00..0x100000);
        assert_eq!(root_range(u128::MAX, 128), 0xfffff..0x100000);
        let change = Change { bits: 0x2001_0db8 << 96, length: 23, new: Slot::NONE, exact_only: true, routes: 0 };
        // Bits 20 to 25 are 110110; the prefix has three of them.
        assert_eq!(change.slots(20), 0b110110..0b110110 + 8);
        assert_eq!(Change { length: 30, ..change }.slots(20), 0b110110..0b110110 + 1);
    }
}
