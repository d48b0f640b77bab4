//! Raw epoll system calls that do not sleep.

use crate::descriptor::hidden::{HiddenFd, Need};
use crate::process::system;
use libc::epoll_event;
use rustix::event::{EventfdFlags, epoll};
use rustix::io::Errno;
use std::os::fd::RawFd;
use std::sync::OnceLock;

/// Returns the high half of the event data that marks internal descriptors in a program's epoll instance. It is random
/// and sets bits that no address has, so that a collision with data of a program is as likely as a correct guess.
fn magic() -> u64 {
    static MAGIC: OnceLock<u64> = OnceLock::new();
    *MAGIC.get_or_init(|| {
        let mut bytes = [0; 8];
        let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        (u64::from_ne_bytes(bytes) | 0x4000_0000_0000_0001) << 32
    })
}

/// Returns the event data under which the program's epoll instance reports an internal descriptor.
pub(super) fn data_of(internal: InternalFd) -> u64 {
    match internal {
        InternalFd::Inner => magic() | u64::from(u32::MAX),
        InternalFd::Nested(index) => magic() | u64::from(index),
    }
}

/// Returns the internal descriptor that event data stands for; `None` for an event of the program's.
pub(super) fn internal_fd_of(data: u64) -> Option<InternalFd> {
    if data & !u64::from(u32::MAX) != magic() {
        return None;
    }
    Some(if data as u32 == u32::MAX { InternalFd::Inner } else { InternalFd::Nested(data as u32) })
}

/// A descriptor that the library registers in a program's epoll instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InternalFd {
    /// The inner epoll instance.
    Inner,
    /// A nested set, by the index of its registration.
    Nested(u32),
}

/// `epoll_create1(2)`.
pub(super) fn create(flags: i32) -> Result<RawFd, Errno> {
    // SAFETY: the call takes no pointers.
    let fd = unsafe { crate::process::system::call!(libc::SYS_epoll_create1, flags) };
    if fd < 0 { Err(system::error_of(fd)) } else { Ok(fd as RawFd) }
}

/// Creates an epoll instance that the program does not see.
pub(super) fn create_hidden() -> Result<HiddenFd, Errno> {
    HiddenFd::hide(epoll::create(epoll::CreateFlags::CLOEXEC)?, Need::Required)
}

/// Creates a hidden eventfd that wakes sleeping threads.
pub(super) fn create_wake_event() -> Result<HiddenFd, Errno> {
    HiddenFd::hide(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?, Need::Required)
}

/// `epoll_ctl(2)` with the given event.
pub(super) fn control(epfd: RawFd, operation: i32, fd: RawFd, events: u32, data: u64) -> Result<(), Errno> {
    let mut event = epoll_event { events, u64: data };
    // SAFETY: `event` is a local variable that lives until the call returns.
    unsafe { control_with(epfd, operation, fd, &raw mut event) }
}

/// `epoll_ctl(2)` with an event in the caller's memory.
///
/// # Safety
/// `event` is null or points to an event, as the operation requires.
pub(super) unsafe fn control_with(
    epfd: RawFd,
    operation: i32,
    fd: RawFd,
    event: *mut epoll_event,
) -> Result<(), Errno> {
    // SAFETY: `event` is valid for the operation by the contract of this function.
    let result = unsafe { crate::process::system::call!(libc::SYS_epoll_ctl, epfd, operation, fd, event) };
    system::unit_or_error(result)
}

/// `epoll_wait(2)` with a time-out of 0.
///
/// # Safety
/// `events` is writable for `max` events.
pub(super) unsafe fn wait_now(epfd: RawFd, events: *mut epoll_event, max: usize) -> Result<usize, Errno> {
    let none = std::ptr::null::<libc::sigset_t>();
    // SAFETY: `events` is writable for `max` events by the contract of this function; a null mask is allowed.
    let ready = unsafe { crate::process::system::call!(libc::SYS_epoll_pwait, epfd, events, max as i32, 0, none, 8) };
    if ready < 0 { Err(system::error_of(ready)) } else { Ok(ready as usize) }
}
