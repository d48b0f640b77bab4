//! Sends bytes from buffers.

use super::bad_address::has_bad_address;
use super::lane_kinds::{HELD_BYTES_MAX, ShortSender};
use super::lanes::Lanes;
use super::wait::{BlockingCall, Deadline, Room};
use super::{Connection, MessageFlags, SHUTDOWN_WRITE, observer, reclaim, total_bytes};
use crate::process::blocking;
use crate::process::clock::stamp;
use lane::INLINE_BYTES;
use libc::iovec;
use rustix::io::Errno;
use segment::OwnState;
use std::sync::atomic::Ordering;

impl Connection {
    /// Sends `spans` in order. Returns the number of bytes sent.
    ///
    /// # Errors
    /// `AGAIN` if there is no room and the call does not block, or its timeout has passed; `INTR`; `PIPE` (the caller
    /// raises the signal); `CONNRESET`; `BADF` if the connection was closed meanwhile; `FAULT` for a span at a bad
    /// address.
    ///
    /// # Safety
    /// Every span that is not at a bad address is readable for its length.
    #[inline(always)] // Part of the path of short messages.
    pub unsafe fn send(&'static self, spans: &[iovec], flags: MessageFlags) -> Result<usize, Errno> {
        if has_bad_address(spans) {
            // SAFETY: the spans that are not at bad addresses are readable, by this function's contract.
            return unsafe { self.send_with_bad_address(spans, flags) };
        }
        // SAFETY: no span is at a bad address, so each is readable by this function's contract.
        unsafe { self.send_checked(spans, flags) }
    }

    /// Sends as [`Connection::send`] does, without a check for bad addresses.
    ///
    /// # Safety
    /// Every span is readable for its length.
    #[inline(always)] // Part of the path of short messages.
    pub(super) unsafe fn send_checked(&'static self, spans: &[iovec], flags: MessageFlags) -> Result<usize, Errno> {
        let generation = self.generation();
        // SAFETY: every span is readable for its length, by this function's contract.
        match if flags.more { None } else { unsafe { self.send_short(generation, spans) } } {
            Some(bytes) => Ok(bytes),
            // SAFETY: every span is readable for its length, by this function's contract.
            None => unsafe { self.send_any(generation, spans, flags) },
        }
    }

    /// Sends one span that is short, in lanes of ordinary memory, to a peer that is connected and has room. Returns
    /// `None` if nothing was sent.
    ///
    /// # Safety
    /// Every span is readable for its length.
    #[inline(always)] // The call itself would cost as much as most of the work.
    unsafe fn send_short(&'static self, generation: u32, spans: &[iovec]) -> Option<usize> {
        // SAFETY: the closure is called under the send lock, and the reference is the only one to the sender.
        let find = || self.plain_lanes().map(|plain| (plain.0, unsafe { plain.sender() }));
        // SAFETY: every span is readable for its length, by this function's contract.
        unsafe { self.send_short_by(generation, spans, find) }
    }

    /// Does what [`Connection::send_short`] does, in any memory. Called only where lanes are not in ordinary memory.
    ///
    /// # Safety
    /// Every span is readable for its length.
    #[cold]
    #[inline(never)]
    unsafe fn send_short_generic(&'static self, generation: u32, spans: &[iovec]) -> Option<usize> {
        let lanes = || self.lanes().filter(|_| self.sends_by_lane());
        // SAFETY: the closure is called under the send lock, and the reference is the only one to the sender.
        let find = || lanes().map(|lanes| (lanes, unsafe { &mut *lanes.sender.get() }));
        // SAFETY: every span is readable for its length, by this function's contract.
        unsafe { self.send_short_by(generation, spans, find) }
    }

    /// Sends one span that is short by the sender that `find` returns. `find` is called under the send lock.
    ///
    /// # Safety
    /// Every span is readable for its length.
    #[inline(always)] // Part of the path of short messages.
    unsafe fn send_short_by<'a, S: ShortSender + 'a>(
        &'static self,
        generation: u32,
        spans: &[iovec],
        find: impl FnOnce() -> Option<(&'a Lanes, &'a mut S)>,
    ) -> Option<usize> {
        let [span] = spans else { return None };
        let guard = self.lock_for_generation(generation, &self.send_lock).ok()?;
        let (lanes, sender) = find()?;
        // The peer waits for a response, or for a request.
        let is_awaited = self.unanswered_sends.load(Ordering::Relaxed) == 0;
        if !is_awaited {
            self.poll_lifeline_periodically(lanes);
        }
        let snapshot = lanes.segment.snapshot();
        let is_shared = snapshot.holders > 1 && self.may_have_other_holders();
        if is_shared || self.has_ended_in(lanes, snapshot, SHUTDOWN_WRITE) {
            return None;
        }
        sender.prepare_short(stamp());
        // SAFETY: the span is readable for its length, by this function's contract.
        if !unsafe { sender.write_short(span.iov_base.cast(), span.iov_len, is_awaited) } {
            return None;
        }
        let wakes_receiver = sender.take_wake();
        guard.release();
        if wakes_receiver {
            self.ring(&self.send_lock);
        }
        self.count_sent(span.iov_len);
        Some(span.iov_len)
    }

