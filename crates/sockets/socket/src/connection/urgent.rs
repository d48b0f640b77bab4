//! Urgent data: `MSG_OOB`, as TCP on Linux has it (RFC 6093 says how that differs from RFC 793).
//!
//! One byte of the stream is urgent: the last one of a send with `MSG_OOB`. The peer learns of it at once, may take it
//! out of turn, and finds its place in the stream: the *mark*, before which each receive ends. Only the latest urgent
//! byte has a mark; one that has come before is an ordinary byte of the stream.
//!
//! The byte is a record of its own in the lane, which marks the place, and a word that the sender writes into the
//! receiver's endpoint ([`PeerStatus::Urgent`]), which says it at once. So it goes by lanes alone: an end that is on
//! its lifeline switches before it sends one. What has been made of the latest byte lies beside the receiver's own
//! state ([`OwnState::Urgent`]).
//!
//! `SIGURG` goes to whom `F_SETOWN` has named. The kernel sends it: the ring is then an urgent byte of the lifeline
//! itself (`MSG_OOB` of AF_UNIX, Linux 5.15), which is received in line with the other rings.

use super::bad_address::has_bad_address;
use super::lane_kinds::LaneReceiver;
use super::lane_kinds::LaneSender;
use super::lanes::Lanes;
use super::lifeline::{FOLLOW, Lookahead, SWITCH};
use super::wait::{BlockingCall, Deadline};
use super::{Connection, Flags, PeerState, SHUTDOWN_WRITE, reclaim, total_bytes};
use crate::descriptor::hidden::close;
use crate::options::{self, SocketOption};
use crate::process::clock::stamp;
use crate::process::socket_option;
use crate::process::system;
use lane::{Urgent, UrgentHandling};
use libc::iovec;
use rustix::io::Errno;
use segment::{OwnState, PeerStatus, RAISES_SIGNAL, Segment};
use std::sync::atomic::Ordering;

/// What the receiving end has made of the latest urgent byte.
#[derive(Debug, Clone, Copy)]
struct UrgentProgress {
    /// The last one whose mark was passed.
    passed: u32,
    /// The last one that was received out of turn.
    taken: u32,
}

impl UrgentProgress {
    fn of_word(word: u64) -> Self {
        Self { passed: word as u32, taken: (word >> u32::BITS) as u32 }
    }

    fn to_word(self) -> u64 {
        u64::from(self.passed) | u64::from(self.taken) << u32::BITS
    }
}

/// The urgent byte that the peer has announced last, if there was one.
fn announced(memory: &Segment) -> Option<Urgent> {
    let word = if memory.is_in_windows() { 0 } else { memory.status(PeerStatus::Urgent) };
    (word != 0).then(|| Urgent::of_word(word))
}

/// What an unread urgent byte is to a receive, if `latest` is the one that has the mark.
fn urgent_handling(urgent: Urgent, latest: u32, is_first: bool, is_inline: bool) -> UrgentHandling {
    // The record comes before the word that announces it: it may be ahead, and is never behind.
    let is_superseded = (latest.wrapping_sub(urgent.number) as i32) > 0;
    match (is_superseded, is_first) {
        // TCP leaves out a byte that the receiver stands before when the next one is announced.
        (true, true) | (false, true) if !is_inline => UrgentHandling::Skip,
        (true, _) | (false, true) => UrgentHandling::Include,
        (false, false) => UrgentHandling::Stop,
    }
}

/// Bytes that are unread before the mark, in memory that a message on its way leads to; `is_first`: no byte comes
/// before it.
pub(super) fn unread_before_mark(memory: &Segment, is_first: bool, is_inline: bool) -> usize {
    let latest = announced(memory).map_or(0, |urgent| urgent.number);
    let receiver = LaneReceiver::of(memory);
    receiver
        .unread_bytes_with(|urgent, first| count_handling(urgent, latest, first && is_first, is_inline))
        .unwrap_or(0)
}

/// As [`urgent_handling`], for the count of `FIONREAD`: none where the receiver stands before the mark.
fn count_handling(urgent: Urgent, latest: u32, is_first: bool, is_inline: bool) -> UrgentHandling {
    match urgent_handling(urgent, latest, is_first, is_inline) {
        _ if is_inline => UrgentHandling::Include,
        UrgentHandling::Skip if urgent.number == latest => UrgentHandling::Stop,
        kind => kind,
    }
}

