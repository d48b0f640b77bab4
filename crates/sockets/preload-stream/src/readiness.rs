//! `poll` and `select`. A call without a connection that has met its other end is the kernel's.

use crate::errno::count_or_errno;
use crate::real;
use libc::{nfds_t, pollfd, sigset_t, timespec};
use socket::process::memory;
use std::ffi::c_int;
use stream::poll;

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

aliases! {
    __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, _room: usize) -> c_int = poll(fds, count, timeout);
    __ppoll_chk(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, _room: usize) -> c_int
        = ppoll(fds, count, timeout, mask);
}
