//! The verbs: create, modify, query and destroy objects, post requests, and poll completions.

use sim::{Span, Time};

use super::context::Context;
use super::engine::Nic;
use super::error::NicError;
use super::event::{CqNumber, NicEvent, SrqNumber};
use super::handover::HardwareReceiver;
use super::host_qp::{HostQp, SendEntry};
use super::limits::{QP_NUMBER_FIRST, QUEUE_REQUESTS_MAX, READS_MAX};
use super::memory::HostMemory;
use crate::verbs::{
    BindInfo, Completion, CompletionKind, CompletionQueue, CompletionStatus, CqNotify, LKey, ProtectionContext,
    ProtectionDomain, QpAttributes, QpState, ReceiveRequest, RegionKeys, Registration, SendRequest, SharedReceiveQueue,
    WindowKind, check_transition,
};
use crate::wire::{Psn, QpNumber, RKey, Service};

/// Parameters of a new queue pair (`ibv_qp_init_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpInit {
    /// The transport service.
    pub service: Service,
    /// The protection domain.
    pub domain: ProtectionDomain,
    /// The completion queue of send requests.
    pub send_cq: CqNumber,
    /// The completion queue of receive requests.
    pub receive_cq: CqNumber,
    /// The shared receive queue to take receive requests from, instead of a receive queue of its own.
    pub srq: Option<SrqNumber>,
    /// Capacity of the send queue.
    pub sends_max: u32,
    /// Capacity of the receive queue.
    pub receives_max: u32,
    /// Whether every send request generates a completion (`sq_sig_all`).
    pub signals_all: bool,
}

/// The result of querying a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpStatus {
    /// The transport service.
    pub service: Service,
    /// The state.
    pub state: QpState,
    /// The attributes that were set; `send_psn` and `receive_psn` are the current PSNs.
    pub attributes: QpAttributes,
    /// Number of requests in the send queue.
    pub sends: usize,
    /// Number of requests in the own receive queue that no message has consumed.
    pub receives: usize,
    /// Whether the slow path's software owns the receive side.
    pub is_slow: bool,
    /// Number of messages of an unreliable service that exceeded their receive requests, since the queue pair was last
    /// in reset.
    pub dropped_long: u64,
}

impl<M: HostMemory> Nic<M> {
    /// Returns the index of an existing queue pair.
    pub(super) fn index(&self, qp: QpNumber) -> Option<usize> {
        let i = qp.0.checked_sub(QP_NUMBER_FIRST)? as usize;
        self.contexts.get(i).filter(|context| context.exists).map(|_| i)
    }

    pub(super) fn number(&self, i: usize) -> QpNumber {
        QpNumber(i as u32 + QP_NUMBER_FIRST)
    }

    fn find(&self, qp: QpNumber) -> Result<usize, NicError> {
        self.index(qp).ok_or(NicError::Unknown { what: "queue pair", number: qp.0 })
    }

    /// Allocates a protection domain.
    ///
    /// # Errors
    /// If all numbers have been used.
    pub fn allocate_domain(&mut self) -> Result<ProtectionDomain, NicError> {
        Ok(self.table.allocate_domain()?)
    }

    /// Frees a protection domain.
    ///
    /// # Errors
    /// If it does not exist or is in use.
    pub fn free_domain(&mut self, domain: ProtectionDomain) -> Result<(), NicError> {
        Ok(self.table.free_domain(domain)?)
    }

    /// Registers a memory region.
    ///
    /// # Errors
    /// See [`crate::verbs::MemoryTable::register`].
    pub fn register(&mut self, registration: &Registration) -> Result<RegionKeys, NicError> {
        Ok(self.table.register(registration)?)
    }

    /// Deregisters a memory region.
    ///
    /// # Errors
    /// See [`crate::verbs::MemoryTable::deregister`].
    pub fn deregister(&mut self, key: LKey) -> Result<(), NicError> {
        Ok(self.table.deregister(key)?)
    }

