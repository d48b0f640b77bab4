//! Urgent data: `MSG_OOB`, as TCP on Linux implements it (RFC 6093 describes how that differs from RFC 793).
//!
//! One byte of the stream is urgent: the last one of a send with `MSG_OOB`. The peer learns of it at once, may receive
//! it out of band, and finds its position in the stream: the *mark*, before which each receive ends. Only the latest
//! urgent byte has a mark; an earlier one is an ordinary byte of the stream.
//!
//! The byte is a record of its own in the lane, which is the mark, and a word that the sender writes into the
//! receiver's endpoint ([`PeerStatus::Urgent`]), which announces the byte at once. Only lanes carry urgent bytes: an
//! endpoint on its lifeline switches to lanes before it sends one. What the receiver has done with the latest byte is
//! kept in its own state ([`OwnState::Urgent`]).
//!
//! `SIGURG` goes to the recipient that `F_SETOWN` has named. The kernel sends it: the ring is then an urgent byte of
//! the lifeline itself (`MSG_OOB` of AF_UNIX, Linux 5.15), which is received in line with other rings.

use super::bad_address::has_bad_address;
use super::lane_kinds::{LaneReceiver, LaneSender};
use super::lanes::Lanes;
use super::lifeline::Lookahead;
use super::wait::{BlockingCall, Deadline};
use super::{Connection, MessageFlags, PeerState, SHUTDOWN_WRITE, reclaim, total_bytes};
use crate::descriptor::hidden::close;
use crate::options::{self, SocketOption};
use crate::process::clock::stamp;
use crate::process::{socket_option, system};
use lane::{Urgent, UrgentHandling};
use libc::iovec;
use rustix::io::Errno;
use segment::{OwnState, PeerStatus, RAISES_SIGNAL, Segment};
use std::sync::atomic::Ordering;

/// Urgent bytes that one receive passes: a peer that sends nothing else must not keep the caller busy.
pub(super) const URGENT_PASSED_MAX: u32 = 4096;

/// What the receiver has done with the latest urgent byte.
#[derive(Debug, Clone, Copy)]
struct UrgentProgress {
    /// The number of the last byte whose mark was passed.
    passed: u32,
    /// The number of the last byte that was received out of band.
    received: u32,
}

impl UrgentProgress {
    fn of_word(word: u64) -> Self {
        Self { passed: word as u32, received: (word >> u32::BITS) as u32 }
    }

    fn to_word(self) -> u64 {
        u64::from(self.passed) | u64::from(self.received) << u32::BITS
    }
}

/// Returns the urgent byte that the peer has announced last, if there is one.
fn announced(memory: &Segment) -> Option<Urgent> {
    let word = if memory.is_in_windows() { 0 } else { memory.status(PeerStatus::Urgent) };
    (word != 0).then(|| Urgent::of_word(word))
}

/// Returns how a receive handles an unread urgent byte, if `latest` is the number of the one that has the mark.
fn urgent_handling(urgent: Urgent, latest: u32, is_first: bool, is_inline: bool) -> UrgentHandling {
    // The record is published before the word that announces it, so an unread record may be newer than the word.
    let is_superseded = (latest.wrapping_sub(urgent.number) as i32) > 0;
    match (is_superseded, is_first) {
        // TCP drops a byte before which the receiver stands when the next one is announced.
        (true, true) | (false, true) if !is_inline => UrgentHandling::Skip,
        (true, _) | (false, true) => UrgentHandling::Include,
        (false, false) => UrgentHandling::Stop,
    }
}

/// Returns the unread bytes before the mark in memory that a pending message refers to. `is_first` means that no byte
/// precedes that memory.
pub(super) fn unread_before_mark(memory: &Segment, is_first: bool, is_inline: bool) -> usize {
    let latest = announced(memory).map_or(0, |urgent| urgent.number);
    let receiver = LaneReceiver::of(memory);
    receiver
        .unread_bytes_with(|urgent, first| count_handling(urgent, latest, first && is_first, is_inline))
        .unwrap_or(0)
}

/// Returns what [`urgent_handling`] does, for the count of `FIONREAD`: none where the receiver stands before the mark.
fn count_handling(urgent: Urgent, latest: u32, is_first: bool, is_inline: bool) -> UrgentHandling {
    match urgent_handling(urgent, latest, is_first, is_inline) {
        _ if is_inline => UrgentHandling::Include,
        UrgentHandling::Skip if urgent.number == latest => UrgentHandling::Stop,
        kind => kind,
    }
}

