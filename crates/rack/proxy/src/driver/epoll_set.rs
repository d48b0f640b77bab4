//! The epoll instance of a thread, and the tokens by which it knows its descriptors.

use crate::table::ConnectionKey;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Events that are fetched from the kernel at once.
pub(super) const EVENTS_MAX: usize = 256;
/// Bound on the engines of a thread: an engine's index takes eight bits of a token.
pub(super) const ENGINES_MAX: usize = 255;
/// Position of an engine's index in a token: above the index of a connection, of which there are less than 2^24.
const ENGINE_SHIFT: u32 = 24;
const ENGINE_MASK: u64 = 0xFF << ENGINE_SHIFT;
/// The index that no engine has: the token is not a connection's.
const NO_ENGINE: u64 = 0xFF;

/// The events of interest of a connection's descriptors.
const EVENTS: EventFlags = EventFlags::IN.union(EventFlags::RDHUP).union(EventFlags::ET);

/// What a registered descriptor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EpollToken {
    /// The command queue.
    Commands,
    /// The doorbell of this thread.
    Doorbell,
    /// A listener that stands in for one of another node, by its number.
    Listener(u32),
    /// The TCP listener for proxies that have lost a link.
    FailoverListener,
    /// An accepted TCP connection whose handshake has not arrived, by its number.
    FailoverHandshake(u32),
    /// The TCP connection that an engine uses instead of a link, by the engine's index.
    FailoverSocket(u32),
    /// The TCP socket of a connection, or the descriptor by which its ends meet and wake each other.
    Endpoint { engine: usize, key: ConnectionKey },
}

impl EpollToken {
    fn encode(self) -> u64 {
        let other = |kind: u64, value: u32| u64::from(value) << 32 | NO_ENGINE << ENGINE_SHIFT | kind;
        match self {
            Self::Commands => other(0, 0),
            Self::Doorbell => other(1, 0),
            Self::Listener(number) => other(2, number),
            Self::FailoverListener => other(4, 0),
            Self::FailoverHandshake(number) => other(5, number),
            Self::FailoverSocket(index) => other(6, index),
            Self::Endpoint { engine, key } => {
                debug_assert!(key.to_word() & ENGINE_MASK == 0);
                key.to_word() | (engine as u64) << ENGINE_SHIFT
            }
        }
    }

    fn decode(word: u64) -> Self {
        let engine = (word & ENGINE_MASK) >> ENGINE_SHIFT;
        let value = (word >> 32) as u32;
        match (engine, word & ((1 << ENGINE_SHIFT) - 1)) {
            (NO_ENGINE, 0) => Self::Commands,
            (NO_ENGINE, 1) => Self::Doorbell,
            (NO_ENGINE, 2) => Self::Listener(value),
            (NO_ENGINE, 4) => Self::FailoverListener,
            (NO_ENGINE, 5) => Self::FailoverHandshake(value),
            (NO_ENGINE, _) => Self::FailoverSocket(value),
            _ => Self::Endpoint { engine: engine as usize, key: ConnectionKey::from_word(word & !ENGINE_MASK) },
        }
    }
}

/// The epoll instance of a thread.
#[derive(Debug, Clone)]
pub(super) struct EpollSet(Arc<OwnedFd>);

impl EpollSet {
    pub(super) fn new() -> Result<Self, Errno> {
        Ok(Self(Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?)))
    }

    /// Registers a descriptor.
    pub(super) fn add(&self, descriptor: impl AsFd, token: EpollToken, flags: EventFlags) -> Result<(), Errno> {
        epoll::add(&self.0, descriptor.as_fd(), EventData::new_u64(token.encode()), flags)
    }

    /// Registers a bell, edge-triggered. An event that is pending already is reported at once.
    pub(super) fn add_bell(&self, bell: BorrowedFd<'_>, engine: usize, key: ConnectionKey) -> Result<(), Errno> {
        self.add(bell, EpollToken::Endpoint { engine, key }, EVENTS)
    }

    /// Registers the TCP socket of a connection, edge-triggered, also for room.
    pub(super) fn add_socket(&self, socket: BorrowedFd<'_>, engine: usize, key: ConnectionKey) -> Result<(), Errno> {
        self.add(socket, EpollToken::Endpoint { engine, key }, EVENTS | EventFlags::OUT)
    }

    /// Removes a descriptor, if it is registered.
    pub(super) fn remove(&self, descriptor: impl AsFd) {
        let _ = epoll::delete(&self.0, descriptor.as_fd());
    }

    /// Fetches the pending events, up to the capacity of `events`, without blocking.
    pub(super) fn fetch(&self, events: &mut Vec<epoll::Event>) {
        events.clear();
        let _ = epoll::wait(&self.0, spare_capacity(events), Some(&Timespec::default()));
    }

    /// Blocks until an event is pending, up to a limit. `epoll_wait` would round the limit to milliseconds.
    pub(super) fn block(&self, limit: &Timespec) {
        let _ = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(limit));
    }
}

/// Returns the token of an event.
pub(super) fn token_of(event: &epoll::Event) -> EpollToken {
    EpollToken::decode(event.data.u64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_decoded_as_they_were_encoded() {
        let endpoint = |engine, word| EpollToken::Endpoint { engine, key: ConnectionKey::from_word(word) };
        for token in [
            EpollToken::Commands,
            EpollToken::Doorbell,
            EpollToken::Listener(7),
            EpollToken::FailoverListener,
            EpollToken::FailoverHandshake(8),
            EpollToken::FailoverSocket(254),
            endpoint(0, 0),
            endpoint(254, 5 << 32 | 0xFF_FFFF),
        ] {
            assert_eq!(EpollToken::decode(token.encode()), token);
        }
    }
}
