//! Answers with content: of READs and atomic operations, at the side that asked.

use sim::{Span, Time};

use super::bits::PacketBitmap;
use super::context::SendEntry;
use super::emit::{parts, tick};
use super::profile::WINDOW_PACKETS_MAX;
use super::schedule::{Again, piece_bytes};
use super::software::Entry;
use super::{HostMemory, Nic, READS_MAX};
use crate::verbs::{AccessFlags, CompletionStatus, QpState, SGES_MAX, SendKind, Sge};
use crate::wire::{Header, Operation, Psn, Service};

/// What came of an answer out of order: in the host's memory.
#[derive(Clone, Debug)]
pub(super) struct Answers {
    /// Bit i: packet `answered + i` came.
    arrived: PacketBitmap,
    /// All gaps before this packet were asked for again.
    asked_to: u32,
    /// Since when there is a gap that was not asked for.
    gap_since: Option<Time>,
    /// When the request left that the first of these answers, by the clock that packets carry.
    first_sent: u16,
    /// When gaps were last asked for again, once that has left.
    asked_tick: Option<u16>,
    /// A later answer came: what is missing up to the end was overtaken.
    is_overtaken: bool,
    /// Bit i: of packet `answered + i` only the head came, and it is asked for again by itself.
    cut_off: PacketBitmap,
    /// Of those, bit i: not yet.
    to_ask: PacketBitmap,
    /// What was asked for again by itself: the first packet, how many, and how many of them nothing was heard of.
    repairs: Vec<(u32, u32, u32)>,
}

/// Why content cannot be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Misfit {
    /// Longer than the memory for it.
    Length,
    /// The memory's key, bounds or rights.
    Protection,
}

impl<M: HostMemory> Nic<M> {
    /// Places bytes of a message into its pieces of local memory.
    pub(super) fn scatter(
        &mut self,
        i: usize,
        pieces: &[Sge; SGES_MAX],
        offset: u32,
        bytes: u32,
        payload: &M::Payload,
    ) -> Result<(), Misfit> {
        let room: u64 = pieces.iter().map(|piece| u64::from(piece.bytes)).sum();
        if u64::from(offset) + u64::from(bytes) > room {
            return Err(Misfit::Length);
        }
        let domain = self.contexts[i].domain;
        let mut done = 0;
        for part in parts(pieces, offset, bytes) {
            let host = self.table.check_local(domain, &part, AccessFlags::LOCAL_WRITE);
            let address = host.map_err(|_| Misfit::Protection)?;
            self.memory.place(address, part.bytes, payload, done).map_err(|_| Misfit::Protection)?;
            done += part.bytes;
        }
        Ok(())
    }

    /// Without selective repeat: the answer must be the one that comes next.
    pub(super) fn content_in_order(&mut self, now: Time, i: usize, header: &Header, payload: &M::Payload) {
        let Some(index) = self.index_of(i, header.psn) else {
            self.counters.drop_unasked += 1;
            return;
        };
        let Some(entry) = self.entry(i, index).filter(|entry| entry.is_asking() && !entry.is_done) else {
            self.counters.drop_unasked += 1;
            return;
        };
        let expected = entry.first.plus(entry.answered);
        let ahead = header.psn.after(expected);
        if ahead < 0 {
            self.counters.duplicate_packets += 1;
            return;
        }
        // It acknowledges all requests before; an answer before it that is missing was lost.
        if !self.progress(now, i, expected, 0) || self.contexts[i].unacked != expected || ahead > 0 {
            self.counters.drop_out_of_order += 1;
            self.go_back_once(now, i);
            return;
        }
        let packet = self.entry(i, index).map_or(0, |entry| entry.answered);
        if self.take_content(now, i, index, packet, header, payload) {
            self.counters.received_bytes += u64::from(header.payload_bytes);
            self.answered(now, i, index, packet + 1);
            self.progress(now, i, expected.plus(1), 0);
        }
    }