impl Lanes {
    /// Where the incoming lane lies. Under a lock, or as a waiter.
    fn incoming(&self) -> &Segment {
        // SAFETY: written under both locks while nobody waits.
        unsafe { &*self.inbound.get() }.as_ref().unwrap_or(&self.segment)
    }

    /// Whether there has ever been an urgent byte.
    #[inline]
    fn has_been_urgent(&self) -> bool {
        announced(self.incoming()).is_some()
    }

    fn progress(&self) -> UrgentProgress {
        UrgentProgress::of_word(self.segment.load(OwnState::Urgent))
    }

    /// The urgent byte whose mark has not been passed. Under the receive lock.
    fn pending(&self) -> Option<Urgent> {
        announced(self.incoming()).filter(|urgent| urgent.number != self.progress().passed)
    }

    fn latest(&self) -> u32 {
        announced(self.incoming()).map_or(0, |urgent| urgent.number)
    }

    /// Whether the peer has named somebody for `SIGURG`, or cannot have said so yet.
    fn peer_raises_signal(&self) -> bool {
        // SAFETY: as in `incoming`.
        let inbound = unsafe { &*self.inbound.get() };
        self.segment.status(PeerStatus::Attached) == 0
            || self.segment.peer_raises_signal()
            || inbound.as_ref().is_some_and(Segment::peer_raises_signal)
    }
}

impl Connection {
    /// `SO_OOBINLINE`. Under a lock, or as a waiter.
    pub(super) fn is_urgent_inline(&self) -> bool {
        self.shared_options() & options::URGENT_INLINE != 0
    }

    /// Sends `spans`, whose last byte is urgent; returns how many bytes went. If they are fewer, none is urgent.
    ///
    /// # Errors
    /// As [`Connection::send`]; `OPNOTSUPP` where no urgent byte can go: between nodes, and where the end has to stay
    /// on its lifeline.
    ///
    /// # Safety
    /// Every span is readable for its length.
    pub unsafe fn send_urgent(&'static self, spans: &[iovec], flags: Flags) -> Result<usize, Errno> {
        let Some(last) = spans.iter().rposition(|span| span.iov_len > 0) else {
            // SAFETY: our caller says that every span is readable for its length.
            return unsafe { self.send(spans, flags) };
        };
        if has_bad_address(spans) {
            return Err(Errno::FAULT);
        }
        if !self.can_send_urgent() {
            let (peer, shutdown) = self.state();
            if peer == PeerState::Alive && shutdown & SHUTDOWN_WRITE == 0 && !self.does_lifeline_refuse_sends() {
                return Err(Errno::OPNOTSUPP);
            }
            // SAFETY: our caller says that every span is readable for its length.
            return unsafe { self.send(spans, flags) };
        }
        let before = total_bytes(spans) - 1;
        if before > 0 {
            let mut spans = spans[..=last].to_vec();
            spans[last].iov_len -= 1;
            // SAFETY: our caller says that every span is readable; of the last one, a byte less is read.
            let sent = unsafe { self.send(&spans, flags) }?;
            if sent < before {
                return Ok(sent);
            }
        }
        // SAFETY: the last byte of a span that has some.
        let byte = unsafe { spans[last].iov_base.cast::<u8>().add(spans[last].iov_len - 1).read() };
        match self.send_mark(byte, flags) {
            Err(Errno::AGAIN | Errno::INTR) if before > 0 => Ok(before),
            Err(error) if before > 0 => {
                self.defer_error(error);
                Ok(before)
            }
            sent => sent.map(|()| before + 1),
        }
    }

    /// Whether what is sent goes by a lane that takes urgent bytes, if need be from now on.
    fn can_send_urgent(&'static self) -> bool {
        if !self.sends_by_lane() && !self.switch_to_lanes() {
            // What the peer has said in the meantime may help.
            self.process_messages_for_all();
            let _both = self.lock_both();
            if !self.follow_peer(None) {
                return false;
            }
        }
        let _guard = self.lock_direction(&self.send_lock);
        // SAFETY: under the send lock.
        let is_plain = |lanes: &Lanes| matches!(unsafe { &*lanes.sender.get() }, LaneSender::Plain(_));
        self.lanes().is_some_and(|lanes| is_plain(lanes) && !lanes.segment.is_in_windows())
    }

