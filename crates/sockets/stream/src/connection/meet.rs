//! How the two ends of the connection find each other and exchange memory; see the crate `meeting`.

use super::lanes::{OwnMemory, Shared};
use super::receiver::Receiver;
use super::sender::Sender;
use super::sharing::Sharing;
use super::{Connection, MEETINGS, Use};
use crate::epoll;
use crate::identity;
use crate::kernel::Tcp;
use crate::remote;
use crate::spans;
use crate::statistics::{self, Counters};
use crate::young::{Occasion, Transfer, Young};
use meeting::proof::{Progress, Stream};
use meeting::{Accepting, Answer, Descriptor, Endpoint, Met, Policy, Proposal, Prover, Reason, Rendezvous, Role, Step};
use path::SendBy;
use rustix::io::Errno;
use socket::descriptor::hidden::HiddenFd;
use socket::process::blocking;
use socket::process::clock::now_ns;
use socket::process::limit;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Transfers in each of which an end that has proposed to meet checks for the answer.
const CHECKS_MAX: u32 = 16;

/// Transfers by TCP after which an end that has met the other checks whether that is gone: a call in the kernel does
/// not notice the end of a bell, and another process may hold the peer's end.
const TRANSFERS_PER_BELL_CHECK: u32 = 16;

/// How long to wait for a sender that goes back to TCP at the same time, and the time between checks.
const FREEZE_NS_MAX: u64 = 1_000_000_000;
const FREEZE_NAP: Duration = Duration::from_micros(20);

/// What is known of the other end.
#[derive(Default)]
pub(super) struct Meeting {
    young: Option<Young>,
    pub(super) state: State,
    /// The bell, while the ends have met.
    pub(super) bell: Option<HiddenFd>,
    /// Transfers by TCP of ends that have met.
    transfers: u32,
    failures: Failures,
    /// More than one program can claim to be the other end, so that a failure with one of them is not final.
    has_choice: bool,
    /// The user whose program this end has proposed to meet.
    candidate: Option<u32>,
    /// Users whose programs have turned out not to be the other end, the last one last.
    avoided: Vec<u32>,
}

/// Why an attempt to meet has failed.
#[derive(Clone, Copy)]
struct Failure {
    reason: Reason,
    /// The peer has reported it.
    is_reported: bool,
}

impl Failure {
    fn reported(reason: Reason) -> Self {
        Self { reason, is_reported: true }
    }
}

impl From<Reason> for Failure {
    fn from(reason: Reason) -> Self {
        Self { reason, is_reported: false }
    }
}

/// Attempts to meet that have failed.
#[derive(Default)]
struct Failures {
    /// Why the last one has failed.
    last: Option<Reason>,
    /// The reason with which the connection is shown.
    shown: Option<Reason>,
}

#[derive(Default)]
pub(super) enum State {
    /// Nothing: the connection uses TCP.
    #[default]
    Alone,
    /// This end has announced itself.
    Announced(Box<Accepting>),
    /// This end has proposed to meet.
    Proposed(Box<Proposed>),
    /// The ends have agreed, and compare bytes of the connection before they use their memory.
    Proving(Box<Proving>),
    /// The ends have met.
    Met,
    /// Other processes may hold the connection, which uses TCP until none of them does.
    Shared(Sharing),
    /// The connection stays on TCP.
    Stays,
}

pub(super) struct Proposed {
    proposal: Proposal,
    memory: OwnMemory,
    checks_left: u32,
}

pub(super) struct Proving {
    prover: Prover,
    /// Taken when it is proven.
    met: Option<(Box<Met>, OwnMemory)>,
}

impl Drop for Proving {
    fn drop(&mut self) {
        if let Some((met, _)) = self.met.take() {
            meeting::bell::hang_up(met.bell);
        }
    }
}

impl Meeting {
    /// Returns the state of a connection that has not met its other end.
    pub fn new(young: Young) -> Self {
        match Sharing::of(young) {
            None => Self { young: Some(young), ..Self::default() },
            Some(sharing) => Self { young: Some(young.taken_over()), state: State::Shared(sharing), ..Self::default() },
        }
    }

    /// Tries others before a user from now on.
    fn avoid(&mut self, user: u32) {
        self.avoided.retain(|known| *known != user);
        self.avoided.push(user);
    }

    /// Counts requests from the beginning.
    pub fn begin_anew(&mut self, young: Young) {
        self.young = Some(young);
    }

