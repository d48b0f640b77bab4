//! The connected clients, and the messages that are queued for each.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::{Rc, Weak};

use rustix::event::EventfdFlags;
use rustix::io::Errno;

use crate::limits::CLIENTS_MAX;
use crate::message::{Disconnection, Notification, Peer};
use crate::send_queue::{SEND_BUFFER_BYTES, SendError, SendQueue};

/// The connected clients, by ID.
pub struct Clients {
    memory: Rc<OwnedFd>,
    vectors: u32,
    members: BTreeMap<u16, Client>,
    disconnections: Vec<Weak<Disconnection>>,
    /// IDs that a connected client may remember.
    assigned: BTreeSet<u16>,
}

struct Client {
    socket: OwnedFd,
    peer: Rc<Peer>,
    send_queue: SendQueue,
}

/// A client that was dropped, and the reason.
pub type Dropped = (u16, SendError);

impl Clients {
    /// Makes an empty set of clients.
    pub fn new(memory: OwnedFd, vectors: u32) -> Self {
        let (members, disconnections, assigned) = (BTreeMap::new(), Vec::new(), BTreeSet::new());
        Self { memory: Rc::new(memory), vectors, members, disconnections, assigned }
    }

    /// Whether the maximum number of clients is connected.
    pub fn is_full(&self) -> bool {
        self.members.len() >= CLIENTS_MAX
    }

    /// IDs and sockets of all clients, and whether each has queued messages.
    pub fn sockets(&self) -> impl Iterator<Item = (u16, BorrowedFd<'_>, bool)> {
        self.members.iter().map(|(id, client)| (*id, client.socket.as_fd(), !client.send_queue.is_empty()))
    }

    /// The socket of a client.
    pub fn socket(&self, id: u16) -> Option<BorrowedFd<'_>> {
        self.members.get(&id).map(|client| client.socket.as_fd())
    }

    /// Adds a client: queues for it the memory and all doorbells, and announces it to the others. Returns its ID, and
    /// the clients that were dropped because their queues are full or their sockets failed.
    pub fn admit(&mut self, socket: OwnedFd) -> Result<(u16, Vec<Dropped>), Errno> {
        assert!(!self.is_full(), "the caller has checked that there is room");
        rustix::net::sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER_BYTES)?;
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let doorbells: Result<Vec<OwnedFd>, Errno> =
            (0..self.vectors).map(|_| rustix::event::eventfd(0, flags)).collect();
        let peer = Rc::new(Peer { id: self.free_id(), doorbells: doorbells? });
        let others = self.members.values().map(|client| Notification::Doorbells(client.peer.clone()));
        let setup = [Notification::Version, Notification::Id(peer.id), Notification::Memory(self.memory.clone())];
        let all = setup.into_iter().chain(others).chain([Notification::Doorbells(peer.clone())]);
        let mut send_queue = SendQueue::default();
        for notification in all {
            send_queue.push(notification).expect("an empty queue has room for all clients");
        }
        let mut failed = self.announce(&Notification::Doorbells(peer.clone()));
        let id = peer.id;
        self.members.insert(id, Client { socket, peer, send_queue });
        failed.extend(self.flush(id).err().map(|error| (id, error)));
        Ok((id, self.drop_all(failed)))
    }

    /// Removes a client and announces that to the others. Returns the clients that were dropped in turn.
    pub fn remove(&mut self, id: u16) -> Vec<Dropped> {
        let failed = self.remove_one(id);
        self.drop_all(failed)
    }

    /// Sends a client its queued messages as far as possible without blocking.
    pub fn flush(&mut self, id: u16) -> Result<(), SendError> {
        let Some(client) = self.members.get_mut(&id) else { return Ok(()) };
        client.send_queue.flush(client.socket.as_fd())
    }

    /// Drops clients. Each drop is announced to the others, which may fail in turn; each client is dropped at most
    /// once, so this ends.
    fn drop_all(&mut self, mut failed: Vec<Dropped>) -> Vec<Dropped> {
        let mut dropped = Vec::new();
        while let Some((id, error)) = failed.pop() {
            if self.members.contains_key(&id) {
                failed.extend(self.remove_one(id));
                dropped.push((id, error));
            }
        }
        dropped
    }

    fn remove_one(&mut self, id: u16) -> Vec<Dropped> {
        if self.members.remove(&id).is_none() {
            return Vec::new();
        }
        let disconnection = Rc::new(Disconnection { id });
        self.disconnections.push(Rc::downgrade(&disconnection));
        self.announce(&Notification::Disconnected(disconnection))
    }

    fn announce(&mut self, notification: &Notification) -> Vec<Dropped> {
        let mut failed = Vec::new();
        for (id, client) in &mut self.members {
            let sent = client
                .send_queue
                .push(notification.clone())
                .and_then(|()| client.send_queue.flush(client.socket.as_fd()));
            failed.extend(sent.err().map(|error| (*id, error)));
        }
        failed
    }

    /// Returns the smallest ID that no connected client remembers: QEMU's device corrupts its heap when an ID is reused
    /// (`close_peer_eventfds` frees memory that the next connection writes to). After 65,536 connections without a
    /// moment with no clients, returns the smallest ID that is not in use and whose disconnection has been sent to all
    /// clients.
    fn free_id(&mut self) -> u16 {
        if self.members.is_empty() {
            self.assigned.clear();
        }
        if let Some(id) = (0..=u16::MAX).find(|id| !self.assigned.contains(id)) {
            self.assigned.insert(id);
            return id;
        }
        self.disconnections.retain(|disconnection| disconnection.strong_count() > 0);
        let unsent: Vec<u16> =
            self.disconnections.iter().filter_map(Weak::upgrade).map(|disconnection| disconnection.id).collect();
        let free = (0..=u16::MAX).find(|id| !self.members.contains_key(id) && !unsent.contains(id));
        free.expect("queues are bounded: they hold far fewer disconnections than there are IDs")
    }
}

