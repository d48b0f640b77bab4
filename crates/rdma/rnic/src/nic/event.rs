//! Numbers of queues, and asynchronous events (`ibv_async_event`).

use crate::wire::QpNumber;

/// The number of a completion queue, unique within its NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CqNumber(pub u32);

/// The number of a shared receive queue, unique within its NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SrqNumber(pub u32);

/// An event of which the driver notifies the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NicEvent {
    /// An armed completion queue received a completion; it is now disarmed.
    Completion(CqNumber),
    /// A completion queue overflowed, and its queue pairs entered the error state.
    CompletionQueueError(CqNumber),
    /// A queue pair entered the error state because of its peer or a local error.
    QpError(QpNumber),
    /// A draining queue pair has finished all send requests that it had started.
    Drained(QpNumber),
    /// A shared receive queue has fewer requests than its limit.
    SharedReceiveLimit(SrqNumber),
}
