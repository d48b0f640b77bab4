//! The two addresses of a connection, in a form that both endpoints agree on.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::BorrowedFd;

use crate::reason::Reason;

/// Bytes of a [`Tuple`] in its canonical form.
pub(crate) const TUPLE_BYTES: usize = 36;

/// The addresses of a connection as one endpoint sees them: IPv4 unmapped, without scopes and flow labels, which are
/// numbers of one host's interfaces and of one direction's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuple {
    /// The address of this endpoint.
    pub local: SocketAddr,
    /// The address of the other endpoint.
    pub peer: SocketAddr,
}

impl Tuple {
    /// Returns the tuple of two addresses.
    pub fn new(local: SocketAddr, peer: SocketAddr) -> Self {
        Self { local: canonical(local), peer: canonical(peer) }
    }

    /// Returns the tuple of a connected socket.
    ///
    /// # Errors
    /// [`Reason::NotTcp`] for addresses that are neither IPv4 nor IPv6, [`Reason::State`] for a socket that is not
    /// connected.
    pub fn of(socket: BorrowedFd<'_>) -> Result<Self, Reason> {
        let local = rustix::net::getsockname(socket).map_err(|_| Reason::NotTcp)?;
        let peer = rustix::net::getpeername(socket).map_err(|_| Reason::State)?.ok_or(Reason::State)?;
        match (SocketAddr::try_from(local), SocketAddr::try_from(peer)) {
            (Ok(local), Ok(peer)) => Ok(Self::new(local, peer)),
            _ => Err(Reason::NotTcp),
        }
    }

    /// Returns the tuple as the other endpoint sees it.
    #[must_use]
    pub fn reversed(self) -> Self {
        Self { local: self.peer, peer: self.local }
    }

    /// Returns both addresses as 16 bytes and a port in network byte order, IPv4 in the form `::ffff:a.b.c.d`.
    pub(crate) fn bytes(self) -> [u8; TUPLE_BYTES] {
        let mut bytes = [0; TUPLE_BYTES];
        for (part, address) in bytes.chunks_exact_mut(TUPLE_BYTES / 2).zip([self.local, self.peer]) {
            let ip: Ipv6Addr = match address.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            part[..16].copy_from_slice(&ip.octets());
            part[16..].copy_from_slice(&address.port().to_be_bytes());
        }
        bytes
    }
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::{Ipv4Addr, SocketAddrV6};

    pub(crate) fn any_address() -> impl Strategy<Value = SocketAddr> {
        let ip = prop_oneof![
            any::<u32>().prop_map(|bits| IpAddr::from(Ipv4Addr::from(bits))),
            any::<u128>().prop_map(|bits| IpAddr::from(Ipv6Addr::from(bits))),
            any::<u32>().prop_map(|bits| IpAddr::from(Ipv4Addr::from(bits).to_ipv6_mapped())),
        ];
        (ip, any::<u16>(), any::<u32>(), any::<u32>()).prop_map(|(ip, port, flow, scope)| match ip {
            IpAddr::V4(_) => SocketAddr::new(ip, port),
            IpAddr::V6(ip) => SocketAddr::V6(SocketAddrV6::new(ip, port, flow, scope)),
        })
    }

    fn mapped(address: SocketAddr) -> SocketAddr {
        match address.ip() {
            IpAddr::V4(ip) => SocketAddr::new(ip.to_ipv6_mapped().into(), address.port()),
            IpAddr::V6(_) => address,
        }
    }

    proptest! {
        #[test]
        fn both_endpoints_have_the_same_canonical_bytes(local in any_address(), peer in any_address()) {
            let (tuple, other) = (Tuple::new(local, peer), Tuple::new(mapped(peer), mapped(local)));
            prop_assert_eq!(tuple, other.reversed());
            prop_assert_eq!(tuple.bytes(), other.reversed().bytes());
            prop_assert_eq!(Tuple::new(tuple.local, tuple.peer), tuple);
            prop_assert_eq!(tuple.reversed() == tuple, tuple.local == tuple.peer);
        }
    }

    #[test]
    fn the_bytes_are_addresses_and_ports_in_network_byte_order() {
        let tuple = Tuple::new("127.0.0.1:258".parse().unwrap(), "[fe80::1%7]:772".parse().unwrap());
        let expected = "\0\0\0\0\0\0\0\0\0\0\u{ff}\u{ff}\u{7f}\0\0\u{1}\u{1}\u{2}";
        let expected: Vec<u8> = expected.chars().map(|letter| letter as u8).collect();
        assert_eq!(tuple.bytes()[..18], expected);
        assert_eq!(tuple.bytes()[18..], [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 3, 4]);
    }
}
