//! Send and receive.

use super::bad_address::has_bad_address;
use super::cork::HELD_BYTES_MAX;
use super::ends::{LaneReceiver, LaneSender};
use super::observer;
use super::reclaim;
use super::wait::{BlockingCall, Deadline, Room};
use super::yielding_copy::copy_yielding;
use super::{Connection, Lanes, PeerState, SHUTDOWN_READ, SHUTDOWN_WRITE};
use crate::process::blocking;
use crate::process::clock::{note_stamp, stamp};
use crate::process::sandbox;
use crate::process::system;
use crate::process::threads;
use lane::{Corrupt, INLINE_BYTES, ShortRead};
use libc::iovec;
use rustix::io::Errno;
use segment::{OwnState, PeerStatus};
use stats_page::ConnectionSlot;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use wait::{Action, Spin};

/// What a call asks for beyond moving bytes: the `MSG_` flags that a stream knows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flags {
    /// `MSG_DONTWAIT`.
    pub dont_wait: bool,
    /// `MSG_PEEK`.
    pub peek: bool,
    /// `MSG_WAITALL`.
    pub wait_all: bool,
    /// `MSG_TRUNC`: count the bytes, do not copy them.
    pub discard: bool,
    /// `MSG_MORE`.
    pub more: bool,
}

impl Flags {
    /// From the flags of a C call; those without meaning for a stream are ignored, as TCP does.
    #[inline]
    pub fn from_bits(bits: i32) -> Self {
        Self {
            dont_wait: bits & libc::MSG_DONTWAIT != 0,
            peek: bits & libc::MSG_PEEK != 0,
            wait_all: bits & libc::MSG_WAITALL != 0,
            discard: bits & libc::MSG_TRUNC != 0,
            more: bits & libc::MSG_MORE != 0,
        }
    }
}

/// So often a receive tries to read before it waits: some microseconds, as long as a peer takes that answers at once.
const SPIN_ATTEMPTS_MAX: u32 = 400;

/// Most bytes of a file that are taken for a peer that has just gone.
const CLOSED_PEER_FILE_BYTES_MAX: usize = 4096;

/// A file of more bytes is sent by the kernel before there are lanes.
const FILE_BYTES_MIN: usize = 16 << 10;