    /// Allocates a memory window.
    ///
    /// # Errors
    /// See [`crate::verbs::MemoryTable::allocate_window`].
    pub fn allocate_window(&mut self, domain: ProtectionDomain, kind: WindowKind) -> Result<RKey, NicError> {
        Ok(self.table.allocate_window(domain, kind)?)
    }

    /// Frees a memory window.
    ///
    /// # Errors
    /// See [`crate::verbs::MemoryTable::free_window`].
    pub fn free_window(&mut self, window: RKey) -> Result<(), NicError> {
        Ok(self.table.free_window(window)?)
    }

    /// Binds a memory window for a queue pair and returns its key: for type 1 a key that the NIC chooses, for type 2
    /// `chosen`.
    ///
    /// # Errors
    /// See [`crate::verbs::MemoryTable::bind_type_1`] and [`crate::verbs::MemoryTable::bind_type_2`].
    pub fn bind_window(
        &mut self,
        qp: QpNumber,
        window: RKey,
        chosen: Option<RKey>,
        bind: &BindInfo,
    ) -> Result<RKey, NicError> {
        let i = self.find(qp)?;
        let accessor = ProtectionContext { domain: self.contexts.as_driver(i).domain, qp };
        match chosen {
            None => Ok(self.table.bind_type_1(accessor, window, bind)?),
            Some(chosen) => {
                self.table.bind_type_2(accessor, window, chosen, bind)?;
                Ok(chosen)
            }
        }
    }

    /// Creates a completion queue with a capacity of `entries`.
    ///
    /// # Errors
    /// If the size is out of range.
    pub fn create_cq(&mut self, entries: usize) -> Result<CqNumber, NicError> {
        Ok(CqNumber(insert(&mut self.cqs, CompletionQueue::new(entries)?)))
    }

    /// Destroys a completion queue.
    ///
    /// # Errors
    /// If it does not exist, or queue pairs use it.
    pub fn destroy_cq(&mut self, cq: CqNumber) -> Result<(), NicError> {
        self.cq(cq)?;
        let uses = |context: &&Context| context.exists && (context.send_cq == cq || context.receive_cq == cq);
        let users = self.contexts.iter().filter(uses).count() as u32;
        if users > 0 {
            return Err(NicError::Busy { what: "completion queue", number: cq.0, users });
        }
        self.pending_completions.retain(|(_, other, _)| *other != cq);
        self.cqs[cq.0 as usize] = None;
        Ok(())
    }

    fn cq(&mut self, cq: CqNumber) -> Result<&mut CompletionQueue, NicError> {
        let unknown = NicError::Unknown { what: "completion queue", number: cq.0 };
        self.cqs.get_mut(cq.0 as usize).and_then(Option::as_mut).ok_or(unknown)
    }

    /// Returns whether a completion queue is empty; also true if it does not exist.
    pub fn cq_is_empty(&self, cq: CqNumber) -> bool {
        self.cqs.get(cq.0 as usize).and_then(Option::as_ref).is_none_or(CompletionQueue::is_empty)
    }

    /// Takes the oldest completions, as many as there are and fit, and returns their number.
    ///
    /// # Errors
    /// If the queue does not exist or has overflowed.
    pub fn poll_cq(&mut self, cq: CqNumber, into: &mut [Completion]) -> Result<usize, NicError> {
        Ok(self.cq(cq)?.poll(into)?)
    }

    /// Requests an [`NicEvent::Completion`].
    ///
    /// # Errors
    /// If the queue does not exist.
    pub fn arm_cq(&mut self, cq: CqNumber, notify: CqNotify) -> Result<(), NicError> {
        self.cq(cq)?.arm(notify);
        Ok(())
    }

    /// Creates a shared receive queue with a capacity of `requests`.
    ///
    /// # Errors
    /// If the size is out of range.
    pub fn create_srq(&mut self, requests: usize) -> Result<SrqNumber, NicError> {
        Ok(SrqNumber(insert(&mut self.srqs, SharedReceiveQueue::new(requests)?)))
    }

