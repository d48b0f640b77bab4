//! The pair of AF_UNIX sockets by which two endpoints that have met wake each other, and see each other's end.
//!
//! A ring is one byte. A reader that finds the bell readable drains it before it sleeps again; undrained, it becomes
//! full after a few hundred rings. A full bell is as good as one with another ring in it: its reader has not woken yet.
//! The kernel hangs up when the last process that holds a side has closed it.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::counts::Role;
use crate::message::{Kind, MESSAGE_BYTES, Message};
use crate::reason::Reason;
use crate::receive::{discard, receive_bytes};
use crate::send::send;
use crate::system::Descriptor;

/// The byte of a ring. A reader accepts any.
const RING: [u8; 1] = [1];
/// Bytes of one receive. A receive of fewer has emptied the bell.
const DRAIN_BYTES: usize = MESSAGE_BYTES;
/// Maximum number of receives of one [`drain`]: a peer that keeps ringing does not keep this process busy.
const DRAINS_MAX: usize = 64;

/// What [`drain`] has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// The bell is empty, or its peer rings faster than this process receives.
    Empty,
    /// The peer has hung up, or has to be taken for one that has.
    HungUp,
    /// The peer cannot use what the two have agreed on, and hangs up.
    Refused(Reason),
}

/// Rings a bell, without blocking, in one system call.
///
/// # Errors
/// [`Reason::Gone`] if the peer has hung up.
pub fn ring(bell: BorrowedFd<'_>) -> Result<(), Reason> {
    match rustix::net::send(bell, &RING, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
        Err(errno) => Err(Reason::of_errno(errno)),
    }
}

/// Removes the rings from a bell, without blocking, in one system call for up to 127 rings. A peer that sends
/// descriptors with them, which are closed, counts as one that has hung up.
pub fn drain(bell: BorrowedFd<'_>) -> Drained {
    take_rings(bell).0
}

/// As [`drain`]. Also returns whether there was a ring.
pub fn take_rings(bell: BorrowedFd<'_>) -> (Drained, bool) {
    let mut bytes = [0_u8; DRAIN_BYTES];
    let mut has_rung = false;
    for _ in 0..DRAINS_MAX {
        let mut has_descriptors = false;
        let received = receive_bytes(bell, &mut bytes, &mut |descriptor| {
            has_descriptors = true;
            discard(descriptor);
        });
        match received {
            Ok(_) if has_descriptors => return (Drained::HungUp, has_rung),
            Ok(received) if received.count == DRAIN_BYTES => match Message::parse(&bytes).map(|message| message.kind) {
                Ok(Kind::No(reason)) => return (Drained::Refused(reason), has_rung),
                _ => has_rung = true,
            },
            Ok(received) if received.count == 0 => return (Drained::HungUp, has_rung),
            Ok(_) => return (Drained::Empty, true),
            Err(Errno::AGAIN | Errno::INTR) => return (Drained::Empty, has_rung),
            // `ECONNRESET`: the peer has hung up and left rings unread.
            Err(_) => return (Drained::HungUp, has_rung),
        }
    }
    (Drained::Empty, has_rung)
}

/// Tells a peer why this endpoint refuses. One that has sent a malformed message, or has gone, is told nothing.
pub(crate) fn tell(bell: BorrowedFd<'_>, role: Role, reason: Reason) {
    if !matches!(reason, Reason::Malformed | Reason::Gone) {
        let _ = send(bell, &Message::no(role, reason), &[]);
    }
}

/// Hangs up on a peer because this endpoint cannot use what the two have agreed on, and tells it why.
pub fn refuse(bell: Descriptor, role: Role, reason: Reason) {
    tell(bell.as_fd(), role, reason);
    hang_up(bell);
}

/// Closes a bell that no other process holds, and what is unread in it. A process that shares the bell with its parent
/// or a child just drops the descriptor: this would hang up for all of them.
pub fn hang_up(bell: Descriptor) {
    discard(bell);
}

/// A bell, or a bell to be, that is hung up when it is dropped.
#[derive(Debug)]
pub(crate) struct Held(Option<Descriptor>);

impl Held {
    pub(crate) fn new(socket: Descriptor) -> Self {
        Self(Some(socket))
    }

    /// Returns the socket. `None` if it was released.
    pub(crate) fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.as_ref().map(AsFd::as_fd)
    }

    /// Returns the socket, which the caller closes.
    pub(crate) fn release(&mut self) -> Option<Descriptor> {
        self.0.take()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(bell) = self.0.take() {
            hang_up(bell);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn pair() -> (Descriptor, Descriptor) {
        let (a, b) = UnixStream::pair().unwrap();
        (Descriptor::from(std::os::fd::OwnedFd::from(a)), Descriptor::from(std::os::fd::OwnedFd::from(b)))
    }

    #[test]
    fn a_bell_that_nobody_drains_never_blocks_and_is_empty_after_a_drain() {
        let (ours, theirs) = pair();
        assert_eq!(drain(ours.as_fd()), Drained::Empty);
        for _ in 0..1000 {
            assert_eq!(ring(theirs.as_fd()), Ok(()));
        }
        assert_eq!(drain(ours.as_fd()), Drained::Empty);
        assert_eq!(rustix::io::ioctl_fionread(&ours), Ok(0));
    }

    #[test]
    fn a_hang_up_is_seen_with_rings_unread_on_either_side() {
        let _no_child = test_support::spawn::forbid();
        let (ours, theirs) = pair();
        ring(ours.as_fd()).unwrap();
        ring(theirs.as_fd()).unwrap();
        hang_up(theirs);
        assert_eq!(ring(ours.as_fd()), Err(Reason::Gone));
        // Its last ring is drained first, as far as the kernel still has it.
        assert!((0..3).any(|_| drain(ours.as_fd()) == Drained::HungUp));
        assert_eq!(drain(ours.as_fd()), Drained::HungUp);
    }

    #[test]
    fn a_refusal_is_seen_although_the_peer_has_hung_up() {
        let _no_child = test_support::spawn::forbid();
        for reason in Reason::ALL {
            let (ours, theirs) = pair();
            ring(ours.as_fd()).unwrap();
            refuse(theirs, Role::Accepted, *reason);
            let is_told = !matches!(reason, Reason::Malformed | Reason::Gone);
            assert_eq!(drain(ours.as_fd()), if is_told { Drained::Refused(*reason) } else { Drained::HungUp });
            assert_eq!(drain(ours.as_fd()), Drained::HungUp);
        }
    }
}
