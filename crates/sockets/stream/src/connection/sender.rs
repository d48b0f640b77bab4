//! The sending half of a connection.

use super::lanes::{Fill, Filled, OutLane};
use super::reclaim::Growth;
use crate::kernel::{self, Tcp};
use crate::spans::{for_each_part, total_bytes};
use crate::statistics::Counters;
use lane::Corrupt;
use libc::iovec;
use meeting::Role;
use path::{SendBy, SenderIo, Sending, Word, Words};
use rustix::io::Errno;
use socket::process::blocking;
use std::convert::Infallible;

/// The sending half of a connection: by TCP, or by a lane.
#[derive(Default)]
pub(super) struct Sender {
    path: Sending,
    counters: Counters,
    /// Present from the meeting of the two ends on.
    lane: Option<OutLane>,
    /// Calls of the program that send by TCP now. Bytes that such a call writes would not be counted.
    calls_in_kernel: u32,
    /// [`Young::number`](crate::young::Young::number) of the connection: some of these calls have begun before there
    /// was an object.
    number: u32,
    /// When this end asks for a move again; `None` for never.
    asks_after: Option<AsksAfter>,
    /// This end does not ask for moves, as long as other processes may hold the connection.
    is_paused: bool,
    /// The lane of the parent of this process, which is dropped with the connection.
    left_to_parent: Option<OutLane>,
    /// The parent of this process has not yet written to TCP what the receiver has left in the lane.
    misses_bytes: bool,
    room: Room,
    /// How often a send that found no room was followed by room.
    rooms: u64,
    /// Bytes that were written to TCP of what is unread in the lane.
    bytes_resent: usize,
    /// The sum of all such bytes.
    bytes_resent_ever: u64,
    growth: Growth,
}

/// Whether polls have room to report of which the kernel does not know.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Room {
    #[default]
    Nothing,
    /// A send by the lane has found no room, and no poll has found room since.
    Missing,
    /// The direction has gone back to TCP since, and a poll has found room there. It is reported until the next send by
    /// TCP: for an edge-triggered watcher this is an edge, and the kernel may report none.
    OnTcp,
}

/// Sends by TCP after which this end asks for a move.
struct AsksAfter {
    left: u32,
    /// The number for the next time.
    next: u32,
}

/// Sends after the end of a move before this end first asks for another one; doubled each time.
const ASKS_AFTER_SENDS: u32 = 16;

const OUTPUT: i16 = libc::POLLOUT | libc::POLLWRNORM;

/// Spans of one send of what is unread in a lane.
const RESENT_SPANS: usize = 32;

/// Milliseconds that the end of a stream waits for room for what is unread in the lane.
const FINISH_WAIT_MS: i32 = 1000;

/// What a send by the lane has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Written {
    /// Bytes that are in the lane.
    pub bytes: usize,
    /// The receiver sleeps, and its bell must be rung.
    pub wakes_receiver: bool,
}

/// How the source of a send has ended.
pub(super) type Ended = Result<(), Errno>;

/// The result of writing to TCP what is unread in a lane that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Resent {
    /// Everything.
    All,
    /// TCP has no more room now.
    Blocked,
    /// The connection is over; the next send reports how.
    Ended,
}

struct SendIo<'a> {
    counters: &'a Counters,
    lane: &'a mut OutLane,
    tcp: Tcp,
    role: Role,
    is_alone: bool,
}

impl Words for SendIo<'_> {
    type Stop = Infallible;

    #[inline(always)]
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

impl SenderIo for SendIo<'_> {
    fn bytes_written(&mut self) -> Result<Option<u64>, Infallible> {
        if !self.is_alone {
            return Ok(None);
        }
        let known = kernel::bytes_written_and_room(self.tcp, self.role);
        Ok(known.filter(|(_, room)| self.lane.may_begin(*room)).map(|(bytes, _)| bytes))
    }

    fn publish_begin(&mut self, bytes_written: u64) -> Result<(), Infallible> {
        self.counters.note_sending_path(true);
        self.lane.begin(bytes_written);
        Ok(())
    }

    fn publish_end(&mut self, is_frozen: bool) -> Result<(), Infallible> {
        self.counters.note_sending_path(false);
        self.lane.end(is_frozen);
        Ok(())
    }
}

