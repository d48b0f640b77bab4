//! The future event list of a simulation: a hierarchical timing wheel in front of a short sorted list.
//!
//! The sorted list holds all events up to a limit. Later events lie unsorted in the slots of the wheels: each level has
//! 64 slots, and each slot is 64 times as wide as a slot of the level below, so that the bits of an event's time select
//! its slot. When the list is empty, the earliest slot is sorted into it if it holds few events, and spread over the
//! level below if it holds many. Slots therefore become as narrow as the events are dense, for any time scale of the
//! simulation: each event is moved a few times in total and compared with a few others. While there are few events, all
//! of them are in the list and no wheel is allocated.
//!
//! Events of the same time need no sequence number to keep their order: they are always in the same slot, every slot
//! and the list append new events at the end, and moving and sorting are stable.
//!
//! `cargo bench -p sim` compares it with a binary heap on several mixes of events.

use std::collections::VecDeque;

use crate::Time;

/// Number of bits of a time that select the slot of one level.
const LEVEL_BITS: u32 = 6;
/// Number of slots of a level.
const SLOTS: usize = 1 << LEVEL_BITS;
/// Number of levels that together cover all 64 bits of a time.
const LEVELS: u32 = u64::BITS.div_ceil(LEVEL_BITS);
/// Maximum number of events of a slot that are sorted at once; a slot with more is spread over the level below.
const SORTED_MAX: usize = 32;
/// Maximum number of events in the sorted list, as long as some of them can be moved into slots.
const LIST_MAX: usize = 2 * SORTED_MAX;

/// A queue of events ordered by time; events of the same time keep the order in which they were scheduled.
#[derive(Clone, Debug)]
pub struct EventQueue<E> {
    /// All events up to the end of the open slot, in order.
    sorted: VecDeque<Entry<E>>,
    /// The last picosecond of the open slot.
    sorted_last: u64,
    /// The start of the open slot. The level of an event in the wheels is given by the highest bit in which its time
    /// differs from this.
    open_base: u64,
    /// The level of the open slot, or [`LEVELS`] if the open slot is all of time.
    open_level: u32,
    /// The wheels, by level and slot; empty until there are many events.
    slots: Vec<Vec<Entry<E>>>,
    /// For each level, a bitmap of the slots that hold events.
    occupied: [u64; LEVELS as usize],
    /// Number of events in the wheels.
    in_wheels: usize,
    /// An empty vector with capacity, so that spreading a slot does not allocate.
    spare: Vec<Entry<E>>,
}

#[derive(Clone, Debug)]
struct Entry<E> {
    at: Time,
    event: E,
}

impl<E> Default for EventQueue<E> {
    fn default() -> Self {
        Self {
            sorted: VecDeque::new(),
            sorted_last: u64::MAX,
            open_base: 0,
            open_level: LEVELS,
            slots: Vec::new(),
            occupied: [0; LEVELS as usize],
            in_wheels: 0,
            spare: Vec::new(),
        }
    }
}

/// Returns the level that is selected by the highest bit in which two times differ.
fn level_of(differing: u64) -> u32 {
    (u64::BITS - 1 - differing.leading_zeros()) / LEVEL_BITS
}

fn slot_of(at: u64, level: u32) -> usize {
    (at >> (level * LEVEL_BITS)) as usize % SLOTS
}

/// Returns a mask of the bits of a time below those that select its slot at `level`.
fn mask_below(level: u32) -> u64 {
    if level >= LEVELS { u64::MAX } else { (1 << (level * LEVEL_BITS)) - 1 }
}

impl<E> EventQueue<E> {
    /// Creates an empty queue.
    pub fn new() -> Self {
        Self::default()
    }

    /// Schedules `event` at `at`.
    pub fn schedule(&mut self, at: Time, event: E) {
        let entry = Entry { at, event };
        if at.ps() > self.sorted_last {
            self.insert_into_wheels(entry);
        } else {
            self.insert_sorted(entry);
        }
    }

