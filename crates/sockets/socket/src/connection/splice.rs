//! Transfers between a connection and a pipe: what `splice(2)` does for a TCP socket, by copies.
//!
//! Bytes leave the lane only once the pipe has them, and are read from the pipe directly into the lane's room, so that
//! no bytes are in neither. No thread waits for the pipe while it holds a lock of the connection.

use super::lanes::Lanes;
use super::transfer::ReceiveAttempt;
use super::urgent::URGENT_PASSED_MAX;
use super::wait::{BlockingCall, Deadline};
use super::{Connection, MessageFlags};
use crate::process::{blocking, system};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering;
use wait::Spin;

/// Bytes that a pipe with room accepts without blocking, on any kernel.
const PIPE_BYTES_SURE: usize = libc::PIPE_BUF;
/// The offset of a call on a file without positions.
const NO_OFFSET: usize = usize::MAX;

/// One end of the program's pipe, for one call.
#[derive(Clone, Copy)]
pub struct Pipe<'a> {
    fd: BorrowedFd<'a>,
    waits: bool,
}

impl<'a> Pipe<'a> {
    /// Returns the end of a pipe that a descriptor refers to: the one to write if `is_written`, otherwise the one to
    /// read. `dont_wait` is `SPLICE_F_NONBLOCK`.
    ///
    /// # Errors
    /// `BADF` if the descriptor is closed or is the other end, `INVAL` if it is not a pipe.
    pub fn of(fd: BorrowedFd<'a>, is_written: bool, dont_wait: bool) -> Result<Self, Errno> {
        let flags = rustix::fs::fcntl_getfl(fd)?;
        rustix::pipe::fcntl_getpipe_size(fd).map_err(|_| Errno::INVAL)?;
        let barred = if is_written { OFlags::RDONLY } else { OFlags::WRONLY };
        if flags & OFlags::RWMODE == barred {
            return Err(Errno::BADF);
        }
        Ok(Self { fd, waits: !dont_wait && !flags.contains(OFlags::NONBLOCK) })
    }

