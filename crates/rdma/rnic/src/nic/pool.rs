//! A pool of contexts on chip, for NICs whose contexts are in the host's memory; and the state that stays on chip for
//! every queue pair.
//!
//! Every queue pair has a [`DirectoryEntry`] of 8 bytes: where its context is, its successor in the schedule queue, and
//! a coarse deadline. Because the schedule queue says which queue pair sends next, contexts are prefetched. Packets
//! received for a context that is not on chip wait in the receive buffer until it has been fetched.

use std::collections::VecDeque;

use sim::Time;

use super::fifo::pop_front_if;
use super::limits::NO_QP;
use super::profile::ContextPoolConfig;
use crate::verbs::NicAddress;
use crate::wire::Header;

/// The index that stands for none. Fetches, slots and parked packets are numbered with 16 bits.
pub(super) const NO_INDEX: u16 = u16::MAX;
/// Unit of coarse deadlines: 2^24 ps (16.8 us), mod 2^16. A sweep over all entries takes no longer.
const TICK_SHIFT: u32 = 24;
/// Maximum distance of a coarse deadline, in units; a later deadline is set again then.
const TICKS_AHEAD_MAX: u64 = (1 << 15) - 1;

bitflags::bitflags! {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Flags: u8 {
        /// The context is in the pool; `index` is its slot.
        const RESIDENT = 1;
        /// The context is being fetched or waits to be fetched; `index` is the fetch.
        const FETCHING = 1 << 1;
        /// In the schedule queue, or part of a decision.
        const QUEUED = 1 << 2;
        /// `deadline` is valid.
        const HAS_DEADLINE = 1 << 3;
    }
}

/// The index of a queue pair in 3 bytes, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct QpLink([u8; 3]);

impl QpLink {
    const NONE: Self = Self([0xFF; 3]);

    fn of(i: usize) -> Self {
        let [low, middle, high, _] = (i as u32).to_le_bytes();
        Self([low, middle, high])
    }

    fn index(self) -> Option<usize> {
        let [low, middle, high] = self.0;
        (self != Self::NONE).then(|| u32::from_le_bytes([low, middle, high, 0]) as usize)
    }
}

/// The state on chip of every queue pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct DirectoryEntry {
    index: u16,
    /// The coarse deadline of a queue pair whose context is not on chip.
    deadline: u16,
    /// The next queue pair in the schedule queue.
    next: QpLink,
    flags: Flags,
}

const _: () = assert!(size_of::<DirectoryEntry>() == 8, "a directory entry has 8 bytes");

/// A slot of the pool, without the context itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct PoolSlot {
    qp: u32,
    /// Number of scheduled quanta, packets and slow-path headers that need the context soon.
    pins: u32,
    /// Used since the clock hand last passed.
    is_used: bool,
    /// Differs from the copy in the host's memory.
    is_changed: bool,
}

const _: () = assert!(size_of::<PoolSlot>() <= 12);

/// A requested context.
#[derive(Clone, Copy, Debug)]
pub(super) struct ContextFetch {
    qp: u32,
    /// Number of scheduled quanta that need it.
    pins: u32,
    slot: u16,
    /// The list of packets in the receive buffer that wait for it.
    parked_first: u16,
    parked_last: u16,
}

const _: () = assert!(size_of::<ContextFetch>() <= 16);

/// A packet in the receive buffer that waits for its context; `next` is the space that it takes in addition to the
/// packet.
#[derive(Debug)]
pub(super) struct ParkedPacket {
    next: u16,
    pub source: NicAddress,
    pub header: Header,
    pub is_marked: bool,
    /// None if only the headers arrived (packet trimming).
    pub payload: Option<Vec<u8>>,
}

impl ParkedPacket {
    pub fn new(source: NicAddress, header: &Header, is_marked: bool, payload: Option<Vec<u8>>) -> Self {
        Self { next: NO_INDEX, source, header: *header, is_marked, payload }
    }

    fn bytes(&self) -> u32 {
        self.header.packet_bytes() as u32
    }
}

/// Bytes that the linked list takes for each packet in the receive buffer.
pub(super) const PARKED_LINK_BYTES: usize = size_of::<u16>();

/// The schedule queue: a linked list through the directory.
#[derive(Clone, Copy, Debug)]
struct ScheduleQueue {
    first: QpLink,
    last: QpLink,
    /// The first queue pair whose context is not prefetched yet.
    cursor: QpLink,
    /// Number of queue pairs before the cursor.
    ahead: u32,
}

