//! Values of options: parsed, built, and copied from and to the memory of C callers.

use rustix::io::Errno;
use std::ffi::c_void;

/// The first bytes of a value in the memory of a C caller, with zeros behind it where it is shorter.
///
/// # Safety
/// `value` is null or readable for `length` bytes.
pub(super) unsafe fn head_of(value: *const c_void, length: usize) -> [u8; 4] {
    let mut head = [0; 4];
    if !value.is_null() {
        // SAFETY: the caller says that `length` bytes are readable, and there is room for four.
        unsafe { std::ptr::copy_nonoverlapping(value.cast::<u8>(), head.as_mut_ptr(), length.min(head.len())) };
    }
    head
}

/// Writes an answer as `getsockopt` does: cut to the caller's length, which then says how much was written.
///
/// # Errors
/// `FAULT` for null pointers, `INVAL` for a negative length.
///
/// # Safety
/// `length_inout` is null or readable and writable; `value` is null or writable for as many bytes as it says.
pub unsafe fn answer(bytes: &[u8], value: *mut c_void, length_inout: *mut libc::socklen_t) -> Result<(), Errno> {
    if length_inout.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: not null, and the caller says it is readable.
    let room = unsafe { length_inout.read_unaligned() };
    let written = (i32::try_from(room).map_err(|_| Errno::INVAL)? as usize).min(bytes.len());
    if value.is_null() && written > 0 {
        return Err(Errno::FAULT);
    }
    if written > 0 {
        // SAFETY: `written` is at most what the caller says is writable, and at most the length of `bytes`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast::<u8>(), written) };
    }
    // SAFETY: not null, and the caller says it is writable.
    unsafe { length_inout.write_unaligned(written as libc::socklen_t) };
    Ok(())
}

pub(super) fn parse_u32(value: &[u8]) -> Option<u32> {
    value.get(..4)?.try_into().ok().map(u32::from_ne_bytes)
}

/// The bytes of a `struct timeval` for a time-out, 0 for none.
pub fn timeval(timeout_ns: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&(timeout_ns / 1_000_000_000).to_ne_bytes());
    bytes[8..].copy_from_slice(&(timeout_ns % 1_000_000_000 / 1000).to_ne_bytes());
    bytes
}

/// The time-out in a `struct timeval`, 0 for none; `None` for bytes that are none.
pub fn parse_timeval_ns(value: &[u8]) -> Option<u64> {
    let word = |at: usize| value.get(at..at + 8)?.try_into().ok().map(i64::from_ne_bytes);
    let (seconds, micros) = (word(0)?, word(8)?);
    if !(0..1_000_000).contains(&micros) {
        return None;
    }
    match u64::try_from(seconds) {
        Ok(seconds) => Some(seconds.saturating_mul(1_000_000_000).saturating_add(micros as u64 * 1000)),
        // Linux takes a time before now for no time at all, which is not the same as none.
        Err(_) => Some(1),
    }
}

/// The bytes of a `struct linger`.
#[cfg(test)]
pub(super) fn linger(seconds: Option<u32>) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&i32::from(seconds.is_some()).to_ne_bytes());
    bytes[4..].copy_from_slice(&seconds.unwrap_or(0).to_ne_bytes());
    bytes
}

/// The time in a `struct linger`, if it is on; `None` for bytes that are none.
pub(super) fn parse_linger(value: &[u8]) -> Option<Option<u32>> {
    let word = |at: usize| value.get(at..at + 4)?.try_into().ok().map(i32::from_ne_bytes);
    let (on, seconds) = (word(0)?, word(4)?);
    Some((on != 0).then(|| u32::try_from(seconds).unwrap_or(u32::MAX)))
}
