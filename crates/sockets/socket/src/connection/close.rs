//! Shutdown and close of a connection, and the reuse of its object.

use super::lanes::Lanes;
use super::{
    Connection, Details, HIDDEN_LIFELINE, POOL, PeerState, SHUTDOWN_READ, SHUTDOWN_WRITE, direction_lock, lifeline,
    wait,
};
use crate::descriptor::hidden::{HiddenFd, Need};
use crate::descriptor::received;
use crate::process::clock::{TICKS_PER_MICROSECOND, ticks};
use crate::process::{blocking, limit, sandbox, system, threads};
use rustix::io::Errno;
use segment::{OwnState, PeerStatus, SHUT_BOTH_WAYS, Side};
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

/// Microseconds that a close waits for a call of another thread to block, which takes that thread 50 microseconds of
/// processor time.
const CALL_SETTLE_US_MAX: u64 = 5_000;

impl Connection {
    /// Shuts down one or both directions: [`SHUTDOWN_READ`], [`SHUTDOWN_WRITE`].
    ///
    /// # Errors
    /// `NOTCONN` if the connection is gone, or both endpoints have ended their streams.
    pub fn shutdown(&'static self, directions: u64) -> Result<(), Errno> {
        self.attach_if_pending()?;
        if self.is_on_lifeline() && blocking::poll_now(self.lifeline(), 0) & libc::POLLERR != 0 {
            // There may be a reset that no call has reported yet.
            self.process_messages_for_all();
        }
        if self.is_known_to_be_closed() {
            return Err(Errno::NOTCONN);
        }
        let before = {
            let Some(_send) = self.lock_direction(&self.send_lock) else {
                self.defer_to_holder(directions as u32);
                return Ok(());
            };
            let Some(lanes) = self.lanes() else { return self.shutdown_lifeline(directions) };
            if self.peer_state(lanes) == PeerState::Reset {
                return Err(Errno::NOTCONN);
            }
            let _shared = self.lock_across_processes_blocking(lanes, OwnState::SendLock)?;
            let before = lanes.segment.load(OwnState::Shutdown);
            lanes.segment.store(OwnState::Shutdown, before | directions);
            if directions & SHUTDOWN_WRITE != 0 && !self.sends_by_lane() {
                self.shutdown_lifeline(SHUTDOWN_WRITE)?;
            } else if directions & SHUTDOWN_WRITE != 0 {
                // SAFETY: the send lock is held, which protects the sender.
                let sender = unsafe { &mut *lanes.sender.get() };
                sender.finish();
                if sender.take_wake_request() {
                    let _ = system::ring(self.lifeline());
                }
            }
            if (before | directions) == SHUTDOWN_READ | SHUTDOWN_WRITE && self.has_begun_on_lifeline() {
                lanes.publish_status(PeerStatus::Closed, SHUT_BOTH_WAYS);
            }
            before
        };
        if directions & !before & SHUTDOWN_READ != 0 {
            self.wake_by_shutdown();
        }
        Ok(())
    }

    /// Closes the connection. The kernel is about to close this process's last descriptor of it.
    pub(super) fn close(&'static self) {
        if !self.defer_close_to_calls() {
            self.close_now();
        }
    }

    /// Closes the connection without regard to blocked calls.
    pub(super) fn close_now(&'static self) {
        self.receive_last_handshake();
        self.process_final_messages();
        if !self.may_have_other_holders() && !sandbox::is_confined() {
            received::disable_linger_of_unread(self.borrow_lifeline());
        }
        // Taken first: once the close is finished, the object may be another connection.
        let retained = self.with_details_unmasked(|details| details.retained_lifeline.take());
        self.finish_close();
        drop(retained);
    }

    /// Defers the close to the last blocked call of another thread, as the kernel does: the calls continue with a
    /// descriptor that the program does not see. If there is no such descriptor, they end. Returns whether the close
    /// was deferred.
    fn defer_close_to_calls(&'static self) -> bool {
        let own_calls = u32::from(wait::BlockingCall::is_of_this_thread(self));
        if threads::is_single() || sandbox::is_confined() || !self.has_sleeping_calls(own_calls) {
            return false;
        }
        let Some(_both) = self.lock_both() else { return false };
        if self.retain_lifeline().is_err() {
            return false;
        }
        if own_calls > 0 {
            self.end_call();
        }
        self.calls.defer_close()
    }

    /// Makes the connection use a descriptor of the lifeline that the program does not see and cannot close. The caller
    /// holds both locks.
    pub(super) fn retain_lifeline(&self) -> Result<(), Errno> {
        if self.lifeline.load(Ordering::Relaxed) <= HIDDEN_LIFELINE {
            return Ok(());
        }
        let lifeline = self.borrow_lifeline();
        let retained = HiddenFd::hide(rustix::io::fcntl_dupfd_cloexec(lifeline, 0)?, Need::Required)?;
        self.lifeline.store(HIDDEN_LIFELINE - RawFd::from(retained.slot()), Ordering::Relaxed);
        self.with_details(|details| details.retained_lifeline = Some(retained));
        Ok(())
    }

