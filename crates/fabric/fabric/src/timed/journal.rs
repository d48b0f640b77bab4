//! Stores in flight: a ring of records in the receiver's memory, each with its arrival time.
//!
//! ```text
//!   line 0      credit: position up to which the peer has applied the journal in its memory     [written by the peer]
//!   line 1      when the peer's last ring is due                                              [written by the peer]
//!   records     tag | due | destination | up to 40 bytes: a short store is one line           [written by the peer]
//!   data        bytes of longer stores, in whole lines                                        [written by the peer]
//! ```
//!
//! A tag is the record's number, counted from one. It lies where only tags are ever stored, so neither an old word nor
//! payload passes for one. The peer can overwrite all of this memory, so everything is checked.

use super::clock::Clock;
use super::timing::{Pacer, PacketCosts};
use super::window_types::WindowTypes;
use crate::{Inbound, Outbound};
use std::sync::atomic::AtomicU64;
use volmem::sync::Ordering;
use volmem::{CACHE_LINE_BYTES as LINE, Region};

const WORD_BYTES: usize = size_of::<u64>();
const CREDIT: usize = 0;
const RING: usize = LINE;
const CONTROL_BYTES: usize = 2 * LINE;

/// Offset of the arrival time in a record.
pub(super) const DUE: usize = 8;
const DESTINATION: usize = 16;
const INLINE: usize = 24;
const INLINE_BYTES: usize = LINE - INLINE;
const INLINE_WORD: usize = INLINE / WORD_BYTES;

const OFFSET_BITS: u32 = 48;
const OFFSET_MASK: u64 = (1 << OFFSET_BITS) - 1;

/// Minimum number of longest pieces that a journal holds. With fewer it would stall its sender all the time.
const PIECES_MIN: usize = 4;

/// No honest sender's record is due later than this.
const AHEAD_NS_MAX: u64 = 10_000_000_000;
/// Longest wait for a ring to be due, beyond the link's delay.
const RING_AHEAD_NS_MAX: u64 = 10_000_000;

/// The peer wrote what no honest peer writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProtocolViolation;

/// Offsets in a journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct JournalLayout {
    records: u64,
    data_offset: usize,
    data_lines: u64,
}

impl JournalLayout {
    /// Bytes of memory for a journal that holds the contents of a window of `window_bytes`.
    pub(super) fn memory_bytes(window_bytes: usize, piece_bytes: usize) -> usize {
        let half_bytes = window_bytes.next_power_of_two().max(PIECES_MIN * piece_bytes.next_power_of_two());
        CONTROL_BYTES + 2 * half_bytes
    }

    /// The layout in `memory_bytes`: one half holds records, the other half data. `None` if the memory is too small.
    pub(super) fn of(memory_bytes: usize, piece_bytes: usize) -> Option<Self> {
        let half_lines = memory_bytes.checked_sub(CONTROL_BYTES)? / LINE / 2;
        let lines = 1 << half_lines.checked_ilog2()?;
        let is_enough = lines * LINE >= PIECES_MIN * piece_bytes;
        let data_offset = CONTROL_BYTES + lines * LINE;
        is_enough.then_some(Self { records: lines as u64, data_offset, data_lines: lines as u64 })
    }

    /// Offset of a record, by its number counted from zero.
    #[inline]
    pub(super) fn record(&self, number: u64) -> usize {
        CONTROL_BYTES + (number & (self.records - 1)) as usize * LINE
    }

    /// The spans of `len_bytes` of data from a line on: two where the ring wraps.
    fn data(&self, line: u64, len_bytes: usize) -> [(usize, usize); 2] {
        let line = line & (self.data_lines - 1);
        let first_bytes = len_bytes.min((self.data_lines - line) as usize * LINE);
        [(self.data_offset + line as usize * LINE, first_bytes), (self.data_offset, len_bytes - first_bytes)]
    }
}

/// A position in a journal: numbers of records and of lines of data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Position {
    records: u64,
    data_lines: u64,
}

fn data_lines_of(len_bytes: usize) -> u64 {
    if len_bytes <= INLINE_BYTES { 0 } else { len_bytes.div_ceil(LINE) as u64 }
}

