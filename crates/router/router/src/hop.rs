//! Next hops: the egress node, its port and the adjacency there.

/// Maximum number of nodes in a cluster.
pub const NODES_MAX: u8 = 8;

/// Maximum number of ports of a node.
pub const PORTS_MAX: u8 = 64;

/// A node of the cluster: its index in `cluster.toml`, 0 to [`NODES_MAX`] - 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u8);

/// A port of a node, 0 to [`PORTS_MAX`] - 1, or one of the special values below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub u8);

impl PortId {
    /// The kernel of the node: local delivery.
    pub const KERNEL: PortId = PortId(u8::MAX);

    /// No port: the route drops packets, as [`Hop::BLACKHOLE`] and similar hops state.
    pub const NOWHERE: PortId = PortId(u8::MAX - 1);

    /// Returns whether this is a port, neither [`PortId::KERNEL`] nor [`PortId::NOWHERE`].
    #[inline]
    pub const fn is_real(self) -> bool {
        self.0 < PORTS_MAX
    }
}

/// An adjacency: the number of a neighbour in the table of the egress node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AdjacencyId(pub u16);

impl AdjacencyId {
    /// The glean adjacency: the destination is on the port's network, and is itself the neighbour.
    pub const ON_LINK: AdjacencyId = AdjacencyId(0);

    /// With [`PortId::KERNEL`]: the address belongs to the router itself, on a port without a kernel. The router
    /// answers echo requests, and provides no other service.
    pub const ROUTER: AdjacencyId = AdjacencyId(1);
}

/// A next hop: the result of a lookup at the ingress node, and all that the egress node needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Hop {
    /// Egress node.
    pub node: NodeId,
    /// Egress port.
    pub port: PortId,
    /// Adjacency at that port.
    pub adjacency: AdjacencyId,
}

impl Hop {
    /// Drops packets silently.
    pub const BLACKHOLE: Hop = Hop::nowhere(0);

    /// Drops packets with an ICMP error *host unreachable*.
    pub const UNREACHABLE: Hop = Hop::nowhere(1);

    /// Drops packets with an ICMP error *administratively prohibited*.
    pub const PROHIBITED: Hop = Hop::nowhere(2);

    /// Drops packets as if there were no route: hides less specific routes.
    pub const NO_ROUTE: Hop = Hop::nowhere(3);

    const fn nowhere(how: u16) -> Hop {
        Hop { node: NodeId(0), port: PortId::NOWHERE, adjacency: AdjacencyId(how) }
    }

    /// Returns the hop to the kernel of a node.
    pub const fn kernel(node: NodeId) -> Hop {
        Hop { node, port: PortId::KERNEL, adjacency: AdjacencyId::ON_LINK }
    }

    /// Returns the hop to the router of a node itself, see [`AdjacencyId::ROUTER`].
    pub const fn router(node: NodeId) -> Hop {
        Hop { node, port: PortId::KERNEL, adjacency: AdjacencyId::ROUTER }
    }

    /// Returns the hop to the host on the port's network that has the destination address.
    pub const fn on_link(node: NodeId, port: PortId) -> Hop {
        Hop { node, port, adjacency: AdjacencyId::ON_LINK }
    }
}

/// Encodes a hop for the forwarding table: node, port and adjacency from the highest byte down.
impl From<Hop> for u32 {
    #[inline]
    fn from(hop: Hop) -> u32 {
        u32::from(hop.node.0) << 24 | u32::from(hop.port.0) << 16 | u32::from(hop.adjacency.0)
    }
}

impl From<u32> for Hop {
    #[inline]
    fn from(word: u32) -> Hop {
        let [node, port, ..] = word.to_be_bytes();
        Hop { node: NodeId(node), port: PortId(port), adjacency: AdjacencyId(word as u16) }
    }
}
