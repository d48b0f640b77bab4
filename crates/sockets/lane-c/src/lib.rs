//! The C interface of lanes. `include/crosslane_lane.h` documents each function.
//!
//! Every argument is checked before it is used, and nothing unwinds into C: a function that fails returns a negative
//! errno.

#![allow(unsafe_code)] // C passes raw pointers.

mod error;
mod handle;
mod segment;

use error::{Failure, code, size};
pub use handle::Handle;
use handle::{IN, OUT};
use libc::c_int;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::time::Duration;

/// Creates a pair; returns its descriptor.
#[unsafe(no_mangle)]
pub extern "C" fn crosslane_lane_create(ring_bytes: usize) -> c_int {
    code(segment::create(ring_bytes).map(IntoRawFd::into_raw_fd))
}

/// Attaches to one side of a pair.
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
        // SAFETY: `memfd` is not negative. The borrow ends with this call, and if the descriptor is not open, the
        // system calls that use it fail with EBADF.
        let handle = Handle::attach(unsafe { BorrowedFd::borrow_raw(memfd) }, side)?;
        // SAFETY: `lane` is not null, as checked above, and then writable, by this function's contract.
        unsafe { lane.write(Box::into_raw(Box::new(handle))) };
        Ok(0)
    };
    code(attach())
}

/// Destroys a handle.
///
/// # Safety
/// `lane` is null or a live handle that no thread uses during or after this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_close(lane: *mut Handle) -> c_int {
    if lane.is_null() {
        return code(Err(Failure::INVALID));
    }
    // SAFETY: a handle comes from `Box::into_raw` in `crosslane_lane_attach`, and this is its last use, by this
    // function's contract.
    drop(unsafe { Box::from_raw(lane) });
    0
}

/// Copies bytes into the lane.
///
/// # Safety
/// `lane` is null or a live handle; `bytes` is null or readable for `len`, outside the pair's memory; no other thread
/// is in a writing call of the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_write(lane: *mut Handle, bytes: *const u8, len: usize) -> isize {
    let write = || {
        check_span(bytes, len)?;
        // SAFETY: `lane` is null or a live handle, and no other thread is in a writing call of it, by this function's
        // contract; `bytes` is not null, so readable for `len` and outside the pair's memory.
        unsafe { handle(lane)?.writer().write(bytes, len) }
    };
    size(write())
}

/// Copies bytes out of the lane.
///
/// # Safety
/// `lane` is null or a live handle; `bytes` is null or writable for `len`, outside the pair's memory; no other thread
/// is in a reading call of the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_read(lane: *mut Handle, bytes: *mut u8, len: usize) -> isize {
    let read = || {
        check_span(bytes, len)?;
        check_some(len)?;
        // SAFETY: `lane` is null or a live handle, and no other thread is in a reading call of it, by this function's
        // contract; `bytes` is not null, so writable for `len` and outside the pair's memory.
        unsafe { handle(lane)?.reader().read(bytes, len) }
    };
    size(read())
}

/// Reserves room to be written in place.
///
/// # Safety
/// `lane` is null or a live handle; `at` is null or writable; no other thread is in a writing call of the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_reserve(lane: *mut Handle, len_max: usize, at: *mut *mut u8) -> isize {
    let reserve = || {
        check_span(at, len_max)?;
        check_some(len_max)?;
        // SAFETY: `lane` is null or a live handle, and no other thread is in a writing call of it, by this function's
        // contract.
        let (pointer, len_bytes) = unsafe { handle(lane)?.writer() }.reserve(len_max)?;
        // SAFETY: `at` is not null, as checked above, and then writable, by this function's contract.
        unsafe { at.write(pointer) };
        Ok(len_bytes)
    };
    size(reserve())
}

/// Publishes bytes that were written in place.
///
/// # Safety
/// `lane` is null or a live handle; no other thread is in a writing call of the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_commit(lane: *mut Handle, len: usize) -> c_int {
    // SAFETY: `lane` is null or a live handle, and no other thread is in a writing call of it, by this function's
    // contract.
    let commit = || unsafe { handle(lane)?.writer() }.commit(len).map(|()| 0);
    code(commit())
}

/// Returns the next unread bytes in place.
///
/// # Safety
/// `lane` is null or a live handle; `at` is null or writable; no other thread is in a reading call of the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_peek(lane: *mut Handle, at: *mut *const u8) -> isize {
    let peek = || {
        if at.is_null() {
            return Err(Failure::INVALID);
        }
        // SAFETY: `lane` is null or a live handle, and no other thread is in a reading call of it, by this function's
        // contract.
        let (pointer, len_bytes) = unsafe { handle(lane)?.reader() }.peek()?;
        // SAFETY: `at` is not null, as checked above, and then writable, by this function's contract.
        unsafe { at.write(pointer) };
        Ok(len_bytes)
    };
    size(peek())
}

/// Consumes bytes that were read in place.
///
/// # Safety
/// `lane` is null or a live handle; no other thread is in a reading call of the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_consume(lane: *mut Handle, len: usize) -> c_int {
    // SAFETY: `lane` is null or a live handle, and no other thread is in a reading call of it, by this function's
    // contract.
    let consume = || unsafe { handle(lane)?.reader() }.consume(len).map(|()| 0);
    code(consume())
}

