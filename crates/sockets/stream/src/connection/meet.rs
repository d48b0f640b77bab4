//! How the two ends of the connection find each other and exchange memory; see the crate `meeting`.

use super::lanes::{OwnMemory, Shared};
use super::receiver::Receiver;
use super::sender::Sender;
use super::{Connection, MEETINGS, Use};
use crate::epoll;
use crate::identity;
use crate::kernel::Tcp;
use crate::statistics::{self, Counters};
use crate::young::{Occasion, Transfer, Young};
use meeting::{Accepting, Answer, Endpoint, Met, Proposal, Reason, Role, Step};
use path::SendBy;
use socket::descriptor::hidden::{HiddenFd, Need};
use socket::process::blocking;
use std::sync::atomic::Ordering;

/// Transfers in each of which an end that has proposed to meet checks for the answer.
const CHECKS_MAX: u32 = 16;

/// What is known of the other end.
#[derive(Default)]
pub(super) struct Meeting {
    young: Option<Young>,
    state: State,
    /// The bell, while the ends have met.
    bell: Option<HiddenFd>,
}

#[derive(Default)]
enum State {
    /// Nothing: the connection uses TCP.
    #[default]
    Alone,
    /// This end has announced itself.
    Announced(Box<Accepting>),
    /// This end has proposed to meet.
    Proposed(Box<Proposed>),
    /// The ends have met.
    Met,
    /// The connection stays on TCP.
    Stays,
}

struct Proposed {
    proposal: Proposal,
    memory: OwnMemory,
    checks_left: u32,
}

impl Meeting {
    /// Returns the state of a connection that has not met its other end.
    pub fn new(young: Young) -> Self {
        Self { young: Some(young), ..Self::default() }
    }

    /// Gives up what belongs to the parent of this process.
    pub fn leave_to_parent(&mut self) {
        self.bell = None;
        if !matches!(self.state, State::Alone) {
            self.state = State::Stays;
        }
    }

    /// Counts a transfer, and returns whether it is an occasion to proceed.
    fn count(&mut self, transfer: Transfer) -> Option<Occasion> {
        if let State::Met | State::Stays = self.state {
            return None;
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
        let Some(_one_at_a_time) = MEETINGS.try_lock() else { return };
        let Some(mut meeting) = self.meeting.lock() else { return };
        let met = match std::mem::take(&mut meeting.state) {
            State::Alone if occasion == Occasion::Meet => match self.begin(tcp) {
                Ok(begun) => {
                    meeting.state = begun;
                    None
                }
                Err(reason) => {
                    statistics::count_failure(reason);
                    meeting.state = if is_final(reason) { State::Stays } else { State::Alone };
                    None
                }
            },
            State::Announced(mut accepting) => match accepting.advance(tcp.borrow()) {
                Step::Proposed => agree(tcp, *accepting).ok(),
                step @ (Step::Waiting | Step::Refused(_)) => {
                    if let Step::Refused(reason) = step {
                        statistics::count_failure(reason);
                    }
                    meeting.state = State::Announced(accepting);
                    None
                }
            },
            State::Proposed(mut proposed) => match proposed.proposal.advance(tcp.borrow()) {
                Answer::Met(met) => Some((met, proposed.memory)),
                Answer::Waiting => {
                    meeting.state = State::Proposed(proposed);
                    None
                }
                Answer::Refused(reason) => {
                    statistics::count_failure(reason);
                    meeting.state = if is_final(reason) { State::Stays } else { State::Alone };
                    None
                }
            },
            unchanged => {
                meeting.state = unchanged;
                None
            }
        };
        if let Some((met, memory)) = met {
            let has_met = self.use_memory(tcp, met, memory, &mut meeting.bell);
            meeting.state = if has_met { State::Met } else { State::Stays };
            drop(meeting);
            let descriptors = self.descriptors.lock().map(|descriptors| descriptors.clone()).unwrap_or_default();
            descriptors.into_iter().filter(|_| has_met).for_each(|fd| epoll::adopt(self, fd));
            self.allow_moves();
        }
    }

    #[inline(never)] // As the other steps: threads may have 16 KiB of stack.
    fn begin(&self, tcp: Tcp) -> Result<State, Reason> {
        let key = identity::key().ok_or(Reason::Nobody)?;
        let policy = identity::policy();
        let endpoint = Endpoint::of(tcp.borrow(), self.role())?;
        match self.role() {
            Role::Accepted => {
                let accepting = Accepting::announce(&key, tcp.borrow(), &endpoint, &policy)?;
                Ok(State::Announced(Box::new(accepting)))
            }
            Role::Connected => {
                let mut proposal = Proposal::connect(&key, &endpoint, &policy)?;
                let mut memory = OwnMemory::create(tcp).map_err(|_| Reason::NoMemory)?;
                memory.pass(|offer| proposal.send(tcp.borrow(), offer))?;
                Ok(State::Proposed(Box::new(Proposed { proposal, memory, checks_left: CHECKS_MAX })))
            }
        }
    }

    /// Begins to use the memory of both ends. Returns `false` if there are no resources for that.
    #[inline(never)]
    fn use_memory(&'static self, tcp: Tcp, met: Met, memory: OwnMemory, place: &mut Option<HiddenFd>) -> bool {
        let Ok(shared) = Shared::open(memory, &met) else { return false };
        let counters = Counters::open(tcp.0, self.role(), &met);
        let Met { bell, outgoing, incoming, .. } = met;
        let Ok(bell) = HiddenFd::hide(bell.into_fd(), Need::Required) else { return false };
        self.bell_slot.store(bell.slot().into(), Ordering::Release);
        *place = Some(bell);
        let (Some(mut sender), Some(mut receiver)) = (self.sender.lock(), self.receiver.lock()) else { return false };
        install_incoming(&mut receiver, &shared, incoming.secret, counters.clone());
        install_outgoing(&mut sender, &shared, outgoing.secret, counters, (tcp, self.role()));
        true
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
            sender.finish(tcp, self.role());
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
        self.notice_hang_up();
        if let Some(mut receiver) = self.receiver.lock()
            && receiver.freeze(tcp).is_err()
        {
            self.reset(tcp);
        }
        if let Some(mut sender) = self.sender.lock() {
            sender.stay_on_tcp();
            if sender.go_back(tcp, self.role()) == SendBy::Resend {
                // What TCP has no room for is written by the next send.
                let _ = sender.resend(tcp);
            }
        }
        self.ring();
        self.for_each_watcher(|set| set.note_path(self));
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
            sender.go_back(tcp, self.role());
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

/// Accepts a proposal, with memory of this end.
#[inline(never)]
fn agree(tcp: Tcp, accepting: Accepting) -> Result<(Met, OwnMemory), Reason> {
    let mut memory = OwnMemory::create(tcp).map_err(|_| Reason::NoMemory)?;
    let met = memory.pass(|offer| accepting.accept(offer))?;
    Ok((met, memory))
}

/// Returns whether a reason will not change while the connection lives.
fn is_final(reason: Reason) -> bool {
    !matches!(reason, Reason::Nobody | Reason::Full | Reason::Gone | Reason::Busy)
}