impl Sender {
    /// Begins to use the lane, now that the ends have met: asks for the first move.
    pub fn install(&mut self, lane: OutLane, counters: Counters, tcp: Tcp, role: Role) {
        // Field by field: a whole sender on the stack would be too large for the smallest stacks of threads.
        (self.path, self.room, self.bytes_resent) = (Sending::default(), Room::Nothing, 0);
        self.lane = Some(lane);
        self.left_to_parent = None;
        self.set_counters(counters);
        self.asks_after = Some(AsksAfter { left: ASKS_AFTER_SENDS, next: 2 * ASKS_AFTER_SENDS });
        self.with_io(tcp, role, |path, io| {
            let Ok(()) = path.ask(io);
        });
    }

    /// Counts what TCP carries before the ends meet.
    pub fn set_counters(&mut self, counters: Counters) {
        self.counters.be_replaced();
        self.counters = counters;
    }

    /// Returns the lane, if the ends have met.
    pub fn lane(&mut self) -> Option<&mut OutLane> {
        self.lane.as_mut()
    }

    /// Returns whether sends go by the lane, as far as this end knows.
    #[inline(always)]
    pub fn is_by_lane(&self) -> bool {
        matches!(self.path, Sending::Lane { .. })
    }

    /// Returns how the next bytes are to be sent.
    #[inline(always)]
    pub fn prepare(&mut self, tcp: Tcp, role: Role) -> SendBy {
        self.with_io(tcp, role, |path, io| {
            let Ok(by) = path.prepare(io);
            by
        })
        .unwrap_or(SendBy::Tcp)
    }

    /// Goes back to TCP, and returns how the next bytes are to be sent.
    pub fn go_back(&mut self, tcp: Tcp, role: Role) -> SendBy {
        self.with_io(tcp, role, |path, io| {
            let Ok(by) = path.go_back(io);
            by
        })
        .unwrap_or(SendBy::Tcp)
    }

    #[inline(always)]
    fn with_io<R>(&mut self, tcp: Tcp, role: Role, step: impl FnOnce(&mut Sending, &mut SendIo) -> R) -> Option<R> {
        let is_alone = self.calls_in_kernel == 0;
        let lane = self.lane.as_mut()?;
        Some(step(&mut self.path, &mut SendIo { counters: &self.counters, lane, tcp, role, is_alone }))
    }

    /// As [`Sender::prepare`], while sends go by the lane as far as this end knows; otherwise `None`.
    #[inline(always)]
    pub fn prepare_if_by_lane(&mut self, tcp: Tcp, role: Role) -> Option<SendBy> {
        self.is_by_lane().then(|| self.prepare(tcp, role))
    }

    /// Returns whether a poll is to report room although sends go by TCP: the last send by a lane has found none, TCP
    /// has some, and no send by TCP has begun since.
    pub fn reports_room_on_tcp(&self, tcp: Tcp) -> bool {
        match self.room {
            Room::Nothing => false,
            Room::Missing => blocking::poll_now(tcp.0, OUTPUT) & OUTPUT != 0,
            Room::OnTcp => true,
        }
    }

    /// Notes whether a poll has found room.
    pub fn note_room(&mut self, has_room: bool) {
        self.rooms += u64::from(has_room && self.room == Room::Missing);
        self.room = match has_room {
            false => Room::Missing,
            true if self.is_by_lane() => Room::Nothing,
            true => Room::OnTcp,
        };
    }

    /// Returns how often a send that found no room was followed by room.
    pub fn rooms(&self) -> u64 {
        self.rooms
    }

    /// Returns the bytes that this end has sent by lanes alone, and how many of them the receiver has read.
    pub fn bytes_by_lane(&self) -> (u64, u64) {
        let sent = self.counters.carried_bytes().0.saturating_sub(self.bytes_resent_ever);
        let unread = if self.is_by_lane() { self.lane.as_ref().map_or(0, OutLane::unsent_bytes) } else { 0 };
        (sent, sent.saturating_sub(unread as u64))
    }

