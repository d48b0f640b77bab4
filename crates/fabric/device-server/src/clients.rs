//! Who is connected, and what each is still to be told.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::{Rc, Weak};

use rustix::event::EventfdFlags;
use rustix::io::Errno;

use crate::message::{Departure, Notice, Peer};
use crate::outbox::{Outbox, SEND_BUFFER_BYTES, Stop};

/// Clients at once at most.
pub const CLIENTS_MAX: usize = 64;

/// Everybody, by id.
pub struct Clients {
    memory: Rc<OwnedFd>,
    vectors: u32,
    members: BTreeMap<u16, Client>,
    departures: Vec<Weak<Departure>>,
    /// Ids that somebody who is connected may remember.
    given: BTreeSet<u16>,
}

struct Client {
    socket: OwnedFd,
    peer: Rc<Peer>,
    outbox: Outbox,
}

/// A client that was dropped, and why.
pub type Dropped = (u16, Stop);

impl Clients {
    /// Nobody yet.
    pub fn new(memory: OwnedFd, vectors: u32) -> Self {
        let (members, departures, given) = (BTreeMap::new(), Vec::new(), BTreeSet::new());
        Self { memory: Rc::new(memory), vectors, members, departures, given }
    }

    /// Whether there is no room for one more.
    pub fn is_full(&self) -> bool {
        self.members.len() >= CLIENTS_MAX
    }

    /// Ids and sockets of all, and whether each is still to be told something.
    pub fn sockets(&self) -> impl Iterator<Item = (u16, BorrowedFd<'_>, bool)> {
        self.members.iter().map(|(id, client)| (*id, client.socket.as_fd(), !client.outbox.is_empty()))
    }

    /// The socket of one.
    pub fn socket(&self, id: u16) -> Option<BorrowedFd<'_>> {
        self.members.get(&id).map(|client| client.socket.as_fd())
    }

    /// Takes in a client: tells it all there is, and the others of it. The others that could not be told are dropped.
    pub fn admit(&mut self, socket: OwnedFd) -> Result<(u16, Vec<Dropped>), Errno> {
        assert!(!self.is_full(), "the caller has looked whether there is room");
        rustix::net::sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER_BYTES)?;
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let doorbells: Result<Vec<OwnedFd>, Errno> =
            (0..self.vectors).map(|_| rustix::event::eventfd(0, flags)).collect();
        let peer = Rc::new(Peer { id: self.free_id(), doorbells: doorbells? });
        let others = self.members.values().map(|client| Notice::Doorbells(client.peer.clone()));
        let introduction = [Notice::Version, Notice::Id(peer.id), Notice::Memory(self.memory.clone())];
        let all = introduction.into_iter().chain(others).chain([Notice::Doorbells(peer.clone())]);
        let mut outbox = Outbox::default();
        for notice in all {
            outbox.push(notice).expect("an empty queue holds a notice of every client");
        }
        let mut stopped = self.tell_all(&Notice::Doorbells(peer.clone()));
        let id = peer.id;
        self.members.insert(id, Client { socket, peer, outbox });
        stopped.extend(self.flush(id).err().map(|stop| (id, stop)));
        Ok((id, self.drop_all(stopped)))
    }

    /// Removes a client and tells the others, of whom those that could not be told are dropped.
    pub fn remove(&mut self, id: u16) -> Vec<Dropped> {
        let stopped = self.forget(id);
        self.drop_all(stopped)
    }

    /// Tells a client what it takes without waiting.
    pub fn flush(&mut self, id: u16) -> Result<(), Stop> {
        let Some(client) = self.members.get_mut(&id) else { return Ok(()) };
        client.outbox.flush(client.socket.as_fd())
    }

    /// Every drop is one more thing to tell the others; each can be dropped once, so this ends.
    fn drop_all(&mut self, mut stopped: Vec<Dropped>) -> Vec<Dropped> {
        let mut dropped = Vec::new();
        while let Some((id, stop)) = stopped.pop() {
            if self.members.contains_key(&id) {
                stopped.extend(self.forget(id));
                dropped.push((id, stop));
            }
        }
        dropped
    }

    fn forget(&mut self, id: u16) -> Vec<Dropped> {
        if self.members.remove(&id).is_none() {
            return Vec::new();
        }
        let departure = Rc::new(Departure { id });
        self.departures.push(Rc::downgrade(&departure));
        self.tell_all(&Notice::Gone(departure))
    }

    fn tell_all(&mut self, notice: &Notice) -> Vec<Dropped> {
        let mut stopped = Vec::new();
        for (id, client) in &mut self.members {
            let told = client.outbox.push(notice.clone()).and_then(|()| client.outbox.flush(client.socket.as_fd()));
            stopped.extend(told.err().map(|stop| (*id, stop)));
        }
        stopped
    }

    /// The smallest id that nobody remembers: QEMU's device spoils its own heap when an id that has gone comes again
    /// (`close_peer_eventfds` frees what the next connection writes to). After 65536 comings without a moment when
    /// nobody was there, the smallest that nobody has, and that nobody is still to be told the end of.
    fn free_id(&mut self) -> u16 {
        if self.members.is_empty() {
            self.given.clear();
        }
        if let Some(id) = (0..=u16::MAX).find(|id| !self.given.contains(id)) {
            self.given.insert(id);
            return id;
        }
        self.departures.retain(|departure| departure.strong_count() > 0);
        let untold: Vec<u16> = self.departures.iter().filter_map(Weak::upgrade).map(|departure| departure.id).collect();
        let free = (0..=u16::MAX).find(|id| !self.members.contains_key(id) && !untold.contains(id));
        free.expect("queues are bounded: they hold far fewer departures than there are ids")
    }
}

