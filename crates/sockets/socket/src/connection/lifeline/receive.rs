//! Receives by the lifeline.

use super::super::transfer::ReceiveAttempt;
use super::super::{Connection, MessageFlags, SHUTDOWN_READ, total_bytes};
use super::message::{
    FEW_SPANS, Message, NO_SPAN, Received, peek_exactly, peek_to_sink, receive, receive_exactly, spans_after,
};
use super::{FOLLOW, SCRATCH_BYTES, SWITCH};
use crate::process::{blocking, buffer, limit, signals};
use libc::iovec;
use rustix::io::Errno;
use segment::{BY_LANE_RECEIVE, OwnState};
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

/// Bytes of each span of a receive that discards what it gets, and number of these spans.
const DISCARDED_SPAN_BYTES: usize = 512;
const DISCARDED_SPANS: usize = FEW_SPANS;
/// Bytes that a peek covers, for receives of less.
const PEEK_BYTES: usize = 64 << 10;

/// The result of one receive by the lifeline.
pub(super) enum LifelineRead {
    Bytes(usize),
    End,
    /// A message of the library was received and stored.
    Message,
    /// The input uses the lane.
    ByLane,
}

impl Connection {
    /// Receives by the lifeline. Returns `None` if the input uses the lane.
    ///
    /// # Safety
    /// Every span is writable for its length.
    pub(in crate::connection) unsafe fn receive_by_lifeline(
        &'static self,
        generation: u32,
        spans: &[iovec],
        skip: usize,
        flags: MessageFlags,
    ) -> Result<Option<ReceiveAttempt>, Errno> {
        loop {
            if self.lifeline_path.has_pending_message.load(Ordering::Relaxed) {
                self.handle_pending_message().inspect_err(|error| {
                    if *error == Errno::CONNRESET {
                        self.take_reported_error();
                    }
                })?;
                self.notify_sets();
            }
            let guard = self.lock_for_generation(generation, &self.receive_lock)?;
            let shared = match self.lanes() {
                Some(lanes) => match self.lock_across_processes(lanes, OwnState::ReceiveLock) {
                    Err(Errno::AGAIN) => {
                        self.note_cut_receive();
                        return Ok(Some(ReceiveAttempt::Nothing));
                    }
                    locked => locked?,
                },
                None => None,
            };
            // SAFETY: every span is writable for its length, by this function's contract.
            let read = unsafe { self.read_lifeline(spans, skip, flags) };
            drop(shared);
            drop(guard);
            match read? {
                LifelineRead::ByLane => return Ok(None),
                LifelineRead::Message => {}
                LifelineRead::End => return Ok(Some(ReceiveAttempt::End)),
                LifelineRead::Bytes(0) => return Ok(Some(ReceiveAttempt::Nothing)),
                LifelineRead::Bytes(bytes) => {
                    self.count_received(bytes, flags);
                    if !flags.peek && self.lifeline_path.has_responded.swap(false, Ordering::Relaxed) {
                        self.lifeline_path.requests.fetch_add(1, Ordering::Relaxed);
                    }
                    return Ok(Some(ReceiveAttempt::Moved(bytes)));
                }
            }
        }
    }

    /// Receives once by the lifeline. The caller holds the receive lock.
    ///
    /// # Safety
    /// Every span is writable for its length.
    pub(super) unsafe fn read_lifeline(
        &'static self,
        spans: &[iovec],
        skip: usize,
        flags: MessageFlags,
    ) -> Result<LifelineRead, Errno> {
        if self.lifeline_path.has_pending_message.load(Ordering::Relaxed) {
            // Another thread has received a message: what follows it is not the program's.
            return Ok(LifelineRead::Message);
        }
        if self.is_incoming_by_lane() || self.awaits_handshake.load(Ordering::Relaxed) {
            return Ok(LifelineRead::ByLane);
        }
        let mut one = [NO_SPAN];
        let spans = spans_after(spans, skip, &mut one);
        if flags.discard {
            return self.discard(total_bytes(spans), flags);
        }
        // SAFETY: every span is writable for its length, by this function's contract.
        unsafe { self.read_spans(spans, flags) }
    }

