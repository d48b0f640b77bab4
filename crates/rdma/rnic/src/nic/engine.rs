//! The NIC: its state, the driver's entry points, and the dispatch of packets and timers.

use std::collections::VecDeque;
use std::sync::Arc;

use sim::Time;

use super::cache::ContextCache;
use super::context_table::ContextTable;
use super::control_queue::SlowPath;
use super::counters::NicCounters;
use super::event::{CqNumber, NicEvent};
use super::fifo::pop_front_if;
use super::host_qp::HostQp;
use super::memory::HostMemory;
use super::pipeline::Pipeline;
use super::pool::ContextPool;
use super::profile::{CostModel, NicProfile, ProfileError};
use super::timers::Timers;
use crate::verbs::{Completion, CompletionQueue, MemoryTable, NicAddress, SharedReceiveQueue};
use crate::wire::{Header, Operation, Service};

/// A packet for the wire. Its payload is in the buffer passed to [`Nic::transmit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutgoingPacket {
    /// The destination NIC.
    pub to: NicAddress,
    /// The headers; `payload_bytes` bytes of payload follow.
    pub header: Header,
}

/// A NIC and the memory of its host.
#[derive(Debug)]
pub struct Nic<M> {
    pub(super) profile: Arc<NicProfile>,
    pub(super) memory: M,
    pub(super) table: MemoryTable,
    pub(super) cqs: Vec<Option<CompletionQueue>>,
    pub(super) srqs: Vec<Option<SharedReceiveQueue>>,
    pub(super) contexts: ContextTable,
    pub(super) host_qps: Vec<HostQp>,
    pub(super) free_qps: VecDeque<u32>,
    pub(super) counters: NicCounters,
    pub(super) events: VecDeque<NicEvent>,
    /// Acknowledgements and CNPs, which have no payload and are sent before all data.
    pub(super) control_packets: VecDeque<(NicAddress, Header)>,
    pub(super) pipeline: Pipeline,
    pub(super) timers: Timers,
    /// Completions on their way to the host's memory.
    pub(super) pending_completions: VecDeque<(Time, CqNumber, Completion)>,
    pub(super) slow_path: SlowPath,
    pub(super) cache: Option<ContextCache>,
    /// The pool of contexts on chip, where the policy has one.
    pub(super) pool: Option<ContextPool>,
}

impl<M: HostMemory> Nic<M> {
    /// Creates a NIC without queues. NICs of the same kind can share a profile. `seed` determines random choices (which
    /// context a cache replaces).
    ///
    /// # Errors
    /// If a value of the profile is out of range.
    pub fn new(profile: impl Into<Arc<NicProfile>>, memory: M, seed: u64) -> Result<Self, ProfileError> {
        let profile = profile.into();
        profile.check()?;
        Ok(Self {
            memory,
            table: MemoryTable::new(profile.memory_entries as usize),
            cqs: Vec::new(),
            srqs: Vec::new(),
            contexts: ContextTable::default(),
            host_qps: Vec::new(),
            free_qps: VecDeque::new(),
            counters: NicCounters::default(),
            events: VecDeque::new(),
            control_packets: VecDeque::new(),
            pipeline: Pipeline::default(),
            timers: Timers::default(),
            pending_completions: VecDeque::new(),
            slow_path: SlowPath::default(),
            cache: profile.cache.map(|cache| ContextCache::new(&cache, seed)),
            pool: profile.pool.map(|pool| ContextPool::new(&pool)),
            profile,
        })
    }

    /// Returns the parameters of the NIC.
    pub fn profile(&self) -> &NicProfile {
        &self.profile
    }

    /// Returns the host's memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Returns the host's memory for changes by the host's programs.
    pub fn memory_mut(&mut self) -> &mut M {
        &mut self.memory
    }

    /// Returns the counters.
    pub fn counters(&self) -> &NicCounters {
        &self.counters
    }

    /// Takes the oldest event.
    pub fn poll_event(&mut self) -> Option<NicEvent> {
        self.events.pop_front()
    }

    /// Processes a received packet. `source` is the sender as the driver identified it, and `marked` tells whether a
    /// switch marked the packet (ECN-CE). `payload` has [`Header::payload_bytes`] bytes. Invalid packets are dropped
    /// and counted.
    pub fn receive(&mut self, now: Time, source: NicAddress, header: &Header, marked: bool, payload: &M::Payload) {
        self.counters.received_packets += 1;
        if !self.park_if_nonresident(now, source, header, marked, Some(payload)) {
            self.process(now, source, header, marked, payload);
        }
        self.run_due(now);
    }

    pub(super) fn process(
        &mut self,
        now: Time,
        source: NicAddress,
        header: &Header,
        marked: bool,
        payload: &M::Payload,
    ) {
        if let Some(i) = self.destination_qp(source, header) {
            self.dispatch(now, i, source, header, marked, payload);
        }
    }

    /// Processes the headers of a packet whose payload a switch removed because of congestion (packet trimming). It
    /// counts as marked. On a reliable connection the sender of a request is notified at once, and a trimmed READ
    /// response is requested again at once.
    pub fn receive_trimmed(&mut self, now: Time, source: NicAddress, header: &Header) {
        self.counters.received_packets += 1;
        self.counters.trimmed_packets += 1;
        if !self.park_if_nonresident(now, source, header, true, None) {
            self.process_trimmed(now, source, header);
        }
        self.run_due(now);
    }