    /// Waits until the pipe has room or bytes, or is broken, unless the call must not block. Returns the events.
    fn wait_for(&self, event: i16) -> Result<i16, Errno> {
        let mut entry = [libc::pollfd { fd: self.fd.as_raw_fd(), events: event, revents: 0 }];
        loop {
            match blocking::poll(&mut entry, if self.waits { -1 } else { 0 }) {
                Ok(0) => return Err(Errno::AGAIN),
                Ok(_) => return Ok(entry[0].revents),
                Err(Errno::INTR) if system::all_handlers_restart() => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Writes without blocking.
    ///
    /// # Safety
    /// `bytes` is readable for `len_bytes`; a peer may write there meanwhile.
    unsafe fn write(&self, bytes: *mut u8, len_bytes: usize) -> Result<usize, Errno> {
        // SAFETY: `bytes` is readable for `len_bytes`, by this function's contract.
        match unsafe { self.transfer_nowait(libc::SYS_pwritev2, bytes, len_bytes) } {
            // Before Linux 6.4 pipes did not support `RWF_NOWAIT`. If another writer is faster, this blocks.
            Err(Errno::OPNOTSUPP) if blocking::poll_now(self.fd.as_raw_fd(), libc::POLLOUT) & libc::POLLOUT == 0 => {
                Err(Errno::AGAIN)
            }
            // SAFETY: `bytes` is readable for `len_bytes`, by this function's contract.
            Err(Errno::OPNOTSUPP) => unsafe { self.transfer_blocking(libc::SYS_write, bytes, len_bytes) },
            written => written,
        }
    }

    /// Reads without blocking.
    ///
    /// # Safety
    /// `bytes` is writable for `len_bytes`.
    unsafe fn read(&self, bytes: *mut u8, len_bytes: usize) -> Result<usize, Errno> {
        // SAFETY: `bytes` is writable for `len_bytes`, by this function's contract.
        match unsafe { self.transfer_nowait(libc::SYS_preadv2, bytes, len_bytes) } {
            // Before Linux 6.4 pipes did not support `RWF_NOWAIT`. If another reader is faster, this blocks.
            Err(Errno::OPNOTSUPP) if blocking::poll_now(self.fd.as_raw_fd(), libc::POLLIN) == 0 => Err(Errno::AGAIN),
            // SAFETY: `bytes` is writable for `len_bytes`, by this function's contract.
            Err(Errno::OPNOTSUPP) => unsafe { self.transfer_blocking(libc::SYS_read, bytes, len_bytes) },
            read => read,
        }
    }

    /// Makes a call that transfers bytes without blocking.
    ///
    /// # Safety
    /// `bytes` is valid for `len_bytes` as `call`, `preadv2` or `pwritev2`, requires.
    unsafe fn transfer_nowait(&self, call: libc::c_long, bytes: *mut u8, len_bytes: usize) -> Result<usize, Errno> {
        let span = libc::iovec { iov_base: bytes.cast(), iov_len: len_bytes };
        let fd = self.fd.as_raw_fd();
        // SAFETY: the call gets one span, which is valid by this function's contract and outlives the call.
        let moved = unsafe { system::call!(call, fd, &raw const span, 1, NO_OFFSET, NO_OFFSET, libc::RWF_NOWAIT) };
        usize::try_from(moved).map_err(|_| system::error_of(moved))
    }

    /// Makes a call that transfers bytes and may block.
    ///
    /// # Safety
    /// `bytes` is valid for `len_bytes` as `call`, `read` or `write`, requires.
    unsafe fn transfer_blocking(&self, call: libc::c_long, bytes: *mut u8, len_bytes: usize) -> Result<usize, Errno> {
        // SAFETY: `bytes` is valid for `len_bytes`, by this function's contract, and the length is at most that.
        let moved = unsafe { system::call!(call, self.fd.as_raw_fd(), bytes, len_bytes.min(PIPE_BYTES_SURE)) };
        usize::try_from(moved).map_err(|_| system::error_of(moved))
    }
}

impl Connection {
    /// Moves at most `len_bytes` of what has arrived into a pipe. Returns the number of bytes, 0 at the end of the
    /// stream.
    ///
    /// # Errors
    /// Those of [`Connection::receive`]; `AGAIN` if the pipe is full and the call does not block; `PIPE` if the pipe
    /// has no reader (the caller raises the signal).
    pub fn splice_to(&'static self, pipe: Pipe<'_>, len_bytes: usize) -> Result<usize, Errno> {
        let deadline = Deadline::after(self.receive_timeout_ns.load(Ordering::Relaxed));
        let generation = self.generation();
        let mut call = BlockingCall::new(self);
        loop {
            if pipe.wait_for(libc::POLLOUT)? & libc::POLLERR != 0 {
                return Err(Errno::PIPE);
            }
            let by_lifeline = if self.is_on_lifeline() {
                // SAFETY: `consume_lifeline_with` passes a buffer that is readable for `len`.
                let write = |bytes, len| unsafe { pipe.write(bytes, len) };
                match self.consume_lifeline_with(generation, len_bytes, write) {
                    Err(Errno::AGAIN) => Some(ReceiveAttempt::Nothing),
                    step => step?,
                }
            } else {
                None
            };
            let step = match by_lifeline {
                Some(step) => step,
                None => self.consume_with(generation, MessageFlags::default(), false, |lanes| {
                    self.copy_to(lanes, pipe, len_bytes)
                })?,
            };
            match step {
                ReceiveAttempt::Moved(bytes) => return Ok(bytes),
                ReceiveAttempt::End => return Ok(0),
                ReceiveAttempt::Nothing if self.is_nonblocking.load(Ordering::Relaxed) => return Err(Errno::AGAIN),
                ReceiveAttempt::Nothing => {
                    self.wait_to_receive(generation, &mut call, deadline, Spin::with(&self.spin_history))?;
                }
            }
        }
    }

    /// Copies from the lane to the pipe. The caller holds the receive lock.
    fn copy_to(&self, lanes: &Lanes, pipe: Pipe<'_>, len_bytes: usize) -> Result<usize, Errno> {
        // SAFETY: the caller holds the receive lock, which protects the receiver.
        let receiver = unsafe { &mut *lanes.receiver.get() };
        let mut moved = 0;
        let mut urgent_left = URGENT_PASSED_MAX;
        while moved < len_bytes {
            let Some(chunk) = receiver.peek().map_err(|corrupt| self.reset_for(lanes, corrupt))? else {
                // SAFETY: the one byte is a local variable.
                let write = |mut byte: u8| unsafe { pipe.write(&raw mut byte, 1) };
                if moved > 0 || urgent_left == 0 {
                    break;
                }
                urgent_left -= 1;
                match self.splice_urgent(lanes, write) {
                    Ok(Some(bytes)) => moved += bytes,
                    Ok(None) | Err(Errno::AGAIN) => break,
                    Err(error) => return Err(error),
                }
                continue;
            };
            let wanted = chunk.len_bytes.min(len_bytes - moved);
            // SAFETY: the chunk is in the lane, which is mapped as long as `lanes` lives.
            let written = match unsafe { pipe.write(receiver.pointer(chunk).as_ptr(), wanted) } {
                Ok(written) => written,
                Err(Errno::AGAIN) => break,
                Err(_) if moved > 0 => break,
                Err(error) => return Err(error),
            };
            receiver.consume(written).map_err(|corrupt| self.reset_for(lanes, corrupt))?;
            moved += written;
            if written < wanted {
                break;
            }
        }
        Ok(moved)
    }

    /// Sends at most `len_bytes` of what is in a pipe. Returns the number of bytes, 0 if the pipe has no writer any
    /// more.
    ///
    /// # Errors
    /// Those of [`Connection::send`]; `AGAIN` if the pipe is empty and the call does not block.
    pub fn splice_from(&'static self, pipe: Pipe<'_>, len_bytes: usize) -> Result<usize, Errno> {
        loop {
            if pipe.wait_for(libc::POLLIN)? & libc::POLLIN == 0 {
                return Ok(0);
            }
            let mut was_faster = false;
            let sent = self.send_in_place(
                len_bytes,
                MessageFlags::default(),
                || false,
                |pointer, room_bytes, _| {
                    // SAFETY: `send_in_place` passes room of the lane that is reserved for this write.
                    unsafe { pipe.read(pointer, room_bytes) }.inspect_err(|&error| was_faster = error == Errno::AGAIN)
                },
            );
            // Another reader has emptied the pipe: wait for more.
            if sent != Err(Errno::AGAIN) || !was_faster {
                return sent;
            }
        }
    }
}