    /// Receives at most `len_bytes` and discards them (`MSG_TRUNC`). The caller holds the receive lock.
    fn discard(&'static self, len_bytes: usize, flags: MessageFlags) -> Result<LifelineRead, Errno> {
        let mut discarded = [0_u8; DISCARDED_SPAN_BYTES];
        // Each span overwrites what the one before it has received: the buffer is small and on the stack, because a
        // signal handler may make this call. Of all bytes only the last one is used, if it is a message.
        let whole = iovec { iov_base: discarded.as_mut_ptr().cast(), iov_len: DISCARDED_SPAN_BYTES };
        let mut spans = [whole; DISCARDED_SPANS];
        let len_bytes = len_bytes.min(DISCARDED_SPANS * DISCARDED_SPAN_BYTES);
        let count = len_bytes.div_ceil(DISCARDED_SPAN_BYTES).max(1);
        spans[count - 1].iov_len = len_bytes - (count - 1) * DISCARDED_SPAN_BYTES;
        // SAFETY: every span is the local buffer, or the beginning of it.
        unsafe { self.read_spans(&spans[..count], flags) }
    }

    /// Peeks without room for descriptors, then receives what belongs to the program: a byte with a descriptor does
    /// not.
    ///
    /// # Safety
    /// Every span is writable for its length.
    unsafe fn read_spans(&'static self, spans: &[iovec], flags: MessageFlags) -> Result<LifelineRead, Errno> {
        let (bytes, has_message) = match self.peek_ahead(total_bytes(spans)) {
            Ok((0, false)) => return self.end_of_lifeline(spans),
            Ok((bytes, true)) => (bytes - 1, true),
            Ok(seen) => seen,
            Err(Errno::AGAIN | Errno::INTR) if self.is_shut(SHUTDOWN_READ) => return Ok(LifelineRead::End),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(LifelineRead::Bytes(0)),
            Err(Errno::CONNRESET) => return self.reset_by_kernel(),
            Err(error) => return Err(error),
        };
        if bytes == 0 {
            return self.receive_message();
        }
        if flags.peek {
            // SAFETY: every span is writable for its length, by this function's contract.
            return unsafe { peek_exactly(self.lifeline(), spans, bytes) }.map(LifelineRead::Bytes);
        }
        let peeked_bytes = self.lifeline_path.peeked_bytes.load(Ordering::Relaxed);
        // SAFETY: every span is writable for its length, by this function's contract.
        let (received, message) = unsafe { receive_exactly(self.lifeline(), spans, bytes) }?;
        self.lifeline_path.peeked_bytes.fetch_sub(peeked_bytes.min(received as u64), Ordering::Relaxed);
        self.lifeline_path.received_bytes.fetch_add(received as u64, Ordering::Relaxed);
        self.lifeline_path.received_with_messages_bytes.fetch_add(received as u64, Ordering::Relaxed);
        // Another process that holds this endpoint may have been faster, so that a message may now be among these
        // bytes.
        if let Some(message) = message {
            self.store_message(message);
        }
        if has_message && received == bytes {
            // The message by which the stream continues in a lane is received at once, so that one receive can take
            // from both.
            let _ = self.receive_message();
        }
        Ok(LifelineRead::Bytes(received))
    }

    /// Peeks as [`peek_to_sink`] does, but not again at bytes that an earlier peek has shown to contain no message, as
    /// long as no other process can receive them. The caller holds the receive lock.
    fn peek_ahead(&self, wanted: usize) -> Result<(usize, bool), Errno> {
        let peeked_bytes = self.lifeline_path.peeked_bytes.swap(0, Ordering::Relaxed) as usize;
        if wanted == 0 || self.may_have_other_holders() {
            return peek_to_sink(self.lifeline(), wanted);
        }
        if peeked_bytes >= wanted {
            self.lifeline_path.peeked_bytes.store(peeked_bytes as u64, Ordering::Relaxed);
            return Ok((wanted, false));
        }
        let (seen, has_message) = peek_to_sink(self.lifeline(), wanted.max(PEEK_BYTES))?;
        let bytes = seen - usize::from(has_message);
        self.lifeline_path.peeked_bytes.store(bytes as u64, Ordering::Relaxed);
        Ok(if has_message && bytes < wanted { (seen, true) } else { (bytes.min(wanted), false) })
    }

    /// Returns whether the input uses its lane, as this process or another one that holds the endpoint has found. The
    /// caller holds the receive lock.
    pub(super) fn is_incoming_by_lane(&self) -> bool {
        if self.receives_by_lane() {
            return true;
        }
        if self.lifeline_path.has_pending_message.load(Ordering::Relaxed) {
            return false; // This process has received the message by which the input changes, and not yet handled it.
        }
        let Some(lanes) = self.lanes() else { return false };
        if self.may_have_other_holders() && lanes.segment.load(OwnState::ByLane) & BY_LANE_RECEIVE != 0 {
            signals::without_handlers(|| self.use_lanes_for(BY_LANE_RECEIVE));
            if self.sleepers.is_any() {
                // SAFETY: the caller holds the receive lock, which protects the receiver.
                unsafe { (*lanes.receiver.get()).announce_sleep() };
            }
        }
        self.receives_by_lane()
    }

