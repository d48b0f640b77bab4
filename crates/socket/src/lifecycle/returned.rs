//! Connections that one process has kept back and leaves to all that share its listener.
//!
//! TCP keeps them in the listener, whoever takes from it. A process that keeps them itself must pass them on when it
//! has other work or goes away: through a pair of sockets that `fork` gives to all of these processes, and nobody else.

use crate::descriptors::{HiddenFd, Need, close};
use crate::limit;
use crate::rack::NameKey;
use crate::rendezvous::{self, Accepted};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::os::fd::{AsFd, BorrowedFd};

/// A queue of connections, each with the time when it may be accepted without bytes.
pub(super) struct Returned {
    entrance: HiddenFd,
    exit: HiddenFd,
}

impl Returned {
    /// # Errors
    /// `MFILE` and its kin, where there is no descriptor left.
    pub fn new() -> Result<Self, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (entrance, exit) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok(Self { entrance: HiddenFd::hide(entrance, Need::Required)?, exit: HiddenFd::hide(exit, Need::Required)? })
    }

    /// Readable when there is a connection.
    ///
    /// # Errors
    /// `BADF` when it has been released.
    pub fn exit(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.exit.fd()
    }

    /// # Errors
    /// `AGAIN` when the queue is full.
    pub fn give(&self, lifeline: BorrowedFd<'_>, due_ns: u64) -> Result<(), Errno> {
        rendezvous::send_with_descriptor(self.entrance.fd()?, &due_ns.to_ne_bytes(), Some(lifeline))
    }

    /// The first connection, and when it is due; `None` when there is none. `key` is that of the listener's rack.
    ///
    /// # Errors
    /// `MFILE` and its kin, where there is no descriptor left.
    pub fn take(&self, key: &NameKey) -> Result<Option<(Accepted, u64)>, Errno> {
        let mut due_ns = [0; 8];
        let exit = self.exit.fd()?;
        let received = limit::with_one_free(exit, || rendezvous::receive_with_descriptors(exit, &mut due_ns));
        let mut fds = match received {
            Err(Errno::AGAIN) => return Ok(None), // Another process was faster.
            received => received?.1,
        };
        let Some(lifeline) = fds.pop() else { return Ok(None) };
        match rendezvous::peer_of(lifeline.as_fd(), key) {
            Some((tuple, opener)) => {
                Ok(Some((Accepted { lifeline, tuple: tuple.reversed(), opener }, u64::from_ne_bytes(due_ns))))
            }
            None => {
                close(lifeline);
                Ok(None)
            }
        }
    }
}
