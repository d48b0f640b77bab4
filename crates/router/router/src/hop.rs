//! Who sends a packet, through what, and to whom.

/// The most nodes of a cluster.
pub const NODES_MAX: u8 = 8;

/// The most ports of a node.
pub const PORTS_MAX: u8 = 64;

/// A node of the cluster: its place in `cluster.toml`, 0 to [`NODES_MAX`] - 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u8);

/// A port of one node, 0 to [`PORTS_MAX`] - 1; or the node itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub u8);

impl PortId {
    /// The node's own kernel: the packet is for an address of the node.
    pub const KERNEL: PortId = PortId(u8::MAX);

    /// Nowhere: the route says that packets end. [`Hop::BLACKHOLE`] and its like say how.
    pub const NOWHERE: PortId = PortId(u8::MAX - 1);

    /// Whether it is a port of a node, neither [`PortId::KERNEL`] nor [`PortId::NOWHERE`].
    #[inline]
    pub const fn is_real(self) -> bool {
        self.0 < PORTS_MAX
    }
}

/// Where a packet goes beyond a port, by the egress node's own numbering: a neighbour whose hardware address is known
/// or being asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AdjacencyId(pub u16);

impl AdjacencyId {
    /// The destination is on the port's own network: the egress node looks at the packet's destination address.
    pub const ON_LINK: AdjacencyId = AdjacencyId(0);

    /// Behind [`PortId::KERNEL`]: the address is the router's own, on a port without a kernel behind it. It answers
    /// echo requests itself, and serves nothing else.
    pub const ROUTER: AdjacencyId = AdjacencyId(1);
}

/// One way out of the cluster: what a lookup at the ingress node finds, and all that the egress node needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Hop {
    /// Who sends the packet.
    pub node: NodeId,
    /// Through what.
    pub port: PortId,
    /// To whom.
    pub adjacency: AdjacencyId,
}

impl Hop {
    /// Packets end here, and nobody is told.
    pub const BLACKHOLE: Hop = Hop::nowhere(0);

    /// Packets end here, and the sender is told that the host is unreachable.
    pub const UNREACHABLE: Hop = Hop::nowhere(1);

    /// Packets end here, and the sender is told that it is not allowed.
    pub const PROHIBITED: Hop = Hop::nowhere(2);

    /// Packets end here as if no route had been found: a route that hides wider ones.
    pub const NO_ROUTE: Hop = Hop::nowhere(3);

    const fn nowhere(how: u16) -> Hop {
        Hop { node: NodeId(0), port: PortId::NOWHERE, adjacency: AdjacencyId(how) }
    }

    /// To this node's kernel.
    pub const fn kernel(node: NodeId) -> Hop {
        Hop { node, port: PortId::KERNEL, adjacency: AdjacencyId::ON_LINK }
    }

    /// To this node's router itself, see [`AdjacencyId::ROUTER`].
    pub const fn router(node: NodeId) -> Hop {
        Hop { node, port: PortId::KERNEL, adjacency: AdjacencyId::ROUTER }
    }

    /// To whoever on the port's own network has the packet's destination address.
    pub const fn on_link(node: NodeId, port: PortId) -> Hop {
        Hop { node, port, adjacency: AdjacencyId::ON_LINK }
    }
}

/// As a forwarding table carries it: node, port and adjacency from the highest byte down.
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
