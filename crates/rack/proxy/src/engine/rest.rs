//! Looking at local ends, parking them, and sleeping.

use super::{CROWDED_AWAKE, Engine, Fault, LOOKS_UNPUBLISHED_MAX, Port};
use crate::connection::{Phase, Place};
use crate::{Input, Key, Local};
use fabric::{Inbound, Outbound};

impl<I: Inbound, O: Outbound, L: Local> Engine<I, O, L> {
    /// The lifeline of a connection has something to say: a ring, or its end.
    pub fn wake(&mut self, key: Key) {
        let Some(connection) = self.table.get(key) else { return };
        let Some(local) = &mut connection.local else { return };
        local.hear();
        if connection.place == Place::Parked {
            local.unpark();
            connection.place = Place::Resting;
        }
        // Bytes that cannot be sent do not hide a reset.
        let is_broken = connection.limit == connection.sent && local.is_broken();
        let input = if is_broken { Input::Broken } else { local.input() };
        self.counters.wakes += 1;
        self.poll_again(key);
        self.take_input_end(key, input);
    }

    /// Prepares for sleep: the programs and the peer are asked to ring. `false`: there is still something to do, or to
    /// look at; take another turn. After the sleep, call [`Engine::wake_up`].
    ///
    /// # Errors
    /// As [`Engine::turn`].
    pub fn sleep(&mut self) -> Result<bool, Fault> {
        // Those whom a crowded engine has not rung yet are rung in the next turn that brings nothing.
        if !self.polled.is_empty() || !self.events.is_empty() || self.turns_unrung > 0 {
            return Ok(false);
        }
        // A peer that sleeps, or is slow, is given everything there is room for: only then a credit wakes us.
        let mut progressed = self.send_due()?;
        for port in 0..self.ports.len() {
            progressed |= self.serve(port, usize::MAX)?;
        }
        self.publish();
        // Whatever was published just now, control frames too: the peer is rung for it in the next turn.
        progressed |= self.ports.iter().any(|port| port.has_sent);
        if progressed || !self.polled.is_empty() {
            return Ok(false);
        }
        for port in 0..self.ports.len() {
            let corrupt = |corrupt| Fault::Lane { partition: port, corrupt };
            let waits_for_room = self.ports[port].has_queued() || (port == 0 && !self.orphans.is_empty());
            let state = &mut self.ports[port];
            state.from.announce_sleep();
            self.counters.flushes += 1 + u64::from(waits_for_room);
            let mut has_something = state.from.may_have_data();
            if waits_for_room {
                state.to.announce_sleep();
                has_something |= state.to.is_writable().map_err(corrupt)?;
            }
            if has_something {
                self.wake_up();
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Asks the programs of all active connections to ring, before their time: for whoever cannot afford to look at
    /// them.
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
        self.ring_locals();
    }

    /// Ends what [`Engine::sleep`] began, whoever rang.
    pub fn wake_up(&mut self) {
        for port in &mut self.ports {
            port.from.cancel_sleep();
            port.to.cancel_sleep();
        }
    }

    /// Looks at the connection in each turn again, as long as it is active.
    pub(super) fn poll_again(&mut self, key: Key) {
        let now_ns = self.now_ns;
        let Some(connection) = self.table.get(key) else { return };
        let has_no_input = connection.is_resuming || connection.is_direct;
        if connection.phase == Phase::Over || connection.place == Place::Queued || has_no_input {
            return;
        }
        if connection.place == Place::Parked
            && let Some(local) = &mut connection.local
        {
            local.unpark();
        }
        connection.place = Place::Polled;
        connection.active_ns = now_ns;
        if !std::mem::replace(&mut connection.is_in_polled, true) {
            self.polled.push(key);
        }
    }

    /// Whether the partitions have nothing, and nothing waits for them. With [`Engine::polled_are_quiet`], that is one
    /// look at each place: turns that wait for something spend half of what they take on its way.
    #[inline]
    pub(super) fn nothing_has_come(&self) -> bool {
        let is_said = self.turns_unrung == 0 && self.orphans.is_empty() && self.touched.is_empty();
        is_said && self.ports.iter().all(Port::is_quiet)
    }

    /// Whether a look at those that are looked at would find nothing.
    #[inline]
    pub(super) fn polled_are_quiet(&mut self) -> bool {
        // Of many, one has something soon, and all would be looked at twice.
        if self.polled.len() > LOOKS_UNPUBLISHED_MAX {
            return false;
        }
        let active_ns_min = self.now_ns.saturating_sub(self.awake_ns());
        let table = &mut self.table;
        self.polled.iter().all(|key| table.get(*key).is_some_and(|connection| connection.is_quiet(active_ns_min)))
    }

    /// How long a connection is looked at.
    fn awake_ns(&self) -> u64 {
        self.settings.awake_ns * if self.is_crowded { CROWDED_AWAKE } else { 1 }
    }

    pub(super) fn look_at_polled(&mut self) {
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

    fn stays_polled(&mut self, key: Key) -> bool {
        if self.table.get(key).is_some_and(|connection| !connection.held.is_empty() && connection.local.is_some()) {
            self.deliver_held(key);
        }
        let Some(connection) = self.table.get(key).filter(|connection| connection.place == Place::Polled) else {
            return false;
        };
        let wants_input = connection.wants_input();
        let has_held = !connection.held.is_empty();
        let Some(local) = &mut connection.local else {
            connection.place = Place::Resting;
            return false;
        };
        if wants_input && local.may_have_input() {
            // What it is, also an end, is found when it has its turn.
            self.queue(key);
            return false;
        }
        if !wants_input && !has_held {
            connection.place = Place::Resting;
            return false;
        }
        let active_ns = connection.active_ns;
        self.now_ns.saturating_sub(active_ns) < self.awake_ns() || !self.park(key)
    }

    /// Asks the program to ring instead of looking at it; `false` if it has something just now.
    fn park(&mut self, key: Key) -> bool {
        let Some(connection) = self.table.get(key) else { return true };
        let wants_input = connection.wants_input();
        let for_room = !connection.held.is_empty();
        let Some(local) = &mut connection.local else { return true };
        local.park(for_room);
        if (wants_input && local.may_have_input()) || (for_room && local.has_room()) {
            local.unpark();
            return false;
        }
        connection.place = Place::Parked;
        self.counters.parks += 1;
        self.acknowledge(key);
        true
    }
}
