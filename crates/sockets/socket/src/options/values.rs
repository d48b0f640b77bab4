//! Option values: parsing, encoding, and copies from and to the memory of C callers.

use crate::process::memory;
use rustix::io::Errno;
use std::ffi::c_void;

/// Returns the first four bytes of a value in the memory of a C caller, padded with zeros.
///
/// # Safety
/// `value` is null or readable for `length` bytes.
pub(super) unsafe fn head_of(value: *const c_void, length: usize) -> [u8; 4] {
    let mut head = [0; 4];
    if memory::are_readable(value.cast::<u8>(), length.min(head.len())) {
        // SAFETY: the value is readable, as was just checked, and `head` has room for four.
        unsafe { std::ptr::copy_nonoverlapping(value.cast::<u8>(), head.as_mut_ptr(), length.min(head.len())) };
    }
    head
}

/// Writes a value as `getsockopt` does: truncated to the caller's length, which is set to the number of bytes written.
///
/// # Errors
/// `FAULT` for null pointers, `INVAL` for a negative length.
///
/// # Safety
/// `length_inout` is null or readable and writable; `value` is null or writable for the number of bytes in it.
pub unsafe fn write_value(bytes: &[u8], value: *mut c_void, length_inout: *mut libc::socklen_t) -> Result<(), Errno> {
    memory::check_writable(length_inout)?;
    // SAFETY: `length_inout` is not null, so that it is readable by the contract of this function.
    let room = unsafe { length_inout.read_unaligned() };
    let written = (i32::try_from(room).map_err(|_| Errno::INVAL)? as usize).min(bytes.len());
    if !memory::are_writable(value.cast::<u8>(), written) {
        return Err(Errno::FAULT);
    }
    if written > 0 {
        // SAFETY: `written` is at most the length that the contract says is writable, and at most the length of
        // `bytes`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast::<u8>(), written) };
    }
    // SAFETY: `length_inout` is not null, so that it is writable by the contract of this function.
    unsafe { length_inout.write_unaligned(written as libc::socklen_t) };
    Ok(())
}

pub(super) fn parse_u32(value: &[u8]) -> Option<u32> {
    value.get(..4)?.try_into().ok().map(u32::from_ne_bytes)
}

/// Encodes a time-out as a `struct timeval`; 0 for none.
pub fn timeval(timeout_ns: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&(timeout_ns / 1_000_000_000).to_ne_bytes());
    bytes[8..].copy_from_slice(&(timeout_ns % 1_000_000_000 / 1000).to_ne_bytes());
    bytes
}

/// Parses the time-out in a `struct timeval`; 0 for none. Returns `None` for bytes that are not one.
pub fn parse_timeval_ns(value: &[u8]) -> Option<u64> {
    let word = |at: usize| value.get(at..at + 8)?.try_into().ok().map(i64::from_ne_bytes);
    let (seconds, micros) = (word(0)?, word(8)?);
    if !(0..1_000_000).contains(&micros) {
        return None;
    }
    match u64::try_from(seconds) {
        Ok(seconds) => Some(seconds.saturating_mul(1_000_000_000).saturating_add(micros as u64 * 1000)),
        // For Linux a negative time is a time-out that expires at once, not the absence of a time-out.
        Err(_) => Some(1),
    }
}

/// Encodes a `struct linger`.
#[cfg(test)]
pub(super) fn linger(seconds: Option<u32>) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&i32::from(seconds.is_some()).to_ne_bytes());
    bytes[4..].copy_from_slice(&seconds.unwrap_or(0).to_ne_bytes());
    bytes
}

/// Parses the time in a `struct linger`, `Some(None)` if it is off. Returns `None` for bytes that are not one.
pub(super) fn parse_linger(value: &[u8]) -> Option<Option<u32>> {
    let word = |at: usize| value.get(at..at + 4)?.try_into().ok().map(i32::from_ne_bytes);
    let (on, seconds) = (word(0)?, word(4)?);
    Some((on != 0).then(|| u32::try_from(seconds).unwrap_or(u32::MAX)))
}