    /// Destroys a shared receive queue.
    ///
    /// # Errors
    /// If it does not exist, or queue pairs use it.
    pub fn destroy_srq(&mut self, srq: SrqNumber) -> Result<(), NicError> {
        self.srq(srq)?;
        let uses = |(context, host): &(&Context, &HostQp)| context.exists && host.srq == Some(srq);
        let users = self.contexts.iter().zip(&self.host_qps).filter(uses).count() as u32;
        if users > 0 {
            return Err(NicError::Busy { what: "shared receive queue", number: srq.0, users });
        }
        self.srqs[srq.0 as usize] = None;
        Ok(())
    }

    fn srq(&mut self, srq: SrqNumber) -> Result<&mut SharedReceiveQueue, NicError> {
        let unknown = NicError::Unknown { what: "shared receive queue", number: srq.0 };
        self.srqs.get_mut(srq.0 as usize).and_then(Option::as_mut).ok_or(unknown)
    }

    /// Requests an [`NicEvent::SharedReceiveLimit`].
    ///
    /// # Errors
    /// If the queue does not exist, or the limit exceeds its capacity.
    pub fn arm_srq(&mut self, srq: SrqNumber, limit: usize) -> Result<(), NicError> {
        Ok(self.srq(srq)?.arm(limit)?)
    }

    /// Creates a queue pair in the reset state.
    ///
    /// # Errors
    /// If an object that it needs does not exist, a size is out of range, or the NIC has its maximum number of queue
    /// pairs.
    pub fn create_qp(&mut self, init: &QpInit) -> Result<QpNumber, NicError> {
        self.cq(init.send_cq)?;
        self.cq(init.receive_cq)?;
        if let Some(srq) = init.srq {
            self.srq(srq)?;
        }
        for (what, value) in [("send requests", init.sends_max), ("receive requests", init.receives_max)] {
            if value > QUEUE_REQUESTS_MAX {
                return Err(NicError::Size { what, value, min: 0, max: QUEUE_REQUESTS_MAX });
            }
        }
        let limit = self.profile.qps;
        let i = match self.free_qps.pop_front() {
            Some(i) => i as usize,
            None if self.contexts.len() >= limit as usize => {
                return Err(NicError::Size { what: "queue pairs", value: limit.saturating_add(1), min: 0, max: limit });
            }
            None => self.contexts.len(),
        };
        if let Err(error) = self.table.hold_domain(init.domain) {
            if i < self.contexts.len() {
                self.free_qps.push_front(i as u32);
            }
            return Err(error.into());
        }
        let cqs = (init.send_cq, init.receive_cq);
        let mut context = Context::new(init.service, init.domain, cqs, &self.profile.congestion);
        let host = HostQp {
            sends_max: init.sends_max as usize,
            receives_max: init.receives_max as usize,
            srq: init.srq,
            signals_all: init.signals_all,
            ..HostQp::default()
        };
        if i == self.contexts.len() {
            self.contexts.push(context, self.pool.is_some());
            self.host_qps.push(host);
            if let Some(pool) = &mut self.pool {
                pool.add_queue_pair();
            }
        } else {
            // Invalidates everything that is in flight for the previous queue pair with this number.
            let old = self.contexts.as_driver(i);
            context.generation = old.generation.wrapping_add(1);
            context.is_queued = old.is_queued;
            self.by_driver(Time::ZERO, i, |nic| nic.contexts[i] = context);
            self.host_qps[i] = host;
        }
        Ok(self.number(i))
    }

    /// Destroys a queue pair. Its number is reused after those that have been free longer.
    ///
    /// # Errors
    /// If it does not exist.
    pub fn destroy_qp(&mut self, qp: QpNumber) -> Result<(), NicError> {
        let i = self.find(qp)?;
        // The time does not matter, because no timer remains.
        self.by_driver(Time::ZERO, i, |nic| {
            nic.reset(i);
            nic.table.release_domain(nic.contexts[i].domain);
            nic.contexts[i].exists = false;
        });
        self.free_qps.push_back(i as u32);
        Ok(())
    }

