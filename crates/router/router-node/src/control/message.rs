//! The messages between nodes.

use ipnet::IpNet;
use router::{AdjacencyId, Hop, NODES_MAX, NodeId, PORTS_MAX, PortId};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The version of these messages and of those with packets: all nodes of a cluster have the same.
pub const VERSION: u16 = 5;
/// Bytes of a message at most.
pub const MESSAGE_BYTES_MAX: usize = ::control::MESSAGE_BYTES_MAX;
/// Routes that one message changes at most: so it stays below [`MESSAGE_BYTES_MAX`] whatever they are.
pub const UPDATE_ROUTES_MAX: usize = 512;
/// Equal ways of a route at most.
pub const HOPS_MAX: usize = 16;
/// The metric of neighbours, which is no other route's: a host route that somebody has written stands before what is
/// only known to be there, at every node, as in Linux, which looks for a neighbour after it has chosen a route.
pub const METRIC_NEIGHBOUR: u32 = u32::MAX;
/// Bytes of what an interconnect says in one message at most.
pub const SETUP_BYTES_MAX: usize = 4096;
/// Bytes of a reason at most.
const REASON_BYTES_MAX: usize = 256;

/// Why a connection to another node has ended.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ControlError {
    /// What came is no message.
    #[error("what came is no message of this release: {0}; use one release for all nodes")]
    Malformed(String),
    /// Another release.
    #[error("the other node speaks version {0}, this one {VERSION}; use one release for all nodes")]
    Version(u16),
    /// Another cluster file.
    #[error("the other node goes by another cluster file; give all nodes the same")]
    ConfigMismatch,
    /// A node that must not be there.
    #[error("node {found} greets where node {expected} was expected; give all nodes the same cluster file")]
    UnexpectedNode {
        /// The number that it says.
        found: u8,
        /// What it should be.
        expected: String,
    },
    /// What came first on a connection between machines is not what such a node says.
    #[error("the other end does not seal what it says; use one release, and the same key file, for all nodes")]
    Unauthenticated,
    /// Another key.
    #[error("the other end has another key; give all nodes the same key file")]
    KeyMismatch,
    /// A message is not the one that the other end sealed next.
    #[error("a message was changed, lost or repeated on the way; look who else is on the network between the nodes")]
    InvalidTag,
    /// Something came out of turn.
    #[error("{0} came out of turn")]
    UnexpectedMessage(&'static str),
    /// A route that makes no sense.
    #[error("route to {prefix}: {what}")]
    Route {
        /// Its destinations.
        prefix: IpNet,
        /// What is wrong.
        what: String,
    },
    /// More routes than a node may announce.
    #[error("more than {0} routes of one node")]
    TooManyRoutes(usize),
    /// Nothing came for too long.
    #[error("silent for {0} ms")]
    HoldTimerExpired(u64),
    /// The other node ends.
    #[error("it has ended: {0}")]
    Ceased(String),
    /// The connection is gone.
    #[error("its connection ended{0}")]
    Disconnected(String),
}

/// Who a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`].
    pub version: u16,
    /// What the cluster file says, as a number.
    pub digest: u64,
    /// The node's number.
    pub node: u8,
    /// Which of its runs this is: another one after it was started again.
    pub incarnation: u64,
}

/// One way out, at the node that announces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AnnouncedHop {
    /// Its port; [`PortId::KERNEL`] for itself.
    pub port: u8,
    /// Whom its port sends to.
    pub adjacency: u16,
}

impl AnnouncedHop {
    /// The same, as a hop of the cluster.
    pub fn at(self, node: NodeId) -> Hop {
        Hop { node, port: PortId(self.port), adjacency: AdjacencyId(self.adjacency) }
    }
}

/// Where a node has a route from. Of routes that are equally good, the first of these is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// An address of the node's own.
    Local,
    /// The network of a port.
    Connected,
    /// The cluster file.
    Static,
    /// The node's kernel, from an administrator or a routing daemon.
    Kernel,
    /// A neighbour that has answered, with [`METRIC_NEIGHBOUR`].
    Neighbour,
}

