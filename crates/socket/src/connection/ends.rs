//! The ends of lanes in plain memory, or over a link that is slowed down to a model. Short messages in plain memory
//! are found before anybody asks which it is; everything else is asked here.

use crate::segment::{Receiver, Segment, Sender, TimedReceiver, TimedSender};
use lane::{Chunk, Corrupt};
use rustix::io::Errno;
use std::ptr::NonNull;

/// Bytes that go at once where a program's call writes what is sent, and the lane cannot be written in place.
const STAGED_BYTES: usize = 16 << 10;

/// The sending end of the outgoing lane.
pub(super) enum Sending {
    Plain(Sender),
    Timed(Box<TimedSender>),
}

/// The receiving end of the incoming lane.
pub(super) enum Receiving {
    Plain(Receiver),
    Timed(Box<TimedReceiver>),
}

/// Does the same with either.
macro_rules! either {
    ($end:expr, $name:ident => $do:expr) => {
        match $end {
            Self::Plain($name) => $do,
            Self::Timed($name) => $do,
        }
    };
}

impl Sending {
    pub(super) fn of(segment: &Segment) -> Self {
        segment.timed_sender().map_or_else(|| Self::Plain(segment.sender()), |sender| Self::Timed(Box::new(sender)))
    }

    /// # Safety
    /// `source` is readable for `len_bytes`.
    #[inline]
    pub(super) unsafe fn write_from(&mut self, source: *const u8, len_bytes: usize) -> Result<usize, Corrupt> {
        // SAFETY: the caller's.
        either!(self, sender => unsafe { sender.write_from(source, len_bytes) })
    }

    pub(super) fn write(&mut self, source: &[u8]) -> Result<usize, Corrupt> {
        either!(self, sender => sender.write(source))
    }

    /// Sends what `fill` writes to an address, at most so many bytes; it answers how many. `None`: there is no room.
    ///
    /// # Errors
    /// What `fill` answers, or what `corrupt` makes of an end that breaks the protocol.
    pub(super) fn fill(
        &mut self,
        len_bytes: usize,
        fill: &mut impl FnMut(*mut u8, usize) -> Result<usize, Errno>,
        corrupt: impl Fn(Corrupt) -> Errno,
    ) -> Result<Option<usize>, Errno> {
        match self {
            Self::Plain(sender) => {
                let Some(room) = sender.reserve(len_bytes).map_err(&corrupt)? else { return Ok(None) };
                let filled = fill(room.pointer.as_ptr(), room.len_bytes)?.min(room.len_bytes);
                sender.commit(filled).map_err(corrupt)?;
                Ok(Some(filled))
            }
            Self::Timed(sender) => {
                let Some(mut draft) = sender.draft(len_bytes.min(STAGED_BYTES)).map_err(corrupt)? else {
                    return Ok(None);
                };
                let mut bytes = [0; STAGED_BYTES];
                let room_bytes = draft.room_bytes().min(STAGED_BYTES);
                let filled = fill(bytes.as_mut_ptr(), room_bytes)?.min(room_bytes);
                draft.append(&bytes[..filled]);
                draft.publish();
                Ok(Some(filled))
            }
        }
    }

    #[inline]
    pub(super) fn take_wake_request(&mut self) -> bool {
        either!(self, sender => sender.take_wake_request())
    }

    #[inline]
    pub(super) fn position(&self) -> u64 {
        either!(self, sender => sender.position())
    }

    #[inline]
    pub(super) fn hand_over_since(&self, position: u64) {
        either!(self, sender => sender.hand_over_since(position));
    }

    pub(super) fn finish(&mut self) {
        either!(self, sender => sender.finish());
    }

    pub(super) fn is_writable(&self) -> Result<bool, Corrupt> {
        either!(self, sender => sender.is_writable())
    }

    pub(super) fn is_drained(&self) -> bool {
        either!(self, sender => sender.is_drained())
    }

    pub(super) fn set_capacity(&mut self, bytes: usize) {
        either!(self, sender => sender.set_capacity(bytes));
    }

    pub(super) fn announce_sleep(&self) {
        either!(self, sender => sender.announce_sleep());
    }
}

impl Receiving {
    pub(super) fn of(segment: &Segment) -> Self {
        let timed = segment.timed_receiver();
        timed.map_or_else(|| Self::Plain(segment.receiver()), |receiver| Self::Timed(Box::new(receiver)))
    }

    #[inline(always)] // Looked at in a loop.
    pub(super) fn may_have_data(&self) -> bool {
        either!(self, receiver => receiver.may_have_data())
    }

    /// # Safety
    /// `destination` is writable for `len_bytes`.
    #[inline]
    pub(super) unsafe fn read_to(&mut self, destination: *mut u8, len_bytes: usize) -> Result<usize, Corrupt> {
        // SAFETY: the caller's.
        either!(self, receiver => unsafe { receiver.read_to(destination, len_bytes) })
    }

    /// # Safety
    /// `destination` is writable for `len_bytes`.
    pub(super) unsafe fn peek_to(
        &self,
        skip_bytes: usize,
        destination: *mut u8,
        len_bytes: usize,
    ) -> Result<usize, Corrupt> {
        // SAFETY: the caller's.
        either!(self, receiver => unsafe { receiver.peek_to(skip_bytes, destination, len_bytes) })
    }

    pub(super) fn unread_bytes(&self) -> Result<usize, Corrupt> {
        either!(self, receiver => receiver.unread_bytes())
    }

    pub(super) fn peek(&mut self) -> Result<Option<Chunk>, Corrupt> {
        either!(self, receiver => receiver.peek())
    }

    pub(super) fn pointer(&self, chunk: Chunk) -> NonNull<u8> {
        either!(self, receiver => receiver.pointer(chunk))
    }

    pub(super) fn consume(&mut self, len_bytes: usize) -> Result<(), Corrupt> {
        either!(self, receiver => receiver.consume(len_bytes))
    }

    pub(super) fn set_capacity(&mut self, bytes: usize) {
        either!(self, receiver => receiver.set_capacity(bytes));
    }

    pub(super) fn is_finished(&self) -> bool {
        either!(self, receiver => receiver.is_finished())
    }

    pub(super) fn fin_is_coming(&self) -> bool {
        either!(self, receiver => receiver.fin_is_coming())
    }

    pub(super) fn arrivals(&self, seen: u64) -> Result<u64, Corrupt> {
        either!(self, receiver => receiver.arrivals(seen))
    }

    pub(super) fn announce_sleep(&self) {
        either!(self, receiver => receiver.announce_sleep());
    }

    #[inline]
    pub(super) fn take_wake_request(&mut self) -> bool {
        either!(self, receiver => receiver.take_wake_request())
    }
}
