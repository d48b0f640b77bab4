//! The responder: execution of the peer's requests, responses and NAKs.

use sim::Time;

use super::congestion::CongestionControl;
use super::control_queue::PendingAction;
use super::engine::Nic;
use super::event::NicEvent;
use super::host_qp::{AtomicResult, PendingResponse};
use super::limits::READS_MAX;
use super::memory::HostMemory;
use super::request_error::RequestError;
use super::segmentation::{ahead_of, packet_count};
use crate::verbs::{
    AccessFlags, Completion, CompletionKind, CompletionStatus, MESSAGE_BYTES_MAX, NicAddress, ProtectionContext,
    QpState, ReceiveRequest,
};
use crate::wire::{Header, Immediate, Operation, Psn, RKey, SelectiveAck, Service, Syndrome};

/// Maximum number of pending responses: the outstanding READs and atomics, and as many repeated ones.
const RESPONSES_MAX: u8 = 2 * READS_MAX;

impl<M: HostMemory> Nic<M> {
    pub(super) fn request(&mut self, now: Time, i: usize, source: NicAddress, header: &Header, payload: &M::Payload) {
        if self.contexts[i].nak_pending {
            self.counters.drop_state += 1;
            return;
        }
        match self.contexts[i].service {
            Service::Rc if self.profile.policy.is_selective() => self.request_selective(now, i, header, payload),
            Service::Rc => self.request_in_order(now, i, header, payload),
            Service::Uc => self.request_unreliable(now, i, header, payload),
            Service::Ud => self.datagram(now, i, source, header, payload),
        }
    }

    /// Handles a congestion mark on a received packet. Marks on acknowledgements and notifications are ignored: else
    /// two notifications could answer each other for ever.
    pub(super) fn ecn_marked(&mut self, now: Time, i: usize, header: &Header) {
        if matches!(header.operation, Operation::Acknowledge | Operation::CongestionNotification) {
            return;
        }
        let context = &mut self.contexts[i];
        match self.profile.congestion {
            CongestionControl::Dcqcn(_) if context.service == Service::Ud => {}
            CongestionControl::Dcqcn(constants) if context.cnp_due(now, constants.cnp_period) => {
                let (to, qp) = (context.peer, context.peer_qp);
                self.push_cnp(i, to, qp);
            }
            CongestionControl::Dcqcn(_) => {}
            _ => context.marked = context.marked.saturating_add(1),
        }
    }

    /// Handles a request of which only the header arrived: reports the loss at once.
    pub(super) fn request_trimmed(&mut self, i: usize, header: &Header) {
        let context = &mut self.contexts[i];
        let is_request = header.operation.is_send() || header.operation.is_write();
        if context.service != Service::Rc || context.nak_pending || !is_request {
            return;
        }
        let expected = context.receiver.cumulative();
        let ahead = header.psn.after(expected);
        if self.profile.policy.is_selective() {
            let is_near = u32::try_from(ahead).is_ok_and(|ahead| ahead < self.profile.window_packets);
            let Some(placement) = header.placement.filter(|_| is_near) else { return };
            let marked = std::mem::take(&mut context.marked);
            let sack = SelectiveAck { expected, newest: header.psn, arrived: 0, marked, echo: placement.sent };
            self.push_ack(i, header.psn, Syndrome::SequenceError, Some(sack));
        } else if ahead >= 0 && !context.nak_sent {
            context.nak_sent = true;
            self.push_ack(i, expected, Syndrome::SequenceError, None);
        }
    }

    /// Returns what a READ or atomic request asks for, if its headers are present.
    pub(super) fn read_or_atomic_action(&self, header: &Header) -> Option<PendingAction> {
        let (message, packet, sent) =
            header.placement.map_or((0, 0, 0), |placement| (placement.message, placement.packet, placement.sent));
        match header.operation {
            Operation::ReadRequest => header.reth.map(|reth| PendingAction::Read {
                message,
                packet,
                sent,
                address: reth.address,
                key: reth.key,
                bytes: reth.bytes,
            }),
            Operation::CompareSwap | Operation::FetchAdd => header.atomic.map(|atomic| PendingAction::Atomic {
                message,
                sent,
                atomic,
                is_swap: header.operation == Operation::CompareSwap,
            }),
            _ => None,
        }
    }

