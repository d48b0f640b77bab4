//! IPv4 lookup by one or two loads: DIR-24-8 (Gupta, Lin and McKeown, INFOCOM 1998).
//!
//! The first level, `tbl24`, has an entry of 16 bits for each /24: a group, or the number of a block of 256 entries in
//! `tbl8` if the /24 contains longer prefixes (DPDK's LPM library calls a block a *tbl8 group*). A change replaces each
//! entry by a single store, from the previous value to the new one: a reader never sees a third value.

use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use ipnet::Ipv4Net;
use prefix_trie::PrefixMap;

use crate::epoch::{COLLECT_THRESHOLD, Domain, Retired};
use crate::memory::AtomicArray;
use crate::wait::wait_for_readers;
use crate::{Error, GroupId};

/// Maximum number of /24s that contain longer prefixes.
pub const BLOCKS_MAX: usize = 1 << 15;

const TBL24_LEN: usize = 1 << 24;
const BLOCK_LEN: usize = 1 << 8;

/// Marks an entry of `tbl24` that is the number of a block.
const BLOCK_FLAG: u16 = 1 << 15;

/// Number of lookups in flight: more than the outstanding cache misses of a core.
const IN_FLIGHT_MAX: usize = 32;

/// The table that readers use.
pub struct Table {
    tbl24: AtomicArray<AtomicU16>,
    tbl8: AtomicArray<AtomicU16>,
}

impl Table {
    pub(crate) fn new() -> io::Result<Table> {
        Ok(Table { tbl24: AtomicArray::new(TBL24_LEN)?, tbl8: AtomicArray::new(BLOCKS_MAX * BLOCK_LEN)? })
    }

    /// Returns the group of the longest prefix that contains the address.
    #[inline]
    pub fn lookup(&self, address: Ipv4Addr) -> Option<GroupId> {
        let mut group = [None];
        self.lookup_batch(&[address.to_bits()], &mut group);
        group[0]
    }

    /// Looks up many addresses whose memory accesses overlap; `groups[i]` becomes the group of `addresses[i]`. Panics
    /// if `groups` is shorter than `addresses`.
    #[inline]
    pub fn lookup_batch(&self, addresses: &[u32], groups: &mut [Option<GroupId>]) {
        assert!(addresses.len() <= groups.len(), "{} groups for {} addresses", groups.len(), addresses.len());
        // Arrays of constant length, so that the compiler omits bounds checks.
        let tbl24: &[AtomicU16; TBL24_LEN] = self.tbl24[..].try_into().expect("the length of tbl24");
        let tbl8: &[AtomicU16; BLOCKS_MAX * BLOCK_LEN] = self.tbl8[..].try_into().expect("the length of tbl8");
        for (addresses, groups) in addresses.chunks(IN_FLIGHT_MAX).zip(groups.chunks_mut(IN_FLIGHT_MAX)) {
            let mut entries = [0; IN_FLIGHT_MAX];
            // Independent loads, whose cache misses overlap.
            for (entry, address) in entries.iter_mut().zip(addresses) {
                *entry = tbl24[(address >> 8) as usize].load(Ordering::Relaxed);
            }
            // Pairs with the release store of a block's number, which follows the stores of its entries.
            fence(Ordering::Acquire);
            for ((entry, address), group) in entries.iter().zip(addresses).zip(groups.iter_mut()) {
                let mut entry = *entry;
                if entry & BLOCK_FLAG != 0 {
                    let at = usize::from(entry & !BLOCK_FLAG) * BLOCK_LEN + (address & 0xff) as usize;
                    entry = tbl8[at].load(Ordering::Relaxed);
                }
                *group = GroupId::from_entry(entry);
            }
            // Pairs with the release store of a route, which follows the store of its group.
            fence(Ordering::Acquire);
        }
    }
}

/// What the writer knows about a block in addition to its entries.
struct Block {
    /// Length of the prefix of each entry.
    depths: [u8; BLOCK_LEN],
    /// Number of prefixes longer than /24 in the block.
    routes: u16,
}

/// The writer's state.
pub(crate) struct Writer {
    domain: Arc<Domain>,
    retired: Retired<u16>,
    /// The routes.
    rib: PrefixMap<Ipv4Net, GroupId>,
    /// Length of the prefix of each `tbl24` entry that is a group; 0 for no route.
    depths: Vec<u8>,
    blocks: Vec<Option<Box<Block>>>,
    blocks_free: Vec<u16>,
}

/// A table entry and the length of its prefix.
#[derive(Clone, Copy)]
struct Leaf {
    entry: u16,
    depth: u8,
}

/// Selects the entries that a change overwrites: those of prefixes up to a length, or of that length only.
#[derive(Clone, Copy)]
enum DepthFilter {
    UpTo(u8),
    Exactly(u8),
}

impl DepthFilter {
    fn includes(self, depth: u8) -> bool {
        match self {
            DepthFilter::UpTo(max) => depth <= max,
            DepthFilter::Exactly(length) => depth == length,
        }
    }
}

impl Writer {
    pub fn new(domain: Arc<Domain>) -> Writer {
        Writer {
            domain,
            retired: Retired::new(),
            rib: PrefixMap::new(),
            depths: vec![0; TBL24_LEN],
            blocks: Vec::new(),
            blocks_free: (0..BLOCKS_MAX as u16).rev().collect(),
        }
    }

    pub fn rib(&self) -> &PrefixMap<Ipv4Net, GroupId> {
        &self.rib
    }

    /// Returns the number of blocks in use.
    pub fn blocks_used(&self) -> usize {
        BLOCKS_MAX - self.blocks_free.len() - self.retired.len()
    }

