//! Polling local endpoints, parking them, and preparing for sleep.

use super::event::LinkFault;
use super::partition::PartitionLanes;
use super::state::Engine;
use crate::connection::{Phase, WaitState};
use crate::local::{Input, LocalEndpoint};
use crate::table::ConnectionKey;
use fabric::{Inbound, Outbound};

/// Number of connections that are polled before earlier frames are published: polling them takes no longer than a
/// fence.
pub(super) const POLLED_UNPUBLISHED_MAX: usize = 16;
/// Factor by which an engine on oversubscribed processors polls a connection for longer, because other threads run
/// meanwhile.
const OVERSUBSCRIBED_POLL_FACTOR: u64 = 10;

impl<I: Inbound, O: Outbound, L: LocalEndpoint> Engine<I, O, L> {
    /// Handles an event of a connection's descriptors.
    pub fn endpoint_ready(&mut self, key: ConnectionKey) {
        let Some(connection) = self.table.get(key) else { return };
        let Some(local) = &mut connection.local else { return };
        local.note_events();
        if connection.is_suspended() || self.forward_bell(key) {
            return;
        }
        let Some(connection) = self.table.get(key) else { return };
        let Some(local) = &mut connection.local else { return };
        if connection.wait_state == WaitState::Parked {
            local.unpark();
            connection.wait_state = WaitState::Idle;
        }
        // Unsendable bytes must not hide a reset.
        let is_broken = connection.send_limit == connection.sent && local.is_broken();
        let input = if is_broken { Input::Broken } else { local.input() };
        self.counters.wakes += 1;
        self.poll_again(key);
        self.handle_input_end(key, input);
    }

