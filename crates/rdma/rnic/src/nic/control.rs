//! Verbs that create, modify, query and destroy queue pairs.

use sim::Time;

use super::context::Context;
use super::engine::Nic;
use super::error::NicError;
use super::event::{CqNumber, SrqNumber};
use super::handover::HardwareReceiver;
use super::host_qp::HostQp;
use super::limits::{QP_NUMBER_FIRST, QUEUE_REQUESTS_MAX, READS_MAX};
use super::memory::HostMemory;
use crate::verbs::{ProtectionDomain, QpAttributes, QpState, check_transition};
use crate::wire::{QpNumber, Service};

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

    pub(super) fn find(&self, qp: QpNumber) -> Result<usize, NicError> {
        self.index(qp).ok_or(NicError::Unknown { what: "queue pair", number: qp.0 })
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
        self.host_qps[i].attributes.update(given);
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
}
