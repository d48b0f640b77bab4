//! Two nodes that share memory and not their caches, emulated: what non-coherent memory does to whoever forgets a line.
//!
//! Each end has a private copy of the shared memory, line by line, as its cache. Loads hit the copy until the line is
//! dropped, however long ago the peer wrote; stores stay in the copy until the line is written back, which takes the
//! whole line, whoever wrote the rest of it. What is written back gets there at any time up to a barrier, in any order.
//! A restless cache also evicts and fetches lines unasked, as real ones do, so nothing may count on what it keeps.
//!
//! The rules that windows obey on such memory stand in [`MemoryInbound`](crate::MemoryInbound) and
//! [`MemoryLink`]; a real device ([`dax`](crate::dax)) runs the same code. An [`OmittedStep`] shows that each is needed.

use super::random::Random;
use crate::heap::CondvarDoorbell;
use crate::memory_link::{InitialContents, MemoryLink};
use crate::pair::PairLayout;
use crate::{Coherence, Memory};
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use volmem::sync::Ordering;
use volmem::{CACHE_LINE_BYTES, Region};

/// One end of a link in emulated memory without coherence.
pub type NonCoherentLink = MemoryLink<CondvarDoorbell, NonCoherentMemory>;

/// What the caches do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheBehavior {
    /// Decides every choice.
    pub seed: u64,
    /// Whether lines move unasked and are late to be written back. Otherwise they move when they are told, at once.
    pub is_spontaneous: bool,
    /// What the caches do not do though they are told: to see what depends on it.
    pub omitted: Option<OmittedStep>,
}

/// What to leave out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OmittedStep {
    /// Lines are not written back.
    WriteBack,
    /// Lines are not dropped.
    Invalidate,
    /// Lines that are being written back are not waited for.
    Barrier,
}

impl CacheBehavior {
    /// Caches that move lines when they are told, and only then.
    pub fn explicit() -> Self {
        Self { seed: 0, is_spontaneous: false, omitted: None }
    }

    /// Caches that move lines whenever it pleases them.
    pub fn spontaneous(seed: u64) -> Self {
        Self { seed, is_spontaneous: true, omitted: None }
    }

    /// The same without doing one thing.
    pub fn without(self, omission: OmittedStep) -> Self {
        Self { omitted: Some(omission), ..self }
    }
}

/// Both ends of a new link with a window of `window_bytes` each way; it is down.
///
/// # Panics
/// If a window would not be whole cache lines, at least one.
pub fn pair(window_bytes: usize, habits: CacheBehavior) -> (NonCoherentLink, NonCoherentLink) {
    let layout = PairLayout::new(window_bytes).expect("a window is whole cache lines, at least one");
    let (to_a, to_b) = NonCoherentMemory::pair(layout.span_bytes(), habits);
    let (bell_a, bell_b) = CondvarDoorbell::pair();
    let ([own_a, peer_a], [peer_b, own_b]) = (layout.sides(&to_a), layout.sides(&to_b));
    let a = MemoryLink::attach(own_a, peer_a, bell_a, InitialContents::Zeroed);
    (a, MemoryLink::attach(own_b, peer_b, bell_b, InitialContents::Zeroed))
}

/// Shared memory as one of its two nodes sees it through its cache.
#[derive(Clone)]
pub struct NonCoherentMemory {
    shared: Arc<Mutex<Shared>>,
    /// Which of the two caches is this node's.
    node: usize,
    offset: usize,
    len_bytes: usize,
}

impl NonCoherentMemory {
    /// Zeroed memory of `len_bytes`, whole lines, as both nodes see it.
    pub fn pair(len_bytes: usize, habits: CacheBehavior) -> (Self, Self) {
        assert!(len_bytes.is_multiple_of(CACHE_LINE_BYTES), "{len_bytes} bytes are not whole lines");
        let shared = Arc::new(Mutex::new(Shared::new(len_bytes / CACHE_LINE_BYTES, habits)));
        let end = |node| Self { shared: shared.clone(), node, offset: 0, len_bytes };
        (end(0), end(1))
    }

    /// The two windows of a link as either node sees them, its own first: in one memory, for a barrier is for all that
    /// a node has written back.
    pub fn windows(window_bytes: usize, habits: CacheBehavior) -> [(Self, Self); 2] {
        let (a, b) = Self::pair(2 * window_bytes, habits);
        let part = |memory: &Self, index: usize| memory.part(index * window_bytes, window_bytes);
        [(part(&a, 0), part(&a, 1)), (part(&b, 1), part(&b, 0))]
    }