    /// Hangs up the bell.
    pub fn hang_up(&mut self) {
        self.bell = None;
        if !matches!(self.state, State::Alone) {
            self.stay();
        }
    }

    /// Ends an announcement that nobody has answered.
    pub fn withdraw(&mut self) {
        if matches!(self.state, State::Announced(_)) {
            self.state = State::Alone;
        }
    }

    /// Counts a transfer, and returns whether it is an occasion to proceed.
    fn count(&mut self, transfer: Transfer) -> Option<Occasion> {
        match &mut self.state {
            State::Stays => return None,
            State::Met => {
                self.transfers = (self.transfers + 1) % TRANSFERS_PER_BELL_CHECK;
                return (self.transfers == 0).then_some(Occasion::Check);
            }
            State::Shared(sharing) => return sharing.count(),
            State::Proving(_) => return Some(Occasion::Check),
            State::Alone | State::Announced(_) | State::Proposed(_) => {}
        }
        let (next, occasion) = self.young?.count(transfer);
        self.young = Some(next);
        if let State::Proposed(proposed) = &mut self.state
            && proposed.checks_left > 0
        {
            proposed.checks_left -= 1;
            return Some(Occasion::Check);
        }
        (occasion != Occasion::None).then_some(occasion)
    }
}

impl Connection {
    /// Keeps bytes that TCP has carried, as far as the ends compare them. `spans` are those of the call; none if it had
    /// no memory.
    ///
    /// # Safety
    /// The first `bytes` bytes of the spans are readable.
    #[cold]
    pub(super) unsafe fn keep(&self, stream: Stream, spans: &[libc::iovec], bytes: usize) {
        let is_alone = match stream {
            Stream::Sent => self.sender.lock().is_some_and(|sender| !sender.is_busy()),
            Stream::Received => self.receiver.lock().is_some_and(|receiver| !receiver.is_busy()),
        };
        let Some(mut meeting) = self.meeting.lock() else { return };
        let State::Proving(proving) = &mut meeting.state else { return };
        // Nobody knows in which order calls of several threads have sent or received.
        if spans.is_empty() || !is_alone {
            return proving.prover.note_missed();
        }
        let mut copy = |offset: usize, to: &mut [u8]| {
            // SAFETY: the bytes are within the first `bytes` of the spans, which are readable by this function's
            // contract.
            unsafe { spans::copy(spans, offset, to) };
        };
        proving.prover.note(stream, bytes, &mut copy);
    }

    /// Counts a transfer by TCP, and lets the ends meet if it is an occasion.
    pub(super) fn count(&'static self, tcp: Tcp, transfer: Transfer) {
        let occasion = self.meeting.lock().and_then(|mut meeting| meeting.count(transfer));
        if let Some(occasion) = occasion {
            self.meet(tcp, occasion);
            // Not within `meet`: before a call of the program, the call itself consents, or is one that cannot.
            if self.has_met() {
                self.consent(tcp);
            }
        }
    }

    /// Announces this end, proposes to meet, or proceeds with what has begun.
    #[cold]
    #[inline(never)]
    pub fn meet(&'static self, tcp: Tcp, occasion: Occasion) {
        if occasion == Occasion::Holders {
            return self.take_over();
        }
        let Some(_one_at_a_time) = MEETINGS.try_lock() else { return };
        let Some(mut meeting) = self.meeting.lock() else { return };
        let met = match std::mem::take(&mut meeting.state) {
            State::Met => {
                meeting.state = State::Met;
                drop(meeting);
                return self.check_bell(tcp);
            }
            State::Alone if occasion == Occasion::Meet && self.may_begin_to_meet(tcp) => {
                self.try_to_begin(tcp, &mut meeting)
            }
            State::Announced(accepting) => self.advance_announced(tcp, accepting, &mut meeting),
            State::Proposed(proposed) => self.advance_proposed(tcp, proposed, occasion, &mut meeting),
            State::Proving(proving) => self.advance_proof(tcp, proving, &mut meeting),
            unchanged => {
                meeting.state = unchanged;
                None
            }
        };
        self.is_proving.store(matches!(meeting.state, State::Proving(_)), Ordering::Relaxed);
        if let Some((met, memory)) = met {
            let has_met = self.use_memory(tcp, met, memory, &mut meeting);
            meeting.state = if has_met { State::Met } else { State::Stays };
            drop(meeting);
            let descriptors = self.descriptors.lock().map(|descriptors| descriptors.clone()).unwrap_or_default();
            descriptors.into_iter().filter(|_| has_met).for_each(|fd| epoll::adopt(self, fd));
            self.allow_moves();
        }
    }

