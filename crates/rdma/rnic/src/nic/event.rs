//! Numbers of queues, and asynchronous events.

use crate::wire::QpNumber;

/// A completion queue's number at its NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CqNumber(pub u32);

/// A shared receive queue's number at its NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SrqNumber(pub u32);

/// What a program may want to know without asking for it each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NicEvent {
    /// A completion queue that was armed has news; it is armed no more.
    Completion(CqNumber),
    /// A completion queue overflowed, and its queue pairs went to the error state.
    CompletionQueueError(CqNumber),
    /// A queue pair went to the error state by what its peer did or by a local fault.
    QpError(QpNumber),
    /// What a queue pair had begun before it was drained is done.
    Drained(QpNumber),
    /// A shared receive queue has fewer requests than its limit.
    SharedReceiveLimit(SrqNumber),
}
