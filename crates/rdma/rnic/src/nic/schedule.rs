//! Which queue pair sends next: the cache-free scheduler (srnic.md, section 1).
//!
//! Doorbells, acknowledgements that open windows and due timers are merged into one question, "has this queue pair work
//! that it may do now?", and those that have stand in the schedule queue once. A decision takes the first of them,
//! fetches a batch of its work requests, then the data of as many packets as its turn allows; what was fetched and not
//! used is dropped. Several decisions are on their way at a time, so that two reads of the host's memory one after the
//! other do not keep the wire waiting.

use std::collections::VecDeque;

use sim::{Span, Time};

use super::context::{Context, Host, Reply, SendEntry};
use super::{CostModel, HostMemory, MTU_BYTES_MAX, Nic, pop_front_if};
use crate::verbs::{AccessFlags, CompletionStatus, MESSAGE_BYTES_MAX, ProtectionContext, QpState, SendKind};
use crate::wire::{Psn, Service};

/// What a packet takes of the buffer ahead of the wire besides its payload.
const PACKET_BYTES: u32 = 64;

/// Packets that a message of an in-order policy may have: half of what numbers tell apart, and half of that.
const PACKETS_MAX: u32 = 1 << 22;

/// What is sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Again {
    /// The packet with this number.
    Packet(Psn),
    /// A part of an answer is asked for again.
    Answer { index: u32, packet: u32, packets: u32 },
}

/// A packet that waits for its data, or for the wire.
#[derive(Clone, Copy, Debug)]
pub(super) struct Staged {
    /// When its data is there.
    pub at: Time,
    pub qp: u32,
    pub epoch: u8,
    pub life: u8,
    pub bytes: u32,
    pub item: Item,
}

/// A staged packet as it waits: half a cache line, for a ring of them is walked through. Replies wait beside it.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    at: Time,
    qp: u32,
    /// Of payload: an MTU at most.
    bytes: u16,
    epoch: u8,
    life: u8,
    item: WaitingItem,
}

#[derive(Clone, Copy, Debug)]
enum WaitingItem {
    Request { index: u32, packet: u32, is_again: bool },
    AskAgain { index: u32, packet: u32, packets: u32 },
    Reply,
}

const _: () = assert!(size_of::<Waiting>() <= 32, "a staged packet is more than half a cache line");

/// Which packet.
#[derive(Clone, Copy, Debug)]
pub(super) enum Item {
    Request {
        index: u32,
        packet: u32,
        is_again: bool,
    },
    AskAgain {
        index: u32,
        packet: u32,
        packets: u32,
    },
    /// The reply as it stood, `packet` being the one to send.
    Reply(Reply),
}

/// A decision whose work requests are being fetched.
#[derive(Clone, Copy, Debug)]
struct Decision {
    at: Time,
    qp: u32,
    /// Bytes of the buffer that are kept for it.
    reserved: u32,
}

/// From doorbells to the wire.
#[derive(Debug, Default)]
pub(super) struct Pipeline {
    doorbells: VecDeque<(Time, u32)>,
    /// The schedule queue.
    pub ready: VecDeque<u32>,
    decisions: VecDeque<Decision>,
    staged: VecDeque<Waiting>,
    /// Those of the staged packets that are replies.
    staged_replies: VecDeque<Reply>,
    /// Bytes reserved and staged.
    ahead_bytes: u32,
    /// When the link to the host's memory has carried what was asked for.
    dma_free_at: Time,
    /// When the driver last came by: packets that were ready then wait for the wire, not for time.
    pub seen_at: Time,
}

impl Pipeline {
    /// When something is due; [`Time::MAX`] when nothing is.
    pub fn deadline(&self) -> Time {
        let doorbell = self.doorbells.front().map_or(Time::MAX, |(at, _)| *at);
        let decision = self.decisions.front().map_or(Time::MAX, |decision| decision.at);
        let staged = self.staged.front().map(|staged| staged.at).filter(|at| *at > self.seen_at);
        doorbell.min(decision).min(staged.unwrap_or(Time::MAX))
    }

    fn push(&mut self, staged: &Staged) {
        let Staged { at, qp, epoch, life, bytes, item } = *staged;
        let item = match item {
            Item::Request { index, packet, is_again } => WaitingItem::Request { index, packet, is_again },
            Item::AskAgain { index, packet, packets } => WaitingItem::AskAgain { index, packet, packets },
            Item::Reply(reply) => {
                self.staged_replies.push_back(reply);
                WaitingItem::Reply
            }
        };
        self.ahead_bytes += bytes + PACKET_BYTES;
        self.staged.push_back(Waiting { at, qp, bytes: bytes as u16, epoch, life, item });
    }

