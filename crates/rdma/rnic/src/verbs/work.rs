//! Work requests.

use super::address::DatagramDestination;
use super::completion::CompletionKind;
use super::memory::BindInfo;
use super::sge::{SGES_MAX, Sge};
use crate::wire::RKey;

/// Maximum length of a message in bytes (IBA 9.7.7: 2^31).
pub const MESSAGE_BYTES_MAX: u32 = 1 << 31;

/// A piece of the peer's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteBuffer {
    /// Virtual address at the peer.
    pub address: u64,
    /// The key of the region or window (R_Key).
    pub key: RKey,
}

/// The operation of a send request, with its parameters (`ibv_wr_opcode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendKind {
    /// SEND into the peer's next receive request, optionally with 32 bits of immediate data.
    Send(Option<u32>),
    /// SEND that also invalidates this key of the peer.
    SendWithInvalidate(RKey),
    /// WRITE to the peer's memory. With immediate data it also consumes and completes a receive request of the peer.
    Write(RemoteBuffer, Option<u32>),
    /// READ of the peer's memory.
    Read(RemoteBuffer),
    /// Replaces 8 bytes at the peer with `swap` if they equal `compare`. The local memory receives the previous value.
    CompareSwap {
        /// Address at the peer, a multiple of 8.
        remote: RemoteBuffer,
        /// The expected value.
        compare: u64,
        /// The new value.
        swap: u64,
    },
    /// Adds to 8 bytes at the peer. The local memory receives the previous value.
    FetchAdd {
        /// Address at the peer, a multiple of 8.
        remote: RemoteBuffer,
        /// The value to add, mod 2^64.
        add: u64,
    },
    /// Binds a local memory window of type 2 (`IBV_WR_BIND_MW`). Nothing is sent.
    BindWindow {
        /// The current key of the window.
        window: RKey,
        /// The key that the peer will use; the lowest 8 bits can be chosen freely.
        chosen: RKey,
        /// The memory and rights to bind.
        bind: BindInfo,
    },
    /// Invalidates a local memory window of type 2 (`IBV_WR_LOCAL_INV`). Nothing is sent.
    LocalInvalidate(RKey),
}

impl SendKind {
    /// Returns whether the operation is executed locally, without a packet.
    pub const fn is_local(&self) -> bool {
        matches!(self, Self::BindWindow { .. } | Self::LocalInvalidate(_))
    }

    /// Returns the kind that the completion of this operation carries.
    pub const fn completion_kind(&self) -> CompletionKind {
        match self {
            Self::Send(_) | Self::SendWithInvalidate(_) => CompletionKind::Send,
            Self::Write(..) => CompletionKind::Write,
            Self::Read(_) => CompletionKind::Read,
            Self::CompareSwap { .. } => CompletionKind::CompareSwap,
            Self::FetchAdd { .. } => CompletionKind::FetchAdd,
            Self::BindWindow { .. } => CompletionKind::BindWindow,
            Self::LocalInvalidate(_) => CompletionKind::LocalInvalidate,
        }
    }
}

/// A work request of a send queue (`ibv_send_wr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendRequest {
    /// The program's identifier, which the completion repeats.
    pub id: u64,
    /// The operation.
    pub kind: SendKind,
    /// Local memory; elements of 0 bytes are ignored.
    pub local: [Sge; SGES_MAX],
    /// Whether a successful request generates a completion.
    pub signalled: bool,
    /// Whether to wait until all earlier READs and atomics are complete.
    pub fence: bool,
    /// Whether to request a solicited event at the receiver.
    pub solicited: bool,
    /// The destination of a datagram.
    pub datagram: Option<DatagramDestination>,
}

impl SendRequest {
    /// Returns the total length of the local memory, in bytes.
    pub fn bytes(&self) -> u64 {
        self.local.iter().map(|piece| u64::from(piece.bytes)).sum()
    }
}

/// A work request of a receive queue or shared receive queue (`ibv_recv_wr`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiveRequest {
    /// The program's identifier, which the completion repeats.
    pub id: u64,
    /// The memory that receives the message.
    pub local: [Sge; SGES_MAX],
}
