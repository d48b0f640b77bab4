//! READ and atomic responses at the requester.

use sim::{Span, Time};

use super::control_queue::ControlEntry;
use super::engine::Nic;
use super::host_qp::{Retransmission, SendEntry};
use super::limits::{READS_MAX, WINDOW_PACKETS_MAX};
use super::memory::HostMemory;
use super::request_error::PlacementError;
use super::response_tracker::OutOfOrderResponse;
use super::segmentation::{packet_count, piece_bytes, tick};
use crate::verbs::{AccessFlags, CompletionStatus, QpState, SGES_MAX, SendKind, Sge};
use crate::wire::{Header, Operation, Psn, Service};

impl<M: HostMemory> Nic<M> {
    /// Processes a response without selective repeat, which must be the expected one.
    pub(super) fn response_in_order(&mut self, now: Time, i: usize, header: &Header, payload: &M::Payload) {
        let Some(index) = self.index_of(i, header.psn) else {
            self.counters.drop_unsolicited += 1;
            return;
        };
        let Some(entry) = self.entry(i, index).filter(|entry| entry.is_read_or_atomic() && !entry.is_done) else {
            self.counters.drop_unsolicited += 1;
            return;
        };
        let expected = entry.first.plus(entry.response_packets);
        let ahead = header.psn.after(expected);
        if ahead < 0 {
            self.counters.duplicate_packets += 1;
            return;
        }
        // It acknowledges all earlier requests; an earlier response that is missing was lost.
        if !self.advance_unacked(now, i, expected, 0) || self.contexts[i].unacked != expected || ahead > 0 {
            self.counters.drop_out_of_order += 1;
            self.go_back_once(now, i);
            return;
        }
        let packet = self.entry(i, index).map_or(0, |entry| entry.response_packets);
        if self.accept_response(now, i, index, packet, header, payload) {
            self.counters.received_bytes += u64::from(header.payload_bytes);
            self.response_progress(now, i, index, packet + 1);
            self.advance_unacked(now, i, expected.plus(1), 0);
        }
    }

    /// Processes a response with selective repeat, whose placement header says where it belongs.
    pub(super) fn response_selective(&mut self, now: Time, i: usize, header: &Header, payload: &M::Payload) {
        let Some(placement) = header.placement else {
            self.counters.drop_malformed += 1;
            return;
        };
        let Some(index) = self.open_read_or_atomic(i, placement.message) else {
            self.counters.drop_unsolicited += 1;
            return;
        };
        let Some(entry) = self.entry(i, index) else { return };
        let (response_packets, is_late, first) = (entry.response_packets, entry.out_of_order.is_some(), entry.first);
        if placement.packet < response_packets {
            self.counters.duplicate_packets += 1;
            return;
        }
        if placement.packet - response_packets >= WINDOW_PACKETS_MAX {
            self.counters.drop_beyond_window += 1;
            return;
        }
        if is_late || placement.packet > response_packets {
            if !self.has_slow_path_room() {
                self.counters.drop_control_queue += 1;
                return;
            }
            if !self.accept_response(now, i, index, placement.packet, header, payload) {
                return;
            }
            self.counters.out_of_order_packets += u64::from(placement.packet > response_packets);
            if let Some(entry) = self.entry_mut(i, index) {
                entry.out_of_order.get_or_insert_with(|| OutOfOrderResponse::new(placement.sent));
            }
            self.queue_to_slow_path(
                now,
                i,
                ControlEntry::ResponsePacket { index, packet: placement.packet, sent: placement.sent },
            );
        } else if self.accept_response(now, i, index, response_packets, header, payload) {
            self.counters.received_bytes += u64::from(header.payload_bytes);
            self.response_progress(now, i, index, response_packets + 1);
        }
        if self.contexts[i].reads_open > 1 {
            self.overtaken_by(now, i, index, placement.sent);
        }
        self.response_acknowledges(now, i, first);
        self.complete_finished(now, i);
    }

    /// Advances the acknowledged PSN: requests are executed in order, so even the header of a response shows that all
    /// earlier packets arrived.
    fn response_acknowledges(&mut self, now: Time, i: usize, first: Psn) {
        if first.plus(1).after(self.contexts[i].unacked) > 0 {
            self.advance_unacked(now, i, first.plus(1), 0);
        } else {
            self.reset_retries(now, i);
        }
    }