    /// With selective repeat: the answer says itself where it belongs.
    pub(super) fn content_selective(&mut self, now: Time, i: usize, header: &Header, payload: &M::Payload) {
        let Some(placement) = header.placement else {
            self.counters.drop_malformed += 1;
            return;
        };
        let Some(index) = self.asking(i, placement.message) else {
            self.counters.drop_unasked += 1;
            return;
        };
        let Some(entry) = self.entry(i, index) else { return };
        let (answered, is_late, first) = (entry.answered, entry.late.is_some(), entry.first);
        if placement.packet < answered {
            self.counters.duplicate_packets += 1;
            return;
        }
        if placement.packet - answered >= WINDOW_PACKETS_MAX {
            self.counters.drop_beyond_window += 1;
            return;
        }
        if is_late || placement.packet > answered {
            if !self.has_room_for_software() {
                self.counters.drop_control_queue += 1;
                return;
            }
            if !self.take_content(now, i, index, placement.packet, header, payload) {
                return;
            }
            self.counters.out_of_order_packets += u64::from(placement.packet > answered);
            if let Some(entry) = self.entry_mut(i, index) {
                entry.late.get_or_insert_with(|| Answers::new(placement.sent));
            }
            self.queue_for_software(now, i, Entry::Content { index, packet: placement.packet, sent: placement.sent });
        } else if self.take_content(now, i, index, answered, header, payload) {
            self.counters.received_bytes += u64::from(header.payload_bytes);
            self.answered(now, i, index, answered + 1);
        }
        if self.contexts[i].reads_open > 1 {
            self.overtaken_by(now, i, index, placement.sent);
        }
        self.answer_heard(now, i, first);
        self.reap(now, i);
    }

    /// Requests are done in order: the answer to this one, were it only a head, tells that all before it arrived.
    fn answer_heard(&mut self, now: Time, i: usize, first: Psn) {
        if first.plus(1).after(self.contexts[i].unacked) > 0 {
            self.progress(now, i, first.plus(1), 0);
        } else {
            self.news(now, i);
        }
    }

    /// The head of an answer that lost its payload: the requester asks again at once.
    pub(super) fn answer_head(&mut self, now: Time, i: usize, header: &Header) {
        let is_sending = matches!(self.contexts[i].state, QpState::ReadyToSend | QpState::SendQueueDrain);
        if self.contexts[i].service != Service::Rc || !is_sending {
            self.counters.drop_service += 1;
        } else if self.profile.policy.is_selective() {
            self.head_selective(now, i, header);
        } else {
            self.head_in_order(now, i, header);
        }
    }

    /// Without selective repeat: nothing behind what is missing will be taken.
    fn head_in_order(&mut self, now: Time, i: usize, header: &Header) {
        let index = self.index_of(i, header.psn);
        let asking = |entry: &&SendEntry| entry.is_asking() && !entry.is_done;
        let Some(entry) = index.and_then(|index| self.entry(i, index)).filter(asking) else {
            self.counters.drop_unasked += 1;
            return;
        };
        let expected = entry.first.plus(entry.answered);
        if header.psn.after(expected) >= 0 {
            self.progress(now, i, expected, 0);
            self.go_back_once(now, i);
        }
    }

    fn head_selective(&mut self, now: Time, i: usize, header: &Header) {
        let index = header.placement.and_then(|placement| self.asking(i, placement.message));
        let (Some(placement), Some(index)) = (header.placement, index) else {
            self.counters.drop_unasked += 1;
            return;
        };
        let mtu = self.contexts[i].mtu();
        let Some(entry) = self.entry_mut(i, index) else { return };
        let is_within = placement.packet < entry.bytes.div_ceil(mtu).max(1);
        if placement.packet < entry.answered || !is_within {
            return;
        }
        if placement.packet - entry.answered >= WINDOW_PACKETS_MAX {
            self.counters.drop_beyond_window += 1;
            return;
        }
        // What follows is software's: there is a gap now.
        entry.late.get_or_insert_with(|| Answers::new(placement.sent));
        let first = entry.first;
        self.queue_for_software(now, i, Entry::ContentCut { index, packet: placement.packet });
        self.answer_heard(now, i, first);
        self.reap(now, i);
    }

    /// Software has a packet of an answer asked for again of which only the head came.
    pub(super) fn content_cut_off(&mut self, now: Time, i: usize, index: u32, packet: u32) {
        let Some(entry) = self.entry_mut(i, index).filter(|entry| !entry.is_done) else { return };
        let answered = entry.answered;
        let Some(late) = entry.late.as_mut().filter(|_| packet >= answered) else { return };
        if late.arrived.has(packet - answered) {
            return;
        }
        late.heard(packet);
        late.cut_off.set(packet - answered);
        late.to_ask.set(packet - answered);
        self.ask_for_cut(now, i, index);
    }

    /// Asks again for packets of which only the heads came: no more requests at a time than the peer has room for, so
    /// that those which wait become fewer and longer.
    fn ask_for_cut(&mut self, now: Time, i: usize, index: u32) {
        let most = usize::from(READS_MAX / self.contexts[i].reads_open.max(1)).max(1);
        let Some(entry) = self.entry_mut(i, index) else { return };
        let answered = entry.answered;
        let Some(late) = &mut entry.late else { return };
        let mut asked = Vec::new();
        while late.repairs.len() < most && !late.to_ask.is_empty() {
            let (first, packets) = late.to_ask.take_run();
            late.repairs.push((answered + first, packets, packets));
            asked.push(Again::Answer { index, packet: answered + first, packets });
        }
        if !asked.is_empty() {
            self.hosts[i].again.extend(asked);
            self.activate(now, i);
        }
    }

