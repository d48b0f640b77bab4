//! Wake-up requests: a flag that a sleeping endpoint stores in the other endpoint's memory, and that the other endpoint
//! takes before it rings the doorbell.
//!
//! On coherent memory the endpoint that takes a flag clears it. On memory that is not coherent a line may have only one
//! writer: there the sleeper numbers its announcements, and the other endpoint stores the number of the last one taken
//! in its own cursor.

use crate::sleep_fence;
use fabric::{Coherence, Inbound, Outbound};
use volmem::sync::Ordering;

/// Announces sleep. `flag` lies in the peer's window; `count` is a word in the sleeper's own window.
pub(crate) fn announce(outbound: &impl Outbound, inbound: &impl Inbound, flag: usize, count: usize) {
    let number = match outbound.coherence() {
        Coherence::NonCoherent => next_number(inbound, count),
        Coherence::Coherent | Coherence::WriteCombined => 1,
    };
    outbound.store_u64(flag, number, Ordering::Release);
    outbound.flush();
    sleep_fence();
}

/// Announces, on coherent memory, sleep until the other endpoint's position has reached `target`, so that the sleeper
/// is not woken for less room than it needs.
pub(crate) fn announce_until(outbound: &impl Outbound, flag: usize, target: u64) {
    outbound.store_u64(flag, target.wrapping_add(1).max(1), Ordering::Release);
    outbound.flush();
    sleep_fence();
}

/// Takes the announcement of [`announce_until`] in `flag` if `position` has reached its target, or in any case if
/// `always` is set. Returns whether it took one.
pub(crate) fn take_reached(inbound: &impl Inbound, flag: usize, position: u64, always: bool) -> bool {
    sleep_fence();
    let announced = inbound.load_u64(flag, Ordering::Relaxed);
    let is_reached = announced != 0 && (always || position.wrapping_sub(announced.wrapping_sub(1)) as i64 >= 0);
    if is_reached {
        inbound.store_u64(flag, 0, Ordering::Relaxed);
    }
    is_reached
}

/// Returns the number of the next announcement; never 0, which means awake.
fn next_number(inbound: &impl Inbound, count: usize) -> u64 {
    let number = inbound.load_u64(count, Ordering::Relaxed).wrapping_add(1).max(1);
    inbound.store_u64(count, number, Ordering::Relaxed);
    number
}

/// Takes the announcement in `flag`, which the peer stored in this endpoint's window. Returns whether there was a new
/// one. `taken` is a word of this endpoint: the number of the last announcement taken.
#[inline]
pub(crate) fn take(outbound: &impl Outbound, inbound: &impl Inbound, flag: usize, taken: usize) -> bool {
    sleep_fence();
    inbound.invalidate(flag, size_of::<u64>());
    let number = inbound.load_u64(flag, Ordering::Relaxed);
    if number == 0 {
        return false;
    }
    if outbound.coherence() != Coherence::NonCoherent {
        inbound.store_u64(flag, 0, Ordering::Relaxed);
        return true;
    }
    let is_new = inbound.load_u64(taken, Ordering::Relaxed) != number;
    if is_new {
        inbound.store_u64(taken, number, Ordering::Relaxed);
    }
    is_new
}
