//! The requester: acknowledgements, retransmission timers and completions in order.

use sim::{Span, Time};

use super::congestion::AckSample;
use super::control_queue::ControlEntry;
use super::engine::Nic;
use super::event::NicEvent;
use super::host_qp::{Retransmission, SendEntry};
use super::memory::HostMemory;
use super::profile::RetransmitTimeout;
use super::segmentation::{MESSAGE_BITS, tick};
use crate::verbs::{Completion, CompletionKind, CompletionStatus, QpState};
use crate::wire::{Header, Operation, Psn, SelectiveAck, Service, Syndrome};

/// Maximum number of times that a timeout is doubled.
const BACKOFF_MAX: u8 = 10;
/// The unit of the ACK timer attribute, in picoseconds.
const ACK_TIMER_PS: u64 = 4_096_000;
/// The number of RNR retries that means infinitely many.
pub(super) const RNR_RETRIES_INFINITE: u8 = 7;

/// RNR timer values by code, in units of 10 us (IBA table 46).
const RNR_TIMER_10_US: [u32; 32] = [
    65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
    6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152,
];

/// Returns the duration of an RNR timer code.
pub(super) fn rnr_time(code: u8) -> Span {
    Span::from_ps(u64::from(RNR_TIMER_10_US[usize::from(code & 31)]) * 10_000_000)
}

impl<M: HostMemory> Nic<M> {
    pub(super) fn entry(&self, i: usize, index: u32) -> Option<&SendEntry> {
        let at = index.wrapping_sub(self.contexts[i].send_first) as usize;
        self.host_qps[i].sends.get(at)
    }

    pub(super) fn entry_mut(&mut self, i: usize, index: u32) -> Option<&mut SendEntry> {
        let at = index.wrapping_sub(self.contexts[i].send_first) as usize;
        self.host_qps[i].sends.get_mut(at)
    }

    /// Returns the index of the request that a PSN belongs to.
    pub(super) fn index_of(&self, i: usize, psn: Psn) -> Option<u32> {
        let sends = &self.host_qps[i].sends;
        let after = sends.partition_point(|entry| entry.is_started && psn.after(entry.first) >= 0);
        let at = after.checked_sub(1)?;
        let is_within = psn.after(sends[at].first).cast_unsigned() < sends[at].psns;
        is_within.then(|| self.contexts[i].send_first.wrapping_add(at as u32))
    }

    /// Returns whether a packet requests an acknowledgement: every few packets, and several times in each window, so
    /// that a sender that is limited by the window always has a requested acknowledgement outstanding. A quarter of the
    /// window suffices, because a window at most halves at once. A sender that is limited by its rate requests several
    /// in each round trip, and one for each packet if packets are farther apart: otherwise its retransmission timer
    /// would expire before it has sent the packet that requests one, and congestion control would get no news.
    pub(super) fn wants_ack(&self, i: usize, psn: Psn) -> bool {
        let context = &self.contexts[i];
        let window_packets = (context.congestion.window_bytes() / context.mtu()).min(self.profile.window_packets);
        let by_window = self.profile.ack_packets.min(window_packets / 4);
        let pause = context.congestion.pause(context.mtu());
        let by_pace = if pause > Span::ZERO {
            let rtt = context.smoothed_rtt().unwrap_or(Span::ZERO);
            (rtt.ps() / (4 * pause.ps())) as u32
        } else {
            u32::MAX
        };
        psn.get().is_multiple_of(by_window.min(by_pace).max(1))
    }

    /// Starts the timers of a request packet that is on the wire.
    pub(super) fn packet_sent(&mut self, now: Time, i: usize, psn: Psn, header: &Header, is_retransmission: bool) {
        if is_retransmission {
            self.contexts[i].is_timing = false;
            if let Some(scoreboard) = &mut self.host_qps[i].scoreboard {
                scoreboard.on_retransmit(psn, tick(now));
            }
        } else {
            let context = &mut self.contexts[i];
            if !context.is_timing && header.ack_request {
                (context.is_timing, context.timed_psn, context.timed_at) = (true, psn, now);
            }
        }
        self.await_response(now, i);
    }

