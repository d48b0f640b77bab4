//! What happens next.
//!
//! The queue is a hierarchy of wheels over a short sorted list. The list holds everything up to a limit; what is later
//! lies, unsorted, in slots: 64 of them a level, each level 64 times as wide as the one below it, so that an event's
//! slot is a matter of its time's bits. When the list has run out, the next slot is sorted into it if it holds few
//! events, and spread over the level below if it holds many. So slots are as narrow as the events are dense, whatever
//! the simulation's pace: each event is moved a few times in all, and compared with a few others. As long as there are
//! few events at all, everything is in the list, and no wheel is ever made.
//!
//! Events of the same time need no number to keep their order: they are always in the same slot, every slot and the
//! list take new ones at their end, and whatever is moved or sorted keeps the order that it had.
//!
//! `cargo bench -p sim` compares it with a binary heap on mixes of events.

use std::collections::VecDeque;

use crate::Time;

/// Bits of a time that one level tells apart.
const LEVEL_BITS: u32 = 6;
/// Slots of a level.
const SLOTS: usize = 1 << LEVEL_BITS;
/// Levels that tell all 64 bits apart.
const LEVELS: u32 = u64::BITS.div_ceil(LEVEL_BITS);
/// Events of a slot that are sorted at once, at most; more are spread over the level below.
const SORTED_MAX: usize = 32;
/// Events in the list, at most, while some of them can be put into slots.
const NEAR_MAX: usize = 2 * SORTED_MAX;

/// Events in order of their time; those of the same time in the order in which they were scheduled.
#[derive(Clone, Debug)]
pub struct EventQueue<E> {
    /// In order: all events up to and with the end of the open slot.
    near: VecDeque<Entry<E>>,
    /// The last picosecond of the open slot.
    near_last: u64,
    /// The open slot begins here; slots of events are told apart by how their times differ from this.
    base: u64,
    /// The level of the open slot; [`LEVELS`] when it is all of time.
    open: u32,
    /// By level and slot; empty until there are many events.
    slots: Vec<Vec<Entry<E>>>,
    /// By level: which slots hold anything.
    occupied: [u64; LEVELS as usize],
    /// Events in slots.
    far: usize,
    /// An empty list with room in it, for spreading without allocation.
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
            near: VecDeque::new(),
            near_last: u64::MAX,
            base: 0,
            open: LEVELS,
            slots: Vec::new(),
            occupied: [0; LEVELS as usize],
            far: 0,
            spare: Vec::new(),
        }
    }
}

/// Where bits that differ put a time: which level, as the highest of them says.
fn level_of(differing: u64) -> u32 {
    (u64::BITS - 1 - differing.leading_zeros()) / LEVEL_BITS
}

fn slot_of(at: u64, level: u32) -> usize {
    (at >> (level * LEVEL_BITS)) as usize % SLOTS
}

/// The bits of a time below those that choose its slot of this level.
fn mask_below(level: u32) -> u64 {
    if level >= LEVELS { u64::MAX } else { (1 << (level * LEVEL_BITS)) - 1 }
}

impl<E> EventQueue<E> {
    /// An empty queue.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets `event` happen at `at`.
    pub fn schedule(&mut self, at: Time, event: E) {
        let entry = Entry { at, event };
        if at.ps() > self.near_last {
            self.put_far(entry);
        } else {
            self.put_near(entry);
        }
    }

    /// The earliest event and its time; it is still to come.
    pub fn peek(&self) -> Option<(Time, &E)> {
        let entry = match self.near.front() {
            Some(entry) => Some(entry),
            None => self.earliest_slot().and_then(|slot| self.slots[slot].iter().min_by_key(|entry| entry.at)),
        };
        entry.map(|entry| (entry.at, &entry.event))
    }

    /// Lets `event` happen at `at` in place of the earliest event, which is then past.
    pub fn replace_next(&mut self, at: Time, event: E) {
        self.next_event();
        self.schedule(at, event);
    }

    /// The earliest event and its time; it is then past.
    pub fn next_event(&mut self) -> Option<(Time, E)> {
        if self.near.is_empty() && self.far > 0 {
            self.open_next();
        }
        self.near.pop_front().map(|entry| (entry.at, entry.event))
    }

    /// When the earliest event happens.
    pub fn next_time(&self) -> Option<Time> {
        self.peek().map(|(at, _)| at)
    }

    /// Events still to come.
    pub fn len(&self) -> usize {
        self.near.len() + self.far
    }

    /// Whether nothing is to come.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory that it holds, without what events point to.
    pub fn memory_bytes(&self) -> usize {
        let entries =
            self.near.capacity() + self.spare.capacity() + self.slots.iter().map(Vec::capacity).sum::<usize>();
        entries * size_of::<Entry<E>>() + self.slots.capacity() * size_of::<Vec<Entry<E>>>()
    }

    fn put_near(&mut self, entry: Entry<E>) {
        // Most events are later than all that are near.
        let is_last = self.near.back().is_none_or(|last| last.at <= entry.at);
        if is_last {
            self.near.push_back(entry);
        } else {
            let index = self.near.partition_point(|other| other.at <= entry.at);
            self.near.insert(index, entry);
        }
        if self.near.len() > NEAR_MAX {
            self.narrow();
        }
    }

