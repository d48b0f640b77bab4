//! What a forwarder is told of its node and ports.

use ipnet::IpNet;
use packet::ethernet::MacAddress;

use crate::{NodeId, PortId, Rate};

/// What a forwarder is told once.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Which node it is.
    pub node: NodeId,
    /// Decides what is random: when neighbours are asked again.
    pub seed: u64,
    /// What is bounded.
    pub limits: Limits,
    /// Whether hosts are told of a nearer way: a packet's next hop is on the network that it came from.
    pub redirects: bool,
}

impl Config {
    /// This node with the usual bounds, which tells of nearer ways as RFC 1812 and RFC 4861 want it, and as Linux does.
    pub fn new(node: NodeId) -> Config {
        Config { node, seed: 1, limits: Limits::default(), redirects: true }
    }
}

/// Bounds of a forwarder's slow path.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Neighbours that are known or asked for, of all ports.
    pub neighbours_max: u16,
    /// Neighbours that are asked for and have never answered; fewer than `neighbours_max`, so that a scan of an empty
    /// network leaves room for who is there.
    pub neighbours_incomplete_max: u16,
    /// Packets that wait for one neighbour's hardware address.
    pub pending_packets_of_neighbour_max: usize,
    /// Packets that wait for any neighbour's.
    pub pending_packets_max: usize,
    /// ARP requests and neighbour solicitations, of all ports.
    pub solicitations: Rate,
    /// Neighbours that are learnt without having been asked for.
    pub learned: Rate,
    /// ICMP and ICMPv6 errors that are sent (RFC 1812, section 4.3.2.8; RFC 4443, section 2.4 f).
    pub icmp_errors: Rate,
    /// Redirects: a host that does not believe them goes on as it does.
    pub redirects: Rate,
    /// Echo replies and neighbour messages that are sent in answer to others', on ports without a kernel.
    pub replies: Rate,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            neighbours_max: 8192,
            neighbours_incomplete_max: 2048,
            pending_packets_of_neighbour_max: 8,
            pending_packets_max: 1024,
            solicitations: Rate { per_second: 2000, burst: 200 },
            learned: Rate { per_second: 2000, burst: 500 },
            icmp_errors: Rate { per_second: 1000, burst: 200 },
            redirects: Rate { per_second: 20, burst: 20 },
            replies: Rate { per_second: 20_000, burst: 1000 },
        }
    }
}

/// A VLAN on another port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vlan {
    /// The port whose frames have the tag; it has no VLAN itself.
    pub parent: PortId,
    /// 1 to 4094.
    pub id: u16,
}

/// What a forwarder is told of a port, and told again when it changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortConfig {
    /// The port's own hardware address.
    pub mac: MacAddress,
    /// The longest IP packet that leaves by it.
    pub mtu_bytes: u16,
    /// A port of a VLAN: its frames come and go through its parent, with the tag.
    pub vlan: Option<Vlan>,
    /// A kernel sees the port's frames too: it answers ARP, neighbour discovery and echo requests for its addresses,
    /// and takes what is for them.
    pub has_kernel: bool,
    /// The port's addresses are looked for on its network before they are used.
    pub probes: bool,
    /// Whether packets come and go.
    pub is_up: bool,
    /// The port's own addresses, each with its network's prefix length. Link-local ones too.
    pub addresses: Vec<IpNet>,
}

impl PortConfig {
    /// A port that is up, without a kernel, a VLAN or addresses.
    pub fn new(mac: MacAddress, mtu_bytes: u16) -> PortConfig {
        let (has_kernel, probes, is_up) = (false, false, true);
        PortConfig { mac, mtu_bytes, vlan: None, has_kernel, probes, is_up, addresses: Vec::new() }
    }

    /// With these addresses.
    #[must_use]
    pub fn with_addresses(mut self, addresses: impl IntoIterator<Item = IpNet>) -> PortConfig {
        self.addresses = addresses.into_iter().collect();
        self
    }
}