impl Lanes {
    /// Returns the memory of the incoming lane. The caller holds a lock of the connection, or is a waiter.
    fn incoming(&self) -> &Segment {
        // SAFETY: the cell is written only under both locks and without a waiter; the caller holds a lock or is a
        // waiter.
        unsafe { &*self.inbound.get() }.as_deref().unwrap_or(&self.segment)
    }

    /// Returns whether there has ever been an urgent byte.
    #[inline]
    fn has_been_urgent(&self) -> bool {
        announced(self.incoming()).is_some()
    }

    fn progress(&self) -> UrgentProgress {
        UrgentProgress::of_word(self.segment.load(OwnState::Urgent))
    }

    /// Returns the urgent byte whose mark has not been passed. The caller holds the receive lock.
    fn pending(&self) -> Option<Urgent> {
        announced(self.incoming()).filter(|urgent| urgent.number != self.progress().passed)
    }

    fn latest(&self) -> u32 {
        announced(self.incoming()).map_or(0, |urgent| urgent.number)
    }

    /// Returns whether the peer has named a recipient of `SIGURG`, or cannot have published that yet.
    fn peer_raises_signal(&self) -> bool {
        // SAFETY: the cell is written only under both locks and without a waiter; the caller holds the send lock.
        let inbound = unsafe { &*self.inbound.get() };
        self.segment.status(PeerStatus::Attached) == 0
            || self.segment.peer_raises_signal()
            || inbound.as_deref().is_some_and(Segment::peer_raises_signal)
    }
}

impl Connection {
    /// Returns `SO_OOBINLINE`. The caller holds a lock of the connection, or is a waiter.
    pub(super) fn is_urgent_inline(&self) -> bool {
        self.shared_options() & options::URGENT_INLINE != 0
    }

