//! Eventfds that a peer holds too. A peer cannot make a wait longer, and can delay a ring only in a rare race.

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{CWD, readlinkat};
use rustix::io::{Errno, ReadWriteFlags, preadv2, read, write};
use std::ffi::CString;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

/// Creates an eventfd with a counter of zero.
pub(crate) fn create() -> Result<OwnedFd, Errno> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// The kernel's name of a descriptor. An eventfd has no other identification than the name that all eventfds share.
pub(crate) fn kernel_name(descriptor: &OwnedFd) -> Result<CString, Errno> {
    readlinkat(CWD, format!("/proc/self/fd/{}", descriptor.as_raw_fd()), Vec::new())
}

/// Whether the name is that of an eventfd.
pub(crate) fn is_name_of_eventfd(name: &CString) -> bool {
    name.as_bytes() == b"anon_inode:[eventfd]"
}

/// Takes a ring. Returns whether there was one. Never blocks, even if a peer has cleared `O_NONBLOCK`, which all
/// holders share.
pub(crate) fn take(descriptor: &OwnedFd) -> bool {
    let mut counter = [0; size_of::<u64>()];
    let current_position = u64::MAX;
    let answer = preadv2(descriptor, &mut [IoSliceMut::new(&mut counter)], current_position, ReadWriteFlags::NOWAIT);
    match answer {
        // Kernels that do not support `RWF_NOWAIT` on eventfds: the descriptor's `O_NONBLOCK` has to do.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => read(descriptor, &mut counter).is_ok(),
        answer => answer.is_ok(),
    }
}

/// Rings, unless the counter is full, which means that a ring is pending.
pub(crate) fn ring(descriptor: &OwnedFd) {
    let is_full = poll_for(descriptor, PollFlags::OUT, Some(Duration::ZERO)) == Ok(false);
    if is_full {
        return;
    }
    // Interrupted: tried again. Full: a ring is pending. An open eventfd has no other errors.
    while write(descriptor, &1_u64.to_ne_bytes()) == Err(Errno::INTR) {}
}

/// Polls for `events`. Returns whether one of them arrived within `timeout`.
pub(crate) fn poll_for(descriptor: impl AsFd, events: PollFlags, timeout: Option<Duration>) -> Result<bool, Errno> {
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    let mut polled = [PollFd::new(&descriptor, events)];
    poll(&mut polled, timeout.as_ref()).map(|ready_count| ready_count > 0)
}
