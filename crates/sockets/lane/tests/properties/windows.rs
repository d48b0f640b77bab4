//! Test windows: write-combined windows, and windows of a hostile peer.

use fabric::{Coherence, Inbound, Outbound, shm};
use lane::{ELASTIC_RINGS, ELASTIC_SLOTS_MIN, LargerRings, Layout};
use std::collections::VecDeque;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use volmem::sync::Ordering;
use volmem::{CACHE_LINE_BYTES, Region};

/// The secret of every lane under test.
pub const SECRET: u64 = 0x5EC7_0A11_0F4A_1AE5;

/// Offsets, in a window of a hostile peer's victim, of the own state of the victim's endpoints, which today's segments
/// keep where the peer can store to it, too.
pub const SENDER_STATE_OFFSET: usize = Layout::FORWARD_BYTES + Layout::BACK_BYTES;
/// See [`SENDER_STATE_OFFSET`].
pub const RECEIVER_STATE_OFFSET: usize = SENDER_STATE_OFFSET + Layout::PRODUCER_STATE_BYTES;

/// Returns zeroed memory for a window of a lane. For an elastic lane it is shared memory, because released memory must
/// read as zero, and because an address sanitizer is slow with 32 MiB of the heap.
pub fn memory(layout: &Layout) -> Region {
    if layout.elastic.is_none() {
        return Region::heap(layout.window_bytes());
    }
    let (_, mapping) = shm::create(layout.window_bytes()).expect("shared memory");
    Region::of_mapping(Arc::new(mapping))
}

/// A SplitMix64 generator: the same seed gives the same numbers on every machine.
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// Returns the next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// A write-combined outbound window, whose stores reach the peer in any order except across a fence.
#[derive(Debug, Clone)]
pub struct WriteCombined {
    memory: Region,
    pending: Arc<Mutex<Vec<Gathered>>>,
}

#[derive(Debug)]
struct Gathered {
    offset: usize,
    bytes: Vec<u8>,
}

impl WriteCombined {
    /// Returns a window whose stores reach `memory` late.
    pub fn new(memory: Region) -> Self {
        Self { memory, pending: Arc::default() }
    }

    /// Performs some of the buffered stores, in an order that the seed determines.
    pub fn drain_some(&self, random: &mut Random) {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..random.below(pending.len() + 1) {
            let index = random.below(pending.len());
            let store = pending.swap_remove(index);
            self.memory.write(store.offset, &store.bytes);
        }
    }

    /// Performs all buffered stores.
    pub fn drain(&self) {
        for store in self.pending.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            self.memory.write(store.offset, &store.bytes);
        }
    }

    /// Buffers a store. It replaces an earlier one to the same offset, as in a write-combining buffer.
    fn gather(&self, offset: usize, bytes: Vec<u8>) {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        pending.retain(|old| old.offset != offset || old.bytes.len() != bytes.len());
        pending.push(Gathered { offset, bytes });
    }
}

impl Outbound for WriteCombined {
    fn len_bytes(&self) -> usize {
        self.memory.len_bytes()
    }

    fn coherence(&self) -> Coherence {
        Coherence::WriteCombined
    }

    fn store_u64(&self, offset: usize, value: u64, _order: Ordering) {
        self.gather(offset, value.to_ne_bytes().to_vec());
    }

    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        // SAFETY: `source` is readable for `len_bytes`, by the contract of this method.
        self.gather(offset, unsafe { std::slice::from_raw_parts(source, len_bytes) }.to_vec());
    }

    fn pointer(&self, offset: usize, len_bytes: usize) -> Option<NonNull<u8>> {
        Some(self.memory.pointer(offset, len_bytes))
    }

    fn fence(&self) {
        self.drain();
    }

    fn flush(&self) {
        self.drain();
    }
}

/// The value that a hostile peer makes one load return.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(fuzzing, derive(arbitrary::Arbitrary))]
pub enum ForgedLoad {
    /// The stored value.
    Stored,
    /// Any value.
    Value(u64),
    /// The stored value with a small change.
    Near(i8),
    /// The tag of the position this number of slots after the reader's.
    Tag(u8),
    /// The header of a data record of this number of bytes.
    Data(u16),
    /// The header of a switch to this ring.
    Switch(u8),
    /// The header of an open record of this number of bytes.
    Open(u16),
    /// The value of another word of the window.
    CopyOf(u16),
}

