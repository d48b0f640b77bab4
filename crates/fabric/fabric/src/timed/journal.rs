//! Stores under way: a ring of records in the receiver's memory, each with the time when it is due.
//!
//! ```text
//!   line 0      credit: how much of the journal in the peer's memory the peer has done with   [written by the peer]
//!   line 1      when the peer's last ring is due                                              [written by the peer]
//!   records     tag | due | place | up to 40 bytes: a short store is one line                 [written by the peer]
//!   data        bytes of longer stores, in whole lines                                        [written by the peer]
//! ```
//!
//! A tag is the record's number, counted from one, and lies where nothing but tags ever lies: what is old or somebody's
//! payload cannot pass for one. Everything here is the peer's to spoil, and checked.

use super::Parts;
use super::clock::Clock;
use super::timing::{Costs, Pace};
use crate::{Inbound, Outbound};
use std::sync::atomic::AtomicU64;
use volmem::sync::Ordering;
use volmem::{CACHE_LINE_BYTES as LINE, Region};

const WORD_BYTES: usize = size_of::<u64>();
const CREDIT: usize = 0;
const RING: usize = LINE;
const CONTROL_BYTES: usize = 2 * LINE;

/// Where in a record the time is.
pub(super) const DUE: usize = 8;
const PLACE: usize = 16;
const INLINE: usize = 24;
const INLINE_BYTES: usize = LINE - INLINE;
const INLINE_WORD: usize = INLINE / WORD_BYTES;

const OFFSET_BITS: u32 = 48;
const OFFSET_MASK: u64 = (1 << OFFSET_BITS) - 1;

/// The journal must take so many of the longest pieces, or it would stall its sender all the time.
const PIECES_MIN: usize = 4;

/// A record due later than this is not an honest sender's.
const AHEAD_NS_MAX: u64 = 10_000_000_000;
/// How long a sleeper that was woken waits for the ring to be due, beyond the link's delay.
const RING_AHEAD_NS_MAX: u64 = 10_000_000;

/// The peer wrote what no honest peer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Nonsense;

/// Where things lie in a journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plan {
    records: u64,
    data_offset: usize,
    data_lines: u64,
}

impl Plan {
    /// Bytes of memory for a journal that holds what a window of `window_bytes` can hold.
    pub(super) fn memory_bytes(window_bytes: usize, piece_bytes: usize) -> usize {
        let half_bytes = window_bytes.next_power_of_two().max(PIECES_MIN * piece_bytes.next_power_of_two());
        CONTROL_BYTES + 2 * half_bytes
    }

    /// In memory of so many bytes: half of it records, half of it data; `None` if that is too small.
    pub(super) fn of(memory_bytes: usize, piece_bytes: usize) -> Option<Self> {
        let half_lines = memory_bytes.checked_sub(CONTROL_BYTES)? / LINE / 2;
        let lines = 1 << half_lines.checked_ilog2()?;
        let is_enough = lines * LINE >= PIECES_MIN * piece_bytes;
        let data_offset = CONTROL_BYTES + lines * LINE;
        is_enough.then_some(Self { records: lines as u64, data_offset, data_lines: lines as u64 })
    }

    /// Where the record of this number lies, counted from zero.
    #[inline]
    pub(super) fn record(&self, number: u64) -> usize {
        CONTROL_BYTES + (number & (self.records - 1)) as usize * LINE
    }

    /// The spans that `len_bytes` of data from a line on lie in: two where the ring ends between.
    fn data(&self, line: u64, len_bytes: usize) -> [(usize, usize); 2] {
        let line = line & (self.data_lines - 1);
        let first_bytes = len_bytes.min((self.data_lines - line) as usize * LINE);
        [(self.data_offset + line as usize * LINE, first_bytes), (self.data_offset, len_bytes - first_bytes)]
    }
}

/// How far a journal has got: records, and lines of data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Position {
    records: u64,
    data_lines: u64,
}

fn data_lines_of(len_bytes: usize) -> u64 {
    if len_bytes <= INLINE_BYTES { 0 } else { len_bytes.div_ceil(LINE) as u64 }
}

/// The sending end of a journal.
pub(super) struct Writer<L: Parts> {
    outbound: L::Outbound,
    /// Where the credit comes back.
    inbound: L::Inbound,
    plan: Plan,
    tail: Position,
    credit: Position,
    due_ns_last: u64,
}

impl<L: Parts> Writer<L> {
    pub(super) fn new(outbound: L::Outbound, inbound: L::Inbound, plan: Plan) -> Self {
        let (tail, credit) = Default::default();
        Self { outbound, inbound, plan, tail, credit, due_ns_last: 0 }
    }

