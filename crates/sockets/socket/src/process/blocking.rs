//! System calls that block. They are handed in, because a library that stands between a program and libc must use
//! libc's own versions: those are cancellation points, and raw system calls are not.

use crate::process::signals::SignalCheckpoint;
use crate::process::system::{KERNEL_SIGSET_BYTES, call, count_or_error};
use rustix::io::Errno;
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};

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

static RECEIVE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static POLL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static EPOLL_WAIT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static POLL_UNDER_MASK: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static SELECT_UNDER_MASK: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Uses these functions to sleep, from now on. They set `errno` as libc's do.
pub fn set_blocking_calls(receive: Receive, poll: Poll, epoll_wait: EpollWait) {
    RECEIVE.store(receive as *mut c_void, Ordering::Release);
    POLL.store(poll as *mut c_void, Ordering::Release);
    EPOLL_WAIT.store(epoll_wait as *mut c_void, Ordering::Release);
}

/// As [`set_blocking_calls`], for the calls that take a signal mask and a finer time-out.
pub fn set_masked_blocking_calls(poll: PollUnderMask, select: SelectUnderMask) {
    POLL_UNDER_MASK.store(poll as *mut c_void, Ordering::Release);
    SELECT_UNDER_MASK.store(select as *mut c_void, Ordering::Release);
}

/// A call of libc's on our own account: answers as [`call`] does, and leaves `errno` as it was.
fn by_libc(call: impl FnOnce() -> isize) -> isize {
    // SAFETY: libc's own variable of this thread.
    let location = unsafe { libc::__errno_location() };
    // SAFETY: the same variable, which nothing else of this thread uses meanwhile.
    let before = unsafe { *location };
    let answer = call();
    if answer >= 0 {
        return answer;
    }
    // SAFETY: the variable that the call has written, of this thread alone.
    let error = unsafe { std::mem::replace(&mut *location, before) };
    -error as isize
}

/// How long a thread sleeps, at most, while there is idle work.
const IDLE_WORK_EVERY_MS: u64 = 250;
/// What a thread that is about to sleep is to do now and then; null for nothing.
static IDLE_WORK: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Has sleeping threads wake up a few times a second to do `work`, as long as it answers that there is more.
pub fn set_idle_work(work: fn() -> bool) {
    IDLE_WORK.store(work as *mut c_void, Ordering::Release);
}

/// Sleeps by `sleep`, which is told for how long (`None`: for ever) and answers whether it woke for something; in
/// pieces, while there is idle work.
fn in_slices<R>(
    timeout_ns: Option<u64>,
    mut sleep: impl FnMut(Option<u64>) -> Result<R, Errno>,
    has_woken: impl Fn(&R) -> bool,
) -> Result<R, Errno> {
    const PIECE_NS: u64 = IDLE_WORK_EVERY_MS * 1_000_000;
    let mut left_ns = timeout_ns;
    loop {
        let work = IDLE_WORK.load(Ordering::Acquire);
        let is_last = work.is_null() || left_ns.is_some_and(|left_ns| left_ns <= PIECE_NS);
        let result = sleep(if is_last { left_ns } else { Some(PIECE_NS) });
        if is_last || result.as_ref().map_or(true, &has_woken) {
            return result;
        }
        left_ns = left_ns.map(|left_ns| left_ns - PIECE_NS);
        do_idle_work(work);
    }
}

/// One piece of a sleep that has `timeout_ms` left, or -1: the whole of it where there is no idle work. `Ok(0)`: the
/// piece is over. A longer sleep would name descriptors again that may be other files by then.
pub fn poll_slice(fds: &mut [libc::pollfd], timeout_ms: i32) -> Result<usize, Errno> {
    let work = IDLE_WORK.load(Ordering::Acquire);
    let piece_ms = IDLE_WORK_EVERY_MS as i32;
    if work.is_null() || (0..=piece_ms).contains(&timeout_ms) {
        return poll_once(fds, timeout_ms);
    }
    let ready = poll_once(fds, piece_ms)?;
    if ready == 0 {
        do_idle_work(work);
    }
    Ok(ready)
}

fn do_idle_work(work: *mut c_void) {
    // SAFETY: not null, so stored by `set_idle_work`, which stores such a function.
    let work = unsafe { std::mem::transmute::<*mut c_void, fn() -> bool>(work) };
    if !work() {
        IDLE_WORK.store(std::ptr::null_mut(), Ordering::Release);
    }
}

