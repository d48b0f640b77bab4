//! Receives bytes into buffers.

use super::bad_address::has_bad_address;
use super::lane_kinds::{LaneReceiver, ShortReceiver};
use super::lanes::Lanes;
use super::transfer::ReceiveAttempt;
use super::wait::{BlockingCall, Deadline};
use super::{Connection, MessageFlags, PeerState, SHUTDOWN_READ, reclaim, total_bytes};
use crate::process::clock::note_stamp;
use crate::process::threads;
use ::wait::{Action, Spin};
use lane::{Corrupt, ShortRead};
use libc::iovec;
use rustix::io::Errno;
use segment::OwnState;
use std::sync::atomic::Ordering;

/// Attempts to receive before a wait: some microseconds, in which a peer that responds at once has responded.
const SPIN_ATTEMPTS_MAX: u32 = 400;

/// Calls `receive` until it finds something, or `spin` says that it is time to poll the kernel or to block.
#[inline(always)] // Part of the path of short messages.
fn spin_on(spin: &mut Spin, mut receive: impl FnMut() -> ShortRead) -> ShortRead {
    for _ in 0..SPIN_ATTEMPTS_MAX {
        let next = receive();
        if next != ShortRead::Empty || spin.iterate() != Action::Poll {
            return next;
        }
    }
    ShortRead::Empty
}

impl Connection {
    /// Receives into `spans` in order. Returns the number of bytes, 0 at the end of the stream.
    ///
    /// # Errors
    /// `AGAIN` if nothing has arrived and the call does not block, or its timeout has passed; `INTR`; `CONNRESET`;
    /// `BADF` if the connection was closed meanwhile; `FAULT` for a span at a bad address.
    ///
    /// # Safety
    /// Every span that is not at a bad address is writable for its length.
    #[inline(always)] // Part of the path of short messages.
    pub unsafe fn receive(&'static self, spans: &[iovec], flags: MessageFlags) -> Result<usize, Errno> {
        if has_bad_address(spans) {
            // SAFETY: the spans that are not at bad addresses are writable, by this function's contract.
            return unsafe { self.receive_with_bad_address(spans, flags) };
        }
        // SAFETY: no span is at a bad address, so each is writable by this function's contract.
        unsafe { self.receive_checked(spans, flags) }
    }

    /// Receives as [`Connection::receive`] does, without a check for bad addresses.
    ///
    /// # Safety
    /// Every span is writable for its length.
    #[inline(always)] // Part of the path of short messages.
    pub(super) unsafe fn receive_checked(&'static self, spans: &[iovec], flags: MessageFlags) -> Result<usize, Errno> {
        let generation = self.generation();
        // SAFETY: every span is writable for its length, by this function's contract.
        match unsafe { self.receive_short_any_lane(generation, spans, flags) } {
            ShortRead::Read(bytes) => Ok(bytes),
            // No other checks before the wait: they would delay a message that is about to arrive.
            // SAFETY: every span is writable for its length, by this function's contract.
            ShortRead::Empty if self.may_block(flags) => unsafe { self.receive_waiting(generation, spans, 0, flags) },
            // SAFETY: every span is writable for its length, by this function's contract.
            next => unsafe { self.receive_any(generation, spans, flags, next == ShortRead::Empty) },
        }
    }

    /// Receives one record into one span, from lanes of ordinary memory: what senders of short messages send.
    ///
    /// # Safety
    /// Every span is writable for its length.
    #[inline(always)] // The call itself would cost as much as most of the work.
    unsafe fn receive_short(&'static self, generation: u32, spans: &[iovec], flags: MessageFlags) -> ShortRead {
        // SAFETY: the closure is called under the receive lock, and the reference is the only one to the receiver.
        let find = || self.plain_lanes().map(|plain| (plain.0, unsafe { plain.receiver() }));
        // SAFETY: every span is writable for its length, by this function's contract.
        unsafe { self.receive_short_by(generation, spans, flags, find) }
    }

