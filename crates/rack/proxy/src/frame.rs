//! The frames that two proxies exchange, one in each record of a partition's lane.
//!
//! ```text
//!    0  connection    the opener's number; the top bit is set where the node with the higher index opened
//!    4  kind          one of `FrameKind`
//!    5  zero          three bytes
//!    8  len_bytes     of the payload that follows
//!   12  aux           depends on the kind
//! ```
//!
//! The header has 16 bytes, so that it and a payload of up to 32 bytes move in one cache line with the record's own.
//! Numbers are little endian.
//!
//! Positions in a stream are counted from its first byte. A frame carries the low 32 bits, which are unambiguous
//! because less than 2^31 bytes are ever in flight.

use thiserror::Error;

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 16;
/// Payload bytes that travel in the cache line of the header.
pub const INLINE_BYTES: usize = lane::INLINE_BYTES - HEADER_BYTES;
/// Payload bytes of the longest frame.
pub const PAYLOAD_BYTES_MAX: usize = lane::RECORD_BYTES_MAX - HEADER_BYTES;
/// Bound on the payload of an `Open`: it fits into the header's cache line.
pub const OPEN_PAYLOAD_BYTES_MAX: usize = INLINE_BYTES;

/// The number of a connection, by which both proxies of a link know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnectionNumber(pub u32);

/// The bit of a number that says which node opened.
const OPENED_BY_HIGHER: u32 = 1 << 31;

impl ConnectionNumber {
    /// Returns the number of the `count`th connection that a node opens.
    pub fn new(count: u32, opener: LinkSide) -> Self {
        let count = count & !OPENED_BY_HIGHER;
        Self(if opener == LinkSide::Higher { count | OPENED_BY_HIGHER } else { count })
    }

    /// Returns how many connections the opener had opened before.
    pub fn count(self) -> u32 {
        self.0 & !OPENED_BY_HIGHER
    }

    /// Returns the side that opened the connection.
    pub fn opener(self) -> LinkSide {
        if self.0 & OPENED_BY_HIGHER != 0 { LinkSide::Higher } else { LinkSide::Lower }
    }
}

/// Which of the two nodes of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkSide {
    /// The node with the lower index.
    Lower,
    /// The node with the higher index.
    Higher,
}

impl LinkSide {
    /// Returns the other side.
    pub fn other(self) -> Self {
        match self {
            Self::Lower => Self::Higher,
            Self::Higher => Self::Lower,
        }
    }
}

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// A program connects: the payload describes the connection, aux is the position up to which the opener accepts
    /// bytes.
    Open = 1,
    /// The server is connected: aux is the position up to which it accepts bytes.
    Opened = 2,
    /// There is no server: aux is the error number.
    Refused = 3,
    /// Bytes of the stream: aux is the position of the first.
    Data = 4,
    /// Credit: aux is the position up to which bytes may be sent.
    Credit = 5,
    /// The sender has shut its direction down; the other direction stays open. Aux is the position of the end.
    Fin = 6,
    /// The program's last descriptor was closed in good order. Aux is the position of the end.
    Close = 7,
    /// The connection is aborted: aux is the error number.
    Reset = 8,
    /// The sender's further frames of this connection are in another partition: aux is its class.
    Move = 9,
    /// After a lost link: aux is the position up to which the sender has received, the payload a [`Resumption`].
    Resume = 10,
    /// Acknowledges a `Refused`, `Close` or `Reset`, which then need not be repeated.
    EndAck = 11,
    /// As `Opened`, for a connection whose bytes the proxies forward until its programs move them to the span that its
    /// `Open` proposed.
    OpenedWithSpan = 12,
    /// The sender's program has stored into the window of such a connection, whose other program sleeps.
    Ring = 13,
    /// The sender's program does not use the span of such a connection any more.
    Left = 14,
    /// After a lost link: the sender still has such a connection. Aux is the index of its span, the payload a
    /// [`Carried`].
    ResumeWithSpan = 15,
}

/// A frame without its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// The connection that it belongs to.
    pub connection: ConnectionNumber,
    /// Its kind.
    pub kind: FrameKind,
    /// Bytes of the payload.
    pub len_bytes: usize,
    /// Depends on the kind.
    pub aux: u32,
}

