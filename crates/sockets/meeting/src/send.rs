//! Sending messages, and what an endpoint gives with them.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::message::{MESSAGE_BYTES, Memory, Message};
use crate::reason::Reason;

/// The memory that an endpoint passes to its peer.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// A descriptor of a memfd that is sealed against shrinking. The peer can open it again with the rights of its
    /// mode, so one that the peer must not write is opened read-only, of a memfd with mode 0400.
    pub descriptor: BorrowedFd<'a>,
    /// Its size, and the secret of the lane in it.
    pub memory: Memory,
}

/// Sends a message with up to two descriptors, in one system call and without blocking.
///
/// # Errors
/// [`Reason::Gone`], or that of another error of `sendmsg(2)`.
pub(crate) fn send(socket: BorrowedFd<'_>, message: &Message, descriptors: &[BorrowedFd<'_>]) -> Result<(), Reason> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Reason::System);
    }
    let bytes = message.encode();
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags) {
        Ok(MESSAGE_BYTES) => Ok(()),
        Ok(_) => Err(Reason::System),
        Err(errno) => Err(Reason::of_errno(errno)),
    }
}
