//! Why a request of the peer is not executed.

use crate::verbs::CompletionStatus;
use crate::wire::Syndrome;

/// Why a payload cannot be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlacementError {
    /// It is longer than the memory for it.
    Length,
    /// The memory's key, bounds or access rights are wrong.
    Protection,
}

/// Why a request of the peer is not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestError {
    /// No receive request is posted.
    ReceiverNotReady,
    /// A NAK to the peer; no local request fails.
    Nak(Syndrome),
    /// A local error: the status with which a receive request fails, and the NAK to the peer.
    FailReceive(CompletionStatus, Syndrome),
}

impl From<PlacementError> for RequestError {
    fn from(error: PlacementError) -> Self {
        match error {
            PlacementError::Length => Self::FailReceive(CompletionStatus::LocalLength, Syndrome::InvalidRequest),
            PlacementError::Protection => {
                Self::FailReceive(CompletionStatus::LocalProtection, Syndrome::RemoteOperation)
            }
        }
    }
}
