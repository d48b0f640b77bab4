//! What the command line asks a node, and what it answers: JSON, in packets of the node's unix socket.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::control::message::RouteKind;

/// The version of these messages. Both may be of different releases: another version is answered with a refusal.
pub const VERSION: u32 = 1;
/// Routes in one answer at most.
pub const ROUTES_MAX: usize = 128;
/// Neighbours that a state names at most.
pub const NEIGHBOURS_SHOWN_MAX: usize = 128;
/// Differences that a reload names at most.
pub const CHANGES_SHOWN_MAX: usize = 64;
/// Steps of traced packets in one answer at most.
pub const STEPS_MAX: usize = 64;

/// From the command line to a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionedRequest {
    /// [`VERSION`].
    pub version: u32,
    /// What is asked.
    #[serde(rename = "ask")]
    pub request: Request,
}

/// What is asked of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Its state.
    Status,
    /// Its routes.
    Fib(FibQuery),
    /// To tell what becomes of packets, until the channel ends.
    Trace(TraceQuery),
    /// To read the cluster file again, and become what it says.
    Reload {
        /// Only to say whether that could be.
        is_trial: bool,
    },
    /// To end.
    Stop,
}

/// Which routes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FibQuery {
    /// The route that packets to this address take, and no other.
    pub address: Option<IpAddr>,
    /// Those within this network only.
    pub within: Option<IpNet>,
}

/// Which packets: all that match everything that is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceQuery {
    /// From these addresses.
    pub source: Option<IpNet>,
    /// To these addresses.
    pub destination: Option<IpNet>,
    /// The protocol's number.
    pub protocol: Option<u8>,
    /// A UDP or TCP port of either end.
    pub port: Option<u16>,
    /// Packets that are followed at most.
    pub packets_max: u32,
}

impl VersionedRequest {
    /// A request of this version.
    pub fn new(request: Request) -> Self {
        Self { version: VERSION, request }
    }
}

/// From a node to the command line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// Its state.
    Status(Box<Status>),
    /// Some of its routes; more answers follow until the last.
    Fib {
        /// In the order of their destinations.
        routes: Vec<Route>,
        /// No more follow.
        is_last: bool,
    },
    /// Steps of packets that are followed; the first answer has none and says that packets are followed from now on.
    Traced(Vec<TracedStep>),
    /// What is different in the cluster file, a line each; it has become so, but in a trial.
    Reloaded {
        /// At most [`CHANGES_SHOWN_MAX`], and how many more.
        changes: Vec<String>,
    },
    /// Nothing has changed, for this is wrong with the cluster file.
    #[serde(rename = "unfit")]
    InvalidConfig {
        /// File, line, key, value and remedy.
        fault: String,
    },
    /// It ends; the channel ends when it has.
    Stopping,
    /// It does not understand, or does not trust, whoever asks.
    Refused {
        /// Why.
        reason: String,
    },
}

/// A node's state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The node's name.
    pub node: String,
    /// Its process.
    pub pid: u32,
    /// When it started, since 1970.
    pub started_at_ns: u64,
    /// What joins it to other nodes.
    pub interconnect: String,
    /// How many packets go into a message.
    pub batch: String,
    /// Its ports, by number.
    pub ports: Vec<PortStatus>,
    /// The other nodes, by number.
    pub peers: Vec<PeerStatus>,
    /// Its routes.
    pub routes: RoutesStatus,
    /// Neighbours on its ports' networks, at most [`NEIGHBOURS_SHOWN_MAX`].
    pub neighbours: Vec<NeighbourStatus>,
    /// Packets that went no further, by reason: those of ports, and others.
    pub drops: BTreeMap<String, u64>,
    /// Packets to the node's own kernel, and from it.
    pub kernel: Traffic,
    /// ICMP errors that were sent.
    pub icmp_errors_sent: u64,
    /// ICMP errors that were not sent because there were too many.
    pub icmp_errors_suppressed: u64,
    /// Hosts that were told of a nearer way.
    pub redirects_sent: u64,
    /// Others that claimed an address of the node's.
    pub address_conflicts: u64,
    /// Buffers for packets that are free.
    pub buffers_free: u64,
    /// Buffers for packets in all.
    pub buffers: u64,
    /// How often news of the kernel were lost and all of it was read again.
    pub netlink_resyncs: u64,
}

/// Packets and bytes in both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Packets that came in.
    pub received_packets: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Packets that went out.
    pub sent_packets: u64,
    /// Their bytes.
    pub sent_bytes: u64,
}

