//! What two proxies say to each other: frames, one in each record of a partition's lane.
//!
//! ```text
//!    0  connection    the opener's number; the top bit is set where the node with the higher index opened
//!    4  kind          one of `Kind`
//!    5  zero          three bytes
//!    8  len bytes     of the payload that follows
//!   12  aux           what the kind says
//! ```
//!
//! The header has 16 bytes, so that it and a payload of up to 32 bytes move in one cache line with the record's own.
//! Numbers are little endian.
//!
//! Positions in a stream are counted from its first byte; a frame carries the low 32 bits, which say it all, because
//! less than half as much is ever under way.

use thiserror::Error;

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 16;
/// Payload bytes that travel in the cache line of the header.
pub const INLINE_BYTES: usize = lane::INLINE_BYTES - HEADER_BYTES;
/// Payload bytes of the longest frame.
pub const PAYLOAD_BYTES_MAX: usize = lane::RECORD_BYTES_MAX - HEADER_BYTES;
/// Bytes of the description that an `Open` carries, at most: it needs no second line.
pub const TUPLE_BYTES_MAX: usize = INLINE_BYTES;

/// A connection, as both proxies of a link name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Number(pub u32);

/// The bit of a number that says who opened.
const OPENED_BY_HIGHER: u32 = 1 << 31;

impl Number {
    /// The `count`th connection that a node opens.
    pub fn new(count: u32, opener: Side) -> Self {
        let count = count & !OPENED_BY_HIGHER;
        Self(if opener == Side::Higher { count | OPENED_BY_HIGHER } else { count })
    }

    /// How many the node that opened it had opened before.
    pub fn count(self) -> u32 {
        self.0 & !OPENED_BY_HIGHER
    }

    /// Who opened it.
    pub fn opener(self) -> Side {
        if self.0 & OPENED_BY_HIGHER != 0 { Side::Higher } else { Side::Lower }
    }
}

/// Which of the two nodes of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The one with the lower index.
    Lower,
    /// The one with the higher index.
    Higher,
}

impl Side {
    /// The other node.
    pub fn other(self) -> Self {
        match self {
            Self::Lower => Self::Higher,
            Self::Higher => Self::Lower,
        }
    }
}

/// What a frame says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A program connects: payload is the tuple, aux the position up to which the opener takes bytes.
    Open = 1,
    /// The other end is connected: aux is the position up to which it takes bytes.
    Opened = 2,
    /// There is nobody to connect to: aux is the error number.
    Refused = 3,
    /// Bytes of the stream: aux is the position of the first.
    Data = 4,
    /// More bytes may be sent: aux is the position up to which.
    Credit = 5,
    /// Nothing follows; the other direction goes on. Aux is the position of the end.
    Fin = 6,
    /// The program's last descriptor is gone, in good order. Aux is the position of the end.
    Close = 7,
    /// The connection is over at once: aux is the error number.
    Reset = 8,
    /// The sender's frames of this connection go on in another partition: aux is its class.
    Move = 9,
    /// After a lost link: aux is the position up to which the sender has received, the payload a [`Resumption`].
    Resume = 10,
    /// A `Refused`, `Close` or `Reset` has come: who said it need not say it again.
    Gone = 11,
    /// As `Opened`, and the connection lies in the windows, where its `Open` has proposed.
    Placed = 12,
    /// The sender's program has stored into the window of a connection there whose other program sleeps.
    Ring = 13,
    /// After a lost link: the sender still has this connection in the windows. Aux is its place there.
    Held = 14,
}

/// A frame without its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Whose it is.
    pub connection: Number,
    /// What it says.
    pub kind: Kind,
    /// Bytes that follow.
    pub len_bytes: usize,
    /// As the kind says.
    pub aux: u32,
}

/// Why a record is not a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum FrameError {
    /// Too short for a header.
    #[error("a frame of {0} bytes, shorter than its header of {HEADER_BYTES}")]
    Short(usize),
    /// No kind of ours.
    #[error("a frame of unknown kind {0}")]
    Kind(u8),
    /// Bytes that are zero in every frame of ours.
    #[error("a frame with {0:#x} where zeros belong")]
    Reserved(u32),
    /// The length is not that of the record.
    #[error("a frame that says {said} bytes in a record with {found}")]
    Length {
        /// What the header says.
        said: u32,
        /// What the record has.
        found: usize,
    },
    /// A payload where none belongs, none where one does, or one that is too long.
    #[error("a frame of kind {kind:?} with {len_bytes} bytes")]
    Payload {
        /// Of what kind.
        kind: Kind,
        /// With how many bytes.
        len_bytes: usize,
    },
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        const KINDS: [Kind; 14] = [
            Kind::Open,
            Kind::Opened,
            Kind::Refused,
            Kind::Data,
            Kind::Credit,
            Kind::Fin,
            Kind::Close,
            Kind::Reset,
            Kind::Move,
            Kind::Resume,
            Kind::Gone,
            Kind::Placed,
            Kind::Ring,
            Kind::Held,
        ];
        KINDS.get(usize::from(byte).checked_sub(1)?).copied()
    }

    fn may_carry(self, len_bytes: usize) -> bool {
        match self {
            Self::Open => (1..=TUPLE_BYTES_MAX).contains(&len_bytes),
            Self::Data => (1..=PAYLOAD_BYTES_MAX).contains(&len_bytes),
            Self::Resume => len_bytes == Resumption::BYTES,
            _ => len_bytes == 0,
        }
    }
}

