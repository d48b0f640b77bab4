//! Constants of the layout of a device's memory, and the numbers of the nodes that share it.

/// Version of the layout. Any change of offsets or meanings is a new version.
pub const VERSION: u64 = 1;

/// Maximum number of nodes of a rack.
pub const NODES_MAX: u8 = 32;

/// Maximum number of doorbells of each direction of a link.
pub const VECTORS_MAX: usize = 16;

pub(super) const PAGE_BYTES: usize = 4096;
pub(super) const WORD_BYTES: usize = size_of::<u64>();

/// Bytes of a control block: a line of words, a line of scratchpad, two lines of doorbells.
pub(super) const BLOCK_BYTES: usize = 256;

/// "XLANEWIN" in memory.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"XLANEWIN");

/// Number of a node in its rack, from 0: the same number at every node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeSlot(pub u8);

impl NodeSlot {
    /// The slot as an index into an array with one element for each node.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl std::fmt::Display for NodeSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}
