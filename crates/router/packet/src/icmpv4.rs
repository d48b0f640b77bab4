//! ICMP for IPv4 (RFC 792, RFC 1191).

use crate::Error;
use crate::checksum;
use crate::error::at_least;
use crate::octets::{array_at, put, u16_at};

/// Bytes of the header: type, code, checksum and four bytes by type.
pub const HEADER_BYTES: usize = 8;

/// Why a destination is not reached: the codes of [`Message::Unreachable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Unreachable {
    /// No route.
    Network = 0,
    /// No neighbour answers.
    Host = 1,
    /// Nobody there knows the protocol.
    Protocol = 2,
    /// Nobody listens on the port.
    Port = 3,
    /// Not without fragmenting, which the packet forbids; the message carries the MTU.
    FragmentationNeeded = 4,
    /// A source route could not be followed.
    SourceRouteFailed = 5,
    /// Forbidden by somebody.
    Prohibited = 13,
}

/// A message, checked for its length.
#[derive(Clone, Copy, Debug)]
pub struct Packet<T> {
    bytes: T,
}

impl<T: AsRef<[u8]>> Packet<T> {
    /// Checks the length.
    #[inline]
    pub fn new_checked(bytes: T) -> Result<Packet<T>, Error> {
        at_least("ICMP", bytes.as_ref().len(), HEADER_BYTES)?;
        Ok(Packet { bytes })
    }

    /// The type.
    #[inline]
    pub fn kind(&self) -> u8 {
        self.bytes.as_ref()[0]
    }

    /// The code.
    #[inline]
    pub fn code(&self) -> u8 {
        self.bytes.as_ref()[1]
    }

    /// Whether it is about another packet: no error is ever answered with an error (RFC 1812, section 4.3.2.7). What
    /// is unknown counts as one.
    #[inline]
    pub fn is_error(&self) -> bool {
        !matches!(self.kind(), 0 | 8 | 9 | 10 | 13..=18 | 30 | 42 | 43)
    }

    /// Whether the message sums up.
    pub fn verify_checksum(&self) -> bool {
        checksum::verify(self.bytes.as_ref())
    }

    /// The four bytes between checksum and data.
    pub fn rest_of_header(&self) -> [u8; 4] {
        array_at(self.bytes.as_ref(), 4)
    }

    /// What follows the header.
    pub fn payload(&self) -> &[u8] {
        &self.bytes.as_ref()[HEADER_BYTES..]
    }
}

/// A message that a router sends or understands. What is borrowed is an error's packet, or an echo's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// Type 8: to be answered.
    EchoRequest {
        /// Of whom.
        identifier: u16,
        /// Which.
        sequence: u16,
        /// To be sent back.
        data: &'a [u8],
    },
    /// Type 0: an answer.
    EchoReply {
        /// Of whom.
        identifier: u16,
        /// Which.
        sequence: u16,
        /// As it came.
        data: &'a [u8],
    },
    /// Type 3.
    Unreachable {
        /// The code.
        code: u8,
        /// With [`Unreachable::FragmentationNeeded`], what the next link carries in one piece, else 0.
        mtu: u16,
        /// The packet that did not arrive: its header and some of its payload.
        original: &'a [u8],
    },
    /// Type 5: there is a nearer router.
    Redirect {
        /// The code.
        code: u8,
        /// Which.
        gateway: [u8; 4],
        /// The packet that took the detour.
        original: &'a [u8],
    },
    /// Type 11.
    TimeExceeded {
        /// 0 under way, 1 while being put together.
        code: u8,
        /// The packet that had no hop left.
        original: &'a [u8],
    },
    /// Type 12.
    ParameterProblem {
        /// The offending byte's place.
        pointer: u8,
        /// The packet that has it.
        original: &'a [u8],
    },
}

impl<'a> Message<'a> {
    /// As `bytes` have it, whose checksum must be right.
    pub fn parse(bytes: &'a [u8]) -> Result<Message<'a>, Error> {
        let packet = Packet::new_checked(bytes)?;
        if !packet.verify_checksum() {
            return Err(Error::Checksum { protocol: "ICMP" });
        }
        let (code, rest, data) = (packet.code(), packet.rest_of_header(), &bytes[HEADER_BYTES..]);
        let (high, low) = (u16_at(&rest, 0), u16_at(&rest, 2));
        match packet.kind() {
            0 => Ok(Message::EchoReply { identifier: high, sequence: low, data }),
            3 => Ok(Message::Unreachable { code, mtu: low, original: data }),
            5 => Ok(Message::Redirect { code, gateway: rest, original: data }),
            8 => Ok(Message::EchoRequest { identifier: high, sequence: low, data }),
            11 => Ok(Message::TimeExceeded { code, original: data }),
            12 => Ok(Message::ParameterProblem { pointer: rest[0], original: data }),
            kind => Err(Error::Kind { protocol: "ICMP", kind }),
        }
    }

    /// Bytes that [`Message::emit`] writes.
    pub fn total_bytes(&self) -> usize {
        HEADER_BYTES + self.data().len()
    }

    fn data(&self) -> &'a [u8] {
        match *self {
            Message::EchoRequest { data, .. } | Message::EchoReply { data, .. } => data,
            Message::Unreachable { original, .. }
            | Message::Redirect { original, .. }
            | Message::TimeExceeded { original, .. }
            | Message::ParameterProblem { original, .. } => original,
        }
    }

    /// Writes header, data and checksum to the front of `bytes`; fewer than [`Message::total_bytes`] are a bug of the
    /// caller's.
    pub fn emit(&self, bytes: &mut [u8]) {
        let pair = |high: u16, low: u16| ((u32::from(high) << 16) | u32::from(low)).to_be_bytes();
        let (kind, code, rest) = match *self {
            Message::EchoRequest { identifier, sequence, .. } => (8, 0, pair(identifier, sequence)),
            Message::EchoReply { identifier, sequence, .. } => (0, 0, pair(identifier, sequence)),
            Message::Unreachable { code, mtu, .. } => (3, code, pair(0, mtu)),
            Message::Redirect { code, gateway, .. } => (5, code, gateway),
            Message::TimeExceeded { code, .. } => (11, code, [0; 4]),
            Message::ParameterProblem { pointer, .. } => (12, 0, [pointer, 0, 0, 0]),
        };
        let bytes = &mut bytes[..self.total_bytes()];
        put(bytes, 0, &[kind, code, 0, 0]);
        put(bytes, 4, &rest);
        put(bytes, HEADER_BYTES, self.data());
        let checksum = checksum::compute(bytes);
        put(bytes, 2, &checksum.to_be_bytes());
    }
}
