//! How two proxies recognise each other on a TCP connection: by what each has told the other in the windows, as long as
//! the link was up.
//!
//! ```text
//!    0  magic, with the version
//!    8  epoch of the link that was lost
//!   12  place in the plan of partitions
//!   16  slot of the node that speaks
//!   20  zero
//!   24  token             who connects says the one of who listens; that one answers with the other's
//! ```

use socket::process::clock;

/// Bytes of what each says first.
pub(super) const HANDSHAKE_BYTES: usize = 40;
const MAGIC: u64 = u64::from_le_bytes(*b"clresum1");

/// A random number that only the two proxies of a link know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::driver) struct Token(pub [u64; 2]);

impl Token {
    /// A new one, which is not zero. `None` without randomness.
    pub(in crate::driver) fn new() -> Option<Self> {
        let mut bytes = [0; 16];
        let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        let half = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        (filled == Ok(bytes.len())).then(|| Self([half(0) | 1, half(8)]))
    }

    /// Whether both are the same, in a time that does not tell how far they are.
    pub(super) fn is(&self, other: &Self) -> bool {
        let unlike = (self.0[0] ^ other.0[0]) | (self.0[1] ^ other.0[1]);
        std::hint::black_box(unlike) == 0
    }
}

/// Which engine of which lost link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::driver) struct Which {
    /// The other node's slot.
    pub(in crate::driver) peer: u8,
    /// The link's epoch.
    pub(in crate::driver) epoch: u32,
    /// The engine's place in the plan, which is the same at both ends.
    pub(in crate::driver) place: usize,
}

/// What one end says first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Handshake {
    /// `peer` is who speaks.
    pub which: Which,
    pub token: Token,
}

impl Handshake {
    pub(super) fn encode(&self) -> [u8; HANDSHAKE_BYTES] {
        let words = [
            MAGIC,
            u64::from(self.which.epoch) | (self.which.place as u64) << 32,
            u64::from(self.which.peer),
            self.token.0[0],
            self.token.0[1],
        ];
        let mut bytes = [0; HANDSHAKE_BYTES];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// From bytes that anybody may have sent.
    pub(super) fn decode(bytes: &[u8; HANDSHAKE_BYTES]) -> Option<Self> {
        let word = |index: usize| u64::from_le_bytes(bytes[8 * index..8 * index + 8].try_into().expect("eight bytes"));
        let peer = u8::try_from(word(2)).ok()?;
        let which = Which { peer, epoch: word(1) as u32, place: (word(1) >> 32) as usize };
        (word(0) == MAGIC).then(|| Self { which, token: Token([word(3), word(4)]) })
    }
}

/// When something has to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Deadline(u64);

impl Deadline {
    pub(super) fn after(ns: u64) -> Self {
        Self(clock::now_ns().saturating_add(ns))
    }

    pub(super) fn is_over(self) -> bool {
        clock::now_ns() >= self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handshake_survives_the_way_and_a_strangers_is_none() {
        let which = Which { peer: 31, epoch: 0xFFFF_FFF0, place: 63 };
        let handshake = Handshake { which, token: Token([3, 4]) };
        assert_eq!(Handshake::decode(&handshake.encode()), Some(handshake));
        for at in [0, 7, 17, 20] {
            let mut bytes = handshake.encode();
            bytes[at] ^= 0x40;
            assert_eq!(Handshake::decode(&bytes), None, "byte {at}");
        }
        assert_eq!(Handshake::decode(&[0; HANDSHAKE_BYTES]), None);
    }

    #[test]
    fn tokens_are_new_and_differ_in_any_bit() {
        let [one, other] = [Token::new().unwrap(), Token::new().unwrap()];
        assert!(one.is(&one) && !one.is(&other));
        assert!(!one.is(&Token([one.0[0], one.0[1] ^ 1 << 63])));
    }
}