/// The pool.
#[derive(Debug)]
pub(super) struct ContextPool {
    constants: ContextPoolConfig,
    entries: Vec<DirectoryEntry>,
    slots: Vec<PoolSlot>,
    /// Number of pinned slots.
    pinned: usize,
    /// The clock hand: where the search for a victim continues.
    clock_hand: usize,
    ready: ScheduleQueue,
    fetches: Vec<ContextFetch>,
    fetches_free: Vec<u16>,
    /// Fetches that wait for a slot or for a free read, in order.
    requested: VecDeque<u16>,
    /// DMA reads in flight and when they end, in order.
    reading: VecDeque<(Time, u16)>,
    parked: Vec<Option<ParkedPacket>>,
    parked_free: Vec<u16>,
    parked_bytes: u32,
    /// When the link to the host's memory has carried all writes.
    pub write_free_at: Time,
}

impl ContextPool {
    pub fn new(constants: &ContextPoolConfig) -> Self {
        Self {
            constants: *constants,
            entries: Vec::new(),
            slots: Vec::new(),
            pinned: 0,
            clock_hand: 0,
            ready: ScheduleQueue { first: QpLink::NONE, last: QpLink::NONE, cursor: QpLink::NONE, ahead: 0 },
            fetches: Vec::new(),
            fetches_free: Vec::new(),
            requested: VecDeque::new(),
            reading: VecDeque::new(),
            parked: Vec::new(),
            parked_free: Vec::new(),
            parked_bytes: 0,
            write_free_at: Time::ZERO,
        }
    }

    pub const fn constants(&self) -> &ContextPoolConfig {
        &self.constants
    }

    /// Adds a queue pair, whose context is in the host's memory.
    pub fn add_queue_pair(&mut self) {
        self.entries.push(DirectoryEntry { index: NO_INDEX, deadline: 0, next: QpLink::NONE, flags: Flags::empty() });
    }

    pub fn is_resident(&self, i: usize) -> bool {
        self.entries[i].flags.contains(Flags::RESIDENT)
    }

    /// Returns when the next context arrives, or [`Time::MAX`] if none is being read.
    pub fn deadline(&self) -> Time {
        self.reading.front().map_or(Time::MAX, |(at, _)| *at)
    }

    // --- the schedule queue ---

    pub fn is_queued(&self, i: usize) -> bool {
        self.entries[i].flags.contains(Flags::QUEUED)
    }

    /// Ends the quantum of a queue pair.
    pub fn end_quantum(&mut self, i: usize) {
        self.entries[i].flags.remove(Flags::QUEUED);
    }

    /// Appends a queue pair to the schedule queue.
    pub fn push_ready(&mut self, i: usize) {
        let link = QpLink::of(i);
        self.entries[i].flags.insert(Flags::QUEUED);
        self.entries[i].next = QpLink::NONE;
        match self.ready.last.index() {
            Some(last) => self.entries[last].next = link,
            None => self.ready.first = link,
        }
        self.ready.last = link;
        if self.ready.cursor == QpLink::NONE {
            self.ready.cursor = link;
        }
    }

    /// Takes the first queue pair of the schedule queue if its context is on chip; the context remains pinned.
    pub fn pop_ready(&mut self) -> Option<usize> {
        let i = self.ready.first.index().filter(|i| self.ready.ahead > 0 && self.is_resident(*i))?;
        self.ready.first = self.entries[i].next;
        if self.ready.first == QpLink::NONE {
            self.ready.last = QpLink::NONE;
        }
        self.ready.ahead -= 1;
        Some(i)
    }

    /// Returns the next queue pair to prefetch the context of, if the schedule queue needs one.
    pub fn next_prefetch(&self) -> Option<usize> {
        self.ready.cursor.index().filter(|_| self.ready.ahead < self.constants.ahead)
    }

    /// Pins the context of that queue pair and advances the cursor.
    pub fn prefetched(&mut self, i: usize) {
        self.pin(i);
        self.ready.cursor = self.entries[i].next;
        self.ready.ahead += 1;
    }

    // --- slots ---

