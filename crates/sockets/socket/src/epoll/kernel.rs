//! The kernel's part: raw calls that do not sleep.

use crate::descriptor::hidden::{HiddenFd, Need};
use crate::process::system;
use libc::epoll_event;
use rustix::event::{EventfdFlags, epoll};
use rustix::io::Errno;
use std::os::fd::RawFd;
use std::sync::OnceLock;

/// The high half of the data of what is ours in a program's epoll instance. Bits that no address has; a program that
/// uses the same ones is as likely as one that guesses them.
fn magic() -> u64 {
    static MAGIC: OnceLock<u64> = OnceLock::new();
    *MAGIC.get_or_init(|| {
        let mut bytes = [0; 8];
        let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        (u64::from_ne_bytes(bytes) | 0x4000_0000_0000_0001) << 32
    })
}

/// The data under which the program's epoll instance reports the inner one, or a nested set.
pub(super) fn data_of(internal: InternalFd) -> u64 {
    match internal {
        InternalFd::Inner => magic() | u64::from(u32::MAX),
        InternalFd::Nested(index) => magic() | u64::from(index),
    }
}

/// What an event of the program's epoll instance means to us; `None` if it is the program's.
pub(super) fn internal_fd_of(data: u64) -> Option<InternalFd> {
    if data & !u64::from(u32::MAX) != magic() {
        return None;
    }
    Some(if data as u32 == u32::MAX { InternalFd::Inner } else { InternalFd::Nested(data as u32) })
}

/// What is ours in a program's epoll instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InternalFd {
    /// The epoll instance that the program does not see.
    Inner,
    /// A nested set, by the index of its registration.
    Nested(u32),
}

/// `epoll_create1(2)`.
pub(super) fn create(flags: i32) -> Result<RawFd, Errno> {
    // SAFETY: no pointers.
    let fd = unsafe { crate::process::system::call!(libc::SYS_epoll_create1, flags) };
    if fd < 0 { Err(system::error_of(fd)) } else { Ok(fd as RawFd) }
}

/// An epoll instance that the program does not see.
pub(super) fn create_hidden() -> Result<HiddenFd, Errno> {
    HiddenFd::hide(epoll::create(epoll::CreateFlags::CLOEXEC)?, Need::Required)
}

/// A counter that wakes sleepers, which the program does not see.
pub(super) fn create_wake_event() -> Result<HiddenFd, Errno> {
    HiddenFd::hide(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?, Need::Required)
}

/// `epoll_ctl(2)` with an event of our own.
pub(super) fn control(epfd: RawFd, operation: i32, fd: RawFd, events: u32, data: u64) -> Result<(), Errno> {
    let mut event = epoll_event { events, u64: data };
    // SAFETY: a readable event.
    unsafe { control_with(epfd, operation, fd, &raw mut event) }
}

/// `epoll_ctl(2)`, as the program calls it.
///
/// # Safety
/// `event` is what the system call takes.
pub(super) unsafe fn control_with(
    epfd: RawFd,
    operation: i32,
    fd: RawFd,
    event: *mut epoll_event,
) -> Result<(), Errno> {
    // SAFETY: the caller's.
    let result = unsafe { crate::process::system::call!(libc::SYS_epoll_ctl, epfd, operation, fd, event) };
    if result < 0 { Err(system::error_of(result)) } else { Ok(()) }
}

/// `epoll_wait(2)` without waiting.
///
/// # Safety
/// `events` is writable for `max` events.
pub(super) unsafe fn wait_now(epfd: RawFd, events: *mut epoll_event, max: usize) -> Result<usize, Errno> {
    let none = std::ptr::null::<libc::sigset_t>();
    // SAFETY: the caller's.
    let ready = unsafe { crate::process::system::call!(libc::SYS_epoll_pwait, epfd, events, max as i32, 0, none, 8) };
    if ready < 0 { Err(system::error_of(ready)) } else { Ok(ready as usize) }
}