    /// Starts the retransmission timer if it is not running. A tail loss probe is postponed by each packet, because it
    /// probes the last one.
    pub(super) fn await_response(&mut self, now: Time, i: usize) {
        let is_probing = matches!(self.profile.retransmit_timeout, RetransmitTimeout::Probe { .. });
        let is_waiting = self.contexts[i].retransmit_at < Time::MAX;
        if !is_waiting {
            self.contexts[i].note_progress(now);
        }
        if !is_waiting || is_probing {
            self.set_retransmit_timer(now, i);
        }
    }

    pub(super) fn set_retransmit_timer(&mut self, now: Time, i: usize) {
        let at = self.retransmit_timeout(i).map_or(Time::MAX, |timeout| now + timeout);
        self.contexts[i].retransmit_at = at;
        if at < Time::MAX {
            self.arm_timer(i, at);
        }
    }

    /// Returns the retransmission timeout.
    fn retransmit_timeout(&self, i: usize) -> Option<Span> {
        let context = &self.contexts[i];
        match self.profile.retransmit_timeout {
            RetransmitTimeout::Attribute => self.ack_timeout(i),
            RetransmitTimeout::LowHigh { low, high, packets } => {
                let are_few = context.next.after(context.unacked).cast_unsigned() < packets;
                Some(if are_few { low } else { high })
            }
            RetransmitTimeout::Probe { least, first } => {
                let measured = context.smoothed_rtt().map(|rtt| rtt * 2 + context.rtt_variation() * 4);
                let once = measured.map_or(first, |span| span.max(least)) + self.host_qps[i].reordering_window;
                let doubled = once * (1 << context.backoff.min(BACKOFF_MAX));
                // Never longer than the ACK timeout that the program chose.
                Some(self.ack_timeout(i).map_or(doubled, |time| doubled.min(time.max(once))))
            }
        }
    }

    fn ack_timeout(&self, i: usize) -> Option<Span> {
        let code = self.contexts[i].ack_timer_code;
        (code > 0).then(|| Span::from_ps(ACK_TIMER_PS << code))
    }

    /// Completes a request of an unreliable service when its last packet is sent.
    pub(super) fn unreliable_sent(&mut self, now: Time, i: usize, index: u32) {
        if let Some(entry) = self.entry_mut(i, index) {
            entry.is_done = true;
        }
        self.contexts[i].unacked = self.contexts[i].next;
        self.complete_finished(now, i);
    }

    /// Processes a positive or negative acknowledgement, or a READ or atomic response.
    pub(super) fn response(&mut self, now: Time, i: usize, header: &Header, payload: &M::Payload) {
        let context = &self.contexts[i];
        let is_sending = matches!(context.state, QpState::ReadyToSend | QpState::SendQueueDrain);
        if context.service != Service::Rc || !is_sending {
            self.counters.drop_service += 1;
            return;
        }
        match (header.operation, header.aeth, header.sack) {
            (Operation::Acknowledge, Some(ack), sack) => match ack.syndrome {
                Syndrome::Ack { .. } => match sack.filter(|_| self.profile.policy.is_selective()) {
                    Some(sack) => self.ack_selective(now, i, &sack),
                    None => self.ack_plain(now, i, header),
                },
                Syndrome::SequenceError if self.profile.policy.is_selective() => match sack {
                    Some(sack) => self.trim_nak_received(now, i, header.psn, &sack),
                    None => self.counters.drop_unsolicited += 1,
                },
                syndrome => self.nak_received(now, i, header.psn, syndrome),
            },
            (Operation::Acknowledge, None, _) => self.counters.drop_malformed += 1,
            _ if self.profile.policy.is_selective() => self.response_selective(now, i, header, payload),
            _ => self.response_in_order(now, i, header, payload),
        }
    }

    /// Without selective repeat: all packets up to this PSN have arrived.
    fn ack_plain(&mut self, now: Time, i: usize, header: &Header) {
        if self.profile.policy.is_selective() || !self.is_plausible_ack(i, header.psn) {
            self.counters.drop_unsolicited += 1;
            return;
        }
        // BECN says that all newly acknowledged packets were marked.
        let marked = if header.congestion_echo { u32::MAX } else { 0 };
        if !self.advance_unacked(now, i, header.psn.plus(1), marked) {
            self.go_back_once(now, i); // a READ or atomic response was lost
        }
    }

