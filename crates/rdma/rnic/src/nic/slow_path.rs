//! The software of the slow path: processes the control queue on a core of the host, and issues commands to hardware
//! (srnic.md, "Memory-free selective repeat").
//!
//! IRN runs the same algorithm in hardware: its queue has no cost and is empty again at once.

use sim::{Span, Time};

use super::control_queue::{
    ArrivedPackets, ControlEntry, IssuedCommand, PendingAction, QueuedEntry, ReceiveTracker, SlowPathCommand,
    SoftwareBatch,
};
use super::emit::ACK_WITHOUT_CREDITS;
use super::engine::Nic;
use super::fifo::pop_front_if;
use super::host_qp::Retransmission;
use super::memory::HostMemory;
use super::profile::CostModel;
use super::scoreboard::Scoreboard;
use crate::wire::{Psn, SelectiveAck};

/// Maximum number of headers in a batch.
const BATCH_HEADERS_MAX: usize = 64;

impl<M: HostMemory> Nic<M> {
    /// Returns the latencies of software; IRN has none.
    fn software_costs(&self) -> CostModel {
        if self.profile.policy.has_slow_path() { self.profile.costs } else { CostModel::ZERO }
    }

    pub(super) fn has_slow_path_room(&self) -> bool {
        self.slow_path.queue.len() < self.profile.control_queue as usize
    }

    /// Queues a header, or drops and counts it if the queue is full.
    pub(super) fn queue_to_slow_path(&mut self, now: Time, i: usize, entry: ControlEntry) {
        if !self.has_slow_path_room() {
            self.counters.drop_control_queue += 1;
            return;
        }
        if self.merge_with_last(now, i, &entry) {
            return;
        }
        let costs = self.software_costs();
        let wake = if self.slow_path.batch.is_none() { costs.software_wake } else { Span::ZERO };
        let at = self.slow_path.queue.back().map_or(Time::ZERO, |last| last.at).max(now + costs.dma_write + wake);
        let generation = self.contexts[i].generation;
        self.slow_path.queue.push_back(QueuedEntry { at, qp: i as u32, generation, entry });
        self.pin(i);
        if self.slow_path.batch.is_none() {
            self.start_batch(now);
        }
    }

    /// Adds a packet to the entry that hardware is still writing, if it is the next packet of the same queue pair, so
    /// that software has fewer entries to process.
    fn merge_with_last(&mut self, now: Time, i: usize, entry: &ControlEntry) -> bool {
        let generation = self.contexts[i].generation;
        let (ControlEntry::Arrived(next), Some(last)) = (entry, self.slow_path.queue.back_mut()) else { return false };
        let is_same = last.at > now && last.qp as usize == i && last.generation == generation;
        match &mut last.entry {
            ControlEntry::Arrived(arrived) if is_same => arrived.extend(next),
            _ => false,
        }
    }

    fn start_batch(&mut self, now: Time) {
        let Some(first) = self.slow_path.queue.front() else { return };
        let begins = first.at.max(now);
        let headers =
            self.slow_path.queue.iter().take(BATCH_HEADERS_MAX).take_while(|queued| queued.at <= begins).count();
        let takes = self.software_costs().software_header * headers as u64;
        self.counters.software_busy += takes;
        self.slow_path.batch = Some(SoftwareBatch { ends: begins + takes, headers });
    }

    /// Finishes batches and executes commands that are due, in order of time.
    pub(super) fn run_slow_path(&mut self, now: Time) {
        loop {
            let batch_ends = self.slow_path.batch.map_or(Time::MAX, |batch| batch.ends);
            let command_at = self.slow_path.commands.front().map_or(Time::MAX, |issued| issued.at);
            if batch_ends.min(command_at) > now || batch_ends.min(command_at) == Time::MAX {
                return;
            }
            if command_at <= batch_ends {
                if let Some(issued) = self.slow_path.commands.pop_front() {
                    self.execute_command(now, &issued);
                    self.unpin(now, issued.qp as usize);
                }
            } else {
                self.finish_batch(batch_ends);
            }
        }
    }

