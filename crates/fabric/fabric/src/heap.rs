//! Links between threads of one process.

use crate::memory_link::{CONTROL_BYTES, InitialContents, MemoryLink, Side, is_window_size};
use crate::{Doorbell, WaitOutcome};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use volmem::{CACHE_LINE_BYTES, Region};

/// One endpoint of a link within a process.
pub type HeapLink = MemoryLink<CondvarDoorbell>;

/// Makes both endpoints of a new link with a window of `window_bytes` each way. The link is down.
///
/// # Panics
/// If `window_bytes` is not a positive multiple of the cache line.
pub fn pair(window_bytes: usize) -> (HeapLink, HeapLink) {
    assert!(is_window_size(window_bytes), "window of {window_bytes} bytes: use a multiple of {CACHE_LINE_BYTES}");
    let side = || Side { window: Region::heap(window_bytes), control: Region::heap(CONTROL_BYTES) };
    let (a, b) = (side(), side());
    let (doorbell_a, doorbell_b) = CondvarDoorbell::pair();
    let endpoint = |own: &Side, peer: &Side, doorbell| {
        MemoryLink::attach(own.clone(), peer.clone(), doorbell, InitialContents::Zeroed)
    };
    (endpoint(&a, &b, doorbell_a), endpoint(&b, &a, doorbell_b))
}

/// A doorbell of two condition variables, one for each direction.
#[derive(Debug, Clone)]
pub struct CondvarDoorbell {
    own: Arc<Ring>,
    peer: Arc<Ring>,
}

#[derive(Debug, Default)]
struct Ring {
    is_rung: Mutex<bool>,
    changed: Condvar,
}

impl CondvarDoorbell {
    /// Makes both endpoints of a doorbell.
    pub fn pair() -> (Self, Self) {
        let (a, b) = (Arc::<Ring>::default(), Arc::<Ring>::default());
        (Self { own: a.clone(), peer: b.clone() }, Self { own: b, peer: a })
    }
}

impl Doorbell for CondvarDoorbell {
    fn ring(&self) {
        *self.peer.is_rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.peer.changed.notify_one();
    }

    fn wait(&self, timeout: Option<Duration>) -> WaitOutcome {
        let guard = self.own.is_rung.lock().unwrap_or_else(PoisonError::into_inner);
        let silent = |is_rung: &mut bool| !*is_rung;
        let mut guard = match timeout {
            None => self.own.changed.wait_while(guard, silent).unwrap_or_else(PoisonError::into_inner),
            Some(limit) => {
                self.own.changed.wait_timeout_while(guard, limit, silent).unwrap_or_else(PoisonError::into_inner).0
            }
        };
        if std::mem::take(&mut *guard) { WaitOutcome::Rung } else { WaitOutcome::TimedOut }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
