//! Timed windows for programs that share memory: what is stored lies in its place at once, beside the time when it
//! arrives, and loads show what has arrived.
//!
//! [`Windows`](super::Windows) keep a journal that the receiver puts into a window of its own: positions and locks of
//! one process, and a sender that stalls when nobody looks. Here neither end has to do anything for the other, and all
//! that there is to know lies in the memory: any number of processes and threads may hold an end, hand it on, be
//! stopped or die.
//!
//! ```text
//!   the window
//!   a history for each word of its first part: count | due, value | ... seven of them          [written by the peer]
//!   a time for each line behind that part: when what was stored there last arrives             [written by the peer]
//! ```
//!
//! * **Words.** In its first part a window is memory: a load finds the last value that has arrived. Stores of one word
//!   that are under way at once have an entry each; of more than seven, the last ones arrive together, with the last.
//! * **Lines.** Behind it, a line that something is under way to reads as zeros: enough for rings, whose records are
//!   looked for by a word that is not zero, and are not overwritten before they are read. So bulk is copied once.
//! * **Rate.** All who write over one link share a [`Pace`], which is there for the peer to read: the answer to a read
//!   across the link pushes the stores of the other side before it, so a [flush](Outbound::flush) waits for them.
//! * **Records.** The two words that show a record once its payload is written are booked with that, and begin with
//!   it: what the emulation takes for the payload is hidden in the delay.
//! * Nothing overtakes: what is booked later arrives later, in whichever window and by whichever process.
//!
//! Whatever a peer writes into times and histories, each call ends, and the worst is that its own stores are seen too
//! early, too late or not at all.

use super::clock::{Clock, Monotonic};
use super::timing::{Costs, Pace};
use super::{LinkTiming, TimedError};
use crate::memory_link::is_window_size;
use crate::window::{assert_one_line, assert_whole_lines};
use crate::{Coherence, Inbound, Outbound, Slice};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use volmem::sync::{Ordering, fence};
use volmem::{CACHE_LINE_BYTES as LINE, Region};

const WORD_BYTES: usize = size_of::<u64>();
/// Stores under way to one word: as many as there is room for in two lines.
const ENTRIES: u64 = 7;
const ENTRY_BYTES: usize = 2 * WORD_BYTES;
const HISTORY_BYTES: usize = 2 * LINE;
/// Words that follow a payload: the length, then what shows the record.
const RECORD_WORDS: u64 = 2;
/// So often a load looks again whose history was written meanwhile, which an honest peer does not do so fast.
const LOOKS_MAX: u32 = 8;
/// What is due within such a span is waited for by looking at the clock, so often at most.
const MOMENT_NS: u64 = 150;
const CLOCK_LOOKS_MAX: u32 = 32;
/// How long anybody waits at most, beyond the way, for what a peer says is under way.
const AHEAD_NS_MAX: u64 = 10_000_000;

/// What lies where in the memory of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Bytes of the window.
    pub window_bytes: usize,
    /// Bytes at its start that are memory by the word; the rest holds rings. Whole lines.
    pub words_bytes: usize,
}

impl Shape {
    /// Bytes of memory for a window and what belongs to it.
    pub const fn memory_bytes(self) -> usize {
        self.times_offset() + (self.window_bytes - self.words_bytes) / LINE * WORD_BYTES
    }

    const fn times_offset(self) -> usize {
        self.window_bytes + self.words_bytes / WORD_BYTES * HISTORY_BYTES
    }

    #[inline]
    fn history(self, at: usize) -> usize {
        self.window_bytes + at / WORD_BYTES * HISTORY_BYTES
    }

    #[inline]
    fn time(self, at: usize) -> usize {
        self.times_offset() + (at - self.words_bytes) / LINE * WORD_BYTES
    }

    /// Forgets what was stored by the word, in memory that no program reaches: the first part is what lies in its
    /// place. Times need no cleaning: what they are about is as old as they are.
    pub fn forget_words(self, mut store_zero: impl FnMut(usize)) {
        (0..self.words_bytes).step_by(WORD_BYTES).for_each(|at| store_zero(self.history(at)));
    }