    fn send_mark(&'static self, byte: u8, flags: Flags) -> Result<(), Errno> {
        let generation = self.generation();
        let deadline = Deadline::after(self.send_timeout_ns.load(Ordering::Relaxed));
        let mut call = BlockingCall::new(self);
        while !self.write_urgent_byte(generation, byte)? {
            if !self.may_block(flags) {
                self.note_blocked_send();
                return Err(Errno::AGAIN);
            }
            self.wait_to_send(generation, &mut call, deadline)?;
        }
        Ok(())
    }

    /// `false`: there is no room now.
    fn write_urgent_byte(&'static self, generation: u32, byte: u8) -> Result<bool, Errno> {
        let guard = self.lock_for_generation(generation, &self.send_lock)?;
        let Some(lanes) = self.lanes() else { return Err(Errno::BADF) };
        let shared = self.lock_across_processes(lanes, OwnState::SendLock)?;
        if !self.may_send(lanes, 1)? {
            return Ok(true); // As `bytes_accepted_for_closed_peer`: TCP's buffer takes it.
        }
        let told = Urgent::of_word(lanes.segment.published(PeerStatus::Urgent));
        let urgent = Urgent { byte, number: told.number.wrapping_add(1).max(1) };
        // SAFETY: under the send lock.
        let sender = unsafe { &mut *lanes.sender.get() };
        sender.prepare(false, stamp());
        if !sender.write_urgent(urgent).map_err(|corrupt| self.reset_for(lanes, corrupt))? {
            return Ok(false);
        }
        lanes.publish_status(PeerStatus::Urgent, urgent.to_word());
        let wakes_receiver = sender.take_wake_request();
        let raises_signal = lanes.peer_raises_signal();
        self.note_growth(lanes);
        drop(shared);
        drop(guard);
        if raises_signal {
            self.ring_urgently();
        } else if wakes_receiver {
            self.ring();
        }
        self.count_sent(1);
        reclaim::reclaim_under_pressure();
        Ok(true)
    }

    /// Receives the urgent byte out of turn into `spans`; returns how many bytes that were: none, if the spans have no
    /// room. It stays in the stream, as a place.
    ///
    /// # Errors
    /// `INVAL` where there is none, it was received before, or urgent bytes are received in line (`SO_OOBINLINE`);
    /// `FAULT` for a span where no program has memory; those of a lock between processes.
    ///
    /// # Safety
    /// Every other span is writable for its length.
    pub unsafe fn receive_urgent(&'static self, spans: &[iovec], flags: Flags) -> Result<usize, Errno> {
        self.find_urgent();
        let _guard = self.lock_direction(&self.receive_lock);
        if self.is_urgent_inline() {
            return Err(Errno::INVAL);
        }
        let Some(lanes) = self.lanes() else { return Err(Errno::INVAL) };
        let _shared = self.lock_across_processes(lanes, OwnState::ReceiveLock)?;
        let progress = lanes.progress();
        let Some(urgent) = lanes.pending().filter(|urgent| urgent.number != progress.taken) else {
            return Err(Errno::INVAL);
        };
        if !flags.peek {
            lanes.segment.store(OwnState::Urgent, UrgentProgress { taken: urgent.number, ..progress }.to_word());
        }
        let Some(span) = spans.iter().find(|span| span.iov_len > 0) else { return Ok(0) };
        if has_bad_address(spans) {
            return Err(Errno::FAULT);
        }
        if !flags.discard {
            // SAFETY: our caller says that the span is writable, and it has a byte.
            unsafe { span.iov_base.cast::<u8>().write(urgent.byte) };
        }
        Ok(1)
    }

    /// Whether the next receive begins at the urgent byte (`SIOCATMARK`).
    pub fn is_at_mark(&'static self) -> bool {
        self.find_urgent();
        let _both = self.lock_both();
        if self.is_on_lifeline() && self.bytes_before_message() > 0 {
            return false;
        }
        self.lanes().is_some_and(|lanes| self.is_before_mark(lanes))
    }