    fn finish_batch(&mut self, ends: Time) {
        let Some(batch) = self.slow_path.batch.take() else { return };
        for _ in 0..batch.headers {
            let Some(queued) = self.slow_path.queue.pop_front() else { break };
            self.counters.slow_headers += queued.entry.headers();
            self.slow_path.batch_qps.push(queued.qp);
            let i = queued.qp as usize;
            if self.contexts[i].generation != queued.generation {
                continue; // of an earlier generation of the queue pair
            }
            match queued.entry {
                ControlEntry::Arrived(arrived) => self.packets_arrived(i, &arrived),
                ControlEntry::Sack(sack) => self.ack_by_software(ends, i, &sack),
                ControlEntry::TrimNak(psn) => self.trim_nak_by_software(ends, i, psn),
                ControlEntry::ResponsePacket { index, packet, sent } => {
                    self.response_by_software(ends, i, index, packet, sent)
                }
                ControlEntry::ResponseTrimmed { index, packet } => {
                    self.response_trim_by_software(ends, i, index, packet)
                }
            }
        }
        let mut changed_qps = std::mem::take(&mut self.slow_path.changed_qps);
        for i in changed_qps.drain(..) {
            self.command_progress(ends, i as usize);
        }
        self.slow_path.changed_qps = changed_qps;
        let mut batch_qps = std::mem::take(&mut self.slow_path.batch_qps);
        for i in batch_qps.drain(..) {
            self.unpin(ends, i as usize);
        }
        self.slow_path.batch_qps = batch_qps;
        self.start_batch(ends);
    }

    /// Software records request packets.
    fn packets_arrived(&mut self, i: usize, arrived: &ArrivedPackets) {
        let first = || Box::new(ReceiveTracker::new(arrived.cumulative));
        let tracker = self.host_qps[i].tracker.get_or_insert_with(first);
        let numbers = (0..arrived.packets).map(|packet| arrived.psn.plus(packet));
        let new = numbers.filter(|psn| tracker.state.accept(*psn, arrived.cumulative)).count() as u32;
        if new > 0 {
            tracker.push_action(arrived.psn, arrived.action);
        }
        // Packets of a run are full, so each has the same share of the bytes.
        self.counters.received_bytes += u64::from(arrived.bytes / arrived.packets.max(1) * new);
        self.counters.duplicate_packets += u64::from(arrived.packets - new);
        let newest = arrived.psn.plus(arrived.packets.saturating_sub(1));
        (tracker.newest, tracker.echo) = (newest, arrived.sent);
        if self.slow_path.changed_qps.last() != Some(&(i as u32)) && !self.slow_path.changed_qps.contains(&(i as u32)) {
            self.slow_path.changed_qps.push(i as u32);
        }
    }

    fn command_progress(&mut self, now: Time, i: usize) {
        let Some(tracker) = &self.host_qps[i].tracker else { return };
        let sack = SelectiveAck {
            expected: tracker.state.expected(),
            newest: tracker.newest,
            arrived: tracker.state.sack_bitmap(),
            marked: 0,
            echo: tracker.echo,
        };
        let is_complete = tracker.state.is_complete();
        self.command(now, i, SlowPathCommand::Progress { sack, is_complete });
    }

    fn command(&mut self, now: Time, i: usize, command: SlowPathCommand) {
        let at = now + self.software_costs().doorbell;
        let generation = self.contexts[i].generation;
        self.slow_path.commands.push_back(IssuedCommand { at, qp: i as u32, generation, command });
        self.pin(i);
    }

    /// Hardware executes a command.
    fn execute_command(&mut self, now: Time, issued: &IssuedCommand) {
        let i = issued.qp as usize;
        if self.contexts[i].generation != issued.generation {
            return;
        }
        self.mark_context_used(i);
        match issued.command {
            SlowPathCommand::Progress { sack, is_complete } => self.execute_progress(now, i, &sack, is_complete),
            SlowPathCommand::Retransmit(psn) => {
                self.host_qps[i].retransmissions.push_back(Retransmission::Packet(psn));
                self.activate(now, i);
            }
        }
    }

