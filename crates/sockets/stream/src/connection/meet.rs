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
use crate::statistics::{self, Counters};
use crate::young::{Occasion, Transfer, Young};
use meeting::{Accepting, Answer, Endpoint, Key, Met, Policy, Proposal, Reason, Role, Step};
use path::SendBy;
use socket::descriptor::hidden::{HiddenFd, Need};
use socket::process::blocking;
use socket::process::clock::now_ns;
use socket::process::limit;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Transfers in each of which an end that has proposed to meet checks for the answer.
const CHECKS_MAX: u32 = 16;

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
    /// Why the last attempt has failed.
    failure: Option<Reason>,
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

impl Meeting {
    /// Returns the state of a connection that has not met its other end.
    pub fn new(young: Young) -> Self {
        let state = Sharing::of(young).map_or(State::Alone, State::Shared);
        Self { young: Some(young.taken_over()), state, bell: None, failure: None }
    }

    /// Counts requests from the beginning.
    pub fn begin_anew(&mut self, young: Young) {
        self.young = Some(young);
    }

    /// Hangs up the bell.
    pub fn hang_up(&mut self) {
        self.bell = None;
        if !matches!(self.state, State::Alone) {
            self.state = State::Stays;
        }
    }

    /// Counts a transfer, and returns whether it is an occasion to proceed.
    fn count(&mut self, transfer: Transfer) -> Option<Occasion> {
        match &mut self.state {
            State::Met | State::Stays => return None,
            State::Shared(sharing) => return sharing.count(),
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
    /// Counts a transfer by TCP, and lets the ends meet if it is an occasion.
    pub(super) fn count(&'static self, tcp: Tcp, transfer: Transfer) {
        let occasion = self.meeting.lock().and_then(|mut meeting| meeting.count(transfer));
        if let Some(occasion) = occasion {
            self.meet(tcp, occasion);
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
            State::Alone if occasion == Occasion::Meet => match self.begin(tcp) {
                Ok(begun) => {
                    meeting.state = begun;
                    None
                }
                Err(reason) => {
                    self.note_failure(tcp, reason, &mut meeting.failure);
                    meeting.state = if is_final(reason) { State::Stays } else { State::Alone };
                    None
                }
            },
            State::Announced(mut accepting) => match accepting.advance(tcp.borrow()) {
                Step::Proposed => agree(accepting).ok(),
                step @ (Step::Waiting | Step::Refused(_)) => {
                    if let Step::Refused(reason) = step {
                        self.note_failure(tcp, reason, &mut meeting.failure);
                    }
                    meeting.state = State::Announced(accepting);
                    None
                }
            },
            State::Proposed(proposed) => match answer_to(proposed, tcp) {
                Answered::Met(met) => Some(met),
                Answered::Waiting(proposed) => {
                    meeting.state = State::Proposed(proposed);
                    None
                }
                Answered::Refused(reason) => {
                    self.note_failure(tcp, reason, &mut meeting.failure);
                    meeting.state = if is_final(reason) { State::Stays } else { State::Alone };
                    None
                }
            },
            unchanged => {
                meeting.state = unchanged;
                None
            }
        };
        if let Some(met) = met {
            let has_met = self.use_both(tcp, met, &mut meeting.bell);
            meeting.state = if has_met { State::Met } else { State::Stays };
            drop(meeting);
            let descriptors = self.descriptors.lock().map(|descriptors| descriptors.clone()).unwrap_or_default();
            descriptors.into_iter().filter(|_| has_met).for_each(|fd| epoll::adopt(self, fd));
            self.allow_moves();
        }
    }

    /// Counts an attempt to meet that has failed, and shows the connection with the reason.
    #[cold]
    #[inline(never)]
    fn note_failure(&self, tcp: Tcp, reason: Reason, last: &mut Option<Reason>) {
        statistics::count_failure(reason);
        if last.replace(reason) == Some(reason) {
            return;
        }
        let counters = Counters::open_on_tcp(tcp.0, self.role(), reason);
        if let (Some(mut sender), Some(mut receiver)) = (self.sender.lock(), self.receiver.lock()) {
            sender.set_counters(counters.clone());
            receiver.set_counters(counters);
        }
    }

    /// Returns why the last attempt to meet has failed.
    pub fn failure(&self) -> Option<Reason> {
        self.meeting.lock().and_then(|meeting| meeting.failure)
    }

    #[inline(never)] // As the other steps: threads may have 16 KiB of stack.
    fn begin(&self, tcp: Tcp) -> Result<State, Reason> {
        // A program that has set itself such a limit is to have all of it.
        if limit::is_address_space_limited() {
            return Err(Reason::AddressSpace);
        }
        let key = identity::key()?;
        let policy = identity::policy();
        let endpoint = Endpoint::of(tcp.borrow(), self.role())?;
        match self.role() {
            Role::Accepted => announce(&key, tcp, &endpoint, &policy),
            Role::Connected => propose(&key, tcp, &endpoint, &policy),
        }
    }

    /// As [`Connection::use_memory`].
    #[inline(never)] // As above.
    fn use_both(&'static self, tcp: Tcp, both: Box<(Met, OwnMemory)>, place: &mut Option<HiddenFd>) -> bool {
        let (met, memory) = *both;
        self.use_memory(tcp, met, memory, place)
    }

    /// Begins to use the memory of both ends. Returns `false` if there are no resources for that, or the peer has ended
    /// its stream: nothing is gained then.
    #[inline(never)]
    fn use_memory(&'static self, tcp: Tcp, met: Met, memory: OwnMemory, place: &mut Option<HiddenFd>) -> bool {
        if tcp.has_ended() {
            return false;
        }
        let is_peer_proxy = met.incoming.window.is_some() && remote::peer_address(tcp.0).is_some();
        let Ok(shared) = Shared::open(memory, &met, is_peer_proxy) else {
            self.note_unusable(tcp, met);
            return false;
        };
        let counters = Counters::open(tcp.0, self.role(), &met);
        let Met { bell, outgoing, incoming, .. } = met;
        let Ok(bell) = HiddenFd::hide(bell.into_fd(), Need::Required) else { return false };
        self.bell_slot.store(bell.slot().into(), Ordering::Release);
        *place = Some(bell);
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
    fn note_unusable(&self, tcp: Tcp, met: Met) {
        let reason = if met.incoming.window.is_some() { Reason::Window } else { Reason::NoMemory };
        meeting::bell::hang_up(met.bell);
        self.note_failure(tcp, reason, &mut None);
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
            meeting.state = State::Stays;
        }
        if let Some(mut sender) = self.sender.lock() {
            sender.stay_on_tcp();
        }
        self.leave_lanes_for_now(tcp, now_ns().saturating_add(FREEZE_NS_MAX));
    }

    /// Sends both directions back to TCP. They stay there until [`Connection::take_over`]. Waits until `deadline_ns` at
    /// most for a sender that goes back at the same time.
    pub(super) fn leave_lanes_for_now(&'static self, tcp: Tcp, deadline_ns: u64) {
        self.notice_hang_up();
        if let Some(mut receiver) = self.receiver.lock() {
            receiver.set_staying(true);
        }
        self.freeze(tcp, deadline_ns);
        if let Some(mut sender) = self.sender.lock() {
            sender.set_paused(true);
            sender.finish(tcp, self.role());
        }
        self.ring();
        self.for_each_watcher(|set| set.note_path(self));
    }

    /// Leaves the lane that this end receives by. From then on the socket has what is unread, or the sender will write
    /// it there. Waits for a sender that goes back at the same time.
    fn freeze(&'static self, tcp: Tcp, deadline_ns: u64) {
        loop {
            let Some(mut receiver) = self.receiver.lock() else { return };
            match receiver.freeze(tcp) {
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

    /// Notes that no process holds the peer's bell any more.
    pub(super) fn note_peer_left(&'static self, this: Use) {
        // The descriptor itself is kept until the end, by the meeting.
        if let Ok((mut sender, tcp)) = this.sender() {
            let has_drawn_reset = sender.finish_for_absent(tcp, self.role());
            self.has_drawn_reset.store(has_drawn_reset, Ordering::Relaxed);
        }
        if let Ok((mut receiver, _)) = this.receiver() {
            receiver.note_hang_up();
        }
        self.bell_slot.store(-1, Ordering::Release);
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

/// Announces an accepting end.
#[inline(never)]
fn announce(key: &Key, tcp: Tcp, endpoint: &Endpoint, policy: &Policy) -> Result<State, Reason> {
    let accepting = Accepting::announce(key, tcp.borrow(), endpoint, policy)?;
    Ok(State::Announced(Box::new(accepting)))
}

/// Proposes to meet, with memory of this end.
#[inline(never)]
fn propose(key: &Key, tcp: Tcp, endpoint: &Endpoint, policy: &Policy) -> Result<State, Reason> {
    let mut proposal = Proposal::connect(key, endpoint, policy)?;
    let mut memory = OwnMemory::create().map_err(|_| Reason::NoMemory)?;
    memory.pass(|offer| proposal.send(tcp.borrow(), offer))?;
    Ok(State::Proposed(Box::new(Proposed { proposal, memory, checks_left: CHECKS_MAX })))
}

/// The answer to a proposal.
enum Answered {
    Waiting(Box<Proposed>),
    Met(Box<(Met, OwnMemory)>),
    Refused(Reason),
}

#[inline(never)]
fn answer_to(mut proposed: Box<Proposed>, tcp: Tcp) -> Answered {
    match proposed.proposal.advance(tcp.borrow()) {
        Answer::Met(met) => Answered::Met(Box::new((met, proposed.memory))),
        Answer::Waiting => Answered::Waiting(proposed),
        Answer::Refused(reason) => Answered::Refused(reason),
    }
}

/// Accepts a proposal, with memory of this end.
#[inline(never)]
#[allow(clippy::boxed_local, reason = "it would be moved on the stack of the caller")]
fn agree(accepting: Box<Accepting>) -> Result<Box<(Met, OwnMemory)>, Reason> {
    let mut memory = OwnMemory::create().map_err(|_| Reason::NoMemory)?;
    let met = memory.pass(|offer| accepting.accept(offer))?;
    Ok(Box::new((met, memory)))
}

/// Returns whether a reason will not change while the connection lives.
pub(super) fn is_final(reason: Reason) -> bool {
    !matches!(reason, Reason::Nobody | Reason::Full | Reason::Gone | Reason::Busy)
}
