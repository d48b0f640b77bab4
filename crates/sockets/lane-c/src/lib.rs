//! The lane for C: `include/crosslane_lane.h` says what each function does.
//!
//! Every argument is checked before it is used, and nothing unwinds into C: what fails answers a negative errno.

#![allow(unsafe_code)] // C hands over raw pointers.

mod error;
mod handle;
mod segment;

use error::{Failure, code, size};
pub use handle::Handle;
use handle::{IN, OUT};
use libc::c_int;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::time::Duration;

/// Makes a pair; answers its descriptor.
#[unsafe(no_mangle)]
pub extern "C" fn crosslane_lane_create(ring_bytes: usize) -> c_int {
    code(segment::create(ring_bytes).map(IntoRawFd::into_raw_fd))
}

/// Attaches a side of a pair.
///
/// # Safety
/// `lane` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_attach(memfd: c_int, side: c_int, lane: *mut *mut Handle) -> c_int {
    let attach = || {
        let side = usize::try_from(side).ok().filter(|side| *side < 2).ok_or(Failure::INVALID)?;
        if lane.is_null() {
            return Err(Failure::INVALID);
        }
        if memfd < 0 {
            return Err(Failure::DESCRIPTOR);
        }
        // SAFETY: not -1; whether it is open is the kernel's to say, and it is not kept.
        let handle = Handle::attach(unsafe { BorrowedFd::borrow_raw(memfd) }, side)?;
        // SAFETY: not null, so writable.
        unsafe { lane.write(Box::into_raw(Box::new(handle))) };
        Ok(0)
    };
    code(attach())
}

/// Ends a handle.
///
/// # Safety
/// `lane` is null or a handle that nobody uses any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_close(lane: *mut Handle) -> c_int {
    if lane.is_null() {
        return code(Err(Failure::INVALID));
    }
    // SAFETY: made by `Box::into_raw` above, and the caller's last use.
    drop(unsafe { Box::from_raw(lane) });
    0
}

/// Writes a copy.
///
/// # Safety
/// `lane` is null or a handle, `bytes` is null or readable for `len`; no other call that writes runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_write(lane: *mut Handle, bytes: *const u8, len: usize) -> isize {
    let write = || {
        check_span(bytes, len)?;
        // SAFETY: the caller's.
        unsafe { handle(lane)?.writer().write(bytes, len) }
    };
    size(write())
}

/// Reads a copy.
///
/// # Safety
/// `lane` is null or a handle, `bytes` is null or writable for `len`; no other call that reads runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_read(lane: *mut Handle, bytes: *mut u8, len: usize) -> isize {
    let read = || {
        check_span(bytes, len)?;
        check_some(len)?;
        // SAFETY: the caller's.
        unsafe { handle(lane)?.reader().read(bytes, len) }
    };
    size(read())
}

/// Reserves room to write in place.
///
/// # Safety
/// `lane` is null or a handle, `at` is null or writable; no other call that writes runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_reserve(lane: *mut Handle, len_max: usize, at: *mut *mut u8) -> isize {
    let reserve = || {
        check_span(at, len_max)?;
        check_some(len_max)?;
        // SAFETY: the caller's.
        let (pointer, len_bytes) = unsafe { handle(lane)?.writer() }.reserve(len_max)?;
        // SAFETY: not null, so writable.
        unsafe { at.write(pointer) };
        Ok(len_bytes)
    };
    size(reserve())
}

/// Sends what was written in place.
///
/// # Safety
/// `lane` is null or a handle; no other call that writes runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_commit(lane: *mut Handle, len: usize) -> c_int {
    // SAFETY: the caller's.
    let commit = || unsafe { handle(lane)?.writer() }.commit(len).map(|()| 0);
    code(commit())
}

/// Shows the next bytes in place.
///
/// # Safety
/// `lane` is null or a handle, `at` is null or writable; no other call that reads runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_peek(lane: *mut Handle, at: *mut *const u8) -> isize {
    let peek = || {
        if at.is_null() {
            return Err(Failure::INVALID);
        }
        // SAFETY: the caller's.
        let (pointer, len_bytes) = unsafe { handle(lane)?.reader() }.peek()?;
        // SAFETY: not null, so writable.
        unsafe { at.write(pointer) };
        Ok(len_bytes)
    };
    size(peek())
}

/// Gives back what was read in place.
///
/// # Safety
/// `lane` is null or a handle; no other call that reads runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_consume(lane: *mut Handle, len: usize) -> c_int {
    // SAFETY: the caller's.
    let consume = || unsafe { handle(lane)?.reader() }.consume(len).map(|()| 0);
    code(consume())
}

