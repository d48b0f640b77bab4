//! Socket options of the kernel: `getsockopt(2)` by raw system calls.

use crate::process::system::unit_or_error;
use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};

/// A socket option, by its level and name as in `setsockopt(2)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SocketOption {
    /// `SOL_SOCKET`, `IPPROTO_TCP`, ...
    pub level: i32,
    /// The name of the option within its level.
    pub name: i32,
}

/// Performs `getsockopt(2)`. Returns the number of bytes that the kernel wrote.
pub(crate) fn get_raw(socket: BorrowedFd<'_>, option: SocketOption, value: &mut [u8]) -> Result<usize, Errno> {
    let mut length = value.len() as libc::socklen_t;
    let number = socket.as_raw_fd();
    let pointer = value.as_mut_ptr();
    // SAFETY: `value` is writable for `length` bytes, and `length` is a local.
    let result = unsafe {
        crate::process::system::call!(libc::SYS_getsockopt, number, option.level, option.name, pointer, &raw mut length)
    };
    unit_or_error(result).map(|()| (length as usize).min(value.len()))
}