#[cfg(test)]
mod histories;

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::send_queue::QUEUE_LEN_MAX;

    const VECTORS: u32 = 2;

    fn clients() -> Clients {
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        Clients::new(memory, VECTORS)
    }

    /// Adds a client that does not read. Returns its socket and its ID.
    fn admit(clients: &mut Clients) -> (UnixStream, u16) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (id, dropped) = clients.admit(ours.into()).unwrap();
        assert_eq!(dropped, []);
        (theirs, id)
    }

    #[test]
    fn an_id_is_the_smallest_that_no_connected_client_remembers() {
        let mut clients = clients();
        let sockets: Vec<(UnixStream, u16)> = (0..3).map(|_| admit(&mut clients)).collect();
        assert_eq!(sockets.iter().map(|socket| socket.1).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(clients.remove(1), []);
        let (_socket, id) = admit(&mut clients);
        assert_eq!(id, 3);
        (0..4).filter(|id| *id != 1).for_each(|id| assert_eq!(clients.remove(id), []));
        assert_eq!(admit(&mut clients).1, 0, "no client is left that remembers an ID");
    }

    #[test]
    fn after_all_ids_were_assigned_the_smallest_free_one_is_reused() {
        let mut clients = clients();
        let _sockets: Vec<_> = (0..3).map(|_| admit(&mut clients)).collect();
        clients.assigned = (0..=u16::MAX).collect();
        assert_eq!(clients.remove(1), []);
        assert_eq!(admit(&mut clients).1, 1);
    }

    #[test]
    fn an_id_is_not_reused_before_its_disconnection_was_sent_to_all() {
        let mut clients = clients();
        let (stalled, _) = admit(&mut clients);
        clients.assigned = (0..=u16::MAX).collect();
        // Its socket is full: further messages stay in its queue.
        while clients.members[&0].send_queue.is_empty() {
            let (_socket, id) = admit(&mut clients);
            assert_eq!(clients.remove(id), []);
        }
        let (_socket, id) = admit(&mut clients);
        assert_eq!(clients.remove(id), []);
        let (_next, next) = admit(&mut clients);
        assert_ne!(next, id, "client 0 was not sent the disconnection of {id}");
        drop(stalled);
        assert_eq!(clients.remove(0), []);
        assert_eq!(admit(&mut clients).1, 0, "all IDs are free again");
    }

    #[test]
    fn a_client_that_does_not_read_is_dropped_alone_when_its_queue_is_full() {
        let mut clients = clients();
        let (_stalled, stalled_id) = admit(&mut clients);
        let mut dropped = Vec::new();
        for _ in 0..2 * QUEUE_LEN_MAX {
            let (ours, _theirs) = UnixStream::pair().unwrap();
            let (id, when_added) = clients.admit(ours.into()).unwrap();
            dropped.extend(when_added);
            dropped.extend(clients.remove(id));
            if !dropped.is_empty() {
                break;
            }
        }
        assert_eq!(dropped, [(stalled_id, SendError::Full)]);
        assert!(!clients.members.contains_key(&stalled_id));
    }
}
