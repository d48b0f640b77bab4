//! Why a request of the peer is not executed.

use crate::verbs::CompletionStatus;
use crate::wire::Syndrome;

/// Why content cannot be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlacementError {
    /// Longer than the memory for it.
    Length,
    /// The memory's key, bounds or rights.
    Protection,
}

/// Why a request is not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestError {
    /// No receive request.
    ReceiverNotReady,
    /// The peer's fault, or nobody's.
    Nak(Syndrome),
    /// This side's own: the receive request that it fails with, and what the peer hears.
    FailReceive(CompletionStatus, Syndrome),
}

impl From<PlacementError> for RequestError {
    fn from(misfit: PlacementError) -> Self {
        match misfit {
            PlacementError::Length => Self::FailReceive(CompletionStatus::LocalLength, Syndrome::InvalidRequest),
            PlacementError::Protection => {
                Self::FailReceive(CompletionStatus::LocalProtection, Syndrome::RemoteOperation)
            }
        }
    }
}
