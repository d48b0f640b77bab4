//! The invariant CRC of a packet (ICRC), which covers the fields that no router changes.
//!
//! Source: IBA 7.8.1 and RoCEv2, annex A17.3.3. Polynomial and bit order are those of Ethernet. Eight bytes of ones
//! stand in the place of InfiniBand's local route header, and fields that routers change count as ones: of IPv4, the
//! type of service, the time to live and the header checksum; of IPv6, the traffic class, the flow label and the hop
//! limit; the UDP checksum; and the byte of the BTH that holds FECN and BECN.

use std::net::{Ipv4Addr, Ipv6Addr};

use crc32fast::Hasher;

/// Length of the invariant checksum at the end of a packet, in bytes.
pub const ICRC_BYTES: usize = 4;
/// The UDP port of RoCEv2.
pub const UDP_PORT: u16 = 4791;

const UDP_BYTES: u16 = 8;
const IPV4_BYTES: u16 = 20;
const IP_PROTOCOL_UDP: u8 = 17;
const DONT_FRAGMENT: u8 = 0x40;
/// Offset of the BTH byte that holds FECN, BECN and six reserved bits.
const VARIANT_AT: usize = 4;

/// Number of bytes of a datagram between the IPv4 identification and the packet.
const AFTER_IDENTIFICATION_BYTES: usize = 22;
const IDENTIFICATION_BYTES: usize = 2;

/// Bytes at the beginning of a packet that are hashed with the headers before it: the BTH.
const FIRST_BYTES: usize = 12;

/// The fields that the ICRC covers before the packet's own bytes, and the first of those: hashed at once, because a
/// hash of few bytes costs as much as one of many.
struct Covered {
    bytes: [u8; 8 + 40 + UDP_BYTES as usize + FIRST_BYTES],
    len_bytes: usize,
}

impl Covered {
    fn new() -> Self {
        Self { bytes: [u8::MAX; 8 + 40 + UDP_BYTES as usize + FIRST_BYTES], len_bytes: 8 }
    }

    fn push(&mut self, bytes: &[u8]) {
        self.bytes[self.len_bytes..][..bytes.len()].copy_from_slice(bytes);
        self.len_bytes += bytes.len();
    }

    fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.len_bytes]
    }
}

/// The IP addresses of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IpAddresses {
    /// IPv4 without options.
    V4 {
        /// Source address.
        source: Ipv4Addr,
        /// Destination address.
        destination: Ipv4Addr,
        /// The identification field of the datagram.
        identification: u16,
        /// Whether routers must not fragment the datagram.
        dont_fragment: bool,
    },
    /// IPv6 without extension headers.
    V6 {
        /// Source address.
        source: Ipv6Addr,
        /// Destination address.
        destination: Ipv6Addr,
    },
}

/// The fields of the surrounding datagram that the ICRC covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Encapsulation {
    /// The IP addresses.
    pub addresses: IpAddresses,
    /// The UDP source port.
    pub source_port: u16,
    /// The UDP destination port.
    pub destination_port: u16,
}

impl Encapsulation {
    /// Returns the ICRC of a packet as it is sent. `packet` is the packet without its ICRC.
    ///
    /// # Panics
    /// If the packet does not fit a datagram.
    pub fn icrc(&self, packet: &[u8]) -> [u8; ICRC_BYTES] {
        let datagram = u16::try_from(packet.len() + ICRC_BYTES).ok().and_then(|bytes| bytes.checked_add(UDP_BYTES));
        let udp_bytes = datagram.expect("a packet fits a datagram");
        let mut covered = Covered::new();
        self.cover_ip(&mut covered, udp_bytes);
        let [source, destination] = [self.source_port, self.destination_port].map(u16::to_be_bytes);
        covered.push(&source);
        covered.push(&destination);
        covered.push(&udp_bytes.to_be_bytes());
        covered.push(&[u8::MAX; 2]);
        let (first, rest) = packet.split_at(packet.len().min(FIRST_BYTES));
        let variant = covered.len_bytes + VARIANT_AT;
        covered.push(first);
        if first.len() > VARIANT_AT {
            covered.bytes[variant] = u8::MAX;
        }
        let mut hasher = Hasher::new();
        hasher.update(covered.as_slice());
        hasher.update(rest);
        hasher.finalize().to_le_bytes()
    }

