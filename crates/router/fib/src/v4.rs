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

use crate::grace::{COLLECT_AT, Domain, Waiting};
use crate::memory::Memory;
use crate::{Error, GroupId, patience};

/// The most /24s in which longer prefixes can lie at a time.
pub const BLOCKS_MAX: usize = 1 << 15;

const FIRST_LEN: usize = 1 << 24;
const BLOCK_LEN: usize = 1 << 8;

/// An entry of the first level that is the number of a block.
const BLOCK: u16 = 1 << 15;

/// Lookups in flight at a time: more than a core can have outstanding misses.
const LANES: usize = 32;

/// The table, as a reader has it.
pub struct Table {
    first: Memory<AtomicU16>,
    blocks: Memory<AtomicU16>,
}

impl Table {
    pub(crate) fn new() -> io::Result<Table> {
        Ok(Table { first: Memory::new(FIRST_LEN)?, blocks: Memory::new(BLOCKS_MAX * BLOCK_LEN)? })
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
        let first: &[AtomicU16; FIRST_LEN] = self.first[..].try_into().expect("the first level's length");
        let blocks: &[AtomicU16; BLOCKS_MAX * BLOCK_LEN] = self.blocks[..].try_into().expect("the blocks' length");
        for (addresses, groups) in addresses.chunks(LANES).zip(groups.chunks_mut(LANES)) {
            let mut entries = [0; LANES];
            // Loads that do not wait for one another.
            for (entry, address) in entries.iter_mut().zip(addresses) {
                *entry = first[(address >> 8) as usize].load(Ordering::Relaxed);
            }
            // What a block holds was stored before its number was.
            fence(Ordering::Acquire);
            for ((entry, address), group) in entries.iter().zip(addresses).zip(groups.iter_mut()) {
                let mut entry = *entry;
                if entry & BLOCK != 0 {
                    let at = usize::from(entry & !BLOCK) * BLOCK_LEN + (address & 0xff) as usize;
                    entry = blocks[at].load(Ordering::Relaxed);
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
    waiting: Waiting<u16>,
    /// The routes themselves.
    rib: PrefixMap<Ipv4Net, GroupId>,
    /// Of each entry of the first level that is a group: the length of the prefix that it is of, 0 for none.
    depths: Vec<u8>,
    blocks: Vec<Option<Box<Block>>>,
    blocks_free: Vec<u16>,
}

/// A group and the length of its prefix, as an entry has them.
#[derive(Clone, Copy)]
struct Value {
    entry: u16,
    depth: u8,
}

/// Which entries a change is about: of prefixes up to a length, or of that length only.
#[derive(Clone, Copy)]
enum Of {
    UpTo(u8),
    Exactly(u8),
}

impl Of {
    fn includes(self, depth: u8) -> bool {
        match self {
            Of::UpTo(most) => depth <= most,
            Of::Exactly(exactly) => depth == exactly,
        }
    }
}

impl Writer {
    pub fn new(domain: Arc<Domain>) -> Writer {
        Writer {
            domain,
            waiting: Waiting::new(),
            rib: PrefixMap::new(),
            depths: vec![0; FIRST_LEN],
            blocks: Vec::new(),
            blocks_free: (0..BLOCKS_MAX as u16).rev().collect(),
        }
    }

    pub fn rib(&self) -> &PrefixMap<Ipv4Net, GroupId> {
        &self.rib
    }

    /// Blocks that are in use.
    pub fn blocks_used(&self) -> usize {
        BLOCKS_MAX - self.blocks_free.len() - self.waiting.len()
    }

    /// What the writer alone has of the table, without the routes themselves, in bytes.
    pub fn bytes(&self) -> usize {
        self.depths.len() + self.blocks.iter().flatten().count() * size_of::<Block>()
    }

    pub fn insert(&mut self, table: &Table, prefix: Ipv4Net, group: GroupId) -> Result<Option<GroupId>, Error> {
        let value = Value { entry: group.get(), depth: prefix.prefix_len() };
        if prefix.prefix_len() <= 24 {
            let before = self.rib.insert(prefix, group);
            self.paint(table, prefix, Of::UpTo(prefix.prefix_len()), value);
            return Ok(before);
        }
        let slot = slot_of(prefix);
        let (number, is_new) = match table.first[slot].load(Ordering::Relaxed) {
            entry if entry & BLOCK != 0 => (entry & !BLOCK, false),
            _ => (self.new_block(table, prefix)?, true),
        };
        let before = self.rib.insert(prefix, group);
        let block = self.block_mut(number);
        block.routes += u16::from(before.is_none());
        block.paint(table, number, entries_of(prefix), Of::UpTo(prefix.prefix_len()), value);
        if is_new {
            table.first[slot].store(BLOCK | number, Ordering::Release);
        }
        Ok(before)
    }

    /// A block with the entries that the prefix's /24 has; not yet to be found by readers.
    fn new_block(&mut self, table: &Table, prefix: Ipv4Net) -> Result<u16, Error> {
        let number = patience(|| {
            if self.blocks_free.is_empty() || self.waiting.len() >= COLLECT_AT {
                self.collect();
            }
            let full = Err(Error::BlocksFull { prefix, blocks_max: BLOCKS_MAX });
            self.blocks_free.pop().map(Ok).or_else(|| self.waiting.is_empty().then_some(full))
        })??;
        let slot = slot_of(prefix);
        let entry = table.first[slot].load(Ordering::Relaxed);
        let block = Block { depths: [self.depths[slot]; BLOCK_LEN], routes: 0 };
        let first = usize::from(number) * BLOCK_LEN;
        for at in &table.blocks[first..first + BLOCK_LEN] {
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
        self.waiting.collect(&self.domain, |number| free.push(number));
    }

    pub fn remove(&mut self, table: &Table, prefix: Ipv4Net) -> Option<GroupId> {
        let before = self.rib.remove(&prefix)?;
        let covering = self.rib.get_lpm(&prefix);
        let value = match covering {
            Some((covering, group)) => Value { entry: group.get(), depth: covering.prefix_len() },
            None => Value { entry: 0, depth: 0 },
        };
        let of = Of::Exactly(prefix.prefix_len());
        if prefix.prefix_len() <= 24 {
            self.paint(table, prefix, of, value);
            return Some(before);
        }
        let slot = slot_of(prefix);
        let number = table.first[slot].load(Ordering::Relaxed) & !BLOCK;
        let block = self.block_mut(number);
        block.routes -= 1;
        if block.routes > 0 {
            block.paint(table, number, entries_of(prefix), of, value);
            return Some(before);
        }
        // The last one: what is left is the same for the whole /24.
        self.depths[slot] = value.depth;
        table.first[slot].store(value.entry, Ordering::Release);
        self.blocks[usize::from(number)] = None;
        self.waiting.push(&self.domain, number);
        Some(before)
    }

    /// Stores `value` wherever in a prefix of at most 24 bits something is that `of` includes.
    fn paint(&mut self, table: &Table, prefix: Ipv4Net, of: Of, value: Value) {
        let slot = slot_of(prefix);
        for slot in slot..slot + (1 << (24 - prefix.prefix_len())) {
            let entry = table.first[slot].load(Ordering::Relaxed);
            if entry & BLOCK != 0 {
                let number = entry & !BLOCK;
                self.block_mut(number).paint(table, number, 0..BLOCK_LEN, of, value);
            } else if of.includes(self.depths[slot]) {
                self.depths[slot] = value.depth;
                table.first[slot].store(value.entry, Ordering::Release);
            }
        }
    }
}

impl Block {
    fn paint(&mut self, table: &Table, number: u16, entries: std::ops::Range<usize>, of: Of, value: Value) {
        let first = usize::from(number) * BLOCK_LEN;
        for entry in entries {
            if of.includes(self.depths[entry]) {
                self.depths[entry] = value.depth;
                table.blocks[first + entry].store(value.entry, Ordering::Release);
            }
        }
    }
}

/// The first of the first level's entries that a prefix covers, or lies in.
fn slot_of(prefix: Ipv4Net) -> usize {
    (prefix.network().to_bits() >> 8) as usize
}

/// The entries of a block that a prefix longer than /24 covers.
fn entries_of(prefix: Ipv4Net) -> std::ops::Range<usize> {
    let first = (prefix.network().to_bits() & 0xff) as usize;
    first..first + (1 << (32 - prefix.prefix_len()))
}
