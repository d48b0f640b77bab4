//! The two lanes of a connection.

use super::lane_kinds::{LaneReceiver, LaneSender};
use super::yielding_copy::copy_yielding;
use lane::{Corrupt, INLINE_BYTES};
use segment::{PeerStatus, Receiver, Segment, Sender};
use std::cell::UnsafeCell;

/// The lanes of a connection and their memory.
pub(super) struct Lanes {
    /// Protected by the send lock.
    pub(super) sender: UnsafeCell<LaneSender>,
    /// Protected by the receive lock.
    pub(super) receiver: UnsafeCell<LaneReceiver>,
    /// A second view of the incoming lane, which is polled without a lock. Written under both locks, as the receiver
    /// is, while the incoming lane is not in use.
    pub(super) observer: UnsafeCell<LaneReceiver>,
    pub(super) segment: Segment,
    /// The memory of the incoming lane, if it is not `segment`: both endpoints have switched to lanes at the same time.
    /// Written under both locks.
    pub(super) inbound: UnsafeCell<Option<Box<Segment>>>,
}

impl Lanes {
    /// Returns the lanes in `segment`. Not inlined, so that they are on the stack once only: the stack of a thread may
    /// be small.
    #[inline(never)]
    pub(super) fn new(segment: Segment) -> Self {
        Self {
            sender: UnsafeCell::new(LaneSender::of(&segment)),
            receiver: UnsafeCell::new(LaneReceiver::of(&segment)),
            observer: UnsafeCell::new(LaneReceiver::of(&segment)),
            segment,
            inbound: UnsafeCell::new(None),
        }
    }

    /// Returns the view of the incoming lane that needs no lock.
    #[inline(always)]
    pub(super) fn observer(&self) -> &LaneReceiver {
        // SAFETY: the cell is written only while the incoming lane is not in use, when no thread polls it.
        unsafe { &*self.observer.get() }
    }

    /// Publishes a status to the peer in each segment that the peer polls. The caller holds a lock of the connection.
    pub(super) fn publish_status(&self, word: PeerStatus, value: u64) {
        self.segment.publish(word, value);
        // SAFETY: the cell is written only under both locks, and the caller holds one.
        if let Some(inbound) = unsafe { &*self.inbound.get() } {
            inbound.publish(word, value);
        }
    }

    /// Sets bits of [`OwnState::ByLane`](segment::OwnState::ByLane) that the peer reads, such as
    /// [`IS_CONFINED`](segment::IS_CONFINED) and [`RAISES_SIGNAL`](segment::RAISES_SIGNAL). The caller holds both
    /// locks.
    pub(super) fn note_by_lane(&self, note: u64) {
        self.segment.note_by_lane(note);
        // SAFETY: the caller holds both locks, under which the cell is written.
        if let Some(inbound) = unsafe { &*self.inbound.get() } {
            inbound.note_by_lane(note);
        }
    }

    /// Returns whether both lanes are in ordinary memory. The caller holds both locks.
    pub(super) fn are_plain(&self) -> bool {
        // SAFETY: the lanes are not shared yet, and the kind of an endpoint never changes.
        unsafe {
            matches!((&*self.sender.get(), &*self.receiver.get()), (LaneSender::Plain(_), LaneReceiver::Plain(_)))
        }
    }
}

impl Lanes {
    /// Returns whether a copy of `len_bytes` yields between chunks.
    pub(super) fn yields_in_copies(&self, len_bytes: usize) -> bool {
        len_bytes > INLINE_BYTES && self.segment.status(PeerStatus::GiveWay) != 0
    }

    /// Writes as [`LaneSender::write_from`] does, and yields between chunks where the peer asks for it.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes`, and `sender` is that of these lanes, under the send lock.
    pub(super) unsafe fn write_from(
        &self,
        sender: &mut LaneSender,
        source: *const u8,
        len_bytes: usize,
    ) -> Result<usize, Corrupt> {
        if !self.yields_in_copies(len_bytes) {
            // SAFETY: `source` is readable for `len_bytes`, by this function's contract.
            return unsafe { sender.write_from(source, len_bytes) };
        }
        // SAFETY: each chunk is a part of the `len_bytes` that are readable, by this function's contract.
        copy_yielding(len_bytes, |begin, len_bytes| unsafe { sender.write_from(source.add(begin), len_bytes) })
    }

    /// Reads as [`LaneReceiver::read_to`] does, and yields between chunks where the peer asks for it.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes`, and `receiver` is that of these lanes, under the receive lock.
    pub(super) unsafe fn read_to(
        &self,
        receiver: &mut LaneReceiver,
        destination: *mut u8,
        len_bytes: usize,
    ) -> Result<usize, Corrupt> {
        if !self.yields_in_copies(len_bytes) {
            // SAFETY: `destination` is writable for `len_bytes`, by this function's contract.
            return unsafe { receiver.read_to(destination, len_bytes) };
        }
        // SAFETY: each chunk is a part of the `len_bytes` that are writable, by this function's contract.
        copy_yielding(len_bytes, |begin, len_bytes| unsafe { receiver.read_to(destination.add(begin), len_bytes) })
    }
}

impl Lanes {
    /// Returns whether the peer has read all that was sent. Needs no lock: it compares two words of the sender that
    /// only grow.
    pub(super) fn is_sent_data_drained(&self) -> bool {
        // SAFETY: `is_drained` takes a shared reference and reads only atomic words.
        unsafe { (*self.sender.get()).is_drained() }
    }
}

/// Lanes that are both in ordinary memory.
#[derive(Clone, Copy)]
pub(super) struct PlainLanes<'a>(pub(super) &'a Lanes);

impl<'a> PlainLanes<'a> {
    /// Returns the sending endpoint.
    ///
    /// # Safety
    /// The caller holds the send lock, and no other reference to the sender exists.
    #[inline(always)]
    pub(super) unsafe fn sender(self) -> &'a mut Sender {
        // SAFETY: the caller holds the send lock and has no other reference to the sender, by this function's contract.
        match unsafe { &mut *self.0.sender.get() } {
            LaneSender::Plain(sender) => sender,
            // SAFETY: this type is made only of lanes whose sender is in ordinary memory.
            LaneSender::Timed(_) | LaneSender::LocalPage(_) => unsafe { std::hint::unreachable_unchecked() },
        }
    }

    /// Returns the receiving endpoint.
    ///
    /// # Safety
    /// The caller holds the receive lock, and no other reference to the receiver exists.
    #[inline(always)]
    pub(super) unsafe fn receiver(self) -> &'a mut Receiver {
        // SAFETY: the caller holds the receive lock and has no other reference to the receiver, by this function's
        // contract.
        match unsafe { &mut *self.0.receiver.get() } {
            LaneReceiver::Plain(receiver) => receiver,
            // SAFETY: this type is made only of lanes whose receiver is in ordinary memory.
            LaneReceiver::Timed(_) | LaneReceiver::LocalPage(_) => unsafe { std::hint::unreachable_unchecked() },
        }
    }
}
