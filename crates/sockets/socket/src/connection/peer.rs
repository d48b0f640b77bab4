//! The state of the peer, and the errors that follow from it.
//!
//! As in TCP on Linux, receives end after the peer's FIN, and the first send still succeeds but provokes a reset. A
//! peer that closes with unread data, or with `SO_LINGER` of 0, resets at once.

use super::lanes::Lanes;
use super::{Connection, SHUTDOWN_WRITE};
use crate::process::clock::{TICKS_PER_MILLISECOND, note_ticks, ticks};
use crate::process::{blocking, sandbox, system};
use rustix::io::Errno;
use segment::{LEFT_SILENTLY, OwnSnapshot, OwnState, PeerStatus, SHUT_BOTH_WAYS};
use std::sync::atomic::Ordering;

/// What is known of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerState {
    /// Connected.
    Alive = 0,
    /// Closed in order. One more send succeeds, as into TCP's buffer.
    Closed = 1,
    /// Closed in order, and this endpoint has sent since: sends return `EPIPE`.
    BrokenPipe = 2,
    /// Closed with unread data of this endpoint: `ECONNRESET`, once.
    Reset = 3,
}

impl PeerState {
    /// Returns the error that a send or `SO_ERROR` reports once.
    fn error(self) -> Option<Errno> {
        match self {
            Self::Alive | Self::Closed => None,
            Self::BrokenPipe => Some(Errno::PIPE),
            Self::Reset => Some(Errno::CONNRESET),
        }
    }

    /// Returns the state in a word that the peer can write. A value without meaning is a reset: a peer that breaks the
    /// protocol must not pass for one that is connected.
    pub(super) fn from_word(word: u64) -> Self {
        match word {
            0 => Self::Alive,
            1 => Self::Closed,
            2 => Self::BrokenPipe,
            _ => Self::Reset,
        }
    }
}

impl Connection {
    /// Returns the state of the peer that memory shows.
    #[inline]
    pub(super) fn peer_state(&self, lanes: &Lanes) -> PeerState {
        let known = lanes.segment.load(OwnState::Peer);
        if known == 0 && lanes.segment.status(PeerStatus::Closed) == 0 {
            return PeerState::Alive;
        }
        self.determine_peer_state(lanes, known)
    }

    /// Determines the state of a peer that has published its close, and records it.
    #[cold]
    fn determine_peer_state(&self, lanes: &Lanes, known: u64) -> PeerState {
        if known != 0 {
            return PeerState::from_word(known);
        }
        if is_shut_both_ways(lanes) {
            return PeerState::Alive;
        }
        let is_drained = lanes.is_sent_data_drained();
        let left_silently = lanes.segment.status(PeerStatus::Closed) == LEFT_SILENTLY;
        let state = if lanes.segment.status(PeerStatus::Reset) != 0 || (left_silently && !is_drained) {
            PeerState::Reset
        } else if is_drained {
            PeerState::Closed
        } else {
            PeerState::BrokenPipe
        };
        self.record_peer_state(lanes, state)
    }

    /// Polls the lifeline if that was not done for a millisecond: a peer that was killed leaves no status in memory.
    #[inline]
    pub(super) fn poll_lifeline_periodically(&self, lanes: &Lanes) {
        let now = ticks();
        note_ticks(now);
        if now.wrapping_sub(self.lifeline_polled_ticks.load(Ordering::Relaxed)) > TICKS_PER_MILLISECOND {
            self.lifeline_polled_ticks.store(now, Ordering::Relaxed);
            self.poll_lifeline(lanes);
        }
    }

    /// Polls the lifeline for a hang-up.
    #[cold]
    pub(super) fn poll_lifeline(&self, lanes: &Lanes) {
        if sandbox::is_confined() {
            return; // The program's own calls show the state of the peer.
        }
        let revents = blocking::poll_now(self.lifeline(), 0);
        if revents & libc::POLLHUP != 0 {
            self.note_hang_up(lanes, revents & libc::POLLERR != 0);
        }
    }

    /// Consumes the rings in the lifeline. Returns `false` if the lifeline has ended.
    pub(super) fn drain_lifeline(&self, lanes: &Lanes) -> bool {
        let drained = system::drain(self.lifeline());
        match drained {
            Err(Errno::CONNRESET) => self.note_hang_up(lanes, true),
            // A program has bypassed the library, for example by a system call of its own. What it sent is lost, which
            // must not go unnoticed.
            Err(Errno::PROTO) => {
                lanes.segment.publish(PeerStatus::Reset, 1);
                lanes.segment.publish(PeerStatus::Closed, 1);
                self.record_peer_state(lanes, PeerState::Reset);
            }
            _ => {}
        }
        lanes.segment.wait_for_arrivals();
        drained == Ok(true)
    }