    fn try_to_begin(&self, tcp: Tcp, meeting: &mut Meeting) -> Option<(Box<Met>, OwnMemory)> {
        match self.begin(tcp, meeting, None) {
            Ok(begun) => {
                meeting.state = begun;
                None
            }
            Err(reason) => self.fail(tcp, reason.into(), meeting),
        }
    }

    /// Answers callers. Stays announced unless one was agreed with.
    #[inline(never)] // As the other steps: threads may have 16 KiB of stack.
    fn advance_announced(
        &self,
        tcp: Tcp,
        mut accepting: Box<Accepting>,
        meeting: &mut Meeting,
    ) -> Option<(Box<Met>, OwnMemory)> {
        let failure = match accepting.advance(tcp.borrow()) {
            Step::Proposed => match agree(&mut accepting) {
                Ok((met, memory)) => return self.prove_or_use(met, memory, &mut meeting.state),
                Err(reason) => Some(reason.into()),
            },
            Step::Refused(reason) => Some(reason.into()),
            Step::Declined(reason) => Some(Failure::reported(reason)),
            Step::Waiting => None,
        };
        if let Some(failure) = failure {
            self.note_failure(tcp, failure, &mut meeting.failures);
        }
        meeting.state = State::Announced(accepting);
        None
    }

    /// Looks for the answer to the proposal. Somebody who keeps silent must not keep the other end out.
    #[inline(never)] // As above.
    fn advance_proposed(
        &self,
        tcp: Tcp,
        mut proposed: Box<Proposed>,
        occasion: Occasion,
        meeting: &mut Meeting,
    ) -> Option<(Box<Met>, OwnMemory)> {
        match proposed.proposal.advance(tcp.borrow()) {
            Answer::Met(met) => self.prove_or_use(met, proposed.memory, &mut meeting.state),
            Answer::Waiting => {
                let is_silent = occasion == Occasion::Meet && proposed.checks_left == 0;
                let silent = proposed.proposal.user().filter(|_| is_silent && meeting.has_choice);
                let another = silent.and_then(|user| self.begin(tcp, meeting, Some(user)).ok());
                match (another, silent) {
                    (Some(another), Some(silent)) => {
                        meeting.avoid(silent);
                        meeting.state = another;
                    }
                    _ => {
                        meeting.candidate = proposed.proposal.user();
                        meeting.state = State::Proposed(proposed);
                    }
                }
                None
            }
            Answer::Refused(reason) => self.fail(tcp, reason.into(), meeting),
            Answer::Declined(reason) => self.fail(tcp, Failure::reported(reason), meeting),
        }
    }

    /// Notes that an attempt to meet has failed.
    fn fail(&self, tcp: Tcp, failure: Failure, meeting: &mut Meeting) -> Option<(Box<Met>, OwnMemory)> {
        self.note_failure(tcp, failure, &mut meeting.failures);
        if let Some(user) = meeting.candidate.take() {
            meeting.avoid(user);
        }
        let is_final = is_final(failure.reason) && !meeting.has_choice;
        meeting.state = if is_final { State::Stays } else { State::Alone };
        None
    }

    /// Proceeds with the comparison of bytes. Returns what the ends have agreed on once it is a proof.
    fn advance_proof(
        &self,
        tcp: Tcp,
        mut proving: Box<Proving>,
        meeting: &mut Meeting,
    ) -> Option<(Box<Met>, OwnMemory)> {
        let bell = proving.met.as_ref().map(|(met, _)| met.bell.as_fd());
        let counts = || meeting::counts::read(tcp.borrow(), self.role()).ok();
        let progress = bell.map(|bell| proving.prover.advance(bell, counts));
        match progress.unwrap_or(Progress::Refused(Reason::Gone)) {
            Progress::Waiting => {
                meeting.state = State::Proving(proving);
                None
            }
            Progress::Proven => proving.met.take(),
            Progress::Refused(reason) => self.fail(tcp, reason.into(), meeting),
            Progress::Declined(reason) => self.fail(tcp, Failure::reported(reason), meeting),
        }
    }

    /// Returns what the ends have agreed on, or begins to compare bytes if that has to be proven first.
    fn prove_or_use(&self, mut met: Box<Met>, memory: OwnMemory, state: &mut State) -> Option<(Box<Met>, OwnMemory)> {
        let Some(prover) = met.proof.take() else { return Some((met, memory)) };
        *state = State::Proving(Box::new(Proving { prover: *prover, met: Some((met, memory)) }));
        None
    }

