//! Eventfds that a peer holds too: waiting never lasts longer for it, and ringing hardly ever.

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{CWD, readlinkat};
use rustix::io::{Errno, ReadWriteFlags, preadv2, read, write};
use std::ffi::CString;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

/// A new one, silent.
pub(crate) fn create() -> Result<OwnedFd, Errno> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// What the kernel calls the descriptor. An eventfd has no file to identify it by but the name that all of them share.
pub(crate) fn kernel_name(descriptor: &OwnedFd) -> Result<CString, Errno> {
    readlinkat(CWD, format!("/proc/self/fd/{}", descriptor.as_raw_fd()), Vec::new())
}

/// Whether that name is an eventfd's.
pub(crate) fn is_name_of_eventfd(name: &CString) -> bool {
    name.as_bytes() == b"anon_inode:[eventfd]"
}

/// Whether there was a ring to take. Never blocks, even if a peer has cleared `O_NONBLOCK`, which all holders share.
pub(crate) fn take(descriptor: &OwnedFd) -> bool {
    let mut counter = [0; size_of::<u64>()];
    let current_position = u64::MAX;
    let answer = preadv2(descriptor, &mut [IoSliceMut::new(&mut counter)], current_position, ReadWriteFlags::NOWAIT);
    match answer {
        // A kernel that cannot read eventfds this way: the flag of the descriptor has to do.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => read(descriptor, &mut counter).is_ok(),
        answer => answer.is_ok(),
    }
}

/// Rings, unless it rings already.
pub(crate) fn ring(descriptor: &OwnedFd) {
    let is_full = poll_for(descriptor, PollFlags::OUT, Some(Duration::ZERO)) == Ok(false);
    if is_full {
        return;
    }
    // Interrupted or full: the one is tried again, the other rings already. Nothing else can happen to an open eventfd.
    while write(descriptor, &1_u64.to_ne_bytes()) == Err(Errno::INTR) {}
}

/// Whether one of `events` came within `timeout`.
pub(crate) fn poll_for(descriptor: impl AsFd, events: PollFlags, timeout: Option<Duration>) -> Result<bool, Errno> {
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    let mut polled = [PollFd::new(&descriptor, events)];
    poll(&mut polled, timeout.as_ref()).map(|ready_count| ready_count > 0)
}
