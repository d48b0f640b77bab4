//! The types that a cluster file is parsed into, and their defaults.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use config::nanoseconds;
use ipnet::IpNet;
use router::{NodeId, PortId, Vlan};
use serde::Deserialize;

use super::hash::fnv1a;
use super::schema::{self, Balance, Batch, FilterMode, InterconnectKind, PortKind};

/// Version of the cluster files that this release reads.
pub const VERSION: u32 = 1;
/// Maximum number of static routes per node. More routes, or changing ones, come from a routing daemon.
pub const ROUTES_MAX: usize = 1024;
/// Maximum number of addresses of a port, or of a node itself.
pub const ADDRESSES_MAX: usize = 16;
/// Maximum length of an interface name in bytes, without the terminating zero.
pub const DEVICE_BYTES_MAX: usize = 15;

/// A cluster file. The names of its fields and types are part of [`Cluster::digest`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// [`VERSION`], checked before everything else.
    pub version: u32,
    /// Names the directory of the running cluster, together with a hash of the file's path.
    #[serde(default = "name_default")]
    pub name: String,
    /// The interconnect of the nodes.
    #[serde(default)]
    pub interconnect: Interconnect,
    /// The file with the key by which nodes on several machines authenticate each other.
    #[serde(default)]
    pub key: Option<PathBuf>,
    /// Time limits.
    #[serde(default)]
    pub timeouts: Timeouts,
    /// The nodes. A node's index is its [`NodeId`].
    pub nodes: Vec<Node>,
}

/// How nodes exchange packets, and how packets are batched into messages.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Interconnect {
    /// The transport of packets between nodes.
    pub kind: InterconnectKind,
    /// Packets per message.
    pub batch: Batch,
    /// Latency target of an adaptive batch, in nanoseconds.
    #[serde(deserialize_with = "nanoseconds")]
    pub latency_target_ns: f64,
    /// How packets are routed to their egress node.
    pub balance: Balance,
    /// The modelled link of windows; `gen3x16` if absent.
    pub timing: Option<rack::Timing>,
}

/// Time limits.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Timeouts {
    /// Keepalive interval: see [`Cluster::keepalive_ns`].
    #[serde(deserialize_with = "schema::optional_nanoseconds")]
    pub beat_ns: Option<f64>,
    /// Hold time: see [`Cluster::hold_ns`].
    #[serde(deserialize_with = "schema::optional_nanoseconds")]
    pub silence_ns: Option<f64>,
    /// How long `crosslane router up` waits for the sessions between the nodes.
    #[serde(deserialize_with = "nanoseconds")]
    pub up_ns: f64,
    /// How long the routes of a restarting routing daemon are kept; 0 for not at all.
    #[serde(deserialize_with = "nanoseconds")]
    pub stale_routes_ns: f64,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// Its network namespace: a name of `ip netns`, or a path. If absent, the node keeps the namespace that it is
    /// started in.
    #[serde(default)]
    pub namespace: Option<PathBuf>,
    /// Its control address, for nodes on several machines. Either all nodes have one, or none.
    #[serde(default)]
    pub control: Option<SocketAddr>,
    /// The address of its RoCE over UDP traffic.
    #[serde(default)]
    pub fabric: Option<SocketAddr>,
    /// A loopback address at which metrics are served in addition to the unix socket.
    #[serde(default)]
    pub metrics: Option<SocketAddr>,
    /// Addresses of the node itself, reachable whichever of its ports is down.
    #[serde(default, deserialize_with = "schema::addresses")]
    pub addresses: Vec<IpAddr>,
    /// Whether it sends ICMP redirects.
    #[serde(default = "redirects_default")]
    pub redirects: bool,
    /// What it does about packet filters of its namespace.
    #[serde(default)]
    pub filters: FilterMode,
    /// Its ports. A port's index is its [`PortId`].
    pub ports: Vec<PortOfNode>,
    /// Static routes.
    #[serde(default)]
    pub routes: Vec<StaticRoute>,
}

