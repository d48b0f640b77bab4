//! What comes out of a forwarder: packets to ports, to other nodes and to the node's kernel, and news.

use std::collections::VecDeque;
use std::net::IpAddr;

use packet::ethernet::MacAddress;

use crate::{AdjacencyId, Hop, NODES_MAX, NodeId, PORTS_MAX, Packet, PortId, TracedStep};

/// An IP packet that another node sends, or this one for another.
#[derive(Debug, PartialEq, Eq)]
pub struct RoutedPacket {
    /// By whom, through what and to whom.
    pub hop: Hop,
    /// The symmetric hash of its flow: packets of one flow have the same, and stay in order.
    pub flow: u32,
    /// From the IP header on.
    pub packet: Packet,
}

/// What the control plane should know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A neighbour on a network of the port's is known: a host route for the cluster.
    NeighbourUp {
        /// Through what.
        port: PortId,
        /// The neighbour.
        address: IpAddr,
        /// To be announced with the route.
        adjacency: AdjacencyId,
    },
    /// It is no longer.
    NeighbourDown {
        /// Through what.
        port: PortId,
        /// The neighbour.
        address: IpAddr,
        /// As it was announced.
        adjacency: AdjacencyId,
    },
    /// Somebody else has an own address: it is not used.
    Duplicate {
        /// On which port's network.
        port: PortId,
        /// The address.
        address: IpAddr,
        /// Who has it, where that was said.
        mac: Option<MacAddress>,
    },
    /// Somebody else uses an address that this node uses, and goes on using.
    Conflict {
        /// On which port's network.
        port: PortId,
        /// The address.
        address: IpAddr,
        /// Who uses it, where that was said.
        mac: Option<MacAddress>,
    },
}

/// Queues that a [`crate::Forwarder`] fills and a node empties. None grows beyond its bound, and none allocates after
/// [`Output::new`].
#[derive(Debug)]
pub struct Output {
    /// Frames for each port of the node's own; those of a VLAN's port are in its parent's queue.
    pub to_ports: Vec<VecDeque<Packet>>,
    /// For each other node.
    pub to_nodes: Vec<VecDeque<RoutedPacket>>,
    /// IP packets for the node's own kernel.
    pub to_kernel: VecDeque<Packet>,
    /// News, oldest first.
    pub events: VecDeque<Event>,
    /// News were lost, for nobody took them: look at [`crate::Forwarder::neighbours`] instead.
    pub events_lost: bool,
    /// What became of packets that are traced, oldest first; what does not fit is not told.
    pub traced: VecDeque<TracedStep>,
    pub(crate) queue_packets_max: usize,
}

/// The most news that wait.
pub(crate) const EVENTS_MAX: usize = 1 << 13;

/// The most steps of traced packets that wait.
pub(crate) const TRACED_STEPS_MAX: usize = 1 << 10;

impl Output {
    /// Empty queues of `queue_packets_max` packets each.
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

    /// Frames that wait for this port.
    pub fn to_port(&mut self, port: PortId) -> &mut VecDeque<Packet> {
        &mut self.to_ports[usize::from(port.0)]
    }

    /// Packets that wait for this node.
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