    /// Returns whether nothing is in lanes of an earlier meeting, and somebody may go on in place of that peer.
    fn may_begin_to_meet(&self, tcp: Tcp) -> bool {
        let Some(mut receiver) = self.receiver.lock() else { return false };
        let is_by_tcp = receiver.is_plain() && self.sender.lock().is_some_and(|sender| sender.is_by_tcp());
        is_by_tcp && (receiver.lane().is_none() || !tcp.has_ended())
    }

    /// Notes the end of the peer's bell, if it has come.
    #[inline(never)]
    fn check_bell(&'static self, tcp: Tcp) {
        let bell = self.bell();
        if bell >= 0 && blocking::poll_now(bell, libc::POLLIN) & libc::POLLHUP != 0 {
            self.note_hung_up(self.current_use(tcp.0));
        }
    }

    /// Consents to a move, whether or not the peer has asked for it already, so that what it sends next uses the lane.
    fn consent(&self, tcp: Tcp) {
        if let Some(mut receiver) = self.receiver.lock() {
            receiver.consent(tcp);
        }
    }

    /// Counts an attempt to meet that has failed, and shows the connection with the reason.
    #[cold]
    #[inline(never)]
    fn note_failure(&self, tcp: Tcp, failure: Failure, failures: &mut Failures) {
        let Failure { reason, is_reported } = failure;
        let is_repeated = failures.last.replace(reason) == Some(reason);
        // The peer may announce itself a moment later.
        if reason == Reason::Nobody && !is_repeated && !is_reported {
            return;
        }
        statistics::count_failure(reason);
        if failures.shown.replace(reason) == Some(reason) {
            return;
        }
        let counters = Counters::open_on_tcp(tcp.0, self.role(), reason, is_reported);
        if let (Some(mut sender), Some(mut receiver)) = (self.sender.lock(), self.receiver.lock()) {
            sender.set_counters(counters.clone());
            receiver.set_counters(counters);
        }
    }

    /// Returns why the last attempt to meet has failed.
    pub fn failure(&self) -> Option<Reason> {
        self.meeting.lock().and_then(|meeting| meeting.failures.last)
    }

    /// Announces this end, or proposes to meet. A user who has kept `silent` is left out.
    #[inline(never)] // As the other steps: threads may have 16 KiB of stack.
    fn begin(&self, tcp: Tcp, meeting: &mut Meeting, silent: Option<u32>) -> Result<State, Reason> {
        (meeting.candidate, meeting.has_choice) = (None, silent.is_some());
        // A program that has set itself such a limit is to have all of it.
        if limit::is_address_space_limited() {
            return Err(Reason::AddressSpace);
        }
        let endpoint = Endpoint::of(tcp.borrow(), self.role())?;
        let (mut place, policy) = identity::meeting_place(&endpoint, &meeting.avoided)?;
        if self.role() == Role::Accepted {
            // In a shared rack, another one than the peer may call first.
            meeting.has_choice = matches!(place, Rendezvous::Directories(_));
            return Ok(State::Announced(announce(tcp, &place, &endpoint, &policy)?));
        }
        meeting.has_choice |= place.is_choice();
        silent.into_iter().for_each(|user| place.leave_out(user));
        let proposed = propose(tcp, &place, &endpoint, &policy, &mut meeting.candidate);
        proposed.map(State::Proposed)
    }

    /// Begins to use the memory of both ends. Returns `false` if there are no resources for that, or the peer has ended
    /// its stream: nothing is gained then.
    #[inline(never)]
    fn use_memory(&'static self, tcp: Tcp, met: Box<Met>, memory: OwnMemory, meeting: &mut Meeting) -> bool {
        if tcp.has_ended() {
            return false;
        }
        let is_peer_proxy = met.incoming.window.is_some() && remote::peer_address(tcp.0).is_some();
        let Ok(shared) = Shared::open(memory, &met, is_peer_proxy) else {
            self.note_unusable(tcp, met, &mut meeting.failures);
            return false;
        };
        let counters = Counters::open(tcp.0, self.role(), &met);
        let Met { bell, outgoing, incoming, .. } = *met;
        let Ok(bell) = hidden(bell) else {
            counters.be_replaced();
            self.note_failure(tcp, Reason::NoDescriptors.into(), &mut meeting.failures);
            return false;
        };
        self.bell_slot.store(bell.slot().into(), Ordering::Release);
        (meeting.bell, meeting.failures.shown) = (Some(bell), None);
        let (Some(mut sender), Some(mut receiver)) = (self.sender.lock(), self.receiver.lock()) else { return false };
        install_incoming(&mut receiver, &shared, incoming.secret, counters.clone());
        let outgoing_secret = incoming.window.map_or(outgoing.secret, |window| window.outgoing_secret);
        install_outgoing(&mut sender, &shared, outgoing_secret, counters, (tcp, self.role()));
        drop((sender, receiver));
        if incoming.window.is_some() {
            // The proxy learns that the span is in use, and wakes the program of the other node.
            self.ring();
        }
        true
    }

