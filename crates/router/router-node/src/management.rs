//! The management protocol between the command line and a node: JSON messages over the node's unix socket.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::control::message::RouteKind;

/// Version of these messages. The command and the node may be of different releases: a node refuses another version.
pub const VERSION: u32 = 1;
/// Maximum number of routes in one response.
pub const ROUTES_MAX: usize = 128;
/// Maximum number of neighbours that a status lists.
pub const NEIGHBOURS_SHOWN_MAX: usize = 128;
/// Maximum number of differences that a reload lists.
pub const CHANGES_SHOWN_MAX: usize = 64;
/// Maximum number of traced steps in one response.
pub const STEPS_MAX: usize = 64;

/// A request of the command line to a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// The state of the node.
    Status,
    /// Routes of the node's forwarding tables.
    Fib(FibQuery),
    /// Reports the steps of matching packets until the channel ends.
    Trace(TraceQuery),
    /// Captures the frames of a port; answered with the reading end of a pipe.
    Capture(CaptureQuery),
    /// Reads the cluster file again and applies it.
    Reload {
        /// Checks the file without applying it.
        is_trial: bool,
    },
    /// Ends the node.
    Stop,
}

/// Selects routes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FibQuery {
    /// Only the route that packets to this address take.
    pub address: Option<IpAddr>,
    /// Only routes within this network.
    pub within: Option<IpNet>,
}

/// Selects the packets that match all given fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceQuery {
    /// Source addresses.
    pub source: Option<IpNet>,
    /// Destination addresses.
    pub destination: Option<IpNet>,
    /// IP protocol number.
    pub protocol: Option<u8>,
    /// UDP or TCP port, source or destination.
    pub port: Option<u16>,
    /// Maximum number of packets that are traced.
    pub packets_max: u32,
}

/// Selects a port, and the frames of it that are captured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureQuery {
    /// The device of the port.
    pub port: String,
    /// Largest number of bytes kept of a frame.
    pub frame_bytes_max: u32,
    /// Number of frames after which the capture ends.
    pub frames_max: u64,
}

/// A response of a node to the command line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// The state of the node.
    Status(Box<Status>),
    /// Some of the routes; more responses follow until the last one.
    Fib {
        /// Routes in the order of their destinations.
        routes: Vec<Route>,
        /// No more responses follow.
        is_last: bool,
    },
    /// Steps of traced packets. The first response is empty: it confirms that tracing has begun.
    Traced(Vec<TracedStep>),
    /// The capture has begun; its pcapng file comes from the pipe whose reading end is attached.
    Capturing,
    /// The differences in the cluster file, one line each. They are applied, except in a trial.
    Reloaded {
        /// At most [`CHANGES_SHOWN_MAX`] lines, then the number of those left out.
        changes: Vec<String>,
    },
    /// The cluster file is invalid; nothing has changed.
    #[serde(rename = "unfit")]
    InvalidConfig {
        /// File, line, key, value and remedy.
        fault: String,
    },
    /// The node ends, and closes the channel when it has ended.
    Stopping,
    /// The node does not understand the request, or does not trust its sender.
    Refused {
        /// The reason.
        reason: String,
    },
}

/// The state of a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The node's name.
    pub node: String,
    /// Its process ID.
    pub pid: u32,
    /// When it started, in nanoseconds since 1970.
    pub started_at_ns: u64,
    /// The kind of its interconnect.
    pub interconnect: String,
    /// The batch size: packets per message, or `adaptive`.
    pub batch: String,
    /// Its ports, by number.
    pub ports: Vec<PortStatus>,
    /// The other nodes, by number.
    pub peers: Vec<PeerStatus>,
    /// Packet filters of its namespace that apply, or would apply, to packets that it forwards.
    #[serde(default)]
    pub filters: FiltersStatus,
    /// Its routes.
    pub routes: RoutesStatus,
    /// Its stale routes, by protocol.
    #[serde(default)]
    pub stale_routes: Vec<StaleRoutesStatus>,
    /// Neighbours on its ports' networks, at most [`NEIGHBOURS_SHOWN_MAX`].
    pub neighbours: Vec<NeighbourStatus>,
    /// Dropped packets by reason, except those counted at a port.
    pub drops: BTreeMap<String, u64>,
    /// Packets exchanged with the node's own kernel.
    pub kernel: Traffic,
    /// ICMP errors sent.
    pub icmp_errors_sent: u64,
    /// ICMP errors suppressed by the rate limit.
    pub icmp_errors_suppressed: u64,
    /// ICMP redirects sent.
    pub redirects_sent: u64,
    /// Neighbours not learned from their messages, because of the limits of their port.
    #[serde(default)]
    pub neighbours_refused: u64,
    /// Address conflicts: other hosts that claimed an address of the node.
    pub address_conflicts: u64,
    /// Free packet buffers.
    pub buffers_free: u64,
    /// All packet buffers.
    pub buffers: u64,
    /// Number of times that netlink messages were lost and all kernel state was read again.
    pub netlink_resyncs: u64,
}

