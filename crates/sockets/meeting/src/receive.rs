//! Receiving from a peer that may send any descriptors, in any number.
//!
//! The last close of a socket with `SO_LINGER` waits for its data, for as long as the socket's sender has chosen. So
//! each descriptor that arrives loses that option before anything else is done with it (`setsockopt(2)` asks no file
//! system), and messages are received with room for as many descriptors as one can carry: the kernel closes those that
//! do not fit, as they are. That also happens if this process may not open as many.
//!
//! Since Linux 6.16 a socket can refuse descriptors (`SO_PASSRIGHTS`): a peer that sends some then gets `EPERM`. A
//! socket does so from the moment on at which no descriptor is awaited on it any more (`refuse_descriptors`). Those
//! that were sent earlier, and all of older kernels, are received and closed.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::{Errno, IoSliceMut};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, Shutdown, sockopt};

use crate::memory;
use crate::message::{Kind, MESSAGE_BYTES, Message};
use crate::reason::Reason;
use crate::system::{self, Descriptor};

/// Most descriptors of one message (the kernel's `SCM_MAX_FD`).
const RIGHTS_MAX: usize = 253;
/// More than the bytes of a message, to notice one that is longer.
const ROOM_BYTES: usize = MESSAGE_BYTES + 8;
/// `SO_PASSRIGHTS` (Linux 6.16, `asm-generic/socket.h`).
const SO_PASSRIGHTS: i32 = 83;

/// The result of an attempt to receive a message.
#[derive(Debug)]
pub enum Received {
    /// There is none yet.
    Nothing,
    /// The peer has hung up.
    Ended,
    /// A message, with what was passed: the memory of the peer always with a proposal or a *yes*, and nothing with a
    /// *no*.
    Message(Message, Passed),
}

/// The descriptors that come with a message.
#[derive(Debug, Default)]
pub struct Passed {
    /// The memory of the peer, checked by [`memory::check`], unless it is a [`Window`](crate::message::Window).
    pub memory: Option<Descriptor>,
    /// A socket for look-ups in the peer's network namespace, as far as the peer says.
    pub look_up: Option<Descriptor>,
}

/// Receives a message, without blocking, in one system call if there is no descriptor and four if there is one.
///
/// A message is sent in one piece and fits into an empty queue, so a part of one is malformed: there is no rest to wait
/// for.
///
/// # Errors
/// [`Reason::Version`], [`Reason::Malformed`], [`Reason::Descriptors`] if their number is not that of the message's
/// kind, [`Reason::Memory`]. All descriptors are closed then.
pub fn receive(socket: BorrowedFd<'_>) -> Result<Received, Reason> {
    let mut bytes = [0_u8; ROOM_BYTES];
    let (mut passed, mut count) = (Passed::default(), 0);
    let received = receive_bytes(socket, &mut bytes, &mut |descriptor| {
        count += 1;
        match &mut passed {
            Passed { memory: memory @ None, .. } => *memory = Some(descriptor),
            Passed { look_up: look_up @ None, .. } => *look_up = Some(descriptor),
            _ => discard(descriptor),
        }
    });
    let result = match received {
        Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Nothing),
        Err(errno) => Err(Reason::of_errno(errno)),
        Ok(Bytes { count: 0, .. }) => return Ok(Received::Ended),
        Ok(received) => parse(&bytes[..received.count], passed.memory.as_ref(), count, received.is_cut),
    };
    match result {
        Ok(message) => Ok(Received::Message(message, passed)),
        Err(reason) => {
            passed.memory.into_iter().chain(passed.look_up).for_each(discard);
            Err(reason)
        }
    }
}

/// Parses a message that has come with `count` descriptors, `first` first.
fn parse(bytes: &[u8], first: Option<&Descriptor>, count: usize, is_cut: bool) -> Result<Message, Reason> {
    let message = Message::parse(bytes)?;
    let expected = if matches!(message.kind, Kind::No(_)) { 0..=0 } else { 1..=2 };
    if is_cut || !expected.contains(&count) {
        return Err(Reason::Descriptors);
    }
    // Only who knows that the peer is a proxy uses a window, and checks it.
    let first = first.filter(|_| message.memory.window.is_none());
    first.map_or(Ok(()), |descriptor| memory::check(descriptor.as_fd(), message.memory.bytes))?;
    Ok(message)
}

/// What a receive has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bytes {
    /// Number of bytes.
    pub(crate) count: usize,
    /// This process could not receive all descriptors.
    pub(crate) is_cut: bool,
}

/// Receives bytes, without blocking. Each descriptor that comes is passed to `take`, without `SO_LINGER`.
#[inline(never)] // The control buffer of a kilobyte is on the stack of this function alone.
pub(crate) fn receive_bytes(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    take: &mut dyn FnMut(Descriptor),
) -> Result<Bytes, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(RIGHTS_MAX))];
    receive_with(socket, bytes, &mut space, take)
}

/// As [`receive_bytes`], with a control buffer.
#[inline(never)] // As above.
fn receive_with(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    space: &mut [MaybeUninit<u8>],
    take: &mut dyn FnMut(Descriptor),
) -> Result<Bytes, Errno> {
    let mut control = RecvAncillaryBuffer::new(space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
    for message in control.drain() {
        let RecvAncillaryMessage::ScmRights(descriptors) = message else { continue };
        for descriptor in descriptors.map(Descriptor::from) {
            // Fails for anything else than a socket, which is as good.
            let _ = sockopt::set_socket_linger(&descriptor, None);
            take(descriptor);
        }
    }
    Ok(Bytes { count: received.bytes, is_cut: received.flags.contains(ReturnFlags::CTRUNC) })
}

/// Closes a descriptor that a peer has passed, or a socket that it has connected, with whatever is unread in it. The
/// kernel closes what a socket's queue holds with the socket, so that is received first: it may be a socket with
/// `SO_LINGER`.
pub fn discard(descriptor: Descriptor) {
    // Nothing can be added to the queue from now on, so the loop ends. It recurses no further than the kernel allows
    // AF_UNIX sockets to be passed in each other's queues (`MAX_RECURSION_LEVEL`, 4).
    if rustix::net::shutdown(&descriptor, Shutdown::Both).is_ok() {
        let mut bytes = [0_u8; 256];
        while receive_bytes(descriptor.as_fd(), &mut bytes, &mut discard).is_ok_and(|received| received.count > 0) {}
    }
}

/// Makes the kernel refuse descriptors for a socket, where it can (Linux 6.16).
pub(crate) fn refuse_descriptors(socket: BorrowedFd<'_>) {
    let _ = system::set_option(socket, libc::SOL_SOCKET, SO_PASSRIGHTS, 0);
}
