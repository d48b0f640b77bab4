//! IPv6 packets and their extension headers (RFC 8200).

use std::net::Ipv6Addr;

use crate::error::at_least;
use crate::octets::{array_at, put, u16_at, u32_at};
use crate::{Error, Protocol};

/// Bytes of the header.
pub const HEADER_BYTES: usize = 40;

/// What every link must carry in one piece.
pub const MTU_MIN: usize = 1280;

/// The most extension headers that are followed.
pub const EXTENSIONS_MAX: usize = 8;

/// Hop-by-hop options, which every router looks at.
pub const HOP_BY_HOP: Protocol = Protocol(0);
/// A routing header.
pub const ROUTING: Protocol = Protocol(43);
/// A fragment header.
pub const FRAGMENT: Protocol = Protocol(44);
/// An authentication header.
pub const AUTHENTICATION: Protocol = Protocol(51);
/// Options for the destination.
pub const DESTINATION_OPTIONS: Protocol = Protocol(60);

/// A packet whose version and length hold together.
#[derive(Clone, Copy, Debug)]
pub struct Packet<T> {
    bytes: T,
}

impl<T: AsRef<[u8]>> Packet<T> {
    /// Checks version and length. What lies behind the length is padding.
    #[inline]
    pub fn new_checked(bytes: T) -> Result<Packet<T>, Error> {
        let raw = bytes.as_ref();
        at_least("IPv6", raw.len(), HEADER_BYTES)?;
        let version = raw[0] >> 4;
        if version != 6 {
            return Err(Error::Version { protocol: "IPv6", found: u16::from(version), expected: 6 });
        }
        at_least("IPv6", raw.len(), HEADER_BYTES + usize::from(u16_at(raw, 4)))?;
        Ok(Packet { bytes })
    }

    /// The bytes, given back.
    pub fn into_inner(self) -> T {
        self.bytes
    }

    /// The byte of class (DSCP) and congestion (ECN).
    #[inline]
    pub fn traffic_class(&self) -> u8 {
        (u16_at(self.bytes.as_ref(), 0) >> 4) as u8
    }

    /// The flow label, 20 bits.
    #[inline]
    pub fn flow_label(&self) -> u32 {
        u32_at(self.bytes.as_ref(), 0) & 0xf_ffff
    }

    /// Bytes behind the header.
    #[inline]
    pub fn payload_bytes(&self) -> usize {
        usize::from(u16_at(self.bytes.as_ref(), 4))
    }

    /// Bytes of header and payload.
    #[inline]
    pub fn total_bytes(&self) -> usize {
        HEADER_BYTES + self.payload_bytes()
    }

    /// What follows the header: an extension header, or the payload.
    #[inline]
    pub fn next_header(&self) -> Protocol {
        Protocol(self.bytes.as_ref()[6])
    }

    /// Hops that are left.
    #[inline]
    pub fn hop_limit(&self) -> u8 {
        self.bytes.as_ref()[7]
    }

    /// From whom.
    #[inline]
    pub fn source(&self) -> Ipv6Addr {
        Ipv6Addr::from_bits(u128::from_be_bytes(array_at(self.bytes.as_ref(), 8)))
    }

    /// To whom.
    #[inline]
    pub fn destination(&self) -> Ipv6Addr {
        Ipv6Addr::from_bits(u128::from_be_bytes(array_at(self.bytes.as_ref(), 24)))
    }

    /// What follows the header, without padding.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        &self.bytes.as_ref()[HEADER_BYTES..self.total_bytes()]
    }

    /// Behind the extension headers. An error says that they do not hold together, or that there are more than
    /// [`EXTENSIONS_MAX`].
    #[inline]
    pub fn upper_layer(&self) -> Result<UpperLayer, Error> {
        upper_layer(self.next_header(), self.payload())
    }
}

/// What lies behind a packet's extension headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpperLayer {
    /// What the upper layer's packet is. In a fragment that is not the first, what the first one begins with.
    pub protocol: Protocol,
    /// Where it begins in the packet's payload.
    pub offset: usize,
    /// The fragment header, when there is one.
    pub fragment: Option<Fragment>,
    /// Whether there are hop-by-hop options.
    pub has_hop_by_hop: bool,
    /// Whether there is a routing header with segments left.
    pub has_segments_left: bool,
}

/// What a fragment header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Where in the whole this fragment's bytes are.
    pub offset_bytes: usize,
    /// Whether others come behind it.
    pub more: bool,
    /// What fragments of one packet have in common.
    pub identification: u32,
}

/// Follows the extension headers of `payload`, the first of which `next` names.
#[inline]
fn upper_layer(next: Protocol, payload: &[u8]) -> Result<UpperLayer, Error> {
    let mut upper =
        UpperLayer { protocol: next, offset: 0, fragment: None, has_hop_by_hop: false, has_segments_left: false };
    if !is_extension(next) {
        return Ok(upper);
    }
    for _ in 0..EXTENSIONS_MAX {
        upper.extend(payload)?;
        // What follows the header of a later fragment is no header.
        let is_later = upper.fragment.is_some_and(|fragment| fragment.offset_bytes > 0);
        if is_later || !is_extension(upper.protocol) {
            return Ok(upper);
        }
    }
    Err(Error::Headers { protocol: "IPv6", headers_max: EXTENSIONS_MAX })
}

