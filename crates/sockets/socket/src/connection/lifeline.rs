//! How a connection begins: its bytes go by the lifeline, a plain AF_UNIX stream, until lanes pay.
//!
//! So `connect` and `accept` need no memory, no further descriptor and nothing of the other end, and what happens to
//! a young connection (a fork, an `exec`, a limit that is reached, a peer that says nothing) is the kernel's affair.
//! Where AF_UNIX answers otherwise than TCP, this file translates.
//!
//! * `lanes`: how it gets lanes.
//! * `lane_peers`: addresses to which a connection gets them at once, for the sake of order.
//! * `message`: what the two ends say to each other for that, in the stream itself.

mod upgrade;
pub(super) mod lane_peers;
mod message;
#[cfg(test)]
mod tests;

use upgrade::Offered;
pub(super) use message::{FOLLOW, SWITCH};
use message::{
    Heard, NO_SPAN, OFFER, Received, look, look_aside, peek_exactly, receive, rest_of, send_now, take_exactly,
};

use super::observer;
use super::transfer::Step;
use super::{Connection, Flags, PeerState, SHUTDOWN_READ, SHUTDOWN_WRITE, total_bytes, urgent};
use crate::descriptor::hidden::{HiddenFd, close};
use crate::process::blocking;
use crate::process::clock::{TICKS_PER_MILLISECOND, ticks};
use crate::process::limit;
use crate::process::signals;
use crate::rendezvous::local_page::MemoryFds;
use libc::iovec;
use rustix::io::Errno;
use segment::{BY_LANE_RECEIVE, OwnState, PeerStatus, Segment, Side};
use std::cell::UnsafeCell;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Bytes that are taken out at once where the program does not want them.
const SCRATCH_BYTES: usize = 16 << 10;
/// So far ahead looks go, for receives of less.
const LOOK_BYTES: usize = 64 << 10;

/// What a connection knows while one of its directions goes by the lifeline.
#[derive(Default)]
pub(super) struct Early {
    is_acceptor: AtomicBool,
    /// Directions that the program has shut down.
    shutdown: AtomicU64,
    /// What sends know of the peer: a [`PeerState`].
    peer: AtomicU64,
    /// An error number to be reported once.
    error: AtomicU64,
    /// Questions: receives that brought something, the first ones and those behind an answer.
    questions: AtomicU32,
    /// Something was sent behind the last question.
    has_answered: AtomicBool,
    /// Bytes of the program's that come next, as a look has found and no receive has taken. Under the receive lock.
    seen_ahead: AtomicU64,
    /// Bytes that have been taken out of the lifeline, as edges count them: see [`Connection::early_arrivals`].
    taken_bytes: AtomicU64,
    /// The same, with all messages.
    taken_in_all_bytes: AtomicU64,
    /// How far the lifeline reached, from its beginning, when edges were last counted.
    counted_to_bytes: AtomicU64,
    /// Clock ticks at the last look for messages without a receive.
    heard_ticks: AtomicU64,
    /// How far it was seen to have ended.
    ends: AtomicU64,
    /// The lifeline was shut for reading, so that the kernel does not say any more whether the peer has ended.
    is_deaf: AtomicBool,
    /// The peer had ended its stream when the lifeline was shut for reading.
    had_ended: AtomicBool,
    /// The lifeline holds all that it may.
    is_wide: AtomicBool,
    /// Another process may hold the end, and has no part in its lanes.
    is_shared: AtomicBool,
    /// The peer's kernel refuses descriptors, as under a filter: there are no messages any more.
    is_refused: AtomicBool,
    has_offered: AtomicBool,
    /// It was tried to give it lanes because others have some.
    has_switched_for_order: AtomicBool,
    /// The program has sent something.
    has_sent: AtomicBool,
    /// The peer had not read all of the lifeline when what is sent went over to a lane.
    was_unread: AtomicBool,
    has_heard: AtomicBool,
    /// Under a filter: one more than the bytes of the program's that lie before the last message.
    pub(super) foreseen: AtomicU64,
    /// Messages that have come.
    messages: AtomicU32,
    /// Inode of the memory that the outgoing lane lies in.
    inode: AtomicU64,
    /// Under the send lock.
    offered: UnsafeCell<Option<Offered>>,
    /// Under the receive lock.
    heard: UnsafeCell<Option<Heard>>,
}

impl Early {
    /// Under both locks, or before anybody knows the connection.
    pub(super) fn begin(&self, side: Side) {
        self.is_acceptor.store(side == Side::Acceptor, Ordering::Relaxed);
        self.shutdown.store(0, Ordering::Relaxed);
        self.peer.store(PeerState::Alive as u64, Ordering::Relaxed);
        self.error.store(0, Ordering::Relaxed);
        self.questions.store(0, Ordering::Relaxed);
        self.has_answered.store(true, Ordering::Relaxed);
        self.seen_ahead.store(0, Ordering::Relaxed);
        self.taken_bytes.store(0, Ordering::Relaxed);
        self.taken_in_all_bytes.store(0, Ordering::Relaxed);
        self.counted_to_bytes.store(0, Ordering::Relaxed);
        self.is_shared.store(false, Ordering::Relaxed);
        self.is_refused.store(false, Ordering::Relaxed);
        self.foreseen.store(0, Ordering::Relaxed);
        self.is_wide.store(false, Ordering::Relaxed);
        self.is_deaf.store(false, Ordering::Relaxed);
        self.had_ended.store(false, Ordering::Relaxed);
        self.ends.store(0, Ordering::Relaxed);
        self.has_sent.store(false, Ordering::Relaxed);
        self.has_switched_for_order.store(false, Ordering::Relaxed);
        self.was_unread.store(false, Ordering::Relaxed);
        self.inode.store(0, Ordering::Relaxed);
        self.messages.store(0, Ordering::Relaxed);
        self.clear();
    }