    /// Bytes in the lifeline before the first message. Under both locks.
    fn bytes_before_message(&self) -> usize {
        let Lookahead { bytes, memory, .. } = self.look_ahead();
        memory.into_iter().for_each(close);
        bytes
    }

    /// Under the receive lock.
    fn is_before_mark(&self, lanes: &Lanes) -> bool {
        let Some(pending) = lanes.pending() else { return false };
        let mut comes = false;
        let before = lanes.observer().unread_bytes_with(|urgent, is_first| {
            comes |= urgent.number == pending.number;
            match urgent_handling(urgent, pending.number, is_first, self.is_urgent_inline()) {
                _ if comes => UrgentHandling::Stop,
                kind => kind,
            }
        });
        comes && before == Ok(0)
    }

    /// Of a connection on its lifeline: what the peer has said in front of a lane, or behind bytes that are unread,
    /// leads to the memory where it announces urgent bytes.
    fn find_urgent(&'static self) {
        if !self.is_on_lifeline() {
            return;
        }
        self.process_messages_for_all();
        self.attach_for_urgent();
    }

    /// As [`Connection::find_urgent`], where messages that come first have been heard.
    fn attach_for_urgent(&'static self) {
        if !self.is_on_lifeline() {
            return;
        }
        let Some(_both) = self.lock_both() else { return };
        if !self.is_on_lifeline() || !self.may_get_lanes() || self.unread_as_peeked().is_some() {
            return;
        }
        match self.look_ahead() {
            Lookahead { message: Some(SWITCH | FOLLOW), memory: Some(memory), .. } => {
                self.attach_in_advance(memory);
            }
            Lookahead { memory, .. } => memory.into_iter().for_each(close),
        }
    }

    /// `POLLPRI`, where it is `wanted`.
    pub(super) fn urgent_readiness(&'static self, wanted: i16) -> i16 {
        if wanted & libc::POLLPRI == 0 {
            return 0;
        }
        self.attach_for_urgent();
        let _guard = self.lock_direction(&self.receive_lock);
        let is_there = |lanes: &Lanes| lanes.pending().is_some_and(|urgent| urgent.number != lanes.progress().taken);
        if self.lanes().is_some_and(is_there) { libc::POLLPRI } else { 0 }
    }

    /// Whether something is unread that counts as much: an urgent byte that comes first does not, unless it is received
    /// in line. Under the receive lock.
    pub(super) fn has_unread(&self, lanes: &Lanes, low_water_bytes: usize) -> bool {
        if low_water_bytes <= 1 && !lanes.has_been_urgent() {
            return true;
        }
        let unread = lanes.observer().unread_bytes_with(|_, is_first| {
            if is_first && !self.is_urgent_inline() { UrgentHandling::Skip } else { UrgentHandling::Include }
        });
        unread.is_ok_and(|bytes| bytes >= low_water_bytes.max(1))
    }

    /// Unread bytes in the lane, up to the mark. Under the receive lock.
    pub(super) fn unread_to_mark(&self, lanes: &Lanes) -> usize {
        let (latest, is_inline) = (lanes.latest(), self.is_urgent_inline());
        let unread =
            lanes.observer().unread_bytes_with(|urgent, first| count_handling(urgent, latest, first, is_inline));
        unread.unwrap_or(0)
    }

    /// As [`LaneReceiver::peek_to`], up to the mark. Under the receive lock.
    ///
    /// # Safety
    /// `destination` is writable for `len_bytes`.
    pub(super) unsafe fn peek_to_mark(
        &self,
        lanes: &Lanes,
        skip: usize,
        destination: *mut u8,
        len_bytes: usize,
    ) -> Result<usize, lane::Corrupt> {
        let (latest, is_inline) = (lanes.latest(), self.is_urgent_inline());
        let at_urgent = |urgent, is_first| urgent_handling(urgent, latest, is_first, is_inline);
        // SAFETY: our caller says that so many bytes are writable; under the receive lock there is no other receiver.
        unsafe { (*lanes.receiver.get()).peek_to(skip, destination, len_bytes, at_urgent) }
    }

