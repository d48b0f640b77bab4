//! The accepting endpoint's side of a meeting.
//!
//! ```text
//! Announced ── a caller arrives ──► Called ── its proposal is read and verified ──► Proposed ──► answered yes: Met
//!     ▲                               │                                                │
//!     └────── hung up, refused ───────┴────────────────── answered no ─────────────────┘
//! ```

use std::os::fd::{AsFd, BorrowedFd};

use crate::announce::{Announcement, Caller};
use crate::bell;
use crate::counts::{self, Counts, Role};
use crate::diag;
use crate::endpoint::Endpoint;
use crate::message::{Kind, Message};
use crate::met::Met;
use crate::place::Rendezvous;
use crate::reason::Reason;
use crate::receive::{Passed, Received, discard, receive, refuse_descriptors};
use crate::send::{Offer, send};
use crate::system::{self, Descriptor, FIONREAD};
use crate::verify::{Evidence, Partner, PeerUser, Policy, Trust, Window, look_up, verify};

/// Most callers that one [`Accepting::advance`] accepts: others of the queue wait for the next.
const CALLERS_MAX: usize = 4;

/// An accepting endpoint that has announced itself. It announces itself no longer when it is dropped.
#[derive(Debug)]
pub struct Accepting {
    endpoint: Endpoint,
    policy: Policy,
    announcement: Announcement,
    /// Read before the announcement, and so before any proposal.
    before: Counts,
    state: State,
}

#[derive(Debug)]
enum State {
    Announced,
    /// A caller that has not sent its proposal yet.
    Called(Caller, PeerUser),
    Proposed {
        caller: Caller,
        message: Box<Message>,
        descriptor: Descriptor,
        after: Counts,
        trust: Trust,
        /// Who has sent the proposal, if there is a key.
        partner: Option<Partner>,
    },
}

/// The result of a step of the accepting endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing has arrived.
    Waiting,
    /// The other endpoint proposes to meet. The next is [`Accepting::accept`] or [`Accepting::refuse`].
    Proposed,
    /// A caller was refused. The endpoint stays announced.
    Refused(Reason),
    /// A caller has refused, for a reason of its own. The endpoint stays announced.
    Declined(Reason),
}

impl Accepting {
    /// Announces an accepting endpoint, in nine system calls.
    ///
    /// # Errors
    /// Those of [`counts::read`] and of [`Announcement::bind`]; [`Reason::Role`] for an endpoint that has connected.
    pub fn announce(
        place: &Rendezvous,
        socket: BorrowedFd<'_>,
        endpoint: &Endpoint,
        policy: &Policy,
    ) -> Result<Self, Reason> {
        if endpoint.role != Role::Accepted {
            return Err(Reason::Role);
        }
        let before = counts::read(socket, endpoint.role)?;
        let announcement = Announcement::bind(place, endpoint)?;
        Ok(Self { endpoint: *endpoint, policy: *policy, announcement, before, state: State::Announced })
    }

    /// Returns the descriptors that become readable when there is something to do: the listener's, and that of a caller
    /// that has not sent anything yet.
    pub fn descriptors(&self) -> (BorrowedFd<'_>, Option<BorrowedFd<'_>>) {
        let caller = match &self.state {
            State::Called(caller, _) => caller.bell.as_fd(),
            State::Announced | State::Proposed { .. } => None,
        };
        (self.announcement.as_fd(), caller)
    }

    /// Proceeds as far as is possible without blocking: one system call if nobody has called, 19 up to a proposal that
    /// is looked up, 14 without the look-up.
    pub fn advance(&mut self, socket: BorrowedFd<'_>) -> Step {
        for _ in 0..CALLERS_MAX {
            let (caller, peer) = match std::mem::replace(&mut self.state, State::Announced) {
                State::Announced => match self.next_caller() {
                    Ok(Some(called)) => called,
                    Ok(None) => return Step::Waiting,
                    Err(reason) => return Step::Refused(reason),
                },
                State::Called(caller, peer) => (caller, peer),
                proposed @ State::Proposed { .. } => {
                    self.state = proposed;
                    return Step::Proposed;
                }
            };
            let Some(bell) = caller.bell.as_fd() else { continue };
            match receive(bell) {
                Ok(Received::Ended) => {}
                Ok(Received::Message(message, passed)) => return self.propose(socket, (caller, peer), message, passed),
                Err(reason) => return self.refuse_caller(&caller, reason),
                // A silent caller must not keep others out.
                Ok(Received::Nothing) => match self.next_caller() {
                    Ok(Some((next, peer))) => self.state = State::Called(next, peer),
                    Ok(None) | Err(_) => {
                        self.state = State::Called(caller, peer);
                        return Step::Waiting;
                    }
                },
            }
        }
        Step::Waiting
    }

    /// Accepts the next caller of an allowed user. Another one is told so where users share a rack, and hung up.
    fn next_caller(&self) -> Result<Option<(Caller, PeerUser)>, Reason> {
        let Some(caller) = self.announcement.accept()? else { return Ok(None) };
        match (self.policy.admits)(caller.credentials.uid, &self.endpoint) {
            Ok(peer) => Ok(Some((caller, peer))),
            Err(reason) => {
                if self.policy.evidence == Evidence::Proof {
                    self.refuse_caller(&caller, reason);
                }
                Err(reason)
            }
        }
    }

