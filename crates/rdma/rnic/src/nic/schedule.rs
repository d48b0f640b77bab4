//! The cache-free send scheduler: which queue pair sends next (srnic.md, section 1).
//!
//! Doorbells, acknowledgements that open windows and expired timers all lead to one question: does this queue pair have
//! work that it may do now? If so, it is appended once to the schedule queue. A decision takes the first queue pair,
//! fetches a batch of its work requests, then the data of as many packets as its quantum allows; fetched requests that
//! are not used are discarded. Several decisions are in flight at a time, so that two consecutive DMA reads do not
//! leave the wire idle.

use sim::{Span, Time};

use super::context::Context;
use super::engine::Nic;
use super::fifo::pop_front_if;
use super::host_qp::{HostQp, Retransmission, SendEntry};
use super::limits::PACKETS_MAX;
use super::memory::HostMemory;
use super::pipeline::{Decision, PACKET_BYTES, StagedItem, StagedPacket};
use super::segmentation::{packet_count, piece_bytes};
use crate::verbs::{AccessFlags, CompletionStatus, MESSAGE_BYTES_MAX, ProtectionContext, QpState, SendKind};
use crate::wire::{Psn, Service};

/// Whether a queue pair has work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Readiness {
    Ready,
    /// It has work, but not before this time.
    At(Time),
    Idle,
}

impl<M: HostMemory> Nic<M> {
    /// Handles a program's doorbell for a queue pair.
    pub(super) fn doorbell(&mut self, now: Time, i: usize) {
        let delay = self.profile.costs.doorbell;
        if delay == Span::ZERO {
            self.activate(now, i);
        } else {
            self.pipeline.doorbells.push_back((now + delay, i as u32));
        }
    }

    pub(super) fn doorbells_due(&mut self, now: Time) {
        while let Some((_, i)) = pop_front_if(&mut self.pipeline.doorbells, |(at, _)| *at <= now) {
            self.activate(now, i as usize);
        }
    }

    /// Appends a queue pair to the schedule queue if it has work; called after each change of its state.
    pub(super) fn activate(&mut self, now: Time, i: usize) {
        if self.is_queued(i) {
            return;
        }
        if self.contexts.is_nonresident(i) {
            // Whether it has work is decided when its context has been fetched.
            self.push_ready(i);
            return;
        }
        match self.readiness(now, i) {
            Readiness::Ready => self.push_ready(i),
            Readiness::At(at) => self.arm_timer(i, at),
            Readiness::Idle => {}
        }
    }

    fn readiness(&self, now: Time, i: usize) -> Readiness {
        let (context, host) = (&self.contexts[i], &self.host_qps[i]);
        if !context.exists || !context.state.receives() {
            return Readiness::Idle;
        }
        let is_sending = matches!(context.state, QpState::ReadyToSend | QpState::SendQueueDrain);
        let has_retransmission = is_sending && !host.retransmissions.is_empty();
        let has_new = is_sending && self.can_send_new(context, host);
        if host.responses.is_empty() && !has_retransmission && !has_new {
            return Readiness::Idle;
        }
        let not_before = if host.responses.is_empty() { context.send_not_before } else { Time::ZERO };
        let at = not_before.max(self.fetch_at(context.pace_at));
        if at > now { Readiness::At(at) } else { Readiness::Ready }
    }

    /// Returns when to fetch the work requests of a packet that may leave at `pace_at`. What the rate allows in the
    /// time of a fetch leaves with it: a queue pair has one decision in flight, so a packet for each would limit it to
    /// a packet in each fetch.
    fn fetch_at(&self, pace_at: Time) -> Time {
        let fetch = if self.profile.scheduling.fetches_wqes { self.profile.costs.dma_read } else { Span::ZERO };
        Time::from_ps(pace_at.ps().saturating_sub(fetch.ps()))
    }