    /// The next packet whose data is there.
    fn pop(&mut self, now: Time) -> Option<Staged> {
        let Waiting { at, qp, bytes, epoch, life, item } = pop_front_if(&mut self.staged, |staged| staged.at <= now)?;
        let item = match item {
            WaitingItem::Request { index, packet, is_again } => Item::Request { index, packet, is_again },
            WaitingItem::AskAgain { index, packet, packets } => Item::AskAgain { index, packet, packets },
            WaitingItem::Reply => Item::Reply(self.staged_replies.pop_front().expect("each has its reply beside it")),
        };
        let bytes = u32::from(bytes);
        self.ahead_bytes -= bytes + PACKET_BYTES;
        Some(Staged { at, qp, epoch, life, bytes, item })
    }

    /// When the link from the host's memory has carried so many bytes more.
    pub fn carried(&mut self, now: Time, costs: &CostModel, bytes: u32) -> Time {
        self.dma_free_at = self.dma_free_at.max(now) + costs.dma_bytes(bytes);
        self.dma_free_at
    }
}

// The payload of a staged packet is counted in 16 bits.
const _: () = assert!(MTU_BYTES_MAX <= u16::MAX as u32);

/// Whether a queue pair can do something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Now,
    /// Not before this time.
    At(Time),
    Nothing,
}

impl<M: HostMemory> Nic<M> {
    /// A program rang for a queue pair.
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

    /// Something changed: puts the queue pair into the schedule queue if it has work.
    pub(super) fn activate(&mut self, now: Time, i: usize) {
        if self.is_queued(i) {
            return;
        }
        if self.contexts.is_away(i) {
            // What there is to do is seen when its context has come.
            self.push_ready(i);
            return;
        }
        match self.work(now, i) {
            Work::Now => self.push_ready(i),
            Work::At(at) => self.arm(i, at),
            Work::Nothing => {}
        }
    }

    fn work(&self, now: Time, i: usize) -> Work {
        let (context, host) = (&self.contexts[i], &self.hosts[i]);
        if !context.is_there || !context.state.receives() {
            return Work::Nothing;
        }
        let is_sending = matches!(context.state, QpState::ReadyToSend | QpState::SendQueueDrain);
        let has_again = is_sending && !host.again.is_empty();
        let has_new = is_sending && self.can_begin(context, host);
        if host.replies.is_empty() && !has_again && !has_new {
            return Work::Nothing;
        }
        let not_before = if host.replies.is_empty() { context.not_ready_until } else { Time::ZERO };
        let at = not_before.max(context.pace_at);
        if at > now { Work::At(at) } else { Work::Now }
    }

