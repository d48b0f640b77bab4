//! What queue pairs wait for: at most one live entry for each, looked at when it is due and put off when it is not.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use sim::Time;

use super::{HostMemory, Nic};

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
    pub fn look_at(&mut self, at: Time, i: usize) {
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

impl<M: HostMemory> Nic<M> {
    /// Looks at the queue pair at this time, or before.
    pub(super) fn arm(&mut self, i: usize, at: Time) {
        let context = &mut self.contexts[i];
        if at < context.armed_at {
            context.armed_at = at;
            self.timers.look_at(at, i);
        }
    }

    /// An entry of this queue pair is due; perhaps another one replaced it.
    pub(super) fn timer_due(&mut self, now: Time, i: usize) {
        if self.is_time_for_away(now, i) || self.contexts[i].armed_at > now {
            return;
        }
        self.context_used(i);
        let context = &mut self.contexts[i];
        context.armed_at = Time::MAX;
        if context.retransmit_at <= now {
            self.patience_ends(now, i);
        }
        self.reordering_due(now, i);
        self.activate(now, i);
        let retransmit_at = self.contexts[i].retransmit_at;
        if retransmit_at < Time::MAX {
            self.arm(i, retransmit_at);
        }
    }
}
