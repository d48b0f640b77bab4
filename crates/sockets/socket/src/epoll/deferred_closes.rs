//! Closes that signal handlers defer.
//!
//! A signal handler that closes a descriptor may have interrupted a thread inside a set, whose lock it can never get.
//! It records the number instead, and the next thread that enters the set removes the registration first. Nothing is
//! registered under the number in between, even if it already refers to another file.

use crate::process::signals;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Closes that are recorded one by one; after more of them, all registrations are checked.
const CLOSES_MAX: usize = 32;

const IS_CLOSE: u64 = 1 << 63;
const IS_LAST: u64 = 1 << 33;
const IS_OF_SET: u64 = 1 << 32;

/// A descriptor that was closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Close {
    pub fd: RawFd,
    /// Whether no other descriptor of this process refers to the object.
    pub is_last: bool,
    /// Whether it is a descriptor of the set itself, not of an object registered in it.
    pub is_of_set: bool,
}

impl Close {
    fn to_word(self) -> u64 {
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        IS_CLOSE | flag(self.is_last, IS_LAST) | flag(self.is_of_set, IS_OF_SET) | u64::from(self.fd as u32)
    }

    fn from_word(word: u64) -> Option<Self> {
        let (is_last, is_of_set) = (word & IS_LAST != 0, word & IS_OF_SET != 0);
        (word & IS_CLOSE != 0).then_some(Self { fd: word as u32 as RawFd, is_last, is_of_set })
    }
}

/// Closes that have not been applied yet.
#[derive(Default)]
pub(super) struct DeferredCloses {
    is_any: AtomicBool,
    has_overflowed: AtomicBool,
    /// Whether signal handlers are deferred until no thread is inside the set.
    has_deferred_handlers: AtomicBool,
    closes: [AtomicU64; CLOSES_MAX],
}

impl DeferredCloses {
    /// Records a close. Takes no lock and allocates nothing.
    pub fn push(&self, close: Close) {
        let takes = |place: &AtomicU64| {
            place.compare_exchange(0, close.to_word(), Ordering::Release, Ordering::Relaxed).is_ok()
        };
        if !self.closes.iter().any(takes) {
            self.has_overflowed.store(true, Ordering::Release);
        }
        self.is_any.store(true, Ordering::SeqCst);
    }

    /// Records that signal handlers are deferred.
    pub fn defer_handlers(&self) {
        self.has_deferred_handlers.store(true, Ordering::SeqCst);
        self.is_any.store(true, Ordering::SeqCst);
    }

    /// Returns, once, whether handlers of this thread are deferred. Handlers of another thread stay recorded for it.
    pub fn take_deferred_handlers(&self) -> bool {
        if !self.has_deferred_handlers.load(Ordering::SeqCst) {
            return false;
        }
        let is_mine = signals::are_handlers_deferred();
        if is_mine {
            self.has_deferred_handlers.store(false, Ordering::SeqCst);
        } else {
            self.is_any.store(true, Ordering::SeqCst);
        }
        is_mine
    }

    /// Returns whether there is anything to apply.
    #[inline]
    pub fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Relaxed)
    }

    /// Removes all recorded closes. Returns whether there were more than could be recorded.
    pub fn take(&self, mut follow: impl FnMut(Close)) -> bool {
        self.is_any.store(false, Ordering::SeqCst);
        if self.has_deferred_handlers.load(Ordering::SeqCst) {
            // Handlers that were deferred just before the store above are delivered by the thread that leaves the set.
            self.is_any.store(true, Ordering::SeqCst);
        }
        self.closes.iter().filter_map(|place| Close::from_word(place.swap(0, Ordering::Acquire))).for_each(&mut follow);
        self.has_overflowed.swap(false, Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handlers_deferred_before_a_take_stay_recorded() {
        let deferred = DeferredCloses::default();
        deferred.defer_handlers();
        assert!(!deferred.take(|_| ()));
        assert!(deferred.is_any());
    }

    #[test]
    fn each_close_is_taken_once_and_unchanged() {
        let deferred = DeferredCloses::default();
        let closes = [(0, true, false), (1_048_575, false, false), (7, false, true)].map(|(fd, is_last, is_of_set)| {
            let close = Close { fd, is_last, is_of_set };
            deferred.push(close);
            close
        });
        let mut taken = Vec::new();
        assert!(deferred.is_any());
        assert!(!deferred.take(|close| taken.push(close)));
        assert_eq!(taken, closes);
        assert!(!deferred.is_any());
        assert!(!deferred.take(|close| panic!("{close:?} again")));
    }

    #[test]
    fn an_overflow_is_reported() {
        let deferred = DeferredCloses::default();
        for fd in 0..=CLOSES_MAX as RawFd {
            deferred.push(Close { fd, is_last: true, is_of_set: false });
        }
        let mut count = 0;
        assert!(deferred.take(|_| count += 1));
        assert_eq!(count, CLOSES_MAX);
    }
}