/// Why a record is not a valid frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum FrameError {
    /// The record is too short for a header.
    #[error("a frame of {0} bytes, shorter than its header of {HEADER_BYTES}")]
    Short(usize),
    /// The kind is unknown.
    #[error("a frame of unknown kind {0}")]
    Kind(u8),
    /// Reserved bytes are not zero.
    #[error("a frame with {0:#x} in reserved bytes")]
    Reserved(u32),
    /// The length differs from that of the record.
    #[error("a frame of {stated} bytes in a record with {found}")]
    Length {
        /// The length in the header.
        stated: u32,
        /// The length of the record.
        found: usize,
    },
    /// A payload that the kind does not allow: present, absent or too long.
    #[error("a {kind:?} frame with a payload of {len_bytes} bytes")]
    Payload {
        /// The kind.
        kind: FrameKind,
        /// The length of the payload.
        len_bytes: usize,
    },
}

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        const KINDS: [FrameKind; 15] = [
            FrameKind::Open,
            FrameKind::Opened,
            FrameKind::Refused,
            FrameKind::Data,
            FrameKind::Credit,
            FrameKind::Fin,
            FrameKind::Close,
            FrameKind::Reset,
            FrameKind::Move,
            FrameKind::Resume,
            FrameKind::EndAck,
            FrameKind::OpenedWithSpan,
            FrameKind::Ring,
            FrameKind::Left,
            FrameKind::ResumeWithSpan,
        ];
        KINDS.get(usize::from(byte).checked_sub(1)?).copied()
    }

    fn may_carry(self, len_bytes: usize) -> bool {
        match self {
            Self::Open => (1..=OPEN_PAYLOAD_BYTES_MAX).contains(&len_bytes),
            Self::Data => (1..=PAYLOAD_BYTES_MAX).contains(&len_bytes),
            Self::Resume => len_bytes == Resumption::BYTES,
            Self::ResumeWithSpan => len_bytes == Carried::BYTES,
            _ => len_bytes == 0,
        }
    }
}

impl FrameHeader {
    /// Returns the header of a frame without payload.
    pub fn control(connection: ConnectionNumber, kind: FrameKind, aux: u32) -> Self {
        Self { connection, kind, len_bytes: 0, aux }
    }

    /// Returns the bytes to send.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&self.connection.0.to_le_bytes());
        bytes[4] = self.kind as u8;
        bytes[8..12].copy_from_slice(&(self.len_bytes as u32).to_le_bytes());
        bytes[12..].copy_from_slice(&self.aux.to_le_bytes());
        bytes
    }

    /// Decodes a header from bytes that a peer sent, where only the header says how long the frame is.
    ///
    /// # Errors
    /// The header is invalid.
    pub fn decode_alone(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        Self::decode(bytes, HEADER_BYTES.saturating_add(half_word(bytes, 8) as usize))
    }

    /// Decodes a header from bytes that a peer wrote, of a record of `record_bytes`.
    ///
    /// # Errors
    /// The header is invalid.
    pub fn decode(bytes: &[u8; HEADER_BYTES], record_bytes: usize) -> Result<Self, FrameError> {
        let found = record_bytes.checked_sub(HEADER_BYTES).ok_or(FrameError::Short(record_bytes))?;
        let kind = FrameKind::from_byte(bytes[4]).ok_or(FrameError::Kind(bytes[4]))?;
        let reserved = half_word(bytes, 4) >> 8;
        if reserved != 0 {
            return Err(FrameError::Reserved(reserved));
        }
        let stated = half_word(bytes, 8);
        if stated as usize != found {
            return Err(FrameError::Length { stated, found });
        }
        if !kind.may_carry(found) {
            return Err(FrameError::Payload { kind, len_bytes: found });
        }
        Ok(Self {
            connection: ConnectionNumber(half_word(bytes, 0)),
            kind,
            len_bytes: found,
            aux: half_word(bytes, 12),
        })
    }
}

/// The payload of a `Resume`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resumption {
    /// The position up to which the sender accepts bytes.
    pub limit: u32,
    /// The sender has received a `Fin`.
    pub has_end: bool,
}

impl Resumption {
    /// Length of the encoding.
    pub const BYTES: usize = 8;

    /// Returns the bytes to send.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.limit.to_le_bytes());
        bytes[4] = u8::from(self.has_end);
        bytes
    }

    /// Decodes bytes that a peer wrote; returns `None` for values that no release writes.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let [a, b, c, d, has_end @ (0 | 1), 0, 0, 0] = *bytes else { return None };
        Some(Self { limit: u32::from_le_bytes([a, b, c, d]), has_end: has_end == 1 })
    }
}

