//! What the kernel counts of the two byte streams of a TCP socket.
//!
//! All counts begin with 0 at the first byte of the program's data, and only grow.
//!
//! - `written` is `tcpi_bytes_acked + SIOCOUTQ`. `tcpi_bytes_acked` grows with `snd_una`, and `SIOCOUTQ` is
//!   `write_seq - snd_una` (`tcp_snd_una_update`, `tcp_ioctl`). The connecting endpoint's SYN was acknowledged like a
//!   byte; so was, or will be, a FIN of this endpoint, which `write_seq` has included since `tcp_send_fin`.
//! - `received` is `tcpi_bytes_received`, which grows with `rcv_nxt` (`tcp_rcv_nxt_update`), and so counts a received
//!   FIN as a byte.
//! - `consumed` is `received` without `FIONREAD`, which leaves out a FIN (`tcp_inq`).
//!
//! `TCP_INFO` takes the socket's lock, `SIOCOUTQ` does not. The state in `TCP_INFO` is read before the lock is taken.
//! So a set of counts is valid if the values of `TCP_INFO` before and after it, with the state, are the same.
//!
//! What the counts cannot tell: in state CLOSE, whether a FIN was received; in SYN_RECV (a Fast Open child), what the
//! handshake acknowledged; and unread bytes beyond an urgent mark, where `FIONREAD` ends. A pending mark is refused,
//! with one exception that no call on the socket reveals: an urgent byte that the program has already received by
//! `MSG_OOB`, with unread bytes before its place in the stream. Whoever reads `MSG_OOB` without `SO_OOBINLINE` must not
//! use the counts before the stream has been read past that place, or compares `FIONREAD` with a look-up of the socket
//! itself ([`Entry::unread_bytes`](crate::diag::Entry::unread_bytes)).

use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::reason::Reason;
use crate::system::{self, FIONREAD, SIOCATMARK, SIOCOUTQ};

/// Maximum number of attempts to read a consistent set of counts. The kernel's counts change during a few percent of
/// the attempts of a busy connection.
const TRIES_MAX: usize = 8;
/// Bytes of `struct tcp_info` up to the last field that is needed (`linux/tcp.h`, since Linux 4.1).
const INFO_BYTES: usize = 136;

/// How an endpoint came to its connection. It decides whether the kernel counts its SYN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// By `connect`.
    Connected,
    /// By `accept`.
    Accepted,
}

impl Role {
    /// Returns the role of the other endpoint, except of a simultaneous open, in which both connect.
    #[must_use]
    pub fn opposite(self) -> Self {
        match self {
            Self::Connected => Self::Accepted,
            Self::Accepted => Self::Connected,
        }
    }
}

/// The bytes of both directions that have passed one endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bytes that the program has written.
    pub written: u64,
    /// Bytes of those that the peer's kernel has acknowledged.
    pub acked: u64,
    /// Bytes that the kernel has received in order.
    pub received: u64,
    /// Bytes of those that the program has consumed.
    pub consumed: u64,
}

/// The values of `TCP_INFO` that belong to a set of counts.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Info {
    state: u8,
    bytes_acked: u64,
    bytes_received: u64,
}

/// TCP states (`linux/tcp_states.h`) in which the counts are exact.
const ESTABLISHED: u8 = 1;
const FIN_WAIT1: u8 = 4;
const FIN_WAIT2: u8 = 5;
const CLOSE_WAIT: u8 = 8;

impl Info {
    fn read(socket: BorrowedFd<'_>) -> Result<Self, Reason> {
        let bytes: [u8; INFO_BYTES] =
            system::option(socket, libc::IPPROTO_TCP, libc::TCP_INFO).ok_or(Reason::NotTcp)?;
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|index| bytes[at + index]));
        let info = Self { state: bytes[0], bytes_acked: word(120), bytes_received: word(128) };
        match info.state {
            ESTABLISHED | FIN_WAIT1 | FIN_WAIT2 | CLOSE_WAIT => Ok(info),
            _ => Err(Reason::State),
        }
    }

    /// Returns the counts, from what the kernel reported between two equal values of `self`.
    fn counts(self, role: Role, unacked: u64, unread: u64) -> Option<Counts> {
        let is_connected = u64::from(role == Role::Connected);
        let is_shut = u64::from(matches!(self.state, FIN_WAIT1 | FIN_WAIT2));
        // The FIN is the last byte to be acknowledged: until then it is among those that are not.
        let (acked_fin, queued_fin) = if unacked == 0 { (is_shut, 0) } else { (0, is_shut) };
        let acked = self.bytes_acked.checked_sub(is_connected + acked_fin)?;
        Some(Counts {
            written: acked.checked_add(unacked.checked_sub(queued_fin)?)?,
            acked,
            received: self.received()?,
            consumed: self.consumed(unread)?,
        })
    }

    fn received(self) -> Option<u64> {
        self.bytes_received.checked_sub(u64::from(self.state == CLOSE_WAIT))
    }

    fn consumed(self, unread: u64) -> Option<u64> {
        self.received()?.checked_sub(unread)
    }
}

