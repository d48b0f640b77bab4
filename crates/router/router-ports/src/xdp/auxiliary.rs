//! Auxiliary data of received frames: the VLAN tag that the kernel has removed.

use std::io;
use std::mem::{MaybeUninit, size_of, zeroed};
use std::os::fd::{AsFd, AsRawFd};

use crate::system::set_option;

/// A buffer for one control message, with the alignment of its header.
#[repr(C)]
union ControlBuffer {
    _header: libc::cmsghdr,
    bytes: [u8; 64],
}

/// Enables auxiliary data on the socket.
pub fn enable(socket: impl AsFd) -> io::Result<()> {
    set_option(socket, libc::SOL_PACKET, libc::PACKET_AUXDATA, &1)
}

/// Receives a frame without waiting. Returns its length, which may exceed the buffer, and the VLAN tag that was removed
/// from it.
pub fn receive(socket: impl AsFd, into: &mut [u8]) -> io::Result<(usize, Option<[u8; 4]>)> {
    let mut control = MaybeUninit::<ControlBuffer>::zeroed();
    let mut part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: a `msghdr` of zeroes is valid: a message without a name, parts and control messages.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of::<ControlBuffer>() as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
    // SAFETY: the buffers for the frame and for control messages are writable for the lengths in the message, and live
    // during the call.
    let bytes = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, flags) };
    if bytes < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((bytes as usize, tag(&message)))
}

/// Returns the VLAN tag in the control messages. `message` was filled in by `recvmsg`, and its buffer is alive.
fn tag(message: &libc::msghdr) -> Option<[u8; 4]> {
    // SAFETY: the kernel has written complete control messages and their total length; the macro returns the first one,
    // or null if there is none.
    let header = unsafe { libc::CMSG_FIRSTHDR(message) };
    let bytes = size_of::<libc::tpacket_auxdata>();
    // SAFETY: the pointer is null or refers to a control message header in the live, aligned buffer.
    let header = unsafe { header.as_ref() }?;
    // SAFETY: `CMSG_LEN` only computes a length.
    let is_whole = header.cmsg_len as usize >= unsafe { libc::CMSG_LEN(bytes as u32) } as usize;
    if (header.cmsg_level, header.cmsg_type) != (libc::SOL_PACKET, libc::PACKET_AUXDATA) || !is_whole {
        return None;
    }
    // SAFETY: type and length show that the message contains a complete `tpacket_auxdata`, which consists of integers;
    // the read is unaligned.
    let data = unsafe { libc::CMSG_DATA(header).cast::<libc::tpacket_auxdata>().read_unaligned() };
    crate::packet_socket::tag(data.tp_status, data.tp_vlan_tpid, data.tp_vlan_tci)
}