/// Waits until `fd` has something to read, without reading it, or for a piece of the sleep: restarted after a signal
/// handler exactly when the handler's `SA_RESTART` says so, because it is `recv`. `Ok(false)` is the end of the stream;
/// `CONNRESET` is one too, and the kernel says it once: the peer has left something unread, or was never accepted.
pub fn wait_to_receive(fd: i32) -> Result<bool, Errno> {
    if !IDLE_WORK.load(Ordering::Acquire).is_null() {
        let began = SignalCheckpoint::now();
        let mut entry = [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }];
        match poll_slice(&mut entry, -1) {
            Ok(0) => return Ok(true),
            Err(Errno::INTR) if began.restarts() => return Ok(true),
            polled => polled?,
        };
    }
    let mut byte = 0_u8;
    let receive = RECEIVE.load(Ordering::Acquire);
    let buffer = (&raw mut byte).cast::<c_void>();
    let received = if receive.is_null() {
        // SAFETY: one byte is writable.
        unsafe { call!(libc::SYS_recvfrom, fd, buffer, 1, libc::MSG_PEEK, 0, 0) }
    } else {
        // SAFETY: only `set_blocking_calls` stores here, and it stores a `Receive`.
        let receive = unsafe { std::mem::transmute::<*mut c_void, Receive>(receive) };
        // SAFETY: one byte is writable.
        by_libc(|| unsafe { receive(fd, buffer, 1, libc::MSG_PEEK) })
    };
    count_or_error(received).map(|received| received > 0)
}

/// `poll(2)`, with a time-out in milliseconds or -1.
pub fn poll(fds: &mut [libc::pollfd], timeout_ms: i32) -> Result<usize, Errno> {
    if timeout_ms == 0 || IDLE_WORK.load(Ordering::Relaxed).is_null() {
        return poll_once(fds, timeout_ms);
    }
    let timeout_ns = u64::try_from(timeout_ms).ok().map(|ms| ms * 1_000_000);
    let poll = |left_ns: Option<u64>| poll_once(fds, left_ns.map_or(-1, |ns| ns.div_ceil(1_000_000) as i32));
    in_slices(timeout_ns, poll, |ready| *ready > 0)
}

fn poll_once(fds: &mut [libc::pollfd], timeout_ms: i32) -> Result<usize, Errno> {
    let poll = POLL.load(Ordering::Acquire);
    let ready = if poll.is_null() {
        // SAFETY: the slice is writable for its length.
        unsafe { call!(libc::SYS_poll, fds.as_mut_ptr(), fds.len(), timeout_ms) }
    } else {
        // SAFETY: only `set_blocking_calls` stores here, and it stores a `Poll`.
        let poll = unsafe { std::mem::transmute::<*mut c_void, Poll>(poll) };
        // SAFETY: the slice is writable for its length.
        by_libc(|| unsafe { poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout_ms) } as isize)
    };
    count_or_error(ready)
}

