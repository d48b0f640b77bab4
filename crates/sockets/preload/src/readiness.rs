//! The functions of `poll`, `select` and `epoll`.

use crate::errno::{fail, preserving_errno, zero_or_errno};
use libc::{epoll_event, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};
use rustix::io::Errno;
use socket::process::clock::now_ns;
use socket::process::memory;
use socket::{epoll, poll_select};
use std::ffi::c_int;

fn int_or_errno(result: Result<usize, Errno>) -> c_int {
    crate::errno::count_or_errno(result) as c_int
}

/// Converts a C time-out in milliseconds to nanoseconds; a negative one waits without limit.
fn from_milliseconds(timeout_ms: c_int) -> Option<u64> {
    u64::try_from(timeout_ms).ok().map(|timeout_ms| timeout_ms * 1_000_000)
}

/// Converts a C time-out to nanoseconds; null waits without limit.
unsafe fn from_timespec(timeout: *const timespec) -> Result<Option<u64>, Errno> {
    if timeout.is_null() {
        return Ok(None);
    }
    memory::check_readable(timeout)?;
    // SAFETY: not null, and readable as was just checked.
    let timeout = unsafe { &*timeout };
    if timeout.tv_sec < 0 || !(0..1_000_000_000).contains(&timeout.tv_nsec) {
        return Err(Errno::INVAL);
    }
    Ok(Some((timeout.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(timeout.tv_nsec as u64)))
}

fn is_mask_readable(mask: *const sigset_t) -> bool {
    mask.is_null() || memory::is_readable(mask.cast::<u64>())
}

unsafe fn poll_slice(
    fds: *mut pollfd,
    count: nfds_t,
    timeout_ns: Result<Option<u64>, Errno>,
    mask: *const sigset_t,
    is_ppoll: bool,
) -> c_int {
    if !poll_select::allows_entries(count) {
        return fail(Errno::INVAL);
    }
    let entries: &mut [pollfd] = if count == 0 {
        &mut []
    } else if !memory::are_writable(fds, count as usize) || !is_mask_readable(mask) {
        return fail(Errno::FAULT);
    } else {
        // SAFETY: the C program's array, valid as its call requires (manual page).
        unsafe { std::slice::from_raw_parts_mut(fds, count as usize) }
    };
    int_or_errno(timeout_ns.and_then(|timeout_ns| {
        if !socket::process::sandbox::is_confined() {
            // SAFETY: the C program's mask, valid as its call requires (manual page).
            return unsafe { poll_select::poll(entries, timeout_ns, mask) };
        }
        poll_select::poll_entries_confined(entries, timeout_ns, |entries, timeout_ns| {
            // SAFETY: the C program's mask, valid as its call requires (manual page).
            unsafe { poll_select::poll_confined(entries, timeout_ns, mask, is_ppoll) }
        })
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn poll(fds: *mut pollfd, count: nfds_t, timeout_ms: c_int) -> c_int {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { poll_slice(fds, count, Ok(from_milliseconds(timeout_ms)), std::ptr::null(), false) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { poll_slice(fds, count, from_timespec(timeout), mask, true) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let timeout_ns = match unsafe { timeout.as_ref() } {
        None => None,
        Some(timeout) if timeout.tv_sec < 0 || timeout.tv_usec < 0 => return fail(Errno::INVAL),
        Some(timeout) => {
            Some((timeout.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(timeout.tv_usec as u64 * 1000))
        }
    };
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let (result, left_ns) = unsafe { poll_select::select(count, read, write, except, timeout_ns, std::ptr::null()) };
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    if let (Some(timeout), Some(left_ns)) = (unsafe { timeout.as_mut() }, left_ns) {
        timeout.tv_sec = (left_ns / 1_000_000_000) as _;
        timeout.tv_usec = (left_ns % 1_000_000_000 / 1000) as _;
    }
    int_or_errno(result)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pselect(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let result = unsafe { from_timespec(timeout) }
        // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
        .and_then(|timeout_ns| unsafe { poll_select::select(count, read, write, except, timeout_ns, mask) }.0);
    int_or_errno(result)
}

/// The system call `ppoll`, which unlike libc's function also stores the time left.
pub(crate) unsafe fn ppoll_by_number(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *mut timespec,
    mask: *const sigset_t,
) -> c_int {
    let began_ns = now_ns();
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let timeout_ns = unsafe { from_timespec(timeout) };
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let result = unsafe { poll_slice(fds, count, timeout_ns, mask, true) };
    if let Ok(Some(timeout_ns)) = timeout_ns {
        // SAFETY: not null, so valid as the C program's call requires (manual page).
        unsafe { store_time_left(timeout, timeout_ns.saturating_sub(now_ns() - began_ns)) };
    }
    result
}

/// The system call `pselect6`, which unlike libc's function also stores the time left.
pub(crate) unsafe fn pselect_by_number(
    count: c_int,
    [read, write, except]: [*mut fd_set; 3],
    timeout: *mut timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let timeout_ns = match unsafe { from_timespec(timeout) } {
        Ok(timeout_ns) => timeout_ns,
        Err(error) => return fail(error),
    };
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let (result, left_ns) = unsafe { poll_select::select(count, read, write, except, timeout_ns, mask) };
    if let Some(left_ns) = left_ns {
        // SAFETY: there is a time-out, so that the pointer is not null and valid as the C program's call requires.
        unsafe { store_time_left(timeout, left_ns) };
    }
    int_or_errno(result)
}

/// # Safety
/// `timeout` is writable.
unsafe fn store_time_left(timeout: *mut timespec, left_ns: u64) {
    // The kernel ignores an error here.
    if !memory::is_writable(timeout) {
        return;
    }
    let left = timespec { tv_sec: (left_ns / 1_000_000_000) as _, tv_nsec: (left_ns % 1_000_000_000) as _ };
    // SAFETY: `timeout` is writable, by the contract of this function.
    unsafe { timeout.write(left) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_create(size: c_int) -> c_int {
    if size <= 0 {
        return fail(Errno::INVAL);
    }
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { epoll_create1(0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_create1(flags: c_int) -> c_int {
    int_or_errno(epoll::create(flags).map(|fd| fd as usize))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_ctl(epfd: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    preserving_errno(|| zero_or_errno(unsafe { epoll::control(epfd, operation, fd, event) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_wait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout_ms: c_int) -> c_int {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    int_or_errno(unsafe { epoll::wait(epfd, events, max, from_milliseconds(timeout_ms), std::ptr::null()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait(
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout_ms: c_int,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    int_or_errno(unsafe { epoll::wait(epfd, events, max, from_milliseconds(timeout_ms), mask) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait2(
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let result = unsafe { from_timespec(timeout) }
        // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
        .and_then(|timeout_ns| unsafe { epoll::wait(epfd, events, max, timeout_ns, mask) });
    int_or_errno(result)
}

aliases! {
    /// The name that libnsl uses.
    __poll(fds: *mut pollfd, count: nfds_t, timeout_ms: c_int) -> c_int = poll(fds, count, timeout_ms);
    __poll_chk(fds: *mut pollfd, count: nfds_t, timeout_ms: c_int, _room: usize) -> c_int
        = poll(fds, count, timeout_ms);
    __ppoll_chk(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, _room: usize) -> c_int
        = ppoll(fds, count, timeout, mask);
}
