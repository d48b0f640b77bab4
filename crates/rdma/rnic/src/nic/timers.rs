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

impl<M: HostMemory> Nic<M> {
    /// Looks at the queue pair at this time, or before.
    pub(super) fn arm_timer(&mut self, i: usize, at: Time) {
        let context = &mut self.contexts[i];
        if at < context.timer_at {
            context.timer_at = at;
            self.timers.push(at, i);
        }
    }

    /// An entry of this queue pair is due; perhaps another one replaced it.
    pub(super) fn timer_due(&mut self, now: Time, i: usize) {
        if self.nonresident_timer_due(now, i) || self.contexts[i].timer_at > now {
            return;
        }
        self.mark_context_used(i);
        let context = &mut self.contexts[i];
        context.timer_at = Time::MAX;
        if context.retransmit_at <= now {
            self.retransmit_timer_expired(now, i);
        }
        self.reordering_timer_due(now, i);
        self.activate(now, i);
        let retransmit_at = self.contexts[i].retransmit_at;
        if retransmit_at < Time::MAX {
            self.arm_timer(i, retransmit_at);
        }
    }
}
