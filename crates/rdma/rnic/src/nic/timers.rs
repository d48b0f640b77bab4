//! The timers of queue pairs. Each queue pair has at most one live entry; an entry that is due too early is set again.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use sim::Time;

/// A heap of deadlines and queue pairs.
#[derive(Debug, Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<(Time, u32)>>,
}

impl Timers {
    /// Returns the next deadline, or [`Time::MAX`] if there is none.
    pub fn deadline(&self) -> Time {
        self.heap.peek().map_or(Time::MAX, |Reverse((at, _))| *at)
    }

    /// Adds an entry for a queue pair.
    pub fn push(&mut self, at: Time, i: usize) {
        self.heap.push(Reverse((at, i as u32)));
    }

    pub fn next_due(&mut self, now: Time) -> Option<usize> {
        let Reverse((at, _)) = self.heap.peek()?;
        if *at > now {
            return None;
        }
        self.heap.pop().map(|Reverse((_, qp))| qp as usize)
    }
}