    /// Processes a response of which only the header arrived: it is requested again at once.
    pub(super) fn trimmed_response(&mut self, now: Time, i: usize, header: &Header) {
        let is_sending = matches!(self.contexts[i].state, QpState::ReadyToSend | QpState::SendQueueDrain);
        if self.contexts[i].service != Service::Rc || !is_sending {
            self.counters.drop_service += 1;
        } else if self.profile.policy.is_selective() {
            self.trimmed_response_selective(now, i, header);
        } else {
            self.trimmed_response_in_order(now, i, header);
        }
    }

    /// Without selective repeat, nothing after the missing packet is accepted.
    fn trimmed_response_in_order(&mut self, now: Time, i: usize, header: &Header) {
        let index = self.index_of(i, header.psn);
        let open_read_or_atomic = |entry: &&SendEntry| entry.is_read_or_atomic() && !entry.is_done;
        let Some(entry) = index.and_then(|index| self.entry(i, index)).filter(open_read_or_atomic) else {
            self.counters.drop_unsolicited += 1;
            return;
        };
        let expected = entry.first.plus(entry.response_packets);
        if header.psn.after(expected) >= 0 {
            self.advance_unacked(now, i, expected, 0);
            self.go_back_once(now, i);
        }
    }

    fn trimmed_response_selective(&mut self, now: Time, i: usize, header: &Header) {
        let index = header.placement.and_then(|placement| self.open_read_or_atomic(i, placement.message));
        let (Some(placement), Some(index)) = (header.placement, index) else {
            self.counters.drop_unsolicited += 1;
            return;
        };
        let mtu = self.contexts[i].mtu();
        let Some(entry) = self.entry_mut(i, index) else { return };
        let is_within = placement.packet < packet_count(entry.bytes, mtu);
        if placement.packet < entry.response_packets || !is_within {
            return;
        }
        if placement.packet - entry.response_packets >= WINDOW_PACKETS_MAX {
            self.counters.drop_beyond_window += 1;
            return;
        }
        // There is a gap, so software handles all later packets.
        entry.out_of_order.get_or_insert_with(|| OutOfOrderResponse::new(placement.sent));
        let first = entry.first;
        self.queue_to_slow_path(now, i, ControlEntry::ResponseTrimmed { index, packet: placement.packet });
        self.response_acknowledges(now, i, first);
        self.complete_finished(now, i);
    }

    /// Software requests a trimmed response packet again.
    pub(super) fn response_trim_by_software(&mut self, now: Time, i: usize, index: u32, packet: u32) {
        let Some(entry) = self.entry_mut(i, index).filter(|entry| !entry.is_done) else { return };
        let response_packets = entry.response_packets;
        let Some(out_of_order) = entry.out_of_order.as_mut().filter(|_| packet >= response_packets) else { return };
        if out_of_order.arrived.has(packet - response_packets) {
            return;
        }
        out_of_order.packet_seen(packet);
        out_of_order.trimmed.set(packet - response_packets);
        out_of_order.to_rerequest.set(packet - response_packets);
        self.rerequest_trimmed(now, i, index);
    }

    /// Requests trimmed packets again, with no more requests at a time than the peer accepts, so that waiting ones
    /// merge into fewer and longer requests.
    fn rerequest_trimmed(&mut self, now: Time, i: usize, index: u32) {
        let max = usize::from(READS_MAX / self.contexts[i].reads_open.max(1)).max(1);
        let Some(entry) = self.entry_mut(i, index) else { return };
        let response_packets = entry.response_packets;
        let Some(out_of_order) = &mut entry.out_of_order else { return };
        let mut requests = Vec::new();
        while out_of_order.repairs.len() < max && !out_of_order.to_rerequest.is_empty() {
            let (first, packets) = out_of_order.to_rerequest.take_run();
            out_of_order.repairs.push((response_packets + first, packets, packets));
            requests.push(Retransmission::Response { index, packet: response_packets + first, packets });
        }
        if !requests.is_empty() {
            self.host_qps[i].retransmissions.extend(requests);
            self.activate(now, i);
        }
    }

