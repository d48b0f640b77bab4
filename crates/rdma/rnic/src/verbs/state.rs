//! The states of a queue pair (IBA 10.3.1, figure 124).

use thiserror::Error;

use crate::wire::QpNumber;

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

impl QpState {
    /// All there are.
    pub const ALL: [Self; 7] = [
        Self::Reset,
        Self::Init,
        Self::ReadyToReceive,
        Self::ReadyToSend,
        Self::SendQueueDrain,
        Self::SendQueueError,
        Self::Error,
    ];

    /// Whether packets that come are looked at.
    pub fn receives(self) -> bool {
        matches!(self, Self::ReadyToReceive | Self::ReadyToSend | Self::SendQueueDrain | Self::SendQueueError)
    }

    /// Whether receive requests can be posted: from init on. In the error state they are completed as flushed.
    ///
    /// # Errors
    /// When they cannot.
    pub fn check_post_receive(self, qp: QpNumber) -> Result<(), StateError> {
        let wanted = "posting a receive request";
        match self {
            Self::Reset => Err(StateError { qp: qp.0, state: self, wanted, remedy: "modify it to init before" }),
            _ => Ok(()),
        }
    }

    /// Whether send requests can be posted: from ready-to-send on. While drained they wait, and in error states they
    /// are completed as flushed.
    ///
    /// # Errors
    /// When they cannot.
    pub fn check_post_send(self, qp: QpNumber) -> Result<(), StateError> {
        let wanted = "posting a send request";
        match self {
            Self::Reset | Self::Init | Self::ReadyToReceive => {
                Err(StateError { qp: qp.0, state: self, wanted, remedy: "modify it to ready-to-send before" })
            }
            _ => Ok(()),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_posted_from_the_states_that_verbs_allow() {
        let allowed = |check: fn(QpState, QpNumber) -> Result<(), StateError>| {
            QpState::ALL.map(|state| check(state, QpNumber(7)).is_ok())
        };
        assert_eq!(allowed(QpState::check_post_receive), [false, true, true, true, true, true, true]);
        assert_eq!(allowed(QpState::check_post_send), [false, false, false, true, true, true, true]);
        assert_eq!(QpState::ALL.map(QpState::receives), [false, false, true, true, true, true, false]);
        let error = QpState::Init.check_post_send(QpNumber(7)).unwrap_err();
        let text = "queue pair 7: posting a send request is not possible in state Init; \
                    modify it to ready-to-send before";
        assert_eq!(error.to_string(), text);
    }
}
