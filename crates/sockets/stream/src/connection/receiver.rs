//! The receiving half of a connection.

mod after_fork;

use super::lanes::InLane;
use super::leftover::Leftover;
use crate::flags::MessageFlags;
use crate::kernel::{self, Tcp};
use crate::spans::{Part, for_each_part, total_bytes};
use crate::statistics::Counters;
use after_fork::Requested;
use lane::ShortRead;
use libc::iovec;
use path::{EndWord, Failure, ReceiveBy, ReceiverIo, Receiving, Word, Words};
use rustix::io::Errno;
use socket::process::blocking;
use socket::process::clock::{TICKS_PER_MILLISECOND, ticks};
use std::convert::Infallible;

/// Events after which the kernel has nothing more to report than the end.
const ENDED: i16 = libc::POLLRDHUP | libc::POLLHUP;

/// The peer violated a protocol: the connection cannot continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Violation;

impl From<lane::Corrupt> for Violation {
    fn from(_: lane::Corrupt) -> Self {
        Self
    }
}

impl From<Failure<Infallible>> for Violation {
    fn from(_: Failure<Infallible>) -> Self {
        Self
    }
}

/// The receiving half of a connection: by TCP, or by a lane.
#[derive(Default)]
pub(super) struct Receiver {
    path: Receiving,
    counters: Counters,
    /// Present from the meeting of the two ends on.
    lane: Option<InLane>,
    /// Calls of the program that receive by TCP now: such a call may take bytes at any time.
    calls_in_kernel: u32,
    /// [`Young::number`](crate::young::Young::number) of the connection: some of these calls have begun before there
    /// was an object.
    number: u32,
    /// The kernel has reported an event of the socket since it was last asked.
    has_kernel_event: bool,
    /// When the kernel was last asked, by the processor's clock.
    asked_ticks: u64,
    /// No process holds the peer's bell any more.
    has_peer_left: bool,
    /// How many sets do not allow moves.
    forbidden: u32,
    /// This end does not consent to moves: other processes may hold the connection, or only TCP can do what the program
    /// does with it.
    is_staying: bool,
    /// The lane of the parent of this process, which is dropped with the connection.
    left_to_parent: Option<InLane>,
    /// What comes before everything else.
    leftover: Option<Leftover>,
    /// What the peer was asked to write to TCP, before a fork.
    requested: Option<Requested>,
}

/// The result of one attempt to receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempt {
    /// This number of bytes was received.
    Got { bytes: usize, wakes_sender: bool },
    /// The stream has ended.
    End,
    /// The kernel reported this error.
    Error(Errno),
    /// Nothing has arrived.
    Nothing,
    /// The call is the kernel's.
    Kernel,
}

struct ReceiveIo<'a> {
    counters: &'a Counters,
    lane: &'a mut InLane,
    tcp: Tcp,
}

impl Words for ReceiveIo<'_> {
    type Stop = Infallible;

    fn load(&mut self, word: Word) -> Result<u64, Infallible> {
        Ok(self.lane.load(word))
    }

    fn store(&mut self, word: Word, value: u64) -> Result<(), Infallible> {
        self.lane.store(word, value);
        Ok(())
    }

    fn fence(&mut self) -> Result<(), Infallible> {
        volmem::sync::fence(volmem::sync::Ordering::SeqCst);
        Ok(())
    }
}

impl ReceiverIo for ReceiveIo<'_> {
    fn bytes_read(&mut self) -> Result<Option<u64>, Infallible> {
        Ok(kernel::bytes_read(self.tcp))
    }

    fn bytes_available(&mut self) -> Result<u64, Infallible> {
        Ok(self.tcp.available())
    }

    fn has_urgent_byte(&mut self) -> Result<bool, Infallible> {
        Ok(kernel::has_urgent_byte(self.tcp))
    }

    fn begins_at(&mut self) -> Result<u64, Infallible> {
        Ok(self.lane.begins_at())
    }

    fn enter(&mut self) -> Result<(), Infallible> {
        self.counters.note_receiving_path(true);
        self.lane.enter();
        Ok(())
    }

    fn has_reached_end(&mut self) -> Result<Option<bool>, Infallible> {
        Ok(self.lane.has_reached_end())
    }

    fn bytes_repeated(&mut self) -> Result<u64, Infallible> {
        Ok(self.lane.bytes_repeated())
    }

    fn bytes_unread(&mut self) -> Result<u64, Infallible> {
        // A violation counts as more than can be repeated.
        Ok(self.lane.unread_bytes().map_or(u64::MAX, |bytes| bytes as u64))
    }

    fn drop_bytes(&mut self, bytes_max: u64) -> Result<u64, Infallible> {
        Ok(self.tcp.drop_bytes(bytes_max))
    }

    fn publish_cursor(&mut self, has_entered: bool) -> Result<(), Infallible> {
        self.lane.publish_cursor(has_entered);
        Ok(())
    }
}

