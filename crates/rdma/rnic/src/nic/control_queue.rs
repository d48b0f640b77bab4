//! The slow path's queues between hardware and software, and their entries.

use std::collections::VecDeque;

use sim::Time;

use super::handover::SoftwareReceiver;
use super::request_error::RequestError;
use crate::wire::{AtomicEth, Header, Immediate, Psn, RKey, SelectiveAck, Syndrome};

/// What remains to be done, in order, for a packet whose payload is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PendingAction {
    /// Nothing: the packet is not the last of its message.
    Nothing,
    /// The end of a WRITE.
    Written,
    /// A message that consumes a receive request.
    Receive { message: u32, bytes: u32, immediate: Option<Immediate>, is_solicited: bool, is_write: bool },
    /// A READ.
    Read { message: u32, packet: u32, sent: u16, address: u64, key: RKey, bytes: u32 },
    /// A compare-and-swap or fetch-and-add.
    Atomic { message: u32, sent: u16, atomic: AtomicEth, is_swap: bool },
    /// An error, reported to the peer when all earlier packets are done.
    Fault(RequestError),
}

/// A request packet for software, or a run of packets for which nothing remains to be done.
#[derive(Clone, Copy, Debug)]
pub(super) struct ArrivedPackets {
    pub psn: Psn,
    pub packets: u32,
    /// The cumulative PSN of hardware when it queued this entry.
    pub cumulative: Psn,
    pub sent: u16,
    pub bytes: u32,
    pub action: PendingAction,
}

/// An entry of the control queue.
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
    /// A packet of a READ response of which only the header arrived (packet trimming).
    ResponseTrimmed {
        index: u32,
        packet: u32,
    },
}

impl ControlEntry {
    /// Returns the number of packets that the entry covers.
    pub fn headers(&self) -> u64 {
        match self {
            Self::Arrived(arrived) => u64::from(arrived.packets),
            Self::Sack(_) | Self::TrimNak(_) | Self::ResponsePacket { .. } | Self::ResponseTrimmed { .. } => 1,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct QueuedEntry {
    /// When software can see the entry.
    pub at: Time,
    pub qp: u32,
    pub generation: u8,
    pub entry: ControlEntry,
}

/// A command from software to hardware.
#[derive(Clone, Copy, Debug)]
pub(super) enum SlowPathCommand {
    /// All packets before `sack.expected` have arrived: execute and acknowledge them and, if none is missing, return
    /// the receiver to hardware.
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

/// The control queue, the batch that software works on, and its commands.
#[derive(Debug, Default)]
pub(super) struct SlowPath {
    pub queue: VecDeque<QueuedEntry>,
    pub batch: Option<SoftwareBatch>,
    pub commands: VecDeque<IssuedCommand>,
    /// Queue pairs whose receive state changed in this batch.
    pub changed_qps: Vec<u32>,
    /// The queue pair of each header in this batch.
    pub batch_qps: Vec<u32>,
}

/// The receive state of a queue pair that software keeps.
#[derive(Clone, Debug)]
pub(super) struct ReceiveTracker {
    pub state: SoftwareReceiver,
    /// Actions to execute when all earlier packets have arrived, in order.
    pub waiting: VecDeque<(Psn, PendingAction)>,
    pub newest: Psn,
    pub echo: u16,
}

impl ArrivedPackets {
    /// Merges the following packet into this entry, if nothing remains to be done for either.
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
    /// Returns what remains to be done for a packet of a WRITE whose payload is placed.
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

    /// Returns whether the action must be executed after those of earlier packets.
    pub const fn is_ordered(&self) -> bool {
        !matches!(self, Self::Nothing | Self::Written)
    }
}

impl SlowPath {
    /// Returns the next deadline, or [`Time::MAX`] if there is none.
    pub fn deadline(&self) -> Time {
        let command = self.commands.front().map_or(Time::MAX, |issued| issued.at);
        self.batch.map_or(Time::MAX, |batch| batch.ends).min(command)
    }
}

impl ReceiveTracker {
    pub fn new(first: Psn) -> Self {
        Self { state: SoftwareReceiver::new(first), waiting: VecDeque::new(), newest: first, echo: 0 }
    }

    /// Inserts an action in PSN order; most actions belong at the end.
    pub fn push_action(&mut self, psn: Psn, action: PendingAction) {
        if action == PendingAction::Nothing {
            return;
        }
        let before = self.waiting.iter().rposition(|(other, _)| other.after(psn) < 0);
        self.waiting.insert(before.map_or(0, |at| at + 1), (psn, action));
    }
}

/// Maximum number of packets that one entry covers.
const RUN_PACKETS_MAX: u32 = 64;
