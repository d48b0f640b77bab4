//! What a C caller gets instead of an error: a negative errno.

use lane::Corrupt;
use libc::c_int;

/// An errno, positive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure(c_int);

impl Failure {
    /// An argument is wrong.
    pub const INVALID: Self = Self(libc::EINVAL);
    /// Not now.
    pub const AGAIN: Self = Self(libc::EAGAIN);
    /// Written after the end.
    pub const PIPE: Self = Self(libc::EPIPE);
    /// The peer breaks the protocol.
    pub const PROTOCOL: Self = Self(libc::EPROTO);
    /// Not a descriptor.
    pub const DESCRIPTOR: Self = Self(libc::EBADF);

    /// What the kernel said; never zero, which would pass for success.
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

/// The answer as C has it.
pub fn code(result: Result<c_int, Failure>) -> c_int {
    result.unwrap_or_else(|failure| -failure.0)
}

/// A length, or why there is none, as C has it.
pub fn size(result: Result<usize, Failure>) -> isize {
    match result {
        // No span is longer than `isize::MAX`.
        Ok(len_bytes) => isize::try_from(len_bytes).unwrap_or(isize::MAX),
        Err(failure) => -(failure.0 as isize),
    }
}
