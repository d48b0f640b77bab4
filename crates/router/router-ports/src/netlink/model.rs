//! The kernel's links, addresses, routes and neighbours, as the router models them.

use std::net::IpAddr;

use ipnet::IpNet;
use packet::ethernet::MacAddress;

use crate::InterfaceIndex;

/// The routing protocol number of routes that the router installs in the kernel; neither `linux/rtnetlink.h` nor a
/// routing daemon uses it. Zebra treats routes with the numbers of its own daemons, 186 to 192, as left over from an
/// earlier run.
pub const PROTOCOL_CROSSLANE: u8 = 119;

/// A difference from the last reported state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// An interface was added or changed.
    Link(Link),
    /// An interface was removed.
    LinkGone(InterfaceIndex),
    /// An address was added or changed.
    Address(Address),
    /// An address was removed.
    AddressGone {
        /// Its interface.
        interface: InterfaceIndex,
        /// The address, and the prefix length of its network.
        network: IpNet,
    },
    /// A route was added or changed.
    Route(Route),
    /// A route was removed.
    RouteGone(RouteKey),
    /// A neighbour was added or changed.
    Neighbour(Neighbour),
    /// A neighbour was removed.
    NeighbourGone {
        /// Its interface.
        interface: InterfaceIndex,
        /// Its IP address.
        address: IpAddr,
    },
}

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The kernel's index.
    pub index: InterfaceIndex,
    /// The kernel's name, at most 15 bytes.
    pub name: String,
    /// The hardware address, if it is an Ethernet address.
    pub mac: Option<MacAddress>,
    /// The MTU: the longest IP packet that it carries, in bytes.
    pub mtu_bytes: u32,
    /// Whether it is administratively up.
    pub is_up: bool,
    /// Whether it has a carrier.
    pub has_carrier: bool,
    /// The interface that it belongs to, such as a bridge, a bond or a VRF.
    pub controller: Option<InterfaceIndex>,
}

/// An address of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Its interface.
    pub interface: InterfaceIndex,
    /// The address, and the prefix length of its network. On a point-to-point link, the prefix is that of the peer.
    pub network: IpNet,
    /// The peer of a point-to-point link.
    pub peer: Option<IpAddr>,
    /// Whether the address can be used: duplicate address detection is not in progress and has not failed.
    pub is_usable: bool,
}

/// The key of a route: of routes with the same key, the kernel uses one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RouteKey {
    /// The destination prefix.
    pub prefix: IpNet,
    /// The metric; the kernel prefers the lowest one of a prefix.
    pub metric: u32,
}

/// A route of the main table that was not installed by the router. If the kernel has several with the same key, this is
/// the one that it uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The destination and the metric.
    pub key: RouteKey,
    /// The routing protocol that installed it: 2 is the kernel, 4 an administrator, 186 BGP, ...
    /// (`/etc/iproute2/rt_protos`).
    pub protocol: u8,
    /// What the route does with packets.
    pub kind: RouteKind,
    /// The next hops, sorted; empty unless the kind is [`RouteKind::Unicast`] or [`RouteKind::Local`].
    pub hops: Vec<RouteHop>,
    /// The MTU of the route, if it differs from that of the interface.
    pub mtu_bytes: Option<u32>,
}

/// What a route does with packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RouteKind {
    /// Forwards them.
    Unicast,
    /// Delivers them locally, as for an address of the node, although none is configured (AnyIP). These are routes of
    /// an administrator in table local, which is searched before main; the kernel's own routes for addresses are not
    /// reported.
    Local,
    /// Drops them.
    Blackhole,
    /// Drops them, and reports to the sender that the destination is unreachable.
    Unreachable,
    /// Drops them, and reports to the sender that communication is prohibited.
    Prohibit,
    /// Ends the lookup in this table. For a router without other tables this means that there is no route, even if a
    /// shorter prefix matches.
    Throw,
}

/// A next hop of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RouteHop {
    /// The output interface.
    pub interface: InterfaceIndex,
    /// The gateway; `None` if the destination itself is a neighbour.
    pub gateway: Option<IpAddr>,
    /// The weight of the next hop in the distribution of flows, 1 to 256.
    pub weight: u16,
    /// Whether the kernel encapsulates packets: MPLS, SRv6, a tunnel without an interface.
    pub is_encapsulated: bool,
}

/// An entry of the kernel's neighbour table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// Its interface.
    pub interface: InterfaceIndex,
    /// Its IP address.
    pub address: IpAddr,
    /// The hardware address, if it is known.
    pub mac: Option<MacAddress>,
    /// The state of the entry.
    pub state: NeighbourState,
}

/// The state of a neighbour entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NeighbourState {
    /// Configured by an administrator, or the link needs no hardware addresses.
    Permanent,
    /// The neighbour has answered.
    Known,
    /// The neighbour has not answered, or not yet.
    Unresolved,
}