    /// Returns whether an acknowledgement may carry this PSN: the last acknowledged one, or one in flight.
    fn is_plausible_ack(&self, i: usize, psn: Psn) -> bool {
        let context = &self.contexts[i];
        psn.plus(1).after(context.unacked) >= 0 && psn.after(context.sent_end) < 0
    }

    fn ack_selective(&mut self, now: Time, i: usize, sack: &SelectiveAck) {
        let context = &self.contexts[i];
        if sack.expected.after(context.sent_end) > 0 || sack.newest.after(context.sent_end) >= 0 {
            self.counters.drop_unsolicited += 1;
            return;
        }
        let is_outdated = sack.expected.after(context.unacked) < 0;
        // An acknowledgement older than the current state, or from a peer that takes back what it acknowledged, is no
        // progress. Otherwise such acknowledgements would keep the connection alive for ever.
        if !is_outdated {
            self.contexts[i].backoff = 0; // the peer is alive
            self.advance_unacked(now, i, sack.expected, u32::from(sack.marked));
        }
        // The newest packet may lie beyond the bitmap, with nothing but gaps before it.
        let has_gap = sack.arrived != 0 || sack.newest.after(sack.expected) > 0;
        if self.contexts[i].state != QpState::Error && (has_gap || self.contexts[i].is_tracked) {
            self.contexts[i].is_tracked = true;
            self.queue_to_slow_path(now, i, ControlEntry::Sack(*sack));
        }
    }

    /// Marks all packets before `to` as acknowledged. Returns false if a READ or atomic response before it is missing.
    pub(super) fn advance_unacked(&mut self, now: Time, i: usize, to: Psn, marked: u32) -> bool {
        let limit = self.unacked_limit(i, to);
        let before = self.contexts[i].unacked;
        let packets = limit.after(before).max(0).cast_unsigned();
        self.sample_congestion(now, i, limit, packets, marked);
        if packets > 0 {
            let context = &mut self.contexts[i];
            context.unacked = limit;
            if limit.after(context.next) > 0 {
                self.rewind_to(i, limit);
            }
            self.reset_retries(now, i);
            self.complete_finished(now, i);
            self.activate(now, i);
        }
        limit == to || packets > 0
    }

    /// Without selective repeat, nothing after an incomplete response counts as acknowledged.
    fn unacked_limit(&self, i: usize, to: Psn) -> Psn {
        if self.profile.policy.is_selective() || self.contexts[i].reads_open == 0 {
            return to;
        }
        let open =
            self.host_qps[i].sends.iter().find(|entry| entry.is_started && entry.is_read_or_atomic() && !entry.is_done);
        match open.map(|entry| entry.first.plus(entry.response_packets)) {
            Some(missing) if to.after(missing) > 0 => missing,
            _ => to,
        }
    }

    /// Passes an acknowledgement to congestion control.
    fn sample_congestion(&mut self, now: Time, i: usize, to: Psn, packets: u32, marked: u32) {
        let marked = if marked == u32::MAX { packets } else { marked };
        let context = &mut self.contexts[i];
        let is_measured = context.is_timing && to.after(context.timed_psn) > 0;
        let rtt = is_measured.then(|| now.since(context.timed_at));
        if let Some(rtt) = rtt {
            context.is_timing = false;
            context.sample_rtt(rtt);
        }
        let mtu_bytes = context.mtu();
        let bytes = packets.saturating_mul(mtu_bytes);
        let ack = AckSample { bytes, packets, marked, to, next: context.next, rtt, mtu_bytes };
        if let Some(at) = context.congestion.on_ack(&self.profile.congestion, &ack) {
            context.pace_at = at;
        }
    }