    /// Returns whether sends go by TCP, and nothing of a lane is to be written there.
    pub fn is_by_tcp(&self) -> bool {
        matches!(self.path, Sending::Tcp { .. } | Sending::Asking { .. })
    }

    /// Does not ask for a move any more.
    pub fn stay_on_tcp(&mut self) {
        self.asks_after = None;
    }

    /// Does not ask for a move until this is ended. Then it asks soon.
    pub fn set_paused(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
        if let Some(asks_after) = &mut self.asks_after {
            asks_after.left = 0;
        }
    }

    /// Returns whether a call of the program is in the kernel, or bytes are to be written there.
    pub fn is_busy(&self) -> bool {
        self.calls_in_kernel > 0 || matches!(self.path, Sending::Resending { .. })
    }

    /// Leaves the lane to the parent of this process. Returns whether a call of the parent was in the kernel. Frees
    /// nothing: another thread of the parent may have held the allocator's locks.
    pub fn leave_to_parent(&mut self) -> bool {
        self.misses_bytes |= matches!(self.path, Sending::Resending { .. });
        // One that this process has had for itself was left before another meeting.
        if self.lane.is_some() && self.left_to_parent.is_none() {
            std::mem::swap(&mut self.lane, &mut self.left_to_parent);
        }
        (self.path, self.asks_after) = (Sending::default(), None);
        std::mem::take(&mut self.calls_in_kernel) > 0
    }

    /// Returns whether bytes that come before those of the next send are missing in TCP, where this process cannot
    /// write them.
    pub fn misses_bytes(&self) -> bool {
        self.misses_bytes
    }

    /// Notes that a call of the program sends by TCP. After some of them, this end asks for a move again: what only TCP
    /// can do may have been done.
    pub fn enter_kernel(&mut self, tcp: Tcp, role: Role) {
        self.calls_in_kernel += 1;
        self.room = Room::Nothing;
        if !self.path.may_ask() || self.is_paused {
            return;
        }
        match &mut self.asks_after {
            Some(AsksAfter { left: 0, next }) => {
                self.asks_after = Some(AsksAfter { left: *next, next: next.saturating_mul(2) });
                self.with_io(tcp, role, |path, io| {
                    let Ok(()) = path.ask(io);
                });
            }
            Some(AsksAfter { left, .. }) => *left -= 1,
            None => {}
        }
    }

    /// Takes over the calls that were counted before there was an object.
    pub fn adopt_calls(&mut self, number: u32, calls: u32) {
        (self.number, self.calls_in_kernel) = (number, calls);
    }

    /// Notes that a call of the connection `number` has returned, and has sent this number of bytes. Returns whether it
    /// is this one.
    pub fn leave_young(&mut self, number: u32, bytes: usize) -> bool {
        let is_known = self.number == number && self.calls_in_kernel > 0;
        if is_known {
            self.leave_kernel(bytes);
        }
        is_known
    }

    /// Notes that it has returned, and has sent this number of bytes.
    pub fn leave_kernel(&mut self, bytes: usize) {
        self.counters.add_by_tcp(bytes, 0);
        self.calls_in_kernel = self.calls_in_kernel.saturating_sub(1);
    }

    /// Copies a span to the lane as one record, if the direction uses the lane and there is room. Returns whether the
    /// receiver sleeps, and its bell must be rung; `None` if nothing was sent.
    ///
    /// # Safety
    /// The span is readable for its length.
    #[inline(always)] // Part of the path of short messages.
    pub unsafe fn write_short(&mut self, span: &iovec, is_answer: bool) -> Option<bool> {
        let (Sending::Lane { number }, Some(lane)) = (self.path, self.lane.as_mut()) else { return None };
        if lane.load(Word::Frozen) == number.to_word() || lane.has_peer_closed() {
            return None;
        }
        lane.note_order();
        // SAFETY: the span is readable for its length, by this function's contract.
        if !unsafe { lane.write_short(span.iov_base.cast(), span.iov_len, is_answer) } {
            return None;
        }
        self.counters.add_sent(span.iov_len);
        Some(lane.take_wake_request())
    }

