//! The protocol between the command line and a monitor.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::proxy::PeerReport;

/// Version of the protocol. The two programs may be of different releases; a monitor refuses requests of another
/// version.
pub const VERSION: u32 = 1;

/// A request of the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Return the status.
    Status,
    /// Stop the monitor and its proxy.
    Stop,
}

/// A response of a monitor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// The status.
    Status(Box<Status>),
    /// The monitor is stopping; the channel closes when it has stopped.
    Stopping,
    /// The request is not understood, or its sender is not authorized.
    Refused {
        /// The reason.
        reason: String,
    },
}

/// The status of a monitor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Name of the node.
    pub node: String,
    /// Address of the node.
    pub address: IpAddr,
    /// Process number of the monitor.
    pub pid: u32,
    /// Start time in nanoseconds since 1970.
    pub started_at_ns: u64,
    /// Description of the device.
    pub device: String,
    /// Digest of the rack file, equal on all nodes of a rack.
    pub rack_digest: String,
    /// The model that links are slowed down to.
    pub timing: Option<String>,
    /// Classes and cores of the data partitions.
    pub partitions: Vec<Partition>,
    /// Direct connections, if the rack's trust allows them.
    #[serde(default)]
    pub direct: Option<Direct>,
    /// The proxy, if it runs.
    pub proxy: Option<Proxy>,
    /// Number of restarts of the proxy.
    pub proxy_restarts: u64,
    /// Links to the other nodes, by slot.
    pub links: Vec<Link>,
    /// Addresses at which programs of this node listen.
    pub listeners: Vec<SocketAddr>,
    /// Addresses of other nodes at which the proxy listens on their behalf.
    #[serde(rename = "mirrors")]
    pub remote_listeners: Vec<SocketAddr>,
    /// State of etcd, if the rack is described there.
    #[serde(default)]
    pub etcd: Option<Etcd>,
}

/// State of a monitor's connection with etcd.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Etcd {
    /// Address of the rack.
    pub address: String,
    /// Whether the last call was answered.
    pub is_reached: bool,
    /// Whether this monitor holds the node's lease, as far as it knows.
    #[serde(rename = "is_held")]
    pub holds_lease: bool,
    /// Number of times that etcd became unreachable.
    pub outages: u64,
    /// Number of changes of the rack that were applied.
    #[serde(rename = "changes_taken")]
    pub changes_applied: u64,
    /// Changed keys that take effect only after the nodes are brought down and up.
    pub restart_needed: Vec<String>,
    /// The current problem, if there is one.
    pub problem: Option<String>,
}

/// A data partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    /// `latency` or `bulk`.
    pub class: String,
    /// The core that owns the partition.
    pub core: Option<u16>,
}

/// Direct connections: those whose programs write windows themselves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Direct {
    /// Maximum number of simultaneous direct connections with each other node.
    pub spans: u64,
    /// Why there are none, in which case connections are forwarded by the proxies.
    pub obstacle: Option<String>,
}

/// A node's proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proxy {
    /// Process number.
    pub pid: u32,
    /// Whether it has mapped the device.
    pub is_ready: bool,
}

/// A link to another node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Name of the other node.
    pub peer: String,
    /// Address of the other node.
    pub address: IpAddr,
    /// `down`, `training` or `up`.
    pub state: String,
    /// Why the link is not up, as far as it is known.
    pub reason: Option<String>,
    /// Epoch of the link, which grows with each training.
    pub epoch: u32,
    /// Number of times that the link came up.
    pub ups: u64,
    /// Last round trip between the monitors in nanoseconds.
    pub round_trip_ns: Option<u64>,
    /// Traffic and events that the proxy counts.
    pub carried: PeerReport,
}