    /// Forgets what is on its way. Under both locks, or as [`Early::begin`].
    pub(super) fn clear(&self) {
        self.has_offered.store(false, Ordering::Relaxed);
        self.has_heard.store(false, Ordering::Relaxed);
        // SAFETY: our caller holds the send lock, or is alone with the object.
        drop(unsafe { (*self.offered.get()).take() });
        // SAFETY: our caller holds the receive lock, or is alone with the object.
        drop(unsafe { (*self.heard.get()).take() });
    }

    /// Of an end that another process has held: where its outgoing lane lies.
    pub(super) fn note_memory(&self, memory: Option<&MemoryFds<HiddenFd>>) {
        let inode = memory.and_then(|memory| rustix::fs::fstat(memory.memfd.get()?).ok()).map_or(0, |stat| stat.st_ino);
        self.inode.store(inode, Ordering::Relaxed);
    }

    pub(super) fn is_reset(&self) -> bool {
        self.peer.load(Ordering::Relaxed) == PeerState::Reset as u64
    }

    fn side(&self) -> Side {
        if self.is_acceptor.load(Ordering::Relaxed) { Side::Acceptor } else { Side::Connector }
    }

    pub(super) fn note_reset(&self) {
        self.peer.store(PeerState::Reset as u64, Ordering::Relaxed);
        self.error.store(Errno::CONNRESET.raw_os_error() as u64, Ordering::Relaxed);
    }

    /// Something was sent to a peer that had closed: the next send is refused.
    fn note_answer(&self) {
        self.peer.store(PeerState::ClosedAndAnswered as u64, Ordering::Relaxed);
        self.error.store(Errno::PIPE.raw_os_error() as u64, Ordering::Relaxed);
    }

    /// As [`Early::take_error`], for a receive: behind the end of a stream no error comes.
    fn take_reset(&self) -> Option<Errno> {
        let is_send_error = self.error.load(Ordering::Relaxed) == Errno::PIPE.raw_os_error() as u64;
        if is_send_error { None } else { self.take_error() }
    }

    /// Takes the error that is to be reported once.
    fn take_error(&self) -> Option<Errno> {
        let error = self.error.swap(0, Ordering::Relaxed);
        (error != 0).then(|| Errno::from_raw_os_error(error as i32))
    }
}

/// What one receive by the lifeline came to.
enum Taken {
    Bytes(usize),
    End,
    /// A message for us has been put aside.
    Heard,
    /// The incoming direction goes by its lane.
    ByLane,
}

