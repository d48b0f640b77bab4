//! The connecting endpoint's side of a meeting.
//!
//! ```text
//! connect ──► Connected ── send ──► Proposed ── answer ──► Met, or Refused
//! ```

use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType};

use crate::announce::SOCKET_FLAGS;
use crate::bell::{Held, hang_up};
use crate::counts::{self, Counts, Role};
use crate::diag::{self, LookUp};
use crate::endpoint::Endpoint;
use crate::message::{Kind, Memory, Message};
use crate::met::{Credentials, Met, peer_credentials};
use crate::name::{self, Key};
use crate::reason::Reason;
use crate::receive::{Received, receive, refuse_descriptors};
use crate::send::{Offer, send};
use crate::system::Descriptor;
use crate::verify::{Policy, Window, verify};

/// A connecting endpoint that has reached the other one. It hangs up when it is dropped.
#[derive(Debug)]
pub struct Proposal {
    endpoint: Endpoint,
    policy: Policy,
    bell: Held,
    credentials: Credentials,
    /// What was sent: the memory, and the counts read before.
    sent: Option<(Memory, Counts)>,
}

/// The result of a step of the connecting endpoint.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "it is destructured at once")]
pub enum Answer {
    /// The answer has not arrived, or nothing was sent.
    Waiting,
    /// The other endpoint has agreed, and is the other endpoint.
    Met(Box<Met>),
    /// The other endpoint has refused or hung up, or is not the other endpoint. This is final.
    Refused(Reason),
}

impl Proposal {
    /// Connects to the other endpoint's announcement, in three system calls. Nothing is sent: the peer can be anybody
    /// who has bound the name, until its user is known.
    ///
    /// # Errors
    /// [`Reason::Nobody`] if there is no announcement, [`Reason::Full`] if too many callers wait, [`Reason::User`] if
    /// it is another user's, and [`Reason::Role`] for an endpoint that has accepted.
    pub fn connect(key: &Key, endpoint: &Endpoint, policy: &Policy) -> Result<Self, Reason> {
        if endpoint.role != Role::Connected {
            return Err(Reason::Role);
        }
        let address = name::address(key, endpoint.tuple.reversed())?;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SOCKET_FLAGS, None);
        let socket = socket.and_then(Descriptor::kept).map_err(Reason::of_errno)?;
        match rustix::net::connect(&socket, &address) {
            Err(Errno::CONNREFUSED) => return Err(Reason::Nobody),
            Err(Errno::AGAIN) => return Err(Reason::Full),
            connected => connected.map_err(Reason::of_errno)?,
        }
        let credentials = peer_credentials(socket.as_fd());
        let bell = Held::new(socket);
        match credentials {
            Some(credentials) if credentials.uid == policy.allowed_uid => {
                Ok(Self { endpoint: *endpoint, policy: *policy, bell, credentials, sent: None })
            }
            _ => Err(Reason::User),
        }
    }

    /// Returns the descriptor that becomes readable when the answer arrives. `None` after the end.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.bell.as_fd()
    }

    /// Sends the proposal with this endpoint's memory, in seven system calls. A second one is not sent.
    ///
    /// # Errors
    /// Those of [`counts::read`], [`Reason::Gone`], and the reasons of other errors of `sendmsg(2)`.
    pub fn send(&mut self, socket: BorrowedFd<'_>, offer: &Offer<'_>) -> Result<(), Reason> {
        let bell = self.bell.as_fd().filter(|_| self.sent.is_none()).ok_or(Reason::Gone)?;
        let before = counts::read(socket, self.endpoint.role)?;
        let proposal = Message::new(Kind::Proposal, &self.endpoint, before, offer.memory);
        send(bell, &proposal, Some(offer.descriptor))?;
        self.sent = Some((offer.memory, before));
        Ok(())
    }

    /// Receives and verifies the answer, without blocking: one system call if there is none, 16 for a *yes* that is
    /// looked up, 11 without the look-up.
    pub fn advance(&mut self, socket: BorrowedFd<'_>) -> Answer {
        let (Some(bell), Some((memory, before))) = (self.bell.as_fd(), self.sent) else { return Answer::Waiting };
        let (message, descriptor) = match receive(bell) {
            Ok(Received::Nothing) => return Answer::Waiting,
            Ok(Received::Message(message, Some(descriptor))) => (message, descriptor),
            Ok(Received::Message(message, None)) => return self.end(refusal(&message)),
            Ok(Received::Ended) => return self.end(Reason::Gone),
            Err(reason) => return self.end(reason),
        };
        refuse_descriptors(bell);
        match self.check(socket, before, &message) {
            Ok(after) => match self.bell.release() {
                Some(bell) => Answer::Met(Met::new((bell, descriptor), &message, memory, after, self.credentials.pid)),
                None => Answer::Refused(Reason::Gone),
            },
            Err(reason) => self.end(reason),
        }
    }

    fn check(&self, socket: BorrowedFd<'_>, before: Counts, message: &Message) -> Result<Counts, Reason> {
        if message.kind != Kind::Yes {
            return Err(Reason::Malformed);
        }
        let after = counts::read(socket, self.endpoint.role)?;
        let look_up = if self.policy.looks_up { diag::look_up_peer(&self.endpoint) } else { LookUp::Unavailable };
        verify(&self.endpoint, &Window { before, after }, message, look_up, &self.policy)?;
        Ok(after)
    }

    /// Closes this process's descriptor, and leaves the proposal to the others that hold it: for a child, which shares
    /// it since `fork`.
    pub fn close_shared(mut self) {
        drop(self.bell.release());
    }

    /// Hangs up.
    fn end(&mut self, reason: Reason) -> Answer {
        if let Some(bell) = self.bell.release() {
            hang_up(bell);
        }
        Answer::Refused(reason)
    }
}

/// Returns the reason of an answer without a descriptor.
fn refusal(message: &Message) -> Reason {
    match message.kind {
        Kind::No(reason) => reason,
        Kind::Proposal | Kind::Yes => Reason::Descriptors,
    }
}
