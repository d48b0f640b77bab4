//! System calls on the TCP socket of a connection, made by the library.

use crate::spans::Part;
use libc::iovec;
use meeting::diag::{self, LookUp};
use meeting::{Endpoint, Role, counts};
use rustix::io::Errno;
use socket::process::system::{self, raw_syscall};
use std::os::fd::{BorrowedFd, RawFd};

/// The TCP socket of a connection, by a number under which the program knows it now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tcp(pub RawFd);

fn message(spans: &[iovec]) -> libc::msghdr {
    // SAFETY: all zeros are a valid, empty message; musl's has padding that a struct literal cannot name.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = spans.as_ptr().cast_mut();
    message.msg_iovlen = spans.len() as _;
    message
}

/// Returns the bytes that an end has ever written to TCP, and the [room](Tcp::room) of the socket; `None` if the kernel
/// cannot tell now, or if the end has shut its sending direction down.
pub fn bytes_written_and_room(tcp: Tcp, role: Role) -> Option<(u64, usize)> {
    let written = counts::read_written(tcp.borrow(), role).ok()?;
    Some((written.bytes, tcp.room_besides(usize::try_from(written.unacked).ok()?)))
}

/// Returns the bytes that an end has ever read from TCP; `None` if the kernel cannot tell now.
pub fn bytes_read(tcp: Tcp) -> Option<u64> {
    counts::read_consumed(tcp.borrow()).ok()
}

/// Returns whether an urgent byte has arrived that the program has not received, or is the next of the stream.
pub fn has_urgent_byte(tcp: Tcp) -> bool {
    counts::is_urgent(tcp.borrow()).unwrap_or(true)
}