    /// Notes that the lifeline has ended, because the peer's last descriptor was closed. `is_broken` means that the
    /// kernel reports an error because something was left unread, which is without significance once the lifeline
    /// carries only rings. In windows the proxy has ended, and with it the path to the peer.
    pub(super) fn note_hang_up(&self, lanes: &Lanes, is_broken: bool) {
        if self.peer_state(lanes) != PeerState::Alive {
            return;
        }
        let has_left_bytes = is_broken && self.has_left_bytes_unread(lanes);
        let has_lost_path = has_left_bytes || lanes.segment.is_in_windows();
        let reset = lanes.segment.status(PeerStatus::Reset) != 0 || has_lost_path || !lanes.is_sent_data_drained();
        self.record_peer_state(lanes, if reset { PeerState::Reset } else { PeerState::Closed });
    }

    /// Resets this endpoint, and publishes the reset to the peer. The caller holds both locks.
    pub(super) fn reset_lanes(&self, lanes: &Lanes) {
        lanes.publish_status(PeerStatus::Reset, 1);
        // Before the end of the stream: a peer that found the end first would take it for an orderly close.
        lanes.publish_status(PeerStatus::Closed, 1);
        self.record_peer_state(lanes, PeerState::Reset);
    }

    /// Resets the connection because the peer broke the protocol.
    pub(super) fn note_corruption(&self, lanes: &Lanes) {
        lanes.segment.store(OwnState::Peer, PeerState::Reset as u64);
    }

    /// Records the state of the peer, with the error to be reported once. Returns the state that was recorded first.
    fn record_peer_state(&self, lanes: &Lanes, state: PeerState) -> PeerState {
        let is_first = lanes.segment.compare_exchange(OwnState::Peer, 0, state as u64).is_ok();
        if let Some(error) = state.error().filter(|_| is_first) {
            lanes.segment.store(OwnState::PendingError, error.raw_os_error() as u64);
        }
        PeerState::from_word(lanes.segment.load(OwnState::Peer))
    }

    /// Returns the error number that `SO_ERROR` reports, and clears it; 0 if there is none.
    pub fn take_error(&'static self) -> i32 {
        let _ = self.attach_if_pending();
        if self.is_on_lifeline() {
            self.process_messages_for_all();
        }
        if self.is_on_lifeline() && self.lanes().is_none() {
            return self.take_lifeline_error();
        }
        let _send = self.lock_direction(&self.send_lock);
        self.lanes().map_or(0, |lanes| {
            let _ = self.peer_state(lanes);
            match (lanes.segment.swap(OwnState::PendingError, 0), self.peer_state(lanes)) {
                (0, _) => 0,
                (_, PeerState::BrokenPipe) => Errno::PIPE.raw_os_error(),
                _ => Errno::CONNRESET.raw_os_error(),
            }
        })
    }

    /// Returns what a receive that found nothing reports: `Ok(true)` at the end of the stream, `Ok(false)` if it has to
    /// wait.
    pub(super) fn end_of_input(&self, lanes: &Lanes) -> Result<bool, Errno> {
        self.reset_without_inbound(lanes);
        // First, because it may set an error.
        let peer = self.peer_state(lanes);
        let pending = lanes.segment.load(OwnState::PendingError);
        // After the end of a stream receives report no error: the next send does.
        if pending != 0
            && peer != PeerState::BrokenPipe
            && lanes.segment.compare_exchange(OwnState::PendingError, pending, 0).is_ok()
        {
            return Err(Errno::CONNRESET);
        }
        Ok(lanes.observer().is_finished()
            || peer != PeerState::Alive
            || lanes.segment.load(OwnState::Shutdown) & super::SHUTDOWN_READ != 0)
    }

    /// Resets the connection if this process cannot receive: the input is in memory that came with a message which
    /// another process that holds the endpoint has consumed. That needs a peer that switches to lanes in the moment in
    /// which this program forks, and two processes that receive. The caller holds the receive lock.
    pub(super) fn reset_without_inbound(&self, lanes: &Lanes) {
        if !self.may_have_other_holders() {
            return;
        }
        // SAFETY: the cell is written only under both locks, and the caller holds one.
        let has_inbound = unsafe { &*lanes.inbound.get() }.is_some();
        if !has_inbound && self.receives_by_lane() && lanes.segment.receives_elsewhere() {
            self.abort();
        }
    }

    /// Returns whether sends do not reach the peer any more. Unlike [`Connection::may_send`] this changes nothing.
    #[inline]
    pub(super) fn is_output_closed(&self, lanes: &Lanes) -> bool {
        self.has_ended_in(lanes, lanes.segment.snapshot(), SHUTDOWN_WRITE)
    }