/// A port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PortStatus {
    /// The interface.
    pub device: String,
    /// What it is reached by: `af-xdp`, `af-packet`, `tap` or `pcap`.
    pub kind: String,
    /// Why it is not reached by what was asked for first.
    pub fallback: Option<String>,
    /// Whether packets come and go.
    pub is_up: bool,
    /// Its hardware address.
    pub mac: String,
    /// Its longest packet.
    pub mtu_bytes: u16,
    /// Why that is shorter than the cluster file says, and what to do.
    #[serde(default)]
    pub mtu_cut: Option<String>,
    /// Its addresses.
    pub addresses: Vec<IpNet>,
    /// Of those, and its link-local one, which are looked for on its network and not used yet.
    pub addresses_tentative: Vec<IpAddr>,
    /// Which are not used, for somebody else has them.
    pub addresses_duplicate: Vec<IpAddr>,
    /// What went through it.
    pub traffic: Traffic,
    /// What came in here, or should have left here, and went no further, by reason.
    pub drops: BTreeMap<String, u64>,
    /// Frames that were lost before they reached the router, because it was too slow.
    pub receive_overflows: u64,
    /// Frames that came in and that the port could not make sense of.
    pub receive_unusable: u64,
    /// Frames that the device did not take.
    pub transmit_refused: u64,
}

/// Another node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerStatus {
    /// Its name.
    pub node: String,
    /// `up`, `joining` or `down`.
    pub state: String,
    /// Why it is not up, as far as known.
    pub reason: Option<String>,
    /// Destinations that it announces.
    pub routes: u64,
    /// Packets and messages between this node and it.
    pub traffic: PeerTraffic,
    /// How often it was lost.
    pub losses: u64,
    /// From the moment when it was known to be lost until no packet was sent to it any more: of the last time.
    pub withdrawn_us: Option<u64>,
}

/// Packets between two nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerTraffic {
    /// Packets sent.
    pub sent_packets: u64,
    /// Messages that they went in.
    pub sent_messages: u64,
    /// Packets received.
    pub received_packets: u64,
    /// Messages that they came in.
    pub received_messages: u64,
    /// Packets that went over a third node.
    pub detoured_packets: u64,
    /// Packets that were passed on to a third node.
    pub relayed_packets: u64,
    /// Packets dropped on the way, for whatever reason.
    pub dropped_packets: u64,
    /// Messages that pretended to be its own, and were not heard.
    #[serde(default)]
    pub forged_messages: u64,
}

/// How many routes there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutesStatus {
    /// IPv4 destinations that packets are forwarded to.
    pub v4: u64,
    /// IPv6 destinations.
    pub v6: u64,
    /// Destinations that this node announces.
    pub announced: u64,
    /// Routes to other nodes' destinations that this node's kernel has from here.
    pub installed: u64,
    /// Destinations that are announced and that its tables have no room for: packets to them take wider routes.
    #[serde(default)]
    pub left_out: u64,
    /// Routes of this node's kernel that are not the cluster's, in all of their ways or some: by interfaces that are no
    /// ports.
    #[serde(default)]
    pub by_no_port: u64,
    /// The same, because the kernel wraps packets that take them.
    #[serde(default)]
    pub encapsulated: u64,
    /// Routes of this node's kernel that are the cluster's without their own MTU.
    #[serde(default)]
    pub mtu_unheeded: u64,
}

/// A neighbour.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NeighbourStatus {
    /// The port.
    pub port: String,
    /// Its address.
    pub address: IpAddr,
    /// Its hardware address, once known.
    pub mac: Option<String>,
    /// As RFC 4861 calls it.
    pub state: String,
}

/// A route.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Its destinations.
    pub to: IpNet,
    /// The lowest one of all nodes' routes to them.
    pub metric: u32,
    /// What becomes of packets.
    pub kind: RouteKind,
    /// Equal ways, for those that go one; none while the nodes that announced it are being taken out.
    pub hops: Vec<RouteHop>,
    /// The tables have no room for it: packets take a wider route, or none.
    #[serde(default)]
    pub is_left_out: bool,
}

/// One way out of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RouteHop {
    /// The node that sends.
    pub node: String,
    /// The port that it sends by; `kernel` for the node itself.
    pub port: String,
    /// Whom it sends to, by that node's numbering; 0 for whoever has the address.
    pub adjacency: u16,
    /// How many parts of the flows go there, beside those of the other ways.
    pub weight: u16,
}

/// What became of a packet at one place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedStep {
    /// When, since the node started.
    pub time_ns: u64,
    /// The packet's source.
    pub source: IpAddr,
    /// Its destination.
    pub destination: IpAddr,
    /// Its protocol's number.
    pub protocol: u8,
    /// The source port of UDP or TCP, else 0.
    pub source_port: u16,
    /// The destination port.
    pub destination_port: u16,
    /// What.
    pub step: String,
}
