//! Frames to an interface, many with one call.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use router::{Packet, Pool};
use rustix::net::sockopt;

use super::bind;
use crate::interface::InterfaceIndex;
use crate::system::{checked, set_option};

/// Frames of one call.
const FRAMES_MAX: usize = 64;
/// What the kernel may hold of frames that the interface has not sent.
const QUEUE_BYTES: usize = 8 << 20;

/// A socket that sends by the interface and hears nothing.
pub fn socket(interface: InterfaceIndex) -> io::Result<OwnedFd> {
    let socket = super::socket()?;
    // Straight to the driver: there is nothing to be gained from a queue behind ours.
    set_option(&socket, libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, &1)?;
    if sockopt::set_socket_send_buffer_size_force(&socket, QUEUE_BYTES).is_err() {
        sockopt::set_socket_send_buffer_size(&socket, QUEUE_BYTES)?;
    }
    bind(&socket, interface, 0)?;
    Ok(socket)
}

/// Sends from the front of `from` until all is sent or there is no room. What the interface refuses is freed, and
/// counted in `refused`. An error is one of the socket's.
pub fn all(socket: &OwnedFd, pool: &mut Pool, from: &mut VecDeque<Packet>, refused: &mut u64) -> io::Result<usize> {
    let before = from.len();
    while !from.is_empty() {
        let taken = match some(socket, pool, from) {
            Ok(sent) => sent,
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => break,
                Some(libc::ENODEV | libc::ENXIO | libc::EBADF) => return Err(error),
                // Down, its queue full, or a frame that is too long: the rest of the frames may do better.
                _ => {
                    *refused += 1;
                    1
                }
            },
        };
        from.drain(..taken).for_each(|packet| pool.free(packet));
    }
    Ok(before - from.len())
}

/// One call. How many were sent, at least 1.
fn some(socket: &OwnedFd, pool: &Pool, from: &VecDeque<Packet>) -> io::Result<usize> {
    let count = from.len().min(FRAMES_MAX);
    let mut pieces = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; FRAMES_MAX];
    for (piece, packet) in pieces.iter_mut().zip(from) {
        let bytes = pool.bytes(packet);
        *piece = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    }
    // SAFETY: zeroes are messages without address, pieces or control data.
    let mut messages: [libc::mmsghdr; FRAMES_MAX] = unsafe { std::mem::zeroed() };
    for (message, piece) in messages.iter_mut().zip(&mut pieces) {
        message.msg_hdr.msg_iov = piece;
        message.msg_hdr.msg_iovlen = 1;
    }
    // SAFETY: `count` messages are in the array, each with one piece that is a borrowed frame of the pool; the kernel
    // only reads the frames, and both arrays live until it is done.
    let sent =
        unsafe { libc::sendmmsg(socket.as_raw_fd(), messages.as_mut_ptr(), count as u32, libc::MSG_DONTWAIT as _) };
    checked(sent).map(|sent| sent as usize)
}
