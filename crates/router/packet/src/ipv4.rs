//! IPv4 packets (RFC 791).

use std::net::Ipv4Addr;

use crate::error::at_least;
use crate::octets::{put, u16_at, u32_at};
use crate::{Error, Protocol, checksum};

/// Bytes of a header without options.
pub const HEADER_BYTES: usize = 20;

/// Bytes of the longest header.
pub const HEADER_BYTES_MAX: usize = 60;

/// What every link must carry in one piece.
pub const MTU_MIN: usize = 68;

const MORE_FRAGMENTS: u16 = 0x2000;
const DO_NOT_FRAGMENT: u16 = 0x4000;
const OFFSET: u16 = 0x1fff;

/// A packet whose version, header length and total length hold together.
#[derive(Clone, Copy, Debug)]
pub struct Packet<T> {
    bytes: T,
}

impl<T: AsRef<[u8]>> Packet<T> {
    /// Checks version, header length and total length, as RFC 1812, section 5.2.2 has it, but for the checksum. What
    /// lies behind the total length is padding.
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

    /// The bytes, given back.
    pub fn into_inner(self) -> T {
        self.bytes
    }

    /// Bytes of the header, 20 to 60.
    #[inline]
    pub fn header_bytes(&self) -> usize {
        usize::from(self.bytes.as_ref()[0] & 0xf) * 4
    }

    /// Bytes of header and payload.
    #[inline]
    pub fn total_bytes(&self) -> usize {
        usize::from(u16_at(self.bytes.as_ref(), 2))
    }

    /// The byte that was once the type of service: six bits of class (DSCP), two of congestion (ECN).
    #[inline]
    pub fn traffic_class(&self) -> u8 {
        self.bytes.as_ref()[1]
    }

    /// What fragments of one packet have in common.
    #[inline]
    pub fn identification(&self) -> u16 {
        u16_at(self.bytes.as_ref(), 4)
    }

    /// Whether it must not be fragmented.
    #[inline]
    pub fn do_not_fragment(&self) -> bool {
        self.fragment_bits() & DO_NOT_FRAGMENT != 0
    }

    /// Whether other fragments come behind it.
    #[inline]
    pub fn more_fragments(&self) -> bool {
        self.fragment_bits() & MORE_FRAGMENTS != 0
    }

    /// Where in the whole payload this fragment's is.
    #[inline]
    pub fn fragment_offset_bytes(&self) -> usize {
        usize::from(self.fragment_bits() & OFFSET) * 8
    }

    /// Whether it is a fragment, the first one too.
    #[inline]
    pub fn is_fragment(&self) -> bool {
        self.fragment_bits() & (MORE_FRAGMENTS | OFFSET) != 0
    }

    #[inline]
    fn fragment_bits(&self) -> u16 {
        u16_at(self.bytes.as_ref(), 6)
    }

    /// Hops that are left.
    #[inline]
    pub fn ttl(&self) -> u8 {
        self.bytes.as_ref()[8]
    }

    /// What the payload is.
    #[inline]
    pub fn protocol(&self) -> Protocol {
        Protocol(self.bytes.as_ref()[9])
    }

    /// The header's checksum as it stands there.
    #[inline]
    pub fn checksum(&self) -> u16 {
        u16_at(self.bytes.as_ref(), 10)
    }

    /// Whether the header sums up.
    #[inline]
    pub fn verify_checksum(&self) -> bool {
        checksum::verify(self.header())
    }

    /// From whom.
    #[inline]
    pub fn source(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(u32_at(self.bytes.as_ref(), 12))
    }

    /// To whom.
    #[inline]
    pub fn destination(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(u32_at(self.bytes.as_ref(), 16))
    }

    /// The header, with its options.
    #[inline]
    pub fn header(&self) -> &[u8] {
        &self.bytes.as_ref()[..self.header_bytes()]
    }

    /// Whether there are options.
    #[inline]
    pub fn has_options(&self) -> bool {
        self.bytes.as_ref()[0] & 0xf != 5
    }

