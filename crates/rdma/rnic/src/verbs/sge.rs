//! Scatter/gather elements: pieces of local memory, named by local keys.

/// Maximum number of scatter/gather elements in one work request.
pub const SGES_MAX: usize = 4;

/// The key with which local work requests name a memory region (L_Key).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LKey(pub u32);

/// A scatter/gather element: a piece of local memory (`ibv_sge`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    /// Virtual address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u32,
    /// The key of the region.
    pub key: LKey,
}
