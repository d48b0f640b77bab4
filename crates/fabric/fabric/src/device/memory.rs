//! Memory of a device under each caching mode, and the words of a control block.

use super::format::{BLOCK_BYTES, VECTORS_MAX, WORD_BYTES};
use crate::memory_link::{CONTROL_BYTES, TRAINING_WORD};
use crate::{Coherence, Memory, MemoryInbound, MemoryOutbound, MemoryScratchpad, SCRATCHPAD_WORDS, Scratchpad};
use std::ptr::NonNull;
use volmem::sync::{Ordering, fence};
use volmem::{LineControl, Region, load_fence, store_fence};

/// How the processor caches the memory, which decides which fences order its accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caching {
    /// Write-back, coherent with the other nodes.
    Cached,
    /// Uncached: every access goes to the device, in program order.
    Uncached,
    /// Write-combined: stores gather in buffers, and loads may be reordered.
    WriteCombined,
    /// Write-back, not coherent with the other nodes: lines are written back and invalidated explicitly.
    NonCoherent,
}

impl std::fmt::Display for Caching {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Cached => "cached",
            Self::Uncached => "uncached",
            Self::WriteCombined => "write-combined",
            Self::NonCoherent => "non-coherent",
        })
    }
}

/// A span of a device's memory.
#[derive(Debug, Clone)]
pub struct DeviceMemory {
    region: Region,
    access: Access,
}

/// [`Caching`], with the instructions that it needs.
#[derive(Debug, Clone, Copy)]
enum Access {
    Cached,
    Uncached,
    WriteCombined,
    NonCoherent(LineControl),
}

/// An inbound window in a device's memory.
pub type DeviceInbound = MemoryInbound<DeviceMemory>;
/// An outbound window in a device's memory.
pub type DeviceOutbound = MemoryOutbound<DeviceMemory>;
/// A scratchpad in a device's memory.
pub type DeviceScratchpad = MemoryScratchpad<DeviceMemory>;

impl DeviceMemory {
    /// Wraps a region with the given caching. `None` for non-coherent memory on a processor that has no instructions to
    /// write back and invalidate lines.
    pub fn new(region: Region, caching: Caching) -> Option<Self> {
        let access = match caching {
            Caching::Cached => Access::Cached,
            Caching::Uncached => Access::Uncached,
            Caching::WriteCombined => Access::WriteCombined,
            Caching::NonCoherent => Access::NonCoherent(LineControl::detect()?),
        };
        Some(Self { region, access })
    }

    /// Loads the little-endian word that the other nodes stored last.
    pub(super) fn fetch(&self, offset: usize) -> u64 {
        self.invalidate_lines(offset, WORD_BYTES);
        u64::from_le(self.load_u64(offset, Ordering::Acquire))
    }

    /// Stores a little-endian word after all earlier stores, and writes it back.
    pub(super) fn publish(&self, offset: usize, word: u64) {
        self.barrier();
        self.store_u64(offset, word.to_le(), Ordering::Release);
        self.write_back(offset, WORD_BYTES);
        self.barrier();
    }

    /// Replaces a word that is zero, and returns the earlier value. Atomic where the memory is coherent.
    pub(super) fn claim(&self, offset: usize, word: u64) -> u64 {
        self.invalidate_lines(offset, WORD_BYTES);
        let answer = self.region.compare_exchange_u64(offset, 0, word.to_le());
        self.write_back(offset, WORD_BYTES);
        self.barrier();
        u64::from_le(answer.unwrap_or_else(|found| found))
    }
}

impl Memory for DeviceMemory {
    #[inline]
    fn coherence(&self) -> Coherence {
        match self.access {
            Access::Cached | Access::Uncached => Coherence::Coherent,
            Access::WriteCombined => Coherence::WriteCombined,
            Access::NonCoherent(_) => Coherence::NonCoherent,
        }
    }

    #[inline]
    fn len_bytes(&self) -> usize {
        self.region.len_bytes()
    }

    #[inline]
    fn part(&self, offset: usize, len_bytes: usize) -> Self {
        Self { region: self.region.sub(offset, len_bytes), access: self.access }
    }

