//! Two nodes that share memory without cache coherence, simulated: a missing write-back or invalidation becomes
//! visible.
//!
//! Each node has a private copy of the shared memory as its cache. Loads hit the copy until the line is invalidated,
//! however long ago the peer wrote. Stores stay in the copy until the line is written back, and a write-back stores the
//! whole line, including bytes that the peer has written. A write-back takes effect at any time up to a barrier, and in
//! any order. A cache with spontaneous behavior also evicts and fetches lines on its own, as real caches do, so no
//! protocol may rely on what a cache holds.
//!
//! [`MemoryInbound`](crate::MemoryInbound) and [`MemoryLink`] follow the rules of such memory, and a real device
//! ([`device`](crate::device)) runs the same code. An [`OmittedStep`] shows that each rule is needed.

use super::random::Random;
use crate::heap::CondvarDoorbell;
use crate::memory_link::{InitialContents, MemoryLink};
use crate::pair_layout::PairLayout;
use crate::{Coherence, Memory};
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use volmem::sync::Ordering;
use volmem::{CACHE_LINE_BYTES, Region};

/// One endpoint of a link in simulated non-coherent memory.
pub type NonCoherentLink = MemoryLink<CondvarDoorbell, NonCoherentMemory>;

/// Behavior of the caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheBehavior {
    /// Seed of every choice.
    pub seed: u64,
    /// Whether lines are evicted and fetched spontaneously and written back late. Otherwise lines move only on request,
    /// and immediately.
    pub is_spontaneous: bool,
    /// An operation that the caches ignore, to see what depends on it.
    pub omitted: Option<OmittedStep>,
}

/// An operation to ignore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OmittedStep {
    /// Lines are not written back.
    WriteBack,
    /// Lines are not invalidated.
    Invalidate,
    /// Barriers do not wait for write-backs.
    Barrier,
}

impl CacheBehavior {
    /// Caches that move lines only on request.
    pub fn explicit() -> Self {
        Self { seed: 0, is_spontaneous: false, omitted: None }
    }

    /// Caches that also move lines spontaneously.
    pub fn spontaneous(seed: u64) -> Self {
        Self { seed, is_spontaneous: true, omitted: None }
    }

    /// The same behavior without one operation.
    pub fn without(self, omission: OmittedStep) -> Self {
        Self { omitted: Some(omission), ..self }
    }
}

/// Makes both endpoints of a new link with a window of `window_bytes` each way. The link is down.
///
/// # Panics
/// If the size of a window is not a positive multiple of the cache line.
pub fn pair(window_bytes: usize, habits: CacheBehavior) -> (NonCoherentLink, NonCoherentLink) {
    let layout = PairLayout::new(window_bytes).expect("a positive multiple of the cache line");
    let (to_a, to_b) = NonCoherentMemory::pair(layout.span_bytes(), habits);
    let (doorbell_a, doorbell_b) = CondvarDoorbell::pair();
    let ([own_a, peer_a], [peer_b, own_b]) = (layout.sides(&to_a), layout.sides(&to_b));
    let a = MemoryLink::attach(own_a, peer_a, doorbell_a, InitialContents::Zeroed);
    (a, MemoryLink::attach(own_b, peer_b, doorbell_b, InitialContents::Zeroed))
}

/// Shared memory as one of two nodes sees it through its cache.
#[derive(Clone)]
pub struct NonCoherentMemory {
    shared: Arc<Mutex<Shared>>,
    /// Index of this node's cache.
    node: usize,
    offset: usize,
    len_bytes: usize,
}

impl NonCoherentMemory {
    /// Makes zeroed memory of `len_bytes`, a multiple of the line, as both nodes see it.
    pub fn pair(len_bytes: usize, habits: CacheBehavior) -> (Self, Self) {
        assert!(len_bytes.is_multiple_of(CACHE_LINE_BYTES), "{len_bytes} bytes are not whole lines");
        let shared = Arc::new(Mutex::new(Shared::new(len_bytes / CACHE_LINE_BYTES, habits)));
        let end = |node| Self { shared: shared.clone(), node, offset: 0, len_bytes };
        (end(0), end(1))
    }

