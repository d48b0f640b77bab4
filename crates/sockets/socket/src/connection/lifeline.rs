//! A connection on its lifeline: its bytes use a plain AF_UNIX stream until lanes pay.
//!
//! So `connect` and `accept` need no memory, no further descriptor and nothing from the other endpoint, and the kernel
//! handles all that may happen to a young connection: a fork, an `exec`, an exhausted limit, a peer that sends nothing.
//! Where AF_UNIX behaves differently from TCP, these modules translate.
//!
//! * `send`, `receive`: transfer of the program's bytes.
//! * `readiness`: events, unread bytes, and the lookahead to the first message.
//! * `message`: the messages of the endpoints in the stream itself.
//! * `dispatch`: handles the messages that come first.
//! * `upgrade`: the switch to lanes.
//! * `lane_peers`: addresses to which connections get lanes at once, for the sake of order.

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

/// Bytes of a buffer for one call whose bytes the program does not get directly.
const SCRATCH_BYTES: usize = 16 << 10;

/// The state of a connection while one of its directions uses the lifeline.
#[derive(Default)]
pub(super) struct LifelinePath {
    is_acceptor: AtomicBool,
    /// The directions that the program has shut down.
    shutdown: AtomicU64,
    /// What sends know of the peer: a [`PeerState`].
    peer: AtomicU64,
    /// An error number to be reported once.
    error: AtomicU64,
    /// Number of requests received: receives that brought something, at first or after a response.
    requests: AtomicU32,
    /// Something was sent after the last request.
    has_responded: AtomicBool,
    /// Bytes of the program that come next, as a peek has found and no receive has consumed. Protected by the receive
    /// lock.
    peeked_bytes: AtomicU64,
    /// Bytes received by the lifeline, as edges count them; see [`Connection::lifeline_arrivals`].
    received_bytes: AtomicU64,
    /// Bytes received by the lifeline, with all messages.
    received_with_messages_bytes: AtomicU64,
    /// The end of the lifeline's unread bytes, from its beginning, when edges were last counted.
    counted_to_bytes: AtomicU64,
    /// Clock ticks at the last poll for messages without a receive.
    messages_polled_ticks: AtomicU64,
    /// 0 to 2: how many of `POLLRDHUP` and `POLLHUP` the lifeline was seen to report.
    end_level: AtomicU64,
    /// The lifeline was shut down for reading, so that the kernel does not report the end of the peer's stream any
    /// more.
    is_read_shut: AtomicBool,
    /// The peer had ended its stream when the lifeline was shut down for reading.
    had_peer_ended: AtomicBool,
    /// The lifeline's buffer has its maximum size.
    is_widened: AtomicBool,
    /// Another process may hold the endpoint, without its lanes.
    is_shared: AtomicBool,
    /// The peer's kernel refuses descriptors, because of a filter, so no messages can be sent any more.
    are_rights_refused: AtomicBool,
    has_offered: AtomicBool,
    /// A switch was attempted because other connections to the same address have lanes.
    has_switched_for_order: AtomicBool,
    /// The program has sent something.
    has_sent: AtomicBool,
    /// The peer had not read all of the lifeline when sends changed to a lane.
    was_unread: AtomicBool,
    has_pending_message: AtomicBool,
    /// Under a filter: one more than the program's bytes before the last message; 0 for no message.
    pub(super) bytes_to_message: AtomicU64,
    /// Number of messages received.
    messages_received: AtomicU32,
    /// The inode of the memory of the outgoing lane.
    inode: AtomicU64,
    /// Protected by the send lock.
    offered: UnsafeCell<Option<OfferedMemory>>,
    /// Protected by the receive lock.
    pending_message: UnsafeCell<Option<Message>>,
}

impl LifelinePath {
    /// Resets the state for a new connection. The pattern names every field, so that none is forgotten. The caller
    /// holds both locks, or no other thread knows the connection.
    pub(super) fn begin(&self, side: Side) {
        #[rustfmt::skip] // Grouped by kind.
        let Self {
            is_acceptor, peer, has_responded,
            is_read_shut, had_peer_ended, is_widened, is_shared, are_rights_refused, has_switched_for_order, has_sent,
            was_unread,
            shutdown, error, peeked_bytes, received_bytes, received_with_messages_bytes, counted_to_bytes, end_level,
            bytes_to_message, inode,
            requests, messages_received,
            // Reset by `clear`.
            has_offered: _, has_pending_message: _, offered: _, pending_message: _,
            // Kept: a time.
            messages_polled_ticks: _,
        } = self;
        is_acceptor.store(side == Side::Acceptor, Ordering::Relaxed);
        peer.store(PeerState::Alive as u64, Ordering::Relaxed);
        has_responded.store(true, Ordering::Relaxed);
        let flags = [is_read_shut, had_peer_ended, is_widened, is_shared, are_rights_refused, has_sent, was_unread];
        flags.into_iter().chain([has_switched_for_order]).for_each(|flag| flag.store(false, Ordering::Relaxed));
        let words = [shutdown, error, peeked_bytes, received_bytes, received_with_messages_bytes, counted_to_bytes];
        let others = [end_level, bytes_to_message, inode];
        words.into_iter().chain(others).for_each(|word| word.store(0, Ordering::Relaxed));
        [requests, messages_received].into_iter().for_each(|count| count.store(0, Ordering::Relaxed));
        self.clear();
    }