/// What one look at a lane brought.
pub(super) enum Step {
    Moved(usize),
    End,
    Nothing,
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
    unsafe fn write_from(
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
    unsafe fn read_to(
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

/// Bytes in all spans together.
#[inline]
pub fn total_bytes(spans: &[iovec]) -> usize {
    spans.iter().fold(0, |total, span| total.saturating_add(span.iov_len))
}

impl Connection {
    /// Receives into `spans`, in order; returns how many bytes, zero at the end of the stream.
    ///
    /// # Errors
    /// `AGAIN` when nothing is there and the call does not wait, or its time is up; `INTR`; `CONNRESET`; `BADF` when
    /// closed meanwhile; `FAULT` for a span where no program has memory.
    ///
    /// # Safety
    /// Every other span is writable for its length.
    #[inline(always)] // As its short path.
    pub unsafe fn receive(&'static self, spans: &[iovec], flags: Flags) -> Result<usize, Errno> {
        if has_bad_address(spans) {
            // SAFETY: our caller says that every span that is somewhere is writable.
            return unsafe { self.receive_with_bad_address(spans, flags) };
        }
        // SAFETY: no span is nowhere, so that each is writable, as our caller says.
        unsafe { self.receive_checked(spans, flags) }
    }

    /// # Safety
    /// As [`Connection::receive`].
    #[inline(always)] // As that.
    pub(super) unsafe fn receive_checked(&'static self, spans: &[iovec], flags: Flags) -> Result<usize, Errno> {
        let generation = self.generation();
        // SAFETY: the caller's spans.
        match unsafe { self.receive_short_any_lane(generation, spans, flags) } {
            ShortRead::Read(bytes) => Ok(bytes),
            // Nothing else is asked before the wait: a message that is on its way would have to wait for the answers.
            // SAFETY: as above.
            ShortRead::Empty if self.may_block(flags) => unsafe { self.receive_waiting(generation, spans, 0, flags) },
            // SAFETY: as above.
            next => unsafe { self.receive_any(generation, spans, flags, next == ShortRead::Empty) },
        }
    }

    /// A receive of what senders of short messages send: one record.
    #[inline(always)] // Most of what it spares is the work of being called.
    unsafe fn receive_short(&'static self, generation: u32, spans: &[iovec], flags: Flags) -> ShortRead {
        let [span] = spans else { return ShortRead::UseReadTo };
        let is_plain = !flags.peek && !flags.wait_all && !flags.discard && span.iov_len > 0;
        if !is_plain || self.low_water_bytes.load(Ordering::Relaxed) > 1 {
            return ShortRead::UseReadTo;
        }
        let Ok(guard) = self.lock_for_generation(generation, &self.receive_lock) else { return ShortRead::UseReadTo };
        let Some(plain) = self.plain_lanes() else { return ShortRead::UseReadTo };
        if self.has_other_holders(plain.0) {
            return ShortRead::UseReadTo;
        }
        // SAFETY: under the receive lock.
        let receiver = unsafe { plain.receiver() };
        // SAFETY: the caller's span.
        let next = unsafe { receiver.read_short_to(span.iov_base.cast(), span.iov_len) };
        let ShortRead::Read(bytes) = next else { return next };
        note_stamp(receiver.last_stamp());
        let wakes_sender = receiver.take_wake_request();
        guard.release();
        if wakes_sender {
            self.ring();
        }
        self.count_received(bytes, flags);
        next
    }

    /// As [`Connection::receive_short`], in any memory: asked only where there was no plain lane.
    #[inline(always)] // As that.
    unsafe fn receive_short_any_lane(&'static self, generation: u32, spans: &[iovec], flags: Flags) -> ShortRead {
        // SAFETY: the caller's spans.
        match unsafe { self.receive_short(generation, spans, flags) } {
            // SAFETY: as above.
            ShortRead::UseReadTo if !self.is_plain() => unsafe { self.receive_short_generic(generation, spans, flags) },
            next => next,
        }
    }

    #[cold]
    #[inline(never)]
    unsafe fn receive_short_generic(&'static self, generation: u32, spans: &[iovec], flags: Flags) -> ShortRead {
        let [span] = spans else { return ShortRead::UseReadTo };
        let is_plain = !flags.peek && !flags.wait_all && !flags.discard && span.iov_len > 0;
        if !is_plain || self.low_water_bytes.load(Ordering::Relaxed) > 1 {
            return ShortRead::UseReadTo;
        }
        let Ok(guard) = self.lock_for_generation(generation, &self.receive_lock) else { return ShortRead::UseReadTo };
        let may_take = |lanes: &&Lanes| self.receives_by_lane() && !self.has_other_holders(lanes);
        let Some(lanes) = self.lanes().filter(may_take) else { return ShortRead::UseReadTo };
        // SAFETY: under the receive lock.
        let receiver = unsafe { &mut *lanes.receiver.get() };
        // SAFETY: the caller's span.
        let next = unsafe { receiver.read_short_to(span.iov_base.cast(), span.iov_len) };
        let ShortRead::Read(bytes) = next else { return next };
        let wakes_sender = receiver.take_wake_request();
        drop(guard);
        if wakes_sender {
            self.ring();
        }
        self.count_received(bytes, flags);
        next
    }

    /// `was_empty`: there was nothing just now.
    #[inline(never)]
    unsafe fn receive_any(
        &'static self,
        generation: u32,
        spans: &[iovec],
        flags: Flags,
        was_empty: bool,
    ) -> Result<usize, Errno> {
        // SAFETY: the caller's spans, here and below.
        match unsafe { self.receive_now(generation, spans, 0, flags, was_empty)? } {
            Step::Moved(bytes) if self.is_enough(bytes, spans, flags) || self.ends_at_mark() => Ok(bytes),
            // SAFETY: as above.
            Step::Moved(bytes) => unsafe { self.receive_waiting(generation, spans, bytes, flags) },
            Step::End => Ok(0),
            // SAFETY: as above.
            Step::Nothing => unsafe { self.receive_waiting(generation, spans, 0, flags) },
        }
    }

    #[inline]
    pub(super) fn may_block(&self, flags: Flags) -> bool {
        !flags.dont_wait && !self.is_nonblocking.load(Ordering::Relaxed)
    }

    /// Whether a receive that has so many bytes is done: all with `MSG_WAITALL`, else as many as `SO_RCVLOWAT` says.
    #[inline]
    fn is_enough(&self, bytes: usize, spans: &[iovec], flags: Flags) -> bool {
        let low_water_bytes = self.low_water_bytes.load(Ordering::Relaxed) as usize;
        if !flags.wait_all && bytes >= low_water_bytes {
            return true;
        }
        let wanted = total_bytes(spans);
        bytes >= if flags.wait_all { wanted } else { wanted.min(low_water_bytes) }
    }

    unsafe fn receive_waiting(
        &'static self,
        generation: u32,
        spans: &[iovec],
        done: usize,
        flags: Flags,
    ) -> Result<usize, Errno> {
        let mut done = done;
        if !self.may_block(flags) {
            reclaim::reclaim_while_polling();
            return if done > 0 { Ok(done) } else { Err(Errno::AGAIN) };
        }
        let deadline = Deadline::after(self.receive_timeout_ns.load(Ordering::Relaxed));
        let mut call = BlockingCall::new(self);
        let mut spin = Some(Spin::with(&self.spin_history));
        if done == 0
            && let Some(spin) = &mut spin
            // SAFETY: the caller's spans.
            && let ShortRead::Read(bytes) = unsafe { self.receive_spinning(generation, spans, flags, spin) }
        {
            return Ok(bytes);
        }
        loop {
            let peeks_again = flags.peek && (done > 0 || self.ends_at_mark());
            let waited = if peeks_again {
                self.nap(deadline)
            } else {
                let spin = spin.take().unwrap_or_else(|| Spin::with(&self.spin_history));
                self.wait_to_receive(generation, &mut call, deadline, spin)
            };
            if let Err(error) = waited {
                return self.partial_receive(done, error);
            }
            if done == 0
                // SAFETY: the caller's spans.
                && let ShortRead::Read(bytes) = unsafe { self.receive_short_any_lane(generation, spans, flags) }
            {
                return Ok(bytes);
            }
            // Before the look: what arrived before the end is then seen.
            let is_last_attempt = peeks_again && self.has_input_ended();
            // What was peeked at is there still.
            let skip = if flags.peek { 0 } else { done };
            // SAFETY: the caller's spans.
            match unsafe { self.receive_now(generation, spans, skip, flags, false) } {
                Ok(Step::Moved(bytes)) => {
                    done = skip + bytes;
                    if is_last_attempt || self.is_enough(done, spans, flags) || self.ends_at_mark() {
                        return Ok(done);
                    }
                }
                Ok(Step::Nothing) if done > 0 && self.ends_at_mark() => return Ok(done),
                Ok(Step::End) => return Ok(done),
                Ok(Step::Nothing) => {}
                Err(error) => return self.partial_receive(done, error),
            }
        }
    }

    /// What a receive answers that has brought so many bytes, and then an error: that is the next call's.
    fn partial_receive(&'static self, done: usize, error: Errno) -> Result<usize, Errno> {
        if done == 0 {
            return Err(error);
        }
        self.defer_error(error);
        Ok(done)
    }

    /// Begins a wait by trying again and again: what comes within a moment is read where it is found. With several
    /// threads each try would cost two locked instructions, and a look without a lock is the quicker one.
    #[inline(always)] // As the short path in it.
    unsafe fn receive_spinning(
        &'static self,
        generation: u32,
        spans: &[iovec],
        flags: Flags,
        spin: &mut Spin,
    ) -> ShortRead {
        if threads::is_single() {
            if !self.is_plain() {
                // SAFETY: the caller's spans.
                return unsafe { self.receive_spinning_generic(generation, spans, flags, spin) };
            }
            for _ in 0..SPIN_ATTEMPTS_MAX {
                // SAFETY: the caller's spans.
                let next = unsafe { self.receive_short(generation, spans, flags) };
                if next != ShortRead::Empty || spin.iterate() != Action::Poll {
                    return next;
                }
            }
        }
        ShortRead::Empty
    }

    #[cold]
    #[inline(never)]
    unsafe fn receive_spinning_generic(
        &'static self,
        generation: u32,
        spans: &[iovec],
        flags: Flags,
        spin: &mut Spin,
    ) -> ShortRead {
        for _ in 0..SPIN_ATTEMPTS_MAX {
            // SAFETY: the caller's spans.
            let next = unsafe { self.receive_short_generic(generation, spans, flags) };
            if next != ShortRead::Empty || spin.iterate() != Action::Poll {
                return next;
            }
        }
        ShortRead::Empty
    }

    /// Whether the input has ended, read or not.
    fn has_input_ended(&'static self) -> bool {
        let _guard = self.lock_direction(&self.receive_lock);
        if self.is_on_lifeline() {
            return self.lifeline_has_no_more();
        }
        self.lanes().is_none_or(|lanes| {
            lanes.observer().has_fin()
                || self.peer_state(lanes) != PeerState::Alive
                || lanes.segment.load(OwnState::Shutdown) & SHUTDOWN_READ != 0
        })
    }

    #[inline]
    unsafe fn receive_now(
        &'static self,
        generation: u32,
        spans: &[iovec],
        skip: usize,
        flags: Flags,
        was_empty: bool,
    ) -> Result<Step, Errno> {
        if !self.receives_by_lane() {
            // SAFETY: our caller says that every span is writable for its length.
            match unsafe { self.receive_by_lifeline(generation, spans, skip, flags) }? {
                Some(Step::Moved(bytes))
                    if self.continues_by_lane() && !flags.peek && skip + bytes < total_bytes(spans) =>
                {
                    // SAFETY: the same spans, behind the bytes that were received.
                    let rest = unsafe { self.receive_by_lane(generation, spans, skip + bytes, flags, false) };
                    let more = match rest {
                        Ok(Step::Moved(more)) => more,
                        Ok(_) => 0,
                        Err(error) => {
                            self.defer_error(error);
                            0
                        }
                    };
                    return Ok(Step::Moved(bytes + more));
                }
                Some(step) => return Ok(step),
                None => {}
            }
        }
        // SAFETY: our caller says that every span is writable for its length.
        unsafe { self.receive_by_lane(generation, spans, skip, flags, was_empty) }
    }

    #[inline]
    pub(super) unsafe fn receive_by_lane(
        &'static self,
        generation: u32,
        spans: &[iovec],
        skip: usize,
        flags: Flags,
        was_empty: bool,
    ) -> Result<Step, Errno> {
        // SAFETY: the caller's spans.
        let copy = |lanes: &Lanes| unsafe { self.copy_in(lanes, spans, skip, flags) };
        let step = self.consume_with(generation, flags, was_empty, copy)?;
        Ok(if matches!(step, Step::Nothing) { self.nothing_or_empty_read(spans) } else { step })
    }

    /// Has `copy` take what is in the lane, and answers how many bytes that was, or what else there is to say. `flags`
    /// only tell how to count. `was_empty`: there was nothing to take just now.
    #[inline]
    pub(super) fn consume_with(
        &'static self,
        generation: u32,
        flags: Flags,
        was_empty: bool,
        mut copy: impl FnMut(&Lanes) -> Result<usize, Errno>,
    ) -> Result<Step, Errno> {
        let guard = self.lock_for_generation(generation, &self.receive_lock)?;
        let Some(lanes) = self.lanes() else {
            drop(guard);
            return self.attach_before_transfer();
        };
        let shared = self.lock_across_processes(lanes, OwnState::ReceiveLock)?;
        let mut moved = if was_empty && !lanes.observer().may_have_data() { 0 } else { copy(lanes)? };
        let mut end = false;
        if moved == 0 {
            self.poll_lifeline_periodically(lanes);
            end = self.end_of_input_after_data(lanes)?;
            if self.publish_held_if_due(lanes) || end {
                // What came before the end was written before it: look once more.
                moved = copy(lanes)?;
            }
        }
        // SAFETY: under the receive lock.
        let receiver = unsafe { &mut *lanes.receiver.get() };
        if moved > 0 {
            note_stamp(receiver.last_stamp());
        }
        let wakes_sender = moved > 0 && receiver.take_wake_request();
        drop(shared);
        drop(guard);
        if wakes_sender {
            self.ring();
        }
        if moved > 0 {
            self.count_received(moved, flags);
            return Ok(Step::Moved(moved));
        }
        Ok(if end { Step::End } else { Step::Nothing })
    }

    /// A call that asks for no bytes succeeds when there would be some.
    fn nothing_or_empty_read(&'static self, spans: &[iovec]) -> Step {
        if total_bytes(spans) != 0 {
            return Step::Nothing;
        }
        let _guard = self.lock_direction(&self.receive_lock);
        if self.lanes().is_some_and(|lanes| lanes.observer().may_have_data()) { Step::End } else { Step::Nothing }
    }

    /// The end of the input or an error, but only once nothing is left to read.
    fn end_of_input_after_data(&self, lanes: &Lanes) -> Result<bool, Errno> {
        if lanes.observer().may_have_data() && !lanes.observer().is_finished() && self.has_unread(lanes, 1) {
            return Ok(false);
        }
        self.end_of_input(lanes)
    }

    #[inline]
    unsafe fn copy_in(&self, lanes: &Lanes, spans: &[iovec], skip: usize, flags: Flags) -> Result<usize, Errno> {
        // SAFETY: our caller says that every span is writable for its length.
        let moved = unsafe { self.copy_in_to_mark(lanes, spans, skip, flags) }?;
        let wanted = total_bytes(spans).saturating_sub(skip);
        if moved >= wanted || flags.peek {
            return Ok(moved);
        }
        // SAFETY: our caller says that every span is writable for its length.
        let copy = |moved| unsafe { self.copy_in_to_mark(lanes, spans, skip + moved, flags) };
        let put = |moved, byte| {
            if !flags.discard {
                // SAFETY: the spans are writable, and have more bytes than were received.
                unsafe { put_byte(spans, skip + moved, byte) };
            }
        };
        self.receive_past_urgent(lanes, skip == 0, moved, wanted, copy, put)
    }

    #[inline]
    unsafe fn copy_in_to_mark(
        &self,
        lanes: &Lanes,
        spans: &[iovec],
        skip: usize,
        flags: Flags,
    ) -> Result<usize, Errno> {
        // SAFETY: under the receive lock.
        let receiver = unsafe { &mut *lanes.receiver.get() };
        let mut skip = skip;
        let mut moved = 0;
        for span in spans {
            let skipped = skip.min(span.iov_len);
            skip -= skipped;
            let wanted = span.iov_len - skipped;
            if wanted == 0 {
                continue;
            }
            let result = if flags.peek && flags.discard {
                Ok(self.unread_to_mark(lanes).saturating_sub(moved).min(wanted))
            } else if flags.peek {
                // SAFETY: the caller's span.
                unsafe { self.peek_to_mark(lanes, moved, span.iov_base.cast::<u8>().add(skipped), wanted) }
            } else if flags.discard {
                discard(receiver, wanted)
            } else {
                // SAFETY: the caller's span.
                unsafe { lanes.read_to(receiver, span.iov_base.cast::<u8>().add(skipped), wanted) }
            };
            let got = result.map_err(|corrupt| self.reset_for(lanes, corrupt))?;
            moved += got;
            if got < wanted {
                break;
            }
        }
        Ok(moved)
    }

    #[inline]
    pub(super) fn count_received(&self, bytes: usize, flags: Flags) {
        self.unanswered_sends.store(0, Ordering::Relaxed);
        if !flags.peek
            && let Some(slot) = self.slot()
        {
            slot.add_received(bytes as u64);
        }
    }

    /// Sends `spans`, in order; returns how many bytes went.
    ///
    /// # Errors
    /// `AGAIN` when there is no room and the call does not wait, or its time is up; `INTR`; `PIPE` (the caller raises
    /// the signal); `CONNRESET`; `BADF` when closed meanwhile; `FAULT` for a span where no program has memory.
    ///
    /// # Safety
    /// Every other span is readable for its length.
    #[inline(always)] // As its short path.
    pub unsafe fn send(&'static self, spans: &[iovec], flags: Flags) -> Result<usize, Errno> {
        if has_bad_address(spans) {
            // SAFETY: our caller says that every span that is somewhere is readable.
            return unsafe { self.send_with_bad_address(spans, flags) };
        }
        // SAFETY: no span is nowhere, so that each is readable, as our caller says.
        unsafe { self.send_checked(spans, flags) }
    }

    /// # Safety
    /// As [`Connection::send`].
    #[inline(always)] // As that.
    pub(super) unsafe fn send_checked(&'static self, spans: &[iovec], flags: Flags) -> Result<usize, Errno> {
        let generation = self.generation();
        // SAFETY: the caller's spans.
        match if flags.more { None } else { unsafe { self.send_short(generation, spans) } } {
            Some(bytes) => Ok(bytes),
            // SAFETY: as above.
            None => unsafe { self.send_any(generation, spans, flags) },
        }
    }

    /// A send of what is short, to a peer that is there and has room. `None`: nothing was sent.
    #[inline(always)] // Most of what it spares is the work of being called.
    unsafe fn send_short(&'static self, generation: u32, spans: &[iovec]) -> Option<usize> {
        let [span] = spans else { return None };
        let guard = self.lock_for_generation(generation, &self.send_lock).ok()?;
        let plain = self.plain_lanes()?;
        let lanes = plain.0;
        // SAFETY: under the send lock.
        let sender = unsafe { plain.sender() };
        // Or a question: the peer is waiting for it.
        let is_answer = self.unanswered_sends.load(Ordering::Relaxed) == 0;
        if !is_answer {
            self.poll_lifeline_periodically(lanes);
        }
        let snapshot = lanes.segment.snapshot();
        let is_shared = snapshot.holders > 1 && self.may_have_other_holders();
        if is_shared || self.has_ended_in(lanes, snapshot, SHUTDOWN_WRITE) {
            return None;
        }
        sender.set_stamp(stamp());
        // SAFETY: the caller's span.
        if !unsafe { sender.write_short_from(span.iov_base.cast(), span.iov_len, is_answer) } {
            return None;
        }
        let wakes_receiver = sender.take_wake_request();
        guard.release();
        if wakes_receiver {
            self.ring();
        }
        self.count_sent(span.iov_len);
        Some(span.iov_len)
    }

    /// As [`Connection::send_short`], in any memory: asked only where there was no plain lane.
    #[cold]
    #[inline(never)]
    unsafe fn send_short_generic(&'static self, generation: u32, spans: &[iovec]) -> Option<usize> {
        let [span] = spans else { return None };
        let guard = self.lock_for_generation(generation, &self.send_lock).ok()?;
        let lanes = self.lanes().filter(|_| self.sends_by_lane())?;
        let is_answer = self.unanswered_sends.load(Ordering::Relaxed) == 0;
        if !is_answer {
            self.poll_lifeline_periodically(lanes);
        }
        let snapshot = lanes.segment.snapshot();
        let is_shared = snapshot.holders > 1 && self.may_have_other_holders();
        if is_shared || self.has_ended_in(lanes, snapshot, SHUTDOWN_WRITE) {
            return None;
        }
        // SAFETY: under the send lock.
        let sender = unsafe { &mut *lanes.sender.get() };
        sender.prepare(false, stamp());
        // SAFETY: the caller's span.
        if !unsafe { sender.write_short_from(span.iov_base.cast(), span.iov_len, is_answer) } {
            return None;
        }
        let wakes_receiver = sender.take_wake_request();
        drop(guard);
        if wakes_receiver {
            self.ring();
        }
        self.count_sent(span.iov_len);
        Some(span.iov_len)
    }

    #[inline(never)]
    unsafe fn send_any(&'static self, generation: u32, spans: &[iovec], flags: Flags) -> Result<usize, Errno> {
        if self.sends_by_lane() && !self.receives_by_lane() {
            self.process_messages_periodically();
        }
        if !self.is_plain()
            // SAFETY: the caller's spans.
            && let Some(bytes) = unsafe { self.send_short_generic(generation, spans) }
        {
            return Ok(bytes);
        }
        let wanted = total_bytes(spans);
        // SAFETY: the caller's spans.
        let done = unsafe { self.send_now(generation, spans, 0, wanted, flags, self.may_block(flags)) }?;
        if done == wanted {
            return Ok(done);
        }
        // SAFETY: the caller's spans.
        unsafe { self.send_waiting(generation, spans, done, wanted, flags) }
    }

    unsafe fn send_waiting(
        &'static self,
        generation: u32,
        spans: &[iovec],
        done: usize,
        wanted: usize,
        flags: Flags,
    ) -> Result<usize, Errno> {
        let mut done = done;
        let dont_wait = !self.may_block(flags);
        let mut deadline = None;
        let mut call = BlockingCall::new(self);
        while done < wanted {
            if dont_wait {
                self.note_blocked_send();
                return if done > 0 { Ok(done) } else { Err(Errno::AGAIN) };
            }
            let deadline =
                *deadline.get_or_insert_with(|| Deadline::after(self.send_timeout_ns.load(Ordering::Relaxed)));
            let waited = self.wait_to_send(generation, &mut call, deadline);
            // SAFETY: the caller's spans.
            let go_on = |room| unsafe { self.send_now(generation, spans, done, wanted, flags, room == Room::InRing) };
            match waited.and_then(go_on) {
                Ok(bytes) => done += bytes,
                Err(error) if done > 0 => {
                    self.defer_error(error);
                    return Ok(done);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    #[inline]
    unsafe fn send_now(
        &'static self,
        generation: u32,
        spans: &[iovec],
        skip: usize,
        wanted: usize,
        flags: Flags,
        may_wait: bool,
    ) -> Result<usize, Errno> {
        let mut before = 0;
        let is_short = (1..HELD_BYTES_MAX).contains(&wanted);
        if !(if is_short { self.prepare_to_hold(flags) } else { self.sends_by_lane() }) {
            // SAFETY: our caller says that every span is readable for its length.
            let (sent, goes_on) = unsafe { self.send_by_lifeline(generation, spans, skip, wanted) }?;
            if !goes_on || (sent > 0 && skip + sent == wanted) {
                return Ok(sent);
            }
            before = sent;
        }
        // SAFETY: the same spans, behind the bytes that went by the lifeline.
        match unsafe { self.send_by_lane(generation, spans, skip + before, wanted, flags, may_wait) } {
            Err(error) if before > 0 => {
                self.defer_error(error);
                Ok(before)
            }
            sent => sent.map(|sent| before + sent),
        }
    }

    #[inline]
    unsafe fn send_by_lane(
        &'static self,
        generation: u32,
        spans: &[iovec],
        skip: usize,
        wanted: usize,
        flags: Flags,
        may_wait: bool,
    ) -> Result<usize, Errno> {
        let guard = self.lock_for_generation(generation, &self.send_lock)?;
        let Some(lanes) = self.lanes() else {
            drop(guard);
            return self.attach_before_transfer().map(|_| 0);
        };
        if self.unanswered_sends.load(Ordering::Relaxed) > 0 {
            self.poll_lifeline_periodically(lanes);
        }
        let shared = self.lock_across_processes(lanes, OwnState::SendLock)?;
        // Under the lock: another process that shuts down has not yet, or this one sees it.
        if !self.may_send(lanes, wanted - skip)? {
            return Ok(self.bytes_accepted_for_closed_peer(wanted - skip));
        }
        // SAFETY: under the send lock.
        let position = unsafe { (*lanes.sender.get()).prepare(may_wait, stamp()) };
        let holds = (1..HELD_BYTES_MAX).contains(&wanted) && self.begin_hold(lanes, flags);
        // SAFETY: the caller's spans.
        let sent = unsafe { self.copy_out(lanes, spans, skip, wanted) }?;
        if self.unanswered_sends.load(Ordering::Relaxed) == 0 {
            // An answer, or a question: the peer is waiting for it.
            // SAFETY: under the send lock.
            unsafe { (*lanes.sender.get()).demote_since(position) };
        }
        // SAFETY: under the send lock.
        let sender = unsafe { &mut *lanes.sender.get() };
        sender.end_hold(holds && skip + sent == wanted);
        let wakes_receiver = sent > 0 && sender.take_wake_request();
        self.note_growth(lanes);
        drop(shared);
        drop(guard);
        if wakes_receiver {
            self.ring();
        }
        if sent > 0 {
            self.count_sent(sent);
        }
        reclaim::reclaim_under_pressure();
        Ok(sent)
    }

    #[inline]
    pub(super) fn count_sent(&self, bytes: usize) {
        let unanswered = self.unanswered_sends.load(Ordering::Relaxed);
        self.unanswered_sends.store(unanswered.saturating_add(1), Ordering::Relaxed);
        if let Some(slot) = self.slot() {
            slot.add_sent(bytes as u64);
        }
    }

    #[inline]
    pub(super) unsafe fn copy_out(
        &self,
        lanes: &Lanes,
        spans: &[iovec],
        skip: usize,
        wanted: usize,
    ) -> Result<usize, Errno> {
        // SAFETY: under the send lock.
        let sender = unsafe { &mut *lanes.sender.get() };
        if let [span] = spans {
            // SAFETY: the caller's span.
            // SAFETY: within the caller's span.
            let begin = unsafe { span.iov_base.cast::<u8>().add(skip) };
            // SAFETY: the caller's span.
            return unsafe { lanes.write_from(sender, begin, wanted - skip) }
                .map_err(|corrupt| self.reset_for(lanes, corrupt));
        }
        if skip == 0 && wanted <= INLINE_BYTES {
            // SAFETY: the caller's spans.
            let (bytes, len_bytes) = unsafe { gather(spans) };
            return sender.write(&bytes[..len_bytes]).map_err(|corrupt| self.reset_for(lanes, corrupt));
        }
        let mut skip = skip;
        let mut sent = 0;
        for span in spans {
            let skipped = skip.min(span.iov_len);
            skip -= skipped;
            let len_bytes = span.iov_len - skipped;
            // SAFETY: the caller's span.
            let result = unsafe { lanes.write_from(sender, span.iov_base.cast::<u8>().add(skipped), len_bytes) };
            let written = result.map_err(|corrupt| self.reset_for(lanes, corrupt))?;
            sent += written;
            if written < len_bytes {
                break;
            }
        }
        Ok(sent)
    }

    /// Has the kernel send a part of a file by the lifeline, from `offset` or from where the file stands, which then
    /// moves: in one piece, where [`Connection::send_in_place`] would send some of it in pieces and get lanes for the
    /// rest. Answers how many bytes went; `None`: it is not on its lifeline, or would wait there, or there is something
    /// to say that `send_in_place` says.
    ///
    /// # Errors
    /// `BADF` when closed meanwhile.
    pub fn send_file_by_lifeline(
        &'static self,
        file: BorrowedFd<'_>,
        offset: Option<&mut i64>,
        len_bytes: usize,
    ) -> Result<Option<usize>, Errno> {
        if self.sends_by_lane() || len_bytes <= FILE_BYTES_MIN || !self.is_nonblocking.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let generation = self.generation();
        let _guard = self.lock_for_generation(generation, &self.send_lock)?;
        let is_early =
            !self.sends_by_lane() && !self.awaits_handshake.load(Ordering::Relaxed) && self.lanes().is_none();
        if !is_early || self.is_lifeline_output_closed() || self.state().0 != PeerState::Alive {
            return Ok(None);
        }
        let sent = system::send_file(self.borrow_lifeline(), file, offset, len_bytes).ok();
        self.note_sent_by_lifeline(sent.unwrap_or(0));
        Ok(sent)
    }

    /// Sends what `fill` puts into the lane in place, such as `read(2)` of a file. `fill` gets an address, a length and
    /// the bytes sent before, and answers how many bytes it wrote there, zero to stop. `is_at_end` says whether it
    /// would write none: then a connection that cannot send any more is no error. Returns the bytes sent, at most
    /// `len_bytes`.
    ///
    /// # Errors
    /// As [`Connection::send`]; or what `fill` answers, if nothing was sent before.
    pub fn send_in_place(
        &'static self,
        len_bytes: usize,
        flags: Flags,
        is_at_end: impl Fn() -> bool,
        mut fill: impl FnMut(*mut u8, usize, usize) -> Result<usize, Errno>,
    ) -> Result<usize, Errno> {
        let dont_wait = !self.may_block(flags);
        self.prepare_to_hold(flags);
        let generation = self.generation();
        let mut done = 0;
        let mut may_wait = !dont_wait;
        let mut call = BlockingCall::new(self);
        while done < len_bytes {
            let mut fill_rest = |pointer: *mut u8, len: usize| fill(pointer, len, done);
            match self.fill_once(generation, len_bytes - done, flags, may_wait, &is_at_end, &mut fill_rest) {
                Ok(Some(0)) => break,
                Ok(Some(bytes)) => done += bytes,
                Ok(None) if dont_wait => {
                    self.note_blocked_send();
                    return if done > 0 { Ok(done) } else { Err(Errno::AGAIN) };
                }
                Ok(None) => {
                    let deadline = Deadline::after(self.send_timeout_ns.load(Ordering::Relaxed));
                    match self.wait_to_send(generation, &mut call, deadline) {
                        Ok(room) => may_wait = room == Room::InRing,
                        Err(error) => return if done > 0 { Ok(done) } else { Err(error) },
                    }
                }
                Err(_) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    fn fill_once(
        &'static self,
        generation: u32,
        len_bytes: usize,
        flags: Flags,
        may_wait: bool,
        is_at_end: &impl Fn() -> bool,
        fill: &mut impl FnMut(*mut u8, usize) -> Result<usize, Errno>,
    ) -> Result<Option<usize>, Errno> {
        let mut guard = self.lock_for_generation(generation, &self.send_lock)?;
        if !self.sends_by_lane() && !self.awaits_handshake.load(Ordering::Relaxed) {
            let filled = self.fill_by_lifeline(len_bytes, is_at_end, fill)?;
            drop(guard);
            if filled.is_some() || !self.switch_to_lanes() {
                return Ok(filled);
            }
            guard = self.lock_for_generation(generation, &self.send_lock)?;
        }
        let Some(lanes) = self.lanes() else {
            drop(guard);
            return self.attach_before_transfer().map(|_| None);
        };
        self.poll_lifeline_periodically(lanes);
        if self.is_output_closed(lanes) && is_at_end() {
            return Ok(Some(0));
        }
        let _shared = self.lock_across_processes(lanes, OwnState::SendLock)?;
        if !self.may_send(lanes, len_bytes)? {
            return fill_and_discard(len_bytes, fill).map(Some);
        }
        // SAFETY: under the send lock.
        let sender = unsafe { &mut *lanes.sender.get() };
        sender.prepare(may_wait, stamp());
        let holds = self.begin_hold(lanes, flags);
        let filled = sender.fill(len_bytes, fill, |corrupt| self.reset_for(lanes, corrupt));
        sender.end_hold(holds && !matches!(filled, Ok(None)));
        self.note_growth(lanes);
        let Some(filled) = filled? else { return Ok(None) };
        if sender.take_wake_request() {
            self.ring();
        }
        if let Some(slot) = self.slot() {
            slot.add_sent(filled as u64);
        }
        Ok(Some(filled))
    }

    /// Under the send lock.
    fn fill_by_lifeline(
        &'static self,
        len_bytes: usize,
        is_at_end: &impl Fn() -> bool,
        fill: &mut impl FnMut(*mut u8, usize) -> Result<usize, Errno>,
    ) -> Result<Option<usize>, Errno> {
        if self.is_lifeline_output_closed() && is_at_end() {
            return Ok(Some(0));
        }
        if !self.may_fill_by_lifeline(len_bytes)? {
            return fill_and_discard(len_bytes, fill).map(Some);
        }
        let filled = self.fill_and_send(len_bytes, fill)?;
        if let (Some(filled), Some(slot)) = (filled, self.slot()) {
            slot.add_sent(filled as u64);
        }
        Ok(filled)
    }

    /// Bytes that this process has sent and received.
    pub fn carried_bytes(&'static self) -> (u64, u64) {
        let _guard = self.lock_direction(&self.send_lock);
        self.slot().map_or((0, 0), ConnectionSlot::carried_bytes)
    }

    /// Bytes that a receive would find now (`FIONREAD`).
    pub fn unread_bytes(&'static self) -> usize {
        let _ = self.attach_if_pending();
        if self.is_on_lifeline() {
            return self.unread_in_lifeline();
        }
        let _guard = self.lock_direction(&self.receive_lock);
        self.lanes().map_or(0, |lanes| {
            self.publish_held_if_due_locking(lanes);
            self.unread_to_mark(lanes)
        })
    }

    /// A call came before the handshake: attach if it is there now.
    #[cold]
    fn attach_before_transfer(&'static self) -> Result<Step, Errno> {
        self.attach_if_pending()?;
        if self.lifeline_has_ended() { Ok(Step::End) } else { Ok(Step::Nothing) }
    }

    fn lifeline_has_ended(&self) -> bool {
        blocking::poll_now(self.lifeline(), libc::POLLIN) & (libc::POLLHUP | libc::POLLIN) == libc::POLLHUP
    }

    /// A send has found no room: its return is an edge. Sets in which the connection is parked look for it themselves
    /// where nobody rings.
    pub(super) fn note_blocked_send(&'static self) {
        self.send_is_blocked.store(true, Ordering::Relaxed);
        if self.sends_by_lane() && self.sleepers.is_any() && self.must_poll_for_room(libc::POLLOUT) {
            observer::tell_change(self);
        }
    }

    #[cold]
    pub(super) fn ring(&self) {
        if !self.is_open() || !self.sends_by_lane() || sandbox::is_confined() {
            // The number may be another file's by now; or the byte would be taken for the program's.
            return;
        }
        if let Some(slot) = self.slot() {
            slot.count_wake();
        }
        let _ = system::ring(self.lifeline());
    }

    #[cold]
    pub(super) fn reset_for(&self, lanes: &Lanes, _corrupt: Corrupt) -> Errno {
        self.note_corruption(lanes);
        debug_assert!(self.peer_state(lanes) == PeerState::Reset);
        Errno::CONNRESET
    }
}

/// As TCP's buffer takes what goes to a peer that has just gone: `fill` alone knows how much there is.
#[cold]
fn fill_and_discard(
    len_bytes: usize,
    fill: &mut impl FnMut(*mut u8, usize) -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    let mut unsent = [0; CLOSED_PEER_FILE_BYTES_MAX];
    let room_bytes = len_bytes.min(CLOSED_PEER_FILE_BYTES_MAX);
    fill(unsent.as_mut_ptr(), room_bytes).map(|bytes| bytes.min(room_bytes))
}

fn discard(receiver: &mut LaneReceiver, wanted: usize) -> Result<usize, Corrupt> {
    let mut done = 0;
    while done < wanted {
        let Some(chunk) = receiver.peek()? else { break };
        let bytes = chunk.len_bytes.min(wanted - done);
        receiver.consume(bytes)?;
        done += bytes;
    }
    Ok(done)
}

/// Stores a byte behind so many others.
///
/// # Safety
/// Every span is writable, and together they have more than `skip` bytes.
unsafe fn put_byte(spans: &[iovec], skip: usize, byte: u8) {
    let mut skip = skip;
    for span in spans {
        if skip < span.iov_len {
            // SAFETY: within a span that is writable.
            return unsafe { span.iov_base.cast::<u8>().add(skip).write(byte) };
        }
        skip -= span.iov_len;
    }
}

/// Small spans in one piece: one record, one cache line.
///
/// # Safety
/// Every span is readable, and together they have at most [`INLINE_BYTES`].
unsafe fn gather(spans: &[iovec]) -> ([u8; INLINE_BYTES], usize) {
    let mut bytes = [0; INLINE_BYTES];
    let mut len_bytes = 0;
    for span in spans {
        // SAFETY: the caller's.
        unsafe {
            std::ptr::copy_nonoverlapping(span.iov_base.cast::<u8>(), bytes.as_mut_ptr().add(len_bytes), span.iov_len)
        };
        len_bytes += span.iov_len;
    }
    (bytes, len_bytes)
}
