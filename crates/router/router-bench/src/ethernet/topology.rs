//! Three network namespaces in a row: the source, the node and the sink.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use router_ports::Namespace;

use super::{Error, system};

/// The names of the node's interfaces; their peers have the same names in the namespaces of the source and the sink.
pub const PORTS: [&str; 2] = ["bench0", "bench1"];
/// The addresses of the node, by side and family.
pub const NODE: [[IpNet; 2]; 2] = [networks(8, 1), networks(9, 1)];
/// The addresses of the source and of the sink, by family.
pub const HOSTS: [[IpNet; 2]; 2] = [networks(8, 2), networks(9, 2)];

/// Returns an address of each family in the networks of a side.
const fn networks(side: u8, host: u8) -> [IpNet; 2] {
    let v4 = Ipv4Addr::new(10, side, 0, host);
    let v6 = Ipv6Addr::new(0xfd00, side as u16, 0, 0, 0, 0, 0, host as u16);
    [IpNet::V4(Ipv4Net::new_assert(v4, 24)), IpNet::V6(Ipv6Net::new_assert(v6, 64))]
}

/// The network of a route, and an address in it to which packets are sent.
pub type Destination = (IpNet, IpAddr);

/// Returns the address of the sink in the family of the destination.
pub fn gateway(destination: IpAddr) -> IpAddr {
    HOSTS[1][usize::from(destination.is_ipv6())].addr()
}

/// Runs a closure on a separate thread in the namespace.
pub fn within<T: Send>(namespace: &Namespace, run: impl FnOnce() -> T + Send) -> Result<T, Error> {
    namespace.within(run).map_err(system("entering a network namespace"))
}
