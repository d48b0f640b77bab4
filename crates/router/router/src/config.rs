//! The configuration of a forwarder and its ports.

use ipnet::IpNet;
use packet::ethernet::MacAddress;

use crate::{NodeId, PortId, Rate};

/// The configuration of a forwarder.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The node.
    pub node: NodeId,
    /// Seed of random delays, such as those of neighbour states.
    pub seed: u64,
    /// Bounds of the slow path.
    pub limits: Limits,
    /// Whether ICMP redirects are sent when the next hop is on the network from which a packet came.
    pub redirects: bool,
}

impl Config {
    /// Returns the default configuration: default bounds, and redirects as in RFC 1812, RFC 4861 and Linux.
    pub fn new(node: NodeId) -> Config {
        Config { node, seed: 1, limits: Limits::default(), redirects: true }
    }
}

/// Who forwards transit packets: packets that are not for this node and not from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransitPath {
    /// The router.
    #[default]
    Router,
    /// The node's kernel, so that its packet filters apply: packets from ports with a kernel interface are left to it,
    /// all others are passed to it. What it sends through the router is forwarded.
    Kernel,
    /// Nobody: they are dropped.
    Closed,
}

/// Bounds of a forwarder's slow path.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Size of the neighbour table. All ports share a third of it equally, neighbours that routes refer to have
    /// another one, and the rest is for numbers that are not reusable yet.
    pub neighbours_max: u16,
    /// Maximum number of neighbours of a port that no route refers to, if its share is not smaller. Of these, a quarter
    /// may be incomplete, and an eighth unconfirmed: stated by messages, and not verified yet. As large as the hard
    /// limit of Linux, `gc_thresh3`.
    pub neighbours_of_port_max: u16,
    /// Maximum number of packets queued for the resolution of one neighbour.
    pub pending_packets_of_neighbour_max: usize,
    /// Maximum number of packets queued for the resolution of all neighbours; the ports share it equally.
    pub pending_packets_max: usize,
    /// Rate of ARP requests and neighbour solicitations of each port.
    pub solicitations: Rate,
    /// Rate of neighbours learned without a solicitation, of each port.
    pub learned: Rate,
    /// Rate of ICMP and ICMPv6 errors (RFC 1812, section 4.3.2.8; RFC 4443, section 2.4 f).
    pub icmp_errors: Rate,
    /// Rate of redirects, which a host may ignore.
    pub redirects: Rate,
    /// Rate of ARP replies and neighbour advertisements of each port without a kernel, and of echo replies and MLD
    /// reports of all of them.
    pub replies: Rate,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            neighbours_max: 24_576,
            neighbours_of_port_max: 1024,
            pending_packets_of_neighbour_max: 8,
            pending_packets_max: 1024,
            solicitations: Rate { per_second: 2000, burst: 200 },
            learned: Rate { per_second: 200, burst: 128 },
            icmp_errors: Rate { per_second: 1000, burst: 200 },
            redirects: Rate { per_second: 20, burst: 20 },
            replies: Rate { per_second: 20_000, burst: 1000 },
        }
    }
}

/// The VLAN of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vlan {
    /// Port that carries the tagged frames; it must not have a VLAN itself.
    pub parent: PortId,
    /// VLAN identifier, 1 to 4094.
    pub id: u16,
}

/// The configuration of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortConfig {
    /// MAC address.
    pub mac: MacAddress,
    /// MTU: maximum length of IP packets in bytes.
    pub mtu_bytes: u16,
    /// VLAN, if the port sends and receives tagged frames through a parent port.
    pub vlan: Option<Vlan>,
    /// Whether a kernel also receives the port's frames: it answers ARP, neighbour discovery and echo requests for its
    /// addresses, and receives packets to them.
    pub has_kernel: bool,
    /// Whether duplicate address detection precedes the use of addresses.
    pub probes: bool,
    /// Whether the port's device takes large packets ([`Pool::set_large`](crate::Pool::set_large)) and segments them.
    pub takes_large: bool,
    /// Whether the port is up.
    pub is_up: bool,
    /// Addresses with the prefix lengths of their networks, including link-local ones.
    pub addresses: Vec<IpNet>,
}

impl PortConfig {
    /// Returns the configuration of a port that is up, without a kernel, a VLAN or addresses, and takes no
    /// large packets.
    pub fn new(mac: MacAddress, mtu_bytes: u16) -> PortConfig {
        let (has_kernel, probes, takes_large, is_up) = (false, false, false, true);
        PortConfig { mac, mtu_bytes, vlan: None, has_kernel, probes, takes_large, is_up, addresses: Vec::new() }
    }

    /// Sets the addresses.
    #[must_use]
    pub fn with_addresses(mut self, addresses: impl IntoIterator<Item = IpNet>) -> PortConfig {
        self.addresses = addresses.into_iter().collect();
        self
    }
}