/// Unread bytes.
///
/// # Safety
/// `lane` is null or a handle; no other call that reads runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_unread(lane: *mut Handle) -> isize {
    // SAFETY: the caller's.
    let unread = || unsafe { handle(lane)?.reader() }.unread();
    size(unread())
}

/// Says that nothing follows.
///
/// # Safety
/// `lane` is null or a handle; no other call that writes runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_finish(lane: *mut Handle) -> c_int {
    let finish = || {
        // SAFETY: the caller's.
        unsafe { handle(lane)?.writer() }.finish();
        Ok(0)
    };
    code(finish())
}

/// Which events hold.
///
/// # Safety
/// `lane` is null or a handle; no other call of the directions in `events` runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_ready(lane: *mut Handle, events: c_int) -> c_int {
    let ready = || {
        check_events(events)?;
        // SAFETY: the caller's.
        unsafe { handle(lane)?.ready(events) }
    };
    code(ready())
}

/// Waits for an event.
///
/// # Safety
/// `lane` is null or a handle; no other call of the directions in `events` runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_wait(lane: *mut Handle, events: c_int, timeout_ms: c_int) -> c_int {
    let wait = || {
        check_events(events)?;
        let limit = match timeout_ms {
            -1 => None,
            _ => Some(Duration::from_millis(u64::try_from(timeout_ms).map_err(|_| Failure::INVALID)?)),
        };
        // SAFETY: the caller's.
        unsafe { handle(lane)?.wait(events, limit) }
    };
    code(wait())
}

/// Asks the peer to ring.
///
/// # Safety
/// `lane` is null or a handle; no other call of the directions in `events` runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_announce_sleep(lane: *mut Handle, events: c_int) -> c_int {
    let announce = || {
        check_events(events)?;
        // SAFETY: the caller's.
        let handle = unsafe { handle(lane) }?;
        if events & IN != 0 {
            // SAFETY: the caller's.
            unsafe { handle.reader() }.receiver().announce_sleep();
        }
        if events & OUT != 0 {
            // SAFETY: the caller's.
            unsafe { handle.writer() }.sender().announce_sleep();
        }
        Ok(0)
    };
    code(announce())
}

/// Takes the question back.
///
/// # Safety
/// `lane` is null or a handle; no other call of the directions in `events` runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_cancel_sleep(lane: *mut Handle, events: c_int) -> c_int {
    let cancel = || {
        check_events(events)?;
        // SAFETY: the caller's.
        let handle = unsafe { handle(lane) }?;
        if events & IN != 0 {
            // SAFETY: the caller's.
            unsafe { handle.reader() }.receiver().cancel_sleep();
        }
        if events & OUT != 0 {
            // SAFETY: the caller's.
            unsafe { handle.writer() }.sender().cancel_sleep();
        }
        Ok(0)
    };
    code(cancel())
}

/// Whether the peer must be rung for what was just read or written.
///
/// # Safety
/// `lane` is null or a handle; no other call of the directions in `events` runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_take_wake_request(lane: *mut Handle, events: c_int) -> c_int {
    let take = || {
        check_events(events)?;
        // SAFETY: the caller's.
        let handle = unsafe { handle(lane) }?;
        // SAFETY: the caller's.
        let after_read = events & IN != 0 && unsafe { handle.reader() }.receiver().take_wake_request();
        // SAFETY: the caller's.
        let after_write = events & OUT != 0 && unsafe { handle.writer() }.sender().take_wake_request();
        Ok(c_int::from(after_read || after_write))
    };
    code(take())
}

/// # Safety
/// `lane` is null or a handle that stays open for the call.
unsafe fn handle<'a>(lane: *mut Handle) -> Result<&'a Handle, Failure> {
    if lane.is_null() || !lane.is_aligned() {
        return Err(Failure::INVALID);
    }
    // SAFETY: not null, so a handle.
    Ok(unsafe { &*lane })
}

fn check_span<T>(pointer: *const T, len: usize) -> Result<(), Failure> {
    let is_span = !pointer.is_null() && isize::try_from(len).is_ok();
    if is_span { Ok(()) } else { Err(Failure::INVALID) }
}

fn check_some(len: usize) -> Result<(), Failure> {
    if len > 0 { Ok(()) } else { Err(Failure::INVALID) }
}

fn check_events(events: c_int) -> Result<(), Failure> {
    if events != 0 && events & !(IN | OUT) == 0 { Ok(()) } else { Err(Failure::INVALID) }
}