impl Receiver {
    /// Begins to use the lane, now that the ends have met. This end does not consent to moves before
    /// [`Receiver::allow_moves`]: the sets that hold the connection must know of the lane first.
    pub fn install(&mut self, lane: InLane, counters: Counters) {
        // Field by field, as the sender.
        self.path = Receiving::default();
        self.lane = Some(lane);
        self.left_to_parent = None;
        self.has_peer_left = false;
        self.counters = counters;
        self.forbidden += 1;
    }

    /// Counts what TCP carries before the ends meet.
    pub fn set_counters(&mut self, counters: Counters) {
        self.counters = counters;
    }

    /// Returns the lane, if the ends have met.
    pub fn lane(&mut self) -> Option<&mut InLane> {
        self.lane.as_mut()
    }

    /// Returns the lane if receives go by it.
    #[inline(always)]
    pub fn lane_in_use(&mut self) -> Option<&mut InLane> {
        if self.is_by_lane() { self.lane.as_mut() } else { None }
    }

    /// Returns the lane if it has, or will have, the next bytes behind those that TCP has.
    pub fn lane_to_watch(&mut self) -> Option<&mut InLane> {
        let is_before_lane = self.path.bytes_before_lane().is_some();
        if !is_before_lane && !self.is_by_lane() {
            return None;
        }
        let lane = self.lane.as_mut()?;
        if is_before_lane {
            lane.enter();
        }
        Some(lane)
    }

    /// Returns whether receives go by the lane.
    #[inline(always)]
    pub fn is_by_lane(&self) -> bool {
        matches!(self.path, Receiving::Lane { .. })
    }

    /// Returns whether receives are the kernel's, unchanged.
    pub fn is_plain(&self) -> bool {
        matches!(self.path, Receiving::Plain { .. }) && self.leftover_bytes() == 0 && self.requested.is_none()
    }

    /// Returns whether a receive would find bytes.
    pub fn has_bytes(&mut self, tcp: Tcp) -> bool {
        self.unread_bytes(tcp.available()) > 0 || self.abandoned_bytes(tcp) > 0
    }

    /// Returns the number of unread bytes, if TCP has `in_tcp` of them.
    pub fn unread_bytes(&mut self, in_tcp: u64) -> u64 {
        (self.leftover_bytes() as u64).saturating_add(self.unread_bytes_of_path(in_tcp))
    }

    fn unread_bytes_of_path(&mut self, in_tcp: u64) -> u64 {
        let Some(lane) = self.lane.as_mut() else { return in_tcp };
        if self.path.bytes_before_lane() == Some(in_tcp) {
            lane.enter();
            return in_tcp.saturating_add(lane.unread_bytes().unwrap_or(0) as u64);
        }
        let (in_lane, on_both) = match self.path.lane() {
            Some(number) => (lane.unread_bytes().unwrap_or(0) as u64, lane.bytes_on_both(number)),
            None => (0, self.path.bytes_to_drop()),
        };
        in_lane.saturating_add(in_tcp.saturating_sub(on_both))
    }

    /// Returns whether there is input for the program, now that the kernel has reported some.
    ///
    /// # Errors
    /// As [`Receiver::prepare`].
    pub fn confirm_input(&mut self, tcp: Tcp) -> Result<bool, Violation> {
        if self.leftover_bytes() > 0 {
            return Ok(true);
        }
        let Some(lane) = self.lane.as_mut() else { return Ok(true) };
        if let Receiving::Plain { .. } = self.path {
            return Ok(true);
        }
        let io = &mut ReceiveIo { counters: &self.counters, lane, tcp };
        let mut by = self.path.prepare(false, io)?;
        if by == ReceiveBy::Lane {
            if io.lane.may_have_data() {
                return Ok(true);
            }
            by = self.path.note_empty(io)?;
        }
        Ok(match by {
            ReceiveBy::Kernel => blocking::poll_now(tcp.0, libc::POLLIN) != 0,
            ReceiveBy::KernelUpTo(_) | ReceiveBy::Lane => true,
            // A sender that died has not written all of them: then this is the end.
            ReceiveBy::Nothing => {
                self.path.bytes_to_drop() == 0 || blocking::poll_now(tcp.0, libc::POLLRDHUP) & ENDED != 0
            }
        })
    }

