//! The states of a queue pair (IBA 10.3.1, figure 124).

use thiserror::Error;

/// A queue pair's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum QpState {
    /// New, or begun again: nothing is posted, nothing moves.
    #[default]
    Reset,
    /// Receives can be posted.
    Init,
    /// Receives are filled.
    ReadyToReceive,
    /// Sends move too.
    ReadyToSend,
    /// No new send begins.
    SendQueueDrain,
    /// A send of an unreliable queue pair failed; receives go on.
    SendQueueError,
    /// Everything posted is completed as flushed.
    Error,
}

/// A call that the state does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("queue pair {qp}: {wanted} is not possible in state {state:?}; {remedy}")]
pub struct StateError {
    /// Its number.
    pub qp: u32,
    /// The state it is in.
    pub state: QpState,
    /// What was asked for.
    pub wanted: &'static str,
    /// What to do.
    pub remedy: &'static str,
}