    /// Returns the IPv4 identification for which the ICRC of a whole packet is correct, if one exists. Sockets do not
    /// show the identification of a received datagram, and NICs increment it. One in 2^16 corrupt packets passes this
    /// check; the UDP checksum protects it as well.
    pub fn identification(&self, packet: &[u8]) -> Option<u16> {
        let IpAddresses::V4 { source, destination, dont_fragment, .. } = self.addresses else { return None };
        let (body, icrc) = packet.split_last_chunk::<ICRC_BYTES>()?;
        let addresses = IpAddresses::V4 { source, destination, identification: 0, dont_fragment };
        let difference = u32::from_le_bytes(Self { addresses, ..*self }.icrc(body)) ^ u32::from_le_bytes(*icrc);
        // A CRC is linear: two bytes shifted into a zero register equal a register of these bytes followed by two
        // zeros.
        let bytes = IDENTIFICATION_BYTES + AFTER_IDENTIFICATION_BYTES + body.len();
        match without_zeros(difference, bytes).to_le_bytes() {
            [high, low, 0, 0] => Some(u16::from_be_bytes([high, low])),
            _ => None,
        }
    }

    fn cover_ip(&self, covered: &mut Covered, udp_bytes: u16) {
        match self.addresses {
            IpAddresses::V4 { source, destination, identification, dont_fragment } => {
                let [length_high, length_low] = udp_bytes.saturating_add(IPV4_BYTES).to_be_bytes();
                let [id_high, id_low] = identification.to_be_bytes();
                let flags = if dont_fragment { DONT_FRAGMENT } else { 0 };
                covered.push(&[0x45, u8::MAX, length_high, length_low, id_high, id_low, flags, 0]);
                covered.push(&[u8::MAX, IP_PROTOCOL_UDP, u8::MAX, u8::MAX]);
                covered.push(&source.octets());
                covered.push(&destination.octets());
            }
            IpAddresses::V6 { source, destination } => {
                let [length_high, length_low] = udp_bytes.to_be_bytes();
                covered.push(&[0x6f, u8::MAX, u8::MAX, u8::MAX, length_high, length_low, IP_PROTOCOL_UDP, u8::MAX]);
                covered.push(&source.octets());
                covered.push(&destination.octets());
            }
        }
    }
}

/// The polynomial of CRC-32 with the lowest bit first; bit 31 is the coefficient of x^0.
const POLYNOMIAL: u32 = 0xedb8_8320;
const ONE: u32 = 1 << 31;
/// The inverse of x: multiplied by x it is 1.
const INVERSE_X: u32 = (ONE ^ POLYNOMIAL) << 1 | 1;
/// x^(-8 * 2^k), which removes 2^k bytes of zeros from a register.
const INVERSE_BYTES: [u32; 16] = {
    let mut powers = [times(INVERSE_X, INVERSE_X); 16];
    powers[0] = times(powers[0], powers[0]);
    powers[0] = times(powers[0], powers[0]);
    let mut k = 1;
    while k < powers.len() {
        powers[k] = times(powers[k - 1], powers[k - 1]);
        k += 1;
    }
    powers
};

/// Returns the product of two polynomials, modulo the CRC-32 polynomial.
const fn times(a: u32, b: u32) -> u32 {
    let (mut product, mut shifted, mut term) = (0, b, ONE);
    while term != 0 {
        if a & term != 0 {
            product ^= shifted;
        }
        shifted = shifted >> 1 ^ if shifted & 1 == 1 { POLYNOMIAL } else { 0 };
        term >>= 1;
    }
    product
}

