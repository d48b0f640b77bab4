//! System calls that no library offers: socket options whose arguments are plain C structures.

use std::ffi::c_int;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd};

/// C structures for which every bit pattern is a valid value.
///
/// # Safety
/// Every bit pattern is a valid value of the type. If the kernel follows a pointer in it, the code that sets the
/// pointer ensures that it is valid.
pub(crate) unsafe trait Plain: Copy {}

// SAFETY: every bit pattern is a valid integer.
unsafe impl Plain for c_int {}
// SAFETY: every bit pattern is a valid integer.
unsafe impl Plain for u64 {}
// SAFETY: all fields are integers, for which every bit pattern is valid.
unsafe impl Plain for libc::tpacket_req {}
// SAFETY: the fields are integers and one pointer; `packet_socket::set_filter` is the only code that sets the pointer,
// to instructions that are `'static`.
unsafe impl Plain for libc::sock_fprog {}
// SAFETY: both elements are integers, for which every bit pattern is valid.
unsafe impl Plain for [u32; 2] {}

pub(crate) fn set_option<T: Plain>(fd: impl AsFd, level: c_int, option: c_int, value: &T) -> io::Result<()> {
    let bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` is borrowed during the call and `bytes` is its length.
    let result =
        unsafe { libc::setsockopt(fd.as_fd().as_raw_fd(), level, option, std::ptr::from_ref(value).cast(), bytes) };
    checked(result).map(|_| ())
}

/// Returns the value of a socket option; bytes that the kernel does not fill in are zero.
pub(crate) fn option<T: Plain>(fd: impl AsFd, level: c_int, option: c_int) -> io::Result<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` is exclusively owned by this function and has room for `bytes` bytes.
    let result =
        unsafe { libc::getsockopt(fd.as_fd().as_raw_fd(), level, option, value.as_mut_ptr().cast(), &raw mut bytes) };
    checked(result)?;
    // SAFETY: all bytes are initialized, with zeroes or by the kernel, and every bit pattern is a valid value of a
    // `Plain` type.
    Ok(unsafe { value.assume_init() })
}

/// Calls `getsockopt` with an option that reads a request from the buffer and writes the answer to it. Returns the
/// number of bytes of the answer.
pub(crate) fn exchange(fd: impl AsFd, level: c_int, option: c_int, buffer: &mut [u8]) -> io::Result<usize> {
    let mut bytes = libc::socklen_t::try_from(buffer.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: `buffer` is exclusively borrowed during the call and has `bytes` initialized bytes.
    let result =
        unsafe { libc::getsockopt(fd.as_fd().as_raw_fd(), level, option, buffer.as_mut_ptr().cast(), &raw mut bytes) };
    checked(result)?;
    Ok((bytes as usize).min(buffer.len()))
}

/// Converts the result of a system call that is negative on failure.
pub(crate) fn checked(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