/// The sender of a journal.
pub(super) struct Writer<L: WindowTypes> {
    outbound: L::Outbound,
    /// The window in which the peer returns credit.
    inbound: L::Inbound,
    plan: JournalLayout,
    tail: Position,
    credit: Position,
    due_ns_last: u64,
}

impl<L: WindowTypes> Writer<L> {
    pub(super) fn new(outbound: L::Outbound, inbound: L::Inbound, plan: JournalLayout) -> Self {
        let (tail, credit) = Default::default();
        Self { outbound, inbound, plan, tail, credit, due_ns_last: 0 }
    }

    pub(super) fn reset(&mut self) {
        (self.tail, self.credit) = Default::default();
    }

    /// Arrival time of the last store.
    pub(super) fn due_ns_last(&self) -> u64 {
        self.due_ns_last
    }

    #[inline]
    pub(super) fn has_room(&self, len_bytes: usize) -> bool {
        self.tail.records - self.credit.records < self.plan.records
            && self.tail.data_lines - self.credit.data_lines + data_lines_of(len_bytes) <= self.plan.data_lines
    }

    /// Loads the position up to which the peer has applied the journal.
    pub(super) fn load_credit(&mut self) -> Result<(), ProtocolViolation> {
        self.inbound.invalidate(CREDIT, LINE);
        let word = |offset| self.inbound.load_u64(offset, Ordering::Acquire);
        let credit = Position { records: word(CREDIT), data_lines: word(CREDIT + WORD_BYTES) };
        let is_honest = (self.credit.records..=self.tail.records).contains(&credit.records)
            && (self.credit.data_lines..=self.tail.data_lines).contains(&credit.data_lines);
        if !is_honest {
            return Err(ProtocolViolation);
        }
        self.credit = credit;
        Ok(())
    }

    /// Appends a store that began at `begun_ns`. The caller has checked that there is room.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes`.
    #[inline]
    pub(super) unsafe fn append(
        &mut self,
        (costs, pacer): (&PacketCosts, &Pacer),
        begun_ns: u64,
        offset: usize,
        source: *const u8,
        len_bytes: usize,
    ) {
        let due_ns = self.reserve(costs, pacer, begun_ns, len_bytes);
        let mut line = [0_u64; LINE / WORD_BYTES];
        line[0] = self.tail.records + 1;
        line[DUE / WORD_BYTES] = due_ns;
        line[DESTINATION / WORD_BYTES] = offset as u64 | (len_bytes as u64) << OFFSET_BITS;
        let mut words = INLINE_WORD;
        if len_bytes <= INLINE_BYTES {
            let inline = line[INLINE_WORD..].as_mut_ptr().cast();
            // SAFETY: the caller guarantees that `source` is readable for `len_bytes`, and the rest of the line has
            // room for `INLINE_BYTES`.
            unsafe { source.copy_to_nonoverlapping(inline, len_bytes) };
            words += len_bytes.div_ceil(WORD_BYTES);
        } else {
            // SAFETY: the caller guarantees that `source` is readable for `len_bytes`.
            unsafe { self.write_data(source, len_bytes) };
        }
        self.outbound.store_line(self.plan.record(self.tail.records), &line[..words]);
        self.tail.records += 1;
        self.tail.data_lines += data_lines_of(len_bytes);
    }

    /// Writes the bytes of a store that do not fit into its record, before the record is stored.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes`.
    unsafe fn write_data(&self, source: *const u8, len_bytes: usize) {
        let [first, second] = self.plan.data(self.tail.data_lines, len_bytes);
        // SAFETY: the caller guarantees that `source` is readable for `len_bytes`, the sum of the two lengths.
        unsafe {
            self.outbound.write_from(first.0, source, first.1);
            self.outbound.write_from(second.0, source.add(first.1), second.1);
        }
        self.outbound.fence();
    }

    /// Reserves the link for a packet. Returns its arrival time, after everything before it.
    fn reserve(&mut self, costs: &PacketCosts, pacer: &Pacer, now_ns: u64, len_bytes: usize) -> u64 {
        let due_ns = pacer.reserve(now_ns, costs.busy_ticks(len_bytes)).saturating_add(costs.one_way_ns);
        self.due_ns_last = self.due_ns_last.max(due_ns);
        self.due_ns_last
    }

