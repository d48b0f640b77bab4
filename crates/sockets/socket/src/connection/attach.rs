//! Attaches the memory of lanes to a connection, and keeps the descriptors of that memory, which another process needs
//! to hold the same endpoint.

use super::lanes::Lanes;
use super::{Connection, Details, lifeline, sharing};
use crate::descriptor::hidden;
use crate::descriptor::hidden::HiddenFd;
use crate::process::clock::{note_ticks, ticks};
use crate::process::system::{inode_of, is_inheritable};
use crate::process::{limit, signals};
use crate::rendezvous;
use crate::rendezvous::local_page::MemoryFds;
use rustix::io::Errno;
use segment::{BY_LANE_BOTH, OwnState, Segment, Side};
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

impl Connection {
    /// Attaches the lanes of a proxy's connection if its handshake has arrived. Returns `Ok(false)` if it has not.
    pub(super) fn attach_if_pending(&'static self) -> Result<bool, Errno> {
        if !self.awaits_handshake.load(Ordering::Relaxed) {
            return if self.is_open() { Ok(true) } else { Err(Errno::BADF) };
        }
        let both = self.lock_both();
        if !self.is_open() {
            return Err(Errno::BADF);
        }
        if self.lanes().is_some() {
            return Ok(true);
        }
        if both.is_none() {
            return Ok(false);
        }
        if self.is_orphan.load(Ordering::Relaxed) {
            return Err(Errno::CONNRESET);
        }
        let lifeline = self.borrow_lifeline();
        match limit::with_free_descriptor(lifeline, || rendezvous::receive_handshake(lifeline)) {
            Ok(Some((segment, memory))) => {
                let memory = memory.and_then(|memory| memory.hide().ok());
                self.attach_in_use(segment, memory, BY_LANE_BOTH);
                Ok(true)
            }
            Ok(None) => Ok(false),
            Err(_) => Err(Errno::CONNRESET),
        }
    }

    /// Attaches lanes to a connection that the program already uses. The caller holds both locks.
    pub(super) fn attach_in_use(&self, segment: Segment, memory: Option<MemoryFds<HiddenFd>>, by_lane: u64) {
        // A signal handler reads the lanes without the lock of the thread that it has interrupted.
        signals::without_handlers(|| self.attach_locked(segment, memory, by_lane));
        let requested = self.with_details(Details::requested_options);
        self.set_lane_capacities(requested.send_bytes, requested.receive_bytes);
        self.set_inheritable_locked(self.has_descriptor(is_inheritable));
        self.announce_earlier_sleepers();
        self.publish_signal_owner();
    }

    /// Asks the peer to ring for threads that parked before there were lanes. The caller holds both locks.
    pub(super) fn announce_earlier_sleepers(&self) {
        if self.sleepers.is_any()
            && let Some(lanes) = self.lanes()
        {
            // SAFETY: the caller holds the receive lock, which protects the receiver.
            unsafe { (*lanes.receiver.get()).announce_sleep() };
            // SAFETY: the caller holds the send lock, which protects the sender.
            unsafe { (*lanes.sender.get()).announce_sleep() };
        }
    }

    /// Attaches lanes while no signal handler can run. The caller holds both locks. `by_lane` are the directions that
    /// use the lanes at once, in addition to those that a previous holder of this endpoint has noted.
    pub(super) fn attach_locked(&self, segment: Segment, memory: Option<MemoryFds<HiddenFd>>, by_lane: u64) {
        // SAFETY: the cell is read only under one of both locks, which the caller holds, or by a waiter that has found
        // lanes under one of them; there are none yet, so no reference to the contents exists.
        unsafe { *self.lanes.get() = Some(Lanes::new(segment)) };
        let Some(lanes) = self.lanes() else { return };
        // Stamps of a process that has never read the clock could not be compared with those of others.
        note_ticks(ticks());
        self.is_user.store(sharing::register_holder(&lanes.segment), Ordering::Relaxed);
        limit::add_mapping();
        if lanes.segment.side() == Side::Connector
            && let Some(tuple) = self.with_details_unmasked(|details| details.tuple)
        {
            lifeline::lane_peers::note(tuple.peer);
        }
        let noted = if lanes.segment.is_adopted() {
            self.shared_options.store(lanes.segment.load(OwnState::Options), Ordering::Relaxed);
            lanes.segment.load(OwnState::ByLane)
        } else {
            lanes.segment.store(OwnState::Options, self.shared_options.load(Ordering::Relaxed));
            0
        };
        self.awaits_handshake.store(false, Ordering::Relaxed);
        self.use_lanes_for(noted | by_lane);
        self.with_details_unmasked(|details| details.memory = memory);
    }