    fn check(self) -> Result<(), TimedError> {
        let Self { window_bytes, words_bytes } = self;
        let fits = is_window_size(window_bytes) && words_bytes <= window_bytes && words_bytes.is_multiple_of(LINE);
        // The longest that memory can be is checked by whoever has it.
        if fits && window_bytes < 1 << 48 { Ok(()) } else { Err(TimedError::WindowSize { window_bytes }) }
    }
}

/// What makes windows of this kind.
#[derive(Debug, Clone)]
pub struct InPlaceSetup {
    /// What lies where, in both windows alike.
    pub shape: Shape,
    /// How long stores take.
    pub timing: LinkTiming,
    /// Of the link from this node to the peer.
    pub pace: Pace,
    /// Of the link from the peer to this node: it is only looked at.
    pub peers_pace: Pace,
}

/// The two windows of a part of a link, in memory that the programs of both ends share.
#[derive(Debug)]
pub struct InPlace<C: Clock = Monotonic> {
    inbound: InPlaceInbound<C>,
    outbound: InPlaceOutbound<C>,
}

impl InPlace {
    /// Windows in `inbound`, this node's memory, and `outbound`, the peer's.
    ///
    /// # Errors
    /// [`TimedError`].
    pub fn new(inbound: &Region, outbound: &Region, setup: InPlaceSetup) -> Result<Self, TimedError> {
        Self::with_clock(inbound, outbound, setup, Monotonic)
    }
}

impl<C: Clock> InPlace<C> {
    /// As [`InPlace::new`], by another clock.
    ///
    /// # Errors
    /// [`TimedError`].
    pub fn with_clock(inbound: &Region, outbound: &Region, setup: InPlaceSetup, clock: C) -> Result<Self, TimedError> {
        let InPlaceSetup { shape, timing, pace, peers_pace } = setup;
        shape.check()?;
        for memory in [inbound, outbound] {
            let (found_bytes, advised_bytes) = (memory.len_bytes(), shape.memory_bytes());
            if found_bytes < advised_bytes {
                return Err(TimedError::Memory { found_bytes, advised_bytes });
            }
        }
        let costs = Costs::new(timing)?;
        let shared = Arc::new(Shared { shape, costs, pace, peers_pace, seen_ns: AtomicU64::new(0), clock });
        let part = |memory: &Region| Part {
            memory: memory.clone(),
            offset: 0,
            len_bytes: shape.window_bytes,
            shared: shared.clone(),
        };
        Ok(Self {
            inbound: InPlaceInbound(part(inbound)),
            outbound: InPlaceOutbound(part(outbound), Booked::default()),
        })
    }

    /// This node's window.
    pub fn inbound(&self) -> InPlaceInbound<C> {
        self.inbound.clone()
    }

    /// The peer's window.
    pub fn outbound(&self) -> InPlaceOutbound<C> {
        self.outbound.clone()
    }

    /// Waits until what the peer has stored by now has arrived: for whoever was woken by a way that may be shorter.
    pub fn settle(&self) {
        self.inbound.0.shared.settle();
    }
}

#[derive(Debug)]
struct Shared<C> {
    shape: Shape,
    costs: Costs,
    pace: Pace,
    peers_pace: Pace,
    /// The latest time that this process has seen: what was due then needs no look at the clock.
    seen_ns: AtomicU64,
    clock: C,
}

impl<C: Clock> Shared<C> {
    #[inline]
    fn is_due(&self, due_ns: u64) -> bool {
        due_ns <= self.seen_ns.load(Ordering::Relaxed) || self.is_due_now(due_ns)
    }

    /// What is due in a moment is waited for: who looks again would come later.
    fn is_due_now(&self, due_ns: u64) -> bool {
        for _ in 0..CLOCK_LOOKS_MAX {
            let now_ns = self.clock.now_ns();
            self.seen_ns.store(now_ns, Ordering::Relaxed);
            if due_ns <= now_ns {
                return true;
            }
            if due_ns - now_ns > MOMENT_NS {
                break;
            }
        }
        false
    }

    /// Takes the link for a packet that begins now; returns when it arrives.
    #[inline]
    fn book(&self, len_bytes: usize) -> u64 {
        self.book_ticks(self.costs.busy_ticks(len_bytes))
    }