impl ForgedLoad {
    /// Returns the value that the victim loads at `offset` of its own window.
    pub fn value(self, memory: &Region, offset: usize) -> u64 {
        let truth = memory.load_u64(offset, Ordering::Relaxed);
        match self {
            ForgedLoad::Stored => truth,
            ForgedLoad::Value(value) => value,
            ForgedLoad::Near(delta) => truth.wrapping_add_signed(delta.into()),
            ForgedLoad::Tag(ahead) => {
                let head = memory.load_u64(RECEIVER_STATE_OFFSET, Ordering::Relaxed);
                SECRET ^ head.wrapping_add(ahead.into()).wrapping_mul(0x9E37_79B9_7F4A_7C15)
            }
            ForgedLoad::Data(len_bytes) => u64::from(len_bytes) | 1 << 16,
            ForgedLoad::Switch(ring) => u64::from(ring) | 2 << 16,
            ForgedLoad::Open(len_bytes) => u64::from(len_bytes) | 3 << 16,
            ForgedLoad::CopyOf(index) => {
                let words = memory.len_bytes() / size_of::<u64>();
                memory.load_u64(usize::from(index) % words * size_of::<u64>(), Ordering::Relaxed)
            }
        }
    }
}

/// The memory that the peer writes, in which it may change any word between two loads. Panics if the victim stores
/// there.
#[derive(Debug, Clone)]
pub struct LyingInbound {
    memory: Region,
    layout: Layout,
    script: Arc<Mutex<VecDeque<ForgedLoad>>>,
}

impl LyingInbound {
    /// Returns a window whose loads follow the script, and after its end return the stored values.
    pub fn new(memory: Region, layout: Layout, script: Arc<Mutex<VecDeque<ForgedLoad>>>) -> Self {
        Self { memory, layout, script }
    }
}

impl Inbound for LyingInbound {
    fn len_bytes(&self) -> usize {
        self.memory.len_bytes()
    }

    fn load_u64(&self, offset: usize, _order: Ordering) -> u64 {
        let forged_load = self.script.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        forged_load.unwrap_or(ForgedLoad::Stored).value(&self.memory, offset)
    }

    fn store_u64(&self, offset: usize, _value: u64, _order: Ordering) {
        panic!("a store to {offset} of the peer's memory");
    }

    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        assert_in_ring(&self.layout, offset, len_bytes);
        // SAFETY: `destination` is writable for `len_bytes` and outside the window, by the contract of the trait's
        // method, which is the same.
        unsafe { self.memory.read_to(offset, destination, len_bytes) };
    }

    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        assert_in_ring(&self.layout, offset, len_bytes);
        self.memory.pointer(offset, len_bytes)
    }
}

/// The peer's window as the victim stores to it. Panics if the victim stores outside the lane's parts.
#[derive(Debug, Clone)]
pub struct GuardedOutbound {
    memory: Region,
    layout: Layout,
    coherence: Coherence,
}

impl GuardedOutbound {
    /// Returns a window that stores to `memory`.
    pub fn new(memory: Region, layout: Layout, coherence: Coherence) -> Self {
        Self { memory, layout, coherence }
    }
}

impl Outbound for GuardedOutbound {
    fn len_bytes(&self) -> usize {
        self.memory.len_bytes()
    }

    fn coherence(&self) -> Coherence {
        self.coherence
    }

    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        let line = CACHE_LINE_BYTES;
        let (forward, back) = (self.layout.forward_offset, self.layout.back_offset);
        let words = [forward, forward + line, back, back + line];
        let elastic_words = [back + size_of::<u64>(), forward + line + size_of::<u64>()];
        let is_elastic_word = self.layout.elastic.is_some() && elastic_words.contains(&offset);
        if !words.contains(&offset) && !is_elastic_word {
            assert_in_ring(&self.layout, offset, size_of::<u64>());
        }
        self.memory.store_u64(offset, value, order);
    }

    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        assert_in_ring(&self.layout, offset, len_bytes);
        // SAFETY: `source` is readable for `len_bytes` and outside the window, by the contract of the trait's method,
        // which is the same.
        unsafe { self.memory.write_from(offset, source, len_bytes) };
    }

    fn pointer(&self, offset: usize, len_bytes: usize) -> Option<NonNull<u8>> {
        assert_in_ring(&self.layout, offset, len_bytes);
        Some(self.memory.pointer(offset, len_bytes))
    }

    fn discard(&self, offset: usize, len_bytes: usize) {
        assert_in_ring(&self.layout, offset, len_bytes);
        self.memory.discard(offset, len_bytes);
    }

    fn fence(&self) {}

    fn flush(&self) {}
}

fn assert_in_ring(layout: &Layout, offset: usize, len_bytes: usize) {
    let ring = |start: usize, slots: u64| start..start + slots as usize * CACHE_LINE_BYTES;
    let mut rings: Vec<Range<usize>> =
        vec![ring(layout.small_offset, layout.small_slots), ring(layout.big_offset, layout.big_slots)];
    let larger =
        |of: LargerRings| (0..ELASTIC_RINGS).map(move |index| ring(of.offset_of(index), ELASTIC_SLOTS_MIN << index));
    rings.extend(layout.elastic.into_iter().flat_map(larger));
    let inside = rings.iter().any(|span| span.start <= offset && offset + len_bytes <= span.end);
    assert!(inside, "{offset}+{len_bytes} is outside the rings {rings:?}");
}