    /// Sends `spans`, whose last byte is urgent. Returns the number of bytes sent. If it is less than their total, no
    /// byte was sent as urgent.
    ///
    /// # Errors
    /// Those of [`Connection::send`]; `OPNOTSUPP` where urgent bytes cannot be sent: between nodes, and if the endpoint
    /// has to stay on its lifeline.
    ///
    /// # Safety
    /// Every span is readable for its length.
    pub unsafe fn send_urgent(&'static self, spans: &[iovec], flags: MessageFlags) -> Result<usize, Errno> {
        let Some(last) = spans.iter().rposition(|span| span.iov_len > 0) else {
            // SAFETY: every span is readable for its length, by this function's contract.
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
            // SAFETY: every span is readable for its length, by this function's contract.
            return unsafe { self.send(spans, flags) };
        }
        let before = total_bytes(spans) - 1;
        if before > 0 {
            let mut spans = spans[..=last].to_vec();
            spans[last].iov_len -= 1;
            // SAFETY: every span is readable for its length, by this function's contract, and the last one is shortened
            // by a byte.
            let sent = unsafe { self.send(&spans, flags) }?;
            if sent < before {
                return Ok(sent);
            }
        }
        // SAFETY: the span is readable, and has at least one byte.
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

    /// Returns whether sends use a lane that carries urgent bytes. Switches to lanes if need be.
    fn can_send_urgent(&'static self) -> bool {
        if !self.sends_by_lane() && !self.switch_to_lanes() {
            // Messages that the peer has sent meanwhile may bring lanes.
            self.process_messages_for_all();
            let _both = self.lock_both();
            if !self.follow_peer(None) {
                return false;
            }
        }
        let _guard = self.lock_direction(&self.send_lock);
        // SAFETY: the send lock is held, which protects the sender.
        let is_plain = |lanes: &Lanes| matches!(unsafe { &*lanes.sender.get() }, LaneSender::Plain(_));
        self.lanes().is_some_and(|lanes| is_plain(lanes) && !lanes.segment.is_in_windows())
    }

    /// Sends an urgent byte, waiting for room.
    fn send_mark(&'static self, byte: u8, flags: MessageFlags) -> Result<(), Errno> {
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

    /// Sends an urgent byte. Returns `false` if there is no room now.
    fn write_urgent_byte(&'static self, generation: u32, byte: u8) -> Result<bool, Errno> {
        let guard = self.lock_for_generation(generation, &self.send_lock)?;
        let Some(lanes) = self.lanes() else { return Err(Errno::BADF) };
        let shared = match self.lock_across_processes(lanes, OwnState::SendLock) {
            Err(Errno::AGAIN) => return Ok(false),
            locked => locked?,
        };
        if !self.may_send(lanes, 1)? {
            return Ok(true); // As for ordinary bytes, TCP's buffer accepts it.
        }
        let last = Urgent::of_word(lanes.segment.published(PeerStatus::Urgent));
        let urgent = Urgent { byte, number: last.number.wrapping_add(1).max(1) };
        // SAFETY: the send lock is held, which protects the sender.
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
            self.ring(&self.send_lock);
        }
        self.count_sent(1);
        reclaim::sweep_under_pressure();
        Ok(true)
    }

    /// Receives the urgent byte out of band into `spans`. Returns the number of bytes: 0 if the spans have no room. The
    /// byte's position stays in the stream.
    ///
    /// # Errors
    /// `INVAL` if there is none, it was received before, or urgent bytes are received in line (`SO_OOBINLINE`); `FAULT`
    /// for a span at a bad address; those of a lock between processes.
    ///
    /// # Safety
    /// Every span that is not at a bad address is writable for its length.
    pub unsafe fn receive_urgent(&'static self, spans: &[iovec], flags: MessageFlags) -> Result<usize, Errno> {
        self.find_urgent();
        let _guard = self.lock_direction(&self.receive_lock);
        if self.is_urgent_inline() {
            return Err(Errno::INVAL);
        }
        let Some(lanes) = self.lanes() else { return Err(Errno::INVAL) };
        let _shared = self.lock_as_program_waits(lanes, OwnState::ReceiveLock)?;
        let progress = lanes.progress();
        let Some(urgent) = lanes.pending().filter(|urgent| urgent.number != progress.received) else {
            return Err(Errno::INVAL);
        };
        if !flags.peek {
            lanes.segment.store(OwnState::Urgent, UrgentProgress { received: urgent.number, ..progress }.to_word());
        }
        let Some(span) = spans.iter().find(|span| span.iov_len > 0) else { return Ok(0) };
        if has_bad_address(spans) {
            return Err(Errno::FAULT);
        }
        if !flags.discard {
            // SAFETY: no span is at a bad address, so this one is writable by this function's contract, and it has a
            // byte.
            unsafe { span.iov_base.cast::<u8>().write(urgent.byte) };
        }
        Ok(1)
    }

    /// Returns whether the next receive begins at the urgent byte (`SIOCATMARK`).
    pub fn is_at_mark(&'static self) -> bool {
        self.find_urgent();
        let _both = self.lock_both();
        if self.is_on_lifeline() && self.bytes_before_message() > 0 {
            return false;
        }
        self.lanes().is_some_and(|lanes| self.is_before_mark(lanes))
    }

    /// Returns the number of bytes in the lifeline before the first message. The caller holds both locks.
    fn bytes_before_message(&self) -> usize {
        let Lookahead { bytes, memory, .. } = self.look_ahead();
        memory.into_iter().for_each(close);
        bytes
    }

    /// Returns whether the receiver stands before the mark. The caller holds the receive lock.
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

    /// Processes messages and attaches memory, for a connection on its lifeline: the peer announces urgent bytes in the
    /// memory that a message refers to, even one that follows unread bytes.
    fn find_urgent(&'static self) {
        if !self.is_on_lifeline() {
            return;
        }
        self.process_messages_for_all();
        self.attach_for_urgent();
    }

    /// Attaches the memory of a message that follows unread bytes, after the messages that come first have been
    /// processed.
    fn attach_for_urgent(&'static self) {
        if !self.is_on_lifeline() {
            return;
        }
        let Some(_both) = self.lock_both() else { return };
        if !self.is_on_lifeline() || !self.may_get_lanes() || self.unread_as_peeked().is_some() {
            return;
        }
        self.attach_next_memory();
    }

    /// Returns `POLLPRI` if it is `wanted` and holds.
    pub(super) fn urgent_readiness(&'static self, wanted: i16) -> i16 {
        if wanted & libc::POLLPRI == 0 {
            return 0;
        }
        self.attach_for_urgent();
        let _guard = self.lock_direction(&self.receive_lock);
        let is_there = |lanes: &Lanes| lanes.pending().is_some_and(|urgent| urgent.number != lanes.progress().received);
        if self.lanes().is_some_and(is_there) { libc::POLLPRI } else { 0 }
    }

    /// Returns whether at least `low_water_bytes` are unread. An urgent byte that comes first does not count, unless it
    /// is received in line. The caller holds the receive lock.
    pub(super) fn has_unread(&self, lanes: &Lanes, low_water_bytes: usize) -> bool {
        (low_water_bytes <= 1 && !lanes.has_been_urgent()) || self.has_unread_counting(lanes, low_water_bytes)
    }

    /// Counts for [`Connection::has_unread`]. The caller holds the receive lock.
    #[cold]
    fn has_unread_counting(&self, lanes: &Lanes, low_water_bytes: usize) -> bool {
        let mut skipped = 0;
        let unread = lanes.observer().unread_bytes_with(|_, is_first| {
            skipped += u32::from(is_first);
            match is_first && !self.is_urgent_inline() {
                true if skipped > URGENT_PASSED_MAX => UrgentHandling::Stop,
                true => UrgentHandling::Skip,
                false => UrgentHandling::Include,
            }
        });
        // After more urgent bytes than a receive passes there may be others, which later receives find.
        skipped > URGENT_PASSED_MAX || unread.is_ok_and(|bytes| bytes >= low_water_bytes.max(1))
    }

    /// Returns the unread bytes in the lane before the mark. The caller holds the receive lock.
    pub(super) fn unread_to_mark(&self, lanes: &Lanes) -> usize {
        let (latest, is_inline) = (lanes.latest(), self.is_urgent_inline());
        let unread =
            lanes.observer().unread_bytes_with(|urgent, first| count_handling(urgent, latest, first, is_inline));
        unread.unwrap_or(0)
    }

    /// Copies unread bytes up to the mark, as [`LaneReceiver::peek_to`] does. The caller holds the receive lock.
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
        // SAFETY: `destination` is writable for `len_bytes`, by this function's contract, and the caller holds the
        // receive lock, which protects the receiver.
        unsafe { (*lanes.receiver.get()).peek_to(skip, destination, len_bytes, at_urgent) }
    }