    /// Makes `directions` use the lanes from now on. The caller holds the locks of those directions.
    pub(super) fn use_lanes_for(&self, directions: u64) {
        let Some(lanes) = self.lanes() else { return };
        let directions = directions & BY_LANE_BOTH;
        let by_lane = self.by_lane.fetch_or(directions, Ordering::Relaxed) | directions;
        lanes.note_by_lane(directions);
        self.is_plain.store(by_lane == BY_LANE_BOTH && lanes.are_plain(), Ordering::Relaxed);
    }

    /// Returns the descriptors of the lanes' memory, for a transfer of the connection to another process. Empty if one
    /// of them had to be closed to make room for the program's own.
    pub fn memory(&'static self) -> Vec<RawFd> {
        let _send = self.lock_direction(&self.send_lock);
        self.record_lifeline_inode();
        let numbers = |memory: &MemoryFds<HiddenFd>| memory.iter().map(HiddenFd::raw).collect::<Vec<_>>();
        let numbers = self.with_details(|details| details.memory.as_ref().map(numbers)).unwrap_or_default();
        let are_all = self.has_memory_of_incoming_lane() && numbers.iter().all(|number| *number >= 0);
        if are_all { numbers } else { Vec::new() }
    }

    /// Returns whether there is a descriptor of the incoming lane's memory, if that is memory of its own. The caller
    /// holds a lock of the connection.
    fn has_memory_of_incoming_lane(&self) -> bool {
        // SAFETY: the cell is written only under both locks, and the caller holds one.
        let is_elsewhere = self.lanes().is_some_and(|lanes| unsafe { &*lanes.inbound.get() }.is_some());
        let is_at_hand = |details: &mut Details| details.memory.as_ref().is_some_and(|memory| memory.inbound.is_some());
        !is_elsewhere || self.with_details(is_at_hand)
    }

    /// Sets whether the connection survives `exec`, as the program's descriptor does.
    pub fn set_inheritable(&'static self, inheritable: bool) {
        let _send = self.lock_direction(&self.send_lock);
        self.set_inheritable_locked(inheritable);
    }

    /// Does what [`Connection::set_inheritable`] does. The caller holds a lock of the connection.
    pub(super) fn set_inheritable_locked(&self, inheritable: bool) {
        if inheritable {
            self.record_lifeline_inode();
            // A lifeline alone does not show that it was left for the library.
            let _ = hidden::ensure_marker();
        }
        let inheritable = inheritable && self.has_memory_of_incoming_lane();
        self.with_details(|details| details.memory.iter().for_each(|memory| memory.set_inheritable(inheritable)));
    }

    /// Records the lifeline's inode in the memory, by which a process that gets both knows that they belong together.
    /// The caller holds a lock of the connection.
    fn record_lifeline_inode(&self) {
        let Some(lanes) = self.lanes() else { return };
        // SAFETY: the cell is written only under both locks, and the caller holds one.
        let inbound = unsafe { &*lanes.inbound.get() };
        for segment in std::iter::once(&lanes.segment).chain(inbound.as_deref()) {
            if segment.lifeline_inode() == 0 {
                segment.store(OwnState::LifelineInode, inode_of(self.lifeline()).unwrap_or(0));
            }
        }
    }
}