    /// Returns the earliest event and its time without removing it.
    pub fn peek(&self) -> Option<(Time, &E)> {
        let entry = match self.sorted.front() {
            Some(entry) => Some(entry),
            None => self.earliest_slot().and_then(|slot| self.slots[slot].iter().min_by_key(|entry| entry.at)),
        };
        entry.map(|entry| (entry.at, &entry.event))
    }

    /// Removes the earliest event and schedules `event` at `at`.
    pub fn replace_next(&mut self, at: Time, event: E) {
        self.next_event();
        self.schedule(at, event);
    }

    /// Removes the earliest event and returns it with its time.
    pub fn next_event(&mut self) -> Option<(Time, E)> {
        if self.sorted.is_empty() && self.in_wheels > 0 {
            self.refill();
        }
        self.sorted.pop_front().map(|entry| (entry.at, entry.event))
    }

    /// Returns the time of the earliest event.
    pub fn next_time(&self) -> Option<Time> {
        self.peek().map(|(at, _)| at)
    }

    /// Returns the number of scheduled events.
    pub fn len(&self) -> usize {
        self.sorted.len() + self.in_wheels
    }

    /// Returns whether no event is scheduled.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes of memory that the queue has allocated, without what the events point to.
    pub fn memory_bytes(&self) -> usize {
        let entries =
            self.sorted.capacity() + self.spare.capacity() + self.slots.iter().map(Vec::capacity).sum::<usize>();
        entries * size_of::<Entry<E>>() + self.slots.capacity() * size_of::<Vec<Entry<E>>>()
    }

    fn insert_sorted(&mut self, entry: Entry<E>) {
        // Most events are later than all events in the list.
        let is_last = self.sorted.back().is_none_or(|last| last.at <= entry.at);
        if is_last {
            self.sorted.push_back(entry);
        } else {
            let index = self.sorted.partition_point(|other| other.at <= entry.at);
            self.sorted.insert(index, entry);
        }
        if self.sorted.len() > LIST_MAX {
            self.spill();
        }
    }

    /// Inserts an event that is later than the open slot into the wheels.
    fn insert_into_wheels(&mut self, entry: Entry<E>) {
        let level = level_of(entry.at.ps() ^ self.open_base);
        let slot = slot_of(entry.at.ps(), level);
        self.occupied[level as usize] |= 1 << slot;
        self.slots[level as usize * SLOTS + slot].push(entry);
        self.in_wheels += 1;
    }

    /// Returns the index of the slot that holds the earliest event of the wheels.
    fn earliest_slot(&self) -> Option<usize> {
        let level = self.occupied.iter().position(|slots| *slots != 0)?;
        Some(level * SLOTS + self.occupied[level].trailing_zeros() as usize)
    }

    /// Makes the slot at `level` that starts at `open_base` the open slot.
    fn set_open(&mut self, open_base: u64, level: u32) {
        (self.open_base, self.open_level, self.sorted_last) = (open_base, level, open_base | mask_below(level));
    }

    /// Moves the later part of an overfull list into slots of a level below the open one, where the times differ.
    fn spill(&mut self) {
        let (Some(first), Some(last)) = (self.sorted.front(), self.sorted.back()) else { return };
        let first = first.at.ps();
        // Events before the open slot were scheduled in the past and can only stay in the list.
        if first < self.open_base || first == last.at.ps() {
            return;
        }
        let level = level_of(first ^ last.at.ps());
        if self.slots.is_empty() {
            self.slots.resize_with(LEVELS as usize * SLOTS, Vec::new);
        }
        self.set_open(first & !mask_below(level), level);
        let kept = self.sorted.partition_point(|entry| entry.at.ps() <= self.sorted_last);
        let mut later = std::mem::take(&mut self.spare);
        later.extend(self.sorted.drain(kept..));
        later.drain(..).for_each(|entry| self.insert_into_wheels(entry));
        self.spare = later;
    }

