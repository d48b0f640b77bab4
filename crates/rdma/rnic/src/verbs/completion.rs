//! Completions.

use super::address::NicAddress;
use crate::wire::{Immediate, QpNumber};

/// How a work request ended (`ibv_wc_status`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompletionStatus {
    /// Well.
    Success,
    /// A message did not fit into its receive request, or is longer than the NIC sends.
    LocalLength,
    /// The queue pair cannot do this: an operation that its service does not have, or that lacks what it needs.
    LocalQpOperation,
    /// A local key, its bounds or its rights are wrong.
    LocalProtection,
    /// The queue pair went to the error state before.
    Flushed,
    /// A memory window could not be bound, or a key not be invalidated: what verbs call a memory management operation
    /// error (`IBV_WC_MW_BIND_ERR`). For a key that is not invalidated, rdma_rxe says [`Self::LocalQpOperation`].
    MemoryWindowBind,
    /// The responder's answer makes no sense.
    BadResponse,
    /// A WRITE with immediate data named memory that is not there or not for it; of the receive request that it took.
    LocalAccess,
    /// The responder says: this request cannot be.
    RemoteInvalidRequest,
    /// The responder says: key, bounds or rights are wrong.
    RemoteAccess,
    /// The responder failed.
    RemoteOperation,
    /// Nobody answered, as often as was tried.
    RetryExceeded,
    /// The responder had no receive request, as often as was tried.
    ReceiverNotReadyExceeded,
}

/// What was completed (`ibv_wc_opcode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompletionKind {
    /// A SEND of this side.
    Send,
    /// A WRITE of this side.
    Write,
    /// A READ of this side.
    Read,
    /// A compare-and-swap of this side.
    CompareSwap,
    /// A fetch-and-add of this side.
    FetchAdd,
    /// A message of the other side, in a receive request.
    Receive,
    /// A WRITE with immediate of the other side.
    ReceiveWriteImmediate,
    /// A memory window was bound.
    BindWindow,
    /// A key of this side was invalidated.
    LocalInvalidate,
}

/// A work request's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The program's own number of the request.
    pub id: u64,
    /// Its queue pair.
    pub qp: QpNumber,
    /// How it ended; only `id` and `qp` hold when it did not end well.
    pub status: CompletionStatus,
    /// What it was.
    pub kind: CompletionKind,
    /// Bytes received, or read.
    pub bytes: u32,
    /// What the sender handed over.
    pub immediate: Option<Immediate>,
    /// Of datagrams: who sent it.
    pub source: Option<(NicAddress, QpNumber)>,
    /// Whether the sender asked for the program to be woken.
    pub solicited: bool,
}

impl Completion {
    /// A completion of no bytes and nothing else.
    pub const fn new(id: u64, qp: QpNumber, status: CompletionStatus, kind: CompletionKind) -> Self {
        Self { id, qp, status, kind, bytes: 0, immediate: None, source: None, solicited: false }
    }
}

impl Default for Completion {
    /// Room for one that is polled.
    fn default() -> Self {
        Self::new(0, QpNumber(0), CompletionStatus::Success, CompletionKind::Send)
    }
}