    /// Makes the two windows of a link as each node sees them, its own first. Both lie in one memory, because a barrier
    /// covers all write-backs of a node.
    pub fn windows(window_bytes: usize, habits: CacheBehavior) -> [(Self, Self); 2] {
        let (a, b) = Self::pair(2 * window_bytes, habits);
        let part = |memory: &Self, index: usize| memory.part(index * window_bytes, window_bytes);
        [(part(&a, 0), part(&a, 1)), (part(&b, 1), part(&b, 0))]
    }

    /// Offset of a span in the whole memory. Checked before the lock is taken.
    fn checked(&self, offset: usize, len_bytes: usize) -> usize {
        let inside = offset <= self.len_bytes && len_bytes <= self.len_bytes - offset;
        assert!(inside, "span {offset}+{len_bytes} outside memory of {} bytes", self.len_bytes);
        self.offset + offset
    }

    fn checked_word(&self, offset: usize) -> usize {
        assert!(offset.is_multiple_of(size_of::<u64>()), "word at unaligned offset {offset}");
        self.checked(offset, size_of::<u64>())
    }

    /// A poisoned lock is ignored: the caches are consistent after each step.
    fn lock(&self) -> MutexGuard<'_, Shared> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.act_spontaneously();
        shared
    }
}

impl fmt::Debug for NonCoherentMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NonCoherentMemory(node {}, {}+{})", self.node, self.offset, self.len_bytes)
    }
}

impl Memory for NonCoherentMemory {
    #[inline]
    fn coherence(&self) -> Coherence {
        Coherence::NonCoherent
    }

    fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    fn part(&self, offset: usize, len_bytes: usize) -> Self {
        Self { offset: self.checked(offset, len_bytes), len_bytes, ..self.clone() }
    }

    fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        let at = self.checked_word(offset);
        self.lock().fetched(self.node, at, size_of::<u64>()).load_u64(at, order)
    }

    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        let at = self.checked_word(offset);
        self.lock().modified(self.node, at, size_of::<u64>()).store_u64(at, value, order);
    }

    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        let at = self.checked(offset, len_bytes);
        // SAFETY: the caller guarantees that `destination` is writable for `len_bytes` and outside the memory.
        unsafe { self.lock().fetched(self.node, at, len_bytes).read_to(at, destination, len_bytes) }
    }

    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        let at = self.checked(offset, len_bytes);
        // SAFETY: the caller guarantees that `source` is readable for `len_bytes` and outside the memory.
        unsafe { self.lock().modified(self.node, at, len_bytes).write_from(at, source, len_bytes) }
    }

    /// Address in the cache. Later reads there return what the cache holds.
    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        let at = self.checked(offset, len_bytes);
        self.lock().fetched(self.node, at, len_bytes).pointer(at, len_bytes)
    }

    fn write_back(&self, offset: usize, len_bytes: usize) {
        let at = self.checked(offset, len_bytes);
        self.lock().write_back(self.node, at, len_bytes);
    }

    fn invalidate_lines(&self, offset: usize, len_bytes: usize) {
        let at = self.checked(offset, len_bytes);
        self.lock().invalidate_lines(self.node, at, len_bytes);
    }

    fn barrier(&self) {
        self.lock().barrier(self.node);
    }
}

/// State of a line in a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LineState {
    Invalid,
    Clean,
    Modified,
}

struct Cache {
    /// Copy of the whole memory. Only valid lines mean something.
    copy: Region,
    lines: Vec<LineState>,
    /// Lines whose write-back has begun.
    writing_back: Vec<usize>,
}

struct Shared {
    memory: Region,
    caches: [Cache; 2],
    random: Random,
    habits: CacheBehavior,
}

/// A cache does something spontaneous at one in this many operations.
const SPONTANEOUS_ONE_IN: usize = 4;