    /// Refills the empty list: spreads the earliest slot as far as needed, sorts it into the list, and then appends the
    /// following slots while they fit.
    fn refill(&mut self) {
        if self.in_wheels <= SORTED_MAX {
            return self.collect_all();
        }
        for _ in 0..LEVELS {
            let Some(index) = self.earliest_slot() else { return };
            let (level, slot) = ((index / SLOTS) as u32, (index % SLOTS) as u64);
            let above = self.open_base & !mask_below(level + 1);
            self.set_open(above | slot << (level * LEVEL_BITS), level);
            if level == 0 || self.slots[index].len() <= SORTED_MAX {
                self.sorted.clear(); // its memory is used from the beginning
                return self.sort_slots(level, slot);
            }
            self.occupied[level as usize] &= !(1 << slot);
            self.in_wheels -= self.slots[index].len();
            self.spread(index, level - 1);
        }
    }

    /// Sorts `slot` into the list, and as many following slots as fit.
    fn sort_slots(&mut self, level: u32, mut slot: u64) {
        loop {
            self.sort_slot(level as usize * SLOTS + slot as usize);
            let behind = self.occupied[level as usize];
            if behind == 0 {
                return;
            }
            slot = u64::from(behind.trailing_zeros());
            if self.sorted.len() + self.slots[level as usize * SLOTS + slot as usize].len() > SORTED_MAX {
                return;
            }
            self.set_open(self.open_base & !mask_below(level + 1) | slot << (level * LEVEL_BITS), level);
        }
    }

    /// Moves the events of a slot to the end of the list, in order.
    fn sort_slot(&mut self, index: usize) {
        let begin = self.sorted.len();
        self.sorted.extend(self.slots[index].drain(..));
        self.occupied[index / SLOTS] &= !(1 << (index % SLOTS));
        self.in_wheels -= self.sorted.len() - begin;
        self.sorted.make_contiguous()[begin..].sort_by_key(|entry| entry.at);
    }

    /// Moves the few remaining events into the list, and makes all of time the open slot.
    fn collect_all(&mut self) {
        while let Some(index) = self.earliest_slot() {
            self.sorted.extend(self.slots[index].drain(..));
            self.occupied[index / SLOTS] &= !(1 << (index % SLOTS));
        }
        self.in_wheels = 0;
        self.set_open(0, LEVELS);
        self.sorted.make_contiguous().sort_by_key(|entry| entry.at);
    }