    /// Copies the spans to the lane, after their first `skip` bytes, as far as there is room. `may_wait` says that the
    /// caller waits for the rest, `is_answer` that the receiver waits for these bytes.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver published an impossible word.
    ///
    /// # Panics
    /// If the ends have not met.
    ///
    /// # Safety
    /// Every span is readable for its length.
    pub unsafe fn write(
        &mut self,
        tcp: Tcp,
        spans: &[iovec],
        skip: usize,
        may_wait: bool,
        is_answer: bool,
    ) -> Result<Written, Corrupt> {
        let lane = self.lane.as_mut().expect("sends go by the lane");
        lane.set_prefers_waiting(may_wait);
        lane.note_order();
        let position = lane.position();
        // SAFETY: the parts are within spans that are readable, by this function's contract.
        let mut bytes = unsafe { copy_to(lane, spans, skip) }?;
        let wanted = total_bytes(spans) - skip;
        if bytes < wanted && lane.note_entered(tcp) {
            // SAFETY: every span is readable for its length, by this function's contract.
            bytes += unsafe { copy_to(lane, spans, skip + bytes) }?;
        }
        let is_full = bytes < wanted;
        if is_full {
            self.room = Room::Missing;
        }
        self.growth.note(lane, is_full);
        if is_answer {
            lane.demote_since(position);
        }
        let wakes_receiver = bytes > 0 && lane.take_wake_request();
        if bytes > 0 {
            self.counters.add_sent(bytes);
        }
        Ok(Written { bytes, wakes_receiver })
    }

    /// Sends what `fill` writes into the lane in place, at most `len_bytes`, as far as there is room. `may_wait` is
    /// that of [`Sender::write`]. Also returns how `fill` has ended, if it has.
    ///
    /// # Errors
    /// As [`Sender::write`].
    ///
    /// # Panics
    /// As [`Sender::write`].
    pub fn fill(
        &mut self,
        tcp: Tcp,
        len_bytes: usize,
        may_wait: bool,
        fill: Fill,
    ) -> Result<(Written, Option<Ended>), Corrupt> {
        let lane = self.lane.as_mut().expect("sends go by the lane");
        lane.set_prefers_waiting(may_wait);
        lane.note_order();
        let (mut bytes, mut ended) = (0, None);
        while bytes < len_bytes && ended.is_none() {
            match lane.fill(len_bytes - bytes, fill)? {
                Filled::Bytes(0) => ended = Some(Ok(())),
                Filled::Bytes(filled) => bytes += filled,
                Filled::Failed(error) => ended = Some(Err(error)),
                Filled::NoRoom if lane.note_entered(tcp) => {}
                Filled::NoRoom => break,
            }
        }
        let is_full = bytes < len_bytes && ended.is_none();
        if is_full {
            self.room = Room::Missing;
        }
        self.growth.note(lane, is_full);
        let wakes_receiver = bytes > 0 && lane.take_wake_request();
        if bytes > 0 {
            self.counters.add_sent(bytes);
        }
        Ok((Written { bytes, wakes_receiver }, ended))
    }

    /// Returns whether [`Sender::make_room`] is to be called: see [`OutLane::is_entry_due`].
    pub fn is_entry_due(&self, now_ticks: u64) -> bool {
        self.is_by_lane() && self.lane.as_ref().is_some_and(|lane| lane.is_entry_due(now_ticks))
    }

    /// Lets the lane hold more bytes if the peer has entered it, and otherwise goes back to TCP.
    pub fn make_room(&mut self, tcp: Tcp, role: Role) {
        if !self.lane.as_mut().is_some_and(|lane| lane.note_entered(tcp)) {
            self.finish_stream(tcp, role);
        }
    }

    /// Releases the memory of the lane if it has been idle for `idle_ms`.
    pub fn reclaim_if_idle(&mut self, now_ticks: u64, idle_ms: u64) {
        self.growth.reclaim_if_idle(self.lane.as_mut(), now_ticks, idle_ms);
    }

