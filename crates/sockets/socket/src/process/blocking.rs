//! System calls that block. The `preload` crate supplies them, because a library between a program and libc must use
//! libc's own versions: those are cancellation points, and raw system calls are not.

use crate::process::callback::Callback;
use crate::process::signals::SignalCheckpoint;
use crate::process::system::{KERNEL_SIGSET_BYTES, call, count_or_error};
use rustix::io::Errno;
use std::ffi::c_void;

/// `recv(2)`.
pub type Receive = unsafe extern "C" fn(i32, *mut c_void, usize, i32) -> isize;
/// `poll(2)`.
pub type Poll = unsafe extern "C" fn(*mut libc::pollfd, libc::nfds_t, i32) -> i32;
/// `epoll_pwait(2)`.
pub type EpollWait = unsafe extern "C" fn(i32, *mut libc::epoll_event, i32, i32, *const libc::sigset_t) -> i32;
/// `ppoll(2)`.
pub type PollUnderMask =
    unsafe extern "C" fn(*mut libc::pollfd, libc::nfds_t, *const libc::timespec, *const libc::sigset_t) -> i32;
/// `pselect(2)`.
pub type SelectUnderMask = unsafe extern "C" fn(
    i32,
    *mut libc::fd_set,
    *mut libc::fd_set,
    *mut libc::fd_set,
    *const libc::timespec,
    *const libc::sigset_t,
) -> i32;

static RECEIVE: Callback<Receive> = Callback::new();
static POLL: Callback<Poll> = Callback::new();
static EPOLL_WAIT: Callback<EpollWait> = Callback::new();
static POLL_UNDER_MASK: Callback<PollUnderMask> = Callback::new();
static SELECT_UNDER_MASK: Callback<SelectUnderMask> = Callback::new();

/// Sets the functions by which threads block from now on. They set `errno` as libc's do.
pub fn set_blocking_calls(receive: Receive, poll: Poll, epoll_wait: EpollWait) {
    RECEIVE.set(receive);
    POLL.set(poll);
    EPOLL_WAIT.set(epoll_wait);
}

/// Sets the functions, as [`set_blocking_calls`] does, that take a signal mask and a finer timeout.
pub fn set_masked_blocking_calls(poll: PollUnderMask, select: SelectUnderMask) {
    POLL_UNDER_MASK.set(poll);
    SELECT_UNDER_MASK.set(select);
}

/// Calls a function of libc on behalf of the library: returns what [`call`] would, and restores `errno`.
fn by_libc(call: impl FnOnce() -> isize) -> isize {
    // SAFETY: `__errno_location` takes no arguments and returns the address of this thread's `errno`.
    let location = unsafe { libc::__errno_location() };
    // SAFETY: the address is that of this thread's `errno`, which no other code of this thread accesses meanwhile.
    let before = unsafe { *location };
    let result = call();
    if result >= 0 {
        return result;
    }
    // SAFETY: the address is still that of this thread's `errno`, which only this thread accesses.
    let error = unsafe { std::mem::replace(&mut *location, before) };
    -error as isize
}

/// Maximum time that a thread blocks at once while there is idle work.
const IDLE_WORK_EVERY_MS: u64 = 250;
/// The same time in nanoseconds.
const SLICE_NS: u64 = IDLE_WORK_EVERY_MS * 1_000_000;
/// The function that blocking threads call from time to time, if any.
static IDLE_WORK: Callback<fn() -> bool> = Callback::new();

/// Sets the `work` that blocked threads wake up for a few times a second, as long as it returns true: there is more.
pub fn set_idle_work(work: fn() -> bool) {
    IDLE_WORK.set(work);
}

/// Blocks by `sleep`, in slices while there is idle work. `sleep` gets the time to block for (`None`: without limit),
/// and `has_woken` returns for its result whether there was an event.
fn in_slices<R>(
    timeout_ns: Option<u64>,
    mut sleep: impl FnMut(Option<u64>) -> Result<R, Errno>,
    has_woken: impl Fn(&R) -> bool,
) -> Result<R, Errno> {
    let mut left_ns = timeout_ns;
    loop {
        let work = IDLE_WORK.get();
        let is_last = work.is_none() || left_ns.is_some_and(|left_ns| left_ns <= SLICE_NS);
        let result = sleep(if is_last { left_ns } else { Some(SLICE_NS) });
        if is_last || result.as_ref().map_or(true, &has_woken) {
            return result;
        }
        left_ns = left_ns.map(|left_ns| left_ns - SLICE_NS);
        work.inspect(do_idle_work);
    }
}

/// `poll(2)` for one slice of a wait that has `timeout_ms` left, or -1: for all of it without idle work. Returns 0 at
/// the end of the slice. A longer wait would pass descriptors again that may be other files by then, and the work may
/// have changed what the caller waits for.
pub fn poll_slice(fds: &mut [libc::pollfd], timeout_ms: i32) -> Result<usize, Errno> {
    let slice_ms = IDLE_WORK_EVERY_MS as i32;
    let Some(work) = IDLE_WORK.get().filter(|_| !(0..=slice_ms).contains(&timeout_ms)) else {
        return poll_once(fds, timeout_ms);
    };
    let ready = poll_once(fds, slice_ms)?;
    if ready == 0 {
        do_idle_work(&work);
    }
    Ok(ready)
}