    /// Spreads the events of a slot, which starts at the base, over the level below.
    fn spread(&mut self, index: usize, level: u32) {
        let mut entries = std::mem::replace(&mut self.slots[index], std::mem::take(&mut self.spare));
        self.in_wheels += entries.len();
        for entry in entries.drain(..) {
            let slot = slot_of(entry.at.ps(), level);
            self.occupied[level as usize] |= 1 << slot;
            self.slots[level as usize * SLOTS + slot].push(entry);
        }
        self.spare = entries;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// The reference model: a map that is sorted by time and sequence number.
    #[derive(Default)]
    struct Model {
        events: BTreeMap<(u64, u64), u64>,
        scheduled: u64,
    }

    impl Model {
        fn schedule(&mut self, at: u64) -> u64 {
            self.scheduled += 1;
            self.events.insert((at, self.scheduled), self.scheduled);
            self.scheduled
        }

        fn next(&mut self) -> Option<(Time, u64)> {
            self.events.pop_first().map(|((at, _), event)| (Time::from_ps(at), event))
        }
    }

    /// One step: the number of events to schedule, their distance from now, the left shift of that distance, and the
    /// number of events to take afterwards.
    type Step = (usize, u64, u32, usize);

    fn check_against_model(steps: &[Step]) -> Result<(), TestCaseError> {
        let (mut queue, mut model, mut now) = (EventQueue::new(), Model::default(), 0);
        for &(scheduled, span, shift, taken) in steps {
            for index in 0..scheduled as u64 {
                let at = now + ((span + index * 7 % 5) << shift);
                queue.schedule(Time::from_ps(at), model.schedule(at));
            }
            for _ in 0..taken {
                let peeked = queue.peek().map(|(at, event)| (at, *event));
                let next = queue.next_event();
                prop_assert_eq!(peeked, next);
                prop_assert_eq!(next, model.next());
                now = next.map_or(now, |(at, _)| at.ps());
            }
            prop_assert_eq!(queue.len(), model.events.len());
        }
        while let Some(next) = model.next() {
            prop_assert_eq!(queue.next_event(), Some(next));
        }
        prop_assert!(queue.is_empty() && queue.next_event().is_none());
        Ok(())
    }

    proptest! {
        #[test]
        fn events_come_in_order_of_time_and_then_of_scheduling(times in proptest::collection::vec(0..20_u64, 0..200)) {
            let mut queue = EventQueue::new();
            for (number, time) in times.iter().enumerate() {
                queue.schedule(Time::from_ps(*time), number);
            }
            prop_assert_eq!(queue.len(), times.len());
            let mut expected: Vec<(u64, usize)> = times.iter().copied().zip(0..).collect();
            expected.sort_unstable();
            for (time, number) in expected {
                prop_assert_eq!(queue.next_time(), Some(Time::from_ps(time)));
                prop_assert_eq!(queue.next_event(), Some((Time::from_ps(time), number)));
            }
            prop_assert!(queue.is_empty());
        }

        #[test]
        fn replacing_equals_taking_and_scheduling(times in proptest::collection::vec(0..9_u64, 1..99)) {
            let (mut replaced, mut scheduled) = (EventQueue::new(), EventQueue::new());
            for (number, time) in times.iter().enumerate() {
                replaced.schedule(Time::from_ps(*time), number);
                scheduled.schedule(Time::from_ps(*time), number);
            }
            for (number, time) in times.iter().enumerate() {
                let (at, _) = scheduled.next_event().unwrap();
                prop_assert_eq!(replaced.peek().unwrap().0, at);
                let later = Time::from_ps(at.ps() + time);
                replaced.replace_next(later, 1000 + number);
                scheduled.schedule(later, 1000 + number);
            }
            for _ in &times {
                prop_assert_eq!(replaced.next_event(), scheduled.next_event());
            }
        }

        #[test]
        fn a_simulation_takes_its_events_in_the_order_of_a_sorted_map(
            steps in proptest::collection::vec((0..90_usize, 0..70_u64, 0..30_u32, 0..90_usize), 0..60)
        ) {
            check_against_model(&steps)?;
        }

        #[test]
        fn events_may_be_scheduled_before_the_last_event_taken(
            times in proptest::collection::vec((0..1_u64 << 40, proptest::bool::ANY), 0..900)
        ) {
            let (mut queue, mut model) = (EventQueue::new(), Model::default());
            for (at, takes) in times {
                queue.schedule(Time::from_ps(at), model.schedule(at));
                if takes {
                    prop_assert_eq!(queue.next_event(), model.next());
                }
            }
            while let Some(next) = model.next() {
                prop_assert_eq!(queue.next_event(), Some(next));
            }
        }
    }

    #[test]
    fn the_latest_time_can_be_scheduled() {
        let mut queue = EventQueue::new();
        for index in 0..10_000_u64 {
            queue.schedule(Time::from_ps(u64::MAX - index % 3), index);
            queue.schedule(Time::from_ps(index), index);
        }
        let times: Vec<Time> = std::iter::from_fn(|| queue.next_event()).map(|(at, _)| at).collect();
        assert!(times.len() == 20_000 && times.is_sorted());
        assert_eq!(times.last(), Some(&Time::MAX));
    }

    #[test]
    fn many_events_of_one_time_keep_their_order() {
        let mut queue = EventQueue::new();
        (0..5_000).for_each(|index| queue.schedule(Time::from_ps(1 << 50), index));
        (0..5_000).for_each(|index| assert_eq!(queue.next_event(), Some((Time::from_ps(1 << 50), index))));
    }
}