/// Packets and bytes in both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Packets received.
    pub received_packets: u64,
    /// Bytes received.
    pub received_bytes: u64,
    /// Packets sent.
    pub sent_packets: u64,
    /// Bytes sent.
    pub sent_bytes: u64,
}

/// The state of a port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PortStatus {
    /// The interface.
    pub device: String,
    /// The kind of port in use: `af-xdp`, `af-packet`, `tap`, `pcap` or `vlan`.
    pub kind: String,
    /// Why the preferred kind is not in use.
    pub fallback: Option<String>,
    /// Whether packets can be received and sent.
    pub is_up: bool,
    /// Its hardware address.
    pub mac: String,
    /// Its MTU.
    pub mtu_bytes: u16,
    /// Why the MTU is below the one of the cluster file, and the remedy.
    #[serde(default)]
    pub mtu_cut: Option<String>,
    /// Its addresses.
    pub addresses: Vec<IpNet>,
    /// Addresses, the link-local one included, that duplicate address detection still probes.
    pub addresses_tentative: Vec<IpAddr>,
    /// Addresses that are not used because another host has them.
    pub addresses_duplicate: Vec<IpAddr>,
    /// Packets received and sent.
    pub traffic: Traffic,
    /// Dropped packets by reason: received here, or to be sent here.
    pub drops: BTreeMap<String, u64>,
    /// Packets received here that the kernel has received too and handles, by what it does with them: no losses.
    #[serde(default)]
    pub left_to_kernel: BTreeMap<String, u64>,
    /// Frames lost before they reached the router, because the router was too slow.
    pub receive_overflows: u64,
    /// Frames received that the port could not parse.
    pub receive_unusable: u64,
    /// Frames that the device did not accept.
    pub transmit_refused: u64,
}

/// The state of another node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerStatus {
    /// Its name.
    pub node: String,
    /// `up`, `joining` or `down`.
    pub state: String,
    /// Why it is not up, if known.
    pub reason: Option<String>,
    /// Number of destinations that it announces.
    pub routes: u64,
    /// Packets and messages exchanged with it.
    pub traffic: PeerTraffic,
    /// Number of times that the session with it was lost.
    pub losses: u64,
    /// For the last loss: microseconds from its detection until no packet was sent to the node any more.
    pub withdrawn_us: Option<u64>,
}

/// Traffic between two nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerTraffic {
    /// Packets sent.
    pub sent_packets: u64,
    /// Messages that carried the sent packets.
    pub sent_messages: u64,
    /// Packets received.
    pub received_packets: u64,
    /// Messages that carried the received packets.
    pub received_messages: u64,
    /// Packets sent over a third node.
    pub detoured_packets: u64,
    /// Packets of this node that were relayed to a third node.
    pub relayed_packets: u64,
    /// Packets dropped, for any reason.
    pub dropped_packets: u64,
    /// Messages that failed authentication and were dropped.
    #[serde(default)]
    pub forged_messages: u64,
}

/// Packet filters, and who forwards packets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FiltersStatus {
    /// The value of the cluster file: `honour`, `refuse` or `ignore`.
    pub mode: String,
    /// Who forwards packets: `router`, `kernel`, or `closed` for nobody.
    pub path: String,
    /// The filters, in words.
    pub found: Vec<String>,
    /// Why the kernel cannot forward although the mode is `honour`, and the remedy.
    pub obstacle: Option<String>,
}

impl FiltersStatus {
    /// Number of filters that [`FiltersStatus::line`] shows.
    const SHOWN_MAX: usize = 3;

