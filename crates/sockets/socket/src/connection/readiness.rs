//! Readiness, for `poll` and `epoll`.
//!
//! While it is busy, a readiness set polls a connection in memory. Before it sleeps, it *parks* the connection: it asks
//! the peer to ring, which makes the lifeline readable in the kernel.

use super::lane_kinds::LaneReceiver;
use super::lanes::Lanes;
use super::{Connection, PeerState, SHUTDOWN_READ, SHUTDOWN_WRITE};
use crate::options::TcpState;
use crate::process::blocking;
use segment::{OwnState, PeerStatus};
use std::sync::atomic::Ordering;

const ALWAYS_REPORTED: i16 = libc::POLLERR | libc::POLLHUP | libc::POLLNVAL;

/// The counters by which an edge-triggered watcher of a connection detects events: each only grows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EdgeCounters {
    /// The position up to which records have arrived.
    pub arrivals: u64,
    /// Number of ends that have come: of the stream, of the connection, of directions that the program has shut down.
    pub ends: u64,
    /// Number of other events: room was found after a blocked send, or a receive ended before all that is unread was
    /// considered.
    pub others: u64,
}

impl EdgeCounters {
    /// Returns whether something has happened since `before` that wakes a watcher of `wanted`, as in the kernel: bytes
    /// wake watchers of input, all other events wake every watcher.
    pub fn has_event_since(self, before: Self, wanted: i16) -> bool {
        let asks_for_input = wanted & (libc::POLLIN | libc::POLLRDNORM | libc::POLLPRI | libc::POLLRDBAND) != 0;
        let seen = if asks_for_input { self } else { Self { arrivals: before.arrivals, ..self } };
        seen != before
    }
}

impl Connection {
    /// Returns which of `wanted` (`POLLIN` and so on; errors and hang-up always) hold now. Makes a system call at most
    /// once a millisecond, to detect a peer that was killed.
    pub fn readiness(&'static self, wanted: i16) -> i16 {
        if self.is_on_lifeline()
            && let Some(ready) = self.lifeline_readiness(wanted)
        {
            return (ready | self.urgent_readiness(wanted)) & (wanted | ALWAYS_REPORTED);
        }
        let receive_guard = self.lock_direction(&self.receive_lock);
        if let Some(lanes) = self.lanes() {
            if wanted & (libc::POLLIN | libc::POLLRDNORM) != 0 {
                self.reset_without_inbound(lanes);
            }
            let mut ready = self.input_readiness(lanes);
            drop(receive_guard);
            ready |= self.urgent_readiness(wanted) | self.output_readiness(wanted);
            return ready & (wanted | ALWAYS_REPORTED);
        }
        drop(receive_guard);
        match self.attach_if_pending() {
            Ok(true) => self.readiness(wanted),
            Ok(false) => 0,
            Err(_) => libc::POLLERR | libc::POLLHUP | (libc::POLLIN & wanted),
        }
    }

    /// Does what [`Connection::readiness`] does, for a call that is not the wait of a set with this connection: sets
    /// are notified if the connection turns out to use lanes now.
    pub fn readiness_for_all(&'static self, wanted: i16) -> i16 {
        let was_on_lifeline = self.is_on_lifeline();
        let ready = self.readiness(wanted);
        if was_on_lifeline {
            self.notify_sets();
        }
        ready
    }

    /// Returns `false` if memory shows that none of `wanted` holds. Cheaper than [`Connection::readiness`], and never
    /// makes a system call.
    #[inline]
    pub fn may_be_ready(&'static self, wanted: i16) -> bool {
        if wanted & (libc::POLLOUT | libc::POLLWRNORM) != 0 || self.send_is_blocked.load(Ordering::Relaxed) {
            return true;
        }
        let _guard = self.lock_direction(&self.receive_lock);
        self.lanes().is_some_and(|lanes| {
            (self.receives_by_lane() && lanes.observer().may_have_data())
                || (self.receives_by_lane() && lanes.observer().may_be_held())
                || lanes.segment.load(OwnState::Peer) != 0
                || lanes.segment.status(PeerStatus::Closed) != 0
                || lanes.segment.load(OwnState::Shutdown) != 0
                || lanes.segment.load(OwnState::PendingError) != 0
        })
    }

    /// Returns the input events that hold. The caller holds the receive lock.
    pub(super) fn input_readiness(&self, lanes: &Lanes) -> i16 {
        let mut has_data = lanes.observer().may_have_data();
        if !has_data {
            self.poll_lifeline_periodically(lanes);
            has_data = self.publish_held_if_due_locking(lanes);
        }
        let peer = self.peer_state(lanes);
        let shutdown = lanes.segment.load(OwnState::Shutdown);
        let input_ended = peer != PeerState::Alive || lanes.observer().has_fin() || shutdown & SHUTDOWN_READ != 0;
        let low_water = self.low_water_bytes.load(Ordering::Relaxed) as usize;
        let has_enough = has_data && self.has_unread(lanes, low_water);
        let mut ready = 0;
        if has_enough || input_ended {
            ready |= libc::POLLIN | libc::POLLRDNORM;
        }
        if input_ended {
            ready |= libc::POLLRDHUP;
        }
        if input_ended && shutdown & SHUTDOWN_WRITE != 0 {
            ready |= libc::POLLHUP;
        }
        if matches!(peer, PeerState::BrokenPipe | PeerState::Reset) {
            ready |= libc::POLLHUP;
        }
        if lanes.segment.load(OwnState::PendingError) != 0 {
            ready |= libc::POLLERR;
        }
        ready
    }

