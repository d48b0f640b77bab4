//! `poll`, `select` and `epoll`. A call without a connection that has met its other end is the kernel's.

use crate::errno::{count_or_errno, create_descriptor, fail, keeping_errno, zero_or_errno};
use crate::real;
use libc::{epoll_event, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};
use rustix::io::Errno;
use socket::process::clock::now_ns;
use socket::process::memory;
use std::ffi::c_int;
use stream::select::{self, Sets};
use stream::{epoll, poll};

const SECOND_NS: u64 = 1_000_000_000;

/// Returns the program's entries if one of them is a connection that has met its other end.
unsafe fn entries_with_lanes<'a>(fds: *mut pollfd, count: nfds_t) -> Option<&'a mut [pollfd]> {
    if count == 0 || !memory::are_writable(fds, usize::try_from(count).ok()?) {
        return None;
    }
    epoll::before_wait(None);
    // SAFETY: the C program's array, writable as was just checked.
    let entries = unsafe { std::slice::from_raw_parts_mut(fds, count as usize) };
    // All are visited: see `concerns`.
    let is_any = entries.iter().fold(false, |is_any, entry| is_any | poll::concerns(entry.fd));
    // More than the descriptor limit are the kernel's to refuse.
    if is_any && poll::allows(count) { Some(entries) } else { None }
}

/// Returns a valid time-out in nanoseconds; a null pointer waits without limit. `None` if the kernel refuses it.
unsafe fn nanoseconds(timeout: *const timespec) -> Option<Option<u64>> {
    if timeout.is_null() {
        return Some(None);
    }
    if !memory::is_readable(timeout) {
        return None;
    }
    // SAFETY: readable, as was just checked.
    let timespec { tv_sec, tv_nsec, .. } = unsafe { timeout.read() };
    let (seconds, nanoseconds) = (u64::try_from(tv_sec).ok()?, u64::try_from(tv_nsec).ok()?);
    (nanoseconds < SECOND_NS).then(|| Some(seconds.saturating_mul(SECOND_NS).saturating_add(nanoseconds)))
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
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    let in_kernel = || unsafe { real::ppoll(fds, count, timeout, mask) };
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { ppoll_or(fds, count, timeout, mask, in_kernel) }
}

/// Waits if an entry is a connection that has met its other end; leaves all other calls to `in_kernel`.
unsafe fn ppoll_or(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    in_kernel: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let timeout_ns = if is_mask_readable(mask) { unsafe { nanoseconds(timeout) } } else { None };
    let Some(timeout_ns) = timeout_ns else { return in_kernel() };
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let Some(entries) = (unsafe { entries_with_lanes(fds, count) }) else { return in_kernel() };
    // SAFETY: the C program's mask, valid as its call requires (manual page).
    count_or_errno(unsafe { poll::poll(entries, timeout_ns, mask) }) as c_int
}

fn is_mask_readable(mask: *const sigset_t) -> bool {
    mask.is_null() || memory::is_readable(mask.cast::<u64>())
}

/// The system call `ppoll`, which unlike libc's function also stores the time left.
pub(crate) unsafe fn ppoll_by_number(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *mut timespec,
    mask: *const sigset_t,
    in_kernel: impl FnOnce() -> c_int,
) -> c_int {
    let began_ns = now_ns();
    let mut is_kernels = false;
    let in_kernel = || {
        is_kernels = true;
        in_kernel()
    };
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let result = unsafe { ppoll_or(fds, count, timeout, mask, in_kernel) };
    if !is_kernels {
        // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
        unsafe { store_time_left(timeout, began_ns) };
    }
    result
}

/// Stores how much of a time-out is left. The kernel ignores an error here.
unsafe fn store_time_left(timeout: *mut timespec, began_ns: u64) {
    // SAFETY: the C program's time-out, valid as its call requires (manual page).
    let Some(Some(timeout_ns)) = (unsafe { nanoseconds(timeout) }) else { return };
    if memory::is_writable(timeout) {
        let left_ns = timeout_ns.saturating_sub(now_ns() - began_ns);
        let left = timespec { tv_sec: (left_ns / SECOND_NS) as _, tv_nsec: (left_ns % SECOND_NS) as _ };
        // SAFETY: writable, as was just checked.
        unsafe { timeout.write(left) };
    }
}

