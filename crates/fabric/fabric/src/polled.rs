//! A doorbell without interrupts: a counter in memory that the waiter polls.

use crate::wait::{Backoff, Deadline};
use crate::{Doorbell, Memory, WaitOutcome};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use volmem::sync::Ordering;

/// Yields of a waiter before its first sleep.
const YIELDS: u32 = 50;
/// Longest sleep of a waiter: the latest that it notices a ring.
const SLEEP_MAX: Duration = Duration::from_millis(1);

/// A doorbell of two counters in memory `M`, each in a line of its own. A waiter polls its counter with increasing
/// pauses, at least a thousand times a second.
#[derive(Debug, Clone)]
pub struct PolledDoorbell<M> {
    own: M,
    peer: M,
    /// Value of the own counter when a ring was last taken.
    taken: Arc<AtomicU64>,
    rung: Arc<AtomicU64>,
}

impl<M: Memory> PolledDoorbell<M> {
    /// The endpoint whose counter is `own`. Takes all rings so far: they were meant for earlier holders.
    pub(crate) fn attach(own: M, peer: M) -> Self {
        let count = |memory: &M| Arc::new(AtomicU64::new(load_fresh(memory)));
        let (taken, rung) = (count(&own), count(&peer));
        Self { own, peer, taken, rung }
    }

    fn take(&self) -> bool {
        let count = load_fresh(&self.own);
        self.taken.swap(count, Ordering::AcqRel) != count
    }
}

/// Loads a counter past this node's cache.
fn load_fresh(counter: &impl Memory) -> u64 {
    counter.invalidate_lines(0, size_of::<u64>());
    counter.load_u64(0, Ordering::Acquire)
}

impl<M: Memory> Doorbell for PolledDoorbell<M> {
    fn ring(&self) {
        let count = self.rung.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
        self.peer.store_u64(0, count, Ordering::Release);
        self.peer.write_back(0, size_of::<u64>());
        self.peer.barrier();
    }

    fn wait(&self, timeout: Option<Duration>) -> WaitOutcome {
        let (deadline, mut backoff) = (Deadline::after(timeout), Backoff::new(YIELDS, SLEEP_MAX));
        loop {
            if self.take() {
                return WaitOutcome::Rung;
            }
            let remaining = deadline.remaining();
            if remaining == Some(Duration::ZERO) {
                return WaitOutcome::TimedOut;
            }
            backoff.pause(remaining);
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
