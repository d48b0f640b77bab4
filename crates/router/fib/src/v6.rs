//! IPv6 by a compressed trie, after Poptrie (Asai and Ohara, SIGCOMM 2015).
//!
//! The first 20 bits of an address find an entry of the root; then a node decides on 6 bits each, of which 18 make the
//! other 108. A node of 32 bytes holds a vector of 64 bits that says where children are, another that says where among
//! the rest a new leaf begins, its first four leaves, and where a block with its children and other leaves is: counting
//! bits finds the child or the leaf.
//!
//! A change makes new blocks for the nodes that it changes and for those above them, and is published by one store to
//! the root. What was there before stays until no reader can be in it.

mod lookup;
mod writer;

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::memory::AtomicArray;

pub(crate) use writer::Writer;

/// The most nodes that a table has: a full Internet table of 200,000 routes takes about 120,000.
pub const NODES_MAX: usize = 1 << 19;

/// Bits of an address that find the root's entry.
const ROOT_BITS: u8 = 20;

/// Bits of an address that each node decides on.
const STRIDE_BITS: u8 = 6;

/// Nodes on the way from the root to the last bit.
const LEVELS_MAX: usize = 18;

/// What is allocated: a node, or room for 16 leaves.
const UNIT_WORDS: usize = 4;

/// Of a node's words: where children are.
const WORD_VECTOR: usize = 0;
/// Where leaves begin that are not as the leaf before them.
const WORD_LEAFVEC: usize = 1;
/// The block's first unit.
const WORD_BLOCK: usize = 2;
/// The first leaves.
const WORD_INLINE_LEAVES: usize = 3;

/// Leaves that a node has itself; the others are in its block, behind the children.
const INLINE_LEAVES: usize = 4;

/// Leaves of a word.
const LEAVES_PER_WORD: usize = 4;

/// The most units of a block: a node has 64 slots, each a child or a leaf.
const BLOCK_UNITS_MAX: usize = 64;

/// The most units that a node and the leaves in its block take.
const NODE_UNITS_MAX: usize = 5;

/// Half of the units: each change needs room for copies, and moving to the other half makes all room one.
const SEMISPACE_UNITS: usize = 2 * NODE_UNITS_MAX * NODES_MAX + CHANGE_UNITS_MAX;

/// What a change of one way down the trie takes.
const CHANGE_UNITS_MAX: usize = (LEVELS_MAX + 1) * BLOCK_UNITS_MAX;

/// An entry of the root that is the number of a node's unit; one that is not is a group, or 0.
const NODE_FLAG: u32 = 1 << 31;

/// The table, as a reader has it.
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