/// Returns the sets of a call if one of them names a connection that has met its other end.
unsafe fn sets_with_lanes(count: c_int, sets: [*mut fd_set; 3]) -> Option<Sets> {
    let is_bad =
        |set: &*mut fd_set| !set.is_null() && !memory::are_writable(set.cast::<libc::c_ulong>(), select::words(count));
    if count <= 0 || sets.iter().any(is_bad) {
        return None;
    }
    epoll::before_wait(None);
    // SAFETY: each set is null, or writable for this count, as was just checked.
    let sets = unsafe { Sets::new(sets, count) };
    sets.concern_lanes().then_some(sets)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    let count = keeping_errno(|| select::clamped_count(count));
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let Some(sets) = (unsafe { sets_with_lanes(count, [read, write, except]) }) else {
        // SAFETY: the C program's arguments, passed on to libc; its call requires them to be valid.
        return unsafe { real::select(count, read, write, except, timeout) };
    };
    let began_ns = now_ns();
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let timeout_ns = match unsafe { timeout.as_ref() } {
        None => None,
        Some(timeout) if timeout.tv_sec < 0 || timeout.tv_usec < 0 => return fail(Errno::INVAL),
        Some(timeout) => {
            let seconds_ns = (timeout.tv_sec as u64).saturating_mul(SECOND_NS);
            Some(seconds_ns.saturating_add((timeout.tv_usec as u64).saturating_mul(1000)))
        }
    };
    // SAFETY: the mask is null.
    let result = unsafe { select::select(&sets, timeout_ns, std::ptr::null()) };
    // SAFETY: the C program's time-out, valid as its call requires (manual page).
    if let (Some(timeout), Some(timeout_ns)) = (unsafe { timeout.as_mut() }, timeout_ns) {
        let left_ns = timeout_ns.saturating_sub(now_ns() - began_ns);
        timeout.tv_sec = (left_ns / SECOND_NS) as _;
        timeout.tv_usec = (left_ns % SECOND_NS / 1000) as _;
    }
    count_or_errno(result) as c_int
}

/// Waits if a set names a connection that has met its other end; leaves all other calls to `in_kernel`.
unsafe fn pselect_or(
    count: c_int,
    sets: [*mut fd_set; 3],
    timeout: *const timespec,
    mask: *const sigset_t,
    in_kernel: impl FnOnce(c_int) -> c_int,
) -> c_int {
    let count = keeping_errno(|| select::clamped_count(count));
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let timeout_ns = if is_mask_readable(mask) { unsafe { nanoseconds(timeout) } } else { None };
    let Some(timeout_ns) = timeout_ns else { return in_kernel(count) };
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let Some(sets) = (unsafe { sets_with_lanes(count, sets) }) else { return in_kernel(count) };
    // SAFETY: the C program's mask, valid as its call requires (manual page).
    count_or_errno(unsafe { select::select(&sets, timeout_ns, mask) }) as c_int
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
    // SAFETY: the C program's arguments, passed on to libc; its call requires them to be valid.
    let in_kernel = |count| unsafe { real::pselect(count, read, write, except, timeout, mask) };
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { pselect_or(count, [read, write, except], timeout, mask, in_kernel) }
}

/// The system call `pselect6`, which unlike libc's function also stores the time left.
pub(crate) unsafe fn pselect_by_number(
    count: c_int,
    sets: [*mut fd_set; 3],
    timeout: *mut timespec,
    mask: *const sigset_t,
    in_kernel: impl FnOnce(c_int) -> c_int,
) -> c_int {
    let began_ns = now_ns();
    let mut is_kernels = false;
    let in_kernel = |count| {
        is_kernels = true;
        in_kernel(count)
    };
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let result = unsafe { pselect_or(count, sets, timeout, mask, in_kernel) };
    if !is_kernels {
        // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
        unsafe { store_time_left(timeout, began_ns) };
    }
    result
}

/// Notes a set that was created; returns its number.
fn note_created(epfd: c_int) -> c_int {
    if epfd >= 0 {
        keeping_errno(|| epoll::note_created(epfd));
    }
    epfd
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_create(size: c_int) -> c_int {
    // SAFETY: the C program's arguments, passed on to libc unchanged.
    note_created(create_descriptor(|| unsafe { real::epoll_create(size) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_create1(flags: c_int) -> c_int {
    // SAFETY: the C program's arguments, passed on to libc unchanged.
    note_created(create_descriptor(|| unsafe { real::epoll_create1(flags) }))
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
    if stream::process::is_confined() {
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        return unsafe { real::epoll_pwait(epfd, events, max, timeout_ms, mask) };
    }
    let timeout_ns = u64::try_from(timeout_ms).ok().map(|ms| ms * 1_000_000);
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { wait(epfd, events, max, timeout_ns, mask) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_wait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout_ms: c_int) -> c_int {
    if stream::process::is_confined() {
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        return unsafe { real::epoll_wait(epfd, events, max, timeout_ms) };
    }
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
    if stream::process::is_confined() {
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        return unsafe { real::epoll_pwait2(epfd, events, max, timeout, mask) };
    }
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
    epoll::before_wait(Some(epfd));
    // SAFETY: the array was just checked; the mask is valid as the C program's call requires (manual page).
    count_or_errno(unsafe { epoll::wait(epfd, events, max as usize, timeout_ns, mask) }) as c_int
}

aliases! {
    /// The name that libnsl uses.
    __poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int = poll(fds, count, timeout);
    __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, _room: usize) -> c_int = poll(fds, count, timeout);
    __ppoll_chk(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, _room: usize) -> c_int
        = ppoll(fds, count, timeout, mask);
}
