//! Requests of a connection without selective repeat: executed in order, or dropped.

use sim::Time;

use super::context::InboundMessage;
use super::control_queue::PendingAction;
use super::engine::Nic;
use super::handover::HardwareReceiver;
use super::memory::HostMemory;
use super::request_error::RequestError;
use super::segmentation::packet_count;
use crate::verbs::AccessFlags;
use crate::wire::{Header, Psn, Service, Syndrome};

impl<M: HostMemory> Nic<M> {
    pub(super) fn request_in_order(&mut self, now: Time, i: usize, header: &Header, payload: &M::Payload) {
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
                if header.ack_request && !header.operation.is_read_or_atomic() {
                    self.acknowledge_in_order(i, header.psn);
                }
            }
            Err(error) => self.reject(now, i, header.psn, error),
        }
    }

    /// Executes the expected request packet.
    pub(super) fn execute_in_order(
        &mut self,
        now: Time,
        i: usize,
        header: &Header,
        payload: &M::Payload,
    ) -> Result<(), RequestError> {
        let (begins, ends) = header.operation.message_bounds();
        let context = &self.contexts[i];
        let wanted = if begins {
            InboundMessage::Nothing
        } else if header.operation.is_send() {
            InboundMessage::Send
        } else {
            InboundMessage::Write
        };
        let is_full = header.payload_bytes == context.mtu();
        if context.inbound != wanted || !ends && !is_full {
            return Err(RequestError::Nak(Syndrome::InvalidRequest));
        }
        let action = if header.operation.is_send() {
            self.in_order_send(i, header, payload)?
        } else if header.operation.is_write() {
            self.in_order_write(i, header, payload)?
        } else {
            self.read_or_atomic_action(header).ok_or(RequestError::Nak(Syndrome::InvalidRequest))?
        };
        self.execute(now, i, header.psn, action)?;
        // A READ takes as many PSNs as its response has packets.
        let numbers = match action {
            PendingAction::Read { bytes, .. } => packet_count(bytes, self.contexts[i].mtu()),
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
        let (begins, ends) = header.operation.message_bounds();
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
        self.scatter(i, &local, offset, header.payload_bytes, payload).map_err(RequestError::from)?;
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
        let (begins, ends) = header.operation.message_bounds();
        if begins {
            let reth = header.reth.ok_or(RequestError::Nak(Syndrome::InvalidRequest))?;
            let found = self.check_remote(i, reth.key, reth.address, reth.bytes, AccessFlags::REMOTE_WRITE);
            let address = found.map_err(|error| self.write_error(i, header, error))?;
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
        Ok(PendingAction::of_write(header, message, bytes))
    }

    /// Handles a duplicate of an executed request: only its response is missing.
    pub(super) fn duplicate_request(&mut self, now: Time, i: usize, header: &Header) {
        self.counters.duplicate_packets += 1;
        match self.read_or_atomic_action(header) {
            None => {
                if header.ack_request {
                    self.acknowledge_in_order(i, header.psn);
                }
            }
            Some(PendingAction::Read { message, packet, sent, address, key, bytes }) => {
                let read = PendingAction::Read { message, packet, sent, address, key, bytes };
                // A READ that is no longer possible gets no response; the first response was correct.
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

    /// Without selective acknowledgements, which count marks, an acknowledgement can only say that all of its packets
    /// were marked or none. So a receiver acknowledges what came before the state changed (RFC 8257, 3.2).
    pub(super) fn acknowledge_before_mark(&mut self, i: usize, header: &Header, marked: bool) {
        let context = &mut self.contexts[i];
        let is_counted = context.service == Service::Rc && (header.operation.is_write() || header.operation.is_send());
        let is_needed = !self.profile.policy.is_selective() && self.profile.echoes_marks() && is_counted;
        if is_needed && marked != (context.marked > 0) {
            let newest = context.receiver.cumulative().previous();
            self.acknowledge_in_order(i, newest);
            self.contexts[i].marked = 0;
        }
    }

    /// Acknowledges, after pending responses where order matters: the acknowledgement implies that earlier responses
    /// were sent.
    fn acknowledge_in_order(&mut self, i: usize, newest: Psn) {
        if self.contexts[i].responses_open > 0 && !self.profile.policy.is_selective() {
            self.contexts[i].ack_pending = true;
        } else {
            self.acknowledge(i, newest);
        }
    }
}
