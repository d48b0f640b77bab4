//! IPv4 packets (RFC 791).

use std::net::Ipv4Addr;

use crate::error::at_least;
use crate::octets::{put, u16_at, u32_at};
use crate::{Error, Protocol, checksum};

/// Length in bytes of a header without options.
pub const HEADER_BYTES: usize = 20;

/// Length in bytes of the longest header.
pub const HEADER_BYTES_MAX: usize = 60;

/// The smallest MTU of a link (RFC 791, section 3.2).
pub const MTU_MIN: usize = 68;

const MORE_FRAGMENTS: u16 = 0x2000;
const DO_NOT_FRAGMENT: u16 = 0x4000;
const OFFSET: u16 = 0x1fff;

/// A packet whose version, header length and total length have been validated.
#[derive(Clone, Copy, Debug)]
pub struct Packet<T> {
    bytes: T,
}

impl<T: AsRef<[u8]>> Packet<T> {
    /// Validates version, header length and total length (RFC 1812, section 5.2.2), but not the checksum. Bytes behind
    /// the total length are padding.
    #[inline]
    pub fn new_checked(bytes: T) -> Result<Packet<T>, Error> {
        let raw = bytes.as_ref();
        at_least("IPv4", raw.len(), HEADER_BYTES)?;
        let version = raw[0] >> 4;
        if version != 4 {
            return Err(Error::Version { protocol: "IPv4", found: u16::from(version), expected: 4 });
        }
        let header_bytes = usize::from(raw[0] & 0xf) * 4;
        if header_bytes < HEADER_BYTES {
            return Err(Error::HeaderLength { protocol: "IPv4", bytes: header_bytes, bytes_min: HEADER_BYTES });
        }
        let total_bytes = usize::from(u16_at(raw, 2));
        if total_bytes < header_bytes {
            return Err(Error::TotalLength { protocol: "IPv4", bytes: total_bytes, bytes_min: header_bytes });
        }
        at_least("IPv4", raw.len(), total_bytes)?;
        Ok(Packet { bytes })
    }

    /// Returns the length of the header in bytes, 20 to 60.
    #[inline]
    pub fn header_bytes(&self) -> usize {
        usize::from(self.bytes.as_ref()[0] & 0xf) * 4
    }

    /// Returns the length of header and payload in bytes.
    #[inline]
    pub fn total_bytes(&self) -> usize {
        usize::from(u16_at(self.bytes.as_ref(), 2))
    }

    /// Returns the former type-of-service byte: six bits of DSCP and two of ECN.
    #[inline]
    pub fn traffic_class(&self) -> u8 {
        self.bytes.as_ref()[1]
    }

    /// Returns the identification, which all fragments of a datagram share.
    #[inline]
    pub fn identification(&self) -> u16 {
        u16_at(self.bytes.as_ref(), 4)
    }

    /// Returns whether the DF flag is set.
    #[inline]
    pub fn do_not_fragment(&self) -> bool {
        self.fragment_bits() & DO_NOT_FRAGMENT != 0
    }

    /// Returns whether the MF flag is set.
    #[inline]
    pub fn more_fragments(&self) -> bool {
        self.fragment_bits() & MORE_FRAGMENTS != 0
    }

    /// Returns the offset of this fragment in the payload of the datagram, in bytes.
    #[inline]
    pub fn fragment_offset_bytes(&self) -> usize {
        usize::from(self.fragment_bits() & OFFSET) * 8
    }

    /// Returns whether this is a fragment, which includes the first one.
    #[inline]
    pub fn is_fragment(&self) -> bool {
        self.fragment_bits() & (MORE_FRAGMENTS | OFFSET) != 0
    }

    #[inline]
    fn fragment_bits(&self) -> u16 {
        u16_at(self.bytes.as_ref(), 6)
    }

    /// Returns the time to live.
    #[inline]
    pub fn ttl(&self) -> u8 {
        self.bytes.as_ref()[8]
    }

    /// Returns the protocol of the payload.
    #[inline]
    pub fn protocol(&self) -> Protocol {
        Protocol(self.bytes.as_ref()[9])
    }