    /// Keeps a context that is on chip or being fetched, until it is unpinned.
    pub fn pin(&mut self, i: usize) {
        let DirectoryEntry { index, flags, .. } = self.entries[i];
        if flags.contains(Flags::RESIDENT) {
            let slot = &mut self.slots[usize::from(index)];
            self.pinned += usize::from(slot.pins == 0);
            slot.pins += 1;
        } else if flags.contains(Flags::FETCHING) {
            self.fetches[usize::from(index)].pins += 1;
        }
    }

    pub fn unpin(&mut self, i: usize) {
        assert!(self.is_resident(i), "a pinned context is on chip");
        let slot = &mut self.slots[usize::from(self.entries[i].index)];
        slot.pins -= 1;
        self.pinned -= usize::from(slot.pins == 0);
    }

    /// Marks a context as used and changed.
    pub fn mark_used(&mut self, i: usize) {
        let slot = &mut self.slots[usize::from(self.entries[i].index)];
        (slot.is_used, slot.is_changed) = (true, true);
    }

    /// Returns a slot without pins: an empty one, or one that was not used recently (second chance).
    fn find_victim(&mut self) -> Option<u16> {
        let slots = self.slots.len();
        if slots < self.constants.contexts as usize {
            self.slots.push(PoolSlot { qp: NO_QP, pins: 0, is_used: false, is_changed: false });
            return Some(slots as u16);
        }
        if self.pinned == slots {
            return None;
        }
        // The first round clears the used bits, so that the second round finds a slot.
        for _ in 0..2 * slots {
            let at = self.clock_hand;
            self.clock_hand = (at + 1) % slots;
            let slot = &mut self.slots[at];
            if slot.pins == 0 && !std::mem::take(&mut slot.is_used) {
                return Some(at as u16);
            }
        }
        None
    }

    // --- fetches ---

    /// Requests a context, if it is not requested already. Returns false if the maximum number of requests is reached.
    pub fn request_fetch(&mut self, i: usize) -> bool {
        if self.entries[i].flags.contains(Flags::FETCHING) {
            return true;
        }
        let fetch =
            ContextFetch { qp: i as u32, pins: 0, slot: NO_INDEX, parked_first: NO_INDEX, parked_last: NO_INDEX };
        let Some(index) = insert(&mut self.fetches, &mut self.fetches_free, self.constants.fetches, fetch) else {
            return false;
        };
        let entry = &mut self.entries[i];
        entry.flags.insert(Flags::FETCHING);
        entry.index = index;
        self.requested.push_back(index);
        true
    }

    /// Returns the next fetch that can begin, with its slot and the queue pair that is evicted from it.
    pub fn next_read(&mut self) -> Option<NextRead> {
        let fetch = *self.requested.front()?;
        if self.reading.len() >= self.constants.reads as usize {
            return None;
        }
        let slot = self.find_victim()?;
        self.requested.pop_front();
        let PoolSlot { qp, is_changed, .. } = self.slots[usize::from(slot)];
        let victim = (qp != NO_QP).then_some(qp as usize);
        self.pinned += 1;
        let qp = self.fetches[usize::from(fetch)].qp;
        self.slots[usize::from(slot)] = PoolSlot { qp, pins: 1, is_used: true, is_changed: false };
        self.fetches[usize::from(fetch)].slot = slot;
        if let Some(victim) = victim {
            let entry = &mut self.entries[victim];
            entry.flags.remove(Flags::RESIDENT);
            entry.index = NO_INDEX;
        }
        Some(NextRead { fetch, victim, is_changed })
    }

    /// Sets when the DMA read of a fetch ends, no earlier than reads that began before it.
    pub fn begin_read(&mut self, fetch: u16, at: Time) {
        let at = self.reading.back().map_or(at, |(last, _)| at.max(*last));
        self.reading.push_back((at, fetch));
    }

    /// Takes the next context that has arrived, with the first packet that waits for it.
    pub fn next_arrival(&mut self, now: Time) -> Option<(usize, u16)> {
        let fetch = pop_front_if(&mut self.reading, |(at, _)| *at <= now)?.1;
        self.fetches_free.push(fetch);
        let ContextFetch { qp, pins, slot, parked_first, .. } = self.fetches[usize::from(fetch)];
        let entry = &mut self.entries[qp as usize];
        entry.flags.remove(Flags::FETCHING | Flags::HAS_DEADLINE);
        entry.flags.insert(Flags::RESIDENT);
        entry.index = slot;
        let slot = &mut self.slots[usize::from(slot)];
        slot.pins = pins;
        self.pinned -= usize::from(pins == 0);
        Some((qp as usize, parked_first))
    }

