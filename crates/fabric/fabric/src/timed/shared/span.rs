//! Loads and stores of a window in shared memory, with their arrival times.

use super::layout::SharedLayout;
use crate::timed::clock::Clock;
use crate::timed::timing::{Pacer, PacketCosts};
use crate::window::assert_whole_lines;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use volmem::sync::{Ordering, fence};
use volmem::{CACHE_LINE_BYTES as LINE, Region};

const WORD_BYTES: usize = size_of::<u64>();
/// Number of entries of a history: what fits into two lines behind the count.
const ENTRIES: u64 = 7;
const ENTRY_BYTES: usize = 2 * WORD_BYTES;
/// Words that follow a payload: the length, and the word that publishes the record.
pub(super) const RECORD_WORDS: u64 = 2;
/// Maximum number of attempts of a load whose history is written meanwhile. An honest peer does not write so fast.
const LOAD_ATTEMPTS_MAX: u32 = 8;
/// A load waits for a value that is due within this time, for at most [`CLOCK_READS_MAX`] reads of the clock.
const IMMINENT_NS: u64 = 150;
/// Maximum number of reads of the clock while a load waits.
const CLOCK_READS_MAX: u32 = 32;
/// Longest wait, beyond the delay, for stores that a peer claims to have in flight.
pub(super) const AHEAD_NS_MAX: u64 = 10_000_000;

/// What the windows of an endpoint share.
#[derive(Debug)]
pub(super) struct Context<C> {
    pub layout: SharedLayout,
    pub costs: PacketCosts,
    pub pacer: Pacer,
    pub peer_pacer: Pacer,
    /// The latest time that this process has read. What was due then needs no read of the clock.
    pub seen_ns: AtomicU64,
    pub clock: C,
}

impl<C: Clock> Context<C> {
    #[inline]
    pub(super) fn is_due(&self, due_ns: u64) -> bool {
        due_ns <= self.seen_ns.load(Ordering::Relaxed) || self.is_due_now(due_ns)
    }

    /// Reads the clock. Waits for what is due within [`IMMINENT_NS`]: a caller that polled again would see it later.
    fn is_due_now(&self, due_ns: u64) -> bool {
        for _ in 0..CLOCK_READS_MAX {
            let now_ns = self.clock.now_ns();
            self.seen_ns.store(now_ns, Ordering::Relaxed);
            if due_ns <= now_ns {
                return true;
            }
            if due_ns - now_ns > IMMINENT_NS {
                break;
            }
        }
        false
    }

    /// Reserves the link for a packet that is sent now. Returns the arrival time.
    #[inline]
    pub(super) fn reserve(&self, len_bytes: usize) -> u64 {
        self.reserve_ticks(self.costs.busy_ticks(len_bytes))
    }

    /// Reserves the link like [`Context::reserve`], including the words that publish the record.
    pub(super) fn reserve_record(&self, len_bytes: usize) -> u64 {
        self.reserve_ticks(self.costs.busy_ticks(len_bytes) + RECORD_WORDS * self.costs.busy_ticks(WORD_BYTES))
    }

    #[inline]
    fn reserve_ticks(&self, ticks: u64) -> u64 {
        self.pacer.reserve(self.clock.now_ns(), ticks).saturating_add(self.costs.one_way_ns)
    }

    /// Waits until what the peer has stored so far has arrived.
    pub(super) fn wait_for_arrivals(&self) {
        let delay_ns = self.costs.one_way_ns;
        let due_ns = self.peer_pacer.free_ns().saturating_add(delay_ns);
        self.clock.wait_until(due_ns.min(self.clock.now_ns() + delay_ns + AHEAD_NS_MAX));
    }

    /// Waits as long as a read across the link: the request follows the stores to the peer, and the completion follows
    /// the peer's stores to this node.
    pub(super) fn flush(&self) {
        let delay_ns = self.costs.one_way_ns;
        let last_ns = self.clock.now_ns() + delay_ns + AHEAD_NS_MAX;
        let there_ns = self.pacer.free_ns().max(self.clock.now_ns()) + delay_ns;
        self.clock.wait_until(there_ns.min(last_ns));
        // Orders this node's earlier stores before the load of the peer's pacer.
        fence(Ordering::SeqCst);
        let back_ns = self.peer_pacer.free_ns().max(self.clock.now_ns()).saturating_add(delay_ns);
        self.clock.wait_until(back_ns.min(last_ns + delay_ns));
    }
}

/// A window or a slice of one, with its histories and arrival times.
#[derive(Debug)]
pub(super) struct Span<C> {
    pub memory: Region,
    pub offset: usize,
    pub len_bytes: usize,
    pub context: Arc<Context<C>>,
}

impl<C> Clone for Span<C> {
    fn clone(&self) -> Self {
        Self { memory: self.memory.clone(), context: self.context.clone(), ..*self }
    }
}

