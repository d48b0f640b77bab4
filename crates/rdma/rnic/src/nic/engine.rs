//! The NIC: what is handed in, what comes out, and what is due.

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

/// A packet for the wire; its payload was put where the caller of [`Nic::transmit`] said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutgoingPacket {
    /// To whom.
    pub to: NicAddress,
    /// What it says; `payload_bytes` of payload go with it.
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
    /// Packets without payload that wait for nothing: acknowledgements.
    pub(super) control_packets: VecDeque<(NicAddress, Header)>,
    pub(super) pipeline: Pipeline,
    pub(super) timers: Timers,
    /// Completions on their way to the host's memory.
    pub(super) pending_completions: VecDeque<(Time, CqNumber, Completion)>,
    pub(super) slow_path: SlowPath,
    pub(super) cache: Option<ContextCache>,
    /// Where contexts come and go.
    pub(super) pool: Option<ContextPool>,
}

impl<M: HostMemory> Nic<M> {
    /// A NIC without queues. `profile`: a thousand NICs of a kind can have one. `seed`: of what it draws by chance
    /// (which context a cache gives up).
    ///
    /// # Errors
    /// When there can be no such NIC.
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

    /// What kind of NIC it is.
    pub fn profile(&self) -> &NicProfile {
        &self.profile
    }

    /// The host's memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The host's memory, to be changed by its programs.
    pub fn memory_mut(&mut self) -> &mut M {
        &mut self.memory
    }

    /// What was counted.
    pub fn counters(&self) -> &NicCounters {
        &self.counters
    }

    /// The oldest event that nobody took.
    pub fn poll_event(&mut self) -> Option<NicEvent> {
        self.events.pop_front()
    }

    /// Takes in a packet. `source` says who sent it as the driver knows it, `marked` whether a switch marked it
    /// (ECN-CE); `payload` has [`Header::payload_bytes`]. What makes no sense is dropped and counted.
    pub fn receive(&mut self, now: Time, source: NicAddress, header: &Header, marked: bool, payload: &M::Payload) {
        self.counters.received_packets += 1;
        if !self.is_parked(now, source, header, marked, Some(payload)) {
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

    /// Takes in what a switch left of a packet whose payload it cut off for want of room (packet trimming). That counts
    /// as a mark; on a reliable connection the sender of a request is told at once, and an answer to a READ is asked
    /// for again at once.
    pub fn receive_trimmed(&mut self, now: Time, source: NicAddress, header: &Header) {
        self.counters.received_packets += 1;
        self.counters.trimmed_packets += 1;
        if !self.is_parked(now, source, header, true, None) {
            self.process_trimmed(now, source, header);
        }
        self.run_due(now);
    }

    pub(super) fn process_trimmed(&mut self, now: Time, source: NicAddress, header: &Header) {
        if let Some(i) = self.destination_qp(source, header) {
            self.mark_context_used(i);
            // Marked or not, there was no room for it.
            self.ecn_marked(now, i, header);
            if header.operation.is_read_response() {
                self.trimmed_response(now, i, header)
            } else {
                self.request_trimmed(i, header)
            }
        }
    }

    /// The next packet for the wire, if there is one now; the caller has the wire to itself. Its payload is put into
    /// `payload`, which must have room for an MTU.
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

    /// When [`Self::advance`] is to be called at the latest, and [`Self::transmit`] after it when the wire is free;
    /// nothing when nothing waits for time to pass.
    pub fn deadline(&self) -> Option<Time> {
        let pending_completions = self.pending_completions.front().map_or(Time::MAX, |(at, ..)| *at);
        let contexts = self.pool.as_ref().map_or(Time::MAX, ContextPool::deadline);
        let by_hardware = pending_completions.min(self.pipeline.deadline()).min(contexts);
        let at = by_hardware.min(self.slow_path.deadline()).min(self.timers.deadline());
        (at < Time::MAX).then_some(at)
    }

    /// Does what is due.
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

    /// What follows at once from what happened.
    fn run_due(&mut self, now: Time) {
        self.pipeline.polled_at = now;
        self.run_slow_path(now);
        self.admit_fetched(now);
        self.fetched_due(now);
        if self.has_costs() {
            self.schedule(now);
        }
    }

    /// Whether fetching takes time, and so begins before the wire asks.
    pub(super) fn has_costs(&self) -> bool {
        self.profile.costs != CostModel::ZERO
    }

    /// The queue pair that a packet is for.
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
            // The context is needed to take the packet in: a miss keeps the port from fetching for others.
            cache.touch(now, i as u32, &self.profile, &mut self.counters);
        }
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
