//! How a relay meets its peer.

use super::super::lanes::{OwnMemory, Shared};
use super::super::meet::{agree, is_final, send_proposal};
use super::{Broken, Relay};
use crate::identity;
use crate::statistics::Counters;
use meeting::{Accepting, Answer, Endpoint, Memory, Met, Offer, Proposal, Reason, Rendezvous, Role, Step, bell};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The first occasions, on each of which a connecting end proposes to meet a peer that has sent.
const EAGER_OCCASIONS: u32 = 32;

/// What is known of the other end.
pub(super) enum State {
    Alone,
    Announced(Box<Accepting>),
    /// With memory of its own, unless it has proposed a window.
    Proposed(Box<(Proposal, Option<OwnMemory>)>),
    Met,
    /// The connection stays on TCP.
    Stays,
}

/// Two spans of windows for the peer, which takes them in place of both memories: its bytes then do not pass this
/// relay.
#[derive(Debug)]
pub struct WindowOffer {
    /// Of the memory in which the windows are. It is closed once the peer has its own.
    pub descriptor: OwnedFd,
    /// Where the spans are, with the secret of the lane that the peer reads.
    pub memory: Memory,
}

impl WindowOffer {
    fn offer(&self) -> Offer<'_> {
        Offer { descriptor: self.descriptor.as_fd(), memory: self.memory }
    }
}

/// What a relay has to do with windows.
#[derive(Debug, Default)]
pub(super) enum Windows {
    /// Its peer gets memory of this process.
    #[default]
    Unused,
    /// Not known yet: the ends do not meet before [`Relay::offer_window`].
    Awaited,
    /// Its peer gets these.
    Offered(WindowOffer),
    /// Its peer has them.
    Given(Given),
}

/// What the peer of a relay has reported since it was given windows.
#[derive(Debug, Default)]
pub(super) struct Given {
    /// It uses them.
    pub is_attached: bool,
    /// It has rung for the program of the other node.
    pub has_rung: bool,
    /// No process holds its bell any more, which is to be reported.
    pub has_left: bool,
    /// Its socket is closed.
    pub is_closed: bool,
}

impl Windows {
    pub fn given(&mut self) -> Option<&mut Given> {
        if let Self::Given(given) = self { Some(given) } else { None }
    }
}

impl Relay {
    /// Does not meet the peer until [`Relay::offer_window`].
    pub fn await_window(&mut self) {
        self.windows = Windows::Awaited;
    }

    /// Gives the peer windows as soon as the ends meet, or memory of this process.
    pub fn offer_window(&mut self, offer: Option<WindowOffer>) {
        self.windows = offer.map_or(Windows::Unused, Windows::Offered);
        self.meet(true);
    }

    /// Returns whether the peer may meet this end.
    pub fn may_meet(&self) -> bool {
        !matches!(self.state, State::Stays)
    }

    /// Returns whether the peer uses the windows that it was given.
    pub fn is_attached(&mut self) -> bool {
        self.windows.given().is_some_and(|given| given.is_attached)
    }

    /// Returns whether the peer has rung for the program of the other node since the last call.
    pub fn take_ring(&mut self) -> bool {
        self.windows.given().is_some_and(|given| std::mem::take(&mut given.has_rung))
    }

    /// Returns once whether the peer does not use the windows any more.
    pub fn take_left(&mut self) -> bool {
        self.windows.given().is_some_and(|given| std::mem::take(&mut given.has_left))
    }

    /// Wakes the peer for the program of the other node. A peer that has answered a proposal may use its windows, and
    /// sleep, before this end has read the answer: it is woken once the ends have met.
    pub fn wake(&mut self) {
        self.ring();
        self.is_ring_due = self.bell.is_none();
    }

    /// Tells the peer that the program of the other node does not use the windows any more, also a peer whose answer to
    /// a proposal was not read. Has no effect on lanes to this process.
    pub fn hang_up(&mut self) {
        if matches!(self.windows, Windows::Unused) {
            return;
        }
        if let Some(bell) = self.bell.take() {
            bell::hang_up(bell);
        }
        // What has not ended in a bell hangs up when it is dropped.
        self.state = State::Stays;
    }

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
        if matches!(self.state, State::Met | State::Stays) || matches!(self.windows, Windows::Awaited) {
            return;
        }
        self.state = match std::mem::replace(&mut self.state, State::Stays) {
            State::Alone => self.begin(has_peer_sent),
            State::Announced(mut accepting) => match accepting.advance(self.socket.as_fd()) {
                Step::Proposed => self.agree(*accepting),
                Step::Waiting | Step::Refused(_) | Step::Declined(_) => State::Announced(accepting),
            },
            State::Proposed(mut proposed) => match proposed.0.advance(self.socket.as_fd()) {
                Answer::Waiting => State::Proposed(proposed),
                Answer::Met(met) => self.use_memory(met, proposed.1),
                Answer::Refused(reason) | Answer::Declined(reason) => after(reason),
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
        let (place, policy) = (Rendezvous::Names(self.key), identity::private_policy());
        if self.role == Role::Accepted {
            let accepting = Accepting::announce(&place, socket, &endpoint, &policy)?;
            return Ok(State::Announced(Box::new(accepting)));
        }
        let mut proposal = Proposal::connect(&place, &endpoint, &policy)?;
        if let Windows::Offered(window) = &self.windows {
            proposal.send(socket, &window.offer())?;
            return Ok(State::Proposed(Box::new((proposal, None))));
        }
        let (proposal, memory) = send_proposal(proposal, socket)?;
        Ok(State::Proposed(Box::new((proposal, Some(memory)))))
    }

    fn agree(&mut self, mut accepting: Accepting) -> State {
        if let Windows::Offered(window) = &self.windows {
            let met = accepting.accept(&window.offer());
            return met.map_or_else(after, |met| self.use_memory(met, None));
        }
        match agree(&mut accepting) {
            Ok((met, memory)) => self.use_memory(met, Some(memory)),
            Err(reason) => after(reason),
        }
    }

    fn use_memory(&mut self, met: Box<Met>, memory: Option<OwnMemory>) -> State {
        let Some(memory) = memory else {
            // The peer's own memory is not used, and this process keeps no access to the spans.
            self.windows = Windows::Given(Given::default());
            self.bell = Some(met.bell);
            if self.is_ring_due {
                self.wake();
            }
            return State::Met;
        };
        let Ok(shared) = Shared::open(memory, &met, false) else {
            bell::refuse(met.bell, self.role, Reason::NoMemory);
            return State::Stays;
        };
        let (tcp, role) = (self.tcp(), self.role);
        let Met { bell, outgoing, incoming, .. } = *met;
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
