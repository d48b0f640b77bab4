//! IPv6 packets and their extension headers (RFC 8200).

use std::net::Ipv6Addr;

use crate::error::at_least;
use crate::octets::{array_at, put, u16_at, u32_at};
use crate::{Error, Protocol};

/// Length of the header in bytes.
pub const HEADER_BYTES: usize = 40;

/// The smallest MTU of a link (RFC 8200, section 5).
pub const MTU_MIN: usize = 1280;

/// The maximum number of extension headers that [`Packet::upper_layer`] follows.
pub const EXTENSIONS_MAX: usize = 8;

/// Hop-by-hop options, which routers process.
pub const HOP_BY_HOP: Protocol = Protocol(0);
/// Routing header.
pub const ROUTING: Protocol = Protocol(43);
/// Fragment header.
pub const FRAGMENT: Protocol = Protocol(44);
/// Authentication header.
pub const AUTHENTICATION: Protocol = Protocol(51);
/// Destination options.
pub const DESTINATION_OPTIONS: Protocol = Protocol(60);

/// A packet whose version and payload length have been validated.
#[derive(Clone, Copy, Debug)]
pub struct Packet<T> {
    bytes: T,
}

impl<T: AsRef<[u8]>> Packet<T> {
    /// Validates version and payload length. Bytes behind the payload are padding.
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

    /// Returns the traffic class: six bits of DSCP and two of ECN.
    #[inline]
    pub fn traffic_class(&self) -> u8 {
        (u16_at(self.bytes.as_ref(), 0) >> 4) as u8
    }

    /// Returns the flow label, 20 bits.
    #[inline]
    pub fn flow_label(&self) -> u32 {
        u32_at(self.bytes.as_ref(), 0) & 0xf_ffff
    }

    /// Returns the length of the payload in bytes, which includes extension headers.
    #[inline]
    pub fn payload_bytes(&self) -> usize {
        usize::from(u16_at(self.bytes.as_ref(), 4))
    }

    /// Returns the length of header and payload in bytes.
    #[inline]
    pub fn total_bytes(&self) -> usize {
        HEADER_BYTES + self.payload_bytes()
    }

    /// Returns the type of the first extension header, or of the upper-layer header if there is none.
    #[inline]
    pub fn next_header(&self) -> Protocol {
        Protocol(self.bytes.as_ref()[6])
    }

    /// Returns the hop limit.
    #[inline]
    pub fn hop_limit(&self) -> u8 {
        self.bytes.as_ref()[7]
    }

    /// Returns the source address.
    #[inline]
    pub fn source(&self) -> Ipv6Addr {
        Ipv6Addr::from_bits(u128::from_be_bytes(array_at(self.bytes.as_ref(), 8)))
    }

    /// Returns the destination address.
    #[inline]
    pub fn destination(&self) -> Ipv6Addr {
        Ipv6Addr::from_bits(u128::from_be_bytes(array_at(self.bytes.as_ref(), 24)))
    }

    /// Returns the payload, which includes extension headers, without padding.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        &self.bytes.as_ref()[HEADER_BYTES..self.total_bytes()]
    }

    /// Finds the upper-layer header behind the extension headers. Fails if these are malformed or more than
    /// [`EXTENSIONS_MAX`].
    #[inline]
    pub fn upper_layer(&self) -> Result<UpperLayer, Error> {
        upper_layer(self.next_header(), self.payload())
    }
}

/// What the extension headers of a packet say, and where its upper-layer header is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpperLayer {
    /// Upper-layer protocol. In a fragment that is not the first: what the fragment header's next header field says.
    pub protocol: Protocol,
    /// Offset of the upper-layer header in the payload, in bytes.
    pub offset: usize,
    /// The fragment header, if there is one.
    pub fragment: Option<Fragment>,
    /// Whether the packet has hop-by-hop options.
    pub has_hop_by_hop: bool,
    /// Whether the packet has a routing header with segments left.
    pub has_segments_left: bool,
}

/// The fields of a fragment header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Offset of the fragment in the original packet, in bytes.
    pub offset_bytes: usize,
    /// M flag: whether more fragments follow.
    pub more: bool,
    /// Identification, which all fragments of a packet share.
    pub identification: u32,
}

/// Follows the extension headers of `payload`; `next` is the type of the first one.
#[inline]
fn upper_layer(next: Protocol, payload: &[u8]) -> Result<UpperLayer, Error> {
    let mut upper =
        UpperLayer { protocol: next, offset: 0, fragment: None, has_hop_by_hop: false, has_segments_left: false };
    if !is_extension(next) {
        return Ok(upper);
    }
    for _ in 0..EXTENSIONS_MAX {
        upper.extend(payload)?;
        // Only the first fragment continues with a header.
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
    /// Parses the extension header at `offset` and advances beyond it.
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
                return Err(Error::Malformed { protocol: "IPv6", what: "order: hop-by-hop options must come first" });
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
    /// Decrements the hop limit. Panics if it is 0: the caller must have sent an ICMP error instead.
    #[inline]
    pub fn decrement_hop_limit(&mut self) {
        let limit = &mut self.bytes.as_mut()[7];
        assert!(*limit > 0, "the hop limit is 0");
        *limit -= 1;
    }

    /// Increments the hop limit unless it is 255.
    pub fn increment_hop_limit(&mut self) {
        let limit = &mut self.bytes.as_mut()[7];
        *limit = limit.saturating_add(1);
    }
}

/// The fields of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Source address.
    pub source: Ipv6Addr,
    /// Destination address.
    pub destination: Ipv6Addr,
    /// Type of the header that follows.
    pub next_header: Protocol,
    /// Hop limit.
    pub hop_limit: u8,
    /// Traffic class: six bits of DSCP and two of ECN.
    pub traffic_class: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Length of the payload in bytes, at most 65,535.
    pub payload_bytes: usize,
}

impl Repr {
    /// Reads the header of `packet`.
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

    /// Returns the length of header and payload in bytes.
    pub fn total_bytes(&self) -> usize {
        HEADER_BYTES + self.payload_bytes
    }

    /// Writes [`HEADER_BYTES`] to the front of `bytes`. Panics if `bytes` is shorter, or if the payload is too long for
    /// a packet.
    pub fn emit(&self, bytes: &mut [u8]) {
        let payload = u16::try_from(self.payload_bytes).expect("the payload must not exceed 65,535 B");
        let first = 6 << 28 | u32::from(self.traffic_class) << 20 | self.flow_label & 0xf_ffff;
        put(bytes, 0, &first.to_be_bytes());
        put(bytes, 4, &payload.to_be_bytes());
        put(bytes, 6, &[self.next_header.0, self.hop_limit]);
        put(bytes, 8, &self.source.octets());
        put(bytes, 24, &self.destination.octets());
    }
}