    /// Whether a new packet may go, but for time.
    fn can_begin(&self, context: &Context, host: &Host) -> bool {
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
            // Without any there may be, it is not waited for one: it fails.
            let has_room = context.reads_open < context.reads_max || context.reads_max == 0;
            if waits || entry.is_asking() && !has_room {
                return false;
            }
        }
        let packets = self.in_flight(context, host);
        packets == 0
            || context.next.after(context.unacked).cast_unsigned() < self.profile.window_packets
                && packets.saturating_mul(context.mtu()) < context.control.window_bytes()
    }

    /// Packets on their way. IRN counts from the first that is missing; the slow path knows which arrived behind it.
    pub(super) fn in_flight(&self, context: &Context, host: &Host) -> u32 {
        let all = context.next.after(context.unacked).max(0).cast_unsigned();
        match &host.scoreboard {
            Some(scoreboard) if self.profile.policy.has_slow_path() => all.saturating_sub(scoreboard.arrived()),
            _ => all,
        }
    }

    /// Takes decisions while there is something to decide and room for it.
    pub(super) fn schedule(&mut self, now: Time) {
        let limits = self.profile.scheduling;
        while self.pipeline.ahead_bytes < limits.ahead_bytes
            && self.pipeline.decisions.len() < limits.decisions as usize
            && (self.is_timed() || self.pipeline.staged.is_empty())
        {
            let Some(i) = self.pop_ready(now) else { return };
            if self.work(now, i) != Work::Now {
                self.turn_ends(now, i);
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
        // What the last turn needed, or its share, is the best guess of what this one will.
        let guess = u32::from(self.contexts[i].turn_bytes_64) * 64;
        let reserved = guess.clamp(PACKET_BYTES, self.profile.scheduling.quantum_bytes.max(PACKET_BYTES));
        self.pipeline.ahead_bytes += reserved;
        // A hit behind a miss waits for it: decisions keep their order.
        let at = self.pipeline.decisions.back().map_or(at, |last| last.at.max(at));
        self.pipeline.decisions.push_back(Decision { at, qp: i as u32, reserved });
    }

    /// Work requests that have come from the host's memory.
    pub(super) fn fetched_due(&mut self, now: Time) {
        while let Some(decision) = pop_front_if(&mut self.pipeline.decisions, |decision| decision.at <= now) {
            self.pipeline.ahead_bytes -= decision.reserved;
            self.stage(now, decision.qp as usize, decision.reserved);
        }
    }

    /// Stages a turn's packets, and queues the queue pair again if it has more.
    fn stage(&mut self, now: Time, i: usize, reserved: u32) {
        let limits = self.profile.scheduling;
        let room = limits.ahead_bytes.saturating_sub(self.pipeline.ahead_bytes).max(reserved);
        let turn = limits.quantum_bytes.min(room.max(PACKET_BYTES));
        let (index, mut used) = (self.contexts[i].send_index, 0);
        while used < turn && self.work(now, i) == Work::Now {
            let batch = self.contexts[i].send_index.wrapping_sub(index);
            if batch >= limits.batch_wqes {
                break;
            }
            let Some((item, bytes)) = self.next_item(now, i) else { break };
            self.push_staged(now, i, item, bytes);
            used += bytes + PACKET_BYTES;
        }
        self.count_fetched(i, index);
        self.context_used(i);
        let needs = if self.work(now, i) == Work::Now { self.share_of_a_turn(i) } else { used };
        self.contexts[i].turn_bytes_64 = u16::try_from(needs.div_ceil(64)).unwrap_or(u16::MAX);
        self.turn_ends(now, i);
    }

    /// What is kept of the buffer for a queue pair that has more to send: as much as for any other one that waits, for
    /// alone it needs a whole turn to keep the wire busy while its work requests come, and with others a part of that.
    /// By its last turn alone one that began when the buffer was full would get a packet more each time, and long
    /// messages before it whole turns.
    fn share_of_a_turn(&self, i: usize) -> u32 {
        let waiting = (self.pipeline.ready.len() + self.pipeline.decisions.len()) as u32;
        let packet = self.contexts[i].mtu() + PACKET_BYTES;
        (self.profile.scheduling.quantum_bytes / (1 + waiting)).max(packet)
    }

    /// Counts the work requests that a decision fetched, and those that it did not get to.
    fn count_fetched(&mut self, i: usize, index_before: u32) {
        let limits = &self.profile.scheduling;
        if !limits.fetches_wqes {
            return;
        }
        let (context, host) = (&self.contexts[i], &self.hosts[i]);
        let before = index_before.wrapping_sub(context.send_first) as usize;
        let fetched = host.sends.len().saturating_sub(before).min(limits.batch_wqes as usize) as u64;
        let used = u64::from(context.send_index.wrapping_sub(index_before));
        self.counters.wqes_fetched += fetched;
        self.counters.wqes_dropped += fetched.saturating_sub(used + u64::from(context.send_packet > 0));
    }

    fn push_staged(&mut self, now: Time, i: usize, item: Item, bytes: u32) {
        let costs = &self.profile.costs;
        let pipeline = &mut self.pipeline;
        let mut at = now;
        if bytes > 0 {
            at = pipeline.carried(now, costs, bytes) + costs.dma_read;
        }
        // Packets keep their order, with data or without.
        let at = pipeline.staged.back().map_or(at, |last| last.at.max(at));
        let Context { epoch, life, .. } = self.contexts[i];
        pipeline.push(&Staged { at, qp: i as u32, epoch, life, bytes, item });
        self.pin(i);
    }

    /// The next packet whose data is there.
    pub(super) fn next_staged(&mut self, now: Time) -> Option<Staged> {
        if self.pipeline.staged.is_empty() {
            self.schedule(now);
        }
        let staged = self.pipeline.pop(now)?;
        if self.is_timed() {
            self.schedule(now);
        }
        Some(staged)
    }

    /// The next packet of a queue pair that has work: what is lost first, then answers and new requests in turn.
    fn next_item(&mut self, now: Time, i: usize) -> Option<(Item, u32)> {
        let is_ready = self.contexts[i].not_ready_until <= now;
        let is_sending = matches!(self.contexts[i].state, QpState::ReadyToSend | QpState::SendQueueDrain);
        let again = if is_sending && is_ready { self.next_again(i) } else { None };
        if again.is_some() {
            return again;
        }
        let has_new = is_sending && is_ready && self.can_begin(&self.contexts[i], &self.hosts[i]);
        let has_reply = !self.hosts[i].replies.is_empty();
        if has_reply && (!has_new || self.contexts[i].turn_is_reply) {
            self.contexts[i].turn_is_reply = false;
            return self.next_reply(now, i);
        }
        self.contexts[i].turn_is_reply = true;
        if has_new { self.next_request(now, i) } else { None }
    }

    fn next_again(&mut self, i: usize) -> Option<(Item, u32)> {
        while let Some(again) = self.hosts[i].again.pop_front() {
            let found = match again {
                Again::Packet(psn) => self.packet_of(i, psn),
                Again::Answer { index, packet, packets } => {
                    let is_open = self.entry(i, index).is_some_and(|entry| !entry.is_done);
                    is_open.then_some((Item::AskAgain { index, packet, packets }, 0))
                }
            };
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// The packet with this number, if it was sent and is not known to have arrived.
    fn packet_of(&self, i: usize, psn: Psn) -> Option<(Item, u32)> {
        let context = &self.contexts[i];
        if psn.after(context.unacked) < 0 || psn.after(context.sent_end) >= 0 {
            return None;
        }
        let index = self.index_of(i, psn)?;
        let entry = self.entry(i, index)?;
        let packet = psn.after(entry.first).cast_unsigned();
        let bytes = if entry.is_asking() { 0 } else { piece_bytes(entry.bytes, packet, context.mtu()) };
        Some((Item::Request { index, packet, is_again: true }, bytes))
    }

    fn next_reply(&mut self, now: Time, i: usize) -> Option<(Item, u32)> {
        let mtu = self.contexts[i].mtu();
        let reply = self.hosts[i].replies.front_mut()?;
        let item = Item::Reply(*reply);
        let bytes = match reply.value {
            Some(_) => 8,
            None => piece_bytes(reply.bytes, reply.packet - reply.packet_first, mtu),
        };
        reply.packet += 1;
        if reply.packet >= reply.packet_first + reply.packets {
            self.hosts[i].replies.pop_front();
        }
        self.pace(now, i, bytes);
        Some((item, if self.is_atomic(&item) { 0 } else { bytes }))
    }

    fn is_atomic(&self, item: &Item) -> bool {
        matches!(item, Item::Reply(Reply { value: Some(_), .. }))
    }

    fn pace(&mut self, now: Time, i: usize, bytes: u32) {
        let context = &mut self.contexts[i];
        let pause = context.control.sent(&self.profile.congestion, now, bytes + PACKET_BYTES);
        if pause > Span::ZERO {
            context.pace_at = context.pace_at.max(now) + pause;
        }
    }

    /// The next new packet; a request whose local memory is not there fails instead.
    fn next_request(&mut self, now: Time, i: usize) -> Option<(Item, u32)> {
        let index = self.contexts[i].send_index;
        let begun = if self.entry(i, index)?.is_started { Ok(()) } else { self.begin(i, index) };
        if let Err(status) = begun {
            self.entry_mut(i, index)?.failed = Some(status);
            self.reap(now, i);
            return None;
        }
        if self.entry(i, index)?.request.kind.is_local() {
            // Done as it was begun: there is nothing to send, the first time and every time.
            self.contexts[i].send_index = index.wrapping_add(1);
            self.reap(now, i);
            return None;
        }
        let is_selective = self.profile.policy.is_selective();
        let context = &mut self.contexts[i];
        let at = index.wrapping_sub(context.send_first) as usize;
        let entry = &self.hosts[i].sends[at];
        let packet = context.send_packet;
        let is_asking = entry.is_asking();
        let bytes = if is_asking { 0 } else { piece_bytes(entry.bytes, packet, context.mtu()) };
        let psn_end = if is_asking { entry.first.plus(entry.psns) } else { entry.first.plus(packet + 1) };
        let is_again = !is_selective && psn_end.after(context.sent_end) <= 0;
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
        Some((Item::Request { index, packet, is_again }, bytes))
    }

    /// Whether hardware finds a request that this queue pair cannot do, and what its completion says then.
    ///
    /// An operation that the service does not have, or that lacks what it needs, is a *local QP operation error*, as
    /// rdma_rxe and mlx5 have it ("an opcode which isn't supported by the transport type of the QP"; READs without
    /// initiator reads). A message longer than a NIC's port sends, or an atomic operation of other than 8 bytes, is a
    /// *local length error* (ibv_poll_cq's statuses; IBA 11.6.2).
    fn flaw(&self, context: &Context, entry: &SendEntry) -> Option<CompletionStatus> {
        let (kind, datagram) = (&entry.request.kind, entry.request.datagram);
        let is_connected = context.service != Service::Ud;
        let is_plain_send = matches!(kind, SendKind::Send(_));
        let is_wrong_kind = match context.service {
            Service::Rc => entry.is_asking() && context.reads_max == 0,
            Service::Uc => entry.is_asking() || matches!(kind, SendKind::SendWithInvalidate(_)),
            Service::Ud => !is_plain_send,
        };
        let has_memory_for_nothing = kind.is_local() && entry.bytes > 0;
        if is_wrong_kind || has_memory_for_nothing || is_connected == datagram.is_some() {
            return Some(CompletionStatus::LocalQpOperation);
        }
        let is_read = matches!(kind, SendKind::Read(_));
        let is_wrong_atomic = entry.is_asking() && !is_read && entry.bytes != 8;
        let packets = entry.bytes.div_ceil(context.mtu().max(1));
        let is_long = entry.bytes > MESSAGE_BYTES_MAX || packets > PACKETS_MAX || !is_connected && packets > 1;
        (is_wrong_atomic || is_long).then_some(CompletionStatus::LocalLength)
    }

    /// Gives a request its numbers, once; checks the local memory that it names.
    fn begin(&mut self, i: usize, index: u32) -> Result<(), CompletionStatus> {
        let is_selective = self.profile.policy.is_selective();
        let at = index.wrapping_sub(self.contexts[i].send_first) as usize;
        if let Some(status) = self.flaw(&self.contexts[i], &self.hosts[i].sends[at]) {
            return Err(status);
        }
        let context = &mut self.contexts[i];
        let entry = &mut self.hosts[i].sends[at];
        if entry.request.kind.is_local() {
            (entry.first, entry.is_started) = (context.next, true);
            return self.begin_local(i, at);
        }
        let is_asking = entry.is_asking();
        let access = if is_asking { AccessFlags::LOCAL_WRITE } else { AccessFlags::empty() };
        for piece in entry.request.local.iter().filter(|piece| piece.bytes > 0) {
            if self.table.check_local(context.domain, piece, access).is_err() {
                return Err(CompletionStatus::LocalProtection);
            }
        }
        let pieces = entry.bytes.div_ceil(context.mtu()).max(1);
        entry.packets = if is_asking { 1 } else { pieces };
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
        if is_asking {
            context.reads_open += 1;
        } else if entry.takes_receive() {
            entry.message = context.send_message;
            context.send_message = context.send_message.wrapping_add(1);
        }
        Ok(())
    }
}

impl<M: HostMemory> Nic<M> {
    /// Does what needs nobody else.
    fn begin_local(&mut self, i: usize, at: usize) -> Result<(), CompletionStatus> {
        let accessor = ProtectionContext { domain: self.contexts[i].domain, qp: self.number(i) };
        let done = match self.hosts[i].sends[at].request.kind {
            SendKind::BindWindow { window, chosen, bind } => self.table.bind_type_2(accessor, window, chosen, &bind),
            SendKind::LocalInvalidate(key) => self.table.invalidate(accessor, key),
            _ => Ok(()),
        };
        self.hosts[i].sends[at].is_done = done.is_ok();
        done.map_err(|_| CompletionStatus::MemoryWindowBind)
    }
}

/// Bytes of one packet of a message.
pub(super) const fn piece_bytes(bytes: u32, packet: u32, mtu: u32) -> u32 {
    let before = packet.saturating_mul(mtu);
    let left = bytes.saturating_sub(before);
    if left < mtu { left } else { mtu }
}
