//! `splice` from a connection: what is in the lane is copied to the pipe.

use super::Connection;
use crate::flags::MessageFlags;
use libc::iovec;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::pipe::SpliceFlags;
use std::os::fd::{BorrowedFd, RawFd};

use super::Received;

/// Most bytes of one step: a pipe holds no more unless the program has enlarged it.
const STEP_BYTES: usize = 65_536;

impl Connection {
    /// Moves up to `len_bytes` to a pipe, or leaves that to the kernel, if receives are the kernel's alone: the
    /// direction does not move during the call then.
    pub fn splice_to(&'static self, fd: RawFd, pipe: BorrowedFd<'_>, len_bytes: usize, flags: SpliceFlags) -> Received {
        let this = self.current_use(fd);
        match this.receiver() {
            Ok((mut receiver, _)) if receiver.is_plain() => {
                receiver.enter_kernel();
                return Received::Kernel(this.generation());
            }
            Ok(_) => {}
            Err(error) => return Received::Done(Err(error)),
        }
        let mut bytes = vec![0_u8; len_bytes.min(STEP_BYTES)];
        let spans = [iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }];
        let peek = MessageFlags::PEEK;
        // SAFETY: the span is that of a vector.
        let peeked = match unsafe { self.receive(fd, &spans, peek) } {
            Received::Done(Ok(peeked)) => peeked,
            kernels_or_failed => return kernels_or_failed,
        };
        let written = match write_to(pipe, &bytes[..peeked], flags) {
            Ok(written) => written,
            Err(error) => return Received::Done(Err(error)),
        };
        // What the pipe has taken is consumed; nobody else receives meanwhile, or the program has a race of its own.
        let taken = [iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: written }];
        if written > 0 {
            let flags = MessageFlags::DONT_WAIT;
            // SAFETY: the span is that of a vector, which has at least `written` bytes.
            if let Received::Kernel(call) = unsafe { self.receive(fd, &taken, flags) } {
                // SAFETY: the span is that of a vector, which has at least `written` bytes.
                let _ = unsafe { self.use_of(fd, call).receive_by_tcp(&taken, 0, flags) };
            }
        }
        Received::Done(Ok(written))
    }
}

/// Writes to a pipe, without waiting if the flags or the pipe's mode say so.
fn write_to(pipe: BorrowedFd<'_>, bytes: &[u8], flags: SpliceFlags) -> Result<usize, Errno> {
    let mode = rustix::fs::fcntl_getfl(pipe)?;
    let dont_wait = flags.contains(SpliceFlags::NONBLOCK) && !mode.contains(OFlags::NONBLOCK);
    if dont_wait {
        let mut entry = [rustix::event::PollFd::new(&pipe, rustix::event::PollFlags::OUT)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        if rustix::event::poll(&mut entry, Some(&now))? == 0 {
            return Err(Errno::AGAIN);
        }
        // A pipe with room takes this much without waiting (`PIPE_BUF`).
        return rustix::io::write(pipe, &bytes[..bytes.len().min(4096)]);
    }
    rustix::io::write(pipe, bytes)
}