    /// Puts an event into its slot, as seen from the base: a time after the open slot.
    fn put_far(&mut self, entry: Entry<E>) {
        let level = level_of(entry.at.ps() ^ self.base);
        let slot = slot_of(entry.at.ps(), level);
        self.occupied[level as usize] |= 1 << slot;
        self.slots[level as usize * SLOTS + slot].push(entry);
        self.far += 1;
    }

    /// Which slot holds the earliest of the far events.
    fn earliest_slot(&self) -> Option<usize> {
        let level = self.occupied.iter().position(|slots| *slots != 0)?;
        Some(level * SLOTS + self.occupied[level].trailing_zeros() as usize)
    }

    /// Lets the slot at `level` that begins at `base` be the open one.
    fn open_at(&mut self, base: u64, level: u32) {
        (self.base, self.open, self.near_last) = (base, level, base | mask_below(level));
    }

    /// Too many events are near: the later ones go to slots of a level below the open one, where their times differ.
    fn narrow(&mut self) {
        let (Some(first), Some(last)) = (self.near.front(), self.near.back()) else { return };
        let first = first.at.ps();
        // What is before the open slot was scheduled into the past; it can only stay.
        if first < self.base || first == last.at.ps() {
            return;
        }
        let level = level_of(first ^ last.at.ps());
        if self.slots.is_empty() {
            self.slots.resize_with(LEVELS as usize * SLOTS, Vec::new);
        }
        self.open_at(first & !mask_below(level), level);
        let kept = self.near.partition_point(|entry| entry.at.ps() <= self.near_last);
        let mut later = std::mem::take(&mut self.spare);
        later.extend(self.near.drain(kept..));
        later.drain(..).for_each(|entry| self.put_far(entry));
        self.spare = later;
    }

    /// Nothing is near: sorts the earliest slot into the list, after spreading it as far as it takes, and those behind
    /// it while they fit.
    fn open_next(&mut self) {
        if self.far <= SORTED_MAX {
            return self.open_all();
        }
        for _ in 0..LEVELS {
            let Some(index) = self.earliest_slot() else { return };
            let (level, slot) = ((index / SLOTS) as u32, (index % SLOTS) as u64);
            let above = self.base & !mask_below(level + 1);
            self.open_at(above | slot << (level * LEVEL_BITS), level);
            if level == 0 || self.slots[index].len() <= SORTED_MAX {
                self.near.clear(); // its memory is used from the beginning
                return self.open_slots(level, slot);
            }
            self.occupied[level as usize] &= !(1 << slot);
            self.far -= self.slots[index].len();
            self.spread(index, level - 1);
        }
    }

    /// Sorts this slot into the list, and as many behind it as fit.
    fn open_slots(&mut self, level: u32, mut slot: u64) {
        loop {
            self.sort_in(level as usize * SLOTS + slot as usize);
            let behind = self.occupied[level as usize];
            if behind == 0 {
                return;
            }
            slot = u64::from(behind.trailing_zeros());
            if self.near.len() + self.slots[level as usize * SLOTS + slot as usize].len() > SORTED_MAX {
                return;
            }
            self.open_at(self.base & !mask_below(level + 1) | slot << (level * LEVEL_BITS), level);
        }
    }

    /// Moves a slot's events to the end of the list, in order.
    fn sort_in(&mut self, index: usize) {
        let begin = self.near.len();
        self.near.extend(self.slots[index].drain(..));
        self.occupied[index / SLOTS] &= !(1 << (index % SLOTS));
        self.far -= self.near.len() - begin;
        self.near.make_contiguous()[begin..].sort_by_key(|entry| entry.at);
    }

    /// Few events are left: all of them come into the list, and all of time is near.
    fn open_all(&mut self) {
        while let Some(index) = self.earliest_slot() {
            self.near.extend(self.slots[index].drain(..));
            self.occupied[index / SLOTS] &= !(1 << (index % SLOTS));
        }
        self.far = 0;
        self.open_at(0, LEVELS);
        self.near.make_contiguous().sort_by_key(|entry| entry.at);
    }

    /// Spreads the events of a slot, whose beginning is the base, over the level below.
    fn spread(&mut self, index: usize, level: u32) {
        let mut entries = std::mem::replace(&mut self.slots[index], std::mem::take(&mut self.spare));
        self.far += entries.len();
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

    /// What a queue is, in the plainest words.
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

    /// A step: schedule so many events at this span, shifted left so far, after now; then take so many.
    type Step = (usize, u64, u32, usize);

    fn agree(steps: &[Step]) -> Result<(), TestCaseError> {
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
        fn replacing_is_taking_and_scheduling(times in proptest::collection::vec(0..9_u64, 1..99)) {
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
        fn a_simulation_meets_its_events_as_a_plain_sorted_map_has_them(
            steps in proptest::collection::vec((0..90_usize, 0..70_u64, 0..30_u32, 0..90_usize), 0..60)
        ) {
            agree(&steps)?;
        }

        #[test]
        fn events_may_be_scheduled_before_the_last_one_that_was_taken(
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
    fn the_end_of_time_is_a_time() {
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
