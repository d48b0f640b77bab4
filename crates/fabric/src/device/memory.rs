//! Memory of a device, however the processor reaches it: its windows, and the words beside them.

use super::layout::{BLOCK_BYTES, VECTORS_MAX, WORD_BYTES};
use crate::window::assert_whole_lines;
use crate::{Coherence, Inbound, MemoryInbound, Outbound, SCRATCHPAD_WORDS, Scratchpad, Slice};
use std::ptr::NonNull;
use volmem::sync::{Ordering, fence};
use volmem::{CACHE_LINE_BYTES, Region, load_fence, store_fence};

/// How the processor reaches the memory, which decides what orders it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caching {
    /// As its own memory: coherent.
    Cached,
    /// Every access goes to the device, in order.
    Uncached,
    /// Stores gather, and loads may overtake each other.
    WriteCombined,
}

impl Caching {
    /// Puts stores ahead of those that follow.
    #[inline]
    fn order_stores(self) {
        if self == Self::WriteCombined {
            store_fence();
        }
    }

    /// Puts loads ahead of those that follow.
    #[inline]
    fn order_loads(self) {
        if self == Self::WriteCombined {
            load_fence();
        }
    }
}

impl std::fmt::Display for Caching {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Cached => "cached",
            Self::Uncached => "uncached",
            Self::WriteCombined => "write-combined",
        })
    }
}

/// An inbound window in a device's memory.
#[derive(Debug, Clone)]
pub struct DeviceInbound {
    memory: MemoryInbound,
    caching: Caching,
}

impl DeviceInbound {
    pub(super) fn new(region: Region, caching: Caching) -> Self {
        Self { memory: MemoryInbound::new(region), caching }
    }

    /// Zeroes it, visibly to whoever sees a later store.
    pub(super) fn clean(&self) {
        for offset in (0..self.len_bytes()).step_by(WORD_BYTES) {
            self.store_u64(offset, 0, Ordering::Relaxed);
        }
        self.caching.order_stores();
    }
}

impl Inbound for DeviceInbound {
    #[inline]
    fn len_bytes(&self) -> usize {
        self.memory.len_bytes()
    }

    #[inline]
    fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        let value = self.memory.load_u64(offset, order);
        if order != Ordering::Relaxed {
            self.caching.order_loads();
        }
        value
    }

    #[inline]
    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        self.memory.store_u64(offset, value, order);
    }

    #[inline]
    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        // SAFETY: the caller's.
        unsafe { self.memory.read_to(offset, destination, len_bytes) }
    }

    #[inline]
    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        self.memory.pointer(offset, len_bytes)
    }
}

impl Slice for DeviceInbound {
    fn slice(&self, offset: usize, len_bytes: usize) -> Self {
        Self { memory: self.memory.slice(offset, len_bytes), caching: self.caching }
    }
}

/// An outbound window in a device's memory.
#[derive(Debug, Clone)]
pub struct DeviceOutbound {
    memory: Region,
    caching: Caching,
}

impl DeviceOutbound {
    pub(super) fn new(memory: Region, caching: Caching) -> Self {
        Self { memory, caching }
    }
}

impl Outbound for DeviceOutbound {
    #[inline]
    fn len_bytes(&self) -> usize {
        self.memory.len_bytes()
    }

    #[inline]
    fn coherence(&self) -> Coherence {
        match self.caching {
            Caching::Cached | Caching::Uncached => Coherence::Coherent,
            Caching::WriteCombined => Coherence::WriteCombined,
        }
    }

    #[inline]
    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        self.memory.store_u64(offset, value, order);
    }

    #[inline]
    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        // SAFETY: the caller's.
        unsafe { self.memory.write_from(offset, source, len_bytes) }
    }

    #[inline]
    fn pointer(&self, offset: usize, len_bytes: usize) -> Option<NonNull<u8>> {
        Some(self.memory.pointer(offset, len_bytes))
    }

    #[inline]
    fn fence(&self) {
        self.caching.order_stores();
    }

    #[inline]
    fn hand_over(&self, offset: usize, len_bytes: usize) {
        if self.caching == Caching::Cached {
            self.memory.demote(offset, len_bytes);
        }
    }

    /// Stores to a device are posted: they have arrived once a load behind them is answered.
    fn flush(&self) {
        if self.caching == Caching::Cached {
            return;
        }
        store_fence();
        fence(Ordering::SeqCst);
        std::hint::black_box(self.memory.load_u64(self.memory.len_bytes() - WORD_BYTES, Ordering::Acquire));
        load_fence();
    }
}

impl Slice for DeviceOutbound {
    fn slice(&self, offset: usize, len_bytes: usize) -> Self {
        assert_whole_lines(offset, len_bytes);
        Self { memory: self.memory.sub(offset, len_bytes), caching: self.caching }
    }
}

