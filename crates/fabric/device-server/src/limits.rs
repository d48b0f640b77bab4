//! Bounds of what a server can be asked for.

/// Maximum number of clients at a time.
pub const CLIENTS_MAX: usize = 64;
/// Smallest memory: a page.
pub const SIZE_BYTES_MIN: u64 = 4096;
/// Largest memory: what machines can map as a 64-bit PCI BAR.
pub(crate) const SIZE_BYTES_MAX: u64 = 1 << 46;
/// Maximum number of vectors of a client. Each is a descriptor in the server and in every client.
pub const VECTORS_MAX: u32 = 64;