#[cfg(test)]
#[path = "clients_tests.rs"]
mod histories;

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::outbox::NOTICES_MAX;

    const VECTORS: u32 = 2;

    fn clients() -> Clients {
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        Clients::new(memory, VECTORS)
    }

    /// The client's end, and its id. Nobody reads it.
    fn admit(clients: &mut Clients) -> (UnixStream, u16) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (id, dropped) = clients.admit(ours.into()).unwrap();
        assert_eq!(dropped, []);
        (theirs, id)
    }

    #[test]
    fn ids_are_the_smallest_that_nobody_remembers() {
        let mut clients = clients();
        let ends: Vec<(UnixStream, u16)> = (0..3).map(|_| admit(&mut clients)).collect();
        assert_eq!(ends.iter().map(|end| end.1).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(clients.remove(1), []);
        let (_end, id) = admit(&mut clients);
        assert_eq!(id, 3);
        (0..4).filter(|id| *id != 1).for_each(|id| assert_eq!(clients.remove(id), []));
        assert_eq!(admit(&mut clients).1, 0, "nobody is left who remembers");
    }

    #[test]
    fn when_all_ids_were_given_the_smallest_that_is_free_is_given_again() {
        let mut clients = clients();
        let _ends: Vec<_> = (0..3).map(|_| admit(&mut clients)).collect();
        clients.given = (0..=u16::MAX).collect();
        assert_eq!(clients.remove(1), []);
        assert_eq!(admit(&mut clients).1, 1);
    }

    #[test]
    fn an_id_whose_end_somebody_is_still_to_be_told_is_not_given_again() {
        let mut clients = clients();
        let (stalled, _) = admit(&mut clients);
        clients.given = (0..=u16::MAX).collect();
        // Its socket is full: what comes now waits in its queue.
        while clients.members[&0].outbox.is_empty() {
            let (_end, id) = admit(&mut clients);
            assert_eq!(clients.remove(id), []);
        }
        let (_end, id) = admit(&mut clients);
        assert_eq!(clients.remove(id), []);
        let (_next, next) = admit(&mut clients);
        assert_ne!(next, id, "client 0 has not been told that {id} went");
        drop(stalled);
        assert_eq!(clients.remove(0), []);
        assert_eq!(admit(&mut clients).1, 0, "with who was to be told, all is free again");
    }

    #[test]
    fn a_client_that_does_not_read_is_dropped_alone_when_its_queue_is_full() {
        let mut clients = clients();
        let (_stalled, stalled_id) = admit(&mut clients);
        let mut dropped = Vec::new();
        for _ in 0..2 * NOTICES_MAX {
            let (ours, _theirs) = UnixStream::pair().unwrap();
            let (id, on_coming) = clients.admit(ours.into()).unwrap();
            dropped.extend(on_coming);
            dropped.extend(clients.remove(id));
            if !dropped.is_empty() {
                break;
            }
        }
        assert_eq!(dropped, [(stalled_id, Stop::Full)]);
        assert!(!clients.members.contains_key(&stalled_id));
    }
}
