//! Handles the messages that come first in the lifeline.

use super::super::{Connection, observer};
use super::message::peek;
use super::receive::LifelineRead;
use super::{FOLLOW, Lookahead, SWITCH};
use crate::descriptor::hidden::close;
use crate::process::clock::{TICKS_PER_MILLISECOND, ticks};
use libc::iovec;
use rustix::io::Errno;
use segment::OwnState;
use std::sync::atomic::Ordering;

/// What comes first in a lifeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextItem {
    Nothing,
    Bytes,
    Message,
    End,
}

/// Why a call handles messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The program receives, or waits for input.
    Input,
    Other,
}

impl Connection {
    /// Handles the last messages before a close: one that was left unread would reset the peer, and `SO_LINGER` may
    /// request a reset.
    pub(in crate::connection) fn process_final_messages(&'static self) {
        // The messages may be for another process.
        if self.receives_by_lane() || self.awaits_handshake.load(Ordering::Relaxed) || self.may_have_other_holders() {
            return;
        }
        if self.with_details(|details| details.resets_on_close) {
            self.switch_to_lanes();
        }
        // It is too late for an offer.
        self.lifeline_path.is_shared.store(true, Ordering::Relaxed);
        self.process_messages(Purpose::Other);
    }

    /// Returns, after a receive by the lifeline, whether the stream continues in a lane.
    pub(in crate::connection) fn continues_by_lane(&'static self) -> bool {
        let continues = self.lifeline_path.has_pending_message.load(Ordering::Relaxed)
            && self.handle_pending_message().is_ok()
            && self.receives_by_lane();
        self.notify_sets();
        continues
    }

    /// Handles messages at most once a millisecond, for a program that only sends: it does not receive the message
    /// after which both directions use lanes, and sends become faster.
    pub(in crate::connection) fn process_messages_periodically(&'static self) {
        let now = ticks();
        if now.wrapping_sub(self.lifeline_path.messages_polled_ticks.load(Ordering::Relaxed)) > TICKS_PER_MILLISECOND {
            self.lifeline_path.messages_polled_ticks.store(now, Ordering::Relaxed);
            self.process_messages_for_all();
        }
    }

    /// Does what [`Connection::process_messages`] does for a call that is not for input, and notifies the sets with
    /// this connection.
    pub(in crate::connection) fn process_messages_for_all(&'static self) {
        self.process_messages(Purpose::Other);
        self.notify_sets();
    }

    /// Makes readiness sets poll the connection, after a call has received messages that they would have found: the
    /// peer does not ring for what it sent by the lane before a set asked for rings.
    pub(in crate::connection) fn notify_sets(&'static self) {
        if self.receives_by_lane() && self.sleepers.is_any() {
            observer::notify_change(self);
        }
    }

    /// Handles the messages that come first in the lifeline. Returns what comes then.
    pub(super) fn process_messages(&'static self, purpose: Purpose) -> NextItem {
        loop {
            if let Err(first) = self.process_next_message(purpose) {
                return first;
            }
        }
    }

    /// Handles the message that comes first in the lifeline.
    ///
    /// # Errors
    /// What comes first, if it is not a message or cannot be handled now.
    fn process_next_message(&'static self, purpose: Purpose) -> Result<(), NextItem> {
        {
            let guard = self.lock_direction(&self.receive_lock);
            if guard.is_none() || self.is_incoming_by_lane() {
                return Err(NextItem::Nothing);
            }
            if !self.lifeline_path.has_pending_message.load(Ordering::Relaxed) {
                let shared = self.lanes().map(|lanes| self.lock_across_processes(lanes, OwnState::ReceiveLock));
                let Ok(_shared) = shared.transpose() else { return Err(NextItem::Nothing) };
                if self.is_incoming_by_lane() {
                    return Err(NextItem::Nothing);
                }
                match self.next_in_lifeline() {
                    NextItem::Message if purpose == Purpose::Other && self.is_message_for_receiver() => {
                        return Err(NextItem::Message);
                    }
                    NextItem::Message if matches!(self.receive_message(), Ok(LifelineRead::Message)) => {}
                    first => return Err(first),
                }
            }
        }
        self.handle_pending_message().map_err(|_| NextItem::Message)
    }

    /// Returns whether the message that comes first brings memory that only the process which consumes the message can
    /// attach, while several processes hold this endpoint: the process that receives needs it. The caller holds the
    /// receive lock.
    fn is_message_for_receiver(&self) -> bool {
        let lanes = self.lanes();
        if !lanes.map_or_else(|| self.may_have_other_holders(), |lanes| self.has_other_holders(lanes)) {
            return false;
        }
        let Lookahead { message: Some(SWITCH | FOLLOW), memory: Some(memory), .. } = self.look_ahead() else {
            return false;
        };
        let is_at_hand = lanes.is_some_and(|lanes| self.is_memory_of(lanes, &memory));
        close(memory);
        !is_at_hand
    }

    /// Returns what comes first in the lifeline. The caller holds the receive lock.
    fn next_in_lifeline(&self) -> NextItem {
        let mut byte = 0_u8;
        let spans = [iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 }];
        // SAFETY: the only span is a local variable.
        match unsafe { peek(self.lifeline(), &spans) } {
            Ok((0, _)) => NextItem::End,
            Ok((_, true)) => NextItem::Message,
            Ok((_, false)) => NextItem::Bytes,
            Err(Errno::CONNRESET) => {
                self.note_kernel_reset();
                NextItem::End
            }
            Err(_) => NextItem::Nothing,
        }
    }
}
