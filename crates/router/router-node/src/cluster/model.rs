//! The types that a cluster file is parsed into, and their defaults.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use config::nanoseconds;
use ipnet::IpNet;
use router::{NodeId, PortId, Vlan};
use serde::Deserialize;

use super::hash::fnv1a;
use super::schema::{self, Balance, Batch, InterconnectKind, PortKind};

/// The version of cluster files that this release reads.
pub const VERSION: u32 = 1;
/// Static routes of a node at most: what changes, or is more, is a routing daemon's to say.
pub const ROUTES_MAX: usize = 1024;
/// Addresses of a port or of a node itself at most.
pub const ADDRESSES_MAX: usize = 16;
/// Bytes of an interface's name at most, without its end.
pub const DEVICE_BYTES_MAX: usize = 15;

/// What a cluster file says.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// [`VERSION`], checked before anything else is looked at.
    pub version: u32,
    /// Names the directory of the running cluster, with a hash of the file's path.
    #[serde(default = "name_default")]
    pub name: String,
    /// What joins the nodes.
    #[serde(default)]
    pub interconnect: Interconnect,
    /// The file with the key by which nodes of several machines know each other.
    #[serde(default)]
    pub key: Option<PathBuf>,
    /// How long things may take.
    #[serde(default)]
    pub timeouts: Timeouts,
    /// The nodes. A node's place in this list is its [`NodeId`].
    pub nodes: Vec<Node>,
}

/// What joins the nodes, and how packets share its messages.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Interconnect {
    /// What carries packets between nodes.
    pub kind: InterconnectKind,
    /// How many packets go into one message.
    pub batch: Batch,
    /// How long a message may take that holds several packets, where the batch is adaptive.
    #[serde(deserialize_with = "nanoseconds")]
    pub latency_target_ns: f64,
    /// Which way packets take.
    pub balance: Balance,
    /// The link that windows pretend to be; `gen3x16` without it.
    pub timing: Option<rack::Timing>,
}

/// How long things may take.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Timeouts {
    /// How often a node says to each other one that it is there: see [`Cluster::keepalive_ns`].
    #[serde(deserialize_with = "schema::optional_nanoseconds")]
    pub beat_ns: Option<f64>,
    /// Silence after which another node counts as dead: see [`Cluster::hold_ns`].
    #[serde(deserialize_with = "schema::optional_nanoseconds")]
    pub silence_ns: Option<f64>,
    /// How long `crosslane router up` waits for the nodes to meet.
    #[serde(deserialize_with = "nanoseconds")]
    pub up_ns: f64,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// The network namespace that it works in: a name of `ip netns`, or a path; the one that it is started in without.
    #[serde(default)]
    pub namespace: Option<PathBuf>,
    /// Where other nodes reach it, when the nodes are on several machines; all nodes say so, or none.
    #[serde(default)]
    pub control: Option<SocketAddr>,
    /// Where it exchanges packets with others, by RoCE over UDP.
    #[serde(default)]
    pub fabric: Option<SocketAddr>,
    /// Addresses of the node itself, beside those of its ports: they are reached whatever port is down.
    #[serde(default, deserialize_with = "schema::addresses")]
    pub addresses: Vec<IpAddr>,
    /// Whether it tells hosts of a nearer way.
    #[serde(default = "redirects_default")]
    pub redirects: bool,
    /// What it is plugged into. A port's place in this list is its [`PortId`].
    pub ports: Vec<PortOfNode>,
    /// Routes that no kernel and no daemon says.
    #[serde(default)]
    pub routes: Vec<StaticRoute>,
}

