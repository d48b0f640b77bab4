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
}

/// Where a packet goes beyond a port, by the egress node's own numbering: a neighbour whose hardware address is known
/// or being asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AdjacencyId(pub u16);

impl AdjacencyId {
    /// The destination is on the port's own network: the egress node looks at the packet's destination address.
    pub const ON_LINK: AdjacencyId = AdjacencyId(0);
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