    /// Returns whether a new packet may be sent, apart from pacing.
    fn can_send_new(&self, context: &Context, host: &HostQp) -> bool {
        let index = context.send_index.wrapping_sub(context.send_first) as usize;
        let Some(entry) = host.sends.get(index) else { return false };
        if entry.failed.is_some() {
            return false;
        }
        if context.state == QpState::SendQueueDrain && !entry.is_started {
            return false;
        }
        if context.service != Service::Rc {
            return true;
        }
        if !entry.is_started {
            let waits = entry.request.fence && context.reads_open > 0;
            // If READs are not allowed at all, the request does not wait but fails.
            let has_room = context.reads_open < context.reads_max || context.reads_max == 0;
            if waits || entry.is_read_or_atomic() && !has_room {
                return false;
            }
        }
        let packets = self.in_flight(context, host);
        packets == 0
            || context.next.after(context.unacked).cast_unsigned() < self.profile.window_packets
                && packets.saturating_mul(context.mtu()) < context.congestion.window_bytes()
    }

    /// Returns the number of packets in flight. IRN counts from the first missing packet; the slow path subtracts
    /// packets that have arrived after it.
    pub(super) fn in_flight(&self, context: &Context, host: &HostQp) -> u32 {
        let all = context.next.after(context.unacked).max(0).cast_unsigned();
        match &host.scoreboard {
            Some(scoreboard) if self.profile.policy.has_slow_path() => all.saturating_sub(scoreboard.arrived()),
            _ => all,
        }
    }

    /// Takes decisions while queue pairs are ready and the transmit buffer has room.
    pub(super) fn schedule(&mut self, now: Time) {
        let limits = self.profile.scheduling;
        while self.pipeline.ahead_bytes < limits.ahead_bytes
            && self.pipeline.decisions.len() < limits.decisions as usize
            && (self.has_costs() || self.pipeline.staged.is_empty())
        {
            let Some(i) = self.pop_ready(now) else { return };
            if self.readiness(now, i) != Readiness::Ready {
                self.end_quantum(now, i);
                continue;
            }
            self.decide(now, i);
        }
    }

    fn decide(&mut self, now: Time, i: usize) {
        let mut at = now;
        if let Some(cache) = &mut self.cache {
            at = cache.touch(now, i as u32, &self.profile, &mut self.counters);
        }
        if self.profile.scheduling.fetches_wqes {
            at += self.profile.costs.dma_read;
        }
        if at == now && self.pipeline.decisions.is_empty() {
            self.stage(now, i, 0);
            return;
        }
        // The best estimate for this quantum is what the last one used, or the queue pair's share.
        let estimate = u32::from(self.contexts[i].last_quantum_64) * 64;
        let reserved = estimate.clamp(PACKET_BYTES, self.profile.scheduling.quantum_bytes.max(PACKET_BYTES));
        self.pipeline.ahead_bytes += reserved;
        // A hit waits for an earlier miss, because decisions keep their order.
        let at = self.pipeline.decisions.back().map_or(at, |last| last.at.max(at));
        self.pipeline.decisions.push_back(Decision { at, qp: i as u32, reserved });
    }

    /// Processes decisions whose work requests have arrived from the host's memory.
    pub(super) fn fetched_due(&mut self, now: Time) {
        while let Some(decision) = pop_front_if(&mut self.pipeline.decisions, |decision| decision.at <= now) {
            self.pipeline.ahead_bytes -= decision.reserved;
            self.stage(now, decision.qp as usize, decision.reserved);
        }
    }

    /// Stages the packets of a quantum, and appends the queue pair to the schedule queue if it has more.
    fn stage(&mut self, now: Time, i: usize, reserved: u32) {
        let limits = self.profile.scheduling;
        let room = limits.ahead_bytes.saturating_sub(self.pipeline.ahead_bytes).max(reserved);
        let quantum = limits.quantum_bytes.min(room.max(PACKET_BYTES));
        let (index, mut used) = (self.contexts[i].send_index, 0);
        while used < quantum && self.readiness(now, i) == Readiness::Ready {
            let batch = self.contexts[i].send_index.wrapping_sub(index);
            if batch >= limits.batch_wqes {
                break;
            }
            let Some((item, bytes)) = self.next_item(now, i) else { break };
            self.push_staged(now, i, item, bytes);
            used += bytes + PACKET_BYTES;
        }
        self.count_fetched(i, index);
        self.mark_context_used(i);
        let needs = if self.readiness(now, i) == Readiness::Ready { self.reserved_share(i) } else { used };
        self.contexts[i].last_quantum_64 = u16::try_from(needs.div_ceil(64)).unwrap_or(u16::MAX);
        self.end_quantum(now, i);
    }

