//! Packet tracing: packets that a [`Filter`] matches take the slow path, which records each step.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use packet::flow::Flow;
use packet::{Protocol, ipv4, ipv6};

use crate::{AdjacencyId, DropReason, Hop, NodeId, PortId, Time};

/// Selects the packets to trace. Fields that are `None` match all packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Source network.
    pub source: Option<IpNet>,
    /// Destination network.
    pub destination: Option<IpNet>,
    /// Upper-layer protocol.
    pub protocol: Option<Protocol>,
    /// Source or destination port of TCP, UDP and similar protocols.
    pub transport_port: Option<u16>,
    /// Maximum number of packets to trace.
    pub packets_max: u32,
}

impl Filter {
    /// Matches every packet, up to `packets_max`.
    pub fn all(packets_max: u32) -> Filter {
        Filter { source: None, destination: None, protocol: None, transport_port: None, packets_max }
    }

    /// Returns whether packets of this flow match.
    pub fn matches(&self, flow: &Flow) -> bool {
        let contains = |network: &Option<IpNet>, address: &IpAddr| network.is_none_or(|net| net.contains(address));
        contains(&self.source, &flow.source)
            && contains(&self.destination, &flow.destination)
            && self.protocol.is_none_or(|protocol| protocol == flow.protocol)
            && self.transport_port.is_none_or(|port| port == flow.source_port || port == flow.destination_port)
    }
}

/// A recorded step of a traced packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TracedStep {
    /// Time of the step.
    pub time: Time,
    /// Flow of the packet.
    pub flow: Flow,
    /// The step.
    pub step: Step,
}

/// A step of a packet through the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Received at a port.
    Received(PortId),
    /// Received from the node's kernel.
    FromKernel,
    /// Received from another node.
    FromNode,
    /// Generated here: a reply or an error.
    Generated,
    /// Looked up in the FIB.
    LookedUp {
        /// Selected hop.
        hop: Hop,
        /// Number of equal-cost hops.
        hops: u16,
    },
    /// Sent to another node.
    ToNode(NodeId),
    /// Delivered to the node's kernel.
    ToKernel,
    /// Sent out of a port.
    Sent(PortId),
    /// Queued for address resolution of a neighbour.
    AwaitsNeighbour(PortId, AdjacencyId),
    /// Split into this number of fragments.
    Fragmented(u16),
    /// An ICMP error about the packet was generated: type and code.
    IcmpErrorSent(u8, u8),
    /// Dropped.
    Dropped(DropReason),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Received(port) => write!(f, "received at port {}", port.0),
            Step::FromKernel => f.write_str("from the kernel"),
            Step::FromNode => f.write_str("from another node"),
            Step::Generated => f.write_str("made here"),
            Step::LookedUp { hop, hops } => {
                let Hop { node, port, adjacency } = hop;
                write!(f, "looked up: node {}, port {}, adjacency {}, of {hops} equal", node.0, port.0, adjacency.0)
            }
            Step::ToNode(node) => write!(f, "to node {}", node.0),
            Step::ToKernel => f.write_str("to the kernel"),
            Step::Sent(port) => write!(f, "sent by port {}", port.0),
            Step::AwaitsNeighbour(port, adjacency) => {
                write!(f, "waits for neighbour {} of port {}", adjacency.0, port.0)
            }
            Step::Fragmented(fragments) => write!(f, "cut into {fragments} fragments"),
            Step::IcmpErrorSent(kind, code) => write!(f, "answered by ICMP {kind}/{code}"),
            Step::Dropped(reason) => write!(f, "dropped: {reason}"),
        }
    }
}

/// Returns the flow of an IP packet, or `None` for anything else.
pub(crate) fn flow_of(bytes: &[u8]) -> Option<Flow> {
    match bytes.first()? >> 4 {
        4 => ipv4::Packet::new_checked(bytes).ok().map(|packet| Flow::from_v4(&packet)),
        6 => ipv6::Packet::new_checked(bytes).ok().map(|packet| Flow::from_v6(&packet)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(text: &str, ports: (u16, u16)) -> Flow {
        let (source, destination) = text.split_once(' ').expect("two addresses");
        let (source, destination) = (source.parse().expect("an address"), destination.parse().expect("an address"));
        Flow { source, destination, protocol: Protocol::TCP, source_port: ports.0, destination_port: ports.1 }
    }

    #[test]
    fn a_filter_matches_its_fields_and_ignores_those_that_are_none() {
        let all = Filter::all(1);
        let http = flow("10.0.0.1 192.0.2.7", (5000, 80));
        assert!(all.matches(&http) && all.matches(&flow("2001:db8::1 2001:db8::2", (0, 0))));
        let net = |text: &str| Some(text.parse().expect("a network"));
        assert!(Filter { source: net("10.0.0.0/8"), ..all }.matches(&http));
        assert!(!Filter { destination: net("10.0.0.0/8"), ..all }.matches(&http));
        assert!(!Filter { source: net("::/0"), ..all }.matches(&http), "another family");
        assert!(Filter { transport_port: Some(80), ..all }.matches(&http.reversed()), "either port");
        assert!(!Filter { transport_port: Some(443), ..all }.matches(&http));
        assert!(!Filter { protocol: Some(Protocol::UDP), ..all }.matches(&http));
    }
}