impl Shared {
    fn new(lines: usize, habits: CacheBehavior) -> Self {
        let region = || Region::heap(lines * CACHE_LINE_BYTES);
        let cache = || Cache { copy: region(), lines: vec![LineState::Invalid; lines], writing_back: Vec::new() };
        Self { memory: region(), caches: [cache(), cache()], random: Random::new(habits.seed), habits }
    }

    /// Spontaneously finishes a write-back, evicts a line or fetches one.
    fn act_spontaneously(&mut self) {
        if !self.habits.is_spontaneous || self.random.below(SPONTANEOUS_ONE_IN) != 0 {
            return;
        }
        let node = self.random.below(2);
        let writing_back = self.caches[node].writing_back.len();
        if writing_back > 0 && self.random.below(2) == 0 {
            let line = self.caches[node].writing_back.swap_remove(self.random.below(writing_back));
            self.clean(node, line);
            return;
        }
        let line = self.random.below(self.caches[node].lines.len());
        match self.caches[node].lines[line] {
            LineState::Invalid => self.fetch(node, line),
            LineState::Clean | LineState::Modified => self.evict(node, line),
        }
    }

    fn fetch(&mut self, node: usize, line: usize) {
        if self.caches[node].lines[line] == LineState::Invalid {
            copy_line(&self.memory, &self.caches[node].copy, line);
            self.caches[node].lines[line] = LineState::Clean;
        }
    }

    /// Writes the whole line to memory if it is modified.
    fn clean(&mut self, node: usize, line: usize) {
        if self.caches[node].lines[line] == LineState::Modified {
            copy_line(&self.caches[node].copy, &self.memory, line);
            self.caches[node].lines[line] = LineState::Clean;
        }
    }

    fn evict(&mut self, node: usize, line: usize) {
        self.clean(node, line);
        self.caches[node].lines[line] = LineState::Invalid;
    }

    /// Returns the node's copy, with the span fetched.
    fn fetched(&mut self, node: usize, at: usize, len_bytes: usize) -> &Region {
        lines_of(at, len_bytes).for_each(|line| self.fetch(node, line));
        &self.caches[node].copy
    }

    /// Returns the node's copy for a store. A line is fetched before a part of it is modified.
    fn modified(&mut self, node: usize, at: usize, len_bytes: usize) -> &Region {
        for line in lines_of(at, len_bytes) {
            self.fetch(node, line);
            self.caches[node].lines[line] = LineState::Modified;
        }
        &self.caches[node].copy
    }

    fn write_back(&mut self, node: usize, at: usize, len_bytes: usize) {
        if self.habits.omitted == Some(OmittedStep::WriteBack) {
            return;
        }
        for line in lines_of(at, len_bytes) {
            if self.habits.is_spontaneous {
                self.caches[node].writing_back.push(line);
            } else {
                self.clean(node, line);
            }
        }
    }

    fn invalidate_lines(&mut self, node: usize, at: usize, len_bytes: usize) {
        self.barrier(node);
        if self.habits.omitted == Some(OmittedStep::Invalidate) {
            return;
        }
        lines_of(at, len_bytes).for_each(|line| self.evict(node, line));
    }

    fn barrier(&mut self, node: usize) {
        if self.habits.omitted == Some(OmittedStep::Barrier) {
            return;
        }
        for line in std::mem::take(&mut self.caches[node].writing_back) {
            self.clean(node, line);
        }
    }
}

fn lines_of(at: usize, len_bytes: usize) -> std::ops::Range<usize> {
    if len_bytes == 0 { 0..0 } else { at / CACHE_LINE_BYTES..(at + len_bytes).div_ceil(CACHE_LINE_BYTES) }
}

fn copy_line(from: &Region, to: &Region, line: usize) {
    let mut bytes = [0; CACHE_LINE_BYTES];
    from.read(line * CACHE_LINE_BYTES, &mut bytes);
    to.write(line * CACHE_LINE_BYTES, &bytes);
}

#[cfg(test)]
mod tests;