    /// Where the span begins in all of the memory. Checked before anything is locked.
    fn checked(&self, offset: usize, len_bytes: usize) -> usize {
        let inside = offset <= self.len_bytes && len_bytes <= self.len_bytes - offset;
        assert!(inside, "span {offset}+{len_bytes} outside memory of {} bytes", self.len_bytes);
        self.offset + offset
    }

    fn checked_word(&self, offset: usize) -> usize {
        assert!(offset.is_multiple_of(size_of::<u64>()), "word at unaligned offset {offset}");
        self.checked(offset, size_of::<u64>())
    }

    /// A panic elsewhere is that test's failure; the caches are whole after each step.
    fn lock(&self) -> MutexGuard<'_, Shared> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.stir();
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
        self.lock().changed(self.node, at, size_of::<u64>()).store_u64(at, value, order);
    }

    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        let at = self.checked(offset, len_bytes);
        // SAFETY: the caller's.
        unsafe { self.lock().fetched(self.node, at, len_bytes).read_to(at, destination, len_bytes) }
    }

    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        let at = self.checked(offset, len_bytes);
        // SAFETY: the caller's.
        unsafe { self.lock().changed(self.node, at, len_bytes).write_from(at, source, len_bytes) }
    }

    /// In the cache: what is read there later is what it kept.
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

/// What a cache has of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    No,
    Clean,
    Changed,
}

struct Cache {
    /// Of all the memory, though only held lines mean something.
    copy: Region,
    held: Vec<Held>,
    /// Lines on their way to memory.
    leaving: Vec<usize>,
}

struct Shared {
    memory: Region,
    caches: [Cache; 2],
    random: Random,
    habits: CacheBehavior,
}

/// How often a restless cache does something unasked.
const STIRS_ONE_IN: usize = 4;

impl Shared {
    fn new(lines: usize, habits: CacheBehavior) -> Self {
        let region = || Region::heap(lines * CACHE_LINE_BYTES);
        let cache = || Cache { copy: region(), held: vec![Held::No; lines], leaving: Vec::new() };
        Self { memory: region(), caches: [cache(), cache()], random: Random::new(habits.seed), habits }
    }

    /// Something that happens unasked: a line gets to memory, leaves a cache, or comes into one.
    fn stir(&mut self) {
        if !self.habits.is_spontaneous || self.random.below(STIRS_ONE_IN) != 0 {
            return;
        }
        let node = self.random.below(2);
        let leaving = self.caches[node].leaving.len();
        if leaving > 0 && self.random.below(2) == 0 {
            let line = self.caches[node].leaving.swap_remove(self.random.below(leaving));
            self.clean(node, line);
            return;
        }
        let line = self.random.below(self.caches[node].held.len());
        match self.caches[node].held[line] {
            Held::No => self.fetch(node, line),
            Held::Clean | Held::Changed => self.evict(node, line),
        }
    }

    fn fetch(&mut self, node: usize, line: usize) {
        if self.caches[node].held[line] == Held::No {
            copy_line(&self.memory, &self.caches[node].copy, line);
            self.caches[node].held[line] = Held::Clean;
        }
    }

    /// The line as it is now goes to memory, all of it.
    fn clean(&mut self, node: usize, line: usize) {
        if self.caches[node].held[line] == Held::Changed {
            copy_line(&self.caches[node].copy, &self.memory, line);
            self.caches[node].held[line] = Held::Clean;
        }
    }

    fn evict(&mut self, node: usize, line: usize) {
        self.clean(node, line);
        self.caches[node].held[line] = Held::No;
    }

    /// The node's copy, with the span in it.
    fn fetched(&mut self, node: usize, at: usize, len_bytes: usize) -> &Region {
        lines_of(at, len_bytes).for_each(|line| self.fetch(node, line));
        &self.caches[node].copy
    }

    /// The node's copy, for a store: a line is fetched before a part of it is changed.
    fn changed(&mut self, node: usize, at: usize, len_bytes: usize) -> &Region {
        for line in lines_of(at, len_bytes) {
            self.fetch(node, line);
            self.caches[node].held[line] = Held::Changed;
        }
        &self.caches[node].copy
    }

    fn write_back(&mut self, node: usize, at: usize, len_bytes: usize) {
        if self.habits.omitted == Some(OmittedStep::WriteBack) {
            return;
        }
        for line in lines_of(at, len_bytes) {
            if self.habits.is_spontaneous {
                self.caches[node].leaving.push(line);
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
        for line in std::mem::take(&mut self.caches[node].leaving) {
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
