//! Windows in coherent memory: of this process, or shared with another.

use crate::window::assert_whole_lines;
use crate::{Coherence, Inbound, Outbound, Slice};
use std::ptr::NonNull;
use volmem::Region;
use volmem::sync::Ordering;

/// An inbound window in coherent memory.
#[derive(Debug, Clone)]
pub struct MemoryInbound(Region);

/// An outbound window in coherent memory.
#[derive(Debug, Clone)]
pub struct MemoryOutbound(Region);

impl MemoryInbound {
    /// The owner's side of `region`.
    pub fn new(region: Region) -> Self {
        Self(region)
    }

    /// The memory itself, for words that are not part of any protocol with the peer.
    pub fn region(&self) -> &Region {
        &self.0
    }
}

impl MemoryOutbound {
    /// The peer's side of `region`.
    pub fn new(region: Region) -> Self {
        Self(region)
    }
}

impl Inbound for MemoryInbound {
    #[inline]
    fn len_bytes(&self) -> usize {
        self.0.len_bytes()
    }

    #[inline]
    fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        self.0.load_u64(offset, order)
    }

    #[inline]
    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        self.0.store_u64(offset, value, order);
    }

    #[inline]
    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        // SAFETY: the caller's.
        unsafe { self.0.read_to(offset, destination, len_bytes) }
    }

    #[inline]
    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        self.0.pointer(offset, len_bytes)
    }
}

impl Outbound for MemoryOutbound {
    #[inline]
    fn len_bytes(&self) -> usize {
        self.0.len_bytes()
    }

    #[inline]
    fn coherence(&self) -> Coherence {
        Coherence::Coherent
    }

    #[inline]
    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        self.0.store_u64(offset, value, order);
    }

    #[inline]
    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        // SAFETY: the caller's.
        unsafe { self.0.write_from(offset, source, len_bytes) }
    }

    #[inline]
    fn pointer(&self, offset: usize, len_bytes: usize) -> Option<NonNull<u8>> {
        Some(self.0.pointer(offset, len_bytes))
    }

    #[inline]
    fn hand_over(&self, offset: usize, len_bytes: usize) {
        self.0.demote(offset, len_bytes);
    }

    /// Nothing to do: the release store that publishes orders coherent memory by itself.
    #[inline]
    fn fence(&self) {}

    /// Nothing to do: a coherent store is visible as soon as it leaves the core, and whoever sleeps fences anyway.
    #[inline]
    fn flush(&self) {}
}

impl Slice for MemoryInbound {
    fn slice(&self, offset: usize, len_bytes: usize) -> Self {
        assert_whole_lines(offset, len_bytes);
        Self(self.0.sub(offset, len_bytes))
    }
}

impl Slice for MemoryOutbound {
    fn slice(&self, offset: usize, len_bytes: usize) -> Self {
        assert_whole_lines(offset, len_bytes);
        Self(self.0.sub(offset, len_bytes))
    }
}
