//! The node's own addresses, and what no address may be.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// Bits of the filter: many more than a node has addresses, few enough to stay in the first-level cache.
const FILTER_BITS: u32 = 1 << 12;

/// Which addresses are the node's own, or those of all on its networks: asked for each packet's source, so it mostly
/// answers by one bit.
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

    /// These and no others, with the networks that they are on.
    pub(crate) fn set(&mut self, addresses: impl Iterator<Item = IpNet>) {
        self.filter.fill(0);
        self.addresses.clear();
        self.broadcasts.clear();
        for network in addresses {
            self.insert(network.addr());
            self.addresses.push(network.addr());
            // A network of two addresses has none of all (RFC 3021).
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

    /// Not for sure: for another address, it is so seldom.
    #[inline]
    pub(crate) fn may_have_v4(&self, address: u32) -> bool {
        self.is_set(filter_bit_v4(address))
    }

    /// Not for sure.
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

    /// Whether it is the address of all on a network of the node's.
    pub(crate) fn has_broadcast(&self, address: Ipv4Addr) -> bool {
        self.broadcasts.binary_search(&address).is_ok()
    }
}

/// What of IPv4 is not forwarded by its address alone: martians, groups, and addresses of one link.
#[inline]
pub(crate) fn is_special_v4(address: u32) -> bool {
    is_martian_v4(address) || address >> 16 == LINK_LOCAL_V4
}

/// The first 16 bits of IPv4's link-local addresses, which no router forwards from or to (RFC 3927, section 7).
const LINK_LOCAL_V4: u32 = 0xa9fe;

/// First octets of IPv4 addresses that no unicast packet comes from or goes to: *this network*, loopback, multicast,
/// reserved and broadcast (RFC 1812, section 5.3.7; RFC 6890). Multicast and reserved are the last 32.
#[inline]
fn is_martian_v4(address: u32) -> bool {
    let octet = (address >> 24) as u8;
    // Two comparisons: from 224 on, and 0 that becomes 255.
    octet.wrapping_sub(1) >= 223 || octet == 127
}

/// What of IPv6 is not forwarded by its address alone: all that is not 2000::/3 or unique local, seen coarsely. What
/// it says of a usual address is no.
#[inline]
pub(crate) fn is_special_v6(address: u128) -> bool {
    let word = (address >> 112) as u16;
    word == 0 || word >= 0xfe00
}

/// Whether nobody can be there whom a packet could come from.
pub(crate) fn is_martian_source_v4(address: Ipv4Addr) -> bool {
    is_martian_v4(address.to_bits())
}

/// Whether nobody can be there whom a packet could go to; a group's address is somebody's.
pub(crate) fn is_martian_destination_v4(address: Ipv4Addr) -> bool {
    is_martian_v4(address.to_bits()) && !address.is_multicast() && !address.is_broadcast()
}

/// Whether nobody can be there: unspecified, loopback, or an IPv4 address in disguise (RFC 6890, table 4.2; RFC 4291,
/// section 2.5).
pub(crate) fn is_martian_v6(address: Ipv6Addr) -> bool {
    let bits = address.to_bits();
    // ::/96 holds the unspecified address, the loopback and the IPv4-compatible ones, all of no use on a wire.
    bits >> 32 == 0 || bits >> 32 == 0xffff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_addresses_are_found_and_others_seldom_asked_for() {
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
        let strangers = (0..100_000_u32).filter(|number| own.may_have_v4(0x0b00_0000 + number)).count();
        let to_all = Ipv4Addr::new(192, 0, 2, 255);
        assert!(own.has_broadcast(to_all) && own.may_have_v4(to_all.to_bits()) && !own.has(to_all.into()));
        assert!(!own.has_broadcast(Ipv4Addr::new(10, 0, 0, 1)), "a network of two addresses has none of all");
        assert!(strangers < 200, "{strangers} of 100,000 strangers look like one of 5");
        assert!(!own.has("10.0.0.2".parse().expect("an address")));
        own.set(std::iter::empty());
        assert!(!own.has_broadcast(to_all));
        assert!(!own.has(addresses[0]) && !own.may_have_v4(0x0a00_0001));
    }

    #[test]
    fn martians_are_who_cannot_be_there() {
        for text in ["0.0.0.0", "0.1.2.3", "127.0.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"] {
            assert!(is_martian_source_v4(text.parse().expect("an address")), "{text}");
        }
        for text in ["1.1.1.1", "10.0.0.1", "126.255.255.255", "128.0.0.1", "223.255.255.255"] {
            assert!(!is_martian_source_v4(text.parse().expect("an address")), "{text}");
            assert!(!is_martian_destination_v4(text.parse().expect("an address")), "{text}");
        }
        for text in ["224.0.0.5", "255.255.255.255"] {
            assert!(!is_martian_destination_v4(text.parse().expect("an address")), "{text} is somebody's");
        }
        for text in ["169.254.0.0", "169.254.255.255"] {
            let address: Ipv4Addr = text.parse().expect("an address");
            assert!(
                is_special_v4(address.to_bits()) && !is_martian_source_v4(address),
                "{text} is somebody's on its link"
            );
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
