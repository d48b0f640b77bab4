//! The programs of this node that connect to remote listeners.

use super::epoll_set::{EpollSet, EpollToken};
use super::shared::Shared;
use super::tcp_listener::{TcpClient, TcpListener};
use rustix::event::epoll::EventFlags;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

/// Programs that are accepted at one listener before other descriptors are served.
const ACCEPTS_MAX: usize = 64;

/// A program that waits for a connection.
pub(super) struct AcceptedProgram {
    /// The node of the server.
    pub(super) peer: u8,
    pub(super) client: TcpClient,
    /// When it connected.
    pub(super) since_ns: u64,
}

/// A listener that stands in for one of another node.
struct RemoteListener {
    peer: u8,
    address: SocketAddr,
    listener: Arc<TcpListener>,
}

/// The remote listeners of a thread.
pub(super) struct Acceptor {
    shared: Arc<Shared>,
    listeners: HashMap<u32, RemoteListener>,
    numbers: u32,
}

impl Acceptor {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, listeners: HashMap::new(), numbers: 0 }
    }

    pub(super) fn add_listener(&mut self, peer: u8, address: SocketAddr, listener: Arc<TcpListener>, epoll: &EpollSet) {
        self.numbers = self.numbers.wrapping_add(1);
        // Exclusive: a connection wakes one thread.
        let flags = EventFlags::IN | EventFlags::EXCLUSIVE;
        if epoll.add(&*listener, EpollToken::Listener(self.numbers), flags).is_ok() {
            self.listeners.insert(self.numbers, RemoteListener { peer, address, listener });
        }
    }

    /// Stops to accept at all listeners that stand in for an address.
    pub(super) fn remove_listeners(&mut self, address: SocketAddr, epoll: &EpollSet) {
        self.listeners.retain(|_, listener| {
            let stays = listener.address != address;
            if !stays {
                epoll.remove(&*listener.listener);
            }
            stays
        });
    }

    /// Accepts programs at a listener.
    pub(super) fn accept(&self, number: u32) -> Vec<AcceptedProgram> {
        let Some(RemoteListener { peer, address, listener }) = self.listeners.get(&number) else {
            return Vec::new();
        };
        let program = |client: TcpClient| AcceptedProgram { peer: *peer, since_ns: client.since_ns, client };
        std::iter::from_fn(|| listener.accept(&self.shared, *address)).take(ACCEPTS_MAX).map(program).collect()
    }

    /// Closes all listeners of this thread.
    pub(super) fn clear(&mut self) {
        self.listeners.clear();
    }
}
