//! A doorbell where nothing can interrupt the peer: a count in memory that the sleeper looks at.

use crate::{Doorbell, Memory, WaitOutcome};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::{Duration, Instant};
use volmem::sync::Ordering;

/// Looks that only give the processor away, before the first sleep.
const YIELDS_MAX: u32 = 50;
const SLEEP_MIN: Duration = Duration::from_micros(20);
/// How late a ring is noticed at most, by a sleeper of long standing.
const SLEEP_MAX: Duration = Duration::from_millis(1);

/// A doorbell of two counts in memory `M`, each in a line of its own. A sleeper wakes up to look, less and less often,
/// and a thousand times a second at least.
#[derive(Debug, Clone)]
pub struct PolledDoorbell<M> {
    own: M,
    peer: M,
    /// What the own count was when a ring was taken last.
    taken: Arc<AtomicU64>,
    rung: Arc<AtomicU64>,
}

impl<M: Memory> PolledDoorbell<M> {
    /// The end whose count is `own`, with the rings of earlier holders forgotten.
    pub(crate) fn attach(own: M, peer: M) -> Self {
        let count = |memory: &M| Arc::new(AtomicU64::new(fresh(memory)));
        let (taken, rung) = (count(&own), count(&peer));
        Self { own, peer, taken, rung }
    }

    fn take(&self) -> bool {
        let count = fresh(&self.own);
        self.taken.swap(count, Ordering::AcqRel) != count
    }
}

fn fresh(count: &impl Memory) -> u64 {
    count.invalidate_lines(0, size_of::<u64>());
    count.load_u64(0, Ordering::Acquire)
}

impl<M: Memory> Doorbell for PolledDoorbell<M> {
    fn ring(&self) {
        let count = self.rung.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
        self.peer.store_u64(0, count, Ordering::Release);
        self.peer.write_back(0, size_of::<u64>());
        self.peer.barrier();
    }

    fn wait(&self, timeout: Option<Duration>) -> WaitOutcome {
        // A timeout beyond what the clock can count is none.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut yields = 0;
        let mut sleep = SLEEP_MIN;
        loop {
            if self.take() {
                return WaitOutcome::Rung;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return WaitOutcome::TimedOut;
            }
            if yields < YIELDS_MAX {
                yields += 1;
                thread::yield_now();
            } else {
                thread::sleep(left.map_or(sleep, |left| left.min(sleep)));
                sleep = (sleep * 2).min(SLEEP_MAX);
            }
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
