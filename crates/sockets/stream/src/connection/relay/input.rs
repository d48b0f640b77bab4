//! What the peer sends.

use super::super::receiver::{Attempt, Violation};
use super::{Broken, ENDED, Relay};
use crate::flags::MessageFlags;
use fabric::{Inbound, Outbound};
use lane::Draft;
use libc::iovec;
use path::{ReceiveBy, Word};
use rustix::io::Errno;
use socket::process::blocking;
use socket::process::clock::now_ns;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Bytes that are received by TCP at once, and those of a connection that has not received as many before.
const BUFFER_BYTES: usize = 64 << 10;
const SMALL_BUFFER_BYTES: usize = 4 << 10;

/// How long after the end of its stream a peer's socket turns out to be closed at the latest, if the peer has been
/// given windows.
const CLOSE_DELAY_NS: u64 = 200_000;

/// How long after the end of its stream a dead peer's bell hangs up at the latest.
const BELL_DELAY_NS: u64 = 1_000_000;

/// What the peer has sent, or how its stream has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelayInput {
    /// This number of bytes, at least one, in one piece.
    Bytes(usize),
    /// Nothing now.
    Nothing,
    /// Everything was consumed, and nothing follows.
    End,
    /// The connection must be reset.
    Broken,
}

fn is_hung_up(bell: BorrowedFd<'_>) -> bool {
    blocking::poll_now(bell.as_raw_fd(), libc::POLLIN) & libc::POLLHUP != 0
}

impl From<Violation> for Broken {
    fn from(_: Violation) -> Self {
        Self
    }
}

impl Relay {
    /// Returns whether [`Relay::input`] may have something new to report; loads of memory only.
    #[inline]
    pub fn may_have_input(&mut self) -> bool {
        if self.begin < self.end || self.is_broken || self.end_seen_ns.is_some() {
            return true;
        }
        if self.has_input_end {
            return false;
        }
        match self.receiver.lane_in_use() {
            Some(lane) => lane.may_have_data() || lane.load(Word::Ended) != self.seen[3],
            None => self.is_readable || self.words() != self.seen,
        }
    }

    /// Returns the words by which the peer's sender asks for a move, begins, withdraws and ends it.
    fn words(&mut self) -> [u64; 4] {
        let Some(lane) = self.receiver.lane() else { return [0; 4] };
        [Word::Ask, Word::Up, Word::Withdrawn, Word::Ended].map(|word| lane.load(word))
    }

    /// Returns what the peer has sent and was not consumed.
    pub fn input(&mut self) -> RelayInput {
        if self.begin < self.end {
            return RelayInput::Bytes(self.end - self.begin);
        }
        if self.has_input_end {
            return RelayInput::End;
        }
        self.seen = self.words();
        let found = if self.is_broken { Err(Broken) } else { self.receive() };
        match found {
            Ok(input) => {
                self.has_input_end |= input == RelayInput::End;
                input
            }
            Err(Broken) => {
                self.is_broken = true;
                RelayInput::Broken
            }
        }
    }

    fn receive(&mut self) -> Result<RelayInput, Broken> {
        let tcp = self.tcp();
        let was_plain = self.receiver.is_plain();
        let mut by = self.receiver.prepare(tcp)?;
        loop {
            match by {
                // The kernel has reported what comes after a lane while that was in use.
                ReceiveBy::Kernel if self.is_readable || !was_plain => return self.fill(u64::MAX),
                ReceiveBy::Kernel => return self.end_or_nothing(),
                ReceiveBy::KernelUpTo(bytes_max) => return self.fill(bytes_max),
                ReceiveBy::Nothing => {
                    by = self.receiver.prepare_last(tcp)?;
                    if by == ReceiveBy::Nothing {
                        // Nothing has arrived: the kernel reports what does.
                        self.is_readable = false;
                        return self.end_or_nothing();
                    }
                }
                ReceiveBy::Lane => {
                    let Some(lane) = self.receiver.lane() else { return Err(Broken) };
                    if let Some(chunk) = lane.peek()? {
                        self.chunk = Some(chunk);
                        return Ok(RelayInput::Bytes(chunk.len_bytes));
                    }
                    by = self.receiver.note_empty(tcp)?;
                }
            }
        }
    }

