//! How a connection begins: its bytes go by the lifeline, a plain AF_UNIX stream, until lanes pay.
//!
//! So `connect` and `accept` need no memory, no further descriptor and nothing of the other end, and what happens to
//! a young connection (a fork, an `exec`, a limit that is reached, a peer that says nothing) is the kernel's affair.
//! Where AF_UNIX answers otherwise than TCP, this file translates.
//!
//! * `lanes`: how it gets lanes.
//! * `lane_peers`: addresses to which a connection gets them at once, for the sake of order.
//! * `message`: what the two ends say to each other for that, in the stream itself.

pub(super) mod lane_peers;
mod message;
#[cfg(test)]
mod tests;
mod upgrade;

pub(super) use message::{FOLLOW, SWITCH};
use message::{
    Message, NO_SPAN, OFFER, Received, peek, peek_exactly, peek_to_sink, receive, receive_exactly, send_now,
    spans_after,
};
use upgrade::OfferedMemory;

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
const PEEK_BYTES: usize = 64 << 10;

/// What a connection knows while one of its directions goes by the lifeline.
#[derive(Default)]
pub(super) struct LifelineState {
    is_acceptor: AtomicBool,
    /// Directions that the program has shut down.
    shutdown: AtomicU64,
    /// What sends know of the peer: a [`PeerState`].
    peer: AtomicU64,
    /// An error number to be reported once.
    error: AtomicU64,
    /// Questions: receives that brought something, the first ones and those behind an answer.
    requests: AtomicU32,
    /// Something was sent behind the last question.
    has_responded: AtomicBool,
    /// Bytes of the program's that come next, as a look has found and no receive has taken. Under the receive lock.
    peeked_bytes: AtomicU64,
    /// Bytes that have been taken out of the lifeline, as edges count them: see [`Connection::lifeline_arrivals`].
    received_bytes: AtomicU64,
    /// The same, with all messages.
    received_with_messages_bytes: AtomicU64,
    /// How far the lifeline reached, from its beginning, when edges were last counted.
    counted_to_bytes: AtomicU64,
    /// Clock ticks at the last look for messages without a receive.
    messages_polled_ticks: AtomicU64,
    /// How far it was seen to have ended.
    end_level: AtomicU64,
    /// The lifeline was shut for reading, so that the kernel does not say any more whether the peer has ended.
    is_read_shut: AtomicBool,
    /// The peer had ended its stream when the lifeline was shut for reading.
    had_peer_ended: AtomicBool,
    /// The lifeline holds all that it may.
    is_widened: AtomicBool,
    /// Another process may hold the end, and has no part in its lanes.
    is_shared: AtomicBool,
    /// The peer's kernel refuses descriptors, as under a filter: there are no messages any more.
    are_rights_refused: AtomicBool,
    has_offered: AtomicBool,
    /// It was tried to give it lanes because others have some.
    has_switched_for_order: AtomicBool,
    /// The program has sent something.
    has_sent: AtomicBool,
    /// The peer had not read all of the lifeline when what is sent went over to a lane.
    was_unread: AtomicBool,
    has_pending_message: AtomicBool,
    /// Under a filter: one more than the bytes of the program's that lie before the last message.
    pub(super) bytes_to_message: AtomicU64,
    /// Messages that have come.
    messages_received: AtomicU32,
    /// Inode of the memory that the outgoing lane lies in.
    inode: AtomicU64,
    /// Under the send lock.
    offered: UnsafeCell<Option<OfferedMemory>>,
    /// Under the receive lock.
    pending_message: UnsafeCell<Option<Message>>,
}

impl LifelineState {
    /// Under both locks, or before anybody knows the connection.
    pub(super) fn begin(&self, side: Side) {
        self.is_acceptor.store(side == Side::Acceptor, Ordering::Relaxed);
        self.shutdown.store(0, Ordering::Relaxed);
        self.peer.store(PeerState::Alive as u64, Ordering::Relaxed);
        self.error.store(0, Ordering::Relaxed);
        self.requests.store(0, Ordering::Relaxed);
        self.has_responded.store(true, Ordering::Relaxed);
        self.peeked_bytes.store(0, Ordering::Relaxed);
        self.received_bytes.store(0, Ordering::Relaxed);
        self.received_with_messages_bytes.store(0, Ordering::Relaxed);
        self.counted_to_bytes.store(0, Ordering::Relaxed);
        self.is_shared.store(false, Ordering::Relaxed);
        self.are_rights_refused.store(false, Ordering::Relaxed);
        self.bytes_to_message.store(0, Ordering::Relaxed);
        self.is_widened.store(false, Ordering::Relaxed);
        self.is_read_shut.store(false, Ordering::Relaxed);
        self.had_peer_ended.store(false, Ordering::Relaxed);
        self.end_level.store(0, Ordering::Relaxed);
        self.has_sent.store(false, Ordering::Relaxed);
        self.has_switched_for_order.store(false, Ordering::Relaxed);
        self.was_unread.store(false, Ordering::Relaxed);
        self.inode.store(0, Ordering::Relaxed);
        self.messages_received.store(0, Ordering::Relaxed);
        self.clear();
    }