    /// Returns the bytes of the transmit buffer that are reserved for a queue pair that has more to send: an equal
    /// share for each waiting queue pair. A single queue pair needs a whole quantum to keep the wire busy while its
    /// work requests are fetched; several need a part of it. If the last quantum alone decided, a queue pair that began
    /// with a full buffer would grow by only a packet each time, while long messages before it kept whole quanta.
    fn reserved_share(&self, i: usize) -> u32 {
        let waiting = (self.pipeline.ready.len() + self.pipeline.decisions.len()) as u32;
        let packet = self.contexts[i].mtu() + PACKET_BYTES;
        (self.profile.scheduling.quantum_bytes / (1 + waiting)).max(packet)
    }

    /// Counts the work requests that a decision fetched, and those that it did not use.
    fn count_fetched(&mut self, i: usize, index_before: u32) {
        let limits = &self.profile.scheduling;
        if !limits.fetches_wqes {
            return;
        }
        let (context, host) = (&self.contexts[i], &self.host_qps[i]);
        let before = index_before.wrapping_sub(context.send_first) as usize;
        let fetched = host.sends.len().saturating_sub(before).min(limits.batch_wqes as usize) as u64;
        let used = u64::from(context.send_index.wrapping_sub(index_before));
        self.counters.wqes_fetched += fetched;
        self.counters.wqes_dropped += fetched.saturating_sub(used + u64::from(context.send_packet > 0));
    }

    fn push_staged(&mut self, now: Time, i: usize, item: StagedItem, bytes: u32) {
        let costs = &self.profile.costs;
        let pipeline = &mut self.pipeline;
        let mut at = now;
        if bytes > 0 {
            at = pipeline.dma_transfer(now, costs, bytes) + costs.dma_read;
        }
        // Packets keep their order, with or without data.
        let at = pipeline.staged.back().map_or(at, |last| last.at.max(at));
        let Context { send_epoch, generation, .. } = self.contexts[i];
        pipeline.push(&StagedPacket { at, qp: i as u32, send_epoch, generation, bytes, item });
        self.pin(i);
    }

    /// Returns the next packet whose data has arrived.
    pub(super) fn next_staged(&mut self, now: Time) -> Option<StagedPacket> {
        if self.pipeline.staged.is_empty() {
            self.schedule(now);
        }
        let staged = self.pipeline.pop(now)?;
        if self.has_costs() {
            self.schedule(now);
        }
        Some(staged)
    }

    /// Returns the next packet of a ready queue pair: retransmissions first, then responses and new requests
    /// alternately.
    fn next_item(&mut self, now: Time, i: usize) -> Option<(StagedItem, u32)> {
        let is_ready = self.contexts[i].send_not_before <= now;
        let is_sending = matches!(self.contexts[i].state, QpState::ReadyToSend | QpState::SendQueueDrain);
        let again = if is_sending && is_ready { self.next_retransmission(i) } else { None };
        if let Some((_, bytes)) = again {
            self.pace(now, i, bytes);
            return again;
        }
        let has_new = is_sending && is_ready && self.can_send_new(&self.contexts[i], &self.host_qps[i]);
        let has_reply = !self.host_qps[i].responses.is_empty();
        if has_reply && (!has_new || self.contexts[i].response_is_next) {
            self.contexts[i].response_is_next = false;
            return self.next_response(now, i);
        }
        self.contexts[i].response_is_next = true;
        if has_new { self.next_request(now, i) } else { None }
    }