    /// Stores the arrival time of a ring, after every store before it.
    pub(super) fn announce_ring(&mut self, costs: &PacketCosts, pacer: &Pacer, now_ns: u64) {
        let due_ns = self.reserve(costs, pacer, now_ns, WORD_BYTES);
        self.outbound.store_u64(RING, due_ns, Ordering::Release);
        self.outbound.fence();
    }

    pub(super) fn flush(&self) {
        self.outbound.flush();
    }
}

/// The receiver of a journal, and the window that its records are applied to.
pub(super) struct Reader<L: WindowTypes> {
    inbound: L::Inbound,
    /// The window in which this endpoint returns credit.
    outbound: L::Outbound,
    plan: JournalLayout,
    head: Position,
    credited: Position,
    window: Region,
    piece_bytes: usize,
}

impl<L: WindowTypes> Reader<L> {
    pub(super) fn new(
        inbound: L::Inbound,
        outbound: L::Outbound,
        plan: JournalLayout,
        window: Region,
        piece_bytes: usize,
    ) -> Self {
        let (head, credited) = Default::default();
        Self { inbound, outbound, plan, head, credited, window, piece_bytes }
    }

    /// Empties the journal and zeroes the window.
    pub(super) fn reset(&mut self) {
        (self.head, self.credited) = Default::default();
        for offset in (0..self.window.len_bytes()).step_by(WORD_BYTES) {
            self.window.store_u64(offset, 0, Ordering::Relaxed);
        }
    }

    pub(super) fn inbound(&self) -> &L::Inbound {
        &self.inbound
    }

    /// Applies every record that is due, and reads the clock when a record is not due at `now_ns`. `expected` becomes
    /// the tag of the next record. Applies at most as many records as the ring has, because the sender may be as fast
    /// as the receiver.
    pub(super) fn pump(
        &mut self,
        mut now_ns: u64,
        clock: &impl Clock,
        expected: &AtomicU64,
    ) -> Result<(), ProtocolViolation> {
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
                    return Err(ProtocolViolation);
                }
                break;
            }
            self.apply(record)?;
            expected.store(self.head.records + 1, Ordering::Release);
        }
        self.return_credit();
        Ok(())
    }

    fn apply(&mut self, record: usize) -> Result<(), ProtocolViolation> {
        let destination = self.inbound.load_u64(record + DESTINATION, Ordering::Relaxed);
        let (offset, len_bytes) = ((destination & OFFSET_MASK) as usize, (destination >> OFFSET_BITS) as usize);
        let window_bytes = self.window.len_bytes();
        if len_bytes > self.piece_bytes || len_bytes > window_bytes || offset > window_bytes - len_bytes {
            return Err(ProtocolViolation);
        }
        if len_bytes <= LINE {
            let mut bytes = [0; LINE];
            if len_bytes <= INLINE_BYTES {
                self.inbound.read(record + INLINE, &mut bytes[..INLINE_BYTES]);
            } else {
                // SAFETY: the buffer has `LINE` bytes, and `len_bytes` is at most that.
                unsafe { self.read_data(bytes.as_mut_ptr(), len_bytes) };
            }
            store_backwards(&self.window, offset, &bytes[..len_bytes]);
        } else {
            let destination = self.window.pointer(offset, len_bytes).as_ptr();
            // SAFETY: `pointer` has checked that the window has `len_bytes` at `offset`, and the window is not part of
            // the journal's memory.
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
        // SAFETY: the caller guarantees that `destination` is writable for `len_bytes`, the sum of the two lengths.
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

    /// Arrival time of the last ring, limited to the longest time that a waiter waits.
    pub(super) fn ring_due_ns(&self, now_ns: u64, one_way_ns: u64) -> u64 {
        self.inbound.invalidate(RING, WORD_BYTES);
        let due_ns = self.inbound.load_u64(RING, Ordering::Acquire);
        due_ns.min(now_ns.saturating_add(one_way_ns).saturating_add(RING_AHEAD_NS_MAX))
    }
}

/// Stores whole words as words, the first one last, so that a reader that sees the first sees all.
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
