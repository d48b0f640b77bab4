//! What the kernel says of a frame beside it: the VLAN tag that it has taken out.

use std::io;
use std::mem::{MaybeUninit, size_of, zeroed};
use std::os::fd::{AsFd, AsRawFd};

use crate::system::set_option;

/// Room for one control message, aligned as its header is.
#[repr(C)]
union Room {
    _header: libc::cmsghdr,
    bytes: [u8; 64],
}

/// Has the kernel say it from now on.
pub fn ask_for(socket: impl AsFd) -> io::Result<()> {
    set_option(socket, libc::SOL_PACKET, libc::PACKET_AUXDATA, &1)
}

/// Takes a frame without waiting: how long it is, which may be more than there was room for, and the tag that was
/// taken out of it.
pub fn receive(socket: impl AsFd, into: &mut [u8]) -> io::Result<(usize, Option<[u8; 4]>)> {
    let mut room = MaybeUninit::<Room>::zeroed();
    let mut part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: zeroes are a message without a name, parts and control messages.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = room.as_mut_ptr().cast();
    message.msg_controllen = size_of::<Room>() as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
    // SAFETY: the message's part and its room for control messages are writable for as long as is said, and alive.
    let bytes = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, flags) };
    if bytes < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((bytes as usize, tag(&message)))
}

/// `message` was filled in by `recvmsg`, and its room is alive.
fn tag(message: &libc::msghdr) -> Option<[u8; 4]> {
    // SAFETY: the kernel has written whole control messages into the room, and how many bytes they have; the macro
    // gives the first one, or null where there is none.
    let header = unsafe { libc::CMSG_FIRSTHDR(message) };
    let bytes = size_of::<libc::tpacket_auxdata>();
    // SAFETY: null, or a header in the room.
    let header = unsafe { header.as_ref() }?;
    // SAFETY: arithmetic.
    let is_whole = header.cmsg_len as usize >= unsafe { libc::CMSG_LEN(bytes as u32) } as usize;
    if (header.cmsg_level, header.cmsg_type) != (libc::SOL_PACKET, libc::PACKET_AUXDATA) || !is_whole {
        return None;
    }
    // SAFETY: the message is one of these, whole, by its type and length; they are numbers.
    let data = unsafe { libc::CMSG_DATA(header).cast::<libc::tpacket_auxdata>().read_unaligned() };
    crate::packet_socket::tag(data.tp_status, data.tp_vlan_tpid, data.tp_vlan_tci)
}
