//! The canonical form of addresses inside the library, and the forms that programs see.

use std::net::{Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// The address family of a program's socket, which decides how addresses are shown to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// `AF_INET`.
    V4,
    /// `AF_INET6`.
    V6,
}

impl Family {
    /// Returns the family with this C number, if TCP supports it.
    pub fn from_raw(family: i32) -> Option<Self> {
        match family {
            libc::AF_INET => Some(Self::V4),
            libc::AF_INET6 => Some(Self::V6),
            _ => None,
        }
    }

    /// Returns the C number.
    pub fn raw(self) -> i32 {
        match self {
            Self::V4 => libc::AF_INET,
            Self::V6 => libc::AF_INET6,
        }
    }
}

/// Returns the canonical form of an address: IPv4 unmapped, no flow label, a scope only for a link-local address.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    let SocketAddr::V6(v6) = address else { return address };
    match v6.ip().to_ipv4_mapped() {
        Some(v4) => SocketAddr::V4(SocketAddrV4::new(v4, v6.port())),
        None => {
            let scope = if is_link_local(v6.ip()) { v6.scope_id() } else { 0 };
            SocketAddr::V6(SocketAddrV6::new(*v6.ip(), v6.port(), 0, scope))
        }
    }
}

fn is_link_local(ip: &Ipv6Addr) -> bool {
    ip.segments()[0] & 0xffc0 == 0xfe80
}

/// Returns the form in which a program with a socket of `family` sees a canonical address.
pub fn to_family(address: SocketAddr, family: Family) -> SocketAddr {
    match (address, family) {
        (SocketAddr::V4(v4), Family::V6) => {
            SocketAddr::V6(SocketAddrV6::new(v4.ip().to_ipv6_mapped(), v4.port(), 0, 0))
        }
        _ => address,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::{IpAddr, Ipv4Addr};

    pub(in super::super) fn any_ip() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            any::<u32>().prop_map(|bits| IpAddr::from(Ipv4Addr::from(bits))),
            any::<u128>().prop_map(|bits| IpAddr::from(Ipv6Addr::from(bits))),
            any::<u32>().prop_map(|bits| IpAddr::from(Ipv4Addr::from(bits).to_ipv6_mapped())),
            any::<u64>().prop_map(|bits| IpAddr::from(Ipv6Addr::from(0xfe80 << 112 | u128::from(bits)))),
        ]
    }

    pub(in super::super) fn any_address() -> impl Strategy<Value = SocketAddr> {
        (any_ip(), any::<u16>(), any::<u32>(), 0..10_000_u32).prop_map(|(ip, port, flow, scope)| match ip {
            IpAddr::V4(v4) => SocketAddr::V4(SocketAddrV4::new(v4, port)),
            IpAddr::V6(v6) => SocketAddr::V6(SocketAddrV6::new(v6, port, flow, scope)),
        })
    }

    proptest! {
        #[test]
        fn canonical_is_idempotent_and_undoes_the_mapping(address in any_address()) {
            let once = canonical(address);
            prop_assert_eq!(canonical(once), once);
            prop_assert_eq!(canonical(to_family(once, Family::V6)), once);
        }
    }
}
