//! The addresses that programs are shown.

use super::{is_proxy, table};
use crate::kernel::Tcp;
use socket::process::settings::settings;
use socket::rack::address::{Family, to_family};
use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::RawFd;

/// Returns the address in the family of the kernel's one; `None` if that has no such address.
fn in_family_of(address: SocketAddr, kernels: SocketAddr) -> Option<SocketAddr> {
    match (address, kernels) {
        (SocketAddr::V6(_), SocketAddr::V4(_)) => None,
        (_, SocketAddr::V4(_)) => Some(address),
        (_, SocketAddr::V6(_)) => Some(to_family(address, Family::V6)),
    }
}

fn kernel_addresses(fd: RawFd) -> Option<[SocketAddr; 2]> {
    let socket = Tcp(fd).borrow();
    let local = SocketAddr::try_from(rustix::net::getsockname(socket).ok()?).ok()?;
    let peer = SocketAddr::try_from(rustix::net::getpeername(socket).ok()??).ok()?;
    Some([local, peer])
}

/// Returns the address of the program at the other node, if the peer of a connection is the proxy.
pub fn peer_address(fd: RawFd) -> Option<SocketAddr> {
    shown_addresses(fd).map(|[_, peer]| peer)
}

/// Returns the address of this node's program, if the peer of a connection is the proxy.
pub fn source_address(fd: RawFd) -> Option<SocketAddr> {
    shown_addresses(fd).map(|[local, _]| local)
}

/// Returns both addresses of a connection as its program is to see them, if its peer is the proxy.
pub fn shown_addresses(fd: RawFd) -> Option<[SocketAddr; 2]> {
    settings().node?;
    let [local, peer] = kernel_addresses(fd)?;
    // For IPv6 the proxy connects from `::1` to the node's address, as no program does.
    let may_be_v6 = peer.ip() == Ipv6Addr::LOCALHOST && local.ip() != Ipv6Addr::LOCALHOST;
    if !is_proxy(peer.ip()) && !may_be_v6 {
        return None;
    }
    let table = table()?;
    let is_its = match may_be_v6 {
        true => table.node(table.own_slot()) == Some(local.ip()),
        false => table.proxy().map(Into::into) == Some(peer.ip().to_canonical()),
    };
    if !is_its {
        return None;
    }
    let shown = table.client(peer.port(), local.port()).or_else(|| table.remote_listener(peer.port()))?;
    let own = SocketAddr::new(table.node(table.own_slot())?, local.port());
    Some([in_family_of(own, local)?, in_family_of(shown, peer)?])
}