    /// Restarts the timers and retry counts after progress.
    pub(super) fn reset_retries(&mut self, now: Time, i: usize) {
        let context = &mut self.contexts[i];
        context.retries_left = context.retries;
        context.rnr_retries_left = context.rnr_retries;
        (context.backoff, context.went_back) = (0, false);
        context.note_progress(now);
        let is_waiting = context.unacked != context.next || context.reads_open > 0;
        if is_waiting {
            self.set_retransmit_timer(now, i);
        } else {
            context.retransmit_at = Time::MAX;
        }
    }

    /// With selective repeat: only the header of this packet arrived (packet trimming).
    fn trim_nak_received(&mut self, now: Time, i: usize, psn: Psn, sack: &SelectiveAck) {
        let context = &mut self.contexts[i];
        let is_sent = |psn: Psn| psn.after(context.sent_end) < 0;
        if psn.after(sack.expected) < 0 || sack.expected.after(context.unacked) < 0 || !is_sent(psn) {
            self.counters.drop_unsolicited += 1;
            return;
        }
        context.backoff = 0; // the peer is alive
        context.is_tracked = true;
        self.advance_unacked(now, i, sack.expected, u32::from(sack.marked));
        if self.contexts[i].state != QpState::Error {
            self.queue_to_slow_path(now, i, ControlEntry::TrimNak(psn));
        }
    }

    /// Processes a NAK.
    fn nak_received(&mut self, now: Time, i: usize, psn: Psn, syndrome: Syndrome) {
        let is_selective = self.profile.policy.is_selective();
        if psn.after(self.contexts[i].unacked) < 0 || psn.after(self.contexts[i].sent_end) >= 0 {
            self.counters.drop_unsolicited += 1;
            return;
        }
        self.advance_unacked(now, i, psn, 0);
        // An earlier response may be missing; its request is sent again first, and the NAK will be repeated.
        if self.contexts[i].unacked != psn && !is_selective {
            self.go_back_once(now, i);
            return;
        }
        match syndrome {
            Syndrome::Ack { .. } => {}
            Syndrome::SequenceError => self.go_back_once(now, i),
            Syndrome::ReceiverNotReady { timer_code } => self.receiver_not_ready(now, i, psn, timer_code),
            Syndrome::InvalidRequest => self.fail_at(now, i, psn, CompletionStatus::RemoteInvalidRequest),
            Syndrome::RemoteAccess => self.fail_at(now, i, psn, CompletionStatus::RemoteAccess),
            Syndrome::RemoteOperation => self.fail_at(now, i, psn, CompletionStatus::RemoteOperation),
        }
    }

    fn receiver_not_ready(&mut self, now: Time, i: usize, psn: Psn, timer_code: u8) {
        let context = &mut self.contexts[i];
        if context.send_not_before > now {
            return; // a repeated RNR NAK
        }
        context.backoff = 0; // the peer is alive
        if context.rnr_retries_left == 0 {
            self.fail_at(now, i, psn, CompletionStatus::ReceiverNotReadyExceeded);
            return;
        }
        if context.rnr_retries_left < RNR_RETRIES_INFINITE {
            context.rnr_retries_left -= 1;
        }
        let until = now + rnr_time(timer_code);
        context.send_not_before = until;
        context.is_timing = false;
        context.retransmit_at = Time::MAX;
        if self.profile.policy.is_selective() {
            self.retransmit_all_from(i, psn);
        } else {
            self.go_back(i);
        }
        self.arm_timer(i, until);
    }

    /// Retransmits from this PSN on: the receiver dropped the packet for want of a receive request, and perhaps later
    /// ones.
    fn retransmit_all_from(&mut self, i: usize, psn: Psn) {
        let (end, host) = (self.contexts[i].sent_end, &mut self.host_qps[i]);
        host.retransmissions.retain(|again| matches!(again, Retransmission::Response { .. }));
        let outstanding = 0..end.after(psn).max(0).cast_unsigned();
        for psn in outstanding.map(|packet| psn.plus(packet)) {
            match &mut host.scoreboard {
                Some(board) if board.has(psn) => {}
                board => {
                    if let Some(board) = board {
                        board.mark_queued(psn);
                    }
                    host.retransmissions.push_back(Retransmission::Packet(psn));
                }
            }
        }
    }

