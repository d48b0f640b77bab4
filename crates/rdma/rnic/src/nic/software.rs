//! The slow path's software: a control queue of headers to it, commands from it, and a core of the host that takes its
//! time (srnic.md, "Memory-free selective repeat").
//!
//! IRN has the same algorithm in hardware: its queue costs nothing, and is empty again at once.

use std::collections::VecDeque;

use sim::{Span, Time};

use super::hand_over::Software;
use super::responder::Refusal;
use super::schedule::Again;
use super::scoreboard::Scoreboard;
use super::{CostModel, HostMemory, Nic, pop_front_if};
use crate::wire::{AtomicEth, Immediate, Psn, RKey, SelectiveAck, Syndrome};

/// Headers that software takes in one turn, at most.
const TURN_HEADERS: usize = 64;
/// Packets in a row that one entry of the control queue tells of, at most.
const RUN_PACKETS_MAX: u32 = 64;

/// What remains to be done of a packet whose payload is placed, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// A packet in the middle.
    Nothing,
    /// The end of a WRITE.
    Written,
    /// A message that takes a receive request.
    Receive { message: u32, bytes: u32, immediate: Option<Immediate>, is_solicited: bool, is_write: bool },
    /// A READ.
    Read { message: u32, packet: u32, sent: u16, address: u64, key: RKey, bytes: u32 },
    /// A compare-and-swap or a fetch-and-add.
    Atomic { message: u32, sent: u16, atomic: AtomicEth, is_swap: bool },
    /// It cannot be, and the peer is told when all before it is done.
    Fault(Refusal),
}

/// A header for software: a packet of a request, or several in a row for which nothing is to be done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrived {
    pub psn: Psn,
    pub packets: u32,
    /// What hardware had settled when it queued this.
    pub settled: Psn,
    pub sent: u16,
    pub bytes: u32,
    pub action: Action,
}

/// A header for software.
#[derive(Clone, Copy, Debug)]
pub(super) enum Entry {
    Arrived(Arrived),
    Acknowledged(SelectiveAck),
    Lost(Psn),
    Content {
        index: u32,
        packet: u32,
        sent: u16,
    },
    /// Of this packet of an answer only the head came.
    ContentCut {
        index: u32,
        packet: u32,
    },
}