/// Returns the number of unread bytes.
///
/// # Safety
/// `lane` is null or a live handle; no other thread is in a reading call of the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_unread(lane: *mut Handle) -> isize {
    // SAFETY: `lane` is null or a live handle, and no other thread is in a reading call of it, by this function's
    // contract.
    let unread = || unsafe { handle(lane)?.reader() }.unread();
    size(unread())
}

/// Marks the end of the stream.
///
/// # Safety
/// `lane` is null or a live handle; no other thread is in a writing call of the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_finish(lane: *mut Handle) -> c_int {
    let finish = || {
        // SAFETY: `lane` is null or a live handle, and no other thread is in a writing call of it, by this function's
        // contract.
        unsafe { handle(lane)?.writer() }.finish();
        Ok(0)
    };
    code(finish())
}

/// Returns which of the events are ready.
///
/// # Safety
/// `lane` is null or a live handle; no other thread is in a call of the handle in the directions of `events`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_ready(lane: *mut Handle, events: c_int) -> c_int {
    let ready = || {
        check_events(events)?;
        // SAFETY: `lane` is null or a live handle, and no other thread is in a call of the directions in `events`, by
        // this function's contract.
        unsafe { handle(lane)?.ready(events) }
    };
    code(ready())
}

/// Waits until one of the events is ready.
///
/// # Safety
/// `lane` is null or a live handle; no other thread is in a call of the handle in the directions of `events`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_wait(lane: *mut Handle, events: c_int, timeout_ms: c_int) -> c_int {
    let wait = || {
        check_events(events)?;
        let limit = match timeout_ms {
            -1 => None,
            _ => Some(Duration::from_millis(u64::try_from(timeout_ms).map_err(|_| Failure::INVALID)?)),
        };
        // SAFETY: `lane` is null or a live handle, and no other thread is in a call of the directions in `events`, by
        // this function's contract.
        unsafe { handle(lane)?.wait(events, limit) }
    };
    code(wait())
}

/// Asks the peer to ring the doorbell.
///
/// # Safety
/// `lane` is null or a live handle; no other thread is in a call of the handle in the directions of `events`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_announce_sleep(lane: *mut Handle, events: c_int) -> c_int {
    let announce = || {
        check_events(events)?;
        // SAFETY: `lane` is null or a live handle, which stays open for this call, by this function's contract.
        let handle = unsafe { handle(lane) }?;
        if events & IN != 0 {
            // SAFETY: no other thread is in a reading call of the handle, by this function's contract, because `events`
            // includes `IN`.
            unsafe { handle.reader() }.receiver().announce_sleep();
        }
        if events & OUT != 0 {
            // SAFETY: no other thread is in a writing call of the handle, by this function's contract, because `events`
            // includes `OUT`.
            unsafe { handle.writer() }.sender().announce_sleep();
        }
        Ok(0)
    };
    code(announce())
}

/// Cancels `crosslane_lane_announce_sleep`.
///
/// # Safety
/// `lane` is null or a live handle; no other thread is in a call of the handle in the directions of `events`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_cancel_sleep(lane: *mut Handle, events: c_int) -> c_int {
    let cancel = || {
        check_events(events)?;
        // SAFETY: `lane` is null or a live handle, which stays open for this call, by this function's contract.
        let handle = unsafe { handle(lane) }?;
        if events & IN != 0 {
            // SAFETY: no other thread is in a reading call of the handle, by this function's contract, because `events`
            // includes `IN`.
            unsafe { handle.reader() }.receiver().cancel_sleep();
        }
        if events & OUT != 0 {
            // SAFETY: no other thread is in a writing call of the handle, by this function's contract, because `events`
            // includes `OUT`.
            unsafe { handle.writer() }.sender().cancel_sleep();
        }
        Ok(0)
    };
    code(cancel())
}

/// Returns whether the peer's doorbell must be rung after a read or a write.
///
/// # Safety
/// `lane` is null or a live handle; no other thread is in a call of the handle in the directions of `events`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn crosslane_lane_take_wake_request(lane: *mut Handle, events: c_int) -> c_int {
    let take = || {
        check_events(events)?;
        // SAFETY: `lane` is null or a live handle, which stays open for this call, by this function's contract.
        let handle = unsafe { handle(lane) }?;
        // SAFETY: no other thread is in a reading call of the handle, by this function's contract, where `events`
        // includes `IN`.
        let after_read = events & IN != 0 && unsafe { handle.reader() }.receiver().take_wake_request();
        // SAFETY: no other thread is in a writing call of the handle, by this function's contract, where `events`
        // includes `OUT`.
        let after_write = events & OUT != 0 && unsafe { handle.writer() }.sender().take_wake_request();
        Ok(c_int::from(after_read || after_write))
    };
    code(take())
}

/// Returns the handle behind a pointer from C.
///
/// # Safety
/// `lane` is null or a live handle that stays open for the caller's call.
unsafe fn handle<'a>(lane: *mut Handle) -> Result<&'a Handle, Failure> {
    if lane.is_null() || !lane.is_aligned() {
        return Err(Failure::INVALID);
    }
    // SAFETY: `lane` is not null, so it is a live handle from `Box::into_raw`, by this function's contract. Only shared
    // references to it exist: its halves are in cells.
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