    /// Returns the bytes that this end has received by lanes.
    pub fn bytes_by_lane(&self) -> u64 {
        self.counters.carried_bytes().1
    }

    /// Notes that a call of the program receives by TCP.
    pub fn enter_kernel(&mut self) {
        self.calls_in_kernel += 1;
    }

    /// Takes over the calls that were counted before there was an object.
    pub fn adopt_calls(&mut self, number: u32, calls: u32) {
        (self.number, self.calls_in_kernel) = (number, calls);
    }

    /// Notes that a call of the connection `number` has returned, and has received this number of bytes. Returns
    /// whether it is this one.
    pub fn leave_young(&mut self, number: u32, bytes: usize) -> bool {
        let is_known = self.number == number && self.calls_in_kernel > 0;
        if is_known {
            self.leave_kernel(bytes);
        }
        is_known
    }

    /// Notes that it has returned, and has received this number of bytes.
    pub fn leave_kernel(&mut self, bytes: usize) {
        self.counters.add_by_tcp(0, bytes);
        self.counters.note_receiving_path(self.is_by_lane());
        self.calls_in_kernel = self.calls_in_kernel.saturating_sub(1);
    }

    /// Does not consent to moves until [`Receiver::allow_moves`] is called as often.
    pub fn forbid_moves(&mut self) {
        self.forbidden += 1;
    }

    /// Ends [`Receiver::forbid_moves`].
    pub fn allow_moves(&mut self) {
        self.forbidden = self.forbidden.saturating_sub(1);
    }

    /// Does not consent to moves until this is ended.
    pub fn set_staying(&mut self, is_staying: bool) {
        self.is_staying = is_staying;
    }

    /// Returns whether a call of the program is in the kernel.
    pub fn is_busy(&self) -> bool {
        self.calls_in_kernel > 0
    }

    /// Notes that the kernel has reported an event of the socket.
    pub fn note_kernel_event(&mut self) {
        self.has_kernel_event = true;
    }

    /// Returns whether a receive that has found nothing must ask the kernel: there may be an end that memory does not
    /// show.
    pub fn must_ask_kernel(&mut self) -> bool {
        let has_closed = self.lane.as_ref().is_none_or(InLane::has_peer_closed);
        let now = ticks();
        let is_due = now.wrapping_sub(self.asked_ticks) > TICKS_PER_MILLISECOND;
        let asks = self.has_kernel_event || has_closed || is_due || self.has_peer_left || !self.is_by_lane();
        if asks {
            self.asked_ticks = now;
        }
        asks
    }

    /// Notes that no process holds the peer's bell any more.
    pub fn note_hang_up(&mut self) {
        self.has_peer_left = true;
    }

    /// Returns how the next bytes are to be received.
    ///
    /// # Errors
    /// [`Violation`] if the peer published what no correct peer does; the same holds below.
    pub fn prepare(&mut self, tcp: Tcp) -> Result<ReceiveBy, Violation> {
        self.prepare_for(true, tcp)
    }

    /// Consents to a move; to the first one even if the peer has not asked for it yet.
    pub fn consent(&mut self, tcp: Tcp) {
        if self.path != Receiving::default() {
            // A violation is found again by the next receive, which reports it.
            let _ = self.prepare(tcp);
        } else if self.is_willing()
            && let Some(lane) = self.lane.as_mut()
        {
            let Ok(()) = self.path.consent_to_first(&mut ReceiveIo { counters: &self.counters, lane, tcp });
        }
    }

    fn is_willing(&self) -> bool {
        // A call that waits in the kernel would take bytes that are not counted.
        let may_move = self.calls_in_kernel == 0 && self.forbidden == 0 && !self.is_staying;
        // Bytes that come first are elsewhere, or nobody would send by the lane.
        may_move && self.leftover.is_none() && self.requested.is_none() && !self.has_peer_left
    }