    /// Verifies a proposal.
    fn propose(
        &mut self,
        socket: BorrowedFd<'_>,
        (caller, peer): (Caller, PeerUser),
        message: Message,
        passed: Passed,
    ) -> Step {
        if let Kind::No(reason) = message.kind {
            // The reason of a caller whose user is not known is not shown.
            return if peer == PeerUser::Hidden { Step::Waiting } else { Step::Declined(reason) };
        }
        let checked = self.check(socket, (&caller, peer), &message, passed.look_up.as_ref().map(Descriptor::as_fd));
        passed.look_up.into_iter().for_each(discard);
        match (checked, passed.memory) {
            (Ok((after, trust, partner)), Some(descriptor)) => {
                let message = Box::new(message);
                self.state = State::Proposed { caller, message, descriptor, after, trust, partner };
                Step::Proposed
            }
            (Ok(_), None) => self.refuse_caller(&caller, Reason::Malformed),
            (Err(reason), _) => self.refuse_caller(&caller, reason),
        }
    }

    fn check(
        &self,
        socket: BorrowedFd<'_>,
        (caller, peer): (&Caller, PeerUser),
        message: &Message,
        passed: Option<BorrowedFd<'_>>,
    ) -> Result<(Counts, Trust, Option<Partner>), Reason> {
        let bell = caller.bell.as_fd().ok_or(Reason::Gone)?;
        refuse_descriptors(bell);
        // Nothing follows a proposal before its answer.
        let is_alone = system::number::<FIONREAD>(bell) == Ok(0);
        if message.kind != Kind::Proposal || !is_alone {
            return Err(Reason::Malformed);
        }
        let evidence = self.policy.evidence;
        if evidence != Evidence::Proof && (passed.is_some() || message.wants_proof || message.user.is_some()) {
            return Err(Reason::Descriptors);
        }
        let after = counts::read(socket, self.endpoint.role)?;
        let window = Window { before: self.before, after };
        let look_up = look_up(&self.endpoint, message, passed, evidence);
        let partner = self.policy.partner_of_proposal(message, peer, &self.endpoint)?;
        let trust = verify(&self.endpoint, &window, message, look_up, (peer, evidence))?;
        Ok((after, if message.wants_proof { Trust::NeedsProof } else { trust }, partner))
    }

    /// Answers *no* and hangs up.
    fn refuse_caller(&self, caller: &Caller, reason: Reason) -> Step {
        if let Some(bell) = caller.bell.as_fd() {
            bell::tell(bell, self.endpoint.role, reason);
        }
        Step::Refused(reason)
    }

    /// Refuses the proposal, for a reason of the caller of this function. No effect without one.
    pub fn refuse(&mut self, reason: Reason) {
        if let State::Proposed { caller, .. } = std::mem::replace(&mut self.state, State::Announced) {
            self.refuse_caller(&caller, reason);
        }
    }

    /// Closes this process's descriptors, and leaves the announcement and its callers to the others that hold them: for
    /// a child, which shares them since `fork`.
    pub fn close_shared(self) {
        self.announcement.close_shared();
        if let State::Called(mut caller, _) | State::Proposed { mut caller, .. } = self.state {
            drop(caller.bell.release());
        }
    }

    /// Accepts the proposal and passes this endpoint's memory, in four system calls. The connecting endpoint may still
    /// refuse, by a *no* on the bell, if this endpoint's counts do not fit its own. The endpoint stays announced until
    /// it is dropped.
    ///
    /// # Errors
    /// [`Reason::Nobody`] without a proposal, [`Reason::Gone`] if the peer has hung up, and the reasons of other errors
    /// of `sendmsg(2)`, which the peer is told.
    pub fn accept(&mut self, offer: &Offer<'_>) -> Result<Box<Met>, Reason> {
        let state = std::mem::replace(&mut self.state, State::Announced);
        let State::Proposed { mut caller, message, descriptor, after, trust, partner } = state else {
            return Err(Reason::Nobody);
        };
        let wants_proof = trust == Trust::NeedsProof;
        let yes = Message { wants_proof, ..Message::new(Kind::Yes, &self.endpoint, after, offer.memory) };
        let yes = self.policy.stated(yes, partner, message.memory.secret);
        let look_up = if self.policy.evidence == Evidence::Proof { diag::socket_to_pass() } else { None };
        let passed: Vec<_> = [offer.descriptor].into_iter().chain(look_up.as_ref().map(Descriptor::as_fd)).collect();
        let bell = caller.bell.as_fd().ok_or(Reason::Gone)?;
        send(bell, &yes, &passed).inspect_err(|reason| bell::tell(bell, self.endpoint.role, *reason))?;
        let bell = caller.bell.release().ok_or(Reason::Gone)?;
        let met = Met::new((bell, descriptor), &message, offer.memory, after, caller.credentials.pid);
        Ok(if wants_proof { met.to_be_proven(Role::Accepted) } else { met })
    }
}