impl Entry {
    /// Headers of packets that it tells of.
    fn headers(&self) -> u64 {
        match self {
            Self::Arrived(arrived) => u64::from(arrived.packets),
            Self::Acknowledged(_) | Self::Lost(_) | Self::Content { .. } | Self::ContentCut { .. } => 1,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Queued {
    /// When software can see it.
    at: Time,
    qp: u32,
    life: u8,
    entry: Entry,
}

/// What software tells hardware.
#[derive(Clone, Copy, Debug)]
enum Command {
    /// All before `sack.expected` is there: do it, acknowledge it, and if nothing is missing take the queue pair back.
    Progress {
        sack: SelectiveAck,
        is_whole: bool,
    },
    Again(Psn),
}

#[derive(Clone, Copy, Debug)]
struct Issued {
    at: Time,
    qp: u32,
    life: u8,
    command: Command,
}

#[derive(Clone, Copy, Debug)]
struct Turn {
    ends: Time,
    headers: usize,
}

/// The control queue, software's turn, and its commands.
#[derive(Debug, Default)]
pub(super) struct SlowPath {
    queue: VecDeque<Queued>,
    turn: Option<Turn>,
    commands: VecDeque<Issued>,
    /// Queue pairs whose receiving side changed in this turn.
    touched: Vec<u32>,
    /// Queue pairs whose headers were taken in this turn, once for each.
    taken: Vec<u32>,
}

/// What software knows of a queue pair's receiving side.
#[derive(Clone, Debug)]
pub(super) struct Arrivals {
    half: Software,
    /// What is to be done when all before it is there, in order.
    waiting: VecDeque<(Psn, Action)>,
    newest: Psn,
    echo: u16,
}

impl Arrived {
    /// Takes the packet behind it into the same entry, if nothing is to be done for either.
    fn extend(&mut self, next: &Self) -> bool {
        let is_next = next.psn == self.psn.plus(self.packets) && self.packets < RUN_PACKETS_MAX;
        let fits = is_next && self.action == Action::Nothing && next.action == Action::Nothing;
        if fits {
            self.packets += 1;
            self.bytes += next.bytes;
            self.sent = next.sent;
        }
        fits
    }
}

impl Action {
    /// Whether it matters what was done before it.
    pub const fn is_ordered(&self) -> bool {
        !matches!(self, Self::Nothing | Self::Written)
    }
}

impl SlowPath {
    /// When something is due; [`Time::MAX`] when nothing is.
    pub fn deadline(&self) -> Time {
        let command = self.commands.front().map_or(Time::MAX, |issued| issued.at);
        self.turn.map_or(Time::MAX, |turn| turn.ends).min(command)
    }
}

impl<M: HostMemory> Nic<M> {
    /// What software costs; IRN has none.
    fn software_costs(&self) -> CostModel {
        if self.profile.policy.has_slow_path() { self.profile.costs } else { CostModel::ZERO }
    }

    pub(super) fn has_room_for_software(&self) -> bool {
        self.slow.queue.len() < self.profile.control_queue as usize
    }

    /// Queues a header; the caller has looked for room, or can do without.
    pub(super) fn queue_for_software(&mut self, now: Time, i: usize, entry: Entry) {
        if !self.has_room_for_software() {
            self.counters.drop_control_queue += 1;
            return;
        }
        if self.is_taken_along(now, i, &entry) {
            return;
        }
        let costs = self.software_costs();
        let wake = if self.slow.turn.is_none() { costs.software_wake } else { Span::ZERO };
        let at = self.slow.queue.back().map_or(Time::ZERO, |last| last.at).max(now + costs.dma_write + wake);
        let life = self.contexts[i].life;
        self.slow.queue.push_back(Queued { at, qp: i as u32, life, entry });
        self.pin(i);
        if self.slow.turn.is_none() {
            self.begin_turn(now);
        }
    }

    /// Hardware adds a packet to the entry that it is still writing, if it is the next of the same queue pair: software
    /// has one entry to look at, not many.
    fn is_taken_along(&mut self, now: Time, i: usize, entry: &Entry) -> bool {
        let life = self.contexts[i].life;
        let (Entry::Arrived(next), Some(last)) = (entry, self.slow.queue.back_mut()) else { return false };
        let is_same = last.at > now && last.qp as usize == i && last.life == life;
        match &mut last.entry {
            Entry::Arrived(arrived) if is_same => arrived.extend(next),
            _ => false,
        }
    }

    fn begin_turn(&mut self, now: Time) {
        let Some(first) = self.slow.queue.front() else { return };
        let begins = first.at.max(now);
        let headers = self.slow.queue.iter().take(TURN_HEADERS).take_while(|queued| queued.at <= begins).count();
        let takes = self.software_costs().software_header * headers as u64;
        self.counters.software_busy += takes;
        self.slow.turn = Some(Turn { ends: begins + takes, headers });
    }

    /// Ends turns and carries out commands that are due, in order of time.
    pub(super) fn slow_path_due(&mut self, now: Time) {
        loop {
            let turn_ends = self.slow.turn.map_or(Time::MAX, |turn| turn.ends);
            let command_at = self.slow.commands.front().map_or(Time::MAX, |issued| issued.at);
            if turn_ends.min(command_at) > now || turn_ends.min(command_at) == Time::MAX {
                return;
            }
            if command_at <= turn_ends {
                if let Some(issued) = self.slow.commands.pop_front() {
                    self.obey(now, &issued);
                    self.unpin(now, issued.qp as usize);
                }
            } else {
                self.end_turn(turn_ends);
            }
        }
    }

    fn end_turn(&mut self, ends: Time) {
        let Some(turn) = self.slow.turn.take() else { return };
        for _ in 0..turn.headers {
            let Some(queued) = self.slow.queue.pop_front() else { break };
            self.counters.slow_headers += queued.entry.headers();
            self.slow.taken.push(queued.qp);
            let i = queued.qp as usize;
            if self.contexts[i].life != queued.life {
                continue; // of a life before
            }
            match queued.entry {
                Entry::Arrived(arrived) => self.arrived(i, &arrived),
                Entry::Acknowledged(sack) => self.acknowledged_by_software(ends, i, &sack),
                Entry::Lost(psn) => self.lost_by_software(ends, i, psn),
                Entry::Content { index, packet, sent } => self.content_by_software(ends, i, index, packet, sent),
                Entry::ContentCut { index, packet } => self.content_cut_off(ends, i, index, packet),
            }
        }
        let mut touched = std::mem::take(&mut self.slow.touched);
        for i in touched.drain(..) {
            self.command_progress(ends, i as usize);
        }
        self.slow.touched = touched;
        let mut taken = std::mem::take(&mut self.slow.taken);
        for i in taken.drain(..) {
            self.unpin(ends, i as usize);
        }
        self.slow.taken = taken;
        self.begin_turn(ends);
    }

    /// Software takes in the header of a request's packet.
    fn arrived(&mut self, i: usize, arrived: &Arrived) {
        let first = || Box::new(Arrivals::new(arrived.settled));
        let arrivals = self.hosts[i].arrivals.get_or_insert_with(first);
        let numbers = (0..arrived.packets).map(|packet| arrived.psn.plus(packet));
        let new = numbers.filter(|psn| arrivals.half.take(*psn, arrived.settled)).count() as u32;
        if new > 0 {
            arrivals.keep(arrived.psn, arrived.action);
        }
        // Packets in a row are full: each has the same share of the bytes.
        self.counters.received_bytes += u64::from(arrived.bytes / arrived.packets.max(1) * new);
        self.counters.duplicate_packets += u64::from(arrived.packets - new);
        let newest = arrived.psn.plus(arrived.packets.saturating_sub(1));
        (arrivals.newest, arrivals.echo) = (newest, arrived.sent);
        if self.slow.touched.last() != Some(&(i as u32)) && !self.slow.touched.contains(&(i as u32)) {
            self.slow.touched.push(i as u32);
        }
    }

    fn command_progress(&mut self, now: Time, i: usize) {
        let Some(arrivals) = &self.hosts[i].arrivals else { return };
        let sack = SelectiveAck {
            expected: arrivals.half.expected(),
            newest: arrivals.newest,
            arrived: arrivals.half.sack_bitmap(),
            marked: 0,
            echo: arrivals.echo,
        };
        let is_whole = arrivals.half.is_whole();
        self.command(now, i, Command::Progress { sack, is_whole });
    }

    fn command(&mut self, now: Time, i: usize, command: Command) {
        let at = now + self.software_costs().doorbell;
        let life = self.contexts[i].life;
        self.slow.commands.push_back(Issued { at, qp: i as u32, life, command });
        self.pin(i);
    }

    /// Hardware carries out a command.
    fn obey(&mut self, now: Time, issued: &Issued) {
        let i = issued.qp as usize;
        if self.contexts[i].life != issued.life {
            return;
        }
        self.context_used(i);
        match issued.command {
            Command::Progress { sack, is_whole } => self.obey_progress(now, i, &sack, is_whole),
            Command::Again(psn) => {
                self.hosts[i].again.push_back(Again::Packet(psn));
                self.activate(now, i);
            }
        }
    }

    fn obey_progress(&mut self, now: Time, i: usize, sack: &SelectiveAck, is_whole: bool) {
        self.contexts[i].hand.settle(sack.expected);
        while let Some((psn, action)) = self.next_settled(i, sack.expected) {
            if let Err(refusal) = self.perform(now, i, psn, action) {
                self.refuse_as(now, i, psn, refusal);
                return;
            }
        }
        let marked = std::mem::take(&mut self.contexts[i].marked);
        let syndrome = Syndrome::Ack { credit_code: 31 };
        let last = sack.expected.plus(Psn::new(u32::MAX).get());
        self.push_ack(i, last, syndrome, Some(SelectiveAck { marked, ..*sack }));
        if is_whole {
            if self.contexts[i].hand.give_back(sack.expected) {
                self.counters.slow_returns += 1;
            } else {
                self.counters.slow_returns_refused += u64::from(self.contexts[i].hand.is_slow());
            }
        }
    }

    /// What is to be done next of what is there as a whole.
    fn next_settled(&mut self, i: usize, settled: Psn) -> Option<(Psn, Action)> {
        let arrivals = self.hosts[i].arrivals.as_mut()?;
        pop_front_if(&mut arrivals.waiting, |(psn, _)| psn.after(settled) < 0)
    }

    /// Software takes in an acknowledgement that tells of gaps.
    fn acknowledged_by_software(&mut self, now: Time, i: usize, sack: &SelectiveAck) {
        let policy = self.profile.policy;
        let (unacked, host) = (self.contexts[i].unacked, &mut self.hosts[i]);
        let is_gone = sack.expected.after(unacked) < 0 && sack.arrived == 0 && host.scoreboard.is_none();
        if is_gone {
            self.contexts[i].is_followed = false;
            return;
        }
        let reordering = host.reordering;
        let board = host.scoreboard.get_or_insert_with(|| Scoreboard::new(unacked));
        let found = board.acknowledged(now, unacked, sack, reordering, policy);
        if board.is_clean() {
            host.scoreboard = None;
            self.contexts[i].is_followed = false;
        }
        host.reordering = found.forget(reordering);
        self.counters.spurious_packets += found.spurious;
        if let Some(lateness) = found.lateness.filter(|_| policy.has_slow_path()) {
            self.learn_reordering(i, lateness);
        }
        for psn in found.lost {
            self.command(now, i, Command::Again(psn));
        }
        self.arm_reordering(i);
        self.activate(now, i);
    }

    /// Software is told of a packet that is lost.
    fn lost_by_software(&mut self, now: Time, i: usize, psn: Psn) {
        let unacked = self.contexts[i].unacked;
        let board = self.hosts[i].scoreboard.get_or_insert_with(|| Scoreboard::new(unacked));
        if board.cut_off(now, unacked, psn) {
            self.command(now, i, Command::Again(psn));
        } else if board.is_clean() {
            self.hosts[i].scoreboard = None;
            self.contexts[i].is_followed = false;
        }
    }

    fn arm_reordering(&mut self, i: usize) {
        let host = &self.hosts[i];
        let due = host.scoreboard.as_ref().and_then(|board| board.due(host.reordering));
        if let Some(due) = due {
            self.arm(i, due);
        }
    }

    /// What was waited for as long as packets overtake each other is lost.
    pub(super) fn reordering_due(&mut self, now: Time, i: usize) {
        let host = &mut self.hosts[i];
        let reordering = host.reordering;
        if let Some(board) = &mut host.scoreboard {
            let lost = board.overdue(now, reordering);
            for psn in lost {
                self.command(now, i, Command::Again(psn));
            }
            self.arm_reordering(i);
        }
        if self.contexts[i].reads_open == 0 {
            return;
        }
        let first = self.contexts[i].send_first;
        for at in 0..self.hosts[i].sends.len() {
            let entry = &self.hosts[i].sends[at];
            if !entry.is_started {
                break;
            }
            if entry.late.is_some() {
                self.ask_for_gaps(now, i, first.wrapping_add(at as u32));
            }
        }
    }
}

impl Arrivals {
    fn new(first: Psn) -> Self {
        Self { half: Software::new(first), waiting: VecDeque::new(), newest: first, echo: 0 }
    }

    /// Keeps what is to be done, in the order of numbers; mostly it is the last.
    fn keep(&mut self, psn: Psn, action: Action) {
        if action == Action::Nothing {
            return;
        }
        let before = self.waiting.iter().rposition(|(other, _)| other.after(psn) < 0);
        self.waiting.insert(before.map_or(0, |at| at + 1), (psn, action));
    }
}
