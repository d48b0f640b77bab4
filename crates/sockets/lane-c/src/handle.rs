//! An attached side of a pair: a writing and a reading half, each of which one thread at a time may use.

use crate::error::Failure;
use crate::segment::{self, Receiver, Sender};
use libc::c_int;
use std::cell::UnsafeCell;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// Event: there are unread bytes, or the end of the stream.
pub const IN: c_int = 1;
/// Event: there is room.
pub const OUT: c_int = 2;

const SPINS: u32 = 2_000;
const YIELDS: u32 = 200;
const PAUSE: Duration = Duration::from_millis(1);

/// What `crosslane_lane *` points to.
#[derive(Debug)]
pub struct Handle {
    writer: UnsafeCell<Writer>,
    reader: UnsafeCell<Reader>,
}

/// The writing half.
#[derive(Debug)]
pub struct Writer {
    sender: Sender,
    reserved_bytes: usize,
    is_finished: bool,
}

/// The reading half.
#[derive(Debug)]
pub struct Reader {
    receiver: Receiver,
    peeked_bytes: usize,
}

impl Handle {
    /// Attaches to a side of a pair.
    pub fn attach(memfd: BorrowedFd<'_>, side: usize) -> Result<Self, Failure> {
        let (sender, receiver) = segment::attach(memfd, side)?;
        let writer = Writer { sender, reserved_bytes: 0, is_finished: false };
        let reader = Reader { receiver, peeked_bytes: 0 };
        Ok(Self { writer: UnsafeCell::new(writer), reader: UnsafeCell::new(reader) })
    }

    /// Returns the writing half.
    ///
    /// # Safety
    /// No other reference to this half exists while the returned one is used.
    #[allow(clippy::mut_from_ref)] // The contract requires mutual exclusion.
    pub unsafe fn writer(&self) -> &mut Writer {
        // SAFETY: no other reference to the writing half exists, by this function's contract.
        unsafe { &mut *self.writer.get() }
    }

    /// Returns the reading half.
    ///
    /// # Safety
    /// No other reference to this half exists while the returned one is used.
    #[allow(clippy::mut_from_ref)] // The contract requires mutual exclusion.
    pub unsafe fn reader(&self) -> &mut Reader {
        // SAFETY: no other reference to the reading half exists, by this function's contract.
        unsafe { &mut *self.reader.get() }
    }

    /// Returns which of `events` are ready.
    ///
    /// # Safety
    /// No other reference to the halves that `events` name exists during the call.
    pub unsafe fn ready(&self, events: c_int) -> Result<c_int, Failure> {
        let mut found = 0;
        // SAFETY: the reading half is used only if `events` includes `IN`; then no other reference to it exists, by
        // this function's contract.
        if events & IN != 0 && unsafe { self.reader() }.is_ready() {
            found |= IN;
        }
        // SAFETY: the writing half is used only if `events` includes `OUT`; then no other reference to it exists, by
        // this function's contract.
        if events & OUT != 0 && unsafe { self.writer() }.is_ready()? {
            found |= OUT;
        }
        Ok(found)
    }

    /// Waits until one of `events` is ready, and returns which; 0 after `limit`.
    ///
    /// # Safety
    /// No other reference to the halves that `events` name exists during the call.
    pub unsafe fn wait(&self, events: c_int, limit: Option<Duration>) -> Result<c_int, Failure> {
        let start = Instant::now();
        let mut iteration = 0_u32;
        loop {
            // SAFETY: no other reference to the halves that `events` name exists, by this function's contract.
            let found = unsafe { self.ready(events) }?;
            let is_over = |limit| iteration >= SPINS && start.elapsed() >= limit;
            if found != 0 || limit.is_some_and(is_over) {
                return Ok(found);
            }
            pause(iteration);
            iteration = iteration.saturating_add(1);
        }
    }
}

fn pause(iteration: u32) {
    match iteration {
        0..SPINS => std::hint::spin_loop(),
        SPINS.. if iteration < SPINS + YIELDS => std::thread::yield_now(),
        _ => std::thread::sleep(PAUSE),
    }
}