    /// Does what [`Connection::receive_short`] does, from lanes in any memory.
    ///
    /// # Safety
    /// Every span is writable for its length.
    #[inline(always)] // Part of the path of short messages.
    unsafe fn receive_short_any_lane(
        &'static self,
        generation: u32,
        spans: &[iovec],
        flags: MessageFlags,
    ) -> ShortRead {
        // SAFETY: every span is writable for its length, by this function's contract.
        match unsafe { self.receive_short(generation, spans, flags) } {
            // SAFETY: every span is writable for its length, by this function's contract.
            ShortRead::UseReadTo if !self.is_plain() => unsafe { self.receive_short_generic(generation, spans, flags) },
            next => next,
        }
    }

    /// Does what [`Connection::receive_short`] does, in any memory. Called only where lanes are not in ordinary memory.
    ///
    /// # Safety
    /// Every span is writable for its length.
    #[cold]
    #[inline(never)]
    unsafe fn receive_short_generic(&'static self, generation: u32, spans: &[iovec], flags: MessageFlags) -> ShortRead {
        let lanes = || self.lanes().filter(|_| self.receives_by_lane());
        // SAFETY: the closure is called under the receive lock, and the reference is the only one to the receiver.
        let find = || lanes().map(|lanes| (lanes, unsafe { &mut *lanes.receiver.get() }));
        // SAFETY: every span is writable for its length, by this function's contract.
        unsafe { self.receive_short_by(generation, spans, flags, find) }
    }

    /// Receives one record into one span by the receiver that `find` returns. `find` is called under the receive lock.
    ///
    /// # Safety
    /// Every span is writable for its length.
    #[inline(always)] // Part of the path of short messages.
    unsafe fn receive_short_by<'a, R: ShortReceiver + 'a>(
        &'static self,
        generation: u32,
        spans: &[iovec],
        flags: MessageFlags,
        find: impl FnOnce() -> Option<(&'a Lanes, &'a mut R)>,
    ) -> ShortRead {
        let [span] = spans else { return ShortRead::UseReadTo };
        let is_simple = !flags.peek && !flags.wait_all && !flags.discard && span.iov_len > 0;
        if !is_simple || self.low_water_bytes.load(Ordering::Relaxed) > 1 {
            return ShortRead::UseReadTo;
        }
        let Ok(guard) = self.lock_for_generation(generation, &self.receive_lock) else { return ShortRead::UseReadTo };
        let Some((lanes, receiver)) = find() else { return ShortRead::UseReadTo };
        if self.has_other_holders(lanes) {
            return ShortRead::UseReadTo;
        }
        // SAFETY: the span is writable for its length, by this function's contract.
        let next = unsafe { receiver.read_short(span.iov_base.cast(), span.iov_len) };
        let ShortRead::Read(bytes) = next else { return next };
        note_stamp(receiver.stamp());
        let wakes_sender = receiver.take_wake();
        guard.release();
        if wakes_sender {
            self.ring(&self.receive_lock);
        }
        self.count_received(bytes, flags);
        next
    }

    /// Receives where the short path did not. `was_empty` means that there was nothing to receive just now.
    ///
    /// # Safety
    /// Every span is writable for its length.
    #[inline(never)]
    unsafe fn receive_any(
        &'static self,
        generation: u32,
        spans: &[iovec],
        flags: MessageFlags,
        was_empty: bool,
    ) -> Result<usize, Errno> {
        // SAFETY: every span is writable for its length, by this function's contract.
        match unsafe { self.receive_now(generation, spans, 0, flags, was_empty)? } {
            ReceiveAttempt::Moved(bytes) if self.is_enough(bytes, spans, flags) || self.ends_at_mark() => Ok(bytes),
            // SAFETY: every span is writable for its length, by this function's contract.
            ReceiveAttempt::Moved(bytes) => unsafe { self.receive_waiting(generation, spans, bytes, flags) },
            ReceiveAttempt::End => Ok(0),
            // SAFETY: every span is writable for its length, by this function's contract.
            ReceiveAttempt::Nothing => unsafe { self.receive_waiting(generation, spans, 0, flags) },
        }
    }