    /// Goes back to TCP, and writes to TCP what is unread in the lane, because nobody could do that later. Waits for
    /// room, for as long as the receiver makes some within [`FINISH_WAIT_MS`].
    pub fn finish(&mut self, tcp: Tcp, role: Role) {
        self.resend_all(tcp, role, true);
    }

    /// As [`Sender::finish`], before the end of the stream. A receiver that is in the lane can read there what TCP has
    /// no room for, so that this end waits only for one that has frozen it.
    pub fn finish_stream(&mut self, tcp: Tcp, role: Role) {
        self.resend_all(tcp, role, false);
    }

    /// As [`Sender::finish_stream`], for a peer that has left: no process holds its bell any more. If its socket is
    /// closed too, and has not read the lane, TCP would have answered that with a reset: then this end draws one.
    /// Returns whether it has.
    pub fn finish_for_absent(&mut self, tcp: Tcp, role: Role) -> bool {
        let has_unread = self.is_by_lane() && self.lane.as_ref().is_some_and(|lane| lane.unsent_bytes() > 0);
        let is_killed = has_unread && self.go_back(tcp, role) == SendBy::Resend && !self.was_frozen();
        let draws_reset = is_killed && tcp.is_peer_closed(role);
        if draws_reset {
            tcp.draw_reset();
        } else {
            self.finish_stream(tcp, role);
        }
        draws_reset
    }

    fn was_frozen(&self) -> bool {
        self.lane.as_ref().is_some_and(OutLane::was_frozen)
    }

    fn resend_all(&mut self, tcp: Tcp, role: Role, waits: bool) {
        if self.go_back(tcp, role) != SendBy::Resend {
            return;
        }
        loop {
            let before = self.bytes_resent;
            let is_done = self.resend(tcp) != Ok(Resent::Blocked);
            if is_done || !(waits || self.was_frozen()) {
                return;
            }
            let has_room = blocking::poll_for(tcp.0, libc::POLLOUT, FINISH_WAIT_MS) & libc::POLLOUT != 0;
            if !has_room && self.bytes_resent == before {
                return;
            }
        }
    }

    /// Writes to TCP what is unread in the lane that has ended, as far as there is room.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver published an impossible position.
    pub fn resend(&mut self, tcp: Tcp) -> Result<Resent, Corrupt> {
        let Some(lane) = self.lane.as_mut() else { return Ok(Resent::All) };
        let mut spans = [const { iovec { iov_base: std::ptr::null_mut(), iov_len: 0 } }; RESENT_SPANS];
        let mut is_first = true;
        loop {
            let count = lane.unread_after(self.bytes_resent, &mut spans)?;
            if count == 0 {
                if self.bytes_resent > 0 {
                    // The last request by TCP is not acknowledged with its answer if that came by a lane.
                    tcp.push();
                }
                self.bytes_resent = 0;
                self.path.note_resent();
                return Ok(Resent::All);
            }
            // A send would take the socket's error, which the program is to see.
            if std::mem::take(&mut is_first) && tcp.has_failed() {
                return Ok(Resent::Ended);
            }
            // However small its buffer is, TCP takes as much at once as fits in a segment.
            let flags = if count == RESENT_SPANS { libc::MSG_MORE } else { 0 };
            // SAFETY: the lane returned spans of its own memory.
            match unsafe { tcp.send(&spans[..count], flags) } {
                Ok(sent) => {
                    self.counters.add_by_tcp(sent, 0);
                    self.bytes_resent += sent;
                    self.bytes_resent_ever += sent as u64;
                }
                Err(Errno::AGAIN | Errno::INTR) => return Ok(Resent::Blocked),
                Err(_) => return Ok(Resent::Ended),
            }
        }
    }
}

/// Copies the spans to the lane, after their first `skip` bytes. Returns the number of bytes.
///
/// # Safety
/// Every span is readable for its length.
unsafe fn copy_to(lane: &mut OutLane, spans: &[iovec], skip: usize) -> Result<usize, Corrupt> {
    // SAFETY: the parts are within spans that are readable, by this function's contract.
    for_each_part(spans, skip, usize::MAX, |bytes, len_bytes| unsafe { lane.write_from(bytes, len_bytes) })
}