/// A port of a node.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortOfNode {
    /// The interface's name; of a pcap port or a VLAN a name for it.
    pub device: String,
    /// How the interface is reached.
    #[serde(default)]
    pub kind: PortKind,
    /// Its largest packet, IP header and all; the interface's own without it.
    #[serde(default)]
    pub mtu_bytes: Option<u16>,
    /// Its addresses with the lengths of their networks, where no kernel has them: of TAP and pcap ports and VLANs.
    #[serde(default, deserialize_with = "schema::networks")]
    pub addresses: Vec<IpNet>,
    /// The file that a pcap port receives.
    #[serde(default)]
    pub input: Option<PathBuf>,
    /// The file that a pcap port sends into.
    #[serde(default)]
    pub output: Option<PathBuf>,
    /// The device of the port that a VLAN is on; it stands before it.
    #[serde(default)]
    pub parent: Option<String>,
    /// A VLAN's number, which is in the tag.
    #[serde(default)]
    pub vlan: Option<u16>,
}

/// A route that is as long as the node.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StaticRoute {
    /// Which destinations.
    #[serde(deserialize_with = "schema::network")]
    pub to: IpNet,
    /// The port's device.
    pub port: String,
    /// The next router; without it destinations are on the port's own network.
    #[serde(default, deserialize_with = "schema::address")]
    pub via: Option<IpAddr>,
    /// Of two routes to the same destinations the lower one is taken.
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
        Self { beat_ns: None, silence_ns: None, up_ns: 1e10 }
    }
}

impl Cluster {
    /// The node of a name.
    pub fn node(&self, name: &str) -> Option<(NodeId, &Node)> {
        let index = self.nodes.iter().position(|node| node.name == name)?;
        Some((NodeId(index as u8), &self.nodes[index]))
    }

    /// The node of a number, if there is one.
    pub fn node_of(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(usize::from(id.0))
    }

    /// Whether the nodes are on several machines. On one, the kernel says at once when a node has died, and one that is
    /// silent waits for a processor.
    fn spans_machines(&self) -> bool {
        self.nodes.iter().any(|node| node.control.is_some())
    }

    /// Nanoseconds from one beat of a node to the next: 20 ms between machines, 500 ms on one, if nothing else is said.
    pub fn keepalive_ns(&self) -> f64 {
        self.timeouts.beat_ns.unwrap_or(if self.spans_machines() { 2e7 } else { 5e8 })
    }

    /// Nanoseconds of silence after which another node counts as dead: four beats, if nothing else is said.
    pub fn hold_ns(&self) -> f64 {
        self.timeouts.silence_ns.unwrap_or(4.0 * self.keepalive_ns())
    }

    /// The nodes' names, for people.
    pub fn names(&self) -> String {
        self.nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>().join(", ")
    }

    /// What two nodes compare, to see that they are of the same cluster: a hash of everything that the file says, but
    /// for where a machine keeps the key.
    pub fn digest(&self) -> u64 {
        let shared = Self { key: None, ..self.clone() };
        fnv1a(format!("{shared:?}").as_bytes())
    }
}

impl Node {
    /// The port that a VLAN is on, and its number there.
    pub fn vlan(&self, port: &PortOfNode) -> Option<Vlan> {
        let (parent, _) = self.port(port.parent.as_deref()?)?;
        Some(Vlan { parent, id: port.vlan? })
    }

    /// Ports without a kernel, whose networks no kernel knows.
    pub fn ports_without_kernel(&self) -> Vec<PortId> {
        let without = |(_, port): &(usize, &PortOfNode)| !port.kind.has_kernel();
        self.ports.iter().enumerate().filter(without).map(|(place, _)| PortId(place as u8)).collect()
    }

    /// The numbers of the VLANs on a port, in their order.
    pub fn vlans_of(&self, device: &str) -> Vec<u16> {
        let of_port = self.ports.iter().filter(|port| port.parent.as_deref() == Some(device));
        let mut numbers: Vec<u16> = of_port.filter_map(|port| port.vlan).collect();
        numbers.sort_unstable();
        numbers
    }

    /// The port of a device.
    pub fn port(&self, device: &str) -> Option<(PortId, &PortOfNode)> {
        let index = self.ports.iter().position(|port| port.device == device)?;
        Some((PortId(index as u8), &self.ports[index]))
    }
}

/// As RFC 1812 and RFC 4861 want it, and as Linux does.
fn redirects_default() -> bool {
    true
}

fn name_default() -> String {
    "cluster".to_owned()
}