    /// Places a response if it matches the request; otherwise fails the request or drops the packet.
    fn accept_response(
        &mut self,
        now: Time,
        i: usize,
        index: u32,
        packet: u32,
        header: &Header,
        payload: &M::Payload,
    ) -> bool {
        let mtu = self.contexts[i].mtu();
        let Some(entry) = self.entry(i, index) else { return false };
        let local = entry.request.local;
        let is_read = matches!(entry.request.kind, SendKind::Read(_));
        let packets = packet_count(entry.bytes, mtu);
        let is_right_kind = is_read == (header.operation != Operation::AtomicAcknowledge);
        let bytes = if is_read { piece_bytes(entry.bytes, packet, mtu) } else { 0 };
        if !is_right_kind || packet >= packets || header.payload_bytes != bytes {
            self.counters.drop_malformed += 1;
            self.fail(now, i, index, CompletionStatus::BadResponse);
            return false;
        }
        let placed = if is_read {
            self.scatter(i, &local, packet * mtu, bytes, payload)
        } else {
            let value = header.atomic.map_or(0, |atomic| atomic.swap_or_add);
            self.store_atomic_result(i, &local, value)
        };
        if placed.is_err() {
            self.fail(now, i, index, CompletionStatus::LocalProtection);
            return false;
        }
        true
    }

    fn store_atomic_result(&mut self, i: usize, local: &[Sge; SGES_MAX], value: u64) -> Result<(), PlacementError> {
        let piece = local.iter().find(|piece| piece.bytes > 0).ok_or(PlacementError::Length)?;
        let domain = self.contexts[i].domain;
        let host = self.table.check_local(domain, piece, AccessFlags::LOCAL_WRITE);
        let address = host.map_err(|_| PlacementError::Protection)?;
        self.memory.store(address, value).map_err(|_| PlacementError::Protection)
    }

    /// Notes the number of response packets that have arrived in order.
    fn response_progress(&mut self, now: Time, i: usize, index: u32, packets: u32) {
        let mtu = self.contexts[i].mtu();
        let Some(entry) = self.entry_mut(i, index) else { return };
        entry.response_packets = packets;
        let pieces = packet_count(entry.bytes, mtu);
        if packets >= pieces && !entry.is_done {
            entry.is_done = true;
            entry.out_of_order = None;
            self.contexts[i].reads_open = self.contexts[i].reads_open.saturating_sub(1);
            self.activate(now, i);
        }
    }

    /// Software records a response packet that arrived out of order.
    pub(super) fn response_by_software(&mut self, now: Time, i: usize, index: u32, packet: u32, sent: u16) {
        let (reordering_window, mtu) = (self.host_qps[i].reordering_window, self.contexts[i].mtu());
        let Some(entry) = self.entry_mut(i, index).filter(|entry| !entry.is_done) else { return };
        let response_packets = entry.response_packets;
        let is_read = matches!(entry.request.kind, SendKind::Read(_));
        let bytes = if is_read { piece_bytes(entry.bytes, packet, mtu) } else { 0 };
        let out_of_order = entry.out_of_order.get_or_insert_with(|| OutOfOrderResponse::new(sent));
        if packet < response_packets || !out_of_order.arrived.set(packet - response_packets) {
            self.counters.duplicate_packets += 1;
            return;
        }
        // A response to the first request, although it was requested again: it was late, not lost.
        let is_spurious =
            packet < out_of_order.rerequested_to && packet == response_packets && sent == out_of_order.first_sent_tick;
        let lateness = out_of_order.gap_since.map(|since| now.since(since));
        let there = out_of_order.arrived.leading_ones();
        out_of_order.arrived.advance(there);
        out_of_order.trimmed.advance(there);
        out_of_order.to_rerequest.advance(there);
        out_of_order.packet_seen(packet);
        if there > 0 {
            out_of_order.gap_since = None;
        }
        if out_of_order.arrived.is_empty() && out_of_order.trimmed.is_empty() {
            entry.out_of_order = None;
        }
        self.counters.received_bytes += u64::from(bytes);
        if is_spurious {
            self.counters.spurious_packets += 1;
            self.learn_reordering_window(i, lateness.unwrap_or(reordering_window));
        }
        if there > 0 {
            self.response_progress(now, i, index, response_packets + there);
            self.complete_finished(now, i);
        }
        self.rerequest_trimmed(now, i, index);
        self.rerequest_gaps(now, i, index);
    }