    /// Ends the connection as `connect` with `AF_UNSPEC` does: resets the peer and the calls that are blocked on it.
    /// `replace` puts another socket in the place of its descriptors.
    ///
    /// # Errors
    /// `MFILE` if there is no descriptor left, `AGAIN` in a signal handler that has interrupted a call on the
    /// connection, and those of `replace`. On errors nothing changes.
    pub fn disconnect(&'static self, replace: impl FnOnce(&[RawFd]) -> Result<(), Errno>) -> Result<(), Errno> {
        self.attach_if_pending()?;
        {
            let _both = self.lock_both().ok_or(Errno::AGAIN)?;
            self.retain_lifeline()?;
        }
        let descriptors = self.with_details(|details| details.descriptors.clone());
        if let Err(error) = replace(&descriptors) {
            let _both = self.lock_both();
            if let [fd] = descriptors[..] {
                self.lifeline.store(fd, Ordering::Relaxed);
                drop(self.with_details(|details| details.retained_lifeline.take()));
            }
            return Err(error);
        }
        self.with_details(|details| {
            details.descriptors.clear();
            details.resets_on_close = true;
        });
        self.process_final_messages();
        self.reset_both();
        let own_calls = u32::from(wait::BlockingCall::is_of_this_thread(self));
        if self.calls.count() <= own_calls || !self.calls.defer_close() {
            self.close_now();
        }
        Ok(())
    }

    /// Resets both endpoints.
    fn reset_both(&'static self) {
        {
            let _both = self.lock_both();
            match self.lanes() {
                Some(lanes) => self.reset_lanes(lanes),
                None => self.lifeline_path.note_reset(),
            }
        }
        // Wakes the sleepers of both endpoints.
        let lifeline = self.borrow_lifeline();
        let _ = rustix::net::shutdown(lifeline, rustix::net::Shutdown::Both);
    }

    /// Returns whether more than `own_calls` calls are blocked. Waits for threads that poll the memory, which are about
    /// to block.
    fn has_sleeping_calls(&self, own_calls: u32) -> bool {
        let begun_ticks = ticks();
        let is_time_up = || ticks().wrapping_sub(begun_ticks) > CALL_SETTLE_US_MAX * TICKS_PER_MICROSECOND;
        while self.lifetime.has_waiters() && self.calls.count() <= own_calls && !is_time_up() {
            rustix::thread::sched_yield();
        }
        self.calls.count() > own_calls
    }

    /// Ends a call that has blocked.
    pub(super) fn end_call(&'static self) {
        if self.calls.leave() {
            self.close_now();
        }
    }

    /// Finishes a close after the kernel may have closed the descriptor.
    pub(super) fn finish_close(&'static self) {
        {
            let Some(_both) = self.lock_both() else { return self.defer_to_holder(direction_lock::DEFERRED_CLOSE) };
            if !self.lifetime.close() {
                return;
            }
            if let Some(lanes) = self.lanes() {
                self.announce_close(lanes);
            }
            self.lifeline_path.clear();
            // SAFETY: both locks are held. The slot of the stats page is released with the value.
            unsafe { *self.slot.get() = None };
        }
        self.recycle_if_unused();
    }

    /// Receives a handshake that has arrived, before a close: left unread, it would reset the client. A later one is
    /// refused, so that the client finds the end of the stream.
    fn receive_last_handshake(&'static self) {
        let is_pending = {
            let _receive = self.lock_direction(&self.receive_lock);
            self.awaits_handshake.load(Ordering::Relaxed) && !self.is_orphan.load(Ordering::Relaxed)
        };
        if is_pending {
            let lifeline = self.borrow_lifeline();
            let _ = rustix::net::shutdown(lifeline, rustix::net::Shutdown::Read);
            let _ = self.attach_if_pending();
        }
    }

    /// Announces to the peer that this endpoint is closed. If no other process can hold the endpoint, the peer learns
    /// it from memory, at once and exactly. Otherwise only the kernel knows when the last descriptor is closed, and the
    /// end of the lifeline shows it.
    pub(super) fn announce_close(&self, lanes: &Lanes) {
        self.remove_holder_entry(&lanes.segment);
        let others = lanes.segment.add(OwnState::Holders, u64::MAX).saturating_sub(1);
        let (resets, is_last) = self
            .with_details_unmasked(|details| (details.resets_on_close, others == 0 && !self.may_have_other_holders()));
        if !is_last {
            return;
        }
        let has_unread = if self.receives_by_lane() {
            lanes.observer().unread_bytes().is_ok_and(|bytes| bytes > 0)
        } else {
            // Under a filter this process cannot ask, and the kernel tells the peer.
            !sandbox::is_confined() && self.has_program_bytes_in_lifeline()
        };
        // In windows, an endpoint may be reset although its peer is alive and was not: that peer must not find an
        // orderly end either.
        let is_reset = self.peer_state(lanes) == PeerState::Reset;
        // SAFETY: the caller holds the send lock, which protects the sender.
        let finish = || unsafe { (*lanes.sender.get()).finish() };
        if resets || has_unread || is_reset {
            lanes.publish_status(PeerStatus::Reset, 1);
            // Before the end of the stream: a peer that found the end first would take it for an orderly close.
            lanes.publish_status(PeerStatus::Closed, 1);
            finish();
        } else {
            finish();
            lanes.publish_status(PeerStatus::Closed, 1);
        }
    }

    /// Returns the object to the pool once the connection is closed and no thread polls its lanes.
    pub(super) fn recycle_if_unused(&'static self) {
        let memory = {
            let Some(_both) = self.lock_both() else { return self.defer_to_holder(direction_lock::DEFERRED_RECYCLE) };
            if !self.lifetime.try_reclaim() {
                return;
            }
            let Details { memory, tuple, .. } = self.with_details_unmasked(std::mem::take);
            self.forget_growth();
            self.is_plain.store(false, Ordering::Relaxed);
            if let Some(lanes) = self.lanes() {
                limit::remove_mapping();
                let leads_to = tuple.filter(|_| lanes.segment.side() == Side::Connector);
                leads_to.into_iter().for_each(|tuple| lifeline::lane_peers::forget(tuple.peer));
            }
            // Dropped in place, because the stack of a thread may have no room for lanes.
            // SAFETY: both locks are held, and there is no waiter.
            unsafe { *self.lanes.get() = None };
            memory
        };
        drop(memory);
        POOL.release(self);
    }
}