    /// Places content if it is what was asked for; else the request fails or the packet is dropped.
    fn take_content(
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
        let packets = entry.bytes.div_ceil(mtu).max(1);
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
            self.store_local(i, &local, value)
        };
        if placed.is_err() {
            self.fail(now, i, index, CompletionStatus::LocalProtection);
            return false;
        }
        true
    }

    fn store_local(&mut self, i: usize, local: &[Sge; SGES_MAX], value: u64) -> Result<(), Misfit> {
        let piece = local.iter().find(|piece| piece.bytes > 0).ok_or(Misfit::Length)?;
        let domain = self.contexts[i].domain;
        let host = self.table.check_local(domain, piece, AccessFlags::LOCAL_WRITE);
        let address = host.map_err(|_| Misfit::Protection)?;
        self.memory.store(address, value).map_err(|_| Misfit::Protection)
    }

    /// So many packets of an answer came in order.
    fn answered(&mut self, now: Time, i: usize, index: u32, packets: u32) {
        let mtu = self.contexts[i].mtu();
        let Some(entry) = self.entry_mut(i, index) else { return };
        entry.answered = packets;
        let pieces = entry.bytes.div_ceil(mtu).max(1);
        if packets >= pieces && !entry.is_done {
            entry.is_done = true;
            entry.late = None;
            self.contexts[i].reads_open = self.contexts[i].reads_open.saturating_sub(1);
            self.activate(now, i);
        }
    }

    /// Software takes in where a late packet of an answer belongs.
    pub(super) fn content_by_software(&mut self, now: Time, i: usize, index: u32, packet: u32, sent: u16) {
        let (reordering, mtu) = (self.hosts[i].reordering, self.contexts[i].mtu());
        let Some(entry) = self.entry_mut(i, index).filter(|entry| !entry.is_done) else { return };
        let answered = entry.answered;
        let is_read = matches!(entry.request.kind, SendKind::Read(_));
        let bytes = if is_read { piece_bytes(entry.bytes, packet, mtu) } else { 0 };
        let late = entry.late.get_or_insert_with(|| Answers::new(sent));
        if packet < answered || !late.arrived.set(packet - answered) {
            self.counters.duplicate_packets += 1;
            return;
        }
        // An answer to the first request, though it was asked for again: it was late, and not lost.
        let is_spurious = packet < late.asked_to && packet == answered && sent == late.first_sent;
        let lateness = late.gap_since.map(|since| now.since(since));
        let there = late.arrived.leading();
        late.arrived.advance(there);
        late.cut_off.advance(there);
        late.to_ask.advance(there);
        late.heard(packet);
        if there > 0 {
            late.gap_since = None;
        }
        if late.arrived.is_empty() && late.cut_off.is_empty() {
            entry.late = None;
        }
        self.counters.received_bytes += u64::from(bytes);
        if is_spurious {
            self.counters.spurious_packets += 1;
            self.learn_reordering(i, lateness.unwrap_or(reordering));
        }
        if there > 0 {
            self.answered(now, i, index, answered + there);
            self.reap(now, i);
        }
        self.ask_for_cut(now, i, index);
        self.ask_for_gaps(now, i, index);
    }

    /// Answers come in the order of requests: what is missing of those before this one was overtaken; what was asked
    /// for again, by the answer to a request that left later.
    fn overtaken_by(&mut self, now: Time, i: usize, index: u32, sent: u16) {
        let first = self.contexts[i].send_first;
        let tick = tick(now);
        for at in 0..index.wrapping_sub(first) {
            let Some(entry) = self.hosts[i].sends.get_mut(at as usize) else { return };
            if !entry.is_asking() || entry.is_done {
                continue;
            }
            // A tick that no answer carries: of this one's request nothing is known.
            let late = entry.late.get_or_insert_with(|| Answers::new(tick.wrapping_sub(1)));
            let is_lost_again = late.asked_tick.is_some_and(|asked| sent.wrapping_sub(asked).cast_signed() > 0);
            if is_lost_again {
                late.asked_to = 0;
                late.forget_repairs();
            }
            if is_lost_again || !late.is_overtaken {
                late.is_overtaken = true;
                self.ask_for_gaps(now, i, first.wrapping_add(at));
            }
        }
    }

    /// Asks again for gaps that were there for longer than packets overtake each other.
    pub(super) fn ask_for_gaps(&mut self, now: Time, i: usize, index: u32) {
        let (reordering, mtu) = (self.hosts[i].reordering, self.contexts[i].mtu());
        let Some(entry) = self.entry_mut(i, index).filter(|entry| !entry.is_done) else { return };
        let (answered, packets) = (entry.answered, entry.bytes.div_ceil(mtu).max(1));
        let Some(late) = &mut entry.late else { return };
        let end = if late.is_overtaken { packets } else { answered + late.arrived.end() };
        if end <= late.asked_to.max(answered) {
            return;
        }
        let due = *late.gap_since.get_or_insert(now) + reordering;
        if due > now {
            self.arm(i, due);
            return;
        }
        let gaps = late.gaps(answered, late.asked_to.max(answered), end);
        (late.asked_to, late.gap_since, late.asked_tick) = (end, None, None);
        let again = gaps.into_iter().map(|(packet, packets)| Again::Answer { index, packet, packets });
        self.hosts[i].again.extend(again);
        self.activate(now, i);
    }

    /// What was asked for again has left.
    pub(super) fn asked_again(&mut self, now: Time, i: usize, index: u32) {
        if let Some(late) = self.entry_mut(i, index).and_then(|entry| entry.late.as_mut()) {
            late.asked_tick = Some(tick(now));
        }
    }

    /// Nothing came for long: asks again for all that is missing of the first answer that is not complete.
    pub(super) fn ask_again_for_all(&mut self, i: usize) {
        let mtu = self.contexts[i].mtu();
        let first = self.contexts[i].send_first;
        let open = self.hosts[i].sends.iter_mut().zip(0_u32..).find(|(entry, _)| entry.is_asking() && !entry.is_done);
        let Some((entry, at)) = open.filter(|(entry, _)| entry.is_started) else { return };
        let (index, answered) = (first.wrapping_add(at), entry.answered);
        let packets = entry.bytes.div_ceil(mtu).max(1);
        let whole = || vec![(answered, packets - answered)];
        let gaps = entry.late.as_mut().map_or_else(whole, |late| {
            late.forget_repairs();
            late.gaps(answered, answered, packets)
        });
        let again = gaps.into_iter().map(|(packet, packets)| Again::Answer { index, packet, packets });
        self.hosts[i].again.extend(again);
    }

    /// Packets came late that were not lost: waits so long from now on, and at most a round trip.
    pub(super) fn learn_reordering(&mut self, i: usize, lateness: Span) {
        let most = self.contexts[i].smoothed_rtt().unwrap_or(lateness);
        let host = &mut self.hosts[i];
        let with_margin = Span::from_ps(lateness.ps() + lateness.ps() / 4);
        host.reordering = host.reordering.max(with_margin).min(most.max(host.reordering));
    }
}

