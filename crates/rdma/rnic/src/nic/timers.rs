//! What queue pairs wait for: at most one live entry for each, looked at when it is due and put off when it is not.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use sim::Time;

/// When to look at which queue pair.
#[derive(Debug, Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<(Time, u32)>>,
}

impl Timers {
    /// When something is due; [`Time::MAX`] when nothing is.
    pub fn deadline(&self) -> Time {
        self.heap.peek().map_or(Time::MAX, |Reverse((at, _))| *at)
    }

    /// Looks at a queue pair at this time.
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