    /// As [`Shared::book`], with the words that show what was written.
    fn book_record(&self, len_bytes: usize) -> u64 {
        self.book_ticks(self.costs.busy_ticks(len_bytes) + RECORD_WORDS * self.costs.busy_ticks(WORD_BYTES))
    }

    #[inline]
    fn book_ticks(&self, ticks: u64) -> u64 {
        self.pace.book(self.clock.now_ns(), ticks).saturating_add(self.costs.one_way_ns)
    }

    fn settle(&self) {
        let way_ns = self.costs.one_way_ns;
        let due_ns = self.peers_pace.free_ns().saturating_add(way_ns);
        self.clock.wait_until(due_ns.min(self.clock.now_ns() + way_ns + AHEAD_NS_MAX));
    }

    /// A read that follows the stores to the peer, and its answer behind the peer's stores to this node.
    fn flush(&self) {
        let way_ns = self.costs.one_way_ns;
        let last_ns = self.clock.now_ns() + way_ns + AHEAD_NS_MAX;
        let there_ns = self.pace.free_ns().max(self.clock.now_ns()) + way_ns;
        self.clock.wait_until(there_ns.min(last_ns));
        // Between "what was stored before is there" and "what has the peer stored by now?".
        fence(Ordering::SeqCst);
        let back_ns = self.peers_pace.free_ns().max(self.clock.now_ns()).saturating_add(way_ns);
        self.clock.wait_until(back_ns.min(last_ns + way_ns));
    }
}

/// A window or a slice of one, and what belongs to it.
#[derive(Debug)]
struct Part<C> {
    memory: Region,
    offset: usize,
    len_bytes: usize,
    shared: Arc<Shared<C>>,
}

impl<C> Clone for Part<C> {
    fn clone(&self) -> Self {
        Self { memory: self.memory.clone(), shared: self.shared.clone(), ..*self }
    }
}

/// An entry of a history: when it is due, and behind that the value.
#[inline]
fn entry(history: usize, number: u64) -> usize {
    history + WORD_BYTES + (number % ENTRIES) as usize * ENTRY_BYTES
}

impl<C: Clock> Part<C> {
    /// Where a span begins in the whole window.
    #[inline]
    fn checked(&self, offset: usize, len_bytes: usize) -> usize {
        let is_inside = offset <= self.len_bytes && len_bytes <= self.len_bytes - offset;
        assert!(is_inside, "span {offset}+{len_bytes} outside a window of {} bytes", self.len_bytes);
        self.offset + offset
    }

    #[inline]
    fn checked_words(&self, offset: usize, len_bytes: usize) -> usize {
        assert!(offset.is_multiple_of(WORD_BYTES), "word at unaligned offset {offset}");
        self.checked(offset, len_bytes)
    }

    fn slice(&self, offset: usize, len_bytes: usize) -> Self {
        assert_whole_lines(offset, len_bytes);
        Self { offset: self.checked(offset, len_bytes), len_bytes, ..self.clone() }
    }

    /// Where in a span that begins at `at` the lines begin: so many bytes of it are words.
    #[inline]
    fn bytes_in_words(&self, at: usize, len_bytes: usize) -> usize {
        self.shared.shape.words_bytes.saturating_sub(at).min(len_bytes)
    }

    #[inline]
    fn is_word(&self, at: usize) -> bool {
        at < self.shared.shape.words_bytes
    }

    #[inline]
    fn load(&self, at: usize) -> u64 {
        self.memory.load_u64(at, Ordering::Acquire)
    }

    /// The last value of a word that has arrived.
    #[inline]
    fn load_word(&self, at: usize) -> u64 {
        let history = self.shared.shape.history(at);
        if self.load(history) == 0 { self.load(at) } else { self.load_from_history(at, history) }
    }

    fn load_from_history(&self, at: usize, history: usize) -> u64 {
        let mut value = 0;
        for _ in 0..LOOKS_MAX {
            let count = self.load(history);
            let found = self.newest_due(history, count);
            value = self.load(found.map_or(at, |(place, _)| place + WORD_BYTES));
            let is_same = match found {
                Some((place, due_ns)) => self.load(place) == due_ns,
                // Once entries are used again, one of them has always arrived.
                None => count < ENTRIES,
            };
            if is_same && self.load(history) == count {
                break;
            }
        }
        value
    }