/// Reads the counts of a TCP socket, in six system calls if nothing changes meanwhile. They are those of one moment as
/// long as no other thread writes to the socket or reads from it.
///
/// # Errors
/// [`Reason::State`], [`Reason::Urgent`], [`Reason::Busy`], or [`Reason::NotTcp`].
pub fn read(socket: BorrowedFd<'_>, role: Role) -> Result<Counts, Reason> {
    let mut before = Info::read(socket)?;
    for _ in 0..TRIES_MAX {
        let unacked = bytes::<SIOCOUTQ>(socket)?;
        let unread = bytes::<FIONREAD>(socket)?;
        let is_urgent = is_urgent(socket)?;
        let after = Info::read(socket)?;
        if after == before {
            if is_urgent {
                return Err(Reason::Urgent);
            }
            return after.counts(role, unacked, unread).ok_or(Reason::State);
        }
        before = after;
    }
    Err(Reason::Busy)
}

/// Returns the bytes that the kernel has not sent, or whose receipt the peer's kernel has not acknowledged.
pub fn unacknowledged(socket: BorrowedFd<'_>) -> Option<u64> {
    bytes::<SIOCOUTQ>(socket).ok()
}

/// Counts of the bytes that a program has written to a TCP socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// All of them.
    pub bytes: u64,
    /// Those that the peer's kernel has not acknowledged.
    pub unacked: u64,
}

/// Reads the counts of what was written to a TCP socket that is open for sending, as [`read`] does, in three system
/// calls. What arrives does not change them, nor does an urgent byte.
///
/// # Errors
/// As [`read`]; [`Reason::State`] if the socket is shut down for sending.
pub fn read_written(socket: BorrowedFd<'_>, role: Role) -> Result<Written, Reason> {
    let mut before = Info::read(socket)?;
    for _ in 0..TRIES_MAX {
        let unacked = bytes::<SIOCOUTQ>(socket)?;
        let after = Info::read(socket)?;
        if (after.state, after.bytes_acked) == (before.state, before.bytes_acked) {
            let is_open = matches!(after.state, ESTABLISHED | CLOSE_WAIT);
            let counts = after.counts(role, unacked, 0).filter(|_| is_open).ok_or(Reason::State)?;
            return Ok(Written { bytes: counts.written, unacked });
        }
        before = after;
    }
    Err(Reason::Busy)
}

/// Reads the number of bytes that a program has consumed from a TCP socket, as [`read`] does, in five system calls.
///
/// # Errors
/// As [`read`].
pub fn read_consumed(socket: BorrowedFd<'_>) -> Result<u64, Reason> {
    let mut before = Info::read(socket)?;
    for _ in 0..TRIES_MAX {
        let unread = bytes::<FIONREAD>(socket)?;
        let is_urgent = is_urgent(socket)?;
        let after = Info::read(socket)?;
        if (after.state, after.bytes_received) == (before.state, before.bytes_received) {
            if is_urgent {
                return Err(Reason::Urgent);
            }
            return after.consumed(unread).ok_or(Reason::State);
        }
        before = after;
    }
    Err(Reason::Busy)
}

fn bytes<const REQUEST: rustix::ioctl::Opcode>(socket: BorrowedFd<'_>) -> Result<u64, Reason> {
    let number = system::number::<REQUEST>(socket).map_err(|_| Reason::State)?;
    u64::try_from(number).map_err(|_| Reason::State)
}

/// Returns whether an urgent byte has arrived that the program has not received (`POLLPRI`), or is the next of the
/// stream (`SIOCATMARK`).
///
/// # Errors
/// [`Reason::Busy`] or [`Reason::State`] if the kernel does not tell.
pub fn is_urgent(socket: BorrowedFd<'_>) -> Result<bool, Reason> {
    let mut polled = [PollFd::from_borrowed_fd(socket, PollFlags::PRI)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).map_err(|_| Reason::Busy)?;
    let at_mark = system::number::<SIOCATMARK>(socket).map_err(|_| Reason::State)?;
    Ok(at_mark != 0 || polled[0].revents().contains(PollFlags::PRI))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(state: u8, acked: u64, received: u64, role: Role, unacked: u64, unread: u64) -> Option<Counts> {
        Info { state, bytes_acked: acked, bytes_received: received }.counts(role, unacked, unread)
    }

    #[test]
    fn syn_and_fin_are_no_bytes_of_the_program() {
        let expected = |written, acked| Some(Counts { written, acked, received: 50, consumed: 43 });
        assert_eq!(counts(ESTABLISHED, 101, 50, Role::Connected, 9, 7), expected(109, 100));
        assert_eq!(counts(ESTABLISHED, 100, 50, Role::Accepted, 9, 7), expected(109, 100));
        assert_eq!(counts(CLOSE_WAIT, 100, 51, Role::Accepted, 9, 7), expected(109, 100));
        assert_eq!(counts(FIN_WAIT1, 100, 50, Role::Accepted, 10, 7), expected(109, 100));
        assert_eq!(counts(FIN_WAIT2, 111, 50, Role::Connected, 0, 7), expected(109, 109));
    }

    #[test]
    fn counts_that_no_connection_has_are_an_error() {
        assert_eq!(counts(ESTABLISHED, 0, 0, Role::Connected, 0, 0), None, "the SYN was acknowledged");
        assert_eq!(counts(CLOSE_WAIT, 1, 0, Role::Accepted, 0, 0), None, "a FIN was received");
        assert_eq!(counts(ESTABLISHED, 1, 5, Role::Accepted, 0, 6), None, "more unread than received");
        assert_eq!(counts(ESTABLISHED, u64::MAX, 5, Role::Accepted, 1, 0), None);
    }
}