/// What becomes of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouteKind {
    /// They go one of the ways.
    Unicast,
    /// They are dropped.
    Blackhole,
    /// They are dropped, and the sender is told.
    Unreachable,
    /// The sender is told that it is forbidden.
    Prohibited,
    /// As if there were no route, and no wider one either.
    Throw,
}

/// How a node reaches some destinations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnnouncedRoute {
    /// Of several nodes' routes the lowest is taken.
    pub metric: u32,
    /// Where it is from.
    pub origin: Origin,
    /// What becomes of packets.
    pub kind: RouteKind,
    /// Equal ways, for those that go one.
    pub hops: Vec<AnnouncedHop>,
}

/// What has changed of a node's routes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteChange {
    /// Which destinations.
    pub prefix: IpNet,
    /// How they are reached from now on; not at all without it.
    pub announced: Option<AnnouncedRoute>,
}

impl RouteChange {
    /// Checks what another node said.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self, ports: usize) -> Result<(), ControlError> {
        let wrong = |what: String| Err(ControlError::Route { prefix: self.prefix, what });
        if self.prefix.trunc() != self.prefix {
            return wrong("bits beyond its length".to_owned());
        }
        let Some(announced) = &self.announced else { return Ok(()) };
        let (count, is_unicast) = (announced.hops.len(), announced.kind == RouteKind::Unicast);
        if count > HOPS_MAX || is_unicast != (count > 0) {
            return wrong(format!("{count} equal ways, at most {HOPS_MAX}, and none where packets are dropped"));
        }
        assert!(ports <= usize::from(PORTS_MAX));
        let is_peer_authenticated = |hop: &AnnouncedHop| hop.port == PortId::KERNEL.0 || usize::from(hop.port) < ports;
        match announced.hops.iter().find(|hop| !is_peer_authenticated(hop)) {
            Some(hop) => wrong(format!("by port {}, of {ports}", hop.port)),
            None => Ok(()),
        }
    }
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// The first of both.
    Hello(Hello),
    /// The sender is there.
    Keepalive,
    /// The longest packet of each of its ports; 0 of those that are down.
    PortMtus(Vec<u16>),
    /// Its routes have changed.
    RouteUpdate(Vec<RouteChange>),
    /// What its interconnect says to the other's.
    InterconnectSetup(Vec<u8>),
    /// It ends.
    Cease(String),
}

impl Message {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let bytes = postcard::to_stdvec(self).unwrap_or_else(|error| panic!("a message of numbers and text: {error}"));
        assert!(bytes.len() <= MESSAGE_BYTES_MAX, "a message of {} bytes", bytes.len());
        bytes
    }

    /// From bytes that another node sent.
    pub fn decode(bytes: &[u8]) -> Result<Message, ControlError> {
        let malformed = |what: &str| ControlError::Malformed(what.to_owned());
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(malformed("it is too long"));
        }
        let (message, rest) =
            postcard::take_from_bytes::<Message>(bytes).map_err(|error| malformed(&error.to_string()))?;
        if !rest.is_empty() {
            return Err(malformed("more bytes than it has"));
        }
        match &message {
            Message::RouteUpdate(changes) if changes.len() > UPDATE_ROUTES_MAX => Err(malformed("too many routes")),
            Message::PortMtus(mtus) if mtus.len() > usize::from(PORTS_MAX) => Err(malformed("too many ports")),
            Message::InterconnectSetup(bytes) if bytes.len() > SETUP_BYTES_MAX => Err(malformed("too much wiring")),
            Message::Cease(reason) if reason.len() > REASON_BYTES_MAX => Err(malformed("too long a reason")),
            Message::Hello(Hello { version, .. }) if *version != VERSION => Err(ControlError::Version(*version)),
            Message::Hello(Hello { node, .. }) if *node >= NODES_MAX => {
                Err(ControlError::UnexpectedNode { found: *node, expected: format!("0 to {}", NODES_MAX - 1) })
            }
            _ => Ok(message),
        }
    }

    /// A good-bye, shortened to what it may be.
    pub fn cease(reason: &str) -> Message {
        let end = (0..=REASON_BYTES_MAX.min(reason.len())).rev().find(|end| reason.is_char_boundary(*end));
        Message::Cease(reason[..end.unwrap_or(0)].to_owned())
    }
}