impl Answers {
    fn new(first_sent: u16) -> Box<Self> {
        Box::new(Self {
            arrived: PacketBitmap::EMPTY,
            asked_to: 0,
            gap_since: None,
            first_sent,
            asked_tick: None,
            is_overtaken: false,
            cut_off: PacketBitmap::EMPTY,
            to_ask: PacketBitmap::EMPTY,
            repairs: Vec::new(),
        })
    }

    /// Something of a packet came, were it only its head.
    fn heard(&mut self, packet: u32) {
        let is_in = |first: u32, packets: u32| packet.checked_sub(first).is_some_and(|offset| offset < packets);
        if let Some(at) = self.repairs.iter().position(|(first, packets, _)| is_in(*first, *packets)) {
            self.repairs[at].2 -= 1;
            if self.repairs[at].2 == 0 {
                self.repairs.swap_remove(at);
            }
        }
    }

    /// Nothing more is waited for by itself.
    fn forget_repairs(&mut self) {
        (self.cut_off, self.to_ask) = (PacketBitmap::EMPTY, PacketBitmap::EMPTY);
        self.repairs.clear();
    }

    /// First packet and length of each gap from one packet to another, without what was asked for by itself.
    fn gaps(&self, answered: u32, from: u32, to: u32) -> Vec<(u32, u32)> {
        let mut gaps: Vec<(u32, u32)> = Vec::new();
        // What is beyond the bitmaps did not come.
        let known_to = to.min(answered + self.arrived.end().max(self.cut_off.end()));
        let is_gap = |packet: &u32| !self.arrived.has(packet - answered) && !self.cut_off.has(packet - answered);
        for packet in (from..known_to).filter(is_gap) {
            match gaps.last_mut() {
                Some((first, packets)) if *first + *packets == packet => *packets += 1,
                _ => gaps.push((packet, 1)),
            }
        }
        let rest = from.max(known_to);
        if rest < to {
            gaps.push((rest, to - rest));
        }
        gaps
    }
}
