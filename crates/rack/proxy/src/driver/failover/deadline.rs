//! Deadlines on the monotonic clock.

use socket::process::clock;

/// A time at which something has to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Deadline(u64);

impl Deadline {
    pub(super) fn after(ns: u64) -> Self {
        Self(clock::now_ns().saturating_add(ns))
    }

    pub(super) fn has_passed(self) -> bool {
        clock::now_ns() >= self.0
    }
}
