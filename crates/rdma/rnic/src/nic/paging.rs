//! Moves contexts between the host's memory and the [`ContextPool`] on chip.
//!
//! | who needs a context | what happens while it is not on chip |
//! |---|---|
//! | the scheduler | it is prefetched while earlier queue pairs send; the first one waits |
//! | a received packet | it waits in the receive buffer, as do later packets of the same queue pair |
//! | a timer | a coarse deadline on chip causes the fetch |
//! | the slow path | a context stays pinned while a header to software or a command from software is in flight |
//!
//! A victim that was changed is written back. A later read of the same context returns the written data, because in
//! PCIe a read does not overtake a posted write. Verbs that create or modify queue pairs are executed by the driver:
//! they access a context wherever it is, and their time is not modelled.

use sim::Time;

use super::engine::Nic;
use super::memory::HostMemory;
use super::pool::{ContextPool, NO_INDEX, ParkedPacket};
use crate::verbs::NicAddress;
use crate::wire::{Header, QpNumber};

impl<M: HostMemory> Nic<M> {
    /// Lets the driver access a context, on chip or not.
    pub(super) fn by_driver<R>(&mut self, now: Time, i: usize, operation: impl FnOnce(&mut Self) -> R) -> R {
        let was_nonresident = self.contexts.is_nonresident(i);
        self.contexts.set_nonresident(i, false);
        let result = operation(self);
        if was_nonresident {
            self.save_deadline(now, i);
            self.contexts.set_nonresident(i, true);
        }
        result
    }

    /// Parks a packet whose context is not on chip, or drops it if there is no room. Returns false if the context is on
    /// chip. Without `payload`, only the headers arrived.
    pub(super) fn park_if_nonresident(
        &mut self,
        now: Time,
        source: NicAddress,
        header: &Header,
        is_marked: bool,
        payload: Option<&M::Payload>,
    ) -> bool {
        let Some(i) = self.nonresident_index(header.destination) else {
            self.counters.cache_hits += u64::from(self.pool.is_some());
            return false;
        };
        self.counters.cache_misses += 1;
        let copy = payload.map(|payload| M::copy_payload(payload, header.payload_bytes));
        let parked = ParkedPacket::new(source, header, is_marked, copy);
        let has_room = self.pool.as_mut().is_some_and(|pool| pool.park(i, parked));
        if has_room {
            self.counters.parked_packets += 1;
            self.begin_reads(now);
        } else {
            self.counters.drop_parking += 1;
        }
        true
    }

    fn nonresident_index(&self, qp: QpNumber) -> Option<usize> {
        let pool = self.pool.as_ref()?;
        self.index(qp).filter(|i| !pool.is_resident(*i))
    }

    /// Marks a context on chip as used.
    pub(super) fn mark_context_used(&mut self, i: usize) {
        if let Some(pool) = &mut self.pool {
            pool.mark_used(i);
        }
    }

    /// Accounts for a payload that is written to the host's memory, on the link that also carries contexts back.
    pub(super) fn payload_written(&mut self, now: Time, bytes: u32) {
        if let Some(pool) = &mut self.pool {
            pool.write_free_at = pool.write_free_at.max(now) + self.profile.costs.dma_bytes(bytes);
        }
    }

    /// Keeps a context on chip until [`Self::unpin`].
    pub(super) fn pin(&mut self, i: usize) {
        if let Some(pool) = &mut self.pool {
            pool.pin(i);
        }
    }

    pub(super) fn unpin(&mut self, now: Time, i: usize) {
        if let Some(pool) = &mut self.pool {
            pool.unpin(i);
            self.begin_reads(now);
        }
    }

    // --- the schedule queue ---

    pub(super) fn is_queued(&self, i: usize) -> bool {
        self.pool.as_ref().map_or_else(|| self.contexts[i].is_queued, |pool| pool.is_queued(i))
    }

    /// Appends a queue pair to the schedule queue.
    pub(super) fn push_ready(&mut self, i: usize) {
        if let Some(pool) = &mut self.pool {
            pool.push_ready(i);
        } else {
            self.contexts[i].is_queued = true;
            self.pipeline.ready.push_back(i as u32);
        }
    }

    /// Takes the next queue pair of the schedule queue that can be served.
    pub(super) fn pop_ready(&mut self, now: Time) -> Option<usize> {
        if self.pool.is_none() {
            return self.pipeline.ready.pop_front().map(|i| i as usize);
        }
        self.prefetch(now);
        self.pool.as_mut()?.pop_ready()
    }

    /// Ends the quantum of a queue pair, which is appended to the schedule queue if it has more to send.
    pub(super) fn end_quantum(&mut self, now: Time, i: usize) {
        match &mut self.pool {
            Some(pool) => pool.end_quantum(i),
            None => self.contexts[i].is_queued = false,
        }
        self.activate(now, i);
        self.unpin(now, i);
    }