    /// Where the last entry is that has arrived, and since when.
    #[inline]
    fn newest_due(&self, history: usize, count: u64) -> Option<(usize, u64)> {
        let newest_first = (1..=count.min(ENTRIES)).map(|age| entry(history, count.wrapping_sub(age)));
        newest_first.map(|place| (place, self.load(place))).find(|(_, due_ns)| self.shared.is_due(*due_ns))
    }

    /// What the owner stores is there at once, and what is under way comes after it.
    fn store_own_word(&self, at: usize, value: u64, order: Ordering) {
        let history = self.shared.shape.history(at);
        let count = self.load(history);
        let place = self.newest_due(history, count).map_or(at, |(place, _)| place + WORD_BYTES);
        self.memory.store_u64(place, value, order);
    }

    /// What was stored last, arrived or not.
    fn last_word(&self, at: usize) -> u64 {
        let history = self.shared.shape.history(at);
        let count = self.load(history);
        self.load(if count == 0 { at } else { entry(history, count.wrapping_sub(1)) + WORD_BYTES })
    }

    fn put_word(&self, at: usize, value: u64, due_ns: u64) {
        let history = self.shared.shape.history(at);
        let count = self.load(history);
        // The entry that would be used again is the oldest: nobody sees it once the next one has arrived.
        let next_oldest = count.wrapping_add(1).wrapping_sub(ENTRIES);
        let has_room = count < ENTRIES || self.shared.is_due(self.load(entry(history, next_oldest)));
        let number = if has_room { count } else { count.wrapping_sub(1) };
        let place = entry(history, number);
        self.memory.store_u64(place, due_ns, Ordering::Relaxed);
        fence(Ordering::Release);
        self.memory.store_u64(place + WORD_BYTES, value, Ordering::Relaxed);
        self.memory.store_u64(history, number.wrapping_add(1), Ordering::Release);
    }

    /// Says when what is stored next to the lines of a span arrives. Before that they read as zeros.
    #[inline]
    fn mark_lines(&self, at: usize, len_bytes: usize, due_ns: u64) {
        let (first, end) = (at / LINE, (at + len_bytes).div_ceil(LINE));
        for line in first..end {
            self.memory.store_u64(self.shared.shape.time(line * LINE), due_ns, Ordering::Relaxed);
        }
        fence(Ordering::Release);
    }

    /// A word of a line, if the line has arrived.
    #[inline]
    fn load_in_line(&self, at: usize) -> u64 {
        let time = self.shared.shape.time(at);
        let due_ns = self.load(time);
        // Also where it has not: its line is on its way to this core meanwhile.
        let value = self.load(at);
        let has_arrived = self.shared.is_due(due_ns) && self.load(time) == due_ns;
        if has_arrived { value } else { 0 }
    }

    /// # Safety
    /// `destination` is writable for `len_bytes` and outside the window.
    unsafe fn read_words(&self, at: usize, destination: *mut u8, len_bytes: usize) {
        let mut done = 0;
        while done < len_bytes {
            let within = (at + done) % WORD_BYTES;
            let part_bytes = (WORD_BYTES - within).min(len_bytes - done);
            let word = self.load_word(at + done - within).to_ne_bytes();
            // SAFETY: `within` and `part_bytes` are inside the word, `done` inside what the caller vouches for.
            unsafe { word.as_ptr().add(within).copy_to_nonoverlapping(destination.add(done), part_bytes) };
            done += part_bytes;
        }
    }

    /// # Safety
    /// As for [`Part::read_words`].
    unsafe fn read_lines(&self, at: usize, destination: *mut u8, len_bytes: usize) {
        let mut done = 0;
        while done < len_bytes {
            let from = at + done;
            let rest_bytes = len_bytes - done;
            let arrived_bytes = self.arrived_bytes(from, rest_bytes);
            if arrived_bytes == 0 {
                let line_bytes = (LINE - from % LINE).min(rest_bytes);
                // SAFETY: inside what the caller vouches for.
                unsafe { destination.add(done).write_bytes(0, line_bytes) };
                done += line_bytes;
            } else {
                // SAFETY: as above.
                unsafe { self.memory.read_to(from, destination.add(done), arrived_bytes) };
                done += arrived_bytes;
            }
        }
    }