    /// Returns the header checksum field.
    #[inline]
    pub fn checksum(&self) -> u16 {
        u16_at(self.bytes.as_ref(), 10)
    }

    /// Returns whether the header checksum is correct.
    #[inline]
    pub fn verify_checksum(&self) -> bool {
        checksum::verify(self.header())
    }

    /// Returns the source address.
    #[inline]
    pub fn source(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(u32_at(self.bytes.as_ref(), 12))
    }

    /// Returns the destination address.
    #[inline]
    pub fn destination(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(u32_at(self.bytes.as_ref(), 16))
    }

    /// Returns the header, including options.
    #[inline]
    pub fn header(&self) -> &[u8] {
        &self.bytes.as_ref()[..self.header_bytes()]
    }

    /// Returns whether the header has options.
    #[inline]
    pub fn has_options(&self) -> bool {
        self.bytes.as_ref()[0] & 0xf != 5
    }

    /// Iterates over the options; a malformed one yields an error and ends the iteration.
    pub fn options(&self) -> Options<'_> {
        Options { rest: &self.header()[HEADER_BYTES..] }
    }

    /// Returns the payload, without padding.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        &self.bytes.as_ref()[self.header_bytes()..self.total_bytes()]
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> Packet<T> {
    /// Decrements the TTL and updates the header checksum incrementally (RFC 1624), so that a wrong checksum stays
    /// wrong. Panics if the TTL is 0: the caller must have sent an ICMP error instead.
    #[inline]
    pub fn decrement_ttl(&mut self) {
        let old = u16_at(self.bytes.as_ref(), 8);
        assert!(old >= 0x100, "the TTL is 0");
        let new = old - 0x100;
        let checksum = checksum::update(self.checksum(), old, new);
        let raw = self.bytes.as_mut();
        put(raw, 8, &new.to_be_bytes());
        put(raw, 10, &checksum.to_be_bytes());
    }

    /// Increments the TTL unless it is 255, and updates the header checksum incrementally (RFC 1624).
    pub fn increment_ttl(&mut self) {
        let old = u16_at(self.bytes.as_ref(), 8);
        let Some(new) = old.checked_add(0x100) else { return };
        let checksum = checksum::update(self.checksum(), old, new);
        let raw = self.bytes.as_mut();
        put(raw, 8, &new.to_be_bytes());
        put(raw, 10, &checksum.to_be_bytes());
    }

    /// Sets the identification; does not update the checksum.
    pub fn set_identification(&mut self, identification: u16) {
        put(self.bytes.as_mut(), 4, &identification.to_be_bytes());
    }

    /// Sets DF, MF and the fragment offset; does not update the checksum. Panics unless the offset is a multiple of 8
    /// below 64 KiB.
    pub fn set_fragment(&mut self, do_not_fragment: bool, more_fragments: bool, offset_bytes: usize) {
        put(self.bytes.as_mut(), 6, &fragment_bits(do_not_fragment, more_fragments, offset_bytes).to_be_bytes());
    }

    /// Computes and stores the header checksum.
    pub fn fill_checksum(&mut self) {
        put(self.bytes.as_mut(), 10, &[0, 0]);
        let checksum = checksum::compute(self.header());
        put(self.bytes.as_mut(), 10, &checksum.to_be_bytes());
    }

    /// Returns the bytes of the options for modification; does not update the checksum.
    pub fn options_mut(&mut self) -> &mut [u8] {
        let header_bytes = self.header_bytes();
        &mut self.bytes.as_mut()[HEADER_BYTES..header_bytes]
    }
}

fn fragment_bits(do_not_fragment: bool, more_fragments: bool, offset_bytes: usize) -> u16 {
    let is_valid = offset_bytes.is_multiple_of(8) && offset_bytes / 8 <= usize::from(OFFSET);
    assert!(is_valid, "a fragment at {offset_bytes} B");
    let flags = if do_not_fragment { DO_NOT_FRAGMENT } else { 0 } | if more_fragments { MORE_FRAGMENTS } else { 0 };
    flags | (offset_bytes / 8) as u16
}

