//! System calls that no library has: socket options and controls whose arguments are plain C structures.

use std::ffi::c_int;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd};

/// Structures of which every pattern of bits is a value, and that hold no pointer into memory that may go.
///
/// # Safety
/// The type has no invalid patterns. Where the kernel follows a pointer in it, who sets that pointer answers for it.
pub(crate) unsafe trait Plain: Copy {}

// SAFETY: a number.
unsafe impl Plain for c_int {}
// SAFETY: numbers.
unsafe impl Plain for libc::tpacket_req {}
// SAFETY: numbers and one pointer; `packet_socket::filter` answers for that.
unsafe impl Plain for libc::sock_fprog {}
// SAFETY: two numbers.
unsafe impl Plain for [u32; 2] {}

pub(crate) fn set_option<T: Plain>(fd: impl AsFd, level: c_int, option: c_int, value: &T) -> io::Result<()> {
    let bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` is readable for `bytes`, as `T` is a plain structure, during the call.
    let result =
        unsafe { libc::setsockopt(fd.as_fd().as_raw_fd(), level, option, std::ptr::from_ref(value).cast(), bytes) };
    checked(result).map(|_| ())
}

/// What the kernel does not fill in is zero.
pub(crate) fn option<T: Plain>(fd: impl AsFd, level: c_int, option: c_int) -> io::Result<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` is writable for `bytes` during the call.
    let result =
        unsafe { libc::getsockopt(fd.as_fd().as_raw_fd(), level, option, value.as_mut_ptr().cast(), &raw mut bytes) };
    checked(result)?;
    // SAFETY: zeroed, or written by the kernel; every pattern is a value of a plain type.
    Ok(unsafe { value.assume_init() })
}

/// The result of a system call that is negative on failure.
pub(crate) fn checked(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