    /// Returns whether one of `directions` is shut down at this endpoint, whose words are `snapshot`, or the peer is
    /// gone.
    #[inline(always)] // Called by every send, and by every spin iteration of a wait.
    pub(super) fn has_ended_in(&self, lanes: &Lanes, snapshot: OwnSnapshot, directions: u64) -> bool {
        let may_be_gone = snapshot.peer != 0 || lanes.segment.status(PeerStatus::Closed) != 0;
        let takes_no_bytes = || directions & SHUTDOWN_WRITE != 0 && is_shut_both_ways(lanes);
        snapshot.shutdown & directions != 0
            || (may_be_gone && (self.peer_state(lanes) != PeerState::Alive || takes_no_bytes()))
    }

    /// Keeps an error for the next call, because the present one has already transferred bytes.
    #[cold]
    pub(super) fn defer_error(&'static self, error: Errno) {
        if error != Errno::CONNRESET {
            return;
        }
        let _send = self.lock_direction(&self.send_lock);
        match self.lanes() {
            Some(lanes) => lanes.segment.store(OwnState::PendingError, error.raw_os_error() as u64),
            None => self.defer_lifeline_error(error),
        }
    }

    /// Returns what a send does before it writes: `Ok(true)` to send, `Ok(false)` to pretend, as TCP's buffer does for
    /// a peer that has just closed. A send of no bytes reaches no peer and provokes no reset. The caller holds the send
    /// lock.
    pub(super) fn may_send(&self, lanes: &Lanes, len_bytes: usize) -> Result<bool, Errno> {
        if lanes.segment.load(OwnState::Shutdown) & SHUTDOWN_WRITE != 0 {
            return Err(Errno::PIPE);
        }
        match self.peer_state(lanes) {
            PeerState::Alive if len_bytes > 0 && is_shut_both_ways(lanes) => {
                self.reset_by_sending(lanes);
                Ok(false)
            }
            PeerState::Alive => Ok(true),
            PeerState::Closed if len_bytes == 0 => Ok(false),
            PeerState::Closed => {
                lanes.segment.store(OwnState::Peer, PeerState::BrokenPipe as u64);
                lanes.segment.store(OwnState::PendingError, Errno::PIPE.raw_os_error() as u64);
                Ok(false)
            }
            PeerState::BrokenPipe => {
                lanes.segment.store(OwnState::PendingError, 0);
                Err(Errno::PIPE)
            }
            PeerState::Reset => match lanes.segment.swap(OwnState::PendingError, 0) {
                0 => Err(Errno::PIPE),
                _ => Err(Errno::CONNRESET),
            },
        }
    }
}

/// Returns whether the peer is connected and has shut down both directions.
fn is_shut_both_ways(lanes: &Lanes) -> bool {
    lanes.segment.status(PeerStatus::Closed) == SHUT_BOTH_WAYS
}

impl Connection {
    /// Resets the connection because bytes are sent to a peer that has shut down both directions. TCP responds with a
    /// reset, which ends that peer's connection too (`tcp_rcv_state_process`; RFC 1122, section 4.2.2.13). The caller
    /// holds the send lock.
    #[cold]
    fn reset_by_sending(&self, lanes: &Lanes) {
        lanes.segment.store(OwnState::Peer, PeerState::BrokenPipe as u64);
        lanes.segment.store(OwnState::PendingError, Errno::PIPE.raw_os_error() as u64);
        lanes.publish_status(PeerStatus::Reset, 1);
        lanes.publish_status(PeerStatus::Closed, 1);
        // SAFETY: the caller holds the send lock, which protects the sender.
        if unsafe { (*lanes.sender.get()).take_wake_request() } {
            self.ring_locked();
        }
    }
}

/// Bytes of one send that Linux transmits over the loopback interface before the reset of a closed peer arrives;
/// measured with Linux 6.18.
const CLOSED_PEER_BYTES_MAX: usize = 512 << 10;
/// The same for the smallest send buffer.
const CLOSED_PEER_BYTES_MIN: usize = 32 << 10;

impl Connection {
    /// Returns how many of `len_bytes` a send reports as sent to a closed peer.
    #[cold]
    pub(super) fn bytes_accepted_for_closed_peer(&self, len_bytes: usize) -> usize {
        if sandbox::is_confined() {
            // The filter may forbid asking for the kernel's limits.
            return len_bytes.min(CLOSED_PEER_BYTES_MAX);
        }
        let capacity_bytes = self.with_options(|options| options.send_capacity_bytes());
        len_bytes.min(capacity_bytes.clamp(CLOSED_PEER_BYTES_MIN, CLOSED_PEER_BYTES_MAX))
    }
}
