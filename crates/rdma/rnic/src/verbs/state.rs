//! The states of a queue pair (IBA 10.3.1, figure 124).

use thiserror::Error;

use crate::wire::QpNumber;

/// The state of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum QpState {
    /// Reset: nothing can be posted, and no packet is sent or accepted.
    #[default]
    Reset,
    /// Initialized: receive requests can be posted.
    Init,
    /// RTR: messages are received.
    ReadyToReceive,
    /// RTS: messages are received and sent.
    ReadyToSend,
    /// SQD, send queue drain: no new send request is started.
    SendQueueDrain,
    /// SQE, send queue error: a send request of an unreliable queue pair failed; messages are still received.
    SendQueueError,
    /// Error: all posted requests are completed as flushed.
    Error,
}

impl QpState {
    /// All states.
    pub const ALL: [Self; 7] = [
        Self::Reset,
        Self::Init,
        Self::ReadyToReceive,
        Self::ReadyToSend,
        Self::SendQueueDrain,
        Self::SendQueueError,
        Self::Error,
    ];

    /// Returns whether packets are accepted.
    pub fn receives(self) -> bool {
        matches!(self, Self::ReadyToReceive | Self::ReadyToSend | Self::SendQueueDrain | Self::SendQueueError)
    }

    /// Checks that a receive request can be posted: in every state except reset. In the error state it is completed as
    /// flushed.
    ///
    /// # Errors
    /// If the state does not allow it.
    pub fn check_post_receive(self, qp: QpNumber) -> Result<(), StateError> {
        let operation = "posting a receive request";
        match self {
            Self::Reset => Err(StateError { qp: qp.0, state: self, operation, remedy: "modify it to init first" }),
            _ => Ok(()),
        }
    }

    /// Checks that a send request can be posted: from RTS on. While the queue drains, requests wait; in the error
    /// states they are completed as flushed.
    ///
    /// # Errors
    /// If the state does not allow it.
    pub fn check_post_send(self, qp: QpNumber) -> Result<(), StateError> {
        let operation = "posting a send request";
        match self {
            Self::Reset | Self::Init | Self::ReadyToReceive => {
                Err(StateError { qp: qp.0, state: self, operation, remedy: "modify it to ready-to-send first" })
            }
            _ => Ok(()),
        }
    }
}

/// A call that the state of the queue pair does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("queue pair {qp}: {operation} is not possible in state {state:?}; {remedy}")]
pub struct StateError {
    /// The number of the queue pair.
    pub qp: u32,
    /// Its state.
    pub state: QpState,
    /// The attempted operation.
    pub operation: &'static str,
    /// The remedy.
    pub remedy: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_posted_in_the_states_that_the_verbs_allow() {
        let allowed = |check: fn(QpState, QpNumber) -> Result<(), StateError>| {
            QpState::ALL.map(|state| check(state, QpNumber(7)).is_ok())
        };
        assert_eq!(allowed(QpState::check_post_receive), [false, true, true, true, true, true, true]);
        assert_eq!(allowed(QpState::check_post_send), [false, false, false, true, true, true, true]);
        assert_eq!(QpState::ALL.map(QpState::receives), [false, false, true, true, true, true, false]);
        let error = QpState::Init.check_post_send(QpNumber(7)).unwrap_err();
        let text = "queue pair 7: posting a send request is not possible in state Init; \
                    modify it to ready-to-send first";
        assert_eq!(error.to_string(), text);
    }
}
