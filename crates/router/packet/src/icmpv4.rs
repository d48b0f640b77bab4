//! ICMP for IPv4 (RFC 792, RFC 1191).

use crate::Error;
use crate::checksum;
use crate::error::at_least;
use crate::octets::{array_at, put, u16_at};

/// Length of the header in bytes: type, code, checksum and four bytes that depend on the type.
pub const HEADER_BYTES: usize = 8;

/// The codes of [`Message::Unreachable`] (RFC 792, RFC 1812).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Unreachable {
    /// No route to the network.
    Network = 0,
    /// Address resolution of the destination or the next hop failed.
    Host = 1,
    /// The destination does not implement the protocol.
    Protocol = 2,
    /// No socket listens on the port.
    Port = 3,
    /// The packet exceeds the next link's MTU and has DF set; the message carries that MTU (RFC 1191).
    FragmentationNeeded = 4,
    /// The source route could not be followed.
    SourceRouteFailed = 5,
    /// Communication administratively prohibited (RFC 1812, section 5.2.7.1).
    Prohibited = 13,
}

/// A message with a whole header.
#[derive(Clone, Copy, Debug)]
pub struct Packet<T> {
    bytes: T,
}

impl<T: AsRef<[u8]>> Packet<T> {
    /// Rejects messages shorter than [`HEADER_BYTES`].
    #[inline]
    pub fn new_checked(bytes: T) -> Result<Packet<T>, Error> {
        at_least("ICMP", bytes.as_ref().len(), HEADER_BYTES)?;
        Ok(Packet { bytes })
    }

    /// Returns the type.
    #[inline]
    pub fn kind(&self) -> u8 {
        self.bytes.as_ref()[0]
    }

    /// Returns the code.
    #[inline]
    pub fn code(&self) -> u8 {
        self.bytes.as_ref()[1]
    }

    /// Returns whether this is an error message, to which no error may be sent (RFC 1812, section 4.3.2.7). Unknown
    /// types count as errors.
    #[inline]
    pub fn is_error(&self) -> bool {
        !matches!(self.kind(), 0 | 8 | 9 | 10 | 13..=18 | 30 | 42 | 43)
    }

    /// Returns whether the checksum is correct.
    pub fn verify_checksum(&self) -> bool {
        checksum::verify(self.bytes.as_ref())
    }

    /// Returns the rest of the header: the four bytes between checksum and data.
    fn rest_of_header(&self) -> [u8; 4] {
        array_at(self.bytes.as_ref(), 4)
    }

    /// Returns the data behind the header.
    pub fn payload(&self) -> &[u8] {
        &self.bytes.as_ref()[HEADER_BYTES..]
    }
}

/// A message that a router sends or understands. It borrows the invoking packet of an error, or the data of an echo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// Type 8: echo request.
    EchoRequest {
        /// Identifies the sender's session.
        identifier: u16,
        /// Sequence number within the session.
        sequence: u16,
        /// Data that the reply must return.
        data: &'a [u8],
    },
    /// Type 0: echo reply.
    EchoReply {
        /// Identifies the sender's session.
        identifier: u16,
        /// Sequence number within the session.
        sequence: u16,
        /// The data of the request.
        data: &'a [u8],
    },
    /// Type 3: destination unreachable.
    Unreachable {
        /// Code, see [`Unreachable`].
        code: u8,
        /// MTU of the next link with [`Unreachable::FragmentationNeeded`], else 0.
        mtu: u16,
        /// The undeliverable packet: its header and a part of its payload.
        original: &'a [u8],
    },
    /// Type 5: redirect to a better first hop.
    Redirect {
        /// Code.
        code: u8,
        /// Address of the better router.
        gateway: [u8; 4],
        /// The packet that caused the redirect.
        original: &'a [u8],
    },
    /// Type 11: time exceeded.
    TimeExceeded {
        /// 0 in transit, 1 during reassembly.
        code: u8,
        /// The packet whose time was exceeded.
        original: &'a [u8],
    },
    /// Type 12: parameter problem.
    ParameterProblem {
        /// Offset of the offending byte in the packet.
        pointer: u8,
        /// The packet with the problem.
        original: &'a [u8],
    },
}

impl<'a> Message<'a> {
    /// Parses a message and verifies its checksum.
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

    /// Returns the number of bytes that [`Message::emit`] writes.
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

    /// Writes header, data and checksum to the front of `bytes`. Panics if `bytes` is shorter than
    /// [`Message::total_bytes`].
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
