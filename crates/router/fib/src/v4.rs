//! IPv4 by one load, or two: DIR-24-8 (Gupta, Lin and McKeown, INFOCOM 1998).
//!
//! The first level has an entry of 16 bits for each /24: a group, or the number of a block of 256 entries, where
//! prefixes longer than /24 lie in it. A change stores each address's entry once, from what was right before to what
//! is right now; so there is no moment at which a reader finds a third thing.

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

/// The most /24s in which longer prefixes can lie at a time.
pub const BLOCKS_MAX: usize = 1 << 15;

const TBL24_LEN: usize = 1 << 24;
const BLOCK_LEN: usize = 1 << 8;

/// An entry of the first level that is the number of a block.
const BLOCK_FLAG: u16 = 1 << 15;

/// Lookups in flight at a time: more than a core can have outstanding misses.
const IN_FLIGHT_MAX: usize = 32;

/// The table, as a reader has it.
pub struct Table {
    tbl24: AtomicArray<AtomicU16>,
    tbl8: AtomicArray<AtomicU16>,
}

impl Table {
    pub(crate) fn new() -> io::Result<Table> {
        Ok(Table { tbl24: AtomicArray::new(TBL24_LEN)?, tbl8: AtomicArray::new(BLOCKS_MAX * BLOCK_LEN)? })
    }

    /// The group of the longest prefix that covers the address.
    #[inline]
    pub fn lookup(&self, address: Ipv4Addr) -> Option<GroupId> {
        let mut group = [None];
        self.lookup_batch(&[address.to_bits()], &mut group);
        group[0]
    }

    /// [`Table::lookup`] of many, that do not wait for one another's memory: `groups` gets as many as there are
    /// `addresses`. More of these than of those are a bug of the caller's.
    #[inline]
    pub fn lookup_batch(&self, addresses: &[u32], groups: &mut [Option<GroupId>]) {
        assert!(addresses.len() <= groups.len(), "{} groups for {} addresses", groups.len(), addresses.len());
        // Lengths that the compiler knows: then no index needs a check.
        let tbl24: &[AtomicU16; TBL24_LEN] = self.tbl24[..].try_into().expect("the first level's length");
        let tbl8: &[AtomicU16; BLOCKS_MAX * BLOCK_LEN] = self.tbl8[..].try_into().expect("the blocks' length");
        for (addresses, groups) in addresses.chunks(IN_FLIGHT_MAX).zip(groups.chunks_mut(IN_FLIGHT_MAX)) {
            let mut entries = [0; IN_FLIGHT_MAX];
            // Loads that do not wait for one another.
            for (entry, address) in entries.iter_mut().zip(addresses) {
                *entry = tbl24[(address >> 8) as usize].load(Ordering::Relaxed);
            }
            // What a block holds was stored before its number was.
            fence(Ordering::Acquire);
            for ((entry, address), group) in entries.iter().zip(addresses).zip(groups.iter_mut()) {
                let mut entry = *entry;
                if entry & BLOCK_FLAG != 0 {
                    let at = usize::from(entry & !BLOCK_FLAG) * BLOCK_LEN + (address & 0xff) as usize;
                    entry = tbl8[at].load(Ordering::Relaxed);
                }
                *group = GroupId::from_entry(entry);
            }
            // What a group is was stored before a route to it was.
            fence(Ordering::Acquire);
        }
    }
}

/// What the writer knows of a block besides its entries.
struct Block {
    /// Of each entry: the length of the prefix that it is of.
    depths: [u8; BLOCK_LEN],
    /// Prefixes longer than /24 in it.
    routes: u16,
}

/// The side that writes.
pub(crate) struct Writer {
    domain: Arc<Domain>,
    retired: Retired<u16>,
    /// The routes themselves.
    rib: PrefixMap<Ipv4Net, GroupId>,
    /// Of each entry of the first level that is a group: the length of the prefix that it is of, 0 for none.
    depths: Vec<u8>,
    blocks: Vec<Option<Box<Block>>>,
    blocks_free: Vec<u16>,
}

/// A group and the length of its prefix, as an entry has them.
#[derive(Clone, Copy)]
struct Leaf {
    entry: u16,
    depth: u8,
}

/// Which entries a change is about: of prefixes up to a length, or of that length only.
#[derive(Clone, Copy)]
enum DepthFilter {
    UpTo(u8),
    Exactly(u8),
}

impl DepthFilter {
    fn includes(self, depth: u8) -> bool {
        match self {
            DepthFilter::UpTo(most) => depth <= most,
            DepthFilter::Exactly(exactly) => depth == exactly,
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

    /// Blocks that are in use.
    pub fn blocks_used(&self) -> usize {
        BLOCKS_MAX - self.blocks_free.len() - self.retired.len()
    }

    /// What the writer alone has of the table, without the routes themselves, in bytes.
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

    /// A block with the entries that the prefix's /24 has; not yet to be found by readers.
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
        self.blocks[usize::from(number)].as_mut().expect("a block that the table names")
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
        // The last one: what is left is the same for the whole /24.
        self.depths[index] = leaf.depth;
        table.tbl24[index].store(leaf.entry, Ordering::Release);
        self.blocks[usize::from(number)] = None;
        self.retired.push(&self.domain, number);
        Some(before)
    }

    /// Stores `leaf` wherever in a prefix of at most 24 bits something is that `of` includes.
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

/// The first of the first level's entries that a prefix covers, or lies in.
fn tbl24_index(prefix: Ipv4Net) -> usize {
    (prefix.network().to_bits() >> 8) as usize
}

/// The entries of a block that a prefix longer than /24 covers.
fn block_range(prefix: Ipv4Net) -> std::ops::Range<usize> {
    let first = (prefix.network().to_bits() & 0xff) as usize;
    first..first + (1 << (32 - prefix.prefix_len()))
}