    /// As [`Receiver::prepare`]. A call that only the kernel can make is not willing to move.
    fn prepare_for(&mut self, is_willing: bool, tcp: Tcp) -> Result<ReceiveBy, Violation> {
        let is_willing = is_willing && self.is_willing();
        let Some(lane) = self.lane.as_mut() else { return Ok(ReceiveBy::Kernel) };
        Ok(self.path.prepare(is_willing, &mut ReceiveIo { counters: &self.counters, lane, tcp })?)
    }

    /// Returns how to receive where nothing was found, if the peer is gone.
    pub fn prepare_last(&mut self, tcp: Tcp) -> Result<ReceiveBy, Violation> {
        match self.lane.as_mut() {
            Some(lane) if self.has_peer_left => {
                Ok(self.path.note_peer_left(&mut ReceiveIo { counters: &self.counters, lane, tcp })?)
            }
            _ => Ok(ReceiveBy::Nothing),
        }
    }

    /// Returns how to receive, now that the lane was found empty.
    ///
    /// # Errors
    /// As [`Receiver::prepare`].
    pub fn note_empty(&mut self, tcp: Tcp) -> Result<ReceiveBy, Violation> {
        let Some(lane) = self.lane.as_mut() else { return Ok(ReceiveBy::Kernel) };
        Ok(self.path.note_empty(&mut ReceiveIo { counters: &self.counters, lane, tcp })?)
    }

    /// Receives what has arrived, after the first `skip` bytes of the spans.
    ///
    /// # Safety
    /// Every span is writable for its length.
    pub unsafe fn receive(
        &mut self,
        tcp: Tcp,
        spans: &[iovec],
        skip: usize,
        flags: MessageFlags,
    ) -> Result<Attempt, Violation> {
        if let Some(leftover) = &self.leftover {
            // SAFETY: every span is writable for its length, by this function's contract.
            let bytes = unsafe { leftover.receive(spans, skip, flags.peek(), flags.discard()) };
            // Another process may have taken the rest.
            if bytes > 0 || leftover.unread_bytes() > 0 {
                return Ok(Attempt::Got { bytes, wakes_sender: false });
            }
            self.leftover = None;
        }
        if self.requested.is_some() && !flags.kernel_only() && self.awaits_requested() {
            // SAFETY: every span is writable for its length, by this function's contract.
            return unsafe { self.receive_requested(tcp, spans, skip, flags) };
        }
        let mut by = self.prepare_for(!flags.kernel_only(), tcp)?;
        loop {
            match by {
                ReceiveBy::Kernel => return Ok(Attempt::Kernel),
                ReceiveBy::Nothing => {
                    by = self.prepare_last(tcp)?;
                    if by == ReceiveBy::Nothing {
                        return Ok(Attempt::Nothing);
                    }
                }
                ReceiveBy::KernelUpTo(bytes_max) => {
                    // SAFETY: every span is writable for its length, by this function's contract.
                    let got = unsafe { self.receive_up_to(tcp, spans, skip, bytes_max, flags) };
                    let Attempt::Got { bytes, .. } = got else { return Ok(got) };
                    if flags.peek() && self.path.bytes_before_lane() == Some(bytes as u64) {
                        // SAFETY: every span is writable for its length, by this function's contract.
                        return unsafe { self.peek_on(spans, skip + bytes, bytes, flags) };
                    }
                    if !self.path.is_before_lane() || self.prepare(tcp)? != ReceiveBy::Lane {
                        return Ok(got);
                    }
                    // SAFETY: every span is writable for its length, by this function's contract.
                    return Ok(match unsafe { self.read_lane(spans, skip + bytes, flags) }? {
                        Attempt::Got { bytes: more, wakes_sender } => {
                            Attempt::Got { bytes: bytes + more, wakes_sender }
                        }
                        _ => got,
                    });
                }
                ReceiveBy::Lane => {
                    // SAFETY: every span is writable for its length, by this function's contract.
                    let got = unsafe { self.read_lane(spans, skip, flags) }?;
                    if got != Attempt::Nothing {
                        return Ok(got);
                    }
                    let Some(lane) = self.lane.as_mut() else { return Ok(Attempt::Kernel) };
                    by = self.path.note_empty(&mut ReceiveIo { counters: &self.counters, lane, tcp })?;
                }
            }
        }
    }