fn do_idle_work(work: &fn() -> bool) {
    if !work() {
        IDLE_WORK.clear();
    }
}

/// Waits until `fd` is readable, without reading, or for a slice of the wait. It is restarted after a signal handler
/// exactly when the handler has `SA_RESTART`, because it is `recv`. Returns false at the end of the stream.
///
/// # Errors
/// Those of `recv(2)`. `CONNRESET` is also the end of the stream, and the kernel reports it once: the peer has left
/// bytes unread, or was never accepted.
pub fn wait_to_receive(fd: i32) -> Result<bool, Errno> {
    if IDLE_WORK.is_set() {
        let began = SignalCheckpoint::now();
        let mut entry = [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }];
        match poll_slice(&mut entry, -1) {
            Ok(0) => return Ok(true),
            Err(Errno::INTR) if began.restarts() => return Ok(true),
            polled => polled?,
        };
    }
    let mut byte = 0_u8;
    let buffer = (&raw mut byte).cast::<c_void>();
    let received = if let Some(receive) = RECEIVE.get() {
        // SAFETY: the buffer is a local of one byte, which outlives the call.
        by_libc(|| unsafe { receive(fd, buffer, 1, libc::MSG_PEEK) })
    } else {
        // SAFETY: the buffer is a local of one byte, which outlives the call.
        unsafe { call!(libc::SYS_recvfrom, fd, buffer, 1, libc::MSG_PEEK, 0, 0) }
    };
    count_or_error(received).map(|received| received > 0)
}

fn poll_once(fds: &mut [libc::pollfd], timeout_ms: i32) -> Result<usize, Errno> {
    let ready = if let Some(poll) = POLL.get() {
        // SAFETY: the pointer and the length are those of the slice, which is borrowed mutably for the call.
        by_libc(|| unsafe { poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout_ms) } as isize)
    } else {
        // SAFETY: the pointer and the length are those of the slice, which is borrowed mutably for the call.
        unsafe { enter_poll(fds.as_mut_ptr(), fds.len(), timeout_ms) }
    };
    count_or_error(ready)
}