    fn execute_progress(&mut self, now: Time, i: usize, sack: &SelectiveAck, is_complete: bool) {
        self.contexts[i].receiver.advance_cumulative(sack.expected);
        while let Some((psn, action)) = self.next_ready_action(i, sack.expected) {
            if let Err(error) = self.execute(now, i, psn, action) {
                self.reject(now, i, psn, error);
                return;
            }
        }
        let marked = std::mem::take(&mut self.contexts[i].marked);
        self.push_ack(i, sack.expected.previous(), ACK_WITHOUT_CREDITS, Some(SelectiveAck { marked, ..*sack }));
        if is_complete {
            if self.contexts[i].receiver.return_to_hardware(sack.expected) {
                self.counters.slow_returns += 1;
            } else {
                self.counters.slow_returns_refused += u64::from(self.contexts[i].receiver.is_slow());
            }
        }
    }

    /// Takes the next action whose packet, and all before it, have arrived.
    fn next_ready_action(&mut self, i: usize, cumulative: Psn) -> Option<(Psn, PendingAction)> {
        let tracker = self.host_qps[i].tracker.as_mut()?;
        pop_front_if(&mut tracker.waiting, |(psn, _)| psn.after(cumulative) < 0)
    }

    /// Software processes an acknowledgement that reports gaps.
    fn ack_by_software(&mut self, now: Time, i: usize, sack: &SelectiveAck) {
        let policy = self.profile.policy;
        let (unacked, host) = (self.contexts[i].unacked, &mut self.host_qps[i]);
        let is_gone = sack.expected.after(unacked) < 0 && sack.arrived == 0 && host.scoreboard.is_none();
        if is_gone {
            self.contexts[i].is_tracked = false;
            return;
        }
        let reordering_window = host.reordering_window;
        let board = host.scoreboard.get_or_insert_with(|| Scoreboard::new(unacked));
        let found = board.on_ack(now, unacked, sack, reordering_window, policy);
        if board.is_clean() {
            host.scoreboard = None;
            self.contexts[i].is_tracked = false;
        }
        host.reordering_window = found.shrink_window(reordering_window);
        self.counters.spurious_packets += found.spurious;
        if let Some(lateness) = found.lateness.filter(|_| policy.has_slow_path()) {
            self.learn_reordering_window(i, lateness);
        }
        for psn in found.lost {
            self.command(now, i, SlowPathCommand::Retransmit(psn));
        }
        self.arm_reordering_timer(i);
        self.activate(now, i);
    }

    /// Software processes the report of a lost packet.
    fn trim_nak_by_software(&mut self, now: Time, i: usize, psn: Psn) {
        let unacked = self.contexts[i].unacked;
        let board = self.host_qps[i].scoreboard.get_or_insert_with(|| Scoreboard::new(unacked));
        if board.on_trim_nak(now, unacked, psn) {
            self.command(now, i, SlowPathCommand::Retransmit(psn));
        } else if board.is_clean() {
            self.host_qps[i].scoreboard = None;
            self.contexts[i].is_tracked = false;
        }
    }

    fn arm_reordering_timer(&mut self, i: usize) {
        let host = &self.host_qps[i];
        let due = host.scoreboard.as_ref().and_then(|board| board.due(host.reordering_window));
        if let Some(due) = due {
            self.arm_timer(i, due);
        }
    }

    /// Treats packets as lost that are missing for longer than the reordering window.
    pub(super) fn reordering_timer_due(&mut self, now: Time, i: usize) {
        let host = &mut self.host_qps[i];
        let reordering_window = host.reordering_window;
        if let Some(board) = &mut host.scoreboard {
            let lost = board.overdue(now, reordering_window);
            for psn in lost {
                self.command(now, i, SlowPathCommand::Retransmit(psn));
            }
            self.arm_reordering_timer(i);
        }
        if self.contexts[i].reads_open == 0 {
            return;
        }
        let first = self.contexts[i].send_first;
        for at in 0..self.host_qps[i].sends.len() {
            let entry = &self.host_qps[i].sends[at];
            if !entry.is_started {
                break;
            }
            if entry.out_of_order.is_some() {
                self.rerequest_gaps(now, i, first.wrapping_add(at as u32));
            }
        }
    }
}
