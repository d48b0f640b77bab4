//! Memory behind this machine's caches, which follow no other machine's: lines are written back and dropped by hand.

use crate::{Coherence, Memory};
use std::ptr::NonNull;
use volmem::sync::Ordering;
use volmem::{LineControl, Region};

/// A region that other machines reach too, without coherence.
#[derive(Debug, Clone)]
pub struct Flushed {
    region: Region,
    lines: LineControl,
}

impl Flushed {
    /// The region through this processor's caches; `None` on a processor that lets no program say what they keep.
    pub fn new(region: Region) -> Option<Self> {
        LineControl::detect().map(|lines| Self { region, lines })
    }
}

impl Memory for Flushed {
    #[inline]
    fn coherence(&self) -> Coherence {
        Coherence::NonCoherent
    }

    #[inline]
    fn len_bytes(&self) -> usize {
        self.region.len_bytes()
    }

    #[inline]
    fn part(&self, offset: usize, len_bytes: usize) -> Self {
        Self { region: self.region.sub(offset, len_bytes), lines: self.lines }
    }

    #[inline]
    fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        self.region.load_u64(offset, order)
    }

    #[inline]
    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        self.region.store_u64(offset, value, order);
    }

    #[inline]
    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        // SAFETY: the caller's.
        unsafe { self.region.read_to(offset, destination, len_bytes) }
    }

    #[inline]
    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        // SAFETY: the caller's.
        unsafe { self.region.write_from(offset, source, len_bytes) }
    }

    #[inline]
    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        self.region.pointer(offset, len_bytes)
    }

    #[inline]
    fn write_back(&self, offset: usize, len_bytes: usize) {
        self.lines.write_back(&self.region, offset, len_bytes);
    }

    #[inline]
    fn drop_lines(&self, offset: usize, len_bytes: usize) {
        self.lines.drop_lines(&self.region, offset, len_bytes);
    }

    #[inline]
    fn barrier(&self) {
        self.lines.barrier();
    }
}