    /// The options, until one of them is malformed, which is the last that is told.
    pub fn options(&self) -> Options<'_> {
        Options { rest: &self.header()[HEADER_BYTES..] }
    }

    /// What follows the header, without padding.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        &self.bytes.as_ref()[self.header_bytes()..self.total_bytes()]
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> Packet<T> {
    /// One hop less, and the checksum as it must be then: changed by what changed (RFC 1624), so that one that was
    /// wrong stays wrong. A packet without a hop left is a bug of the caller's, who answers such.
    #[inline]
    pub fn decrement_ttl(&mut self) {
        let old = u16_at(self.bytes.as_ref(), 8);
        assert!(old >= 0x100, "no hop is left");
        let new = old - 0x100;
        let checksum = checksum::update(self.checksum(), old, new);
        let raw = self.bytes.as_mut();
        put(raw, 8, &new.to_be_bytes());
        put(raw, 10, &checksum.to_be_bytes());
    }

    /// Sets the hops that are left; the checksum is the caller's.
    pub fn set_ttl(&mut self, ttl: u8) {
        self.bytes.as_mut()[8] = ttl;
    }

    /// Sets the byte of class and congestion; the checksum is the caller's.
    pub fn set_traffic_class(&mut self, class: u8) {
        self.bytes.as_mut()[1] = class;
    }

    /// Sets what fragments have in common; the checksum is the caller's.
    pub fn set_identification(&mut self, identification: u16) {
        put(self.bytes.as_mut(), 4, &identification.to_be_bytes());
    }

    /// Makes it a fragment, or whole; the checksum is the caller's. The offset is a multiple of 8, below 64 KiB.
    pub fn set_fragment(&mut self, do_not_fragment: bool, more_fragments: bool, offset_bytes: usize) {
        put(self.bytes.as_mut(), 6, &fragment_bits(do_not_fragment, more_fragments, offset_bytes).to_be_bytes());
    }

    /// Sets the length of header and payload, which is at least the header's and at most what there is; the checksum
    /// is the caller's.
    pub fn set_total_bytes(&mut self, bytes: usize) {
        let there = self.bytes.as_ref().len();
        assert!(bytes >= self.header_bytes() && bytes <= there.min(0xffff), "a total length of {bytes} B of {there} B");
        put(self.bytes.as_mut(), 2, &(bytes as u16).to_be_bytes());
    }

    /// Sets from whom; checksums are the caller's.
    pub fn set_source(&mut self, address: Ipv4Addr) {
        put(self.bytes.as_mut(), 12, &address.octets());
    }

    /// Sets to whom; checksums are the caller's.
    pub fn set_destination(&mut self, address: Ipv4Addr) {
        put(self.bytes.as_mut(), 16, &address.octets());
    }

    /// Sets the header's checksum to what it must be.
    pub fn fill_checksum(&mut self) {
        put(self.bytes.as_mut(), 10, &[0, 0]);
        let checksum = checksum::compute(self.header());
        put(self.bytes.as_mut(), 10, &checksum.to_be_bytes());
    }

    /// The options' bytes, to be changed; the checksum is the caller's.
    pub fn options_mut(&mut self) -> &mut [u8] {
        let header_bytes = self.header_bytes();
        &mut self.bytes.as_mut()[HEADER_BYTES..header_bytes]
    }

    /// What follows the header, to be changed.
    #[inline]
    pub fn payload_mut(&mut self) -> &mut [u8] {
        let range = self.header_bytes()..self.total_bytes();
        &mut self.bytes.as_mut()[range]
    }
}

fn fragment_bits(do_not_fragment: bool, more_fragments: bool, offset_bytes: usize) -> u16 {
    assert!(offset_bytes.is_multiple_of(8) && offset_bytes / 8 <= usize::from(OFFSET), "a fragment at {offset_bytes}");
    let flags = if do_not_fragment { DO_NOT_FRAGMENT } else { 0 } | if more_fragments { MORE_FRAGMENTS } else { 0 };
    flags | (offset_bytes / 8) as u16
}

/// One option of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4Option<'a> {
    /// Its type, with the bit [`Ipv4Option::is_copied`].
    pub kind: u8,
    /// What follows type and length.
    pub data: &'a [u8],
}

impl Ipv4Option<'_> {
    /// Loose source route.
    pub const LOOSE_SOURCE_ROUTE: u8 = 131;
    /// Strict source route.
    pub const STRICT_SOURCE_ROUTE: u8 = 137;
    /// Record route.
    pub const RECORD_ROUTE: u8 = 7;
    /// Timestamps.
    pub const TIMESTAMP: u8 = 68;
    /// Router alert (RFC 2113).
    pub const ROUTER_ALERT: u8 = 148;

    /// Whether every fragment carries it, not only the first.
    pub fn is_copied(&self) -> bool {
        self.kind & 0x80 != 0
    }
}

/// The options of a header, without those of no meaning.
#[derive(Clone, Debug)]
pub struct Options<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Options<'a> {
    type Item = Result<Ipv4Option<'a>, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        // 1 is padding.
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

/// A header without options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// From whom.
    pub source: Ipv4Addr,
    /// To whom.
    pub destination: Ipv4Addr,
    /// What the payload is.
    pub protocol: Protocol,
    /// Hops that are left.
    pub ttl: u8,
    /// The byte of class and congestion.
    pub traffic_class: u8,
    /// What fragments have in common.
    pub identification: u16,
    /// Whether it must not be fragmented.
    pub do_not_fragment: bool,
    /// Bytes behind the header, at most 65,515.
    pub payload_bytes: usize,
}

impl Repr {
    /// As the packet has it, but for options and a fragment's place.
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

    /// Bytes of header and payload.
    pub fn total_bytes(&self) -> usize {
        HEADER_BYTES + self.payload_bytes
    }

    /// Writes a header of [`HEADER_BYTES`], its checksum too, to the front of `bytes`; fewer are a bug of the
    /// caller's, and so is a longer payload than a packet has.
    pub fn emit(&self, bytes: &mut [u8]) {
        let total = u16::try_from(self.total_bytes()).expect("a payload of 65,515 B at most");
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