    /// Continues a peek behind the `bytes` that TCP has before the lane.
    ///
    /// # Safety
    /// Every span is writable for its length.
    unsafe fn peek_on(
        &mut self,
        spans: &[iovec],
        skip: usize,
        bytes: usize,
        flags: MessageFlags,
    ) -> Result<Attempt, Violation> {
        if let Some(lane) = self.lane.as_mut() {
            // It is entered again once the bytes before it are read.
            lane.enter();
        }
        // SAFETY: every span is writable for its length, by this function's contract.
        let more = match unsafe { self.read_lane(spans, skip, flags) }? {
            Attempt::Got { bytes, .. } => bytes,
            _ => 0,
        };
        Ok(Attempt::Got { bytes: bytes + more, wakes_sender: false })
    }

    /// Reads a record into a span, if receives go by the lane. Also returns whether the sender sleeps and is to be rung
    /// for.
    ///
    /// # Safety
    /// The span is writable for its length.
    #[inline(always)] // Part of the path of short messages.
    pub unsafe fn read_short(&mut self, span: &iovec) -> (ShortRead, bool) {
        let (Some(number), Some(lane)) = (self.path.lane(), self.lane.as_mut()) else {
            return (ShortRead::UseReadTo, false);
        };
        // What follows the lane may be here already.
        if EndWord::from_word(lane.load(Word::Ended)).number == number {
            return (ShortRead::UseReadTo, false);
        }
        // SAFETY: the span is writable for its length, by this function's contract.
        let read = unsafe { lane.read_short(span.iov_base.cast(), span.iov_len) };
        let ShortRead::Read(bytes) = read else { return (read, false) };
        lane.note_order();
        self.counters.add_received(bytes);
        (read, lane.take_wake_request())
    }

    /// Receives at most `bytes_max` bytes from the kernel.
    ///
    /// # Safety
    /// Every span is writable for its length.
    pub unsafe fn receive_up_to(
        &mut self,
        tcp: Tcp,
        spans: &[iovec],
        skip: usize,
        bytes_max: u64,
        flags: MessageFlags,
    ) -> Attempt {
        let bits = if flags.peek() { libc::MSG_PEEK } else { 0 } | if flags.discard() { libc::MSG_TRUNC } else { 0 };
        let bytes_max = usize::try_from(bytes_max).unwrap_or(usize::MAX).min(total_bytes(spans) - skip);
        let mut done = 0;
        // A receive that is shorter than its spans says that there is nothing more: programs then wait for an edge.
        loop {
            let part = Part::new(spans, skip + done, bytes_max - done);
            let wanted = total_bytes(part.spans());
            // SAFETY: the part is within spans that are writable, by this function's contract.
            match unsafe { tcp.receive(part.spans(), bits) } {
                Ok(bytes) => {
                    done += bytes;
                    if !flags.peek() {
                        self.counters.add_by_tcp(0, bytes);
                        self.path.note_read(bytes as u64);
                    }
                    if done == 0 && wanted > 0 {
                        return Attempt::End;
                    }
                    // A receive that finds nothing would take the socket's error, which the next call is to report.
                    if bytes < wanted || done == bytes_max || flags.peek() || tcp.available() == 0 {
                        return Attempt::Got { bytes: done, wakes_sender: false };
                    }
                }
                Err(_) if done > 0 => return Attempt::Got { bytes: done, wakes_sender: false },
                Err(Errno::AGAIN | Errno::INTR) => return Attempt::Nothing,
                Err(error) => return Attempt::Error(error),
            }
        }
    }

    /// Reads the lane.
    ///
    /// # Safety
    /// Every span is writable for its length.
    unsafe fn read_lane(&mut self, spans: &[iovec], skip: usize, flags: MessageFlags) -> Result<Attempt, Violation> {
        let Some(lane) = self.lane.as_mut() else { return Ok(Attempt::Kernel) };
        let mut done = 0;
        let bytes = for_each_part::<Violation>(spans, skip, usize::MAX, |to, len_bytes| {
            let got = match (flags.peek(), flags.discard()) {
                (true, true) => lane.unread_bytes()?.saturating_sub(done).min(len_bytes),
                // SAFETY: the part is within spans that are writable, by this function's contract.
                (true, false) => unsafe { lane.peek_to(done, to, len_bytes) }?,
                (false, true) => lane.discard(len_bytes)?,
                // SAFETY: the part is within spans that are writable, by this function's contract.
                (false, false) => unsafe { lane.read_to(to, len_bytes) }?,
            };
            done += got;
            Ok(got)
        })?;
        if bytes == 0 {
            return Ok(Attempt::Nothing);
        }
        let wakes_sender = !flags.peek() && lane.take_wake_request();
        if !flags.peek() {
            lane.note_order();
            self.counters.add_received(bytes);
        }
        Ok(Attempt::Got { bytes, wakes_sender })
    }