    /// Returns the state and attributes of a queue pair.
    ///
    /// # Errors
    /// If it does not exist.
    pub fn query_qp(&self, qp: QpNumber) -> Result<QpStatus, NicError> {
        let i = self.find(qp)?;
        let (context, host) = (self.contexts.as_driver(i), &self.host_qps[i]);
        let mut attributes = host.attributes;
        attributes.send_psn = attributes.send_psn.map(|_| context.next);
        attributes.receive_psn = attributes.receive_psn.map(|_| context.receiver.cumulative());
        Ok(QpStatus {
            service: context.service,
            state: context.state,
            attributes,
            sends: host.sends.len(),
            receives: host.receives.len(),
            is_slow: context.receiver.is_slow(),
            dropped_long: host.dropped_long,
        })
    }

    /// Moves a queue pair to another state, or changes attributes in its current state.
    ///
    /// # Errors
    /// If the transition is not allowed, or an attribute is missing, not allowed or out of range. Nothing is changed
    /// then.
    pub fn modify_qp(
        &mut self,
        now: Time,
        qp: QpNumber,
        to: QpState,
        attributes: &QpAttributes,
    ) -> Result<(), NicError> {
        let i = self.find(qp)?;
        let context = self.contexts.as_driver(i);
        check_transition(qp, context.service, context.state, to, attributes, READS_MAX)?;
        self.by_driver(now, i, |nic| nic.enter_state(now, i, to, attributes));
        Ok(())
    }

    fn enter_state(&mut self, now: Time, i: usize, to: QpState, attributes: &QpAttributes) {
        match to {
            QpState::Reset => self.reset(i),
            QpState::Error => self.enter_error(now, i),
            _ => {
                self.set_attributes(i, attributes);
                self.contexts[i].state = to;
                self.contexts[i].drain_reported = false;
                if to == QpState::SendQueueDrain {
                    self.report_drained(i);
                }
                self.activate(now, i);
            }
        }
    }

    fn set_attributes(&mut self, i: usize, given: &QpAttributes) {
        merge(&mut self.host_qps[i].attributes, given);
        let is_datagram = self.contexts[i].service == Service::Ud;
        let mtu_max = self.profile.mtu_bytes;
        let context = &mut self.contexts[i];
        context.access = given.access.unwrap_or(context.access);
        context.queue_key = given.queue_key.unwrap_or(context.queue_key);
        context.peer = given.path.unwrap_or(context.peer);
        context.peer_qp = given.destination.unwrap_or(context.peer_qp);
        context.reads_max = given.initiator_reads_max.unwrap_or(context.reads_max);
        context.rnr_timer_code = given.rnr_timer_code.unwrap_or(context.rnr_timer_code);
        context.ack_timer_code = given.ack_timer_code.unwrap_or(context.ack_timer_code);
        let mtu = given.mtu.map(|mtu| mtu.bytes().min(mtu_max));
        if let Some(mtu) = mtu.or(is_datagram.then_some(mtu_max)) {
            context.mtu_bytes = mtu as u16; // at most 4096, by the profile
        }
        if let Some(retries) = given.retries {
            (context.retries, context.retries_left) = (retries, retries);
        }
        if let Some(retries) = given.rnr_retries {
            (context.rnr_retries, context.rnr_retries_left) = (retries, retries);
        }
        if let Some(psn) = given.receive_psn {
            context.receiver = HardwareReceiver::new(psn);
            self.host_qps[i].tracker = None;
        }
        if let Some(psn) = given.send_psn {
            (context.unacked, context.next, context.sent_end, context.timed_psn) = (psn, psn, psn, psn);
        }
    }

    /// Resets a queue pair to what it was created with.
    fn reset(&mut self, i: usize) {
        let qp = self.number(i);
        let old = self.contexts[i];
        let cqs = (old.send_cq, old.receive_cq);
        let mut context = Context::new(old.service, old.domain, cqs, &self.profile.congestion);
        context.generation = old.generation.wrapping_add(1);
        context.is_queued = old.is_queued;
        self.contexts[i] = context;
        let host = &mut self.host_qps[i];
        *host = HostQp {
            sends_max: host.sends_max,
            receives_max: host.receives_max,
            srq: host.srq,
            signals_all: host.signals_all,
            ..HostQp::default()
        };
        for cq in [cqs.0, cqs.1] {
            if let Ok(queue) = self.cq(cq) {
                queue.remove_queue_pair(qp);
            }
        }
        self.pending_completions.retain(|(_, _, completion)| completion.qp != qp);
        self.table.unbind_queue_pair(qp);
    }