    /// Returns whether `bytes` complete a receive: all that was requested with `MSG_WAITALL`, otherwise `SO_RCVLOWAT`.
    #[inline]
    fn is_enough(&self, bytes: usize, spans: &[iovec], flags: MessageFlags) -> bool {
        let low_water_bytes = self.low_water_bytes.load(Ordering::Relaxed) as usize;
        if !flags.wait_all && bytes >= low_water_bytes {
            return true;
        }
        let wanted = total_bytes(spans);
        bytes >= if flags.wait_all { wanted } else { wanted.min(low_water_bytes) }
    }

    /// Receives after an attempt that has received `done` bytes: waits and tries again until the receive is complete.
    ///
    /// # Safety
    /// Every span is writable for its length.
    unsafe fn receive_waiting(
        &'static self,
        generation: u32,
        spans: &[iovec],
        done: usize,
        flags: MessageFlags,
    ) -> Result<usize, Errno> {
        let mut done = done;
        if !self.may_block(flags) {
            reclaim::sweep_while_polling();
            return if done > 0 { Ok(done) } else { Err(Errno::AGAIN) };
        }
        let deadline = Deadline::after(self.receive_timeout_ns.load(Ordering::Relaxed));
        let mut call = BlockingCall::new(self);
        let mut spin = Some(Spin::with(&self.spin_history));
        if done == 0
            && let Some(spin) = &mut spin
            // SAFETY: every span is writable for its length, by this function's contract.
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
                // SAFETY: every span is writable for its length, by this function's contract.
                && let ShortRead::Read(bytes) = unsafe { self.receive_short_any_lane(generation, spans, flags) }
            {
                return Ok(bytes);
            }
            // Before the attempt, so that the attempt sees all that arrived before the end.
            let is_last_attempt = peeks_again && self.has_input_ended();
            // Bytes that were only peeked at are still unread.
            let skip = if flags.peek { 0 } else { done };
            // SAFETY: every span is writable for its length, by this function's contract.
            match unsafe { self.receive_now(generation, spans, skip, flags, false) } {
                Ok(ReceiveAttempt::Moved(bytes)) => {
                    call.note_progress();
                    done = skip + bytes;
                    if is_last_attempt || self.is_enough(done, spans, flags) || self.ends_at_mark() {
                        return Ok(done);
                    }
                }
                Ok(ReceiveAttempt::Nothing) if done > 0 && self.ends_at_mark() => return Ok(done),
                Ok(ReceiveAttempt::End) => return Ok(done),
                Ok(ReceiveAttempt::Nothing) => {}
                Err(error) => return self.partial_receive(done, error),
            }
        }
    }

    /// Returns the result of a receive that ends with an error: the error if nothing was received, otherwise the bytes,
    /// and the error is kept for the next call.
    fn partial_receive(&'static self, done: usize, error: Errno) -> Result<usize, Errno> {
        if done == 0 {
            return Err(error);
        }
        self.defer_error(error);
        Ok(done)
    }

    /// Begins a wait by trying to receive repeatedly: a message that arrives soon is read where it is found. With
    /// several threads each attempt would cost two locked instructions, and polling without a lock is faster.
    ///
    /// # Safety
    /// Every span is writable for its length.
    #[inline(always)] // Part of the path of short messages.
    unsafe fn receive_spinning(
        &'static self,
        generation: u32,
        spans: &[iovec],
        flags: MessageFlags,
        spin: &mut Spin,
    ) -> ShortRead {
        if !threads::is_single() {
            return ShortRead::Empty;
        }
        if self.is_plain() {
            // SAFETY: every span is writable for its length, by this function's contract.
            spin_on(spin, || unsafe { self.receive_short(generation, spans, flags) })
        } else {
            // SAFETY: every span is writable for its length, by this function's contract.
            spin_on(spin, || unsafe { self.receive_short_generic(generation, spans, flags) })
        }
    }

    /// Returns whether the peer has ended its stream, even if unread bytes come before the end.
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

    /// Receives what has arrived, after the first `skip` bytes of the spans.
    ///
    /// # Safety
    /// Every span is writable for its length.
    #[inline]
    unsafe fn receive_now(
        &'static self,
        generation: u32,
        spans: &[iovec],
        skip: usize,
        flags: MessageFlags,
        was_empty: bool,
    ) -> Result<ReceiveAttempt, Errno> {
        if !self.receives_by_lane() {
            // SAFETY: every span is writable for its length, by this function's contract.
            match unsafe { self.receive_by_lifeline(generation, spans, skip, flags) }? {
                Some(ReceiveAttempt::Moved(bytes))
                    if self.continues_by_lane() && !flags.peek && skip + bytes < total_bytes(spans) =>
                {
                    // SAFETY: every span is writable for its length, by this function's contract; the received bytes
                    // are skipped.
                    let rest = unsafe { self.receive_by_lane(generation, spans, skip + bytes, flags, false) };
                    let more = match rest {
                        Ok(ReceiveAttempt::Moved(more)) => more,
                        Ok(_) => 0,
                        Err(error) => {
                            self.defer_error(error);
                            0
                        }
                    };
                    return Ok(ReceiveAttempt::Moved(bytes + more));
                }
                Some(step) => return Ok(step),
                None => {}
            }
        }
        // SAFETY: every span is writable for its length, by this function's contract.
        unsafe { self.receive_by_lane(generation, spans, skip, flags, was_empty) }
    }

    /// Receives what has arrived by the lane, after the first `skip` bytes of the spans.
    ///
    /// # Safety
    /// Every span is writable for its length.
    #[inline]
    pub(super) unsafe fn receive_by_lane(
        &'static self,
        generation: u32,
        spans: &[iovec],
        skip: usize,
        flags: MessageFlags,
        was_empty: bool,
    ) -> Result<ReceiveAttempt, Errno> {
        // SAFETY: every span is writable for its length, by this function's contract, and `consume_with` calls this
        // under the receive lock.
        let copy = |lanes: &Lanes| unsafe { self.copy_in(lanes, spans, skip, flags) };
        let step = self.consume_with(generation, flags, was_empty, copy)?;
        Ok(if matches!(step, ReceiveAttempt::Nothing) { self.nothing_or_empty_read(spans) } else { step })
    }

    /// Calls `copy` to consume what is in the lane, under the receive lock. Returns the number of bytes that it
    /// returns, or what else there is to report. `flags` only affect how bytes are counted. `was_empty` means that
    /// there was nothing to receive just now.
    #[inline]
    pub(super) fn consume_with(
        &'static self,
        generation: u32,
        flags: MessageFlags,
        was_empty: bool,
        mut copy: impl FnMut(&Lanes) -> Result<usize, Errno>,
    ) -> Result<ReceiveAttempt, Errno> {
        let guard = self.lock_for_generation(generation, &self.receive_lock)?;
        let Some(lanes) = self.lanes() else {
            drop(guard);
            return self.attach_before_transfer();
        };
        let shared = match self.lock_across_processes(lanes, OwnState::ReceiveLock) {
            Err(Errno::AGAIN) => {
                self.note_cut_receive();
                return Ok(ReceiveAttempt::Nothing);
            }
            locked => locked?,
        };
        let mut moved = if was_empty && !lanes.observer().may_have_data() { 0 } else { copy(lanes)? };
        let mut end = false;
        if moved == 0 {
            self.poll_lifeline_periodically(lanes);
            end = self.end_of_input_after_data(lanes)?;
            if self.publish_held_if_due(lanes) || end {
                // What came before the end was written before it: try once more.
                moved = copy(lanes)?;
            }
        }
        // SAFETY: the receive lock is held, which protects the receiver.
        let receiver = unsafe { &mut *lanes.receiver.get() };
        if moved > 0 {
            note_stamp(receiver.last_stamp());
        }
        let wakes_sender = moved > 0 && receiver.take_wake_request();
        drop(shared);
        drop(guard);
        if wakes_sender {
            self.ring(&self.receive_lock);
        }
        if moved > 0 {
            self.count_received(moved, flags);
            return Ok(ReceiveAttempt::Moved(moved));
        }
        Ok(if end { ReceiveAttempt::End } else { ReceiveAttempt::Nothing })
    }

    /// Notes that a receive ends before it has considered all that is unread: edge-triggered watchers get another
    /// event.
    #[cold]
    pub(super) fn note_cut_receive(&self) {
        self.other_events.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the result of an attempt that found nothing. A call that requests no bytes succeeds if some are unread.
    fn nothing_or_empty_read(&'static self, spans: &[iovec]) -> ReceiveAttempt {
        if total_bytes(spans) != 0 {
            return ReceiveAttempt::Nothing;
        }
        let _guard = self.lock_direction(&self.receive_lock);
        if self.lanes().is_some_and(|lanes| lanes.observer().may_have_data()) {
            ReceiveAttempt::End
        } else {
            ReceiveAttempt::Nothing
        }
    }

    /// Returns whether the input has ended, or an error, but only once nothing is left to read.
    fn end_of_input_after_data(&self, lanes: &Lanes) -> Result<bool, Errno> {
        if lanes.observer().may_have_data() && !lanes.observer().is_finished() && self.has_unread(lanes, 1) {
            return Ok(false);
        }
        self.end_of_input(lanes)
    }

    /// Copies from the lane to the spans, past urgent bytes whose mark does not end the receive.
    ///
    /// # Safety
    /// Every span is writable for its length. The caller holds the receive lock.
    #[inline]
    unsafe fn copy_in(&self, lanes: &Lanes, spans: &[iovec], skip: usize, flags: MessageFlags) -> Result<usize, Errno> {
        // SAFETY: every span is writable for its length, by this function's contract.
        let moved = unsafe { self.copy_in_to_mark(lanes, spans, skip, flags) }?;
        let wanted = total_bytes(spans).saturating_sub(skip);
        if moved >= wanted || flags.peek {
            return Ok(moved);
        }
        // SAFETY: every span is writable for its length, by this function's contract.
        let copy = |moved| unsafe { self.copy_in_to_mark(lanes, spans, skip + moved, flags) };
        let put = |moved, byte| {
            if !flags.discard {
                // SAFETY: the spans are writable, and have room for more than the `skip + moved` bytes received so far.
                unsafe { put_byte(spans, skip + moved, byte) };
            }
        };
        self.receive_past_urgent(lanes, skip == 0, moved, wanted, copy, put)
    }

    /// Copies from the lane to the spans, up to the next urgent byte.
    ///
    /// # Safety
    /// Every span is writable for its length. The caller holds the receive lock.
    #[inline]
    unsafe fn copy_in_to_mark(
        &self,
        lanes: &Lanes,
        spans: &[iovec],
        skip: usize,
        flags: MessageFlags,
    ) -> Result<usize, Errno> {
        // SAFETY: the caller holds the receive lock, which protects the receiver.
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
                // SAFETY: the span is writable for its length, of which `skipped` bytes are skipped.
                unsafe { self.peek_to_mark(lanes, moved, span.iov_base.cast::<u8>().add(skipped), wanted) }
            } else if flags.discard {
                discard(receiver, wanted)
            } else {
                // SAFETY: the span is writable for its length, of which `skipped` bytes are skipped.
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

    /// Counts received bytes.
    #[inline]
    pub(super) fn count_received(&self, bytes: usize, flags: MessageFlags) {
        self.unanswered_sends.store(0, Ordering::Relaxed);
        if !flags.peek
            && let Some(slot) = self.slot()
        {
            slot.add_received(bytes as u64);
        }
    }

    /// Returns the bytes that a receive would find now (`FIONREAD`).
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
}

/// Consumes bytes of the lane without copying them.
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

/// Stores a byte after the first `skip` bytes of the spans.
///
/// # Safety
/// Every span is writable, and together they have more than `skip` bytes.
unsafe fn put_byte(spans: &[iovec], skip: usize, byte: u8) {
    let mut skip = skip;
    for span in spans {
        if skip < span.iov_len {
            // SAFETY: `skip` is less than the length of this span, which is writable by this function's contract.
            return unsafe { span.iov_base.cast::<u8>().add(skip).write(byte) };
        }
        skip -= span.iov_len;
    }
}