/// `ppoll(2)`; no time-out waits for ever.
///
/// # Safety
/// `mask` is null or a signal set.
pub unsafe fn ppoll(
    fds: &mut [libc::pollfd],
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> Result<usize, Errno> {
    if timeout_ns == Some(0) || IDLE_WORK.load(Ordering::Relaxed).is_null() {
        // SAFETY: our caller says that `mask` is null or a signal set, and that is all that is asked.
        return unsafe { ppoll_once(fds, timeout_ns, mask) };
    }
    // SAFETY: `mask` is null or a signal set until this call returns, and so in each piece of the wait.
    in_slices(timeout_ns, |left_ns| unsafe { ppoll_once(fds, left_ns, mask) }, |ready| *ready > 0)
}

unsafe fn ppoll_once(
    fds: &mut [libc::pollfd],
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> Result<usize, Errno> {
    let mut timeout = timespec(timeout_ns);
    let timeout = timeout.as_mut().map_or(std::ptr::null_mut(), |timeout| timeout as *mut libc::timespec);
    let poll = POLL_UNDER_MASK.load(Ordering::Acquire);
    let ready = if poll.is_null() {
        // SAFETY: the slice is writable for its length; the caller's mask.
        unsafe { call!(libc::SYS_ppoll, fds.as_mut_ptr(), fds.len(), timeout, mask, KERNEL_SIGSET_BYTES) }
    } else {
        // SAFETY: only `set_masked_blocking_calls` stores here, and it stores a `PollUnderMask`.
        let poll = unsafe { std::mem::transmute::<*mut c_void, PollUnderMask>(poll) };
        // SAFETY: the slice is writable for its length; the caller's mask.
        by_libc(|| unsafe { poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout, mask) } as isize)
    };
    count_or_error(ready)
}

/// `pselect(2)`; no time-out waits for ever.
///
/// # Safety
/// As the system call: each set is null or has a bit for every number below `count`; `mask` is null or a signal set.
pub unsafe fn pselect(
    count: i32,
    sets: [*mut libc::fd_set; 3],
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> Result<usize, Errno> {
    let mut timeout = timespec(timeout_ns);
    let timeout = timeout.as_mut().map_or(std::ptr::null_mut(), |timeout| timeout as *mut libc::timespec);
    let [read, write, except] = sets;
    let select = SELECT_UNDER_MASK.load(Ordering::Acquire);
    let ready = if select.is_null() {
        let sized_mask = (mask, KERNEL_SIGSET_BYTES);
        // SAFETY: the caller's sets; the mask with its size is what the kernel takes as the last argument.
        unsafe { call!(libc::SYS_pselect6, count, read, write, except, timeout, &raw const sized_mask) }
    } else {
        // SAFETY: only `set_masked_blocking_calls` stores here, and it stores a `SelectUnderMask`.
        let select = unsafe { std::mem::transmute::<*mut c_void, SelectUnderMask>(select) };
        // SAFETY: the caller's sets.
        by_libc(|| unsafe { select(count, read, write, except, timeout, mask) } as isize)
    };
    count_or_error(ready)
}

/// `epoll_pwait(2)`; no time-out waits for ever. One that is not in whole milliseconds is kept to the nanosecond where
/// the kernel can, and rounded up where it cannot.
///
/// # Safety
/// `events` is writable for `max` events; `mask` is null or a signal set.
pub unsafe fn epoll_wait(
    epfd: i32,
    events: *mut libc::epoll_event,
    max: i32,
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> Result<usize, Errno> {
    if timeout_ns == Some(0) || IDLE_WORK.load(Ordering::Relaxed).is_null() {
        // SAFETY: the caller's array and mask.
        return unsafe { epoll_wait_once(epfd, events, max, timeout_ns, mask) };
    }
    // SAFETY: as above.
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
        // SAFETY: the caller's array and mask.
        let ready = unsafe { call!(libc::SYS_epoll_pwait2, epfd, events, max, timeout, mask, KERNEL_SIGSET_BYTES) };
        match count_or_error(ready) {
            Err(Errno::NOSYS) => {}
            result => return result,
        }
    }
    let timeout_ms = timeout_ns.map_or(-1, |ns| i32::try_from(ns.div_ceil(1_000_000)).unwrap_or(i32::MAX));
    let wait = EPOLL_WAIT.load(Ordering::Acquire);
    let ready = if wait.is_null() || timeout_ms == 0 {
        // SAFETY: the caller's array and mask.
        unsafe { call!(libc::SYS_epoll_pwait, epfd, events, max, timeout_ms, mask, KERNEL_SIGSET_BYTES) }
    } else {
        // SAFETY: only `set_blocking_calls` stores here, and it stores an `EpollWait`.
        let wait = unsafe { std::mem::transmute::<*mut c_void, EpollWait>(wait) };
        // SAFETY: the caller's array and mask.
        by_libc(|| unsafe { wait(epfd, events, max, timeout_ms, mask) } as isize)
    };
    count_or_error(ready)
}

/// Delivers the signals that wait for `mask` to be in force: `INTR` if a handler ran. Does not sleep.
///
/// # Safety
/// `mask` is null or a signal set.
pub unsafe fn deliver_signals(mask: *const libc::sigset_t) -> Result<(), Errno> {
    if mask.is_null() {
        return Ok(());
    }
    let mut timeout = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let none = std::ptr::null_mut::<libc::pollfd>();
    // SAFETY: no entries; the caller's mask.
    let ready = unsafe { call!(libc::SYS_ppoll, none, 0, &raw mut timeout, mask, KERNEL_SIGSET_BYTES) };
    count_or_error(ready).map(|_| ())
}

fn timespec(timeout_ns: Option<u64>) -> Option<libc::timespec> {
    timeout_ns.map(|ns| libc::timespec { tv_sec: (ns / 1_000_000_000) as _, tv_nsec: (ns % 1_000_000_000) as _ })
}

/// What `fd` has to say now.
pub fn poll_now(fd: i32, events: i16) -> i16 {
    poll_for(fd, events, 0)
}

/// What `fd` has to say within `timeout_ms`.
pub fn poll_for(fd: i32, events: i16, timeout_ms: i32) -> i16 {
    let mut entry = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: one entry is writable.
    let ready = unsafe { call!(libc::SYS_poll, &raw mut entry, 1, timeout_ms) };
    if ready > 0 { entry.revents } else { 0 }
}