    /// Returns the memory of the writer without the routes, in bytes.
    pub fn writer_bytes(&self) -> usize {
        self.depths.len() + self.blocks.iter().flatten().count() * size_of::<Block>()
    }

    pub fn insert(&mut self, table: &Table, prefix: Ipv4Net, group: GroupId) -> Result<Option<GroupId>, Error> {
        let leaf = Leaf { entry: group.get(), depth: prefix.prefix_len() };
        if prefix.prefix_len() <= 24 {
            let before = self.rib.insert(prefix, group);
            self.overwrite(table, prefix, DepthFilter::UpTo(prefix.prefix_len()), leaf);
            return Ok(before);
        }
        let index = tbl24_index(prefix);
        let (number, is_new) = match table.tbl24[index].load(Ordering::Relaxed) {
            entry if entry & BLOCK_FLAG != 0 => (entry & !BLOCK_FLAG, false),
            _ => (self.new_block(table, prefix)?, true),
        };
        let before = self.rib.insert(prefix, group);
        let block = self.block_mut(number);
        block.routes += u16::from(before.is_none());
        block.overwrite(table, number, block_range(prefix), DepthFilter::UpTo(prefix.prefix_len()), leaf);
        if is_new {
            table.tbl24[index].store(BLOCK_FLAG | number, Ordering::Release);
        }
        Ok(before)
    }

    /// Allocates a block filled with the current entry of the prefix's /24. Readers cannot find it yet.
    fn new_block(&mut self, table: &Table, prefix: Ipv4Net) -> Result<u16, Error> {
        let number = wait_for_readers(|| {
            if self.blocks_free.is_empty() || self.retired.len() >= COLLECT_THRESHOLD {
                self.collect();
            }
            let full = Err(Error::BlocksFull { prefix, blocks_max: BLOCKS_MAX });
            self.blocks_free.pop().map(Ok).or_else(|| self.retired.is_empty().then_some(full))
        })??;
        let index = tbl24_index(prefix);
        let entry = table.tbl24[index].load(Ordering::Relaxed);
        let block = Block { depths: [self.depths[index]; BLOCK_LEN], routes: 0 };
        let first = usize::from(number) * BLOCK_LEN;
        for at in &table.tbl8[first..first + BLOCK_LEN] {
            at.store(entry, Ordering::Relaxed);
        }
        if self.blocks.len() <= usize::from(number) {
            self.blocks.resize_with(usize::from(number) + 1, || None);
        }
        self.blocks[usize::from(number)] = Some(Box::new(block));
        Ok(number)
    }

    fn block_mut(&mut self, number: u16) -> &mut Block {
        self.blocks[usize::from(number)].as_mut().expect("a block that the table refers to")
    }

    fn collect(&mut self) {
        let free = &mut self.blocks_free;
        self.retired.collect(&self.domain, |number| free.push(number));
    }

    pub fn remove(&mut self, table: &Table, prefix: Ipv4Net) -> Option<GroupId> {
        let before = self.rib.remove(&prefix)?;
        let covering = self.rib.get_lpm(&prefix);
        let leaf = match covering {
            Some((covering, group)) => Leaf { entry: group.get(), depth: covering.prefix_len() },
            None => Leaf { entry: 0, depth: 0 },
        };
        let filter = DepthFilter::Exactly(prefix.prefix_len());
        if prefix.prefix_len() <= 24 {
            self.overwrite(table, prefix, filter, leaf);
            return Some(before);
        }
        let index = tbl24_index(prefix);
        let number = table.tbl24[index].load(Ordering::Relaxed) & !BLOCK_FLAG;
        let block = self.block_mut(number);
        block.routes -= 1;
        if block.routes > 0 {
            block.overwrite(table, number, block_range(prefix), filter, leaf);
            return Some(before);
        }
        // The last longer prefix: the /24 has a single entry again.
        self.depths[index] = leaf.depth;
        table.tbl24[index].store(leaf.entry, Ordering::Release);
        self.blocks[usize::from(number)] = None;
        self.retired.push(&self.domain, number);
        Some(before)
    }

    /// Overwrites the entries of a prefix of at most 24 bits that `filter` includes.
    fn overwrite(&mut self, table: &Table, prefix: Ipv4Net, filter: DepthFilter, leaf: Leaf) {
        let index = tbl24_index(prefix);
        for index in index..index + (1 << (24 - prefix.prefix_len())) {
            let entry = table.tbl24[index].load(Ordering::Relaxed);
            if entry & BLOCK_FLAG != 0 {
                let number = entry & !BLOCK_FLAG;
                self.block_mut(number).overwrite(table, number, 0..BLOCK_LEN, filter, leaf);
            } else if filter.includes(self.depths[index]) {
                self.depths[index] = leaf.depth;
                table.tbl24[index].store(leaf.entry, Ordering::Release);
            }
        }
    }
}

impl Block {
    fn overwrite(
        &mut self,
        table: &Table,
        number: u16,
        entries: std::ops::Range<usize>,
        filter: DepthFilter,
        leaf: Leaf,
    ) {
        let first = usize::from(number) * BLOCK_LEN;
        for entry in entries {
            if filter.includes(self.depths[entry]) {
                self.depths[entry] = leaf.depth;
                table.tbl8[first + entry].store(leaf.entry, Ordering::Release);
            }
        }
    }
}

/// Returns the index of the first `tbl24` entry that the prefix covers, or of the one that contains it.
fn tbl24_index(prefix: Ipv4Net) -> usize {
    (prefix.network().to_bits() >> 8) as usize
}

/// Returns the entries of a block that a prefix longer than /24 covers.
fn block_range(prefix: Ipv4Net) -> std::ops::Range<usize> {
    let first = (prefix.network().to_bits() & 0xff) as usize;
    first..first + (1 << (32 - prefix.prefix_len()))
}
