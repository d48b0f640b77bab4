//! What a fork means for what is unread in a lane: it comes by TCP, unless the peer is gone or dies before it has
//! written it there. Then parent and child receive each byte of it once.

use super::{Attempt, Receiver, Violation};
use crate::connection::lanes::InLane;
use crate::connection::leftover::Leftover;
use crate::flags::MessageFlags;
use crate::kernel::Tcp;
use crate::spans::total_bytes;
use libc::iovec;
use path::{EndWord, MoveNumber, Receiving, Word};
use socket::process::blocking;
use socket::process::clock::now_ns;

/// Unread bytes of a lane that was frozen before a fork: the peer writes them to TCP, unless it dies before.
pub(super) struct Requested {
    number: MoveNumber,
    bytes: Leftover,
}

impl Receiver {
    /// Returns the number of unread bytes that were in a lane when a process forked.
    pub fn leftover_bytes(&self) -> usize {
        self.leftover.as_ref().map_or(0, Leftover::unread_bytes)
    }

    /// Receives into memory that a child will share what a peer that is gone has left in the lane, and drops what comes
    /// by TCP once more. Waits until `deadline_ns` for what is on its way. Returns whether there was something.
    pub fn save_leftover(&mut self, tcp: Tcp, deadline_ns: u64) -> bool {
        let is_plain = matches!(self.path, Receiving::Plain { .. });
        if !self.has_peer_left || self.lane.is_none() || is_plain || self.leftover_bytes() > 0 {
            return false;
        }
        let Some(mut saved) = Leftover::new() else { return false };
        loop {
            let room = [saved.room()];
            // SAFETY: the span is memory of `saved` alone.
            match unsafe { self.receive(tcp, &room, 0, MessageFlags::default()) } {
                Ok(Attempt::Got { bytes, .. }) if bytes > 0 => saved.add(bytes),
                Ok(Attempt::Nothing) if now_ns() < deadline_ns && !(tcp.has_ended() && tcp.available() == 0) => {
                    blocking::poll_for(tcp.0, libc::POLLIN, 1);
                }
                _ => break,
            }
        }
        if saved.unread_bytes() > 0 {
            self.leftover = saved.finish();
        }
        self.leftover.is_some()
    }

    /// Notes that the peer was asked to write to TCP what is unread in the lane of this move.
    pub(super) fn note_request(&mut self, number: MoveNumber, is_entered: bool) {
        let Some(lane) = self.lane.as_mut().filter(|_| self.requested.is_none()) else { return };
        if !is_entered {
            if lane.load(Word::Up) != number.to_word() {
                return;
            }
            lane.enter();
        }
        if lane.may_have_data() {
            self.requested = Leftover::in_lane().map(|bytes| Requested { number, bytes });
        }
    }

    /// Returns whether the peer has not yet begun to write to TCP what it was asked to: then a receive that finds the
    /// end of the stream goes on in the lane.
    pub fn awaits_requested(&mut self) -> bool {
        let Some(requested) = &self.requested else { return false };
        let lane = self.left_to_parent.as_ref().or(self.lane.as_ref());
        let awaits = lane.is_some_and(|lane| EndWord::from_word(lane.load(Word::Ended)).number < requested.number);
        if !awaits {
            self.requested = None;
        }
        awaits
    }

    /// Returns the lane and the length of what a peer that has died was asked to write to TCP, and the number of those
    /// bytes that were taken. `None` if there is no such byte, or something that comes before them.
    fn abandoned(&mut self, tcp: Tcp) -> Result<Option<(&mut InLane, &Leftover, usize)>, Violation> {
        if !self.awaits_requested() || tcp.available() > 0 || !tcp.has_ended() {
            return Ok(None);
        }
        // What the peer did before its end is visible from here on.
        if !self.awaits_requested() {
            return Ok(None);
        }
        let lane = self.left_to_parent.as_mut().or(self.lane.as_mut());
        let (Some(lane), Some(requested)) = (lane, &self.requested) else { return Ok(None) };
        let unread = lane.unread_bytes()?;
        Ok(Some((lane, &requested.bytes, unread)).filter(|_| unread > requested.bytes.taken_bytes()))
    }

    /// Receives what a peer that has died was asked to write to TCP.
    ///
    /// # Safety
    /// Every span is writable for its length.
    unsafe fn receive_abandoned(
        &mut self,
        tcp: Tcp,
        spans: &[iovec],
        skip: usize,
        flags: MessageFlags,
    ) -> Result<Attempt, Violation> {
        let Some((lane, bytes, unread)) = self.abandoned(tcp)? else { return Ok(Attempt::Nothing) };
        let bytes = bytes.take::<Violation>(unread, spans, skip, flags.peek(), |from, to, len_bytes| {
            // SAFETY: the part is within spans that are writable, by this function's contract.
            Ok(if flags.discard() { len_bytes } else { unsafe { lane.peek_to(from, to, len_bytes) }? })
        })?;
        Ok(if bytes > 0 { Attempt::Got { bytes, wakes_sender: false } } else { Attempt::Nothing })
    }

    /// Receives by TCP what the program would receive there by a call of its own, and then what a peer that has died
    /// was asked to write to TCP.
    ///
    /// # Safety
    /// Every span is writable for its length.
    #[cold]
    pub(super) unsafe fn receive_requested(
        &mut self,
        tcp: Tcp,
        spans: &[iovec],
        skip: usize,
        flags: MessageFlags,
    ) -> Result<Attempt, Violation> {
        loop {
            // SAFETY: every span is writable for its length, by this function's contract.
            let attempt = unsafe { self.receive_abandoned(tcp, spans, skip, flags) }?;
            if attempt != Attempt::Nothing || total_bytes(spans) == skip {
                return Ok(attempt);
            }
            if tcp.available() == 0 && self.awaits_requested() && !tcp.has_ended() {
                return Ok(Attempt::Nothing);
            }
            // SAFETY: every span is writable for its length, by this function's contract.
            let attempt = unsafe { self.receive_up_to(tcp, spans, skip, u64::MAX, flags) };
            // The end may have come since it was looked for.
            if attempt != Attempt::End || self.abandoned(tcp)?.is_none() {
                return Ok(attempt);
            }
        }
    }

    /// Returns the number of unread bytes that a peer that has died was asked to write to TCP.
    pub fn abandoned_bytes(&mut self, tcp: Tcp) -> u64 {
        let abandoned = self.abandoned(tcp).ok().flatten();
        abandoned.map_or(0, |(_, bytes, unread)| unread.saturating_sub(bytes.taken_bytes()) as u64)
    }

    /// Leaves the lane to the parent of this process, unless the fork did not wait for the end of the way back to TCP.
    /// Returns whether a call of the parent was in the kernel. Frees nothing: another thread of the parent may have
    /// held the allocator's locks.
    pub fn leave_to_parent(&mut self) -> bool {
        let is_plain = matches!(self.path, Receiving::Plain { .. });
        // As the sender.
        if is_plain && self.lane.is_some() && self.left_to_parent.is_none() {
            std::mem::swap(&mut self.lane, &mut self.left_to_parent);
            self.has_peer_left = false;
        }
        std::mem::take(&mut self.calls_in_kernel) > 0
    }
}
