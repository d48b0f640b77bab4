//! What happens next.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use crate::Time;

/// Events in order of their time; those of the same time in the order in which they were scheduled.
#[derive(Clone, Debug)]
pub struct EventQueue<E> {
    heap: BinaryHeap<Entry<E>>,
    scheduled: u64,
}

#[derive(Clone, Debug)]
struct Entry<E> {
    at: Time,
    number: u64,
    event: E,
}

impl<E> Entry<E> {
    fn key(&self) -> (Time, u64) {
        (self.at, self.number)
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    /// Backwards, for the standard heap gives out its largest element first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.key().cmp(&self.key())
    }
}

impl<E> Default for EventQueue<E> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), scheduled: 0 }
    }
}

impl<E> EventQueue<E> {
    /// An empty queue.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets `event` happen at `at`.
    pub fn schedule(&mut self, at: Time, event: E) {
        self.heap.push(Entry { at, number: self.scheduled, event });
        self.scheduled += 1;
    }

    /// The earliest event and its time; it is still to come.
    pub fn peek(&self) -> Option<(Time, &E)> {
        self.heap.peek().map(|entry| (entry.at, &entry.event))
    }

    /// Lets `event` happen at `at` in place of the earliest event, which is then past: quicker than one by one.
    pub fn replace_next(&mut self, at: Time, event: E) {
        let entry = Entry { at, number: self.scheduled, event };
        self.scheduled += 1;
        if let Some(mut earliest) = self.heap.peek_mut() {
            *earliest = entry;
            return;
        }
        self.heap.push(entry);
    }

    /// The earliest event and its time; it is then past.
    pub fn next_event(&mut self) -> Option<(Time, E)> {
        self.heap.pop().map(|entry| (entry.at, entry.event))
    }

    /// When the earliest event happens.
    pub fn next_time(&self) -> Option<Time> {
        self.heap.peek().map(|entry| entry.at)
    }

    /// Events still to come.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// Whether nothing is to come.
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
    }
}