    /// Hangs up on a peer whose memory cannot be used.
    #[cold]
    fn note_unusable(&self, tcp: Tcp, met: Box<Met>, failures: &mut Failures) {
        let reason = if met.incoming.window.is_some() { Reason::Window } else { Reason::NoMemory };
        meeting::bell::refuse(met.bell, self.role(), reason);
        self.note_failure(tcp, reason.into(), failures);
    }

    /// Prepares for a `shutdown`: see [`crate::lifecycle::before_shutdown`].
    pub fn before_shutdown(&'static self, tcp: Tcp, how: i32) {
        let Some(mut sender) = self.sender.lock() else { return };
        if matches!(how, libc::SHUT_RD | libc::SHUT_RDWR)
            && let Some(lane) = sender.lane()
        {
            lane.note_closed();
        }
        if matches!(how, libc::SHUT_WR | libc::SHUT_RDWR) {
            sender.stay_on_tcp();
            sender.finish_stream(tcp, self.role());
        }
        drop(sender);
        self.ring();
        self.for_each_watcher(|set| set.note_path(self));
    }

    /// Sends the connection back to TCP for good.
    pub fn stay_on_tcp(&'static self, tcp: Tcp) {
        if let Some(mut meeting) = self.meeting.lock() {
            meeting.stay();
        }
        if let Some(mut sender) = self.sender.lock() {
            sender.stay_on_tcp();
        }
        self.leave_lanes_for_now(tcp, now_ns().saturating_add(FREEZE_NS_MAX), false);
    }

    /// Sends both directions back to TCP. They stay there until [`Connection::take_over`]. Waits until `deadline_ns` at
    /// most for a sender that goes back at the same time. Before a fork, notes that the peer has to write to TCP what
    /// is unread.
    pub(super) fn leave_lanes_for_now(&'static self, tcp: Tcp, deadline_ns: u64, is_for_fork: bool) {
        self.notice_hang_up();
        if let Some(mut receiver) = self.receiver.lock() {
            receiver.set_staying(true);
        }
        self.freeze(tcp, deadline_ns, is_for_fork);
        if let Some(mut sender) = self.sender.lock() {
            sender.set_paused(true);
            sender.finish(tcp, self.role());
        }
        self.ring();
        self.for_each_watcher(|set| set.note_path(self));
    }

    /// Leaves the lane that this end receives by. From then on the socket has what is unread, or the sender will write
    /// it there. Waits for a sender that goes back at the same time.
    fn freeze(&'static self, tcp: Tcp, deadline_ns: u64, is_for_fork: bool) {
        loop {
            let Some(mut receiver) = self.receiver.lock() else { return };
            match receiver.freeze(tcp, is_for_fork) {
                Ok(true) => return,
                Ok(false) => {}
                Err(_) => {
                    self.reset(tcp);
                    return;
                }
            }
            drop(receiver);
            if now_ns() >= deadline_ns {
                return;
            }
            std::thread::sleep(FREEZE_NAP);
        }
    }

    /// Notes the end of the peer's bell, if it has come.
    fn notice_hang_up(&'static self) {
        let bell = self.bell();
        if bell >= 0
            && blocking::poll_now(bell, libc::POLLIN) & libc::POLLHUP != 0
            && let Some(mut receiver) = self.receiver.lock()
        {
            receiver.note_hang_up();
        }
    }

    /// Does what the peer may have asked for by ringing: writes to TCP what it has left in the lane, and consents to a
    /// move.
    pub(super) fn answer(&'static self, this: Use) {
        if let Ok((mut sender, tcp)) = this.sender()
            && sender.prepare(tcp, self.role()) == SendBy::Resend
        {
            let _ = sender.resend(tcp);
        }
        if let Ok((mut receiver, tcp)) = this.receiver() {
            // A violation is found again by the next receive, which reports it.
            let _ = receiver.prepare(tcp);
        }
    }