/// `ppoll(2)`, as [`poll_slice`]; without a timeout, the wait has no limit.
///
/// # Safety
/// `mask` is null or points to a signal set.
pub unsafe fn ppoll_slice(
    fds: &mut [libc::pollfd],
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> Result<usize, Errno> {
    let work = IDLE_WORK.get().filter(|_| timeout_ns.is_none_or(|timeout_ns| timeout_ns > SLICE_NS));
    let slice_ns = if work.is_some() { Some(SLICE_NS) } else { timeout_ns };
    // SAFETY: `mask` is null or points to a signal set, by this function's contract; the entries are borrowed until the
    // call returns.
    let ready = unsafe { ppoll_once(fds, slice_ns, mask) }?;
    if ready == 0 {
        work.iter().for_each(do_idle_work);
    }
    Ok(ready)
}

unsafe fn ppoll_once(
    fds: &mut [libc::pollfd],
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> Result<usize, Errno> {
    let mut timeout = timespec(timeout_ns);
    let timeout = timeout.as_mut().map_or(std::ptr::null_mut(), |timeout| timeout as *mut libc::timespec);
    let ready = if let Some(poll) = POLL_UNDER_MASK.get() {
        // SAFETY: the pointer and the length are those of the slice; `timeout` is null or a local; the caller
        // guarantees that `mask` is null or points to a signal set.
        by_libc(|| unsafe { poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout, mask) } as isize)
    } else {
        // SAFETY: the pointer and the length are those of the slice; `timeout` is null or a local; the caller
        // guarantees that `mask` is null or points to a signal set.
        unsafe { call!(libc::SYS_ppoll, fds.as_mut_ptr(), fds.len(), timeout, mask, KERNEL_SIGSET_BYTES) }
    };
    count_or_error(ready)
}

/// `pselect(2)`; without a timeout it waits without limit.
///
/// # Safety
/// Each set is null or has a bit for every number below `count`; `mask` is null or points to a signal set.
pub unsafe fn pselect(
    count: i32,
    sets: [*mut libc::fd_set; 3],
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> Result<usize, Errno> {
    let mut timeout = timespec(timeout_ns);
    let timeout = timeout.as_mut().map_or(std::ptr::null_mut(), |timeout| timeout as *mut libc::timespec);
    let [read, write, except] = sets;
    let ready = if let Some(select) = SELECT_UNDER_MASK.get() {
        // SAFETY: the caller guarantees that the sets are valid for `count` and the mask is null or valid; `timeout` is
        // null or a local.
        by_libc(|| unsafe { select(count, read, write, except, timeout, mask) } as isize)
    } else {
        let sized_mask = (mask, KERNEL_SIGSET_BYTES);
        // SAFETY: the caller guarantees the sets and the mask; the kernel takes the mask with its size as the last
        // argument, which is a local, as `timeout` is.
        unsafe { call!(libc::SYS_pselect6, count, read, write, except, timeout, &raw const sized_mask) }
    };
    count_or_error(ready)
}

/// `epoll_pwait(2)`; without a timeout it waits without limit. A timeout that is not in whole milliseconds is kept to
/// the nanosecond if the kernel has `epoll_pwait2`, and rounded up otherwise.
///
/// # Safety
/// `events` is writable for `max` events; `mask` is null or points to a signal set.
pub unsafe fn epoll_wait(
    epfd: i32,
    events: *mut libc::epoll_event,
    max: i32,
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> Result<usize, Errno> {
    if timeout_ns == Some(0) || !IDLE_WORK.is_set() {
        // SAFETY: the caller guarantees that `events` is writable for `max` events and `mask` is null or valid.
        return unsafe { epoll_wait_once(epfd, events, max, timeout_ns, mask) };
    }
    // SAFETY: the caller guarantees the array and the mask until this call returns, and so in each slice of the wait.
    let wait = |left_ns: Option<u64>| unsafe { epoll_wait_once(epfd, events, max, left_ns, mask) };
    in_slices(timeout_ns, wait, |count| *count > 0)
}

unsafe fn epoll_wait_once(
    epfd: i32,
    events: *mut libc::epoll_event,
    max: i32,
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> Result<usize, Errno> {
    if let Some(mut timeout) = timespec(timeout_ns).filter(|_| timeout_ns.is_some_and(|ns| ns % 1_000_000 != 0)) {
        let timeout = &raw mut timeout;
        // SAFETY: the caller guarantees that `events` is writable for `max` events and `mask` is null or valid;
        // `timeout` is a local.
        let ready = unsafe { call!(libc::SYS_epoll_pwait2, epfd, events, max, timeout, mask, KERNEL_SIGSET_BYTES) };
        match count_or_error(ready) {
            Err(Errno::NOSYS) => {}
            result => return result,
        }
    }
    let timeout_ms = timeout_ns.map_or(-1, |ns| i32::try_from(ns.div_ceil(1_000_000)).unwrap_or(i32::MAX));
    let ready = if let Some(wait) = EPOLL_WAIT.get().filter(|_| timeout_ms != 0) {
        // SAFETY: the caller guarantees that `events` is writable for `max` events and `mask` is null or valid.
        by_libc(|| unsafe { wait(epfd, events, max, timeout_ms, mask) } as isize)
    } else {
        // SAFETY: the caller guarantees that `events` is writable for `max` events and `mask` is null or valid.
        unsafe { call!(libc::SYS_epoll_pwait, epfd, events, max, timeout_ms, mask, KERNEL_SIGSET_BYTES) }
    };
    count_or_error(ready)
}

/// Delivers the signals that `mask` unblocks. Does not block. Returns `INTR` if a handler ran.
///
/// # Safety
/// `mask` is null or points to a signal set.
pub unsafe fn deliver_signals(mask: *const libc::sigset_t) -> Result<(), Errno> {
    if mask.is_null() {
        return Ok(());
    }
    let mut timeout = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let none = std::ptr::null_mut::<libc::pollfd>();
    // SAFETY: the number of entries is 0, `timeout` is a local, and the caller guarantees that `mask` points to a
    // signal set.
    let ready = unsafe { call!(libc::SYS_ppoll, none, 0, &raw mut timeout, mask, KERNEL_SIGSET_BYTES) };
    count_or_error(ready).map(|_| ())
}

fn timespec(timeout_ns: Option<u64>) -> Option<libc::timespec> {
    timeout_ns.map(|ns| libc::timespec { tv_sec: (ns / 1_000_000_000) as _, tv_nsec: (ns % 1_000_000_000) as _ })
}

/// Performs `poll(2)`, which newer architectures only have as `ppoll(2)`. A negative time-out is none.
///
/// # Safety
/// `fds` is valid for `count` entries.
#[inline]
unsafe fn enter_poll(fds: *mut libc::pollfd, count: usize, timeout_ms: i32) -> isize {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the entries are valid by this function's contract.
    unsafe {
        call!(libc::SYS_poll, fds, count, timeout_ms)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let time = timespec(u64::try_from(timeout_ms).ok().map(|ms| ms * 1_000_000));
        let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the entries are valid by this function's contract; the time is a local, and there is no mask.
        unsafe { call!(libc::SYS_ppoll, fds, count, time, 0, 0) }
    }
}

/// Returns the events of `fd` that are present now.
pub fn poll_now(fd: i32, events: i16) -> i16 {
    poll_for(fd, events, 0)
}

/// Returns the events of `fd` that are present within `timeout_ms`.
pub fn poll_for(fd: i32, events: i16, timeout_ms: i32) -> i16 {
    let mut entry = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: the pointer is to one local entry, and the count is 1.
    let ready = unsafe { enter_poll(&raw mut entry, 1, timeout_ms) };
    if ready > 0 { entry.revents } else { 0 }
}
