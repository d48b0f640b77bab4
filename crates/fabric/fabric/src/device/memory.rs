//! Memory of a device, however the processor reaches it, and the words of a control block.

use super::layout::{BLOCK_BYTES, VECTORS_MAX, WORD_BYTES};
use crate::memory_link::{CONTROL_BYTES, TRAINING_WORD};
use crate::{Coherence, Memory, MemoryInbound, MemoryOutbound, MemoryScratchpad, SCRATCHPAD_WORDS, Scratchpad};
use std::ptr::NonNull;
use volmem::sync::{Ordering, fence};
use volmem::{LineControl, Region, load_fence, store_fence};

/// How the processor reaches the memory, which decides what orders it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caching {
    /// As its own memory: coherent with the other nodes.
    Cached,
    /// Every access goes to the device, in order.
    Uncached,
    /// Stores gather, and loads may overtake each other.
    WriteCombined,
    /// By caches that do not follow those of other nodes: lines are written back and dropped by hand.
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
    reach: Reach,
}

/// [`Caching`], and what it takes.
#[derive(Debug, Clone, Copy)]
enum Reach {
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
    /// A region that is reached so. `None`: not coherent, on a processor that lets no program say what its caches keep.
    pub fn new(region: Region, caching: Caching) -> Option<Self> {
        let reach = match caching {
            Caching::Cached => Reach::Cached,
            Caching::Uncached => Reach::Uncached,
            Caching::WriteCombined => Reach::WriteCombined,
            Caching::NonCoherent => return Self::non_coherent(region),
        };
        Some(Self { region, reach })
    }

    /// A region that other machines reach too, without coherence; `None` on a processor that lets no program say what
    /// its caches keep.
    pub(crate) fn non_coherent(region: Region) -> Option<Self> {
        LineControl::detect().map(|lines| Self { region, reach: Reach::NonCoherent(lines) })
    }

    /// A word as the other nodes have stored it last, little endian.
    pub(super) fn fetch(&self, offset: usize) -> u64 {
        self.invalidate_lines(offset, WORD_BYTES);
        u64::from_le(self.load_u64(offset, Ordering::Acquire))
    }

    /// Stores a word, little endian, behind all stores made before and on its way to the other nodes.
    pub(super) fn publish(&self, offset: usize, word: u64) {
        self.barrier();
        self.store_u64(offset, word.to_le(), Ordering::Release);
        self.write_back(offset, WORD_BYTES);
        self.barrier();
    }

    /// Replaces a word that is zero; answers what it was. Atomic where the memory is coherent.
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
        match self.reach {
            Reach::Cached | Reach::Uncached => Coherence::Coherent,
            Reach::WriteCombined => Coherence::WriteCombined,
            Reach::NonCoherent(_) => Coherence::NonCoherent,
        }
    }

    #[inline]
    fn len_bytes(&self) -> usize {
        self.region.len_bytes()
    }

    #[inline]
    fn part(&self, offset: usize, len_bytes: usize) -> Self {
        Self { region: self.region.sub(offset, len_bytes), reach: self.reach }
    }

    /// Acquire order holds for all memory but write-combined.
    #[inline]
    fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        let value = self.region.load_u64(offset, order);
        if order != Ordering::Relaxed && matches!(self.reach, Reach::WriteCombined) {
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
    fn demote(&self, offset: usize, len_bytes: usize) {
        if matches!(self.reach, Reach::Cached) {
            self.region.demote(offset, len_bytes);
        }
    }

    #[inline]
    fn prefetch_for_writes(&self, offset: usize, len_bytes: usize) {
        if matches!(self.reach, Reach::Cached) {
            self.region.prefetch_for_writes(offset, len_bytes);
        }
    }

    #[inline]
    fn write_back(&self, offset: usize, len_bytes: usize) {
        if let Reach::NonCoherent(lines) = self.reach {
            lines.write_back(&self.region, offset, len_bytes);
        }
    }

    #[inline]
    fn invalidate_lines(&self, offset: usize, len_bytes: usize) {
        if let Reach::NonCoherent(lines) = self.reach {
            lines.invalidate_lines(&self.region, offset, len_bytes);
        }
    }

    #[inline]
    fn barrier(&self) {
        match self.reach {
            Reach::Cached | Reach::Uncached => {}
            Reach::WriteCombined => store_fence(),
            Reach::NonCoherent(lines) => lines.barrier(),
        }
    }

    /// Stores to a device are posted: they have arrived once a load behind them is answered.
    fn flush_posted(&self) {
        self.barrier();
        if matches!(self.reach, Reach::Uncached | Reach::WriteCombined) {
            fence(Ordering::SeqCst);
            std::hint::black_box(self.load_u64(self.len_bytes() - WORD_BYTES, Ordering::Acquire));
        }
    }
}

// Behind the training word, in its line; the scratchpad is the next line; the bells are the rest.
const IDENTITY: usize = TRAINING_WORD + WORD_BYTES;
const BEAT: usize = IDENTITY + WORD_BYTES;
const BELLS: usize = CONTROL_BYTES;

const _: () = assert!(BELLS + VECTORS_MAX * WORD_BYTES <= BLOCK_BYTES);

/// The control block of a pair of nodes. Only the writer stores in it: no line has two writers.
#[derive(Debug, Clone)]
pub(super) struct Block(DeviceMemory);

impl Block {
    pub(super) fn new(memory: DeviceMemory) -> Self {
        assert_eq!(memory.len_bytes(), BLOCK_BYTES);
        Self(memory)
    }

    /// The part that a link uses.
    pub(super) fn control(&self) -> DeviceMemory {
        self.0.part(0, CONTROL_BYTES)
    }

    /// The training word; its upper half is the writer's to spoil.
    pub(super) fn training(&self) -> u32 {
        self.0.fetch(TRAINING_WORD) as u32
    }

    pub(super) fn publish_training(&self, word: u32) {
        self.0.publish(TRAINING_WORD, u64::from(word));
    }

    /// Under which number the writer's bells are known, if it has any.
    pub(super) fn identity(&self) -> Option<u16> {
        let word = self.0.fetch(IDENTITY);
        u16::try_from(word as u32).ok().filter(|identity| signed(*identity) == word)
    }

    pub(super) fn publish_identity(&self, identity: Option<u16>) {
        self.0.publish(IDENTITY, identity.map_or(0, signed));
    }

    pub(super) fn beat(&self) -> u64 {
        self.0.fetch(BEAT)
    }

    pub(super) fn publish_beat(&self, beat: u64) {
        self.0.publish(BEAT, beat);
    }

    /// The number of the last ring.
    pub(super) fn ring_last(&self, vector: usize) -> u64 {
        self.0.fetch(bell_offset(vector))
    }

    /// Rings a bell, by a number that it did not have before.
    pub(super) fn ring(&self, vector: usize, number: u64) {
        self.0.publish(bell_offset(vector), number);
    }

    pub(super) fn clear_scratchpad(&self) {
        let pad = DeviceScratchpad::new(self.control(), self.control());
        (0..SCRATCHPAD_WORDS).for_each(|index| pad.write(index, 0));
    }
}

/// A number with its complement above it, so that neither zeros nor chance pass for one.
fn signed(identity: u16) -> u64 {
    let word = u32::from(identity);
    u64::from(!word) << u32::BITS | u64::from(word)
}

fn bell_offset(vector: usize) -> usize {
    assert!(vector < VECTORS_MAX, "bell {vector} of {VECTORS_MAX}");
    BELLS + vector * WORD_BYTES
}
