//! Errors, and their conversion to the negative errno that C callers get.

use lane::Corrupt;
use libc::c_int;

/// An errno, positive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure(c_int);

impl Failure {
    /// An argument is invalid.
    pub const INVALID: Self = Self(libc::EINVAL);
    /// Nothing to read, or no room, now.
    pub const AGAIN: Self = Self(libc::EAGAIN);
    /// A write after the end of the stream.
    pub const PIPE: Self = Self(libc::EPIPE);
    /// The peer violated the protocol.
    pub const PROTOCOL: Self = Self(libc::EPROTO);
    /// The descriptor is not open.
    pub const DESCRIPTOR: Self = Self(libc::EBADF);

    /// Converts an errno from the kernel. 0 would mean success, so it becomes [`Failure::INVALID`].
    pub fn of_errno(errno: c_int) -> Self {
        if errno > 0 { Self(errno) } else { Self::INVALID }
    }
}

impl From<Corrupt> for Failure {
    fn from(_: Corrupt) -> Self {
        Self::PROTOCOL
    }
}

impl From<rustix::io::Errno> for Failure {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::of_errno(errno.raw_os_error())
    }
}

/// Returns a result as C expects it: the value, or the negative errno.
pub fn code(result: Result<c_int, Failure>) -> c_int {
    result.unwrap_or_else(|failure| -failure.0)
}

/// Returns a length as C expects it: the length, or the negative errno.
pub fn size(result: Result<usize, Failure>) -> isize {
    match result {
        // No span is longer than `isize::MAX`, so this does not truncate.
        Ok(len_bytes) => isize::try_from(len_bytes).unwrap_or(isize::MAX),
        Err(failure) => -(failure.0 as isize),
    }
}
