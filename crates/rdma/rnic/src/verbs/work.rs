//! Work requests.

use super::address::DatagramDestination;
use super::completion::CompletionKind;
use super::memory::BindInfo;
use super::sge::{SGES_MAX, Sge};
use crate::wire::RKey;

/// Bytes of a message, at most (IBA 9.7.7: 2^31).
pub const MESSAGE_BYTES_MAX: u32 = 1 << 31;

/// A piece of the other side's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteBuffer {
    /// Virtual address there.
    pub address: u64,
    /// The region's or window's key.
    pub key: RKey,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendKind {
    /// Into the other side's next receive request, with 32 bits for its completion where given.
    Send(Option<u32>),
    /// The same; the other side's NIC invalidates this key of its own.
    SendWithInvalidate(RKey),
    /// Into the other side's memory; with 32 bits it takes a receive request there, and completes it.
    Write(RemoteBuffer, Option<u32>),
    /// Out of the other side's memory.
    Read(RemoteBuffer),
    /// Swaps 8 bytes there if they are `compare`; the value before comes into the local piece.
    CompareSwap {
        /// Where.
        remote: RemoteBuffer,
        /// What must be there.
        compare: u64,
        /// What is stored then.
        swap: u64,
    },
    /// Adds to 8 bytes there; the value before comes into the local piece.
    FetchAdd {
        /// Where.
        remote: RemoteBuffer,
        /// What is added, mod 2^64.
        add: u64,
    },
    /// Lets a window of type 2 of this side show something (`IBV_WR_BIND_MW`). Nothing is sent.
    BindWindow {
        /// Which window, by the key that it has.
        window: RKey,
        /// The key by which the peer will use it; its lowest 8 bits are free to choose.
        chosen: RKey,
        /// What it shows.
        bind: BindInfo,
    },
    /// Ends what a window of type 2 of this side shows (`IBV_WR_LOCAL_INV`). Nothing is sent.
    LocalInvalidate(RKey),
}

impl SendKind {
    /// Whether this side's NIC does it alone.
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

/// A work request of the send queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendRequest {
    /// The program's own number, given back in the completion.
    pub id: u64,
    /// What is to be done.
    pub kind: SendKind,
    /// Local memory; pieces of 0 bytes are none.
    pub local: [Sge; SGES_MAX],
    /// Whether a completion is wanted when all goes well.
    pub signalled: bool,
    /// Whether to wait for all READs and atomics before.
    pub fence: bool,
    /// Whether the other side's program is to be woken.
    pub solicited: bool,
    /// Of datagrams.
    pub datagram: Option<DatagramDestination>,
}

impl SendRequest {
    /// Bytes of its local memory.
    pub fn bytes(&self) -> u64 {
        self.local.iter().map(|piece| u64::from(piece.bytes)).sum()
    }
}

/// A work request of a receive queue or a shared one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiveRequest {
    /// The program's own number, given back in the completion.
    pub id: u64,
    /// Where a message goes.
    pub local: [Sge; SGES_MAX],
}