    /// Posts a send request. A request that the queue pair does not support is completed with an error, in order.
    ///
    /// # Errors
    /// If the state does not allow it, or the queue is full.
    pub fn post_send(&mut self, now: Time, qp: QpNumber, request: &SendRequest) -> Result<(), NicError> {
        let i = self.find(qp)?;
        self.contexts.as_driver(i).state.check_post_send(qp)?;
        let host = &self.host_qps[i];
        if host.sends.len() >= host.sends_max {
            return Err(NicError::Full { qp: qp.0, queue: "send", requests: host.sends_max as u32 });
        }
        if matches!(self.contexts.as_driver(i).state, QpState::Error | QpState::SendQueueError) {
            let kind = request.kind.completion_kind();
            let completion = Completion::new(request.id, qp, CompletionStatus::Flushed, kind);
            let cq = self.contexts.as_driver(i).send_cq;
            self.complete(now, cq, completion);
            return Ok(());
        }
        let host = &mut self.host_qps[i];
        if host.sends.capacity() == 0 {
            host.sends.reserve_exact(1); // most queue pairs have one request at a time
        }
        host.sends.push_back(SendEntry {
            request: *request,
            // A length that does not fit exceeds the maximum length of a message, so that the request fails in order.
            bytes: u32::try_from(request.bytes()).unwrap_or(u32::MAX),
            packets: 0,
            psns: 0,
            first: Psn::new(0),
            message: 0,
            response_packets: 0,
            out_of_order: None,
            is_started: false,
            is_done: false,
            failed: None,
        });
        self.doorbell(now, i);
        Ok(())
    }

    /// Posts a receive request.
    ///
    /// # Errors
    /// If the state does not allow it, the queue is full, or the queue pair uses a shared receive queue.
    pub fn post_recv(&mut self, now: Time, qp: QpNumber, request: &ReceiveRequest) -> Result<(), NicError> {
        let i = self.find(qp)?;
        self.contexts.as_driver(i).state.check_post_receive(qp)?;
        let host = &mut self.host_qps[i];
        if host.srq.is_some() {
            let (what, remedy) = ("it uses a shared receive queue", "post to that queue");
            return Err(NicError::Request { qp: qp.0, what, remedy });
        }
        if host.receives.len() + host.taken_receives.len() >= host.receives_max {
            return Err(NicError::Full { qp: qp.0, queue: "receive", requests: host.receives_max as u32 });
        }
        if self.contexts.as_driver(i).state == QpState::Error {
            self.flush_receive(now, i, request);
        } else {
            host.receives.push_back(*request);
        }
        Ok(())
    }

    /// Posts a receive request to a shared receive queue.
    ///
    /// # Errors
    /// If the queue does not exist or is full.
    pub fn post_srq_recv(&mut self, srq: SrqNumber, request: &ReceiveRequest) -> Result<(), NicError> {
        Ok(self.srq(srq)?.post(*request)?)
    }

    fn flush_receive(&mut self, now: Time, i: usize, request: &ReceiveRequest) {
        let completion =
            Completion::new(request.id, self.number(i), CompletionStatus::Flushed, CompletionKind::Receive);
        let cq = self.contexts.as_driver(i).receive_cq;
        self.complete(now, cq, completion);
    }

    /// Completes all receive requests as flushed.
    pub(super) fn flush_receives(&mut self, now: Time, i: usize) {
        let context = &mut self.contexts[i];
        context.generation = context.generation.wrapping_add(1);
        (context.responses_open, context.ack_pending, context.nak_pending) = (0, false, false);
        self.host_qps[i].tracker = None;
        self.host_qps[i].responses.clear();
        while let Some(receive) = self.host_qps[i].taken_receives.pop_front() {
            self.flush_receive(now, i, &receive);
        }
        while let Some(receive) = self.host_qps[i].receives.pop_front() {
            self.flush_receive(now, i, &receive);
        }
    }

