//! "I sleep, ring me": a flag that the sleeper stores in the other end's memory, and the other end takes.
//!
//! Whoever takes a flag clears it, where memory is coherent. Where it is not, a line may have one writer only: there
//! the sleeper numbers its announcements, and the other end remembers in its own cursor which of them it has taken.

use crate::sleep_fence;
use fabric::{Coherence, Inbound, Outbound};
use volmem::sync::Ordering;

/// Announces sleep: `flag` lies in the peer's window, `count` is the sleeper's own word.
pub(crate) fn announce(outbound: &impl Outbound, inbound: &impl Inbound, flag: usize, count: usize) {
    let number = match outbound.coherence() {
        Coherence::NonCoherent => next_number(inbound, count),
        Coherence::Coherent | Coherence::WriteCombined => 1,
    };
    outbound.store_u64(flag, number, Ordering::Release);
    outbound.flush();
    sleep_fence();
}

/// Announces, on coherent memory, sleep until the other end's position has reached `target`: so the sleeper is not
/// woken for less than it needs.
pub(crate) fn announce_until(outbound: &impl Outbound, flag: usize, target: u64) {
    outbound.store_u64(flag, target.wrapping_add(1).max(1), Ordering::Release);
    outbound.flush();
    sleep_fence();
}

/// Takes the announcement of [`announce_until`] in `flag` if `position` has reached its target, or `always`; says
/// whether it did.
pub(crate) fn take_reached(inbound: &impl Inbound, flag: usize, position: u64, always: bool) -> bool {
    sleep_fence();
    let announced = inbound.load_u64(flag, Ordering::Relaxed);
    let is_reached = announced != 0 && (always || position.wrapping_sub(announced.wrapping_sub(1)) as i64 >= 0);
    if is_reached {
        inbound.store_u64(flag, 0, Ordering::Relaxed);
    }
    is_reached
}

/// Never 0, which says "awake".
fn next_number(inbound: &impl Inbound, count: usize) -> u64 {
    let number = inbound.load_u64(count, Ordering::Relaxed).wrapping_add(1).max(1);
    inbound.store_u64(count, number, Ordering::Relaxed);
    number
}

/// Takes the announcement in `flag`, which the peer stored in the own window; says whether there was one. `taken` is
/// this end's own word.
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
