//! What the kernel says of itself, in the router's words.

use std::net::IpAddr;

use ipnet::IpNet;
use packet::ethernet::MacAddress;

use crate::InterfaceIndex;

/// The routing protocol number of routes that the router itself puts into the kernel: none that `linux/rtnetlink.h` or
/// a routing daemon gives a meaning to. Zebra takes routes of its own daemons' numbers, 186 to 192, for left over.
pub const PROTOCOL_CROSSLANE: u8 = 119;

/// What is different from what the last changes said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// An interface came or changed.
    Link(Link),
    /// An interface went.
    LinkGone(InterfaceIndex),
    /// An address came or changed.
    Address(Address),
    /// An address went.
    AddressGone {
        /// Where it was.
        interface: InterfaceIndex,
        /// The address, and the length of its network's prefix.
        network: IpNet,
    },
    /// A route came or changed.
    Route(Route),
    /// A route went.
    RouteGone(RouteKey),
    /// A neighbour came or changed.
    Neighbour(Neighbour),
    /// A neighbour went.
    NeighbourGone {
        /// Where it was.
        interface: InterfaceIndex,
        /// Whose hardware address was known or asked for.
        address: IpAddr,
    },
}

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The kernel's number.
    pub index: InterfaceIndex,
    /// The kernel's name, at most 15 bytes.
    pub name: String,
    /// Its hardware address, where that is an Ethernet one.
    pub mac: Option<MacAddress>,
    /// The longest IP packet that it carries.
    pub mtu_bytes: u32,
    /// Set up by its administrator.
    pub is_up: bool,
    /// The line works.
    pub has_carrier: bool,
}

/// An address of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Where it is.
    pub interface: InterfaceIndex,
    /// The address, and the length of its network's prefix. On a line between two, the prefix is the other end's.
    pub network: IpNet,
    /// The other end of a line between two.
    pub peer: Option<IpAddr>,
    /// It is this node's for sure: no duplicate of it is looked for, and none was found.
    pub is_usable: bool,
}

/// Which routes stand for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RouteKey {
    /// To where.
    pub prefix: IpNet,
    /// The lowest one of a prefix counts.
    pub metric: u32,
}

/// A route of the main table that the router did not put there itself. Where the kernel has several under one key, the
/// one that it uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// To where, and how good.
    pub key: RouteKey,
    /// Who made it: 2 is the kernel, 4 an administrator, 186 BGP, ... (`/etc/iproute2/rt_protos`).
    pub protocol: u8,
    /// What becomes of a packet.
    pub kind: RouteKind,
    /// Equal ways, sorted; none unless the kind is [`RouteKind::Unicast`] or [`RouteKind::Local`].
    pub hops: Vec<RouteHop>,
    /// The longest packet that is to take it, where that is not its interface's.
    pub mtu_bytes: Option<u32>,
}

/// What a route does with packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RouteKind {
    /// Sends them on.
    Unicast,
    /// Takes them as for an address of the node's, although none is configured (AnyIP): a route of an administrator's
    /// in table local, which is looked in before main. Those of addresses are not told as routes.
    Local,
    /// Drops them.
    Blackhole,
    /// Drops them, and says so to the sender.
    Unreachable,
    /// Drops them, and says to the sender that it is forbidden.
    Prohibit,
    /// Ends the search in this table: to a router that has no other, as if there were no route, and no wider one.
    Throw,
}

/// One way of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RouteHop {
    /// Out of which interface.
    pub interface: InterfaceIndex,
    /// To whom; `None` when the destination itself is a neighbour.
    pub gateway: Option<IpAddr>,
    /// How many parts of the flows, 1 to 256.
    pub weight: u16,
    /// In which the kernel wraps packets: MPLS, SRv6, a tunnel without an interface.
    pub is_encapsulated: bool,
}

/// What the kernel knows of a neighbour.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// On which interface.
    pub interface: InterfaceIndex,
    /// Who.
    pub address: IpAddr,
    /// The hardware address, when it is known.
    pub mac: Option<MacAddress>,
    /// How sure the kernel is.
    pub state: NeighbourState,
}

/// How sure the kernel is of a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NeighbourState {
    /// An administrator said so, or the line needs no hardware addresses.
    Permanent,
    /// It has answered once.
    Known,
    /// It has not answered (yet).
    Unresolved,
}