    /// Drops an offer and a message that are pending. The caller holds both locks, or no other thread knows the
    /// connection.
    pub(super) fn clear(&self) {
        self.has_offered.store(false, Ordering::Relaxed);
        self.has_pending_message.store(false, Ordering::Relaxed);
        // SAFETY: the caller holds the send lock, or no other thread knows the object.
        drop(unsafe { (*self.offered.get()).take() });
        // SAFETY: the caller holds the receive lock, or no other thread knows the object.
        drop(unsafe { (*self.pending_message.get()).take() });
    }

    /// Notes the memory of the outgoing lane, for an endpoint that another process has held before.
    pub(super) fn note_inode(&self, memory: Option<&MemoryFds<HiddenFd>>) {
        let inode = memory.and_then(|memory| rustix::fs::fstat(memory.memfd.get()?).ok()).map_or(0, |stat| stat.st_ino);
        self.inode.store(inode, Ordering::Relaxed);
    }

    /// Returns whether the peer has reset the connection.
    pub(super) fn is_reset(&self) -> bool {
        self.peer.load(Ordering::Relaxed) == PeerState::Reset as u64
    }

    fn side(&self) -> Side {
        if self.is_acceptor.load(Ordering::Relaxed) { Side::Acceptor } else { Side::Connector }
    }

    /// Notes that the peer has reset the connection, with the error to be reported once.
    pub(super) fn note_reset(&self) {
        self.peer.store(PeerState::Reset as u64, Ordering::Relaxed);
        self.error.store(Errno::CONNRESET.raw_os_error() as u64, Ordering::Relaxed);
    }

    /// Notes that something was sent to a peer that had closed, so that the next send fails with `EPIPE`.
    fn note_broken_pipe(&self) {
        self.peer.store(PeerState::BrokenPipe as u64, Ordering::Relaxed);
        self.error.store(Errno::PIPE.raw_os_error() as u64, Ordering::Relaxed);
    }

    /// Returns the error that a receive reports, and clears it: after the end of a stream receives report no `EPIPE`.
    fn take_reset(&self) -> Option<Errno> {
        let is_send_error = self.error.load(Ordering::Relaxed) == Errno::PIPE.raw_os_error() as u64;
        if is_send_error { None } else { self.take_error() }
    }

    /// Returns the error that is to be reported once, and clears it.
    fn take_error(&self) -> Option<Errno> {
        let error = self.error.swap(0, Ordering::Relaxed);
        (error != 0).then(|| Errno::from_raw_os_error(error as i32))
    }
}

impl Connection {
    /// Returns whether an offer is all that the peer can have left unread.
    fn has_only_offered(&self) -> bool {
        self.lifeline_path.has_offered.load(Ordering::Relaxed) && !self.lifeline_path.has_sent.load(Ordering::Relaxed)
    }

    /// Returns whether the peer has reset the connection, according to the kernel or to a lane that the lifeline leads
    /// to. Notes the reset, with the error to be reported once.
    fn is_reset_on_lifeline(&'static self) -> bool {
        if self.lifeline_path.is_reset() {
            return true;
        }
        let revents = blocking::poll_now(self.lifeline(), 0);
        let has_left_bytes = revents & libc::POLLERR != 0 && !self.has_only_offered();
        let is_reset = has_left_bytes || (revents & libc::POLLHUP != 0 && self.is_reset_in_lane());
        if is_reset {
            self.lifeline_path.note_reset();
        }
        is_reset
    }

    /// Shuts down directions that use the lifeline. The caller holds the send lock.
    ///
    /// # Errors
    /// `NOTCONN` after a reset.
    pub(super) fn shutdown_lifeline(&'static self, directions: u64) -> Result<(), Errno> {
        if self.lifeline_path.is_reset() {
            return Err(Errno::NOTCONN);
        }
        let before = self.lifeline_path.shutdown.fetch_or(directions, Ordering::Relaxed);
        let fresh = directions & !before;
        if fresh & SHUTDOWN_WRITE != 0 {
            let _ = rustix::net::shutdown(self.borrow_lifeline(), rustix::net::Shutdown::Write);
        }
        if fresh & SHUTDOWN_READ != 0 {
            self.wake_by_shutdown();
        }
        Ok(())
    }

