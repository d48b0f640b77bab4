//! The programs of this node that connect to remote listeners, until their handshakes have arrived.

use super::epoll_set::{EpollSet, EpollToken};
use super::shared::Shared;
use super::tcp_listener::{TcpClient, TcpListener};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use segment::Segment;
use socket::descriptor::received::discard;
use socket::process::clock::now_ns;
use socket::rendezvous::{self, Accepted, LaneListener};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Programs that are accepted at one listener before other descriptors are served.
const ACCEPTS_MAX: usize = 64;

/// A listener that stands in for one of another node.
struct RemoteListener {
    peer: u8,
    address: SocketAddr,
    listener: Arc<LaneListener>,
}

/// A program whose handshake has not arrived.
struct PendingProgram {
    peer: u8,
    accepted: Accepted,
}

/// A program that waits for a connection.
pub(super) struct AcceptedProgram {
    /// The node of the server.
    pub(super) peer: u8,
    pub(super) end: ProgramEnd,
    /// When it was ready for the connection.
    pub(super) since_ns: u64,
}

/// By what a program has connected to the proxy.
pub(super) enum ProgramEnd {
    /// A lifeline, and memory that has come with the handshake.
    Segment(Box<(Accepted, Segment)>),
    /// A kernel TCP connection.
    Tcp(Box<TcpClient>),
}

/// A TCP listener that stands in for one of another node.
struct RemoteTcpListener {
    peer: u8,
    address: SocketAddr,
    listener: Arc<TcpListener>,
}

/// The remote listeners of a thread, and the programs that have connected to them.
pub(super) struct Acceptor {
    shared: Arc<Shared>,
    listeners: HashMap<u32, RemoteListener>,
    tcp_listeners: HashMap<u32, RemoteTcpListener>,
    pending: HashMap<u32, PendingProgram>,
    numbers: u32,
}

impl Acceptor {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let (listeners, tcp_listeners) = (HashMap::new(), HashMap::new());
        Self { shared, listeners, tcp_listeners, pending: HashMap::new(), numbers: 0 }
    }

    pub(super) fn add_tcp_listener(
        &mut self,
        peer: u8,
        address: SocketAddr,
        listener: Arc<TcpListener>,
        epoll: &EpollSet,
    ) {
        let number = self.new_number();
        let flags = EventFlags::IN | EventFlags::EXCLUSIVE;
        if epoll.add(&*listener, EpollToken::TcpListener(number), flags).is_ok() {
            self.tcp_listeners.insert(number, RemoteTcpListener { peer, address, listener });
        }
    }

    /// Accepts programs at a TCP listener.
    pub(super) fn accept_by_tcp(&self, number: u32) -> Vec<AcceptedProgram> {
        let Some(RemoteTcpListener { peer, address, listener }) = self.tcp_listeners.get(&number) else {
            return Vec::new();
        };
        let program = |client: TcpClient| AcceptedProgram {
            peer: *peer,
            since_ns: client.since_ns,
            end: ProgramEnd::Tcp(Box::new(client)),
        };
        std::iter::from_fn(|| listener.accept(&self.shared, *address)).take(ACCEPTS_MAX).map(program).collect()
    }

    pub(super) fn add_listener(
        &mut self,
        peer: u8,
        address: SocketAddr,
        listener: Arc<LaneListener>,
        epoll: &EpollSet,
    ) {
        self.remove_listener(address, epoll);
        let number = self.new_number();
        // Exclusive: a connection wakes one thread.
        let flags = EventFlags::IN | EventFlags::EXCLUSIVE;
        if let Some(descriptor) = listener.descriptor()
            && epoll.add(descriptor, EpollToken::Listener(number), flags).is_ok()
        {
            self.listeners.insert(number, RemoteListener { peer, address, listener });
        }
    }

    pub(super) fn remove_listener(&mut self, address: SocketAddr, epoll: &EpollSet) {
        let found = self.listeners.iter().find(|(_, listener)| listener.address == address);
        let number = found.map(|(number, _)| *number);
        if let Some(removed) = number.and_then(|number| self.listeners.remove(&number))
            && let Some(descriptor) = removed.listener.descriptor()
        {
            epoll.remove(descriptor);
        }
        self.tcp_listeners.retain(|_, listener| {
            let stays = listener.address != address;
            if !stays {
                epoll.remove(&*listener.listener);
            }
            stays
        });
    }

    /// Accepts programs at a listener. Returns those whose handshakes have arrived already.
    pub(super) fn accept(&mut self, number: u32, epoll: &EpollSet) -> Vec<AcceptedProgram> {
        let mut ready = Vec::new();
        for _ in 0..ACCEPTS_MAX {
            let Some(RemoteListener { peer, listener, .. }) = self.listeners.get(&number) else { break };
            let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
            let Ok(accepted) = rendezvous::accept(listener.fd(), &listener.key(), flags) else { break };
            let program = PendingProgram { peer: *peer, accepted };
            ready.extend(self.receive(program, epoll));
        }
        ready
    }

    /// Returns a pending program if its handshake has arrived.
    pub(super) fn receive_handshake(&mut self, number: u32, epoll: &EpollSet) -> Option<AcceptedProgram> {
        let program = self.pending.remove(&number)?;
        epoll.remove(program.accepted.lifeline.as_fd());
        self.receive(program, epoll)
    }

    /// Receives a program's handshake, or registers its lifeline until it arrives.
    fn receive(&mut self, program: PendingProgram, epoll: &EpollSet) -> Option<AcceptedProgram> {
        match receive_segment(&program.accepted) {
            Ok(Some(segment)) => {
                let PendingProgram { peer, accepted } = program;
                Some(AcceptedProgram {
                    peer,
                    end: ProgramEnd::Segment(Box::new((accepted, segment))),
                    since_ns: now_ns(),
                })
            }
            Ok(None) => {
                let number = self.new_number();
                let lifeline = program.accepted.lifeline.as_fd();
                if epoll.add(lifeline, EpollToken::Handshake(number), EventFlags::IN).is_ok() {
                    self.pending.insert(number, program);
                }
                None
            }
            Err(_) => {
                discard(program.accepted.lifeline);
                None
            }
        }
    }

    /// Closes all listeners of this thread and all pending programs.
    pub(super) fn clear(&mut self) {
        self.listeners.clear();
        self.tcp_listeners.clear();
        self.pending.clear();
    }

    fn new_number(&mut self) -> u32 {
        self.numbers = self.numbers.wrapping_add(1);
        self.numbers
    }
}