impl Tcp {
    /// Returns the descriptor for a system call.
    pub fn borrow(self) -> BorrowedFd<'static> {
        // SAFETY: the number is not negative, because the program has just used it successfully. It may have been
        // closed since; a system call on it then fails, without touching memory.
        unsafe { BorrowedFd::borrow_raw(self.0) }
    }

    /// Returns whether this is a TCP socket.
    pub fn is_stream(self) -> bool {
        rustix::net::sockopt::socket_protocol(self.borrow()) == Ok(Some(rustix::net::ipproto::TCP))
    }

    /// Returns whether the descriptor is in non-blocking mode.
    pub fn is_nonblocking(self) -> bool {
        rustix::fs::fcntl_getfl(self.borrow()).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK))
    }

    /// Sends the spans after their first `skip` bytes, without blocking and without a signal.
    ///
    /// # Errors
    /// Those of `sendmsg(2)`.
    ///
    /// # Safety
    /// Every span is readable for its length.
    pub unsafe fn send_part(self, spans: &[iovec], skip: usize) -> Result<usize, Errno> {
        let part = Part::new(spans, skip, usize::MAX);
        // SAFETY: the part is within spans that are readable, by this function's contract.
        unsafe { self.send(part.spans(), 0) }
    }

    /// Sends what Nagle's algorithm holds back: bytes that the program has sent before, when nothing of its own would
    /// have held them.
    pub fn push(self) {
        if rustix::net::sockopt::tcp_nodelay(self.borrow()) == Ok(false) {
            let _ = rustix::net::sockopt::set_tcp_nodelay(self.borrow(), true);
            let _ = rustix::net::sockopt::set_tcp_nodelay(self.borrow(), false);
        }
    }

    /// Receives without blocking. Returns 0 at the end of the stream.
    ///
    /// # Errors
    /// Those of `recvmsg(2)`.
    ///
    /// # Safety
    /// Every span is writable for its length, unless the flags have `MSG_TRUNC`.
    pub unsafe fn receive(self, spans: &[iovec], flags: i32) -> Result<usize, Errno> {
        let mut message = message(spans);
        let arguments =
            [self.0 as usize, (&raw mut message).expose_provenance(), (flags | libc::MSG_DONTWAIT) as usize];
        // SAFETY: the message is a local, and its spans are writable by this function's contract.
        system::count_or_error(unsafe { raw_syscall(libc::SYS_recvmsg, arguments) })
    }

    /// Sends the spans without blocking and without a signal.
    ///
    /// # Errors
    /// Those of `sendmsg(2)`.
    ///
    /// # Safety
    /// Every span is readable for its length.
    pub unsafe fn send(self, spans: &[iovec], flags: i32) -> Result<usize, Errno> {
        let message = message(spans);
        let flags = (flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as usize;
        let arguments = [self.0 as usize, (&raw const message).expose_provenance(), flags];
        // SAFETY: the message is a local, and its spans are readable by this function's contract.
        system::count_or_error(unsafe { raw_syscall(libc::SYS_sendmsg, arguments) })
    }

    /// Returns whether the connection is over: the next call reports how, and takes the error that it finds.
    pub fn has_failed(self) -> bool {
        socket::process::blocking::poll_now(self.0, 0) & (libc::POLLERR | libc::POLLHUP) != 0
    }

    /// Returns whether the peer has ended its stream, or the connection is over.
    pub fn has_ended(self) -> bool {
        socket::process::blocking::poll_now(self.0, libc::POLLRDHUP) != 0
    }

    /// Takes the error that the next call would report.
    pub fn take_error(self) -> Option<Errno> {
        rustix::net::sockopt::socket_error(self.borrow()).ok().and_then(Result::err)
    }

    /// Returns whether the peer's socket is closed, as far as the kernel tells, although the connection is not over.
    pub fn is_peer_closed(self, role: Role) -> bool {
        let Ok(endpoint) = Endpoint::of(self.borrow(), role) else { return false };
        self.has_ended()
            && match diag::look_up_peer(&endpoint) {
                // A socket without an inode belongs to no process.
                LookUp::Found(peer) => peer.inode == 0,
                LookUp::Nothing => true,
                LookUp::Unavailable => false,
            }
    }

    /// Has a peer whose socket is closed answer with a reset, as it would have done by itself if it had left bytes
    /// unread. The byte goes out behind the end of this direction's stream: in that state the kernel reports the reset
    /// as one (`ECONNRESET`), and not as a pipe without a reader.
    pub fn draw_reset(self) {
        let byte = 0_u8;
        let span = iovec { iov_base: (&raw const byte).cast_mut().cast(), iov_len: 1 };
        // SAFETY: the span is a local byte.
        let _ = unsafe { self.send(&[span], libc::MSG_MORE) };
        let _ = rustix::net::shutdown(self.borrow(), rustix::net::Shutdown::Write);
    }

    /// Returns the number of bytes that have arrived and are unread; 0 if the kernel cannot tell.
    pub fn available(self) -> u64 {
        self.number_by_ioctl(libc::FIONREAD as usize).map_or(0, |bytes| bytes.max(0) as u64)
    }

    /// Returns the number that one of `FIONREAD`, `TIOCOUTQ` and `SIOCATMARK` stores.
    fn number_by_ioctl(self, request: usize) -> Option<i32> {
        let mut number = 0_i32;
        let arguments = [self.0 as usize, request, (&raw mut number).expose_provenance()];
        // SAFETY: the pointer is to a local number, and these requests write one.
        let result = unsafe { raw_syscall(libc::SYS_ioctl, arguments) };
        (result >= 0).then_some(number)
    }

    /// Returns whether the next byte is behind the mark of an urgent one, where a receive stops.
    pub fn is_at_mark(self) -> bool {
        const SIOCATMARK: usize = 0x8905;
        self.number_by_ioctl(SIOCATMARK).is_some_and(|is_at_mark| is_at_mark != 0)
    }

    /// Receives at most `bytes_max` of the bytes that have arrived, and drops them. Returns their number.
    pub fn drop_bytes(self, bytes_max: u64) -> u64 {
        let mut dropped = 0;
        // A receive that finds no bytes would take the socket's error, which the program is to see.
        while dropped < bytes_max
            && let available @ 1.. = self.available()
        {
            let wanted = available.min(bytes_max - dropped) as usize;
            let arguments = [self.0 as usize, 0, wanted, (libc::MSG_TRUNC | libc::MSG_DONTWAIT) as usize, 0, 0];
            // SAFETY: with `MSG_TRUNC`, a TCP socket stores no bytes.
            match system::count_or_error(unsafe { raw_syscall(libc::SYS_recvfrom, arguments) }) {
                Ok(bytes @ 1..) => dropped += bytes as u64,
                _ => break,
            }
        }
        dropped
    }

    /// Returns how many bytes the socket takes at once, even if the peer receives none. The kernel counts its own
    /// structures too, less than half of the buffer.
    pub fn room(self) -> usize {
        let unacknowledged = self.number_by_ioctl(libc::TIOCOUTQ as usize);
        self.room_besides(unacknowledged.map_or(usize::MAX, |bytes| bytes.max(0) as usize))
    }

    fn room_besides(self, unacknowledged_bytes: usize) -> usize {
        let buffer = rustix::net::sockopt::socket_send_buffer_size(self.borrow()).unwrap_or(0);
        buffer.saturating_sub(unacknowledged_bytes) / 2
    }

    /// Returns the value of a timeout option (`SO_RCVTIMEO`, `SO_SNDTIMEO`) in nanoseconds; 0 is no timeout.
    pub fn timeout_ns(self, option: i32) -> u64 {
        let mut timeout = libc::timeval { tv_sec: 0, tv_usec: 0 };
        let mut len_bytes = size_of::<libc::timeval>() as libc::socklen_t;
        let arguments = [
            self.0 as usize,
            libc::SOL_SOCKET as usize,
            option as usize,
            (&raw mut timeout).expose_provenance(),
            (&raw mut len_bytes).expose_provenance(),
        ];
        // SAFETY: the pointers are to locals, and the length is that of the structure.
        let result = unsafe { raw_syscall(libc::SYS_getsockopt, arguments) };
        if result < 0 { 0 } else { timeout.tv_sec as u64 * 1_000_000_000 + timeout.tv_usec as u64 * 1000 }
    }
}