    pub(super) fn reset(&mut self) {
        (self.tail, self.credit) = Default::default();
    }

    /// When the last store is due.
    pub(super) fn due_ns_last(&self) -> u64 {
        self.due_ns_last
    }

    #[inline]
    pub(super) fn has_room(&self, len_bytes: usize) -> bool {
        self.tail.records - self.credit.records < self.plan.records
            && self.tail.data_lines - self.credit.data_lines + data_lines_of(len_bytes) <= self.plan.data_lines
    }

    /// Looks how much the peer has done with.
    pub(super) fn load_credit(&mut self) -> Result<(), Nonsense> {
        self.inbound.invalidate(CREDIT, LINE);
        let word = |offset| self.inbound.load_u64(offset, Ordering::Acquire);
        let credit = Position { records: word(CREDIT), data_lines: word(CREDIT + WORD_BYTES) };
        let is_honest = (self.credit.records..=self.tail.records).contains(&credit.records)
            && (self.credit.data_lines..=self.tail.data_lines).contains(&credit.data_lines);
        if !is_honest {
            return Err(Nonsense);
        }
        self.credit = credit;
        Ok(())
    }

    /// Sends a store that there is room for, and that began at `begun_ns`, on its way.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes`.
    #[inline]
    pub(super) unsafe fn append(
        &mut self,
        (costs, pace): (&Costs, &Pace),
        begun_ns: u64,
        offset: usize,
        source: *const u8,
        len_bytes: usize,
    ) {
        let due_ns = self.book(costs, pace, begun_ns, len_bytes);
        let mut line = [0_u64; LINE / WORD_BYTES];
        line[0] = self.tail.records + 1;
        line[DUE / WORD_BYTES] = due_ns;
        line[PLACE / WORD_BYTES] = offset as u64 | (len_bytes as u64) << OFFSET_BITS;
        let mut words = INLINE_WORD;
        if len_bytes <= INLINE_BYTES {
            let inline = line[INLINE_WORD..].as_mut_ptr().cast();
            // SAFETY: the caller vouches for the source; the rest of the line has room for so many bytes.
            unsafe { source.copy_to_nonoverlapping(inline, len_bytes) };
            words += len_bytes.div_ceil(WORD_BYTES);
        } else {
            // SAFETY: the caller's.
            unsafe { self.write_data(source, len_bytes) };
        }
        self.outbound.store_line(self.plan.record(self.tail.records), &line[..words]);
        self.tail.records += 1;
        self.tail.data_lines += data_lines_of(len_bytes);
    }

    /// The bytes of a store that its record has no room for; whoever sees the record sees them.
    unsafe fn write_data(&self, source: *const u8, len_bytes: usize) {
        let [first, second] = self.plan.data(self.tail.data_lines, len_bytes);
        // SAFETY: the caller's; the two lengths add up to it.
        unsafe {
            self.outbound.write_from(first.0, source, first.1);
            self.outbound.write_from(second.0, source.add(first.1), second.1);
        }
        self.outbound.fence();
    }

    /// Takes the link for a packet; returns when it arrives, after everything before it.
    fn book(&mut self, costs: &Costs, pace: &Pace, now_ns: u64, len_bytes: usize) -> u64 {
        let due_ns = pace.book(now_ns, costs.busy_ticks(len_bytes)).saturating_add(costs.one_way_ns);
        self.due_ns_last = self.due_ns_last.max(due_ns);
        self.due_ns_last
    }

    /// Says when a ring is due: after every store before it.
    pub(super) fn announce_ring(&mut self, costs: &Costs, pace: &Pace, now_ns: u64) {
        let due_ns = self.book(costs, pace, now_ns, WORD_BYTES);
        self.outbound.store_u64(RING, due_ns, Ordering::Release);
        self.outbound.fence();
    }

    pub(super) fn flush(&self) {
        self.outbound.flush();
    }
}

/// The receiving end of a journal, and the window that its records make.
pub(super) struct Reader<L: Parts> {
    inbound: L::Inbound,
    /// Where the credit goes.
    outbound: L::Outbound,
    plan: Plan,
    head: Position,
    credited: Position,
    window: Region,
    piece_bytes: usize,
}

impl<L: Parts> Reader<L> {
    pub(super) fn new(
        inbound: L::Inbound,
        outbound: L::Outbound,
        plan: Plan,
        window: Region,
        piece_bytes: usize,
    ) -> Self {
        let (head, credited) = Default::default();
        Self { inbound, outbound, plan, head, credited, window, piece_bytes }
    }

