//! The connecting endpoint's side of a meeting.
//!
//! ```text
//! connect ──► Connected ── send ──► Proposed ── answer ──► Met, or Refused
//! ```

use std::os::fd::{AsFd, BorrowedFd};

use crate::bell::{self, Held};
use crate::counts::{self, Counts, Role};
use crate::diag::{self, LookUp};
use crate::endpoint::Endpoint;
use crate::message::{Kind, Memory, Message};
use crate::met::{Credentials, Met, peer_credentials};
use crate::place::Rendezvous;
use crate::reason::Reason;
use crate::receive::{Passed, Received, discard, receive, refuse_descriptors};
use crate::send::{Offer, send};
use crate::system::Descriptor;
use crate::verify::{Evidence, Partner, PeerUser, Policy, Trust, Window, look_up, verify};

/// A connecting endpoint that has reached the other one. It hangs up when it is dropped.
#[derive(Debug)]
pub struct Proposal {
    endpoint: Endpoint,
    policy: Policy,
    bell: Held,
    credentials: Credentials,
    peer: PeerUser,
    /// The user of the directory in which this endpoint has found the other one.
    user: Option<u32>,
    /// That user, if there is a key.
    partner: Option<Partner>,
    /// This endpoint asks for a proof by the bytes.
    wants_proof: bool,
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
    /// The other endpoint has hung up, or is not the other endpoint, and was told so. This is final.
    Refused(Reason),
    /// The other endpoint has refused, for a reason of its own. This is final.
    Declined(Reason),
}

impl Proposal {
    /// Connects to the other endpoint's announcement, in three system calls. Nothing is sent: the peer can be anybody
    /// who has bound the name, until its user is known.
    ///
    /// # Errors
    /// [`Reason::Nobody`] if there is no announcement, [`Reason::Full`] if too many callers wait, the policy's reason
    /// if it is that of a user who is not allowed, and [`Reason::Role`] for an endpoint that has accepted.
    pub fn connect(place: &Rendezvous, endpoint: &Endpoint, policy: &Policy) -> Result<Self, Reason> {
        if endpoint.role != Role::Connected {
            return Err(Reason::Role);
        }
        place.connect(endpoint.tuple.reversed(), |socket, user| Self::call(socket, user, endpoint, policy))
    }

    /// Proceeds with an endpoint that was found in the directory of a user.
    fn call(socket: Descriptor, user: Option<u32>, endpoint: &Endpoint, policy: &Policy) -> Result<Self, Reason> {
        let credentials = peer_credentials(socket.as_fd());
        let bell = Held::new(socket);
        let credentials = credentials.ok_or(Reason::System)?;
        let peer = (policy.admits)(credentials.uid, endpoint)?;
        let partner = policy.partner_of_directory(user, peer)?;
        let wants_proof = policy.evidence == Evidence::Proof
            && match diag::look_up_peer(endpoint) {
                LookUp::Found(entry) => !entry.is_connected() || PeerUser::Known(entry.uid) != peer,
                // The kernel may still answer by a socket that the peer passes.
                LookUp::Nothing | LookUp::Unavailable => true,
            };
        let (endpoint, policy) = (*endpoint, *policy);
        Ok(Self { endpoint, policy, bell, credentials, peer, user, partner, wants_proof, sent: None })
    }

    /// Returns the user, by its number on the machine, in whose directory this endpoint has found the other one.
    pub fn user(&self) -> Option<u32> {
        self.user
    }

    /// Returns whether this endpoint asks for a proof by the bytes, from the proposal on.
    pub fn wants_proof(&self) -> bool {
        self.wants_proof
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
        let proposal = Message { wants_proof: self.wants_proof, ..proposal };
        let proposal = self.policy.stated(proposal, self.partner, 0);
        let look_up = if self.policy.evidence == Evidence::Proof { diag::socket_to_pass() } else { None };
        let passed: Vec<_> = [offer.descriptor].into_iter().chain(look_up.as_ref().map(Descriptor::as_fd)).collect();
        send(bell, &proposal, &passed)?;
        self.sent = Some((offer.memory, before));
        Ok(())
    }

    /// Receives and verifies the answer, without blocking: one system call if there is none, 16 for a *yes* that is
    /// looked up, 11 without the look-up.
    pub fn advance(&mut self, socket: BorrowedFd<'_>) -> Answer {
        let (Some(bell), Some((memory, before))) = (self.bell.as_fd(), self.sent) else { return Answer::Waiting };
        let (message, memory_of_peer, passed) = match receive(bell) {
            Ok(Received::Nothing) => return Answer::Waiting,
            Ok(Received::Message(message, Passed { memory: Some(memory), look_up })) => (message, memory, look_up),
            Ok(Received::Message(message, Passed { memory: None, .. })) => {
                let Kind::No(reason) = message.kind else { return self.end(Reason::Descriptors) };
                self.bell.release().into_iter().for_each(bell::hang_up);
                return Answer::Declined(reason);
            }
            Ok(Received::Ended) => return self.end(Reason::Gone),
            Err(reason) => return self.end(reason),
        };
        refuse_descriptors(bell);
        let checked = self.check(socket, (memory, before), &message, passed.as_ref().map(Descriptor::as_fd));
        passed.into_iter().for_each(discard);
        let after = match checked {
            Ok(after) => after,
            Err(reason) => return self.end(reason),
        };
        let Some(bell) = self.bell.release() else { return Answer::Refused(Reason::Gone) };
        let met = Met::new((bell, memory_of_peer), &message, memory, after, self.credentials.pid);
        Answer::Met(if message.wants_proof { met.to_be_proven(Role::Connected) } else { met })
    }

    fn check(
        &self,
        socket: BorrowedFd<'_>,
        (memory, before): (Memory, Counts),
        message: &Message,
        passed: Option<BorrowedFd<'_>>,
    ) -> Result<Counts, Reason> {
        if message.kind != Kind::Yes {
            return Err(Reason::Malformed);
        }
        let evidence = self.policy.evidence;
        if evidence != Evidence::Proof && (passed.is_some() || message.wants_proof || message.user.is_some()) {
            return Err(Reason::Descriptors);
        }
        let after = counts::read(socket, self.endpoint.role)?;
        let look_up = look_up(&self.endpoint, message, passed, evidence);
        self.policy.check_answer(message, self.peer, self.partner, memory.secret)?;
        let whom = (self.peer, evidence);
        match verify(&self.endpoint, &Window { before, after }, message, look_up, whom)? {
            // It has changed since the proposal, or the peer has not heeded that.
            Trust::NeedsProof if !message.wants_proof => Err(Reason::NoProof),
            _ => Ok(after),
        }
    }

    /// Closes this process's descriptor, and leaves the proposal to the others that hold it: for a child, which shares
    /// it since `fork`.
    pub fn close_shared(mut self) {
        drop(self.bell.release());
    }

    /// Gives up, for a reason of the caller of this function, which the other endpoint is told.
    pub fn refuse(mut self, reason: Reason) {
        self.end(reason);
    }

    /// Tells the peer why this endpoint refuses, and hangs up.
    fn end(&mut self, reason: Reason) -> Answer {
        if let Some(bell) = self.bell.release() {
            bell::refuse(bell, self.endpoint.role, reason);
        }
        Answer::Refused(reason)
    }
}
