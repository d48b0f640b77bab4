//! The handshake of two proxies on a TCP connection, by the tokens that they exchanged in the windows while the link
//! was up.
//!
//! ```text
//!    0  magic, with the version
//!    8  epoch of the lost link
//!   12  index of the engine's plan
//!   16  slot of the sending node
//!   20  zero
//!   24  token             the connecting node sends the listening node's token, which answers with the other one
//! ```

use super::contact::{EngineId, FailoverToken};
use super::error::FailoverError;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::os::fd::OwnedFd;

/// Length of a handshake.
const HANDSHAKE_BYTES: usize = 40;
const MAGIC: u64 = u64::from_le_bytes(*b"clresum1");

/// The first bytes that each proxy sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Handshake {
    /// The engine; `peer` is the sending node.
    pub(super) id: EngineId,
    pub(super) token: FailoverToken,
}

impl Handshake {
    fn encode(&self) -> [u8; HANDSHAKE_BYTES] {
        let words = [
            MAGIC,
            u64::from(self.id.epoch) | (self.id.plan as u64) << 32,
            u64::from(self.id.peer),
            self.token.0[0],
            self.token.0[1],
        ];
        let mut bytes = [0; HANDSHAKE_BYTES];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes bytes that any process may have sent.
    fn decode(bytes: &[u8; HANDSHAKE_BYTES]) -> Option<Self> {
        let word = |index: usize| u64::from_le_bytes(bytes[8 * index..8 * index + 8].try_into().expect("eight bytes"));
        let peer = u8::try_from(word(2)).ok()?;
        let id = EngineId { peer, epoch: word(1) as u32, plan: (word(1) >> 32) as usize };
        (word(0) == MAGIC).then(|| Self { id, token: FailoverToken([word(3), word(4)]) })
    }

    /// Sends the handshake, which fits into the empty buffer of a new socket.
    pub(super) fn send(&self, socket: &OwnedFd) -> Result<(), FailoverError> {
        let sent = rustix::net::send(socket, &self.encode(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
        if sent == HANDSHAKE_BYTES { Ok(()) } else { Err(FailoverError::Ended) }
    }
}

/// A TCP connection whose peer has not been recognized yet.
pub(super) struct HandshakeSocket {
    pub(super) socket: OwnedFd,
    received: Vec<u8>,
}

impl HandshakeSocket {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket, received: Vec::new() }
    }

    /// Receives the peer's handshake. Returns `Ok(None)` as long as it is incomplete.
    pub(super) fn receive(&mut self) -> Result<Option<Handshake>, FailoverError> {
        let mut bytes = [0; HANDSHAKE_BYTES];
        let room = &mut bytes[self.received.len()..];
        match rustix::net::recv(&self.socket, room, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(FailoverError::Ended),
            Ok((received, _)) => self.received.extend(&bytes[self.received.len()..][..received]),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(_) => return Err(FailoverError::Ended),
        }
        match <&[u8; HANDSHAKE_BYTES]>::try_from(&self.received[..]) {
            Ok(received) => Handshake::decode(received).map(Some).ok_or(FailoverError::UnexpectedPeer),
            Err(_) => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handshake_is_decoded_as_encoded_and_an_altered_one_is_rejected() {
        let id = EngineId { peer: 31, epoch: 0xFFFF_FFF0, plan: 63 };
        let handshake = Handshake { id, token: FailoverToken([3, 4]) };
        assert_eq!(Handshake::decode(&handshake.encode()), Some(handshake));
        for at in [0, 7, 17, 20] {
            let mut bytes = handshake.encode();
            bytes[at] ^= 0x40;
            assert_eq!(Handshake::decode(&bytes), None, "byte {at}");
        }
        assert_eq!(Handshake::decode(&[0; HANDSHAKE_BYTES]), None);
    }
}