    /// Notes that no process holds the peer's bell any more, or that the peer cannot use what the two have agreed on.
    pub(super) fn note_peer_left(&'static self, this: Use, refusal: Option<Reason>) {
        // The descriptor itself is kept until the end, by the meeting.
        if let Ok((mut sender, tcp)) = this.sender() {
            let has_drawn_reset = sender.finish_for_absent(tcp, self.role());
            self.has_drawn_reset.store(has_drawn_reset, Ordering::Relaxed);
        }
        if let Ok((mut receiver, tcp)) = this.receiver() {
            receiver.note_hang_up();
            // Drops what the peer has repeated, if everything is here: sets do not watch a connection without a bell,
            // and report what the kernel has. A violation is found again by the next receive.
            let _ = receiver.prepare(tcp);
        }
        self.bell_slot.store(-1, Ordering::Release);
        let Some(mut meeting) = self.meeting.lock() else { return };
        match (refusal, this.tcp()) {
            (Some(reason), Ok(tcp)) if matches!(meeting.state, State::Met) => {
                self.fail(tcp, Failure::reported(reason), &mut meeting);
            }
            // A child of the peer may go on with the connection.
            _ => meeting.forget_peer(self.role()),
        }
    }
}

/// Returns a descriptor that a meeting has kept as one of this crate's: it is hidden already.
fn hidden(descriptor: Descriptor) -> Result<HiddenFd, Errno> {
    match descriptor.into_hidden_slot() {
        Ok(slot) => Ok(HiddenFd::from_slot(slot)),
        Err(fd) => HiddenFd::hide_within_table(fd),
    }
}

// A lane is large, and moved: each has a function of its own on the stack.

#[inline(never)]
fn install_incoming(receiver: &mut Receiver, shared: &Shared, secret: u64, counters: Counters) {
    receiver.install(shared.incoming(secret), counters);
}

#[inline(never)]
fn install_outgoing(sender: &mut Sender, shared: &Shared, secret: u64, counters: Counters, (tcp, role): (Tcp, Role)) {
    sender.install(shared.outgoing(secret), counters, tcp, role);
}

/// Announces the accepting end.
#[inline(never)] // As `begin`.
fn announce(tcp: Tcp, place: &Rendezvous, endpoint: &Endpoint, policy: &Policy) -> Result<Box<Accepting>, Reason> {
    Accepting::announce(place, tcp.borrow(), endpoint, policy).map(Box::new)
}

/// Proposes to meet the accepting end. Sets the candidate if the proposal was sent, or somebody has hung up before.
#[inline(never)] // As `begin`.
fn propose(
    tcp: Tcp,
    place: &Rendezvous,
    endpoint: &Endpoint,
    policy: &Policy,
    candidate: &mut Option<u32>,
) -> Result<Box<Proposed>, Reason> {
    let proposal = Proposal::connect(place, endpoint, policy)?;
    let user = proposal.user();
    let sent = send_proposal(proposal, tcp.borrow());
    if matches!(sent, Ok(_) | Err(Reason::Gone)) {
        *candidate = user;
    }
    sent.map(|(proposal, memory)| Box::new(Proposed { proposal, memory, checks_left: CHECKS_MAX }))
}

/// Sends a proposal with memory of this end. Tells the accepting end why not, if that fails.
#[inline(never)]
pub(super) fn send_proposal(mut proposal: Proposal, socket: BorrowedFd<'_>) -> Result<(Proposal, OwnMemory), Reason> {
    let memory = OwnMemory::create().map_err(|_| Reason::NoMemory).and_then(|mut memory| {
        memory.pass(|offer| proposal.send(socket, offer))?;
        Ok(memory)
    });
    match memory {
        Ok(memory) => Ok((proposal, memory)),
        Err(reason) => {
            proposal.refuse(reason);
            Err(reason)
        }
    }
}

/// Accepts a proposal, with memory of this end. Tells the connecting end why not, if that fails.
#[inline(never)]
pub(super) fn agree(accepting: &mut Accepting) -> Result<(Box<Met>, OwnMemory), Reason> {
    let Ok(mut memory) = OwnMemory::create() else {
        accepting.refuse(Reason::NoMemory);
        return Err(Reason::NoMemory);
    };
    let met = memory.pass(|offer| accepting.accept(offer))?;
    Ok((met, memory))
}

/// Returns whether a reason will not change while the connection lives.
pub(super) fn is_final(reason: Reason) -> bool {
    !matches!(reason, Reason::Nobody | Reason::Full | Reason::Gone | Reason::Busy)
}