    fn next_retransmission(&mut self, i: usize) -> Option<(StagedItem, u32)> {
        while let Some(again) = self.host_qps[i].retransmissions.pop_front() {
            let found = match again {
                Retransmission::Packet(psn) => self.packet_of(i, psn),
                Retransmission::Response { index, packet, packets } => {
                    let is_open = self.entry(i, index).is_some_and(|entry| !entry.is_done);
                    is_open.then_some((StagedItem::ReRequest { index, packet, packets }, 0))
                }
            };
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// Returns the request packet with this PSN, if it was sent and is not acknowledged.
    fn packet_of(&self, i: usize, psn: Psn) -> Option<(StagedItem, u32)> {
        let context = &self.contexts[i];
        if psn.after(context.unacked) < 0 || psn.after(context.sent_end) >= 0 {
            return None;
        }
        let index = self.index_of(i, psn)?;
        let entry = self.entry(i, index)?;
        let packet = psn.after(entry.first).cast_unsigned();
        let bytes = if entry.is_read_or_atomic() { 0 } else { piece_bytes(entry.bytes, packet, context.mtu()) };
        Some((StagedItem::Request { index, packet, is_retransmission: true }, bytes))
    }

    fn next_response(&mut self, now: Time, i: usize) -> Option<(StagedItem, u32)> {
        let mtu = self.contexts[i].mtu();
        let response = self.host_qps[i].responses.front_mut()?;
        let item = StagedItem::Response(*response);
        // The result of an atomic operation is in the response itself; nothing is fetched for it.
        let (bytes, fetched_bytes) = match response.value {
            Some(_) => (8, 0),
            None => {
                let bytes = piece_bytes(response.bytes, response.packet - response.packet_first, mtu);
                (bytes, bytes)
            }
        };
        response.packet += 1;
        if response.packet >= response.packet_first + response.packets {
            self.host_qps[i].responses.pop_front();
        }
        self.pace(now, i, bytes);
        Some((item, fetched_bytes))
    }

    fn pace(&mut self, now: Time, i: usize, bytes: u32) {
        let context = &mut self.contexts[i];
        let pause = context.congestion.on_sent(&self.profile.congestion, now, bytes + PACKET_BYTES);
        if pause > Span::ZERO {
            context.pace_at = context.pace_at.max(now) + pause;
        }
    }

    /// Returns the next new packet. A request whose local memory is not accessible fails instead.
    fn next_request(&mut self, now: Time, i: usize) -> Option<(StagedItem, u32)> {
        let index = self.contexts[i].send_index;
        let begun = if self.entry(i, index)?.is_started { Ok(()) } else { self.start_request(i, index) };
        if let Err(status) = begun {
            self.entry_mut(i, index)?.failed = Some(status);
            self.complete_finished(now, i);
            return None;
        }
        if self.entry(i, index)?.request.kind.is_local() {
            // A local request was executed when it was started; nothing is sent.
            self.contexts[i].send_index = index.wrapping_add(1);
            self.complete_finished(now, i);
            return None;
        }
        let is_selective = self.profile.policy.is_selective();
        let context = &mut self.contexts[i];
        let at = index.wrapping_sub(context.send_first) as usize;
        let entry = &self.host_qps[i].sends[at];
        let packet = context.send_packet;
        let is_read_or_atomic = entry.is_read_or_atomic();
        let bytes = if is_read_or_atomic { 0 } else { piece_bytes(entry.bytes, packet, context.mtu()) };
        let psn_end = if is_read_or_atomic { entry.first.plus(entry.psns) } else { entry.first.plus(packet + 1) };
        let is_retransmission = !is_selective && psn_end.after(context.sent_end) <= 0;
        context.next = psn_end;
        if psn_end.after(context.sent_end) > 0 {
            context.sent_end = psn_end;
        }
        if packet + 1 == entry.packets {
            (context.send_index, context.send_packet) = (index.wrapping_add(1), 0);
        } else {
            context.send_packet = packet + 1;
        }
        self.pace(now, i, bytes);
        Some((StagedItem::Request { index, packet, is_retransmission }, bytes))
    }

    /// Returns the completion status of a request that this queue pair cannot execute.
    ///
    /// An operation that the service does not have, or that lacks a resource, is a *local QP operation error*, as in
    /// rdma_rxe and mlx5 ("an opcode which isn't supported by the transport type of the QP"; READs without initiator
    /// reads). A message that is longer than a port can send, or an atomic operation of other than 8 bytes, is a *local
    /// length error* (ibv_poll_cq's statuses; IBA 11.6.2).
    fn request_fault(&self, context: &Context, entry: &SendEntry) -> Option<CompletionStatus> {
        let (kind, datagram) = (&entry.request.kind, entry.request.datagram);
        let is_connected = context.service != Service::Ud;
        let is_plain_send = matches!(kind, SendKind::Send(_));
        let is_wrong_kind = match context.service {
            Service::Rc => entry.is_read_or_atomic() && context.reads_max == 0,
            Service::Uc => entry.is_read_or_atomic() || matches!(kind, SendKind::SendWithInvalidate(_)),
            Service::Ud => !is_plain_send,
        };
        let has_unused_memory = kind.is_local() && entry.bytes > 0;
        if is_wrong_kind || has_unused_memory || is_connected == datagram.is_some() {
            return Some(CompletionStatus::LocalQpOperation);
        }
        let is_read = matches!(kind, SendKind::Read(_));
        let is_wrong_atomic = entry.is_read_or_atomic() && !is_read && entry.bytes != 8;
        let packets = entry.bytes.div_ceil(context.mtu().max(1));
        let is_long = entry.bytes > MESSAGE_BYTES_MAX || packets > PACKETS_MAX || !is_connected && packets > 1;
        (is_wrong_atomic || is_long).then_some(CompletionStatus::LocalLength)
    }

    /// Assigns PSNs to a request, once, and checks its local memory.
    fn start_request(&mut self, i: usize, index: u32) -> Result<(), CompletionStatus> {
        let is_selective = self.profile.policy.is_selective();
        let at = index.wrapping_sub(self.contexts[i].send_first) as usize;
        if let Some(status) = self.request_fault(&self.contexts[i], &self.host_qps[i].sends[at]) {
            return Err(status);
        }
        let context = &mut self.contexts[i];
        let entry = &mut self.host_qps[i].sends[at];
        if entry.request.kind.is_local() {
            (entry.first, entry.is_started) = (context.next, true);
            return self.run_local_request(i, at);
        }
        let is_read_or_atomic = entry.is_read_or_atomic();
        let access = if is_read_or_atomic { AccessFlags::LOCAL_WRITE } else { AccessFlags::empty() };
        for piece in entry.request.local.iter().filter(|piece| piece.bytes > 0) {
            if self.table.check_local(context.domain, piece, access).is_err() {
                return Err(CompletionStatus::LocalProtection);
            }
        }
        let pieces = packet_count(entry.bytes, context.mtu());
        entry.packets = if is_read_or_atomic { 1 } else { pieces };
        let is_read = matches!(entry.request.kind, SendKind::Read(_));
        entry.psns = if is_read && is_selective {
            1
        } else if is_read {
            pieces
        } else {
            entry.packets
        };
        entry.first = context.next;
        entry.message = index;
        entry.is_started = true;
        if is_read_or_atomic {
            context.reads_open += 1;
        } else if entry.takes_receive() {
            entry.message = context.send_message;
            context.send_message = context.send_message.wrapping_add(1);
        }
        Ok(())
    }

    /// Executes a request that sends nothing.
    fn run_local_request(&mut self, i: usize, at: usize) -> Result<(), CompletionStatus> {
        let accessor = ProtectionContext { domain: self.contexts[i].domain, qp: self.number(i) };
        let done = match self.host_qps[i].sends[at].request.kind {
            SendKind::BindWindow { window, chosen, bind } => self.table.bind_type_2(accessor, window, chosen, &bind),
            SendKind::LocalInvalidate(key) => self.table.invalidate(accessor, key),
            _ => Ok(()),
        };
        self.host_qps[i].sends[at].is_done = done.is_ok();
        done.map_err(|_| CompletionStatus::MemoryWindowBind)
    }
}
