//! Scatter/gather elements: pieces of local memory, named by local keys.

/// Pieces of memory in one work request, at most.
pub const SGES_MAX: usize = 4;

/// The key by which this NIC's own programs use a memory region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LKey(pub u32);

/// A piece of local memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    /// Virtual address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u32,
    /// The region's key.
    pub key: LKey,
}