/// Returns the register before `bytes` bytes of zeros, fewer than 2^16, were shifted in.
fn without_zeros(register: u32, bytes: usize) -> u32 {
    let powers = INVERSE_BYTES.iter().enumerate().filter(|(k, _)| bytes >> k & 1 == 1);
    powers.fold(register, |register, (_, power)| times(register, *power))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(source: [u8; 4], destination: [u8; 4], identification: u16) -> IpAddresses {
        let [source, destination] = [source, destination].map(Ipv4Addr::from);
        IpAddresses::V4 { source, destination, identification, dont_fragment: true }
    }

    /// Captured from a ConnectX-4 Lx: "RoCE CNP captured on ConnectX-4 Lx" in scapy's test/contrib/roce.uts.
    #[test]
    fn the_icrc_of_a_captured_cnp_is_reproduced() {
        let encapsulation = Encapsulation {
            addresses: v4([10, 0, 17, 1], [10, 0, 18, 1], 0x718c),
            source_port: 0,
            destination_port: UDP_PORT,
        };
        let mut packet = [0; 28];
        packet[..9].copy_from_slice(&[0x81, 0, 0xff, 0xff, 0x40, 0, 1, 0x18, 0]);
        assert_eq!(encapsulation.icrc(&packet), [0x82, 0xfd, 0x00, 0x2a]);
        packet[VARIANT_AT] = 0xc0;
        assert_eq!(encapsulation.icrc(&packet), [0x82, 0xfd, 0x00, 0x2a], "a switch may set FECN");
        packet[VARIANT_AT + 3] ^= 1;
        assert_ne!(encapsulation.icrc(&packet), [0x82, 0xfd, 0x00, 0x2a]);
    }

    /// "RoCE layer, an example UC packet" in scapy's test/contrib/roce.uts.
    #[test]
    fn the_icrc_of_a_published_uc_send_is_reproduced() {
        let address = [192, 168, 0, 7];
        let encapsulation =
            Encapsulation { addresses: v4(address, address, 1144), source_port: 49_152, destination_port: UDP_PORT };
        let packet = [
            0x24, 0x60, 0xff, 0xff, 0x00, 0x00, 0x00, 0xd3, 0x00, 0xcf, 0x17, 0x10, 0x46, 0x30, 0x81, 0x8b, 0xe2, 0x89,
            0x35, 0xd9, 0x0e, 0x9a, 0x95, 0x50, 0x54, 0x01, 0xbe, 0x88, 0x5e, 0x50, 0x00, 0x00,
        ];
        assert_eq!(encapsulation.icrc(&packet), [0x78, 0xf3, 0x53, 0xf3]);
    }

    #[test]
    fn the_identification_of_a_captured_packet_is_found() {
        let mut packet = [0; 32];
        packet[..9].copy_from_slice(&[0x81, 0, 0xff, 0xff, 0x40, 0, 1, 0x18, 0]);
        packet[28..].copy_from_slice(&[0x82, 0xfd, 0x00, 0x2a]);
        let addresses = v4([10, 0, 17, 1], [10, 0, 18, 1], 0);
        let unknown = Encapsulation { addresses, source_port: 0, destination_port: UDP_PORT };
        assert_eq!(unknown.identification(&packet), Some(0x718c));
        for bit in 0..28 * 8 {
            let mut corrupted = packet;
            corrupted[bit / 8] ^= 1 << (bit % 8);
            let may_change = bit / 8 == VARIANT_AT;
            assert_eq!(unknown.identification(&corrupted).is_some(), may_change, "bit {bit}");
        }
        assert_eq!(unknown.identification(&packet[..3]), None);
    }

    #[test]
    fn any_identification_is_found_for_packets_of_any_length() {
        for (bytes, identification) in [(0_usize, 0_u16), (1, 1), (12, 0x8000), (64, 0xffff), (4200, 0xa55a)] {
            let mut packet: Vec<u8> = (0..bytes).map(|at| at as u8).collect();
            let encapsulation = |identification| Encapsulation {
                addresses: v4([10, 1, 2, 3], [10, 4, 5, 6], identification),
                source_port: 49_999,
                destination_port: UDP_PORT,
            };
            packet.extend(encapsulation(identification).icrc(&packet));
            assert_eq!(encapsulation(77).identification(&packet), Some(identification));
        }
    }

    /// No test vector is known for IPv6. This computes the CRC bit by bit over the whole datagram with masked fields.
    #[test]
    fn variant_ipv6_fields_are_masked() {
        let (source, destination) = (Ipv6Addr::LOCALHOST, "2001:db8::17".parse::<Ipv6Addr>().unwrap());
        let addresses = IpAddresses::V6 { source, destination };
        let encapsulation = Encapsulation { addresses, source_port: 0xc001, destination_port: UDP_PORT };
        let packet: Vec<u8> = (0..32).collect();
        let mut masked = vec![0xff; 8];
        masked.extend([0x6f, 0xff, 0xff, 0xff, 0, 44, 17, 0xff]);
        masked.extend(source.octets().into_iter().chain(destination.octets()));
        masked.extend([0xc0, 0x01, 0x12, 0xb7, 0, 44, 0xff, 0xff]);
        masked.extend(&packet);
        let at = masked.len() - packet.len() + VARIANT_AT;
        masked[at] = 0xff;
        let mut register = u32::MAX;
        for byte in masked {
            for bit in 0..8 {
                let feedback = (register ^ u32::from(byte >> bit)) & 1;
                register = register >> 1 ^ if feedback == 1 { 0xedb8_8320 } else { 0 };
            }
        }
        assert_eq!(encapsulation.icrc(&packet), (!register).to_le_bytes());
    }
}
