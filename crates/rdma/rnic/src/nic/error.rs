//! Why a verb fails.

use thiserror::Error;

use crate::verbs::{CompletionQueueError, MemoryError, SharedReceiveQueueError, StateError, TransitionError};

/// A verb that cannot be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NicError {
    /// Keys, regions, windows, protection domains.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The state does not allow it.
    #[error(transparent)]
    State(#[from] StateError),
    /// No such way between states.
    #[error(transparent)]
    Transition(#[from] TransitionError),
    /// Completion queues.
    #[error(transparent)]
    CompletionQueue(#[from] CompletionQueueError),
    /// Shared receive queues.
    #[error(transparent)]
    SharedReceiveQueue(#[from] SharedReceiveQueueError),
    /// There is no such thing.
    #[error("there is no {what} {number}; create one")]
    Unknown {
        /// What was named.
        what: &'static str,
        /// Its number.
        number: u32,
    },
    /// Something still needs it.
    #[error("{what} {number} has {users} queue pairs; destroy them before")]
    Busy {
        /// What was to go.
        what: &'static str,
        /// Its number.
        number: u32,
        /// How many need it.
        users: u32,
    },
    /// A queue is full.
    #[error(
        "queue pair {qp}: its {queue} queue holds its {requests} requests; wait for completions, or make it larger"
    )]
    Full {
        /// Its number.
        qp: u32,
        /// Which queue.
        queue: &'static str,
        /// How many there is room for.
        requests: u32,
    },
    /// A request that this kind of queue pair cannot have.
    #[error("queue pair {qp}: {what}; {remedy}")]
    Request {
        /// Its number.
        qp: u32,
        /// What is wrong.
        what: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// A size that cannot be.
    #[error("{what} cannot be {value}; choose {least} to {most}")]
    Size {
        /// Of what.
        what: &'static str,
        /// What was asked for.
        value: u32,
        /// The least.
        least: u32,
        /// The most.
        most: u32,
    },
}
