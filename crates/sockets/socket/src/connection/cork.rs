//! `TCP_CORK` and `MSG_MORE`: what a program has not finished saying.
//!
//! Short sends then lie in the lane without being seen (`lane`'s `producer::held`), until the program pulls the cork or
//! sends something else, a segment is full, the stream ends, or 200 ms are over. The last of these is up to the
//! receiver, as is a sender that was killed: where it finds nothing it asks how long something has been held back, and
//! it sleeps no longer than that. A receiver that sleeps is rung for what is held back too, so that it learns of the
//! time.
//!
//! On its lifeline a connection has nothing to hold bytes back in: it gets lanes with the first send that it would hold
//! back, if it can and pays. Between nodes, and where either end is under a system call filter, nothing is held back.

use super::lanes::Lanes;
use super::{Connection, Flags, PeerState};
use crate::options::{CORKED, SEGMENT_BYTES_MAX};
use crate::process::clock::now_ns;
use crate::process::sandbox;
use lane::HELD_MS_MAX;
use segment::OwnState;
use std::sync::atomic::Ordering;

/// So many bytes are not held back.
pub(super) const HELD_BYTES_MAX: usize = SEGMENT_BYTES_MAX as usize;

/// A clock that both ends have.
pub(super) fn now_ms() -> u32 {
    (now_ns() / 1_000_000) as u32
}

impl Connection {
    /// Shows what is held back.
    pub fn push(&'static self) {
        let wakes_receiver = {
            // A handler that has interrupted a send leaves it to the next one, or to the receiver's clock.
            let Some(_guard) = self.lock_direction(&self.send_lock) else { return };
            let Some(lanes) = self.lanes().filter(|_| self.sends_by_lane()) else { return };
            let Ok(_shared) = self.lock_across_processes_blocking(lanes, OwnState::SendLock) else { return };
            // SAFETY: under the send lock.
            let sender = unsafe { &mut *lanes.sender.get() };
            sender.publish_held() && sender.take_wake_request()
        };
        if wakes_receiver {
            self.ring();
        }
    }

    /// Bytes that this end holds back (`SIOCOUTQNSD`), as far as it knows.
    pub fn held_bytes(&'static self) -> usize {
        let _guard = self.lock_direction(&self.send_lock);
        let Some(lanes) = self.lanes().filter(|_| self.sends_by_lane()) else { return 0 };
        // SAFETY: under the send lock.
        unsafe { (*lanes.sender.get()).held_bytes() }
    }

    /// Gives lanes to an end whose next send is to be held back, if that goes by the lifeline. Answers whether it does
    /// not.
    pub(super) fn prepare_to_hold(&'static self, flags: Flags) -> bool {
        let is_corked = || self.shared_options.load(Ordering::Relaxed) & CORKED != 0;
        self.sends_by_lane() || ((flags.more || is_corked()) && self.switch_for_cork())
    }

    /// Begins to hold back what is sent, if the program asks for it and these lanes can. Under the send lock.
    pub(super) fn begin_hold(&self, lanes: &Lanes, flags: Flags) -> bool {
        let holds = (flags.more || lanes.segment.load(OwnState::Options) & CORKED != 0)
            && !lanes.segment.is_in_windows()
            && !lanes.segment.peer_is_confined();
        if holds {
            // SAFETY: under the send lock.
            unsafe { (*lanes.sender.get()).begin_hold(now_ms()) };
        }
        holds
    }

    /// Where nothing was found: shows what the sender has held back for as long as it may, or has left. Under the
    /// receive lock, which is shared with other processes that hold the end.
    pub(super) fn publish_held_if_due(&self, lanes: &Lanes) -> bool {
        let is_due = match self.held_left_ms_in(lanes) {
            None => false,
            Some(0) => true,
            Some(_) => self.peer_state(lanes) != PeerState::Alive || sandbox::is_confined(),
        };
        // SAFETY: under the receive lock.
        is_due && unsafe { (*lanes.receiver.get()).publish_held() }
    }

    /// As [`Connection::publish_held_if_due`], under the lock of this process alone.
    pub(super) fn publish_held_if_due_locking(&self, lanes: &Lanes) -> bool {
        if !lanes.observer().may_be_held() {
            return false;
        }
        self.poll_lifeline_periodically(lanes);
        self.lock_across_processes(lanes, OwnState::ReceiveLock).is_ok_and(|_shared| self.publish_held_if_due(lanes))
    }

    /// Milliseconds that the sender may hold back what comes next; `None`: it does not.
    #[inline]
    pub(super) fn held_left_ms_in(&self, lanes: &Lanes) -> Option<u32> {
        let observer = lanes.observer();
        if !observer.may_be_held() {
            return None;
        }
        let held_ms = now_ms().wrapping_sub(observer.held_since_ms()?);
        Some(HELD_MS_MAX.saturating_sub(held_ms))
    }

    /// How long a sleep may be that is to end when what the sender holds back is due; `None`: it holds nothing back.
    pub fn held_left_ns(&'static self) -> Option<u64> {
        let _guard = self.lock_direction(&self.receive_lock);
        let lanes = self.lanes().filter(|_| self.receives_by_lane())?;
        self.held_left_ms_in(lanes).map(|left_ms| u64::from(left_ms) * 1_000_000)
    }

    /// Takes what the sender holds back at once: nobody is awake when it is due.
    pub fn publish_held(&'static self) {
        let _guard = self.lock_direction(&self.receive_lock);
        let Some(lanes) = self.lanes().filter(|_| self.receives_by_lane()) else { return };
        if lanes.observer().may_be_held()
            && let Ok(_shared) = self.lock_across_processes_blocking(lanes, OwnState::ReceiveLock)
        {
            // SAFETY: under the receive lock.
            unsafe { (*lanes.receiver.get()).publish_held() };
        }
    }
}
