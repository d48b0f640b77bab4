//! Ethernet II frames, without preamble and frame check sequence.

use std::fmt;
use std::str::FromStr;

use crate::error::at_least;
use crate::octets::{array_at, put, u16_at};
use crate::{Error, vlan};

pub use crate::ethertype::EtherType;

/// Length of the header in bytes.
pub const HEADER_BYTES: usize = 14;

/// Length in bytes of the shortest frame on a wire, without its frame check sequence; shorter ones are padded.
pub const FRAME_BYTES_MIN: usize = 60;

/// A MAC address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// The broadcast address.
    pub const BROADCAST: MacAddress = MacAddress([0xff; 6]);

    /// Returns whether this is an individual address: the group bit is clear.
    #[inline]
    pub fn is_unicast(self) -> bool {
        self.0[0] & 1 == 0
    }

    /// Returns the MAC address of an IPv6 multicast group (RFC 2464, section 7).
    pub fn from_multicast_v6(group: std::net::Ipv6Addr) -> MacAddress {
        let octets = group.octets();
        MacAddress([0x33, 0x33, octets[12], octets[13], octets[14], octets[15]])
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for MacAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<MacAddress, Error> {
        let malformed = Error::Malformed { protocol: "Ethernet", what: "address: write it like 02:00:00:00:00:01" };
        let mut address = [0; 6];
        let mut parts = text.split(':');
        for octet in &mut address {
            let is_octet = |part: &&str| part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit());
            let part = parts.next().filter(is_octet).ok_or(malformed)?;
            *octet = u8::from_str_radix(part, 16).map_err(|_| malformed)?;
        }
        if parts.next().is_some() {
            return Err(malformed);
        }
        Ok(MacAddress(address))
    }
}

/// A frame with a whole header.
#[derive(Clone, Copy, Debug)]
pub struct Frame<T> {
    bytes: T,
}

/// Where the network-layer header of a frame is, and what precedes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkHeader {
    /// The outer VLAN tag, if there is one.
    pub tag: Option<vlan::Tag>,
    /// The EtherType behind that tag. It may be that of a second tag, which is not parsed.
    pub ethertype: EtherType,
    /// Offset of the network-layer header in the frame, in bytes.
    pub offset: usize,
}

impl<T: AsRef<[u8]>> Frame<T> {
    /// Rejects frames shorter than a header.
    #[inline]
    pub fn new_checked(bytes: T) -> Result<Frame<T>, Error> {
        at_least("Ethernet", bytes.as_ref().len(), HEADER_BYTES)?;
        Ok(Frame { bytes })
    }

    /// Returns the destination address.
    #[inline]
    pub fn destination(&self) -> MacAddress {
        MacAddress(array_at(self.bytes.as_ref(), 0))
    }

    /// Returns the source address.
    #[inline]
    pub fn source(&self) -> MacAddress {
        MacAddress(array_at(self.bytes.as_ref(), 6))
    }

    /// Returns the EtherType behind the addresses, which may be that of a VLAN tag.
    #[inline]
    pub fn ethertype(&self) -> EtherType {
        EtherType(u16_at(self.bytes.as_ref(), 12))
    }

    /// Returns the bytes behind the header, which may begin with a VLAN tag.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        &self.bytes.as_ref()[HEADER_BYTES..]
    }

    /// Finds the network-layer header behind at most one VLAN tag.
    #[inline]
    pub fn network_header(&self) -> Result<NetworkHeader, Error> {
        let ethertype = self.ethertype();
        if ethertype != EtherType::VLAN && ethertype != EtherType::SERVICE_VLAN {
            return Ok(NetworkHeader { tag: None, ethertype, offset: HEADER_BYTES });
        }
        let inner = vlan::Packet::new_checked(self.payload())?;
        let offset = HEADER_BYTES + vlan::HEADER_BYTES;
        Ok(NetworkHeader { tag: Some(inner.tag()), ethertype: inner.ethertype(), offset })
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> Frame<T> {
    /// Sets the destination address.
    #[inline]
    pub fn set_destination(&mut self, address: MacAddress) {
        put(self.bytes.as_mut(), 0, &address.0);
    }

    /// Sets the source address.
    #[inline]
    pub fn set_source(&mut self, address: MacAddress) {
        put(self.bytes.as_mut(), 6, &address.0);
    }
}

/// The fields of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Destination address.
    pub destination: MacAddress,
    /// Source address.
    pub source: MacAddress,
    /// EtherType of the payload.
    pub ethertype: EtherType,
}

impl Repr {
    /// Reads the header of `frame`.
    pub fn parse<T: AsRef<[u8]>>(frame: &Frame<T>) -> Repr {
        Repr { destination: frame.destination(), source: frame.source(), ethertype: frame.ethertype() }
    }

    /// Writes [`HEADER_BYTES`] to the front of `bytes`. Panics if `bytes` is shorter.
    pub fn emit(&self, bytes: &mut [u8]) {
        put(bytes, 0, &self.destination.0);
        put(bytes, 6, &self.source.0);
        put(bytes, 12, &self.ethertype.0.to_be_bytes());
    }
}
