//! Readiness and unread bytes of a connection on its lifeline.

use super::super::{Connection, PeerState, SHUTDOWN_READ, SHUTDOWN_WRITE, urgent};
use super::dispatch::{NextItem, Purpose};
use super::message::{OFFER, peek, receive};
use super::{FOLLOW, SWITCH};
use crate::descriptor::hidden::close;
use crate::process::{blocking, limit};
use libc::iovec;
use segment::{OwnState, Segment};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

/// What comes first in the lifeline, up to the first message.
pub(in crate::connection) struct Lookahead {
    /// The program's bytes before the first message.
    pub bytes: usize,
    /// All unread bytes, with messages.
    pub(super) unread: usize,
    pub message: Option<u8>,
    /// The memory that came with the message.
    pub memory: Option<OwnedFd>,
}

impl Connection {
    /// Returns the events of a connection whose input uses the lifeline, with one system call, or two if something is
    /// unread. Returns `None` if the input uses a lane by now.
    pub(in crate::connection) fn lifeline_readiness(&'static self, wanted: i16) -> Option<i16> {
        let ask = || blocking::poll_now(self.lifeline(), libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP);
        let mut revents = ask();
        let may_have_message = revents & libc::POLLIN != 0
            || self.lifeline_path.has_pending_message.load(Ordering::Relaxed)
            || self.may_have_other_holders();
        let mut first = NextItem::Nothing;
        if may_have_message {
            let messages_before = self.lifeline_path.messages_received.load(Ordering::Relaxed);
            let is_for_input = wanted & (libc::POLLIN | libc::POLLRDNORM) != 0;
            first = self.process_messages(if is_for_input { Purpose::Input } else { Purpose::Other });
            if self.receives_by_lane() {
                return None;
            }
            if self.lifeline_path.messages_received.load(Ordering::Relaxed) != messages_before {
                revents = ask();
            }
        }
        let ends = u64::from((revents & (libc::POLLRDHUP | libc::POLLHUP)).count_ones());
        self.lifeline_path.end_level.fetch_max(ends, Ordering::Relaxed);
        // The end may be in a lane that is attached before the message that leads there comes first.
        let ends_in_lane = self.lanes().is_some_and(|lanes| lanes.observer().has_fin());
        let has_ended = revents & libc::POLLRDHUP != 0 || ends_in_lane;
        let is_shut = |direction| self.is_shut(direction);
        if let Some(lanes) = self.lanes().filter(|_| revents & libc::POLLHUP != 0) {
            self.note_hang_up(lanes, revents & libc::POLLERR != 0);
        }
        if self.lanes().is_none()
            && revents & libc::POLLHUP != 0
            && (revents & libc::POLLERR != 0 || first == NextItem::Bytes)
        {
            self.is_reset_on_lifeline();
        }
        let (peer, _) = self.state();
        let has_error = self.lanes().map_or(self.lifeline_path.error.load(Ordering::Relaxed), |lanes| {
            lanes.segment.load(OwnState::PendingError)
        }) != 0;
        let mut ready = 0;
        if (first == NextItem::Bytes && self.reaches_low_water()) || has_ended || is_shut(SHUTDOWN_READ) {
            ready |= libc::POLLIN | libc::POLLRDNORM;
        }
        if has_ended || is_shut(SHUTDOWN_READ) {
            ready |= libc::POLLRDHUP;
        }
        if ready & libc::POLLRDHUP != 0 && is_shut(SHUTDOWN_WRITE) {
            ready |= libc::POLLHUP;
        }
        if matches!(peer, PeerState::BrokenPipe | PeerState::Reset) {
            ready |= libc::POLLHUP;
        }
        if has_error {
            ready |= libc::POLLERR;
        }
        let output =
            if self.sends_by_lane() { self.output_readiness(wanted) } else { self.lifeline_output_readiness(revents) };
        Some(ready | output)
    }

    /// Returns the output events. A full lifeline is reported as writable, because a send then switches to a lane if it
    /// can.
    fn lifeline_output_readiness(&self, revents: i16) -> i16 {
        const OUTPUT: i16 = libc::POLLOUT | libc::POLLWRNORM;
        let has_room = revents & (libc::POLLOUT | libc::POLLHUP) != 0 || self.is_shut(SHUTDOWN_WRITE);
        if !has_room && self.send_is_blocked.load(Ordering::Relaxed) {
            return 0;
        }
        if self.send_is_blocked.swap(false, Ordering::Relaxed) {
            self.other_events.fetch_add(1, Ordering::Relaxed);
        }
        OUTPUT
    }

    /// Returns whether the unread bytes reach `SO_RCVLOWAT`.
    fn reaches_low_water(&'static self) -> bool {
        let low_water = self.low_water_bytes.load(Ordering::Relaxed) as usize;
        low_water <= 1 || self.unread_in_lifeline() >= low_water
    }

    /// Returns whether there are unread bytes in the lifeline. Messages count too.
    pub(super) fn has_bytes_in_lifeline(&self) -> bool {
        rustix::io::ioctl_fionread(self.borrow_lifeline()).is_ok_and(|bytes| bytes > 0)
    }

    /// Returns whether there are unread bytes of the program in the lifeline. The caller holds both locks.
    pub(in crate::connection) fn has_program_bytes_in_lifeline(&self) -> bool {
        self.has_bytes_in_lifeline() && self.unread_locked() > 0
    }