/// Offset of an entry of a history: the arrival time, then the value.
#[inline]
fn entry(history: usize, number: u64) -> usize {
    history + WORD_BYTES + (number % ENTRIES) as usize * ENTRY_BYTES
}

impl<C: Clock> Span<C> {
    /// Offset in the whole window of a span of this slice.
    #[inline]
    pub(super) fn checked(&self, offset: usize, len_bytes: usize) -> usize {
        let is_inside = offset <= self.len_bytes && len_bytes <= self.len_bytes - offset;
        assert!(is_inside, "span {offset}+{len_bytes} outside a window of {} bytes", self.len_bytes);
        self.offset + offset
    }

    #[inline]
    pub(super) fn checked_words(&self, offset: usize, len_bytes: usize) -> usize {
        assert!(offset.is_multiple_of(WORD_BYTES), "word at unaligned offset {offset}");
        self.checked(offset, len_bytes)
    }

    pub(super) fn slice(&self, offset: usize, len_bytes: usize) -> Self {
        assert_whole_lines(offset, len_bytes);
        Self { offset: self.checked(offset, len_bytes), len_bytes, ..self.clone() }
    }

    /// Number of bytes of a span at `at` that lie in the part with histories.
    #[inline]
    pub(super) fn bytes_in_words(&self, at: usize, len_bytes: usize) -> usize {
        self.context.layout.words_bytes.saturating_sub(at).min(len_bytes)
    }

    #[inline]
    pub(super) fn is_word(&self, at: usize) -> bool {
        at < self.context.layout.words_bytes
    }

    #[inline]
    fn load(&self, at: usize) -> u64 {
        self.memory.load_u64(at, Ordering::Acquire)
    }

    /// Loads the last value of a word that has arrived.
    #[inline]
    pub(super) fn load_word(&self, at: usize) -> u64 {
        let history = self.context.layout.history(at);
        if self.load(history) == 0 { self.load(at) } else { self.load_from_history(at, history) }
    }

    fn load_from_history(&self, at: usize, history: usize) -> u64 {
        let mut value = 0;
        for _ in 0..LOAD_ATTEMPTS_MAX {
            let count = self.load(history);
            let found = self.newest_due(history, count);
            value = self.load(found.map_or(at, |(entry_offset, _)| entry_offset + WORD_BYTES));
            let is_same = match found {
                Some((entry_offset, due_ns)) => self.load(entry_offset) == due_ns,
                // Once entries are reused, one of them has always arrived.
                None => count < ENTRIES,
            };
            if is_same && self.load(history) == count {
                break;
            }
        }
        value
    }

    /// The last entry that has arrived, and its arrival time.
    #[inline]
    fn newest_due(&self, history: usize, count: u64) -> Option<(usize, u64)> {
        let newest_first = (1..=count.min(ENTRIES)).map(|age| entry(history, count.wrapping_sub(age)));
        newest_first
            .map(|entry_offset| (entry_offset, self.load(entry_offset)))
            .find(|(_, due_ns)| self.context.is_due(*due_ns))
    }

    /// Stores a value of the window's owner, which is visible at once. Stores of the peer that are in flight follow it.
    pub(super) fn store_own_word(&self, at: usize, value: u64, order: Ordering) {
        let history = self.context.layout.history(at);
        let count = self.load(history);
        let value_offset = self.newest_due(history, count).map_or(at, |(entry_offset, _)| entry_offset + WORD_BYTES);
        self.memory.store_u64(value_offset, value, order);
    }

    /// Loads the value that was stored last, whether it has arrived or not.
    fn last_word(&self, at: usize) -> u64 {
        let history = self.context.layout.history(at);
        let count = self.load(history);
        self.load(if count == 0 { at } else { entry(history, count.wrapping_sub(1)) + WORD_BYTES })
    }

    /// Appends a value to the history of a word.
    pub(super) fn put_word(&self, at: usize, value: u64, due_ns: u64) {
        let history = self.context.layout.history(at);
        let count = self.load(history);
        // The entry to be reused is the oldest. No load returns it once the next entry has arrived.
        let next_oldest = count.wrapping_add(1).wrapping_sub(ENTRIES);
        let has_room = count < ENTRIES || self.context.is_due(self.load(entry(history, next_oldest)));
        let number = if has_room { count } else { count.wrapping_sub(1) };
        let entry_offset = entry(history, number);
        self.memory.store_u64(entry_offset, due_ns, Ordering::Relaxed);
        fence(Ordering::Release);
        self.memory.store_u64(entry_offset + WORD_BYTES, value, Ordering::Relaxed);
        self.memory.store_u64(history, number.wrapping_add(1), Ordering::Release);
    }

