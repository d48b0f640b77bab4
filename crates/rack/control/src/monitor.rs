//! Monitor and command line.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::proxy::PeerReport;

/// The version of these messages. Both may be of different releases: another version is answered with a refusal.
pub const VERSION: u32 = 1;

/// From the command line to a monitor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// [`VERSION`].
    pub version: u32,
    /// What is asked.
    pub ask: Ask,
}

/// What is asked of a monitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ask {
    /// Its state.
    Status,
    /// To end, with its proxy.
    Stop,
}

impl Request {
    /// A request of this version.
    pub fn new(ask: Ask) -> Self {
        Self { version: VERSION, ask }
    }
}

/// From a monitor to the command line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Its state.
    Status(Box<Status>),
    /// It ends; the channel ends when it has.
    Stopping,
    /// It does not understand, or does not trust, whoever asks.
    Refused {
        /// Why.
        reason: String,
    },
}

/// A monitor's state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The node's name.
    pub node: String,
    /// Its address.
    pub address: IpAddr,
    /// Its process.
    pub pid: u32,
    /// When it started, since 1970.
    pub started_at_ns: u64,
    /// What the device is.
    pub device: String,
    /// The digest of its rack file: all nodes of a rack have the same.
    pub rack_digest: String,
    /// The model that links are slowed down to.
    pub timing: Option<String>,
    /// Its data partitions' classes and cores.
    pub partitions: Vec<Partition>,
    /// Connections whose programs store into the windows themselves, where they are trusted with that.
    #[serde(default)]
    pub direct: Option<Direct>,
    /// The proxy, when it runs.
    pub proxy: Option<Proxy>,
    /// How often a proxy was started again.
    pub proxy_restarts: u64,
    /// One to each other node, by slot.
    pub links: Vec<Link>,
    /// Where programs of this node listen.
    pub listeners: Vec<SocketAddr>,
    /// Where the proxy listens in the place of other nodes.
    pub mirrors: Vec<SocketAddr>,
    /// How etcd is, where the rack lies there.
    #[serde(default)]
    pub etcd: Option<Etcd>,
}

/// How a monitor gets on with etcd.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Etcd {
    /// Where the rack lies.
    pub address: String,
    /// Whether etcd answered last.
    pub is_reached: bool,
    /// Whether the node's lease is this monitor's, as far as known.
    pub is_held: bool,
    /// How often etcd stopped to answer.
    pub outages: u64,
    /// Changes of the rack that were taken on.
    pub changes_taken: u64,
    /// Keys of a rack file that have changed and need the nodes to be brought down and up.
    pub restart_needed: Vec<String>,
    /// What is wrong, as far as anything is.
    pub problem: Option<String>,
}

/// A data partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    /// `latency` or `bulk`.
    pub class: String,
    /// The core that owns it.
    pub core: Option<u16>,
}

/// What programs that are trusted with windows get of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Direct {
    /// Connections at a time, with each other node.
    pub spans: u64,
    /// Why it is none: programs go by the proxies then.
    pub obstacle: Option<String>,
}

/// A node's proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proxy {
    /// Its process.
    pub pid: u32,
    /// It has the device.
    pub is_ready: bool,
}

/// A link to another node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// The other node's name.
    pub peer: String,
    /// Its address.
    pub address: IpAddr,
    /// `down`, `training` or `up`.
    pub state: String,
    /// Why it is not up, as far as known.
    pub reason: Option<String>,
    /// The number of its training.
    pub epoch: u32,
    /// How often it came up.
    pub ups: u64,
    /// The last round trip between the monitors.
    pub round_trip_ns: Option<u64>,
    /// What the proxy has carried.
    pub carried: PeerReport,
}