/// The bytes that a node has carried for one of its programs: the payload of a `ResumeWithSpan`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Carried {
    /// Bytes that were taken from the program.
    pub taken: u64,
    /// Bytes that were given to it.
    pub given: u64,
}

impl Carried {
    /// Length of the encoding.
    pub const BYTES: usize = 16;
    /// What no node has carried: the kernel has ended the connection.
    pub const UNKNOWN: Self = Self { taken: u64::MAX, given: u64::MAX };

    /// Returns the bytes to send.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.taken.to_le_bytes());
        bytes[8..].copy_from_slice(&self.given.to_le_bytes());
        bytes
    }

    /// Decodes bytes that a peer wrote.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        Self { taken: word(0), given: word(8) }
    }

    /// Returns what the other node has carried if no byte is on its way.
    pub fn of_other_end(&self) -> Self {
        Self { taken: self.given, given: self.taken }
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
        fn a_header_is_decoded_as_encoded(number: u32, byte in 1..=15_u8, len_bytes in 1..=32_usize, aux: u32) {
            let kind = FrameKind::from_byte(byte).expect("a kind");
            let lengths = [0, len_bytes, Resumption::BYTES, Carried::BYTES];
            let len_bytes = lengths.into_iter().find(|&bytes| kind.may_carry(bytes)).unwrap();
            let header = FrameHeader { connection: ConnectionNumber(number), kind, len_bytes, aux };
            prop_assert_eq!(FrameHeader::decode(&header.encode(), HEADER_BYTES + len_bytes), Ok(header));
        }

        #[test]
        fn a_header_with_a_changed_byte_is_rejected_or_differs(at in 0..16_usize, change in 1..=255_u8) {
            let header = FrameHeader { connection: ConnectionNumber(7), kind: FrameKind::Data, len_bytes: 100, aux: 9 };
            let mut bytes = header.encode();
            bytes[at] ^= change;
            prop_assert_ne!(FrameHeader::decode(&bytes, HEADER_BYTES + 100), Ok(header));
        }

        #[test]
        fn invalid_bytes_are_rejected(bytes: [u8; 16], record_bytes in 0..20_000_usize) {
            if let Ok(header) = FrameHeader::decode(&bytes, record_bytes) {
                prop_assert_eq!(header.len_bytes, record_bytes - HEADER_BYTES);
                prop_assert_eq!(header.encode(), bytes);
            }
        }
    }

    #[test]
    fn a_resumption_is_decoded_as_encoded_and_invalid_bytes_are_rejected() {
        for has_end in [false, true] {
            let resumption = Resumption { limit: 0x8070_6050, has_end };
            assert_eq!(Resumption::decode(&resumption.encode()), Some(resumption));
        }
        assert_eq!(Resumption::decode(&[1, 2, 3, 4, 2, 0, 0, 0]), None);
        assert_eq!(Resumption::decode(&[1, 2, 3, 4, 1, 0, 0, 1]), None);
    }

    #[test]
    fn a_number_tells_which_side_opened() {
        assert_eq!(ConnectionNumber::new(5, LinkSide::Lower).opener(), LinkSide::Lower);
        assert_eq!(ConnectionNumber::new(5, LinkSide::Higher).opener(), LinkSide::Higher);
        assert_eq!(ConnectionNumber::new(u32::MAX, LinkSide::Lower).opener(), LinkSide::Lower);
    }

    #[test]
    fn an_error_names_the_invalid_field() {
        let good = FrameHeader::control(ConnectionNumber(1), FrameKind::Credit, 2).encode();
        let changed = |at: usize, value: u8| {
            let mut bytes = good;
            bytes[at] = value;
            FrameHeader::decode(&bytes, HEADER_BYTES).unwrap_err()
        };
        assert_eq!(changed(4, 0), FrameError::Kind(0));
        assert_eq!(changed(4, 16), FrameError::Kind(16));
        assert_eq!(changed(4, 10), FrameError::Payload { kind: FrameKind::Resume, len_bytes: 0 });
        assert_eq!(changed(6, 1), FrameError::Reserved(0x100));
        assert_eq!(changed(8, 1), FrameError::Length { stated: 1, found: 0 });
        assert_eq!(changed(4, 1), FrameError::Payload { kind: FrameKind::Open, len_bytes: 0 });
        assert_eq!(FrameHeader::decode(&good, 15), Err(FrameError::Short(15)));
    }
}
