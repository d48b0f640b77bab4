//! Descriptors that a peer has passed, which may be of any kind and number.
//!
//! The last close of a socket with `SO_LINGER` waits for its data, for as long as the sender of the socket has chosen.
//! So each socket that arrives loses that option before anything else is done with it, and messages are received with
//! room for as many descriptors as one can carry: the kernel closes those that do not fit, as they are.
//! [`discard`] closes what is not wanted.

#![allow(unsafe_code)] // Descriptors in the control buffer of a received message.

#[cfg(test)]
mod tests;

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use libc::iovec;
use rustix::io::Errno;
use rustix::net::sockopt;

use super::hidden::close;
use crate::process::system::{self, call};

/// Most descriptors of one message (the kernel's `SCM_MAX_FD`).
const RIGHTS_MAX: usize = 253;
/// Words of a control buffer with room for [`RIGHTS_MAX`] descriptors after the header of 16 bytes.
const CONTROL_WORDS: usize = (16 + RIGHTS_MAX * size_of::<RawFd>()).div_ceil(size_of::<u64>());

/// The result of a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Received {
    /// Bytes that were received.
    pub bytes: usize,
    /// Descriptors came with the last byte, even if this process could not receive any.
    pub has_rights: bool,
    /// This process could not receive all descriptors.
    pub is_cut: bool,
}

/// Receives from an AF_UNIX socket, without blocking. Each descriptor that comes is passed to `take`, without
/// `SO_LINGER`.
///
/// # Errors
/// Those of `recvmsg(2)`.
///
/// # Safety
/// Every span is writable for its length.
pub(crate) unsafe fn receive(
    fd: RawFd,
    spans: &[iovec],
    flags: i32,
    mut take: impl FnMut(OwnedFd),
) -> Result<Received, Errno> {
    // SAFETY: every span is writable for its length, by this function's contract.
    unsafe { receive_into(fd, spans, flags, &mut take) }
}

/// Does the work of [`receive`], once for all kinds of `take`.
///
/// # Safety
/// Every span is writable for its length.
#[inline(never)] // The control buffer is on the stack of this function alone.
unsafe fn receive_into(
    fd: RawFd,
    spans: &[iovec],
    flags: i32,
    take: &mut dyn FnMut(OwnedFd),
) -> Result<Received, Errno> {
    let mut control = [const { MaybeUninit::<u64>::uninit() }; CONTROL_WORDS];
    // SAFETY: all zeros are a valid, empty message; musl's has padding that a struct literal cannot name.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = spans.as_ptr().cast_mut();
    message.msg_iovlen = spans.len() as _;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    let flags = flags | libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the message refers to spans that are writable, by this function's contract, and to a local control
    // buffer.
    let received = unsafe { call!(libc::SYS_recvmsg, fd, &raw mut message, flags) };
    let bytes = system::count_or_error(received)?;
    let is_cut = message.msg_flags & libc::MSG_CTRUNC != 0;
    // SAFETY: the kernel has filled the control buffer and set its length in the message.
    let came = unsafe { take_descriptors(&message, take) };
    Ok(Received { bytes, has_rights: is_cut || came, is_cut })
}

/// Passes the descriptors of a received message to `take`. Returns whether there were any.
///
/// # Safety
/// The kernel has filled the message's control buffer, and its descriptors have no owner yet.
#[inline(never)]
unsafe fn take_descriptors(message: &libc::msghdr, take: &mut dyn FnMut(OwnedFd)) -> bool {
    let mut has_rights = false;
    // SAFETY: the kernel has filled the control buffer, by this function's contract.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: `header` is not null, so it refers to a complete header in the control buffer.
        let (level, kind, len) = unsafe { ((*header).cmsg_level, (*header).cmsg_type, (*header).cmsg_len as usize) };
        if (level, kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: `CMSG_LEN` only computes.
            let count = (len - unsafe { libc::CMSG_LEN(0) } as usize) / size_of::<RawFd>();
            for index in 0..count {
                // SAFETY: the data are `count` descriptors that nothing owns yet, by this function's contract.
                let one = unsafe {
                    OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().add(index).read_unaligned())
                };
                disable_linger(one.as_fd());
                take(one);
            }
            has_rights = true;
        }
        // SAFETY: the present header is complete, and the macro stays inside the control buffer.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
    has_rights
}

/// Makes sure that the close of a descriptor does not wait for data of a socket. No effect on other files.
fn disable_linger(fd: BorrowedFd<'_>) {
    let _ = sockopt::set_socket_linger(fd, None);
}
/// Closes a descriptor that a peer has passed, or a socket that it has connected, with whatever is unread in it. The
/// kernel closes what a socket's queue holds with the socket, so that is received first: it may be another socket.
pub fn discard(fd: OwnedFd) {
    // Nothing can be added to the queue from now on, so the loop ends. It recurses no further than the kernel allows
    // AF_UNIX sockets to be passed in each other's queues (`MAX_RECURSION_LEVEL`, 4).
    if rustix::net::shutdown(&fd, rustix::net::Shutdown::Both).is_ok() {
        let mut bytes = [0_u8; 256];
        let spans = [iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }];
        // SAFETY: the only span is a local array.
        while unsafe { receive(fd.as_raw_fd(), &spans, 0, discard) }.is_ok_and(|received| received.bytes > 0) {}
    }
    close(fd);
}
