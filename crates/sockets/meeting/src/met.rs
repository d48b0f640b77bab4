//! What an endpoint has after it has met the other one.

use std::os::fd::BorrowedFd;

use crate::counts::{Counts, Role};
use crate::message::{Memory, Message};
use crate::proof::Prover;
use crate::system::{self, Descriptor};

/// The result of a meeting. The last holder closes the bell by [`hang_up`](crate::bell::hang_up).
#[derive(Debug)]
pub struct Met {
    /// The bell (see [`bell`](crate::bell)). On Linux 6.16 and later it accepts no descriptors.
    pub bell: Descriptor,
    /// The memory that the peer writes, checked by [`memory::check`](crate::memory::check); or that of the windows in
    /// [`Met::incoming`], unchecked.
    pub peer_memory: Descriptor,
    /// The size that the peer states, which the memory has, and the secret of the lane in it.
    pub incoming: Memory,
    /// The size and the secret of the memory that this endpoint has passed.
    pub outgoing: Memory,
    /// This endpoint's counts, read after the peer's message had arrived.
    pub own_counts: Counts,
    /// The peer's counts in its message.
    pub peer_counts: Counts,
    /// `SO_COOKIE` of the peer's TCP socket.
    pub peer_cookie: u64,
    /// The peer's process by `SO_PEERCRED`, or 0 if it has no number in this process's namespace.
    pub peer_pid: i32,
    /// The proof by the bytes that both endpoints have to give before they use the memory.
    pub proof: Option<Box<Prover>>,
}

impl Met {
    pub(crate) fn new(
        (bell, peer_memory): (Descriptor, Descriptor),
        message: &Message,
        outgoing: Memory,
        own_counts: Counts,
        peer_pid: i32,
    ) -> Box<Self> {
        let Message { counts, cookie, memory, .. } = *message;
        // In a box, because threads may have 16 KiB of stack.
        Box::new(Self {
            bell,
            peer_memory,
            incoming: memory,
            outgoing,
            own_counts,
            peer_counts: counts,
            peer_cookie: cookie,
            peer_pid,
            proof: None,
        })
    }

    /// Returns the result of a meeting that has to be proven by the bytes.
    pub(crate) fn to_be_proven(mut self: Box<Self>, role: Role) -> Box<Self> {
        let (connected, accepted) = match role {
            Role::Connected => (self.outgoing.secret, self.incoming.secret),
            Role::Accepted => (self.incoming.secret, self.outgoing.secret),
        };
        self.proof = Some(Box::new(Prover::new(role, [connected, accepted], &self.own_counts)));
        self
    }
}

/// The process at the other side of an AF_UNIX socket when it connected or began to listen (`unix(7)`: `SO_PEERCRED`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Credentials {
    pub(crate) pid: i32,
    /// The overflow user's if it has no number in this process's user namespace.
    pub(crate) uid: u32,
}

/// Returns the credentials of a socket's peer.
pub(crate) fn peer_credentials(socket: BorrowedFd<'_>) -> Option<Credentials> {
    let bytes: [u8; 12] = system::option(socket, libc::SOL_SOCKET, libc::SO_PEERCRED)?;
    let word = |at: usize| std::array::from_fn(|index| bytes[at + index]);
    Some(Credentials { pid: i32::from_ne_bytes(word(0)), uid: u32::from_ne_bytes(word(4)) })
}
