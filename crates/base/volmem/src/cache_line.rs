//! The unit of caches.

/// Bytes of a cache line, the unit in which cores and links exchange memory.
pub const CACHE_LINE_BYTES: usize = 64;