    /// Sends where the short path did not.
    ///
    /// # Safety
    /// Every span is readable for its length.
    #[inline(never)]
    unsafe fn send_any(&'static self, generation: u32, spans: &[iovec], flags: MessageFlags) -> Result<usize, Errno> {
        if self.sends_by_lane() && !self.receives_by_lane() {
            self.process_messages_periodically();
        }
        if !self.is_plain()
            // SAFETY: every span is readable for its length, by this function's contract.
            && let Some(bytes) = unsafe { self.send_short_generic(generation, spans) }
        {
            return Ok(bytes);
        }
        let wanted = total_bytes(spans);
        // SAFETY: every span is readable for its length, by this function's contract.
        let done = unsafe { self.send_now(generation, spans, 0, wanted, flags, self.may_block(flags)) }?;
        if done == wanted {
            return Ok(done);
        }
        // SAFETY: every span is readable for its length, by this function's contract.
        unsafe { self.send_waiting(generation, spans, done, wanted, flags) }
    }

    /// Sends after an attempt that has sent `done` bytes: waits and tries again until all is sent.
    ///
    /// # Safety
    /// Every span is readable for its length.
    unsafe fn send_waiting(
        &'static self,
        generation: u32,
        spans: &[iovec],
        done: usize,
        wanted: usize,
        flags: MessageFlags,
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
            // SAFETY: every span is readable for its length, by this function's contract.
            let send_again =
                |room| unsafe { self.send_now(generation, spans, done, wanted, flags, room == Room::InRing) };
            match waited.and_then(send_again) {
                Ok(0) => {}
                Ok(bytes) => {
                    call.note_progress();
                    done += bytes;
                }
                Err(error) if done > 0 => {
                    self.defer_error(error);
                    return Ok(done);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Sends as much as there is room for, after the first `skip` bytes of the spans.
    ///
    /// # Safety
    /// Every span is readable for its length.
    #[inline]
    pub(super) unsafe fn send_now(
        &'static self,
        generation: u32,
        spans: &[iovec],
        skip: usize,
        wanted: usize,
        flags: MessageFlags,
        may_wait: bool,
    ) -> Result<usize, Errno> {
        let mut before = 0;
        let is_short = (1..HELD_BYTES_MAX).contains(&wanted);
        if !(if is_short { self.prepare_to_hold(flags) } else { self.sends_by_lane() }) {
            // SAFETY: every span is readable for its length, by this function's contract.
            let (sent, continues) = unsafe { self.send_by_lifeline(generation, spans, skip, wanted) }?;
            if !continues || (sent > 0 && skip + sent == wanted) {
                return Ok(sent);
            }
            before = sent;
        }
        // SAFETY: every span is readable for its length, by this function's contract.
        match unsafe { self.send_by_lane(generation, spans, skip + before, wanted, flags, may_wait) } {
            Err(error) if before > 0 => {
                self.defer_error(error);
                Ok(before)
            }
            sent => sent.map(|sent| before + sent),
        }
    }

    /// Sends by the lane as much as there is room for, after the first `skip` bytes of the spans.
    ///
    /// # Safety
    /// Every span is readable for its length.
    #[inline]
    unsafe fn send_by_lane(
        &'static self,
        generation: u32,
        spans: &[iovec],
        skip: usize,
        wanted: usize,
        flags: MessageFlags,
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
        let shared = match self.lock_across_processes(lanes, OwnState::SendLock) {
            Err(Errno::AGAIN) => return Ok(0),
            locked => locked?,
        };
        // Under the lock, so that a shutdown by another process is either seen here or comes later.
        if !self.may_send(lanes, wanted - skip)? {
            return Ok(self.bytes_accepted_for_closed_peer(wanted - skip));
        }
        // SAFETY: the send lock is held, which protects the sender.
        let position = unsafe { (*lanes.sender.get()).prepare(may_wait, stamp()) };
        let holds = (1..HELD_BYTES_MAX).contains(&wanted) && self.begin_hold(lanes, flags);
        // SAFETY: every span is readable for its length, by this function's contract, and the send lock is held.
        let sent = unsafe { self.copy_out(lanes, spans, skip, wanted) }?;
        if self.unanswered_sends.load(Ordering::Relaxed) == 0 {
            // The peer waits for this response or request.
            // SAFETY: the send lock is held, which protects the sender.
            unsafe { (*lanes.sender.get()).demote_since(position) };
        }
        // SAFETY: the send lock is held, which protects the sender.
        let sender = unsafe { &mut *lanes.sender.get() };
        sender.end_hold(holds && skip + sent == wanted);
        let wakes_receiver = sent > 0 && sender.take_wake_request();
        self.note_growth(lanes);
        drop(shared);
        drop(guard);
        if wakes_receiver {
            self.ring(&self.send_lock);
        }
        if sent > 0 {
            self.count_sent(sent);
        }
        reclaim::sweep_under_pressure();
        Ok(sent)
    }

    /// Counts sent bytes.
    #[inline]
    pub(super) fn count_sent(&self, bytes: usize) {
        let unanswered = self.unanswered_sends.load(Ordering::Relaxed);
        self.unanswered_sends.store(unanswered.saturating_add(1), Ordering::Relaxed);
        if let Some(slot) = self.slot() {
            slot.add_sent(bytes as u64);
        }
    }

    /// Copies the spans to the lane, after their first `skip` bytes, as far as there is room.
    ///
    /// # Safety
    /// Every span is readable for its length. The caller holds the send lock.
    #[inline]
    pub(super) unsafe fn copy_out(
        &self,
        lanes: &Lanes,
        spans: &[iovec],
        skip: usize,
        wanted: usize,
    ) -> Result<usize, Errno> {
        // SAFETY: the caller holds the send lock, which protects the sender.
        let sender = unsafe { &mut *lanes.sender.get() };
        if let [span] = spans {
            // SAFETY: `skip` is at most the length of the only span.
            let begin = unsafe { span.iov_base.cast::<u8>().add(skip) };
            // SAFETY: the span is readable for its length, of which `skip` bytes are skipped.
            return unsafe { lanes.write_from(sender, begin, wanted - skip) }
                .map_err(|corrupt| self.reset_for(lanes, corrupt));
        }
        if skip == 0 && wanted <= INLINE_BYTES {
            // SAFETY: every span is readable, by this function's contract, and together they have at most
            // `INLINE_BYTES`.
            let (bytes, len_bytes) = unsafe { gather(spans) };
            return sender.write(&bytes[..len_bytes]).map_err(|corrupt| self.reset_for(lanes, corrupt));
        }
        let mut skip = skip;
        let mut sent = 0;
        for span in spans {
            let skipped = skip.min(span.iov_len);
            skip -= skipped;
            let len_bytes = span.iov_len - skipped;
            // SAFETY: the span is readable for its length, of which `skipped` bytes are skipped.
            let result = unsafe { lanes.write_from(sender, span.iov_base.cast::<u8>().add(skipped), len_bytes) };
            let written = result.map_err(|corrupt| self.reset_for(lanes, corrupt))?;
            sent += written;
            if written < len_bytes {
                break;
            }
        }
        Ok(sent)
    }

    /// Notes that a send has found no room, so that room found later is an edge. Sets in which the connection is parked
    /// poll it again if the peer does not ring, or if room has come since and they may have found it before they could
    /// know that it is an edge.
    pub(super) fn note_blocked_send(&'static self) {
        // Ordered before the check for sleepers: a set parks the connection before it polls for room.
        self.send_is_blocked.swap(true, Ordering::SeqCst);
        if self.sleepers.is_any() && (self.must_poll_for_room(libc::POLLOUT) || self.has_room_again()) {
            observer::notify_change(self);
        }
    }

    /// Returns whether there is room by the path that sends use.
    fn has_room_again(&'static self) -> bool {
        if !self.sends_by_lane() {
            return blocking::poll_now(self.lifeline(), libc::POLLOUT) & libc::POLLOUT != 0;
        }
        let _guard = self.lock_direction(&self.send_lock);
        self.lanes().is_some_and(|lanes| self.has_room(lanes))
    }
}

/// Copies small spans together, to be sent as one record in one cache line.
///
/// # Safety
/// Every span is readable for its length, and together they have at most [`INLINE_BYTES`].
unsafe fn gather(spans: &[iovec]) -> ([u8; INLINE_BYTES], usize) {
    let mut bytes = [0; INLINE_BYTES];
    let mut len_bytes = 0;
    for span in spans {
        // SAFETY: the span is readable, and the buffer has room for all spans together, by this function's contract.
        unsafe {
            std::ptr::copy_nonoverlapping(span.iov_base.cast::<u8>(), bytes.as_mut_ptr().add(len_bytes), span.iov_len)
        };
        len_bytes += span.iov_len;
    }
    (bytes, len_bytes)
}
