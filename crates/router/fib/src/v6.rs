//! IPv6 lookup in a compressed multiway trie, after Poptrie (Asai and Ohara, SIGCOMM 2015).
//!
//! The first 20 bits of an address select an entry of the root; then each node consumes 6 bits, so that 18 levels
//! consume the other 108. A node of 32 bytes holds a 64-bit `vector` of the slots with children, a 64-bit `leafvec` of
//! the other slots at which a new leaf begins, its first four leaves, and the start of a block with its children and
//! further leaves. A population count finds the child or the leaf.
//!
//! A change is copy-on-write: it builds new blocks for the changed nodes and their ancestors, and one store to the root
//! publishes them. The old blocks stay until no reader can be in them.

mod lookup;
mod writer;

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::memory::AtomicArray;

pub(crate) use writer::Writer;

/// Maximum number of nodes: a full Internet table of 200,000 routes takes about 120,000.
pub const NODES_MAX: usize = 1 << 19;

/// Number of address bits that select the root entry.
const ROOT_BITS: u8 = 20;

/// Number of address bits that each node consumes.
const STRIDE_BITS: u8 = 6;

/// Maximum number of nodes on a path.
const LEVELS_MAX: usize = 18;

/// Words of the allocation unit, which holds a node or 16 leaves.
const UNIT_WORDS: usize = 4;

/// First word of a node: the slots with children.
const WORD_VECTOR: usize = 0;
/// Second word: the slots without a child whose leaf differs from the previous leaf.
const WORD_LEAFVEC: usize = 1;
/// Third word: the first unit of the node's block.
const WORD_BLOCK: usize = 2;
/// Fourth word: the first leaves.
const WORD_INLINE_LEAVES: usize = 3;

/// Number of leaves in the node itself; further leaves are in its block, behind the children.
const INLINE_LEAVES: usize = 4;

/// Number of leaves in a word.
const LEAVES_PER_WORD: usize = 4;

/// Maximum number of units of a block: a node has 64 slots, each with a child or a leaf.
const BLOCK_UNITS_MAX: usize = 64;

/// Maximum number of units that a node and the leaves in its block take.
const NODE_UNITS_MAX: usize = 5;

/// Units of one of the two semispaces, as in a copying garbage collector: changes need room for copies, and compaction
/// into the other semispace removes fragmentation.
const SEMISPACE_UNITS: usize = 2 * NODE_UNITS_MAX * NODES_MAX + CHANGE_UNITS_MAX;

/// Maximum number of units that a change of one path takes.
const CHANGE_UNITS_MAX: usize = (LEVELS_MAX + 1) * BLOCK_UNITS_MAX;

/// Marks an entry of the root that is the unit of a node; other entries are a group, or 0.
const NODE_FLAG: u32 = 1 << 31;

/// The table that readers use.
pub struct Table {
    root: AtomicArray<AtomicU32>,
    units: AtomicArray<AtomicU64>,
}

impl Table {
    pub(crate) fn new() -> io::Result<Table> {
        Ok(Table {
            root: AtomicArray::new(1 << ROOT_BITS)?,
            units: AtomicArray::new(2 * SEMISPACE_UNITS * UNIT_WORDS)?,
        })
    }
}
