//! The outputs of a forwarder: packets to ports, to other nodes and to the node's kernel, and events.

use std::collections::VecDeque;
use std::net::IpAddr;

use packet::ethernet::MacAddress;

use crate::{AdjacencyId, Hop, NODES_MAX, NodeId, PORTS_MAX, Packet, PortId, TracedStep};

/// An IP packet between nodes, with its next hop.
#[derive(Debug, PartialEq, Eq)]
pub struct RoutedPacket {
    /// Next hop.
    pub hop: Hop,
    /// Symmetric hash of the flow; packets with the same hash stay in order.
    pub flow: u32,
    /// The packet, from the IP header on.
    pub packet: Packet,
}

/// An event for the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A neighbour was confirmed: a host route for the cluster.
    NeighbourUp {
        /// Port of the neighbour.
        port: PortId,
        /// Address of the neighbour.
        address: IpAddr,
        /// Adjacency to announce with the route.
        adjacency: AdjacencyId,
    },
    /// A confirmed neighbour is gone.
    NeighbourDown {
        /// Port of the neighbour.
        port: PortId,
        /// Address of the neighbour.
        address: IpAddr,
        /// Adjacency that was announced.
        adjacency: AdjacencyId,
    },
    /// Another host uses a configured address, which is therefore not used.
    Duplicate {
        /// Port with the address.
        port: PortId,
        /// Address in conflict.
        address: IpAddr,
        /// MAC address of the other host, if known.
        mac: Option<MacAddress>,
    },
    /// Another host uses an address of this node, which keeps it.
    Conflict {
        /// Port with the address.
        port: PortId,
        /// Address in conflict.
        address: IpAddr,
        /// MAC address of the other host, if known.
        mac: Option<MacAddress>,
    },
}

/// Queues that a [`crate::Forwarder`] fills and a node drains. All are bounded and allocate only in [`Output::new`].
#[derive(Debug)]
pub struct Output {
    /// Transmit queues by port; frames of a VLAN port are in the queue of its parent.
    pub to_ports: Vec<VecDeque<Packet>>,
    /// Packets to other nodes, by node.
    pub to_nodes: Vec<VecDeque<RoutedPacket>>,
    /// IP packets to the node's kernel.
    pub to_kernel: VecDeque<Packet>,
    /// Events, oldest first.
    pub events: VecDeque<Event>,
    /// Whether events were lost because their queue was full; read [`crate::Forwarder::neighbours`] instead.
    pub events_lost: bool,
    /// Steps of traced packets, oldest first; steps that exceed the queue are lost.
    pub traced: VecDeque<TracedStep>,
    pub(crate) queue_packets_max: usize,
}

/// Maximum number of queued events.
pub(crate) const EVENTS_MAX: usize = 1 << 13;

/// Maximum number of queued steps of traced packets.
pub(crate) const TRACED_STEPS_MAX: usize = 1 << 10;

impl Output {
    /// Creates empty queues for `queue_packets_max` packets each.
    pub fn new(queue_packets_max: usize) -> Output {
        Output {
            to_ports: (0..PORTS_MAX).map(|_| VecDeque::with_capacity(queue_packets_max)).collect(),
            to_nodes: (0..NODES_MAX).map(|_| VecDeque::with_capacity(queue_packets_max)).collect(),
            to_kernel: VecDeque::with_capacity(queue_packets_max),
            events: VecDeque::with_capacity(EVENTS_MAX),
            events_lost: false,
            traced: VecDeque::with_capacity(TRACED_STEPS_MAX),
            queue_packets_max,
        }
    }

    /// Returns the transmit queue of a port.
    pub fn to_port(&mut self, port: PortId) -> &mut VecDeque<Packet> {
        &mut self.to_ports[usize::from(port.0)]
    }

    /// Returns the queue to a node.
    pub fn to_node(&mut self, node: NodeId) -> &mut VecDeque<RoutedPacket> {
        &mut self.to_nodes[usize::from(node.0)]
    }

    pub(crate) fn trace(&mut self, step: TracedStep) {
        if self.traced.len() < TRACED_STEPS_MAX {
            self.traced.push_back(step);
        }
    }

    pub(crate) fn push_event(&mut self, event: Event) {
        if self.events.len() < EVENTS_MAX {
            self.events.push_back(event);
        } else {
            self.events_lost = true;
        }
    }
}
