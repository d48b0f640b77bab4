//! How a connection begins: its bytes go by the lifeline, a plain AF_UNIX stream, until lanes pay.
//!
//! So `connect` and `accept` need no memory, no further descriptor and nothing of the other end, and what happens to
//! a young connection (a fork, an `exec`, a limit that is reached, a peer that says nothing) is the kernel's affair.
//! Where AF_UNIX answers otherwise than TCP, this file translates.
//!
//! * `lanes`: how it gets lanes.
//! * `lane_peers`: addresses to which a connection gets them at once, for the sake of order.
//! * `message`: what the two ends say to each other for that, in the stream itself.

mod dispatch;
pub(super) mod lane_peers;
mod message;
mod readiness;
mod receive;
mod send;
#[cfg(test)]
mod tests;
mod upgrade;

pub(super) use message::{FOLLOW, SWITCH};
use message::{Message, send_now};
pub(in crate::connection) use readiness::Lookahead;
use upgrade::OfferedMemory;

use super::{Connection, PeerState, SHUTDOWN_READ, SHUTDOWN_WRITE};
use crate::descriptor::hidden::{HiddenFd, close};
use crate::process::blocking;
use crate::rendezvous::local_page::MemoryFds;
use rustix::io::Errno;
use segment::{OwnState, PeerStatus, Segment, Side};
use std::cell::UnsafeCell;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Bytes that are taken out at once where the program does not want them.
const SCRATCH_BYTES: usize = 16 << 10;

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

impl Connection {
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

    /// Whether a peer that is gone has reset the connection, behind bytes that are unread.
    fn is_reset_in_lane(&'static self) -> bool {
        let _guard = self.lock_direction(&self.receive_lock);
        let Some(memory) = self.look_ahead().memory else { return false };
        let segment = Segment::peek(&memory, self.lifeline_state.side());
        close(memory);
        segment.is_ok_and(|segment| segment.status(PeerStatus::Reset) != 0)
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