    // --- parked packets ---

    /// Parks a packet until its context arrives. Returns false if there is no room.
    pub fn park(&mut self, i: usize, parked: ParkedPacket) -> bool {
        let bytes = self.parked_bytes.saturating_add(parked.bytes());
        if bytes > self.constants.parked_bytes || !self.request_fetch(i) {
            return false;
        }
        let max = self.constants.parked_packets;
        let Some(at) = insert(&mut self.parked, &mut self.parked_free, max, Some(parked)) else { return false };
        self.parked_bytes = bytes;
        let fetch = &mut self.fetches[usize::from(self.entries[i].index)];
        let before = std::mem::replace(&mut fetch.parked_last, at);
        match self.parked.get_mut(usize::from(before)) {
            Some(Some(before)) => before.next = at,
            _ => fetch.parked_first = at,
        }
        true
    }

    /// Takes a parked packet; also returns the next one.
    pub fn unpark(&mut self, at: u16) -> Option<(ParkedPacket, u16)> {
        let parked = self.parked.get_mut(usize::from(at))?.take()?;
        self.parked_free.push(at);
        self.parked_bytes -= parked.bytes();
        let next = parked.next;
        Some((parked, next))
    }

    // --- coarse deadlines ---

    /// Sets the deadline of a queue pair whose context is not on chip; returns the coarse time.
    pub fn set_deadline(&mut self, i: usize, now: Time, at: Time) -> Time {
        let soonest = now.ps() >> TICK_SHIFT;
        let tick = at.ps().div_ceil(1 << TICK_SHIFT).clamp(soonest + 1, soonest + TICKS_AHEAD_MAX);
        let entry = &mut self.entries[i];
        entry.deadline = tick as u16;
        entry.flags.insert(Flags::HAS_DEADLINE);
        Time::from_ps(tick << TICK_SHIFT)
    }

    pub fn clear_deadline(&mut self, i: usize) {
        self.entries[i].flags.remove(Flags::HAS_DEADLINE);
    }

    /// Returns whether the coarse deadline of a queue pair has passed.
    pub fn is_due(&self, i: usize, now: Time) -> bool {
        let DirectoryEntry { deadline, flags, .. } = self.entries[i];
        let tick = (now.ps() >> TICK_SHIFT) as u16;
        flags.contains(Flags::HAS_DEADLINE) && tick.wrapping_sub(deadline).cast_signed() >= 0
    }
}

/// A DMA read that can begin.
#[derive(Clone, Copy, Debug)]
pub(super) struct NextRead {
    pub fetch: u16,
    pub victim: Option<usize>,
    /// Whether the victim's context must be written back.
    pub is_changed: bool,
}

