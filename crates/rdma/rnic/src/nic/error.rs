//! Errors of verbs.

use thiserror::Error;

use crate::verbs::{CompletionQueueError, MemoryError, SharedReceiveQueueError, StateError, TransitionError};

/// Why a verb fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NicError {
    /// An error of a key, region, window or protection domain.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The state of the queue pair does not allow the call.
    #[error(transparent)]
    State(#[from] StateError),
    /// The state transition is not allowed.
    #[error(transparent)]
    Transition(#[from] TransitionError),
    /// An error of a completion queue.
    #[error(transparent)]
    CompletionQueue(#[from] CompletionQueueError),
    /// An error of a shared receive queue.
    #[error(transparent)]
    SharedReceiveQueue(#[from] SharedReceiveQueueError),
    /// The object does not exist.
    #[error("there is no {what} {number}; create one")]
    Unknown {
        /// The kind of object.
        what: &'static str,
        /// Its number.
        number: u32,
    },
    /// The object is in use.
    #[error("{what} {number} has {users} queue pairs; destroy them first")]
    Busy {
        /// The kind of object.
        what: &'static str,
        /// Its number.
        number: u32,
        /// Number of queue pairs that use it.
        users: u32,
    },
    /// A work queue is full.
    #[error(
        "queue pair {qp}: its {queue} queue is full with {requests} requests; wait for completions or make it larger"
    )]
    Full {
        /// The number of the queue pair.
        qp: u32,
        /// Which of its queues.
        queue: &'static str,
        /// The capacity of the queue.
        requests: u32,
    },
    /// The queue pair does not support the request.
    #[error("queue pair {qp}: {what}; {remedy}")]
    Request {
        /// The number of the queue pair.
        qp: u32,
        /// The reason.
        what: &'static str,
        /// The remedy.
        remedy: &'static str,
    },
    /// A size out of range.
    #[error("{what} cannot be {value}; choose {min} to {max}")]
    Size {
        /// The name of the size.
        what: &'static str,
        /// The given value.
        value: u32,
        /// The minimum.
        min: u32,
        /// The maximum.
        max: u32,
    },
}
