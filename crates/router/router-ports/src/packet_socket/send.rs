//! Sending of frames to an interface, many with one system call.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use router::{Packet, Pool};
use rustix::net::sockopt;

use super::bind;
use crate::interface::InterfaceIndex;
use crate::system::{checked, set_option};

/// The largest number of frames in one call.
const FRAMES_MAX: usize = 64;
/// The size of the kernel's queue of unsent frames.
const QUEUE_BYTES: usize = 8 << 20;

/// Opens a socket that sends to the interface and receives nothing.
pub fn socket(interface: InterfaceIndex) -> io::Result<OwnedFd> {
    let socket = super::socket()?;
    // Bypasses the queueing discipline: the router has its own queue.
    set_option(&socket, libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, &1)?;
    if sockopt::set_socket_send_buffer_size_force(&socket, QUEUE_BYTES).is_err() {
        sockopt::set_socket_send_buffer_size(&socket, QUEUE_BYTES)?;
    }
    bind(&socket, interface, 0)?;
    Ok(socket)
}

/// Sends from the front of `from` until all is sent or the socket has no room. Frames that the interface refuses are
/// freed, and counted in `refused`. Errors are those of the socket.
pub fn send_all(
    socket: &OwnedFd,
    pool: &mut Pool,
    from: &mut VecDeque<Packet>,
    refused: &mut u64,
) -> io::Result<usize> {
    let before = from.len();
    while !from.is_empty() {
        let done = match send_batch(socket, pool, from) {
            Ok(sent) => sent,
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => break,
                Some(libc::ENODEV | libc::ENXIO | libc::EBADF) => return Err(error),
                // The interface is down, its queue is full, or the frame is too long: the other frames may be accepted.
                _ => {
                    *refused += 1;
                    1
                }
            },
        };
        from.drain(..done).for_each(|packet| pool.free(packet));
    }
    Ok(before - from.len())
}

/// Makes one system call, and returns the number of sent frames, at least 1.
fn send_batch(socket: &OwnedFd, pool: &Pool, from: &VecDeque<Packet>) -> io::Result<usize> {
    let count = from.len().min(FRAMES_MAX);
    let mut iovecs = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; FRAMES_MAX];
    for (iovec_entry, packet) in iovecs.iter_mut().zip(from) {
        let bytes = pool.bytes(packet);
        *iovec_entry = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    }
    // SAFETY: an `mmsghdr` of zeroes is valid: a message without address, parts or control data.
    let mut messages: [libc::mmsghdr; FRAMES_MAX] = unsafe { std::mem::zeroed() };
    for (message, iovec_entry) in messages.iter_mut().zip(&mut iovecs) {
        message.msg_hdr.msg_iov = iovec_entry;
        message.msg_hdr.msg_iovlen = 1;
    }
    // SAFETY: the array has at least `count` messages, each with one `iovec` that refers to a frame borrowed from the
    // pool; the kernel only reads the frames, and both arrays live until the call returns.
    let sent =
        unsafe { libc::sendmmsg(socket.as_raw_fd(), messages.as_mut_ptr(), count as u32, libc::MSG_DONTWAIT as _) };
    checked(sent).map(|sent| sent as usize)
}