/// Stores a value in a free slot, if there is one.
fn insert<T>(slots: &mut Vec<T>, free: &mut Vec<u16>, max: u32, value: T) -> Option<u16> {
    if let Some(at) = free.pop() {
        slots[usize::from(at)] = value;
        return Some(at);
    }
    let at = slots.len();
    if at >= max as usize {
        return None;
    }
    slots.push(value);
    Some(at as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONSTANTS: ContextPoolConfig = ContextPoolConfig {
        contexts: 4,
        ahead: 2,
        fetches: 3,
        reads: 2,
        parked_packets: 2,
        parked_bytes: 1000,
        read_bytes: 1,
        write_bytes: 1,
    };

    fn pool(qps: usize) -> ContextPool {
        let mut pool = ContextPool::new(&CONSTANTS);
        (0..qps).for_each(|_| pool.add_queue_pair());
        pool
    }

    /// Completes all requested fetches.
    fn fetch_all(pool: &mut ContextPool) -> Vec<usize> {
        let mut fetched = Vec::new();
        while let Some(read) = pool.next_read() {
            pool.begin_read(read.fetch, Time::ZERO);
            fetched.extend(pool.next_arrival(Time::ZERO).map(|(i, _)| i));
        }
        fetched
    }

    #[test]
    fn a_pinned_context_stays_and_a_used_one_is_evicted_last() {
        let mut pool = pool(9);
        for i in 0..4 {
            assert!(pool.request_fetch(i));
            assert_eq!(fetch_all(&mut pool), [i]);
        }
        pool.pin(1);
        assert!(pool.request_fetch(7));
        let first = pool.next_read().unwrap();
        assert_eq!((first.victim, first.is_changed), (Some(0), false), "all were used, so the first one is evicted");
        pool.begin_read(first.fetch, Time::ZERO);
        assert_eq!(pool.next_arrival(Time::ZERO), Some((7, NO_INDEX)));
        pool.mark_used(2);
        assert!(pool.request_fetch(8));
        let second = pool.next_read().unwrap();
        assert_eq!((second.victim, second.is_changed), (Some(3), false), "1 is pinned, 2 was used again");
        assert!(pool.is_resident(1) && pool.is_resident(2) && !pool.is_resident(0) && !pool.is_resident(8));
        pool.unpin(1);
    }

    #[test]
    fn a_fetch_waits_while_all_slots_are_pinned() {
        let mut pool = pool(9);
        for i in 0..4 {
            assert!(pool.request_fetch(i));
            pool.pin(i);
            assert_eq!(fetch_all(&mut pool), [i]);
        }
        assert!(pool.request_fetch(5));
        assert!(pool.next_read().is_none());
        pool.unpin(2);
        assert_eq!(pool.next_read().unwrap().victim, Some(2));
    }

    #[test]
    fn queue_pairs_are_scheduled_in_order_and_only_with_a_context() {
        let mut pool = pool(9);
        [3, 5, 6].into_iter().for_each(|i| pool.push_ready(i));
        assert_eq!(pool.pop_ready(), None);
        for i in [3, 5] {
            assert_eq!(pool.next_prefetch(), Some(i));
            assert!(pool.request_fetch(i));
            pool.prefetched(i);
        }
        assert_eq!(pool.next_prefetch(), None, "the prefetch limit is reached");
        assert_eq!(fetch_all(&mut pool), [3, 5]);
        assert_eq!((pool.pop_ready(), pool.next_prefetch()), (Some(3), Some(6)));
        assert!(pool.is_queued(3));
        pool.end_quantum(3);
        pool.push_ready(3);
        assert_eq!(pool.pop_ready(), Some(5));
        assert_eq!(pool.pop_ready(), None, "the context of 6 was not requested yet");
    }

    #[test]
    fn packets_are_parked_in_order_and_bounded() {
        use crate::wire::{Operation, Psn, QpNumber, Service};
        let mut pool = pool(2);
        let header = |psn| Header::bare(Service::Rc, Operation::WriteOnly, QpNumber(2), Psn::new(psn));
        let parked = |psn| ParkedPacket::new(NicAddress(0), &header(psn), false, None);
        assert!(pool.park(1, parked(1)) && pool.park(1, parked(2)) && !pool.park(1, parked(3)));
        let read = pool.next_read().unwrap();
        pool.begin_read(read.fetch, Time::ZERO);
        let (i, first) = pool.next_arrival(Time::ZERO).unwrap();
        assert_eq!(i, 1);
        let (one, next) = pool.unpark(first).unwrap();
        let (two, end) = pool.unpark(next).unwrap();
        assert_eq!((one.header.psn.get(), two.header.psn.get(), end), (1, 2, NO_INDEX));
        assert_eq!(pool.parked_bytes, 0);
        let large = Header { payload_bytes: 1000, ..header(4) };
        assert!(
            !pool.park(0, ParkedPacket::new(NicAddress(0), &large, false, None)),
            "the buffer has too few bytes left"
        );
    }

    #[test]
    fn a_coarse_deadline_is_never_early_and_wraps() {
        let mut pool = pool(1);
        for now in [0, 5 << 40, 0xFFFF_u64 << TICK_SHIFT] {
            let (now, at) = (Time::from_ps(now), Time::from_ps(now + 123_456_789));
            let coarse = pool.set_deadline(0, now, at);
            assert!(coarse >= at && coarse.ps() - at.ps() < 1 << TICK_SHIFT);
            assert!(!pool.is_due(0, now) && pool.is_due(0, coarse));
        }
        let far = pool.set_deadline(0, Time::ZERO, Time::MAX);
        assert_eq!(far.ps() >> TICK_SHIFT, TICKS_AHEAD_MAX);
        pool.clear_deadline(0);
        assert!(!pool.is_due(0, far));
    }
}
