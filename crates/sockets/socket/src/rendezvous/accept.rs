//! Accepts connections, and reads the handshake of one that brings its memory.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use rustix::io::Errno;
use rustix::net::SocketFlags;
use segment::{Segment, Side};
use stats_page::FallbackReason;

use super::address::{Opener, Tuple};
use super::handshake::{HANDSHAKE_BYTES, Handshake, HandshakeError};
use super::local::*;
use super::local_page::MemoryFds;
use super::name_key::NameKey;
use super::window_segment;
use crate::descriptor::received::discard;

/// Clients that one call of `accept` rejects, more than a backlog usually holds (`net.core.somaxconn`): those that were
/// there when the call began do not keep it from finding the next one.
const REJECTED_MAX: usize = 8192;

/// A new connection, as the endpoint that has called `accept` sees it. Its memory comes by [`receive_handshake`].
#[derive(Debug)]
pub struct Accepted {
    /// The kernel object behind the program's descriptor.
    pub lifeline: OwnedFd,
    /// Its addresses, in canonical form.
    pub tuple: Tuple,
    /// The kind of process at the other endpoint.
    pub opener: Opener,
}

/// Accepts a connection on a lane listener, without waiting. `key` is that of the listener's rack, `flags` are
/// `SOCK_NONBLOCK` and `SOCK_CLOEXEC`. Clients whose name is not a tuple of this rack, and those of other users, are
/// rejected: their connections are closed.
///
/// # Errors
/// `AGAIN` when there is none, `CONNABORTED` when all clients were rejected, and those of `accept4(2)`.
pub fn accept(lane_fd: RawFd, key: &NameKey, flags: i32) -> Result<Accepted, Errno> {
    if lane_fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: the number is not -1 and that of a listener which the caller keeps open. Were it closed, the calls would
    // fail.
    let listener = unsafe { BorrowedFd::borrow_raw(lane_fd) };
    let mut socket_flags = SocketFlags::empty();
    socket_flags.set(SocketFlags::NONBLOCK, flags & libc::SOCK_NONBLOCK != 0);
    socket_flags.set(SocketFlags::CLOEXEC, flags & libc::SOCK_CLOEXEC != 0);
    for rejected in 0..REJECTED_MAX {
        let (lifeline, name) = match rustix::net::acceptfrom_with(listener, socket_flags) {
            Err(Errno::CONNABORTED | Errno::INTR) => continue,
            Err(Errno::AGAIN) if rejected > 0 => break,
            outcome => outcome?,
        };
        match name.as_ref().and_then(|name| tuple_of(name, key)) {
            Some((tuple, opener)) if is_trusted(lifeline.as_fd(), Some(listener)) == Ok(true) => {
                return Ok(Accepted { lifeline, tuple: tuple.reversed(), opener });
            }
            _ => discard(lifeline),
        }
    }
    Err(Errno::CONNABORTED)
}

/// The reason why the first message on a lifeline is not a valid handshake.
#[derive(Debug)]
pub enum HandshakeRejection {
    /// The peer has closed the connection without sending anything.
    Closed,
    /// The bytes are not a handshake of the library.
    Handshake(HandshakeError),
    /// This many descriptors came with it instead of one, or more than are counted.
    Descriptors(usize),
    /// The descriptor is not a sealed memfd of the right size, or cannot be mapped.
    Memory(Errno),
    /// The message cannot be received.
    System(Errno),
}

impl HandshakeRejection {
    /// Returns the reason for the stats page.
    pub fn reason(&self) -> FallbackReason {
        match self {
            Self::Handshake(HandshakeError::Version(_) | HandshakeError::SegmentBytes(_)) => {
                FallbackReason::VersionMismatch
            }
            Self::Memory(errno) | Self::System(errno) => {
                NoLane::resource_limit_or(FallbackReason::HandshakeFailed)(*errno).reason
            }
            _ => FallbackReason::HandshakeFailed,
        }
    }
}

/// Receives the handshake of an accepted connection without waiting. Returns its memory and the descriptors of that, or
/// `None` if the handshake has not arrived.
///
/// # Errors
/// The reason why the message is rejected. Descriptors that came with it are closed.
pub fn receive_handshake(lifeline: BorrowedFd<'_>) -> Result<Option<(Segment, Option<MemoryFds>)>, HandshakeRejection> {
    let mut bytes = [0_u8; HANDSHAKE_BYTES];
    let (length, mut fds, cut_off) = match receive_with_descriptors(lifeline, &mut bytes) {
        Ok(received) => received,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(errno) => return Err(HandshakeRejection::System(errno)),
    };
    let outcome = decode_handshake(&bytes[..length], fds.len() + usize::from(cut_off));
    match (outcome, fds.pop()) {
        (Ok(handshake), Some(memfd)) => open_segment(handshake, memfd).map(Some),
        (outcome, memfd) => {
            fds.into_iter().chain(memfd).for_each(discard);
            Err(outcome.err().unwrap_or(HandshakeRejection::Descriptors(0)))
        }
    }
}

fn decode_handshake(bytes: &[u8], descriptors: usize) -> Result<Handshake, HandshakeRejection> {
    if bytes.is_empty() {
        return Err(HandshakeRejection::Closed);
    }
    let handshake = Handshake::decode(bytes).map_err(HandshakeRejection::Handshake)?;
    if descriptors == 1 { Ok(handshake) } else { Err(HandshakeRejection::Descriptors(descriptors)) }
}

#[inline(never)] // The segment is on the stack of this function alone.
fn open_segment(handshake: Handshake, memory: OwnedFd) -> Result<(Segment, Option<MemoryFds>), HandshakeRejection> {
    let opened = match handshake.spans {
        None => match Segment::open(&memory, handshake.secrets) {
            Ok(segment) => Ok((segment, MemoryFds::of_memfd(memory))),
            Err(errno) => {
                discard(memory);
                Err(errno)
            }
        },
        Some(spans) => window_segment::open_in_windows(memory, spans, Side::Acceptor, handshake.secrets),
    };
    opened.map(|(segment, memory)| (segment, Some(memory))).map_err(HandshakeRejection::Memory)
}
