//! The words of the protocol.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

/// The one version there is.
const PROTOCOL_VERSION: i64 = 0;
/// Announces the memory.
const MEMORY: i64 = -1;

/// A client, as others know it.
#[derive(Debug)]
pub struct Peer {
    /// Its number.
    pub id: u16,
    /// What rings it, one a vector.
    pub doorbells: Vec<OwnedFd>,
}

/// That a client has gone. Who holds one has not told it yet: the id is free when nobody does.
#[derive(Debug)]
pub struct Departure {
    /// Its number.
    pub id: u16,
}

/// Something a client is told, in one message or, of a peer, in one a vector.
#[derive(Clone, Debug)]
pub enum Notice {
    /// Which protocol this is.
    Version,
    /// The client's own id.
    Id(u16),
    /// The memory.
    Memory(Rc<OwnedFd>),
    /// A client, perhaps this one, and what rings it.
    Doorbells(Rc<Peer>),
    /// Another client has gone.
    Gone(Rc<Departure>),
}

impl Notice {
    /// How many messages it takes.
    pub fn messages(&self) -> usize {
        match self {
            Self::Doorbells(peer) => peer.doorbells.len(),
            _ => 1,
        }
    }

    /// One of them.
    pub fn message(&self, index: usize) -> (i64, Option<BorrowedFd<'_>>) {
        match self {
            Self::Version => (PROTOCOL_VERSION, None),
            Self::Id(id) => (i64::from(*id), None),
            Self::Memory(memory) => (MEMORY, Some(memory.as_fd())),
            Self::Doorbells(peer) => (i64::from(peer.id), peer.doorbells.get(index).map(AsFd::as_fd)),
            Self::Gone(departure) => (i64::from(departure.id), None),
        }
    }
}