    /// Returns the output events that hold.
    pub(super) fn output_readiness(&'static self, wanted: i16) -> i16 {
        const OUTPUT: i16 = libc::POLLOUT | libc::POLLWRNORM;
        if wanted & OUTPUT == 0 {
            return 0;
        }
        let _guard = self.lock_direction(&self.send_lock);
        let Some(lanes) = self.lanes() else { return 0 };
        let ended = self.is_output_closed(lanes);
        // SAFETY: the send lock is held, which protects the sender.
        if !ended && !unsafe { (*lanes.sender.get()).is_writable() }.unwrap_or(true) {
            self.send_is_blocked.store(true, Ordering::Relaxed);
            return 0;
        }
        if self.send_is_blocked.swap(false, Ordering::Relaxed) {
            self.other_events.fetch_add(1, Ordering::Relaxed);
        }
        OUTPUT
    }

    /// Returns the bytes that were sent and that the peer has no room for (`SIOCOUTQ`). While there is room, all that
    /// was sent has arrived, except for what is held back.
    pub fn unsent_bytes(&'static self) -> usize {
        if self.readiness(libc::POLLOUT) & libc::POLLOUT != 0 {
            return self.held_bytes();
        }
        let _guard = self.lock_direction(&self.send_lock);
        let Some(lanes) = self.lanes().filter(|_| self.sends_by_lane()) else { return 0 };
        // SAFETY: the send lock is held, which protects the sender.
        let slots = unsafe { (*lanes.sender.get()).unread_slots() };
        slots.unwrap_or(0) as usize * lane::SLOT_BYTES
    }

    /// Returns the unread bytes as `TCP_INQ` counts them: the end of the stream counts as one, so that a program
    /// receives once more.
    pub fn unread_hint(&'static self) -> i32 {
        let has_ended = self.readiness_for_all(libc::POLLRDHUP) & libc::POLLRDHUP != 0;
        i32::try_from(self.unread_bytes()).unwrap_or(i32::MAX).saturating_add(i32::from(has_ended))
    }

    /// Returns when the first unread record was sent ([`crate::process::clock::stamp`]), or `None` if nothing is
    /// unread.
    pub fn arrival_stamp(&'static self) -> Option<u64> {
        let _guard = self.lock_direction(&self.receive_lock);
        self.lanes().filter(|_| self.receives_by_lane())?.observer().next_stamp()
    }

    /// Returns whether TCP would have closed the connection: after a reset, or once both endpoints have ended their
    /// streams. Such a connection has no peer.
    pub fn is_closed(&'static self) -> bool {
        // The kernel may know of a reset that no call has noted yet.
        let _ = self.readiness_for_all(0);
        self.tcp_state() == TcpState::Close
    }

    /// Does what [`Connection::is_closed`] does, as far as calls of this endpoint have found out, which usually needs
    /// no system call.
    pub(super) fn is_known_to_be_closed(&'static self) -> bool {
        let (peer, shutdown) = {
            let _guard = self.lock_direction(&self.receive_lock);
            self.state()
        };
        let may_be = shutdown & SHUTDOWN_WRITE != 0 || matches!(peer, PeerState::Reset | PeerState::BrokenPipe);
        may_be && self.tcp_state() == TcpState::Close
    }

    /// Returns the state that TCP would be in.
    pub fn tcp_state(&'static self) -> TcpState {
        if self.is_on_lifeline() {
            self.process_messages_for_all();
        }
        let _guard = self.lock_direction(&self.receive_lock);
        let is_on_lifeline = self.is_on_lifeline();
        if self.awaits_handshake.load(Ordering::Relaxed) {
            return TcpState::Established;
        }
        let (peer, shutdown) = self.state();
        let input_has_ended = || match self.lanes() {
            Some(lanes) if !is_on_lifeline => lanes.observer().has_fin() || peer != PeerState::Alive,
            _ => self.has_peer_shut_lifeline(),
        };
        match (shutdown & SHUTDOWN_WRITE != 0, input_has_ended()) {
            _ if matches!(peer, PeerState::Reset | PeerState::BrokenPipe) => TcpState::Close,
            (false, false) => TcpState::Established,
            (true, false) => TcpState::FinWait,
            (false, true) => TcpState::CloseWait,
            (true, true) => TcpState::Close,
        }
    }