const TRAINING: usize = 0;
const IDENTITY: usize = WORD_BYTES;
const BEAT: usize = 2 * WORD_BYTES;
const SCRATCHPAD: usize = CACHE_LINE_BYTES;
const BELLS: usize = 2 * CACHE_LINE_BYTES;

const _: () = assert!(SCRATCHPAD + SCRATCHPAD_WORDS * WORD_BYTES <= BELLS);
const _: () = assert!(BELLS + VECTORS_MAX * WORD_BYTES <= BLOCK_BYTES);

/// The control block of a pair of nodes.
#[derive(Debug, Clone)]
pub(super) struct Block {
    words: Region,
    caching: Caching,
}

impl Block {
    pub(super) fn new(words: Region, caching: Caching) -> Self {
        assert_eq!(words.len_bytes(), BLOCK_BYTES);
        Self { words, caching }
    }

    /// The training word, 0 for one that nobody has written as such.
    pub(super) fn training(&self) -> u32 {
        self.load_signed(TRAINING).unwrap_or(0)
    }

    /// Publishes a training word behind all stores made before it.
    pub(super) fn publish_training(&self, word: u32) {
        self.caching.order_stores();
        self.store(TRAINING, signed(word));
    }

    /// Under which number the writer's bells are known, if it has any.
    pub(super) fn identity(&self) -> Option<u16> {
        self.load_signed(IDENTITY).and_then(|word| u16::try_from(word).ok())
    }

    pub(super) fn publish_identity(&self, identity: Option<u16>) {
        self.store(IDENTITY, identity.map_or(0, |identity| signed(u32::from(identity))));
    }

    pub(super) fn beat(&self) -> u64 {
        self.load(BEAT)
    }

    pub(super) fn publish_beat(&self, beat: u64) {
        self.store(BEAT, beat);
    }

    /// The writer's: rings a bell.
    pub(super) fn ring(&self, vector: usize) {
        self.caching.order_stores();
        self.store(bell_offset(vector), 1);
    }

    /// The reader's: whether a bell rings.
    pub(super) fn is_rung(&self, vector: usize) -> bool {
        self.load(bell_offset(vector)) != 0
    }

    /// The reader's: silences a bell that rings, and says whether it did. A ring that this overwrites is one whose
    /// cause the reader sees when it looks now: the fence keeps those loads behind the store.
    pub(super) fn silence(&self, vector: usize) -> bool {
        if !self.is_rung(vector) {
            return false;
        }
        self.store(bell_offset(vector), 0);
        fence(Ordering::SeqCst);
        true
    }

    /// As `Scratchpad::write`.
    fn write_pad(&self, index: usize, value: u32) {
        self.store(pad_offset(index), u64::from(value));
    }

    /// The upper half of a word is the peer's to spoil, and ignored.
    fn read_pad(&self, index: usize) -> u32 {
        self.load(pad_offset(index)) as u32
    }

    pub(super) fn clear_scratchpad(&self) {
        (0..SCRATCHPAD_WORDS).for_each(|index| self.write_pad(index, 0));
    }

    fn load_signed(&self, offset: usize) -> Option<u32> {
        let word = self.load(offset);
        (word == signed(word as u32)).then_some(word as u32)
    }

    fn load(&self, offset: usize) -> u64 {
        let word = u64::from_le(self.words.load_u64(offset, Ordering::Acquire));
        self.caching.order_loads();
        word
    }

    fn store(&self, offset: usize, word: u64) {
        self.words.store_u64(offset, word.to_le(), Ordering::Release);
        // Nothing follows that would push it out.
        self.caching.order_stores();
    }
}

/// A word with its complement above it, so that neither zeros nor chance pass for one.
fn signed(word: u32) -> u64 {
    u64::from(!word) << u32::BITS | u64::from(word)
}

fn bell_offset(vector: usize) -> usize {
    assert!(vector < VECTORS_MAX, "bell {vector} of {VECTORS_MAX}");
    BELLS + vector * WORD_BYTES
}

fn pad_offset(index: usize) -> usize {
    assert!(index < SCRATCHPAD_WORDS, "scratchpad word {index} of {SCRATCHPAD_WORDS}");
    SCRATCHPAD + index * WORD_BYTES
}

/// A scratchpad in a device's memory.
#[derive(Debug, Clone)]
pub struct DeviceScratchpad {
    pub(super) own: Block,
    pub(super) peer: Block,
}

impl Scratchpad for DeviceScratchpad {
    fn words(&self) -> usize {
        SCRATCHPAD_WORDS
    }

    fn write(&self, index: usize, value: u32) {
        self.peer.write_pad(index, value);
    }

    fn read(&self, index: usize) -> u32 {
        self.own.read_pad(index)
    }
}