    pub(super) fn process_trimmed(&mut self, now: Time, source: NicAddress, header: &Header) {
        if let Some(i) = self.destination_qp(source, header) {
            self.mark_context_used(i);
            // A trimmed packet met congestion, whether it is marked or not.
            self.ecn_marked(now, i, header);
            if header.operation.is_read_response() {
                self.trimmed_response(now, i, header)
            } else {
                self.request_trimmed(i, header)
            }
        }
    }

    /// Returns the next packet for the wire, if one is ready; the caller must not call this while the wire is busy. The
    /// payload is copied to `payload`, which must have room for an MTU.
    pub fn transmit(&mut self, now: Time, payload: &mut M::Payload) -> Option<OutgoingPacket> {
        loop {
            if let Some((to, header)) = self.control_packets.pop_front() {
                self.counters.sent_packets += 1;
                return Some(OutgoingPacket { to, header });
            }
            let Some(staged) = self.next_staged(now) else {
                if self.admit_fetched(now) {
                    continue;
                }
                return None;
            };
            let outgoing = self.emit(now, &staged, payload);
            self.unpin(now, staged.qp as usize);
            if let Some(outgoing) = outgoing {
                self.counters.sent_packets += 1;
                self.counters.sent_bytes += u64::from(outgoing.header.payload_bytes);
                return Some(outgoing);
            }
        }
    }

    /// Returns the latest time at which [`Self::advance`] must be called, followed by [`Self::transmit`] if the wire is
    /// idle; nothing if no time is pending.
    pub fn deadline(&self) -> Option<Time> {
        let pending_completions = self.pending_completions.front().map_or(Time::MAX, |(at, ..)| *at);
        let contexts = self.pool.as_ref().map_or(Time::MAX, ContextPool::deadline);
        let by_hardware = pending_completions.min(self.pipeline.deadline()).min(contexts);
        let at = by_hardware.min(self.slow_path.deadline()).min(self.timers.deadline());
        (at < Time::MAX).then_some(at)
    }

    /// Processes everything that is due at `now`.
    pub fn advance(&mut self, now: Time) {
        while let Some((_, cq, completion)) = pop_front_if(&mut self.pending_completions, |(at, ..)| *at <= now) {
            self.deliver(now, cq, completion);
        }
        self.doorbells_due(now);
        while let Some(i) = self.timers.next_due(now) {
            self.timer_due(now, i);
        }
        self.run_due(now);
    }

    /// Processes everything that became due through a call of the driver.
    fn run_due(&mut self, now: Time) {
        self.pipeline.polled_at = now;
        self.run_slow_path(now);
        self.admit_fetched(now);
        self.fetched_due(now);
        if self.has_costs() {
            self.schedule(now);
        }
    }

    /// Returns whether fetching takes time and therefore begins before the wire is idle.
    pub(super) fn has_costs(&self) -> bool {
        self.profile.costs != CostModel::ZERO
    }

    /// Returns the queue pair that a packet is for, or counts why it is dropped.
    fn destination_qp(&mut self, source: NicAddress, header: &Header) -> Option<usize> {
        let Some(i) = self.index(header.destination) else {
            self.counters.drop_unknown_qp += 1;
            return None;
        };
        let context = &self.contexts[i];
        if !context.state.receives() {
            self.counters.drop_state += 1;
        } else if context.service != header.service {
            self.counters.drop_service += 1;
        } else if context.service != Service::Ud && context.peer != source {
            self.counters.drop_source += 1;
        } else if header.payload_bytes > context.mtu() {
            self.counters.drop_malformed += 1;
        } else {
            return Some(i);
        }
        None
    }

    fn dispatch(
        &mut self,
        now: Time,
        i: usize,
        source: NicAddress,
        header: &Header,
        marked: bool,
        payload: &M::Payload,
    ) {
        self.mark_context_used(i);
        self.payload_written(now, header.payload_bytes);
        if let Some(cache) = &mut self.cache {
            // Accepting the packet needs the context. A miss occupies the fetch unit, which delays the fetches of the
            // send side.
            cache.touch(now, i as u32, &self.profile, &mut self.counters);
        }
        self.acknowledge_before_mark(i, header, marked);
        if marked {
            self.ecn_marked(now, i, header);
        }
        if header.congestion_echo {
            let constants = &self.profile.congestion;
            self.contexts[i].congestion.on_cnp(constants, now);
        }
        match header.operation {
            Operation::CongestionNotification => {}
            Operation::Acknowledge | Operation::AtomicAcknowledge => self.response(now, i, header, payload),
            operation if operation.is_read_response() => self.response(now, i, header, payload),
            _ => self.request(now, i, source, header, payload),
        }
    }

    /// Arms the timer of a queue pair, no later than `at`.
    pub(super) fn arm_timer(&mut self, i: usize, at: Time) {
        let context = &mut self.contexts[i];
        if at < context.timer_at {
            context.timer_at = at;
            self.timers.push(at, i);
        }
    }

    /// Processes a timer entry of a queue pair, which may have been superseded.
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
