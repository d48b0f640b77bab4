//! The queues between hardware and the software of the slow path, and what each side puts into them.

use std::collections::VecDeque;

use sim::Time;

use super::handover::SoftwareReceiver;
use super::request_error::RequestError;
use crate::wire::{AtomicEth, Header, Immediate, Psn, RKey, SelectiveAck, Syndrome};

/// What remains to be done of a packet whose payload is placed, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PendingAction {
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
    Fault(RequestError),
}

/// A header for software: a packet of a request, or several in a row for which nothing is to be done.
#[derive(Clone, Copy, Debug)]
pub(super) struct ArrivedPackets {
    pub psn: Psn,
    pub packets: u32,
    /// What hardware had settled when it queued this.
    pub cumulative: Psn,
    pub sent: u16,
    pub bytes: u32,
    pub action: PendingAction,
}

/// A header for software.
#[derive(Clone, Copy, Debug)]
pub(super) enum ControlEntry {
    Arrived(ArrivedPackets),
    Sack(SelectiveAck),
    TrimNak(Psn),
    ResponsePacket {
        index: u32,
        packet: u32,
        sent: u16,
    },
    /// Of this packet of an answer only the head came.
    ResponseTrimmed {
        index: u32,
        packet: u32,
    },
}

impl ControlEntry {
    /// Headers of packets that it tells of.
    pub fn headers(&self) -> u64 {
        match self {
            Self::Arrived(arrived) => u64::from(arrived.packets),
            Self::Sack(_) | Self::TrimNak(_) | Self::ResponsePacket { .. } | Self::ResponseTrimmed { .. } => 1,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct QueuedEntry {
    /// When software can see it.
    pub at: Time,
    pub qp: u32,
    pub generation: u8,
    pub entry: ControlEntry,
}

/// What software tells hardware.
#[derive(Clone, Copy, Debug)]
pub(super) enum SlowPathCommand {
    /// All before `sack.expected` is there: do it, acknowledge it, and if nothing is missing take the queue pair back.
    Progress {
        sack: SelectiveAck,
        is_complete: bool,
    },
    Retransmit(Psn),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct IssuedCommand {
    pub at: Time,
    pub qp: u32,
    pub generation: u8,
    pub command: SlowPathCommand,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SoftwareBatch {
    pub ends: Time,
    pub headers: usize,
}

/// The control queue, software's turn, and its commands.
#[derive(Debug, Default)]
pub(super) struct SlowPath {
    pub queue: VecDeque<QueuedEntry>,
    pub batch: Option<SoftwareBatch>,
    pub commands: VecDeque<IssuedCommand>,
    /// Queue pairs whose receiving side changed in this turn.
    pub changed_qps: Vec<u32>,
    /// Queue pairs whose headers were taken in this turn, once for each.
    pub batch_qps: Vec<u32>,
}

/// What software knows of a queue pair's receiving side.
#[derive(Clone, Debug)]
pub(super) struct ReceiveTracker {
    pub state: SoftwareReceiver,
    /// What is to be done when all before it is there, in order.
    pub waiting: VecDeque<(Psn, PendingAction)>,
    pub newest: Psn,
    pub echo: u16,
}

impl ArrivedPackets {
    /// Takes the packet behind it into the same entry, if nothing is to be done for either.
    pub fn extend(&mut self, next: &Self) -> bool {
        let is_next = next.psn == self.psn.plus(self.packets) && self.packets < RUN_PACKETS_MAX;
        let fits = is_next && self.action == PendingAction::Nothing && next.action == PendingAction::Nothing;
        if fits {
            self.packets += 1;
            self.bytes += next.bytes;
            self.sent = next.sent;
        }
        fits
    }
}

impl PendingAction {
    /// What is left to do of a WRITE's packet that is placed.
    pub fn of_write(header: &Header, message: u32, bytes: u32) -> Self {
        let (_, ends) = header.operation.message_bounds();
        match header.immediate {
            Some(Immediate::Data(_)) if ends => Self::Receive {
                message,
                bytes,
                immediate: header.immediate,
                is_solicited: header.solicited,
                is_write: true,
            },
            Some(_) => Self::Fault(RequestError::Nak(Syndrome::InvalidRequest)),
            None if ends => Self::Written,
            None => Self::Nothing,
        }
    }

    /// Whether it matters what was done before it.
    pub const fn is_ordered(&self) -> bool {
        !matches!(self, Self::Nothing | Self::Written)
    }
}

impl SlowPath {
    /// When something is due; [`Time::MAX`] when nothing is.
    pub fn deadline(&self) -> Time {
        let command = self.commands.front().map_or(Time::MAX, |issued| issued.at);
        self.batch.map_or(Time::MAX, |batch| batch.ends).min(command)
    }
}

impl ReceiveTracker {
    pub fn new(first: Psn) -> Self {
        Self { state: SoftwareReceiver::new(first), waiting: VecDeque::new(), newest: first, echo: 0 }
    }

    /// Keeps what is to be done, in the order of numbers; mostly it is the last.
    pub fn push_action(&mut self, psn: Psn, action: PendingAction) {
        if action == PendingAction::Nothing {
            return;
        }
        let before = self.waiting.iter().rposition(|(other, _)| other.after(psn) < 0);
        self.waiting.insert(before.map_or(0, |at| at + 1), (psn, action));
    }
}

/// Packets in a row that one entry of the control queue tells of, at most.
const RUN_PACKETS_MAX: u32 = 64;