    /// Stores the arrival time of what is stored next in the lines of a span. Until then the lines read as zeros.
    #[inline]
    pub(super) fn mark_lines(&self, at: usize, len_bytes: usize, due_ns: u64) {
        let (first, end) = (at / LINE, (at + len_bytes).div_ceil(LINE));
        for line in first..end {
            self.memory.store_u64(self.context.layout.time(line * LINE), due_ns, Ordering::Relaxed);
        }
        fence(Ordering::Release);
    }

    /// Loads a word of a line; 0 if the line has not arrived.
    #[inline]
    pub(super) fn load_in_line(&self, at: usize) -> u64 {
        let time = self.context.layout.time(at);
        let due_ns = self.load(time);
        // The value is loaded in either case, so that its cache line is on its way while the time is checked.
        let value = self.load(at);
        let has_arrived = self.context.is_due(due_ns) && self.load(time) == due_ns;
        if has_arrived { value } else { 0 }
    }

    /// Copies bytes out of words with histories.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes` and outside the window.
    pub(super) unsafe fn read_words(&self, at: usize, destination: *mut u8, len_bytes: usize) {
        let mut done = 0;
        while done < len_bytes {
            let within = (at + done) % WORD_BYTES;
            let part_bytes = (WORD_BYTES - within).min(len_bytes - done);
            let word = self.load_word(at + done - within).to_ne_bytes();
            // SAFETY: `within + part_bytes` is at most the size of the word, and `done + part_bytes` is at most
            // `len_bytes`, for which the caller guarantees that `destination` is writable. The word is a local of this
            // function.
            unsafe { word.as_ptr().add(within).copy_to_nonoverlapping(destination.add(done), part_bytes) };
            done += part_bytes;
        }
    }

    /// Copies bytes out of lines with arrival times.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes` and outside the window.
    pub(super) unsafe fn read_lines(&self, at: usize, destination: *mut u8, len_bytes: usize) {
        let mut done = 0;
        while done < len_bytes {
            let from = at + done;
            let rest_bytes = len_bytes - done;
            let arrived_bytes = self.arrived_bytes(from, rest_bytes);
            if arrived_bytes == 0 {
                let line_bytes = (LINE - from % LINE).min(rest_bytes);
                // SAFETY: `done + line_bytes` is at most `len_bytes`, for which the caller guarantees that
                // `destination` is writable.
                unsafe { destination.add(done).write_bytes(0, line_bytes) };
                done += line_bytes;
            } else {
                // SAFETY: `done + arrived_bytes` is at most `len_bytes`, for which the caller guarantees that
                // `destination` is writable and outside the window.
                unsafe { self.memory.read_to(from, destination.add(done), arrived_bytes) };
                done += arrived_bytes;
            }
        }
    }

    /// Number of bytes from `at` on that have arrived without a gap.
    fn arrived_bytes(&self, at: usize, len_bytes: usize) -> usize {
        let lines = at / LINE..(at + len_bytes).div_ceil(LINE);
        let mut under_way =
            lines.skip_while(|line| self.context.is_due(self.load(self.context.layout.time(line * LINE))));
        under_way.next().map_or(len_bytes, |line| (line * LINE).saturating_sub(at))
    }

    /// Stores bytes in words with histories.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes`.
    pub(super) unsafe fn write_words(&self, at: usize, source: *const u8, len_bytes: usize) {
        if len_bytes == 0 {
            return;
        }
        let due_ns = self.context.reserve(len_bytes);
        let mut done = 0;
        while done < len_bytes {
            let within = (at + done) % WORD_BYTES;
            let part_bytes = (WORD_BYTES - within).min(len_bytes - done);
            let mut word = self.last_word(at + done - within).to_ne_bytes();
            // SAFETY: `within + part_bytes` is at most the size of the word, which is a local, and `done + part_bytes`
            // is at most `len_bytes`, for which the caller guarantees that `source` is readable.
            unsafe { source.add(done).copy_to_nonoverlapping(word.as_mut_ptr().add(within), part_bytes) };
            self.put_word(at + done - within, u64::from_ne_bytes(word), due_ns);
            done += part_bytes;
        }
    }

    /// Stores bytes in lines, in pieces. Returns the arrival time of the last piece and of the words that publish the
    /// record.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes`.
    pub(super) unsafe fn write_lines(&self, at: usize, source: *const u8, len_bytes: usize) -> u64 {
        let mut due_ns = 0;
        for done in (0..len_bytes).step_by(self.context.costs.piece_bytes) {
            let piece_bytes = self.context.costs.piece_bytes.min(len_bytes - done);
            let is_last = done + piece_bytes == len_bytes;
            due_ns = if is_last { self.context.reserve_record(piece_bytes) } else { self.context.reserve(piece_bytes) };
            self.mark_lines(at + done, piece_bytes, due_ns);
            // SAFETY: `done + piece_bytes` is at most `len_bytes`, for which the caller guarantees that `source` is
            // readable.
            unsafe { self.memory.write_from(at + done, source.add(done), piece_bytes) };
        }
        due_ns
    }
}
