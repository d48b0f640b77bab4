//! The node's own addresses, and classes of addresses that need special treatment.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// Size of the filter in bits: many more than a node has addresses, few enough for the first-level cache.
const FILTER_BITS: u32 = 1 << 12;

/// The set of the node's own addresses and the broadcast addresses of its networks. A one-hash Bloom filter answers
/// most queries by one bit, because the source of every packet is checked.
pub(crate) struct LocalAddresses {
    filter: [u64; FILTER_BITS as usize / 64],
    addresses: Vec<IpAddr>,
    broadcasts: Vec<Ipv4Addr>,
}

fn filter_bit_v4(address: u32) -> u32 {
    address.wrapping_mul(0x9e37_79b1) >> (32 - FILTER_BITS.ilog2())
}

fn filter_bit_v6(address: u128) -> u32 {
    let folded = (address >> 64) as u64 ^ address as u64;
    (folded.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - FILTER_BITS.ilog2())) as u32
}

impl LocalAddresses {
    pub(crate) fn new() -> LocalAddresses {
        LocalAddresses { filter: [0; FILTER_BITS as usize / 64], addresses: Vec::new(), broadcasts: Vec::new() }
    }

    /// Replaces the set by these addresses and the broadcast addresses of their networks.
    pub(crate) fn set(&mut self, addresses: impl Iterator<Item = IpNet>) {
        self.filter.fill(0);
        self.addresses.clear();
        self.broadcasts.clear();
        for network in addresses {
            self.insert(network.addr());
            self.addresses.push(network.addr());
            // A /31 network has no broadcast address (RFC 3021).
            if let IpNet::V4(network) = network
                && network.prefix_len() < 31
            {
                self.insert(network.broadcast().into());
                self.broadcasts.push(network.broadcast());
            }
        }
        self.addresses.sort_unstable();
        self.addresses.dedup();
        self.broadcasts.sort_unstable();
        self.broadcasts.dedup();
    }

    fn insert(&mut self, address: IpAddr) {
        let bit = match address {
            IpAddr::V4(address) => filter_bit_v4(address.to_bits()),
            IpAddr::V6(address) => filter_bit_v6(address.to_bits()),
        };
        self.filter[bit as usize / 64] |= 1 << (bit % 64);
    }

    /// Returns whether the address may be in the set; false positives are rare.
    #[inline]
    pub(crate) fn may_have_v4(&self, address: u32) -> bool {
        self.is_set(filter_bit_v4(address))
    }

    /// Returns whether the address may be in the set; false positives are rare.
    #[inline]
    pub(crate) fn may_have_v6(&self, address: u128) -> bool {
        self.is_set(filter_bit_v6(address))
    }

    #[inline]
    fn is_set(&self, bit: u32) -> bool {
        self.filter[(bit / 64) as usize % (FILTER_BITS as usize / 64)] >> (bit % 64) & 1 != 0
    }

    pub(crate) fn has(&self, address: IpAddr) -> bool {
        self.addresses.binary_search(&address).is_ok()
    }

    /// Returns whether the address is the broadcast address of a local network.
    pub(crate) fn has_broadcast(&self, address: Ipv4Addr) -> bool {
        self.broadcasts.binary_search(&address).is_ok()
    }
}

/// Returns whether the slow path must decide about an IPv4 address: martian, multicast or link-local ones.
#[inline]
pub(crate) fn is_special_v4(address: u32) -> bool {
    is_martian_v4(address) || address >> 16 == LINK_LOCAL_V4
}

/// The first 16 bits of IPv4 link-local addresses, from and to which no router forwards (RFC 3927, section 7).
const LINK_LOCAL_V4: u32 = 0xa9fe;

/// Returns whether an IPv4 address is *this network*, loopback, multicast, reserved or broadcast, by its first octet
/// (RFC 1812, section 5.3.7; RFC 6890). Multicast and reserved are the last 32 octets.
#[inline]
fn is_martian_v4(address: u32) -> bool {
    let octet = (address >> 24) as u8;
    // One comparison covers 224 and above, and 0, which wraps to 255.
    octet.wrapping_sub(1) >= 223 || octet == 127
}

/// Returns whether the slow path must decide about an IPv6 address. A coarse check: false for all global unicast
/// (2000::/3) and unique local addresses.
#[inline]
pub(crate) fn is_special_v6(address: u128) -> bool {
    let word = (address >> 112) as u16;
    word == 0 || word >= 0xfe00
}

