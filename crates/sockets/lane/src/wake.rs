//! Wake-up requests: a word that a sleeping endpoint stores for the other endpoint, which takes the request before it
//! rings the doorbell.
//!
//! Only the sleeper writes the word. It numbers its announcements, and stores the number of the current one, or 0 while
//! it is awake. The other endpoint keeps the number of the last announcement that it took in its own state, so that it
//! rings once for each. Threads that announce at the same time get different numbers; one of these announcements
//! replaces the other, as one ring wakes both.

use crate::sleep_fence;
use fabric::{Inbound, Outbound};
use volmem::Region;
use volmem::sync::Ordering;

/// Offset of the target of [`announce_until`] from the word with the number.
const TARGET: usize = size_of::<u64>();

/// Announces sleep. The other endpoint loads `word`; `count` is a word of the sleeper's own state.
pub(crate) fn announce(outbound: &impl Outbound, own: &Region, word: usize, count: usize) {
    outbound.store_u64(word, next_number(own, count), Ordering::Release);
    outbound.flush();
    sleep_fence();
}

/// Announces sleep until the other endpoint's position has reached `target`, so that the sleeper is not woken for less
/// room than it needs.
pub(crate) fn announce_until(outbound: &impl Outbound, own: &Region, word: usize, count: usize, target: u64) {
    outbound.store_u64(word + TARGET, target, Ordering::Relaxed);
    announce(outbound, own, word, count);
}

/// Takes the announcement of [`announce_until`] if `position` has reached its target. Returns whether there was a new
/// one to take. The target may already be that of the next announcement, which then replaces this one.
pub(crate) fn take_reached(inbound: &impl Inbound, own: &Region, word: usize, taken: usize, position: u64) -> bool {
    sleep_fence();
    let number = inbound.load_u64(word, Ordering::Acquire);
    if number == 0 {
        return false;
    }
    let target = inbound.load_u64(word + TARGET, Ordering::Relaxed);
    let is_reached = position.wrapping_sub(target) as i64 >= 0;
    is_reached && take_number(own, taken, number)
}

/// Takes the announcement in `word`. Returns whether there was a new one. `taken` is a word of the own state: the
/// number of the last announcement taken.
#[inline]
pub(crate) fn take(inbound: &impl Inbound, own: &Region, word: usize, taken: usize) -> bool {
    sleep_fence();
    inbound.invalidate(word, size_of::<u64>());
    let number = inbound.load_u64(word, Ordering::Relaxed);
    number != 0 && take_number(own, taken, number)
}

#[inline]
fn take_number(own: &Region, taken: usize, number: u64) -> bool {
    let is_new = own.load_u64(taken, Ordering::Relaxed) != number;
    if is_new {
        own.store_u64(taken, number, Ordering::Relaxed);
    }
    is_new
}

/// Returns the number of the next announcement; never 0, which means awake.
fn next_number(own: &Region, count: usize) -> u64 {
    #[cfg(loom)]
    if crate::mutation::numbers_are_off() {
        return 1;
    }
    own.add_u64(count, 1, Ordering::Relaxed).wrapping_add(1).max(1)
}
