//! The processors that this process may use.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Returns the processors that the calling thread may use, in ascending order.
///
/// # Errors
/// Returns the error of `sched_getaffinity`.
pub(crate) fn usable() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|processor| set.is_set(*processor)).collect())
}

/// Pins the calling thread to a processor.
///
/// # Errors
/// Returns the error of `sched_setaffinity`.
pub(crate) fn pin(processor: usize) -> io::Result<()> {
    let mut only = CpuSet::new();
    only.set(processor);
    Ok(sched_setaffinity(None, &only)?)
}

/// Pins the calling thread to the first or second processor that it may use (`index` 0 or 1), if there are two.
pub(crate) fn pin_to_usable(index: usize) {
    let usable = usable().unwrap_or_default();
    if usable.len() > 1 {
        // If the kernel refuses, the scheduler may move the thread during the measurement.
        let _ = pin(usable[index]);
    }
}
