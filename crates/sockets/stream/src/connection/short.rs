//! Short messages: one record of a lane, in one span. Most messages of programs that answer each other are such.
//!
//! What these functions do not do, the general ones do; they find nothing different.

use super::receive::Call;
use super::wait::Deadline;
use super::{Connection, Use};
use crate::flags::MessageFlags;
use ::wait::{Action, Spin};
use lane::ShortRead;
use libc::iovec;
use std::sync::atomic::Ordering;

/// Attempts to receive between two looks at signals: some microseconds, in which a peer that answers at once has
/// answered.
const ATTEMPTS_MAX: u32 = 400;

impl Connection {
    /// Receives a record into one span. `UseReadTo` if this is not the way.
    ///
    /// # Safety
    /// Every span is writable for its length.
    #[inline(always)] // The call itself would cost as much as most of the work.
    pub(super) unsafe fn receive_short(&'static self, this: Use, spans: &[iovec], flags: MessageFlags) -> ShortRead {
        let [span] = spans else { return ShortRead::UseReadTo };
        if !flags.is_simple() || span.iov_len == 0 {
            return ShortRead::UseReadTo;
        }
        let Ok((mut receiver, _)) = this.receiver() else { return ShortRead::UseReadTo };
        // SAFETY: the span is writable for its length, by this function's contract.
        let (read, wakes_sender) = unsafe { receiver.read_short(span) };
        if !matches!(read, ShortRead::Read(_)) {
            return read;
        }
        drop(receiver);
        self.is_answering.store(true, Ordering::Relaxed);
        if wakes_sender {
            self.ring();
        }
        read
    }

    /// Tries to receive a record, again and again, for as long as `spin` says.
    ///
    /// # Safety
    /// Every span is writable for its length.
    #[inline(always)]
    pub(super) unsafe fn receive_spinning(
        &'static self,
        call: &Call,
        spin: &mut Spin,
        deadline: Deadline,
    ) -> ShortRead {
        for _ in 0..ATTEMPTS_MAX {
            // SAFETY: every span is writable for its length, by this function's contract.
            let read = unsafe { self.receive_short(call.this, call.spans, call.flags) };
            if read != ShortRead::Empty || spin.iterate() != Action::Poll || deadline.check_signals().is_err() {
                return read;
            }
        }
        ShortRead::Empty
    }

    /// Sends the bytes of one span as a record. Returns whether it has.
    ///
    /// # Safety
    /// Every span is readable for its length.
    #[inline(always)] // As above.
    pub(super) unsafe fn send_short(&'static self, this: Use, spans: &[iovec], flags: MessageFlags) -> bool {
        let [span] = spans else { return false };
        if !flags.is_simple() {
            return false;
        }
        let Ok((mut sender, _)) = this.sender() else { return false };
        let is_answer = self.is_answering.load(Ordering::Relaxed);
        // SAFETY: the span is readable for its length, by this function's contract.
        let Some(wakes_receiver) = (unsafe { sender.write_short(span, is_answer) }) else { return false };
        drop(sender);
        if is_answer {
            self.is_answering.store(false, Ordering::Relaxed);
        }
        if wakes_receiver {
            self.ring();
        }
        true
    }
}