    /// Converts an error of a WRITE. With immediate data, the receive request that the WRITE would have completed
    /// reports a local access error to the program.
    pub(super) fn write_error(&mut self, i: usize, header: &Header, error: RequestError) -> RequestError {
        let RequestError::Nak(syndrome @ (Syndrome::RemoteAccess | Syndrome::RemoteOperation)) = error else {
            return error;
        };
        let has_data = matches!(header.immediate, Some(Immediate::Data(_)));
        if has_data && self.open_receives(i, 1) {
            return RequestError::FailReceive(CompletionStatus::LocalAccess, syndrome);
        }
        error
    }

    /// Takes receive requests until `wanted` are available for messages; returns false if there are not as many.
    pub(super) fn open_receives(&mut self, i: usize, wanted: usize) -> bool {
        while self.host_qps[i].taken_receives.len() < wanted {
            let Some(receive) = self.take_receive(i) else { return false };
            self.host_qps[i].taken_receives.push_back(receive);
        }
        true
    }

    fn take_receive(&mut self, i: usize) -> Option<ReceiveRequest> {
        let host = &mut self.host_qps[i];
        let Some(srq) = host.srq else { return host.receives.pop_front() };
        let taken = self.srqs.get_mut(srq.0 as usize)?.as_mut()?.take()?;
        if taken.is_limit_reached {
            self.events.push_back(NicEvent::SharedReceiveLimit(srq));
        }
        Some(taken.request)
    }

    /// Executes a request packet, after all earlier ones have been executed.
    pub(super) fn execute(&mut self, now: Time, i: usize, psn: Psn, action: PendingAction) -> Result<(), RequestError> {
        match action {
            PendingAction::Nothing => return Ok(()),
            PendingAction::Fault(error) => return Err(error),
            PendingAction::Written => {}
            PendingAction::Receive { message, bytes, immediate, is_solicited, is_write } => {
                if ahead_of(message, self.contexts[i].receive_message) != 0 {
                    return Err(RequestError::Nak(Syndrome::InvalidRequest));
                }
                if let Some(Immediate::Invalidate(key)) = immediate {
                    self.table
                        .invalidate(self.protection_context(i), key)
                        .map_err(|_| RequestError::Nak(Syndrome::RemoteAccess))?;
                }
                self.deliver_message(now, i, bytes, immediate, (is_solicited, is_write))?;
            }
            PendingAction::Read { .. } => self.respond_to_read(i, psn, &action)?,
            PendingAction::Atomic { message, sent, atomic, is_swap } => {
                let address = self.check_remote(i, atomic.key, atomic.address, 8, AccessFlags::REMOTE_ATOMIC)?;
                if atomic.address % 8 != 0 {
                    return Err(RequestError::Nak(Syndrome::InvalidRequest));
                }
                let value = if is_swap {
                    self.memory.compare_swap(address, atomic.compare, atomic.swap_or_add)
                } else {
                    self.memory.fetch_add(address, atomic.swap_or_add)
                };
                let value = value.map_err(|_| RequestError::Nak(Syndrome::RemoteOperation))?;
                let result = AtomicResult { psn, message, value };
                let atomic_results = &mut self.host_qps[i].atomic_results;
                if atomic_results.len() == usize::from(READS_MAX) {
                    atomic_results.pop_front();
                }
                atomic_results.push_back(result);
                self.push_atomic_response(i, &result, sent);
            }
        }
        let context = &mut self.contexts[i];
        context.msn = context.msn.wrapping_add(1);
        self.activate(now, i);
        Ok(())
    }

    /// Completes the receive request of the oldest message.
    fn deliver_message(
        &mut self,
        now: Time,
        i: usize,
        bytes: u32,
        immediate: Option<Immediate>,
        (is_solicited, is_write): (bool, bool),
    ) -> Result<(), RequestError> {
        let Some(receive) = self.host_qps[i].taken_receives.pop_front() else {
            return Err(RequestError::ReceiverNotReady);
        };
        self.contexts[i].receive_message = self.contexts[i].receive_message.wrapping_add(1);
        let kind = if is_write { CompletionKind::ReceiveWriteImmediate } else { CompletionKind::Receive };
        let mut completion = Completion::new(receive.id, self.number(i), CompletionStatus::Success, kind);
        (completion.bytes, completion.immediate, completion.solicited) = (bytes, immediate, is_solicited);
        self.complete_receive(now, i, completion);
        Ok(())
    }

