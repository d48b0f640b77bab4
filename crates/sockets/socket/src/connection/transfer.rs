//! What sends and receives share.

use super::lanes::Lanes;
use super::{Connection, PeerState};
use crate::process::lock::Lock;
use crate::process::{blocking, sandbox, system};
use lane::Corrupt;
use libc::iovec;
use rustix::io::Errno;
use stats_page::ConnectionSlot;
use std::sync::atomic::Ordering;

/// The `MSG_` flags of a call that have a meaning for a stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MessageFlags {
    /// `MSG_DONTWAIT`.
    pub dont_wait: bool,
    /// `MSG_PEEK`.
    pub peek: bool,
    /// `MSG_WAITALL`.
    pub wait_all: bool,
    /// `MSG_TRUNC`: count the bytes, do not copy them.
    pub discard: bool,
    /// `MSG_MORE`.
    pub more: bool,
}

impl MessageFlags {
    /// Returns the flags of a C call. Those without meaning for a stream are ignored, as TCP does.
    #[inline]
    pub fn from_bits(bits: i32) -> Self {
        Self {
            dont_wait: bits & libc::MSG_DONTWAIT != 0,
            peek: bits & libc::MSG_PEEK != 0,
            wait_all: bits & libc::MSG_WAITALL != 0,
            discard: bits & libc::MSG_TRUNC != 0,
            more: bits & libc::MSG_MORE != 0,
        }
    }
}

/// The result of one attempt to receive.
pub(super) enum ReceiveAttempt {
    Moved(usize),
    End,
    Nothing,
}

/// Returns the number of bytes of all spans together.
#[inline]
pub fn total_bytes(spans: &[iovec]) -> usize {
    spans.iter().fold(0, |total, span| total.saturating_add(span.iov_len))
}

impl Connection {
    /// Returns whether a call may block.
    #[inline]
    pub(super) fn may_block(&self, flags: MessageFlags) -> bool {
        !flags.dont_wait && !self.is_nonblocking.load(Ordering::Relaxed)
    }

    /// Returns the numbers of bytes that this process has sent and received.
    pub fn carried_bytes(&'static self) -> (u64, u64) {
        let _guard = self.lock_direction(&self.send_lock);
        self.slot().map_or((0, 0), ConnectionSlot::carried_bytes)
    }

    /// Attaches the lanes if the handshake has arrived. Returns the result of a receive that found none.
    #[cold]
    pub(super) fn attach_before_transfer(&'static self) -> Result<ReceiveAttempt, Errno> {
        self.attach_if_pending()?;
        if self.lifeline_has_ended() { Ok(ReceiveAttempt::End) } else { Ok(ReceiveAttempt::Nothing) }
    }

    /// Returns whether the lifeline has ended and has nothing unread.
    fn lifeline_has_ended(&self) -> bool {
        blocking::poll_now(self.lifeline(), libc::POLLIN) & (libc::POLLHUP | libc::POLLIN) == libc::POLLHUP
    }

    /// Returns whether this endpoint may ring. Otherwise the descriptor's number may belong to another file by now, the
    /// peer's program would receive the byte, or the filter may forbid the call.
    pub(super) fn can_ring(&self) -> bool {
        self.is_open() && self.sends_by_lane() && !sandbox::is_confined()
    }

    /// Wakes the sleepers of the peer by a byte on the lifeline. The caller has released `lock`, that of either
    /// direction; a close takes it too, so that the number is still the lifeline's.
    ///
    /// The peer may rely on rings from the moment in which another thread sends the message that sends continue by the
    /// lane. That thread holds the send lock until the switch is complete.
    #[cold]
    pub(super) fn ring(&'static self, lock: &'static Lock) {
        let lock = if self.sends_by_lane() { lock } else { &self.send_lock };
        let _guard = self.lock_direction(lock);
        self.ring_locked();
    }

    /// Wakes the sleepers of the peer as [`Connection::ring`] does. The caller holds a lock of the connection.
    #[cold]
    pub(super) fn ring_locked(&self) {
        if !self.can_ring() {
            return;
        }
        if let Some(slot) = self.slot() {
            slot.count_wake();
        }
        let _ = system::ring(self.lifeline());
    }

    /// Resets the connection because the peer broke the protocol. Returns the error for the call.
    #[cold]
    pub(super) fn reset_for(&self, lanes: &Lanes, _corrupt: Corrupt) -> Errno {
        self.note_corruption(lanes);
        debug_assert!(self.peer_state(lanes) == PeerState::Reset);
        Errno::CONNRESET
    }
}
