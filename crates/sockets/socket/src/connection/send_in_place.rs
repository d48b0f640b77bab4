//! Sends whose bytes come from another system call, such as `read` of a file: it writes them into the lane in place.

use super::wait::{BlockingCall, Deadline, Room};
use super::{Connection, MessageFlags, PeerState};
use crate::process::buffer;
use crate::process::clock::stamp;
use crate::process::system;
use rustix::io::Errno;
use segment::OwnState;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

/// Most bytes of a file that a send to a closed peer reads.
const CLOSED_PEER_FILE_BYTES_MAX: usize = 4096;

/// Larger parts of a file are sent by the kernel before there are lanes.
const FILE_BYTES_MIN: usize = 16 << 10;

impl Connection {
    /// Lets the kernel send a part of a file by the lifeline, from `offset` or from the file's position, which then
    /// moves. The kernel sends it as a whole, where [`Connection::send_in_place`] would send a part of it and get lanes
    /// for the rest. Returns the number of bytes sent, or `None` if the connection is not on its lifeline, would block
    /// there, or `send_in_place` has something else to report.
    ///
    /// # Errors
    /// `BADF` if the connection was closed meanwhile.
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
        let is_on_lifeline =
            !self.sends_by_lane() && !self.awaits_handshake.load(Ordering::Relaxed) && self.lanes().is_none();
        if !is_on_lifeline || self.is_lifeline_output_closed() || self.state().0 != PeerState::Alive {
            return Ok(None);
        }
        let sent = system::send_file(self.borrow_lifeline(), file, offset, len_bytes).ok();
        self.note_sent_by_lifeline(sent.unwrap_or(0));
        Ok(sent)
    }

    /// Sends what `fill` writes into the lane in place, such as `read(2)` of a file. `fill` gets an address, a length
    /// and the number of bytes sent before, and returns how many bytes it wrote, 0 to stop. `is_at_end` returns whether
    /// it would write none: then it is not an error that the connection cannot send any more. Returns the number of
    /// bytes sent, at most `len_bytes`.
    ///
    /// # Errors
    /// Those of [`Connection::send`], and those of `fill`, if nothing was sent before.
    pub fn send_in_place(
        &'static self,
        len_bytes: usize,
        flags: MessageFlags,
        is_at_end: impl Fn() -> bool,
        mut fill: impl FnMut(*mut u8, usize, usize) -> Result<usize, Errno>,
    ) -> Result<usize, Errno> {
        let dont_wait = !self.may_block(flags);
        self.prepare_to_hold(flags);
        let generation = self.generation();
        let mut done = 0;
        let mut may_wait = !dont_wait;
        let mut deadline = None;
        let mut call = BlockingCall::new(self);
        while done < len_bytes {
            let mut fill_rest = |pointer: *mut u8, len: usize| fill(pointer, len, done);
            match self.fill_once(generation, len_bytes - done, flags, may_wait, &is_at_end, &mut fill_rest) {
                Ok(Some(0)) => break,
                Ok(Some(bytes)) => {
                    call.note_progress();
                    done += bytes;
                }
                Ok(None) if dont_wait => {
                    self.note_blocked_send();
                    return if done > 0 { Ok(done) } else { Err(Errno::AGAIN) };
                }
                Ok(None) => {
                    let deadline =
                        *deadline.get_or_insert_with(|| Deadline::after(self.send_timeout_ns.load(Ordering::Relaxed)));
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

    /// Sends once by the lane, or by the lifeline. Returns `None` if there is no room.
    fn fill_once(
        &'static self,
        generation: u32,
        len_bytes: usize,
        flags: MessageFlags,
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
        let _shared = match self.lock_across_processes(lanes, OwnState::SendLock) {
            Err(Errno::AGAIN) => return Ok(None),
            locked => locked?,
        };
        if !self.may_send(lanes, len_bytes)? {
            return fill_and_discard(len_bytes, fill).map(Some);
        }
        // SAFETY: the send lock is held, which protects the sender.
        let sender = unsafe { &mut *lanes.sender.get() };
        sender.prepare(may_wait, stamp());
        let holds = self.begin_hold(lanes, flags);
        let filled = sender.fill(len_bytes, fill, |corrupt| self.reset_for(lanes, corrupt));
        sender.end_hold(holds && !matches!(filled, Ok(None)));
        self.note_growth(lanes);
        let Some(filled) = filled? else { return Ok(None) };
        if sender.take_wake_request() {
            self.ring_locked();
        }
        if let Some(slot) = self.slot() {
            slot.add_sent(filled as u64);
        }
        Ok(Some(filled))
    }

    /// Sends once by the lifeline. Returns `None` if there is no room. The caller holds the send lock.
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
}

/// Discards what `fill` writes, as TCP's buffer accepts bytes for a peer that has just closed: only `fill` knows how
/// many there are.
#[cold]
fn fill_and_discard(
    len_bytes: usize,
    fill: &mut impl FnMut(*mut u8, usize) -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    let room_bytes = len_bytes.min(CLOSED_PEER_FILE_BYTES_MAX);
    let mut unsent = buffer::on_heap(room_bytes)?;
    fill(unsent.as_mut_ptr(), room_bytes).map(|bytes| bytes.min(room_bytes))
}
