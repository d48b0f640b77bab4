//! The side that is asked: requests of the peer.

use sim::Time;

use super::context::{AtomicResult, InboundMessage, PendingResponse};
use super::handover::{HardwareReceiver, ReceiveVerdict};
use super::read_response::PlacementError;
use super::slow_path::{ArrivedPackets, ControlEntry, PendingAction};
use super::{CongestionControl, DATAGRAM_OFFSET_BYTES, HostMemory, Nic, NicEvent, READS_MAX};
use crate::verbs::{
    AccessFlags, Completion, CompletionKind, CompletionStatus, NicAddress, ProtectionContext, QpState, ReceiveRequest,
};
use crate::wire::{Header, Immediate, Operation, Psn, QpNumber, RKey, SelectiveAck, Service, Syndrome};

/// Replies that wait to be sent: those that may be asked for at a time, and as many asked for again.
const RESPONSES_MAX: u8 = 2 * READS_MAX;
/// Receive requests that messages may take ahead of those that are missing.
/// Of an unreliable connection: packets that may be missing in a row, and how many must come in a row for a place
/// beyond that, or before, to be believed. Anybody may write a number into a packet: one that was forged must not have
/// millions taken for late.
pub(super) const MISSING_MAX: i32 = 1 << 16;
pub(super) const RUN_PACKETS: u32 = 64;
const OPEN_MAX: u32 = super::WINDOW_PACKETS_MAX;

/// Why a request is not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestError {
    /// No receive request.
    ReceiverNotReady,
    /// The peer's fault, or nobody's.
    Nak(Syndrome),
    /// This side's own: the receive request that it fails with, and what the peer hears.
    FailReceive(CompletionStatus, Syndrome),
}

/// Whether an operation begins a message, and ends one.
fn span(operation: Operation) -> (bool, bool) {
    use Operation::{SendFirst, SendLast, SendMiddle, WriteFirst, WriteLast, WriteMiddle};
    match operation {
        SendFirst | WriteFirst => (true, false),
        SendMiddle | WriteMiddle => (false, false),
        SendLast | WriteLast => (false, true),
        _ => (true, true),
    }
}

fn is_send(operation: Operation) -> bool {
    use Operation::{SendFirst, SendLast, SendMiddle, SendOnly};
    matches!(operation, SendFirst | SendMiddle | SendLast | SendOnly)
}

