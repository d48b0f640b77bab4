//! The order of what this process does by the kernel and of what it sends by lanes.
//!
//! In the kernel, a receiver learns of events in the order of their causes. A wait that finds a lane ready does not ask
//! the kernel each time. A program that sends on one connection by TCP and then on another one by a lane would find the
//! second request answered first. So a sender tells the receiver of a lane, by a word that changes, that this process
//! has done something by the kernel before, and a wait that finds the lane ready then asks the kernel, too.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Something was done by the kernel since the epoch began.
static HAS_USED_KERNEL: AtomicBool = AtomicBool::new(false);
/// Grows when a lane is used after the kernel was.
static EPOCH: AtomicU64 = AtomicU64::new(0);

/// Notes that this process has connected, sent by TCP, shut down or closed a connection.
#[inline]
pub fn note_use_of_kernel() {
    // A store only if need be, so that threads do not take the line from each other.
    if !HAS_USED_KERNEL.load(Ordering::Relaxed) {
        HAS_USED_KERNEL.store(true, Ordering::Release);
    }
}

/// Returns a number that differs from that of an earlier call if this process has used the kernel since.
#[inline]
pub fn epoch() -> u64 {
    if HAS_USED_KERNEL.load(Ordering::Relaxed) && HAS_USED_KERNEL.swap(false, Ordering::AcqRel) {
        EPOCH.fetch_add(1, Ordering::AcqRel);
    }
    EPOCH.load(Ordering::Acquire)
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