/// Receives the segment of an accepted program. Returns `Ok(None)` if the handshake has not arrived.
fn receive_segment(accepted: &Accepted) -> Result<Option<Segment>, Errno> {
    match rendezvous::receive_handshake(accepted.lifeline.as_fd()) {
        // Only proxies may offer windows, and only to programs.
        Ok(Some((segment, _))) if segment.is_in_windows() => Err(Errno::PROTO),
        Ok(received) => Ok(received.map(|(segment, _)| segment)),
        Err(_) => Err(Errno::PROTO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fabric::device::Caching;
    use rustix::fs::{MemfdFlags, SealFlags};
    use rustix::net::{AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType};
    use segment::Secrets;
    use socket::rendezvous::address::{Opener, Tuple};
    use socket::rendezvous::handshake::{Handshake, WindowSpans};

    #[test]
    fn a_program_that_offers_windows_is_rejected() {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let memory = rustix::fs::memfd_create("spans", MemfdFlags::ALLOW_SEALING).expect("memory");
        rustix::fs::ftruncate(&memory, 2 * Segment::WINDOW_BYTES as u64).expect("room");
        rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK).expect("a seal");
        for caching in [Caching::Cached, Caching::Uncached, Caching::WriteCombined] {
            let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
            let (program, lifeline) = pair.expect("a pair");
            let spans = WindowSpans { caching, ..WindowSpans::new(0, Segment::WINDOW_BYTES as u64) };
            let secrets = Secrets { to_acceptor: 1, to_connector: 2 };
            let handshake = Handshake { secrets, spans: Some(spans) }.encode();
            let fds = [memory.as_fd()];
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            rustix::net::sendmsg(&program, &[std::io::IoSlice::new(&handshake)], &mut control, SendFlags::empty())
                .expect("room");
            let address = SocketAddr::from(([127, 77, 0, 1], 80));
            let tuple = Tuple { local: address, peer: address };
            let accepted = Accepted { lifeline, tuple, opener: Opener::Program };
            assert_eq!(receive_segment(&accepted).map(|received| received.is_some()), Err(Errno::PROTO), "{caching}");
        }
    }
}
