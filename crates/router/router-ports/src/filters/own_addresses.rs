//! The addresses of the network namespace. Packets from and to them are not forwarded, so that selectors of one such
//! address match no packet between two interfaces.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::attribute;
use crate::netlink::NetlinkError;
use crate::netlink::socket::Socket;

/// `linux/rtnetlink.h`, `linux/if_addr.h`.
const GET_ADDRESS: u16 = 22;
/// `struct ifaddrmsg`.
const HEADER_BYTES: usize = 8;
const ADDRESS: u16 = 1;
const LOCAL: u16 = 2;

pub(super) struct OwnAddresses(BTreeSet<IpAddr>);

impl OwnAddresses {
    pub fn read(socket: &mut Socket) -> Result<OwnAddresses, NetlinkError> {
        let mut addresses = BTreeSet::new();
        socket.dump_raw(GET_ADDRESS, &[0; HEADER_BYTES], &mut addresses, BTreeSet::clear, |addresses, message| {
            let attributes = message.get(HEADER_BYTES..).unwrap_or_default();
            let contents = attribute(attributes, LOCAL).or_else(|| attribute(attributes, ADDRESS));
            let family = message.first().map(|family| u16::from(*family));
            addresses.extend(contents.zip(family).and_then(|(contents, family)| address(family, contents)));
        })?;
        Ok(OwnAddresses(addresses))
    }

    /// Returns whether a selector, with a prefix of this length, matches only one of these addresses.
    pub fn is_all_of(&self, family: u16, address_bytes: &[u8], prefix_bits: u8) -> bool {
        address(family, address_bytes).is_some_and(|address| {
            let bits = if address.is_ipv4() { Ipv4Addr::BITS } else { Ipv6Addr::BITS };
            u32::from(prefix_bits) == bits && self.0.contains(&address)
        })
    }
}

/// Reads an address of this family (`AF_INET`, `AF_INET6`).
fn address(family: u16, bytes: &[u8]) -> Option<IpAddr> {
    match i32::from(family) {
        libc::AF_INET => bytes.first_chunk::<4>().map(|bytes| IpAddr::from(*bytes)),
        libc::AF_INET6 => bytes.first_chunk::<16>().map(|bytes| IpAddr::from(*bytes)),
        _ => None,
    }
}
