//! What signal handlers leave undone.
//!
//! A handler that closes a descriptor may have interrupted a thread that is inside a set, and would wait for it for
//! ever. It notes the number, and whoever enters the set next does the rest first: nothing is registered under the
//! number in between, also if it is another file's by then.

use crate::process::signals;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Closes that are noted one by one; with more, the whole set is looked through.
const CLOSES_MAX: usize = 32;

const IS_CLOSE: u64 = 1 << 63;
const IS_LAST: u64 = 1 << 33;
const IS_OF_SET: u64 = 1 << 32;

/// A descriptor that was closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Close {
    pub fd: RawFd,
    /// No other descriptor of this process names the same object.
    pub is_last: bool,
    /// It is one of the set itself, not of something registered there.
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

/// Closes that nobody has followed yet.
#[derive(Default)]
pub(super) struct DeferredCloses {
    is_any: AtomicBool,
    has_overflowed: AtomicBool,
    /// Handlers have been put off until nobody is inside.
    has_deferred_handlers: AtomicBool,
    closes: [AtomicU64; CLOSES_MAX],
}

impl DeferredCloses {
    /// Notes a close. Takes no lock and allocates nothing.
    pub fn push(&self, close: Close) {
        let takes = |place: &AtomicU64| {
            place.compare_exchange(0, close.to_word(), Ordering::Release, Ordering::Relaxed).is_ok()
        };
        if !self.closes.iter().any(takes) {
            self.has_overflowed.store(true, Ordering::Release);
        }
        self.is_any.store(true, Ordering::SeqCst);
    }

    /// Notes that handlers have been put off.
    pub fn defer_handlers(&self) {
        self.has_deferred_handlers.store(true, Ordering::SeqCst);
        self.is_any.store(true, Ordering::SeqCst);
    }

    /// Whether handlers of this thread have been put off; answers it once. Those of another thread stay for that.
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

    /// Whether there is something to do.
    #[inline]
    pub fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Relaxed)
    }

    /// Takes what there is. Answers whether there was more, which got no place.
    pub fn take(&self, mut follow: impl FnMut(Close)) -> bool {
        self.is_any.store(false, Ordering::SeqCst);
        if self.has_deferred_handlers.load(Ordering::SeqCst) {
            // Those were put off just before the look, and wait for who leaves.
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
    fn handlers_that_are_put_off_before_the_look_are_let_in_by_who_leaves() {
        let deferred = DeferredCloses::default();
        deferred.defer_handlers();
        assert!(!deferred.take(|_| ()));
        assert!(deferred.is_any());
    }

    #[test]
    fn closes_come_back_as_they_were_and_once() {
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
    fn more_than_there_are_places_for_is_told() {
        let deferred = DeferredCloses::default();
        for fd in 0..=CLOSES_MAX as RawFd {
            deferred.push(Close { fd, is_last: true, is_of_set: false });
        }
        let mut count = 0;
        assert!(deferred.take(|_| count += 1));
        assert_eq!(count, CLOSES_MAX);
    }
}