impl Connection {
    /// Sends by the lifeline as far as that goes. Answers how many bytes went, and whether the rest goes by the lane.
    ///
    /// # Safety
    /// Every span is readable for its length.
    pub(super) unsafe fn send_by_lifeline(
        &'static self,
        generation: u32,
        spans: &[iovec],
        skip: usize,
        wanted: usize,
    ) -> Result<(usize, bool), Errno> {
        let mut sent = 0;
        self.switch_for_order();
        loop {
            let guard = self.hold_of(generation, &self.send_lock)?;
            if self.awaits_handshake.load(Ordering::Relaxed) {
                return Ok((sent, true));
            }
            if self.sends_by_lane() || self.switch_back(None) {
                return Ok((sent, true));
            }
            if sent == 0 && !self.may_send_early(wanted - skip)? {
                return Ok((self.bytes_taken_for_gone(wanted - skip), false));
            }
            if skip + sent >= wanted {
                return Ok((sent, false));
            }
            self.offer_with_answer();
            // SAFETY: our caller says that every span is readable for its length.
            match unsafe { send_now(self.lifeline(), spans, skip + sent) } {
                Ok(bytes) => {
                    sent += bytes;
                    self.early.has_sent.store(true, Ordering::Relaxed);
                    self.early.has_answered.store(true, Ordering::Relaxed);
                    self.count_sent(bytes);
                }
                Err(Errno::AGAIN) => {
                    drop(guard);
                    if !self.switch_at_once() && !self.widen() {
                        return Ok((sent, false));
                    }
                }
                Err(Errno::PIPE | Errno::CONNRESET) if sent > 0 => return Ok((sent, false)),
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    drop(guard);
                    self.hear_for_all();
                    match self.lanes() {
                        Some(lanes) => self.ask_kernel(lanes),
                        None => return self.send_to_gone().map(|()| (self.bytes_taken_for_gone(wanted - skip), false)),
                    }
                }
                Err(Errno::INTR) => {}
                Err(error) => return if sent > 0 { Ok((sent, false)) } else { Err(error) },
            }
        }
    }

    /// As [`Connection::may_send`], where what is sent goes by the lifeline.
    fn may_send_early(&self, len_bytes: usize) -> Result<bool, Errno> {
        if let Some(lanes) = self.lanes() {
            return self.may_send(lanes, len_bytes);
        }
        if self.is_shut(SHUTDOWN_WRITE) {
            return Err(Errno::PIPE);
        }
        match self.state().0 {
            PeerState::Alive => Ok(true),
            PeerState::Closed if len_bytes == 0 => Ok(false),
            PeerState::Closed => {
                self.early.note_answer();
                Ok(false)
            }
            PeerState::ClosedAndAnswered => {
                self.early.take_error();
                Err(Errno::PIPE)
            }
            PeerState::Reset => Err(self.early.take_error().unwrap_or(Errno::PIPE)),
        }
    }

    /// The kernel refuses a send: the peer is gone. TCP's buffer takes the first one all the same, unless a reset has
    /// come.
    fn send_to_gone(&'static self) -> Result<(), Errno> {
        if !self.lifeline_has_hung_up() {
            // Another process that holds the end has shut it down.
            self.early.shutdown.fetch_or(SHUTDOWN_WRITE, Ordering::Relaxed);
            return Err(Errno::PIPE);
        }
        if self.is_reset_early() {
            return Err(self.early.take_error().unwrap_or(Errno::PIPE));
        }
        self.early.note_answer();
        Ok(())
    }

    /// Whether all that the peer can have left unread is an offer.
    fn has_only_offered(&self) -> bool {
        self.early.has_offered.load(Ordering::Relaxed) && !self.early.has_sent.load(Ordering::Relaxed)
    }

    /// Whether the peer has reset the connection, as the kernel says, or a lane that the lifeline leads to. Notes it,
    /// with the error to be reported once.
    fn is_reset_early(&'static self) -> bool {
        if self.early.is_reset() {
            return true;
        }
        let said = blocking::poll_now(self.lifeline(), 0);
        let has_left_bytes = said & libc::POLLERR != 0 && !self.has_only_offered();
        let is_reset = has_left_bytes || (said & libc::POLLHUP != 0 && self.is_reset_behind());
        if is_reset {
            self.early.note_reset();
        }
        is_reset
    }

    /// Receives by the lifeline; `None`: the direction goes by its lane.
    ///
    /// # Safety
    /// Every span is writable for its length.
    pub(super) unsafe fn receive_by_lifeline(
        &'static self,
        generation: u32,
        spans: &[iovec],
        skip: usize,
        flags: Flags,
    ) -> Result<Option<Step>, Errno> {
        loop {
            if self.early.has_heard.load(Ordering::Relaxed) {
                self.follow_heard()?;
                self.tell_sets();
            }
            let guard = self.hold_of(generation, &self.receive_lock)?;
            let shared = match self.lanes() {
                Some(lanes) => self.share(lanes, OwnState::ReceiveLock)?,
                None => None,
            };
            // SAFETY: our caller says that every span is writable for its length.
            let taken = unsafe { self.take_from_lifeline(spans, skip, flags) };
            drop(shared);
            drop(guard);
            match taken? {
                Taken::ByLane => return Ok(None),
                Taken::Heard => {}
                Taken::End => return Ok(Some(Step::End)),
                Taken::Bytes(0) => return Ok(Some(Step::Nothing)),
                Taken::Bytes(bytes) => {
                    self.count_received(bytes, flags);
                    if !flags.peek && self.early.has_answered.swap(false, Ordering::Relaxed) {
                        self.early.questions.fetch_add(1, Ordering::Relaxed);
                    }
                    return Ok(Some(Step::Moved(bytes)));
                }
            }
        }
    }

    /// Under the receive lock.
    unsafe fn take_from_lifeline(&'static self, spans: &[iovec], skip: usize, flags: Flags) -> Result<Taken, Errno> {
        if self.early.has_heard.load(Ordering::Relaxed) {
            // Another thread has taken a message out: what lies behind it is not the program's.
            return Ok(Taken::Heard);
        }
        if self.comes_by_lane() || self.awaits_handshake.load(Ordering::Relaxed) {
            return Ok(Taken::ByLane);
        }
        let mut one = [NO_SPAN];
        let spans = rest_of(spans, skip, &mut one);
        if flags.discard {
            let mut scratch = [0_u8; SCRATCH_BYTES];
            let len = total_bytes(spans).min(SCRATCH_BYTES);
            let unwanted = [iovec { iov_base: scratch.as_mut_ptr().cast(), iov_len: len }];
            // SAFETY: the scratch is writable.
            return unsafe { self.take_spans(&unwanted, flags) };
        }
        // SAFETY: every span is writable for its length, as whoever receives has promised.
        unsafe { self.take_spans(spans, flags) }
    }

    /// Looks first, without room for descriptors: what has some is none of the program's.
    unsafe fn take_spans(&'static self, spans: &[iovec], flags: Flags) -> Result<Taken, Errno> {
        let (bytes, has_message) = match self.look_for(total_bytes(spans)) {
            Ok((0, false)) => return self.end_of_lifeline(spans),
            Ok((bytes, true)) => (bytes - 1, true),
            Ok(seen) => seen,
            Err(Errno::AGAIN | Errno::INTR) if self.is_shut(SHUTDOWN_READ) => return Ok(Taken::End),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Taken::Bytes(0)),
            Err(Errno::CONNRESET) => return self.reset_by_kernel(),
            Err(error) => return Err(error),
        };
        if bytes == 0 {
            return self.put_message_aside();
        }
        if flags.peek {
            // SAFETY: every span is writable for its length, as whoever receives has promised.
            return unsafe { peek_exactly(self.lifeline(), spans, bytes) }.map(Taken::Bytes);
        }
        let seen_ahead = self.early.seen_ahead.load(Ordering::Relaxed);
        // SAFETY: every span is writable for its length, as whoever receives has promised.
        let taken = unsafe { take_exactly(self.lifeline(), spans, bytes) }?;
        self.early.seen_ahead.fetch_sub(seen_ahead.min(taken.0 as u64), Ordering::Relaxed);
        self.early.taken_bytes.fetch_add(taken.0 as u64, Ordering::Relaxed);
        self.early.taken_in_all_bytes.fetch_add(taken.0 as u64, Ordering::Relaxed);
        // Another process that holds this end may have been faster: what it has left may end with a message.
        if let Some(heard) = taken.1 {
            self.put_aside(heard);
        }
        if has_message && taken.0 == bytes {
            // What says where the stream goes on is not left lying: a receive takes from both.
            let _ = self.put_message_aside();
        }
        Ok(Taken::Bytes(taken.0))
    }

    /// As [`look_aside`]; but what an earlier look has shown to be no message is not looked at again, as long as no
    /// other process can receive it. Under the receive lock.
    fn look_for(&self, wanted: usize) -> Result<(usize, bool), Errno> {
        let seen_ahead = self.early.seen_ahead.swap(0, Ordering::Relaxed) as usize;
        if wanted == 0 || self.can_be_held_elsewhere() {
            return look_aside(self.lifeline(), wanted);
        }
        if seen_ahead >= wanted {
            self.early.seen_ahead.store(seen_ahead as u64, Ordering::Relaxed);
            return Ok((wanted, false));
        }
        let (seen, has_message) = look_aside(self.lifeline(), wanted.max(LOOK_BYTES))?;
        let bytes = seen - usize::from(has_message);
        self.early.seen_ahead.store(bytes as u64, Ordering::Relaxed);
        Ok(if has_message && bytes < wanted { (seen, true) } else { (bytes.min(wanted), false) })
    }

    /// Whether the incoming direction goes by its lane, as this process or another one that holds the end has found.
    /// Under the receive lock.
    fn comes_by_lane(&self) -> bool {
        if self.receives_by_lane() {
            return true;
        }
        let Some(lanes) = self.lanes() else { return false };
        if self.can_be_held_elsewhere() && lanes.segment.load(OwnState::ByLane) & BY_LANE_RECEIVE != 0 {
            signals::without_handlers(|| self.go_by_lane(BY_LANE_RECEIVE));
            if self.sleepers.is_any() {
                // SAFETY: under the receive lock.
                unsafe { (*lanes.receiver.get()).announce_sleep() };
            }
        }
        self.receives_by_lane()
    }

    /// The kernel says that nothing comes any more.
    fn end_of_lifeline(&self, spans: &[iovec]) -> Result<Taken, Errno> {
        if total_bytes(spans) == 0 {
            let is_there = blocking::poll_now(self.lifeline(), libc::POLLIN) & libc::POLLIN != 0;
            return Ok(if is_there { Taken::End } else { Taken::Bytes(0) });
        }
        match self.lanes() {
            Some(lanes) => self.end_of_input(lanes).map(|_| Taken::End),
            None => self.early.take_reset().map_or(Ok(Taken::End), Err),
        }
    }

    /// The peer has left something unread; the kernel says so once.
    fn reset_by_kernel(&self) -> Result<Taken, Errno> {
        if let Some(lanes) = self.lanes() {
            self.note_hang_up(lanes, true);
            return self.end_of_input(lanes).map(|_| Taken::End);
        }
        self.note_kernel_reset();
        self.early.take_reset().map_or(Ok(Taken::End), Err)
    }

    /// Receives a message that has come first. Under the receive lock.
    fn put_message_aside(&'static self) -> Result<Taken, Errno> {
        let lifeline = self.borrow_lifeline();
        let received = limit::with_free_descriptor(lifeline, || {
            let mut kind = 0_u8;
            let spans = [iovec { iov_base: (&raw mut kind).cast(), iov_len: 1 }];
            // SAFETY: one byte is writable.
            unsafe { receive(lifeline.as_raw_fd(), &spans, 0) }.map(|received| (received, kind))
        });
        match received {
            Ok((Received { bytes: 1, rights, .. }, kind)) => {
                self.put_aside(Heard { kind, memory: rights });
                Ok(Taken::Heard)
            }
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(Taken::Bytes(0)),
            Err(error) => Err(error),
        }
    }

    /// Under the receive lock. Nothing more is received until it is followed.
    fn put_aside(&self, heard: Heard) {
        // SAFETY: under the receive lock.
        unsafe { *self.early.heard.get() = Some(heard) };
        let before = self.early.taken_in_all_bytes.fetch_add(1, Ordering::Relaxed);
        if self.early.counted_to_bytes.load(Ordering::Relaxed) > before {
            self.early.taken_bytes.fetch_add(1, Ordering::Relaxed);
        }
        self.early.has_heard.store(true, Ordering::Relaxed);
    }

    /// Shuts down directions that go by the lifeline. Under the send lock.
    ///
    /// # Errors
    /// `NOTCONN` after a reset.
    pub(super) fn shut_lifeline(&'static self, directions: u64) -> Result<(), Errno> {
        if self.early.is_reset() {
            return Err(Errno::NOTCONN);
        }
        let before = self.early.shutdown.fetch_or(directions, Ordering::Relaxed);
        let fresh = directions & !before;
        if fresh & SHUTDOWN_WRITE != 0 {
            let _ = rustix::net::shutdown(self.borrow_lifeline(), rustix::net::Shutdown::Write);
        }
        if fresh & SHUTDOWN_READ != 0 {
            self.wake_by_shutting();
        }
        Ok(())
    }

    /// After a shutdown for reading: threads of this process that sleep on the lifeline must look again, and nothing
    /// but its end wakes them all.
    pub(super) fn wake_by_shutting(&self) {
        if self.sleepers.is_any() {
            self.early.had_ended.store(self.peer_has_ended_early(), Ordering::Relaxed);
            self.early.is_deaf.store(true, Ordering::Relaxed);
            let _ = rustix::net::shutdown(self.borrow_lifeline(), rustix::net::Shutdown::Read);
        }
    }

    /// Whether the peer has ended its stream, as the kernel says while it can.
    pub(super) fn peer_has_ended_early(&self) -> bool {
        if self.early.is_deaf.load(Ordering::Relaxed) {
            return self.early.had_ended.load(Ordering::Relaxed);
        }
        blocking::poll_now(self.lifeline(), libc::POLLRDHUP) & (libc::POLLRDHUP | libc::POLLHUP) != 0
    }

    /// Before a close: a message that was left unread would reset the peer, and `SO_LINGER` may ask for a reset.
    pub(super) fn hear_last_words(&'static self) {
        // What is there may be for another process.
        if self.receives_by_lane() || self.awaits_handshake.load(Ordering::Relaxed) || self.can_be_held_elsewhere() {
            return;
        }
        if self.with_details(|details| details.resets_on_close) {
            self.switch_at_once();
        }
        // An offer comes too late.
        self.early.is_shared.store(true, Ordering::Relaxed);
        self.hear_messages();
    }

    /// After a receive by the lifeline: whether the stream goes on in a lane.
    pub(super) fn goes_on_by_lane(&'static self) -> bool {
        let goes_on =
            self.early.has_heard.load(Ordering::Relaxed) && self.follow_heard().is_ok() && self.receives_by_lane();
        self.tell_sets();
        goes_on
    }

    /// A program that only sends does not receive what says that both directions go by lanes; sends are quicker then.
    pub(super) fn hear_now_and_then(&'static self) {
        let now = ticks();
        if now.wrapping_sub(self.early.heard_ticks.load(Ordering::Relaxed)) > TICKS_PER_MILLISECOND {
            self.early.heard_ticks.store(now, Ordering::Relaxed);
            self.hear_for_all();
        }
    }

    /// As [`Connection::hear_messages`], for a call that is about this connection alone.
    pub(super) fn hear_for_all(&'static self) {
        self.hear_messages();
        self.tell_sets();
    }

    /// After a call has taken messages out that a readiness set was to find: the set looks at the connection, since
    /// what came by the lane before anybody asked for rings is not rung for.
    pub(super) fn tell_sets(&'static self) {
        if self.receives_by_lane() && self.sleepers.is_any() {
            observer::tell_change(self);
        }
    }

    /// Follows the messages that come first in the lifeline. Answers what comes then.
    pub(super) fn hear_messages(&'static self) -> First {
        loop {
            if let Err(first) = self.hear_next_message() {
                return first;
            }
        }
    }

    /// Follows the message that comes first in the lifeline.
    ///
    /// # Errors
    /// What comes first, if that is no message, or one that cannot be followed now.
    fn hear_next_message(&'static self) -> Result<(), First> {
        {
            let guard = self.hold(&self.receive_lock);
            if guard.is_none() || self.comes_by_lane() {
                return Err(First::Nothing);
            }
            if !self.early.has_heard.load(Ordering::Relaxed) {
                match self.first_in_lifeline() {
                    First::Message if matches!(self.put_message_aside(), Ok(Taken::Heard)) => {}
                    first => return Err(first),
                }
            }
        }
        self.follow_heard().map_err(|_| First::Message)
    }

    /// Under the receive lock.
    fn first_in_lifeline(&self) -> First {
        let mut byte = 0_u8;
        let spans = [iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 }];
        // SAFETY: one byte is writable.
        match unsafe { look(self.lifeline(), &spans) } {
            Ok((0, _)) => First::End,
            Ok((_, true)) => First::Message,
            Ok((_, false)) => First::Bytes,
            Err(Errno::CONNRESET) => {
                self.note_kernel_reset();
                First::End
            }
            Err(_) => First::Nothing,
        }
    }

    /// As [`Connection::readiness`], where what comes in comes by the lifeline. One system call, and one more if
    /// something is there. `None`: it does not any more.
    pub(super) fn lifeline_readiness(&'static self, wanted: i16) -> Option<i16> {
        let ask = || blocking::poll_now(self.lifeline(), libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP);
        let mut said = ask();
        let may_hear =
            said & libc::POLLIN != 0 || self.early.has_heard.load(Ordering::Relaxed) || self.can_be_held_elsewhere();
        let mut first = First::Nothing;
        if may_hear {
            let heard_before = self.early.messages.load(Ordering::Relaxed);
            first = self.hear_messages();
            if self.receives_by_lane() {
                return None;
            }
            if self.early.messages.load(Ordering::Relaxed) != heard_before {
                said = ask();
            }
        }
        let ends = u64::from((said & (libc::POLLRDHUP | libc::POLLHUP)).count_ones());
        self.early.ends.fetch_max(ends, Ordering::Relaxed);
        // The end may lie in a lane that is known before what leads there has its turn.
        let ends_in_lane = self.lanes().is_some_and(|lanes| lanes.observer().has_fin());
        let has_ended = said & libc::POLLRDHUP != 0 || ends_in_lane;
        let is_shut = |direction| self.is_shut(direction);
        if let Some(lanes) = self.lanes().filter(|_| said & libc::POLLHUP != 0) {
            self.note_hang_up(lanes, said & libc::POLLERR != 0);
        }
        if self.lanes().is_none() && said & libc::POLLHUP != 0 && (said & libc::POLLERR != 0 || first == First::Bytes) {
            self.is_reset_early();
        }
        let (peer, _) = self.state();
        let has_error = self
            .lanes()
            .map_or(self.early.error.load(Ordering::Relaxed), |lanes| lanes.segment.load(OwnState::PendingError))
            != 0;
        let mut ready = 0;
        if (first == First::Bytes && self.has_low_water()) || has_ended || is_shut(SHUTDOWN_READ) {
            ready |= libc::POLLIN | libc::POLLRDNORM;
        }
        if has_ended || is_shut(SHUTDOWN_READ) {
            ready |= libc::POLLRDHUP;
        }
        if ready & libc::POLLRDHUP != 0 && is_shut(SHUTDOWN_WRITE) {
            ready |= libc::POLLHUP;
        }
        if matches!(peer, PeerState::ClosedAndAnswered | PeerState::Reset) {
            ready |= libc::POLLHUP;
        }
        if has_error {
            ready |= libc::POLLERR;
        }
        let output = if self.sends_by_lane() { self.output_readiness(wanted) } else { self.early_output(said) };
        Some(ready | output)
    }

    /// A lifeline that is full gives way to a lane, if there can be one.
    fn early_output(&self, said: i16) -> i16 {
        const OUTPUT: i16 = libc::POLLOUT | libc::POLLWRNORM;
        let has_room = said & (libc::POLLOUT | libc::POLLHUP) != 0 || self.is_shut(SHUTDOWN_WRITE);
        if !has_room && self.send_is_blocked.load(Ordering::Relaxed) {
            return 0;
        }
        if self.send_is_blocked.swap(false, Ordering::Relaxed) {
            self.room_returns.fetch_add(1, Ordering::Relaxed);
        }
        OUTPUT
    }

    fn has_low_water(&'static self) -> bool {
        let low_water = self.low_water_bytes.load(Ordering::Relaxed) as usize;
        low_water <= 1 || self.unread_in_lifeline() >= low_water
    }

    /// As [`Connection::unread_in_lifeline`]: whether there are any. A message counts too.
    pub(super) fn has_unread_in_lifeline(&self) -> bool {
        rustix::io::ioctl_fionread(self.borrow_lifeline()).is_ok_and(|bytes| bytes > 0)
    }

    /// As [`Connection::has_unread_in_lifeline`], without the messages: one may come after the last look for them.
    /// Under both locks.
    pub(super) fn has_left_unread_in_lifeline(&self) -> bool {
        self.has_unread_in_lifeline() && self.unread_behind() > 0
    }

    /// Bytes that have come and are unread, in the lifeline and in the lane that it leads to. Where an offer comes
    /// first, what is behind that is counted as if no other message came there.
    pub(super) fn unread_in_lifeline(&'static self) -> usize {
        let _both = self.hold_both();
        self.unread_behind()
    }

    /// As [`Connection::unread_in_lifeline`], under both locks.
    fn unread_behind(&self) -> usize {
        // Programs ask after each receive.
        if let Some(unread) = self.unread_as_seen() {
            return unread;
        }
        let behind = self.look_behind();
        let is_inline = self.is_urgent_inline();
        let unread_in = |segment: &Segment| urgent::unread_behind(segment, behind.bytes == 0, is_inline);
        let beyond = match (behind.message, &behind.memory) {
            (Some(OFFER), _) => behind.unread - behind.bytes - 1,
            (Some(FOLLOW), _) => {
                // SAFETY: under the send lock.
                let offered = unsafe { (*self.early.offered.get()).as_ref() }.map(|offered| &offered.segment);
                self.lanes().map(|lanes| &lanes.segment).or(offered).map_or(0, unread_in)
            }
            (Some(SWITCH), Some(memory)) => {
                Segment::peek(memory, self.early.side()).map_or(0, |segment| unread_in(&segment))
            }
            _ => 0,
        };
        behind.memory.into_iter().for_each(close);
        behind.bytes + beyond
    }

    /// Bytes of the program's that are unread, where a look has shown all of them, and no message among them. Under the
    /// receive lock.
    pub(super) fn unread_as_seen(&self) -> Option<usize> {
        let seen_ahead = self.early.seen_ahead.load(Ordering::Relaxed);
        let may_be = seen_ahead > 0 && !self.can_be_held_elsewhere();
        let is_all = || rustix::io::ioctl_fionread(self.borrow_lifeline()) == Ok(seen_ahead);
        (may_be && is_all()).then_some(seen_ahead as usize)
    }

    /// Whether a peer that is gone has reset the connection, behind bytes that are unread.
    fn is_reset_behind(&'static self) -> bool {
        let _guard = self.hold(&self.receive_lock);
        let Some(memory) = self.look_behind().memory else { return false };
        let segment = Segment::peek(&memory, self.early.side());
        close(memory);
        segment.is_ok_and(|segment| segment.status(PeerStatus::Reset) != 0)
    }

    /// Looks through the lifeline as far as the first message, and leaves everything there. Under the receive lock.
    pub(super) fn look_behind(&self) -> Behind {
        let unread = rustix::io::ioctl_fionread(self.borrow_lifeline()).unwrap_or(0) as usize;
        let nothing = Behind { bytes: unread, unread, message: None, memory: None };
        if unread == 0 {
            return nothing;
        }
        let mut scratch = vec![0_u8; unread];
        let spans = [iovec { iov_base: scratch.as_mut_ptr().cast(), iov_len: unread }];
        // SAFETY: the scratch is writable.
        let seen = unsafe { look(self.lifeline(), &spans) };
        let bytes_seen = seen.map_or(0, |(bytes, has_message)| bytes - usize::from(has_message));
        self.early.seen_ahead.store(bytes_seen as u64, Ordering::Relaxed);
        let Ok((bytes, true)) = seen else { return nothing };
        // SAFETY: the scratch is writable, and outlives the call.
        let receive = || unsafe { receive(self.lifeline(), &spans, libc::MSG_PEEK) };
        let received = limit::with_free_descriptor(self.borrow_lifeline(), receive);
        let memory = received.ok().and_then(|received| received.rights);
        Behind { bytes: bytes - 1, unread, message: Some(scratch[bytes - 1]), memory }
    }

    pub(super) fn keep_early_error(&self, error: Errno) {
        self.early.error.store(error.raw_os_error() as u64, Ordering::Relaxed);
    }

    /// What `SO_ERROR` answers, before there are lanes.
    pub(super) fn take_early_error(&'static self) -> i32 {
        self.is_reset_early();
        // What the kernel still has to say has been noted.
        let _ = rustix::net::sockopt::socket_error(self.borrow_lifeline());
        self.early.take_error().map_or(0, Errno::raw_os_error)
    }

    /// Whether what comes in has ended, as the kernel says, read or not.
    pub(super) fn lifeline_has_no_more(&self) -> bool {
        self.is_shut(SHUTDOWN_READ) || self.peer_has_ended_early()
    }

    /// Whether the kernel refuses to send by the lifeline. It answers `EPIPE` to a send of no bytes too.
    pub(super) fn lifeline_takes_nothing(&self) -> bool {
        // SAFETY: there are no spans.
        let sent = unsafe { send_now(self.lifeline(), &[], 0) };
        sent == Err(Errno::PIPE)
    }

    /// Whether the peer is gone, as the kernel says.
    pub(super) fn lifeline_has_hung_up(&self) -> bool {
        blocking::poll_now(self.lifeline(), 0) & libc::POLLHUP != 0
    }

    /// Bytes that have come by the lifeline before there was a lane, for edge-triggered watchers. Only grows. A message
    /// that is unread cannot be told from the program's bytes and is counted with them; it stays counted when it is
    /// taken out, or the number would fall, and what comes next would look like what was there. A message that was
    /// taken out before anybody has counted it is no edge. Under the receive lock.
    pub(super) fn early_arrivals(&self) -> u64 {
        let is_early = self.is_on_lifeline();
        let unread = if is_early { rustix::io::ioctl_fionread(self.borrow_lifeline()).unwrap_or(0) } else { 0 };
        let reaches = self.early.taken_in_all_bytes.load(Ordering::Relaxed) + unread;
        self.early.counted_to_bytes.fetch_max(reaches, Ordering::Relaxed);
        self.early.taken_bytes.load(Ordering::Relaxed) + unread
    }

    /// As [`Connection::early_arrivals`]: how far the lifeline had come to its end when its readiness was last asked.
    /// Only grows.
    pub(super) fn early_ends(&self) -> u64 {
        self.early.ends.load(Ordering::Relaxed)
    }

    /// What is known of the peer, and which directions are shut down.
    pub(super) fn state(&self) -> (PeerState, u64) {
        match self.lanes() {
            Some(lanes) => (self.peer_state(lanes), lanes.segment.load(OwnState::Shutdown)),
            None => {
                let peer = PeerState::from_word(self.early.peer.load(Ordering::Relaxed));
                (peer, self.early.shutdown.load(Ordering::Relaxed))
            }
        }
    }

    fn is_shut(&self, direction: u64) -> bool {
        self.state().1 & direction != 0
    }

    pub(super) fn borrow_lifeline(&self) -> BorrowedFd<'_> {
        // SAFETY: one of the program's descriptors, in a call about it. Were it closed, calls would fail, or be about
        // another file of the program's: as with any descriptor that one thread closes while another one uses it.
        unsafe { BorrowedFd::borrow_raw(self.lifeline()) }
    }

    /// Sends what `fill` puts into a buffer, where nothing can be written in place. `None`: there is no room. Under the
    /// send lock.
    pub(super) fn fill_lifeline(
        &self,
        len_bytes: usize,
        fill: &mut impl FnMut(*mut u8, usize) -> Result<usize, Errno>,
    ) -> Result<Option<usize>, Errno> {
        // The kernel says that there is room when three quarters are free: more than the buffer has.
        if blocking::poll_now(self.lifeline(), libc::POLLOUT) & libc::POLLOUT == 0 {
            return Ok(None);
        }
        let mut bytes = [0_u8; SCRATCH_BYTES];
        let room_bytes = len_bytes.min(SCRATCH_BYTES);
        let filled = fill(bytes.as_mut_ptr(), room_bytes)?.min(room_bytes);
        let spans = [iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: filled }];
        // SAFETY: filled so far.
        let sent = if filled == 0 { 0 } else { unsafe { send_now(self.lifeline(), &spans, 0) }? };
        self.early.has_sent.store(true, Ordering::Relaxed);
        self.early.has_answered.store(true, Ordering::Relaxed);
        Ok(Some(sent))
    }

    /// The kernel has sent so many bytes of the program's by the lifeline. Under the send lock.
    pub(super) fn note_sent_early(&self, bytes: usize) {
        if bytes > 0 {
            self.early.has_sent.store(true, Ordering::Relaxed);
            self.early.has_answered.store(true, Ordering::Relaxed);
            self.count_sent(bytes);
        }
    }

    /// Whether a send by the lifeline would reach nobody.
    pub(super) fn has_no_more_to_send_early(&self) -> bool {
        self.is_shut(SHUTDOWN_WRITE) || self.lifeline_has_hung_up()
    }

    /// As `may_send` of lanes, where what is sent is not known before.
    pub(super) fn may_fill_early(&'static self, len_bytes: usize) -> Result<bool, Errno> {
        let is_news = self.early.peer.load(Ordering::Relaxed) == PeerState::Alive as u64;
        if is_news && !self.is_shut(SHUTDOWN_WRITE) && self.lifeline_has_hung_up() {
            self.send_to_gone()?;
            return Ok(false);
        }
        self.may_send_early(len_bytes)
    }

    /// Receives at most 16 KiB by the lifeline, of which `take` says how many it has used.
    pub(super) fn take_by_lifeline(
        &'static self,
        generation: u32,
        len_bytes: usize,
        take: impl FnOnce(*mut u8, usize) -> Result<usize, Errno>,
    ) -> Result<Option<Step>, Errno> {
        let mut scratch = [0_u8; SCRATCH_BYTES];
        let begin = scratch.as_mut_ptr();
        let span = |len| [iovec { iov_base: begin.cast(), iov_len: len }];
        let peek = Flags { peek: true, ..Flags::default() };
        let first = span(len_bytes.min(SCRATCH_BYTES));
        // SAFETY: the scratch is writable.
        let seen = unsafe { self.receive_by_lifeline(generation, &first, 0, peek) }?;
        let Some(Step::Moved(bytes)) = seen else { return Ok(seen) };
        let used = span(take(begin, bytes)?);
        // SAFETY: `used` is a part of the scratch, which is writable.
        unsafe { self.receive_by_lifeline(generation, &used, 0, Flags::default()) }
    }

    /// Whether nothing wakes who waits for room: the peer cannot ring before this end has received its `SWITCH`, nor
    /// under a filter that has no room for that.
    pub fn waits_for_room_in_vain(&'static self, wanted: i16) -> bool {
        let peer_is_confined = || {
            let _guard = self.hold(&self.send_lock);
            self.lanes().is_some_and(|lanes| lanes.segment.peer_is_confined())
        };
        wanted & (libc::POLLOUT | libc::POLLWRNORM) != 0
            && self.send_is_blocked.load(Ordering::Relaxed)
            && (!self.receives_by_lane() || peer_is_confined())
    }

    /// Whether what comes in comes by the lifeline.
    pub fn is_on_lifeline(&self) -> bool {
        !self.receives_by_lane() && !self.awaits_handshake.load(Ordering::Relaxed)
    }

    /// Whether one that waits on the lifeline need not any more, whatever the kernel says of it: `POLLIN`, `POLLOUT`.
    pub(super) fn is_early_wait_over(&'static self, events: i16) -> bool {
        let is_switched = || {
            let _receive = self.hold(&self.receive_lock);
            self.comes_by_lane()
        };
        if events & libc::POLLIN != 0 {
            is_switched() || self.is_shut(SHUTDOWN_READ)
        } else {
            self.sends_by_lane() || self.is_shut(SHUTDOWN_WRITE)
        }
    }

    /// The kernel has said `CONNRESET` to one that waited.
    pub(super) fn note_kernel_reset(&self) {
        match self.lanes() {
            Some(lanes) => self.note_hang_up(lanes, true),
            None if self.early.is_reset() || self.has_only_offered() => {}
            None => self.early.note_reset(),
        }
    }
}

/// What the lifeline leads to.
pub(super) struct Behind {
    /// The program's bytes before the first message.
    pub bytes: usize,
    /// All bytes, with messages.
    unread: usize,
    pub message: Option<u8>,
    /// What came with it.
    pub memory: Option<OwnedFd>,
}

/// What comes first in a lifeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum First {
    Nothing,
    Bytes,
    Message,
    End,
}
