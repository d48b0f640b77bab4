//! The endpoints of a lane in each kind of memory: ordinary memory, the windows of a modelled link, and memory that is
//! not ordinary.
//!
//! The paths of short messages test for ordinary memory first and do not come here; all other calls dispatch on the
//! kind.

use crate::accounting::memory_budget;
use crate::options::SEGMENT_BYTES_MAX;
use crate::process::buffer;
use fabric::{Inbound, Outbound};
use lane::{Chunk, Corrupt, MemoryRelease, Producer, ShortRead, Urgent, UrgentHandling};
use rustix::io::Errno;
use segment::{LocalPageReceiver, LocalPageSender, Receiver, Segment, Sender, TimedReceiver, TimedSender};
use std::ptr::NonNull;

/// Sends of this many bytes or more are not held back.
pub(super) const HELD_BYTES_MAX: usize = SEGMENT_BYTES_MAX as usize;

/// Bytes of one record that a system call of the program fills, where the lane cannot be filled in place.
const STAGED_BYTES: usize = 16 << 10;

/// The sending endpoint of the outgoing lane.
#[allow(clippy::large_enum_variant, reason = "short messages find the plain one without another access to memory")]
pub(super) enum LaneSender {
    Plain(Sender),
    Timed(Box<TimedSender>),
    LocalPage(Box<LocalPageSender>),
}

/// The receiving endpoint of the incoming lane.
pub(super) enum LaneReceiver {
    Plain(Receiver),
    Timed(Box<TimedReceiver>),
    LocalPage(Box<LocalPageReceiver>),
}

/// Evaluates the same expression for each kind.
macro_rules! each_kind {
    ($endpoint:expr, $name:ident => $do:expr) => {
        match $endpoint {
            Self::Plain($name) => $do,
            Self::Timed($name) => $do,
            Self::LocalPage($name) => $do,
        }
    };
}

