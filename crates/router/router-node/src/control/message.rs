//! The messages between nodes.

use ipnet::IpNet;
use router::{AdjacencyId, Hop, NODES_MAX, NodeId, PORTS_MAX, PortId};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Version of these messages and of those that carry packets. All nodes of a cluster need the same.
pub const VERSION: u16 = 7;
/// Maximum length of a message in bytes.
pub const MESSAGE_BYTES_MAX: usize = ::control::MESSAGE_BYTES_MAX;
/// Maximum number of routes in one update, which keeps it below [`MESSAGE_BYTES_MAX`].
pub const UPDATE_ROUTES_MAX: usize = 512;
/// Maximum number of equal-cost next hops of a route.
pub const HOPS_MAX: usize = 16;
/// The metric of neighbours, which no other route has: every node prefers any host route to a neighbour. Linux behaves
/// in the same way, as it looks up the neighbour after the route.
pub const METRIC_NEIGHBOUR: u32 = u32::MAX;
/// Maximum length of an interconnect setup message in bytes.
pub const SETUP_BYTES_MAX: usize = 4096;
/// Maximum length of a reason in bytes.
const REASON_BYTES_MAX: usize = 256;

/// Why a session with another node has ended.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ControlError {
    /// The bytes received are not a valid message.
    #[error("invalid message: {0}; run the same release on all nodes")]
    Malformed(String),
    /// The peer runs another version.
    #[error("the peer has protocol version {0}, this node {VERSION}; run the same release on all nodes")]
    Version(u16),
    /// The peer has another cluster file.
    #[error("the peer has a different cluster file; give all nodes the same file")]
    ConfigMismatch,
    /// The hello names a node that cannot be the peer.
    #[error("hello of node {found} where node {expected} was expected; give all nodes the same cluster file")]
    UnexpectedNode {
        /// The number in the hello.
        found: u8,
        /// The expected number.
        expected: String,
    },
    /// The first message on a TCP connection is not an authenticated one.
    #[error("the peer does not authenticate its messages; run the same release with the same key file on all nodes")]
    Unauthenticated,
    /// The peer has another key.
    #[error("the peer has another key; give all nodes the same key file")]
    KeyMismatch,
    /// A message is not the next one that the peer sealed.
    #[error("a message was modified, lost or replayed in transit; check what else is on the network between the nodes")]
    InvalidTag,
    /// A message that is not allowed in the current state.
    #[error("unexpected message: {0}")]
    UnexpectedMessage(&'static str),
    /// An invalid route.
    #[error("route to {prefix}: {what}")]
    Route {
        /// Its destination prefix.
        prefix: IpNet,
        /// What is invalid.
        what: String,
    },
    /// More routes than a node may announce.
    #[error("more than {0} routes of one node")]
    TooManyRoutes(usize),
    /// No message was received within the hold time, in milliseconds.
    #[error("hold timer expired: silent for {0} ms")]
    HoldTimerExpired(u64),
    /// The peer ended the session.
    #[error("it ended the session: {0}")]
    Ceased(String),
    /// The connection was closed.
    #[error("its connection ended{0}")]
    Disconnected(String),
}

/// Identifies a node at the beginning of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`].
    pub version: u16,
    /// Digest of the cluster file.
    pub digest: u64,
    /// The node's number.
    pub node: u8,
    /// Identifies the run of the node: it changes with each start.
    pub incarnation: u64,
    /// The receiver's routes that the sender has kept from an earlier session.
    pub kept: Option<KeptRoutes>,
}

/// Up to which change a node has the routes of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptRoutes {
    /// The run of the other node.
    pub incarnation: u64,
    /// Number of the change; 0 before the first.
    pub change: u64,
}

/// A next hop as the node announces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AnnouncedHop {
    /// The node's port; [`PortId::KERNEL`] for the node itself.
    pub port: u8,
    /// The adjacency of that port.
    pub adjacency: u16,
}

impl AnnouncedHop {
    /// Returns the hop of the cluster for this hop of `node`.
    pub fn at(self, node: NodeId) -> Hop {
        Hop { node, port: PortId(self.port), adjacency: AdjacencyId(self.adjacency) }
    }
}

/// The source of a route. Of routes with equal metrics, the first origin in this order is preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// An address of the node.
    Local,
    /// The connected network of a port.
    Connected,
    /// A static route of the cluster file.
    Static,
    /// A kernel route, set by an administrator or a routing daemon.
    Kernel,
    /// A neighbour that is reachable, with [`METRIC_NEIGHBOUR`].
    Neighbour,
}

