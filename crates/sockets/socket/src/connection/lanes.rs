//! LANES

use super::lane_kinds::{LaneReceiver, LaneSender};
use super::yielding_copy::copy_yielding;
use lane::{Corrupt, INLINE_BYTES};
use segment::{PeerStatus, Receiver, Segment, Sender};
use std::cell::UnsafeCell;

/// The lanes of a connection and the memory they are in.
pub(super) struct Lanes {
    /// Under the send lock.
    pub(super) sender: UnsafeCell<LaneSender>,
    /// Under the receive lock.
    pub(super) receiver: UnsafeCell<LaneReceiver>,
    /// A second view of the incoming lane, for looking at it without a lock. Written, like the receiver, under both
    /// locks, and while the incoming lane is not in use.
    pub(super) observer: UnsafeCell<LaneReceiver>,
    pub(super) segment: Segment,
    /// Where the incoming lane lies, if not in `segment`: both ends have got lanes at the same time. Written under both
    /// locks.
    pub(super) inbound: UnsafeCell<Option<Segment>>,
}

impl Lanes {
    /// The view of the incoming lane that needs no lock.
    #[inline(always)]
    pub(super) fn observer(&self) -> &LaneReceiver {
        // SAFETY: written only while the incoming lane is not in use, and so nobody looks at it.
        unsafe { &*self.observer.get() }
    }

    /// Tells the peer, wherever it looks. Under a lock.
    pub(super) fn publish_status(&self, word: PeerStatus, value: u64) {
        self.segment.publish(word, value);
        // SAFETY: under a lock, and written under both.
        if let Some(inbound) = unsafe { &*self.inbound.get() } {
            inbound.publish(word, value);
        }
    }

    /// Notes in [`OwnState::ByLane`] what the peer is to find there: [`IS_CONFINED`], [`RAISES_SIGNAL`]. Under both locks.
    pub(super) fn note_by_lane(&self, note: u64) {
        self.segment.note_by_lane(note);
        // SAFETY: under both locks.
        if let Some(inbound) = unsafe { &*self.inbound.get() } {
            inbound.note_by_lane(note);
        }
    }

    pub(super) fn are_plain(&self) -> bool {
        // SAFETY: nobody else has the lanes yet; and which kind an end is of never changes.
        unsafe {
            matches!((&*self.sender.get(), &*self.receiver.get()), (LaneSender::Plain(_), LaneReceiver::Plain(_)))
        }
    }
}

impl Lanes {
    /// Whether long copies are made in pieces.
    pub(super) fn yields_in_copies(&self, len_bytes: usize) -> bool {
        len_bytes > INLINE_BYTES && self.segment.status(PeerStatus::GiveWay) != 0
    }

    /// As [`LaneSender::write_from`], giving way to others where the peer asks for it.
    ///
    /// # Safety
    /// As that, with the send lock's sender.
    pub(super) unsafe fn write_from(
        &self,
        sender: &mut LaneSender,
        source: *const u8,
        len_bytes: usize,
    ) -> Result<usize, Corrupt> {
        if !self.yields_in_copies(len_bytes) {
            // SAFETY: the caller's.
            return unsafe { sender.write_from(source, len_bytes) };
        }
        // SAFETY: a part of what the caller says is readable.
        copy_yielding(len_bytes, |begin, len_bytes| unsafe { sender.write_from(source.add(begin), len_bytes) })
    }

    /// As [`LaneReceiver::read_to`], giving way to others where the peer asks for it.
    ///
    /// # Safety
    /// As that, with the receive lock's receiver.
    pub(super) unsafe fn read_to(
        &self,
        receiver: &mut LaneReceiver,
        destination: *mut u8,
        len_bytes: usize,
    ) -> Result<usize, Corrupt> {
        if !self.yields_in_copies(len_bytes) {
            // SAFETY: the caller's.
            return unsafe { receiver.read_to(destination, len_bytes) };
        }
        // SAFETY: a part of what the caller says is writable.
        copy_yielding(len_bytes, |begin, len_bytes| unsafe { receiver.read_to(destination.add(begin), len_bytes) })
    }
}

impl Lanes {
    /// Whether the peer has read all that was sent. Looks at two words of the sender without its lock: both only grow.
    pub(super) fn is_sent_data_drained(&self) -> bool {
        // SAFETY: a shared view of the sender, whose words are atomic; `is_drained` changes nothing.
        unsafe { (*self.sender.get()).is_drained() }
    }
}

/// Lanes both whose ends are plain ones.
#[derive(Clone, Copy)]
pub(super) struct PlainLanes<'a>(pub(super) &'a Lanes);

impl PlainLanes<'_> {
    /// # Safety
    /// Under the send lock, and only one at a time.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // The lock is what makes it unique.
    pub(super) unsafe fn sender(&self) -> &mut Sender {
        // SAFETY: the caller's; and there are no others of this type.
        match unsafe { &mut *self.0.sender.get() } {
            LaneSender::Plain(sender) => sender,
            // SAFETY: as above.
            LaneSender::Timed(_) | LaneSender::LocalPage(_) => unsafe { std::hint::unreachable_unchecked() },
        }
    }

    /// # Safety
    /// Under the receive lock, and only one at a time.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // As above.
    pub(super) unsafe fn receiver(&self) -> &mut Receiver {
        // SAFETY: the caller's; and there are no others of this type.
        match unsafe { &mut *self.0.receiver.get() } {
            LaneReceiver::Plain(receiver) => receiver,
            // SAFETY: as above.
            LaneReceiver::Timed(_) | LaneReceiver::LocalPage(_) => unsafe { std::hint::unreachable_unchecked() },
        }
    }
}
