//! Messages of unreliable connections and datagrams.

use sim::Time;

use super::context::InboundMessage;
use super::engine::Nic;
use super::handover::HardwareReceiver;
use super::limits::DATAGRAM_OFFSET_BYTES;
use super::memory::HostMemory;
use super::request_error::{PlacementError, RequestError};
use crate::verbs::{Completion, CompletionKind, CompletionStatus, NicAddress};
use crate::wire::{Header, Immediate, Operation, Psn, QpNumber};

/// For an unreliable connection: the largest number of consecutive missing packets that is accepted. A packet further
/// ahead, or behind, may be forged, because anybody can write a PSN; it must not make millions of packets appear late.
pub(super) const MISSING_MAX: i32 = 1 << 16;

/// For an unreliable connection: the length of a run of packets outside the expected range that is accepted.
pub(super) const RUN_PACKETS: u32 = 64;

impl<M: HostMemory> Nic<M> {
    /// Processes a packet of an unreliable connection. A message with a missing packet is dropped as a whole.
    pub(super) fn request_unreliable(&mut self, now: Time, i: usize, header: &Header, payload: &M::Payload) {
        let (begins, _) = header.operation.message_bounds();
        if !header.operation.is_send() && !header.operation.is_write() {
            self.counters.drop_service += 1;
            return;
        }
        let ahead = header.psn.after(self.contexts[i].receiver.cumulative());
        let is_near = (0..=MISSING_MAX).contains(&ahead);
        if !is_near && !self.note_stray(i, header.psn) {
            // A late packet or a duplicate: messages are delivered in order or not at all.
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
            // A local error: the receive request names memory that it may not use.
            Err(RequestError::FailReceive(CompletionStatus::LocalProtection, syndrome)) => {
                let error = RequestError::FailReceive(CompletionStatus::LocalProtection, syndrome);
                self.reject(now, i, header.psn, error);
            }
            // A message that is too long, or names memory that it may not access, affects only itself, as in rdma_rxe:
            // anybody can forge the peer's address, and must not be able to end the connection.
            Err(error) => {
                // The peer is not notified, and only this message is lost.
                self.contexts[i].inbound = InboundMessage::Nothing;
                match error {
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

    /// Notes a packet outside the expected range. Returns whether its run of consecutive packets is long enough to show
    /// that the peer continues there.
    fn note_stray(&mut self, i: usize, psn: Psn) -> bool {
        let stray_run = &mut self.host_qps[i].stray_run;
        let count = stray_run.filter(|(next, _)| *next == psn).map_or(1, |(_, count)| count + 1);
        *stray_run = Some((psn.plus(1), count));
        count >= RUN_PACKETS
    }

    pub(super) fn datagram(&mut self, now: Time, i: usize, source: NicAddress, header: &Header, payload: &M::Payload) {
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
            // Anybody who knows the queue key could otherwise end the queue pair.
            Err(PlacementError::Length) => return self.note_dropped_long(i),
            Err(error) => return self.reject(now, i, header.psn, error.into()),
        }
        self.host_qps[i].taken_receives.pop_front();
        self.counters.received_bytes += u64::from(header.payload_bytes);
        let mut completion =
            Completion::new(receive.id, self.number(i), CompletionStatus::Success, CompletionKind::Receive);
        completion.bytes = DATAGRAM_OFFSET_BYTES + header.payload_bytes;
        completion.immediate = header.immediate;
        completion.solicited = header.solicited;
        completion.source = Some((source, QpNumber(qp.0)));
        self.complete_receive(now, i, completion);
    }
}