    /// Returns the filters for a line of text: the first ones, and the number of others.
    pub fn shown(&self) -> String {
        let shown = self.found.iter().take(Self::SHOWN_MAX).map(String::as_str).collect::<Vec<_>>().join("; ");
        match self.found.len().saturating_sub(Self::SHOWN_MAX) {
            0 => shown,
            others => format!("{shown}; and {others} more"),
        }
    }

    /// Returns a line that says how packet filters affect forwarding; `None` if there is nothing to say.
    pub fn line(&self) -> Option<String> {
        let (mode, shown) = (&self.mode, self.shown());
        Some(match (mode.as_str(), self.path.as_str(), self.found.is_empty()) {
            ("ignore", _, true) => {
                "filters = \"ignore\": packet filters do not apply to forwarded packets; there are none".to_owned()
            }
            (_, _, true) => return None,
            ("ignore", ..) => {
                format!("filters = \"ignore\": packet filters do not apply to forwarded packets: {shown}")
            }
            (_, "closed", _) => {
                let remedy = "remove them, or set filters = \"honour\" or \"ignore\"";
                let remedy = self.obstacle.as_deref().unwrap_or(remedy);
                format!("filters = \"{mode}\": nothing is forwarded because of packet filters: {shown}; {remedy}")
            }
            _ => format!("filters = \"{mode}\": the kernel forwards because of packet filters: {shown}"),
        })
    }
}

/// Numbers of routes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutesStatus {
    /// IPv4 destinations in the forwarding table.
    pub v4: u64,
    /// IPv6 destinations in the forwarding table.
    pub v6: u64,
    /// Destinations that this node announces.
    pub announced: u64,
    /// Routes to other nodes' destinations that this node installed in its kernel.
    pub installed: u64,
    /// Announced destinations that the forwarding tables have no room for: their packets take a less specific route.
    #[serde(default)]
    pub left_out: u64,
    /// Routes to other nodes' destinations that the kernel has no room for.
    #[serde(default)]
    pub unknown_to_kernel: u64,
    /// Kernel routes rejected, with all or some of their next hops, because the interface is not a port.
    #[serde(default)]
    pub by_no_port: u64,
    /// Kernel routes rejected, with all or some of their next hops, because the kernel encapsulates their packets.
    #[serde(default)]
    pub encapsulated: u64,
    /// Kernel routes accepted without their own MTU.
    #[serde(default)]
    pub mtu_unheeded: u64,
    /// Routes that are used although the kernel does not have them any more, as a routing daemon may be restarting.
    #[serde(default)]
    pub stale: u64,
}

/// Stale routes of a routing daemon that may be restarting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StaleRoutesStatus {
    /// The protocol number of the routes, `rtm_protocol` in rtnetlink(7).
    pub protocol: u8,
    /// Number of routes.
    pub routes: u64,
    /// Milliseconds until they are removed unless they come back.
    pub left_ms: u64,
}

/// A neighbour of a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NeighbourStatus {
    /// The port.
    pub port: String,
    /// Its address.
    pub address: IpAddr,
    /// Its hardware address, once known.
    pub mac: Option<String>,
    /// Its state, as named in RFC 4861.
    pub state: String,
}

/// A route.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Its destination prefix.
    pub to: IpNet,
    /// The lowest metric of all nodes' routes to the prefix.
    pub metric: u32,
    /// What is done with packets.
    pub kind: RouteKind,
    /// Equal-cost next hops of a unicast route; none while the routes of a lost node are being withdrawn.
    pub hops: Vec<RouteHop>,
    /// The tables have no room for the route: packets take a less specific route, or none.
    #[serde(default)]
    pub is_left_out: bool,
}

/// A next hop outside the cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RouteHop {
    /// The egress node.
    pub node: String,
    /// The egress port; `kernel` for the node itself.
    pub port: String,
    /// The adjacency at that node; 0 if the destination is on the port's network.
    pub adjacency: u16,
    /// Share of the flows, relative to the other next hops.
    pub weight: u16,
}

/// One step of a traced packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedStep {
    /// Time since the node started, in nanoseconds.
    pub time_ns: u64,
    /// The packet's source.
    pub source: IpAddr,
    /// Its destination.
    pub destination: IpAddr,
    /// IP protocol number.
    pub protocol: u8,
    /// UDP or TCP source port, otherwise 0.
    pub source_port: u16,
    /// UDP or TCP destination port, otherwise 0.
    pub destination_port: u16,
    /// Description of the step.
    pub step: String,
}
