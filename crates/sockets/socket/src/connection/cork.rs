//! `TCP_CORK` and `MSG_MORE`: holding back short sends until more follows.
//!
//! Short sends stay in the lane unpublished (`lane`'s `producer::held`) until the program clears the cork or sends
//! more, a segment is full, the stream ends, or 200 ms have passed. The receiver enforces the time limit, and publishes
//! what a killed sender has held back: when it finds nothing, it checks since when records have been held back, and
//! sleeps no longer than until they are due. A sleeping receiver is rung for held records too, so that it learns of the
//! time.
//!
//! On its lifeline a connection cannot hold bytes back. It gets lanes with the first send that is to be held back, if
//! it can and if they pay. Between nodes, and where either endpoint is under a system call filter, nothing is held
//! back.

use super::lanes::Lanes;
use super::{Connection, MessageFlags, PeerState};
use crate::options::CORKED;
use crate::process::clock::now_ns;
use crate::process::sandbox;
use lane::HELD_MS_MAX;
use segment::OwnState;
use std::sync::atomic::Ordering;

/// Returns the milliseconds of a clock that both endpoints have.
pub(super) fn now_ms() -> u32 {
    (now_ns() / 1_000_000) as u32
}

impl Connection {
    /// Publishes what is held back.
    pub fn push(&'static self) {
        let wakes_receiver = {
            // A handler that has interrupted a send leaves the publication to the next send, or to the receiver's
            // clock.
            let Some(_guard) = self.lock_direction(&self.send_lock) else { return };
            let Some(lanes) = self.lanes().filter(|_| self.sends_by_lane()) else { return };
            let Ok(_shared) = self.lock_across_processes_blocking(lanes, OwnState::SendLock) else { return };
            // SAFETY: the send lock is held, which protects the sender.
            let sender = unsafe { &mut *lanes.sender.get() };
            sender.publish_held() && sender.take_wake_request()
        };
        if wakes_receiver {
            self.ring(&self.send_lock);
        }
    }

    /// Returns the bytes that this endpoint holds back (`SIOCOUTQNSD`), as far as it knows.
    pub fn held_bytes(&'static self) -> usize {
        let _guard = self.lock_direction(&self.send_lock);
        let Some(lanes) = self.lanes().filter(|_| self.sends_by_lane()) else { return 0 };
        // SAFETY: the send lock is held, which protects the sender.
        unsafe { (*lanes.sender.get()).held_bytes() }
    }

    /// Gives lanes to an endpoint on its lifeline whose next send is to be held back. Returns whether sends use a lane.
    pub(super) fn prepare_to_hold(&'static self, flags: MessageFlags) -> bool {
        let is_corked = || self.shared_options.load(Ordering::Relaxed) & CORKED != 0;
        self.sends_by_lane() || ((flags.more || is_corked()) && self.switch_for_cork())
    }

    /// Begins to hold back what is sent, if the program asks for it and these lanes support it. The caller holds the
    /// send lock. Returns whether it did.
    pub(super) fn begin_hold(&self, lanes: &Lanes, flags: MessageFlags) -> bool {
        let holds = (flags.more || lanes.segment.load(OwnState::Options) & CORKED != 0)
            && !lanes.segment.is_in_windows()
            && !lanes.segment.peer_is_confined();
        if holds {
            // SAFETY: the caller holds the send lock, which protects the sender.
            unsafe { (*lanes.sender.get()).begin_hold(now_ms()) };
        }
        holds
    }

    /// Publishes held records after a receive found nothing, if their time is over or the sender is gone. Returns
    /// whether it did. The caller holds the receive lock, in this process and across processes.
    pub(super) fn publish_held_if_due(&self, lanes: &Lanes) -> bool {
        let is_due = match self.held_left_ms_in(lanes) {
            None => false,
            Some(0) => true,
            Some(_) => self.peer_state(lanes) != PeerState::Alive || sandbox::is_confined(),
        };
        // SAFETY: the caller holds the receive lock, which protects the receiver.
        is_due && unsafe { (*lanes.receiver.get()).publish_held() }
    }

    /// Does what [`Connection::publish_held_if_due`] does, for a caller that holds the receive lock of this process
    /// alone.
    pub(super) fn publish_held_if_due_locking(&self, lanes: &Lanes) -> bool {
        if !lanes.observer().may_be_held() {
            return false;
        }
        self.poll_lifeline_periodically(lanes);
        self.lock_across_processes(lanes, OwnState::ReceiveLock).is_ok_and(|_shared| self.publish_held_if_due(lanes))
    }

    /// Returns the milliseconds for which the sender may still hold back the next records, or `None` if none are held
    /// back.
    #[inline]
    pub(super) fn held_left_ms_in(&self, lanes: &Lanes) -> Option<u32> {
        let observer = lanes.observer();
        if !observer.may_be_held() {
            return None;
        }
        let held_ms = now_ms().wrapping_sub(observer.held_since_ms()?);
        Some(HELD_MS_MAX.saturating_sub(held_ms))
    }

    /// Returns the nanoseconds until held records are due, or `None` if none are held back.
    pub fn held_left_ns(&'static self) -> Option<u64> {
        let _guard = self.lock_direction(&self.receive_lock);
        let lanes = self.lanes().filter(|_| self.receives_by_lane())?;
        self.held_left_ms_in(lanes).map(|left_ms| u64::from(left_ms) * 1_000_000)
    }

    /// Publishes at once what the sender holds back, because no thread will be awake when it is due.
    pub fn publish_held(&'static self) {
        let _guard = self.lock_direction(&self.receive_lock);
        let Some(lanes) = self.lanes().filter(|_| self.receives_by_lane()) else { return };
        if lanes.observer().may_be_held()
            && let Ok(_shared) = self.lock_across_processes_blocking(lanes, OwnState::ReceiveLock)
        {
            // SAFETY: the receive lock is held, which protects the receiver.
            unsafe { (*lanes.receiver.get()).publish_held() };
        }
    }
}
