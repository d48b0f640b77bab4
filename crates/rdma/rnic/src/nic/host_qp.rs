//! What a queue pair keeps in the host's memory.

use std::collections::VecDeque;

use sim::Span;

use super::control_queue::ReceiveTracker;
use super::event::SrqNumber;
use super::response_tracker::OutOfOrderResponse;
use super::scoreboard::Scoreboard;
use crate::verbs::{CompletionStatus, QpAttributes, ReceiveRequest, SendKind, SendRequest};
use crate::wire::{Psn, Syndrome};

/// What is sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Retransmission {
    /// The packet with this number.
    Packet(Psn),
    /// A part of an answer is asked for again.
    Response { index: u32, packet: u32, packets: u32 },
}

/// A work request of the send queue, in the host's memory.
#[derive(Clone, Debug)]
pub(super) struct SendEntry {
    pub request: SendRequest,
    pub bytes: u32,
    /// Packets that this side sends.
    pub packets: u32,
    /// Numbers that it takes.
    pub psns: u32,
    pub first: Psn,
    /// Which receive request of the peer it takes, or, for READs and atomics, its own index.
    pub message: u32,
    /// Packets of the answer that came, in order.
    pub response_packets: u32,
    /// Those that came out of order, by the slow path.
    pub out_of_order: Option<Box<OutOfOrderResponse>>,
    pub is_started: bool,
    /// The answer is complete.
    pub is_done: bool,
    /// It failed here; the peer knows nothing of it.
    pub failed: Option<CompletionStatus>,
}

impl SendEntry {
    /// Whether an answer with content is waited for.
    pub fn is_read_or_atomic(&self) -> bool {
        matches!(self.request.kind, SendKind::Read(_) | SendKind::CompareSwap { .. } | SendKind::FetchAdd { .. })
    }

    /// Whether it takes a receive request of the peer.
    pub fn takes_receive(&self) -> bool {
        matches!(self.request.kind, SendKind::Send(_) | SendKind::SendWithInvalidate(_) | SendKind::Write(_, Some(_)))
    }
}

/// An answer with content that is being sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingResponse {
    /// The number of its first packet or, with selective repeat, of its request.
    pub psn: Psn,
    /// The requester's index of the request.
    pub message: u32,
    /// The packets still to send, counted from the answer's beginning.
    pub packet: u32,
    pub packets: u32,
    /// The packet that it began with.
    pub packet_first: u32,
    /// Where packet `packet_first` lies.
    pub address: u64,
    /// Bytes from there on.
    pub bytes: u32,
    /// The requester's clock.
    pub sent: u16,
    /// The value of an atomic operation.
    pub value: Option<u64>,
}

/// What an atomic operation answered, should the requester ask again.
#[derive(Clone, Copy, Debug)]
pub(super) struct AtomicResult {
    pub psn: Psn,
    pub message: u32,
    pub value: u64,
}

/// What a queue pair has in the host's memory.
#[derive(Debug, Default)]
pub(super) struct HostQp {
    pub sends: VecDeque<SendEntry>,
    pub sends_max: usize,
    pub receives: VecDeque<ReceiveRequest>,
    pub receives_max: usize,
    pub shared: Option<SrqNumber>,
    pub signals_all: bool,
    /// Receive requests taken for messages from `Context::receive_message` on.
    pub taken_receives: VecDeque<ReceiveRequest>,
    pub responses: VecDeque<PendingResponse>,
    pub atomic_results: VecDeque<AtomicResult>,
    /// What the peer is told when all answers are sent.
    pub pending_nak: Option<(Psn, Syndrome)>,
    /// What the slow path has decided to send again.
    pub retransmissions: VecDeque<Retransmission>,
    /// The slow path's view of what the peer sent.
    pub tracker: Option<Box<ReceiveTracker>>,
    /// How late packets came that were not lost, as learned.
    pub reordering_window: Span,
    /// Of an unreliable connection: the packet that would come next, and how many came so far, of a run that is
    /// elsewhere in the sequence.
    pub stray_run: Option<(Psn, u32)>,
    /// Of an unreliable service: messages longer than their receive requests.
    pub dropped_long: u64,
    /// The slow path's view of what the peer has.
    pub scoreboard: Option<Box<Scoreboard>>,
    pub attributes: QpAttributes,
}