/// Returns whether an IPv4 address is a martian source.
pub(crate) fn is_martian_source_v4(address: Ipv4Addr) -> bool {
    is_martian_v4(address.to_bits())
}

/// Returns whether an IPv4 address is a martian destination; multicast and broadcast addresses are valid destinations.
pub(crate) fn is_martian_destination_v4(address: Ipv4Addr) -> bool {
    is_martian_v4(address.to_bits()) && !address.is_multicast() && !address.is_broadcast()
}

/// Returns whether an address is an IPv6 link-local one.
pub(crate) fn is_link_local_v6(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

/// Returns whether an IPv6 address is martian: unspecified, loopback, IPv4-compatible or IPv4-mapped (RFC 6890, section
/// 2.2.3; RFC 4291, section 2.5).
pub(crate) fn is_martian_v6(address: Ipv6Addr) -> bool {
    let bits = address.to_bits();
    // ::/96 contains the unspecified address, the loopback address and the IPv4-compatible ones.
    bits >> 32 == 0 || bits >> 32 == 0xffff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_addresses_are_found_and_false_positives_are_rare() {
        let mut own = LocalAddresses::new();
        let networks: Vec<IpNet> = ["192.0.2.1/24", "10.0.0.1/31", "2001:db8::1/64", "fe80::1/64", "10.0.0.1/32"]
            .iter()
            .map(|text| text.parse().expect("a network"))
            .collect();
        own.set(networks.iter().copied());
        let addresses: Vec<IpAddr> = networks.iter().map(IpNet::addr).collect();
        for address in &addresses {
            assert!(own.has(*address), "{address}");
            match address {
                IpAddr::V4(address) => assert!(own.may_have_v4(address.to_bits())),
                IpAddr::V6(address) => assert!(own.may_have_v6(address.to_bits())),
            }
        }
        let false_positives = (0..100_000_u32).filter(|number| own.may_have_v4(0x0b00_0000 + number)).count();
        let broadcast = Ipv4Addr::new(192, 0, 2, 255);
        assert!(own.has_broadcast(broadcast) && own.may_have_v4(broadcast.to_bits()) && !own.has(broadcast.into()));
        assert!(!own.has_broadcast(Ipv4Addr::new(10, 0, 0, 1)), "a /31 network has no broadcast address");
        assert!(false_positives < 200, "{false_positives} of 100,000 other addresses");
        assert!(!own.has("10.0.0.2".parse().expect("an address")));
        own.set(std::iter::empty());
        assert!(!own.has_broadcast(broadcast));
        assert!(!own.has(addresses[0]) && !own.may_have_v4(0x0a00_0001));
    }

    #[test]
    fn martians_and_link_local_addresses_are_classified() {
        for text in ["0.0.0.0", "0.1.2.3", "127.0.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"] {
            assert!(is_martian_source_v4(text.parse().expect("an address")), "{text}");
        }
        for text in ["1.1.1.1", "10.0.0.1", "126.255.255.255", "128.0.0.1", "223.255.255.255"] {
            assert!(!is_martian_source_v4(text.parse().expect("an address")), "{text}");
            assert!(!is_martian_destination_v4(text.parse().expect("an address")), "{text}");
        }
        for text in ["224.0.0.5", "255.255.255.255"] {
            assert!(!is_martian_destination_v4(text.parse().expect("an address")), "{text} is a valid destination");
        }
        for text in ["169.254.0.0", "169.254.255.255"] {
            let address: Ipv4Addr = text.parse().expect("an address");
            assert!(is_special_v4(address.to_bits()) && !is_martian_source_v4(address), "{text} is link-local");
        }
        for text in ["169.253.255.255", "169.255.0.0"] {
            assert!(!is_special_v4(text.parse::<Ipv4Addr>().expect("an address").to_bits()), "{text}");
        }
        for text in ["::", "::1", "::ffff:1.2.3.4", "::1.2.3.4"] {
            assert!(is_martian_v6(text.parse().expect("an address")), "{text}");
        }
        for text in ["2001:db8::1", "fe80::1", "fd00::1", "64:ff9b::1.2.3.4", "ff02::1"] {
            assert!(!is_martian_v6(text.parse().expect("an address")), "{text}");
        }
    }
}