/// An option of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4Option<'a> {
    /// Option type, including the copied flag.
    pub kind: u8,
    /// Bytes behind type and length.
    pub data: &'a [u8],
}

impl Ipv4Option<'_> {
    /// Loose source route.
    pub const LOOSE_SOURCE_ROUTE: u8 = 131;
    /// Strict source route.
    pub const STRICT_SOURCE_ROUTE: u8 = 137;
    /// Record route.
    pub const RECORD_ROUTE: u8 = 7;
    /// Internet timestamp.
    pub const TIMESTAMP: u8 = 68;
    /// Router alert (RFC 2113).
    pub const ROUTER_ALERT: u8 = 148;

    /// Returns the copied flag: whether every fragment carries the option, not only the first.
    pub fn is_copied(&self) -> bool {
        self.kind & 0x80 != 0
    }
}

/// An iterator over the options of a header, except for *no operation* and *end of option list*.
#[derive(Clone, Debug)]
pub struct Options<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Options<'a> {
    type Item = Result<Ipv4Option<'a>, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        // 1 is *no operation*.
        while let [1, rest @ ..] = self.rest {
            self.rest = rest;
        }
        let (&kind, rest) = self.rest.split_first().filter(|(kind, _)| **kind != 0)?;
        let option = match rest.first() {
            Some(&bytes) if bytes >= 2 && usize::from(bytes) <= self.rest.len() => {
                let (option, rest) = self.rest.split_at(usize::from(bytes));
                self.rest = rest;
                return Some(Ok(Ipv4Option { kind, data: &option[2..] }));
            }
            _ => Error::Malformed { protocol: "IPv4", what: "option" },
        };
        self.rest = &[];
        Some(Err(option))
    }
}

/// The fields of a header without options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Source address.
    pub source: Ipv4Addr,
    /// Destination address.
    pub destination: Ipv4Addr,
    /// Protocol of the payload.
    pub protocol: Protocol,
    /// Time to live.
    pub ttl: u8,
    /// Byte of DSCP and ECN.
    pub traffic_class: u8,
    /// Identification, which all fragments of a datagram share.
    pub identification: u16,
    /// DF flag.
    pub do_not_fragment: bool,
    /// Length of the payload in bytes, at most 65,515.
    pub payload_bytes: usize,
}

impl Repr {
    /// Reads the header of `packet`, without options, MF and fragment offset.
    pub fn parse<T: AsRef<[u8]>>(packet: &Packet<T>) -> Repr {
        Repr {
            source: packet.source(),
            destination: packet.destination(),
            protocol: packet.protocol(),
            ttl: packet.ttl(),
            traffic_class: packet.traffic_class(),
            identification: packet.identification(),
            do_not_fragment: packet.do_not_fragment(),
            payload_bytes: packet.payload().len(),
        }
    }

    /// Returns the length of header and payload in bytes.
    pub fn total_bytes(&self) -> usize {
        HEADER_BYTES + self.payload_bytes
    }

    /// Writes a header of [`HEADER_BYTES`], including its checksum, to the front of `bytes`. Panics if `bytes` is
    /// shorter, or if the payload is too long for a packet.
    pub fn emit(&self, bytes: &mut [u8]) {
        let total = u16::try_from(self.total_bytes()).expect("the payload must not exceed 65,515 B");
        put(bytes, 0, &[0x45, self.traffic_class]);
        put(bytes, 2, &total.to_be_bytes());
        put(bytes, 4, &self.identification.to_be_bytes());
        put(bytes, 6, &fragment_bits(self.do_not_fragment, false, 0).to_be_bytes());
        put(bytes, 8, &[self.ttl, self.protocol.0, 0, 0]);
        put(bytes, 12, &self.source.octets());
        put(bytes, 16, &self.destination.octets());
        let checksum = checksum::compute(&bytes[..HEADER_BYTES]);
        put(bytes, 10, &checksum.to_be_bytes());
    }
}
