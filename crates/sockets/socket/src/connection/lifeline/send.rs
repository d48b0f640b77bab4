//! Sends by the lifeline.

use super::super::{Connection, PeerState, SHUTDOWN_WRITE};
use super::SCRATCH_BYTES;
use super::message::send_now;
use crate::process::{blocking, buffer};
use libc::iovec;
use rustix::io::Errno;
use std::sync::atomic::Ordering;

impl Connection {
    /// Sends by the lifeline as long as it accepts bytes. Returns the number of bytes, and whether the rest uses the
    /// lane.
    ///
    /// # Safety
    /// Every span is readable for its length.
    pub(in crate::connection) unsafe fn send_by_lifeline(
        &'static self,
        generation: u32,
        spans: &[iovec],
        skip: usize,
        wanted: usize,
    ) -> Result<(usize, bool), Errno> {
        let mut sent = 0;
        self.switch_for_order();
        self.switch_for_stream();
        loop {
            let guard = self.lock_for_generation(generation, &self.send_lock)?;
            if self.awaits_handshake.load(Ordering::Relaxed) {
                return Ok((sent, true));
            }
            if self.sends_by_lane() || self.follow_peer(None) {
                return Ok((sent, true));
            }
            if sent == 0 && !self.may_send_by_lifeline(wanted - skip)? {
                return Ok((self.bytes_accepted_for_closed_peer(wanted - skip), false));
            }
            if skip + sent >= wanted {
                return Ok((sent, false));
            }
            self.offer_with_response();
            // SAFETY: every span is readable for its length, by this function's contract.
            match unsafe { send_now(self.lifeline(), spans, skip + sent) } {
                Ok(bytes) => {
                    sent += bytes;
                    self.lifeline_path.has_sent.store(true, Ordering::Relaxed);
                    self.lifeline_path.has_responded.store(true, Ordering::Relaxed);
                    self.count_sent(bytes);
                }
                Err(Errno::AGAIN) => {
                    drop(guard);
                    if !self.switch_to_lanes() && !self.widen() {
                        return Ok((sent, false));
                    }
                }
                Err(Errno::PIPE | Errno::CONNRESET) if sent > 0 => return Ok((sent, false)),
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    drop(guard);
                    self.process_messages_for_all();
                    match self.lanes() {
                        Some(lanes) => self.poll_lifeline(lanes),
                        None => {
                            return self
                                .send_to_closed_peer()
                                .map(|()| (self.bytes_accepted_for_closed_peer(wanted - skip), false));
                        }
                    }
                }
                Err(Errno::INTR) => {}
                Err(error) => return if sent > 0 { Ok((sent, false)) } else { Err(error) },
            }
        }
    }

    /// Returns what a send by the lifeline does before it writes, as [`Connection::may_send`] does for lanes.
    fn may_send_by_lifeline(&self, len_bytes: usize) -> Result<bool, Errno> {
        if let Some(lanes) = self.lanes() {
            return self.may_send(lanes, len_bytes);
        }
        if self.is_shut(SHUTDOWN_WRITE) {
            return Err(Errno::PIPE);
        }
        match self.state().0 {
            PeerState::Alive => Ok(true),
            PeerState::Closed if len_bytes == 0 => Ok(false),
            PeerState::Closed => {
                self.lifeline_path.note_broken_pipe();
                Ok(false)
            }
            PeerState::BrokenPipe => {
                self.lifeline_path.take_error();
                Err(Errno::PIPE)
            }
            PeerState::Reset => Err(self.lifeline_path.take_error().unwrap_or(Errno::PIPE)),
        }
    }

    /// Handles a send that the kernel refuses because the peer has closed. TCP's buffer accepts the first one all the
    /// same, unless a reset has arrived.
    fn send_to_closed_peer(&'static self) -> Result<(), Errno> {
        if !self.lifeline_has_hung_up() {
            // Another process that holds the endpoint has shut it down.
            self.lifeline_path.shutdown.fetch_or(SHUTDOWN_WRITE, Ordering::Relaxed);
            return Err(Errno::PIPE);
        }
        if self.is_reset_on_lifeline() {
            return Err(self.lifeline_path.take_error().unwrap_or(Errno::PIPE));
        }
        self.lifeline_path.note_broken_pipe();
        Ok(())
    }

    /// Sends what `fill` writes into a buffer, since the lifeline cannot be filled in place. Returns `None` if there is
    /// no room. The caller holds the send lock.
    pub(in crate::connection) fn fill_and_send(
        &self,
        len_bytes: usize,
        fill: &mut impl FnMut(*mut u8, usize) -> Result<usize, Errno>,
    ) -> Result<Option<usize>, Errno> {
        // The kernel reports room when three quarters of the buffer are free, which is more than is sent here.
        if blocking::poll_now(self.lifeline(), libc::POLLOUT) & libc::POLLOUT == 0 {
            return Ok(None);
        }
        let room_bytes = len_bytes.min(SCRATCH_BYTES);
        let mut bytes = buffer::on_heap(room_bytes)?;
        let filled = fill(bytes.as_mut_ptr(), room_bytes)?.min(room_bytes);
        let spans = [iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: filled }];
        // SAFETY: `fill` has written the first `filled` bytes of the buffer.
        let sent = if filled == 0 { 0 } else { unsafe { send_now(self.lifeline(), &spans, 0) }? };
        self.lifeline_path.has_sent.store(true, Ordering::Relaxed);
        self.lifeline_path.has_responded.store(true, Ordering::Relaxed);
        Ok(Some(sent))
    }

    /// Notes that the kernel has sent bytes of the program by the lifeline. The caller holds the send lock.
    pub(in crate::connection) fn note_sent_by_lifeline(&self, bytes: usize) {
        if bytes > 0 {
            self.lifeline_path.has_sent.store(true, Ordering::Relaxed);
            self.lifeline_path.has_responded.store(true, Ordering::Relaxed);
            self.count_sent(bytes);
        }
    }

    /// Returns whether a send by the lifeline would not reach the peer.
    pub(in crate::connection) fn is_lifeline_output_closed(&self) -> bool {
        self.is_shut(SHUTDOWN_WRITE) || self.lifeline_has_hung_up()
    }

    /// Returns what a send by the lifeline does before its bytes are known, as [`Connection::may_send`] does for lanes.
    pub(in crate::connection) fn may_fill_by_lifeline(&'static self, len_bytes: usize) -> Result<bool, Errno> {
        let is_news = self.lifeline_path.peer.load(Ordering::Relaxed) == PeerState::Alive as u64;
        if is_news && !self.is_shut(SHUTDOWN_WRITE) && self.lifeline_has_hung_up() {
            self.send_to_closed_peer()?;
            return Ok(false);
        }
        self.may_send_by_lifeline(len_bytes)
    }
}