    /// Completes all send requests as flushed.
    pub(super) fn flush_sends(&mut self, now: Time, i: usize) {
        let context = &mut self.contexts[i];
        context.send_epoch = context.send_epoch.wrapping_add(1);
        context.retransmit_at = Time::MAX;
        context.reads_open = 0;
        context.send_index = context.send_first;
        context.send_packet = 0;
        self.host_qps[i].retransmissions.clear();
        self.host_qps[i].scoreboard = None;
        let cq = self.contexts[i].send_cq;
        while let Some(entry) = self.host_qps[i].sends.pop_front() {
            let context = &mut self.contexts[i];
            context.send_first = context.send_first.wrapping_add(1);
            context.send_index = context.send_first;
            let kind = entry.request.kind.completion_kind();
            let completion = Completion::new(entry.request.id, self.number(i), CompletionStatus::Flushed, kind);
            self.complete(now, cq, completion);
        }
    }

    /// Sends a completion to the host's memory.
    pub(super) fn complete(&mut self, now: Time, cq: CqNumber, completion: Completion) {
        let delay = self.profile.costs.dma_write;
        if delay == Span::ZERO {
            self.deliver(now, cq, completion);
        } else {
            self.pending_completions.push_back((now + delay, cq, completion));
        }
    }

    pub(super) fn deliver(&mut self, now: Time, cq: CqNumber, completion: Completion) {
        let Ok(queue) = self.cq(cq) else { return };
        match queue.push(completion) {
            Ok(true) => self.events.push_back(NicEvent::Completion(cq)),
            Ok(false) => {}
            Err(_) => self.overflowed(now, cq),
        }
    }

    /// Moves the queue pairs of an overflowed completion queue to the error state.
    fn overflowed(&mut self, now: Time, cq: CqNumber) {
        let uses = |context: &Context| {
            let is_live = context.exists && !matches!(context.state, QpState::Error | QpState::Reset);
            is_live && (context.send_cq == cq || context.receive_cq == cq)
        };
        let users: Vec<usize> = (0..self.contexts.len()).filter(|i| uses(self.contexts.as_driver(*i))).collect();
        if users.is_empty() {
            return;
        }
        self.events.push_back(NicEvent::CompletionQueueError(cq));
        for i in users.iter().copied() {
            // All states first, because flushing overflows the queue again.
            self.by_driver(now, i, |nic| nic.contexts[i].state = QpState::Error);
        }
        for i in users {
            self.by_driver(now, i, |nic| nic.enter_error(now, i));
        }
    }
}

/// Inserts a value into the first free slot and returns its index.
fn insert<T>(slots: &mut Vec<Option<T>>, value: T) -> u32 {
    let at = slots.iter().position(Option::is_none).unwrap_or(slots.len());
    if at == slots.len() {
        slots.push(Some(value));
    } else {
        slots[at] = Some(value);
    }
    at as u32
}

/// Overwrites attributes with those that are given.
fn merge(set: &mut QpAttributes, given: &QpAttributes) {
    set.partition_index = given.partition_index.or(set.partition_index);
    set.port = given.port.or(set.port);
    set.access = given.access.or(set.access);
    set.queue_key = given.queue_key.or(set.queue_key);
    set.path = given.path.or(set.path);
    set.mtu = given.mtu.or(set.mtu);
    set.destination = given.destination.or(set.destination);
    set.receive_psn = given.receive_psn.or(set.receive_psn);
    set.send_psn = given.send_psn.or(set.send_psn);
    set.responder_reads_max = given.responder_reads_max.or(set.responder_reads_max);
    set.initiator_reads_max = given.initiator_reads_max.or(set.initiator_reads_max);
    set.rnr_timer_code = given.rnr_timer_code.or(set.rnr_timer_code);
    set.ack_timer_code = given.ack_timer_code.or(set.ack_timer_code);
    set.retries = given.retries.or(set.retries);
    set.rnr_retries = given.rnr_retries.or(set.rnr_retries);
}
