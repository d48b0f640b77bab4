//! Verbs that post work requests, and the delivery of their completions.

use sim::{Span, Time};

use super::context::Context;
use super::engine::Nic;
use super::error::NicError;
use super::event::{CqNumber, NicEvent, SrqNumber};
use super::host_qp::SendEntry;
use super::memory::HostMemory;
use crate::verbs::{Completion, CompletionKind, CompletionStatus, QpState, ReceiveRequest, SendRequest};
use crate::wire::{Psn, QpNumber};

impl<M: HostMemory> Nic<M> {
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
            self.flush_send(now, i, request);
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
        let (qp, status) = (self.number(i), CompletionStatus::Flushed);
        self.complete_receive(now, i, Completion::new(request.id, qp, status, CompletionKind::Receive));
    }

    fn flush_send(&mut self, now: Time, i: usize, request: &SendRequest) {
        let (qp, status) = (self.number(i), CompletionStatus::Flushed);
        self.complete_send(now, i, Completion::new(request.id, qp, status, request.kind.completion_kind()));
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
        while let Some(entry) = self.host_qps[i].sends.pop_front() {
            let context = &mut self.contexts[i];
            context.send_first = context.send_first.wrapping_add(1);
            context.send_index = context.send_first;
            self.flush_send(now, i, &entry.request);
        }
    }

    /// Sends the completion of a send request to the host's memory.
    pub(super) fn complete_send(&mut self, now: Time, i: usize, completion: Completion) {
        self.complete(now, self.contexts.as_driver(i).send_cq, completion);
    }

    /// Sends the completion of a receive request to the host's memory.
    pub(super) fn complete_receive(&mut self, now: Time, i: usize, completion: Completion) {
        self.complete(now, self.contexts.as_driver(i).receive_cq, completion);
    }

    fn complete(&mut self, now: Time, cq: CqNumber, completion: Completion) {
        let delay = self.profile.costs.dma_write;
        if delay == Span::ZERO {
            self.deliver(now, cq, completion);
        } else {
            self.pending_completions.push_back((now + delay, cq, completion));
        }
    }

    /// Adds a completion to its queue, and reports it if the queue is armed.
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
