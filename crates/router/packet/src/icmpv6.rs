//! ICMP for IPv6 (RFC 4443). Neighbour discovery, which travels in it, is in [`crate::ndisc`].

use std::net::Ipv6Addr;

use crate::checksum::Sum;
use crate::error::at_least;
use crate::octets::{array_at, put, u16_at};
use crate::{Error, Protocol};

/// Bytes of the header: type, code, checksum and four bytes by type.
pub const HEADER_BYTES: usize = 8;

/// Why a destination is not reached: the codes of [`Message::Unreachable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Unreachable {
    /// No route.
    NoRoute = 0,
    /// Forbidden by somebody.
    Prohibited = 1,
    /// The source's address does not reach so far.
    BeyondScope = 2,
    /// No neighbour answers.
    Address = 3,
    /// Nobody listens on the port.
    Port = 4,
}

/// The sum of a message's pseudo-header.
pub fn pseudo(source: Ipv6Addr, destination: Ipv6Addr, bytes: usize) -> Sum {
    Sum::new().add_pseudo_v6(source, destination, Protocol::ICMPV6, bytes as u32)
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
        at_least("ICMPv6", bytes.as_ref().len(), HEADER_BYTES)?;
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

    /// Whether it is about another packet, or redirects: never answered with an error (RFC 4443, section 2.4 e).
    #[inline]
    pub fn is_error(&self) -> bool {
        self.kind() < 128 || self.kind() == 137
    }

    /// Whether the message sums up, with its addresses.
    pub fn verify_checksum(&self, source: Ipv6Addr, destination: Ipv6Addr) -> bool {
        let bytes = self.bytes.as_ref();
        pseudo(source, destination, bytes.len()).add_bytes(bytes).folded() == 0xffff
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
    /// Type 1.
    Unreachable {
        /// The code.
        code: u8,
        /// The packet that did not arrive: as much of it as fits [`crate::ipv6::MTU_MIN`].
        original: &'a [u8],
    },
    /// Type 2.
    PacketTooBig {
        /// What the next link carries in one piece.
        mtu: u32,
        /// The packet that is longer.
        original: &'a [u8],
    },
    /// Type 3.
    TimeExceeded {
        /// 0 under way, 1 while being put together.
        code: u8,
        /// The packet that had no hop left.
        original: &'a [u8],
    },
    /// Type 4.
    ParameterProblem {
        /// 0 a field, 1 a next header, 2 an option.
        code: u8,
        /// The offending byte's place.
        pointer: u32,
        /// The packet that has it.
        original: &'a [u8],
    },
    /// Type 128: to be answered.
    EchoRequest {
        /// Of whom.
        identifier: u16,
        /// Which.
        sequence: u16,
        /// To be sent back.
        data: &'a [u8],
    },
    /// Type 129: an answer.
    EchoReply {
        /// Of whom.
        identifier: u16,
        /// Which.
        sequence: u16,
        /// As it came.
        data: &'a [u8],
    },
}

impl<'a> Message<'a> {
    /// As `bytes` have it, whose checksum must be right.
    pub fn parse(bytes: &'a [u8], source: Ipv6Addr, destination: Ipv6Addr) -> Result<Message<'a>, Error> {
        let packet = Packet::new_checked(bytes)?;
        if !packet.verify_checksum(source, destination) {
            return Err(Error::Checksum { protocol: "ICMPv6" });
        }
        let (code, rest, data) = (packet.code(), packet.rest_of_header(), &bytes[HEADER_BYTES..]);
        let (high, low) = (u16_at(&rest, 0), u16_at(&rest, 2));
        match packet.kind() {
            1 => Ok(Message::Unreachable { code, original: data }),
            2 => Ok(Message::PacketTooBig { mtu: u32::from_be_bytes(rest), original: data }),
            3 => Ok(Message::TimeExceeded { code, original: data }),
            4 => Ok(Message::ParameterProblem { code, pointer: u32::from_be_bytes(rest), original: data }),
            128 => Ok(Message::EchoRequest { identifier: high, sequence: low, data }),
            129 => Ok(Message::EchoReply { identifier: high, sequence: low, data }),
            kind => Err(Error::Kind { protocol: "ICMPv6", kind }),
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
            | Message::PacketTooBig { original, .. }
            | Message::TimeExceeded { original, .. }
            | Message::ParameterProblem { original, .. } => original,
        }
    }

    /// Writes header, data and checksum to the front of `bytes`; fewer than [`Message::total_bytes`] are a bug of the
    /// caller's.
    pub fn emit(&self, bytes: &mut [u8], source: Ipv6Addr, destination: Ipv6Addr) {
        let pair = |high: u16, low: u16| ((u32::from(high) << 16) | u32::from(low)).to_be_bytes();
        let (kind, code, rest) = match *self {
            Message::Unreachable { code, .. } => (1, code, [0; 4]),
            Message::PacketTooBig { mtu, .. } => (2, 0, mtu.to_be_bytes()),
            Message::TimeExceeded { code, .. } => (3, code, [0; 4]),
            Message::ParameterProblem { code, pointer, .. } => (4, code, pointer.to_be_bytes()),
            Message::EchoRequest { identifier, sequence, .. } => (128, 0, pair(identifier, sequence)),
            Message::EchoReply { identifier, sequence, .. } => (129, 0, pair(identifier, sequence)),
        };
        let bytes = &mut bytes[..self.total_bytes()];
        put(bytes, 0, &[kind, code, 0, 0]);
        put(bytes, 4, &rest);
        put(bytes, HEADER_BYTES, self.data());
        let checksum = pseudo(source, destination, bytes.len()).add_bytes(bytes).checksum();
        put(bytes, 2, &checksum.to_be_bytes());
    }
}