    /// Retransmits from the first missing packet on, at most once until there is progress.
    pub(super) fn go_back_once(&mut self, now: Time, i: usize) {
        if !self.contexts[i].went_back {
            self.contexts[i].went_back = true;
            self.go_back(i);
            self.contexts[i].send_not_before = now + self.profile.costs.go_back;
            self.activate(now, i);
        }
    }

    fn go_back(&mut self, i: usize) {
        self.contexts[i].is_timing = false;
        self.rewind_to(i, self.contexts[i].unacked);
    }

    /// Continues sending at this packet, and invalidates staged packets.
    fn rewind_to(&mut self, i: usize, psn: Psn) {
        let (context, host) = (&mut self.contexts[i], &self.host_qps[i]);
        context.send_epoch = context.send_epoch.wrapping_add(1);
        context.next = psn;
        let within = |entry: &SendEntry| entry.is_started && psn.after(entry.first.plus(entry.psns)) >= 0;
        let at = host.sends.partition_point(within);
        context.send_index = context.send_first.wrapping_add(at as u32);
        context.send_packet = match host.sends.get(at) {
            Some(entry) if entry.is_started && !entry.is_read_or_atomic() => {
                psn.after(entry.first).max(0).cast_unsigned()
            }
            _ => 0,
        };
    }

    /// Handles the expiry of the retransmission timer.
    pub(super) fn retransmit_timer_expired(&mut self, now: Time, i: usize) {
        let context = &mut self.contexts[i];
        context.retransmit_at = Time::MAX;
        let is_waiting = context.unacked != context.next || context.reads_open > 0;
        if !is_waiting || !matches!(context.state, QpState::ReadyToSend | QpState::SendQueueDrain) {
            return;
        }
        if !self.host_qps[i].retransmissions.is_empty() {
            // Retransmissions still wait for the scheduler, so nothing was sent since.
            self.set_retransmit_timer(now, i);
            self.activate(now, i);
            return;
        }
        self.counters.timeouts += 1;
        if self.are_retries_exhausted(now, i) {
            let first = self.contexts[i].send_first;
            self.fail(now, i, first, CompletionStatus::RetryExceeded);
            return;
        }
        let context = &mut self.contexts[i];
        context.backoff = context.backoff.saturating_add(1);
        context.is_timing = false;
        if self.profile.policy.is_selective() {
            self.probe(i);
        } else {
            self.contexts[i].went_back = false;
            self.go_back(i);
        }
        self.set_retransmit_timer(now, i);
        self.activate(now, i);
    }

    /// Returns whether the retries are exhausted. With tail loss probes, which are more frequent, the time of all
    /// retries must have passed as well. Time alone is not enough: a host that was suspended has sent nothing.
    fn are_retries_exhausted(&mut self, now: Time, i: usize) -> bool {
        let time_since_progress = self.contexts[i].time_since_progress(now);
        let allowed = self.ack_timeout(i);
        let context = &mut self.contexts[i];
        if self.profile.retransmit_timeout == RetransmitTimeout::Attribute {
            let are_exhausted = context.retries_left == 0;
            context.retries_left = context.retries_left.saturating_sub(1);
            return are_exhausted;
        }
        context.backoff >= context.retries
            && allowed.is_some_and(|once| time_since_progress >= once * (u64::from(context.retries) + 1))
    }

    /// Probes what has arrived: with the last packet, whose acknowledgement covers all earlier ones; with the first
    /// missing packet, if the last is known to have arrived; or by requesting the missing part of a response again.
    fn probe(&mut self, i: usize) {
        self.counters.probes += 1;
        let context = &self.contexts[i];
        let (first, last) = (context.unacked, context.next.previous());
        if first == context.next {
            self.rerequest_all(i);
            return;
        }
        let has_slow_path = self.profile.policy.has_slow_path();
        match &mut self.host_qps[i].scoreboard {
            Some(scoreboard) if !has_slow_path || scoreboard.has(last) => {
                // IRN retransmits all missing packets; SRNIC the first, whose acknowledgement reveals the others.
                let again = scoreboard.requeue(first, if has_slow_path { 1 } else { u32::MAX });
                self.host_qps[i].retransmissions.extend(again.into_iter().map(Retransmission::Packet));
            }
            _ => {
                let psn = if has_slow_path { last } else { first };
                self.host_qps[i].retransmissions.push_back(Retransmission::Packet(psn));
            }
        }
    }

