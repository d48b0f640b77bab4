//! Requests of a connection with selective repeat: placed at once, executed in order.

use sim::Time;

use super::control_queue::{ArrivedPackets, ControlEntry, PendingAction};
use super::engine::Nic;
use super::handover::ReceiveVerdict;
use super::limits::WINDOW_PACKETS_MAX;
use super::memory::HostMemory;
use super::request_error::RequestError;
use super::segmentation::ahead_of;
use crate::verbs::AccessFlags;
use crate::wire::{Header, Syndrome};

/// Maximum number of receive requests that messages may take ahead of the first missing one.
const OPEN_MAX: u32 = WINDOW_PACKETS_MAX;

impl<M: HostMemory> Nic<M> {
    pub(super) fn request_selective(&mut self, now: Time, i: usize, header: &Header, payload: &M::Payload) {
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
                Err(error) => self.reject(now, i, psn, error),
            },
            ReceiveVerdict::SlowPath => self.accept_out_of_order(now, i, header, payload),
        }
    }

    /// The fast path: hardware alone.
    fn accept_in_order(&mut self, now: Time, i: usize, header: &Header, action: PendingAction) {
        self.counters.received_bytes += u64::from(header.payload_bytes);
        if let Err(error) = self.execute(now, i, header.psn, action) {
            self.reject(now, i, header.psn, error);
            return;
        }
        self.contexts[i].receiver.accept();
        if header.ack_request && !header.operation.is_read_or_atomic() {
            self.acknowledge(i, header.psn);
        }
    }

    /// The hardware part of the slow path: places the payload and queues the header.
    fn accept_out_of_order(&mut self, now: Time, i: usize, header: &Header, payload: &M::Payload) {
        if !self.has_slow_path_room() {
            self.counters.drop_control_queue += 1;
            return;
        }
        let cumulative = self.contexts[i].receiver.cumulative();
        let action = match self.place_request(i, header, payload) {
            Ok(action) => action,
            // Only the first missing packet may cause an RNR NAK; others are retransmitted.
            Err(RequestError::ReceiverNotReady) if header.psn != cumulative => {
                self.counters.drop_no_receive += 1;
                return;
            }
            Err(RequestError::ReceiverNotReady) => {
                self.reject(now, i, header.psn, RequestError::ReceiverNotReady);
                return;
            }
            Err(error) => PendingAction::Fault(error),
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

    /// Places a payload where its placement header says; returns what remains to be done in order.
    fn place_request(
        &mut self,
        i: usize,
        header: &Header,
        payload: &M::Payload,
    ) -> Result<PendingAction, RequestError> {
        let invalid = RequestError::Nak(Syndrome::InvalidRequest);
        let placement = header.placement.ok_or(invalid)?;
        let (begins, ends) = header.operation.message_bounds();
        let mtu = self.contexts[i].mtu();
        if header.operation.is_read_or_atomic() {
            return self.read_or_atomic_action(header).ok_or(invalid);
        }
        if begins != (placement.packet == 0) || !ends && header.payload_bytes != mtu {
            return Err(invalid);
        }
        let takes_receive = header.operation.is_send() || header.immediate.is_some();
        if takes_receive {
            self.open_message(i, placement.message)?;
        }
        if header.operation.is_write() {
            self.place_write(i, header, payload)?;
            let bytes = header.reth.map_or(0, |reth| reth.bytes);
            return Ok(PendingAction::of_write(header, placement.message, bytes));
        }
        let at = ahead_of(placement.message, self.contexts[i].receive_message) as usize;
        let local = self.host_qps[i].taken_receives[at].local;
        let offset = placement.packet.checked_mul(mtu).ok_or(invalid)?;
        let bytes = offset.checked_add(header.payload_bytes).ok_or(invalid)?;
        self.scatter(i, &local, offset, header.payload_bytes, payload).map_err(RequestError::from)?;
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
        // Checks only what this packet writes; a message of no bytes is not checked (IBA 9.7.4.1.3).
        let found = self.check_remote(i, reth.key, reth.address, header.payload_bytes, AccessFlags::REMOTE_WRITE);
        let address = found.map_err(|error| self.write_error(i, header, error))?;
        if header.payload_bytes == 0 {
            return Ok(());
        }
        let placed = self.memory.place(address, header.payload_bytes, payload, 0);
        placed.map_err(|_| self.write_error(i, header, RequestError::Nak(Syndrome::RemoteOperation)))
    }

    /// Takes the receive request for a message, and those for all earlier messages.
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
}