impl Header {
    /// A frame without payload.
    pub fn control(connection: Number, kind: Kind, aux: u32) -> Self {
        Self { connection, kind, len_bytes: 0, aux }
    }

    /// The bytes to send.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&self.connection.0.to_le_bytes());
        bytes[4] = self.kind as u8;
        bytes[8..12].copy_from_slice(&(self.len_bytes as u32).to_le_bytes());
        bytes[12..].copy_from_slice(&self.aux.to_le_bytes());
        bytes
    }

    /// The header in bytes that a peer sent, where nothing but the header says how long the frame is.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode_alone(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        Self::decode(bytes, HEADER_BYTES.saturating_add(half_word(bytes, 8) as usize))
    }

    /// The header in bytes that a peer wrote, of a record of `record_bytes`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8; HEADER_BYTES], record_bytes: usize) -> Result<Self, FrameError> {
        let found = record_bytes.checked_sub(HEADER_BYTES).ok_or(FrameError::Short(record_bytes))?;
        let kind = Kind::from_byte(bytes[4]).ok_or(FrameError::Kind(bytes[4]))?;
        let reserved = half_word(bytes, 4) >> 8;
        if reserved != 0 {
            return Err(FrameError::Reserved(reserved));
        }
        let said = half_word(bytes, 8);
        if said as usize != found {
            return Err(FrameError::Length { said, found });
        }
        if !kind.may_carry(found) {
            return Err(FrameError::Payload { kind, len_bytes: found });
        }
        Ok(Self { connection: Number(half_word(bytes, 0)), kind, len_bytes: found, aux: half_word(bytes, 12) })
    }
}

/// What a `Resume` says besides a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resumption {
    /// The position up to which the sender takes bytes.
    pub limit: u32,
    /// A `Fin` has come.
    pub has_end: bool,
}

impl Resumption {
    /// Bytes of it.
    pub const BYTES: usize = 8;

    /// The bytes to send.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.limit.to_le_bytes());
        bytes[4] = u8::from(self.has_end);
        bytes
    }

    /// From bytes that a peer wrote; `None` where there is something that no release of ours writes.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let [a, b, c, d, has_end @ (0 | 1), 0, 0, 0] = *bytes else { return None };
        Some(Self { limit: u32::from_le_bytes([a, b, c, d]), has_end: has_end == 1 })
    }
}

fn half_word(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    let mut copy = [0; 4];
    copy.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(copy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_header_survives_the_way(number: u32, byte in 1..=14_u8, len_bytes in 1..=32_usize, aux: u32) {
            let kind = Kind::from_byte(byte).expect("a kind");
            let len_bytes = [0, len_bytes, Resumption::BYTES].into_iter().find(|&bytes| kind.may_carry(bytes)).unwrap();
            let header = Header { connection: Number(number), kind, len_bytes, aux };
            prop_assert_eq!(Header::decode(&header.encode(), HEADER_BYTES + len_bytes), Ok(header));
        }

        #[test]
        fn a_header_with_a_changed_byte_is_refused_or_says_something_else(at in 0..16_usize, change in 1..=255_u8) {
            let header = Header { connection: Number(7), kind: Kind::Data, len_bytes: 100, aux: 9 };
            let mut bytes = header.encode();
            bytes[at] ^= change;
            prop_assert_ne!(Header::decode(&bytes, HEADER_BYTES + 100), Ok(header));
        }

        #[test]
        fn nonsense_is_survived(bytes: [u8; 16], record_bytes in 0..20_000_usize) {
            if let Ok(header) = Header::decode(&bytes, record_bytes) {
                prop_assert_eq!(header.len_bytes, record_bytes - HEADER_BYTES);
                prop_assert_eq!(header.encode(), bytes);
            }
        }
    }

    #[test]
    fn a_resumption_survives_the_way_and_nonsense_is_none() {
        for has_end in [false, true] {
            let resumption = Resumption { limit: 0x8070_6050, has_end };
            assert_eq!(Resumption::decode(&resumption.encode()), Some(resumption));
        }
        assert_eq!(Resumption::decode(&[1, 2, 3, 4, 2, 0, 0, 0]), None);
        assert_eq!(Resumption::decode(&[1, 2, 3, 4, 1, 0, 0, 1]), None);
    }

    #[test]
    fn a_number_says_who_opened() {
        assert_eq!(Number::new(5, Side::Lower).opener(), Side::Lower);
        assert_eq!(Number::new(5, Side::Higher).opener(), Side::Higher);
        assert_eq!(Number::new(u32::MAX, Side::Lower).opener(), Side::Lower);
    }

    #[test]
    fn a_refusal_says_what_was_found() {
        let good = Header::control(Number(1), Kind::Credit, 2).encode();
        let changed = |at: usize, value: u8| {
            let mut bytes = good;
            bytes[at] = value;
            Header::decode(&bytes, HEADER_BYTES).unwrap_err()
        };
        assert_eq!(changed(4, 0), FrameError::Kind(0));
        assert_eq!(changed(4, 15), FrameError::Kind(15));
        assert_eq!(changed(4, 10), FrameError::Payload { kind: Kind::Resume, len_bytes: 0 });
        assert_eq!(changed(6, 1), FrameError::Reserved(0x100));
        assert_eq!(changed(8, 1), FrameError::Length { said: 1, found: 0 });
        assert_eq!(changed(4, 1), FrameError::Payload { kind: Kind::Open, len_bytes: 0 });
        assert_eq!(Header::decode(&good, 15), Err(FrameError::Short(15)));
    }
}
