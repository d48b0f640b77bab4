//! Which process this memory belongs to.

use crate::process::sandbox;
use std::sync::atomic::{AtomicI32, Ordering};

/// The PID of the process that the library was loaded in; 0 before.
static PROCESS: AtomicI32 = AtomicI32::new(0);

/// Records that this memory belongs to the calling process.
pub fn note_process() {
    PROCESS.store(rustix::process::getpid().as_raw_nonzero().get(), Ordering::Relaxed);
}

/// Returns whether the caller is a child of `vfork`, which runs in the memory of its parent: what it does to
/// descriptors must not change the parent's table.
pub fn is_borrowed_memory() -> bool {
    // Under a filter no call may be made that the program does not make, and all connections are the kernel's.
    !sandbox::is_confined() && PROCESS.load(Ordering::Relaxed) != rustix::process::getpid().as_raw_nonzero().get()
}
