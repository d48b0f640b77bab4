//! How a relay meets its peer.

use super::super::lanes::{OwnMemory, Shared};
use super::super::meet::is_final;
use super::{Broken, Relay};
use crate::identity;
use crate::statistics::Counters;
use meeting::{Accepting, Answer, Endpoint, Met, Proposal, Reason, Role, Step};
use std::os::fd::{AsFd, BorrowedFd};

/// The first occasions, on each of which a connecting end proposes to meet a peer that has sent.
const EAGER_OCCASIONS: u32 = 32;

/// What is known of the other end.
pub(super) enum State {
    Alone,
    Announced(Box<Accepting>),
    Proposed(Box<(Proposal, OwnMemory)>),
    Met,
    /// The connection stays on TCP.
    Stays,
}

impl Relay {
    /// Returns the descriptor to be watched for input besides the socket. It changes as the ends meet.
    pub fn meeting_descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.state {
            State::Announced(accepting) => {
                let (listener, caller) = accepting.descriptors();
                Some(caller.unwrap_or(listener))
            }
            State::Proposed(proposed) => proposed.0.descriptor(),
            State::Met => self.bell.as_ref().map(AsFd::as_fd),
            State::Alone | State::Stays => None,
        }
    }

    /// Returns whether the ends have met.
    pub fn has_met(&self) -> bool {
        matches!(self.state, State::Met)
    }

    /// Proceeds with the meeting. A connecting end proposes it on the first occasions on which its peer has sent, and
    /// then ever more rarely: the peer may never load the library.
    pub fn meet(&mut self, has_peer_sent: bool) {
        if matches!(self.state, State::Met | State::Stays) {
            return;
        }
        self.state = match std::mem::replace(&mut self.state, State::Stays) {
            State::Alone => self.begin(has_peer_sent),
            State::Announced(mut accepting) => match accepting.advance(self.socket.as_fd()) {
                Step::Proposed => self.agree(*accepting),
                Step::Waiting | Step::Refused(_) => State::Announced(accepting),
            },
            State::Proposed(mut proposed) => match proposed.0.advance(self.socket.as_fd()) {
                Answer::Waiting => State::Proposed(proposed),
                Answer::Met(met) => self.use_memory(met, proposed.1),
                Answer::Refused(reason) => after(reason),
            },
            ended @ (State::Met | State::Stays) => ended,
        };
    }

    fn begin(&mut self, has_peer_sent: bool) -> State {
        self.occasions = self.occasions.saturating_add(1);
        let is_eager = has_peer_sent && self.occasions <= EAGER_OCCASIONS;
        if self.role == Role::Connected && !is_eager && !self.occasions.is_power_of_two() {
            return State::Alone;
        }
        self.try_begin().unwrap_or_else(after)
    }

    fn try_begin(&mut self) -> Result<State, Reason> {
        let socket = self.socket.as_fd();
        let endpoint = match self.endpoint {
            Some(endpoint) => endpoint,
            None => *self.endpoint.insert(Endpoint::of(socket, self.role)?),
        };
        let policy = identity::policy();
        if self.role == Role::Accepted {
            let accepting = Accepting::announce(&self.key, socket, &endpoint, &policy)?;
            return Ok(State::Announced(Box::new(accepting)));
        }
        let mut proposal = Proposal::connect(&self.key, &endpoint, &policy)?;
        let mut memory = OwnMemory::create().map_err(|_| Reason::NoMemory)?;
        memory.pass(|offer| proposal.send(socket, offer))?;
        Ok(State::Proposed(Box::new((proposal, memory))))
    }

    fn agree(&mut self, accepting: Accepting) -> State {
        let Ok(mut memory) = OwnMemory::create() else { return State::Stays };
        match memory.pass(|offer| accepting.accept(offer)) {
            Ok(met) => self.use_memory(met, memory),
            Err(reason) => after(reason),
        }
    }

    fn use_memory(&mut self, met: Met, memory: OwnMemory) -> State {
        let Ok(shared) = Shared::open(memory, &met) else { return State::Stays };
        let (tcp, role) = (self.tcp(), self.role);
        let Met { bell, outgoing, incoming, .. } = met;
        self.bell = Some(bell);
        self.receiver.install(shared.incoming(incoming.secret), Counters::default());
        self.receiver.allow_moves();
        self.sender.install(shared.outgoing(outgoing.secret), Counters::default(), tcp, role);
        if self.output_end != super::OutputEnd::Open {
            self.sender.stay_on_tcp();
            self.sender.go_back(tcp, role);
        }
        // The peer sleeps until it learns that it is asked.
        self.ring();
        State::Met
    }
}

/// Returns the state after an attempt has failed.
fn after(reason: Reason) -> State {
    if is_final(reason) { State::Stays } else { State::Alone }
}

impl From<lane::Corrupt> for Broken {
    fn from(_: lane::Corrupt) -> Self {
        Self
    }
}
