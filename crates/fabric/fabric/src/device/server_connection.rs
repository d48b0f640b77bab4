//! The client's side of the ivshmem server protocol (QEMU, docs/specs/ivshmem-spec), over a unix socket.
//!
//! Only the server sends: 8-byte little-endian numbers, some with a descriptor. It sends the protocol's version, this
//! client's ID, and -1 with the memory. Then it sends each other client's ID, and at last this client's ID, once for
//! each vector with an eventfd. Later it announces new clients the same way, and sends the ID alone when a client
//! disconnects.
//!
//! The server's owner is root or the user of this process, so the memory that it sends is trusted. What else it sends
//! is checked: numbers and counts are bounded, and excess descriptors are closed.

use super::backing_file;
use super::error::DeviceProblem;
use super::interrupts::{Interrupts, PeerId};
use crate::eventfd;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

const PROTOCOL_VERSION: i64 = 0;
const MEMORY: i64 = -1;
const MESSAGE_BYTES: usize = size_of::<i64>();

/// Time that a server has to send all that a client needs.
const SETUP_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of messages that one poll reads, so that a server that sends without end delays nothing else.
const MESSAGES_MAX: usize = 4096;

/// Maximum number of descriptors that are accepted with a message. The kernel closes the rest.
const DESCRIPTORS_MAX: usize = 4;

/// What a client learns from a server after the setup.
#[derive(Debug)]
pub(super) enum ServerEvent {
    /// The server announced a doorbell of another client.
    PeerDoorbell(PeerId),
    /// Another client has disconnected.
    PeerGone(PeerId),
    /// The server has exited, or has violated the protocol.
    ServerGone,
}

/// A number, and the descriptor that came with it.
type Message = (i64, Option<OwnedFd>);

/// What a client gets during the setup.
pub(super) struct Setup {
    pub memory: OwnedFd,
    /// This client's ID and eventfds, and the eventfds of the other clients.
    pub interrupts: Interrupts,
}

/// A connection to a server.
#[derive(Debug)]
pub(super) struct ServerConnection {
    stream: Arc<OwnedFd>,
    is_server_gone: bool,
    own_id: PeerId,
    partial: [u8; MESSAGE_BYTES],
    partial_bytes: usize,
    descriptor: Option<OwnedFd>,
}

impl ServerConnection {
    /// Receives the setup from the server: the memory, and `vectors` eventfds of this client.
    pub(super) fn set_up(stream: OwnedFd, vectors: usize) -> Result<(Self, Setup), DeviceProblem> {
        let mut connection = Self {
            stream: Arc::new(stream),
            is_server_gone: false,
            own_id: 0,
            partial: [0; MESSAGE_BYTES],
            partial_bytes: 0,
            descriptor: None,
        };
        let deadline = Instant::now() + SETUP_TIMEOUT;
        let memory = connection.receive_memory(deadline)?;
        let own_id = connection.own_id;
        let mut interrupts = Interrupts { own_id: Some(own_id), ..Interrupts::default() };
        while interrupts.own_eventfds.len() < vectors {
            match connection.await_message(deadline)? {
                Some((number, Some(eventfd))) if number == i64::from(own_id) => {
                    interrupts.own_eventfds.push(checked_eventfd(eventfd)?);
                }
                Some(message) => _ = connection.handle(message, &interrupts)?,
                None => return Err(too_few_vectors(interrupts.own_eventfds.len(), vectors)),
            }
        }
        Ok((connection, Setup { memory, interrupts }))
    }

    /// Receives the version, this client's ID and the memory.
    fn receive_memory(&mut self, deadline: Instant) -> Result<OwnedFd, DeviceProblem> {
        let timed_out = || protocol_error(format!("did not send the memory within {} s", SETUP_TIMEOUT.as_secs()));
        let mut next = || self.await_message(deadline)?.ok_or_else(timed_out);
        match next()? {
            (PROTOCOL_VERSION, _) => {}
            (version, _) => {
                return Err(protocol_error(format!("sent protocol version {version}, not {PROTOCOL_VERSION}")));
            }
        }
        let (number, _) = next()?;
        let memory = match next()? {
            (MEMORY, Some(memory)) => memory,
            (number, _) => return Err(protocol_error(format!("sent {number} instead of the memory"))),
        };
        self.own_id = checked_id(number)?;
        backing_file::check_seals(&memory)?;
        Ok(memory)
    }