fn is_write(operation: Operation) -> bool {
    use Operation::{WriteFirst, WriteLast, WriteMiddle, WriteOnly};
    matches!(operation, WriteFirst | WriteMiddle | WriteLast | WriteOnly)
}

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

    /// A switch marked a packet on its way here.
    pub(super) fn ecn_marked(&mut self, now: Time, i: usize, header: &Header) {
        let context = &mut self.contexts[i];
        match self.profile.congestion {
            CongestionControl::Dcqcn(_) if context.service == Service::Ud => {}
            CongestionControl::Dcqcn(constants) if context.cnp_due(now, constants.notify_period) => {
                let (to, qp) = (context.peer, context.peer_qp);
                self.push_cnp(i, to, qp);
            }
            CongestionControl::Dcqcn(_) => {}
            _ if header.operation != Operation::Acknowledge => context.marked = context.marked.saturating_add(1),
            _ => {}
        }
    }

    /// The head of a packet that lost its payload: what is known to be missing need not be waited for.
    pub(super) fn request_trimmed(&mut self, i: usize, header: &Header) {
        let context = &mut self.contexts[i];
        let is_request = is_send(header.operation) || is_write(header.operation);
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

    // --- standard RoCEv2: in order, or not at all ---

    fn request_in_order(&mut self, now: Time, i: usize, header: &Header, payload: &M::Payload) {
        let context = &mut self.contexts[i];
        let ahead = header.psn.after(context.receiver.cumulative());
        if ahead > 0 {
            self.counters.out_of_order_packets += 1;
            self.counters.drop_out_of_order += 1;
            if !context.nak_sent {
                context.nak_sent = true;
                let expected = context.receiver.cumulative();
                self.push_ack(i, expected, Syndrome::SequenceError, None);
            }
            return;
        }
        if ahead < 0 {
            self.duplicate_request(now, i, header);
            return;
        }
        match self.execute_in_order(now, i, header, payload) {
            Ok(()) => {
                let context = &mut self.contexts[i];
                context.nak_sent = false;
                if header.ack_request && !is_read_or_atomic(header.operation) {
                    self.acknowledge_in_order(i, header.psn);
                }
            }
            Err(refusal) => self.reject(now, i, header.psn, refusal),
        }
    }

    /// Does the expected request, or a packet of it.
    fn execute_in_order(
        &mut self,
        now: Time,
        i: usize,
        header: &Header,
        payload: &M::Payload,
    ) -> Result<(), RequestError> {
        let (begins, ends) = span(header.operation);
        let context = &self.contexts[i];
        let wanted = if begins {
            InboundMessage::Nothing
        } else if is_send(header.operation) {
            InboundMessage::Send
        } else {
            InboundMessage::Write
        };
        let is_full = header.payload_bytes == context.mtu();
        if context.inbound != wanted || !ends && !is_full {
            return Err(RequestError::Nak(Syndrome::InvalidRequest));
        }
        let action = if is_send(header.operation) {
            self.in_order_send(i, header, payload)?
        } else if is_write(header.operation) {
            self.in_order_write(i, header, payload)?
        } else {
            self.read_or_atomic_action(header).ok_or(RequestError::Nak(Syndrome::InvalidRequest))?
        };
        self.execute(now, i, header.psn, action)?;
        // A READ takes as many numbers as its answer has packets.
        let numbers = match action {
            PendingAction::Read { bytes, .. } => bytes.div_ceil(self.contexts[i].mtu()).max(1),
            _ => 1,
        };
        let context = &mut self.contexts[i];
        context.receiver = HardwareReceiver::new(header.psn.plus(numbers));
        self.counters.received_bytes += u64::from(header.payload_bytes);
        Ok(())
    }

    fn in_order_send(
        &mut self,
        i: usize,
        header: &Header,
        payload: &M::Payload,
    ) -> Result<PendingAction, RequestError> {
        let (begins, ends) = span(header.operation);
        if begins {
            if !self.open_receives(i, 1) {
                return Err(RequestError::ReceiverNotReady);
            }
            self.contexts[i].inbound_done = 0;
        }
        let offset = self.contexts[i].inbound_done;
        let Some(local) = self.host_qps[i].taken_receives.front().map(|receive| receive.local) else {
            return Err(RequestError::Nak(Syndrome::RemoteOperation));
        };
        self.scatter(i, &local, offset, header.payload_bytes, payload).map_err(receive_error)?;
        let context = &mut self.contexts[i];
        context.inbound_done = offset + header.payload_bytes;
        context.inbound = if ends { InboundMessage::Nothing } else { InboundMessage::Send };
        if !ends {
            return Ok(PendingAction::Nothing);
        }
        Ok(PendingAction::Receive {
            message: context.receive_message,
            bytes: context.inbound_done,
            immediate: header.immediate,
            is_solicited: header.solicited,
            is_write: false,
        })
    }

    fn in_order_write(
        &mut self,
        i: usize,
        header: &Header,
        payload: &M::Payload,
    ) -> Result<PendingAction, RequestError> {
        let (begins, ends) = span(header.operation);
        if begins {
            let reth = header.reth.ok_or(RequestError::Nak(Syndrome::InvalidRequest))?;
            let found = self.check_remote(i, reth.key, reth.address, reth.bytes, AccessFlags::REMOTE_WRITE);
            let address = found.map_err(|refusal| self.write_error(i, header, refusal))?;
            let context = &mut self.contexts[i];
            (context.inbound_address, context.inbound_left, context.inbound_done) = (address, reth.bytes, reth.bytes);
        }
        let left = self.contexts[i].inbound_left;
        if header.payload_bytes > left || ends && header.payload_bytes != left {
            return Err(RequestError::Nak(Syndrome::InvalidRequest));
        }
        if header.immediate.is_some() && !self.open_receives(i, 1) {
            return Err(RequestError::ReceiverNotReady);
        }
        let address = self.contexts[i].inbound_address;
        if header.payload_bytes > 0 {
            let placed = self.memory.place(address, header.payload_bytes, payload, 0);
            placed.map_err(|_| self.write_error(i, header, RequestError::Nak(Syndrome::RemoteOperation)))?;
        }
        let context = &mut self.contexts[i];
        context.inbound_address = address.wrapping_add(u64::from(header.payload_bytes));
        context.inbound_left -= header.payload_bytes;
        context.inbound = if ends { InboundMessage::Nothing } else { InboundMessage::Write };
        let (message, bytes) = (context.receive_message, context.inbound_done);
        Ok(write_action(header, message, bytes))
    }

    /// What a request for content asks for, if its headers are there.
    fn read_or_atomic_action(&self, header: &Header) -> Option<PendingAction> {
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

    /// A request that was done already: only its answer is missing.
    fn duplicate_request(&mut self, now: Time, i: usize, header: &Header) {
        self.counters.duplicate_packets += 1;
        match self.read_or_atomic_action(header) {
            None => {
                if header.ack_request {
                    self.acknowledge_in_order(i, header.psn);
                }
            }
            Some(PendingAction::Read { message, packet, sent, address, key, bytes }) => {
                let read = PendingAction::Read { message, packet, sent, address, key, bytes };
                // What cannot be read any more is not answered: the first answer said all there was to say.
                if self.respond_to_read(i, header.psn, &read).is_err() {
                    self.counters.drop_malformed += 1;
                }
            }
            Some(_) => {
                let result = self.host_qps[i].atomic_results.iter().find(|result| result.psn == header.psn).copied();
                match result {
                    Some(result) => {
                        self.push_atomic_response(i, &result, header.placement.map_or(0, |placement| placement.sent))
                    }
                    None => self.counters.drop_malformed += 1,
                }
            }
        }
        self.activate(now, i);
    }

    /// Acknowledges, behind the answers that are still to be sent where order counts: an acknowledgement says of those
    /// before it that they were sent.
    fn acknowledge_in_order(&mut self, i: usize, newest: Psn) {
        if self.contexts[i].responses_open > 0 && !self.profile.policy.is_selective() {
            self.contexts[i].ack_pending = true;
        } else {
            self.acknowledge(i, newest);
        }
    }

    // --- selective repeat: placed at once, done in order ---

    fn request_selective(&mut self, now: Time, i: usize, header: &Header, payload: &M::Payload) {
        let psn = header.psn;
        let context = &mut self.contexts[i];
        let Some(placement) = header.placement else {
            self.counters.drop_malformed += 1;
            return;
        };
        context.echo = placement.sent;
        match context.receiver.classify(psn, self.profile.window_packets) {
            ReceiveVerdict::Duplicate => self.duplicate_request(now, i, header),
            ReceiveVerdict::BeyondWindow => self.counters.drop_beyond_window += 1,
            ReceiveVerdict::InOrder => match self.place_request(i, header, payload) {
                Ok(action) => self.accept_in_order(now, i, header, action),
                Err(refusal) => self.reject(now, i, psn, refusal),
            },
            ReceiveVerdict::SlowPath => self.accept_out_of_order(now, i, header, payload),
        }
    }

    /// The fast path: hardware alone.
    fn accept_in_order(&mut self, now: Time, i: usize, header: &Header, action: PendingAction) {
        self.counters.received_bytes += u64::from(header.payload_bytes);
        if let Err(refusal) = self.execute(now, i, header.psn, action) {
            self.reject(now, i, header.psn, refusal);
            return;
        }
        self.contexts[i].receiver.accept();
        if header.ack_request && !is_read_or_atomic(header.operation) {
            self.acknowledge(i, header.psn);
        }
    }

    /// The slow path's hardware half: places the payload, queues the header.
    fn accept_out_of_order(&mut self, now: Time, i: usize, header: &Header, payload: &M::Payload) {
        if !self.has_slow_path_room() {
            self.counters.drop_control_queue += 1;
            return;
        }
        let cumulative = self.contexts[i].receiver.cumulative();
        let action = match self.place_request(i, header, payload) {
            Ok(action) => action,
            // Only the first that is missing may be refused for want of a receive request; others come again.
            Err(RequestError::ReceiverNotReady) if header.psn != cumulative => {
                self.counters.drop_no_receive += 1;
                return;
            }
            Err(RequestError::ReceiverNotReady) => {
                self.reject(now, i, header.psn, RequestError::ReceiverNotReady);
                return;
            }
            Err(refusal) => PendingAction::Fault(refusal),
        };
        let context = &mut self.contexts[i];
        if header.psn.after(context.receiver.cumulative()) > 0 && !context.receiver.is_slow() {
            self.counters.out_of_order_packets += 1;
        }
        let arrived = ArrivedPackets {
            psn: header.psn,
            packets: 1,
            cumulative,
            sent: context.echo,
            bytes: header.payload_bytes,
            action,
        };
        self.queue_to_slow_path(now, i, ControlEntry::Arrived(arrived));
        if self.contexts[i].receiver.note_queued(header.psn, action.is_ordered()) {
            self.counters.slow_entries += 1;
        }
    }

    /// Places a packet's payload where the packet says that it belongs; gives what remains to be done in order.
    fn place_request(
        &mut self,
        i: usize,
        header: &Header,
        payload: &M::Payload,
    ) -> Result<PendingAction, RequestError> {
        let invalid = RequestError::Nak(Syndrome::InvalidRequest);
        let placement = header.placement.ok_or(invalid)?;
        let (begins, ends) = span(header.operation);
        let mtu = self.contexts[i].mtu();
        if is_read_or_atomic(header.operation) {
            return self.read_or_atomic_action(header).ok_or(invalid);
        }
        if begins != (placement.packet == 0) || !ends && header.payload_bytes != mtu {
            return Err(invalid);
        }
        let takes_receive = is_send(header.operation) || header.immediate.is_some();
        if takes_receive {
            self.open_message(i, placement.message)?;
        }
        if is_write(header.operation) {
            self.place_write(i, header, payload)?;
            let bytes = header.reth.map_or(0, |reth| reth.bytes);
            return Ok(write_action(header, placement.message, bytes));
        }
        let at = ahead_of(placement.message, self.contexts[i].receive_message) as usize;
        let local = self.host_qps[i].taken_receives[at].local;
        let offset = placement.packet.checked_mul(mtu).ok_or(invalid)?;
        let bytes = offset.checked_add(header.payload_bytes).ok_or(invalid)?;
        self.scatter(i, &local, offset, header.payload_bytes, payload).map_err(receive_error)?;
        if !ends {
            return Ok(PendingAction::Nothing);
        }
        Ok(PendingAction::Receive {
            message: placement.message,
            bytes,
            immediate: header.immediate,
            is_solicited: header.solicited,
            is_write: false,
        })
    }

    fn place_write(&mut self, i: usize, header: &Header, payload: &M::Payload) -> Result<(), RequestError> {
        let reth = header.reth.ok_or(RequestError::Nak(Syndrome::InvalidRequest))?;
        // What this packet fills; a message of no bytes is checked for nothing (IBA 9.7.4.1.3).
        let found = self.check_remote(i, reth.key, reth.address, header.payload_bytes, AccessFlags::REMOTE_WRITE);
        let address = found.map_err(|refusal| self.write_error(i, header, refusal))?;
        if header.payload_bytes == 0 {
            return Ok(());
        }
        let placed = self.memory.place(address, header.payload_bytes, payload, 0);
        placed.map_err(|_| self.write_error(i, header, RequestError::Nak(Syndrome::RemoteOperation)))
    }

    /// Memory that a WRITE names is not there or not for it. With immediate data the program here hears of it by the
    /// receive request that the WRITE would have completed: a local access error.
    fn write_error(&mut self, i: usize, header: &Header, refusal: RequestError) -> RequestError {
        let RequestError::Nak(syndrome @ (Syndrome::RemoteAccess | Syndrome::RemoteOperation)) = refusal else {
            return refusal;
        };
        let has_data = matches!(header.immediate, Some(Immediate::Data(_)));
        if has_data && self.open_receives(i, 1) {
            return RequestError::FailReceive(CompletionStatus::LocalAccess, syndrome);
        }
        refusal
    }

    /// Sees to it that a message has its receive request, and all before it have theirs.
    fn open_message(&mut self, i: usize, message: u32) -> Result<(), RequestError> {
        let ahead = ahead_of(message, self.contexts[i].receive_message);
        if ahead < 0 || ahead.cast_unsigned() >= OPEN_MAX {
            return Err(RequestError::Nak(Syndrome::InvalidRequest));
        }
        if self.open_receives(i, ahead.cast_unsigned() as usize + 1) {
            Ok(())
        } else {
            Err(RequestError::ReceiverNotReady)
        }
    }

    /// Takes receive requests until so many are open; false when there are not so many.
    fn open_receives(&mut self, i: usize, wanted: usize) -> bool {
        while self.host_qps[i].taken_receives.len() < wanted {
            let Some(receive) = self.take_receive(i) else { return false };
            self.host_qps[i].taken_receives.push_back(receive);
        }
        true
    }

    fn take_receive(&mut self, i: usize) -> Option<ReceiveRequest> {
        let host = &mut self.host_qps[i];
        let Some(shared) = host.shared else { return host.receives.pop_front() };
        let batch_qps = self.srqs.get_mut(shared.0 as usize)?.as_mut()?.take()?;
        if batch_qps.is_limit_reached {
            self.events.push_back(NicEvent::SharedReceiveLimit(shared));
        }
        Some(batch_qps.request)
    }

    // --- what is done in order, by whichever path ---

    /// Does what a packet asks for, when all before it is done.
    pub(super) fn execute(&mut self, now: Time, i: usize, psn: Psn, action: PendingAction) -> Result<(), RequestError> {
        match action {
            PendingAction::Nothing => return Ok(()),
            PendingAction::Fault(refusal) => return Err(refusal),
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
                self.complete_receive(now, i, bytes, immediate, (is_solicited, is_write))?;
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
        context.messages = context.messages.wrapping_add(1);
        self.activate(now, i);
        Ok(())
    }

    fn complete_receive(
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
        let cq = self.contexts[i].receive_cq;
        self.complete(now, cq, completion);
        Ok(())
    }

    /// Queues the answer to a READ.
    fn respond_to_read(&mut self, i: usize, psn: Psn, read: &PendingAction) -> Result<(), RequestError> {
        let PendingAction::Read { message, packet, sent, address, key, bytes } = *read else { return Ok(()) };
        let address = self.check_remote(i, key, address, bytes, AccessFlags::REMOTE_READ)?;
        if self.contexts[i].responses_open >= RESPONSES_MAX {
            self.counters.drop_too_many += 1;
            return Ok(()); // it will be asked for again
        }
        let packets = bytes.div_ceil(self.contexts[i].mtu()).max(1);
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

    fn push_atomic_response(&mut self, i: usize, result: &AtomicResult, sent: u16) {
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

    /// Where the host has memory that the peer names.
    fn check_remote(
        &self,
        i: usize,
        key: RKey,
        address: u64,
        bytes: u32,
        access: AccessFlags,
    ) -> Result<u64, RequestError> {
        if bytes > crate::verbs::MESSAGE_BYTES_MAX {
            return Err(RequestError::Nak(Syndrome::InvalidRequest));
        }
        if !self.contexts[i].access.contains(access) {
            return Err(RequestError::Nak(Syndrome::RemoteAccess));
        }
        let found = self.table.check_remote(self.protection_context(i), key, address, u64::from(bytes), access);
        found.map_err(|_| RequestError::Nak(Syndrome::RemoteAccess))
    }

    /// Says no, as the refusal has it.
    pub(super) fn reject(&mut self, now: Time, i: usize, psn: Psn, refusal: RequestError) {
        match refusal {
            RequestError::ReceiverNotReady => {
                self.counters.not_ready += 1;
                self.counters.drop_no_receive += 1;
                let context = &mut self.contexts[i];
                // What follows was sent before the peer hears of this: no complaint about it.
                context.nak_sent = true;
                let timer_code = context.rnr_timer_code;
                self.push_ack(i, psn, Syndrome::ReceiverNotReady { timer_code }, None);
            }
            RequestError::Nak(syndrome) => self.send_nak(now, i, psn, syndrome),
            RequestError::FailReceive(status, syndrome) => {
                if let Some(receive) = self.host_qps[i].taken_receives.pop_front() {
                    let completion = Completion::new(receive.id, self.number(i), status, CompletionKind::Receive);
                    let cq = self.contexts[i].receive_cq;
                    self.complete(now, cq, completion);
                }
                self.send_nak(now, i, psn, syndrome);
            }
        }
    }

    /// The last packet of an answer was sent.
    pub(super) fn responses_sent(&mut self, now: Time, i: usize) {
        let context = &mut self.contexts[i];
        context.responses_open = context.responses_open.saturating_sub(1);
        if context.responses_open > 0 {
            return;
        }
        if std::mem::take(&mut context.ack_pending) {
            let last = context.receiver.cumulative().plus(Psn::new(u32::MAX).get());
            self.acknowledge(i, last);
        }
        if let Some((psn, syndrome)) = self.host_qps[i].pending_nak.take() {
            self.send_nak(now, i, psn, syndrome);
        }
    }

    /// Says no for ever: the queue pair goes to the error state, once the answers to what was done before are sent.
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

    // --- unreliable services ---

    /// A packet of an unreliable connection: a message of which one is missing is dropped as a whole.
    fn request_unreliable(&mut self, now: Time, i: usize, header: &Header, payload: &M::Payload) {
        let (begins, _) = span(header.operation);
        if !is_send(header.operation) && !is_write(header.operation) {
            self.counters.drop_service += 1;
            return;
        }
        let ahead = header.psn.after(self.contexts[i].receiver.cumulative());
        let is_near = (0..=MISSING_MAX).contains(&ahead);
        if !is_near && !self.is_resynchronized(i, header.psn) {
            // Late, or a copy: in order, or not at all.
            self.counters.drop_out_of_order += 1;
            return;
        }
        self.host_qps[i].stray_run = None;
        let context = &mut self.contexts[i];
        let is_expected = ahead == 0;
        context.receiver = HardwareReceiver::new(header.psn.plus(1));
        if begins || !is_expected {
            context.inbound = InboundMessage::Nothing; // the receive request is kept for the next message
        }
        let is_lost = !begins && context.inbound == InboundMessage::Nothing;
        if is_lost {
            self.counters.drop_out_of_order += 1;
            return;
        }
        match self.execute_in_order(now, i, header, payload) {
            Ok(()) => {}
            // This side's own fault: its receive request names memory that is not for it.
            Err(RequestError::FailReceive(CompletionStatus::LocalProtection, syndrome)) => {
                let refusal = RequestError::FailReceive(CompletionStatus::LocalProtection, syndrome);
                self.reject(now, i, header.psn, refusal);
            }
            // A message that is too long, or names memory that is not for it, harms nothing but itself, as with
            // rdma_rxe: anybody may write a peer's address into a packet, and must not end its connection so.
            Err(refusal) => {
                // Nobody is told, and nothing but this message is lost.
                self.contexts[i].inbound = InboundMessage::Nothing;
                match refusal {
                    RequestError::ReceiverNotReady => self.counters.drop_no_receive += 1,
                    RequestError::FailReceive(CompletionStatus::LocalLength, _) => self.note_dropped_long(i),
                    _ => self.counters.drop_malformed += 1,
                }
            }
        }
        self.contexts[i].receiver = HardwareReceiver::new(header.psn.plus(1));
    }

    fn note_dropped_long(&mut self, i: usize) {
        self.counters.drop_long += 1;
        self.host_qps[i].dropped_long += 1;
    }

    /// Whether so many packets have come in a row by now that the peer is there, and not where it was.
    fn is_resynchronized(&mut self, i: usize, psn: Psn) -> bool {
        let stray_run = &mut self.host_qps[i].stray_run;
        let count = stray_run.filter(|(next, _)| *next == psn).map_or(1, |(_, count)| count + 1);
        *stray_run = Some((psn.plus(1), count));
        count >= RUN_PACKETS
    }

    fn datagram(&mut self, now: Time, i: usize, source: NicAddress, header: &Header, payload: &M::Payload) {
        let (Operation::SendOnly, Some((queue_key, qp))) = (header.operation, header.datagram) else {
            self.counters.drop_service += 1;
            return;
        };
        if queue_key != self.contexts[i].queue_key {
            self.counters.drop_queue_key += 1;
            return;
        }
        if matches!(header.immediate, Some(Immediate::Invalidate(_))) {
            self.counters.drop_malformed += 1;
            return;
        }
        if !self.open_receives(i, 1) {
            self.counters.drop_no_receive += 1;
            return;
        }
        let Some(receive) = self.host_qps[i].taken_receives.front().copied() else { return };
        let placed = self.scatter(i, &receive.local, DATAGRAM_OFFSET_BYTES, header.payload_bytes, payload);
        match placed {
            Ok(()) => {}
            // Whoever knows the queue key could end the queue pair by it.
            Err(PlacementError::Length) => return self.note_dropped_long(i),
            Err(misfit) => return self.reject(now, i, header.psn, receive_error(misfit)),
        }
        self.host_qps[i].taken_receives.pop_front();
        self.counters.received_bytes += u64::from(header.payload_bytes);
        let mut completion =
            Completion::new(receive.id, self.number(i), CompletionStatus::Success, CompletionKind::Receive);
        completion.bytes = DATAGRAM_OFFSET_BYTES + header.payload_bytes;
        completion.immediate = header.immediate;
        completion.solicited = header.solicited;
        completion.source = Some((source, QpNumber(qp.0)));
        let cq = self.contexts[i].receive_cq;
        self.complete(now, cq, completion);
    }

    /// Goes to the error state, of its own accord.
    pub(super) fn enter_error(&mut self, now: Time, i: usize) {
        self.contexts[i].state = QpState::Error;
        self.flush_sends(now, i);
        self.flush_receives(now, i);
    }
}

fn is_read_or_atomic(operation: Operation) -> bool {
    matches!(operation, Operation::ReadRequest | Operation::CompareSwap | Operation::FetchAdd)
}

/// What is left to do of a WRITE's packet that is placed.
fn write_action(header: &Header, message: u32, bytes: u32) -> PendingAction {
    let (_, ends) = span(header.operation);
    match header.immediate {
        Some(Immediate::Data(_)) if ends => PendingAction::Receive {
            message,
            bytes,
            immediate: header.immediate,
            is_solicited: header.solicited,
            is_write: true,
        },
        Some(_) => PendingAction::Fault(RequestError::Nak(Syndrome::InvalidRequest)),
        None if ends => PendingAction::Written,
        None => PendingAction::Nothing,
    }
}

fn receive_error(misfit: PlacementError) -> RequestError {
    match misfit {
        PlacementError::Length => RequestError::FailReceive(CompletionStatus::LocalLength, Syndrome::InvalidRequest),
        PlacementError::Protection => {
            RequestError::FailReceive(CompletionStatus::LocalProtection, Syndrome::RemoteOperation)
        }
    }
}

/// How far one message number of 24 bits is ahead of another.
fn ahead_of(message: u32, other: u32) -> i32 {
    Psn::new(message).after(Psn::new(other))
}