    /// Returns the result of a receive after the kernel has reported the end of the lifeline.
    fn end_of_lifeline(&self, spans: &[iovec]) -> Result<LifelineRead, Errno> {
        if total_bytes(spans) == 0 {
            let is_there = blocking::poll_now(self.lifeline(), libc::POLLIN) & libc::POLLIN != 0;
            return Ok(if is_there { LifelineRead::End } else { LifelineRead::Bytes(0) });
        }
        match self.lanes() {
            Some(lanes) => self.end_of_input(lanes).map(|_| LifelineRead::End),
            None => self.lifeline_path.take_reset().map_or(Ok(LifelineRead::End), Err),
        }
    }

    /// Returns the result of a receive after the kernel has reported, which it does once, that the peer has left
    /// something unread.
    fn reset_by_kernel(&self) -> Result<LifelineRead, Errno> {
        if let Some(lanes) = self.lanes() {
            self.note_hang_up(lanes, true);
            return self.end_of_input(lanes).map(|_| LifelineRead::End);
        }
        self.note_kernel_reset();
        self.lifeline_path.take_reset().map_or(Ok(LifelineRead::End), Err)
    }

    /// Receives the message that comes first. The caller holds the receive lock.
    pub(super) fn receive_message(&'static self) -> Result<LifelineRead, Errno> {
        let lifeline = self.borrow_lifeline();
        let received = limit::with_free_descriptor(lifeline, || {
            let mut kind = 0_u8;
            let spans = [iovec { iov_base: (&raw mut kind).cast(), iov_len: 1 }];
            // SAFETY: the only span is a local variable.
            unsafe { receive(lifeline.as_raw_fd(), &spans, 0) }.map(|received| (received, kind))
        });
        match received {
            Ok((Received { bytes: 1, rights, .. }, kind)) => {
                self.store_message(Message { kind, memory: rights });
                Ok(LifelineRead::Message)
            }
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(LifelineRead::Bytes(0)),
            Err(error) => Err(error),
        }
    }

    /// Stores a message. Nothing more is received until it has been handled. The caller holds the receive lock, also
    /// between processes.
    fn store_message(&self, message: Message) {
        if let Some(lanes) = self.lanes()
            && matches!(message.kind, SWITCH | FOLLOW)
            && self.has_other_holders(lanes)
        {
            // At once: what follows in the lifeline are rings, which no holder may take for bytes of the program.
            lanes.segment.note_by_lane(BY_LANE_RECEIVE);
        }
        // SAFETY: the caller holds the receive lock, which protects the cell.
        unsafe { *self.lifeline_path.pending_message.get() = Some(message) };
        let before = self.lifeline_path.received_with_messages_bytes.fetch_add(1, Ordering::Relaxed);
        if self.lifeline_path.counted_to_bytes.load(Ordering::Relaxed) > before {
            self.lifeline_path.received_bytes.fetch_add(1, Ordering::Relaxed);
        }
        self.lifeline_path.has_pending_message.store(true, Ordering::Relaxed);
    }

    /// Passes at most 16 KiB of received bytes to `take`, which returns how many it has used, and consumes those.
    pub(in crate::connection) fn consume_lifeline_with(
        &'static self,
        generation: u32,
        len_bytes: usize,
        take: impl FnOnce(*mut u8, usize) -> Result<usize, Errno>,
    ) -> Result<Option<ReceiveAttempt>, Errno> {
        let mut scratch = buffer::on_heap(len_bytes.min(SCRATCH_BYTES))?;
        let begin = scratch.as_mut_ptr();
        let span = |len| [iovec { iov_base: begin.cast(), iov_len: len }];
        let peek = MessageFlags { peek: true, ..MessageFlags::default() };
        let first = span(scratch.len());
        // SAFETY: the only span is the buffer.
        let seen = unsafe { self.receive_by_lifeline(generation, &first, 0, peek) }?;
        let Some(ReceiveAttempt::Moved(bytes)) = seen else { return Ok(seen) };
        let used = span(take(begin, bytes)?);
        // SAFETY: the only span is a part of the buffer.
        unsafe { self.receive_by_lifeline(generation, &used, 0, MessageFlags::default()) }
    }
}