    /// Queues the response to a READ.
    pub(super) fn respond_to_read(&mut self, i: usize, psn: Psn, read: &PendingAction) -> Result<(), RequestError> {
        let PendingAction::Read { message, packet, sent, address, key, bytes } = *read else { return Ok(()) };
        let address = self.check_remote(i, key, address, bytes, AccessFlags::REMOTE_READ)?;
        if self.contexts[i].responses_open >= RESPONSES_MAX {
            self.counters.drop_too_many += 1;
            return Ok(()); // the peer will request it again
        }
        let packets = packet_count(bytes, self.contexts[i].mtu());
        let packet_first = packet;
        let Some(_) = packet.checked_add(packets) else {
            return Err(RequestError::Nak(Syndrome::InvalidRequest));
        };
        let response =
            PendingResponse { psn, message, packet, packets, packet_first, address, bytes, sent, value: None };
        self.host_qps[i].responses.push_back(response);
        self.contexts[i].responses_open += 1;
        Ok(())
    }

    pub(super) fn push_atomic_response(&mut self, i: usize, result: &AtomicResult, sent: u16) {
        if self.contexts[i].responses_open >= RESPONSES_MAX {
            self.counters.drop_too_many += 1;
            return;
        }
        self.contexts[i].responses_open += 1;
        self.host_qps[i].responses.push_back(PendingResponse {
            psn: result.psn,
            message: result.message,
            packet: 0,
            packets: 1,
            packet_first: 0,
            address: 0,
            bytes: 0,
            sent,
            value: Some(result.value),
        });
    }

    fn protection_context(&self, i: usize) -> ProtectionContext {
        ProtectionContext { domain: self.contexts[i].domain, qp: self.number(i) }
    }

    /// Returns the host address of memory that the peer names.
    pub(super) fn check_remote(
        &self,
        i: usize,
        key: RKey,
        address: u64,
        bytes: u32,
        access: AccessFlags,
    ) -> Result<u64, RequestError> {
        if bytes > MESSAGE_BYTES_MAX {
            return Err(RequestError::Nak(Syndrome::InvalidRequest));
        }
        if !self.contexts[i].access.contains(access) {
            return Err(RequestError::Nak(Syndrome::RemoteAccess));
        }
        let found = self.table.check_remote(self.protection_context(i), key, address, u64::from(bytes), access);
        found.map_err(|_| RequestError::Nak(Syndrome::RemoteAccess))
    }

    /// Rejects a request with the NAK that the error calls for.
    pub(super) fn reject(&mut self, now: Time, i: usize, psn: Psn, error: RequestError) {
        match error {
            RequestError::ReceiverNotReady => {
                self.counters.rnr_naks_sent += 1;
                self.counters.drop_no_receive += 1;
                let context = &mut self.contexts[i];
                // Later packets were sent before the peer knows of this; they cause no sequence error.
                context.nak_sent = true;
                let timer_code = context.rnr_timer_code;
                self.push_ack(i, psn, Syndrome::ReceiverNotReady { timer_code }, None);
            }
            RequestError::Nak(syndrome) => self.send_nak(now, i, psn, syndrome),
            RequestError::FailReceive(status, syndrome) => {
                if let Some(receive) = self.host_qps[i].taken_receives.pop_front() {
                    let completion = Completion::new(receive.id, self.number(i), status, CompletionKind::Receive);
                    self.complete_receive(now, i, completion);
                }
                self.send_nak(now, i, psn, syndrome);
            }
        }
    }

    /// Handles the end of a response: sends what waited for it.
    pub(super) fn responses_sent(&mut self, now: Time, i: usize) {
        let context = &mut self.contexts[i];
        context.responses_open = context.responses_open.saturating_sub(1);
        if context.responses_open > 0 {
            return;
        }
        if std::mem::take(&mut context.ack_pending) {
            let last = context.receiver.cumulative().previous();
            self.acknowledge(i, last);
        }
        if let Some((psn, syndrome)) = self.host_qps[i].pending_nak.take() {
            self.send_nak(now, i, psn, syndrome);
        }
    }

    /// Sends a NAK and enters the error state, after the responses to earlier requests are sent.
    pub(super) fn send_nak(&mut self, now: Time, i: usize, psn: Psn, syndrome: Syndrome) {
        if self.contexts[i].responses_open > 0 {
            self.contexts[i].nak_pending = true;
            self.host_qps[i].pending_nak = Some((psn, syndrome));
            return;
        }
        if self.contexts[i].service == Service::Rc {
            self.push_ack(i, psn, syndrome, None);
        }
        self.enter_error(now, i);
        let qp = self.number(i);
        self.events.push_back(NicEvent::QpError(qp));
    }

    /// Enters the error state without a request of the program.
    pub(super) fn enter_error(&mut self, now: Time, i: usize) {
        self.contexts[i].state = QpState::Error;
        self.flush_sends(now, i);
        self.flush_receives(now, i);
    }
}
