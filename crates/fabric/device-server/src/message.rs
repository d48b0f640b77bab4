//! The messages of the protocol.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

/// The only version of the protocol.
const PROTOCOL_VERSION: i64 = 0;
/// The number that announces the memory.
const MEMORY: i64 = -1;

/// A client as others know it.
#[derive(Debug)]
pub struct Peer {
    /// ID of the client.
    pub id: u16,
    /// The eventfds that interrupt it, by vector.
    pub doorbells: Vec<OwnedFd>,
}

/// The disconnection of a client. A queue that holds one has not sent it yet; the ID is free when no queue does.
#[derive(Debug)]
pub struct Disconnection {
    /// ID of the client.
    pub id: u16,
}

/// A notification for a client: one message, or for a peer's doorbells one message per vector.
#[derive(Clone, Debug)]
pub enum Notification {
    /// The protocol version.
    Version,
    /// The client's own ID.
    Id(u16),
    /// The memory.
    Memory(Rc<OwnedFd>),
    /// The doorbells of a client, possibly of this one.
    Doorbells(Rc<Peer>),
    /// The disconnection of another client.
    Disconnected(Rc<Disconnection>),
}

impl Notification {
    /// Number of messages of the notification.
    pub fn messages(&self) -> usize {
        match self {
            Self::Doorbells(peer) => peer.doorbells.len(),
            _ => 1,
        }
    }

    /// One message: its number and its descriptor.
    pub fn message(&self, index: usize) -> (i64, Option<BorrowedFd<'_>>) {
        match self {
            Self::Version => (PROTOCOL_VERSION, None),
            Self::Id(id) => (i64::from(*id), None),
            Self::Memory(memory) => (MEMORY, Some(memory.as_fd())),
            Self::Doorbells(peer) => (i64::from(peer.id), peer.doorbells.get(index).map(AsFd::as_fd)),
            Self::Disconnected(disconnection) => (i64::from(disconnection.id), None),
        }
    }
}