/// What is done with packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouteKind {
    /// They are forwarded to one of the next hops.
    Unicast,
    /// They are dropped silently.
    Blackhole,
    /// They are dropped, and the sender receives an ICMP error.
    Unreachable,
    /// They are dropped, and the sender is informed that they are prohibited.
    Prohibited,
    /// They are treated as if there were no route, not even a less specific one.
    Throw,
}

/// A route that a node announces.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AnnouncedRoute {
    /// The lowest metric of all nodes' routes is preferred.
    pub metric: u32,
    /// The source of the route.
    pub origin: Origin,
    /// What is done with packets.
    pub kind: RouteKind,
    /// Equal-cost next hops of a unicast route.
    pub hops: Vec<AnnouncedHop>,
}

/// A change of a node's routes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteChange {
    /// The destination prefix.
    pub prefix: IpNet,
    /// The new route; `None` is a withdrawal.
    pub announced: Option<AnnouncedRoute>,
}

impl RouteChange {
    /// Checks a change that another node sent. `ports` is the maximum number of its ports.
    ///
    /// # Errors
    /// Returns what is invalid.
    pub fn check(&self, ports: usize) -> Result<(), ControlError> {
        let invalid = |what: String| Err(ControlError::Route { prefix: self.prefix, what });
        if self.prefix.trunc() != self.prefix {
            return invalid("address bits beyond the prefix length".to_owned());
        }
        let Some(announced) = &self.announced else { return Ok(()) };
        let (count, is_unicast) = (announced.hops.len(), announced.kind == RouteKind::Unicast);
        if count > HOPS_MAX || is_unicast != (count > 0) {
            return invalid(format!("{count} next hops; a unicast route has 1 to {HOPS_MAX}, other routes have none"));
        }
        assert!(ports <= usize::from(PORTS_MAX));
        let is_valid_port = |hop: &AnnouncedHop| hop.port == PortId::KERNEL.0 || usize::from(hop.port) < ports;
        match announced.hops.iter().find(|hop| !is_valid_port(hop)) {
            Some(hop) => invalid(format!("port {} of at most {ports}", hop.port)),
            None => Ok(()),
        }
    }
}

/// A message of a session. Postcard encodes variants by their position: the order is part of the protocol.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// The first message in each direction.
    Hello(Hello),
    /// Resets the hold timer of the receiver.
    Keepalive,
    /// The MTU of each port of the sender; 0 for a port that is down.
    PortMtus(Vec<u16>),
    /// Changes of the sender's routes, and the number of the last of them.
    RouteUpdate(Vec<RouteChange>, u64),
    /// A message between the interconnects of the two nodes.
    InterconnectSetup(Vec<u8>),
    /// The sender ends the session, with the reason.
    Cease(String),
    /// The updates that follow begin after this change: that of [`Hello::kept`], or 0, with which the receiver forgets
    /// what it has kept.
    RoutesBegin(u64),
}

impl Message {
    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        let bytes = postcard::to_stdvec(self).unwrap_or_else(|error| panic!("a message of numbers and text: {error}"));
        assert!(bytes.len() <= MESSAGE_BYTES_MAX, "a message of {} bytes", bytes.len());
        bytes
    }

    /// Decodes and checks a message of another node.
    pub fn decode(bytes: &[u8]) -> Result<Message, ControlError> {
        let malformed = |what: &str| ControlError::Malformed(what.to_owned());
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(malformed("it exceeds the maximum length"));
        }
        let (message, rest) =
            postcard::take_from_bytes::<Message>(bytes).map_err(|error| malformed(&error.to_string()))?;
        if !rest.is_empty() {
            return Err(malformed("trailing bytes"));
        }
        match &message {
            Message::RouteUpdate(changes, _) if changes.len() > UPDATE_ROUTES_MAX => Err(malformed("too many routes")),
            Message::PortMtus(mtus) if mtus.len() > usize::from(PORTS_MAX) => Err(malformed("too many ports")),
            Message::InterconnectSetup(bytes) if bytes.len() > SETUP_BYTES_MAX => {
                Err(malformed("an interconnect setup message is too long"))
            }
            Message::Cease(reason) if reason.len() > REASON_BYTES_MAX => Err(malformed("the reason is too long")),
            Message::Hello(Hello { version, .. }) if *version != VERSION => Err(ControlError::Version(*version)),
            Message::Hello(Hello { node, .. }) if *node >= NODES_MAX => {
                Err(ControlError::UnexpectedNode { found: *node, expected: format!("0 to {}", NODES_MAX - 1) })
            }
            _ => Ok(message),
        }
    }

    /// Returns a message that ends the session, with the reason truncated to its maximum length.
    pub fn cease(reason: &str) -> Message {
        let end = (0..=REASON_BYTES_MAX.min(reason.len())).rev().find(|end| reason.is_char_boundary(*end));
        Message::Cease(reason[..end.unwrap_or(0)].to_owned())
    }
}
