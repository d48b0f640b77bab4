//! A connection that several processes hold since a fork; see [`crate::sharing`].

use super::meet::{Meeting, State};
use super::{Connection, POOL};
use crate::holders::{self, Hold};
use crate::kernel::Tcp;
use crate::young::{Occasion, Young};
use meeting::Role;

/// Transfers after which a process checks whether it is the only one that holds the connection.
const TRANSFERS_PER_CHECK: u32 = 16;

/// What this process knows of the others that may hold the connection.
#[derive(Clone, Copy)]
pub(super) struct Sharing {
    hold: Hold,
    /// The ends had met before, and this process has the memory and the bell for that.
    has_met: bool,
    /// This process never uses lanes.
    is_final: bool,
    /// This process has released its hold.
    is_released: bool,
    /// Transfers since the last check.
    transfers: u32,
}

impl Sharing {
    /// Returns the state of a connection without an object, with the object that it gets; `None` if it is not shared.
    pub fn of(young: Young) -> Option<Self> {
        let (is_final, is_released) = (!young.may_take_over(), young.is_released());
        young.hold().map(|hold| Self { hold, has_met: false, is_final, is_released, transfers: 0 })
    }

    /// Counts a transfer, and returns whether it is an occasion to check.
    pub fn count(&mut self) -> Option<Occasion> {
        self.transfers = (self.transfers + 1) % TRANSFERS_PER_CHECK;
        (self.transfers == 0 && !self.is_final && !self.is_released).then_some(Occasion::Holders)
    }

    fn release(&mut self) {
        if !self.is_released {
            self.is_released = true;
            self.hold.release();
        }
    }
}

impl Meeting {
    /// Counts the child that is about to be created as a holder.
    fn share(&mut self) {
        self.state = match std::mem::take(&mut self.state) {
            State::Stays => State::Stays,
            State::Shared(sharing) if sharing.hold.add_child() => State::Shared(sharing),
            State::Shared(_) => State::Stays,
            state => {
                let has_met = matches!(state, State::Met);
                holders::share().map_or(State::Stays, |hold| {
                    State::Shared(Sharing { hold, has_met, is_final: false, is_released: false, transfers: 0 })
                })
            }
        };
    }

    /// Gives up what belongs to the parent of this process. The peer knows the parent's memory and bell, so that this
    /// process meets it anew once the parent is gone. If it `is_final`, this process never uses lanes.
    pub fn leave_to_parent(&mut self, is_final: bool) {
        self.bell = None;
        match &mut self.state {
            State::Shared(sharing) => {
                sharing.has_met = false;
                sharing.is_final |= is_final;
            }
            // It was created by another thread during the fork, or is not in use.
            state => *state = State::Stays,
        }
    }

    /// Prepares to meet another process that holds the peer's end, because the one that this end has met is gone.
    pub fn forget_peer(&mut self, role: Role) {
        match &mut self.state {
            State::Met => {
                self.state = State::Alone;
                self.begin_anew(Young::new(role));
            }
            State::Shared(sharing) => sharing.has_met = false,
            _ => {}
        }
    }

    /// Keeps the connection on TCP for good. Somebody whom the library does not know may get it.
    pub fn stay(&mut self) {
        if let State::Shared(sharing) = &self.state {
            sharing.hold.leave_counted();
        }
        self.state = State::Stays;
    }

    /// Releases the hold of this process, if it has one.
    pub fn release_hold(&mut self) {
        if let State::Shared(sharing) = &mut self.state {
            sharing.release();
        }
    }
}

impl Connection {
    /// Sends the connection back to TCP before a fork, and counts the child as a holder. Waits for room for what the
    /// peer has left in the lane, as long as the peer makes some and at most until `deadline_ns`: afterwards two
    /// processes could send.
    pub(super) fn share(&'static self, tcp: Tcp, deadline_ns: u64) {
        if let Some(mut meeting) = self.meeting.lock() {
            meeting.share();
        }
        self.leave_lanes_for_now(tcp, deadline_ns, true);
        if self.receiver.lock().is_some_and(|mut receiver| receiver.save_leftover(tcp, deadline_ns)) {
            self.for_each_watcher(|set| set.poll_again(self));
        }
    }

    /// Uses lanes again if no other process holds the connection.
    #[cold]
    pub(super) fn take_over(&self) {
        let Some(mut meeting) = self.meeting.lock() else { return };
        let State::Shared(Sharing { hold, has_met, is_final: false, is_released: false, .. }) = meeting.state else {
            return;
        };
        if !crate::sharing::is_sole(hold) || !hold.take_over() {
            return;
        }
        meeting.state = if has_met { State::Met } else { State::Alone };
        meeting.begin_anew(Young::new(self.role()));
        if let Some(mut receiver) = self.receiver.lock() {
            receiver.set_staying(false);
        }
        if let Some(mut sender) = self.sender.lock() {
            sender.set_paused(false);
        }
    }

    /// Returns whether other processes may hold the connection.
    pub fn is_shared(&self) -> bool {
        self.meeting.lock().is_some_and(|meeting| matches!(meeting.state, State::Shared(_)))
    }

    /// Returns whether a call of the program is in the kernel, or bytes are to be written there.
    fn is_busy(&self) -> bool {
        self.sender.lock().is_none_or(|sender| sender.is_busy())
            || self.receiver.lock().is_none_or(|receiver| receiver.is_busy())
    }

    /// Releases the hold of this process, which ends or runs another program.
    pub fn release_hold(&self) {
        if !self.is_busy()
            && let Some(mut meeting) = self.meeting.lock()
        {
            meeting.release_hold();
        }
    }

    /// Takes the released hold again, or stays on TCP for good if the connection was taken over meanwhile; see
    /// [`crate::sharing::hold_again`].
    pub fn hold_again(&self) {
        if let Some(mut meeting) = self.meeting.lock()
            && let State::Shared(sharing) = &mut meeting.state
            && sharing.is_released
        {
            sharing.is_released = false;
            if !sharing.hold.add() {
                meeting.state = State::Stays;
            }
        }
    }

    /// Forgets the other holders, because the object is not used after all: whoever has made it still counts as one.
    pub fn forget_holders(&self) {
        if let Some(mut meeting) = self.meeting.lock() {
            meeting.state = State::Stays;
        }
    }
}

/// Undoes what was counted before a fork that has failed.
pub fn after_failed_fork() {
    POOL.for_each(|connection| {
        if let Some(meeting) = connection.meeting.lock()
            && let State::Shared(sharing) = &meeting.state
        {
            sharing.hold.release_of_child();
        }
    });
}