/// Defines methods that call the method of the same name, for each kind.
macro_rules! forward {
    (&self: $($(#[$attribute:meta])* $name:ident($($argument:ident: $type:ty)?) $(-> $result:ty)?;)*) => {$(
        $(#[$attribute])*
        pub(super) fn $name(&self $(, $argument: $type)?) $(-> $result)? {
            each_kind!(self, endpoint => endpoint.$name($($argument)?))
        }
    )*};
    (&mut self: $($(#[$attribute:meta])* $name:ident($($argument:ident: $type:ty)?) $(-> $result:ty)?;)*) => {$(
        $(#[$attribute])*
        pub(super) fn $name(&mut self $(, $argument: $type)?) $(-> $result)? {
            each_kind!(self, endpoint => endpoint.$name($($argument)?))
        }
    )*};
}

impl LaneSender {
    forward! { &self:
        held_bytes() -> usize;
        is_ring_writable() -> Result<bool, Corrupt>;
        unread_slots() -> Result<u64, Corrupt>;
        memory_bytes() -> usize;
        #[inline]
        position() -> u64;
        #[inline]
        demote_since(position: u64);
        is_writable() -> Result<bool, Corrupt>;
        is_drained() -> bool;
        announce_sleep();
    }

    forward! { &mut self:
        publish_held() -> bool;
        ask_for_room_next();
        release_memory() -> MemoryRelease;
        write(source: &[u8]) -> Result<usize, Corrupt>;
        #[inline]
        take_wake_request() -> bool;
        finish();
        set_capacity(bytes: usize);
    }

    /// Returns the sender of `segment`, of the kind of its memory.
    #[inline(never)] // Several are made at once, on a stack that may be small.
    pub(super) fn of(segment: &Segment) -> Self {
        let timed = segment.timed_sender().map(|sender| Self::Timed(Box::new(sender)));
        let special = timed.or_else(|| segment.local_page_sender().map(|sender| Self::LocalPage(Box::new(sender))));
        special.unwrap_or_else(|| {
            let mut sender = segment.sender();
            sender.set_budget(&memory_budget::PROCESS_BUDGET);
            Self::Plain(sender)
        })
    }

    /// Prepares a write: whether it may wait for the receiver, and its stamp. Returns the position where it begins.
    #[inline]
    pub(super) fn prepare(&mut self, may_wait: bool, stamp: u64) -> u64 {
        each_kind!(self, sender => {
            sender.forget_hold();
            sender.set_prefers_waiting(may_wait);
            sender.set_stamp(stamp);
            sender.position()
        })
    }

    /// Holds back the records that follow, in ordinary memory only.
    pub(super) fn begin_hold(&mut self, now_ms: u32) {
        if let Self::Plain(sender) = self {
            sender.begin_hold(now_ms);
        }
    }

    /// Ends the hold as [`Producer::end_hold`] does.
    #[inline]
    pub(super) fn end_hold(&mut self, stays: bool) {
        each_kind!(self, sender => sender.end_hold(stays, HELD_BYTES_MAX));
    }

    /// Writes as [`Producer::write_from`] does.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes`.
    #[inline]
    pub(super) unsafe fn write_from(&mut self, source: *const u8, len_bytes: usize) -> Result<usize, Corrupt> {
        // SAFETY: `source` is readable for `len_bytes`, by this function's contract.
        each_kind!(self, sender => unsafe { sender.write_from(source, len_bytes) })
    }

    /// Writes an urgent byte as [`Producer::write_urgent`] does. Only lanes of ordinary memory carry urgent bytes.
    pub(super) fn write_urgent(&mut self, urgent: Urgent) -> Result<bool, Corrupt> {
        each_kind!(self, sender => sender.write_urgent(urgent))
    }

    /// Sends at most `len_bytes` that `fill` writes to an address; it returns how many it wrote. Returns `None` if
    /// there is no room.
    ///
    /// # Errors
    /// Those of `fill`, and what `corrupt` returns for a peer that breaks the protocol.
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
            Self::Timed(sender) => fill_staged(sender, len_bytes, fill, corrupt),
            Self::LocalPage(sender) => fill_staged(sender, len_bytes, fill, corrupt),
        }
    }
}

/// Sends as [`LaneSender::fill`] does, by a lane that cannot be filled in place.
fn fill_staged<O: Outbound, I: Inbound>(
    sender: &mut Producer<O, I>,
    len_bytes: usize,
    fill: &mut impl FnMut(*mut u8, usize) -> Result<usize, Errno>,
    corrupt: impl Fn(Corrupt) -> Errno,
) -> Result<Option<usize>, Errno> {
    let Some(mut draft) = sender.draft(len_bytes.min(STAGED_BYTES)).map_err(corrupt)? else { return Ok(None) };
    let room_bytes = draft.room_bytes().min(STAGED_BYTES);
    let mut bytes = buffer::on_heap(room_bytes)?;
    let filled = fill(bytes.as_mut_ptr(), room_bytes)?.min(room_bytes);
    draft.append(&bytes[..filled]);
    draft.publish();
    Ok(Some(filled))
}

impl LaneReceiver {
    forward! { &self:
        #[inline(always)] // Polled in a loop.
        may_have_data() -> bool;
        urgent() -> Result<Option<Urgent>, Corrupt>;
        unread_bytes() -> Result<usize, Corrupt>;
        pointer(chunk: Chunk) -> NonNull<u8>;
        #[inline]
        may_be_held() -> bool;
        held_since_ms() -> Option<u32>;
        is_finished() -> bool;
        has_fin() -> bool;
        arrivals(seen: u64) -> Result<u64, Corrupt>;
        announce_sleep();
        #[inline(always)]
        last_stamp() -> u64;
        next_stamp() -> Option<u64>;
    }

    forward! { &mut self:
        take_urgent() -> Result<Option<Urgent>, Corrupt>;
        peek() -> Result<Option<Chunk>, Corrupt>;
        set_capacity(bytes: usize);
        publish_held() -> bool;
        #[inline]
        take_wake_request() -> bool;
    }

    /// Returns the receiver of `segment`, of the kind of its memory.
    #[inline(never)] // Several are made at once, on a stack that may be small.
    pub(super) fn of(segment: &Segment) -> Self {
        let timed = segment.timed_receiver().map(|receiver| Self::Timed(Box::new(receiver)));
        let special =
            timed.or_else(|| segment.local_page_receiver().map(|receiver| Self::LocalPage(Box::new(receiver))));
        special.unwrap_or_else(|| Self::Plain(segment.receiver()))
    }

    /// Reads as [`lane::Consumer::read_to`] does.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes`.
    #[inline]
    pub(super) unsafe fn read_to(&mut self, destination: *mut u8, len_bytes: usize) -> Result<usize, Corrupt> {
        // SAFETY: `destination` is writable for `len_bytes`, by this function's contract.
        let read = each_kind!(self, receiver => unsafe { receiver.read_to(destination, len_bytes) });
        if let Ok(1..) = read {
            self.note_read();
        }
        read
    }

    /// Copies unread bytes as [`lane::Consumer::peek_to`] does.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes`.
    pub(super) unsafe fn peek_to(
        &self,
        skip_bytes: usize,
        destination: *mut u8,
        len_bytes: usize,
        at_urgent: impl FnMut(Urgent, bool) -> UrgentHandling,
    ) -> Result<usize, Corrupt> {
        // SAFETY: `destination` is writable for `len_bytes`, by this function's contract.
        each_kind!(self, receiver => unsafe { receiver.peek_to(skip_bytes, destination, len_bytes, at_urgent) })
    }

    pub(super) fn unread_bytes_with(
        &self,
        at_urgent: impl FnMut(Urgent, bool) -> UrgentHandling,
    ) -> Result<usize, Corrupt> {
        each_kind!(self, receiver => receiver.unread_bytes_with(at_urgent))
    }

    pub(super) fn consume(&mut self, len_bytes: usize) -> Result<(), Corrupt> {
        let consumed = each_kind!(self, receiver => receiver.consume(len_bytes));
        self.note_read();
        consumed
    }

    /// Reports to the peer what was read, after each receive. Credit in quarters of a ring would suffice for room, but
    /// a peer whose endpoint is killed must know exactly what it has left unread, as the kernel would.
    fn note_read(&self) {
        if let Self::LocalPage(receiver) = self {
            receiver.return_all_credit();
        }
    }
}

/// The sending endpoint of a lane as short sends use it: [`Sender`] for ordinary memory, [`LaneSender`] for any memory.
pub(super) trait ShortSender {
    /// Prepares a write that does not wait, with its stamp.
    fn prepare_short(&mut self, stamp: u64);

    /// Writes as [`Producer::write_short_from`] does.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes`.
    unsafe fn write_short(&mut self, source: *const u8, len_bytes: usize, is_awaited: bool) -> bool;

    /// Returns whether the receiver has asked for a ring, and clears that.
    fn take_wake(&mut self) -> bool;
}

impl ShortSender for Sender {
    #[inline(always)]
    fn prepare_short(&mut self, stamp: u64) {
        self.set_stamp(stamp);
    }

    #[inline(always)]
    unsafe fn write_short(&mut self, source: *const u8, len_bytes: usize, is_awaited: bool) -> bool {
        // SAFETY: `source` is readable for `len_bytes`, by this function's contract.
        unsafe { self.write_short_from(source, len_bytes, is_awaited) }
    }

    #[inline(always)]
    fn take_wake(&mut self) -> bool {
        self.take_wake_request()
    }
}

impl ShortSender for LaneSender {
    fn prepare_short(&mut self, stamp: u64) {
        self.prepare(false, stamp);
    }

    unsafe fn write_short(&mut self, source: *const u8, len_bytes: usize, is_awaited: bool) -> bool {
        // SAFETY: `source` is readable for `len_bytes`, by this function's contract.
        each_kind!(self, sender => unsafe { sender.write_short_from(source, len_bytes, is_awaited) })
    }

    fn take_wake(&mut self) -> bool {
        self.take_wake_request()
    }
}

/// The receiving endpoint of a lane as short receives use it: [`Receiver`] for ordinary memory, [`LaneReceiver`] for
/// any memory.
pub(super) trait ShortReceiver {
    /// Reads as [`lane::Consumer::read_short_to`] does.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes`.
    unsafe fn read_short(&mut self, destination: *mut u8, len_bytes: usize) -> ShortRead;

    /// Returns the stamp of the record that was read.
    fn stamp(&self) -> u64;

    /// Returns whether the sender has asked for a ring, and clears that.
    fn take_wake(&mut self) -> bool;
}

impl ShortReceiver for Receiver {
    #[inline(always)]
    unsafe fn read_short(&mut self, destination: *mut u8, len_bytes: usize) -> ShortRead {
        // SAFETY: `destination` is writable for `len_bytes`, by this function's contract.
        unsafe { self.read_short_to(destination, len_bytes) }
    }

    #[inline(always)]
    fn stamp(&self) -> u64 {
        self.last_stamp()
    }

    #[inline(always)]
    fn take_wake(&mut self) -> bool {
        self.take_wake_request()
    }
}

impl ShortReceiver for LaneReceiver {
    unsafe fn read_short(&mut self, destination: *mut u8, len_bytes: usize) -> ShortRead {
        // SAFETY: `destination` is writable for `len_bytes`, by this function's contract.
        let next = each_kind!(self, receiver => unsafe { receiver.read_short_to(destination, len_bytes) });
        if let ShortRead::Read(_) = next {
            self.note_read();
        }
        next
    }

    fn stamp(&self) -> u64 {
        self.last_stamp()
    }

    fn take_wake(&mut self) -> bool {
        self.take_wake_request()
    }
}