    /// Loads of write-combined memory need a fence for acquire order.
    #[inline]
    fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        let value = self.region.load_u64(offset, order);
        if order != Ordering::Relaxed && matches!(self.access, Access::WriteCombined) {
            load_fence();
        }
        value
    }

    #[inline]
    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        self.region.store_u64(offset, value, order);
    }

    #[inline]
    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        // SAFETY: the caller guarantees that `destination` is writable for `len_bytes` and outside the memory.
        unsafe { self.region.read_to(offset, destination, len_bytes) }
    }

    #[inline]
    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        // SAFETY: the caller guarantees that `source` is readable for `len_bytes` and outside the memory.
        unsafe { self.region.write_from(offset, source, len_bytes) }
    }

    #[inline]
    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        self.region.pointer(offset, len_bytes)
    }

    #[inline]
    fn demote(&self, offset: usize, len_bytes: usize) {
        if matches!(self.access, Access::Cached) {
            self.region.demote(offset, len_bytes);
        }
    }

    #[inline]
    fn prefetch_for_writes(&self, offset: usize, len_bytes: usize) {
        if matches!(self.access, Access::Cached) {
            self.region.prefetch_for_writes(offset, len_bytes);
        }
    }

    #[inline]
    fn write_back(&self, offset: usize, len_bytes: usize) {
        if let Access::NonCoherent(lines) = self.access {
            lines.write_back(&self.region, offset, len_bytes);
        }
    }

    #[inline]
    fn invalidate_lines(&self, offset: usize, len_bytes: usize) {
        if let Access::NonCoherent(lines) = self.access {
            lines.invalidate_lines(&self.region, offset, len_bytes);
        }
    }

    #[inline]
    fn barrier(&self) {
        match self.access {
            Access::Cached | Access::Uncached => {}
            Access::WriteCombined => store_fence(),
            Access::NonCoherent(lines) => lines.barrier(),
        }
    }

    /// Stores to a device are posted writes. They have arrived once a later load is answered: PCI Express does not let
    /// a read pass posted writes.
    fn flush_posted(&self) {
        self.barrier();
        if matches!(self.access, Access::Uncached | Access::WriteCombined) {
            fence(Ordering::SeqCst);
            std::hint::black_box(self.load_u64(self.len_bytes() - WORD_BYTES, Ordering::Acquire));
        }
    }
}

// The peer ID and the heartbeat follow the training word in its line. The scratchpad is the next line. The doorbells
// take the rest.
const PEER_ID: usize = TRAINING_WORD + WORD_BYTES;
const HEARTBEAT: usize = PEER_ID + WORD_BYTES;
const DOORBELLS: usize = CONTROL_BYTES;

const _: () = assert!(DOORBELLS + VECTORS_MAX * WORD_BYTES <= BLOCK_BYTES);

/// The control block of a pair of nodes. Only the writer stores in it, because no line may have two writers.
#[derive(Debug, Clone)]
pub(super) struct Block(DeviceMemory);

impl Block {
    pub(super) fn new(memory: DeviceMemory) -> Self {
        assert_eq!(memory.len_bytes(), BLOCK_BYTES);
        Self(memory)
    }

    /// The part that a [`MemoryLink`](crate::MemoryLink) uses.
    pub(super) fn control(&self) -> DeviceMemory {
        self.0.part(0, CONTROL_BYTES)
    }

    /// The training word. The upper half is ignored: the writer can store anything there.
    pub(super) fn training(&self) -> u32 {
        self.0.fetch(TRAINING_WORD) as u32
    }

    pub(super) fn publish_training(&self, word: u32) {
        self.0.publish(TRAINING_WORD, u64::from(word));
    }

    /// ID under which the server knows the writer; `None` if the writer has no interrupts.
    pub(super) fn peer_id(&self) -> Option<u16> {
        let word = self.0.fetch(PEER_ID);
        u16::try_from(word as u32).ok().filter(|peer_id| with_complement(*peer_id) == word)
    }

    pub(super) fn publish_peer_id(&self, peer_id: Option<u16>) {
        self.0.publish(PEER_ID, peer_id.map_or(0, with_complement));
    }

    pub(super) fn heartbeat(&self) -> u64 {
        self.0.fetch(HEARTBEAT)
    }

    pub(super) fn publish_heartbeat(&self, beat: u64) {
        self.0.publish(HEARTBEAT, beat);
    }

    /// Number of the last ring.
    pub(super) fn last_ring(&self, vector: usize) -> u64 {
        self.0.fetch(doorbell_offset(vector))
    }

    /// Publishes a ring with a number that this doorbell has not had before.
    pub(super) fn ring(&self, vector: usize, number: u64) {
        self.0.publish(doorbell_offset(vector), number);
    }

    pub(super) fn clear_scratchpad(&self) {
        let pad = DeviceScratchpad::new(self.control(), self.control());
        (0..SCRATCHPAD_WORDS).for_each(|index| pad.write(index, 0));
    }
}

/// A number with its complement in the upper half, so that neither zeros nor random words pass for one.
fn with_complement(peer_id: u16) -> u64 {
    let word = u32::from(peer_id);
    u64::from(!word) << u32::BITS | u64::from(word)
}

fn doorbell_offset(vector: usize) -> usize {
    assert!(vector < VECTORS_MAX, "doorbell {vector} of {VECTORS_MAX}");
    DOORBELLS + vector * WORD_BYTES
}