    /// Completes finished requests, in order.
    pub(super) fn complete_finished(&mut self, now: Time, i: usize) {
        while let Some(entry) = self.host_qps[i].sends.front() {
            let context = &self.contexts[i];
            if let Some(status) = entry.failed {
                let first = context.send_first;
                self.fail(now, i, first, status);
                return;
            }
            let is_done = if entry.is_read_or_atomic() || context.service != Service::Rc {
                entry.is_done
            } else {
                entry.is_started && context.unacked.after(entry.first.plus(entry.psns)) >= 0
            };
            if !is_done {
                break;
            }
            let (id, kind, bytes) = (entry.request.id, entry.request.kind.completion_kind(), entry.bytes);
            let is_signalled = entry.request.signalled || self.host_qps[i].signals_all;
            self.host_qps[i].sends.pop_front();
            let context = &mut self.contexts[i];
            context.send_first = context.send_first.wrapping_add(1);
            if is_signalled {
                let mut completion = Completion::new(id, self.number(i), CompletionStatus::Success, kind);
                completion.bytes = if matches!(kind, CompletionKind::Read) { bytes } else { 0 };
                if matches!(kind, CompletionKind::CompareSwap | CompletionKind::FetchAdd) {
                    completion.bytes = 8;
                }
                self.complete_send(now, i, completion);
            }
        }
        self.report_drained(i);
    }

    /// Reports once that a draining queue pair has finished what it had started.
    pub(super) fn report_drained(&mut self, i: usize) {
        let is_idle = !self.host_qps[i].sends.front().is_some_and(|entry| entry.is_started);
        let qp = self.number(i);
        let context = &mut self.contexts[i];
        if context.state == QpState::SendQueueDrain && is_idle && !context.drain_reported {
            context.drain_reported = true;
            self.events.push_back(NicEvent::Drained(qp));
        }
    }

    /// Fails the request with this PSN, after earlier requests are complete.
    fn fail_at(&mut self, now: Time, i: usize, psn: Psn, status: CompletionStatus) {
        if let Some(index) = self.index_of(i, psn) {
            self.fail(now, i, index, status);
        } else {
            self.counters.drop_unsolicited += 1;
        }
    }

    /// Fails a request, at once if it is the first; later requests are then flushed. It waits for earlier requests that
    /// are not complete.
    pub(super) fn fail(&mut self, now: Time, i: usize, index: u32, status: CompletionStatus) {
        let first = self.contexts[i].send_first;
        if index != first {
            let is_new = self.entry_mut(i, index).is_some_and(|entry| entry.failed.replace(status).is_none());
            if is_new {
                self.complete_finished(now, i);
            }
            return;
        }
        let Some(entry) = self.host_qps[i].sends.pop_front() else { return };
        self.contexts[i].send_first = first.wrapping_add(1);
        let kind = entry.request.kind.completion_kind();
        let completion = Completion::new(entry.request.id, self.number(i), status, kind);
        self.complete_send(now, i, completion);
        if self.contexts[i].service == Service::Rc {
            self.enter_error(now, i);
        } else {
            self.contexts[i].state = QpState::SendQueueError;
            self.flush_sends(now, i);
        }
        let qp = self.number(i);
        self.events.push_back(NicEvent::QpError(qp));
    }

    /// Returns the request that an index on the wire names, if it is an incomplete READ or atomic.
    pub(super) fn open_read_or_atomic(&self, i: usize, message: u32) -> Option<u32> {
        let unused = u32::BITS - MESSAGE_BITS;
        let first = self.contexts[i].send_first;
        let offset = (message.wrapping_sub(first) << unused) >> unused;
        let index = first.wrapping_add(offset);
        let entry = self.entry(i, index)?;
        (entry.is_started && entry.is_read_or_atomic() && !entry.is_done).then_some(index)
    }
}
