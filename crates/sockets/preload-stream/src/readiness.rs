//! `poll` and `epoll`. A call without a connection that has met its other end is the kernel's.

use crate::errno::{count_or_errno, fail, keeping_errno, zero_or_errno};
use crate::real;
use libc::{epoll_event, nfds_t, pollfd, sigset_t, timespec};
use rustix::io::Errno;
use socket::process::memory;
use std::ffi::c_int;
use stream::{epoll, poll};

/// Returns the program's entries if one of them is a connection that has met its other end.
unsafe fn entries_with_lanes<'a>(fds: *mut pollfd, count: nfds_t) -> Option<&'a mut [pollfd]> {
    if count == 0 || !memory::are_writable(fds, count as usize) {
        return None;
    }
    // SAFETY: the C program's array, writable as was just checked.
    let entries = unsafe { std::slice::from_raw_parts_mut(fds, count as usize) };
    if poll::concerns(entries) { Some(entries) } else { None }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn poll(fds: *mut pollfd, count: nfds_t, timeout_ms: c_int) -> c_int {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let Some(entries) = (unsafe { entries_with_lanes(fds, count) }) else {
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        return unsafe { real::poll(fds, count, timeout_ms) };
    };
    let timeout_ns = u64::try_from(timeout_ms).ok().map(|ms| ms * 1_000_000);
    // SAFETY: the mask is null.
    count_or_errno(unsafe { poll::poll(entries, timeout_ns, std::ptr::null()) }) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    let is_valid = timeout.is_null() || memory::is_readable(timeout);
    // SAFETY: null, or readable as was just checked.
    let time = if is_valid { unsafe { timeout.as_ref() } } else { None };
    let is_time = time.is_none_or(|time| time.tv_sec >= 0 && (0..1_000_000_000).contains(&time.tv_nsec));
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let entries = if is_valid && is_time { unsafe { entries_with_lanes(fds, count) } } else { None };
    let Some(entries) = entries else {
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        return unsafe { real::ppoll(fds, count, timeout, mask) };
    };
    let timeout_ns = time.map(|time| time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64);
    // SAFETY: the C program's mask, valid as its call requires (manual page).
    count_or_errno(unsafe { poll::poll(entries, timeout_ns, mask) }) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_ctl(epfd: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    // SAFETY: readable, as is checked first.
    let known = if memory::is_readable(event) { Some(unsafe { event.read_unaligned() }) } else { None };
    let in_kernel = || {
        // SAFETY: the C program's arguments, passed on to the kernel unchanged; its call requires them to be valid.
        let result = unsafe { real::epoll_ctl(epfd, operation, fd, event) };
        if result == 0 { Ok(()) } else { Err(socket::process::system::errno()) }
    };
    zero_or_errno(keeping_errno(|| epoll::control(epfd, operation, fd, known, in_kernel)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait(
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout_ms: c_int,
    mask: *const sigset_t,
) -> c_int {
    let timeout_ns = u64::try_from(timeout_ms).ok().map(|ms| ms * 1_000_000);
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { wait(epfd, events, max, timeout_ns, mask) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_wait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout_ms: c_int) -> c_int {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { epoll_pwait(epfd, events, max, timeout_ms, std::ptr::null()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait2(
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    if !timeout.is_null() && !memory::is_readable(timeout) {
        return fail(Errno::FAULT);
    }
    // SAFETY: null, or readable as was just checked.
    let time = unsafe { timeout.as_ref() };
    if time.is_some_and(|time| time.tv_sec < 0 || !(0..1_000_000_000).contains(&time.tv_nsec)) {
        return fail(Errno::INVAL);
    }
    let timeout_ns = time.map(|time| (time.tv_sec as u64).saturating_mul(1_000_000_000) + time.tv_nsec as u64);
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { wait(epfd, events, max, timeout_ns, mask) }
}

unsafe fn wait(
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout_ns: Option<u64>,
    mask: *const sigset_t,
) -> c_int {
    let is_valid = max > 0 && memory::are_writable(events.cast::<u8>(), max as usize * size_of::<epoll_event>());
    if !is_valid {
        let timeout_ms = timeout_ns.map_or(-1, |ns| (ns / 1_000_000) as c_int);
        // SAFETY: the kernel refuses the call, or the array.
        return unsafe { real::epoll_pwait(epfd, events, max, timeout_ms, mask) };
    }
    // SAFETY: the array was just checked; the mask is valid as the C program's call requires (manual page).
    count_or_errno(unsafe { epoll::wait(epfd, events, max as usize, timeout_ns, mask) }) as c_int
}

aliases! {
    __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, _room: usize) -> c_int = poll(fds, count, timeout);
    __ppoll_chk(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, _room: usize) -> c_int
        = ppoll(fds, count, timeout, mask);
}