    /// Prepares for sleep: asks the programs and the peer to ring. Returns `false` if there is still work, or something
    /// to poll; the driver then polls again. After the sleep, it calls [`Engine::end_sleep`].
    ///
    /// # Errors
    /// As [`Engine::poll`].
    pub fn prepare_sleep(&mut self) -> Result<bool, LinkFault> {
        // Programs that were not woken because processors are oversubscribed are woken by the next poll without
        // progress.
        if !self.polled.is_empty() || !self.events.is_empty() || self.polls_without_wake > 0 {
            return Ok(false);
        }
        // A sleeping or slow peer is given everything there is room for, because then only its credit wakes this node.
        let mut progressed = self.send_control_frames()?;
        for partition in 0..self.partitions.len() {
            progressed |= self.serve_partition(partition, usize::MAX)?;
        }
        self.publish();
        // The next poll rings the peer for what was published here, control frames included.
        progressed |= self.partitions.iter().any(|partition| partition.has_sent);
        if progressed || !self.polled.is_empty() {
            return Ok(false);
        }
        for partition in 0..self.partitions.len() {
            let corrupt = |corrupt| LinkFault::Lane { partition, corrupt };
            let waits_for_room =
                self.partitions[partition].has_queued() || (partition == 0 && !self.orphans.is_empty());
            let state = &mut self.partitions[partition];
            state.from.announce_sleep();
            self.counters.flushes += 1 + u64::from(waits_for_room);
            let mut has_something = state.from.may_have_data();
            if waits_for_room {
                state.to.announce_sleep();
                has_something |= state.to.is_writable().map_err(corrupt)?;
            }
            if has_something {
                self.end_sleep();
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Parks all active connections early, for a driver that has no time to poll them.
    pub fn park_all(&mut self) {
        for at in (0..self.polled.len()).rev() {
            let key = self.polled[at];
            let stays = self.stays_polled(key) && !self.park(key);
            if !stays {
                self.polled.swap_remove(at);
                if let Some(connection) = self.table.get(key) {
                    connection.is_in_polled = false;
                }
            }
        }
        self.wake_programs();
    }

    /// Returns memory of the local endpoints that is not used.
    pub fn reclaim(&mut self) {
        for key in self.table.keys() {
            if let Some(local) = self.table.get(key).and_then(|connection| connection.local.as_mut()) {
                local.reclaim();
            }
        }
    }

    /// Ends what [`Engine::prepare_sleep`] began, whatever woke the driver.
    pub fn end_sleep(&mut self) {
        for partition in &mut self.partitions {
            partition.from.cancel_sleep();
            partition.to.cancel_sleep();
        }
    }

    /// Adds the connection to those that every poll checks, as long as it is active.
    pub(super) fn poll_again(&mut self, key: ConnectionKey) {
        let now_ns = self.now_ns;
        let Some(connection) = self.table.get(key) else { return };
        if connection.phase == Phase::Over || connection.wait_state == WaitState::Queued || connection.is_resuming {
            return;
        }
        if connection.wait_state == WaitState::Parked
            && let Some(local) = &mut connection.local
        {
            local.unpark();
        }
        connection.wait_state = WaitState::Polled;
        connection.active_ns = now_ns;
        if !std::mem::replace(&mut connection.is_in_polled, true) {
            self.polled.push(key);
        }
    }

    /// Returns whether no partition has a frame, and no frame waits to be sent. Together with
    /// [`Engine::polled_are_quiet`], this reads each word once: a poll delays a message that arrives meanwhile by half
    /// of its own duration.
    #[inline]
    pub(super) fn partitions_are_quiet(&self) -> bool {
        let nothing_pending = self.polls_without_wake == 0 && self.orphans.is_empty() && self.wake_list.is_empty();
        nothing_pending && self.partitions.iter().all(PartitionLanes::is_quiet)
    }

    /// Returns whether polling the connections would find nothing.
    #[inline]
    pub(super) fn polled_are_quiet(&mut self) -> bool {
        // Among many connections, one soon has input, and all would be checked twice.
        if self.polled.len() > POLLED_UNPUBLISHED_MAX {
            return false;
        }
        let active_ns_min = self.now_ns.saturating_sub(self.poll_ns());
        let table = &mut self.table;
        self.polled.iter().all(|key| table.get(*key).is_some_and(|connection| connection.is_quiet(active_ns_min)))
    }

    /// Returns how long an idle connection stays polled.
    fn poll_ns(&self) -> u64 {
        self.settings.poll_ns * if self.is_oversubscribed { OVERSUBSCRIBED_POLL_FACTOR } else { 1 }
    }

    pub(super) fn poll_connections(&mut self) {
        let mut at = 0;
        while at < self.polled.len() {
            let key = self.polled[at];
            if self.stays_polled(key) {
                at += 1;
                continue;
            }
            self.polled.swap_remove(at);
            if let Some(connection) = self.table.get(key) {
                connection.is_in_polled = false;
            }
        }
    }

    fn stays_polled(&mut self, key: ConnectionKey) -> bool {
        if self
            .table
            .get(key)
            .is_some_and(|connection| !connection.undelivered.is_empty() && connection.local.is_some())
        {
            self.deliver_undelivered(key);
        }
        let Some(connection) = self.table.get(key).filter(|connection| connection.wait_state == WaitState::Polled)
        else {
            return false;
        };
        let wants_input = connection.wants_input();
        let has_undelivered = !connection.undelivered.is_empty();
        let Some(local) = &mut connection.local else {
            connection.wait_state = WaitState::Idle;
            return false;
        };
        if wants_input && local.may_have_input() {
            // Input or an end is handled when the connection is served.
            self.queue(key);
            return false;
        }
        if !wants_input && !has_undelivered {
            connection.wait_state = WaitState::Idle;
            return false;
        }
        let active_ns = connection.active_ns;
        self.now_ns.saturating_sub(active_ns) < self.poll_ns() || !self.park(key)
    }

    /// Asks the program to ring instead of polling it; returns `false` if it has input just now.
    fn park(&mut self, key: ConnectionKey) -> bool {
        let Some(connection) = self.table.get(key) else { return true };
        let wants_input = connection.wants_input();
        let for_room = !connection.undelivered.is_empty();
        let Some(local) = &mut connection.local else { return true };
        local.park(for_room);
        if (wants_input && local.may_have_input()) || (for_room && local.has_room()) {
            local.unpark();
            return false;
        }
        connection.wait_state = WaitState::Parked;
        self.counters.parks += 1;
        self.send_idle_credit(key);
        true
    }
}