    /// Begins with an empty journal and a window of zeros.
    pub(super) fn reset(&mut self) {
        (self.head, self.credited) = Default::default();
        for offset in (0..self.window.len_bytes()).step_by(WORD_BYTES) {
            self.window.store_u64(offset, 0, Ordering::Relaxed);
        }
    }

    pub(super) fn inbound(&self) -> &L::Inbound {
        &self.inbound
    }

    /// Puts every record that is due into the window, and looks at the clock when one is not due at `now_ns`;
    /// `expected` becomes the next one's tag. At most one lap: a sender may be as fast as this.
    pub(super) fn pump(&mut self, mut now_ns: u64, clock: &impl Clock, expected: &AtomicU64) -> Result<(), Nonsense> {
        for _ in 0..self.plan.records {
            let record = self.plan.record(self.head.records);
            self.inbound.invalidate(record, LINE);
            if self.inbound.load_u64(record, Ordering::Acquire) != self.head.records + 1 {
                break;
            }
            let due_ns = self.inbound.load_u64(record + DUE, Ordering::Relaxed);
            if due_ns > now_ns {
                now_ns = clock.now_ns();
            }
            if due_ns > now_ns {
                if due_ns - now_ns > AHEAD_NS_MAX {
                    return Err(Nonsense);
                }
                break;
            }
            self.apply(record)?;
            expected.store(self.head.records + 1, Ordering::Release);
        }
        self.return_credit();
        Ok(())
    }

    fn apply(&mut self, record: usize) -> Result<(), Nonsense> {
        let place = self.inbound.load_u64(record + PLACE, Ordering::Relaxed);
        let (offset, len_bytes) = ((place & OFFSET_MASK) as usize, (place >> OFFSET_BITS) as usize);
        let window_bytes = self.window.len_bytes();
        if len_bytes > self.piece_bytes || len_bytes > window_bytes || offset > window_bytes - len_bytes {
            return Err(Nonsense);
        }
        if len_bytes <= LINE {
            let mut bytes = [0; LINE];
            if len_bytes <= INLINE_BYTES {
                self.inbound.read(record + INLINE, &mut bytes[..INLINE_BYTES]);
            } else {
                // SAFETY: the buffer has the length.
                unsafe { self.read_data(bytes.as_mut_ptr(), len_bytes) };
            }
            store_backwards(&self.window, offset, &bytes[..len_bytes]);
        } else {
            let destination = self.window.pointer(offset, len_bytes).as_ptr();
            // SAFETY: `pointer` has checked that the window has the length there; it is no part of the journal.
            unsafe { self.read_data(destination, len_bytes) };
        }
        self.head.records += 1;
        self.head.data_lines += data_lines_of(len_bytes);
        Ok(())
    }

    /// # Safety
    /// `destination` is writable for `len_bytes`.
    unsafe fn read_data(&self, destination: *mut u8, len_bytes: usize) {
        let [first, second] = self.plan.data(self.head.data_lines, len_bytes);
        self.inbound.invalidate(first.0, first.1);
        self.inbound.invalidate(second.0, second.1);
        // SAFETY: the caller's; the two lengths add up to it.
        unsafe {
            self.inbound.read_to(first.0, destination, first.1);
            self.inbound.read_to(second.0, destination.add(first.1), second.1);
        }
    }

    fn return_credit(&mut self) {
        let records = self.head.records - self.credited.records;
        let data_lines = self.head.data_lines - self.credited.data_lines;
        if records >= self.plan.records / 4 || data_lines >= self.plan.data_lines / 4 {
            self.outbound.store_line(CREDIT, &[self.head.records, self.head.data_lines]);
            self.credited = self.head;
        }
    }

    /// When the last ring is due, if that is in a time that a sleeper waits.
    pub(super) fn ring_due_ns(&self, now_ns: u64, one_way_ns: u64) -> u64 {
        self.inbound.invalidate(RING, WORD_BYTES);
        let due_ns = self.inbound.load_u64(RING, Ordering::Acquire);
        due_ns.min(now_ns.saturating_add(one_way_ns).saturating_add(RING_AHEAD_NS_MAX))
    }
}

/// Stores whole words as such and the first one last, so that who sees that sees all.
fn store_backwards(window: &Region, offset: usize, bytes: &[u8]) {
    if !offset.is_multiple_of(WORD_BYTES) {
        return window.write(offset, bytes);
    }
    let (words, rest) = bytes.as_chunks();
    window.write(offset + bytes.len() - rest.len(), rest);
    for (index, word) in words.iter().enumerate().rev() {
        window.store_u64(offset + index * WORD_BYTES, u64::from_ne_bytes(*word), Ordering::Release);
    }
}
