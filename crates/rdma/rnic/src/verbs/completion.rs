//! Work completions.

use super::address::NicAddress;
use crate::wire::{Immediate, QpNumber};

/// The outcome of a work request (`ibv_wc_status`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompletionStatus {
    /// The request was executed.
    Success,
    /// Local length error: a message did not fit its receive request, or is longer than the NIC can send.
    LocalLength,
    /// Local QP operation error: the service of the queue pair does not have the operation, or the queue pair lacks a
    /// resource for it.
    LocalQpOperation,
    /// Local protection error: a local key, its bounds or its access rights are wrong.
    LocalProtection,
    /// The request was flushed because the queue pair was in an error state.
    Flushed,
    /// A memory window could not be bound, or a key not be invalidated: the verbs' memory management operation error
    /// (`IBV_WC_MW_BIND_ERR`). For a key that cannot be invalidated, rdma_rxe reports [`Self::LocalQpOperation`].
    MemoryWindowBind,
    /// Bad response error: the response does not match the request.
    BadResponse,
    /// Local access error: a WRITE with immediate data named memory that does not exist or may not be accessed.
    /// Reported by the receive request that the WRITE consumed.
    LocalAccess,
    /// Remote invalid request error (NAK of the responder).
    RemoteInvalidRequest,
    /// Remote access error (NAK of the responder): key, bounds or access rights are wrong.
    RemoteAccess,
    /// Remote operation error (NAK of the responder): the responder failed.
    RemoteOperation,
    /// The responder did not answer within the configured number of retries.
    RetryExceeded,
    /// The responder had no receive request within the configured number of RNR retries.
    ReceiverNotReadyExceeded,
}

/// The operation that was completed (`ibv_wc_opcode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompletionKind {
    /// A SEND of this queue pair.
    Send,
    /// A WRITE of this queue pair.
    Write,
    /// A READ of this queue pair.
    Read,
    /// A compare-and-swap of this queue pair.
    CompareSwap,
    /// A fetch-and-add of this queue pair.
    FetchAdd,
    /// A message from the peer, in a receive request.
    Receive,
    /// A WRITE with immediate data from the peer.
    ReceiveWriteImmediate,
    /// A bind of a memory window.
    BindWindow,
    /// An invalidation of a local key.
    LocalInvalidate,
}

/// A work completion (`ibv_wc`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The identifier that the program gave to the work request.
    pub id: u64,
    /// The queue pair of the work request.
    pub qp: QpNumber,
    /// The outcome. On an error, only `id` and `qp` are valid.
    pub status: CompletionStatus,
    /// The operation.
    pub kind: CompletionKind,
    /// Bytes received or read.
    pub bytes: u32,
    /// Immediate data of the sender, or the key that it invalidated.
    pub immediate: Option<Immediate>,
    /// The sender of a datagram.
    pub source: Option<(NicAddress, QpNumber)>,
    /// Whether the sender requested a solicited event.
    pub solicited: bool,
}

impl Completion {
    /// Creates a completion of no bytes, without immediate data and source.
    pub const fn new(id: u64, qp: QpNumber, status: CompletionStatus, kind: CompletionKind) -> Self {
        Self { id, qp, status, kind, bytes: 0, immediate: None, source: None, solicited: false }
    }
}

impl Default for Completion {
    /// A placeholder for an array that completions are polled into.
    fn default() -> Self {
        Self::new(0, QpNumber(0), CompletionStatus::Success, CompletionKind::Send)
    }
}