    /// Wakes the threads of this process that sleep on the lifeline, after a shutdown of the receive direction. Only
    /// the end of the lifeline wakes them all.
    pub(super) fn wake_by_shutdown(&self) {
        if self.sleepers.is_any() {
            self.lifeline_path.had_peer_ended.store(self.has_peer_shut_lifeline(), Ordering::Relaxed);
            self.lifeline_path.is_read_shut.store(true, Ordering::Relaxed);
            let _ = rustix::net::shutdown(self.borrow_lifeline(), rustix::net::Shutdown::Read);
        }
    }

    /// Returns whether the peer has ended its stream, as the kernel reports while it can.
    pub(super) fn has_peer_shut_lifeline(&self) -> bool {
        if self.lifeline_path.is_read_shut.load(Ordering::Relaxed) {
            return self.lifeline_path.had_peer_ended.load(Ordering::Relaxed);
        }
        blocking::poll_now(self.lifeline(), libc::POLLRDHUP) & (libc::POLLRDHUP | libc::POLLHUP) != 0
    }

    /// Returns whether a closed peer has reset the connection in the memory that a message after unread bytes refers
    /// to.
    fn is_reset_in_lane(&'static self) -> bool {
        let _guard = self.lock_direction(&self.receive_lock);
        let Some(memory) = self.look_ahead().memory else { return false };
        let segment = Segment::peek(&memory, self.lifeline_path.side());
        close(memory);
        segment.is_ok_and(|segment| segment.status(PeerStatus::Reset) != 0)
    }

    /// Keeps an error for the next call.
    pub(super) fn defer_lifeline_error(&self, error: Errno) {
        self.lifeline_path.error.store(error.raw_os_error() as u64, Ordering::Relaxed);
    }

    /// Returns what `SO_ERROR` reports before there are lanes, and clears it.
    pub(super) fn take_lifeline_error(&'static self) -> i32 {
        self.is_reset_on_lifeline();
        // Clears the kernel's own error, which has been noted.
        let _ = rustix::net::sockopt::socket_error(self.borrow_lifeline());
        self.lifeline_path.take_error().map_or(0, Errno::raw_os_error)
    }

    /// Returns whether the input has ended, even if unread bytes come before the end.
    pub(super) fn lifeline_has_no_more(&self) -> bool {
        self.is_shut(SHUTDOWN_READ) || self.has_peer_shut_lifeline()
    }

    /// Returns whether the kernel refuses to send by the lifeline. It returns `EPIPE` for a send of no bytes too.
    pub(super) fn does_lifeline_refuse_sends(&self) -> bool {
        // SAFETY: there are no spans.
        let sent = unsafe { send_now(self.lifeline(), &[], 0) };
        sent == Err(Errno::PIPE)
    }

    /// Returns whether the kernel reports that the peer has closed.
    pub(super) fn lifeline_has_hung_up(&self) -> bool {
        blocking::poll_now(self.lifeline(), 0) & libc::POLLHUP != 0
    }

    /// Returns what is known of the peer, and which directions are shut down.
    pub(super) fn state(&self) -> (PeerState, u64) {
        match self.lanes() {
            Some(lanes) => (self.peer_state(lanes), lanes.segment.load(OwnState::Shutdown)),
            None => {
                let peer = PeerState::from_word(self.lifeline_path.peer.load(Ordering::Relaxed));
                (peer, self.lifeline_path.shutdown.load(Ordering::Relaxed))
            }
        }
    }

    /// Returns whether the program has shut `direction` down.
    fn is_shut(&self, direction: u64) -> bool {
        self.state().1 & direction != 0
    }

    /// Returns a descriptor of the lifeline, for a system call.
    pub(super) fn borrow_lifeline(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the program, which keeps it open during a call on it, or is a hidden one
        // that stays open until the connection is closed. If another thread of the program closes its descriptor
        // meanwhile, calls fail or use another file of the program, as for any descriptor.
        unsafe { BorrowedFd::borrow_raw(self.lifeline()) }
    }

    /// Returns whether receives use the lifeline.
    pub fn is_on_lifeline(&self) -> bool {
        !self.receives_by_lane() && !self.awaits_handshake.load(Ordering::Relaxed)
    }

    /// Returns whether a wait on the lifeline for `POLLIN` or `POLLOUT` is over, whatever the kernel reports.
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

    /// Notes that the kernel has reported `CONNRESET` to a wait.
    pub(super) fn note_kernel_reset(&self) {
        match self.lanes() {
            Some(lanes) => self.note_hang_up(lanes, true),
            None if self.lifeline_path.is_reset() || self.has_only_offered() => {}
            None => self.lifeline_path.note_reset(),
        }
    }
}