#[inline]
fn is_extension(protocol: Protocol) -> bool {
    matches!(protocol, HOP_BY_HOP | ROUTING | FRAGMENT | AUTHENTICATION | DESTINATION_OPTIONS)
}

impl UpperLayer {
    /// Goes past the extension header that stands at `offset`.
    fn extend(&mut self, payload: &[u8]) -> Result<(), Error> {
        let header = &payload[self.offset..];
        at_least("IPv6", header.len(), 8)?;
        let bytes = match self.protocol {
            FRAGMENT => 8,
            AUTHENTICATION => (usize::from(header[1]) + 2) * 4,
            _ => (usize::from(header[1]) + 1) * 8,
        };
        at_least("IPv6", header.len(), bytes)?;
        match self.protocol {
            HOP_BY_HOP if self.offset > 0 => {
                return Err(Error::Malformed { protocol: "IPv6", what: "order: hop-by-hop options stand first" });
            }
            HOP_BY_HOP => self.has_hop_by_hop = true,
            ROUTING => self.has_segments_left |= header[3] > 0,
            FRAGMENT => {
                let bits = u16_at(header, 2);
                let offset_bytes = usize::from(bits & !7);
                let identification = u32_at(header, 4);
                self.fragment = Some(Fragment { offset_bytes, more: bits & 1 != 0, identification });
            }
            _ => {}
        }
        self.protocol = Protocol(header[0]);
        self.offset += bytes;
        Ok(())
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> Packet<T> {
    /// One hop less. A packet without a hop left is a bug of the caller's, who answers such.
    #[inline]
    pub fn decrement_hop_limit(&mut self) {
        let limit = &mut self.bytes.as_mut()[7];
        assert!(*limit > 0, "no hop is left");
        *limit -= 1;
    }

    /// Sets the hops that are left.
    pub fn set_hop_limit(&mut self, limit: u8) {
        self.bytes.as_mut()[7] = limit;
    }

    /// Sets the byte of class and congestion.
    pub fn set_traffic_class(&mut self, class: u8) {
        let raw = self.bytes.as_mut();
        raw[0] = 0x60 | class >> 4;
        raw[1] = raw[1] & 0x0f | class << 4;
    }

    /// Sets the length of the payload, which is at most what there is.
    pub fn set_payload_bytes(&mut self, bytes: usize) {
        let there = self.bytes.as_ref().len() - HEADER_BYTES;
        assert!(bytes <= there.min(0xffff), "a payload of {bytes} B of {there} B");
        put(self.bytes.as_mut(), 4, &(bytes as u16).to_be_bytes());
    }

    /// Sets from whom; checksums are the caller's.
    pub fn set_source(&mut self, address: Ipv6Addr) {
        put(self.bytes.as_mut(), 8, &address.octets());
    }

    /// Sets to whom; checksums are the caller's.
    pub fn set_destination(&mut self, address: Ipv6Addr) {
        put(self.bytes.as_mut(), 24, &address.octets());
    }

    /// What follows the header, to be changed.
    #[inline]
    pub fn payload_mut(&mut self) -> &mut [u8] {
        let end = self.total_bytes();
        &mut self.bytes.as_mut()[HEADER_BYTES..end]
    }
}

/// A header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// From whom.
    pub source: Ipv6Addr,
    /// To whom.
    pub destination: Ipv6Addr,
    /// What follows.
    pub next_header: Protocol,
    /// Hops that are left.
    pub hop_limit: u8,
    /// The byte of class and congestion.
    pub traffic_class: u8,
    /// The flow label, 20 bits.
    pub flow_label: u32,
    /// Bytes behind the header, at most 65,535.
    pub payload_bytes: usize,
}

impl Repr {
    /// As the packet has it.
    pub fn parse<T: AsRef<[u8]>>(packet: &Packet<T>) -> Repr {
        Repr {
            source: packet.source(),
            destination: packet.destination(),
            next_header: packet.next_header(),
            hop_limit: packet.hop_limit(),
            traffic_class: packet.traffic_class(),
            flow_label: packet.flow_label(),
            payload_bytes: packet.payload_bytes(),
        }
    }

    /// Bytes of header and payload.
    pub fn total_bytes(&self) -> usize {
        HEADER_BYTES + self.payload_bytes
    }

    /// Writes [`HEADER_BYTES`] to the front of `bytes`; fewer are a bug of the caller's, and so is a longer payload
    /// than a packet has.
    pub fn emit(&self, bytes: &mut [u8]) {
        let payload = u16::try_from(self.payload_bytes).expect("a payload of 65,535 B at most");
        let first = 6 << 28 | u32::from(self.traffic_class) << 20 | self.flow_label & 0xf_ffff;
        put(bytes, 0, &first.to_be_bytes());
        put(bytes, 4, &payload.to_be_bytes());
        put(bytes, 6, &[self.next_header.0, self.hop_limit]);
        put(bytes, 8, &self.source.octets());
        put(bytes, 24, &self.destination.octets());
    }
}
