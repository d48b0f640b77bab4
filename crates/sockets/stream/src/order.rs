//! The order of what this process does by the kernel and of what it sends by lanes.
//!
//! In the kernel, a receiver learns of events in the order of their causes. A wait that finds a lane ready does not ask
//! the kernel each time. A program that sends on one connection by TCP and then on another one by a lane would find the
//! second request answered first. So a sender tells the receiver of a lane, by a word that changes, that this process
//! has done something by the kernel before, and a wait that finds the lane ready then asks the kernel, too.

use std::sync::atomic::{AtomicU64, Ordering};

/// Grows when a lane is used after the kernel was, and is odd from a use of the kernel to the next one of a lane: a
/// message by a lane loads one word.
static EPOCH: AtomicU64 = AtomicU64::new(0);

/// Notes that this process has connected, sent by TCP, shut down or closed a connection.
#[inline]
pub fn note_use_of_kernel() {
    // A store only if need be, so that threads do not take the line from each other.
    if EPOCH.load(Ordering::Relaxed).is_multiple_of(2) {
        EPOCH.fetch_or(1, Ordering::AcqRel);
    }
}

/// Returns a number that differs from that of an earlier call if this process has used the kernel since.
#[inline]
pub fn epoch() -> u64 {
    let epoch = EPOCH.load(Ordering::Acquire);
    if epoch.is_multiple_of(2) { epoch } else { begin_epoch() }
}

#[cold]
fn begin_epoch() -> u64 {
    let begun = |epoch: u64| epoch.next_multiple_of(2);
    EPOCH.fetch_update(Ordering::AcqRel, Ordering::Acquire, |epoch| Some(begun(epoch))).map_or_else(begun, begun)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_epoch_changes_with_the_first_use_of_a_lane_after_one_of_the_kernel() {
        note_use_of_kernel();
        let after_one = epoch();
        assert_eq!(epoch(), after_one);
        note_use_of_kernel();
        note_use_of_kernel();
        let after_two = epoch();
        assert_ne!(after_two, after_one);
        assert_eq!(epoch(), after_two);
    }
}