    /// Continues a receive that has found fewer bytes than it wants, possibly because it has come to an urgent byte.
    /// `moved` bytes have been received since the call began. `copy` receives more after the given number of bytes;
    /// `put` stores an urgent byte there. The caller holds the receive lock.
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
        // SAFETY: the caller holds the receive lock, and each reference ends before the next one is made.
        let receiver = || unsafe { &mut *lanes.receiver.get() };
        for _ in 0..URGENT_PASSED_MAX {
            if moved >= wanted {
                return Ok(moved);
            }
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
        self.note_cut_receive();
        Ok(moved)
    }

    /// Removes the urgent byte that comes next from the stream. The caller holds the receive lock.
    fn pass_urgent(&self, lanes: &Lanes, urgent: Urgent) {
        // SAFETY: the caller holds the receive lock, which protects the receiver.
        let _ = unsafe { (*lanes.receiver.get()).take_urgent() };
        lanes.segment.store(OwnState::Urgent, UrgentProgress { passed: urgent.number, ..lanes.progress() }.to_word());
    }

    /// Removes the urgent byte that comes first from the stream, and passes it to `put` unless the program receives it
    /// out of band. Returns `None` if there is none. The caller holds the receive lock.
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

    /// Returns whether a receive that has received something ends here, whatever it waits for, because the mark comes
    /// next.
    #[cold]
    pub(super) fn ends_at_mark(&'static self) -> bool {
        let _guard = self.lock_direction(&self.receive_lock);
        self.lanes().is_some_and(|lanes| self.receives_by_lane() && self.is_before_mark(lanes))
    }

    /// Asks the peer to make the kernel send `SIGURG`, because the program has named a recipient.
    pub fn note_signal_owner(&'static self) {
        const OOB_INLINE: SocketOption = SocketOption { level: libc::SOL_SOCKET, name: libc::SO_OOBINLINE };
        // So that an urgent ring is received like other rings.
        let _ = socket_option::set_raw(self.borrow_lifeline(), OOB_INLINE, &1_u32.to_ne_bytes());
        self.raises_signal.store(true, Ordering::Relaxed);
        let _both = self.lock_both();
        self.publish_signal_owner();
    }

    /// Publishes to the peer that there is a recipient of `SIGURG`. The caller holds both locks.
    pub(super) fn publish_signal_owner(&self) {
        if self.raises_signal.load(Ordering::Relaxed)
            && let Some(lanes) = self.lanes()
        {
            lanes.note_by_lane(RAISES_SIGNAL);
        }
    }

    /// Rings as [`Connection::ring`] does, with a signal to the recipient that the peer has named.
    #[cold]
    fn ring_urgently(&'static self) {
        let _guard = self.lock_direction(&self.send_lock);
        if self.can_ring() && system::ring_urgently(self.lifeline()).is_err() {
            self.ring_locked();
        }
    }
}