    /// Responses arrive in the order of requests. Packets missing from earlier responses were overtaken; packets
    /// requested again were overtaken by the response to a request that left later.
    fn overtaken_by(&mut self, now: Time, i: usize, index: u32, sent: u16) {
        let first = self.contexts[i].send_first;
        let tick = tick(now);
        for at in 0..index.wrapping_sub(first) {
            let Some(entry) = self.host_qps[i].sends.get_mut(at as usize) else { return };
            if !entry.is_read_or_atomic() || entry.is_done {
                continue;
            }
            // A tick that no response carries, because nothing is known of this request's tick.
            let out_of_order = entry.out_of_order.get_or_insert_with(|| OutOfOrderResponse::new(tick.wrapping_sub(1)));
            let is_lost_again =
                out_of_order.rerequested_tick.is_some_and(|tick| sent.wrapping_sub(tick).cast_signed() > 0);
            if is_lost_again {
                out_of_order.rerequested_to = 0;
                out_of_order.clear_repairs();
            }
            if is_lost_again || !out_of_order.is_overtaken {
                out_of_order.is_overtaken = true;
                self.rerequest_gaps(now, i, first.wrapping_add(at));
            }
        }
    }

    /// Requests gaps again that are older than the reordering window.
    pub(super) fn rerequest_gaps(&mut self, now: Time, i: usize, index: u32) {
        let (reordering_window, mtu) = (self.host_qps[i].reordering_window, self.contexts[i].mtu());
        let Some(entry) = self.entry_mut(i, index).filter(|entry| !entry.is_done) else { return };
        let (response_packets, packets) = (entry.response_packets, packet_count(entry.bytes, mtu));
        let Some(out_of_order) = &mut entry.out_of_order else { return };
        let end = if out_of_order.is_overtaken { packets } else { response_packets + out_of_order.arrived.end() };
        if end <= out_of_order.rerequested_to.max(response_packets) {
            return;
        }
        let due = *out_of_order.gap_since.get_or_insert(now) + reordering_window;
        if due > now {
            self.arm_timer(i, due);
            return;
        }
        let gaps = out_of_order.gaps(response_packets, out_of_order.rerequested_to.max(response_packets), end);
        (out_of_order.rerequested_to, out_of_order.gap_since, out_of_order.rerequested_tick) = (end, None, None);
        let again = gaps.into_iter().map(|(packet, packets)| Retransmission::Response { index, packet, packets });
        self.host_qps[i].retransmissions.extend(again);
        self.activate(now, i);
    }

    /// Notes that a repeated request has left.
    pub(super) fn rerequest_sent(&mut self, now: Time, i: usize, index: u32) {
        if let Some(out_of_order) = self.entry_mut(i, index).and_then(|entry| entry.out_of_order.as_mut()) {
            out_of_order.rerequested_tick = Some(tick(now));
        }
    }

    /// After a timeout, requests all that is missing of the first incomplete response.
    pub(super) fn rerequest_all(&mut self, i: usize) {
        let mtu = self.contexts[i].mtu();
        let first = self.contexts[i].send_first;
        let open = self.host_qps[i]
            .sends
            .iter_mut()
            .zip(0_u32..)
            .find(|(entry, _)| entry.is_read_or_atomic() && !entry.is_done);
        let Some((entry, at)) = open.filter(|(entry, _)| entry.is_started) else { return };
        let (index, response_packets) = (first.wrapping_add(at), entry.response_packets);
        let packets = packet_count(entry.bytes, mtu);
        let whole = || vec![(response_packets, packets - response_packets)];
        let gaps = entry.out_of_order.as_mut().map_or_else(whole, |out_of_order| {
            out_of_order.clear_repairs();
            out_of_order.gaps(response_packets, response_packets, packets)
        });
        let again = gaps.into_iter().map(|(packet, packets)| Retransmission::Response { index, packet, packets });
        self.host_qps[i].retransmissions.extend(again);
    }

    /// Widens the reordering window after packets were late but not lost, to at most a round trip.
    pub(super) fn learn_reordering_window(&mut self, i: usize, lateness: Span) {
        let max = self.contexts[i].smoothed_rtt().unwrap_or(lateness);
        let host = &mut self.host_qps[i];
        let with_margin = Span::from_ps(lateness.ps() + lateness.ps() / 4);
        host.reordering_window = host.reordering_window.max(with_margin).min(max.max(host.reordering_window));
    }
}