    /// Waits for the next message. `None` if it does not arrive before the deadline.
    fn await_message(&mut self, deadline: Instant) -> Result<Option<Message>, DeviceProblem> {
        loop {
            if let Some(message) = self.next_message()? {
                return Ok(Some(message));
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining == Duration::ZERO {
                return Ok(None);
            }
            // Readable, timed out or interrupted by a signal: the next iteration finds out.
            let _ = eventfd::poll_for(&self.stream, PollFlags::IN, Some(remaining));
        }
    }

    /// Receives the next message, without waiting.
    fn next_message(&mut self) -> Result<Option<Message>, DeviceProblem> {
        while self.partial_bytes < MESSAGE_BYTES {
            match self.receive() {
                Ok(0) => return Err(protocol_error("closed the connection")),
                Ok(received) => self.partial_bytes += received,
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(DeviceProblem::system("recvmsg")(errno)),
            }
        }
        self.partial_bytes = 0;
        Ok(Some((i64::from_le_bytes(self.partial), self.descriptor.take())))
    }

    /// Receives more bytes of the current message, and its descriptor.
    fn receive(&mut self) -> Result<usize, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut self.partial[self.partial_bytes..])];
        let received = recvmsg(&self.stream, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptor = descriptors.last().or(self.descriptor.take());
            }
        }
        Ok(received.bytes)
    }

    /// Handles a message about a client.
    fn handle(
        &self,
        (number, descriptor): Message,
        interrupts: &Interrupts,
    ) -> Result<Option<ServerEvent>, DeviceProblem> {
        let id = checked_id(number)?;
        match descriptor {
            // This client has more vectors than it asked for.
            Some(_) if id == self.own_id => Ok(None),
            Some(eventfd) => {
                interrupts.add_peer_eventfd(id, checked_eventfd(eventfd)?);
                Ok(Some(ServerEvent::PeerDoorbell(id)))
            }
            None => {
                interrupts.remove_peer(id);
                Ok(Some(ServerEvent::PeerGone(id)))
            }
        }
    }

    /// Handles all messages that have arrived. A server that violates the protocol is not read again, and counts as
    /// gone.
    pub(super) fn poll(&mut self, interrupts: &Interrupts) -> Vec<ServerEvent> {
        let mut events = Vec::new();
        for _ in 0..MESSAGES_MAX {
            if self.is_server_gone {
                break;
            }
            let handled =
                self.next_message().and_then(|message| message.map(|it| self.handle(it, interrupts)).transpose());
            match handled {
                Ok(None) => break,
                Ok(Some(event)) => events.extend(event),
                Err(_) => {
                    self.is_server_gone = true;
                    events.push(ServerEvent::ServerGone);
                }
            }
        }
        events
    }

    /// The socket, to be polled.
    pub(super) fn stream(&self) -> Arc<OwnedFd> {
        self.stream.clone()
    }
}

fn too_few_vectors(found: usize, vectors: usize) -> DeviceProblem {
    let found = format!("the server gave {found} of {vectors} doorbells");
    DeviceProblem::unsuitable(found, format!("start it with at least {vectors} vectors, or use fewer partitions"))
}

fn protocol_error(what: impl std::fmt::Display) -> DeviceProblem {
    let found = format!("the server {what}");
    DeviceProblem::unsuitable(found, "give the socket of an ivshmem server, such as 'crosslane device-server'")
}

fn checked_id(number: i64) -> Result<PeerId, DeviceProblem> {
    PeerId::try_from(number).map_err(|_| protocol_error(format!("sent client ID {number}, which is not of 16 bits")))
}

fn checked_eventfd(descriptor: OwnedFd) -> Result<OwnedFd, DeviceProblem> {
    let name = eventfd::kernel_name(&descriptor).map_err(DeviceProblem::system("readlink of /proc/self/fd"))?;
    let is_eventfd = eventfd::is_name_of_eventfd(&name);
    if is_eventfd { Ok(descriptor) } else { Err(protocol_error(format!("sent {name:?} instead of an eventfd"))) }
}