    /// How much of a span from `at` on has arrived without a gap.
    fn arrived_bytes(&self, at: usize, len_bytes: usize) -> usize {
        let lines = at / LINE..(at + len_bytes).div_ceil(LINE);
        let mut under_way = lines.skip_while(|line| self.shared.is_due(self.load(self.shared.shape.time(line * LINE))));
        under_way.next().map_or(len_bytes, |line| (line * LINE).saturating_sub(at))
    }

    /// # Safety
    /// `source` is readable for `len_bytes`.
    unsafe fn write_words(&self, at: usize, source: *const u8, len_bytes: usize) {
        if len_bytes == 0 {
            return;
        }
        let due_ns = self.shared.book(len_bytes);
        let mut done = 0;
        while done < len_bytes {
            let within = (at + done) % WORD_BYTES;
            let part_bytes = (WORD_BYTES - within).min(len_bytes - done);
            let mut word = self.last_word(at + done - within).to_ne_bytes();
            // SAFETY: as in `read_words`.
            unsafe { source.add(done).copy_to_nonoverlapping(word.as_mut_ptr().add(within), part_bytes) };
            self.put_word(at + done - within, u64::from_ne_bytes(word), due_ns);
            done += part_bytes;
        }
    }

    /// Returns when the last piece arrives, with the words that follow it.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes`.
    unsafe fn write_lines(&self, at: usize, source: *const u8, len_bytes: usize) -> u64 {
        let mut due_ns = 0;
        for done in (0..len_bytes).step_by(self.shared.costs.piece_bytes) {
            let piece_bytes = self.shared.costs.piece_bytes.min(len_bytes - done);
            let is_last = done + piece_bytes == len_bytes;
            due_ns = if is_last { self.shared.book_record(piece_bytes) } else { self.shared.book(piece_bytes) };
            self.mark_lines(at + done, piece_bytes, due_ns);
            // SAFETY: the caller's, from what is not yet written on.
            unsafe { self.memory.write_from(at + done, source.add(done), piece_bytes) };
        }
        due_ns
    }
}

/// The words that were booked with a payload, by one handle: how many are left, and when they arrive.
#[derive(Debug, Default)]
struct Booked {
    words: AtomicU64,
    due_ns: AtomicU64,
}

impl Booked {
    fn set(&self, due_ns: u64) {
        self.due_ns.store(due_ns, Ordering::Relaxed);
        self.words.store(RECORD_WORDS, Ordering::Relaxed);
    }

    /// For one more word, if there is one left.
    #[inline]
    fn take(&self) -> Option<u64> {
        let left = self.words.load(Ordering::Relaxed).checked_sub(1)?;
        self.words.store(left, Ordering::Relaxed);
        Some(self.due_ns.load(Ordering::Relaxed))
    }
}

/// This node's window: its loads show what has arrived.
#[derive(Debug)]
pub struct InPlaceInbound<C: Clock = Monotonic>(Part<C>);

impl<C: Clock> Clone for InPlaceInbound<C> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<C: Clock> Slice for InPlaceInbound<C> {
    fn slice(&self, offset: usize, len_bytes: usize) -> Self {
        Self(self.0.slice(offset, len_bytes))
    }
}

impl<C: Clock> Inbound for InPlaceInbound<C> {
    #[inline]
    fn len_bytes(&self) -> usize {
        self.0.len_bytes
    }

    /// Acquires, whatever is asked for: times are loaded before and after.
    #[inline]
    fn load_u64(&self, offset: usize, _order: Ordering) -> u64 {
        let at = self.0.checked_words(offset, WORD_BYTES);
        if self.0.is_word(at) { self.0.load_word(at) } else { self.0.load_in_line(at) }
    }