    /// Returns the unread bytes in the lifeline and in the lane that it leads to. Where an offer comes first, all bytes
    /// after it are taken for the program's.
    pub(in crate::connection) fn unread_in_lifeline(&'static self) -> usize {
        let _both = self.lock_both();
        self.unread_locked()
    }

    /// Does what [`Connection::unread_in_lifeline`] does. The caller holds both locks.
    fn unread_locked(&self) -> usize {
        // Programs ask this after each receive, so it is worth a fast path.
        if let Some(unread) = self.unread_as_peeked() {
            return unread;
        }
        let ahead = self.look_ahead();
        let is_inline = self.is_urgent_inline();
        let unread_in = |segment: &Segment| urgent::unread_before_mark(segment, ahead.bytes == 0, is_inline);
        let after = match (ahead.message, &ahead.memory) {
            (Some(OFFER), _) => ahead.unread - ahead.bytes - 1,
            (Some(FOLLOW), _) => {
                // SAFETY: the caller holds the send lock, which protects the cell.
                let offered = unsafe { (*self.lifeline_path.offered.get()).as_ref() }.map(|offered| &offered.segment);
                self.lanes().map(|lanes| &lanes.segment).or(offered).map_or(0, unread_in)
            }
            (Some(SWITCH), Some(memory)) => {
                Segment::peek(memory, self.lifeline_path.side()).map_or(0, |segment| unread_in(&segment))
            }
            _ => 0,
        };
        ahead.memory.into_iter().for_each(close);
        ahead.bytes + after
    }

    /// Returns the unread bytes of the program, if a peek has found all of them and no message among them. The caller
    /// holds the receive lock.
    pub(in crate::connection) fn unread_as_peeked(&self) -> Option<usize> {
        let peeked_bytes = self.lifeline_path.peeked_bytes.load(Ordering::Relaxed);
        let may_be = peeked_bytes > 0 && !self.may_have_other_holders();
        let is_all = || rustix::io::ioctl_fionread(self.borrow_lifeline()) == Ok(peeked_bytes);
        (may_be && is_all()).then_some(peeked_bytes as usize)
    }

    /// Peeks at the lifeline up to the first message. The caller holds the receive lock.
    pub(in crate::connection) fn look_ahead(&self) -> Lookahead {
        let unread = rustix::io::ioctl_fionread(self.borrow_lifeline()).unwrap_or(0) as usize;
        let nothing = Lookahead { bytes: unread, unread, message: None, memory: None };
        if unread == 0 {
            return nothing;
        }
        let mut scratch = vec![0_u8; unread];
        let spans = [iovec { iov_base: scratch.as_mut_ptr().cast(), iov_len: unread }];
        // SAFETY: the only span is a local buffer.
        let seen = unsafe { peek(self.lifeline(), &spans) };
        let bytes_seen = seen.map_or(0, |(bytes, has_message)| bytes - usize::from(has_message));
        self.lifeline_path.peeked_bytes.store(bytes_seen as u64, Ordering::Relaxed);
        let Ok((bytes, true)) = seen else { return nothing };
        // SAFETY: the only span is a local buffer, which outlives the call.
        let receive = || unsafe { receive(self.lifeline(), &spans, libc::MSG_PEEK) };
        let received = limit::with_free_descriptor(self.borrow_lifeline(), receive);
        let memory = received.ok().and_then(|received| received.rights);
        Lookahead { bytes: bytes - 1, unread, message: Some(scratch[bytes - 1]), memory }
    }

    /// Returns the bytes that have arrived by the lifeline before there was a lane, for edge-triggered watchers. Only
    /// grows. The caller holds the receive lock.
    ///
    /// An unread message cannot be distinguished from the program's bytes and is counted with them. It stays counted
    /// after it was received; otherwise the number would fall, and the next bytes would not be seen as new. A message
    /// that was received before any count is not an edge.
    pub(in crate::connection) fn lifeline_arrivals(&self) -> u64 {
        let is_on_lifeline = self.is_on_lifeline();
        let unread = if is_on_lifeline { rustix::io::ioctl_fionread(self.borrow_lifeline()).unwrap_or(0) } else { 0 };
        let reaches = self.lifeline_path.received_with_messages_bytes.load(Ordering::Relaxed) + unread;
        self.lifeline_path.counted_to_bytes.fetch_max(reaches, Ordering::Relaxed);
        self.lifeline_path.received_bytes.load(Ordering::Relaxed) + unread
    }

    /// Returns how far the lifeline had ended when its readiness was last polled: 0 to 2. Only grows.
    pub(in crate::connection) fn lifeline_end_level(&self) -> u64 {
        self.lifeline_path.end_level.load(Ordering::Relaxed)
    }

    /// Returns whether a watcher of output has to poll for room, because nothing wakes it: the peer cannot ring before
    /// this endpoint has received its `SWITCH`, nor under a filter.
    pub fn must_poll_for_room(&'static self, wanted: i16) -> bool {
        let peer_is_confined = || {
            let _guard = self.lock_direction(&self.send_lock);
            self.lanes().is_some_and(|lanes| lanes.segment.peer_is_confined())
        };
        wanted & (libc::POLLOUT | libc::POLLWRNORM) != 0
            && self.send_is_blocked.load(Ordering::Relaxed)
            && (!self.receives_by_lane() || peer_is_confined())
    }
}
