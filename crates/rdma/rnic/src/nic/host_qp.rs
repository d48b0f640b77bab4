//! The state of a queue pair in the host's memory.

use std::collections::VecDeque;

use sim::Span;

use super::control_queue::ReceiveTracker;
use super::event::SrqNumber;
use super::response_tracker::OutOfOrderResponse;
use super::scoreboard::Scoreboard;
use crate::verbs::{CompletionStatus, QpAttributes, ReceiveRequest, SendKind, SendRequest};
use crate::wire::{Psn, Syndrome};

/// A retransmission that the slow path or a timer has decided on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Retransmission {
    /// The request packet with this PSN.
    Packet(Psn),
    /// A READ request for a part of a response.
    Response { index: u32, packet: u32, packets: u32 },
}

/// An entry of the send queue.
#[derive(Clone, Debug)]
pub(super) struct SendEntry {
    pub request: SendRequest,
    pub bytes: u32,
    /// Number of packets that this side sends.
    pub packets: u32,
    /// Number of PSNs that the request takes.
    pub psns: u32,
    pub first: Psn,
    /// The receive request of the peer that the message consumes; for READs and atomics, the index of the entry itself.
    pub message: u32,
    /// Number of response packets that have arrived in order.
    pub response_packets: u32,
    /// Response packets that arrived out of order, tracked by the slow path.
    pub out_of_order: Option<Box<OutOfOrderResponse>>,
    pub is_started: bool,
    /// The response is complete.
    pub is_done: bool,
    /// The request failed locally, before it reached the peer.
    pub failed: Option<CompletionStatus>,
}

impl SendEntry {
    /// Returns whether the request is answered with data.
    pub fn is_read_or_atomic(&self) -> bool {
        matches!(self.request.kind, SendKind::Read(_) | SendKind::CompareSwap { .. } | SendKind::FetchAdd { .. })
    }

    /// Returns whether the request consumes a receive request of the peer.
    pub fn takes_receive(&self) -> bool {
        matches!(self.request.kind, SendKind::Send(_) | SendKind::SendWithInvalidate(_) | SendKind::Write(_, Some(_)))
    }
}

/// A READ or atomic response that is being sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingResponse {
    /// The PSN of its first packet or, with selective repeat, of its request.
    pub psn: Psn,
    /// The requester's index of the request.
    pub message: u32,
    /// The next packet to send, counted from the start of the response.
    pub packet: u32,
    pub packets: u32,
    /// The packet with which this response begins.
    pub packet_first: u32,
    /// Host address of packet `packet_first`.
    pub address: u64,
    /// Bytes from packet `packet_first` on.
    pub bytes: u32,
    /// The requester's clock in the request.
    pub sent: u16,
    /// The result of an atomic operation.
    pub value: Option<u64>,
}

/// The result of an atomic operation, kept for duplicates of the request.
#[derive(Clone, Copy, Debug)]
pub(super) struct AtomicResult {
    pub psn: Psn,
    pub message: u32,
    pub value: u64,
}

/// The state of a queue pair in the host's memory.
#[derive(Debug, Default)]
pub(super) struct HostQp {
    pub sends: VecDeque<SendEntry>,
    pub sends_max: usize,
    pub receives: VecDeque<ReceiveRequest>,
    pub receives_max: usize,
    pub srq: Option<SrqNumber>,
    pub signals_all: bool,
    /// Receive requests taken for messages, from `Context::receive_message` on.
    pub taken_receives: VecDeque<ReceiveRequest>,
    pub responses: VecDeque<PendingResponse>,
    pub atomic_results: VecDeque<AtomicResult>,
    /// The NAK to send after all responses.
    pub pending_nak: Option<(Psn, Syndrome)>,
    /// Retransmissions to send.
    pub retransmissions: VecDeque<Retransmission>,
    /// The slow path's bitmap of packets from the peer.
    pub tracker: Option<Box<ReceiveTracker>>,
    /// The learned reordering window: how late packets were that were not lost (RACK, RFC 8985).
    pub reordering_window: Span,
    /// For an unreliable connection: the next PSN, and the length so far, of a run of packets outside the expected
    /// range.
    pub stray_run: Option<(Psn, u32)>,
    /// Number of messages of an unreliable service that exceeded their receive requests.
    pub dropped_long: u64,
    /// Number of request packets retransmitted.
    pub retransmitted_packets: u64,
    /// The slow path's record of packets at the peer.
    pub scoreboard: Option<Box<Scoreboard>>,
    pub attributes: QpAttributes,
}