    /// Returns the counters for edge-triggered watchers, to compare with `seen`, the previous ones. Call
    /// [`Connection::readiness`] first, which detects events.
    pub fn edges(&'static self, seen: EdgeCounters) -> EdgeCounters {
        let _guard = self.lock_direction(&self.receive_lock);
        let is_on_lifeline = self.is_on_lifeline();
        if self.awaits_handshake.load(Ordering::Relaxed) {
            return seen;
        }
        let (peer, shutdown) = self.state();
        let by_lane = self.lanes().filter(|_| !is_on_lifeline).map(Lanes::observer);
        let arrived = by_lane.map_or(0, |observer| observer.arrivals(0).unwrap_or(u64::MAX >> 4));
        // The same end may be seen on the lifeline, and then in the lane that follows it.
        let lifeline_end_level = self.lifeline_end_level();
        let input_has_ended =
            lifeline_end_level > 0 || peer != PeerState::Alive || by_lane.is_some_and(LaneReceiver::has_fin);
        // The close of a peer that has ended its stream is not another event.
        let is_over = matches!(peer, PeerState::BrokenPipe | PeerState::Reset);
        let ends = u64::from(input_has_ended) + u64::from(is_over) + u64::from(shutdown.count_ones());
        // Both only grow, and so does their sum when input changes to a lane.
        let arrivals = arrived.wrapping_add(self.lifeline_arrivals());
        EdgeCounters {
            arrivals: seen.arrivals.max(arrivals),
            ends: seen.ends.max(ends),
            others: self.other_events.load(Ordering::Relaxed),
        }
    }

    /// Asks the peer to ring when one of `wanted` becomes true. Check [`Connection::readiness`] once more before
    /// sleeping, and end the sleep with [`Connection::unpark`].
    pub fn park(&'static self, wanted: i16) {
        self.sleepers.enter();
        self.park_again(wanted);
    }

    /// Asks the peer to ring again, for a parked watcher that a ring has woken.
    pub fn park_again(&'static self, wanted: i16) {
        {
            let _guard = self.lock_direction(&self.receive_lock);
            let Some(lanes) = self.lanes() else { return };
            self.count_as_user(lanes);
            // SAFETY: the receive lock is held, which protects the receiver.
            unsafe { (*lanes.receiver.get()).announce_sleep() };
        }
        if wanted & libc::POLLOUT != 0 {
            let _guard = self.lock_direction(&self.send_lock);
            let Some(lanes) = self.lanes() else { return };
            // SAFETY: the send lock is held, which protects the sender.
            unsafe { (*lanes.sender.get()).announce_sleep() };
        }
    }

    /// Asks the kernel whether the peer is gone, which memory may not show.
    pub fn poll_for_hang_up(&'static self) {
        let _guard = self.lock_direction(&self.receive_lock);
        if let Some(lanes) = self.lanes() {
            self.poll_lifeline(lanes);
        }
    }

    /// Returns whether others than the caller, which may have parked the connection itself, rely on rings.
    pub fn is_parked_by_others(&self, is_parked_by_caller: bool) -> bool {
        self.sleepers.is_any() && !(is_parked_by_caller && self.sleepers.is_one())
    }

    /// Ends the sleep that [`Connection::park`] began.
    pub fn unpark(&self) {
        self.sleepers.leave();
    }

    /// Handles a report of the kernel for the lifeline: consumes the ring, notes a hang-up. Returns `false` if the
    /// lifeline stays readable, because other sleepers must find the ring or because it was shut down; the caller must
    /// sleep a moment before it asks the kernel again.
    pub fn handle_ring(&'static self) -> bool {
        // Both locks: no thread asks to be rung between the check for other sleepers and the consumption of the ring.
        let both = self.lock_both();
        if self.is_on_lifeline() {
            return blocking::poll_now(self.lifeline(), libc::POLLIN) == 0;
        }
        let Some(lanes) = self.lanes() else { return true };
        if both.is_none() || !self.is_sole_sleeper(lanes) {
            self.poll_lifeline(lanes);
            return false;
        }
        if !self.drain_lifeline(lanes) {
            self.poll_lifeline(lanes);
            // A lifeline that was shut down for reading stays readable and reports nothing more.
            return self.peer_state(lanes) != PeerState::Alive;
        }
        true
    }

    /// Does what [`Connection::handle_ring`] does, for a watcher that has not parked.
    pub fn consume_ring(&'static self) -> bool {
        self.sleepers.enter();
        let is_taken = self.handle_ring();
        self.sleepers.leave();
        is_taken
    }

    /// Returns whether the peer is gone: the lifeline reports nothing more, and stays readable.
    pub fn has_ended(&'static self) -> bool {
        let _guard = self.lock_direction(&self.receive_lock);
        if self.is_on_lifeline() {
            return self.lifeline_has_hung_up();
        }
        self.lanes().is_some_and(|lanes| self.peer_state(lanes) != PeerState::Alive)
    }
}