    /// Receives once the kernel has reported `events` of the socket, after an attempt that has found nothing. Whatever
    /// the peer published before those events is visible by now.
    ///
    /// # Safety
    /// Every span is writable for its length.
    pub unsafe fn receive_after(
        &mut self,
        events: i16,
        tcp: Tcp,
        spans: &[iovec],
        skip: usize,
        flags: MessageFlags,
    ) -> Result<Attempt, Violation> {
        // The end remains to be found by the next receive.
        self.has_kernel_event = events & ENDED != 0;
        let has_bytes = events & libc::POLLIN != 0 && tcp.available() > 0;
        // SAFETY: every span is writable for its length, by this function's contract.
        let attempt = unsafe { self.receive(tcp, spans, skip, flags) }?;
        if attempt != Attempt::Nothing {
            return Ok(attempt);
        }
        if events & ENDED != 0 {
            if skip > 0 {
                // The next call is to report the error, if there is one: this one would take it.
                return Ok(Attempt::End);
            }
            // Nothing can follow the end, so this call cannot cross the beginning of a lane.
            let part = Part::new(spans, skip, usize::MAX);
            // SAFETY: the part is within spans that are writable, by this function's contract.
            return match unsafe { tcp.receive(part.spans(), 0) } {
                Ok(0) => Ok(Attempt::End),
                Ok(_) => Err(Violation),
                Err(Errno::AGAIN | Errno::INTR) => Ok(Attempt::Nothing),
                Err(error) => Ok(Attempt::Error(error)),
            };
        }
        // Whoever writes to TCP has ended the lane before.
        if has_bytes && self.is_by_lane() { Err(Violation) } else { Ok(Attempt::Nothing) }
    }

    /// Leaves the lane. Returns whether everything that is unread comes by TCP.
    pub fn freeze(&mut self, tcp: Tcp, is_for_fork: bool) -> Result<bool, Violation> {
        if self.has_peer_left && self.lane.is_some() {
            // Nobody would write what is unread to TCP: it is read here.
            let is_unread = self.lane_in_use().is_some_and(|lane| lane.may_have_data());
            return Ok(is_unread || self.prepare_last(tcp)? != ReceiveBy::Nothing);
        }
        let Some(lane) = self.lane.as_mut() else { return Ok(true) };
        let is_entered = matches!(self.path, Receiving::Lane { .. });
        let was_plain = matches!(self.path, Receiving::Plain { .. });
        let is_done = self.path.freeze(&mut ReceiveIo { counters: &self.counters, lane, tcp })?;
        if let Receiving::Plain { last } = self.path
            && !was_plain
            && is_for_fork
        {
            self.note_request(last, is_entered);
        }
        Ok(is_done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    #[test]
    fn a_receive_by_tcp_fills_all_spans() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut client = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        let (server, _) = listener.accept().expect("a connection");
        let sent: Vec<u8> = (0..2000_u32).map(|number| number as u8).collect();
        client.write_all(&sent).expect("room");
        let tcp = Tcp(server.as_raw_fd());
        while tcp.available() < 2000 {
            std::thread::yield_now();
        }
        let mut bytes = [[0_u8; 100]; 30];
        let spans = bytes.each_mut().map(|span| iovec { iov_base: span.as_mut_ptr().cast(), iov_len: span.len() });
        let receive = |skip, bytes_max| {
            // SAFETY: the spans are arrays of this length.
            unsafe { Receiver::default().receive_up_to(tcp, &spans, skip, bytes_max, MessageFlags::default()) }
        };
        assert_eq!(receive(0, 1234), Attempt::Got { bytes: 1234, wakes_sender: false });
        assert_eq!(receive(1234, u64::MAX), Attempt::Got { bytes: 766, wakes_sender: false });
        assert_eq!(receive(2000, u64::MAX), Attempt::Nothing);
        assert_eq!(bytes.concat()[..2000], sent);
    }
}