    /// Forgets what is on its way. Under both locks, or as [`LifelineState::begin`].
    pub(super) fn clear(&self) {
        self.has_offered.store(false, Ordering::Relaxed);
        self.has_pending_message.store(false, Ordering::Relaxed);
        // SAFETY: our caller holds the send lock, or is alone with the object.
        drop(unsafe { (*self.offered.get()).take() });
        // SAFETY: our caller holds the receive lock, or is alone with the object.
        drop(unsafe { (*self.pending_message.get()).take() });
    }

    /// Of an end that another process has held: where its outgoing lane lies.
    pub(super) fn note_inode(&self, memory: Option<&MemoryFds<HiddenFd>>) {
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
    fn note_broken_pipe(&self) {
        self.peer.store(PeerState::BrokenPipe as u64, Ordering::Relaxed);
        self.error.store(Errno::PIPE.raw_os_error() as u64, Ordering::Relaxed);
    }

    /// As [`LifelineState::take_error`], for a receive: behind the end of a stream no error comes.
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
enum LifelineRead {
    Bytes(usize),
    End,
    /// A message for us has been put aside.
    Message,
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
            let guard = self.lock_for_generation(generation, &self.send_lock)?;
            if self.awaits_handshake.load(Ordering::Relaxed) {
                return Ok((sent, true));
            }
            if self.sends_by_lane() || self.follow_peer(None) {
                return Ok((sent, true));
            }
            if sent == 0 && !self.may_send_by_lifeline(wanted - skip)? {
                return Ok((self.bytes_accepted_for_closed_peer(wanted - skip), false));
            }
            if skip + sent >= wanted {
                return Ok((sent, false));
            }
            self.offer_with_answer();
            // SAFETY: our caller says that every span is readable for its length.
            match unsafe { send_now(self.lifeline(), spans, skip + sent) } {
                Ok(bytes) => {
                    sent += bytes;
                    self.lifeline_state.has_sent.store(true, Ordering::Relaxed);
                    self.lifeline_state.has_responded.store(true, Ordering::Relaxed);
                    self.count_sent(bytes);
                }
                Err(Errno::AGAIN) => {
                    drop(guard);
                    if !self.switch_to_lanes() && !self.widen() {
                        return Ok((sent, false));
                    }
                }
                Err(Errno::PIPE | Errno::CONNRESET) if sent > 0 => return Ok((sent, false)),
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    drop(guard);
                    self.process_messages_for_all();
                    match self.lanes() {
                        Some(lanes) => self.poll_lifeline(lanes),
                        None => {
                            return self
                                .send_to_closed_peer()
                                .map(|()| (self.bytes_accepted_for_closed_peer(wanted - skip), false));
                        }
                    }
                }
                Err(Errno::INTR) => {}
                Err(error) => return if sent > 0 { Ok((sent, false)) } else { Err(error) },
            }
        }
    }

    /// As [`Connection::may_send`], where what is sent goes by the lifeline.
    fn may_send_by_lifeline(&self, len_bytes: usize) -> Result<bool, Errno> {
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
                self.lifeline_state.note_broken_pipe();
                Ok(false)
            }
            PeerState::BrokenPipe => {
                self.lifeline_state.take_error();
                Err(Errno::PIPE)
            }
            PeerState::Reset => Err(self.lifeline_state.take_error().unwrap_or(Errno::PIPE)),
        }
    }

    /// The kernel refuses a send: the peer is gone. TCP's buffer takes the first one all the same, unless a reset has
    /// come.
    fn send_to_closed_peer(&'static self) -> Result<(), Errno> {
        if !self.lifeline_has_hung_up() {
            // Another process that holds the end has shut it down.
            self.lifeline_state.shutdown.fetch_or(SHUTDOWN_WRITE, Ordering::Relaxed);
            return Err(Errno::PIPE);
        }
        if self.is_reset_on_lifeline() {
            return Err(self.lifeline_state.take_error().unwrap_or(Errno::PIPE));
        }
        self.lifeline_state.note_broken_pipe();
        Ok(())
    }

    /// Whether all that the peer can have left unread is an offer.
    fn has_only_offered(&self) -> bool {
        self.lifeline_state.has_offered.load(Ordering::Relaxed) && !self.lifeline_state.has_sent.load(Ordering::Relaxed)
    }

    /// Whether the peer has reset the connection, as the kernel says, or a lane that the lifeline leads to. Notes it,
    /// with the error to be reported once.
    fn is_reset_on_lifeline(&'static self) -> bool {
        if self.lifeline_state.is_reset() {
            return true;
        }
        let revents = blocking::poll_now(self.lifeline(), 0);
        let has_left_bytes = revents & libc::POLLERR != 0 && !self.has_only_offered();
        let is_reset = has_left_bytes || (revents & libc::POLLHUP != 0 && self.is_reset_in_lane());
        if is_reset {
            self.lifeline_state.note_reset();
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
            if self.lifeline_state.has_pending_message.load(Ordering::Relaxed) {
                self.handle_pending_message()?;
                self.notify_sets();
            }
            let guard = self.lock_for_generation(generation, &self.receive_lock)?;
            let shared = match self.lanes() {
                Some(lanes) => self.lock_across_processes(lanes, OwnState::ReceiveLock)?,
                None => None,
            };
            // SAFETY: our caller says that every span is writable for its length.
            let taken = unsafe { self.read_lifeline(spans, skip, flags) };
            drop(shared);
            drop(guard);
            match taken? {
                LifelineRead::ByLane => return Ok(None),
                LifelineRead::Message => {}
                LifelineRead::End => return Ok(Some(Step::End)),
                LifelineRead::Bytes(0) => return Ok(Some(Step::Nothing)),
                LifelineRead::Bytes(bytes) => {
                    self.count_received(bytes, flags);
                    if !flags.peek && self.lifeline_state.has_responded.swap(false, Ordering::Relaxed) {
                        self.lifeline_state.requests.fetch_add(1, Ordering::Relaxed);
                    }
                    return Ok(Some(Step::Moved(bytes)));
                }
            }
        }
    }

    /// Under the receive lock.
    unsafe fn read_lifeline(&'static self, spans: &[iovec], skip: usize, flags: Flags) -> Result<LifelineRead, Errno> {
        if self.lifeline_state.has_pending_message.load(Ordering::Relaxed) {
            // Another thread has taken a message out: what lies behind it is not the program's.
            return Ok(LifelineRead::Message);
        }
        if self.is_incoming_by_lane() || self.awaits_handshake.load(Ordering::Relaxed) {
            return Ok(LifelineRead::ByLane);
        }
        let mut one = [NO_SPAN];
        let spans = spans_after(spans, skip, &mut one);
        if flags.discard {
            let mut scratch = [0_u8; SCRATCH_BYTES];
            let len = total_bytes(spans).min(SCRATCH_BYTES);
            let unwanted = [iovec { iov_base: scratch.as_mut_ptr().cast(), iov_len: len }];
            // SAFETY: the scratch is writable.
            return unsafe { self.read_spans(&unwanted, flags) };
        }
        // SAFETY: every span is writable for its length, as whoever receives has promised.
        unsafe { self.read_spans(spans, flags) }
    }

    /// Looks first, without room for descriptors: what has some is none of the program's.
    unsafe fn read_spans(&'static self, spans: &[iovec], flags: Flags) -> Result<LifelineRead, Errno> {
        let (bytes, has_message) = match self.peek_ahead(total_bytes(spans)) {
            Ok((0, false)) => return self.end_of_lifeline(spans),
            Ok((bytes, true)) => (bytes - 1, true),
            Ok(seen) => seen,
            Err(Errno::AGAIN | Errno::INTR) if self.is_shut(SHUTDOWN_READ) => return Ok(LifelineRead::End),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(LifelineRead::Bytes(0)),
            Err(Errno::CONNRESET) => return self.reset_by_kernel(),
            Err(error) => return Err(error),
        };
        if bytes == 0 {
            return self.receive_message();
        }
        if flags.peek {
            // SAFETY: every span is writable for its length, as whoever receives has promised.
            return unsafe { peek_exactly(self.lifeline(), spans, bytes) }.map(LifelineRead::Bytes);
        }
        let peeked_bytes = self.lifeline_state.peeked_bytes.load(Ordering::Relaxed);
        // SAFETY: every span is writable for its length, as whoever receives has promised.
        let taken = unsafe { receive_exactly(self.lifeline(), spans, bytes) }?;
        self.lifeline_state.peeked_bytes.fetch_sub(peeked_bytes.min(taken.0 as u64), Ordering::Relaxed);
        self.lifeline_state.received_bytes.fetch_add(taken.0 as u64, Ordering::Relaxed);
        self.lifeline_state.received_with_messages_bytes.fetch_add(taken.0 as u64, Ordering::Relaxed);
        // Another process that holds this end may have been faster: what it has left may end with a message.
        if let Some(message) = taken.1 {
            self.store_message(message);
        }
        if has_message && taken.0 == bytes {
            // What says where the stream goes on is not left lying: a receive takes from both.
            let _ = self.receive_message();
        }
        Ok(LifelineRead::Bytes(taken.0))
    }

    /// As [`peek_to_sink`]; but what an earlier look has shown to be no message is not looked at again, as long as no
    /// other process can receive it. Under the receive lock.
    fn peek_ahead(&self, wanted: usize) -> Result<(usize, bool), Errno> {
        let peeked_bytes = self.lifeline_state.peeked_bytes.swap(0, Ordering::Relaxed) as usize;
        if wanted == 0 || self.may_have_other_holders() {
            return peek_to_sink(self.lifeline(), wanted);
        }
        if peeked_bytes >= wanted {
            self.lifeline_state.peeked_bytes.store(peeked_bytes as u64, Ordering::Relaxed);
            return Ok((wanted, false));
        }
        let (seen, has_message) = peek_to_sink(self.lifeline(), wanted.max(PEEK_BYTES))?;
        let bytes = seen - usize::from(has_message);
        self.lifeline_state.peeked_bytes.store(bytes as u64, Ordering::Relaxed);
        Ok(if has_message && bytes < wanted { (seen, true) } else { (bytes.min(wanted), false) })
    }

    /// Whether the incoming direction goes by its lane, as this process or another one that holds the end has found.
    /// Under the receive lock.
    fn is_incoming_by_lane(&self) -> bool {
        if self.receives_by_lane() {
            return true;
        }
        let Some(lanes) = self.lanes() else { return false };
        if self.may_have_other_holders() && lanes.segment.load(OwnState::ByLane) & BY_LANE_RECEIVE != 0 {
            signals::without_handlers(|| self.use_lanes_for(BY_LANE_RECEIVE));
            if self.sleepers.is_any() {
                // SAFETY: under the receive lock.
                unsafe { (*lanes.receiver.get()).announce_sleep() };
            }
        }
        self.receives_by_lane()
    }

    /// The kernel says that nothing comes any more.
    fn end_of_lifeline(&self, spans: &[iovec]) -> Result<LifelineRead, Errno> {
        if total_bytes(spans) == 0 {
            let is_there = blocking::poll_now(self.lifeline(), libc::POLLIN) & libc::POLLIN != 0;
            return Ok(if is_there { LifelineRead::End } else { LifelineRead::Bytes(0) });
        }
        match self.lanes() {
            Some(lanes) => self.end_of_input(lanes).map(|_| LifelineRead::End),
            None => self.lifeline_state.take_reset().map_or(Ok(LifelineRead::End), Err),
        }
    }

    /// The peer has left something unread; the kernel says so once.
    fn reset_by_kernel(&self) -> Result<LifelineRead, Errno> {
        if let Some(lanes) = self.lanes() {
            self.note_hang_up(lanes, true);
            return self.end_of_input(lanes).map(|_| LifelineRead::End);
        }
        self.note_kernel_reset();
        self.lifeline_state.take_reset().map_or(Ok(LifelineRead::End), Err)
    }

    /// Receives a message that has come first. Under the receive lock.
    fn receive_message(&'static self) -> Result<LifelineRead, Errno> {
        let lifeline = self.borrow_lifeline();
        let received = limit::with_free_descriptor(lifeline, || {
            let mut kind = 0_u8;
            let spans = [iovec { iov_base: (&raw mut kind).cast(), iov_len: 1 }];
            // SAFETY: one byte is writable.
            unsafe { receive(lifeline.as_raw_fd(), &spans, 0) }.map(|received| (received, kind))
        });
        match received {
            Ok((Received { bytes: 1, rights, .. }, kind)) => {
                self.store_message(Message { kind, memory: rights });
                Ok(LifelineRead::Message)
            }
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(LifelineRead::Bytes(0)),
            Err(error) => Err(error),
        }
    }

    /// Under the receive lock. Nothing more is received until it is followed.
    fn store_message(&self, message: Message) {
        // SAFETY: under the receive lock.
        unsafe { *self.lifeline_state.pending_message.get() = Some(message) };
        let before = self.lifeline_state.received_with_messages_bytes.fetch_add(1, Ordering::Relaxed);
        if self.lifeline_state.counted_to_bytes.load(Ordering::Relaxed) > before {
            self.lifeline_state.received_bytes.fetch_add(1, Ordering::Relaxed);
        }
        self.lifeline_state.has_pending_message.store(true, Ordering::Relaxed);
    }

    /// Shuts down directions that go by the lifeline. Under the send lock.
    ///
    /// # Errors
    /// `NOTCONN` after a reset.
    pub(super) fn shutdown_lifeline(&'static self, directions: u64) -> Result<(), Errno> {
        if self.lifeline_state.is_reset() {
            return Err(Errno::NOTCONN);
        }
        let before = self.lifeline_state.shutdown.fetch_or(directions, Ordering::Relaxed);
        let fresh = directions & !before;
        if fresh & SHUTDOWN_WRITE != 0 {
            let _ = rustix::net::shutdown(self.borrow_lifeline(), rustix::net::Shutdown::Write);
        }
        if fresh & SHUTDOWN_READ != 0 {
            self.wake_by_shutdown();
        }
        Ok(())
    }

    /// After a shutdown for reading: threads of this process that sleep on the lifeline must look again, and nothing
    /// but its end wakes them all.
    pub(super) fn wake_by_shutdown(&self) {
        if self.sleepers.is_any() {
            self.lifeline_state.had_peer_ended.store(self.has_peer_shut_lifeline(), Ordering::Relaxed);
            self.lifeline_state.is_read_shut.store(true, Ordering::Relaxed);
            let _ = rustix::net::shutdown(self.borrow_lifeline(), rustix::net::Shutdown::Read);
        }
    }

    /// Whether the peer has ended its stream, as the kernel says while it can.
    pub(super) fn has_peer_shut_lifeline(&self) -> bool {
        if self.lifeline_state.is_read_shut.load(Ordering::Relaxed) {
            return self.lifeline_state.had_peer_ended.load(Ordering::Relaxed);
        }
        blocking::poll_now(self.lifeline(), libc::POLLRDHUP) & (libc::POLLRDHUP | libc::POLLHUP) != 0
    }

    /// Before a close: a message that was left unread would reset the peer, and `SO_LINGER` may ask for a reset.
    pub(super) fn process_final_messages(&'static self) {
        // What is there may be for another process.
        if self.receives_by_lane() || self.awaits_handshake.load(Ordering::Relaxed) || self.may_have_other_holders() {
            return;
        }
        if self.with_details(|details| details.resets_on_close) {
            self.switch_to_lanes();
        }
        // An offer comes too late.
        self.lifeline_state.is_shared.store(true, Ordering::Relaxed);
        self.process_messages();
    }

    /// After a receive by the lifeline: whether the stream goes on in a lane.
    pub(super) fn continues_by_lane(&'static self) -> bool {
        let goes_on = self.lifeline_state.has_pending_message.load(Ordering::Relaxed)
            && self.handle_pending_message().is_ok()
            && self.receives_by_lane();
        self.notify_sets();
        goes_on
    }

    /// A program that only sends does not receive what says that both directions go by lanes; sends are quicker then.
    pub(super) fn process_messages_periodically(&'static self) {
        let now = ticks();
        if now.wrapping_sub(self.lifeline_state.messages_polled_ticks.load(Ordering::Relaxed)) > TICKS_PER_MILLISECOND {
            self.lifeline_state.messages_polled_ticks.store(now, Ordering::Relaxed);
            self.process_messages_for_all();
        }
    }

    /// As [`Connection::process_messages`], for a call that is about this connection alone.
    pub(super) fn process_messages_for_all(&'static self) {
        self.process_messages();
        self.notify_sets();
    }

    /// After a call has taken messages out that a readiness set was to find: the set looks at the connection, since
    /// what came by the lane before anybody asked for rings is not rung for.
    pub(super) fn notify_sets(&'static self) {
        if self.receives_by_lane() && self.sleepers.is_any() {
            observer::tell_change(self);
        }
    }

    /// Follows the messages that come first in the lifeline. Answers what comes then.
    pub(super) fn process_messages(&'static self) -> NextItem {
        loop {
            if let Err(first) = self.process_next_message() {
                return first;
            }
        }
    }

    /// Follows the message that comes first in the lifeline.
    ///
    /// # Errors
    /// What comes first, if that is no message, or one that cannot be followed now.
    fn process_next_message(&'static self) -> Result<(), NextItem> {
        {
            let guard = self.lock_direction(&self.receive_lock);
            if guard.is_none() || self.is_incoming_by_lane() {
                return Err(NextItem::Nothing);
            }
            if !self.lifeline_state.has_pending_message.load(Ordering::Relaxed) {
                match self.next_in_lifeline() {
                    NextItem::Message if matches!(self.receive_message(), Ok(LifelineRead::Message)) => {}
                    first => return Err(first),
                }
            }
        }
        self.handle_pending_message().map_err(|_| NextItem::Message)
    }

    /// Under the receive lock.
    fn next_in_lifeline(&self) -> NextItem {
        let mut byte = 0_u8;
        let spans = [iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 }];
        // SAFETY: one byte is writable.
        match unsafe { peek(self.lifeline(), &spans) } {
            Ok((0, _)) => NextItem::End,
            Ok((_, true)) => NextItem::Message,
            Ok((_, false)) => NextItem::Bytes,
            Err(Errno::CONNRESET) => {
                self.note_kernel_reset();
                NextItem::End
            }
            Err(_) => NextItem::Nothing,
        }
    }

    /// As [`Connection::readiness`], where what comes in comes by the lifeline. One system call, and one more if
    /// something is there. `None`: it does not any more.
    pub(super) fn lifeline_readiness(&'static self, wanted: i16) -> Option<i16> {
        let ask = || blocking::poll_now(self.lifeline(), libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP);
        let mut revents = ask();
        let may_hear = revents & libc::POLLIN != 0
            || self.lifeline_state.has_pending_message.load(Ordering::Relaxed)
            || self.may_have_other_holders();
        let mut first = NextItem::Nothing;
        if may_hear {
            let heard_before = self.lifeline_state.messages_received.load(Ordering::Relaxed);
            first = self.process_messages();
            if self.receives_by_lane() {
                return None;
            }
            if self.lifeline_state.messages_received.load(Ordering::Relaxed) != heard_before {
                revents = ask();
            }
        }
        let ends = u64::from((revents & (libc::POLLRDHUP | libc::POLLHUP)).count_ones());
        self.lifeline_state.end_level.fetch_max(ends, Ordering::Relaxed);
        // The end may lie in a lane that is known before what leads there has its turn.
        let ends_in_lane = self.lanes().is_some_and(|lanes| lanes.observer().has_fin());
        let has_ended = revents & libc::POLLRDHUP != 0 || ends_in_lane;
        let is_shut = |direction| self.is_shut(direction);
        if let Some(lanes) = self.lanes().filter(|_| revents & libc::POLLHUP != 0) {
            self.note_hang_up(lanes, revents & libc::POLLERR != 0);
        }
        if self.lanes().is_none()
            && revents & libc::POLLHUP != 0
            && (revents & libc::POLLERR != 0 || first == NextItem::Bytes)
        {
            self.is_reset_on_lifeline();
        }
        let (peer, _) = self.state();
        let has_error = self.lanes().map_or(self.lifeline_state.error.load(Ordering::Relaxed), |lanes| {
            lanes.segment.load(OwnState::PendingError)
        }) != 0;
        let mut ready = 0;
        if (first == NextItem::Bytes && self.reaches_low_water()) || has_ended || is_shut(SHUTDOWN_READ) {
            ready |= libc::POLLIN | libc::POLLRDNORM;
        }
        if has_ended || is_shut(SHUTDOWN_READ) {
            ready |= libc::POLLRDHUP;
        }
        if ready & libc::POLLRDHUP != 0 && is_shut(SHUTDOWN_WRITE) {
            ready |= libc::POLLHUP;
        }
        if matches!(peer, PeerState::BrokenPipe | PeerState::Reset) {
            ready |= libc::POLLHUP;
        }
        if has_error {
            ready |= libc::POLLERR;
        }
        let output =
            if self.sends_by_lane() { self.output_readiness(wanted) } else { self.lifeline_output_readiness(revents) };
        Some(ready | output)
    }

    /// A lifeline that is full gives way to a lane, if there can be one.
    fn lifeline_output_readiness(&self, revents: i16) -> i16 {
        const OUTPUT: i16 = libc::POLLOUT | libc::POLLWRNORM;
        let has_room = revents & (libc::POLLOUT | libc::POLLHUP) != 0 || self.is_shut(SHUTDOWN_WRITE);
        if !has_room && self.send_is_blocked.load(Ordering::Relaxed) {
            return 0;
        }
        if self.send_is_blocked.swap(false, Ordering::Relaxed) {
            self.room_returns.fetch_add(1, Ordering::Relaxed);
        }
        OUTPUT
    }

    fn reaches_low_water(&'static self) -> bool {
        let low_water = self.low_water_bytes.load(Ordering::Relaxed) as usize;
        low_water <= 1 || self.unread_in_lifeline() >= low_water
    }

    /// As [`Connection::unread_in_lifeline`]: whether there are any. A message counts too.
    pub(super) fn has_bytes_in_lifeline(&self) -> bool {
        rustix::io::ioctl_fionread(self.borrow_lifeline()).is_ok_and(|bytes| bytes > 0)
    }

    /// As [`Connection::has_bytes_in_lifeline`], without the messages: one may come after the last look for them.
    /// Under both locks.
    pub(super) fn has_program_bytes_in_lifeline(&self) -> bool {
        self.has_bytes_in_lifeline() && self.unread_locked() > 0
    }

    /// Bytes that have come and are unread, in the lifeline and in the lane that it leads to. Where an offer comes
    /// first, what is behind that is counted as if no other message came there.
    pub(super) fn unread_in_lifeline(&'static self) -> usize {
        let _both = self.lock_both();
        self.unread_locked()
    }

    /// As [`Connection::unread_in_lifeline`], under both locks.
    fn unread_locked(&self) -> usize {
        // Programs ask after each receive.
        if let Some(unread) = self.unread_as_peeked() {
            return unread;
        }
        let behind = self.look_ahead();
        let is_inline = self.is_urgent_inline();
        let unread_in = |segment: &Segment| urgent::unread_before_mark(segment, behind.bytes == 0, is_inline);
        let beyond = match (behind.message, &behind.memory) {
            (Some(OFFER), _) => behind.unread - behind.bytes - 1,
            (Some(FOLLOW), _) => {
                // SAFETY: under the send lock.
                let offered = unsafe { (*self.lifeline_state.offered.get()).as_ref() }.map(|offered| &offered.segment);
                self.lanes().map(|lanes| &lanes.segment).or(offered).map_or(0, unread_in)
            }
            (Some(SWITCH), Some(memory)) => {
                Segment::peek(memory, self.lifeline_state.side()).map_or(0, |segment| unread_in(&segment))
            }
            _ => 0,
        };
        behind.memory.into_iter().for_each(close);
        behind.bytes + beyond
    }

    /// Bytes of the program's that are unread, where a look has shown all of them, and no message among them. Under the
    /// receive lock.
    pub(super) fn unread_as_peeked(&self) -> Option<usize> {
        let peeked_bytes = self.lifeline_state.peeked_bytes.load(Ordering::Relaxed);
        let may_be = peeked_bytes > 0 && !self.may_have_other_holders();
        let is_all = || rustix::io::ioctl_fionread(self.borrow_lifeline()) == Ok(peeked_bytes);
        (may_be && is_all()).then_some(peeked_bytes as usize)
    }

    /// Whether a peer that is gone has reset the connection, behind bytes that are unread.
    fn is_reset_in_lane(&'static self) -> bool {
        let _guard = self.lock_direction(&self.receive_lock);
        let Some(memory) = self.look_ahead().memory else { return false };
        let segment = Segment::peek(&memory, self.lifeline_state.side());
        close(memory);
        segment.is_ok_and(|segment| segment.status(PeerStatus::Reset) != 0)
    }

    /// Looks through the lifeline as far as the first message, and leaves everything there. Under the receive lock.
    pub(super) fn look_ahead(&self) -> Lookahead {
        let unread = rustix::io::ioctl_fionread(self.borrow_lifeline()).unwrap_or(0) as usize;
        let nothing = Lookahead { bytes: unread, unread, message: None, memory: None };
        if unread == 0 {
            return nothing;
        }
        let mut scratch = vec![0_u8; unread];
        let spans = [iovec { iov_base: scratch.as_mut_ptr().cast(), iov_len: unread }];
        // SAFETY: the scratch is writable.
        let seen = unsafe { peek(self.lifeline(), &spans) };
        let bytes_seen = seen.map_or(0, |(bytes, has_message)| bytes - usize::from(has_message));
        self.lifeline_state.peeked_bytes.store(bytes_seen as u64, Ordering::Relaxed);
        let Ok((bytes, true)) = seen else { return nothing };
        // SAFETY: the scratch is writable, and outlives the call.
        let receive = || unsafe { receive(self.lifeline(), &spans, libc::MSG_PEEK) };
        let received = limit::with_free_descriptor(self.borrow_lifeline(), receive);
        let memory = received.ok().and_then(|received| received.rights);
        Lookahead { bytes: bytes - 1, unread, message: Some(scratch[bytes - 1]), memory }
    }

    pub(super) fn defer_lifeline_error(&self, error: Errno) {
        self.lifeline_state.error.store(error.raw_os_error() as u64, Ordering::Relaxed);
    }

    /// What `SO_ERROR` answers, before there are lanes.
    pub(super) fn take_lifeline_error(&'static self) -> i32 {
        self.is_reset_on_lifeline();
        // What the kernel still has to say has been noted.
        let _ = rustix::net::sockopt::socket_error(self.borrow_lifeline());
        self.lifeline_state.take_error().map_or(0, Errno::raw_os_error)
    }

    /// Whether what comes in has ended, as the kernel says, read or not.
    pub(super) fn lifeline_has_no_more(&self) -> bool {
        self.is_shut(SHUTDOWN_READ) || self.has_peer_shut_lifeline()
    }

    /// Whether the kernel refuses to send by the lifeline. It answers `EPIPE` to a send of no bytes too.
    pub(super) fn does_lifeline_refuse_sends(&self) -> bool {
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
    pub(super) fn lifeline_arrivals(&self) -> u64 {
        let is_early = self.is_on_lifeline();
        let unread = if is_early { rustix::io::ioctl_fionread(self.borrow_lifeline()).unwrap_or(0) } else { 0 };
        let reaches = self.lifeline_state.received_with_messages_bytes.load(Ordering::Relaxed) + unread;
        self.lifeline_state.counted_to_bytes.fetch_max(reaches, Ordering::Relaxed);
        self.lifeline_state.received_bytes.load(Ordering::Relaxed) + unread
    }

    /// As [`Connection::lifeline_arrivals`]: how far the lifeline had come to its end when its readiness was last asked.
    /// Only grows.
    pub(super) fn lifeline_end_level(&self) -> u64 {
        self.lifeline_state.end_level.load(Ordering::Relaxed)
    }

    /// What is known of the peer, and which directions are shut down.
    pub(super) fn state(&self) -> (PeerState, u64) {
        match self.lanes() {
            Some(lanes) => (self.peer_state(lanes), lanes.segment.load(OwnState::Shutdown)),
            None => {
                let peer = PeerState::from_word(self.lifeline_state.peer.load(Ordering::Relaxed));
                (peer, self.lifeline_state.shutdown.load(Ordering::Relaxed))
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
    pub(super) fn fill_and_send(
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
        self.lifeline_state.has_sent.store(true, Ordering::Relaxed);
        self.lifeline_state.has_responded.store(true, Ordering::Relaxed);
        Ok(Some(sent))
    }

    /// The kernel has sent so many bytes of the program's by the lifeline. Under the send lock.
    pub(super) fn note_sent_by_lifeline(&self, bytes: usize) {
        if bytes > 0 {
            self.lifeline_state.has_sent.store(true, Ordering::Relaxed);
            self.lifeline_state.has_responded.store(true, Ordering::Relaxed);
            self.count_sent(bytes);
        }
    }

    /// Whether a send by the lifeline would reach nobody.
    pub(super) fn is_lifeline_output_closed(&self) -> bool {
        self.is_shut(SHUTDOWN_WRITE) || self.lifeline_has_hung_up()
    }

    /// As `may_send` of lanes, where what is sent is not known before.
    pub(super) fn may_fill_by_lifeline(&'static self, len_bytes: usize) -> Result<bool, Errno> {
        let is_news = self.lifeline_state.peer.load(Ordering::Relaxed) == PeerState::Alive as u64;
        if is_news && !self.is_shut(SHUTDOWN_WRITE) && self.lifeline_has_hung_up() {
            self.send_to_closed_peer()?;
            return Ok(false);
        }
        self.may_send_by_lifeline(len_bytes)
    }

    /// Receives at most 16 KiB by the lifeline, of which `take` says how many it has used.
    pub(super) fn consume_lifeline_with(
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
    pub fn must_poll_for_room(&'static self, wanted: i16) -> bool {
        let peer_is_confined = || {
            let _guard = self.lock_direction(&self.send_lock);
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
    pub(super) fn is_lifeline_wait_over(&'static self, events: i16) -> bool {
        let is_switched = || {
            let _receive = self.lock_direction(&self.receive_lock);
            self.is_incoming_by_lane()
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
            None if self.lifeline_state.is_reset() || self.has_only_offered() => {}
            None => self.lifeline_state.note_reset(),
        }
    }
}

/// What the lifeline leads to.
pub(super) struct Lookahead {
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
pub(super) enum NextItem {
    Nothing,
    Bytes,
    Message,
    End,
}
