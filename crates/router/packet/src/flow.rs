//! The flow (5-tuple) of a packet, and a hash of it that is the same in both directions.
//!
//! The ports of fragments count as 0, also those of the first fragment, which carries them: so all fragments of a
//! packet take the same path.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::octets::u16_at;
use crate::{Protocol, ipv4, ipv6};

/// The 5-tuple of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// Upper-layer protocol; with IPv6, behind the extension headers.
    pub protocol: Protocol,
    /// Source port; 0 if there is none.
    pub source_port: u16,
    /// Destination port; 0 if there is none.
    pub destination_port: u16,
}

impl Flow {
    /// Returns the flow of an IPv4 packet.
    #[inline]
    pub fn from_v4<T: AsRef<[u8]>>(packet: &ipv4::Packet<T>) -> Flow {
        let protocol = packet.protocol();
        let (source_port, destination_port) =
            if packet.is_fragment() { (0, 0) } else { ports(protocol, packet.payload()) };
        let (source, destination) = (packet.source().into(), packet.destination().into());
        Flow { source, destination, protocol, source_port, destination_port }
    }

    /// Returns the flow of an IPv6 packet. One with malformed extension headers belongs to a flow without ports.
    #[inline]
    pub fn from_v6<T: AsRef<[u8]>>(packet: &ipv6::Packet<T>) -> Flow {
        let payload = packet.payload();
        let (protocol, source_port, destination_port) = match packet.upper_layer() {
            Ok(upper) if upper.fragment.is_none() => {
                let (source_port, destination_port) = ports(upper.protocol, &payload[upper.offset..]);
                (upper.protocol, source_port, destination_port)
            }
            Ok(upper) => (upper.protocol, 0, 0),
            Err(_) => (packet.next_header(), 0, 0),
        };
        let (source, destination) = (packet.source().into(), packet.destination().into());
        Flow { source, destination, protocol, source_port, destination_port }
    }

    /// Returns the flow in the opposite direction.
    #[must_use]
    pub fn reversed(self) -> Flow {
        Flow {
            source: self.destination,
            destination: self.source,
            source_port: self.destination_port,
            destination_port: self.source_port,
            ..self
        }
    }

    /// Returns a hash that depends on `seed` and is the same for [`Flow::reversed`].
    #[inline]
    pub fn hash(&self, seed: u64) -> u32 {
        let (a, b) = match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => (address_key_v4(source), address_key_v4(destination)),
            (IpAddr::V6(source), IpAddr::V6(destination)) => (address_key_v6(source), address_key_v6(destination)),
            // No packet has addresses of both families, but the function is total.
            (source, destination) => (address_key(source), address_key(destination)),
        };
        let a = a.wrapping_add(u64::from(self.source_port));
        let b = b.wrapping_add(u64::from(self.destination_port));
        combine(a, b, self.protocol, seed)
    }
}

/// Returns the [`Flow::hash`] of an IPv4 packet.
#[inline]
pub fn hash_v4<T: AsRef<[u8]>>(packet: &ipv4::Packet<T>, seed: u64) -> u32 {
    Flow::from_v4(packet).hash(seed)
}

/// Returns the [`Flow::hash`] of an IPv6 packet.
#[inline]
pub fn hash_v6<T: AsRef<[u8]>>(packet: &ipv6::Packet<T>, seed: u64) -> u32 {
    Flow::from_v6(packet).hash(seed)
}

/// Returns source and destination port at the front of `payload`; zeros if the protocol has none or they are truncated.
#[inline]
fn ports(protocol: Protocol, payload: &[u8]) -> (u16, u16) {
    if protocol.has_ports() && payload.len() >= 4 { (u16_at(payload, 0), u16_at(payload, 2)) } else { (0, 0) }
}

fn address_key(address: IpAddr) -> u64 {
    match address {
        IpAddr::V4(address) => address_key_v4(address),
        IpAddr::V6(address) => address_key_v6(address),
    }
}

/// Returns the hash key of an endpoint; its low 16 bits are left for the port.
#[inline]
fn address_key_v4(address: Ipv4Addr) -> u64 {
    u64::from(address.to_bits()) << 16
}

#[inline]
fn address_key_v6(address: Ipv6Addr) -> u64 {
    let bits = address.to_bits();
    mix((bits >> 64) as u64 ^ 0x9e37_79b9_7f4a_7c15) ^ bits as u64
}

/// Hashes the smaller endpoint key first, which makes the hash symmetric. Unlike a sum or an exclusive or of both, this
/// does not make flows collide that exchange parts of their endpoints, such as the ports.
#[inline]
fn combine(a: u64, b: u64, protocol: Protocol, seed: u64) -> u32 {
    let first = mix(a.min(b) ^ seed).wrapping_add(u64::from(protocol.0));
    (mix(first ^ a.max(b)) >> 32) as u32
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every output bit depends on every input bit.
#[inline]
fn mix(word: u64) -> u64 {
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}