impl Writer {
    /// Implements `crosslane_lane_write`.
    ///
    /// # Safety
    /// `bytes` is readable for `len_bytes` and outside the pair's memory.
    pub unsafe fn write(&mut self, bytes: *const u8, len_bytes: usize) -> Result<usize, Failure> {
        self.check_open()?;
        self.reserved_bytes = 0;
        // SAFETY: `bytes` is readable for `len_bytes` and outside the pair's memory, which contains the window, by this
        // function's contract.
        let written_bytes = unsafe { self.sender.write_from(bytes, len_bytes) }?;
        if written_bytes == 0 && len_bytes > 0 { Err(Failure::AGAIN) } else { Ok(written_bytes) }
    }

    /// Implements `crosslane_lane_reserve`.
    pub fn reserve(&mut self, len_bytes_max: usize) -> Result<(*mut u8, usize), Failure> {
        self.check_open()?;
        self.reserved_bytes = 0;
        let room = self.sender.reserve(len_bytes_max)?.ok_or(Failure::AGAIN)?;
        self.reserved_bytes = room.len_bytes;
        Ok((room.pointer.as_ptr(), room.len_bytes))
    }

    /// Implements `crosslane_lane_commit`.
    pub fn commit(&mut self, len_bytes: usize) -> Result<(), Failure> {
        if len_bytes > self.reserved_bytes {
            return Err(Failure::INVALID);
        }
        self.reserved_bytes = 0;
        Ok(self.sender.commit(len_bytes)?)
    }

    /// Implements `crosslane_lane_finish`.
    pub fn finish(&mut self) {
        self.is_finished = true;
        self.reserved_bytes = 0;
        self.sender.finish();
    }

    /// Returns the sender, to announce sleep and to take wake-up requests.
    pub fn sender(&mut self) -> &mut Sender {
        &mut self.sender
    }

    fn is_ready(&mut self) -> Result<bool, Failure> {
        Ok(self.is_finished || self.sender.is_writable()?)
    }

    fn check_open(&self) -> Result<(), Failure> {
        if self.is_finished { Err(Failure::PIPE) } else { Ok(()) }
    }
}

impl Reader {
    /// Implements `crosslane_lane_read`.
    ///
    /// # Safety
    /// `bytes` is writable for `len_bytes` and outside the pair's memory.
    pub unsafe fn read(&mut self, bytes: *mut u8, len_bytes: usize) -> Result<usize, Failure> {
        self.peeked_bytes = 0;
        // SAFETY: `bytes` is writable for `len_bytes` and outside the pair's memory, which contains the window, by this
        // function's contract.
        let read_bytes = unsafe { self.receiver.read_to(bytes, len_bytes) }?;
        if read_bytes == 0 { self.check_finished() } else { Ok(read_bytes) }
    }

    /// Implements `crosslane_lane_peek`.
    pub fn peek(&mut self) -> Result<(*const u8, usize), Failure> {
        self.peeked_bytes = 0;
        let Some(chunk) = self.receiver.peek()? else {
            return Ok((std::ptr::null(), self.check_finished()?));
        };
        self.peeked_bytes = chunk.len_bytes;
        Ok((self.receiver.pointer(chunk).as_ptr(), chunk.len_bytes))
    }

    /// Implements `crosslane_lane_consume`.
    pub fn consume(&mut self, len_bytes: usize) -> Result<(), Failure> {
        self.peeked_bytes = self.peeked_bytes.checked_sub(len_bytes).ok_or(Failure::INVALID)?;
        Ok(self.receiver.consume(len_bytes)?)
    }

    /// Implements `crosslane_lane_unread`.
    pub fn unread(&self) -> Result<usize, Failure> {
        Ok(self.receiver.unread_bytes()?)
    }

    /// Returns the receiver, to announce sleep and to take wake-up requests.
    pub fn receiver(&mut self) -> &mut Receiver {
        &mut self.receiver
    }

    fn is_ready(&self) -> bool {
        self.receiver.may_have_data()
    }

    fn check_finished(&self) -> Result<usize, Failure> {
        if self.receiver.is_finished() { Ok(0) } else { Err(Failure::AGAIN) }
    }
}