    /// Receives by TCP what has arrived, at most `bytes_max` bytes.
    fn fill(&mut self, bytes_max: u64) -> Result<RelayInput, Broken> {
        let tcp = self.tcp();
        if self.buffer.is_empty() {
            self.buffer = vec![0; SMALL_BUFFER_BYTES];
        } else if self.end == self.buffer.len() {
            self.buffer.resize(BUFFER_BYTES, 0);
        }
        let room = self.buffer.len();
        let wanted = usize::try_from(bytes_max).unwrap_or(usize::MAX).min(room);
        let spans = [iovec { iov_base: self.buffer.as_mut_ptr().cast(), iov_len: room }];
        // SAFETY: the span is the buffer, which nothing else accesses meanwhile.
        let got = unsafe { self.receiver.receive_up_to(tcp, &spans, 0, wanted as u64, MessageFlags::default()) };
        let bytes = if let Attempt::Got { bytes, .. } = got { bytes } else { 0 };
        (self.begin, self.end) = (0, bytes);
        match got {
            Attempt::Got { .. } => {
                self.is_readable = bytes == wanted;
                Ok(RelayInput::Bytes(bytes))
            }
            Attempt::End => self.end(),
            Attempt::Error(_) => Err(Broken),
            Attempt::Nothing | Attempt::Kernel => {
                self.is_readable = false;
                Ok(RelayInput::Nothing)
            }
        }
    }

    /// Finds out whether the stream has ended, now that nothing else was found. Whatever the peer has published before
    /// the kernel's event is visible by now, and nothing can follow the end.
    fn end_or_nothing(&mut self) -> Result<RelayInput, Broken> {
        if self.ended & ENDED == 0 {
            return Ok(RelayInput::Nothing);
        }
        let mut byte = 0_u8;
        let spans = [iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 }];
        // SAFETY: the span is a local.
        match unsafe { self.tcp().receive(&spans, 0) } {
            Ok(0) => self.end(),
            Err(Errno::AGAIN | Errno::INTR) => Ok(RelayInput::Nothing),
            Ok(_) | Err(_) => Err(Broken),
        }
    }

    /// Reports the end of the peer's stream. A peer that has died with bytes of the lane unread resets the connection,
    /// as TCP does: the kernel does so once these bytes are written to TCP. That it has died shows by its bell, a
    /// moment after the end.
    fn end(&mut self) -> Result<RelayInput, Broken> {
        let (tcp, role) = (self.tcp(), self.role);
        if let Some(given) = self.windows.given()
            && !given.is_closed
        {
            given.is_closed = tcp.is_peer_closed(role);
            let is_held = self.bell.as_ref().is_some_and(|bell| !is_hung_up(bell.as_fd()));
            let seen_ns = *self.end_seen_ns.get_or_insert_with(now_ns);
            if !given.is_closed && is_held && now_ns().saturating_sub(seen_ns) < CLOSE_DELAY_NS {
                self.is_readable = true;
                self.ended |= libc::POLLRDHUP;
                return Ok(RelayInput::Nothing);
            }
        }
        let is_by_lane = self.sender.is_by_lane();
        if is_by_lane && self.sender.lane().is_some_and(|lane| lane.unsent_bytes() > 0) {
            if self.bell.as_ref().is_some_and(|bell| is_hung_up(bell.as_fd())) {
                self.note_peer_left();
                self.resend();
            } else if now_ns().saturating_sub(*self.end_seen_ns.get_or_insert_with(now_ns)) < BELL_DELAY_NS {
                self.is_readable = true;
                self.ended |= libc::POLLRDHUP;
                return Ok(RelayInput::Nothing);
            }
        }
        self.end_seen_ns = None;
        let has_failed = blocking::poll_now(self.tcp().0, libc::POLLRDHUP) & libc::POLLERR != 0;
        if has_failed { Err(Broken) } else { Ok(RelayInput::End) }
    }

    /// Appends the first `len_bytes` of the input to a record.
    ///
    /// # Panics
    /// If there are fewer; the same holds below.
    #[inline]
    pub fn copy_input<O: Outbound, I: Inbound>(&mut self, draft: &mut Draft<'_, O, I>, len_bytes: usize) {
        if self.begin < self.end {
            return draft.append(&self.buffer[self.begin..self.begin + len_bytes]);
        }
        let chunk = self.chunk.expect("input returned bytes");
        let lane = self.receiver.lane().expect("input returned bytes of the lane");
        draft.append_span(&lane.span(chunk).part(0, len_bytes));
    }

    /// Copies bytes of the input, from `skip_bytes` on.
    pub fn read_input(&mut self, skip_bytes: usize, destination: &mut [u8]) {
        if self.begin < self.end {
            let begin = self.begin + skip_bytes;
            return destination.copy_from_slice(&self.buffer[begin..begin + destination.len()]);
        }
        let chunk = self.chunk.expect("input returned bytes");
        let lane = self.receiver.lane().expect("input returned bytes of the lane");
        lane.span(chunk).part(skip_bytes, destination.len()).read(destination);
    }

    /// Consumes bytes of the input.
    ///
    /// # Errors
    /// [`Broken`] if the peer has violated the lane's protocol.
    #[inline]
    pub fn consume(&mut self, len_bytes: usize) -> Result<(), Broken> {
        if self.begin < self.end {
            self.begin += len_bytes;
            return Ok(());
        }
        self.chunk = None;
        self.has_consumed = true;
        let lane = self.receiver.lane().ok_or(Broken)?;
        Ok(lane.consume(len_bytes)?)
    }
}