    #[inline]
    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        let at = self.0.checked_words(offset, WORD_BYTES);
        if self.0.is_word(at) {
            self.0.store_own_word(at, value, order);
        } else {
            self.0.memory.store_u64(at, value, order);
        }
    }

    /// Of lines that are written meanwhile, which no ring's are, something may be seen before it arrives.
    #[inline]
    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        let at = self.0.checked(offset, len_bytes);
        let words_bytes = self.0.bytes_in_words(at, len_bytes);
        // SAFETY: the caller's; the two parts add up to it.
        unsafe {
            self.0.read_words(at, destination, words_bytes);
            self.0.read_lines(at + words_bytes, destination.add(words_bytes), len_bytes - words_bytes);
        }
    }

    /// Of lines, and of what has arrived there: for records that were found.
    #[inline]
    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        let at = self.0.checked(offset, len_bytes);
        self.0.memory.pointer(at, len_bytes)
    }
}

/// The peer's window, a way off.
#[derive(Debug)]
pub struct InPlaceOutbound<C: Clock = Monotonic>(Part<C>, Booked);

impl<C: Clock> Clone for InPlaceOutbound<C> {
    fn clone(&self) -> Self {
        Self(self.0.clone(), Booked::default())
    }
}

impl<C: Clock> Slice for InPlaceOutbound<C> {
    fn slice(&self, offset: usize, len_bytes: usize) -> Self {
        Self(self.0.slice(offset, len_bytes), Booked::default())
    }
}

impl<C: Clock> Outbound for InPlaceOutbound<C> {
    #[inline]
    fn len_bytes(&self) -> usize {
        self.0.len_bytes
    }

    /// As the memory is: programs are trusted with no other, and each store arrives after those before it.
    #[inline]
    fn coherence(&self) -> Coherence {
        Coherence::Coherent
    }

    #[inline]
    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        let at = self.0.checked_words(offset, WORD_BYTES);
        if self.0.is_word(at) {
            self.0.put_word(at, value, self.0.shared.book(WORD_BYTES));
        } else {
            let due_ns = self.1.take().unwrap_or_else(|| self.0.shared.book(WORD_BYTES));
            self.0.mark_lines(at, WORD_BYTES, due_ns);
            self.0.memory.store_u64(at, value, order);
        }
    }

    /// One packet.
    #[inline]
    fn store_line(&self, offset: usize, words: &[u64]) {
        assert_one_line(offset, words);
        let at = self.0.checked_words(offset, size_of_val(words));
        let due_ns = self.0.shared.book(size_of_val(words));
        if self.0.is_word(at) {
            for (index, word) in words.iter().enumerate().rev() {
                self.0.put_word(at + index * WORD_BYTES, *word, due_ns);
            }
        } else {
            self.0.mark_lines(at, size_of_val(words), due_ns);
            self.0.memory.publish_words(at, words);
        }
    }

    #[inline]
    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        let at = self.0.checked(offset, len_bytes);
        let words_bytes = self.0.bytes_in_words(at, len_bytes);
        // SAFETY: the caller's; the two parts add up to it.
        unsafe {
            self.0.write_words(at, source, words_bytes);
            if words_bytes < len_bytes {
                let rest_bytes = len_bytes - words_bytes;
                self.1.set(self.0.write_lines(at + words_bytes, source.add(words_bytes), rest_bytes));
            }
        }
    }

    /// None: every store has to come by here.
    fn pointer(&self, offset: usize, len_bytes: usize) -> Option<NonNull<u8>> {
        self.0.checked(offset, len_bytes);
        None
    }

    fn prefetch_for_writes(&self, offset: usize, len_bytes: usize) {
        self.0.memory.prefetch_for_writes(self.0.checked(offset, len_bytes), len_bytes);
    }

    fn demote(&self, offset: usize, len_bytes: usize) {
        self.0.memory.demote(self.0.checked(offset, len_bytes), len_bytes);
    }

    /// Nothing to do: what publishes does so with release order, and is booked later.
    #[inline]
    fn fence(&self) {}

    fn flush(&self) {
        self.0.shared.flush();
    }
}

#[cfg(test)]
#[path = "in_place_tests.rs"]
mod tests;