    /// Goes on where a receive has found fewer bytes than it wants: perhaps it has come to an urgent byte. `moved`
    /// bytes have been received since the call began; `copy` receives more, behind so many. Under the receive lock.
    pub(super) fn receive_past_urgent(
        &self,
        lanes: &Lanes,
        begins: bool,
        moved: usize,
        wanted: usize,
        mut copy: impl FnMut(usize) -> Result<usize, Errno>,
        mut put: impl FnMut(usize, u8),
    ) -> Result<usize, Errno> {
        let mut moved = moved;
        let is_inline = self.is_urgent_inline();
        // SAFETY: under the receive lock, and nothing else uses the receiver meanwhile.
        let receiver = || unsafe { &mut *lanes.receiver.get() };
        while moved < wanted {
            let next = receiver().urgent().map_err(|corrupt| self.reset_for(lanes, corrupt))?;
            let Some(urgent) = next else { return Ok(moved) };
            let kind = urgent_handling(urgent, lanes.latest(), begins && moved == 0, is_inline);
            if kind == UrgentHandling::Stop {
                return Ok(moved);
            }
            self.pass_urgent(lanes, urgent);
            if kind == UrgentHandling::Include {
                put(moved, urgent.byte);
                moved += 1;
            }
            if moved < wanted {
                moved += copy(moved)?;
            }
        }
        Ok(moved)
    }

    /// Takes the urgent byte that comes next out of the stream. Under the receive lock.
    fn pass_urgent(&self, lanes: &Lanes, urgent: Urgent) {
        // SAFETY: under the receive lock.
        let _ = unsafe { (*lanes.receiver.get()).take_urgent() };
        lanes.segment.store(OwnState::Urgent, UrgentProgress { passed: urgent.number, ..lanes.progress() }.to_word());
    }

    /// Gives the urgent byte that comes first to `put`, unless the program receives it out of turn, and takes it out of
    /// the stream. `None`: there is none. Under the receive lock.
    pub(super) fn splice_urgent(
        &self,
        lanes: &Lanes,
        put: impl FnOnce(u8) -> Result<usize, Errno>,
    ) -> Result<Option<usize>, Errno> {
        let next = lanes.observer().urgent().map_err(|corrupt| self.reset_for(lanes, corrupt))?;
        let Some(urgent) = next else { return Ok(None) };
        let kind = urgent_handling(urgent, lanes.latest(), true, self.is_urgent_inline());
        let moved = if kind == UrgentHandling::Include { put(urgent.byte)? } else { 0 };
        self.pass_urgent(lanes, urgent);
        Ok(Some(moved))
    }

    /// Whether a receive that has brought something ends here, however much it waits for: the mark comes next.
    #[cold]
    pub(super) fn ends_at_mark(&'static self) -> bool {
        let _guard = self.lock_direction(&self.receive_lock);
        self.lanes().is_some_and(|lanes| self.receives_by_lane() && self.is_before_mark(lanes))
    }

    /// The program has named who gets `SIGURG`: the peer is asked to have the kernel send it.
    pub fn note_signal_owner(&'static self) {
        const OOB_INLINE: SocketOption = SocketOption { level: libc::SOL_SOCKET, name: libc::SO_OOBINLINE };
        // So that an urgent ring is received as the others are.
        let _ = socket_option::set_raw(self.borrow_lifeline(), OOB_INLINE, &1_u32.to_ne_bytes());
        self.raises_signal.store(true, Ordering::Relaxed);
        let _both = self.lock_both();
        self.publish_signal_owner();
    }

    /// Under both locks.
    pub(super) fn publish_signal_owner(&self) {
        if self.raises_signal.load(Ordering::Relaxed)
            && let Some(lanes) = self.lanes()
        {
            lanes.note_by_lane(RAISES_SIGNAL);
        }
    }

    /// As [`Connection::ring`], with a signal to whom the peer has named.
    #[cold]
    fn ring_urgently(&self) {
        if !self.is_open() || !self.sends_by_lane() || crate::process::sandbox::is_confined() {
            return;
        }
        if system::ring_urgently(self.lifeline()).is_err() {
            self.ring();
        }
    }
}
