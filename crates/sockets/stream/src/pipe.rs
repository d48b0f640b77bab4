//! The program's pipes, in calls that move bytes between a pipe and a connection.

use rustix::fs::OFlags;
use rustix::io::Errno;
use socket::process::system::{count_or_error, raw_syscall};
use socket::process::{blocking, system};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Bytes that a pipe with room accepts, and one with bytes returns, without blocking on any kernel.
const PIPE_BYTES_SURE: usize = libc::PIPE_BUF;
/// The offset of a call on a file without positions.
const NO_OFFSET: usize = usize::MAX;

/// The end of a pipe from which a call reads.
#[derive(Clone, Copy)]
pub struct PipeEnd<'a> {
    fd: BorrowedFd<'a>,
    waits: bool,
}

impl<'a> PipeEnd<'a> {
    /// Returns the end to read of a pipe. `dont_wait` is `SPLICE_F_NONBLOCK`. `None` if it is no such end.
    pub fn to_read(fd: BorrowedFd<'a>, dont_wait: bool) -> Option<Self> {
        let flags = rustix::fs::fcntl_getfl(fd).ok()?;
        let is_readable = flags & OFlags::RWMODE != OFlags::WRONLY;
        let is_end = is_readable && rustix::pipe::fcntl_getpipe_size(fd).is_ok();
        is_end.then_some(Self { fd, waits: !dont_wait && !flags.contains(OFlags::NONBLOCK) })
    }

    /// Waits until the pipe has bytes or no writer, unless the call must not block.
    ///
    /// # Errors
    /// Those of `poll(2)`, and `AGAIN`.
    pub fn wait(&self) -> Result<(), Errno> {
        let mut entry = [libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
        loop {
            match blocking::poll_slice(&mut entry, if self.waits { -1 } else { 0 }) {
                Ok(0) if self.waits => {}
                Ok(0) => return Err(Errno::AGAIN),
                Err(Errno::INTR) if system::all_handlers_restart() => {}
                polled => return polled.map(|_| ()),
            }
        }
    }

    /// Reads without blocking. Returns 0 if the pipe is empty and has no writer.
    ///
    /// # Errors
    /// Those of `read(2)`.
    ///
    /// # Safety
    /// `bytes` is writable for `len_bytes`.
    pub unsafe fn read(&self, bytes: *mut u8, len_bytes: usize) -> Result<usize, Errno> {
        let span = libc::iovec { iov_base: bytes.cast(), iov_len: len_bytes };
        let (fd, span) = (self.fd.as_raw_fd() as usize, (&raw const span).expose_provenance());
        let arguments = [fd, span, 1, NO_OFFSET, NO_OFFSET, libc::RWF_NOWAIT as usize];
        // SAFETY: the call gets one span, which is writable by this function's contract and outlives the call.
        match count_or_error(unsafe { raw_syscall(libc::SYS_preadv2, arguments) }) {
            // Before Linux 6.4 pipes did not support `RWF_NOWAIT`. If another reader is faster, this blocks.
            Err(Errno::OPNOTSUPP) if blocking::poll_now(self.fd.as_raw_fd(), libc::POLLIN) == 0 => Err(Errno::AGAIN),
            Err(Errno::OPNOTSUPP) => {
                let arguments = [fd, bytes.expose_provenance(), len_bytes.min(PIPE_BYTES_SURE)];
                // SAFETY: the bytes are writable for at least this length, by this function's contract.
                count_or_error(unsafe { raw_syscall(libc::SYS_read, arguments) })
            }
            read => read,
        }
    }
}