/// A port of a node.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortOfNode {
    /// The interface name; for a pcap port or a VLAN, a name for the port.
    pub device: String,
    /// How the interface is accessed.
    #[serde(default)]
    pub kind: PortKind,
    /// MTU: the largest packet, IP header included. If absent, that of the interface.
    #[serde(default)]
    pub mtu_bytes: Option<u16>,
    /// Addresses with prefix lengths, for ports without a kernel interface: TAP, pcap and VLAN.
    #[serde(default, deserialize_with = "schema::networks")]
    pub addresses: Vec<IpNet>,
    /// The capture file that a pcap port receives from.
    #[serde(default)]
    pub input: Option<PathBuf>,
    /// The capture file that a pcap port sends to.
    #[serde(default)]
    pub output: Option<PathBuf>,
    /// The device of the parent port of a VLAN, which precedes it in the file.
    #[serde(default)]
    pub parent: Option<String>,
    /// The VLAN identifier in the tag.
    #[serde(default)]
    pub vlan: Option<u16>,
}

/// A static route.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StaticRoute {
    /// The destination prefix.
    #[serde(deserialize_with = "schema::network")]
    pub to: IpNet,
    /// The port's device.
    pub port: String,
    /// The next hop; if absent, destinations are on the port's own network.
    #[serde(default, deserialize_with = "schema::address")]
    pub via: Option<IpAddr>,
    /// Of two routes to the same prefix, the lower metric is preferred.
    #[serde(default)]
    pub metric: u32,
}

impl Default for Interconnect {
    fn default() -> Self {
        Self {
            kind: InterconnectKind::Lane,
            batch: Batch::Adaptive,
            latency_target_ns: 10_000.0,
            balance: Balance::Direct,
            timing: None,
        }
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { beat_ns: None, silence_ns: None, up_ns: 1e10, stale_routes_ns: 0.0 }
    }
}

impl Cluster {
    /// Returns the node with this name.
    pub fn node(&self, name: &str) -> Option<(NodeId, &Node)> {
        let index = self.nodes.iter().position(|node| node.name == name)?;
        Some((NodeId(index as u8), &self.nodes[index]))
    }

    /// Returns the node with this number.
    pub fn node_of(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(usize::from(id.0))
    }

    /// Returns whether the nodes are on several machines. On a single machine the kernel reports at once that a node
    /// has died, and a silent node is waiting for a CPU.
    fn spans_machines(&self) -> bool {
        self.nodes.iter().any(|node| node.control.is_some())
    }

    /// Returns the keepalive interval in nanoseconds: by default 100 ms between machines and 500 ms on one machine.
    pub fn keepalive_ns(&self) -> f64 {
        self.timeouts.beat_ns.unwrap_or(if self.spans_machines() { 1e8 } else { 5e8 })
    }

    /// Returns the hold time in nanoseconds, after which a silent node counts as dead: by default four keepalive
    /// intervals.
    pub fn hold_ns(&self) -> f64 {
        self.timeouts.silence_ns.unwrap_or(4.0 * self.keepalive_ns())
    }

    /// Returns the names of the nodes for display.
    pub fn names(&self) -> String {
        self.nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>().join(", ")
    }

    /// Returns the hash that two nodes compare to check that they use the same cluster file. It covers everything but
    /// the path of the key, which may differ between machines.
    pub fn digest(&self) -> u64 {
        let shared = Self { key: None, ..self.clone() };
        fnv1a(format!("{shared:?}").as_bytes())
    }
}

impl Node {
    /// Returns the parent port and the identifier of a VLAN.
    pub fn vlan(&self, port: &PortOfNode) -> Option<Vlan> {
        let (parent, _) = self.port(port.parent.as_deref()?)?;
        Some(Vlan { parent, id: port.vlan? })
    }

    /// Returns the ports that have no kernel interface, whose networks the kernel does not know.
    pub fn ports_without_kernel(&self) -> Vec<PortId> {
        let without = |(_, port): &(usize, &PortOfNode)| !port.kind.has_kernel();
        self.ports.iter().enumerate().filter(without).map(|(index, _)| PortId(index as u8)).collect()
    }

    /// Returns the sorted identifiers of the VLANs on a port.
    pub fn vlans_of(&self, device: &str) -> Vec<u16> {
        let of_port = self.ports.iter().filter(|port| port.parent.as_deref() == Some(device));
        let mut numbers: Vec<u16> = of_port.filter_map(|port| port.vlan).collect();
        numbers.sort_unstable();
        numbers
    }

    /// Returns the port of a device.
    pub fn port(&self, device: &str) -> Option<(PortId, &PortOfNode)> {
        let index = self.ports.iter().position(|port| port.device == device)?;
        Some((PortId(index as u8), &self.ports[index]))
    }
}

/// RFC 1812 and RFC 4861 require redirects, and Linux sends them.
fn redirects_default() -> bool {
    true
}

fn name_default() -> String {
    "cluster".to_owned()
}
