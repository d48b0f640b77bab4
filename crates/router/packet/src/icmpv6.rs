//! ICMP for IPv6 (RFC 4443). Its neighbour discovery messages are in [`crate::ndisc`].

use std::net::Ipv6Addr;

use crate::checksum::Sum;
use crate::error::at_least;
use crate::octets::{array_at, put, u16_at};
use crate::{Error, Protocol};

/// Length of the header in bytes: type, code, checksum and four bytes that depend on the type.
pub const HEADER_BYTES: usize = 8;

/// The codes of [`Message::Unreachable`] (RFC 4443, section 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Unreachable {
    /// No route to the destination.
    NoRoute = 0,
    /// Communication administratively prohibited.
    Prohibited = 1,
    /// Beyond the scope of the source address.
    BeyondScope = 2,
    /// Address unreachable: address resolution failed.
    Address = 3,
    /// No socket listens on the port.
    Port = 4,
}

/// Returns the sum of the pseudo-header of a message of `bytes` bytes.
pub fn pseudo(source: Ipv6Addr, destination: Ipv6Addr, bytes: usize) -> Sum {
    Sum::new().add_pseudo_v6(source, destination, Protocol::ICMPV6, bytes as u32)
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
        at_least("ICMPv6", bytes.as_ref().len(), HEADER_BYTES)?;
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

    /// Returns whether this is an error or a redirect, to which no error may be sent (RFC 4443, section 2.4 e).
    #[inline]
    pub fn is_error(&self) -> bool {
        self.kind() < 128 || self.kind() == 137
    }

    /// Returns whether the checksum is correct for these addresses.
    pub fn verify_checksum(&self, source: Ipv6Addr, destination: Ipv6Addr) -> bool {
        let bytes = self.bytes.as_ref();
        pseudo(source, destination, bytes.len()).add_bytes(bytes).folded() == 0xffff
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
    /// Type 1: destination unreachable.
    Unreachable {
        /// Code, see [`Unreachable`].
        code: u8,
        /// The undeliverable packet: as much of it as fits in [`crate::ipv6::MTU_MIN`].
        original: &'a [u8],
    },
    /// Type 2: packet too big.
    PacketTooBig {
        /// MTU of the next link.
        mtu: u32,
        /// The packet that exceeds it.
        original: &'a [u8],
    },
    /// Type 3: time exceeded.
    TimeExceeded {
        /// 0 in transit, 1 during reassembly.
        code: u8,
        /// The packet whose time was exceeded.
        original: &'a [u8],
    },
    /// Type 4: parameter problem.
    ParameterProblem {
        /// 0 erroneous header field, 1 unknown next header, 2 unknown option.
        code: u8,
        /// Offset of the offending byte in the packet.
        pointer: u32,
        /// The packet with the problem.
        original: &'a [u8],
    },
    /// Type 128: echo request.
    EchoRequest {
        /// Identifies the sender's session.
        identifier: u16,
        /// Sequence number within the session.
        sequence: u16,
        /// Data that the reply must return.
        data: &'a [u8],
    },
    /// Type 129: echo reply.
    EchoReply {
        /// Identifies the sender's session.
        identifier: u16,
        /// Sequence number within the session.
        sequence: u16,
        /// The data of the request.
        data: &'a [u8],
    },
}

impl<'a> Message<'a> {
    /// Parses a message and verifies its checksum.
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

    /// Returns the number of bytes that [`Message::emit`] writes.
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

    /// Writes header, data and checksum to the front of `bytes`. Panics if `bytes` is shorter than
    /// [`Message::total_bytes`].
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