    /// Requests the contexts of queue pairs that are served soon.
    fn prefetch(&mut self, now: Time) {
        let Some(pool) = &mut self.pool else { return };
        while let Some(i) = pool.next_prefetch() {
            let is_resident = pool.is_resident(i);
            if !is_resident && !pool.request_fetch(i) {
                break;
            }
            self.counters.cache_hits += u64::from(is_resident);
            self.counters.cache_misses += u64::from(!is_resident);
            pool.prefetched(i);
        }
        self.begin_reads(now);
    }

    // --- fetches ---

    /// Begins the DMA reads that can begin; each takes a slot and evicts its context.
    fn begin_reads(&mut self, now: Time) {
        while let Some(read) = self.pool.as_mut().and_then(ContextPool::next_read) {
            if let Some(victim) = read.victim {
                self.save_deadline(now, victim);
                self.contexts.set_nonresident(victim, true);
            }
            let costs = self.profile.costs;
            let Some(pool) = &mut self.pool else { return };
            let constants = *pool.constants();
            let mut at = self.pipeline.dma_transfer(now, &costs, constants.read_bytes) + costs.dma_read;
            if read.victim.is_some() && read.is_changed {
                self.counters.contexts_written_back += 1;
                pool.write_free_at = pool.write_free_at.max(now) + costs.dma_bytes(constants.write_bytes);
                at = at.max(pool.write_free_at); // the slot is free after the victim is written back
            }
            self.counters.contexts_fetched += 1;
            pool.begin_read(read.fetch, at);
        }
    }

    /// Saves the deadline of a context that is evicted, or remains in the host's memory, as a coarse one.
    fn save_deadline(&mut self, now: Time, i: usize) {
        let (context, host) = (&self.contexts.all[i], &self.host_qps[i]);
        let is_repairing = host.scoreboard.is_some() || context.reads_open > 0;
        // The deadline may have passed without being processed; it must then be processed late, not never.
        let may_have_passed = context.timer_at <= context.send_not_before.max(context.pace_at);
        let waits = context.retransmit_at < Time::MAX || is_repairing || may_have_passed;
        // Retransmissions are sent when the queue pair is served; no deadline is needed.
        let will_be_served = !host.retransmissions.is_empty() && self.is_queued(i);
        let at = if waits && !will_be_served { context.timer_at } else { Time::MAX };
        self.contexts.all[i].timer_at = at;
        let Some(pool) = &mut self.pool else { return };
        if at < Time::MAX {
            let coarse = pool.set_deadline(i, now, at);
            self.timers.push(coarse, i);
        } else {
            pool.clear_deadline(i);
        }
    }

    /// Handles the coarse deadline of a context that is not on chip. Returns false if the context is on chip.
    pub(super) fn nonresident_timer_due(&mut self, now: Time, i: usize) -> bool {
        let Some(pool) = self.pool.as_mut().filter(|pool| !pool.is_resident(i)) else { return false };
        if pool.is_due(i, now) {
            if pool.request_fetch(i) {
                pool.clear_deadline(i);
            } else {
                let coarse = pool.set_deadline(i, now, now);
                self.timers.push(coarse, i);
            }
            self.begin_reads(now);
        }
        true
    }

    /// Admits contexts that have arrived and processes what waited for them. Returns true if one had arrived.
    pub(super) fn admit_fetched(&mut self, now: Time) -> bool {
        let mut has_any = false;
        while let Some((i, parked)) = self.pool.as_mut().and_then(|pool| pool.next_arrival(now)) {
            has_any = true;
            self.contexts.set_nonresident(i, false);
            self.context_arrived(now, i, parked);
            self.begin_reads(now);
        }
        has_any
    }

    /// Processes the packets that waited for a context, in order, then restores its exact deadline.
    fn context_arrived(&mut self, now: Time, i: usize, mut parked: u16) {
        while parked != NO_INDEX {
            let Some((packet, next)) = self.pool.as_mut().and_then(|pool| pool.unpark(parked)) else { break };
            parked = next;
            let ParkedPacket { source, header, is_marked, payload, .. } = packet;
            match payload {
                Some(copy) => self.process(now, source, &header, is_marked, M::payload_from_copy(&copy)),
                None => self.process_trimmed(now, source, &header),
            }
        }
        let context = &mut self.contexts[i];
        let at = std::mem::replace(&mut context.timer_at, Time::MAX).min(context.retransmit_at);
        if at <= now {
            self.contexts[i].timer_at = at;
            self.timer_due(now, i);
        } else if at < Time::MAX {
            self.arm_timer(i, at);
        }
    }
}
