//! Links between threads of one process.

use crate::memory_link::{CONTROL_BYTES, InitialContents, MemoryLink, Side, is_window_size};
use crate::{Doorbell, WaitOutcome};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use volmem::{CACHE_LINE_BYTES, Region};

/// One end of a link within a process.
pub type HeapLink = MemoryLink<CondvarDoorbell>;

/// Both ends of a new link with a window of `window_bytes` each way; it is down.
///
/// # Panics
/// If a window would not be whole cache lines, at least one.
pub fn pair(window_bytes: usize) -> (HeapLink, HeapLink) {
    assert!(is_window_size(window_bytes), "window of {window_bytes} bytes: use a multiple of {CACHE_LINE_BYTES}");
    let side = || Side { window: Region::heap(window_bytes), control: Region::heap(CONTROL_BYTES) };
    let (a, b) = (side(), side());
    let (bell_a, bell_b) = CondvarDoorbell::pair();
    let end =
        |own: &Side, peer: &Side, bell| MemoryLink::attach(own.clone(), peer.clone(), bell, InitialContents::Zeroed);
    (end(&a, &b, bell_a), end(&b, &a, bell_b))
}

/// A doorbell of two condition variables, one a direction.
#[derive(Debug, Clone)]
pub struct CondvarDoorbell {
    own: Arc<Bell>,
    peer: Arc<Bell>,
}

#[derive(Debug, Default)]
struct Bell {
    is_rung: Mutex<bool>,
    changed: Condvar,
}

impl CondvarDoorbell {
    /// Both ends of a doorbell.
    pub fn pair() -> (Self, Self) {
        let (a, b) = (Arc::<Bell>::default(), Arc::<Bell>::default());
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
